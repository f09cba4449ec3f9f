//! The file system of a borrower: a directory (SOURCE), passed through in full, mounted beside or
//! over itself, so that misses of the page cache arrive here as READs and can be answered from
//! lenders.
//!
//! Promises:
//! - A read through the mount returns what a read of the directory below would return at that
//!   moment; every change that goes through the mount is announced to the borrower before it is
//!   applied and before it is answered.
//! - Errors of the file system below reach the caller as they are.
//! - Nothing resolves a path through the mount itself: SOURCE is opened before mounting and all
//!   else is relative to it.
//! - Memory is bounded: by what the kernel remembers (inodes, open files), and by named limits for
//!   the rest.
//!
//! What must never happen in it: waiting without a limit for the kernel to drop pages while a
//! request is being handled; a READ that waits for anything but the backing file system and the
//! changes that it is making (rule R10 of docs/design/consistency.md); allocation without bound,
//! for this daemon serves the kernel's writeback.
//!
//! The mount can outlive its daemon: what a successor needs is written down as it arises, and
//! descriptors are held by a keeper. Requests that the kernel sends again then are done once.
//!
//! The folders, each of which lists its files in its `mod.rs`:
//! - `ops/`: the operations that the kernel asks for
//! - `inode/`: the inodes and open files that it knows
//! - `kernel/`: what it caches of them, and must drop
//! - `backing/`: the directory below, and its file systems
//! - `takeover/`: what a successor of this daemon needs, and how it goes on
//! - `lifecycle/`: the mount from its start to its end
//!
//! The structure that they share is in `filesystem.rs`. All of them use `system.rs`, the system
//! calls that `rustix` lacks.
//!
//! Locks (record and flock) are left to the kernel: POSIX_LOCKS and FLOCK_LOCKS are not negotiated,
//! so they work among all users of this mount, but not against processes that lock the directory
//! below beside it.
//!
//! The mount gives no file handles, so it cannot be exported over NFS (NO_EXPORT_SUPPORT, Linux
//! 6.9). FUSE makes a handle of the node id, which means nothing once the kernel has forgotten the
//! inode: such a handle would be stale as soon as caches are dropped.
//!
//! As root the mount is for everybody, with the kernel checking permissions; as an ordinary user it
//! is that user's alone.

mod backing;
mod filesystem;
mod inode;
mod kernel;
mod lifecycle;
mod ops;
mod system;
mod takeover;

/// What a keeper uses: the state memory of a mount, and the descriptors that outlive a daemon.
pub mod handover {
    pub use crate::takeover::{about, channel, given, layout};
}

pub use fuse::Served;
pub use kernel::images;
pub use lifecycle::config::{Config, WriteMode};
pub use lifecycle::error::Error;
pub use lifecycle::running::{JANITOR, Mount, MountInfo, NOTIFIER};
pub use lifecycle::starting::{detach, is_mounted, raise_limits, remount};
pub use lifecycle::status::Status;
pub use lifecycle::workers::WORKERS_MAX;
pub use rustix::mount::MountFlags;
