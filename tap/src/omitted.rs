//! Pages whose bytes nobody wants when they are evicted: a table that the tap's program looks into before it copies a page.
//!
//! A lender that keeps what it answers has most of what is read from it still, and of a stream that is left to the disk it wants nothing. To copy such
//! a page at its eviction costs more than all the rest of the tap, and the copy is thrown away. The table is a cache of hints: it has a
//! fixed size, a page has one place in it, and who comes last has that. What must never happen: that a hint does harm. A page that is not
//! in the table is copied in vain; one that should not be there is not lent, once, as the program takes out what it finds.

use crate::CopyHints;
use crate::intf::{OMITTED_LINE_PAGES, OMITTED_MULTIPLIER};
use crate::mapped::Mapped;
use rustix::mm::ProtFlags;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The table has one byte for so many of the machine's memory: a place for each fourth page that could be cached.
const MEMORY_SHARE: u64 = 4096;
/// Bytes of the smallest table, where nobody gives hints: a page, as that is mapped.
const BYTES_MIN: u64 = page::PAGE_SIZE as u64;
/// Bytes of the largest.
const BYTES_MAX: u64 = 32 << 20;

const LINE_BYTES: u64 = OMITTED_LINE_PAGES * size_of::<AtomicU32>() as u64;

/// Lines of the table: a power of two. Only where `is_wanted` are there more than the least.
pub(crate) fn lines(is_wanted: bool) -> u64 {
    let memory_bytes = rustix::system::sysinfo().totalram as u64;
    let bytes = if is_wanted { (memory_bytes / MEMORY_SHARE).clamp(BYTES_MIN, BYTES_MAX) } else { BYTES_MIN };
    (1 << bytes.ilog2()) / LINE_BYTES
}

/// The table, mapped.
pub(crate) struct Omitted {
    mapped: Mapped,
    mask: u64,
    /// Whether there is anything in it, so that one that is not used is not touched either.
    is_used: AtomicBool,
}

impl Omitted {
    pub(crate) fn new(map: BorrowedFd<'_>, lines: u64) -> io::Result<Omitted> {
        let mapped = Mapped::new(map, ProtFlags::READ | ProtFlags::WRITE, 0, (lines * LINE_BYTES) as usize)?;
        Ok(Omitted { mapped, mask: lines - 1, is_used: AtomicBool::new(false) })
    }

    /// A page's fingerprint and its place, as `is_omitted` in `bpf/tap.bpf.c` has them.
    fn place(&self, generation: u32, index: u32) -> (u32, &AtomicU32) {
        let (page, index) = (u64::from(generation) << 32 | u64::from(index), u64::from(index));
        let hash = (page / OMITTED_LINE_PAGES).wrapping_mul(OMITTED_MULTIPLIER);
        let place = (hash >> 32 & self.mask) * OMITTED_LINE_PAGES + index % OMITTED_LINE_PAGES;
        (hash as u32 | 1, &self.mapped.words()[place as usize])
    }
}

impl CopyHints for Omitted {
    fn omit(&self, generation: u32, index: u32) {
        let (fingerprint, place) = self.place(generation, index);
        place.store(fingerprint, Ordering::Relaxed);
        if !self.is_used.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Relaxed);
        }
    }

    fn copy(&self, generation: u32, index: u32) {
        if !self.is_used.load(Ordering::Relaxed) {
            return;
        }
        let (fingerprint, place) = self.place(generation, index);
        if place.load(Ordering::Relaxed) == fingerprint {
            place.store(0, Ordering::Relaxed);
        }
    }

    fn copy_all(&self) {
        if self.is_used.swap(false, Ordering::Relaxed) {
            self.mapped.words().iter().for_each(|place| place.store(0, Ordering::Relaxed));
        }
    }
}
