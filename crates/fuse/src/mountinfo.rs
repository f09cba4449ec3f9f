//! The table of mounts of this process's mount namespace: `/proc/self/mountinfo`
//! (proc_pid_mountinfo(5)).
//!
//! The table is opened once and read again when the kernel reports a change. An open table stays
//! readable if another file system is mounted over `/proc`. No request is sent to any of the file
//! systems in it.

use crate::Errno;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::mount::MountFlags;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

const PATH: &str = "/proc/self/mountinfo";

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// The id of the mount, as statx(2) has it (`stx_mnt_id`). The kernel gives the id of a mount
    /// that is gone to a later one.
    pub id: u64,
    /// The number of the device, as `st_dev`.
    pub device: u64,
    /// The mount point, relative to the root directory of the process.
    pub mountpoint: PathBuf,
    /// The flags of the mount, of these: `RDONLY`, `NOSUID`, `NODEV`, `NOEXEC`.
    pub flags: MountFlags,
    /// The type of the file system, such as `ext4` or `fuse.sshfs`.
    pub kind: String,
    /// The user who made a FUSE mount. `None` for other file systems.
    pub user: Option<u32>,
}

impl MountEntry {
    fn parse(line: &[u8]) -> Option<MountEntry> {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let dash = fields.iter().position(|field| *field == b"-").filter(|dash| *dash >= 6)?;
        let text = |at: usize| std::str::from_utf8(fields.get(at)?).ok();
        let (major, minor) = text(2)?.split_once(':')?;
        let flag = |name: &str| match name {
            "ro" => MountFlags::RDONLY,
            "nosuid" => MountFlags::NOSUID,
            "nodev" => MountFlags::NODEV,
            "noexec" => MountFlags::NOEXEC,
            _ => MountFlags::empty(),
        };
        let of_file_system = fields.get(dash + 3).copied().unwrap_or_default();
        let user = of_file_system.split(|byte| *byte == b',').find_map(|option| option.strip_prefix(b"user_id="));
        Some(MountEntry {
            id: text(0)?.parse().ok()?,
            device: rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?),
            mountpoint: PathBuf::from(std::ffi::OsString::from_vec(unescape(fields[4]))),
            flags: text(5)?.split(',').map(flag).collect(),
            kind: text(dash + 1)?.to_owned(),
            user: user.and_then(|user| std::str::from_utf8(user).ok()?.parse().ok()),
        })
    }
}

/// The table, open.
#[derive(Debug)]
pub struct MountTable {
    file: File,
}

impl MountTable {
    /// Opens the table of this process.
    ///
    /// # Errors
    /// When `/proc` is not mounted, or something else is mounted over it.
    pub fn open() -> io::Result<MountTable> {
        Ok(MountTable { file: File::open(PATH)? })
    }

    /// Returns whether a mount was made, changed or removed since the last call, or since the table
    /// was opened.
    pub fn has_changed(&self) -> bool {
        let mut fds = [PollFd::new(&self.file, PollFlags::PRI)];
        loop {
            match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
                Err(Errno::INTR) => {}
                changed => return changed != Ok(0),
            }
        }
    }

    /// Returns all mounts. A later one at the same place covers an earlier one.
    ///
    /// # Errors
    /// When the table cannot be read.
    pub fn read(&self) -> io::Result<Vec<MountEntry>> {
        let (mut file, mut text) = (&self.file, Vec::new());
        file.seek(SeekFrom::Start(0))?;
        file.read_to_end(&mut text)?;
        Ok(text.split(|byte| *byte == b'\n').filter_map(MountEntry::parse).collect())
    }
}

/// The descriptor reports `POLLPRI` when the table has changed.
impl AsFd for MountTable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Undoes the octal escapes of mountinfo.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [byte, tail @ ..] = rest {
        match (byte, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) => {
                out.push((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'));
                rest = after;
            }
            _ => {
                out.push(*byte);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_of_mountinfo() {
        assert_eq!(unescape(br"/a\040b\134c\011"), b"/a b\\c\t");
        assert_eq!(unescape(br"/a\9\04"), br"/a\9\04");
        assert_eq!(unescape(b""), b"");
    }

    #[test]
    fn a_line_is_taken_apart() {
        let line = br"36 35 0:42 / /mnt/a\040b rw,nosuid,nodev,relatime shared:1 master:2 - fuse.x x ro,user_id=1000,group_id=0";
        let entry = MountEntry::parse(line).unwrap();
        assert_eq!((entry.id, entry.device, entry.user), (36, rustix::fs::makedev(0, 42), Some(1000)));
        assert_eq!((entry.mountpoint, entry.kind.as_str()), (PathBuf::from("/mnt/a b"), "fuse.x"));
        assert_eq!(entry.flags, MountFlags::NOSUID | MountFlags::NODEV);
        let plain = MountEntry::parse(b"1 0 8:1 / / ro,noexec - ext4 /dev/sda rw").unwrap();
        assert_eq!((plain.flags, plain.user), (MountFlags::RDONLY | MountFlags::NOEXEC, None));
        for broken in [&b""[..], b"1 0 8:1 / /", b"x 0 8:1 / / rw - ext4 a rw", b"1 0 8 / / rw - ext4 a rw"] {
            assert_eq!(MountEntry::parse(broken), None);
        }
    }

    #[test]
    fn this_machine_has_a_root() {
        let table = MountTable::open().unwrap();
        let mounts = table.read().unwrap();
        assert!(mounts.iter().any(|mount| mount.mountpoint.as_os_str() == "/"), "{mounts:?}");
        assert!(!table.read().unwrap().is_empty(), "it can be read again");
    }
}
