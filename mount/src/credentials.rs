//! As whom a worker acts below.
//!
//! As root, the kernel has checked permissions already (`default_permissions`); what remains is that new files belong to the
//! caller, honour its umask and the default ACL, and that set-uid bits fall when the file system below would let them fall for
//! that caller. All of it is per thread: `unshare(CLONE_FS)` for the umask, raw system calls for the ids, capset for CAP_FSETID.
//! As an ordinary user there is nothing to switch: everything is done as that user.
//!
//! What must never happen: a worker that goes on to the next request as somebody else. So every switch is a guard.

use crate::system;
use fuse::Errno;
use rustix::fs::Mode;
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::cell::Cell;

/// Whether the daemon may act as others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Privilege {
    /// Root: acts as the caller where that matters.
    Root,
    /// An ordinary user: acts as itself.
    User,
}

thread_local! {
    static CAPABILITIES: Cell<Option<CapabilitySets>> = const { Cell::new(None) };
}

/// Prepares this thread for serving requests.
pub(crate) fn prepare_thread(privilege: Privilege) -> Result<(), Errno> {
    system::unshare_fs()?;
    rustix::process::umask(Mode::empty());
    // Allowed with CAP_SYS_RESOURCE only. Without, reclaim may wait for us under memory pressure, as for any FUSE daemon.
    let _ = system::set_io_flusher();
    if privilege == Privilege::Root {
        system::set_thread_groups(&[])?;
        system::keep_capabilities()?;
        // With this capability, quotas would not hold for anybody whose writes come by us.
        let mut sets = rustix::thread::capabilities(None)?;
        sets.effective.remove(CapabilitySet::SYS_RESOURCE);
        rustix::thread::set_capabilities(None, sets)?;
        CAPABILITIES.set(Some(sets));
    }
    Ok(())
}

/// Whether this process, which is root, may take on others' groups: not where a user namespace has none (`/proc/self/setgroups`).
pub(crate) fn can_act_as_others() -> bool {
    // In a thread of its own, which has no other work to do as nobody in particular.
    let thread = std::thread::Builder::new().spawn(|| system::set_thread_groups(&[]));
    thread.is_ok_and(|thread| thread.join().is_ok_and(|set| set.is_ok()))
}

/// Who makes a new file, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Creator {
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory's set-gid bit says otherwise.
    pub gid: u32,
    /// Taken from the mode, unless the directory has a default ACL.
    pub umask: u32,
    /// The directory's group, if the caller is in it.
    pub supplementary_group: Option<u32>,
}

/// While it lives, this thread creates files as somebody.
#[must_use]
pub(crate) struct Acting {
    ids: bool,
    groups: bool,
    _fsetid: Option<WithoutFsetid>,
}

impl Acting {
    /// From now on, new files are the creator's.
    pub(crate) fn begin(privilege: Privilege, creator: Creator) -> Result<Acting, Errno> {
        rustix::process::umask(Mode::from_bits_truncate(creator.umask & 0o777));
        if creator.uid == u32::MAX || creator.gid == u32::MAX {
            return Err(Errno::OVERFLOW); // An id that the mount's user namespace cannot name: it can own nothing.
        }
        if privilege == Privilege::User || (creator.uid == 0 && creator.gid == 0) {
            return Ok(Acting { ids: false, groups: false, _fsetid: None });
        }
        let mut acting = Acting { ids: true, groups: false, _fsetid: WithoutFsetid::for_uid(privilege, creator.uid)? };
        if let Some(group) = creator.supplementary_group {
            system::set_thread_groups(&[group])?;
            acting.groups = true;
        }
        system::set_thread_fsgid(creator.gid);
        system::set_thread_fsuid(creator.uid);
        Ok(acting)
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        if self.ids {
            system::set_thread_fsuid(0);
            system::set_thread_fsgid(0);
        }
        if self.groups && system::set_thread_groups(&[]).is_err() {
            // It worked when the worker began and needs no resources. Going on with a caller's group is no option.
            std::process::abort();
        }
    }
}

/// While it lives, set-uid and set-gid bits fall by what this thread does as they would for an ordinary user.
#[must_use]
pub(crate) struct WithoutFsetid {
    before: CapabilitySets,
}

impl WithoutFsetid {
    /// For a caller that lacks CAP_FSETID, as far as its uid tells.
    pub(crate) fn for_uid(privilege: Privilege, uid: u32) -> Result<Option<WithoutFsetid>, Errno> {
        WithoutFsetid::if_needed(privilege, uid != 0)
    }

    /// If `needed`, and if this thread is privileged at all.
    pub(crate) fn if_needed(privilege: Privilege, needed: bool) -> Result<Option<WithoutFsetid>, Errno> {
        if privilege == Privilege::User || !needed {
            return Ok(None);
        }
        let before = match CAPABILITIES.get() {
            Some(sets) => sets,
            None => rustix::thread::capabilities(None)?,
        };
        let mut without = before;
        without.effective.remove(CapabilitySet::FSETID);
        rustix::thread::set_capabilities(None, without)?;
        Ok(Some(WithoutFsetid { before }))
    }
}

impl Drop for WithoutFsetid {
    fn drop(&mut self) {
        // Raising an effective capability that is permitted does not fail; should it, bits fall too often, which is safe.
        let _ = rustix::thread::set_capabilities(None, self.before);
    }
}
