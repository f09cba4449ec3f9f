//! Opens, which take the stamp of the backing file, and drops of pages that the daemon requests
//! from the kernel.

use crate::context::Context;
use crate::file::{Invalidation, UNIT_BYTES, UNITS};
use crate::node::{Doing, Node, Task};
use crate::oracle::Time;
use borrower::Writers;

/// An open by an application.
#[derive(Default)]
pub struct Opening {
    stage: Stage,
    /// The daemon that has answered it is dead.
    orphaned: bool,
    /// When the kernel was last told the size, or when the daemon was killed, if that was later.
    size_sent: Time,
    /// The backing file's size in units, before the daemon made the kernel drop its pages in order
    /// to move the end.
    dropped_at: Option<usize>,
}

#[derive(Default)]
enum Stage {
    /// The kernel asks for attributes.
    #[default]
    Ask,
    /// The daemon has read the attributes: the size, and the kernel's version of it at that time.
    Attributes { size: usize, version: u64 },
    /// The kernel drops pages because the size has changed.
    Drop { next: usize },
    /// The kernel sends the open.
    Open,
    /// An external change may have moved the end. The daemon makes the kernel drop its pages,
    /// before it moves the kernel's end.
    DropOlder { next: usize, number: Option<u64> },
    /// The answer was that the cache must not be kept: the kernel drops it.
    DropAll { next: usize },
    /// The file is open; no request came through this handle yet.
    Unused,
}

/// A drop of pages that the daemon has requested from the kernel.
pub struct Delivering {
    what: Invalidation,
    since: Time,
    next: usize,
}

impl Opening {
    /// Returns whether the kernel is about to learn another size than the one it has.
    pub fn brings_size(&self, known: usize) -> bool {
        matches!(self.stage, Stage::Attributes { size, .. } if size != known)
    }

    /// The daemon has died: the kernel sends the unanswered request again.
    pub fn send_again(&mut self, now: Time) {
        self.orphaned = true;
        self.size_sent = now;
        self.dropped_at = None;
        match self.stage {
            Stage::Attributes { .. } => self.stage = Stage::Ask,
            Stage::DropOlder { .. } => self.stage = Stage::Open,
            _ => {}
        }
    }
}

impl Delivering {
    /// Returns a drop of those pages, begun at `since`.
    pub fn new(what: Invalidation, since: Time) -> Delivering {
        Delivering { what, since, next: what.first }
    }
}

impl Node {
    /// Drops the page `next` and returns the page after it; None after the last. Waits for a page
    /// that is locked or under writeback. Dirty pages stay (they would be written back first).
    pub fn drop_page(&mut self, file: usize, next: usize, end: usize) -> Option<usize> {
        let inode = self.files[file].inode.as_mut()?;
        if next >= end.min(inode.pages.len()) {
            return None;
        }
        match &inode.pages[next] {
            Some(cached) if cached.locked || cached.writeback => return Some(next),
            Some(cached) if cached.dirty => {}
            _ => inode.pages[next] = None,
        }
        Some(next + 1)
    }

    /// Returns whether a write has filled that page since then and is not sent yet. We assume that
    /// a drop whose end the daemon does not learn does not come in between (docs/design/limits.md,
    /// L1).
    fn is_filled(&self, file: usize, page: usize, since: Time) -> bool {
        self.tasks.iter().any(|task| {
            task.file == file && matches!(&task.doing, Doing::Change(change) if change.has_filled(page, since))
        })
    }

    /// Does one step of an open. Returns true when it has ended.
    pub fn advance_open(&mut self, context: &mut Context, task: &Task, open: &mut Opening) -> bool {
        let unseen = match open.stage {
            Stage::Drop { next } => Some(next),
            Stage::DropAll { next } if open.orphaned => Some(next),
            _ => None,
        };
        if matches!(open.stage, Stage::Drop { .. } | Stage::DropAll { .. } | Stage::DropOlder { .. })
            && context.random.u32(0..1000) < context.rates.slow_drops
        {
            return false;
        }
        if unseen.is_some_and(|page| self.is_filled(task.file, page, open.size_sent)) {
            return false;
        }
        let file = &mut self.files[task.file];
        let Some(inode) = &mut file.inode else { return true };
        match open.stage {
            Stage::Ask => {
                let (size, version) = (file.backing.size, inode.size_version);
                open.size_sent = context.now;
                if file.changing.is_none() {
                    let stamp = file.backing.stamp();
                    self.core.observe(&inode.file, inode.file.moment(), stamp, Writers::Unasked);
                }
                inode.file.tell_size(file.backing.stamp().size_bytes);
                context.note(|| format!("file {} asked for its size: {size}", task.file));
                open.stage = Stage::Attributes { size, version };
            }
            Stage::Attributes { size, version } => {
                if inode.size_unstable || inode.size_version != version {
                    open.stage = Stage::Ask;
                } else if inode.size == size {
                    inode.size_version += 1;
                    open.stage = Stage::Open;
                } else {
                    context.note(|| format!("file {}: the kernel sees size {size}", task.file));
                    // Dirty bytes behind the new end are dropped, too.
                    for page in inode.pages.iter_mut().skip(size.div_ceil(UNITS)).flatten() {
                        page.dirty = false;
                    }
                    if size < inode.size
                        && size % UNITS > 0
                        && let Some(page) = &mut inode.pages[size / UNITS]
                        && page.uptodate
                    {
                        page.units[size % UNITS..].fill(0);
                    }
                    inode.size = size;
                    inode.size_version += 1;
                    open.stage = Stage::Drop { next: 0 };
                }
            }
            Stage::Drop { next } => match self.drop_page(task.file, next, usize::MAX) {
                Some(next) => open.stage = Stage::Drop { next },
                None => open.stage = Stage::Open,
            },
            Stage::Open => {
                if file.changing.is_some() {
                    return false;
                }
                let (moment, stamp) = (inode.file.moment(), file.backing.stamp());
                let known = inode.file.clone();
                self.core.observe(&known, moment, stamp, Node::writers(context, file));
                open.orphaned = false;
                if known.end_is_unsure() {
                    let size = file.backing.size;
                    let Some(before) = open.dropped_at.take() else {
                        context.note(|| format!("file {} opened: has it grown?", task.file));
                        known.drop_begins();
                        open.dropped_at = Some(size);
                        open.stage = Stage::DropOlder { next: 0, number: known.kernel_stale() };
                        return false;
                    };
                    if size >= before {
                        if let Some(inode) = file.inode.as_mut().filter(|inode| inode.size < before) {
                            context.note(|| format!("file {}: the kernel's end is moved to {before}", task.file));
                            inode.size = before;
                            inode.size_version += 1;
                        }
                        known.end_moved(before as u64 * UNIT_BYTES);
                    }
                }
                let Some(number) = known.kernel_stale() else {
                    context.note(|| format!("file {} opened, cache kept", task.file));
                    file.oracle.open(task.began);
                    return true;
                };
                context.note(|| format!("file {} opened, cache not kept", task.file));
                file.invalidate(0, usize::MAX, Some(number));
                file.inode.iter().for_each(|inode| inode.file.drop_begins());
                open.stage = Stage::DropAll { next: 0 };
            }
            // A dirty page is written back first.
            Stage::DropOlder { next, .. } if inode.is_dirty_page(next) => {}
            Stage::DropOlder { next, number } => match self.drop_page(task.file, next, usize::MAX) {
                Some(next) => open.stage = Stage::DropOlder { next, number },
                None => {
                    if let Some(inode) = &self.files[task.file].inode {
                        inode.file.drop_ended();
                        number.iter().for_each(|number| inode.file.kernel_dropped(*number));
                    }
                    open.stage = Stage::Open;
                }
            },
            Stage::DropAll { next } => match self.drop_page(task.file, next, usize::MAX) {
                Some(next) => open.stage = Stage::DropAll { next },
                None => {
                    self.files[task.file].oracle.open(task.began);
                    open.stage = Stage::Unused;
                }
            },
            Stage::Unused => {
                if !open.orphaned {
                    inode.file.drop_ended();
                }
                return true;
            }
        }
        false
    }

    /// Does one step of a drop. Returns true when it has ended.
    pub fn advance_delivery(&mut self, context: &mut Context, task: &Task, delivering: &mut Delivering) -> bool {
        // A dirty page is written back first.
        if self.files[task.file].inode.as_ref().is_some_and(|inode| inode.is_dirty_page(delivering.next)) {
            return false;
        }
        if let Some(next) = self.drop_page(task.file, delivering.next, delivering.what.end) {
            delivering.next = next;
            return false;
        }
        let file = &mut self.files[task.file];
        file.invalidating = false;
        file.oracle.expire(delivering.since, context.now);
        if let Some(inode) = &file.inode {
            inode.file.drop_ended();
            if let Some(number) = delivering.what.number {
                inode.file.kernel_dropped(number);
            }
        }
        context.note(|| format!("file {}: the kernel has dropped pages {}..", task.file, delivering.what.first));
        true
    }
}
