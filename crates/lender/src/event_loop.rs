//! The event loops: a few threads that serve all connections after their handshake.
//!
//! An event loop is a thread with connections of its own and an epoll. It serves one whole frame of
//! a connection at a time, and answers at once. It never waits for a peer. It stores bytes that a
//! socket does not take, and sends them when the socket is ready. It reads no more from a
//! connection until the peer has taken its answer, and until the connection has waited for its
//! share (`rate_limit`). So a slow, blocked or hostile peer delays itself only, and only for a
//! limited time: a frame must be complete within [`RECEIVE_LIMIT`] after its first byte, and an
//! answer must leave within [`SEND_LIMIT`].
//!
//! Gets and puts have separate event loops, so that a get never waits behind a megabyte of another
//! borrower's pages.
//!
//! Must never happen here: waiting for anything except the epoll and, for some microseconds, a
//! lock; a panic over one connection that ends the others (except while the store is locked, see
//! `whole.rs`).

use crate::connection::Connection;
use crate::entry::Entry;
use crate::handshake::note_end;
use crate::in_flight_put::InFlightPut;
use crate::shared::Shared;
use locks::Mutex;
use locks::spinning::{AdaptiveSpin, SPIN_MAX};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use wire::Kind;
use wire::address::Stream;
use wire::confined::{self, Work, confine};
use wire::frames::{ConnectionError, FrameReader, Outgoing, send_some};

/// The maximum number of event loops of each kind, if there are twice as many processors. One core
/// moves some gigabytes a second, so these fill the fastest networks of lenders.
const EVENT_LOOPS_MAX: usize = 4;
/// Time limit for a whole frame, from its first byte on: 1 MiB at 1 Mbit/s.
const RECEIVE_LIMIT: Duration = Duration::from_secs(10);
/// Time between two pings of a connection that do not wait for its session's share. Borrowers ping
/// twice a second.
const PING_SPARED_INTERVAL: Duration = Duration::from_millis(100);
/// Time limit for an answer to leave. A borrower has given the page up long before.
pub const SEND_LIMIT: Duration = Duration::from_secs(5);
/// Silence on a main connection after which notices are sent.
const MAIN_IDLE: Duration = Duration::from_millis(200);
/// Silence of all main connections of an event loop after which put pages are marked reclaimable:
/// soon, but not after each put while more arrive.
const MARK_IDLE: Duration = Duration::from_millis(1);
/// Connections that are served before the epoll is asked again.
const EVENTS_MAX: usize = 64;
/// Bytes of a receive buffer: the part of the longest frame before its pages, and more than a small
/// frame with its pages. Bytes beyond it go directly into the store.
const BUFFER_BYTES: usize = 16 << 10;
/// Buffers that an event loop keeps for the next frames. Most frames arrive whole, so one buffer is
/// used again and again.
const SPARE_BUFFERS_MAX: usize = 4;
/// Larger buffers are freed this long after their last use. If they are still needed, they are made
/// again: one page fault for each of their pages, once in that time.
const LARGE_BUFFERS_KEPT: Duration = Duration::from_secs(1);

/// Time that a borrower needs for an answer before its next request, for each KiB, and the maximum.
const BUSY_PER_KIB: Duration = Duration::from_micros(1);
const BUSY_MAX: Duration = Duration::from_micros(500);

/// A wait that only checks.
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The epoll's key of the inbox, in place of a connection's number.
const INBOX: u64 = u64::MAX;

/// All event loops of a lender.
pub struct EventLoops {
    gets: Vec<Arc<Inbox>>,
    mains: Vec<Arc<Inbox>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The state of an event loop that other threads share.
struct Inbox {
    arrived: Mutex<Vec<LoopConnection>>,
    /// Readable when a connection has arrived, or the loop is to end.
    event: OwnedFd,
    /// Connections that the loop has, or that were sent to it.
    count: AtomicUsize,
    /// The loop ends with its last connection.
    ends: AtomicBool,
}

impl EventLoops {
    /// Starts the event loops.
    pub fn start(shared: &Arc<Shared>) -> io::Result<EventLoops> {
        let mut event_loops = EventLoops { gets: Vec::new(), mains: Vec::new(), threads: Mutex::default() };
        let processors = thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..(processors / 2).clamp(1, EVENT_LOOPS_MAX) {
            for (name, inboxes) in [("lender-gets", &mut event_loops.gets), ("lender-mains", &mut event_loops.mains)] {
                let event_loop = EventLoop::new(shared)?;
                let inbox = Arc::clone(&event_loop.inbox);
                event_loops.threads.lock().push(thread::Builder::new().name(name.into()).spawn(move || {
                    confine(Work::Serving, confined::NOTHING);
                    event_loop.run();
                })?);
                inboxes.push(inbox);
            }
        }
        Ok(event_loops)
    }

    /// Passes the connection to the event loop with the fewest connections.
    pub fn take(&self, connection: LoopConnection) {
        let inboxes = if connection.handler.is_main() { &self.mains } else { &self.gets };
        if let Some(inbox) = inboxes.iter().min_by_key(|inbox| inbox.count.load(Ordering::Relaxed)) {
            inbox.count.fetch_add(1, Ordering::Relaxed);
            inbox.arrived.lock().push(connection);
            inbox.wake();
        }
    }

    /// Waits until all connections have ended, which the caller has requested before, and then the
    /// loops.
    pub fn end(&self) {
        for inbox in self.gets.iter().chain(&self.mains) {
            inbox.ends.store(true, Ordering::Release);
            inbox.wake();
        }
        for thread in std::mem::take(&mut *self.threads.lock()) {
            if thread.join().is_err() {
                tracing::error!("a thread that served connections has failed");
            }
        }
    }
}

impl Drop for EventLoops {
    fn drop(&mut self) {
        self.end();
    }
}

impl Inbox {
    fn wake(&self) {
        // The write fails only by overflow, and then the loop is awake.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

/// A connection of an event loop.
pub struct LoopConnection {
    stream: Arc<Stream>,
    handler: Connection,
    reader: FrameReader,
    /// The Put that has begun, and whose pages are arriving.
    in_flight_put: Option<InFlightPut>,
    /// The answer that the socket has not taken yet.
    unsent: Option<Unsent>,
    /// The session has used more than its share.
    pause: Option<Pause>,
    /// The last ping that did not wait for the session's share.
    spared: Option<Instant>,
    /// The time when the frame that has begun must be complete.
    frame_due: Option<Instant>,
    /// The time when a main connection will have been silent long enough to check for notices.
    idle_at: Instant,
    /// The events that the epoll reports.
    armed: EventFlags,
    /// Whether it is in [`EventLoop::ready`].
    queued: bool,
    entry: Entry,
}

struct Unsent {
    bytes: Vec<u8>,
    sent: usize,
    due: Instant,
}

struct Pause {
    begun: Instant,
    until: Instant,
}

/// Buffers that the connections of an event loop share.
#[derive(Default)]
struct Scratch {
    /// The last one was used last, so it is in the processor's caches.
    spare_buffers: Vec<Vec<u8>>,
    out: Outgoing,
    /// Bytes of answers since the loop last waited for requests.
    sent_bytes: usize,
    /// Pages were put that are not marked reclaimable yet.
    unmarked: bool,
    /// The time when large buffers are freed.
    shrink_at: Option<Instant>,
}

impl Scratch {
    fn buffer(&mut self) -> Vec<u8> {
        self.spare_buffers.pop().unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES))
    }

    fn take_back(&mut self, buffer: Vec<u8>, now: Instant) {
        if buffer.capacity().max(self.out.capacity()) > BUFFER_BYTES {
            self.shrink_at.get_or_insert(now + LARGE_BUFFERS_KEPT);
        }
        // The first buffer, from the handshake, is smaller.
        if buffer.capacity() >= BUFFER_BYTES && self.spare_buffers.len() < SPARE_BUFFERS_MAX {
            self.spare_buffers.push(buffer);
        }
    }

    /// How much longer than usual the loop may poll for the next request.
    fn take_busy(&mut self) -> Duration {
        (BUSY_PER_KIB * (std::mem::take(&mut self.sent_bytes) / 1024) as u32).min(BUSY_MAX)
    }

    fn shrink(&mut self) {
        (self.spare_buffers, self.out, self.shrink_at) = (Vec::new(), Outgoing::default(), None);
    }
}

impl LoopConnection {
    /// A connection after its handshake, with the bytes that were received after its Hello.
    pub fn new(stream: Arc<Stream>, entry: Entry, handler: Connection, mut reader: FrameReader) -> LoopConnection {
        reader.leave_pages();
        let (in_flight_put, unsent, pause, spared, frame_due) = (None, None, None, None, None);
        let (idle_at, armed, queued) = (Instant::now() + MAIN_IDLE, EventFlags::IN, false);
        LoopConnection {
            stream,
            handler,
            reader,
            in_flight_put,
            unsent,
            pause,
            spared,
            frame_due,
            idle_at,
            armed,
            queued,
            entry,
        }
    }

    /// The events to wait for. The epoll always reports the end of a connection in both directions.
    fn interest(&self) -> EventFlags {
        match (&self.unsent, &self.pause) {
            (Some(_), _) => EventFlags::OUT,
            (None, Some(_)) => EventFlags::empty(),
            (None, None) => EventFlags::IN,
        }
    }

    /// The time when something has to be done even without an event.
    fn due(&self) -> Option<Instant> {
        let idle_at = self.handler.is_main().then_some(self.idle_at);
        match (&self.unsent, &self.pause) {
            (Some(unsent), _) => Some(unsent.due),
            (None, Some(pause)) => Some(pause.until),
            (None, None) => self.frame_due.or(idle_at),
        }
    }

    /// Handles an event of the epoll.
    fn on_event(&mut self, flags: EventFlags, now: Instant, scratch: &mut Scratch) -> Result<(), ConnectionError> {
        if self.unsent.is_some() {
            self.flush(scratch)
        } else if self.pause.is_some() {
            // The loop does not wait for a peer that has disconnected; it serves the frames that
            // the peer has sent before.
            if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                self.end_pause();
            }
            Ok(())
        } else {
            self.serve(now, scratch)
        }
    }

    /// Handles the time of [`LoopConnection::due`].
    fn on_due(&mut self, now: Instant, scratch: &mut Scratch) -> Result<(), ConnectionError> {
        if self.unsent.is_some() {
            return Err(ConnectionError::Stuck);
        }
        if self.pause.is_some() {
            self.end_pause();
            return Ok(());
        }
        if self.frame_due.is_some() {
            return Err(ConnectionError::Stuck);
        }
        self.handler.begin_serving();
        scratch.out.clear();
        let pushed = self.handler.push_lost(&mut scratch.out)?;
        // There may be more notices, but other connections are served in between.
        self.idle_at = if pushed { now } else { now + MAIN_IDLE };
        self.send(now, scratch)?;
        self.handler.charge();
        Ok(())
    }

    /// Serves one frame, if there is one.
    fn serve(&mut self, now: Instant, scratch: &mut Scratch) -> Result<(), ConnectionError> {
        if self.in_flight_put.is_none() && self.reader.has_no_buffer() {
            self.reader.give_buffer(scratch.buffer());
        }
        let served = self.serve_frame(now, scratch);
        if let Some(buffer) = self.reader.take_buffer() {
            scratch.take_back(buffer, now);
        }
        served
    }

    fn serve_frame(&mut self, now: Instant, scratch: &mut Scratch) -> Result<(), ConnectionError> {
        self.handler.begin_serving();
        scratch.out.clear();
        let dealt_with = match self.in_flight_put {
            Some(_) => self.receive_pages(now, scratch)?,
            None => self.receive_frame(now, scratch)?,
        };
        let Some(kind) = dealt_with else {
            self.handler.end_serving(0);
            if self.in_flight_put.is_some() || !self.reader.is_empty() {
                self.frame_due.get_or_insert(now + RECEIVE_LIMIT);
            }
            return Ok(());
        };
        scratch.unmarked |= kind == Kind::Put;
        (self.frame_due, self.idle_at) = (None, now + MAIN_IDLE);
        self.send(now, scratch)?;
        let wait = self.handler.charge();
        if !wait.is_zero() && !self.is_spared(kind, now) {
            let begun = Instant::now();
            self.pause = Some(Pause { begun, until: begun + wait });
        }
        Ok(())
    }

    /// Whether a frame is exempt from waiting for the session's share. A ping is: the borrower
    /// checks with it whether the lender is alive. But a flood of pings waits.
    fn is_spared(&mut self, kind: Kind, now: Instant) -> bool {
        let is_due = self.spared.is_none_or(|spared| now.duration_since(spared) >= PING_SPARED_INTERVAL);
        let is_spared = kind == Kind::Ping && is_due;
        if is_spared {
            self.spared = Some(now);
        }
        is_spared
    }

    /// Receives a frame, or its next part. Returns its kind, if it is complete and was served.
    fn receive_frame(&mut self, now: Instant, scratch: &mut Scratch) -> Result<Option<Kind>, ConnectionError> {
        let LoopConnection { handler, reader, .. } = self;
        let mut found = reader.look(|kind| handler.may_come(kind))?;
        if found.is_none() && reader.fill(&self.stream, RecvFlags::DONTWAIT)? {
            found = reader.look(|kind| handler.may_come(kind))?;
        }
        if let Some(found) = found {
            let frame = reader.take(found)?;
            let kind = frame.kind;
            handler.answer(&frame, now, &mut scratch.out)?;
            return Ok(Some(kind));
        }
        let Some(head) = reader.take_head()? else { return Ok(None) };
        let mut put = handler.begin_put(&head, now)?;
        put.pages.take(reader.take_rest());
        self.in_flight_put = Some(put);
        self.receive_pages(now, scratch)
    }

    /// Receives pages into the store. The result is that of [`LoopConnection::receive_frame`].
    fn receive_pages(&mut self, now: Instant, scratch: &mut Scratch) -> Result<Option<Kind>, ConnectionError> {
        let Some(put) = &mut self.in_flight_put else { return Ok(None) };
        match put.pages.receive(&self.stream) {
            Ok(0) => return Err(ConnectionError::Truncated),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(ConnectionError::Io(error)),
        }
        let complete = self.in_flight_put.take_if(|put| put.pages.is_complete());
        let Some(put) = complete else { return Ok(None) };
        self.handler.end_put(put, now, &mut scratch.out)?;
        Ok(Some(Kind::Put))
    }

    /// Sends the answer of a frame, or stores the part that the socket does not take.
    fn send(&mut self, now: Instant, scratch: &mut Scratch) -> Result<(), ConnectionError> {
        let bytes = scratch.out.bytes();
        let byte_count = bytes.len();
        let sent = if bytes.is_empty() { 0 } else { send_some(&self.stream, bytes)? };
        if sent < byte_count {
            self.unsent = Some(Unsent { bytes: scratch.out.take(), sent, due: now + SEND_LIMIT });
        }
        self.handler.end_serving(byte_count);
        scratch.sent_bytes += byte_count;
        Ok(())
    }

    /// Continues to send.
    fn flush(&mut self, scratch: &mut Scratch) -> Result<(), ConnectionError> {
        let Some(unsent) = &mut self.unsent else { return Ok(()) };
        self.handler.begin_serving();
        unsent.sent += send_some(&self.stream, &unsent.bytes[unsent.sent..])?;
        if unsent.sent == unsent.bytes.len() {
            scratch.out.clear();
            scratch.out.give(self.unsent.take().map_or_else(Vec::new, |unsent| unsent.bytes));
        }
        self.handler.end_serving(0);
        Ok(())
    }

    fn end_pause(&mut self) {
        if let Some(pause) = self.pause.take() {
            self.handler.note_waited(pause.begun.elapsed());
        }
    }
}

/// One of the threads.
pub struct EventLoop {
    shared: Arc<Shared>,
    inbox: Arc<Inbox>,
    epoll: OwnedFd,
    connections: Vec<Option<Box<LoopConnection>>>,
    /// Unused numbers of `connections`.
    vacant: Vec<usize>,
    /// Connections with more received bytes than the frame that was served. The epoll does not
    /// report these.
    ready: VecDeque<usize>,
    scratch: Scratch,
    /// For waiting for the next events.
    spin: AdaptiveSpin,
    /// No connection is due before.
    next_due: Option<Instant>,
}

impl EventLoop {
    fn new(shared: &Arc<Shared>) -> io::Result<EventLoop> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &event, EventData::new_u64(INBOX), EventFlags::IN)?;
        let (count, ends) = (AtomicUsize::new(0), AtomicBool::new(false));
        Ok(EventLoop {
            shared: Arc::clone(shared),
            inbox: Arc::new(Inbox { arrived: Mutex::default(), event, count, ends }),
            epoll,
            connections: Vec::new(),
            vacant: Vec::new(),
            ready: VecDeque::new(),
            scratch: Scratch::default(),
            // Requests come from other machines, or at least from other groups.
            spin: AdaptiveSpin::for_others(),
            next_due: None,
        })
    }

    /// Serves one connection in this thread until it ends.
    pub fn serve_alone(shared: &Arc<Shared>, connection: LoopConnection) -> io::Result<()> {
        let mut event_loop = EventLoop::new(shared)?;
        event_loop.inbox.ends.store(true, Ordering::Release);
        event_loop.inbox.count.store(1, Ordering::Relaxed);
        event_loop.adopt(connection);
        event_loop.run();
        Ok(())
    }

    fn run(mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS_MAX);
        let mut now = Instant::now();
        // No connection is sent here any more when the loop is to end.
        while !(self.inbox.ends.load(Ordering::Acquire) && self.inbox.count.load(Ordering::Relaxed) == 0) {
            let timeout = self.timeout(now).and_then(|timeout| Timespec::try_from(timeout).ok());
            events.clear();
            let mut look = |timeout: Option<&Timespec>| {
                let looked = epoll::wait(&self.epoll, spare_capacity(&mut events), timeout);
                (looked != Ok(0)).then_some(looked)
            };
            // If processor time is limited, none is spent on polling.
            let is_limited = self.shared.rate_limiter.ask(|rate_limiter| rate_limiter.wants_cpu()) == Some(true);
            let polled = if self.ready.is_empty() && !is_limited {
                self.spin.poll(SPIN_MAX + self.scratch.take_busy(), || look(Some(&NOW)))
            } else {
                None
            };
            let looked = polled.or_else(|| look(timeout.as_ref()));
            match looked.unwrap_or(Ok(0)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot wait for connections");
                    thread::sleep(MAIN_IDLE);
                }
            }
            now = Instant::now();
            if events.is_empty() && self.ready.is_empty() && std::mem::take(&mut self.scratch.unmarked) {
                self.shared.store.lock().mark_reclaimable();
            }
            for event in events.drain(..) {
                let (flags, number) = (event.flags, event.data.u64());
                match number {
                    INBOX => self.welcome(),
                    _ => self.dispatch(number as usize, |connection, scratch| connection.on_event(flags, now, scratch)),
                }
            }
            // Each of them once.
            for _ in 0..self.ready.len() {
                let Some(number) = self.ready.pop_front() else { break };
                let queued =
                    self.connections[number].as_mut().is_some_and(|connection| std::mem::take(&mut connection.queued));
                if queued {
                    self.dispatch(number, |connection, scratch| match connection.interest() {
                        EventFlags::IN => connection.serve(now, scratch),
                        _ => Ok(()),
                    });
                }
            }
            if self.next_due.is_some_and(|due| due <= now) {
                self.look(now);
            }
            if self.scratch.shrink_at.is_some_and(|at| at <= now) {
                self.scratch.shrink();
            }
        }
    }

    fn timeout(&self, now: Instant) -> Option<Duration> {
        if !self.ready.is_empty() {
            return Some(Duration::ZERO);
        }
        let due = [self.next_due, self.scratch.shrink_at].into_iter().flatten().min();
        let timeout = due.map(|due| due.saturating_duration_since(now));
        if self.scratch.unmarked { Some(timeout.map_or(MARK_IDLE, |timeout| timeout.min(MARK_IDLE))) } else { timeout }
    }

    /// Takes over the connections that have arrived.
    fn welcome(&mut self) {
        let _ = rustix::io::read(&self.inbox.event, &mut [0; 8]);
        let arrived = std::mem::take(&mut *self.inbox.arrived.lock());
        arrived.into_iter().for_each(|connection| self.adopt(connection));
    }

    fn adopt(&mut self, connection: LoopConnection) {
        let number = self.vacant.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let added = epoll::add(&self.epoll, &*connection.stream, EventData::new_u64(number as u64), connection.armed);
        self.connections[number] = Some(Box::new(connection));
        self.dispatch(number, |_, _| added.map_err(|error| ConnectionError::Io(error.into())));
    }

    /// Serves the connections that are due.
    fn look(&mut self, now: Instant) {
        self.next_due = None;
        for number in 0..self.connections.len() {
            let Some(due) = self.connections[number].as_ref().and_then(|connection| connection.due()) else { continue };
            if due <= now {
                self.dispatch(number, |connection, scratch| connection.on_due(now, scratch));
            } else {
                self.next_due = Some(self.next_due.map_or(due, |next| next.min(due)));
            }
        }
    }

    /// Runs `serve` on a connection, and ends the connection if that fails.
    fn dispatch(
        &mut self,
        number: usize,
        serve: impl FnOnce(&mut LoopConnection, &mut Scratch) -> Result<(), ConnectionError>,
    ) {
        let Some(connection) = self.connections[number].as_mut() else { return };
        let scratch = &mut self.scratch;
        let done = catch_unwind(AssertUnwindSafe(|| serve(connection, scratch))).unwrap_or(Err(ConnectionError::Bug));
        if let Err(broken) = done.and_then(|()| self.rearm(number)) {
            self.end(number, &broken);
        }
    }

    /// Updates the epoll and the due time of a connection.
    fn rearm(&mut self, number: usize) -> Result<(), ConnectionError> {
        let Some(connection) = self.connections[number].as_mut() else { return Ok(()) };
        let interest = connection.interest();
        if interest != connection.armed {
            let data = EventData::new_u64(number as u64);
            epoll::modify(&self.epoll, &*connection.stream, data, interest)
                .map_err(|error| ConnectionError::Io(error.into()))?;
            connection.armed = interest;
        }
        // If a frame is known to be incomplete, the epoll reports the rest.
        let has_more = interest == EventFlags::IN && connection.frame_due.is_none() && !connection.reader.is_empty();
        if has_more && !std::mem::replace(&mut connection.queued, true) {
            self.ready.push_back(number);
        }
        if let Some(due) = connection.due() {
            self.next_due = Some(self.next_due.map_or(due, |next| next.min(due)));
        }
        Ok(())
    }

    fn end(&mut self, number: usize, broken: &ConnectionError) {
        let Some(mut connection) = self.connections[number].take() else { return };
        self.vacant.push(number);
        // Other threads may hold the stream a little longer, so it would not leave the epoll by
        // itself.
        let _ = epoll::delete(&self.epoll, &*connection.stream);
        let _ = connection.stream.shutdown(Shutdown::Both);
        note_end(&self.shared, &connection.stream, broken);
        connection.end_pause();
        let LoopConnection { stream, mut entry, .. } = *connection;
        drop(stream);
        if entry.leave() {
            // Freeing many pages takes a while. Without a thread for it they are freed here: the
            // entry is dropped in both cases.
            let thread = thread::Builder::new().name("lender-leaver".into()).spawn(move || drop(entry));
            if let Err(error) = thread {
                tracing::warn!(%error, "cannot start a thread to free pages; raise the limit on threads");
            }
        } else {
            drop(entry);
        }
        self.inbox.count.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
