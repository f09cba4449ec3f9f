//! What an open shows of changes beside the mount: all of them, however slow they are, and to whatever end the file has.

mod support;

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap_anonymous, munmap, userfaultfd};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use support::*;

const PAGE: usize = 4096;

/// Two pages of memory, the second of which comes when it is told to: what reads it waits (userfaultfd(2)).
struct LateMemory {
    start: *mut u8,
    fd: OwnedFd,
}

// SAFETY: the pages are written to by the kernel alone, before they are read.
unsafe impl Send for LateMemory {}
// SAFETY: as above.
unsafe impl Sync for LateMemory {}

impl LateMemory {
    /// Both pages are to hold this byte. None: this kernel does not let us.
    fn new(byte: u8) -> Option<LateMemory> {
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

    fn bytes(&self) -> &[u8] {
        // SAFETY: two pages that live as long as this.
        unsafe { std::slice::from_raw_parts(self.start, 2 * PAGE) }
    }

    /// Waits until somebody waits for the second page.
    fn wait(&self) {
        let mut event = [0; 32];
        assert_eq!(rustix::io::read(&self.fd, &mut event).unwrap(), 32);
    }

    /// Lets the second page come, with that byte.
    fn come(&self, byte: u8) {
        const COPY: u64 = 0xc028_aa03;
        let page = [byte; PAGE];
        let mut words = [self.start as u64 + PAGE as u64, page.as_ptr() as u64, PAGE as u64, 0, 0];
        // SAFETY: the request reads a page, and writes the one that is missing.
        assert_eq!(unsafe { libc::ioctl(self.fd.as_raw_fd(), COPY, words.as_mut_ptr()) }, 0);
    }
}

impl Drop for LateMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody reads it any more.
        let _ = unsafe { munmap(self.start.cast(), 2 * PAGE) };
    }
}

/// The kernel moves the times of a file before its bytes: who opens the file in between sees the times that it has afterwards, too.
#[test]
fn a_change_beside_that_was_under_way_is_seen_by_whoever_opens_the_file_after_it() {
    let test = "a_change_beside_that_was_under_way_is_seen_by_whoever_opens_the_file_after_it";
    if !can_mount(test) {
        return;
    }
    let m = Mounted::through();
    for is_open_before in [true, false] {
        let Some(memory) = LateMemory::new(b'n') else { return skip(test, "no userfaultfd") };
        let name = format!("a{is_open_before}");
        fs::write(m.below(&name), [b'o'; 2 * PAGE]).unwrap();
        if is_open_before {
            assert_eq!(fs::read(m.path(&name)).unwrap(), [b'o'; 2 * PAGE]);
        }
        std::thread::scope(|scope| {
            let writer = File::options().write(true).open(m.below(&name)).unwrap();
            let memory = &memory;
            let write = scope.spawn(move || writer.write_all_at(memory.bytes(), 0).unwrap());
            memory.wait();
            // Twice, as there may be something to be dropped of what the first one has read.
            for _ in 0..2 {
                assert_eq!(fs::read(m.path(&name)).unwrap().len(), 2 * PAGE);
            }
            memory.come(b'n');
            write.join().unwrap();
        });
        for nth in 0..5 {
            let read = fs::read(m.path(&name)).unwrap();
            assert_eq!((read[0], read[PAGE]), (b'n', b'n'), "{name}, open {nth}");
        }
    }
}
