//! Makes the kernel drop cached pages, from threads of their own.
//!
//! This never happens inside the handling of a request: the kernel waits for pages that the
//! request's caller holds locked until it has its answer. (Forgetting attributes needs no such
//! wait: see [`Invalidations::forget_attributes`].) So requests only queue invalidations. The queue
//! is bounded by the number of inodes: ranges of one inode are merged, and the kernel may cache one
//! name of each inode for long. For renames, each new name is queued once. All except renames are
//! also recorded, so that a successor applies them.
//!
//! Only the answers to a write(2) and to an open may wait for their drops, and for a limited time.
//! The drop itself may wait for pages that another request or this write holds, and for writeback
//! by the workers. So not all workers may wait at once. Awaited drops have a queue and threads of
//! their own ([`Invalidations::deliver_awaited`]), because another drop of the file may wait for
//! the page that the write holds locked until its answer.

use crate::inode::{Inode, Name};
use crate::kernel::fair_queue::FairQueue;
use crate::lifecycle::status::Counter;
use crate::takeover::layout::node;
use fuse::abi::init;
use fuse::{Errno, Notifier, Session, abi};
use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::ffi::CStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause before the kernel is notified again of a name that it did not have, and the number of
/// attempts.
const AGAIN_PAUSE: Duration = Duration::from_millis(20);
const TRIES_MAX: u32 = 10;
/// Limit on the names for which the notification is repeated.
const AGAIN_MAX: usize = 1024;

/// How long the answer to an open may wait until the kernel has dropped its cache of a file that
/// may have grown externally, and then until the end is moved. Both take some 0.1 ms if little is
/// cached. Otherwise the kernel would drop the cache at the end of the open. Changes of the file
/// wait while the end is moved, and one of them may hold a page that the kernel must lock for this.
const OLDER_END_WAIT: Duration = Duration::from_secs(1);
const END_WAIT: Duration = Duration::from_millis(250);

/// Threads for awaited drops. Each may wait for a page that a READ from a slow disk holds.
pub(crate) const AWAITED_THREADS: usize = 4;

struct Pages {
    inode: Arc<Inode>,
    start: u64,
    end: u64,
    /// The number that the borrower gets when everything is dropped.
    number: Option<u64>,
}

/// A task that the answer to a request waits for.
enum Task {
    Drop(Pages),
    /// Raise the kernel's size of the file to this value, in bytes, if it is smaller.
    MoveEnd(Arc<Inode>, u64),
}

impl Task {
    /// The node whose pages are dropped.
    fn drops(&self) -> Option<u64> {
        match self {
            Task::Drop(pages) => Some(pages.inode.nodeid),
            Task::MoveEnd(..) => None,
        }
    }
}

/// A notification in progress.
struct InProgress {
    number: u64,
    /// The node whose pages are dropped.
    drops: Option<u64>,
    /// Whether the waiting answer has given up.
    is_given_up: bool,
}

/// How an answer has waited.
#[derive(PartialEq, Eq)]
enum Waited {
    Done,
    /// The kernel was notified, and may not have finished.
    Begun,
    /// The task was withdrawn: the kernel will not be notified.
    Never,
}

#[derive(Default)]
struct State {
    pages: FairQueue<Pages>,
    /// The tasks that answers wait for, each with a number. At most [`Invalidations::waiting_max`].
    awaited: VecDeque<(u64, Task)>,
    in_progress: Vec<InProgress>,
    last_awaited: u64,
    names: VecDeque<(Arc<Inode>, Name)>,
    /// Names that were moved, and whether the kernel only has to look them up again.
    moved: HashMap<Name, bool>,
    /// Moved names that the kernel did not have yet, with the time and the number of the next
    /// attempt.
    again: VecDeque<(Instant, Name, u32)>,
    /// Files that have lost a name, which the kernel may not have counted yet.
    lost: HashMap<u64, (Arc<Inode>, Arc<Name>)>,
    /// The node whose drop is in progress.
    delivering: Option<u64>,
    /// Nodes that the kernel must forget if they are unused, and whether that notification is in
    /// progress.
    to_forget: Vec<u64>,
    forgetting: bool,
    /// Number of waiting threads.
    waiting: usize,
    closing: bool,
}

impl State {
    /// Whether no drop of the node is queued or in progress.
    fn is_dropped(&self, node: u64) -> bool {
        !self.pages.has(node)
            && self.delivering != Some(node)
            && !self.in_progress.iter().any(|one| one.drops == Some(node))
            && !self.awaited.iter().any(|(_, task)| task.drops() == Some(node))
    }

    fn in_progress(&mut self, number: u64) -> Option<&mut InProgress> {
        self.in_progress.iter_mut().find(|one| one.number == number)
    }

    /// Queues pages to be dropped. Returns whether they extend the queued ranges of the node.
    fn note(&mut self, pages: Pages) -> bool {
        self.pages.note(pages.inode.nodeid, pages, |noted, pages| {
            noted.start = noted.start.min(pages.start);
            noted.end = noted.end.max(pages.end);
            noted.number = noted.number.max(pages.number);
        })
    }
}

/// The invalidations that the kernel still has to apply.
pub(crate) struct Invalidations {
    state: Mutex<State>,
    wake: Condvar,
    /// Notified when a task that an answer waits for is queued.
    wake_awaited: Condvar,
    /// Notified when the pages of a node were dropped, or when another awaited notification has
    /// ended.
    delivered: Condvar,
    waiting_max: usize,
    /// Limit on the threads that wait for answers other than those to a write(2).
    others_waiting_max: usize,
    notifier: Notifier,
    /// Number of requests to drop pages of a file.
    requested: Counter,
    /// Whether the kernel can look a name up again and keep it meanwhile (Linux 6.2).
    can_expire: bool,
    /// Whether the kernel can be told to forget nodes that nobody uses (Linux 6.18).
    can_prune: bool,
}

impl Invalidations {
    /// Creates the queue for at most so many workers, of which at most half wait at once.
    pub(crate) fn new(workers: usize, session: &Session) -> Invalidations {
        Invalidations {
            notifier: session.notifier(),
            can_prune: session.negotiated().minor >= abi::PRUNE_MINOR,
            can_expire: session.negotiated().capabilities & init::HAS_EXPIRE_ONLY != 0,
            requested: Counter::default(),
            state: Mutex::default(),
            wake: Condvar::new(),
            wake_awaited: Condvar::new(),
            delivered: Condvar::new(),
            waiting_max: workers / 2,
            others_waiting_max: workers.div_ceil(4),
        }
    }

    /// Waits until no drop of the file is queued or in progress, at most for `limit`. Returns
    /// whether that was reached.
    pub(crate) fn wait(&self, inode: &Inode, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let node = inode.nodeid;
        let mut state = self.state.lock();
        if state.is_dropped(node) || state.waiting >= self.others_waiting_max {
            return state.is_dropped(node);
        }
        state.waiting += 1;
        while !state.is_dropped(node) && !self.delivered.wait_until(&mut state, deadline).timed_out() {}
        state.waiting -= 1;
        state.is_dropped(node)
    }

    /// Makes the kernel drop its cache of bytes `start..end` of a file, and waits at most for
    /// `limit`. Returns whether the drop has ended; if not, it continues.
    pub(crate) fn drop_now(&self, inode: &Arc<Inode>, start: u64, end: u64, limit: Duration) -> bool {
        self.drop_pages_now(Pages { inode: inode.clone(), start, end, number: None }, limit, self.waiting_max)
    }

    /// Makes the kernel drop its whole cache of a file, for an open, and waits for a limited time.
    /// The borrower is notified at the end, with this number. Returns whether the drop has ended;
    /// if not, it continues.
    pub(crate) fn drop_all_now(&self, inode: &Arc<Inode>, number: Option<u64>) -> bool {
        let pages = Pages { inode: inode.clone(), start: 0, end: u64::MAX, number };
        self.drop_pages_now(pages, OLDER_END_WAIT, self.others_waiting_max)
    }

    fn drop_pages_now(&self, pages: Pages, limit: Duration, waiting_max: usize) -> bool {
        self.drop_begins(&pages.inode);
        let (waited, task) = self.notify_now(Task::Drop(pages), limit, waiting_max);
        if let Some(Task::Drop(pages)) = task {
            self.note(pages);
        }
        waited == Waited::Done
    }

    /// Raises the kernel's size of a file to this value, in bytes, if it is smaller, and waits for
    /// a limited time. Returns whether that is certain. The caller must ensure that the file does
    /// not become shorter meanwhile.
    pub(crate) fn move_end_now(&self, inode: &Arc<Inode>, size_bytes: u64) -> bool {
        let task = Task::MoveEnd(inode.clone(), size_bytes);
        self.notify_now(task, END_WAIT, self.others_waiting_max).0 == Waited::Done
    }

    /// Lets a thread execute a task, unless `waiting_max` answers wait already. Waits at most for
    /// `limit`. Returns the task if no thread had time for it.
    fn notify_now(&self, task: Task, limit: Duration, waiting_max: usize) -> (Waited, Option<Task>) {
        let deadline = Instant::now() + limit;
        let mut state = self.state.lock();
        if state.waiting >= waiting_max {
            return (Waited::Never, Some(task));
        }
        state.waiting += 1;
        state.last_awaited += 1;
        let number = state.last_awaited;
        if let Task::Drop(pages) = &task {
            // Set the flag again: another drop of the file may have ended just now.
            pages.inode.slot.iter().for_each(|slot| slot.set_flag(node::DROP_PENDING));
        }
        state.awaited.push_back((number, task));
        self.wake_awaited.notify_one();
        let place = |state: &State| state.awaited.iter().position(|(other, _)| *other == number);
        while (place(&state).is_some() || state.in_progress(number).is_some())
            && !self.delivered.wait_until(&mut state, deadline).timed_out()
        {}
        state.waiting -= 1;
        if let Some(place) = place(&state) {
            return (Waited::Never, state.awaited.remove(place).map(|(_, task)| task));
        }
        let waited = match state.in_progress(number) {
            None => Waited::Done,
            Some(one) => {
                one.is_given_up = true;
                Waited::Begun
            }
        };
        (waited, None)
    }

    /// Queues a drop of the kernel's cache of bytes `start..end` of a file.
    pub(crate) fn request(&self, inode: &Arc<Inode>, start: u64, end: u64) {
        self.add(inode, start, end, None);
    }

    /// Queues a drop of the kernel's whole cache of a file. The borrower is notified at the end,
    /// with this number.
    pub(crate) fn request_all(&self, inode: &Arc<Inode>, number: u64) {
        self.add(inode, 0, u64::MAX, Some(number));
    }

    /// Number of requests to drop pages of a file since this daemon began.
    pub(crate) fn requested(&self) -> u64 {
        self.requested.get()
    }

    fn add(&self, inode: &Arc<Inode>, start: u64, end: u64, number: Option<u64>) {
        self.drop_begins(inode);
        self.note(Pages { inode: inode.clone(), start, end, number });
    }

    fn drop_begins(&self, inode: &Inode) {
        self.requested.add(1);
        // Under the lock, because a drop that ends clears the flag.
        let _state = self.state.lock();
        inode.slot.iter().for_each(|slot| slot.set_flag(node::DROP_PENDING));
        inode.file.iter().for_each(|file| file.drop_begins());
    }

    /// Queues these pages for the thread of drops without a waiting answer. Their drop counts as
    /// begun.
    fn note(&self, pages: Pages) {
        let inode = pages.inode.clone();
        let mut state = self.state.lock();
        inode.slot.iter().for_each(|slot| slot.set_flag(node::DROP_PENDING));
        if !state.note(pages) {
            // One drop does for both.
            inode.file.iter().for_each(|file| file.drop_ended());
        }
        self.wake.notify_one();
    }

    /// Makes the kernel look the name up again. The inode is notified when the kernel has dropped
    /// the name.
    pub(crate) fn request_name(&self, inode: &Arc<Inode>, name: Name) {
        self.state.lock().names.push_back((inode.clone(), name));
        self.wake.notify_one();
    }

    /// Makes the kernel forget the attributes of a node before this returns. Must be called before
    /// a request is answered whose caller holds the node: it opens it, has it open, or requests its
    /// attributes.
    ///
    /// A worker may call this, because nothing in it waits for an answer (fs/fuse/inode.c,
    /// `fuse_reverse_inval_inode`, with a negative offset; 6.1 to 6.18). The kernel finds the
    /// inode, which would wait for an inode that is being freed. But the caller holds it, so this
    /// is never its last user either. The kernel takes the inode's spin lock, and no other lock of
    /// it or of its pages. It takes `killsb` for reading; only the end of a mount takes it for
    /// writing, and then no caller waits for an answer.
    pub(crate) fn forget_attributes(&self, nodeid: u64) {
        // On any error, the kernel does not know it, or the mount is gone.
        let _ = self.notifier.inval_inode(nodeid, -1, 0);
    }

    /// Makes the kernel look up a name again to which a file was renamed, given by the node of its
    /// directory and the name. `expire_only`: the cached entry may be right, and then its cache and
    /// its subtree must not be lost. (A kernel that can only drop entries is not notified then.)
    pub(crate) fn request_moved(&self, to: (u64, &CStr), expire_only: bool) {
        if expire_only && !self.can_expire {
            return;
        }
        self.state.lock().moved.insert(Name { parent: to.0, name: to.1.to_owned() }, expire_only);
        self.wake.notify_one();
    }

    /// Notifies the inode when the kernel has counted the removal of this name (see
    /// `inode/link_count.rs`).
    pub(crate) fn request_counted(&self, inode: &Arc<Inode>, name: Arc<Name>) {
        self.state.lock().lost.insert(inode.nodeid, (inode.clone(), name));
        self.wake.notify_one();
    }

    /// Whether the kernel can forget unused nodes on request; if not, names have to be dropped one
    /// by one.
    pub(crate) fn can_prune(&self) -> bool {
        self.can_prune
    }

    /// Whether no request to forget nodes is in progress.
    pub(crate) fn may_request_forget(&self) -> bool {
        let state = self.state.lock();
        state.to_forget.is_empty() && !state.forgetting
    }

    /// Makes the kernel forget these nodes, unless they are in use.
    pub(crate) fn request_forget(&self, nodes: Vec<u64>) {
        if !nodes.is_empty() {
            self.state.lock().to_forget = nodes;
            self.wake.notify_one();
        }
    }

    /// Ends [`Invalidations::deliver`] and [`Invalidations::deliver_awaited`].
    pub(crate) fn close(&self) {
        self.state.lock().closing = true;
        self.wake.notify_all();
        self.wake_awaited.notify_all();
    }

    /// The work of a thread for tasks that answers wait for. Returns after
    /// [`Invalidations::close`].
    pub(crate) fn deliver_awaited(&self) {
        let mut state = self.state.lock();
        while !state.closing {
            let Some((number, task)) = state.awaited.pop_front() else {
                self.wake_awaited.wait(&mut state);
                continue;
            };
            state.in_progress.push(InProgress { number, drops: task.drops(), is_given_up: false });
            drop(state);
            let dropped = match task {
                Task::Drop(pages) => Some(pages).filter(|pages| deliver_pages(&self.notifier, pages)),
                Task::MoveEnd(inode, size_bytes) => {
                    // On any error, the kernel does not know the file, or the mount is gone.
                    let _ = self.notifier.move_end(inode.nodeid, size_bytes);
                    let is_late = self.state.lock().in_progress(number).is_some_and(|one| one.is_given_up);
                    if is_late {
                        // The file may have another size by now.
                        self.forget_attributes(inode.nodeid);
                    }
                    None
                }
            };
            state = self.state.lock();
            state.in_progress.retain(|one| one.number != number);
            self.delivered.notify_all();
            if let Some(pages) = dropped.filter(|pages| state.is_dropped(pages.inode.nodeid)) {
                drop_has_ended(&pages.inode);
            }
        }
    }

    /// The work of the thread. Returns after [`Invalidations::close`].
    pub(crate) fn deliver(&self) {
        let notifier = &self.notifier;
        let mut state = self.state.lock();
        while !state.closing {
            let moved = std::mem::take(&mut state.moved);
            let mut moved: Vec<_> =
                moved.into_iter().map(|(name, expire_only)| (name, expire_only, TRIES_MAX)).collect();
            let due = state.again.front().map(|(due, _, _)| *due);
            if due.is_some_and(|due| due <= Instant::now())
                && let Some((_, name, tries)) = state.again.pop_front()
            {
                moved.push((name, true, tries));
            }
            let lost = std::mem::take(&mut state.lost);
            let name = state.names.pop_front();
            let (node, pages) = state.pages.take().unzip();
            state.delivering = node;
            let to_forget = std::mem::take(&mut state.to_forget);
            state.forgetting = !to_forget.is_empty();
            if name.is_none() && pages.is_none() && moved.is_empty() && lost.is_empty() && to_forget.is_empty() {
                match due {
                    Some(due) => drop(self.wake.wait_until(&mut state, due)),
                    None => self.wake.wait(&mut state),
                }
                continue;
            }
            drop(state);
            for nodes in to_forget.chunks(abi::PRUNE_NODES_MAX) {
                // On any error, the mount is gone.
                let _ = notifier.prune(nodes);
            }
            for (name, expire_only, tries) in moved {
                self.deliver_moved(name, expire_only, tries);
            }
            for (inode, name) in lost.into_values() {
                self.deliver_counted(&name);
                inode.lost_name.counted(&name);
            }
            if let Some((inode, name)) = name {
                // On any error, the kernel does not know the name any more, or the mount is
                // gone.
                let _ = notifier.inval_entry(name.parent, &name.name, false);
                inode.name_dropped();
            }
            let delivered = pages.filter(|pages| deliver_pages(notifier, pages));
            state = self.state.lock();
            state.delivering = None;
            state.forgetting = false;
            self.delivered.notify_all();
            // Unless more pages must be dropped by now.
            if let Some(pages) = delivered.filter(|pages| state.is_dropped(pages.inode.nodeid)) {
                drop_has_ended(&pages.inode);
            }
        }
    }

    /// Waits until the kernel has unlocked the directory: it holds the lock until it has counted
    /// the removed name. Kernels before 6.2 would drop the file that has that name now. They take
    /// the lock before they look for a name, so a name that cannot exist serves as well.
    fn deliver_counted(&self, name: &Name) {
        let name_there = if self.can_expire { name.name.as_c_str() } else { c"/" };
        let _ = self.notifier.inval_entry(name.parent, name_there, self.can_expire);
    }

    /// Notifies the kernel of a moved name. The kernel holds the directories locked until it has
    /// moved the name, some time after the answer to the rename, so this waits for it
    /// (fs/fuse/dir.c, `fuse_reverse_inval_entry`). But since 6.19 it checks whether it has the
    /// name before it takes the locks, and returns ENOENT if not. Then the notification is
    /// repeated, but without dropping a name, which could be another one by then. If all this
    /// fails, a task that opens the file by that name gets ESTALE (`inode/revalidation.rs`).
    fn deliver_moved(&self, name: Name, expire_only: bool, tries: u32) {
        let result = self.notifier.inval_entry(name.parent, &name.name, expire_only);
        if result == Err(Errno::NOENT) && self.can_expire && tries > 1 {
            let mut state = self.state.lock();
            if state.again.len() < AGAIN_MAX {
                state.again.push_back((Instant::now() + AGAIN_PAUSE, name, tries - 1));
            }
        }
    }
}

/// Records that no drop of the node is queued. The caller holds the lock under which drops are
/// queued.
fn drop_has_ended(inode: &Inode) {
    inode.slot.iter().for_each(|slot| slot.clear_flag(node::DROP_PENDING));
    if let Some(_changing) = inode.changing.try_lock() {
        inode.record_stamp();
    }
}

/// Drops pages. Returns whether the kernel has none of them any more.
fn deliver_pages(notifier: &Notifier, pages: &Pages) -> bool {
    let start = i64::try_from(pages.start).unwrap_or(i64::MAX);
    // A length of 0 means to the end of the file.
    let len = i64::try_from(pages.end).map_or(0, |end| end.saturating_sub(start));
    let result = notifier.inval_inode(pages.inode.nodeid, start, len);
    let Some(file) = &pages.inode.file else { return true };
    file.drop_ended();
    // If the kernel does not know the inode, it caches nothing of it. After any other error the
    // next open tries again.
    let is_dropped = matches!(result, Ok(()) | Err(Errno::NOENT));
    if let (true, Some(number)) = (is_dropped, pages.number) {
        file.kernel_dropped(number);
    }
    is_dropped
}
