//! Room for one more descriptor: what is given back, and what the kernel is asked to forget.

use super::descriptors::Taken;
use crate::filesystem::Passthrough;
use fuse::Errno;
use std::time::Duration;

/// How long a request waits until the kernel has forgotten inodes, where no descriptor is left:
/// that takes some milliseconds.
const FORGET_WAIT: Duration = Duration::from_millis(500);

impl Passthrough {
    /// A user opens a file or directory: one more descriptor. For `charge` see
    /// [`Descriptors::take`](crate::inode::descriptors::Descriptors::take).
    ///
    /// # Errors
    /// EMFILE beyond the user's share, or if none is left.
    pub(crate) fn take_descriptor(&self, uid: u32, charge: usize) -> Result<Taken, Errno> {
        let taken = self.inodes.descriptors().take(uid, charge)?;
        self.make_room();
        if self.inodes.descriptors().is_exhausted() { Err(Errno::MFILE) } else { Ok(taken) }
    }

    /// Whether a listing may make inodes known that nobody has asked for yet.
    pub(crate) fn has_room_for_names(&self) -> bool {
        !self.inodes.needs_forgets() || self.inodes.descriptors().tight().is_none()
    }

    /// Has inodes give back descriptors if few are left. Where none is left, it waits a little for
    /// the kernel to forget some.
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

    /// Has the kernel drop the name of a file that it believes for long, and with that forget the
    /// file. Not of a directory, as somebody may have mounted something there, which would go with
    /// the name.
    fn drop_name(&self, node: u64) {
        let Ok(inode) = self.inodes.get(node) else { return };
        if let Some(name) = inode.name_to_drop() {
            self.invalidations.request_name(&inode, name);
        }
    }

    pub(crate) fn forget(&self, node: u64, lookups: u64) {
        let Some(inode) = self.inodes.forget(node, lookups) else { return };
        self.beside.forgotten(&inode, &self.inodes);
        if inode.is_deleted() || inode.charge() > 1 && !self.has_room_for_names() {
            self.ledger.remove(node); // It would hold the inode's descriptor.
        }
        self.inodes.give_back(&inode);
    }
}
