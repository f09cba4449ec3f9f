//! Attributes of a backing file (statx(2)), and parts of them.

use borrower::Stamp;
use fuse::Errno;
use rustix::fd::AsFd;
use rustix::fs::{AtFlags, Statx, StatxFlags, statx};

/// The fields that every stat requests.
pub(crate) const STATX_MASK: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

/// Returns the attributes of an open file.
pub(crate) fn stat(fd: impl AsFd) -> Result<Statx, Errno> {
    statx(fd, c"", AtFlags::EMPTY_PATH, STATX_MASK)
}

/// The part of a stat that tells whether a file was changed.
pub(crate) fn stamp_of(stat: &Statx) -> Stamp {
    let ns = |time: &rustix::fs::StatxTimestamp| i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec);
    Stamp { size_bytes: stat.stx_size, mtime_ns: ns(&stat.stx_mtime), ctime_ns: ns(&stat.stx_ctime) }
}

/// The device number of a stat, as `st_dev` has it.
pub(crate) fn device_of(stat: &Statx) -> u64 {
    rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor)
}
