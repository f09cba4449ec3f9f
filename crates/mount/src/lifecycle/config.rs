//! What to mount, where, and how.

use rustix::mount::MountFlags;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// When a write reaches the directory below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WriteMode {
    /// Before it is answered: nothing is lost if the daemon dies.
    Through,
    /// When the kernel writes it back, as with a local disk: small writes are faster, and those of
    /// the last seconds are lost if the daemon dies.
    Back,
}

/// How to mount.
#[derive(Clone, Debug)]
pub struct Config {
    /// The directory below.
    pub source: PathBuf,
    /// Where to mount it; the same path as `source` to mount it over itself.
    pub mountpoint: PathBuf,
    /// When writes reach the directory below.
    pub write: WriteMode,
    /// Whether the kernel reads ahead as far as a lender makes it worth. Guests read ahead
    /// themselves.
    pub wide_readahead: bool,
    /// Whether files that the pool is of no use to are passed through: the kernel reads them below
    /// by itself (Linux 6.9, root, writes `Through`).
    pub pass: bool,
    /// Whether idmapped mounts of it can be made (Linux 6.12). The kernel then says whose a request
    /// is only where that creates a file.
    pub idmapped: bool,
    /// What is forbidden there beyond what the mount below forbids: `RDONLY`, `NOSUID`, `NODEV`,
    /// `NOEXEC`.
    pub flags: MountFlags,
    /// Whether file systems that are mounted below `source` are shown; else their mount points
    /// appear as closed directories.
    pub cross_mounts: bool,
    /// Worker threads: as many requests are handled at once. At least 2.
    pub threads: usize,
    /// How long the kernel believes attributes without asking: how late a change made beside the
    /// mount may be seen. Zero: not at all.
    pub attr_timeout: Duration,
    /// How long the kernel believes attributes without asking where we are told of changes made
    /// beside the mount, and have the kernel ask again.
    pub told_attr_timeout: Duration,
    /// How long the kernel believes the name of a file without asking. Long: once it has passed,
    /// closing a file drops its last name in the kernel, and with it the inode and all that is
    /// cached of it. Names changed beside the mount are found at open and getattr.
    pub entry_timeout: Duration,
    /// Descriptors that may be spent on holding inodes; beyond it, file handles are used where they
    /// can be. None: [`Config::INODE_DESCRIPTORS_MAX`]. Open files and the daemon's reserve go
    /// first in any case.
    pub inode_descriptors_max: Option<usize>,
    /// How long what was written may lie in the page cache below before it is written to the disk
    /// and dropped there.
    pub written_linger: Duration,
    /// So many bytes of that, and it is written sooner. It is memory of the daemon's cgroup.
    pub written_bytes: u64,
}

impl Config {
    /// Each descriptor pins an inode of the file system below in memory (about 1.5 KiB).
    pub const INODE_DESCRIPTORS_MAX: usize = 256 << 10;
    /// What nobody tells of (docs/design/consistency.md, Attributes) is seen when it is over.
    pub const TOLD_ATTR_TIMEOUT: Duration = Duration::from_secs(60);
    /// As long as the kernel leaves dirty pages by themselves (vm.dirty_expire_centisecs).
    pub const WRITTEN_LINGER: Duration = Duration::from_secs(30);
    /// Where there is memory enough.
    pub const WRITTEN_BYTES: u64 = 64 << 20;
    /// A day.
    pub const ENTRY_TIMEOUT: Duration = Duration::from_secs(86_400);
    /// Threads by default: enough to keep a disk busy and to have gets from lenders overlap.
    pub const THREADS: usize = 16;

    /// The defaults.
    pub fn new(source: impl Into<PathBuf>, mountpoint: impl Into<PathBuf>) -> Config {
        Config {
            source: source.into(),
            mountpoint: mountpoint.into(),
            write: WriteMode::Through,
            wide_readahead: true,
            pass: false,
            idmapped: false,
            flags: MountFlags::empty(),
            cross_mounts: false,
            threads: Config::THREADS,
            attr_timeout: Duration::from_secs(1),
            told_attr_timeout: Config::TOLD_ATTR_TIMEOUT,
            entry_timeout: Config::ENTRY_TIMEOUT,
            inode_descriptors_max: None,
            written_linger: Config::WRITTEN_LINGER,
            written_bytes: Config::WRITTEN_BYTES,
        }
    }
}
