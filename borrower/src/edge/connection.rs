//! One connection to a lender: greeting, and whole frames in and out.
//!
//! Whatever the lender sends that does not fit the protocol ends the connection. Nothing here waits much longer than the time
//! limits below, whatever the lender does: the stream's own limit holds for one system call, a deadline for all calls of one
//! answer, so that bytes that trickle in do not count as an answer. Together: twice the limit.

use crate::logic::reading::Got;
use page::PAGE_SIZE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::time::{Duration, Instant};
use wire::address::{Address, Stream};
use wire::{GetItem, Header, Hello, Kind, MAGIC, PROTOCOL, PutItem, Refused, STATUS_PAGE, Welcome, WireKey};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// How long connecting and greeting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a lender may take for any one answer, or for taking what we send. A lender that is slower is given up: the
/// directory below is there.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

fn protocol_error(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// A greeted connection.
pub struct Connection {
    stream: Stream,
    /// What the lender said of itself.
    pub welcome: Welcome,
}

impl Connection {
    /// Connects and greets.
    pub fn open(address: &Address, role: u32, session: [u8; 16]) -> io::Result<Connection> {
        Connection::greet(address.connect(CONNECT_TIMEOUT)?, role, session)
    }

    /// Greets whoever is at the other end.
    pub fn greet(mut stream: Stream, role: u32, session: [u8; 16]) -> io::Result<Connection> {
        stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
        stream.set_write_timeout(Some(CONNECT_TIMEOUT))?;
        let hello = Hello { magic: MAGIC, protocol: U32::new(PROTOCOL), role: U32::new(role), session };
        let header = Header::new(Kind::Hello, 0, size_of::<Hello>(), 0);
        write_all(&mut stream, &mut [IoSlice::new(header.as_bytes()), IoSlice::new(hello.as_bytes())])?;
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let mut header = Header::new_zeroed();
        read_all(&mut stream, header.as_mut_bytes(), deadline)?;
        match header.validate().map_err(|malformed| protocol_error(malformed.to_string()))? {
            Kind::Welcome => {
                let mut welcome = Welcome::new_zeroed();
                read_all(&mut stream, welcome.as_mut_bytes(), deadline)?;
                stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
                stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
                Ok(Connection { stream, welcome })
            }
            Kind::Refused => {
                let mut refused = Refused::new_zeroed();
                read_all(&mut stream, refused.as_mut_bytes(), deadline)?;
                Err(io::Error::new(io::ErrorKind::ConnectionRefused, format!("the lender refuses: {}", refused.text())))
            }
            other => Err(protocol_error(format!("the lender answered the greeting with {other:?}"))),
        }
    }

    /// A second handle on the same stream.
    pub fn stream(&self) -> io::Result<Stream> {
        self.stream.try_clone()
    }

    /// Waits until the lender has closed, for as long as an answer may take. What still comes is of no interest.
    pub fn wait_for_end(&mut self) {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut rest = [0; 4096];
        while in_time(deadline).is_ok() && self.stream.read(&mut rest).is_ok_and(|bytes| bytes > 0) {}
    }

    /// Waits for a frame, at most `timeout`. None: there is none yet.
    pub fn next_frame(&mut self, timeout: Duration, body: &mut Vec<u8>) -> io::Result<Option<(Kind, Header)>> {
        let limit = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Some(&limit)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(None),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut header = Header::new_zeroed();
        read_all(&mut self.stream, header.as_mut_bytes(), deadline)?;
        let kind = header.validate().map_err(|malformed| protocol_error(malformed.to_string()))?;
        body.resize(header.body_bytes.get() as usize, 0);
        read_all(&mut self.stream, body, deadline)?;
        Ok(Some((kind, header)))
    }
}

/// A connection for gets, with room for its largest answer's head.
pub struct GetConnection {
    connection: Connection,
    head: Vec<u8>,
    request: u64,
}

impl GetConnection {
    /// Connects and greets.
    pub fn open(address: &Address, session: [u8; 16]) -> io::Result<GetConnection> {
        Connection::open(address, wire::ROLE_GET, session).map(GetConnection::over)
    }

    /// With a connection that was greeted in that role.
    pub fn over(connection: Connection) -> GetConnection {
        GetConnection { connection, head: Vec::new(), request: 0 }
    }

    /// Asks for `keys` in one message. The page of `keys[n]` goes to `buf` at `places[n]` (in bytes, rising); `got[n]` says what became of
    /// it. On an error the connection is of no more use, and `buf` holds rubbish at `places`.
    pub fn get(
        &mut self,
        keys: &[WireKey],
        places: &[usize],
        exclusive: bool,
        buf: &mut [u8],
        got: &mut Vec<Got>,
    ) -> io::Result<()> {
        assert_eq!(keys.len(), places.len());
        got.clear();
        self.request += 1;
        let mut header = Header::new(Kind::Get, keys.len(), size_of_val(keys), self.request);
        if exclusive {
            header.flags = wire::GET_EXCLUSIVE;
        }
        write_all(&mut self.connection.stream, &mut [IoSlice::new(header.as_bytes()), IoSlice::new(keys.as_bytes())])?;

        // Mostly every page is there, so the answer is received straight into place. Where some are missing, those behind
        // them have landed too far to the front, and are moved.
        let items_bytes = keys.len() * size_of::<GetItem>();
        self.head.resize(size_of::<Header>() + items_bytes, 0);
        let received = self.receive(places, buf)?;
        let (header, items) = Header::ref_from_prefix(&self.head).map_err(|_| protocol_error("short frame"))?;
        let items = <[GetItem]>::ref_from_bytes(items).map_err(|_| protocol_error("short frame"))?;
        let hits = items.iter().filter(|item| item.status == STATUS_PAGE).count();
        if header.validate() != Ok(Kind::GetReply)
            || header.request.get() != self.request
            || usize::from(header.items.get()) != keys.len()
            || header.body_bytes.get() as usize != items_bytes + hits * PAGE_SIZE
            || received != hits * PAGE_SIZE
        {
            return Err(protocol_error("the lender's answer does not fit the question"));
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
                STATUS_PAGE => Got::Page { checksum: item.checksum.get() },
                wire::STATUS_ZERO => {
                    buf[*place..*place + PAGE_SIZE].fill(0);
                    Got::Page { checksum: item.checksum.get() }
                }
                _ => Got::Miss,
            });
        }
        Ok(())
    }

    /// Receives one frame: its head into `self.head`, its pages into `places` in turn. Returns the bytes of pages.
    fn receive(&mut self, places: &[usize], buf: &mut [u8]) -> io::Result<usize> {
        let mut slices = Vec::with_capacity(1 + places.len());
        let head_bytes = self.head.len();
        slices.push(IoSliceMut::new(&mut self.head));
        let (mut rest, mut at) = (buf, 0);
        let mut run = 0;
        while run < places.len() {
            // Pages that lie side by side are one piece.
            let mut end = run + 1;
            while end < places.len() && places[end] == places[end - 1] + PAGE_SIZE {
                end += 1;
            }
            let (_, tail) = std::mem::take(&mut rest).split_at_mut(places[run] - at);
            let (piece, tail) = tail.split_at_mut((end - run) * PAGE_SIZE);
            slices.push(IoSliceMut::new(piece));
            (rest, at) = (tail, places[run] + (end - run) * PAGE_SIZE);
            run = end;
        }
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut slices = &mut slices[..];
        let (mut received, mut expected) = (0, head_bytes);
        let mut header = Header::new_zeroed();
        let mut header_known = false;
        while received < expected {
            let bytes = match self.connection.stream.read_vectored(slices) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if !header_known {
                // The first piece is the head until it is complete, hence still in front.
                let first = &slices[0];
                let known = (received + bytes).min(head_bytes) - received;
                let start = received.min(size_of::<Header>());
                let end = (received + known).min(size_of::<Header>());
                header.as_mut_bytes()[start..end].copy_from_slice(&first[..end - start]);
                if end == size_of::<Header>() {
                    header_known = true;
                    expected = size_of::<Header>() + header.body_bytes.get() as usize;
                    if expected < head_bytes || expected > head_bytes + places.len() * PAGE_SIZE {
                        return Err(protocol_error("the lender's answer has the wrong length"));
                    }
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

/// Sends a Put message.
pub fn send_put(stream: &mut Stream, request: u64, items: &[PutItem], pages: &[page::Page]) -> io::Result<()> {
    let header = Header::new(Kind::Put, items.len(), size_of_val(items) + size_of_val(pages), request);
    let parts = &mut [header.as_bytes(), items.as_bytes(), pages.as_flattened()].map(IoSlice::new);
    write_all(stream, parts)
}

/// Sends a Drop message.
pub fn send_drop(stream: &mut Stream, keys: &[WireKey]) -> io::Result<()> {
    let header = Header::new(Kind::Drop, keys.len(), size_of_val(keys), 0);
    write_all(stream, &mut [IoSlice::new(header.as_bytes()), IoSlice::new(keys.as_bytes())])
}

/// Sends a Ping message.
pub fn send_ping(stream: &mut Stream, request: u64) -> io::Result<()> {
    let header = Header::new(Kind::Ping, 0, 0, request);
    write_all(stream, &mut [IoSlice::new(header.as_bytes())])
}

/// Sends a Bye message: the last one of the session.
pub fn send_bye(stream: &mut Stream) -> io::Result<()> {
    write_all(stream, &mut [IoSlice::new(Header::new(Kind::Bye, 0, 0, 0).as_bytes())])
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
