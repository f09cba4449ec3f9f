//! All that the borrower knows and decides, without sockets, clocks or threads: the edge tells it
//! what happens and asks what to do, and so does the simulation, which runs whole pools of it in
//! one thread.
//!
//! Where an event stream's position is asked for, `produced` is how far the stream has been filled
//! and `consumed` how far it has been dealt with, both read when the call is made.

use crate::backing::{Stamp, Writers};
use crate::catalog::entry::Entry;
use crate::catalog::file::{ChangeTicket, Ended, FileState, Filter, Verdict};
use crate::catalog::overtaking::Overtaken;
use crate::catalog::rules::{Rule, keeps};
use crate::catalog::{Catalog, File};
use crate::metrics::Metrics;
use crate::policy::curve::Curve;
use crate::policy::stream_room::StreamRoom;
use crate::put::buffers::{Batch, Buffers, PutQueue};
use crate::put::demoted::{Demoted, Demotion};
use crate::put::groups::{Admission, Put};
use crate::put::placement::Weights;
use page::seal::Sealing;
use page::{ChecksumKey, FileKey, PAGE_SIZE, Page, PageId, PageRange};
use std::sync::Arc;
use sync::atomic::{AtomicBool, AtomicU64, Ordering};
use sync::{Condvar, Mutex};
use tap::CopyHints;
use wire::WireKey;

/// Which copy of a page stays when it is read back (Puma 2015, §3.3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// The lender gives the page away: local and remote memory add up.
    Exclusive,
    /// The lender keeps it: a page read and evicted again need not be sent again.
    NonInclusive,
}

/// A change of a file, as the mount sees it coming.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A write out of the kernel's page cache, which holds the new bytes already and cannot evict
    /// them before the answer.
    Buffered {
        /// First byte written.
        offset: u64,
        /// Bytes written.
        len: u64,
        /// The kernel's number of the request.
        request: u64,
        /// Whether the kernel writes back by itself, without the inode's lock, rather than for a
        /// write(2).
        writeback: bool,
    },
    /// Any other change of the bytes `start..end`, by a request that the kernel sends with the
    /// inode locked: truncation, direct write, copy. The kernel drops what it caches of them only
    /// after the answer. A change of the file's size reaches to the end of the file: `end` is
    /// `u64::MAX`.
    Other {
        /// First byte changed.
        start: u64,
        /// Byte behind the last one changed.
        end: u64,
    },
    /// A change like `Other`, by fallocate: the kernel then zeroes those parts of its pages at the
    /// edges that are in the range, and drops the rest.
    Hole {
        /// First byte changed.
        start: u64,
        /// Byte behind the last one changed.
        end: u64,
    },
    /// A change like `Other`, by a request of which nothing more is known: a buffered write that is
    /// sent again, because the daemon that had it died.
    Doubtful {
        /// First byte changed.
        start: u64,
        /// Byte behind the last one changed.
        end: u64,
    },
    /// Attributes, names, extended attributes: no byte changes, but the change time does.
    Attributes,
}

/// A change under way.
pub struct Changing {
    change: Change,
    before: Stamp,
    overtaken: Option<Overtaken>,
    /// None: of attributes only.
    ticket: Option<ChangeTicket>,
}

impl Changing {
    /// The pages, if any, that the kernel may have cached with older bytes behind this write, and
    /// must drop.
    pub fn overtaken(&self) -> Option<Overtaken> {
        self.overtaken
    }
}

/// How a change has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was applied below as announced; this is what the file looks like now.
    Applied(Stamp),
    /// It failed, wholly or in part, within what was announced.
    Failed(Stamp),
    /// Something else has happened than what was announced.
    Unknown,
}

/// The lender said what it cannot know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confused;

/// How a [`Core`] is set up.
pub struct Setup {
    /// Lenders that there can be.
    pub lenders: u8,
    /// Put buffers of all lenders.
    pub put_batches: usize,
    /// Pages of each.
    pub batch_pages: usize,
    /// What pages are turned into on their way to a lender.
    pub sealing: Sealing,
    /// What a lender does with a page that is read back.
    pub strategy: Strategy,
    /// Whether the kernel's evictions are seen; else the pool is filled with what is read.
    pub sees_evictions: bool,
    /// Whether what is read in a sequential stream is not lent.
    pub filter: bool,
    /// Memory that the catalog's entries may take.
    pub entry_bytes_max: u64,
    /// Where it is said which pages need not be copied when they are evicted.
    pub copy_hints: Option<Arc<dyn CopyHints>>,
    /// Whether it is known what the files below hold, for pages that guests have evicted: with this
    /// key.
    pub demoted: Option<ChecksumKey>,
}

impl Setup {
    /// With the sizes and the policies that are the default.
    pub fn new(lenders: u8, sealing: impl Into<Sealing>, strategy: Strategy, sees_evictions: bool) -> Setup {
        Setup {
            lenders,
            put_batches: crate::put::buffers::BATCHES_MAX,
            batch_pages: crate::put::buffers::BATCH_PAGES,
            sealing: sealing.into(),
            strategy,
            sees_evictions,
            filter: true,
            entry_bytes_max: crate::catalog::ENTRY_BYTES_MAX,
            copy_hints: None,
            demoted: None,
        }
    }
}

/// Pages on their way to one lender.
struct Queue {
    puts: Mutex<PutQueue>,
    /// A page waits that none waited before, or a buffer has become full.
    work: Condvar,
    /// What tells this lender from others for good, for the placement.
    salt: AtomicU64,
    /// Pages that it could take without forgetting others.
    free_pages: AtomicU64,
}

/// What the borrower knows and decides.
pub struct Core {
    /// The files and their pages.
    pub catalog: Catalog,
    /// The counters.
    pub metrics: Metrics,
    /// What pools of other sizes would have done.
    pub curve: Curve,
    /// Whether what is read in streams is lent where it fits.
    pub stream_room: StreamRoom,
    /// What pages are turned into on their way to a lender.
    sealing: Sealing,
    strategy: Strategy,
    sees_evictions: AtomicBool,
    filter: AtomicBool,
    /// What the lenders weigh.
    pub weights: Weights,
    buffers: Arc<Buffers>,
    queues: Vec<Queue>,
    /// Whether pages are put.
    borrowing: AtomicBool,
    /// Lenders that have no room for more, a bit for each.
    full: AtomicU64,
    /// Pages that guests have evicted, if there are guests.
    demoted: Option<Demoted>,
}

impl Core {
    /// None of the lenders is up.
    pub fn new(setup: Setup) -> Core {
        let buffers = Arc::new(Buffers::new(setup.put_batches, setup.batch_pages));
        let queue = |number: u8| Queue {
            puts: Mutex::new(PutQueue::new(buffers.clone())),
            work: Condvar::new(),
            salt: AtomicU64::new(number.into()),
            free_pages: AtomicU64::new(0),
        };
        let keeps = !(setup.strategy == Strategy::Exclusive && setup.sees_evictions);
        Core {
            catalog: Catalog::new(setup.lenders, setup.entry_bytes_max).with_hints(setup.copy_hints),
            metrics: Metrics::default(),
            curve: Curve::new(keeps),
            stream_room: StreamRoom::new(keeps),
            sealing: setup.sealing,
            strategy: setup.strategy,
            sees_evictions: setup.sees_evictions.into(),
            filter: setup.filter.into(),
            weights: Weights::new(setup.lenders),
            queues: (0..setup.lenders).map(queue).collect(),
            buffers,
            borrowing: AtomicBool::new(true),
            full: AtomicU64::new(0),
            demoted: setup.demoted.map(Demoted::new),
        }
    }

    /// Whether pages are put from now on. What lenders have is asked for all the same.
    pub fn set_borrowing(&self, borrowing: bool) {
        self.borrowing.store(borrowing, Ordering::Relaxed);
    }

    /// Whether pages are put.
    pub fn is_borrowing(&self) -> bool {
        self.borrowing.load(Ordering::Relaxed)
    }

    /// Pages that guests have evicted, if there are guests.
    pub fn demoted(&self) -> Option<&Demoted> {
        self.demoted.as_ref()
    }

    /// A guest has evicted the page.
    pub fn demote(&self, file: &File, index: u32, page: &Page) -> Demotion {
        let Some(demoted) = &self.demoted else { return Demotion::Unknown };
        let id = PageId { file: file.key(), index };
        let hash = demoted.hash(id, page);
        match file.state.lock().entry(index) {
            Entry::Known { hash: known, .. } if known == hash || !keeps(Rule::Demoted) => demoted.add(id, known, page),
            Entry::Known { .. } => Demotion::Differs,
            _ => Demotion::Unknown,
        }
    }

    /// Whether the file below is known to hold these bytes.
    pub fn is_known(&self, file: &File, index: u32, page: &Page) -> bool {
        let Some(demoted) = &self.demoted else { return false };
        let hash = demoted.hash(PageId { file: file.key(), index }, page);
        matches!(file.state.lock().entry(index), Entry::Known { hash: known, .. } if known == hash)
    }

    /// Hashes of the whole pages of what was written at `offset`, if there are guests.
    fn hashes(&self, file: &File, (offset, bytes): (u64, &[u8])) -> Vec<(u32, u64)> {
        let Some(demoted) = &self.demoted else { return Vec::new() };
        let whole = PageRange::inside(offset, offset.saturating_add(bytes.len() as u64));
        if whole.is_empty() || !self.catalog.has_room() {
            return Vec::new();
        }
        let skipped = (whole.first * PAGE_SIZE as u64 - offset) as usize;
        let (pages, _) = bytes[skipped..].as_chunks::<PAGE_SIZE>();
        let indexes = (whole.first..whole.end).map_while(|index| u32::try_from(index).ok());
        let hash = |(index, page)| (index, demoted.hash(PageId { file: file.key(), index }, page));
        indexes.zip(pages).map(hash).collect()
    }

    /// Lenders to which pages may be put, a bit for each.
    pub fn usable(&self) -> u64 {
        if self.is_borrowing() { self.catalog.usable() } else { 0 }
    }

    /// Whether what is read in a sequential stream is not lent from now on.
    pub fn set_filter(&self, filter: bool) {
        self.filter.store(filter, Ordering::Relaxed);
    }

    /// What becomes of what is read in a sequential stream.
    pub fn filter(&self) -> Filter {
        match self.filter.load(Ordering::Relaxed) {
            false => Filter::Off,
            true if self.sees_evictions() => Filter::Evicted(self.stream_room.lending()),
            true => Filter::Read(self.stream_room.lending()),
        }
    }

    /// What pages are turned into on their way to a lender.
    pub fn sealing(&self) -> &Sealing {
        &self.sealing
    }

    /// Whether lenders give away what they answer. Without a tap an eviction is not seen, so that a
    /// page given away would not come back to a lender.
    pub fn is_exclusive(&self) -> bool {
        self.strategy == Strategy::Exclusive && self.sees_evictions()
    }

    /// Whether the kernel's evictions are seen.
    pub fn sees_evictions(&self) -> bool {
        self.sees_evictions.load(Ordering::Relaxed)
    }

    /// They are not from now on, and none that has happened is dealt with any more: the pool is
    /// filled with what is read.
    pub fn evictions_end(&self) {
        self.sees_evictions.store(false, Ordering::Relaxed);
    }

    /// Puts on their way to that lender.
    pub fn queue(&self, lender: u8) -> &Mutex<PutQueue> {
        &self.queues[usize::from(lender)].puts
    }

    /// Notified under [`Core::queue`]'s lock when something is there to be sent.
    pub fn work(&self, lender: u8) -> &Condvar {
        &self.queues[usize::from(lender)].work
    }

    /// The buffers of all queues.
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// That lender has this name: what tells it from others, whatever number it has here.
    pub fn name_lender(&self, lender: u8, name: &str) {
        let salt = name.bytes().fold(0, |salt, byte| crate::put::placement::mix(salt ^ u64::from(byte)));
        self.queues[usize::from(lender)].salt.store(salt, Ordering::Relaxed);
    }

    /// Lenders were found, lost, or found too slow: they share the buffers anew, and what a lender
    /// had, another one may want.
    pub fn lenders_changed(&self) {
        self.catalog.wants_all_bytes();
        self.buffers.share_among(self.catalog.usable().count_ones() as usize);
    }

    /// Whether an evicted page finds room at some lender, or there is none to wait for.
    pub fn has_room(&self) -> bool {
        let usable = self.usable();
        let has_room = |lender: u8| usable & 1 << lender != 0 && self.queue(lender).lock().has_room();
        usable == 0 || (0..self.catalog.lenders()).any(has_room)
    }

    /// Announces a change, before it is applied below; `before` is what the file looks like now.
    pub fn begin_change(&self, file: &File, change: Change, before: Stamp) -> Changing {
        let mut changing = Changing { change, before, overtaken: None, ticket: None };
        let size = if keeps(Rule::End) { before.size_bytes } else { u64::MAX };
        let range = match change {
            Change::Attributes => {
                file.state.lock().begin_attributes();
                return changing;
            }
            Change::Buffered { offset, len, .. } => {
                let range = PageRange::touched_by(offset.min(size), offset.saturating_add(len));
                // Other changes leave nothing in the kernel's cache.
                let indexes = (offset / PAGE_SIZE as u64..range.end).map_while(|index| u32::try_from(index).ok());
                indexes.for_each(|index| self.catalog.wants_bytes(PageId { file: file.key(), index }));
                range
            }
            // A change that reaches behind the end moves it.
            Change::Other { start, end } | Change::Hole { start, end } | Change::Doubtful { start, end } => {
                if end > size {
                    PageRange::touched_by(start.min(size), u64::MAX)
                } else {
                    PageRange::touched_by(start, end)
                }
            }
        };
        self.metrics.changes.one();
        self.watching_beside(file, |state, void| {
            changing.ticket = Some(state.begin_change(range, before, void));
            if matches!(change, Change::Buffered { writeback: false, .. } | Change::Other { .. } | Change::Hole { .. })
            {
                state.locked_request();
            }
            match change {
                Change::Buffered { request, writeback, .. } => {
                    changing.overtaken = state.write_begins(request, range, writeback);
                }
                Change::Hole { start, end } => state.hole_begins(start.min(size), end),
                _ => {}
            }
        });
        changing
    }

    /// The change has ended. Must come before the kernel gets its answer; `produced` is read after
    /// it was applied. If it went as announced, the file below holds the bytes of `written`, at
    /// that offset. Returns the index of the page, if any, of which the kernel may have zeroed a
    /// part, and which it must drop (R33).
    pub fn end_change(
        &self,
        file: &File,
        changing: Changing,
        outcome: Outcome,
        (produced, consumed): (u64, u64),
        written: Option<(u64, &[u8])>,
    ) -> Option<u64> {
        let after = match outcome {
            Outcome::Applied(after) | Outcome::Failed(after) => Some(after),
            Outcome::Unknown => None,
        };
        let Some(ticket) = changing.ticket else {
            file.state.lock().end_attributes(changing.before, after);
            return None;
        };
        let as_announced = matches!(outcome, Outcome::Applied(_)) || !keeps(Rule::Failure);
        let ended = match changing.change {
            Change::Buffered { offset, len, .. } if as_announced && changing.overtaken.is_none() => Ended::Buffered {
                offset,
                end_offset: offset.saturating_add(len),
                old_size_bytes: changing.before.size_bytes,
                position: produced,
            },
            _ => Ended::Other,
        };
        let hashes = written.filter(|_| as_announced).map(|written| self.hashes(file, written)).unwrap_or_default();
        let mut state = file.state.lock();
        // Else it is not known whose bytes are there.
        if state.end_change(ticket, ended, after, consumed, self.catalog.has_room()) {
            hashes.into_iter().for_each(|(index, hash)| state.know(index, hash, false));
        }
        let zeroed = match changing.change {
            Change::Buffered { offset, len, writeback, .. } => {
                let size_bytes = after.map_or(u64::MAX, |after| after.size_bytes);
                state.write_ended(offset, offset.saturating_add(len), writeback, size_bytes)
            }
            _ => None,
        };
        self.catalog.account(&mut state);
        file.settled.notify_all();
        zeroed
    }

    /// Compares the file with what we left; `moment` was taken before `now` was. If somebody
    /// changed it beside us, its remote pages are forgotten, and [`File::kernel_stale`] says so.
    pub fn observe(&self, file: &File, moment: u64, now: Stamp, writers: Writers) {
        self.watching_beside(file, |state, void| state.observe(moment, now, writers, void));
    }

    /// The file below may hold something else than is known of it.
    pub fn doubt(&self, file: &File) {
        let mut state = file.state.lock();
        state.doubt(|index, entry| self.catalog.void(file.key(), index, entry));
        self.catalog.account(&mut state);
    }

    /// Runs what may find a change made beside us, and counts it.
    fn watching_beside<T>(&self, file: &File, run: impl FnOnce(&mut FileState, &mut dyn FnMut(u32, Entry)) -> T) -> T {
        let mut state = file.state.lock();
        let before = state.changes_beside();
        let result = run(&mut state, &mut |index, entry| self.catalog.void(file.key(), index, entry));
        self.catalog.account(&mut state);
        self.metrics.changes_beside.add(state.changes_beside() - before);
        result
    }

    /// The kernel has evicted a page of the file that it knows by `key`. Returns the lender for
    /// which a buffer has become full. `page` is None where its bytes were not copied; `group` is
    /// the control group in whose name it was cached; 0: none.
    pub fn evicted(&self, key: FileKey, index: u64, position: u64, page: Option<&Page>, group: u8) -> Option<u8> {
        self.metrics.evictions.one();
        if group != 0 {
            self.catalog.groups.evicted(group);
        }
        let Some(file) = self.catalog.file(key) else {
            self.metrics.evictions_unknown_file.one();
            return None;
        };
        let index = u32::try_from(index).ok()?;
        self.catalog.touch(&file);
        let mut state = file.state.lock();
        if state.is_removed {
            self.metrics.evictions_unknown_file.one();
            return None;
        }
        let full = self.offer(&file, &mut state, index, position, page, group);
        drop(state);
        if group != 0 {
            self.keep_quota(group);
        }
        full
    }

    /// Has the group give up what it has put longest ago, until it has no more than its quota. No
    /// file may be locked.
    fn keep_quota(&self, group: u8) {
        let is_there = |put: &Put| {
            let is_there = |file: &Arc<File>| file.state.lock().names(put.id.index, |version| put.is(version));
            self.catalog.file(put.id.file).as_ref().is_some_and(is_there)
        };
        while let Some(put) = self.catalog.groups.over_quota(group, is_there) {
            let Some(file) = self.catalog.file(put.id.file) else { continue };
            let mut state = file.state.lock();
            if let Some(entry) = state.give_up(put.id.index, |version| put.is(version)) {
                self.catalog.void(file.key(), put.id.index, entry);
            }
            self.catalog.account(&mut state);
        }
    }

    /// Has a page put, if it may be believed and a lender has room. The caller holds the file's
    /// state, so that nothing changes the page before its entry says where it is. Returns the
    /// lender for which a buffer has become full.
    pub(crate) fn offer(
        &self,
        file: &File,
        state: &mut FileState,
        index: u32,
        position: u64,
        page: Option<&Page>,
        group: u8,
    ) -> Option<u8> {
        let metrics = &self.metrics;
        let standing = |place| self.catalog.standing(place);
        let (before, elsewhere) = (state.entry(index), self.usable() != 0);
        let is_zero = page.is_some_and(page::is_zero);
        let verdict = state.evict(index, position, is_zero, standing, self.catalog.has_room(), elsewhere);
        let might_be_lent = matches!(verdict, Verdict::Put | Verdict::Known | Verdict::Zero | Verdict::NoRoom);
        if (might_be_lent || verdict == Verdict::Sequential) && self.catalog.groups.takes_part(group) {
            self.stream_room.evicted(file.key(), index);
            if might_be_lent {
                self.curve.evicted(file.key(), index);
            }
        }
        let counter = match verdict {
            Verdict::Put => match (page, self.catalog.groups.admit(group, self.is_full())) {
                (Some(page), Admission::Yes) => return self.put(file, state, index, page, before, group),
                (None, Admission::Yes) => &metrics.evictions_not_copied,
                (_, Admission::Apart | Admission::OverShare) => &metrics.evictions_not_admitted,
            },
            Verdict::Known => &metrics.evictions_known,
            Verdict::Zero => {
                self.catalog.void(file.key(), index, before);
                self.catalog.account(state);
                &metrics.evictions_zero
            }
            Verdict::Sequential => {
                self.catalog.account(state);
                &metrics.evictions_sequential
            }
            Verdict::NoRoom => &metrics.evictions_no_room,
            Verdict::Changing | Verdict::Tainted | Verdict::Quarantined => &metrics.evictions_not_trusted,
        };
        counter.one();
        None
    }

    /// Whether there are lenders, none of which has room for more without forgetting what it has.
    fn is_full(&self) -> bool {
        let usable = self.usable();
        usable != 0 && usable & !self.full.load(Ordering::Relaxed) == 0
    }

    /// Pages that are lent, and that could be without anything being forgotten for them.
    pub fn room_pages(&self) -> u64 {
        let usable = self.usable();
        let free = |lender: u8| self.queues[usize::from(lender)].free_pages.load(Ordering::Relaxed);
        let free_pages = (0..self.catalog.lenders()).filter(|lender| usable & 1 << lender != 0).map(free);
        free_pages.fold(self.catalog.live_pages(), u64::saturating_add)
    }

    /// That lender has room for so many pages more, which may be too few to count.
    pub fn set_room(&self, lender: u8, free_pages: u64, is_full: bool) {
        self.queues[usize::from(lender)].free_pages.store(free_pages, Ordering::Relaxed);
        match is_full {
            true => self.full.fetch_or(1 << lender, Ordering::Relaxed),
            false => self.full.fetch_and(!(1 << lender), Ordering::Relaxed),
        };
    }

    fn put(&self, file: &File, state: &mut FileState, index: u32, page: &Page, before: Entry, group: u8) -> Option<u8> {
        let usable = self.usable();
        if usable == 0 {
            self.metrics.evictions_no_lender.one();
            return None;
        }
        let salt = |lender: u8| self.queues[usize::from(lender)].salt.load(Ordering::Relaxed);
        for lender in self.weights.choose(file.key(), index, usable, salt).iter() {
            let mut puts = self.queue(lender).lock();
            let Some(place) = self.catalog.place(lender).filter(|_| puts.has_room()) else { continue };
            let Some(version) = self.catalog.next_version() else { break };
            let id = PageId { file: file.key(), index };
            let was_idle = !puts.has_any();
            // Another one's queue may have taken the last buffer just now.
            if !puts.push(id, version, |sealed| self.sealing.seal(id, version, page, sealed)) {
                continue;
            }
            let full = puts.has_full();
            drop(puts);
            // A lender that is away may have an older copy.
            self.catalog.void(file.key(), index, before);
            state.put(index, place, version, group);
            if group != 0 {
                self.catalog.groups.put(group, Put::new(id, version));
            }
            self.catalog.account(state);
            if was_idle || full {
                self.work(lender).notify_one();
            }
            return full.then_some(lender);
        }
        self.metrics.evictions_no_room.one();
        None
    }

    /// The next buffer to send to that lender: a full one, or with `partial` the one being filled.
    pub fn next_put(&self, lender: u8, partial: bool) -> Option<(u64, Arc<Batch>)> {
        self.queue(lender).lock().next(partial)
    }

    /// Whether a buffer that is being sent is still to be: not if that lender was lost since.
    pub fn is_put_under_way(&self, lender: u8, request: u64) -> bool {
        self.queue(lender).lock().is_under_way(request)
    }

    /// A buffer of that many pages was sent.
    pub fn put_sent(&self, page_count: usize) {
        self.metrics.put_messages.one();
        self.metrics.put_pages.add(page_count as u64);
    }

    /// The lender is lost: what was on its way there will not be answered, and is not asked for. It
    /// may have come there; but whoever was set back to an earlier state would ask for what
    /// somebody else has put there as the same version (R26).
    pub fn abandon_puts(&self, lender: u8) {
        let batches = self.queue(lender).lock().abandon();
        for item in batches.iter().flat_map(|batch| batch.items()) {
            let (id, version) = (item.key.id(), item.key.version());
            if let Some(file) = self.catalog.file(id.file) {
                let mut state = file.state.lock();
                state.put_done(id.index, version, false);
                self.catalog.account(&mut state);
            }
            self.catalog.wants_bytes(id);
            self.catalog.drop_at_lender(lender, id, version);
        }
        drop(batches);
        self.queue(lender).lock().abandoned();
    }

    /// The lender has answered a put: for each page 1 if it was stored.
    ///
    /// # Errors
    /// [`Confused`] if that put was not made, or not next to be answered.
    pub fn puts_answered(&self, lender: u8, request: u64, statuses: &[u8]) -> Result<(), Confused> {
        let batch = self.queue(lender).lock().answered(request, statuses.len()).ok_or(Confused)?;
        for (item, status) in batch.items().iter().zip(statuses) {
            let (id, version, stored) = (item.key.id(), item.key.version(), *status == 1);
            let wanted = self.catalog.file(id.file).is_some_and(|file| {
                let mut state = file.state.lock();
                let wanted = state.put_done(id.index, version, stored);
                self.catalog.account(&mut state);
                wanted
            });
            if !stored {
                self.metrics.put_pages_refused.one();
                self.catalog.wants_bytes(id);
            } else if !wanted {
                self.metrics.put_pages_outdated.one();
                self.catalog.drop_at_lender(lender, id, version);
            }
        }
        drop(batch);
        // A thread that waits for room waits for this.
        self.queue(lender).lock().collect_leaving();
        Ok(())
    }

    /// That lender says that it no longer has these pages.
    pub fn pages_lost(&self, lender: u8, keys: &[WireKey]) {
        self.metrics.lost_pages.add(keys.len() as u64);
        for key in keys {
            let id = key.id();
            if let Some(file) = self.catalog.file(id.file) {
                let mut state = file.state.lock();
                if state.lost(id.index, key.version(), lender) {
                    self.catalog.wants_bytes(id);
                    self.catalog.account(&mut state);
                }
            }
        }
    }
}
