//! `postmark`: small files are made, read, appended to and removed. It is the only experiment of
//! the papers that writes many files.

use super::plot::{Chart, Line, Mark};
use super::record::Records;
use super::report::{Column, Finding, Results};
use super::{ALL_FITS_GIB, BASELINE, Case, LITTLE_GIB, LOCAL_BYTES, Run, Study, compare, local_alone};
use crate::program::{self, Program};
use crate::world::spread_directories;
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use testbed::Failure;

/// The paper's values (2015, section 4.3): bytes of all files, transactions, directories, sizes of
/// the files, and bytes of a read or write. It states 25,000 files, which would be 0.8 GiB with
/// these sizes, less than its memory. So here the number of files follows from the bytes.
const DATA_BYTES: u64 = 7 << 29;
const TRANSACTIONS: f64 = 20_000.0;
const DIRECTORIES: u32 = 10;
const FILE_BYTES: [u64; 2] = [512, 64 << 10];
const BLOCK_BYTES: u64 = 4096;
/// Of ten: transactions that read (the others append), and that make a file (the others remove
/// one).
const READ_BIAS: u32 = 5;
const CREATE_BIAS: u32 = 5;
/// Memory that the kernel and the mount need for a file in the mount's group.
const MOUNT_FILE_BYTES: u64 = 2048;
/// Files grow while it runs: the bytes of all of them over those at the beginning.
const GROWTH: f64 = 1.2;
/// Counters for each transaction, of making and removing the files, too.
const COUNTERS: [(&str, super::Counter); 3] = [
    ("gets_per_transaction", |of| of.lender_pages),
    ("puts_per_transaction", |of| of.put_pages),
    ("below_per_transaction", |of| of.backing_pages),
];
/// Its output at the end of each part.
const FILES_MADE: &str = "Creating files";
const TRANSACTIONS_DONE: &str = "Performing transactions";
const WANTED: f64 = 1.5;
/// The minimum with little cache, from the paper.
const WANTED_LITTLE: f64 = 1.1;
const PAPER: f64 = 3.0;

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    study(run, &compare)
}

pub fn study(run: &mut Run<'_>, study: &Study<'_>) -> Result<(), Failure> {
    program::check(&["postmark", "stdbuf"])?;
    let data_bytes = (run.bytes(DATA_BYTES) as f64 * GROWTH) as u64;
    run.world.check_room(2 * data_bytes)?;
    let fill = |directory: &Path| empty(directory);
    let mut subject = run.directory("postmark", LOCAL_BYTES, data_bytes, &fill);
    subject.beside_bytes += files(run) * MOUNT_FILE_BYTES;
    study(run, &subject, &measure)
}

/// The number of files at the beginning.
fn files(run: &Run<'_>) -> u64 {
    run.bytes(DATA_BYTES) / ((FILE_BYTES[0] + FILE_BYTES[1]) / 2)
}

/// An empty directory. The rounds' directories will be far from each other on the disk.
fn empty(directory: &Path) -> Result<(), Failure> {
    let emptied = match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => fs::create_dir(directory),
    };
    emptied.map_err(Failure::attempted(format!("emptying {}", directory.display())))?;
    spread_directories(directory)
}

fn measure(run: &mut Run<'_>, case: &Case<'_>) -> Result<(), Failure> {
    let world = run.world;
    let transactions = (TRANSACTIONS / run.scale).round().max(1.0);
    let files = files(run);
    let group = world.group(case.cache_bytes)?;
    let orders = world.path("postmark.orders");
    for round in 0..run.rounds {
        let text = format!(
            "set location .\nset size {} {}\nset number {files}\nset transactions {transactions}\nset subdirectories {DIRECTORIES}\n\
             set read {BLOCK_BYTES}\nset write {BLOCK_BYTES}\nset bias read {READ_BIAS}\nset bias create {CREATE_BIAS}\n\
             set buffering false\nset seed {}\nrun\nquit\n",
            FILE_BYTES[0],
            FILE_BYTES[1],
            world.seed + round as u64,
        );
        fs::write(&orders, text).map_err(Failure::attempted(format!("writing {}", orders.display())))?;
        run.disk_for_filling()?;
        // Far from that of any other round: the file system places it by its name.
        let directory = case.path.join(format!("{} {} {round}", case.variant, case.x));
        fs::create_dir(&directory).map_err(Failure::attempted(format!("making {}", directory.display())))?;
        // In its directory: it has no room for names of more than 80 letters. Line by line: it
        // prints a line when a part is done.
        let mut command = Command::new("stdbuf");
        command.args(["-oL", "postmark"]).arg(&orders).current_dir(&directory).stdin(Stdio::null());
        let mut postmark = Program::start(world, "postmark", command, &[&group])?;
        let (mut begun, mut kept) = (None, None);
        while let Some(line) = postmark.next_line()? {
            // While it is stopped, all its data is written back: only the transactions count.
            if line.starts_with(FILES_MADE) {
                postmark.process().signal(Signal::STOP)?;
                write_back(case)?;
                run.disk_as_measured()?;
                let counters = case.counters(&COUNTERS)?;
                let (reads, written) = (world.disk.read_count()?, world.disk.written_bytes()?);
                begun = Some((counters, reads, written, Instant::now()));
                postmark.process().signal(Signal::CONT)?;
            } else if line.starts_with(TRANSACTIONS_DONE)
                && let Some((counters, reads, written, begin)) = begun.take()
            {
                let seconds = begin.elapsed().as_secs_f64();
                postmark.process().signal(Signal::STOP)?;
                write_back(case)?;
                let mut values = case.grown_for_each(&COUNTERS, &counters, transactions)?;
                values.insert("transactions_per_s".to_owned(), transactions / seconds);
                values.insert("disk_reads".to_owned(), (world.disk.read_count()? - reads) as f64);
                let mib = (world.disk.written_bytes()? - written) as f64 / f64::from(1 << 20);
                values.insert("disk_written_mib".to_owned(), mib);
                kept = Some(values);
                run.disk_for_filling()?;
                postmark.process().signal(Signal::CONT)?;
            }
        }
        let kept = kept.ok_or_else(|| Failure::Problem("postmark did not print its end".to_owned()))?;
        run.keep(case, round, kept)?;
    }
    Ok(())
}

/// Writes back everything of its file system: the mount, and the backing file system.
fn write_back(case: &Case<'_>) -> Result<(), Failure> {
    let backing = case.side.map(|side| side.source.as_path());
    [Some(case.path.as_path()), backing].into_iter().flatten().try_for_each(|directory| {
        let synced = fs::File::open(directory).and_then(|directory| Ok(rustix::fs::syncfs(&directory)?));
        synced.map_err(Failure::attempted(format!("writing back {}", directory.display())))
    })
}

pub fn results(records: &Records) -> Results {
    const KEY: &str = "transactions_per_s";
    let over = |variant: &str, x: f64, key: &str| records.over(key, (variant, x), (BASELINE, 0.0));
    let fewer = |key: &str, what: &str| {
        let what = format!("{what}, non-inclusive, all fits, over no Puma");
        Finding::at_most(&what, over("non-inclusive", ALL_FITS_GIB, key), 1.0, "fewer")
    };
    let little = |baseline: &str, over_it: &str| {
        let times = records.over(KEY, ("non-inclusive", LITTLE_GIB), (baseline, 0.0));
        let what = format!("non-inclusive, with {LITTLE_GIB} GiB, {over_it}");
        Finding::at_least(&what, times, WANTED_LITTLE, "1.1 × with little cache")
    };
    let baseline = records.baseline(BASELINE, KEY);
    let all_fits = |variant: &str| over(variant, ALL_FITS_GIB, KEY);
    Results {
        charts: vec![Chart {
            name: "speed-up",
            title: "Postmark: speed-up over no Puma".to_owned(),
            y_label: "times the baseline",
            is_log: false,
            lines: Line::of_all(records, KEY, baseline),
            marks: vec![Mark { x: ALL_FITS_GIB, value: PAPER, label: "up to 3 ×" }],
        }],
        columns: vec![
            Column { key: KEY, name: "transactions/s", decimals: 1 },
            Column { key: "disk_reads", name: "reads of the disk", decimals: 0 },
            Column { key: "disk_written_mib", name: "written to the disk, MiB", decimals: 0 },
        ],
        findings: vec![
            Finding::at_least("exclusive, all fits, over no Puma", all_fits("exclusive"), WANTED, "up to 3 ×"),
            Finding::at_least("non-inclusive, all fits, over no Puma", all_fits("non-inclusive"), WANTED, "up to 3 ×"),
            little(BASELINE, "over no Puma"),
            little(&local_alone(BASELINE), "over no Puma with the local memory alone"),
            fewer("disk_reads", "reads of the disk"),
            fewer("disk_written_mib", "MiB written to the disk"),
        ],
        why: "The disk is slow for reads only: what the kernel writes back it writes in nobody's name, and the I/O controller of control groups of version 1 \
              cannot slow that down. So nothing is gained here by writing less. Whatever the mount needs beside the local memory (an eighth of it, 64 MiB at \
              the least, and 2 KiB for each file) is page cache of the program where there is no Puma; at an eighth of the paper's sizes these are 92 MiB \
              beside 128, so that a lender has to bring more than that before anything is gained over it. The baseline with the local memory alone is what \
              the paper had. With all memory local as much is written as without Puma: there is nothing less to be had. What is written beyond \
              that are inodes and bitmaps of the file system, three or four times instead of once: transactions come ten times as fast, so whoever \
              looks for memory finds it dirty, and has the kernel write all that is dirty anywhere (`writeback_start` says `vmscan` for 64 of 73).",
    }
}
