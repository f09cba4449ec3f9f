//! Selects the leader: the one worker that reads requests, as long as it is quick. In this module
//! the right to read is the *lead*.
//!
//! If all workers read at once, the kernel would wake another one for each request. Its caches
//! would be cold, and a thread that was just about to read would sleep instead. So one worker has
//! the *lead*. It reads a request, handles it, and reads the next. The others wait:
//!
//! ```text
//!            pass (about to wait), or leave
//!   held ───────────────────────────────────▶ free ──▶ held by the first to come
//!    │ ▲  request, finished, request, ...
//!    └─┘
//!   held, one request for longer than a look of the watcher ──▶ held by the watcher
//! ```
//!
//! - A worker that is about to wait calls [`about_to_wait`], and another worker is called at once.
//! - For other requests one of the waiting workers, the *watcher*, checks whether the request is
//!   still the one of its last look. If so, it takes the lead over. So a request that waits for
//!   another one always finds a worker that reads, as long as one worker handles nothing.
//! - While no requests come, no worker watches. The next request calls a watcher again.
//!
//! A worker that was blocked waits for the lead as all others do when it has finished. But if
//! requests wait just then, it reads one without the lead. Two workers that read at once are
//! harmless. The invariant: at least one worker reads while another one waits for the lead.

use crate::workforce::Workforce;
use locks::spinning::{AdaptiveSpin, SPIN_MAX};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::{Cell, RefCell};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The time between two looks of the watcher: at first, and while all requests are quick. A request
/// that blocks without a call of [`about_to_wait`] delays the next one for at most twice as long.
const LOOK_FIRST: Duration = Duration::from_micros(50);
const LOOK_MAX: Duration = Duration::from_micros(200);

/// The time between two looks of the watcher while no requests come, and the number of such looks
/// after which no worker watches any more.
const LOOK_IDLE: Duration = Duration::from_millis(1);
const LOOKS_IDLE_MAX: u32 = 16;

/// The state of the lead: free, or used for a request; else its holder reads.
const FREE: u64 = 0b01;
const HANDLING: u64 = 0b10;
/// The holder takes further requests while one is handled.
const GATHERING: u64 = 0b100;
/// The rest of the word counts requests and changes of holder. So no two states during a mount's
/// life are equal.
const ONE: u64 = 0b1000;

/// The lead of one session, and the workers that wait for it.
#[derive(Default)]
pub(crate) struct Leader {
    word: AtomicU64,
    /// The spin budgets of a worker that waits for a request; and of one that waits for a request
    /// or another event.
    spin: AdaptiveSpin,
    spin_beside: AdaptiveSpin,
    /// Whether there is a watcher.
    watched: AtomicBool,
    pub(crate) waiting: Mutex<Waiting>,
    /// For sleeping workers.
    pub(crate) called: Condvar,
    /// For the watcher.
    passed: Condvar,
    /// For [`Leader::workforce_change`].
    pub(crate) short: Condvar,
    /// The number of requests that were read without the lead.
    read_without: AtomicU64,
}

#[derive(Default)]
pub(crate) struct Waiting {
    sleeping: usize,
    /// A worker was called and has not come yet.
    is_called: bool,
    pub(crate) workers: Workforce,
}

thread_local! {
    /// The leader and the device of this thread's worker, and its lead while no other worker has
    /// taken it.
    static OWN: RefCell<Option<(Arc<Leader>, Arc<OwnedFd>)>> = const { RefCell::new(None) };
    static LEAD: Cell<Option<u64>> = const { Cell::new(None) };
}

/// A handler calls this when it is about to wait for a disk, a network or another request: another
/// worker reads meanwhile. Does nothing on other threads, and nothing the second time.
pub fn about_to_wait() {
    if let Some(lead) = LEAD.take() {
        OWN.with_borrow(|own| own.as_ref().map(|(leader, _)| leader.pass(lead)));
    }
}

/// Must be called when the handler of a request has read another one: it is not blocked by the
/// first.
pub(crate) fn went_on() {
    if let Some(lead) = LEAD.take() {
        LEAD.set(OWN.with_borrow(|own| own.as_ref().and_then(|(leader, _)| leader.went_on(lead))));
    }
}

/// Waits until `other` is readable or there is a request, for at most `limit`. Returns whether
/// there is a request. Does not wait without the lead to read it.
pub(crate) fn wait_beside(other: BorrowedFd<'_>, limit: Duration) -> bool {
    let Some(lead) = LEAD.take() else { return false };
    OWN.with_borrow(|own| {
        let Some((leader, device)) = own else { return false };
        let Some(resting) = leader.rests(lead) else { return false };
        let look = |limit: Duration| {
            let mut fds = [PollFd::new(device, PollFlags::IN), PollFd::from_borrowed_fd(other, PollFlags::IN)];
            let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
            let found = poll(&mut fds, Some(&limit));
            // The end of the connection is not a request.
            let is_request = fds[0].revents() == PollFlags::IN && fds[1].revents().is_empty();
            (found != Ok(0)).then_some(is_request)
        };
        let found = leader.spin_beside.poll(SPIN_MAX.min(limit), || look(Duration::ZERO)).or_else(|| look(limit));
        LEAD.set(Some(leader.requested(resting)));
        found == Some(true)
    })
}

/// A handler calls this when it would rather keep its processor busy than sleep for a moment.
/// Returns whether there is nothing else to do. If requests wait, the call counts as
/// [`about_to_wait`].
pub(crate) fn has_time() -> bool {
    let is_idle = || OWN.with_borrow(|own| own.as_ref().is_some_and(|(_, device)| is_quiet(device)));
    let has_time = LEAD.get().is_some_and(|lead| lead & GATHERING != 0 || is_idle());
    if !has_time {
        about_to_wait();
    }
    has_time
}

/// Returns whether no request waits on that device.
fn is_quiet(device: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(device, PollFlags::IN)], Some(&now)) == Ok(0)
}

impl Leader {
    /// Returns a free lead, for the first worker that comes.
    pub(crate) fn new() -> Leader {
        Leader { word: AtomicU64::new(FREE), ..Leader::default() }
    }

    /// Waits for the lead. Returns None if this worker is not needed, and should end.
    fn wait(&self) -> Option<u64> {
        let mut waiting = self.waiting.lock();
        waiting.workers.idle += 1;
        let lead = self.wait_idle(&mut waiting);
        if waiting.workers.no_longer_idle() {
            self.short.notify_one();
        }
        lead
    }

    fn wait_idle(&self, waiting: &mut MutexGuard<'_, Waiting>) -> Option<u64> {
        loop {
            let word = self.word.load(Ordering::SeqCst);
            if word & FREE != 0 {
                if let Some(lead) = self.take(word) {
                    return Some(lead);
                }
            } else if word & HANDLING != 0 && !self.watched.swap(true, Ordering::SeqCst) {
                let lead = self.watch(waiting);
                if lead.is_some() {
                    return lead;
                }
            } else if waiting.workers.may_end() {
                // The lead is not free, and another idle worker takes it when it is.
                return None;
            } else {
                waiting.sleeping += 1;
                self.called.wait(waiting);
                waiting.sleeping -= 1;
                waiting.is_called = false;
            }
        }
    }

    /// Takes the lead, if the word is still `word`.
    fn take(&self, word: u64) -> Option<u64> {
        let lead = (word & !(FREE | HANDLING | GATHERING)) + ONE;
        self.word.compare_exchange(word, lead, Ordering::SeqCst, Ordering::SeqCst).ok().map(|_| lead)
    }

    /// Watches the holder of the lead, until the lead is taken over, or is free, or no requests
    /// come any more.
    fn watch(&self, waiting: &mut MutexGuard<'_, Waiting>) -> Option<u64> {
        let mut seen = self.word.load(Ordering::SeqCst);
        let (mut look, mut looks_idle) = (LOOK_FIRST, 0);
        let lead = loop {
            self.passed.wait_for(waiting, look);
            let word = self.word.load(Ordering::SeqCst);
            if word & FREE != 0 || word == seen && word & HANDLING != 0 {
                break self.take(word);
            }
            if word != seen {
                (look, looks_idle) = ((look * 2).min(LOOK_MAX), 0);
            } else if looks_idle < LOOKS_IDLE_MAX {
                (look, looks_idle) = (LOOK_IDLE, looks_idle + 1);
            } else {
                break None;
            }
            seen = word;
        };
        // Before `wait` reads the word again: a request after that finds no watcher, or `wait` sees
        // it.
        self.watched.store(false, Ordering::SeqCst);
        lead
    }

    /// Wakes one of the waiting workers, unless one is coming already.
    fn call(&self) {
        let mut waiting = self.waiting.lock();
        if waiting.sleeping == 0 {
            self.passed.notify_one();
        } else if !waiting.is_called {
            waiting.is_called = true;
            self.called.notify_one();
        }
    }

    /// The worker with the lead has read a request.
    fn requested(&self, lead: u64) -> u64 {
        let lead = (lead + ONE) | HANDLING;
        // No other worker changes the word of a holder that reads.
        self.word.store(lead, Ordering::SeqCst);
        if !self.watched.load(Ordering::SeqCst) {
            self.call();
        }
        lead
    }

    /// The holder waits for an event while it handles a request, and reads the next request as soon
    /// as there is one. Returns None if another worker has the lead meanwhile.
    fn rests(&self, lead: u64) -> Option<u64> {
        let resting = lead & !HANDLING;
        self.word.compare_exchange(lead, resting, Ordering::SeqCst, Ordering::SeqCst).ok().map(|_| resting)
    }

    /// Returns whether the holder of the lead takes all available requests.
    fn is_gathering(&self) -> bool {
        self.word.load(Ordering::SeqCst) & (GATHERING | FREE) == GATHERING
    }

    /// Another request was read while one is handled. Returns None if another worker has the lead
    /// meanwhile.
    fn went_on(&self, lead: u64) -> Option<u64> {
        let next = (lead + ONE) | GATHERING;
        self.word.compare_exchange(lead, next, Ordering::SeqCst, Ordering::SeqCst).ok().map(|_| next)
    }

    /// The request is handled. Returns None if another worker has the lead meanwhile.
    fn finished(&self, lead: u64) -> Option<u64> {
        let reading = lead & !(HANDLING | GATHERING);
        self.word.compare_exchange(lead, reading, Ordering::SeqCst, Ordering::SeqCst).ok().map(|_| reading)
    }

    /// Returns the number of requests, and of changes of the lead, since the session began.
    pub(crate) fn requests_read(&self) -> u64 {
        self.word.load(Ordering::Relaxed) / ONE + self.read_without.load(Ordering::Relaxed)
    }

    /// Gives the lead up for any worker.
    fn pass(&self, lead: u64) {
        let free = (lead & !(HANDLING | GATHERING)) | FREE;
        if self.word.compare_exchange(lead, free, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.call();
        }
    }
}

/// A worker's place among those of its session. When dropped, it gives up the lead.
pub(crate) struct Place {
    leader: Arc<Leader>,
    device: Arc<OwnedFd>,
    lead: Option<u64>,
}

impl Place {
    /// Returns the place of this thread, which reads from that device.
    pub(crate) fn new(leader: &Arc<Leader>, device: &Arc<OwnedFd>) -> Place {
        OWN.set(Some((leader.clone(), device.clone())));
        leader.waiting.lock().workers.serving += 1;
        Place { leader: leader.clone(), device: device.clone(), lead: None }
    }

    /// Waits for the lead, unless this worker still has it, or there is enough to do for two: then
    /// sleeping would only cost time. Returns false if this worker is not needed any more, and
    /// should end.
    pub(crate) fn wait(&mut self) -> bool {
        if self.lead.is_none() && (self.leader.is_gathering() || is_quiet(&self.device)) {
            self.lead = self.leader.wait();
            return self.lead.is_some();
        }
        true
    }

    /// Returns the spin budget for waiting for the next request, if this worker has the lead.
    pub(crate) fn spin(&self) -> Option<&AdaptiveSpin> {
        self.lead.is_some().then_some(&self.leader.spin)
    }

    /// A request was read, and `handle` handles it.
    pub(crate) fn while_handling(&mut self, handle: impl FnOnce()) {
        match self.lead.take() {
            Some(lead) => LEAD.set(Some(self.leader.requested(lead))),
            None => drop(self.leader.read_without.fetch_add(1, Ordering::Relaxed)),
        }
        handle();
        self.lead = LEAD.take().and_then(|lead| self.leader.finished(lead));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(lead) = LEAD.take().or(self.lead) {
            self.leader.pass(lead);
        }
        self.leader.waiting.lock().workers.serving -= 1;
        OWN.set(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    /// Returns a device from which no request ever comes.
    fn device() -> Arc<OwnedFd> {
        Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap())
    }

    /// Requests of which some wait for later ones, and workers that serve them as a session's
    /// workers do.
    #[derive(Default)]
    struct Kernel {
        queue: Mutex<(VecDeque<Task>, bool)>,
        changed: Condvar,
        served: AtomicUsize,
    }

    #[derive(Clone, Copy)]
    enum Task {
        Quick,
        /// The handler blocks until this number of requests was served. It may call
        /// [`about_to_wait`], or not.
        WaitsFor {
            served: usize,
            announces: bool,
        },
    }

    impl Kernel {
        fn push(&self, task: Task) {
            self.queue.lock().0.push_back(task);
            self.changed.notify_all();
        }

        fn end(&self) {
            self.queue.lock().1 = true;
            self.changed.notify_all();
        }

        /// Returns the next task; None at the end.
        fn read(&self) -> Option<Task> {
            let mut queue = self.queue.lock();
            loop {
                if let Some(task) = queue.0.pop_front() {
                    return Some(task);
                }
                if queue.1 {
                    return None;
                }
                self.changed.wait(&mut queue);
            }
        }

        fn wait_until_served(&self, count: usize) {
            let mut queue = self.queue.lock();
            while self.served.load(Ordering::SeqCst) < count {
                self.changed.wait(&mut queue);
            }
        }

        /// Returns by how many different threads the requests were handled.
        fn serve(self: &Arc<Kernel>, workers: usize) -> thread::JoinHandle<usize> {
            let leader = Arc::new(Leader::new());
            let serve = {
                let kernel = self.clone();
                move || {
                    let mut place = Place::new(&leader, &device());
                    let mut busy = false;
                    loop {
                        assert!(place.wait());
                        let Some(task) = kernel.read() else { return busy };
                        busy = true;
                        place.while_handling(|| {
                            if let Task::WaitsFor { served, announces } = task {
                                if announces {
                                    about_to_wait();
                                }
                                kernel.wait_until_served(served);
                            }
                            let _queue = kernel.queue.lock();
                            kernel.served.fetch_add(1, Ordering::SeqCst);
                            kernel.changed.notify_all();
                        });
                    }
                }
            };
            let threads: Vec<_> = (0..workers).map(|_| thread::spawn(serve.clone())).collect();
            thread::spawn(move || threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum())
        }
    }

    #[test]
    fn quick_requests_are_handled_by_few() {
        let kernel = Arc::new(Kernel::default());
        let workers = kernel.serve(64);
        for count in 1..=1000 {
            kernel.push(Task::Quick);
            kernel.wait_until_served(count);
        }
        kernel.end();
        // One worker is enough; on a busy machine others may take over.
        let busy = workers.join().unwrap();
        assert!(busy < 60, "{busy} of 64 workers had something to do");
    }

    /// All workers but one are held up by requests that wait for the last one.
    #[test]
    fn requests_that_wait_for_others_find_a_worker() {
        const WORKERS: usize = 6;
        for announces in [true, false] {
            for round in 0..50 {
                let kernel = Arc::new(Kernel::default());
                let workers = kernel.serve(WORKERS);
                let before = round % 3;
                (0..before).for_each(|_| kernel.push(Task::Quick));
                // Each task waits for all that come behind it.
                let held_up = WORKERS - 1;
                for _ in 0..held_up {
                    kernel.push(Task::WaitsFor { served: before + 1, announces });
                }
                kernel.push(Task::Quick);
                kernel.wait_until_served(before + held_up + 1);
                kernel.end();
                assert!(workers.join().unwrap() >= held_up);
            }
        }
    }

    #[test]
    fn a_worker_that_waits_for_another_event_gets_requests() {
        let (leader, device, other) = (Arc::new(Leader::new()), device(), device());
        let wait = |limit_ms| wait_beside(other.as_fd(), Duration::from_millis(limit_ms));
        assert!(!wait(60_000), "a worker without the turn does not wait");
        let mut place = Place::new(&leader, &device);
        place.wait();
        place.while_handling(|| {
            assert!(!wait(1), "there is nothing");
            rustix::io::write(&device, &1u64.to_ne_bytes()).unwrap();
            assert!(wait(60_000));
            assert!(!leader.is_gathering());
            went_on();
            assert!(wait(60_000) && leader.is_gathering() && has_time());
            rustix::io::write(&other, &1u64.to_ne_bytes()).unwrap();
            assert!(!wait(60_000), "the other descriptor comes first");
            assert!(leader.is_gathering() && leader.word.load(Ordering::SeqCst) & HANDLING != 0);
        });
        assert!(!leader.is_gathering() && place.lead.is_some());
        place.while_handling(|| {
            assert!(!has_time(), "a request waits, and this one takes none");
            went_on(); // No worker has the lead: nothing happens.
            assert!(!wait(60_000) && !leader.is_gathering());
        });
    }

    #[test]
    fn the_lead_of_a_worker_that_ended_is_free() {
        let leader = Arc::new(Leader::new());
        for _ in 0..2 {
            let leader = leader.clone();
            let worker = thread::spawn(move || {
                let mut place = Place::new(&leader, &device());
                place.wait();
                place.while_handling(|| panic!("beyond what a session catches"));
            });
            assert!(worker.join().is_err());
        }
        let mut place = Place::new(&leader, &device());
        place.wait();
        assert!(place.lead.is_some());
        drop(place);
        about_to_wait(); // No worker has the lead: nothing happens.
    }
}
