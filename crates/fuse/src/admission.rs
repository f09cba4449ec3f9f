//! Admission: how many workers the requests of one user may hold at a time.
//!
//! A request that may have to wait for the backing file system takes a *token* of its [`Class`] for
//! its user. Without a token it is deferred: the worker goes on, and a worker that has finished
//! something takes the request up when there is room. The thresholds are dynamic: a user may hold
//! as many tokens of a class as nobody holds. So one user gets half of a class, and there is always
//! something left for the next one. Where several file systems are below, a user may hold at one of
//! them as many as he may still take. What the kernel does by itself (writeback, closing) is no
//! user's: there, file systems share as users do elsewhere. Tokens of all classes are fewer than
//! the workers, so that what waits for nothing (READs that lenders have, FORGET) finds a worker at
//! all times.
//!
//! No request that was begun waits for one that is deferred: a deferred request has not changed
//! anything, and nothing is locked for it here. Deferred requests of one user, file system and
//! class are taken up in the order in which they came.

use crate::abi::InHeader;
use crate::later::{self, Later};
use crate::session::Filesystem;
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
    /// Bytes that are read from the backing file. Taken when a READ turns out to need them
    /// ([`admit_read`]).
    Read,
    /// Changes, which wait for each other, for the disk, and for a frozen file system to be thawed.
    Change,
    /// Writeback of what programs have stored into the kernel's cache. The kernel does not say
    /// whose it is.
    Writeback,
    /// Closing a file, which may write it, or free what has no name any more. The kernel does not
    /// say who does.
    Close,
}

impl Class {
    /// Whether the kernel does not say whose requests of the class are.
    fn is_nobodys(self) -> bool {
        matches!(self, Class::Writeback | Class::Close)
    }
}

/// How the tokens are divided among the classes. With 128 workers, these are the tokens themselves.
const PARTS: [usize; 6] = [22, 22, 32, 24, 12, 8];

/// Workers for which there is no token.
pub const RESERVED_WORKERS: usize = 8;

/// Requests that are deferred at the most. Each belongs to a thread that waits, or to the kernel's
/// read-ahead or writeback.
pub const DEFERRED_MAX: usize = 16_384;

/// Bytes of deferred requests at the most: WRITEs have up to 1 MiB, which the caller has in memory,
/// too.
pub const DEFERRED_BYTES_MAX: usize = 512 << 20;

/// The user, and the file system, to whose share a request counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Who {
    /// The user's id. In a class that is no user's, the file system; None if there is one only.
    one: Option<u32>,
    /// The file system below at which the user may hold a part of what he may hold. 0: all of it.
    file_system: u32,
}

impl Who {
    /// Of a request with that header.
    pub(crate) fn of(filesystem: &dyn Filesystem, class: Option<Class>, header: &InHeader) -> Who {
        Who::new(class, header.uid, filesystem.file_system(header.nodeid))
    }

    /// Of a request of that class. None: it waits for nothing.
    pub(crate) fn new(class: Option<Class>, uid: u32, file_system: u32) -> Who {
        match class.is_some_and(Class::is_nobodys) {
            true => Who { one: (file_system != 0).then_some(file_system), file_system: 0 },
            false => Who { one: Some(uid), file_system },
        }
    }
}

/// A request that waits for a token. It must be answered on the descriptor that it was read from.
pub(crate) struct Deferred {
    pub(crate) class: Class,
    pub(crate) who: Who,
    pub(crate) bytes: Vec<u8>,
    pub(crate) device: Arc<OwnedFd>,
}

/// The tokens of one class.
#[derive(Default)]
pub(crate) struct Lane {
    tokens: usize,
    held: usize,
    /// Those who hold tokens, and how many.
    holders: Vec<(Who, usize)>,
    /// Those with deferred requests, those first that were served longest ago.
    deferred: VecDeque<(Who, VecDeque<Deferred>)>,
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

    /// Whether one more may be taken.
    pub(crate) fn has_room(&self, who: Who) -> bool {
        let held = |is: &dyn Fn(&Who) -> bool| -> usize {
            self.holders.iter().filter(|(holder, _)| is(holder)).map(|(_, held)| held).sum()
        };
        let free = self.tokens - self.held;
        let Some(one) = who.one else { return free > 0 };
        let own = held(&|holder| holder.one == Some(one));
        // The user may hold half of what is his or free, if nobody else takes any meanwhile.
        let still = (own + free).div_ceil(2).saturating_sub(own);
        own < free && (who.file_system == 0 || held(&|holder| *holder == who) < still)
    }

    /// One is taken.
    pub(crate) fn take(&mut self, who: Who) {
        self.held += 1;
        match self.holders.iter_mut().find(|(holder, _)| *holder == who) {
            Some((_, held)) => *held += 1,
            None => self.holders.push((who, 1)),
        }
    }

    /// One is given back.
    pub(crate) fn give_back(&mut self, who: Who) {
        let Some(at) = self.holders.iter().position(|(holder, _)| *holder == who) else { return };
        self.held -= 1;
        self.holders[at].1 -= 1;
        if self.holders[at].1 == 0 {
            self.holders.swap_remove(at);
        }
    }

    /// The next deferred request that there is room for, with a token taken for it.
    fn next(&mut self) -> Option<Deferred> {
        let at = self.deferred.iter().position(|(who, _)| self.has_room(*who))?;
        let (who, mut queue) = self.deferred.remove(at)?;
        let next = queue.pop_front();
        if !queue.is_empty() {
            self.deferred.push_back((who, queue));
        }
        self.take(who);
        next
    }
}

/// The tokens of a session.
pub struct Admission {
    lanes: [Mutex<Lane>; PARTS.len()],
    deferred: AtomicUsize,
    deferred_bytes: AtomicUsize,
    pub(crate) later: Later,
}

impl Admission {
    /// For a session that has `workers` at the most. 0: any number.
    pub(crate) fn new(workers: usize) -> Admission {
        // A file system that does not set it has no limit.
        let tokens = if workers == 0 { usize::MAX / 16 } else { workers.saturating_sub(RESERVED_WORKERS) };
        let all: usize = PARTS.iter().sum();
        // Divided first, because the product may be too large.
        let lane = |part: usize| Mutex::new(Lane::new((tokens / all * part + tokens % all * part / all).max(1)));
        let (deferred, deferred_bytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Admission { lanes: PARTS.map(lane), deferred, deferred_bytes, later: Later::default() }
    }

    /// Requests that wait for a token.
    pub fn deferred(&self) -> usize {
        self.deferred.load(Ordering::Relaxed)
    }

    fn lane(&self, class: Class) -> &Mutex<Lane> {
        &self.lanes[class as usize]
    }

    /// Takes a token. False: the user has enough, or others of its requests wait for one.
    pub(crate) fn enter(&self, class: Class, who: Who) -> bool {
        let mut lane = self.lane(class).lock();
        let enters = lane.has_room(who) && !lane.deferred.iter().any(|(other, _)| *other == who);
        if enters {
            lane.take(who);
        }
        enters
    }

    /// Gives a token back. The caller calls [`Admission::next`] afterwards.
    pub(crate) fn leave(&self, class: Class, who: Who) {
        self.lane(class).lock().give_back(who);
    }

    /// Defers a request. The caller calls [`Admission::next`] afterwards. False: there are too
    /// many, and nothing is done.
    pub(crate) fn defer(&self, request: Deferred) -> bool {
        let (who, len) = (request.who, request.bytes.len());
        let bytes = self.deferred_bytes.load(Ordering::Relaxed);
        if self.deferred() >= DEFERRED_MAX || bytes + len > DEFERRED_BYTES_MAX {
            return false;
        }
        let mut lane = self.lane(request.class).lock();
        match lane.deferred.iter_mut().find(|(other, _)| *other == who) {
            Some((_, queue)) => queue.push_back(request),
            None => lane.deferred.push_back((who, VecDeque::from([request]))),
        }
        self.deferred_bytes.fetch_add(len, Ordering::Relaxed);
        self.deferred.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// The next deferred request that there is room for. It has a token, which is to be given back
    /// when it was handled.
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
    /// Of a worker's thread: the tokens, whose request it handles, and the class of the token that
    /// it holds.
    static OWN: RefCell<Option<Arc<Admission>>> = const { RefCell::new(None) };
    static WHO: Cell<Who> = const { Cell::new(Who { one: None, file_system: 0 }) };
    static HELD: Cell<Option<(Class, Who)>> = const { Cell::new(None) };
}

/// This thread's worker is about to wait for the backing file of a READ ([`crate::More`]). Always
/// true where no worker is.
pub(crate) fn admit_read() -> bool {
    about_to_wait();
    if HELD.get().is_some() {
        return true;
    }
    let who = WHO.get();
    let admitted = OWN.with_borrow(|own| own.as_ref().is_none_or(|own| own.enter(Class::Read, who)));
    if admitted && OWN.with_borrow(Option::is_some) {
        HELD.set(Some((Class::Read, who)));
    }
    admitted
}

/// Whether the request that this thread handles may be put off ([`crate::put_off`]). Then it
/// counts.
pub(crate) fn reserve_later() -> bool {
    OWN.with_borrow(|own| own.as_ref().is_some_and(|own| own.later.reserve(WHO.get())))
}

/// This thread's worker is about to handle requests of that session.
pub(crate) fn begin(admission: &Arc<Admission>) {
    OWN.set(Some(admission.clone()));
}

/// This thread's worker handles such a request, and holds a token for it, if it does.
pub(crate) fn handles(who: Who, held: Option<Class>) {
    WHO.set(who);
    later::begin(false);
    if let Some(class) = held {
        HELD.set(Some((class, who)));
    }
}

/// The request is handled.
pub(crate) fn handled() {
    if let Some((class, who)) = HELD.take() {
        OWN.with_borrow(|own| own.as_ref().map(|own| own.leave(class, who)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32) -> Who {
        Who::new(None, uid, 0)
    }

    fn deferred(uid: u32, number: u8) -> Deferred {
        let device = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        Deferred { class: Class::Change, who: user(uid), bytes: vec![number], device: Arc::new(device) }
    }

    fn taken(admission: &Admission, class: Class, who: Who) -> usize {
        (0..1000).take_while(|_| admission.enter(class, who)).count()
    }

    #[test]
    fn one_user_leaves_room_for_others() {
        let admission = Admission::new(128);
        assert_eq!([7, 8, 9].map(|uid| taken(&admission, Class::Change, user(uid))), [12, 6, 3]);
        assert_eq!(taken(&admission, Class::Look, user(7)), 11, "classes are apart");
        let all: usize = admission.lanes.iter().map(|lane| lane.lock().tokens).sum();
        assert_eq!(all, 128 - RESERVED_WORKERS);
        assert!(admission.next().is_none());
    }

    #[test]
    fn one_file_system_leaves_room_for_others() {
        let admission = Admission::new(128);
        let at = |file_system| Who::new(Some(Class::Change), 7, file_system);
        assert_eq!([1, 2, 3].map(|at_one| taken(&admission, Class::Change, at(at_one))), [6, 3, 2]);
        assert_eq!(taken(&admission, Class::Change, user(8)), 7, "of what nobody holds, half");
    }

    #[test]
    fn what_is_nobodys_is_no_users() {
        let admission = Admission::new(128);
        let writeback = |file_system| Who::new(Some(Class::Writeback), 0, file_system);
        assert_eq!([1, 2].map(|at| taken(&admission, Class::Writeback, writeback(at))), [6, 3]);
        assert_eq!(taken(&admission, Class::Change, user(0)), 12);
        assert_eq!(taken(&admission, Class::Close, Who::new(Some(Class::Close), 0, 0)), 8);
    }

    #[test]
    fn deferred_requests_come_in_their_order_when_there_is_room() {
        let admission = Admission::new(128);
        let held = taken(&admission, Class::Change, user(7));
        (0..3).for_each(|number| assert!(admission.defer(deferred(7, number))));
        assert!(admission.next().is_none(), "there is room for others only");
        assert!(admission.defer(deferred(8, 100)));
        assert_eq!(admission.next().map(|next| (next.who, next.bytes[0])), Some((user(8), 100)));
        admission.leave(Class::Change, user(8));
        admission.leave(Class::Change, user(7));
        assert!(!admission.enter(Class::Change, user(7)), "those that wait come first");
        assert_eq!(admission.next().map(|next| next.bytes[0]), Some(0));
        assert!(admission.next().is_none());
        (0..held).for_each(|_| admission.leave(Class::Change, user(7)));
        assert_eq!([(); 2].map(|()| admission.next().unwrap().bytes[0]), [1, 2]);
        assert_eq!((admission.deferred(), admission.deferred_bytes.load(Ordering::Relaxed)), (0, 0));
        assert!(admission.enter(Class::Change, user(7)));
    }

    #[test]
    fn what_is_deferred_is_bounded() {
        let admission = Admission::new(128);
        (0..DEFERRED_MAX).for_each(|_| assert!(admission.defer(deferred(7, 0))));
        assert!(!admission.defer(deferred(8, 0)));
    }
}
