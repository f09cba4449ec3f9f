//! The state machine of one READ out of the kernel's page cache, from its arrival to its answer.
//!
//! [`ReadState::step`] takes an [`Event`] and returns the next [`Step`]: what the driver has to do.
//! The state machine does no input and output, and between two steps anything may happen.
//! Production drives it with sockets and files (`drive.rs`, `serve.rs`), the simulation with its
//! models, and the tests of interleavings with threads under shuttle. All of them drive this code.
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
//! What must never happen: bytes of the answer that nobody has filled or verified.

use crate::backing::{Stamp, Writers};
use crate::catalog::File;
use crate::catalog::entry::Entry;
use crate::catalog::file::{FileState, ReadTicket, Source, next_run};
use crate::catalog::rules::{Rule, keeps};
use crate::core::Core;
use crate::policy::stream_room::Origin;
use crate::put::demoted::Demoted;
use page::{PAGE_SIZE, Page, PageId, PageRange, Version};
use std::ops::Range;
use std::time::Duration;
use sync::MutexGuard;
use wire::{ITEMS_MAX, WireKey};

/// How often a READ is done again because its pages changed meanwhile. After that, changes are kept
/// out while it is read from below.
pub const ATTEMPTS_MAX: u32 = 4;

/// What became of one page of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageResult {
    /// The lender does not have it.
    Miss,
    /// Its bytes are in place, as the lender returned them, and not yet opened; neither is what
    /// came with them verified.
    Page {
        /// For [`page::seal::Sealing::open`].
        checksum: u64,
    },
}

/// What the backing file was faster with than a lender, as bytes of a READ's buffer.
#[derive(Debug)]
pub struct RacedRead {
    /// Which bytes of the READ were asked for.
    pub span: Range<usize>,
    /// The bytes that were read; fewer than asked for only at the end of the file.
    pub read: Vec<u8>,
}

impl RacedRead {
    /// The part of `bytes` that was read; if none was, an empty range at one of its ends.
    fn within(&self, bytes: &Range<usize>) -> Range<usize> {
        let start = self.span.start.clamp(bytes.start, bytes.end);
        start..self.span.end.clamp(start, bytes.end)
    }

    /// Copies `bytes` of the READ, all of which were asked for, to `piece`. Returns how many there
    /// are, which are fewer at the end of the file only; none of them, if the file ends before.
    fn copy(&self, bytes: &Range<usize>, piece: &mut [u8]) -> usize {
        let end = self.read.len().min(bytes.end - self.span.start);
        let read = self.read.get(bytes.start - self.span.start..end).unwrap_or_default();
        piece[..read.len()].copy_from_slice(read);
        read.len()
    }
}

/// What has happened since the last [`Step`]. An event that does not belong to that step changes
/// nothing: the step is returned again.
pub enum Event<'a, 'f> {
    /// Nothing. The driver only wants to know the step.
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
    /// The driver has a buffer for the READ from now on, and keeps what the READ writes there.
    Fill,
    /// The request was sent.
    Asked,
    /// The request could not be sent: nothing is known of its pages.
    NotAsked,
    /// A response to the next pages of the request has come. Their bytes are in the buffer.
    Answered(&'a [PageResult]),
    /// No response comes to the rest of the request. What the lender has is not known.
    Failed,
    /// The response to the rest of the request is late, and is not waited for. The lender has the
    /// pages still, unless it gives away what it answers. The backing file may have been read
    /// meanwhile, in the place of the lender.
    Late(Option<RacedRead>),
    /// So many bytes were read from the backing file.
    Read(usize),
    /// So many bytes were read from the backing file with this lock held.
    ReadLocked(MutexGuard<'f, FileState>, usize),
    /// The backing file cannot be read, or not be looked at.
    BackingFailed,
    /// The backing file looks like this now.
    Looked(Stamp),
    /// The READ may be answered.
    End,
}

/// What the driver of a READ has to do next.
pub enum Step<'f> {
    /// Lock the file, and read the positions of the tap: [`Event::Begin`].
    Begin,
    /// Changes of the READ's pages are under way. Wait for [`File::settled`] with this lock, then
    /// [`Event::Begin`].
    Wait(MutexGuard<'f, FileState>),
    /// The READ has begun. It needs its buffer: [`Event::Fill`].
    Fill,
    /// Send [`ReadState::request`] to this lender: [`Event::Asked`], [`Event::NotAsked`].
    Ask(u8),
    /// Receive the bytes for [`ReadState::unanswered`]: [`Event::Answered`], [`Event::NotAsked`],
    /// [`Event::Failed`], [`Event::Late`].
    Receive,
    /// Read these bytes of the buffer from the backing file: [`Event::Read`],
    /// [`Event::BackingFailed`].
    ReadBacking(Range<usize>),
    /// Read all of the buffer from the backing file, and hold this lock, which keeps changes out:
    /// [`Event::ReadLocked`]. If that fails, unlock: [`Event::BackingFailed`].
    ReadBackingLocked(MutexGuard<'f, FileState>),
    /// Look at the backing file: [`Event::Looked`], [`Event::BackingFailed`].
    Look,
    /// All is there: [`Event::End`].
    End,
    /// Answer the READ with so many bytes of the buffer.
    Done(usize),
    /// Answer the READ with the error of the backing file.
    Failed,
}

/// How far a READ is.
#[derive(Clone, Debug, Default)]
enum Stage {
    #[default]
    Begin,
    /// The backing file is read with the file locked.
    Locked,
    Fill,
    Ask(u8),
    Receive,
    /// All of it is read from the backing file.
    Plain,
    /// A part of it is read from the backing file.
    Read(Range<usize>),
    /// The backing file ended after so many bytes of a plain READ.
    LookShort(usize),
    Look,
    End(usize),
    Done(usize),
    Failed,
}

/// A READ under way. To be used again, so that nothing is allocated while a READ is answered.
#[derive(Default)]
pub struct ReadState {
    stage: Stage,
    attempt: u32,
    request: u64,
    offset: u64,
    len: usize,
    ticket: Option<ReadTicket>,
    sources: Vec<Source>,
    /// The last request, and how many of its pages were answered.
    keys: Vec<WireKey>,
    places: Vec<usize>,
    answered: usize,
    /// Pages that did not verify, and that were not asked for yet.
    bad_pages: u64,
    /// The lenders that are still to be asked, by the bits of their numbers.
    asking: u64,
    asked: usize,
    /// Of the run that is being read from the backing file, the bytes that are left.
    run: Range<usize>,
    filled: usize,
    raced: Option<RacedRead>,
    /// Pages that the lender no longer has.
    gone: Vec<(u32, Version)>,
    /// Whether the miss of its pages is to be noted yet.
    is_new: bool,
}

impl ReadState {
    /// Another READ begins: `len` bytes at `offset`, the kernel's `request`. What was under way in
    /// this structure must have ended.
    pub fn start(&mut self, request: u64, offset: u64, len: usize) {
        (self.stage, self.attempt) = (Stage::Begin, 0);
        (self.request, self.offset, self.len) = (request, offset, len);
    }

    /// Takes what has happened, and says what to do next. `buf` is the READ's, of the length that
    /// it has; before [`Event::Fill`] it may be empty.
    pub fn step<'f>(&mut self, core: &Core, file: &'f File, event: Event<'_, 'f>, buf: &mut [u8]) -> Step<'f> {
        match (event, &self.stage) {
            (Event::Begin { mut state, positions, waits }, Stage::Begin) => {
                // Answered while a change is being applied, older bytes could stay in the kernel's
                // page cache behind it.
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
                // What keeps the lock lets no change come in between.
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
            (Event::NotAsked, Stage::Ask(_) | Stage::Receive) => self.answered(core, file, None, false, buf),
            (Event::Answered(got), Stage::Receive) => self.answered(core, file, Some(got), true, buf),
            (Event::Failed, Stage::Receive) => self.answered(core, file, None, true, buf),
            (Event::Late(raced), Stage::Receive) => {
                self.late(core);
                self.raced = raced.or(self.raced.take());
                self.go_on(core, file, buf);
            }
            (Event::Read(read), Stage::Plain) => {
                core.metrics.below_pages.add(read.div_ceil(PAGE_SIZE) as u64);
                self.stage = if read < self.len { Stage::LookShort(read) } else { Stage::End(read) };
            }
            (Event::Read(read), Stage::Read(part)) => {
                self.run.start = part.end;
                buf[part.clone()][read..].fill(0);
                core.metrics.below_pages.add(read.div_ceil(PAGE_SIZE) as u64);
                self.go_on(core, file, buf);
            }
            (Event::Looked(now), Stage::LookShort(read)) => {
                // An end that is not where we left it is somebody else's doing.
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

    /// All that can be done without the driver: until there is another request, or bytes that only
    /// the backing file has.
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
            // What was raced is as new as what would be read now: the READ is done again if
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
            core.metrics.below_pages.add(read.div_ceil(PAGE_SIZE) as u64);
            self.run.start = known.end;
        };
    }

    /// Begins, or begins again. No change of its pages may be under way, unless changes are kept
    /// out until it has ended.
    fn begin(&mut self, core: &Core, file: &File, state: &mut FileState, (produced, consumed): (u64, u64)) {
        let range = self.range();
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
                *source = Source::Backing;
            }
            if let Source::Lender(place, _) | Source::Busy(place, _) = source {
                self.asking |= 1 << place.lender;
            }
        }
        (self.asked, self.filled, self.run) = (0, 0, 0..0);
        (self.raced, self.is_new) = (None, true);
        self.gone.clear();
    }

    /// Notes, once after it has begun, that the kernel's page cache has missed its pages. The
    /// lender has something to do meanwhile.
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

    /// The pages that the READ is about.
    pub fn range(&self) -> PageRange {
        PageRange::touched_by(self.offset, self.offset.saturating_add(self.len as u64))
    }

    fn ticket(&self) -> &ReadTicket {
        // `begin` comes first: the one who drives it has nothing else to call.
        self.ticket.as_ref().unwrap_or_else(|| unreachable!("a READ begins before it goes on"))
    }

    /// Whether all of it is to be read from the backing file, in one piece.
    fn is_plain(&self) -> bool {
        let whole_pages = self.offset.is_multiple_of(PAGE_SIZE as u64) && self.len.is_multiple_of(PAGE_SIZE);
        !whole_pages || self.sources.iter().all(|source| *source == Source::Backing)
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
        !self.sources.contains(&Source::Backing)
    }

    /// Fills in what is known to be zeros, and what is still in a put buffer.
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
                    // The lender has answered meanwhile: it is there, unless that is void, as it is
                    // with the lender lost.
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
                        None => *source = Source::Backing, // it was waited for long enough
                    }
                }
                Source::Backing | Source::Lender(..) => {}
            }
        }
    }

    /// Makes the next request, for at most [`ITEMS_MAX`] pages of one lender, which is returned.
    /// None: all were asked for.
    fn next_request(&mut self, file: &File) -> Option<u8> {
        self.keys.clear();
        self.places.clear();
        self.answered = 0;
        let first = (self.offset / PAGE_SIZE as u64) as u32;
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
                return Some(lender);
            }
        }
        None
    }

    /// The pages that the last [`Step::Ask`] asks for.
    pub fn request(&self) -> &[WireKey] {
        &self.keys
    }

    /// Where in the READ's buffer those pages of the last request go that were not answered yet, in
    /// bytes.
    pub fn unanswered(&self) -> &[usize] {
        &self.places[self.answered..]
    }

    /// Pages that a lender has returned since this was called last, and that do not verify.
    pub fn take_bad_pages(&mut self) -> u64 {
        std::mem::take(&mut self.bad_pages)
    }

    /// The response to the next pages of the last request, as many as `got` has, is in `buf`; or
    /// there is none to all that are left of it. It is opened there. What is no good will be read
    /// from the backing file; where the lender had no chance to answer (`asked` is false), nothing
    /// is known of its pages.
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

    /// What is late will be read from the backing file. The lender has the pages still, unless it
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

    /// Whether the READ goes on where others ended.
    pub fn is_sequential(&self) -> bool {
        self.ticket().sequential
    }

    /// The next run of pages that are nowhere else, with few others between them, as bytes of the
    /// READ's buffer: to be read from below, with zeros behind the end of the file. None: there are
    /// no more.
    fn next_below(&mut self) -> Option<Range<usize>> {
        let run = next_run(&self.sources, self.filled)?;
        self.filled = run.end;
        self.sources[run.clone()].fill(Source::Backing);
        Some(run.start * PAGE_SIZE..run.end * PAGE_SIZE)
    }

    /// All is filled, and then the file was looked at. Returns how many bytes the answer has: the
    /// size decides where it ends, so that nothing a page holds behind it is ever shown.
    fn end_of(&self, now: Stamp) -> usize {
        if !keeps(Rule::Size) {
            return self.len;
        }
        now.size_bytes.saturating_sub(self.offset).min(self.len as u64) as usize
    }

    /// If the file is not what we left, somebody else has changed it, and the READ is done again.
    fn compare(&self, core: &Core, file: &File, now: Stamp) {
        let ticket = self.ticket();
        if ticket.stamp.is_some_and(|stamp| stamp != now) {
            core.observe(file, ticket.moment(), now, Writers::Unasked);
        }
    }

    /// The READ is about to be answered with `bytes`. False: it must be done again. Where no
    /// eviction will be seen, what came from the disk is put at once.
    fn end(&mut self, core: &Core, file: &File, state: &mut FileState, bytes: &[u8]) -> bool {
        let ticket = *self.ticket();
        for (index, version) in self.gone.drain(..) {
            state.gone(index, version, Some(&ticket));
        }
        let void = |index: u32, entry: Entry| core.catalog.void(file.key(), index, entry);
        let is_good = state.end_read(&ticket, self.request, void);
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
    fn fail(&mut self, core: &Core, state: &mut FileState) {
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
        let is_left = |(source, index): (&Source, u64)| *source == Source::Backing && self.ticket().is_left(index);
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
                Source::Backing => state.know(narrow, demoted.hash(id_of(file, index), page), false),
                Source::Demoted(hash) => state.know(narrow, hash, true),
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

/// What is lent, or evicted by guests, has an index of that width.
fn id_of(file: &File, index: u64) -> PageId {
    PageId { file: file.key(), index: index as u32 }
}

#[cfg(test)]
mod tests;
