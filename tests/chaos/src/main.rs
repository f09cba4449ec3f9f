//! `make chaos` and `make soak`: real programs read and write through real mounts while lenders are
//! killed, stopped, squeezed for memory, cut off, and replaced by a byzantine one.
//!
//! Chaos requires three things: no byte is ever wrong, no application ever gets an error, and no
//! read takes two seconds longer than in the controls. Soak checks that nothing grows. Both print
//! their seed, end with 0 only if all was well, and leave nothing behind, also when they are
//! interrupted.

mod byzantine;
mod chart;
mod churn;
mod content;
mod lender;
mod network;
mod probe;
mod probing;
mod puma;
mod round;
mod sampling;
mod scenario;
mod soak;
mod suite;
mod verdict;

use clap::{Parser, Subcommand};
use puma::Mode;
use round::Setup;
use scenario::Scenario;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use testbed::{Failure, FileSystem, Interrupt, Puma, RamDisk, Scratch, exit_code};
use verdict::Outcome;
use wire::address::Address;

/// Size of the disk of memory. Its memory is taken as it is written.
const DISK_BYTES: u64 = 1 << 30;

/// Real programs through real mounts, while lenders are in trouble.
#[derive(Parser)]
#[command(name = "chaos", version)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// One round for each kind of trouble; in each, a mount in another mode
    Run(RunOptions),
    /// A long mixed load with troubles now and then: does anything grow?
    Soak(SoakOptions),
    /// A probe. Started by the others.
    #[command(hide = true)]
    Probe { task: String },
    /// A byzantine lender. Started by the others.
    #[command(hide = true)]
    Byzantine {
        #[arg(long)]
        listen: Address,
        #[arg(long)]
        seed: u64,
    },
}

#[derive(clap::Args)]
struct RunOptions {
    #[command(flatten)]
    common: Common,
    /// Duration of the load of each round, in seconds
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Only this kind of trouble: killed, stopped, squeezed, cut-off, hostile, all [default: each]
    #[arg(long, value_delimiter = ',', value_parser = scenario_of)]
    only: Vec<Scenario>,
}

#[derive(clap::Args)]
struct SoakOptions {
    #[command(flatten)]
    common: Common,
    /// Duration of the load, in seconds
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(20..=86_400))]
    seconds: u64,
}

#[derive(clap::Args, Clone)]
struct Common {
    /// Seed of everything random [default: another one each time, printed]
    #[arg(long)]
    seed: Option<u64>,
    /// Directory for logs and results
    #[arg(long, default_value = "target/chaos")]
    out: PathBuf,
    /// Directory on a disk, for the files [default: a disk in memory, made for the run]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The command under test [default: the one built next to this program]
    #[arg(long)]
    pumapool: Option<PathBuf>,
}

fn scenario_of(name: &str) -> Result<Scenario, String> {
    let names = Scenario::EVERY.map(Scenario::name).join(", ");
    let found = Scenario::EVERY.into_iter().find(|scenario| scenario.name() == name);
    found.ok_or_else(|| format!("there is no {name:?}; choose from {names}"))
}

fn main() -> ExitCode {
    let outcome = match Options::parse().command {
        Command::Probe { task } => probe::run(&task).map_err(Failure::Problem).map(|()| true),
        Command::Byzantine { listen, seed } => byzantine::run(&listen, seed).map_err(Failure::Problem).map(|()| true),
        Command::Run(options) => {
            Interrupt::listen().map_err(Failure::from).and_then(|interrupt| run(&options, &interrupt))
        }
        Command::Soak(options) => {
            Interrupt::listen().map_err(Failure::from).and_then(|interrupt| soak(&options, &interrupt))
        }
    };
    // Everything that was made is removed by now, on every path.
    exit_code(outcome)
}

/// Prepares what both need: the command, an empty directory for logs, the seed, and a place for
/// files.
fn prepare(common: &Common) -> Result<(Puma, u64, Scratch, PathBuf), Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::Problem("cgroups and network namespaces need root: run it as root".to_owned()));
    }
    let pumapool = common.pumapool.clone().or_else(|| testbed::sibling_binary("pumapool"));
    let pumapool = pumapool
        .ok_or_else(|| Failure::Problem("there is no pumapool next to this program; run `make build`".to_owned()))?;
    let out = &common.out;
    // Logs of an earlier run would count as this one's.
    let _none_yet = fs::remove_dir_all(out);
    fs::create_dir_all(out).map_err(Failure::attempted(format!("making {}", out.display())))?;
    let seed = common.seed.unwrap_or_else(|| fastrand::u32(..).into());
    println!("seed {seed} (repeat with --seed {seed}); logs in {}", out.display());
    let scratch = Scratch::new("chaos")?;
    let disk = match &common.dir {
        Some(directory) => {
            let disk = directory.join(format!("chaos-{}", std::process::id()));
            fs::create_dir(&disk).map_err(Failure::attempted(format!("making {}", disk.display())))?;
            disk
        }
        None => RamDisk::create(&scratch, FileSystem::Ext4, DISK_BYTES)?.path,
    };
    Ok((Puma { pumapool, logs: out.clone(), interrupt: None }, seed, scratch, disk))
}

fn run(options: &RunOptions, interrupt: &Interrupt) -> Result<bool, Failure> {
    let (puma, seed, scratch, disk) = prepare(&options.common)?;
    let disk = RemovedOnDrop(disk);
    let length = Duration::from_secs(options.seconds);
    let setup = Setup { puma: &puma, scratch: &scratch, disk: &disk.0, length, interrupt };
    // Each run has every mode; chance decides which trouble meets which mode.
    let mut modes = Mode::ALL;
    fastrand::Rng::with_seed(seed).shuffle(&mut modes);
    let mut outcomes = Vec::new();
    for ((number, scenario), mode) in (0..).zip(Scenario::EVERY).zip(modes) {
        if !options.only.is_empty() && !options.only.contains(&scenario) {
            continue;
        }
        let mut outcome = setup.round(scenario, mode, seed.wrapping_add(number))?;
        outcome.violations.extend(puma::panics(&puma));
        println!("{}", outcome.line());
        outcome.violations.iter().for_each(|violation| println!("    {violation}"));
        outcomes.push(outcome);
    }
    drop(disk);
    println!("\n{}", verdict::table(&outcomes));
    write_json(&options.common.out.join("chaos.json"), &outcomes)?;
    let broken: usize = outcomes.iter().map(|outcome: &Outcome| outcome.violations.len()).sum();
    if broken > 0 {
        println!("FAILED: {broken} violations (seed {seed}).");
    } else {
        println!("No wrong byte, no error, no read slower than the controls by {:?} (seed {seed}).", verdict::READ_MAX);
    }
    Ok(broken == 0)
}

fn soak(options: &SoakOptions, interrupt: &Interrupt) -> Result<bool, Failure> {
    let (puma, seed, scratch, disk) = prepare(&options.common)?;
    let disk = RemovedOnDrop(disk);
    let length = Duration::from_secs(options.seconds);
    let mut result = soak::run(&Setup { puma: &puma, scratch: &scratch, disk: &disk.0, length, interrupt }, seed)?;
    drop(disk);
    result.violations.extend(puma::panics(&puma));
    println!("\n{}", result.table());
    write_json(&options.common.out.join("soak.json"), &result)?;
    let chart = options.common.out.join("soak.svg");
    fs::write(&chart, result.chart()).map_err(Failure::attempted(format!("writing {}", chart.display())))?;
    result.violations.iter().for_each(|violation| println!("    {violation}"));
    match result.violations.len() {
        0 => println!("Nothing grew, nothing leaked, every gauge returned (seed {seed})."),
        broken => println!("FAILED: {broken} violations (seed {seed})."),
    }
    Ok(result.violations.is_empty())
}

fn write_json(path: &Path, what: &impl serde::Serialize) -> Result<(), Failure> {
    let json = serde_json::to_string_pretty(what).map_err(|error| Failure::Problem(error.to_string()))?;
    fs::write(path, json + "\n").map_err(Failure::attempted(format!("writing {}", path.display())))
}

/// The files of a run on a disk that stays.
struct RemovedOnDrop(PathBuf);

impl Drop for RemovedOnDrop {
    fn drop(&mut self) {
        let _gone_already = fs::remove_dir_all(&self.0);
    }
}
