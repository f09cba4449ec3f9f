//! The size that the kernel believes a file to have, as far as it is known here.
//!
//! An open brings no size with it (fs/fuse/file.c, `fuse_open`). A file that an external change has
//! made longer would be mapped with its old size, so that a load from the new pages is a SIGBUS. So
//! an open is answered ESTALE once if the kernel may believe in another size: then the kernel looks
//! the name up again, and takes the size that comes with it.
//!
//! The kernel does not take every size that it is told. It drops an answer if it has taken another
//! one since it asked, or was told to forget the attributes (`fuse_change_attributes`). And it may
//! take an answer some time after it was given. So what is known is a range, and these are the
//! rules:
//!
//! - Attributes that somebody has asked for may be taken, or not.
//! - A READ that meets the end may lower the size to that end, or not (`fuse_read_update_size`).
//! - The answers to SETATTR and LINK are always taken, however late.
//! - A write(2) or fallocate(2) raises the size to its end (`fuse_write_update_attr`).
//! - A *fence* is a notification to forget the attributes, or to drop pages. An answer to a request
//!   from before a fence is not taken after it. So a task is sent back after a fence: all that the
//!   kernel takes from then on is as new as what its LOOKUP is told. If no other fence comes until
//!   the task opens the file, the kernel has taken that LOOKUP's size, or a newer one that was
//!   told.
//!
//! So fences wait for a moment for tasks that were sent back. The removal of a name is a fence,
//! too, when the kernel counts it (`link_count.rs`).

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Longest time from a task's being sent back to its opening the file that a fence waits for.
const AWAITED_MAX: Duration = Duration::from_millis(100);

/// How long the kernel mostly needs at the most to take an answer: a task is sent back only then.
const TAKEN_MOSTLY: Duration = Duration::from_millis(10);

/// How long it needs at the most: until then nothing is believed that such an answer would undo.
const TAKEN_MAX: Duration = Duration::from_secs(1);

struct State {
    /// The size that the kernel believes in is not below the one, and not above the other.
    low: u64,
    high: u64,
    /// The kernel knows the file.
    is_told: bool,
    /// The lowest and the highest size that was told since a task was sent back last.
    since: (u64, u64),
    /// Fences that have ended, and those that are being made.
    fences: u64,
    fencing: u32,
    /// Tasks that were sent back, and until when they are waited for.
    awaited: u32,
    awaited_until: Option<Instant>,
    /// The size of the last answer to SETATTR, and when it was given.
    set: Option<(u64, Instant)>,
    /// When the last one of another size than that was given.
    set_before: Option<Instant>,
    /// Requests that are being handled whose answers are taken in any case.
    forcing: u32,
}

impl State {
    /// When SETATTR was answered last with another size than this one.
    fn other_set(&self, size: u64) -> Option<Instant> {
        match self.set {
            Some((set, at)) if set != size => Some(at),
            _ => self.set_before,
        }
    }

    fn is_awaited(&self) -> bool {
        self.awaited > 0 && self.awaited_until.is_some_and(|until| Instant::now() < until)
    }
}

/// What is known of the size that the kernel believes in.
pub(crate) struct KnownSize {
    state: Mutex<State>,
    /// A fence has ended, or a task has come back.
    moved: Condvar,
}

impl Default for KnownSize {
    fn default() -> KnownSize {
        KnownSize::new(false)
    }
}

impl KnownSize {
    fn new(is_told: bool) -> KnownSize {
        let state = State {
            low: 0,
            high: u64::MAX,
            is_told,
            since: (0, u64::MAX),
            fences: 0,
            fencing: 0,
            awaited: 0,
            awaited_until: None,
            set: None,
            set_before: None,
            forcing: 0,
        };
        KnownSize { state: Mutex::new(state), moved: Condvar::new() }
    }

    /// Of a file that a daemon before this one has answered for.
    pub(crate) fn restored() -> KnownSize {
        KnownSize::new(true)
    }

    /// Attributes are about to be answered.
    pub(crate) fn told(&self, size: u64) {
        let mut state = self.state.lock();
        state.since = (state.since.0.min(size), state.since.1.max(size));
        if state.is_told {
            (state.low, state.high) = (state.low.min(size), state.high.max(size));
        } else {
            // The kernel's inode is born with it.
            (state.low, state.high, state.is_told) = (size, size, true);
        }
    }

    /// SETATTR or LINK is about to be handled. To be kept until its attributes were told.
    pub(crate) fn forces(&self) -> Forces<'_> {
        self.state.lock().forcing += 1;
        Forces(self)
    }

    /// The answer to SETATTR is about to be given, with attributes that were told. `sets`: it has
    /// set the size.
    pub(crate) fn set(&self, size: u64, sets: bool) {
        let mut state = self.state.lock();
        // Any other size is an external change, and somebody may open the file before the kernel
        // has taken it.
        if sets {
            (state.low, state.high) = (size, size);
        }
        state.set_before = state.other_set(size);
        state.set = Some((size, Instant::now()));
    }

    /// A change of bytes through the mount that ends there is about to be answered.
    pub(crate) fn grew(&self, end: u64) {
        let mut state = self.state.lock();
        (state.low, state.high) = (state.low.max(end), state.high.max(end));
    }

    /// A READ is about to be answered that met the end of the file there.
    pub(crate) fn read_ended(&self, end: u64) {
        let mut state = self.state.lock();
        state.low = state.low.min(end);
    }

    /// The kernel reads and writes the file by itself.
    pub(crate) fn passed(&self) {
        let mut state = self.state.lock();
        (state.low, state.high) = (0, u64::MAX);
    }

    /// Whether the kernel is known to believe in this size.
    pub(crate) fn is_held(&self, size: u64) -> bool {
        let state = self.state.lock();
        state.low == size && state.high == size
    }

    /// Waits for tasks that were sent back: what follows would undo what they are told.
    pub(crate) fn wait_for_awaited(&self) {
        drop(self.without_awaited());
    }

    fn without_awaited(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        while let Some(until) = state.awaited_until.filter(|_| state.is_awaited()) {
            fuse::about_to_wait();
            self.moved.wait_until(&mut state, until);
        }
        state
    }

    /// Makes a fence, but waits before for tasks that were sent back.
    pub(crate) fn fence<T>(&self, notify: impl FnOnce() -> T) -> T {
        let mut state = self.without_awaited();
        state.fencing += 1;
        drop(state);
        let result = notify();
        let mut state = self.state.lock();
        state.fencing -= 1;
        state.fences += 1;
        self.moved.notify_all();
        result
    }

    /// Waits until answers are taken that tell another size than this one, and are always taken:
    /// for some ms.
    pub(crate) fn settle(&self, size: u64) {
        let deadline = Instant::now() + AWAITED_MAX;
        let mut state = self.state.lock();
        while state.forcing > 0 && !self.moved.wait_until(&mut state, deadline).timed_out() {}
        let other_set = state.other_set(size);
        drop(state);
        if let Some(wait) = other_set.and_then(|at| TAKEN_MOSTLY.checked_sub(at.elapsed())) {
            std::thread::sleep(wait);
        }
    }

    /// A task is to be sent back for this size, unless the kernel has it by then: makes a fence,
    /// and waits for those of others. Returns the number of fences, to be told when the task comes
    /// back. None: the kernel has the size.
    pub(crate) fn send_back(&self, size: u64, forget: impl FnOnce()) -> Option<u64> {
        self.fence(forget);
        let deadline = Instant::now() + AWAITED_MAX;
        let mut state = self.state.lock();
        while state.fencing > 0 && !self.moved.wait_until(&mut state, deadline).timed_out() {}
        if state.low == size && state.high == size {
            return None;
        }
        state.awaited = if state.is_awaited() { state.awaited + 1 } else { 1 };
        state.awaited_until = Some(Instant::now() + AWAITED_MAX);
        state.since = (size, size);
        Some(state.fences)
    }

    /// A task is not sent back after all.
    pub(crate) fn is_not_sent_back(&self) {
        let mut state = self.state.lock();
        state.awaited = state.awaited.saturating_sub(1);
        self.moved.notify_all();
    }

    /// A task that was sent back opens the file, and was told this size since; `fences` is what
    /// [`KnownSize::send_back`] has returned.
    pub(crate) fn came_back(&self, size: u64, fences: u64) {
        let mut state = self.state.lock();
        state.awaited = state.awaited.saturating_sub(1);
        self.moved.notify_all();
        let is_late = state.other_set(size).is_some_and(|at| at.elapsed() < TAKEN_MAX);
        if state.fences == fences && state.fencing == 0 && !is_late {
            let (low, high) = state.since;
            (state.low, state.high) = (low.min(size), high.max(size));
        }
    }
}

/// A request is being handled whose answer is taken in any case.
#[must_use]
pub(crate) struct Forces<'a>(&'a KnownSize);

impl Drop for Forces<'_> {
    fn drop(&mut self) {
        self.0.state.lock().forcing -= 1;
        self.0.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_held_when_a_task_was_told_it_and_nothing_came_in_between() {
        let known = KnownSize::default();
        known.told(1);
        assert!(known.is_held(1) && !known.is_held(2));
        let fences = known.send_back(2, || ()).unwrap();
        known.told(2);
        assert!(!known.is_held(2), "it may be taken, or not");
        known.came_back(2, fences);
        assert!(known.is_held(2) && known.send_back(2, || ()).is_none());
        let fences = known.send_back(3, || ()).unwrap();
        known.came_back(3, fences + 1);
        assert!(!known.is_held(3), "a fence was in between");
        let fences = known.send_back(3, || known.told(3)).unwrap();
        known.fence(|| known.came_back(3, fences));
        assert!(!known.is_held(3), "a fence is being made");
        let fences = known.send_back(3, || ()).unwrap();
        known.told(4);
        known.came_back(3, fences);
        assert!(!known.is_held(3), "another size was told to somebody else");
        let restored = KnownSize::restored();
        restored.told(1);
        assert!(!restored.is_held(1));
        restored.came_back(1, restored.send_back(1, || ()).unwrap());
        assert!(restored.is_held(1));
        restored.passed();
        assert!(!restored.is_held(1));
    }

    #[test]
    fn what_the_mount_does_itself_is_known() {
        let known = KnownSize::default();
        known.told(1);
        known.grew(5);
        known.grew(3);
        assert!(known.is_held(5));
        known.told(9);
        known.grew(9);
        assert!(known.is_held(9), "attributes that are asked for during a write");
        known.read_ended(9);
        assert!(known.is_held(9));
        known.read_ended(8);
        assert!(!known.is_held(9), "the end may have been met before");
        known.told(3);
        known.set(3, true);
        assert!(known.is_held(3));
        known.told(4);
        known.set(4, false);
        assert!(!known.is_held(4), "it is not taken yet");
    }

    #[test]
    fn answers_that_are_taken_in_any_case_may_be_taken_late() {
        let known = KnownSize::default();
        known.told(3);
        known.set(3, true);
        let begin = Instant::now();
        known.settle(4);
        assert!(begin.elapsed() >= TAKEN_MOSTLY / 2);
        let fences = known.send_back(4, || ()).unwrap();
        known.came_back(4, fences);
        assert!(!known.is_held(4), "the answer with 3 may come after it");
        known.set(4, true);
        known.told(5);
        known.came_back(4, known.send_back(4, || ()).unwrap());
        assert!(!known.is_held(4), "and after this one");
    }

    #[test]
    fn a_fence_waits_for_who_was_sent_back() {
        let known = KnownSize::default();
        known.told(1);
        let fences = known.send_back(2, || ()).unwrap();
        std::thread::scope(|scope| {
            let fence = scope.spawn(|| known.fence(Instant::now));
            let begin = Instant::now();
            known.came_back(2, fences);
            assert!(fence.join().unwrap() >= begin || begin.elapsed() >= AWAITED_MAX);
        });
        known.send_back(3, || ()).unwrap();
        let begin = Instant::now();
        known.fence(|| ());
        assert!(begin.elapsed() >= AWAITED_MAX / 2 && !known.is_held(3), "that task never comes");
    }
}
