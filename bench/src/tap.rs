//! `tap`: the cost of the eviction tap for evictions, and whether its ring is large enough.
//!
//! The cost: pages of a file on a mount are evicted at once, so many that the ring has room for
//! all, on a mount with a tap and on one without. The difference, per page, is the cost of the tap.
//! The losses: a process fills its memory with pages of a mount, at random, and then allocates all
//! of that memory at full speed, so that the kernel reclaims as fast as it can. Pages without room
//! in the ring are lost.

use crate::figures::Series;
use crate::worker::Order;
use crate::world::{Extent, Lender, Side, Worker, World, grown};
use page::PAGE_SIZE;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};
use testbed::Failure;

/// The maximum: additional nanoseconds of a page, and the share of lost pages.
const NS_WANTED: f64 = 1500.0;
const DROPS_WANTED: f64 = 0.01;
/// Bytes evicted at once for the cost: half the ring.
const EVICT_BYTES: u64 = 16 << 20;
/// The part of the group's page cache that stays for the file that is read during the allocation.
const HOT_BYTES: u64 = 4 << 20;
/// Memory of the lender and its group beyond the file.
const LENDER_ROOM_BYTES: u64 = 128 << 20;
const LENDER_RESERVE_BYTES: u64 = 32 << 20;
/// The maximum share of captured pages that are not copied nevertheless: if the disk was quicker
/// than the lender, which still has the page.
const OMITTED_SHARE_MAX: f64 = 0.05;
/// The minimum share of evicted pages: some pages stay, because the kernel uses them just then
/// (DAMON, or another reclaim).
const EVICTED_SHARE_MIN: f64 = 0.95;
/// If nothing more was counted for so long, everything is: several times the daemon's wait for an
/// event. And the pause between two checks.
const SETTLED_AFTER: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let (rounds, times) = (extent.choose(5, 3, 1), extent.choose(15, 7, 2));
    let evict_bytes = extent.choose(EVICT_BYTES, EVICT_BYTES, 1 << 20);
    let mut worker = Worker::start(&world.interrupt, &[])?;
    let (mut with, mut without) = (Series::default(), Series::default());
    println!("{} MiB evicted at once, {times} times in each of {rounds} rounds", evict_bytes >> 20);
    let lender = world.lend(evict_bytes + LENDER_ROOM_BYTES, evict_bytes, LENDER_RESERVE_BYTES)?;
    for round in 0..rounds {
        let mut kinds = [("evict", &mut with), ("read", &mut without)];
        kinds.rotate_left(round % 2);
        for (fill, series) in kinds {
            // A tap sees the evictions of the whole machine, and skips those of others; so there is
            // no tap if none is to be measured.
            let side = mount(world, "evicted", evict_bytes, &lender, fill)?;
            let order = Order::Evict { path: side.file.clone(), len_bytes: evict_bytes, times };
            series.add(worker.obey(&order)?.p50_ns as f64);
            let wanted = if fill == "evict" { times as u64 * evict_bytes / PAGE_SIZE as u64 } else { 0 };
            let Taken { captured, lost, omitted } = settled(&side, wanted)?;
            // A page without room in the ring costs little, which is not the subject here.
            if !was_evicted(captured, wanted) || captured > wanted || lost > 0 {
                let message = format!("the tap captured {captured} pages of {wanted} and had no room for {lost}");
                return Err(Failure::Problem(message));
            }
            check_omitted(extent, omitted, captured)?;
            side.end()?;
        }
    }
    drop((worker, lender));
    let (added, drops) = (with.minus(&without), drops(world)?);
    println!("evicting a page: {} ns with the tap, {} ns without", with.text(0), without.text(0));
    println!("added: {} ns a page (at most {NS_WANTED} are wanted)", added.text(0));
    println!(
        "at full speed of reclaim, {} pages/s: {} of them lost (at most {DROPS_WANTED} is wanted)",
        drops.speed.text(0),
        drops.fraction.text(4)
    );
    Ok(crate::members(json!({
        "ns_per_page": added.median(),
        "drop_fraction": drops.fraction.median(),
        "ns_per_page_wanted": NS_WANTED,
        "drop_fraction_wanted": DROPS_WANTED,
        "with_ns": with.json(),
        "without_ns": without.json(),
        "drop_fractions": drops.fraction.json(),
        "reclaimed_pages_per_s": drops.speed.median(),
        "rounds": rounds,
    })))
}

/// Every evicted page must be copied, also in a stream, and although the disk is quick: the
/// borrower asks for a lender's pages, and the lender gives them away.
fn mount(world: &World, name: &str, len_bytes: u64, lender: &Lender, fill: &str) -> Result<Side, Failure> {
    let options = ["--fill", fill, "--filter", "off", "--gate", "off", "--strategy", "exclusive"];
    world.mount(name, len_bytes, Some(lender.address), &options)
}

struct Drops {
    fraction: Series,
    speed: Series,
}

/// Fills a group's memory through a mount, and reclaims it at full speed.
fn drops(world: &World) -> Result<Drops, Failure> {
    let extent = world.extent;
    let cache_bytes: u64 = extent.choose(512 << 20, 128 << 20, 24 << 20);
    let rounds = extent.choose(5, 3, 1);
    let lender = world.lend(cache_bytes + LENDER_ROOM_BYTES, cache_bytes, LENDER_RESERVE_BYTES)?;
    let side = mount(world, "reclaimed", cache_bytes, &lender, "evict")?;
    let hot = world.file("hot", HOT_BYTES)?;
    let mut drops = Drops { fraction: Series::default(), speed: Series::default() };
    for round in 0..rounds {
        side.drop_cached()?;
        let mut worker = world.worker(cache_bytes)?;
        let seed = world.seed.wrapping_add(round as u64);
        let (path, len_bytes) = (side.file.clone(), cache_bytes);
        worker.obey(&Order::Once { path, len_bytes, block_bytes: PAGE_SIZE, threads: 8, seed })?;
        let before = taken(&side)?;
        let order = Order::Allocate { bytes: cache_bytes - 2 * HOT_BYTES, hot: hot.clone() };
        let report = worker.obey(&order)?;
        let after = settled(&side, u64::MAX)?;
        let captured = grown(before.captured, after.captured)?;
        let lost = grown(before.lost, after.lost)?;
        check_omitted(extent, grown(before.omitted, after.omitted)?, captured)?;
        if captured + lost < cache_bytes / PAGE_SIZE as u64 / 2 {
            let message = format!("only {} pages were reclaimed", captured + lost);
            return Err(Failure::Problem(message));
        }
        drops.fraction.add(lost as f64 / (captured + lost) as f64);
        drops.speed.add((captured + lost) as f64 / report.seconds);
    }
    side.end()?;
    Ok(drops)
}

/// Pages so far.
#[derive(Clone, Copy, PartialEq)]
struct Taken {
    /// Pages that the tap has captured.
    captured: u64,
    /// Pages without room in the ring.
    lost: u64,
    /// Captured pages that were not copied, because they would not be sent.
    omitted: u64,
}

/// The figures are those of copied pages, unless they are meaningless anyway.
fn check_omitted(extent: Extent, omitted: u64, captured: u64) -> Result<(), Failure> {
    if extent == Extent::Tiny || omitted as f64 <= OMITTED_SHARE_MAX * captured as f64 {
        return Ok(());
    }
    Err(Failure::Problem(format!("of {captured} pages that the tap captured {omitted} were not copied")))
}

/// Whether the pages were evicted.
pub fn was_evicted(captured: u64, wanted: u64) -> bool {
    captured as f64 >= EVICTED_SHARE_MIN * wanted as f64
}

/// The counts when the daemon has counted so many, or no more for a while: it updates its counters
/// from time to time.
fn settled(side: &Side, wanted: u64) -> Result<Taken, Failure> {
    let mut last = taken(side)?;
    let mut since = Instant::now();
    while last.captured < wanted && since.elapsed() < SETTLED_AFTER {
        std::thread::sleep(LOOK_EVERY);
        let now = taken(side)?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(last)
}

fn taken(side: &Side) -> Result<Taken, Failure> {
    let tap = side.status()?.tap.unwrap_or_default();
    Ok(Taken { captured: tap.captured_pages, lost: tap.ring_full_pages, omitted: tap.skipped_pages })
}
