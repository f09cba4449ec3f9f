//! READs that are answered by one request to a lender.
//!
//! Most of what a page from a lender costs is the way there and back: system calls, and threads
//! that are woken. So READs are asked for together if one lender has all pages of each. Their
//! buffers lie one behind the other in one buffer. The responses belong to their pages in the order
//! in which they were asked for, and may end in the middle of a READ.
//!
//! The batch does no input and output. What must never happen: a response that counts for another
//! READ than the one whose pages were asked for.

use crate::catalog::File;
use crate::catalog::file::FileState;
use crate::core::Core;
use crate::read::state::{Event, PageResult, RacedRead, ReadState, Step};
use page::PAGE_SIZE;
use std::ops::Range;
use sync::MutexGuard;
use wire::{ITEMS_MAX, WireKey};

/// READs of a batch at the most.
pub const BATCH_READS_MAX: usize = 32;

/// Pages of a batch at the most.
const BATCH_PAGES_MAX: usize = 256;
const _: () = assert!(BATCH_PAGES_MAX <= ITEMS_MAX);

/// The lender's response, or why there is none, to the next pages that were asked for.
#[derive(Debug)]
pub enum Response<'a> {
    /// What became of each page. Their bytes are in the buffer.
    Answered(&'a [PageResult]),
    /// The request could not be sent.
    NotAsked,
    /// No response comes to the rest.
    Failed,
    /// The response to the rest is late. The backing file may have been read for the first READ
    /// that was not answered, in the place of the lender.
    Late(Option<RacedRead>),
}

impl<'a> From<Response<'a>> for Event<'a, '_> {
    fn from(response: Response<'a>) -> Self {
        match response {
            Response::Answered(got) => Event::Answered(got),
            Response::NotAsked => Event::NotAsked,
            Response::Failed => Event::Failed,
            Response::Late(raced) => Event::Late(raced),
        }
    }
}

/// READs that are under way together. To be used again, so that nothing is allocated while READs
/// are answered.
#[derive(Default)]
pub struct ReadBatch {
    /// Those of the batch; behind them, the one that joined last and is not of it.
    readings: Vec<ReadState>,
    /// Where the bytes of each begin in the buffer, and the end of the last one.
    places: Vec<Range<usize>>,
    lender: Option<u8>,
    keys: Vec<WireKey>,
    /// Where in the buffer the page of each key goes.
    key_places: Vec<usize>,
    /// READs and pages that were asked for.
    asked: usize,
    asked_pages: usize,
    /// READs all of whose pages were answered, and all pages that were.
    answered: usize,
    answered_pages: usize,
}

impl ReadBatch {
    /// An empty batch. What was under way in the one before must have ended.
    pub fn clear(&mut self) {
        let readings = std::mem::take(&mut self.readings);
        let (mut places, mut keys) = (std::mem::take(&mut self.places), std::mem::take(&mut self.keys));
        let mut key_places = std::mem::take(&mut self.key_places);
        places.clear();
        keys.clear();
        key_places.clear();
        *self = ReadBatch { readings, places, keys, key_places, ..ReadBatch::default() };
    }

    /// READs of the batch.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether it has no READs.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The lender that has the pages of all of them.
    pub fn lender(&self) -> Option<u8> {
        self.lender
    }

    /// A READ, the kernel's `request` of `len` bytes at `offset`, begins with its file locked.
    /// True: it is one of the batch, and its pages are among those that are asked for next. False:
    /// one lender does not have all of it, or another one, or the buffer of `buf_bytes` has no
    /// room, or it has to wait for a change. Then [`ReadBatch::reading`] of the number behind the
    /// last one of the batch goes on with [`Event::Go`], and no READ may join until that has ended.
    pub fn join<'f>(
        &mut self,
        core: &Core,
        file: &'f File,
        (request, offset, len): (u64, u64, usize),
        state: MutexGuard<'f, FileState>,
        positions: (u64, u64),
        buf_bytes: usize,
    ) -> bool {
        let nth = self.len();
        if self.readings.len() == nth {
            self.readings.push(ReadState::default());
        }
        let reading = &mut self.readings[nth];
        reading.start(request, offset, len);
        let begin = Event::Begin { state, positions, waits: true };
        if !matches!(reading.step(core, file, begin, &mut []), Step::Fill) {
            return false;
        }
        let start = self.places.last().map_or(0, |place| place.end);
        let is_room = nth < BATCH_READS_MAX && start + len <= buf_bytes.min(BATCH_PAGES_MAX * PAGE_SIZE);
        let Some(lender) =
            reading.lender_of_all().filter(|of| is_room && self.lender.is_none_or(|lender| lender == *of))
        else {
            return false;
        };
        // There is nothing to fill in where a lender has all.
        if !matches!(reading.step(core, file, Event::Fill, &mut []), Step::Ask(_)) {
            return false;
        }
        self.keys.extend(reading.request());
        self.key_places.extend(reading.unanswered().iter().map(|place| start + place));
        self.lender = Some(lender);
        self.places.push(start..start + len);
        true
    }

    /// The pages of the READs that have joined since the last [`ReadBatch::asked`].
    pub fn request(&self) -> &[WireKey] {
        &self.keys[self.asked_pages..]
    }

    /// [`ReadBatch::request`] was sent. `file` is that of each READ.
    pub fn asked<'f>(&mut self, core: &Core, file: impl Fn(usize) -> &'f File) {
        for nth in self.asked..self.places.len() {
            self.readings[nth].step(core, file(nth), Event::Asked, &mut []);
        }
        (self.asked, self.asked_pages) = (self.places.len(), self.keys.len());
    }

    /// The first READ that waits for a response; if none does, the number of READs.
    pub fn first_unanswered(&self) -> usize {
        self.answered
    }

    /// Where in the buffer the pages go that were not answered yet.
    pub fn unanswered(&self) -> &[usize] {
        &self.key_places[self.answered_pages..]
    }

    /// Pages that were answered.
    pub fn answered_pages(&self) -> usize {
        self.answered_pages
    }

    /// The response to the next pages. Returns how many pages do not verify. `buf` is that of all
    /// READs.
    pub fn answered<'f>(
        &mut self,
        core: &Core,
        file: impl Fn(usize) -> &'f File,
        response: Response<'_>,
        buf: &mut [u8],
    ) -> u64 {
        let (mut response, mut bad_pages) = (response, 0);
        while self.answered < self.asked {
            let reading = &mut self.readings[self.answered];
            let left = reading.unanswered().len();
            let event = match &mut response {
                Response::Answered([]) => break,
                Response::Answered(got) => Event::Answered(got.split_off(..left.min(got.len())).unwrap_or_default()),
                Response::NotAsked => Event::NotAsked,
                Response::Failed => Event::Failed,
                Response::Late(raced) => Event::Late(raced.take()),
            };
            let place = self.places[self.answered].clone();
            reading.step(core, file(self.answered), event, &mut buf[place]);
            bad_pages += reading.take_bad_pages();
            let still_left = reading.unanswered().len();
            self.answered_pages += left - still_left;
            if still_left > 0 {
                break;
            }
            self.answered += 1;
        }
        bad_pages
    }

    /// A READ of the batch, or the one behind it ([`ReadBatch::join`]).
    pub fn reading(&mut self, nth: usize) -> &mut ReadState {
        &mut self.readings[nth]
    }

    /// Where the bytes of a READ of the batch are in the buffer.
    pub fn place(&self, nth: usize) -> Range<usize> {
        self.places[nth].clone()
    }

    /// Whether the lender had all pages of that READ.
    pub fn is_filled(&self, nth: usize) -> bool {
        self.readings[nth].is_filled()
    }
}
