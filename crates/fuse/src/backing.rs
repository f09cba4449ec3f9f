//! Passthrough (Linux 6.9): registers backing files with the kernel, which then reads and writes
//! open files there by itself, without the daemon.
//!
//! The guarantees of passthrough are described in `mount`'s `passthrough.rs`.

use crate::Errno;
use crate::abi::{BackingMap, DEV_IOC_BACKING_CLOSE, DEV_IOC_BACKING_OPEN};
use rustix::fd::{AsFd, AsRawFd};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter, ioctl};
use std::ffi::c_void;

/// Registers a regular file with the kernel, by any descriptor of it. Returns its number in the
/// connection. Until [`close`], files may be opened that are passed through to it.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN, or where passthrough was not negotiated; ELOOP where the file lies
/// on a stacked file system.
pub fn open(connection: impl AsFd, file: impl AsFd) -> Result<u32, Errno> {
    let map = BackingMap { fd: file.as_fd().as_raw_fd(), ..BackingMap::default() };
    // SAFETY: the request reads a `BackingMap` through the pointer, and returns a number.
    unsafe { ioctl(connection, BackingOpen(map)) }
}

/// Removes the registration of that number. Files that are already open stay passed through. The
/// kernel may give the number to another file.
///
/// # Errors
/// ENOENT if there is none.
pub fn close(connection: impl AsFd, number: u32) -> Result<(), Errno> {
    // SAFETY: the request reads one u32 through the pointer, which the setter owns for the duration
    // of the call.
    unsafe { ioctl(connection, Setter::<{ DEV_IOC_BACKING_CLOSE }, u32>::new(number)) }
}

struct BackingOpen(BackingMap);

// SAFETY: the request takes a pointer to a structure that it only reads, and its result is a number
// of no other meaning.
unsafe impl Ioctl for BackingOpen {
    type Output = u32;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        DEV_IOC_BACKING_OPEN
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(number: IoctlOutput, _: *mut c_void) -> Result<u32, Errno> {
        u32::try_from(number).map_err(|_| Errno::IO)
    }
}
