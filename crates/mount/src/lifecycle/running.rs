//! A mount while it is served: its threads, its end, handing it over to a successor, and its
//! counters.

use crate::filesystem::Passthrough;
use crate::lifecycle::error::Error;
use crate::lifecycle::starting::failed;
use crate::lifecycle::workers::{WORKERS_MAX, Workers, start_threads};
use crate::system::{interrupt_thread, make_usr1_interrupt};
use crate::takeover::layout::header;
use borrower::Borrower;
use fuse::{Served, Session, mounting};
use parking_lot::{Condvar, Mutex};
use report::Files;
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often workers that wait for a request are interrupted, until all have left.
const INTERRUPT_AGAIN: Duration = Duration::from_millis(1);

/// Properties of a mount that are known before its first request is served.
#[derive(Clone, Copy, Debug)]
pub struct MountInfo {
    /// The mount's device number, as `st_dev`.
    pub device: u64,
}

pub(crate) struct Shared {
    pub(crate) filesystem: Passthrough,
    pub(crate) source: PathBuf,
    pub(crate) mountpoint: PathBuf,
    pub(crate) session: Session,
    pub(crate) workers: Mutex<Workers>,
    pub(crate) ended: Condvar,
}

/// A mount that is being served. Dropping it detaches it, unless it was left to a successor; uses
/// that are left are served to their end as long as the process lives.
pub struct Mount {
    pub(crate) shared: Arc<Shared>,
}

impl Mount {
    /// The backing directory, without symbolic links.
    pub fn source(&self) -> &Path {
        &self.shared.source
    }

    /// Where it is mounted, without symbolic links.
    pub fn mountpoint(&self) -> &Path {
        &self.shared.mountpoint
    }

    /// The borrower of the mount.
    pub fn borrower(&self) -> &Arc<Borrower> {
        &self.shared.filesystem.borrower
    }

    /// Waits until the mount has ended. It was unmounted and is no longer used, or it was handed
    /// over to a successor; the result tells which.
    pub fn wait(&self) -> Served {
        let mut workers = self.shared.workers.lock();
        while workers.running > 0 {
            self.shared.ended.wait(&mut workers);
        }
        if workers.left { Served::Left } else { Served::Gone }
    }

    /// Ends the mount. With `lazy`, it disappears at once, and ends with its last use. Without it,
    /// a use is [`Error::Busy`]. A mount that has already ended is not an error.
    pub fn unmount(&self, lazy: bool) -> Result<(), Error> {
        if self.shared.workers.lock().running == 0 {
            return Ok(());
        }
        let mountpoint = &self.shared.mountpoint;
        match mounting::unmount(mountpoint, lazy) {
            Ok(()) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                Err(Error::Busy { mountpoint: mountpoint.clone() })
            }
            // Another process has unmounted it.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            Err(error) => Err(failed("unmount", error)),
        }
    }

    /// Leaves the mount to a successor: requests that were read are answered, no more are read, and
    /// from the end of it ([`Mount::wait`]) on nothing changes any more what the successor is
    /// given. Returns whether all workers have left in time; else the mount is served on.
    ///
    /// # Errors
    /// When the workers cannot be interrupted.
    pub fn leave(&self, limit: Duration) -> io::Result<bool> {
        make_usr1_interrupt()?;
        let shared = &self.shared;
        let start = Instant::now();
        // Requests that are put off are a successor's from now on, or are handled again when this
        // has returned.
        let Some(_paused) = shared.session.pause_later(limit) else { return Ok(false) };
        shared.session.leave().store(true, Ordering::Release);
        let mut workers = shared.workers.lock();
        while workers.running > 0 {
            if start.elapsed() > limit && !workers.left {
                shared.session.leave().store(false, Ordering::Release);
                shared.ended.notify_all();
                return Ok(false);
            }
            for (thread, _) in workers.threads.iter().filter(|(_, reading)| reading.load(Ordering::Acquire)) {
                interrupt_thread(*thread);
            }
            shared.ended.wait_for(&mut workers, INTERRUPT_AGAIN);
        }
        Ok(workers.left)
    }

    /// Waits until the supervisor has all descriptors. Returns whether this happened within
    /// `limit`; otherwise a successor would lack some.
    pub fn is_kept(&self, limit: Duration) -> bool {
        self.shared.filesystem.keep.flush(limit)
    }

    /// Returns the counters of the work done so far.
    pub fn status(&self) -> Files {
        let filesystem = &self.shared.filesystem;
        let (written_files_pending, written_bytes_pending) = filesystem.dirty_ranges.pending();
        let workers = self.shared.workers.lock().running;
        Files {
            source: self.shared.source.to_string_lossy().into_owned(),
            mountpoint: self.shared.mountpoint.to_string_lossy().into_owned(),
            serving: workers > 0,
            workers: workers as u64,
            deferred_requests: self.shared.session.deferred() as u64,
            waiting_opens: self.shared.session.put_off() as u64,
            takeovers: filesystem.keep.memory.header(header::TAKEOVERS).load(Ordering::Relaxed),
            requests: filesystem.counters.requests(),
            direct_reads: filesystem.counters.direct_reads.get(),
            passed_opens: filesystem.counters.passed_opens.get(),
            requested_drops: filesystem.invalidations.requested(),
            read_bytes: filesystem.counters.read_bytes.get(),
            written_bytes: filesystem.counters.written_bytes.get(),
            open_handles: filesystem.handles.count() as u64,
            inodes: filesystem.inodes.count() as u64,
            inodes_with_descriptor: filesystem.inodes.descriptors().anchors() as u64,
            descriptors: filesystem.inodes.descriptors().used() as u64,
            descriptors_max: filesystem.inodes.descriptors().limit() as u64,
            watched_files: filesystem.external_changes.marks() as u64,
            written_files_pending: written_files_pending as u64,
            written_bytes_pending,
            undelivered_descriptors: filesystem.keep.undelivered() as u64,
        }
    }

    /// Starts the threads. `devices` are the device descriptors of the previous daemon's workers.
    pub(crate) fn begin(
        filesystem: Passthrough,
        source: PathBuf,
        mountpoint: PathBuf,
        session: &Session,
        threads: usize,
        devices: BTreeMap<u64, OwnedFd>,
    ) -> io::Result<Mount> {
        let (mut session, workers) = (session.clone(), Mutex::default());
        session.limit_workers(threads.max(WORKERS_MAX));
        let shared = Arc::new(Shared { filesystem, source, mountpoint, session, workers, ended: Condvar::new() });
        start_threads(&shared, threads, devices)?;
        Ok(Mount { shared })
    }

    /// Makes the kernel drop caches that may be outdated since the previous daemon. This must wait
    /// until the workers serve, because the drop sends dirty pages to them.
    pub(crate) fn drop_stale(&self) {
        let filesystem = &self.shared.filesystem;
        for (inode, number) in filesystem.inodes.stale() {
            filesystem.invalidations.request_all(&inode, number);
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = self.unmount(true);
    }
}

/// The name of the threads that make the kernel drop pages and attributes. After a kill, they may
/// not end before a successor has written the dirty pages.
pub const NOTIFIER: &str = "puma-notify";

/// The name of the thread that starts the writeback of backing files. After a kill, it may not end
/// before a slow disk has written some pages.
pub const JANITOR: &str = "puma-janitor";

/// The root's two descriptors.
pub(crate) struct Source {
    /// With O_PATH.
    pub(crate) root: OwnedFd,
    /// For reading.
    pub(crate) readable: OwnedFd,
}
