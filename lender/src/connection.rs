//! One connection, from Hello to its end, in a thread of its own.
//!
//! The peer decides what comes, so nothing here trusts it: a frame that breaks the protocol ends the connection, with a
//! count and at most one line of log. The store is locked for a few pages at a time and never while bytes travel, so that a
//! slow peer delays itself only. The same goes for one that has to wait for its turn (`pace`): it does so in its own thread,
//! after it was answered, and a Ping never waits.

use crate::entry::Entry;
use crate::frames::{Broken, Frame, FrameReader, Next, send, send_frames};
use crate::pace::Cost;
use crate::sessions::{Joined, Name, Refusal};
use crate::shared::Shared;
use crate::store::{Got, Key};
use page::{PAGE_SIZE, Page};
use std::net::Shutdown;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use sync::MutexGuard;
use wire::address::Stream;
use wire::secure::{Channel, Security};
use wire::{GetItem, Header, Hello, Kind, PutItem, Refused, Welcome, WireKey};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Time for the first frames to come, whole, up to the Hello. A borrower sends each at once.
const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// How often the clock is looked at meanwhile.
const HELLO_TICK: Duration = Duration::from_millis(250);
/// Time for any later frame to come, whole, from its first byte on: 1 MiB at 1 Mbit/s.
const RECEIVE_LIMIT: Duration = Duration::from_secs(10);
/// Time for a reply to leave. A borrower that takes longer has given the page up long since.
const SEND_LIMIT: Duration = Duration::from_secs(5);
/// How often the clock is looked at meanwhile.
const SEND_TICK: Duration = Duration::from_secs(1);
/// Silence on a main connection after which notices are sent, and large buffers given back.
const MAIN_IDLE: Duration = Duration::from_millis(200);
/// Silence on a get connection after which large buffers are given back.
const GET_IDLE: Duration = Duration::from_secs(10);
/// Pages copied in or out with the store locked: 10 to 50 microseconds that another borrower may have to wait.
const LOCKED_PAGES: usize = 32;
/// Bytes of reply buffer that an idle connection keeps.
const IDLE_REPLY_BYTES: usize = 8192;

const _: () = assert!(wire::secure::SEAL_BYTES + size_of::<Hello>() <= wire::FIRST_BODY_BYTES_MAX);
const _: () = assert!(wire::secure::HANDSHAKE_BYTES <= wire::FIRST_BODY_BYTES_MAX);

/// Serves a connection until it ends. Dropping `entry` is what leaves the session.
pub fn serve(shared: &Shared, stream: &Stream, entry: Entry) {
    let ended = greet(shared, stream, &entry);
    let broken = match ended {
        Ok((mut connection, reader)) => connection.run(reader),
        Err(broken) => broken,
    };
    let _ = stream.shutdown(Shutdown::Both);
    match &broken {
        // A peer may go as it likes, and its network too.
        Broken::Closed | Broken::Goodbye | Broken::Io(_) => {
            tracing::debug!(peer = stream.peer(), reason = %broken, "connection ended")
        }
        _ if shared.stop.is_requested() => {}
        Broken::Refused => {}
        Broken::Stuck => {
            shared.tally.stuck_connections.fetch_add(1, Relaxed);
            shared.complaints.log(&stream.peer(), &broken);
        }
        _ => {
            shared.tally.malformed_frames.fetch_add(1, Relaxed);
            shared.complaints.log(&stream.peer(), &broken);
        }
    }
}

/// Tells a peer why it is not served, if it can be told without waiting.
pub fn refuse(shared: &Shared, stream: &Stream, channel: &Channel, code: u32, text: &str) {
    shared.tally.refused_connections.fetch_add(1, Relaxed);
    if code == wire::REFUSED_KEY {
        shared.tally.refused_keys.fetch_add(1, Relaxed);
    }
    shared.complaints.log(&stream.peer(), &text);
    let mut frame = Vec::new();
    push_frame(&mut frame, Kind::Refused, 0, &Refused::new(code, text));
    let _ = stream.set_write_timeout(Some(Duration::from_millis(1)));
    let _ = send_frames(stream, channel, &frame, &mut Vec::new(), Duration::ZERO);
}

/// The first frames: whoever comes has to have the pool's key, if there is one, before anything of a session is touched.
fn greet<'a>(
    shared: &'a Shared,
    stream: &'a Stream,
    entry: &'a Entry,
) -> Result<(Connection<'a>, FrameReader), Broken> {
    stream.set_read_timeout(Some(HELLO_TICK)).map_err(Broken::Io)?;
    stream.set_write_timeout(Some(SEND_TICK)).map_err(Broken::Io)?;
    let begun = Instant::now();
    let refused = |channel: &Channel, code, text: &str| {
        refuse(shared, stream, channel, code, text);
        Broken::Refused
    };
    let refused_protocol = |channel: &Channel, theirs: u64| {
        let ours = wire::PROTOCOL;
        let text = format!("this lender speaks protocol {ours}, not {theirs}: install the same version on both sides");
        refused(channel, wire::REFUSED_PROTOCOL, &text)
    };
    let mut channel = Channel::plain();
    let mut reader = FrameReader::new();
    let (kind, hello) = loop {
        let may_come = |kind| kind == Kind::Hello || kind == Kind::Handshake1 && !channel.is_sealed();
        // Both together have the time of one: a peer does not get more of it by beginning well.
        let frame = match reader.next(stream, HELLO_LIMIT, Some(begun), may_come) {
            Ok(Next::Frame(frame)) => frame,
            Ok(Next::Idle) => return Err(Broken::Stuck),
            Err(Broken::Unexpected(kind)) => {
                refused(&channel, wire::REFUSED_HELLO, "the first frame must be a Hello");
                return Err(Broken::Unexpected(kind));
            }
            Err(broken) => return Err(broken),
        };
        if frame.kind == Kind::Hello {
            break (frame.kind, Hello::read_from_bytes(frame.body));
        }
        if frame.header.request.get() != wire::PROTOCOL.into() {
            return Err(refused_protocol(&channel, frame.header.request.get()));
        }
        let Security::Keyed(key) = &shared.security else {
            let text = "this lender has no key: start it with the pool's, --key FILE, or mount with --trust-network";
            return Err(refused(&channel, wire::REFUSED_KEY, text));
        };
        let Ok((answer, sealed)) = wire::secure::answer(key, frame.body) else {
            let text =
                "the pool key is another one here: copy the key file of this lender's machine, or the other way round";
            return Err(refused(&channel, wire::REFUSED_KEY, text));
        };
        let mut handshake = Vec::new();
        push_frame(&mut handshake, Kind::Handshake2, 0, &answer);
        send(stream, &handshake, HELLO_LIMIT)?;
        channel = sealed;
        reader.open_with(channel.clone());
    };
    let hello = hello.map_err(|_| Broken::Unexpected(kind))?;
    if hello.magic != wire::MAGIC {
        return Err(refused(&channel, wire::REFUSED_HELLO, "the Hello does not begin as one of this protocol"));
    }
    if hello.protocol.get() != wire::PROTOCOL {
        return Err(refused_protocol(&channel, hello.protocol.get().into()));
    }
    if !channel.is_sealed() && matches!(shared.security, Security::Keyed(_)) {
        return Err(refused(&channel, wire::REFUSED_KEY, "this lender wants the pool's key: --key FILE"));
    }
    let is_main = match hello.role.get() {
        wire::ROLE_MAIN => true,
        wire::ROLE_GET => false,
        _ => return Err(refused(&channel, wire::REFUSED_HELLO, "the Hello names a role that there is not")),
    };
    let joined = if is_main { entry.join_main(hello.session) } else { entry.join_get(hello.session) };
    let joined = match joined {
        Ok(joined) => joined,
        Err(Refusal::Busy(text)) => return Err(refused(&channel, wire::REFUSED_BUSY, text)),
        Err(Refusal::NoSession) => {
            return Err(refused(&channel, wire::REFUSED_SESSION, "this session has no main connection here"));
        }
    };
    let idle = if is_main { MAIN_IDLE } else { GET_IDLE };
    stream.set_read_timeout(Some(idle)).map_err(Broken::Io)?;
    let resumed = is_main && joined.resumed;
    if resumed {
        shared.tally.resumed_sessions.fetch_add(1, Relaxed);
    }
    let session = hello.session;
    let (reply, heads, lost) = (Vec::new(), Vec::new(), Vec::new());
    let cost = Cost::default();
    let cpu_ns = shared.pace.as_ref().is_some_and(|pace| pace.lock().wants_cpu()).then(cpu_ns);
    let mut connection =
        Connection { shared, stream, channel, entry, session, joined, is_main, reply, heads, lost, cost, cpu_ns };
    let welcome = Welcome {
        protocol: U32::new(wire::PROTOCOL),
        flags: U32::new(if resumed { wire::WELCOME_RESUMED } else { 0 }),
        incarnation: U64::new(shared.incarnation),
        capacity_pages: U64::new(shared.capacity_pages),
    };
    push_frame(&mut connection.reply, Kind::Welcome, 0, &welcome);
    connection.send_reply()?;
    Ok((connection, reader))
}

struct Connection<'a> {
    shared: &'a Shared,
    stream: &'a Stream,
    channel: Channel,
    entry: &'a Entry,
    session: Name,
    joined: Joined,
    is_main: bool,
    /// What goes out next, in one write.
    reply: Vec<u8>,
    /// The sealed parts of it.
    heads: Vec<u8>,
    lost: Vec<Key>,
    /// What was not charged yet.
    cost: Cost,
    /// Time of a processor that this thread had used when it was charged last, if that is measured.
    cpu_ns: Option<u64>,
}

impl Connection<'_> {
    fn run(&mut self, mut reader: FrameReader) -> Broken {
        loop {
            let is_main = self.is_main;
            let may_come = |kind| match kind {
                Kind::Ping => true,
                Kind::Put | Kind::Drop | Kind::Bye => is_main,
                Kind::Get => !is_main,
                _ => false,
            };
            let done = match reader.next(self.stream, RECEIVE_LIMIT, None, may_come) {
                Ok(Next::Frame(frame)) => self.answer(&frame),
                Ok(Next::Idle) => {
                    reader.shrink();
                    self.idle()
                }
                Err(broken) => return broken,
            };
            if let Err(broken) = done {
                return broken;
            }
        }
    }

    fn answer(&mut self, frame: &Frame<'_>) -> Result<(), Broken> {
        self.joined.heard.note(Instant::now());
        self.cost.bytes += (size_of::<Header>() + frame.body.len()) as u64;
        let request = frame.header.request.get();
        let understood = match frame.kind {
            Kind::Put => self.put(frame.body, frame.header.items.get().into(), request),
            Kind::Get => self.get(frame.body, frame.header.flags & wire::GET_EXCLUSIVE != 0, request),
            Kind::Drop => self.drop_pages(frame.body),
            Kind::Ping => {
                let room = wire::Room { free_pages: U64::new(self.shared.store.lock().free_pages()) };
                push_frame(&mut self.reply, Kind::Pong, request, &room);
                Some(())
            }
            Kind::Bye => {
                self.entry.end_session(self.session);
                return Err(Broken::Goodbye);
            }
            _ => None,
        };
        // The header was validated and the kind may come, so this is only to have no panic here.
        understood.ok_or(Broken::Unexpected(frame.kind))?;
        if self.is_main {
            self.push_lost();
        }
        self.send_reply()?;
        self.take_turn(frame.kind != Kind::Ping);
        Ok(())
    }

    /// Charges the session for what was done since the last time, and waits until it is its turn again.
    fn take_turn(&mut self, may_wait: bool) {
        let Some(pace) = &self.shared.pace else { return };
        let (tally, usage) = (&self.shared.tally, &self.joined.usage);
        if let Some(before_ns) = &mut self.cpu_ns {
            let now_ns = cpu_ns();
            self.cost.cpu_ns = now_ns.saturating_sub(std::mem::replace(before_ns, now_ns));
            add(self.cost.cpu_ns, [&tally.cpu_ns, &usage.cpu_ns]);
        }
        let cost = std::mem::take(&mut self.cost);
        let wait = pace.lock().charge(usage.number, cost, Instant::now());
        if !may_wait || wait.is_zero() {
            return;
        }
        let begun = Instant::now();
        self.shared.stop.pause(self.stream, wait);
        let waited_ns = begun.elapsed().as_nanos() as u64;
        add(waited_ns, [&tally.paced_ns, &usage.paced_ns]);
    }

    /// Whether the session is so far behind its share that it gets nothing for a while.
    fn is_behind(&self) -> bool {
        let pace = self.shared.pace.as_ref();
        pace.is_some_and(|pace| pace.lock().is_behind(self.joined.usage.number, Instant::now()))
    }

    fn put(&mut self, body: &[u8], count: usize, request: u64) -> Option<()> {
        let (items, pages) = <[PutItem]>::ref_from_prefix_with_elems(body, count).ok()?;
        let (pages, _) = pages.as_chunks::<PAGE_SIZE>();
        push_header(&mut self.reply, Kind::PutReply, count, count, request);
        let mut store = self.shared.store.lock();
        for (items, pages) in items.chunks(LOCKED_PAGES).zip(pages.chunks(LOCKED_PAGES)) {
            for (item, page) in items.iter().zip(pages) {
                let stored = store.put(self.joined.owner, key(&item.key), item.checksum.get(), page);
                self.reply.push(stored.into());
            }
            store.settle();
            MutexGuard::bump(&mut store); // to whoever waits, who would else come too late time after time
        }
        Some(())
    }

    fn get(&mut self, body: &[u8], exclusive: bool, request: u64) -> Option<()> {
        let keys = <[WireKey]>::ref_from_bytes(body).ok()?;
        let is_behind = self.is_behind();
        let pages_at = size_of::<Header>() + size_of_val(keys);
        debug_assert!(self.reply.is_empty() && size_of::<GetItem>() == size_of::<WireKey>());
        self.reply.resize(pages_at + keys.len() * PAGE_SIZE, 0);
        let (head, pages) = self.reply.split_at_mut(pages_at);
        let (header, items) = head.split_at_mut(size_of::<Header>());
        let items = <[GetItem]>::mut_from_bytes(items).ok()?;
        let (pages, _) = pages.as_chunks_mut::<PAGE_SIZE>();
        let mut page_count = 0;
        let mut store = self.shared.store.lock();
        for (keys, items) in keys.chunks(LOCKED_PAGES).zip(items.chunks_mut(LOCKED_PAGES)) {
            for (wire_key, item) in keys.iter().zip(items) {
                if is_behind {
                    // The borrower takes it for gone, so it is of no more use here.
                    store.drop_page(self.joined.owner, key(wire_key));
                    continue;
                }
                let page: &mut Page = &mut pages[page_count];
                let (status, checksum) = match store.get(self.joined.owner, key(wire_key), exclusive, page) {
                    Got::Miss => (wire::STATUS_MISS, 0),
                    Got::Zero { checksum } => (wire::STATUS_ZERO, checksum),
                    Got::Page { checksum } => {
                        page_count += 1;
                        (wire::STATUS_PAGE, checksum)
                    }
                };
                *item = GetItem { status, reserved: [0; 7], checksum: U64::new(checksum) };
            }
            MutexGuard::bump(&mut store);
        }
        drop(store);
        if is_behind {
            let (tally, usage) = (&self.shared.tally, &self.joined.usage);
            add(keys.len() as u64, [&tally.paced_misses, &usage.paced_misses]);
        }
        let body_bytes = size_of_val(items) + page_count * PAGE_SIZE;
        header.copy_from_slice(Header::new(Kind::GetReply, keys.len(), body_bytes, request).as_bytes());
        self.reply.truncate(size_of::<Header>() + body_bytes);
        Some(())
    }

    fn drop_pages(&mut self, body: &[u8]) -> Option<()> {
        let keys = <[WireKey]>::ref_from_bytes(body).ok()?;
        let mut store = self.shared.store.lock();
        keys.iter().for_each(|wire_key| store.drop_page(self.joined.owner, key(wire_key)));
        Some(())
    }

    /// Appends a frame of notices, when there are any.
    fn push_lost(&mut self) {
        self.lost.clear();
        self.shared.store.lock().take_notices(self.joined.owner, wire::ITEMS_MAX, &mut self.lost);
        if self.lost.is_empty() {
            return;
        }
        push_header(&mut self.reply, Kind::Lost, self.lost.len(), self.lost.len() * size_of::<WireKey>(), 0);
        for lost in &self.lost {
            self.reply.extend_from_slice(WireKey::new(lost.id, lost.version).as_bytes());
        }
        self.shared.tally.lost_notices_sent.fetch_add(self.lost.len() as u64, Relaxed);
    }

    fn idle(&mut self) -> Result<(), Broken> {
        if self.reply.capacity() > IDLE_REPLY_BYTES {
            self.reply = Vec::new();
        }
        while self.is_main {
            self.push_lost();
            if self.reply.is_empty() {
                break;
            }
            self.send_reply()?;
            self.take_turn(false);
        }
        Ok(())
    }

    fn send_reply(&mut self) -> Result<(), Broken> {
        self.cost.bytes += self.reply.len() as u64;
        let sent = send_frames(self.stream, &self.channel, &self.reply, &mut self.heads, SEND_LIMIT);
        self.reply.clear();
        sent
    }
}

/// Counts for the lender and for the session.
fn add(count: u64, sums: [&AtomicU64; 2]) {
    for sum in sums {
        sum.fetch_add(count, Relaxed);
    }
}

/// Time of a processor that this thread has used.
fn cpu_ns() -> u64 {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    (used.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(used.tv_nsec as u64)
}

fn key(key: &WireKey) -> Key {
    Key { id: key.id(), version: key.version() }
}

fn push_header(frame: &mut Vec<u8>, kind: Kind, items: usize, body_bytes: usize, request: u64) {
    frame.extend_from_slice(Header::new(kind, items, body_bytes, request).as_bytes());
}

fn push_frame<T: IntoBytes + Immutable>(frame: &mut Vec<u8>, kind: Kind, request: u64, body: &T) {
    push_header(frame, kind, 0, size_of::<T>(), request);
    frame.extend_from_slice(body.as_bytes());
}

/// A connection without its socket's waiting, for the tests of interleavings.
#[cfg(all(test, feature = "shuttle"))]
pub(crate) mod tests {
    use super::*;

    pub struct Peer<'a>(Connection<'a>);

    impl<'a> Peer<'a> {
        pub fn new(
            shared: &'a Shared,
            stream: &'a Stream,
            entry: &'a Entry,
            session: Name,
            joined: Joined,
        ) -> Peer<'a> {
            let (reply, heads, lost) = (Vec::new(), Vec::new(), Vec::new());
            let channel = Channel::plain();
            let (cost, cpu_ns, is_main) = (Cost::default(), None, true);
            Peer(Connection {
                shared,
                stream,
                channel,
                entry,
                session,
                joined,
                is_main,
                reply,
                heads,
                lost,
                cost,
                cpu_ns,
            })
        }

        pub fn put(&mut self, pages: &[(WireKey, Page)]) {
            let items: Vec<_> = pages.iter().map(|(key, _)| PutItem { key: *key, checksum: U64::ZERO }).collect();
            let pages: Vec<_> = pages.iter().map(|(_, page)| *page).collect();
            self.0.put(&[items.as_bytes(), pages.as_flattened()].concat(), items.len(), 1).unwrap();
            self.0.reply.clear();
        }

        pub fn get(&mut self, keys: &[WireKey], exclusive: bool) -> Vec<Option<Page>> {
            self.0.get(keys.as_bytes(), exclusive, 1).unwrap();
            let reply = std::mem::take(&mut self.0.reply);
            let body = &reply[size_of::<Header>()..];
            let (items, pages) = <[GetItem]>::ref_from_prefix_with_elems(body, keys.len()).unwrap();
            let mut pages = pages.as_chunks::<PAGE_SIZE>().0.iter();
            items.iter().map(|item| (item.status == wire::STATUS_PAGE).then(|| *pages.next().unwrap())).collect()
        }

        pub fn drop_pages(&mut self, keys: &[WireKey]) {
            self.0.drop_pages(keys.as_bytes()).unwrap();
        }

        pub fn take_lost(&mut self) {
            self.0.push_lost();
            self.0.reply.clear();
        }
    }
}
