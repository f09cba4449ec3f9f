//! Access for the crate `fuzz` to the decoders of the ring and of the maps. Not part of the
//! interface.

use crate::intf::{self, PEEK_BYTES, Peek, Sighting, TapCounters, TapEvent};
use crate::layout_probe;
use crate::record::{self, Step};
use crate::ring::Ring;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Memory with the layout of a ring's map, and arbitrary contents.
pub struct RingMemory {
    map: OwnedFd,
    shared: OwnedFd,
    ring_bytes: usize,
}

/// The records that were read, as position, length and whether each is an event; and the error that
/// stopped the reader.
pub type Records = (Vec<(u64, usize, bool)>, io::Result<()>);

impl RingMemory {
    /// `ring_bytes` as in [`Ring::new`].
    pub fn new(ring_bytes: usize) -> io::Result<RingMemory> {
        let map = memfd_create("ring", MemfdFlags::CLOEXEC)?;
        ftruncate(&map, (2 * page::PAGE_SIZE + 2 * ring_bytes) as u64)?;
        let shared = memfd_create("shared", MemfdFlags::CLOEXEC)?;
        ftruncate(&shared, page::PAGE_SIZE as u64)?;
        Ok(RingMemory { map, shared, ring_bytes })
    }

    /// Stores `consumer`, `producer` and the ring's bytes (these twice, as the kernel maps them),
    /// and reads all records, `rounds` times.
    pub fn read(&self, consumer: u64, producer: u64, ring: &[u8], rounds: usize) -> io::Result<Records> {
        let ring = &ring[..ring.len().min(self.ring_bytes)];
        let write = |bytes: &[u8], at: usize| rustix::io::pwrite(&self.map, bytes, at as u64);
        write(&consumer.to_ne_bytes(), 0)?;
        write(&producer.to_ne_bytes(), page::PAGE_SIZE)?;
        write(ring, 2 * page::PAGE_SIZE)?;
        write(ring, 2 * page::PAGE_SIZE + self.ring_bytes)?;
        let mut reader = Ring::new(self.map.try_clone()?, self.ring_bytes, self.shared.as_fd())?;
        let mut records = Vec::new();
        for _ in 0..rounds {
            let read = reader.drain(Duration::ZERO, &mut |position, bytes| {
                let sum = bytes.iter().fold(0u64, |sum, byte| sum.rotate_left(1) ^ u64::from(*byte)); // touch every byte
                std::hint::black_box(sum);
                std::hint::black_box(intf::parse_seen(bytes));
                records.push((position, bytes.len(), TapEvent::parse(bytes).is_some()));
                Ok(())
            });
            if let Err(error) = read {
                return Ok((records, Err(error)));
            }
        }
        Ok((records, Ok(())))
    }
}

/// Does one step of the reader on arbitrary numbers, and checks its invariants.
pub fn step(header: u32, consumer: u64, producer: u64, ring_bytes: u64) {
    let Ok(Some(at)) = record::header_offset(consumer, producer, ring_bytes) else { return };
    assert!(at as u64 + record::HEADER_BYTES <= ring_bytes);
    let next = match record::step(header, consumer, producer, ring_bytes) {
        Ok(Step::Record { offset, length, next }) => {
            assert!((offset + length) as u64 <= 2 * ring_bytes);
            next
        }
        Ok(Step::Skip { next }) => next,
        Ok(Step::Busy) | Err(_) => return,
    };
    let (moved, pending) = (next.wrapping_sub(consumer), producer.wrapping_sub(consumer));
    assert!(moved >= record::HEADER_BYTES && moved <= pending && moved.is_multiple_of(record::HEADER_BYTES));
}

/// Returns the result of the calibration for the bytes in its maps: the page array's address, if
/// all agree on one.
pub fn calibration(bytes: &[u8], frames: &[u64]) -> Option<u64> {
    let mut sum = TapCounters::default();
    let _ = bytes.chunks(48).try_for_each(|cpu| sum.add(cpu));
    if let Some(peek) = bytes.first_chunk::<PEEK_BYTES>().and_then(Peek::parse) {
        std::hint::black_box((peek.task, peek.failed, peek.page[0]));
    }
    let sightings: Vec<_> = bytes.chunks(16).filter_map(Sighting::parse).collect();
    layout_probe::vmemmap_base(&sightings, frames).ok()
}
