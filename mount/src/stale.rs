//! Names that are another file's by now, because somebody changed the directory beside the mount, and who came by them.
//!
//! The kernel is told to drop such a name, but a task that has just walked by it asks for the older file still, even a moment after the drop. By
//! which name a task has come is not told. So each that comes about then is sent back (ESTALE: the kernel looks every name of the path up again), and
//! let in when it comes the next time, to whatever file: then it has come by names that were looked up anew, or by none (/proc/self/fd). But one that
//! has found nothing does not come back then: so whoever is the first to come to a file whose name has gone stale is sent back in any case. (On its
//! way back it cannot be: looking the name up has found that out before.) Tasks outside the daemon's pid namespace are all called 0: of them
//! only those.

use hashbrown::HashMap;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Longest time from a task's looking at a name to its asking for the file that the name led to, once the kernel has dropped the name.
const WALK_MAX: Duration = Duration::from_secs(1);

/// Longest time that a task needs to come back. One that has found nothing, or what it may not open, never does.
const WAY_BACK_MAX: Duration = Duration::from_secs(10);

/// Tasks on their way back; who comes beyond them is let in.
const TASKS_MAX: usize = 4096;

/// What there is to say of the name that a task has come by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Nothing.
    Nothing,
    /// It may be one that has gone stale lately.
    PerhapsStale,
    /// It has just been found stale.
    Stale,
}

/// Whether somebody may come to a file by a name that is not its any more.
#[derive(Default)]
pub(crate) enum Stale {
    /// Nobody.
    #[default]
    No,
    /// The kernel has the name still.
    Believed,
    /// The kernel had it until just now.
    Until(Instant),
}

impl Stale {
    /// The kernel has dropped the name, if there was any.
    pub(crate) fn name_dropped(&mut self, now: Instant) {
        if matches!(self, Stale::Believed) {
            *self = Stale::Until(now + WALK_MAX);
        }
    }

    /// Whether it is so. (The clock is read only if it matters.)
    pub(crate) fn is_possible(&mut self, now: impl FnOnce() -> Instant) -> bool {
        match self {
            Stale::No => false,
            Stale::Believed => true,
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

/// The tasks that were sent back, and when.
#[derive(Default)]
pub(crate) struct SentBack {
    tasks: Mutex<HashMap<u32, Instant>>,
    /// So many, so that nothing is locked when there are none.
    len: AtomicUsize,
}

impl SentBack {
    /// A task comes to a file, whose name has been found stale by that, or lately, or not. Whether it has to go back.
    pub(crate) fn sends_back(&self, task: u32, found: Found, now: impl FnOnce() -> Instant) -> bool {
        if task == 0 || found == Found::Nothing && self.len.load(Ordering::Relaxed) == 0 {
            return found == Found::Stale;
        }
        let now = now();
        let is_on_its_way = |since: Instant| now < since + WAY_BACK_MAX;
        let mut tasks = self.tasks.lock();
        let has_gone_back = tasks.remove(&task).is_some_and(is_on_its_way);
        if tasks.len() >= TASKS_MAX {
            tasks.retain(|_, since| is_on_its_way(*since));
        }
        let sends_back = match found {
            Found::Stale => true,
            Found::PerhapsStale => !has_gone_back && tasks.len() < TASKS_MAX,
            Found::Nothing => false,
        };
        if sends_back && tasks.len() < TASKS_MAX {
            tasks.insert(task, now);
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
        let comes = |task, may_be_stale, at| sent_back.sends_back(task, found(may_be_stale), || now + at);
        assert!(!comes(1, false, Duration::ZERO));
        assert!(comes(1, true, Duration::ZERO) && comes(2, true, Duration::ZERO));
        assert!(!comes(1, true, WALK_MAX) && comes(1, true, WALK_MAX), "once");
        assert!(!comes(2, false, WALK_MAX) && comes(2, true, WALK_MAX), "to whatever file");
        assert!(comes(2, true, WALK_MAX + WAY_BACK_MAX), "that was too long ago");
        assert!(sent_back.sends_back(2, Found::Stale, || now), "it has not come back, but gone elsewhere");
        assert!(!comes(2, true, Duration::ZERO));
        let comes_from_elsewhere = |found| sent_back.sends_back(0, found, || now);
        assert!(comes_from_elsewhere(Found::Stale) && !comes_from_elsewhere(Found::PerhapsStale));
    }

    #[test]
    fn tasks_are_bounded() {
        let sent_back = SentBack::default();
        let now = Instant::now();
        let tasks = || 0..2 * TASKS_MAX as u32;
        assert_eq!(tasks().filter(|task| sent_back.sends_back(*task, Found::PerhapsStale, || now)).count(), TASKS_MAX);
        let later = now + WAY_BACK_MAX;
        assert!(sent_back.sends_back(u32::MAX, Found::PerhapsStale, || later), "those that never came back make room");
        assert_eq!(sent_back.len.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_dropped_name_matters_for_a_while() {
        let now = Instant::now();
        let mut stale = Stale::default();
        stale.name_dropped(now);
        assert!(!stale.is_possible(|| now), "a name that was no other file's");
        stale = Stale::Believed;
        assert!(stale.is_possible(|| now + WALK_MAX));
        stale.name_dropped(now);
        assert!(stale.is_possible(|| now) && !stale.is_possible(|| now + WALK_MAX));
        assert!(matches!(stale, Stale::No));
    }
}
