//! Names that are another file's by now, because somebody changed the directory beside the mount,
//! and who came by them.
//!
//! The kernel is told to drop such a name, but a task that has just walked by it asks for the older
//! file still, even a moment after the drop. By which name a task has come is not told. So each
//! that comes then, until a second after the file was looked up again, is sent back (ESTALE: the
//! kernel looks every name of the path up again), and let in when it comes the next time, to
//! whatever file: then it has come by names that were looked up anew, or by none (/proc/self/fd).
//! But one that has found nothing does not come back then: so whoever is the first to come to a
//! file whose name has gone stale is sent back in any case, unless that file is what it has just
//! looked up on its way back: then the name was replaced again since, and the kernel sends nobody
//! back twice. Tasks outside the daemon's pid namespace are all called 0: of them only the first to
//! come is sent back.
//!
//! That a name has gone stale is written down for a successor of this daemon, which then takes the
//! name for dropped. A task's OPEN may have waited in the kernel's queue while one daemon has left
//! and the next has not begun; it would be let in to the older file. Callers that were sent back
//! are not written down.

use hashbrown::HashMap;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Longest time from a task's looking at a name to its asking for the file that the name led to,
/// once the kernel has dropped the name.
const WALK_MAX: Duration = Duration::from_secs(1);

/// Longest time that a task needs to come back. One that has found nothing, or what it may not
/// open, never does.
const WAY_BACK_MAX: Duration = Duration::from_secs(10);

/// Longest time from the end of a way back, which is to look up the file, to its being asked for.
const LAST_STEP_MAX: Duration = Duration::from_millis(100);

/// Tasks on their way back; who comes beyond them is let in.
const TASKS_MAX: usize = 4096;

/// The state of the name that a task has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing.
    Nothing,
    /// It may be one that has gone stale lately.
    PerhapsStale,
    /// It has just been found stale.
    Stale,
}

/// Whether this inode may still be reached through a stale name (dentry).
#[derive(Default)]
pub(crate) enum Stale {
    /// No task can use a stale name.
    #[default]
    No,
    /// The kernel has the name still.
    Believed,
    /// The kernel has dropped it, and has not looked the file up since. So whoever comes by a name
    /// has looked at it before that; or a rename has taken the name along, and the kernel believes
    /// it under another one (see `ops/names.rs`).
    Dropped,
    /// The kernel had it until just now.
    Until(Instant),
}

impl Stale {
    /// The kernel has dropped the name, if there was any.
    pub(crate) fn name_dropped(&mut self) {
        if matches!(self, Stale::Believed) {
            *self = Stale::Dropped;
        }
    }

    /// The kernel is told of a name that is the file's.
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

/// A task that was sent back.
struct Way {
    since: Instant,
    /// The node that it has looked up last since then, and when.
    found: Option<(u64, Instant)>,
}

/// The tasks that were sent back.
#[derive(Default)]
pub(crate) struct SentBack {
    tasks: Mutex<HashMap<u32, Way>>,
    /// Number of these tasks, so that nothing is locked if there are none.
    len: AtomicUsize,
}

impl SentBack {
    /// A task has looked up a name, of that node. None: there is no such name. (It may be on its
    /// way all the same: to link a file to that name.)
    pub(crate) fn looked_up(&self, task: u32, node: Option<u64>, now: impl FnOnce() -> Instant) {
        if task == 0 || self.len.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Some(way) = self.tasks.lock().get_mut(&task) {
            way.found = node.map(|node| (node, now()));
        }
    }

    /// Whether a task that accesses a node must look up its name again (ESTALE). `found` is the
    /// state of the name.
    pub(crate) fn sends_back(&self, task: u32, node: u64, found: Found, now: impl FnOnce() -> Instant) -> bool {
        if task == 0 || found == Found::Nothing && self.len.load(Ordering::Relaxed) == 0 {
            return found == Found::Stale;
        }
        let now = now();
        let is_on_its_way = |way: &Way| now < way.since + WAY_BACK_MAX;
        let mut tasks = self.tasks.lock();
        let way = tasks.remove(&task).filter(is_on_its_way);
        if tasks.len() >= TASKS_MAX {
            tasks.retain(|_, way| is_on_its_way(way));
        }
        let has_found_it = || {
            let found = way.as_ref().and_then(|way| way.found);
            found.is_some_and(|(looked_up, at)| looked_up == node && now < at + LAST_STEP_MAX)
        };
        let sends_back = match found {
            Found::Stale => !has_found_it(),
            Found::PerhapsStale => way.is_none() && tasks.len() < TASKS_MAX,
            Found::Nothing => false,
        };
        if sends_back && tasks.len() < TASKS_MAX {
            tasks.insert(task, Way { since: now, found: None });
        }
        self.len.store(tasks.len(), Ordering::Relaxed);
        sends_back
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_back_is_let_in() {
        let sent_back = SentBack::default();
        let now = Instant::now();
        let found = |may_be_stale| if may_be_stale { Found::PerhapsStale } else { Found::Nothing };
        let comes = |task, may_be_stale, at| sent_back.sends_back(task, 7, found(may_be_stale), || now + at);
        assert!(!comes(1, false, Duration::ZERO));
        assert!(comes(1, true, Duration::ZERO) && comes(2, true, Duration::ZERO));
        assert!(!comes(1, true, WALK_MAX) && comes(1, true, WALK_MAX), "once");
        assert!(!comes(2, false, WALK_MAX) && comes(2, true, WALK_MAX), "to whatever file");
        assert!(comes(2, true, WALK_MAX + WAY_BACK_MAX), "that was too long ago");
        assert!(sent_back.sends_back(2, 7, Found::Stale, || now), "it has not come back, but gone elsewhere");
        assert!(!comes(2, true, Duration::ZERO));
        let comes_from_elsewhere = |found| sent_back.sends_back(0, 7, found, || now);
        assert!(comes_from_elsewhere(Found::Stale) && !comes_from_elsewhere(Found::PerhapsStale));
    }

    #[test]
    fn who_has_looked_a_file_up_on_its_way_back_is_let_in() {
        let sent_back = SentBack::default();
        let now = Instant::now();
        let comes = |task, node, at| sent_back.sends_back(task, node, Found::Stale, || now + at);
        let finds = |task, node| sent_back.looked_up(task, node, || now);
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
            !sent_back.sends_back(1, 8, Found::PerhapsStale, || now),
            "it has looked up the name that is to be made"
        );
        finds(0, Some(8));
        assert!(comes(0, 8, Duration::ZERO));
    }

    #[test]
    fn tasks_are_bounded() {
        let sent_back = SentBack::default();
        let now = Instant::now();
        let tasks = || 0..2 * TASKS_MAX as u32;
        assert_eq!(
            tasks().filter(|task| sent_back.sends_back(*task, 7, Found::PerhapsStale, || now)).count(),
            TASKS_MAX
        );
        let later = now + WAY_BACK_MAX;
        assert!(
            sent_back.sends_back(u32::MAX, 7, Found::PerhapsStale, || later),
            "those that never came back make room"
        );
        assert_eq!(sent_back.len.load(Ordering::Relaxed), 1);
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
