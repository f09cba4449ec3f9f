//! `scenario-1` and `scenario-2`: a database borrows the memory of a machine on which sometimes a
//! large repository is cloned.
//!
//! In the first both are virtual machines of one host, in the second the lender is on another host:
//! here, behind a network of a tenth of a millisecond.

use super::plot::{Chart, Line, Mark};
use super::record::Records;
use super::report::{Column, Finding, Results};
use super::{
    Case, Run, local_alone,
    postgres::{self, Reads},
    tpcc,
};
use crate::program::{self, Program};
use crate::world::{Extent, Lender, World};
use std::fs;
use std::io::{self, BufWriter, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use testbed::{Failure, Group, Relay, wait_until};

/// The paper's values (2015, table 1): warehouses, memory of the database's machine, and of the
/// lending one.
const WAREHOUSES: f64 = 150.0;
const DATABASE_BYTES: u64 = 10 << 30;
const LENDER_GIB: f64 = 4.0;
/// The paper cloned Linux, which had about so many files then; and commits with changes to compute,
/// of which we make fewer.
const FILES: f64 = 48_000.0;
const COMMITS: f64 = 40_000.0;
/// Files that a commit changes, and lines of a file.
const CHANGED_FILES: usize = 3;
const LINES: usize = 300;
const WORDS_PER_LINE: usize = 7;
const DIRECTORY_FILES: usize = 64;
/// Clones at once.
const CLONES: [usize; 3] = [0, 1, 3];
const CLONES_QUICK: [usize; 1] = [1];
/// For scenario-2: half of each round trip between two machines on one switch.
const ONE_WAY: Duration = Duration::from_micros(50);
/// Transactions before each case is measured.
const WARM_UP_TRANSACTIONS: u32 = 12_000;
/// Time limit for the repository's server to accept connections.
const SERVE_MAX: Duration = Duration::from_secs(30);

/// Its directory.
const REPOSITORY: &str = "origin.git";
const OPTIONS: [&str; 4] = ["--strategy", "non-inclusive", "--gate", "off"];

const ALONE: &str = "no Puma";
const WITH: &str = "Puma";
const FAR: &str = "Puma, lender on another host";
/// The paper's seconds of a transaction, without and with Puma.
const PAPER_DATABASE: [f64; 2] = [3.354, 1.186];
/// The maximum for a clone (issue), and for a New-Order with the lender on another host.
const WANTED: f64 = 1.1;

/// At least as many warehouses as are needed.
pub fn scale(asked: f64, _: Extent) -> f64 {
    WAREHOUSES / (WAREHOUSES / asked).round().max(tpcc::WAREHOUSES_MIN)
}

pub fn run_on_one_host(run: &mut Run<'_>) -> Result<(), Failure> {
    run.rounds = run.world.extent.choose(5, 3, 1);
    compare(run, &[ALONE, WITH], run.world.extent.choose(&CLONES[..], &CLONES_QUICK, &CLONES_QUICK))
}

pub fn run_on_two_hosts(run: &mut Run<'_>) -> Result<(), Failure> {
    run.rounds = run.world.extent.choose(5, 3, 1);
    // The paper shows it without clones.
    compare(run, &[ALONE, WITH, FAR], &CLONES[..1])
}

fn compare(run: &mut Run<'_>, variants: &[&str], clones: &[usize]) -> Result<(), Failure> {
    postgres::check()?;
    program::check(&["git"])?;
    let (world, warehouses) = (run.world, (WAREHOUSES / run.scale).round());
    let count = warehouses.to_string();
    let data_bytes = warehouses as u64 * tpcc::WAREHOUSE_BYTES;
    world.check_room(3 * data_bytes)?;
    let number = |of_the_paper: f64| (of_the_paper / run.scale) as usize;
    if clones.iter().any(|clones| *clones > 0) {
        make(world, &world.path(REPOSITORY), number(FILES), number(COMMITS))?;
    }
    let origin = world.path("tpcc-origin");
    let fill = |directory: &Path| {
        postgres::prepare(world, &origin, data_bytes, |server| tpcc::make(server, &count))?;
        postgres::copy(world, &origin, directory)
    };
    let subject = run.directory("tpcc", DATABASE_BYTES, data_bytes, &fill);
    for &clones in clones {
        let x = clones as f64;
        for &variant in variants {
            if run.has(variant, x) && (variant != ALONE || run.has(&local_alone(variant), x)) {
                continue;
            }
            // Without Puma it lends to nobody: its memory is free.
            let lender = run.lend(LENDER_GIB)?;
            let relay = if variant == FAR { Some(Relay::start(lender.address)?) } else { None };
            relay.iter().for_each(|relay| relay.delay(ONE_WAY));
            let address = relay.as_ref().map_or(lender.address, Relay::address);
            let measure = |run: &mut Run<'_>, case: &Case<'_>| measure(run, case, &count, &lender, clones);
            match variant {
                ALONE => run.baselines((variant, x), &subject, &measure)?,
                _ => run.with_puma(&subject, (variant, x), (&lender, address), &OPTIONS, &measure)?,
            }
        }
    }
    Ok(())
}

fn measure(
    run: &mut Run<'_>,
    case: &Case<'_>,
    warehouses: &str,
    lender: &Lender,
    clones: usize,
) -> Result<(), Failure> {
    let world = run.world;
    let group = world.group(case.cache_bytes)?;
    let server = postgres::serve(run, case, &group, run.bytes(DATABASE_BYTES))?;
    let repository = if clones > 0 { Some(Repository::serve(world, &lender.group)?) } else { None };
    // The same number each time: in the same time a slower variant would evict less, and its lender
    // would have fewer pages.
    tpcc::warm_up(&server, warehouses, world.extent.choose(WARM_UP_TRANSACTIONS, WARM_UP_TRANSACTIONS / 4, 100))?;
    run.disk_as_measured()?;
    tpcc::ask(&server, warehouses, world.extent.choose(5, 2, 1))?;
    for round in 0..run.rounds {
        let stop = AtomicBool::new(false);
        let before = Reads::now(world, case)?;
        let (values, seconds) = std::thread::scope(|scope| {
            let address = repository.iter().map(|repository| repository.address);
            let start = |(nth, address)| {
                let (stop, group) = (&stop, &lender.group);
                scope.spawn(move || clone_until(stop, world, group, address, nth))
            };
            let cloning: Vec<_> = address.cycle().take(clones).enumerate().map(start).collect();
            let values = tpcc::ask(&server, warehouses, world.extent.choose(30, 6, 3));
            stop.store(true, Ordering::Release);
            let ended = |clone: std::thread::ScopedJoinHandle<'_, _>| {
                clone.join().unwrap_or_else(|_| Err(Failure::Problem("a thread panicked".to_owned())))
            };
            (values, cloning.into_iter().map(ended).collect::<Result<Vec<Vec<f64>>, Failure>>())
        });
        let (mut values, seconds) = (values?, seconds?.concat());
        values.extend(before.until_now(world, case)?);
        if !seconds.is_empty() {
            values.insert("clone_s".to_owned(), seconds.iter().sum::<f64>() / seconds.len() as f64);
        }
        run.keep(case, round, values)?;
    }
    server.stop()
}

/// The server of a repository, on the lender's machine, as the cloning program is.
struct Repository<'a> {
    _server: Program<'a>,
    address: SocketAddr,
}

impl<'a> Repository<'a> {
    fn serve(world: &'a World, group: &Group) -> Result<Repository<'a>, Failure> {
        let directory = world.path(REPOSITORY);
        let any = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
        let address = any.map_err(Failure::attempted("finding a free port"))?;
        let mut command = git();
        let root = directory.parent().unwrap_or(&directory);
        command.args(["daemon", "--export-all", "--reuseaddr"]).arg(format!("--base-path={}", root.display()));
        command.args([format!("--listen={}", address.ip()), format!("--port={}", address.port())]);
        command.stdin(Stdio::null());
        let server = Program::start(world, "git-daemon", command, &[group])?;
        let listens = || world.interrupt.check().is_err() || TcpStream::connect(address).is_ok();
        if wait_until(SERVE_MAX, listens) {
            world.interrupt.check()?;
            return Ok(Repository { _server: server, address });
        }
        Err(Failure::Problem(format!("git daemon does not listen after {SERVE_MAX:?}")))
    }
}

/// Clones it, again and again, at least once. Returns the seconds of each clone.
fn clone_until(
    stop: &AtomicBool,
    world: &World,
    group: &Group,
    address: SocketAddr,
    nth: usize,
) -> Result<Vec<f64>, Failure> {
    let clone = world.path(&format!("clone-{nth}"));
    let mut seconds = Vec::new();
    while seconds.is_empty() || !stop.load(Ordering::Acquire) {
        let mut command = git();
        command.args(["clone", "--quiet", &format!("git://{address}/{REPOSITORY}")]).arg(&clone);
        let begin = Instant::now();
        program::run(world, &format!("git-clone-{nth}"), command, &[group])?;
        // A clone that ends after the database's load counts only if there is no other.
        if seconds.is_empty() || !stop.load(Ordering::Acquire) {
            seconds.push(begin.elapsed().as_secs_f64());
        }
        fs::remove_dir_all(&clone).map_err(Failure::attempted(format!("removing {}", clone.display())))?;
    }
    Ok(seconds)
}

/// git, for any user.
fn git() -> Command {
    let mut command = Command::new("git");
    command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1");
    command
}

/// Makes a repository, if there is none: files of words, and commits that change some lines of some
/// of them.
fn make(world: &World, directory: &Path, files: usize, commits: usize) -> Result<(), Failure> {
    if directory.exists() {
        return Ok(());
    }
    let mut command = git();
    command.args(["init", "--quiet", "--bare", "-b", "main"]).arg(directory);
    program::run(world, "git", command, &[])?;
    let mut command = git();
    command.arg("-C").arg(directory).args(["fast-import", "--quiet"]).stdin(Stdio::piped());
    let mut import = Program::start(world, "git", command, &[])?;
    let input = import.process().take_stdin().ok_or_else(|| Failure::Problem("git reads nothing".to_owned()))?;
    let written = History::new(world.seed, files).write(BufWriter::new(input), commits);
    written.map_err(Failure::attempted("making up a repository"))?;
    import.finish().map(drop)
}

/// A made-up history.
struct History {
    random: fastrand::Rng,
    words: Vec<String>,
    files: Vec<Vec<String>>,
}

impl History {
    fn new(seed: u64, files: usize) -> History {
        let mut random = fastrand::Rng::with_seed(seed);
        let words = (0..4096).map(|_| (0..random.usize(2..10)).map(|_| random.lowercase()).collect()).collect();
        let mut history = History { random, words, files: Vec::new() };
        history.files = (0..files.max(1)).map(|_| (0..LINES).map(|_| history.line()).collect()).collect();
        history
    }

    fn line(&mut self) -> String {
        let words: Vec<&str> =
            (0..WORDS_PER_LINE).map(|_| self.words[self.random.usize(..self.words.len())].as_str()).collect();
        words.join(" ")
    }

    /// Writes the history in the format of `git fast-import`.
    fn write(&mut self, mut to: impl Write, commits: usize) -> io::Result<()> {
        for commit in 0..=commits {
            // The first commit has all files.
            let changed: Vec<usize> = match commit {
                0 => (0..self.files.len()).collect(),
                _ => (0..CHANGED_FILES).map(|_| self.random.usize(..self.files.len())).collect(),
            };
            let time = 1_400_000_000 + commit;
            writeln!(to, "commit refs/heads/main\ncommitter A <a@b> {time} +0000\ndata 1\nc")?;
            for file in changed {
                if commit > 0 {
                    let line = self.line();
                    let at = self.random.usize(..LINES);
                    self.files[file][at] = line;
                }
                let content = self.files[file].join("\n");
                let name = format!("d{}/f{file}", file / DIRECTORY_FILES);
                writeln!(to, "M 100644 inline {name}\ndata {}\n{content}", content.len())?;
            }
        }
        to.flush()
    }
}

pub fn results(records: &Records) -> Results {
    let over = |key: &str, x: f64| records.over(key, (WITH, x), (ALONE, x));
    let all = |key: &str| {
        let lines = [ALONE, WITH, FAR].into_iter().map(|variant| Line::of(records, variant, key, 1.0));
        lines.filter(|line| !line.points.is_empty()).collect()
    };
    let mut findings = Vec::new();
    for clones in CLONES.into_iter().filter(|clones| records.xs(WITH).contains(&(*clones as f64))) {
        let x = clones as f64;
        let what = format!("time of a New-Order while {clones} are cloning, mean, over no Puma");
        let [without, with] = PAPER_DATABASE;
        let paper = format!("{:.2} ×: {with} s instead of {without} s", with / without);
        findings.push(Finding::at_most(&what, over("mean_ms", x), 1.0, &paper));
        let alone = records.over("mean_ms", (WITH, x), (&local_alone(ALONE), x));
        findings.push(Finding::at_most(&format!("{what} with the local memory alone"), alone, 1.0, &paper));
        if clones > 0 {
            let paper = if clones == 1 { "184 s instead of 215 s" } else { "251 s instead of 204 s" };
            let what = format!("time of a clone, {clones} at once, over that beside an empty lender");
            findings.push(Finding::at_most(&what, over("clone_s", x), WANTED, paper));
        }
    }
    if !records.xs(FAR).is_empty() {
        let what =
            "time of a New-Order with the lender on another host, mean, over that with the lender on the same one";
        let ratio = records.over("mean_ms", (FAR, 0.0), (WITH, 0.0));
        findings.push(Finding::at_most(what, ratio, WANTED, "close to local"));
    }
    let charts = vec![
        Chart {
            name: "speed-up",
            title: "Time of a New-Order of TPC-C, while repositories are cloned on the lender's machine".to_owned(),
            y_label: "ms",
            is_log: false,
            lines: all("mean_ms"),
            marks: Vec::new(),
        },
        Chart {
            name: "clone",
            title: "Time of a clone on the lender's machine".to_owned(),
            y_label: "s",
            is_log: false,
            lines: all("clone_s"),
            marks: Vec::<Mark>::new(),
        },
    ];
    Results {
        charts: charts.into_iter().filter(|chart| !chart.lines.is_empty()).collect(),
        columns: vec![
            Column { key: "p90_ms", name: "90th percentile of New-Order, ms", decimals: 1 },
            Column { key: "mean_ms", name: "mean, ms", decimals: 1 },
            Column { key: "new_orders_per_min", name: "New-Orders/min", decimals: 0 },
            Column { key: "clone_s", name: "time of a clone, s", decimals: 1 },
            Column { key: "gets", name: "gets", decimals: 0 },
            Column { key: "disk_reads", name: "reads of the disk", decimals: 0 },
        ],
        findings,
        why: "Database, clients, clones, lender and mount share the processors here, which in the paper they had of their own: what git loses is in \
              part that. While three are cloning the lender has next to nothing to lend, and the database without Puma has the mount's memory (64 MiB) beside \
              its own; the one with the local memory alone is the paper's. Autovacuum is off: it would begin after a minute, and each round would be another measurement.",
    }
}
