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
use std::time::{Duration, Instant};
use tap::{Eviction, EvictionSource, Positions};
use wire::address::Address;
use wire::{ITEMS_MAX, WireKey};

/// How long an evicted page may wait for a put buffer. Meanwhile the event ring takes what the kernel evicts.
const ROOM_WAIT: Duration = Duration::from_millis(50);

/// How long the put thread waits for events, hence the delay of noted drops.
const EVENT_WAIT: Duration = Duration::from_millis(100);

/// How long the put thread rests after it has found events, so that it is woken for many at once. At the highest speed of
/// reclaim, some 500 pages in this time, the ring has room for ten times as many.
const EVENT_REST: Duration = Duration::from_millis(1);

/// How long a put buffer may wait to become full. Its pages can be read meanwhile.
const FILL_WAIT: Duration = Duration::from_millis(5);

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
        /// The kernel's number of the request.
        request: u64,
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

    /// The kernel is about to be told to drop pages of the file, or will drop them itself. From now on buffered writes that a READ has
    /// overtaken are found ([`ChangeGuard::is_overtaken`]).
    pub fn watch_overtaking(&self) {
        self.state.lock().watch_overtaking();
    }

    /// Whether the kernel caches bytes that somebody has changed beside the mount. If so, the caller has the kernel drop all it caches of
    /// the file, and says so with this number to [`File::kernel_dropped`].
    pub fn kernel_stale(&self) -> Option<u64> {
        self.state.lock().kernel_stale()
    }

    /// The kernel has dropped all that it cached when [`File::kernel_stale`] said this number.
    pub fn kernel_dropped(&self, number: u64) {
        self.state.lock().kernel_dropped(number);
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

    /// A file that the kernel knows from a daemon before this one, under the key that it was given then; `left` is what it looked like
    /// when that daemon left it, if that is known ([`File::kernel_stale`] if not). Before anything else is asked.
    pub fn restore(&self, identity: FileIdentity, key: FileKey, left: Option<Stamp>) -> Arc<File> {
        self.catalog.restore(identity, key, left)
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
            Change::Attributes => {
                file.state.lock().begin_attributes();
                let ticket = Some(Ticket::Attributes);
                return ChangeGuard { borrower: self, file, change, before, overtaken: false, ticket };
            }
            Change::Buffered { offset, len, .. } => PageRange::touched_by(offset.min(size), offset.saturating_add(len)),
            // A change that reaches behind the end moves it.
            Change::Other { start, end } if end > size => PageRange::touched_by(start.min(size), u64::MAX),
            Change::Other { start, end } => PageRange::touched_by(start, end),
        };
        self.metrics.changes.one();
        let (ticket, overtaken) = self.watching_beside(file, |state, void| {
            let ticket = state.begin_change(range, before, void);
            let overtaken = match change {
                Change::Buffered { request, .. } => state.has_overtaken(request, range),
                _ => false,
            };
            (ticket, overtaken)
        });
        ChangeGuard { borrower: self, file, change, before, overtaken, ticket: Some(Ticket::Bytes(ticket)) }
    }

    /// Compares the file with what we left; `moment` was taken before `now` was. If somebody changed it beside us, its remote
    /// pages are forgotten, and [`File::kernel_stale`] says so.
    pub fn observe(&self, file: &File, moment: u64, now: Stamp) {
        self.watching_beside(file, |state, void| state.observe(moment, now, void));
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
        self.catalog.account(&mut state);
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
        let mut filled_since = None;
        while !self.stopping() {
            let wait = if filled_since.is_some() { FILL_WAIT } else { EVENT_WAIT };
            let events = match source.poll(wait, &mut |event| self.evicted(event)) {
                Ok(events) => events,
                Err(error) => {
                    tracing::warn!("the eviction tap failed ({error}); evicted pages are no longer lent");
                    return;
                }
            };
            if filled_since.is_some_and(|since: Instant| since.elapsed() >= FILL_WAIT) {
                self.send_puts(true);
            }
            filled_since = filled_since.filter(|_| self.puts_wait()).or_else(|| self.puts_wait().then(Instant::now));
            self.send_drops();
            if events > 0 {
                std::thread::sleep(EVENT_REST);
            }
            *self.tap_counters.lock() = source.counters();
        }
    }

    /// Whether pages wait to be sent.
    fn puts_wait(&self) -> bool {
        self.puts.lock().has_any()
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
        let valid = |place| self.catalog.is_valid(place);
        match state.evict(index, position, page::is_zero(page), valid, self.catalog.has_room()) {
            Verdict::Put => {}
            Verdict::Known => return metrics.evictions_known.one(),
            Verdict::Zero => {
                self.catalog.account(state);
                return metrics.evictions_zero.one();
            }
            Verdict::NoRoom => return metrics.evictions_no_room.one(),
            Verdict::Changing | Verdict::Tainted | Verdict::Quarantined => return metrics.evictions_not_trusted.one(),
        }
        let Some(place) = self.catalog.place(LENDER) else { return metrics.evictions_no_lender.one() };
        let Some(version) = self.catalog.next_version() else { return };
        let id = PageId { file: file.key(), index };
        if self.puts.lock().push(id, version, page::checksum(id, version, page), page) {
            state.put(index, place, version);
            self.catalog.account(state);
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

/// A change under way. Must end before the kernel gets its answer: by [`ChangeGuard::applied`], by [`ChangeGuard::failed`], or by being
/// dropped, which says that something else has happened than what was announced.
pub struct ChangeGuard<'a> {
    borrower: &'a Borrower,
    file: &'a File,
    change: Change,
    before: Stamp,
    overtaken: bool,
    ticket: Option<Ticket>,
}

enum Ticket {
    Bytes(ChangeTicket),
    Attributes,
}

impl ChangeGuard<'_> {
    /// Whether the kernel has cached older bytes behind this write, and must drop its pages.
    pub fn is_overtaken(&self) -> bool {
        self.overtaken
    }

    /// The change was applied below as announced; `after` is what the file looks like now.
    pub fn applied(mut self, after: Stamp) {
        let ended = match self.change {
            Change::Buffered { offset, len, .. } if !self.overtaken => Ended::Buffered {
                offset,
                end_offset: offset.saturating_add(len),
                old_size_bytes: self.before.size_bytes,
                // Read after the change was applied: every event of older content lies before it.
                position: self.borrower.produced(),
            },
            _ => Ended::Other,
        };
        self.end(ended, Some(after));
    }

    /// The change failed, wholly or in part, within what was announced; `after` is what the file looks like now.
    pub fn failed(mut self, after: Stamp) {
        self.end(Ended::Other, Some(after));
    }

    fn end(&mut self, ended: Ended, after: Option<Stamp>) {
        let Some(ticket) = self.ticket.take() else { return };
        let mut state = self.file.state.lock();
        match ticket {
            Ticket::Attributes => state.end_attributes(self.before, after),
            Ticket::Bytes(ticket) => {
                state.end_change(ticket, ended, after, self.borrower.consumed());
                self.borrower.catalog.account(&mut state);
                self.file.settled.notify_all();
            }
        }
    }
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.end(Ended::Other, None);
    }
}
