//! `sequential-read`: one file, four times as large as the borrower's memory, from end to end, over
//! and over.

use super::plot::{Chart, Line};
use super::record::Records;
use super::report::{Column, Finding, Results};
use super::{BASELINE, Case, Run, Study, compare};
use crate::worker::Order;
use page::PAGE_SIZE;
use testbed::Failure;

/// Passes before the measurement: the filter learns, and the caches are filled.
const FIRST_PASSES: usize = 2;

/// Counters for each page.
const COUNTERS: [(&str, super::Counter); 2] =
    [("gets_per_page", |of| of.lender_pages), ("puts_per_page", |of| of.put_pages)];

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    run.variants_quick = ["exclusive", "exclusive, filter"];
    study(run, &compare)
}

pub fn study(run: &mut Run<'_>, study: &Study<'_>) -> Result<(), Failure> {
    study(run, &run.file("sequential"), &measure)
}

fn measure(run: &mut Run<'_>, case: &Case<'_>) -> Result<(), Failure> {
    let mut worker = run.world.worker(case.cache_bytes)?;
    run.disk_as_streamed()?;
    let order = Order::Pass { path: case.path.clone(), len_bytes: case.data_bytes };
    for _ in 0..FIRST_PASSES {
        worker.obey(&order)?;
    }
    let pages = case.data_bytes as f64 / PAGE_SIZE as f64;
    for round in 0..run.rounds {
        let before = case.counters(&COUNTERS)?;
        let report = worker.obey(&order)?;
        let mut values = case.grown_for_each(&COUNTERS, &before, pages)?;
        values.insert("mb_per_s".to_owned(), report.bytes as f64 / report.seconds / 1e6);
        run.keep(case, round, values)?;
    }
    Ok(())
}

pub fn results(records: &Records) -> Results {
    let baseline = records.baseline(BASELINE, "mb_per_s");
    let speed_up = |variant: &str, size: f64| records.over("mb_per_s", (variant, size), (BASELINE, 0.0));
    // The minimum speed-up of a variant at any size.
    let least = |variant: &str| {
        let sizes = records.xs(variant).into_iter().filter_map(|size| speed_up(variant, size));
        sizes.min_by(|one, other| one.mean.total_cmp(&other.mean))
    };
    let with_filter = |variant: &str| {
        let what = format!("{variant}, at the size where it is slowest, over no Puma");
        Finding::at_least(&what, least(variant), 0.97, "the filter keeps it at 1 ×")
    };
    Results {
        charts: vec![Chart {
            name: "speed-up",
            title: "A file read from end to end, over and over: speed-up over no Puma".to_owned(),
            y_label: "times the baseline (logarithmic)",
            is_log: true,
            lines: Line::of_all(records, "mb_per_s", baseline),
            marks: Vec::new(),
        }],
        columns: vec![
            Column { key: "mb_per_s", name: "MB/s", decimals: 1 },
            Column { key: "gets_per_page", name: "gets for each page", decimals: 3 },
            Column { key: "puts_per_page", name: "puts for each page", decimals: 3 },
        ],
        findings: vec![
            with_filter("exclusive, filter"),
            with_filter("non-inclusive, filter"),
            Finding::at_most(
                "exclusive without filter, while not all fits, over no Puma",
                records.xs("exclusive").into_iter().rev().find(|x| *x < 3.0).and_then(|x| speed_up("exclusive", x)),
                1.0,
                "thrashes until all fits",
            ),
        ],
        why: "Without the filter what is lent is given up before it is read again, unless all fits: puts that nobody gets. The paper's \
              figure has no numbers in the text but that it thrashes then. With the filter a stream is left to the disk until it is known to come \
              back while a lender has room for it; the paper's leaves all to the disk.",
    }
}
