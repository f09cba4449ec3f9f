//! Whole frames in and out of a connection.
//!
//! What comes in is checked before any memory is spent on it: kind, length and whether it may come now. A frame that has
//! begun must be complete within a time limit, and one that goes out must leave within one, so that a peer that is
//! slow, stuck or evil holds a thread for so long and no longer.
//!
//! On a sealed channel ([`wire::secure`]) a frame is handed out only after its seal was verified.

use std::io::{self, IoSlice, Read, Write};
use std::time::{Duration, Instant};
use wire::address::Stream;
use wire::secure::{Channel, SEAL_BYTES};
use wire::{Header, Kind, Malformed};
use zerocopy::FromBytes;

/// Bytes of an idle connection's buffer: room for a Get of a whole read-ahead window.
const IDLE_BYTES: usize = size_of::<Header>() + SEAL_BYTES + wire::ITEMS_MAX * size_of::<wire::WireKey>();

/// Why there will be no more frames.
#[derive(Debug)]
pub enum Broken {
    /// The peer closed between two frames.
    Closed,
    /// It said that it is going for good.
    Goodbye,
    /// It broke the protocol.
    Malformed(Malformed),
    /// It sent a frame that has no business here.
    Unexpected(Kind),
    /// It closed in the middle of a frame.
    Truncated,
    /// It did not finish a frame, or take one, in time.
    Stuck,
    /// It was told that it is not served.
    Refused,
    /// The connection failed.
    Io(io::Error),
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Broken::Closed => write!(f, "closed"),
            Broken::Goodbye => write!(f, "said goodbye"),
            Broken::Malformed(malformed) => write!(f, "{malformed}"),
            Broken::Unexpected(kind) => write!(f, "{kind:?} where none may come"),
            Broken::Truncated => write!(f, "closed in the middle of a frame"),
            Broken::Stuck => write!(f, "stuck in the middle of a frame"),
            Broken::Refused => write!(f, "refused"),
            Broken::Io(error) => write!(f, "{error}"),
        }
    }
}

/// A frame that was received.
pub struct Frame<'a> {
    /// Valid for its kind.
    pub header: Header,
    /// Its kind.
    pub kind: Kind,
    /// Its body, of the length that the kind wants.
    pub body: &'a [u8],
}

/// What [`FrameReader::next`] came back with.
pub enum Next<'a> {
    /// A frame.
    Frame(Frame<'a>),
    /// Nothing came within the stream's read timeout.
    Idle,
}

/// Receives frames.
#[derive(Default)]
pub struct FrameReader {
    buffer: Vec<u8>,
    /// What was received and not yet handed out: `start..end`.
    start: usize,
    end: usize,
    /// Length of the frame handed out last, which is in front of the rest.
    handed_out: usize,
    channel: Channel,
    /// What a sealed frame is opened into.
    opened: Vec<u8>,
}

impl FrameReader {
    /// A reader that has read nothing.
    pub fn new() -> FrameReader {
        FrameReader::default()
    }

    /// From the next frame on, all come through this channel.
    pub fn open_with(&mut self, channel: Channel) {
        self.channel = channel;
    }

    /// Waits for a frame that `may_come`, as long as the stream's read timeout for its first byte, and for `limit` from
    /// there to its last one. The limit runs from the start where `begun` says so.
    pub fn next(
        &mut self,
        stream: &Stream,
        limit: Duration,
        begun: Option<Instant>,
        may_come: impl Fn(Kind) -> bool,
    ) -> Result<Next<'_>, Broken> {
        self.start += std::mem::take(&mut self.handed_out);
        let mut begun = begun;
        let (header, kind) = loop {
            let header = self.header()?;
            let needed = match header {
                Some((_, kind)) if !may_come(kind) => return Err(Broken::Unexpected(kind)),
                Some((header, _)) => self.frame_bytes(&header),
                None => size_of::<Header>(),
            };
            match header {
                Some(found) if self.end - self.start >= needed => break found,
                // The clock is asked only when a first read did not bring the whole frame.
                _ if self.start != self.end && begun.get_or_insert_with(Instant::now).elapsed() >= limit => {
                    return Err(Broken::Stuck);
                }
                _ => {}
            }
            self.make_room(needed);
            let empty = self.start == self.end;
            match (&*stream).read(&mut self.buffer[self.end..]) {
                Ok(0) => return Err(if empty { Broken::Closed } else { Broken::Truncated }),
                Ok(bytes) => self.end += bytes,
                Err(error) => match (error.kind(), begun) {
                    (io::ErrorKind::Interrupted, _) => {}
                    (io::ErrorKind::WouldBlock, None) => return Ok(Next::Idle),
                    (io::ErrorKind::WouldBlock, Some(begun)) if begun.elapsed() >= limit => return Err(Broken::Stuck),
                    (io::ErrorKind::WouldBlock, Some(_)) => {}
                    _ => return Err(Broken::Io(error)),
                },
            }
        };
        self.handed_out = self.frame_bytes(&header);
        let mut body = self.start + size_of::<Header>()..self.start + self.handed_out;
        if self.channel.is_sealed() {
            let sealed = body.start..body.start + SEAL_BYTES + header.items_bytes();
            let items = self.channel.open_head(&header, &self.buffer[sealed.clone()], &mut self.opened);
            let items = items.map_err(Broken::Malformed)?;
            // Where they belong, in front of the pages.
            body.start = sealed.end - items.len();
            self.buffer[body.start..sealed.end].copy_from_slice(items);
        }
        Ok(Next::Frame(Frame { header, kind, body: &self.buffer[body] }))
    }

    fn frame_bytes(&self, header: &Header) -> usize {
        size_of::<Header>() + self.channel.extra_bytes() + header.body_bytes.get() as usize
    }

    fn header(&self) -> Result<Option<(Header, Kind)>, Broken> {
        match Header::read_from_prefix(&self.buffer[self.start..self.end]) {
            Ok((header, _)) => header.validate().map(|kind| Some((header, kind))).map_err(Broken::Malformed),
            Err(_) => Ok(None),
        }
    }

    /// Makes the buffer hold a frame of `needed` bytes, from its beginning on.
    fn make_room(&mut self, needed: usize) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        let size = needed.max(IDLE_BYTES);
        if self.start + size > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            if self.buffer.len() < size {
                self.buffer.resize(size, 0);
            }
        }
    }

    /// Gives the memory of a large buffer back, when nothing is in it. For when the peer is idle.
    pub fn shrink(&mut self) {
        self.start += std::mem::take(&mut self.handed_out);
        if self.start == self.end && self.buffer.len() > IDLE_BYTES {
            let channel = std::mem::take(&mut self.channel);
            *self = FrameReader { channel, ..FrameReader::new() };
        }
    }
}

/// Sends whole frames through the channel, all of them within `limit`, give or take the stream's write timeout. `heads` is for the sealed
/// parts of them; its content is of no interest.
pub fn send_frames(
    stream: &Stream,
    channel: &Channel,
    frames: &[u8],
    heads: &mut Vec<u8>,
    limit: Duration,
) -> Result<(), Broken> {
    if !channel.is_sealed() {
        return send(stream, frames, limit);
    }
    heads.clear();
    let mut pieces = Vec::new();
    let mut rest = frames;
    while let Ok((header, behind)) = Header::read_from_prefix(rest) {
        let (body, behind) = behind.split_at_checked(header.body_bytes.get() as usize).ok_or(Broken::Truncated)?;
        let (items, pages) = body.split_at(header.items_bytes());
        channel.push_head(&header, items, heads).map_err(Broken::Malformed)?;
        if !pages.is_empty() {
            pieces.push((heads.len(), pages));
        }
        rest = behind;
    }
    let mut slices = Vec::with_capacity(2 * pieces.len() + 1);
    let mut begin = 0;
    for (end, pages) in pieces {
        slices.extend([IoSlice::new(&heads[begin..end]), IoSlice::new(pages)]);
        begin = end;
    }
    slices.push(IoSlice::new(&heads[begin..]));
    send_all(stream, &mut slices, limit)
}

/// Sends bytes, all of them within `limit`, give or take the stream's write timeout.
pub fn send(stream: &Stream, bytes: &[u8], limit: Duration) -> Result<(), Broken> {
    send_all(stream, &mut [IoSlice::new(bytes)], limit)
}

fn send_all(stream: &Stream, mut slices: &mut [IoSlice<'_>], limit: Duration) -> Result<(), Broken> {
    let begun = Instant::now();
    // Empty ones at the front go.
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match (&*stream).write_vectored(slices) {
            Ok(sent) => IoSlice::advance_slices(&mut slices, sent),
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {}
                _ => return Err(Broken::Io(error)),
            },
        }
        if !slices.is_empty() && begun.elapsed() >= limit {
            return Err(Broken::Stuck);
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
                match reader.next(&near, LIMIT, None, |_| true) {
                    Ok(Next::Idle) => reader.shrink(),
                    Ok(Next::Frame(frame)) => {
                        assert_eq!((frame.kind, frame.header.request.get()), (Kind::Put, request as u64));
                        assert_eq!(frame.body.len(), sizes[request] * 4120);
                        assert!(frame.body.iter().all(|byte| *byte == request as u8));
                        request += 1;
                    }
                    Err(Broken::Closed) => break,
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
            let Err(broken) = reader.next(&near, LIMIT, None, |kind| kind == Kind::Ping) else { panic!("accepted") };
            assert!(broken.to_string().contains(expected), "{broken}");
            assert!(reader.buffer.len() <= IDLE_BYTES);
        }
    }

    #[test]
    fn half_a_frame_does_not_hold_a_thread() {
        let (near, far) = pair();
        send(&far, &put(2, 1)[..5000], LIMIT).unwrap();
        let mut reader = FrameReader::new();
        let got = reader.next(&near, Duration::from_millis(50), None, |_| true);
        assert!(matches!(got, Err(Broken::Stuck)));
        // Where the limit runs from the start, silence is no excuse.
        let (near, _far) = pair();
        let got = FrameReader::new().next(&near, Duration::from_millis(50), Some(Instant::now()), |_| true).err();
        assert!(matches!(got, Some(Broken::Stuck)));
    }

    #[test]
    fn a_peer_that_takes_nothing_does_not_hold_a_thread() {
        let (near, _far) = pair();
        near.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        let limit = Duration::from_millis(100);
        assert!(matches!(send(&near, &vec![0; 8 << 20], limit), Err(Broken::Stuck)));
    }
}
