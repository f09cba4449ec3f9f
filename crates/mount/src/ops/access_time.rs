//! Access times of files that are read from the kernel's cache of the mount.
//!
//! A read that the cache or a lender answers never reaches the backing file, so its access time
//! would stay what it was, and programs that delete what nobody has read for days (tmpreaper,
//! systemd-tmpfiles) would delete files in daily use. But each file is opened before it is read,
//! mapped or executed, and an open reaches the daemon. So an open for reading counts as a read, by
//! the rule of `relatime`, Linux's default: the access time moves when it is not younger than the
//! last change, or older than a day.
//!
//! The daemon has the backing kernel move it, by a read at the end of the file, which finds no byte
//! (mm/filemap.c, `filemap_read`, calls `file_accessed` in any case). So nothing is read from the
//! disk, and `noatime` of the backing mount holds. utimensat(2) would move the change time, which
//! tells whether a file was changed.

use crate::filesystem::Passthrough;
use crate::inode::Inode;
use rustix::fd::AsFd;
use rustix::fs::{AtFlags, OFlags, Statx, StatxFlags, StatxTimestamp, statx};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// An access time that is older than this moves with any read, as in the kernel (fs/inode.c,
/// `relatime_need_update`).
const RELATIME_MAX: Duration = Duration::from_secs(24 * 60 * 60);

impl Passthrough {
    /// Counts an open of a file as an access. `fd` is open on the backing file, `asked` are the
    /// flags of the open. Must be called before the open is answered.
    pub(crate) fn count_access(&self, inode: &Inode, fd: impl AsFd, asked: OFlags) {
        let reads = asked & OFlags::ACCMODE != OFlags::WRONLY;
        // No flags at all: the kernel's own open, for an ioctl.
        if !reads || asked.is_empty() || asked.contains(OFlags::NOATIME) {
            return;
        }
        let look = || {
            let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
            statx(&fd, c"", flags, StatxFlags::ATIME | StatxFlags::MTIME | StatxFlags::CTIME | StatxFlags::SIZE)
        };
        let Ok(before) = look() else { return };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if !is_due(&before, now) || rustix::io::pread(&fd, &mut [0], before.stx_size).is_err() {
            return;
        }
        if look().is_ok_and(|after| moment(&after.stx_atime) != moment(&before.stx_atime)) {
            self.invalidations.forget_attributes(inode.nodeid);
        }
    }
}

/// Whether an access at `now` (since 1970) moves the access time.
fn is_due(found: &Statx, now: Duration) -> bool {
    let accessed = moment(&found.stx_atime);
    let is_old = now.as_secs() as i64 - found.stx_atime.tv_sec >= RELATIME_MAX.as_secs() as i64;
    accessed <= moment(&found.stx_mtime) || accessed <= moment(&found.stx_ctime) || is_old
}

fn moment(time: &StatxTimestamp) -> (i64, u32) {
    (time.tv_sec, time.tv_nsec)
}
