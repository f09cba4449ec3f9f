//! Announcing changes to the borrower.
//!
//! Every change of a regular file is announced before it is applied, and ends before it is
//! answered. A change holds the inode's `changing` lock from its first stamp to its last. So a
//! difference between these stamps comes from this change, or from an external change. READ never
//! takes that lock, but waits in the borrower for a change of its own pages. So operations under
//! the lock must depend only on the backing file system. The one exception is an open that moves
//! the end of a file: it waits for the kernel for a limited time. If two inodes change at once
//! (rename), they are locked in the order of their node ids.

use crate::filesystem::Passthrough;
use crate::inode::handle::OpenFile;
use crate::inode::{Inode, stamp_of, stat};
use crate::ops::data::write_full;
use crate::system::nobody_else_writes;
use borrower::{Change, Overtaken, Stamp, Writers};
use fuse::Errno;
use page::{PAGE_SIZE, Page};
use parking_lot::MutexGuard;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest time that a write below is expected to take from the moment at which it moves the file's
/// times: as long as a READ waits for a change. A file whose times are older is believed without a
/// look at who may be writing it.
const WRITE_MAX: Duration = Duration::from_secs(30);

/// How far apart two changes are at the least that are given different times: two ticks of the
/// slowest clock that kernels have. Since Linux 6.13 times that were looked at are never given
/// again.
const TIME_GRAIN: Duration = Duration::from_millis(20);

/// How a change of bytes went.
pub(crate) struct Outcome<T> {
    /// The answer.
    pub value: T,
    /// Whether it was applied as announced.
    pub as_announced: bool,
    /// The pages, if any, that the kernel may cache with older bytes behind it.
    pub overtaken: Option<Overtaken>,
    /// Index of the page of which the kernel may have zeroed what the backing file holds (R33).
    pub zeroed: Option<u64>,
}

impl<T> Outcome<T> {
    /// Applied as announced.
    pub(crate) fn done(value: T) -> Outcome<T> {
        Outcome { value, as_announced: true, overtaken: None, zeroed: None }
    }
}

impl Passthrough {
    /// A change of bytes or size. `plan` sees the stamp before and says what is going to happen;
    /// `apply` does it, and sees the stamp too; `verify` sees the stamps before and after, and says
    /// whether what happened is what was announced.
    pub(crate) fn change<T>(
        &self,
        inode: &Inode,
        fd: impl AsFd,
        plan: impl FnOnce(Stamp) -> Change,
        apply: impl FnOnce(Stamp) -> Result<Outcome<T>, Errno>,
        verify: impl FnOnce(Stamp, Stamp) -> bool,
    ) -> Result<Outcome<T>, Errno> {
        self.write_bytes(inode, fd, plan, |before, _| apply(before), verify, None)
    }

    /// A change of bytes, as [`Passthrough::change`] does it; `apply` sees what of it is overtaken,
    /// too. If it went as announced, the backing file then holds the bytes of `written`, at that
    /// offset.
    pub(crate) fn write_bytes<T>(
        &self,
        inode: &Inode,
        fd: impl AsFd,
        plan: impl FnOnce(Stamp) -> Change,
        apply: impl FnOnce(Stamp, Option<Overtaken>) -> Result<Outcome<T>, Errno>,
        verify: impl FnOnce(Stamp, Stamp) -> bool,
        written: Option<(u64, &[u8])>,
    ) -> Result<Outcome<T>, Errno> {
        let fd = fd.as_fd();
        let Some(file) = &inode.file else { return apply(stamp_of(&stat(fd)?), None) };
        let _changing = inode.changing.lock();
        let result = self.change_held(file, fd, plan, apply, verify, written);
        inode.record_stamp();
        result
    }

    /// Writes bytes again that the page of the file below holds. False if it does not, or that is
    /// not known.
    pub(crate) fn write_again(&self, inode: &Inode, below: &OwnedFd, index: u32, page: &Page) -> Result<bool, Errno> {
        let Some(file) = &inode.file else { return Ok(false) };
        let start = u64::from(index) * PAGE_SIZE as u64;
        let end = start + PAGE_SIZE as u64;
        // Nothing of ours can change it from here on, and what somebody has changed beside us is
        // found. (Not what he changes from now on until it is written: whoever has the papers' way
        // of doing it has that.)
        let _changing = inode.changing.lock();
        let moment = file.moment();
        self.borrower.observe(file, moment, stamp_of(&stat(below)?), Writers::Unasked);
        if !self.borrower.is_known(file, index, page) {
            return Ok(false);
        }
        let write = |_, _| {
            let value = write_full(below.as_fd(), page, start, false)?;
            Ok(Outcome { as_announced: value == PAGE_SIZE, ..Outcome::done(()) })
        };
        let plan = |_| Change::Other { start, end };
        let written = Some((start, &page[..]));
        let result = self.change_held(file, below.as_fd(), plan, write, |_, _| true, written);
        inode.record_stamp();
        result.map(|outcome| outcome.as_announced)
    }

    fn change_held<T>(
        &self,
        file: &borrower::File,
        fd: BorrowedFd<'_>,
        plan: impl FnOnce(Stamp) -> Change,
        apply: impl FnOnce(Stamp, Option<Overtaken>) -> Result<Outcome<T>, Errno>,
        verify: impl FnOnce(Stamp, Stamp) -> bool,
        written: Option<(u64, &[u8])>,
    ) -> Result<Outcome<T>, Errno> {
        let before = stamp_of(&stat(fd)?);
        let guard = self.borrower.change(file, plan(before), before);
        let overtaken = guard.overtaken();
        let result = apply(before, overtaken);
        let after = stat(fd).map(|after| stamp_of(&after));
        let (mut outcome, after) = match (result, after) {
            (Ok(outcome), Ok(after)) => (outcome, after),
            (Ok(outcome), Err(_)) => return Ok(Outcome { as_announced: false, ..outcome }),
            (Err(errno), Ok(after)) => {
                guard.failed(after);
                return Err(errno);
            }
            (Err(errno), Err(_)) => return Err(errno),
        };
        outcome.overtaken = overtaken;
        if !outcome.as_announced {
            outcome.zeroed = guard.failed(after);
        } else if verify(before, after) {
            outcome.zeroed = guard.applied(after, written);
        } else {
            // Something else has happened as well: dropping the guard says so.
            outcome.as_announced = false;
        }
        Ok(outcome)
    }

    /// A change of attributes, names or extended attributes of up to two inodes.
    pub(crate) fn change_attributes<T>(
        &self,
        inodes: [Option<&Arc<Inode>>; 2],
        apply: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut inodes = inodes.map(|inode| inode.filter(|inode| inode.file.is_some()));
        match (inodes[0], inodes[1]) {
            (Some(one), Some(two)) if one.nodeid == two.nodeid => inodes[1] = None,
            (Some(one), Some(two)) if one.nodeid > two.nodeid => inodes.swap(0, 1),
            _ => {}
        }
        let _changing = inodes.map(|inode| inode.map(|inode| inode.changing.lock()));
        let mut guards = [None, None];
        for (slot, inode) in guards.iter_mut().zip(inodes) {
            let Some((inode, file)) = inode.and_then(|inode| Some((inode, inode.file.as_ref()?))) else { continue };
            // A file that its handle does not find has no name left: nobody can open it.
            let Ok(anchor) = self.inodes.anchor(inode) else { continue };
            let before = stamp_of(&stat(&anchor)?);
            *slot = Some((self.borrower.change(file, Change::Attributes, before), anchor));
        }
        let result = apply();
        for (guard, anchor) in guards.into_iter().flatten() {
            // Also if it failed: no byte has changed in any case.
            if let Ok(after) = stat(&anchor) {
                guard.applied(stamp_of(&after), None);
            }
        }
        inodes.iter().flatten().for_each(|inode| inode.record_stamp());
        result
    }

    /// Shows the borrower what a file looks like that was just opened; nothing of ours changes it
    /// at that moment. Returns whether the kernel may keep what it caches. If not, it drops it when
    /// the open is answered; but opens at the same time could read what it has not dropped yet, so
    /// none of them may keep it until we have had it dropped ourselves. `is_new`: it was made by
    /// us.
    pub(crate) fn observe_now(&self, inode: &Arc<Inode>, open: &OpenFile, is_new: bool) -> Result<bool, Errno> {
        let Some(file) = &inode.file else { return Ok(false) };
        let mut changing = inode.changing.lock();
        let size_bytes = self.observe_open(inode, file, open, is_new)?;
        // Of a file that is passed through, the kernel asks the file below.
        if file.end_is_unsure() && open.backing.is_none() {
            self.move_end(inode, file, open, size_bytes, &mut changing)?;
        }
        match file.kernel_stale() {
            None => Ok(true),
            Some(number) => {
                self.invalidations.request_all(inode, number);
                Ok(false)
            }
        }
    }

    /// Returns the size in bytes. The caller holds `changing`.
    fn observe_open(&self, inode: &Inode, file: &borrower::File, open: &OpenFile, is_new: bool) -> Result<u64, Errno> {
        let fd = &open.fd;
        let moment = file.moment();
        let stamp = stamp_of(&stat(fd)?);
        let writers = match file.is_sure_of(stamp) {
            false if is_new => Writers::None,
            false => {
                let is_alone = || !open.writable && inode.device.is_local(fd) && nobody_else_writes(fd);
                writers(file.beside_ctime_ns(stamp), now_ns(), is_alone)
            }
            true => Writers::Unasked,
        };
        self.borrower.observe(file, moment, stamp, writers);
        inode.record_stamp();
        Ok(stamp.size_bytes)
    }

    /// Has the kernel believe in the end of a file that was moved beside the mount. A program that
    /// opens the file and maps it would otherwise get SIGBUS behind the end that the kernel
    /// remembers. Before that the kernel drops what it caches: in the page of an older end, zeros
    /// follow. It may have to write that back first, so changes go on meanwhile; they are shut out
    /// again while the end is moved. Nobody can tell the kernel of an earlier end than it
    /// remembers: but once it caches nothing, it finds that with the first READ.
    fn move_end(
        &self,
        inode: &Arc<Inode>,
        file: &borrower::File,
        open: &OpenFile,
        size_bytes: u64,
        changing: &mut MutexGuard<'_, ()>,
    ) -> Result<(), Errno> {
        fuse::about_to_wait();
        let number = file.kernel_stale();
        let drop_all = || {
            let is_dropped = self.invalidations.drop_all_now(inode, number);
            self.beside.catch_up(self, inode);
            is_dropped
        };
        if !MutexGuard::unlocked(changing, drop_all) {
            return Ok(());
        }
        // If we have shortened it since, the kernel is yet to be told so, and must find the end
        // that it knows: then it drops what lies behind the new one.
        let is_shorter = self.observe_open(inode, file, open, false)? < size_bytes;
        // Only the end of before: behind it, the kernel may have cached what was there then.
        if !is_shorter && file.end_is_unsure() && self.invalidations.move_end_now(inode, size_bytes) {
            file.end_moved(size_bytes);
            inode.record_stamp();
        }
        Ok(())
    }

    /// Stats a node, and shows the borrower if no change is under way (whose half-done state would
    /// look like somebody else's doing).
    pub(crate) fn stat_observed(&self, inode: &Inode, fd: impl AsFd) -> Result<rustix::fs::Statx, Errno> {
        let Some(file) = &inode.file else { return stat(fd) };
        let changing = inode.changing.try_lock();
        let moment = file.moment();
        let now = stat(fd)?;
        if changing.is_some() {
            let stamp = stamp_of(&now);
            let writers = match file.is_sure_of(stamp) {
                false if writers(file.beside_ctime_ns(stamp), now_ns(), || false) == Writers::None => Writers::None,
                _ => Writers::Unasked,
            };
            self.borrower.observe(file, moment, stamp, writers);
            inode.record_stamp();
        }
        Ok(now)
    }
}

/// In nanoseconds since the epoch, as a stamp's times are.
fn now_ns() -> i128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as i128
}

/// Whether somebody may have been writing a backing file whose last change beside the mount was at
/// `ctime_ns`. `is_alone` asks whether nobody has it open to write now. (What is ours is ended
/// before a stamp is taken, so it is only in the way of that question.)
fn writers(ctime_ns: i128, now_ns: i128, is_alone: impl FnOnce() -> bool) -> Writers {
    // A clock that was set back says as little as a file system whose times are another machine's:
    // what is far from now is not of now.
    match now_ns.abs_diff(ctime_ns) {
        age if age > WRITE_MAX.as_nanos() => Writers::None,
        age if age > TIME_GRAIN.as_nanos() && is_alone() => Writers::None,
        _ => Writers::Perhaps,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_be_writing_is_told_by_the_time_and_by_who_has_the_file_open() {
        let of = |age: Duration, is_alone| {
            let ctime_ns = -7;
            let age = age.as_nanos() as i128;
            let [then, before] = [age, -age].map(|age| writers(ctime_ns, ctime_ns + age, || is_alone));
            assert_eq!(then, before, "the clock may have been set back");
            then
        };
        assert_eq!(of(2 * WRITE_MAX, false), Writers::None);
        assert_eq!(of(WRITE_MAX, false), Writers::Perhaps);
        assert_eq!(of(WRITE_MAX, true), Writers::None);
        assert_eq!(of(TIME_GRAIN, true), Writers::Perhaps);
    }
}
