//! The borrower: keeps what the kernel evicts in the memory of lenders, and answers misses from there.
//!
//! [`logic`] is what it knows and decides, without sockets, clocks or threads; `edge` is where those are. [`Borrower`] joins
//! the two: the mount asks it for every READ out of the page cache and tells it of every change.
//!
//! What it promises: [`Borrower::read`] returns what a read of the file below would return. A failure of a lender, of the
//! network or of the eviction tap is a miss, never an error.

mod below;
mod edge;
pub mod logic;
mod metrics;
mod read;

pub use below::{Below, FileIdentity, Stamp};
pub use logic::catalog::{Census, File};
pub use metrics::{Counter, Metrics};

use edge::connection::{send_drop, send_put};
use edge::link::{self, LENDER, Link};
use logic::catalog::Catalog;
use logic::entry::Entry;
use logic::file::{ChangeTicket, Ended, Verdict};
use logic::puts::PutQueue;
use page::{FileKey, Page, PageId, PageRange};
use parking_lot::{Condvar, Mutex};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;
use tap::{Eviction, EvictionSource, Positions};
use wire::address::Address;
use wire::{ITEMS_MAX, WireKey};

/// How long an evicted page may wait for a put buffer. Meanwhile the event ring takes what the kernel evicts.
const ROOM_WAIT: Duration = Duration::from_millis(50);

/// How long the put thread waits for events, hence the delay of noted drops.
const EVENT_WAIT: Duration = Duration::from_millis(100);

/// Which copy of a page stays when it is read back (Puma 2015, §3.3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// The lender gives the page away: local and remote memory add up.
    Exclusive,
    /// The lender keeps it: a page read and evicted again need not be sent again.
    NonInclusive,
}

/// How a borrower is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the lender is; without one, everything is read from below.
    pub lender: Option<Address>,
    /// What happens to a page at the lender when it is read.
    pub strategy: Strategy,
    /// Connections for gets: as many as there are threads that read, within [`wire::SESSION_CONNECTIONS_MAX`].
    pub get_connections: usize,
}

/// A change of a file, as the mount sees it coming.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A write out of the kernel's page cache, which holds the new bytes already and cannot evict them before the answer.
    Buffered {
        /// First byte written.
        offset: u64,
        /// Bytes written.
        len: u64,
    },
    /// Any other change of the bytes `start..end`: truncation, fallocate, direct write, copy. The kernel drops what it
    /// caches of them only after the answer. A change of the file's size reaches to the end of the file: `end` is `u64::MAX`.
    Other {
        /// First byte changed.
        start: u64,
        /// Byte behind the last one changed.
        end: u64,
    },
    /// Attributes, names, extended attributes: no byte changes, but the change time does.
    Attributes,
}

impl File {
    /// Where the file's changes stand. Take it before looking at the file below, for [`Borrower::observe`].
    pub fn moment(&self) -> u64 {
        self.state.lock().moment()
    }

    /// Whether the kernel was made to drop pages of the file. From then on it should drop, after each buffered write of it, the
    /// pages written.
    pub fn is_disturbed(&self) -> bool {
        self.state.lock().is_disturbed()
    }
}

/// The borrower.
pub struct Borrower {
    pub(crate) catalog: Catalog,
    pub(crate) metrics: Metrics,
    pub(crate) link: Link,
    config: Config,
    puts: Mutex<PutQueue>,
    /// A put buffer became free.
    room: Condvar,
    /// A page waits to be sent (only without a tap, whose thread sends what it finds).
    work: Condvar,
    positions: Option<Arc<dyn Positions>>,
    tap_counters: Mutex<tap::Counters>,
    stop: AtomicBool,
    stopped: (Mutex<()>, Condvar),
    threads: OnceLock<Mutex<Vec<JoinHandle<()>>>>,
}

impl Borrower {
    /// Starts a borrower. Without `source` the pool is filled with what READs bring from the disk (then every strategy is
    /// non-inclusive, as evictions are not seen).
    ///
    /// # Errors
    /// When its threads cannot be started.
    pub fn start(config: Config, source: Option<Box<dyn EvictionSource>>) -> io::Result<Arc<Borrower>> {
        let borrower = Arc::new(Borrower {
            catalog: Catalog::new(1),
            metrics: Metrics::default(),
            link: Link::default(),
            puts: Mutex::default(),
            room: Condvar::new(),
            work: Condvar::new(),
            positions: source.as_ref().map(|source| source.positions()),
            tap_counters: Mutex::default(),
            stop: AtomicBool::new(false),
            stopped: Default::default(),
            threads: OnceLock::new(),
            config,
        });
        let mut threads = Vec::new();
        let mut spawn = |name: &str, run: Box<dyn FnOnce(&Borrower) + Send>| {
            let borrower = borrower.clone();
            std::thread::Builder::new()
                .name(name.into())
                .spawn(move || run(&borrower))
                .map(|thread| threads.push(thread))
        };
        match source {
            Some(source) => spawn("puma-tap", Box::new(|borrower| borrower.run_tap(source)))?,
            None => spawn("puma-put", Box::new(Borrower::run_puts))?,
        }
        if let Some(address) = borrower.config.lender.clone() {
            let connections = borrower.config.get_connections;
            spawn("puma-link", Box::new(move |borrower| link::supervise(borrower, &address, connections)))?;
        }
        let _ = borrower.threads.set(Mutex::new(threads));
        Ok(borrower)
    }

    /// Ends its threads and connections. Reads go on, from below.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.link.shut_down();
        self.work.notify_all();
        drop(self.stopped.0.lock());
        self.stopped.1.notify_all();
        for thread in self.threads.get().map(|threads| std::mem::take(&mut *threads.lock())).unwrap_or_default() {
            let _ = thread.join();
        }
    }

    /// The file of that identity, known from now on until [`Borrower::retire`]. Its pages may be known from before.
    pub fn adopt(&self, identity: FileIdentity) -> Arc<File> {
        self.catalog.adopt(identity)
    }

    /// The kernel has forgotten the inode. If it was `deleted` below, its pages are dropped; else they stay known as long as
    /// there is room.
    pub fn retire(&self, file: &Arc<File>, deleted: bool) {
        self.catalog.retire(file, deleted);
    }

    /// Announces a change, before it is applied below; `before` is what the file looks like now.
    pub fn change<'a>(&'a self, file: &'a File, change: Change, before: Stamp) -> ChangeGuard<'a> {
        let size = before.size_bytes;
        let range = match change {
            Change::Attributes => return ChangeGuard { borrower: self, file, change, before, ticket: None },
            Change::Buffered { offset, len } => PageRange::touched_by(offset.min(size), offset.saturating_add(len)),
            // A change that reaches behind the end moves it.
            Change::Other { start, end } if end > size => PageRange::touched_by(start.min(size), u64::MAX),
            Change::Other { start, end } => PageRange::touched_by(start, end),
        };
        self.metrics.changes.one();
        let ticket = self.watching_beside(file, |state, void| state.begin_change(range, before, void));
        ChangeGuard { borrower: self, file, change, before, ticket: Some(ticket) }
    }

    /// Compares the file with what we left; `moment` was taken before `now` was. If somebody changed it beside us, its remote
    /// pages are forgotten, and [`Borrower::take_kernel_cache_valid`] will say so.
    pub fn observe(&self, file: &File, moment: u64, now: Stamp) {
        self.watching_beside(file, |state, void| state.observe(moment, now, void));
    }

    /// Whether what the kernel caches of the file is still right. If not, the caller has the kernel drop it now: this is said
    /// once.
    pub fn take_kernel_cache_valid(&self, file: &File) -> bool {
        file.state.lock().take_kernel_cache_valid()
    }

    /// The mount has the kernel drop cached pages of the file. That lets a READ overtake a buffered write which waits in the
    /// kernel's queue, so from now on no buffered write of it is trusted to tell what is cached.
    pub fn disturb(&self, file: &File) {
        file.state.lock().disturb();
    }

    /// The counters.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// What the catalog holds.
    pub fn census(&self) -> Census {
        self.catalog.census()
    }

    /// What the tap has seen, when there is one.
    pub fn tap_counters(&self) -> Option<tap::Counters> {
        self.positions.as_ref().map(|_| *self.tap_counters.lock())
    }

    /// Put messages that are being filled, wait to be sent, or wait for their answer.
    pub fn puts_under_way(&self) -> usize {
        self.puts.lock().under_way()
    }

    /// Whether the lender is there.
    pub fn lender_is_up(&self) -> bool {
        self.catalog.place(LENDER).is_some()
    }

    /// Runs what may find a change made beside us, and counts it.
    fn watching_beside<T>(
        &self,
        file: &File,
        run: impl FnOnce(&mut logic::file::FileState, &mut dyn FnMut(u32, Entry)) -> T,
    ) -> T {
        let mut state = file.state.lock();
        let before = state.changes_beside();
        let result = run(&mut state, &mut |index, entry| self.catalog.void(file.key(), index, entry));
        self.metrics.changes_beside.add(state.changes_beside() - before);
        result
    }

    fn produced(&self) -> u64 {
        self.positions.as_ref().map_or(0, |positions| positions.produced())
    }

    fn consumed(&self) -> u64 {
        self.positions.as_ref().map_or(0, |positions| positions.consumed())
    }

    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(crate) fn sleep(&self, time: Duration) {
        let mut guard = self.stopped.0.lock();
        if !self.stopping() {
            self.stopped.1.wait_for(&mut guard, time);
        }
    }

    fn run_tap(&self, mut source: Box<dyn EvictionSource>) {
        while !self.stopping() {
            match source.poll(EVENT_WAIT, &mut |event| self.evicted(event)) {
                Ok(_) => self.send_puts(true),
                Err(error) => {
                    tracing::warn!("the eviction tap failed ({error}); evicted pages are no longer lent");
                    return;
                }
            }
            self.send_drops();
            *self.tap_counters.lock() = source.counters();
        }
    }

    fn run_puts(&self) {
        while !self.stopping() {
            let mut puts = self.puts.lock();
            if !puts.has_any() {
                self.work.wait_for(&mut puts, EVENT_WAIT);
            }
            drop(puts);
            self.send_puts(true);
            self.send_drops();
        }
    }

    fn evicted(&self, event: Eviction<'_>) {
        self.metrics.evictions.one();
        let Some(file) = self.catalog.file(FileKey(event.generation)) else {
            return self.metrics.evictions_unknown_file.one();
        };
        let Ok(index) = u32::try_from(event.index) else { return };
        self.wait_for_room();
        self.offer(&file, &mut file.state.lock(), index, event.position, event.page);
        if self.puts.lock().has_full() {
            self.send_puts(false);
        }
    }

    /// Has a page put, if it may be believed and a lender has room. The caller holds the file's state, so that nothing
    /// changes the page before its entry says where it is.
    fn offer(&self, file: &File, state: &mut logic::file::FileState, index: u32, position: u64, page: &Page) {
        let metrics = &self.metrics;
        match state.evict(index, position, page::is_zero(page), |place| self.catalog.is_valid(place)) {
            Verdict::Put => {}
            Verdict::Known => return metrics.evictions_known.one(),
            Verdict::Zero => return metrics.evictions_zero.one(),
            Verdict::Changing | Verdict::Tainted | Verdict::Quarantined => return metrics.evictions_not_trusted.one(),
        }
        let Some(place) = self.catalog.place(LENDER) else { return metrics.evictions_no_lender.one() };
        let Some(version) = self.catalog.next_version() else { return };
        let id = PageId { file: file.key(), index };
        if self.puts.lock().push(id, version, page::checksum(id, version, page), page) {
            state.put(index, place, version);
        } else {
            metrics.evictions_no_room.one();
        }
    }

    fn wait_for_room(&self) {
        let mut puts = self.puts.lock();
        if !puts.has_room() && self.lender_is_up() {
            self.room.wait_while_for(&mut puts, |puts| !puts.has_room(), ROOM_WAIT);
        }
    }

    fn send_puts(&self, partial: bool) {
        loop {
            let Some((request, batch)) = self.puts.lock().next(partial) else { return };
            let sent = self.link.send(|stream| send_put(stream, request, batch.items(), batch.pages()));
            if sent.is_err() {
                drop(batch);
                return self.abandon_puts();
            }
            self.metrics.put_messages.one();
            self.metrics.put_pages.add(batch.items().len() as u64);
        }
    }

    fn send_drops(&self) {
        let mut keys = Vec::new();
        loop {
            keys.clear();
            self.catalog.take_drops(ITEMS_MAX, &mut keys);
            if keys.is_empty() || self.link.send(|stream| send_drop(stream, &keys)).is_err() {
                return;
            }
            self.metrics.drop_pages.add(keys.len() as u64);
        }
    }

    pub(crate) fn abandon_puts(&self) {
        self.puts.lock().abandon();
        self.room.notify_all();
    }

    pub(crate) fn puts_answered(&self, request: u64, statuses: &[u8]) -> io::Result<()> {
        let batch = self.puts.lock().answered(request);
        let Some(batch) = batch.filter(|batch| batch.items().len() == statuses.len()) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an answer to a put that was not made"));
        };
        for (item, status) in batch.items().iter().zip(statuses) {
            let (id, version, stored) = (item.key.id(), item.key.version(), *status == 1);
            let wanted =
                self.catalog.file(id.file).is_some_and(|file| file.state.lock().put_done(id.index, version, stored));
            if !stored {
                self.metrics.put_pages_refused.one();
            } else if !wanted {
                self.metrics.put_pages_outdated.one();
                self.catalog.drop_at_lender(id, version);
            }
        }
        drop(batch);
        self.room.notify_all();
        Ok(())
    }

    pub(crate) fn pages_lost(&self, keys: &[WireKey]) {
        self.metrics.lost_pages.add(keys.len() as u64);
        for key in keys {
            if let Some(file) = self.catalog.file(key.id().file) {
                file.state.lock().gone(key.id().index, key.version(), None);
            }
        }
    }
}

/// A change under way. Must end, by [`ChangeGuard::applied`] or by being dropped (the change failed or its extent is not known),
/// before the kernel gets its answer.
pub struct ChangeGuard<'a> {
    borrower: &'a Borrower,
    file: &'a File,
    change: Change,
    before: Stamp,
    ticket: Option<ChangeTicket>,
}

impl ChangeGuard<'_> {
    /// The change was applied below as announced; `after` is what the file looks like now.
    pub fn applied(mut self, after: Stamp) {
        match self.change {
            Change::Attributes => self.file.state.lock().attributes_changed(self.before, after),
            Change::Buffered { offset, len } => {
                // Read after the change was applied: every event of older content lies before it.
                let position = self.borrower.produced();
                let end_offset = offset.saturating_add(len);
                let old_size_bytes = self.before.size_bytes;
                self.end(Ended::Buffered { offset, end_offset, old_size_bytes, position }, Some(after));
            }
            Change::Other { .. } => self.end(Ended::Other, Some(after)),
        }
    }

    fn end(&mut self, ended: Ended, after: Option<Stamp>) {
        if let Some(ticket) = self.ticket.take() {
            self.file.state.lock().end_change(ticket, ended, after, self.borrower.consumed());
            self.file.settled.notify_all();
        }
    }
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.end(Ended::Other, None);
    }
}
