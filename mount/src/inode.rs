//! The inodes the kernel knows, and how to get at them below.
//!
//! A node is found by its identity below, so hard links are one node. Node ids are never used twice. The kernel counts how often
//! it was given a node (lookups) and gives those counts back (FORGET); a node leaves the table exactly when they are even.
//! Lookups count up under the shared lock, the last forget takes the exclusive one, so neither can miss the other. The borrower
//! learns of files under the exclusive lock only: it never sees a file retired behind its adoption.
//!
//! Each node is held by an *anchor*: an O_PATH descriptor, or beyond a budget of descriptors and where the file system has them, a
//! file handle, which is opened for each use. A file without a name left is always held by a descriptor.
//!
//! All that a successor of this daemon needs to know of a node is in its slot of the state memory, before the kernel gets to know the
//! node. A successor finds it by its file handle; where there are none, and for files without a name, the keeper has a descriptor.

use crate::beside::Marked;
use crate::crossing::Crossing;
use crate::device::{Device, Devices};
use crate::handover::Keep;
use crate::handover::channel::Held;
use crate::handover::layout::{self, header, node};
use crate::handover::memory::NodeSlot;
use crate::link_count::LostName;
use crate::passing::{Connection, Passing};
use crate::stale::Stale;
use crate::system::FileHandle;
use borrower::{Borrower, FileIdentity, Left, Stamp};
use fuse::Errno;
use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, statx};
use std::ffi::{CStr, CString};
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
    /// It was opened here so that the kernel may have bytes of it that are not below yet.
    pub may_be_dirty: AtomicBool,
    /// It was opened here for reading and writing: a mapping may store to it.
    pub may_be_mapped: AtomicBool,
    /// Some of it was written and may be in the page cache below: the ledger knows what.
    pub written_below: AtomicBool,
    /// How it is open, and by how many.
    pub passing: Mutex<Passing>,
    /// The name that the kernel was told to believe for long.
    pub name: Mutex<Believed>,
    /// Whether a name of it has gone stale lately. Taken alone, or inside `name`.
    pub stale: Mutex<Stale>,
    /// The name that it has lost through the mount, until the kernel has counted that.
    pub lost_name: LostName,
    /// Whether what is done to it beside the mount is told.
    pub marked: Marked,
    /// Where it is written down for a successor. None beyond [`layout::NODES_MAX`].
    pub slot: Option<NodeSlot>,
    identity: FileIdentity,
    handle: Option<FileHandle>,
    descriptor: OnceLock<OwnedFd>,
    /// Whether its descriptor counts for the budget.
    is_counted: AtomicBool,
    deleted: AtomicBool,
    /// Whether the keeper has a descriptor of it.
    is_kept: AtomicBool,
    /// Used without a slot only.
    own_lookups: AtomicU64,
}

/// The name of a file that the kernel was told to believe for long, if any.
#[derive(Default)]
pub(crate) enum Believed {
    /// None.
    #[default]
    Nothing,
    /// This one.
    Name(Name),
    /// One that the kernel is about to drop. Until then no other is believed for long: a successor knows one name of each file.
    Dropping,
}

/// What has become of what the kernel believes of a name, when it has moved or removed it.
pub(crate) enum Moved {
    /// It was not told to believe that name for long: of this node.
    NotBelieved,
    /// Remembered under its new name, if it has one.
    Remembered,
    /// It must be told to drop it, because it believes it for long and no successor would know of it.
    Unknown(Name),
}

/// A name that the kernel knows a node by.
#[derive(PartialEq, Eq, Hash)]
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
    /// The generation shown to the kernel. That of a device node is another one while its mount forbids devices: the kernel takes
    /// the number of a device once, when it gets to know the inode.
    pub(crate) fn generation(&self) -> u64 {
        let of_device = || u64::from(self.device.forbids().dev());
        self.file.as_ref().map_or_else(of_device, |file| u64::from(file.key().0))
    }

    /// It has a name again (linkat of an O_TMPFILE).
    pub(crate) fn mark_linked(&self) {
        self.deleted.store(false, Ordering::Relaxed);
        self.slot.iter().for_each(|slot| slot.clear_flag(node::DELETED));
    }

    /// A write out of the page cache came for it.
    pub(crate) fn mark_mapped_writes(&self) {
        self.mapped_writes.store(true, Ordering::Relaxed);
        self.slot.iter().for_each(|slot| slot.set_flag(node::MAPPED_WRITES));
    }

    /// The kernel is about to be told to believe this name for long. False: it must not, because no successor would know of it.
    pub(crate) fn remember_name(&self, parent: u64, name: &CStr) -> bool {
        let mut believed = self.name.lock();
        match &*believed {
            Believed::Name(known) => known.parent == parent && *known.name == *name,
            Believed::Dropping => false,
            Believed::Nothing => {
                let is_recorded = self.slot.as_ref().is_some_and(|slot| slot.record_name(Some((parent, name))));
                if is_recorded {
                    *believed = Believed::Name(Name { parent, name: name.to_owned() });
                }
                is_recorded
            }
        }
    }

    /// The kernel has moved the name, or removed it.
    pub(crate) fn name_moved(&self, from: (u64, &CStr), to: Option<(u64, &CStr)>) -> Moved {
        let mut believed = self.name.lock();
        if !matches!(&*believed, Believed::Name(known) if known.parent == from.0 && *known.name == *from.1) {
            return Moved::NotBelieved;
        }
        let is_recorded = self.slot.as_ref().is_some_and(|slot| slot.record_name(to));
        let name = to.map(|(parent, name)| Name { parent, name: name.to_owned() });
        let (now, moved) = match name {
            None => (Believed::Nothing, Moved::Remembered),
            Some(name) if is_recorded => (Believed::Name(name), Moved::Remembered),
            Some(name) => (Believed::Dropping, Moved::Unknown(name)),
        };
        *believed = now;
        moved
    }

    /// The kernel has dropped the name that it was told to drop.
    pub(crate) fn name_dropped(&self) {
        let mut believed = self.name.lock();
        if let Some(slot) = &self.slot {
            slot.record_name(None);
        }
        *believed = Believed::Nothing;
        self.stale.lock().name_dropped();
    }

    /// Writes down how the file is left if we die. The caller holds `changing`.
    pub(crate) fn record_stamp(&self) {
        if let (Some(slot), Some(file)) = (&self.slot, &self.file) {
            let left = file.left();
            match left.has_edges {
                true => slot.set_flag(node::EDGES),
                false => slot.clear_flag(node::EDGES),
            }
            slot.record_stamp(left.stamp);
        }
    }

    fn lookups(&self) -> &AtomicU64 {
        self.slot.as_ref().map_or(&self.own_lookups, NodeSlot::lookups)
    }

    /// Whether it is open now.
    pub(crate) fn is_open(&self) -> bool {
        self.passing.lock().is_open()
    }

    /// The hash of its handle below, where files have one.
    pub(crate) fn handle_hash(&self) -> u64 {
        self.identity.generation
    }

    /// The descriptor that holds it, if one does.
    pub(crate) fn held(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.get().map(AsFd::as_fd)
    }

    /// Whether it is what was found under a name.
    pub(crate) fn is(&self, found: &Statx) -> bool {
        self.identity.inode == found.stx_ino && self.identity.device == device_of(found)
    }

    /// Whether no name is left, as far as we know.
    pub(crate) fn is_deleted(&self) -> bool {
        // A server far away, who could know better, is not asked: this is looked at for each file again and again.
        let known = |fd| statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::NLINK);
        self.deleted.load(Ordering::Relaxed)
            || self.descriptor.get().is_some_and(|fd| known(fd).is_ok_and(|stat| stat.stx_nlink == 0))
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
    /// The nodes of SOURCE's own device, by the hashes of their handles.
    by_handle: HashMap<u64, u64>,
}

impl Table {
    fn insert(&mut self, inode: Arc<Inode>) {
        if inode.device.is_source() {
            self.by_handle.insert(inode.handle_hash(), inode.nodeid);
        }
        self.by_identity.insert(inode.identity, inode.clone());
        self.by_node.insert(inode.nodeid, inode);
    }

    fn remove(&mut self, inode: &Inode) {
        self.by_node.remove(&inode.nodeid);
        self.by_identity.remove(&inode.identity);
        if inode.device.is_source() {
            self.by_handle.remove(&inode.handle_hash());
        }
    }
}

/// The table.
pub(crate) struct Inodes {
    table: RwLock<Table>,
    devices: Devices,
    borrower: Arc<Borrower>,
    keep: Arc<Keep>,
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
        keep: Arc<Keep>,
        descriptors_max: usize,
        handles_from: Option<OwnedFd>,
    ) -> Inodes {
        keep.memory.header(header::NEXT_NODE).store(fuse::abi::ROOT_ID, Ordering::Release);
        let inodes = Inodes::empty(&[root.identity.device], borrower, keep, descriptors_max, handles_from);
        inodes.reference(root);
        inodes
    }

    fn empty(
        devices: &[u64],
        borrower: Arc<Borrower>,
        keep: Arc<Keep>,
        descriptors_max: usize,
        handles_from: Option<OwnedFd>,
    ) -> Inodes {
        let handles_from = handles_from.and_then(|fd| FileHandle::of(&fd).ok().map(|(_, mount)| (fd, mount)));
        Inodes {
            table: RwLock::default(),
            devices: Devices::new(devices, Some(keep.memory.clone())),
            borrower,
            keep,
            descriptors: AtomicUsize::new(0),
            descriptors_max: descriptors_max.max(1),
            handles_from,
        }
    }

    /// With the nodes that the kernel knows from a daemon before this one. `held` has descriptors of some of them. What cannot be found
    /// again is left out, and answers ESTALE; returns how many that are, too.
    #[allow(clippy::too_many_arguments)] // What was given, and what it needs, each used once.
    pub(crate) fn restore(
        devices: &[u64],
        nodes: Vec<layout::Node>,
        mut held: HashMap<u64, OwnedFd>,
        connection: &Arc<Connection>,
        borrower: Arc<Borrower>,
        keep: Arc<Keep>,
        descriptors_max: usize,
        handles_from: Option<OwnedFd>,
        crossing: &Crossing,
    ) -> (Inodes, usize) {
        let inodes = Inodes::empty(devices, borrower, keep, descriptors_max, handles_from);
        let mut lost = 0;
        for node in nodes {
            let nodeid = node.nodeid;
            let fd = held.remove(&nodeid);
            if inodes.restore_one(node, fd, connection, crossing).is_none() {
                lost += 1;
                inodes.keep.release(Held::Node(nodeid));
            }
        }
        // Sent to the keeper for a node that was not recorded any more, or not yet: nobody else would release it.
        held.keys().for_each(|nodeid| inodes.keep.release(Held::Node(*nodeid)));
        (inodes, lost)
    }

    fn restore_one(
        &self,
        known: layout::Node,
        held: Option<OwnedFd>,
        connection: &Arc<Connection>,
        crossing: &Crossing,
    ) -> Option<()> {
        let slot = self.keep.memory.node_at(known.slot); // Free again, if we leave early.
        let held = held.filter(|fd| {
            stat(fd).is_ok_and(|now| {
                let is_it = now.stx_ino == known.identity.inode && device_of(&now) == known.identity.device;
                is_it && crossing.check(fd, &now, &self.devices).is_ok()
            })
        });
        let handle = known.handle.as_ref().filter(|_| held.is_none() && self.handles_from.is_some());
        let handle = handle.map(|(kind, bytes)| FileHandle::from_parts(*kind, bytes));
        if held.is_none() && handle.is_none() {
            return None;
        }
        let left = Left {
            stamp: known.stamp.filter(|_| known.flags & (node::DROP_PENDING | node::PASSED) == 0),
            has_edges: known.flags & node::EDGES != 0,
        };
        let key = page::FileKey(known.key);
        let file = (known.key != 0).then(|| self.borrower.restore(known.identity, key, left));
        let is_held = held.is_some();
        let is_deleted = known.flags & node::DELETED != 0;
        let believed = known.name.map_or(Believed::Nothing, |(parent, name)| Believed::Name(Name { parent, name }));
        let inode = Arc::new(Inode {
            nodeid: known.nodeid,
            kind: FileType::from_raw_mode(known.kind),
            device: self.devices.get(known.identity.device),
            file,
            changing: Mutex::new(()),
            mapped_writes: AtomicBool::new(known.flags & node::MAPPED_WRITES != 0),
            may_be_dirty: AtomicBool::new(true), // Who knows.
            may_be_mapped: AtomicBool::new(true),
            written_below: AtomicBool::new(false),
            passing: Mutex::new(Passing::restored(known.backing, known.flags & node::PASSED != 0, connection)),
            name: Mutex::new(believed),
            stale: Mutex::default(),
            lost_name: LostName::default(),
            marked: Marked::default(),
            slot: Some(slot),
            identity: known.identity,
            handle,
            descriptor: held.map_or_else(OnceLock::new, OnceLock::from),
            is_counted: AtomicBool::new(is_held),
            deleted: AtomicBool::new(is_deleted),
            is_kept: AtomicBool::new(known.flags & node::KEPT != 0),
            own_lookups: AtomicU64::new(0),
        });
        if is_held {
            self.descriptors.fetch_add(1, Ordering::Relaxed);
        }
        self.table.write().insert(inode);
        Some(())
    }

    /// All that was open in a daemon before this one is open again.
    pub(crate) fn all_are_open(&self) {
        self.table.read().by_node.values().for_each(|inode| inode.all_are_open());
    }

    /// The nodes whose cached pages the kernel must drop, because what it caches is not known to be what the files hold.
    pub(crate) fn stale(&self) -> Vec<(Arc<Inode>, u64)> {
        let stale = |inode: &Arc<Inode>| Some((inode.clone(), inode.file.as_ref()?.kernel_stale()?));
        self.table.read().by_node.values().filter_map(stale).collect()
    }

    /// The last name was seen to be gone; `fd` is open on the file, and held from now on: no handle finds it for certain.
    /// (And the keeper is mostly the last to let it go, so that nobody here waits until the file system below has freed what it held.)
    pub(crate) fn mark_deleted(&self, inode: &Inode, fd: OwnedFd) {
        inode.deleted.store(true, Ordering::Relaxed);
        inode.slot.iter().for_each(|slot| slot.set_flag(node::DELETED));
        self.keep_descriptor(inode, fd.as_fd());
        let _ = inode.descriptor.set(fd);
    }

    fn keep_descriptor(&self, inode: &Inode, fd: BorrowedFd<'_>) {
        if let Some(slot) = &inode.slot
            && !inode.is_kept.swap(true, Ordering::Relaxed)
        {
            self.keep.hold(Held::Node(inode.nodeid), fd);
            slot.set_flag(node::KEPT);
        }
    }

    /// The devices that they lie on.
    pub(crate) fn devices(&self) -> &Devices {
        &self.devices
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.table.read().by_node.len()
    }

    /// The ids of all.
    pub(crate) fn ids(&self) -> Vec<u64> {
        self.table.read().by_node.keys().copied().collect()
    }

    /// The node of SOURCE's own device whose handle has that hash.
    pub(crate) fn of_handle(&self, hash: u64) -> Option<u64> {
        self.table.read().by_handle.get(&hash).copied()
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
            inode.lookups().fetch_add(1, Ordering::Relaxed);
            return inode.clone();
        }
        let mut table = self.table.write();
        if let Some(inode) = table.by_identity.get(&found.identity) {
            inode.lookups().fetch_add(1, Ordering::Relaxed);
            return inode.clone();
        }
        let kind = FileType::from_raw_mode(found.stat.stx_mode.into());
        let file = (kind == FileType::RegularFile).then(|| self.borrower.adopt(found.identity));
        let memory = &self.keep.memory;
        if let Some(file) = &file {
            memory.header(header::NEXT_KEY).fetch_max(u64::from(file.key().0) + 1, Ordering::Release);
        }
        let mut inode = Inode {
            nodeid: memory.header(header::NEXT_NODE).fetch_add(1, Ordering::Relaxed),
            kind,
            device: self.devices.get(found.identity.device),
            file,
            changing: Mutex::new(()),
            mapped_writes: AtomicBool::new(false),
            may_be_dirty: AtomicBool::new(false),
            may_be_mapped: AtomicBool::new(false),
            written_below: AtomicBool::new(false),
            passing: Mutex::default(),
            name: Mutex::default(),
            stale: Mutex::default(),
            lost_name: LostName::default(),
            marked: Marked::default(),
            slot: memory.take_node(),
            identity: found.identity,
            handle: None,
            descriptor: OnceLock::new(),
            is_counted: AtomicBool::new(false),
            deleted: AtomicBool::new(found.stat.stx_nlink == 0),
            is_kept: AtomicBool::new(false),
            own_lookups: AtomicU64::new(1),
        };
        let handle = found.handle.filter(|(_, mount)| {
            found.stat.stx_nlink > 0 && self.handles_from.as_ref().is_some_and(|(_, ours)| mount == ours)
        });
        let handle = handle.map(|(handle, _)| handle);
        if handle.is_none() && inode.nodeid != fuse::abi::ROOT_ID {
            self.keep_descriptor(&inode, found.fd.as_fd());
        }
        if let Some(slot) = &inode.slot {
            let key = inode.file.as_ref().map_or(0, |file| file.key().0);
            let mut flags = if inode.is_kept.load(Ordering::Relaxed) { node::KEPT } else { 0 };
            if inode.deleted.load(Ordering::Relaxed) {
                flags |= node::DELETED;
            }
            let parts = handle.as_ref().map(FileHandle::parts);
            slot.fill(inode.nodeid, inode.identity, key, kind.as_raw_mode(), flags, parts);
        }
        if handle.is_some() && self.descriptors.load(Ordering::Relaxed) >= self.descriptors_max {
            inode.handle = handle;
        } else {
            self.descriptors.fetch_add(1, Ordering::Relaxed);
            inode.is_counted = AtomicBool::new(true);
            inode.descriptor = OnceLock::from(found.fd);
        }
        let inode = Arc::new(inode);
        table.insert(inode.clone());
        inode
    }

    /// The kernel gives back `lookups` of a node. Returns the node if it is out of the table now.
    pub(crate) fn forget(&self, nodeid: u64, lookups: u64) -> Option<Arc<Inode>> {
        if nodeid == fuse::abi::ROOT_ID {
            return None;
        }
        let mut table = self.table.write();
        let inode = table.by_node.get(&nodeid).cloned()?;
        let before = inode.lookups().load(Ordering::Relaxed);
        let left = before.saturating_sub(lookups);
        inode.lookups().store(left, Ordering::Relaxed);
        if left > 0 {
            return None;
        }
        table.remove(&inode);
        if inode.is_counted.load(Ordering::Relaxed) {
            self.descriptors.fetch_sub(1, Ordering::Relaxed);
        }
        inode.slot.iter().for_each(NodeSlot::clear);
        if inode.is_kept.load(Ordering::Relaxed) {
            self.keep.release(Held::Node(nodeid));
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
            (Some(handle), Some((mount, _))) => {
                let fd = handle.open(mount)?;
                // Nodes that were taken over have handles only; those that are used get their descriptors back.
                if self.descriptors.load(Ordering::Relaxed) < self.descriptors_max {
                    if inode.descriptor.set(fd).is_ok() {
                        inode.is_counted.store(true, Ordering::Relaxed);
                        self.descriptors.fetch_add(1, Ordering::Relaxed);
                    }
                    return inode.descriptor.get().map(|fd| Anchor::Held(fd.as_fd())).ok_or(Errno::STALE);
                }
                Ok(Anchor::Opened(fd))
            }
            _ => Err(Errno::STALE),
        }
    }
}
