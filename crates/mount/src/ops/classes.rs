//! What each request may have to wait for below, hence which of its user's shares it counts to
//! ([`fuse::Class`]).
//!
//! What must never happen: that a request counts which another one waits for that is being handled.
//! So forgetting never does, and a change counts until it is done.

use fuse::{Class, Operation, abi};

/// The class of a request that is no READ. None: it waits for nothing, or somebody waits for it.
pub(crate) fn class(operation: &Operation<'_>) -> Option<Class> {
    Some(match operation {
        Operation::Lookup { .. }
        | Operation::Getattr(_)
        | Operation::Statx(_)
        | Operation::Readlink
        | Operation::Statfs
        | Operation::Getxattr { .. }
        | Operation::Listxattr { .. }
        | Operation::Opendir(_)
        | Operation::Readdir(_)
        | Operation::Readdirplus(_)
        | Operation::Lseek(_) => Class::Look,
        Operation::Open(_) => Class::Open,
        Operation::Setattr(_)
        | Operation::Symlink { .. }
        | Operation::Mknod { .. }
        | Operation::Mkdir { .. }
        | Operation::Unlink { .. }
        | Operation::Rmdir { .. }
        | Operation::Rename { .. }
        | Operation::Link { .. }
        | Operation::Create { .. }
        | Operation::Tmpfile { .. }
        | Operation::Flush(_)
        | Operation::Fsync(_)
        | Operation::Fsyncdir(_)
        | Operation::Setxattr { .. }
        | Operation::Removexattr { .. }
        | Operation::Ioctl { .. }
        | Operation::Fallocate(_)
        | Operation::CopyFileRange { .. }
        | Operation::Syncfs => Class::Change,
        Operation::Write { args, .. } if args.write_flags & abi::WRITE_CACHE != 0 => Class::Writeback,
        Operation::Write { .. } => Class::Change,
        Operation::Release(_) => Class::Close,
        Operation::Read(_)
        | Operation::Releasedir(_)
        | Operation::Forget { .. }
        | Operation::BatchForget { .. }
        | Operation::Access(_)
        | Operation::Interrupt(_)
        | Operation::Init { .. }
        | Operation::Destroy
        | Operation::Unknown => return None,
    })
}
