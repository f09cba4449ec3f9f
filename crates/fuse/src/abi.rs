//! The structures and numbers of the kernel's FUSE interface (`<linux/fuse.h>`, version 7.45), in
//! native byte order.
//!
//! Facts only: no behaviour. Fields have the names of the interface, as far as these are readable.
//! A kernel older than 7.45 does not send unknown messages, and does not offer the flags in INIT.
#![allow(missing_docs)] // The interface's own documentation explains each field and number.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Major version of the interface.
pub const MAJOR: u32 = 7;
/// The newest minor version described here.
pub const MINOR: u32 = 45;
/// The oldest minor version served: that of Linux 5.16. From this version on all structures here
/// have their full length.
pub const MINOR_MIN: u32 = 35;
/// Node of the root directory.
pub const ROOT_ID: u64 = 1;

pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const BMAP: u32 = 37;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const POLL: u32 = 40;
    pub const NOTIFY_REPLY: u32 = 41;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const SETUPMAPPING: u32 = 48;
    pub const REMOVEMAPPING: u32 = 49;
    pub const SYNCFS: u32 = 50;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
    pub const COPY_FILE_RANGE_64: u32 = 53;

    /// Returns the name of an opcode, for counters and messages.
    pub fn name(opcode: u32) -> &'static str {
        match opcode {
            LOOKUP => "lookup",
            FORGET => "forget",
            GETATTR => "getattr",
            SETATTR => "setattr",
            READLINK => "readlink",
            SYMLINK => "symlink",
            MKNOD => "mknod",
            MKDIR => "mkdir",
            UNLINK => "unlink",
            RMDIR => "rmdir",
            RENAME => "rename",
            LINK => "link",
            OPEN => "open",
            READ => "read",
            WRITE => "write",
            STATFS => "statfs",
            RELEASE => "release",
            FSYNC => "fsync",
            SETXATTR => "setxattr",
            GETXATTR => "getxattr",
            LISTXATTR => "listxattr",
            REMOVEXATTR => "removexattr",
            FLUSH => "flush",
            INIT => "init",
            OPENDIR => "opendir",
            READDIR => "readdir",
            RELEASEDIR => "releasedir",
            FSYNCDIR => "fsyncdir",
            GETLK => "getlk",
            SETLK => "setlk",
            SETLKW => "setlkw",
            ACCESS => "access",
            CREATE => "create",
            INTERRUPT => "interrupt",
            BMAP => "bmap",
            DESTROY => "destroy",
            IOCTL => "ioctl",
            POLL => "poll",
            NOTIFY_REPLY => "notify_reply",
            BATCH_FORGET => "batch_forget",
            FALLOCATE => "fallocate",
            READDIRPLUS => "readdirplus",
            RENAME2 => "rename2",
            LSEEK => "lseek",
            COPY_FILE_RANGE => "copy_file_range",
            SETUPMAPPING => "setupmapping",
            REMOVEMAPPING => "removemapping",
            SYNCFS => "syncfs",
            TMPFILE => "tmpfile",
            STATX => "statx",
            COPY_FILE_RANGE_64 => "copy_file_range_64",
            _ => "unknown",
        }
    }
}

pub mod notify_code {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    pub const STORE: i32 = 4;
    pub const DELETE: i32 = 6;
    pub const RESEND: i32 = 7;
    pub const PRUNE: i32 = 9;
}

/// The minor version from which on the kernel accepts [`notify_code::PRUNE`].
pub const PRUNE_MINOR: u32 = 45;
/// The maximum number of nodes in one such message: the kernel processes that many in one piece.
pub const PRUNE_NODES_MAX: usize = 512;

/// Capabilities of INIT. The upper half is in `flags2`.
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const HAS_IOCTL_DIR: u64 = 1 << 11;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const WRITEBACK_CACHE: u64 = 1 << 16;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const ABORT_ERROR: u64 = 1 << 21;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const SETXATTR_EXT: u64 = 1 << 29;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const SECURITY_CTX: u64 = 1 << 32;
    pub const CREATE_SUPP_GROUP: u64 = 1 << 34;
    pub const HAS_EXPIRE_ONLY: u64 = 1 << 35;
    pub const PASSTHROUGH: u64 = 1 << 37;
    pub const NO_EXPORT_SUPPORT: u64 = 1 << 38;
    pub const HAS_RESEND: u64 = 1 << 39;
    pub const ALLOW_IDMAP: u64 = 1 << 40;
}

/// Bits of `SetattrIn::valid`.
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Bits of `OpenOut::open_flags`.
pub mod fopen {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const NOFLUSH: u32 = 1 << 5;
    pub const PASSTHROUGH: u32 = 1 << 7;
}

pub const GETATTR_FH: u32 = 1 << 0;
/// A bit of `read_flags`, which only direct I/O sets (fs/fuse/file.c, fuse_send_read).
pub const READ_LOCKOWNER: u32 = 1 << 1;
pub const WRITE_CACHE: u32 = 1 << 0;
/// A bit of `write_flags`, which only direct I/O sets (fs/fuse/file.c, fuse_send_write).
pub const WRITE_LOCKOWNER: u32 = 1 << 1;
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
pub const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
pub const FSYNC_FDATASYNC: u32 = 1 << 0;
pub const IOCTL_DIR: u32 = 1 << 4;
pub const EXPIRE_ONLY: u32 = 1 << 0;
/// Extensions of a type up to this are security contexts.
pub const EXT_SECCTX_MAX: u32 = 31;
/// Extension that names a supplementary group.
pub const EXT_GROUPS: u32 = 32;
/// In `uid` and `gid` of a request: the kernel does not reveal the caller (with ALLOW_IDMAP, in all
/// requests that create nothing).
pub const INVALID_ID: u32 = u32::MAX;
/// Set in `unique` of a request that is sent again after a takeover.
pub const UNIQUE_RESEND: u64 = 1 << 63;

/// `_IOR(229, 0, u32)`: makes this descriptor of /dev/fuse another descriptor of that connection.
pub const DEV_IOC_CLONE: u32 = 0x8004_e500;
/// `_IOW(229, 1, BackingMap)`: registers a backing file that open files may be passed through to.
/// Returns its number.
pub const DEV_IOC_BACKING_OPEN: u32 = 0x4010_e501;
/// `_IOW(229, 2, u32)`: removes that registration. No further open file is passed through to it.
pub const DEV_IOC_BACKING_CLOSE: u32 = 0x4004_e502;

macro_rules! wire_structs {
    ($($(#[$meta:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $(pub $field: $type),* }
    )*};
}

wire_structs! {
    InHeader { len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32, total_extlen: u16, padding: u16 }
    OutHeader { len: u32, error: i32, unique: u64 }
    Attr {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    EntryOut {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32, attr_valid_nsec: u32, attr: Attr,
    }
    ForgetIn { nlookup: u64 }
    ForgetOne { nodeid: u64, nlookup: u64 }
    BatchForgetIn { count: u32, dummy: u32 }
    GetattrIn { getattr_flags: u32, dummy: u32, fh: u64 }
    AttrOut { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
    MknodIn { mode: u32, rdev: u32, umask: u32, padding: u32 }
    MkdirIn { mode: u32, umask: u32 }
    RenameIn { newdir: u64 }
    Rename2In { newdir: u64, flags: u32, padding: u32 }
    LinkIn { oldnodeid: u64 }
    SetattrIn {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32,
        mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    OpenIn { flags: u32, open_flags: u32 }
    CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    OpenOut { fh: u64, open_flags: u32, backing_id: u32 }
    BackingMap { fd: i32, flags: u32, padding: u64 }
    ReleaseIn { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    FlushIn { fh: u64, unused: u32, padding: u32, lock_owner: u64 }
    ReadIn { fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    WriteIn { fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    WriteOut { size: u32, padding: u32 }
    StatfsOut {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32, frsize: u32, padding: u32,
        spare: [u32; 6],
    }
    FsyncIn { fh: u64, fsync_flags: u32, padding: u32 }
    /// Sent as two words only, unless SETXATTR_EXT was negotiated.
    SetxattrIn { size: u32, flags: u32, setxattr_flags: u32, padding: u32 }
    GetxattrIn { size: u32, padding: u32 }
    GetxattrOut { size: u32, padding: u32 }
    AccessIn { mask: u32, padding: u32 }
    InitIn { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    InitInExt { flags2: u32, unused: [u32; 11] }
    InitOut {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion_threshold: u16, max_write: u32,
        time_gran: u32, max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32, request_timeout: u16,
        unused: [u16; 11],
    }
    InterruptIn { unique: u64 }
    IoctlIn { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32 }
    IoctlOut { result: i32, flags: u32, in_iovs: u32, out_iovs: u32 }
    FallocateIn { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    LseekIn { fh: u64, offset: u64, whence: u32, padding: u32 }
    LseekOut { offset: u64 }
    CopyFileRangeIn { fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64 }
    CopyFileRangeOut { bytes_copied: u64 }
    StatxIn { getattr_flags: u32, reserved: u32, fh: u64, sx_flags: u32, sx_mask: u32 }
    SxTime { tv_sec: i64, tv_nsec: u32, reserved: i32 }
    Statx {
        mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16, spare0: u16, ino: u64, size: u64,
        blocks: u64, attributes_mask: u64, atime: SxTime, btime: SxTime, ctime: SxTime, mtime: SxTime, rdev_major: u32,
        rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    StatxOut { attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2], stat: Statx }
    /// Followed by the name, padded to 8 bytes.
    Dirent { ino: u64, off: u64, namelen: u32, typ: u32 }
    ExtHeader { size: u32, typ: u32 }
    NotifyInvalInodeOut { ino: u64, off: i64, len: i64 }
    /// Followed by the bytes.
    NotifyStoreOut { nodeid: u64, offset: u64, size: u32, padding: u32 }
    /// Followed by the name and a NUL.
    NotifyInvalEntryOut { parent: u64, namelen: u32, flags: u32 }
    /// Followed by the name and a NUL.
    NotifyDeleteOut { parent: u64, child: u64, namelen: u32, padding: u32 }
    /// Followed by the ids of the nodes.
    NotifyPruneOut { count: u32, padding: u32, spare: u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_kernels() {
        assert_eq!(size_of::<InHeader>(), 40);
        assert_eq!(size_of::<OutHeader>(), 16);
        assert_eq!(size_of::<Attr>(), 88);
        assert_eq!(size_of::<EntryOut>(), 128);
        assert_eq!(size_of::<AttrOut>(), 104);
        assert_eq!(size_of::<SetattrIn>(), 88);
        assert_eq!(size_of::<WriteIn>(), 40);
        assert_eq!(size_of::<ReadIn>(), 40);
        assert_eq!(size_of::<StatfsOut>(), 80);
        assert_eq!(size_of::<InitIn>() + size_of::<InitInExt>(), 64);
        assert_eq!(size_of::<InitOut>(), 64);
        assert_eq!(size_of::<Statx>(), 256);
        assert_eq!(size_of::<StatxOut>(), 288);
        assert_eq!(size_of::<StatxIn>(), 24);
        assert_eq!(size_of::<CopyFileRangeIn>(), 56);
        assert_eq!(size_of::<IoctlIn>(), 32);
        assert_eq!(size_of::<FallocateIn>(), 32);
        assert_eq!(size_of::<BackingMap>(), 16);
    }
}
