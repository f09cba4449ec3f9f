//! Admission: limits the number of workers that the requests of one user may hold at a time.
//!
//! A request that may have to wait for the backing file system takes a *token* of its [`Class`] for
//! its user. Without a token it is deferred: the worker continues, and a worker that has finished a
//! request handles the deferred one when there is room.
//!
//! The thresholds are dynamic: a user may hold as many tokens of a class as are free. So one user
//! gets half of a class, and some tokens are always left for the next one. With several backing
//! file systems, a user may hold at one of them as many as are left for this user. Requests of the
//! kernel itself (writeback, closing) belong to no user: their file systems share the tokens as
//! users do elsewhere.
//!
//! There are fewer tokens of all classes than workers. So requests that wait for nothing (READs of
//! pages that lenders have, FORGET) always find a worker.
//!
//! No request that has begun waits for a deferred one: a deferred request has not changed anything,
//! and holds no lock here. Deferred requests of one user, file system and class are handled in
//! order of arrival.

use crate::abi::InHeader;
use crate::later::{self, Later};
use crate::leader::about_to_wait;
use crate::session::Filesystem;
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The operation that a request may have to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Names, attributes and directories.
    Look,
    /// Opening a file: another process may hold a lease on it.
    Open,
    /// Reading bytes from the backing file. The token is taken when a READ turns out to need them
    /// ([`crate::More::admit_read`]).
    Read,
    /// Changes, which wait for each other, for the disk, and for the thaw of a frozen file system.
    Change,
    /// Writeback of data that programs have stored into the kernel's cache. The kernel does not
    /// reveal their users.
    Writeback,
    /// Closing a file, which may write its data, or free a file without a name. The kernel does not
    /// reveal the user.
    Close,
}

impl Class {
    /// Returns whether the kernel does not reveal the users of the class's requests.
    fn is_nobodys(self) -> bool {
        matches!(self, Class::Writeback | Class::Close)
    }
}

/// The shares of the classes in the tokens. With 128 workers, these are the numbers of tokens.
const PARTS: [usize; 6] = [22, 22, 32, 24, 12, 8];

/// The number of workers for which there is no token.
pub const RESERVED_WORKERS: usize = 8;

/// The maximum number of deferred requests. Each belongs to a thread that waits, or to the kernel's
/// read-ahead or writeback.
pub const DEFERRED_MAX: usize = 16_384;

/// The maximum bytes of deferred requests: WRITEs have up to 1 MiB, which the caller also has in
/// memory.
pub const DEFERRED_BYTES_MAX: usize = 512 << 20;

/// The user and the file system on whose share a request counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Who {
    /// The user's id. In a class of no user, the file system; None if there is only one.
    one: Option<u32>,
    /// The backing file system at which the user may hold a part of the user's share. 0: all of it.
    file_system: u32,
}

impl Who {
    /// Returns the share for a request with that header.
    pub(crate) fn of(filesystem: &dyn Filesystem, class: Option<Class>, header: &InHeader) -> Who {
        Who::new(class, header.uid, filesystem.file_system(header.nodeid))
    }

    /// Returns the share for a request of that class. None: the request waits for nothing.
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
    /// The holders of tokens, each with the number of tokens.
    holders: Vec<(Who, usize)>,
    /// Those with deferred requests; the one that was served longest ago is first.
    deferred: VecDeque<(Who, VecDeque<Deferred>)>,
}

impl Lane {
    /// Returns a lane with `tokens` tokens.
    pub(crate) fn new(tokens: usize) -> Lane {
        Lane { tokens, ..Lane::default() }
    }

    /// Returns the number of tokens that are held.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Returns whether one more token may be taken.
    pub(crate) fn has_room(&self, who: Who) -> bool {
        let held = |is: &dyn Fn(&Who) -> bool| -> usize {
            self.holders.iter().filter(|(holder, _)| is(holder)).map(|(_, held)| held).sum()
        };
        let free = self.tokens - self.held;
        let Some(one) = who.one else { return free > 0 };
        let own = held(&|holder| holder.one == Some(one));
        // The user may hold half of the tokens that are the user's or free, if no other user takes
        // any meanwhile.
        let still = (own + free).div_ceil(2).saturating_sub(own);
        own < free && (who.file_system == 0 || held(&|holder| *holder == who) < still)
    }

    /// Takes a token.
    pub(crate) fn take(&mut self, who: Who) {
        self.held += 1;
        match self.holders.iter_mut().find(|(holder, _)| *holder == who) {
            Some((_, held)) => *held += 1,
            None => self.holders.push((who, 1)),
        }
    }

    /// Gives a token back.
    pub(crate) fn give_back(&mut self, who: Who) {
        let Some(at) = self.holders.iter().position(|(holder, _)| *holder == who) else { return };
        self.held -= 1;
        self.holders[at].1 -= 1;
        if self.holders[at].1 == 0 {
            self.holders.swap_remove(at);
        }
    }

    /// Returns the next deferred request that there is room for, and takes a token for it.
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
    /// For a session that has at most `workers` workers. 0: any number.
    pub(crate) fn new(workers: usize) -> Admission {
        // A file system that does not set the number has no limit.
        let tokens = if workers == 0 { usize::MAX / 16 } else { workers.saturating_sub(RESERVED_WORKERS) };
        let all: usize = PARTS.iter().sum();
        // Divided first, because the product may be too large.
        let lane = |part: usize| Mutex::new(Lane::new((tokens / all * part + tokens % all * part / all).max(1)));
        let (deferred, deferred_bytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Admission { lanes: PARTS.map(lane), deferred, deferred_bytes, later: Later::default() }
    }

    /// Returns the number of requests that wait for a token.
    pub fn deferred(&self) -> usize {
        self.deferred.load(Ordering::Relaxed)
    }

    fn lane(&self, class: Class) -> &Mutex<Lane> {
        &self.lanes[class as usize]
    }

    /// Takes a token. Returns false if the user has enough, or has other requests that wait for
    /// one.
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

    /// Defers a request. The caller calls [`Admission::next`] afterwards. Returns false, and does
    /// nothing, if too many are deferred.
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

    /// Returns the next deferred request that there is room for. It has a token, which the caller
    /// gives back when the request was handled.
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
    /// The state of a worker's thread: its tokens, the share of the request that it handles, and
    /// the class of the token that it holds.
    static OWN: RefCell<Option<Arc<Admission>>> = const { RefCell::new(None) };
    static WHO: Cell<Who> = const { Cell::new(Who { one: None, file_system: 0 }) };
    static HELD: Cell<Option<(Class, Who)>> = const { Cell::new(None) };
}

/// This thread's worker is about to wait for the backing file of a READ ([`crate::More`]). Always
/// returns true on a thread without a worker.
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

/// Returns whether the request that this thread handles may be put off ([`crate::put_off`]). If so,
/// it counts as put off.
pub(crate) fn reserve_later() -> bool {
    OWN.with_borrow(|own| own.as_ref().is_some_and(|own| own.later.reserve(WHO.get())))
}

/// This thread's worker is about to handle requests of that session.
pub(crate) fn begin(admission: &Arc<Admission>) {
    OWN.set(Some(admission.clone()));
}

/// This thread's worker handles a request of that share, and may hold a token for it.
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
        assert_eq!(taken(&admission, Class::Change, user(8)), 7, "half of the free tokens");
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
