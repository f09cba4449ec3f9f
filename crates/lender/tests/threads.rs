//! The number of a lender's threads. Alone in this file, because they are counted in the whole
//! process.

mod client;

use client::{Client, Lender, WAIT_MAX};
use std::time::{Duration, Instant};
use wire::{ROLE_GET, ROLE_MAIN};

/// Returns the names of the lender's threads.
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).filter(|name| name.starts_with("lender-")).collect()
}

#[test]
fn connections_have_no_threads() {
    let lender = Lender::tcp(1000);
    let mut first = Client::connect(&lender.address, ROLE_MAIN, 1);
    first.ping();
    let wait_for = |wanted: &[String]| {
        let begun = Instant::now();
        loop {
            let mut found = threads();
            found.sort();
            if found == wanted {
                return;
            }
            assert!(begun.elapsed() < WAIT_MAX, "{found:?} and not {wanted:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    // The thread of the handshake ends at once.
    let event_loops = (std::thread::available_parallelism().unwrap().get() / 2).clamp(1, 4);
    let mut wanted = vec!["lender-upkeep".to_owned()];
    (0..event_loops).for_each(|_| wanted.extend(["lender-gets".into(), "lender-mains".into()]));
    wanted.sort();
    wait_for(&wanted);
    let mut crowd = Vec::new();
    for name in 1..=16 {
        crowd.extend((name > 1).then(|| Client::connect(&lender.address, ROLE_MAIN, name)));
        crowd.extend((1..16).map(|_| Client::connect(&lender.address, ROLE_GET, name)));
    }
    crowd.iter_mut().for_each(Client::ping);
    assert_eq!(lender.handle.status().connections, 256);
    wait_for(&wanted);
    drop(lender);
    crowd.iter_mut().for_each(|client| assert!(client.is_closed()));
    wait_for(&[]);
}
