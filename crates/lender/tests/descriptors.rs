//! A lender whose process has no file descriptor left. Alone in this file: the limit is the whole
//! process's.

mod client;

use client::{Client, Lender, PATIENCE, hello};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::time::Duration;

#[test]
fn without_descriptors_it_waits_and_does_not_spin() {
    let lender = Lender::tcp(100);
    Client::connect(&lender.address, wire::ROLE_MAIN, 1).ping();
    lender.wait_for("nobody is there", |status| status.connections == 0);
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..before }).unwrap();
    let mut fillers: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    // One descriptor for our end of a connection, and none for the lender's.
    fillers.pop();
    let mut client = Client::connect_raw(&lender.address);
    let cpu_time = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap();
    let begun = cpu_time();
    std::thread::sleep(Duration::from_millis(500)); // what is looked for is that nothing happens
    let used = cpu_time() - begun;
    assert!(used < Duration::from_millis(250), "{used:?} of processor time in half a second");
    drop(fillers);
    setrlimit(Resource::Nofile, before).unwrap();
    client.greet(hello(wire::ROLE_MAIN, [2; 16])).unwrap();
    assert!(lender.address.connect(PATIENCE).is_ok());
}
