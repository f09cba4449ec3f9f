//! The bytes of files: open, read, write, flush, fsync.
//!
//! - READ goes through the borrower (`reads.rs`), unless it is direct: the kernel marks direct
//!   requests (READ_LOCKOWNER, WRITE_LOCKOWNER), whatever becomes of the handle's flags meanwhile.
//! - A READ is answered short only at the end of the file, because the kernel derives the end from
//!   it.
//! - A WRITE is in the page cache of the backing file before it is answered. O_TRUNC never arrives
//!   with OPEN, because ATOMIC_O_TRUNC is not negotiated. The kernel sends a SETATTR instead, under
//!   the inode's lock. So no write can come between the truncation and the kernel's dropping of its
//!   pages.
//! - O_APPEND is applied for each write (RWF_APPEND), so that external appends are not overwritten.
//!   If the bytes are then at another offset than the kernel assumes, it must drop its pages.
//! - If the kernel must drop pages because of a write(2), the answer waits for that, for a limited
//!   time. So the writer reads its own bytes.

use crate::backing::reserve::Spending;
use crate::filesystem::Passthrough;
use crate::inode::Inode;
use crate::inode::handle::OpenFile;
use crate::inode::opened::Opened;
use crate::inode::overtaken::{Remembering, within};
use crate::kernel::writeback::write_rest;
use crate::lifecycle::config::WriteMode;
use crate::ops::change::Outcome;
use crate::ops::credentials::Caller;
use crate::system::{ProcPath, errno, open_at_once};
use crate::takeover::replay::Attempt;
use borrower::{Change, Overtaken, Stamp};
use fuse::{Errno, abi};
use page::PAGE_SIZE;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, open};
use rustix::io::ReadWriteFlags;
use std::borrow::Cow;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the answer to a write may wait until the kernel has dropped pages. The drop takes some
/// 0.1 ms, but may itself wait for READs of these pages, and for the writeback of stores through
/// mappings.
const WHOLE_PAGES_WAIT: Duration = Duration::from_secs(1);

/// How long the answer may wait for the last page of the write, if that is written in part. If the
/// kernel does not cache the rest of that page, it holds the page locked until it has its answer
/// (fs/fuse/file.c, fuse_fill_write_pages), so the drop cannot end before. With fsx three of four
/// such waits are in vain, and the others take less than 1 ms; with a limit of 0.1 s fsx took twice
/// as long.
const PART_OF_PAGE_WAIT: Duration = Duration::from_millis(10);

/// How long the answer to an open may wait until the kernel has dropped its cache of a file that
/// was changed externally; usually some 0.1 ms.
const OPEN_WAIT: Duration = Duration::from_millis(10);

/// Flags of open(2) that are not passed on. They are decided for each request (O_APPEND, O_DIRECT),
/// applied by the kernel, or applied separately.
const NOT_IN_BACKING: OFlags = OFlags::CREATE
    .union(OFlags::EXCL)
    .union(OFlags::TRUNC)
    .union(OFlags::NOCTTY)
    .union(OFlags::APPEND)
    .union(OFlags::DIRECT)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::DIRECTORY)
    .union(OFlags::NONBLOCK)
    .union(OFlags::from_bits_retain(libc::O_ASYNC as u32));

impl Passthrough {
    /// The flags with which a backing file is opened if the caller uses `asked`.
    pub(crate) fn backing_flags(&self, asked: OFlags) -> OFlags {
        let mut flags = asked - NOT_IN_BACKING;
        // The kernel's writeback cache reads the rest of a page before it writes a part.
        if self.write_mode == WriteMode::Back && flags & OFlags::ACCMODE == OFlags::WRONLY {
            flags = (flags - OFlags::ACCMODE) | OFlags::RDWR;
        }
        flags | OFlags::CLOEXEC
    }

    /// Opens a file. With `waits`, waits for the lease of another process. Otherwise a lease leads
    /// to EAGAIN before anything has changed.
    pub(crate) fn open(
        &self,
        node: u64,
        args: &abi::OpenIn,
        task: u32,
        attempt: &Attempt<'_>,
        waits: bool,
    ) -> Result<abi::OpenOut, Errno> {
        if let Some(Ok(fh)) = attempt.done() {
            self.handles.remove(fh); // Nobody has it.
        }
        let inode = self.inodes.get(node)?;
        let asked = OFlags::from_bits_retain(args.flags);
        let fd = self.open_or_share(&inode, attempt.uid(), asked, waits);
        if !waits && matches!(fd, Err(Errno::AGAIN)) {
            // Before the name that the task used is checked, because that is done only once.
            return Err(Errno::AGAIN);
        }
        match args.flags {
            // The kernel's own open, for an ioctl of a process that has the file open: it would not
            // be repeated. (Opens of programs have at least O_LARGEFILE.)
            0 => self.check_name_unless_open(&inode, task)?,
            _ => self.check_name(&inode, task)?,
        }
        let fd = fd?;
        self.count_access(&inode, &fd, asked);
        attempt.begin(0);
        let opened = attempt.finish(self.add_open(inode.clone(), fd, asked, false), |open| open.fh)?;
        self.wait_for_size(&inode);
        Ok(opened)
    }

    /// Whether an open that fails with EAGAIN may wait for a lease of another process. Network file
    /// systems, and servers in user space, may return it for other reasons.
    pub(crate) fn may_be_leased(&self, node: u64, args: &abi::OpenIn) -> bool {
        let is_local = |inode: Arc<Inode>| Ok(inode.device.is_local(&self.inodes.anchor(&inode)?));
        args.flags & OFlags::NONBLOCK.bits() == 0 && self.inodes.get(node).and_then(is_local).unwrap_or(false)
    }

    /// Waits for a limited time until the kernel has dropped the cache of a file that was changed
    /// externally. With the answer to an open the kernel drops the bytes, but keeps its cached
    /// size: it would end a read or lseek there. It forgets the size with a drop that this daemon
    /// has requested. While that drop is in progress, the kernel would not accept a new size
    /// (`fuse_change_attributes`). The thread that opens holds no lock that a drop could need. If
    /// the drop has to wait for anything else, the size is forgotten all the same.
    fn wait_for_size(&self, inode: &Inode) {
        let is_stale = || inode.file.as_ref().is_some_and(|file| file.kernel_stale().is_some());
        if !is_stale() {
            return;
        }
        fuse::about_to_wait();
        if !self.invalidations.wait(inode, OPEN_WAIT) || is_stale() {
            self.invalidations.forget_attributes(inode.nodeid);
        }
    }

    /// Opens the backing file for the caller. Returns the descriptor and its flags. `waits` is as
    /// for [`Passthrough::open`].
    pub(crate) fn open_backing(&self, inode: &Inode, asked: OFlags, waits: bool) -> Result<(OwnedFd, OFlags), Errno> {
        if inode.kind != FileType::RegularFile {
            return Err(Errno::NXIO); // The kernel opens special files itself; opening one here could wait for ever.
        }
        let anchor = self.inodes.anchor(inode)?;
        let path = ProcPath::new(&anchor);
        let flags = self.backing_flags(asked);
        // On other file systems O_NONBLOCK may have further meanings.
        let waits = waits || !inode.device.is_local(&anchor);
        let open =
            |flags| if waits { open(path.path(), flags, Mode::empty()) } else { open_at_once(path.path(), flags) };
        let result = open(flags);
        let again = match result {
            Ok(fd) => return Ok((fd, flags)),
            // An append-only file opens for appending alone.
            Err(Errno::PERM) if asked.contains(OFlags::APPEND) => flags | OFlags::APPEND,
            // The daemon asked for reading as well; the caller did not.
            Err(Errno::ACCESS) if flags & OFlags::ACCMODE != asked & OFlags::ACCMODE => {
                (flags - OFlags::ACCMODE) | (asked & OFlags::ACCMODE)
            }
            Err(errno) => return Err(errno),
        };
        Ok((open(again)?, again))
    }

    /// Assigns a handle to an open backing file. The kernel may keep its cache if there was no
    /// external change. `is_new`: this daemon has created the file.
    pub(crate) fn add_open(
        &self,
        inode: Arc<Inode>,
        fd: Arc<Opened>,
        asked: OFlags,
        is_new: bool,
    ) -> Result<abi::OpenOut, Errno> {
        let backing = inode.opened(&fd, asked, &self.connection, &self.borrower)?;
        let may_be_stored_to = asked & OFlags::ACCMODE == OFlags::RDWR;
        let may_be_kept = self.write_mode == WriteMode::Back && asked & OFlags::ACCMODE != OFlags::RDONLY;
        if backing.is_none() && (may_be_stored_to || may_be_kept) {
            inode.may_be_dirty.store(true, Ordering::Relaxed);
        }
        if may_be_stored_to {
            inode.may_be_mapped.store(true, Ordering::Relaxed);
        }
        let file = Arc::new(OpenFile::new(inode.clone(), fd, backing));
        if asked.contains(OFlags::DIRECT) {
            file.direct()?; // EINVAL, where the backing file system has no O_DIRECT.
        }
        let keep = self.observe_now(&inode, &file, is_new)?;
        if backing.is_some() {
            // Changes of this file are not reported while it is open, so the kernel must ask for
            // its attributes again.
            self.external_changes.ask_again(&inode);
            self.counters.passed_opens.add(1);
        } else if !keep {
            file.drops_cache();
        }
        let fh = self.handles.add_file(file.clone());
        Ok(file.answer(fh, keep, self.flushes(&file)))
    }

    /// Whether the kernel must send a FLUSH when the file is closed. The backing file system may
    /// return an error then, or the kernel must write stores through a mapping, which it does
    /// together with the FLUSH. (A RELEASE also shows that the drop of an open is done.)
    pub(crate) fn flushes(&self, file: &OpenFile) -> bool {
        let may_be_stored_to = file.readable && file.writable;
        self.write_mode == WriteMode::Back || may_be_stored_to || !file.inode.device.closes_silently(&file.fd)
    }

    /// Answers a READ that is not for the page cache, or of a file that does not use the pool.
    pub(crate) fn read_past_pool(&self, args: &abi::ReadIn, scratch: &mut [u8]) -> Result<usize, Errno> {
        let file = self.handles.file(args.fh)?;
        file.in_use();
        let len = scratch.len().min(args.size as usize);
        let buf = &mut scratch[..len];
        let is_direct = args.read_flags & abi::READ_LOCKOWNER != 0;
        let is_past_pool = is_direct || file.backing.is_some() || file.inode.file.is_none();
        debug_assert!(is_past_pool, "a READ that the borrower should know of");
        let read = if is_direct {
            self.counters.direct_reads.add(1);
            file.read_past_cache(buf, args.offset)?
        } else {
            file.read_uncached(buf, args.offset)?
        };
        self.counters.read_bytes.add(read as u64);
        Ok(read)
    }

    /// Writes bytes. A write that is sent again writes the same bytes to the same place. An append
    /// uses the recorded end of the file before the first attempt: if bytes of it are there
    /// already, it continues behind them, and nothing is appended twice. A READ may have overtaken
    /// the first attempt, which is not recorded, so the pages are dropped.
    pub(crate) fn write(
        &self,
        args: &abi::WriteIn,
        data: &[u8],
        caller: Caller,
        attempt: &Attempt<'_>,
    ) -> Result<abi::WriteOut, Errno> {
        let request = attempt.number();
        let file = self.handles.file(args.fh)?;
        let inode = &file.inode;
        let asked = OFlags::from_bits_retain(args.flags);
        // For a write out of the page cache (mmap, writeback), the handle and its flags are the
        // kernel's guess.
        let from_cache = args.write_flags & abi::WRITE_CACHE != 0;
        if !from_cache {
            file.in_use();
        }
        // The kernel does not name the user whose stores it writes out of its cache.
        let writer = if from_cache { file.fd.taken.uid() } else { caller.uid };
        let direct = args.write_flags & abi::WRITE_LOCKOWNER != 0;
        let append = !from_cache && self.write_mode == WriteMode::Through && asked.contains(OFlags::APPEND);
        let append_only = file.appends && !append;
        let is_from_program = !from_cache;
        if let (true, Some(result)) = (append, attempt.done()) {
            let size = result? as u32;
            self.drop_before_answer(inode, args, &[(args.offset, u64::MAX)], false);
            return Ok(abi::WriteOut { size, padding: 0 });
        }
        // The request is marked as direct, but the handle may have lost the flag. Then its bytes
        // need not be aligned.
        let backing_direct = direct && asked.contains(OFlags::DIRECT);
        // Without such a descriptor, for any reason, the open one is used.
        let fd = match backing_direct.then(|| file.direct()) {
            Some(Ok(fd)) => fd,
            None | Some(Err(_)) => file.fd.as_fd(),
        };
        let len = data.len() as u64;
        let end = args.offset.checked_add(len).ok_or(Errno::INVAL)?;
        let mut remembering = None;
        let outcome = self.write_bytes(
            inode,
            fd,
            |_| match direct {
                true => Change::Other { start: args.offset, end },
                false if attempt.is_resent() => Change::Suspect { start: args.offset, end },
                false => Change::Buffered { offset: args.offset, len, request, writeback: from_cache },
            },
            |before, overtaken| {
                let clears = args.write_flags & abi::WRITE_KILL_SUIDGID != 0;
                let _clearing = self.clearing(inode, clears, caller, fd)?;
                let merged = match from_cache {
                    true => inode.overtaken.merged(args.offset, data),
                    false => Cow::Borrowed(data),
                };
                let is_merged = matches!(merged, Cow::Owned(_));
                let data = &*merged;
                // An append at another offset than the kernel assumes replaces other bytes.
                let lands_there = !append || before.size_bytes == args.offset;
                remembering = overtaken
                    .filter(|_| lands_there)
                    .and_then(|overtaken| remember(&file, overtaken, request, args.offset, data));
                let mut there = 0;
                if append {
                    there = attempt.begun().map_or(0, |end| appended(&file, end, data));
                    attempt.begin(before.size_bytes);
                }
                let _spending = Spending::begin(self.privilege, writer, &inode.device.reserve, fd, len);
                let value = match append_only {
                    true => write_append_only(&file, fd, data, args.offset, before.size_bytes),
                    false => write_full(fd, &data[there..], args.offset + there as u64, append),
                };
                if !matches!(value, Ok(value) if value == data.len()) {
                    // The bytes of the file differ from this write.
                    remembering = None;
                }
                let value = there + value?;
                let value = if from_cache && value < data.len() {
                    write_rest(fd, &data[value..], args.offset + value as u64)?;
                    data.len()
                } else {
                    value
                };
                // The kernel's cache differs from the merged bytes.
                let as_announced = value == data.len() && !is_merged;
                Ok(Outcome { as_announced, ..Outcome::done(Written { bytes: value, before, is_merged }) })
            },
            |before, after| match append {
                true => before.size_bytes == args.offset && after.size_bytes == end,
                false => !append_only || after.size_bytes == before.size_bytes.max(end),
            },
            (!append).then_some((args.offset, data)),
        );
        let mut stale = self.stale_after(inode, args, &outcome, append);
        if attempt.is_resent() {
            stale.push((args.offset, if append { u64::MAX } else { end }));
        }
        // A write out of the cache must not wait: its page is under writeback until the answer, and
        // the drop waits for that. A failed write need not wait.
        let waits = is_from_program && outcome.is_ok();
        if !waits {
            stale.iter().for_each(|(start, end)| self.invalidations.request(inode, *start, *end));
        }
        if from_cache {
            inode.mark_mapped_writes();
            if outcome.is_err() {
                self.write_from_cache_failed(inode);
            }
        }
        let outcome = attempt.finish(outcome, |outcome| outcome.value.bytes as u64)?;
        let written = outcome.value.bytes;
        if !direct && !append {
            self.dirty_ranges.record(inode, &file.fd, args.offset, args.offset + written as u64);
        } else if append && let Ok(now) = crate::inode::stat(fd) {
            // An append was at the end, whatever its offset.
            self.dirty_ranges.record(inode, &file.fd, now.stx_size.saturating_sub(written as u64), now.stx_size);
        }
        self.counters.written_bytes.add(written as u64);
        if waits && !stale.is_empty() {
            let last_is_free = outcome.overtaken.is_some_and(|overtaken| overtaken.last_is_free);
            self.drop_before_answer(inode, args, &stale, last_is_free);
        }
        drop(remembering);
        Ok(abi::WriteOut { size: written as u32, padding: 0 })
    }

    /// Makes the kernel drop these bytes, and waits for a limited time. This thread holds no lock
    /// that the drop, or the requests it waits for, could need. `last_is_free` is as in
    /// [`Overtaken`].
    fn drop_before_answer(&self, inode: &Arc<Inode>, args: &abi::WriteIn, stale: &[(u64, u64)], last_is_free: bool) {
        fuse::about_to_wait();
        let end = args.offset.saturating_add(args.size.into());
        let begin = Instant::now();
        // Only the last page of the write, if that is written in part, may be locked until the
        // answer (K6): it is dropped apart, after the others.
        let last_start = end.saturating_sub(1) / PAGE_SIZE as u64 * PAGE_SIZE as u64;
        let last = match last_start.saturating_add(PAGE_SIZE as u64) {
            last_end if last_end == end && args.offset <= last_start => end..end,
            last_end => last_start..last_end,
        };
        let mut are_dropped = true;
        let mut drop = |start: u64, end: u64, limit: Duration| {
            let left = limit.saturating_sub(begin.elapsed());
            are_dropped &= start >= end || self.invalidations.drop_now(inode, start, end, left);
        };
        for (start, end) in stale {
            drop(*start, last.start.min(*end), WHOLE_PAGES_WAIT);
            drop(last.end.max(*start), *end, WHOLE_PAGES_WAIT);
        }
        let is_of_last = |(start, end): &(u64, u64)| *start < last.end && last.start < *end;
        if stale.iter().any(is_of_last) {
            let limit = if last_is_free { WHOLE_PAGES_WAIT } else { begin.elapsed() + PART_OF_PAGE_WAIT };
            drop(last.start, last.end, limit);
        }
        if are_dropped && let Some(file) = &inode.file {
            file.drop_waited();
        }
    }

    /// Returns the ranges, in bytes, that the kernel must drop after a write, because its cache may
    /// differ from the file. Usually there are none: each drop lets READs overtake writes that wait
    /// in the kernel's queue.
    fn stale_after(
        &self,
        inode: &Inode,
        args: &abi::WriteIn,
        outcome: &Result<Outcome<Written>, Errno>,
        append: bool,
    ) -> Vec<(u64, u64)> {
        let (offset, end) = (args.offset, args.offset.saturating_add(args.size.into()));
        let mut stale = Vec::new();
        let outcome = match outcome {
            Ok(outcome) => outcome,
            // A failed write out of the cache leaves a clean page with bytes that the backing file
            // lacks. For other failed writes the kernel itself discards the pages that it holds.
            // But a READ that has overtaken the write may have brought others, and the backing file
            // may have the bytes all the same (O_SYNC).
            Err(_) => return vec![(offset, end)],
        };
        let is_through = self.write_mode == WriteMode::Through;
        // A page that is dirty again is written back before the kernel drops it. With the writeback
        // cache nothing is zeroed: the end moves before the page is let go.
        if let Some(page) = outcome.zeroed.filter(|_| is_through) {
            stale.push((page * PAGE_SIZE as u64, (page + 1) * PAGE_SIZE as u64));
        }
        let old_end = outcome.value.before.size_bytes;
        if append && !outcome.as_announced {
            // The bytes are at another offset than the kernel assumes.
            stale.push((offset, u64::MAX));
        } else if let Some(Overtaken { pages, .. }) = outcome.overtaken {
            stale.push(within(pages, offset, end));
        } else if outcome.value.is_merged {
            stale.push((offset, end));
        }
        // Bytes that a mapping stored behind the old end stay in the kernel's page, although the
        // file now has zeros between the ends.
        if is_through
            && inode.mapped_writes.load(Ordering::Relaxed)
            && old_end < offset
            && !old_end.is_multiple_of(PAGE_SIZE as u64)
        {
            stale.push((old_end, offset));
        }
        stale.retain(|(start, end)| start < end);
        stale
    }

    /// Handles the close of a descriptor: returns the error that the backing file system reports at
    /// close.
    pub(crate) fn flush(&self, fh: u64) -> Result<(), Errno> {
        let file = self.handles.file(fh)?;
        file.in_use();
        let fd = match rustix::io::dup(&file.fd) {
            Ok(fd) => fd,
            // No descriptor is left for this: a sync returns the same errors as a close.
            Err(_) if file.inode.device.closes_silently(&file.fd) => return Ok(()),
            Err(_) => {
                let synced = rustix::fs::fsync(&file.fd).inspect_err(|_| self.writeback_failed(&file.inode));
                return file.reported.report(&file.fd, synced);
            }
        };
        // SAFETY: the descriptor is ours alone and given up here; close reports what dropping it
        // would swallow.
        let result = unsafe { libc::close(rustix::fd::IntoRawFd::into_raw_fd(fd)) };
        match result {
            0 => Ok(()),
            _ => match errno(&std::io::Error::last_os_error()) {
                Errno::INTR => Ok(()), // It is closed all the same.
                errno => {
                    self.writeback_failed(&file.inode);
                    Err(errno)
                }
            },
        }
    }

    pub(crate) fn fsync(&self, args: &abi::FsyncIn) -> Result<(), Errno> {
        let file = self.handles.file(args.fh)?;
        fuse::about_to_wait();
        let synced = match args.fsync_flags & abi::FSYNC_FDATASYNC {
            0 => rustix::fs::fsync(&file.fd),
            _ => rustix::fs::fdatasync(&file.fd),
        };
        match synced {
            Ok(()) => self.dirty_ranges.synced(file.inode.nodeid, &file.fd),
            Err(_) => self.writeback_failed(&file.inode),
        }
        file.reported.report(&file.fd, synced)
    }

    /// Handles an error of writeback. The backing file may have older bytes than were written, and
    /// its stamp does not show this. So all lent and cached pages of the file are discarded.
    fn writeback_failed(&self, inode: &Arc<Inode>) {
        let Some(file) = &inode.file else { return };
        let _changing = inode.changing.lock();
        self.borrower.suspect(file);
        inode.record_stamp();
        if let Some(number) = file.kernel_stale() {
            self.invalidations.request_all(inode, number);
        }
    }
}

/// The result of a write.
struct Written {
    bytes: usize,
    /// The backing file as it was before.
    before: Stamp,
    /// Whether bytes of an overtaken write(2) were written in place of the cached ones.
    is_merged: bool,
}

/// Remembers the old and the new bytes of an overtaken write(2), until its pages are dropped. If
/// the file cannot be read, nothing is remembered.
fn remember<'a>(
    file: &'a OpenFile,
    overtaken: Overtaken,
    request: u64,
    offset: u64,
    data: &[u8],
) -> Option<Remembering<'a>> {
    let (start, end) = within(overtaken.pages, offset, offset + data.len() as u64);
    let mut before = vec![0; (end - start) as usize]; // Zeros behind the end.
    file.read_before_write(&mut before, start).ok()?;
    let written = &data[(start - offset) as usize..(end - offset) as usize];
    Some(file.inode.overtaken.begins(request, start, before, written))
}

/// How many bytes of `data` an earlier attempt has appended, when the file ended at `end`.
fn appended(file: &OpenFile, end: u64, data: &[u8]) -> usize {
    let mut there = vec![0; data.len()];
    file.read_uncached(&mut there, end).ok().filter(|len| there[..*len] == data[..*len]).unwrap_or(0)
}

/// Writes to an append-only file that ends at `end`, by a descriptor that always appends. The
/// existing bytes must be equal, and only the rest is written. (The kernel's page cache does not
/// distinguish such files, and writes whole pages.)
fn write_append_only(file: &OpenFile, fd: BorrowedFd<'_>, data: &[u8], offset: u64, end: u64) -> Result<usize, Errno> {
    let there = end.checked_sub(offset).ok_or(Errno::PERM)?;
    let there = usize::try_from(there).map_or(data.len(), |there| there.min(data.len()));
    if appended(file, offset, &data[..there]) != there {
        return Err(Errno::PERM);
    }
    Ok(there + write_full(fd, &data[there..], end, true)?)
}

/// Writes until everything is written or an error occurs. After an error behind some bytes, the
/// number of written bytes is returned; a persistent error fails the next write.
pub(crate) fn write_full(fd: BorrowedFd<'_>, data: &[u8], offset: u64, append: bool) -> Result<usize, Errno> {
    let flags = if append { ReadWriteFlags::APPEND } else { ReadWriteFlags::empty() };
    let mut done = 0;
    while done < data.len() {
        let piece = [IoSlice::new(&data[done..])];
        let result = if append {
            rustix::io::pwritev2(fd, &piece, offset + done as u64, flags)
        } else {
            rustix::io::pwrite(fd, &data[done..], offset + done as u64)
        };
        match result {
            Ok(0) => break,
            Ok(len) => done += len,
            Err(Errno::INTR) => {}
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    Ok(done)
}
