//! The name of an inode that the kernel may cache.

use super::Inode;
use crate::inode::revalidation::Stale;
use crate::takeover::layout::node;
use std::ffi::{CStr, CString};
use std::time::Instant;

/// The name of a file that the kernel may cache for long, if there is one.
#[derive(Default)]
pub(crate) enum Believed {
    /// No such name.
    #[default]
    Nothing,
    /// This name.
    Name(Name),
    /// A name that the kernel is about to drop. Until then the kernel may cache no other name for
    /// long, because a successor knows only one name of each file.
    Dropping,
}

/// The state of the kernel's cached name after it has moved or removed the name.
pub(crate) enum Moved {
    /// The kernel may not cache this name of the node for long.
    NotBelieved,
    /// The new name is recorded, if there is one.
    Remembered,
    /// The kernel must drop the name, because it may cache it for long and no successor would know
    /// the name.
    Unknown(Name),
}

/// A name of a node.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Name {
    /// The node of its directory.
    pub parent: u64,
    /// The name in that directory.
    pub name: CString,
}

impl Inode {
    /// Records the name before the kernel may cache it for long. Returns false if the kernel must
    /// not, because no successor would know the name.
    pub(crate) fn remember_name(&self, parent: u64, name: &CStr) -> bool {
        let mut believed = self.name.lock();
        match &*believed {
            Believed::Name(known) => known.parent == parent && *known.name == *name,
            Believed::Dropping => false,
            Believed::Nothing => {
                let is_recorded = self.slot.as_ref().is_some_and(|slot| slot.record_name(Some((parent, name))));
                if is_recorded {
                    *believed = Believed::Name(Name { parent, name: name.to_owned() });
                }
                is_recorded
            }
        }
    }

    /// Records that the kernel has moved or removed the name.
    pub(crate) fn name_moved(&self, from: (u64, &CStr), to: Option<(u64, &CStr)>) -> Moved {
        let mut believed = self.name.lock();
        if !matches!(&*believed, Believed::Name(known) if known.parent == from.0 && *known.name == *from.1) {
            return Moved::NotBelieved;
        }
        let is_recorded = self.slot.as_ref().is_some_and(|slot| slot.record_name(to));
        let name = to.map(|(parent, name)| Name { parent, name: name.to_owned() });
        let (now, moved) = match name {
            None => (Believed::Nothing, Moved::Remembered),
            Some(name) if is_recorded => (Believed::Name(name), Moved::Remembered),
            Some(name) => (Believed::Dropping, Moved::Unknown(name)),
        };
        *believed = now;
        moved
    }

    /// Returns the name that the kernel may cache for long, before the kernel is told to drop it.
    pub(crate) fn name_to_drop(&self) -> Option<Name> {
        let mut believed = self.name.lock();
        match std::mem::replace(&mut *believed, Believed::Dropping) {
            Believed::Name(name) => Some(name),
            other => {
                *believed = other;
                None
            }
        }
    }

    /// Records that the cached name belongs to another file now. This is also recorded for a
    /// successor, because a task that has used the name may send its request to the successor.
    pub(crate) fn name_is_stale(&self) {
        *self.stale.lock() = Stale::Believed;
        self.slot.iter().for_each(|slot| slot.set_flag(node::STALE_NAME));
    }

    /// Whether this inode may still be reached through a stale dentry.
    pub(crate) fn may_be_stale(&self) -> bool {
        let mut stale = self.stale.lock();
        if matches!(*stale, Stale::No) {
            return false;
        }
        let is_possible = stale.is_possible(Instant::now);
        if !is_possible {
            self.slot.iter().for_each(|slot| slot.clear_flag(node::STALE_NAME));
        }
        is_possible
    }

    /// Records that the kernel has dropped the name.
    pub(crate) fn name_dropped(&self) {
        let mut believed = self.name.lock();
        if let Some(slot) = &self.slot {
            slot.record_name(None);
        }
        *believed = Believed::Nothing;
        self.stale.lock().name_dropped();
    }
}
