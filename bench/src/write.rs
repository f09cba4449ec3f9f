//! `write`: the cost of writes through the mount, against the backing directory: written through,
//! and written back.
//!
//! Each pattern ends with an fsync, which is part of it. Ratios are geometric means over the
//! patterns. All three files begin alike and get the same writes; so they must be equal at the end,
//! on the disk.

use crate::figures::{Series, geometric_mean};
use crate::worker::Order;
use crate::world::{Worker, World, drop_cached};
use crate::writing::Pattern;
use page::PAGE_SIZE;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use testbed::Failure;

/// No sync except the one at the end.
const NEVER: u64 = u64::MAX;

const fn pattern(block_bytes: usize, random: bool, sync_every: u64) -> Pattern {
    Pattern { block_bytes, random, sync_every }
}

/// Patterns, and the divisor of the number of writes: writes that are synced take long.
const PATTERNS: [(&str, Pattern, u64); 5] = [
    ("sequential_1m", pattern(1 << 20, false, NEVER), 1),
    ("sequential_4k", pattern(PAGE_SIZE, false, NEVER), 1),
    ("random_4k", pattern(PAGE_SIZE, true, NEVER), 4),
    ("random_4k_sync_32", pattern(PAGE_SIZE, true, 32), 8),
    ("random_4k_sync", pattern(PAGE_SIZE, true, 1), 32),
];

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let len_bytes: u64 = extent.choose(256 << 20, 32 << 20, 2 << 20);
    let rounds = extent.choose(7, 5, 1);
    let through = world.mount("through", len_bytes, None, &["--write", "through"])?;
    let back = world.mount("back", len_bytes, None, &["--write", "back"])?;
    let backing = world.file("below", len_bytes)?;
    let mut worker = Worker::start(&world.interrupt, &[])?;
    println!("a file of {} MiB; {rounds} rounds", len_bytes >> 20);
    let paths = [through.file.clone(), back.file.clone(), backing.clone()];
    let mut speeds: [[Series; 3]; PATTERNS.len()] = Default::default();
    for round in 0..rounds {
        for ((_, pattern, one_in), series) in PATTERNS.into_iter().zip(&mut speeds) {
            for index in (0..3).map(|index| (index + round) % 3) {
                let count = (len_bytes / pattern.block_bytes as u64 / one_in).max(1);
                let seed = world.seed.wrapping_add(round as u64);
                let report =
                    worker.obey(&Order::Write { path: paths[index].clone(), len_bytes, pattern, count, seed })?;
                series[index].add(report.operations as f64 / report.seconds);
            }
        }
    }
    let mut figures = Map::new();
    let mut ratios = [Vec::new(), Vec::new()];
    for ((name, _, _), speeds) in PATTERNS.into_iter().zip(&speeds) {
        let [through, back] = [0, 1].map(|index| speeds[index].over(&speeds[2]));
        println!("{name:18} {} /s directly; through {}, back {}", speeds[2].text(0), through.text(2), back.text(2));
        for (ratio, kind, all) in [(through, "through", 0), (back, "back", 1)] {
            ratios[all].push(ratio.median());
            figures.insert(format!("{name}_{kind}_ratio"), ratio.json());
        }
    }
    let [through_ratio, back_ratio] = ratios.map(|ratios| geometric_mean(ratios.into_iter()));
    println!("over the backing directory: through {through_ratio:.2}, back {back_ratio:.2}");
    figures.extend(crate::members(json!({
        "through_ratio": through_ratio,
        "back_ratio": back_ratio,
        "rounds": rounds,
        "file_bytes": len_bytes,
    })));
    for side in [through, back] {
        let written = side.backing.clone();
        side.end()?;
        if !are_alike(&written, &backing)? {
            return Err(Failure::Problem(format!("{} has not what was written", written.display())));
        }
    }
    Ok(figures)
}

/// Whether two files are equal on the disk.
fn are_alike(one: &Path, other: &Path) -> Result<bool, Failure> {
    let open = |path: &Path| -> Result<File, Failure> {
        drop_cached(path)?;
        File::open(path).map_err(Failure::attempted(format!("opening {}", path.display())))
    };
    let (one, other) = (open(one)?, open(other)?);
    let compare = || -> io::Result<bool> {
        let mut buffers = [Vec::new(), Vec::new()];
        loop {
            for (file, buffer) in [&one, &other].into_iter().zip(&mut buffers) {
                buffer.clear();
                file.take(1 << 20).read_to_end(buffer)?;
            }
            let [one, other] = &buffers;
            if one != other || one.is_empty() {
                return Ok(one == other);
            }
        }
    };
    compare().map_err(Failure::attempted("comparing what was written"))
}
