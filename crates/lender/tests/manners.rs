//! Greedy borrowers and their neighbours: fair shares of the store, and of the lender's rate.

mod client;

use client::{Client, Lender, config, key};
use lender::{Config, Limits};
use page::PAGE_SIZE;
use report::LentTo;
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use wire::{ROLE_GET, ROLE_MAIN, STATUS_PAGE};

fn seed() -> u64 {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    seed
}

fn borrower(lender: &Lender, name: &str) -> LentTo {
    let status = lender.handle.status();
    status.borrower_list.iter().find(|borrower| borrower.name == name).unwrap().clone()
}

/// Sets the flag that ends the other threads, also when the test fails.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_greedy_borrower_takes_nothing_of_a_fair_share() {
    const CAPACITY_PAGES: u64 = 2000;
    const GREEDY_FRAME_PAGES: u32 = 256;
    let mut random = fastrand::Rng::with_seed(seed());
    let lender = Lender::tcp(CAPACITY_PAGES);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending(&over);
        let mut greedy = Client::connect(&lender.address, ROLE_MAIN, 1);
        let mut order = random.fork();
        let over = &over;
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                let first = order.u32(..1 << 30);
                let keys: Vec<_> = (first..first + GREEDY_FRAME_PAGES).map(|index| key(index, 1)).collect();
                greedy.put(&keys);
            }
        });
        lender.wait_for("the greedy one to have all", |status| {
            status.stored_pages == CAPACITY_PAGES && status.replaced > CAPACITY_PAGES
        });
        // A new borrower gets the room that it needs, as long as that is less than half, and keeps
        // it.
        let mut main = Client::connect(&lender.address, ROLE_MAIN, 2);
        let mut get = Client::connect(&lender.address, ROLE_GET, 2);
        let mut keys: Vec<_> = (0..CAPACITY_PAGES as u32 * 2 / 5).map(|index| key(index, 1)).collect();
        random.shuffle(&mut keys);
        for some in keys.chunks(16) {
            assert_eq!(main.put(some), some.len());
        }
        for _ in 0..3 {
            let before = borrower(&lender, "01010101").replaced;
            lender.wait_for("the greedy one to go round", |status| {
                status.borrower_list[0].replaced > before + 2 * CAPACITY_PAGES
            });
            random.shuffle(&mut keys);
            assert_eq!(get.hits(&keys), keys.len());
        }
        let modest = borrower(&lender, "02020202");
        assert_eq!((modest.replaced, modest.stored_pages), (0, keys.len() as u64));
        main.ping();
        assert!(main.lost.is_empty());
        // Beyond half of the store, without the pages that are just being received, it replaces its
        // own pages.
        let more: Vec<_> = (0..CAPACITY_PAGES as u32).map(|index| key(1_000_000 + index, 1)).collect();
        main.put(&more);
        let modest = borrower(&lender, "02020202");
        let half = (CAPACITY_PAGES - u64::from(GREEDY_FRAME_PAGES)) / 2;
        assert!(modest.stored_pages >= half && modest.replaced > 0, "{modest:?}");
    });
}

#[test]
fn a_rate_is_kept_and_shared() {
    /// So low that a borrower wants more also on a busy machine.
    const RATE: u64 = 8 << 20;
    const FRAME_PAGES: u32 = 128;
    const FRAME_BYTES: u64 = FRAME_PAGES as u64 * PAGE_SIZE as u64;
    const GREEDY: [u8; 3] = [1, 3, 4];
    const GETS: u64 = 40;
    let limits = Limits { rate_bytes: NonZeroU64::new(RATE), cpu_percent: None };
    let lender = Lender::start(Config { limits, ..config("127.0.0.1:0", 10_000) });
    let begun = Instant::now();
    let over = AtomicBool::new(false);
    let mut random = fastrand::Rng::with_seed(seed());
    let greedy_bytes: u64 = std::thread::scope(|scope| {
        let ending = Ending(&over);
        let over = &over;
        let puts = GREEDY.map(|name| {
            let mut greedy = Client::connect(&lender.address, ROLE_MAIN, name);
            scope.spawn(move || {
                let keys: Vec<_> = (0..FRAME_PAGES).map(|index| key(index, 1)).collect();
                let mut frames = 0;
                while !over.load(Ordering::Relaxed) {
                    greedy.put(&keys);
                    frames += 1;
                }
                frames * FRAME_BYTES
            })
        });
        let mut main = Client::connect(&lender.address, ROLE_MAIN, 2);
        let mut get = Client::connect(&lender.address, ROLE_GET, 2);
        let keys: Vec<_> = (0..200).map(|index| key(index, 1)).collect();
        for some in keys.chunks(10) {
            assert_eq!(main.put(some), some.len());
        }
        lender.wait_for("the greedy ones to wait", |status| {
            let greedy = status.borrower_list.iter().filter(|borrower| borrower.name != "02020202");
            greedy.map(|borrower| borrower.rate_limited_ms).min() > Some(1000)
        });
        // A page is 0.5 ms of the rate, four times that as it is shared; the debts of the greedy
        // ones are three frames, of 62 ms each. If the modest one had to wait for these, they would
        // put some frames in the time of each page.
        let greedy_frames = || {
            let status = lender.handle.status();
            (status.puts - borrower(&lender, "02020202").puts) / u64::from(FRAME_PAGES)
        };
        let before = greedy_frames();
        for _ in 0..GETS {
            assert_eq!(get.get(&[keys[random.usize(..keys.len())]], 0), [STATUS_PAGE]);
        }
        let frames = greedy_frames() - before;
        println!("{frames} frames of the greedy ones, {GETS} gets of the modest one");
        assert!(frames < GETS, "{frames} frames of the greedy ones in the time of {GETS} gets");
        assert_eq!(borrower(&lender, "02020202").rate_limited_misses, 0);
        drop(ending);
        puts.map(|putting| putting.join().unwrap()).into_iter().sum()
    });
    let most = RATE as f64 * (begun.elapsed().as_secs_f64() + 0.1);
    let most = most as u64 + (GREEDY.len() as u64 + 1) * FRAME_BYTES;
    println!("{greedy_bytes} bytes of at most {most}");
    assert!(greedy_bytes <= most, "{greedy_bytes} bytes, {most} were allowed");
    let status = lender.handle.status();
    assert_eq!((status.rate_bytes, status.cpu_ms), (Some(RATE), None));
    assert!(status.rate_limited_ms >= 1000);
}

/// If a borrower requests so much at once that waiting does not help, it gets misses, within the
/// time limit of a borrower. And stopping waits for no borrower.
#[test]
fn gets_of_a_session_far_behind_are_misses() {
    let limits = Limits { rate_bytes: NonZeroU64::new(lender::RATE_MIN_BYTES), cpu_percent: NonZeroU32::new(100) };
    let lender = Lender::start(Config { limits, ..config("127.0.0.1:0", 10_000) });
    let mut main = Client::connect(&lender.address, ROLE_MAIN, 1);
    let keys: Vec<_> = (0..256).map(|index| key(index, 1)).collect();
    assert_eq!(main.put(&keys), keys.len());
    let mut gets: Vec<_> = (0..8).map(|_| Client::connect(&lender.address, ROLE_GET, 1)).collect();
    std::thread::scope(|scope| {
        for get in &mut gets {
            scope.spawn(|| (0..4).for_each(|_| drop(get.get(&keys, 0))));
        }
    });
    let status = lender.handle.status();
    let borrower = &status.borrower_list[0];
    assert!(borrower.rate_limited_misses > 0 && borrower.rate_limited_misses.is_multiple_of(256), "{borrower:?}");
    assert_eq!(
        (status.rate_limited_misses, status.rate_limited_ms),
        (borrower.rate_limited_misses, borrower.rate_limited_ms)
    );
    assert!(status.cpu_ms.is_some() && status.cpu_ms >= borrower.cpu_ms);
    // Pages that were not sent are not stored.
    assert_eq!(status.stored_pages, 0);
    assert_eq!(main.put(&keys), keys.len());
    main.bye();
}
