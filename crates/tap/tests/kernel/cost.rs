//! What the tap costs the kernel per evicted page, beside what an eviction costs without it. Run it
//! by `cargo test --release -p tap --test kernel -- --ignored --nocapture eviction_cost`.

use crate::setup::{KnownFile, skip, tap_on, turn};
use std::time::{Duration, Instant};
use tap::{BpfTap, EvictionSource, Target};

/// Repetitions; the fastest counts, since everything else that runs only adds.
const ROUNDS: u32 = 5;

fn ns_per_page(file: &KnownFile, large: bool, mut between: impl FnMut()) -> f64 {
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        if large {
            file.read();
        } else {
            file.read_page_by_page();
        }
        let begun = Instant::now();
        file.drop_cache();
        best = best.min(begun.elapsed());
        between();
    }
    best.as_nanos() as f64 / file.pages as f64
}

#[test]
#[ignore = "a measurement, not a check"]
fn eviction_cost() {
    const TEST: &str = "eviction_cost";
    const PAGES: u64 = 8 * 1024;
    let _turn = turn();
    let Some(file) = KnownFile::new(0x5eed_0008, PAGES, TEST) else { return };
    for (large, name) in [(false, "single pages"), (true, "large folios where the file system has them")] {
        let without = ns_per_page(&file, large, || ());
        let elsewhere = match BpfTap::load(Target::default(), BpfTap::RING_BYTES) {
            Ok(tap) => tap,
            Err(error) => return skip(TEST, error),
        };
        let other = ns_per_page(&file, large, || ());
        drop(elsewhere);
        let Some(mut tap) = tap_on(&file, 2 * BpfTap::RING_BYTES, TEST) else { return };
        let mut taken = 0;
        let mut spent = Duration::ZERO;
        let with = ns_per_page(&file, large, || {
            let begun = Instant::now();
            taken += tap.poll(Duration::ZERO, &mut |_| ()).unwrap();
            spent += begun.elapsed();
        });
        let consumer = spent.as_nanos() as f64 / taken.max(1) as f64;
        println!("{name}: without {without:.0} ns/page, tap on another device {other:.0}, captured {with:.0}");
        println!("    consumer {consumer:.0} ns/page, {:?}, {} large folios", tap.counters(), tap.large_folios());
        drop(tap);
        // With a consumer that is awake all the time, on another CPU, and one that sleeps until it
        // is woken.
        for (timeout, consumer) in [(Duration::ZERO, "spinning"), (Duration::from_millis(100), "sleeping")] {
            let Some(mut tap) = tap_on(&file, 2 * BpfTap::RING_BYTES, TEST) else { return };
            let stop = std::sync::atomic::AtomicBool::new(false);
            let with = std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        tap.poll(timeout, &mut |event| assert!(event.page.is_some())).unwrap();
                    }
                });
                let with = ns_per_page(&file, large, || ());
                stop.store(true, std::sync::atomic::Ordering::Relaxed);
                with
            });
            println!("    with a {consumer} consumer {with:.0} ns/page, {:?}", tap.counters());
        }
    }
    let begun = Instant::now();
    drop(BpfTap::load(Target::default(), BpfTap::RING_BYTES));
    println!("loading the tap, with calibration: {} µs", begun.elapsed().as_micros());
}
