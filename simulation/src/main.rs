//! `make simulate`: runs of the simulation, with seeds nobody has tried or with a given one.

use anyhow::{Result, bail};
use clap::Parser;
use simulation::Tally;
use std::time::{Duration, Instant};

/// Simulates whole pools on the real logic, and says so when a read returns what it must not.
#[derive(Parser)]
struct Options {
    /// Repeat the run of this seed; without it, fresh seeds one after another.
    #[arg(long)]
    seed: Option<u64>,

    /// Steps of a run.
    #[arg(long, default_value_t = 20_000)]
    steps: u64,

    /// Without a seed: for how long new runs are begun.
    #[arg(long, default_value_t = 120)]
    seconds: u64,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let began = Instant::now();
    let first = options.seed.unwrap_or_else(|| fastrand::u64(..1 << 48));
    let mut tally = Tally::default();
    let mut runs = 0;
    let mut said = began;
    loop {
        let seed = first + runs;
        match simulation::run(seed, options.steps) {
            Ok(of_run) => tally += of_run,
            Err(failure) => {
                failure.trace.iter().for_each(|line| println!("{line}"));
                bail!(
                    "{} at step {}; to see it again: make simulate SEED={} STEPS={}",
                    failure.what,
                    failure.step,
                    failure.seed,
                    options.steps
                );
            }
        }
        runs += 1;
        let over = options.seed.is_some() || began.elapsed() >= Duration::from_secs(options.seconds);
        if over || said.elapsed() > Duration::from_secs(10) {
            said = Instant::now();
            let seconds = began.elapsed().as_secs_f64();
            println!(
                "seeds {first}..{}: {} steps ({:.1} million a minute), {} reads, {} pages compared, {} changes, {} evictions, \
                 {} pages from lenders, {} changes beside, {} lenders lost ({} resumed), {} daemons killed; no wrong byte",
                first + runs,
                tally.steps,
                tally.steps as f64 / seconds * 60.0 / 1e6,
                tally.reads,
                tally.pages,
                tally.changes,
                tally.evictions,
                tally.lent,
                tally.beside,
                tally.losses,
                tally.resumed,
                tally.kills,
            );
        }
        if over {
            return Ok(());
        }
    }
}
