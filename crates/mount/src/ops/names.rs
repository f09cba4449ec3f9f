//! Operations on names: finding, making, moving and removing them.
//!
//! Each answer with a node counts a lookup. Files are created as the caller ([`Acting`]). They are
//! moved and removed as the daemon's user, because the kernel has checked permissions. Removing or
//! replacing a name of a file changes its change time, so the change is announced to the borrower.
//!
//! None of these operations can be repeated, so each records an intent (see `takeover/replay.rs`).
//! An operation that a dead daemon has begun counts as done if the names show it: the removed or
//! moved file no longer has its name, or the new file exists.

use crate::filesystem::Passthrough;
use crate::inode::descriptors::Taken;
use crate::inode::link_count::Losing;
use crate::inode::opened::Opened;
use crate::inode::revalidation;
use crate::inode::{Believed, Found, Inode, Moved, Name, STATX_MASK, device_of, stat};
use crate::ops::credentials::{Acting, Creator, Privilege};
use crate::system::ProcPath;
use crate::takeover::replay::Attempt;
use fuse::{Errno, abi};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, openat, statx};
use std::ffi::CStr;
use std::sync::Arc;
use std::time::Instant;

/// Longest target of a symbolic link, as everywhere in Linux.
const TARGET_BYTES_MAX: usize = 4096;

/// The file that a rename moves or replaces.
struct Subject {
    /// Whether the backing directory has this file.
    was_found: bool,
    /// Its node, if the kernel knows it, and a descriptor that holds the file.
    known: Option<(Arc<Inode>, OwnedFd)>,
}

impl Passthrough {
    /// Opens a name with O_PATH, and determines the file's identity.
    fn find(&self, parent: impl AsFd, name: &CStr) -> Result<Found, Errno> {
        if matches!(name.to_bytes(), b"" | b"." | b"..") || name.to_bytes().contains(&b'/') {
            return Err(Errno::INVAL); // The kernel never asks for these: we do not offer EXPORT_SUPPORT.
        }
        self.found(self.crossing.open_path(parent, name)?)
    }

    fn found(&self, fd: OwnedFd) -> Result<Found, Errno> {
        // This mount may be mounted within itself. DONT_SYNC detects that without a request to this
        // daemon.
        let now = statx(&fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, STATX_MASK)?;
        if device_of(&now) == self.own_device {
            return Err(Errno::LOOP);
        }
        self.crossing.check(&fd, &now, self.inodes.devices())?;
        Ok(Found::new(fd, now))
    }

    /// The answer for a file that was found, with one more lookup.
    fn enter(&self, found: Found, name: Option<(&Inode, &CStr)>) -> Result<(abi::EntryOut, Arc<Inode>), Errno> {
        if self.inodes.known(&found).is_none() {
            self.make_room();
        }
        let inode = self.inodes.reference(found)?;
        inode.stale.lock().looked_up(Instant::now);
        // Stat again, now that the borrower's state of the file can be locked.
        let now = self.inodes.anchor(&inode).and_then(|anchor| self.stat_observed(&inode, &anchor));
        match now {
            Ok(now) => {
                let long = self.is_believed_for_long(&inode, &now)
                    && name.is_some_and(|(parent, name)| inode.remember_name(parent.nodeid, name));
                if !long {
                    // The file was renamed externally: the kernel drops its old name.
                    // Requests by the old name would be refused.
                    self.drop_stale_names(&inode);
                }
                let mut entry = self.entry_out(&inode, &now, long);
                self.before_entry(&inode, &now, &mut entry);
                Ok((entry, inode))
            }
            Err(errno) => {
                self.forget(inode.nodeid, 1);
                Err(errno)
            }
        }
    }

    pub(crate) fn lookup(&self, parent: u64, name: &CStr, task: u32) -> Result<abi::EntryOut, Errno> {
        let find = || {
            let parent = self.inodes.get(parent)?;
            match self.find(self.inodes.anchor(&parent)?, name) {
                // Mount points that are not crossed into are shown, but not what is mounted there.
                Err(Errno::XDEV) => self.closed_entry(&parent, name),
                found => Ok(self.enter(found?, Some((&parent, name)))?.0),
            }
        };
        let entry: Result<abi::EntryOut, Errno> = find();
        self.revalidations.looked_up(task, entry.as_ref().ok().map(|entry| entry.nodeid), Instant::now);
        entry
    }

    /// A lookup for a listing. Returns `None` if the kernel knows the file and may cache its
    /// attributes for longer than this answer would allow, or must forget it.
    pub(crate) fn lookup_listed(&self, parent: &Inode, name: &CStr) -> Result<Option<abi::EntryOut>, Errno> {
        let found = self.find(self.inodes.anchor(parent)?, name)?;
        let is_left = |inode: Arc<Inode>| inode.marked.is_marked() || inode.is_misbelieved();
        if self.inodes.known(&found).is_some_and(is_left) {
            return Ok(None);
        }
        Ok(Some(self.enter(found, Some((parent, name)))?.0))
    }

    /// Makes the kernel look up names again that no longer lead to this node, because of an
    /// external change. The kernel may cache names for long (see [`crate::Config::entry_timeout`]).
    /// Returns whether there was such a name.
    pub(crate) fn drop_stale_names(&self, inode: &Arc<Inode>) -> bool {
        let is_stale = |name: &Name| {
            let Ok(parent) = self.inodes.get(name.parent) else { return false };
            let Ok(anchor) = self.inodes.anchor(&parent) else { return false };
            let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
            match statx(&anchor, name.name.as_c_str(), flags, STATX_MASK) {
                Ok(found) => !inode.is(&found),
                Err(errno) => matches!(errno, Errno::NOENT | Errno::NOTDIR),
            }
        };
        let mut believed = inode.name.lock();
        if matches!(&*believed, Believed::Name(name) if is_stale(name))
            && let Believed::Name(name) = std::mem::replace(&mut *believed, Believed::Dropping)
        {
            inode.name_is_stale();
            self.invalidations.request_name(inode, name);
            return true;
        }
        false
    }

    /// Refuses a request by a stale name, so that it does not apply to the file that had the name
    /// before (see `inode/revalidation.rs`).
    pub(crate) fn check_name(&self, inode: &Arc<Inode>, task: u32) -> Result<(), Errno> {
        let found = match self.drop_stale_names(inode) {
            true => revalidation::Found::Stale,
            false if inode.may_be_stale() => revalidation::Found::PerhapsStale,
            false => revalidation::Found::Nothing,
        };
        self.check_revalidated(task, inode, found)
    }

    /// Checks the name by which a file is asked for, unless the file is open: then the caller may
    /// have it open, and mean that file.
    pub(crate) fn check_name_unless_open(&self, inode: &Arc<Inode>, task: u32) -> Result<(), Errno> {
        match inode.is_open() {
            true => self.check_revalidated(task, inode, revalidation::Found::Nothing),
            false => self.check_name(inode, task),
        }
    }

    /// Checks the name by which a file is asked for, unless an attempt before this one has begun:
    /// then it was checked.
    pub(crate) fn check_name_once(&self, inode: &Arc<Inode>, task: u32, attempt: &Attempt<'_>) -> Result<(), Errno> {
        match attempt.begun() {
            Some(_) => Ok(()),
            None => self.check_name_unless_open(inode, task),
        }
    }

    fn check_revalidated(&self, task: u32, inode: &Inode, found: revalidation::Found) -> Result<(), Errno> {
        match self.revalidations.must_revalidate(task, inode.nodeid, found, Instant::now) {
            true => Err(Errno::STALE),
            false => Ok(()),
        }
    }

    pub(crate) fn readlink<'a>(&self, node: u64, scratch: &'a mut [u8]) -> Result<&'a [u8], Errno> {
        let inode = self.inodes.get(node)?;
        let anchor = self.inodes.anchor(&inode)?;
        let len = rustix::fs::readlinkat_raw(&anchor, c"", &mut scratch[..TARGET_BYTES_MAX])?;
        Ok(&scratch[..len])
    }

    pub(crate) fn symlink(
        &self,
        parent: u64,
        name: &CStr,
        target: &CStr,
        creator: Creator,
        attempt: &Attempt<'_>,
    ) -> Result<abi::EntryOut, Errno> {
        self.make(parent, name, FileType::Symlink, creator, attempt, |parent| {
            rustix::fs::symlinkat(target, parent, name)
        })
    }

    pub(crate) fn mkdir(
        &self,
        parent: u64,
        name: &CStr,
        mode: u32,
        creator: Creator,
        attempt: &Attempt<'_>,
    ) -> Result<abi::EntryOut, Errno> {
        let mode = Mode::from_raw_mode(mode & 0o7777);
        self.make(parent, name, FileType::Directory, creator, attempt, |parent| rustix::fs::mkdirat(parent, name, mode))
    }

    pub(crate) fn mknod(
        &self,
        parent: u64,
        name: &CStr,
        args: &abi::MknodIn,
        creator: Creator,
        attempt: &Attempt<'_>,
    ) -> Result<abi::EntryOut, Errno> {
        let kind = FileType::from_raw_mode(args.mode);
        let mode = Mode::from_raw_mode(args.mode & 0o7777);
        // The kernel's encoding of device numbers: minor in bits 0..8 and 20..32, major in 8..20.
        let device = rustix::fs::makedev((args.rdev >> 8) & 0xfff, (args.rdev & 0xff) | ((args.rdev >> 12) & 0xfff00));
        self.make(parent, name, kind, creator, attempt, |parent| rustix::fs::mknodat(parent, name, kind, mode, device))
    }

    /// Creates a file. If an earlier attempt has begun, and there is a file of that kind and
    /// creator, the first attempt has created it.
    fn make(
        &self,
        parent: u64,
        name: &CStr,
        kind: FileType,
        creator: Creator,
        attempt: &Attempt<'_>,
        make: impl FnOnce(BorrowedFd<'_>) -> Result<(), Errno>,
    ) -> Result<abi::EntryOut, Errno> {
        let parent = self.inodes.get(parent)?;
        let anchor = self.inodes.anchor(&parent)?;
        match attempt.done() {
            Some(result) => drop(result?),
            None => {
                let acting = Acting::begin(self.privilege, creator)?;
                attempt.begin(0);
                let made = match make(anchor.as_fd()) {
                    Err(Errno::EXIST) if attempt.begun().is_some() && self.was_made(&anchor, name, kind, creator) => {
                        Ok(())
                    }
                    made => made,
                };
                drop(acting);
                attempt.finish(made, |()| 0)?;
            }
        }
        Ok(self.enter(self.find(&anchor, name)?, Some((&parent, name)))?.0)
    }

    /// Whether the existing file looks like the one that an earlier attempt was to create.
    fn was_made(&self, parent: impl AsFd, name: &CStr, kind: FileType, creator: Creator) -> bool {
        self.find(parent, name).is_ok_and(|found| {
            FileType::from_raw_mode(found.stat.stx_mode.into()) == kind
                && (self.privilege == Privilege::User || found.stat.stx_uid == creator.uid)
                && (kind != FileType::RegularFile || found.stat.stx_size == 0)
        })
    }

    /// Creates a link. If an earlier attempt has begun and the name already leads to the file, the
    /// operation is done.
    pub(crate) fn link(
        &self,
        node: u64,
        new_parent: u64,
        new_name: &CStr,
        task: u32,
        attempt: &Attempt<'_>,
    ) -> Result<abi::EntryOut, Errno> {
        let inode = self.inodes.get(node)?;
        let parent = self.inodes.get(new_parent)?;
        let to = self.inodes.anchor(&parent)?;
        let from = self.inodes.anchor(&inode)?;
        match attempt.done() {
            Some(result) => drop(result?),
            None => {
                self.check_name_once(&inode, task, attempt)?;
                attempt.begin(0);
                let path = ProcPath::new(&from);
                let link = || rustix::fs::linkat(rustix::fs::CWD, path.path(), &to, new_name, AtFlags::SYMLINK_FOLLOW);
                let linked = match self.change_attributes([Some(&inode), None], link) {
                    Err(Errno::EXIST)
                        if attempt.begun().is_some()
                            && self.find(&to, new_name).is_ok_and(|found| inode.is(&found.stat)) =>
                    {
                        Ok(())
                    }
                    linked => linked,
                };
                attempt.finish(linked, |()| 0)?;
            }
        }
        inode.mark_linked();
        Ok(self.enter(self.find(&to, new_name)?, Some((&parent, new_name)))?.0)
    }

    /// Removes a name. If an earlier attempt has begun and the name no longer leads to that file,
    /// the operation is done.
    pub(crate) fn unlink(&self, parent: u64, name: &CStr, directory: bool, attempt: &Attempt<'_>) -> Result<(), Errno> {
        if let Some(result) = attempt.done() {
            return result.map(drop);
        }
        let parent = self.inodes.get(parent)?;
        let anchor = self.inodes.anchor(&parent)?;
        let found = self.find(&anchor, name);
        let subject = found.as_ref().map_or(0, |found| found.stat.stx_ino);
        if attempt.begun().is_some_and(|was| was != 0 && was != subject) {
            return Ok(());
        }
        let victim = self.known(found);
        attempt.begin(subject);
        let flags = if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        let losing = Losing::begin(victim.as_ref().map(|(inode, _)| inode), &parent, name);
        let removed = self.change_attributes([victim.as_ref().map(|(inode, _)| inode), None], || {
            rustix::fs::unlinkat(&anchor, name, flags)
        });
        if removed.is_ok() {
            losing.removed();
            self.name_removed(victim.as_ref(), (&*parent, name));
        }
        attempt.finish(removed, |()| 0)?;
        self.after_loss(victim);
        Ok(())
    }

    /// Records that a name was removed through the mount, which the kernel knows.
    fn name_removed(&self, victim: Option<&(Arc<Inode>, OwnedFd)>, from: (&Inode, &CStr)) {
        if let Some((inode, _)) = victim {
            inode.name_moved((from.0.nodeid, from.1), None);
        }
    }

    /// Records that a name was moved through the mount. The kernel moves its cached entry, which
    /// may be of another file if the file was replaced externally: before a rename the kernel does
    /// not revalidate. In that case the kernel has to look up the new name again.
    fn name_moved(&self, subject: &Subject, from: (&Inode, &CStr), to: (&Inode, &CStr)) {
        let to = (to.0.nodeid, to.1);
        let known =
            subject.known.as_ref().map(|(inode, _)| (inode, inode.name_moved((from.0.nodeid, from.1), Some(to))));
        match known {
            Some((_, Moved::Remembered)) => {}
            Some((inode, Moved::Unknown(name))) => self.invalidations.request_name(inode, name),
            Some((_, Moved::NotBelieved)) => self.invalidations.request_moved(to, true),
            None => self.invalidations.request_moved(to, !subject.was_found),
        }
    }

    #[allow(clippy::too_many_arguments)] // As many as the request has.
    pub(crate) fn rename(
        &self,
        parent: u64,
        name: &CStr,
        new_parent: u64,
        new_name: &CStr,
        flags: u32,
        creator: Creator,
        attempt: &Attempt<'_>,
    ) -> Result<(), Errno> {
        let flags = RenameFlags::from_bits_retain(flags);
        let is_exchange = flags.contains(RenameFlags::EXCHANGE);
        if let Some(result) = attempt.done() {
            // An earlier notification for this name may not have reached the kernel.
            if result.is_ok() {
                self.invalidations.request_moved((new_parent, new_name), true);
                if is_exchange {
                    self.invalidations.request_moved((parent, name), true);
                }
            }
            return result.map(drop);
        }
        let parent = self.inodes.get(parent)?;
        let new_parent = self.inodes.get(new_parent)?;
        let (here, there) = ((&*parent, name), (&*new_parent, new_name));
        let from = self.inodes.anchor(&parent)?;
        let to = self.inodes.anchor(&new_parent)?;
        let (found, target) = (self.find(&from, name), self.find(&to, new_name));
        let inode_of = |found: &Result<Found, Errno>| found.as_ref().map_or(0, |found| found.stat.stx_ino);
        let subject = inode_of(&found);
        // Begun before, and the file has left its old name for the new one: done. (Two names of one
        // file stay as they are.)
        if let Some(was) = attempt.begun()
            && was != 0
            && was == inode_of(&target)
            && was != subject
        {
            self.name_moved(&self.subject(target), here, there);
            if is_exchange {
                self.name_moved(&self.subject(found), there, here);
            }
            return Ok(());
        }
        let (moved, replaced) = (self.subject(found), self.subject(target));
        let inodes = [&moved, &replaced].map(|subject| subject.known.as_ref().map(|(inode, _)| inode));
        attempt.begin(subject);
        let losing = Losing::begin(inodes[1].filter(|_| !is_exchange), &new_parent, new_name);
        let renamed = self.change_attributes(inodes, || {
            // A whiteout is a new file, which belongs to the caller.
            let _acting = match flags.contains(RenameFlags::WHITEOUT) {
                true => Some(Acting::begin(self.privilege, creator)?),
                false => None,
            };
            rustix::fs::renameat_with(&from, name, &to, new_name, flags)
        });
        if renamed.is_ok() {
            losing.removed();
            self.name_moved(&moved, here, there);
            match is_exchange {
                true => self.name_moved(&replaced, there, here),
                false => self.name_removed(replaced.known.as_ref(), there),
            }
        }
        attempt.finish(renamed, |()| 0)?;
        if !is_exchange {
            self.after_loss(replaced.known);
        }
        Ok(())
    }

    /// The file that is about to be moved.
    fn subject(&self, found: Result<Found, Errno>) -> Subject {
        Subject { was_found: found.is_ok(), known: self.known(found) }
    }

    /// The node behind a name that is about to be lost or moved, if the kernel knows it, and a
    /// descriptor that keeps it.
    fn known(&self, found: Result<Found, Errno>) -> Option<(Arc<Inode>, OwnedFd)> {
        let found = found.ok()?;
        let inode = self.inodes.known(&found)?;
        Some((inode, found.fd))
    }

    /// Handles the loss of a name. If it was the last one, the file exists only as long as a
    /// descriptor holds it.
    fn after_loss(&self, victim: Option<(Arc<Inode>, OwnedFd)>) {
        let Some((inode, fd)) = victim else { return };
        let gone = |now: &rustix::fs::Statx| now.stx_nlink == 0 || inode.kind == FileType::Directory;
        if stat(&fd).is_ok_and(|now| gone(&now)) {
            self.dirty_ranges.remove(inode.nodeid);
            self.inodes.mark_deleted(&inode, fd);
        }
    }

    pub(crate) fn create(
        &self,
        parent: u64,
        name: &CStr,
        args: &abi::CreateIn,
        creator: Creator,
        attempt: &Attempt<'_>,
    ) -> Result<(abi::EntryOut, abi::OpenOut), Errno> {
        let parent = self.inodes.get(parent)?;
        let asked = OFlags::from_bits_retain(args.flags);
        if let Some(result) = attempt.done() {
            let fh = result?;
            let file = self.handles.file(fh)?;
            let entry = self.enter(self.found_open(&file.fd)?, Some((&parent, name)))?.0;
            return Ok((entry, file.answer(fh, false, self.flushes(&file))));
        }
        let taken = self.take_descriptor(attempt.uid(), parent.charge())?;
        attempt.begin(0);
        let created = self.create_new(&parent, name, args, creator, attempt);
        let result = created.and_then(|fd| self.opened_new(fd, asked, Some((&parent, name)), taken));
        attempt.finish(result, |(_, open)| open.fh)
    }

    fn create_new(
        &self,
        parent: &Inode,
        name: &CStr,
        args: &abi::CreateIn,
        creator: Creator,
        attempt: &Attempt<'_>,
    ) -> Result<OwnedFd, Errno> {
        let asked = OFlags::from_bits_retain(args.flags);
        match self.open_as(parent, name, args, OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, creator) {
            Ok(fd) => Ok(fd),
            // Made by an attempt before this one: opened as ourselves, because its mode need not
            // allow what its maker may.
            Err(Errno::EXIST)
                if attempt.begun().is_some()
                    && self.was_made(self.inodes.anchor(parent)?, name, FileType::RegularFile, creator) =>
            {
                let flags = self.backing_flags(asked) | OFlags::NOFOLLOW;
                openat(self.inodes.anchor(parent)?, name, flags, Mode::empty())
            }
            // The file was created externally, and the kernel's view of the directory is older. The
            // kernel assumes that the file is new, and checks no permissions. So it must look the
            // name up again, and open the file normally.
            Err(Errno::EXIST) if !asked.contains(OFlags::EXCL) => Err(Errno::STALE),
            Err(errno) => Err(errno),
        }
    }

    pub(crate) fn tmpfile(
        &self,
        parent: u64,
        args: &abi::CreateIn,
        creator: Creator,
        attempt: &Attempt<'_>,
    ) -> Result<(abi::EntryOut, abi::OpenOut), Errno> {
        if let Some(Ok(fh)) = attempt.done() {
            self.handles.remove(fh); // Nobody has it; a new one is as good.
        }
        let parent = self.inodes.get(parent)?;
        let asked = OFlags::from_bits_retain(args.flags);
        let taken = self.take_descriptor(attempt.uid(), 2)?; // Without a name, only a descriptor holds it.
        attempt.begin(0);
        let created = self.open_as(&parent, c".", args, OFlags::TMPFILE | (asked & OFlags::EXCL), creator);
        let result = created.and_then(|fd| self.opened_new(fd, asked, None, taken));
        attempt.finish(result, |(_, open)| open.fh)
    }

    /// The identity of the file that is open here.
    fn found_open(&self, fd: &OwnedFd) -> Result<Found, Errno> {
        let path_only = OFlags::PATH | OFlags::CLOEXEC;
        self.found(rustix::fs::open(ProcPath::new(fd).path(), path_only, Mode::empty())?)
    }

    /// Opens a new backing file, as the caller; `making` says how it is made.
    fn open_as(
        &self,
        parent: &Inode,
        name: &CStr,
        args: &abi::CreateIn,
        making: OFlags,
        creator: Creator,
    ) -> Result<OwnedFd, Errno> {
        let anchor = self.inodes.anchor(parent)?;
        let flags = self.backing_flags(OFlags::from_bits_retain(args.flags));
        let _acting = Acting::begin(self.privilege, creator)?;
        openat(&anchor, name, flags | making, Mode::from_raw_mode(args.mode & 0o7777))
    }

    fn opened_new(
        &self,
        fd: OwnedFd,
        asked: OFlags,
        name: Option<(&Inode, &CStr)>,
        taken: Taken,
    ) -> Result<(abi::EntryOut, abi::OpenOut), Errno> {
        let (entry, inode) = self.enter(self.found_open(&fd)?, name)?;
        let opened = Opened::new(fd, self.backing_flags(asked), taken);
        inode.newest.set(&opened);
        match self.add_open(inode, opened, asked, true) {
            Ok(open) => Ok((entry, open)),
            Err(errno) => {
                self.forget(entry.nodeid, 1);
                Err(errno)
            }
        }
    }
}
