//! The shape of files: fallocate, SEEK_DATA and SEEK_HOLE, copy_file_range.

use crate::backing::reserve::Spending;
use crate::filesystem::Passthrough;
use crate::inode::stat;
use crate::ops::change::Outcome;
use crate::ops::credentials::Caller;
use crate::system::share_blocks;
use borrower::{Change, may_be_copied_below};
use fuse::{Errno, abi};
use page::PAGE_SIZE;
use rustix::fs::{FallocateFlags, SeekFrom};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest copy by one request, in bytes: other changes of the file wait for it. The kernel asks
/// again for the rest.
const COPY_BYTES_MAX: u64 = 64 << 20;
/// How long it may take until the kernel has written what it has of a hole; and in how many of them
/// it is looked for one that has nothing.
const WRITTEN_WAIT: Duration = Duration::from_secs(1);
const HOLES_MAX: usize = 64;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

impl Passthrough {
    /// Every operation that the kernel requests here can be repeated. (It requests none that moves
    /// bytes: fs/fuse/file.c, fuse_file_fallocate.)
    pub(crate) fn fallocate(&self, caller: Caller, args: &abi::FallocateIn) -> Result<(), Errno> {
        let file = self.handles.file(args.fh)?;
        let mode = FallocateFlags::from_bits_retain(args.mode);
        let known = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !known.contains(mode) {
            return Err(Errno::OPNOTSUPP);
        }
        let end = args.offset.checked_add(args.length).ok_or(Errno::FBIG)?;
        self.change(
            &file.inode,
            &file.fd,
            |before| {
                let grows = !mode.contains(FallocateFlags::KEEP_SIZE) && end > before.size_bytes;
                let zeroes = mode.intersects(FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE);
                match (grows, zeroes) {
                    (true, true) => Change::Hole { start: args.offset.min(before.size_bytes), end: u64::MAX },
                    (true, false) => Change::Hole { start: before.size_bytes, end: u64::MAX },
                    (false, true) => Change::Hole { start: args.offset, end },
                    // Blocks are set aside; what can be read stays as it is.
                    (false, false) => Change::Attributes,
                }
            },
            |_| {
                let _clearing = self.clearing(&file.inode, caller.uid != 0, caller, &file.fd)?;
                let reserve = &file.inode.device.reserve;
                let _spending = Spending::begin(self.privilege, caller.uid, reserve, &file.fd, args.length);
                // Only a daemon that is about to hand over is interrupted.
                rustix::io::retry_on_intr(|| rustix::fs::fallocate(&file.fd, mode, args.offset, args.length))?;
                Ok(Outcome::done(()))
            },
            |_, _| true,
        )?;
        Ok(())
    }

    /// The kernel asks here whatever it has not written yet (fs/fuse/file.c, fuse_lseek), which is
    /// a hole in the backing file, or behind its end. So what is one there is written first.
    pub(crate) fn lseek(&self, args: &abi::LseekIn) -> Result<abi::LseekOut, Errno> {
        let file = self.handles.file(args.fh)?;
        if args.offset > i64::MAX as u64 {
            return Err(Errno::NXIO);
        }
        let seek = |to| rustix::fs::seek(&file.fd, to);
        let ask = || match args.whence {
            SEEK_DATA => seek(SeekFrom::Data(args.offset)),
            SEEK_HOLE => seek(SeekFrom::Hole(args.offset)),
            _ => Err(Errno::INVAL),
        };
        let mut found = ask();
        for _ in 0..HOLES_MAX {
            let hole = match (args.whence, found) {
                _ if !file.inode.may_be_dirty.load(Ordering::Relaxed) => break,
                (_, Err(errno)) if errno != Errno::NXIO => break,
                (SEEK_DATA, Ok(data)) if data == args.offset => break,
                (SEEK_DATA, data) => (args.offset, data.ok()),
                (_, hole) => {
                    let hole = hole.unwrap_or(args.offset);
                    (hole, seek(SeekFrom::Data(hole)).ok())
                }
            };
            self.invalidations.request(&file.inode, hole.0, hole.1.unwrap_or(u64::MAX));
            fuse::about_to_wait();
            if !self.invalidations.wait(&file.inode, WRITTEN_WAIT) {
                let size_bytes = stat(&file.fd)?.stx_size;
                found = match args.whence {
                    _ if args.offset >= size_bytes => Err(Errno::NXIO),
                    SEEK_DATA => Ok(args.offset), // All may be data.
                    _ => Ok(size_bytes),
                };
                break;
            }
            let before = std::mem::replace(&mut found, ask());
            if args.whence == SEEK_DATA || found == before {
                break;
            }
        }
        Ok(abi::LseekOut { offset: found? })
    }

    /// Copies by sharing blocks (reflink), and in no other way. After any error here the kernel
    /// copies through its cache instead (fs/fuse/file.c, `fuse_copy_file_range`), which reads
    /// neither the disk nor a lender for what is cached.
    ///
    /// See [`may_be_copied_below`] for the conditions.
    pub(crate) fn copy_file_range(&self, caller: Caller, args: &abi::CopyFileRangeIn) -> Result<u64, Errno> {
        let source = self.handles.file(args.fh_in)?;
        let target = self.handles.file(args.fh_out)?;
        let device = &target.inode.device;
        if !device.may_share_blocks() {
            return Err(Errno::OPNOTSUPP);
        }
        let left = stat(&source.fd)?.stx_size.saturating_sub(args.off_in);
        let len = args.len.min(COPY_BYTES_MAX).min(left);
        let end = args.off_out.checked_add(len).ok_or(Errno::FBIG)?;
        let is_to_end = stat(&target.fd)?.stx_size <= end;
        let may_be_stored_to = target.inode.may_be_mapped.load(Ordering::Relaxed);
        let may_be = may_be_copied_below(args.off_out, len, is_to_end, may_be_stored_to);
        if len == 0 || !args.off_in.is_multiple_of(PAGE_SIZE as u64) || !may_be {
            return Err(Errno::OPNOTSUPP);
        }
        self.change(
            &target.inode,
            &target.fd,
            |_| Change::Other { start: args.off_out, end },
            |_| {
                let _clearing = self.clearing(&target.inode, caller.uid != 0, caller, &target.fd)?;
                match share_blocks(&source.fd, args.off_in, len, &target.fd, args.off_out) {
                    Ok(()) => Ok(Outcome::done(())),
                    Err(Errno::OPNOTSUPP | Errno::NOTTY) => {
                        device.cannot_share_blocks();
                        Err(Errno::OPNOTSUPP)
                    }
                    // The reason does not matter: if it also prevents a copy, the kernel finds it.
                    Err(_) => Err(Errno::OPNOTSUPP),
                }
            },
            |_, _| true,
        )?;
        Ok(len)
    }
}
