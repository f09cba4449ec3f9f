//! The papers' experiments, repeated: each by its name, at a fraction of the papers' sizes.
//!
//! An experiment measures points: a variant (no Puma, all memory local, Puma in its strategies), a
//! size, a round. Each point is stored as a line in `raw/NAME.jsonl` as soon as it is measured, so
//! that an interrupted run continues from there. `RESULTS.md`, the CSV files and the charts are
//! made from these lines alone.
//!
//! The disk is the same for all: the machine's own, which the kernel's I/O controller slows down to
//! the speed of a disk with 7200 rpm.

mod blast;
mod dynamic;
mod experiments;
mod host_cache;
mod latency;
mod numa;
mod plot;
mod postgres;
mod postmark;
mod random_read;
mod record;
mod report;
mod scenario;
mod sequential_read;
mod slides;
mod ssd_cache;
mod tpcc;
mod tpch;
mod two_caches;

use crate::program::Program;
use crate::worker::Order;
use crate::world::{self, Extent, Lender, Side, Worker, World, grown};
use experiments::EXPERIMENTS;
use page::PAGE_SIZE;
use record::{Header, Point, Records};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use testbed::{Failure, Group, Interrupt};

/// The command; its argument is the name of an experiment, or `all`.
pub const NAME: &str = "paper";
/// Instead of an experiment's name.
const ALL: &str = "all";

/// The speed of a disk with 7200 rpm: random reads in a second (2015, baseline of fig. 5a: 166),
/// and bytes in a stream.
const DISK_READS_PER_S: u32 = 166;
const DISK_BYTES_PER_S: u64 = 100_000_000;
/// Reads of that disk in a second while caches are filled, which is not measured.
const FILLING_READS_PER_S: u32 = 8000;
/// The number of passes over the data after which caches count as full, and the minimum share of
/// its content that the lender must have then.
const FILLINGS: RangeInclusive<u64> = 2..=12;
const FULL_SHARE: f64 = 0.99;
/// The threads of such a pass, and bytes of a read of a program's files.
const FILLING_THREADS: usize = 16;
const FILLING_BLOCK_BYTES: usize = 64 << 10;

/// The papers' sizes: memory of the borrower, most of it page cache, and the data.
const LOCAL_BYTES: u64 = 1 << 30;
const DATA_BYTES: u64 = 4 << 30;
/// Memory of a lender with which everything fits, in GiB of the papers, and the minimum in their
/// experiments with programs.
const ALL_FITS_GIB: f64 = 5.0;
const LITTLE_GIB: f64 = 0.5;
/// The default seed: an interrupted run continues with the same one.
pub const SEED: u64 = 1;

/// The minimum memory in which any program can start.
const PROGRAM_BYTES_MIN: u64 = 16 << 20;
/// The mount of a program that writes has additional memory, one part of the borrower's in so many:
/// for the page cache of its writes to the backing directory, and for its files. With less the
/// kernel kills it.
const MOUNT_SHARE: u64 = 8;
const MOUNT_BYTES_MIN: u64 = 64 << 20;

/// A program writes as to any file system: into the page cache.
const PROGRAM_OPTIONS: [&str; 2] = ["--write", "back"];
/// Read-ahead on the slow disk: enough for a stream to reach the limit on bytes, not so much that
/// it fills a small memory.
const READ_AHEAD_KIB: u32 = 1024;

/// Memory of the lender and its group beyond the lent memory.
const LENDER_ROOM_BYTES: u64 = 64 << 20;
const LENDER_RESERVE_BYTES: u64 = 16 << 20;

/// Variants without Puma: the borrower alone, and one machine with all the memory.
const BASELINE: &str = "baseline";
const IDEAL: &str = "ideal";
/// Suffix of the baseline's name without the additional memory of mounts, as the papers' baselines
/// were.
const LOCAL_ALONE: &str = "local memory alone";
/// Variants with Puma, and the options of its mounts. The gate has an experiment of its own
/// (`latency`): while caches are filled the disk is fast, and the gate would rightly bypass the
/// lender.
const VARIANTS: [(&str, [&str; 6]); 4] = [
    ("exclusive", ["--strategy", "exclusive", "--filter", "off", "--gate", "off"]),
    ("exclusive, filter", ["--strategy", "exclusive", "--filter", "on", "--gate", "off"]),
    ("non-inclusive", ["--strategy", "non-inclusive", "--filter", "off", "--gate", "off"]),
    ("non-inclusive, filter", ["--strategy", "non-inclusive", "--filter", "on", "--gate", "off"]),
];

/// Unless an experiment has others.
const VARIANTS_QUICK: [&str; 2] = ["exclusive", "non-inclusive"];

/// One experiment.
struct Experiment {
    name: &'static str,
    about: &'static str,
    /// Its place in the papers.
    source: &'static str,
    x: Axis,
    /// The divisor of the papers' sizes for the requested one: not every program can make its data
    /// as small.
    scale: fn(f64, Extent) -> f64,
    run: fn(&mut Run<'_>) -> Result<(), Failure>,
    /// The results of its points.
    results: fn(&Records) -> report::Results,
}

/// The varied parameter of an experiment.
struct Axis {
    /// Its name in a CSV file.
    key: &'static str,
    name: &'static str,
    is_log: bool,
}

const LENT: Axis = Axis { key: "lent_gib_of_the_paper", name: "memory of the lender, GiB of the paper", is_log: false };
const LATENCY: Axis = Axis { key: "latency_ms", name: "added to each round trip, ms", is_log: false };
const ONE: Axis = Axis { key: "nothing", name: "all fits", is_log: false };
const CLONES: Axis = Axis { key: "clones", name: "repositories that are cloned at once", is_log: false };
const TIME: Axis = Axis { key: "minutes_of_the_paper", name: "time, minutes of the paper", is_log: false };
const GUEST: Axis = Axis { key: "guest_gb_of_the_paper", name: "memory of the guest, GB of the paper", is_log: false };
const APPLICATION: Axis = Axis { key: "application_gib", name: "memory of the application, GiB", is_log: false };
const FRAGMENT: Axis = Axis { key: "fragment_kib", name: "size of a fragment, KiB", is_log: true };

/// The options of a run.
pub struct Options<'a> {
    pub experiment: &'a str,
    pub extent: Extent,
    /// The divisor of the papers' sizes.
    pub scale: f64,
    pub seed: u64,
    pub dir: Option<&'a Path>,
    /// The folder of the results.
    pub results: &'a Path,
    /// Ignore stored results.
    pub again: bool,
    /// The label ([`label`]) of the one point to measure.
    pub only: Option<&'a str>,
}

/// The data that is read or used, and the memory for it without a lender.
#[derive(Clone, Copy)]
struct Subject<'a> {
    /// The name of its directory.
    name: &'a str,
    kind: Kind<'a>,
    /// The memory of the borrower: page cache; with a program, also the program's own needs.
    local_bytes: u64,
    /// Additional memory of its mount. A program that uses the data without a mount has as much
    /// more itself.
    beside_bytes: u64,
    data_bytes: u64,
    /// Memory of the lender, in GiB of the papers.
    lent_gib: &'a [f64],
}

/// The maker of the data.
#[derive(Clone, Copy)]
enum Kind<'a> {
    /// A file of this program.
    File,
    /// A directory, which this function fills, or fills again, before each case.
    Directory(&'a dyn Fn(&Path) -> Result<(), Failure>),
}

/// A measured case: a variant with a size.
struct Case<'a> {
    variant: &'a str,
    /// The value of the varied parameter.
    x: f64,
    /// The page cache of the reader, or the memory of a program.
    cache_bytes: u64,
    /// The file and its used length, or the directory.
    path: PathBuf,
    data_bytes: u64,
    /// The mount through which it is read, and its lender.
    side: Option<&'a Side>,
    lender: Option<&'a Lender>,
}

/// One counter of a borrower.
type Counter = fn(&::report::Borrower) -> u64;

impl Case<'_> {
    /// A case that another program measures, or another machine.
    fn elsewhere(variant: &str, x: f64) -> Case<'_> {
        Case { variant, x, cache_bytes: 0, data_bytes: 0, path: PathBuf::new(), side: None, lender: None }
    }

    /// Counters of the borrower: values to keep, by which counter each is. None without Puma.
    fn counters(&self, keys: &[(&'static str, Counter)]) -> Result<BTreeMap<&'static str, u64>, Failure> {
        let Some(side) = self.side else { return Ok(BTreeMap::new()) };
        keys.iter().map(|(key, counter)| Ok((*key, side.counter(counter)?))).collect()
    }

    /// Their growth since then, for each of so many operations.
    fn grown_for_each(
        &self,
        keys: &[(&'static str, Counter)],
        before: &BTreeMap<&'static str, u64>,
        operations: f64,
    ) -> Result<BTreeMap<String, f64>, Failure> {
        let for_each = |(key, after): (&str, u64)| {
            let more = grown(before[key], after)?;
            Ok((key.to_owned(), more as f64 / operations))
        };
        self.counters(keys)?.into_iter().map(for_each).collect()
    }
}

/// Measures all rounds of a case.
type Measure<'m> = dyn Fn(&mut Run<'_>, &Case<'_>) -> Result<(), Failure> + 'm;
/// Prepares a subject and measures it.
type Study<'s> = dyn Fn(&mut Run<'_>, &Subject<'_>, &Measure<'_>) -> Result<(), Failure> + 's;

/// A program's result for a round ([`Run::keep_what_it_says`]).
#[derive(Deserialize)]
struct Round {
    variant: String,
    /// The value of the varied parameter, if there is one.
    #[serde(default)]
    x: f64,
    round: usize,
    /// Its kernel, and its machine.
    machine: String,
    #[serde(flatten)]
    values: BTreeMap<String, f64>,
}

/// A running experiment.
struct Run<'a> {
    world: &'a World,
    scale: f64,
    /// The number of rounds of each point.
    rounds: usize,
    /// The variants of a quick run.
    variants_quick: [&'static str; 2],
    /// The label of the one point to measure, if not all are requested.
    only: Option<String>,
    revision: String,
    records: Records,
}

impl Run<'_> {
    /// Our bytes for bytes of the papers: whole pages.
    fn bytes(&self, of_the_papers: u64) -> u64 {
        (of_the_papers as f64 / self.scale) as u64 / 4096 * 4096
    }

    /// The lender's memory, in GiB of the papers.
    fn lent_gib(&self) -> &'static [f64] {
        self.world.extent.choose(&[0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0], &[2.5, 5.0], &[5.0])
    }

    /// A lender of so many GiB of the papers.
    fn lend(&self, gib: f64) -> Result<Lender, Failure> {
        let bytes = self.bytes((gib * (1u64 << 30) as f64) as u64);
        self.world.lend(bytes + LENDER_ROOM_BYTES, bytes, LENDER_RESERVE_BYTES)
    }

    /// Sets the disk's speed for filling caches.
    fn disk_for_filling(&self) -> Result<(), Failure> {
        self.world.disk.limit_reads(Some(FILLING_READS_PER_S))?;
        Ok(self.world.disk.limit_read_bytes(None)?)
    }

    /// Sets the disk's speed for measurements.
    fn disk_as_measured(&self) -> Result<(), Failure> {
        self.world.disk.limit_reads(Some(DISK_READS_PER_S))?;
        Ok(self.world.disk.limit_read_bytes(Some(DISK_BYTES_PER_S))?)
    }

    /// Sets the disk's speed for a single stream, for which a disk does not seek.
    fn disk_as_streamed(&self) -> Result<(), Failure> {
        self.world.disk.limit_reads(None)?;
        Ok(self.world.disk.limit_read_bytes(Some(DISK_BYTES_PER_S))?)
    }

    /// Reads until the lender has the data that does not fit into local memory. `read` gets the
    /// number of calls.
    fn until_full(&self, case: &Case<'_>, mut read: impl FnMut(u64) -> Result<(), Failure>) -> Result<(), Failure> {
        for pass in 1..=*FILLINGS.end() {
            read(pass)?;
            if pass < *FILLINGS.start() {
                continue;
            }
            let (Some(side), Some(lender)) = (case.side, case.lender) else { return Ok(()) };
            side.settle()?;
            let wanted_bytes = lender.capacity_bytes.min(case.data_bytes.saturating_sub(case.cache_bytes));
            let stored_bytes = lender.stored_pages()? * PAGE_SIZE as u64;
            if stored_bytes as f64 >= FULL_SHARE * wanted_bytes as f64 {
                return Ok(());
            }
            if pass == *FILLINGS.end() {
                let problem = format!(
                    "{} with {}: the lender has {} MiB of {} after {pass} passes over the data",
                    case.variant,
                    case.x,
                    stored_bytes >> 20,
                    wanted_bytes >> 20
                );
                return Err(Failure::Problem(problem));
            }
        }
        Ok(())
    }

    /// Fills the caches with a file.
    fn fill_caches_from_file(
        &self,
        case: &Case<'_>,
        worker: &mut Worker<'_>,
        block_bytes: usize,
    ) -> Result<(), Failure> {
        // Each thread has a block of its own in the little memory of the group.
        let threads = (FILLING_THREADS * PAGE_SIZE / block_bytes).max(1);
        self.disk_for_filling()?;
        self.until_full(case, |pass| {
            let (path, len_bytes, seed) = (case.path.clone(), case.data_bytes, self.world.seed.wrapping_sub(pass));
            worker.obey(&Order::Once { path, len_bytes, block_bytes, threads, seed }).map(drop)
        })
    }

    /// Fills the caches with the files of a program, before it is started.
    fn fill_caches(&self, case: &Case<'_>, group: &Group) -> Result<(), Failure> {
        let mut worker = Worker::start(&self.world.interrupt, &[group])?;
        let (directory, len_bytes, seed) = (case.path.clone(), case.data_bytes, self.world.seed);
        let block_bytes = FILLING_BLOCK_BYTES;
        self.disk_for_filling()?;
        self.until_full(case, |pass| {
            let (directory, seed) = (directory.clone(), seed.wrapping_add(pass));
            worker.obey(&Order::Files { directory, len_bytes, block_bytes, seed }).map(drop)
        })
    }

    /// Whether a point need not be measured: all its rounds are stored, or another one is
    /// requested.
    fn has(&self, variant: &str, x: f64) -> bool {
        self.only.as_ref().is_some_and(|only| *only != label(variant, x))
            || (0..self.rounds).all(|round| self.records.has(variant, x, round))
    }

    /// The borrower's file, which this program reads.
    fn file<'n>(&self, name: &'n str) -> Subject<'n> {
        let (local_bytes, data_bytes) = (self.bytes(LOCAL_BYTES), self.bytes(DATA_BYTES));
        Subject { name, kind: Kind::File, local_bytes, beside_bytes: 0, data_bytes, lent_gib: self.lent_gib() }
    }

    /// The directory of a program that also writes. It has enough memory to start, however small
    /// the scale is.
    fn directory<'n>(
        &self,
        name: &'n str,
        of_the_papers_bytes: u64,
        data_bytes: u64,
        fill: &'n dyn Fn(&Path) -> Result<(), Failure>,
    ) -> Subject<'n> {
        let local_bytes = self.bytes(of_the_papers_bytes).max(PROGRAM_BYTES_MIN);
        let beside_bytes = (local_bytes / MOUNT_SHARE).max(MOUNT_BYTES_MIN);
        let lent_gib: &[f64] =
            self.world.extent.choose(&[LITTLE_GIB, 1.0, 3.0, ALL_FITS_GIB], &[ALL_FITS_GIB], &[ALL_FITS_GIB]);
        Subject { name, kind: Kind::Directory(fill), local_bytes, beside_bytes, data_bytes, lent_gib }
    }

    /// Measures a variant through a mount.
    fn with_puma(
        &mut self,
        subject: &Subject<'_>,
        (variant, x): (&str, f64),
        (lender, address): (&Lender, SocketAddr),
        options: &[&str],
        measure: &Measure<'_>,
    ) -> Result<(), Failure> {
        let side = self.mount(subject, address, options)?;
        let path = match subject.kind {
            Kind::File => side.file.clone(),
            Kind::Directory(_) => side.at.clone(),
        };
        let cache_bytes = subject.local_bytes;
        let data_bytes = self.data_bytes(subject)?;
        let (side_of_it, lender) = (Some(&side), Some(lender));
        measure(self, &Case { variant, x, cache_bytes, data_bytes, path, side: side_of_it, lender })?;
        side.end()
    }

    /// Mounts it. Page cache of an earlier case is not part of this one's memory.
    fn mount(&self, subject: &Subject<'_>, lender: SocketAddr, options: &[&str]) -> Result<Side, Failure> {
        let name = subject.name;
        match subject.kind {
            Kind::File => {
                let side = self.world.mount(name, subject.data_bytes, Some(lender), options)?;
                side.drop_cached()?;
                Ok(side)
            }
            Kind::Directory(fill) => {
                self.fill(name, fill)?;
                // A subject that is only read has no page cache of the backing file.
                if subject.beside_bytes == 0 {
                    return self.world.mount(name, 0, Some(lender), options);
                }
                self.world.mount_limited(
                    name,
                    subject.beside_bytes,
                    Some(lender),
                    &[options, &PROGRAM_OPTIONS].concat(),
                )
            }
        }
    }

    /// The length of the data after it was filled.
    fn data_bytes(&self, subject: &Subject<'_>) -> Result<u64, Failure> {
        match subject.kind {
            Kind::File => Ok(subject.data_bytes),
            Kind::Directory(_) => {
                let directory = self.world.path(subject.name);
                let len = |path: &PathBuf| std::fs::metadata(path).map(|file| file.len());
                let lens = world::files_under(&directory).and_then(|files| files.iter().map(len).sum());
                lens.map_err(Failure::attempted(format!("looking through {}", directory.display())))
            }
        }
    }

    fn fill(&self, name: &str, fill: impl Fn(&Path) -> Result<(), Failure>) -> Result<PathBuf, Failure> {
        let directory = self.world.path(name);
        fill(&directory)?;
        world::drop_cached_under(&directory)?;
        Ok(directory)
    }

    /// Measures the baseline, by its name; also with the local memory alone, if a mount would have
    /// additional memory, except in a quick run.
    fn baselines(
        &mut self,
        (variant, x): (&str, f64),
        subject: &Subject<'_>,
        measure: &Measure<'_>,
    ) -> Result<(), Failure> {
        self.without_puma((variant, x), subject, subject.local_bytes, measure)?;
        if subject.beside_bytes == 0 || self.world.extent == Extent::Quick {
            return Ok(());
        }
        let alone = Subject { beside_bytes: 0, ..*subject };
        self.without_puma((&local_alone(variant), x), &alone, alone.local_bytes, measure)
    }

    /// Measures a variant in the backing directory, if it is not stored yet.
    fn without_puma(
        &mut self,
        (variant, x): (&str, f64),
        subject: &Subject<'_>,
        cache_bytes: u64,
        measure: &Measure<'_>,
    ) -> Result<(), Failure> {
        if self.has(variant, x) {
            return Ok(());
        }
        let path = match subject.kind {
            Kind::File => {
                let side = self.world.mount(subject.name, subject.data_bytes, None, &[])?;
                side.drop_cached()?;
                let backing = side.backing.clone();
                side.end()?;
                backing
            }
            Kind::Directory(fill) => self.fill(subject.name, fill)?,
        };
        let (cache_bytes, data_bytes) = (cache_bytes + subject.beside_bytes, self.data_bytes(subject)?);
        measure(self, &Case { variant, x, cache_bytes, data_bytes, path, side: None, lender: None })
    }

    /// Runs a program that measures in virtual machines, from the root of the sources, and stores
    /// the rounds of its output, each a line. Lines that begin with # are for the user.
    fn keep_what_it_says(&mut self, path: &str, mut command: Command, groups: &[&Group]) -> Result<(), Failure> {
        if !Path::new(path).exists() {
            return Err(Failure::Problem(format!("there is no {path} here: run it from the root of the sources")));
        }
        command.stdin(Stdio::null());
        let mut program = Program::start(self.world, &path.replace('/', "-"), command, groups)?;
        while let Some(line) = program.next_line()? {
            if line.starts_with('#') {
                println!("{line}");
                continue;
            }
            let said: Round = serde_json::from_str(&line)
                .map_err(|error| Failure::Problem(format!("{path} printed {line:?}: {error}")))?;
            self.keep_from(&Case::elsewhere(&said.variant, said.x), said.round, said.values, Some(said.machine))?;
        }
        Ok(())
    }

    /// Stores a round of a case.
    fn keep(&mut self, case: &Case<'_>, round: usize, values: BTreeMap<String, f64>) -> Result<(), Failure> {
        self.keep_from(case, round, values, None)
    }

    /// Stores a round of a case from another machine.
    fn keep_from(
        &mut self,
        case: &Case<'_>,
        round: usize,
        values: BTreeMap<String, f64>,
        place: Option<String>,
    ) -> Result<(), Failure> {
        let Case { variant, x, .. } = *case;
        let said: Vec<String> = values.iter().map(|(key, value)| format!("{key} {value:.3}")).collect();
        println!("{variant}, {x}, round {}: {}", round + 1, said.join(", "));
        let (revision, on_its_own) = (self.revision.clone(), self.only.is_some());
        self.records.add(Point { variant: variant.to_owned(), x, round, values, revision, place, on_its_own })
    }
}

/// Measures each variant, at each size, that is not stored yet: without Puma in the backing
/// directory, with it through a mount. The most important cases come first, in case the run takes
/// too long: those in which everything fits. The last one is the baseline that matters if little
/// fits.
fn compare(run: &mut Run<'_>, subject: &Subject<'_>, measure: &Measure<'_>) -> Result<(), Failure> {
    let baseline = (BASELINE, 0.0);
    run.without_puma(baseline, subject, subject.local_bytes, measure)?;
    run.without_puma((IDEAL, 0.0), subject, subject.data_bytes + subject.local_bytes, measure)?;
    let is_quick = run.world.extent == Extent::Quick;
    for &x in subject.lent_gib.iter().rev() {
        for (variant, options) in VARIANTS {
            if run.has(variant, x) || is_quick && !run.variants_quick.contains(&variant) {
                continue;
            }
            let lender = run.lend(x)?;
            run.with_puma(subject, (variant, x), (&lender, lender.address), &options, measure)?;
        }
    }
    run.baselines(baseline, subject, measure)
}

/// The label of a point.
fn label(variant: &str, x: f64) -> String {
    format!("{variant} at {x}")
}

/// The name of a baseline with the local memory alone.
fn local_alone(baseline: &str) -> String {
    format!("{baseline}, {LOCAL_ALONE}")
}

/// Any scale is possible.
fn as_asked(scale: f64, _: Extent) -> f64 {
    scale
}

/// The default divisor of the papers' sizes.
pub fn scale(extent: Extent) -> f64 {
    extent.choose(8.0, 32.0, 512.0)
}

/// The names and subjects, for `--list`.
pub fn list() -> impl Iterator<Item = (&'static str, &'static str)> {
    EXPERIMENTS.iter().map(|experiment| (experiment.name, experiment.about))
}

/// Runs one experiment or all, and writes the results again.
pub fn run(options: &Options<'_>, interrupt: &Interrupt) -> Result<(), Failure> {
    let chosen = match EXPERIMENTS.iter().position(|experiment| experiment.name == options.experiment) {
        Some(index) => &EXPERIMENTS[index..=index],
        None if options.experiment == ALL => &EXPERIMENTS[..],
        None => {
            let names = EXPERIMENTS.map(|experiment| experiment.name).join(", ");
            let message = format!("there is no experiment {:?}; choose from {names}, {ALL}", options.experiment);
            return Err(Failure::Problem(message));
        }
    };
    if !(1.0..=1024.0).contains(&options.scale) {
        let message = format!("sizes divided by {}: choose a --scale from 1 to 1024", options.scale);
        return Err(Failure::Problem(message));
    }
    let mut not_run = Vec::new();
    for (nth, experiment) in chosen.iter().enumerate() {
        let scale = (experiment.scale)(options.scale, options.extent);
        println!(
            "{} ({} of {}): {}; sizes of the paper divided by {:.1}",
            experiment.name,
            nth + 1,
            chosen.len(),
            experiment.about,
            scale
        );
        match one(experiment, scale, options, interrupt) {
            // The others run nevertheless.
            Err(Failure::Problem(problem)) => {
                println!("{} could not be run to its end: {problem}", experiment.name);
                not_run.push(format!("{}: {problem}", experiment.name));
            }
            ran => ran?,
        }
    }
    report::write(options.results, &EXPERIMENTS)?;
    if not_run.is_empty() { Ok(()) } else { Err(Failure::Problem(not_run.join("; "))) }
}

fn one(experiment: &Experiment, scale: f64, options: &Options<'_>, interrupt: &Interrupt) -> Result<(), Failure> {
    let world = World::create(options.extent, options.seed, options.dir, interrupt.clone())?;
    let _read_ahead = world.disk.read_ahead(READ_AHEAD_KIB)?;
    let header = Header::new(world.conditions(), options.extent.name(), scale, options.seed);
    let revision = header.revision();
    let records = Records::open(options.results, experiment.name, header, options.again)?;
    let (rounds, only) = (options.extent.choose(5, 3, 2), options.only.map(str::to_owned));
    let mut run = Run { world: &world, scale, rounds, variants_quick: VARIANTS_QUICK, only, revision, records };
    (experiment.run)(&mut run)?;
    match options.only {
        Some(only) if run.records.points.iter().all(|point| label(&point.variant, point.x) != only) => {
            let problem = format!("nothing was measured as {only:?}: a point is asked for as in \"exclusive at 0.5\"");
            Err(Failure::Problem(problem))
        }
        _ => Ok(()),
    }
}
