//! Passthrough: if the pool is of no use to a file, the kernel reads the backing file by itself
//! (FUSE passthrough, Linux 6.9). This is as fast as without a mount, and the pages are in the page
//! cache of the backing file.
//!
//! A passed open lasts until it is closed. So passthrough begins only with opens for reading, and
//! only if nothing is lost by it:
//! - no lender can be used, and the mount's page cache has nothing of the file;
//! - or the file is read in long streams over and over, and neither the cache nor a lender has room
//!   for them ([`borrower::Usefulness`]). This decision holds for a while ([`STREAMED_KEPT`]).
//!
//! Invariants:
//! - All opens of a file are of the same kind: the kernel refuses anything else (fs/fuse/iomode.c).
//!   The first open decides, and all later ones follow, also those for writing. The daemon may
//!   count a file as open that the kernel has closed, but never the other way round. So a handle
//!   counts from before the answer to the open until after its RELEASE.
//! - A mapping that was made while a file was passed maps the backing file, and outlives the close
//!   (backing_file_mmap, fs/backing-file.c). The mount does not see stores through it. So a passed
//!   file stays passed while another process may have the backing file open for writing. (The
//!   daemon's own writes are in the page cache of the backing file: with the writeback cache the
//!   kernel passes nothing.)
//! - While a file is passed, its READs (readahead(2) still sends some) do not reach the borrower,
//!   because the borrower does not see its writes. The end of passthrough is treated like an
//!   external change of the file.
//! - A backing id outlives the daemon, so it is recorded before the kernel uses it. If a daemon is
//!   killed before that, the id stays with the connection: one file stays open for each such kill.

use crate::backing::reserve::Spending;
use crate::inode::Inode;
use crate::inode::handle::OpenFile;
use crate::ops::credentials::WithoutFsetid;
use crate::system;
use crate::takeover::layout::node;
use crate::takeover::memory::Memory;
use borrower::{Borrower, Usefulness};
use fuse::{Errno, Negotiated, abi, backing};
use rustix::fd::OwnedFd;
use rustix::fs::OFlags;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the decision holds that a file is only streamed. Then the file is observed again, for
/// two passes.
const STREAMED_KEPT: Duration = Duration::from_secs(3600);

/// The kind of the present opens of a file, or of the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum IoMode {
    /// The file was not open since the kernel knows it.
    #[default]
    Unopened,
    /// The mount's page cache has its pages.
    Cached,
    /// The kernel reads and writes the backing file.
    Passed,
}

/// How a file is open, by how many, and since when so.
#[derive(Default)]
pub(crate) struct PassthroughState {
    opens: usize,
    io_mode: IoMode,
    since: Option<Instant>,
    /// While it is passed and open.
    backing: Option<Backing>,
}

impl PassthroughState {
    /// The restored state of a file of the previous daemon.
    pub(crate) fn restored(number: Option<u32>, was_passed: bool, connection: &Arc<Connection>) -> PassthroughState {
        let backing = number.map(|number| Backing { number, connection: connection.clone() });
        let io_mode = if backing.is_some() || was_passed { IoMode::Passed } else { IoMode::Cached };
        PassthroughState { io_mode, since: Some(Instant::now()), backing, opens: 0 }
    }

    /// Whether the file is open.
    pub(crate) fn is_open(&self) -> bool {
        self.opens > 0
    }
}

/// The passthrough state of the connection to the kernel.
pub(crate) struct Connection {
    device: Arc<OwnedFd>,
    memory: Arc<Memory>,
    /// Whether no new file is passed, because passthrough is off, or the kernel does not support
    /// it.
    refuses: AtomicBool,
}

impl Connection {
    /// Whether files are passed is `wanted`, and was negotiated.
    pub(crate) fn new(session: &fuse::Session, memory: &Arc<Memory>, wanted: bool) -> Arc<Connection> {
        let Negotiated { capabilities, .. } = session.negotiated();
        let refuses = AtomicBool::new(!wanted || capabilities & abi::init::PASSTHROUGH == 0);
        Arc::new(Connection { device: session.device().clone(), memory: memory.clone(), refuses })
    }

    /// Registers the backing file with the kernel. `None` if it cannot be passed through.
    fn back(self: &Arc<Connection>, fd: &OwnedFd) -> Option<Backing> {
        // The kernel writes with the credentials of this thread. For every caller, set-id bits must
        // be cleared, and reserved blocks must not be taken.
        let _fsetid = WithoutFsetid::begin().ok()?;
        let _spending = Spending::for_anybody();
        match backing::open(&*self.device, fd) {
            Ok(number) => Some(Backing { number, connection: self.clone() }),
            Err(errno) => {
                // Files of other backing file systems may work.
                if errno != Errno::LOOP {
                    tracing::debug!(%errno, "files are not passed through");
                    self.refuses.store(true, Ordering::Relaxed);
                }
                None
            }
        }
    }
}

/// A backing file that the kernel knows by its id.
struct Backing {
    number: u32,
    connection: Arc<Connection>,
}

impl Drop for Backing {
    fn drop(&mut self) {
        if !self.connection.memory.is_frozen() {
            // It fails if the mount is gone, and then the id is gone, too.
            let _ = backing::close(&*self.connection.device, self.number);
        }
    }
}

impl Inode {
    /// Counts an open; `fd` is open on the backing file. Returns the id of the backing file if the
    /// open is passed through.
    pub(crate) fn opened(
        &self,
        fd: &OwnedFd,
        asked: OFlags,
        connection: &Arc<Connection>,
        borrower: &Borrower,
    ) -> Result<Option<u32>, Errno> {
        let mut passthrough = self.passthrough.lock();
        if passthrough.opens == 0
            && let Some(file) = &self.file
        {
            // Opens for writing and direct I/O do not begin passthrough.
            let may_begin = asked & (OFlags::ACCMODE | OFlags::DIRECT | OFlags::TRUNC) == OFlags::RDONLY
                && !connection.refuses.load(Ordering::Relaxed);
            if passthrough
                .since
                .is_some_and(|since| passthrough.io_mode == IoMode::Passed && since.elapsed() > STREAMED_KEPT)
            {
                file.forget_passes();
            }
            let begins = may_begin
                && match borrower.usefulness(file) {
                    Usefulness::Useful => false,
                    Usefulness::NoLender => passthrough.io_mode != IoMode::Cached,
                    Usefulness::Streamed => true,
                };
            let alone = || match asked & OFlags::ACCMODE == OFlags::RDONLY {
                true => system::nobody_else_writes(fd),
                false => system::nobody_else_has_open(fd),
            };
            let stays = passthrough.io_mode == IoMode::Passed && !begins && !alone();
            passthrough.backing = (begins || stays).then(|| connection.back(fd)).flatten();
            if stays && passthrough.backing.is_none() {
                return Err(Errno::BUSY);
            }
            let io_mode = if passthrough.backing.is_some() { IoMode::Passed } else { IoMode::Cached };
            if let Some(slot) = &self.slot {
                slot.record_backing(passthrough.backing.as_ref().map(|backing| backing.number));
                if io_mode == IoMode::Passed {
                    slot.set_flag(node::PASSED);
                }
            }
            if passthrough.io_mode == IoMode::Passed && io_mode == IoMode::Cached {
                borrower.suspect(file);
            }
            if passthrough.io_mode != io_mode {
                (passthrough.io_mode, passthrough.since) = (io_mode, Some(Instant::now()));
            }
        }
        Ok(self.one_more(&mut passthrough))
    }

    /// Records an open that a previous daemon has answered.
    pub(crate) fn was_open(&self) -> Option<u32> {
        self.one_more(&mut self.passthrough.lock())
    }

    fn one_more(&self, passthrough: &mut PassthroughState) -> Option<u32> {
        passthrough.opens += 1;
        passthrough.backing.as_ref().map(|backing| backing.number)
    }

    /// Records that an open has ended.
    pub(crate) fn closed(&self) {
        let mut passthrough = self.passthrough.lock();
        passthrough.opens -= 1;
        self.end_unused(&mut passthrough);
    }

    /// Called when all opens have been restored: returns the backing ids of files without an open.
    pub(crate) fn all_are_open(&self) {
        self.end_unused(&mut self.passthrough.lock());
    }

    fn end_unused(&self, passthrough: &mut PassthroughState) {
        if passthrough.opens > 0 {
            return;
        }
        let Some(backing) = passthrough.backing.take() else { return };
        // First, so that no successor uses the id of another file.
        if let Some(slot) = self.slot.as_ref().filter(|_| !backing.connection.memory.is_frozen()) {
            slot.record_backing(None);
        }
    }
}

impl OpenFile {
    /// The answer to an open. With `keep`, the kernel may keep its cached pages.
    pub(crate) fn answer(&self, fh: u64, keep: bool, flushes: bool) -> abi::OpenOut {
        let mut open_flags = 0;
        for (flag, holds) in [
            (abi::fopen::PASSTHROUGH, self.backing.is_some()),
            (abi::fopen::KEEP_CACHE, keep && self.backing.is_none()),
            (abi::fopen::NOFLUSH, !flushes),
        ] {
            if holds {
                open_flags |= flag;
            }
        }
        abi::OpenOut { fh, open_flags, backing_id: self.backing.unwrap_or(0) }
    }
}
