//! Mounts, parsed from `/proc/self/mountinfo`.

use crate::attempted;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mount.
pub(crate) struct Mount {
    /// Device of its files, as in `stat`.
    pub(crate) major: u32,
    pub(crate) minor: u32,
    /// The mounted directory of its file system.
    pub(crate) root: PathBuf,
    /// The mount point.
    pub(crate) at: PathBuf,
    /// Type of the file system.
    pub(crate) kind: String,
    /// The file system's name for its source: a device, for most that have one.
    pub(crate) source: PathBuf,
    /// Options of the file system, as opposed to those of the mount.
    pub(crate) super_options: String,
}

/// Every mount that this process sees, the oldest first.
pub(crate) fn list() -> io::Result<Vec<Mount>> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").map_err(attempted("reading /proc/self/mountinfo"))?;
    Ok(text.lines().filter_map(parse).collect())
}

/// Detaches all mounts at or under `directory`, the latest first. Returns those that could not be
/// detached.
pub(crate) fn detach_under(directory: &Path) -> Vec<PathBuf> {
    let Ok(mounts) = list() else { return Vec::new() };
    let inside = mounts.into_iter().rev().filter(|mount| mount.at.starts_with(directory));
    inside.filter(|mount| !detach(&mount.at)).map(|mount| mount.at).collect()
}

fn detach(at: &Path) -> bool {
    use rustix::mount::{UnmountFlags, unmount};
    if unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {
        return true;
    }
    // Without root only the setuid program may do it, and only for mounts made with its help.
    let status = std::process::Command::new("fusermount3").args(["-u", "-z", "-q", "--"]).arg(at).status();
    status.is_ok_and(|status| status.success())
}

/// `36 35 98:0 /root /mount/point rw,noatime master:1 - ext4 /dev/sda1 rw,errors=continue`, with
/// any number of fields before the lone dash.
fn parse(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(2);
    let (major, minor) = left.next()?.split_once(':')?;
    let (root, at) = (left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (kind, source) = (right.next()?, right.next()?);
    Some(Mount {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        root: unescape(root),
        at: unescape(at),
        kind: kind.to_owned(),
        source: unescape(source),
        super_options: right.next().unwrap_or_default().to_owned(),
    })
}

/// Decodes the kernel's `\040` for a blank, and the like.
fn unescape(field: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let [first, tail @ ..] = rest {
        let octal = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_every_shape_are_understood() {
        let mount =
            parse(r"31 23 0:28 / /mnt/a\040b\134 rw,relatime shared:1 master:2 - ext4 /dev/vda1 rw,discard").unwrap();
        assert_eq!((mount.major, mount.minor), (0, 28));
        assert_eq!(mount.at, Path::new(r"/mnt/a b\"));
        assert_eq!((mount.kind.as_str(), mount.source.as_path()), ("ext4", Path::new("/dev/vda1")));
        assert_eq!(mount.super_options, "rw,discard");
        assert!(parse("31 23 0:28 / /mnt rw - tmpfs none").is_some());
        assert!(parse("").is_none());
        assert!(parse("31 23 / /mnt rw - ext4 x y").is_none());
    }
}
