//! `scenario-1` and `scenario-2`: a database borrows the memory of a machine on which, now and then, a large repository is cloned.
//!
//! In the first both are virtual machines of one host, in the second the lender is on another one: here, behind a network of a tenth of a millisecond.

use super::plot::{Chart, Line, Mark};
use super::record::{Mean, Records};
use super::report::{Column, Finding, Results};
use super::{Case, Kind, Run, Subject, postgres, tpcc};
use crate::program::{self, Program};
use crate::world::{Lender, World};
use std::fs;
use std::io::{self, BufWriter, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testbed::{Failure, Group, Relay, wait_until};

/// The paper's (2015, table 1): warehouses, memory of the database's machine, and of the one that lends.
const WAREHOUSES: f64 = 150.0;
const DATABASE_BYTES: u64 = 10 << 30;
const LENDER_GIB: f64 = 4.0;
/// The paper cloned Linux, which had then some so many files; and commits with changes to look for, of which we make fewer.
const FILES: f64 = 48_000.0;
const COMMITS: f64 = 40_000.0;
/// Files that a commit changes, and lines of a file.
const CHANGED_FILES: usize = 3;
const LINES: usize = 300;
const WORDS_PER_LINE: usize = 7;
const DIRECTORY_FILES: usize = 64;
/// Clones at once.
const CLONES: [usize; 3] = [0, 1, 3];
const CLONES_QUICK: [usize; 2] = [0, 1];
/// Of scenario-2: of each round trip between two machines on one switch, half.
const ONE_WAY: Duration = Duration::from_micros(50);
/// Until the server of the repository takes connections.
const SERVE_MAX: Duration = Duration::from_secs(30);

const ALONE: &str = "no Puma";
const WITH: &str = "Puma";
/// The paper's seconds: of a New-Order, and of a clone, without and with.
const PAPER_DATABASE: [f64; 2] = [3.354, 1.186];
/// A clone may take longer by so much (issue).
const WANTED: f64 = 1.1;

/// As many warehouses as there are at the least.
pub fn scale(asked: f64) -> f64 {
    WAREHOUSES / (WAREHOUSES / asked).round().max(tpcc::WAREHOUSES_MIN)
}

pub fn run_on_one_host(run: &mut Run<'_>) -> Result<(), Failure> {
    compare(run, None)
}

pub fn run_on_two_hosts(run: &mut Run<'_>) -> Result<(), Failure> {
    compare(run, Some(ONE_WAY))
}

fn compare(run: &mut Run<'_>, one_way: Option<Duration>) -> Result<(), Failure> {
    postgres::check()?;
    program::find("git")?;
    run.rounds = run.world.extent.choose(3, 2, 1);
    let (world, warehouses) = (run.world, (WAREHOUSES / run.scale).round());
    let count = warehouses.to_string();
    let data_bytes = warehouses as u64 * tpcc::WAREHOUSE_BYTES;
    world.check_room(3 * data_bytes)?;
    let number = |of_the_paper: f64| (of_the_paper / run.scale) as usize;
    let repository = Repository::serve(world, number(FILES), number(COMMITS))?;
    let origin = world.path("tpcc-origin");
    let fill = |directory: &Path| {
        postgres::prepare(world, &origin, data_bytes, |server| tpcc::make(server, &count))?;
        postgres::copy(world, &origin, directory)
    };
    let local_bytes = run.bytes(DATABASE_BYTES);
    let subject = Subject { name: "tpcc", kind: Kind::Directory(&fill), local_bytes, data_bytes, lent_gib: &[] };
    for &clones in world.extent.choose(&CLONES[..], &CLONES_QUICK, &CLONES_QUICK) {
        let x = clones as f64;
        for variant in [ALONE, WITH] {
            if run.has(variant, x) {
                continue;
            }
            // Without Puma it lends to nobody: its memory is free.
            let lender = run.lend(LENDER_GIB)?;
            let relay = one_way.map(|one_way| -> io::Result<Relay> {
                let relay = Relay::start(lender.address)?;
                relay.delay(one_way);
                Ok(relay)
            });
            let relay = relay.transpose()?;
            let address = relay.as_ref().map_or(lender.address, Relay::address);
            if variant == ALONE {
                let path = run.fill(subject.name, fill)?;
                let case = Case { variant, x, cache_bytes: local_bytes, data_bytes, path, side: None };
                measure(run, &case, &count, &lender, repository.address, clones)?;
            } else {
                let side = run.mount(&subject, address, &["--strategy", "non-inclusive", "--gate", "off"])?;
                let path = side.at.clone();
                let case = Case { variant, x, cache_bytes: local_bytes, data_bytes, path, side: Some(&side) };
                measure(run, &case, &count, &lender, repository.address, clones)?;
                side.end()?;
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
    repository: SocketAddr,
    clones: usize,
) -> Result<(), Failure> {
    let world = run.world;
    let (group, group_of_lender) = (world.group(case.cache_bytes)?, &lender.group);
    let server = postgres::serve(run, case, &group)?;
    tpcc::ask(&server, warehouses, world.extent.choose(60, 20, 2))?;
    run.disk_as_measured()?;
    tpcc::ask(&server, warehouses, world.extent.choose(5, 2, 1))?;
    for round in 0..run.rounds {
        let (values, seconds) = std::thread::scope(|scope| {
            let clone = |nth| move || Repository::clone_once(repository, world, nth, group_of_lender);
            let cloning: Vec<_> = (0..clones).map(|nth| scope.spawn(clone(nth))).collect();
            let values = tpcc::ask(&server, warehouses, world.extent.choose(40, 15, 3));
            let ended = |clone: std::thread::ScopedJoinHandle<'_, _>| {
                clone.join().unwrap_or_else(|_| Err(Failure::Problem("a thread panicked".to_owned())))
            };
            (values, cloning.into_iter().map(ended).collect::<Result<Vec<f64>, Failure>>())
        });
        let (mut values, seconds) = (values?, seconds?);
        if clones > 0 {
            values.insert("clone_s".to_owned(), seconds.iter().sum::<f64>() / clones as f64);
        }
        run.keep(case, round, values)?;
    }
    server.stop()
}

/// A repository that is made up, and its server.
struct Repository<'a> {
    _server: Program<'a>,
    address: SocketAddr,
}

impl<'a> Repository<'a> {
    fn serve(world: &'a World, files: usize, commits: usize) -> Result<Repository<'a>, Failure> {
        let directory = world.path("origin.git");
        if !directory.exists() {
            make(world, &directory, files, commits)?;
        }
        let any = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
        let address = any.map_err(Failure::attempted("finding a free port"))?;
        let mut command = git();
        let root = directory.parent().unwrap_or(&directory);
        command.args(["daemon", "--export-all", "--reuseaddr"]).arg(format!("--base-path={}", root.display()));
        command.args([format!("--listen={}", address.ip()), format!("--port={}", address.port())]);
        command.stdin(Stdio::null());
        let server = Program::start(world, "git-daemon", command, &[])?;
        let listens = || world.interrupt.check().is_err() || TcpStream::connect(address).is_ok();
        if wait_until(SERVE_MAX, listens) {
            world.interrupt.check()?;
            return Ok(Repository { _server: server, address });
        }
        Err(Failure::Problem(format!("git daemon does not listen after {SERVE_MAX:?}")))
    }

    /// Clones it on the lender's machine. Returns the seconds that it took.
    fn clone_once(address: SocketAddr, world: &World, nth: usize, group: &Group) -> Result<f64, Failure> {
        let clone = world.path(&format!("clone-{nth}"));
        let mut command = git();
        command.args(["clone", "--quiet", &format!("git://{address}/origin.git")]).arg(&clone);
        let begin = Instant::now();
        program::run(world, &format!("git-clone-{nth}"), command, &[group])?;
        let seconds = begin.elapsed().as_secs_f64();
        fs::remove_dir_all(&clone).map_err(Failure::attempted(format!("removing {}", clone.display())))?;
        Ok(seconds)
    }
}

/// git, whoever runs it.
fn git() -> Command {
    let mut command = Command::new("git");
    command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1");
    command
}

/// Makes a repository: files of words, and commits that change some lines of some of them.
fn make(world: &World, directory: &Path, files: usize, commits: usize) -> Result<(), Failure> {
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

/// A history that is made up.
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

    /// As `git fast-import` reads it.
    fn write(&mut self, mut to: impl Write, commits: usize) -> io::Result<()> {
        for commit in 0..=commits {
            // The first has all files.
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
    let over = |key: &str, x: f64| -> Option<Mean> {
        let alone = records.mean(ALONE, x, key, 1.0)?.mean;
        records.mean(WITH, x, key, alone)
    };
    let line = |name: &str, key: &str, variant: &str| {
        let points = records.xs(variant).into_iter().filter_map(|x| Some((x, records.mean(variant, x, key, 1.0)?)));
        Line { name: format!("{name}, {variant}"), points: points.collect() }
    };
    let both = |name: &str, key: &str| [ALONE, WITH].map(|variant| line(name, key, variant)).into();
    let mut findings = Vec::new();
    for clones in CLONES {
        let x = clones as f64;
        let what = format!("New-Orders in a minute while {clones} are cloning, over no Puma");
        let [without, with] = PAPER_DATABASE;
        let paper = format!("{:.1} × by the time of one, {without} s and {with} s", without / with);
        findings.push(Finding::at_least(&what, over("new_orders_per_min", x), 1.0, &paper));
        if clones > 0 {
            let paper = if clones == 1 { "184 s instead of 215 s" } else { "251 s instead of 204 s" };
            let what = format!("time of a clone, {clones} at once, over that beside an empty lender");
            findings.push(Finding::at_most(&what, over("clone_s", x), WANTED, paper));
        }
    }
    Results {
        charts: vec![
            Chart {
                name: "speed-up",
                title: "New-Orders of TPC-C in a minute, while repositories are cloned on the lender's machine"
                    .to_owned(),
                y_label: "New-Orders/min",
                is_log: false,
                lines: both("TPC-C", "new_orders_per_min"),
                marks: Vec::new(),
            },
            Chart {
                name: "clone",
                title: "Time of a clone on the lender's machine".to_owned(),
                y_label: "s",
                is_log: false,
                lines: both("git clone", "clone_s"),
                marks: Vec::<Mark>::new(),
            },
        ],
        columns: vec![
            Column { key: "p90_ms", name: "90th percentile of New-Order, ms", decimals: 1 },
            Column { key: "mean_ms", name: "mean, ms", decimals: 1 },
            Column { key: "new_orders_per_min", name: "New-Orders/min", decimals: 0 },
            Column { key: "clone_s", name: "time of a clone, s", decimals: 1 },
        ],
        findings,
        why: "Database, clients, clones, lender and mount share the processors here, which in the paper they had of their own: what git loses is in part that.",
    }
}
