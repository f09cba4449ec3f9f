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

use os::cgroup::{MemoryGroup, memory_hierarchies};
use os::{fields, mountinfo, pressure, zoneinfo};
use page::PAGE_SIZE;
use std::io;
use std::path::{Path, PathBuf};

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

/// Reads memory sizes. Finds its cgroups again if the process was moved.
pub struct AvailableMemory {
    proc: PathBuf,
    /// `/proc/self/cgroup` at the time when `groups` were found.
    membership: String,
    /// Innermost first.
    groups: Vec<MemoryGroup>,
}

impl Default for AvailableMemory {
    fn default() -> AvailableMemory {
        AvailableMemory::new(Path::new("/proc"))
    }
}

impl AvailableMemory {
    /// With the proc file system at `proc`.
    pub fn new(proc: &Path) -> AvailableMemory {
        AvailableMemory { proc: proc.to_owned(), membership: String::new(), groups: Vec::new() }
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
    /// As for [`AvailableMemory::read`].
    pub fn read_with_machine(&mut self) -> io::Result<(Memory, Memory)> {
        self.refresh_groups()?;
        let meminfo = std::fs::read_to_string(self.proc.join("meminfo"))?;
        let machine = machine_memory(&meminfo).ok_or(io::ErrorKind::InvalidData)?;
        let mut memory = machine;
        for (limit, free) in self.groups.iter().filter_map(MemoryGroup::room_bytes) {
            memory.total_bytes = memory.total_bytes.min(limit);
            memory.free_bytes = memory.free_bytes.min(free);
        }
        Ok((memory, machine))
    }

    /// Reads the present sizes and the use of memory. Counters that the kernel does not have are 0.
    ///
    /// # Errors
    /// As for [`AvailableMemory::read`].
    pub fn usage(&mut self) -> io::Result<Usage> {
        let memory = self.read()?;
        let text = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        let meminfo = text(self.proc.join("meminfo"));
        let of_machine = |name| fields::bytes(&meminfo, name).unwrap_or(0);
        let mut spare_bytes = of_machine("MemFree").saturating_add(of_machine("Inactive(file)"));
        let mut refaulted_pages = None;
        for group in &self.groups {
            let Some((_, free)) = group.room_bytes() else { continue };
            let stat = group.stat();
            spare_bytes = spare_bytes.min(free.saturating_add(MemoryGroup::counter(&stat, "inactive_file")));
            refaulted_pages.get_or_insert_with(|| MemoryGroup::counter(&stat, REFAULTS));
        }
        Ok(Usage {
            memory,
            spare_bytes: spare_bytes.min(memory.total_bytes),
            refaulted_pages: refaulted_pages
                .unwrap_or_else(|| fields::count(&text(self.proc.join("vmstat")), REFAULTS).unwrap_or(0)),
        })
    }

    /// All memory of the machine, whatever the cgroups allow.
    ///
    /// # Errors
    /// Fails if it cannot be read.
    pub fn machine_bytes(&self) -> io::Result<u64> {
        let meminfo = std::fs::read_to_string(self.proc.join("meminfo"))?;
        Ok(fields::bytes(&meminfo, "MemTotal").ok_or(io::ErrorKind::InvalidData)?)
    }

    /// How long others have waited for memory. A cgroup without a limit is left out: that of a
    /// service contains the lender's own threads alone.
    pub fn stalls(&mut self) -> Stalls {
        // If this fails, the next reading of memory finds the groups.
        let _ = self.refresh_groups();
        let limited = self.groups.iter().find(|group| group.room_bytes().is_some());
        let machine = std::fs::read_to_string(self.proc.join(pressure::MACHINE)).ok();
        Stalls {
            limited_us: limited.and_then(MemoryGroup::stalled_us),
            machine_us: machine.and_then(|text| pressure::stalled_us(&text)),
        }
    }

    /// Memory that the kernel always frees again when it is used: the sum of the zones' high
    /// watermarks. 0 if it cannot be read. Do not call it often: the kernel blocks the zones while
    /// it writes the file.
    pub(crate) fn watermark_bytes(&self) -> u64 {
        std::fs::read_to_string(self.proc.join("zoneinfo")).map_or(0, |zoneinfo| watermark_bytes(&zoneinfo))
    }

    /// Number of lazily freed pages that the kernel has taken since the start, from any process.
    /// `None` if it does not count them.
    pub(crate) fn lazily_freed_pages(&self) -> Option<u64> {
        lazily_freed_pages(&std::fs::read_to_string(self.proc.join("vmstat")).ok()?)
    }

    /// Without cgroups there is no list of them. Any other failure must not look as if there were
    /// no limit.
    fn refresh_groups(&mut self) -> io::Result<()> {
        let read = |name| match std::fs::read(self.proc.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            bytes => bytes,
        };
        let membership = String::from_utf8_lossy(&read("self/cgroup")?).into_owned();
        if membership != self.membership {
            self.groups = MemoryGroup::of(&membership, &read("self/mountinfo")?);
            self.membership = membership;
        }
        Ok(())
    }
}

/// The folders of the files with memory sizes and memory use, for the present cgroup and for any
/// other one to which the process may be moved. The caller denies a lender access to all others.
pub fn memory_folders() -> Vec<PathBuf> {
    let mounts = mountinfo::read().unwrap_or_default();
    ["/proc", "/sys"].map(PathBuf::from).into_iter().chain(memory_hierarchies(&mounts)).collect()
}

/// Pages that were read again after their eviction, in `vmstat` and in `memory.stat`.
const REFAULTS: &str = "workingset_refault_file";

pub(crate) fn machine_memory(meminfo: &str) -> Option<Memory> {
    Some(Memory { total_bytes: fields::bytes(meminfo, "MemTotal")?, free_bytes: fields::bytes(meminfo, "MemFree")? })
}

pub(crate) fn lazily_freed_pages(vmstat: &str) -> Option<u64> {
    fields::count(vmstat, "pglazyfreed")
}

pub(crate) fn watermark_bytes(zoneinfo: &str) -> u64 {
    zoneinfo::high_watermark_pages(zoneinfo).saturating_mul(PAGE_SIZE as u64)
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

        fn available_memory(&self) -> AvailableMemory {
            AvailableMemory::new(&self.directory.path().join("proc"))
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
        let mut available_memory = machine.available_memory();
        assert_eq!(available_memory.read().unwrap(), memory(1000, 400));
        assert_eq!(available_memory.stalls(), Stalls { limited_us: None, machine_us: Some(500) });
        assert_eq!(available_memory.lazily_freed_pages(), Some(42));
    }

    #[test]
    fn version_1_counts_with_all_ancestors() {
        let machine = Machine::new("4:memory:/outer/inner\n1:cpu:/\n", V1_MOUNT);
        let files = |limit, usage| [("memory.limit_in_bytes", limit), ("memory.usage_in_bytes", usage)];
        machine.group("memory/outer/inner", &files("9223372036854771712\n", "1048576\n"));
        machine.group("memory/outer", &files("104857600\n", "73400320\n"));
        // The root has no limit.
        machine.group("memory", &files("9223372036854771712\n", "900000000\n"));
        assert_eq!(machine.available_memory().read().unwrap(), memory(100, 30));
        // Usage above the limit is no available memory, and no overflow.
        machine.group("memory/outer/inner", &files("1048576\n", "2097152\n"));
        assert_eq!(machine.available_memory().read().unwrap(), memory(1, 0));
    }

    #[test]
    fn version_2_counts_and_tells_of_stalls_below_its_limit() {
        let machine = Machine::new("0::/a/b\n", V2_MOUNT);
        machine.group("unified/a/b", &[("memory.max", "max\n"), ("memory.high", "max\n"), ("memory.current", "1\n")]);
        // A service's own group, which contains only the lender.
        machine.group("unified/a/b", &[("memory.pressure", "some total=3\n")]);
        machine.group("unified/a", &[("memory.max", "209715200\n"), ("memory.high", "104857600\n")]);
        machine.group("unified/a", &[("memory.current", "94371840\n"), ("memory.pressure", "some total=77\n")]);
        let mut available_memory = machine.available_memory();
        let before = available_memory.stalls();
        assert_eq!(before, Stalls { limited_us: Some(77), machine_us: Some(500) });
        assert_eq!(available_memory.read_with_machine().unwrap(), (memory(100, 10), memory(1000, 400)));
        machine.group("unified/a", &[("memory.pressure", "some total=87\n")]);
        machine.group("proc/pressure", &[("memory", "some total=520\n")]);
        let grown = available_memory.stalls().since(before);
        assert_eq!((grown, grown.most_us()), (Stalls { limited_us: Some(10), machine_us: Some(20) }, Some(20)));
        machine.group("unified/a", &[("memory.max", "max\n"), ("memory.high", "max\n")]);
        assert_eq!(available_memory.stalls(), Stalls { limited_us: None, machine_us: Some(520) });
        assert_eq!(available_memory.stalls().since(Stalls::default()).most_us(), None);
    }

    #[test]
    fn usage_is_that_of_the_tightest() {
        let usage = |machine: &Machine| {
            let Usage { spare_bytes, refaulted_pages, .. } = machine.available_memory().usage().unwrap();
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
            assert_eq!(machine.available_memory().read().unwrap(), memory(50, 30), "{path}");
        }
    }

    /// The usual case of containers: the process and the mount are at the root of a cgroup
    /// namespace, which is the container's.
    #[test]
    fn the_root_of_a_namespace_has_its_limit() {
        let version_2 = [("memory.max", "52428800\n"), ("memory.high", "max\n"), ("memory.current", "20971520\n")];
        let machine = Machine::new("0::/\n", V2_MOUNT);
        machine.group("unified", &version_2);
        assert_eq!(machine.available_memory().read().unwrap(), memory(50, 30));
        let version_1 = [("memory.limit_in_bytes", "52428800\n"), ("memory.usage_in_bytes", "20971520\n")];
        let machine = Machine::new("4:memory:/inner\n", V1_MOUNT);
        machine.group("memory/inner", &[]);
        machine.group("memory", &version_1);
        assert_eq!(machine.available_memory().read().unwrap(), memory(50, 30));
        // The machine's own root, in both versions.
        let machine = Machine::new("0::/\n4:memory:/\n", &[V1_MOUNT, V2_MOUNT].concat());
        machine.group("unified", &[("memory.stat", "anon 1\n"), ("memory.pressure", "some total=7\n")]);
        machine.group(
            "memory",
            &[("memory.limit_in_bytes", "9223372036854771712"), ("memory.usage_in_bytes", "900000000")],
        );
        assert_eq!(machine.available_memory().read().unwrap(), memory(1000, 400));
    }

    #[test]
    fn a_process_that_is_moved_is_followed() {
        let machine = Machine::new("4:memory:/\n", V1_MOUNT);
        machine.group("memory/x", &[("memory.limit_in_bytes", "1048576"), ("memory.usage_in_bytes", "0")]);
        let mut available_memory = machine.available_memory();
        assert_eq!(available_memory.read().unwrap(), memory(1000, 400));
        write(machine.directory.path().join("proc/self/cgroup"), "4:memory:/x\n").unwrap();
        assert_eq!(available_memory.read().unwrap(), memory(1, 1));
    }

    #[test]
    fn nonsense_bounds_nothing_and_no_meminfo_is_an_error() {
        let machine = Machine::new("garbage\n4:memory\n4:memory:/x\n0::\n", V1_MOUNT);
        machine.group("memory/x", &[("memory.limit_in_bytes", "lots"), ("memory.usage_in_bytes", "-1")]);
        assert_eq!(machine.available_memory().read().unwrap(), memory(1000, 400));
        write(machine.directory.path().join("proc/meminfo"), "MemTotal: what kB\n").unwrap();
        assert!(machine.available_memory().read().is_err());
        assert!(AvailableMemory::new(Path::new("/nonexistent")).read().is_err());
    }

    #[test]
    fn what_the_kernel_keeps_free_is_the_sum_of_its_zones() {
        let max = u64::MAX;
        assert_eq!(watermark_bytes(&format!("high {max}\nhigh {max}\n")), max);
        let machine = Machine::new("", "");
        assert_eq!(machine.available_memory().watermark_bytes(), 0);
        machine.group("proc", &[("zoneinfo", "  pages free  3840\n  high  18\n  high  4120\n  high: 9\n")]);
        assert_eq!(machine.available_memory().watermark_bytes(), 4138 * 4096);
    }

    #[test]
    fn this_machine_can_be_read() {
        let memory = AvailableMemory::default().read().unwrap();
        assert!(memory.free_bytes <= memory.total_bytes && memory.total_bytes > 0, "{memory:?}");
    }
}
