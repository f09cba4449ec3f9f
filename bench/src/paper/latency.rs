//! `latency`: the reads of the other experiments, when all fits, over a network that is up to 2 ms slower, with the gate and without.

use super::plot::{Chart, Line};
use super::record::{Mean, Records};
use super::report::{Column, Finding, Results};
use super::{ALL_FITS_GIB, BASELINE, Case, Run, random_read, sequential_read};
use crate::worker::Order;
use std::time::Duration;
use testbed::{Failure, Relay};

/// What is added to each round trip, in ms.
const LATENCIES_MS: [f64; 5] = [0.0, 0.5, 1.0, 1.5, 2.0];
const LATENCIES_QUICK_MS: [f64; 3] = [0.0, 1.0, 2.0];
/// The filter is off: it would leave the stream to the disk, whatever the latency.
const OPTIONS: [&str; 5] = ["--strategy", "non-inclusive", "--filter", "off", "--gate"];
const GATES: [&str; 2] = ["on", "off"];
/// No Puma, at the least (issue: with filter and gate).
const WANTED: f64 = 0.97;

/// A way to read: its name, its figure, and how it is measured.
type Reads = (&'static str, &'static str, fn(&mut Run<'_>, &Case<'_>) -> Result<(), Failure>);
const READS: [Reads; 2] = [("random", "iops", measure_random), ("sequential", "mb_per_s", sequential_read::measure)];

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    for (name, _, measure) in READS {
        let subject = run.file(name);
        run.without_puma((&baseline_of(name), 0.0), &subject, subject.local_bytes, measure)?;
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
                run.with_puma(&subject, (variant, x), (&lender, relay.address()), &options, measure)?;
            }
        }
    }
    Ok(())
}

/// The caches are filled by streams: beside these the disk is slow enough for the gate to let pages through to the lender.
fn measure_random(run: &mut Run<'_>, case: &Case<'_>) -> Result<(), Failure> {
    let mut worker = run.world.worker(case.cache_bytes)?;
    run.disk_as_streamed()?;
    let order = Order::Pass { path: case.path.clone(), len_bytes: case.data_bytes };
    // As often as the sequential reads do, whatever the gate makes of it.
    for _ in 0..sequential_read::FIRST_PASSES {
        worker.obey(&order)?;
    }
    random_read::rounds(run, case, &mut worker)
}

fn variant_of(name: &str, gate: &str) -> String {
    format!("{name}, gate {gate}")
}

fn baseline_of(name: &str) -> String {
    format!("{name}, {BASELINE}")
}

pub fn results(records: &Records) -> Results {
    let line = |name: &str, key: &str, gate: &str| {
        let variant = variant_of(name, gate);
        let speed_up = |x| Some((x, records.over(key, (&variant, x), (&baseline_of(name), 0.0))?));
        let points: Vec<(f64, Mean)> = records.xs(&variant).into_iter().filter_map(speed_up).collect();
        Line { name: variant.clone(), points }
    };
    let lines = READS.iter().flat_map(|(name, key, _)| GATES.map(|gate| line(name, key, gate))).collect();
    let finding = |name: &str, key: &str| {
        let points = line(name, key, GATES[0]).points.into_iter().map(|(_, mean)| mean);
        let least = points.min_by(|one, other| one.mean.total_cmp(&other.mean));
        let what = format!("{name}, gate on, at the latency where it is slowest, over no Puma");
        Finding::at_least(&what, least, WANTED, "with the gate nothing but Postmark is slower than without Puma")
    };
    Results {
        charts: vec![Chart {
            name: "speed-up",
            title: "Reads over a slower network: speed-up over no Puma".to_owned(),
            y_label: "times the baseline (logarithmic)",
            is_log: true,
            lines,
            marks: Vec::new(),
        }],
        columns: vec![
            Column { key: "iops", name: "reads/s", decimals: 1 },
            Column { key: "mb_per_s", name: "MB/s", decimals: 1 },
        ],
        findings: READS.iter().map(|(name, key, _)| finding(name, key)).collect(),
        why: "Without the gate a stream waits for the network with each of its windows, and is slower than the disk as soon as that takes longer; with it \
              the lender is left alone then. Random reads gain as long as a round trip is shorter than a seek of the disk.",
    }
}
