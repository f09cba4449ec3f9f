//! The order in which the reader accesses counters, headers and records, and nothing else.
//!
//! The kernel is the other thread, without a lock between the two. It writes under these rules
//! (kernel/bpf/ringbuf.c). A record's header is marked BUSY before the producer's counter passes it
//! (store-release). The header is exchanged for the final one when the record is complete. The
//! producer's counter is never ahead of the consumer's (load-acquire) by more than the ring.
//!
//! Promises: a record is passed on once, in order, and complete; its place is freed only when
//! `take` has returned. The memory is a trait. So the model checker loom can run this same code
//! against a model of the kernel, with every value that the orderings allow a load to return.

use crate::record::{self, Corrupt, Step};
use std::io;
use std::sync::atomic::Ordering;

/// A word that two threads share: an atomic of the standard library, or of loom.
pub(crate) trait Word<T> {
    fn load(&self, ordering: Ordering) -> T;
    fn store(&self, value: T, ordering: Ordering);
}

/// The memory that the kernel and the reader share.
pub(crate) trait Memory {
    type Word32: Word<u32>;
    type Word64: Word<u64>;
    /// Returns the bytes of the ring: a power of two.
    fn ring_bytes(&self) -> u64;
    fn producer(&self) -> &Self::Word64;
    fn consumer(&self) -> &Self::Word64;
    /// Returns the header at a result of [`record::header_offset`].
    fn header(&self, offset: usize) -> &Self::Word32;
    /// Passes a record that [`record::step`] has found complete, at an offset of the twice mapped
    /// ring, to `look`.
    fn record<T>(&self, offset: usize, length: usize, look: impl FnOnce(&[u8]) -> T) -> T;
}

/// Returns the producer's position. Every record that was reserved before this call is before it.
pub(crate) fn produced(memory: &impl Memory) -> u64 {
    // Pairs with the kernel's store-release after it has marked the reserved record BUSY.
    memory.producer().load(Ordering::Acquire)
}

/// Returns the consumer's position.
pub(crate) fn consumed(memory: &impl Memory) -> u64 {
    // Pairs with the store-release below: a thread that reads a position also sees the effects of
    // `take` on the records before it.
    memory.consumer().load(Ordering::Acquire)
}

/// Passes on the records up to the producer's position at the call, or up to the first one that is
/// still busy. Advances `consumer`, the reader's own copy of the counter. Returns the number of
/// records.
///
/// # Errors
/// If numbers are invalid, or `take` refuses a record. The record stays where it is.
pub(crate) fn consume(
    memory: &impl Memory,
    consumer: &mut u64,
    take: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<usize> {
    let producer = produced(memory);
    let ring_bytes = memory.ring_bytes();
    let invalid = |corrupt: Corrupt| io::Error::new(io::ErrorKind::InvalidData, corrupt);
    let mut taken = 0;
    while let Some(at) = record::header_offset(*consumer, producer, ring_bytes).map_err(invalid)? {
        // Pairs with the kernel's exchange that clears BUSY: the record's contents are read after
        // it.
        let header = memory.header(at).load(Ordering::Acquire);
        let next = match record::step(header, *consumer, producer, ring_bytes).map_err(invalid)? {
            Step::Busy => break,
            Step::Skip { next } => next,
            Step::Record { offset, length, next } => {
                memory.record(offset, length, |bytes| take(*consumer, bytes))?;
                taken += 1;
                next
            }
        };
        *consumer = next;
        // Release: our reads of the record come before the kernel may reuse its place.
        memory.consumer().store(next, Ordering::Release);
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    //! To find out what the model catches, the code was broken, one place at a time. Both tests
    //! found each of these as a read of a record concurrent with its write: a relaxed load of the
    //! producer's counter, or of the header; a relaxed store of the consumer's counter. They also
    //! found a store of the consumer's counter before `take`. The second test found a relaxed load
    //! in `consumed` ("counted before it was dealt with").

    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, AtomicU64};
    use loom::thread;

    /// Two records of one word each: small enough to try everything. The third record takes the
    /// place of the first.
    const RING_BYTES: u64 = 32;
    const RECORD_BYTES: u64 = 16;
    const RECORDS: u64 = 3;
    /// The number of places in an execution at which a thread that could continue is stopped.
    const PREEMPTIONS: usize = 3;
    const BUSY: u32 = 1 << 31;
    const DISCARD: u32 = 1 << 30;

    impl Word<u32> for AtomicU32 {
        fn load(&self, ordering: Ordering) -> u32 {
            AtomicU32::load(self, ordering)
        }
        fn store(&self, value: u32, ordering: Ordering) {
            AtomicU32::store(self, value, ordering);
        }
    }

    impl Word<u64> for AtomicU64 {
        fn load(&self, ordering: Ordering) -> u64 {
            AtomicU64::load(self, ordering)
        }
        fn store(&self, value: u64, ordering: Ordering) {
            AtomicU64::store(self, value, ordering);
        }
    }

    /// A ring of two places. loom reports every read of a record that is not ordered with a write
    /// of it.
    struct Model {
        producer: AtomicU64,
        consumer: AtomicU64,
        headers: [AtomicU32; 2],
        records: [UnsafeCell<[u8; 8]>; 2],
    }

    // SAFETY: loom checks that the cells are not read and written at the same time; that is what
    // the test is for.
    unsafe impl Sync for Model {}
    // SAFETY: as above.
    unsafe impl Send for Model {}

    impl Model {
        fn new() -> Model {
            Model {
                producer: AtomicU64::new(0),
                consumer: AtomicU64::new(0),
                headers: [AtomicU32::new(0), AtomicU32::new(0)],
                records: [UnsafeCell::new([0; 8]), UnsafeCell::new([0; 8])],
            }
        }

        /// The kernel's steps for one record. Only one CPU is modelled, because a lock orders the
        /// kernel's CPUs.
        fn produce(&self, number: u64, given_up: bool) {
            let position = number * RECORD_BYTES;
            // bpf_ringbuf_reserve: the kernel reads the consumer's position with smp_load_acquire.
            while position + RECORD_BYTES - self.consumer.load(Ordering::Acquire) > RING_BYTES {
                thread::yield_now();
            }
            let place = (number % 2) as usize;
            self.headers[place].store(BUSY | 8, Ordering::Relaxed);
            self.producer.store(position + RECORD_BYTES, Ordering::Release); // smp_store_release
            // The program writes the record. SAFETY: the counter moves only after the reader has
            // released the place, which loom checks.
            self.records[place].with_mut(|record| unsafe { *record = [number as u8 + 1; 8] });
            // bpf_ringbuf_commit: xchg, a full barrier.
            self.headers[place].swap(8 | if given_up { DISCARD } else { 0 }, Ordering::SeqCst);
        }
    }

    impl Memory for Model {
        type Word32 = AtomicU32;
        type Word64 = AtomicU64;
        fn ring_bytes(&self) -> u64 {
            RING_BYTES
        }
        fn producer(&self) -> &AtomicU64 {
            &self.producer
        }
        fn consumer(&self) -> &AtomicU64 {
            &self.consumer
        }
        fn header(&self, offset: usize) -> &AtomicU32 {
            &self.headers[offset / RECORD_BYTES as usize]
        }
        fn record<T>(&self, offset: usize, length: usize, look: impl FnOnce(&[u8]) -> T) -> T {
            assert_eq!(length, 8);
            // SAFETY: as in `produce`.
            self.records[offset / RECORD_BYTES as usize].with(|record| look(unsafe { &*record }))
        }
    }

    fn explore(run: impl Fn() + Sync + Send + 'static) {
        let executions = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let counted = executions.clone();
        let mut builder = loom::model::Builder::new();
        // `LOOM_MAX_PREEMPTIONS` sets more; with 4 the test takes half a minute.
        builder.preemption_bound = builder.preemption_bound.or(Some(PREEMPTIONS));
        builder.check(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            run();
        });
        println!("{} executions", executions.load(Ordering::Relaxed));
    }

    #[test]
    fn every_record_once_whole_and_in_order() {
        explore(|| {
            let ring = Arc::new(Model::new());
            let kernel = ring.clone();
            let kernel = thread::spawn(move || (0..RECORDS).for_each(|number| kernel.produce(number, number == 1)));
            let (mut consumer, mut seen) = (0, Vec::new());
            while consumer < RECORDS * RECORD_BYTES {
                let taken = consume(&*ring, &mut consumer, &mut |position, bytes| {
                    assert_eq!(bytes, [(position / RECORD_BYTES) as u8 + 1; 8], "other bytes than written");
                    seen.push(position);
                    Ok(())
                });
                if taken.unwrap() == 0 {
                    thread::yield_now();
                }
            }
            assert_eq!(seen, [0, 2 * RECORD_BYTES], "the one that was given up is stepped over");
            kernel.join().unwrap();
        });
    }

    /// A third thread, such as a READ of the mount, reads both positions. The produced one is never
    /// less than the consumed one, and both only grow. An event counts as consumed only after it
    /// was processed.
    #[test]
    fn positions_tell_the_truth_to_other_threads() {
        explore(|| {
            let ring = Arc::new(Model::new());
            let dealt_with = Arc::new(AtomicU64::new(0));
            let kernel = ring.clone();
            let kernel = thread::spawn(move || (0..2).for_each(|number| kernel.produce(number, false)));
            let (asked, known) = (ring.clone(), dealt_with.clone());
            let asker = thread::spawn(move || {
                let consumed = consumed(&*asked);
                assert!(known.load(Ordering::Relaxed) * RECORD_BYTES >= consumed, "counted before it was dealt with");
                assert!(produced(&*asked) >= consumed, "the consumer is ahead of the producer");
            });
            let mut consumer = 0;
            for _ in 0..2 {
                let taken = consume(&*ring, &mut consumer, &mut |_, _| {
                    dealt_with.store(dealt_with.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                    Ok(())
                });
                taken.unwrap();
            }
            kernel.join().unwrap();
            asker.join().unwrap();
        });
    }
}
