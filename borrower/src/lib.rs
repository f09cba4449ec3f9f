//! The borrower: keeps what the kernel evicts in the memory of lenders, and answers misses from there.

mod below;

pub use below::{Below, FileIdentity, Stamp};

use page::FileKey;
use std::io;
use std::sync::Arc;

/// A change of a file, as the mount sees it coming.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A write out of the kernel's page cache, which holds the new bytes already and cannot evict them before the answer.
    Buffered {
        /// First byte written.
        offset: u64,
        /// Bytes written.
        len: u64,
    },
    /// Any other change of the bytes `start..end`: truncation, fallocate, direct write, copy. The kernel drops what it
    /// caches of them only after the answer. A change of the file's size reaches to the end of the file: `end` is `u64::MAX`.
    Other {
        /// First byte changed.
        start: u64,
        /// Byte behind the last one changed.
        end: u64,
    },
    /// Attributes, names, extended attributes: no byte changes, but the change time does.
    Attributes,
}

/// A file that the borrower knows.
pub struct File {
    key: FileKey,
}

impl File {
    /// The name that the kernel (as the inode's generation) and the lenders know it by.
    pub fn key(&self) -> FileKey {
        self.key
    }
}

/// The borrower.
pub struct Borrower {}

impl Borrower {
    /// The file of that identity, known from now on until [`Borrower::retire`]. Its pages may be known from before.
    pub fn adopt(&self, _identity: FileIdentity) -> Arc<File> {
        Arc::new(File { key: FileKey(1) })
    }

    /// The kernel has forgotten the inode. If it was `deleted` below, its pages are dropped; else they stay known as long as
    /// there is room.
    pub fn retire(&self, _file: &Arc<File>, _deleted: bool) {}

    /// Answers a READ out of the kernel's page cache (never a direct one): from lenders where they have the pages, else from below.
    /// Returns the bytes read, which are fewer than asked for only at the end of the file.
    pub fn read(&self, _file: &File, below: &dyn Below, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        below.read_at(buf, offset)
    }

    /// Announces a change, before it is applied below; `before` is what the file looks like now.
    pub fn change<'a>(&'a self, file: &'a File, _change: Change, _before: Stamp) -> ChangeGuard<'a> {
        ChangeGuard { _file: file }
    }

    /// Compares the file with what we left. False: somebody changed it beside us, its remote pages are forgotten, and the kernel
    /// must drop what it caches of it (do not answer an open with FOPEN_KEEP_CACHE).
    pub fn observe(&self, _file: &File, _now: Stamp) -> bool {
        false
    }
}

/// A change under way. Must end, by [`ChangeGuard::applied`] or by being dropped (the change failed or its extent is not known), before the
/// kernel gets its answer.
pub struct ChangeGuard<'a> {
    _file: &'a File,
}

impl ChangeGuard<'_> {
    /// The change was applied below as announced; `after` is what the file looks like now.
    pub fn applied(self, _after: Stamp) {}
}
