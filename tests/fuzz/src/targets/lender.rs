//! The lender's side: frames in a stream, and whole connections.

use super::{Target, number, take};
use lender::fuzzing::{ConnectionError, FrameReader, Lender};
use page::{ChecksumKey, FileKey, PAGE_SIZE, PageId, Version};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use wire::address::Stream;
use wire::key::PoolKey;
use wire::secure::{HANDSHAKE_BYTES, Handshake, SEAL_BYTES, Security};
use wire::{GetItem, Header, Hello, Kind, PutItem, STATUS_MISS, STATUS_PAGE, STATUS_ZERO, WireKey};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// The session of an input's connections.
const SESSION: [u8; 16] = *b"session of fuzz ";

/// The maximum number of pieces of a stream.
const PIECES_MAX: usize = 100;

/// Pages of the lender: few, so that an input can fill it.
const CAPACITY_PAGES: u32 = 4;

pub const FRAMES: Target = Target {
    name: "lender_frames",
    about: "a borrower's stream, cut anywhere, as the lender's reader of frames sees it",
    input_bytes_max: 16 << 10,
    run: frames,
    seeds: || {
        let cut = |size: u16, bytes: Vec<u8>| [&size.to_le_bytes()[..], &bytes].concat();
        let all: Vec<u8> =
            [hello(wire::ROLE_MAIN), put(&[(1, 1, 1, 0x41)]), ping(2), drop_pages(&[(1, 1, 1)])].concat();
        vec![
            cut(0, all.clone()),
            cut(7, all.clone()),
            cut(1000, all[..3000].to_vec()),
            cut(1, get(&[(1, 1, 1)], false, 3)),
        ]
    },
};

/// Bytes that fit into a socket at once, without a reader at the other end.
fn near_end(bytes: &[u8]) -> (Stream, UnixStream) {
    let (near, mut far) = UnixStream::pair().expect("a pair of sockets");
    far.write_all(bytes).expect("an input fits into the socket's buffer");
    far.shutdown(Shutdown::Write).expect("both ends are open");
    (Stream::Unix(near), far)
}

/// Reads the frames that a simple decoder finds; the rest must be the reason why the reader stops.
fn frames(mut bytes: &[u8]) {
    let cut = number(&mut bytes, 2) as usize;
    // A socket holds only some hundreds of pieces, however short.
    let piece_bytes = cut.max(bytes.len() / PIECES_MAX + 1);
    let (near, mut far) = UnixStream::pair().expect("a pair of sockets");
    near.set_read_timeout(Some(Duration::from_secs(5))).expect("a time limit");
    let near = Stream::Unix(near);
    let mut reader = FrameReader::new();
    let (mut rest, mut sent, mut closed) = (bytes, 0, false);
    loop {
        // The reader is called only if a frame is complete, or the stream ends: otherwise it would
        // wait.
        let expected = plain_frame(rest);
        while !closed && (bytes.len() - sent) > 0 && bytes.len() - rest.len() + wanted(expected, rest) > sent {
            let piece = &bytes[sent..(sent + piece_bytes).min(bytes.len())];
            far.write_all(piece).expect("the socket takes a piece");
            sent += piece.len();
        }
        if sent == bytes.len() && !closed {
            far.shutdown(Shutdown::Write).expect("both ends are open");
            closed = true;
        }
        match (reader.next(&near, Instant::now() + Duration::from_secs(5), |_| true), expected) {
            (Ok(frame), Plain::Frame(kind, size)) => {
                assert_eq!((frame.kind, frame.body), (kind, &rest[size_of::<Header>()..size]));
                rest = &rest[size..];
            }
            (Err(ConnectionError::Closed), Plain::End) | (Err(ConnectionError::Truncated), Plain::Part) => return,
            (Err(ConnectionError::Malformed(_)), Plain::Malformed) => return,
            (Err(broken), _) => panic!("{broken} with {} bytes left", rest.len()),
            (Ok(_), _) => panic!("a frame that is none, with {} bytes left", rest.len()),
        }
        // Between two frames another connection may use its memory.
        if cut.is_multiple_of(2)
            && let Some(buffer) = reader.take_buffer()
        {
            reader.give_buffer(buffer);
        }
    }
}

/// The beginning of a stream, decoded from the protocol's text.
#[derive(Clone, Copy)]
enum Plain {
    Frame(Kind, usize),
    Part,
    Malformed,
    End,
}

fn plain_frame(bytes: &[u8]) -> Plain {
    let Ok((header, body)) = Header::read_from_prefix(bytes) else {
        return if bytes.is_empty() { Plain::End } else { Plain::Part };
    };
    let Ok(kind) = header.validate() else { return Plain::Malformed };
    let body_bytes = header.body_bytes.get() as usize;
    if body.len() < body_bytes { Plain::Part } else { Plain::Frame(kind, size_of::<Header>() + body_bytes) }
}

/// Bytes that must be available so that the reader does not wait.
fn wanted(expected: Plain, rest: &[u8]) -> usize {
    match expected {
        Plain::Frame(_, size) => size,
        Plain::Malformed => size_of::<Header>(),
        Plain::Part | Plain::End => rest.len(),
    }
}

pub const CONNECTIONS: Target = Target {
    name: "lender_connections",
    about: "a borrower's main connection, then a get connection, served by a whole lender",
    input_bytes_max: 40 << 10,
    run: connections,
    seeds: connection_seeds,
};

/// The only page that a lender may return: the last put.
type Kept = HashMap<PageId, (Version, u64, [u8; PAGE_SIZE])>;

fn connections(mut bytes: &[u8]) {
    let main_bytes = number(&mut bytes, 2) as usize;
    let main = take(&mut bytes, main_bytes);
    let lender = Lender::new(CAPACITY_PAGES, Security::Trusting).expect("a small store");
    let mut kept = Kept::new();
    play(&lender, main, &mut kept);
    // The session is kept. A main connection lets get connections join it; another main one would
    // take its place.
    let hello = Hello::read_from_prefix(bytes.get(size_of::<Header>()..).unwrap_or_default());
    let is_main = hello.is_ok_and(|(hello, _)| hello.session == SESSION && hello.role.get() == wire::ROLE_MAIN);
    let held = (!is_main).then(|| lender.hold(SESSION, near_end(&[]).0).expect("there is room for a session"));
    play(&lender, bytes, &mut kept);
    drop(held);
    lender.forget_kept();
    let (pages, sessions, connections, _) = lender.left();
    assert_eq!((pages, sessions, connections), (0, 0, 0), "somebody left, and something stayed");
}

pub const UNAUTHENTICATED: Target = Target {
    name: "lender_unauthenticated",
    about: "whatever somebody without the key says to a lender that wants it",
    input_bytes_max: 4 << 10,
    run: unauthenticated,
    seeds: || {
        let shake = |protocol: u32| {
            let (_, body) = Handshake::begin(&PoolKey::new(KEY)).expect("random numbers");
            [Header::new(Kind::Handshake1, 0, HANDSHAKE_BYTES, protocol.into()).as_bytes(), &body].concat()
        };
        vec![
            hello(wire::ROLE_MAIN),
            shake(wire::PROTOCOL + 1),
            [shake(wire::PROTOCOL), hello(wire::ROLE_MAIN), vec![0; SEAL_BYTES]].concat(),
            [shake(wire::PROTOCOL), shake(wire::PROTOCOL)].concat(),
            [shake(wire::PROTOCOL), ping(1), vec![0; SEAL_BYTES]].concat(),
        ]
    },
};

/// The key of the lender that has one.
const KEY: [u8; 32] = [7; 32];

/// A refusal, or an answer to a handshake and perhaps a refusal after it; nothing is left of it.
/// (No input contains the seal of a Hello.)
fn unauthenticated(bytes: &[u8]) {
    let lender = Lender::new(CAPACITY_PAGES, Security::Keyed(PoolKey::new(KEY))).expect("a small store");
    let answered = serve(&lender, bytes);
    let mut rest = &answered[..];
    let mut extra_bytes = 0;
    while let Ok((header, behind)) = Header::read_from_prefix(rest) {
        let kind = header.validate().expect("the lender's answers keep to the protocol");
        assert!(kind == Kind::Refused || kind == Kind::Handshake2 && extra_bytes == 0, "{kind:?} to a stranger");
        rest = &behind[header.body_bytes.get() as usize + extra_bytes..];
        assert!(kind != Kind::Refused || rest.is_empty(), "something behind a refusal");
        extra_bytes = SEAL_BYTES;
    }
    assert!(rest.is_empty());
    let (pages, sessions, connections, _) = lender.left();
    assert_eq!((pages, sessions, connections), (0, 0, 0), "a stranger left something");
}

/// Lets the lender serve the bytes, and returns its answers.
fn serve(lender: &Lender, asked: &[u8]) -> Vec<u8> {
    let (near, mut far) = near_end(asked);
    let mut answered = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| lender.serve(near));
        far.read_to_end(&mut answered).map_or_else(
            // Closed with unread bytes of this side, as after any frame that breaks the protocol.
            |error| assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
            drop,
        );
    });
    answered
}

/// Lets the lender serve the bytes, and compares each of its answers with a simple decoder of both
/// sides.
fn play(lender: &Lender, asked: &[u8], kept: &mut Kept) {
    let answered = serve(lender, asked);
    let (mut asked, mut answered) = (asked, &answered[..]);
    let mut next_answer = || loop {
        let Plain::Frame(kind, size) = plain_frame(answered) else {
            assert!(matches!(plain_frame(answered), Plain::End), "the lender's answers break the protocol");
            return None;
        };
        let (frame, rest) = answered.split_at(size);
        answered = rest;
        if kind != Kind::Lost {
            let (header, body) = Header::read_from_prefix(frame).expect("a whole frame");
            return Some((kind, header, body));
        }
    };
    let Plain::Frame(Kind::Hello, size) = plain_frame(asked) else { return };
    let hello = Hello::read_from_prefix(&take(&mut asked, size)[size_of::<Header>()..]).expect("a whole Hello").0;
    let role = hello.role.get();
    let good = hello.magic == wire::MAGIC && hello.protocol.get() == wire::PROTOCOL && (1..=2).contains(&role);
    let first = next_answer().map(|(kind, ..)| kind);
    // At most the session that is held here permits a get connection to join.
    let good = good && (role == wire::ROLE_MAIN || first == Some(Kind::Welcome) && hello.session == SESSION);
    assert_eq!(first, Some(if good { Kind::Welcome } else { Kind::Refused }));
    // Pages of another session are not this one's, and end with its only connection.
    let mut own = Kept::new();
    let kept = if hello.session == SESSION { kept } else { &mut own };
    while good && let Plain::Frame(kind, size) = plain_frame(asked) {
        let (header, body) = Header::read_from_prefix(take(&mut asked, size)).expect("a whole frame");
        match (kind, role) {
            (Kind::Ping, _) => assert_eq!(next_answer().map(|(kind, ..)| kind), Some(Kind::Pong)),
            (Kind::Put, wire::ROLE_MAIN) => {
                let (kind, answer, stored) = next_answer().expect("an answer to a Put");
                assert_eq!((kind, answer.request, answer.items), (Kind::PutReply, header.request, header.items));
                let count = usize::from(header.items.get());
                let (items, pages) = <[PutItem]>::ref_from_prefix_with_elems(body, count).expect("a valid Put");
                for ((item, page), stored) in items.iter().zip(pages.as_chunks::<PAGE_SIZE>().0).zip(stored) {
                    if *stored == 1 {
                        kept.insert(item.key.id(), (item.key.version(), item.checksum.get(), *page));
                    }
                }
            }
            (Kind::Drop, wire::ROLE_MAIN) => {
                for key in <[WireKey]>::ref_from_bytes(body).expect("a valid Drop") {
                    kept.retain(|id, (version, ..)| *id != key.id() || *version != key.version());
                }
            }
            (Kind::Get, wire::ROLE_GET) => {
                let (kind, answer, got) = next_answer().expect("an answer to a Get");
                assert_eq!((kind, answer.request, answer.items), (Kind::GetReply, header.request, header.items));
                let keys = <[WireKey]>::ref_from_bytes(body).expect("a valid Get");
                let exclusive = header.flags & wire::GET_EXCLUSIVE != 0;
                compare(keys, got, exclusive, kept);
            }
            (Kind::Bye, wire::ROLE_MAIN) => {
                kept.clear();
                break;
            }
            _ => break,
        }
    }
}

/// A lender may forget a page, but a returned page is the last put, whole; and it no longer has a
/// page that it gave away.
fn compare(keys: &[WireKey], got: &[u8], exclusive: bool, kept: &mut Kept) {
    let (items, pages) = <[GetItem]>::ref_from_prefix_with_elems(got, keys.len()).expect("a valid GetReply");
    let mut pages = pages.as_chunks::<PAGE_SIZE>().0.iter();
    for (key, item) in keys.iter().zip(items) {
        let bytes = match item.status {
            STATUS_MISS => continue,
            STATUS_ZERO => &page::ZERO_PAGE,
            STATUS_PAGE => pages.next().expect("a page for each hit"),
            other => panic!("status {other}"),
        };
        let known = kept.get(&key.id());
        assert_eq!(known, Some(&(key.version(), item.checksum.get(), *bytes)), "page {key:?}");
        if exclusive {
            kept.remove(&key.id());
        }
    }
    assert!(pages.next().is_none(), "a page that belongs to nothing");
}

/// File, index and version of a page.
type Name = (u32, u32, u64);

fn key((file, index, version): Name) -> WireKey {
    WireKey::new(PageId { file: FileKey(file), index }, Version(version))
}

fn keys(kind: Kind, names: &[Name], request: u64, flags: u8) -> Vec<u8> {
    let keys: Vec<WireKey> = names.iter().map(|name| key(*name)).collect();
    let mut header = Header::new(kind, keys.len(), size_of_val(&keys[..]), request);
    header.flags = flags;
    [header.as_bytes(), keys.as_bytes()].concat()
}

pub fn hello(role: u32) -> Vec<u8> {
    let hello =
        Hello { magic: wire::MAGIC, protocol: U32::new(wire::PROTOCOL), role: U32::new(role), session: SESSION };
    [Header::new(Kind::Hello, 0, size_of::<Hello>(), 0).as_bytes(), hello.as_bytes()].concat()
}

fn ping(request: u64) -> Vec<u8> {
    Header::new(Kind::Ping, 0, 0, request).as_bytes().to_vec()
}

fn get(names: &[Name], exclusive: bool, request: u64) -> Vec<u8> {
    keys(Kind::Get, names, request, if exclusive { wire::GET_EXCLUSIVE } else { 0 })
}

fn drop_pages(names: &[Name]) -> Vec<u8> {
    keys(Kind::Drop, names, 0, 0)
}

/// Pages filled with one byte each.
fn put(pages: &[(u32, u32, u64, u8)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (file, index, version, fill) in pages {
        let (key, page) = (key((*file, *index, *version)), [*fill; PAGE_SIZE]);
        let checksum = U64::new(ChecksumKey::new([7; 32]).checksum(key.id(), key.version(), &page));
        body.extend_from_slice(PutItem { key, checksum }.as_bytes());
    }
    pages.iter().for_each(|(.., fill)| body.extend_from_slice(&[*fill; PAGE_SIZE]));
    [Header::new(Kind::Put, pages.len(), body.len(), 9).as_bytes(), &body].concat()
}

fn connection_seeds() -> Vec<Vec<u8>> {
    let both = |main: &[Vec<u8>], gets: &[Vec<u8>]| {
        let main = [&[hello(wire::ROLE_MAIN)], main].concat().concat();
        let gets = [&[hello(wire::ROLE_GET)], gets].concat().concat();
        [&(main.len() as u16).to_le_bytes()[..], &main, &gets].concat()
    };
    let many: Vec<(u32, u32, u64, u8)> = (0..7).map(|at| (1, at, 1, at as u8)).collect();
    let bye = Header::new(Kind::Bye, 0, 0, 0).as_bytes().to_vec();
    let names: Vec<Name> = (0..7).map(|at| (1, at, 1)).collect();
    vec![
        both(
            &[put(&[(1, 1, 1, 0x41)]), ping(1)],
            &[get(&[(1, 1, 1)], false, 1), get(&[(1, 1, 1), (1, 1, 1)], true, 2)],
        ),
        both(&[put(&many)], &[get(&names, true, 1), ping(2)]),
        both(&[put(&[(1, 1, 1, 0)]), put(&[(1, 1, 2, 5)]), drop_pages(&[(1, 1, 1)])], &[get(&[(1, 1, 2)], false, 1)]),
        both(&[put(&[(2, 3, 9, 7)]), drop_pages(&[(2, 3, 9)])], &[get(&[(2, 3, 9)], false, 1)]),
        both(&[put(&[(1, 1, Version::MAX.0 + 1, 7)])], &[put(&[(1, 1, 1, 7)])]),
        both(&[put(&[(1, 1, 1, 7)]), bye], &[get(&[(1, 1, 1)], false, 1)]),
    ]
}
