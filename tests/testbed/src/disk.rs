//! Slow disks: a limit on the reads, writes and bytes per second of a set of processes on one
//! device.
//!
//! The kernel delays requests; nothing is emulated. Reads of all processes in the groups of one
//! [`SlowDisk`] share its limit, as they would share a slow disk.

use crate::cgroup::{self, Controller, Dir, Version};
use crate::{attempted, mounts};
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A block device in the controllers' form: never a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
    /// Its name in `/sys/block`.
    pub name: String,
}

impl fmt::Display for BlockDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)
    }
}

impl BlockDevice {
    /// The device of a file or directory. Fails with [`io::ErrorKind::Unsupported`] if the file
    /// system has no single device of its own (tmpfs, overlay, network): no disk can be slowed down
    /// there.
    pub fn holding(path: &Path) -> io::Result<BlockDevice> {
        let stat = fs::metadata(path).map_err(attempted(format!("looking at {}", path.display())))?;
        let (mut major, mut minor) = (rustix::fs::major(stat.dev()), rustix::fs::minor(stat.dev()));
        if major == 0 {
            // An anonymous device. btrfs has one although it is on a real device, which is the
            // mount's source.
            let table = mounts::table()?;
            let mount = os::mountinfo::mounts(&table).rev().find(|mount| mount.device == stat.dev());
            let source = mount.and_then(|mount| fs::metadata(mount.source()).ok());
            let Some(source) = source.filter(|source| source.file_type().is_block_device()) else {
                let kind = mount.map_or("unknown", |mount| mount.kind);
                let message = format!(
                    "{} is on a file system ({kind}) that has no disk of its own, so no disk can be slowed down there; \
                     choose a directory on a disk",
                    path.display()
                );
                return Err(io::Error::new(io::ErrorKind::Unsupported, message));
            };
            (major, minor) = (rustix::fs::major(source.rdev()), rustix::fs::minor(source.rdev()));
        }
        whole_device(Path::new("/sys/dev/block"), major, minor)
    }

    fn number(&self) -> String {
        format!("{}:{}", self.major, self.minor)
    }
}

/// The disk of a partition, or the device itself: the controllers refuse partitions.
fn whole_device(sys: &Path, major: u32, minor: u32) -> io::Result<BlockDevice> {
    let look = |path: &Path| attempted(format!("looking up block device {major}:{minor} in {}", path.display()));
    let link = sys.join(format!("{major}:{minor}"));
    let mut directory = fs::canonicalize(&link).map_err(look(&link))?;
    if directory.join("partition").exists() {
        directory.pop();
    }
    let file = directory.join("dev");
    let text = fs::read_to_string(&file).map_err(look(&file))?;
    let number =
        text.trim().split_once(':').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let name = directory.file_name().map(|name| name.to_string_lossy().into_owned());
    match (number, name) {
        (Some((major, minor)), Some(name)) => Ok(BlockDevice { major, minor, name }),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, format!("{} holds {text:?}", file.display()))),
    }
}

/// A device that is slowed down for the groups on it ([`crate::Group::create`]); other processes
/// use it at full speed.
pub struct SlowDisk {
    device: BlockDevice,
    version: Version,
    directory: Arc<Dir>,
    memory_in_same_tree: bool,
}

impl SlowDisk {
    /// Prepares to slow down the device of `path`. It has its full speed until
    /// [`SlowDisk::limit_reads`].
    pub fn create(name: &str, path: &Path) -> io::Result<SlowDisk> {
        let device = BlockDevice::holding(path)?;
        let place = cgroup::place(&[Controller::Disk, Controller::Memory])?;
        let directory = Dir::create(&place.parent, name)?;
        let mut memory_in_same_tree = false;
        if place.version == Version::V2 && directory.has("memory.max") {
            cgroup::hand_down(directory.path(), &["memory"])?;
            memory_in_same_tree = true;
        }
        let disk = SlowDisk { device, version: place.version, directory: Arc::new(directory), memory_in_same_tree };
        // Version 1 counts reads only once a limit was set; this also finds out now whether the
        // device is accepted.
        disk.limit_reads(None)?;
        Ok(disk)
    }

    /// Sets the limit in reads per second, or removes it.
    pub fn limit_reads(&self, reads_per_s: Option<u32>) -> io::Result<()> {
        self.limit("blkio.throttle.read_iops_device", "riops", reads_per_s.map(u64::from), u64::from(u32::MAX))
    }

    /// Sets the limit of reads in bytes per second, or removes it.
    pub fn limit_read_bytes(&self, bytes_per_s: Option<u64>) -> io::Result<()> {
        self.limit("blkio.throttle.read_bps_device", "rbps", bytes_per_s, u64::MAX)
    }

    /// Sets the limit in writes per second, or removes it. The kernel's own writes (a journal,
    /// pages that were dirty for long) belong to no group and are not limited.
    pub fn limit_writes(&self, writes_per_s: Option<u32>) -> io::Result<()> {
        self.limit("blkio.throttle.write_iops_device", "wiops", writes_per_s.map(u64::from), u64::from(u32::MAX))
    }

    /// Sets one limit: by its file on version 1, by its key on version 2.
    fn limit(&self, file: &str, key: &str, limit: Option<u64>, largest: u64) -> io::Result<()> {
        let device = self.device.number();
        let (file, value) = match (self.version, limit) {
            // The largest number means no limit, but counts as one having been set.
            (Version::V1, _) => (file, format!("{device} {}", limit.unwrap_or(largest))),
            (Version::V2, Some(limit)) => ("io.max", format!("{device} {key}={limit}")),
            (Version::V2, None) => ("io.max", format!("{device} {key}=max")),
        };
        cgroup::write(&self.directory.file(file), &value)
    }

    /// Reads of the device by the groups on this disk since it was made.
    pub fn read_count(&self) -> io::Result<u64> {
        self.reads("blkio.throttle.io_serviced", "rios=")
    }

    /// Bytes of these reads.
    pub fn read_bytes(&self) -> io::Result<u64> {
        self.reads("blkio.throttle.io_service_bytes", "rbytes=")
    }

    fn reads(&self, file_v1: &str, key_v2: &str) -> io::Result<u64> {
        let (file, key) = match self.version {
            Version::V1 => (file_v1, None),
            Version::V2 => ("io.stat", Some(key_v2)),
        };
        let text = cgroup::read(&self.directory.file(file))?;
        Ok(reads_in(&text, &self.device.number(), key))
    }

    /// Sets the maximum read-ahead in KiB for files that are opened from now on, until the guard is
    /// dropped. For the whole machine: a device has one value.
    pub fn read_ahead(&self, kib: u32) -> io::Result<ReadAhead> {
        let file = Path::new("/sys/block").join(&self.device.name).join("queue/read_ahead_kb");
        let before = cgroup::read(&file)?.trim().to_owned();
        cgroup::write(&file, &kib.to_string())?;
        Ok(ReadAhead { file, before })
    }

    /// Bytes written to the device since the machine started, by any process: most of it is
    /// writeback of the kernel, which belongs to no group.
    pub fn written_bytes(&self) -> io::Result<u64> {
        let file = Path::new("/sys/block").join(&self.device.name).join("stat");
        let text = fs::read_to_string(&file).map_err(attempted(format!("reading {}", file.display())))?;
        // The seventh number (Documentation/block/stat.rst), in sectors of 512 bytes whatever the
        // device's are.
        let sectors = text.split_whitespace().nth(6).and_then(|sectors| sectors.parse::<u64>().ok());
        let message = || io::Error::new(io::ErrorKind::InvalidData, format!("{} holds {text:?}", file.display()));
        Ok(sectors.ok_or_else(message)? * 512)
    }

    /// The device.
    pub fn device(&self) -> &BlockDevice {
        &self.device
    }

    /// The version of the controller that slows it down.
    pub fn version(&self) -> Version {
        self.version
    }

    pub(crate) fn directory(&self) -> &Arc<Dir> {
        &self.directory
    }

    pub(crate) fn memory_in_same_tree(&self) -> bool {
        self.memory_in_same_tree
    }

    pub(crate) fn processes_file(&self) -> Option<PathBuf> {
        // On version 2 a group with limited children has no processes of its own.
        (self.version == Version::V1).then(|| self.directory.file("cgroup.procs"))
    }
}

/// A device's read-ahead, set back when dropped.
pub struct ReadAhead {
    file: PathBuf,
    before: String,
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        if let Err(error) = cgroup::write(&self.file, &self.before) {
            eprintln!("{error}: write {} to it.", self.before);
        }
    }
}

/// `254:0 Read 17` on version 1, `254:0 rbytes=69632 wbytes=0 rios=17 wios=0 …` on version 2, of
/// which one key is read. No line: no read yet.
fn reads_in(text: &str, device: &str, key_v2: Option<&str>) -> u64 {
    let mut words = text.lines().filter_map(|line| line.split_once(' ')).filter(|(name, _)| *name == device);
    let count = match key_v2 {
        None => words.find_map(|(_, rest)| rest.strip_prefix("Read ")),
        Some(key) => words.find_map(|(_, rest)| rest.split(' ').find_map(|word| word.strip_prefix(key))),
    };
    count.and_then(|digits| digits.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_counted_on_either_version() {
        let v1 = "8:0 Read 3\n254:0 Read 17\n254:0 Write 4\n254:0 Total 21\nTotal 24\n";
        assert_eq!(reads_in(v1, "254:0", None), 17);
        let v2 = "8:0 rbytes=1 wbytes=0 rios=9 wios=0\n254:0 rbytes=69632 wbytes=0 rios=17 wios=0 dbytes=0 dios=0\n";
        assert_eq!(reads_in(v2, "254:0", Some("rios=")), 17);
        assert_eq!(reads_in(v2, "254:0", Some("rbytes=")), 69632);
        assert_eq!(reads_in("254:0 \n", "254:0", Some("rios=")), 0);
        assert_eq!(reads_in("", "254:0", None), 0);
    }

    #[test]
    fn a_partition_stands_for_its_disk() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("devices/vda");
        fs::create_dir_all(disk.join("vda1")).unwrap();
        fs::write(disk.join("dev"), "254:0\n").unwrap();
        fs::write(disk.join("vda1/dev"), "254:1\n").unwrap();
        fs::write(disk.join("vda1/partition"), "1\n").unwrap();
        std::os::unix::fs::symlink("devices/vda", sys.path().join("254:0")).unwrap();
        std::os::unix::fs::symlink("devices/vda/vda1", sys.path().join("254:1")).unwrap();
        let expected = BlockDevice { major: 254, minor: 0, name: "vda".to_owned() };
        assert_eq!(whole_device(sys.path(), 254, 0).unwrap(), expected);
        assert_eq!(whole_device(sys.path(), 254, 1).unwrap(), expected);
        assert!(whole_device(sys.path(), 254, 2).is_err());
    }

    #[test]
    fn a_file_system_in_memory_has_no_disk() {
        // /proc always is a file system without a device.
        let error = BlockDevice::holding(Path::new("/proc")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        assert!(error.to_string().contains("(proc)"), "{error}");
    }
}
