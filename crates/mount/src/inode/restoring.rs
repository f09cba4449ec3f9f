//! A daemon that takes over restores the inodes that the kernel knows.

use super::node::Descriptor;
use super::{Believed, Inode, Inodes, Name, device_of, stat};
use crate::backing::crossing::Crossing;
use crate::inode::descriptors::Descriptors;
use crate::inode::link_count::LostName;
use crate::inode::opened::Newest;
use crate::inode::overtaken::OvertakenWrite;
use crate::inode::revalidation::Stale;
use crate::kernel::external_changes::Marked;
use crate::kernel::passthrough::{Connection, PassthroughState};
use crate::system::FileHandle;
use crate::takeover::Keep;
use crate::takeover::channel::Held;
use crate::takeover::layout::{self, node};
use borrower::{Borrower, Left};
use hashbrown::HashMap;
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::fs::FileType;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

impl Inodes {
    /// Creates the table with the nodes that the kernel knows from the previous daemon. `held` has
    /// descriptors of some of them. Nodes that cannot be found again are left out, and requests for
    /// them fail with ESTALE. Their number is returned, too.
    #[allow(clippy::too_many_arguments)] // What was given, and what it needs, each used once.
    pub(crate) fn restore(
        devices: &[u64],
        nodes: Vec<layout::Node>,
        mut held: HashMap<u64, OwnedFd>,
        connection: &Arc<Connection>,
        borrower: Arc<Borrower>,
        keep: Arc<Keep>,
        descriptors: Arc<Descriptors>,
        handles_from: Option<OwnedFd>,
        crossing: &Crossing,
    ) -> (Inodes, usize) {
        let inodes = Inodes::empty(devices, borrower, keep, descriptors, handles_from);
        let mut lost = 0;
        for node in nodes {
            let nodeid = node.nodeid;
            let fd = held.remove(&nodeid);
            if inodes.restore_one(node, fd, connection, crossing).is_none() {
                lost += 1;
                inodes.keep.release(Held::Node(nodeid));
            }
        }
        // These descriptors were sent to the supervisor for nodes that are not recorded any more,
        // or not yet. Nothing else would release them.
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
        let handle = known.handle.as_ref().filter(|_| self.handles_from.is_some());
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
        if handle.is_none() {
            self.has_only_descriptors.store(true, Ordering::Relaxed);
        }
        let held = held.map(|fd| Arc::new(Descriptor { fd, _counted: self.descriptors.add_anchor() }));
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
            misbelieved: AtomicBool::new(known.flags & node::MISBELIEVED != 0),
            backing_is_cached: AtomicBool::new(false),
            newest: Newest::default(),
            overtaken: OvertakenWrite::default(),
            passthrough: Mutex::new(PassthroughState::restored(
                known.backing,
                known.flags & node::PASSED != 0,
                connection,
            )),
            name: Mutex::new(believed),
            stale: Mutex::new(if known.flags & node::STALE_NAME != 0 { Stale::Dropped } else { Stale::No }),
            lost_name: LostName::default(),
            marked: Marked::default(),
            slot: Some(slot),
            identity: known.identity,
            handle,
            descriptor: Mutex::new(held),
            is_used: AtomicBool::new(false),
            deleted: AtomicBool::new(is_deleted),
            is_kept: AtomicBool::new(known.flags & node::KEPT != 0),
            own_lookups: AtomicU64::new(0),
        });
        self.table.write().insert(inode);
        if is_held {
            self.in_order(known.nodeid);
        }
        Some(())
    }

    /// Records that all files of the previous daemon are open again.
    pub(crate) fn all_are_open(&self) {
        self.table.read().by_node.values().for_each(|inode| inode.all_are_open());
    }

    /// The nodes whose cached pages the kernel must drop, because what it caches is not known to be
    /// what the files hold.
    pub(crate) fn stale(&self) -> Vec<(Arc<Inode>, u64)> {
        let stale = |inode: &Arc<Inode>| Some((inode.clone(), inode.file.as_ref()?.kernel_stale()?));
        self.table.read().by_node.values().filter_map(stale).collect()
    }
}
