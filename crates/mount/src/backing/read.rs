//! Reads of backing files that do not cache the bytes twice.
//!
//! The pages belong into the page cache of the mount, so a read must leave nothing in the page
//! cache of the backing file. There are three methods, and the best one that works on the device is
//! used: RWF_DONTCACHE, O_DIRECT, or a plain read followed by POSIX_FADV_DONTNEED. The last two
//! would write dirty pages to the disk at once, so these are looked for first.

use crate::backing::device::ReadMethod;
use crate::inode::handle::OpenFile;
use crate::inode::{stamp_of, stat};
use borrower::{BackingFile, Stamp};
use fuse::Errno;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::Advice;
use rustix::io::ReadWriteFlags;
use std::cell::RefCell;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::sync::atomic::Ordering;

/// RWF_DONTCACHE of preadv2 and pwritev2: drops the pages after the call, or after their writeback.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);
const PAGE_BYTES: usize = 4096;
/// Size of the bounce buffer. It exists once for each worker, and only if buffers are not aligned.
const BOUNCE_BYTES: usize = 128 << 10;

#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct AlignedPage([u8; PAGE_BYTES]);

thread_local! {
    static BOUNCE: RefCell<Vec<AlignedPage>> = const { RefCell::new(Vec::new()) };
}

impl BackingFile for OpenFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(self.read_uncached(buf, offset)?)
    }

    fn stamp(&self) -> io::Result<Stamp> {
        Ok(stamp_of(&stat(&self.fd)?))
    }
}

impl OpenFile {
    /// Reads until `buf` is full or the file ends, and leaves nothing in the page cache of the
    /// backing file.
    pub(crate) fn read_uncached(&self, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
        fuse::about_to_wait();
        self.read_ahead(offset, buf.len());
        loop {
            let method = self.inode.device.read_method();
            if method != ReadMethod::DontCache
                && self.inode.backing_is_cached.load(Ordering::Relaxed)
                && let Ok(read) = self.read_cached(buf, offset)
            {
                return Ok(read);
            }
            let result = match method {
                ReadMethod::DontCache => {
                    let fd = self.reader()?;
                    read_full(buf, offset, |piece, at| {
                        rustix::io::preadv2(fd, &mut [IoSliceMut::new(piece)], at, DONTCACHE)
                    })
                }
                ReadMethod::Direct => match self.direct() {
                    Ok(fd) => read_direct(fd, buf, offset),
                    Err(Errno::INVAL) => Err(Errno::INVAL), // It has none.
                    Err(_) => self.read_and_advise(buf, offset),
                },
                ReadMethod::Advise => self.read_and_advise(buf, offset),
            };
            match result {
                // An offset beyond the largest possible one is EINVAL with every method, so it says
                // nothing about the method.
                Err(Errno::INVAL | Errno::OPNOTSUPP)
                    if method != ReadMethod::Advise
                        && offset.checked_add(buf.len() as u64).is_some_and(|end| end <= i64::MAX as u64) =>
                {
                    self.inode.device.give_up(method);
                }
                result => return result,
            }
        }
    }

    /// Reads the next window at once if the stream arrives in pieces (`ahead.rs`).
    fn read_ahead(&self, offset: u64, len: usize) {
        // A reader of another piece waits for this lock until the read of the window has begun.
        let mut ahead = self.ahead.lock();
        let step = ahead.goes_on(offset, len as u64);
        if let Some(passed) = step.drop {
            drop_clean(&self.fd, passed.start, passed.end);
        }
        if let Some(fetch) = step.fetch
            && self.inode.device.read_method() != ReadMethod::Direct
            && let Ok(fd) = self.reader()
        {
            // If the kernel ignores the advice, this costs requests, not correctness.
            let _ = rustix::fs::fadvise(fd, fetch.start, NonZeroU64::new(fetch.end - fetch.start), Advice::WillNeed);
        }
    }

    /// Reads from the page cache of the backing file, if all bytes are there.
    fn read_cached(&self, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let fd = self.reader()?;
        read_full(buf, offset, |piece, at| {
            rustix::io::preadv2(fd, &mut [IoSliceMut::new(piece)], at, ReadWriteFlags::NOWAIT)
        })
    }

    /// Reads bytes that the next write overwrites. Leaves their pages in the page cache of the
    /// backing file, where the write needs them.
    pub(crate) fn read_before_write(&self, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
        fuse::about_to_wait();
        let fd = self.reader()?;
        read_full(buf, offset, |piece, at| rustix::io::pread(fd, piece, at))
    }

    fn read_and_advise(&self, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let fd = self.reader()?;
        let result = read_full(buf, offset, |piece, at| rustix::io::pread(fd, piece, at));
        drop_clean(fd, offset, offset.saturating_add(buf.len() as u64));
        result
    }

    /// Reads past the page cache, for a caller that uses O_DIRECT on the mount. `buf` is
    /// page-aligned.
    pub(crate) fn read_past_cache(&self, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
        fuse::about_to_wait();
        // The caller may have set O_DIRECT by fcntl although the backing file system does not
        // support it. Or the file cannot be opened once more: its mode or flags have changed since,
        // or no descriptors are left.
        let Ok(fd) = self.direct() else { return self.read_uncached(buf, offset) };
        read_blocks(fd, buf, offset)
    }
}

/// Calls `read` until `buf` is full or the file ends. An error fails the whole read, even after
/// some bytes, because the kernel interprets a short read as the end of the file.
fn read_full(
    buf: &mut [u8],
    offset: u64,
    mut read: impl FnMut(&mut [u8], u64) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    let mut done = 0;
    while done < buf.len() {
        match read(&mut buf[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(len) => done += len,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// Reads through a descriptor with O_DIRECT. If a piece ends in the middle of a block, the file
/// ended there. The file may have grown since, but the rest cannot be read, because it does not
/// begin at a block.
fn read_blocks(fd: BorrowedFd<'_>, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut ended = false;
    read_full(buf, offset, |piece, at| {
        if ended {
            return Ok(0);
        }
        let read = rustix::io::pread(fd, &mut *piece, at)?;
        ended = read < piece.len() && !(at + read as u64).is_multiple_of(PAGE_BYTES as u64);
        Ok(read)
    })
}

/// Reads through a descriptor with O_DIRECT, whatever the alignment of `buf` and `offset`.
fn read_direct(fd: BorrowedFd<'_>, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let aligned = |number: usize| number.is_multiple_of(PAGE_BYTES);
    if aligned(buf.as_ptr() as usize) && aligned(buf.len()) && aligned(offset as usize) {
        return read_blocks(fd, buf, offset);
    }
    BOUNCE.with_borrow_mut(|pages| {
        pages.resize(BOUNCE_BYTES / PAGE_BYTES, AlignedPage([0; PAGE_BYTES]));
        // SAFETY: AlignedPage is plain bytes without padding, so the pages are that many contiguous
        // initialized bytes.
        let bounce = unsafe { std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast::<u8>(), BOUNCE_BYTES) };
        read_full(buf, offset, |piece, at| {
            let skip = (at % PAGE_BYTES as u64) as usize;
            let want = (skip + piece.len()).next_multiple_of(PAGE_BYTES).min(BOUNCE_BYTES);
            let got = rustix::io::pread(fd, &mut bounce[..want], at - skip as u64)?;
            let len = got.saturating_sub(skip).min(piece.len());
            piece[..len].copy_from_slice(&bounce[skip..skip + len]);
            Ok(len)
        })
    })
}

/// Drops the clean pages that hold any byte of `start..end`, and starts the writeback of the dirty
/// ones.
pub(crate) fn drop_clean(fd: impl AsFd, start: u64, end: u64) {
    let start = start - start % PAGE_BYTES as u64;
    // The kernel drops whole pages only, so round outward. A length of 0 (None) means to the end of
    // the file.
    let len = end.checked_next_multiple_of(PAGE_BYTES as u64).map_or(0, |end| end - start);
    if start <= i64::MAX as u64 {
        // If the kernel ignores the advice, this costs memory, not correctness.
        let _ = rustix::fs::fadvise(fd, start, NonZeroU64::new(len.min(i64::MAX as u64)), Advice::DontNeed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inode::{Found, Inodes};
    use crate::system::cached;
    use rustix::fs::{Mode, OFlags, open};

    fn found(path: &std::path::Path) -> Found {
        let fd = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let now = stat(&fd).unwrap();
        Found::new(fd, now)
    }

    /// Opens a file for which this read method is given up.
    fn open_by(directory: &std::path::Path, path: &std::path::Path, given_up: Option<ReadMethod>) -> OpenFile {
        let borrower = borrower::Borrower::start(borrower::Config::default(), None).unwrap();
        let memory = crate::takeover::memory::Memory::create().unwrap();
        let keep = crate::takeover::Keep::new(memory.into(), None).unwrap();
        let descriptors = crate::inode::descriptors::Descriptors::new(1024, 2, 10, 0);
        let taken = descriptors.take(0, 1).unwrap();
        let inode = Inodes::new(found(directory), borrower, keep, descriptors, None).reference(found(path)).unwrap();
        if let Some(method) = given_up {
            inode.device.give_up(method);
        }
        let fd = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        OpenFile::new(inode.clone(), crate::inode::opened::Opened::new(fd, OFlags::RDWR, taken), inode.was_open())
    }

    /// All three methods read the same bytes, whatever the alignment. Kernels before 6.14 never use
    /// the first.
    #[test]
    fn all_ways_read_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        let bytes: Vec<u8> = (0..300_001u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        for given_up in [None, Some(ReadMethod::DontCache), Some(ReadMethod::Direct)] {
            let file = open_by(directory.path(), &path, given_up);
            let mut buffer = vec![AlignedPage([0; PAGE_BYTES]); 80];
            // SAFETY: pages of plain bytes without padding, exclusively borrowed for as long as the
            // slice is used.
            let buffer = unsafe { std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast::<u8>(), 80 * PAGE_BYTES) };
            for skip in [0, 1, 512] {
                for offset in [0, 1, 511, 4096, 65_535, 299_008, 299_999, 300_000, 300_001, 400_000] {
                    for len in [1, 100, 4096, 4097, 131_072, 200_000, 320_000] {
                        let buf = &mut buffer[skip..skip + len];
                        let read = file.read_at(buf, offset as u64).unwrap();
                        let expected = &bytes[offset.min(bytes.len())..(offset + len).min(bytes.len())];
                        assert!(buf[..read] == *expected, "{given_up:?} skip {skip} offset {offset} len {len}: {read}");
                    }
                }
            }
            let method = file.inode.device.read_method();
            println!("given up {given_up:?}: read by {method:?}");
            assert!(given_up.is_none_or(|given_up| method > given_up));
            assert!(file.read_at(&mut buffer[..10], u64::MAX - 5).is_err());
            assert_eq!(file.inode.device.read_method(), method, "an impossible offset is not the method's fault");
        }
    }

    /// No method writes dirty pages to the disk.
    #[test]
    fn what_was_written_is_read_where_it_lies() {
        let directory = tempfile::tempdir().unwrap();
        for given_up in [None, Some(ReadMethod::DontCache), Some(ReadMethod::Direct)] {
            let path = directory.path().join(format!("{given_up:?}"));
            std::fs::write(&path, [1; 3 * PAGE_BYTES]).unwrap();
            std::fs::File::open(&path).unwrap().sync_all().unwrap();
            let file = open_by(directory.path(), &path, given_up);
            // Kernels before 6.5 cannot count these pages.
            let dirty = || cached(&file.fd, 0, 3 * PAGE_BYTES as u64).ok().map(|cached| cached.dirty_pages);
            rustix::io::pwrite(&file.fd, &[2; PAGE_BYTES + 1], 0).unwrap();
            file.inode.backing_is_cached.store(true, Ordering::Relaxed);
            let before = dirty();
            let mut buf = [0; 3 * PAGE_BYTES];
            assert_eq!(file.read_at(&mut buf[..2 * PAGE_BYTES], 0).unwrap(), 2 * PAGE_BYTES);
            assert!(
                buf[..=PAGE_BYTES] == [2; PAGE_BYTES + 1] && buf[PAGE_BYTES + 1..2 * PAGE_BYTES] == [1; PAGE_BYTES - 1]
            );
            assert_eq!(dirty(), before, "{given_up:?}");
            println!("given up {given_up:?}: {before:?} pages dirty before and after");
            // Bytes that are not all cached are read as usual.
            file.inode.backing_is_cached.store(false, Ordering::Relaxed);
            drop_clean(&file.fd, 2 * PAGE_BYTES as u64, 3 * PAGE_BYTES as u64);
            file.inode.backing_is_cached.store(true, Ordering::Relaxed);
            assert_eq!(file.read_at(&mut buf, 0).unwrap(), 3 * PAGE_BYTES);
            assert!(buf[2 * PAGE_BYTES..] == [1; PAGE_BYTES]);
        }
    }
}
