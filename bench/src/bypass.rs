//! `bypass`: a stream larger than the memory, through the mount against the backing directory, from
//! a disk at its own speed. No cache helps, and there is a lender that the filter does not use; so
//! there is nothing to gain, and the cost of the mount shows. The first two passes go through the
//! daemon, which cannot know yet that more will follow: they are part of the ratio, and shown
//! separately.

use crate::figures::Series;
use crate::worker::Order;
use crate::world::{Side, World, drop_cached, grown};
use serde_json::{Map, Value, json};
use testbed::Failure;

/// The file's size, in memories of the reader.
const FILE_CACHES: u64 = 4;
/// Memory of the lender and its group beyond the file.
const LENDER_ROOM_BYTES: u64 = 128 << 20;
const LENDER_RESERVE_BYTES: u64 = 32 << 20;
/// The minimum ratio: through the mount over the backing directory.
const RATIO_WANTED: f64 = 0.95;

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let cache_bytes: u64 = extent.choose(256 << 20, 128 << 20, 8 << 20);
    let rounds = extent.choose(11, 11, 1);
    let len_bytes = FILE_CACHES * cache_bytes;
    let lender = world.lend(len_bytes + LENDER_ROOM_BYTES, len_bytes, LENDER_RESERVE_BYTES)?;
    let side = world.mount("mounted", len_bytes, Some(lender.address), &[])?;
    println!(
        "{} MiB of page cache, a file of {} MiB from end to end; {rounds} rounds",
        cache_bytes >> 20,
        len_bytes >> 20
    );
    let (mut mounted, mut backing) = (Series::default(), Series::default());
    let mut is_passed = Vec::new();
    let put_before = side.counter(|of| of.put_pages)?;
    for round in 0..rounds {
        let mut sides = [(&side.file, &mut mounted, true), (&side.backing, &mut backing, false)];
        sides.rotate_left(round % 2);
        for (path, series, is_mounted) in sides {
            side.drop_cached()?;
            drop_cached(path)?;
            let mut worker = world.worker(cache_bytes)?;
            let passed_before = passed_opens(&side)?;
            let report = worker.obey(&Order::Pass { path: path.clone(), len_bytes })?;
            series.add(report.bytes as f64 / report.seconds / 1e6);
            side.check_lender()?;
            if is_mounted {
                is_passed.push(passed_opens(&side)? > passed_before);
            }
        }
    }
    let put_pages = grown(put_before, side.counter(|of| of.put_pages)?)?;
    let ratio = mounted.over(&backing);
    println!("through the mount {} MB/s, backing directory {} MB/s", mounted.text(0), backing.text(0));
    println!("ratio {} (at least {RATIO_WANTED} is wanted); {put_pages} pages were put", ratio.text(3));
    let of_passes = |wanted| ratio.where_each(is_passed.iter().map(|passed| *passed == wanted));
    let (through_daemon, passed) = (of_passes(false), of_passes(true));
    for (passes, way) in [(&through_daemon, "through the daemon"), (&passed, "that the kernel read below by itself")] {
        if passes.count() > 0 {
            println!("of {} passes {way} {}", passes.count(), passes.text(3));
        }
    }
    side.end()?;
    Ok(crate::members(json!({
        "ratio": ratio.median(),
        "ratio_wanted": RATIO_WANTED,
        "ratio_rounds": ratio.json(),
        "through_daemon_ratio": through_daemon.json(),
        "passed_ratio": passed.json(),
        "mounted_mb_per_s": mounted.median(),
        "below_mb_per_s": backing.median(),
        "put_pages": put_pages,
        "rounds": rounds,
        "page_cache_bytes": cache_bytes,
        "file_bytes": len_bytes,
    })))
}

fn passed_opens(side: &Side) -> Result<u64, Failure> {
    Ok(side.status()?.mount.passed_opens)
}
