//! Sessions that outlive their connections, over real sockets.

mod client;

use client::{Client, Lender, WAIT_MAX, checksum, config, hello, key, page_of};
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use wire::{Header, Kind, PutItem, ROLE_GET, ROLE_MAIN, WELCOME_RESUMED, WireKey};
use zerocopy::IntoBytes;

fn lender(grace: Duration, capacity_pages: u64) -> Lender {
    Lender::start(lender::Config { grace, ..config("127.0.0.1:0", capacity_pages) })
}

/// Returns a main connection, and whether it resumed a session.
fn main(lender: &Lender, name: u8) -> (Client, bool) {
    let mut client = Client::connect_raw(&lender.address);
    let welcome = client.handshake(hello(ROLE_MAIN, [name; 16])).unwrap();
    (client, welcome.flags.get() & WELCOME_RESUMED != 0)
}

fn keys(count: u32) -> Vec<WireKey> {
    (0..count).map(|index| key(index, 1)).collect()
}

/// A grace time that is longer than any test.
const LONG: Duration = Duration::from_secs(600);

#[test]
fn a_borrower_that_comes_back_finds_its_pages() {
    let lender = lender(LONG, 1000);
    let keys = keys(300);
    let (mut first, resumed) = main(&lender, 1);
    assert!(!resumed);
    assert_eq!(first.put(&keys), 300);
    drop(first);
    let status = lender.wait_for("it is kept", |status| status.kept_sessions == 1);
    assert_eq!((status.borrowers, status.connections, status.stored_pages), (0, 0, 300));
    assert!(status.borrower_list[0].kept_ms.is_some());
    // Another session does not reach them, and a get connection alone cannot.
    assert!(!main(&lender, 2).1);
    let refused = Client::connect_raw(&lender.address).handshake(hello(ROLE_GET, [1; 16])).unwrap_err();
    assert_eq!(refused.code, wire::REFUSED_SESSION);
    let (_main, resumed) = main(&lender, 1);
    assert!(resumed);
    assert_eq!(Client::connect(&lender.address, ROLE_GET, 1).hits(&keys), 300);
    assert_eq!(lender.handle.status().kept_sessions, 0);
}

#[test]
fn who_was_set_back_is_refused_and_the_rightful_one_is_not() {
    let lender = lender(LONG, 1000);
    let (mut first, _) = main(&lender, 1);
    assert_eq!(first.put(&[key(1, 40), key(2, 41)]), 2);
    drop(first);
    lender.wait_for("it is kept", |status| status.kept_sessions == 1);
    for behind in [1, 40, 41] {
        let refused =
            Client::connect_raw(&lender.address).handshake_with(hello(ROLE_MAIN, [1; 16]), behind).unwrap_err();
        assert_eq!(refused.code, wire::REFUSED_BEHIND, "{}", refused.text);
    }
    let mut rightful = Client::connect_raw(&lender.address);
    let welcome = rightful.handshake_with(hello(ROLE_MAIN, [1; 16]), 42).unwrap();
    assert_eq!(welcome.flags.get(), WELCOME_RESUMED);
    assert_eq!(Client::connect(&lender.address, ROLE_GET, 1).hits(&[key(1, 40), key(2, 41)]), 2);
}

#[test]
fn pages_of_a_borrower_that_stays_away_are_freed() {
    let grace = Duration::from_millis(300);
    let lender = lender(grace, 1000);
    let (mut borrower, _) = main(&lender, 1);
    assert_eq!(borrower.put(&keys(700)), 700);
    let left = Instant::now();
    drop(borrower);
    lender.wait_for("its pages are freed", |status| status.expired_sessions == 1 && status.stored_pages == 0);
    assert!(left.elapsed() >= grace);
    assert!(!main(&lender, 1).1);
}

#[test]
fn goodbye_frees_at_once() {
    let lender = lender(LONG, 1000);
    let (mut borrower, _) = main(&lender, 1);
    assert_eq!(borrower.put(&keys(700)), 700);
    let mut get = Client::connect(&lender.address, ROLE_GET, 1);
    borrower.bye();
    assert!(get.is_closed());
    lender.wait_for("all is freed", |status| (status.connections, status.stored_pages) == (0, 0));
    assert!(!main(&lender, 1).1, "the name is unknown");
    let status = lender.handle.status();
    assert_eq!((status.malformed_frames, status.kept_sessions), (0, 0));
}

#[test]
fn kept_pages_are_pages_like_all_others() {
    let lender = lender(LONG, 1000);
    let keys = keys(1000);
    let (mut away, _) = main(&lender, 1);
    assert_eq!(away.put(&keys), 1000);
    drop(away);
    lender.wait_for("it is kept", |status| status.kept_sessions == 1);
    // A new borrower gets its fair share of them.
    let (mut other, _) = main(&lender, 2);
    assert_eq!(other.put(&keys[..400]), 400);
    // A borrower that comes back gets notices of its lost pages.
    let (mut back, resumed) = main(&lender, 1);
    assert!(resumed);
    lender.wait_for("the notices are sent", |status| status.lost_notices_sent == 400);
    back.ping();
    assert_eq!(back.lost, &keys[..400]);
    assert_eq!(Client::connect(&lender.address, ROLE_GET, 1).hits(&keys), 600);
}

#[test]
fn a_new_main_connection_ends_those_of_before() {
    let lender = lender(LONG, 10_000);
    let (old, _) = main(&lender, 1);
    let mut old_get = Client::connect(&lender.address, ROLE_GET, 1);
    // The borrower has given the old connection up. Its messages there are still on their way: a
    // thousand pages in version 1.
    let old_keys = keys(1024);
    for keys in old_keys.chunks(256) {
        let items = keys.iter().map(|key| {
            let sum = checksum(key.id(), key.version(), &page_of(key)).into();
            PutItem { key: *key, checksum: sum }
        });
        let mut frame: Vec<u8> = items.flat_map(|item| item.as_bytes().to_vec()).collect();
        keys.iter().for_each(|key| frame.extend_from_slice(&page_of(key)));
        let header = Header::new(Kind::Put, keys.len(), frame.len(), 1);
        (&old.stream).write_all(&[header.as_bytes(), &frame].concat()).unwrap();
    }
    let (mut new, resumed) = main(&lender, 1);
    assert!(resumed);
    let applied = lender.handle.status().puts;
    // From here on no message of the old connection replaces pages that the new one puts.
    let new_keys: Vec<_> = (0..1024).map(|index| key(index, 2)).collect();
    assert_eq!(new.put(&new_keys), 1024);
    assert!(old_get.is_closed());
    while (&old.stream).read(&mut [0; 4096]).is_ok_and(|bytes| bytes > 0) {}
    let status = lender.wait_for("only the new connection is left", |status| status.connections == 1);
    assert_eq!(status.puts, applied + 1024);
    assert_eq!(Client::connect(&lender.address, ROLE_GET, 1).hits(&new_keys), 1024);
    assert_eq!((status.resumed_sessions, status.kept_sessions), (1, 0));
}

#[test]
fn kept_sessions_make_room_for_new_ones() {
    let lender = lender(LONG, 1000);
    for name in 1..=64 {
        let (mut borrower, _) = main(&lender, name);
        assert_eq!(borrower.put(&[key(1, 1)]), 1);
        drop(borrower);
        lender.wait_for("it is kept", |status| status.kept_sessions == u64::from(name));
    }
    let (_new, resumed) = main(&lender, 65);
    assert!(!resumed);
    let status = lender.wait_for("the oldest one's page is freed", |status| status.stored_pages == 63);
    assert_eq!((status.kept_sessions, status.borrowers), (63, 1));
    assert!(!main(&lender, 1).1, "the oldest session was freed");
    assert!(main(&lender, 64).1);
}

#[test]
fn pages_kept_are_gone_with_the_lender() {
    let first = lender(LONG, 1000);
    let (mut borrower, _) = main(&first, 1);
    assert_eq!(borrower.put(&keys(10)), 10);
    let address = first.address.clone();
    drop(first);
    assert!(borrower.is_closed());
    let second = Lender::start(lender::Config { grace: LONG, ..config(&address.to_string(), 1000) });
    assert!(!main(&second, 1).1);
    assert!(second.address.connect(WAIT_MAX).is_ok());
}
