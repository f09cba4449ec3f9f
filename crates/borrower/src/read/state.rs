//! The state machine of one READ out of the kernel's page cache, from its arrival to its answer.
//!
//! [`ReadState::step`] takes an [`Event`] and returns the next [`Step`] for the driver. The state
//! machine does no I/O, and between two steps anything may happen. Production drives it with
//! sockets and files (`drive.rs`, `serve.rs`), the simulation with its models, and the tests of
//! interleavings with threads under shuttle. All of them drive this code.
//!
//! ```text
//!  Begin ──▶ Fill ──▶ ReadBacking (all of it) ──▶ Look, if the file ended early ──┐
//!   ▲ │        │                                                                  │
//!   │ └▶ Wait  └▶ Ask ──▶ Receive (for each response) ──▶ Ask (the next lender)   │
//!   │            └──▶ ReadBacking (for each run) ──▶ Look ──▶ End ◀───────────────┘
//!   │                                                          │
//!   └───────────── a change came in between ◀──────────────────┴──▶ Done
//! ```
//!
//! The invariant: the answer has no bytes that were not filled in or not verified.

use crate::backing::{Stamp, Writers};
use crate::catalog::File;
use crate::catalog::entry::Entry;
use crate::catalog::file::{FileState, ReadTicket, Source, next_run};
use crate::catalog::rules::{Rule, keeps};
use crate::core::Core;
use crate::policy::stream_room::Origin;
use crate::put::demoted::Demoted;
use locks::MutexGuard;
use page::{PAGE_SIZE, Page, PageId, PageRange, Version};
use std::ops::Range;
use std::time::Duration;
use wire::{ITEMS_MAX, WireKey};

/// How often a READ is repeated because its pages changed meanwhile. After that, the driver blocks
/// changes while it reads the backing file.
pub const ATTEMPTS_MAX: u32 = 4;

/// The result for one page of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageResult {
    /// The lender does not have it.
    Miss,
    /// The page's bytes are in place, as the lender returned them. They are neither decrypted nor
    /// verified yet.
    Page {
        /// The checksum, for [`page::seal::Sealing::open`].
        checksum: u64,
    },
}

/// Bytes that the backing file returned sooner than the lender, as a part of a READ's buffer.
#[derive(Debug)]
pub struct RacedRead {
    /// The range of the READ's bytes that were requested.
    pub span: Range<usize>,
    /// The bytes; fewer than requested only at the end of the file.
    pub read: Vec<u8>,
}

impl RacedRead {
    /// Returns the part of `bytes` that was read; if there is none, an empty range at one of its
    /// ends.
    fn within(&self, bytes: &Range<usize>) -> Range<usize> {
        let start = self.span.start.clamp(bytes.start, bytes.end);
        start..self.span.end.clamp(start, bytes.end)
    }

    /// Copies `bytes` of the READ, all of which were requested, to `piece`. Returns their number,
    /// which is smaller only at the end of the file, and 0 if the file ends before them.
    fn copy(&self, bytes: &Range<usize>, piece: &mut [u8]) -> usize {
        let end = self.read.len().min(bytes.end - self.span.start);
        let read = self.read.get(bytes.start - self.span.start..end).unwrap_or_default();
        piece[..read.len()].copy_from_slice(read);
        read.len()
    }
}

/// The lender's response to the next requested pages, or the reason why there is none.
#[derive(Debug)]
pub enum Response<'a> {
    /// The results for the next pages. Their bytes are in the buffer.
    Answered(&'a [PageResult]),
    /// The request could not be sent, so this tells nothing about the lender's pages.
    NotAsked,
    /// The rest of the request will get no response. Whether the lender has the pages is not known.
    Failed,
    /// The response to the rest of the request is late, and the driver does not wait for it. The
    /// lender still has the pages, unless it gives away what it answers. The backing file may have
    /// been read instead meanwhile.
    Late(Option<RacedRead>),
}

/// The event since the last [`Step`]. An event that does not fit that step changes nothing: the
/// same step is returned again.
pub enum Event<'a, 'f> {
    /// No event. The driver only asks for the step.
    Go,
    /// The driver has locked the file.
    Begin {
        /// The file's state.
        state: MutexGuard<'f, FileState>,
        /// The number of events that the tap has produced and consumed, read with the lock held.
        positions: (u64, u64),
        /// Whether the READ waits for changes of its pages. False: it has waited long enough.
        waits: bool,
    },
    /// The driver now has a buffer for the READ, and keeps the bytes that the READ writes there.
    Fill,
    /// The request was sent.
    Asked,
    /// The lender has responded, or will not.
    Responded(Response<'a>),
    /// This number of bytes was read from the backing file.
    Read(usize),
    /// This number of bytes was read from the backing file while this lock was held.
    ReadLocked(MutexGuard<'f, FileState>, usize),
    /// The backing file, or its stamp, cannot be read.
    BackingFailed,
    /// The backing file has this stamp now.
    Looked(Stamp),
    /// The READ may be answered.
    End,
}

/// The next step for the driver of a READ, with the events that may follow.
pub enum Step<'f> {
    /// Lock the file, and read the positions of the tap: [`Event::Begin`].
    Begin,
    /// Changes of the READ's pages are in progress. Wait for `File::settled` with this lock, then
    /// [`Event::Begin`].
    Wait(MutexGuard<'f, FileState>),
    /// The READ has begun. It needs its buffer: [`Event::Fill`].
    Fill,
    /// Send [`ReadState::request`] to this lender: [`Event::Asked`], or [`Event::Responded`] with
    /// [`Response::NotAsked`].
    Ask(u8),
    /// Receive the bytes for [`ReadState::unanswered`]: [`Event::Responded`].
    Receive,
    /// Read these bytes of the buffer from the backing file: [`Event::Read`],
    /// [`Event::BackingFailed`].
    ReadBacking(Range<usize>),
    /// Read all of the buffer from the backing file, and hold this lock, which keeps changes out:
    /// [`Event::ReadLocked`]. If that fails, unlock: [`Event::BackingFailed`].
    ReadBackingLocked(MutexGuard<'f, FileState>),
    /// Take the stamp of the backing file: [`Event::Looked`], [`Event::BackingFailed`].
    Look,
    /// The buffer is complete: [`Event::End`].
    End,
    /// Answer the READ with this number of bytes of the buffer.
    Done(usize),
    /// Answer the READ with the error of the backing file.
    Failed,
}

/// The progress of a READ.
#[derive(Clone, Debug, Default)]
enum Stage {
    #[default]
    Begin,
    /// The backing file is read while the file is locked.
    Locked,
    Fill,
    Ask(u8),
    Receive,
    /// All of it is read from the backing file.
    Plain,
    /// A part of it is read from the backing file.
    Read(Range<usize>),
    /// The backing file ended after this number of bytes of a plain READ.
    LookShort(usize),
    Look,
    End(usize),
    Done(usize),
    Failed,
}

/// A READ in progress. The structure is reused, so answering a READ allocates nothing.
#[derive(Default)]
pub struct ReadState {
    stage: Stage,
    attempt: u32,
    request: u64,
    offset: u64,
    len: usize,
    ticket: Option<ReadTicket>,
    sources: Vec<Source>,
    /// The pages of the last request, and the number of them that were answered.
    keys: Vec<WireKey>,
    places: Vec<usize>,
    answered: usize,
    /// The number of pages that did not verify since the last [`ReadState::take_bad_pages`].
    bad_pages: u64,
    /// The lenders that still have to be asked, as bits.
    lenders_to_ask: u64,
    asked: usize,
    /// The rest, in bytes, of the run that is being read from the backing file.
    run: Range<usize>,
    filled: usize,
    raced: Option<RacedRead>,
    /// Pages that the lender no longer has.
    gone: Vec<(u32, Version)>,
    /// Whether the miss of its pages must still be recorded.
    is_new: bool,
}

impl ReadState {
    /// Begins another READ: `len` bytes at `offset`, the kernel's `request`. The previous READ of
    /// this structure must have ended.
    pub fn start(&mut self, request: u64, offset: u64, len: usize) {
        (self.stage, self.attempt) = (Stage::Begin, 0);
        (self.request, self.offset, self.len) = (request, offset, len);
    }

    /// Handles an event, and returns the next step. `buf` is the READ's buffer, of the READ's
    /// length; before [`Event::Fill`] it may be empty.
    pub fn step<'f>(&mut self, core: &Core, file: &'f File, event: Event<'_, 'f>, buf: &mut [u8]) -> Step<'f> {
        match (event, &self.stage) {
            (Event::Begin { mut state, positions, waits }, Stage::Begin) => {
                // If it were answered while a change is being applied, older bytes could stay in
                // the kernel's page cache after the change.
                if waits && state.must_wait(self.range()) {
                    return Step::Wait(state);
                }
                self.begin(core, file, &mut state, positions);
                if self.attempt == ATTEMPTS_MAX {
                    self.stage = Stage::Locked;
                    return Step::ReadBackingLocked(state);
                }
                self.stage = Stage::Fill;
            }
            (Event::ReadLocked(mut state, read), Stage::Locked) => {
                // The lock that the driver holds blocks changes in between.
                self.end(core, file, &mut state, &[]);
                self.stage = Stage::Done(read);
            }
            (Event::Fill, Stage::Fill) if self.is_plain() => {
                self.note_missed(core, file);
                self.stage = Stage::Plain;
            }
            (Event::Fill, Stage::Fill) => {
                self.fill_from_buffers(core, file, buf);
                self.go_on(core, file, buf);
            }
            (Event::Asked, Stage::Ask(_)) => {
                self.note_missed(core, file);
                self.stage = Stage::Receive;
            }
            (Event::Responded(Response::NotAsked), Stage::Ask(_)) => self.answered(core, file, None, false, buf),
            (Event::Responded(response), Stage::Receive) => match response {
                Response::Answered(got) => self.answered(core, file, Some(got), true, buf),
                Response::NotAsked => self.answered(core, file, None, false, buf),
                Response::Failed => self.answered(core, file, None, true, buf),
                Response::Late(raced) => {
                    self.late(core);
                    self.raced = raced.or(self.raced.take());
                    self.go_on(core, file, buf);
                }
            },
            (Event::Read(read), Stage::Plain) => {
                core.metrics.backing_pages.add(read.div_ceil(PAGE_SIZE) as u64);
                self.stage = if read < self.len { Stage::LookShort(read) } else { Stage::End(read) };
            }
            (Event::Read(read), Stage::Read(part)) => {
                self.run.start = part.end;
                buf[part.clone()][read..].fill(0);
                core.metrics.backing_pages.add(read.div_ceil(PAGE_SIZE) as u64);
                self.go_on(core, file, buf);
            }
            (Event::Looked(now), Stage::LookShort(read)) => {
                // If the end has moved, an external change has moved it.
                self.stage = Stage::End(*read);
                self.compare(core, file, now);
            }
            (Event::Looked(now), Stage::Look) => {
                self.compare(core, file, now);
                self.stage = Stage::End(self.end_of(now));
            }
            (Event::End, Stage::End(len)) => {
                let len = *len;
                if self.end(core, file, &mut file.lock(), &buf[..len]) {
                    self.stage = Stage::Done(len);
                } else {
                    self.attempt += 1;
                    self.stage = Stage::Begin;
                }
            }
            (
                Event::BackingFailed,
                Stage::Locked | Stage::Plain | Stage::Read(_) | Stage::LookShort(_) | Stage::Look,
            ) => {
                self.fail(core, &mut file.lock());
                self.stage = Stage::Failed;
            }
            _ => {}
        }
        match &self.stage {
            Stage::Begin => Step::Begin,
            Stage::Fill => Step::Fill,
            Stage::Ask(lender) => Step::Ask(*lender),
            Stage::Receive => Step::Receive,
            Stage::Plain => Step::ReadBacking(0..self.len),
            Stage::Read(part) => Step::ReadBacking(part.clone()),
            Stage::LookShort(_) | Stage::Look => Step::Look,
            Stage::End(_) => Step::End,
            Stage::Done(len) => Step::Done(*len),
            Stage::Locked | Stage::Failed => Step::Failed,
        }
    }

    /// Continues as far as possible without the driver: until the next request, or until only the
    /// backing file has the next bytes.
    fn go_on(&mut self, core: &Core, file: &File, buf: &mut [u8]) {
        if let Some(lender) = self.next_request(file) {
            self.stage = Stage::Ask(lender);
            return;
        }
        self.note_missed(core, file);
        self.stage = loop {
            if self.run.is_empty() {
                match self.next_below() {
                    Some(run) => self.run = run,
                    None => break Stage::Look,
                }
            }
            // Raced bytes are as good as bytes that would be read now: the READ is repeated if
            // anything has changed since it began.
            let Some(raced) = &self.raced else { break Stage::Read(self.run.clone()) };
            let known = raced.within(&self.run);
            if known.is_empty() {
                break Stage::Read(self.run.clone());
            }
            if known.start > self.run.start {
                break Stage::Read(self.run.start..known.start);
            }
            let piece = &mut buf[known.clone()];
            let read = raced.copy(&known, piece);
            piece[read..].fill(0);
            core.metrics.backing_pages.add(read.div_ceil(PAGE_SIZE) as u64);
            self.run.start = known.end;
        };
    }

    /// Begins, or begins again. No change of its pages may be in progress, unless changes are
    /// blocked until the READ has ended.
    fn begin(&mut self, core: &Core, file: &File, state: &mut FileState, (produced, consumed): (u64, u64)) {
        let range = self.range();
        core.catalog.touch(file);
        let standing = |place| core.catalog.standing(place);
        let has_room = core.catalog.has_room();
        let filter = core.filter();
        self.ticket = Some(state.begin_read(range, produced, consumed, standing, has_room, filter, &mut self.sources));
        core.catalog.account(state);
        self.lenders_to_ask = 0;
        for (source, index) in self.sources.iter_mut().zip(range.first..) {
            if let Source::Demoted(hash) = *source
                && !core.demoted().is_some_and(|demoted| demoted.has(id_of(file, index), hash))
            {
                *source = Source::Backing;
            }
            if let Source::Lender(place, _) | Source::Busy(place, _) = source {
                self.lenders_to_ask |= 1 << place.lender;
            }
        }
        (self.asked, self.filled, self.run) = (0, 0, 0..0);
        (self.raced, self.is_new) = (None, true);
        self.gone.clear();
    }

    /// Records, once after the READ has begun, that the kernel's page cache has missed its pages.
    /// Meanwhile the lender works on the request.
    fn note_missed(&mut self, core: &Core, file: &File) {
        if !std::mem::take(&mut self.is_new) {
            return;
        }
        let (range, is_sequential) = (self.range(), self.is_sequential());
        core.curve.missed(file.key(), range);
        let looked = core.stream_room.missed(file.key(), range, is_sequential, || core.room_pages());
        if is_sequential && looked.sampled_pages > 0 {
            file.state.lock().looked_at(range.end - range.first, looked);
        }
    }

    /// Returns the pages of the READ.
    pub fn range(&self) -> PageRange {
        PageRange::touched_by(self.offset, self.offset.saturating_add(self.len as u64))
    }

    fn ticket(&self) -> &ReadTicket {
        // `begin` comes first: every driver calls it before anything else.
        self.ticket.as_ref().unwrap_or_else(|| unreachable!("a READ begins before it goes on"))
    }

    /// Returns whether all of it must be read from the backing file, in one piece.
    fn is_plain(&self) -> bool {
        let whole_pages = self.offset.is_multiple_of(PAGE_SIZE as u64) && self.len.is_multiple_of(PAGE_SIZE);
        !whole_pages || self.sources.iter().all(|source| *source == Source::Backing)
    }

    /// Returns the lender that has all pages, if there is one and the READ is not part of a stream.
    /// Then the READ can be requested together with others.
    pub(crate) fn lender_of_all(&self) -> Option<u8> {
        let lender = self.lenders_to_ask.trailing_zeros() as u8;
        let is_there = |source: &Source| matches!(source, Source::Lender(place, _) if place.lender == lender);
        let is_all_there = self.len == self.sources.len() * PAGE_SIZE && self.sources.iter().all(is_there);
        (self.lenders_to_ask != 0 && is_all_there && !self.is_sequential()).then_some(lender)
    }

    /// Returns whether lenders returned all pages that were requested.
    pub fn is_filled(&self) -> bool {
        !self.sources.contains(&Source::Backing)
    }

    /// Fills in pages that are known to be zeros, and pages that are still in a put buffer.
    fn fill_from_buffers(&mut self, core: &Core, file: &File, buf: &mut [u8]) {
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
                    // The lender has answered the put meanwhile, so it has the page. Not so if the
                    // entry is invalid, as it is when the lender is lost.
                    let is_there =
                        !is_lost && file.state.lock().names(id_of(file, index).index, |known| known == version);
                    *source = if is_there { Source::Lender(place, version) } else { Source::Backing };
                }
                Source::Demoted(hash) => {
                    match core.demoted().and_then(|demoted| demoted.take(id_of(file, index), hash)) {
                        Some(bytes) => {
                            page.copy_from_slice(&*bytes);
                            core.metrics.demoted_pages.one();
                        }
                        None => *source = Source::Backing, // its time limit is over
                    }
                }
                Source::Backing | Source::Lender(..) => {}
            }
        }
    }

    /// Makes the next request, for at most [`ITEMS_MAX`] pages of one lender, and returns that
    /// lender. Returns None if all pages were requested.
    fn next_request(&mut self, file: &File) -> Option<u8> {
        self.keys.clear();
        self.places.clear();
        self.answered = 0;
        let first = (self.offset / PAGE_SIZE as u64) as u32;
        while self.lenders_to_ask != 0 {
            let lender = self.lenders_to_ask.trailing_zeros() as u8;
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
                (self.asked, self.lenders_to_ask) = (0, self.lenders_to_ask & (self.lenders_to_ask - 1));
            }
            if !self.keys.is_empty() {
                return Some(lender);
            }
        }
        None
    }

    /// Returns the pages that the last [`Step::Ask`] requests.
    pub fn request(&self) -> &[WireKey] {
        &self.keys
    }

    /// Returns the places in the READ's buffer, in bytes, of the pages of the last request that
    /// were not answered yet.
    pub fn unanswered(&self) -> &[usize] {
        &self.places[self.answered..]
    }

    /// Returns the number of pages from lenders that do not verify, since the last call.
    pub(crate) fn take_bad_pages(&mut self) -> u64 {
        std::mem::take(&mut self.bad_pages)
    }

    /// Handles a response to the next pages of the last request, as many as `got` has. Their bytes
    /// are in `buf`, and are decrypted there. `got` is None if the rest gets no response. Bad and
    /// missing pages will be read from the backing file. If the lender could not answer (`asked` is
    /// false), nothing is known of its pages.
    fn answered(&mut self, core: &Core, file: &File, got: Option<&[PageResult]>, asked: bool, buf: &mut [u8]) {
        let exclusive = core.is_exclusive();
        let mut bad_pages = 0;
        let first = self.answered;
        self.answered = got.map_or(self.keys.len(), |got| self.keys.len().min(first + got.len()));
        let pages = self.keys[first..self.answered].iter().zip(&self.places[first..]);
        for (at, (key, place)) in pages.enumerate() {
            let (id, version) = (key.id(), key.version());
            let good = match got.and_then(|got| got.get(at)) {
                None => false,
                Some(PageResult::Miss) => {
                    core.metrics.get_misses.one();
                    false
                }
                Some(PageResult::Page { checksum }) => {
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
                self.sources[place / PAGE_SIZE] = Source::Backing;
            }
            if asked && (exclusive || !good) {
                self.gone.push((id.index, version));
            }
        }
        core.metrics.bad_pages.add(bad_pages);
        self.bad_pages += bad_pages;
        if self.unanswered().is_empty() {
            self.go_on(core, file, buf);
        }
    }

    /// Late pages will be read from the backing file. The lender still has the pages, unless it
    /// gives away what it answers.
    fn late(&mut self, core: &Core) {
        let first = std::mem::replace(&mut self.answered, self.keys.len());
        for (key, place) in self.keys[first..].iter().zip(&self.places[first..]) {
            self.sources[place / PAGE_SIZE] = Source::Backing;
            if core.is_exclusive() {
                self.gone.push((key.id().index, key.version()));
            }
        }
    }

    /// Returns whether the READ continues a sequential stream.
    pub fn is_sequential(&self) -> bool {
        self.ticket().sequential
    }

    /// Returns the next run of pages to be read from the backing file, in bytes of the READ's
    /// buffer: pages without another source, and short gaps between them. Bytes behind the end of
    /// the file become zeros. Returns None if there are no more.
    fn next_below(&mut self) -> Option<Range<usize>> {
        let run = next_run(&self.sources, self.filled)?;
        self.filled = run.end;
        self.sources[run.clone()].fill(Source::Backing);
        Some(run.start * PAGE_SIZE..run.end * PAGE_SIZE)
    }

    /// The buffer is full, and then the stamp was taken. Returns the number of bytes of the answer.
    /// The file's size limits it, so bytes of a page behind the end are never returned.
    fn end_of(&self, now: Stamp) -> usize {
        if !keeps(Rule::Size) {
            return self.len;
        }
        now.size_bytes.saturating_sub(self.offset).min(self.len as u64) as usize
    }

    /// If the stamp is not the recorded one, the file was changed externally, and the READ is
    /// repeated.
    fn compare(&self, core: &Core, file: &File, now: Stamp) {
        let ticket = self.ticket();
        if ticket.stamp.is_some_and(|stamp| stamp != now) {
            core.observe(file, ticket.moment(), now, Writers::Unasked);
        }
    }

    /// The READ is about to be answered with `bytes`. Returns false if it must be repeated. If
    /// evictions are not seen, pages from the disk are put at once.
    fn end(&mut self, core: &Core, file: &File, state: &mut FileState, bytes: &[u8]) -> bool {
        let ticket = *self.ticket();
        for (index, version) in self.gone.drain(..) {
            state.gone(index, version, Some(&ticket));
        }
        let invalidated = |index: u32, entry: Entry| core.catalog.invalidated(file.key(), index, entry);
        let is_good = state.end_read(&ticket, self.request, invalidated);
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
            self.record_hashes(core, demoted, file, state, bytes);
        } else if !core.sees_evictions() {
            self.fill_pool(core, file, state, bytes);
        }
        true
    }

    /// The READ is answered with an error: the backing file cannot be read. The kernel caches no
    /// page of it.
    fn fail(&mut self, core: &Core, state: &mut FileState) {
        for (index, version) in self.gone.drain(..) {
            state.gone(index, version, None);
        }
        state.fail_read();
        core.catalog.account(state);
    }

    /// A READ of a stream is answered at the time `now`, counted from the borrower's start, and has
    /// taken `took`. Records the speed of its stream.
    pub(crate) fn note_answered(&self, core: &Core, now: Duration, took: Duration) {
        let indexes = self.offset / PAGE_SIZE as u64..;
        let is_lent = |source: &Source| matches!(source, Source::Lender(..));
        let is_left = |(source, index): (&Source, u64)| *source == Source::Backing && self.ticket().is_left(index);
        let from = if self.sources.iter().all(is_lent) {
            Some(Origin::Lenders)
        } else {
            self.sources.iter().zip(indexes).all(is_left).then_some(Origin::Disk)
        };
        core.stream_room.went_on(self.sources.len(), from, now, took);
    }

    /// Marks pages that will not be sent at their next eviction: they need not be copied then.
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

    /// Records the hashes of the backing file's pages.
    fn record_hashes(&self, core: &Core, demoted: &Demoted, file: &File, state: &mut FileState, bytes: &[u8]) {
        let first = self.offset / PAGE_SIZE as u64;
        if first * PAGE_SIZE as u64 != self.offset || !core.catalog.has_room() {
            return;
        }
        let (pages, _) = bytes.as_chunks::<PAGE_SIZE>();
        for ((index, source), page) in (first..).zip(&self.sources).zip(pages) {
            let Ok(narrow) = u32::try_from(index) else { break };
            match *source {
                Source::Backing => state.record_hash(narrow, demoted.hash(id_of(file, index), page), false),
                Source::Demoted(hash) => state.record_hash(narrow, hash, true),
                Source::Zero | Source::Busy(..) | Source::Lender(..) => {}
            }
        }
        core.catalog.account(state);
    }

    fn fill_pool(&self, core: &Core, file: &File, state: &mut FileState, bytes: &[u8]) {
        let range = PageRange::touched_by(self.offset, self.offset.saturating_add(bytes.len() as u64));
        if range.first * PAGE_SIZE as u64 != self.offset || core.usable() == 0 {
            return;
        }
        let (whole, tail) = bytes.as_chunks::<PAGE_SIZE>();
        let mut last: Page = [0; PAGE_SIZE];
        last[..tail.len()].copy_from_slice(tail);
        let pages = whole.iter().chain((!tail.is_empty()).then_some(&last));
        for ((index, source), page) in (range.first..range.end).zip(&self.sources).zip(pages) {
            if *source == Source::Backing
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

/// Returns the page's identity. Pages that are lent, or that guests evict, have 32-bit indices.
fn id_of(file: &File, index: u64) -> PageId {
    PageId { file: file.key(), index: index as u32 }
}

#[cfg(test)]
mod tests;
