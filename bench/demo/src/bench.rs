//! One variant of reading, measured: a reader in its groups, a warm-up until the caches are full,
//! then a measured phase.
//!
//! The memory limit leaves exactly the promised page cache. The reader's own needs (its memory, its
//! program's pages, and the kernel's memory for its open files and page tables) are measured when
//! it is ready, and added to the limit.

use crate::data::DataSet;
use crate::progress::Bar;
use crate::puma::Running;
use crate::reader::{self, Answer, Order, Report, Task, disk_bytes_of};
use page::PAGE_SIZE;
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};
use testbed::{Failure, Group, Interrupt, SlowDisk, WorkerProcess};

/// Room while the reader starts, before its own needs are known.
const START_ROOM_BYTES: u64 = 64 << 20;
/// A warm-up ends after this time: on a disk that is slow by itself, reading all pages at random
/// takes too long.
const WARM_UP_MAX: Duration = Duration::from_secs(60);
/// Reads in one further round of the warm-up with Puma. Without a limit, a round is another pass.
const WARM_UP_ROUND_READS: u64 = 8192;
/// The maximum number of rounds until the caches count as full.
const WARM_UP_ROUNDS_MAX: u32 = 8;
/// The caches are full when less than one read in so many still goes to the disk.
const WARM_WHEN_ONE_IN: u64 = 100;
/// The reader answers several times a second; without an answer for this time it is stuck. This is
/// longer than the longest read from a slow disk with a queue.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// The common parts of all ways.
pub struct Bench<'a> {
    pub data: &'a DataSet,
    pub seed: u64,
    pub measure: Duration,
    pub interrupt: &'a Interrupt,
}

/// One variant of reading.
pub struct Variant<'a> {
    /// Its title on the screen.
    pub title: &'a str,
    /// The directory of the files.
    pub directory: &'a Path,
    /// The maximum of the reader's page cache. `None`: all free memory.
    pub page_cache_bytes: Option<u64>,
    /// The slow disk that it reads from, and its reads per second. `None`: the disk has its full
    /// speed.
    pub slow_disk: Option<(&'a SlowDisk, u32)>,
    /// The daemons that keep pages for it and read the disk on its behalf, if there are any.
    pub puma: Option<&'a Running>,
}

/// The result.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Measured {
    /// Reads per second.
    pub iops: f64,
    /// Reads that were measured.
    pub reads: u64,
    /// Time they took.
    pub seconds: f64,
    /// Reads that the disk served meanwhile.
    pub disk_reads: Option<u64>,
    /// Share of the reads that needed no disk.
    pub hit_ratio: Option<f64>,
    /// Share of the reads that lent memory answered.
    pub lent_ratio: Option<f64>,
    /// Mean latency.
    pub mean_us: f64,
    /// Median latency.
    pub p50_us: f64,
    /// The latency that one read in a hundred exceeds.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
    /// The reader's page cache at the end, if it was limited.
    pub page_cache_bytes: Option<u64>,
    /// The reader's own needs, in addition to that.
    pub reader_own_bytes: Option<u64>,
    /// Time the warm-up took.
    pub warm_up_seconds: f64,
    /// Reads of the warm-up.
    pub warm_up_reads: u64,
    /// Bytes compared with the original, warm-up included.
    pub compared_bytes: u64,
    /// Bytes that were wrong, warm-up included.
    pub wrong_bytes: u64,
    /// The place of the first of them.
    pub first_wrong: Option<String>,
    /// Whether the warm-up was cut short.
    pub warm_up_cut_short: bool,
}

impl Bench<'_> {
    /// Measures one variant.
    pub fn run(&self, variant: &Variant<'_>) -> Result<Measured, Failure> {
        let disk = variant.slow_disk.map(|(disk, _)| disk);
        let group = Group::create("reader", variant.page_cache_bytes.map(|bytes| bytes + START_ROOM_BYTES), disk)?;
        let mut reader = Reader::start(self, variant.directory, &group)?;
        let own = match variant.page_cache_bytes {
            Some(page_cache_bytes) => {
                // Nothing of the files is in it yet: all of this is the reader's own, including its
                // program's pages.
                let own = group.memory_use()?;
                group.limit_memory(page_cache_bytes + own.total_bytes)?;
                Some(own)
            }
            None => None,
        };

        let mut all = Report::default();
        let begin = Instant::now();
        self.warm_up(variant, &mut reader, &mut all)?;
        let warm_up_seconds = begin.elapsed().as_secs_f64();
        let (warm_up_reads, warm_up_cut_short) = (all.reads, all.reads < self.data.page_count());

        if let Some((disk, reads_per_s)) = variant.slow_disk {
            disk.limit_reads(Some(reads_per_s))?;
        }
        let ms = self.measure.as_millis() as u64;
        let bar = Bar::new(format!("{}: measuring", variant.title), ms);
        let pool_pages = || variant.puma.and_then(Running::pool_pages);
        let (daemon_before, pool_before) = (daemon_disk_bytes(variant), pool_pages());
        let disk_before = disk.map(SlowDisk::read_count).transpose()?;
        let report = reader.obey(&Order::Time { ms }, |reads, elapsed_ms| {
            bar.set(elapsed_ms);
            bar.remark(format!("{} reads/s", reads * 1000 / elapsed_ms.max(1)));
        })?;
        let disk_after = disk.map(SlowDisk::read_count).transpose()?;
        let seconds = report.elapsed_us as f64 / 1e6;
        let iops = report.reads as f64 / seconds;
        bar.done(&format!("{iops:.0} reads/s"));
        let page_cache_bytes = match own {
            Some(own) => Some(group.memory_use()?.page_cache_bytes.saturating_sub(own.page_cache_bytes)),
            None => None,
        };
        if let Some((disk, _)) = variant.slow_disk {
            disk.limit_reads(None)?;
        }
        reader.end()?;

        // The controller counts the delayed reads; without one, the kernel's account of each
        // process is used.
        let disk_reads = match (disk_before, disk_after) {
            (Some(before), Some(after)) => Some(after - before),
            _ => {
                let daemon =
                    daemon_disk_bytes(variant).zip(daemon_before).map(|(after, before)| after.saturating_sub(before));
                report.disk_bytes.zip(daemon).map(|(own, daemon)| (own + daemon) / PAGE_SIZE as u64)
            }
        };
        let lent = pool_pages().zip(pool_before).map(|(after, before)| after.saturating_sub(before));
        add(&mut all, &report);
        Ok(Measured {
            iops,
            reads: report.reads,
            seconds,
            disk_reads,
            hit_ratio: disk_reads.map(|disk_reads| (1.0 - disk_reads as f64 / report.reads as f64).max(0.0)),
            lent_ratio: lent.map(|lent| lent as f64 / report.reads as f64),
            mean_us: report.mean_us,
            p50_us: report.p50_us,
            p99_us: report.p99_us,
            max_us: report.max_us,
            page_cache_bytes,
            reader_own_bytes: own.map(|own| own.total_bytes),
            warm_up_seconds,
            warm_up_reads,
            compared_bytes: all.compared_bytes,
            wrong_bytes: all.wrong_bytes,
            first_wrong: all.first_wrong,
            warm_up_cut_short,
        })
    }

    /// Fills the caches, from a disk that is not slowed down: all pages once in random order and,
    /// if all should be in memory somewhere, further reads until hardly any still goes to the disk.
    fn warm_up(&self, variant: &Variant<'_>, reader: &mut Reader<'_>, all: &mut Report) -> Result<(), Failure> {
        let bar = Bar::new(format!("{}: warming up", variant.title), self.data.page_count());
        let done = |bar: Bar, all: &Report| {
            bar.done(&format!("{} reads", all.reads));
            Ok(())
        };
        let begin = Instant::now();
        let order = Order::Pass { max_ms: WARM_UP_MAX.as_millis() as u64 };
        add(all, &reader.obey(&order, |reads, _| bar.set(reads))?);
        // A limited cache is full by now. If everything fits, or memory is lent, the warm-up lasts
        // until the disk is quiet.
        let (again, quiet_reads) = match (variant.puma, variant.page_cache_bytes) {
            (Some(_), _) => (Order::Count { reads: WARM_UP_ROUND_READS }, WARM_UP_ROUND_READS / WARM_WHEN_ONE_IN),
            (None, None) => (order, 1),
            (None, Some(_)) => return done(bar, all),
        };
        for _ in 0..WARM_UP_ROUNDS_MAX {
            let before = variant.slow_disk.map(|(disk, _)| disk.read_count()).transpose()?;
            let report = reader.obey(&again, |_, _| {})?;
            add(all, &report);
            let disk_reads = match (variant.slow_disk, before) {
                (Some((disk, _)), Some(before)) => Some(disk.read_count()? - before),
                _ => report.disk_bytes.map(|bytes| bytes / PAGE_SIZE as u64),
            };
            if disk_reads.is_some_and(|count| count < quiet_reads) || begin.elapsed() >= WARM_UP_MAX {
                break;
            }
        }
        done(bar, all)
    }
}

/// Bytes that the mount daemon had read from the disk for the reader; nothing without one.
fn daemon_disk_bytes(variant: &Variant<'_>) -> Option<u64> {
    variant.puma.map_or(Some(0), |puma| disk_bytes_of(&puma.mount_pid().to_string()))
}

fn add(all: &mut Report, one: &Report) {
    all.reads += one.reads;
    all.compared_bytes += one.compared_bytes;
    all.wrong_bytes += one.wrong_bytes;
    all.first_wrong = all.first_wrong.take().or_else(|| one.first_wrong.clone());
}

/// A running reader.
struct Reader<'a>(WorkerProcess<'a>);

impl<'a> Reader<'a> {
    fn start(bench: &Bench<'a>, directory: &Path, group: &Group) -> Result<Reader<'a>, Failure> {
        use rustix::fd::AsRawFd;
        let mut worker_process = WorkerProcess::start(reader::NAME, &[group], bench.interrupt)?;
        let reference = format!("/proc/{}/fd/{}", std::process::id(), bench.data.reference.as_raw_fd());
        worker_process.send(&Task {
            directory: directory.to_owned(),
            files: bench.data.files.clone(),
            reference: reference.into(),
            seed: bench.seed,
        })?;
        match worker_process.receive(SILENCE_MAX)? {
            Answer::Ready => Ok(Reader(worker_process)),
            answer => Err(Failure::Problem(format!("starting the reader: it answered {answer:?}"))),
        }
    }

    /// Executes an order.
    fn obey(&mut self, order: &Order, progress: impl Fn(u64, u64)) -> Result<Report, Failure> {
        self.0.send(order)?;
        loop {
            match self.0.receive(SILENCE_MAX)? {
                Answer::Progress { reads, elapsed_ms } => progress(reads, elapsed_ms),
                Answer::Done(report) => return Ok(report),
                Answer::Failed(problem) => return Err(Failure::Problem(format!("the reader failed {problem}"))),
                Answer::Ready => return Err(Failure::Problem("the reader started twice".to_owned())),
            }
        }
    }

    /// It ends when there are no more orders.
    fn end(mut self) -> Result<(), Failure> {
        Ok(self.0.end(SILENCE_MAX)?)
    }
}
