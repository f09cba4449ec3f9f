//! Makes room for descriptors: inodes give theirs back, and the kernel is asked to forget inodes.

use super::descriptors::Taken;
use crate::filesystem::Passthrough;
use fuse::Errno;
use std::time::Duration;

/// Time limit for a request to wait until the kernel has forgotten inodes, if no descriptor is
/// left. The kernel needs some milliseconds.
const FORGET_WAIT: Duration = Duration::from_millis(500);

impl Passthrough {
    /// Charges a user for opening a file or directory. For `charge` see
    /// [`Descriptors::take`](crate::inode::descriptors::Descriptors::take).
    ///
    /// # Errors
    /// EMFILE if this exceeds the user's share, or if no descriptor is left.
    pub(crate) fn take_descriptor(&self, uid: u32, charge: usize) -> Result<Taken, Errno> {
        let taken = self.inodes.descriptors().take(uid, charge)?;
        self.make_room();
        if self.inodes.descriptors().is_exhausted() { Err(Errno::MFILE) } else { Ok(taken) }
    }

    /// Whether a listing may create inodes that were not requested.
    pub(crate) fn has_room_for_names(&self) -> bool {
        !self.inodes.needs_forgets() || self.inodes.descriptors().tight().is_none()
    }

    /// Makes inodes give back descriptors if few are left. If none is left, waits for a limited
    /// time until the kernel has forgotten some inodes.
    pub(crate) fn make_room(&self) {
        let descriptors = self.inodes.descriptors();
        let Some(count) = descriptors.tight() else { return };
        if !self.inodes.needs_forgets() {
            return; // Those that can be given back are, when it is needed.
        }
        if self.invalidations.may_request_forget() {
            let nodes = self.inodes.make_room(count);
            match self.invalidations.can_prune() {
                true => self.invalidations.request_forget(nodes),
                false => nodes.into_iter().for_each(|node| self.drop_name(node)),
            }
        }
        if descriptors.is_exhausted() {
            fuse::about_to_wait();
            descriptors.wait_for_room(FORGET_WAIT);
        }
    }

    /// Makes the kernel drop the cached name of a file, and so forget the file. Not for a
    /// directory, because a file system may be mounted there, and would be detached with the name.
    fn drop_name(&self, node: u64) {
        let Ok(inode) = self.inodes.get(node) else { return };
        if let Some(name) = inode.name_to_drop() {
            self.invalidations.request_name(&inode, name);
        }
    }

    pub(crate) fn forget(&self, node: u64, lookups: u64) {
        let Some(inode) = self.inodes.forget(node, lookups) else { return };
        self.external_changes.forgotten(&inode, &self.inodes);
        if inode.is_deleted() || inode.charge() > 1 && !self.has_room_for_names() {
            self.dirty_ranges.remove(node); // It would hold the inode's descriptor.
        }
        self.inodes.give_back(&inode);
    }
}
