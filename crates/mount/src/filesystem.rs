//! The file system: the structure that all operations use. `ops/` has the operations.
//!
//! Operations use descriptors within SOURCE, never paths through the mount.

use crate::backing::crossing::Crossing;
use crate::backing::dirty_ranges::DirtyRanges;
use crate::inode::Inodes;
use crate::inode::handle::Handles;
use crate::inode::purge::Purge;
use crate::inode::revalidation::Revalidations;
use crate::kernel::external_changes::ExternalChanges;
use crate::kernel::invalidation::Invalidations;
use crate::kernel::passthrough::Connection;
use crate::lifecycle::config::WriteMode;
use crate::lifecycle::status::Counters;
use crate::ops::classes;
use crate::ops::credentials::Privilege;
use crate::ops::readdirplus::ReaddirplusHints;
use crate::takeover::Keep;
use crate::takeover::replay::Replays;
use borrower::Borrower;
use fuse::{Class, Errno, More, Reply, Request, abi};
use rustix::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// A directory, passed through.
///
/// The folders of this crate meet here. Each adds its operations in an `impl Passthrough` of its
/// own, and keeps its state in fields of its own:
///
/// | folder | fields |
/// |---|---|
/// | `inode/` | `inodes`, `handles`, `revalidations`, `purge` |
/// | `kernel/` | `invalidations`, `external_changes`, `connection`, `attr_timeout`, `reported_attr_timeout`, `entry_timeout`, `checks_lists`, `own_device` |
/// | `backing/` | `source`, `crossing`, `dirty_ranges` |
/// | `takeover/` | `keep`, `replays` |
/// | `ops/` | `readdirplus_hints`, `privilege`, `write_mode` |
/// | `lifecycle/` | `counters` |
///
/// `borrower` is the crate of that name, to which lenders and the tap belong.
pub(crate) struct Passthrough {
    // inode/
    /// The inodes that the kernel knows.
    pub(crate) inodes: Inodes,
    /// The files and directories that are open.
    pub(crate) handles: Handles,
    /// Tasks that used a stale name, and got ESTALE so that they look it up again.
    pub(crate) revalidations: Revalidations,
    /// The search for files that were deleted externally.
    pub(crate) purge: Purge,

    // kernel/
    /// Invalidations that the kernel still has to apply.
    pub(crate) invalidations: Invalidations,
    /// External changes.
    pub(crate) external_changes: ExternalChanges,
    /// Passes files through to the kernel.
    pub(crate) connection: Arc<Connection>,
    /// How long the kernel may cache attributes.
    pub(crate) attr_timeout: Duration,
    /// How long it may cache attributes of files whose external changes fanotify reports.
    pub(crate) reported_attr_timeout: Duration,
    /// How long it may cache names.
    pub(crate) entry_timeout: Duration,
    /// Whether the kernel checks access control lists (FUSE_POSIX_ACL).
    pub(crate) checks_lists: bool,
    /// The mount's own device number: a lookup in SOURCE must never lead back into the mount.
    pub(crate) own_device: u64,

    // backing/
    /// SOURCE, open for reading.
    pub(crate) source: OwnedFd,
    /// The file systems that are mounted in it.
    pub(crate) crossing: Crossing,
    /// Written pages that are to be dropped from the page cache of the backing files.
    pub(crate) dirty_ranges: DirtyRanges,

    // takeover/
    /// The state that is recorded for a successor.
    pub(crate) keep: Arc<Keep>,
    /// Requests that the kernel sends again.
    pub(crate) replays: Replays,

    // ops/
    /// Tasks that use the attributes of the entries that they list.
    pub(crate) readdirplus_hints: ReaddirplusHints,
    /// The users as which workers may act.
    pub(crate) privilege: Privilege,
    /// Whether the kernel caches writes.
    pub(crate) write_mode: WriteMode,

    // lifecycle/
    /// Counters of the work done so far.
    pub(crate) counters: Counters,

    /// Stores pages at lenders, and gets them back.
    pub(crate) borrower: Arc<Borrower>,
}

impl fuse::Filesystem for Passthrough {
    fn handle(&self, request: &Request<'_>, reply: Reply<'_>, scratch: &mut [u8]) {
        self.counters.count(request.header.opcode);
        let attempt = self.replays.attempt(request);
        let result = self.dispatch(request, &attempt, reply, scratch);
        attempt.answered();
        self.answered(request.header.opcode, result);
    }

    fn class(&self, request: &Request<'_>) -> Option<Class> {
        classes::class(&request.operation)
    }

    fn file_system(&self, nodeid: u64) -> u32 {
        match self.crossing.is_on() {
            true => self.inodes.get(nodeid).map_or(0, |inode| inode.device.number()),
            false => 0,
        }
    }

    fn read<'a>(&self, request: Request<'static>, reply: Reply<'a>, more: &mut More<'a>, scratch: &mut [u8]) {
        self.read_all(request, reply, more, scratch);
    }
}

impl Passthrough {
    /// Records that a request was answered, or that the kernel refused the answer.
    pub(crate) fn answered(&self, opcode: u32, sent: Result<(), Errno>) {
        self.keep.memory.served();
        if let Err(errno) = sent {
            // The kernel has given up the request, or the mount is gone.
            tracing::debug!(opcode = abi::opcode::name(opcode), %errno, "the kernel refused an answer");
        }
    }
}
