//! The lent memory: slots of one page each in one large anonymous mapping.
//!
//! The mapping takes address space only; a slot gets memory when it is written.
//! [`Slots::mark_reclaimable`] then permits the kernel to take that memory at any moment
//! (`MADV_FREE`): such pages are on the inactive *file* list of the kernel's LRU, and are removed
//! without notice and without I/O. A reader of a slot that was taken finds zeros, so a page of
//! zeros must never be stored in a slot.
//!
//! This module guarantees that a copy out of a slot is either the last bytes written there, whole,
//! or reported as taken. A slot that is taken in the middle of any operation does no harm. With
//! [`super::in_flight_pages`] it is the only module of this crate with `unsafe` code. A slot number
//! beyond the mapping is a bug of the caller and panics.

use page::{PAGE_SIZE, Page};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Entries of `/proc/self/pagemap` that are read at once if `PAGEMAP_SCAN` is missing: 4 KiB of
/// them.
const PAGEMAP_ENTRIES: usize = 512;
/// Bytes of one entry.
const PAGEMAP_ENTRY_BYTES: usize = 8;
/// The entry's page is in memory.
const PAGEMAP_PRESENT: u64 = 1 << 63;
/// The entry's page is in swap.
const PAGEMAP_SWAPPED: u64 = 1 << 62;

/// Maximum number of regions that one `PAGEMAP_SCAN` reports.
const SCAN_REGIONS: usize = 256;
/// `_IOWR('f', 16, struct pm_scan_arg)`, Linux 6.7.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
/// A category of pages: in memory.
const PAGE_IS_PRESENT: u64 = 1 << 3;
/// A category of pages: in swap.
const PAGE_IS_SWAPPED: u64 = 1 << 4;

/// Runs of slots in one call of the kernel.
const RUNS_MAX: usize = 256;

/// The kernel's `struct pm_scan_arg`.
#[derive(Default)]
#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// The kernel's `struct page_region`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct ScanRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// The method to find the pages that the kernel took.
enum Presence {
    /// `PAGEMAP_SCAN`.
    Scan(File),
    /// Reading `/proc/self/pagemap` (before Linux 6.7).
    Read(File),
    /// None: there is no `/proc`. Gets find out one by one.
    Unknown,
}

/// The address space. It lives as long as pages are being received into it.
pub struct Mapping {
    start: NonNull<Page>,
    count: u32,
}

// SAFETY: no thread owns data in the mapping, and no reference into it ever exists.
unsafe impl Send for Mapping {}
// SAFETY: as above. The store decides which thread writes which slot, and when.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Address space for `count` slots, and one page behind them that is written and never read.
    fn new(count: u32) -> io::Result<Mapping> {
        let bytes = (count as usize + 1) * PAGE_SIZE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast::<Page>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, count })
    }

    /// The address of a slot.
    pub fn slot(&self, slot: u32) -> *mut Page {
        assert!(slot < self.count, "slot {slot} of {}", self.count);
        // SAFETY: the slot lies within the mapping.
        unsafe { self.start.as_ptr().add(slot as usize) }
    }

    /// The address for pages that are not stored.
    pub fn sink(&self) -> *mut Page {
        // SAFETY: the page behind the last slot.
        unsafe { self.start.as_ptr().add(self.count as usize) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the whole mapping, and nothing refers to it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), (self.count as usize + 1) * PAGE_SIZE) };
    }
}

/// The slots.
pub struct Slots {
    mapping: Arc<Mapping>,
    presence: Presence,
    /// This process, if the kernel takes advice on many runs at once.
    together: Option<OwnedFd>,
}

impl Slots {
    /// Address space for `count` slots.
    pub fn new(count: u32) -> io::Result<Slots> {
        let mapping = Arc::new(Mapping::new(count)?);
        let presence = File::open("/proc/self/pagemap").map_or(Presence::Unknown, Presence::Scan);
        let together = pidfd_open(getpid(), PidfdFlags::empty()).ok();
        let slots = Slots { mapping, presence, together };
        // A huge page would make 512 slots come and go together. A dump or a child has no use for
        // other users' pages, and pages that are shared with a child could not be taken. A kernel
        // that was built without one of these does not need it.
        for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP, libc::MADV_DONTFORK] {
            let _ = slots.advise(0..count, advice);
        }
        Ok(slots)
    }

    /// The memory itself, for receiving pages.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    fn slot(&self, slot: u32) -> *mut Page {
        self.mapping.slot(slot)
    }

    /// Writes a slot, which takes memory if it has none. It is reclaimable only after
    /// [`Slots::mark_reclaimable`].
    pub fn write(&mut self, slot: u32, page: &Page) {
        debug_assert!(!page::is_zero(page), "zeros in a slot mean that the kernel took it");
        let to = self.slot(slot);
        // SAFETY: `to` is a page of our mapping, writable, and no reference into the mapping ever
        // exists.
        unsafe { std::ptr::copy_nonoverlapping(page, to, 1) }
    }

    /// Appends a slot's bytes. Returns false if the kernel has taken it; `buffer` is then
    /// unchanged.
    ///
    /// The kernel may take the slot during the copy: the copy then ends in zeros that were never
    /// written. But then the whole slot reads as zeros afterwards, so a second check of a byte that
    /// was not zero detects it.
    pub fn read(&self, slot: u32, buffer: &mut Vec<u8>) -> bool {
        let from = self.slot(slot).cast::<u8>();
        let begin = buffer.len();
        buffer.reserve(PAGE_SIZE);
        // SAFETY: `from` is a page of our mapping, and there is room for a page behind the buffer's
        // end. The kernel may turn the slot to zeros meanwhile, which any copy tolerates.
        unsafe {
            std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr().add(begin), PAGE_SIZE);
            buffer.set_len(begin + PAGE_SIZE);
        }
        // The second check comes after the whole copy: for the compiler, and for the processor.
        fence(Ordering::Acquire);
        let page = &buffer[begin..];
        let witness = if page[0] != 0 { Some(0) } else { page.iter().position(|byte| *byte != 0) };
        // SAFETY: the witness is an offset within the page.
        let is_whole = witness.is_some_and(|at| unsafe { from.add(at).read_volatile() } != 0);
        if !is_whole {
            buffer.truncate(begin);
        }
        is_whole
    }

    /// Prefetches the beginning of a slot that will be read or written. It does not wait, and
    /// unlike a read it gives no memory to a slot that has none.
    pub fn read_ahead(&self, slot: u32) {
        let at = self.slot(slot).cast::<i8>();
        #[cfg(target_arch = "x86_64")]
        // SAFETY: this processor has the instruction, which reads nothing as far as the program can
        // see.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
    }

    /// Whether a slot that was written still has its memory.
    pub fn is_present(&self, slot: u32) -> bool {
        let words = self.slot(slot).cast::<u64>();
        // SAFETY: the words of a page of our mapping, which is aligned to pages.
        (0..PAGE_SIZE / size_of::<u64>()).any(|at| unsafe { words.add(at).read_volatile() } != 0)
    }

    /// Marks the memory of these slots as reclaimable: the kernel may take it whenever it needs it.
    /// Sorts them.
    pub fn mark_reclaimable(&mut self, slots: &mut [u32]) -> io::Result<()> {
        self.advise_each(slots, libc::MADV_FREE)
    }

    /// Gives the memory of these slots back at once. Sorts them.
    pub fn give_back(&mut self, slots: &mut [u32]) -> io::Result<()> {
        self.advise_each(slots, libc::MADV_DONTNEED)
    }

    fn advise_each(&mut self, slots: &mut [u32], advice: libc::c_int) -> io::Result<()> {
        slots.sort_unstable();
        let runs = slots.chunk_by(|slot, next| next - slot <= 1).map(|run| run[0]..run[run.len() - 1] + 1);
        for runs in runs.collect::<Vec<_>>().chunks(RUNS_MAX) {
            let advised_slots = self.advise_together(runs, advice);
            let mut behind = 0;
            for run in runs {
                behind += run.len();
                if behind > advised_slots {
                    self.advise(run.clone(), advice)?;
                }
            }
        }
        Ok(())
    }

    /// One call of the kernel for all of them (process_madvise: since Linux 6.13 a process may give
    /// itself any advice, and since 6.16 the processors flush their TLB once for all). Returns the
    /// number of slots, in order, for which this succeeded. The rest was not tried, or fails.
    fn advise_together(&mut self, runs: &[Range<u32>], advice: libc::c_int) -> usize {
        let Some(process) = self.together.as_ref().filter(|_| runs.len() > 1) else { return 0 };
        let pieces: Vec<libc::iovec> = runs.iter().map(|run| self.piece(run)).collect();
        let (fd, flags) = (process.as_raw_fd(), 0);
        // SAFETY: the pieces lie within our mapping, and the advice that is given here at most
        // turns it to zeros.
        let advised_bytes =
            unsafe { libc::syscall(libc::SYS_process_madvise, fd, pieces.as_ptr(), pieces.len(), advice, flags) };
        if advised_bytes < 0 && is_refused_for_good(&io::Error::last_os_error()) {
            self.together = None;
        }
        usize::try_from(advised_bytes).unwrap_or(0) / PAGE_SIZE
    }

    fn advise(&self, run: Range<u32>, advice: libc::c_int) -> io::Result<()> {
        let piece = self.piece(&run);
        // SAFETY: the run lies within our mapping, and the advice that is given here at most turns
        // it to zeros.
        let result = unsafe { libc::madvise(piece.iov_base, piece.iov_len, advice) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The memory of adjacent slots.
    fn piece(&self, run: &Range<u32>) -> libc::iovec {
        assert!(run.start <= run.end && run.end <= self.mapping.count, "slots {run:?} of {}", self.mapping.count);
        // SAFETY: the run lies within the mapping.
        let first = unsafe { self.mapping.start.as_ptr().add(run.start as usize) };
        libc::iovec { iov_base: first.cast(), iov_len: run.len() * PAGE_SIZE }
    }

    /// Appends those of `within` that have no memory, in ascending order, as runs. Nothing is
    /// appended if the kernel does not report it.
    pub fn absent(&mut self, within: Range<u32>, runs: &mut Vec<Range<u32>>) -> io::Result<()> {
        assert!(
            within.start <= within.end && within.end <= self.mapping.count,
            "slots {within:?} of {}",
            self.mapping.count
        );
        if let Presence::Scan(pagemap) = &self.presence {
            match self.absent_by_scan(pagemap, within.clone(), runs) {
                Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                    let Presence::Scan(pagemap) = std::mem::replace(&mut self.presence, Presence::Unknown) else {
                        return Ok(());
                    };
                    self.presence = Presence::Read(pagemap);
                }
                done => return done,
            }
        }
        match &self.presence {
            Presence::Read(pagemap) => self.absent_by_reading(pagemap, within, runs),
            _ => Ok(()),
        }
    }

    fn absent_by_scan(&self, pagemap: &File, within: Range<u32>, runs: &mut Vec<Range<u32>>) -> io::Result<()> {
        let base = self.mapping.start.as_ptr() as u64;
        let address_of = |slot: u32| base + u64::from(slot) * PAGE_SIZE as u64;
        let slot_at = |address: u64| ((address - base) / PAGE_SIZE as u64) as u32;
        let mut regions = [ScanRegion::default(); SCAN_REGIONS];
        let mut start = address_of(within.start);
        let end = address_of(within.end);
        while start < end {
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                start,
                end,
                vec: regions.as_mut_ptr() as u64,
                vec_len: SCAN_REGIONS as u64,
                category_inverted: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                category_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                ..ScanArgument::default()
            };
            // SAFETY: the argument has the kernel's layout and contains its size; the kernel writes
            // at most `vec_len` regions.
            let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &mut argument) };
            if found < 0 {
                return Err(io::Error::last_os_error());
            }
            runs.extend(regions.iter().take(found as usize).map(|found| slot_at(found.start)..slot_at(found.end)));
            // The kernel returns how far it came. If that end did not move, this loop would never
            // end.
            start = argument.walk_end.max(start + PAGE_SIZE as u64);
        }
        Ok(())
    }

    fn absent_by_reading(&self, pagemap: &File, within: Range<u32>, runs: &mut Vec<Range<u32>>) -> io::Result<()> {
        let base = self.mapping.start.as_ptr() as usize / PAGE_SIZE;
        let mut entries = [0u8; PAGEMAP_ENTRIES * PAGEMAP_ENTRY_BYTES];
        let mut first = within.start;
        while first < within.end {
            let count = PAGEMAP_ENTRIES.min((within.end - first) as usize);
            let bytes = &mut entries[..count * PAGEMAP_ENTRY_BYTES];
            pagemap.read_exact_at(bytes, ((base + first as usize) * PAGEMAP_ENTRY_BYTES) as u64)?;
            let (words, _) = bytes.as_chunks::<PAGEMAP_ENTRY_BYTES>();
            for (slot, word) in (first..).zip(words) {
                if u64::from_ne_bytes(*word) & (PAGEMAP_PRESENT | PAGEMAP_SWAPPED) != 0 {
                    continue;
                }
                match runs.last_mut() {
                    Some(run) if run.end == slot => run.end += 1,
                    _ => runs.push(slot..slot + 1),
                }
            }
            first += count as u32;
        }
        Ok(())
    }

    /// Simulates that the kernel takes a slot.
    #[cfg(debug_assertions)]
    pub fn take_silently(&mut self, slot: u32) {
        self.advise(slot..slot + 1, libc::MADV_DONTNEED).unwrap();
    }
}

/// Whether this error of process_madvise means that the kernel will never do it for this process.
fn is_refused_for_good(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EINVAL))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(byte: u8) -> Page {
        [byte; PAGE_SIZE]
    }

    #[test]
    fn written_slots_are_read_and_taken_ones_reported() {
        let mut slots = Slots::new(8).unwrap();
        let read = |slots: &Slots, slot| {
            let mut buffer = vec![1, 2];
            slots.read(slot, &mut buffer).then(|| buffer.split_off(2)).ok_or(buffer)
        };
        slots.write(3, &filled(7));
        slots.write(4, &filled(8));
        slots.mark_reclaimable(&mut [4, 3]).unwrap();
        assert_eq!(read(&slots, 3), Ok(filled(7).to_vec()));
        assert!(slots.is_present(4));
        slots.give_back(&mut [3]).unwrap();
        assert_eq!(read(&slots, 3), Err(vec![1, 2]));
        assert!(!slots.is_present(3));
        assert_eq!(read(&slots, 4), Ok(filled(8).to_vec()));
        slots.write(3, &filled(9));
        assert_eq!(read(&slots, 3), Ok(filled(9).to_vec()));
    }

    #[test]
    fn a_page_that_begins_with_zeros_is_there() {
        let mut slots = Slots::new(1).unwrap();
        let mut page = filled(0);
        page[PAGE_SIZE - 1] = 1;
        slots.write(0, &page);
        let mut copy = Vec::new();
        assert!(slots.is_present(0) && slots.read(0, &mut copy) && copy == page);
    }

    #[test]
    fn advice_is_for_the_named_slots_however_it_is_given() {
        const COUNT: u32 = 4 * RUNS_MAX as u32;
        for one_by_one in [false, true] {
            let mut slots = Slots::new(COUNT).unwrap();
            (0..COUNT).for_each(|slot| slots.write(slot, &filled(1)));
            if one_by_one {
                slots.together = None;
            }
            // More runs than one call takes, of one slot and of two.
            let mut named: Vec<u32> = (0..COUNT).rev().filter(|slot| slot % 7 == 0 || slot % 3 == 1).collect();
            slots.mark_reclaimable(&mut named.clone()).unwrap();
            assert!((0..COUNT).all(|slot| slots.is_present(slot)));
            slots.give_back(&mut named).unwrap();
            let absent: Vec<u32> = (0..COUNT).filter(|slot| !slots.is_present(*slot)).collect();
            assert_eq!(absent, named, "one by one: {one_by_one}");
            println!("{} at once: {}", named.len(), slots.together.is_some());
        }
    }

    /// In a process of its own, because no other thread may map anything into the hole.
    #[test]
    fn advice_that_fails_once_is_given_at_once_the_next_time() {
        const NAME: &str = "store::slots::tests::advice_that_fails_once_is_given_at_once_the_next_time";
        const IS_ALONE: &str = "PUMA_TEST_ALONE";
        if std::env::var_os(IS_ALONE).is_none() {
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            let output = again.args(["--exact", NAME, "--nocapture"]).env(IS_ALONE, "1").output().unwrap();
            println!("{}", String::from_utf8_lossy(&output.stdout));
            return assert!(output.status.success(), "{output:?}");
        }
        let mut slots = Slots::new(8).unwrap();
        let (mut named, is_there) = ([0, 2, 4, 6], slots.together.is_some());
        named.iter().for_each(|slot| slots.write(*slot, &filled(1)));
        slots.mark_reclaimable(&mut named).unwrap();
        let is_known = slots.together.is_some();
        println!("a descriptor of this process: {is_there}; this kernel takes advice for several runs: {is_known}");
        let first = slots.slot(0).cast();
        // SAFETY: a page of our mapping, which is not used any more.
        assert_eq!(unsafe { libc::munmap(first, PAGE_SIZE) }, 0);
        assert_eq!(slots.mark_reclaimable(&mut named).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
        assert_eq!(slots.together.is_some(), is_known);
    }

    #[test]
    fn both_ways_of_looking_agree() {
        let mut slots = Slots::new(3000).unwrap();
        for slot in (0..3000).filter(|slot| slot % 7 < 3) {
            slots.write(slot, &filled(1));
        }
        for slot in (0..3000).filter(|slot| slot % 21 == 0) {
            slots.take_silently(slot);
        }
        let expected: Vec<u32> = (10..2990).filter(|slot| slot % 7 >= 3 || slot % 21 == 0).collect();
        let mut ways = vec![];
        for by_reading in [false, true] {
            if by_reading {
                slots.presence = Presence::Read(File::open("/proc/self/pagemap").unwrap());
            }
            let mut runs = vec![];
            slots.absent(10..2990, &mut runs).unwrap();
            ways.push(matches!(slots.presence, Presence::Scan(_)));
            assert_eq!(runs.into_iter().flatten().collect::<Vec<_>>(), expected, "by reading: {by_reading}");
        }
        println!("by PAGEMAP_SCAN: {}", ways[0]);
    }
}
