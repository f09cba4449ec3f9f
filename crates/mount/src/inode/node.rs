//! One inode, and the descriptors through which it is accessed.

use super::descriptors::Counted;
use super::link_count::LostName;
use super::opened::Newest;
use super::overtaken::OvertakenWrite;
use super::revalidation::Stale;
use super::{Believed, device_of};
use crate::backing::device::Device;
use crate::kernel::external_changes::Marked;
use crate::kernel::passthrough::PassthroughState;
use crate::system::FileHandle;
use crate::takeover::layout::node;
use crate::takeover::memory::NodeSlot;
use borrower::FileIdentity;
use parking_lot::Mutex;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, statx};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A node.
pub(crate) struct Inode {
    /// The kernel's id of the node.
    pub nodeid: u64,
    /// The type of the file.
    pub kind: FileType,
    /// The device of the file.
    pub device: Arc<Device>,
    /// The borrower's state of the file; only for regular files.
    pub file: Option<Arc<borrower::File>>,
    /// Locked from before a change is announced until its end, so that the stamps around the change
    /// belong to it alone.
    pub changing: Mutex<()>,
    /// Whether a write out of the page cache has arrived: the file was mapped, or (with `back`)
    /// written.
    pub mapped_writes: AtomicBool,
    /// Whether opens through the mount allow the kernel to have bytes that the backing file does
    /// not have yet.
    pub may_be_dirty: AtomicBool,
    /// Whether it was opened through the mount for reading and writing, so that a mapping may store
    /// to it.
    pub may_be_mapped: AtomicBool,
    /// Whether the kernel's size or times of the file are wrong, until it forgets the inode (see
    /// `kernel/writeback.rs`).
    pub(super) misbelieved: AtomicBool,
    /// Whether written pages may be in the page cache of the backing file; the dirty ranges have
    /// their ranges.
    pub backing_is_cached: AtomicBool,
    /// The kind and number of its opens.
    pub passthrough: Mutex<PassthroughState>,
    /// Its newest descriptor, which opens share if the user may have no other one.
    pub newest: Newest,
    /// An unanswered write(2) that a READ has overtaken.
    pub overtaken: OvertakenWrite,
    /// The name that the kernel may cache for long.
    pub name: Mutex<Believed>,
    /// Whether a name of it has become stale recently. Locked alone, or inside `name`.
    pub stale: Mutex<Stale>,
    /// The name that was removed through the mount, until the kernel has counted that.
    pub lost_name: LostName,
    /// Whether fanotify reports external changes of it.
    pub marked: Marked,
    /// Its slot in the state memory. `None` beyond [`crate::takeover::layout::NODES_MAX`].
    pub slot: Option<NodeSlot>,
    pub(super) identity: FileIdentity,
    pub(super) handle: Option<FileHandle>,
    pub(super) descriptor: Mutex<Option<Arc<Descriptor>>>,
    /// Whether the descriptor was used since the last search for unused ones.
    pub(super) is_used: AtomicBool,
    pub(super) deleted: AtomicBool,
    /// Whether the supervisor has a descriptor of it.
    pub(super) is_kept: AtomicBool,
    /// The lookups of a node without a slot.
    pub(super) own_lookups: AtomicU64,
}

/// A descriptor (O_PATH) that holds a node.
pub(crate) struct Descriptor {
    pub(super) fd: OwnedFd,
    pub(super) _counted: Counted,
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A descriptor of a node: its own, or one opened for this use.
pub(crate) enum Anchor<'a> {
    /// The descriptor of an open file.
    Held(BorrowedFd<'a>),
    /// The node's own descriptor. The node may give it back meanwhile.
    Shared(Arc<Descriptor>),
    /// Opened for this use.
    Opened(OwnedFd),
}

impl AsFd for Anchor<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Anchor::Held(fd) => *fd,
            Anchor::Shared(fd) => fd.as_fd(),
            Anchor::Opened(fd) => fd.as_fd(),
        }
    }
}

impl Inode {
    /// The generation shown to the kernel. A device node has another one while its mount forbids
    /// devices, because the kernel reads the number of a device only once for each inode.
    pub(crate) fn generation(&self) -> u64 {
        let of_device = || u64::from(self.device.forbids().dev());
        self.file.as_ref().map_or_else(of_device, |file| u64::from(file.key().0))
    }

    /// Records that the file has a name again (linkat of an O_TMPFILE).
    pub(crate) fn mark_linked(&self) {
        self.deleted.store(false, Ordering::Relaxed);
        self.slot.iter().for_each(|slot| slot.clear_flag(node::DELETED));
    }

    /// Records that a write out of the page cache has arrived.
    pub(crate) fn mark_mapped_writes(&self) {
        self.mapped_writes.store(true, Ordering::Relaxed);
        self.slot.iter().for_each(|slot| slot.set_flag(node::MAPPED_WRITES));
    }

    /// Records that the kernel's size or times of the file are wrong.
    pub(crate) fn mark_misbelieved(&self) {
        self.misbelieved.store(true, Ordering::Relaxed);
        self.slot.iter().for_each(|slot| slot.set_flag(node::MISBELIEVED));
    }

    /// Whether the kernel's size or times of the file are wrong.
    pub(crate) fn is_misbelieved(&self) -> bool {
        self.misbelieved.load(Ordering::Relaxed)
    }

    /// Records the stamp of the file for a successor. The caller holds `changing`.
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

    pub(super) fn lookups(&self) -> &AtomicU64 {
        self.slot.as_ref().map_or(&self.own_lookups, NodeSlot::lookups)
    }

    /// Whether it is open now.
    pub(crate) fn is_open(&self) -> bool {
        self.passthrough.lock().is_open()
    }

    /// The hash of its file handle, if the backing file system has handles.
    pub(crate) fn handle_hash(&self) -> u64 {
        self.identity.generation
    }

    /// The descriptor that holds it, if one does.
    pub(crate) fn held(&self) -> Option<Arc<Descriptor>> {
        self.descriptor.lock().clone()
    }

    /// Number of descriptors that an open costs: 2 if the node cannot give its own one back
    /// meanwhile.
    pub(crate) fn charge(&self) -> usize {
        if self.handle.is_some() { 1 } else { 2 }
    }

    /// Whether it can be found again without a descriptor. (A file without a name can as long as it
    /// is open.)
    pub(super) fn can_give_back(&self) -> bool {
        self.handle.is_some()
    }

    /// Whether this is the file that was found.
    pub(crate) fn is(&self, found: &Statx) -> bool {
        self.identity.inode == found.stx_ino && self.identity.device == device_of(found)
    }

    /// Whether no name is left, as far as known.
    pub(crate) fn is_deleted(&self) -> bool {
        // A remote server, which may know better, is not asked, because each file is checked again
        // and again.
        let known =
            |fd: BorrowedFd<'_>| statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::NLINK);
        self.deleted.load(Ordering::Relaxed)
            || self.held().is_some_and(|fd| known(fd.as_fd()).is_ok_and(|stat| stat.stx_nlink == 0))
    }
}

impl Inode {
    /// Whether no file found later can be this one, once the kernel has forgotten it. This is
    /// assumed for a file system mounted within SOURCE: it can be unmounted, another one may get
    /// its device number, and its server, which may belong to any user, can forge the rest of an
    /// identity.
    pub(super) fn is_gone_for_good(&self) -> bool {
        !self.device.is_source() || self.is_deleted()
    }
}

/// A backing file that was just opened with O_PATH, before it becomes a node.
pub(crate) struct Found {
    /// Its descriptor, opened with O_PATH.
    pub fd: OwnedFd,
    /// The attributes of the file.
    pub stat: Statx,
    pub(super) identity: FileIdentity,
    pub(super) handle: Option<(FileHandle, i32)>,
}

impl Found {
    /// Determines the identity of the file.
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
