//! A database on the mount does not notice that the daemon is killed under it: PostgreSQL, in a
//! memory cgroup smaller than its data, as an ordinary user, while pgbench runs.
//!
//! Afterwards no error was seen by pgbench or logged by the server, every acknowledged transaction
//! is there, the sums of pgbench's tables agree, the indexes agree with their tables (pg_amcheck),
//! and the checksum of every page is right, through the mount and below.
//!
//! `PUMA_DATABASE_KILLS` kills, spread over `PUMA_DATABASE_SECONDS` seconds of a database of scale
//! `PUMA_DATABASE_SCALE` (`make database`: 20 in 60 seconds).

mod setup;

use rustix::process::Signal;
use setup::{Lender, Mount, can_run};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use testbed::{Group, Line, Process, Scratch, wait_until};

/// The user that the database runs as.
const USER: u32 = 65_534;
/// Memory of the database and its page cache. At scale 20 its data are some 300 MiB.
const GROUP_BYTES: u64 = 160 << 20;
/// Longest any step may take.
const LIMIT: Duration = Duration::from_secs(300);

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

/// Where the newest PostgreSQL of this machine is.
fn programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?.flatten().map(|entry| entry.path().join("bin"));
    versions.filter(|path| path.join("postgres").exists() && path.join("pgbench").exists()).max()
}

struct Database {
    server: Option<Process>,
    group: Group,
    programs: PathBuf,
    data: PathBuf,
    socket: PathBuf,
    log: PathBuf,
}

impl Database {
    fn new(test: &str, programs: PathBuf, group: Group, mount: &Path, scratch: &Path) -> Database {
        let socket = scratch.join("socket");
        fs::create_dir(&socket).unwrap();
        let data = mount.join("data");
        fs::create_dir(&data).unwrap();
        for path in [&socket, &data] {
            std::os::unix::fs::chown(path, Some(USER), Some(USER)).unwrap();
        }
        fs::set_permissions(&data, fs::Permissions::from_mode(0o700)).unwrap();
        let mut database = Database { server: None, group, programs, data, socket, log: scratch.join("server.log") };
        println!("{test}: {}", database.programs.display());
        let data = database.data.to_str().unwrap().to_owned();
        database.run("initdb", &["-D", &data, "-k", "-U", "puma", "--auth=trust", "-E", "UTF8", "--locale=C"]);
        database.start();
        database
    }

    /// A command as the database's user, in its cgroup; both of its outputs are read here.
    fn spawn(&self, program: &str, arguments: &[&str], to: Option<File>) -> Process {
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={USER}"), &format!("--regid={USER}"), "--clear-groups", "--"]);
        match to {
            // The shell joins the outputs, and is replaced by the program.
            None => command.args(["sh", "-c", "exec \"$@\" 2>&1", "sh"]),
            Some(log) => command.stderr(log),
        };
        command.arg(self.programs.join(program)).args(arguments).current_dir(&self.socket).stdin(Stdio::null());
        command
            .env("PGHOST", &self.socket)
            .env("PGUSER", "puma")
            .env("PGDATABASE", "postgres")
            .env("HOME", &self.socket);
        Process::spawn(command, &[&self.group]).unwrap()
    }

    /// Runs it to its end, which must be good. Returns what it said.
    fn run(&self, program: &str, arguments: &[&str]) -> String {
        let mut process = self.spawn(program, arguments, None);
        let (said, succeeded) = finish(&mut process, |_| {});
        assert!(succeeded, "{program} {arguments:?}: {said}\n{}", fs::read_to_string(&self.log).unwrap_or_default());
        said
    }

    fn start(&mut self) {
        let data = self.data.to_str().unwrap();
        let socket = self.socket.to_str().unwrap();
        let log = File::options().create(true).append(true).open(&self.log).unwrap();
        let settings = ["shared_buffers=16MB", "max_wal_size=128MB", "checkpoint_timeout=30s", "max_connections=20"];
        let mut arguments = vec!["-D", data, "-k", socket, "-h", ""];
        settings.iter().for_each(|setting| arguments.extend(["-c", setting]));
        self.server = Some(self.spawn("postgres", &arguments, Some(log)));
        let is_ready = || {
            let mut process = self.spawn("pg_isready", &["-q"], None);
            finish(&mut process, |_| {}).1
        };
        assert!(wait_until(LIMIT, is_ready), "{}", fs::read_to_string(&self.log).unwrap());
    }

    /// Ends the server in order, with a last checkpoint.
    fn stop(&mut self) {
        let Some(mut server) = self.server.take() else { return };
        server.signal(Signal::INT).unwrap();
        let status = server.wait(LIMIT).unwrap();
        assert!(status.is_some_and(|status| status.success()), "{status:?}");
    }

    fn query(&self, query: &str) -> String {
        self.run("psql", &["-XAtc", query]).trim().to_owned()
    }
}

/// Reads what a process says until it has ended.
fn finish(process: &mut Process, mut each: impl FnMut(&str)) -> (String, bool) {
    let mut said = String::new();
    loop {
        match process.next_line(LIMIT) {
            Line::Text(line) => {
                each(&line);
                said.push_str(&line);
                said.push('\n');
            }
            Line::Timeout => panic!("it hangs, after: {said}"),
            Line::End => break,
        }
    }
    let status = process.wait(LIMIT).unwrap().expect("it ends after its output");
    (said, status.success())
}

fn count(said: &str, what: &str) -> u64 {
    let line = said.lines().find_map(|line| line.strip_prefix(what)).unwrap_or_else(|| panic!("no {what:?} in {said}"));
    line.trim_start_matches([':', ' ']).split([' ', '/']).next().unwrap().parse().unwrap()
}

#[test]
fn a_database_does_not_notice_kills() {
    let test = "a_database_does_not_notice_kills";
    if !can_run(test) {
        return;
    }
    let Some(programs) = programs() else {
        return testbed::skip(test, "PostgreSQL is missing: apt-get install postgresql postgresql-contrib");
    };
    let group = match Group::create(test, Some(GROUP_BYTES), None) {
        Ok(group) => group,
        Err(error) => return testbed::skip(test, error),
    };
    let (kills, seconds) = (number("PUMA_DATABASE_KILLS", 3), number("PUMA_DATABASE_SECONDS", 9));
    let scale = number("PUMA_DATABASE_SCALE", 2).to_string();
    let scratch = Scratch::new(test).unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let lender = Lender::start(scratch.path(), "512MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address, "--write", "through"]);
    let mut database = Database::new(test, programs, group, &at, scratch.path());
    database.run("pgbench", &["-i", "-q", "-s", &scale]);

    // One line each second: after so many of them, a kill. On a busy machine some are not printed:
    // then pgbench runs once more.
    let seconds_text = seconds.to_string();
    let arguments = ["-n", "-c", "4", "-j", "2", "-T", &seconds_text, "-P", "1", "--max-tries=1"];
    let (mut lines, mut killed, mut transactions) = (0, 0, 0);
    while killed < kills {
        let mut bench = database.spawn("pgbench", &arguments, None);
        let (said, succeeded) = finish(&mut bench, |line| {
            lines += u64::from(line.starts_with("progress:"));
            if killed < kills && lines * kills >= (killed + 1) * seconds.saturating_sub(1) {
                mount.kill_daemon();
                killed += 1;
            }
        });
        let log = fs::read_to_string(&database.log).unwrap();
        println!("{said}");
        assert!(succeeded && said.contains("progress:"), "pgbench failed: {said}\n{log}");
        transactions += count(&said, "number of transactions actually processed");
        assert_eq!(count(&said, "number of failed transactions"), 0);
        for word in ["error", "ERROR", "FATAL", "PANIC", "abort"] {
            assert!(!said.contains(word), "{said}");
        }
    }
    assert_eq!(mount.takeovers(), kills);

    // Every transaction that was acknowledged is there, and once.
    let sums = database.query(
        "select (select count(*) from pgbench_history), (select sum(delta) from pgbench_history), \
         (select sum(abalance) from pgbench_accounts), (select sum(tbalance) from pgbench_tellers), \
         (select sum(bbalance) from pgbench_branches)",
    );
    let sums: Vec<&str> = sums.split('|').collect();
    println!("{transactions} transactions; history, deltas, accounts, tellers, branches: {sums:?}");
    assert_eq!(sums[0].parse(), Ok(transactions));
    assert!(sums[1..].iter().all(|sum| *sum == sums[1]), "{sums:?}");
    database.run("pg_amcheck", &["--install-missing", "--heapallindexed", "-d", "postgres"]);
    database.stop();
    let data = database.data.to_str().unwrap().to_owned();
    let through = database.run("pg_checksums", &["--check", "-D", &data]);
    println!("{}", through.trim());
    assert_eq!(count(&through, "Bad checksums"), 0);
    let log = fs::read_to_string(&database.log).unwrap();
    let bad: Vec<_> = log
        .lines()
        .filter(|line| ["ERROR:", "FATAL:", "PANIC:", "WARNING:"].iter().any(|level| line.contains(level)))
        // A client that connects before the server is ready is told so.
        .filter(|line| !line.contains("the database system is starting up"))
        .collect();
    assert!(bad.is_empty(), "{bad:#?}");
    assert_eq!(mount.count(|of| of.bad_pages), 0);
    // A process that is killed in the middle of a frame leaves a part of one.
    let cut_short = lender.count(|of| of.malformed_frames);
    assert!(cut_short <= mount.takeovers(), "{cut_short}");
    println!("from the lender {} pages, takeovers {}", mount.count(|of| of.lender_pages), mount.takeovers());

    // And below, where nothing of the mount is in the way.
    let at_mount = at.to_str().unwrap();
    let output = setup::pumapool(&["umount", at_mount]);
    assert!(output.status.success(), "{output:?}");
    let below = database.run("pg_checksums", &["--check", "-D", source.join("data").to_str().unwrap()]);
    assert_eq!(count(&below, "Bad checksums"), 0);
}
