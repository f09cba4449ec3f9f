//! Attributes: getattr, statx, setattr, statfs, and the file flags behind ioctl.

use crate::filesystem::Passthrough;
use crate::inode::handle::OpenFile;
use crate::inode::{Anchor, Inode, STATX_MASK};
use crate::ops::change::Outcome;
use crate::ops::credentials::{Caller, WithoutFsetid};
use crate::system::{ProcPath, ioctl_on_bytes};
use borrower::Change;
use fuse::{Errno, abi};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, open, statx};
use std::sync::Arc;
use std::time::Duration;

/// Requests of ioctl(2) that are passed on. They get and set the flags that lsattr and chattr show.
mod request {
    pub(super) const GETFLAGS: u32 = 0x8008_6601;
    pub(super) const SETFLAGS: u32 = 0x4008_6602;
    pub(super) const FSGETXATTR: u32 = 0x801c_581f;
    pub(super) const FSSETXATTR: u32 = 0x401c_5820;
}

impl Passthrough {
    fn attr(&self, inode: &Inode, now: &Statx) -> abi::Attr {
        if let Some(file) = &inode.file {
            file.tell_size(now.stx_size);
        }
        let now = &inode.device.forbids().shown(*now);
        abi::Attr {
            ino: inode.device.show_inode(now.stx_ino),
            size: now.stx_size,
            blocks: now.stx_blocks,
            atime: now.stx_atime.tv_sec as u64,
            mtime: now.stx_mtime.tv_sec as u64,
            ctime: now.stx_ctime.tv_sec as u64,
            atimensec: now.stx_atime.tv_nsec,
            mtimensec: now.stx_mtime.tv_nsec,
            ctimensec: now.stx_ctime.tv_nsec,
            mode: now.stx_mode.into(),
            nlink: now.stx_nlink,
            uid: now.stx_uid,
            gid: now.stx_gid,
            // As the kernel encodes it for us: minor in bits 0..8 and 20..32, major in 8..20.
            rdev: (now.stx_rdev_minor & 0xff) | (now.stx_rdev_major << 8) | ((now.stx_rdev_minor & !0xff) << 12),
            blksize: now.stx_blksize,
            flags: 0,
        }
    }

    /// The answer to a lookup. `long`: the name is recorded, so the kernel may cache it for long.
    pub(crate) fn entry_out(&self, inode: &Inode, now: &Statx, long: bool) -> abi::EntryOut {
        let entry_timeout = match now.stx_nlink {
            // The file has lost its name since it was found, so there is no name to cache.
            0 => Duration::ZERO,
            _ if long => self.entry_timeout,
            _ => self.attr_timeout,
        };
        abi::EntryOut {
            nodeid: inode.nodeid,
            generation: inode.generation(),
            entry_valid: entry_timeout.as_secs(),
            attr_valid: self.attr_timeout.as_secs(),
            entry_valid_nsec: entry_timeout.subsec_nanos(),
            attr_valid_nsec: self.attr_timeout.subsec_nanos(),
            attr: self.attr(inode, now),
        }
    }

    /// Whether the kernel may cache the name for long. Only a regular file loses cached pages with
    /// its last name in the kernel. With a single name, only one must be checked.
    pub(crate) fn is_believed_for_long(&self, inode: &Inode, now: &Statx) -> bool {
        inode.file.is_some() && now.stx_nlink == 1
    }

    fn attr_out(&self, inode: &Inode, now: &Statx, attr_timeout: Duration) -> abi::AttrOut {
        abi::AttrOut {
            attr_valid: attr_timeout.as_secs(),
            attr_valid_nsec: attr_timeout.subsec_nanos(),
            dummy: 0,
            attr: self.attr(inode, now),
        }
    }

    /// The open file of a handle, if the request has a handle and it is of a file.
    fn open_file(&self, sent: bool, fh: u64) -> Option<Arc<OpenFile>> {
        if sent { self.handles.file(fh).ok() } else { None }
    }

    /// The descriptor to use: that of the open file, otherwise that of the node.
    fn descriptor<'a>(&self, inode: &'a Inode, open: Option<&'a OpenFile>) -> Result<Anchor<'a>, Errno> {
        match open {
            Some(file) => Ok(Anchor::Held(file.fd.as_fd())),
            None => self.inodes.anchor(inode),
        }
    }

    pub(crate) fn getattr(&self, node: u64, args: &abi::GetattrIn) -> Result<abi::AttrOut, Errno> {
        let inode = self.inodes.get(node)?;
        let file = self.open_file(args.getattr_flags & abi::GETATTR_FH != 0, args.fh);
        let fd = self.descriptor(&inode, file.as_deref())?;
        let is_reported = self.is_reported(&inode);
        let now = self.stat_observed(&inode, &fd)?;
        self.before_attributes(&inode, &now);
        Ok(self.attr_out(&inode, &now, self.attr_timeout(&now, is_reported)))
    }

    /// Checks for a stale name after an answer with attributes. The caller may have used a name
    /// that belongs to another file now; the next request will detect this.
    pub(crate) fn look_at_name(&self, node: u64) {
        if let Ok(inode) = self.inodes.get(node) {
            self.drop_stale_names(&inode);
        }
    }

    pub(crate) fn statx(&self, node: u64, args: &abi::StatxIn) -> Result<abi::StatxOut, Errno> {
        let inode = self.inodes.get(node)?;
        let file = self.open_file(args.getattr_flags & abi::GETATTR_FH != 0, args.fh);
        let fd = self.descriptor(&inode, file.as_deref())?;
        // The synchronization that the caller requested, but always all fields, because the kernel
        // caches them.
        let sync = AtFlags::from_bits_retain(args.sx_flags) & (AtFlags::STATX_FORCE_SYNC | AtFlags::STATX_DONT_SYNC);
        let mask = STATX_MASK | (StatxFlags::from_bits_retain(args.sx_mask) & StatxFlags::ALL);
        let is_reported = self.is_reported(&inode);
        let now = statx(&fd, c"", AtFlags::EMPTY_PATH | sync, mask)?;
        self.before_attributes(&inode, &now);
        let attr_timeout = self.attr_timeout(&now, is_reported);
        if let Some(file) = &inode.file {
            file.tell_size(now.stx_size);
        }
        let now = inode.device.forbids().shown(now);
        let time =
            |time: rustix::fs::StatxTimestamp| abi::SxTime { tv_sec: time.tv_sec, tv_nsec: time.tv_nsec, reserved: 0 };
        Ok(abi::StatxOut {
            attr_valid: attr_timeout.as_secs(),
            attr_valid_nsec: attr_timeout.subsec_nanos(),
            stat: abi::Statx {
                mask: now.stx_mask & STATX_MASK.bits(),
                blksize: now.stx_blksize,
                attributes: now.stx_attributes.bits(),
                nlink: now.stx_nlink,
                uid: now.stx_uid,
                gid: now.stx_gid,
                mode: now.stx_mode,
                ino: inode.device.show_inode(now.stx_ino),
                size: now.stx_size,
                blocks: now.stx_blocks,
                attributes_mask: now.stx_attributes_mask.bits(),
                atime: time(now.stx_atime),
                btime: time(now.stx_btime),
                ctime: time(now.stx_ctime),
                mtime: time(now.stx_mtime),
                rdev_major: now.stx_rdev_major,
                rdev_minor: now.stx_rdev_minor,
                dev_major: now.stx_dev_major,
                dev_minor: now.stx_dev_minor,
                ..Default::default()
            },
            ..Default::default()
        })
    }

    pub(crate) fn setattr(&self, node: u64, caller: Caller, args: &abi::SetattrIn) -> Result<abi::AttrOut, Errno> {
        use abi::fattr;
        let inode = self.inodes.get(node)?;
        let valid = |bits: u32| args.valid & bits != 0;
        // The kernel sends its own times without a name.
        if valid(fattr::MODE | fattr::UID | fattr::GID | fattr::SIZE | fattr::ATIME) || !valid(fattr::CTIME) {
            self.check_name_unless_open(&inode, caller.task)?;
        }
        let file = self.open_file(args.valid & fattr::FH != 0, args.fh);
        let fd = self.descriptor(&inode, file.as_deref())?;
        let fd = fd.as_fd();
        let changes = fattr::MODE | fattr::UID | fattr::GID | fattr::ATIME | fattr::MTIME;
        // Nothing to set: before a change of bytes, or for chown(-1, -1), the kernel wants those
        // set-id bits cleared that the caller's change clears (fs/fuse/dir.c, `fuse_setattr`). The
        // answer shows the mode.
        let clears = !valid(changes | fattr::SIZE);
        if clears || valid(changes) {
            self.change_attributes([Some(&inode), None], || {
                // Change the owner first: this clears set-id bits, which the mode of the same
                // request may set.
                if clears || valid(fattr::UID | fattr::GID) {
                    let _fsetid = WithoutFsetid::for_caller(self.privilege, caller, fd)?;
                    let owner =
                        (valid(fattr::UID) && args.uid != u32::MAX).then(|| rustix::fs::Uid::from_raw(args.uid));
                    let group =
                        (valid(fattr::GID) && args.gid != u32::MAX).then(|| rustix::fs::Gid::from_raw(args.gid));
                    rustix::fs::chownat(fd, c"", owner, group, AtFlags::EMPTY_PATH)?;
                }
                if valid(fattr::MODE) {
                    let mode = Mode::from_raw_mode(args.mode & 0o7777);
                    rustix::fs::chmodat(rustix::fs::CWD, ProcPath::new(fd).path(), mode, AtFlags::empty())?;
                }
                if valid(fattr::SIZE) || !valid(fattr::ATIME | fattr::MTIME) {
                    return Ok(());
                }
                match set_times(fd, args) {
                    // These are the kernel's times of writes to its page cache, which the caller
                    // need not be permitted to set. An append-only file permits nobody to set
                    // times, and has the time of its own write.
                    Err(Errno::PERM) if valid(fattr::CTIME) && !valid(fattr::ATIME) => Ok(()),
                    set => set,
                }
            })?;
        }
        if valid(fattr::SIZE) {
            self.truncate(&inode, file.as_deref(), fd, args.size, valid(fattr::KILL_SUIDGID).then_some(caller))?;
            if valid(fattr::ATIME | fattr::MTIME) {
                self.change_attributes([Some(&inode), None], || set_times(fd, args))?;
            }
        }
        let now = self.stat_observed(&inode, fd)?;
        self.times_were_set(&inode, args, &now);
        Ok(self.attr_out(&inode, &now, self.attr_timeout))
    }

    /// Changes the size. The content changes from the smaller of the two sizes on. With a caller,
    /// clears set-id bits as a change by that caller does.
    pub(crate) fn truncate(
        &self,
        inode: &Inode,
        open_file: Option<&OpenFile>,
        fd: BorrowedFd<'_>,
        size: u64,
        clears_for: Option<Caller>,
    ) -> Result<(), Errno> {
        let writable = open_file.filter(|file| file.writable);
        let reopened;
        let target = match writable {
            Some(file) => file.fd.as_fd(),
            None => {
                // The kernel asks for this of regular files only. The change waits for the holder
                // of a lease, be it ourselves, as truncate(2) does.
                reopened = open(ProcPath::new(fd).path(), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
                reopened.as_fd()
            }
        };
        self.change(
            inode,
            target,
            |_| Change::Other { start: size, end: u64::MAX },
            |_| {
                let clearing = clears_for.map(|caller| self.clearing(inode, true, caller, target));
                let _clearing = clearing.transpose()?;
                rustix::fs::ftruncate(target, size)?;
                Ok(Outcome::done(()))
            },
            |_, after| after.size_bytes == size,
        )?;
        Ok(())
    }

    pub(crate) fn statfs(&self, node: u64) -> Result<abi::StatfsOut, Errno> {
        let inode = self.inodes.get(node)?;
        let backing = rustix::fs::fstatvfs(self.inodes.anchor(&inode)?)?;
        Ok(abi::StatfsOut {
            blocks: backing.f_blocks,
            bfree: backing.f_bfree,
            bavail: backing.f_bavail,
            files: backing.f_files,
            ffree: backing.f_ffree,
            bsize: backing.f_bsize as u32,
            namelen: backing.f_namemax as u32,
            frsize: backing.f_frsize as u32,
            ..Default::default()
        })
    }

    pub(crate) fn ioctl(&self, node: u64, args: &abi::IoctlIn, data: &[u8]) -> Result<[u8; 64], Errno> {
        let sets = match args.cmd {
            request::GETFLAGS | request::FSGETXATTR => false,
            request::SETFLAGS | request::FSSETXATTR => true,
            _ => return Err(Errno::NOTTY),
        };
        let inode = self.inodes.get(node)?;
        let mut buffer = [0u8; 64];
        let len = data.len().min(buffer.len());
        buffer[..len].copy_from_slice(&data[..len]);
        let (directory, file);
        let fd = if args.flags & abi::IOCTL_DIR != 0 {
            directory = self.handles.directory(args.fh)?.listing.lock().fd().clone();
            directory.as_fd()
        } else {
            file = self.handles.file(args.fh)?;
            file.fd.as_fd()
        };
        if sets {
            self.change_attributes([Some(&inode), None], || ioctl_on_bytes(fd, args.cmd, &mut buffer))?;
            self.external_changes.ask_again(&inode);
            // The change time has changed. (The caller holds the inode.)
            self.invalidations.forget_attributes(node);
        } else {
            ioctl_on_bytes(fd, args.cmd, &mut buffer)?;
        }
        Ok(buffer)
    }
}

fn set_times(fd: BorrowedFd<'_>, args: &abi::SetattrIn) -> Result<(), Errno> {
    use abi::fattr;
    let time = |set: u32, now: u32, sec: u64, nsec: u32| {
        let tv_nsec = match args.valid {
            valid if valid & set == 0 => UTIME_OMIT,
            valid if valid & now != 0 => UTIME_NOW,
            _ => nsec.into(),
        };
        Timespec { tv_sec: sec as i64, tv_nsec }
    };
    let times = Timestamps {
        last_access: time(fattr::ATIME, fattr::ATIME_NOW, args.atime, args.atimensec),
        last_modification: time(fattr::MTIME, fattr::MTIME_NOW, args.mtime, args.mtimensec),
    };
    rustix::fs::utimensat(fd, c"", &times, AtFlags::EMPTY_PATH)
}
