//! `host-cache`: the hit ratio of a host's page cache for its guest's reads, without and with the
//! guest's evictions, in a virtual machine (`tests/vm/host-cache-ratio`); and the same for two
//! least-recently-used caches at the paper's size.

use super::plot::{Chart, Line};
use super::record::Records;
use super::report::{Column, Finding, Results};
use super::two_caches::{Filling, TwoCaches};
use super::{Case, Run};
use crate::reading::place;
use crate::world::Extent;
use std::process::Command;
use testbed::Failure;

/// The program, relative to the root of the sources.
const PROGRAM: &str = "tests/vm/host-cache-ratio";
/// The paper's values: the data, bytes of a read, bytes in total, and the memory of the host and of
/// the guests.
const DATA_GB: u64 = 16;
const READ_MB: u64 = 16;
const TOTAL_GB: u64 = 64;
const HOST_GB: u64 = 16;
const GUESTS_GB: [u64; 2] = [8, 10];
/// The mean of the exponential distribution, as a share of the data: the paper does not state it.
const MEAN_SHARE: f64 = 0.25;
const PAGES_PER_MB: u64 = 256;

const DISTRIBUTIONS: [&str; 2] = ["uniform", "exponential"];
const AS_IT_IS: &str = "as it is";
const WITH: &str = "with what the guest evicts";
const WRITTEN: &str = "the same, written into the image";
const SIMULATED: [(&str, Filling); 2] =
    [("simulated, as it is", Filling::Reads), ("simulated, with what the guest evicts", Filling::Evictions)];
/// The limit of the host's memory before the machine has booted.
const BOOT_BYTES: u64 = 4 << 30;

fn variant(distribution: &str, how: &str) -> String {
    format!("{distribution}, {how}")
}

/// A quick run's machines have half of the other experiments' sizes.
pub fn scale(asked: f64, extent: Extent) -> f64 {
    asked * extent.choose(1.0, 2.0, 1.0)
}

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    run.rounds = run.world.extent.choose(5, 3, 1);
    simulate(run)?;
    // A quick run has one size of machines: each boots, and reads for minutes.
    let guests_gb = run.world.extent.choose(&GUESTS_GB[..], &GUESTS_GB[..1], &GUESTS_GB[..1]);
    let has_all = |how: &str| {
        DISTRIBUTIONS.iter().all(|name| guests_gb.iter().all(|gb| run.has(&variant(name, how), *gb as f64)))
    };
    let written = run.world.extent == Extent::Whole;
    if [AS_IT_IS, WITH].into_iter().chain(written.then_some(WRITTEN)).all(has_all) {
        return Ok(());
    }
    // It finds its group by itself, and limits it when the machine's needs are known.
    let group = run.world.group(BOOT_BYTES)?;
    run.disk_as_streamed()?;
    let mut command = Command::new(PROGRAM);
    command.arg("--dir").arg(run.world.directory("host-cache")?);
    command.args(["--scale", &run.scale.to_string(), "--rounds", &run.rounds.to_string()]);
    command.args(["--reads", run.world.extent.choose("1", "0.125", "0.05")]);
    command.arg("--guests").args(guests_gb.iter().map(u64::to_string));
    command.args(written.then_some("--written"));
    run.keep_what_it_says(PROGRAM, command, &[&group])
}

/// The paper's full size, except in a tiny run: it takes some seconds.
fn simulate(run: &mut Run<'_>) -> Result<(), Failure> {
    let scale = run.world.extent.choose(1, 1, 64);
    let pages = |gb: u64| (gb * 1024 * PAGES_PER_MB / scale) as u32;
    let read_pages = (READ_MB * PAGES_PER_MB / scale) as u32;
    let (places, reads) = (u64::from(pages(DATA_GB) / read_pages), u64::from(pages(TOTAL_GB) / read_pages));
    for distribution in DISTRIBUTIONS {
        let mean = if distribution == "uniform" { 0.0 } else { MEAN_SHARE * places as f64 };
        for guest_gb in GUESTS_GB {
            for (how, filling) in SIMULATED {
                let (name, x) = (variant(distribution, how), guest_gb as f64);
                if run.has(&name, x) {
                    continue;
                }
                let mut caches = TwoCaches::new(pages(DATA_GB), pages(guest_gb), pages(HOST_GB - guest_gb), filling);
                let mut random = fastrand::Rng::with_seed(run.world.seed);
                let mut go = |reads: u64| {
                    let before = caches.found();
                    for _ in 0..reads {
                        let first = place(&mut random, places, mean) as u32 * read_pages;
                        (first..first + read_pages).for_each(|page| caches.read(page));
                    }
                    caches.found() - before
                };
                go(reads);
                for round in 0..run.rounds {
                    let values = [("host_hit_ratio".to_owned(), go(reads).lower_ratio())];
                    run.keep(&Case::elsewhere(&name, x), round, values.into())?;
                }
            }
        }
    }
    Ok(())
}

pub fn results(records: &Records) -> Results {
    let key = "host_hit_ratio";
    let ratio = |distribution: &str, how: &str, floor: &str, gb: u64| {
        let (one, other) = (variant(distribution, how), variant(distribution, floor));
        records.over(key, (&one, gb as f64), (&other, gb as f64))
    };
    let chart = |distribution: &'static str| {
        let line = |(how, name): (&str, &str)| {
            let of = variant(distribution, how);
            let point = |gb: u64| Some((gb as f64, records.mean(&of, gb as f64, key, 1.0)?));
            Line { name: name.to_owned(), points: GUESTS_GB.into_iter().filter_map(point).collect() }
        };
        let [simulated, simulated_with] = SIMULATED.map(|(how, _)| how);
        let lines = [
            (WITH, "filled by evictions"),
            (simulated_with, "the same, simulated"),
            (AS_IT_IS, "as it is"),
            (simulated, "as it is, simulated"),
            (WRITTEN, "evictions, written"),
        ];
        let lines = lines.map(line).into_iter().filter(|line| !line.points.is_empty()).collect();
        Chart {
            name: distribution,
            title: format!("Hit ratio of the host's page cache, {distribution} reads"),
            y_label: "of what the guest asks for",
            is_log: false,
            lines,
            marks: Vec::new(),
        }
    };
    let mut findings = Vec::new();
    for (distribution, wanted) in DISTRIBUTIONS.into_iter().zip([1.0, 1.5]) {
        for gb in GUESTS_GB {
            let what = format!("hit ratio, {distribution}, guest of {gb} GB, over that without");
            findings.push(Finding::at_least(
                &what,
                ratio(distribution, WITH, AS_IT_IS, gb),
                wanted,
                "at least as high",
            ));
        }
    }
    for distribution in DISTRIBUTIONS {
        for gb in GUESTS_GB {
            let (one, other) = (variant(distribution, WITH), variant(distribution, AS_IT_IS));
            let disk = records.over("disk_mib", (&one, gb as f64), (&other, gb as f64));
            let what = format!("reads of the host's disk, {distribution}, guest of {gb} GB, over those without");
            findings.push(Finding::at_most(&what, disk, 1.0, "–"));
        }
    }
    Results {
        charts: DISTRIBUTIONS.map(chart).into(),
        columns: vec![
            Column { key, name: "hit ratio of the host", decimals: 3 },
            Column { key: "guest_asked_mib", name: "MiB that the guest asked for", decimals: 0 },
            Column { key: "disk_mib", name: "MiB read from the host's disk", decimals: 0 },
            Column { key: "host_cached_mib", name: "MiB that the host cached", decimals: 0 },
            Column { key: "dirtied_mib", name: "MiB dirtied on the host, by anybody", decimals: 1 },
        ],
        findings,
        why: "The paper shows its ratios as bars without figures. The two simulated caches are least-recently-used, of the paper's sizes, and hold each page once when \
              the lower one is filled with what the upper one evicts; kernels keep two lists, and read ahead. In an emulated machine the guest's daemon is slow beside its \
              kernel: what is evicted faster than it can be sent is left out. The mean of the exponential distribution is a quarter of the data.",
    }
}
