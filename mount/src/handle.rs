//! What is open: files and directories, each under a number that is never used twice.

use crate::directory::Listing;
use crate::inode::Inode;
use crate::system::ProcPath;
use fuse::Errno;
use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags, open};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// An open file.
///
/// Below it is open without O_APPEND and O_DIRECT: the kernel may use any handle to write back or read for its page cache, so
/// both are decided per request. Only append-only files (chattr +a) keep O_APPEND, because they cannot be opened without.
pub(crate) struct OpenFile {
    /// The file.
    pub inode: Arc<Inode>,
    /// Open as the caller asked.
    pub fd: OwnedFd,
    /// Whether `fd` can be read from.
    pub readable: bool,
    /// Whether `fd` can be written to.
    pub writable: bool,
    reader: OnceLock<OwnedFd>,
    direct: OnceLock<OwnedFd>,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.inode.open_files.fetch_sub(1, Ordering::Relaxed);
    }
}

impl OpenFile {
    pub(crate) fn new(inode: Arc<Inode>, fd: OwnedFd, flags: OFlags) -> OpenFile {
        inode.open_files.fetch_add(1, Ordering::Relaxed);
        no_readahead(&fd);
        let access = flags & OFlags::ACCMODE;
        OpenFile {
            inode,
            fd,
            readable: access != OFlags::WRONLY,
            writable: access != OFlags::RDONLY,
            reader: OnceLock::new(),
            direct: OnceLock::new(),
        }
    }

    /// A descriptor to read from: its own, or where the kernel reads through a write-only one, another.
    pub(crate) fn reader(&self) -> Result<BorrowedFd<'_>, Errno> {
        if self.readable {
            return Ok(self.fd.as_fd());
        }
        self.another(&self.reader, OFlags::RDONLY)
    }

    /// A descriptor with O_DIRECT; EINVAL if the file system below has none.
    pub(crate) fn direct(&self) -> Result<BorrowedFd<'_>, Errno> {
        let access = if self.writable { OFlags::RDWR } else { OFlags::RDONLY };
        self.another(&self.direct, access | OFlags::DIRECT)
    }

    fn another<'a>(&self, slot: &'a OnceLock<OwnedFd>, flags: OFlags) -> Result<BorrowedFd<'a>, Errno> {
        if let Some(fd) = slot.get() {
            return Ok(fd.as_fd());
        }
        let synchronous = rustix::fs::fcntl_getfl(&self.fd)? & (OFlags::SYNC | OFlags::DSYNC);
        let fd = open(ProcPath::new(&self.fd).path(), flags | synchronous | OFlags::CLOEXEC, Mode::empty())?;
        no_readahead(&fd);
        Ok(slot.get_or_init(|| fd).as_fd())
    }
}

/// The kernel has read ahead on the mount already: what it read ahead below, too, would be cached there and asked for by nobody.
fn no_readahead(fd: impl AsFd) {
    let _ = rustix::fs::fadvise(fd, 0, None, rustix::fs::Advice::Random);
}

/// An open directory.
pub(crate) struct OpenDirectory {
    /// The directory.
    pub inode: Arc<Inode>,
    /// How far it was read.
    pub listing: Mutex<Listing>,
}

#[derive(Clone)]
enum Handle {
    File(Arc<OpenFile>),
    Directory(Arc<OpenDirectory>),
}

/// All that is open.
#[derive(Default)]
pub(crate) struct Handles {
    open: RwLock<HashMap<u64, Handle>>,
    next: AtomicU64,
}

impl Handles {
    fn insert(&self, handle: Handle) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.open.write().insert(number, handle);
        number
    }

    /// Adds a file; returns its number.
    pub(crate) fn add_file(&self, file: Arc<OpenFile>) -> u64 {
        self.insert(Handle::File(file))
    }

    /// Adds a directory; returns its number.
    pub(crate) fn add_directory(&self, directory: OpenDirectory) -> u64 {
        self.insert(Handle::Directory(Arc::new(directory)))
    }

    /// The open file of that number.
    pub(crate) fn file(&self, number: u64) -> Result<Arc<OpenFile>, Errno> {
        match self.open.read().get(&number) {
            Some(Handle::File(file)) => Ok(file.clone()),
            _ => Err(Errno::BADF),
        }
    }

    /// The open directory of that number.
    pub(crate) fn directory(&self, number: u64) -> Result<Arc<OpenDirectory>, Errno> {
        match self.open.read().get(&number) {
            Some(Handle::Directory(directory)) => Ok(directory.clone()),
            _ => Err(Errno::BADF),
        }
    }

    /// Closes it.
    pub(crate) fn remove(&self, number: u64) {
        let removed = self.open.write().remove(&number);
        drop(removed); // Closing may take its time: not under the lock.
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.open.read().len()
    }
}
