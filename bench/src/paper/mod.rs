//! The papers' experiments, again: each by its name, at a fraction of the papers' sizes.
//!
//! An experiment measures points: a variant (no Puma, all memory local, Puma in its strategies), a size, a round. Each point is kept as a line
//! in `raw/NAME.jsonl` as soon as it is there, so that a long run that was interrupted goes on where it was. From these lines alone
//! `RESULTS.md`, the CSV files and the charts are made.
//!
//! The disk is the same for all: the machine's own, which the kernel's I/O controller slows down to what a disk of 7200 rpm does.

mod latency;
mod plot;
mod random_read;
mod record;
mod report;
mod sequential_read;
mod slides;

use crate::world::{Extent, Lender, Side, World};
use record::{Header, Records};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use testbed::{Failure, Interrupt};

/// The command; behind it the name of an experiment, or `all`.
pub const NAME: &str = "paper";
/// In the place of an experiment.
const ALL: &str = "all";

/// What a disk of 7200 rpm does in a second: reads at random (2015, baseline of fig. 5a: 166), and bytes in a stream.
const DISK_READS_PER_S: u32 = 166;
const DISK_BYTES_PER_S: u64 = 100_000_000;
/// The same while caches are filled, which nobody measures.
const FILLING_READS_PER_S: u32 = 8000;

/// The papers' sizes: memory of the borrower, of which the page cache is most, and the data.
const LOCAL_BYTES: u64 = 1 << 30;
const DATA_BYTES: u64 = 4 << 30;
/// Of all that is drawn, unless another one is asked for: an interrupted run goes on with the same.
pub const SEED: u64 = 1;

/// What the lender and its group have beyond what it lends.
const LENDER_ROOM_BYTES: u64 = 64 << 20;
const LENDER_RESERVE_BYTES: u64 = 16 << 20;

/// Variants without Puma: the borrower alone, and one machine with all the memory.
const BASELINE: &str = "baseline";
const IDEAL: &str = "ideal";
/// Those with Puma, and the options of its mounts.
const VARIANTS: [(&str, [&str; 4]); 4] = [
    ("exclusive", ["--strategy", "exclusive", "--filter", "off"]),
    ("exclusive, filter", ["--strategy", "exclusive", "--filter", "on"]),
    ("non-inclusive", ["--strategy", "non-inclusive", "--filter", "off"]),
    ("non-inclusive, filter", ["--strategy", "non-inclusive", "--filter", "on"]),
];

/// One experiment.
struct Experiment {
    name: &'static str,
    about: &'static str,
    /// Where the papers have it.
    source: &'static str,
    x: Axis,
    run: fn(&mut Run<'_>) -> Result<(), Failure>,
    /// What its points say.
    results: fn(&Records) -> report::Results,
}

/// What an experiment varies.
struct Axis {
    /// In a CSV file.
    key: &'static str,
    name: &'static str,
    is_log: bool,
}

const LENT: Axis = Axis { key: "lent_gib_of_the_paper", name: "memory of the lender, GiB of the paper", is_log: false };
const LATENCY: Axis = Axis { key: "latency_ms", name: "added to each round trip, ms", is_log: false };
const FRAGMENT: Axis = Axis { key: "fragment_kib", name: "size of a fragment, KiB", is_log: true };

/// In the order of RESULTS.md.
const EXPERIMENTS: [Experiment; 4] = [
    Experiment {
        name: "random-read",
        about: "one thread reads 4 KiB at random offsets of one file",
        source: "2015, fig. 4 and 5a; 2014, fig. 3 and 4",
        x: LENT,
        run: random_read::run,
        results: random_read::results,
    },
    Experiment {
        name: "sequential-read",
        about: "one file is read from end to end, over and over",
        source: "2015, fig. 5b",
        x: LENT,
        run: sequential_read::run,
        results: sequential_read::results,
    },
    Experiment {
        name: "latency",
        about: "random and sequential reads, when all fits, over a network that is slower",
        source: "2015, fig. 7",
        x: LATENCY,
        run: latency::run,
        results: latency::results,
    },
    Experiment {
        name: "slides",
        about: "fragments at random places of a file, 32 MB in all, with the lender empty, or with all of the file",
        source: "slides of 2013, three figures",
        x: FRAGMENT,
        run: slides::run,
        results: slides::results,
    },
];

/// What is asked for.
pub struct Options<'a> {
    pub experiment: &'a str,
    pub extent: Extent,
    /// The papers' sizes are divided by it.
    pub scale: f64,
    pub seed: u64,
    pub dir: Option<&'a Path>,
    /// Where results are kept.
    pub results: &'a Path,
    /// Forget what is kept.
    pub again: bool,
}

/// What is measured: a variant with a size.
struct Case<'a> {
    variant: &'a str,
    /// What the experiment varies.
    x: f64,
    /// The page cache of who reads.
    cache_bytes: u64,
    /// The file, and how much of it is used.
    path: PathBuf,
    data_bytes: u64,
    /// The mount that it is read through.
    side: Option<&'a Side>,
}

impl Case<'_> {
    /// Counters of the borrower: values to keep, by which counter each is. None without Puma.
    fn counters(&self, keys: &[(&'static str, &str)]) -> Result<BTreeMap<&'static str, u64>, Failure> {
        let Some(side) = self.side else { return Ok(BTreeMap::new()) };
        keys.iter().map(|(key, counter)| Ok((*key, side.counter(counter)?))).collect()
    }

    /// How much they have grown since, for each of so many operations.
    fn grown_for_each(
        &self,
        keys: &[(&'static str, &str)],
        before: &BTreeMap<&'static str, u64>,
        operations: f64,
    ) -> Result<BTreeMap<String, f64>, Failure> {
        let for_each =
            |(key, after): (&str, u64)| (key.to_owned(), after.saturating_sub(before[key]) as f64 / operations);
        Ok(self.counters(keys)?.into_iter().map(for_each).collect())
    }
}

/// An experiment under way.
struct Run<'a> {
    world: &'a World,
    scale: f64,
    records: Records,
}

impl Run<'_> {
    /// Bytes of ours for bytes of the papers: whole pages.
    fn bytes(&self, of_the_papers: u64) -> u64 {
        (of_the_papers as f64 / self.scale) as u64 / 4096 * 4096
    }

    /// The lender's memory, in GiB of the papers.
    fn lent_gib(&self) -> &'static [f64] {
        self.world.extent.choose(&[0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0], &[1.0, 2.0, 3.0, 4.0, 5.0], &[5.0])
    }

    fn rounds(&self) -> usize {
        self.world.extent.choose(5, 3, 2)
    }

    /// A lender of so many GiB of the papers.
    fn lend(&self, gib: f64) -> Result<Lender, Failure> {
        let bytes = self.bytes((gib * (1u64 << 30) as f64) as u64);
        self.world.lend(bytes + LENDER_ROOM_BYTES, bytes, LENDER_RESERVE_BYTES)
    }

    /// The disk as fast as while caches are filled.
    fn disk_for_filling(&self) -> Result<(), Failure> {
        self.world.disk.limit_reads(Some(FILLING_READS_PER_S))?;
        Ok(self.world.disk.limit_read_bytes(None)?)
    }

    /// The disk as slow as it is to be.
    fn disk_as_measured(&self) -> Result<(), Failure> {
        self.world.disk.limit_reads(Some(DISK_READS_PER_S))?;
        Ok(self.world.disk.limit_read_bytes(Some(DISK_BYTES_PER_S))?)
    }

    /// Whether all rounds of a point are kept.
    fn has(&self, variant: &str, x: f64) -> bool {
        (0..self.rounds()).all(|round| self.records.has(variant, x, round))
    }

    /// Has each variant measured, at each size, that is not kept yet: without Puma in the directory below, with it through a mount.
    fn compare(
        &mut self,
        name: &str,
        measure: impl Fn(&mut Run<'_>, &Case<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let (local_bytes, data_bytes) = (self.bytes(LOCAL_BYTES), self.bytes(DATA_BYTES));
        for (variant, cache_bytes) in [(BASELINE, local_bytes), (IDEAL, data_bytes + local_bytes)] {
            self.without_puma(variant, name, cache_bytes, &measure)?;
        }
        for (variant, options) in VARIANTS {
            for &x in self.lent_gib() {
                if self.has(variant, x) {
                    continue;
                }
                let lender = self.lend(x)?;
                let side = self.world.mount(name, data_bytes, Some(lender.address), &options)?;
                side.drop_cached()?;
                let (cache_bytes, path) = (local_bytes, side.file.clone());
                measure(self, &Case { variant, x, cache_bytes, data_bytes, path, side: Some(&side) })?;
                side.end()?;
            }
        }
        Ok(())
    }

    /// Has a variant measured in the directory below, if it is not kept yet.
    fn without_puma(
        &mut self,
        variant: &str,
        name: &str,
        cache_bytes: u64,
        measure: impl Fn(&mut Run<'_>, &Case<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if self.has(variant, 0.0) {
            return Ok(());
        }
        let data_bytes = self.bytes(DATA_BYTES);
        let side = self.world.mount(name, data_bytes, None, &[])?;
        // What an earlier case has left in the page cache is no memory of this one.
        side.drop_cached()?;
        let path = side.below.clone();
        side.end()?;
        measure(self, &Case { variant, x: 0.0, cache_bytes, data_bytes, path, side: None })
    }

    /// Keeps a round of a case.
    fn keep(&mut self, case: &Case<'_>, round: usize, values: BTreeMap<String, f64>) -> Result<(), Failure> {
        let Case { variant, x, .. } = *case;
        let said: Vec<String> = values.iter().map(|(key, value)| format!("{key} {value:.3}")).collect();
        println!("{variant}, {x}, round {}: {}", round + 1, said.join(", "));
        self.records.add(variant, x, round, values)
    }
}

/// What the papers' sizes are divided by, unless something else is asked for.
pub fn scale(extent: Extent) -> f64 {
    extent.choose(8.0, 32.0, 512.0)
}

/// The names, and what they are, for `--list`.
pub fn list() -> impl Iterator<Item = (&'static str, &'static str)> {
    EXPERIMENTS.iter().map(|experiment| (experiment.name, experiment.about))
}

/// Runs one experiment or all, and writes the results anew.
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
    for (nth, experiment) in chosen.iter().enumerate() {
        println!(
            "{} ({} of {}): {}; sizes of the paper divided by {}",
            experiment.name,
            nth + 1,
            chosen.len(),
            experiment.about,
            options.scale
        );
        let world = World::create(options.extent, options.seed, options.dir, interrupt.clone())?;
        let header = Header::new(world.conditions(), options.extent.name(), options.scale, options.seed);
        let records = Records::open(options.results, experiment.name, header, options.again)?;
        let mut run = Run { world: &world, scale: options.scale, records };
        (experiment.run)(&mut run)?;
    }
    report::write(options.results, &EXPERIMENTS)
}
