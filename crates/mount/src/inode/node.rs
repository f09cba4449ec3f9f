//! One inode, and the descriptors through which it is accessed.

use super::descriptors::Counted;
use super::link_count::LostName;
use super::opened::Newest;
use super::overtaken::OvertakenWrite;
use super::stale::Stale;
use super::{Believed, device_of};
use crate::backing::device::Device;
use crate::kernel::beside::Marked;
use crate::kernel::passing::Passing;
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
    /// Held from before a change is announced until its end, so that the stamps around it belong to
    /// it alone.
    pub changing: Mutex<()>,
    /// A write out of the page cache came for it: it was mapped, or (in `back`) simply written.
    pub mapped_writes: AtomicBool,
    /// It was opened here so that the kernel may have bytes of it that are not below yet.
    pub may_be_dirty: AtomicBool,
    /// It was opened here for reading and writing: a mapping may store to it.
    pub may_be_mapped: AtomicBool,
    /// The kernel believes a size or times that are not the file's, until it forgets the inode (see
    /// `kernel/writeback.rs`).
    pub(super) misbelieved: AtomicBool,
    /// Some of it was written and may be in the page cache below: the ledger knows what.
    pub written_below: AtomicBool,
    /// How it is open, and by how many.
    pub passing: Mutex<Passing>,
    /// Its newest descriptor, to be shared by opens that may have no other.
    pub newest: Newest,
    /// A write(2) that a READ has overtaken, and that is not answered yet.
    pub overtaken: OvertakenWrite,
    /// The name that the kernel was told to believe for long.
    pub name: Mutex<Believed>,
    /// Whether a name of it has gone stale lately. Taken alone, or inside `name`.
    pub stale: Mutex<Stale>,
    /// The name that it has lost through the mount, until the kernel has counted that.
    pub lost_name: LostName,
    /// Whether what is done to it beside the mount is told.
    pub marked: Marked,
    /// Where it is written down for a successor. None beyond
    /// [`crate::takeover::layout::NODES_MAX`].
    pub slot: Option<NodeSlot>,
    pub(super) identity: FileIdentity,
    pub(super) handle: Option<FileHandle>,
    pub(super) descriptor: Mutex<Option<Arc<Descriptor>>>,
    /// The descriptor was used since somebody looked for descriptors to be given back.
    pub(super) is_used: AtomicBool,
    pub(super) deleted: AtomicBool,
    /// Whether the keeper has a descriptor of it.
    pub(super) is_kept: AtomicBool,
    /// Used without a slot only.
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
    /// Of an open file.
    Held(BorrowedFd<'a>),
    /// The node's own. It may give it back meanwhile.
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
    /// The generation shown to the kernel. That of a device node is another one while its mount
    /// forbids devices: the kernel takes the number of a device once, when it gets to know the
    /// inode.
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

    /// The kernel believes a size or times that are not the file's.
    pub(crate) fn mark_misbelieved(&self) {
        self.misbelieved.store(true, Ordering::Relaxed);
        self.slot.iter().for_each(|slot| slot.set_flag(node::MISBELIEVED));
    }

    /// Whether the kernel believes a size or times that are not the file's.
    pub(crate) fn is_misbelieved(&self) -> bool {
        self.misbelieved.load(Ordering::Relaxed)
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

    pub(super) fn lookups(&self) -> &AtomicU64 {
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
    pub(crate) fn held(&self) -> Option<Arc<Descriptor>> {
        self.descriptor.lock().clone()
    }

    /// How many descriptors an open file of it costs: 2 if the node cannot give its own back
    /// meanwhile.
    pub(crate) fn charge(&self) -> usize {
        if self.handle.is_some() { 1 } else { 2 }
    }

    /// Whether it can be found again without a descriptor of it. (A file that has lost its name can
    /// as long as it is open.)
    pub(super) fn can_give_back(&self) -> bool {
        self.handle.is_some()
    }

    /// Whether it is what was found under a name.
    pub(crate) fn is(&self, found: &Statx) -> bool {
        self.identity.inode == found.stx_ino && self.identity.device == device_of(found)
    }

    /// Whether no name is left, as far as we know.
    pub(crate) fn is_deleted(&self) -> bool {
        // A server far away, who could know better, is not asked: this is looked at for each file
        // again and again.
        let known =
            |fd: BorrowedFd<'_>| statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::NLINK);
        self.deleted.load(Ordering::Relaxed)
            || self.held().is_some_and(|fd| known(fd.as_fd()).is_ok_and(|stat| stat.stx_nlink == 0))
    }
}

impl Inode {
    /// Whether nothing that is found later can be this file, once the kernel has forgotten it. Of a
    /// file system that is mounted in SOURCE that is assumed: nothing keeps it there, another one
    /// may get its device number, and its server, which may be any user's, can forge all else of an
    /// identity.
    pub(super) fn is_gone_for_good(&self) -> bool {
        !self.device.is_source() || self.is_deleted()
    }
}

/// A file just opened with O_PATH below, on its way to becoming a node.
pub(crate) struct Found {
    /// Open on it with O_PATH.
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
