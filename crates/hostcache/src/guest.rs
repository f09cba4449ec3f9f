//! The guest's side: sends its host the pages that its kernel evicts from one file system, and
//! reports the pages that were read into its page cache.
//!
//! One thread does everything. A failure loses nothing: a page that does not reach the host is read
//! from the disk as usual. Without a host there is no tap, so evictions cost nothing.

use crate::extents::Place;
use crate::volume::{InodeKey, Volume};
use hashbrown::HashMap;
use page::Page;
use parking_lot::{Condvar, Mutex};
use report::GuestCounts;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tap::{Added, AddedTap, BpfTap, Eviction, EvictionSource, Target};
use wire::address::{Address, Stream};
use wire::frames::{ConnectionError, FrameReader, Outgoing, send};
use wire::peers::{self, Joined};
use wire::secure::{Channel, Security};
use wire::{DEMOTE_ITEMS_MAX, DemotedPage, DemotionOutcome, Header, ITEMS_MAX, Kind, PageSpan};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// Evicted pages that are processed together: 1 MiB.
const BATCH_PAGES: usize = 256;
/// Sent pages that the host has not answered yet. More wait in the tap's ring, and when that is
/// full they are left out.
const UNANSWERED_PAGES_MAX: usize = 1024;
/// Pages that were read and not reported to the host yet. More are not reported: the host keeps its
/// copies until its kernel needs the room.
const HELD_PAGES_MAX: usize = 1 << 16;
/// Time that a READ of a page may take until the host may drop its copy.
const READ_TIME: Duration = Duration::from_millis(250);
/// How long the guest waits for an eviction.
const POLL: Duration = Duration::from_millis(50);
/// Time limit of the host for the handshake, for an answer, and for receiving data.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Pause between two attempts to reach the host: the first, and the longest.
const RETRY: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);

macro_rules! statistics {
    ($($name:ident,)*) => {
        /// Counters of a guest since its start: those of [`GuestCounts`].
        #[derive(Default)]
        pub struct Statistics {
            connected: AtomicBool,
            $(
                #[doc = concat!("Counts [`GuestCounts::", stringify!($name), "`].")]
                pub $name: AtomicU64,
            )*
        }

        impl Statistics {
            /// Whether the host is connected.
            pub fn is_connected(&self) -> bool {
                self.connected.load(Relaxed)
            }

            /// The present values.
            pub fn counts(&self) -> GuestCounts {
                GuestCounts { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

statistics! {
    connects,
    evicted_pages,
    ring_full_pages,
    sent_pages,
    stored_pages,
    cached_pages,
    unknown_pages,
    differing_pages,
    missed_pages,
    deleted_pages,
    unsettled_pages,
    unaligned_pages,
    held_pages,
}

/// The configuration of a guest.
pub struct Config {
    /// The address of the host.
    pub host: Address,
    /// The guest's own key.
    pub security: Security,
    /// Whether the guest reports pages that were read, so that the host drops its copies.
    pub tells_held: bool,
    /// Memory for evicted pages that wait to be sent, in bytes, a power of two.
    pub ring_bytes: usize,
}

/// Ends a guest.
#[derive(Default)]
pub struct Stop {
    is_wanted: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Stop {
    /// Makes [`run`] return.
    pub fn request(&self) {
        self.is_wanted.store(true, Relaxed);
        let _lock = self.lock.lock();
        self.changed.notify_all();
    }

    fn is_wanted(&self) -> bool {
        self.is_wanted.load(Relaxed)
    }

    /// Waits for this time, or until the stop is requested.
    fn wait(&self, time: Duration) {
        let mut lock = self.lock.lock();
        self.changed.wait_while_for(&mut lock, |()| !self.is_wanted(), time);
    }
}

/// Serves the host until the stop is requested, and reconnects whenever the connection was lost.
pub fn run(volume: &mut Volume, config: &Config, statistics: &Statistics, stop: &Stop) {
    let mut pause = RETRY;
    while !stop.is_wanted() {
        let served = serve(volume, config, statistics, stop);
        let was_there = statistics.connected.swap(false, Relaxed);
        match served {
            Ok(()) => return,
            Err(error) => tracing::warn!(host = %config.host, "no host: {error}; trying again"),
        }
        stop.wait(pause);
        // A host that was connected before is tried often.
        pause = if was_there { RETRY } else { (pause * 2).min(RETRY_MAX) };
    }
}

fn failed(what: impl std::fmt::Display) -> io::Error {
    io::Error::other(what.to_string())
}

fn serve(volume: &mut Volume, config: &Config, statistics: &Statistics, stop: &Stop) -> io::Result<()> {
    let link = Link::connect(config)?;
    let target = Target { device: volume.device(), ..Target::default() };
    let (mut tap, mut added) = match config.tells_held {
        true => BpfTap::load_with_added(target, config.ring_bytes).map(|(tap, added)| (tap, Some(added))),
        false => BpfTap::load(target, config.ring_bytes).map(|tap| (tap, None)),
    }
    .map_err(failed)?;
    // From here on no eviction is missed.
    statistics.connects.fetch_add(1, Relaxed);
    statistics.connected.store(true, Relaxed);
    tracing::info!(host = %config.host, "host found: it is given what is evicted");
    let mut sender = Sender { volume, statistics, link, batch: Vec::new(), bytes: Vec::new(), held: Held::default() };
    let (mut captured_before, mut full_before) = (0, 0);
    while !stop.is_wanted() {
        // First the pages that were read: evicted ones are mostly older.
        if let Some(added) = &mut added {
            sender.tell_held(added)?;
        }
        let mut failure = None;
        tap.poll(POLL, &mut |eviction| {
            if failure.is_none() {
                failure = sender.evicted(&eviction).err();
            }
        })?;
        if let Some(error) = failure {
            return Err(error);
        }
        sender.flush()?;
        sender.link.receive(statistics, sender.volume, usize::MAX)?;
        let counters = tap.counters();
        statistics.evicted_pages.fetch_add(counters.captured - captured_before, Relaxed);
        statistics.ring_full_pages.fetch_add(counters.ring_full - full_before, Relaxed);
        (captured_before, full_before) = (counters.captured, counters.ring_full);
    }
    Ok(())
}

/// An evicted page, whose bytes are in that place of the batch.
struct Evicted {
    key: InodeKey,
    index: u64,
    place: usize,
}

struct Sender<'a> {
    volume: &'a mut Volume,
    statistics: &'a Statistics,
    link: Link,
    batch: Vec<Evicted>,
    /// The bytes, in the order of arrival.
    bytes: Vec<Page>,
    held: Held,
}

impl Sender<'_> {
    fn evicted(&mut self, eviction: &Eviction<'_>) -> io::Result<()> {
        let key = InodeKey { inode: eviction.inode, generation: eviction.generation };
        self.held.evicted(key, eviction.index);
        // The tap was given no hints.
        let Some(page) = eviction.page else { return Ok(()) };
        self.batch.push(Evicted { key, index: eviction.index, place: self.bytes.len() });
        self.bytes.push(*page);
        if self.batch.len() < BATCH_PAGES { Ok(()) } else { self.flush() }
    }

    /// Sends the evicted pages.
    fn flush(&mut self) -> io::Result<()> {
        let mut batch = std::mem::take(&mut self.batch);
        // By file; if a page was evicted twice, the later one last.
        batch.sort_by_key(|evicted| (evicted.key, evicted.index));
        let statistics = self.statistics;
        for of_file in batch.chunk_by(|one, next| one.key == next.key) {
            let indexes: Vec<u64> = of_file.iter().map(|evicted| evicted.index).collect();
            let places = match self.volume.places(of_file[0].key, &indexes) {
                Ok(Some(places)) => places,
                Ok(None) => {
                    statistics.deleted_pages.fetch_add(of_file.len() as u64, Relaxed);
                    continue;
                }
                // A file that cannot be read does not stop the others.
                Err(error) => {
                    tracing::debug!(inode = of_file[0].key.inode, %error, "cannot find a file's place on the disk");
                    statistics.unsettled_pages.fetch_add(of_file.len() as u64, Relaxed);
                    continue;
                }
            };
            for (evicted, place) in of_file.iter().zip(places) {
                match place {
                    Place::At(index) => self.link.demote(evicted.key, index, &self.bytes[evicted.place])?,
                    Place::Unsettled => drop(statistics.unsettled_pages.fetch_add(1, Relaxed)),
                    Place::Unaligned => drop(statistics.unaligned_pages.fetch_add(1, Relaxed)),
                }
            }
        }
        let sent = self.link.send_demoted()?;
        statistics.sent_pages.fetch_add(sent as u64, Relaxed);
        self.link.receive(statistics, self.volume, UNANSWERED_PAGES_MAX)?;
        batch.clear();
        self.batch = batch;
        self.bytes.clear();
        Ok(())
    }

    /// Reports pages that were read a while ago, and are still cached.
    fn tell_held(&mut self, added: &mut AddedTap) -> io::Result<()> {
        let now = Instant::now();
        added.take(&mut |added| self.held.added(now, &added))?;
        let mut read = self.held.read_before(now.checked_sub(READ_TIME).unwrap_or(now));
        read.sort_unstable();
        let mut spans: Vec<PageSpan> = Vec::new();
        for of_file in read.chunk_by(|one, next| one.0 == next.0) {
            let indexes: Vec<u64> = of_file.iter().map(|(_, index)| *index).collect();
            let Ok(Some(places)) = self.volume.places(of_file[0].0, &indexes) else { continue };
            for place in places {
                let Place::At(index) = place else { continue };
                match spans.last_mut() {
                    Some(last) if last.first.get() + u64::from(last.pages.get()) == index => {
                        last.pages.set(last.pages.get() + 1);
                    }
                    _ => spans.push(PageSpan { first: U64::new(index), pages: U32::new(1) }),
                }
            }
        }
        let pages: u64 = spans.iter().map(|span| u64::from(span.pages.get())).sum();
        self.link.tell_held(&spans)?;
        self.statistics.held_pages.fetch_add(pages, Relaxed);
        Ok(())
    }
}

/// Pages that were added to the page cache recently, and not evicted since.
#[derive(Default)]
struct Held {
    /// In the order of arrival.
    order: VecDeque<(Instant, InodeKey, u64)>,
    /// When each page was added last.
    since: HashMap<(InodeKey, u64), Instant>,
}

impl Held {
    fn added(&mut self, now: Instant, added: &Added) {
        let key = InodeKey { inode: added.inode, generation: added.generation };
        for index in (added.index..).take(added.pages as usize) {
            if self.order.len() >= HELD_PAGES_MAX {
                return;
            }
            self.since.insert((key, index), now);
            self.order.push_back((now, key, index));
        }
    }

    fn evicted(&mut self, key: InodeKey, index: u64) {
        self.since.remove(&(key, index));
    }

    /// Removes and returns the pages that were added before.
    fn read_before(&mut self, before: Instant) -> Vec<(InodeKey, u64)> {
        let mut read = Vec::new();
        while let Some((came, key, index)) = self.order.front().copied().filter(|(came, ..)| *came <= before) {
            self.order.pop_front();
            if self.since.get(&(key, index)) == Some(&came) {
                self.since.remove(&(key, index));
                read.push((key, index));
            }
        }
        read
    }
}

/// The connection to the host.
struct Link {
    stream: Stream,
    channel: Channel,
    reader: FrameReader,
    outgoing: Outgoing,
    /// Pages of the frame that is being made, and their files.
    items: Vec<u8>,
    keys: Vec<InodeKey>,
    request: u64,
    /// Frames that the host has not answered.
    unanswered: VecDeque<(u64, Vec<InodeKey>)>,
    unanswered_pages: usize,
    sent: usize,
}

impl Link {
    fn connect(config: &Config) -> io::Result<Link> {
        let Joined { stream, channel, reader } =
            peers::join(&config.host, &config.security, wire::ROLE_GUEST, ANSWER_LIMIT, POLL)?;
        Ok(Link {
            stream,
            channel,
            reader,
            outgoing: Outgoing::default(),
            items: Vec::new(),
            keys: Vec::new(),
            request: 0,
            unanswered: VecDeque::new(),
            unanswered_pages: 0,
            sent: 0,
        })
    }

    fn send(&mut self) -> io::Result<()> {
        let sent = send(&self.stream, self.outgoing.bytes(), ANSWER_LIMIT).map_err(failed);
        self.outgoing.clear();
        sent
    }

    /// Adds a page to the next frame.
    fn demote(&mut self, key: InodeKey, index: u64, page: &Page) -> io::Result<()> {
        self.items.extend_from_slice(DemotedPage { index: U64::new(index), bytes: *page }.as_bytes());
        self.keys.push(key);
        if self.keys.len() == DEMOTE_ITEMS_MAX { self.end_frame() } else { Ok(()) }
    }

    fn end_frame(&mut self) -> io::Result<()> {
        if self.keys.is_empty() {
            return Ok(());
        }
        let header = Header::new(Kind::Demote, self.keys.len(), self.items.len(), self.request);
        self.outgoing.begin(&self.channel).extend_from_slice(&self.items);
        self.outgoing.end(&self.channel, &header).map_err(failed)?;
        self.items.clear();
        let keys = std::mem::take(&mut self.keys);
        self.unanswered_pages += keys.len();
        self.sent += keys.len();
        self.unanswered.push_back((self.request, keys));
        self.request += 1;
        self.send()
    }

    /// Sends the rest. Returns how many pages were sent since the last call.
    fn send_demoted(&mut self) -> io::Result<usize> {
        self.end_frame()?;
        Ok(std::mem::take(&mut self.sent))
    }

    fn tell_held(&mut self, spans: &[PageSpan]) -> io::Result<()> {
        for spans in spans.chunks(ITEMS_MAX) {
            let header = Header::new(Kind::Held, spans.len(), size_of_val(spans), 0);
            self.outgoing.begin(&self.channel).extend_from_slice(spans.as_bytes());
            self.outgoing.end(&self.channel, &header).map_err(failed)?;
            self.send()?;
        }
        Ok(())
    }

    /// Receives the available answers, and waits until no more than so many pages are unanswered.
    fn receive(&mut self, statistics: &Statistics, volume: &mut Volume, most: usize) -> io::Result<()> {
        let mut deadline = Instant::now() + ANSWER_LIMIT;
        loop {
            match self.reader.look(|kind| kind == Kind::Demoted).map_err(failed)? {
                Some(found) => {
                    // The host may be slow, but it is alive.
                    deadline = Instant::now() + ANSWER_LIMIT;
                    let frame = self.reader.take(found).map_err(failed)?;
                    let answered = self.unanswered.pop_front();
                    let Some((_, keys)) = answered.filter(|(request, keys)| {
                        *request == frame.header.request.get() && keys.len() == frame.body.len()
                    }) else {
                        return Err(failed("an answer to what was not sent"));
                    };
                    self.unanswered_pages -= keys.len();
                    for (key, byte) in keys.iter().zip(frame.body) {
                        let counter = match DemotionOutcome::from_wire(*byte) {
                            Some(DemotionOutcome::Stored) => &statistics.stored_pages,
                            Some(DemotionOutcome::Cached) => &statistics.cached_pages,
                            Some(DemotionOutcome::Unknown) => &statistics.unknown_pages,
                            Some(DemotionOutcome::Differs) => {
                                volume.forget(*key);
                                &statistics.differing_pages
                            }
                            Some(DemotionOutcome::Missed) => &statistics.missed_pages,
                            None => return Err(failed("an answer that makes no sense")),
                        };
                        counter.fetch_add(1, Relaxed);
                    }
                }
                None if self.unanswered_pages > most => {
                    if Instant::now() >= deadline {
                        return Err(failed("it does not answer"));
                    }
                    self.reader.fill(&self.stream, rustix::net::RecvFlags::empty()).map_err(failed)?;
                }
                None => match self.reader.fill(&self.stream, rustix::net::RecvFlags::DONTWAIT) {
                    Ok(true) => {}
                    Ok(false) => return Ok(()),
                    Err(ConnectionError::Closed) => return Err(failed("it closed the connection")),
                    Err(broken) => return Err(failed(broken)),
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_notified_of_pages_that_stay() {
        let mut held = Held::default();
        let key = InodeKey { inode: 7, generation: 1 };
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let added = |index, pages| Added { generation: 1, inode: 7, index, pages };
        held.added(at(0), &added(4, 3));
        held.added(at(10), &added(9, 1));
        held.evicted(key, 5);
        assert_eq!(held.read_before(at(5)), [(key, 4), (key, 6)]);
        // Evicted, and read again: it counts from then on.
        held.evicted(key, 9);
        held.added(at(20), &added(9, 1));
        assert_eq!(held.read_before(at(15)), []);
        assert_eq!(held.read_before(at(20)), [(key, 9)]);
        assert!(held.order.is_empty() && held.since.is_empty());
        held.added(at(30), &added(0, u32::MAX));
        assert_eq!((held.order.len(), held.since.len()), (HELD_PAGES_MAX, HELD_PAGES_MAX));
    }
}
