//! The user as which a worker accesses backing files.
//!
//! With root, the kernel has already checked permissions (`default_permissions`). The worker still
//! has to make new files belong to the caller, and apply the caller's umask and the default ACL. It
//! also has to clear set-uid bits if the backing file system would clear them for that caller. All
//! of these are set for each thread: `unshare(CLONE_FS)` for the umask, raw system calls for the
//! ids, capset for CAP_FSETID. With an ordinary user nothing is switched: everything is done as
//! that user.
//!
//! A worker must never handle the next request as another user. So every switch is a guard.

use crate::filesystem::Passthrough;
use crate::inode::Inode;
use crate::kernel::invalidation::Invalidations;
use crate::system;
use fuse::{Errno, abi};
use rustix::fd::AsFd;
use rustix::fs::{AtFlags, Mode, StatxFlags, statx};
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
    // Without a /proc the whole path is used, once there is a /proc.
    let _ = system::stand_among_descriptors();
    rustix::process::umask(Mode::empty());
    // This needs CAP_SYS_RESOURCE. Without it, reclaim may wait for this daemon under memory
    // pressure, as for any FUSE daemon.
    let _ = system::set_io_flusher();
    if privilege == Privilege::Root {
        system::set_thread_groups(&[])?;
        system::keep_capabilities()?;
        // With this capability, quotas would not apply to writes through the mount.
        let mut sets = rustix::thread::capabilities(None)?;
        sets.effective.remove(CapabilitySet::SYS_RESOURCE);
        rustix::thread::set_capabilities(None, sets)?;
        CAPABILITIES.set(Some(sets));
    }
    Ok(())
}

/// Whether this process, which is root, may set other groups. In some user namespaces it may not
/// (`/proc/self/setgroups`).
pub(crate) fn can_act_as_others() -> bool {
    // In a thread of its own, because the change stays in that thread.
    let thread = std::thread::Builder::new().spawn(|| system::set_thread_groups(&[]));
    thread.is_ok_and(|thread| thread.join().is_ok_and(|set| set.is_ok()))
}

/// The maker of a new file, and its mode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Creator {
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory's set-gid bit says otherwise.
    pub gid: u32,
    /// Bits removed from the mode, unless the directory has a default ACL.
    pub umask: u32,
    /// The directory's group, if the caller is in it.
    pub supplementary_group: Option<u32>,
}

/// While this guard lives, this thread creates files as the creator.
#[must_use]
pub(crate) struct Acting {
    ids: bool,
    groups: bool,
    _fsetid: Option<WithoutFsetid>,
}

impl Acting {
    /// Creates the guard: from now on, new files belong to the creator.
    pub(crate) fn begin(privilege: Privilege, creator: Creator) -> Result<Acting, Errno> {
        rustix::process::umask(Mode::from_bits_truncate(creator.umask & 0o777));
        if creator.uid == abi::INVALID_ID || creator.gid == abi::INVALID_ID {
            return Err(Errno::OVERFLOW); // An id that the mount's user namespace cannot name: it can own nothing.
        }
        if privilege == Privilege::User || (creator.uid == 0 && creator.gid == 0) {
            return Ok(Acting { ids: false, groups: false, _fsetid: None });
        }
        let fsetid = (creator.uid != 0).then(WithoutFsetid::begin).transpose()?;
        let mut acting = Acting { ids: true, groups: false, _fsetid: fsetid };
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
        if self.groups {
            drop_groups();
        }
    }
}

/// The task that a request is made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    /// Its user id.
    pub uid: u32,
    /// Its group id.
    pub gid: u32,
    /// Its thread id; 0 outside of the daemon's pid namespace.
    pub task: u32,
}

/// The kernel's overflow id: a user and a group that own nothing.
pub(crate) const NOBODY: u32 = 65_534;

/// While this guard lives, changes by this thread clear set-user-ID and set-group-ID bits as
/// changes by the caller would. The thread lacks CAP_FSETID. Where set-group-ID bits are concerned,
/// the thread has the caller's groups.
#[must_use]
pub(crate) struct WithoutFsetid {
    before: CapabilitySets,
    groups: bool,
}

impl WithoutFsetid {
    /// A guard for a change of `file`, if the caller's user id says that the caller lacks
    /// CAP_FSETID.
    pub(crate) fn for_caller(
        privilege: Privilege,
        caller: Caller,
        file: impl AsFd,
    ) -> Result<Option<WithoutFsetid>, Errno> {
        WithoutFsetid::if_needed(privilege, caller.uid != 0, caller, file)
    }

    /// A guard for a change of `file` by a caller that lacks CAP_FSETID if `needed`. `None`: the
    /// file has no set-id bit, or the thread has no privilege.
    pub(crate) fn if_needed(
        privilege: Privilege,
        needed: bool,
        caller: Caller,
        file: impl AsFd,
    ) -> Result<Option<WithoutFsetid>, Errno> {
        if privilege == Privilege::User || !needed {
            return Ok(None);
        }
        let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MODE)?;
        let mode = Mode::from_raw_mode(found.stx_mode.into());
        if !mode.intersects(Mode::SUID | Mode::SGID) {
            return Ok(None);
        }
        let mut guard = WithoutFsetid::begin()?;
        if mode.contains(Mode::SGID) {
            system::set_thread_groups(&os::process::groups(caller.task))?;
            guard.groups = true;
            let gid = if caller.gid == abi::INVALID_ID { NOBODY } else { caller.gid };
            system::set_thread_fsgid(gid);
        }
        Ok(Some(guard))
    }

    /// A guard for all that this thread does, as a task without groups.
    pub(crate) fn begin() -> Result<WithoutFsetid, Errno> {
        let before = match CAPABILITIES.get() {
            Some(sets) => sets,
            None => rustix::thread::capabilities(None)?,
        };
        let mut without = before;
        without.effective.remove(CapabilitySet::FSETID);
        rustix::thread::set_capabilities(None, without)?;
        Ok(WithoutFsetid { before, groups: false })
    }
}

impl Drop for WithoutFsetid {
    fn drop(&mut self) {
        // Raising an effective capability that is permitted does not fail. If it did, more bits
        // would fall than should, which is safe.
        let _ = rustix::thread::set_capabilities(None, self.before);
        if self.groups {
            system::set_thread_fsgid(0);
            drop_groups();
        }
    }
}

/// A guard as [`WithoutFsetid`] for a change of one file. When it is dropped, the kernel forgets
/// the file's attributes, so that no task runs a program with bits that are gone.
#[must_use]
pub(crate) struct Clearing<'a> {
    _fsetid: WithoutFsetid,
    invalidations: &'a Invalidations,
    nodeid: u64,
}

impl Drop for Clearing<'_> {
    fn drop(&mut self) {
        self.invalidations.forget_attributes(self.nodeid);
    }
}

impl Passthrough {
    /// A guard for a change of the bytes of `inode`, which is open as `file`, by a caller that
    /// lacks CAP_FSETID if `needed`. `None`: no bit can fall.
    ///
    /// The kernel mostly has had the bits cleared before it sends such a change (see `setattr`). It
    /// has not if it does not know of them, or if they stay.
    pub(crate) fn clearing(
        &self,
        inode: &Inode,
        needed: bool,
        caller: Caller,
        file: impl AsFd,
    ) -> Result<Option<Clearing<'_>>, Errno> {
        let guard = WithoutFsetid::if_needed(self.privilege, needed, caller, file)?;
        let (invalidations, nodeid) = (&self.invalidations, inode.nodeid);
        Ok(guard.map(|_fsetid| Clearing { _fsetid, invalidations, nodeid }))
    }
}

/// Takes the supplementary groups of a caller off this thread.
fn drop_groups() {
    if system::set_thread_groups(&[]).is_err() {
        // It worked when the worker began and needs no resources. Going on with a caller's groups
        // is no option.
        std::process::abort();
    }
}
