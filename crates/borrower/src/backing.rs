//! What the borrower knows of the directory below: how to read a file there, and how to see that it
//! changed.

use std::io;

/// What a file below looked like: size, and the times that every change of its bytes moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Last modification, in nanoseconds since the epoch.
    pub mtime_ns: i128,
    /// Last change of the inode, in nanoseconds since the epoch.
    pub ctime_ns: i128,
}

/// Whether somebody else may have been writing the file when its stamp was taken, as was found out
/// after that. The kernel moves a file's times before its bytes: so the stamp of a write that is
/// under way is the one that the file has when it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    /// Nobody: the file has held the bytes that belong to the stamp since.
    None,
    /// Somebody may have been.
    Perhaps,
    /// That was not looked at: it will be when the file is opened.
    Unasked,
}

/// Which file below, for as long as it exists: the same name is not given to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// The device that holds it.
    pub device: u64,
    /// Its inode number.
    pub inode: u64,
    /// What tells it from an earlier file with that number: the file system's generation, else the
    /// time of birth, else 0.
    pub generation: u64,
}

/// An open file below.
pub trait BackingFile: Send + Sync + 'static {
    /// Reads at `offset` until `buf` is full or the file ends; returns the bytes read. Must leave
    /// nothing behind in the page cache below.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    /// What the file looks like now.
    fn stamp(&self) -> io::Result<Stamp>;
}
