//! `sequential`: a stream that no cache can help, because it is longer than the memory.
//!
//! Its pages are evicted before they are read again. Lending them would cost the reader, and would drive out of the lender's memory what
//! is worth keeping, so the filter leaves them to the disk: with a lender and without must be as fast, and next to nothing be sent.

use crate::figures::Series;
use crate::worker::{Order, Workload};
use crate::world::{Side, World};
use serde_json::{Map, Value, json};
use testbed::Failure;

/// What the disk reads in a second: as a good network disk does.
const DISK_BYTES_PER_S: u64 = 300_000_000;
/// The file, in memories of the reader.
const FILE_CACHES: u64 = 2;
/// What the lender and its group have beyond the file.
const LENDER_ROOM_BYTES: u64 = 128 << 20;
const LENDER_RESERVE_BYTES: u64 = 32 << 20;
/// Wanted at least: with a lender over without.
const RATIO_WANTED: f64 = 0.98;

/// Runs it.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let cache_bytes: u64 = extent.choose(128 << 20, 128 << 20, 8 << 20);
    let (rounds, ms) = (extent.choose(5, 2, 1), extent.choose(6000, 3000, 300));
    let len_bytes = FILE_CACHES * cache_bytes;
    let lender = world.lend(len_bytes + LENDER_ROOM_BYTES, len_bytes, LENDER_RESERVE_BYTES)?;
    let with = world.mount("with", len_bytes, Some(lender.address), &[])?;
    let without = world.mount("without", len_bytes, None, &[])?;
    let filled_on = with.status()?["fill"].clone();
    world.disk.limit_read_bytes(Some(DISK_BYTES_PER_S))?;
    println!(
        "{} MiB of page cache, a file of {} MiB, a disk of {} MB/s, {rounds} rounds of {ms} ms each",
        cache_bytes >> 20,
        len_bytes >> 20,
        DISK_BYTES_PER_S / 1_000_000
    );

    let (mut speed, mut floor) = (Series::default(), Series::default());
    let (mut put_pages, mut read_pages, mut lent_pages) = (0, 0, 0);
    for round in 0..rounds {
        // In turns, and each as often first.
        let mut sides = [(&with, &mut speed, true), (&without, &mut floor, false)];
        sides.rotate_left(round % 2);
        for (side, series, has_lender) in sides {
            let figure = measure(world, side, cache_bytes, len_bytes, ms)?;
            series.add(figure.bytes_per_s / 1e6);
            if has_lender {
                put_pages += figure.put_pages;
                read_pages += figure.read_pages;
                lent_pages += figure.lent_pages;
            }
            let who = if has_lender { "with a lender   " } else { "without a lender" };
            println!(
                "round {}: {who} {:.1} MB/s, {} pages put of {} read",
                round + 1,
                figure.bytes_per_s / 1e6,
                figure.put_pages,
                figure.read_pages
            );
        }
    }
    let ratio = speed.median() / floor.median();
    let put_share = put_pages as f64 / read_pages.max(1) as f64;
    println!("with a lender    {} MB/s", speed.text(1));
    println!("without a lender {} MB/s", floor.text(1));
    println!(
        "ratio {ratio:.3} (at least {RATIO_WANTED} is wanted); {:.2} % of the pages read were put",
        put_share * 100.0
    );
    with.end()?;
    without.end()?;
    Ok(crate::members(json!({
        "ratio": ratio,
        "ratio_wanted": RATIO_WANTED,
        "put_share": put_share,
        "lent_share": lent_pages as f64 / read_pages.max(1) as f64,
        "with_mb_per_s": speed.json(),
        "without_mb_per_s": floor.json(),
        "paired_ratio": speed.over(&floor).json(),
        "rounds": speed.count(),
        "phase_ms": ms,
        "page_cache_bytes": cache_bytes,
        "file_bytes": len_bytes,
        "disk_bytes_per_s": DISK_BYTES_PER_S,
        "fill": filled_on,
    })))
}

/// One phase.
struct Phase {
    bytes_per_s: f64,
    put_pages: u64,
    read_pages: u64,
    lent_pages: u64,
}

/// A pass for the caches, then a measured phase.
fn measure(world: &World, side: &Side, cache_bytes: u64, len_bytes: u64, ms: u64) -> Result<Phase, Failure> {
    side.drop_cached()?;
    let mut worker = world.worker(cache_bytes)?;
    worker.obey(&Order::Pass { path: side.file.clone(), len_bytes })?;
    let counters = || Ok::<_, Failure>(["put_pages", "read_pages", "lender_pages"].map(|name| side.counter(name)));
    let before = counters()?;
    let order = Order::Use { path: side.file.clone(), len_bytes, workload: Workload::Sequential, ms, seed: world.seed };
    let report = worker.obey(&order)?;
    let mut grown = [0; 3];
    for ((grown, before), after) in grown.iter_mut().zip(before).zip(counters()?) {
        *grown = after?.saturating_sub(before?);
    }
    side.drop_cached()?;
    let [put_pages, read_pages, lent_pages] = grown;
    Ok(Phase { bytes_per_s: report.bytes as f64 / report.seconds, put_pages, read_pages, lent_pages })
}
