//! Real daemons for end-to-end tests: a lender and mounts, which end when dropped.
#![allow(dead_code)] // each test binary uses its own part

use std::fs::{self, File};
use std::io::Write;
use std::num::NonZeroU64;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Once;
use std::time::Duration;
use testbed::{Group, Process, Stalls};

pub const PUMAPOOL: &str = env!("CARGO_BIN_EXE_pumapool");

/// Time limit for a daemon to be ready, and for a state to be reached. Every wait is for a state,
/// so a fast machine never waits so long. With a load of five on each processor, some waits take
/// most of a minute.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Time limit for one answer of a daemon. During a takeover no daemon answers; then the question is
/// repeated.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Evicted at once: half of the tap's ring.
const PIECE_BYTES: u64 = 16 << 20;

/// The longest time that a borrower waits for an answer (`ANSWER_TIMEOUT` of the borrower).
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// A stall that explains an answer later than [`ANSWER_TIMEOUT`]. The rest of the time is the work
/// itself, which is slow on a busy machine, too.
const STALL_MIN: Duration = Duration::from_millis(300);

/// The longest time until a stall is counted: it ends first.
const STALL_SHOWS: Duration = Duration::from_secs(2);

/// Attempts of [`unless_stalled`].
const ATTEMPTS_MAX: u32 = 5;

/// Checks that this machine can run a test. Otherwise reports the missing part as the reason of a
/// skip.
pub fn can_run(test: &str) -> bool {
    let reason = if !rustix::process::geteuid().is_root() {
        "needs root"
    } else if File::options().read(true).write(true).open("/dev/fuse").is_err() {
        "needs /dev/fuse"
    } else {
        return true;
    };
    testbed::skip(test, reason);
    false
}

/// A program that `make tools` installs.
pub fn tool(test: &str, name: &str) -> Option<PathBuf> {
    let tools = std::env::var_os("TOOLS")
        .map_or(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools"), PathBuf::from);
    let installed = tools.join("bin").join(name);
    let found = if installed.exists() {
        Some(installed)
    } else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| path.exists())
    };
    if found.is_none() {
        testbed::skip(test, format!("{name} is missing; `make tools` installs it"));
    }
    found
}

/// Runs the command to its end.
pub fn pumapool(arguments: &[&str]) -> Output {
    Command::new(PUMAPOOL).args(arguments).output().unwrap()
}

/// The key of the pools of these tests, in a file that all of them share.
pub fn key_file() -> &'static str {
    const PATH: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/pool.key");
    static MADE: Once = Once::new();
    MADE.call_once(|| {
        let own = format!("{PATH}.{}", std::process::id());
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&own).unwrap();
        writeln!(file, "{}", "c5".repeat(32)).unwrap();
        // The rename is atomic, and every process writes the same content.
        fs::rename(&own, PATH).unwrap();
    });
    PATH
}

/// The key in [`key_file`].
pub fn key() -> wire::key::PoolKey {
    wire::key::PoolKey::read(Path::new(key_file())).unwrap()
}

/// Adds the key, unless the test chooses its own security.
fn with_key(mut arguments: Vec<&str>) -> Vec<&str> {
    if !arguments.contains(&"--trust-network") && !arguments.contains(&"--key") {
        arguments.extend(["--key", key_file()]);
    }
    arguments
}

fn daemon(arguments: &[&str], groups: &[&Group]) -> Process {
    let mut command = Command::new(PUMAPOOL);
    command.args(arguments).arg("--foreground");
    let mut process = Process::spawn(command, groups).unwrap();
    process.wait_for_line("READY", PATIENCE).unwrap();
    process
}

/// The status of one daemon. Only this daemon is asked, because `pumapool status` asks all daemons
/// of the machine, and waits for stopped ones.
fn status_of<T: report::Reported>(pid: u32) -> T {
    let ask = || testbed::ask_daemon(pid, ANSWER_MAX).map_err(|error| std::io::Error::other(error.to_string()));
    testbed::wait_until_ok(PATIENCE, ask).unwrap_or_else(|error| panic!("no status of process {pid}: {error}"))
}

/// Runs a test that counts pages exactly. The counts are right only if the lender answers each get
/// before the borrower gives it up. `attempt` returns `None` if gets failed because the machine
/// stalled a daemon ([`all_answered`]); then it is repeated. Any other failure must panic.
pub fn unless_stalled(mut attempt: impl FnMut(&Stalls) -> Option<()>) {
    let is_done = (0..ATTEMPTS_MAX).any(|_| {
        let is_done = attempt(&stalls()).is_some();
        if !is_done {
            println!("the test begins again");
        }
        is_done
    });
    assert!(is_done, "the machine stalled the daemons in each of {ATTEMPTS_MAX} attempts");
}

/// Begins to measure stalls that make an answer late.
pub fn stalls() -> Stalls {
    Stalls::measure(ANSWER_TIMEOUT)
}

/// Checks that no get failed. Returns `None` if some did and a stall explains it.
///
/// # Panics
/// Panics if gets failed although no thread of the daemons was stalled.
pub fn all_answered(failures: u64, stalls: &Stalls) -> Option<()> {
    if failures == 0 {
        return Some(());
    }
    let explains_it = || stalls.longest().waited >= STALL_MIN;
    let is_explained = testbed::wait_until(STALL_SHOWS, explains_it);
    let stall = stalls.longest();
    assert!(is_explained, "{failures} gets failed, but the machine was not too busy: {stall}");
    println!("{failures} gets failed because the machine was too busy: {stall}");
    None
}

pub struct Lender {
    pub process: Process,
    pub address: String,
}

impl Lender {
    pub fn start(folder: &Path, capacity: &str, groups: &[&Group]) -> Lender {
        Lender::listen(&format!("unix:{}", folder.join("lender.sock").display()), capacity, groups)
    }

    pub fn listen(address: &str, capacity: &str, groups: &[&Group]) -> Lender {
        Lender::with(address, &["--capacity", capacity], groups)
    }

    pub fn with(address: &str, options: &[&str], groups: &[&Group]) -> Lender {
        let arguments = [&["lend", "--listen", address, "--reserve", "16MiB"], options].concat();
        let process = daemon(&with_key(arguments), groups);
        let mut lender = Lender { process, address: String::new() };
        lender.address = lender.status().listen.to_owned();
        lender
    }

    pub fn status(&self) -> report::Lend {
        status_of(self.process.pid())
    }

    pub fn count(&self, number: impl Fn(&report::Lender) -> u64) -> u64 {
        number(&self.status().lender)
    }
}

/// A node that has joined a pool, with its mounts.
pub struct Node {
    pub process: Process,
}

impl Node {
    pub fn start(options: &[&str]) -> Node {
        let mut arguments = [&["join", "--listen", "127.0.0.1:0", "--reserve", "16MiB"], options].concat();
        for policy in ["--gate", "--hedge", "--filter"] {
            arguments.extend([policy, "off"]);
        }
        Node { process: daemon(&with_key(arguments), &[]) }
    }

    pub fn status(&self) -> report::Join {
        status_of(self.process.pid())
    }

    pub fn address(&self) -> String {
        self.status().lend.listen.to_owned()
    }

    /// Pages of others that it keeps.
    pub fn lent_pages(&self) -> u64 {
        self.status().lend.lender.stored_pages
    }

    pub fn wait_for(&self, what: &str, state: impl Fn(&report::Join) -> bool) {
        let came = testbed::wait_until(PATIENCE, || state(&self.status()));
        assert!(came, "waited in vain for {what}: {}", self.status());
    }
}

/// The statuses of all mounts of this machine.
pub fn mounts() -> Vec<report::Mount> {
    all().mounts.into_iter().map(|mount| mount.status).collect()
}

/// The statuses of all daemons of this machine.
pub fn all() -> report::All {
    serde_json::from_slice(&pumapool(&["status", "--json"]).stdout).unwrap()
}

pub struct Mount {
    pub process: Process,
    pub path: PathBuf,
}

impl Mount {
    /// Mounts `source` at `path`, and waits until the lender is found, if one is named.
    pub fn start(source: &Path, path: &Path, options: &[&str]) -> Mount {
        Mount::start_in(source, path, options, &[])
    }

    /// Mounts `source` at `path` in these groups, and waits until the lender is found, if one is
    /// named.
    pub fn start_in(source: &Path, path: &Path, options: &[&str], groups: &[&Group]) -> Mount {
        let mut arguments = vec!["mount", source.to_str().unwrap()];
        if path != source {
            arguments.push(path.to_str().unwrap());
        }
        arguments.extend(options);
        // The disks under these tests are as fast as a lender, and files are read from end to end:
        // what is not about these policies is not to depend on them.
        for policy in ["--gate", "--hedge", "--filter"] {
            if !options.contains(&policy) {
                arguments.extend([policy, "off"]);
            }
        }
        let mount = Mount { process: daemon(&with_key(arguments), groups), path: path.to_owned() };
        if options.contains(&"--lender") {
            mount.wait_for("the lender", |status| status.lender_is_up);
        }
        mount
    }

    pub fn status(&self) -> report::Mount {
        status_of(self.process.pid())
    }

    pub fn count(&self, number: impl Fn(&report::Borrower) -> u64) -> u64 {
        number(&self.status().borrower)
    }

    /// The process that serves, which is not the one that was started.
    pub fn daemon_pid(&self) -> u32 {
        self.status().daemon_pid
    }

    /// How often a new daemon took over.
    pub fn takeovers(&self) -> u64 {
        self.status().mount.takeovers
    }

    /// Kills the daemon, and waits until another one has taken over.
    pub fn kill_daemon(&self) {
        let before = self.takeovers();
        kill(self.daemon_pid());
        self.wait_for("a takeover", |status| status.mount.takeovers > before);
    }

    pub fn wait_for(&self, what: &str, state: impl Fn(&report::Mount) -> bool) {
        let came = testbed::wait_until(PATIENCE, || state(&self.status()));
        assert!(came, "waited in vain for {what}: {}", self.status());
    }

    /// Checks that no get of this mount failed, as [`all_answered`] does.
    pub fn in_time(&self, stalls: &Stalls) -> Option<()> {
        all_answered(self.count(|of| of.get_failures), stalls)
    }

    /// Has the stalls of this mount's daemon and of its lender measured.
    pub fn measure(&self, lender: &Lender, stalls: &Stalls) {
        stalls.add(self.daemon_pid());
        stalls.add(lender.process.pid());
    }

    /// Has the kernel evict what it caches of the file, and waits until the lender has `pages`
    /// pages in all.
    pub fn evict(&self, file: &Path, pages: u64) {
        let seen = self.count(|of| of.evictions);
        self.wait_for(&format!("{pages} pages evicted and lent"), |status| {
            // Again and again: a page that is in use at the moment stays.
            evict(file);
            status.borrower.evictions >= seen + pages
                && status.catalog.live_pages == pages
                && status.puts_under_way == 0
        });
    }

    /// Has the kernel evict what it caches of the file, in pieces of which the tap loses nothing,
    /// and waits until the borrower has seen all of it.
    pub fn evict_seen(&self, file: &Path) {
        let file = File::open(file).unwrap();
        for at in (0..file.metadata().unwrap().len()).step_by(PIECE_BYTES as usize) {
            rustix::fs::fadvise(&file, at, NonZeroU64::new(PIECE_BYTES), rustix::fs::Advice::DontNeed).unwrap();
            self.wait_for("the tap's ring", |status| {
                status.tap.clone().unwrap_or_default().captured_pages == status.borrower.evictions
            });
        }
    }
}

/// None of the lenders weighs much less than another: what a new one weighs is known a little after
/// it is found, and until then it weighs 1.
pub fn is_balanced(status: &report::Mount) -> bool {
    let weights = status.lenders.iter().map(|lender| lender.weight);
    let weights: Vec<_> = weights.collect();
    let least = *weights.iter().min().unwrap();
    least > 1 && least * 4 > *weights.iter().max().unwrap()
}

/// Unmounts. A program that another test is just starting has our open files until it is executed:
/// so it is tried for a while.
pub fn umount(at: &str) {
    let mut output = None;
    let is_ended = || output.insert(pumapool(&["umount", at])).status.success();
    assert!(testbed::wait_until(PATIENCE, is_ended), "{output:?}");
}

/// Kills a process outright.
pub fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

/// Has the kernel evict what it caches of the file.
pub fn evict(file: &Path) {
    let file = File::open(file).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Writes `pages` pages that differ from each other and, with another seed, from any other file's.
pub fn write_pages(path: &Path, pages: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; pages * 4096];
    random.fill(&mut bytes);
    fs::write(path, &bytes).unwrap();
    bytes
}
