//! Processes that look at what they list.
//!
//! Reading the beginning of a directory the kernel asks for the attributes of all entries, too
//! (READDIRPLUS). For `ls -l`, `find -size` or `git status` that is the fast way; but for whoever
//! wants names only, a lookup of each entry costs many times what the listing does. The kernel
//! cannot know. We can: who lists is given names only at first; if the same task then looks one of
//! them up, it is a *looker*, whose listings come with attributes from then on. What was not given
//! the kernel asks for itself, so being wrong costs time only.
//!
//! A looker is put to the test again now and then, because what we give it is never asked for.
//! Further on in a directory the kernel asks for attributes only if entries of it were looked up,
//! and gets them.

use parking_lot::Mutex;

/// Tasks remembered, each at the place that its number says; another one with that place drives it
/// out.
const TASKS: usize = 64;

/// Beginnings of directories that a looker is given with attributes before it is put to the test
/// again.
const LISTINGS_MAX: u32 = 64;

#[derive(Clone, Copy, Default)]
struct Task {
    id: u32,
    /// The directory whose names it was given last.
    directory: u64,
    /// How often it is still given attributes.
    listings: u32,
}

/// The tasks that have listed lately.
pub(crate) struct Lookers {
    tasks: Mutex<[Task; TASKS]>,
}

impl Default for Lookers {
    fn default() -> Lookers {
        Lookers { tasks: Mutex::new([Task::default(); TASKS]) }
    }
}

impl Lookers {
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
    fn who_looks_up_is_given_attributes() {
        let lookers = Lookers::default();
        assert!(!lookers.lists(ID, 1, 0));
        assert!(!lookers.lists(ID, 2, 0));
        lookers.looks_up(ID, 1); // Not what it listed last.
        lookers.looks_up(ID + 1, 2); // Not who listed it.
        assert!(!lookers.lists(ID, 2, 0));
        lookers.looks_up(ID, 2);
        assert!(lookers.lists(ID, 3, 0));
        assert!(!lookers.lists(ID + 1, 3, 0));
        assert!(lookers.lists(ID + 1, 3, 100), "the kernel knows");
    }

    #[test]
    fn a_looker_is_put_to_the_test_again() {
        let lookers = Lookers::default();
        lookers.lists(ID, 1, 0);
        lookers.looks_up(ID, 1);
        assert_eq!((0..100).filter(|directory| lookers.lists(ID, *directory, 0)).count() as u32, LISTINGS_MAX);
        lookers.looks_up(ID, 99);
        assert!(lookers.lists(ID, 1, 0));
        assert!(!lookers.lists(ID + TASKS as u32, 1, 0), "another task in its place");
        assert!(!lookers.lists(ID, 2, 0));
    }
}
