//! `random-read`: one thread, 4 KiB at random offsets of one file, four times as large as the
//! borrower's memory.

use super::plot::{Chart, Line, Mark};
use super::record::{Mean, Records};
use super::report::{Column, Finding, Results};
use super::{ALL_FITS_GIB, BASELINE, Case, FILLING_READS_PER_S, FILLING_THREADS, Run, compare};
use crate::worker::{Order, Workload};
use crate::world::Worker;
use page::PAGE_SIZE;
use testbed::Failure;

/// The papers' sizes.
const LOCAL_GIB: f64 = 1.0;
const DATA_GIB: f64 = 4.0;
/// Reads before the measurement, when the caches are full.
const MIXING_READS_PER_PAGE: u64 = 2;
const MIXING_READS_PER_PAGE_QUICK: u64 = 1;
/// The papers' results when everything fits: reads a second of the baseline, the exclusive and the
/// inclusive strategy, and with all memory local.
const PAPER_BASELINE: f64 = 166.0;
const PAPER_EXCLUSIVE: f64 = 5885.0;
const PAPER_INCLUSIVE: f64 = 6310.0;
const PAPER_IDEAL: f64 = 40400.0;

/// Counters for each read.
const COUNTERS: [(&str, super::Counter); 2] =
    [("gets_per_read", |of| of.lender_pages), ("puts_per_read", |of| of.put_pages)];

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    compare(run, &run.file("random"), &measure)
}

/// Fills the caches, then measures the rounds.
fn measure(run: &mut Run<'_>, case: &Case<'_>) -> Result<(), Failure> {
    let world = run.world;
    let mut worker = world.worker(case.cache_bytes)?;
    run.fill_caches_from_file(case, &mut worker, PAGE_SIZE)?;
    // Each page was read once, and again. The measured load reads some pages twice before others:
    // these reads bring the caches into that state.
    let pages = case.data_bytes / PAGE_SIZE as u64;
    let reads_per_page = world.extent.choose(MIXING_READS_PER_PAGE, MIXING_READS_PER_PAGE_QUICK, MIXING_READS_PER_PAGE);
    let ms = (reads_per_page * pages * 1000 / u64::from(FILLING_READS_PER_S)).max(200);
    worker.obey(&order(case, FILLING_THREADS, ms, world.seed.wrapping_add(world.seed)))?;
    rounds(run, case, &mut worker)
}

/// Reads for so long.
pub fn order(case: &Case<'_>, threads: usize, ms: u64, seed: u64) -> Order {
    let (path, len_bytes, workload) = (case.path.clone(), case.data_bytes, Workload::Random { threads });
    Order::Use { path, len_bytes, workload, ms, seed }
}

/// Measures the rounds, when the caches are filled.
pub fn rounds(run: &mut Run<'_>, case: &Case<'_>, worker: &mut Worker<'_>) -> Result<(), Failure> {
    let (extent, seed) = (run.world.extent, run.world.seed);
    run.disk_as_measured()?;
    // Requests that the kernel passes at once after a change of the limit do not show the disk's
    // speed.
    worker.obey(&order(case, 1, extent.choose(2000, 1000, 100), seed))?;
    for round in 0..run.rounds {
        let before = case.counters(&COUNTERS)?;
        let ms = extent.choose(5000, 2000, 200);
        let report = worker.obey(&order(case, 1, ms, seed.wrapping_add(round as u64 + 1)))?;
        let reads = report.operations as f64;
        let mut values = case.grown_for_each(&COUNTERS, &before, reads)?;
        values.insert("iops".to_owned(), reads / report.seconds);
        run.keep(case, round, values)?;
    }
    Ok(())
}

pub fn results(records: &Records) -> Results {
    let baseline = records.baseline(BASELINE, "iops");
    let speed_up = |variant: &str, size: f64| records.over("iops", (variant, size), (BASELINE, 0.0));
    let mark = |value: f64, label| Mark { x: ALL_FITS_GIB, value: value / PAPER_BASELINE, label };
    let over = |one: &str, other: &str, size: f64| records.over("iops", (one, size), (other, size));
    let sizes = records.xs("exclusive");
    let middle = sizes.iter().copied().filter(|size| size + LOCAL_GIB < DATA_GIB).fold(f64::NAN, f64::max);
    let all = |variant: &str| speed_up(variant, ALL_FITS_GIB);
    let put_finding = |variant: &str, holds: fn(Mean) -> Option<bool>, paper: &str| {
        let puts = records.mean(variant, ALL_FITS_GIB, "puts_per_read", 1.0);
        let said = puts.map_or("not measured".to_owned(), |puts| puts.text(3));
        Finding {
            text: format!("puts for each read, {variant}, all fits: {said} (the paper: {paper})"),
            holds: puts.and_then(holds),
        }
    };
    Results {
        charts: vec![
            Chart {
                name: "speed-up",
                title: "Random reads of 4 KiB: speed-up over no Puma".to_owned(),
                y_label: "times the baseline (logarithmic)",
                is_log: true,
                lines: Line::of_all(records, "iops", baseline),
                marks: vec![mark(PAPER_EXCLUSIVE, "exclusive, 35 ×"), mark(PAPER_IDEAL, "all local, 243 ×")],
            },
            Chart {
                name: "puts",
                title: "Random reads of 4 KiB: pages sent to the lender".to_owned(),
                y_label: "puts for each read",
                is_log: false,
                lines: Line::of_variants(records, "puts_per_read", 1.0),
                marks: Vec::new(),
            },
        ],
        columns: vec![
            Column { key: "iops", name: "reads/s", decimals: 1 },
            Column { key: "gets_per_read", name: "gets for each read", decimals: 3 },
            Column { key: "puts_per_read", name: "puts for each read", decimals: 3 },
        ],
        findings: vec![
            Finding::at_least("exclusive, all fits, over no Puma", all("exclusive"), 40.0, &times(PAPER_EXCLUSIVE)),
            Finding::at_least(
                "non-inclusive, all fits, over no Puma",
                all("non-inclusive"),
                40.0,
                &times(PAPER_INCLUSIVE),
            ),
            Finding::at_least(
                &format!("exclusive over non-inclusive while not all fits ({middle} GiB lent)"),
                over("exclusive", "non-inclusive", middle),
                1.0,
                "exclusive is better until all fits",
            ),
            Finding::at_least(
                "non-inclusive over exclusive when all fits",
                over("non-inclusive", "exclusive", ALL_FITS_GIB),
                1.0,
                &format!("{:.2}", PAPER_INCLUSIVE / PAPER_EXCLUSIVE),
            ),
            put_finding("non-inclusive", |puts| puts.is_at_most(0.05), "falls to 0"),
            put_finding("exclusive", |puts| puts.is_at_least(0.5), "constant, as each read evicts a page"),
        ],
        why: "The threshold is the disk's: as long as one read in a hundred goes there, it takes most of the time. How high it jumps then is a matter of \
              what a get takes: in the paper some 150 µs between two virtual machines.",
    }
}

fn times(paper_reads_per_s: f64) -> String {
    format!("{:.1} ×", paper_reads_per_s / PAPER_BASELINE)
}
