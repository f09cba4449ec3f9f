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

/// Longest expected time of an external write after it has changed the file's times; as long as a
/// READ waits for a change. A file with older times is trusted without a check for writers.
const WRITE_MAX: Duration = Duration::from_secs(30);

/// Shortest time between two changes that get different times: two ticks of the slowest clock of
/// any kernel. Since Linux 6.13 a time that was read is never assigned again.
const TIME_GRAIN: Duration = Duration::from_millis(20);

/// The result of a change of bytes.
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
    /// The result of a change that was applied as announced.
    pub(crate) fn done(value: T) -> Outcome<T> {
        Outcome { value, as_announced: true, overtaken: None, zeroed: None }
    }
}

impl Passthrough {
    /// Makes a change of bytes or size. `plan` gets the stamp before, and returns the change to
    /// announce. `apply` makes the change, and gets the stamp too. `verify` gets the stamps before
    /// and after, and returns whether the change is the announced one.
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

    /// Makes a change of bytes, like [`Passthrough::change`]. `apply` also gets the part of it that
    /// is overtaken. If the change went as announced, the backing file then has the bytes of
    /// `written` at that offset.
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

    /// Writes bytes again that the page of the backing file already has. Returns false if the page
    /// differs, or if this is unknown.
    pub(crate) fn write_again(&self, inode: &Inode, backing: &OwnedFd, index: u32, page: &Page) -> Result<bool, Errno> {
        let Some(file) = &inode.file else { return Ok(false) };
        let start = u64::from(index) * PAGE_SIZE as u64;
        let end = start + PAGE_SIZE as u64;
        // Nothing of ours can change it from here on, and what somebody has changed externally is
        // found. (Not what he changes from now on until it is written: whoever has the papers' way
        // of doing it has that.)
        let _changing = inode.changing.lock();
        let moment = file.moment();
        self.borrower.observe(file, moment, stamp_of(&stat(backing)?), Writers::Unasked);
        if !self.borrower.backing_file_has(file, index, page) {
            return Ok(false);
        }
        let write = |_, _| {
            let value = write_full(backing.as_fd(), page, start, false)?;
            Ok(Outcome { as_announced: value == PAGE_SIZE, ..Outcome::done(()) })
        };
        let plan = |_| Change::Other { start, end };
        let written = Some((start, &page[..]));
        let result = self.change_held(file, backing.as_fd(), plan, write, |_, _| true, written);
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
            // There was another change as well: dropping the guard reports it.
            outcome.as_announced = false;
        }
        Ok(outcome)
    }

    /// Makes a change of attributes, names or extended attributes of up to two inodes.
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
            // Even if it failed: no byte has changed in any case.
            if let Ok(after) = stat(&anchor) {
                guard.applied(stamp_of(&after), None);
            }
        }
        inodes.iter().flatten().for_each(|inode| inode.record_stamp());
        result
    }

    /// Passes the stamp of a file that was just opened to the borrower, while no change of this
    /// daemon is in progress. Returns whether the kernel may keep its cache. If not, the kernel
    /// drops it when the open is answered. But concurrent opens could read pages that are not
    /// dropped yet, so none of them may keep the cache until this daemon has made the kernel drop
    /// it. `is_new`: this daemon has created the file.
    pub(crate) fn observe_now(&self, inode: &Arc<Inode>, open: &OpenFile, is_new: bool) -> Result<bool, Errno> {
        let Some(file) = &inode.file else { return Ok(false) };
        let mut changing = inode.changing.lock();
        let size_bytes = self.observe_open(inode, file, open, is_new)?;
        // For a passed file, the kernel uses the size of the backing file.
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
                writers(file.external_ctime_ns(stamp), now_ns(), is_alone)
            }
            true => Writers::Unasked,
        };
        self.borrower.observe(file, moment, stamp, writers);
        inode.record_stamp();
        Ok(stamp.size_bytes)
    }

    /// Updates the kernel's size of a file after an external change. Otherwise a program that opens
    /// the file and maps it would get SIGBUS behind the end that the kernel has cached. First the
    /// kernel drops its cache, because zeros follow the old end in its page. It may have to write
    /// that page back first, so changes continue meanwhile; they are locked out again while the end
    /// is moved. The kernel cannot be told a smaller end than it has cached, but with an empty
    /// cache it finds that end with the first READ.
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
            self.external_changes.catch_up(self, inode);
            is_dropped
        };
        if !MutexGuard::unlocked(changing, drop_all) {
            return Ok(());
        }
        // If this daemon has shortened the file since, the kernel does not know that yet. It must
        // find the end that it has cached, and then drops the pages behind the new one.
        let is_shorter = self.observe_open(inode, file, open, false)? < size_bytes;
        // Only the end of before: behind it, the kernel may have cached what was there then.
        if !is_shorter && file.end_is_unsure() && self.invalidations.move_end_now(inode, size_bytes) {
            file.end_moved(size_bytes);
            inode.record_stamp();
        }
        Ok(())
    }

    /// Reads the attributes of a node, and passes the stamp to the borrower if no change is in
    /// progress, whose intermediate state would look like an external change.
    pub(crate) fn stat_observed(&self, inode: &Inode, fd: impl AsFd) -> Result<rustix::fs::Statx, Errno> {
        let Some(file) = &inode.file else { return stat(fd) };
        let changing = inode.changing.try_lock();
        let moment = file.moment();
        let now = stat(fd)?;
        if changing.is_some() {
            let stamp = stamp_of(&now);
            let writers = match file.is_sure_of(stamp) {
                false if writers(file.external_ctime_ns(stamp), now_ns(), || false) == Writers::None => Writers::None,
                _ => Writers::Unasked,
            };
            self.borrower.observe(file, moment, stamp, writers);
            inode.record_stamp();
        }
        Ok(now)
    }
}

/// The present time in nanoseconds since the epoch, like the times of a stamp.
fn now_ns() -> i128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as i128
}

/// Whether somebody may have been writing a backing file whose last external change was at
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
    fn possible_writers_are_found_by_time_and_by_open_files() {
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
