//! Mounts that this process sees: reads their table, and detaches them.

use crate::attempted;
use std::io;
use std::path::{Path, PathBuf};

/// The text of the table of mounts that this process sees.
pub(crate) fn table() -> io::Result<Vec<u8>> {
    os::mountinfo::read().map_err(attempted("reading /proc/self/mountinfo"))
}

/// Detaches all mounts at or under `directory`, the latest first. Returns those that could not be
/// detached.
pub(crate) fn detach_under(directory: &Path) -> Vec<PathBuf> {
    let Ok(table) = table() else { return Vec::new() };
    let places = os::mountinfo::mounts(&table).rev().map(|mount| mount.mountpoint());
    places.filter(|place| place.starts_with(directory) && !detach(place)).collect()
}

fn detach(at: &Path) -> bool {
    use rustix::mount::{UnmountFlags, unmount};
    if unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {
        return true;
    }
    // Without root only the setuid program may do it, and only for mounts made with its help.
    let status = std::process::Command::new("fusermount3").args(["-u", "-z", "-q", "--"]).arg(at).status();
    status.is_ok_and(|status| status.success())
}
