//! The mounts of a node that has joined a pool. The node starts them before anything else, tells
//! them whether to borrow, and asks for their evictions.
//!
//! Each is a mount as by `pumapool mount`, with a supervisor and a daemon, in the background. It
//! survives its own daemon and this process. The node adopts a mount that a previous node has left.
//!
//! A mount must never count as not borrowing before it has confirmed this.

use crate::cli::join::Wanted;
use crate::cli::mount;
use crate::commands::umount;
use crate::config;
use crate::daemon::control;
use anyhow::{Context, Result, bail};
use report::{Borrowing, Listed, NodeMount, NodeMountState, Reply};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The command to a mount to put evicted pages at lenders.
pub const BORROW: &str = "borrow on";
/// The command to a mount to put no pages.
pub const BORROW_NOT: &str = "borrow off";

/// Time limit for the answer of a mount. During a takeover an answer takes longer; then the mount
/// is asked again.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// Time limit for a mount to end, in seconds. Then the node ends without waiting for it.
const END_LIMIT_SECONDS: i64 = 10;

/// A mount of the node.
struct Joined {
    mountpoint: PathBuf,
    socket: PathBuf,
    supervisor: OwnedFd,
    /// Whether this process has started it, rather than found it.
    started: bool,
    /// Whether it borrows, by its last answer. `None` if it does not answer.
    borrowing: Option<bool>,
    /// Whether it has confirmed that it puts nothing, and nothing else since. A daemon that takes
    /// over a mount of this process puts nothing, either, until it is told to. For other mounts
    /// this is unknown, so they must have confirmed it in the last round.
    puts_nothing: bool,
    /// Evictions that its daemon has seen. `None` if the daemon cannot see them.
    evictions: Option<u64>,
    gone: bool,
}

/// All mounts of the node. Those that this process has started end when this is dropped.
pub struct Mounts {
    list: Vec<Joined>,
    evicted_pages: u64,
}

impl Mounts {
    /// Makes the mounts, none of them borrowing, and waits until they are served. Must be called
    /// while this process may start programs.
    ///
    /// # Errors
    /// Fails if a mount fails; then those that were started end.
    pub fn start(wanted: &[Wanted], log: &str, options: &dyn Fn(&Wanted) -> mount::Options) -> Result<Mounts> {
        let mut mounts = Mounts { list: Vec::new(), evicted_pages: 0 };
        for one in wanted {
            let place = one.mountpoint.as_ref().unwrap_or(&one.source);
            let found = match umount::find(place) {
                Ok((place, None)) => bail!(
                    "{} is mounted already, and its daemon does not answer: unmount it with `pumapool umount`",
                    place.display()
                ),
                Ok((place, Some(status))) => {
                    let source = one.source.canonicalize().unwrap_or_else(|_| one.source.clone());
                    let found = &status.status.source;
                    if Path::new(found) != source {
                        bail!(
                            "{} is mounted already, and shows {found}, not {}: unmount it with `pumapool umount`",
                            place.display(),
                            source.display()
                        );
                    }
                    tracing::info!("{} is already mounted: using this mount as it is", place.display());
                    (place, status, false)
                }
                Err(_) => {
                    start_mount(one, log, options(one))?;
                    match umount::find(place)? {
                        (place, Some(status)) => (place, status, true),
                        (place, None) => bail!("the daemon of {} does not answer", place.display()),
                    }
                }
            };
            mounts.list.push(Joined::new(found)?);
        }
        Ok(mounts)
    }

    /// Tells all mounts whether to borrow, and reads their evictions.
    pub fn tell(&mut self, borrow: bool) {
        for one in self.list.iter_mut().filter(|one| !one.gone) {
            self.evicted_pages += one.tell(borrow);
        }
    }

    /// Pages that they have evicted since this process began.
    pub fn evicted_pages(&self) -> u64 {
        self.evicted_pages
    }

    /// Whether each mount has confirmed that it does not borrow and has no page in transit to a
    /// lender, or is gone.
    pub fn none_borrows(&self) -> bool {
        self.list.iter().all(|one| one.gone || one.puts_nothing)
    }

    /// Whether any mount sees its evictions.
    pub fn see_evictions(&self) -> bool {
        self.list.iter().any(|one| !one.gone && one.evictions.is_some())
    }

    /// The mounts, for the status.
    pub fn status(&self) -> Vec<NodeMount> {
        let one = |one: &Joined| NodeMount {
            mountpoint: one.mountpoint.to_string_lossy().into_owned(),
            state: match one.borrowing {
                _ if one.gone => NodeMountState::Gone,
                None => NodeMountState::DoesNotAnswer,
                Some(true) => NodeMountState::Borrows,
                Some(false) => NodeMountState::DoesNotBorrow,
            },
            sees_evictions: one.evictions.is_some(),
        };
        self.list.iter().map(one).collect()
    }

    /// Ends all mounts, also those that were found.
    pub fn stop(&mut self) {
        end(std::mem::take(&mut self.list));
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        let mut list = std::mem::take(&mut self.list);
        list.retain(|one| one.started);
        end(list);
    }
}

fn end(mut list: Vec<Joined>) {
    list.retain(|one| !one.gone);
    for one in &list {
        // The process may have ended.
        let _ = pidfd_send_signal(&one.supervisor, Signal::TERM);
    }
    for one in list.iter().filter(|one| !one.has_ended(END_LIMIT_SECONDS)) {
        tracing::warn!("{} is in use: it ends when the last file is closed", one.mountpoint.display());
    }
}

impl Joined {
    fn new((mountpoint, status, started): (PathBuf, Listed<report::Mount>, bool)) -> Result<Joined> {
        let socket = status.socket.into();
        let pid = i32::try_from(status.status.pid).ok().and_then(Pid::from_raw);
        let pid = pid.with_context(|| format!("the daemon of {} does not tell its process", mountpoint.display()))?;
        let supervisor = pidfd_open(pid, PidfdFlags::empty())
            .with_context(|| format!("cannot watch the daemon of {}", mountpoint.display()))?;
        let (borrowing, evictions) = (None, None);
        Ok(Joined { mountpoint, socket, supervisor, started, borrowing, puts_nothing: false, evictions, gone: false })
    }

    /// Returns the pages that were evicted since it was last asked.
    fn tell(&mut self, borrow: bool) -> u64 {
        let wanted = if borrow { BORROW } else { BORROW_NOT };
        self.puts_nothing &= !borrow && self.started;
        let reply = control::request::<Reply<Borrowing>>(&self.socket, wanted, ANSWER_LIMIT).ok();
        let answer = reply.and_then(|reply| reply.done().ok());
        let was_borrowing = std::mem::replace(&mut self.borrowing, answer.map(|answer| answer.borrowing));
        let Some(answer) = answer else {
            // A daemon whose supervisor was killed continues to serve.
            self.gone = self.has_ended(0) && !control::is_served(&self.socket);
            if self.gone {
                tracing::warn!("{} is no longer mounted; the node goes on without it", self.mountpoint.display());
            } else if was_borrowing.is_some() {
                tracing::warn!("the daemon of {} does not answer", self.mountpoint.display());
            }
            return 0;
        };
        self.puts_nothing |= !answer.borrowing && answer.puts_under_way == 0;
        let before = std::mem::replace(&mut self.evictions, answer.evictions);
        match (before, self.evictions) {
            (Some(before), Some(now)) if now >= before => now - before,
            // A new daemon counts from 0.
            (Some(_), Some(now)) => now,
            _ => 0,
        }
    }

    fn has_ended(&self, limit_seconds: i64) -> bool {
        let limit = Timespec { tv_sec: limit_seconds, tv_nsec: 0 };
        matches!(poll(&mut [PollFd::new(&self.supervisor, PollFlags::IN)], Some(&limit)), Ok(1))
    }
}

/// Mounts, and waits until it is served. The started command prints its own errors.
fn start_mount(wanted: &Wanted, log: &str, options: mount::Options) -> Result<()> {
    let program = std::env::current_exe().context("cannot find this program to mount with")?;
    let mut command = Command::new(program);
    // These arguments are for the list of processes; the options are passed separately.
    let source = [OsString::from("mount"), wanted.source.clone().into()];
    let shown: Vec<OsString> = source.into_iter().chain(wanted.mountpoint.clone().map(OsString::from)).collect();
    let given = [OsString::from("pumapool")].into_iter().chain(shown.iter().cloned()).collect();
    let _settings = config::pass(log, ("mount", options), given, &mut command)?;
    command.args(shown);
    for variable in [crate::daemon::STARTED_BY, "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"] {
        command.env_remove(variable);
    }
    let ended = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    let ended = ended.with_context(|| format!("cannot start the mount of {}", wanted.source.display()))?;
    anyhow::ensure!(ended.success(), "cannot mount {}: see the line above", wanted.source.display());
    Ok(())
}
