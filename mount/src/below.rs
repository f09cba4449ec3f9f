//! Reading files below without caching them twice.
//!
//! The pages belong into the page cache of the mount; what is read below must leave nothing behind there. Three ways, the best one
//! that works on the device: RWF_DONTCACHE, O_DIRECT, or a plain read followed by POSIX_FADV_DONTNEED.

use crate::device::ReadWay;
use crate::handle::OpenFile;
use crate::inode::{stamp_of, stat};
use borrower::{Below, Stamp};
use fuse::Errno;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::Advice;
use rustix::io::ReadWriteFlags;
use std::cell::RefCell;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;

/// RWF_DONTCACHE of preadv2 and pwritev2: drop the pages once the call, or writeback, is done with them.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);
const PAGE_BYTES: usize = 4096;
/// Largest piece read through the bounce buffer, which exists once per worker and only where buffers are not aligned.
const BOUNCE_BYTES: usize = 128 << 10;

#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct AlignedPage([u8; PAGE_BYTES]);

thread_local! {
    static BOUNCE: RefCell<Vec<AlignedPage>> = const { RefCell::new(Vec::new()) };
}

impl Below for OpenFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        Ok(self.read_uncached(buf, offset)?)
    }

    fn stamp(&self) -> io::Result<Stamp> {
        Ok(stamp_of(&stat(&self.fd)?))
    }
}

impl OpenFile {
    /// Reads until `buf` is full or the file ends, leaving nothing in the page cache below.
    pub(crate) fn read_uncached(&self, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
        loop {
            let way = self.inode.device.read_way();
            let result = match way {
                ReadWay::DontCache => {
                    let fd = self.reader()?;
                    read_full(buf, offset, |piece, at| {
                        rustix::io::preadv2(fd, &mut [IoSliceMut::new(piece)], at, DONTCACHE)
                    })
                }
                ReadWay::Direct => self.direct().and_then(|fd| read_direct(fd, buf, offset)),
                ReadWay::Advise => {
                    let fd = self.reader()?;
                    let result = read_full(buf, offset, |piece, at| rustix::io::pread(fd, piece, at));
                    drop_clean(fd, offset, offset.saturating_add(buf.len() as u64));
                    result
                }
            };
            match result {
                // An offset beyond what can be addressed is EINVAL in every way; do not blame the way for it.
                Err(Errno::INVAL | Errno::OPNOTSUPP)
                    if way != ReadWay::Advise
                        && offset.checked_add(buf.len() as u64).is_some_and(|end| end <= i64::MAX as u64) =>
                {
                    self.inode.device.give_up(way);
                }
                result => return result,
            }
        }
    }

    /// Reads past the page cache, as the caller of the mount asked for by O_DIRECT. `buf` is page-aligned.
    pub(crate) fn read_past_cache(&self, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let fd = self.direct()?;
        read_full(buf, offset, |piece, at| rustix::io::pread(fd, piece, at))
    }
}

/// Calls `read` until `buf` is full or the file ends. An error fails it all, even after some bytes: fewer bytes than asked for mean the end of
/// the file to the kernel.
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

/// Reads through a descriptor with O_DIRECT, whatever the alignment of `buf` and `offset`.
fn read_direct(fd: BorrowedFd<'_>, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let aligned = |number: usize| number.is_multiple_of(PAGE_BYTES);
    if aligned(buf.as_ptr() as usize) && aligned(buf.len()) && aligned(offset as usize) {
        // After a short read the rest is not aligned any more; but then the file has ended.
        return read_full(buf, offset, |piece, at| rustix::io::pread(fd, piece, at));
    }
    BOUNCE.with_borrow_mut(|pages| {
        pages.resize(BOUNCE_BYTES / PAGE_BYTES, AlignedPage([0; PAGE_BYTES]));
        // SAFETY: AlignedPage is plain bytes without padding, so the pages are that many contiguous initialized bytes.
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

/// Drops the clean pages that hold any byte of `start..end`, and starts the writeback of the dirty ones.
pub(crate) fn drop_clean(fd: impl AsFd, start: u64, end: u64) {
    let start = start - start % PAGE_BYTES as u64;
    // The kernel drops whole pages only, so round outward. A length of 0 (None) means to the end of the file.
    let len = end.checked_next_multiple_of(PAGE_BYTES as u64).map_or(0, |end| end - start);
    if start <= i64::MAX as u64 {
        // Advice that is not taken costs memory, not correctness.
        let _ = rustix::fs::fadvise(fd, start, NonZeroU64::new(len.min(i64::MAX as u64)), Advice::DontNeed);
    }
}
