//! The benches: each prints its figure beside its floor or its peer, which it measures in the same run, in turns with it.
//!
//! `bench/run NAME` builds and runs one. A bench that cannot be run on a machine says why and ends with 2. Everything that is made is
//! removed, also when it fails or is interrupted. docs/performance.md says what each measures.

mod bypass;
mod cached_read;
mod dialects;
mod figures;
mod footprint;
mod hit;
mod hit_latency;
mod hit_throughput;
mod metadata;
mod never_slower;
mod null_server;
mod page_server;
mod reading;
mod reclaim;
mod sequential;
mod tap;
mod tree;
mod worker;
mod world;
mod write;
mod writing;

use clap::Parser;
use serde_json::{Map, Value};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use testbed::{Failure, Interrupt};
use world::{Extent, World};

/// Exit code: it could not be run.
const NOT_RUN: u8 = 2;
/// Exit codes of programs ended by a signal begin here.
const SIGNALLED: u8 = 128;

/// A bench: its name, what it says, and how it is run. It returns its figures.
struct Bench {
    name: &'static str,
    about: &'static str,
    run: fn(&World) -> Result<Map<String, Value>, Failure>,
}

/// In the order in which they are listed, and run by `all`.
const BENCHES: [Bench; 12] = [
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
        about: "a file in the page cache, against the directory below",
        run: cached_read::run,
    },
    Bench { name: "bypass", about: "a stream larger than the memory, against the directory below", run: bypass::run },
    Bench {
        name: "metadata",
        about: "names and small files, against the directory below, bindfs and mergerfs",
        run: metadata::run,
    },
    Bench { name: "write", about: "writes and syncs, through and back, against the directory below", run: write::run },
    Bench { name: "tap", about: "evictions with the tap and without, and what its ring loses", run: tap::run },
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
];

/// Measurements of Puma, each beside its floor or its peer.
#[derive(Parser)]
#[command(name = "bench", version, max_term_width = 100)]
struct Options {
    /// The bench to run
    #[arg(required_unless_present = "list")]
    name: Option<String>,
    /// For the processes that a bench starts
    #[arg(hide = true)]
    rest: Vec<String>,
    /// Name the benches
    #[arg(long)]
    list: bool,
    /// Measure less, in some minutes
    #[arg(long)]
    quick: bool,
    /// For a test of the bench itself: some seconds, and figures that say nothing
    #[arg(long, hide = true)]
    tiny: bool,
    /// Print the figures as one JSON object, too, as the last line
    #[arg(long)]
    json: bool,
    /// Of everything that is drawn [default: another one each time, printed]
    #[arg(long)]
    seed: Option<u64>,
    /// Directory on a disk, for the files [default: next to this program, or /var/tmp]
    #[arg(long)]
    dir: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.list {
        let width = BENCHES.iter().map(|bench| bench.name.len()).max().unwrap_or(0);
        let mut out = io::stdout().lock();
        // Who reads may have seen enough.
        let _closed = BENCHES.iter().try_for_each(|bench| writeln!(out, "{:width$}  {}", bench.name, bench.about));
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
    if let (null_server::NAME, [at, len_bytes]) = (name, options.rest.as_slice()) {
        let served = null_server::run(Path::new(at), len_bytes.parse().unwrap_or(0));
        return served.map_or_else(
            |error| {
                eprintln!("bench {name}: {error}");
                ExitCode::FAILURE
            },
            |()| ExitCode::SUCCESS,
        );
    }
    if !options.rest.is_empty() {
        eprintln!("bench: one bench at a time; what is {:?}?", options.rest);
        return ExitCode::from(NOT_RUN);
    }
    let Some(bench) = BENCHES.iter().find(|bench| bench.name == name) else {
        let names = BENCHES.map(|bench| bench.name).join(", ");
        eprintln!("bench: there is no {name:?}; choose from {names}");
        return ExitCode::from(NOT_RUN);
    };
    // Everything that was made is gone when this returns, on every path.
    match run(bench, &options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Interrupted(signal)) => {
            eprintln!("Interrupted. Everything that was made is removed.");
            ExitCode::from(SIGNALLED + u8::try_from(signal).unwrap_or(0))
        }
        Err(Failure::Problem(problem)) => {
            eprintln!("bench {name} could not be run to its end: {}", problem.replace('\n', " "));
            ExitCode::from(NOT_RUN)
        }
    }
}

fn run(bench: &Bench, options: &Options) -> Result<(), Failure> {
    let interrupt = Interrupt::listen()?;
    let extent = match (options.tiny, options.quick) {
        (true, _) => Extent::Tiny,
        (false, true) => Extent::Quick,
        (false, false) => Extent::Whole,
    };
    let seed = options.seed.unwrap_or_else(|| fastrand::u32(..).into());
    println!("{}: {} (seed {seed})", bench.name, bench.about);
    if cfg!(debug_assertions) {
        println!("These programs are not optimized: the figures say nothing.");
    }
    let world = World::create(extent, seed, options.dir.as_deref(), interrupt)?;
    let figures = (bench.run)(&world)?;
    if options.json {
        let mut json = Map::new();
        json.insert("bench".to_owned(), bench.name.into());
        json.extend(figures);
        json.insert("extent".to_owned(), extent.choose("whole", "quick", "tiny").into());
        json.insert("seed".to_owned(), seed.into());
        let conditions = serde_json::to_value(world.conditions());
        json.insert("conditions".to_owned(), conditions.map_err(|error| Failure::Problem(error.to_string()))?);
        drop(world);
        println!("{}", Value::Object(json));
    }
    Ok(())
}

/// The members of a JSON object that was written as one.
fn members(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}
