//! A lease on a file (fcntl(2), F_SETLEASE), whose holder does not react when another process opens
//! the file.

use crate::wait::wait_until;
use rustix::fd::AsRawFd;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

/// The signal of a lease: set by this command, which the crate `libc` does not have
/// (asm-generic/fcntl.h).
const F_SETSIG: libc::c_int = 10;

/// A process that has just been forked may have a copy of the descriptor through which the file was
/// written, until it executes its program.
const FORKED_MAX: Duration = Duration::from_secs(60);

/// The lease. Dropping it gives the lease up.
pub struct Lease {
    file: File,
    kind: libc::c_int,
}

impl Lease {
    /// A lease for reading delays processes that open the file for writing; another one delays all.
    ///
    /// # Errors
    /// Fails if another process has the file open, for longer than it takes to start a program.
    pub fn take(path: &Path, for_reading: bool) -> io::Result<Lease> {
        let file = File::options().read(true).write(!for_reading).open(path)?;
        let kind = if for_reading { libc::F_RDLCK } else { libc::F_WRLCK };
        // The kernel's signal about a waiting process is one that is ignored.
        let take = || {
            // SAFETY: no memory is passed.
            unsafe {
                libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG) == 0
                    && libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) == 0
            }
        };
        match wait_until(FORKED_MAX, take) {
            true => Ok(Lease { file, kind }),
            false => Err(io::Error::last_os_error()),
        }
    }

    /// Whether a process waits.
    pub fn holds_somebody_up(&self) -> bool {
        // SAFETY: no memory is passed.
        unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_GETLEASE) != self.kind }
    }
}
