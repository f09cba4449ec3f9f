//! These methods of a [`FileState`] follow changes: ours, and those made beside us.

use super::{Active, ChangeTicket, EDGES_MAX, Ended, FileState, nearest};
use crate::backing::{Stamp, Writers};
use crate::catalog::entry::Entry;
use crate::catalog::overtaking::Overtaken;
use crate::catalog::rules::{Rule, keeps};
use page::{PAGE_SIZE, PageRange};

impl FileState {
    /// A buffered write of these pages begins. Returns the pages, if any, that the kernel may cache
    /// with something else than the bytes of the write.
    pub fn write_begins(&mut self, request: u64, range: PageRange, writeback: bool) -> Option<Overtaken> {
        self.watch.get_or_insert_default().write_begins(request, range, writeback)
    }

    /// A buffered write of the bytes `offset..end` has ended, and the backing file ends at
    /// `size_bytes` now. Quarantines the page of which the kernel may have zeroed a part, and
    /// returns its index: the kernel must drop that page.
    pub fn write_ended(&mut self, offset: u64, end: u64, writeback: bool, size_bytes: u64) -> Option<u64> {
        let page = self.watch.get_or_insert_default().write_ended(offset, end, writeback, size_bytes)?;
        self.quarantine(PageRange { first: page, end: page + 1 }, |_, _| {});
        Some(page)
    }

    /// A hole is punched from `start` to `end`, in bytes: the pages that it covers in part are not
    /// lent.
    pub fn hole_begins(&mut self, start: u64, end: u64) {
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

    /// A request has arrived that the kernel sends with the inode locked: it has done with the
    /// holes before. What it caches of their edges is gone once they are read again.
    pub fn locked_request(&mut self) {
        for edge in std::mem::take(&mut self.edges) {
            self.quarantine(edge, |_, _| {});
        }
    }

    /// A change of the bytes of `range` begins; `before` is what the file looks like now. Shows the
    /// entries that it voids.
    pub fn begin_change(
        &mut self,
        range: PageRange,
        before: Stamp,
        mut voided: impl FnMut(u32, Entry),
    ) -> ChangeTicket {
        // While another change is under way, what the file looked like before it is gone: only the
        // first can compare.
        if self.is_settled() && self.is_comparable() && self.stamp != Some(before) && keeps(Rule::Stamp) {
            self.end_is_unsure |= self.may_end_elsewhere(before);
            self.changed_beside(&mut voided);
            self.is_provisional = keeps(Rule::Settled);
            self.read_provisional = false;
            self.beside_ctime_ns = before.ctime_ns;
        }
        self.moved(range);
        self.active.push(Active { id: self.changes, range, quarantine: self.quarantine });
        if keeps(Rule::Void) {
            self.table.forget(range, voided);
        }
        ChangeTicket(self.changes)
    }

    /// The change has ended. `after` is what the file looks like, if known; `consumed` is how far
    /// the event stream has been dealt with; `has_room` whether the catalog may grow. Whether
    /// nothing else has changed the file since it began.
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
                // The kernel learns the size that it has made itself from our answer, and lets in
                // no other one until then (FUSE_I_SIZE_UNSTABLE). After other changes, a direct
                // write's above all, it may be told before. If somebody has moved the end beside
                // us, it goes on with the one that it knows.
                let known = self.told_size_bytes.or(after.map(|after| after.size_bytes));
                self.told_size_bytes = known.map(|known| known.max(end_offset));
                let (touched, whole) =
                    (PageRange::touched_by(offset, end_offset), PageRange::inside(offset, end_offset));
                if keeps(Rule::Taint) {
                    self.taint(touched, position, consumed);
                }
                // A quarantine that came while the write was under way may be of a change that was
                // applied after it.
                let older = if keeps(Rule::Older) { quarantine } else { self.quarantine };
                // Without room for it the pages stay quarantined: they will not be lent.
                if has_room {
                    self.lift(if keeps(Rule::Whole) { whole } else { touched }, older);
                }
                // The write began behind the end of the file: what lies between are zeros now, but
                // the kernel's page may hold there what somebody stored through a mapping, behind
                // the old end.
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
        // Of changes that overlap in time, the one that looked last knows best.
        self.stamp = match (self.stamp, after) {
            (Some(stamp), Some(after)) if !was_alone && stamp.ctime_ns > after.ctime_ns => Some(stamp),
            (_, after) => after,
        };
        was_alone
    }

    /// An operation of ours on attributes begins: no byte changes, but the change time does.
    pub fn begin_attributes(&mut self) {
        self.attribute_changes += 1;
        self.attribute_moves += 1;
    }

    /// It has ended, and moved the file from `before` to `after`, if that is known.
    pub fn end_attributes(&mut self, before: Stamp, after: Option<Stamp>) {
        self.attribute_changes -= 1;
        self.attribute_moves += 1;
        if self.active.is_empty() && self.stamp == Some(before) {
            self.stamp = after;
        }
    }

    /// Compares the file with what we left, if nothing of ours has changed it since `moment`. If
    /// somebody else has, beside us, everything known of it is void. So is all that was read while
    /// somebody may have been doing so, as is found out now by whoever looks at the writers.
    pub fn observe(&mut self, moment: u64, now: Stamp, writers: Writers, voided: impl FnMut(u32, Entry)) {
        if !self.is_settled() || moment != self.moment() {
            return;
        }
        let is_other = self.stamp != Some(now);
        let is_looked_at = self.is_provisional && writers != Writers::Unasked;
        let is_void = if is_other { self.is_comparable() && keeps(Rule::Stamp) } else { self.read_provisional };
        if is_other {
            self.beside_ctime_ns = now.ctime_ns;
            self.end_is_unsure |= self.may_end_elsewhere(now);
        }
        if (is_other || is_looked_at) && is_void {
            self.changed_beside(voided);
        }
        if is_other || is_looked_at {
            self.stamp = Some(now);
            self.is_provisional = writers != Writers::None && keeps(Rule::Settled);
            self.read_provisional = false;
        }
    }

    /// Whether the file was left so, and nobody was writing it then.
    pub fn is_sure_of(&self, stamp: Stamp) -> bool {
        self.stamp == Some(stamp) && !self.is_provisional
    }

    /// The file looks like this now. Returns its ctime, in nanoseconds since the epoch, at the last
    /// change that the mount has not made itself.
    pub fn beside_ctime_ns(&self, stamp: Stamp) -> i128 {
        if self.stamp == Some(stamp) { self.beside_ctime_ns } else { stamp.ctime_ns }
    }

    /// Whether the kernel may believe in another end than that of the backing file, because
    /// somebody may have moved it beside us.
    pub fn end_is_unsure(&self) -> bool {
        self.end_is_unsure
    }

    /// The kernel has been made to believe in this end, if it believed in an earlier one. It has
    /// dropped nothing by itself for that. If it believes in a later one, it caches nothing that it
    /// read before: so it learns of this end when it next reads across it.
    pub fn end_moved(&mut self, size_bytes: u64) {
        // Somebody may have moved it once more, and not we: then the kernel caches stale bytes.
        let is_later = |stamp: Stamp| stamp.size_bytes > size_bytes && self.kernel_stale().is_some();
        self.end_is_unsure = self.stamp.is_none_or(is_later);
        self.told_size_bytes = self.told_size_bytes.max(Some(size_bytes));
    }

    /// Whether the kernel caches bytes that somebody has changed beside us. If so, the number to
    /// say to [`FileState::kernel_dropped`] when it has dropped all it caches.
    pub fn kernel_stale(&self) -> Option<u64> {
        (keeps(Rule::Drop) && self.changes_dropped < self.changes_beside).then_some(self.changes_beside)
    }

    /// The kernel has dropped all that it cached when [`FileState::kernel_stale`] said this number.
    pub fn kernel_dropped(&mut self, number: u64) {
        self.changes_dropped = self.changes_dropped.max(number);
    }
}
