//! Page-aligned memory of a fixed size, touched only as far as it is used.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// An anonymous mapping, zero at first. Its pages cost memory from their first use on.
pub(crate) struct Buffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone and is plain memory.
unsafe impl Send for Buffer {}

impl Buffer {
    pub(crate) fn new(len: usize) -> std::io::Result<Buffer> {
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice; no existing
        // memory is touched.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?
        };
        match NonNull::new(start.cast::<u8>()) {
            Some(start) => Ok(Buffer { start, len }),
            None => Err(std::io::ErrorKind::OutOfMemory.into()),
        }
    }

    /// Faults in all pages now, as far as there is memory.
    pub(crate) fn populate(&self) {
        // SAFETY: the range is this mapping, and advice to populate changes no byte of it.
        let _ = unsafe {
            rustix::mm::madvise(self.start.as_ptr().cast(), self.len, rustix::mm::Advice::LinuxPopulateWrite)
        };
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is `len` bytes of initialized (zero) memory and lives as long as
        // `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` and nothing borrowed from it outlives `self`.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}
