//! A disk in memory: a file system of its own on an image in a tmpfs, so that a test does not
//! depend on other users of the machine's disk.
//!
//! A tmpfs alone is not enough: its pages are memory that cannot be evicted, and would be charged
//! to the process that writes them.

use crate::failure::Failure;
use crate::scratch::Scratch;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

/// Bytes of the disk's tmpfs in addition to the image, for other files of the caller.
const SPARE_BYTES: u64 = 100 << 20;

/// The file system on a disk of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// ext4, without a journal: this disk never loses power, and commits would only add noise.
    Ext4,
    /// XFS; its images have at least 300 MiB.
    Xfs,
    /// Btrfs; its images have at least 109 MiB.
    Btrfs,
}

impl FileSystem {
    /// All of them.
    pub const ALL: [FileSystem; 3] = [FileSystem::Ext4, FileSystem::Xfs, FileSystem::Btrfs];

    /// Its name, as mount(8) takes it.
    pub fn name(self) -> &'static str {
        match self {
            FileSystem::Ext4 => "ext4",
            FileSystem::Xfs => "xfs",
            FileSystem::Btrfs => "btrfs",
        }
    }

    /// The program that makes it, which must be in `PATH`.
    pub fn maker(self) -> String {
        format!("mkfs.{}", self.name())
    }

    fn options(self) -> &'static [&'static str] {
        match self {
            FileSystem::Ext4 => &["-q", "-F", "-m", "0", "-O", "^has_journal"],
            FileSystem::Xfs => &["-q", "-f"],
            FileSystem::Btrfs => &["-q", "-f"],
        }
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for FileSystem {
    type Err = String;

    fn from_str(name: &str) -> Result<FileSystem, String> {
        let found = FileSystem::ALL.into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| format!("there is no {name:?}; choose from ext4, xfs, btrfs"))
    }
}

/// A mounted disk in memory. The guard of its scratch directory removes it.
pub struct RamDisk {
    /// The mount point of its file system.
    pub path: PathBuf,
    /// The tmpfs that holds the image. A file here is memory, too.
    pub memory: PathBuf,
}

impl RamDisk {
    /// Makes a disk of `bytes` in `scratch`. Its memory is allocated when it is written.
    ///
    /// # Errors
    /// Fails if one of the programs mount and mkfs fails.
    pub fn create(scratch: &Scratch, kind: FileSystem, bytes: u64) -> Result<RamDisk, Failure> {
        let (memory, path) = (scratch.directory("memory")?, scratch.directory("disk")?);
        let options = format!("size={},mode=700", bytes + SPARE_BYTES);
        run_program("mount", &["-t", "tmpfs", "-o", &options, "puma-ram-disk"], &[&memory])?;
        let image = memory.join("image");
        let made = File::create(&image).and_then(|file| file.set_len(bytes));
        made.map_err(Failure::attempted(format!("making {}", image.display())))?;
        run_program(&kind.maker(), kind.options(), &[&image])?;
        run_program("mount", &["-t", kind.name(), "-o", "loop"], &[&image, &path])?;
        Ok(RamDisk { path, memory })
    }
}

/// Runs a program, with `paths` behind its arguments, to its end.
///
/// # Errors
/// Fails if it cannot be started, or fails; with its standard error.
pub fn run_program(program: &str, arguments: &[&str], paths: &[&Path]) -> Result<(), Failure> {
    let mut command = Command::new(program);
    command.args(arguments).args(paths).stdin(Stdio::null());
    let output =
        command.output().map_err(Failure::attempted(format!("running {program}; `make test-deps` installs it")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Failure::Problem(format!("{program} {} failed: {}", arguments.join(" "), said.trim())))
}
