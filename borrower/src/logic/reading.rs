//! One READ out of the kernel's page cache, from its arrival to its answer, as steps between which anything may happen.
//!
//! ```text
//!  Reading::begin ─▶ is_plain ─▶ (read all from below) ─▶ short_end ──┐
//!        ▲              └─▶ fill_from_buffers ─▶ next_question ─▶ answered  (as often as there are questions)
//!        │                  ─▶ next_below (as often as there are runs) ─▶ length
//!        └──────────── false ◀─ end ◀─────────────────────────────────┘
//! ```
//!
//! Who drives it does the input and output. What must never happen: bytes of the answer that nobody has filled or verified.

use super::catalog::File;
use super::core::Core;
use super::entry::Entry;
use super::file::{FileState, ReadTicket, Source};
use super::rules::{Rule, keeps};
use crate::below::Stamp;
use page::{PAGE_SIZE, Page, PageId, PageRange, Version};
use std::ops::Range;
use wire::{ITEMS_MAX, WireKey};

/// How often a READ is done again because its pages changed meanwhile. After that, changes are kept out while it is read from below.
pub const ATTEMPTS_MAX: u32 = 4;

/// What became of one page of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
    /// The lender does not have it.
    Miss,
    /// Its bytes are in place; the checksum is what the lender returned with them, not yet compared.
    Page {
        /// To be compared with [`page::ChecksumKey::checksum`].
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
}

/// A READ under way. To be used again, so that nothing is allocated while a READ is answered.
#[derive(Default)]
pub struct Reading {
    ticket: Option<ReadTicket>,
    offset: u64,
    len: usize,
    sources: Vec<Source>,
    keys: Vec<WireKey>,
    places: Vec<usize>,
    /// Pages behind which nothing more has to be asked, and read from below.
    asked: usize,
    filled: usize,
    asking: u8,
    /// Pages that the lender no longer has.
    gone: Vec<(u32, Version)>,
}

impl Reading {
    /// The READ of `len` bytes at `offset` begins, or begins again. No change of its pages may be under way, unless changes are kept
    /// out until it has ended: who drives it waits for that with the file's state locked.
    pub fn begin(
        &mut self,
        core: &Core,
        state: &mut FileState,
        (produced, consumed): (u64, u64),
        offset: u64,
        len: usize,
    ) {
        let range = Reading::range(offset, len);
        let standing = |place| core.catalog.standing(place);
        let has_room = core.catalog.has_room();
        self.ticket = Some(state.begin_read(range, produced, consumed, standing, has_room, &mut self.sources));
        core.catalog.account(state);
        (self.offset, self.len) = (offset, len);
        (self.asked, self.filled, self.asking) = (0, 0, 0);
        self.gone.clear();
    }

    /// The pages that a READ is about.
    pub fn range(offset: u64, len: usize) -> PageRange {
        PageRange::touched_by(offset, offset.saturating_add(len as u64))
    }

    fn ticket(&self) -> &ReadTicket {
        // `begin` comes first: the one who drives it has nothing else to call.
        self.ticket.as_ref().unwrap_or_else(|| unreachable!("a READ begins before it goes on"))
    }

    /// Whether all of it is to be read from below, in one piece. [`Reading::short_end`] comes next then.
    pub fn is_plain(&self) -> bool {
        let whole_pages = self.offset.is_multiple_of(PAGE_SIZE as u64) && self.len.is_multiple_of(PAGE_SIZE);
        !whole_pages || self.sources.iter().all(|source| *source == Source::Below)
    }

    /// A plain READ has met the end of the file early; `now` is what the file looks like. An end that is not where we left it is
    /// somebody else's doing.
    pub fn short_end(&self, core: &Core, file: &File, now: Stamp) {
        self.compare(core, file, now);
    }

    /// Fills in what is known to be zeros, and what is still in a put buffer.
    pub fn fill_from_buffers(&mut self, core: &Core, buf: &mut [u8]) {
        let (pages, _) = buf.as_chunks_mut::<PAGE_SIZE>();
        for (source, page) in self.sources.iter_mut().zip(pages) {
            match *source {
                Source::Zero => {
                    page.fill(0);
                    core.metrics.zero_pages.one();
                }
                Source::Busy(place, version) => match core.queue(place.lender).lock().find(version) {
                    Some(bytes) => {
                        *page = *bytes;
                        core.metrics.buffer_pages.one();
                    }
                    // The lender has answered meanwhile: it is there.
                    None => *source = Source::Lender(place, version),
                },
                Source::Below | Source::Lender(..) => {}
            }
        }
    }

    /// The next question, for at most [`ITEMS_MAX`] pages of one lender; [`Reading::answered`] must follow. None: all are asked.
    pub fn next_question(&mut self, file: &File, lenders: u8) -> Option<Question<'_>> {
        self.keys.clear();
        self.places.clear();
        let first = (self.offset / PAGE_SIZE as u64) as u32;
        while self.asking < lenders {
            while self.asked < self.sources.len() && self.keys.len() < ITEMS_MAX {
                if let Source::Lender(place, version) = self.sources[self.asked]
                    && place.lender == self.asking
                {
                    let id = PageId { file: file.key(), index: first + self.asked as u32 };
                    self.keys.push(WireKey::new(id, version));
                    self.places.push(self.asked * PAGE_SIZE);
                }
                self.asked += 1;
            }
            let lender = self.asking;
            if self.asked == self.sources.len() {
                (self.asked, self.asking) = (0, self.asking + 1);
            }
            if !self.keys.is_empty() {
                return Some(Question { lender, keys: &self.keys, places: &self.places });
            }
        }
        None
    }

    /// The answer to the last question is in `buf`, or there is none. What is no good will be read from below; where the lender had
    /// no chance to answer (`asked` is false), nothing is known of its pages.
    pub fn answered(&mut self, core: &Core, got: Option<&[Got]>, asked: bool, buf: &[u8]) {
        let exclusive = core.is_exclusive();
        for (at, (key, place)) in self.keys.iter().zip(&self.places).enumerate() {
            let (id, version) = (key.id(), key.version());
            let good = match got.and_then(|got| got.get(at)) {
                None => false,
                Some(Got::Miss) => {
                    core.metrics.get_misses.one();
                    false
                }
                Some(Got::Page { checksum }) => {
                    let bytes = buf[*place..].first_chunk::<PAGE_SIZE>();
                    let verifies = bytes.is_some_and(|page| core.key().checksum(id, version, page) == *checksum);
                    let good = verifies || !keeps(Rule::Checksum);
                    if !good {
                        core.metrics.bad_pages.one();
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
    }

    /// The next run of pages that are nowhere else, as bytes of the READ's buffer: to be read from below, with zeros behind the end
    /// of the file. None: there are no more.
    pub fn next_below(&mut self) -> Option<Range<usize>> {
        let below = |source: &Source| *source == Source::Below;
        let first = self.filled + self.sources[self.filled..].iter().position(below)?;
        let end = first + self.sources[first..].iter().take_while(|source| below(source)).count();
        self.filled = end;
        Some(first * PAGE_SIZE..end * PAGE_SIZE)
    }

    /// All is filled, and then the file was looked at. Returns how many bytes the answer has: the size decides where it ends, so that
    /// nothing a page holds behind it is ever shown.
    pub fn length(&self, core: &Core, file: &File, now: Stamp) -> usize {
        self.compare(core, file, now);
        if !keeps(Rule::Size) {
            return self.len;
        }
        now.size_bytes.saturating_sub(self.offset).min(self.len as u64) as usize
    }

    /// If the file is not what we left, it was changed beside us, and [`Reading::end`] will say that it must be read again.
    fn compare(&self, core: &Core, file: &File, now: Stamp) {
        let ticket = self.ticket();
        if ticket.stamp.is_some_and(|stamp| stamp != now) {
            core.observe(file, ticket.moment(), now);
        }
    }

    /// The READ, the kernel's `request`, is about to be answered with `bytes`. False: it must be done again. With `fill`, what came
    /// from the disk is put at once, because no eviction will be seen.
    pub fn end(&mut self, core: &Core, file: &File, state: &mut FileState, request: u64, bytes: &[u8]) -> bool {
        let ticket = *self.ticket();
        for (index, version) in self.gone.drain(..) {
            state.gone(index, version, Some(&ticket));
        }
        let void = |index: u32, entry: Entry| core.catalog.void(file.key(), index, entry);
        if !state.end_read(&ticket, request, void) {
            core.metrics.reads_repeated.one();
            return false;
        }
        core.metrics.read_pages.add(bytes.len().div_ceil(PAGE_SIZE) as u64);
        if !core.sees_evictions() {
            self.fill_pool(core, file, state, bytes);
        }
        true
    }

    fn fill_pool(&self, core: &Core, file: &File, state: &mut FileState, bytes: &[u8]) {
        let range = Reading::range(self.offset, bytes.len());
        if range.first * PAGE_SIZE as u64 != self.offset || core.next_place().is_none() {
            return;
        }
        let (whole, tail) = bytes.as_chunks::<PAGE_SIZE>();
        let mut last: Page = [0; PAGE_SIZE];
        last[..tail.len()].copy_from_slice(tail);
        let pages = whole.iter().chain((!tail.is_empty()).then_some(&last));
        for ((index, source), page) in (range.first..range.end).zip(&self.sources).zip(pages) {
            if *source == Source::Below
                && let Ok(index) = u32::try_from(index)
            {
                core.offer(file, state, index, u64::MAX, page);
            }
        }
    }
}
