//! Mapped BPF maps: memory that the programs and this process share.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// A mapped part of a map.
pub(crate) struct Mapped {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and all access through `self` is by
// atomics. Each access through `start` has its own argument.
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

    /// Returns the beginning of the mapping.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns `tap_shared.consumer_sleeps`, if that is what is mapped.
    pub(crate) fn flag(&self) -> &AtomicU32 {
        // SAFETY: as in `counter`; the programs access the flag with 4-byte atomics.
        unsafe { self.start.cast::<AtomicU32>().as_ref() }
    }

    /// Returns a ring's counter, if that is what is mapped.
    pub(crate) fn counter(&self) -> &AtomicU64 {
        // SAFETY: `start` is page-aligned, at least a page is mapped for as long as `self` lives,
        // and the kernel accesses the counter at its beginning with 8-byte atomics too.
        unsafe { self.start.cast::<AtomicU64>().as_ref() }
    }

    /// Returns all of the mapping, if it is an array of words that may be read and written.
    pub(crate) fn words(&self) -> &[AtomicU32] {
        // SAFETY: as in `counter`; all of `bytes` is mapped, and the programs access whole words.
        unsafe { std::slice::from_raw_parts(self.start.cast().as_ptr(), self.bytes / size_of::<AtomicU32>()) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` made; all references into it borrow `self`.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
