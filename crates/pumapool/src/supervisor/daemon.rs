//! The daemon's side of the supervision: its inherited descriptors, its messages to the supervisor,
//! and its reaction to a stop.
//!
//! The supervisor owns the control socket and the log, so they survive a takeover. A client that
//! connects in between waits in the socket's queue, and the successor answers it.

use crate::cli::exit;
use crate::config::{self, Changeable};
use crate::daemon;
use crate::daemon::control;
use crate::supervisor::process::INHERITED_METRICS;
use anyhow::{Context, Result};
use mount::handover::channel::{Channel, Message};
use parking_lot::Mutex;
use rustix::fd::{FromRawFd, OwnedFd, RawFd};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

/// The inherited descriptors of a daemon.
pub struct Supervised {
    /// The channel to the supervisor.
    pub channel: Arc<Channel>,
    /// The socket of its metrics page, if there is one.
    pub metrics: Option<OwnedFd>,
    listener: UnixListener,
    log: Option<File>,
    supervisor_pid: u32,
}

/// The function that stops the daemon, once.
type Stop = Box<dyn FnOnce() + Send>;

/// A daemon can be stopped by its own signals, and by its supervisor, which passes on the signals
/// that it gets. (A service manager sends them to both.) The first signal ends the daemon in order.
/// A second one from the same source ends it at once.
struct Stopping {
    stop: Mutex<Option<Stop>>,
}

impl Stopping {
    fn demand(&self, signal: i32, is_first: bool) {
        let name = signal_hook::low_level::signal_name(signal).unwrap_or("?");
        if !is_first {
            tracing::warn!("{name} again: ending at once, whatever is in use");
            std::process::exit(exit::SIGNALLED + signal);
        }
        if let Some(stop) = self.stop.lock().take() {
            tracing::info!("stopping on {name}");
            stop();
        }
    }
}

impl Supervised {
    /// The descriptors from the supervisor. `None` if this process was not started by a supervisor.
    pub fn inherited() -> Result<Option<Supervised>> {
        let Ok(numbers) = std::env::var(config::INHERITED) else { return Ok(None) };
        // The supervisor starts a program from a descriptor, by a path that ends in a number.
        let _ = rustix::thread::set_name(c"pumapool");
        let numbers: Vec<RawFd> = numbers
            .split(',')
            .map(str::parse)
            .collect::<Result<_, _>>()
            .context("cannot parse the list of descriptors from the supervisor")?;
        anyhow::ensure!(
            matches!(numbers.len(), 2 | 3),
            "the list of descriptors from the supervisor has a wrong length"
        );
        let own = |number| {
            // SAFETY: the supervisor has left exactly these open for this process, and nothing else
            // in it uses them.
            let fd = unsafe { OwnedFd::from_raw_fd(number) };
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map(|()| fd)
        };
        let metrics = std::env::var(INHERITED_METRICS).ok().and_then(|number| number.parse().ok());
        let metrics = metrics.map(own).transpose().context("a descriptor from the supervisor is not open")?;
        let mut fds = numbers.into_iter().map(own);
        let mut next = || fds.next().transpose().context("a descriptor from the supervisor is not open");
        let (channel, listener, log) = (next()?, next()?, next()?);
        let supervisor_pid = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get() as u32);
        let (Some(channel), Some(listener)) = (channel, listener) else { return Ok(None) };
        let log = log.map(File::from);
        log.iter().for_each(crate::log::to);
        let (channel, listener) = (Arc::new(Channel::new(channel)), UnixListener::from(listener));
        Ok(Some(Supervised { channel, metrics, listener, log, supervisor_pid }))
    }

    /// The problem with the supervisor, if there is one. Then no daemon would take over.
    pub fn problem(supervisor_pid: u32, channel: &Channel) -> Option<String> {
        if channel.is_lost() {
            return Some("the supervisor is gone: the mount dies with its daemon; mount again when you can".to_owned());
        }
        let is_stopped = os::process::is_stopped(supervisor_pid);
        is_stopped
            .then(|| format!("the supervisor is stopped, and would start no other daemon: kill -CONT {supervisor_pid}"))
    }

    /// The process that represents the mount: the supervisor while it runs, otherwise the daemon.
    pub fn pid(supervisor_pid: u32, channel: &Channel) -> u32 {
        if channel.is_lost() { std::process::id() } else { supervisor_pid }
    }

    /// The process id of the supervisor.
    pub fn supervisor_pid(&self) -> u32 {
        self.supervisor_pid
    }

    /// Begins to serve: notifies the supervisor, answers clients of the control socket, and stops
    /// on request.
    pub fn serve(
        self,
        message: &str,
        status: impl Fn() -> report::Daemon + Send + Sync + 'static,
        command: impl Fn(&str, UnixStream) + Send + 'static,
        changeable: Changeable,
        stop: impl FnOnce() + Send + 'static,
    ) -> Result<()> {
        let stopping = Arc::new(Stopping { stop: Mutex::new(Some(Box::new(stop))) });
        let changeable = Arc::new(changeable);
        let hangup_ends = daemon::hangup_ends(self.log.is_some());
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGQUIT, SIGHUP]).context("cannot listen for signals")?;
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(work).map(drop).context("cannot start a thread")
        };
        let by_signal = (stopping.clone(), changeable.clone(), self.channel.clone());
        spawn(
            "puma-signals",
            Box::new(move || {
                let mut is_first = true;
                let (stopping, changeable, channel) = by_signal;
                for signal in signals.forever() {
                    match signal {
                        SIGHUP if !hangup_ends => reload(&channel, &changeable),
                        signal => stopping.demand(signal, std::mem::replace(&mut is_first, false)),
                    }
                }
            }),
        )?;
        control::serve_on(self.listener, status, command)?;
        if self.log.is_some() {
            daemon::leave_session();
        }
        // The daemon serves even if the supervisor is gone.
        let _ = self.channel.send(&Message::Ready(message.to_owned()));
        if let Some(log) = &self.log {
            rustix::stdio::dup2_stderr(log).context("cannot switch to the log")?;
            crate::log::turned();
            let _ = rustix::stdio::dup2_stdout(log);
            let _ = std::env::set_current_dir("/");
        }
        let channel = self.channel;
        spawn("puma-supervisor", Box::new(move || listen(&channel, &stopping, &changeable)))
    }
}

/// Reads the configuration again, and sends the settings in use to the supervisor, changed or not.
/// A successor begins with them. The supervisor waits for this answer.
fn reload(channel: &Channel, changeable: &Changeable) {
    config::reload(changeable);
    // Send the settings themselves, because the file may change before the supervisor reads it.
    match config::in_memory() {
        Ok(settings) => drop(channel.send(&Message::Configured(settings))),
        Err(error) => tracing::warn!("{error:#}: a daemon that takes over begins with the previous configuration"),
    }
}

/// Receives messages of the supervisor until it is gone.
fn listen(channel: &Channel, stopping: &Stopping, changeable: &Changeable) {
    let mut is_first = true;
    loop {
        match channel.receive() {
            Ok(Some(Message::Stop(signal))) => stopping.demand(signal, std::mem::replace(&mut is_first, false)),
            Ok(Some(Message::Reload)) => reload(channel, changeable),
            Ok(Some(Message::Alive)) => drop(channel.offer_alive()),
            Ok(Some(_)) | Err(_) => {}
            Ok(None) => break,
        }
    }
    if channel.lose() {
        tracing::warn!("the supervisor of this mount is gone: the mount continues, but dies with this daemon");
    }
}
