//! `reclaim`: the cost of lent pages for a program that needs the memory back.
//!
//! A lender has filled its memory group with lent pages. Then another process in that group
//! allocates nearly all of it at full speed. The floor is the same with an empty lender: then the
//! memory is simply free. A small file that is in use all the time shows whether the kernel takes
//! the lent pages before any other cache.

use crate::figures::{Series, mean, p99};
use crate::worker::Order;
use crate::world::{Extent, Lender, Side, Worker, World, drop_cached};
use page::PAGE_SIZE;
use serde_json::{Map, Value, json};
use std::path::Path;
use testbed::Failure;

/// The maximum: with lent pages over without.
const RATIO_WANTED: f64 = 1.1;
/// The lender's reserve in its group: nearly nothing, so that the allocating process meets lent
/// pages from the beginning.
const RESERVE_BYTES: u64 = 16 << 20;
/// Readings of the lent file, until the lender's content no longer grows.
const FILLINGS_MAX: u32 = 4;
/// A reading that adds less than one page in that many is the last.
const FULL_WHEN_ONE_IN: u64 = 100;

/// The minimum share of a full lender's group that lent pages take: otherwise the cost of giving
/// them back is unknown.
const FULL_SHARE_MIN: f64 = 0.6;

/// Sizes of a run.
struct Sizes {
    group_bytes: u64,
    allocated_bytes: u64,
    hot_bytes: u64,
}

/// The result of one allocation.
struct Round {
    lent_pages: u64,
    lent_pages_after: u64,
    mean_us: f64,
    p99_us: f64,
    hot_share: f64,
}

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let sizes = Sizes {
        group_bytes: extent.choose(1 << 30, 1 << 30, 256 << 20),
        allocated_bytes: extent.choose(900 << 20, 900 << 20, 160 << 20),
        hot_bytes: extent.choose(16 << 20, 16 << 20, 4 << 20),
    };
    let rounds: usize = extent.choose(7, 2, 1);
    let hot = world.file("hot", sizes.hot_bytes)?;
    println!(
        "{} MiB allocated in a memory group of {} MiB with the lender and a hot file of {} MiB, {rounds} rounds",
        sizes.allocated_bytes >> 20,
        sizes.group_bytes >> 20,
        sizes.hot_bytes >> 20
    );
    let mut all = [Figures::default(), Figures::default()];
    for round in 0..rounds {
        let mut kinds = [(true, 0), (false, 1)];
        kinds.rotate_left(round % 2);
        for (full, index) in kinds {
            let figures = measure(world, &sizes, &hot, full)?;
            println!(
                "round {}: {} {:.0} µs a MiB, p99 {:.0} µs; {} MiB lent, {} MiB afterwards; {:.0} % of the hot file cached",
                round + 1,
                if full { "a full lender  " } else { "an empty lender" },
                figures.mean_us,
                figures.p99_us,
                figures.lent_pages >> 8,
                figures.lent_pages_after >> 8,
                figures.hot_share * 100.0
            );
            all[index].add(&figures);
        }
    }
    let [full, empty] = all;
    let mean_ratio = full.mean_us.median() / empty.mean_us.median();
    let p99_ratio = full.p99_us.median() / empty.p99_us.median();
    println!("full lender:  mean {} µs a MiB, p99 {} µs", full.mean_us.text(0), full.p99_us.text(0));
    println!("empty lender: mean {} µs a MiB, p99 {} µs", empty.mean_us.text(0), empty.p99_us.text(0));
    println!("ratio of the means {mean_ratio:.2}, of the p99 {p99_ratio:.2} (at most {RATIO_WANTED} is wanted)");
    println!(
        "hot file cached afterwards: {} beside a full lender, {} beside an empty one",
        full.hot.text(3),
        empty.hot.text(3)
    );
    Ok(crate::members(json!({
        "mean_ratio": mean_ratio,
        "p99_ratio": p99_ratio,
        "ratio_wanted": RATIO_WANTED,
        "hot_hit_ratio": full.hot.median(),
        "hot_hit_ratio_empty": empty.hot.median(),
        "full_lent_mib": full.lent_mib.median(),
        "full": full.json(),
        "empty": empty.json(),
        "rounds": full.mean_us.count(),
        "group_bytes": sizes.group_bytes,
        "allocated_bytes": sizes.allocated_bytes,
        "hot_bytes": sizes.hot_bytes,
        "reserve_bytes": RESERVE_BYTES,
    })))
}

/// The figures of all rounds of one kind.
#[derive(Default)]
struct Figures {
    mean_us: Series,
    p99_us: Series,
    hot: Series,
    lent_mib: Series,
    lent_mib_after: Series,
}

impl Figures {
    fn add(&mut self, round: &Round) {
        self.mean_us.add(round.mean_us);
        self.p99_us.add(round.p99_us);
        self.hot.add(round.hot_share);
        self.lent_mib.add(round.lent_pages as f64 / 256.0);
        self.lent_mib_after.add(round.lent_pages_after as f64 / 256.0);
    }

    fn json(&self) -> Value {
        json!({
            "mean_us_per_mib": self.mean_us.json(),
            "p99_us_per_mib": self.p99_us.json(),
            "hot_hit_ratio": self.hot.json(),
            "lent_mib": self.lent_mib.json(),
            "lent_mib_after": self.lent_mib_after.json(),
        })
    }
}

/// A lender and a mount of their own, filled or not, and an allocation next to them.
fn measure(world: &World, sizes: &Sizes, hot: &Path, full: bool) -> Result<Round, Failure> {
    drop_cached(hot)?;
    let lender = world.lend(sizes.group_bytes, sizes.group_bytes, RESERVE_BYTES)?;
    // All pages that are read are lent: the quickest way to fill a lender.
    let options = ["--fill", "read", "--strategy", "non-inclusive", "--filter", "off", "--gate", "off"];
    let side = world.mount("lent", sizes.group_bytes, Some(lender.address), &options)?;
    if full {
        fill(world, &lender, &side, sizes.group_bytes)?;
    }
    let lent_pages = lender.stored_pages()?;
    let share = (lent_pages * PAGE_SIZE as u64) as f64 / sizes.group_bytes as f64;
    let is_as_wanted = if full { share >= FULL_SHARE_MIN || world.extent == Extent::Tiny } else { lent_pages == 0 };
    if !is_as_wanted {
        let wanted = if full { "full" } else { "empty" };
        let message =
            format!("{lent_pages} pages are lent, {share:.2} of the group, where the lender is to be {wanted}");
        return Err(Failure::Problem(message));
    }
    let mut worker = Worker::start(&world.interrupt, &[&lender.group])?;
    let report = worker.obey(&Order::Allocate { bytes: sizes.allocated_bytes, hot: hot.to_owned() })?;
    drop(worker);
    let lent_pages_after = lender.stored_pages()?;
    side.end()?;
    Ok(Round {
        lent_pages,
        lent_pages_after,
        mean_us: mean(&report.allocation_ns) / 1e3,
        p99_us: p99(&report.allocation_ns) as f64 / 1e3,
        hot_share: report.hot_cached_pages as f64 / report.hot_pages.max(1) as f64,
    })
}

/// Reads through the mount until the lender is full.
fn fill(world: &World, lender: &Lender, side: &Side, len_bytes: u64) -> Result<(), Failure> {
    let mut worker = Worker::start(&world.interrupt, &[])?;
    let mut stored = 0;
    for _ in 0..FILLINGS_MAX {
        side.drop_cached()?;
        worker.obey(&Order::Pass { path: side.file.clone(), len_bytes })?;
        side.settle()?;
        let now = lender.stored_pages()?;
        if now <= stored + stored / FULL_WHEN_ONE_IN {
            break;
        }
        stored = now;
    }
    side.drop_cached()
}
