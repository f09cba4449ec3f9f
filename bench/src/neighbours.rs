//! `neighbours`: the cost of requests that wait for the disk for other requests that do not.
//!
//! A read of the disk waits for other reads of the disk, with and without the mount. So a round
//! counts only if the lender had every page of the intended hits.
//!
//! There are two cases, each alone and with neighbours by turns: reads that hit the lender, with
//! readers of pages that only the disk has; and stat, open and read of a file in the page cache,
//! with writers that sync. The second case is also measured in the backing directory, with the same
//! neighbours there. The neighbours keep a slow disk busy all the time.

use crate::figures::Series;
use crate::hit::{DISK_READS_PER_S, Lent};
use crate::worker::{Order, Report, Workload};
use crate::world::{Extent, Security, Worker, World, drop_cached, grown, write_stamped};
use page::PAGE_SIZE;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::Duration;
use testbed::Failure;

/// The minimum: the speed with neighbours over the speed alone.
const RATIO_WANTED: f64 = 0.8;
/// Reads, and writes, of the disk in a second.
const DISK_PER_S: u32 = 160;
/// Neighbours that read, and that write and sync.
const READERS: usize = 24;
const WRITERS: usize = 16;
/// The readers' file, of which they read a small part. Each round has a new one, because the lender
/// gets the pages that were read.
const COLD_BYTES: u64 = 16 << 20;
/// Attempts for one round that counts.
const TRIES: u64 = 3;
/// The file of each writer.
const WRITTEN_BYTES: u64 = 256 << 10;
/// Page cache of the neighbours.
const NEIGHBOURS_BYTES: u64 = 128 << 20;
/// The neighbours run as long as their victim needs, even if it is slower by that factor.
const SLOWER_MOST: u64 = 3;
/// How long the neighbours run before and after.
const MARGIN_MS: u64 = 300;

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let len_bytes: u64 = extent.choose(32 << 20, 16 << 20, 4 << 20);
    let (rounds, ms) = (extent.choose(15, 5, 1), extent.choose(2000, 1000, 100));
    world.disk.limit_reads(Some(DISK_READS_PER_S))?;
    let mut reader = Worker::start(&world.interrupt, &[])?;
    let others_bytes = TRIES * rounds * COLD_BYTES + WRITERS as u64 * WRITTEN_BYTES;
    let lent = Lent::fill_beside(world, &mut reader, Security::Keyed, "lent", len_bytes, others_bytes)?;
    let (source, at) = (lent.side.source.as_path(), lent.side.at.as_path());
    let write = |name: String, len_bytes| {
        let path = source.join(name);
        write_stamped(&path, len_bytes, world.seed)
            .map_err(Failure::attempted(format!("writing {}", path.display())))?;
        drop_cached(&path)
    };
    (0..TRIES * rounds).try_for_each(|number| write(format!("cold.{number}"), COLD_BYTES))?;
    write("look".to_owned(), PAGE_SIZE as u64)?;
    (0..WRITERS).try_for_each(|number| write(format!("sync.{number}"), WRITTEN_BYTES))?;
    world.disk.limit_reads(Some(DISK_PER_S))?;
    world.disk.limit_writes(Some(DISK_PER_S))?;
    let mut neighbours = world.worker(NEIGHBOURS_BYTES)?;
    println!("a disk of {DISK_PER_S} reads and writes a second; {rounds} rounds");

    let [mut hits, mut hits_beside] = <[Series; 2]>::default();
    let pages = len_bytes / PAGE_SIZE as u64;
    let mut tries = 0..TRIES * rounds;
    while hits_beside.count() < rounds as usize {
        let Some(number) = tries.next() else {
            let message = format!("the lender lacked pages in most of {} rounds", TRIES * rounds);
            return Err(Failure::Problem(message));
        };
        let seed = world.seed.wrapping_add(number);
        let before = lent.side.counter(|of| of.lender_pages)?;
        let alone = lent.reads(&mut reader, seed)?;
        let cold = at.join(format!("cold.{number}"));
        drop_cached(&cold)?;
        let readers = Workload::Random { threads: READERS };
        let busy_ms = SLOWER_MOST * (alone.seconds * 1e3) as u64 + 2 * MARGIN_MS;
        let beside =
            beside(&mut neighbours, &cold, COLD_BYTES, readers, busy_ms, seed, || lent.reads(&mut reader, seed))?;
        let got = grown(before, lent.side.counter(|of| of.lender_pages)?)?;
        if got == 2 * pages || extent == Extent::Tiny {
            hits.add(per_second(&alone));
            hits_beside.add(per_second(&beside));
        }
    }
    let mut looks = <[[Series; 2]; 2]>::default();
    for round in 0..rounds {
        let seed = world.seed.wrapping_add(round);
        for (directory, [alone, beside_writers]) in [at, source].into_iter().zip(&mut looks) {
            let (path, len_bytes) = (directory.join("look"), PAGE_SIZE as u64);
            let look = Order::Use { path, len_bytes, workload: Workload::Look, ms, seed };
            alone.add(per_second(&reader.obey(&look)?));
            let (writers, busy_ms) = (Workload::Syncs { threads: WRITERS }, ms + 2 * MARGIN_MS);
            let file = directory.join("sync");
            let report = beside(&mut neighbours, &file, WRITTEN_BYTES, writers, busy_ms, seed, || reader.obey(&look))?;
            beside_writers.add(per_second(&report));
        }
    }
    let [[looks, looks_beside], [direct, direct_beside]] = looks;
    let (read_ratio, look_ratio) = (hits_beside.over(&hits), looks_beside.over(&looks));
    let (direct_ratio, over_direct) = (direct_beside.over(&direct), looks_beside.over(&direct_beside));
    println!("hits/s alone {}, beside {READERS} readers of the disk {}", hits.text(0), hits_beside.text(0));
    println!(
        "beside over alone: {} (at least {RATIO_WANTED} is wanted); {} rounds in which the lender lacked a page",
        read_ratio.text(2),
        tries.start - rounds
    );
    println!("stat, open, read/s alone {}, beside {WRITERS} that sync {}", looks.text(0), looks_beside.text(0));
    println!("beside over alone: {} (at least {RATIO_WANTED} is wanted)", look_ratio.text(2));
    println!("the same in the backing directory: alone {}, beside {}", direct.text(0), direct_beside.text(0));
    println!(
        "there beside over alone: {}; through the mount over there: {}",
        direct_ratio.text(2),
        over_direct.text(2)
    );
    lent.side.end()?;
    Ok(crate::members(json!({
        "read_ratio": read_ratio.median(),
        "look_ratio": look_ratio.median(),
        "direct_look_ratio": direct_ratio.median(),
        "look_over_direct_ratio": over_direct.median(),
        "look_over_direct_alone_ratio": looks.over(&direct).median(),
        "ratio_wanted": RATIO_WANTED,
        "read_ratios": read_ratio.json(),
        "look_ratios": look_ratio.json(),
        "hits_per_s": hits.json(),
        "rounds_discarded": tries.start - rounds,
        "looks_per_s": looks.json(),
        "rounds": rounds,
        "file_bytes": len_bytes,
    })))
}

fn per_second(report: &Report) -> f64 {
    report.operations as f64 / report.seconds
}

/// Runs `own` while the neighbours use their files.
fn beside(
    neighbours: &mut Worker<'_>,
    path: &Path,
    len_bytes: u64,
    workload: Workload,
    ms: u64,
    seed: u64,
    own: impl FnOnce() -> Result<Report, Failure>,
) -> Result<Report, Failure> {
    neighbours.begin(&Order::Use { path: path.to_owned(), len_bytes, workload, ms, seed })?;
    std::thread::sleep(Duration::from_millis(MARGIN_MS));
    let report = own();
    neighbours.end(Duration::from_millis(ms))?;
    report
}
