//! Processes that use the attributes of the entries that they list.
//!
//! At the beginning of a directory, the kernel also requests the attributes of all entries
//! (READDIRPLUS). This is fast for `ls -l`, `find -size` or `git status`. For a task that needs
//! only names, a lookup of each entry costs many times as much as the listing. So a listing has
//! names only at first. If the same task then looks up one of them, it gets a *hint*, and its
//! listings have attributes from then on. The kernel requests missing attributes itself, so a wrong
//! guess costs only time.
//!
//! A task with a hint is tested again from time to time, because the kernel never requests
//! attributes that it got with a listing. Later in a directory, the kernel requests attributes only
//! if entries of it were looked up, and gets them.

use parking_lot::Mutex;

/// Number of tasks that are remembered. The thread id determines the slot, and a newer task
/// replaces the older one.
const TASKS: usize = 64;

/// Number of directories that a task with a hint gets with attributes before it is tested again.
const LISTINGS_MAX: u32 = 64;

#[derive(Clone, Copy, Default)]
struct Task {
    id: u32,
    /// The directory that the task listed last without attributes.
    directory: u64,
    /// Number of listings that still come with attributes.
    listings: u32,
}

/// The tasks that have listed directories recently.
pub(crate) struct ReaddirplusHints {
    tasks: Mutex<[Task; TASKS]>,
}

impl Default for ReaddirplusHints {
    fn default() -> ReaddirplusHints {
        ReaddirplusHints { tasks: Mutex::new([Task::default(); TASKS]) }
    }
}

impl ReaddirplusHints {
    /// The task reads the directory from that offset on. Does it want attributes?
    pub(crate) fn lists(&self, id: u32, directory: u64, offset: u64) -> bool {
        if offset != 0 {
            return true;
        }
        let task = &mut self.tasks.lock()[id as usize % TASKS];
        if task.id == id && task.listings > 0 {
            task.listings -= 1;
            return true;
        }
        *task = Task { id, directory, listings: 0 };
        false
    }

    /// The task looks up a name in that directory.
    pub(crate) fn looks_up(&self, id: u32, directory: u64) {
        let task = &mut self.tasks.lock()[id as usize % TASKS];
        if task.id == id && task.directory == directory {
            task.listings = LISTINGS_MAX;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: u32 = 7;

    #[test]
    fn a_task_that_looks_up_gets_attributes() {
        let readdirplus_hints = ReaddirplusHints::default();
        assert!(!readdirplus_hints.lists(ID, 1, 0));
        assert!(!readdirplus_hints.lists(ID, 2, 0));
        readdirplus_hints.looks_up(ID, 1); // Not what it listed last.
        readdirplus_hints.looks_up(ID + 1, 2); // Not who listed it.
        assert!(!readdirplus_hints.lists(ID, 2, 0));
        readdirplus_hints.looks_up(ID, 2);
        assert!(readdirplus_hints.lists(ID, 3, 0));
        assert!(!readdirplus_hints.lists(ID + 1, 3, 0));
        assert!(readdirplus_hints.lists(ID + 1, 3, 100), "the kernel knows");
    }

    #[test]
    fn a_task_with_a_hint_is_tested_again() {
        let readdirplus_hints = ReaddirplusHints::default();
        readdirplus_hints.lists(ID, 1, 0);
        readdirplus_hints.looks_up(ID, 1);
        assert_eq!(
            (0..100).filter(|directory| readdirplus_hints.lists(ID, *directory, 0)).count() as u32,
            LISTINGS_MAX
        );
        readdirplus_hints.looks_up(ID, 99);
        assert!(readdirplus_hints.lists(ID, 1, 0));
        assert!(!readdirplus_hints.lists(ID + TASKS as u32, 1, 0), "another task in its place");
        assert!(!readdirplus_hints.lists(ID, 2, 0));
    }
}
