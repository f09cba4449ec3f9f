//! Requests that are put off because they wait for an event in the backing file system of which the
//! daemon gets no notification. An example is the lease of another process on a file (fcntl,
//! F_SETLEASE).
//!
//! Instead of waiting in a worker, a handler puts such a request off ([`put_off`]). One thread
//! handles it again, from its beginning, after pauses that grow ([`crate::Session::try_again`]).
//! Meanwhile the request holds no worker and no token. It is unanswered, so the kernel sends it
//! again to a successor.
//!
//! The invariant: a request that is put off has not changed anything.

use crate::admission::{self, Deferred, Lane, Who};
use crate::reply::Reply;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The maximum number of requests that are put off. As with the tokens of a class, one user may
/// have at most as many as are free. Each costs an open(2) of the backing file every [`PAUSE_MAX`].
pub const PUT_OFF_MAX: usize = 1024;

/// The first pause before a request that was put off is handled again. Each further pause is twice
/// the one before.
pub const PAUSE_FIRST: Duration = Duration::from_millis(1);
/// The longest pause before a request that was put off is handled again.
pub const PAUSE_MAX: Duration = Duration::from_millis(100);

/// The requests that are put off.
pub(crate) struct Later {
    state: Mutex<State>,
    changed: Condvar,
    /// Held while a request is handled again.
    trying: Mutex<()>,
}

struct State {
    /// The number of requests of each user, including those that are being handled.
    users: Lane,
    /// The requests by the time when they are due. The second number distinguishes requests that
    /// are due at the same time.
    waiting: BTreeMap<(Instant, u64), Again>,
    count: u64,
    is_closed: bool,
}

/// A request that was put off, and the pause before it is due.
pub(crate) struct Again {
    pub(crate) request: Deferred,
    pause: Duration,
}

impl Default for Later {
    fn default() -> Later {
        let users = Lane::new(PUT_OFF_MAX);
        let state = State { users, waiting: BTreeMap::new(), count: 0, is_closed: false };
        Later { state: Mutex::new(state), changed: Condvar::new(), trying: Mutex::default() }
    }
}

impl Later {
    /// Returns whether one more request of that user may be put off. If so, it counts until
    /// [`Later::done`].
    pub(crate) fn reserve(&self, who: Who) -> bool {
        let mut state = self.state.lock();
        let has_room = !state.is_closed && state.users.has_room(who);
        if has_room {
            state.users.take(who);
        }
        has_room
    }

    /// Puts a request off, for the first time.
    pub(crate) fn add(&self, request: Deferred) {
        self.wait_with(Again { request, pause: PAUSE_FIRST });
    }

    /// Puts a request off once more.
    pub(crate) fn add_again(&self, again: Again) {
        self.wait_with(Again { pause: (again.pause * 2).min(PAUSE_MAX), ..again });
    }

    fn wait_with(&self, again: Again) {
        let mut state = self.state.lock();
        state.count += 1;
        let at = (Instant::now() + again.pause, state.count);
        state.waiting.insert(at, again);
        drop(state);
        self.changed.notify_one();
    }

    /// A request of that user is answered.
    pub(crate) fn done(&self, who: Who) {
        self.state.lock().users.give_back(who);
    }

    /// Waits for a request that is due. Returns None if closed. The caller handles the request
    /// again before it drops the guard. For one thread only.
    pub(crate) fn next(&self) -> Option<(Again, MutexGuard<'_, ()>)> {
        loop {
            let mut state = self.state.lock();
            loop {
                match state.waiting.first_key_value().map(|((due, _), _)| *due) {
                    _ if state.is_closed => return None,
                    None => self.changed.wait(&mut state),
                    Some(due) if due > Instant::now() => drop(self.changed.wait_until(&mut state, due)),
                    Some(_) => break,
                }
            }
            // A worker that puts a request off must not wait for the other lock.
            drop(state);
            let trying = self.trying.lock();
            let mut state = self.state.lock();
            if state.is_closed {
                return None;
            }
            if let Some((_, again)) = state.waiting.pop_first() {
                return Some((again, trying));
            }
        }
    }

    /// No request is put off or handled again from now on.
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// While the guard exists, no request is handled again. Returns None if one was still being
    /// handled after `limit`.
    pub(crate) fn pause(&self, limit: Duration) -> Option<MutexGuard<'_, ()>> {
        self.trying.try_lock_for(limit)
    }

    /// Returns the number of requests that are put off.
    pub(crate) fn count(&self) -> usize {
        self.state.lock().users.held()
    }
}

thread_local! {
    /// Whether the request that this thread handles was put off before, and whether it was put off
    /// now.
    static IS_AGAIN: Cell<bool> = const { Cell::new(false) };
    static IS_PUT_OFF: Cell<bool> = const { Cell::new(false) };
}

/// Puts off the request that this thread handles. The request must not have changed anything; it is
/// handled again in some milliseconds. Returns the reply if too many requests are put off already.
pub fn put_off(reply: Reply<'_>) -> Option<Reply<'_>> {
    if !IS_AGAIN.get() && !admission::reserve_later() {
        return Some(reply);
    }
    reply.none();
    IS_PUT_OFF.set(true);
    None
}

/// This thread is about to handle a request, which may have been put off before.
pub(crate) fn begin(is_again: bool) {
    IS_AGAIN.set(is_again);
    IS_PUT_OFF.set(false);
}

/// Returns whether the request was put off.
pub(crate) fn was_put_off() -> bool {
    IS_PUT_OFF.take()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Class;
    use std::sync::Arc;

    fn user(uid: u32) -> Who {
        Who::new(None, uid, 0)
    }

    fn request(uid: u32) -> Deferred {
        let device = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        Deferred { class: Class::Open, who: user(uid), bytes: vec![], device: Arc::new(device) }
    }

    #[test]
    fn one_user_leaves_room_for_others_and_pauses_grow() {
        let later = Later::default();
        let take = |uid| (0..PUT_OFF_MAX).take_while(|_| later.reserve(user(uid))).count();
        assert_eq!([take(7), take(8)], [PUT_OFF_MAX / 2, PUT_OFF_MAX / 4]);
        later.add(request(7));
        let (mut again, guard) = later.next().unwrap();
        drop(guard);
        for expected in [2, 4, 8, 16, 32, 64, 100, 100] {
            later.add_again(again);
            again = later.next().unwrap().0;
            assert_eq!(again.pause, Duration::from_millis(expected));
        }
        assert_eq!(later.count(), PUT_OFF_MAX / 4 * 3);
        later.done(user(7));
        assert_eq!(later.count(), PUT_OFF_MAX / 4 * 3 - 1);
        later.add_again(again);
        let pause = later.pause(Duration::ZERO).unwrap();
        assert!(later.pause(Duration::ZERO).is_none());
        std::thread::scope(|scope| {
            let next = scope.spawn(|| later.next().is_none());
            assert!(later.reserve(user(9)), "a worker that puts a request off does not wait");
            later.close();
            drop(pause);
            assert!(next.join().unwrap(), "the remaining requests are for a successor");
        });
    }
}
