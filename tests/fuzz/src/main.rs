//! `make fuzz`: runs libFuzzer to look for inputs that make a target panic, hang or grow.
//!
//! For each target the seeds and the kept inputs are written to a folder under `target/`, where
//! findings stay for the next run; then the instrumented program runs for a time. `--keep` ends
//! with merging: the smallest set of inputs that reaches the same code, as far as there is room,
//! becomes the target's file in `corpus/`.

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use fuzz::{TARGETS, Target, corpus};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Time limit for an input, in seconds. No target waits for anything.
const INPUT_SECONDS: u32 = 10;
/// Memory above which a target counts as growing without bound, in MiB.
const MEMORY_MIB: u32 = 2048;

/// Fuzzes the targets, all of them by default.
#[derive(Parser)]
struct Options {
    /// Targets by name; `--list` shows them.
    targets: Vec<String>,
    /// Shows the targets.
    #[arg(long)]
    list: bool,
    /// Seconds for each target.
    #[arg(long, default_value_t = 300)]
    seconds: u32,
    /// Targets at the same time.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Seed of the random choices; another one each time by default. It is printed.
    #[arg(long)]
    seed: Option<u32>,
    /// Store the useful inputs in `tests/fuzz/corpus/`.
    #[arg(long)]
    keep: bool,
    /// The instrumented program.
    #[arg(long, default_value = "target/debug/fuzz_target")]
    program: PathBuf,
    /// The folder for found and failing inputs.
    #[arg(long, default_value = "target/fuzz/found")]
    folder: PathBuf,
}

/// The result of a target.
struct Row {
    executions: u64,
    features: String,
    /// The end of libFuzzer's output, if there was a finding.
    failure: Option<String>,
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    let mut targets: Vec<&Target> = Vec::new();
    for name in &options.targets {
        targets.push(fuzz::find(name).with_context(|| format!("no target {name:?}; `--list` shows them"))?);
    }
    if targets.is_empty() {
        targets.extend(TARGETS);
    }
    if options.list {
        targets.iter().for_each(|target| println!("{:20} {}", target.name, target.about));
        return Ok(ExitCode::SUCCESS);
    }
    ensure!(options.program.exists(), "{} is missing: `make fuzz` builds it", options.program.display());
    let seed = options.seed.unwrap_or_else(std::process::id);
    println!("seed {seed}, {} s a target", options.seconds);
    println!("{:20} {:>12}  coverage", "target", "executions");

    let (next, rows) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.clamp(1, targets.len()) {
            scope.spawn(|| {
                while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let row = fuzz_one(target, &options, seed);
                    match &row {
                        Ok(row) => println!("{:20} {:>12}  {}", target.name, row.executions, row.features),
                        Err(error) => println!("{:20} {error:#}", target.name),
                    }
                    rows.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((target.name, row));
                }
            });
        }
    });

    let mut executions = 0;
    let mut failed = false;
    for (name, row) in rows.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        let row = row?;
        executions += row.executions;
        if let Some(failure) = row.failure {
            failed = true;
            eprintln!("\n{name} failed:\n{failure}");
        }
    }
    println!("{executions} executions in all{}", if failed { "; failures above" } else { ", no failure" });
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn fuzz_one(target: &Target, options: &Options, seed: u32) -> Result<Row> {
    let found = options.folder.join(target.name);
    let failures = options.folder.join(format!("{}-failures", target.name));
    for folder in [&found, &failures] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    for (at, input) in (target.seeds)().iter().chain(&corpus::kept(target.name)?).enumerate() {
        fs::write(found.join(format!("given-{at}")), input)?;
    }
    let output = run(target, options, |command| {
        command.arg(format!("-max_total_time={}", options.seconds)).arg(format!("-seed={seed}"));
        command.args(["-print_final_stats=1", "-use_value_profile=1"]);
        command.arg(format!("-artifact_prefix={}/", failures.display())).arg(&found);
    })?;
    let text = String::from_utf8_lossy(&output.stderr);
    let number = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    let executions = number("stat::number_of_executed_units:").unwrap_or(0);
    let progress =
        text.lines().rev().find_map(|line| Some(line[line.find("cov: ")?..].split(" exec/s").next()?.to_owned()));
    if !output.status.success() {
        return Ok(Row { executions, features: "FAILED".into(), failure: Some(explain(&text, &failures)) });
    }
    if options.keep {
        keep(target, options, &found)?;
    }
    Ok(Row { executions, features: progress.unwrap_or_default(), failure: None })
}

fn run(target: &Target, options: &Options, arguments: impl FnOnce(&mut Command)) -> Result<Output> {
    let mut command = Command::new(&options.program);
    command.env("PUMA_FUZZ_TARGET", target.name).env("RUST_BACKTRACE", "0");
    command.arg(format!("-max_len={}", target.input_bytes_max));
    command.arg(format!("-timeout={INPUT_SECONDS}")).arg(format!("-rss_limit_mb={MEMORY_MIB}"));
    arguments(&mut command);
    command.output().with_context(|| format!("cannot run {}", options.program.display()))
}

/// The panic's message, and the input as a line for the target's file in `corpus/`.
fn explain(text: &str, failures: &Path) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let mut told = lines[lines.len().saturating_sub(30)..].join("\n");
    let inputs = fs::read_dir(failures).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in inputs {
        if let Ok(input) = fs::read(&path) {
            told += &format!("\n{}: once mended, keep this line in corpus/: {}", path.display(), corpus::show(&input));
        }
    }
    told
}

/// Writes the smallest inputs that reach the same code as `found`, as far as there is room.
fn keep(target: &Target, options: &Options, found: &Path) -> Result<()> {
    let merged = options.folder.join(format!("{}-merged", target.name));
    let _ = fs::remove_dir_all(&merged);
    fs::create_dir_all(&merged)?;
    let output = run(target, options, |command| {
        command.arg("-merge=1").arg(&merged).arg(found);
    })?;
    if !output.status.success() {
        bail!("merging failed: {}", String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default());
    }
    let mut lines = Vec::new();
    for entry in fs::read_dir(&merged)? {
        lines.push(corpus::show(&fs::read(entry?.path())?));
    }
    // An input that failed once is kept for ever.
    let remembered = fs::read_to_string(corpus::kept_path(target.name)).unwrap_or_default();
    let remembered = remembered.lines().skip_while(|line| *line != REGRESSIONS).skip(1).map(str::to_owned);
    let remembered: Vec<String> = remembered.collect();
    lines.sort_by_key(|line| (line.len(), line.clone()));
    let mut room = corpus::KEPT_TEXT_BYTES_MAX;
    lines.retain(|line| {
        let fits = line.len() < room && !line.is_empty() && !remembered.contains(line);
        room -= if fits { line.len() + 1 } else { 0 };
        fits
    });
    if !remembered.is_empty() {
        lines.push(REGRESSIONS.into());
        lines.extend(remembered);
    }
    fs::write(corpus::kept_path(target.name), lines.join("\n") + "\n")?;
    Ok(())
}

/// The lines before it are those that `--keep` replaces.
const REGRESSIONS: &str = "# found by fuzzing and mended";
