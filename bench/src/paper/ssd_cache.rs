//! `ssd-cache`: random reads with dm-cache on a fast disk, and with Puma, in virtual machines (`vm/ssd-cache`): this kernel may have no device mapper.

use super::plot::{Chart, Line};
use super::record::Records;
use super::report::{Column, Finding, Results};
use super::{BASELINE, Case, Run};
use crate::program::Program;
use serde::Deserialize;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use testbed::Failure;

/// The program, from the root of the sources.
const PROGRAM: &str = "vm/ssd-cache";
const PUMA: &str = "Puma";
const DM_CACHE: &str = "dm-cache";
/// The paper's reads a second (2015, table 2).
const PAPER_PUMA: f64 = 6310.0;
const PAPER_DM_CACHE: f64 = 3250.0;
const PAPER_BASELINE: f64 = 166.0;

/// What it says of a round.
#[derive(Deserialize)]
struct Round {
    variant: String,
    round: usize,
    iops: f64,
    /// Of the file, what the cache had.
    cached_share: f64,
    /// Its kernel, and what it ran on.
    machine: String,
}

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    if [BASELINE, PUMA, DM_CACHE].into_iter().all(|variant| run.has(variant, 0.0)) {
        return Ok(());
    }
    if !PathBuf::from(PROGRAM).exists() {
        return Err(Failure::Problem(format!("there is no {PROGRAM} here: run it from the root of the sources")));
    }
    let mut command = Command::new(PROGRAM);
    let seconds = run.world.extent.choose(10, 3, 1);
    command.args(["--scale", &run.scale.to_string(), "--rounds", &run.rounds.to_string()]);
    command.args(["--seconds", &seconds.to_string()]).stdin(Stdio::null());
    let mut program = Program::start(run.world, "ssd-cache", command, &[])?;
    while let Some(line) = program.next_line()? {
        if line.starts_with('#') {
            println!("{line}");
            continue;
        }
        let said: Round = serde_json::from_str(&line)
            .map_err(|error| Failure::Problem(format!("{PROGRAM} said {line:?}: {error}")))?;
        let case = Case {
            variant: &said.variant,
            x: 0.0,
            cache_bytes: 0,
            data_bytes: 0,
            path: PathBuf::new(),
            side: None,
            lender: None,
        };
        let values = [("iops".to_owned(), said.iops), ("cached_share".to_owned(), said.cached_share)];
        run.keep_from(&case, said.round, values.into(), Some(said.machine))?;
    }
    Ok(())
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
