//! READs that are answered by one request to a lender.
//!
//! Most of the cost of a page from a lender is the round trip: system calls, and waking threads. So
//! READs are requested together if one lender has all pages of each. Their buffers lie one behind
//! the other in one buffer. The responses belong to their pages in the order of the requests, and
//! may end in the middle of a READ.
//!
//! Pure logic: no I/O. The invariant: a response counts only for the READ whose pages were
//! requested.

use crate::catalog::File;
use crate::catalog::file::FileState;
use crate::core::Core;
use crate::read::state::{Event, ReadState, Response, Step};
use locks::MutexGuard;
use page::PAGE_SIZE;
use std::ops::Range;
use wire::{ITEMS_MAX, WireKey};

/// The maximum number of READs of a batch.
pub const BATCH_READS_MAX: usize = 32;

/// The maximum number of pages of a batch.
const BATCH_PAGES_MAX: usize = 256;
const _: () = assert!(BATCH_PAGES_MAX <= ITEMS_MAX);

/// READs in progress together. The structure is reused, so answering READs allocates nothing.
#[derive(Default)]
pub struct ReadBatch {
    /// The READs of the batch. Behind them is the one that last tried to join and could not.
    readings: Vec<ReadState>,
    /// The range of each READ in the buffer, in bytes.
    places: Vec<Range<usize>>,
    lender: Option<u8>,
    keys: Vec<WireKey>,
    /// The place in the buffer for the page of each key, in bytes.
    key_places: Vec<usize>,
    /// The numbers of READs and of pages that were requested.
    asked: usize,
    asked_pages: usize,
    /// The number of READs all of whose pages were answered, and the number of all answered pages.
    answered: usize,
    answered_pages: usize,
}

impl ReadBatch {
    /// Empties the batch. Its READs must have ended.
    pub fn clear(&mut self) {
        self.places.clear();
        self.keys.clear();
        self.key_places.clear();
        self.lender = None;
        (self.asked, self.asked_pages) = (0, 0);
        (self.answered, self.answered_pages) = (0, 0);
    }

    /// Returns the number of READs of the batch.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns whether the batch has no READs.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Returns the lender that has the pages of all READs.
    pub fn lender(&self) -> Option<u8> {
        self.lender
    }

    /// A READ, the kernel's `request` of `len` bytes at `offset`, begins while its file is locked.
    /// Returns true if the READ joins the batch: its pages are in the next request. Returns false
    /// if no lender has all of it, or another lender than the batch's. So it does if the buffer of
    /// `buf_bytes` has no room, or if the READ must wait for a change. Then the caller continues
    /// [`ReadBatch::reading`], with the number behind the last READ of the batch, with
    /// [`Event::Go`]. No READ may join until that has ended.
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
        // If a lender has all pages, there is nothing to fill in.
        if !matches!(reading.step(core, file, Event::Fill, &mut []), Step::Ask(_)) {
            return false;
        }
        self.keys.extend(reading.request());
        self.key_places.extend(reading.unanswered().iter().map(|place| start + place));
        self.lender = Some(lender);
        self.places.push(start..start + len);
        true
    }

    /// Returns the pages of the READs that have joined since the last [`ReadBatch::asked`].
    pub fn request(&self) -> &[WireKey] {
        &self.keys[self.asked_pages..]
    }

    /// [`ReadBatch::request`] was sent. `file` returns the file of each READ.
    pub fn asked<'f>(&mut self, core: &Core, file: impl Fn(usize) -> &'f File) {
        for nth in self.asked..self.places.len() {
            self.readings[nth].step(core, file(nth), Event::Asked, &mut []);
        }
        (self.asked, self.asked_pages) = (self.places.len(), self.keys.len());
    }

    /// Returns the number of the first READ that waits for a response; if none does, the number of
    /// READs.
    pub fn first_unanswered(&self) -> usize {
        self.answered
    }

    /// Returns the places in the buffer, in bytes, of the pages that were not answered yet.
    pub fn unanswered(&self) -> &[usize] {
        &self.key_places[self.answered_pages..]
    }

    /// Returns the number of answered pages.
    pub(crate) fn answered_pages(&self) -> usize {
        self.answered_pages
    }

    /// Handles the response to the next pages. `buf` is the buffer of all READs. Returns the number
    /// of pages that do not verify.
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
            let part = match &mut response {
                Response::Answered([]) => break,
                Response::Answered(got) => Response::Answered(got.split_off(..left.min(got.len())).unwrap_or_default()),
                Response::NotAsked => Response::NotAsked,
                Response::Failed => Response::Failed,
                Response::Late(raced) => Response::Late(raced.take()),
            };
            let place = self.places[self.answered].clone();
            reading.step(core, file(self.answered), Event::Responded(part), &mut buf[place]);
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

    /// Returns a READ of the batch, or the one behind it ([`ReadBatch::join`]).
    pub fn reading(&mut self, nth: usize) -> &mut ReadState {
        &mut self.readings[nth]
    }

    /// Returns the range of a READ of the batch in the buffer, in bytes.
    pub fn place(&self, nth: usize) -> Range<usize> {
        self.places[nth].clone()
    }

    /// Returns whether the lender had all pages of that READ.
    pub fn is_filled(&self, nth: usize) -> bool {
        self.readings[nth].is_filled()
    }
}
