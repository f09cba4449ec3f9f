//! Methods of [`FileState`] that follow changes: those made through the mount, and external ones.

use super::{Active, ChangeTicket, EDGES_MAX, Ended, FileState, nearest};
use crate::backing::{Stamp, Writers};
use crate::catalog::entry::Entry;
use crate::catalog::overtaking::Overtaken;
use crate::catalog::rules::{Rule, keeps};
use page::{PAGE_SIZE, PageRange};

impl FileState {
    /// A buffered write of these pages begins. Returns the pages that the kernel may cache with
    /// other bytes than those of the write, if there are any.
    pub(crate) fn write_begins(&mut self, request: u64, range: PageRange, writeback: bool) -> Option<Overtaken> {
        self.watch.get_or_insert_default().write_begins(request, range, writeback)
    }

    /// A buffered write of the bytes `offset..end` has ended; the backing file now has `size_bytes`
    /// bytes. Quarantines the page of which the kernel may have zeroed a part, and returns its
    /// index. The kernel must drop that page.
    pub(crate) fn write_ended(&mut self, offset: u64, end: u64, writeback: bool, size_bytes: u64) -> Option<u64> {
        let page = self.watch.get_or_insert_default().write_ended(offset, end, writeback, size_bytes)?;
        self.quarantine(PageRange { first: page, end: page + 1 }, |_, _| {});
        Some(page)
    }

    /// A hole is punched from `start` to `end`, in bytes. The pages that it covers only in part
    /// will not be lent.
    pub(crate) fn hole_begins(&mut self, start: u64, end: u64) {
        if !keeps(Rule::Edge) {
            return;
        }
        for at in [start, end] {
            if !at.is_multiple_of(PAGE_SIZE as u64) && at < u64::MAX {
                self.edges.push(PageRange::touched_by(at, at + 1));
            }
        }
        while self.edges.len() > EDGES_MAX {
            self.edges.sort_by_key(|edge| edge.first);
            let at = nearest(&self.edges, |edge| *edge);
            let other = self.edges.remove(at + 1);
            self.edges[at] = self.edges[at].hull(other);
        }
    }

    /// A request has arrived that the kernel sends while it holds the inode's lock. So the kernel
    /// has finished all earlier holes. Its cached copies of the edges of holes are gone once a READ
    /// of these pages arrives.
    pub(crate) fn locked_request(&mut self) {
        for edge in std::mem::take(&mut self.edges) {
            self.quarantine(edge, |_, _| {});
        }
    }

    /// A change of the pages of `range` begins; `before` is the backing file's stamp. Calls
    /// `invalidated` with each entry that the change invalidates.
    pub fn begin_change(
        &mut self,
        range: PageRange,
        before: Stamp,
        mut invalidated: impl FnMut(u32, Entry),
    ) -> ChangeTicket {
        // While another change is in progress, the stamp from before it is gone. So only the first
        // of overlapping changes can compare.
        if self.is_settled() && self.is_comparable() && self.stamp != Some(before) && keeps(Rule::Stamp) {
            self.end_is_unsure |= self.may_end_elsewhere(before);
            self.changed_externally(&mut invalidated);
            self.is_provisional = keeps(Rule::Settled);
            self.read_provisional = false;
            self.external_ctime_ns = before.ctime_ns;
        }
        self.moved(range);
        self.active.push(Active { id: self.changes, range, quarantine: self.quarantine });
        if keeps(Rule::Invalidate) {
            self.table.forget(range, invalidated);
        }
        ChangeTicket(self.changes)
    }

    /// The change has ended. `after` is the backing file's stamp, if known. `consumed` is the
    /// position up to which the event stream has been processed. `has_room`: the catalog may grow.
    /// Returns whether nothing else has changed the file since the change began.
    pub fn end_change(
        &mut self,
        ticket: ChangeTicket,
        ended: Ended,
        after: Option<Stamp>,
        consumed: u64,
        has_room: bool,
    ) -> bool {
        let Some(at) = self.active.iter().position(|active| active.id == ticket.0) else {
            debug_assert!(false, "a change ends once");
            return false;
        };
        let Active { range, quarantine, .. } = self.active.swap_remove(at);
        let was_alone = self.changes == ticket.0;
        self.moved(range);
        match ended {
            Ended::Buffered { offset, end_offset, old_size_bytes, position } => {
                // The kernel learns the size that its own write has made from our answer. Until
                // then it accepts no other size (FUSE_I_SIZE_UNSTABLE). After other changes, above
                // all a direct write, it may be told the size earlier. If the end was moved
                // externally, the kernel continues with the size that it has.
                let known = self.told_size_bytes.or(after.map(|after| after.size_bytes));
                self.told_size_bytes = known.map(|known| known.max(end_offset));
                let (touched, whole) =
                    (PageRange::touched_by(offset, end_offset), PageRange::inside(offset, end_offset));
                if keeps(Rule::Taint) {
                    self.taint(touched, position, consumed);
                }
                // A quarantine that began during the write may belong to a change that was applied
                // after the write.
                let older = if keeps(Rule::Older) { quarantine } else { self.quarantine };
                // Without room for an entry the pages stay quarantined: they will not be lent.
                if has_room {
                    self.clear_quarantine(if keeps(Rule::Whole) { whole } else { touched }, older);
                }
                // The write began behind the end of the file, so the gap now holds zeros. But the
                // kernel's page may hold bytes in the gap that were stored through a mapping,
                // behind the old end.
                if old_size_bytes < offset && keeps(Rule::Gap) {
                    self.quarantine(PageRange::touched_by(old_size_bytes, offset), |_, _| {});
                }
            }
            Ended::Other => {
                if keeps(Rule::Quarantine) {
                    self.quarantine(range, |_, _| {});
                }
            }
        }
        // If changes overlap in time, the latest stamp is the right one.
        self.stamp = match (self.stamp, after) {
            (Some(stamp), Some(after)) if !was_alone && stamp.ctime_ns > after.ctime_ns => Some(stamp),
            (_, after) => after,
        };
        was_alone
    }

    /// An operation of the mount on attributes begins. It changes no byte of the file, but the
    /// change time.
    pub(crate) fn begin_attributes(&mut self) {
        self.attribute_changes += 1;
        self.attribute_moves += 1;
    }

    /// The operation on attributes has ended. It changed the stamp from `before` to `after`, if
    /// that is known.
    pub(crate) fn end_attributes(&mut self, before: Stamp, after: Option<Stamp>) {
        self.attribute_changes -= 1;
        self.attribute_moves += 1;
        if self.active.is_empty() && self.stamp == Some(before) {
            self.stamp = after;
        }
    }

    /// Compares the stamp `now` with the recorded one, if no change through the mount began or
    /// ended since `moment`. If the stamp differs, the file was changed externally: all entries are
    /// invalidated. All that was read while an external writer may have been active is invalidated,
    /// too, once `writers` shows it.
    pub fn observe(&mut self, moment: u64, now: Stamp, writers: Writers, invalidated: impl FnMut(u32, Entry)) {
        if !self.is_settled() || moment != self.moment() {
            return;
        }
        let is_other = self.stamp != Some(now);
        let is_looked_at = self.is_provisional && writers != Writers::Unasked;
        let is_invalidated = if is_other { self.is_comparable() && keeps(Rule::Stamp) } else { self.read_provisional };
        if is_other {
            self.external_ctime_ns = now.ctime_ns;
            self.end_is_unsure |= self.may_end_elsewhere(now);
        }
        if (is_other || is_looked_at) && is_invalidated {
            self.changed_externally(invalidated);
        }
        if is_other || is_looked_at {
            self.stamp = Some(now);
            self.is_provisional = writers != Writers::None && keeps(Rule::Settled);
            self.read_provisional = false;
        }
    }

    /// Returns whether this is the recorded stamp, and no external writer was active when it was
    /// taken.
    pub fn is_sure_of(&self, stamp: Stamp) -> bool {
        self.stamp == Some(stamp) && !self.is_provisional
    }

    /// `stamp` is the file's stamp now. Returns the ctime of the last external change, in
    /// nanoseconds since the epoch.
    pub fn external_ctime_ns(&self, stamp: Stamp) -> i128 {
        if self.stamp == Some(stamp) { self.external_ctime_ns } else { stamp.ctime_ns }
    }

    /// Returns whether the kernel may have another size than the backing file, because of an
    /// external change.
    pub fn end_is_unsure(&self) -> bool {
        self.end_is_unsure
    }

    /// The kernel was given this size, if it had a smaller one. It has dropped nothing because of
    /// that. If the kernel has a larger size, its cache is empty, so it learns the right size at
    /// its next read across the end.
    pub fn end_moved(&mut self, size_bytes: u64) {
        // The end may have been moved externally once more. Then the kernel caches stale bytes.
        let is_later = |stamp: Stamp| stamp.size_bytes > size_bytes && self.kernel_stale().is_some();
        self.end_is_unsure = self.stamp.is_none_or(is_later);
        self.told_size_bytes = self.told_size_bytes.max(Some(size_bytes));
    }

    /// Returns whether the kernel may cache bytes that an external change has replaced. If so,
    /// returns the number to pass to [`FileState::kernel_dropped`] when the kernel has dropped all
    /// cached pages.
    pub fn kernel_stale(&self) -> Option<u64> {
        (keeps(Rule::Drop) && self.external_changes_dropped < self.external_changes).then_some(self.external_changes)
    }

    /// The kernel has dropped all pages that it had cached when [`FileState::kernel_stale`]
    /// returned this number.
    pub fn kernel_dropped(&mut self, number: u64) {
        self.external_changes_dropped = self.external_changes_dropped.max(number);
    }
}
