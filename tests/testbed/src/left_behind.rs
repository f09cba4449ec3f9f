//! Finds the things that a program has left on the machine through this crate, for the test that
//! runs it.

use crate::mounts;
use std::fs;
use std::path::{Path, PathBuf};

/// Control groups, network namespaces, directories and mounts that process `pid` made through this
/// crate, and that still exist.
pub fn left_behind(pid: u32) -> Vec<PathBuf> {
    let is_ours = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("puma-") && name.contains(&format!("-{pid}-"))
    };
    let (mut directories, mut found) = (vec![PathBuf::from("/sys/fs/cgroup")], Vec::new());
    while let Some(directory) = directories.pop() {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let inner = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let inner: Vec<PathBuf> = inner.map(|entry| entry.path()).collect();
        found.extend(inner.iter().filter(|path| is_ours(path)).cloned());
        directories.extend(inner);
    }
    for directory in [std::env::temp_dir(), "/run/netns".into()] {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        found.extend(entries.map(|entry| entry.path()).filter(|path| is_ours(path)));
    }
    let table = mounts::table().unwrap_or_default();
    let places = os::mountinfo::mounts(&table).map(|mount| mount.mountpoint());
    found.extend(places.filter(|place| place.ancestors().any(is_ours)));
    found
}
