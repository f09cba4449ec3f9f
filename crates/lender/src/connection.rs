//! A connection after its handshake: the effect, the cost and the answer of each frame. This module
//! uses no socket and does not wait. [`crate::event_loop`] does both, and [`crate::handshake`] does
//! the handshake.
//!
//! The peer decides which bytes arrive, so nothing here trusts them: a frame that breaks the
//! protocol ends the connection. The store is locked for a few pages at a time, and never during
//! I/O.

use crate::in_flight_put::InFlightPut;
use crate::rate_limit::Cost;
use crate::sessions::{Joined, Name};
use crate::shared::Shared;
use crate::store::{GetResult, Key};
use page::PAGE_SIZE;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use wire::frames::{ConnectionError, Frame, Outgoing};
use wire::secure::Channel;
use wire::{GetItem, Header, Kind, PutItem, WireKey};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

/// Pages that are copied while the store is locked: 10 to 50 microseconds, for which another
/// borrower may have to wait.
pub const LOCKED_PAGES: usize = 32;

/// A connection that has joined a session.
pub struct Connection {
    shared: Arc<Shared>,
    channel: Channel,
    session: Name,
    joined: Joined,
    is_main: bool,
    lost: Vec<Key>,
    /// The cost that was not charged yet.
    cost: Cost,
    /// Processor time of this thread when it began to serve this connection, if processor time is
    /// measured.
    begun_cpu_ns: Option<u64>,
}

impl Connection {
    /// A connection that has sent and received nothing.
    pub fn new(shared: &Arc<Shared>, channel: Channel, session: Name, joined: Joined, is_main: bool) -> Connection {
        let (lost, cost) = (Vec::new(), Cost::default());
        Connection { shared: Arc::clone(shared), channel, session, joined, is_main, lost, cost, begun_cpu_ns: None }
    }

    /// Whether this is a main connection, which carries puts and notices, rather than gets.
    pub fn is_main(&self) -> bool {
        self.is_main
    }

    /// Whether a frame of this kind may arrive on this connection.
    pub fn may_come(&self, kind: Kind) -> bool {
        match kind {
            Kind::Ping => true,
            Kind::Put | Kind::Drop | Kind::Bye => self.is_main,
            Kind::Get => !self.is_main,
            _ => false,
        }
    }

    /// Executes a frame, and appends the answer to `out`.
    pub fn answer(&mut self, frame: &Frame<'_>, now: Instant, out: &mut Outgoing) -> Result<(), ConnectionError> {
        self.joined.last_received.note(now);
        self.cost.bytes += (size_of::<Header>() + frame.body.len()) as u64;
        let request = frame.header.request.get();
        let understood = match frame.kind {
            Kind::Put => self.put(frame.body, frame.header.items.get().into(), request, out)?,
            Kind::Get => self.get(frame.body, frame.header.flags & wire::GET_EXCLUSIVE != 0, request, out)?,
            Kind::Drop => self.drop_pages(frame.body),
            Kind::Ping => {
                let room = wire::Room { free_pages: U64::new(self.shared.store.lock().free_pages()) };
                out.push(&self.channel, Kind::Pong, request, &room)?;
                Some(())
            }
            Kind::Bye => {
                self.shared.table.lock().end_session(self.session);
                return Err(ConnectionError::Goodbye);
            }
            _ => None,
        };
        // The header was validated and the kind may arrive. This only avoids a panic.
        understood.ok_or(ConnectionError::Unexpected(frame.kind))?;
        if self.is_main {
            self.push_lost(out)?;
        }
        Ok(())
    }

    /// Reserves slots for the pages of a Put whose head has arrived.
    pub fn begin_put(&mut self, head: &Frame<'_>, now: Instant) -> Result<InFlightPut, ConnectionError> {
        self.joined.last_received.note(now);
        self.cost.bytes += (size_of::<Header>() as u64) + u64::from(head.header.body_bytes.get());
        let items = <[PutItem]>::ref_from_bytes(head.body).map_err(|_| ConnectionError::Unexpected(head.kind))?;
        Ok(InFlightPut::begin(&self.shared, self.joined.tenant, items.to_vec(), head.header.request.get()))
    }

    /// Stores the pages of a Put, which have all arrived, and appends the answer.
    pub fn end_put(&mut self, put: InFlightPut, now: Instant, out: &mut Outgoing) -> Result<(), ConnectionError> {
        self.joined.last_received.note(now);
        let request = put.request;
        let statuses = out.begin(&self.channel);
        let before = statuses.len();
        put.store(statuses);
        let count = statuses.len() - before;
        out.end(&self.channel, &Header::new(Kind::PutReply, count, count, request))?;
        self.push_lost(out).map(drop)
    }

    /// Starts the measurement of this thread's processor time for this connection.
    pub fn begin_serving(&mut self) {
        let wants_cpu = self.shared.rate_limiter.ask(|rate_limiter| rate_limiter.wants_cpu()).unwrap_or(false);
        self.begun_cpu_ns = wants_cpu.then(cpu_ns);
    }

    /// Ends the measurement, and adds the bytes that were made for the peer.
    pub fn end_serving(&mut self, sent_bytes: usize) {
        self.cost.bytes += sent_bytes as u64;
        if let Some(begun_ns) = self.begun_cpu_ns.take() {
            let used_ns = cpu_ns().saturating_sub(begun_ns);
            self.cost.cpu_ns += used_ns;
            add(used_ns, [&self.shared.statistics.cpu_ns, &self.joined.usage.cpu_ns]);
        }
    }

    /// Charges the session for the cost since the last call. Returns how long the session has to
    /// wait until its next frame.
    pub fn charge(&mut self) -> Duration {
        let cost = std::mem::take(&mut self.cost);
        let number = self.joined.usage.number;
        self.shared
            .rate_limiter
            .ask(|rate_limiter| rate_limiter.charge(number, cost, Instant::now()))
            .unwrap_or_default()
    }

    /// Adds the time that the connection has waited for its share.
    pub fn note_waited(&self, waited: Duration) {
        add(waited.as_nanos() as u64, [&self.shared.statistics.paced_ns, &self.joined.usage.paced_ns]);
    }

    /// Whether the session is so far behind its share that its gets are answered as misses.
    fn is_behind(&self) -> bool {
        let number = self.joined.usage.number;
        self.shared.rate_limiter.ask(|rate_limiter| rate_limiter.is_behind(number, Instant::now())).unwrap_or(false)
    }

    /// The outer error is one of the channel. `None`: the frame is malformed.
    fn put(
        &mut self,
        body: &[u8],
        count: usize,
        request: u64,
        out: &mut Outgoing,
    ) -> Result<Option<()>, ConnectionError> {
        let Ok((items, pages)) = <[PutItem]>::ref_from_prefix_with_elems(body, count) else { return Ok(None) };
        let (pages, _) = pages.as_chunks::<PAGE_SIZE>();
        let statuses = out.begin(&self.channel);
        let mut store = self.shared.store.lock();
        for (at, (items, pages)) in items.chunks(LOCKED_PAGES).zip(pages.chunks(LOCKED_PAGES)).enumerate() {
            if at > 0 {
                store.bump(); // to a waiting thread, which would otherwise be too late again and again
            }
            store.read_ahead(self.joined.tenant, items.iter().map(|item| item.key.id()));
            for (item, page) in items.iter().zip(pages) {
                let stored = store.put(self.joined.tenant, key(&item.key), item.checksum.get(), page);
                statuses.push(stored.into());
            }
        }
        drop(store);
        out.end(&self.channel, &Header::new(Kind::PutReply, count, count, request))?;
        Ok(Some(()))
    }

    /// Answers a Get. The result is that of [`Connection::put`].
    fn get(
        &mut self,
        body: &[u8],
        exclusive: bool,
        request: u64,
        out: &mut Outgoing,
    ) -> Result<Option<()>, ConnectionError> {
        let Ok(keys) = <[WireKey]>::ref_from_bytes(body) else { return Ok(None) };
        let is_behind = self.is_behind();
        let reply = out.begin(&self.channel);
        let items_at = reply.len();
        let pages_at = items_at + keys.len() * size_of::<GetItem>();
        // Every item is a miss, unless it is found below.
        reply.resize(pages_at, 0);
        reply.reserve(keys.len() * PAGE_SIZE);
        let mut store = self.shared.store.lock();
        for (at, wire_key) in keys.iter().enumerate() {
            if at % LOCKED_PAGES == 0 {
                if at > 0 {
                    store.bump();
                }
                let next = keys[at..].iter().take(LOCKED_PAGES);
                store.read_ahead(self.joined.tenant, next.map(WireKey::id));
            }
            if is_behind {
                // The borrower treats this page as gone, so it is useless here.
                store.drop_page(self.joined.tenant, key(wire_key));
                continue;
            }
            let (status, checksum) = match store.get(self.joined.tenant, key(wire_key), exclusive, reply) {
                GetResult::Miss => (wire::STATUS_MISS, 0),
                GetResult::Zero { checksum } => (wire::STATUS_ZERO, checksum),
                GetResult::Page { checksum } => (wire::STATUS_PAGE, checksum),
            };
            let item = GetItem { status, reserved: [0; 7], checksum: U64::new(checksum) };
            reply[items_at + at * size_of::<GetItem>()..][..size_of::<GetItem>()].copy_from_slice(item.as_bytes());
        }
        drop(store);
        let body_bytes = reply.len() - items_at;
        if is_behind {
            let (statistics, usage) = (&self.shared.statistics, &self.joined.usage);
            add(keys.len() as u64, [&statistics.rate_limited_misses, &usage.rate_limited_misses]);
        }
        out.end(&self.channel, &Header::new(Kind::GetReply, keys.len(), body_bytes, request))?;
        Ok(Some(()))
    }

    fn drop_pages(&mut self, body: &[u8]) -> Option<()> {
        let keys = <[WireKey]>::ref_from_bytes(body).ok()?;
        let mut store = self.shared.store.lock();
        keys.iter().for_each(|wire_key| store.drop_page(self.joined.tenant, key(wire_key)));
        Some(())
    }

    /// Appends a frame of notices, if there are any. Returns whether there were.
    pub fn push_lost(&mut self, out: &mut Outgoing) -> Result<bool, ConnectionError> {
        self.lost.clear();
        self.shared.store.lock().take_notices(self.joined.tenant, wire::ITEMS_MAX, &mut self.lost);
        if self.lost.is_empty() {
            return Ok(false);
        }
        let body = out.begin(&self.channel);
        for lost in &self.lost {
            body.extend_from_slice(WireKey::new(lost.id, lost.version).as_bytes());
        }
        let body_bytes = self.lost.len() * size_of::<WireKey>();
        out.end(&self.channel, &Header::new(Kind::Lost, self.lost.len(), body_bytes, 0))?;
        self.shared.statistics.lost_notices_sent.fetch_add(self.lost.len() as u64, Relaxed);
        Ok(true)
    }
}

/// Adds to the counters of the lender and of the session.
fn add(count: u64, sums: [&AtomicU64; 2]) {
    for sum in sums {
        sum.fetch_add(count, Relaxed);
    }
}

/// Processor time that this thread has used.
fn cpu_ns() -> u64 {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    (used.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(used.tv_nsec as u64)
}

/// Converts a name of the protocol to the store's form.
pub fn key(key: &WireKey) -> Key {
    Key { id: key.id(), version: key.version() }
}

/// A connection without a socket, for the tests of interleavings.
#[cfg(all(test, feature = "shuttle"))]
pub(crate) mod tests {
    use super::*;
    use page::Page;

    pub struct Peer {
        connection: Connection,
        out: Outgoing,
    }

    impl Peer {
        pub fn new(shared: &Arc<Shared>, session: Name, joined: Joined) -> Peer {
            let connection = Connection::new(shared, Channel::plain(), session, joined, true);
            Peer { connection, out: Outgoing::default() }
        }

        /// Sends two messages: the pages of one arrive in parts, the other arrives whole.
        pub fn put(&mut self, pages: &[(WireKey, Page)]) {
            let items: Vec<_> = pages.iter().map(|(key, _)| PutItem { key: *key, checksum: U64::ZERO }).collect();
            let pages: Vec<_> = pages.iter().map(|(_, page)| *page).collect();
            let half = items.len() / 2;
            let (shared, tenant) = (&self.connection.shared, self.connection.joined.tenant);
            let mut put = InFlightPut::begin(shared, tenant, items[..half].to_vec(), 1);
            for part in pages[..half].as_flattened().chunks(PAGE_SIZE * 2 / 3) {
                locks::shuttle::thread::yield_now();
                put.pages.take(part);
            }
            put.store(&mut Vec::new());
            let body = [items[half..].as_bytes(), pages[half..].as_flattened()].concat();
            self.connection.put(&body, items.len() - half, 1, &mut self.out).unwrap().unwrap();
            self.out.clear();
        }

        pub fn get(&mut self, keys: &[WireKey], exclusive: bool) -> Vec<Option<Page>> {
            self.connection.get(keys.as_bytes(), exclusive, 1, &mut self.out).unwrap().unwrap();
            let reply = self.out.take();
            let body = &reply[size_of::<Header>()..];
            let (items, pages) = <[GetItem]>::ref_from_prefix_with_elems(body, keys.len()).unwrap();
            let mut pages = pages.as_chunks::<PAGE_SIZE>().0.iter();
            items.iter().map(|item| (item.status == wire::STATUS_PAGE).then(|| *pages.next().unwrap())).collect()
        }

        pub fn drop_pages(&mut self, keys: &[WireKey]) {
            self.connection.drop_pages(keys.as_bytes()).unwrap();
        }

        pub fn take_lost(&mut self) {
            self.connection.push_lost(&mut self.out).unwrap();
            self.out.clear();
        }
    }
}
