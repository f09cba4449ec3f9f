//! The inodes the kernel knows, and how to get at them below.
//!
//! A node is found by its identity below, so hard links are one node. Node ids are never used twice. The kernel counts how often
//! it was given a node (lookups) and gives those counts back (FORGET); a node leaves the table exactly when they are even.
//! Lookups count up under the shared lock, the last forget takes the exclusive one, so neither can miss the other. The borrower
//! learns of files under the exclusive lock only: it never sees a file retired behind its adoption.
//!
//! Each node is held by an *anchor*: an O_PATH descriptor, or beyond a budget of descriptors and where the file system has them, a
//! file handle, which is opened for each use. A file without a name left is always held by a descriptor.

use crate::device::{Device, Devices};
use crate::system::FileHandle;
use borrower::{Borrower, FileIdentity, Stamp};
use fuse::Errno;
use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, statx};
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// What every stat asks for.
pub(crate) const STATX_MASK: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

/// Stats what a descriptor is open on.
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

/// A node.
pub(crate) struct Inode {
    /// What the kernel calls it.
    pub nodeid: u64,
    /// What kind of file it is.
    pub kind: FileType,
    /// Where it lies.
    pub device: Arc<Device>,
    /// What the borrower knows it by: regular files only.
    pub file: Option<Arc<borrower::File>>,
    /// Held from before a change is announced until its end, so that the stamps around it belong to it alone.
    pub changing: Mutex<()>,
    /// A write out of the page cache came for it: it was mapped, or (in `back`) simply written.
    pub mapped_writes: AtomicBool,
    /// How often it is open now.
    pub open_files: AtomicUsize,
    /// The names that the kernel was told to believe for long.
    pub names: Mutex<Vec<Name>>,
    identity: FileIdentity,
    handle: Option<FileHandle>,
    descriptor: OnceLock<OwnedFd>,
    deleted: AtomicBool,
    lookups: AtomicU64,
}

/// A name that the kernel knows a node by.
#[derive(PartialEq, Eq)]
pub(crate) struct Name {
    /// The directory it is in.
    pub parent: u64,
    /// What it is called there.
    pub name: CString,
}

/// A descriptor of a node: its own, or one opened for this use.
pub(crate) enum Anchor<'a> {
    Held(BorrowedFd<'a>),
    Opened(OwnedFd),
}

impl AsFd for Anchor<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Anchor::Held(fd) => *fd,
            Anchor::Opened(fd) => fd.as_fd(),
        }
    }
}

impl Inode {
    /// The generation shown to the kernel.
    pub(crate) fn generation(&self) -> u64 {
        self.file.as_ref().map_or(0, |file| u64::from(file.key().0))
    }

    /// The last name was seen to be gone; `fd` is open on the file, and kept if it is held by a handle only.
    pub(crate) fn mark_deleted(&self, fd: OwnedFd) {
        self.deleted.store(true, Ordering::Relaxed);
        let _ = self.descriptor.set(fd);
    }

    /// It has a name again (linkat of an O_TMPFILE).
    pub(crate) fn mark_linked(&self) {
        self.deleted.store(false, Ordering::Relaxed);
    }

    /// Whether it is open now.
    pub(crate) fn is_open(&self) -> bool {
        self.open_files.load(Ordering::Relaxed) > 0
    }

    /// Whether it is what was found under a name.
    pub(crate) fn is(&self, found: &Statx) -> bool {
        self.identity.inode == found.stx_ino && self.identity.device == device_of(found)
    }

    /// Whether no name is left, as far as we know.
    pub(crate) fn is_deleted(&self) -> bool {
        self.deleted.load(Ordering::Relaxed)
            || self.descriptor.get().is_some_and(|fd| stat(fd).is_ok_and(|stat| stat.stx_nlink == 0))
    }
}

/// A file just opened with O_PATH below, on its way to becoming a node.
pub(crate) struct Found {
    /// Open on it with O_PATH.
    pub fd: OwnedFd,
    /// What it looks like.
    pub stat: Statx,
    identity: FileIdentity,
    handle: Option<(FileHandle, i32)>,
}

impl Found {
    /// Learns who it is.
    pub(crate) fn new(fd: OwnedFd, stat: Statx) -> Found {
        let handle = FileHandle::of(&fd).ok();
        let generation = match &handle {
            Some((handle, _)) => handle.hash(),
            None if stat.stx_mask & StatxFlags::BTIME.bits() != 0 => {
                (stat.stx_btime.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(stat.stx_btime.tv_nsec.into())
            }
            None => 0,
        };
        let identity = FileIdentity { device: device_of(&stat), inode: stat.stx_ino, generation };
        Found { fd, stat, identity, handle }
    }
}

#[derive(Default)]
struct Table {
    by_node: HashMap<u64, Arc<Inode>>,
    by_identity: HashMap<FileIdentity, Arc<Inode>>,
}

/// The table.
pub(crate) struct Inodes {
    table: RwLock<Table>,
    devices: Devices,
    borrower: Arc<Borrower>,
    next_node: AtomicU64,
    descriptors: AtomicUsize,
    descriptors_max: usize,
    /// SOURCE, open for reading, and the id of its mount: file handles are opened through it. None: no right to use handles.
    handles_from: Option<(OwnedFd, i32)>,
}

impl Inodes {
    /// With the root in it, which the kernel never forgets. `handles_from` is SOURCE open for reading, if file handles may be used.
    pub(crate) fn new(
        root: Found,
        borrower: Arc<Borrower>,
        descriptors_max: usize,
        handles_from: Option<OwnedFd>,
    ) -> Inodes {
        let handles_from = handles_from.and_then(|fd| FileHandle::of(&fd).ok().map(|(_, mount)| (fd, mount)));
        let inodes = Inodes {
            table: RwLock::default(),
            devices: Devices::new(root.identity.device),
            borrower,
            next_node: AtomicU64::new(fuse::abi::ROOT_ID),
            descriptors: AtomicUsize::new(0),
            descriptors_max: descriptors_max.max(1),
            handles_from,
        };
        inodes.reference(root);
        inodes
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.table.read().by_node.len()
    }

    /// The ids of those that a descriptor holds.
    pub(crate) fn nodes(&self) -> Vec<u64> {
        let held = |inode: &&Arc<Inode>| inode.file.is_some() && inode.descriptor.get().is_some();
        self.table.read().by_node.values().filter(held).map(|inode| inode.nodeid).collect()
    }

    /// How many of them hold a descriptor.
    pub(crate) fn descriptors(&self) -> usize {
        self.descriptors.load(Ordering::Relaxed)
    }

    /// The node of that id.
    pub(crate) fn get(&self, nodeid: u64) -> Result<Arc<Inode>, Errno> {
        self.table.read().by_node.get(&nodeid).cloned().ok_or(Errno::STALE)
    }

    /// The node of that file, if the kernel knows it.
    pub(crate) fn known(&self, found: &Found) -> Option<Arc<Inode>> {
        self.table.read().by_identity.get(&found.identity).cloned()
    }

    /// The node of that file, new or not, with one more lookup.
    pub(crate) fn reference(&self, found: Found) -> Arc<Inode> {
        if let Some(inode) = self.table.read().by_identity.get(&found.identity) {
            inode.lookups.fetch_add(1, Ordering::Relaxed);
            return inode.clone();
        }
        let mut table = self.table.write();
        if let Some(inode) = table.by_identity.get(&found.identity) {
            inode.lookups.fetch_add(1, Ordering::Relaxed);
            return inode.clone();
        }
        let kind = FileType::from_raw_mode(found.stat.stx_mode.into());
        let file = (kind == FileType::RegularFile).then(|| self.borrower.adopt(found.identity));
        let mut inode = Inode {
            nodeid: self.next_node.fetch_add(1, Ordering::Relaxed),
            kind,
            device: self.devices.get(found.identity.device),
            file,
            changing: Mutex::new(()),
            mapped_writes: AtomicBool::new(false),
            open_files: AtomicUsize::new(0),
            names: Mutex::default(),
            identity: found.identity,
            handle: None,
            descriptor: OnceLock::new(),
            deleted: AtomicBool::new(found.stat.stx_nlink == 0),
            lookups: AtomicU64::new(1),
        };
        match (found.handle, &self.handles_from) {
            (Some((handle, mount)), Some((_, our_mount)))
                if mount == *our_mount
                    && found.stat.stx_nlink > 0
                    && self.descriptors.load(Ordering::Relaxed) >= self.descriptors_max =>
            {
                inode.handle = Some(handle);
            }
            _ => {
                self.descriptors.fetch_add(1, Ordering::Relaxed);
                inode.descriptor = OnceLock::from(found.fd);
            }
        }
        let inode = Arc::new(inode);
        table.by_node.insert(inode.nodeid, inode.clone());
        table.by_identity.insert(inode.identity, inode.clone());
        inode
    }

    /// The kernel gives back `lookups` of a node. Returns the node if it is out of the table now.
    pub(crate) fn forget(&self, nodeid: u64, lookups: u64) -> Option<Arc<Inode>> {
        if nodeid == fuse::abi::ROOT_ID {
            return None;
        }
        let mut table = self.table.write();
        let inode = table.by_node.get(&nodeid).cloned()?;
        let before = inode.lookups.load(Ordering::Relaxed);
        let left = before.saturating_sub(lookups);
        inode.lookups.store(left, Ordering::Relaxed);
        if left > 0 {
            return None;
        }
        table.by_node.remove(&nodeid);
        table.by_identity.remove(&inode.identity);
        if inode.handle.is_none() {
            self.descriptors.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(file) = &inode.file {
            self.borrower.retire(file, inode.is_deleted());
        }
        Some(inode)
    }

    /// The mount is gone: the kernel has forgotten all.
    pub(crate) fn forget_all(&self) {
        let table = std::mem::take(&mut *self.table.write());
        self.descriptors.store(0, Ordering::Relaxed);
        for inode in table.by_node.values() {
            if let Some(file) = &inode.file {
                self.borrower.retire(file, inode.is_deleted());
            }
        }
    }

    /// A descriptor (O_PATH) of a node.
    pub(crate) fn anchor<'a>(&self, inode: &'a Inode) -> Result<Anchor<'a>, Errno> {
        if let Some(fd) = inode.descriptor.get() {
            return Ok(Anchor::Held(fd.as_fd()));
        }
        match (&inode.handle, &self.handles_from) {
            (Some(handle), Some((mount, _))) => Ok(Anchor::Opened(handle.open(mount)?)),
            _ => Err(Errno::STALE),
        }
    }
}
