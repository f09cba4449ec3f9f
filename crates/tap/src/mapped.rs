//! BPF maps, mapped: memory that the programs and we share.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// A piece of a map, mapped.
pub(crate) struct Mapped {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and all access through `self` is by
// atomics; who reads through `start` says why he may.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps `bytes`, at least a page, from `offset` on.
    pub(crate) fn new(map: BorrowedFd<'_>, protection: ProtFlags, offset: usize, bytes: usize) -> io::Result<Mapped> {
        debug_assert!(bytes >= page::PAGE_SIZE);
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing that is
        // mapped already.
        let start = unsafe { mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, map, offset as u64)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Mapped { start, bytes })
    }

    /// Where it begins.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// `tap_shared.consumer_sleeps`, where that is what is mapped.
    pub(crate) fn flag(&self) -> &AtomicU32 {
        // SAFETY: as in `counter`; the programs access the flag with 4-byte atomics.
        unsafe { self.start.cast::<AtomicU32>().as_ref() }
    }

    /// A ring's counter, where that is what is mapped.
    pub(crate) fn counter(&self) -> &AtomicU64 {
        // SAFETY: `start` is page-aligned, at least a page is mapped for as long as `self` lives,
        // and the kernel accesses the counter at its beginning with 8-byte atomics too.
        unsafe { self.start.cast::<AtomicU64>().as_ref() }
    }

    /// All of it, where it is an array of words that may be read and written.
    pub(crate) fn words(&self) -> &[AtomicU32] {
        // SAFETY: as in `counter`; all of `bytes` is mapped, and the programs access whole words.
        unsafe { std::slice::from_raw_parts(self.start.cast().as_ptr(), self.bytes / size_of::<AtomicU32>()) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` made; whoever borrows from it borrows `self`.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
