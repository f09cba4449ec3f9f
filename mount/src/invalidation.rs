//! Having the kernel drop cached pages, from a thread of its own.
//!
//! Never inside the handling of a request: the kernel waits for pages that the request's caller holds locked until it has its answer.
//! So requests only note what must go. What is noted is bounded by the number of inodes: ranges of one inode merge.

use fuse::Notifier;
use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex};

#[derive(Default)]
struct State {
    ranges: HashMap<u64, (u64, u64)>,
    closing: bool,
}

/// What must go.
#[derive(Default)]
pub(crate) struct Invalidations {
    state: Mutex<State>,
    wake: Condvar,
}

impl Invalidations {
    /// The kernel must drop what it caches of bytes `start..end` of a node.
    pub(crate) fn request(&self, nodeid: u64, start: u64, end: u64) {
        let mut state = self.state.lock();
        let range = state.ranges.entry(nodeid).or_insert((start, end));
        *range = (range.0.min(start), range.1.max(end));
        self.wake.notify_one();
    }

    /// Ends [`Invalidations::deliver`].
    pub(crate) fn close(&self) {
        self.state.lock().closing = true;
        self.wake.notify_all();
    }

    /// The thread's work. Returns after [`Invalidations::close`].
    pub(crate) fn deliver(&self, notifier: &Notifier) {
        let mut state = self.state.lock();
        while !state.closing {
            let Some(nodeid) = state.ranges.keys().next().copied() else {
                self.wake.wait(&mut state);
                continue;
            };
            let Some((start, end)) = state.ranges.remove(&nodeid) else { continue };
            drop(state);
            let start = i64::try_from(start).unwrap_or(i64::MAX);
            // A length of 0 means to the end of the file.
            let len = i64::try_from(end).map_or(0, |end| end.saturating_sub(start));
            // Whatever the error: the kernel does not know the node any more, or the mount is gone.
            let _ = notifier.inval_inode(nodeid, start, len);
            state = self.state.lock();
        }
    }
}
