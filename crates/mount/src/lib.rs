//! The file system of a borrower: passes through a directory (SOURCE), mounted over itself or
//! elsewhere. Page-cache misses arrive here as READs, and can be answered from lenders.
//!
//! Promises:
//! - A read through the mount returns the bytes that a read of the backing file would return at
//!   that moment. Every change through the mount is announced to the borrower before it is applied
//!   and before it is answered.
//! - Errors of the backing file system reach the caller unchanged.
//! - Nothing resolves a path through the mount itself. SOURCE is opened before mounting, and
//!   everything else is relative to it.
//! - Memory is bounded by the kernel's inodes and open files, and by named limits for everything
//!   else.
//!
//! This crate must never wait without a limit for the kernel to drop pages while it handles a
//! request. A READ must never wait for anything but the backing file system and changes in progress
//! (rule R10 of docs/design/consistency.md). Allocations must be bounded, because this daemon
//! serves the kernel's writeback.
//!
//! The mount can outlive its daemon. The daemon continuously records the state that a successor
//! needs, and a supervisor holds the descriptors. Requests that the kernel then sends again are
//! executed once.
//!
//! The folders, each of which lists its files in its `mod.rs`:
//! - `ops/`: the operations that the kernel requests
//! - `inode/`: the inodes and open files that the kernel knows
//! - `kernel/`: the kernel's caches of them, and dropping these
//! - `backing/`: the backing directory, and its file systems
//! - `takeover/`: the state that a successor of this daemon needs, and how it resumes
//! - `lifecycle/`: the mount from its start to its end
//!
//! The structure that they share is in `filesystem.rs`. All of them use `system.rs`, the system
//! calls that `rustix` lacks.
//!
//! The kernel handles locks (record locks and flock): POSIX_LOCKS and FLOCK_LOCKS are not
//! negotiated. So locks work among all users of this mount, but not against processes that lock the
//! backing file directly.
//!
//! The mount gives no file handles, so it cannot be exported over NFS (NO_EXPORT_SUPPORT, Linux
//! 6.9). FUSE makes a handle of the node id, which is meaningless once the kernel has forgotten the
//! inode. Such a handle would become stale as soon as caches are dropped.
//!
//! A mount made by root serves all users, and the kernel checks permissions. A mount made by an
//! ordinary user serves only that user.

mod backing;
mod filesystem;
mod inode;
mod kernel;
mod lifecycle;
mod ops;
mod system;
mod takeover;

/// Items for the supervisor: the state memory of a mount, and the descriptors that outlive a
/// daemon.
pub mod handover {
    pub use crate::takeover::{about, channel, inherited, layout};
}

pub use fuse::Served;
pub use kernel::images;
pub use lifecycle::config::{Config, WriteMode};
pub use lifecycle::error::Error;
pub use lifecycle::running::{JANITOR, Mount, MountInfo, NOTIFIER};
pub use lifecycle::starting::{detach, is_mounted, raise_limits, remount};
pub use lifecycle::workers::WORKERS_MAX;
pub use rustix::mount::MountFlags;
