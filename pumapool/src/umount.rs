//! `pumapool umount`: takes a mount away and waits until its daemon has ended.

use crate::control;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// How long the daemon may take to end after its mount is gone.
const END_TIMEOUT_SECONDS: i64 = 10;

/// Options of `umount`.
#[derive(clap::Args)]
pub struct Options {
    /// Where it is mounted.
    mountpoint: PathBuf,

    /// Take the mount away now, even if it is in use: programs that have files open keep them, and the daemon ends with the last.
    #[arg(long)]
    lazy: bool,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let given = &options.mountpoint;
    // The last component may be a dead mount, which cannot be looked at: only what leads there is resolved.
    let wanted = match (given.parent(), given.file_name()) {
        (Some(parent), Some(name)) => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            parent.canonicalize().with_context(|| format!("cannot find {}", parent.display()))?.join(name)
        }
        _ => given.canonicalize().with_context(|| format!("cannot find {}", given.display()))?,
    };
    let daemon = control::ask_all().into_iter().find(|status| is_mount_at(status, &wanted));
    if daemon.is_none() && !mounted_types_at(&wanted)?.iter().any(|kind| kind == "fuse.pumapool") {
        bail!("nothing of ours is mounted at {}; `pumapool status` lists the mounts", wanted.display());
    }
    let process = daemon.as_ref().and_then(|status| process(&status["pid"]));
    take_away(&wanted, options.lazy)?;
    if let Some(process) = process.filter(|_| !options.lazy) {
        wait_for_end(&process);
    }
    Ok(ExitCode::SUCCESS)
}

fn is_mount_at(status: &Value, mountpoint: &Path) -> bool {
    status["kind"] == "mount" && status["mountpoint"].as_str().is_some_and(|at| Path::new(at) == mountpoint)
}

fn mounted_types_at(mountpoint: &Path) -> Result<Vec<String>> {
    let table = std::fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
    let kinds = table.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        let at = words.next()?.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\");
        (Path::new(&at) == mountpoint).then(|| words.next().unwrap_or_default().to_owned())
    });
    Ok(kinds.collect())
}

fn take_away(mountpoint: &Path, lazy: bool) -> Result<()> {
    if rustix::process::geteuid().is_root() {
        use rustix::mount::{UnmountFlags, unmount};
        let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
        return match unmount(mountpoint, flags | UnmountFlags::NOFOLLOW) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::BUSY) => bail!(
                "{} is in use: end what uses it (fuser -vm {} lists it), or add --lazy",
                mountpoint.display(),
                mountpoint.display()
            ),
            Err(error) => Err(error).with_context(|| format!("cannot unmount {}", mountpoint.display())),
        };
    }
    let mut command = Command::new("fusermount3");
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(mountpoint);
    let output = command.output().context("cannot run fusermount3; install fuse3, or unmount as root")?;
    if !output.status.success() {
        bail!("cannot unmount {}: {}", mountpoint.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// A descriptor of the process, so that its end can be waited for even if nobody reaps it.
fn process(pid: &Value) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(pid.as_i64()?).ok()?)?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// Waits until the process has ended, so that what follows finds its resources free.
fn wait_for_end(process: &OwnedFd) {
    let limit = Timespec { tv_sec: END_TIMEOUT_SECONDS, tv_nsec: 0 };
    if !matches!(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)), Ok(1)) {
        tracing::warn!("the mount is gone, but its daemon has not ended yet");
    }
}
