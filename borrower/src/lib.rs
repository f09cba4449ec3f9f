//! The borrower: keeps what the kernel evicts in the memory of lenders, and answers misses from there.
//!
//! [`logic`] is what it knows and decides, without sockets, clocks or threads; `edge` is where those are. [`Borrower`] joins
//! the two: the mount asks it for every READ out of the page cache and tells it of every change.
//!
//! What it promises: [`Borrower::read`] returns what a read of the file below would return. A failure of a lender, of the
//! network or of the eviction tap is a miss, never an error.

mod below;
mod edge;
#[doc(hidden)]
pub mod fuzzing;
#[cfg(all(test, feature = "shuttle"))]
mod interleavings;
pub mod logic;
mod metrics;
mod read;

pub use below::{Below, FileIdentity, Stamp};
pub use logic::catalog::{Census, File};
pub use metrics::{Counter, Metrics};

use edge::connection::{send_drop, send_put};
use edge::link::{self, LENDER, LENDERS, Link};
pub use logic::core::{Change, Strategy};
use logic::core::{Changing, Confused, Core, Outcome};
pub use logic::file::Left;
use logic::puts::{BATCH_PAGES, BATCHES_MAX};
use page::{ChecksumKey, FileKey, Version};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sync::{Condvar, Mutex};
use tap::{Eviction, EvictionSource, Positions};
use wire::ITEMS_MAX;
use wire::address::Address;

/// How long an evicted page may wait for a put buffer. Meanwhile the event ring takes what the kernel evicts.
const ROOM_WAIT: Duration = Duration::from_millis(50);

/// How long the put thread waits for events, hence the delay of noted drops.
const EVENT_WAIT: Duration = Duration::from_millis(100);

/// How long the put thread rests after it has found events, so that it is woken for many at once. At the highest speed of
/// reclaim, some 500 pages in this time, the ring has room for ten times as many.
const EVENT_REST: Duration = Duration::from_millis(1);

/// How long a put buffer may wait to become full. Its pages can be read meanwhile.
const FILL_WAIT: Duration = Duration::from_millis(5);

/// How a borrower is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the lender is; without one, everything is read from below.
    pub lender: Option<Address>,
    /// What happens to a page at the lender when it is read.
    pub strategy: Strategy,
    /// Connections for gets: as many as there are threads that read, within [`wire::SESSION_CONNECTIONS_MAX`].
    pub get_connections: usize,
    /// The session that a daemon before this one has left at the lender ([`Borrower::stop_for_successor`]).
    pub session: Option<Session>,
}

/// A session at the lender, as one daemon leaves it to the next. Whoever knows its name reaches its pages: it is a secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Session {
    /// The name.
    pub name: [u8; 16],
    /// What the checksums of its pages are keyed with.
    pub checksum_key: [u8; 32],
    /// The version to go on with. A lower one could name older bytes that the lender still has.
    pub next_version: Version,
    /// The lender's epoch: entries of it are valid again once the lender says that it has kept the session.
    pub epoch: u8,
}

impl std::fmt::Debug for Session {
    /// Without name and key, which must not get into a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("next_version", &self.next_version).finish_non_exhaustive()
    }
}

impl File {
    /// Where the file's changes stand. Take it before looking at the file below, for [`Borrower::observe`].
    pub fn moment(&self) -> u64 {
        self.state.lock().moment()
    }

    /// The kernel is about to be told to drop pages of the file. Buffered writes that it drops them under are found
    /// ([`ChangeGuard::is_overtaken`]).
    pub fn drop_begins(&self) {
        self.state.lock().drop_begins();
    }

    /// It has dropped them; as often as [`File::drop_begins`].
    pub fn drop_ended(&self) {
        self.state.lock().drop_ended();
    }

    /// The kernel is about to be told the file's size. If it is another than it knows, it drops pages by itself.
    pub fn tell_size(&self, size_bytes: u64) {
        self.state.lock().tell_size(size_bytes);
    }

    /// Whether the kernel caches bytes that somebody has changed beside the mount. If so, the caller has the kernel drop all it caches of
    /// the file, and says so with this number to [`File::kernel_dropped`].
    pub fn kernel_stale(&self) -> Option<u64> {
        self.state.lock().kernel_stale()
    }

    /// How the file is left to a daemon that takes over ([`Borrower::restore`]).
    pub fn left(&self) -> Left {
        self.state.lock().left()
    }

    /// The kernel has dropped all that it cached when [`File::kernel_stale`] said this number.
    pub fn kernel_dropped(&self, number: u64) {
        self.state.lock().kernel_dropped(number);
    }
}

/// The borrower.
pub struct Borrower {
    pub(crate) core: Core,
    pub(crate) link: Link,
    checksum_key: [u8; 32],
    config: Config,
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
    /// When its threads cannot be started, or the kernel has no random bytes.
    pub fn start(config: Config, source: Option<Box<dyn EvictionSource>>) -> io::Result<Arc<Borrower>> {
        let mut checksum_key = [0; 32];
        match &config.session {
            Some(session) => checksum_key = session.checksum_key,
            None => {
                rustix::rand::getrandom(&mut checksum_key, rustix::rand::GetRandomFlags::empty())?;
            }
        }
        let core = Core::new(
            LENDERS,
            (BATCHES_MAX, BATCH_PAGES),
            ChecksumKey::new(checksum_key),
            config.strategy,
            source.is_some(),
        );
        if let Some(session) = &config.session {
            core.catalog.continue_versions(session.next_version);
            core.catalog.lender_expect(LENDER, session.epoch);
        }
        let borrower = Arc::new(Borrower {
            core,
            checksum_key,
            link: Link::new(config.session.map(|session| session.name))?,
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

    /// Ends its threads and connections, and has the lender free its pages. Reads go on, from below.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.link.end();
        self.work.notify_all();
        drop(self.stopped.0.lock());
        self.stopped.1.notify_all();
        for thread in self.threads.get().map(|threads| std::mem::take(&mut *threads.lock())).unwrap_or_default() {
            let _ = thread.join();
        }
    }

    /// As [`Borrower::stop`], but the lender keeps the pages for its grace time, in which a successor may resume the session.
    pub fn stop_for_successor(&self) -> Session {
        self.link.leave();
        self.stop();
        let catalog = &self.core.catalog;
        Session {
            name: self.link.name(),
            checksum_key: self.checksum_key,
            next_version: catalog.version(),
            epoch: catalog.epoch(LENDER),
        }
    }

    /// The file of that identity, known from now on until [`Borrower::retire`]. Its pages may be known from before.
    pub fn adopt(&self, identity: FileIdentity) -> Arc<File> {
        self.core.catalog.adopt(identity)
    }

    /// A file that the kernel knows from a daemon before this one, under the key that it was given then, and as that daemon
    /// left it ([`File::kernel_stale`] if it is not known how). Before anything else is asked.
    pub fn restore(&self, identity: FileIdentity, key: FileKey, left: Left) -> Arc<File> {
        self.core.catalog.restore(identity, key, left)
    }

    /// Gives out no key below this one: a daemon before this one may have given those out, and the kernel may still know files by them.
    pub fn keys_from(&self, key: FileKey) {
        self.core.catalog.keys_from(key);
    }

    /// The kernel has forgotten the inode. If it was `deleted` below, its pages are dropped; else they stay known as long as
    /// there is room.
    pub fn retire(&self, file: &Arc<File>, deleted: bool) {
        self.core.catalog.retire(file, deleted);
    }

    /// Announces a change, before it is applied below; `before` is what the file looks like now.
    pub fn change<'a>(&'a self, file: &'a File, change: Change, before: Stamp) -> ChangeGuard<'a> {
        let changing = self.core.begin_change(file, change, before);
        ChangeGuard { borrower: self, file, changing: Some(changing) }
    }

    /// Compares the file with what we left; `moment` was taken before `now` was. If somebody changed it beside us, its remote
    /// pages are forgotten, and [`File::kernel_stale`] says so.
    pub fn observe(&self, file: &File, moment: u64, now: Stamp) {
        self.core.observe(file, moment, now);
    }

    /// The counters.
    pub fn metrics(&self) -> &Metrics {
        &self.core.metrics
    }

    /// What the catalog holds.
    pub fn census(&self) -> Census {
        self.core.catalog.census()
    }

    /// What the tap has seen, when there is one.
    pub fn tap_counters(&self) -> Option<tap::Counters> {
        self.positions.as_ref().map(|_| *self.tap_counters.lock())
    }

    /// Put messages that are being filled, wait to be sent, or wait for their answer.
    pub fn puts_under_way(&self) -> usize {
        self.core.queue(LENDER).lock().under_way()
    }

    /// Whether the lender is there.
    pub fn lender_is_up(&self) -> bool {
        self.core.catalog.place(LENDER).is_some()
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
        self.core.queue(LENDER).lock().has_any()
    }

    fn run_puts(&self) {
        while !self.stopping() {
            let mut puts = self.core.queue(LENDER).lock();
            if !puts.has_any() {
                self.work.wait_for(&mut puts, EVENT_WAIT);
            }
            drop(puts);
            self.send_puts(true);
            self.send_drops();
        }
    }

    fn evicted(&self, event: Eviction<'_>) {
        self.wait_for_room();
        if self.core.evicted(FileKey(event.generation), event.index, event.position, event.page).is_some() {
            self.send_puts(false);
        }
    }

    fn wait_for_room(&self) {
        let mut puts = self.core.queue(LENDER).lock();
        if !puts.has_room() && self.lender_is_up() {
            self.room.wait_while_for(&mut puts, |puts| !puts.has_room(), ROOM_WAIT);
        }
    }

    fn send_puts(&self, partial: bool) {
        while let Some((request, batch)) = self.core.next_put(LENDER, partial) {
            let sent = self.link.send(|stream| send_put(stream, request, batch.items(), batch.pages()));
            if sent.is_err() {
                drop(batch);
                return self.abandon_puts();
            }
            self.core.put_sent(batch.items().len());
        }
    }

    fn send_drops(&self) {
        let mut keys = Vec::new();
        loop {
            keys.clear();
            self.core.catalog.take_drops(ITEMS_MAX, &mut keys);
            if keys.is_empty() {
                return;
            }
            if self.link.send(|stream| send_drop(stream, &keys)).is_err() {
                // For when it is back with the pages.
                return keys.iter().for_each(|key| self.core.catalog.drop_at_lender(key.id(), key.version()));
            }
            self.core.metrics.drop_pages.add(keys.len() as u64);
        }
    }

    pub(crate) fn abandon_puts(&self) {
        self.core.abandon_puts(LENDER);
        self.room.notify_all();
    }

    pub(crate) fn puts_answered(&self, request: u64, statuses: &[u8]) -> io::Result<()> {
        let answered = self.core.puts_answered(LENDER, request, statuses);
        self.room.notify_all();
        answered.map_err(|Confused| io::Error::new(io::ErrorKind::InvalidData, "an answer to a put that was not made"))
    }
}

/// A change under way. Must end before the kernel gets its answer: by [`ChangeGuard::applied`], by [`ChangeGuard::failed`], or by being
/// dropped, which says that something else has happened than what was announced.
pub struct ChangeGuard<'a> {
    borrower: &'a Borrower,
    file: &'a File,
    changing: Option<Changing>,
}

impl ChangeGuard<'_> {
    /// Whether the kernel has cached older bytes behind this write, and must drop its pages.
    pub fn is_overtaken(&self) -> bool {
        self.changing.as_ref().is_some_and(Changing::is_overtaken)
    }

    /// The change was applied below as announced; `after` is what the file looks like now.
    pub fn applied(mut self, after: Stamp) {
        self.end(Outcome::Applied(after));
    }

    /// The change failed, wholly or in part, within what was announced; `after` is what the file looks like now.
    pub fn failed(mut self, after: Stamp) {
        self.end(Outcome::Failed(after));
    }

    fn end(&mut self, outcome: Outcome) {
        let Some(changing) = self.changing.take() else { return };
        let borrower = self.borrower;
        // The stream's position is read after the change was applied: every event of older content lies before it.
        borrower.core.end_change(self.file, changing, outcome, borrower.produced(), borrower.consumed());
    }
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.end(Outcome::Unknown);
    }
}
