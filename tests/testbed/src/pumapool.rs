//! The real `pumapool` command: daemons that are ready, mounts that end with their guard, and their
//! status.

use crate::failure::{Failure, Interrupt};
use crate::group::Group;
use crate::process::{Line, Process};
use report::Reported;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for a daemon to become ready. Loading and calibrating the eviction tap takes longest.
const READY_MAX: Duration = Duration::from_secs(60);
/// Time limit for unmounting: `pumapool umount` itself waits for ten seconds.
const UNMOUNT_MAX: Duration = Duration::from_secs(60);
/// Time limit for an answer of a daemon.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// The maximum length of a status in bytes.
const STATUS_BYTES_MAX: u64 = 4 << 20;
/// Pause between two checks of a state that no event announces.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Lines of a daemon's log that are shown when it fails.
const LOG_TAIL_LINES: usize = 5;

/// The command, and the place of its output.
#[derive(Clone)]
pub struct Puma {
    /// The command.
    pub pumapool: PathBuf,
    /// Directory for logs.
    pub logs: PathBuf,
    /// Whether the run was interrupted; checked while a daemon starts.
    pub interrupt: Option<Interrupt>,
}

impl Puma {
    /// Starts a daemon and waits until it prints READY; returns the text after that word.
    ///
    /// # Errors
    /// Fails, with the end of its log, if it does not become ready.
    pub fn start(&self, mut command: Command, log: &str, groups: &[&Group]) -> Result<(Process, String), Failure> {
        let path = self.logs.join(format!("{log}.log"));
        let file = File::options().create(true).append(true).open(&path);
        command.stdin(Stdio::null()).stderr(file.map_err(Failure::attempted(format!("writing {}", path.display())))?);
        let mut process = Process::spawn(command, groups)?;
        let begin = Instant::now();
        let line = loop {
            self.interrupt.as_ref().map_or(Ok(()), Interrupt::check)?;
            match process.wait_for_line("READY", LOOK_EVERY) {
                Ok(line) => break line,
                Err(error) if error.kind() == ErrorKind::TimedOut && begin.elapsed() < READY_MAX => {}
                Err(error) => {
                    let after = begin.elapsed();
                    let log = format!("{} ends with: {}", path.display(), tail(&path));
                    return Err(Failure::Problem(format!("starting a daemon, after {after:.1?}: {error}; {log}")));
                }
            }
        };
        Ok((process, line.trim_start_matches("READY").trim().to_owned()))
    }

    /// Starts `command`, which mounts something at `at`.
    ///
    /// # Errors
    /// Fails if it does not become ready, or does not return its status.
    pub fn mount(&self, command: Command, at: &Path, log: &str, groups: &[&Group]) -> Result<PumaMount, Failure> {
        let (process, _) = self.start(command, log, groups)?;
        let mut mount = PumaMount { puma: self.clone(), process, at: at.to_owned(), pid: 0, mounted: true };
        mount.pid = mount.find()?.pid;
        Ok(mount)
    }

    /// Makes a pool key.
    ///
    /// # Errors
    /// Fails if the command fails.
    pub fn new_key(&self, path: &Path) -> Result<(), Failure> {
        let made = Command::new(&self.pumapool).args(["key", "new"]).arg(path).stdout(Stdio::null()).status();
        if made.map_err(Failure::attempted("making a pool key"))?.success() {
            return Ok(());
        }
        Err(Failure::Problem("`pumapool key new` failed".to_owned()))
    }

    /// The output of `pumapool status --json`.
    ///
    /// # Errors
    /// When the command cannot be run, or says what is no JSON.
    pub fn status(&self) -> Result<report::All, Failure> {
        let output = Command::new(&self.pumapool).args(["status", "--json"]).stdin(Stdio::null()).output();
        let output = output.map_err(Failure::attempted("running pumapool status"))?;
        serde_json::from_slice(&output.stdout).map_err(|error| Failure::Problem(format!("reading the status: {error}")))
    }
}

/// A mount. Dropping it unmounts.
pub struct PumaMount {
    puma: Puma,
    process: Process,
    at: PathBuf,
    pid: u32,
    mounted: bool,
}

impl PumaMount {
    /// The process of the serving daemon.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Its own part of the command's output about all daemons.
    ///
    /// # Errors
    /// When it says nothing of this one.
    pub fn find(&self) -> Result<report::Mount, Failure> {
        let mounts = self.puma.status()?.mounts;
        let found = mounts.into_iter().find(|mount| Path::new(&mount.status.mountpoint) == self.at);
        found
            .map(|mount| mount.status)
            .ok_or_else(|| Failure::Problem(format!("no status of the mount at {}", self.at.display())))
    }

    /// Its status, from its own socket. (The command asks all daemons of the machine, and waits for
    /// those that are stopped.)
    ///
    /// # Errors
    /// When it does not answer in time.
    pub fn status(&self) -> Result<report::Mount, Failure> {
        ask_daemon(self.pid, ANSWER_MAX)
    }

    /// Fails if its daemon has ended.
    ///
    /// # Errors
    /// The error describes how it ended.
    pub fn check(&mut self) -> Result<(), String> {
        match self.process.wait(Duration::ZERO) {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(format!("the mount daemon ended with {status}")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Unmounts; the daemon must end with success.
    ///
    /// # Errors
    /// Fails if it does not.
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
            // The daemon is our child: it is gone only after we have waited for it, and umount
            // waits for that.
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

impl Drop for PumaMount {
    fn drop(&mut self) {
        if self.mounted {
            // If this fails, the mount is detached with its directory, and the daemon ends with its
            // guard.
            let _detached_later = self.unmount();
        }
    }
}

/// The status of one daemon, over its own socket, if it answers within `limit`. The type of the
/// status chooses the kind of the daemon.
///
/// # Errors
/// When it does not.
pub fn ask_daemon<T: Reported>(pid: u32, limit: Duration) -> Result<T, Failure> {
    let path = sockets().join(format!("{}-{pid}.sock", T::KIND));
    let answer = || {
        let stream = UnixStream::connect(&path)?;
        stream.set_read_timeout(Some(limit))?;
        // Only the status: the daemon need not wait for further requests.
        stream.shutdown(Shutdown::Write)?;
        let mut text = String::new();
        stream.take(STATUS_BYTES_MAX).read_to_string(&mut text)?;
        Ok(text)
    };
    let text: std::io::Result<String> = answer();
    let text = text.map_err(Failure::attempted(format!("asking {}", path.display())))?;
    serde_json::from_str(&text).map_err(|error| Failure::Problem(format!("reading the status: {error}")))
}

/// The directory of this user's control sockets (`crates/pumapool/src/daemon/control.rs`).
fn sockets() -> PathBuf {
    let uid = rustix::process::geteuid();
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|runtime| Path::new(runtime).is_absolute()) {
        _ if uid.is_root() => "/run/pumapool".into(),
        Some(runtime) => Path::new(&runtime).join("pumapool"),
        None => std::env::temp_dir().join(format!("pumapool-{}", uid.as_raw())),
    }
}

/// The end of a log, for display.
pub fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].join(" / ")
}
