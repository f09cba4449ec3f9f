//! One connection, from Hello to its end, in a thread of its own.
//!
//! The peer decides what comes, so nothing here trusts it: a frame that breaks the protocol ends the connection, with a
//! count and at most one line of log. The store is locked for a few pages at a time and never while bytes travel, so that a
//! slow peer delays itself only.

use crate::entry::Entry;
use crate::frames::{Broken, Frame, FrameReader, Next, send};
use crate::sessions::{Joined, Name, Refusal};
use crate::shared::Shared;
use crate::store::{Got, Key};
use page::{PAGE_SIZE, Page};
use std::net::Shutdown;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use sync::MutexGuard;
use wire::address::Stream;
use wire::{GetItem, Header, Hello, Kind, PutItem, Refused, Welcome, WireKey};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Time for the first frame to come, whole. A borrower sends it at once.
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
pub fn refuse(shared: &Shared, stream: &Stream, code: u32, text: &str) {
    shared.tally.refused_connections.fetch_add(1, Relaxed);
    shared.complaints.log(&stream.peer(), &text);
    let mut frame = Vec::new();
    push_frame(&mut frame, Kind::Refused, 0, &Refused::new(code, text));
    let _ = stream.set_write_timeout(Some(Duration::from_millis(1)));
    let _ = send(stream, &frame, Duration::ZERO);
}

/// The handshake.
fn greet<'a>(
    shared: &'a Shared,
    stream: &'a Stream,
    entry: &'a Entry,
) -> Result<(Connection<'a>, FrameReader), Broken> {
    stream.set_read_timeout(Some(HELLO_TICK)).map_err(Broken::Io)?;
    stream.set_write_timeout(Some(SEND_TICK)).map_err(Broken::Io)?;
    let refused = |code, text: &str| {
        refuse(shared, stream, code, text);
        Broken::Refused
    };
    let mut reader = FrameReader::new();
    let first = reader.next(stream, HELLO_LIMIT, Some(Instant::now()), |kind| kind == Kind::Hello);
    let hello = match first {
        Ok(Next::Frame(frame)) => Hello::read_from_bytes(frame.body).map_err(|_| Broken::Unexpected(Kind::Hello))?,
        Ok(Next::Idle) => return Err(Broken::Stuck),
        Err(Broken::Unexpected(kind)) => {
            refused(wire::REFUSED_HELLO, "the first frame must be a Hello");
            return Err(Broken::Unexpected(kind));
        }
        Err(broken) => return Err(broken),
    };
    if hello.magic != wire::MAGIC {
        return Err(refused(wire::REFUSED_HELLO, "the Hello does not begin as one of this protocol"));
    }
    if hello.protocol.get() != wire::PROTOCOL {
        let (ours, theirs) = (wire::PROTOCOL, hello.protocol.get());
        let text = format!("this lender speaks protocol {ours}, not {theirs}: install the same version on both sides");
        return Err(refused(wire::REFUSED_PROTOCOL, &text));
    }
    let is_main = match hello.role.get() {
        wire::ROLE_MAIN => true,
        wire::ROLE_GET => false,
        _ => return Err(refused(wire::REFUSED_HELLO, "the Hello names a role that there is not")),
    };
    let joined = if is_main { entry.join_main(hello.session) } else { entry.join_get(hello.session) };
    let joined = match joined {
        Ok(joined) => joined,
        Err(Refusal::Busy(text)) => return Err(refused(wire::REFUSED_BUSY, text)),
        Err(Refusal::NoSession) => {
            return Err(refused(wire::REFUSED_SESSION, "this session has no main connection here"));
        }
    };
    let idle = if is_main { MAIN_IDLE } else { GET_IDLE };
    stream.set_read_timeout(Some(idle)).map_err(Broken::Io)?;
    let resumed = is_main && joined.resumed;
    if resumed {
        shared.tally.resumed_sessions.fetch_add(1, Relaxed);
    }
    let session = hello.session;
    let mut connection =
        Connection { shared, stream, entry, session, joined, is_main, reply: Vec::new(), lost: Vec::new() };
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
    entry: &'a Entry,
    session: Name,
    joined: Joined,
    is_main: bool,
    /// What goes out next, in one write.
    reply: Vec<u8>,
    lost: Vec<Key>,
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
        let request = frame.header.request.get();
        let understood = match frame.kind {
            Kind::Put => self.put(frame.body, frame.header.items.get().into(), request),
            Kind::Get => self.get(frame.body, frame.header.flags & wire::GET_EXCLUSIVE != 0, request),
            Kind::Drop => self.drop_pages(frame.body),
            Kind::Ping => {
                push_header(&mut self.reply, Kind::Pong, 0, 0, request);
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
        self.send_reply()
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
        }
        Ok(())
    }

    fn send_reply(&mut self) -> Result<(), Broken> {
        let sent = send(self.stream, &self.reply, SEND_LIMIT);
        self.reply.clear();
        sent
    }
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
            let (reply, lost) = (Vec::new(), Vec::new());
            Peer(Connection { shared, stream, entry, session, joined, is_main: true, reply, lost })
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
