//! `latency`: other experiments, when everything fits, over a network that is up to 2 ms slower,
//! with the gate and without.

use super::plot::{Chart, Line};
use super::record::{Mean, Records};
use super::report::{Column, Finding, Results};
use super::{
    ALL_FITS_GIB, BASELINE, Case, FILLING_BLOCK_BYTES, Measure, Run, Study, Subject, blast, local_alone, postmark,
    random_read, sequential_read,
};
use crate::worker::Order;
use std::time::Duration;
use testbed::{Failure, Relay};

/// The additional time of each round trip, in ms.
const LATENCIES_MS: [f64; 5] = [0.0, 0.5, 1.0, 1.5, 2.0];
const LATENCIES_QUICK_MS: [f64; 2] = [0.0, 2.0];
/// The filter is off: it would leave the stream to the disk, whatever the latency.
const OPTIONS: [&str; 5] = ["--strategy", "non-inclusive", "--filter", "off", "--gate"];
/// Passes before the measurement, whatever the gate does with them.
const FIRST_PASSES: u64 = 2;
const FIRST_PASSES_QUICK: u64 = 1;
const GATES: [&str; 2] = ["on", "off"];
/// Postmark's sizes are at least an eighth of the paper's. With less, the memory that a mount needs
/// exceeds the program's own; the baseline, which has as much, would then differ from the paper's.
const POSTMARK_SCALE_MAX: f64 = 8.0;
/// The minimum over no Puma (issue: with filter and gate).
const WANTED: f64 = 0.97;

/// A measured load: its name, its figure, and its function.
type Use = (&'static str, &'static str, fn(&mut Run<'_>, &Study<'_>) -> Result<(), Failure>);
const USES: [Use; 4] = [
    ("random", "iops", |run, study| study(run, &run.file("random"), &measure_random)),
    ("sequential", "mb_per_s", sequential_read::study),
    ("blast", "searches_per_h", blast::study),
    ("postmark", "transactions_per_s", study_postmark),
];
/// Loads that a quick run leaves out; a tiny one has the first.
const LONG: [&str; 3] = ["sequential", "blast", "postmark"];

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    let left_out = run.world.extent.choose(&[][..], &LONG, &LONG[1..]);
    for (name, _, study) in USES.iter().filter(|(name, ..)| !left_out.contains(name)) {
        study(run, &|run, subject, measure| vary(run, name, subject, measure))?;
    }
    Ok(())
}

fn vary(run: &mut Run<'_>, name: &str, subject: &Subject<'_>, measure: &Measure<'_>) -> Result<(), Failure> {
    run.baselines((&baseline_of(name), 0.0), subject, measure)?;
    for gate in GATES {
        for x in run.world.extent.choose(&LATENCIES_MS[..], &LATENCIES_QUICK_MS, &LATENCIES_QUICK_MS[..1]) {
            let (variant, x) = (&variant_of(name, gate), *x);
            if run.has(variant, x) {
                continue;
            }
            let lender = run.lend(ALL_FITS_GIB)?;
            // Slow from the beginning, as the papers' network was.
            let relay = Relay::start(lender.address)?;
            relay.delay(Duration::from_secs_f64(x / 1e3 / 2.0));
            let options = [&OPTIONS[..], &[gate]].concat();
            run.with_puma(subject, (variant, x), (&lender, relay.address()), &options, measure)?;
        }
    }
    Ok(())
}

fn study_postmark(run: &mut Run<'_>, study: &Study<'_>) -> Result<(), Failure> {
    let asked = run.scale;
    run.scale = asked.min(POSTMARK_SCALE_MAX);
    postmark::study(run, study)?;
    run.scale = asked;
    Ok(())
}

/// The caches are filled from the disk at its own speed: the gate's decisions depend on this speed.
fn measure_random(run: &mut Run<'_>, case: &Case<'_>) -> Result<(), Failure> {
    let mut worker = run.world.worker(case.cache_bytes)?;
    run.disk_as_measured()?;
    let (threads, block_bytes) = (1, FILLING_BLOCK_BYTES);
    let passes = run.world.extent.choose(FIRST_PASSES, FIRST_PASSES_QUICK, FIRST_PASSES_QUICK);
    for pass in 0..passes {
        let (path, len_bytes, seed) = (case.path.clone(), case.data_bytes, run.world.seed.wrapping_sub(pass));
        worker.obey(&Order::Once { path, len_bytes, block_bytes, threads, seed })?;
    }
    // The averages of the gate are those of a minute.
    let ms = run.world.extent.choose(60_000, 7_000, 100);
    worker.obey(&random_read::order(case, 1, ms, run.world.seed.wrapping_sub(passes)))?;
    random_read::rounds(run, case, &mut worker)
}

fn variant_of(name: &str, gate: &str) -> String {
    format!("{name}, gate {gate}")
}

fn baseline_of(name: &str) -> String {
    format!("{name}, {BASELINE}")
}

pub fn results(records: &Records) -> Results {
    let line_over = |baseline: &str, name: &str, key: &str, gate: &str| {
        let variant = variant_of(name, gate);
        let speed_up = |x| Some((x, records.over(key, (&variant, x), (baseline, 0.0))?));
        let points: Vec<(f64, Mean)> = records.xs(&variant).into_iter().filter_map(speed_up).collect();
        Line { name: variant.clone(), points }
    };
    let line = |name: &str, key: &str, gate: &str| line_over(&baseline_of(name), name, key, gate);
    let chart = |name: &'static str, uses: &[Use]| Chart {
        name,
        title: "Over a slower network, when all fits: speed-up over no Puma".to_owned(),
        y_label: "times the baseline (logarithmic)",
        is_log: true,
        lines: uses.iter().flat_map(|(name, key, _)| GATES.map(|gate| line(name, key, gate))).collect(),
        marks: Vec::new(),
    };
    let least = |line: Line| {
        let points = line.points.into_iter().map(|(_, mean)| mean);
        points.min_by(|one, other| one.mean.total_cmp(&other.mean))
    };
    let finding = |line: Line, over: &str| {
        let what = format!("{}, at the latency where it is slowest, over no Puma{over}", line.name);
        let paper = "with the gate nothing but Postmark is slower than without Puma";
        Finding::at_least(&what, least(line), WANTED, paper)
    };
    let without = |line: Line| {
        let what = format!("{}, at the latency where it is slowest, over no Puma", line.name);
        Finding::at_most(&what, least(line), 1.0, "several are slower")
    };
    let (writer, writer_key, _) = USES[3];
    let alone = line_over(&local_alone(&baseline_of(writer)), writer, writer_key, GATES[0]);
    Results {
        charts: vec![chart("speed-up", &USES[..2]), chart("programs", &USES[2..])],
        columns: vec![
            Column { key: "iops", name: "reads/s", decimals: 1 },
            Column { key: "mb_per_s", name: "MB/s", decimals: 1 },
            Column { key: "searches_per_h", name: "searches/h", decimals: 0 },
            Column { key: "transactions_per_s", name: "transactions/s", decimals: 0 },
        ],
        findings: USES
            .iter()
            .flat_map(|(name, key, _)| [finding(line(name, key, GATES[0]), ""), without(line(name, key, GATES[1]))])
            .chain([finding(alone, " with the local memory alone")])
            .collect(),
        why: "A gain lasts as long as a round trip is shorter than a seek of the disk, or than what the disk takes for a window of a stream: for all of these \
              latencies. Beyond the paper, its thresholds do not count where the disk is slower than the lender by far, so the gate leaves the lender alone \
              only where that is not so. Postmark's sizes are an eighth of the paper's at the least. Its baseline has the memory that a mount needs beside its \
              own; the one with the local memory alone is the paper's.",
    }
}
