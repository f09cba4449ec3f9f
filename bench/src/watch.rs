//! `watch`: what watching the page cache costs the programs that are watched (`pumapool advise`).
//!
//! A file in the page cache is read page by page, a system call each, and then evicted at once:
//! with no watch, with one that sees reads where the page cache hands pages out, and with one that
//! sees them by the system calls. Every page is sampled, which costs most.

use crate::figures::Series;
use crate::world::World;
use page::PAGE_SIZE;
use rustix::fs::{Advice, fadvise};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Instant;
use tap::{AccessTrace, ReadsSource};
use testbed::Failure;

/// Of the file: so much that the watch's ring has room for a record of each page many times.
const FILE_BYTES: u64 = 64 << 20;
/// How often one figure is tried to be measured.
const TRIES_MAX: u32 = 4;

const SOURCES: [Option<ReadsSource>; 3] = [None, Some(ReadsSource::PageCache), Some(ReadsSource::SystemCalls)];

/// Runs it.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let (rounds, times) = (extent.choose(9, 5, 1), extent.choose(7, 5, 2));
    let file_bytes = extent.choose(FILE_BYTES, FILE_BYTES, 1 << 20);
    let path = world.file("watched", file_bytes)?;
    println!("{} MiB read page by page and evicted, {times} times in each of {rounds} rounds", file_bytes >> 20);
    let (mut hits, mut evictions): ([Series; 3], [Series; 3]) = Default::default();
    for round in 0..rounds {
        for nth in (0..SOURCES.len()).map(|nth| (nth + round) % SOURCES.len()) {
            let Costs { hit_ns, eviction_ns } = undisturbed(&path, SOURCES[nth], times)?;
            hits[nth].add(hit_ns);
            evictions[nth].add(eviction_ns);
        }
    }
    let [no_hits, by_page_cache, by_system_calls] = &hits;
    let [no_evictions, watched_evictions, _] = &evictions;
    println!(
        "reading a cached page: {} ns with no watch, {} ns seen in the page cache, {} ns seen by system calls",
        no_hits.text(0),
        by_page_cache.text(0),
        by_system_calls.text(0)
    );
    println!("evicting a page: {} ns with no watch, {} ns with one", no_evictions.text(0), watched_evictions.text(0));
    Ok(crate::members(json!({
        "hit_ratio": by_page_cache.over(no_hits).median(),
        "system_call_hit_ratio": by_system_calls.over(no_hits).median(),
        "eviction_ratio": watched_evictions.over(no_evictions).median(),
        "no_watch_hit_ns": no_hits.json(),
        "page_cache_hit_ns": by_page_cache.json(),
        "system_call_hit_ns": by_system_calls.json(),
        "no_watch_eviction_ns": no_evictions.json(),
        "watched_eviction_ns": watched_evictions.json(),
        "rounds": rounds,
    })))
}

/// For each page. The fastest counts, since everything else that runs only adds.
struct Costs {
    hit_ns: f64,
    eviction_ns: f64,
}

/// Measures until the ring has had room for all records: a lost one costs little.
fn undisturbed(path: &Path, source: Option<ReadsSource>, times: u32) -> Result<Costs, Failure> {
    for _ in 0..TRIES_MAX {
        let mut watch = source.map(|source| start(path, source)).transpose()?;
        let costs = measure(path, watch.as_mut(), times).map_err(Failure::attempted("reading and evicting a file"))?;
        let Some(watch) = watch else { return Ok(costs) };
        let counters = watch.counters();
        if counters.ring_full == 0 && counters.read_pages > 0 {
            return Ok(costs);
        }
        println!("the watch counted {} pages read, and lost {} records", counters.read_pages, counters.ring_full);
    }
    let message = "other programs use this file system all the time; try --dir with a directory on another one";
    Err(Failure::Problem(message.to_owned()))
}

fn start(path: &Path, source: ReadsSource) -> Result<AccessTrace, Failure> {
    let device = std::fs::metadata(path).map_err(Failure::attempted("looking at the file"))?.dev();
    AccessTrace::load(&[device], Some(source)).map_err(|error| Failure::Problem(error.to_string()))
}

fn measure(path: &Path, mut watch: Option<&mut AccessTrace>, times: u32) -> std::io::Result<Costs> {
    let file = File::open(path)?;
    let pages = file.metadata()?.len() / PAGE_SIZE as u64;
    let mut costs = Costs { hit_ns: f64::INFINITY, eviction_ns: f64::INFINITY };
    let mut drain = || watch.as_mut().map_or(Ok(0), |watch| watch.take(&mut |_| ()));
    let ns_per_page = |begun: Instant| begun.elapsed().as_nanos() as f64 / pages as f64;
    let mut buffer = vec![0; 1 << 20];
    for _ in 0..times {
        // All of it, in large pieces, so that the file system may keep it in large folios.
        for at in (0..pages * PAGE_SIZE as u64).step_by(buffer.len()) {
            file.read_at(&mut buffer, at)?;
        }
        drain()?;
        let begun = Instant::now();
        for page in 0..pages {
            file.read_exact_at(&mut buffer[..PAGE_SIZE], page * PAGE_SIZE as u64)?;
        }
        costs.hit_ns = costs.hit_ns.min(ns_per_page(begun));
        drain()?;
        let begun = Instant::now();
        fadvise(&file, 0, None, Advice::DontNeed)?;
        costs.eviction_ns = costs.eviction_ns.min(ns_per_page(begun));
        drain()?;
    }
    Ok(costs)
}
