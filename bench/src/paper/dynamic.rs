//! `dynamic`: the lender takes its memory back while it is used, and lends it again.
//!
//! Four parts of ten minutes in the paper, here divided by the scale: all is lent; the lender
//! allocates all of its memory, bit by bit; holds it; has freed it.

use super::plot::{Chart, Line, Mark};
use super::record::Records;
use super::report::{Column, Finding, Results};
use super::{BASELINE, Case, DATA_BYTES, LENDER_RESERVE_BYTES, LOCAL_BYTES, Run};
use crate::figures::p99;
use crate::worker::{ALLOCATION_STEP_BYTES, Order, Report};
use crate::world::{Lender, Worker};
use page::PAGE_SIZE;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use testbed::Failure;

/// The paper's values: bytes of a read, memory of the lender, and minutes of a part.
const READ_BYTES: usize = 64 << 10;
const LENT_GIB: f64 = 4.5;
const PART_MIN: u64 = 10;
const PARTS: u64 = 4;
const WITH_A_LENDER: Range<u64> = 0..PARTS * PART_MIN;
const ALLOCATING: Range<u64> = PART_MIN..2 * PART_MIN;
/// Memory that the lender may still use for each earlier page.
const TABLE_BYTES: u64 = 40;
/// Bytes read between two checks of the clock.
const STEP_BYTES: u64 = 32 * READ_BYTES as u64;
/// In a quick run the papers' minutes are shorter by this factor.
const QUICK_TIMES_AS_FAST: u64 = 2;
/// The minimum length of a part: lent pages have to disappear and to come back in it.
const PART_MS_MIN: u64 = 1000;

const LENT: &str = "with a lender";
/// The variants of the allocation.
const BESIDE_FULL: &str = "allocation beside a lender";
const BESIDE_EMPTY: &str = "allocation beside an empty lender";
/// The maximum over the allocation next to an empty lender (issue).
const WANTED: f64 = 1.1;

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    run.rounds = run.world.extent.choose(5, 2, 1);
    let subject = run.file("dynamic");
    run.without_puma((BASELINE, 0.0), &subject, subject.local_bytes, &|run, case| {
        let mut worker = run.world.worker(case.cache_bytes)?;
        fill(run, case, &mut worker)?;
        for round in 0..run.rounds {
            let report = read(run, case, &mut worker, run.world.extent.choose(16, 8, 1) * STEP_BYTES, round as u64)?;
            run.keep(case, round, BTreeMap::from([("mb_per_s".to_owned(), mb_per_s(report.bytes, report.seconds))]))?;
        }
        Ok(())
    })?;
    for round in 0..run.rounds {
        for (variant, timeline, minutes) in [(BESIDE_FULL, Some(LENT), WITH_A_LENDER), (BESIDE_EMPTY, None, ALLOCATING)]
        {
            if !run.records.has(variant, 0.0, round) {
                beside(run, round, variant, timeline, minutes)?;
            }
        }
    }
    Ok(())
}

/// Makes the lender's machine allocate its memory during reads, with that lender or without one.
fn beside(
    run: &mut Run<'_>,
    round: usize,
    variant: &str,
    timeline: Option<&str>,
    minutes: Range<u64>,
) -> Result<(), Failure> {
    let (cache_bytes, data_bytes) = (run.bytes(LOCAL_BYTES), run.bytes(DATA_BYTES));
    let lender = run.lend(LENT_GIB)?;
    let mut other = Worker::start(&run.world.interrupt, &[&lender.group])?;
    // All memory that it can get: the lender keeps its reserve free, and stores the places of
    // earlier pages for a while.
    let tables_bytes = lender.capacity_bytes / PAGE_SIZE as u64 * TABLE_BYTES;
    let bytes = lender.group_bytes - lender.group.memory_use()?.total_bytes - LENDER_RESERVE_BYTES - tables_bytes;
    let address = timeline.map(|_| lender.address);
    let side = run.world.mount("dynamic", data_bytes, address, &["--strategy", "non-inclusive", "--gate", "off"])?;
    side.drop_cached()?;
    let file = side.file.clone();
    let lender_of_it = timeline.map(|_| &lender);
    let case = Case { variant, x: 0.0, cache_bytes, data_bytes, path: file, side: Some(&side), lender: lender_of_it };
    let mut worker = run.world.worker(cache_bytes)?;
    fill(run, &case, &mut worker)?;
    let (values, allocated) = pass_minutes(run, &case, &lender, minutes, bytes, (&mut worker, &mut other))?;
    drop((worker, other));
    // Those are measured again if it ends here.
    if let Some(variant) = timeline {
        for (minute, values) in values {
            run.keep(&Case { variant, x: minute as f64, path: PathBuf::new(), ..case }, round, values)?;
        }
    }
    keep_allocation(run, &case, round, &allocated)?;
    side.end()
}

/// Bytes read in each minute of the paper, and the result of the allocation.
type Timeline = (BTreeMap<u64, BTreeMap<String, f64>>, Report);

fn pass_minutes(
    run: &Run<'_>,
    case: &Case<'_>,
    lender: &Lender,
    minutes: Range<u64>,
    bytes: u64,
    (worker, other): (&mut Worker<'_>, &mut Worker<'_>),
) -> Result<Timeline, Failure> {
    let part_ms = ((PART_MIN * 60_000) as f64 / run.scale) as u64 / run.world.extent.choose(1, QUICK_TIMES_AS_FAST, 1);
    let part = Duration::from_millis(part_ms.max(PART_MS_MIN));
    let mut sums: BTreeMap<u64, (u64, f64, u64)> = BTreeMap::new();
    let (mut is_allocating, mut step) = (false, 0);
    let begin = Instant::now();
    loop {
        let minute = minutes.start + (begin.elapsed().as_secs_f64() / part.as_secs_f64() * PART_MIN as f64) as u64;
        if !minutes.contains(&minute) {
            break;
        }
        if minute >= ALLOCATING.start && !is_allocating {
            let over_ms = part.as_millis() as u64;
            let hold_ms = if minutes.end > ALLOCATING.end { over_ms } else { 0 };
            other.begin(&Order::Grow { bytes, over_ms, hold_ms })?;
            is_allocating = true;
        }
        let report = read(run, case, worker, STEP_BYTES, step)?;
        step += 1;
        let stored_pages = lender.stored_pages()?;
        let (bytes, seconds, pages) = sums.entry(minute).or_default();
        *bytes += report.bytes;
        *seconds += report.seconds;
        *pages = stored_pages;
    }
    let values = |(bytes, seconds, pages): (u64, f64, u64)| {
        let lent_mib = (pages * PAGE_SIZE as u64) as f64 / f64::from(1 << 20);
        BTreeMap::from([("mb_per_s".to_owned(), mb_per_s(bytes, seconds)), ("lent_mib".to_owned(), lent_mib)])
    };
    let values = sums.into_iter().map(|(minute, sums)| (minute, values(sums))).collect();
    Ok((values, other.end(part * PARTS as u32)?))
}

/// The steps for which the lender has to give memory back; next to an empty lender, as many.
fn keep_allocation(run: &mut Run<'_>, case: &Case<'_>, round: usize, report: &Report) -> Result<(), Failure> {
    let steps = ((case.data_bytes - case.cache_bytes) as usize / ALLOCATION_STEP_BYTES).min(report.allocation_ns.len());
    let mut times = report.allocation_ns[report.allocation_ns.len() - steps..].to_vec();
    times.sort_unstable();
    let mean_us = times.iter().sum::<u64>() as f64 / times.len().max(1) as f64 / 1e3;
    let values = [("us_per_mib", mean_us), ("p99_us_per_mib", p99(&times) as f64 / 1e3)];
    run.keep(case, round, values.map(|(key, value)| (key.to_owned(), value)).into())
}

fn fill(run: &Run<'_>, case: &Case<'_>, worker: &mut Worker<'_>) -> Result<(), Failure> {
    run.fill_caches_from_file(case, worker, READ_BYTES)?;
    run.disk_as_measured()?;
    // Requests that the kernel passes at once after a change of the limit do not show the disk's
    // speed.
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
    worker.obey(&Order::Fragments { path, len_bytes, fragment_bytes: READ_BYTES, total_bytes, mean_bytes: 0, seed })
}

fn mb_per_s(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e6
}

pub fn results(records: &Records) -> Results {
    let baseline = records.baseline(BASELINE, "mb_per_s");
    let line = |name: &str, key: &str, unit: f64| Line { name: name.to_owned(), ..Line::of(records, LENT, key, unit) };
    let end_of = |part: u64| (LENT, (part * PART_MIN - 1) as f64);
    let recovered = records.over("mb_per_s", end_of(PARTS), end_of(1));
    let held = records.over("mb_per_s", end_of(3), (BASELINE, 0.0));
    let part = |nth: u64, label| Mark { x: (nth * PART_MIN) as f64, value: 1.0, label };
    Results {
        charts: vec![
            Chart {
                name: "speed-up",
                title: "Random reads of 64 KiB while the lender needs its memory: speed-up".to_owned(),
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
                records.over("us_per_mib", (BESIDE_FULL, 0.0), (BESIDE_EMPTY, 0.0)),
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
