//! A memory hog: a child that allocates memory, touches every page of it, and holds it until it is
//! dropped.
//!
//! The child is a bare fork without a program of its own, so that any test can put pressure on any
//! group. So it only makes system calls and stores, as the rules after a fork of a threaded process
//! require.

use crate::attempted;
use crate::group::Group;
use crate::process::{die_with_parent, join};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions};
use std::ffi::CString;
use std::io;
use std::time::{Duration, Instant};

/// Bytes between two touches: a page.
const STEP_BYTES: usize = 4096;

/// Descriptors of the child: one for its report, and one that keeps it alive.
const REPORT_FD: i32 = 3;
const HOLD_FD: i32 = 4;

/// A child that holds memory. Dropping it ends the child, which gives the memory back.
pub struct MemoryHog {
    pid: Pid,
    bytes: u64,
    report: OwnedFd,
    _hold: OwnedFd,
}

impl MemoryHog {
    /// Starts a child in `groups` that allocates `bytes` and touches all of it.
    pub fn start(bytes: u64, groups: &[&Group]) -> io::Result<MemoryHog> {
        let len = usize::try_from(bytes).map_err(io::Error::other)?;
        let joins: Vec<CString> = groups.iter().flat_map(|group| group.joins().iter().cloned()).collect();
        let (report, report_child) = pipe_with(PipeFlags::CLOEXEC)?;
        let (hold_child, hold) = pipe_with(PipeFlags::CLOEXEC)?;
        let parent = rustix::process::getpid();
        // SAFETY: the child makes only system calls, on memory that was prepared before, and leaves
        // with _exit.
        let forked = unsafe { libc::fork() };
        match forked {
            -1 => Err(attempted("forking a child to hold memory")(io::Error::last_os_error())),
            0 => child(parent, &joins, len, &report_child, &hold_child),
            pid => {
                let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("fork returned no process"))?;
                Ok(MemoryHog { pid, bytes, report, _hold: hold })
            }
        }
    }

    /// Waits until the child holds all of it. Fails if it was killed for that, or does not get it
    /// within `limit`.
    pub fn wait_until_held(&self, limit: Duration) -> io::Result<()> {
        let start = Instant::now();
        let (mut answer, bytes) = ([0u8; 1], self.bytes);
        loop {
            let left = limit.saturating_sub(start.elapsed());
            let timeout = left.try_into().map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            match poll(&mut [PollFd::new(&self.report, PollFlags::IN)], Some(&timeout)) {
                Ok(0) => {
                    let message = format!("a child did not get {bytes} bytes of memory within {limit:?}");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, message));
                }
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        match rustix::io::read(&self.report, &mut answer)? {
            1 => Ok(()),
            _ => {
                let message = format!("a child died while it allocated {bytes} bytes of memory");
                Err(io::Error::new(io::ErrorKind::OutOfMemory, message))
            }
        }
    }
}

impl Drop for MemoryHog {
    fn drop(&mut self) {
        // It was not waited for before, so the pid is still its own.
        let _ended_already = rustix::process::kill_process(self.pid, Signal::KILL);
        while matches!(rustix::process::waitpid(Some(self.pid), WaitOptions::empty()), Err(rustix::io::Errno::INTR)) {}
    }
}

/// Runs in the child.
fn child(parent: Pid, joins: &[CString], len: usize, report: &OwnedFd, hold: &OwnedFd) -> ! {
    let held = hold_memory(parent, joins, len, report.as_raw_fd(), hold.as_raw_fd());
    // SAFETY: ends the process without running anything that the parent registered.
    unsafe { libc::_exit(if held.is_ok() { 0 } else { 1 }) }
}

fn hold_memory(parent: Pid, joins: &[CString], len: usize, report: i32, hold: i32) -> io::Result<()> {
    for file in joins {
        join(file)?;
    }
    die_with_parent(parent, Signal::KILL)?;
    // SAFETY: plain system calls on descriptors that this process owns; no Rust value uses the low
    // numbers from here on. Both are moved away before one can overwrite the other.
    let (report, hold) = unsafe {
        let report = libc::fcntl(report, libc::F_DUPFD, HOLD_FD + 1);
        let hold = libc::fcntl(hold, libc::F_DUPFD, HOLD_FD + 1);
        if libc::dup2(report, REPORT_FD) < 0 || libc::dup2(hold, HOLD_FD) < 0 {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        // Open pipes of the parent's other children would keep those from seeing their end.
        libc::syscall(libc::SYS_close_range, HOLD_FD + 1, u32::MAX, 0);
        (OwnedFd::from_raw_fd(REPORT_FD), OwnedFd::from_raw_fd(HOLD_FD))
    };
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    // SAFETY: a new mapping at an address that the kernel chooses.
    let memory =
        unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)? };
    for at in (0..len).step_by(STEP_BYTES) {
        // SAFETY: inside the mapping of `len` bytes made above. Volatile, so that the touch really
        // happens.
        unsafe { memory.cast::<u8>().add(at).write_volatile(1) };
    }
    rustix::io::write(&report, &[1])?;
    // Returns at the latest when the parent closes its end; normally the parent kills this process
    // first.
    let mut never = [0u8; 1];
    while rustix::io::read(&hold, &mut never) == Err(rustix::io::Errno::INTR) {}
    Ok(())
}
