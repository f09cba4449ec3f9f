//! The watched files: all files of a file system, or those in a directory when the watch begins.

use anyhow::{Context, Result, bail};
use std::collections::HashSet;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tap::AccessTrace;

/// Limit on the number of files in the paths; their inode numbers take some 50 MB.
const FILES_MAX: usize = 1 << 20;
/// Limit on the directories of a whole file system that are searched for sample files.
const SAMPLE_FOLDERS_MAX: usize = 1000;
/// Limit on the sample files, from which the disk's latency can be measured.
const SAMPLES_MAX: usize = 256;

/// Types of file systems whose pages belong to another device than stat(2) shows.
const OVERLAY: i64 = 0x794c_7630;
const BTRFS: i64 = 0x9123_683e;

/// The watched files.
#[derive(Default)]
pub(super) struct Scope {
    devices: Vec<u64>,
    /// Devices all of whose files are watched.
    whole: HashSet<u32>,
    files: HashSet<(u32, u64)>,
    /// Number of files found. Where paths overlap, a file counts several times.
    met: usize,
    samples: Vec<PathBuf>,
}

impl Scope {
    /// Finds the files in these paths.
    ///
    /// # Errors
    /// Fails if a path does not exist, cannot be watched, or has too many files.
    pub(super) fn new(paths: &[PathBuf]) -> Result<Scope> {
        let mounts = os::mountinfo::read().unwrap_or_default();
        let mut scope = Scope::default();
        for path in paths {
            let attempt = || format!("cannot look at {}, name a directory or file that is there", path.display());
            let path = fs::canonicalize(path).with_context(attempt)?;
            let metadata = fs::metadata(&path).with_context(attempt)?;
            let kind = rustix::fs::statfs(&path).with_context(attempt)?.f_type;
            if kind == OVERLAY || kind == BTRFS {
                let name = if kind == BTRFS { "btrfs" } else { "overlay" };
                bail!(
                    "{} is on a file system ({name}) whose pages the kernel keeps under another device; name the directory below it on ext4 or XFS",
                    path.display()
                );
            }
            if !scope.devices.contains(&metadata.dev()) {
                scope.devices.push(metadata.dev());
            }
            if scope.devices.len() > AccessTrace::DEVICES_MAX {
                bail!("these paths are on more than {} file systems: name fewer", AccessTrace::DEVICES_MAX);
            }
            let is_whole = is_whole(&mounts, &path);
            if is_whole {
                scope.whole.insert(AccessTrace::device(metadata.dev()));
            }
            let before = scope.met;
            scope.walk(path.clone(), metadata, is_whole)?;
            if !is_whole && scope.met == before {
                bail!("there are no files below {} that could be watched; name another directory", path.display());
            }
        }
        Ok(scope)
    }

    fn walk(&mut self, path: PathBuf, metadata: Metadata, is_whole: bool) -> Result<()> {
        let (device, mut folders, mut looked) = (metadata.dev(), Vec::new(), 0);
        self.meet(path, &metadata, is_whole, &mut folders);
        while let Some(folder) = folders.pop() {
            looked += 1;
            if is_whole && looked > SAMPLE_FOLDERS_MAX {
                break;
            }
            // Files that are removed meanwhile are not watched.
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                if let Ok(metadata) = entry.metadata()
                    && metadata.dev() == device
                {
                    self.meet(entry.path(), &metadata, is_whole, &mut folders);
                }
            }
            if self.files.len() > FILES_MAX {
                bail!("there are more than {FILES_MAX} files below: name the file system's mount point, or less of it");
            }
        }
        Ok(())
    }

    fn meet(&mut self, path: PathBuf, metadata: &Metadata, is_whole: bool, folders: &mut Vec<PathBuf>) {
        if metadata.is_dir() {
            return folders.push(path);
        }
        if !metadata.is_file() {
            return;
        }
        self.met += 1;
        if !is_whole {
            self.files.insert((AccessTrace::device(metadata.dev()), metadata.ino()));
        }
        if metadata.len() >= page::PAGE_SIZE as u64 && self.samples.len() < SAMPLES_MAX {
            self.samples.push(path);
        }
    }

    /// The `st_dev` of the watched devices.
    pub(super) fn devices(&self) -> &[u64] {
        &self.devices
    }

    /// Whether only whole file systems are watched.
    pub(super) fn is_whole(&self) -> bool {
        self.files.is_empty()
    }

    /// Whether this file is watched.
    pub(super) fn holds(&self, device: u32, inode: u64) -> bool {
        self.whole.contains(&device) || self.files.contains(&(device, inode))
    }

    /// Sample files of at least one page.
    pub(super) fn samples(&self) -> &[PathBuf] {
        &self.samples
    }
}

/// Whether a whole file system is mounted there, rather than a part of one.
fn is_whole(mounts: &[u8], path: &Path) -> bool {
    os::mountinfo::mounts(mounts).any(|mount| mount.root() == Path::new("/") && mount.mountpoint() == path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_below_are_found_and_no_others() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let inside = directory.path().join("a/b");
        fs::create_dir_all(&inside).unwrap();
        let (inner, outer) = (inside.join("inner"), directory.path().join("outer"));
        fs::write(&inner, vec![0; 5000]).unwrap();
        fs::write(&outer, "x").unwrap();
        std::os::unix::fs::symlink(&outer, inside.join("link")).unwrap();
        let scope = match Scope::new(&[directory.path().join("a"), inside.clone()]) {
            Ok(scope) => scope,
            Err(error) => return testbed::skip("files_below_are_found_and_no_others", error),
        };
        let holds = |path: &Path| {
            let metadata = fs::metadata(path).unwrap();
            scope.holds(AccessTrace::device(metadata.dev()), metadata.ino())
        };
        assert!(holds(&inner) && !holds(&outer));
        assert!(scope.samples().iter().all(|path| *path == fs::canonicalize(&inner).unwrap()));
        assert!(Scope::new(&["/nonexistent".into()]).is_err());
        fs::remove_file(&inner).unwrap();
        let error = Scope::new(&[directory.path().join("a")]).err().unwrap();
        assert!(error.to_string().contains("no files below"), "{error}");
    }

    #[test]
    fn a_mount_of_a_part_is_no_whole() {
        let mounts = b"24 1 254:0 / / rw - ext4 /dev/vda rw\n25 24 254:0 /srv/x /mnt/a\\040b rw - ext4 /dev/vda rw\n\
                      26 24 254:1 / /srv/a\\040b rw - xfs /dev/vdb rw\n";
        assert!(is_whole(mounts, Path::new("/")) && is_whole(mounts, Path::new("/srv/a b")));
        assert!(!is_whole(mounts, Path::new("/mnt/a b")) && !is_whole(mounts, Path::new("/srv")));
    }
}
