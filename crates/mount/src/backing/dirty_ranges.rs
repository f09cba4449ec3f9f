//! Dirty ranges: the written pages of backing files that may still be in their page cache, to be
//! dropped once they are clean.
//!
//! When a write is answered, its bytes are in the page cache of the backing file, where they
//! survive the death of the daemon. The same bytes are, or soon will be, in the page cache of the
//! mount, so the copy in the backing file's cache is dropped. A janitor thread starts the writeback
//! of ranges that are as old as the kernel lets dirty pages become. It visits them again to drop
//! the pages that are clean by then. fsync does this for its file at once. An earlier writeback
//! would cost: a page that is written once a second would go to the disk once a second.
//!
//! Nothing here waits for writeback, because waiting would consume its errors. The kernel reports
//! an error once to each descriptor, and never to descriptors opened later (mm/filemap.c,
//! file_check_and_advance_wb_err). These reports are for the programs' own fsync.
//!
//! Bounds: if more than [`Config::written_bytes`](crate::Config::written_bytes) bytes or
//! [`FILES_HURRY`] files are recorded, the largest are written at once, until half is left. Beyond
//! [`FILES_MAX`] files or [`BYTES_MAX`], a writer starts the writeback of its own bytes. Beyond
//! [`RANGES_MAX`] ranges, the ranges of a file are merged. Nothing here keeps a deleted file alive.

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

/// Limit on the files with written ranges.
const FILES_MAX: usize = 16_384;
/// With more files than this, the janitor does not wait until ranges are due.
const FILES_HURRY: usize = FILES_MAX / 2;
/// Limit on the ranges of one file; more are merged into one.
const RANGES_MAX: usize = 16;
/// Limit on the written bytes whose writeback has not begun. Beyond it, a writer starts the
/// writeback of its own bytes.
const BYTES_MAX: u64 = 256 << 20;
/// Times from one visit of the janitor to the next, after it has started the writeback of a file.
/// Pages that are still dirty at the last visit are left to the kernel.
const SETTLES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(3), Duration::from_secs(9)];
/// Time between two searches of the janitor for due files.
const LOOK_EVERY: Duration = Duration::from_secs(1);

struct Written {
    inode: Arc<Inode>,
    ranges: Vec<(u64, u64)>,
    /// Bytes in the ranges that were written since the writeback was started. Bytes that were
    /// written twice count at most once.
    bytes: u64,
    /// Time of the janitor's next visit.
    due: Instant,
    /// Number of visits since the last write. The first visit starts the writeback.
    visits: usize,
    /// The file is written now, even if it is written to meanwhile.
    is_hurried: bool,
}

impl Written {
    fn hurry(&mut self, now: Instant) {
        (self.due, self.is_hurried) = (now, true);
    }

    /// Records a visit of the janitor. Returns whether it is the last one.
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
    /// Makes files due before their time, the largest first. All of them if the dirty ranges are
    /// closed; otherwise, if a bound is exceeded, enough of them to leave half.
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
        removed.inode.backing_is_cached.store(false, Ordering::Relaxed);
        Some(removed)
    }

    fn is_over(&self, bytes_max: u64, files_max: usize) -> bool {
        self.bytes > bytes_max || self.files.len() > files_max
    }
}

/// The written ranges of all files.
pub(crate) struct DirtyRanges {
    state: Mutex<State>,
    wake: Condvar,
    linger: Duration,
    bytes_hurry: u64,
}

impl DirtyRanges {
    /// Creates an empty set.
    pub(crate) fn new(config: &Config) -> DirtyRanges {
        let (linger, bytes_hurry) = (config.written_linger, config.written_bytes.min(BYTES_MAX / 2));
        DirtyRanges { state: Mutex::default(), wake: Condvar::new(), linger, bytes_hurry }
    }

    /// Records that bytes `start..end` were written through `fd`.
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
        inode.backing_is_cached.store(true, Ordering::Relaxed);
        // The next visit would write these bytes too early. So they start a new period, and pages
        // that are clean by its end are dropped then.
        if written.visits > 0 && !written.is_hurried {
            (written.visits, written.due) = (0, Instant::now() + self.linger);
        }
        let before = written.bytes;
        merge(&mut written.ranges, start, end);
        written.bytes = (before + (end - start)).min(length(&written.ranges));
        state.bytes = state.bytes - before + written.bytes;
        // If there is anything recorded, the janitor searches again by itself.
        let is_over = state.is_over(self.bytes_hurry, if known { usize::MAX } else { FILES_HURRY });
        if is_over || !known && state.files.len() == 1 {
            self.wake.notify_one();
        }
    }

    /// Removes a file that is deleted, or all of whose pages are known to be clean. Returns its
    /// ranges.
    pub(crate) fn remove(&self, nodeid: u64) -> Vec<(u64, u64)> {
        self.state.lock().forget(nodeid).map_or_else(Vec::new, |removed| removed.ranges)
    }

    /// Drops the written pages of a file that was synced through `fd`: they are clean.
    pub(crate) fn synced(&self, nodeid: u64, fd: &OwnedFd) {
        for (start, end) in self.remove(nodeid) {
            drop_clean(fd, start, end);
        }
    }

    /// Returns the number of files with written ranges, and of the bytes whose writeback has not
    /// begun.
    pub(crate) fn pending(&self) -> (usize, u64) {
        let state = self.state.lock();
        (state.files.len(), state.bytes)
    }

    /// Ends [`DirtyRanges::tend`], after it has dropped everything.
    pub(crate) fn close(&self) {
        self.state.lock().closing = true;
        self.wake.notify_all();
    }

    /// The janitor's work. Returns after [`DirtyRanges::close`].
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

    /// Removes a file whose written pages have left the page cache, unless it was written to since.
    fn remove_if_clean(&self, nodeid: u64) {
        let mut state = self.state.lock();
        if state.files.get(&nodeid).is_some_and(|written| written.bytes == 0) {
            state.forget(nodeid);
        }
    }
}

/// Opens the file for reading, which is enough for fadvise. A descriptor open for writing would
/// prevent others from executing the file.
fn reopen(inodes: &Inodes, inode: &Inode) -> Option<OwnedFd> {
    let anchor = inodes.anchor_once(inode).ok()?; // The kernel may have forgotten it.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOATIME;
    let path = ProcPath::new(&anchor);
    open(path.path(), flags, Mode::empty()).or_else(|_| open(path.path(), flags - OFlags::NOATIME, Mode::empty())).ok()
}

fn length(ranges: &[(u64, u64)]) -> u64 {
    ranges.iter().map(|(start, end)| end - start).sum()
}

/// Adds a range. Adjacent and overlapping ranges are merged; beyond the bound, all are.
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
