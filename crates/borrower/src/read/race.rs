//! Reads of the backing directory that race a late get. They run in threads of their own, because
//! the thread that waits for the get must go on waiting.

use crate::BackingFile;
use locks::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

/// The maximum number of reads at once. Further gets are not raced: gets are late together when the
/// lender is slow, and then the gate has to close.
const THREADS: usize = 2;

/// A read of the backing directory.
pub(crate) struct Race {
    done: OwnedFd,
    bytes: Mutex<Option<io::Result<Vec<u8>>>>,
}

impl Race {
    /// Takes the bytes, once they were read; fewer than requested only at the end of the file.
    pub(crate) fn take(&self) -> Option<io::Result<Vec<u8>>> {
        self.bytes.lock().take()
    }
}

impl AsFd for Race {
    /// The descriptor is readable when [`Race::take`] has a result.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.done.as_fd()
    }
}

struct Job {
    backing: Arc<dyn BackingFile>,
    offset: u64,
    len: usize,
    race: Arc<Race>,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    idle: usize,
    stopping: bool,
}

/// The threads that read.
#[derive(Default)]
pub(crate) struct Racers {
    jobs: Mutex<Jobs>,
    work: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Racers {
    /// Starts the threads.
    pub(crate) fn start(self: &Arc<Racers>) -> io::Result<()> {
        for number in 0..THREADS {
            let racers = self.clone();
            let thread =
                std::thread::Builder::new().name(format!("puma-hedge-{number}")).spawn(move || racers.run())?;
            self.threads.lock().push(thread);
        }
        Ok(())
    }

    /// Ends the threads, after their current reads.
    pub(crate) fn stop(&self) {
        self.jobs.lock().stopping = true;
        self.work.notify_all();
        std::mem::take(&mut *self.threads.lock()).into_iter().for_each(|thread| drop(thread.join()));
    }

    /// Starts to read `len` bytes at `offset`. Returns None if all threads are busy.
    pub(crate) fn race(&self, backing: Arc<dyn BackingFile>, offset: u64, len: usize) -> Option<Arc<Race>> {
        let done = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
        let mut jobs = self.jobs.lock();
        if jobs.waiting.len() >= jobs.idle {
            return None;
        }
        let race = Arc::new(Race { done, bytes: Mutex::new(None) });
        jobs.waiting.push_back(Job { backing, offset, len, race: race.clone() });
        self.work.notify_one();
        Some(race)
    }

    fn run(&self) {
        let mut jobs = self.jobs.lock();
        while !jobs.stopping {
            let Some(job) = jobs.waiting.pop_front() else {
                jobs.idle += 1;
                self.work.wait(&mut jobs);
                jobs.idle -= 1;
                continue;
            };
            drop(jobs);
            let mut bytes = vec![0; job.len];
            let read = job.backing.read_at(&mut bytes, job.offset).map(|read| {
                bytes.truncate(read);
                bytes
            });
            *job.race.bytes.lock() = Some(read);
            // The write can fail only by overflow of the counter.
            let _ = rustix::io::write(&job.race.done, &1u64.to_ne_bytes());
            jobs = self.jobs.lock();
        }
    }
}
