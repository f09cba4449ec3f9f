//! A mapping of a file under test, which may become shorter at any moment.
//!
//! The kernel copies to and from the mapping, through a pipe: it takes the same page faults as an
//! instruction would. If a page cannot be read, it returns EFAULT, while an instruction would end
//! the process by SIGBUS.

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MsyncFlags, ProtFlags};
use std::ffi::c_void;
use std::fs::File;
use std::io;

/// Bytes that pass the pipe at a time: every pipe has room for them.
const PIPE_BYTES: usize = 4096;

/// A mapping, to load from and store into.
pub struct Mapping {
    base: *mut c_void,
    bytes: usize,
}

/// The pipe that bytes go through. Empty between two calls.
pub struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

impl Pipe {
    /// A new one.
    ///
    /// # Errors
    /// Fails if there are no descriptors left.
    pub fn new() -> io::Result<Pipe> {
        let (read, write) = rustix::pipe::pipe()?;
        Ok(Pipe { read, write })
    }
}

impl Mapping {
    /// Maps the first `bytes` of a file, also if it is shorter.
    ///
    /// # Errors
    /// Fails if the kernel refuses.
    pub fn new(file: &File, bytes: usize) -> io::Result<Mapping> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses, unmapped once, by the guard.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0)? };
        Ok(Mapping { base, bytes })
    }

    /// Loads bytes from `at` on. Returns the number of bytes before the first page that cannot be
    /// read.
    ///
    /// # Errors
    /// Fails if the pipe does not work.
    pub fn load(&self, pipe: &Pipe, at: usize, to: &mut [u8]) -> io::Result<usize> {
        assert!(at + to.len() <= self.bytes);
        let mut done = 0;
        while done < to.len() {
            // Never across a page, so that a missing page does not affect bytes of the page before.
            let piece = (to.len() - done).min(PIPE_BYTES - (at + done) % PIPE_BYTES);
            // SAFETY: inside the mapping, as asserted. The kernel only reads it, and returns EFAULT
            // if there is no page.
            let sent = unsafe {
                let from = self.base.cast::<u8>().add(at + done);
                libc::write(rustix::fd::AsRawFd::as_raw_fd(&pipe.write), from.cast(), piece)
            };
            match usize::try_from(sent) {
                Ok(sent) => {
                    let mut got = 0;
                    while got < sent {
                        got += rustix::io::read(&pipe.read, &mut to[done + got..done + sent])?;
                    }
                    done += sent;
                }
                Err(_) => match io::Error::last_os_error() {
                    error if error.raw_os_error() == Some(Errno::FAULT.raw_os_error()) => return Ok(done),
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
        Ok(done)
    }

    /// Stores bytes from `at` on.
    ///
    /// # Errors
    /// Returns EFAULT if a page cannot be written.
    pub fn store(&self, pipe: &Pipe, at: usize, from: &[u8]) -> io::Result<()> {
        assert!(at + from.len() <= self.bytes);
        let mut done = 0;
        while done < from.len() {
            let piece = (from.len() - done).min(PIPE_BYTES);
            let sent = rustix::io::write(&pipe.write, &from[done..done + piece])?;
            let mut got = 0;
            while got < sent {
                // SAFETY: inside the mapping, as asserted. No reference to these bytes exists:
                // other processes change them, too.
                let stored = unsafe {
                    let to = self.base.cast::<u8>().add(at + done + got);
                    libc::read(rustix::fd::AsRawFd::as_raw_fd(&pipe.read), to.cast(), sent - got)
                };
                match usize::try_from(stored) {
                    Ok(stored) => got += stored,
                    Err(_) => match io::Error::last_os_error() {
                        error if error.kind() == io::ErrorKind::Interrupted => {}
                        error => return Err(error),
                    },
                }
            }
            done += sent;
        }
        Ok(())
    }

    /// Unmaps the pages of this process, so that the kernel may evict them.
    pub fn let_go(&self) {
        // SAFETY: our own mapping of a file: its content is the file's, before and after.
        let _only_advice = unsafe { rustix::mm::madvise(self.base, self.bytes, Advice::LinuxDontNeed) };
    }

    /// Writes all stored data.
    ///
    /// # Errors
    /// Returns the errors of the file system.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: our own mapping.
        let synced = unsafe { rustix::mm::msync(self.base, self.bytes, MsyncFlags::SYNC) };
        synced.map_err(io::Error::from)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping that was made, once; nothing refers to it any more.
        let _cannot_fail = unsafe { rustix::mm::munmap(self.base, self.bytes) };
    }
}
