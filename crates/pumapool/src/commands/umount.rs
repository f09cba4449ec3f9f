//! `pumapool umount`: takes a mount away and waits until its daemon has ended.

use crate::cli::umount::Options;
use crate::daemon::control;
use anyhow::{Context, Result, bail};
use report::{Listed, Mount};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// How long the daemon may take to end after its mount is gone.
const END_TIMEOUT_SECONDS: i64 = 10;

/// A mount may be busy although no process is seen to use it. `umount` tries again for so long, and
/// at this interval.
const SHORT_USE_MAX: Duration = Duration::from_secs(2);
const SHORT_USE_INTERVAL: Duration = Duration::from_millis(5);
/// Attempts between two looks for such a process. A look takes far longer than an attempt.
const ATTEMPTS_PER_LOOK: u32 = 10;
/// Limit on the processes that are named as users of a mount.
const USERS_NAMED_MAX: usize = 5;

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    if let Some(mountpoint) = &options.mountpoint {
        take_away_and_wait(mountpoint, options.lazy)?;
        return Ok(ExitCode::SUCCESS);
    }
    each(|mountpoint| take_away_and_wait(mountpoint, options.lazy))
}

/// Applies `act` to all mounts that the program at this path has made, also before it was replaced.
/// The innermost mount is first. If `act` fails, this function logs the error and continues with
/// the other mounts.
pub fn each(act: impl Fn(&Path) -> Result<()>) -> Result<ExitCode> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let is_own = |mount: &Listed<Mount>| {
        let program = std::fs::read_link(format!("/proc/{}/exe", mount.status.pid)).unwrap_or_default();
        let program = program.to_string_lossy();
        Path::new(program.strip_suffix(" (deleted)").unwrap_or(&program)) == own
    };
    let mut mounts: Vec<_> = mounts().into_iter().filter(is_own).collect();
    mounts.sort_by_key(|mount| std::cmp::Reverse(mount.status.mountpoint.len()));
    let mut code = ExitCode::SUCCESS;
    for mount in mounts {
        if let Err(error) = act(Path::new(&mount.status.mountpoint)) {
            crate::log::complain(&error);
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

/// The mounts whose daemons answer.
fn mounts() -> Vec<Listed<Mount>> {
    report::All::new(control::ask_kind("mount"), Vec::new()).mounts
}

fn take_away_and_wait(given: &Path, lazy: bool) -> Result<()> {
    let (wanted, daemon) = find(given)?;
    let process = daemon.as_ref().and_then(|daemon| process(daemon.status.pid));
    // A host opens an image while it handles a message of a guest. And a system call on a path
    // within the mountpoint uses the mount for a moment, which no list of open files shows.
    let own = daemon.as_ref().map(|daemon| u64::from(daemon.status.daemon_pid));
    let begun = Instant::now();
    let mut attempts = 0;
    while !take_away(&wanted, lazy)? {
        let is_over = begun.elapsed() > SHORT_USE_MAX;
        if attempts % ATTEMPTS_PER_LOOK == 0 || is_over {
            let users: Vec<User> = users(&wanted).into_iter().filter(|user| Some(user.pid) != own).collect();
            if !users.is_empty() || is_over {
                bail!("{} is in use{}: end what uses it, or add --lazy", wanted.display(), named(&users));
            }
        }
        attempts += 1;
        std::thread::sleep(SHORT_USE_INTERVAL);
    }
    if let Some(process) = process.filter(|_| !lazy) {
        wait_for_end(&process);
    }
    Ok(())
}

/// A process that uses a mount.
struct User {
    pid: u64,
    name: String,
}

/// The processes that have a file open or mapped within a mountpoint, or have their program, root
/// or working directory there, as far as they may be examined. The file system itself is not
/// accessed.
fn users(mountpoint: &Path) -> Vec<User> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let leads_there = |link: &Path| std::fs::read_link(link).is_ok_and(|to| to.starts_with(mountpoint));
    let user = |entry: std::fs::DirEntry| {
        let pid: u64 = entry.file_name().to_str()?.parse().ok()?;
        let folder = entry.path();
        let uses = ["cwd", "root", "exe"].iter().any(|name| leads_there(&folder.join(name)))
            || ["fd", "map_files"].iter().any(|name| {
                let links = std::fs::read_dir(folder.join(name)).into_iter().flatten().flatten();
                links.into_iter().any(|link| leads_there(&link.path()))
            });
        let name = std::fs::read_to_string(folder.join("comm")).unwrap_or_default().trim().to_owned();
        uses.then_some(User { pid, name })
    };
    entries.flatten().filter_map(user).collect()
}

/// The names of the processes that use a mount, if known.
fn named(users: &[User]) -> String {
    if users.is_empty() {
        return String::new();
    }
    let mut named: Vec<_> =
        users.iter().take(USERS_NAMED_MAX).map(|User { pid, name }| format!("{name} ({pid})")).collect();
    if users.len() > USERS_NAMED_MAX {
        named.push(format!("{} more", users.len() - USERS_NAMED_MAX));
    }
    format!(" by {}", named.join(", "))
}

/// Finds a mount by its path. Returns the mountpoint, and the status of its daemon if it answers.
pub fn find(given: &Path) -> Result<(PathBuf, Option<Listed<Mount>>)> {
    let daemons = mounts();
    let mut places = Vec::new();
    // The last component may be a dead mount, which cannot be accessed, so first only its parent is
    // resolved. It may also be a symbolic link to the mount.
    if let (Some(parent), Some(name)) = (given.parent(), given.file_name()) {
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        places.extend(parent.canonicalize().map(|parent| parent.join(name)));
    }
    places.extend(given.canonicalize());
    for place in places {
        let daemon = daemons.iter().find(|daemon| Path::new(&daemon.status.mountpoint) == place);
        if daemon.is_some() || mount::is_mounted(&place).context("cannot read the list of mounts")? {
            return Ok((place, daemon.cloned()));
        }
    }
    bail!("nothing of ours is mounted at {}; `pumapool status` lists the mounts", given.display())
}

/// Unmounts. Returns false if the mount is in use.
fn take_away(mountpoint: &Path, lazy: bool) -> Result<bool> {
    if rustix::process::geteuid().is_root() {
        use rustix::mount::{UnmountFlags, unmount};
        let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
        return match unmount(mountpoint, flags | UnmountFlags::NOFOLLOW) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::BUSY) => Ok(false),
            Err(error) => Err(error).with_context(|| format!("cannot unmount {}", mountpoint.display())),
        };
    }
    let mut command = Command::new("fusermount3");
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(mountpoint).env("LC_ALL", "C");
    let output = command.output().context("cannot run fusermount3; install fuse3, or unmount as root")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && !said.to_lowercase().contains("busy") {
        bail!("cannot unmount {}: {}", mountpoint.display(), said.trim());
    }
    Ok(output.status.success())
}

/// A descriptor of the process, with which its end can be awaited even if its parent does not reap
/// it.
fn process(pid: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Waits until the process has ended, so that its resources are free.
fn wait_for_end(process: &OwnedFd) {
    let limit = Timespec { tv_sec: END_TIMEOUT_SECONDS, tv_nsec: 0 };
    if !matches!(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)), Ok(1)) {
        tracing::warn!("the mount is gone, but its daemon has not ended yet");
    }
}
