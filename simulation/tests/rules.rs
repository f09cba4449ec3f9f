//! The simulation is tested, too: each rule of docs/consistency.md is broken in turn, and must be caught. And kept rules
//! must show no wrong byte.
//!
//! Kept rules are run with the same seeds every time, because the model still raises a false alarm in some hundred million steps;
//! `PUMA_SECONDS=n` runs fresh seeds for so long instead, as `make simulate` does.

use borrower::logic::rules::{Rule, break_rule};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const STEPS: u64 = 20_000;
/// The time in which every broken rule must be caught.
const CATCH_MAX: Duration = Duration::from_secs(120);

/// Runs of fresh seeds until one goes wrong or the time is up: the runs, and what went wrong.
fn fresh_runs(limit: Duration) -> (u64, Result<simulation::Tally, Box<simulation::Failure>>) {
    let first = fastrand::u64(..1 << 48);
    let (began, mut tally, mut runs) = (Instant::now(), simulation::Tally::default(), 0);
    while began.elapsed() < limit {
        match simulation::run(first + runs, STEPS) {
            Ok(of_run) => tally += of_run,
            Err(failure) => return (runs + 1, Err(failure)),
        }
        runs += 1;
    }
    println!("seeds {first}..{}, {STEPS} steps each", first + runs);
    (runs, Ok(tally))
}

/// Runs of a thread that are the same every time.
const SAME_RUNS: u64 = 60;

fn same_runs(first: u64) -> (u64, Result<simulation::Tally, Box<simulation::Failure>>) {
    let mut tally = simulation::Tally::default();
    for seed in first..first + SAME_RUNS {
        match simulation::run(seed, STEPS) {
            Ok(of_run) => tally += of_run,
            Err(failure) => return (SAME_RUNS, Err(failure)),
        }
    }
    (SAME_RUNS, Ok(tally))
}

/// Both cores: each thread does what is left to do.
const THREADS: usize = 2;

#[test]
fn every_broken_rule_is_caught() {
    let (next, missed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    println!("rule                 caught after");
    let work = || {
        while let Some(rule) = Rule::ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
            // In this thread alone.
            break_rule(Some(*rule));
            let began = Instant::now();
            let (runs, result) = fresh_runs(CATCH_MAX);
            let name = format!("R{} {rule:?}", *rule as u8);
            match result {
                Err(failure) => {
                    let (steps, seconds) = ((runs - 1) * STEPS + failure.step, began.elapsed().as_secs_f64());
                    println!("{name:20} {steps:>9} steps, {seconds:5.1} s (seed {})", failure.seed);
                }
                Ok(_) => {
                    println!("{name:20} NOT CAUGHT: {}", rule.meaning());
                    missed.lock().unwrap().push(name);
                }
            }
        }
    };
    std::thread::scope(|scope| (0..THREADS).for_each(|_| drop(scope.spawn(work))));
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "rules whose removal nothing notices: {missed:?}");
}

#[test]
fn kept_rules_show_no_wrong_byte() {
    let seconds: Option<u64> = std::env::var("PUMA_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let thread = AtomicUsize::new(0);
    let work = || match seconds {
        Some(seconds) => fresh_runs(Duration::from_secs(seconds)),
        None => same_runs(thread.fetch_add(1, Ordering::Relaxed) as u64 * 1000),
    };
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    for (runs, result) in results {
        match result {
            Ok(tally) => {
                println!("{runs} runs: {tally:?}");
                assert!(tally.lent > runs, "{} pages came from lenders: the simulation proves nothing", tally.lent);
            }
            Err(failure) => {
                failure.trace.iter().for_each(|line| println!("{line}"));
                panic!("{} at step {}: make simulate SEED={} STEPS={STEPS}", failure.what, failure.step, failure.seed);
            }
        }
    }
}
