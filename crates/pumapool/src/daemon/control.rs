//! How commands find the daemons of this machine. Each daemon has a Unix socket in one directory,
//! and answers a connection with its status as one JSON object. A client sends one line with a
//! command, or nothing for the status, and then closes that direction.

use anyhow::{Context, Result};
use parking_lot::{Condvar, Mutex};
use report::{Daemon, Silent, Status};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Time limit for the statuses of all daemons together.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for repeated requests by clients that somebody waits for: Prometheus waits for 10 s.
pub const LOOK_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a daemon waits for a command. A client that sends nothing gets the status.
const QUESTION_TIMEOUT: Duration = Duration::from_millis(200);

/// Limit on a command, in bytes.
const QUESTION_BYTES_MAX: usize = 8192;

/// Limit on clients that are answered concurrently; more wait.
const CLIENTS_MAX: usize = 16;

/// Limit on a status, in bytes.
const STATUS_BYTES_MAX: u64 = 4 << 20;

/// How long the log of a daemon that has ended is kept after its last line, for troubleshooting.
const OLD_LOG: Duration = Duration::from_secs(24 * 3600);

/// The folder: root's daemons are in `/run`, a user's in that user's runtime folder. Root of a user
/// namespace is a user, where `/run` is another's.
pub fn folder() -> PathBuf {
    let uid = rustix::process::geteuid();
    if uid.is_root() && fs::metadata("/run").is_ok_and(|run| run.uid() == uid.as_raw()) {
        return "/run/pumapool".into();
    }
    // Empty, it counts as unset (XDG Base Directory Specification), and so does a relative path.
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|runtime| Path::new(runtime).is_absolute()) {
        Some(runtime) => Path::new(&runtime).join("pumapool"),
        None => std::env::temp_dir().join(format!("pumapool-{}", uid.as_raw())),
    }
}

/// Makes the folder if need be, for its owner only.
pub fn make_folder() -> Result<PathBuf> {
    let folder = folder();
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    let found = fs::symlink_metadata(&folder).with_context(|| format!("cannot look at {}", folder.display()))?;
    anyhow::ensure!(
        found.is_dir() && found.uid() == rustix::process::geteuid().as_raw(),
        "{} belongs to somebody else; remove it or set XDG_RUNTIME_DIR",
        folder.display()
    );
    Ok(folder)
}

/// The socket of a daemon before it serves.
pub struct Control {
    listener: UnixListener,
    path: RemovedOnDrop,
}

/// The socket of a running daemon; removed when dropped.
pub struct Serving {
    _path: RemovedOnDrop,
}

/// A file that is removed when this is dropped.
pub struct RemovedOnDrop(pub PathBuf);

impl RemovedOnDrop {
    /// Keeps the file.
    pub fn keep(mut self) {
        self.0 = PathBuf::new();
    }
}

impl Drop for RemovedOnDrop {
    fn drop(&mut self) {
        if !self.0.as_os_str().is_empty() {
            let _ = fs::remove_file(&self.0);
        }
    }
}

impl Control {
    /// Takes the socket of this process.
    pub fn bind(kind: &str) -> Result<Control> {
        Control::bind_at(make_folder()?.join(format!("{kind}-{}.sock", std::process::id())))
    }

    /// Listens under another name first. A socket that is bound and does not listen yet looks like
    /// one that a dead daemon has left: whoever asks for the statuses at that moment removes it.
    fn bind_at(path: PathBuf) -> Result<Control> {
        let new = path.with_extension("new");
        let _ = fs::remove_file(&new);
        let listener = UnixListener::bind(&new).with_context(|| format!("cannot listen on {}", new.display()))?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o600))
            .with_context(|| format!("cannot protect {}", new.display()))?;
        fs::rename(&new, &path).with_context(|| format!("cannot rename {}", new.display()))?;
        Ok(Control { listener, path: RemovedOnDrop(path) })
    }

    /// Serves this socket with [`serve_on`].
    pub fn serve<S: Serialize>(
        self,
        status: impl Fn() -> S + Send + Sync + 'static,
        command: impl Fn(&str, UnixStream) + Send + 'static,
    ) -> Result<Serving> {
        let Control { listener, path } = self;
        serve_on(listener, status, command)?;
        Ok(Serving { _path: path })
    }

    /// Gives the socket to another process to serve it.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Answers connections with the result of `status`, from threads of its own, while the process
/// runs. Commands go to `command`, which answers on the stream; only one command runs at a time.
pub fn serve_on<S: Serialize>(
    listener: UnixListener,
    status: impl Fn() -> S + Send + Sync + 'static,
    command: impl Fn(&str, UnixStream) + Send + 'static,
) -> Result<()> {
    let (status, command) = (Arc::new(status), Arc::new(Mutex::new(command)));
    let places = Arc::new(Places::default());
    std::thread::Builder::new().name("puma-control".into()).spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                std::thread::sleep(Duration::from_millis(100)); // out of descriptors: do not spin
                continue;
            };
            let place = Places::take(&places);
            let (status, command) = (status.clone(), command.clone());
            let serve = move || {
                let _place = place;
                match question(&stream).trim_end() {
                    "" => answer(stream, &status()),
                    wanted => command.lock()(wanted, stream),
                }
            };
            // Without a thread it gets no answer, and says so.
            let _ = std::thread::Builder::new().name("puma-answer".into()).spawn(serve);
        }
    })?;
    Ok(())
}

/// Clients that are being answered.
#[derive(Default)]
struct Places {
    taken: Mutex<usize>,
    left: Condvar,
}

/// One of them, until it is dropped.
struct Place(Arc<Places>);

impl Places {
    /// Waits until there is one.
    fn take(places: &Arc<Places>) -> Place {
        let mut taken = places.taken.lock();
        places.left.wait_while(&mut taken, |taken| *taken >= CLIENTS_MAX);
        *taken += 1;
        Place(places.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.taken.lock() -= 1;
        self.0.left.notify_one();
    }
}

/// Reads the command, as far as it arrives in time.
fn question(stream: &UnixStream) -> String {
    let until = Instant::now() + QUESTION_TIMEOUT;
    let (mut bytes, mut piece) = (Vec::new(), [0; 1024]);
    while bytes.len() < QUESTION_BYTES_MAX {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
            break;
        }
        match (&mut &*stream).read(&mut piece) {
            Ok(len) if len > 0 => bytes.extend_from_slice(&piece[..len]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            _ => break,
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Sends an answer, as far as the client reads it in time. The client may be gone.
pub fn answer(mut stream: UnixStream, answer: &impl Serialize) {
    let until = Instant::now() + ANSWER_TIMEOUT;
    let Ok(answer) = serde_json::to_vec(answer) else { return };
    let mut bytes = &answer[..];
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || stream.set_write_timeout(Some(left)).is_err() {
            return;
        }
        match stream.write(bytes) {
            Ok(len) if len > 0 => bytes = &bytes[len..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}

/// The status of every daemon that can be reached. Removes files of daemons that have ended:
/// sockets without a listener, and logs that are untouched for [`OLD_LOG`].
pub fn ask_all() -> Vec<Status> {
    ask_those("", ANSWER_TIMEOUT)
}

/// The status of every daemon that can be reached, as from [`ask_all`], and the daemons that do not
/// answer.
pub fn ask_all_and_silent() -> (Vec<Status>, Vec<Silent>) {
    ask_daemons("", ANSWER_TIMEOUT)
}

/// The description of a daemon that does not answer at its socket.
fn silent_at(path: &Path) -> Option<Silent> {
    let pid = named_after(path)?.1;
    // Of a mount a child of that process serves.
    let mut all = [pid].into_iter().chain(os::process::children(pid));
    let reason = match all.rfind(|pid| os::process::is_stopped(*pid)) {
        Some(stopped) => format!("process {stopped} is stopped: kill -CONT {stopped} lets it go on"),
        None => "it is busy, or hangs: see its log".to_owned(),
    };
    silent_for(path, reason)
}

fn silent_for(path: &Path, reason: String) -> Option<Silent> {
    let (kind, pid) = named_after(path)?;
    Some(Silent { kind: kind.to_owned(), pid, socket: path.to_string_lossy().into_owned(), reason })
}

/// The kind and the process that a socket is named after.
fn named_after(path: &Path) -> Option<(&str, u32)> {
    let (kind, pid) = path.file_stem()?.to_str()?.rsplit_once('-')?;
    Some((kind, pid.parse().ok()?))
}

/// The status of every daemon that answers within [`LOOK_TIMEOUT`].
pub fn look_at_all() -> Vec<Status> {
    ask_those("", LOOK_TIMEOUT)
}

/// Of the daemons of one kind. Others, which may be about to begin and not answer yet, are not
/// waited for.
pub fn ask_kind(kind: &str) -> Vec<Status> {
    ask_those(&format!("{kind}-"), ANSWER_TIMEOUT)
}

fn ask_those(prefix: &str, limit: Duration) -> Vec<Status> {
    let (answers, silent) = ask_daemons(prefix, limit);
    for Silent { socket, reason, .. } in silent {
        tracing::warn!("the daemon behind {socket} does not answer: {reason}");
    }
    answers
}

fn ask_daemons(prefix: &str, limit: Duration) -> (Vec<Status>, Vec<Silent>) {
    let folder = folder();
    // Anybody may make a folder of that name in a shared place before us: what is not ours is not
    // looked into.
    let ours = fs::symlink_metadata(&folder)
        .is_ok_and(|found| found.is_dir() && found.uid() == rustix::process::geteuid().as_raw());
    let (true, Ok(entries)) = (ours, fs::read_dir(folder)) else { return Default::default() };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    remove_old_logs(&paths, SystemTime::now());
    // The caller may be a daemon that is about to begin, and does not answer yet.
    let own = format!("-{}.sock", std::process::id());
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "sock"));
    paths.retain(|path| {
        path.file_name().is_some_and(|name| {
            let name = name.to_string_lossy();
            name.starts_with(prefix) && !name.ends_with(&own)
        })
    });
    paths.sort();
    // All at once, so that one that is stuck costs nobody the others' answers.
    let mut silent = Vec::new();
    let mut all: Vec<Asked> = paths.into_iter().filter_map(|path| Asked::begin(path, &mut silent)).collect();
    let begun = Instant::now();
    loop {
        let mut waiting: Vec<&mut Asked> = all.iter_mut().filter(|one| !one.is_done).collect();
        let left = limit.saturating_sub(begun.elapsed());
        if waiting.is_empty() || left.is_zero() {
            break;
        }
        let mut fds: Vec<PollFd> = waiting.iter().map(|one| PollFd::new(&one.stream, PollFlags::IN)).collect();
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        // A signal that comes in between is no trouble.
        let _ = poll(&mut fds, Some(&left));
        let has_come: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        waiting.iter_mut().zip(has_come).filter(|(_, has_come)| *has_come).for_each(|(one, _)| one.read());
    }
    let late = all.iter().filter(|one| !one.is_done).filter_map(|one| silent_at(&one.path));
    silent.extend(late);
    let mut statuses = Vec::new();
    for one in all.into_iter().filter(|one| one.is_done) {
        match serde_json::from_slice::<Daemon>(&one.text) {
            Ok(daemon) => statuses.push(Status { socket: one.path.to_string_lossy().into_owned(), daemon }),
            // It has ended meanwhile.
            Err(_) if one.text.is_empty() => {}
            Err(error) => silent.extend(silent_for(&one.path, makes_no_sense(&error))),
        }
    }
    (statuses, silent)
}

/// Removes logs of daemons without a socket, by their names. A log with a time in the future stays.
fn remove_old_logs(paths: &[PathBuf], now: SystemTime) {
    let is_daemons = |path: &Path| {
        let pid = path.file_stem().and_then(|name| name.to_str()?.rsplit_once('-'));
        pid.is_some_and(|(_, pid)| pid.parse::<u32>().is_ok())
    };
    let is_old = |path: &Path| {
        let written = fs::symlink_metadata(path).and_then(|found| found.modified());
        written.is_ok_and(|written| now.duration_since(written).is_ok_and(|ago| ago >= OLD_LOG))
    };
    let logs = paths.iter().filter(|path| path.extension().is_some_and(|extension| extension == "log"));
    for log in logs.filter(|log| is_daemons(log) && !paths.contains(&log.with_extension("sock")) && is_old(log)) {
        let _ = fs::remove_file(log);
    }
}

/// A daemon that is asked for its status.
struct Asked {
    path: PathBuf,
    stream: UnixStream,
    text: Vec<u8>,
    /// It has said all that it has to say.
    is_done: bool,
}

impl Asked {
    /// None: nobody is there.
    fn begin(path: PathBuf, silent: &mut Vec<Silent>) -> Option<Asked> {
        let stream = match reach(&path) {
            Ok(stream) => stream,
            Err(Errno::CONNREFUSED) => {
                let _ = fs::remove_file(&path);
                return None;
            }
            Err(Errno::AGAIN) => {
                silent.extend(silent_at(&path));
                return None;
            }
            Err(_) => return None,
        };
        let _ = stream.shutdown(std::net::Shutdown::Write); // Nothing but the status.
        Some(Asked { path, stream, text: Vec::new(), is_done: false })
    }

    /// Reads what there is.
    fn read(&mut self) {
        let left = STATUS_BYTES_MAX - self.text.len() as u64;
        match (&self.stream).take(left).read_to_end(&mut self.text) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            _ => self.is_done = true,
        }
    }
}

/// Connects to a daemon without waiting, for nothing either that is done with the stream: where
/// many have asked and nobody answers, the socket's queue is full (EAGAIN).
fn reach(path: &Path) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

/// Whether a process listens at a socket, be it one that does not answer.
pub fn is_served(path: &Path) -> bool {
    matches!(reach(path), Ok(_) | Err(Errno::AGAIN))
}

/// An answer that is no status, or not the answer to a command.
fn makes_no_sense(error: &serde_json::Error) -> String {
    format!("its answer makes no sense ({error}): is it of another version? Use the program that it runs")
}

/// Sends a command to the daemon behind a socket, and waits for the answer.
///
/// # Errors
/// Fails if the daemon cannot be reached, does not answer in time, or sends another kind of answer.
pub fn request<T: DeserializeOwned>(path: &Path, wanted: &str, limit: Duration) -> Result<T> {
    /// A status has a kind, and answers to commands have none.
    #[derive(serde::Deserialize)]
    struct Answer {
        kind: Option<String>,
    }
    let mut stream = reach(path).with_context(|| format!("cannot reach {}", path.display()))?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    writeln!(stream, "{wanted}").context("cannot ask the daemon")?;
    stream.shutdown(std::net::Shutdown::Write).context("cannot ask the daemon")?;
    let mut text = String::new();
    stream.take(STATUS_BYTES_MAX).read_to_string(&mut text).context("the daemon does not answer")?;
    anyhow::ensure!(!text.is_empty(), "the daemon has ended without an answer; see `pumapool status`, and its log");
    if serde_json::from_str::<Answer>(&text).is_ok_and(|answer| answer.kind.is_some()) {
        anyhow::bail!("the daemon got the command too late and answered with its status; try again");
    }
    serde_json::from_str(&text).map_err(|error| anyhow::anyhow!("{}", makes_no_sense(&error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_old_logs_of_daemons_that_are_gone_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let now = SystemTime::now();
        for (name, ago) in [
            ("mount-1.log", OLD_LOG),
            ("host-cache-2.log", OLD_LOG),
            ("mount-3.log", OLD_LOG / 2),
            ("mount-4.log", OLD_LOG),
            ("mount-4.sock", OLD_LOG),
            ("mine.log", OLD_LOG),
        ] {
            fs::File::create(path(name)).unwrap().set_modified(now - ago).unwrap();
        }
        let paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        remove_old_logs(&paths, now);
        let mut left: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["mine.log", "mount-3.log", "mount-4.log", "mount-4.sock"]);
    }

    #[test]
    fn a_socket_is_not_removed_before_it_listens() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mount-1.sock");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    Asked::begin(path.clone(), &mut Vec::new());
                }
            });
            let bound = (0..2000).try_for_each(|_| Control::bind_at(path.clone()).map(drop));
            is_over.store(true, Ordering::Relaxed);
            bound.unwrap();
        });
    }

    /// A client that sends its question bit by bit, or does not take its answer, delays no other.
    #[test]
    fn a_slow_client_delays_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        // More than a socket takes at once.
        let status = serde_json::json!({ "text": "x".repeat(2 << 20) });
        let length = status.to_string().len();
        let (told, commands) = std::sync::mpsc::channel();
        let command = move |wanted: &str, stream: UnixStream| {
            told.send(wanted.to_owned()).unwrap();
            answer(stream, &());
        };
        serve_on(UnixListener::bind(&path).unwrap(), move || status.clone(), command).unwrap();
        let connect = || UnixStream::connect(&path).unwrap();
        let slow: Vec<_> = (1..CLIENTS_MAX).map(|_| connect()).collect();
        for slow in &slow {
            // It wants the status, and takes no more than the beginning of it.
            slow.shutdown(std::net::Shutdown::Write).unwrap();
            (&mut &*slow).read_exact(&mut [0; 10]).unwrap();
        }
        let begin = Instant::now();
        let ask = |question: &[u8]| {
            let mut stream = connect();
            stream.write_all(question).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        };
        assert_eq!(ask(b"").len(), length);
        assert_eq!(ask(b"wanted\n"), "null");
        assert_eq!(commands.recv().unwrap(), "wanted");
        println!("answered after {:?}", begin.elapsed());
        for slow in &slow {
            // Nobody has given them up to answer the others.
            (&mut &*slow).read_exact(&mut [0; 10]).unwrap();
        }
    }
}
