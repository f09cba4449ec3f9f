//! The common parts of the daemons: going into the background, readiness, the log, and the signals
//! that end them.
//!
//! Without `--foreground` the command starts itself again in a session of its own. It waits until
//! that process prints READY on its standard output, or fails. So the caller gets the error, and
//! continues only when the daemon serves.
//!
//! [`Daemon::prepare`] does everything that can fail (log, control socket, signals) before the
//! daemon's own work begins. So an error never leaves a mount behind.

pub mod cgroups;
pub mod confine;
pub mod control;
pub mod lenders;
pub mod membership;
pub mod pool;
pub mod security;

use crate::cli::daemon::Options;
use crate::cli::exit;
use crate::config::{self, Changeable};
use crate::metrics::server::MetricsListener;
use anyhow::{Context, Result, bail};
use control::{Control, RemovedOnDrop};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use wire::address::Address;

/// Environment variable of the process in the background. The value is the id of the process that
/// started it.
pub const STARTED_BY: &str = "PUMAPOOL_STARTED_BY";

/// A daemon before it begins its work.
pub struct Daemon {
    log: Option<Log>,
    signals: Signals,
    control: Control,
    changeable: Changeable,
    metrics: Option<MetricsListener>,
}

/// Where a daemon in the background logs.
pub struct Log {
    file: File,
    /// A log file that this program made. It is removed if the daemon fails to start, because the
    /// caller has got the error.
    default: Option<RemovedOnDrop>,
}

impl Log {
    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The content is no longer needed: removes the file if this program has chosen its place.
    pub fn remove(self) {
        drop(self.default);
    }

    /// Keeps the file.
    pub fn keep(self) {
        self.default.into_iter().for_each(RemovedOnDrop::keep);
    }
}

impl Daemon {
    /// Goes into the background, if requested, and prepares the common parts of a daemon. Returns
    /// an exit code if this process has started the one in the background, and must end.
    pub fn prepare(kind: &str, options: &Options) -> Result<Result<Daemon, ExitCode>> {
        let parent = rustix::process::getppid().map(|parent| parent.as_raw_nonzero().to_string());
        let detached = std::env::var(STARTED_BY).is_ok_and(|started_by| Some(started_by) == parent);
        if !options.foreground && !detached {
            return start_in_background().map(Err);
        }
        let log = if detached { Some(open_log(kind, options)?) } else { None };
        log.iter().for_each(|log| crate::log::to(&log.file));
        let signals = Signals::new([SIGINT, SIGTERM, SIGQUIT, SIGHUP]).context("cannot listen for signals")?;
        let metrics = options.metrics.as_ref().map(MetricsListener::bind).transpose()?;
        Ok(Ok(Daemon { log, signals, control: Control::bind(kind)?, metrics, changeable: Changeable::nothing() }))
    }

    /// Sets the options that can change while the daemon runs.
    pub fn can_change(self, changeable: Changeable) -> Daemon {
        Daemon { changeable, ..self }
    }

    /// The parts for a process that lets another one serve: the log, the control socket, and the
    /// address of metrics.
    pub fn into_parts(self) -> (Option<Log>, Control, Option<MetricsListener>) {
        (self.log, self.control, self.metrics)
    }

    /// The address at which metrics are served.
    pub fn metrics(&self) -> Option<&Address> {
        self.metrics.as_ref().map(MetricsListener::address)
    }

    /// Begins to serve: runs `stop` on the first signal, answers requests for the status, and
    /// reports readiness to the caller by a line and to systemd by its socket. The guard cleans up
    /// when dropped.
    pub fn serve(
        self,
        message: &str,
        status: impl Fn() -> report::Daemon + Send + Sync + 'static,
        stop: impl FnOnce() + Send + 'static,
    ) -> Result<Serving> {
        self.serve_commands(message, status, |_, stream| drop(stream), stop)
    }

    /// Serves like [`Daemon::serve`], and lets `command` answer commands of clients.
    pub fn serve_commands(
        self,
        message: &str,
        status: impl Fn() -> report::Daemon + Send + Sync + 'static,
        command: impl Fn(&str, UnixStream) + Send + 'static,
        stop: impl FnOnce() + Send + 'static,
    ) -> Result<Serving> {
        on_signals(self.signals, hangup_ends(self.log.is_some()), self.changeable, stop)?;
        let status = Arc::new(status);
        if let Some(listener) = &self.metrics {
            let status = status.clone();
            listener.serve(Arc::new(move || vec![status()]))?;
        }
        let control = self.control.serve(move || status(), command)?;
        let mut default_log = None;
        let mut stdout = std::io::stdout();
        if let Some(log) = self.log {
            leave_session();
            rustix::stdio::dup2_stderr(&log.file).context("cannot switch to the log")?;
            crate::log::turned();
            let _ = std::env::set_current_dir("/");
            default_log = log.default;
            if default_log.is_some() {
                crate::log::bound();
            }
            // The caller may be gone; the daemon serves anyway.
            let _ = writeln!(stdout, "READY {message}").and_then(|()| stdout.flush());
            let _ = rustix::stdio::dup2_stdout(&log.file);
        } else {
            let _ = writeln!(stdout, "READY {message}").and_then(|()| stdout.flush());
        }
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        Ok(Serving { _control: control, _metrics: self.metrics, default_log })
    }
}

/// A daemon while it serves.
pub struct Serving {
    _control: control::Serving,
    _metrics: Option<MetricsListener>,
    default_log: Option<RemovedOnDrop>,
}

impl Serving {
    /// The daemon has ended in order, so its log is no longer needed.
    pub fn ended_well(mut self) {
        drop(self.default_log.take());
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if let Some(log) = self.default_log.take() {
            log.keep();
        }
    }
}

fn open_log(kind: &str, options: &Options) -> Result<Log> {
    let (path, default) = match &options.log_file {
        Some(path) => (path.clone(), None),
        None => {
            let path = control::make_folder()?.join(format!("{kind}-{}.log", std::process::id()));
            (path.clone(), Some(RemovedOnDrop(path)))
        }
    };
    let file = OpenOptions::new().create(true).append(true).open(&path).with_context(|| {
        format!("cannot write the log {}, make its folder or choose another --log-file", path.display())
    })?;
    Ok(Log { file, default })
}

/// Starts this command again in the background, and waits until it serves or fails.
fn start_in_background() -> Result<ExitCode> {
    keep_descriptors_to_ourselves();
    let program = std::env::current_exe().context("cannot find this program to start it in the background")?;
    let mut command = Command::new(program);
    let _settings = config::pass_on(&mut command)?;
    let mut child = command
        .args(config::given().iter().skip(1))
        .env(STARTED_BY, std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start in the background; try --foreground")?;
    let Some(stdout) = child.stdout.take() else {
        bail!("cannot read from the process in the background; try --foreground")
    };
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).context("cannot read from the process in the background")?;
    if line.starts_with("READY") {
        let _ = std::io::stdout().write_all(line.as_bytes());
        return Ok(ExitCode::SUCCESS);
    }
    child.wait().context("cannot wait for the background")?;
    Ok(ExitCode::FAILURE) // it has said why on standard error, which it shares
}

/// Gives a daemon in the background a session of its own when it serves, and not before. With
/// autofs, the kernel lets only the process group of the service manager access the place of a
/// mount that is being made; all other processes wait until it is mounted.
pub fn leave_session() {
    let _ = rustix::process::setsid();
}

/// Closes the caller's other open files (a lock, a pipe) at exec. They must not stay open while the
/// daemon runs.
fn keep_descriptors_to_ourselves() {
    // SAFETY: the call marks descriptors to be closed at exec; it closes none and touches no
    // memory.
    let _ = unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) };
}

/// Whether SIGHUP ends the daemon, because its terminal is gone. Otherwise SIGHUP makes it read the
/// configuration again.
pub fn hangup_ends(in_background: bool) -> bool {
    !in_background
        && (std::io::stdin().is_terminal() || std::io::stdout().is_terminal() || std::io::stderr().is_terminal())
}

/// Runs `stop` on the first signal, and ends at once on a second one. For SIGHUP see
/// [`hangup_ends`].
fn on_signals(
    mut signals: Signals,
    hangup_ends: bool,
    changeable: Changeable,
    stop: impl FnOnce() + Send + 'static,
) -> Result<()> {
    let watch = move || {
        let mut stop = Some(stop);
        for signal in signals.forever() {
            if signal == SIGHUP && !hangup_ends {
                config::reload(&changeable);
                continue;
            }
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("?");
            let Some(stop) = stop.take() else {
                tracing::warn!("{name} again: ending at once, whatever is in use");
                std::process::exit(exit::SIGNALLED + signal);
            };
            let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
            tracing::info!("stopping on {name}");
            stop();
        }
    };
    std::thread::Builder::new().name("puma-signals".into()).spawn(watch).context("cannot start a thread")?;
    Ok(())
}
