//! `sequential`: a file that is longer than the memory, and read from end to end.
//!
//! Its pages are evicted before they are read again. If a lender has room for a part of it only,
//! none of them would still be there. Lending them would cost the reader, and would displace useful
//! pages of the lender. So the filter leaves them to the disk: the speed with such a lender and
//! without any must be the same, and nearly nothing may be sent. For comparison there is a lender
//! with room for all of it.

use crate::figures::Series;
use crate::worker::{Order, Workload};
use crate::world::{Side, World, grown};
use serde_json::{Map, Value, json};
use testbed::Failure;

/// Bytes of the disk in a second, like those of a good network disk.
const DISK_BYTES_PER_S: u64 = 300_000_000;
/// The file's size, in memories of the reader.
const FILE_CACHES: u64 = 2;
/// The lender with little room has room for a quarter of the file. The one with room for all has as
/// much beyond it: also when the page cache is dropped, and holds none of it.
const LENDER_PART: u64 = 4;
/// Memory of a lender's group beyond the lent memory.
const LENDER_ROOM_BYTES: u64 = 128 << 20;
const LENDER_RESERVE_BYTES: u64 = 32 << 20;
/// The minimum: with a lender over without.
const RATIO_WANTED: f64 = 0.98;

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let cache_bytes: u64 = extent.choose(128 << 20, 128 << 20, 8 << 20);
    let (rounds, ms) = (extent.choose(5, 2, 1), extent.choose(6000, 3000, 300));
    let len_bytes = FILE_CACHES * cache_bytes;
    let lend = |bytes: u64| world.lend(bytes + LENDER_ROOM_BYTES, bytes, LENDER_RESERVE_BYTES);
    let (lender, roomy_lender) = (lend(len_bytes / LENDER_PART)?, lend(len_bytes + len_bytes / LENDER_PART)?);
    let with = world.mount("with", len_bytes, Some(lender.address), &[])?;
    let roomy = world.mount("with room for all", len_bytes, Some(roomy_lender.address), &[])?;
    let without = world.mount("without", len_bytes, None, &[])?;
    let filled_on = with.status()?.fill;
    world.disk.limit_read_bytes(Some(DISK_BYTES_PER_S))?;
    println!(
        "{} MiB of page cache, a file of {} MiB, a disk of {} MB/s, {rounds} rounds of {ms} ms each",
        cache_bytes >> 20,
        len_bytes >> 20,
        DISK_BYTES_PER_S / 1_000_000
    );

    let [mut speed, mut roomy_speed, mut floor] = <[Series; 3]>::default();
    let [mut pages, mut roomy_pages, mut no_pages] = <[Pages; 3]>::default();
    for round in 0..rounds {
        // By turns, and each equally often first.
        let mut sides = [
            (&with, &mut speed, &mut pages, "a lender with little room  "),
            (&roomy, &mut roomy_speed, &mut roomy_pages, "a lender with room for all "),
            (&without, &mut floor, &mut no_pages, "no lender                  "),
        ];
        sides.rotate_left(round % 3);
        for (side, series, sum, who) in sides {
            let (bytes_per_s, pages) = measure(world, side, cache_bytes, len_bytes, ms)?;
            let status = side.status()?;
            let streams = status.streams;
            series.add(bytes_per_s / 1e6);
            sum.add(&pages);
            let Pages { put, read, lent } = pages;
            println!(
                "round {}: {who} {:.1} MB/s, {read} pages read, {lent} lent, {put} put; streams: {streams}",
                round + 1,
                bytes_per_s / 1e6
            );
        }
    }
    let ratio = speed.median() / floor.median();
    println!("a lender with little room  {} MB/s", speed.text(1));
    println!("a lender with room for all {} MB/s", roomy_speed.text(1));
    println!("no lender                  {} MB/s", floor.text(1));
    println!(
        "ratio {ratio:.3} (at least {RATIO_WANTED} is wanted); {:.2} % of the pages read were put",
        pages.put_share() * 100.0
    );
    for side in [with, roomy, without] {
        side.end()?;
    }
    Ok(crate::members(json!({
        "ratio": ratio,
        "ratio_wanted": RATIO_WANTED,
        "put_share": pages.put_share(),
        "roomy_ratio": roomy_speed.median() / floor.median(),
        "roomy_put_share": roomy_pages.put_share(),
        "with_mb_per_s": speed.json(),
        "roomy_mb_per_s": roomy_speed.json(),
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

/// Pages that were sent to the lender, read, and answered by the lender.
#[derive(Default)]
struct Pages {
    put: u64,
    read: u64,
    lent: u64,
}

impl Pages {
    fn add(&mut self, more: &Pages) {
        self.put += more.put;
        self.read += more.read;
        self.lent += more.lent;
    }

    fn put_share(&self) -> f64 {
        self.put as f64 / self.read.max(1) as f64
    }
}

/// A pass for the caches, then a measured phase: bytes in a second.
fn measure(world: &World, side: &Side, cache_bytes: u64, len_bytes: u64, ms: u64) -> Result<(f64, Pages), Failure> {
    side.drop_cached()?;
    let mut worker = world.worker(cache_bytes)?;
    worker.obey(&Order::Pass { path: side.file.clone(), len_bytes })?;
    let counters = || {
        let counted = side.status()?.borrower;
        Ok::<_, Failure>([counted.put_pages, counted.read_pages, counted.lender_pages])
    };
    let before = counters()?;
    let order = Order::Use { path: side.file.clone(), len_bytes, workload: Workload::Sequential, ms, seed: world.seed };
    let report = worker.obey(&order)?;
    let mut more = [0; 3];
    for ((more, before), after) in more.iter_mut().zip(before).zip(counters()?) {
        *more = grown(before, after)?;
    }
    side.check_lender()?;
    side.drop_cached()?;
    let [put, read, lent] = more;
    Ok((report.bytes as f64 / report.seconds, Pages { put, read, lent }))
}
