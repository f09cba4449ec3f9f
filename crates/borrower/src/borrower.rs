//! [`Borrower`] joins logic and edge: the mount calls it for every READ out of the page cache, and
//! for every change.

use crate::backing::{FileIdentity, Stamp, Writers};
use crate::catalog::File;
use crate::catalog::entry::{Place, VERSION_MAX};
use crate::catalog::file::{Filter, Left};
use crate::change::ChangeGuard;
use crate::config::{Config, LeftLender, LenderAddress, Session};
use crate::core::{Change, Core, ProtocolError, Setup};
use crate::metrics::{Histogram, Metrics};
use crate::net::link::Link;
use crate::net::links::Links;
use crate::policy::gate;
use crate::policy::hedging::Hedges;
use crate::policy::latencies::Size;
use crate::put::cgroups::Resolver;
use crate::put::demoted::Demotion;
use crate::read::race::Racers;
use crate::under_way::{Disk, UnderWay};
use locks::{Mutex, spinning};
use page::seal::Sealing;
use page::{ChecksumKey, FileKey, Page, PageId};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tap::{Eviction, EvictionSource, Positions};
use wire::secure::Security;

/// How long an evicted page may wait for a put buffer. Meanwhile the event ring buffers further
/// evictions.
const ROOM_WAIT: Duration = Duration::from_millis(50);

/// How long the tap's thread waits for events.
const EVENT_WAIT: Duration = Duration::from_millis(100);

/// How long the tap's thread sleeps after it has found events, so that it wakes for many at once.
/// At the highest speed of reclaim, some 500 pages are evicted in this time; the ring has room for
/// ten times as many.
const EVENT_REST: Duration = Duration::from_millis(1);

/// The default of [`Config::bad_pages_max`]: more than occasional bit flips will ever cause, and
/// far too few attempts to guess a seal.
pub const BAD_PAGES_MAX: u64 = 1024;

/// How long no lender must have been usable before files are opened as if there were none. After a
/// shorter time, lent pages may become useful again.
const UNUSED_MAX: Duration = Duration::from_secs(60);

/// The use of the pool for a file that is being opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usefulness {
    /// Evicted pages may come back from a lender.
    Useful,
    /// There is no lender, or none was usable for a while: disconnected, or slower than the backing
    /// directory.
    NoLender,
    /// The file is read in long streams only, which are left to the disk.
    Streamed,
}

/// The borrower. See the crate's description.
pub struct Borrower {
    pub(crate) core: Core,
    pub(crate) links: Links,
    pub(crate) racers: Arc<Racers>,
    pub(crate) hedges: Hedges,
    pub(crate) polling: spinning::One,
    /// Whether READs are requested together.
    pub(crate) gathers: AtomicBool,
    pub(crate) disk: Disk,
    pub(crate) reads_below: UnderWay,
    pub(crate) exchanges: UnderWay,
    pub(crate) get_times: Histogram,
    pub(crate) backing_times: Histogram,
    pub(crate) checksum_key: [u8; 32],
    /// The key, or none, that connections begin with from now on.
    pub(crate) security: Mutex<Security>,
    pub(crate) config: Config,
    /// The thresholds of the gates of all lenders, present and future.
    pub(crate) thresholds: Mutex<gate::Config>,
    pub(crate) positions: Option<Arc<dyn Positions>>,
    pub(crate) tap_counters: Mutex<tap::Counters>,
    /// The reason why evictions are not seen any more.
    pub(crate) tap_failure: OnceLock<String>,
    /// Since when no lender has been usable.
    pub(crate) unused_since: Mutex<Option<Instant>>,
    /// When it was started.
    pub(crate) began: Instant,
    pub(crate) stop: AtomicBool,
    pub(crate) tap_thread: OnceLock<Mutex<Option<JoinHandle<()>>>>,
    pub(crate) resolver: Option<Mutex<Resolver>>,
}

impl Borrower {
    /// Starts a borrower. Without `source` evictions are not seen: the pool is populated on read,
    /// and every strategy is non-inclusive.
    ///
    /// # Errors
    /// If its threads cannot be started, or the kernel has no random bytes.
    pub fn start(config: Config, source: Option<Box<dyn EvictionSource>>) -> io::Result<Arc<Borrower>> {
        let mut checksum_key = [0; 32];
        match &config.session {
            Some(session) => checksum_key = session.checksum_key,
            None => {
                rustix::rand::getrandom(&mut checksum_key, rustix::rand::GetRandomFlags::empty())?;
            }
        }
        let sealing = match &config.security {
            Security::Keyed(_) => Sealing::aead(&checksum_key).ok_or(io::ErrorKind::Unsupported)?,
            Security::Trusting | Security::Local => Sealing::Checksum(ChecksumKey::new(checksum_key)),
        };
        let lenders = Place::LENDERS;
        let core = Core::new(Setup {
            filter: config.filter,
            entry_bytes_max: config.catalog_bytes_max,
            copy_hints: source.as_ref().and_then(|source| source.copy_hints()),
            demoted: config.has_guests.then(|| ChecksumKey::new(checksum_key)),
            ..Setup::new(lenders, sealing, config.strategy, source.is_some())
        });
        let resolver = config.cgroups.clone().map(|cgroups| Mutex::new(Resolver::new(cgroups, &core.catalog.groups)));
        let borrower = Arc::new(Borrower {
            core,
            resolver,
            links: Links::default(),
            racers: Arc::default(),
            hedges: Hedges::default(),
            polling: spinning::One::default(),
            gathers: true.into(),
            disk: Disk::default(),
            reads_below: UnderWay::default(),
            exchanges: UnderWay::default(),
            get_times: Histogram::default(),
            backing_times: Histogram::default(),
            checksum_key,
            positions: source.as_ref().map(|source| source.positions()),
            tap_counters: Mutex::default(),
            tap_failure: OnceLock::new(),
            unused_since: Mutex::new(Some(Instant::now())),
            began: Instant::now(),
            stop: AtomicBool::new(false),
            tap_thread: OnceLock::new(),
            thresholds: Mutex::new(config.gate.unwrap_or_default()),
            security: Mutex::new(config.security.clone()),
            config,
        });
        if let Some(session) = &borrower.config.session {
            borrower.core.catalog.continue_versions(session.next_version);
            for left in &session.lenders {
                borrower.core.catalog.lender_expect(left.number, left.epoch);
                borrower.links.add(&borrower, Some(left.number), |number| {
                    Link::new(number, left.lender.clone(), Some(left.name), *borrower.thresholds.lock())
                })?;
            }
        }
        if borrower.config.hedge {
            borrower.racers.start()?;
        }
        let lenders = borrower.config.lenders.clone();
        borrower.set_lenders(&lenders);
        if let Some(source) = source {
            let for_thread = borrower.clone();
            let thread =
                std::thread::Builder::new().name("puma-tap".into()).spawn(move || for_thread.run_tap(source))?;
            let _ = borrower.tap_thread.set(Mutex::new(Some(thread)));
        }
        Ok(borrower)
    }

    /// Replaces the list of lenders. Lenders that are not in the new list are left, with all their
    /// pages; new ones are used as soon as they are connected. Waits until the lenders that are
    /// left have been notified, or cannot be. At most [`Place::LENDERS`] lenders
    /// are used.
    pub fn set_lenders(self: &Arc<Self>, lenders: &[LenderAddress]) {
        if self.stopping() {
            return;
        }
        let too_many = self.links.set(self, lenders);
        if too_many > 0 {
            tracing::warn!("{too_many} lenders are not used: there are too many, or no threads for them");
        }
    }

    /// Sets the security with which connections begin from now on. Pages are still sealed according
    /// to [`Config::security`].
    pub fn set_security(&self, security: Security) {
        *self.security.lock() = security;
    }

    /// Returns the security with which a connection begins.
    pub(crate) fn security(&self) -> Security {
        self.security.lock().clone()
    }

    /// Sets the thresholds of the gates, if there are any ([`Config::gate`]).
    pub fn set_thresholds(&self, thresholds: gate::Config) {
        *self.thresholds.lock() = thresholds;
        self.links.all().iter().for_each(|link| link.set_thresholds(thresholds));
    }

    /// Sets whether pages that are read in a sequential stream stay with the disk from now on.
    pub fn set_filter(&self, filter: bool) {
        self.core.set_filter(filter);
    }

    /// Returns the status of each lender.
    pub fn lenders(&self) -> Vec<report::Link> {
        self.links.all().iter().map(|link| link.status(self)).collect()
    }

    /// Ends its threads and connections, and makes the lenders free its pages. Later reads come
    /// from the backing directory.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.links.stop(self);
        self.racers.stop();
        if let Some(thread) = self.tap_thread.get().and_then(|thread| thread.lock().take()) {
            let _ = thread.join();
        }
    }

    /// Stops as [`Borrower::stop`] does, but the lenders keep the pages for their grace time. In
    /// that time a successor may resume the sessions.
    pub fn stop_for_successor(&self) -> Session {
        let links = self.links.all();
        links.iter().for_each(|link| link.leave());
        self.stop();
        let catalog = &self.core.catalog;
        let left = |link: &Arc<Link>| LeftLender {
            lender: link.lender.clone(),
            number: link.number,
            epoch: catalog.epoch(link.number),
            name: link.name(),
        };
        Session {
            checksum_key: self.checksum_key,
            next_version: catalog.version(),
            lenders: links.iter().map(left).collect(),
        }
    }

    /// Returns the file of that identity, which is known until [`Borrower::retire`]. Its pages may
    /// be known from before.
    pub fn adopt(&self, identity: FileIdentity) -> Arc<File> {
        self.core.catalog.adopt(identity)
    }

    /// Adds a file that the kernel knows from an earlier daemon, with the key and the state that
    /// this daemon left. If the state is not known, [`File::kernel_stale`] reports stale pages.
    /// Must be called before any other method.
    pub fn restore(&self, identity: FileIdentity, key: FileKey, left: Left) -> Arc<File> {
        self.core.catalog.restore(identity, key, left)
    }

    /// Returns the key that the next file gets, unless a file has it. A successor continues from
    /// there ([`Borrower::keys_from`]).
    pub fn next_key(&self) -> FileKey {
        self.core.catalog.next_key()
    }

    /// Gives out no key below this one: an earlier daemon may have given those out, and the kernel
    /// may still know files by them.
    pub fn keys_from(&self, key: FileKey) {
        self.core.catalog.keys_from(key);
    }

    /// The kernel has forgotten the inode. If the backing file was `deleted`, its pages are
    /// dropped; else they stay known as long as there is room.
    pub fn retire(&self, file: &Arc<File>, deleted: bool) {
        self.core.catalog.retire(file, deleted);
    }

    /// A guest has evicted the page. If the page equals the backing file's, it waits for the kernel
    /// to read it.
    pub fn demote(&self, file: &File, index: u32, page: &Page) -> Demotion {
        self.core.demote(file, index, page)
    }

    /// Returns whether the backing file is known to hold these bytes.
    pub fn backing_file_has(&self, file: &File, index: u32, page: &Page) -> bool {
        self.core.backing_file_has(file, index, page)
    }

    /// Waits until the kernel has read these pages and has them in its cache, for at most `limit`.
    /// Returns whether it has.
    pub fn wait_for_demoted(&self, file: &File, indexes: &[u32], limit: Duration) -> bool {
        let ids: Vec<_> = indexes.iter().map(|index| PageId { file: file.key(), index: *index }).collect();
        self.core.demoted().is_none_or(|demoted| demoted.wait_until_answered(&ids, limit))
    }

    /// Removes a page that waits for the kernel. Returns whether the kernel had not asked for it.
    pub fn withdraw_demoted(&self, file: &File, index: u32) -> bool {
        let id = PageId { file: file.key(), index };
        self.core.demoted().is_some_and(|demoted| demoted.withdraw(id))
    }

    /// Returns the use of the pool for a file that is being opened.
    pub fn usefulness(&self, file: &File) -> Usefulness {
        let is_unused = |since: &Option<Instant>| since.is_some_and(|since| since.elapsed() >= UNUSED_MAX);
        if self.config.has_guests {
            Usefulness::Useful
        } else if !self.config.expects_lenders && self.links.all().is_empty() || is_unused(&self.unused_since.lock()) {
            Usefulness::NoLender
        } else {
            let state = file.state.lock();
            let is_lent = state.streams_fit() && self.core.stream_room.lending().is_any();
            if state.is_streamed() && !is_lent { Usefulness::Streamed } else { Usefulness::Useful }
        }
    }

    /// The backing file may have changed without a new stamp: the kernel has accessed it by itself,
    /// or a writeback has failed. All entries of the file are invalidated, and
    /// [`File::kernel_stale`] reports stale pages.
    pub fn suspect(&self, file: &File) {
        self.core.suspect(file);
    }

    /// Lenders were connected, lost, or found too slow.
    pub(crate) fn lenders_changed(&self) {
        self.core.lenders_changed();
        self.core.stream_room.forget_lenders();
        let mut since = self.unused_since.lock();
        if self.core.catalog.usable() != 0 {
            *since = None;
        } else {
            since.get_or_insert_with(Instant::now);
        }
    }

    /// Announces a change, before it is applied to the backing file; `before` is its stamp now.
    pub fn change<'a>(&'a self, file: &'a File, change: Change, before: Stamp) -> ChangeGuard<'a> {
        let changing = self.core.begin_change(file, change, before);
        ChangeGuard { borrower: self, file, changing: Some(changing) }
    }

    /// Compares the file with the recorded stamp. `moment` was taken before `now`, and `writers`
    /// was checked after it. If the file was changed externally, or may have been changed while it
    /// was read, its remote pages are forgotten, and [`File::kernel_stale`] reports stale pages.
    pub fn observe(&self, file: &File, moment: u64, now: Stamp, writers: Writers) {
        self.core.observe(file, moment, now, writers);
    }

    /// Returns the counters.
    pub fn metrics(&self) -> &Metrics {
        &self.core.metrics
    }

    /// Returns the times of gets, and of reads of the backing directory.
    pub fn latencies(&self) -> report::Latencies {
        report::Latencies { get: self.get_times.read(), backing: self.backing_times.read() }
    }

    /// Returns the catalog's totals.
    pub fn census(&self) -> report::Catalog {
        self.core.catalog.census()
    }

    /// Returns a text about the treatment of streams that fit.
    pub fn streams(&self) -> &'static str {
        if self.core.filter() == Filter::Off { "lent" } else { self.core.stream_room.lending().text() }
    }

    /// Returns the estimated hit ratios of pools of other sizes.
    pub fn curve(&self) -> report::Curve {
        self.core.curve.status()
    }

    /// Returns the tap's counters, if there is a tap.
    pub fn tap_counters(&self) -> Option<report::Tap> {
        self.positions.as_ref()?;
        let tap::Counters { captured, omitted, ring_full, invalidated, unreadable } = *self.tap_counters.lock();
        Some(report::Tap {
            captured_pages: captured,
            skipped_pages: omitted,
            ring_full_pages: ring_full,
            invalidated_pages: invalidated,
            unreadable_pages: unreadable,
        })
    }

    /// Returns the status of the control groups, if they are distinguished.
    pub fn cgroups(&self) -> Option<Vec<report::Cgroup>> {
        self.resolver.as_ref().map(|resolver| resolver.lock().status(&self.core.catalog.groups))
    }

    /// Returns the number of Put messages that are being filled, wait to be sent, or wait for their
    /// answer.
    pub fn puts_under_way(&self) -> usize {
        self.links.all().iter().map(|link| self.core.queue(link.number).lock().under_way()).sum()
    }

    /// Returns whether any lender is connected, used or not.
    pub fn lender_is_up(&self) -> bool {
        self.links.all().iter().any(|link| self.core.catalog.is_up(link.number))
    }

    /// Sets whether pages are put at lenders from now on; at first they are. Gets from lenders
    /// continue in any case. No page is put after a failure of the tap, unless
    /// [`Config::may_populate_on_read`] is set.
    pub fn set_borrowing(&self, borrowing: bool) {
        let may_lend = self.config.may_populate_on_read || self.tap_failure.get().is_none();
        self.core.set_borrowing(borrowing && may_lend);
    }

    /// Returns the reason why evictions are not seen any more and the consequence, if the tap has
    /// failed.
    pub fn tap_failure(&self) -> Option<&str> {
        self.tap_failure.get().map(String::as_str)
    }

    /// Returns whether pages are put at lenders.
    pub fn is_borrowing(&self) -> bool {
        self.core.is_borrowing()
    }

    /// Returns whether the kernel's evictions are seen.
    pub fn sees_evictions(&self) -> bool {
        self.core.sees_evictions()
    }

    /// Returns the recent average time of small reads of the backing directory, if known, and the
    /// time after which a get is late. Both are in microseconds.
    pub fn disk_us(&self) -> (Option<u64>, u64) {
        (self.disk.mean_us(Size::Small).map(|us| us as u64), self.disk.late().as_micros() as u64)
    }

    /// Returns the produced and the consumed position of the event stream. If events are not
    /// processed any more, both are the same, so nothing waits for them.
    pub(crate) fn positions(&self) -> (u64, u64) {
        match &self.positions {
            Some(positions) if self.core.sees_evictions() => (positions.produced(), positions.consumed()),
            _ => (0, 0),
        }
    }

    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(crate) fn run_tap(&self, mut source: Box<dyn EvictionSource>) {
        while !self.stopping() {
            let events = match source.poll(EVENT_WAIT, &mut |event| self.evicted(event)) {
                Ok(events) => events,
                Err(error) => {
                    drop(source);
                    self.tap_failed(&error);
                    break;
                }
            };
            self.reclaim_catalog();
            self.look_at_versions();
            if events > 0 {
                std::thread::sleep(EVENT_REST);
            }
            *self.tap_counters.lock() = source.counters();
        }
        // The threads that serve READs never reclaim: this thread does.
        while !self.stopping() {
            std::thread::sleep(EVENT_WAIT);
            self.reclaim_catalog();
        }
    }

    /// Evictions are not seen from now on. So lenders must not give away the pages that they
    /// answer.
    pub(crate) fn tap_failed(&self, error: &io::Error) {
        self.core.evictions_end();
        let instead = match self.config.may_populate_on_read {
            true => "pages are lent when they are read instead",
            false => "nothing more is lent",
        };
        let text =
            format!("evictions are not seen any more ({error}): {instead}, until `pumapool upgrade` tries it again");
        tracing::error!("{text}");
        let _ = self.tap_failure.set(text);
        self.set_borrowing(self.is_borrowing());
    }

    pub(crate) fn evicted(&self, event: Eviction<'_>) {
        let buffers = self.core.buffers();
        let returns = buffers.returns();
        if !self.core.has_room() {
            buffers.wait(returns, ROOM_WAIT);
        }
        let groups = &self.core.catalog.groups;
        let group =
            self.resolver.as_ref().map_or(0, |resolver| resolver.lock().group_of(event.cgroup, Instant::now, groups));
        self.core.evicted(FileKey(event.generation), event.index, event.position, event.page, group);
    }

    pub(crate) fn reclaim_catalog(&self) {
        let pages = self.core.catalog.reclaim();
        if pages > 0 {
            tracing::info!(pages, "the catalog is full: forgetting the files that were not used for longest");
            self.core.metrics.catalog_reclaimed_pages.add(pages);
        }
    }

    pub(crate) fn look_at_versions(&self) {
        static TOLD: Once = Once::new();
        if self.core.catalog.version() > VERSION_MAX {
            TOLD.call_once(|| {
                tracing::error!("all versions of pages were used up: no page is lent any more; unmount, then mount")
            });
        }
    }

    pub(crate) fn puts_answered(&self, lender: u8, request: u64, statuses: &[u8]) -> io::Result<()> {
        let answered = self.core.puts_answered(lender, request, statuses);
        answered
            .map_err(|ProtocolError| io::Error::new(io::ErrorKind::InvalidData, "an answer to a put that was not made"))
    }
}
