//! `bypass`: a stream larger than the memory, through the mount against the directory below, from a disk at its own speed. No cache helps, and
//! a lender is there that the filter leaves alone; so there is nothing to gain, and what the mount costs shows.

use crate::figures::Series;
use crate::worker::Order;
use crate::world::{World, drop_cached};
use serde_json::{Map, Value, json};
use testbed::Failure;

/// The file, in memories of the reader.
const FILE_CACHES: u64 = 4;
/// What the lender and its group have beyond the file.
const LENDER_ROOM_BYTES: u64 = 128 << 20;
const LENDER_RESERVE_BYTES: u64 = 32 << 20;
/// Wanted at least: through the mount over below.
const RATIO_WANTED: f64 = 0.95;

/// Runs it.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let cache_bytes: u64 = extent.choose(256 << 20, 128 << 20, 8 << 20);
    let rounds = extent.choose(11, 5, 1);
    let len_bytes = FILE_CACHES * cache_bytes;
    let lender = world.lend(len_bytes + LENDER_ROOM_BYTES, len_bytes, LENDER_RESERVE_BYTES)?;
    let side = world.mount("mounted", len_bytes, Some(lender.address), &[])?;
    println!(
        "{} MiB of page cache, a file of {} MiB from end to end; {rounds} rounds",
        cache_bytes >> 20,
        len_bytes >> 20
    );
    let (mut mounted, mut below) = (Series::default(), Series::default());
    let put_before = side.counter("put_pages")?;
    for round in 0..rounds {
        let mut sides = [(&side.file, &mut mounted), (&side.below, &mut below)];
        sides.rotate_left(round % 2);
        for (path, series) in sides {
            side.drop_cached()?;
            drop_cached(path)?;
            let mut worker = world.worker(cache_bytes)?;
            let report = worker.obey(&Order::Pass { path: path.clone(), len_bytes })?;
            series.add(report.bytes as f64 / report.seconds / 1e6);
        }
    }
    let put_pages = side.counter("put_pages")? - put_before;
    let ratio = mounted.over(&below);
    println!("through the mount {} MB/s, below {} MB/s", mounted.text(0), below.text(0));
    println!("ratio {} (at least {RATIO_WANTED} is wanted); {put_pages} pages were put", ratio.text(3));
    side.end()?;
    Ok(crate::members(json!({
        "ratio": ratio.median(),
        "ratio_wanted": RATIO_WANTED,
        "ratio_rounds": ratio.json(),
        "mounted_mb_per_s": mounted.median(),
        "below_mb_per_s": below.median(),
        "put_pages": put_pages,
        "rounds": rounds,
        "page_cache_bytes": cache_bytes,
        "file_bytes": len_bytes,
    })))
}
