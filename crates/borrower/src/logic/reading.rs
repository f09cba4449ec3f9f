//! One READ out of the kernel's page cache, from its arrival to its answer, as steps between which
//! anything may happen.
//!
//! ```text
//!  Reading::begin ─▶ is_plain ─▶ (read all from below) ─▶ short_end ──┐
//!        ▲              └─▶ fill_from_buffers ─▶ next_question ─▶ answered  (as often as there are questions)
//!        │                  ─▶ next_below (as often as there are runs) ─▶ length
//!        └──────────── false ◀─ end ◀─────────────────────────────────┘
//! ```
//!
//! Who drives it does the input and output. What must never happen: bytes of the answer that nobody
//! has filled or verified.

use super::catalog::File;
use super::core::Core;
use super::demoted::Demoted;
use super::entry::Entry;
use super::file::{FileState, ReadTicket, Source, next_run};
use super::rules::{Rule, keeps};
use super::stream_room::Origin;
use crate::below::{Stamp, Writers};
use page::{PAGE_SIZE, Page, PageId, PageRange, Version};
use std::ops::Range;
use std::time::Duration;
use wire::{ITEMS_MAX, WireKey};

/// How often a READ is done again because its pages changed meanwhile. After that, changes are kept
/// out while it is read from below.
pub const ATTEMPTS_MAX: u32 = 4;

/// What became of one page of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
    /// The lender does not have it.
    Miss,
    /// Its bytes are in place, as the lender returned them, and not yet opened; neither is what
    /// came with them verified.
    Page {
        /// For [`page::seal::Sealing::open`].
        checksum: u64,
    },
}

/// One question to one lender.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Whom to ask.
    pub lender: u8,
    /// For which pages.
    pub keys: &'a [WireKey],
    /// Where in the READ's buffer each goes, in bytes.
    pub places: &'a [usize],
    /// The READ goes on where others ended.
    pub is_sequential: bool,
}

/// A READ under way. To be used again, so that nothing is allocated while a READ is answered.
#[derive(Default)]
pub struct Reading {
    ticket: Option<ReadTicket>,
    offset: u64,
    len: usize,
    sources: Vec<Source>,
    /// The last question, and how many of its pages were answered.
    keys: Vec<WireKey>,
    places: Vec<usize>,
    answered: usize,
    /// The lenders that are still to be asked, by the bits of their numbers.
    asking: u64,
    asked: usize,
    filled: usize,
    /// Pages that the lender no longer has.
    gone: Vec<(u32, Version)>,
}

impl Reading {
    /// The READ of `len` bytes at `offset` begins, or begins again. No change of its pages may be
    /// under way, unless changes are kept out until it has ended: who drives it waits for that with
    /// the file's state locked.
    pub fn begin(
        &mut self,
        core: &Core,
        file: &File,
        state: &mut FileState,
        (produced, consumed): (u64, u64),
        offset: u64,
        len: usize,
    ) {
        let range = Reading::range(offset, len);
        core.catalog.touch(file);
        let standing = |place| core.catalog.standing(place);
        let has_room = core.catalog.has_room();
        let filter = core.filter();
        self.ticket = Some(state.begin_read(range, produced, consumed, standing, has_room, filter, &mut self.sources));
        core.catalog.account(state);
        self.asking = 0;
        for (source, index) in self.sources.iter_mut().zip(range.first..) {
            if let Source::Demoted(hash) = *source
                && !core.demoted().is_some_and(|demoted| demoted.has(id_of(file, index), hash))
            {
                *source = Source::Below;
            }
            if let Source::Lender(place, _) | Source::Busy(place, _) = source {
                self.asking |= 1 << place.lender;
            }
        }
        (self.offset, self.len) = (offset, len);
        (self.asked, self.filled) = (0, 0);
        self.gone.clear();
    }

    /// Notes that the kernel's page cache has missed its pages. Once after it has begun, when there
    /// is time, and with the file's state free.
    pub fn note_missed(&self, core: &Core, file: &File) {
        let (range, is_sequential) = (Reading::range(self.offset, self.len), self.is_sequential());
        core.curve.missed(file.key(), range);
        let looked = core.stream_room.missed(file.key(), range, is_sequential, || core.room_pages());
        if is_sequential && looked.sampled_pages > 0 {
            file.state.lock().looked_at(range.end - range.first, looked);
        }
    }

    /// The pages that a READ is about.
    pub fn range(offset: u64, len: usize) -> PageRange {
        PageRange::touched_by(offset, offset.saturating_add(len as u64))
    }

    fn ticket(&self) -> &ReadTicket {
        // `begin` comes first: the one who drives it has nothing else to call.
        self.ticket.as_ref().unwrap_or_else(|| unreachable!("a READ begins before it goes on"))
    }

    /// Whether all of it is to be read from below, in one piece. [`Reading::short_end`] comes next
    /// then.
    pub fn is_plain(&self) -> bool {
        let whole_pages = self.offset.is_multiple_of(PAGE_SIZE as u64) && self.len.is_multiple_of(PAGE_SIZE);
        !whole_pages || self.sources.iter().all(|source| *source == Source::Below)
    }

    /// The lender that has all of it, if one has, and nobody reads a stream: it can be asked for
    /// this READ and others at once.
    pub fn lender_of_all(&self) -> Option<u8> {
        let lender = self.asking.trailing_zeros() as u8;
        let is_there = |source: &Source| matches!(source, Source::Lender(place, _) if place.lender == lender);
        let is_all_there = self.len == self.sources.len() * PAGE_SIZE && self.sources.iter().all(is_there);
        (self.asking != 0 && is_all_there && !self.is_sequential()).then_some(lender)
    }

    /// Whether all questions were answered with what was asked for.
    pub fn is_filled(&self) -> bool {
        !self.sources.contains(&Source::Below)
    }

    /// A plain READ has met the end of the file early; `now` is what the file looks like. An end
    /// that is not where we left it is somebody else's doing.
    pub fn short_end(&self, core: &Core, file: &File, now: Stamp) {
        self.compare(core, file, now);
    }

    /// Fills in what is known to be zeros, and what is still in a put buffer.
    pub fn fill_from_buffers(&mut self, core: &Core, file: &File, buf: &mut [u8]) {
        let (pages, _) = buf.as_chunks_mut::<PAGE_SIZE>();
        let indexes = self.offset / PAGE_SIZE as u64..;
        for ((source, page), index) in self.sources.iter_mut().zip(pages).zip(indexes) {
            match *source {
                Source::Zero => {
                    page.fill(0);
                    core.metrics.zero_pages.one();
                }
                Source::Busy(place, version) => {
                    let queue = core.queue(place.lender).lock();
                    if let Some(sealed) = queue.find(version) {
                        core.sealing().open_own(id_of(file, index), version, sealed, page);
                        core.metrics.buffer_pages.one();
                        continue;
                    }
                    let is_lost = queue.is_being_abandoned();
                    drop(queue);
                    // The lender has answered meanwhile: it is there, unless that is void, as it is
                    // with the lender lost.
                    let is_there =
                        !is_lost && file.state.lock().names(id_of(file, index).index, |known| known == version);
                    *source = if is_there { Source::Lender(place, version) } else { Source::Below };
                }
                Source::Demoted(hash) => {
                    match core.demoted().and_then(|demoted| demoted.take(id_of(file, index), hash)) {
                        Some(bytes) => {
                            page.copy_from_slice(&*bytes);
                            core.metrics.demoted_pages.one();
                        }
                        None => *source = Source::Below, // it was waited for long enough
                    }
                }
                Source::Below | Source::Lender(..) => {}
            }
        }
    }

    /// The next question, for at most [`ITEMS_MAX`] pages of one lender; [`Reading::answered`] must
    /// follow, until nothing of it is [`Reading::unanswered`]. None: all are asked.
    pub fn next_question(&mut self, file: &File) -> Option<Question<'_>> {
        self.keys.clear();
        self.places.clear();
        self.answered = 0;
        let first = (self.offset / PAGE_SIZE as u64) as u32;
        let is_sequential = self.is_sequential();
        while self.asking != 0 {
            let lender = self.asking.trailing_zeros() as u8;
            while self.asked < self.sources.len() && self.keys.len() < ITEMS_MAX {
                if let Source::Lender(place, version) = self.sources[self.asked]
                    && place.lender == lender
                {
                    let id = PageId { file: file.key(), index: first + self.asked as u32 };
                    self.keys.push(WireKey::new(id, version));
                    self.places.push(self.asked * PAGE_SIZE);
                }
                self.asked += 1;
            }
            if self.asked == self.sources.len() {
                (self.asked, self.asking) = (0, self.asking & (self.asking - 1));
            }
            if !self.keys.is_empty() {
                return Some(Question { lender, keys: &self.keys, places: &self.places, is_sequential });
            }
        }
        None
    }

    /// Where in the READ's buffer those pages of the last question go that were not answered yet.
    pub fn unanswered(&self) -> &[usize] {
        &self.places[self.answered..]
    }

    /// The answer to the next pages of the last question, as many as `got` has, is in `buf`; or
    /// there is none to all that are left of it. It is opened there. What is no good will be read
    /// from below; where the lender had no chance to answer (`asked` is false), nothing is known of
    /// its pages. Returns how many it returned that do not verify.
    pub fn answered(&mut self, core: &Core, got: Option<&[Got]>, asked: bool, buf: &mut [u8]) -> u64 {
        let exclusive = core.is_exclusive();
        let mut bad_pages = 0;
        let first = self.answered;
        self.answered = got.map_or(self.keys.len(), |got| self.keys.len().min(first + got.len()));
        let pages = self.keys[first..self.answered].iter().zip(&self.places[first..]);
        for (at, (key, place)) in pages.enumerate() {
            let (id, version) = (key.id(), key.version());
            let good = match got.and_then(|got| got.get(at)) {
                None => false,
                Some(Got::Miss) => {
                    core.metrics.get_misses.one();
                    false
                }
                Some(Got::Page { checksum }) => {
                    let bytes = buf[*place..].first_chunk_mut::<PAGE_SIZE>();
                    let verifies = bytes.is_some_and(|page| core.sealing().open(id, version, *checksum, page));
                    let good = verifies || !keeps(Rule::Checksum);
                    if !good {
                        bad_pages += 1;
                    }
                    good
                }
            };
            if good {
                core.metrics.lender_pages.one();
            } else {
                self.sources[place / PAGE_SIZE] = Source::Below;
            }
            if asked && (exclusive || !good) {
                self.gone.push((id.index, version));
            }
        }
        core.metrics.bad_pages.add(bad_pages);
        bad_pages
    }

    /// The rest of the answer to the last question is late, and not waited for: it will be read
    /// from below. The lender has the pages still, unless it gives away what it answers.
    pub fn late(&mut self, core: &Core) {
        let first = std::mem::replace(&mut self.answered, self.keys.len());
        for (key, place) in self.keys[first..].iter().zip(&self.places[first..]) {
            self.sources[place / PAGE_SIZE] = Source::Below;
            if core.is_exclusive() {
                self.gone.push((key.id().index, key.version()));
            }
        }
    }

    /// Whether the READ goes on where others ended.
    pub fn is_sequential(&self) -> bool {
        self.ticket().sequential
    }

    /// The next run of pages that are nowhere else, with few others between them, as bytes of the
    /// READ's buffer: to be read from below, with zeros behind the end of the file. None: there are
    /// no more.
    pub fn next_below(&mut self) -> Option<Range<usize>> {
        let run = next_run(&self.sources, self.filled)?;
        self.filled = run.end;
        self.sources[run.clone()].fill(Source::Below);
        Some(run.start * PAGE_SIZE..run.end * PAGE_SIZE)
    }

    /// All is filled, and then the file was looked at. Returns how many bytes the answer has: the
    /// size decides where it ends, so that nothing a page holds behind it is ever shown.
    pub fn length(&self, core: &Core, file: &File, now: Stamp) -> usize {
        self.compare(core, file, now);
        if !keeps(Rule::Size) {
            return self.len;
        }
        now.size_bytes.saturating_sub(self.offset).min(self.len as u64) as usize
    }

    /// If the file is not what we left, it was changed beside us, and [`Reading::end`] will say
    /// that it must be read again.
    fn compare(&self, core: &Core, file: &File, now: Stamp) {
        let ticket = self.ticket();
        if ticket.stamp.is_some_and(|stamp| stamp != now) {
            core.observe(file, ticket.moment(), now, Writers::Unasked);
        }
    }

    /// The READ, the kernel's `request`, is about to be answered with `bytes`. False: it must be
    /// done again. With `fill`, what came from the disk is put at once, because no eviction will be
    /// seen.
    pub fn end(&mut self, core: &Core, file: &File, state: &mut FileState, request: u64, bytes: &[u8]) -> bool {
        let ticket = *self.ticket();
        for (index, version) in self.gone.drain(..) {
            state.gone(index, version, Some(&ticket));
        }
        let void = |index: u32, entry: Entry| core.catalog.void(file.key(), index, entry);
        let is_good = state.end_read(&ticket, request, void);
        core.catalog.account(state);
        if !is_good {
            core.metrics.reads_repeated.one();
            return false;
        }
        core.metrics.read_pages.add(bytes.len().div_ceil(PAGE_SIZE) as u64);
        if core.catalog.takes_hints() {
            self.hint(core, file, state);
        }
        if let Some(demoted) = core.demoted() {
            self.know(core, demoted, file, state, bytes);
        } else if !core.sees_evictions() {
            self.fill_pool(core, file, state, bytes);
        }
        true
    }

    /// The READ is answered with an error: the file below cannot be read. The kernel caches nothing
    /// of it.
    pub fn fail(&mut self, core: &Core, state: &mut FileState) {
        for (index, version) in self.gone.drain(..) {
            state.gone(index, version, None);
        }
        state.fail_read();
        core.catalog.account(state);
    }

    /// A READ of a stream is answered at the time `now`, counted from whenever the borrower began,
    /// and has taken so long: so fast goes the stream on that it belongs to.
    pub fn note_answered(&self, core: &Core, now: Duration, took: Duration) {
        let indexes = self.offset / PAGE_SIZE as u64..;
        let is_lent = |source: &Source| matches!(source, Source::Lender(..));
        let is_left = |(source, index): (&Source, u64)| *source == Source::Below && self.ticket().is_left(index);
        let from = if self.sources.iter().all(is_lent) {
            Some(Origin::Lenders)
        } else {
            self.sources.iter().zip(indexes).all(is_left).then_some(Origin::Disk)
        };
        core.stream_room.went_on(self.sources.len(), from, now, took);
    }

    /// What will not be sent when it is evicted need not be copied then.
    fn hint(&self, core: &Core, file: &File, state: &FileState) {
        let first = self.offset / PAGE_SIZE as u64;
        let indexes = (first..).take(self.sources.len()).map_while(|index| u32::try_from(index).ok());
        let (standing, elsewhere) = (|place| core.catalog.standing(place), core.usable() != 0);
        for index in indexes {
            let id = PageId { file: file.key(), index };
            match state.stays(index, standing, elsewhere) {
                true => core.catalog.wants_no_bytes(id),
                false => core.catalog.wants_bytes(id),
            }
        }
    }

    /// Notes what the file below holds.
    fn know(&self, core: &Core, demoted: &Demoted, file: &File, state: &mut FileState, bytes: &[u8]) {
        let first = self.offset / PAGE_SIZE as u64;
        if first * PAGE_SIZE as u64 != self.offset || !core.catalog.has_room() {
            return;
        }
        let (pages, _) = bytes.as_chunks::<PAGE_SIZE>();
        for ((index, source), page) in (first..).zip(&self.sources).zip(pages) {
            let Ok(narrow) = u32::try_from(index) else { break };
            match *source {
                Source::Below => state.know(narrow, demoted.hash(id_of(file, index), page), false),
                Source::Demoted(hash) => state.know(narrow, hash, true),
                Source::Zero | Source::Busy(..) | Source::Lender(..) => {}
            }
        }
        core.catalog.account(state);
    }

    fn fill_pool(&self, core: &Core, file: &File, state: &mut FileState, bytes: &[u8]) {
        let range = Reading::range(self.offset, bytes.len());
        if range.first * PAGE_SIZE as u64 != self.offset || core.usable() == 0 {
            return;
        }
        let (whole, tail) = bytes.as_chunks::<PAGE_SIZE>();
        let mut last: Page = [0; PAGE_SIZE];
        last[..tail.len()].copy_from_slice(tail);
        let pages = whole.iter().chain((!tail.is_empty()).then_some(&last));
        for ((index, source), page) in (range.first..range.end).zip(&self.sources).zip(pages) {
            if *source == Source::Below
                && let Ok(narrow) = u32::try_from(index)
            {
                if self.ticket().is_left(index) {
                    core.stream_room.evicted(file.key(), narrow);
                    continue;
                }
                core.offer(file, state, narrow, u64::MAX, Some(page), 0);
            }
        }
    }
}

/// What is lent, or evicted by guests, has an index of that width.
fn id_of(file: &File, index: u64) -> PageId {
    PageId { file: file.key(), index: index as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::below::FileIdentity;
    use crate::logic::core::{Change, Outcome, Setup, Strategy};
    use crate::logic::file::GAP_PAGES_MAX;
    use crate::logic::puts::Batch;
    use page::ChecksumKey;
    use page::seal::Sealing;
    use std::collections::HashMap;
    use std::sync::Arc;

    const PAGES: usize = 4;

    /// A pool that is filled on read, and a lender that may be asked to lie.
    struct World {
        core: Core,
        file: Arc<File>,
        below: Vec<u8>,
        changes: i128,
        /// What the lender was given, by index and version.
        lent: HashMap<(u32, u64), (Page, u64)>,
    }

    impl World {
        fn new(sealing: Sealing) -> World {
            let core = Core::new(Setup {
                put_batches: 4,
                batch_pages: 8,
                ..Setup::new(1, sealing, Strategy::NonInclusive, false)
            });
            core.catalog.lender_up(0);
            let file = core.catalog.adopt(FileIdentity { device: 1, inode: 1, generation: 1 });
            let mut world = World { core, file, below: Vec::new(), changes: 0, lent: HashMap::new() };
            world.below = world.content();
            world
        }

        fn content(&self) -> Vec<u8> {
            (0..PAGES * PAGE_SIZE).map(|at| (at / PAGE_SIZE) as u8 * 16 + 1 + self.changes as u8).collect()
        }

        fn stamp(&self) -> Stamp {
            Stamp { size_bytes: self.below.len() as u64, mtime_ns: self.changes, ctime_ns: self.changes }
        }

        fn change(&mut self) {
            let change = Change::Other { start: 0, end: self.below.len() as u64 };
            let changing = self.core.begin_change(&self.file, change, self.stamp());
            self.changes += 1;
            self.below = self.content();
            self.core.end_change(&self.file, changing, Outcome::Applied(self.stamp()), (0, 0), None);
        }

        /// A READ of all; the lender answers with what it has under the index and version that
        /// `lie` makes of the right ones, and with what that makes of the bytes. What the READ puts
        /// is given to the lender.
        fn read(&mut self, lie: impl Fn((u32, u64), &mut Page) -> (u32, u64)) -> Vec<u8> {
            let (mut reading, mut buf) = (Reading::default(), vec![0xee; PAGES * PAGE_SIZE]);
            reading.begin(&self.core, &self.file, &mut self.file.state.lock(), (0, 0), 0, buf.len());
            if reading.is_plain() {
                buf.copy_from_slice(&self.below);
            } else {
                reading.fill_from_buffers(&self.core, &self.file, &mut buf);
                while let Some(question) = reading.next_question(&self.file) {
                    let mut answer = |key: &WireKey, place: usize| {
                        let right = (key.id().index, key.version().0);
                        let (mut page, checksum) = self.lent[&lie(right, &mut [0; PAGE_SIZE])];
                        lie(right, &mut page);
                        buf[place..place + PAGE_SIZE].copy_from_slice(&page);
                        Got::Page { checksum }
                    };
                    let got: Vec<Got> =
                        question.keys.iter().zip(question.places).map(|(key, place)| answer(key, *place)).collect();
                    reading.answered(&self.core, Some(&got), true, &mut buf);
                }
                while let Some(run) = reading.next_below() {
                    buf[run.clone()].copy_from_slice(&self.below[run]);
                }
                assert_eq!(reading.length(&self.core, &self.file, self.stamp()), buf.len());
            }
            assert!(reading.end(&self.core, &self.file, &mut self.file.state.lock(), 1, &buf));
            while let Some((request, batch)) = self.core.next_put(0, true) {
                for (item, page) in batch.items().iter().zip(batch.pages()) {
                    let name = (item.key.id().index, item.key.version().0);
                    self.lent.insert(name, (*page, item.checksum.get()));
                }
                self.core.puts_answered(0, request, &vec![1; batch.items().len()]).unwrap();
            }
            buf
        }

        /// All pages are sent to the lender, and a READ finds them on their way.
        fn send_and_read(&self) -> (Arc<Batch>, Reading) {
            let mut reading = Reading::default();
            let begin = |reading: &mut Reading| {
                reading.begin(&self.core, &self.file, &mut self.file.state.lock(), (0, 0), 0, self.below.len());
            };
            begin(&mut reading);
            assert!(reading.end(&self.core, &self.file, &mut self.file.state.lock(), 1, &self.below));
            let (_, sent) = self.core.next_put(0, true).unwrap();
            begin(&mut reading);
            assert!(!reading.is_plain());
            (sent, reading)
        }

        fn counts(&self) -> (u64, u64) {
            (self.core.metrics.lender_pages.get(), self.core.metrics.bad_pages.get())
        }
    }

    #[test]
    fn what_was_not_answered_when_the_lender_was_lost_is_not_asked_for() {
        let world = World::new(Sealing::Checksum(ChecksumKey::new([1; 32])));
        let (core, file) = (&world.core, &world.file);
        let (_sent, mut reading) = world.send_and_read();
        // The READ comes to it when the lender is lost, and that is still on record.
        let batches = core.queue(0).lock().abandon();
        reading.fill_from_buffers(core, file, &mut vec![0; world.below.len()]);
        assert!(reading.next_question(file).is_none());
        assert_eq!(reading.next_below(), Some(0..world.below.len()));
        for item in batches.iter().flat_map(|batch| batch.items()) {
            assert!(file.state.lock().names(item.key.id().index, |version| version == item.key.version()));
        }
        drop(batches);
        core.queue(0).lock().abandoned();
    }

    #[test]
    fn what_was_abandoned_is_voided_and_dropped() {
        let world = World::new(Sealing::Checksum(ChecksumKey::new([1; 32])));
        let (core, file) = (&world.core, &world.file);
        let (sent, mut reading) = world.send_and_read();
        core.abandon_puts(0);
        reading.fill_from_buffers(core, file, &mut vec![0; world.below.len()]);
        assert!(reading.next_question(file).is_none());
        assert_eq!(reading.next_below(), Some(0..world.below.len()));
        assert!((0..PAGES as u32).all(|index| !file.state.lock().names(index, |_| true)));
        // Should it have come there, it is told to go.
        let mut drops = Vec::new();
        core.catalog.take_drops(0, ITEMS_MAX, &mut drops);
        assert_eq!(drops.len(), PAGES);
        drop(sent);
        assert_eq!(core.queue(0).lock().under_way(), 0);
    }

    #[test]
    fn few_pages_between_others_are_read_along() {
        // How many pages are below alone and elsewhere, too, by turns, and the runs that are read.
        let runs = |counts: &[usize]| {
            let kinds = [Source::Below, Source::Zero].into_iter().cycle();
            let sources =
                counts.iter().zip(kinds).flat_map(|(count, kind)| std::iter::repeat_n(kind, *count)).collect();
            let mut reading = Reading { sources, ..Reading::default() };
            let runs: Vec<_> = std::iter::from_fn(|| reading.next_below()).collect();
            let left = reading.sources.iter().filter(|source| **source == Source::Zero).count();
            (left, runs.iter().map(|run| run.start / PAGE_SIZE..run.end / PAGE_SIZE).collect::<Vec<_>>())
        };
        const MAX: usize = GAP_PAGES_MAX;
        assert_eq!(runs(&[0, 3]), (3, vec![]));
        assert_eq!(runs(&[2, MAX, 1, MAX + 1, 1]), (MAX + 1, vec![0..MAX + 3, 2 * MAX + 4..2 * MAX + 5]));
        // What is at either end is no gap, however little it is.
        assert_eq!(runs(&[0, 1, 2, 3, 4, 1, 1, MAX + 1, 2]), (MAX + 2, vec![1..12, MAX + 13..MAX + 15]));
    }

    #[test]
    fn what_a_lender_has_between_others_is_not_asked_for() {
        let mut world = World::new(Sealing::Checksum(ChecksumKey::new([1; 32])));
        let honest = |name, _: &mut Page| name;
        world.read(honest);
        assert_eq!(world.lent.len(), PAGES);
        // Of four pages the lender has the two in the middle only, and then the first two.
        for (gone, asked) in [([0, 3], 0), ([2, 3], 2)] {
            world.read(honest);
            for index in gone {
                let (_, version) = *world.lent.keys().find(|(at, _)| *at == index).unwrap();
                let key = WireKey::new(PageId { file: world.file.key(), index }, Version(version));
                world.core.pages_lost(1, &[key]); // which is not its to tell
                assert!(world.file.state.lock().names(index, |known| known == Version(version)));
                world.core.pages_lost(0, &[key]);
                assert!(!world.file.state.lock().names(index, |known| known == Version(version)));
                world.lent.remove(&(index, version));
            }
            let (before, _) = world.counts();
            assert!(world.read(honest) == world.below);
            assert_eq!(world.counts().0 - before, asked, "without {gone:?}");
        }
    }

    #[test]
    fn swapped_changed_and_replayed_pages_are_read_from_below() {
        for sealing in [Sealing::Checksum(ChecksumKey::new([1; 32])), Sealing::aead(&[1; 32]).unwrap()] {
            let is_sealed = matches!(sealing, Sealing::Aead(_));
            let mut world = World::new(sealing);
            let honest = |name, _: &mut Page| name;
            assert!(world.read(honest) == world.below);
            assert_eq!((world.counts(), world.lent.len()), ((0, 0), PAGES));
            let in_clear =
                world.lent.values().filter(|(page, _)| world.below.chunks(PAGE_SIZE).any(|below| below == page));
            assert_eq!(in_clear.count(), if is_sealed { 0 } else { PAGES });
            assert!(world.read(honest) == world.below);
            assert_eq!(world.counts(), (4, 0));

            // The first two are swapped, each with the seal that belongs to it; a bit of the third
            // has flipped.
            let versions: HashMap<u32, u64> = world.lent.keys().copied().collect();
            let lie = |(index, version), page: &mut Page| {
                page[77] ^= u8::from(index == 2);
                let swapped = if index < 2 { 1 - index } else { index };
                (swapped, versions.get(&swapped).copied().unwrap_or(version))
            };
            assert!(world.read(lie) == world.below);
            assert_eq!(world.counts(), (5, 3));

            // The old bytes, with the old seal, for the new version of each page.
            let old: HashMap<u32, u64> = world.lent.keys().copied().collect();
            world.change();
            world.read(honest);
            assert!(world.read(honest) == world.below);
            let (good, bad) = world.counts();
            let replay = |(index, _): (u32, u64), _: &mut Page| (index, old[&index]);
            assert!(world.read(replay) == world.below);
            assert_eq!(world.counts(), (good, bad + PAGES as u64));
        }
    }

    #[test]
    fn who_does_not_borrow_puts_nothing_and_gets_what_is_there() {
        let mut world = World::new(Sealing::Checksum(ChecksumKey::new([1; 32])));
        let honest = |name, _: &mut Page| name;
        world.read(honest);
        world.core.set_borrowing(false);
        assert!(world.read(honest) == world.below);
        assert_eq!(world.counts(), (PAGES as u64, 0));
        world.change();
        let lent = world.lent.len();
        for _ in 0..2 {
            assert!(world.read(honest) == world.below);
            assert_eq!((world.counts(), world.lent.len()), ((PAGES as u64, 0), lent));
        }
        world.core.set_borrowing(true);
        world.read(honest);
        assert!(world.read(honest) == world.below);
        assert_eq!((world.counts(), world.lent.len()), ((2 * PAGES as u64, 0), lent + PAGES));
    }
}
