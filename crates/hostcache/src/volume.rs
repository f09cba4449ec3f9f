//! A file system of the guest, and its disk: the place of each page of a file.

use crate::extents::{Extent, FileMaps, Place};
use page::PAGE_SIZE;
use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags, Stat, fstat, major, minor, open};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Bytes of a file whose extents are requested at once.
const ASKED_BYTES: u64 = 64 << 20;
/// The maximum number of extents that one call returns.
const CALL_EXTENTS: usize = 256;

/// A permanent identity of an inode: numbers are used again, with another generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InodeKey {
    /// `i_ino`.
    pub inode: u64,
    /// `i_generation`.
    pub generation: u32,
}

/// The reason why a file system's evicted pages cannot be sent to the host.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The mountpoint cannot be read.
    #[error("cannot look at {mountpoint}: {source}; name the mountpoint of an ext4 or XFS file system")]
    Unreadable {
        /// The mountpoint.
        mountpoint: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// It is on no disk, or on a layer between it and its disk.
    #[error(
        "{mountpoint} is on {on}: only a file system on a whole disk or a partition can be followed to the host's image"
    )]
    NoDisk {
        /// The mountpoint.
        mountpoint: PathBuf,
        /// The device.
        on: String,
    },
    /// Its partition begins in the middle of a page.
    #[error("the partition begins at byte {offset_bytes} of its disk, within a page: align it to 4096 bytes")]
    Unaligned {
        /// Bytes before it.
        offset_bytes: u64,
    },
    /// Its inodes cannot be opened by their numbers.
    #[error("the inodes of {mountpoint} cannot be opened by number ({detail}): use ext4 or XFS, and run as root")]
    NoHandles {
        /// The mountpoint.
        mountpoint: PathBuf,
        /// The error.
        detail: String,
    },
}

/// The format of an inode's number and generation in a file handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HandleForm {
    /// FILEID_INO32_GEN.
    Narrow,
    /// FILEID_INO64_GEN with XFS's marks.
    Wide,
}

const FILEID_INO32_GEN: i32 = 1;
/// `XFS_FILEID_TYPE_64FLAG | FILEID_INO32_GEN`.
const XFS_FILEID_INO64_GEN: i32 = 0x81;
const HANDLE_BYTES_MAX: usize = 128;

#[repr(C)]
struct RawHandle {
    len: u32,
    kind: i32,
    bytes: [u8; HANDLE_BYTES_MAX],
}

/// A file system and the extents of its files.
pub struct Volume {
    root: OwnedFd,
    device: u64,
    /// Pages of the disk before the file system.
    first_page: u64,
    form: HandleForm,
    files: FileMaps<InodeKey, Shape>,
}

/// Attributes that change when a file's extents do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    ctime: (i64, i64),
    size: i64,
    blocks: i64,
}

impl Shape {
    fn of(stat: &Stat) -> Shape {
        Shape { ctime: (stat.st_ctime, stat.st_ctime_nsec as i64), size: stat.st_size, blocks: stat.st_blocks }
    }
}

impl Volume {
    /// The file system that is mounted there.
    ///
    /// # Errors
    /// Fails if its pages cannot be mapped to a disk.
    pub fn open(mountpoint: &Path) -> Result<Volume, Problem> {
        let unreadable = |error: io::Error| Problem::Unreadable { mountpoint: mountpoint.to_owned(), source: error };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = open(mountpoint, flags, Mode::empty()).map_err(|errno| unreadable(errno.into()))?;
        let stat = fstat(&root).map_err(|errno| unreadable(errno.into()))?;
        let offset_bytes =
            disk_offset(stat.st_dev).map_err(|on| Problem::NoDisk { mountpoint: mountpoint.into(), on })?;
        if !offset_bytes.is_multiple_of(PAGE_SIZE as u64) {
            return Err(Problem::Unaligned { offset_bytes });
        }
        let no_handles = |detail| Problem::NoHandles { mountpoint: mountpoint.to_owned(), detail };
        let (form, generation) = handle_form(&root, stat.st_ino).map_err(no_handles)?;
        let first_page = offset_bytes / PAGE_SIZE as u64;
        let volume = Volume { root, device: stat.st_dev, first_page, form, files: FileMaps::default() };
        // Whether this process has the right to open inodes.
        match volume.open_inode(InodeKey { inode: stat.st_ino, generation }) {
            Ok(Some(_)) => Ok(volume),
            Ok(None) => Err(no_handles("its own root is not found by its handle".into())),
            Err(error) => Err(no_handles(error.to_string())),
        }
    }

    /// `st_dev` of its files.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// The places of a file's pages on the disk; `None` if the file no longer exists. Earlier
    /// results of the file system are valid as long as the file looks the same. If the file system
    /// has moved bytes without a trace (online defragmentation), the result is an earlier place:
    /// [`Volume::forget`] it.
    ///
    /// # Errors
    /// Returns the errors of the file system, and of a missing right.
    pub fn places(&mut self, key: InodeKey, indexes: &[u64]) -> io::Result<Option<Vec<Place>>> {
        let Some(file) = self.open_inode(key)? else {
            self.files.forget(&key);
            return Ok(None);
        };
        let shape = Shape::of(&fstat(&file)?);
        let map = self.files.of(key, shape);
        let (first_page, mut learned) = (self.first_page, 0);
        let mut place = |index: u64| -> io::Result<Place> {
            if !map.knows(index) {
                let start = index.saturating_mul(PAGE_SIZE as u64);
                let (end, extents) = extents(&file, start, start.saturating_add(ASKED_BYTES))?;
                map.learn(start, end, &extents);
                learned += extents.len() + 1;
            }
            Ok(match map.place(index) {
                Place::At(page) => Place::At(page + first_page),
                other => other,
            })
        };
        let places: io::Result<Vec<Place>> = indexes.iter().map(|index| place(*index)).collect();
        self.files.learned(learned);
        // A mapping that is not settled must be looked up again.
        if places.as_ref().map_or(true, |places| places.contains(&Place::Unsettled)) {
            self.files.forget(&key);
        }
        places.map(Some)
    }

    /// Forgets a file, because its extents were wrong.
    pub fn forget(&mut self, key: InodeKey) {
        self.files.forget(&key);
    }

    fn open_inode(&self, key: InodeKey) -> io::Result<Option<OwnedFd>> {
        let mut raw = RawHandle { len: 0, kind: 0, bytes: [0; HANDLE_BYTES_MAX] };
        match self.form {
            HandleForm::Narrow => {
                let Ok(inode) = u32::try_from(key.inode) else { return Ok(None) };
                raw.bytes[..4].copy_from_slice(&inode.to_ne_bytes());
                raw.bytes[4..8].copy_from_slice(&key.generation.to_ne_bytes());
                (raw.len, raw.kind) = (8, FILEID_INO32_GEN);
            }
            HandleForm::Wide => {
                raw.bytes[..8].copy_from_slice(&key.inode.to_ne_bytes());
                raw.bytes[8..12].copy_from_slice(&key.generation.to_ne_bytes());
                (raw.len, raw.kind) = (12, XFS_FILEID_INO64_GEN);
            }
        }
        // Flags that wait for nothing, and leave no trace in the file.
        let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOATIME | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: `raw` is a complete struct file_handle that outlives the call.
        let fd = unsafe { libc::syscall(libc::SYS_open_by_handle_at, self.root.as_raw_fd(), &raw mut raw, flags) };
        if fd >= 0 {
            // SAFETY: the kernel just returned this descriptor and nobody else owns it.
            return Ok(Some(unsafe { OwnedFd::from_raw_fd(fd as i32) }));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ESTALE | libc::ENOENT | libc::EWOULDBLOCK) => Ok(None),
            _ => Err(error),
        }
    }
}

/// The format of this file system's handles, from that of its root.
fn handle_form(root: &OwnedFd, inode: u64) -> Result<(HandleForm, u32), String> {
    let mut raw = RawHandle { len: HANDLE_BYTES_MAX as u32, kind: 0, bytes: [0; HANDLE_BYTES_MAX] };
    let mut mount = 0i32;
    // SAFETY: `raw` begins as the kernel's struct file_handle and has room for the `len` bytes it
    // announces; the path is a NUL-terminated string and `mount` is writable.
    let result = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            root.as_raw_fd(),
            c"".as_ptr(),
            &raw mut raw,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error().to_string());
    }
    let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|nth| raw.bytes[at + nth]));
    let wide = u64::from(word(4)) << 32 | u64::from(word(0));
    match (raw.kind, raw.len) {
        (FILEID_INO32_GEN, 8) if u64::from(word(0)) == inode => Ok((HandleForm::Narrow, word(4))),
        (XFS_FILEID_INO64_GEN, 12) if wide == inode => Ok((HandleForm::Wide, word(8))),
        (kind, len) => Err(format!("its file handles are of kind {kind} with {len} bytes")),
    }
}

/// Bytes of the disk before the device: 0 for a whole disk. Otherwise a description of the device.
fn disk_offset(device: u64) -> Result<u64, String> {
    if major(device) == 0 {
        return Err("no block device".into());
    }
    let folder = fs::canonicalize(format!("/sys/dev/block/{}:{}", major(device), minor(device)))
        .map_err(|_| "a device that the kernel does not list")?;
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_partition = folder.join("partition").exists();
    // A partition's folder is in its disk's.
    let disk = if is_partition { folder.parent().unwrap_or(&folder) } else { &folder };
    for (layer, called) in [
        ("dm", "the device mapper (LVM, LUKS)"),
        ("md", "a software RAID"),
        ("loop", "a loop device"),
        ("bcache", "a bcache"),
    ] {
        if disk.join(layer).exists() {
            return Err(format!("{name}, {called}"));
        }
    }
    if !is_partition {
        return Ok(0);
    }
    let start = fs::read_to_string(folder.join("start")).ok().and_then(|text| text.trim().parse::<u64>().ok());
    // Always in units of 512 bytes.
    start.map(|sectors| sectors * 512).ok_or_else(|| format!("{name}, a partition whose start is unknown"))
}

/// `struct fiemap` with room for extents behind it (include/uapi/linux/fiemap.h).
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; CALL_EXTENTS],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `_IOWR('f', 11, struct fiemap)`, whose size is that without extents.
const FS_IOC_FIEMAP: libc::Ioctl = 0xC020_660B_u32 as libc::Ioctl;
const FIEMAP_EXTENT_LAST: u32 = 1;
/// All but LAST and MERGED: unknown, delayed, encoded, encrypted, not aligned, inline, in a tail,
/// unwritten or shared extents, and flags of later kernels.
const NOT_PLAIN: u32 = !(FIEMAP_EXTENT_LAST | 0x1000);

/// Reads the extents from `start` on. Returns the end of the complete range, and the extents.
fn extents(file: impl AsFd, start: u64, end: u64) -> io::Result<(u64, Vec<Extent>)> {
    let none = FiemapExtent { logical: 0, physical: 0, length: 0, reserved64: [0; 2], flags: 0, reserved: [0; 3] };
    let mut map = Box::new(Fiemap {
        start,
        length: end - start,
        flags: 0,
        mapped_extents: 0,
        extent_count: CALL_EXTENTS as u32,
        reserved: 0,
        extents: [none; CALL_EXTENTS],
    });
    // SAFETY: `map` is a struct fiemap with room for as many extents as it states.
    if unsafe { libc::ioctl(file.as_fd().as_raw_fd(), FS_IOC_FIEMAP, &raw mut *map) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let found = &map.extents[..(map.mapped_extents as usize).min(CALL_EXTENTS)];
    let list = found.iter().map(|extent| Extent {
        logical: extent.logical,
        physical: extent.physical,
        len: extent.length,
        is_plain: extent.flags & NOT_PLAIN == 0,
    });
    let known = match found.last() {
        // There may be more extents.
        Some(last) if found.len() == CALL_EXTENTS && last.flags & FIEMAP_EXTENT_LAST == 0 => {
            last.logical.saturating_add(last.length).min(end)
        }
        _ => end,
    };
    Ok((known.max(start), list.filter(|extent| extent.logical.checked_add(extent.len).is_some()).collect()))
}
