//! The file system: the structure that all operations work on. `ops/` has the operations.
//!
//! All of it works on descriptors below SOURCE, never on paths through the mount.

use crate::backing::crossing::Crossing;
use crate::backing::ledger::Ledger;
use crate::inode::Inodes;
use crate::inode::handle::Handles;
use crate::inode::stale::SentBack;
use crate::inode::sweep::Sweep;
use crate::kernel::beside::Beside;
use crate::kernel::invalidation::Invalidations;
use crate::kernel::passing::Connection;
use crate::lifecycle::config::WriteMode;
use crate::lifecycle::status::Counters;
use crate::ops::classes;
use crate::ops::credentials::Privilege;
use crate::ops::lookers::Lookers;
use crate::takeover::Keep;
use crate::takeover::resent::Resent;
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
/// | `inode/` | `inodes`, `handles`, `sent_back`, `sweep` |
/// | `kernel/` | `invalidations`, `beside`, `connection`, `attr_timeout`, `told_attr_timeout`, `entry_timeout`, `checks_lists`, `own_device` |
/// | `backing/` | `source`, `crossing`, `ledger` |
/// | `takeover/` | `keep`, `resent` |
/// | `ops/` | `lookers`, `privilege`, `write_mode` |
/// | `lifecycle/` | `counters` |
///
/// `borrower` is the crate of that name, to which lenders and the tap belong.
pub(crate) struct Passthrough {
    // inode/
    /// The inodes that the kernel knows.
    pub(crate) inodes: Inodes,
    /// The files and directories that are open.
    pub(crate) handles: Handles,
    /// Tasks that came by a stale name, and were told to look it up again.
    pub(crate) sent_back: SentBack,
    /// The search for files that were deleted beside the mount.
    pub(crate) sweep: Sweep,

    // kernel/
    /// What the kernel is to drop.
    pub(crate) invalidations: Invalidations,
    /// External changes.
    pub(crate) beside: Beside,
    /// Passes files through to the kernel.
    pub(crate) connection: Arc<Connection>,
    /// For how long the kernel believes attributes.
    pub(crate) attr_timeout: Duration,
    /// For how long it believes those of files whose external changes are told to us.
    pub(crate) told_attr_timeout: Duration,
    /// For how long it believes names.
    pub(crate) entry_timeout: Duration,
    /// Whether the kernel checks access control lists (FUSE_POSIX_ACL).
    pub(crate) checks_lists: bool,
    /// Our own device number: what is found below must never be ourselves again.
    pub(crate) own_device: u64,

    // backing/
    /// SOURCE, open for reading.
    pub(crate) source: OwnedFd,
    /// The file systems that are mounted in it.
    pub(crate) crossing: Crossing,
    /// Which written pages are to be dropped from its page cache.
    pub(crate) ledger: Ledger,

    // takeover/
    /// What is written down for a successor.
    pub(crate) keep: Arc<Keep>,
    /// Requests that the kernel sends again.
    pub(crate) resent: Resent,

    // ops/
    /// Tasks that look at what they list.
    pub(crate) lookers: Lookers,
    /// As whom the workers may act.
    pub(crate) privilege: Privilege,
    /// Whether the kernel caches writes.
    pub(crate) write_mode: WriteMode,

    // lifecycle/
    /// What was done so far.
    pub(crate) counters: Counters,

    /// Lends the pages, and gets them back.
    pub(crate) borrower: Arc<Borrower>,
}

impl fuse::Filesystem for Passthrough {
    fn handle(&self, request: &Request<'_>, reply: Reply<'_>, scratch: &mut [u8]) {
        self.counters.count(request.header.opcode);
        let attempt = self.resent.attempt(request);
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
    /// A request was answered, or the kernel did not take the answer.
    pub(crate) fn answered(&self, opcode: u32, sent: Result<(), Errno>) {
        self.keep.memory.served();
        if let Err(errno) = sent {
            // It gave the request up, or the mount is gone.
            tracing::debug!(opcode = abi::opcode::name(opcode), %errno, "an answer was not taken");
        }
    }
}
