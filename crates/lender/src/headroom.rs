//! Available memory of the machine and of the memory cgroups that contain this process.
//!
//! The tightest of them counts: `MemFree` of the machine, and for the process's cgroup and each one
//! above it the limit less the usage, in version 1 and version 2 of cgroups. The page cache counts
//! as used. So do lent pages, even those that the kernel may take: this keeps the lender from
//! displacing anybody's page cache.
//!
//! This module only reads files, below a root that tests can choose. A file that is missing or
//! cannot be parsed sets no bound. But without `meminfo` there is an error: then nothing is known,
//! and the caller must not grow.

use page::PAGE_SIZE;
use std::io;
use std::path::{Path, PathBuf};

/// Limits from here on mean "none": version 1 shows the largest possible number of pages for that.
const UNLIMITED_BYTES: u64 = 1 << 60;

/// Nested cgroups that are read. Nobody nests them deeper, so the kernel's limit does not matter.
const CGROUP_DEPTH_MAX: usize = 64;

/// Total and free memory in bytes, of the tightest limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The maximum that this process could have: the machine's memory, or the smallest limit.
    pub total_bytes: u64,
    /// Unused memory.
    pub free_bytes: u64,
}

/// The use of memory, for planning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Total and free memory.
    pub memory: Memory,
    /// Free memory, and page cache that was used once, or not recently; of the tightest limit.
    pub spare_bytes: u64,
    /// Pages that were read again after their eviction, since the start: of the innermost cgroup
    /// with a limit, or of the machine.
    pub refaulted_pages: u64,
}

/// Microseconds since the start for which some task waited for memory, if the kernel reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    /// In the innermost cgroup with a limit.
    pub limited_us: Option<u64>,
    /// On the whole machine.
    pub machine_us: Option<u64>,
}

impl Stalls {
    /// The difference of both to `before`.
    pub fn since(self, before: Stalls) -> Stalls {
        let grown = |now: Option<u64>, before: Option<u64>| Some(now?.saturating_sub(before?));
        Stalls {
            limited_us: grown(self.limited_us, before.limited_us),
            machine_us: grown(self.machine_us, before.machine_us),
        }
    }

    /// The larger of the two. `None`: the kernel reports nothing.
    pub fn most_us(self) -> Option<u64> {
        self.limited_us.max(self.machine_us)
    }
}

/// The files of a cgroup with its limit and its usage.
#[derive(Clone, Copy)]
struct Files {
    limits: &'static [&'static str],
    usage: &'static str,
    /// The file with stalls due to a lack of memory, if there is one.
    pressure: Option<&'static str>,
}

const VERSION_1: Files = Files { limits: &["memory.limit_in_bytes"], usage: "memory.usage_in_bytes", pressure: None };
/// Above `memory.high` a cgroup is slowed down, so it is a limit as well.
const VERSION_2: Files =
    Files { limits: &["memory.max", "memory.high"], usage: "memory.current", pressure: Some("memory.pressure") };

struct Group {
    directory: PathBuf,
    files: Files,
}

impl Group {
    /// Its limit, and the free memory below it. `None`: it has no limit.
    fn room_bytes(&self) -> Option<(u64, u64)> {
        let number = |file: &&str| number(&self.directory.join(file)).filter(|bytes| *bytes < UNLIMITED_BYTES);
        let limit = self.files.limits.iter().filter_map(number).min()?;
        Some((limit, limit.saturating_sub(number(&self.files.usage)?)))
    }
}

/// Reads memory sizes. Finds its cgroups again if the process was moved.
pub struct Headroom {
    proc: PathBuf,
    /// `/proc/self/cgroup` at the time when `groups` were found.
    membership: String,
    /// Innermost first.
    groups: Vec<Group>,
}

impl Default for Headroom {
    fn default() -> Headroom {
        Headroom::new(Path::new("/proc"))
    }
}

impl Headroom {
    /// With the proc file system at `proc`.
    pub fn new(proc: &Path) -> Headroom {
        Headroom { proc: proc.to_owned(), membership: String::new(), groups: Vec::new() }
    }

    /// Reads the present sizes.
    ///
    /// # Errors
    /// Fails if the machine's memory, or the list of cgroups, cannot be read.
    pub fn read(&mut self) -> io::Result<Memory> {
        self.read_with_machine().map(|(memory, _)| memory)
    }

    /// Reads the present sizes, and those of the machine without its cgroups.
    ///
    /// # Errors
    /// As for [`Headroom::read`].
    pub fn read_with_machine(&mut self) -> io::Result<(Memory, Memory)> {
        self.refresh_groups()?;
        let meminfo = std::fs::read_to_string(self.proc.join("meminfo"))?;
        let machine = machine_memory(&meminfo).ok_or(io::ErrorKind::InvalidData)?;
        let mut memory = machine;
        for (limit, free) in self.groups.iter().filter_map(Group::room_bytes) {
            memory.total_bytes = memory.total_bytes.min(limit);
            memory.free_bytes = memory.free_bytes.min(free);
        }
        Ok((memory, machine))
    }

    /// Reads the present sizes and the use of memory. Counters that the kernel does not have are 0.
    ///
    /// # Errors
    /// As for [`Headroom::read`].
    pub fn usage(&mut self) -> io::Result<Usage> {
        let memory = self.read()?;
        let text = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        let meminfo = text(self.proc.join("meminfo"));
        let of_machine = |name| meminfo_bytes(&meminfo, name).unwrap_or(0);
        let mut spare_bytes = of_machine("MemFree:").saturating_add(of_machine("Inactive(file):"));
        let mut refaulted_pages = None;
        for group in &self.groups {
            let Some((_, free)) = group.room_bytes() else { continue };
            let stat = text(group.directory.join("memory.stat"));
            spare_bytes = spare_bytes.min(free.saturating_add(counted(&stat, "inactive_file")));
            refaulted_pages.get_or_insert_with(|| counted(&stat, REFAULTS));
        }
        Ok(Usage {
            memory,
            spare_bytes: spare_bytes.min(memory.total_bytes),
            refaulted_pages: refaulted_pages.unwrap_or_else(|| counted(&text(self.proc.join("vmstat")), REFAULTS)),
        })
    }

    /// All memory of the machine, whatever the cgroups allow.
    ///
    /// # Errors
    /// Fails if it cannot be read.
    pub fn machine_bytes(&self) -> io::Result<u64> {
        let meminfo = std::fs::read_to_string(self.proc.join("meminfo"))?;
        Ok(meminfo_bytes(&meminfo, "MemTotal:").ok_or(io::ErrorKind::InvalidData)?)
    }

    /// How long others have waited for memory. A cgroup without a limit is left out: that of a
    /// service contains the lender's own threads alone.
    pub fn stalls(&mut self) -> Stalls {
        let told = |path: PathBuf| stalled_us(&std::fs::read_to_string(path).ok()?);
        // If this fails, the next reading of memory finds the groups.
        let _ = self.refresh_groups();
        let limited = self.groups.iter().find(|group| group.room_bytes().is_some());
        Stalls {
            limited_us: limited.and_then(|group| told(group.directory.join(group.files.pressure?))),
            machine_us: told(self.proc.join("pressure/memory")),
        }
    }

    /// Memory that the kernel always frees again when it is used: the sum of the zones' high
    /// watermarks. 0 if it cannot be read. Do not call it often: the kernel blocks the zones while
    /// it writes the file.
    pub fn watermark_bytes(&self) -> u64 {
        std::fs::read_to_string(self.proc.join("zoneinfo")).map_or(0, |zoneinfo| watermark_bytes(&zoneinfo))
    }

    /// Number of lazily freed pages that the kernel has taken since the start, from any process.
    /// `None` if it does not count them.
    pub fn lazily_freed_pages(&self) -> Option<u64> {
        lazily_freed_pages(&std::fs::read_to_string(self.proc.join("vmstat")).ok()?)
    }

    /// Without cgroups there is no list of them. Any other failure must not look as if there were
    /// no limit.
    fn refresh_groups(&mut self) -> io::Result<()> {
        let read = |name| match std::fs::read(self.proc.join(name)) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            Err(error) => Err(error),
        };
        let membership = read("self/cgroup")?;
        if membership != self.membership {
            self.groups = find_groups(&membership, &read("self/mountinfo")?);
            self.membership = membership;
        }
        Ok(())
    }
}

/// The folders of the files with memory sizes and memory use, for the present cgroup and for any
/// other one to which the process may be moved. The caller denies a lender access to all others.
pub fn memory_folders() -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let cgroups =
        mounts.lines().filter_map(|line| cgroup_mount(line, "cgroup2").or_else(|| cgroup_mount(line, "cgroup")));
    ["/proc", "/sys"].map(PathBuf::from).into_iter().chain(cgroups.map(|(_, mount_point)| mount_point)).collect()
}

/// The mount point of the cgroup hierarchy that governs memory: version 1 with the memory
/// controller, else version 2.
///
/// # Errors
/// Fails if there is none.
pub fn memory_hierarchy() -> io::Result<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    hierarchy(&mounts).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "no control groups are mounted here (with the memory controller)")
    })
}

fn hierarchy(mounts: &str) -> Option<PathBuf> {
    let of = |kind| mounts.lines().find_map(|line| cgroup_mount(line, kind));
    of("cgroup").or_else(|| of("cgroup2")).map(|(_, mount_point)| mount_point)
}

/// The directories of the files of [`find_groups`].
pub(crate) fn group_directories(membership: &str, mounts: &str) -> Vec<PathBuf> {
    find_groups(membership, mounts).into_iter().map(|group| group.directory).collect()
}

/// The cgroups with memory files, the innermost of each hierarchy first, up to the mount. A
/// hierarchy's own root has no limit, and its files show that. But in a cgroup namespace the
/// apparent root is the container's own group, whose limit counts.
fn find_groups(membership: &str, mounts: &str) -> Vec<Group> {
    let mut groups = Vec::new();
    for line in membership.lines() {
        // hierarchy:controllers:path; version 2 is hierarchy 0, without controllers.
        let mut fields = line.splitn(3, ':');
        let (Some(hierarchy), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let (kind, files) = match (hierarchy, controllers) {
            ("0", "") => ("cgroup2", VERSION_2),
            (_, controllers) if controllers.split(',').any(|name| name == "memory") => ("cgroup", VERSION_1),
            _ => continue,
        };
        let Some((root, mount_point)) = mounts.lines().find_map(|line| cgroup_mount(line, kind)) else { continue };
        // In a container the mount may show only a part of the tree. Groups above it cannot be
        // read.
        let inside = match Path::new(path).strip_prefix(root) {
            Ok(inside) => inside,
            Err(_) => Path::new(path).strip_prefix("/").unwrap_or(Path::new("")),
        };
        let mut directory = mount_point.join(inside);
        if !directory.is_dir() {
            directory = mount_point.clone();
        }
        for _ in 0..CGROUP_DEPTH_MAX {
            groups.push(Group { directory: directory.clone(), files });
            if directory == mount_point || !directory.pop() {
                break;
            }
        }
    }
    groups
}

/// Root and mount point, if this line of `mountinfo` is a mount of the kind of cgroup that governs
/// memory.
fn cgroup_mount<'a>(line: &'a str, kind: &str) -> Option<(&'a str, PathBuf)> {
    // id parent major:minor root mount-point options [tags] - type source super-options
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (root, mount_point) = (left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (found, options) = (right.next()?, right.nth(1)?);
    let governs = kind == "cgroup2" || options.split(',').any(|option| option == "memory");
    // Spaces are written in octal; nobody mounts cgroups at other unusual names.
    (found == kind && governs).then(|| (root, PathBuf::from(mount_point.replace("\\040", " "))))
}

pub(crate) fn machine_memory(meminfo: &str) -> Option<Memory> {
    Some(Memory { total_bytes: meminfo_bytes(meminfo, "MemTotal:")?, free_bytes: meminfo_bytes(meminfo, "MemFree:")? })
}

fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

const REFAULTS: &str = "workingset_refault_file";

/// In version 1 of cgroups, the counters that include all groups below have another name.
fn counted(stat: &str, name: &str) -> u64 {
    let of = |line: &str, prefix: &str| {
        line.strip_prefix(prefix)?.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok()
    };
    let find = |prefix: &str| stat.lines().find_map(|line| of(line, prefix));
    find("total_").or_else(|| find("")).unwrap_or(0)
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

pub(crate) fn lazily_freed_pages(vmstat: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix("pglazyfreed ")?.trim().parse().ok())
}

/// Each zone has a line of its own; the limits of its processors' lists have other names (`high:`,
/// `high_min:`).
pub(crate) fn watermark_bytes(zoneinfo: &str) -> u64 {
    let pages = |line: &str| line.trim_start().strip_prefix("high ")?.trim().parse::<u64>().ok();
    zoneinfo.lines().filter_map(pages).fold(0, u64::saturating_add).saturating_mul(PAGE_SIZE as u64)
}

pub(crate) fn stalled_us(pressure: &str) -> Option<u64> {
    let some = pressure.lines().find(|line| line.starts_with("some "))?;
    some.split(' ').find_map(|field| field.strip_prefix("total=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, write};

    const MIB: u64 = 1 << 20;

    /// A proc file system of 1000 MiB, 400 of them free, and a place for cgroups.
    struct Machine {
        directory: tempfile::TempDir,
    }

    impl Machine {
        fn new(membership: &str, mounts: &str) -> Machine {
            let directory = tempfile::tempdir().unwrap();
            let root = directory.path();
            create_dir_all(root.join("proc/self")).unwrap();
            create_dir_all(root.join("proc/pressure")).unwrap();
            write(root.join("proc/meminfo"), "MemTotal:  1024000 kB\nMemFree:    409600 kB\nMemAvailable: 1 kB\n")
                .unwrap();
            write(root.join("proc/vmstat"), "pglazyfree 7\npglazyfreed 42\n").unwrap();
            write(root.join("proc/pressure/memory"), "some avg10=0.00 total=500\nfull total=1\n").unwrap();
            write(root.join("proc/self/cgroup"), membership).unwrap();
            write(root.join("proc/self/mountinfo"), mounts.replace("ROOT", root.to_str().unwrap())).unwrap();
            Machine { directory }
        }

        fn group(&self, path: &str, files: &[(&str, &str)]) {
            let group = self.directory.path().join(path);
            create_dir_all(&group).unwrap();
            files.iter().for_each(|(name, text)| write(group.join(name), text).unwrap());
        }

        fn headroom(&self) -> Headroom {
            Headroom::new(&self.directory.path().join("proc"))
        }
    }

    const V1_MOUNT: &str = "30 25 0:26 / ROOT/cpu rw - cgroup cgroup rw,cpu\n\
                            31 25 0:27 / ROOT/memory rw shared:1 - cgroup cgroup rw,memory\n";
    const V2_MOUNT: &str = "30 25 0:26 / ROOT/unified rw - cgroup2 cgroup2 rw\n";

    fn memory(total_mib: u64, free_mib: u64) -> Memory {
        Memory { total_bytes: total_mib * MIB, free_bytes: free_mib * MIB }
    }

    #[test]
    fn without_cgroups_the_machine_counts() {
        let machine = Machine::new("", "");
        let mut headroom = machine.headroom();
        assert_eq!(headroom.read().unwrap(), memory(1000, 400));
        assert_eq!(headroom.stalls(), Stalls { limited_us: None, machine_us: Some(500) });
        assert_eq!(headroom.lazily_freed_pages(), Some(42));
    }

    #[test]
    fn version_1_counts_with_all_ancestors() {
        let machine = Machine::new("4:memory:/outer/inner\n1:cpu:/\n", V1_MOUNT);
        let files = |limit, usage| [("memory.limit_in_bytes", limit), ("memory.usage_in_bytes", usage)];
        machine.group("memory/outer/inner", &files("9223372036854771712\n", "1048576\n"));
        machine.group("memory/outer", &files("104857600\n", "73400320\n"));
        // The root has no limit.
        machine.group("memory", &files("9223372036854771712\n", "900000000\n"));
        assert_eq!(machine.headroom().read().unwrap(), memory(100, 30));
        // Usage above the limit is no headroom, and no overflow.
        machine.group("memory/outer/inner", &files("1048576\n", "2097152\n"));
        assert_eq!(machine.headroom().read().unwrap(), memory(1, 0));
    }

    #[test]
    fn version_2_counts_and_tells_of_stalls_below_its_limit() {
        let machine = Machine::new("0::/a/b\n", V2_MOUNT);
        machine.group("unified/a/b", &[("memory.max", "max\n"), ("memory.high", "max\n"), ("memory.current", "1\n")]);
        // A service's own group, which contains only the lender.
        machine.group("unified/a/b", &[("memory.pressure", "some total=3\n")]);
        machine.group("unified/a", &[("memory.max", "209715200\n"), ("memory.high", "104857600\n")]);
        machine.group("unified/a", &[("memory.current", "94371840\n"), ("memory.pressure", "some total=77\n")]);
        let mut headroom = machine.headroom();
        let before = headroom.stalls();
        assert_eq!(before, Stalls { limited_us: Some(77), machine_us: Some(500) });
        assert_eq!(headroom.read_with_machine().unwrap(), (memory(100, 10), memory(1000, 400)));
        machine.group("unified/a", &[("memory.pressure", "some total=87\n")]);
        machine.group("proc/pressure", &[("memory", "some total=520\n")]);
        let grown = headroom.stalls().since(before);
        assert_eq!((grown, grown.most_us()), (Stalls { limited_us: Some(10), machine_us: Some(20) }, Some(20)));
        machine.group("unified/a", &[("memory.max", "max\n"), ("memory.high", "max\n")]);
        assert_eq!(headroom.stalls(), Stalls { limited_us: None, machine_us: Some(520) });
        assert_eq!(headroom.stalls().since(Stalls::default()).most_us(), None);
    }

    #[test]
    fn usage_is_that_of_the_tightest() {
        let usage = |machine: &Machine| {
            let Usage { spare_bytes, refaulted_pages, .. } = machine.headroom().usage().unwrap();
            (spare_bytes / MIB, refaulted_pages)
        };
        let machine = Machine::new("4:memory:/outer/inner\n", V1_MOUNT);
        write(
            machine.directory.path().join("proc/meminfo"),
            "MemTotal:  1024000 kB\nMemFree:    409600 kB\nInactive(file):  102400 kB\n",
        )
        .unwrap();
        write(machine.directory.path().join("proc/vmstat"), "workingset_refault_anon 1\nworkingset_refault_file 9\n")
            .unwrap();
        machine.group("memory/outer/inner", &[]);
        assert_eq!(usage(&machine), (500, 9));
        let stat = (
            "memory.stat",
            "inactive_file 1\nworkingset_refault_file 1\ntotal_inactive_file 20971520\ntotal_workingset_refault_file 5\n",
        );
        machine.group(
            "memory/outer",
            &[("memory.limit_in_bytes", "104857600"), ("memory.usage_in_bytes", "73400320"), stat],
        );
        assert_eq!(usage(&machine), (50, 5));
        let machine = Machine::new("0::/a\n", V2_MOUNT);
        machine
            .group("unified/a", &[("memory.max", "104857600"), ("memory.high", "max"), ("memory.current", "94371840")]);
        machine.group("unified/a", &[("memory.stat", "inactive_file 94371840\nworkingset_refault_file 7\n")]);
        assert_eq!(usage(&machine), (100, 7), "no more than all");
    }

    #[test]
    fn a_part_of_the_tree_is_enough() {
        // In a container the mount's root is the container's own cgroup, whose limit counts.
        let mounts = "31 25 0:27 /docker/abc ROOT/memory rw - cgroup cgroup rw,memory\n";
        for path in ["/docker/abc", "/docker/abc/gone"] {
            let machine = Machine::new(&format!("4:memory:{path}\n"), mounts);
            let files = [("memory.limit_in_bytes", "52428800"), ("memory.usage_in_bytes", "20971520")];
            machine.group("memory", &files);
            assert_eq!(machine.headroom().read().unwrap(), memory(50, 30), "{path}");
        }
    }

    /// The usual case of containers: the process and the mount are at the root of a cgroup
    /// namespace, which is the container's.
    #[test]
    fn the_root_of_a_namespace_has_its_limit() {
        let version_2 = [("memory.max", "52428800\n"), ("memory.high", "max\n"), ("memory.current", "20971520\n")];
        let machine = Machine::new("0::/\n", V2_MOUNT);
        machine.group("unified", &version_2);
        assert_eq!(machine.headroom().read().unwrap(), memory(50, 30));
        let version_1 = [("memory.limit_in_bytes", "52428800\n"), ("memory.usage_in_bytes", "20971520\n")];
        let machine = Machine::new("4:memory:/inner\n", V1_MOUNT);
        machine.group("memory/inner", &[]);
        machine.group("memory", &version_1);
        assert_eq!(machine.headroom().read().unwrap(), memory(50, 30));
        // The machine's own root, in both versions.
        let machine = Machine::new("0::/\n4:memory:/\n", &[V1_MOUNT, V2_MOUNT].concat());
        machine.group("unified", &[("memory.stat", "anon 1\n"), ("memory.pressure", "some total=7\n")]);
        machine.group(
            "memory",
            &[("memory.limit_in_bytes", "9223372036854771712"), ("memory.usage_in_bytes", "900000000")],
        );
        assert_eq!(machine.headroom().read().unwrap(), memory(1000, 400));
    }

    #[test]
    fn a_process_that_is_moved_is_followed() {
        let machine = Machine::new("4:memory:/\n", V1_MOUNT);
        machine.group("memory/x", &[("memory.limit_in_bytes", "1048576"), ("memory.usage_in_bytes", "0")]);
        let mut headroom = machine.headroom();
        assert_eq!(headroom.read().unwrap(), memory(1000, 400));
        write(machine.directory.path().join("proc/self/cgroup"), "4:memory:/x\n").unwrap();
        assert_eq!(headroom.read().unwrap(), memory(1, 1));
    }

    #[test]
    fn nonsense_bounds_nothing_and_no_meminfo_is_an_error() {
        let machine = Machine::new("garbage\n4:memory\n4:memory:/x\n0::\n", V1_MOUNT);
        machine.group("memory/x", &[("memory.limit_in_bytes", "lots"), ("memory.usage_in_bytes", "-1")]);
        assert_eq!(machine.headroom().read().unwrap(), memory(1000, 400));
        write(machine.directory.path().join("proc/meminfo"), "MemTotal: what kB\n").unwrap();
        assert!(machine.headroom().read().is_err());
        assert!(Headroom::new(Path::new("/nonexistent")).read().is_err());
    }

    /// Lines from Linux 6.18 on a machine of 20 GiB, of three zones and one processor.
    const ZONEINFO: &str = "\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 99625
  pages free     3840
        boost    0
        min      12
        low      15
        high     18
        promo    21
        spanned  4095
        protection: (0, 3019, 19787, 19787, 19787)
      nr_free_pages 3840
  pagesets
    cpu: 0
              count:    0
              high:     0
              batch:    1
              high_min: 7
              high_max: 240
  vm stats threshold: 4
Node 0, zone    DMA32
  pages free     772917
        boost    0
        min      2576
        low      3348
        high     4120
        promo    4892
  pagesets
    cpu: 0
              count:    0
              high:     1674
              batch:    63
              high_min: 1674
              high_max: 48307
  vm stats threshold: 24
Node 0, zone  Movable
  pages free     0
        boost    0
        min      32
        low      32
        high     32
        promo    32
        protection: (0, 0, 0, 0, 0)
";

    #[test]
    fn what_the_kernel_keeps_free_is_the_sum_of_its_zones() {
        assert_eq!(watermark_bytes(ZONEINFO), (18 + 4120 + 32) * 4096);
        let max = u64::MAX;
        for (text, bytes) in [("", 0), ("high\nhigh \nhigh -1\nhigh x\n high: 9", 0), ("high 1\nhigh   2 ", 3 * 4096)] {
            assert_eq!(watermark_bytes(text), bytes, "{text:?}");
        }
        assert_eq!(watermark_bytes(&format!("high {max}\nhigh {max}\n")), max);
        let machine = Machine::new("", "");
        assert_eq!(machine.headroom().watermark_bytes(), 0);
        machine.group("proc", &[("zoneinfo", ZONEINFO)]);
        assert_eq!(machine.headroom().watermark_bytes(), 4170 * 4096);
    }

    #[test]
    fn this_machine_can_be_read() {
        let memory = Headroom::default().read().unwrap();
        assert!(memory.free_bytes <= memory.total_bytes && memory.total_bytes > 0, "{memory:?}");
    }

    #[test]
    fn the_hierarchy_of_memory_is_found() {
        let v1 = "36 35 0:31 / /sys/fs/cgroup/memory rw,relatime shared:1 - cgroup cgroup rw,memory";
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw";
        let cpu = "37 35 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct";
        let found = |lines: &[&str]| hierarchy(&lines.join("\n"));
        assert_eq!(found(&[v2, cpu, v1]), Some("/sys/fs/cgroup/memory".into()));
        assert_eq!(found(&[cpu, v2]), Some("/sys/fs/cgroup".into()));
        assert_eq!(found(&[cpu, "nonsense"]), None);
    }
}
