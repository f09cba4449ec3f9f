//! A lender whose process has no file descriptor left. Alone in this file, because the limit is
//! that of the whole process.

mod client;

use client::{Client, Lender, WAIT_MAX, hello};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// How often the lender tries again while the test looks on, and the least that so many pauses take
/// together: half of what they do.
const TRIES: u64 = 8;
const PAUSES_MIN: Duration = Duration::from_millis(400);

/// How often a thread has begun to wait, from its `/proc/self/task/N/status`, which is open
/// already.
fn waits(status: &File) -> u64 {
    let mut text = [0; 8192];
    let len = status.read_at(&mut text, 0).unwrap();
    let text = String::from_utf8_lossy(&text[..len]);
    let count = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.unwrap().trim().parse().unwrap()
}

#[test]
fn without_descriptors_it_waits_and_does_not_spin() {
    let lender = Lender::tcp(100);
    Client::connect(&lender.address, wire::ROLE_MAIN, 1).ping();
    lender.wait_for("nobody is there", |status| status.connections == 0);
    let status = File::open(format!("/proc/self/task/{}/status", lender.acceptor.as_raw_nonzero())).unwrap();
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..before }).unwrap();
    let mut fillers: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    // One descriptor for our end of a connection, and none for the lender's.
    fillers.pop();
    let mut client = Client::connect_raw(&lender.address);
    // One that spins never waits. One that waits for too short a time has done so too soon, however
    // busy the machine is.
    let (begun, first) = (Instant::now(), waits(&status));
    lender.wait_for("the lender waits", |_| waits(&status) >= first + TRIES);
    assert!(begun.elapsed() >= PAUSES_MIN, "{TRIES} tries took {:?}", begun.elapsed());
    drop(fillers);
    setrlimit(Resource::Nofile, before).unwrap();
    client.handshake(hello(wire::ROLE_MAIN, [2; 16])).unwrap();
    assert!(lender.address.connect(WAIT_MAX).is_ok());
}
