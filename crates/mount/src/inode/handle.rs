//! The open files and directories, each with a number that is never used twice.
//!
//! The supervisor has a duplicate of each file's descriptor before the kernel gets the number, so
//! open files outlive this daemon. A successor opens directories again, because each READDIR has
//! its offset.

use crate::backing::ahead::Ahead;
use crate::backing::read::drop_clean;
use crate::inode::Inode;
use crate::inode::descriptors::Taken;
use crate::inode::opened::{Opened, ReportedFailures, no_readahead};
use crate::ops::directories::Listing;
use crate::system::ProcPath;
use crate::takeover::Keep;
use crate::takeover::channel::Held;
use crate::takeover::layout::header;
use crate::takeover::memory::OpenSlot;
use fuse::Errno;
use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags, open};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// An open file.
///
/// The backing file is open without O_APPEND and O_DIRECT. The kernel may use any handle to write
/// back or read for its page cache, so both are decided for each request. Only append-only files
/// (chattr +a) keep O_APPEND, because they cannot be opened without.
pub(crate) struct OpenFile {
    /// The file.
    pub inode: Arc<Inode>,
    /// The descriptor, with the caller's access mode.
    pub fd: Arc<Opened>,
    /// Whether `fd` can be read from.
    pub readable: bool,
    /// Whether `fd` can be written to.
    pub writable: bool,
    /// Whether all writes to `fd` append, because the file is append-only.
    pub appends: bool,
    /// The id of the backing file, if the kernel passes this file through.
    pub backing: Option<u32>,
    /// Whether the kernel was told at open to drop its cache of the file, and may not have done so
    /// yet.
    drops: AtomicBool,
    reader: OnceLock<(OwnedFd, Taken)>,
    direct: OnceLock<(OwnedFd, Taken)>,
    /// The failed syncs of `fd` that this open has got.
    pub reported: ReportedFailures,
    /// The read-ahead state of a stream in it.
    pub ahead: Mutex<Ahead>,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.in_use();
        if let Some(fetched) = self.ahead.get_mut().fetched() {
            drop_clean(&self.fd, fetched.start, fetched.end);
        }
        self.inode.closed();
    }
}

impl OpenFile {
    /// Creates an open file. `inode` has counted the open ([`Inode::opened`], [`Inode::was_open`])
    /// and returned `backing`; it is notified when this is dropped.
    pub(crate) fn new(inode: Arc<Inode>, fd: Arc<Opened>, backing: Option<u32>) -> OpenFile {
        let access = fd.flags & OFlags::ACCMODE;
        OpenFile {
            inode,
            reported: ReportedFailures::from_now(&fd),
            readable: access != OFlags::WRONLY,
            writable: access != OFlags::RDONLY,
            appends: fd.flags.contains(OFlags::APPEND),
            fd,
            backing,
            drops: AtomicBool::new(false),
            reader: OnceLock::new(),
            direct: OnceLock::new(),
            ahead: Mutex::default(),
        }
    }

    /// Records that the answer to the open makes the kernel drop its cache of the file. The kernel
    /// does so before it returns the descriptor to the program (fs/fuse/file.c, fuse_open).
    pub(crate) fn drops_cache(&self) {
        if let Some(file) = &self.inode.file {
            file.drop_begins();
            self.drops.store(true, Ordering::Relaxed);
        }
    }

    /// Records that the process uses the file or has closed it, which shows that the kernel has
    /// dropped its cache.
    pub(crate) fn in_use(&self) {
        if self.drops.load(Ordering::Relaxed)
            && self.drops.swap(false, Ordering::Relaxed)
            && let Some(file) = &self.inode.file
        {
            file.drop_ended();
        }
    }

    /// A descriptor to read from: its own, or another one if the kernel reads through a write-only
    /// one.
    pub(crate) fn reader(&self) -> Result<BorrowedFd<'_>, Errno> {
        if self.readable {
            return Ok(self.fd.as_fd());
        }
        self.another(&self.reader, OFlags::RDONLY, || Ok(self.fd.taken.another_anyway()))
    }

    /// A descriptor with O_DIRECT. Fails with EINVAL if the backing file system has no O_DIRECT,
    /// and with EMFILE beyond the share of the user who opened the file.
    pub(crate) fn direct(&self) -> Result<BorrowedFd<'_>, Errno> {
        let access = if self.writable { OFlags::RDWR } else { OFlags::RDONLY };
        self.another(&self.direct, access | OFlags::DIRECT, || self.fd.taken.another())
    }

    fn another<'a>(
        &self,
        slot: &'a OnceLock<(OwnedFd, Taken)>,
        flags: OFlags,
        take: impl FnOnce() -> Result<Taken, Errno>,
    ) -> Result<BorrowedFd<'a>, Errno> {
        if let Some((fd, _)) = slot.get() {
            return Ok(fd.as_fd());
        }
        let taken = take()?;
        let kept = rustix::fs::fcntl_getfl(&self.fd)? & (OFlags::SYNC | OFlags::DSYNC | OFlags::APPEND);
        let fd = open(ProcPath::new(&self.fd).path(), flags | kept | OFlags::CLOEXEC, Mode::empty())?;
        no_readahead(&fd);
        Ok(slot.get_or_init(|| (fd, taken)).0.as_fd())
    }
}

/// An open directory.
pub(crate) struct OpenDirectory {
    /// The directory.
    pub inode: Arc<Inode>,
    /// The state of reading it.
    pub listing: Mutex<Listing>,
    /// The charge of the user who opened it.
    pub taken: Taken,
}

enum Handle {
    File(Arc<OpenFile>),
    Directory(Arc<OpenDirectory>),
}

/// All open files and directories.
pub(crate) struct Handles {
    open: RwLock<HashMap<u64, Slotted>>,
    keep: Arc<Keep>,
}

struct Slotted {
    handle: Handle,
    /// Its slot in the state memory. `None` beyond the bound.
    slot: Option<OpenSlot>,
}

impl Handles {
    pub(crate) fn new(keep: Arc<Keep>) -> Handles {
        Handles { open: RwLock::default(), keep }
    }

    fn insert(&self, inode: &Inode, handle: Handle) -> u64 {
        let memory = &self.keep.memory;
        let number = memory.header(header::LAST_HANDLE).fetch_add(1, Ordering::Relaxed) + 1;
        let slot = memory.take_open();
        if let Some(slot) = &slot {
            let (is_directory, uid, flags) = match &handle {
                Handle::File(file) => {
                    // The supervisor already has a shared descriptor.
                    let mut kept_for = file.fd.kept_for.lock();
                    if kept_for.is_none() {
                        self.keep.hold(Held::Open(number), file.fd.as_fd());
                        *kept_for = Some(number);
                    }
                    (false, file.fd.taken.uid(), file.fd.flags)
                }
                Handle::Directory(directory) => (true, directory.taken.uid(), OFlags::RDONLY),
            };
            slot.fill(number, inode.nodeid, is_directory, uid, flags.bits());
        }
        self.open.write().insert(number, Slotted { handle, slot });
        number
    }

    /// Adds a file; returns its number.
    pub(crate) fn add_file(&self, file: Arc<OpenFile>) -> u64 {
        self.insert(&file.inode, Handle::File(file.clone()))
    }

    /// Adds a directory; returns its number.
    pub(crate) fn add_directory(&self, directory: OpenDirectory) -> u64 {
        let directory = Arc::new(directory);
        self.insert(&directory.inode, Handle::Directory(directory.clone()))
    }

    /// Adds a file that was open in the previous daemon.
    pub(crate) fn restore_file(&self, number: u64, slot: OpenSlot, fd: Arc<Opened>, inode: Arc<Inode>) {
        let backing = inode.was_open();
        let handle = Handle::File(Arc::new(OpenFile::new(inode, fd, backing)));
        self.open.write().insert(number, Slotted { handle, slot: Some(slot) });
    }

    /// Adds a directory that was open in the previous daemon.
    pub(crate) fn restore_directory(&self, number: u64, slot: OpenSlot, fd: OwnedFd, inode: Arc<Inode>, taken: Taken) {
        let listing = Mutex::new(Listing::new(fd));
        let handle = Handle::Directory(Arc::new(OpenDirectory { inode, listing, taken }));
        self.open.write().insert(number, Slotted { handle, slot: Some(slot) });
    }

    /// The open file of that number.
    pub(crate) fn file(&self, number: u64) -> Result<Arc<OpenFile>, Errno> {
        match self.open.read().get(&number).map(|open| &open.handle) {
            Some(Handle::File(file)) => Ok(file.clone()),
            _ => Err(Errno::BADF),
        }
    }

    /// The open directory of that number.
    pub(crate) fn directory(&self, number: u64) -> Result<Arc<OpenDirectory>, Errno> {
        match self.open.read().get(&number).map(|open| &open.handle) {
            Some(Handle::Directory(directory)) => Ok(directory.clone()),
            _ => Err(Errno::BADF),
        }
    }

    /// Closes a file or directory.
    pub(crate) fn remove(&self, number: u64) {
        let removed = self.open.write().remove(&number);
        let opened = match removed.as_ref().map(|open| &open.handle) {
            Some(Handle::File(file)) => Some(file.fd.clone()),
            _ => None,
        };
        drop(removed); // Closing may take its time: not under the lock.
        let Some(opened) = opened else { return };
        let mut kept_for = opened.kept_for.lock();
        if *kept_for != Some(number) {
            return;
        }
        *kept_for = (Arc::strong_count(&opened) > 1).then(|| self.handle_of(&opened)).flatten();
        if let Some(other) = *kept_for {
            self.keep.hold(Held::Open(other), opened.as_fd());
        }
        drop(kept_for);
        drop(opened);
        self.keep.release(Held::Open(number));
    }

    /// A handle that has that descriptor.
    fn handle_of(&self, opened: &Arc<Opened>) -> Option<u64> {
        let has_it = |open: &Slotted| match &open.handle {
            Handle::File(file) => open.slot.is_some() && Arc::ptr_eq(&file.fd, opened),
            Handle::Directory(_) => false,
        };
        self.open.read().iter().find(|(_, open)| has_it(open)).map(|(number, _)| *number)
    }

    /// Number of open files and directories.
    pub(crate) fn count(&self) -> usize {
        self.open.read().len()
    }
}
