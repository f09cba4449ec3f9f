//! A reader of a BPF ring buffer.
//!
//! The usual reader hides the two counters that the rule against stale bytes needs: the position of
//! each record, and the position of the stream. Any thread must be able to read the latter. So this
//! reader accesses the map directly: the consumer's counter, the producer's counter, and the ring
//! itself. The kernel maps the ring twice in a row, so records never wrap.
//!
//! Promises: records are passed on in order, each once, from the ring itself without a copy. The
//! consumer's counter moves only after a record was processed. The invariant: no read outside of
//! the mapping, and no read of a record that the kernel may still write. The module
//! [`crate::consume`] defines the order of accesses; [`crate::record`] defines and checks the
//! numbers.

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

/// The bytes of each mapping of the two counters and of the flag: each is alone in a page.
const COUNTER_BYTES: usize = page::PAGE_SIZE;

/// The longest wait of one call, even if the caller requests more. It keeps sums of times within
/// the range of a clock.
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
        // is not BUSY, so the kernel has finished writing it. The kernel writes there again only
        // after the consumer's counter has passed it, when the slice does not exist any more.
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

/// The reading end of a BPF ring buffer. There must be only one per map.
pub(crate) struct Ring {
    map: OwnedFd,
    mapping: Arc<Mapping>,
    /// A private copy: the counter in the mapping is written by this reader, and never trusted.
    consumer: u64,
}

impl Ring {
    /// Maps the ring of `ring_bytes` (a power of two of whole pages, with which the map was
    /// created), and the map that holds `tap_shared`.
    pub(crate) fn new(map: OwnedFd, ring_bytes: usize, shared: BorrowedFd<'_>) -> io::Result<Ring> {
        debug_assert!(ring_bytes.is_power_of_two() && ring_bytes >= page::PAGE_SIZE);
        let consumer = Mapped::new(map.as_fd(), ProtFlags::READ | ProtFlags::WRITE, 0, COUNTER_BYTES)?;
        let producer = Mapped::new(map.as_fd(), ProtFlags::READ, COUNTER_BYTES, COUNTER_BYTES + 2 * ring_bytes)?;
        let sleeps = Mapped::new(shared, ProtFlags::READ | ProtFlags::WRITE, 0, COUNTER_BYTES)?;
        let position = consumer.counter().load(Ordering::Acquire);
        let mapping = Arc::new(Mapping { consumer, producer, sleeps, ring_bytes });
        Ok(Ring { map, mapping, consumer: position })
    }

    /// Returns the counters, for any thread.
    pub(crate) fn positions(&self) -> Arc<dyn Positions> {
        Arc::clone(&self.mapping) as Arc<dyn Positions>
    }

    /// Passes the available records to `take`, with their positions, oldest first; waits for the
    /// first one for at most `timeout`. Returns their number.
    ///
    /// A record that `take` refuses, or whose numbers are invalid, ends the stream: every further
    /// call returns the same error, and the ring fills up.
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

    /// Waits until the ring has a record. No record is missed: the reader first sets the flag, with
    /// a full barrier. Then poll(2), which has put the reader into its queue, reads the counters.
    /// It sees any record that was reserved before; a producer that reserves one later sees the
    /// flag and wakes the reader. If the record is still busy, poll(2) returns at once. That lasts
    /// as long as one page's copy.
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
