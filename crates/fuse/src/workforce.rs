//! The number of workers that a session needs: one more when all are blocked, fewer when some were
//! idle for long.
//!
//! As long as one worker is idle, a blocked request delays no other (see [`crate::leader`]). So a
//! *shortage* means that no worker is idle, and that requests take longer than a moment. More
//! workers would not make quick requests quicker. This module counts; the owner of the session
//! starts and ends threads.

use crate::leader::Leader;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long all workers must be blocked before one more is started.
const GROW_AFTER: Duration = Duration::from_millis(1);

/// The change in the number of workers that a session needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkforceChange {
    /// One more worker: all are blocked.
    More,
    /// No more workers. This number of workers was idle for the whole period, and is not needed.
    Fewer(usize),
    /// The session has ended.
    Closed,
}

/// The workers of a session, by state.
#[derive(Default)]
pub(crate) struct Workforce {
    /// Workers that were created and do not serve yet.
    starting: usize,
    /// Workers that serve.
    pub(crate) serving: usize,
    /// Workers that wait to become the leader.
    pub(crate) idle: usize,
    /// The smallest `idle` of this period.
    idle_least: usize,
    /// The number of idle workers that should end.
    surplus: usize,
    /// Whether [`Leader::workforce_change`] waits for a shortage.
    is_awaited: bool,
    is_closed: bool,
}

impl Workforce {
    /// Returns whether no worker is free to read the next request, or about to be.
    fn is_short(&self) -> bool {
        self.idle == 0 && self.starting == 0
    }

    /// Returns whether there is a shortage that must wake [`Leader::workforce_change`].
    fn is_noticed(&self) -> bool {
        self.is_awaited && self.is_short()
    }

    /// Counts a worker as no longer idle. Returns whether [`Leader::workforce_change`] must be
    /// woken.
    pub(crate) fn no_longer_idle(&mut self) -> bool {
        self.idle -= 1;
        self.idle_least = self.idle_least.min(self.idle);
        self.is_noticed()
    }

    /// Returns whether an idle worker may end, and reduces the surplus then. The last idle worker
    /// never may.
    pub(crate) fn may_end(&mut self) -> bool {
        let may = self.surplus > 0 && self.idle > 1;
        self.surplus -= usize::from(may);
        may
    }
}

/// A worker that was created and does not serve yet.
pub(crate) struct Starting(Arc<Leader>);

impl Starting {
    pub(crate) fn new(leader: &Arc<Leader>) -> Starting {
        leader.waiting.lock().workers.starting += 1;
        Starting(leader.clone())
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting.lock();
        waiting.workers.starting -= 1;
        if waiting.workers.is_noticed() {
            self.0.short.notify_one();
        }
    }
}

impl Leader {
    /// Waits for a shortage or a surplus of workers, for at most `period`. Without `can_grow` a
    /// shortage does not count.
    pub(crate) fn workforce_change(&self, period: Duration, can_grow: bool) -> WorkforceChange {
        let deadline = Instant::now() + period;
        let mut waiting = self.waiting.lock();
        waiting.workers.idle_least = waiting.workers.idle;
        while !waiting.workers.is_closed && Instant::now() < deadline {
            if !(can_grow && waiting.workers.is_short()) {
                waiting.workers.is_awaited = can_grow;
                let _ = self.short.wait_until(&mut waiting, deadline);
                waiting.workers.is_awaited = false;
                continue;
            }
            let read_before = self.requests_read();
            let _ = self.short.wait_for(&mut waiting, GROW_AFTER);
            let read = self.requests_read() - read_before;
            if waiting.workers.is_short() && read < waiting.workers.serving as u64 && !waiting.workers.is_closed {
                waiting.workers.surplus = 0;
                return WorkforceChange::More;
            }
        }
        match waiting.workers.is_closed {
            true => WorkforceChange::Closed,
            // One idle worker always stays, for new requests.
            false => WorkforceChange::Fewer(waiting.workers.idle_least.saturating_sub(1)),
        }
    }

    /// Makes `count` idle workers end.
    pub(crate) fn retire(&self, count: usize) {
        self.waiting.lock().workers.surplus = count;
        if count > 0 {
            self.called.notify_all();
        }
    }

    /// Ends [`Leader::workforce_change`].
    pub(crate) fn close(&self) {
        self.waiting.lock().workers.is_closed = true;
        self.short.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leader::{Place, about_to_wait};
    use parking_lot::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread;

    const PERIOD: Duration = Duration::from_secs(30);

    /// The state that the workers of the test share.
    #[derive(Clone)]
    struct Shared {
        leader: Arc<Leader>,
        requests: Arc<Mutex<Receiver<()>>>,
        held: Sender<()>,
        /// Each message ends the handling of one request.
        words: Arc<Mutex<Receiver<()>>>,
        /// Whether a worker that has ended was retired.
        ended: Sender<bool>,
    }

    impl Shared {
        fn start_worker(&self) {
            let (own, starting) = (self.clone(), Starting::new(&self.leader));
            let device = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            thread::spawn(move || {
                let mut place = Place::new(&own.leader, &Arc::new(device));
                drop(starting);
                while place.wait() {
                    if own.requests.lock().recv().is_err() {
                        return own.ended.send(false);
                    }
                    place.while_handling(|| {
                        about_to_wait();
                        own.held.send(()).unwrap();
                        own.words.lock().recv().unwrap();
                    });
                }
                own.ended.send(true)
            });
        }
    }

    #[test]
    fn workers_come_when_all_are_held_up_and_go_when_idle() {
        let (request, requests) = channel();
        let (held, is_held) = channel();
        let (word, words) = channel();
        let (ended, has_ended) = channel();
        let leader = Arc::new(Leader::new());
        let [requests, words] = [requests, words].map(|receiver| Arc::new(Mutex::new(receiver)));
        let shared = Shared { leader: leader.clone(), requests, held, words, ended };
        (0..3).for_each(|_| shared.start_worker());
        for _ in 0..2 {
            request.send(()).unwrap();
            is_held.recv_timeout(PERIOD).unwrap();
        }
        assert_eq!(
            leader.workforce_change(Duration::from_millis(5), false),
            WorkforceChange::Fewer(0),
            "no more workers are possible"
        );
        assert_eq!(leader.workforce_change(PERIOD, true), WorkforceChange::More, "only one worker is left to read");
        shared.start_worker();
        assert_eq!(
            leader.workforce_change(Duration::from_millis(5), true),
            WorkforceChange::Fewer(0),
            "one idle worker always stays"
        );
        (0..2).for_each(|_| word.send(()).unwrap());
        while leader.waiting.lock().workers.idle < 3 {
            thread::yield_now();
        }
        assert_eq!(leader.workforce_change(Duration::from_millis(5), true), WorkforceChange::Fewer(2));
        leader.retire(2);
        assert_eq!([(); 2].map(|()| has_ended.recv_timeout(PERIOD).unwrap()), [true; 2]);
        drop(request);
        assert_eq!([(); 2].map(|()| has_ended.recv_timeout(PERIOD).unwrap()), [false; 2], "these serve until the end");
        leader.close();
        assert_eq!(leader.workforce_change(PERIOD, true), WorkforceChange::Closed);
    }
}
