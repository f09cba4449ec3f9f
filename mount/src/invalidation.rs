//! Having the kernel drop cached pages, from a thread of its own.
//!
//! Never inside the handling of a request: the kernel waits for pages that the request's caller holds locked until it has its answer.
//! So requests only note what must go. What is noted is bounded by the number of inodes: ranges of one inode merge, and of each inode
//! one name is believed for long. It is also written down, so that a successor drops what this daemon could not any more.
//!
//! Only the answer to a write(2) may wait for what it has asked for, and for a limited time: the drop may wait in turn for pages that
//! another request holds, or that very write, and for what the workers write back. So never all workers wait.

use crate::handover::layout::node;
use crate::inode::{Inode, Name};
use fuse::{Errno, Notifier};
use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

struct Pages {
    inode: Arc<Inode>,
    start: u64,
    end: u64,
    /// What to tell the borrower when everything is dropped.
    number: Option<u64>,
}

#[derive(Default)]
struct State {
    pages: HashMap<u64, Pages>,
    names: Vec<(Arc<Inode>, Name)>,
    /// The node whose pages the kernel is being told to drop.
    delivering: Option<u64>,
    /// Threads in [`Invalidations::wait`].
    waiting: usize,
    closing: bool,
}

/// What must go.
pub(crate) struct Invalidations {
    state: Mutex<State>,
    wake: Condvar,
    /// The pages of a node were dropped.
    delivered: Condvar,
    waiting_max: usize,
}

impl Invalidations {
    /// For that many workers, of which at most half wait at a time.
    pub(crate) fn new(workers: usize) -> Invalidations {
        Invalidations {
            state: Mutex::default(),
            wake: Condvar::new(),
            delivered: Condvar::new(),
            waiting_max: workers / 2,
        }
    }

    /// Waits until nothing of the file is to be dropped any more, or being dropped, but not for longer than `limit`. Returns whether that
    /// is so.
    pub(crate) fn wait(&self, inode: &Inode, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let is_dropped =
            |state: &State| !state.pages.contains_key(&inode.nodeid) && state.delivering != Some(inode.nodeid);
        let mut state = self.state.lock();
        if is_dropped(&state) || state.waiting >= self.waiting_max {
            return is_dropped(&state);
        }
        state.waiting += 1;
        while !is_dropped(&state) && !self.delivered.wait_until(&mut state, deadline).timed_out() {}
        state.waiting -= 1;
        is_dropped(&state)
    }

    /// The kernel must drop what it caches of bytes `start..end` of a file.
    pub(crate) fn request(&self, inode: &Arc<Inode>, start: u64, end: u64) {
        self.add(inode, start, end, None);
    }

    /// The kernel must drop all it caches of a file; the borrower is told then, with that number.
    pub(crate) fn request_all(&self, inode: &Arc<Inode>, number: u64) {
        self.add(inode, 0, u64::MAX, Some(number));
    }

    fn add(&self, inode: &Arc<Inode>, start: u64, end: u64, number: Option<u64>) {
        let mut state = self.state.lock();
        inode.slot.iter().for_each(|slot| slot.set_flag(node::DROP_PENDING));
        let pages = state.pages.entry(inode.nodeid).or_insert_with(|| {
            if let Some(file) = &inode.file {
                file.drop_begins();
            }
            Pages { inode: inode.clone(), start, end, number }
        });
        pages.start = pages.start.min(start);
        pages.end = pages.end.max(end);
        pages.number = pages.number.max(number);
        self.wake.notify_one();
    }

    /// The kernel must look the name up again. The inode is told when it has dropped it.
    pub(crate) fn request_name(&self, inode: &Arc<Inode>, name: Name) {
        self.state.lock().names.push((inode.clone(), name));
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
            let name = state.names.pop();
            let node = state.pages.keys().next().copied();
            let pages = node.and_then(|node| state.pages.remove(&node));
            state.delivering = node;
            if name.is_none() && pages.is_none() {
                self.wake.wait(&mut state);
                continue;
            }
            drop(state);
            if let Some((inode, name)) = name {
                // Whatever the error: the kernel does not know the name any more, or the mount is gone.
                let _ = notifier.inval_entry(name.parent, &name.name, false);
                inode.name_dropped();
            }
            let delivered = pages.filter(|pages| deliver_pages(notifier, pages));
            state = self.state.lock();
            state.delivering = None;
            self.delivered.notify_all();
            // Unless there is more to drop by now.
            if let Some(pages) = delivered.filter(|pages| !state.pages.contains_key(&pages.inode.nodeid)) {
                pages.inode.slot.iter().for_each(|slot| slot.clear_flag(node::DROP_PENDING));
                if let Some(_changing) = pages.inode.changing.try_lock() {
                    pages.inode.record_stamp();
                }
            }
        }
    }
}

/// Returns whether the kernel has nothing of them any more.
fn deliver_pages(notifier: &Notifier, pages: &Pages) -> bool {
    let start = i64::try_from(pages.start).unwrap_or(i64::MAX);
    // A length of 0 means to the end of the file.
    let len = i64::try_from(pages.end).map_or(0, |end| end.saturating_sub(start));
    let result = notifier.inval_inode(pages.inode.nodeid, start, len);
    let Some(file) = &pages.inode.file else { return true };
    file.drop_ended();
    // What the kernel does not know, it does not cache either. After any other error the next open tries again.
    let is_dropped = matches!(result, Ok(()) | Err(Errno::NOENT));
    if let (true, Some(number)) = (is_dropped, pages.number) {
        file.kernel_dropped(number);
    }
    is_dropped
}
