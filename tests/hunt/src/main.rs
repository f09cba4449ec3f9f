//! `make hunt`: looks for wrong bytes and lost stores. Processes write blocks that identify
//! themselves, through real mounts and in every possible way, and compare each read with a shared
//! ledger. Meanwhile pages are evicted and come back from lenders, and daemons and lenders are
//! killed.
//!
//! It ends with 0 if nothing was wrong. At the first wrong byte it reports the expected bytes, the
//! bytes that were read, the operation, the last operations on that block, and the seed, and ends
//! with 1. It leaves nothing behind, also when it is interrupted.

mod choice;
mod content;
mod judge;
mod ledger;
mod mapping;
mod names;
mod operation;
mod outside;
mod reading;
mod round;
mod shared;
mod trouble;
mod worker;
mod writing;

use clap::{Parser, Subcommand};
use ledger::WORKERS_MAX;
use operation::{Operation, WriteMode, enabled};
use round::{Outcome, Round};
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use testbed::{Failure, FileSystem, Interrupt, Puma, exit_code};
use trouble::Counts;

/// Looks for wrong bytes and lost stores through real mounts.
#[derive(Parser)]
#[command(name = "hunt", version, args_conflicts_with_subcommands = true)]
struct Options {
    #[command(subcommand)]
    command: Option<Hidden>,
    #[command(flatten)]
    run: RunOptions,
}

#[derive(Subcommand)]
enum Hidden {
    /// A process that writes and reads. Started by the hunter.
    #[command(hide = true)]
    Worker { task: String },
}

#[derive(clap::Args)]
struct RunOptions {
    /// Duration of all rounds together, in seconds
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Seed of everything random [default: another one each time, printed]
    #[arg(long)]
    seed: Option<u64>,
    /// Backing file systems: one round each
    #[arg(long, value_delimiter = ',', default_value = "ext4,xfs,btrfs")]
    fs: Vec<FileSystem>,
    /// Write modes of the mounts: one round each
    #[arg(long, value_delimiter = ',', default_value = "through,back")]
    write: Vec<WriteMode>,
    /// Operations to try in addition to the default ones, such as outside-slow
    #[arg(long, value_delimiter = ',', value_name = "OPERATION")]
    with: Vec<Operation>,
    /// Operations to leave out
    #[arg(long, value_delimiter = ',', value_name = "OPERATION")]
    without: Vec<Operation>,
    /// Only these operations
    #[arg(long, value_delimiter = ',', value_name = "OPERATION", conflicts_with_all = ["with", "without"])]
    only: Vec<Operation>,
    /// Processes that write and read at once
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=WORKERS_MAX as i64))]
    workers: u32,
    /// Do not kill daemons and lenders
    #[arg(long)]
    no_kills: bool,
    /// Directory for logs
    #[arg(long, default_value = "target/hunt")]
    out: PathBuf,
    /// The command under test [default: the one built next to this program]
    #[arg(long)]
    pumapool: Option<PathBuf>,
    /// Write wrong generations on purpose: the hunter must find one
    #[arg(long, hide = true)]
    corrupt: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let outcome = match &options.command {
        Some(Hidden::Worker { task }) => worker::run(task).map_err(Failure::Problem),
        None => Interrupt::listen().map_err(Failure::from).and_then(|interrupt| hunt(&options.run, &interrupt)),
    };
    // Everything that was made is removed by now, on every path.
    exit_code(outcome)
}

fn hunt(options: &RunOptions, interrupt: &Interrupt) -> Result<bool, Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::Problem("mounts and memory cgroups need root: run it as root".to_owned()));
    }
    let pumapool = options.pumapool.clone().or_else(|| testbed::sibling_binary("pumapool"));
    let pumapool = pumapool
        .ok_or_else(|| Failure::Problem("there is no pumapool next to this program; run `make build`".to_owned()))?;
    fs::create_dir_all(&options.out).map_err(Failure::attempted(format!("making {}", options.out.display())))?;
    let puma = Puma { pumapool, logs: options.out.clone(), interrupt: Some(interrupt.clone()) };
    let seed = options.seed.unwrap_or_else(|| fastrand::u32(..).into());
    println!("seed {seed} (repeat with --seed {seed}); logs in {}", options.out.display());
    let rounds: Vec<(FileSystem, WriteMode)> =
        options.fs.iter().flat_map(|kind| options.write.iter().map(|mode| (*kind, *mode))).collect();
    let (begin, count) = (Instant::now(), rounds.len() as u32);
    let (mut counts, mut operations, mut judged) = (Counts::default(), 0, 0);
    for ((kind, mode), number) in rounds.into_iter().zip(0..) {
        let operations_of_mode = if options.only.is_empty() {
            enabled(mode, &options.with, &options.without).map_err(Failure::Problem)?
        } else {
            options.only.clone()
        };
        let round = Round {
            puma: &puma,
            interrupt,
            kind,
            mode,
            seed: seed.wrapping_add(number),
            length: Duration::from_secs(options.seconds) / count,
            workers: options.workers,
            operations: operations_of_mode,
            corrupt: options.corrupt,
            trouble: !options.no_kills,
        };
        let outcome = round.run()?;
        println!("{kind}, write {}: {}", mode.name(), line(&outcome));
        if let Some(fault) = outcome.fault {
            println!("{fault}");
            println!(
                "FAILED (seed {seed}). Repeat with --fs {kind} --write {} --seed {} --seconds {}",
                mode.name(),
                round.seed,
                round.length.as_secs()
            );
            return Ok(false);
        }
        counts += outcome.counts;
        operations += outcome.operations.iter().sum::<u64>();
        judged += outcome.judged;
    }
    let seconds = begin.elapsed().as_secs();
    println!("No wrong byte in {seconds} s: {operations} operations, {judged} blocks judged, {counts} (seed {seed}).");
    Ok(true)
}

fn line(outcome: &Outcome) -> String {
    let each = Operation::ALL.iter().zip(&outcome.operations).filter(|(_, count)| **count > 0);
    let each: Vec<String> = each.map(|(operation, count)| format!("{count} {operation}")).collect();
    let Outcome { counts, judged, not_judged, .. } = outcome;
    format!("{judged} blocks judged, {not_judged} not, {counts}; {}", each.join(", "))
}
