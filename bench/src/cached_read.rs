//! `cached-read`: a file that is wholly in the page cache, through the mount against the directory below. The mount must cost nothing
//! there: the kernel answers, and Puma is not asked.

use crate::figures::Series;
use crate::reading::Method;
use crate::worker::Order;
use crate::world::{Worker, World};
use page::PAGE_SIZE;
use serde_json::{Map, Value, json};
use testbed::Failure;

/// Wanted at least: through the mount over below.
const RATIO_WANTED: f64 = 0.97;
/// Ways to read, and bytes at once.
const LOADS: [(&str, Method, usize); 4] = [
    ("read 4 KiB", Method::Read, PAGE_SIZE),
    ("read 1 MiB", Method::Read, 1 << 20),
    ("mmap 4 KiB", Method::Map, PAGE_SIZE),
    ("mmap 1 MiB", Method::Map, 1 << 20),
];

/// Runs it.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let len_bytes: u64 = extent.choose(256 << 20, 64 << 20, 4 << 20);
    let (rounds, ms) = (extent.choose(15, 9, 1), extent.choose(1000, 400, 30));
    let side = world.mount("mounted", len_bytes, None, &[])?;
    let mut worker = Worker::start(&world.interrupt, &[])?;
    println!("{} MiB in the page cache; {rounds} rounds of {ms} ms each", len_bytes >> 20);
    let paths = [side.file.clone(), side.below.clone()];
    for path in &paths {
        worker.obey(&Order::Pass { path: path.clone(), len_bytes })?;
    }
    let reads = || side.counter("reads");
    let reads_before = reads()?;
    let mut speeds: [[Series; 2]; 4] = Default::default();
    for round in 0..rounds {
        for ((_, method, block_bytes), series) in LOADS.into_iter().zip(&mut speeds) {
            for index in (0..2).map(|index| (index + round) % 2) {
                let seed = world.seed.wrapping_add(round as u64);
                let path = paths[index].clone();
                let report = worker.obey(&Order::Cached { path, len_bytes, block_bytes, method, ms, seed })?;
                series[index].add(report.bytes as f64 / report.seconds / 1e9);
            }
        }
    }
    let mut figures = Map::new();
    let mut worst = [f64::INFINITY; 2];
    for ((name, method, _), [mounted, below]) in LOADS.into_iter().zip(&speeds) {
        let ratio = mounted.over(below);
        println!("{name}: {} GB/s, below {} GB/s: {}", mounted.text(2), below.text(2), ratio.text(3));
        let worst = &mut worst[usize::from(method == Method::Map)];
        *worst = worst.min(ratio.median());
        figures.insert(format!("{}_ratio", name.to_lowercase().replace(' ', "_")), ratio.json());
    }
    println!("the least of read {:.3}, of mmap {:.3} (at least {RATIO_WANTED} is wanted)", worst[0], worst[1]);
    // None, if what is cached stays so; the kernel may have had a better use for it.
    let asked = reads()? - reads_before;
    println!("the mount was asked {asked} times");
    figures.extend(crate::members(json!({
        "read_requests": asked,
        "read_ratio": worst[0],
        "mmap_ratio": worst[1],
        "ratio_wanted": RATIO_WANTED,
        "rounds": rounds,
        "phase_ms": ms,
        "file_bytes": len_bytes,
    })));
    side.end()?;
    Ok(figures)
}
