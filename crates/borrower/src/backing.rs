//! The borrower's interface to the backing directory: how to read a backing file, and how to detect
//! that it changed.

use std::io;

/// The stamp of a backing file: its size, and the times that every change of its bytes updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Last modification, in nanoseconds since the epoch.
    pub mtime_ns: i128,
    /// Last change of the inode, in nanoseconds since the epoch.
    pub ctime_ns: i128,
}

/// Whether an external writer may have been active when the stamp was taken, according to a check
/// after that. The kernel updates a file's times before its bytes. So the stamp during a write may
/// equal the stamp after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    /// No external writer: since then the file holds the bytes that belong to the stamp.
    None,
    /// There may have been one.
    Perhaps,
    /// Not checked: the check follows when the file is opened.
    Unasked,
}

/// The identity of a backing file for as long as it exists: no other file gets the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// The device of its file system.
    pub device: u64,
    /// Its inode number.
    pub inode: u64,
    /// A value that distinguishes it from an earlier file with that inode number: the file system's
    /// generation, else the time of birth, else 0.
    pub generation: u64,
}

/// An open backing file.
pub trait BackingFile: Send + Sync + 'static {
    /// Reads at `offset` until `buf` is full or the file ends; returns the number of bytes read.
    /// Must leave no pages in the page cache of the backing file.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Returns the file's stamp now.
    fn stamp(&self) -> io::Result<Stamp>;
}
