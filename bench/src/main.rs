//! The benches: each prints its figure next to its floor or its peer, which it measures in the same
//! run, by turns.
//!
//! `bench/run NAME` builds and runs one. A bench that cannot run on a machine prints the reason and
//! ends with 2. Everything that is made is removed, also when it fails or is interrupted.
//! docs/user/benches.md explains the figures.

mod bypass;
mod cached_read;
mod dialects;
mod figures;
mod footprint;
mod guest;
mod history;
mod hit;
mod hit_latency;
mod hit_throughput;
mod metadata;
mod neighbours;
mod never_slower;
mod null_pages;
mod null_server;
mod page_server;
mod paper;
mod program;
mod reading;
mod reclaim;
mod sequential;
mod tap;
mod tree;
mod watch;
mod worker;
mod world;
mod write;
mod writing;

use clap::Parser;
use figures::Conditions;
use serde_json::{Map, Value, json};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use testbed::{Failure, Interrupt, NOT_RUN, exit_code};
use world::{Extent, World};

/// Instead of a bench's name: all of them.
const ALL: &str = "all";

/// A bench: its name, its description, and its function, which returns its figures.
struct Bench {
    name: &'static str,
    about: &'static str,
    run: fn(&World) -> Result<Map<String, Value>, Failure>,
}

/// In the order in which they are listed, and run by `all`.
const BENCHES: [Bench; 15] = [
    Bench {
        name: "hit-latency",
        about: "one read at a time that hits the lender, against a null FUSE server and TCP",
        run: hit_latency::run,
    },
    Bench {
        name: "hit-throughput",
        about: "many and large reads that hit the lender, against a null FUSE server and TCP",
        run: hit_throughput::run,
    },
    Bench { name: "page-server", about: "the lender alone, against memcached", run: page_server::run },
    Bench {
        name: "cached-read",
        about: "a file in the page cache, against the backing directory",
        run: cached_read::run,
    },
    Bench { name: "bypass", about: "a stream larger than the memory, against the backing directory", run: bypass::run },
    Bench {
        name: "metadata",
        about: "names and small files, against the backing directory, bindfs and mergerfs",
        run: metadata::run,
    },
    Bench {
        name: "write",
        about: "writes and syncs, through and back, against the backing directory",
        run: write::run,
    },
    Bench { name: "tap", about: "evictions with the tap and without, and what its ring loses", run: tap::run },
    Bench {
        name: "guest",
        about: "evictions whose pages are given to the host, against the tap alone and no tap",
        run: guest::run,
    },
    Bench {
        name: "watch",
        about: "cached reads and evictions that are watched, against ones that are not",
        run: watch::run,
    },
    Bench { name: "footprint", about: "memory of borrower and lender for each page lent", run: footprint::run },
    Bench {
        name: "sequential",
        about: "a file twice the size of the memory, read from end to end, with a lender and without",
        run: sequential::run,
    },
    Bench {
        name: "reclaim",
        about: "memory allocated beside a full lender, and beside an empty one",
        run: reclaim::run,
    },
    Bench {
        name: "never-slower",
        about: "many workloads, sizes and latencies, each with a lender and without",
        run: never_slower::run,
    },
    Bench {
        name: "neighbours",
        about: "hits and opens beside requests that wait for the disk, against the same alone",
        run: neighbours::run,
    },
];

/// Measurements of Puma, each next to its floor or its peer.
#[derive(Parser)]
#[command(name = "bench", version, max_term_width = 100)]
struct Options {
    /// The bench to run; or `all`: all benches, and adds their figures to the history; or `paper`,
    /// followed by one of the papers' experiments, or by `all`
    #[arg(required_unless_present = "list")]
    name: Option<String>,
    /// The experiment; and arguments for the processes that a bench starts
    #[arg(hide = true)]
    rest: Vec<String>,
    /// List the benches
    #[arg(long)]
    list: bool,
    /// Measure less, in some minutes
    #[arg(long)]
    quick: bool,
    /// For a test of the bench itself: some seconds, and meaningless figures
    #[arg(long, hide = true)]
    tiny: bool,
    /// Directory of the history that `all` writes
    #[arg(long, default_value = "bench/history")]
    history: PathBuf,
    /// For `paper`: divisor of the papers' sizes [default: 8; 32 with --quick]
    #[arg(long)]
    scale: Option<f64>,
    /// For `paper`: directory of the results
    #[arg(long, default_value = "bench/paper")]
    results: PathBuf,
    /// For `paper`: measure stored points again
    #[arg(long)]
    again: bool,
    /// For `paper`: measure one point, VARIANT at X, for example "exclusive at 0.5"; several runs
    /// may do so at once
    #[arg(long, value_name = "POINT")]
    only: Option<String>,
    /// Print the figures as one JSON object, too, as the last line
    #[arg(long)]
    json: bool,
    /// Seed of everything random [default: another one each time, printed]
    #[arg(long)]
    seed: Option<u64>,
    /// Directory on a disk, for the files [default: next to this program, or /var/tmp]
    #[arg(long)]
    dir: Option<PathBuf>,
}

impl Options {
    fn extent(&self) -> Extent {
        match (self.tiny, self.quick) {
            (true, _) => Extent::Tiny,
            (false, true) => Extent::Quick,
            (false, false) => Extent::Whole,
        }
    }

    fn seed(&self) -> u64 {
        self.seed.unwrap_or_else(|| fastrand::u32(..).into())
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.list {
        let width = BENCHES.iter().map(|bench| bench.name.len()).max().unwrap_or(0);
        let mut out = io::stdout().lock();
        // The reader of the output may have closed it.
        let _closed = BENCHES.iter().try_for_each(|bench| writeln!(out, "{:width$}  {}", bench.name, bench.about));
        let _closed = paper::list().try_for_each(|(name, about)| writeln!(out, "{} {name}: {about}", paper::NAME));
        return ExitCode::SUCCESS;
    }
    let name = options.name.as_deref().unwrap_or_default();
    if name == worker::NAME {
        return match worker::run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("bench worker: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let served = match (name, options.rest.as_slice()) {
        (null_server::NAME, [at, len_bytes]) => Some(null_server::run(Path::new(at), len_bytes.parse().unwrap_or(0))),
        (null_pages::NAME, []) => Some(null_pages::run()),
        _ => None,
    };
    if let Some(served) = served {
        return served.map_or_else(
            |error| {
                eprintln!("bench {name}: {error}");
                ExitCode::FAILURE
            },
            |()| ExitCode::SUCCESS,
        );
    }
    if let (paper::NAME, [experiment]) = (name, options.rest.as_slice()) {
        let papers = paper::Options {
            experiment,
            extent: options.extent(),
            scale: options.scale.unwrap_or_else(|| paper::scale(options.extent())),
            seed: options.seed.unwrap_or(paper::SEED),
            dir: options.dir.as_deref(),
            results: &options.results,
            again: options.again,
            only: options.only.as_deref(),
        };
        let ran = Interrupt::listen().map_err(Failure::from).and_then(|interrupt| paper::run(&papers, &interrupt));
        return exit_code(ran.map(|()| true));
    }
    if !options.rest.is_empty() {
        eprintln!("bench: one bench at a time; what is {:?}?", options.rest);
        return ExitCode::from(NOT_RUN);
    }
    let benches = match BENCHES.iter().position(|bench| bench.name == name) {
        Some(index) => &BENCHES[index..=index],
        None if name == ALL => &BENCHES,
        None => {
            let names = BENCHES.map(|bench| bench.name).join(", ");
            eprintln!("bench: there is no {name:?}; choose from {names}, {ALL}");
            return ExitCode::from(NOT_RUN);
        }
    };
    // Everything that was made is removed when this returns, on every path.
    let ran = Interrupt::listen().map_err(Failure::from).and_then(|interrupt| match benches {
        [bench] => run_one(bench, &options, &interrupt),
        all => run_all(all, &options, &interrupt),
    });
    exit_code(ran.map(|()| true))
}

/// Runs one bench. Returns its figures, and their conditions.
fn measure(
    bench: &Bench,
    options: &Options,
    seed: u64,
    interrupt: &Interrupt,
) -> Result<(Map<String, Value>, Conditions), Failure> {
    println!("{}: {} (seed {seed})", bench.name, bench.about);
    if cfg!(debug_assertions) {
        println!("These programs are not optimized: the figures are meaningless.");
    }
    let world = World::create(options.extent(), seed, options.dir.as_deref(), interrupt.clone())?;
    let figures = (bench.run)(&world)?;
    Ok((figures, world.conditions()))
}

fn run_one(bench: &Bench, options: &Options, interrupt: &Interrupt) -> Result<(), Failure> {
    let seed = options.seed();
    let (figures, conditions) = measure(bench, options, seed, interrupt)?;
    if options.json {
        let mut json = Map::new();
        json.insert("bench".to_owned(), bench.name.into());
        json.extend(figures);
        json.insert("extent".to_owned(), options.extent().name().into());
        json.insert("seed".to_owned(), seed.into());
        json.insert("conditions".to_owned(), json!(conditions));
        println!("{}", Value::Object(json));
    }
    Ok(())
}

/// Runs all benches, one after the other. A bench that cannot run is recorded, and the others run
/// nevertheless.
fn run_all(benches: &[Bench], options: &Options, interrupt: &Interrupt) -> Result<(), Failure> {
    let seed = options.seed();
    let (mut all, mut not_run) = (Map::new(), Map::new());
    let mut conditions = Conditions::now("unknown".to_owned());
    for bench in benches {
        match measure(bench, options, seed, interrupt) {
            Ok((figures, measured_on)) => {
                all.insert(bench.name.to_owned(), figures.into());
                conditions = measured_on;
            }
            Err(Failure::Problem(problem)) => {
                println!("{} could not be run to its end: {problem}", bench.name);
                not_run.insert(bench.name.to_owned(), problem.into());
            }
            Err(interrupted) => return Err(interrupted),
        }
        println!();
    }
    let line = history::line(&conditions, options.extent().name(), seed, &all, &not_run);
    // Meaningless figures are not stored.
    if options.extent() != Extent::Tiny && !cfg!(debug_assertions) {
        history::add(&options.history, &line)?;
    }
    if options.json {
        println!("{line}");
    }
    if not_run.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = not_run.keys().map(String::as_str).collect();
    Err(Failure::Problem(format!("{} could not be run", names.join(", "))))
}

/// The members of a JSON object.
fn members(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}
