//! One connection to a lender: the handshake, and whole frames in both directions.
//!
//! Anything from the lender that violates the protocol ends the connection. No function here waits
//! much longer than the time limits below, whatever the lender does. The stream's own limit applies
//! to one system call, and a deadline applies to all calls of one answer. So bytes that trickle in
//! do not count as an answer. The longest wait is twice the limit.
//!
//! With the pool's key every frame is sealed ([`wire::secure`]), except for its pages, which the
//! put buffers have sealed already. The contents of a frame are used only after its seal was
//! verified. Until then its header only determines how many bytes to read, within bounds.

use crate::read::state::PageResult;
use page::{PAGE_SIZE, Version};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};
use wire::address::{Address, Stream};
use wire::secure::{Channel, HANDSHAKE_BYTES, Handshake, Security};
use wire::{GetItem, Header, Hello, Kind, MAGIC, PROTOCOL, PutItem, Refused, STATUS_PAGE, Welcome, WireKey};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// The time limit for connecting and the handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The time limit for one answer of a lender, and for a lender that receives our data. Beyond it
/// the lender is given up: the backing directory has the data.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// The kind of the error of a handshake that was refused because the session has gone on.
const BEHIND: io::ErrorKind = io::ErrorKind::StaleNetworkFileHandle;

/// The number of bytes of a late answer's pages that are received at once, to be discarded.
const RUBBISH_BYTES: usize = 16 << 10;

/// Returns the length in bytes of an answer of at most `pages` pages, whose head has `head_bytes`.
/// Returns an error if the header has a length that is not possible.
fn answer_bytes(header: &Header, head_bytes: usize, extra_bytes: usize, pages: usize) -> io::Result<usize> {
    let bytes = size_of::<Header>() + header.body_bytes.get() as usize + extra_bytes;
    let fits = (head_bytes..=head_bytes + pages * PAGE_SIZE).contains(&bytes);
    if fits { Ok(bytes) } else { Err(protocol_error("the lender's answer has the wrong length")) }
}

fn protocol_error(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// A connection after the handshake.
pub struct Connection {
    stream: Stream,
    channel: Channel,
    /// The buffer for decrypted frames.
    opened: Vec<u8>,
    /// The lender's Welcome message.
    pub welcome: Welcome,
}

impl Connection {
    /// Connects as a main connection, and does the handshake with the version that will be given
    /// out next. Returns None if the lender has a higher version of this session already: this
    /// process was set back to an earlier state ([`wire::REFUSED_BEHIND`]).
    pub fn open_main(
        address: &Address,
        session: [u8; 16],
        next_version: Version,
        security: &Security,
    ) -> io::Result<Option<Connection>> {
        let stream = security.connect(address, CONNECT_TIMEOUT)?;
        match Connection::handshake_with(stream, wire::ROLE_MAIN, session, next_version.0, security) {
            Err(error) if error.kind() == BEHIND => Ok(None),
            connected => connected.map(Some),
        }
    }

    /// Opens a further connection of a session, and does the handshake.
    pub fn open(address: &Address, session: [u8; 16], security: &Security) -> io::Result<Connection> {
        Connection::handshake(security.connect(address, CONNECT_TIMEOUT)?, wire::ROLE_GET, session, security)
    }

    /// Does the handshake on a connected stream.
    pub fn handshake(stream: Stream, role: u32, session: [u8; 16], security: &Security) -> io::Result<Connection> {
        Connection::handshake_with(stream, role, session, 0, security)
    }

    fn handshake_with(
        stream: Stream,
        role: u32,
        session: [u8; 16],
        next_version: u64,
        security: &Security,
    ) -> io::Result<Connection> {
        stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
        stream.set_write_timeout(Some(CONNECT_TIMEOUT))?;
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let mut connection =
            Connection { stream, channel: Channel::plain(), opened: Vec::new(), welcome: Welcome::new_zeroed() };
        if let Security::Keyed(key) = security {
            connection.shake_hands(key, deadline)?;
        }
        let hello = Hello { magic: MAGIC, protocol: U32::new(PROTOCOL), role: U32::new(role), session };
        let (request, body) = hello.frame(next_version, connection.channel.is_sealed());
        let header = Header::new(Kind::Hello, 0, body.len(), request);
        connection.outgoing()?.send(&header, &body, &[])?;
        let mut body = Vec::new();
        match connection.receive(deadline, &mut body)? {
            (Kind::Welcome, _) => {
                connection.welcome = Welcome::read_from_bytes(&body).map_err(|_| protocol_error("short Welcome"))?;
                connection.stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
                connection.stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
                Ok(connection)
            }
            (kind, _) => Err(not_welcome(kind, &body, BEHIND)),
        }
    }

    /// Proves possession of the pool's key, and verifies that the lender has it, too. From then on
    /// the channel seals.
    fn shake_hands(&mut self, key: &wire::key::PoolKey, deadline: Instant) -> io::Result<()> {
        let failed = || {
            protocol_error(
                "the handshake fails: this machine has another pool key than the lender, or no random numbers",
            )
        };
        let (handshake, first) = Handshake::begin(key).map_err(|_| failed())?;
        let header = Header::new(Kind::Handshake1, 0, HANDSHAKE_BYTES, PROTOCOL.into());
        self.outgoing()?.send(&header, &first, &[])?;
        let mut body = Vec::new();
        match self.receive(deadline, &mut body)? {
            (Kind::Handshake2, _) => self.channel = handshake.finish(&body).map_err(|_| failed())?,
            // This message is not authenticated: any machine on the network could have sent it.
            (kind, _) => return Err(not_welcome(kind, &body, io::ErrorKind::ConnectionRefused)),
        }
        Ok(())
    }

    /// Returns a handle that sends on the same connection.
    pub fn outgoing(&self) -> io::Result<Outgoing> {
        Ok(Outgoing { stream: self.stream.try_clone()?, channel: self.channel.clone(), head: Vec::new() })
    }

    /// Receives a frame. Its body replaces the contents of `body`.
    fn receive(&mut self, deadline: Instant, body: &mut Vec<u8>) -> io::Result<(Kind, Header)> {
        let mut header = Header::new_zeroed();
        read_all(&mut self.stream, header.as_mut_bytes(), deadline)?;
        let kind = header.validate().map_err(malformed)?;
        body.resize(header.body_bytes.get() as usize + self.channel.extra_bytes(), 0);
        read_all(&mut self.stream, body, deadline)?;
        if self.channel.is_sealed() {
            let sealed_bytes = header.items_bytes() + self.channel.extra_bytes();
            let items = self.channel.open_head(&header, &body[..sealed_bytes], &mut self.opened).map_err(malformed)?;
            body.splice(..sealed_bytes, items.iter().copied());
        }
        Ok((kind, header))
    }

    /// Waits until either connection is readable, for at most `timeout`. Returns which of them are.
    pub fn wait(connections: [&Connection; 2], timeout: Duration) -> io::Result<[bool; 2]> {
        let mut fds = connections.map(|connection| PollFd::new(&connection.stream, PollFlags::IN));
        wait(&mut fds, timeout)?;
        Ok(fds.map(|fd| !fd.revents().is_empty()))
    }

    /// Waits until the lender has closed the connection, as long as an answer may take. Discards
    /// everything that still arrives.
    pub fn wait_for_end(&mut self) {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut rest = [0; 4096];
        while in_time(deadline).is_ok() && self.stream.read(&mut rest).is_ok_and(|bytes| bytes > 0) {}
    }

    /// Waits for a frame, for at most `timeout`. Returns None if there is none yet.
    pub fn next_frame(&mut self, timeout: Duration, body: &mut Vec<u8>) -> io::Result<Option<(Kind, Header)>> {
        if !wait(&mut [PollFd::new(&self.stream, PollFlags::IN)], timeout)? {
            return Ok(None);
        }
        self.receive(Instant::now() + ANSWER_TIMEOUT, body).map(Some)
    }
}

/// A connection for gets, with room for the head of its largest answer.
pub struct GetConnection {
    connection: Connection,
    /// The outgoing request, and then the head of the answer.
    head: Vec<u8>,
    /// The number of the last request.
    request: u64,
    /// The number of pages of each request that waits for its answer, the oldest first.
    asked_pages: VecDeque<usize>,
    /// The state of an answer that is being discarded: the bytes received, and the bytes of the
    /// whole answer as far as known. None if discarding the next answer has not begun.
    discarded: Option<(usize, usize)>,
}

impl GetConnection {
    /// Connects, and does the handshake.
    pub fn open(address: &Address, session: [u8; 16], security: &Security) -> io::Result<GetConnection> {
        Connection::open(address, session, security).map(GetConnection::over)
    }

    /// Wraps a connection whose handshake had the role for gets.
    pub fn over(connection: Connection) -> GetConnection {
        GetConnection { connection, head: Vec::new(), request: 0, asked_pages: VecDeque::new(), discarded: None }
    }

    /// Requests `keys`, in requests of `question_pages` pages, which are sent at once. Earlier
    /// requests may still wait for their answers. The caller must call [`GetConnection::receive`]
    /// or [`GetConnection::discard`] for each. After an error the connection must not be used any
    /// more.
    pub fn ask(&mut self, keys: &[WireKey], question_pages: usize, exclusive: bool) -> io::Result<()> {
        self.head.clear();
        for keys in keys.chunks(question_pages) {
            self.request += 1;
            self.asked_pages.push_back(keys.len());
            let mut header = Header::new(Kind::Get, keys.len(), size_of_val(keys), self.request);
            if exclusive {
                header.flags = wire::GET_EXCLUSIVE;
            }
            self.connection.channel.push_head(&header, keys.as_bytes(), &mut self.head).map_err(malformed)?;
        }
        write_all(&mut self.connection.stream, &mut [IoSlice::new(&self.head)])
    }

    /// Returns the number of pages of the request whose answer is next. None if all are answered.
    pub fn next_pages(&self) -> Option<usize> {
        self.asked_pages.front().copied()
    }

    /// Returns the number of requests that wait for their answers.
    pub fn under_way(&self) -> usize {
        self.asked_pages.len()
    }

    /// Waits for the next answer to begin, for at most `limit`. Returns whether it has begun.
    pub fn wait(&self, limit: Duration) -> io::Result<bool> {
        wait(&mut [PollFd::new(&self.connection.stream, PollFlags::IN)], limit)
    }

    /// Checks without waiting whether the answer has begun, for callers that poll.
    pub fn look(&self) -> Option<io::Result<()>> {
        self.wait(Duration::ZERO).map(|has_begun| has_begun.then_some(())).transpose()
    }

    /// Receives and discards the available parts of all answers, without waiting. Returns how many
    /// answers are complete now. Until no answer is missing ([`GetConnection::next_pages`]), and
    /// after an error, the connection must not be used for anything else.
    pub fn discard(&mut self) -> io::Result<usize> {
        let mut complete = 0;
        while let Some(pages) = self.next_pages() {
            let items_bytes = pages * size_of::<GetItem>();
            let head_bytes = size_of::<Header>() + items_bytes + self.connection.channel.extra_bytes();
            self.head.resize(head_bytes.max(RUBBISH_BYTES), 0);
            let (mut received, mut expected) = self.discarded.take().unwrap_or((0, head_bytes));
            while received < expected {
                // The head is kept, because it gives the length of the rest.
                let is_head = received < head_bytes;
                let start = if is_head { received } else { 0 };
                let end = if is_head { head_bytes } else { RUBBISH_BYTES.min(expected - received) };
                match recv(&self.connection.stream, &mut self.head[start..end], RecvFlags::DONTWAIT) {
                    Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok((bytes, _)) => received += bytes,
                    Err(Errno::INTR) => continue,
                    Err(Errno::AGAIN) => {
                        self.discarded = Some((received, expected));
                        return Ok(complete);
                    }
                    Err(errno) => return Err(errno.into()),
                }
                if is_head && received == head_bytes {
                    let Connection { channel, opened, .. } = &mut self.connection;
                    let (header, items) =
                        Header::ref_from_prefix(&self.head[..head_bytes]).map_err(|_| protocol_error("short frame"))?;
                    if channel.is_sealed() {
                        channel.open_head(header, items, opened).map_err(malformed)?;
                    }
                    if header.validate() != Ok(Kind::GetReply) {
                        return Err(protocol_error("the lender's answer does not fit the request"));
                    }
                    expected = answer_bytes(header, head_bytes, channel.extra_bytes(), pages)?;
                }
            }
            self.asked_pages.pop_front();
            complete += 1;
        }
        Ok(complete)
    }

    /// Receives the next answer. The n-th requested page goes to `buf` at `places[n]` (in bytes,
    /// ascending); `got[n]` is its result. After an error the connection must not be used any more,
    /// and the contents of `buf` at `places` are undefined.
    pub fn receive(&mut self, places: &[usize], buf: &mut [u8], got: &mut Vec<PageResult>) -> io::Result<()> {
        assert_eq!(self.next_pages(), Some(places.len()));
        let request = self.request + 1 - self.asked_pages.len() as u64;
        got.clear();
        // Usually every page is there, so the answer is received straight into place. If some pages
        // are missing, those behind them arrive too far to the front, and are moved.
        let items_bytes = places.len() * size_of::<GetItem>();
        self.head.resize(size_of::<Header>() + items_bytes + self.connection.channel.extra_bytes(), 0);
        let received = self.receive_pages(places, buf)?;
        self.asked_pages.pop_front();
        let Connection { channel, opened, .. } = &mut self.connection;
        let (header, items) = Header::ref_from_prefix(&self.head).map_err(|_| protocol_error("short frame"))?;
        let items = match channel.is_sealed() {
            true => channel.open_head(header, items, opened).map_err(malformed)?,
            false => items,
        };
        let items = <[GetItem]>::ref_from_bytes(items).map_err(|_| protocol_error("short frame"))?;
        let hits = items.iter().filter(|item| item.status == STATUS_PAGE).count();
        if header.validate() != Ok(Kind::GetReply)
            || header.request.get() != request
            || usize::from(header.items.get()) != places.len()
            || header.body_bytes.get() as usize != items_bytes + hits * PAGE_SIZE
            || received != hits * PAGE_SIZE
        {
            return Err(protocol_error("the lender's answer does not fit the request"));
        }
        let mut landed = hits;
        for (at, item) in items.iter().enumerate().rev() {
            if item.status == STATUS_PAGE {
                landed -= 1;
                if landed != at {
                    buf.copy_within(places[landed]..places[landed] + PAGE_SIZE, places[at]);
                }
            }
        }
        for (item, place) in items.iter().zip(places) {
            got.push(match item.status {
                STATUS_PAGE => PageResult::Page { checksum: item.checksum.get() },
                wire::STATUS_ZERO => {
                    buf[*place..*place + PAGE_SIZE].fill(0);
                    PageResult::Page { checksum: item.checksum.get() }
                }
                _ => PageResult::Miss,
            });
        }
        Ok(())
    }

    /// Receives one frame: its head into `self.head`, its pages into `places` in turn. Returns the
    /// number of bytes of pages.
    fn receive_pages(&mut self, places: &[usize], buf: &mut [u8]) -> io::Result<usize> {
        let Connection { stream, channel, .. } = &mut self.connection;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let head_bytes = self.head.len();
        let frame_bytes = |header: &Header| answer_bytes(header, head_bytes, channel.extra_bytes(), places.len());
        let mut slices = Vec::with_capacity(1 + places.len());
        let (mut received, mut expected, mut pages) = (0, head_bytes, places.len());
        let mut header = Header::new_zeroed();
        let mut header_known = self.asked_pages.len() > 1;
        if header_known {
            // The next answer may follow at once, so exactly the bytes of this one must be read.
            read_all(stream, &mut self.head, deadline)?;
            header.as_mut_bytes().copy_from_slice(&self.head[..size_of::<Header>()]);
            (received, expected) = (head_bytes, frame_bytes(&header)?);
            pages = (expected - received) / PAGE_SIZE;
        } else {
            slices.push(IoSliceMut::new(&mut self.head));
        }
        let (mut rest, mut at) = (buf, 0);
        let mut run = 0;
        while run < pages {
            // Adjacent pages are received as one piece.
            let mut end = run + 1;
            while end < pages && places[end] == places[end - 1] + PAGE_SIZE {
                end += 1;
            }
            let (_, tail) = std::mem::take(&mut rest).split_at_mut(places[run] - at);
            let (piece, tail) = tail.split_at_mut((end - run) * PAGE_SIZE);
            slices.push(IoSliceMut::new(piece));
            (rest, at) = (tail, places[run] + (end - run) * PAGE_SIZE);
            run = end;
        }
        let mut slices = &mut slices[..];
        while received < expected {
            let bytes = match stream.read_vectored(slices) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if !header_known {
                // Until the head is complete, it is the first piece.
                let first = &slices[0];
                let known = (received + bytes).min(head_bytes) - received;
                let start = received.min(size_of::<Header>());
                let end = (received + known).min(size_of::<Header>());
                header.as_mut_bytes()[start..end].copy_from_slice(&first[..end - start]);
                if end == size_of::<Header>() {
                    (header_known, expected) = (true, frame_bytes(&header)?);
                }
            }
            received += bytes;
            if received < expected {
                in_time(deadline)?;
            }
            IoSliceMut::advance_slices(&mut slices, bytes);
        }
        if received > expected {
            return Err(protocol_error("the lender sent more than its answer"));
        }
        Ok(received - head_bytes)
    }
}

/// The sending side of a connection. Only one sender is active at a time, because frames are sent
/// in the order in which they are sealed.
pub struct Outgoing {
    stream: Stream,
    channel: Channel,
    head: Vec<u8>,
}

impl Outgoing {
    /// Ends the connection.
    pub fn shutdown(&self, how: std::net::Shutdown) -> io::Result<()> {
        self.stream.shutdown(how)
    }

    fn send(&mut self, header: &Header, items: &[u8], pages: &[u8]) -> io::Result<()> {
        self.head.clear();
        self.channel.push_head(header, items, &mut self.head).map_err(malformed)?;
        let parts = &mut [IoSlice::new(&self.head), IoSlice::new(pages)];
        write_all(&mut self.stream, if pages.is_empty() { &mut parts[..1] } else { parts })
    }
}

/// Sends a Put message.
pub fn send_put(out: &mut Outgoing, request: u64, items: &[PutItem], pages: &[page::Page]) -> io::Result<()> {
    let header = Header::new(Kind::Put, items.len(), size_of_val(items) + size_of_val(pages), request);
    out.send(&header, items.as_bytes(), pages.as_flattened())
}

/// Sends a Drop message.
pub fn send_drop(out: &mut Outgoing, keys: &[WireKey]) -> io::Result<()> {
    out.send(&Header::new(Kind::Drop, keys.len(), size_of_val(keys), 0), keys.as_bytes(), &[])
}

/// Sends a Ping message.
pub fn send_ping(out: &mut Outgoing, request: u64) -> io::Result<()> {
    out.send(&Header::new(Kind::Ping, 0, 0, request), &[], &[])
}

/// Sends a Bye message: the last one of the session.
pub fn send_bye(out: &mut Outgoing) -> io::Result<()> {
    out.send(&Header::new(Kind::Bye, 0, 0, 0), &[], &[])
}

fn malformed(malformed: wire::Malformed) -> io::Error {
    protocol_error(malformed.to_string())
}

/// Returns the error for a handshake that the lender did not answer with a Welcome. `behind` is the
/// kind of the error if the lender reports that the session has gone on.
fn not_welcome(kind: Kind, body: &[u8], behind: io::ErrorKind) -> io::Error {
    match Refused::read_from_bytes(body) {
        Ok(refused) if kind == Kind::Refused => {
            let is_behind = refused.code.get() == wire::REFUSED_BEHIND;
            let kind = if is_behind { behind } else { io::ErrorKind::ConnectionRefused };
            io::Error::new(kind, format!("the lender refuses: {}", refused.text()))
        }
        _ => protocol_error(format!("the lender answered the handshake with {kind:?}")),
    }
}

impl AsFd for GetConnection {
    /// The descriptor is readable when the answer begins.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.stream.as_fd()
    }
}

/// Waits until one of the descriptors is readable, for at most `timeout`. Returns whether one is.
fn wait(fds: &mut [PollFd<'_>], timeout: Duration) -> io::Result<bool> {
    let limit = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    match poll(fds, Some(&limit)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn in_time(deadline: Instant) -> io::Result<()> {
    if Instant::now() < deadline { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
}

fn read_all(stream: &mut Stream, mut rest: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !rest.is_empty() {
        match stream.read(rest) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => rest = &mut rest[bytes..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if !rest.is_empty() {
            in_time(deadline)?;
        }
    }
    Ok(())
}

fn write_all(stream: &mut Stream, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    while !parts.is_empty() {
        match stream.write_vectored(parts) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(bytes) => IoSlice::advance_slices(&mut parts, bytes),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if !parts.is_empty() {
            in_time(deadline)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::{FileKey, PageId, Version};
    use std::os::unix::net::UnixStream;

    fn frame(kind: Kind, items: usize, request: u64, body: &[u8]) -> Vec<u8> {
        [Header::new(kind, items, body.len(), request).as_bytes(), body].concat()
    }

    /// Returns the answer to a request for `pages` pages, all of which are full of `byte`.
    fn answer(request: u64, pages: usize, byte: u8) -> Vec<u8> {
        let item = GetItem { status: STATUS_PAGE, reserved: [0; 7], checksum: 7.into() };
        let items: Vec<u8> = (0..pages).flat_map(|_| item.as_bytes().to_vec()).collect();
        frame(Kind::GetReply, pages, request, &[items, vec![byte; pages * PAGE_SIZE]].concat())
    }

    fn connected() -> (GetConnection, UnixStream) {
        let (near, mut far) = UnixStream::pair().unwrap();
        far.write_all(&frame(Kind::Welcome, 0, 0, Welcome::new_zeroed().as_bytes())).unwrap();
        let stream = Stream::Unix(near);
        let connection = Connection::handshake(stream, wire::ROLE_GET, [7; 16], &Security::Trusting).unwrap();
        (GetConnection::over(connection), far)
    }

    #[test]
    fn a_listener_sees_no_version_in_a_hello() {
        let key = wire::key::PoolKey::new([5; 32]);
        let (near, mut far) = UnixStream::pair().unwrap();
        let of_lender = key.clone();
        let lender = std::thread::spawn(move || {
            let read = |far: &mut UnixStream, bytes: usize| {
                let mut found = vec![0; bytes];
                far.read_exact(&mut found).unwrap();
                found
            };
            let first = read(&mut far, size_of::<Header>() + HANDSHAKE_BYTES);
            let (second, channel) = wire::secure::answer(&of_lender, &first[size_of::<Header>()..]).unwrap();
            far.write_all(&frame(Kind::Handshake2, 0, 0, &second)).unwrap();
            let header = Header::read_from_bytes(&read(&mut far, size_of::<Header>())).unwrap();
            let sealed = read(&mut far, header.body_bytes.get() as usize + channel.extra_bytes());
            let mut opened = Vec::new();
            let body = channel.open_head(&header, &sealed, &mut opened).unwrap();
            (header.request.get(), Hello::read(header.request.get(), body, true).unwrap().1)
        });
        // The lender closes the connection without a Welcome.
        let main = Connection::handshake_with(Stream::Unix(near), wire::ROLE_MAIN, [7; 16], 77, &Security::Keyed(key));
        assert!(main.is_err());
        assert_eq!(lender.join().unwrap(), (0, Some(Version(77))));
    }

    fn ask(connection: &mut GetConnection, pages: u32, question_pages: usize) {
        let key = |index| WireKey::new(PageId { file: FileKey(1), index }, Version(1));
        connection.ask(&(0..pages).map(key).collect::<Vec<_>>(), question_pages, false).unwrap();
    }

    #[test]
    fn answers_that_are_late_are_thrown_away_as_they_come() {
        let (mut connection, mut far) = connected();
        ask(&mut connection, 9, 8);
        assert_eq!(connection.discard().unwrap(), 0, "nothing has come");
        let mut complete = 0;
        for piece in [answer(1, 8, 1), answer(2, 1, 2)].concat().chunks(999) {
            assert!(connection.next_pages().is_some());
            far.write_all(piece).unwrap();
            complete += connection.discard().unwrap();
        }
        assert_eq!((complete, connection.next_pages()), (2, None));
        // Later requests are answered as usual.
        ask(&mut connection, 1, 1);
        far.write_all(&answer(3, 1, 3)).unwrap();
        let (mut page, mut got) = (vec![0; PAGE_SIZE], Vec::new());
        connection.receive(&[0], &mut page, &mut got).unwrap();
        assert!(got == [PageResult::Page { checksum: 7 }] && page == [3; PAGE_SIZE]);
    }

    #[test]
    fn what_is_no_answer_is_not_thrown_away_but_ends_it() {
        let wrong = [answer(1, 9, 1), frame(Kind::Pong, 0, 1, &[0; 5000])];
        for bytes in wrong {
            let (mut connection, mut far) = connected();
            ask(&mut connection, 8, 8);
            far.write_all(&bytes).unwrap();
            assert_eq!(connection.discard().unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
        let (mut connection, mut far) = connected();
        ask(&mut connection, 8, 8);
        far.write_all(&answer(1, 8, 1)[..5000]).unwrap();
        far.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(connection.discard().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
