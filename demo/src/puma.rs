//! Puma for the demo: a lender, and the mount over the data set, through the same command that a user has.
//!
//! The lender is in a memory group of its own, as if it were another machine. The mount daemon is outside of the reader's
//! memory group, whose pages are not its own, but on the same slow disk: it reads it on the reader's behalf.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testbed::{Failure, Group, Interrupt, Line, Process, Scratch, SlowDisk};

/// Until a daemon is ready. Loading and calibrating the eviction tap is the longest part.
const READY_MAX: Duration = Duration::from_secs(60);
/// For a command that asks or tells a daemon something.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// For taking a mount away: `pumapool umount` itself waits for ten seconds.
const UNMOUNT_MAX: Duration = Duration::from_secs(60);
/// Free memory that the lender leaves alone.
const RESERVE_BYTES: u64 = 64 << 20;
/// What the lender itself needs, next to what it lends.
const LENDER_OWN_BYTES: u64 = 64 << 20;
/// Between two looks whether somebody wants us to stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Lines of a daemon's log that are shown when it fails.
const LOG_TAIL_LINES: usize = 5;

/// How Puma is to run.
pub struct Setup<'a> {
    /// The command.
    pub pumapool: &'a Path,
    /// What the lender may lend.
    pub capacity_bytes: u64,
    /// Whether the lender gets a memory group.
    pub limit_lender: bool,
    /// Given to the mount as it is.
    pub strategy: Option<&'a str>,
    /// The directory that is mounted.
    pub source: &'a Path,
    /// Where.
    pub mount_point: PathBuf,
    /// The slow disk below the source.
    pub slow_disk: Option<&'a SlowDisk>,
    /// Where the daemons' logs go.
    pub logs: &'a Path,
}

/// A lender and a mount, both ended when dropped.
pub struct Puma {
    pumapool: PathBuf,
    mount_point: PathBuf,
    mounted: bool,
    // Dropped in this order: the mount before what it depends on, processes before their groups.
    mount: Process,
    lender: Process,
    _mount_group: Group,
    _lender_group: Group,
    _socket: Scratch,
}

impl Puma {
    /// Starts both, and waits until they are ready.
    pub fn start(setup: &Setup<'_>, interrupt: &Interrupt) -> Result<Puma, Failure> {
        // In the system's place for temporary files, because paths of sockets must be short.
        let socket = Scratch::new("demo-socket")?;
        let address = format!("unix:{}", socket.path().join("lender").display());
        // As between machines: what is shown has the cost of sealing in it.
        let key = socket.path().join("pool.key");
        let made = Command::new(setup.pumapool).args(["key", "new"]).arg(&key).stdout(Stdio::null()).status();
        if !made.map_err(Failure::attempted("making a pool key"))?.success() {
            return Err(Failure::Problem("`pumapool key new` failed".to_owned()));
        }
        let limit_bytes = setup.capacity_bytes + RESERVE_BYTES + LENDER_OWN_BYTES;
        let lender_group = Group::create("lender", setup.limit_lender.then_some(limit_bytes), None)?;
        let mut lend = Command::new(setup.pumapool);
        lend.args(["lend", "--listen", &address, "--foreground"]).arg("--key").arg(&key);
        lend.args(["--capacity", &mib(setup.capacity_bytes), "--reserve", &mib(RESERVE_BYTES)]);
        let lender = start(lend, &lender_group, "lend", setup.logs, interrupt)?;

        let mount_group = Group::create("mount", None, setup.slow_disk)?;
        let mut mount = Command::new(setup.pumapool);
        mount
            .arg("mount")
            .arg(setup.source)
            .arg(&setup.mount_point)
            .args(["--lender", &address, "--foreground"])
            .arg("--key")
            .arg(&key);
        // The disk is as fast as it is while the pool is filled, and slowed down only then: the gate would leave the lender alone until then.
        mount.args(["--gate", "off"]);
        if let Some(strategy) = setup.strategy {
            mount.args(["--strategy", strategy]);
        }
        let mount = start(mount, &mount_group, "mount", setup.logs, interrupt)?;
        Ok(Puma {
            pumapool: setup.pumapool.to_owned(),
            mount_point: setup.mount_point.clone(),
            mounted: true,
            mount,
            lender,
            _mount_group: mount_group,
            _lender_group: lender_group,
            _socket: socket,
        })
    }

    /// The process that reads the disk for everybody who reads through the mount.
    pub fn mount_pid(&self) -> u32 {
        self.mount.pid()
    }

    /// Pages that lent memory has answered so far, those on their way there included.
    pub fn pool_pages(&self) -> Option<u64> {
        let status = self.mount_status()?;
        let count = |name: &str| status["borrower"][name].as_u64();
        ["lender_pages", "buffer_pages", "zero_pages"].into_iter().map(count).sum()
    }

    /// Whether pages are lent only as they are read from the disk, because their eviction cannot be seen.
    pub fn fills_on_read(&self) -> bool {
        self.mount_status().is_some_and(|status| status["fill"] != "eviction")
    }

    fn mount_status(&self) -> Option<serde_json::Value> {
        let mut status = self.status()?;
        let mounts = status["mounts"].as_array_mut()?;
        let at = self.mount_point.to_str()?;
        mounts.iter_mut().find(|mount| mount["mountpoint"] == at).map(serde_json::Value::take)
    }

    /// What Puma says about itself, if it says anything.
    pub fn status(&self) -> Option<serde_json::Value> {
        let mut command = Command::new(&self.pumapool);
        command.args(["status", "--json"]).stdin(Stdio::null()).stderr(Stdio::null());
        let status = Process::spawn(command, &[]).ok()?;
        let (begin, mut text) = (Instant::now(), String::new());
        while begin.elapsed() < ANSWER_MAX {
            match status.next_line(LOOK_EVERY) {
                Line::Text(line) => text.push_str(&line),
                Line::Timeout => {}
                Line::End => return serde_json::from_str(&text).ok(),
            }
        }
        None
    }

    /// Unmounts, and ends both.
    pub fn end(mut self) -> Result<(), Failure> {
        self.unmount().map_err(|problem| Failure::Problem(format!("unmounting: {problem}")))?;
        let status = self.mount.wait(ANSWER_MAX)?;
        match status {
            Some(status) if status.success() => {}
            Some(status) => return Err(Failure::Problem(format!("the mount daemon ended with {status}"))),
            None => return Err(Failure::Problem("the mount daemon still runs after it was unmounted".to_owned())),
        }
        self.lender.stop(ANSWER_MAX)?;
        Ok(())
    }

    fn unmount(&mut self) -> Result<(), String> {
        self.mounted = false;
        let mut command = Command::new(&self.pumapool);
        command.arg("umount").arg(&self.mount_point).stdin(Stdio::null()).stderr(Stdio::null());
        let mut umount = Process::spawn(command, &[]).map_err(|error| error.to_string())?;
        let begin = Instant::now();
        while begin.elapsed() < UNMOUNT_MAX {
            // The daemon is our child, and umount waits until it is gone: it is gone only when we have heard of its end.
            self.mount.wait(Duration::ZERO).map_err(|error| error.to_string())?;
            match umount.wait(LOOK_EVERY).map_err(|error| error.to_string())? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("pumapool umount ended with {status}")),
                None => {}
            }
        }
        Err(format!("pumapool umount did not end within {UNMOUNT_MAX:?}"))
    }
}

impl Drop for Puma {
    fn drop(&mut self) {
        if self.mounted {
            // If it fails, the mount is detached with the directory that it is in, and its daemon ended with its guard.
            let _detached_later = self.unmount();
        }
    }
}

fn mib(bytes: u64) -> String {
    format!("{}MiB", bytes >> 20)
}

/// Starts a daemon and waits until it says that it is ready.
fn start(
    mut command: Command,
    group: &Group,
    name: &str,
    logs: &Path,
    interrupt: &Interrupt,
) -> Result<Process, Failure> {
    let log = logs.join(format!("demo-{name}.log"));
    let file = File::create(&log).map_err(Failure::attempted(format!("making {}", log.display())))?;
    command.stdin(Stdio::null()).stderr(file);
    let process = Process::spawn(command, &[group])?;
    let begin = Instant::now();
    loop {
        interrupt.check()?;
        match process.next_line(LOOK_EVERY) {
            Line::Text(line) if line.starts_with("READY") => return Ok(process),
            Line::Text(_) => {}
            Line::Timeout if begin.elapsed() < READY_MAX => {}
            Line::Timeout => {
                let message = format!("pumapool {name} was not ready within {READY_MAX:?}{}", tail(&log));
                return Err(Failure::Problem(message));
            }
            Line::End => {
                let message = format!("pumapool {name} ended before it was ready{}", tail(&log));
                return Err(Failure::Problem(message));
            }
        }
    }
}

/// The end of a log, for the eye.
fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(LOG_TAIL_LINES)..];
    format!("; {} ends with: {}", log.display(), last.join(" / "))
}
