//! The borrower's side: a lender's responses.

use super::{Target, number};
use borrower::fuzzing::{Connection, GetConnection, PageResult};
use page::{FileKey, PAGE_SIZE, PageId, Version};
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use wire::address::Stream;
use wire::secure::Security;
use wire::{GetItem, Header, Kind, PROTOCOL, Refused, STATUS_MISS, STATUS_PAGE, STATUS_ZERO, Welcome, WireKey};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// The earlier content of the reader's buffer.
const UNTOUCHED: u8 = 0xee;

/// The maximum number of frames that are read from an input.
const FRAMES_MAX: usize = 64;

pub const ANSWERS: Target = Target {
    name: "borrower_answers",
    about: "a lender's side of the handshake, and its frames on the main connection",
    input_bytes_max: 8 << 10,
    run: answers,
    seeds: || {
        let frame =
            |kind, items: usize, body: &[u8]| [Header::new(kind, items, body.len(), 1).as_bytes(), body].concat();
        let lost = key(1);
        vec![
            [welcome(), frame(Kind::PutReply, 3, &[1, 0, 1]), frame(Kind::Pong, 0, &[0; 8])].concat(),
            [welcome(), frame(Kind::Lost, 2, [lost, lost].as_bytes())].concat(),
            frame(Kind::Refused, 0, Refused::new(2, "too many borrowers").as_bytes()),
        ]
    },
};

/// A lender that sends these bytes and then closes.
fn lender(bytes: &[u8]) -> (Stream, UnixStream) {
    let (near, mut far) = UnixStream::pair().expect("a pair of sockets");
    far.write_all(bytes).expect("an input fits into the socket's buffer");
    far.shutdown(Shutdown::Write).expect("both ends are open");
    (Stream::Unix(near), far)
}

fn answers(bytes: &[u8]) {
    let (near, _far) = lender(bytes);
    let mut rest = bytes;
    let mut plain = || {
        let (header, body) = Header::read_from_prefix(rest).ok()?;
        let kind = header.validate().ok()?;
        let (body, behind) = body.split_at_checked(header.body_bytes.get() as usize)?;
        rest = behind;
        Some((kind, body))
    };
    let first = plain();
    let connected = Connection::handshake(near, wire::ROLE_MAIN, [7; 16], &Security::Trusting);
    assert_eq!(connected.is_ok(), matches!(first, Some((Kind::Welcome, _))));
    let Ok(mut connection) = connected else { return };
    let mut body = Vec::new();
    for _ in 0..FRAMES_MAX {
        match (connection.next_frame(Duration::from_secs(5), &mut body), plain()) {
            (Ok(Some((kind, _))), Some((expected, bytes))) => assert_eq!((kind, &body[..]), (expected, bytes)),
            (Ok(Some((kind, _))), None) => panic!("{kind:?} out of nothing"),
            (Ok(None), _) => panic!("nothing, although the lender has closed"),
            (Err(error), expected) => {
                assert!(expected.is_none(), "{error} instead of a frame");
                return;
            }
        }
    }
}

pub const GETS: Target = Target {
    name: "borrower_gets",
    about: "a lender's answers to gets, received straight into the reader's buffer",
    input_bytes_max: 24 << 10,
    run: gets,
    seeds: || {
        let begin = |mask: u16| mask.to_le_bytes().to_vec();
        let hit = |fill: u8| (STATUS_PAGE, fill);
        vec![
            [begin(0b1), answer(1, &[hit(0x41)])].concat(),
            [begin(0b111), answer(1, &[hit(1), (STATUS_MISS, 0), hit(3)])].concat(),
            [
                begin(0b1011),
                answer(1, &[(STATUS_MISS, 0), (STATUS_ZERO, 0), hit(3)]),
                answer(2, &[hit(1), hit(2), hit(3)]),
            ]
            .concat(),
            [begin(0b110), answer(1, &[(STATUS_MISS, 0); 2]), answer(2, &[hit(4); 2]), answer(3, &[hit(5); 2])]
                .concat(),
        ]
    },
};

/// The first 16 bits of an input select the requested pages of a window; the rest is the lender's.
fn gets(mut bytes: &[u8]) {
    let mask = number(&mut bytes, 2) as u16;
    let indexes: Vec<usize> = (0..16).filter(|at| mask >> at & 1 == 1).collect();
    if indexes.is_empty() {
        return;
    }
    let keys: Vec<WireKey> = indexes.iter().map(|index| key(*index as u32)).collect();
    let places: Vec<usize> = indexes.iter().map(|index| index * PAGE_SIZE).collect();
    let (near, _far) = lender(&[&welcome(), bytes].concat());
    let connected =
        Connection::handshake(near, wire::ROLE_GET, [7; 16], &Security::Trusting).expect("a good handshake");
    let mut connection = GetConnection::over(connected);
    let mut got = Vec::new();
    for request in 1..=3u64 {
        let mut window = vec![UNTOUCHED; 16 * PAGE_SIZE];
        let asked = connection.ask(&keys, keys.len(), request.is_multiple_of(2));
        if asked.and_then(|()| connection.receive(&places, &mut window, &mut got)).is_err() {
            return;
        }
        let (expected, rest) = plain_answer(bytes, keys.len(), request).expect("an answer that is none");
        bytes = rest;
        assert_eq!(got.len(), keys.len());
        for (at, page) in window.as_chunks::<PAGE_SIZE>().0.iter().enumerate() {
            let Some(nth) = indexes.iter().position(|index| *index == at) else {
                assert!(page.iter().all(|byte| *byte == UNTOUCHED), "page {at} was not asked for");
                continue;
            };
            match (got[nth], &expected[nth]) {
                (PageResult::Page { checksum }, Some((told, bytes))) => {
                    assert!(checksum == *told && page[..] == bytes[..], "page {at} is not what the lender sent");
                }
                (PageResult::Miss, None) => {}
                other => panic!("page {at}: {other:?}"),
            }
        }
    }
}

/// For each requested page, the checksum and the bytes that the lender sent.
type Answer<'a> = Vec<Option<(u64, &'a [u8])>>;

/// A response, decoded from the protocol's text, and the bytes after it.
fn plain_answer(bytes: &[u8], count: usize, request: u64) -> Option<(Answer<'_>, &[u8])> {
    let (header, rest) = Header::read_from_prefix(bytes).ok()?;
    let good = header.validate() == Ok(Kind::GetReply) && header.request.get() == request;
    let (body, rest) = rest.split_at_checked(header.body_bytes.get() as usize)?;
    let (items, pages) = <[GetItem]>::ref_from_prefix_with_elems(body, count).ok()?;
    let mut pages = pages.chunks(PAGE_SIZE);
    let answer = items.iter().map(|item| match item.status {
        STATUS_PAGE => pages.next().map(|page| (item.checksum.get(), page)),
        STATUS_ZERO => Some((item.checksum.get(), &page::ZERO_PAGE[..])),
        _ => None,
    });
    let answer = answer.collect();
    (good && usize::from(header.items.get()) == count && pages.next().is_none()).then_some((answer, rest))
}

fn key(index: u32) -> WireKey {
    WireKey::new(PageId { file: FileKey(1), index }, Version(100))
}

fn welcome() -> Vec<u8> {
    let welcome = Welcome {
        protocol: U32::new(PROTOCOL),
        flags: U32::ZERO,
        incarnation: U64::new(1),
        capacity_pages: U64::new(1000),
    };
    [Header::new(Kind::Welcome, 0, size_of::<Welcome>(), 0).as_bytes(), welcome.as_bytes()].concat()
}

/// Status and filling byte of each page.
fn answer(request: u64, pages: &[(u8, u8)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (status, fill) in pages {
        body.extend_from_slice(
            GetItem { status: *status, reserved: [0; 7], checksum: U64::new((*fill).into()) }.as_bytes(),
        );
    }
    let hits = pages.iter().filter(|(status, _)| *status == STATUS_PAGE);
    hits.for_each(|(_, fill)| body.extend_from_slice(&[*fill; PAGE_SIZE]));
    [Header::new(Kind::GetReply, pages.len(), body.len(), request).as_bytes(), &body].concat()
}
