//! Connections to a host with a key for each peer, by which the host identifies it.

use crate::address::{Address, Stream};
use crate::frames::{ConnectionError, FrameReader, Outgoing, send};
use crate::key::PoolKey;
use crate::rate_limited_log::RateLimitedLog;
use crate::secure::{self, Channel, Handshake, Security};
use crate::{Hello, Kind, Refused, Welcome};
use std::io;
use std::time::{Duration, Instant};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, FromZeros};

/// Time limit for the first frames.
const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// How often the clock is checked meanwhile.
const TICK: Duration = Duration::from_millis(250);

/// The label for [`PoolKey::derive`] that distinguishes keys.
const KEY_NAME: &str = "guest";

/// Checks that the keys identify the peers: no two peers have the same key, and at most one has
/// none.
///
/// # Errors
/// Returns the index of a peer that cannot be distinguished from others.
pub fn check_keys(keys: &[Option<&PoolKey>]) -> Result<(), usize> {
    let name = |key: &Option<&PoolKey>| key.map(|key| key.derive(KEY_NAME));
    match (0..keys.len()).find(|nth| keys[..*nth].iter().any(|other| name(other) == name(&keys[*nth]))) {
        Some(twice) => Err(twice),
        None => Ok(()),
    }
}

/// A peer that was identified.
pub struct IdentifiedPeer {
    /// Its index among the keys.
    pub nth: usize,
    /// Frames to and from it.
    pub channel: Channel,
    /// Its received bytes.
    pub reader: FrameReader,
}

/// Identifies the peer of a connection. The caller then welcomes or refuses it. Without a key it is
/// the peer that has none.
///
/// # Errors
/// Fails if it is none of them (it was sent the reason), or if its frames are malformed.
pub fn handshake(
    stream: &Stream,
    keys: &[Option<&PoolKey>],
    role: u32,
    command: &str,
) -> Result<IdentifiedPeer, ConnectionError> {
    stream.set_read_timeout(Some(TICK)).map_err(ConnectionError::Io)?;
    stream.set_write_timeout(Some(TICK)).map_err(ConnectionError::Io)?;
    let deadline = Instant::now() + HELLO_LIMIT;
    let mut channel = Channel::plain();
    let mut reader = FrameReader::new();
    let mut who = keys.iter().position(Option::is_none);
    let hello = loop {
        let may_come = |kind| kind == Kind::Hello || kind == Kind::Handshake1 && !channel.is_sealed();
        let frame = reader.next(stream, deadline, may_come)?;
        if frame.kind == Kind::Hello {
            break Hello::read_from_bytes(frame.body).map_err(|_| ConnectionError::Unexpected(Kind::Hello))?;
        }
        let protocol = frame.header.request.get();
        let answer = |key: &Option<&PoolKey>| secure::answer((*key)?, frame.body).ok();
        let found = keys.iter().enumerate().find_map(|(nth, key)| Some((nth, answer(key)?)));
        let Some((nth, (answer, sealed))) = found.filter(|_| protocol == crate::PROTOCOL.into()) else {
            let text = "no guest here has this key, or it speaks another version: give the host this guest's key, --guest NAME=KEYFILE";
            return Err(refuse(stream, &channel, crate::REFUSED_KEY, text));
        };
        let mut handshake = Outgoing::default();
        handshake.push(&channel, Kind::Handshake2, 0, &answer)?;
        send(stream, handshake.bytes(), HELLO_LIMIT)?;
        (who, channel) = (Some(nth), sealed);
        reader.open_with(channel.clone());
    };
    let Some(nth) = who else {
        return Err(refuse(stream, &channel, crate::REFUSED_KEY, "this host wants the guest's key: --key FILE"));
    };
    if hello.magic != crate::MAGIC || hello.role.get() != role || hello.protocol.get() != crate::PROTOCOL {
        let text = format!("connect with `{command}` of the same version");
        return Err(refuse(stream, &channel, crate::REFUSED_HELLO, &text));
    }
    Ok(IdentifiedPeer { nth, channel, reader })
}

/// Sends a peer the reason for a refusal, before the connection is closed.
pub fn refuse(stream: &Stream, channel: &Channel, code: u32, text: &str) -> ConnectionError {
    static REFUSALS: RateLimitedLog = RateLimitedLog::new();
    if let Some(suppressed) = REFUSALS.next() {
        tracing::info!(peer = stream.peer(), suppressed, "a guest is refused: {text}");
    }
    let mut frame = Outgoing::default();
    if frame.push(channel, Kind::Refused, 0, &Refused::new(code, text)).is_ok() {
        let _ = send(stream, frame.bytes(), HELLO_LIMIT);
    }
    ConnectionError::Refused
}

/// Sends a peer its Welcome.
///
/// # Errors
/// Fails if the peer does not receive it.
pub fn welcome(stream: &Stream, channel: &Channel) -> Result<(), ConnectionError> {
    let mut frame = Outgoing::default();
    let welcome = Welcome { protocol: U32::new(crate::PROTOCOL), ..Welcome::new_zeroed() };
    frame.push(channel, Kind::Welcome, 0, &welcome)?;
    send(stream, frame.bytes(), HELLO_LIMIT)
}

/// A host that has accepted this process.
pub struct Joined {
    /// The stream to it; reads and writes return after `tick`.
    pub stream: Stream,
    /// Frames to and from it.
    pub channel: Channel,
    /// Its received bytes.
    pub reader: FrameReader,
}

/// Connects to a host as one of its peers.
///
/// # Errors
/// Fails if the host cannot be reached, or refuses: then with its text.
pub fn join(host: &Address, security: &Security, role: u32, limit: Duration, tick: Duration) -> io::Result<Joined> {
    let stream = security.connect(host, limit)?;
    stream.set_read_timeout(Some(tick))?;
    stream.set_write_timeout(Some(tick))?;
    let deadline = Instant::now() + limit;
    let mut joined = Joined { stream, channel: Channel::plain(), reader: FrameReader::new() };
    if let Security::Keyed(key) = security {
        let (handshake, first) = Handshake::begin(key).map_err(failed)?;
        joined.send(Kind::Handshake1, crate::PROTOCOL.into(), &first, limit)?;
        let answer = joined.receive(Kind::Handshake2, deadline)?;
        joined.channel = handshake.finish(&answer).map_err(failed)?;
        joined.reader.open_with(joined.channel.clone());
    }
    let mut session = [0; 16];
    rustix::rand::getrandom(&mut session, rustix::rand::GetRandomFlags::empty())?;
    let (protocol, role) = (U32::new(crate::PROTOCOL), U32::new(role));
    joined.send(Kind::Hello, 0, &Hello { magic: crate::MAGIC, protocol, role, session }, limit)?;
    joined.receive(Kind::Welcome, deadline)?;
    Ok(joined)
}

impl Joined {
    /// Sends a frame.
    ///
    /// # Errors
    /// Fails if the host does not take it in time.
    pub fn send<T: zerocopy::IntoBytes + zerocopy::Immutable>(
        &mut self,
        kind: Kind,
        request: u64,
        body: &T,
        limit: Duration,
    ) -> io::Result<()> {
        let mut frame = Outgoing::default();
        frame.push(&self.channel, kind, request, body).map_err(failed)?;
        send(&self.stream, frame.bytes(), limit).map_err(failed)
    }

    /// Waits for a frame of a kind.
    ///
    /// # Errors
    /// Fails if it does not arrive in time, or the host refuses: then with its text.
    pub fn receive(&mut self, wanted: Kind, deadline: Instant) -> io::Result<Vec<u8>> {
        let frame = self.reader.next(&self.stream, deadline, |kind| kind == wanted || kind == Kind::Refused);
        let frame = frame.map_err(failed)?;
        match (frame.kind, Refused::read_from_bytes(frame.body)) {
            (Kind::Refused, Ok(refused)) if wanted != Kind::Refused => Err(failed(refused.text())),
            _ => Ok(frame.body.to_vec()),
        }
    }
}

fn failed(what: impl std::fmt::Display) -> io::Error {
    io::Error::other(what.to_string())
}
