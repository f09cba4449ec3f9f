//! Control groups for tests: a set of processes with a memory limit, a slow disk, both, or neither.

use crate::attempted;
use crate::cgroup::{self, Controller, Dir, Version};
use crate::disk::SlowDisk;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

/// The use of the memory that is charged to a group, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// All memory that counts against the limit.
    pub total_bytes: u64,
    /// The page cache.
    pub page_cache_bytes: u64,
}

/// A control group. Dropping it kills the processes that are still in it, and removes it.
pub struct Group {
    /// The directory with the memory limit, if there is one. On version 2 it may be in the tree of
    /// a slow disk.
    memory: Option<(Version, Dir)>,
    /// On version 2, a group on a slow disk without a memory directory of its own.
    _leaf: Option<Dir>,
    joins: Vec<CString>,
    /// Lives longer than the directories above, which may be in it.
    _disk: Option<Arc<Dir>>,
}

impl Group {
    /// Makes a group. `memory_limit_bytes` is a hard limit on memory and page cache together;
    /// `disk` is the slow disk that it reads from. For a group with neither, nothing is made.
    pub fn create(name: &str, memory_limit_bytes: Option<u64>, disk: Option<&SlowDisk>) -> io::Result<Group> {
        let (mut memory, mut leaf, mut joins) = (None, None, Vec::new());
        if let Some(disk) = disk {
            if let Some(file) = disk.processes_file() {
                joins.push(c_path(&file)?);
            } else {
                let directory = Dir::create(disk.directory().path(), name)?;
                joins.push(c_path(&directory.file("cgroup.procs"))?);
                if memory_limit_bytes.is_some() && disk.memory_in_same_tree() {
                    memory = Some((Version::V2, directory));
                } else {
                    leaf = Some(directory);
                }
            }
        }
        if memory_limit_bytes.is_some() && memory.is_none() {
            let place = cgroup::place(&[Controller::Memory])?;
            let directory = Dir::create(&place.parent, name)?;
            joins.push(c_path(&directory.file("cgroup.procs"))?);
            memory = Some((place.version, directory));
        }
        let group = Group { memory, _leaf: leaf, joins, _disk: disk.map(|disk| Arc::clone(disk.directory())) };
        memory_limit_bytes.map_or(Ok(()), |limit_bytes| group.limit_memory(limit_bytes))?;
        Ok(group)
    }

    /// Changes the memory limit. Fails if there was none, or if the group uses more and it cannot
    /// be reclaimed.
    pub fn limit_memory(&self, limit_bytes: u64) -> io::Result<()> {
        let (version, directory) = self.limited()?;
        let file = match version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        };
        cgroup::write(&directory.file(file), &limit_bytes.to_string())
    }

    /// The present use of its memory. The kernel counts the two figures separately, so they are
    /// only nearly of the same moment.
    pub fn memory_use(&self) -> io::Result<MemoryUse> {
        let (version, directory) = self.limited()?;
        let cache = match version {
            Version::V1 => "total_cache",
            Version::V2 => "file",
        };
        let total_bytes = cgroup::read_number(&directory.file(version.usage()))?;
        let stat = cgroup::read(&directory.file("memory.stat"))?;
        let page_cache_bytes = os::fields::count(&stat, cache).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} has no line for the page cache", directory.path().display()),
            )
        })?;
        Ok(MemoryUse { total_bytes, page_cache_bytes })
    }

    /// The directory of the controller that holds the memory limit, if there is one.
    pub fn memory_directory(&self) -> Option<&Path> {
        self.memory.as_ref().map(|(_, directory)| directory.path())
    }

    /// Version of the controller that holds the memory limit, if there is one.
    pub fn memory_version(&self) -> Option<Version> {
        self.memory.as_ref().map(|(version, _)| *version)
    }

    /// The files to which a process writes "0" to join.
    pub(crate) fn joins(&self) -> &[CString] {
        &self.joins
    }

    fn limited(&self) -> io::Result<(Version, &Dir)> {
        let memory = self.memory.as_ref().map(|(version, directory)| (*version, directory));
        memory.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "this group was made without a memory limit"))
    }
}

fn c_path(path: &Path) -> io::Result<CString> {
    let terminated = CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other);
    terminated.map_err(attempted(format!("naming {}", path.display())))
}
