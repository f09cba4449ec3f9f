//! Directories of control groups: finds places for them, and removes them again.
//!
//! A controller is either on a version 1 hierarchy of its own or on the version 2 hierarchy, never
//! on both. This is looked up per controller, so that mixed machines work. Groups are made below
//! the group of this process wherever the kernel permits it, so that existing limits of this
//! process still hold.
//!
//! Must never happen here: a signal to a process outside of a directory that was made here.

use crate::{attempted, mounts, wait_until_ok};
pub use os::cgroup::Version;
use os::cgroup::{directory, hierarchy, memberships, parse_number};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Time limit for a group to become empty after its last process was killed: the kernel frees a
/// large process late.
const EMPTY_LIMIT: Duration = Duration::from_secs(60);

/// Prefix of all directories that are made here.
const PREFIX: &str = "puma-";

/// A controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Controller {
    Memory,
    Disk,
}

impl Controller {
    fn name(self, version: Version) -> &'static str {
        match (self, version) {
            (Controller::Memory, _) => "memory",
            (Controller::Disk, Version::V1) => "blkio",
            (Controller::Disk, Version::V2) => "io",
        }
    }
}

/// The parent of new directories.
pub(crate) struct Place {
    pub(crate) version: Version,
    pub(crate) parent: PathBuf,
}

/// The place for a group with the first of these controllers, and with the others if they are on
/// the same hierarchy.
pub(crate) fn place(controllers: &[Controller]) -> io::Result<Place> {
    let [first, others @ ..] = controllers else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no controller asked for"));
    };
    let own = fs::read_to_string("/proc/self/cgroup").map_err(attempted("reading /proc/self/cgroup"))?;
    let own_group = |version, controller| {
        let mut memberships = memberships(&own).filter(|one| one.version == version);
        memberships.find(|one| one.may_govern(controller)).map_or("/", |one| one.path)
    };
    let table = mounts::table()?;
    let name = first.name(Version::V1);
    if let Some(mount) = hierarchy(&table, Version::V1, name) {
        let parent = directory(&mount, own_group(Version::V1, name));
        return Ok(Place { version: Version::V1, parent });
    }
    let name_v2 = first.name(Version::V2);
    let Some(mount) = hierarchy(&table, Version::V2, name_v2) else {
        let message = format!("no control groups with the {name} controller are mounted here");
        return Err(io::Error::new(io::ErrorKind::NotFound, message));
    };
    let (own, top) = (directory(&mount, own_group(Version::V2, name_v2)), mount.mountpoint());
    // A slow disk's group is useless without its memory on the same hierarchy; but if memory is on
    // version 1, version 2 does not list it.
    let root_has = |controller: &&Controller| lists(&top, "cgroup.controllers", controller.name(Version::V2));
    let wanted: Vec<&str> =
        std::iter::once(first).chain(others.iter().filter(root_has)).map(|c| c.name(Version::V2)).collect();
    let mut refusal = io::Error::new(io::ErrorKind::NotFound, format!("no group here has the controllers {wanted:?}"));
    // A group that has processes itself cannot pass controllers to children, so the nearest
    // ancestor that can is used.
    for parent in own.ancestors().take_while(|path| path.starts_with(&top)) {
        match hand_down(parent, &wanted) {
            Ok(()) => return Ok(Place { version: Version::V2, parent: parent.to_owned() }),
            Err(error) => refusal = error,
        }
    }
    Err(attempted(format!("finding a control group that may have children limited in {wanted:?}"))(refusal))
}

/// Gives the children of `parent` these controllers. They keep them afterwards: it costs nothing,
/// and other programs may have begun to rely on it.
pub(crate) fn hand_down(parent: &Path, controllers: &[&str]) -> io::Result<()> {
    for controller in controllers {
        if !lists(parent, "cgroup.subtree_control", controller) {
            write(&parent.join("cgroup.subtree_control"), &format!("+{controller}"))?;
        }
    }
    Ok(())
}

/// Writes one value to a control file.
pub(crate) fn write(file: &Path, value: &str) -> io::Result<()> {
    // Never creates a file: a control file that does not exist means that the controller is
    // missing.
    let open = fs::OpenOptions::new().write(true).open(file);
    open.and_then(|mut file| io::Write::write_all(&mut file, value.as_bytes()))
        .map_err(attempted(format!("writing {value:?} to {}", file.display())))
}

/// Reads a control file.
pub(crate) fn read(file: &Path) -> io::Result<String> {
    fs::read_to_string(file).map_err(attempted(format!("reading {}", file.display())))
}

/// Reads a control file that holds one number. "max" is the largest.
pub(crate) fn read_number(file: &Path) -> io::Result<u64> {
    let text = read(file)?;
    parse_number(&text).ok_or_else(|| {
        let message = format!("{} holds {:?}, not a number", file.display(), text.trim());
        io::Error::new(io::ErrorKind::InvalidData, message)
    })
}

fn lists(directory: &Path, file: &str, word: &str) -> bool {
    fs::read_to_string(directory.join(file)).is_ok_and(|text| text.split_whitespace().any(|w| w == word))
}

/// A directory of a control group. Dropping it kills the processes that are still in it, and
/// removes it.
pub(crate) struct Dir {
    path: PathBuf,
}

impl Dir {
    /// Makes a directory whose name begins with `name`.
    pub(crate) fn create(parent: &Path, name: &str) -> io::Result<Dir> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        sweep(parent, name);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{PREFIX}{name}-{}-{count}", std::process::id()));
        match fs::create_dir(&path) {
            Ok(()) => Ok(Dir { path }),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                let message =
                    format!("control groups cannot be made in {} without root: run it as root", parent.display());
                Err(io::Error::new(error.kind(), message))
            }
            Err(error) => Err(attempted(format!("making the control group {}", path.display()))(error)),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(crate) fn has(&self, file: &str) -> bool {
        self.file(file).exists()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let removed = wait_until_ok(EMPTY_LIMIT, || match fs::remove_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => {
                kill_members(&self.path);
                Err(error)
            }
            Ok(()) => Ok(()),
        });
        if let Err(error) = removed {
            eprintln!("The control group {} is left behind: {error}. Remove it with rmdir.", self.path.display());
        }
    }
}

/// Kills the processes of a group that will be removed: only this crate has put processes there.
fn kill_members(group: &Path) {
    let members = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    let own = std::process::id();
    for pid in members.lines().filter_map(|line| line.parse::<u32>().ok()).filter(|pid| *pid != own && *pid != 0) {
        if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
            let _gone_already = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// Removes empty groups of that name whose makers are dead: a run that was killed outright could
/// not.
fn sweep(parent: &Path, name: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let made_by = entry.file_name().to_str().and_then(|entry| made_by(entry, name));
        if made_by.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            // A slow disk of version 2 contains groups. Removal fails if there are processes: such
            // a group is left alone.
            for inner in fs::read_dir(entry.path()).into_iter().flatten().flatten() {
                if inner.file_type().is_ok_and(|kind| kind.is_dir()) {
                    let _in_use = fs::remove_dir(inner.path());
                }
            }
            let _in_use = fs::remove_dir(entry.path());
        }
    }
}

fn made_by(entry: &str, name: &str) -> Option<u32> {
    let numbers = entry.strip_prefix(PREFIX)?.strip_prefix(name)?.strip_prefix('-')?;
    let (pid, count) = numbers.split_once('-')?;
    count.parse::<u32>().ok()?;
    pid.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_names_are_swept() {
        assert_eq!(made_by("puma-reader-12-0", "reader"), Some(12));
        for other in ["puma-reader-12", "puma-reader-x-0", "reader-12-0", "puma-reader-2-12-x", "puma-other-12-0"] {
            assert_eq!(made_by(other, "reader"), None, "{other}");
        }
    }
}
