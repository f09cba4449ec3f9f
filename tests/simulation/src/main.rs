//! `make simulate`: runs of the simulation, with new seeds or with a given one.

use anyhow::{Context as _, Result, bail};
use borrower::catalog::rules::{Rule, break_rule};
use clap::Parser;
use simulation::Statistics;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Simulate whole pools on the real logic, and report reads that return a wrong value.
#[derive(Parser)]
#[command(args_override_self = true)]
struct Options {
    /// Repeat the run of this seed; without it, run new seeds one after another.
    #[arg(long)]
    seed: Option<u64>,

    /// With a seed: the number of runs, each with the next seed.
    #[arg(long, default_value_t = 1)]
    runs: u64,

    /// The number of steps of a run.
    #[arg(long, default_value_t = 20_000)]
    steps: u64,

    /// Without a seed: how long new runs are started, in seconds.
    #[arg(long, default_value_t = 120)]
    seconds: u64,

    /// Without a seed: the number of processes at once. (Threads would wait for each other: lenders
    /// map and unmap memory.)
    #[arg(long, default_value_t = 1)]
    jobs: usize,

    /// The number of a rule of docs/design/consistency.md to break: the run must detect it.
    #[arg(long = "break", value_name = "NUMBER")]
    broken: Option<u8>,

    /// The number of a rule to keep, at the rates at which it would matter most if it were broken:
    /// there must be no alarm.
    #[arg(long, value_name = "NUMBER", conflicts_with = "broken")]
    keep: Option<u8>,
}

/// Returns the rule of this number.
fn rule(number: u8) -> Result<Rule> {
    let found = Rule::ALL.iter().find(|rule| **rule as u8 == number);
    found.copied().with_context(|| format!("there is no rule {number}"))
}

fn main() -> Result<()> {
    let options = Options::parse();
    if options.jobs > 1 && options.seed.is_none() {
        return run_jobs(options.jobs);
    }
    let suited = options.broken.or(options.keep).map(rule).transpose()?;
    if options.broken.is_some() {
        break_rule(suited);
    }
    run(&options, suited)
}

fn run(options: &Options, suited: Option<Rule>) -> Result<()> {
    let began = Instant::now();
    let first = options.seed.unwrap_or_else(|| fastrand::u64(..1 << 48));
    let mut statistics = Statistics::default();
    let mut runs = 0;
    let mut said = began;
    loop {
        let seed = first + runs;
        match simulation::run(seed, options.steps, suited) {
            Ok(of_run) => statistics += of_run,
            Err(failure) => {
                failure.trace.iter().for_each(|line| println!("{line}"));
                println!("{:?}", failure.rates);
                bail!(
                    "{} at step {}, after {} steps of other runs; to see it again: make simulate SEED={} STEPS={}",
                    failure.what,
                    failure.step,
                    statistics.steps,
                    failure.seed,
                    options.steps
                );
            }
        }
        runs += 1;
        let over = options.seed.is_some() && runs >= options.runs
            || options.seed.is_none() && began.elapsed() >= Duration::from_secs(options.seconds);
        if over || said.elapsed() > Duration::from_secs(10) {
            said = Instant::now();
            let seconds = began.elapsed().as_secs_f64();
            println!(
                "seeds {first}..{}: {} steps ({:.1} million a minute), {} reads, {} READs in batches, {} pages compared, {} changes, {} evictions ({} without bytes), \
                 {} pages from lenders, {} from guests, {} external changes, {} lenders lost ({} resumed), {} daemons killed; no wrong byte",
                first + runs,
                statistics.steps,
                statistics.steps as f64 / seconds * 60.0 / 1e6,
                statistics.reads,
                statistics.batched,
                statistics.pages,
                statistics.changes,
                statistics.evictions,
                statistics.omitted,
                statistics.lent,
                statistics.demoted,
                statistics.external_changes,
                statistics.losses,
                statistics.resumed,
                statistics.kills,
            );
        }
        if over {
            return Ok(());
        }
    }
}

/// Starts this program several times, and waits until all have ended or one has failed.
fn run_jobs(jobs: usize) -> Result<()> {
    let begin = || {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args_os().skip(1)).args(["--jobs", "1"]).stdin(Stdio::null());
        command.spawn()
    };
    let mut children = (0..jobs).map(|_| begin()).collect::<Result<Vec<Child>, _>>()?;
    let mut failed = false;
    while !children.is_empty() && !failed {
        std::thread::sleep(Duration::from_millis(20));
        let mut left = Vec::new();
        for mut child in children {
            match child.try_wait()? {
                Some(status) => failed |= !status.success(),
                None => left.push(child),
            }
        }
        children = left;
    }
    for mut child in children {
        child.kill()?;
        child.wait()?;
    }
    if failed {
        bail!("a run has failed: its trace and seed are above");
    }
    Ok(())
}
