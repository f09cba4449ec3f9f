//! `ssd-cache`: random reads with dm-cache on a fast disk, and with Puma, in virtual machines
//! (`tests/vm/ssd-cache`): this kernel may have no device mapper.

use super::plot::{Chart, Line};
use super::record::Records;
use super::report::{Column, Finding, Results};
use super::{BASELINE, Run};
use std::process::Command;
use testbed::Failure;

/// The program, relative to the root of the sources.
const PROGRAM: &str = "tests/vm/ssd-cache";
const PUMA: &str = "Puma";
const DM_CACHE: &str = "dm-cache";
/// The paper's reads a second (2015, table 2).
const PAPER_PUMA: f64 = 6310.0;
const PAPER_DM_CACHE: f64 = 3250.0;
const PAPER_BASELINE: f64 = 166.0;

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    if [BASELINE, PUMA, DM_CACHE].into_iter().all(|variant| run.has(variant, 0.0)) {
        return Ok(());
    }
    let mut command = Command::new(PROGRAM);
    let seconds = run.world.extent.choose(10, 3, 1);
    command.args(["--scale", &run.scale.to_string(), "--rounds", &run.rounds.to_string()]);
    command.args(["--seconds", &seconds.to_string()]);
    run.keep_what_it_says(PROGRAM, command, &[])
}

pub fn results(records: &Records) -> Results {
    let over = |variant: &str, floor: &str| records.over("iops", (variant, 0.0), (floor, 0.0));
    let times = |value: f64| format!("{:.1} ×", value / PAPER_BASELINE);
    let line = |variant: &str| {
        let mean = over(variant, BASELINE);
        Line { name: variant.to_owned(), points: mean.into_iter().map(|mean| (1.0, mean)).collect() }
    };
    Results {
        charts: vec![Chart {
            name: "speed-up",
            title: "Random reads of 4 KiB in virtual machines: speed-up over the slow disk".to_owned(),
            y_label: "times the baseline (logarithmic)",
            is_log: true,
            lines: [PUMA, DM_CACHE].map(line).into(),
            marks: vec![
                super::plot::Mark { x: 1.0, value: PAPER_PUMA / PAPER_BASELINE, label: "Puma, 38 ×" },
                super::plot::Mark { x: 1.0, value: PAPER_DM_CACHE / PAPER_BASELINE, label: "dm-cache, 20 ×" },
            ],
        }],
        columns: vec![
            Column { key: "iops", name: "reads/s", decimals: 0 },
            Column { key: "cached_share", name: "of the file, what the cache has", decimals: 2 },
        ],
        findings: vec![
            Finding::at_least(
                "Puma, over the slow disk",
                over(PUMA, BASELINE),
                PAPER_PUMA / PAPER_BASELINE,
                &times(PAPER_PUMA),
            ),
            Finding::at_least(
                "dm-cache, over the slow disk",
                over(DM_CACHE, BASELINE),
                PAPER_DM_CACHE / PAPER_BASELINE,
                &times(PAPER_DM_CACHE),
            ),
            Finding::at_least("Puma over dm-cache", over(PUMA, DM_CACHE), 1.0, "1.9 ×"),
        ],
        why: "All of this is in virtual machines, whose disks QEMU slows down; of the table's programs only the random reads are here: Postmark and TPC-H \
              take hours on an emulated processor. The fast disk does 5,000 reads a second at the most, as the paper's SSD from a virtual machine, but takes no time for fewer. Where the machines are emulated, for want of KVM, the \
              processor is many times slower and the disks are not: then dm-cache, which asks little of it, is the faster one.",
    }
}
