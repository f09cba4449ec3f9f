//! Memory whose pages arrive one after the other (userfaultfd(2)): a write(2) from it takes as long
//! as the test needs, which shows the states between its beginning and its end.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap_anonymous, munmap, userfaultfd};
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::time::Duration;

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;
/// Requests of linux/userfaultfd.h, with the number of words that each reads and writes.
const API: u64 = 0xc018_aa3f;
const REGISTER: u64 = 0xc020_aa00;
const COPY: u64 = 0xc028_aa03;
const WORDS_MAX: usize = 5;
/// Length in bytes of an event about a waiting thread.
const EVENT_BYTES: usize = 32;
/// Version of the interface.
const VERSION: u64 = 0xaa;
/// A thread that touches a missing page waits for it.
const MODE_MISSING: u64 = 1;

/// The memory.
pub struct LateMemory {
    start: *mut c_void,
    bytes: usize,
    fd: OwnedFd,
}

// SAFETY: no reference to the memory exists: only the kernel reads and writes it, in system calls.
unsafe impl Sync for LateMemory {}

impl LateMemory {
    /// So many bytes, in whole pages, all of them missing.
    ///
    /// # Errors
    /// Fails if the kernel does not offer userfaultfd, or not to this process.
    pub fn new(bytes: usize) -> io::Result<LateMemory> {
        assert!(bytes.is_multiple_of(PAGE_BYTES));
        // SAFETY: the descriptor is used for the mapping below only.
        let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC)? };
        request(&fd, API, &mut [VERSION, 0, 0, 0, 0])?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses, unmapped once, by the guard.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE)? };
        let memory = LateMemory { start, bytes, fd };
        request(&memory.fd, REGISTER, &mut [start as u64, bytes as u64, MODE_MISSING, 0, 0])?;
        Ok(memory)
    }

    /// Makes whole pages arrive, with these bytes.
    ///
    /// # Errors
    /// Fails if they are there already.
    pub fn arrive(&self, at: usize, pages: &[u8]) -> io::Result<()> {
        assert!(
            at.is_multiple_of(PAGE_BYTES) && pages.len().is_multiple_of(PAGE_BYTES) && at + pages.len() <= self.bytes
        );
        request(&self.fd, COPY, &mut [self.start as u64 + at as u64, pages.as_ptr() as u64, pages.len() as u64, 0, 0])
    }

    /// Waits until a thread waits for a page.
    ///
    /// # Errors
    /// Fails if none does within `limit`.
    pub fn wait(&self, limit: Duration) -> io::Result<()> {
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        if poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&limit))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut event = [0; EVENT_BYTES];
        rustix::io::read(&self.fd, &mut event)?;
        Ok(())
    }

    /// When the guard is dropped, all missing pages arrive, as zeros. Call it first in a scope in
    /// which a thread reads the memory: otherwise the thread would wait for ever if a page fails to
    /// arrive.
    pub fn arrives_at_the_end(&self) -> impl Drop {
        struct AtTheEnd<'a>(&'a LateMemory);
        impl Drop for AtTheEnd<'_> {
            fn drop(&mut self) {
                for at in (0..self.0.bytes).step_by(PAGE_BYTES) {
                    let _is_there = self.0.arrive(at, &[0; PAGE_BYTES]);
                }
            }
        }
        AtTheEnd(self)
    }

    /// Writes all of it into a file, by one call if the file system takes all at once.
    ///
    /// # Errors
    /// Returns the errors of the file system.
    pub fn write_to(&self, file: &File, at: u64) -> io::Result<()> {
        let mut done = 0;
        while done < self.bytes {
            // SAFETY: the rest of the mapping; the kernel only reads it.
            let written = unsafe {
                let from = self.start.cast::<u8>().add(done);
                libc::pwrite(file.as_raw_fd(), from.cast(), self.bytes - done, at as i64 + done as i64)
            };
            match usize::try_from(written) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => done += written,
                Err(_) => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }
}

impl Drop for LateMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping that was made, once; nothing reads it any more.
        let _cannot_fail = unsafe { munmap(self.start, self.bytes) };
    }
}

fn request(fd: &OwnedFd, request: u64, words: &mut [u64; WORDS_MAX]) -> io::Result<()> {
    // SAFETY: each of the requests above reads and writes at most so many words, and memory for
    // which its caller guarantees: the mapping, and a slice that is borrowed meanwhile.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, words.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_write_waits_for_pages_and_has_their_bytes() {
        let Ok(memory) = LateMemory::new(3 * PAGE_BYTES) else {
            return crate::skip("a_write_waits_for_pages_and_has_their_bytes", "needs userfaultfd");
        };
        let scratch = crate::Scratch::new("late").unwrap();
        let path = scratch.path().join("file");
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        let bytes: Vec<u8> = (0..3 * PAGE_BYTES).map(|at| (at / 16) as u8).collect();
        std::thread::scope(|scope| {
            let _end = memory.arrives_at_the_end();
            let writing = scope.spawn(|| memory.write_to(&file, 100));
            memory.wait(Duration::from_secs(60)).unwrap();
            memory.arrive(0, &bytes[..PAGE_BYTES]).unwrap();
            assert!(!writing.is_finished());
            memory.arrive(PAGE_BYTES, &bytes[PAGE_BYTES..]).unwrap();
            writing.join().unwrap().unwrap();
        });
        let mut read = vec![0; bytes.len()];
        file.read_exact_at(&mut read, 100).unwrap();
        assert_eq!(read, bytes);
        assert!(memory.arrive(0, &bytes[..PAGE_BYTES]).is_err(), "they are there");
    }
}
