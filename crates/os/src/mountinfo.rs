//! The table of mounts of this process's mount namespace: `/proc/self/mountinfo`
//! (proc_pid_mountinfo(5), written by `show_mountinfo` in the kernel's fs/proc_namespace.c).
//!
//! [`MountTable`] opens the table once and reads it again when the kernel reports a change. An open
//! table stays readable when somebody mounts something over `/proc`. [`read`] reads the table once,
//! and [`mounts`] parses it. No request is sent to any of the file systems in the table.
//!
//! The kernel writes blanks, tabs, newlines and backslashes in names as three octal digits
//! (`\040`). Names are decoded. They need not be UTF-8.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

const PATH: &str = "/proc/self/mountinfo";

/// One line of the table. It borrows the text, and decodes names only when they are asked for.
#[derive(Clone, Copy, Debug)]
pub struct Mount<'a> {
    /// The id of the mount, as statx(2) has it (`stx_mnt_id`). The kernel gives the id of a mount
    /// that is gone to a later one.
    pub id: u64,
    /// The number of the device, as `st_dev`.
    pub device: u64,
    /// Of the flags of the mount: `RDONLY`, `NOSUID`, `NODEV`, `NOEXEC`.
    pub flags: MountFlags,
    /// The type of the file system, such as `ext4` or `fuse.sshfs`.
    pub kind: &'a str,
    root: &'a [u8],
    mountpoint: &'a [u8],
    source: &'a [u8],
    super_options: &'a [u8],
}

impl<'a> Mount<'a> {
    /// Parses one line:
    /// `36 35 98:0 /root /mount/point rw,noatime master:1 - ext4 /dev/sda1 rw,errors=continue`,
    /// with any number of fields before the lone dash, which tell about propagation. The last two
    /// may be missing. `None`: the line is malformed.
    fn parse(line: &'a [u8]) -> Option<Mount<'a>> {
        let mut fields = line.split(|byte| *byte == b' ');
        let mut next = || fields.next();
        let (id, _parent, device) = (text(next()?)?, next()?, text(next()?)?);
        let (root, mountpoint, flags) = (next()?, next()?, next()?);
        fields.find(|field| *field == b"-")?;
        let kind = text(fields.next()?)?;
        let (major, minor) = device.split_once(':')?;
        Some(Mount {
            id: id.parse().ok()?,
            device: rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?),
            flags: options(flags).map(flag).collect(),
            kind,
            root,
            mountpoint,
            source: fields.next().unwrap_or_default(),
            super_options: fields.next().unwrap_or_default(),
        })
    }

    /// The directory of its file system that is mounted: `/`, or another one for bind mounts and in
    /// containers.
    pub fn root(&self) -> PathBuf {
        path(self.root)
    }

    /// Where it is mounted, seen from the root directory of the process.
    pub fn mountpoint(&self) -> PathBuf {
        path(self.mountpoint)
    }

    /// The file system's name for its source: a device, for most file systems that have one.
    pub fn source(&self) -> PathBuf {
        path(self.source)
    }

    /// Whether the file system, as opposed to the mount, has an option of exactly this text.
    pub(crate) fn has_super_option(&self, option: &str) -> bool {
        options(self.super_options).any(|found| found == option.as_bytes())
    }

    /// The user who made a FUSE mount. `None` for other file systems.
    pub fn user(&self) -> Option<u32> {
        let user = options(self.super_options).find_map(|option| option.strip_prefix(b"user_id="))?;
        text(user)?.parse().ok()
    }
}

fn text(field: &[u8]) -> Option<&str> {
    std::str::from_utf8(field).ok()
}

fn options(field: &[u8]) -> impl Iterator<Item = &[u8]> {
    field.split(|byte| *byte == b',')
}

fn flag(name: &[u8]) -> MountFlags {
    match name {
        b"ro" => MountFlags::RDONLY,
        b"nosuid" => MountFlags::NOSUID,
        b"nodev" => MountFlags::NODEV,
        b"noexec" => MountFlags::NOEXEC,
        _ => MountFlags::empty(),
    }
}

fn path(field: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(unescape(field)))
}

/// The mounts in the text of a table, in its order: the oldest first. A later one at the same place
/// covers an earlier one. Lines that are malformed are left out.
pub fn mounts(table: &[u8]) -> impl DoubleEndedIterator<Item = Mount<'_>> {
    table.split(|byte| *byte == b'\n').filter_map(Mount::parse)
}

/// The text of the table of this process, for [`mounts`].
///
/// # Errors
/// When `/proc` is not mounted, or something else is mounted over it.
pub fn read() -> io::Result<Vec<u8>> {
    std::fs::read(PATH)
}

/// A mount that is kept for longer than the text of its table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// The id of the mount, as statx(2) has it (`stx_mnt_id`). The kernel gives the id of a mount
    /// that is gone to a later one.
    pub id: u64,
    /// The number of the device, as `st_dev`.
    pub device: u64,
    /// Where it is mounted, seen from the root directory of the process.
    pub mountpoint: PathBuf,
    /// Of the flags of the mount: `RDONLY`, `NOSUID`, `NODEV`, `NOEXEC`.
    pub flags: MountFlags,
    /// The type of the file system, such as `ext4` or `fuse.sshfs`.
    pub kind: String,
    /// The user who made a FUSE mount. `None` for other file systems.
    pub user: Option<u32>,
}

impl From<Mount<'_>> for MountEntry {
    fn from(mount: Mount<'_>) -> MountEntry {
        MountEntry {
            id: mount.id,
            device: mount.device,
            mountpoint: mount.mountpoint(),
            flags: mount.flags,
            kind: mount.kind.to_owned(),
            user: mount.user(),
        }
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

    /// Whether a mount was made, changed or removed since the last call, or since the table was
    /// opened.
    pub fn has_changed(&self) -> bool {
        let mut fds = [PollFd::new(&self.file, PollFlags::PRI)];
        loop {
            match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
                Err(Errno::INTR) => {}
                changed => return changed != Ok(0),
            }
        }
    }

    /// All mounts. A later one at the same place covers an earlier one.
    ///
    /// # Errors
    /// When the table cannot be read.
    pub fn read(&self) -> io::Result<Vec<MountEntry>> {
        let (mut file, mut text) = (&self.file, Vec::new());
        file.seek(SeekFrom::Start(0))?;
        file.read_to_end(&mut text)?;
        Ok(mounts(&text).map(MountEntry::from).collect())
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
    use std::path::Path;

    #[test]
    fn escapes_of_mountinfo() {
        assert_eq!(unescape(br"/a\040b\134c\011"), b"/a b\\c\t");
        assert_eq!(unescape(br"/a\9\04"), br"/a\9\04");
        assert_eq!(unescape(b""), b"");
    }

    #[test]
    fn a_line_is_taken_apart() {
        let line = br"36 35 0:42 / /mnt/a\040b rw,nosuid,nodev,relatime shared:1 master:2 - fuse.x x ro,user_id=1000,group_id=0";
        let entry = MountEntry::from(Mount::parse(line).unwrap());
        assert_eq!((entry.id, entry.device, entry.user), (36, rustix::fs::makedev(0, 42), Some(1000)));
        assert_eq!((entry.mountpoint, entry.kind.as_str()), (PathBuf::from("/mnt/a b"), "fuse.x"));
        assert_eq!(entry.flags, MountFlags::NOSUID | MountFlags::NODEV);
        let plain = Mount::parse(b"1 0 8:1 / / ro,noexec - ext4 /dev/sda rw").unwrap();
        assert_eq!((plain.flags, plain.user()), (MountFlags::RDONLY | MountFlags::NOEXEC, None));
        for broken in [&b""[..], b"1 0 8:1 / /", b"x 0 8:1 / / rw - ext4 a rw", b"1 0 8 / / rw - ext4 a rw"] {
            assert!(Mount::parse(broken).is_none());
        }
    }

    #[test]
    fn lines_of_every_shape_are_understood() {
        let line = br"31 23 0:28 /a\011b /mnt/a\040b\134 rw,relatime shared:1 master:2 propagate_from:3 unbindable - ext4 /dev/v\040a rw,discard";
        let mount = Mount::parse(line).unwrap();
        assert_eq!(mount.root(), Path::new("/a\tb"));
        assert_eq!(mount.mountpoint(), Path::new(r"/mnt/a b\"));
        assert_eq!((mount.kind, mount.source()), ("ext4", PathBuf::from("/dev/v a")));
        assert!(mount.has_super_option("rw") && mount.has_super_option("discard"));
        assert!(!mount.has_super_option("disc") && !mount.has_super_option("rw,discard"));
        // Without options, with an empty source, and with names that are not UTF-8.
        assert!(Mount::parse(b"31 23 0:28 / /mnt rw - tmpfs none").is_some());
        let mount = Mount::parse(b"31 23 0:28 / /mnt rw - tmpfs  rw,a").unwrap();
        assert!(mount.source().as_os_str().is_empty() && mount.has_super_option("a"));
        let mount = Mount::parse(b"31 23 0:28 / /mnt\xff rw - tmpfs none").unwrap();
        assert_eq!(mount.mountpoint().as_os_str().as_encoded_bytes(), b"/mnt\xff");
        assert!(!mount.has_super_option("rw") && !mount.has_super_option("none"));
        assert!(Mount::parse(b"31 23 / /mnt rw - tmpfs x y").is_none());
        assert!(Mount::parse(b"31 23 0:28 / /mnt rw shared:1").is_none());
    }

    #[test]
    fn a_malformed_line_hides_no_other() {
        let table = b"1 0 8:1 / /a rw - ext4 a rw\nnonsense\n\xff\n2 0 8:2 / /b rw - ext4 b rw\n";
        let ids = |mounts: &mut dyn Iterator<Item = Mount<'_>>| mounts.map(|mount| mount.id).collect::<Vec<_>>();
        assert_eq!(ids(&mut mounts(table)), [1, 2]);
        assert_eq!(ids(&mut mounts(table).rev()), [2, 1]);
    }

    #[test]
    fn this_machine_has_a_root() {
        let table = MountTable::open().unwrap();
        let entries = table.read().unwrap();
        assert!(entries.iter().any(|entry| entry.mountpoint.as_os_str() == "/"), "{entries:?}");
        assert!(!table.read().unwrap().is_empty(), "it can be read again");
        assert!(mounts(&read().unwrap()).any(|mount| mount.mountpoint().as_os_str() == "/"));
    }
}
