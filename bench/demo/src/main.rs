//! The demo: the effect of lent memory on random reads, with real files of this machine, in about a
//! minute.
//!
//! It reads the same files at random in three ways: without Puma, with Puma, and with everything in
//! memory, and compares every byte with the original. It leaves nothing behind, also when it is
//! interrupted. It reports every emulation, and everything that it could not do on this machine. It
//! ends with 0 only if no byte was wrong and Puma was at least ten times as fast.

mod bench;
mod chart;
mod data;
mod progress;
mod puma;
mod reader;
mod report;

use bench::{Bench, Variant};
use clap::Parser;
use data::DataSet;
use progress::Bar;
use puma::{Running, Setup};
use report::{Conditions, GAIN_MIN, Summary, Ways};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use testbed::{BROKEN, BlockDevice, Failure, Group, Interrupt, NOT_RUN, SIGNALLED, Scratch, SlowDisk};

/// Exit code: it ran, and no byte was wrong, but this machine cannot show the gain.
const NOT_SHOWN: u8 = 3;

/// Disk space that stays free, in addition to the files.
const DISK_RESERVE_BYTES: u64 = 256 << 20;
/// The demo's use of memory, in copies of its data: the reference, the lender's, and the page cache
/// of the ideal.
const MEMORY_COPIES: u64 = 3;

/// Shows the effect of lent memory on random reads, on real files of this machine.
#[derive(Parser)]
#[command(name = "demo", version)]
struct Options {
    #[command(subcommand)]
    hidden: Option<Hidden>,
    /// Directory on a disk for copies of the files, which are removed at the end [default: that of
    /// the results, or /var/tmp if that is not on a disk that can be slowed down]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Directory for the results: demo.json, demo.svg, demo.png
    #[arg(long, default_value = "target")]
    out: PathBuf,
    /// Source directory of the real files
    #[arg(long, default_value = "/usr")]
    from: PathBuf,
    /// Bytes of files, in MiB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(8..=4096))]
    data_mib: u64,
    /// Page cache of the reader, in MiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(4..=4096))]
    cache_mib: u64,
    /// Memory lent, in MiB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(4..=4096))]
    lent_mib: u64,
    /// Speed of the slow disk, in reads per second
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(10..))]
    disk_reads: u32,
    /// Length of each measurement, in seconds
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// Seed of the choice of files and the order of reads
    #[arg(long, default_value_t = 2015)]
    seed: u64,
    /// Strategy of the mount: exclusive or non-inclusive [default: that of pumapool]
    #[arg(long)]
    strategy: Option<String>,
    /// The command under demonstration [default: the one built next to this program]
    #[arg(long)]
    pumapool: Option<PathBuf>,
}

#[derive(clap::Subcommand)]
enum Hidden {
    /// The process whose reads are measured. Started by the demo itself.
    #[command(hide = true)]
    Reader,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if let Some(Hidden::Reader) = options.hidden {
        return match reader::run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(problem) => {
                eprintln!("The reader failed {problem}.");
                ExitCode::from(NOT_RUN)
            }
        };
    }
    // Everything that the demo made is removed when `measure` returns, on every path.
    let outcome = Interrupt::listen().map_err(Failure::from).and_then(|interrupt| measure(&options, &interrupt));
    match outcome.and_then(|summary| Ok((publish(&options.out, &summary)?, summary))) {
        Ok((left_out, summary)) => judge(&summary, left_out),
        Err(Failure::Interrupted(signal)) => {
            eprintln!("\nInterrupted. Everything that the demo had made is removed.");
            ExitCode::from(SIGNALLED + u8::try_from(signal).unwrap_or(0))
        }
        Err(problem) => {
            eprintln!("\nThe demo could not be run: {problem}");
            ExitCode::from(NOT_RUN)
        }
    }
}

/// Sets everything up, measures the three ways, and removes everything again.
fn measure(options: &Options, interrupt: &Interrupt) -> Result<Summary, Failure> {
    fs::create_dir_all(&options.out).map_err(Failure::attempted(format!("making {}", options.out.display())))?;
    let mut left_out = Vec::new();
    let parent = choose_directory(options);
    let scratch = Scratch::new_in(&parent, "demo")?;
    let data_bytes = options.data_mib << 20;
    check_room(scratch.path(), data_bytes)?;

    let bar = Bar::new(format!("copying files of {}", options.from.display()), data_bytes);
    let files = scratch.directory("files")?;
    let data = DataSet::copy(&options.from, files, data_bytes, options.seed, &bar, interrupt)?;
    bar.done(&format!("{} files, {} MiB", data.files.len(), data.len_bytes() >> 20));
    // A file is taken only if it fits, so a little is always missing.
    if data.len_bytes() < data_bytes / 10 * 9 {
        left_out.push(format!(
            "only {} MiB of suitable files were found below {}",
            data.len_bytes() >> 20,
            options.from.display()
        ));
    }

    let slow_disk = SlowDisk::create("demo-disk", scratch.path());
    let slow_disk = slow_disk.map_err(|error| left_out.push(format!("the disk was not slowed down: {error}"))).ok();
    let limited = Group::create("demo-probe", Some(data_bytes), None);
    let limited = limited.map_err(|error| left_out.push(format!("the page cache was not limited: {error}"))).ok();
    let memory_version = limited.and_then(|group| group.memory_version());
    let page_cache_bytes = memory_version.map(|_| options.cache_mib << 20);
    let throttle = slow_disk.as_ref().map(|disk| (disk, options.disk_reads));

    let bench = Bench { data: &data, seed: options.seed, measure: Duration::from_secs(options.seconds), interrupt };
    forget_cached(&data, &mut left_out)?;
    let title = "without Puma";
    let directory = &data.directory;
    let plain = Variant { title, directory, page_cache_bytes, slow_disk: throttle, puma: None };
    let baseline = bench.run(&plain)?;

    forget_cached(&data, &mut left_out)?;
    let (mut puma, mut puma_status, mut pages_cached_twice) = (None, None, None);
    match options.pumapool.clone().or_else(|| testbed::sibling_binary("pumapool")) {
        None => left_out
            .push("Puma was not measured: there is no pumapool next to this program; run `make build`".to_owned()),
        Some(pumapool) => {
            let setup = Setup {
                pumapool: &pumapool,
                capacity_bytes: options.lent_mib << 20,
                limit_lender: memory_version.is_some(),
                strategy: options.strategy.as_deref(),
                source: &data.directory,
                mount_point: scratch.directory("mount")?,
                slow_disk: slow_disk.as_ref(),
                logs: &options.out,
            };
            // Mounting may be forbidden, also for root (a container): the rest can still be
            // measured.
            match Running::start(&setup, interrupt) {
                Err(Failure::Problem(problem)) => {
                    left_out.push(format!("Puma was not measured: {problem}"));
                }
                Err(failure) => return Err(failure),
                Ok(running) => {
                    if running.populates_on_read() {
                        let remark =
                            "evictions were not seen, so pages were lent as they were read; `pumapool doctor` says why";
                        left_out.push(remark.to_owned());
                    }
                    let directory = &setup.mount_point;
                    puma =
                        Some(bench.run(&Variant { title: "with Puma", directory, puma: Some(&running), ..plain })?);
                    puma_status = running.status();
                    pages_cached_twice = Some(data.cached_pages()?);
                    running.end()?;
                }
            }
        }
    }

    // Pages that reads of the backing directory left in the cache would make the last way look
    // better.
    forget_cached(&data, &mut left_out)?;
    let ideal = Variant { title: "all in memory", page_cache_bytes: None, slow_disk: None, ..plain };
    let ideal = bench.run(&ideal)?;

    let conditions = Conditions {
        data_bytes: data.len_bytes(),
        file_count: data.files.len(),
        page_count: data.page_count(),
        page_cache_bytes: options.cache_mib << 20,
        lent_bytes: options.lent_mib << 20,
        disk_reads_per_s: slow_disk.as_ref().map(|_| options.disk_reads),
        device: BlockDevice::holding(scratch.path()).ok().map(|device| device.to_string()),
        memory_groups: memory_version.map(|version| format!("{version:?}")),
        disk_groups: slow_disk.as_ref().map(|disk| format!("{:?}", disk.version())),
        seed: options.seed,
        kernel: os::kernel::release(),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: memory_figure("MemTotal").unwrap_or(0),
    };
    let mut summary = Summary::new(Ways { baseline, puma, ideal }, conditions, left_out);
    (summary.puma_status, summary.pages_cached_twice) = (puma_status, pages_cached_twice);
    Ok(summary)
}

/// Removes all pages of the files from the page cache.
fn forget_cached(data: &DataSet, left_out: &mut Vec<String>) -> Result<(), Failure> {
    let pages = data.drop_from_page_cache()?;
    let remark = format!("{pages} pages could not be dropped from the page cache before a measurement");
    if pages > 0 && !left_out.contains(&remark) {
        left_out.push(remark);
    }
    Ok(())
}

/// The requested directory, or the first usual one whose disk can be slowed down.
fn choose_directory(options: &Options) -> PathBuf {
    let usual = [options.out.as_path(), Path::new("/var/tmp")];
    let on_a_disk = || usual.into_iter().find(|directory| BlockDevice::holding(directory).is_ok());
    options.dir.clone().unwrap_or_else(|| on_a_disk().unwrap_or(&options.out).to_owned())
}

/// Refuses to fill the disk, or to push the machine into swapping.
fn check_room(directory: &Path, data_bytes: u64) -> Result<(), Failure> {
    let disk = rustix::fs::statvfs(directory).map_err(std::io::Error::from)?;
    let free_bytes = disk.f_bavail * disk.f_frsize;
    if free_bytes < data_bytes + DISK_RESERVE_BYTES {
        return Err(Failure::Problem(format!(
            "{} has {} MiB of free space, and {} MiB are needed; choose another with --dir",
            directory.display(),
            free_bytes >> 20,
            (data_bytes + DISK_RESERVE_BYTES) >> 20,
        )));
    }
    match memory_figure("MemAvailable") {
        Some(bytes) if bytes < data_bytes * MEMORY_COPIES => Err(Failure::Problem(format!(
            "{} MiB of memory are available, and {} MiB are needed; use less data with --data-mib, --cache-mib and --lent-mib",
            bytes >> 20,
            (data_bytes * MEMORY_COPIES) >> 20,
        ))),
        _ => Ok(()),
    }
}

/// A line of `/proc/meminfo`, in bytes.
fn memory_figure(name: &str) -> Option<u64> {
    os::fields::bytes(&fs::read_to_string("/proc/meminfo").ok()?, name)
}

/// Prints the table and writes the files. Returns everything that was left out, including the
/// chart.
fn publish(out: &Path, summary: &Summary) -> Result<Vec<String>, Failure> {
    let mut left_out = summary.left_out.clone();
    println!("\n{}", summary.table());
    let write = |name: &str, content: &str| {
        let path = out.join(name);
        fs::write(&path, content).map_err(Failure::attempted(format!("writing {}", path.display()))).map(|()| path)
    };
    let json = serde_json::to_string_pretty(summary).map_err(|error| Failure::Problem(error.to_string()))?;
    let json = write("demo.json", &(json + "\n"))?;
    let drawing = chart::draw(summary);
    let svg = write("demo.svg", &drawing)?;
    let png = out.join("demo.png");
    let mut written = vec![json, svg];
    if charts::render(&drawing, &png).map_err(Failure::Problem)? {
        written.push(png);
    } else {
        left_out.push("the chart was not rendered as PNG: no font is installed; run `make deps`".to_owned());
    }
    let written: Vec<String> = written.iter().map(|path| path.display().to_string()).collect();
    println!("Results: {}", written.join(", "));
    Ok(left_out)
}

/// Reports whether the demo kept its promise.
fn judge(summary: &Summary, left_out: Vec<String>) -> ExitCode {
    for what in &left_out {
        println!("Left out: {what}.");
    }
    let compared_gib = summary.compared_bytes as f64 / f64::from(1 << 30);
    if summary.wrong_bytes > 0 {
        let place = summary.first_wrong.as_deref().unwrap_or("unknown place");
        println!("FAILED: {} wrong bytes in {compared_gib:.1} GiB. The first: {place}.", summary.wrong_bytes);
        return ExitCode::from(BROKEN);
    }
    if let Some(pages) = summary.pages_cached_twice.filter(|pages| *pages > 0) {
        let mib = (pages * page::PAGE_SIZE as u64) as f64 / f64::from(1 << 20);
        println!("Below the mount, {mib:.1} MiB were cached a second time.");
    }
    println!("No wrong byte in {compared_gib:.1} GiB compared with the original.");
    match summary.gain {
        Some(gain) if gain >= GAIN_MIN => {
            println!("Puma made random reads {gain:.1} times as fast.");
            ExitCode::SUCCESS
        }
        Some(gain) if left_out.is_empty() => {
            println!("FAILED: Puma made random reads only {gain:.1} times as fast; {GAIN_MIN} times were expected.");
            ExitCode::from(BROKEN)
        }
        Some(gain) => {
            println!("Puma made random reads {gain:.1} times as fast. Too much was left out to rely on it.");
            ExitCode::from(NOT_SHOWN)
        }
        None => {
            println!("What Puma gains could not be shown here.");
            ExitCode::from(NOT_SHOWN)
        }
    }
}
