//! Several lenders under one mount: pages are spread over them, and what happens to one costs
//! nothing of the others.

mod setup;

use report::{Link, LinkState};
use rustix::process::{Pid, Signal, kill_process};
use setup::{Lender, Mount, PATIENCE, can_run, evict, is_balanced, kill, unless_stalled, write_pages};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use testbed::{Group, Relay, Scratch, SlowDisk, wait_until};

/// 32 MiB: enough placement extents for each lender to have some.
const PAGES: u64 = 8192;

/// Pages that may be on their way to a lender: its share of the put buffers.
const UNDER_WAY_PAGES: u64 = 32 * 64 / 2;

/// Reads per second of a disk that is slower than any lender here.
const READS_PER_S: u32 = 200;

/// The mount's status of the lender at this address.
fn lender_of(status: &report::Mount, address: &str) -> Link {
    status.lenders.iter().find(|lender| lender.address == address).cloned().unwrap_or_default()
}

fn state(mount: &Mount, address: &str) -> LinkState {
    lender_of(&mount.status(), address).state
}

/// Reads every page once, in an order that is no stream. Returns what differs from `bytes`.
fn read_at_random(file: &File, bytes: &[u8], seed: u64) -> Option<u64> {
    let mut order: Vec<u64> = (0..PAGES).collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut order);
    let mut page = [0; 4096];
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random).unwrap();
    order.into_iter().find(|index| {
        file.read_exact_at(&mut page, index * 4096).unwrap();
        page != bytes[*index as usize * 4096..][..4096]
    })
}

/// A mount that fills on read, so that everything is lent once it was read, and stays there.
struct Pool {
    bytes: Vec<u8>,
    file: std::path::PathBuf,
    mount: Mount,
    lenders: Vec<Lender>,
    _scratch: Scratch,
}

impl Pool {
    fn start(test: &str, lenders: Vec<Lender>, addresses: &[String], options: &[&str]) -> Pool {
        Pool::start_in(Scratch::new(test).unwrap(), lenders, addresses, options, &[])
    }

    /// Mounts a directory of `scratch`, by a daemon in these groups.
    fn start_in(
        scratch: Scratch,
        lenders: Vec<Lender>,
        addresses: &[String],
        options: &[&str],
        groups: &[&Group],
    ) -> Pool {
        let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
        let bytes = write_pages(&source.join("file"), PAGES as usize, 3);
        if !groups.is_empty() {
            // The disk of these groups is to be read.
            File::open(source.join("file")).unwrap().sync_all().unwrap();
            evict(&source.join("file"));
        }
        let mut arguments: Vec<&str> = addresses.iter().flat_map(|address| ["--lender", address]).collect();
        arguments.extend(["--fill", "read"]);
        arguments.extend(options);
        let mount = Mount::start_in(&source, &at, &arguments, groups);
        mount.wait_for("all lenders", |status| {
            addresses.iter().all(|address| lender_of(status, address).state == LinkState::Used)
        });
        Pool { file: at.join("file"), bytes, mount, lenders, _scratch: scratch }
    }

    /// Has everything read until it is lent, to lenders of similar weights.
    fn lend(&self) {
        self.mount.wait_for("similar weights", is_balanced);
        let is_lent = || {
            evict(&self.file);
            assert!(fs::read(&self.file).unwrap() == self.bytes);
            self.mount.wait_for("the puts", |status| status.puts_under_way == 0);
            // A page that found no put buffer is lent at the next read.
            self.mount.status().catalog.live_pages == PAGES
        };
        assert!(wait_until(PATIENCE, is_lent), "{}", self.mount.status());
        evict(&self.file);
    }

    /// Reads everything anew; returns how many pages came from the backing directory, but for those
    /// that it won a race for: on a busy machine a lender may be late.
    fn misses(&self, seed: u64) -> u64 {
        evict(&self.file);
        let missed = || {
            let status = self.mount.status();
            let of = &status.borrower;
            of.backing_pages - of.hedges_won
        };
        let before = missed();
        assert_eq!(read_at_random(&File::open(&self.file).unwrap(), &self.bytes, seed), None, "a wrong byte");
        missed() - before
    }

    /// Reads everything anew, and checks that at most `max` pages come from the backing directory,
    /// as [`Pool::misses`] counts them. Returns `None` if there are more, because the machine
    /// stalled the mount or one of these lenders, which have all pages.
    fn misses_at_most(&self, max: u64, seed: u64, lenders: &[Lender]) -> Option<()> {
        let stalls = setup::stalls();
        stalls.add(self.mount.daemon_pid());
        lenders.iter().for_each(|lender| stalls.add(lender.process.pid()));
        let failures = self.mount.count(|of| of.get_failures);
        let missed = self.misses(seed);
        if missed > max {
            setup::all_answered(self.mount.count(|of| of.get_failures) - failures, &stalls)?;
            panic!("{missed} pages were missed, and no get failed: {}", self.mount.status());
        }
        Some(())
    }
}

fn tcp_lender() -> Lender {
    Lender::listen("127.0.0.1:0", "64MiB", &[])
}

#[test]
fn pages_are_spread_and_a_lender_takes_only_its_own_with_it() {
    let test = "pages_are_spread_and_a_lender_takes_only_its_own_with_it";
    if can_run(test) {
        unless_stalled(|_| spread_and_lose_lenders(test));
    }
}

/// An attempt of [`pages_are_spread_and_a_lender_takes_only_its_own_with_it`]. Returns `None` if a
/// stall of the machine explains what is missed.
fn spread_and_lose_lenders(test: &str) -> Option<()> {
    let lenders: Vec<_> = (0..4).map(|_| tcp_lender()).collect();
    let addresses: Vec<_> = lenders.iter().map(|lender| lender.address.clone()).collect();
    // Hedges on, as users have it: they are what keeps a lender that is stopped from being waited
    // for.
    let pool = Pool::start(test, lenders, &addresses, &["--hedge", "on"]);
    let shares = || pool.lenders.iter().map(|lender| lender.count(|of| of.stored_pages)).collect::<Vec<_>>();
    let is_spread = || {
        pool.lend();
        // A page that was put at another lender is dropped at the old one a little later.
        assert!(wait_until(PATIENCE, || shares().iter().sum::<u64>() == PAGES), "{:?}", shares());
        println!("shares {:?}", shares());
        // Not equal: they weigh by their latency, too, which this machine's other work moves.
        let is_spread = shares().iter().all(|share| (PAGES / 64..PAGES * 3 / 4).contains(share));
        // One that answered late just then may have got nothing; what is written anew is lent anew.
        if !is_spread {
            fs::write(&pool.file, &pool.bytes).unwrap();
        }
        is_spread
    };
    assert!(wait_until(PATIENCE, is_spread), "{:?}", shares());
    let shares = shares();
    pool.misses_at_most(0, 1, &pool.lenders)?;

    // One dies, another is stopped: their pages are missed, and nothing else is.
    kill(pool.lenders[0].process.pid());
    pool.mount.wait_for("the death", |status| lender_of(status, &addresses[0]).state != LinkState::Used);
    let missed = pool.misses(2);
    assert!(missed >= shares[0], "{missed}");
    let stopped = Pid::from_raw(pool.lenders[1].process.pid() as i32).unwrap();
    kill_process(stopped, Signal::STOP).unwrap();
    let failures = pool.mount.count(|of| of.get_failures);
    let missed = pool.misses(3);
    println!("{missed} missed after one died and one was stopped");
    // Until the one that is stopped is given up, each reader waits for it once at the most.
    assert!(pool.mount.count(|of| of.get_failures) <= failures + 8);
    let hits = [2, 3].map(|at| lender_of(&pool.mount.status(), &addresses[at]).get_pages);
    assert!(hits.iter().all(|hits| *hits >= PAGES / 64), "the others are asked: {hits:?}");
    // Missed pages are lent again, to the lenders that are there.
    pool.mount.wait_for("everything lent again", |status| status.puts_under_way == 0);
    pool.mount.wait_for("the stop", |status| lender_of(status, &addresses[1]).state != LinkState::Used);
    // Not all at once: what finds no put buffer is not lent.
    let mut seed = 100;
    let lent_again = wait_until(PATIENCE, || {
        seed += 1;
        pool.misses(seed) <= shares[1]
    });
    assert!(lent_again, "more is missed than what the one that is away has");
    kill_process(stopped, Signal::CONT).unwrap();
    pool.mount.wait_for("its return", |status| lender_of(status, &addresses[1]).state == LinkState::Used);
    // Its pages are still there, except those that were on their way to it when it was given up.
    pool.misses_at_most(UNDER_WAY_PAGES, 6, &pool.lenders[1..])
}

#[test]
fn a_lender_behind_a_slow_network_is_left_alone_until_that_ends() {
    let test = "a_lender_behind_a_slow_network_is_left_alone_until_that_ends";
    if !can_run(test) {
        return;
    }
    // On a fast disk the gate may stay closed, because a lender is no faster.
    let scratch = Scratch::new_in(Path::new("/var/tmp"), test).unwrap();
    let slow = SlowDisk::create(test, scratch.path()).and_then(|disk| {
        disk.limit_reads(Some(READS_PER_S))?;
        Group::create(test, None, Some(&disk)).map(|group| (disk, group))
    });
    let (_disk, group) = match slow {
        Ok(slow) => slow,
        Err(error) => return testbed::skip(test, error),
    };
    let lenders: Vec<_> = (0..2).map(|_| tcp_lender()).collect();
    let relay = Relay::start(lenders[0].address.parse().unwrap()).unwrap();
    let addresses = [relay.address().to_string(), lenders[1].address.clone()];
    // Thresholds that a loopback does not reach by itself on a busy machine; the long average,
    // which falls for minutes, is to decide nothing.
    let thresholds = ["--gate", "on", "--gate-short", "40000,30000", "--gate-long", "500000,400000"];
    let pool = Pool::start_in(scratch, lenders, &addresses, &thresholds, &[&group]);
    // The averages begin with what is usual.
    pool.mount.wait_for("some pings", |status| (1..30_000).contains(&lender_of(status, &addresses[0]).ping_short_us));
    relay.delay(Duration::from_millis(100));
    pool.mount.wait_for("the gate to close", |status| lender_of(status, &addresses[0]).state == LinkState::Bypassed);
    let reason = lender_of(&pool.mount.status(), &addresses[0]).reason;
    assert!(reason.contains("latency") || reason.contains("faster"), "{reason}");
    assert!(fs::read(&pool.file).unwrap() == pool.bytes);
    let got = |pool: &Pool| lender_of(&pool.mount.status(), &addresses[0]).get_pages;
    let before = got(&pool);
    pool.misses(1);
    assert_eq!(got(&pool), before, "it is not asked");
    relay.delay(Duration::ZERO);
    let is_used = || state(&pool.mount, &addresses[0]) == LinkState::Used;
    assert!(
        wait_until(PATIENCE * 2, is_used),
        "waited in vain for the gate to open: {:?}",
        pool.mount.status().lenders
    );
}

#[test]
fn a_name_is_looked_up() {
    let test = "a_name_is_looked_up";
    if !can_run(test) {
        return;
    }
    let lender = Lender::with("127.0.0.1:0", &["--capacity", "64MiB", "--rate", "1GiB", "--cpu", "400"], &[]);
    let port = lender.address.rsplit(':').next().unwrap();
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), 1000, 4);
    let name = format!("localhost:{port}");
    let options = ["--lender", &name, "--lender", &lender.address, "--fill", "read"];
    let mount = Mount::start(&source, &at, &options);
    mount.wait_for("the lender", |status| lender_of(status, &lender.address).state == LinkState::Used);
    // Named twice, it is there once; the other address of the name, if it has one, is nobody's.
    let is_number = |lender: &Link| !lender.address.contains("localhost");
    mount.wait_for("the name", |status| {
        let lenders = &status.lenders;
        lenders.iter().all(is_number) && lenders.iter().filter(|lender| lender.state == LinkState::Used).count() == 1
    });
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    mount.wait_for("everything lent", |status| status.catalog.live_pages == 1000 && status.puts_under_way == 0);
    let status = lender.status();
    assert!(status.lender.borrower_list[0].cpu_ms.is_some(), "{status}");
    let shown = setup::pumapool(&["status"]);
    let shown = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.contains("1.0 GiB/s, 400 % of a processor: used "), "{shown}");
    let refused = setup::pumapool(&["lend", "--listen", "unix:/nonexistent/socket", "--rate", "4194303"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("write at least 4.0 MiB a second"));
}
