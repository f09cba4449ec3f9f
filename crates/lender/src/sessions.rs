//! The connections, and their sessions, as [`wire`] specifies them.
//!
//! A session is *connected* while it has a main connection, then *kept* for the grace time, so that
//! a borrower that comes back finds its pages. This module is logic alone: the time is an argument,
//! and nothing waits. Its only operation on a socket is to shut it down; the thread that serves
//! this connection then detects that and ends the connection. [`crate::entry`] is the edge.
//!
//! Must never happen here: a tenant's number is freed while a connection with this number
//! still runs, because the store may assign the number again. So a session's tenant is removed only
//! when its last connection has ended.

use crate::store::{Store, Tenant};
use page::Version;
use std::collections::{HashMap, VecDeque};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use wire::address::Stream;

/// The maximum number of borrowers' connections. A borrower has a main one and a few for gets; each
/// takes up to 2 MiB while busy.
pub const CONNECTIONS_MAX: usize = 256;
/// The maximum number of connections before they have joined a session, in addition to those that
/// have. A large pool's borrowers may all reconnect at the same moment. Each takes a thread and
/// some kilobytes, for at most 2 s. When one more comes, the oldest is ended. A borrower's
/// handshake takes a few milliseconds, so only a peer with thousands of connections a second shuts
/// others out, and never connected borrowers.
pub const UNAUTHENTICATED_MAX: usize = 64;
/// The maximum number including those that were ended and whose threads still run.
const UNAUTHENTICATED_LEAVING_MAX: usize = 2 * UNAUTHENTICATED_MAX;
/// The maximum number of connections of a session.
pub const SESSION_CONNECTIONS_MAX: u32 = wire::SESSION_CONNECTIONS_MAX as u32;
/// The maximum number of sessions, kept ones included.
pub const SESSIONS_MAX: usize = 64;
/// Silence after which a session that never put a page may be ended, if its place is needed: a
/// borrower sends Pings ([`wire::PING_SECONDS_MAX`]), even one that has nothing to put.
pub const SILENCE_MAX: Duration = Duration::from_secs(6 * wire::PING_SECONDS_MAX);

const _: () = assert!(SESSIONS_MAX * 2 <= crate::store::TENANTS_MAX); // ending sessions still have their number

/// A session's name.
pub type Name = [u8; 16];

/// When a connection last received a frame: the time since the lender's start. The thread that
/// serves it can update the time without a lock.
#[derive(Debug)]
pub struct LastReceived {
    start: Instant,
    after_ms: AtomicU64,
}

impl LastReceived {
    fn new(start: Instant, now: Instant) -> LastReceived {
        let last_received = LastReceived { start, after_ms: AtomicU64::new(0) };
        last_received.note(now);
        last_received
    }

    /// A frame has arrived.
    pub fn note(&self, now: Instant) {
        self.after_ms.store(now.saturating_duration_since(self.start).as_millis() as u64, Relaxed);
    }

    fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.start + Duration::from_millis(self.after_ms.load(Relaxed)))
    }
}

/// A session's use of the lender's share of the machine, and the time that its connections have
/// waited for it.
#[derive(Debug)]
pub struct Usage {
    /// Its number, which no other session has or had.
    pub number: u64,
    /// Processor time, if it is measured.
    pub cpu_ns: AtomicU64,
    /// Time that its connections waited for their share, together.
    pub paced_ns: AtomicU64,
    /// Pages that it asked for and did not get because it was too far behind its share.
    pub rate_limited_misses: AtomicU64,
}

/// A session.
pub struct Session {
    /// The tenant of its pages.
    pub tenant: Tenant,
    /// The number of its connections.
    pub connections: u32,
    /// Its main connection; `None` after that has ended.
    main: Option<u64>,
    /// When the main connection ended.
    pub kept_since: Option<Instant>,
    /// The session ends with its last connection.
    ended: bool,
    last_received: Arc<LastReceived>,
    /// Its use of the lender's share.
    pub usage: Arc<Usage>,
}

impl Session {
    fn is_kept(&self) -> bool {
        self.connections == 0
    }

    fn joined(&self) -> Joined {
        let (last_received, usage) = (Arc::clone(&self.last_received), Arc::clone(&self.usage));
        Joined { tenant: self.tenant, resumed: true, last_received, usage }
    }
}

struct Connection {
    stream: Arc<Stream>,
    session: Option<Name>,
    standing: Standing,
}

/// The state of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// Its handshake has not ended.
    Unauthenticated,
    /// It was ended before its handshake had ended.
    Displaced,
    /// It has joined a session.
    Joined,
}

/// The result of joining a session.
#[derive(Clone, Debug)]
pub struct Joined {
    /// The tenant of the pages.
    pub tenant: Tenant,
    /// The session existed already.
    pub resumed: bool,
    /// Updated with each frame.
    pub last_received: Arc<LastReceived>,
    /// Updated with each cost.
    pub usage: Arc<Usage>,
}

/// The reason why a connection cannot join a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There are too many of the things that the text names.
    Busy(&'static str),
    /// There is no such session.
    NoSession,
    /// The session has continued without this borrower.
    Behind,
}

/// All connections and sessions.
pub struct Table {
    connections: HashMap<u64, Connection>,
    next_number: u64,
    closed: bool,
    start: Instant,
    sessions: HashMap<Name, Session>,
    next_session: u64,
    /// Tenants of ended sessions, whose pages the housekeeping frees.
    leaving: VecDeque<Tenant>,
}

impl Table {
    /// A table without connections.
    pub fn new(now: Instant) -> Table {
        Table {
            connections: HashMap::new(),
            next_number: 0,
            closed: false,
            start: now,
            sessions: HashMap::new(),
            next_session: 0,
            leaving: VecDeque::new(),
        }
    }

    /// Number of connections.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Sessions by name.
    pub fn sessions(&self) -> &HashMap<Name, Session> {
        &self.sessions
    }

    /// Number of kept sessions.
    pub fn kept_sessions(&self) -> usize {
        self.sessions.values().filter(|session| session.is_kept()).count()
    }

    /// Makes room for a connection and numbers it, later ones higher. Returns `None` if there are
    /// too many, or the lender is shutting down. Then a useless session is ended, so that there is
    /// room when the peer tries again.
    pub fn enter(&mut self, stream: &Arc<Stream>, store: &Store, now: Instant) -> Option<u64> {
        if self.closed {
            return None;
        }
        let joined = self.count(Standing::Joined);
        if joined >= CONNECTIONS_MAX {
            self.end_silent(store, now);
            return None;
        }
        if self.connections.len() - joined >= UNAUTHENTICATED_LEAVING_MAX {
            return None;
        }
        let number = self.next_number;
        self.next_number += 1;
        self.connections.insert(
            number,
            Connection { stream: Arc::clone(stream), session: None, standing: Standing::Unauthenticated },
        );
        Some(number)
    }

    /// Ends the oldest unauthenticated connection if one more would be too many. Call it before
    /// [`Table::enter`]. Returns whether it had to.
    pub fn displace_oldest(&mut self) -> bool {
        if self.count(Standing::Unauthenticated) < UNAUTHENTICATED_MAX {
            return false;
        }
        let unauthenticated =
            self.connections.iter_mut().filter(|(_, other)| other.standing == Standing::Unauthenticated);
        let Some((_, oldest)) = unauthenticated.min_by_key(|(number, _)| **number) else { return false };
        oldest.standing = Standing::Displaced;
        let _ = oldest.stream.shutdown(Shutdown::Both);
        true
    }

    fn count(&self, standing: Standing) -> usize {
        self.connections.values().filter(|connection| connection.standing == standing).count()
    }

    fn is_full(&self) -> bool {
        self.count(Standing::Joined) >= CONNECTIONS_MAX
    }

    fn note_joined(&mut self, number: u64, name: Name) {
        if let Some(connection) = self.connections.get_mut(&number) {
            (connection.session, connection.standing) = (Some(name), Standing::Joined);
        }
    }

    /// Joins a main connection to the session, which may begin with it. `next_version` is the next
    /// version that its borrower will use, if it sends one. Returns `None` if older connections
    /// have to end before. They have been shut down; call this again when one has ended.
    pub fn join_main(
        &mut self,
        number: u64,
        name: Name,
        next_version: Option<Version>,
        store: &mut Store,
        now: Instant,
    ) -> Result<Option<Joined>, Refusal> {
        if self.closed {
            return Err(Refusal::Busy("this lender is shutting down"));
        }
        // Connections that entered together may have joined meanwhile.
        if self.is_full() {
            return Err(Refusal::Busy("this lender has too many connections"));
        }
        if let Some(session) = self.sessions.get_mut(&name) {
            if session.main.is_some_and(|main| main > number) {
                return Err(Refusal::Busy("a newer connection has taken this session over"));
            }
            if next_version.is_some_and(|next| store.highest_version(session.tenant) >= next) {
                return Err(Refusal::Behind);
            }
            if session.connections > 0 {
                self.shut_down(name);
                return Ok(None);
            }
            (session.main, session.connections, session.kept_since) = (Some(number), 1, None);
            session.last_received.note(now);
            let joined = session.joined();
            self.note_joined(number, name);
            return Ok(Some(joined));
        }
        if self.sessions.len() >= SESSIONS_MAX && !self.forget_oldest_kept() {
            return if self.end_silent(store, now) { Ok(None) } else { Err(Refusal::Busy("too many borrowers")) };
        }
        let tenant = store.add_tenant().ok_or(Refusal::Busy("too many borrowers"))?;
        let last_received = Arc::new(LastReceived::new(self.start, now));
        let usage = Arc::new(Usage {
            number: self.next_session,
            cpu_ns: AtomicU64::new(0),
            paced_ns: AtomicU64::new(0),
            rate_limited_misses: AtomicU64::new(0),
        });
        self.next_session += 1;
        let session = Session {
            tenant,
            connections: 1,
            main: Some(number),
            kept_since: None,
            ended: false,
            last_received,
            usage,
        };
        let joined = Joined { resumed: false, ..session.joined() };
        self.sessions.insert(name, session);
        self.note_joined(number, name);
        Ok(Some(joined))
    }

    /// Joins a get connection to the session.
    pub fn join_get(&mut self, number: u64, name: Name) -> Result<Joined, Refusal> {
        let is_full = self.is_full();
        let session = self.sessions.get_mut(&name).filter(|session| session.main.is_some() && !session.ended);
        let session = session.ok_or(Refusal::NoSession)?;
        if is_full {
            return Err(Refusal::Busy("this lender has too many connections"));
        }
        if session.connections >= SESSION_CONNECTIONS_MAX {
            return Err(Refusal::Busy("this borrower has too many connections"));
        }
        session.connections += 1;
        let joined = session.joined();
        self.note_joined(number, name);
        Ok(joined)
    }

    /// The borrower announces that it will not come back: the session ends with its last
    /// connection.
    pub fn end_session(&mut self, name: Name) {
        if let Some(session) = self.sessions.get_mut(&name) {
            session.ended = true;
            self.shut_down(name);
        }
    }

    /// The connection does not use the store any more. Returns the tenant whose pages the caller
    /// must free before it calls [`Table::remove`].
    pub fn leave(&mut self, number: u64, store: &Store, grace: Duration, now: Instant) -> Option<Tenant> {
        let name = self.connections.get_mut(&number)?.session.take()?;
        let session = self.sessions.get_mut(&name)?;
        session.connections -= 1;
        let was_main = session.main == Some(number);
        if was_main {
            (session.main, session.kept_since) = (None, Some(now));
        }
        if session.connections == 0 {
            return self.let_go(name, store, grace);
        }
        if was_main {
            self.shut_down(name);
        }
        None
    }

    /// The connection is about to end.
    pub fn remove(&mut self, number: u64) {
        self.connections.remove(&number);
    }

    /// The session's last connection has ended: keeps the session, if it has pages and a grace
    /// time.
    fn let_go(&mut self, name: Name, store: &Store, grace: Duration) -> Option<Tenant> {
        let Session { tenant, ended, .. } = *self.sessions.get(&name)?;
        let has_pages = store.tenant_status(tenant).is_some_and(|(_, pages, zeros)| pages + zeros > 0);
        if has_pages && !ended && !self.closed && !grace.is_zero() {
            return None;
        }
        self.sessions.remove(&name);
        Some(tenant)
    }

    /// Forgets the sessions that were kept for the grace time. Returns how many.
    pub fn expire(&mut self, grace: Duration, now: Instant) -> usize {
        let over = |session: &Session| {
            session.is_kept() && session.kept_since.is_some_and(|since| now.saturating_duration_since(since) >= grace)
        };
        let before = self.sessions.len();
        self.leaving.extend(self.sessions.extract_if(|_, session| over(session)).map(|(_, session)| session.tenant));
        before - self.sessions.len()
    }

    /// The next tenant whose pages the housekeeping has to free.
    pub fn next_leaving(&self) -> Option<Tenant> {
        self.leaving.front().copied()
    }

    /// The tenant's pages are free.
    pub fn has_left(&mut self, tenant: Tenant) {
        self.leaving.retain(|leaving| *leaving != tenant);
    }

    /// Ends all connections, and accepts no more.
    pub fn close(&mut self) {
        self.closed = true;
        for connection in self.connections.values() {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }

    /// Makes room for a new session. Returns false if none is kept.
    fn forget_oldest_kept(&mut self) -> bool {
        let kept = self.sessions.iter().filter(|(_, session)| session.is_kept());
        let Some((name, _)) = kept.min_by_key(|(_, session)| session.kept_since) else { return false };
        let name = *name;
        self.leaving.extend(self.sessions.remove(&name).map(|session| session.tenant));
        true
    }

    /// Ends the session that never put a page and was silent for longest, beyond [`SILENCE_MAX`].
    /// Returns false if there is none.
    fn end_silent(&mut self, store: &Store, now: Instant) -> bool {
        let silent = self.sessions.iter().filter(|(_, session)| {
            let puts = store.tenant_status(session.tenant).map_or(0, |(counters, ..)| counters.puts);
            puts == 0 && session.last_received.silence(now) > SILENCE_MAX
        });
        let Some((name, _)) = silent.max_by_key(|(_, session)| session.last_received.silence(now)) else {
            return false;
        };
        let name = *name;
        self.end_session(name);
        true
    }

    fn shut_down(&self, name: Name) {
        for connection in self.connections.values().filter(|connection| connection.session == Some(name)) {
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Key;
    use page::{FileKey, PAGE_SIZE, PageId};
    use std::os::unix::net::UnixStream;

    const GRACE: Duration = Duration::from_secs(30);

    /// A table and a store, and the actions of the serving threads.
    struct House {
        table: Table,
        store: Store,
        begun: Instant,
        far: HashMap<u64, UnixStream>,
    }

    impl House {
        fn new() -> House {
            let mut store = Store::new(1000).unwrap();
            store.set_available_pages(1000);
            let begun = Instant::now();
            House { table: Table::new(begun), store, begun, far: HashMap::new() }
        }

        fn second(&self, seconds: u64) -> Instant {
            self.begun + Duration::from_secs(seconds)
        }

        fn enter(&mut self, second: u64) -> Option<u64> {
            let (near, far) = UnixStream::pair().unwrap();
            far.set_nonblocking(true).unwrap();
            let number = self.table.enter(&Arc::new(Stream::Unix(near)), &self.store, self.second(second))?;
            self.far.insert(number, far);
            Some(number)
        }

        fn join(&mut self, number: u64, name: u8, second: u64) -> Result<Option<Joined>, Refusal> {
            self.join_telling(number, name, None, second)
        }

        fn join_telling(
            &mut self,
            number: u64,
            name: u8,
            next_version: Option<u64>,
            second: u64,
        ) -> Result<Option<Joined>, Refusal> {
            let now = self.second(second);
            self.table.join_main(number, [name; 16], next_version.map(Version), &mut self.store, now)
        }

        fn main(&mut self, name: u8, second: u64) -> (u64, Joined) {
            let number = self.enter(second).unwrap();
            (number, self.join(number, name, second).unwrap().unwrap())
        }

        fn get(&mut self, name: u8) -> Result<u64, Refusal> {
            let number = self.enter(0).unwrap();
            self.table.join_get(number, [name; 16]).map(|_| number)
        }

        fn put(&mut self, tenant: Tenant) {
            let key = Key { id: PageId { file: FileKey(1), index: 1 }, version: Version(1) };
            assert!(self.store.put(tenant, key, 0, &[1; PAGE_SIZE]));
        }

        /// The connection's thread ends. Returns whether the session's pages were freed with it.
        fn leave(&mut self, number: u64, second: u64) -> bool {
            let over = self.table.leave(number, &self.store, GRACE, self.second(second));
            if let Some(tenant) = over {
                while !self.store.remove_tenant(tenant, 10) {}
            }
            self.table.remove(number);
            over.is_some()
        }

        fn was_shut_down(&self, number: u64) -> bool {
            use std::io::Read;
            matches!((&self.far[&number]).read(&mut [0]), Ok(0))
        }
    }

    #[test]
    fn who_was_set_back_does_not_resume_what_went_on_without_him() {
        let mut house = House::new();
        let (first, joined) = house.main(1, 0);
        house.put(joined.tenant);
        // The borrower put version 1, so its next one is at least 2. This holds while it is
        // connected and after that; a refusal does not change the session.
        let behind = house.enter(1).unwrap();
        assert_eq!(house.join_telling(behind, 1, Some(1), 1).unwrap_err(), Refusal::Behind);
        assert!(!house.was_shut_down(first));
        assert!(!house.leave(first, 2));
        assert_eq!(house.join_telling(behind, 1, Some(1), 3).unwrap_err(), Refusal::Behind);
        assert!(!house.leave(behind, 3));
        let rightful = house.enter(4).unwrap();
        let resumed = house.join_telling(rightful, 1, Some(2), 4).unwrap().unwrap();
        assert_eq!((resumed.tenant, resumed.resumed), (joined.tenant, true));
        // The borrower does not know of a version either that was not stored.
        house.store.set_lending(false);
        let key = Key { id: PageId { file: FileKey(1), index: 9 }, version: Version(7) };
        assert!(!house.store.put(resumed.tenant, key, 0, &[1; PAGE_SIZE]));
        let behind = house.enter(5).unwrap();
        assert_eq!(house.join_telling(behind, 1, Some(7), 5).unwrap_err(), Refusal::Behind);
        // Under another name it starts a new session. A borrower that sends no version resumes as
        // usual.
        assert!(!house.join_telling(behind, 2, Some(7), 5).unwrap().unwrap().resumed);
        house.leave(rightful, 6);
        let silent = house.enter(7).unwrap();
        assert!(house.join(silent, 1, 7).unwrap().unwrap().resumed);
    }

    #[test]
    fn a_session_is_kept_and_resumed() {
        let mut house = House::new();
        assert_eq!(house.get(1), Err(Refusal::NoSession), "main comes first");
        let (main, joined) = house.main(1, 0);
        assert!(!joined.resumed);
        house.put(joined.tenant);
        let get = house.get(1).unwrap();
        assert!(!house.leave(main, 1));
        assert!(house.was_shut_down(get), "gets end with main");
        assert_eq!(house.get(1), Err(Refusal::NoSession));
        assert_eq!(house.table.expire(GRACE, house.second(100)), 0, "the get's thread still knows the tenant");
        assert!(!house.leave(get, 2));
        assert_eq!(house.table.kept_sessions(), 1);
        // Kept from the end of its main connection on.
        assert_eq!(house.table.expire(GRACE, house.second(30)), 0);
        let (main, again) = house.main(1, 30);
        assert_eq!((again.resumed, again.tenant), (true, joined.tenant));
        assert_eq!(house.table.expire(GRACE, house.second(100)), 0);
        assert!(!house.leave(main, 100));
        assert_eq!(house.table.expire(GRACE, house.second(130)), 1);
        assert_eq!(house.table.next_leaving(), Some(joined.tenant));
        assert!(!house.main(1, 131).1.resumed);
    }

    #[test]
    fn no_session_is_kept_after_a_goodbye_or_without_pages() {
        let mut house = House::new();
        let (main, joined) = house.main(1, 0);
        house.put(joined.tenant);
        let get = house.get(1).unwrap();
        house.table.end_session([1; 16]);
        assert!(house.was_shut_down(get));
        assert!(!house.leave(main, 1), "the get's thread still knows the tenant");
        assert!(house.leave(get, 1));
        let (main, _) = house.main(2, 1);
        assert!(house.leave(main, 2));
        assert_eq!((house.table.sessions().len(), house.store.stored_pages()), (0, 0));
    }

    #[test]
    fn the_newest_main_takes_over_when_the_others_have_left() {
        let mut house = House::new();
        let (old, joined) = house.main(1, 0);
        house.put(joined.tenant);
        let get = house.get(1).unwrap();
        let [late, new] = [house.enter(1).unwrap(), house.enter(1).unwrap()];
        assert!(house.join(new, 1, 1).unwrap().is_none());
        assert!(house.was_shut_down(old) && house.was_shut_down(get));
        house.leave(get, 1);
        assert!(house.join(new, 1, 1).unwrap().is_none(), "the old main may still apply a Put");
        house.leave(old, 1);
        assert!(house.join(new, 1, 1).unwrap().unwrap().resumed);
        assert!(matches!(house.join(late, 1, 1), Err(Refusal::Busy(_))), "it has been overtaken");
        assert!(!house.was_shut_down(new));
    }

    #[test]
    fn kept_and_silent_sessions_make_room() {
        let mut house = House::new();
        let mut mains = Vec::new();
        for name in 1..=SESSIONS_MAX as u8 {
            let (main, joined) = house.main(name, u64::from(name));
            if name <= 3 {
                house.put(joined.tenant);
            }
            mains.push((main, joined));
        }
        // Nobody was silent for long.
        let unauthenticated = house.enter(60).unwrap();
        assert!(matches!(house.join(unauthenticated, 100, 60), Err(Refusal::Busy(_))));
        // The one kept for longest is removed first.
        house.leave(mains[1].0, 60);
        house.leave(mains[0].0, 61);
        assert!(house.join(unauthenticated, 100, 62).unwrap().is_some());
        assert_eq!(house.table.next_leaving(), Some(mains[1].1.tenant));
        assert!(house.table.sessions().contains_key(&[1; 16]));
        house.main(101, 62);
        assert!(!house.table.sessions().contains_key(&[1; 16]));
        // Then those that never put a page, and were silent for long: session 4, not 3.
        let unauthenticated = house.enter(200).unwrap();
        mains[4].1.last_received.note(house.second(199));
        assert!(house.join(unauthenticated, 102, 200).unwrap().is_none());
        assert!(house.was_shut_down(mains[3].0) && !house.was_shut_down(mains[2].0));
        house.leave(mains[3].0, 200);
        assert!(house.join(unauthenticated, 102, 200).unwrap().is_some());
        assert!(!house.was_shut_down(mains[4].0));
    }

    #[test]
    fn silent_crowds_make_room_for_connections() {
        let mut house = House::new();
        let (silent, _) = house.main(1, 0);
        for name in 1..=16 {
            if name > 1 {
                let (_, joined) = house.main(name, 0);
                joined.last_received.note(house.second(100));
            }
            for _ in 1..SESSION_CONNECTIONS_MAX {
                house.get(name).unwrap();
            }
        }
        assert_eq!(house.table.connections(), CONNECTIONS_MAX);
        assert!(house.enter(10).is_none() && !house.was_shut_down(silent));
        assert!(house.enter(100).is_none(), "there is room when it has left");
        assert!(house.was_shut_down(silent));
        house.leave(silent, 100);
        assert!(house.enter(100).is_some());
    }

    #[test]
    fn unauthenticated_connections_take_no_places_of_borrowers() {
        let mut house = House::new();
        let (main, _) = house.main(1, 0);
        let unauthenticated: Vec<u64> = (0..UNAUTHENTICATED_MAX).map(|_| house.enter(0).unwrap()).collect();
        assert!(house.table.displace_oldest());
        assert!(house.was_shut_down(unauthenticated[0]) && !house.was_shut_down(unauthenticated[1]));
        let borrower = house.enter(0).unwrap();
        assert!(house.table.displace_oldest() && house.was_shut_down(unauthenticated[1]));
        assert!(house.join(borrower, 2, 0).unwrap().is_some(), "the youngest is the last to go");
        assert!(!house.table.displace_oldest());
        // Connections that were ended and still run take no more places than that.
        while house.enter(0).is_some() {
            house.table.displace_oldest();
        }
        assert_eq!(house.table.connections(), 2 + UNAUTHENTICATED_LEAVING_MAX);
        assert!(!house.was_shut_down(main) && !house.was_shut_down(borrower));
    }
}
