//! The supervisor: the process that `pumapool mount` leaves behind. Its child is the daemon that
//! serves the mount.
//!
//! The supervisor holds descriptors and waits. When its daemon dies, it starts another one and
//! passes all descriptors to it. The mount continues, and programs see only a pause. It has one
//! thread and one table, that of the descriptors (bounded by the limit of open files), and never
//! uses what it holds. Messages of a dead daemon are safe in the socket between them, so the
//! supervisor never answers.
//!
//! - If the daemon ends in order, the supervisor ends with the same exit code.
//! - If the daemon is killed or crashes, a successor takes over. After [`IDLE_DEATHS_MAX`]
//!   consecutive deaths without a request served, or [`CRASHES_MAX`] consecutive crashes soon after
//!   the start, the supervisor gives up the mount.
//! - If the daemon hands over (`pumapool upgrade`), the new program takes over. If that one fails
//!   to serve, the old program does.
//! - If the supervisor is killed, the daemon continues alone, and logs this.
//!
//! The supervisor must never wait for its daemon without checking for its end, and never hold a
//! mount that no daemon serves.

use crate::cli::exit::HANDED_OVER;
use crate::config;
use crate::daemon::{self, Log, confine, control::Control};
use crate::metrics::server::MetricsListener;
use crate::supervisor::fdstore::Store;
use anyhow::{Context, Result};
use mount::handover::channel::{Channel, Held, Message};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Environment variable with the descriptor of the metrics socket. It is separate from the others
/// ([`config::INHERITED`]), so that an older program still works.
pub const INHERITED_METRICS: &str = "PUMAPOOL_KEPT_METRICS";
/// The exit code of a Rust program whose main thread panicked.
const PANICKED: i32 = 101;
/// Number of consecutive deaths without a request served after which the mount is given up.
const IDLE_DEATHS_MAX: u32 = 5;
/// Number of consecutive crashes (not kills), each soon after the start, after which the mount is
/// given up. The same request might be the cause.
const CRASHES_MAX: u32 = 5;
/// A crash after a longer service does not count as one of the start.
const SOON: Duration = Duration::from_secs(10);
/// The pause before the second consecutive start; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Time limit for a new program to begin to serve.
const START_LIMIT: Duration = Duration::from_secs(10);

/// Time limit for the other threads of a daemon to end after its first thread. Then they are
/// examined. A thread that drops pages may wait in the kernel for the writeback of a page, and only
/// the successor can answer that.
const DYING_LIMIT: Duration = Duration::from_millis(500);
/// Limit on daemons in that state. Beyond it, the supervisor waits.
const DYING_MAX: usize = 8;
/// The kernel function in which a thread waits for the answer of a FUSE file system
/// (fs/fuse/dev.c).
const WAITS_FOR_FUSE: &str = "request_wait_answer";
/// Time between two checks for that state, which no event reports.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// How long further messages of a daemon are left in the socket after some were read. A wake for
/// each message would cost the daemon more than its request. There is room for some hundreds of
/// messages at least, and an end of the daemon is seen at once.
const LEAVE_UNREAD: Duration = Duration::from_millis(5);

/// Time between two messages that ask the daemon whether it is alive.
const ALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// Time limit for the answer. After it, the supervisor logs an error and does nothing else: the
/// daemon may hold locks of the backing directory, or may be stopped in a debugger.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// The state of the checks whether a daemon is alive.
#[derive(Default)]
struct Pulse {
    /// Time of the last question.
    asked: Option<Instant>,
    /// Time of the first unanswered question.
    unanswered: Option<Instant>,
    /// Whether it has ever answered: a daemon of an older version does not.
    answers: bool,
    /// Whether the missing answer was logged.
    is_silent: bool,
}

impl Pulse {
    /// Asks again when it is time, and logs that the daemon does not answer.
    fn look(&mut self, channel: &Channel, pid: u32) {
        if self.asked.is_none_or(|asked| asked.elapsed() >= ALIVE_INTERVAL) && self.unanswered.is_none() {
            let _ = channel.offer_alive();
            self.asked = Some(Instant::now());
            self.unanswered = self.asked;
        }
        let is_late = self.unanswered.is_some_and(|since| since.elapsed() >= SILENCE_MAX);
        if !is_late || self.is_silent {
            return;
        }
        let is_stopped = os::process::is_stopped(pid);
        if self.answers || is_stopped {
            self.is_silent = true;
            let why = match is_stopped {
                true => format!("it is stopped; kill -CONT {pid} lets it go on"),
                false => format!("it hangs; kill -KILL {pid} has another one take over"),
            };
            tracing::error!(
                "the daemon {pid} has not answered for {SILENCE_MAX:?}, and users of the mount wait: {why}"
            );
        }
    }

    /// Records an answer.
    fn beat(&mut self) {
        let since = self.unanswered.take();
        self.answers = true;
        if std::mem::take(&mut self.is_silent) {
            let seconds = since.map_or(0, |since| since.elapsed().as_secs());
            tracing::warn!("the daemon answers again, after {seconds} s");
        }
    }
}

/// How a daemon has ended.
enum End {
    /// In order.
    Ended(ExitCode),
    /// It was killed, crashed, or never began to serve.
    Died { status: ExitStatus, was_ready: bool },
    /// It could not be started.
    NotStarted { why: String },
    /// It left its mount to this program.
    HandedOver { upgrade: Upgrade },
}

/// The program that serves next.
enum Next {
    /// The program that served before.
    Same,
    /// A new program, on trial, with its path.
    Other(File, PathBuf),
}

/// The client that requested an upgrade.
struct Upgrade {
    program: PathBuf,
    /// The stream for the result.
    reply: Option<OwnedFd>,
    began: Instant,
}

struct Supervisor {
    held: BTreeMap<Held, OwnedFd>,
    store: Store,
    log: Option<Log>,
    control: Control,
    metrics: Option<MetricsListener>,
    signals: Vec<(i32, UnixStream)>,
    hangup_ends: bool,
    /// Whether the daemon must read the configuration again.
    wants_reload: bool,
    /// Whether it was told so and has not answered.
    is_reloading: bool,
    /// The working directory of the command, because its arguments may have relative paths. It was
    /// opened before the mount existed: its name may lead into the mount, which no daemon may be
    /// serving.
    folder: Option<OwnedFd>,
    was_ready: bool,
    /// Daemons that were killed, but have not ended yet.
    dying: Vec<Child>,
    /// The time since which no daemon serves the mount.
    gap: Option<(Instant, String)>,
    /// The client to notify when the mount is served again.
    reply: Option<Reply>,
}

/// Runs until the mount has ended. `held` are the descriptors that a previous supervisor has stored
/// in systemd.
pub fn run(
    log: Option<Log>,
    control: Control,
    metrics: Option<MetricsListener>,
    held: BTreeMap<Held, OwnedFd>,
) -> Result<ExitCode> {
    let mut signals = Vec::new();
    for signal in [SIGINT, SIGTERM, SIGQUIT, SIGHUP] {
        let (ours, theirs) = UnixStream::pair().context("cannot listen for signals")?;
        signal_hook::low_level::pipe::register(signal, theirs).context("cannot listen for signals")?;
        signals.push((signal, ours));
    }
    mount::raise_limits();
    confine::supervisor();
    let mut supervisor = Supervisor {
        store: Store::new(&held),
        held,
        hangup_ends: daemon::hangup_ends(log.is_some()),
        wants_reload: false,
        is_reloading: false,
        log,
        control,
        metrics,
        signals,
        folder: rustix::fs::open(".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).ok(),
        was_ready: false,
        dying: Vec::new(),
        gap: None,
        reply: None,
    };
    supervisor.supervise()
}

impl Supervisor {
    fn supervise(&mut self) -> Result<ExitCode> {
        let mut program = File::open("/proc/self/exe").context("cannot find this program to start the daemon")?;
        let mut next = Next::Same;
        let (mut idle_deaths, mut crashes) = (0, 0);
        loop {
            let began = Instant::now();
            let candidate = match std::mem::replace(&mut next, Next::Same) {
                Next::Same => None,
                Next::Other(file, path) => Some((file, path)),
            };
            let serves = candidate.as_ref().map_or(&program, |(file, _)| file);
            let end = match self.run_daemon(serves, candidate.is_some().then_some(START_LIMIT)) {
                Ok(end) => end,
                Err(error) if self.was_ready => End::NotStarted { why: format!("{error:#}") },
                Err(error) => return Err(error),
            };
            if let Some((file, path)) = candidate {
                let why = match &end {
                    End::Died { status, was_ready: false } => Some(status.to_string()),
                    End::NotStarted { why } => Some(why.clone()),
                    _ => None,
                };
                if let Some(why) = why {
                    self.refuse(format!("{} did not come to serve ({why})", path.display()));
                    continue;
                }
                program = file;
            }
            match end {
                End::Ended(code) => return Ok(self.ended(code)),
                End::HandedOver { upgrade } => {
                    let Upgrade { program, reply, began } = upgrade;
                    self.gap = Some((began, format!("upgrade to {}", program.display())));
                    self.reply = reply.map(|to| Reply { to, failed: None });
                    match File::open(&program) {
                        Ok(file) => next = Next::Other(file, program),
                        Err(error) => self.refuse(format!("{} cannot be opened: {error}", program.display())),
                    }
                }
                End::Died { status, was_ready } => {
                    if !self.was_ready {
                        anyhow::ensure!(status.code().is_some(), "the daemon died before it served ({status})");
                        return Ok(exit_code(status));
                    }
                    let has_served = was_ready && self.has_served();
                    idle_deaths = if has_served { 0 } else { idle_deaths + 1 };
                    let is_crash = status.signal() != Some(Signal::KILL.as_raw());
                    crashes = if is_crash && began.elapsed() < SOON { crashes + 1 } else { 0 };
                    let how = format!("the daemon died ({status})");
                    let in_a_row: u32 = idle_deaths.max(crashes);
                    if idle_deaths >= IDLE_DEATHS_MAX || crashes >= CRASHES_MAX {
                        return Ok(self.let_go(&format!("{how}, the {in_a_row}th in a row")));
                    }
                    self.gap.get_or_insert((Instant::now(), how));
                    if in_a_row > 1 && self.pause(FIRST_PAUSE * 2u32.pow(in_a_row - 2)) {
                        return Ok(self.let_go("it was told to stop"));
                    }
                }
                // Memory or processes may be short; a later attempt may succeed.
                End::NotStarted { why } => {
                    idle_deaths += 1;
                    if idle_deaths >= IDLE_DEATHS_MAX {
                        return Ok(self.let_go(&format!("{why}, the {idle_deaths}th time in a row")));
                    }
                    tracing::error!("{why}; the supervisor tries again");
                    self.gap.get_or_insert((Instant::now(), why));
                    if self.pause(FIRST_PAUSE * 2u32.pow(idle_deaths - 1)) {
                        return Ok(self.let_go("it was told to stop"));
                    }
                }
            }
        }
    }

    /// Handles a failed upgrade: the client gets the reason when the previous program serves again.
    fn refuse(&mut self, why: String) {
        tracing::error!("no upgrade: {why}; the program before it serves on");
        if let Some(reply) = &mut self.reply {
            reply.failed = Some(why);
        }
    }

    fn has_served(&self) -> bool {
        let state = self.held.get(&Held::State);
        state.and_then(|state| mount::handover::about(state).ok()).is_some_and(|about| about.has_served)
    }

    /// Waits for this time. Returns true early if a signal arrives.
    fn pause(&mut self, time: Duration) -> bool {
        let mut fds: Vec<_> = self.signals.iter().map(|(_, pipe)| PollFd::new(pipe, PollFlags::IN)).collect();
        let _ = poll(&mut fds, Some(&timespec(time)));
        self.take_signal().is_some()
    }

    /// Returns a signal to end. A signal to read the configuration again is recorded.
    fn take_signal(&mut self) -> Option<i32> {
        let has_come = |pipe: &UnixStream| {
            let mut poll_fd = [PollFd::new(pipe, PollFlags::IN)];
            matches!(poll(&mut poll_fd, Some(&timespec(Duration::ZERO))), Ok(1))
        };
        for (signal, mut pipe) in self.signals.iter().map(|(signal, pipe)| (*signal, pipe)) {
            if has_come(pipe) {
                let _ = pipe.read(&mut [0; 1]);
                if signal != SIGHUP || self.hangup_ends {
                    return Some(signal);
                }
                self.wants_reload = true;
            }
        }
        None
    }

    /// Gives up the mount, which no daemon serves any more.
    fn let_go(&mut self, why: &str) -> ExitCode {
        let about = self.held.get(&Held::State).and_then(|state| mount::handover::about(state).ok());
        let mountpoint = about.map(|about| about.mountpoint).unwrap_or_default();
        tracing::error!("{} is unmounted, because {why}; see the log, and mount it again", mountpoint.display());
        let _ = mount::detach(&mountpoint);
        self.store.close();
        self.held.clear();
        if let Some(log) = self.log.take() {
            log.keep();
        }
        ExitCode::FAILURE
    }

    fn ended(&mut self, code: ExitCode) -> ExitCode {
        // A daemon that never began to serve has changed nothing: the stored descriptors are for
        // the next attempt.
        if self.was_ready {
            self.store.close();
        }
        if let (true, Some(log)) = (code == ExitCode::SUCCESS, self.log.take()) {
            log.remove(); // It has ended well: what it logged is of no more interest.
        } else if let Some(log) = self.log.take() {
            log.keep();
        }
        code
    }

    /// Starts a daemon and waits for its end. With a `limit`, the daemon is killed if it does not
    /// serve by then.
    fn run_daemon(&mut self, program: &File, limit: Option<Duration>) -> Result<End> {
        let start = Instant::now();
        let (ours, theirs) = Channel::pair().context("cannot make a socket for the daemon")?;
        let mut child = self.spawn(program, &theirs)?;
        drop(theirs);
        let pid = Pid::from_child(&child);
        let end = pidfd_open(pid, PidfdFlags::empty());
        let given = self.held.iter().try_for_each(|(held, fd)| ours.hold(*held, fd.as_fd()));
        // If a descriptor cannot be sent, the daemon would wait for ever. (If the daemon has ended
        // already, this is detected later.)
        if given.and_then(|()| ours.send(&Message::AllSent)).is_err() || end.is_err() {
            let _ = child.kill();
        }
        let end = match end {
            Ok(end) => end,
            Err(errno) => {
                let _ = child.wait();
                return Err(errno).context("cannot watch the daemon");
            }
        };
        self.dying.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        let mut upgrade = None;
        let mut was_ready = false;
        let mut is_open = true;
        let mut unread_until = None;
        let mut pulse = Pulse::default();
        loop {
            if was_ready {
                pulse.look(&ours, child.id());
            }
            let unread = unread_until.map(|until: Instant| until.saturating_duration_since(Instant::now()));
            let unread = unread.filter(|left| !left.is_zero());
            let mut fds = vec![PollFd::new(&end, PollFlags::IN)];
            fds.extend(self.signals.iter().map(|(_, pipe)| PollFd::new(pipe, PollFlags::IN)));
            if is_open && unread.is_none() {
                fds.push(PollFd::from_borrowed_fd(ours.fd(), PollFlags::IN));
            }
            let left = limit.filter(|_| !was_ready).map(|limit| limit.saturating_sub(start.elapsed()));
            let look_in = [left, unread].into_iter().flatten().fold(LOOK_AGAIN, Duration::min);
            let ready = poll(&mut fds, Some(&timespec(look_in)));
            let has_ended = !fds[0].revents().is_empty()
                || ready == Ok(0) && unread.is_none() && os::process::is_dying(pid.as_raw_nonzero().get());
            // Any other thread that is left may still be writing below: the successor must not
            // begin before that is done.
            let is_gone = has_ended
                && loop {
                    if is_ready_within(end.as_fd(), DYING_LIMIT) {
                        break true;
                    }
                    if self.dying.len() < DYING_MAX && only_waiting_left(pid) {
                        break false;
                    }
                };
            if left.is_some_and(|left| left.is_zero()) {
                let _ = child.kill();
            }
            if ready.is_err() {
                continue; // A signal: its pipe can be read now.
            }
            if let Some(signal) = self.take_signal() {
                let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
                let _ = ours.send(&Message::Stop(signal));
                // A mount in use is detached, and served until the last file is closed. If the
                // daemon is killed before that, no successor is started.
                self.store.close();
            }
            if was_ready && upgrade.is_none() && std::mem::take(&mut self.wants_reload) {
                let _ = ours.send(&Message::Reload);
                self.is_reloading = true;
            }
            // After its end, all of its messages can be read, followed by the end of the stream.
            let reads = has_ended || unread.is_none();
            while is_open && reads && (is_gone || is_ready_within(ours.fd(), Duration::ZERO)) {
                unread_until = Some(Instant::now() + LEAVE_UNREAD);
                match ours.receive() {
                    Ok(Some(Message::Hold(held, fd))) => self.hold(held, fd),
                    Ok(Some(Message::Release(held))) => self.release(held),
                    Ok(Some(Message::Ready(text))) => {
                        was_ready = true;
                        self.daemon_ready(&text, child.id());
                    }
                    Ok(Some(Message::Configured(text))) => {
                        config::accept(&text.into());
                        self.is_reloading = false;
                    }
                    Ok(Some(Message::Upgrade(text, to))) => upgrade = Upgrade::parse(&text, to),
                    Ok(Some(Message::Alive)) => pulse.beat(),
                    Ok(Some(_)) => {}
                    Ok(None) => is_open = false,
                    Err(error) => tracing::warn!("{error}: it is lost if the daemon dies"),
                }
            }
            if has_ended {
                // Its successor answers the remaining requests.
                self.wants_reload |= std::mem::take(&mut self.is_reloading);
            }
            if has_ended && !is_gone {
                tracing::warn!(
                    "the daemon {} ends while the kernel drops pages: it is gone when they are written",
                    child.id()
                );
                self.dying.push(child);
                let killed = End::Died { status: ExitStatus::from_raw(Signal::KILL.as_raw()), was_ready };
                return Ok(upgrade.map_or(killed, |upgrade| End::HandedOver { upgrade }));
            }
            if has_ended {
                break;
            }
        }
        let status = child.wait().context("cannot wait for the daemon")?;
        Ok(match (status.code(), upgrade) {
            // Its message shows that it has left, however it ended.
            (code, Some(upgrade)) if code.is_none_or(|code| code == i32::from(HANDED_OVER)) => {
                End::HandedOver { upgrade }
            }
            (None | Some(PANICKED), _) => End::Died { status, was_ready },
            // It has left its mount, but the message with the new program is missing: the same
            // program continues.
            (Some(code), _) if code == i32::from(HANDED_OVER) => End::Died { status, was_ready },
            // A successor that reports why it cannot serve; the next one may succeed.
            (Some(_), _) if self.was_ready && !was_ready => End::Died { status, was_ready },
            (Some(_), _) => End::Ended(exit_code(status)),
        })
    }

    fn spawn(&self, program: &File, channel: &Channel) -> Result<Child> {
        let listener = self.control.listener();
        let mut inherited = vec![channel.fd(), listener];
        inherited.extend(self.log.as_ref().map(|log| log.file().as_fd()));
        let numbers: Vec<String> = inherited.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
        inherited.extend(self.metrics.as_ref().map(MetricsListener::as_fd));
        // This process has one thread, so no other program is started while these descriptors can
        // be inherited.
        for fd in &inherited {
            fcntl_setfd(fd, FdFlags::empty()).context("cannot pass a descriptor on")?;
        }
        let mut arguments = config::given().iter();
        let name = arguments.next().map_or("pumapool".as_ref(), |name| name.as_os_str());
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
        command.arg0(name).args(arguments).env(config::INHERITED, numbers.join(",")).stdin(Stdio::inherit());
        // The settings with which this process began, or that a daemon has found valid since; the
        // present file may be invalid. A program of an older revision reads the command line and
        // this text instead.
        command.envs(config::text().map(|text| (config::TEXT, text)));
        let _settings = config::pass_on(&mut command)?;
        for variable in [crate::daemon::STARTED_BY, "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"] {
            command.env_remove(variable);
        }
        match &self.metrics {
            Some(listener) => command.env(INHERITED_METRICS, listener.as_fd().as_raw_fd().to_string()),
            None => command.env_remove(INHERITED_METRICS),
        };
        if let Some(folder) = &self.folder {
            command.current_dir(format!("/proc/self/fd/{}", folder.as_raw_fd()));
        }
        // In the foreground the daemon gets a process group of its own, and this process passes on
        // signals of the terminal. In the background it leaves this process group when it serves.
        if self.log.is_none() {
            command.process_group(0);
        }
        let child = command.spawn().context("cannot start the daemon");
        for fd in &inherited {
            fcntl_setfd(fd, FdFlags::CLOEXEC).context("cannot keep a descriptor to ourselves")?;
        }
        child
    }

    fn hold(&mut self, held: Held, fd: OwnedFd) {
        self.store.add(held, fd.as_fd());
        self.held.insert(held, fd);
    }

    fn release(&mut self, held: Held) {
        if self.held.remove(&held).is_some() {
            self.store.remove(held);
        }
    }

    fn daemon_ready(&mut self, text: &str, pid: u32) {
        if let Some((since, how)) = self.gap.take() {
            let pause_ms = since.elapsed().as_millis() as u64;
            tracing::warn!("{how}: process {pid} has taken the mount over after {pause_ms} ms");
            if let Some(Reply { to, failed }) = self.reply.take() {
                let answer = match failed {
                    None => report::Reply::Done(report::Upgraded { pid, pause_ms }),
                    Some(why) => report::Reply::refused(why),
                };
                let mut to = UnixStream::from(to);
                let _ = to.write_all(&serde_json::to_vec(&answer).unwrap_or_default());
                let _ = to.shutdown(std::net::Shutdown::Both); // A duplicate of it may stay open.
            }
        }
        if std::mem::replace(&mut self.was_ready, true) {
            return;
        }
        if self.log.is_some() {
            daemon::leave_session();
        }
        let mut stdout = std::io::stdout();
        // The caller may be gone; the mount is served anyway.
        let _ = writeln!(stdout, "READY {text}").and_then(|()| stdout.flush());
        if let Some(log) = &self.log {
            let _ = rustix::stdio::dup2_stderr(log.file());
            crate::log::turned();
            let _ = rustix::stdio::dup2_stdout(log.file());
            let _ = std::env::set_current_dir("/");
        }
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    }
}

/// The client of an upgrade.
struct Reply {
    to: OwnedFd,
    /// The reason why the new program does not serve, if so.
    failed: Option<String>,
}

impl Upgrade {
    /// Parses the message of a daemon: how long ago it began to leave, in milliseconds, and the
    /// program.
    fn parse(text: &str, reply: Option<OwnedFd>) -> Option<Upgrade> {
        let (ago_ms, program) = text.split_once(' ')?;
        let began = Instant::now().checked_sub(Duration::from_millis(ago_ms.parse().ok()?))?;
        Some(Upgrade { program: Path::new(program).to_owned(), reply, began })
    }
}

/// Whether a descriptor is readable; for a process, whether it has ended.
fn is_ready_within(fd: BorrowedFd<'_>, limit: Duration) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&timespec(limit))), Ok(1))
}

/// Whether the remaining threads of a process, whose first thread has ended, are only such as may
/// wait for the mount itself, so for the successor, or for the disk. These are: the thread that
/// drops pages, threads that have a guest's image open, and a thread that closes files as it exits;
/// and the janitor, which has started writeback. None of them changes backing files.
fn only_waiting_left(process: Pid) -> bool {
    let first = process.as_raw_nonzero().to_string();
    let Ok(threads) = std::fs::read_dir(format!("/proc/{first}/task")) else { return false };
    threads.flatten().filter(|thread| thread.file_name() != first.as_str()).all(|thread| {
        let read = |name: &str| std::fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        let (name, wait) = (read("comm"), read("wchan"));
        [mount::NOTIFIER, mount::JANITOR].contains(&name.trim_end())
            || os::process::has_ended(&read("stat"))
            || name.starts_with(hostcache::host::THREADS) && wait == WAITS_FOR_FUSE
    })
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

fn exit_code(status: ExitStatus) -> ExitCode {
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}
