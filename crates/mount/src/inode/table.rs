//! The inodes that the kernel knows, and the access to their backing files.
//!
//! A node is found by the identity of its backing file, so hard links are one node. Node ids are
//! never used twice. The kernel counts how often it got a node (lookups), and gives these counts
//! back (FORGET). A node leaves the table exactly when all are given back. Lookups are counted
//! under the shared lock, and the last forget takes the exclusive one, so neither can miss the
//! other. Files are adopted and retired at the borrower only under the exclusive lock, so these
//! calls are never reordered.
//!
//! Each node is held by an *anchor*: an O_PATH descriptor, or a file handle, which is opened for
//! each use. A node whose file system has handles keeps a descriptor as long as there is room
//! (`descriptors.rs`); the least recently used nodes give theirs back first. Without handles only a
//! descriptor holds the node. If descriptors run short, the kernel is asked to forget unused nodes
//! ([`Inodes::make_room`]). A file without a name is held by a descriptor, too, unless these run
//! short: its handle finds it as long as it is open.
//!
//! Before the kernel gets a node, its slot of the state memory has all that a successor needs. A
//! successor finds the file by its file handle. If there are no handles, and for files without a
//! name, the supervisor has a descriptor.

use super::descriptors::Descriptors;
use super::link_count::LostName;
use super::node::{Anchor, Descriptor, Found, Inode};
use super::opened::Newest;
use super::overtaken::OvertakenWrite;
use crate::backing::device::Devices;
use crate::kernel::external_changes::Marked;
use crate::system::FileHandle;
use crate::takeover::Keep;
use crate::takeover::channel::Held;
use crate::takeover::layout::{header, node};
use crate::takeover::memory::NodeSlot;
use borrower::{Borrower, FileIdentity};
use fuse::Errno;
use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::FileType;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Limit on the nodes that are visited in one search for unused descriptors.
const LOOKED_AT_MAX: usize = 1024;
/// The list of nodes may have twice as many entries as there are descriptors, and so many more,
/// before removed nodes are taken out.
const ORDER_SLACK: usize = 1024;

#[derive(Default)]
pub(super) struct Table {
    pub(super) by_node: HashMap<u64, Arc<Inode>>,
    by_identity: HashMap<FileIdentity, Arc<Inode>>,
    /// The nodes of SOURCE's own device, by the hashes of their handles.
    by_handle: HashMap<u64, u64>,
}

impl Table {
    pub(super) fn insert(&mut self, inode: Arc<Inode>) {
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

/// The table of inodes.
pub(crate) struct Inodes {
    pub(super) table: RwLock<Table>,
    pub(super) devices: Devices,
    pub(super) borrower: Arc<Borrower>,
    pub(super) keep: Arc<Keep>,
    pub(super) descriptors: Arc<Descriptors>,
    /// Nodes with a descriptor that may be given back, or that the kernel may be asked to forget,
    /// oldest descriptors first. Locked before the table.
    order: Mutex<VecDeque<u64>>,
    /// Whether a node was ever found that has no file handle.
    pub(super) has_only_descriptors: AtomicBool,
    /// SOURCE, open for reading, and the id of its mount, through which file handles are opened.
    /// `None` without the right to use handles.
    pub(super) handles_from: Option<(OwnedFd, i32)>,
}

impl Inodes {
    /// Creates the table with the root, which the kernel never forgets. `handles_from` is SOURCE,
    /// open for reading, if file handles may be used.
    pub(crate) fn new(
        root: Found,
        borrower: Arc<Borrower>,
        keep: Arc<Keep>,
        descriptors: Arc<Descriptors>,
        handles_from: Option<OwnedFd>,
    ) -> Inodes {
        keep.memory.header(header::NEXT_NODE).store(fuse::abi::ROOT_ID, Ordering::Release);
        let inodes = Inodes::empty(&[root.identity.device], borrower, keep, descriptors, handles_from);
        let _ = inodes.reference(root); // Nothing is used yet.
        inodes
    }

    pub(super) fn empty(
        devices: &[u64],
        borrower: Arc<Borrower>,
        keep: Arc<Keep>,
        descriptors: Arc<Descriptors>,
        handles_from: Option<OwnedFd>,
    ) -> Inodes {
        let handles_from = handles_from.and_then(|fd| FileHandle::of(&fd).ok().map(|(_, mount)| (fd, mount)));
        Inodes {
            table: RwLock::default(),
            devices: Devices::new(devices, Some(keep.memory.clone())),
            borrower,
            keep,
            descriptors,
            order: Mutex::default(),
            has_only_descriptors: AtomicBool::new(false),
            handles_from,
        }
    }

    /// Records that the last name of the file is gone. `fd` is open on the file, and is held from
    /// now on if there is room, because a handle may not find it. (The supervisor usually closes
    /// its descriptor last, so this daemon does not wait until the backing file system has freed
    /// the blocks.)
    pub(crate) fn mark_deleted(&self, inode: &Inode, fd: OwnedFd) {
        inode.deleted.store(true, Ordering::Relaxed);
        inode.slot.iter().for_each(|slot| slot.set_flag(node::DELETED));
        if inode.can_give_back() && self.descriptors.over().is_some() {
            return; // It is most likely open, and found by its handle as long as it is.
        }
        self.keep_descriptor(inode, fd.as_fd());
        self.anchor_by(inode, Descriptor { fd, _counted: self.descriptors.add_anchor() });
    }

    /// Makes a descriptor hold a node, if none does. Returns the descriptor that holds it.
    fn anchor_by(&self, inode: &Inode, fd: Descriptor) -> Arc<Descriptor> {
        let mut descriptor = inode.descriptor.lock();
        if let Some(held) = &*descriptor {
            return held.clone();
        }
        let held = descriptor.insert(Arc::new(fd)).clone();
        drop(descriptor);
        self.in_order(inode.nodeid);
        held
    }

    pub(super) fn in_order(&self, nodeid: u64) {
        if nodeid == fuse::abi::ROOT_ID {
            return; // Never forgotten, and held by what all else is found from.
        }
        let mut order = self.order.lock();
        order.push_back(nodeid);
        if order.len() > 2 * self.descriptors.anchors() + ORDER_SLACK {
            let table = self.table.read();
            let is_held = |node: &u64| table.by_node.get(node).is_some_and(|inode| inode.descriptor.lock().is_some());
            order.retain(is_held);
        }
    }

    /// Whether there are nodes that only a descriptor can find again.
    pub(crate) fn needs_forgets(&self) -> bool {
        self.has_only_descriptors.load(Ordering::Relaxed)
    }

    /// Closes up to `count` descriptors of nodes that were not used since the last search and that
    /// handles find again. Returns unused nodes without handles, which the kernel should be asked
    /// to forget.
    pub(crate) fn make_room(&self, count: usize) -> Vec<u64> {
        let mut to_forget = Vec::new();
        let mut given = 0;
        for _ in 0..LOOKED_AT_MAX {
            if given + to_forget.len() >= count {
                break;
            }
            let Some(nodeid) = self.order.lock().pop_front() else { break };
            let Ok(inode) = self.get(nodeid) else { continue };
            let was_used = inode.is_used.swap(false, Ordering::Relaxed);
            if !was_used && inode.can_give_back() {
                given += usize::from(self.give_back(&inode));
                continue;
            }
            if !was_used && !inode.is_open() {
                to_forget.push(nodeid);
            }
            self.order.lock().push_back(nodeid);
        }
        to_forget
    }

    /// Closes the descriptor of a node, if a handle finds it again. Returns whether it had one.
    pub(crate) fn give_back(&self, inode: &Inode) -> bool {
        if !inode.can_give_back() {
            return false;
        }
        if inode.is_kept.swap(false, Ordering::Relaxed) {
            inode.slot.iter().for_each(|slot| slot.clear_flag(node::KEPT));
            self.keep.release(Held::Node(inode.nodeid));
        }
        let given = inode.descriptor.lock().take(); // Closed when nobody uses it any more, and not under the lock.
        given.is_some()
    }

    fn keep_descriptor(&self, inode: &Inode, fd: BorrowedFd<'_>) {
        if let Some(slot) = &inode.slot
            && !inode.is_kept.swap(true, Ordering::Relaxed)
        {
            self.keep.hold(Held::Node(inode.nodeid), fd);
            slot.set_flag(node::KEPT);
        }
    }

    /// The devices of the backing files.
    pub(crate) fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Number of nodes.
    pub(crate) fn count(&self) -> usize {
        self.table.read().by_node.len()
    }

    /// The ids of all nodes.
    pub(crate) fn ids(&self) -> Vec<u64> {
        self.table.read().by_node.keys().copied().collect()
    }

    /// The node of SOURCE's own device whose handle has this hash.
    pub(crate) fn of_handle(&self, hash: u64) -> Option<u64> {
        self.table.read().by_handle.get(&hash).copied()
    }

    /// The ids of the nodes that a descriptor holds.
    pub(crate) fn nodes(&self) -> Vec<u64> {
        let held = |inode: &&Arc<Inode>| inode.file.is_some() && inode.descriptor.lock().is_some();
        self.table.read().by_node.values().filter(held).map(|inode| inode.nodeid).collect()
    }

    /// The accounting of descriptors.
    pub(crate) fn descriptors(&self) -> &Arc<Descriptors> {
        &self.descriptors
    }

    /// The node with this id.
    pub(crate) fn get(&self, nodeid: u64) -> Result<Arc<Inode>, Errno> {
        self.table.read().by_node.get(&nodeid).cloned().ok_or(Errno::STALE)
    }

    /// The node of the file, if the kernel knows it.
    pub(crate) fn known(&self, found: &Found) -> Option<Arc<Inode>> {
        self.table.read().by_identity.get(&found.identity).cloned()
    }

    /// The node of the file, new or existing, with one more lookup.
    ///
    /// # Errors
    /// EMFILE if the node is new, only a descriptor can hold it, and none is left.
    pub(crate) fn reference(&self, found: Found) -> Result<Arc<Inode>, Errno> {
        if let Some(inode) = self.table.read().by_identity.get(&found.identity) {
            inode.lookups().fetch_add(1, Ordering::Relaxed);
            return Ok(inode.clone());
        }
        let mut table = self.table.write();
        if let Some(inode) = table.by_identity.get(&found.identity) {
            inode.lookups().fetch_add(1, Ordering::Relaxed);
            return Ok(inode.clone());
        }
        let handle = found.handle.filter(|(_, mount)| {
            found.stat.stx_nlink > 0 && self.handles_from.as_ref().is_some_and(|(_, ours)| mount == ours)
        });
        let handle = handle.map(|(handle, _)| handle);
        let counted = match &handle {
            Some(_) => self.descriptors.take_anchor(),
            None => Some(self.descriptors.take_only_anchor().ok_or(Errno::MFILE)?),
        };
        let is_held = counted.is_some();
        if handle.is_none() {
            self.has_only_descriptors.store(true, Ordering::Relaxed);
        }
        let kind = FileType::from_raw_mode(found.stat.stx_mode.into());
        let file = (kind == FileType::RegularFile).then(|| self.borrower.adopt(found.identity));
        let memory = &self.keep.memory;
        if file.is_some() {
            // Keys are assigned only here, so one after the other.
            memory.header(header::NEXT_KEY).store(self.borrower.next_key().0.into(), Ordering::Release);
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
            misbelieved: AtomicBool::new(false),
            backing_is_cached: AtomicBool::new(false),
            newest: Newest::default(),
            overtaken: OvertakenWrite::default(),
            passthrough: Mutex::default(),
            name: Mutex::default(),
            stale: Mutex::default(),
            lost_name: LostName::default(),
            marked: Marked::default(),
            slot: memory.take_node(),
            identity: found.identity,
            handle: None,
            descriptor: Mutex::new(None),
            is_used: AtomicBool::new(true),
            deleted: AtomicBool::new(found.stat.stx_nlink == 0),
            is_kept: AtomicBool::new(false),
            own_lookups: AtomicU64::new(1),
        };
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
        inode.handle = handle;
        inode.descriptor = Mutex::new(counted.map(|_counted| Arc::new(Descriptor { fd: found.fd, _counted })));
        let inode = Arc::new(inode);
        table.insert(inode.clone());
        drop(table);
        if is_held {
            self.in_order(inode.nodeid);
        }
        Ok(inode)
    }

    /// Subtracts lookups that the kernel gives back. Returns the node if it has left the table.
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
        inode.slot.iter().for_each(NodeSlot::clear);
        if inode.is_kept.swap(false, Ordering::Relaxed) {
            self.keep.release(Held::Node(nodeid));
        }
        if let Some(file) = &inode.file {
            self.borrower.retire(file, inode.is_gone_for_good());
        }
        Some(inode)
    }

    /// Forgets all nodes, after the mount has ended.
    pub(crate) fn forget_all(&self) {
        let table = std::mem::take(&mut *self.table.write());
        for inode in table.by_node.values() {
            if let Some(file) = &inode.file {
                self.borrower.retire(file, inode.is_gone_for_good());
            }
        }
    }

    /// A descriptor (O_PATH) of a node. The node keeps it for the next use if there is room.
    pub(crate) fn anchor(&self, inode: &Inode) -> Result<Anchor<'static>, Errno> {
        // Each request calls this before it opens anything else.
        if let Some(over) = self.descriptors.over() {
            self.make_room(over);
        }
        if let Some(fd) = inode.held() {
            if !inode.is_used.load(Ordering::Relaxed) {
                inode.is_used.store(true, Ordering::Relaxed);
            }
            return Ok(Anchor::Shared(fd));
        }
        let fd = self.open_by_handle(inode)?;
        let Some(_counted) = self.descriptors.take_anchor() else { return Ok(Anchor::Opened(fd)) };
        inode.is_used.store(true, Ordering::Relaxed);
        Ok(Anchor::Shared(self.anchor_by(inode, Descriptor { fd, _counted })))
    }

    /// A descriptor of a node that may have left the table. The node does not keep it.
    pub(crate) fn anchor_once(&self, inode: &Inode) -> Result<Anchor<'static>, Errno> {
        match inode.held() {
            Some(fd) => Ok(Anchor::Shared(fd)),
            None => self.open_by_handle(inode).map(Anchor::Opened),
        }
    }

    fn open_by_handle(&self, inode: &Inode) -> Result<OwnedFd, Errno> {
        match (&inode.handle, &self.handles_from) {
            (Some(handle), Some((mount, _))) => handle.open(mount),
            _ => Err(Errno::STALE),
        }
    }
}
