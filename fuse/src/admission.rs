//! Admission: how many workers the requests of one user may hold at a time.
//!
//! A request that may have to wait for the backing file system takes a *token* of its [`Class`] for its user. Without a token it is deferred:
//! the worker goes on, and a worker that has finished something takes the request up when there is room. The thresholds are dynamic: a user may
//! hold as many tokens of a class as nobody holds. So one user gets half of a class, and there is always something left for the next one. Tokens of all
//! classes are fewer than the workers, so that what waits for nothing (READs that lenders have, FORGET) finds a worker at all times.
//!
//! No request that was begun waits for one that is deferred: a deferred request has not changed anything, and nothing is
//! locked for it here. Deferred requests of one user and class are taken up in the order in which they came.

use crate::later::{self, Later};
use crate::turns::about_to_wait;
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a request may have to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Names, attributes and directories.
    Look,
    /// Opening a file: its lease may be somebody's.
    Open,
    /// Bytes that are read from the backing file. Taken when a READ turns out to need them ([`admit_read`]).
    Read,
    /// Changes, which wait for each other, for the disk, and for a frozen file system to be thawed.
    Change,
}

/// Tenths of the tokens that each class has.
const TENTHS: [usize; 4] = [2, 2, 3, 3];

/// Workers for which there is no token.
pub const RESERVED_WORKERS: usize = 8;

/// Requests that are deferred at the most. Each belongs to a thread that waits, or to the kernel's read-ahead or writeback.
pub const DEFERRED_MAX: usize = 16_384;

/// Bytes of deferred requests at the most: WRITEs have up to 1 MiB, which the caller has in memory, too.
pub const DEFERRED_BYTES_MAX: usize = 512 << 20;

/// A request that waits for a token. It must be answered on the descriptor that it was read from.
pub(crate) struct Deferred {
    pub(crate) class: Class,
    pub(crate) uid: u32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) device: Arc<OwnedFd>,
}

/// The tokens of one class.
#[derive(Default)]
pub(crate) struct Lane {
    tokens: usize,
    held: usize,
    /// Users that hold tokens, and how many.
    users: Vec<(u32, usize)>,
    /// Users with deferred requests, those first that were served longest ago.
    deferred: VecDeque<(u32, VecDeque<Deferred>)>,
}

impl Lane {
    /// With so many tokens.
    pub(crate) fn new(tokens: usize) -> Lane {
        Lane { tokens, ..Lane::default() }
    }

    /// Tokens that are held.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Whether the user may take one more.
    pub(crate) fn has_room(&self, uid: u32) -> bool {
        let own = self.users.iter().find(|(user, _)| *user == uid).map_or(0, |(_, held)| *held);
        own < self.tokens - self.held
    }

    /// The user takes one.
    pub(crate) fn take(&mut self, uid: u32) {
        self.held += 1;
        match self.users.iter_mut().find(|(user, _)| *user == uid) {
            Some((_, held)) => *held += 1,
            None => self.users.push((uid, 1)),
        }
    }

    /// The user gives one back.
    pub(crate) fn give_back(&mut self, uid: u32) {
        let Some(at) = self.users.iter().position(|(user, _)| *user == uid) else { return };
        self.held -= 1;
        self.users[at].1 -= 1;
        if self.users[at].1 == 0 {
            self.users.swap_remove(at);
        }
    }

    /// The next deferred request that there is room for, with a token taken for it.
    fn next(&mut self) -> Option<Deferred> {
        let at = self.deferred.iter().position(|(uid, _)| self.has_room(*uid))?;
        let (uid, mut queue) = self.deferred.remove(at)?;
        let next = queue.pop_front();
        if !queue.is_empty() {
            self.deferred.push_back((uid, queue));
        }
        self.take(uid);
        next
    }
}

/// The tokens of a session.
pub struct Admission {
    lanes: [Mutex<Lane>; TENTHS.len()],
    deferred: AtomicUsize,
    deferred_bytes: AtomicUsize,
    pub(crate) later: Later,
}

impl Admission {
    /// For a session that has `workers` at the most. 0: any number.
    pub(crate) fn new(workers: usize) -> Admission {
        // Who says nothing of it has no limit.
        let tokens = if workers == 0 { usize::MAX / 16 } else { workers.saturating_sub(RESERVED_WORKERS) };
        let lane = |tenths: usize| Mutex::new(Lane::new((tokens * tenths / 10).max(1)));
        let (deferred, deferred_bytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Admission { lanes: TENTHS.map(lane), deferred, deferred_bytes, later: Later::default() }
    }

    /// Requests that wait for a token.
    pub fn deferred(&self) -> usize {
        self.deferred.load(Ordering::Relaxed)
    }

    fn lane(&self, class: Class) -> &Mutex<Lane> {
        &self.lanes[class as usize]
    }

    /// Takes a token. False: the user has enough, or others of its requests wait for one.
    pub(crate) fn enter(&self, class: Class, uid: u32) -> bool {
        let mut lane = self.lane(class).lock();
        let enters = lane.has_room(uid) && !lane.deferred.iter().any(|(user, _)| *user == uid);
        if enters {
            lane.take(uid);
        }
        enters
    }

    /// Gives a token back. The caller calls [`Admission::next`] afterwards.
    pub(crate) fn leave(&self, class: Class, uid: u32) {
        self.lane(class).lock().give_back(uid);
    }

    /// Defers a request. The caller calls [`Admission::next`] afterwards. False: there are too many, and nothing is done.
    pub(crate) fn defer(&self, request: Deferred) -> bool {
        let (uid, len) = (request.uid, request.bytes.len());
        let bytes = self.deferred_bytes.load(Ordering::Relaxed);
        if self.deferred() >= DEFERRED_MAX || bytes + len > DEFERRED_BYTES_MAX {
            return false;
        }
        let mut lane = self.lane(request.class).lock();
        match lane.deferred.iter_mut().find(|(user, _)| *user == uid) {
            Some((_, queue)) => queue.push_back(request),
            None => lane.deferred.push_back((uid, VecDeque::from([request]))),
        }
        self.deferred_bytes.fetch_add(len, Ordering::Relaxed);
        self.deferred.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// The next deferred request that there is room for. It has a token, which is to be given back when it was handled.
    pub(crate) fn next(&self) -> Option<Deferred> {
        if self.deferred.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let next = self.lanes.iter().find_map(|lane| lane.lock().next())?;
        self.deferred.fetch_sub(1, Ordering::SeqCst);
        self.deferred_bytes.fetch_sub(next.bytes.len(), Ordering::Relaxed);
        Some(next)
    }
}

thread_local! {
    /// Of a worker's thread: the tokens, the user whose request it handles, the class of the token that it holds, and whether it was refused one.
    static OWN: RefCell<Option<Arc<Admission>>> = const { RefCell::new(None) };
    static UID: Cell<u32> = const { Cell::new(0) };
    static HELD: Cell<Option<(Class, u32)>> = const { Cell::new(None) };
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// To be called by a handler of READs that is about to wait for the backing file: another worker reads meanwhile. False: this user's READs hold
/// enough workers; the handler gives up, and defers the READ ([`crate::More::defer`]). Always true elsewhere.
pub fn admit_read() -> bool {
    about_to_wait();
    if HELD.get().is_some() {
        return true;
    }
    let uid = UID.get();
    let admitted = OWN.with_borrow(|own| own.as_ref().is_none_or(|own| own.enter(Class::Read, uid)));
    match admitted {
        true if OWN.with_borrow(Option::is_some) => HELD.set(Some((Class::Read, uid))),
        true => {}
        false => REFUSED.set(true),
    }
    admitted
}

/// Whether the request that this thread handles may be put off ([`crate::put_off`]). Then it
/// counts.
pub(crate) fn reserve_later() -> bool {
    OWN.with_borrow(|own| own.as_ref().is_some_and(|own| own.later.reserve(UID.get())))
}

/// Whether [`admit_read`] has refused since the last call.
pub fn take_refusal() -> bool {
    REFUSED.take()
}

/// This thread's worker is about to handle requests of that session.
pub(crate) fn begin(admission: &Arc<Admission>) {
    OWN.set(Some(admission.clone()));
}

/// This thread's worker handles a request of that user, and holds a token for it, if it does.
pub(crate) fn handles(uid: u32, held: Option<Class>) {
    UID.set(uid);
    REFUSED.set(false);
    later::begin(false);
    if let Some(class) = held {
        HELD.set(Some((class, uid)));
    }
}

/// The request is handled.
pub(crate) fn handled() {
    if let Some((class, uid)) = HELD.take() {
        OWN.with_borrow(|own| own.as_ref().map(|own| own.leave(class, uid)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deferred(uid: u32, number: u8) -> Deferred {
        let device = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        Deferred { class: Class::Change, uid, bytes: vec![number], device: Arc::new(device) }
    }

    fn taken(admission: &Admission, class: Class, uid: u32) -> usize {
        (0..1000).take_while(|_| admission.enter(class, uid)).count()
    }

    #[test]
    fn one_user_leaves_room_for_others() {
        let admission = Admission::new(128);
        assert_eq!([7, 8, 9].map(|uid| taken(&admission, Class::Change, uid)), [18, 9, 5]);
        assert_eq!(taken(&admission, Class::Look, 7), 12, "classes are apart");
        let all: usize = admission.lanes.iter().map(|lane| lane.lock().tokens).sum();
        assert_eq!(all, 128 - RESERVED_WORKERS);
        assert!(admission.next().is_none());
    }

    #[test]
    fn deferred_requests_come_in_their_order_when_there_is_room() {
        let admission = Admission::new(128);
        let held = taken(&admission, Class::Change, 7);
        (0..3).for_each(|number| assert!(admission.defer(deferred(7, number))));
        assert!(admission.next().is_none(), "there is room for others only");
        assert!(admission.defer(deferred(8, 100)));
        assert_eq!(admission.next().map(|next| (next.uid, next.bytes[0])), Some((8, 100)));
        admission.leave(Class::Change, 8);
        admission.leave(Class::Change, 7);
        assert!(!admission.enter(Class::Change, 7), "those that wait come first");
        assert_eq!(admission.next().map(|next| next.bytes[0]), Some(0));
        assert!(admission.next().is_none());
        (0..held).for_each(|_| admission.leave(Class::Change, 7));
        assert_eq!([(); 2].map(|()| admission.next().unwrap().bytes[0]), [1, 2]);
        assert_eq!((admission.deferred(), admission.deferred_bytes.load(Ordering::Relaxed)), (0, 0));
        assert!(admission.enter(Class::Change, 7));
    }

    #[test]
    fn what_is_deferred_is_bounded() {
        let admission = Admission::new(128);
        (0..DEFERRED_MAX).for_each(|_| assert!(admission.defer(deferred(7, 0))));
        assert!(!admission.defer(deferred(8, 0)));
    }
}
