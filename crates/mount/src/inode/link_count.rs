//! The kernel's link count of a file.
//!
//! When a name is removed through the mount, the kernel decrements the link count of the file some
//! time after the answer (fs/fuse/dir.c, `fuse_entry_unlinked`). Attributes that it caches in
//! between already have the lower count. Then it would decrement twice, assume that no name is
//! left, and refuse link(2) with ENOENT until it asks for the attributes again. So between the
//! removal and the kernel's decrement:
//!
//! - requested attributes are shown to the caller, but not cached: the kernel does not cache
//!   attributes that it was told to forget since its request (`fuse_change_attributes_i`,
//!   fs/fuse/inode.c);
//! - attributes in the answer to a lookup have one link more, and a timeout of zero. The next stat
//!   asks again.
//!
//! The kernel holds the directory locked from before it sends the removal until the decrement. A
//! notification that takes the same lock shows when that is over (`kernel/invalidation.rs`). It is
//! sent only if the attributes were requested.
//!
//! SETATTR and LINK need none of this: the kernel sends them with the file's own lock held, as it
//! does a removal.
//!
//! A successor of this daemon does not know which names were being removed when it took over. For
//! these few the kernel may count twice, until it asks for the attributes again.

use crate::filesystem::Passthrough;
use crate::inode::{Inode, Name};
use fuse::abi;
use parking_lot::Mutex;
use rustix::fs::{FileType, Statx};
use std::ffi::CStr;
use std::sync::Arc;

/// The name of a file that was removed last, until the kernel has decremented the link count.
#[derive(Default)]
pub(crate) struct LostName(Mutex<Option<Loss>>);

struct Loss {
    name: Arc<Name>,
    /// Whether the name is removed from the backing directory.
    is_removed: bool,
}

impl LostName {
    /// Records that the kernel has counted the removal of this name.
    pub(crate) fn counted(&self, name: &Arc<Name>) {
        let mut lost = self.0.lock();
        if lost.as_ref().is_some_and(|loss| Arc::ptr_eq(&loss.name, name)) {
            *lost = None;
        }
    }
}

/// A name that is being removed. If this is dropped, the removal has failed.
#[must_use]
pub(crate) struct Losing(Option<(Arc<Inode>, Arc<Name>)>);

impl Losing {
    /// Must be called before the name is removed from the backing directory. `victim` is the file,
    /// if the kernel knows it.
    pub(crate) fn begin(victim: Option<&Arc<Inode>>, parent: &Inode, name: &CStr) -> Losing {
        // For a directory the kernel sets the count to 0.
        let victim = victim.filter(|inode| inode.kind != FileType::Directory);
        Losing(victim.map(|inode| {
            let name = Arc::new(Name { parent: parent.nodeid, name: name.to_owned() });
            *inode.lost_name.0.lock() = Some(Loss { name: name.clone(), is_removed: false });
            (inode.clone(), name)
        }))
    }

    /// Records that the name is removed.
    pub(crate) fn removed(mut self) {
        if let Some((inode, _)) = self.0.take()
            && let Some(loss) = &mut *inode.lost_name.0.lock()
        {
            loss.is_removed = true;
        }
    }
}

impl Drop for Losing {
    fn drop(&mut self) {
        if let Some((inode, name)) = &self.0 {
            inode.lost_name.counted(name);
        }
    }
}

impl Passthrough {
    /// Whether the kernel may still have to decrement the count. `now` was read before this call.
    fn is_counting(&self, inode: &Arc<Inode>, now: &Statx) -> bool {
        // It never counts below 0.
        if now.stx_nlink == 0 {
            return false;
        }
        let lost = inode.lost_name.0.lock();
        let Some(loss) = &*lost else { return false };
        // Before that, the notification could wait as long as the backing file system needs.
        if loss.is_removed {
            self.invalidations.request_counted(inode, loss.name.clone());
        }
        true
    }

    /// Must be called before requested attributes are answered. The caller holds the inode.
    pub(crate) fn before_attributes(&self, inode: &Arc<Inode>, now: &Statx) {
        if self.is_counting(inode, now) {
            self.invalidations.forget_attributes(inode.nodeid);
        }
    }

    /// Must be called with the answer to a lookup.
    pub(crate) fn before_entry(&self, inode: &Arc<Inode>, now: &Statx, entry: &mut abi::EntryOut) {
        if self.is_counting(inode, now) {
            entry.attr.nlink = entry.attr.nlink.saturating_add(1);
            (entry.attr_valid, entry.attr_valid_nsec) = (0, 0);
        }
    }
}
