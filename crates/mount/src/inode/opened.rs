//! The descriptors of open files, and sharing of them.
//!
//! Each open file has a descriptor of its own, as long as its user's share allows one
//! (`descriptors.rs`). Beyond that share, an open of the same file by the same user with the same
//! flags shares the descriptor of the previous open, instead of failing. So a program that opens
//! one file again and again reaches its own limit first, as on any file system. The backing file is
//! opened in any case, so that errors and revalidation are those of any open. That descriptor is
//! closed again.
//!
//! Programs do not notice the sharing: the kernel keeps offsets and locks, O_APPEND and O_DIRECT
//! are decided for each request, and each sharing open gets a failed sync once
//! ([`ReportedFailures`]).

use crate::filesystem::Passthrough;
use crate::inode::Inode;
use crate::inode::descriptors::Taken;
use fuse::Errno;
use parking_lot::Mutex;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Advice, OFlags, fadvise};
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

/// A descriptor of an open file, of one open or of several.
pub(crate) struct Opened {
    fd: OwnedFd,
    /// The flags with which it is open.
    pub flags: OFlags,
    /// The charge of the user who opened it.
    pub taken: Taken,
    /// The handle for which the supervisor has a duplicate of it.
    pub kept_for: Mutex<Option<u64>>,
    /// Number of failed syncs.
    failures: AtomicU32,
}

impl Opened {
    /// `fd` is open with `flags`.
    pub(crate) fn new(fd: OwnedFd, flags: OFlags, taken: Taken) -> Arc<Opened> {
        no_readahead(&fd);
        let flags = flags - OFlags::CLOEXEC; // The descriptor's, not the file's.
        Arc::new(Opened { fd, flags, taken, kept_for: Mutex::default(), failures: AtomicU32::new(0) })
    }

    fn is_alike(&self, uid: u32, flags: OFlags) -> bool {
        self.taken.uid() == uid && self.flags == flags - OFlags::CLOEXEC
    }
}

impl Deref for Opened {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.fd
    }
}

impl AsFd for Opened {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Turns read-ahead off. The kernel already reads ahead on the mount; pages that it also read ahead
/// in the backing file would be cached there in vain.
pub(crate) fn no_readahead(fd: impl AsFd) {
    let _ = fadvise(fd, 0, None, Advice::Random);
}

/// The number of failed syncs of a descriptor that were reported to one of its opens. (The kernel
/// reports each failure once for each descriptor.)
pub(crate) struct ReportedFailures(AtomicU32);

impl ReportedFailures {
    /// The state of a new open, which gets failures from now on.
    pub(crate) fn from_now(opened: &Opened) -> ReportedFailures {
        ReportedFailures(AtomicU32::new(opened.failures.load(Ordering::Relaxed)))
    }

    /// Returns the result of a sync, or EIO if the kernel has reported a failure to another open of
    /// the descriptor, but not yet to this one.
    pub(crate) fn report(&self, opened: &Opened, synced: Result<(), Errno>) -> Result<(), Errno> {
        if synced.is_err() {
            opened.failures.fetch_add(1, Ordering::Relaxed);
        }
        let failures = opened.failures.load(Ordering::Relaxed);
        let is_news = self.0.swap(failures, Ordering::Relaxed) != failures;
        if is_news { synced.and(Err(Errno::IO)) } else { synced }
    }
}

/// The newest descriptor of a file, while it is open.
#[derive(Default)]
pub(crate) struct Newest(Mutex<Weak<Opened>>);

impl Newest {
    /// Sets the newest descriptor.
    pub(crate) fn set(&self, opened: &Arc<Opened>) {
        *self.0.lock() = Arc::downgrade(opened);
    }

    fn get(&self) -> Option<Arc<Opened>> {
        self.0.lock().upgrade()
    }
}

impl Passthrough {
    /// Opens a backing file for a user. `waits` is as for [`Passthrough::open`]. Beyond the user's
    /// share of descriptors, the descriptor of a previous open is shared.
    ///
    /// # Errors
    /// Errors of the backing file system, and EMFILE.
    pub(crate) fn open_or_share(
        &self,
        inode: &Inode,
        uid: u32,
        asked: OFlags,
        waits: bool,
    ) -> Result<Arc<Opened>, Errno> {
        let taken = self.take_descriptor(uid, inode.charge());
        let newest = match &taken {
            Ok(_) => None,
            Err(errno) => Some(inode.newest.get().filter(|newest| newest.taken.uid() == uid).ok_or(*errno)?),
        };
        let (fd, flags) = self.open_backing(inode, asked, waits)?;
        let opened = match (taken, newest) {
            (Ok(taken), _) => Opened::new(fd, flags, taken),
            (Err(_), Some(newest)) if newest.is_alike(uid, flags) => return Ok(newest),
            (Err(errno), _) => return Err(errno),
        };
        inode.newest.set(&opened);
        Ok(opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inode::descriptors::Descriptors;

    #[test]
    fn each_open_gets_a_failed_sync_once() {
        let taken = Descriptors::new(1024, 2, 10, 0).take(0, 1).unwrap();
        let opened = Opened::new(tempfile::tempfile().unwrap().into(), OFlags::RDWR, taken);
        let (one, two) = (ReportedFailures::from_now(&opened), ReportedFailures::from_now(&opened));
        assert_eq!(one.report(&opened, Err(Errno::NOSPC)), Err(Errno::NOSPC));
        assert_eq!(one.report(&opened, Ok(())), Ok(()));
        assert_eq!(two.report(&opened, Ok(())), Err(Errno::IO));
        assert_eq!(two.report(&opened, Ok(())), Ok(()));
        assert_eq!(ReportedFailures::from_now(&opened).report(&opened, Ok(())), Ok(()));
    }
}
