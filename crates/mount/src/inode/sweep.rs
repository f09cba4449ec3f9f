//! Letting go of files that were deleted beside the mount.
//!
//! A node holds its file by a descriptor for as long as the kernel remembers a name of it, and
//! names of files are believed for long. So a file deleted below would keep its disk space until
//! memory is short. This looks at all nodes in turn, a few at a time, and has the kernel forget the
//! names of those that have none left below.

use crate::filesystem::Passthrough;
use parking_lot::{Condvar, Mutex};
use std::time::Duration;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_secs(1);
/// Nodes looked at each time: some milliseconds of work.
const NODES_PER_LOOK: usize = 2000;

/// The sweep.
#[derive(Default)]
pub(crate) struct Sweep {
    closing: Mutex<bool>,
    wake: Condvar,
}

impl Sweep {
    /// Ends [`Sweep::run`].
    pub(crate) fn close(&self) {
        *self.closing.lock() = true;
        self.wake.notify_all();
    }

    /// The thread's work. Returns after [`Sweep::close`].
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
