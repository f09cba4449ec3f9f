//! The borrower's state and decisions, without sockets, clocks or threads. The edge reports events
//! to it and asks it for decisions. So does the simulation, which runs whole pools of it in one
//! thread.
//!
//! Parameters with a position of the event stream: `produced` is where the next event will go, and
//! `consumed` is how far events have been processed. Both are read when the call is made.

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
use locks::atomic::{AtomicBool, AtomicU64, Ordering};
use locks::{Condvar, Mutex};
use page::seal::Sealing;
use page::{ChecksumKey, FileKey, PAGE_SIZE, Page, PageId, PageRange};
use std::sync::Arc;
use tap::CopyHints;
use wire::WireKey;

/// Which copies of a page exist after it is read back (Puma 2015, §3.3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// The lender gives the page away: local and remote memory add up.
    Exclusive,
    /// The lender keeps the page: a page that is read and evicted again need not be sent again.
    NonInclusive,
}

/// A change of a file, as the mount announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A write out of the kernel's page cache, which holds the new bytes already and cannot evict
    /// them before the answer.
    Buffered {
        /// The first byte written.
        offset: u64,
        /// The number of bytes written.
        len: u64,
        /// The kernel's number of the request.
        request: u64,
        /// Whether this is a writeback of the kernel, without the inode's lock, rather than a
        /// write(2).
        writeback: bool,
    },
    /// Any other change of the bytes `start..end`, by a request that the kernel sends with the
    /// inode locked: truncation, direct write, copy. The kernel drops its cached pages of them only
    /// after the answer. A change of the file's size reaches to the end of the file: `end` is
    /// `u64::MAX`.
    Other {
        /// The first byte changed.
        start: u64,
        /// The byte behind the last one changed.
        end: u64,
    },
    /// A change like `Other`, by fallocate: the kernel then zeroes the changed parts of the pages
    /// at the edges, and drops the pages in between.
    Hole {
        /// The first byte changed.
        start: u64,
        /// The byte behind the last one changed.
        end: u64,
    },
    /// A change like `Other`, by a request of an unknown kind: a buffered write that is sent again,
    /// because the daemon that had it died.
    Suspect {
        /// The first byte changed.
        start: u64,
        /// The byte behind the last one changed.
        end: u64,
    },
    /// Attributes, names, extended attributes: no byte changes, but the change time does.
    Attributes,
}

/// A change in progress.
pub struct Changing {
    change: Change,
    before: Stamp,
    overtaken: Option<Overtaken>,
    /// None for a change of attributes only.
    ticket: Option<ChangeTicket>,
}

impl Changing {
    /// Returns the pages that the kernel may have cached with older bytes after this write, if
    /// there are any. The kernel must drop them.
    pub fn overtaken(&self) -> Option<Overtaken> {
        self.overtaken
    }
}

/// The outcome of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The change was applied to the backing file as announced; this is its stamp now.
    Applied(Stamp),
    /// The change failed, wholly or in part, within the announced range; this is the file's stamp
    /// now.
    Failed(Stamp),
    /// Something else than the announced change has happened.
    Unknown,
}

/// The lender's message contradicts the borrower's state: a protocol error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolError;

/// The setup of a [`Core`].
pub struct Setup {
    /// The maximum number of lenders.
    pub lenders: u8,
    /// The number of put buffers of all lenders.
    pub put_batches: usize,
    /// The number of pages of each buffer.
    pub batch_pages: usize,
    /// The sealing of pages on their way to a lender.
    pub sealing: Sealing,
    /// Whether a lender keeps a page that is read back.
    pub strategy: Strategy,
    /// Whether the kernel's evictions are seen; otherwise the pool is populated on read.
    pub sees_evictions: bool,
    /// Whether pages that are read in a sequential stream are left to the disk.
    pub filter: bool,
    /// The maximum memory of the catalog's entries, in bytes.
    pub entry_bytes_max: u64,
    /// The receiver of hints which pages need not be copied when they are evicted.
    pub copy_hints: Option<Arc<dyn CopyHints>>,
    /// The key for hashes of the backing files' pages, if guests give back the pages that they
    /// evict.
    pub demoted: Option<ChecksumKey>,
}

impl Setup {
    /// Returns a setup with default sizes and policies.
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
    /// Signalled when the first page waits, or a buffer has become full.
    work: Condvar,
    /// A number that identifies this lender for good, for the placement.
    salt: AtomicU64,
    /// The number of pages that it could store without forgetting others.
    free_pages: AtomicU64,
}

/// The borrower's state and decisions. See the module's description.
pub struct Core {
    /// The files and their pages.
    pub catalog: Catalog,
    /// The counters.
    pub metrics: Metrics,
    /// The estimates for pools of other sizes.
    pub curve: Curve,
    /// Decides whether streams are lent if they fit.
    pub stream_room: StreamRoom,
    /// The sealing of pages on their way to a lender.
    sealing: Sealing,
    strategy: Strategy,
    sees_evictions: AtomicBool,
    filter: AtomicBool,
    /// The weights of the lenders.
    pub weights: Weights,
    buffers: Arc<Buffers>,
    queues: Vec<Queue>,
    /// Whether pages are put.
    borrowing: AtomicBool,
    /// The lenders without free room, as bits.
    full: AtomicU64,
    /// Pages that guests have evicted, if there are guests.
    demoted: Option<Demoted>,
}

impl Core {
    /// Returns a core in which no lender is up.
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

    /// Sets whether pages are put from now on. Gets from lenders continue in any case.
    pub fn set_borrowing(&self, borrowing: bool) {
        self.borrowing.store(borrowing, Ordering::Relaxed);
    }

    /// Returns whether pages are put.
    pub fn is_borrowing(&self) -> bool {
        self.borrowing.load(Ordering::Relaxed)
    }

    /// Returns the pages that guests have evicted, if there are guests.
    pub fn demoted(&self) -> Option<&Demoted> {
        self.demoted.as_ref()
    }

    /// A guest has evicted the page.
    pub fn demote(&self, file: &File, index: u32, page: &Page) -> Demotion {
        let Some(demoted) = &self.demoted else { return Demotion::Unknown };
        let id = PageId { file: file.key(), index };
        let hash = demoted.hash(id, page);
        match file.state.lock().entry(index) {
            Entry::Hashed { hash: known, .. } if known == hash || !keeps(Rule::Demoted) => demoted.add(id, known, page),
            Entry::Hashed { .. } => Demotion::Differs,
            _ => Demotion::Unknown,
        }
    }

    /// Returns whether the backing file is known to hold these bytes.
    pub fn backing_file_has(&self, file: &File, index: u32, page: &Page) -> bool {
        let Some(demoted) = &self.demoted else { return false };
        let hash = demoted.hash(PageId { file: file.key(), index }, page);
        matches!(file.state.lock().entry(index), Entry::Hashed { hash: known, .. } if known == hash)
    }

    /// Returns the hashes of the whole pages that a write at `offset` has written, if there are
    /// guests.
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

    /// Returns the lenders to which pages may be put, as bits.
    pub fn usable(&self) -> u64 {
        if self.is_borrowing() { self.catalog.usable() } else { 0 }
    }

    /// Sets whether pages that are read in a sequential stream are left to the disk from now on.
    pub fn set_filter(&self, filter: bool) {
        self.filter.store(filter, Ordering::Relaxed);
    }

    /// Returns the treatment of pages that are read in a sequential stream.
    pub fn filter(&self) -> Filter {
        match self.filter.load(Ordering::Relaxed) {
            false => Filter::Off,
            true if self.sees_evictions() => Filter::Evicted(self.stream_room.lending()),
            true => Filter::Read(self.stream_room.lending()),
        }
    }

    /// Returns the sealing of pages on their way to a lender.
    pub fn sealing(&self) -> &Sealing {
        &self.sealing
    }

    /// Returns whether lenders give away the pages that they answer. Without a tap evictions are
    /// not seen, so a page that was given away would not come back to a lender.
    pub fn is_exclusive(&self) -> bool {
        self.strategy == Strategy::Exclusive && self.sees_evictions()
    }

    /// Returns whether the kernel's evictions are seen.
    pub fn sees_evictions(&self) -> bool {
        self.sees_evictions.load(Ordering::Relaxed)
    }

    /// From now on evictions are not seen, and earlier ones are not processed any more. The pool is
    /// populated on read.
    pub(crate) fn evictions_end(&self) {
        self.sees_evictions.store(false, Ordering::Relaxed);
    }

    /// Returns the queue of puts to that lender.
    pub fn queue(&self, lender: u8) -> &Mutex<PutQueue> {
        &self.queues[usize::from(lender)].puts
    }

    /// Returns the condition that is signalled, under [`Core::queue`]'s lock, when there is work
    /// for the sender.
    pub fn work(&self, lender: u8) -> &Condvar {
        &self.queues[usize::from(lender)].work
    }

    /// Returns the buffers of all queues.
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Sets the name of that lender, which identifies it whatever its number here.
    pub(crate) fn name_lender(&self, lender: u8, name: &str) {
        let salt = name.bytes().fold(0, |salt, byte| crate::put::placement::mix(salt ^ u64::from(byte)));
        self.queues[usize::from(lender)].salt.store(salt, Ordering::Relaxed);
    }

    /// Lenders were connected, lost, or found too slow. The buffers are shared out again. Hints are
    /// reset, because another lender may need the pages of a lost one.
    pub(crate) fn lenders_changed(&self) {
        self.catalog.wants_all_bytes();
        self.buffers.share_among(self.catalog.usable().count_ones() as usize);
    }

    /// Returns whether some lender has room for an evicted page, or there is no lender to wait for.
    pub fn has_room(&self) -> bool {
        let usable = self.usable();
        let has_room = |lender: u8| usable & 1 << lender != 0 && self.queue(lender).lock().has_room();
        usable == 0 || (0..self.catalog.lenders()).any(has_room)
    }

    /// Announces a change, before it is applied to the backing file; `before` is its stamp now.
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
                // Only a buffered write leaves pages in the kernel's cache.
                let indexes = (offset / PAGE_SIZE as u64..range.end).map_while(|index| u32::try_from(index).ok());
                indexes.for_each(|index| self.catalog.wants_bytes(PageId { file: file.key(), index }));
                range
            }
            // A change that reaches behind the end moves the end.
            Change::Other { start, end } | Change::Hole { start, end } | Change::Suspect { start, end } => {
                if end > size {
                    PageRange::touched_by(start.min(size), u64::MAX)
                } else {
                    PageRange::touched_by(start, end)
                }
            }
        };
        self.metrics.changes.one();
        self.watching_external_changes(file, |state, invalidated| {
            changing.ticket = Some(state.begin_change(range, before, invalidated));
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

    /// The change has ended. Must be called before the kernel gets its answer; `produced` is read
    /// after the change was applied. If it went as announced, the backing file holds the bytes of
    /// `written`, at that offset. Returns the index of the page of which the kernel may have zeroed
    /// a part, if there is one. The kernel must drop that page (R33).
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
        // After overlapping changes the order of the bytes is not known.
        if state.end_change(ticket, ended, after, consumed, self.catalog.has_room()) {
            hashes.into_iter().for_each(|(index, hash)| state.record_hash(index, hash, false));
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

    /// Compares the file with the recorded stamp; `moment` was taken before `now`. If the file was
    /// changed externally, its remote pages are forgotten, and [`File::kernel_stale`] reports stale
    /// pages.
    pub fn observe(&self, file: &File, moment: u64, now: Stamp, writers: Writers) {
        self.watching_external_changes(file, |state, invalidated| state.observe(moment, now, writers, invalidated));
    }

    /// The backing file may have changed: its entries are invalidated.
    pub fn suspect(&self, file: &File) {
        let mut state = file.state.lock();
        state.suspect(|index, entry| self.catalog.invalidated(file.key(), index, entry));
        self.catalog.account(&mut state);
    }

    /// Runs a function that may detect an external change, and counts it.
    fn watching_external_changes<T>(
        &self,
        file: &File,
        run: impl FnOnce(&mut FileState, &mut dyn FnMut(u32, Entry)) -> T,
    ) -> T {
        let mut state = file.state.lock();
        let before = state.external_changes();
        let result = run(&mut state, &mut |index, entry| self.catalog.invalidated(file.key(), index, entry));
        self.catalog.account(&mut state);
        self.metrics.external_changes.add(state.external_changes() - before);
        result
    }

    /// The kernel has evicted a page of the file with this `key`. Returns the lender for which a
    /// buffer has become full. `page` is None if its bytes were not copied. `group` is the control
    /// group of the page; 0: none.
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

    /// Makes the group give up its oldest puts until it is within its quota. No file may be locked.
    fn keep_quota(&self, group: u8) {
        let is_there = |put: &Put| {
            let is_there = |file: &Arc<File>| file.state.lock().names(put.id.index, |version| put.is(version));
            self.catalog.file(put.id.file).as_ref().is_some_and(is_there)
        };
        while let Some(put) = self.catalog.groups.over_quota(group, is_there) {
            let Some(file) = self.catalog.file(put.id.file) else { continue };
            let mut state = file.state.lock();
            if let Some(entry) = state.give_up(put.id.index, |version| put.is(version)) {
                self.catalog.invalidated(file.key(), put.id.index, entry);
            }
            self.catalog.account(&mut state);
        }
    }

    /// Puts a page, if it may be trusted and a lender has room. The caller holds the lock of the
    /// file's state, so nothing changes the page before its entry has the place. Returns the lender
    /// for which a buffer has become full.
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
        let might_be_lent = matches!(verdict, Verdict::Put | Verdict::AlreadyLent | Verdict::Zero | Verdict::NoRoom);
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
            Verdict::AlreadyLent => &metrics.evictions_already_lent,
            Verdict::Zero => {
                self.catalog.invalidated(file.key(), index, before);
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

    /// Returns whether there are lenders, none of which can store more pages without forgetting
    /// others.
    fn is_full(&self) -> bool {
        let usable = self.usable();
        usable != 0 && usable & !self.full.load(Ordering::Relaxed) == 0
    }

    /// Returns the number of pages that are lent, and that could be lent without forgetting others.
    pub(crate) fn room_pages(&self) -> u64 {
        let usable = self.usable();
        let free = |lender: u8| self.queues[usize::from(lender)].free_pages.load(Ordering::Relaxed);
        let free_pages = (0..self.catalog.lenders()).filter(|lender| usable & 1 << lender != 0).map(free);
        free_pages.fold(self.catalog.live_pages(), u64::saturating_add)
    }

    /// That lender has room for `free_pages` pages. `is_full`: that is too few to count as room.
    pub(crate) fn set_room(&self, lender: u8, free_pages: u64, is_full: bool) {
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
            // Another lender's queue may have taken the last buffer meanwhile.
            if !puts.push(id, version, |sealed| self.sealing.seal(id, version, page, sealed)) {
                continue;
            }
            let full = puts.has_full();
            drop(puts);
            // A suspended lender may have an older copy.
            self.catalog.invalidated(file.key(), index, before);
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

    /// Returns the next buffer to send to that lender: a full one, or, with `partial`, the one that
    /// is being filled.
    pub fn next_put(&self, lender: u8, partial: bool) -> Option<(u64, Arc<Batch>)> {
        self.queue(lender).lock().next(partial)
    }

    /// Returns whether a buffer must still be sent. False if that lender was lost meanwhile.
    pub(crate) fn is_put_under_way(&self, lender: u8, request: u64) -> bool {
        self.queue(lender).lock().is_under_way(request)
    }

    /// A buffer of `page_count` pages was sent.
    pub fn put_sent(&self, page_count: usize) {
        self.metrics.put_messages.one();
        self.metrics.put_pages.add(page_count as u64);
    }

    /// The lender is lost: puts in progress will not be answered, and their pages are not
    /// requested. They may have reached the lender. But after a rollback of this machine, a request
    /// for them could return pages of another process with the same version (R26).
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
    /// [`ProtocolError`] if that put was not made, or another one must be answered first.
    pub fn puts_answered(&self, lender: u8, request: u64, statuses: &[u8]) -> Result<(), ProtocolError> {
        let batch = self.queue(lender).lock().answered(request, statuses.len()).ok_or(ProtocolError)?;
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
        // A thread that waits for room waits for this call.
        self.queue(lender).lock().collect_leaving();
        Ok(())
    }

    /// That lender reports that it no longer has these pages.
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
