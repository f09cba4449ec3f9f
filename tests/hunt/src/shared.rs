//! The ledger's memory: a file that every process maps.

use crate::ledger::Ledger;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

/// Makes the file, all zeros, and allocates its memory now: otherwise it would be charged to the
/// group of the process that touches it first.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn create(path: &Path) -> io::Result<&'static Ledger> {
    std::fs::write(path, vec![0; size_of::<Ledger>()])?;
    open(path)
}

/// Maps the file, for the lifetime of this process.
///
/// # Errors
/// Fails if it cannot be opened or mapped, or does not have the size of a ledger.
pub fn open(path: &Path) -> io::Result<&'static Ledger> {
    let file = File::options().read(true).write(true).open(path)?;
    let bytes = size_of::<Ledger>();
    if file.metadata()?.len() != bytes as u64 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "this is no ledger"));
    }
    // SAFETY: a new mapping at an address that the kernel chooses, never unmapped.
    let memory =
        unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)? };
    // SAFETY: the mapping has that size, is page aligned, and no process makes the file shorter.
    // Everything in a ledger is atomic, for which any bytes are valid, and which processes may
    // share.
    Ok(unsafe { &*memory.cast::<Ledger>() })
}

/// Milliseconds of the clock that all processes share.
pub fn now_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1000 + u64::try_from(now.tv_nsec).unwrap_or(0) / 1_000_000
}

impl Ledger {
    /// Whether all processes have to end.
    pub fn stops(&self) -> bool {
        self.stop.load(Relaxed) != 0
    }
}
