//! Memory that comes late: what a system call reads from it waits (userfaultfd(2)).
#![allow(dead_code)] // Each test binary uses its part of it.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap_anonymous, munmap, userfaultfd};

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Two pages of memory, the second of which comes when it is told to: what reads it waits.
pub struct LateMemory {
    start: *mut u8,
    fd: OwnedFd,
}

// SAFETY: the pages are written to by the kernel alone, before they are read.
unsafe impl Send for LateMemory {}
// SAFETY: as above.
unsafe impl Sync for LateMemory {}

impl LateMemory {
    /// Both pages are to hold this byte. None: this kernel does not let us.
    pub fn new(byte: u8) -> Option<LateMemory> {
        const API: u64 = 0xc018_aa3f;
        const REGISTER: u64 = 0xc020_aa00;
        const MISSING: u64 = 1;
        let ioctl = |fd: &OwnedFd, request: u64, words: &mut [u64; 4]| {
            // SAFETY: both requests read and write at most four words (linux/userfaultfd.h).
            let done = unsafe { libc::ioctl(fd.as_raw_fd(), request, words.as_mut_ptr()) };
            (done == 0).then_some(())
        };
        // SAFETY: it is used for the mapping below only.
        let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC) }.ok()?;
        ioctl(&fd, API, &mut [0xaa, 0, 0, 0])?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), 2 * PAGE, access, MapFlags::PRIVATE) }.ok()?;
        let memory = LateMemory { start: start.cast(), fd };
        // SAFETY: the first page is ours, and mapped.
        unsafe { memory.start.write_bytes(byte, PAGE) };
        ioctl(&memory.fd, REGISTER, &mut [start as u64, 2 * PAGE as u64, MISSING, 0])?;
        Some(memory)
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: two pages that live as long as this.
        unsafe { std::slice::from_raw_parts(self.start, 2 * PAGE) }
    }

    /// Waits until somebody waits for the second page.
    pub fn wait(&self) {
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&limit)).unwrap();
        assert_eq!(ready, 1, "nobody reads the second page");
        let mut event = [0; 32];
        assert_eq!(rustix::io::read(&self.fd, &mut event).unwrap(), 32);
    }

    /// Lets the second page come, with that byte.
    pub fn come(&self, byte: u8) {
        assert!(self.comes(byte));
    }

    /// False if it is there already.
    fn comes(&self, byte: u8) -> bool {
        const COPY: u64 = 0xc028_aa03;
        let page = [byte; PAGE];
        let mut words = [self.start as u64 + PAGE as u64, page.as_ptr() as u64, PAGE as u64, 0, 0];
        // SAFETY: the request reads a page, and writes the one that is missing.
        unsafe { libc::ioctl(self.fd.as_raw_fd(), COPY, words.as_mut_ptr()) == 0 }
    }

    /// To be called first in a scope in which a thread reads the second page: should the test fail before that
    /// page comes, the thread would be waited for for ever.
    pub fn comes_at_the_end(&self) -> impl Drop {
        struct AtTheEnd<'a>(&'a LateMemory);
        impl Drop for AtTheEnd<'_> {
            fn drop(&mut self) {
                self.0.comes(0);
            }
        }
        AtTheEnd(self)
    }
}

impl Drop for LateMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody reads it any more.
        let _ = unsafe { munmap(self.start.cast(), 2 * PAGE) };
    }
}
