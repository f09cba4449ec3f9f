//! `cached-read`: a file that is wholly in the page cache, through the mount against the backing
//! directory. The mount must cost nothing there: the kernel answers, without Puma.
//!
//! There is no lender, so the file is passed through, and its pages are those of the backing file.
//! For comparison there is a mount that passes nothing through, as for a file that a lender is of
//! use to: its pages are the mount's own. (`held_...`)

use crate::figures::Series;
use crate::reading::Method;
use crate::worker::Order;
use crate::world::{Worker, World, grown};
use page::PAGE_SIZE;
use serde_json::{Map, Value, json};
use testbed::Failure;

/// The minimum ratio: through the mount over the backing directory.
const RATIO_WANTED: f64 = 0.97;
/// Ways to read, and bytes of a read.
const LOADS: [(&str, Method, usize); 4] = [
    ("read 4 KiB", Method::Read, PAGE_SIZE),
    ("read 1 MiB", Method::Read, 1 << 20),
    ("mmap 4 KiB", Method::Map, PAGE_SIZE),
    ("mmap 1 MiB", Method::Map, 1 << 20),
];

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let len_bytes: u64 = extent.choose(256 << 20, 64 << 20, 4 << 20);
    let (rounds, ms) = (extent.choose(15, 9, 1), extent.choose(1000, 400, 30));
    let side = world.mount("mounted", len_bytes, None, &[])?;
    let held = world.mount("held", len_bytes, None, &["--passthrough", "off"])?;
    let mut worker = Worker::start(&world.interrupt, &[])?;
    println!("{} MiB in the page cache; {rounds} rounds of {ms} ms each", len_bytes >> 20);
    let paths = [side.file.clone(), held.file.clone(), side.backing.clone()];
    for path in &paths {
        worker.obey(&Order::Pass { path: path.clone(), len_bytes })?;
    }
    let reads = || side.counter(|of| of.reads);
    let reads_before = reads()?;
    let mut speeds: [[Series; 3]; 4] = Default::default();
    for round in 0..rounds {
        for ((_, method, block_bytes), series) in LOADS.into_iter().zip(&mut speeds) {
            for index in (0..paths.len()).map(|index| (index + round) % paths.len()) {
                let seed = world.seed.wrapping_add(round as u64);
                let path = paths[index].clone();
                let report = worker.obey(&Order::Cached { path, len_bytes, block_bytes, method, ms, seed })?;
                series[index].add(report.bytes as f64 / report.seconds / 1e9);
            }
        }
    }
    let mut figures = Map::new();
    // For each mount: read, mmap.
    let mut worst = [[f64::INFINITY; 2]; 2];
    for ((name, method, _), [mounted, held, backing]) in LOADS.into_iter().zip(&speeds) {
        println!("{name}: backing directory {} GB/s", backing.text(2));
        let key = name.to_lowercase().replace(' ', "_");
        let mounts = [("mounted", "", mounted), ("not passed through", "held_", held)];
        for ((what, prefix, speed), worst) in mounts.into_iter().zip(&mut worst) {
            let ratio = speed.over(backing);
            println!("  {what} {} GB/s: {}", speed.text(2), ratio.text(3));
            let worst = &mut worst[usize::from(method == Method::Map)];
            *worst = worst.min(ratio.median());
            figures.insert(format!("{prefix}{key}_ratio"), ratio.json());
        }
    }
    let [[read, mmap], [held_read, held_mmap]] = worst;
    println!("the least of read {read:.3}, of mmap {mmap:.3} (at least {RATIO_WANTED} is wanted)");
    println!("where lenders may be of use: {held_read:.3}, {held_mmap:.3}");
    // Zero if the pages stay cached; the kernel may have needed the memory.
    let asked = grown(reads_before, reads()?)?;
    println!("the mount was asked {asked} times");
    figures.extend(crate::members(json!({
        "read_requests": asked,
        "read_ratio": read,
        "mmap_ratio": mmap,
        "held_read_ratio": held_read,
        "held_mmap_ratio": held_mmap,
        "ratio_wanted": RATIO_WANTED,
        "rounds": rounds,
        "phase_ms": ms,
        "file_bytes": len_bytes,
    })));
    side.end()?;
    held.end()?;
    Ok(figures)
}
