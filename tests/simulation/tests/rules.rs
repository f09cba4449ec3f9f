//! Tests of the simulation itself. Each rule of docs/design/consistency.md is broken in turn, and
//! the simulation must detect it. With all rules kept, it must find no wrong byte. The first test
//! uses new seeds, which it prints. The second test uses the same seeds each time, because the
//! model raises a false alarm once in some thousand million steps; `make simulate` looks for those.

use borrower::catalog::rules::Rule;
use std::process::{Command, Output};
use std::time::Instant;

/// The time in seconds in which every broken rule must be detected. `PUMA_SECONDS` sets another
/// one.
const SECONDS: u64 = 1200;

/// The seeds for kept rules, 20,000 steps each: the first one, and their number.
const SEED_FIRST: u64 = 1;
const SEED_COUNT: u64 = 16_000;
/// The number of them with the rates for one rule.
const SEED_COUNT_SUITED: u64 = 1_000;

/// Runs the simulation on every core.
fn simulate(options: &[&str]) -> Output {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let seconds = std::env::var("PUMA_SECONDS").unwrap_or_else(|_| SECONDS.to_string());
    let mut command = Command::new(env!("CARGO_BIN_EXE_simulate"));
    command.args(["--jobs", &cores.to_string(), "--seconds", &seconds]).args(options);
    command.output().expect("the simulation runs")
}

/// Rules that matter only if changes of a file overlap. The mount's changes do not:
/// crates/borrower/tests/coherence.rs tests these rules.
const OF_OVERLAPPING_CHANGES: [Rule; 2] = [Rule::Older, Rule::Cleared];

#[test]
fn every_broken_rule_is_caught() {
    let mut missed = Vec::new();
    println!();
    for rule in Rule::ALL.iter().filter(|rule| !OF_OVERLAPPING_CHANGES.contains(rule)) {
        let began = Instant::now();
        let output = simulate(&["--break", &(*rule as u8).to_string()]);
        let name = format!("R{} {rule:?}", *rule as u8);
        let said = String::from_utf8_lossy(&output.stderr);
        // Only a wrong byte counts as a detection.
        match said.lines().find(|line| line.contains("SEED=")) {
            Some(line) if !output.status.success() => {
                println!("{name:14} caught after {:5.1} s: {line}", began.elapsed().as_secs_f64());
            }
            _ => {
                println!("{name:14} NOT CAUGHT: {} {said}", rule.meaning());
                missed.push(name);
            }
        }
    }
    assert!(missed.is_empty(), "rules whose removal nothing notices: {missed:?}");
}

#[test]
fn kept_rules_show_no_wrong_byte() {
    let keep = |count: u64, rule: &[&str]| {
        let seeds = ["--seed", &SEED_FIRST.to_string(), "--runs", &count.to_string()];
        let output = simulate(&[&seeds[..], rule].concat());
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        println!("{said}");
        assert!(output.status.success(), "{rule:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(said.contains("no wrong byte"));
        said
    };
    let said = keep(SEED_COUNT, &[]);
    let is_idle = said.contains(", 0 pages from lenders") || said.contains(", 0 READs in batches");
    assert!(!is_idle, "the simulation proves nothing");
    // An alarm at the rates for a broken rule proves something only if the kept rule raises none.
    for rule in simulation::SUITED {
        keep(SEED_COUNT_SUITED, &["--keep", &(rule as u8).to_string()]);
    }
}
