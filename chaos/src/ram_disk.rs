//! A disk of memory: a file system of its own on an image in a tmpfs, so that what is measured does not depend on who else uses
//! the machine's disk at that moment.
//!
//! A tmpfs alone would not do: its pages are memory that cannot be evicted, and would be charged to whoever writes them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use testbed::{Failure, Scratch};

/// Size of the disk. Its memory is taken as it is written.
const DISK_BYTES: u64 = 1 << 30;

/// Makes one in `scratch`, whose guard takes it away, and returns where it is mounted.
pub fn create(scratch: &Scratch) -> Result<PathBuf, Failure> {
    let (memory, disk) = (scratch.directory("memory")?, scratch.directory("disk")?);
    run("mount", &["-t", "tmpfs", "-o", "size=1100m,mode=700", "puma-chaos"], &[&memory])?;
    let image = memory.join("image");
    let made = File::create(&image).and_then(|file| file.set_len(DISK_BYTES));
    made.map_err(Failure::attempted(format!("making {}", image.display())))?;
    // Without a journal: nobody pulls the plug of this disk, and commits would only make noise.
    run("mkfs.ext4", &["-q", "-F", "-m", "0", "-O", "^has_journal"], &[&image])?;
    run("mount", &["-o", "loop"], &[&image, &disk])?;
    Ok(disk)
}

/// Runs a program to its end.
pub fn run(program: &str, arguments: &[&str], paths: &[&Path]) -> Result<(), Failure> {
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
