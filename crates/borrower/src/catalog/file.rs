//! One file in the catalog: the pages that lenders have, and the evictions that may be trusted.
//!
//! This module keeps the promise: *a lender's copy of a page equals the page of the backing file.*
//! It rests on one rule. An eviction is trusted only if nothing changed the page since the evicted
//! copy entered the page cache. Three records decide this:
//!
//! * **active** changes: while a change is in progress, no event of its range is trusted, and none
//!   of its pages is live.
//! * **taints**, from buffered writes: the page cache held the new bytes before the daemon got the
//!   write. Events from the stream's position at our answer on have the new content; earlier events
//!   have older content. A taint ends once the consumer has passed its position.
//! * **quarantines**, from every other change: the kernel drops its old pages only after our
//!   answer, at a time that the daemon does not learn. No event of the page is trusted until a READ
//!   of it arrives, which proves that the old copy is gone. A quarantine has a number, and a page's
//!   entry stores the number that its last READ has cleared. So ranges need never be split. Merging
//!   two quarantines (into their hull, under the newer number) is always safe.
//!
//! A READ that overlaps a change of its pages in time must be repeated. Otherwise the kernel could
//! cache older bytes after a newer write. If such a READ is answered all the same, its pages are
//! quarantined.
//!
//! Pure logic: no I/O, no clock. The invariant: no page is live in the table with other bytes than
//! the file's.

mod changes;
mod reads;

use crate::backing::Stamp;
use crate::catalog::entry::{Entry, Place, Standing, UNKNOWN, absent};
use crate::catalog::overtaking::Watch;
use crate::catalog::rules::{Rule, keeps};
use crate::catalog::table::{Moved, PageTable};
use crate::policy::stream_room::Lending;
use crate::policy::streams::{Looked, Streams};
use page::{PAGE_SHIFT, PAGE_SIZE, PageRange, Version};
use std::collections::VecDeque;
use std::ops::Range;

/// The number of quarantined ranges that a file remembers. Beyond it the two nearest are merged: a
/// few more pages need a READ before they are lent again. (Few in test builds, so that merging is
/// common there.)
const QUARANTINES_MAX: usize = if cfg!(debug_assertions) { 4 } else { 128 };

/// The number of tainted ranges that a file remembers. Beyond it the two nearest are merged: a few
/// more events are not trusted until the consumer reaches the position. (Few in test builds, too.)
const TAINTS_MAX: usize = if cfg!(debug_assertions) { 4 } else { 128 };

/// The state of a file that a daemon leaves to its successor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Left {
    /// The file's stamp. None while any change is in progress, or while the kernel may cache older
    /// bytes.
    pub stamp: Option<Stamp>,
    /// Whether the kernel may still zero a part of its page at the edge of a hole.
    pub has_edges: bool,
}

/// The number of ranges at the edges of holes that a file remembers. Beyond it the two nearest
/// ranges are merged: the pages between them are not lent either.
const EDGES_MAX: usize = 8;

/// The number of beginnings and ends of changes that a file remembers while READs are in progress.
/// Each READ learns from them whether one of its own pages changed meanwhile. A READ that began
/// before the oldest of them counts as overtaken. (A READ from a slow disk takes as long as many
/// writes.)
const RECENT_MAX: usize = 512;

/// The limit in pages for extending a taint by writes that continue where the last one ended. Each
/// such write makes the whole taint last longer.
const TAINT_PAGES_MAX: u64 = 256;

/// The longest gap, in pages, that is read from the backing file along with the pages around it,
/// although these pages are available elsewhere. 32 KiB more take a disk less time than another
/// request. Without this, a stream over a file of which a lender has scattered pages would cause
/// one request for each piece.
pub const GAP_PAGES_MAX: usize = 8;

/// The source of one page of a READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The backing file.
    Backing,
    /// The put buffer on its way to a lender, or else that lender.
    Busy(Place, Version),
    /// A lender.
    Lender(Place, Version),
    /// No source is needed: the page is all zeros.
    Zero,
    /// A guest that has evicted the page, if its bytes have just arrived and have this hash; else
    /// the backing file.
    Demoted(u64),
}

/// Returns the next range of pages, from `at` on, that one request reads from the backing file:
/// pages without another source, and short gaps between them.
pub(crate) fn next_run(sources: &[Source], at: usize) -> Option<Range<usize>> {
    let backing = |source: &Source| *source == Source::Backing;
    let first = at + sources[at..].iter().position(backing)?;
    let mut end = first + 1;
    for (at, source) in sources.iter().enumerate().skip(end) {
        if backing(source) {
            end = at + 1;
        } else if at - end == GAP_PAGES_MAX {
            break;
        }
    }
    Some(first..end)
}

/// A READ in progress.
#[derive(Clone, Copy, Debug)]
pub struct ReadTicket {
    range: PageRange,
    changes: u64,
    quarantine: u64,
    raced: bool,
    moment: u64,
    /// The READ continues a sequential stream.
    pub sequential: bool,
    /// Which of its pages from the backing file are lent in that case.
    lending: Lending,
    /// The recorded stamp of the file, if no change is in progress.
    pub stamp: Option<Stamp>,
}

impl ReadTicket {
    /// The number that [`FileState::moment`] returned when the READ began.
    pub fn moment(&self) -> u64 {
        self.moment
    }

    /// Returns whether the filter leaves that page to the disk, if it comes from there.
    pub fn is_left(&self, index: u64) -> bool {
        self.sequential && !self.lending.lends(index)
    }
}

/// A change in progress.
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
        /// The byte behind the last one.
        end_offset: u64,
        /// The file's size in bytes before the write.
        old_size_bytes: u64,
        /// The stream's position after the change was applied and before it is answered.
        position: u64,
    },
    /// Any other change, or a failure of unknown extent.
    Other,
}

/// The treatment of pages that are read in a sequential stream. [`Lending`] decides for files whose
/// streams fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Pages of streams are lent as any other page.
    Off,
    /// Pages of streams are not lent when they are read. For mounts that lend pages on reads.
    Read(Lending),
    /// Pages of streams are tagged when they are read, and not lent when they are evicted.
    Evicted(Lending),
}

/// The decision about an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send the page.
    Put,
    /// The page was recorded as zeros: nothing to send.
    Zero,
    /// The page was read in a sequential stream: not worth sending.
    Sequential,
    /// A lender has the page already.
    AlreadyLent,
    /// The catalog has no room for the page's entry.
    NoRoom,
    /// The event may have older content: a change is in progress.
    Changing,
    /// The event may have older content: the page is tainted.
    Tainted,
    /// The event may have older content: the page is quarantined.
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
    /// The newest quarantine when the change began.
    quarantine: u64,
}

/// One file.
#[derive(Default)]
pub struct FileState {
    table: PageTable,
    /// Incremented at the beginning and at the end of every change.
    changes: u64,
    /// The number of READs in progress.
    reads: u32,
    /// The ranges of the last of those increments, as far back as READs in progress may have begun.
    recent: VecDeque<PageRange>,
    active: Vec<Active>,
    /// The number of operations on attributes in progress.
    attribute_changes: u64,
    /// Incremented at the beginning and at the end of each of those.
    attribute_moves: u64,
    taints: Vec<Taint>,
    quarantines: Vec<Quarantine>,
    /// The number of the newest quarantine.
    quarantine: u64,
    /// The file's stamp when the last change through the mount, or the last observation, ended.
    stamp: Option<Stamp>,
    /// An external writer may have been active when the stamp was taken: its bytes may arrive after
    /// the stamp.
    is_provisional: bool,
    /// Pages were read since that stamp was taken.
    read_provisional: bool,
    /// The file's ctime when an external change was last detected, in nanoseconds since the epoch.
    external_ctime_ns: i128,
    /// The kernel may have another size than the backing file, because of an external change.
    end_is_unsure: bool,
    /// The number of external changes that were detected.
    external_changes: u64,
    /// The number of those changes whose old pages the kernel has dropped.
    external_changes_dropped: u64,
    /// Present since the first READ.
    streams: Option<Box<Streams>>,
    /// Present since the first write, or the first drop of pages.
    watch: Option<Box<Watch>>,
    /// The size in bytes that the kernel was last told, or learned from its own buffered writes.
    told_size_bytes: Option<u64>,
    /// Pages at the edges of holes. The kernel zeroes a part of its copy after our answer, and
    /// leaves the copy clean, whatever was stored in between (mm/truncate.c,
    /// truncate_inode_partial_folio).
    edges: Vec<PageRange>,
    /// Bytes of memory, and live pages, that the catalog's totals include for this file.
    pub(crate) accounted: (u64, u64),
    /// The catalog has removed the file: nothing may be put for it any more.
    pub(crate) is_removed: bool,
}

impl FileState {
    /// Returns a file that the kernel caches already, from answers of another daemon. The age of
    /// its cached copies is not known, so all pages are quarantined. `left` is the state that the
    /// other daemon left. Without a stamp in it, the kernel's copies may be older than the file.
    pub fn restored(left: Left) -> FileState {
        let mut state = FileState {
            stamp: left.stamp,
            external_changes: u64::from(left.stamp.is_none()),
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

    /// Returns the number of pages that are available without the disk.
    pub fn live_pages(&self) -> u64 {
        self.table.live_pages()
    }

    /// Returns whether all reads of the file are long streams, which come from the disk each time.
    pub(crate) fn is_streamed(&self) -> bool {
        self.streams.as_ref().is_some_and(|streams| streams.are_all(self.file_pages()))
    }

    /// Returns the file's size in pages, or 0 if it is not known.
    fn file_pages(&self) -> u64 {
        self.stamp.map_or(0, |stamp| stamp.size_bytes.div_ceil(PAGE_SIZE as u64))
    }

    /// Returns whether pages of the file's streams are read again before lenders must forget them.
    pub(crate) fn streams_fit(&self) -> bool {
        self.streams.as_ref().is_some_and(|streams| streams.fit())
    }

    /// Some pages of a READ of `pages` pages, in a stream, were looked up at lenders.
    pub(crate) fn looked_at(&mut self, pages: u64, looked: Looked) {
        let file_pages = self.file_pages();
        self.streams.iter_mut().for_each(|streams| streams.looked_at(pages, looked, file_pages));
    }

    /// Forgets the history of streams: past reads predict future reads no longer.
    pub fn forget_passes(&mut self) {
        self.streams.iter_mut().for_each(|streams| streams.forget_passes());
    }

    /// The backing file may have changed. Its entries, and the kernel's cached copies, are not
    /// trusted.
    pub fn suspect(&mut self, invalidated: impl FnMut(u32, Entry)) {
        self.end_is_unsure = true;
        self.changed_externally(invalidated);
    }

    /// Returns the bytes of memory that the entries take.
    pub fn memory_bytes(&self) -> u64 {
        self.table.memory_bytes()
    }

    /// Returns the number of external changes that were detected.
    pub fn external_changes(&self) -> u64 {
        self.external_changes
    }

    /// Returns whether a change of any of these pages is in progress.
    pub fn is_changing(&self, range: PageRange) -> bool {
        self.active.iter().any(|active| active.range.overlaps(range))
    }

    /// Returns whether a READ of these pages has to wait.
    pub(crate) fn must_wait(&self, range: PageRange) -> bool {
        keeps(Rule::Wait) && self.is_changing(range)
    }

    /// A number that grows with every change, also of attributes.
    pub fn moment(&self) -> u64 {
        self.changes + self.attribute_moves
    }

    /// The daemon is about to make the kernel drop pages.
    pub fn drop_begins(&mut self) {
        self.watch.get_or_insert_default().drop_begins();
    }

    /// The kernel has dropped the pages.
    pub fn drop_ended(&mut self) {
        self.watch.get_or_insert_default().drop_ended();
    }

    /// A write(2) that is not answered yet has waited until the pages were dropped.
    pub fn drop_waited(&mut self) {
        self.watch.get_or_insert_default().drop_waited();
    }

    /// The kernel is about to be told the file's size. If the kernel has another size, it drops
    /// pages.
    pub fn tell_size(&mut self, size_bytes: u64) {
        if self.told_size_bytes.replace(size_bytes).is_some_and(|told| told != size_bytes) {
            self.watch.get_or_insert_default().drop_follows();
        }
    }

    /// The kernel has forgotten the file: none of its pages is cached, and no request is in
    /// progress. Events of formerly cached pages may still come.
    pub fn forgotten(&mut self) {
        self.watch = self.watch.take().and_then(|watch| watch.forgotten()).map(Box::new);
        self.streams = None;
        self.locked_request();
        self.told_size_bytes = None;
        self.end_is_unsure = false;
    }

    /// Returns the state that a successor needs.
    pub fn left(&self) -> Left {
        let is_sure = self.is_settled()
            && !self.is_provisional
            && !self.end_is_unsure
            && self.external_changes_dropped >= self.external_changes;
        Left { stamp: self.stamp.filter(|_| is_sure), has_edges: !self.edges.is_empty() }
    }

    /// Forgets the entries of lenders that are lost: those whose place `kept` rejects.
    pub fn sweep(&mut self, kept: impl Fn(Place) -> bool) {
        self.table
            .sweep(|entry| matches!(entry, Entry::Busy { place, .. } | Entry::Present { place, .. } if !kept(place)));
    }

    /// The page was evicted, with an event at `position`. `is_zero`: all its bytes are zero.
    /// `has_room`: the catalog may grow. `elsewhere`: some lender can be used. After
    /// [`Verdict::Put`] the caller must call [`FileState::put`] before any other method of this
    /// file.
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
        if self.is_recorded(index, standing, elsewhere) {
            return Verdict::AlreadyLent;
        }
        if self.is_provisional
            || self.is_quarantined(index)
            || self.edges.iter().any(|edge| edge.contains(index.into()))
        {
            return Verdict::Quarantined;
        }
        // The next READ of the page decides again.
        if let Entry::Absent { cleared, sequential: true } = self.table.get(index) {
            self.table.set(index, absent(cleared));
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

    fn is_recorded(&self, index: u32, standing: impl Fn(Place) -> Standing, elsewhere: bool) -> bool {
        match self.table.get(index) {
            Entry::Busy { place, .. } | Entry::Present { place, .. } => match standing(place) {
                Standing::Valid => true,
                // That lender may come back; but a lender that can be used now is worth more.
                Standing::Unavailable => !elsewhere,
                Standing::Lost => false,
            },
            // The hash of the backing file's page does not describe the evicted copy.
            Entry::Zero | Entry::Hashed { .. } => true,
            Entry::Absent { .. } => false,
        }
    }

    /// Returns whether nothing would be sent if the page, which was just read, were evicted now.
    pub(crate) fn stays(&self, index: u32, standing: impl Fn(Place) -> Standing, elsewhere: bool) -> bool {
        matches!(self.table.get(index), Entry::Absent { sequential: true, .. })
            || self.is_recorded(index, standing, elsewhere)
    }

    /// Returns the entry of the page.
    pub(crate) fn entry(&self, index: u32) -> Entry {
        self.table.get(index)
    }

    /// The page of the backing file has this hash: it was just read from there, or written.
    /// `placed`: it was read because a guest had evicted it.
    pub fn record_hash(&mut self, index: u32, hash: u64, placed: bool) {
        if !self.table.get(index).is_live() && !self.is_provisional {
            self.table.set(index, Entry::Hashed { hash, placed });
        }
    }

    /// A guest has read these pages. Returns how many of them the kernel last cached because the
    /// guest had evicted them. Each page counts once.
    pub fn read_by_guest(&mut self, indexes: Range<u32>) -> u64 {
        let mut count = 0;
        for index in indexes {
            if let Entry::Hashed { hash, placed: true } = self.table.get(index) {
                self.table.set(index, Entry::Hashed { hash, placed: false });
                count += 1;
            }
        }
        count
    }

    /// Returns the number of pages that the kernel last cached because a guest had evicted them.
    /// The kernel may have evicted them since.
    pub fn placed_pages(&self) -> u64 {
        self.table.placed_pages()
    }

    /// The page is on its way to a lender, on the account of that control group.
    pub fn put(&mut self, index: u32, place: Place, version: Version, group: u8) {
        self.table.set(index, Entry::Busy { place, version, group });
    }

    /// The page is to be removed from its lender. Returns its entry, if `is_it` accepts the entry's
    /// version.
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

    /// Returns whether a lender has the page, or is being sent it, under a version that `is_it`
    /// accepts.
    pub fn names(&self, index: u32, is_it: impl Fn(Version) -> bool) -> bool {
        matches!(self.table.get(index), Entry::Busy { version, .. } | Entry::Present { version, .. } if is_it(version))
    }

    /// Returns the changes in the counts of control groups' pages since the last call.
    pub(crate) fn take_moves(&mut self) -> impl Iterator<Item = Moved> {
        self.table.take_moves()
    }

    /// The lender answered the put. Returns false if the page has changed in the meantime. Then the
    /// lender's copy is of no use.
    pub fn put_done(&mut self, index: u32, version: Version, stored: bool) -> bool {
        match self.table.get(index) {
            Entry::Busy { place, version: known, group } if known == version || !keeps(Rule::Busy) => {
                self.table.set(index, if stored { Entry::Present { place, version, group } } else { UNKNOWN });
                true
            }
            _ => false,
        }
    }

    /// Forgets all pages, because the file is deleted or the catalog needs the room. No page
    /// becomes more trusted by this.
    pub(crate) fn forget_pages(&mut self, invalidated: impl FnMut(u32, Entry)) {
        self.table.forget(PageRange::ALL, invalidated);
    }

    fn is_quarantined(&self, index: u32) -> bool {
        let newest =
            self.quarantines.iter().filter(|held| held.range.contains(index.into())).map(|held| held.number).max();
        match (newest, self.table.get(index)) {
            (None, _) => false,
            (Some(_), Entry::Absent { cleared, .. }) if !keeps(Rule::Cleared) => cleared == 0,
            (Some(number), Entry::Absent { cleared, .. }) => cleared < number,
            // A live page was put while no quarantine held it, and a change of its own would have
            // invalidated it. So only a merged range holds it.
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

    /// Returns whether no change through the mount is in progress.
    fn is_settled(&self) -> bool {
        self.active.is_empty() && self.attribute_changes == 0
    }

    /// Returns whether the file's stamp can be compared. A file without any observation has no
    /// entries and no cached pages. A file that lost its stamp to a failed change may have some, so
    /// there any stamp counts as a difference.
    fn is_comparable(&self) -> bool {
        self.stamp.is_some() || self.moment() > 0
    }

    /// Returns whether an external change may have moved the file's end since the kernel learned of
    /// it.
    fn may_end_elsewhere(&self, now: Stamp) -> bool {
        let is_told_another = self.told_size_bytes.is_some_and(|told| told != now.size_bytes);
        // The kernel may also have been told a size of a file that was never observed.
        is_told_another || self.stamp.map_or(self.moment() > 0, |stamp| stamp.size_bytes != now.size_bytes)
    }

    fn changed_externally(&mut self, invalidated: impl FnMut(u32, Entry)) {
        self.moved(PageRange::ALL);
        self.quarantine(PageRange::ALL, invalidated);
        self.external_changes += 1;
    }

    fn clear_quarantine(&mut self, range: PageRange, number: u64) {
        if self.quarantines.iter().any(|held| held.range.overlaps(range)) {
            for index in indices(range) {
                if self.is_quarantined(index)
                    && let Entry::Absent { cleared, .. } = self.table.get(index)
                {
                    self.table.set(index, absent(cleared.max(number)));
                }
            }
        }
    }

    fn quarantine(&mut self, range: PageRange, invalidated: impl FnMut(u32, Entry)) {
        if range.is_empty() {
            return;
        }
        self.table.forget(range, invalidated);
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
        // Most writes continue where the last one ended.
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

/// Returns, among ranges sorted by their beginning, the index of the range whose successor is
/// nearest.
fn nearest<T>(sorted: &[T], range: impl Fn(&T) -> PageRange) -> usize {
    let gap = |pair: &[T]| range(&pair[1]).first.saturating_sub(range(&pair[0]).end);
    (0..sorted.len() - 1).min_by_key(|at| gap(&sorted[*at..*at + 2])).unwrap_or(0)
}

/// Returns the indices of the pages of `range` that can be lent.
fn indices(range: PageRange) -> impl Iterator<Item = u32> {
    (range.first..range.end.min(1 << (64 - PAGE_SHIFT))).map_while(|index| u32::try_from(index).ok())
}

#[cfg(test)]
mod tests;
