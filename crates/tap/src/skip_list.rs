//! The skip list: a table of pages whose bytes are not needed when they are evicted. The tap's BPF
//! program looks a page up there before it copies it.
//!
//! A lender that keeps the pages that it answers still has most of them, and pages of a stream that
//! is left to the disk are not sent to it. To copy such a page at its eviction costs more than all
//! the rest of the tap, and the copy is discarded. The table is a cache of hints with a fixed size.
//! Each page has one place in it, and a later page replaces an earlier one. The invariant: a wrong
//! hint does no harm. A page that is missing in the table is copied in vain. A page that is in the
//! table by mistake is not lent once, because the program removes each entry that it finds.

use crate::CopyHints;
use crate::intf::{SKIP_LIST_LINE_PAGES, SKIP_LIST_MULTIPLIER};
use crate::mapped::Mapped;
use rustix::mm::ProtFlags;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The table has at most one byte for this number of bytes of the machine's memory: a place for
/// each fourth to eighth page that could be cached.
const MEMORY_SHARE: u64 = 4096;
/// The bytes of the smallest table, for a tap without hints: one page, because the table is mapped.
const BYTES_MIN: u64 = page::PAGE_SIZE as u64;
/// The bytes of the largest table.
const BYTES_MAX: u64 = 32 << 20;

const LINE_BYTES: u64 = SKIP_LIST_LINE_PAGES * size_of::<AtomicU32>() as u64;

/// Returns the number of lines of the table: a power of two. It is more than the minimum only if
/// `is_wanted`.
pub(crate) fn lines(is_wanted: bool) -> u64 {
    let memory_bytes = rustix::system::sysinfo().totalram as u64;
    let bytes = if is_wanted { (memory_bytes / MEMORY_SHARE).clamp(BYTES_MIN, BYTES_MAX) } else { BYTES_MIN };
    (1 << bytes.ilog2()) / LINE_BYTES
}

/// Returns [`TapConfig::skip_list_shift`](crate::intf::TapConfig), for a number of lines that is a
/// power of two and larger than 1.
pub(crate) fn shift(lines: u64) -> u64 {
    u64::from(u64::BITS - lines.ilog2())
}

/// Returns a page's fingerprint and the number of its place, as `is_skipped` in `bpf/tap.bpf.c`
/// computes them.
fn place(generation: u32, index: u32, shift: u64) -> (u32, usize) {
    let (page, index) = (u64::from(generation) << 32 | u64::from(index), u64::from(index));
    let hash = (page / SKIP_LIST_LINE_PAGES).wrapping_mul(SKIP_LIST_MULTIPLIER);
    let place = (hash >> shift) * SKIP_LIST_LINE_PAGES + index % SKIP_LIST_LINE_PAGES;
    (hash as u32 | 1, place as usize)
}

/// The mapped table.
pub(crate) struct SkipList {
    mapped: Mapped,
    shift: u64,
    /// Whether the table has any entry. An unused table is not touched.
    is_used: AtomicBool,
}

impl SkipList {
    pub(crate) fn new(map: BorrowedFd<'_>, lines: u64) -> io::Result<SkipList> {
        let mapped = Mapped::new(map, ProtFlags::READ | ProtFlags::WRITE, 0, (lines * LINE_BYTES) as usize)?;
        Ok(SkipList { mapped, shift: shift(lines), is_used: AtomicBool::new(false) })
    }

    /// Returns a page's fingerprint and its place.
    fn place(&self, generation: u32, index: u32) -> (u32, &AtomicU32) {
        let (fingerprint, place) = place(generation, index, self.shift);
        (fingerprint, &self.mapped.words()[place])
    }
}

impl CopyHints for SkipList {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Pages of one file do not share places, and pages of several files share them only by chance.
    #[test]
    fn most_pages_have_a_place_of_their_own() {
        const LINES: u64 = 1 << 14;
        const PLACES: u32 = (LINES * SKIP_LIST_LINE_PAGES) as u32;
        for (files, pages, least) in
            [(1, PLACES, 0.8), (1, PLACES / 2, 0.95), (64, PLACES / 64, 0.6), (1024, PLACES / 4096, 0.8)]
        {
            let all = (1..=files).flat_map(|generation| (0..pages).map(move |index| (generation, index)));
            let places: HashSet<_> = all.map(|(generation, index)| place(generation, index, shift(LINES)).1).collect();
            let share = places.len() as f64 / f64::from(files * pages);
            println!("{files} files of {pages} pages: {share:.2} have a place of their own");
            assert!(share >= least && places.iter().all(|place| *place < PLACES as usize));
        }
    }
}
