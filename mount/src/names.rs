//! Operations on names: finding, making, moving and removing them.
//!
//! Whatever gives the kernel a node counts a lookup. Making is done as the caller ([`Acting`]); moving and removing as ourselves,
//! for the kernel has checked who may. Removing or replacing a name of a file moves its change time, so the borrower is told.

use crate::credentials::{Acting, Creator};
use crate::filesystem::Passthrough;
use crate::handle::OpenFile;
use crate::inode::{Found, Inode, Name, STATX_MASK, device_of, stat};
use crate::system::ProcPath;
use fuse::{Errno, abi};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, openat, statx};
use std::ffi::CStr;
use std::sync::Arc;

/// Names remembered of one file. They are more than one only if the directory is changed beside us.
const NAMES_MAX: usize = 4;
/// Longest target of a symbolic link, as everywhere in Linux.
const TARGET_BYTES_MAX: usize = 4096;

impl Passthrough {
    /// Opens a name with O_PATH and learns who it is.
    fn find(&self, parent: impl AsFd, name: &CStr) -> Result<Found, Errno> {
        if matches!(name.to_bytes(), b"" | b"." | b"..") || name.to_bytes().contains(&b'/') {
            return Err(Errno::INVAL); // The kernel never asks for these: we do not offer EXPORT_SUPPORT.
        }
        let fd = openat(parent, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        self.found(fd)
    }

    fn found(&self, fd: OwnedFd) -> Result<Found, Errno> {
        // Somebody may have mounted us below ourselves. DONT_SYNC sees that without sending us a request.
        let now = statx(&fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, STATX_MASK)?;
        if device_of(&now) == self.own_device {
            return Err(Errno::LOOP);
        }
        Ok(Found::new(fd, now))
    }

    /// What the kernel is told of a file that was found, with one more lookup.
    fn enter(&self, found: Found, name: Option<(&Inode, &CStr)>) -> Result<(abi::EntryOut, Arc<Inode>), Errno> {
        let inode = self.inodes.reference(found);
        // Stat again, now that the borrower's view of it can be held still.
        let now = self.inodes.anchor(&inode).and_then(|anchor| self.stat_observed(&inode, &anchor));
        match now {
            Ok(now) => {
                let long = self.is_believed_for_long(&inode, &now);
                if let (true, Some((parent, name))) = (long, name) {
                    self.remember_name(&inode, Name { parent: parent.nodeid, name: name.to_owned() });
                }
                Ok((self.entry_out(&inode, &now), inode))
            }
            Err(errno) => {
                self.forget(inode.nodeid, 1);
                Err(errno)
            }
        }
    }

    pub(crate) fn lookup(&self, parent: u64, name: &CStr) -> Result<abi::EntryOut, Errno> {
        self.lookup_in(&*self.inodes.get(parent)?, name)
    }

    pub(crate) fn lookup_in(&self, parent: &Inode, name: &CStr) -> Result<abi::EntryOut, Errno> {
        let found = self.find(self.inodes.anchor(parent)?, name)?;
        Ok(self.enter(found, Some((parent, name)))?.0)
    }

    fn remember_name(&self, inode: &Inode, name: Name) {
        let mut names = inode.names.lock();
        if !names.contains(&name) {
            if names.len() == NAMES_MAX {
                self.invalidations.request_name(names.remove(0));
            }
            names.push(name);
        }
    }

    /// The kernel believes the names of files for long (see [`crate::Config::entry_timeout`]). Has it look those up again that are no
    /// longer this node's, because somebody changed the directory beside us. Returns whether there were any.
    pub(crate) fn drop_stale_names(&self, inode: &Inode) -> bool {
        let is_stale = |name: &mut Name| {
            let Ok(parent) = self.inodes.get(name.parent) else { return false };
            let Ok(anchor) = self.inodes.anchor(&parent) else { return false };
            let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
            match statx(&anchor, name.name.as_c_str(), flags, STATX_MASK) {
                Ok(found) => !inode.is(&found),
                Err(errno) => matches!(errno, Errno::NOENT | Errno::NOTDIR),
            }
        };
        let mut names = inode.names.lock();
        let stale: Vec<_> = names.extract_if(.., is_stale).collect();
        drop(names);
        let any = !stale.is_empty();
        stale.into_iter().for_each(|name| self.invalidations.request_name(name));
        any
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
    ) -> Result<abi::EntryOut, Errno> {
        self.make(parent, name, creator, |parent| rustix::fs::symlinkat(target, parent, name))
    }

    pub(crate) fn mkdir(&self, parent: u64, name: &CStr, mode: u32, creator: Creator) -> Result<abi::EntryOut, Errno> {
        let mode = Mode::from_raw_mode(mode & 0o7777);
        self.make(parent, name, creator, |parent| rustix::fs::mkdirat(parent, name, mode))
    }

    pub(crate) fn mknod(
        &self,
        parent: u64,
        name: &CStr,
        args: &abi::MknodIn,
        creator: Creator,
    ) -> Result<abi::EntryOut, Errno> {
        let kind = FileType::from_raw_mode(args.mode);
        let mode = Mode::from_raw_mode(args.mode & 0o7777);
        // The kernel's encoding of device numbers: minor in bits 0..8 and 20..32, major in 8..20.
        let device = rustix::fs::makedev((args.rdev >> 8) & 0xfff, (args.rdev & 0xff) | ((args.rdev >> 12) & 0xfff00));
        self.make(parent, name, creator, |parent| rustix::fs::mknodat(parent, name, kind, mode, device))
    }

    fn make(
        &self,
        parent: u64,
        name: &CStr,
        creator: Creator,
        make: impl FnOnce(rustix::fd::BorrowedFd<'_>) -> Result<(), Errno>,
    ) -> Result<abi::EntryOut, Errno> {
        let parent = self.inodes.get(parent)?;
        let anchor = self.inodes.anchor(&parent)?;
        let acting = Acting::begin(self.privilege, creator)?;
        make(anchor.as_fd())?;
        drop(acting);
        Ok(self.enter(self.find(&anchor, name)?, Some((&parent, name)))?.0)
    }

    pub(crate) fn link(&self, node: u64, new_parent: u64, new_name: &CStr) -> Result<abi::EntryOut, Errno> {
        let inode = self.inodes.get(node)?;
        let parent = self.inodes.get(new_parent)?;
        let to = self.inodes.anchor(&parent)?;
        let from = self.inodes.anchor(&inode)?;
        self.change_attributes([Some(&inode), None], || {
            rustix::fs::linkat(rustix::fs::CWD, ProcPath::new(&from).path(), &to, new_name, AtFlags::SYMLINK_FOLLOW)
        })?;
        inode.mark_linked();
        Ok(self.enter(self.find(&to, new_name)?, Some((&parent, new_name)))?.0)
    }

    pub(crate) fn unlink(&self, parent: u64, name: &CStr, directory: bool) -> Result<(), Errno> {
        let parent = self.inodes.get(parent)?;
        let anchor = self.inodes.anchor(&parent)?;
        let victim = self.victim(&anchor, name);
        let flags = if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        self.change_attributes([victim.as_ref().map(|(inode, _)| inode), None], || {
            rustix::fs::unlinkat(&anchor, name, flags)
        })?;
        Self::name_changed(victim.as_ref(), (&*parent, name), None);
        self.after_loss(victim);
        Ok(())
    }

    /// A name was moved or removed through us: the kernel knows. With `to`, it has taken what it believes of the name along.
    fn name_changed(victim: Option<&(Arc<Inode>, OwnedFd)>, from: (&Inode, &CStr), to: Option<(&Inode, &CStr)>) {
        let Some((inode, _)) = victim else { return };
        let mut names = inode.names.lock();
        if let Some(at) = names.iter().position(|name| name.parent == from.0.nodeid && *name.name == *from.1) {
            match to {
                Some((parent, name)) => names[at] = Name { parent: parent.nodeid, name: name.to_owned() },
                None => drop(names.remove(at)),
            }
        }
    }

    pub(crate) fn rename(
        &self,
        parent: u64,
        name: &CStr,
        new_parent: u64,
        new_name: &CStr,
        flags: u32,
        creator: Creator,
    ) -> Result<(), Errno> {
        let parent = self.inodes.get(parent)?;
        let new_parent = self.inodes.get(new_parent)?;
        let from = self.inodes.anchor(&parent)?;
        let to = self.inodes.anchor(&new_parent)?;
        let moved = self.victim(&from, name);
        let replaced = self.victim(&to, new_name);
        let flags = RenameFlags::from_bits_retain(flags);
        let inodes = [moved.as_ref().map(|(inode, _)| inode), replaced.as_ref().map(|(inode, _)| inode)];
        self.change_attributes(inodes, || {
            // A whiteout is a new file, and the caller's.
            let _acting = match flags.contains(RenameFlags::WHITEOUT) {
                true => Some(Acting::begin(self.privilege, creator)?),
                false => None,
            };
            rustix::fs::renameat_with(&from, name, &to, new_name, flags)
        })?;
        let (here, there) = ((&*parent, name), (&*new_parent, new_name));
        Self::name_changed(moved.as_ref(), here, Some(there));
        let exchanged = flags.contains(RenameFlags::EXCHANGE).then_some(here);
        Self::name_changed(replaced.as_ref(), there, exchanged);
        if !flags.contains(RenameFlags::EXCHANGE) {
            self.after_loss(replaced);
        }
        Ok(())
    }

    /// The node behind a name that is about to be lost or moved, if the kernel knows it, and a descriptor that keeps it.
    fn victim(&self, parent: impl AsFd, name: &CStr) -> Option<(Arc<Inode>, OwnedFd)> {
        let found = self.find(parent, name).ok()?;
        let inode = self.inodes.known(&found)?;
        Some((inode, found.fd))
    }

    /// A name of it is gone. If it was the last one, the file lives on only as long as it is held.
    fn after_loss(&self, victim: Option<(Arc<Inode>, OwnedFd)>) {
        let Some((inode, fd)) = victim else { return };
        let gone = |now: &rustix::fs::Statx| now.stx_nlink == 0 || inode.kind == FileType::Directory;
        if stat(&fd).is_ok_and(|now| gone(&now)) {
            self.ledger.remove(inode.nodeid);
            inode.mark_deleted(fd);
        }
    }

    pub(crate) fn create(
        &self,
        parent: u64,
        name: &CStr,
        args: &abi::CreateIn,
        creator: Creator,
    ) -> Result<(abi::EntryOut, abi::OpenOut), Errno> {
        let parent = self.inodes.get(parent)?;
        let asked = OFlags::from_bits_retain(args.flags);
        match self.open_as(&parent, name, args, OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW, creator) {
            Ok(fd) => self.opened_new(fd, asked, Some((&parent, name))),
            // Somebody beside us was faster than the kernel's view of the directory. The kernel believes that the file is new, and
            // asks nobody's permission; so it must look the name up again, and open the file as any other.
            Err(Errno::EXIST) if !asked.contains(OFlags::EXCL) => Err(Errno::STALE),
            Err(errno) => Err(errno),
        }
    }

    pub(crate) fn tmpfile(
        &self,
        parent: u64,
        args: &abi::CreateIn,
        creator: Creator,
    ) -> Result<(abi::EntryOut, abi::OpenOut), Errno> {
        let parent = self.inodes.get(parent)?;
        let asked = OFlags::from_bits_retain(args.flags);
        let fd = self.open_as(&parent, c".", args, OFlags::TMPFILE | (asked & OFlags::EXCL), creator)?;
        self.opened_new(fd, asked, None)
    }

    /// Opens a new file below, as the caller; `making` says how it is made.
    fn open_as(
        &self,
        parent: &Inode,
        name: &CStr,
        args: &abi::CreateIn,
        making: OFlags,
        creator: Creator,
    ) -> Result<OwnedFd, Errno> {
        let anchor = self.inodes.anchor(parent)?;
        let flags = self.flags_below(OFlags::from_bits_retain(args.flags));
        let _acting = Acting::begin(self.privilege, creator)?;
        openat(&anchor, name, flags | making, Mode::from_raw_mode(args.mode & 0o7777))
    }

    fn opened_new(
        &self,
        fd: OwnedFd,
        asked: OFlags,
        name: Option<(&Inode, &CStr)>,
    ) -> Result<(abi::EntryOut, abi::OpenOut), Errno> {
        let path_only = OFlags::PATH | OFlags::CLOEXEC;
        let anchor = rustix::fs::open(ProcPath::new(&fd).path(), path_only, Mode::empty())?;
        let (entry, inode) = self.enter(self.found(anchor)?, name)?;
        match self.add_open(inode, OpenFile::new(self.inodes.get(entry.nodeid)?, fd, self.flags_below(asked)), asked) {
            Ok(open) => Ok((entry, open)),
            Err(errno) => {
                self.forget(entry.nodeid, 1);
                Err(errno)
            }
        }
    }
}
