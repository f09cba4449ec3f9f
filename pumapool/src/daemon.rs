//! What the daemons have in common: the way into the background, readiness, and the signals that end them.
//!
//! Without `--foreground` the command starts itself again as a session of its own and waits until that one says READY on its
//! standard output, or fails; so the caller gets the error, and goes on only when the daemon serves.

use crate::control;
use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

/// Options of every daemon.
#[derive(clap::Args, Clone)]
#[group(id = "daemon")]
pub struct Options {
    /// Stay in the foreground and log to standard error.
    #[arg(long)]
    pub foreground: bool,

    /// In the background, log to this file [default: next to the daemon's socket].
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// The process is the one in the background.
    #[arg(long, hide = true)]
    detached: bool,
}

impl Options {
    /// Where the process is to go on: here, or (Some) it has been started in the background and this one is to end.
    pub fn detach(&self) -> Result<Option<ExitCode>> {
        if self.detached {
            let _ = rustix::process::setsid();
            return Ok(None);
        }
        if self.foreground {
            return Ok(None);
        }
        let program = std::env::current_exe().context("cannot find this program to start it in the background")?;
        let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        arguments.push("--detached".into());
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start in the background; try --foreground")?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).context("cannot hear from the background")?;
        }
        if line.starts_with("READY") {
            print!("{line}");
            return Ok(Some(ExitCode::SUCCESS));
        }
        child.wait().context("cannot wait for the background")?;
        Ok(Some(ExitCode::FAILURE)) // it has said why on standard error, which it shares
    }

    /// Tells everybody who waits that the daemon serves: the caller by a line, systemd by its socket.
    pub fn ready(&self, kind: &str, message: &str) -> Result<()> {
        // The caller may have gone away; that is no reason to stop serving.
        let mut stdout = std::io::stdout();
        let _ = writeln!(stdout, "READY {message}").and_then(|()| stdout.flush());
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        if self.detached {
            let path = match &self.log_file {
                Some(path) => path.clone(),
                None => control::make_folder()?.join(format!("{kind}-{}.log", std::process::id())),
            };
            let log = OpenOptions::new()
                .create(true)
                .append(true)
                .open(&path)
                .with_context(|| format!("cannot write the log {}", path.display()))?;
            rustix::stdio::dup2_stderr(&log)?;
            rustix::stdio::dup2_stdout(&log)?;
            let _ = std::env::set_current_dir("/");
        }
        Ok(())
    }
}

/// Runs `stop` once, on the first SIGINT or SIGTERM.
pub fn on_signal(stop: impl FnOnce() + Send + 'static) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen for signals")?;
    std::thread::Builder::new().name("puma-signals".into()).spawn(move || {
        if let Some(signal) = signals.forever().next() {
            tracing::info!(signal = signal_hook::low_level::signal_name(signal).unwrap_or("?"), "stopping");
            let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
            stop();
        }
    })?;
    Ok(())
}
