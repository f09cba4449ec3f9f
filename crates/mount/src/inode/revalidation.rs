//! Stale names: names that belong to another file because of an external change of the directory;
//! and the tasks that have used them.
//!
//! The kernel is told to drop such a name. But a task that has just used it still sends its request
//! for the older file, even a moment after the drop. The request does not show the name that the
//! task used. So for a second after the file was looked up again, each task that sends a request
//! for it gets ESTALE: the kernel then looks up every name of the path again. The next request of
//! that task is accepted, for whatever file: the task has used names that were looked up again, or
//! none (/proc/self/fd).
//!
//! But a task whose second lookup finds nothing does not come back. So the first task that requests
//! a file with a stale name gets ESTALE in any case. The exception is a file that the task has just
//! looked up after an ESTALE: then the name was replaced again, and the kernel does not retry
//! twice. Tasks outside the daemon's pid namespace all have the id 0: of these only the first one
//! gets ESTALE.
//!
//! A stale name is recorded for a successor, which then treats the name as dropped. Otherwise an
//! OPEN that waited in the kernel's queue during a takeover would open the older file. Tasks that
//! got ESTALE are not recorded.

use hashbrown::HashMap;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Longest time from a task's use of a name to its request for the file, after the kernel has
/// dropped the name.
const WALK_MAX: Duration = Duration::from_secs(1);

/// Longest time until a task comes back after ESTALE. A task that finds nothing, or a file that it
/// may not open, never comes back.
const REVALIDATION_MAX: Duration = Duration::from_secs(10);

/// Longest time from the last lookup after ESTALE to the request for the file.
const LAST_STEP_MAX: Duration = Duration::from_millis(100);

/// Limit on the tasks that got ESTALE and have not come back. Beyond it, requests are accepted.
const TASKS_MAX: usize = 4096;

/// The state of the name that a task has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The name is good.
    Nothing,
    /// The name may have become stale recently.
    PerhapsStale,
    /// The name was just found to be stale.
    Stale,
}

/// Whether this inode may still be reached through a stale name (dentry).
#[derive(Default)]
pub(crate) enum Stale {
    /// No task can use a stale name.
    #[default]
    No,
    /// The kernel still has the stale name.
    Believed,
    /// The kernel has dropped the name, and has not looked the file up since. So a task that uses a
    /// name has read it before that. Or a rename has moved the name, and the kernel caches it under
    /// another one (see `ops/names.rs`).
    Dropped,
    /// The kernel had the stale name until this time.
    Until(Instant),
}

impl Stale {
    /// Records that the kernel has dropped the name, if there was one.
    pub(crate) fn name_dropped(&mut self) {
        if matches!(self, Stale::Believed) {
            *self = Stale::Dropped;
        }
    }

    /// Records that the kernel gets a current name of the file.
    pub(crate) fn looked_up(&mut self, now: impl FnOnce() -> Instant) {
        if matches!(self, Stale::Dropped) {
            *self = Stale::Until(now() + WALK_MAX);
        }
    }

    /// Whether a stale name may still be in use. (The clock is read only if it matters.)
    pub(crate) fn is_possible(&mut self, now: impl FnOnce() -> Instant) -> bool {
        match self {
            Stale::No => false,
            Stale::Believed | Stale::Dropped => true,
            Stale::Until(until) => {
                let is_over = *until <= now();
                if is_over {
                    *self = Stale::No;
                }
                !is_over
            }
        }
    }
}

/// A task that got ESTALE.
struct Revalidation {
    since: Instant,
    /// The node that it has looked up last since then, with the time.
    found: Option<(u64, Instant)>,
}

/// The tasks that got ESTALE and have not come back.
#[derive(Default)]
pub(crate) struct Revalidations {
    tasks: Mutex<HashMap<u32, Revalidation>>,
    /// Number of these tasks, so that nothing is locked if there are none.
    len: AtomicUsize,
}

impl Revalidations {
    /// Records that a task has looked up a name of this node. `None`: there is no such name. (The
    /// task may still come back, to link a file to that name.)
    pub(crate) fn looked_up(&self, task: u32, node: Option<u64>, now: impl FnOnce() -> Instant) {
        if task == 0 || self.len.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Some(revalidation) = self.tasks.lock().get_mut(&task) {
            revalidation.found = node.map(|node| (node, now()));
        }
    }

    /// Whether a task that accesses a node must look up its name again (ESTALE). `found` is the
    /// state of the name.
    pub(crate) fn must_revalidate(&self, task: u32, node: u64, found: Found, now: impl FnOnce() -> Instant) -> bool {
        if task == 0 || found == Found::Nothing && self.len.load(Ordering::Relaxed) == 0 {
            return found == Found::Stale;
        }
        let now = now();
        let is_pending = |revalidation: &Revalidation| now < revalidation.since + REVALIDATION_MAX;
        let mut tasks = self.tasks.lock();
        let revalidation = tasks.remove(&task).filter(is_pending);
        if tasks.len() >= TASKS_MAX {
            tasks.retain(|_, revalidation| is_pending(revalidation));
        }
        let has_looked_it_up = || {
            let found = revalidation.as_ref().and_then(|revalidation| revalidation.found);
            found.is_some_and(|(looked_up, at)| looked_up == node && now < at + LAST_STEP_MAX)
        };
        let must_revalidate = match found {
            Found::Stale => !has_looked_it_up(),
            Found::PerhapsStale => revalidation.is_none() && tasks.len() < TASKS_MAX,
            Found::Nothing => false,
        };
        if must_revalidate && tasks.len() < TASKS_MAX {
            tasks.insert(task, Revalidation { since: now, found: None });
        }
        self.len.store(tasks.len(), Ordering::Relaxed);
        must_revalidate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_that_comes_back_is_accepted() {
        let revalidations = Revalidations::default();
        let now = Instant::now();
        let found = |may_be_stale| if may_be_stale { Found::PerhapsStale } else { Found::Nothing };
        let comes = |task, may_be_stale, at| revalidations.must_revalidate(task, 7, found(may_be_stale), || now + at);
        assert!(!comes(1, false, Duration::ZERO));
        assert!(comes(1, true, Duration::ZERO) && comes(2, true, Duration::ZERO));
        assert!(!comes(1, true, WALK_MAX) && comes(1, true, WALK_MAX), "once");
        assert!(!comes(2, false, WALK_MAX) && comes(2, true, WALK_MAX), "to whatever file");
        assert!(comes(2, true, WALK_MAX + REVALIDATION_MAX), "that was too long ago");
        assert!(revalidations.must_revalidate(2, 7, Found::Stale, || now), "it has not come back, but gone elsewhere");
        assert!(!comes(2, true, Duration::ZERO));
        let comes_from_elsewhere = |found| revalidations.must_revalidate(0, 7, found, || now);
        assert!(comes_from_elsewhere(Found::Stale) && !comes_from_elsewhere(Found::PerhapsStale));
    }

    #[test]
    fn a_task_that_looked_the_file_up_again_is_accepted() {
        let revalidations = Revalidations::default();
        let now = Instant::now();
        let comes = |task, node, at| revalidations.must_revalidate(task, node, Found::Stale, || now + at);
        let finds = |task, node| revalidations.looked_up(task, node, || now);
        finds(1, Some(8));
        assert!(comes(1, 8, Duration::ZERO), "it was not sent back before that");
        finds(1, Some(7));
        finds(1, Some(8));
        finds(2, Some(7));
        assert!(!comes(1, 8, Duration::ZERO) && comes(1, 8, Duration::ZERO), "once");
        finds(1, Some(8));
        assert!(comes(1, 9, Duration::ZERO) && comes(1, 8, Duration::ZERO), "it has gone elsewhere");
        finds(1, Some(8));
        assert!(comes(1, 8, LAST_STEP_MAX), "it has come back, and comes by the name once more");
        finds(1, Some(8));
        finds(1, None);
        assert!(comes(1, 8, Duration::ZERO), "it has found nothing in the end");
        finds(1, None);
        assert!(
            !revalidations.must_revalidate(1, 8, Found::PerhapsStale, || now),
            "it has looked up the name that is to be made"
        );
        finds(0, Some(8));
        assert!(comes(0, 8, Duration::ZERO));
    }

    #[test]
    fn tasks_are_bounded() {
        let revalidations = Revalidations::default();
        let now = Instant::now();
        let tasks = || 0..2 * TASKS_MAX as u32;
        assert_eq!(
            tasks().filter(|task| revalidations.must_revalidate(*task, 7, Found::PerhapsStale, || now)).count(),
            TASKS_MAX
        );
        let later = now + REVALIDATION_MAX;
        assert!(
            revalidations.must_revalidate(u32::MAX, 7, Found::PerhapsStale, || later),
            "those that never came back make room"
        );
        assert_eq!(revalidations.len.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_dropped_name_matters_for_a_while() {
        let now = Instant::now();
        let mut stale = Stale::default();
        stale.name_dropped();
        stale.looked_up(|| now);
        assert!(!stale.is_possible(|| now), "a name that was no other file's");
        stale = Stale::Believed;
        stale.looked_up(|| now);
        assert!(stale.is_possible(|| now + WALK_MAX));
        stale.name_dropped();
        assert!(stale.is_possible(|| now + WALK_MAX), "by which name else");
        stale.looked_up(|| now);
        assert!(stale.is_possible(|| now) && !stale.is_possible(|| now + WALK_MAX));
        assert!(matches!(stale, Stale::No));
    }
}
