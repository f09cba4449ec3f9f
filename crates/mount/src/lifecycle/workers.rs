//! The threads of a mount: the workers, whose number grows while requests block, and threads with
//! one task each.
//!
//! Workers (`--threads`, or more) read the kernel's requests. If all of them are blocked, by a slow
//! disk or a frozen file system, another one is started, up to [`WORKERS_MAX`]. Additional workers
//! end after [`IDLE_PERIOD`] without work. A request that could be answered at once must never wait
//! for requests that cannot.

use crate::kernel::invalidation::AWAITED_THREADS;
use crate::lifecycle::running::{JANITOR, NOTIFIER, Shared};
use crate::ops::credentials::prepare_thread;
use crate::system::thread_id;
use crate::takeover::channel::Held;
use crate::takeover::replay;
use fuse::{Served, Worker, WorkforceChange};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Limit on the workers, unless `--threads` is larger. Each handles one request at a time, and
/// needs some 1.1 MiB.
pub const WORKERS_MAX: usize = 128;

/// Workers beyond `--threads` end after so long without work. This is long compared with the
/// fraction of a millisecond that starting one takes.
const IDLE_PERIOD: Duration = Duration::from_secs(10);

/// Pause after a worker that could not be started.
const ADD_AGAIN: Duration = Duration::from_secs(1);

/// Pause between two checks whether the workers must still leave.
const LEAVING_AGAIN: Duration = Duration::from_millis(10);

/// The workers that have not ended.
#[derive(Default)]
pub(crate) struct Workers {
    pub(crate) running: usize,
    /// The workers that can be interrupted: their threads, and whether each waits for a request.
    pub(crate) threads: Vec<(i32, Arc<AtomicBool>)>,
    /// Number of workers that read no more requests and wait for the others to do the same.
    leaving: usize,
    /// Whether all have left, so that a successor can take the mount over.
    pub(crate) left: bool,
}

type Work = Box<dyn FnOnce(&Shared) + Send>;

/// Starts the threads of a mount, with `threads` workers. `devices` are the device descriptors of
/// the previous daemon's workers.
pub(crate) fn start_threads(
    shared: &Arc<Shared>,
    threads: usize,
    mut devices: BTreeMap<u64, OwnedFd>,
) -> io::Result<()> {
    let (session, keep) = (&shared.session, &shared.filesystem.keep);
    let mut workers = Vec::new();
    for number in 1..=threads as u64 {
        let worker = match devices.remove(&number) {
            Some(device) => session.worker_on(device)?,
            None => {
                let worker = session.worker()?;
                // Closing it would end the requests that were read from it.
                keep.hold(Held::Device(number), worker.device());
                worker
            }
        };
        workers.push(worker);
    }
    let (of_attributes, of_mounts) = (session.notifier(), session.notifier());
    let deliver_awaited =
        || (NOTIFIER, Box::new(|shared: &Shared| shared.filesystem.invalidations.deliver_awaited()) as Work);
    let threads_of_mount = [
        (NOTIFIER, Box::new(|shared: &Shared| shared.filesystem.invalidations.deliver()) as Work),
        (
            NOTIFIER,
            Box::new(move |shared: &Shared| shared.filesystem.external_changes.run(&shared.filesystem, &of_attributes)),
        ),
        (
            "puma-mounts",
            Box::new(move |shared: &Shared| shared.filesystem.crossing.follow(&shared.filesystem, &of_mounts)),
        ),
        ("puma-sweep", Box::new(|shared: &Shared| shared.filesystem.purge.run(&shared.filesystem))),
        (JANITOR, Box::new(|shared: &Shared| shared.filesystem.dirty_ranges.tend(&shared.filesystem.inodes))),
    ];
    for (name, work) in threads_of_mount.into_iter().chain((0..AWAITED_THREADS).map(|_| deliver_awaited())) {
        let shared = shared.clone();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _ = crate::system::set_io_flusher();
            let _ = crate::system::stand_among_descriptors();
            work(&shared);
        })?;
    }
    let of_thread = shared.clone();
    thread::Builder::new().name("puma-opens".to_owned()).spawn(move || of_thread.try_again())?;
    shared.workers.lock().running = threads;
    for (index, worker) in workers.into_iter().enumerate() {
        if let Err(error) = start_worker(shared, worker) {
            (index..threads).for_each(|_| shared.worker_ended());
            return Err(error);
        }
    }
    let shared = shared.clone();
    thread::Builder::new().name("puma-workers".to_owned()).spawn(move || shared.adjust_workers(threads)).map(drop)
}

fn start_worker(shared: &Arc<Shared>, worker: Worker) -> io::Result<()> {
    let of_thread = shared.clone();
    thread::Builder::new().name("puma-fuse".to_owned()).spawn(move || of_thread.work(worker)).map(drop)
}

impl Shared {
    fn work(&self, mut worker: Worker) {
        let thread = thread_id();
        replay::prepare_thread(&self.filesystem.keep.memory);
        let _own_thread = self.filesystem.external_changes.own_thread();
        self.workers.lock().threads.push((thread, worker.reading().clone()));
        if let Err(error) = prepare_thread(self.filesystem.privilege) {
            // Without its own umask and ids a worker would create files as another user.
            tracing::error!(%error, "a worker cannot act as its callers, and stops; run as root, or as an ordinary user");
        } else {
            loop {
                match worker.serve(&self.filesystem) {
                    Ok(Served::Left) if !self.all_leave() => continue,
                    Ok(_) => {}
                    Err(error) => {
                        tracing::error!(%error, "a worker stops: reading requests from the kernel failed");
                    }
                }
                break;
            }
        }
        self.workers.lock().threads.retain(|(other, _)| *other != thread);
        self.worker_ended();
    }

    /// Handles postponed requests again.
    fn try_again(&self) {
        replay::prepare_thread(&self.filesystem.keep.memory);
        let _own_thread = self.filesystem.external_changes.own_thread();
        let tried = prepare_thread(self.filesystem.privilege).map_err(io::Error::from);
        if let Err(error) = tried.and_then(|()| self.session.try_again(&self.filesystem)) {
            tracing::warn!(%error, "opens that wait for a lease of another process hold workers");
            self.session.close_later();
        }
    }

    /// Starts workers while all are blocked, and ends idle ones, until the mount ends. At least
    /// `always` workers stay.
    fn adjust_workers(self: &Arc<Shared>, always: usize) {
        let most = always.max(WORKERS_MAX);
        loop {
            if self.session.leave().load(Ordering::Acquire) {
                // More workers do not make the blocked ones finish earlier.
                thread::sleep(LEAVING_AGAIN);
            }
            let running = self.workers.lock().running;
            match self.session.workforce_change(IDLE_PERIOD, running < most) {
                WorkforceChange::More => {
                    if let Err(error) = self.add_worker() {
                        tracing::warn!(%error, "cannot start another worker, though all wait for the backing directory");
                        thread::sleep(ADD_AGAIN);
                    }
                }
                WorkforceChange::Fewer(idle) => self.session.retire(idle.min(running.saturating_sub(always))),
                WorkforceChange::Closed => return,
            }
        }
    }

    fn add_worker(self: &Arc<Shared>) -> io::Result<()> {
        let worker = self.session.extra_worker()?;
        {
            let mut workers = self.workers.lock();
            if workers.running == 0 || self.session.leave().load(Ordering::Acquire) {
                return Ok(());
            }
            workers.running += 1;
        }
        start_worker(self, worker).inspect_err(|_| self.worker_ended())
    }

    /// Called by a worker that must leave. Waits until all workers have stopped reading, or until
    /// the mount continues. Returns whether all have left.
    fn all_leave(&self) -> bool {
        let mut workers = self.workers.lock();
        workers.leaving += 1;
        self.ended.notify_all();
        while self.session.leave().load(Ordering::Acquire) && workers.leaving < workers.running && !workers.left {
            self.ended.wait(&mut workers);
        }
        workers.left |= self.session.leave().load(Ordering::Acquire);
        workers.leaving -= usize::from(!workers.left);
        workers.left
    }

    fn worker_ended(&self) {
        let mut workers = self.workers.lock();
        workers.running -= 1;
        self.ended.notify_all();
        if workers.running == 0 {
            self.session.close_later();
            if workers.left {
                self.filesystem.keep.hand_over();
            }
            self.session.close_workforce();
            self.filesystem.crossing.close();
            self.filesystem.dirty_ranges.close();
            self.filesystem.purge.close();
            self.filesystem.external_changes.close();
            self.filesystem.invalidations.close();
            self.filesystem.inodes.forget_all();
        }
    }
}
