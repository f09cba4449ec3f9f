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
//! The caller does the input and output. What must never happen: bytes of the answer that nobody
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
mod tests;
