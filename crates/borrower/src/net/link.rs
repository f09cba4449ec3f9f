//! The link to one lender. It finds the lender, keeps the connections, and finds the lender again
//! after a loss.
//!
//! While the lender is connected there are one main connection, a fixed number of get connections
//! and one for pings, all under one session name. An error on any of them ends all of them, and the
//! lender is *suspended*: no page is put there or requested. The link tries to resume the session
//! under the same name, less and less often while that fails. If the lender has kept the session,
//! the catalog's entries are valid again. If not, or if it takes too long, the lender's epoch is
//! incremented. Losing a lender costs its pages and nothing else.
//!
//! Two addresses may lead to the same lender. Of their links only the first that is up is used,
//! because the same memory would count twice. A lender that has returned many pages that do not
//! verify has broken memory, or is hostile, and is *abandoned*: each bad page costs a round trip
//! for nothing.
//!
//! A link has two threads. One sends puts and drops, and waits for no other lender. The other one
//! opens the connections, receives the messages of the main connection, and sends pings. Threads
//! that serve READs make the gets, on connections for gets.

pub(crate) mod session;

use crate::metrics::Counter;
use crate::net::connection::{ANSWER_TIMEOUT, GetConnection, Outgoing, send_bye, send_drop, send_put};
use crate::policy::gate::{Gate, Measured, Passes, Reason, Took};
use crate::policy::latencies::{LatenciesBySize, Size};
use crate::put::placement;
use crate::{Borrower, LenderAddress};
use locks::spinning::AdaptiveSpin;
use locks::{Condvar, Mutex};
use report::LinkState;
use std::io;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use wire::ITEMS_MAX;

/// How long a link waits while another link leads to the same lender, and how often it checks
/// whether that link is down.
const SAME_WAIT: Duration = Duration::from_secs(60);
const SAME_LOOK: Duration = Duration::from_secs(1);

/// How long a put buffer may wait to become full. Its pages can be read meanwhile.
const FILL_WAIT: Duration = Duration::from_millis(5);

/// How long the sender waits for work, hence the delay of recorded drops.
const WORK_WAIT: Duration = Duration::from_millis(100);

/// The time limit for a late answer, from the moment it counts as late or from the end of the one
/// before it. It is the longest time that an answer with a waiting reader may take.
const LATE_MAX: Duration = ANSWER_TIMEOUT.saturating_mul(2);

/// The borrower's state of one lender.
pub(crate) struct Link {
    /// The lender's number in the catalog.
    pub(crate) number: u8,
    pub(crate) lender: LenderAddress,
    /// The session's name.
    name: Mutex<[u8; 16]>,
    /// The session stays for a successor: no Bye is sent.
    is_left: AtomicBool,
    stop: AtomicBool,
    /// The lender is not used any more, for the lifetime of this mount.
    is_abandoned: AtomicBool,
    /// The incarnation of the lender that the link leads to; 0: none.
    incarnation: AtomicU64,
    stopped: (Mutex<()>, Condvar),
    main: Mutex<Option<Outgoing>>,
    /// A second handle of the main connection. It can end the connection while a thread is blocked
    /// in a write to it.
    main_handle: Mutex<Option<Outgoing>>,
    gets: Mutex<Gets>,
    /// Signalled when a get connection became idle.
    idle: Condvar,
    seen: Mutex<Seen>,
    get_latencies: Mutex<LatenciesBySize>,
    pub(crate) patience: AdaptiveSpin,
    pub(crate) counters: Counters,
}

/// The counters of a link, for the status.
#[derive(Default)]
pub(crate) struct Counters {
    put_pages: Counter,
    pub(crate) get_pages: Counter,
    pub(crate) get_misses: Counter,
    pub(crate) bad_pages: Counter,
    pub(crate) hedges: Counter,
    connects: Counter,
    losses: Counter,
    bypasses: Counter,
}

/// The latest measurements and state of the lender.
struct Seen {
    gate: Gate,
    capacity_pages: u64,
    free_pages: u64,
    /// The time of the last change of its state, and the last problem.
    since: Instant,
    problem: String,
}

#[derive(Default)]
struct Gets {
    /// The number of the session. It distinguishes its connections from those of earlier sessions.
    session: u64,
    /// The number of get connections, in use or not; 0 while there is no session.
    open: usize,
    idle: Vec<GetConnection>,
    /// Connections whose answers no thread waits for any longer, each with the time since when the
    /// next answer is due.
    late: Vec<(Instant, GetConnection)>,
}

/// A get connection in use.
pub(crate) struct Taken {
    session: u64,
    pub(crate) connection: GetConnection,
}

impl Link {
    /// Returns a link that is not connected yet. The session has the given name, or a random one.
    pub(crate) fn new(
        number: u8,
        lender: LenderAddress,
        name: Option<[u8; 16]>,
        gate: crate::policy::gate::Config,
    ) -> io::Result<Link> {
        let name = name.map_or_else(random_name, Ok)?;
        Ok(Link {
            number,
            lender,
            name: Mutex::new(name),
            is_left: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            is_abandoned: AtomicBool::new(false),
            incarnation: AtomicU64::new(0),
            stopped: Default::default(),
            main: Mutex::default(),
            main_handle: Mutex::default(),
            gets: Mutex::default(),
            idle: Condvar::new(),
            seen: Mutex::new(Seen {
                gate: Gate::new(gate),
                capacity_pages: 0,
                free_pages: 0,
                since: Instant::now(),
                problem: "not reached yet".to_owned(),
            }),
            get_latencies: Mutex::default(),
            patience: AdaptiveSpin::default(),
            counters: Counters::default(),
        })
    }

    /// Returns the session's name.
    pub(crate) fn name(&self) -> [u8; 16] {
        *self.name.lock()
    }

    /// Gives the session a new random name, so lenders treat it as a new session.
    fn rename(&self) {
        let _ = random_name().map(|name| *self.name.lock() = name);
    }

    /// From now on the session is left as it is, for a successor.
    pub(crate) fn leave(&self) {
        self.is_left.store(true, Ordering::Release);
    }

    /// Makes both threads end. The lender gets a Bye, unless the session is left to a successor.
    pub(crate) fn stop(&self, borrower: &Borrower) {
        self.stop.store(true, Ordering::Release);
        self.end();
        borrower.core.work(self.number).notify_all();
        drop(self.stopped.0.lock());
        self.stopped.1.notify_all();
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(Ordering::Acquire)
    }

    /// Returns whether there will be no more sessions.
    fn is_over(&self) -> bool {
        self.stopping() || self.is_abandoned()
    }

    /// Some pages of an answer do not verify. A lender that returns too many is abandoned for good.
    pub(crate) fn returned_bad(&self, borrower: &Borrower, pages: u64) {
        self.counters.bad_pages.add(pages);
        let is_too_much = self.counters.bad_pages.get() >= borrower.config.bad_pages_max;
        if is_too_much && !self.is_abandoned.swap(true, Ordering::AcqRel) {
            self.end();
        }
    }

    /// Returns whether the link leads to that incarnation of a lender. A lender that sends 0 does
    /// not reveal its incarnation.
    pub(crate) fn leads_to(&self, incarnation: u64) -> bool {
        incarnation != 0 && self.incarnation.load(Ordering::Acquire) == incarnation
    }

    /// Records for other links that this link leads to that incarnation.
    pub(crate) fn leads_to_now(&self, incarnation: u64) {
        self.incarnation.store(incarnation, Ordering::Release);
    }

    /// Records that the link leads to no lender.
    fn let_go(&self) {
        self.leads_to_now(0);
    }

    /// Waits while the other link leads to the same lender, or may soon do so again.
    fn wait_for_same(&self, borrower: &Borrower, other: &Link) {
        let (catalog, number) = (&borrower.core.catalog, other.number);
        let is_down = || !other.leads_anywhere() && !catalog.is_up(number) && !catalog.is_suspended(number);
        let begun = Instant::now();
        while !self.is_over() && !other.is_over() && !is_down() && begun.elapsed() < SAME_WAIT {
            self.sleep(SAME_LOOK);
        }
    }

    fn leads_anywhere(&self) -> bool {
        self.incarnation.load(Ordering::Acquire) != 0
    }

    fn sleep(&self, time: Duration) {
        let mut guard = self.stopped.0.lock();
        if !self.is_over() {
            self.stopped.1.wait_for(&mut guard, time);
        }
    }

    fn end(&self) {
        let Some(mut stream) = self.main.lock().take() else { return };
        if self.is_left.load(Ordering::Acquire) || send_bye(&mut stream).is_err() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Takes a get connection for one request. Waits for one while all are in use, for at most
    /// `limit`. The caller must pass it to [`Link::give_back`], [`Link::give_late`] or
    /// [`Link::give_up`].
    pub(crate) fn take(&self, limit: Duration) -> Option<Taken> {
        let mut gets = self.gets.lock();
        if gets.idle.is_empty() && !gets.late.is_empty() {
            drop(gets);
            // The receiver detects an error, too, and connects again.
            let _ = self.clear_late();
            gets = self.gets.lock();
        }
        self.idle.wait_while_for(&mut gets, |gets| gets.open > 0 && gets.idle.is_empty(), limit);
        let connection = gets.idle.pop()?;
        Some(Taken { session: gets.session, connection })
    }

    /// Records that an answer which arrived at `at` took this long.
    pub(crate) fn note(&self, took: Duration, at: Instant, size: Size) {
        self.get_latencies.lock().note(took.as_micros() as u64, at, size);
    }

    /// Returns a connection that can be used again.
    pub(crate) fn give_back(&self, taken: Taken) {
        let mut gets = self.gets.lock();
        if gets.session == taken.session {
            gets.idle.push(taken.connection);
            self.idle.notify_one();
        }
    }

    /// Returns a connection whose answer has not arrived and has no waiting reader any more.
    pub(crate) fn give_late(&self, taken: Taken, asked: Instant) {
        let mut gets = self.gets.lock();
        if gets.session == taken.session {
            gets.late.push((asked, taken.connection));
        }
    }

    /// The connection failed. Ends it and the other connections of its session, if that session is
    /// still current. The receiver detects this and connects again.
    pub(crate) fn give_up(&self, taken: Taken) {
        if self.gets.lock().session == taken.session {
            self.shut_down();
        }
    }

    fn replace_gets(&self, idle: Vec<GetConnection>) {
        let mut gets = self.gets.lock();
        *gets = Gets { session: gets.session + 1, open: idle.len(), idle, late: Vec::new() };
        self.idle.notify_all();
    }

    /// Receives and discards the available parts of late answers, without waiting. The arrival
    /// times of late answers are not known, so the gate does not use them: it measures pings, and
    /// the gets with a waiting reader. Returns whether some answers are still missing.
    ///
    /// # Errors
    /// If an answer does not arrive in time. Then the connections are ended.
    fn clear_late(&self) -> io::Result<bool> {
        let (session, late) = {
            let mut gets = self.gets.lock();
            (gets.session, std::mem::take(&mut gets.late))
        };
        let (mut waiting, mut failed) = (Vec::new(), None);
        for (asked, mut connection) in late {
            match connection.discard() {
                Ok(_) if connection.next_pages().is_none() => self.give_back(Taken { session, connection }),
                Ok(0) if asked.elapsed() > LATE_MAX => failed = Some(io::ErrorKind::TimedOut.into()),
                Ok(0) => waiting.push((asked, connection)),
                Ok(_) => waiting.push((Instant::now(), connection)),
                Err(error) => failed = Some(error),
            }
        }
        let mut gets = self.gets.lock();
        // Late answers of an earlier session do not matter any more.
        if gets.session == session {
            gets.late.append(&mut waiting);
            if let Some(error) = failed {
                // While this lock is held no new session can begin.
                self.shut_down();
                return Err(error);
            }
        }
        Ok(!gets.late.is_empty())
    }

    /// Shuts the connections down.
    fn shut_down(&self) {
        if let Some(stream) = &*self.main_handle.lock() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Drops all connections.
    fn close(&self) {
        *self.main.lock() = None;
        *self.main_handle.lock() = None;
        self.replace_gets(Vec::new());
    }

    /// Sends on the main connection. An error ends the connections.
    fn send(&self, send: impl FnOnce(&mut Outgoing) -> io::Result<()>) -> io::Result<()> {
        let mut main = self.main.lock();
        let stream = main.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        send(stream).inspect_err(|_| {
            let _ = stream.shutdown(Shutdown::Both);
        })
    }

    /// Returns the status of the lender.
    pub(crate) fn status(&self, borrower: &Borrower) -> report::Link {
        let catalog = &borrower.core.catalog;
        let seen = self.seen.lock();
        let closed = seen.gate.closed().filter(|_| catalog.is_bypassed(self.number));
        let (state, reason) = match (catalog.is_up(self.number), closed) {
            (true, None) => (LinkState::Used, String::new()),
            (true, Some(reason)) if seen.gate.passes() == Passes::Puts => (
                LinkState::Bypassed,
                format!("{}; no gets until reads of the backing directory have been measured", reason.text()),
            ),
            (true, Some(reason)) => (LinkState::Bypassed, reason.text().to_owned()),
            (false, _) if catalog.is_suspended(self.number) => (LinkState::Suspended, seen.problem.clone()),
            (false, _) => (LinkState::Down, seen.problem.clone()),
        };
        let [now_us, short_us, long_us] = seen.gate.averages_us();
        let counters = &self.counters;
        report::Link {
            number: self.number,
            address: self.lender.address.to_string(),
            id: self.lender.id.clone(),
            state,
            reason,
            since_ms: seen.since.elapsed().as_millis() as u64,
            ping_us: now_us,
            ping_short_us: short_us,
            ping_long_us: long_us,
            get_us: self.get_latencies.lock().of(Size::Small).mean_us().map(|us| us as u64),
            weight: borrower.core.weights.get(self.number),
            capacity_pages: seen.capacity_pages,
            free_pages: seen.free_pages,
            puts_under_way: borrower.core.queue(self.number).lock().under_way() as u64,
            put_pages: counters.put_pages.get(),
            get_pages: counters.get_pages.get(),
            get_misses: counters.get_misses.get(),
            bad_pages: counters.bad_pages.get(),
            hedges: counters.hedges.get(),
            connects: counters.connects.get(),
            losses: counters.losses.get(),
            bypasses: counters.bypasses.get(),
        }
    }

    /// Sets the thresholds of the lender's gate, from the next ping on.
    pub(crate) fn set_thresholds(&self, thresholds: crate::policy::gate::Config) {
        self.seen.lock().gate.set_config(thresholds);
    }

    /// A ping was answered: updates the lender's weight, and opens or closes its gate.
    fn measured(&self, borrower: &Borrower, rtt: Duration, elapsed: Duration) {
        let number = self.number;
        let took =
            |size| Took { get_us: self.get_latencies.lock().of(size).mean_us(), disk_us: borrower.disk.mean_us(size) };
        let measured =
            Measured { ping_us: rtt.as_secs_f64() * 1e6, small: took(Size::Small), large: took(Size::Large) };
        let mut seen = self.seen.lock();
        let (was, passed) = (seen.gate.closed(), seen.gate.passes());
        seen.gate.measured(measured, elapsed);
        let (is, passes) = (seen.gate.closed(), seen.gate.passes());
        // The weight uses the average of 15 seconds, because each change of weight moves pages.
        let [ping_us, short_us, _] = seen.gate.averages_us();
        borrower.core.weights.set(number, placement::weight(seen.free_pages, seen.capacity_pages, short_us));
        let is_full = placement::is_full(seen.free_pages, seen.capacity_pages);
        borrower.core.set_room(number, seen.free_pages, is_full);
        if was == is && passed == passes || borrower.config.gate.is_none() {
            return;
        }
        seen.since = Instant::now();
        drop(seen);
        let lender = &self.lender.address;
        match is {
            // The only change is that nothing is put any more.
            _ if was == is => {}
            Some(reason) => {
                self.counters.bypasses.one();
                // Earlier latencies of gets do not predict later ones.
                self.get_latencies.lock().clear();
                let text = reason.text();
                match reason {
                    Reason::FasterDisk => tracing::debug!(%lender, ping_us, "lender not used: {text}"),
                    _ => tracing::info!(%lender, ping_us, "lender not used: {text}"),
                }
            }
            None => tracing::debug!(%lender, ping_us, "lender used again"),
        }
        borrower.core.catalog.lender_gate(number, passes);
        borrower.lenders_changed();
    }

    fn found(&self, capacity_pages: u64) {
        self.counters.connects.one();
        let mut seen = self.seen.lock();
        (seen.capacity_pages, seen.free_pages) = (capacity_pages, capacity_pages);
        (seen.since, seen.problem) = (Instant::now(), String::new());
    }

    /// Records the problem. Returns whether it differs from the last one.
    fn has_problem(&self, problem: &str) -> bool {
        let mut seen = self.seen.lock();
        if seen.problem == problem {
            return false;
        }
        (seen.since, seen.problem) = (Instant::now(), problem.to_owned());
        true
    }
}

/// Sends puts and drops, until the link stops.
pub(crate) fn send_work(borrower: &Borrower, link: &Link) {
    let core = &borrower.core;
    while !link.stopping() {
        let mut puts = core.queue(link.number).lock();
        if !puts.has_any() {
            core.work(link.number).wait_for(&mut puts, WORK_WAIT);
        }
        let filling = Instant::now();
        while puts.has_any() && !puts.has_full() && filling.elapsed() < FILL_WAIT && !link.stopping() {
            core.work(link.number).wait_for(&mut puts, FILL_WAIT.saturating_sub(filling.elapsed()));
        }
        let partial = !puts.has_full();
        drop(puts);
        send_puts(borrower, link, partial);
        send_drops(borrower, link);
    }
}

fn send_puts(borrower: &Borrower, link: &Link, partial: bool) {
    while let Some((request, batch)) = borrower.core.next_put(link.number, partial) {
        // Counted before sending, because the answer may be handled before this thread continues.
        borrower.core.put_sent(batch.items().len());
        link.counters.put_pages.add(batch.items().len() as u64);
        let sent = link.send(|stream| match borrower.core.is_put_under_way(link.number, request) {
            true => send_put(stream, request, batch.items(), batch.pages()),
            // The connection that the batch was taken for is lost: this is another connection.
            false => Ok(()),
        });
        if sent.is_err() {
            drop(batch);
            return borrower.core.abandon_puts(link.number);
        }
    }
}

fn send_drops(borrower: &Borrower, link: &Link) {
    let catalog = &borrower.core.catalog;
    let mut keys = Vec::new();
    loop {
        keys.clear();
        catalog.take_drops(link.number, ITEMS_MAX, &mut keys);
        if keys.is_empty() {
            return;
        }
        if link.send(|stream| send_drop(stream, &keys)).is_err() {
            // They will be sent when the lender is back with its pages.
            return keys.iter().for_each(|key| catalog.drop_at_lender(link.number, key.id(), key.version()));
        }
        borrower.core.metrics.drop_pages.add(keys.len() as u64);
    }
}

fn random_name() -> io::Result<[u8; 16]> {
    let mut name = [0; 16];
    rustix::rand::getrandom(&mut name, rustix::rand::GetRandomFlags::empty())?;
    Ok(name)
}
