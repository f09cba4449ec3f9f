//! Answers to requests. Each is one system call; data are written from where they are, without a
//! copy.
//!
//! A [`Reply`] answers once: sending consumes it, and a reply that is dropped unsent answers EIO.
//! So no caller of the file system waits for ever for an answer that was forgotten.

use crate::Errno;
use crate::abi;
use rustix::io::writev;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, BorrowedFd};
use zerocopy::{Immutable, IntoBytes};

/// The error numbers of an answer must be below this one (fs/fuse/dev.c, fuse_dev_do_write).
const ERRNO_END: i32 = 512;

/// The obligation to answer one request.
#[must_use]
pub struct Reply<'a> {
    device: BorrowedFd<'a>,
    unique: u64,
    open: bool,
}

impl<'a> Reply<'a> {
    pub(crate) fn new(device: BorrowedFd<'a>, unique: u64) -> Reply<'a> {
        Reply { device, unique, open: true }
    }

    /// Sends nothing, for requests that have no answer (FORGET).
    pub fn none(mut self) {
        self.open = false;
    }

    /// Answers with success and no data.
    pub fn ok(self) -> Result<(), Errno> {
        self.parts(&[])
    }

    /// Answers with an error. The kernel rejects numbers from 512 on, and its caller would wait for
    /// ever. Some backing file systems return such internal numbers (NFS does): they become EIO.
    pub fn error(mut self, errno: Errno) -> Result<(), Errno> {
        self.open = false;
        let number = errno.raw_os_error();
        send(self.device, self.unique, if number < ERRNO_END { -number } else { -Errno::IO.raw_os_error() }, &[])
    }

    /// Answers with a structure.
    pub fn value<T: IntoBytes + Immutable>(self, value: &T) -> Result<(), Errno> {
        self.parts(&[value.as_bytes()])
    }

    /// Answers with bytes.
    pub fn data(self, data: &[u8]) -> Result<(), Errno> {
        self.parts(&[data])
    }

    /// Answers with up to three pieces. An error means that the kernel did not accept the answer,
    /// so the caller of the file system will never get it. References that it hands out (lookup
    /// counts, file handles) must be taken back.
    pub fn parts(mut self, parts: &[&[u8]]) -> Result<(), Errno> {
        self.open = false;
        send(self.device, self.unique, 0, parts)
    }
}

impl Drop for Reply<'_> {
    fn drop(&mut self) {
        if self.open {
            let _ = send(self.device, self.unique, -Errno::IO.raw_os_error(), &[]);
        }
    }
}

/// Writes a message to the device: an answer, or, if `unique` is 0, a notification.
pub(crate) fn send(device: BorrowedFd<'_>, unique: u64, error: i32, parts: &[&[u8]]) -> Result<(), Errno> {
    const PARTS_MAX: usize = 3;
    let parts = parts.get(..parts.len().min(PARTS_MAX)).unwrap_or_default();
    let len = size_of::<abi::OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
    let header = abi::OutHeader { len: len as u32, error, unique };
    let mut slices = [IoSlice::new(&[]); PARTS_MAX + 1];
    slices[0] = IoSlice::new(header.as_bytes());
    for (slice, part) in slices[1..].iter_mut().zip(parts) {
        *slice = IoSlice::new(part);
    }
    loop {
        match writev(device, &slices[..=parts.len()]) {
            Err(Errno::INTR) => {}
            result => return result.map(|_| ()),
        }
    }
}

/// Writes a notification whose data end with `unreadable` bytes that the kernel cannot read.
pub(crate) fn send_unreadable(device: BorrowedFd<'_>, code: i32, data: &[u8], unreadable: usize) -> Result<(), Errno> {
    let len = size_of::<abi::OutHeader>() + data.len() + unreadable;
    let header = abi::OutHeader { len: len as u32, error: code, unique: 0 };
    let part = |bytes: &[u8]| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // Nothing is mapped at address 0.
    let unreadable = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: unreadable };
    let parts = [part(header.as_bytes()), part(data), unreadable];
    loop {
        // SAFETY: the kernel only reads from these addresses, of which two are borrowed, and
        // refuses the third one.
        let sent = unsafe { libc::writev(device.as_raw_fd(), parts.as_ptr(), parts.len() as i32) };
        if sent >= 0 {
            return Ok(());
        }
        match Errno::from_io_error(&std::io::Error::last_os_error()) {
            Some(Errno::INTR) => {}
            errno => return Err(errno.unwrap_or(Errno::IO)),
        }
    }
}
