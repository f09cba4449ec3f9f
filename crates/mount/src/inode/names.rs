//! An inode keeps here the name that the kernel was told to believe.

use super::Inode;
use crate::inode::stale::Stale;
use crate::takeover::layout::node;
use std::ffi::{CStr, CString};
use std::time::Instant;

/// The name of a file that the kernel was told to believe for long, if any.
#[derive(Default)]
pub(crate) enum Believed {
    /// None.
    #[default]
    Nothing,
    /// This one.
    Name(Name),
    /// One that the kernel is about to drop. Until then no other is believed for long: a successor
    /// knows one name of each file.
    Dropping,
}

/// The state of the kernel's cached name after it has moved or removed the name.
pub(crate) enum Moved {
    /// It was not told to believe that name for long: of this node.
    NotBelieved,
    /// Remembered under its new name, if it has one.
    Remembered,
    /// It must be told to drop it, because it believes it for long and no successor would know of
    /// it.
    Unknown(Name),
}

/// A name that the kernel knows a node by.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Name {
    /// The directory it is in.
    pub parent: u64,
    /// The name in that directory.
    pub name: CString,
}

impl Inode {
    /// The kernel is about to be told to believe this name for long. False: it must not, because no
    /// successor would know of it.
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

    /// The kernel has moved the name, or removed it.
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

    /// The name that the kernel believes for long, which it is about to be told to drop.
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

    /// The name that the kernel believes is another file's now. This is also written down: a task
    /// that has walked by the name may ask a successor for the file.
    pub(crate) fn name_is_stale(&self) {
        *self.stale.lock() = Stale::Believed;
        self.slot.iter().for_each(|slot| slot.set_flag(node::STALE_NAME));
    }

    /// Whether somebody may come to the file by a name that is not the file's any more.
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

    /// The kernel has dropped the name that it was told to drop.
    pub(crate) fn name_dropped(&self) {
        let mut believed = self.name.lock();
        if let Some(slot) = &self.slot {
            slot.record_name(None);
        }
        *believed = Believed::Nothing;
        self.stale.lock().name_dropped();
    }
}
