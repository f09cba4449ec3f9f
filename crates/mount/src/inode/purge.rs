//! Releases files that were deleted externally.
//!
//! A node holds its file by a descriptor while the kernel caches a name of the file, and the kernel
//! may cache names for long. So a file that was deleted externally would keep its disk space until
//! memory is short. The purge visits all nodes in turn, a few at a time, and makes the kernel
//! forget the names of deleted files.

use crate::filesystem::Passthrough;
use parking_lot::{Condvar, Mutex};
use std::time::Duration;

/// Pause between two groups of nodes.
const PAUSE: Duration = Duration::from_secs(1);
/// Nodes in a group: some milliseconds of work.
const NODES_PER_LOOK: usize = 2000;

/// The state of the purge.
#[derive(Default)]
pub(crate) struct Purge {
    closing: Mutex<bool>,
    wake: Condvar,
}

impl Purge {
    /// Ends [`Purge::run`].
    pub(crate) fn close(&self) {
        *self.closing.lock() = true;
        self.wake.notify_all();
    }

    /// The work of the thread. Returns after [`Purge::close`].
    pub(crate) fn run(&self, filesystem: &Passthrough) {
        let mut nodes = Vec::new();
        let mut closing = self.closing.lock();
        while !*closing {
            self.wake.wait_for(&mut closing, PAUSE);
            parking_lot::MutexGuard::unlocked(&mut closing, || {
                if nodes.is_empty() {
                    nodes = filesystem.inodes.nodes();
                }
                for node in nodes.drain(nodes.len().saturating_sub(NODES_PER_LOOK)..) {
                    if let Ok(inode) = filesystem.inodes.get(node)
                        && !inode.is_open()
                        && inode.is_deleted()
                    {
                        filesystem.drop_stale_names(&inode);
                    }
                }
            });
        }
    }
}
