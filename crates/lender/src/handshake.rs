//! The handshake of a connection, in a thread of its own: from the first frame to the Welcome.
//!
//! A connection is unauthenticated until its handshake has ended. Its cost is bounded in time
//! ([`HELLO_LIMIT`]), bytes ([`wire::FIRST_BODY_BYTES_MAX`]) and number
//! ([`crate::sessions::UNAUTHENTICATED_MAX`]). Handshakes need arithmetic, and joining a session
//! may have to wait for another connection to end. So each unauthenticated connection has a thread,
//! which cannot delay connected borrowers.

use crate::connection::Connection;
use crate::entry::Entry;
use crate::event_loop::{LoopConnection, SEND_LIMIT};
use crate::sessions::Refusal;
use crate::shared::Shared;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use wire::address::Stream;
use wire::frames::{ConnectionError, FrameReader, Outgoing, send, send_some};
use wire::secure::{Channel, Security};
use wire::{Hello, Kind, Refused, Welcome};
use zerocopy::little_endian::{U32, U64};

/// Time limit for the first frames, complete, up to the Hello. A borrower sends each at once.
const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// How often the clock is checked while a frame arrives.
const HELLO_TICK: Duration = Duration::from_millis(250);
/// How often the clock is checked while a frame leaves.
const SEND_TICK: Duration = Duration::from_secs(1);

const _: () = assert!(wire::secure::SEAL_BYTES + size_of::<Hello>() <= wire::FIRST_BODY_BYTES_MAX);
const _: () = assert!(wire::secure::HANDSHAKE_BYTES <= wire::FIRST_BODY_BYTES_MAX);

/// Does the handshake with a new peer. If it succeeds, the connection is returned, and an event
/// loop serves it. Otherwise nothing of the peer is left.
pub fn receive(shared: &Arc<Shared>, stream: Arc<Stream>, entry: Entry) -> Option<LoopConnection> {
    match handshake(shared, &stream, &entry) {
        Ok((connection, reader)) => Some(LoopConnection::new(stream, entry, connection, reader)),
        Err(broken) => {
            let _ = stream.shutdown(Shutdown::Both);
            note_end(shared, &stream, &broken);
            None
        }
    }
}

/// Counts and logs the reason why a connection has ended.
pub fn note_end(shared: &Shared, stream: &Stream, broken: &ConnectionError) {
    match broken {
        // A peer may disconnect at any time, and so may its network.
        ConnectionError::Closed | ConnectionError::Goodbye | ConnectionError::Io(_) => {
            tracing::debug!(peer = stream.peer(), reason = %broken, "connection ended")
        }
        ConnectionError::Bug => tracing::error!(peer = stream.peer(), "{broken}"),
        _ if shared.stop.is_requested() => {}
        ConnectionError::Refused => {}
        ConnectionError::Stuck => {
            shared.statistics.stuck_connections.fetch_add(1, Relaxed);
            shared.rate_limited_log.log(&stream.peer(), broken);
        }
        _ => {
            shared.statistics.malformed_frames.fetch_add(1, Relaxed);
            shared.rate_limited_log.log(&stream.peer(), broken);
        }
    }
}

/// Sends a peer the reason why it is not served, if that is possible without waiting.
pub fn refuse(shared: &Shared, stream: &Stream, channel: &Channel, code: u32, text: &str) {
    shared.statistics.refused_connections.fetch_add(1, Relaxed);
    if code == wire::REFUSED_KEY {
        shared.statistics.refused_keys.fetch_add(1, Relaxed);
    }
    shared.rate_limited_log.log(&stream.peer(), &text);
    let mut frame = Outgoing::default();
    if frame.push(channel, Kind::Refused, 0, &Refused::new(code, text)).is_ok() {
        let _ = send_some(stream, frame.bytes());
    }
}

/// Receives the first frames: a peer must have the pool's key, if there is one, before anything of
/// a session is touched.
fn handshake(
    shared: &Arc<Shared>,
    stream: &Stream,
    entry: &Entry,
) -> Result<(Connection, FrameReader), ConnectionError> {
    stream.set_read_timeout(Some(HELLO_TICK)).map_err(ConnectionError::Io)?;
    stream.set_write_timeout(Some(SEND_TICK)).map_err(ConnectionError::Io)?;
    // Both frames together have the time limit of one: a peer gets no more time because its first
    // frame is valid.
    let deadline = Instant::now() + HELLO_LIMIT;
    let refused = |channel: &Channel, code, text: &str| {
        refuse(shared, stream, channel, code, text);
        ConnectionError::Refused
    };
    let refused_protocol = |channel: &Channel, theirs: u64| {
        let ours = wire::PROTOCOL;
        let text = format!("this lender speaks protocol {ours}, not {theirs}: install the same version on both sides");
        refused(channel, wire::REFUSED_PROTOCOL, &text)
    };
    let mut channel = Channel::plain();
    let mut reader = FrameReader::new();
    let hello = loop {
        let may_come = |kind| kind == Kind::Hello || kind == Kind::Handshake1 && !channel.is_sealed();
        let frame = match reader.next(stream, deadline, may_come) {
            Ok(frame) => frame,
            Err(ConnectionError::Unexpected(kind)) => {
                refused(&channel, wire::REFUSED_HELLO, "the first frame must be a Hello");
                return Err(ConnectionError::Unexpected(kind));
            }
            Err(broken) => return Err(broken),
        };
        if frame.kind == Kind::Hello {
            break Hello::read(frame.header.request.get(), frame.body, channel.is_sealed());
        }
        if frame.header.request.get() != u64::from(wire::PROTOCOL) {
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
        let mut handshake = Outgoing::default();
        handshake.push(&channel, Kind::Handshake2, 0, &answer)?;
        send(stream, handshake.bytes(), HELLO_LIMIT)?;
        channel = sealed;
        reader.open_with(channel.clone());
    };
    let (hello, next_version) = hello.ok_or(ConnectionError::Unexpected(Kind::Hello))?;
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
    let joined = if is_main { entry.join_main(hello.session, next_version) } else { entry.join_get(hello.session) };
    let joined = match joined {
        Ok(joined) => joined,
        Err(Refusal::Busy(text)) => return Err(refused(&channel, wire::REFUSED_BUSY, text)),
        Err(Refusal::NoSession) => {
            return Err(refused(&channel, wire::REFUSED_SESSION, "this session has no main connection here"));
        }
        Err(Refusal::Behind) => {
            let text = "this session has gone on since: the machine was set back to an earlier state, or is a copy";
            return Err(refused(&channel, wire::REFUSED_BEHIND, text));
        }
    };
    let resumed = is_main && joined.resumed;
    if resumed {
        shared.statistics.resumed_sessions.fetch_add(1, Relaxed);
    }
    let welcome = Welcome {
        protocol: U32::new(wire::PROTOCOL),
        flags: U32::new(if resumed { wire::WELCOME_RESUMED } else { 0 }),
        incarnation: U64::new(shared.incarnation),
        capacity_pages: U64::new(shared.capacity_pages),
    };
    let mut first = Outgoing::default();
    first.push(&channel, Kind::Welcome, 0, &welcome)?;
    send(stream, first.bytes(), SEND_LIMIT)?;
    Ok((Connection::new(shared, channel, hello.session, joined, is_main), reader))
}
