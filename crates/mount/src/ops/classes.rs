//! Classes of requests ([`fuse::Class`]): the parts of the backing file system that each may have
//! to wait for. A request counts towards its user's share of workers for its class.
//!
//! A request that another request in progress waits for must never count. So forgetting never
//! counts, and a change counts until it is done.

use fuse::{Class, Operation, abi};

/// The class of a request other than READ. `None` if the request waits for nothing, or if another
/// request waits for it.
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
