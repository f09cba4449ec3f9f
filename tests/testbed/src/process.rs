//! Child processes that are in their groups before their program starts, and that end with their
//! guard.

use crate::attempted;
use crate::group::Group;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal};
use std::ffi::CStr;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// Lines of output that are kept for a caller that does not read them. Then the child waits, as at
/// a full pipe.
const LINES_MAX: usize = 4096;

/// Time limit for a child to end when its guard is dropped: enough to unmount a file system.
const DROP_GRACE: Duration = Duration::from_secs(30);

/// The next output of a child.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// A line, without its end.
    Text(String),
    /// No line came in time.
    Timeout,
    /// No line will come: the child closed its output.
    End,
}

/// A running child. Dropping it asks it to end (SIGTERM), and kills it if it does not.
pub struct Process {
    name: String,
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    /// Starts `command` inside `groups`. This value reads its standard output line by line;
    /// `command` determines its other streams. The child gets a process group of its own. So Ctrl-C
    /// at the terminal reaches only this process, which then ends the child in order. The child
    /// gets a SIGTERM if the calling thread ends before it.
    pub fn spawn(mut command: Command, groups: &[&Group]) -> io::Result<Process> {
        let name = PathBuf::from(command.get_program());
        let name = name.file_name().unwrap_or(name.as_os_str()).to_string_lossy().into_owned();
        let joins: Vec<_> = groups.iter().flat_map(|group| group.joins().iter().cloned()).collect();
        let parent = rustix::process::getpid();
        command.stdout(Stdio::piped()).process_group(0);
        // SAFETY: the closure runs between fork and exec. It makes only system calls on memory
        // prepared before the fork: it does not allocate, and takes no lock.
        unsafe {
            command.pre_exec(move || {
                for file in &joins {
                    join(file)?;
                }
                die_with_parent(parent, Signal::TERM)
            });
        }
        let mut child = command.spawn().map_err(attempted(format!("starting {name}")))?;
        let (sender, lines) = sync_channel(LINES_MAX);
        if let Some(output) = child.stdout.take() {
            // Ends by itself when the child's output is closed, or when the lines have no reader
            // any more.
            std::thread::spawn(move || {
                let lines = BufReader::new(output).split(b'\n').map_while(Result::ok);
                for line in lines.map(|line| String::from_utf8_lossy(&line).into_owned()) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Process { name, child, lines })
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its standard input, once, if the command had it piped.
    pub fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// The next line of its output, waited for at most `limit`.
    pub fn next_line(&self, limit: Duration) -> Line {
        match self.lines.recv_timeout(limit) {
            Ok(line) => Line::Text(line),
            Err(RecvTimeoutError::Timeout) => Line::Timeout,
            Err(RecvTimeoutError::Disconnected) => Line::End,
        }
    }

    /// Waits for a line that begins with `beginning`, and returns it. Other lines are dropped.
    pub fn wait_for_line(&mut self, beginning: &str, limit: Duration) -> io::Result<String> {
        let start = Instant::now();
        loop {
            match self.next_line(limit.saturating_sub(start.elapsed())) {
                Line::Text(line) if line.starts_with(beginning) => return Ok(line),
                Line::Text(_) => {}
                Line::Timeout => {
                    let message = format!("{} did not print {beginning:?} within {limit:?}", self.name);
                    return Err(io::Error::new(io::ErrorKind::TimedOut, message));
                }
                Line::End => {
                    // Its output is closed, so it is ending: a short wait returns its status.
                    let end = self.wait(Duration::from_secs(1))?;
                    let end = end.map_or("closed its output".to_owned(), |status| format!("ended ({status})"));
                    let message = format!("{} {end} before it printed {beginning:?}", self.name);
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
                }
            }
        }
    }

    /// Sends a signal, unless the process is known to have ended.
    pub fn signal(&mut self, signal: Signal) -> io::Result<()> {
        // A child keeps its pid until its parent waits for it, so this cannot hit another process.
        match (self.child.try_wait()?, self.raw_pid()) {
            (None, Some(pid)) => rustix::process::kill_process(pid, signal).map_err(io::Error::from),
            _ => Ok(()),
        }
    }

    /// Waits at most `limit` for the end. `None`: it still runs.
    pub fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let start = Instant::now();
        let Some(pid) = self.raw_pid() else { return self.child.try_wait() };
        if let Some(status) = self.child.try_wait()? {
            return Ok(Some(status));
        }
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            let left = limit.saturating_sub(start.elapsed());
            let Ok(timeout) = left.try_into() else { return Ok(None) };
            match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout)) {
                Ok(0) => return self.child.try_wait(),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Asks it to end, waits at most `grace`, then kills it.
    pub fn stop(&mut self, grace: Duration) -> io::Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        if let Some(status) = self.wait(grace)? {
            return Ok(status);
        }
        self.kill()
    }

    /// Kills it.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.signal(Signal::KILL)?;
        self.child.wait()
    }

    fn raw_pid(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // No message if it has ended, or if its owner has killed it on purpose.
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        match self.stop(DROP_GRACE) {
            Ok(status) if status.signal() == Some(Signal::KILL.as_raw()) => {
                eprintln!("{} (process {}) did not end in order and was killed.", self.name, self.child.id());
            }
            Ok(_) => {}
            Err(error) => eprintln!("{} (process {}) could not be ended: {error}", self.name, self.child.id()),
        }
    }
}

/// Joins a group. Callable between fork and exec: no allocation, no lock.
pub(crate) fn join(processes_file: &CStr) -> io::Result<()> {
    let file = rustix::fs::open(processes_file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, b"0")?;
    Ok(())
}

/// Makes the kernel send a signal when the parent is gone. Callable between fork and exec.
pub(crate) fn die_with_parent(parent: Pid, signal: Signal) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(signal))?;
    // The parent may have died before the line above.
    if rustix::process::getppid() != Some(parent) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(())
}

/// A program of the same build, next to the running one or, for a test, one directory above it.
pub fn sibling_binary(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let directory = own.parent()?;
    [Some(directory), directory.parent()].into_iter().flatten().map(|dir| dir.join(name)).find(|path| path.is_file())
}
