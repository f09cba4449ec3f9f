//! A temporary directory for files and mounts of a test or the demo.

use crate::{attempted, mounts};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A new directory. Dropping it removes it with its contents. Mounts in it are detached first, so
/// that nothing is ever removed through a mount.
pub struct Scratch {
    directory: Option<tempfile::TempDir>,
    path: PathBuf,
}

impl Scratch {
    /// In the system's directory for temporary files.
    pub fn new(name: &str) -> io::Result<Scratch> {
        Scratch::new_in(&std::env::temp_dir(), name)
    }

    /// In `parent`, which must exist. Remains of killed runs under the same name are removed.
    pub fn new_in(parent: &Path, name: &str) -> io::Result<Scratch> {
        sweep(parent, name);
        let prefix = format!("puma-{name}-{}-", std::process::id());
        let directory = tempfile::Builder::new().prefix(&prefix).tempdir_in(parent);
        let directory = directory.map_err(attempted(format!("making a directory in {}", parent.display())))?;
        // Mounts are listed under their real paths.
        let path = directory.path().canonicalize()?;
        Ok(Scratch { directory: Some(directory), path })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a directory in it.
    pub fn directory(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.path.join(name);
        fs::create_dir(&path).map_err(attempted(format!("making {}", path.display())))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let stuck = mounts::detach_under(&self.path);
        let Some(directory) = self.directory.take() else { return };
        if !stuck.is_empty() {
            let kept = directory.keep();
            eprintln!("{} is left behind: {stuck:?} could not be unmounted. Unmount and remove it.", kept.display());
        } else if let Err(error) = directory.close() {
            eprintln!("{} is left behind: {error}. Remove it.", self.path.display());
        }
    }
}

/// Removes directories of that name whose makers are dead.
fn sweep(parent: &Path, name: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let file_name = entry.file_name();
        let rest =
            file_name.to_str().and_then(|entry| entry.strip_prefix("puma-")?.strip_prefix(name)?.strip_prefix('-'));
        let pid = rest.and_then(|rest| rest.split_once('-')?.0.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
            && mounts::detach_under(&entry.path()).is_empty()
        {
            let _not_ours_then = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_gone_afterwards_and_so_is_what_the_dead_left() {
        let parent = tempfile::tempdir().unwrap();
        // Above the largest pid of Linux.
        let left = parent.path().join("puma-x-4194999-abc");
        let kept = [parent.path().join("puma-x-1-abc"), parent.path().join("puma-y-4194999-abc")];
        for path in kept.iter().chain([&left]) {
            fs::create_dir(path).unwrap();
        }
        let scratch = Scratch::new_in(parent.path(), "x").unwrap();
        fs::write(scratch.directory("inner").unwrap().join("file"), "content").unwrap();
        let path = scratch.path().to_owned();
        assert!(path.exists() && !left.exists());
        drop(scratch);
        assert!(!path.exists());
        assert!(kept.iter().all(|path| path.exists()));
    }
}
