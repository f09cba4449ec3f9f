//! Reading directories. The kernel's offsets are the `d_off` of the backing directory, so telldir
//! and seekdir work for directories of any size. Only one buffer is kept for each open directory.

use crate::filesystem::Passthrough;
use crate::inode::handle::OpenDirectory;
use crate::takeover::replay::Attempt;
use fuse::{Errno, Reply, abi};
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, SeekFrom, openat};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// Size of the buffer of an open directory: a little more than the kernel usually requests at once.
const LISTING_BYTES: usize = 32 << 10;

/// One entry.
pub(crate) struct Entry<'a> {
    pub inode: u64,
    /// The offset of the next entry.
    pub next_offset: u64,
    pub kind: u32,
    pub name: &'a CStr,
}

/// A directory being read.
pub(crate) struct Listing {
    fd: Arc<OwnedFd>,
    buffer: Vec<u8>,
    start: usize,
    /// The offset that the entry at `start` was reached by.
    position: u64,
}

impl Listing {
    /// Creates a listing from `fd`, which is open for reading, at the beginning.
    pub(crate) fn new(fd: OwnedFd) -> Listing {
        Listing { fd: Arc::new(fd), buffer: Vec::new(), start: 0, position: 0 }
    }

    /// Open for reading.
    pub(crate) fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// Passes the entries from `offset` on to `take`, until `take` returns false. That entry is
    /// passed again next time.
    pub(crate) fn read(&mut self, offset: u64, mut take: impl FnMut(&Entry<'_>) -> bool) -> Result<(), Errno> {
        if offset != self.position || offset == 0 {
            // The offset was moved: the buffer belongs to another place, or is too old.
            self.buffer.clear();
            self.start = 0;
            rustix::fs::seek(&self.fd, SeekFrom::Start(offset))?;
            self.position = offset;
        }
        loop {
            while let Some((entry, len)) = parse(self.buffer.get(self.start..).unwrap_or_default()) {
                if !take(&entry) {
                    return Ok(());
                }
                self.position = entry.next_offset;
                self.start += len;
            }
            if !self.fill()? {
                return Ok(());
            }
        }
    }

    /// Reads the next entries. Returns false at the end.
    fn fill(&mut self) -> Result<bool, Errno> {
        self.start = 0;
        self.buffer.clear();
        self.buffer.reserve_exact(LISTING_BYTES);
        let spare: &mut [MaybeUninit<u8>] = self.buffer.spare_capacity_mut();
        // SAFETY: getdents64 writes at most `spare.len()` bytes to where `spare` lies, and reports
        // how many.
        let len = unsafe {
            let fd = rustix::fd::AsRawFd::as_raw_fd(&*self.fd);
            let result = libc::syscall(libc::SYS_getdents64, fd, spare.as_mut_ptr(), spare.len());
            if result < 0 {
                return Err(crate::system::errno(&std::io::Error::last_os_error()));
            }
            self.buffer.set_len(result as usize);
            result
        };
        Ok(len > 0)
    }
}

/// The first entry in what getdents64 returned, and its length.
fn parse(bytes: &[u8]) -> Option<(Entry<'_>, usize)> {
    const NAME: usize = 19;
    let word = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let len = usize::from(u16::from_ne_bytes(bytes.get(16..18)?.try_into().ok()?));
    let name = CStr::from_bytes_until_nul(bytes.get(NAME..len)?).ok()?;
    Some((Entry { inode: word(0)?, next_offset: word(8)?, kind: u32::from(*bytes.get(18)?), name }, len))
}

/// Entries on their way to the kernel, in a buffer of the size it asked for.
pub(crate) struct Entries<'a> {
    buffer: &'a mut [u8],
    len: usize,
}

impl<'a> Entries<'a> {
    pub(crate) fn new(buffer: &'a mut [u8]) -> Entries<'a> {
        Entries { buffer, len: 0 }
    }

    /// Whether an entry of that name still fits; with `plus`, one with attributes.
    pub(crate) fn fits(&self, name: &CStr, plus: bool) -> bool {
        let fixed = size_of::<abi::Dirent>() + if plus { size_of::<abi::EntryOut>() } else { 0 };
        (fixed + name.count_bytes()).next_multiple_of(8) <= self.buffer.len() - self.len
    }

    /// Adds one, which must fit.
    pub(crate) fn push(&mut self, plus: Option<&abi::EntryOut>, entry: &Entry<'_>, inode: u64) {
        use zerocopy::IntoBytes;
        let name = entry.name.to_bytes();
        let dirent = abi::Dirent { ino: inode, off: entry.next_offset, namelen: name.len() as u32, typ: entry.kind };
        let start = self.len;
        for part in [plus.map_or(&[][..], |out| out.as_bytes()), dirent.as_bytes(), name] {
            self.buffer[self.len..][..part.len()].copy_from_slice(part);
            self.len += part.len();
        }
        let padded = start + (self.len - start).next_multiple_of(8);
        self.buffer[self.len..padded].fill(0);
        self.len = padded;
    }

    /// Returns the entries added so far, as bytes.
    pub(crate) fn finish(self) -> &'a [u8] {
        &self.buffer[..self.len]
    }
}

impl Passthrough {
    pub(super) fn opendir(&self, node: u64, args: &abi::OpenIn, attempt: &Attempt<'_>) -> Result<abi::OpenOut, Errno> {
        if let Some(Ok(fh)) = attempt.done() {
            self.handles.remove(fh); // Nobody has it.
        }
        let inode = self.inodes.get(node)?;
        let keep = OFlags::from_bits_retain(args.flags) & OFlags::NOATIME;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let taken = self.take_descriptor(attempt.uid(), inode.charge())?;
        let fd = openat(self.inodes.anchor(&inode)?, c".", flags | keep, Mode::empty())?;
        attempt.begin(0);
        let fh = self.handles.add_directory(OpenDirectory { inode, listing: Mutex::new(Listing::new(fd)), taken });
        attempt.finish(Ok(abi::OpenOut { fh, ..Default::default() }), |open| open.fh)
    }

    pub(super) fn readdir(&self, reply: Reply<'_>, args: &abi::ReadIn, scratch: &mut [u8]) -> Result<(), Errno> {
        let directory = match self.handles.directory(args.fh) {
            Ok(directory) => directory,
            Err(errno) => return reply.error(errno),
        };
        let size = scratch.len().min(args.size as usize);
        let mut entries = Entries::new(&mut scratch[..size]);
        let result = directory.listing.lock().read(args.offset, |entry| {
            let fits = entries.fits(entry.name, false);
            if fits {
                entries.push(None, entry, directory.inode.device.show_inode(entry.inode));
            }
            fits
        });
        let data = entries.finish();
        match result {
            Err(errno) if data.is_empty() => reply.error(errno),
            _ => reply.data(data),
        }
    }

    /// For a looker each entry comes with a lookup, which counts only if the kernel gets it: the
    /// entry must fit before it is looked up, and an answer that is not taken takes its lookups
    /// back.
    pub(super) fn readdirplus(
        &self,
        reply: Reply<'_>,
        task: u32,
        args: &abi::ReadIn,
        scratch: &mut [u8],
    ) -> Result<(), Errno> {
        let directory = match self.handles.directory(args.fh) {
            Ok(directory) => directory,
            Err(errno) => return reply.error(errno),
        };
        let size = scratch.len().min(args.size as usize);
        let mut entries = Entries::new(&mut scratch[..size]);
        let mut given = Vec::new();
        let looks = self.readdirplus_hints.lists(task, directory.inode.nodeid, args.offset);
        let result = directory.listing.lock().read(args.offset, |entry| {
            if !entries.fits(entry.name, true) {
                return false;
            }
            // An entry without a node is one that the kernel looks up itself when it needs it.
            let mut out = abi::EntryOut::default();
            if looks && self.has_room_for_names() && entry.name != c"." && entry.name != c".." {
                match self.lookup_listed(&directory.inode, entry.name) {
                    Ok(found) => out = found.unwrap_or_default(),
                    Err(Errno::NOENT) => return true,
                    Err(_) => {}
                }
            }
            if out.nodeid != 0 {
                given.push(out.nodeid);
            }
            entries.push(Some(&out), entry, directory.inode.device.show_inode(entry.inode));
            true
        });
        let data = entries.finish();
        let sent = match result {
            Err(errno) if data.is_empty() => reply.error(errno),
            _ => reply.data(data),
        };
        if sent.is_err() {
            given.into_iter().for_each(|node| self.forget(node, 1));
        }
        sent
    }

    pub(super) fn fsyncdir(&self, args: &abi::FsyncIn) -> Result<(), Errno> {
        let directory = self.handles.directory(args.fh)?;
        let fd = directory.listing.lock().fd().clone();
        if args.fsync_flags & abi::FSYNC_FDATASYNC != 0 { rustix::fs::fdatasync(fd) } else { rustix::fs::fsync(fd) }
    }
}
