//! The configuration of a mount.

use rustix::mount::MountFlags;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// When a write reaches the backing directory.
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
    /// The backing directory.
    pub source: PathBuf,
    /// Where to mount it; the same path as `source` to mount it over itself.
    pub mountpoint: PathBuf,
    /// When writes reach the backing directory.
    pub write: WriteMode,
    /// Whether the kernel uses the large read-ahead window that pays off with lenders. Images do
    /// not need it, because guests read ahead themselves.
    pub wide_readahead: bool,
    /// Whether the kernel reads backing files by itself if the pool is of no use to them
    /// (passthrough; Linux 6.9, root, writes `Through`).
    pub pass: bool,
    /// Whether idmapped mounts of the mountpoint are possible (Linux 6.12). The kernel then names
    /// the user of a request only if the request creates a file.
    pub idmapped: bool,
    /// Restrictions at the mountpoint, in addition to those of SOURCE's mount: `RDONLY`, `NOSUID`,
    /// `NODEV`, `NOEXEC`.
    pub flags: MountFlags,
    /// Whether file systems that are mounted within `source` are shown. Otherwise their mount
    /// points appear as closed directories.
    pub cross_mounts: bool,
    /// Worker threads: as many requests are handled at once. At least 2.
    pub threads: usize,
    /// How long the kernel may cache attributes. An external change is seen at most so much later.
    /// Zero: the kernel always asks.
    pub attr_timeout: Duration,
    /// How long the kernel may cache attributes if fanotify reports external changes of the file.
    /// The mount then makes the kernel ask again.
    pub reported_attr_timeout: Duration,
    /// How long the kernel may cache the name of a file. This is long, because after it closing a
    /// file drops its last name in the kernel, and with it the inode and all cached pages. External
    /// changes of names are found at open and getattr.
    pub entry_timeout: Duration,
    /// Descriptors that may be spent on holding inodes; beyond it, file handles are used where they
    /// can be. None: [`Config::INODE_DESCRIPTORS_MAX`]. Open files and the daemon's reserve go
    /// first in any case.
    pub inode_descriptors_max: Option<usize>,
    /// How long written pages may stay in the page cache of the backing file before they are
    /// written to the disk and dropped.
    pub written_linger: Duration,
    /// With more bytes than this, such pages are written earlier. Their memory belongs to the
    /// daemon's cgroup.
    pub written_bytes: u64,
}

impl Config {
    /// Each descriptor pins an inode of the backing file system in memory (about 1.5 KiB).
    pub const INODE_DESCRIPTORS_MAX: usize = 256 << 10;
    /// Unreported changes (docs/design/consistency.md, Attributes) are seen after this time.
    pub const REPORTED_ATTR_TIMEOUT: Duration = Duration::from_secs(60);
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
            reported_attr_timeout: Config::REPORTED_ATTR_TIMEOUT,
            entry_timeout: Config::ENTRY_TIMEOUT,
            inode_descriptors_max: None,
            written_linger: Config::WRITTEN_LINGER,
            written_bytes: Config::WRITTEN_BYTES,
        }
    }
}
