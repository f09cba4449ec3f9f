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
use crate::takeover::resent::Attempt;
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

/// How long the answer to a write may wait until the kernel has dropped pages. That takes some 0.1
/// ms, but may wait in turn for READs of these pages, and for what was stored through mappings to
/// be written.
const WHOLE_PAGES_WAIT: Duration = Duration::from_secs(1);

/// How long the answer may wait for the last page of the write, if that is written in part: if the
/// kernel has no bytes for the rest of it, it holds that page locked until it has its answer
/// (fs/fuse/file.c, fuse_fill_write_pages), so that the drop cannot end before. Under fsx three of
/// four such waits are in vain, and the others take less than 1 ms; so with 0.1 s here it took
/// twice as long.
const PART_OF_PAGE_WAIT: Duration = Duration::from_millis(10);

/// How long the answer to an open may wait until the kernel has dropped what it caches of a file
/// that was changed beside us: mostly some 0.1 ms.
const OPEN_WAIT: Duration = Duration::from_millis(10);

/// Flags of open(2) that are not passed on: decided per request (O_APPEND, O_DIRECT), done by the
/// kernel, or separately.
const NOT_BELOW: OFlags = OFlags::CREATE
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
    /// How a file is opened below when the caller asks for `asked`.
    pub(crate) fn flags_below(&self, asked: OFlags) -> OFlags {
        let mut flags = asked - NOT_BELOW;
        // The kernel's writeback cache reads the rest of a page before it writes a part.
        if self.write_mode == WriteMode::Back && flags & OFlags::ACCMODE == OFlags::WRONLY {
            flags = (flags - OFlags::ACCMODE) | OFlags::RDWR;
        }
        flags | OFlags::CLOEXEC
    }

    /// Opens a file. `waits`: also for the lease of another process, which is EAGAIN else, before
    /// anything has changed.
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
            // Before it is checked how the task comes: that is done once.
            return Err(Errno::AGAIN);
        }
        match args.flags {
            // The kernel's own, for an ioctl by who has the file open: nobody would come again.
            // (What programs open has O_LARGEFILE at the least.)
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

    /// Whether an open that fails with EAGAIN may wait for a lease of another process. File systems
    /// of other machines, and of servers in user space, may say it for reasons of their own.
    pub(crate) fn may_be_leased(&self, node: u64, args: &abi::OpenIn) -> bool {
        let is_local = |inode: Arc<Inode>| Ok(inode.device.is_local(&self.inodes.anchor(&inode)?));
        args.flags & OFlags::NONBLOCK.bits() == 0 && self.inodes.get(node).and_then(is_local).unwrap_or(false)
    }

    /// With the answer to an open the kernel drops the bytes of a file that was changed beside us,
    /// but goes on with the size that it believes: it would end a read or lseek there. It forgets
    /// that where we have had it drop the bytes ourselves; while that is under way, the kernel
    /// would not take the answer when it asks anew (`fuse_change_attributes`). So this waits for it
    /// for a while. The thread that opens holds no lock that a drop could need. Where the drop has
    /// to wait for anything else, the size is forgotten all the same.
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

    /// Opens the backing file as the caller has asked. Returns the flags that it is open with, too.
    /// `waits` is as for [`Passthrough::open`].
    pub(crate) fn open_below(&self, inode: &Inode, asked: OFlags, waits: bool) -> Result<(OwnedFd, OFlags), Errno> {
        if inode.kind != FileType::RegularFile {
            return Err(Errno::NXIO); // The kernel opens special files itself; opening one here could wait for ever.
        }
        let anchor = self.inodes.anchor(inode)?;
        let path = ProcPath::new(&anchor);
        let flags = self.flags_below(asked);
        // Elsewhere it may mean more than not to wait for leases.
        let waits = waits || !inode.device.is_local(&anchor);
        let open =
            |flags| if waits { open(path.path(), flags, Mode::empty()) } else { open_at_once(path.path(), flags) };
        let result = open(flags);
        let again = match result {
            Ok(fd) => return Ok((fd, flags)),
            // An append-only file opens for appending alone.
            Err(Errno::PERM) if asked.contains(OFlags::APPEND) => flags | OFlags::APPEND,
            // We asked to read as well; the caller did not.
            Err(Errno::ACCESS) if flags & OFlags::ACCMODE != asked & OFlags::ACCMODE => {
                (flags - OFlags::ACCMODE) | (asked & OFlags::ACCMODE)
            }
            Err(errno) => return Err(errno),
        };
        Ok((open(again)?, again))
    }

    /// Gives a file that is open below its number. The kernel may keep what it caches if nobody has
    /// changed the file beside us. `is_new`: it was made by us.
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
            file.direct()?; // EINVAL, where the file system below has no O_DIRECT.
        }
        let keep = self.observe_now(&inode, &file, is_new)?;
        if backing.is_some() {
            // Changes of this file are not reported while it is open, so the kernel must ask for
            // its attributes again.
            self.beside.ask_again(&inode);
            self.counters.passed_opens.add(1);
        } else if !keep {
            file.drops_cache();
        }
        let fh = self.handles.add_file(file.clone());
        Ok(file.answer(fh, keep, self.flushes(&file)))
    }

    /// Whether the daemon must hear of it when the file is closed: the file system below may have
    /// something to say then, or what was stored through a mapping is to be written, which the
    /// kernel does together with that. (What an open made the kernel drop is known to be dropped at
    /// the RELEASE, too.)
    pub(crate) fn flushes(&self, file: &OpenFile) -> bool {
        let may_be_stored_to = file.readable && file.writable;
        self.write_mode == WriteMode::Back || may_be_stored_to || !file.inode.device.closes_silently(&file.fd)
    }

    /// A READ that is not for the page cache, or of a file that the pool is not for.
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

    /// A write that is sent again writes the same bytes to the same place. One that appends looks
    /// at where the file ended before the first attempt: if bytes of it are there already, it goes
    /// on there, and nothing is appended twice. A READ may have overtaken it before, which nobody
    /// remembers: so its pages are dropped.
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
        // Out of the page cache (mmap, writeback), the handle and its flags are the kernel's guess.
        let from_cache = args.write_flags & abi::WRITE_CACHE != 0;
        if !from_cache {
            file.in_use();
        }
        // The kernel does not say who has stored what comes out of its cache.
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
        // Marked as direct, but the flag may be gone from the handle: its bytes need not be aligned
        // any more.
        let direct_below = direct && asked.contains(OFlags::DIRECT);
        // Without such a descriptor, for whatever reason, what is open goes on.
        let fd = match direct_below.then(|| file.direct()) {
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
                false if attempt.is_resent() => Change::Doubtful { start: args.offset, end },
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
                // One that lands elsewhere replaces something else.
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
                    // The file holds something else than this write.
                    remembering = None;
                }
                let value = there + value?;
                let value = if from_cache && value < data.len() {
                    write_rest(fd, &data[value..], args.offset + value as u64)?;
                    data.len()
                } else {
                    value
                };
                // The kernel caches something else than merged bytes.
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
        // the drop waits for that. And a write that has failed has nothing to show.
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
            self.ledger.record(inode, &file.fd, args.offset, args.offset + written as u64);
        } else if append && let Ok(now) = crate::inode::stat(fd) {
            // Wherever it landed, it was at the end.
            self.ledger.record(inode, &file.fd, now.stx_size.saturating_sub(written as u64), now.stx_size);
        }
        self.counters.written_bytes.add(written as u64);
        if waits && !stale.is_empty() {
            let last_is_free = outcome.overtaken.is_some_and(|overtaken| overtaken.last_is_free);
            self.drop_before_answer(inode, args, &stale, last_is_free);
        }
        drop(remembering);
        Ok(abi::WriteOut { size: written as u32, padding: 0 })
    }

    /// Has the kernel drop these bytes, and waits for it for a while. Nothing of ours is locked
    /// here that the drop, or what it waits for, could need. `last_is_free` is as in [`Overtaken`].
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
            // A failed write out of the cache leaves a clean page of bytes that are not below. Of
            // other failed writes the kernel itself gives up the pages that it holds for them; but
            // a READ that has overtaken may have brought others, and the bytes may be below all the
            // same (O_SYNC).
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
            // Landed elsewhere than the kernel believes.
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
            // No descriptor is left for it: what would be told at close, a sync tells as well.
            Err(_) if file.inode.device.closes_silently(&file.fd) => return Ok(()),
            Err(_) => {
                let synced = rustix::fs::fsync(&file.fd).inspect_err(|_| self.writeback_failed(&file.inode));
                return file.told.tell(&file.fd, synced);
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
            Ok(()) => self.ledger.synced(file.inode.nodeid, &file.fd),
            Err(_) => self.writeback_failed(&file.inode),
        }
        file.told.tell(&file.fd, synced)
    }

    /// Handles an error of writeback. The backing file may have older bytes than were written, and
    /// its stamp does not show this. So all lent and cached pages of the file are discarded.
    fn writeback_failed(&self, inode: &Arc<Inode>) {
        let Some(file) = &inode.file else { return };
        let _changing = inode.changing.lock();
        self.borrower.doubt(file);
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
    /// Bytes of an overtaken write(2) were written in place of those that the kernel caches.
    is_merged: bool,
}

/// Remembers what an overtaken write(2) is about to replace, and by what, until its pages are
/// dropped. Where the file cannot be read, nothing is remembered.
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

/// How much of `data` a first attempt to append it, where the file ended at `end`, has left there.
fn appended(file: &OpenFile, end: u64, data: &[u8]) -> usize {
    let mut there = vec![0; data.len()];
    file.read_uncached(&mut there, end).ok().filter(|len| there[..*len] == data[..*len]).unwrap_or(0)
}

/// Writes to an append-only file that ends at `end`, by a descriptor that appends whatever it is
/// told: what is there must be the same, and only the rest is written. (The kernel's page cache
/// knows nothing of such files, and writes whole pages.)
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
