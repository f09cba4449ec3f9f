//! Peers without the pool's key. The lender refuses and counts them, at a limited cost, and honest
//! borrowers are not disturbed.

mod client;

use client::{Client, Lender, config, hello, key, page_of};
use lender::{Config, Security};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{Read, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use wire::key::PoolKey;
use wire::secure::{HANDSHAKE_BYTES, Handshake};
use wire::{Header, Kind, PutItem, ROLE_GET, ROLE_MAIN};
use zerocopy::IntoBytes;

/// The maximum growth of the process in bytes, whatever the unauthenticated connections do: the
/// stacks and buffers of some of them.
const GROWTH_BYTES_MAX: u64 = 32 << 20;

/// Between two bytes of a slow unauthenticated connection. Its first frame has some 70, so that it
/// takes more than three times as long as a lender waits for it: time enough also for a lender that
/// is late.
const BYTE_PAUSE: Duration = Duration::from_millis(100);

/// One test at a time: what one of them measures is the whole process's memory.
fn exclusive() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pool_key() -> PoolKey {
    PoolKey::new([0x11; 32])
}

fn keyed() -> Lender {
    Lender::start(Config { security: Security::Keyed(pool_key()), ..config("127.0.0.1:0", 10_000) })
}

/// A borrower with the key, which puts and gets all the time.
struct Honest {
    main: Client,
    get: Client,
    version: u64,
}

impl Honest {
    fn connect(lender: &Lender, name: u8) -> Honest {
        let main = Client::connect_with(&lender.address, ROLE_MAIN, name, &pool_key());
        let get = Client::connect_with(&lender.address, ROLE_GET, name, &pool_key());
        Honest { main, get, version: 0 }
    }

    fn work(&mut self) {
        self.version += 1;
        let keys: Vec<_> = (0..300).map(|index| key(index, self.version)).collect();
        assert_eq!(self.main.put(&keys), 300);
        assert_eq!(self.get.hits(&keys), 300);
        self.main.drop_keys(&keys[..10]);
        self.main.ping();
        assert_eq!(self.get.hits(&keys), 290);
    }
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Fails if the process has grown by more than the limit.
fn check_growth(before: u64) {
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < GROWTH_BYTES_MAX, "the process has grown by {grown} bytes");
}

#[test]
fn no_key_another_key_and_old_protocols_are_refused() {
    let _alone = exclusive();
    let lender = keyed();
    let mut honest = Honest::connect(&lender, 1);
    honest.work();
    let refused = Client::connect_raw(&lender.address).handshake(hello(ROLE_MAIN, [2; 16])).unwrap_err();
    assert_eq!(refused.code, wire::REFUSED_KEY);
    assert!(refused.text.contains("--key"), "{}", refused.text);
    let refused = Client::connect_raw(&lender.address).shake_hands(&PoolKey::new([0x12; 32])).unwrap_err();
    assert_eq!(refused.code, wire::REFUSED_KEY);
    assert!(refused.text.contains("another one"), "{}", refused.text);
    assert_eq!(lender.handle.status().refused_keys, 2);

    let old = wire::Hello { protocol: 2.into(), ..hello(ROLE_MAIN, [1; 16]) };
    let refused = Client::connect_raw(&lender.address).handshake(old).unwrap_err();
    assert_eq!(refused.code, wire::REFUSED_PROTOCOL);
    // The first frame of another protocol version with keys; the rest does not matter.
    let mut other = Client::connect_raw(&lender.address);
    let header = Header::new(Kind::Handshake1, 0, HANDSHAKE_BYTES, u64::from(wire::PROTOCOL) + 1);
    (&other.stream).write_all(&[header.as_bytes(), &[9; HANDSHAKE_BYTES]].concat()).unwrap();
    let (header, body) = other.receive().unwrap();
    assert_eq!((header.validate(), body[0]), (Ok(Kind::Refused), wire::REFUSED_PROTOCOL as u8));

    let status = lender.wait_for("they are gone", |status| status.connections == 2);
    assert_eq!((status.refused_keys, status.refused_connections, status.borrowers), (2, 4, 1));
    honest.work();

    // The opposite case: a key for a lender without one.
    let trusting = Lender::tcp(100);
    let refused = Client::connect_raw(&trusting.address).shake_hands(&pool_key()).unwrap_err();
    assert_eq!(refused.code, wire::REFUSED_KEY);
    assert!(refused.text.contains("--trust-network"), "{}", refused.text);
}

#[test]
fn a_repeated_connection_gets_no_further_than_the_handshake() {
    let _alone = exclusive();
    let lender = keyed();
    // A recording of all that an honest borrower sends on a connection.
    let recorded = {
        let mut client = Client::connect_raw(&lender.address);
        let (handshake, first) = Handshake::begin(&pool_key()).unwrap();
        let first = client.frame(&Header::new(Kind::Handshake1, 0, HANDSHAKE_BYTES, wire::PROTOCOL.into()), &first);
        (&client.stream).write_all(&first).unwrap();
        let (_, second) = client.receive().unwrap();
        client.channel = handshake.finish(&second).unwrap();
        let hello = client.frame(&Header::new(Kind::Hello, 0, 32, 0), hello(ROLE_MAIN, [3; 16]).as_bytes());
        (&client.stream).write_all(&hello).unwrap();
        assert_eq!(client.receive().unwrap().0.validate(), Ok(Kind::Welcome));
        [first, hello]
    };
    lender.wait_for("it is gone", |status| status.connections == 0);
    for _ in 0..3 {
        let mut thief = Client::connect_raw(&lender.address);
        (&thief.stream).write_all(&recorded[0]).unwrap();
        assert_eq!(thief.receive().unwrap().0.validate(), Ok(Kind::Handshake2));
        (&thief.stream).write_all(&recorded[1]).unwrap();
        let mut rest = Vec::new();
        let _ = (&thief.stream).read_to_end(&mut rest);
        assert!(rest.is_empty(), "{rest:?}");
        // All at once, before the answer arrives.
        let mut thief = Client::connect_raw(&lender.address);
        (&thief.stream).write_all(&recorded.concat()).unwrap();
        assert!(thief.is_closed());
    }
    let status = lender.wait_for("all are gone", |status| status.connections == 0 && status.malformed_frames == 6);
    assert_eq!((status.borrowers, status.kept_sessions), (0, 0));
}

#[test]
fn changed_repeated_and_reordered_frames_end_the_connection() {
    let _alone = exclusive();
    let lender = keyed();
    let mut honest = Honest::connect(&lender, 1);
    let put = |client: &Client, index: u32, request: u64| {
        let item = PutItem { key: key(index, 1), checksum: 7.into() };
        let body = [item.as_bytes(), &page_of(&item.key)].concat();
        client.frame(&Header::new(Kind::Put, 1, body.len(), request), &body)
    };
    let connect = || Client::connect_with(&lender.address, ROLE_MAIN, 2, &pool_key());
    let mut malformed = 0;
    let mut caught = |mut client: Client, what: &str| {
        assert!(client.is_closed(), "{what}");
        malformed += 1;
        lender.wait_for(what, |status| status.malformed_frames == malformed && status.connections == 2);
    };
    let client = connect();
    let frame = put(&client, 1, 1);
    (&client.stream).write_all(&[&frame[..], &frame].concat()).unwrap();
    caught(client, "a frame repeated");
    let client = connect();
    let [one, two] = [put(&client, 1, 1), put(&client, 2, 2)];
    (&client.stream).write_all(&[two, one].concat()).unwrap();
    caught(client, "two frames in another order");
    // One changed bit in the header, in the sealed part, and in the tag.
    for at in [8, 9, 16, 31, 32, 55, 56, 71] {
        let client = connect();
        let mut frame = put(&client, 1, 1);
        frame[at] ^= 1;
        (&client.stream).write_all(&frame).unwrap();
        caught(client, "a bit changed");
    }
    // In clear, after the handshake.
    let client = connect();
    (&client.stream).write_all(Header::new(Kind::Ping, 0, 0, 1).as_bytes()).unwrap();
    (&client.stream).write_all(&[0; wire::secure::SEAL_BYTES]).unwrap();
    caught(client, "a frame in clear");
    honest.work();
}

#[test]
fn a_thousand_idle_connections_cost_little_and_stop_nobody() {
    let _alone = exclusive();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let lender = keyed();
    let mut honest = Honest::connect(&lender, 1);
    honest.work();
    let before = resident_bytes();
    let mut crowd = Vec::new();
    for number in 0..1000 {
        crowd.push(Client::connect_raw(&lender.address));
        if number % 100 == 99 {
            honest.work();
            assert!(lender.handle.status().connections <= 2 + 128, "{}", lender.handle.status().connections);
        }
    }
    check_growth(before);
    // A new borrower gets a connection in the middle of the crowd.
    let mut late = Honest::connect(&lender, 2);
    late.work();
    crowd.iter_mut().for_each(|unauthenticated| assert!(unauthenticated.is_closed()));
    let status = lender.wait_for("the crowd is gone", |status| status.connections == 4);
    let sent_away = status.crowded_out_connections + status.stuck_connections + status.refused_connections;
    // It depends on the machine how many of them are refused, and how many displace an earlier one
    // that is still connected.
    assert!(status.crowded_out_connections > 0 && sent_away >= 1000, "{status:?}");
    honest.work();
    check_growth(before);
}

#[test]
fn a_peer_that_sends_one_byte_at_a_time_is_disconnected() {
    let _alone = exclusive();
    let lender = keyed();
    let mut honest = Honest::connect(&lender, 1);
    let (_, first) = Handshake::begin(&pool_key()).unwrap();
    let header = Header::new(Kind::Handshake1, 0, HANDSHAKE_BYTES, wire::PROTOCOL.into());
    let frame = [header.as_bytes(), &first].concat();
    let mut slow: Vec<Client> = (0..30).map(|_| Client::connect_raw(&lender.address)).collect();
    let mut bytes = frame.iter();
    while lender.handle.status().stuck_connections < 30 {
        let byte = bytes.next().expect("they are cut off before the frame has come");
        // Those that have been closed already do not take it.
        slow.iter().for_each(|client| drop((&client.stream).write_all(&[*byte])));
        honest.work();
        std::thread::sleep(BYTE_PAUSE);
    }
    slow.iter_mut().for_each(|client| assert!(client.is_closed()));
    let status = lender.wait_for("all are gone", |status| status.connections == 2);
    assert_eq!((status.stuck_connections, status.borrowers), (30, 1));
    // The handshake at once, and the Hello never: the time limit covers both together.
    let mut half = Client::connect_raw(&lender.address);
    half.shake_hands(&pool_key()).unwrap();
    assert!(half.is_closed());
    lender.wait_for("it is gone", |status| status.stuck_connections == 31);
    honest.work();
}

#[test]
fn frames_of_four_gibibytes_are_not_waited_for() {
    let _alone = exclusive();
    let lender = keyed();
    let mut honest = Honest::connect(&lender, 1);
    honest.work();
    let before = resident_bytes();
    let mut malformed = 0;
    for (kind, items) in (0..=20u8).flat_map(|kind| [(kind, 0), (kind, 1), (kind, 256), (kind, u16::MAX)]) {
        let mut header = Header::new(Kind::Ping, 0, 0, wire::PROTOCOL.into());
        (header.kind, header.items, header.body_bytes) = (kind, items.into(), u32::MAX.into());
        // As the first frame, and on a connection that has proved possession of the key.
        let unauthenticated = Client::connect_raw(&lender.address);
        let insider = Client::connect_with(&lender.address, ROLE_MAIN, 2, &pool_key());
        for mut client in [unauthenticated, insider] {
            let _ = (&client.stream).write_all(&[header.as_bytes(), &[0; 1000]].concat());
            assert!(client.is_closed());
            malformed += 1;
        }
        lender.wait_for("both are gone", |status| status.connections == 2);
    }
    lender.wait_for("all are counted", |status| status.malformed_frames == malformed);
    honest.work();
    check_growth(before);
}
