//! `dynamic`: the lender takes its memory back while it is used, and lends it again.
//!
//! Four parts of ten minutes in the paper, as long as the scale makes them here: all is lent; the lender allocates all of its memory, bit by
//! bit; holds it; has freed it.

use super::plot::{Chart, Line, Mark};
use super::record::{Mean, Records};
use super::report::{Column, Finding, Results};
use super::{ALL_FITS_GIB, BASELINE, Case, DATA_BYTES, FILLING_READS_PER_S, LOCAL_BYTES, Run};
use crate::figures::p99;
use crate::worker::{Order, Report, Workload};
use crate::world::{Lender, Side, Worker};
use page::PAGE_SIZE;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use testbed::Failure;

/// The paper's: bytes of a read, and minutes of a part.
const READ_BYTES: usize = 64 << 10;
const PART_MIN: u64 = 10;
const PARTS: u64 = 4;
/// Read between two looks at the clock.
const STEP_BYTES: u64 = 32 * READ_BYTES as u64;
/// Threads that fill the caches, and how often they read as many pages as there are.
const FILLING_THREADS: usize = 16;
const FILLINGS: u64 = 3;
/// No part is shorter: what is lent has to go and to come back in it.
const PART_MS_MIN: u64 = 1000;

const LENT: &str = "with a lender";
/// Beside whom memory is allocated.
const BESIDE_FULL: &str = "allocation beside a lender";
const BESIDE_EMPTY: &str = "allocation beside an empty lender";
/// Of the allocation beside an empty lender, at the most (issue).
const WANTED: f64 = 1.1;

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    run.rounds = run.world.extent.choose(3, 2, 1);
    let part =
        Duration::from_millis(((PART_MIN * 60_000) as f64 / run.scale) as u64).max(Duration::from_millis(PART_MS_MIN));
    run.without_puma(BASELINE, &run.file("dynamic"), run.bytes(LOCAL_BYTES), |run, case| {
        let mut worker = run.world.worker(case.cache_bytes)?;
        fill(run, case, &mut worker)?;
        for round in 0..run.rounds {
            let report = read(run, case, &mut worker, run.world.extent.choose(8, 2, 1) * STEP_BYTES, round as u64)?;
            run.keep(case, round, BTreeMap::from([("mb_per_s".to_owned(), mb_per_s(report.bytes, report.seconds))]))?;
        }
        Ok(())
    })?;
    for round in 0..run.rounds {
        if !run.records.has(LENT, 0.0, round) || !run.records.has(BESIDE_FULL, 0.0, round) {
            with_a_lender(run, round, part)?;
        }
        if !run.records.has(BESIDE_EMPTY, 0.0, round) {
            let lender = run.lend(ALL_FITS_GIB)?;
            let mut other = Worker::start(&run.world.interrupt, &[&lender.group])?;
            let report = other.obey(&allocation(run, part, Duration::ZERO))?;
            keep_allocation(run, BESIDE_EMPTY, round, &report)?;
        }
    }
    Ok(())
}

/// All four parts.
fn with_a_lender(run: &mut Run<'_>, round: usize, part: Duration) -> Result<(), Failure> {
    let (cache_bytes, data_bytes) = (run.bytes(LOCAL_BYTES), run.bytes(DATA_BYTES));
    let lender = run.lend(ALL_FITS_GIB)?;
    let side = run.world.mount("dynamic", data_bytes, Some(lender.address), &["--gate", "off"])?;
    side.drop_cached()?;
    let file = side.file.clone();
    let case = |x| Case { variant: LENT, x, cache_bytes, data_bytes, path: file.clone(), side: None };
    let mut worker = run.world.worker(cache_bytes)?;
    fill(run, &case(0.0), &mut worker)?;
    let mut other = Worker::start(&run.world.interrupt, &[&lender.group])?;
    let (minutes, allocated) = timeline(run, &case(0.0), &lender, &side, part, (&mut worker, &mut other))?;
    drop((worker, other));
    side.end()?;
    keep_allocation(run, BESIDE_FULL, round, &allocated)?;
    for (minute, values) in minutes {
        run.keep(&case(minute as f64), round, values)?;
    }
    Ok(())
}

/// What was read in each minute of the paper, and how the allocation went.
type Timeline = (BTreeMap<u64, BTreeMap<String, f64>>, Report);

fn timeline(
    run: &Run<'_>,
    case: &Case<'_>,
    lender: &Lender,
    side: &Side,
    part: Duration,
    (worker, other): (&mut Worker<'_>, &mut Worker<'_>),
) -> Result<Timeline, Failure> {
    let mut minutes: BTreeMap<u64, (u64, f64, u64)> = BTreeMap::new();
    let (mut is_allocating, mut step) = (false, 0);
    let begin = Instant::now();
    loop {
        let minute = (begin.elapsed().as_secs_f64() / part.as_secs_f64() * PART_MIN as f64) as u64;
        if minute >= PARTS * PART_MIN {
            break;
        }
        if minute >= PART_MIN && !is_allocating {
            other.begin(&allocation(run, part, part))?;
            is_allocating = true;
        }
        let report = read(run, case, worker, STEP_BYTES, step)?;
        step += 1;
        let stored_pages = lender.stored_pages()?;
        let (bytes, seconds, pages) = minutes.entry(minute).or_default();
        *bytes += report.bytes;
        *seconds += report.seconds;
        *pages = stored_pages;
    }
    side.settle()?;
    let values = |(bytes, seconds, pages): (u64, f64, u64)| {
        let lent_mib = (pages * PAGE_SIZE as u64) as f64 / f64::from(1 << 20);
        BTreeMap::from([("mb_per_s".to_owned(), mb_per_s(bytes, seconds)), ("lent_mib".to_owned(), lent_mib)])
    };
    let minutes = minutes.into_iter().map(|(minute, sums)| (minute, values(sums))).collect();
    Ok((minutes, other.end(part * PARTS as u32)?))
}

/// All memory of the lender.
fn allocation(run: &Run<'_>, over: Duration, hold: Duration) -> Order {
    let bytes = run.bytes((ALL_FITS_GIB * (1u64 << 30) as f64) as u64);
    Order::Grow { bytes, over_ms: over.as_millis() as u64, hold_ms: hold.as_millis() as u64 }
}

fn keep_allocation(run: &mut Run<'_>, variant: &str, round: usize, report: &Report) -> Result<(), Failure> {
    let mut times = report.allocation_ns.clone();
    times.sort_unstable();
    let mean_us = times.iter().sum::<u64>() as f64 / times.len().max(1) as f64 / 1e3;
    let values = [("us_per_mib", mean_us), ("p99_us_per_mib", p99(&times) as f64 / 1e3)];
    let values = values.map(|(key, value)| (key.to_owned(), value));
    println!("{variant}, round {}: {mean_us:.0} µs a MiB", round + 1);
    run.records.add(variant, 0.0, round, BTreeMap::from(values))
}

fn fill(run: &Run<'_>, case: &Case<'_>, worker: &mut Worker<'_>) -> Result<(), Failure> {
    run.disk_for_filling()?;
    let pages = case.data_bytes / PAGE_SIZE as u64;
    let ms = (FILLINGS * pages * 1000 / u64::from(FILLING_READS_PER_S)).max(run.world.extent.choose(1000, 1000, 200));
    let (path, len_bytes, workload) =
        (case.path.clone(), case.data_bytes, Workload::Random { threads: FILLING_THREADS });
    worker.obey(&Order::Use { path, len_bytes, workload, ms, seed: run.world.seed })?;
    run.disk_as_measured()?;
    // What the kernel lets pass at once after a change of the limit is not the disk's speed.
    read(run, case, worker, STEP_BYTES, 0).map(drop)
}

fn read(
    run: &Run<'_>,
    case: &Case<'_>,
    worker: &mut Worker<'_>,
    total_bytes: u64,
    nth: u64,
) -> Result<Report, Failure> {
    let (path, len_bytes, seed) = (case.path.clone(), case.data_bytes, run.world.seed.wrapping_add(1 + nth));
    worker.obey(&Order::Fragments { path, len_bytes, fragment_bytes: READ_BYTES, total_bytes, seed })
}

fn mb_per_s(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e6
}

pub fn results(records: &Records) -> Results {
    let baseline = records.baseline(BASELINE, "mb_per_s");
    let line = |name: &str, key: &str, unit: f64| {
        let points = records.xs(LENT).into_iter().filter_map(|x| Some((x, records.mean(LENT, x, key, unit)?)));
        Line { name: name.to_owned(), points: points.collect() }
    };
    let over = |variant: &str, floor: &str, key: &str| -> Option<Mean> {
        let floor = records.mean(floor, 0.0, key, 1.0)?.mean;
        records.mean(variant, 0.0, key, floor)
    };
    let at = |minute: u64| records.mean(LENT, minute as f64, "mb_per_s", 1.0);
    let recovered =
        at(PART_MIN - 1).and_then(|before| records.mean(LENT, (PARTS * PART_MIN - 1) as f64, "mb_per_s", before.mean));
    let held = records.mean(LENT, (3 * PART_MIN - 1) as f64, "mb_per_s", baseline);
    let part = |nth: u64, label| Mark { x: (nth * PART_MIN) as f64, value: 1.0, label };
    Results {
        charts: vec![
            Chart {
                name: "speed-up",
                title: "Random reads of 64 KiB while the lender takes its memory back: speed-up over no Puma"
                    .to_owned(),
                y_label: "times the baseline (logarithmic)",
                is_log: true,
                lines: vec![line(LENT, "mb_per_s", baseline)],
                marks: vec![part(1, "allocates"), part(2, "holds"), part(3, "frees")],
            },
            Chart {
                name: "lent",
                title: "Memory that is lent meanwhile".to_owned(),
                y_label: "MiB",
                is_log: false,
                lines: vec![line("lent", "lent_mib", 1.0)],
                marks: Vec::new(),
            },
        ],
        columns: vec![
            Column { key: "mb_per_s", name: "MB/s", decimals: 1 },
            Column { key: "lent_mib", name: "lent, MiB", decimals: 0 },
            Column { key: "us_per_mib", name: "allocation, µs/MiB", decimals: 0 },
            Column { key: "p99_us_per_mib", name: "99th percentile, µs/MiB", decimals: 0 },
        ],
        findings: vec![
            Finding::at_most(
                "allocation beside a lender that is in use, over that beside an empty one",
                over(BESIDE_FULL, BESIDE_EMPTY, "us_per_mib"),
                WANTED,
                "1.8 ms against less than 1 ms; with ballooning 20 ms, some more than 1 s",
            ),
            Finding::at_least("reads while the lender holds its memory, over no Puma", held, 0.97, "as without"),
            Finding::at_least(
                "reads at the end, when the memory has been free again for a while, over those at the beginning",
                recovered,
                0.9,
                "they recover",
            ),
        ],
        why: "What is lent goes as soon as the lender's machine wants it, and reads fall to the disk's speed; what is read afterwards is lent again.",
    }
}
