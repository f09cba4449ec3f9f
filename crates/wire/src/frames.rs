//! Sends and receives whole frames.
//!
//! A received header is checked before any memory is allocated for its frame: kind, length and
//! whether the kind is permitted now. On a sealed channel ([`crate::secure`]) a frame is returned
//! only after its seal was verified.
//!
//! Buffers only grow by the bytes written to them. So no earlier content, of any borrower, can be
//! read as a part of a frame or be sent in one: buffers may move from one connection to another
//! without being cleared.

use crate::address::Stream;
use crate::secure::{Channel, SEAL_BYTES};
use crate::{Header, Kind, Malformed};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::io;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Bytes of a buffer before a longer frame arrives: room for a Get of a whole read-ahead window.
const FIRST_BYTES: usize = size_of::<Header>() + SEAL_BYTES + crate::ITEMS_MAX * size_of::<crate::WireKey>();

/// The reason why a connection ends.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The peer closed the connection between two frames.
    #[error("closed")]
    Closed,
    /// The peer sent Bye.
    #[error("sent Bye")]
    Goodbye,
    /// The peer broke the protocol.
    #[error("{0}")]
    Malformed(Malformed),
    /// The peer sent a frame that is not permitted here.
    #[error("{0:?} where none may come")]
    Unexpected(Kind),
    /// The peer closed the connection in the middle of a frame.
    #[error("closed in the middle of a frame")]
    Truncated,
    /// The peer did not finish a frame, or receive one, in time.
    #[error("stuck in the middle of a frame")]
    Stuck,
    /// The peer was refused.
    #[error("refused")]
    Refused,
    /// The connection failed.
    #[error("{0}")]
    Io(io::Error),
    /// The handler of the connection panicked.
    #[error("a frame has found a bug here; please report the message above")]
    Bug,
}

/// A received frame.
pub struct Frame<'a> {
    /// The header, valid for its kind.
    pub header: Header,
    /// Its kind.
    pub kind: Kind,
    /// Its body, with the length that the kind requires.
    pub body: &'a [u8],
}

/// A complete frame in a reader. Valid until the reader is used for anything else.
#[derive(Clone, Copy)]
pub struct Found {
    header: Header,
    kind: Kind,
}

/// Receives frames.
#[derive(Default)]
pub struct FrameReader {
    /// Another receiver takes the pages of a Put.
    leaves_pages: bool,
    /// Received bytes; those from `start` on were not returned yet.
    buffer: Vec<u8>,
    start: usize,
    /// Length of the last returned frame, which is in front of the rest.
    handed_out: usize,
    channel: Channel,
    /// The buffer for the decrypted part of a sealed frame.
    opened: Vec<u8>,
}

impl FrameReader {
    /// A reader that has read nothing.
    pub fn new() -> FrameReader {
        FrameReader::default()
    }

    /// From now on the reader receives no more of a Put than fits into the buffer beside its head.
    /// Another receiver takes its pages, after the bytes that [`FrameReader::take_head`] and
    /// [`FrameReader::take_rest`] return.
    pub fn leave_pages(&mut self) {
        self.leaves_pages = true;
    }

    /// Uses this channel from the next frame on.
    pub fn open_with(&mut self, channel: Channel) {
        self.channel = channel;
    }

    /// Checks the received bytes for a frame that `may_come`. `None`: more bytes are needed. This
    /// removes the frame before.
    pub fn look(&mut self, may_come: impl Fn(Kind) -> bool) -> Result<Option<Found>, ConnectionError> {
        self.start += std::mem::take(&mut self.handed_out);
        match self.header()? {
            Some((_, kind)) if !may_come(kind) => Err(ConnectionError::Unexpected(kind)),
            Some((header, kind)) if self.buffer.len() - self.start >= self.frame_bytes(&header) => {
                Ok(Some(Found { header, kind }))
            }
            _ => Ok(None),
        }
    }

    /// Returns the frame that was found.
    pub fn take(&mut self, found: Found) -> Result<Frame<'_>, ConnectionError> {
        let body_bytes = found.header.body_bytes.get() as usize;
        self.hand_out(found, body_bytes)
    }

    /// Returns the head of a Put whose pages have not all arrived: its body is the items only. Call
    /// it if no frame was found. `None`: no Put has begun, or its head is incomplete.
    pub fn take_head(&mut self) -> Result<Option<Frame<'_>>, ConnectionError> {
        match self.header()? {
            Some((header, Kind::Put)) if self.buffer.len() - self.start >= self.head_bytes(&header) => {
                self.hand_out(Found { header, kind: Kind::Put }, header.items_bytes()).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Returns the received part of a Put's pages, after its head. Another receiver takes all bytes
    /// from here on, up to the next frame.
    pub fn take_rest(&mut self) -> &[u8] {
        let rest = self.start + self.handed_out..self.buffer.len();
        self.handed_out += rest.len();
        &self.buffer[rest]
    }

    fn hand_out(&mut self, found: Found, body_bytes: usize) -> Result<Frame<'_>, ConnectionError> {
        let Found { header, kind } = found;
        self.handed_out = size_of::<Header>() + self.channel.extra_bytes() + body_bytes;
        let mut body = self.start + size_of::<Header>()..self.start + self.handed_out;
        if self.channel.is_sealed() {
            let sealed = body.start..body.start + SEAL_BYTES + header.items_bytes();
            let items = self.channel.open_head(&header, &self.buffer[sealed.clone()], &mut self.opened);
            let items = items.map_err(ConnectionError::Malformed)?;
            // The decrypted items replace the plain ones, in front of the pages.
            body.start = sealed.end - items.len();
            self.buffer[body.start..sealed.end].copy_from_slice(items);
        }
        Ok(Frame { header, kind, body: &self.buffer[body] })
    }

    /// Reads from the socket into the free part of the buffer, which has room for the rest of the
    /// current frame, or of the part that is received here. Returns false if nothing arrived: at
    /// once, or where the stream waits, within its time limit. Call it when no frame was found.
    pub fn fill(&mut self, stream: &Stream, flags: RecvFlags) -> Result<bool, ConnectionError> {
        let needed = match self.header()? {
            Some((header, Kind::Put)) if self.leaves_pages => self.head_bytes(&header),
            Some((header, _)) => self.frame_bytes(&header),
            None => 0,
        };
        let needed = needed.max(FIRST_BYTES);
        self.buffer.drain(..std::mem::take(&mut self.start));
        self.buffer.reserve_exact(needed.saturating_sub(self.buffer.len()));
        loop {
            return match rustix::net::recv(stream, spare_capacity(&mut self.buffer), flags) {
                Ok((0, _)) => {
                    Err(if self.buffer.is_empty() { ConnectionError::Closed } else { ConnectionError::Truncated })
                }
                Ok(_) => Ok(true),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => Ok(false),
                Err(error) => Err(ConnectionError::Io(error.into())),
            };
        }
    }

    /// Waits until the deadline for a whole frame that `may_come`. The clock is checked each time
    /// that the stream's read timeout expires.
    pub fn next(
        &mut self,
        stream: &Stream,
        deadline: Instant,
        may_come: impl Fn(Kind) -> bool,
    ) -> Result<Frame<'_>, ConnectionError> {
        loop {
            if let Some(found) = self.look(&may_come)? {
                return self.take(found);
            }
            if Instant::now() >= deadline {
                return Err(ConnectionError::Stuck);
            }
            self.fill(stream, RecvFlags::empty())?;
        }
    }

    fn frame_bytes(&self, header: &Header) -> usize {
        size_of::<Header>() + self.channel.extra_bytes() + header.body_bytes.get() as usize
    }

    /// Bytes of a frame in front of its pages.
    fn head_bytes(&self, header: &Header) -> usize {
        size_of::<Header>() + self.channel.extra_bytes() + header.items_bytes()
    }

    fn header(&self) -> Result<Option<(Header, Kind)>, ConnectionError> {
        match Header::read_from_prefix(&self.buffer[self.start..]) {
            Ok((header, _)) => header.validate().map(|kind| Some((header, kind))).map_err(ConnectionError::Malformed),
            Err(_) => Ok(None),
        }
    }

    /// Whether all received bytes were returned and processed: the next frame has not begun.
    pub fn is_empty(&self) -> bool {
        self.start + self.handed_out == self.buffer.len()
    }

    /// Removes the buffer's memory, if the buffer is empty; `None` if there is none.
    pub fn take_buffer(&mut self) -> Option<Vec<u8>> {
        if !self.is_empty() || self.buffer.capacity() == 0 {
            return None;
        }
        (self.start, self.handed_out) = (0, 0);
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        Some(buffer)
    }

    /// Whether it has no memory to read into.
    pub fn has_no_buffer(&self) -> bool {
        self.buffer.capacity() == 0
    }

    /// Gives the reader memory to read into, if it has none.
    pub fn give_buffer(&mut self, buffer: Vec<u8>) {
        debug_assert!(buffer.is_empty() && self.has_no_buffer());
        self.buffer = buffer;
    }
}

/// Frames to send, one after the other, sealed if their channel requires it.
#[derive(Default)]
pub struct Outgoing {
    bytes: Vec<u8>,
    /// The begin of the frame that is being made.
    begin: usize,
    /// The sealed part of a frame, before it is moved to its place.
    head: Vec<u8>,
}

impl Outgoing {
    /// Begins a frame. Append its body to the returned buffer; [`Outgoing::end`] ends it.
    pub fn begin(&mut self, channel: &Channel) -> &mut Vec<u8> {
        self.begin = self.bytes.len();
        // Header and seal come last, when the body is known.
        self.bytes.resize(self.begin + channel.extra_bytes() + size_of::<Header>(), 0);
        &mut self.bytes
    }

    /// Ends a frame that was begun for the same channel. The body has as many bytes as the header
    /// states.
    pub fn end(&mut self, channel: &Channel, header: &Header) -> Result<(), ConnectionError> {
        let frame = &mut self.bytes[self.begin..];
        let body_at = channel.extra_bytes() + size_of::<Header>();
        debug_assert_eq!(frame.len() - body_at, header.body_bytes.get() as usize);
        let items_end = body_at + header.items_bytes();
        self.head.clear();
        channel.push_head(header, &frame[body_at..items_end], &mut self.head).map_err(ConnectionError::Malformed)?;
        frame[..items_end].copy_from_slice(&self.head);
        Ok(())
    }

    /// Appends a frame without items.
    pub fn push<T: IntoBytes + Immutable>(
        &mut self,
        channel: &Channel,
        kind: Kind,
        request: u64,
        body: &T,
    ) -> Result<(), ConnectionError> {
        self.begin(channel).extend_from_slice(body.as_bytes());
        self.end(channel, &Header::new(kind, 0, size_of::<T>(), request))
    }

    /// The bytes to send.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Forgets the bytes to send.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }

    /// Returns the bytes, with their memory.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Takes over memory for later frames, if it has less.
    pub fn give(&mut self, mut memory: Vec<u8>) {
        if self.bytes.is_empty() && memory.capacity() > self.bytes.capacity() {
            memory.clear();
            self.bytes = memory;
        }
    }

    /// Bytes of memory that it holds.
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }
}

/// Sends as much as the socket takes without waiting. Returns the number of bytes.
pub fn send_some(stream: &Stream, bytes: &[u8]) -> Result<usize, ConnectionError> {
    loop {
        return match rustix::net::send(stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => Ok(sent),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(0),
            Err(error) => Err(ConnectionError::Io(error.into())),
        };
    }
}

/// Sends all bytes within `limit`, plus or minus the stream's write timeout.
pub fn send(stream: &Stream, mut bytes: &[u8], limit: Duration) -> Result<(), ConnectionError> {
    let begun = Instant::now();
    while !bytes.is_empty() {
        match rustix::net::send(stream, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(ConnectionError::Io(error.into())),
        }
        if !bytes.is_empty() && begun.elapsed() >= limit {
            return Err(ConnectionError::Stuck);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use zerocopy::IntoBytes;

    const LIMIT: Duration = Duration::from_secs(10);

    fn pair() -> (Stream, Stream) {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        (Stream::Unix(near), Stream::Unix(far))
    }

    fn put(items: usize, request: u64) -> Vec<u8> {
        let mut frame = Header::new(Kind::Put, items, items * (24 + 4096), request).as_bytes().to_vec();
        frame.resize(frame.len() + items * (24 + 4096), request as u8);
        frame
    }

    #[test]
    fn frames_come_out_as_they_went_in_however_they_are_cut() {
        let sizes = [1usize, 256, 3, 40, 256, 1, 1];
        let bytes: Vec<u8> = sizes.iter().enumerate().flat_map(|(at, items)| put(*items, at as u64)).collect();
        for cut in [1000, 4096, 70_001, usize::MAX] {
            let (near, far) = pair();
            let bytes = bytes.clone();
            let sender = std::thread::spawn(move || {
                bytes.chunks(cut.min(bytes.len())).for_each(|part| send(&far, part, LIMIT).unwrap());
            });
            let mut reader = FrameReader::new();
            let mut request = 0;
            loop {
                match reader.next(&near, Instant::now() + LIMIT, |_| true) {
                    Ok(frame) => {
                        assert_eq!((frame.kind, frame.header.request.get()), (Kind::Put, request as u64));
                        assert_eq!(frame.body.len(), sizes[request] * 4120);
                        assert!(frame.body.iter().all(|byte| *byte == request as u8));
                        request += 1;
                    }
                    Err(ConnectionError::Closed) => break,
                    Err(broken) => panic!("{broken}"),
                }
            }
            assert_eq!(request, sizes.len());
            sender.join().unwrap();
        }
    }

    #[test]
    fn what_may_not_come_costs_nothing() {
        for (bytes, expected) in [
            (put(256, 1), "Put where none may come"),
            (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(), "unknown kind"),
            (vec![0xff; 64], "unknown kind"),
            (put(1, 1)[..17].to_vec(), "Put where none"),
            (Header::new(Kind::Ping, 0, 0, 1).as_bytes()[..9].to_vec(), "middle"),
        ] {
            let (near, far) = pair();
            send(&far, &bytes[..bytes.len().min(1000)], LIMIT).unwrap();
            drop(far);
            let mut reader = FrameReader::new();
            let got = reader.next(&near, Instant::now() + LIMIT, |kind| kind == Kind::Ping);
            let Err(broken) = got.map(drop) else { panic!("accepted") };
            assert!(broken.to_string().contains(expected), "{broken}");
            assert!(reader.buffer.capacity() <= FIRST_BYTES);
        }
    }

    #[test]
    fn half_a_frame_does_not_hold_a_thread() {
        let (near, far) = pair();
        send(&far, &put(2, 1)[..5000], LIMIT).unwrap();
        let mut reader = FrameReader::new();
        let soon = || Instant::now() + Duration::from_millis(50);
        assert!(matches!(reader.next(&near, soon(), |_| true), Err(ConnectionError::Stuck)));
        // A silent peer does not extend the time limit.
        let (near, _far) = pair();
        assert!(matches!(FrameReader::new().next(&near, soon(), |_| true), Err(ConnectionError::Stuck)));
    }

    #[test]
    fn buffers_change_hands_only_between_frames() {
        let (near, far) = pair();
        send(&far, &[put(1, 1), put(1, 2)[..100].to_vec()].concat(), LIMIT).unwrap();
        let mut reader = FrameReader::new();
        assert_eq!(reader.next(&near, Instant::now() + LIMIT, |_| true).unwrap().header.request.get(), 1);
        assert!(!reader.is_empty() && reader.take_buffer().is_none(), "the next frame has begun");
        send(&far, &put(1, 2)[100..], LIMIT).unwrap();
        assert_eq!(reader.next(&near, Instant::now() + LIMIT, |_| true).unwrap().header.request.get(), 2);
        let buffer = reader.take_buffer().unwrap();
        assert!(buffer.is_empty() && buffer.capacity() > 4096 && reader.has_no_buffer());
        // The next user finds no earlier content in it.
        let mut other = FrameReader::new();
        other.give_buffer(buffer);
        assert!(other.look(|_| true).unwrap().is_none());
        let (near, far) = pair();
        send(&far, &put(1, 3), LIMIT).unwrap();
        assert_eq!(other.next(&near, Instant::now() + LIMIT, |_| true).unwrap().header.request.get(), 3);
    }

    #[test]
    fn sealed_frames_go_out_as_they_are_opened() {
        use crate::key::PoolKey;
        use crate::secure::{Handshake, answer};
        let key = PoolKey::new([1; 32]);
        let (handshake, first) = Handshake::begin(&key).unwrap();
        let (second, lender) = answer(&key, &first).unwrap();
        let borrower = handshake.finish(&second).unwrap();
        let mut outgoing = Outgoing::default();
        outgoing.push(&lender, Kind::Pong, 1, &[7u8; 8]).unwrap();
        // Two items, and a page after them.
        let body = outgoing.begin(&lender);
        body.extend_from_slice(&[8; 2 * 16]);
        body.extend_from_slice(&[9; 4096]);
        outgoing.end(&lender, &Header::new(Kind::GetReply, 2, 2 * 16 + 4096, 2)).unwrap();
        let (near, far) = pair();
        send(&far, outgoing.bytes(), LIMIT).unwrap();
        let mut reader = FrameReader::new();
        reader.open_with(borrower);
        let frame = reader.next(&near, Instant::now() + LIMIT, |_| true).unwrap();
        assert_eq!((frame.kind, frame.body), (Kind::Pong, &[7u8; 8][..]));
        let frame = reader.next(&near, Instant::now() + LIMIT, |_| true).unwrap();
        assert!(frame.body[..32] == [8; 32] && frame.body[32..] == [9; 4096]);
    }

    #[test]
    fn the_pages_of_a_put_are_left_to_whoever_wants_them() {
        use crate::key::PoolKey;
        use crate::secure::{Handshake, answer};
        let key = PoolKey::new([1; 32]);
        let (handshake, first) = Handshake::begin(&key).unwrap();
        let (second, lender) = answer(&key, &first).unwrap();
        let borrower = handshake.finish(&second).unwrap();
        for (near_channel, far_channel) in [(Channel::plain(), Channel::plain()), (lender, borrower)] {
            let mut outgoing = Outgoing::default();
            let body = outgoing.begin(&far_channel);
            body.extend_from_slice(&[8; 40 * 24]);
            body.extend_from_slice(&[9; 40 * 4096]);
            outgoing.end(&far_channel, &Header::new(Kind::Put, 40, 40 * (24 + 4096), 1)).unwrap();
            outgoing.push(&far_channel, Kind::Ping, 2, &[0u8; 0]).unwrap();
            let (near, far) = pair();
            let sender = std::thread::spawn(move || send(&far, outgoing.bytes(), LIMIT).map(|()| far));
            let mut reader = FrameReader::new();
            reader.leave_pages();
            reader.open_with(near_channel);
            reader.give_buffer(Vec::with_capacity(10_000));
            let head = loop {
                assert!(reader.look(|_| true).unwrap().is_none());
                if let Some(head) = reader.take_head().unwrap() {
                    break (head.kind, head.body.to_vec());
                }
                reader.fill(&near, RecvFlags::empty()).unwrap();
            };
            assert_eq!(head, (Kind::Put, vec![8; 40 * 24]));
            let mut pages = reader.take_rest().to_vec();
            assert!(pages.len() < 10_000 && reader.is_empty());
            while pages.len() < 40 * 4096 {
                let mut part = vec![0; 40 * 4096 - pages.len()];
                let (received, _) = rustix::net::recv(&near, &mut part[..], RecvFlags::empty()).unwrap();
                pages.extend_from_slice(&part[..received]);
            }
            assert!(pages == [9; 40 * 4096]);
            // The frame after it is whole.
            let next = reader.next(&near, Instant::now() + LIMIT, |_| true).unwrap();
            assert_eq!((next.kind, next.header.request.get()), (Kind::Ping, 2));
            drop(sender.join().unwrap());
        }
    }

    #[test]
    fn a_peer_that_takes_nothing_does_not_hold_a_thread() {
        let (near, _far) = pair();
        near.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        let limit = Duration::from_millis(100);
        assert!(matches!(send(&near, &vec![0; 8 << 20], limit), Err(ConnectionError::Stuck)));
    }
}
