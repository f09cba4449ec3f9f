//! Control groups of both versions (the kernel's Documentation/admin-guide/cgroup-v2.rst and
//! cgroup-v1/memory.rst): the groups of a process, their directories, and their memory.
//!
//! A controller is either on a version 1 hierarchy or on the version 2 hierarchy, never on both.
//! Mixed machines have version 2 without the memory controller next to version 1 with it.
//!
//! This module only reads. A file that is missing or cannot be parsed sets no limit.

use crate::mountinfo::{self, Mount};
use crate::pressure;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Limits from here on mean "none": version 1 shows the largest possible number of pages for that.
const UNLIMITED_BYTES: u64 = 1 << 60;

/// Nested control groups that are read. Nobody nests them deeper, so the kernel's limit does not
/// matter.
const CGROUP_DEPTH_MAX: usize = 64;

/// Version of the control-group interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// One hierarchy for each controller.
    V1,
    /// One hierarchy for all of them.
    V2,
}

impl Version {
    /// The files of a group with its memory limits, in bytes or `max`. Version 2 slows a group down
    /// above `memory.high`, so this is a limit as well.
    fn limits(self) -> &'static [&'static str] {
        match self {
            Version::V1 => &["memory.limit_in_bytes"],
            Version::V2 => &["memory.max", "memory.high"],
        }
    }

    /// The file of a group with its memory use, in bytes.
    pub fn usage(self) -> &'static str {
        match self {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        }
    }

    /// The file of a group with the stalls due to a lack of memory. `None`: there is none.
    fn pressure(self) -> Option<&'static str> {
        (self == Version::V2).then_some("memory.pressure")
    }
}

/// A line of `/proc/PID/cgroup`: the group of the process on one hierarchy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership<'a> {
    /// Version of the hierarchy.
    pub version: Version,
    /// The controllers of a version 1 hierarchy, separated by commas. Empty for version 2.
    controllers: &'a str,
    /// The path of the group, seen from the root of the process's cgroup namespace.
    pub path: &'a str,
}

impl<'a> Membership<'a> {
    fn parse(line: &'a str) -> Option<Membership<'a>> {
        // hierarchy:controllers:path; version 2 is hierarchy 0, without controllers.
        let mut fields = line.splitn(3, ':');
        let (hierarchy, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let version = if (hierarchy, controllers) == ("0", "") { Version::V2 } else { Version::V1 };
        Some(Membership { version, controllers, path })
    }

    /// Whether the hierarchy is that of version 2, or that of `controller` in version 1.
    pub fn may_govern(&self, controller: &str) -> bool {
        self.version == Version::V2 || self.controllers.split(',').any(|name| name == controller)
    }
}

/// The lines of `/proc/PID/cgroup`. Lines that are malformed are left out.
pub fn memberships(text: &str) -> impl Iterator<Item = Membership<'_>> {
    text.lines().filter_map(Membership::parse)
}

/// The first mount of the version 2 hierarchy, or of the version 1 hierarchy of `controller`, in
/// the text of a table of mounts ([`mountinfo::read`]).
pub fn hierarchy<'a>(table: &'a [u8], version: Version, controller: &str) -> Option<Mount<'a>> {
    mountinfo::mounts(table).find(|mount| is_hierarchy(mount, version, controller))
}

fn is_hierarchy(mount: &Mount<'_>, version: Version, controller: &str) -> bool {
    match version {
        Version::V1 => mount.kind == "cgroup" && mount.has_super_option(controller),
        Version::V2 => mount.kind == "cgroup2",
    }
}

/// The mount points of all hierarchies that may govern memory.
pub fn memory_hierarchies(table: &[u8]) -> impl Iterator<Item = PathBuf> {
    let may_govern =
        |mount: &Mount<'_>| [Version::V2, Version::V1].iter().any(|version| is_hierarchy(mount, *version, "memory"));
    mountinfo::mounts(table).filter(may_govern).map(|mount| mount.mountpoint())
}

/// The mount point of the hierarchy that governs memory: version 1 with the memory controller, else
/// version 2.
///
/// # Errors
/// Fails if there is none, or if the table of mounts cannot be read.
pub fn memory_hierarchy() -> io::Result<PathBuf> {
    memory_hierarchy_in(&mountinfo::read()?).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "no control groups are mounted here (with the memory controller)")
    })
}

fn memory_hierarchy_in(table: &[u8]) -> Option<PathBuf> {
    let of = |version| hierarchy(table, version, "memory");
    of(Version::V1).or_else(|| of(Version::V2)).map(|mount| mount.mountpoint())
}

/// The directory of the group `path` ([`Membership::path`]) in the file tree of its hierarchy's
/// mount.
///
/// In a container the mount may show only a part of the tree, or `path` may be seen from outside.
/// The directory of the mount stands for a group that cannot be seen there.
pub fn directory(mount: &Mount<'_>, path: &str) -> PathBuf {
    let (path, mountpoint) = (Path::new(path), mount.mountpoint());
    let inside = match path.strip_prefix(mount.root()) {
        Ok(inside) => inside,
        Err(_) => path.strip_prefix("/").unwrap_or(Path::new("")),
    };
    let directory = mountpoint.join(inside);
    if directory.is_dir() { directory } else { mountpoint }
}

/// A control group with files about memory.
#[derive(Clone, Debug)]
pub struct MemoryGroup {
    directory: PathBuf,
    version: Version,
}

impl MemoryGroup {
    /// The groups of a process, the innermost of each hierarchy first, up to the mount.
    /// `membership` is the text of `/proc/PID/cgroup`, `table` that of the table of mounts.
    ///
    /// A hierarchy's own root has no limit, and its files show that. But in a cgroup namespace the
    /// apparent root is the container's own group, whose limit counts.
    pub fn of(membership: &str, table: &[u8]) -> Vec<MemoryGroup> {
        let mut groups = Vec::new();
        for Membership { version, path, .. } in memberships(membership).filter(|one| one.may_govern("memory")) {
            let Some(mount) = hierarchy(table, version, "memory") else { continue };
            let (mountpoint, mut directory) = (mount.mountpoint(), directory(&mount, path));
            for _ in 0..CGROUP_DEPTH_MAX {
                groups.push(MemoryGroup { directory: directory.clone(), version });
                if directory == mountpoint || !directory.pop() {
                    break;
                }
            }
        }
        groups
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Its limit, and the unused memory below it, in bytes. If there are several limits, the lowest
    /// counts. `None`: the group has no limit, or its use cannot be read.
    pub fn room_bytes(&self) -> Option<(u64, u64)> {
        let number = |file: &str| number(&self.directory.join(file)).filter(|bytes| *bytes < UNLIMITED_BYTES);
        let limit = self.version.limits().iter().filter_map(|file| number(file)).min()?;
        Some((limit, limit.saturating_sub(number(self.version.usage())?)))
    }

    /// The text of its `memory.stat`, for [`MemoryGroup::counter`]. Empty if it cannot be read.
    pub fn stat(&self) -> String {
        fs::read_to_string(self.directory.join("memory.stat")).unwrap_or_default()
    }

    /// A counter of a `memory.stat`, with all groups below this one. 0 if there is none.
    ///
    /// In version 1, the counters that include the groups below have the prefix `total_`.
    pub fn counter(stat: &str, name: &str) -> u64 {
        let total = stat.lines().filter_map(|line| line.strip_prefix("total_"));
        let total = total.filter_map(|line| crate::fields::count(line, name)).next();
        total.or_else(|| crate::fields::count(stat, name)).unwrap_or(0)
    }

    /// The time in microseconds that some task of the group waited for memory, since the group was
    /// made. `None`: the kernel does not report it.
    pub fn stalled_us(&self) -> Option<u64> {
        pressure::stalled_us(&fs::read_to_string(self.directory.join(self.version.pressure()?)).ok()?)
    }
}

/// The number in a control file. `max`, for "no limit", is the largest. `None`: it is none.
pub fn parse_number(text: &str) -> Option<u64> {
    match text.trim() {
        "max" => Some(u64::MAX),
        digits => digits.parse().ok(),
    }
}

fn number(path: &Path) -> Option<u64> {
    parse_number(&fs::read_to_string(path).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_group_is_found_on_either_version() {
        let text = "5:cpu,memory:/a/b\n1:name=systemd:/x\nnonsense\n1:\n0::/user.slice/s:1.scope\n";
        let path = |version, controller| {
            let mut all = memberships(text).filter(|one| one.version == version);
            all.find(|one| one.may_govern(controller)).map(|one| one.path)
        };
        assert_eq!(path(Version::V1, "memory"), Some("/a/b"));
        assert_eq!(path(Version::V2, "memory"), Some("/user.slice/s:1.scope"));
        assert_eq!(path(Version::V1, "blkio"), None);
        assert_eq!(path(Version::V1, ""), None);
    }

    #[test]
    fn the_hierarchy_of_memory_is_found() {
        let v1 = "36 35 0:31 / /sys/fs/cgroup/memory rw,relatime shared:1 - cgroup cgroup rw,memory";
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw";
        let cpu = "37 35 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct";
        let found = |lines: &[&str]| memory_hierarchy_in(lines.join("\n").as_bytes());
        assert_eq!(found(&[v2, cpu, v1]), Some("/sys/fs/cgroup/memory".into()));
        assert_eq!(found(&[cpu, v2]), Some("/sys/fs/cgroup".into()));
        assert_eq!(found(&[cpu, "nonsense"]), None);
        let all = [v2, cpu, v1].join("\n");
        let all: Vec<PathBuf> = memory_hierarchies(all.as_bytes()).collect();
        assert_eq!(all, ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"].map(PathBuf::from));
    }

    #[test]
    fn a_group_outside_of_the_mount_is_the_mount() {
        let directory_of_test = tempfile::tempdir().unwrap();
        let at = directory_of_test.path().to_str().unwrap();
        fs::create_dir_all(directory_of_test.path().join("in side")).unwrap();
        let table = format!("31 25 0:27 /docker/a\\040b {at} rw - cgroup2 cgroup2 rw\n");
        let mount = hierarchy(table.as_bytes(), Version::V2, "memory").unwrap();
        for (path, inside) in [
            ("/docker/a b/in side", "in side"),
            ("/docker/a b", ""),
            ("/docker/a b/gone", ""),
            ("/in side", "in side"),
            ("/elsewhere", ""),
            ("odd", ""),
            ("", ""),
        ] {
            assert_eq!(directory(&mount, path), directory_of_test.path().join(inside), "{path}");
        }
    }

    #[test]
    fn nested_groups_end_at_the_mount_and_are_bounded() {
        let directory = tempfile::tempdir().unwrap();
        let deep = "x/".repeat(CGROUP_DEPTH_MAX + 5);
        fs::create_dir_all(directory.path().join(&deep)).unwrap();
        let table = format!("31 25 0:27 / {} rw - cgroup2 cgroup2 rw\n", directory.path().display());
        let of = |path: &str| MemoryGroup::of(&format!("0::/{path}\n4:memory:/\n"), table.as_bytes());
        let paths: Vec<PathBuf> = of("x/x").iter().map(|group| group.directory().to_owned()).collect();
        assert_eq!(paths, ["x/x", "x", ""].map(|path| directory.path().join(path)));
        assert_eq!(of(&deep).len(), CGROUP_DEPTH_MAX);
    }

    #[test]
    fn numbers_and_counters_are_read_as_they_are_written() {
        assert_eq!((parse_number("12\n"), parse_number("max\n")), (Some(12), Some(u64::MAX)));
        for odd in ["", "lots", "-1", "1 2"] {
            assert_eq!(parse_number(odd), None, "{odd}");
        }
        let version_1 = "inactive_file 1\ntotal_inactive_file 20\n";
        assert_eq!(MemoryGroup::counter(version_1, "inactive_file"), 20);
        assert_eq!(MemoryGroup::counter("inactive_file 7\n", "inactive_file"), 7);
        assert_eq!(MemoryGroup::counter("total_inactive_file x\n", "inactive_file"), 0);
    }
}
