//! One file in the catalog: which pages lenders have, and which evictions may be believed.
//!
//! This is where the promise is kept: *what a lender has of a page is what the file below holds
//! now.* It rests on one rule: an eviction is believed only if nothing changed the page since the
//! birth of the cached copy it was taken from. What is known of that birth is kept in three forms:
//!
//! * **active** changes: while one is under way, no event of its range is believed, and none of its
//!   pages is live.
//! * **taints**, from buffered writes: the page cache held the new bytes before we were asked, so
//!   events from the stream's position at our answer on are of the new content, those before are of
//!   older content. A taint is void once the consumer has passed its position.
//! * **quarantines**, from every other change: the kernel drops its old pages only after our
//!   answer, at a time we do not learn. No event of the page is believed until a READ of it
//!   arrives, which proves that the old copy is gone. A quarantine has a number, and a page's entry
//!   remembers the number that its last READ has lifted; so ranges need never be split, and merging
//!   two (into their hull, under the newer number) is always safe.
//!
//! A READ that overlaps a change of its pages in time must be done again: else the kernel could
//! cache older bytes behind a newer write. Should it be answered all the same, its pages are
//! quarantined.
//!
//! Pure logic: no I/O, no clock. What must never happen here: a page live in the table whose bytes
//! differ from the file's.

use super::entry::{Entry, Place, Standing, UNKNOWN, absent};
use super::overtaking::{Overtaken, Watch};
use super::rules::{Rule, keeps};
use super::stream_room::Lending;
use super::streams::{Looked, Streams};
use super::table::{Moved, PageTable};
use crate::below::{Stamp, Writers};
use page::{PAGE_SHIFT, PAGE_SIZE, PageRange, Version};
use std::collections::VecDeque;
use std::ops::Range;

/// Quarantined ranges a file remembers. Beyond it the two nearest are merged: some pages more need
/// a READ before they are lent again. (Few in test builds, so that merging is common there.)
const QUARANTINES_MAX: usize = if cfg!(debug_assertions) { 4 } else { 128 };

/// Tainted ranges a file remembers. Beyond it the two nearest are merged: some events more are not
/// believed, for as long as it takes the consumer to reach the position. (Few in test builds, too.)
const TAINTS_MAX: usize = if cfg!(debug_assertions) { 4 } else { 128 };

/// How a daemon leaves a file to the one that takes over.
#[derive(Clone, Copy, Debug, Default)]
pub struct Left {
    /// What the file looked like. None while anything is under way, or while the kernel may cache
    /// older bytes.
    pub stamp: Option<Stamp>,
    /// Whether the kernel may still zero a part of its page at the edge of a hole.
    pub has_edges: bool,
}

/// Pages at the edges of holes that a file remembers. Beyond it the two nearest ranges are merged:
/// what lies between is not lent either.
const EDGES_MAX: usize = 8;

/// Beginnings and ends of changes that a file remembers while READs are under way, to tell each
/// whether one of its own pages changed meanwhile. A READ that is older than the memory counts as
/// overtaken. (A READ from a slow disk takes as long as many writes.)
const RECENT_MAX: usize = 512;

/// Pages that a taint is extended over by writes that go on where the last one ended: each has it
/// last longer, all of it.
const TAINT_PAGES_MAX: u64 = 256;

/// Pages that are elsewhere, too, and are read from below along with those around them: 32 KiB more
/// take a disk less time than another request. A stream over a table of which a lender has pages
/// here and there would else be a request for each piece between them.
pub const GAP_PAGES_MAX: usize = 8;

/// What a READ of one page is answered from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The file below.
    Below,
    /// The put buffer that is on its way to a lender, else that lender.
    Busy(Place, Version),
    /// A lender.
    Lender(Place, Version),
    /// Nowhere: it is all zeros.
    Zero,
    /// A guest that has evicted it, if its bytes have just come and have this hash; else the file
    /// below.
    Demoted(u64),
}

/// The next pages from `at` on that are read from below at once: those that are nowhere else, and
/// few others between them.
pub fn next_run(sources: &[Source], at: usize) -> Option<Range<usize>> {
    let below = |source: &Source| *source == Source::Below;
    let first = at + sources[at..].iter().position(below)?;
    let mut end = first + 1;
    for (at, source) in sources.iter().enumerate().skip(end) {
        if below(source) {
            end = at + 1;
        } else if at - end == GAP_PAGES_MAX {
            break;
        }
    }
    Some(first..end)
}

/// A READ under way.
#[derive(Clone, Copy, Debug)]
pub struct ReadTicket {
    range: PageRange,
    changes: u64,
    quarantine: u64,
    raced: bool,
    moment: u64,
    /// The READ goes on where others ended.
    pub sequential: bool,
    /// What becomes then of what it gets from below.
    lending: Lending,
    /// What the file looked like when we last left it, if nothing is under way.
    pub stamp: Option<Stamp>,
}

impl ReadTicket {
    /// Where the file's changes stood when the READ began.
    pub fn moment(&self) -> u64 {
        self.moment
    }

    /// Whether that page is left to the disk if it comes from there.
    pub fn is_left(&self, index: u64) -> bool {
        self.sequential && !self.lending.lends(index)
    }
}

/// A change under way.
#[derive(Debug, PartialEq, Eq)]
pub struct ChangeTicket(u64);

/// How a change ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A buffered write of the bytes `offset..end_offset` was applied, at that position of the
    /// event stream.
    Buffered {
        /// First byte.
        offset: u64,
        /// Byte behind the last one.
        end_offset: u64,
        /// Where the file ended before.
        old_size_bytes: u64,
        /// The stream's position after the change was applied and before it is answered.
        position: u64,
    },
    /// Anything else, or a failure of unknown extent.
    Other,
}

/// What becomes of pages that are read in a sequential stream. Of files whose streams fit what
/// [`Lending`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// They are lent as any other.
    Off,
    /// They are not lent when they are read, which is when pages are lent.
    Read(Lending),
    /// They are tagged, and not lent when they are evicted.
    Evicted(Lending),
}

/// What becomes of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send it.
    Put,
    /// It was recorded as a page of zeros: nothing to send.
    Zero,
    /// It was read in a sequential stream: not worth sending.
    Sequential,
    /// A lender has it already.
    Known,
    /// The catalog has no room for its entry.
    NoRoom,
    /// It may be of older content: a change is under way.
    Changing,
    /// It may be of older content: tainted.
    Tainted,
    /// It may be of older content: quarantined.
    Quarantined,
}

struct Taint {
    range: PageRange,
    position: u64,
}

struct Quarantine {
    range: PageRange,
    number: u64,
}

struct Active {
    id: u64,
    range: PageRange,
    /// The newest quarantine when it began.
    quarantine: u64,
}

/// One file.
#[derive(Default)]
pub struct FileState {
    table: PageTable,
    /// Moves at the beginning and at the end of every change.
    changes: u64,
    /// READs under way.
    reads: u32,
    /// What the last of those moves were about, as far back as READs under way may have begun.
    recent: VecDeque<PageRange>,
    active: Vec<Active>,
    /// Operations on attributes under way.
    attribute_changes: u64,
    /// Moves at the beginning and at the end of each of those.
    attribute_moves: u64,
    taints: Vec<Taint>,
    quarantines: Vec<Quarantine>,
    /// Number of the newest quarantine.
    quarantine: u64,
    /// What the file looked like when the last change of ours, or the last look at it, ended.
    stamp: Option<Stamp>,
    /// Somebody else may have been writing the file when that was taken: the bytes may come after
    /// it.
    is_provisional: bool,
    /// Since then pages were read.
    read_provisional: bool,
    /// The file's ctime when somebody else was last seen to have changed it, in nanoseconds since
    /// the epoch.
    beside_ctime_ns: i128,
    /// The kernel may believe in another end than that of the backing file, because somebody else
    /// may have moved it.
    end_is_unsure: bool,
    /// How often somebody changed the file beside us.
    changes_beside: u64,
    /// Of those, how many the kernel's cache has been rid of.
    changes_dropped: u64,
    /// Since the first READ.
    streams: Option<Box<Streams>>,
    /// Since the first write, or the first time that pages were dropped.
    watch: Option<Box<Watch>>,
    /// The size that the kernel was last told, or learned from its own buffered writes.
    told_size_bytes: Option<u64>,
    /// Pages at the edges of holes: the kernel zeroes a part of its copy after our answer, and
    /// leaves it clean, whatever was stored in between (mm/truncate.c,
    /// truncate_inode_partial_folio).
    edges: Vec<PageRange>,
    /// Bytes of memory, and live pages, that the catalog has on its account for this file.
    pub(super) accounted: (u64, u64),
    /// The catalog has removed the file: nothing may be put in its name any more.
    pub(super) is_removed: bool,
}

impl FileState {
    /// A file that the kernel caches already, by answers that another daemon gave. Nothing is known
    /// of the births of its cached copies, so all is quarantined. `left` is what it looked like
    /// when that daemon left it; without it, what the kernel caches may be older than what the file
    /// holds.
    pub fn restored(left: Left) -> FileState {
        let mut state = FileState {
            stamp: left.stamp,
            changes_beside: u64::from(left.stamp.is_none()),
            end_is_unsure: left.stamp.is_none(),
            edges: if left.has_edges { vec![PageRange::ALL] } else { Vec::new() },
            watch: Some(Box::new(Watch::taken_over())),
            ..FileState::default()
        };
        state.moved(PageRange::ALL);
        if keeps(Rule::TakenOver) {
            state.quarantine(PageRange::ALL, |_, _| {});
        }
        state
    }

    /// Pages that need not come from the disk.
    pub fn live_pages(&self) -> u64 {
        self.table.live_pages()
    }

    /// Whether all that is read of it is long streams, which come from the disk each time.
    pub fn is_streamed(&self) -> bool {
        self.streams.as_ref().is_some_and(|streams| streams.are_all(self.file_pages()))
    }

    /// As far as it is known; else 0.
    fn file_pages(&self) -> u64 {
        self.stamp.map_or(0, |stamp| stamp.size_bytes.div_ceil(PAGE_SIZE as u64))
    }

    /// Whether what is read of it in streams comes back before lenders must forget it.
    pub fn streams_fit(&self) -> bool {
        self.streams.as_ref().is_some_and(|streams| streams.fit())
    }

    /// Of a READ of so many pages, in a stream, some were looked at.
    pub fn looked_at(&mut self, pages: u64, looked: Looked) {
        let file_pages = self.file_pages();
        self.streams.iter_mut().for_each(|streams| streams.looked_at(pages, looked, file_pages));
    }

    /// How it was read says no more how it will be.
    pub fn forget_passes(&mut self) {
        self.streams.iter_mut().for_each(|streams| streams.forget_passes());
    }

    /// The file below may hold something else: what is known of it, and what the kernel may cache
    /// of it here, is not believed.
    pub fn doubt(&mut self, voided: impl FnMut(u32, Entry)) {
        self.end_is_unsure = true;
        self.changed_beside(voided);
    }

    /// Bytes of memory taken by the entries.
    pub fn memory_bytes(&self) -> u64 {
        self.table.memory_bytes()
    }

    /// How often somebody was seen to change the file beside us.
    pub fn changes_beside(&self) -> u64 {
        self.changes_beside
    }

    /// Whether a change of any of these pages is under way.
    pub fn is_changing(&self, range: PageRange) -> bool {
        self.active.iter().any(|active| active.range.overlaps(range))
    }

    /// Whether a READ of these pages has to wait.
    pub fn must_wait(&self, range: PageRange) -> bool {
        keeps(Rule::Wait) && self.is_changing(range)
    }

    /// A number that moves with every change, also of attributes.
    pub fn moment(&self) -> u64 {
        self.changes + self.attribute_moves
    }

    /// The kernel is about to be told to drop pages.
    pub fn drop_begins(&mut self) {
        self.watch.get_or_insert_default().drop_begins();
    }

    /// It has dropped them.
    pub fn drop_ended(&mut self) {
        self.watch.get_or_insert_default().drop_ended();
    }

    /// A write(2) that is not answered yet has waited until it had.
    pub fn drop_waited(&mut self) {
        self.watch.get_or_insert_default().drop_waited();
    }

    /// The kernel is about to be told the file's size: if it is another than it knows, it drops
    /// pages.
    pub fn tell_size(&mut self, size_bytes: u64) {
        if self.told_size_bytes.replace(size_bytes).is_some_and(|told| told != size_bytes) {
            self.watch.get_or_insert_default().drop_follows();
        }
    }

    /// The kernel has forgotten the file: nothing of it is cached or under way. Events of what was
    /// cached may still come.
    pub fn forgotten(&mut self) {
        self.watch = self.watch.take().and_then(|watch| watch.forgotten()).map(Box::new);
        self.streams = None;
        self.locked_request();
        self.told_size_bytes = None;
        self.end_is_unsure = false;
    }

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

    /// What a daemon that takes over has to know.
    pub fn left(&self) -> Left {
        let is_sure = self.is_settled()
            && !self.is_provisional
            && !self.end_is_unsure
            && self.changes_dropped >= self.changes_beside;
        Left { stamp: self.stamp.filter(|_| is_sure), has_edges: !self.edges.is_empty() }
    }

    /// The kernel has dropped all that it cached when [`FileState::kernel_stale`] said this number.
    pub fn kernel_dropped(&mut self, number: u64) {
        self.changes_dropped = self.changes_dropped.max(number);
    }

    /// Forgets the entries of lenders that are lost.
    pub fn sweep(&mut self, kept: impl Fn(Place) -> bool) {
        self.table
            .sweep(|entry| matches!(entry, Entry::Busy { place, .. } | Entry::Present { place, .. } if !kept(place)));
    }

    /// A READ of the pages of `range`, out of the page cache, has arrived at `position` of the
    /// event stream. Says for each page where it comes from; `standing` tells whether a place can
    /// be asked. `filter` says what becomes of what is read in a sequential stream.
    #[allow(clippy::too_many_arguments)] // what the READ is, and how things stand
    pub fn begin_read(
        &mut self,
        range: PageRange,
        position: u64,
        consumed: u64,
        standing: impl Fn(Place) -> Standing,
        has_room: bool,
        filter: Filter,
        sources: &mut Vec<Source>,
    ) -> ReadTicket {
        sources.clear();
        let (sequential, lending) = match filter {
            Filter::Off => (false, Lending::Lent),
            Filter::Read(lending) | Filter::Evicted(lending) => {
                let streams = self.streams.get_or_insert_default();
                (streams.note(range), if streams.fit() { lending } else { Lending::Left })
            }
        };
        self.reads = self.reads.saturating_add(1);
        self.read_provisional |= self.is_provisional;
        let raced = self.is_changing(range);
        let held = self.quarantines.iter().any(|held| held.range.overlaps(range));
        let (mut lifted, mut in_groups) = (false, false);
        for wide_index in range.first..range.end {
            let Ok(index) = u32::try_from(wide_index) else {
                sources.push(Source::Below);
                continue;
            };
            let mut entry = self.table.get(index);
            if let Entry::Busy { place, .. } | Entry::Present { place, .. } = entry {
                match standing(place) {
                    Standing::Valid if !(sequential && lending == Lending::Slower) => {}
                    Standing::Valid | Standing::Suspended => {
                        sources.push(Source::Below); // what the lender has stays current
                        continue;
                    }
                    Standing::Lost => {
                        entry = UNKNOWN;
                        self.table.set(index, entry);
                    }
                }
            }
            sources.push(match entry {
                Entry::Absent { .. } => Source::Below,
                Entry::Zero => Source::Zero,
                Entry::Known { hash, .. } => Source::Demoted(hash),
                Entry::Busy { place, version, .. } => Source::Busy(place, version),
                Entry::Present { place, version, group } => {
                    in_groups |= group != 0;
                    Source::Lender(place, version)
                }
            });
            let sequential = sequential && !lending.lends(wide_index);
            // Without room for it the page stays quarantined: it will not be lent.
            if held && !raced && has_room && self.is_quarantined(index) {
                lifted = true;
                self.table.set(index, Entry::Absent { lifted: self.quarantine, sequential });
            } else if let Entry::Absent { lifted, sequential: tagged } = entry
                && matches!(filter, Filter::Evicted(_))
                && tagged != sequential
                && (has_room || tagged)
            {
                self.table.set(index, Entry::Absent { lifted, sequential });
            }
        }
        if lifted && keeps(Rule::Lift) {
            self.taint(range, position, consumed);
        }
        let mut at = 0;
        while let Some(run) = next_run(sources, at) {
            at = run.end;
            // What is read along is not asked for. What the lender has stays current.
            let along = sources[run].iter_mut().filter(|source| matches!(source, Source::Lender(..)));
            along.for_each(|source| *source = Source::Below);
        }
        // Only now is it known which are asked for.
        for (source, index) in sources.iter().zip(range.first..).take_while(|_| in_groups) {
            if matches!(source, Source::Lender(..))
                && let Entry::Present { group, .. } = self.table.get(index as u32)
            {
                self.table.moved(group, 0, 1);
            }
        }
        if let Some(streams) = &mut self.streams {
            let count = |is_it: fn(&Source) -> bool| sources.iter().filter(|source| is_it(source)).count() as u64;
            let below = count(|source| matches!(source, Source::Below));
            let lent = count(|source| matches!(source, Source::Lender(..) | Source::Busy(..)));
            streams.read_below(below, lent, sequential);
        }
        let stamp = self.stamp.filter(|_| self.is_settled());
        let (changes, moment) = (self.changes, self.moment());
        ReadTicket { range, changes, quarantine: self.quarantine, raced, moment, sequential, lending, stamp }
    }

    /// The lender no longer has the page: it gave it away (exclusive), or answered that it is not
    /// there. `ticket` is the READ that found out, if one did.
    pub fn gone(&mut self, index: u32, version: Version, ticket: Option<&ReadTicket>) {
        if self.names(index, |known| known == version) {
            let lifted = ticket.filter(|ticket| !ticket.raced).map_or(0, |ticket| ticket.quarantine);
            self.table.set(index, absent(lifted));
        }
    }

    /// That lender says that it no longer has the page. Of what others have it knows nothing.
    /// Whether it had it.
    pub fn lost(&mut self, index: u32, version: Version, lender: u8) -> bool {
        let entry = self.table.get(index);
        let is_its = matches!(entry, Entry::Busy { place, version: known, .. } | Entry::Present { place, version: known, .. }
            if place.lender == lender && known == version);
        if is_its {
            self.gone(index, version, None);
        }
        is_its
    }

    /// The READ, the kernel's `request`, is about to be answered. False: a change came in between,
    /// so that all of it must be read again below; what is cached of the answer will not be
    /// believed.
    pub fn end_read(&mut self, ticket: &ReadTicket, request: u64, voided: impl FnMut(u32, Entry)) -> bool {
        self.reads = self.reads.saturating_sub(1);
        let moves = (self.changes - ticket.changes) as usize;
        let raced = ticket.raced
            || moves > self.recent.len()
            || keeps(Rule::Repeat) && self.recent.iter().rev().take(moves).any(|moved| moved.overlaps(ticket.range));
        if raced {
            self.quarantine(ticket.range, voided);
        } else if let Some(watch) = &mut self.watch {
            watch.read_answered(request, ticket.range);
        }
        !raced
    }

    /// A READ that has begun will not be answered.
    pub fn fail_read(&mut self) {
        self.reads = self.reads.saturating_sub(1);
    }

    /// The page was evicted, with an event at `position`; `is_zero` tells whether all its bytes are
    /// zero, `has_room` whether the catalog may grow, `elsewhere` whether some lender can be used.
    /// After [`Verdict::Put`] the caller must call [`FileState::put`] before anything else is asked
    /// of this file.
    pub fn evict(
        &mut self,
        index: u32,
        position: u64,
        is_zero: bool,
        standing: impl Fn(Place) -> Standing,
        has_room: bool,
        elsewhere: bool,
    ) -> Verdict {
        if keeps(Rule::Active) && self.active.iter().any(|active| active.range.contains(index.into())) {
            return Verdict::Changing;
        }
        if self.taints.iter().any(|taint| taint.range.contains(index.into()) && position < taint.position) {
            return Verdict::Tainted;
        }
        if self.is_known(index, standing, elsewhere) {
            return Verdict::Known;
        }
        if self.is_provisional
            || self.is_quarantined(index)
            || self.edges.iter().any(|edge| edge.contains(index.into()))
        {
            return Verdict::Quarantined;
        }
        // A READ that finds it cached no more decides anew.
        if let Entry::Absent { lifted, sequential: true } = self.table.get(index) {
            self.table.set(index, absent(lifted));
            return Verdict::Sequential;
        }
        if !has_room {
            return Verdict::NoRoom;
        }
        if is_zero {
            self.table.set(index, Entry::Zero);
            return Verdict::Zero;
        }
        Verdict::Put
    }

    fn is_known(&self, index: u32, standing: impl Fn(Place) -> Standing, elsewhere: bool) -> bool {
        match self.table.get(index) {
            Entry::Busy { place, .. } | Entry::Present { place, .. } => match standing(place) {
                Standing::Valid => true,
                // It may come back; but whoever can be used now is worth more.
                Standing::Suspended => !elsewhere,
                Standing::Lost => false,
            },
            // What is known of the file below says nothing of the copy that was evicted.
            Entry::Zero | Entry::Known { .. } => true,
            Entry::Absent { .. } => false,
        }
    }

    /// Whether nothing is sent of the page, which was just read, when it is evicted, as things
    /// stand.
    pub(super) fn stays(&self, index: u32, standing: impl Fn(Place) -> Standing, elsewhere: bool) -> bool {
        matches!(self.table.get(index), Entry::Absent { sequential: true, .. })
            || self.is_known(index, standing, elsewhere)
    }

    /// What is known of the page.
    pub(super) fn entry(&self, index: u32) -> Entry {
        self.table.get(index)
    }

    /// What the file below holds of the page has this hash: it was read from there just now, or
    /// written. `placed` if it was read as a guest had evicted it.
    pub fn know(&mut self, index: u32, hash: u64, placed: bool) {
        if !self.table.get(index).is_live() && !self.is_provisional {
            self.table.set(index, Entry::Known { hash, placed });
        }
    }

    /// A guest has read these pages. How many of them the kernel cached last because it had evicted
    /// them, and that nobody has said this of.
    pub fn read_by_guest(&mut self, indexes: Range<u32>) -> u64 {
        let mut count = 0;
        for index in indexes {
            if let Entry::Known { hash, placed: true } = self.table.get(index) {
                self.table.set(index, Entry::Known { hash, placed: false });
                count += 1;
            }
        }
        count
    }

    /// Pages that the kernel cached last because a guest had evicted them. It may have evicted them
    /// since.
    pub fn placed_pages(&self) -> u64 {
        self.table.placed_pages()
    }

    /// The page is on its way to a lender, in the name of that control group.
    pub fn put(&mut self, index: u32, place: Place, version: Version, group: u8) {
        self.table.set(index, Entry::Busy { place, version, group });
    }

    /// The page is not to be at a lender any more. Returns its entry, if it still is what `is_it`
    /// says.
    pub fn give_up(&mut self, index: u32, is_it: impl Fn(Version) -> bool) -> Option<Entry> {
        let entry = self.table.get(index);
        match entry {
            Entry::Busy { version, .. } | Entry::Present { version, .. } if is_it(version) => {
                self.table.set(index, UNKNOWN);
                Some(entry)
            }
            _ => None,
        }
    }

    /// Whether a lender has the page, or is sent it, under a version that `is_it` says.
    pub fn names(&self, index: u32, is_it: impl Fn(Version) -> bool) -> bool {
        matches!(self.table.get(index), Entry::Busy { version, .. } | Entry::Present { version, .. } if is_it(version))
    }

    /// What has become of control groups' pages since this was asked last.
    pub(super) fn take_moves(&mut self) -> impl Iterator<Item = Moved> {
        self.table.take_moves()
    }

    /// The lender answered the put. False: the page has changed in the meantime; what the lender
    /// has is of no use.
    pub fn put_done(&mut self, index: u32, version: Version, stored: bool) -> bool {
        match self.table.get(index) {
            Entry::Busy { place, version: known, group } if known == version || !keeps(Rule::Busy) => {
                self.table.set(index, if stored { Entry::Present { place, version, group } } else { UNKNOWN });
                true
            }
            _ => false,
        }
    }

    /// Forgets all pages, because the file is deleted or the catalog needs the room. Nothing
    /// becomes more trusted by it.
    pub fn forget_pages(&mut self, voided: impl FnMut(u32, Entry)) {
        self.table.forget(PageRange::ALL, voided);
    }

    fn is_quarantined(&self, index: u32) -> bool {
        let newest =
            self.quarantines.iter().filter(|held| held.range.contains(index.into())).map(|held| held.number).max();
        match (newest, self.table.get(index)) {
            (None, _) => false,
            (Some(_), Entry::Absent { lifted, .. }) if !keeps(Rule::Lifted) => lifted == 0,
            (Some(number), Entry::Absent { lifted, .. }) => lifted < number,
            // A live page was put while no quarantine held it, and a change of its own would have
            // voided it: it is held only by a merged range.
            (Some(_), _) => false,
        }
    }

    /// Counts a beginning or an end of a change of `range`.
    fn moved(&mut self, range: PageRange) {
        self.changes += 1;
        if self.reads == 0 {
            self.recent = VecDeque::new();
            return;
        }
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(range);
    }

    /// Whether nothing of ours is under way.
    fn is_settled(&self) -> bool {
        self.active.is_empty() && self.attribute_changes == 0
    }

    /// Whether what the file looks like tells something: a file never looked at before has nothing
    /// known or cached. One whose stamp a failed change took away may have, so there anything is a
    /// difference.
    fn is_comparable(&self) -> bool {
        self.stamp.is_some() || self.moment() > 0
    }

    /// Whether somebody who has changed the file beside us may have moved its end since the kernel
    /// learned of it.
    fn may_end_elsewhere(&self, now: Stamp) -> bool {
        let is_told_another = self.told_size_bytes.is_some_and(|told| told != now.size_bytes);
        // One that was never looked at may have been told of all the same.
        is_told_another || self.stamp.map_or(self.moment() > 0, |stamp| stamp.size_bytes != now.size_bytes)
    }

    fn changed_beside(&mut self, voided: impl FnMut(u32, Entry)) {
        self.moved(PageRange::ALL);
        self.quarantine(PageRange::ALL, voided);
        self.changes_beside += 1;
    }

    fn lift(&mut self, range: PageRange, number: u64) {
        if self.quarantines.iter().any(|held| held.range.overlaps(range)) {
            for index in indices(range) {
                if self.is_quarantined(index)
                    && let Entry::Absent { lifted, .. } = self.table.get(index)
                {
                    self.table.set(index, absent(lifted.max(number)));
                }
            }
        }
    }

    fn quarantine(&mut self, range: PageRange, voided: impl FnMut(u32, Entry)) {
        if range.is_empty() {
            return;
        }
        self.table.forget(range, voided);
        self.quarantine += 1;
        self.quarantines.retain(|held| !(range.first <= held.range.first && held.range.end <= range.end));
        self.quarantines.push(Quarantine { range, number: self.quarantine });
        if self.quarantines.len() > QUARANTINES_MAX {
            self.quarantines.sort_by_key(|held| held.range.first);
            let at = nearest(&self.quarantines, |held| held.range);
            let other = self.quarantines.remove(at + 1);
            let held = &mut self.quarantines[at];
            if keeps(Rule::Merge) {
                *held = Quarantine { range: held.range.hull(other.range), number: held.number.max(other.number) };
            }
        }
    }

    fn taint(&mut self, range: PageRange, position: u64, consumed: u64) {
        self.taints.retain(|taint| taint.position > consumed);
        if range.is_empty() || position <= consumed {
            return;
        }
        // Writes mostly continue where the last one ended.
        let goes_on = |taint: &Taint| {
            taint.range.end == range.first && range.end - taint.range.first <= TAINT_PAGES_MAX || taint.range == range
        };
        if let Some(taint) = self.taints.iter_mut().find(|taint| goes_on(taint)) {
            taint.range = taint.range.hull(range);
            taint.position = taint.position.max(position);
            return;
        }
        self.taints.push(Taint { range, position });
        if self.taints.len() > TAINTS_MAX {
            self.taints.sort_by_key(|taint| taint.range.first);
            let at = nearest(&self.taints, |taint| taint.range);
            let other = self.taints.remove(at + 1);
            let taint = &mut self.taints[at];
            if keeps(Rule::Merge) {
                *taint = Taint { range: taint.range.hull(other.range), position: taint.position.max(other.position) };
            }
        }
    }
}

/// Of ranges sorted by their beginning, the place of the one whose successor is nearest.
fn nearest<T>(sorted: &[T], range: impl Fn(&T) -> PageRange) -> usize {
    let gap = |pair: &[T]| range(&pair[1]).first.saturating_sub(range(&pair[0]).end);
    (0..sorted.len() - 1).min_by_key(|at| gap(&sorted[*at..*at + 2])).unwrap_or(0)
}

/// The pages of `range` that can be lent.
fn indices(range: PageRange) -> impl Iterator<Item = u32> {
    (range.first..range.end.min(1 << (64 - PAGE_SHIFT))).map_while(|index| u32::try_from(index).ok())
}

#[cfg(test)]
mod tests;
