//! Many connections on few threads: no connection blocks another. There are as many connections as
//! any lender has event loops, so every event loop has one of each kind.

mod client;

use client::{Client, Lender, WAIT_MAX, checksum, config, key, page_of};
use lender::{Config, Limits, RATE_MIN_BYTES};
use std::io::Write;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};
use wire::{Header, Kind, PutItem, ROLE_GET, ROLE_MAIN, WireKey};
use zerocopy::IntoBytes;

/// The maximum number of event loops of a kind.
const EVENT_LOOPS_MAX: usize = 4;

fn put_frame(keys: &[WireKey], request: u64) -> Vec<u8> {
    let mut body = Vec::new();
    for key in keys {
        let checksum = checksum(key.id(), key.version(), &page_of(key)).into();
        body.extend_from_slice(PutItem { key: *key, checksum }.as_bytes());
    }
    keys.iter().for_each(|key| body.extend_from_slice(&page_of(key)));
    [Header::new(Kind::Put, keys.len(), body.len(), request).as_bytes(), &body].concat()
}

#[test]
fn a_peer_that_reads_nothing_delays_no_other() {
    let lender = Lender::tcp(1000);
    let mut main = Client::connect(&lender.address, ROLE_MAIN, 1);
    let keys: Vec<_> = (0..256).map(|index| key(index, 1)).collect();
    assert_eq!(main.put(&keys), keys.len());
    let get = [Header::new(Kind::Get, keys.len(), keys.len() * 16, 1).as_bytes(), keys.as_bytes()].concat();
    let deaf: Vec<_> = (0..EVENT_LOOPS_MAX).map(|_| Client::connect(&lender.address, ROLE_GET, 1)).collect();
    let mut others: Vec<_> = (0..EVENT_LOOPS_MAX).map(|_| Client::connect(&lender.address, ROLE_GET, 1)).collect();
    for deaf in &deaf {
        deaf.stream.set_write_timeout(Some(Duration::from_millis(10))).unwrap();
        while (&deaf.stream).write_all(&get).is_ok() {}
        // The unread answers block all its further requests.
    }
    let mut served_meanwhile = 0;
    while lender.handle.status().stuck_connections == 0 {
        for other in &mut others {
            assert_eq!(other.hits(&keys), keys.len());
        }
        served_meanwhile += 1;
    }
    assert!(served_meanwhile > 0);
    lender.wait_for("they are gone", |status| status.stuck_connections == EVENT_LOOPS_MAX as u64);
    assert_eq!(lender.handle.status().connections, 1 + EVENT_LOOPS_MAX as u64);
    others.iter_mut().for_each(|other| assert_eq!(other.hits(&keys), keys.len()));
}

#[test]
fn frames_come_in_pieces_and_together() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let lender = Lender::tcp(5000);
    let mut slow: Vec<_> = (1..=4).map(|name| Client::connect(&lender.address, ROLE_MAIN, name)).collect();
    let mut others: Vec<_> = (5..=8).map(|name| Client::connect(&lender.address, ROLE_MAIN, name)).collect();
    for round in 1..=3u64 {
        let mut streams = Vec::new();
        let mut all_keys = Vec::new();
        for _ in &slow {
            let counts: Vec<u32> = (0..random.u32(1..6)).map(|_| random.u32(1..20)).collect();
            let mut first = 0;
            let mut bytes = Vec::new();
            for (at, count) in counts.iter().enumerate() {
                let keys: Vec<_> = (first..first + count).map(|index| key(index, round)).collect();
                bytes.extend(put_frame(&keys, at as u64));
                first += count;
            }
            streams.push(bytes);
            all_keys.push((counts, (0..first).map(|index| key(index, round)).collect::<Vec<_>>()));
        }
        let mut sent = vec![0; streams.len()];
        while sent.iter().zip(&streams).any(|(sent, bytes)| *sent < bytes.len()) {
            for ((client, bytes), sent) in slow.iter().zip(&streams).zip(&mut sent) {
                let piece = random.usize(1..30_000).min(bytes.len() - *sent);
                (&client.stream).write_all(&bytes[*sent..*sent + piece]).unwrap();
                *sent += piece;
            }
            // Pings wait until earlier messages have arrived.
            others.iter_mut().for_each(Client::ping);
        }
        for (client, (counts, _)) in slow.iter_mut().zip(&all_keys) {
            for (at, count) in counts.iter().enumerate() {
                assert_eq!(client.answer(at as u64), (Kind::PutReply, vec![1; *count as usize]));
            }
        }
        for (name, (_, keys)) in (1..).zip(&all_keys) {
            assert_eq!(Client::connect(&lender.address, ROLE_GET, name).hits(keys), keys.len());
        }
    }
    assert_eq!(lender.handle.status().malformed_frames, 0);
}

#[test]
fn a_connection_that_waits_for_its_share_delays_no_other() {
    let limits = Limits { rate_bytes: NonZeroU64::new(RATE_MIN_BYTES), cpu_percent: None };
    let lender = Lender::start(Config { limits, ..config("127.0.0.1:0", 5000) });
    let mut greedy: Vec<_> = (1..=4).map(|name| Client::connect(&lender.address, ROLE_MAIN, name)).collect();
    let mut others: Vec<_> = (5..=8).map(|name| Client::connect(&lender.address, ROLE_MAIN, name)).collect();
    let keys: Vec<_> = (0..256).map(|index| key(index, 1)).collect();
    let begun = Instant::now();
    let mut puts_done = 0;
    loop {
        for client in &greedy {
            (&client.stream).write_all(&put_frame(&keys, 1)).unwrap();
        }
        greedy.iter_mut().for_each(|client| drop(client.answer(1)));
        puts_done += (greedy.len() * keys.len()) as u64;
        // The clients were answered at once, and now they wait. Their next message is handled only
        // after that.
        for client in &greedy {
            (&client.stream).write_all(&put_frame(&keys[..1], 2)).unwrap();
        }
        others.iter_mut().for_each(Client::ping);
        others.iter_mut().for_each(Client::ping);
        let nobody_went_on = lender.handle.status().puts == puts_done;
        greedy.iter_mut().for_each(|client| drop(client.answer(2)));
        puts_done += greedy.len() as u64;
        if nobody_went_on {
            break;
        }
        // On a machine on which the pings take as long as that wait.
        assert!(begun.elapsed() < WAIT_MAX, "the others are served only when no connection waits");
    }
    assert!(lender.handle.status().rate_limited_ms > 0);
}
