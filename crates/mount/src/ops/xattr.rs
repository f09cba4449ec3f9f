//! Extended attributes, POSIX ACLs among them. All go by `/proc/self/fd/N`, which also reaches
//! symbolic links.

use crate::filesystem::Passthrough;
use crate::ops::credentials::{Caller, WithoutFsetid};
use crate::system::ProcPath;
use crate::takeover::replay::Attempt;
use fuse::{Errno, abi};
use rustix::fd::AsFd;
use rustix::fs::XattrFlags;
use std::ffi::CStr;

/// Longest list of names, and longest value, in Linux.
const XATTR_BYTES_MAX: usize = 64 << 10;
/// Beginning of the names of access control lists.
const ACCESS_CONTROL_LIST: &[u8] = b"system.posix_acl_";
/// The type of a FUSE file system (linux/magic.h).
const FUSE: u32 = 0x6573_5546;

/// Whether files in a directory can have access control lists, so that the kernel has to check
/// them. Some FUSE servers that have none answer with EIO.
pub(crate) fn has_lists(directory: impl AsFd) -> bool {
    let is_fuse = || rustix::fs::fstatfs(&directory).is_ok_and(|found| found.f_type as u32 == FUSE);
    match rustix::fs::getxattr(ProcPath::new(&directory).path(), c"system.posix_acl_access", &mut [0u8; 0][..]) {
        Err(Errno::OPNOTSUPP) => false,
        Err(Errno::IO) => !is_fuse(),
        _ => true,
    }
}

impl Passthrough {
    /// Gets a value into `scratch`; returns its length. With `size` 0, only the length.
    pub(crate) fn getxattr(&self, node: u64, name: &CStr, size: u32, scratch: &mut [u8]) -> Result<usize, Errno> {
        let inode = self.inodes.get(node)?;
        if name == c"security.capability" && inode.device.forbids().suid() {
            return Err(Errno::NODATA);
        }
        let anchor = self.inodes.anchor(&inode)?;
        let path = ProcPath::new(&anchor);
        let len = (size as usize).min(XATTR_BYTES_MAX);
        let got = match len {
            0 => rustix::fs::getxattr_query(path.path(), name),
            _ => rustix::fs::getxattr(path.path(), name, &mut scratch[..len]),
        };
        let is_list = || name.to_bytes().starts_with(ACCESS_CONTROL_LIST);
        match got {
            // A kernel that checks lists fails with this error instead of checking the mode
            // (fs/namei.c, `check_acl`). Some file systems mounted in SOURCE may have no lists,
            // though SOURCE has.
            Err(Errno::OPNOTSUPP) if self.checks_lists && is_list() => Err(Errno::NODATA),
            Err(Errno::IO) if !self.checks_lists && is_list() => Err(Errno::OPNOTSUPP),
            got => got,
        }
    }

    /// Gets the names into `scratch`; returns their length. Those of `trusted.` are for root alone,
    /// as on any file system.
    pub(crate) fn listxattr(&self, node: u64, uid: u32, _size: u32, scratch: &mut [u8]) -> Result<usize, Errno> {
        let inode = self.inodes.get(node)?;
        let anchor = self.inodes.anchor(&inode)?;
        let len = rustix::fs::listxattr(ProcPath::new(&anchor).path(), &mut scratch[..XATTR_BYTES_MAX])?;
        if uid == 0 {
            return Ok(len);
        }
        let mut kept = 0;
        let mut at = 0;
        while at < len {
            let end = scratch[at..len].iter().position(|&byte| byte == 0).map_or(len, |nul| at + nul + 1);
            if !scratch[at..end].starts_with(b"trusted.") {
                scratch.copy_within(at..end, kept);
                kept += end - at;
            }
            at = end;
        }
        Ok(kept)
    }

    /// Sets a value. If an earlier attempt has begun and the value is set, the operation is done.
    pub(crate) fn setxattr(
        &self,
        node: u64,
        name: &CStr,
        value: &[u8],
        args: &abi::SetxattrIn,
        caller: Caller,
        attempt: &Attempt<'_>,
    ) -> Result<(), Errno> {
        if let Some(result) = attempt.done() {
            return result.map(drop);
        }
        let inode = self.inodes.get(node)?;
        self.check_name_once(&inode, caller.task, attempt)?;
        let anchor = self.inodes.anchor(&inode)?;
        let flags = XattrFlags::from_bits_retain(args.flags);
        attempt.begin(0);
        let set = self.change_attributes([Some(&inode), None], || {
            let kill = args.setxattr_flags & abi::SETXATTR_ACL_KILL_SGID != 0;
            let _fsetid = WithoutFsetid::if_needed(self.privilege, kill, caller, &anchor)?;
            rustix::fs::setxattr(ProcPath::new(&anchor).path(), name, value, flags)
        });
        let set = match set {
            Err(Errno::EXIST) if attempt.begun().is_some() => {
                let mut there = vec![0; value.len() + 1];
                let len = rustix::fs::getxattr(ProcPath::new(&anchor).path(), name, &mut there[..])?;
                if there[..len] == *value { Ok(()) } else { Err(Errno::EXIST) }
            }
            set => set,
        };
        attempt.finish(set, |()| 0)
    }

    /// Removes an attribute. If an earlier attempt has begun and the attribute is missing, the
    /// operation is done.
    pub(crate) fn removexattr(&self, node: u64, name: &CStr, task: u32, attempt: &Attempt<'_>) -> Result<(), Errno> {
        if let Some(result) = attempt.done() {
            return result.map(drop);
        }
        let inode = self.inodes.get(node)?;
        self.check_name_once(&inode, task, attempt)?;
        let anchor = self.inodes.anchor(&inode)?;
        attempt.begin(0);
        let remove = || rustix::fs::removexattr(ProcPath::new(&anchor).path(), name);
        let removed = match self.change_attributes([Some(&inode), None], remove) {
            Err(Errno::NODATA) if attempt.begun().is_some() => Ok(()),
            removed => removed,
        };
        attempt.finish(removed, |()| 0)
    }
}
