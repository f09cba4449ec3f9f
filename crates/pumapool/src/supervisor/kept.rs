//! The daemon's side of its keeper: what it has inherited, when it says what, and what it does when
//! it is told to stop.
//!
//! The control socket and the log are the keeper's, so they stay the same when a new daemon takes
//! over: who connects in between waits in the socket's queue, and is answered by the successor.

use crate::cli::exit;
use crate::config::{self, Changeable};
use crate::daemon;
use crate::daemon::control;
use crate::supervisor::keeper::{INHERITED, INHERITED_METRICS};
use anyhow::{Context, Result};
use mount::handover::channel::{Channel, Message};
use parking_lot::Mutex;
use rustix::fd::{FromRawFd, OwnedFd, RawFd};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

/// What a daemon has inherited.
pub struct Kept {
    /// To the keeper.
    pub channel: Arc<Channel>,
    /// Where it is asked for its metrics, if it is to be.
    pub metrics: Option<OwnedFd>,
    listener: UnixListener,
    log: Option<File>,
    keeper_pid: u32,
}

/// What stops the daemon, once.
type Stop = Box<dyn FnOnce() + Send>;

/// Asked to stop by two who do not know of each other: by signals of its own, and by the keeper,
/// which passes its own on. (A service manager signals both.) The first one ends it in order, the
/// second one of either ends it at once.
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

impl Kept {
    /// What the keeper has passed on. None: this process is not a keeper's daemon.
    pub fn inherited() -> Result<Option<Kept>> {
        let Ok(numbers) = std::env::var(INHERITED) else { return Ok(None) };
        // The keeper starts a program that it has open, by a path that ends in a number.
        let _ = rustix::thread::set_name(c"pumapool");
        let numbers: Vec<RawFd> = numbers
            .split(',')
            .map(str::parse)
            .collect::<Result<_, _>>()
            .context("what a keeper passes makes no sense")?;
        anyhow::ensure!(matches!(numbers.len(), 2 | 3), "what a keeper passes makes no sense");
        let own = |number| {
            // SAFETY: the keeper has left exactly these open for us, and nobody else in this
            // process knows them.
            let fd = unsafe { OwnedFd::from_raw_fd(number) };
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map(|()| fd)
        };
        let metrics = std::env::var(INHERITED_METRICS).ok().and_then(|number| number.parse().ok());
        let metrics = metrics.map(own).transpose().context("what a keeper passes is not open")?;
        let mut fds = numbers.into_iter().map(own);
        let mut next = || fds.next().transpose().context("what a keeper passes is not open");
        let (channel, listener, log) = (next()?, next()?, next()?);
        let keeper_pid = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get() as u32);
        let (Some(channel), Some(listener)) = (channel, listener) else { return Ok(None) };
        let log = log.map(File::from);
        log.iter().for_each(crate::daemon::log::to);
        let (channel, listener) = (Arc::new(Channel::new(channel)), UnixListener::from(listener));
        Ok(Some(Kept { channel, metrics, listener, log, keeper_pid }))
    }

    /// What is wrong with the keeper, if anything is: then nobody would take over.
    pub fn problem(keeper_pid: u32, channel: &Channel) -> Option<String> {
        if channel.is_lost() {
            return Some("the supervisor is gone: the mount dies with its daemon; mount again when you can".to_owned());
        }
        let is_stopped = os::process::is_stopped(keeper_pid);
        is_stopped
            .then(|| format!("the supervisor is stopped, and would start no other daemon: kill -CONT {keeper_pid}"))
    }

    /// The process that stands for the mount: the keeper, as long as it is there.
    pub fn pid(keeper_pid: u32, channel: &Channel) -> u32 {
        if channel.is_lost() { std::process::id() } else { keeper_pid }
    }

    /// The keeper.
    pub fn keeper_pid(&self) -> u32 {
        self.keeper_pid
    }

    /// The daemon serves: tells the keeper, answers who asks, stops when it is told to.
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
        // A keeper that is gone is no reason not to serve.
        let _ = self.channel.send(&Message::Ready(message.to_owned()));
        if let Some(log) = &self.log {
            rustix::stdio::dup2_stderr(log).context("cannot turn to the log")?;
            crate::daemon::log::turned();
            let _ = rustix::stdio::dup2_stdout(log);
            let _ = std::env::set_current_dir("/");
        }
        let channel = self.channel;
        spawn("puma-keeper", Box::new(move || listen(&channel, &stopping, &changeable)))
    }
}

/// Reads the configuration again, and tells the keeper the one that is in use then, good or as it
/// was before: a successor begins with it. This is also the answer that the keeper waits for.
fn reload(channel: &Channel, changeable: &Changeable) {
    config::reload(changeable);
    // The settings themselves: what is in the file may be another one by the time that the keeper
    // looks.
    match config::in_memory() {
        Ok(settings) => drop(channel.send(&Message::Configured(settings))),
        Err(error) => tracing::warn!("{error:#}: a daemon that takes over begins with the configuration of before"),
    }
}

/// Listens to the keeper until it is gone.
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
        tracing::warn!("the keeper of this mount is gone: the mount goes on, but dies with this daemon");
    }
}
