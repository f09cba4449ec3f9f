//! The host's side: receives the pages that guests evict, and puts them into the page cache of
//! their images.
//!
//! A connection belongs to one guest and has a thread of its own. It can change nothing of any
//! image except that guest's. Its costs are bounded: guests are identified, each has one
//! connection, and one frame at a time is processed.

use mount::Mount;
use mount::images::{Image, Placing};
use page::Page;
use parking_lot::{Condvar, Mutex};
use report::HostGuest;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::RecvFlags;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::Scope;
use std::time::{Duration, Instant};
use wire::address::{Address, Stream};
use wire::confined::{self, Work, confine};
use wire::frames::{ConnectionError, FrameReader, Outgoing, send};
use wire::key::PoolKey;
use wire::listener::Listener;
use wire::peers::{self, IdentifiedPeer};
use wire::pre_authentication::PreAuthenticationLimiter;
use wire::rate_limited_log::RateLimitedLog;
use wire::secure::Channel;
use wire::{DemotedPage, DemotionOutcome, Header, Kind, PageSpan};
use zerocopy::FromBytes;

/// Time limit of a guest for the rest of a frame, and for receiving an answer.
const FRAME_LIMIT: Duration = Duration::from_secs(10);
/// Prefix of the names of threads that open images through the mount: when the daemon is killed,
/// they may wait for an answer that only a successor can give.
pub const THREADS: &str = "puma-guest";
/// The maximum number of handshakes in progress. When one more begins, the oldest is ended.
const UNAUTHENTICATED_MAX: usize = 16;
/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long [`Host::stop`] waits until the listener is closed: its thread is woken, and has nothing
/// else to do.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// The maximum number of pages in a report of read pages; more are ignored.
const HELD_PAGES_MAX: u32 = 1 << 16;

/// The first bytes of disk images that are not raw.
const FORMATS: [(&[u8], &str); 5] =
    [(b"QFI\xfb", "qcow2"), (b"KDMV", "VMDK"), (b"conectix", "VHD"), (b"vhdxfile", "VHDX"), (b"QED\0", "QED")];

/// A guest and its disk.
#[derive(Clone)]
pub struct Guest {
    /// Its image, relative to the mountpoint.
    pub image: PathBuf,
    /// Its key. `None`: any peer that can connect is this guest, and there is no other.
    pub key: Option<PoolKey>,
}

/// The configuration of a host.
pub struct Config {
    /// Its guests.
    pub guests: Vec<Guest>,
    /// How pages get into the page cache.
    pub placing: Placing,
    /// Whether copies stay when the guest has read them.
    pub keeps: bool,
    /// The maximum number of one guest's evicted pages in the page cache.
    pub pages_max: Option<u64>,
}

/// The reason why a host cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// An image does not exist, or cannot be read.
    #[error("cannot read the image {image}: {source}; name it as it is called in the folder of images")]
    NoImage {
        /// Its name.
        image: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// Places on the guest's disk differ from those in the image.
    #[error(
        "{image} is a {format} image, whose bytes are not where the guest's disk has them: convert it, qemu-img convert -O raw"
    )]
    Format {
        /// Its name.
        image: PathBuf,
        /// The format.
        format: &'static str,
    },
    /// Without keys the guests cannot be identified.
    #[error("several guests without keys cannot be told apart: give each a key of its own, --guest IMAGE=KEYFILE")]
    Ambiguous,
    /// Two guests have the same image, or the same key.
    #[error("{image}: another guest has the same image or the same key; each has its own")]
    Twice {
        /// The image of the second one.
        image: PathBuf,
    },
    /// The threads cannot be started or stopped.
    #[error("cannot start: {0}; see the system's limits")]
    Start(io::Error),
}

macro_rules! statistics {
    ($($name:ident,)*) => {
        /// Counters of the results for one guest's pages: those of [`HostGuest`].
        #[derive(Default)]
        struct Statistics { $($name: AtomicU64,)* }

        impl Statistics {
            fn status(&self, image: String, problem: Option<String>, connected: bool) -> HostGuest {
                HostGuest { image, problem, connected, $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

statistics! {
    placed_pages,
    connects,
    demoted_pages,
    stored_pages,
    cached_pages,
    unknown_pages,
    differing_pages,
    missed_pages,
    held_pages,
    hit_pages,
    limited_pages,
}

struct GuestRecord {
    guest: Guest,
    /// The reason why it is not served. The guest can write the beginning of its image, so a
    /// problem there must not stop the others.
    problem: Option<Problem>,
    statistics: Statistics,
    /// A guest that connects and disconnects all the time must not fill the log.
    log: RateLimitedLog,
    /// If there is a limit: the pages in the page cache, oldest first.
    placed: Mutex<Placed>,
    /// Its connection, with a number, so that the end of one connection does not remove another
    /// one.
    connection: Mutex<Option<(u64, Arc<Stream>)>>,
}

struct Shared {
    mount: Arc<Mount>,
    known: Vec<GuestRecord>,
    config: Config,
    limiter: PreAuthenticationLimiter,
    connections: AtomicU64,
    stopping: AtomicBool,
}

/// The listening socket for guests.
enum Listening {
    /// No thread serves it yet.
    Idle(Listener),
    /// A thread serves it.
    Served,
    /// It is closed, and its file removed.
    Closed,
}

/// A host that listens.
pub struct Host {
    shared: Shared,
    /// The listener, until it is served.
    listener: Mutex<Listening>,
    /// Signalled when it is closed.
    closed: Condvar,
    address: Address,
    /// A pipe; writing to it stops the host.
    stop: (OwnedFd, OwnedFd),
}

impl Host {
    /// Checks the images. Guests wait until [`Host::run`]. Guests whose image cannot be used are
    /// not served.
    ///
    /// # Errors
    /// Fails if no image can be used, or guests cannot be distinguished.
    pub fn new(mount: Arc<Mount>, mut config: Config, listener: Listener) -> Result<Host, Problem> {
        let guests = std::mem::take(&mut config.guests);
        if guests.len() > 1 && guests.iter().any(|guest| guest.key.is_none()) {
            return Err(Problem::Ambiguous);
        }
        let keys: Vec<Option<&PoolKey>> = guests.iter().map(|guest| guest.key.as_ref()).collect();
        let same_image = |nth: &usize| guests[..*nth].iter().any(|other| other.image == guests[*nth].image);
        if let Some(nth) = peers::check_keys(&keys).err().or_else(|| (0..guests.len()).find(same_image)) {
            return Err(Problem::Twice { image: guests[nth].image.clone() });
        }
        let known = |guest| GuestRecord {
            problem: check_format(&mount, &guest).err(),
            guest,
            statistics: Statistics::default(),
            log: RateLimitedLog::new(),
            placed: Mutex::default(),
            connection: Mutex::default(),
        };
        let mut known: Vec<GuestRecord> = guests.into_iter().map(known).collect();
        if known.iter().all(|known| known.problem.is_some())
            && let Some(problem) = known.pop().and_then(|known| known.problem)
        {
            return Err(problem);
        }
        for problem in known.iter().filter_map(|known| known.problem.as_ref()) {
            tracing::error!("{problem}; this guest is not served");
        }
        let stop =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|errno| Problem::Start(errno.into()))?;
        let shared = Shared {
            mount,
            known,
            config,
            limiter: PreAuthenticationLimiter::new(UNAUTHENTICATED_MAX),
            connections: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
        };
        let address = listener.address().clone();
        let listener = Mutex::new(Listening::Idle(listener));
        Ok(Host { shared, listener, closed: Condvar::new(), address, stop })
    }

    /// The address, with the port that the kernel chose.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The status of each guest.
    pub fn status(&self) -> Vec<HostGuest> {
        let status = |known: &GuestRecord| {
            let image = known.guest.image.to_string_lossy().into_owned();
            let problem = known.problem.as_ref().map(Problem::to_string);
            known.statistics.status(image, problem, known.connection.lock().is_some())
        };
        self.shared.known.iter().map(status).collect()
    }

    /// Makes [`Host::run`] return, and ends all connections. When it returns, the listener is
    /// closed, and the socket's file is removed.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Relaxed);
        let _ = rustix::io::write(&self.stop.1, b"s");
        let mut listener = self.listener.lock();
        match *listener {
            Listening::Idle(_) => *listener = Listening::Closed,
            Listening::Served => drop(self.closed.wait_while_for(
                &mut listener,
                |listener| matches!(listener, Listening::Served),
                CLOSE_LIMIT,
            )),
            Listening::Closed => {}
        }
        drop(listener);
        for known in &self.shared.known {
            if let Some((_, stream)) = &*known.connection.lock() {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Serves guests until it is stopped, and all their connections have ended: then no connection
    /// has an image open. Call it once.
    pub fn run(&self) {
        let listener = {
            let mut listening = self.listener.lock();
            if !matches!(*listening, Listening::Idle(_)) {
                return;
            }
            std::mem::replace(&mut *listening, Listening::Served)
        };
        std::thread::scope(|connections| {
            if let Listening::Idle(listener) = &listener {
                self.accept(listener, connections);
            }
            drop(listener);
            *self.listener.lock() = Listening::Closed;
            self.closed.notify_all();
        });
    }

    fn accept<'scope>(&'scope self, listener: &Listener, connections: &'scope Scope<'scope, '_>) {
        while !self.shared.stopping.load(Relaxed) {
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.stop.0, PollFlags::IN)];
            if poll(&mut fds, None).is_err() || fds[0].revents().is_empty() {
                continue;
            }
            match listener.accept() {
                Ok(stream) => self.shared.start_connection(stream, connections),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::debug!(%error, "cannot accept a connection");
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }
}

/// Only a raw image has the guest's bytes at the places of the guest's disk.
fn check_format(mount: &Mount, guest: &Guest) -> Result<(), Problem> {
    let no_image = |source| Problem::NoImage { image: guest.image.clone(), source };
    mount.image(&guest.image).map_err(no_image)?;
    let mut first = [0; 8];
    let file = std::fs::File::open(mount.mountpoint().join(&guest.image)).map_err(no_image)?;
    let read = std::os::unix::fs::FileExt::read_at(&file, &mut first, 0).map_err(no_image)?;
    match FORMATS.iter().find(|(magic, _)| first[..read].starts_with(magic)) {
        Some((_, format)) => Err(Problem::Format { image: guest.image.clone(), format }),
        None => Ok(()),
    }
}

impl Shared {
    fn start_connection<'scope>(&'scope self, stream: Stream, connections: &'scope Scope<'scope, '_>) {
        let stream = Arc::new(stream);
        let Some(place) = self.limiter.enter(&stream) else { return }; // Closed without a message, which would cost more.
        let connection = move || {
            // The images that this thread opens may be another user's.
            confine(Work::Placing, confined::FILES);
            let identified = self.handshake(&stream);
            drop(place);
            let peer = stream.peer();
            match identified {
                Ok(IdentifiedPeer { nth, channel, reader }) => self.serve(nth, &stream, channel, reader),
                Err(broken) => tracing::debug!(peer, %broken, "not a guest"),
            }
            let _ = stream.shutdown(Shutdown::Both);
        };
        // Without a thread the connection is closed.
        let _ = std::thread::Builder::new().name(THREADS.into()).spawn_scoped(connections, connection);
    }

    /// Identifies the guest.
    fn handshake(&self, stream: &Stream) -> Result<IdentifiedPeer, ConnectionError> {
        let keys: Vec<Option<&PoolKey>> = self.known.iter().map(|known| known.guest.key.as_ref()).collect();
        let peer = peers::handshake(stream, &keys, wire::ROLE_GUEST, "pumapool host-cache guest")?;
        if let Some(problem) = &self.known[peer.nth].problem {
            return Err(peers::refuse(stream, &peer.channel, wire::REFUSED_BUSY, &problem.to_string()));
        }
        peers::welcome(stream, &peer.channel)?;
        Ok(peer)
    }

    fn serve(&self, nth: usize, stream: &Arc<Stream>, channel: Channel, reader: FrameReader) {
        let known = &self.known[nth];
        let number = self.connections.fetch_add(1, Relaxed);
        // The newest connection is the guest's: the one before may be from a guest that was killed.
        if let Some((_, before)) = known.connection.lock().replace((number, stream.clone())) {
            let _ = before.shutdown(Shutdown::Both);
        }
        if self.stopping.load(Relaxed) {
            return;
        }
        known.statistics.connects.fetch_add(1, Relaxed);
        let image = known.guest.image.display();
        if let Some(suppressed) = known.log.next() {
            tracing::info!(%image, peer = stream.peer(), suppressed, "guest connected");
        }
        let mut session = Session { shared: self, known, stream, channel, reader };
        // A bug ends this guest's connection, and nothing else.
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| session.run()))
            .unwrap_or(Err(ConnectionError::Bug));
        if let Some(suppressed) = known.log.next() {
            tracing::info!(%image, suppressed, "guest gone: {}", ended.err().unwrap_or(ConnectionError::Closed));
        }
        let mut connection = known.connection.lock();
        if connection.as_ref().is_some_and(|(current, _)| *current == number) {
            *connection = None;
        }
    }
}

struct Session<'a> {
    shared: &'a Shared,
    known: &'a GuestRecord,
    stream: &'a Stream,
    channel: Channel,
    reader: FrameReader,
}

impl Session<'_> {
    fn run(&mut self) -> Result<(), ConnectionError> {
        let mut outgoing = Outgoing::default();
        let problem = ConnectionError::Io;
        // The image is open as long as there is work on it.
        let mut opened = None;
        while !self.shared.stopping.load(Relaxed) {
            let may_come = |kind| kind == Kind::Demote || kind == Kind::Held;
            let Some(found) = self.reader.look(may_come)? else {
                let placed_pages = opened.take().map(|image: Image| image.placed_pages());
                placed_pages.inspect(|pages| self.known.statistics.placed_pages.store(*pages, Relaxed));
                self.wait_for_frame()?;
                continue;
            };
            let frame = self.reader.take(found)?;
            let image = match &opened {
                Some(image) => image,
                None => opened.insert(self.shared.mount.image(&self.known.guest.image).map_err(problem)?),
            };
            match frame.kind {
                Kind::Held => {
                    let Ok(spans) = <[PageSpan]>::ref_from_bytes(frame.body) else {
                        return Err(ConnectionError::Unexpected(frame.kind));
                    };
                    held(self.shared, self.known, image, spans).map_err(problem)?;
                }
                _ => {
                    let Ok(pages) = <[DemotedPage]>::ref_from_bytes(frame.body) else {
                        return Err(ConnectionError::Unexpected(frame.kind));
                    };
                    let outcomes = demoted(self.shared, self.known, image, pages).map_err(problem)?;
                    let header = Header::new(Kind::Demoted, outcomes.len(), outcomes.len(), frame.header.request.get());
                    outgoing.begin(&self.channel).extend(outcomes.iter().map(|outcome| *outcome as u8));
                    outgoing.end(&self.channel, &header)?;
                    send(self.stream, outgoing.bytes(), FRAME_LIMIT)?;
                    outgoing.clear();
                }
            }
        }
        Ok(())
    }

    /// Receives more bytes. Between two frames there is no time limit.
    fn wait_for_frame(&mut self) -> Result<(), ConnectionError> {
        if self.reader.is_empty() {
            let mut fds = [PollFd::new(self.stream, PollFlags::IN)];
            let _ = poll(&mut fds, None);
        }
        let deadline = Instant::now() + FRAME_LIMIT;
        while !self.reader.fill(self.stream, RecvFlags::empty())? {
            if Instant::now() >= deadline {
                return Err(ConnectionError::Stuck);
            }
        }
        Ok(())
    }
}

/// Processes pages that the guest has evicted. Answers with the result for each.
fn demoted(
    shared: &Shared,
    known: &GuestRecord,
    image: &Image,
    pages: &[DemotedPage],
) -> io::Result<Vec<DemotionOutcome>> {
    let placed = &mut known.placed.lock();
    // In the order of the disk; if a page comes twice, the later one counts.
    let mut order: Vec<usize> = (0..pages.len()).collect();
    order.sort_by_key(|at| pages[*at].index.get());
    let mut outcomes = vec![DemotionOutcome::Missed; pages.len()];
    let mut chosen: Vec<(u32, &Page)> = Vec::with_capacity(pages.len());
    let mut chosen_at = Vec::with_capacity(pages.len());
    for of_page in order.chunk_by(|one, other| pages[*one].index == pages[*other].index) {
        let Some(last) = of_page.last() else { continue };
        match u32::try_from(pages[*last].index.get()) {
            Ok(index) if index < u32::MAX => {
                chosen.push((index, &pages[*last].bytes));
                chosen_at.push(*last);
            }
            _ => outcomes[*last] = DemotionOutcome::Unknown, // no image is as long
        }
    }
    make_room(shared, known, image, chosen.len() as u64, placed)?;
    for ((at, outcome), (index, _)) in chosen_at.iter().zip(image.place(&chosen, shared.config.placing)?).zip(&chosen) {
        outcomes[*at] = outcome;
        if outcome == DemotionOutcome::Stored && shared.config.pages_max.is_some() {
            placed.add(*index);
        }
    }
    let statistics = &known.statistics;
    statistics.demoted_pages.fetch_add(pages.len() as u64, Relaxed);
    for outcome in &outcomes {
        let counter = match outcome {
            DemotionOutcome::Stored => &statistics.stored_pages,
            DemotionOutcome::Cached => &statistics.cached_pages,
            DemotionOutcome::Unknown => &statistics.unknown_pages,
            DemotionOutcome::Differs => &statistics.differing_pages,
            DemotionOutcome::Missed => &statistics.missed_pages,
        };
        counter.fetch_add(1, Relaxed);
    }
    Ok(outcomes)
}

/// Pages in the order in which they were placed, each at its last time.
#[derive(Default)]
struct Placed {
    order: VecDeque<(u32, u64)>,
    /// The last time that each page was placed.
    last: HashMap<u32, u64>,
    count: u64,
}

impl Placed {
    fn add(&mut self, index: u32) {
        self.count += 1;
        self.order.push_back((index, self.count));
        self.last.insert(index, self.count);
    }

    /// Removes and returns the page that was placed before all others.
    fn take_oldest(&mut self) -> Option<u32> {
        while let Some((index, at)) = self.order.pop_front() {
            // Unless it was placed again since.
            if self.last.get(&index) == Some(&at) {
                self.last.remove(&index);
                return Some(index);
            }
        }
        None
    }
}

/// Drops the oldest pages, if the guest has reached its limit.
fn make_room(shared: &Shared, known: &GuestRecord, image: &Image, pages: u64, placed: &mut Placed) -> io::Result<()> {
    let Some(pages_max) = shared.config.pages_max else { return Ok(()) };
    let room = pages_max.saturating_sub(pages);
    // The list also contains pages that the guest has read, and pages that were placed again since:
    // it has a limit of its own.
    while image.placed_pages() > room || placed.order.len() as u64 > pages_max.saturating_mul(2) {
        let Some(oldest) = placed.take_oldest() else { break };
        if image.take_back(oldest)? {
            known.statistics.limited_pages.fetch_add(1, Relaxed);
        }
    }
    Ok(())
}

/// The guest has read these pages.
fn held(shared: &Shared, known: &GuestRecord, image: &Image, spans: &[PageSpan]) -> io::Result<()> {
    let (image_pages, mut left) = (image.page_count()?, HELD_PAGES_MAX);
    for span in spans {
        let Ok(first) = u32::try_from(span.first.get()) else { continue };
        let end = first.saturating_add(span.pages.get().min(left)).min(image_pages);
        let pages = first.min(end)..end;
        if pages.is_empty() || shared.stopping.load(Relaxed) {
            continue;
        }
        left -= pages.len() as u32;
        let (count, keeps) = (pages.len() as u64, shared.config.keeps);
        let hits = if keeps { image.read_by_guest(pages) } else { image.let_go(pages)? };
        known.statistics.held_pages.fetch_add(count, Relaxed);
        known.statistics.hit_pages.fetch_add(hits, Relaxed);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_placed_again_is_the_newest() {
        let mut placed = Placed::default();
        [1, 2, 1, 3, 1].into_iter().for_each(|index| placed.add(index));
        assert_eq!(std::array::from_fn(|_| placed.take_oldest()), [Some(2), Some(3), Some(1), None]);
    }

    #[test]
    fn every_problem_is_one_line() {
        let image = || PathBuf::from("disk.img");
        let problems = [
            Problem::NoImage { image: image(), source: io::ErrorKind::NotFound.into() },
            Problem::Format { image: image(), format: "qcow2" },
            Problem::Ambiguous,
            Problem::Twice { image: image() },
            Problem::Start(io::ErrorKind::OutOfMemory.into()),
        ];
        for problem in problems {
            let text = problem.to_string();
            assert!(!text.contains('\n') && !text.contains("  ") && text.len() > 40, "{text:?}");
        }
    }
}
