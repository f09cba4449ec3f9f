//! Sizes and times that the kernel keeps by itself with `--write back`. It does not take them from
//! answers (fs/fuse/inode.c, `fuse_get_cache_mask`), so they can differ from those of the backing
//! file:
//!
//! - The backing file system keeps coarser times: the kernel is told their granularity at mount.
//! - A write out of the kernel's cache has failed, and the backing file is shorter; or a time is
//!   outside of the range that the backing file system can keep. Then the kernel must forget the
//!   inode, once nobody has the file open, and looks it up again.

use crate::filesystem::Passthrough;
use crate::inode::{Believed, Inode, stat};
use crate::lifecycle::config::WriteMode;
use crate::ops::data::write_full;
use fuse::{Errno, abi};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{Mode, OFlags, Statx, Timespec, Timestamps, UTIME_OMIT, futimens, openat};
use std::sync::Arc;

/// Coarsest granularity that the kernel can be told, in nanoseconds.
const GRANULARITY_NS_MAX: u32 = 1_000_000_000;

/// File systems that have no files without a name, to try it with, and the granularity of their
/// times in nanoseconds (linux/magic.h). FAT keeps even seconds.
const COARSE: [(u32, u32); 7] = [
    (0x4d44, GRANULARITY_NS_MAX), // FAT
    (0x482b, GRANULARITY_NS_MAX), // HFS+
    (0x2011_bab0, 10_000_000),    // exFAT
    (0xff53_4d42, 100),           // CIFS
    (0xfe53_4d42, 100),           // SMB
    (0x7366_746e, 100),           // NTFS3
    (0x5346_544e, 100),           // NTFS
];

/// A time that shows any granularity, in nanoseconds.
const PROBE_NS: u32 = 123_456_789;

/// Smallest difference, in seconds, between the time that was set and the one that is kept, that
/// shows that the time was outside of the range. Even FAT's granularity is finer.
const CLAMPED_SECONDS: u64 = 3;

/// The granularity of the times of files in a directory, in nanoseconds, as far as it can be found
/// out.
pub(crate) fn time_granularity_ns(directory: impl AsFd) -> u32 {
    match kept_ns(directory.as_fd()) {
        Ok(kept) => granularity_of(kept),
        Err(_) => {
            let kind = rustix::fs::fstatfs(directory).map_or(0, |found| found.f_type as u32);
            COARSE.iter().find(|(known, _)| *known == kind).map_or(1, |(_, granularity)| *granularity)
        }
    }
}

/// Returns the part of [`PROBE_NS`] that a file without a name keeps, in nanoseconds.
fn kept_ns(directory: BorrowedFd<'_>) -> Result<u32, Errno> {
    let file = openat(directory, c".", OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC, Mode::RUSR)?;
    let last_modification = Timespec { tv_sec: 1_000_000_000, tv_nsec: PROBE_NS.into() };
    let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    futimens(&file, &Timestamps { last_access, last_modification })?;
    Ok(stat(&file)?.stx_mtime.tv_nsec)
}

fn granularity_of(kept: u32) -> u32 {
    let mut finer = (0..9).map(|power| 10u32.pow(power));
    finer.find(|granularity| PROBE_NS / granularity * granularity == kept).unwrap_or(GRANULARITY_NS_MAX)
}

/// Writes the rest of a short write out of the kernel's cache, to get its error. The kernel
/// evaluates only the error of such a write, not the number of bytes.
pub(crate) fn write_rest(fd: BorrowedFd<'_>, data: &[u8], offset: u64) -> Result<(), Errno> {
    match write_full(fd, data, offset, false)? {
        written if written == data.len() => Ok(()),
        _ => Err(Errno::IO),
    }
}

impl Passthrough {
    /// Records that a write out of the kernel's cache has failed: the kernel's size of the file may
    /// be wrong.
    pub(crate) fn write_from_cache_failed(&self, inode: &Inode) {
        if self.write_mode == WriteMode::Back {
            inode.mark_misbelieved();
        }
    }

    /// Checks the times of a file after they were set; `now` has the times that the file system
    /// kept.
    pub(crate) fn times_were_set(&self, inode: &Arc<Inode>, args: &abi::SetattrIn, now: &Statx) {
        let is_set = args.valid & abi::fattr::MTIME != 0 && args.valid & abi::fattr::MTIME_NOW == 0;
        if self.write_mode == WriteMode::Back
            && is_set
            && now.stx_mtime.tv_sec.abs_diff(args.mtime as i64) >= CLAMPED_SECONDS
        {
            inode.mark_misbelieved();
            self.correct_kernel(inode);
        }
    }

    /// Makes the kernel forget an inode if its size or times are wrong there. If the file is open,
    /// its last close does this. For a file with several names, the kernel keeps the wrong values
    /// until it needs the memory.
    pub(crate) fn correct_kernel(&self, inode: &Arc<Inode>) {
        if !inode.is_misbelieved() || inode.is_open() {
            return;
        }
        let mut believed = inode.name.lock();
        match std::mem::replace(&mut *believed, Believed::Dropping) {
            Believed::Name(name) => self.invalidations.request_name(inode, name),
            other => *believed = other,
        }
    }

    /// Handles a lookup of an inode that the kernel was to forget. The inode may have been in use
    /// at that moment, even by a notification of this daemon. Then the kernel has kept it, and must
    /// be told again.
    pub(crate) fn correct_kernel_again(&self, nodeid: u64) {
        if self.write_mode == WriteMode::Back
            && let Ok(inode) = self.inodes.get(nodeid)
        {
            self.correct_kernel(&inode);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn granularities() {
        let kept = [123_456_789, 123_456_700, 123_456_000, 120_000_000, 0, 7];
        assert_eq!(kept.map(granularity_of), [1, 100, 1000, 10_000_000, GRANULARITY_NS_MAX, GRANULARITY_NS_MAX]);
    }
}
