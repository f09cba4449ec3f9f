//! Puma under test: the real `pumapool` command, its mounts, and what it says of itself.

use serde_json::Value;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testbed::{Failure, Group, Line, Process};

/// Until a daemon is ready. Loading and calibrating the eviction tap is the longest part.
pub const READY_MAX: Duration = Duration::from_secs(30);
/// For taking a mount away: `pumapool umount` itself waits for ten seconds.
const UNMOUNT_MAX: Duration = Duration::from_secs(30);
/// For an answer of a daemon.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Bytes of a status at the most.
const STATUS_BYTES_MAX: u64 = 4 << 20;
/// Between two looks at something that nothing announces.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How a mount works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// `--strategy`.
    pub strategy: &'static str,
    /// `--write`.
    pub write: &'static str,
    /// `--fill`.
    pub fill: &'static str,
}

impl Mode {
    /// Every one that there is. Filled on read, no strategy but non-inclusive makes sense.
    pub const ALL: [Mode; 6] = [
        Mode { strategy: "exclusive", write: "through", fill: "evict" },
        Mode { strategy: "exclusive", write: "back", fill: "evict" },
        Mode { strategy: "non-inclusive", write: "through", fill: "evict" },
        Mode { strategy: "non-inclusive", write: "back", fill: "evict" },
        Mode { strategy: "non-inclusive", write: "through", fill: "read" },
        Mode { strategy: "non-inclusive", write: "back", fill: "read" },
    ];
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, write {}, fill on {}", self.strategy, self.write, self.fill)
    }
}

/// The command, and where what it says is kept.
#[derive(Clone)]
pub struct Puma {
    /// The command.
    pub pumapool: PathBuf,
    /// Directory for logs.
    pub logs: PathBuf,
}

impl Puma {
    /// Starts a daemon and waits until it says READY; returns what it said behind that word.
    pub fn start(&self, mut command: Command, log: &str, groups: &[&Group]) -> Result<(Process, String), Failure> {
        let path = self.logs.join(format!("{log}.log"));
        let file = File::options().create(true).append(true).open(&path);
        command.stdin(Stdio::null()).stderr(file.map_err(Failure::attempted(format!("writing {}", path.display())))?);
        let mut process = Process::spawn(command, groups)?;
        let line = process.wait_for_line("READY", READY_MAX);
        let line = line.map_err(Failure::attempted(format!("starting a daemon (see {})", path.display())))?;
        Ok((process, line.trim_start_matches("READY").trim().to_owned()))
    }

    /// Mounts `source` at `at`.
    pub fn mount(&self, source: &Path, at: &Path, options: &[&str], log: &str) -> Result<Mount, Failure> {
        let mut command = Command::new(&self.pumapool);
        command.arg("mount").args([source, at]).args(options).arg("--foreground");
        let (process, _) = self.start(command, log, &[])?;
        let mut mount = Mount { puma: self.clone(), process, at: at.to_owned(), pid: 0, mounted: true };
        let status = mount.find()?;
        let pid = status["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        mount.pid = pid.ok_or_else(|| Failure::Problem(format!("no pid in the status {status}")))?;
        Ok(mount)
    }

    /// What `pumapool status --json` says.
    pub fn status(&self) -> Result<Value, Failure> {
        let output = Command::new(&self.pumapool).args(["status", "--json"]).stdin(Stdio::null()).output();
        let output = output.map_err(Failure::attempted("running pumapool status"))?;
        serde_json::from_slice(&output.stdout).map_err(|error| Failure::Problem(format!("reading the status: {error}")))
    }

    /// Lines of the logs that tell of a panic: there must be none.
    pub fn panics(&self) -> Vec<String> {
        let logs = fs::read_dir(&self.logs).into_iter().flatten().flatten().map(|entry| entry.path());
        let logs = logs.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
        let texts: Vec<String> = logs.filter_map(|path| fs::read_to_string(path).ok()).collect();
        let lines = texts.iter().flat_map(|text| text.lines()).filter(|line| line.contains("panicked"));
        lines.map(str::to_owned).collect()
    }
}

/// A mount, taken away when dropped.
pub struct Mount {
    puma: Puma,
    process: Process,
    at: PathBuf,
    /// Of the daemon that serves it.
    pub pid: u32,
    mounted: bool,
}

impl Mount {
    /// Its own part of the status of all daemons.
    fn find(&self) -> Result<Value, Failure> {
        let status = self.puma.status()?;
        let found = status["mounts"].as_array().and_then(|mounts| {
            mounts.iter().find(|mount| mount["mountpoint"].as_str().is_some_and(|at| Path::new(at) == self.at))
        });
        found.cloned().ok_or_else(|| Failure::Problem(format!("no status of the mount at {}", self.at.display())))
    }

    /// Its status, from its own socket: the command asks all daemons of the machine, and waits for those that are stopped.
    pub fn status(&self) -> Result<Value, Failure> {
        ask("mount", self.pid, ANSWER_MAX)
    }

    /// Fails if its daemon has ended.
    pub fn check(&mut self) -> Result<(), String> {
        match self.process.wait(Duration::ZERO) {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(format!("the mount daemon ended with {status}")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Takes it away; its daemon must end well.
    pub fn end(mut self) -> Result<(), String> {
        self.unmount()?;
        match self.process.wait(UNMOUNT_MAX).map_err(|error| error.to_string())? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("the mount daemon ended with {status}")),
            None => Err(format!("the mount daemon still runs {UNMOUNT_MAX:?} after it was unmounted")),
        }
    }

    fn unmount(&mut self) -> Result<(), String> {
        self.mounted = false;
        let mut command = Command::new(&self.puma.pumapool);
        command.arg("umount").arg(&self.at).stdin(Stdio::null());
        let mut umount = Process::spawn(command, &[]).map_err(|error| error.to_string())?;
        let begin = Instant::now();
        while begin.elapsed() < UNMOUNT_MAX {
            // The daemon is our child: it is gone only when we have heard of its end, and umount waits for that.
            self.process.wait(Duration::ZERO).map_err(|error| error.to_string())?;
            match umount.wait(LOOK_EVERY).map_err(|error| error.to_string())? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("pumapool umount ended with {status}")),
                None => while matches!(umount.next_line(Duration::ZERO), Line::Text(_)) {},
            }
        }
        Err(format!("pumapool umount did not end within {UNMOUNT_MAX:?}"))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.mounted {
            // If it fails, the mount is detached with the directory that it is in, and its daemon ended with its guard.
            let _detached_later = self.unmount();
        }
    }
}

/// The status of one daemon, over its own socket, if it answers within `limit`.
pub fn ask(kind: &str, pid: u32, limit: Duration) -> Result<Value, Failure> {
    let path = PathBuf::from(format!("/run/pumapool/{kind}-{pid}.sock"));
    let answer = || {
        let stream = UnixStream::connect(&path)?;
        stream.set_read_timeout(Some(limit))?;
        let mut text = String::new();
        stream.take(STATUS_BYTES_MAX).read_to_string(&mut text)?;
        Ok(text)
    };
    let text: std::io::Result<String> = answer();
    let text = text.map_err(Failure::attempted(format!("asking {}", path.display())))?;
    serde_json::from_str(&text).map_err(|error| Failure::Problem(format!("reading the status: {error}")))
}

/// A number of a status.
pub fn count(status: &Value, path: &str) -> u64 {
    status.pointer(path).and_then(Value::as_u64).unwrap_or(0)
}
