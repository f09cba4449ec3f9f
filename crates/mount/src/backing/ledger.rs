//! Which pages were written below and may still be cached there, so that they are dropped once they
//! are clean.
//!
//! A write is in the page cache below when it is answered (that is what makes it safe against a
//! death of the daemon). The same bytes are, or soon will be, in the page cache of the mount, so
//! the copy below is dropped: a janitor thread starts the writeback of what has lain for as long as
//! the kernel leaves it, and comes again to drop what is clean by then. fsync does it for its file
//! at once. Sooner would be in the way: a page that is written once a second would go to the disk
//! once a second.
//!
//! Nothing here waits for writeback: whoever does is told of its errors, and the kernel tells each
//! descriptor only once, and those opened later not at all (mm/filemap.c,
//! file_check_and_advance_wb_err). They are for the programs' own fsync.
//!
//! Bounded: from so many bytes ([`Config::written_bytes`](crate::Config::written_bytes)) or
//! [`FILES_HURRY`] files on, the largest go at once, until half of that is left. Beyond
//! [`FILES_MAX`] files or [`BYTES_MAX`] a writer starts the writeback of what it wrote itself;
//! beyond [`RANGES_MAX`] ranges those of a file merge. Nothing here keeps a deleted file alive.

use crate::backing::read::drop_clean;
use crate::inode::{Inode, Inodes};
use crate::lifecycle::config::Config;
use crate::system::{ProcPath, cached};
use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, open};
use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Files with written ranges.
const FILES_MAX: usize = 16_384;
/// Files from which on the janitor waits for nothing.
const FILES_HURRY: usize = FILES_MAX / 2;
/// Ranges of one file; more merge into one.
const RANGES_MAX: usize = 16;
/// Written bytes whose writeback has not begun, from which on a writer starts its own.
const BYTES_MAX: u64 = 256 << 20;
/// When the janitor comes again once it has started the writeback of a file, each time after the
/// one before: then what it has not found clean is the kernel's.
const SETTLES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(3), Duration::from_secs(9)];
/// What passes between two looks of the janitor at what is due.
const LOOK_EVERY: Duration = Duration::from_secs(1);

struct Written {
    inode: Arc<Inode>,
    ranges: Vec<(u64, u64)>,
    /// How much was written there since the writeback was started; of what was written twice at the
    /// most once.
    bytes: u64,
    /// When the janitor comes.
    due: Instant,
    /// How often it has come since something was written: the first time it starts the writeback.
    visits: usize,
    /// It goes, whatever is written meanwhile.
    is_hurried: bool,
}

impl Written {
    fn hurry(&mut self, now: Instant) {
        (self.due, self.is_hurried) = (now, true);
    }

    /// The janitor comes. Whether for the last time.
    fn visit(&mut self, now: Instant) -> bool {
        self.is_hurried &= self.visits == 0;
        self.visits = if self.bytes > 0 { 1 } else { self.visits + 1 };
        self.bytes = 0;
        match SETTLES.get(self.visits - 1) {
            Some(settle) => self.due = now + *settle,
            None => return true,
        }
        false
    }
}

#[derive(Default)]
struct State {
    files: HashMap<u64, Written>,
    bytes: u64,
    closing: bool,
}

impl State {
    /// Those whose turn has come, the largest first: all, if it is to be closed; and if there are
    /// more than so many bytes or files, enough of them to leave half.
    fn hurry(&mut self, bytes_max: u64, now: Instant) {
        if self.closing {
            self.files.values_mut().for_each(|written| written.hurry(now));
        } else if self.is_over(bytes_max, FILES_HURRY) {
            let (mut bytes, mut files) = (self.bytes, self.files.len());
            let mut largest: Vec<_> = self.files.values_mut().collect();
            largest.sort_unstable_by_key(|written| Reverse(written.bytes));
            for written in largest {
                if bytes <= bytes_max / 2 && files <= FILES_HURRY / 2 {
                    break;
                }
                written.hurry(now);
                (bytes, files) = (bytes - written.bytes, files - 1);
            }
        }
    }

    fn forget(&mut self, nodeid: u64) -> Option<Written> {
        let removed = self.files.remove(&nodeid)?;
        self.bytes -= removed.bytes;
        removed.inode.written_below.store(false, Ordering::Relaxed);
        Some(removed)
    }

    fn is_over(&self, bytes_max: u64, files_max: usize) -> bool {
        self.bytes > bytes_max || self.files.len() > files_max
    }
}

/// The ledger.
pub(crate) struct Ledger {
    state: Mutex<State>,
    wake: Condvar,
    linger: Duration,
    bytes_hurry: u64,
}

impl Ledger {
    /// Empty.
    pub(crate) fn new(config: &Config) -> Ledger {
        let (linger, bytes_hurry) = (config.written_linger, config.written_bytes.min(BYTES_MAX / 2));
        Ledger { state: Mutex::default(), wake: Condvar::new(), linger, bytes_hurry }
    }

    /// `start..end` was written through `fd`.
    pub(crate) fn record(&self, inode: &Arc<Inode>, fd: &OwnedFd, start: u64, end: u64) {
        let mut state = self.state.lock();
        let full = state.bytes + (end - start) > BYTES_MAX;
        let known = state.files.contains_key(&inode.nodeid);
        if full || (!known && state.files.len() >= FILES_MAX) {
            drop(state);
            if full {
                self.wake.notify_one();
            }
            drop_clean(fd, start, end);
            return;
        }
        let state = &mut *state;
        let written = state.files.entry(inode.nodeid).or_insert_with(|| Written {
            inode: inode.clone(),
            ranges: Vec::new(),
            bytes: 0,
            due: Instant::now() + self.linger,
            visits: 0,
            is_hurried: false,
        });
        inode.written_below.store(true, Ordering::Relaxed);
        // What comes now would be written at the next visit: so it has its own time, and what is
        // clean by then is dropped then.
        if written.visits > 0 && !written.is_hurried {
            (written.visits, written.due) = (0, Instant::now() + self.linger);
        }
        let before = written.bytes;
        merge(&mut written.ranges, start, end);
        written.bytes = (before + (end - start)).min(length(&written.ranges));
        state.bytes = state.bytes - before + written.bytes;
        // With anything here, the janitor looks again by itself.
        let is_over = state.is_over(self.bytes_hurry, if known { usize::MAX } else { FILES_HURRY });
        if is_over || !known && state.files.len() == 1 {
            self.wake.notify_one();
        }
    }

    /// Forgets a file: it is deleted, or everything of it is known to be clean.
    pub(crate) fn remove(&self, nodeid: u64) -> Vec<(u64, u64)> {
        self.state.lock().forget(nodeid).map_or_else(Vec::new, |removed| removed.ranges)
    }

    /// A file was synced through `fd`: its written pages are clean, and go.
    pub(crate) fn synced(&self, nodeid: u64, fd: &OwnedFd) {
        for (start, end) in self.remove(nodeid) {
            drop_clean(fd, start, end);
        }
    }

    /// Files with written ranges, and their bytes whose writeback has not begun.
    pub(crate) fn pending(&self) -> (usize, u64) {
        let state = self.state.lock();
        (state.files.len(), state.bytes)
    }

    /// Ends [`Ledger::tend`], after it has dropped everything.
    pub(crate) fn close(&self) {
        self.state.lock().closing = true;
        self.wake.notify_all();
    }

    /// The janitor's work. Returns after [`Ledger::close`].
    pub(crate) fn tend(&self, inodes: &Inodes) {
        let mut state = self.state.lock();
        loop {
            let now = Instant::now();
            state.hurry(self.bytes_hurry, now);
            let State { files, bytes, closing } = &mut *state;
            let mut visited = Vec::new();
            for written in files.values_mut().filter(|written| written.due <= now) {
                *bytes -= written.bytes;
                let is_first = written.visits == 0;
                let is_last = written.visit(now) || *closing && !is_first;
                visited.push((written.inode.clone(), written.ranges.clone(), is_last));
            }
            if visited.is_empty() {
                if *closing {
                    return;
                }
                if files.is_empty() {
                    self.wake.wait(&mut state);
                } else {
                    self.wake.wait_for(&mut state, LOOK_EVERY);
                }
                continue;
            }
            drop(state);
            for (inode, ranges, is_last) in visited {
                if is_last {
                    self.remove(inode.nodeid); // What is written from now on is another matter.
                }
                let is_gone = reopen(inodes, &inode).is_none_or(|fd| {
                    ranges.iter().for_each(|&(start, end)| drop_clean(&fd, start, end));
                    ranges.iter().all(|&(start, end)| cached(&fd, start, end).is_ok_and(|cached| cached.pages == 0))
                });
                if is_gone && !is_last {
                    self.remove_if_clean(inode.nodeid);
                }
            }
            state = self.state.lock();
        }
    }

    /// Forgets a file of which nothing is left below, unless something was written since.
    fn remove_if_clean(&self, nodeid: u64) {
        let mut state = self.state.lock();
        if state.files.get(&nodeid).is_some_and(|written| written.bytes == 0) {
            state.forget(nodeid);
        }
    }
}

/// For advice, a file need not be writable. A descriptor kept open for writing would stand in the
/// way of executing it below.
fn reopen(inodes: &Inodes, inode: &Inode) -> Option<OwnedFd> {
    let anchor = inodes.anchor_once(inode).ok()?; // The kernel may have forgotten it.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOATIME;
    let path = ProcPath::new(&anchor);
    open(path.path(), flags, Mode::empty()).or_else(|_| open(path.path(), flags - OFlags::NOATIME, Mode::empty())).ok()
}

fn length(ranges: &[(u64, u64)]) -> u64 {
    ranges.iter().map(|(start, end)| end - start).sum()
}

/// Adds a range; ranges that touch become one, and beyond the bound all do.
fn merge(ranges: &mut Vec<(u64, u64)>, mut start: u64, mut end: u64) {
    ranges.retain(|&(other_start, other_end)| {
        let apart = other_end < start || end < other_start;
        if !apart {
            start = start.min(other_start);
            end = end.max(other_end);
        }
        apart
    });
    ranges.push((start, end));
    if ranges.len() > RANGES_MAX {
        let hull = ranges.iter().fold((u64::MAX, 0), |hull, range| (hull.0.min(range.0), hull.1.max(range.1)));
        ranges.clear();
        ranges.push(hull);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_merge_and_stay_few() {
        let mut ranges = Vec::new();
        merge(&mut ranges, 0, 10);
        merge(&mut ranges, 20, 30);
        merge(&mut ranges, 10, 20);
        assert_eq!(ranges, [(0, 30)]);
        for at in 1..=RANGES_MAX as u64 {
            merge(&mut ranges, at * 100, at * 100 + 1);
            assert!(ranges.len() <= RANGES_MAX);
        }
        assert_eq!(ranges, [(0, RANGES_MAX as u64 * 100 + 1)]);
    }
}
