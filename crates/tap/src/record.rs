//! The record format of a BPF ring, as numbers only: the place and the length of the next record.
//!
//! ```text
//! position (a byte counter that only grows; the place in the ring is position modulo its size)
//! │
//! ├─ 4 bytes: length | BUSY while the producer still writes it | DISCARD when it was given up
//! ├─ 4 bytes: for the kernel
//! ├─ length bytes: the record
//! └─ padding up to a multiple of 8: the next record's position
//! ```
//!
//! This module accesses no memory, so every combination of numbers can be tested. No numbers cause
//! a panic. A result never points outside of `2 * ring_bytes` (the ring, mapped twice in a row so
//! that a record that wraps is still contiguous) nor behind the producer.

/// The bytes before each record; records start at multiples of it.
pub(crate) const HEADER_BYTES: u64 = 8;

const BUSY: u32 = 1 << 31;
const DISCARD: u32 = 1 << 30;

/// The record at the consumer's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A record that is still being written. It and all later ones have to wait.
    Busy,
    /// A record that was given up.
    Skip {
        /// The position of the next record.
        next: u64,
    },
    /// A record.
    Record {
        /// Its place in the twice mapped ring.
        offset: usize,
        /// Its length in bytes.
        length: usize,
        /// The position of the next record.
        next: u64,
    },
}

/// The numbers contradict each other: the ring cannot be read any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the eviction ring is corrupt at position {consumer} (producer {producer}, header {header:x?})")]
pub(crate) struct Corrupt {
    consumer: u64,
    producer: u64,
    header: Option<u32>,
}

/// Returns the place of the next record's header in the mapped ring; `None` if there is no further
/// record.
///
/// `ring_bytes` is a power of two and at least 8.
pub(crate) fn header_offset(consumer: u64, producer: u64, ring_bytes: u64) -> Result<Option<usize>, Corrupt> {
    let pending = producer.wrapping_sub(consumer);
    if pending == 0 {
        return Ok(None);
    }
    if pending > ring_bytes || pending < HEADER_BYTES || !consumer.is_multiple_of(HEADER_BYTES) {
        return Err(Corrupt { consumer, producer, header: None });
    }
    Ok(Some((consumer & (ring_bytes - 1)) as usize))
}

/// Decodes a header that was read at [`header_offset`] of the same numbers.
pub(crate) fn step(header: u32, consumer: u64, producer: u64, ring_bytes: u64) -> Result<Step, Corrupt> {
    if header & BUSY != 0 {
        return Ok(Step::Busy);
    }
    let corrupt = Corrupt { consumer, producer, header: Some(header) };
    let length = u64::from(header & !(BUSY | DISCARD));
    let total = (length + HEADER_BYTES).next_multiple_of(HEADER_BYTES);
    if total > producer.wrapping_sub(consumer) || total > ring_bytes {
        return Err(corrupt);
    }
    let next = consumer.wrapping_add(total);
    if header & DISCARD != 0 {
        return Ok(Step::Skip { next });
    }
    let offset = (consumer & (ring_bytes - 1)) + HEADER_BYTES;
    Ok(Step::Record { offset: offset as usize, length: length as usize, next })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING_BYTES: u64 = 8192;

    #[test]
    fn empty_then_records_then_wrap() {
        assert_eq!(header_offset(0, 0, RING_BYTES), Ok(None));
        assert_eq!(header_offset(8, 24, RING_BYTES), Ok(Some(8)));
        assert_eq!(step(5, 8, 24, RING_BYTES), Ok(Step::Record { offset: 16, length: 5, next: 24 }));
        // The second mapping lets a record extend over the end of the first.
        let at = RING_BYTES - 8;
        assert_eq!(header_offset(at, at + 4120, RING_BYTES), Ok(Some(at as usize)));
        let expected = Step::Record { offset: RING_BYTES as usize, length: 4112, next: at + 4120 };
        assert_eq!(step(4112, at, at + 4120, RING_BYTES), Ok(expected));
    }

    #[test]
    fn busy_waits_and_discarded_is_skipped() {
        assert_eq!(step(BUSY | 8, 0, 16, RING_BYTES), Ok(Step::Busy));
        assert_eq!(step(DISCARD | 8, 0, 16, RING_BYTES), Ok(Step::Skip { next: 16 }));
        assert_eq!(step(0, 0, 8, RING_BYTES), Ok(Step::Record { offset: 8, length: 0, next: 8 }));
    }

    #[test]
    fn contradictions_are_found() {
        assert!(header_offset(16, 8, RING_BYTES).is_err(), "producer behind consumer");
        assert!(header_offset(0, RING_BYTES + 8, RING_BYTES).is_err(), "more than the ring holds");
        assert!(header_offset(4, 20, RING_BYTES).is_err(), "not aligned");
        assert!(header_offset(0, 4, RING_BYTES).is_err(), "half a header");
        assert!(step(9, 0, 16, RING_BYTES).is_err(), "longer than what was produced");
        assert!(step(!(BUSY | DISCARD), 0, RING_BYTES, RING_BYTES).is_err(), "longer than the ring");
    }

    /// Arbitrary numbers: no panic, nothing outside of the mapping, always forward, never past the
    /// producer.
    #[test]
    fn any_numbers() {
        let seed = 0x5eed_0001u64;
        println!("seed {seed:#x}");
        let mut state = seed;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let x = state ^ (state >> 33);
            // Small numbers, numbers near the maximum, and arbitrary ones.
            match x % 4 {
                0 => x >> 50,
                1 => u64::MAX - (x >> 50),
                2 => (x >> 49) & !7,
                _ => x,
            }
        };
        let mut records = 0;
        for _ in 0..300_000 {
            let ring_bytes = 1u64 << (12 + random() % 20);
            let (consumer, header) = (random(), (random() >> 3) as u32);
            let producer = if random() % 2 == 0 { consumer.wrapping_add(random()) } else { random() };
            let Ok(Some(at)) = header_offset(consumer, producer, ring_bytes) else { continue };
            assert!(at as u64 + HEADER_BYTES <= ring_bytes);
            let pending = producer.wrapping_sub(consumer);
            let next = match step(header, consumer, producer, ring_bytes) {
                Ok(Step::Record { offset, length, next }) => {
                    assert!((offset + length) as u64 <= 2 * ring_bytes);
                    records += 1;
                    next
                }
                Ok(Step::Skip { next }) => next,
                Ok(Step::Busy) | Err(_) => continue,
            };
            let moved = next.wrapping_sub(consumer);
            assert!(moved >= HEADER_BYTES && moved <= pending && moved.is_multiple_of(HEADER_BYTES));
        }
        assert!(records > 100, "only {records} records: the numbers are too wild to test anything");
    }
}
