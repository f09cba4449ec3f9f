//! Our own reader of a BPF ring buffer.
//!
//! The usual reader hides the two counters that the rule against stale bytes is built on: where
//! each record stands in the stream, and how far the stream has come, readable from any thread. So
//! the map is read here directly: the consumer's counter, the producer's counter, and the ring
//! itself, which the kernel maps twice in a row so that records never wrap.
//!
//! Promises: records are handed out in order, each once, from the ring itself without a copy; the
//! consumer's counter moves only after a record was dealt with. Must never happen: a read outside
//! of the mapping, or of a record that the kernel may still write. In which order its words are
//! looked at is in [`crate::consume`]; what the numbers mean, and which of them to distrust, in
//! [`crate::record`].

use crate::Positions;
use crate::consume::{self, Memory, Word, consume};
use crate::mapped::Mapped;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::ProtFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of the mappings of the two counters and of the flag: each is alone in a page.
const COUNTER_BYTES: usize = page::PAGE_SIZE;

/// Longest wait of one call, whatever the caller asks for: keeps sums of times inside of what a
/// clock can show.
const WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The mapped ring.
struct Mapping {
    consumer: Mapped,
    /// The producer's counter, then the ring twice.
    producer: Mapped,
    sleeps: Mapped,
    ring_bytes: usize,
}

impl Memory for Mapping {
    type Word32 = AtomicU32;
    type Word64 = AtomicU64;

    fn ring_bytes(&self) -> u64 {
        self.ring_bytes as u64
    }

    fn producer(&self) -> &AtomicU64 {
        self.producer.counter()
    }

    fn consumer(&self) -> &AtomicU64 {
        self.consumer.counter()
    }

    fn header(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset + size_of::<u64>() <= self.ring_bytes && offset.is_multiple_of(8));
        // SAFETY: `offset` comes from `record::header_offset`: 8-aligned and inside of the ring,
        // which starts COUNTER_BYTES into this mapping. The kernel writes the word atomically.
        unsafe { self.producer.start().add(COUNTER_BYTES + offset).cast::<AtomicU32>().as_ref() }
    }

    fn record<T>(&self, offset: usize, length: usize, look: impl FnOnce(&[u8]) -> T) -> T {
        debug_assert!(offset + length <= 2 * self.ring_bytes);
        // SAFETY: `record::step` keeps offset + length inside of the twice mapped ring. The record
        // is not BUSY, so the kernel has finished writing it, and writes there again only after the
        // consumer's counter has passed it, which happens when the slice is gone.
        let bytes =
            unsafe { std::slice::from_raw_parts(self.producer.start().add(COUNTER_BYTES + offset).as_ptr(), length) };
        look(bytes)
    }
}

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

impl Positions for Mapping {
    fn produced(&self) -> u64 {
        consume::produced(self)
    }

    fn consumed(&self) -> u64 {
        consume::consumed(self)
    }
}

/// The reading end of a BPF ring buffer. There must be one only per map.
pub(crate) struct Ring {
    map: OwnedFd,
    mapping: Arc<Mapping>,
    /// Our own copy: the one in the mapping is written by us and never trusted.
    consumer: u64,
}

impl Ring {
    /// Maps the ring of `ring_bytes` (a power of two of whole pages, as the map was created with),
    /// and the map that holds `tap_shared`.
    pub(crate) fn new(map: OwnedFd, ring_bytes: usize, shared: BorrowedFd<'_>) -> io::Result<Ring> {
        debug_assert!(ring_bytes.is_power_of_two() && ring_bytes >= page::PAGE_SIZE);
        let consumer = Mapped::new(map.as_fd(), ProtFlags::READ | ProtFlags::WRITE, 0, COUNTER_BYTES)?;
        let producer = Mapped::new(map.as_fd(), ProtFlags::READ, COUNTER_BYTES, COUNTER_BYTES + 2 * ring_bytes)?;
        let sleeps = Mapped::new(shared, ProtFlags::READ | ProtFlags::WRITE, 0, COUNTER_BYTES)?;
        let position = consumer.counter().load(Ordering::Acquire);
        let mapping = Arc::new(Mapping { consumer, producer, sleeps, ring_bytes });
        Ok(Ring { map, mapping, consumer: position })
    }

    /// The counters, for any thread.
    pub(crate) fn positions(&self) -> Arc<dyn Positions> {
        Arc::clone(&self.mapping) as Arc<dyn Positions>
    }

    /// Hands the records that are there to `take`, with their positions, oldest first; waits at
    /// most `timeout` for the first. Returns how many.
    ///
    /// A record that `take` refuses, or whose numbers make no sense, ends the stream: the same
    /// error comes back on every further call, and the ring fills up.
    pub(crate) fn drain(
        &mut self,
        timeout: Duration,
        take: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<usize> {
        let deadline = Instant::now() + timeout.min(WAIT_MAX);
        loop {
            let taken = consume(&*self.mapping, &mut self.consumer, take)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if taken > 0 || left.is_zero() {
                return Ok(taken);
            }
            self.wait(left)?;
        }
    }

    /// Waits until the ring holds something. Nothing is slept over: first the flag is set, with a
    /// full barrier, and then poll(2), when it has queued us, looks at the counters. The look sees
    /// a record that was reserved before it; a producer that reserves one later sees the flag and
    /// wakes us. On a record that is still busy it returns at once: that lasts as long as one
    /// page's copy.
    fn wait(&self, timeout: Duration) -> io::Result<()> {
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
        let sleeps = self.mapping.sleeps.flag();
        sleeps.swap(1, Ordering::SeqCst);
        let polled = poll(&mut [PollFd::new(&self.map, PollFlags::IN)], Some(&timeout));
        sleeps.store(0, Ordering::Relaxed);
        match polled {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}
