//! `never-slower`: whether Puma ever makes a load slower.
//!
//! Workloads × sizes of the data × latencies of the network, each against no Puma: a similar file
//! on the same disk, not mounted. There is a mount for every latency, with the defaults, whose
//! relay delays from the beginning to the end, so that its gate sees a constant network. The rounds
//! of one workload and size visit all of them by turns. Then latency appears and disappears, to
//! measure the time until the lender is used again.

use crate::figures::Series;
use crate::worker::{Order, Workload};
use crate::world::{Side, World, drop_cached, grown};
use report::LinkState;
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use testbed::{Failure, Relay};

/// The minimum: with Puma over without.
const RATIO_WANTED: f64 = 0.97;
/// The disk: so many reads and writes per second, and a limit on bytes.
const DISK_READS_PER_S: u32 = 2000;
const DISK_WRITES_PER_S: u32 = 500;
const DISK_BYTES_PER_S: u64 = 200_000_000;
/// Memory of the lender's group beyond the lent memory.
const LENDER_ROOM_BYTES: u64 = 160 << 20;
const LENDER_RESERVE_BYTES: u64 = 32 << 20;
/// Time limits of the steps of the last part.
const USED_MAX: Duration = Duration::from_secs(60);
const BYPASSED_MAX: Duration = Duration::from_secs(60);
const RESUMED_MAX: Duration = Duration::from_secs(300);
/// Time of reads between two checks there.
const LOOK_MS: u64 = 100;

/// The workloads, with their names.
const WORKLOADS: [(&str, Workload); 5] = [
    ("random", Workload::Random { threads: 1 }),
    ("random-16-threads", Workload::Random { threads: 16 }),
    ("sequential", Workload::Sequential),
    ("mixed", Workload::Mixed),
    ("writes-fsync", Workload::Writes),
];

/// The sizes of the data, with their names, in halves of the reader's memory.
const SIZES: [(&str, u64); 3] = [("fits", 1), ("twice", 4), ("four-times", 8)];

/// The amount of measurements.
struct Plan {
    cache_bytes: u64,
    latencies_ms: &'static [u64],
    rounds: usize,
    /// Until then, further rounds for weak cells are begun.
    more_until: Duration,
    warm_up_ms: u64,
    phase_ms: u64,
    /// How long latency lasts before it disappears.
    peaks: &'static [(&'static str, Duration)],
}

const WHOLE: Plan = Plan {
    cache_bytes: 32 << 20,
    latencies_ms: &[0, 1, 5],
    rounds: 3,
    more_until: Duration::from_secs(25 * 60),
    warm_up_ms: 2000,
    phase_ms: 5000,
    peaks: &[("resumes_after_ms", Duration::from_secs(5)), ("resumes_after_a_minute_ms", Duration::from_secs(60))],
};
const QUICK: Plan = Plan {
    cache_bytes: 32 << 20,
    latencies_ms: &[0, 5],
    rounds: 2,
    more_until: Duration::from_secs(210),
    warm_up_ms: 2000,
    phase_ms: 3000,
    peaks: &[("resumes_after_ms", Duration::from_secs(5))],
};
const TINY: Plan = Plan {
    cache_bytes: 8 << 20,
    latencies_ms: &[0],
    rounds: 1,
    more_until: Duration::ZERO,
    warm_up_ms: 200,
    phase_ms: 300,
    peaks: &[],
};

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let plan = world.extent.choose(&WHOLE, &QUICK, &TINY);
    let begin = Instant::now();
    let largest_bytes = SIZES.iter().map(|(_, halves)| halves * plan.cache_bytes / 2).max().unwrap_or(0);
    let capacity_bytes = largest_bytes * (plan.latencies_ms.len() as u64 + 1);
    let lender = world.lend(capacity_bytes + LENDER_ROOM_BYTES, capacity_bytes, LENDER_RESERVE_BYTES)?;
    let relay = |latency_ms: u64| {
        let relay = Relay::start(lender.address)?;
        relay.delay(each_way(latency_ms));
        Ok::<_, Failure>(relay)
    };
    // Drop order is reversed: the mounts end before their relays.
    let relays = plan.latencies_ms.iter().map(|ms| relay(*ms)).collect::<Result<Vec<_>, _>>()?;
    let mut places = vec![Place { path: world.file("without", largest_bytes)?, side: None }];
    for (ms, relay) in plan.latencies_ms.iter().zip(&relays) {
        let side = world.mount(&format!("with-{ms}-ms"), largest_bytes, Some(relay.address()), &[])?;
        places.push(Place { path: side.file.clone(), side: Some(side) });
    }
    slow_down(world)?;
    println!(
        "{} MiB of page cache; a disk of {DISK_READS_PER_S} reads/s, {DISK_WRITES_PER_S} writes/s and {} MB/s; {} rounds of {} ms each",
        plan.cache_bytes >> 20,
        DISK_BYTES_PER_S / 1_000_000,
        plan.rounds,
        plan.phase_ms
    );

    let mut groups = Vec::new();
    for (name, workload) in WORKLOADS {
        for (size, halves) in SIZES {
            let chosen = world.extent.choose(true, size == "twice" || name == "random" && size == "fits", false)
                || (name, size) == ("random", "twice");
            if chosen {
                let mut group = Row::new(name, workload, size, halves * plan.cache_bytes / 2, places.len());
                group.measure(world, plan, &places, plan.rounds)?;
                group.print(plan);
                groups.push(group);
            }
        }
    }
    // A ratio below the bound may be chance. All rounds count, these and those before.
    while begin.elapsed() < plan.more_until {
        let fewest = groups.iter_mut().filter(|group| group.worst() < RATIO_WANTED).min_by_key(|group| group.rounds());
        let Some(group) = fewest.filter(|group| group.rounds() < 3 * plan.rounds) else { break };
        group.measure(world, plan, &places, 1)?;
        group.print(plan);
    }
    drop(places);

    let mut resumes = Map::new();
    for (key, peak) in plan.peaks {
        resumes.insert((*key).to_owned(), resume(world, plan, &lender.address, key, *peak)?);
    }
    let worst = groups.iter().min_by(|one, other| one.worst().total_cmp(&other.worst()));
    let worst = worst.ok_or_else(|| Failure::Problem("nothing was measured".to_owned()))?;
    let (latency_ms, _) = worst.ratios(plan).min_by(|one, other| one.1.median().total_cmp(&other.1.median())).unzip();
    let worst_cell = format!("{}, {}, {} ms", worst.name, worst.size, latency_ms.unwrap_or(0));
    println!("least ratio {:.3}: {worst_cell} (at least {RATIO_WANTED} is wanted)", worst.worst());
    let mut figures = crate::members(json!({
        "min_ratio": worst.worst(),
        "min_ratio_cell": worst_cell,
        "ratio_wanted": RATIO_WANTED,
        "cells": groups.iter().flat_map(|group| group.json(plan)).collect::<Vec<_>>(),
        "phase_ms": plan.phase_ms,
        "warm_up_ms": plan.warm_up_ms,
        "page_cache_bytes": plan.cache_bytes,
        "disk_reads_per_s": DISK_READS_PER_S,
        "disk_writes_per_s": DISK_WRITES_PER_S,
        "disk_bytes_per_s": DISK_BYTES_PER_S,
        "seconds": begin.elapsed().as_secs(),
    }));
    figures.extend(resumes);
    Ok(figures)
}

/// A relay delays in each direction; the figures here are those of a round trip.
fn each_way(latency_ms: u64) -> Duration {
    Duration::from_millis(latency_ms) / 2
}

fn slow_down(world: &World) -> Result<(), Failure> {
    world.disk.limit_reads(Some(DISK_READS_PER_S))?;
    world.disk.limit_writes(Some(DISK_WRITES_PER_S))?;
    world.disk.limit_read_bytes(Some(DISK_BYTES_PER_S))?;
    Ok(())
}

/// A file, and its mount, if it has one.
struct Place {
    path: PathBuf,
    side: Option<Side>,
}

impl Place {
    fn drop_cached(&self) -> Result<(), Failure> {
        self.side.as_ref().map_or_else(|| drop_cached(&self.path), Side::drop_cached)
    }

    fn status(&self) -> Result<report::Mount, Failure> {
        self.side.as_ref().map_or(Ok(report::Mount::default()), Side::status)
    }
}

/// Pages that lenders have answered.
fn lent_pages(status: &report::Mount) -> u64 {
    status.borrower.lender_pages
}

/// How the one lender of a mount stands, if it has one.
fn state(status: &report::Mount) -> Option<LinkState> {
    status.lenders.first().map(|link| link.state)
}

/// One workload on data of one size: a cell for each latency, and their common floor.
struct Row {
    name: &'static str,
    workload: Workload,
    size: &'static str,
    len_bytes: u64,
    /// Operations per second of each place, the one without a mount first.
    speeds: Vec<Series>,
    /// Pages that the lender answered, for each place.
    lent_pages: Vec<u64>,
    /// What its mount said of its lender at the end of the last phase.
    states: Vec<Option<LinkState>>,
}

impl Row {
    fn new(name: &'static str, workload: Workload, size: &'static str, len_bytes: u64, places: usize) -> Row {
        let states = vec![None; places];
        Row {
            name,
            workload,
            size,
            len_bytes,
            speeds: vec![Series::default(); places],
            lent_pages: vec![0; places],
            states,
        }
    }

    /// Measures all places by turns, that many times.
    fn measure(&mut self, world: &World, plan: &Plan, places: &[Place], rounds: usize) -> Result<(), Failure> {
        let mut worker = world.worker(plan.cache_bytes)?;
        for _ in 0..rounds {
            // Each is first, and follows each other one, equally often.
            let first = self.rounds();
            for index in (0..places.len()).map(|index| (index + first) % places.len()) {
                let place = &places[index];
                places.iter().try_for_each(Place::drop_cached)?;
                worker.obey(&Order::Pass { path: place.path.clone(), len_bytes: self.len_bytes })?;
                worker.obey(&self.order(world, place, plan.warm_up_ms, 0))?;
                let lent_before = lent_pages(&place.status()?);
                let report = worker.obey(&self.order(world, place, plan.phase_ms, 1))?;
                let status = place.status()?;
                self.speeds[index].add(report.operations as f64 / report.seconds);
                self.lent_pages[index] += grown(lent_before, lent_pages(&status))?;
                place.side.as_ref().map_or(Ok(()), Side::check_lender)?;
                self.states[index] = state(&status);
            }
        }
        Ok(())
    }

    /// The same pages in the same order for every place of a round.
    fn order(&self, world: &World, place: &Place, ms: u64, part: u64) -> Order {
        let seed = world.seed.wrapping_add(self.rounds() as u64 * 2 + part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Order::Use { path: place.path.clone(), len_bytes: self.len_bytes, workload: self.workload, ms, seed }
    }

    fn rounds(&self) -> usize {
        self.speeds.iter().map(Series::count).min().unwrap_or(0)
    }

    /// Each latency with its ratios, round by round.
    fn ratios<'a>(&'a self, plan: &'a Plan) -> impl Iterator<Item = (u64, Series)> + 'a {
        plan.latencies_ms.iter().copied().zip(self.speeds[1..].iter().map(|speed| speed.over(&self.speeds[0])))
    }

    fn worst(&self) -> f64 {
        let ratios = self.speeds[1..].iter().map(|speed| speed.over(&self.speeds[0]).median());
        ratios.fold(f64::INFINITY, f64::min)
    }

    fn print(&self, plan: &Plan) {
        let floor = &self.speeds[0];
        for (index, (ms, ratio)) in (1..).zip(self.ratios(plan)) {
            println!(
                "{:17} {:10} {ms} ms: {:9.0} /s with, {:9.0} /s without: {} (lender {}, {} pages)",
                self.name,
                self.size,
                self.speeds[index].median(),
                floor.median(),
                ratio.text(3),
                self.states[index].unwrap_or_default(),
                self.lent_pages[index]
            );
        }
    }

    fn json(&self, plan: &Plan) -> Vec<Value> {
        let cell = |(index, (ms, ratio)): (usize, (u64, Series))| {
            json!({
                "workload": self.name,
                "size": self.size,
                "data_bytes": self.len_bytes,
                "latency_ms": ms,
                "ratio": ratio.json(),
                "with_per_s": self.speeds[index].json(),
                "without_per_s": self.speeds[0].json(),
                "lent_pages": self.lent_pages[index],
                "lender": self.states[index],
            })
        };
        (1..).zip(self.ratios(plan)).map(cell).collect()
    }
}

/// Latency appears, lasts for some time after the lender was bypassed, and disappears. Returns the
/// milliseconds until the lender answers again, or null if it was never bypassed or never used
/// again; the output says which.
fn resume(
    world: &World,
    plan: &Plan,
    lender: &std::net::SocketAddr,
    name: &str,
    peak: Duration,
) -> Result<Value, Failure> {
    let latency_ms = plan.latencies_ms.iter().copied().max().unwrap_or(0);
    let len_bytes = plan.cache_bytes * 2;
    let relay = Relay::start(*lender)?;
    let side = world.mount(name, len_bytes, Some(relay.address()), &[])?;
    let mut worker = world.worker(plan.cache_bytes)?;
    let mut seed = world.seed;
    let workload = Workload::Random { threads: 1 };
    let mut until = |limit: Duration, reached: &dyn Fn(&report::Mount) -> bool| {
        let begin = Instant::now();
        loop {
            seed = seed.wrapping_add(1);
            worker.obey(&Order::Use { path: side.file.clone(), len_bytes, workload, ms: LOOK_MS, seed })?;
            let status = side.status()?;
            if reached(&status) {
                return Ok(Ok(status));
            }
            if begin.elapsed() >= limit {
                return Ok::<_, Failure>(Err(status));
            }
        }
    };
    let outcome = 'outcome: {
        let Ok(_) = until(USED_MAX, &|status| state(status) == Some(LinkState::Used) && lent_pages(status) > 100)?
        else {
            break 'outcome Err("the lender is not used even without latency");
        };
        relay.delay(each_way(latency_ms));
        let Ok(_) = until(BYPASSED_MAX, &|status| state(status) == Some(LinkState::Bypassed))? else {
            break 'outcome Err("the lender is used in spite of the latency");
        };
        let _lasted = until(peak, &|_| false)?;
        let before = lent_pages(&side.status()?);
        relay.delay(Duration::ZERO);
        let begin = Instant::now();
        match until(RESUMED_MAX, &|status| state(status) == Some(LinkState::Used) && lent_pages(status) > before)? {
            Ok(_) => Ok(begin.elapsed()),
            Err(_) => Err("the lender is not used again"),
        }
    };
    drop(worker);
    side.end()?;
    Ok(match outcome {
        Ok(after) => {
            println!(
                "after {} s of {latency_ms} ms, the lender was used again within {} ms",
                peak.as_secs(),
                after.as_millis()
            );
            u64::try_from(after.as_millis()).unwrap_or(u64::MAX).into()
        }
        Err(what) => {
            println!("{name}: {what}");
            Value::Null
        }
    })
}
