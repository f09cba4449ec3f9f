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
    Backing,
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
    let below = |source: &Source| *source == Source::Backing;
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
    pub(crate) accounted: (u64, u64),
    /// The catalog has removed the file: nothing may be put in its name any more.
    pub(crate) is_removed: bool,
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

    /// What a daemon that takes over has to know.
    pub fn left(&self) -> Left {
        let is_sure = self.is_settled()
            && !self.is_provisional
            && !self.end_is_unsure
            && self.changes_dropped >= self.changes_beside;
        Left { stamp: self.stamp.filter(|_| is_sure), has_edges: !self.edges.is_empty() }
    }

    /// Forgets the entries of lenders that are lost.
    pub fn sweep(&mut self, kept: impl Fn(Place) -> bool) {
        self.table
            .sweep(|entry| matches!(entry, Entry::Busy { place, .. } | Entry::Present { place, .. } if !kept(place)));
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
    pub(crate) fn stays(&self, index: u32, standing: impl Fn(Place) -> Standing, elsewhere: bool) -> bool {
        matches!(self.table.get(index), Entry::Absent { sequential: true, .. })
            || self.is_known(index, standing, elsewhere)
    }

    /// What is known of the page.
    pub(crate) fn entry(&self, index: u32) -> Entry {
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
    pub(crate) fn take_moves(&mut self) -> impl Iterator<Item = Moved> {
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
