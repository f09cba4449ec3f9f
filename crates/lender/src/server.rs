//! The server: accepts connections, and stops in order.

use crate::available_memory::AvailableMemory;
use crate::config::{Config, Error};
use crate::event_loop::EventLoops;
use crate::handshake;
use crate::housekeeping::Housekeeper;
use crate::pressure::Pressure;
use crate::rate_limit::Limits;
use crate::shared::Shared;
use crate::store::{Counters, Store};
use locks::Mutex;
use report::LentTo;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};
use wire::address::{Address, Stream};
use wire::confined::{self, Work, confine};
use wire::listener::Listener;
use wire::secure::Channel;

/// Stack of a handshake thread: its buffers are on the heap.
const STACK_BYTES: usize = 128 << 10;
/// Pause after an accept that failed because descriptors or memory were short: they become free
/// when a connection ends.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A lender that listens.
pub struct Server {
    shared: Arc<Shared>,
    listener: Listener,
    housekeeper: Mutex<Option<Housekeeper>>,
}

/// Stops a server, and reads its status, from any thread.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
    address: Address,
}

impl Server {
    /// Creates the store and listens. Connections wait until [`Server::run`].
    pub fn bind(config: Config) -> Result<Server, Error> {
        let mut available_memory = AvailableMemory::default();
        let memory = available_memory.read().map_err(|source| Error::UnknownMemory { source })?;
        let capacity_pages = config.capacity_pages(memory)?;
        let capacity_bytes = u64::from(capacity_pages) * page::PAGE_SIZE as u64;
        let store = Store::new(capacity_pages).map_err(|source| Error::NoMemory { capacity_bytes, source })?;
        let listener = Listener::bind(&config.listen).map_err(Error::Listen)?;
        let shared = Shared::new(store, config.grace, config.security).map_err(|source| Error::Start { source })?;
        shared.rate_limiter.set(config.limits);
        shared.reserve_bytes.store(config.reserve_bytes, Relaxed);
        let shared = Arc::new(shared);
        let mut housekeeper = Housekeeper::new(available_memory);
        housekeeper.tick(&shared, Instant::now());
        let housekeeper = Mutex::new(Some(housekeeper));
        Ok(Server { shared, listener, housekeeper })
    }

    /// The address, with the port that the kernel chose.
    pub fn local_address(&self) -> &Address {
        self.listener.address()
    }

    /// A handle to stop the server with.
    pub fn handle(&self) -> Handle {
        Handle { shared: Arc::clone(&self.shared), address: self.listener.address().clone() }
    }

    /// State and counters.
    pub fn status(&self) -> report::Lender {
        self.handle().status()
    }

    /// Serves until [`Handle::shutdown`]; then ends all connections, and returns when all threads
    /// have ended. Call it once.
    pub fn run(&self) -> Result<(), Error> {
        let start = |source| Error::Start { source };
        let event_loops = Arc::new(EventLoops::start(&self.shared).map_err(start)?);
        let housekeeping = match self.housekeeper.lock().take() {
            Some(housekeeper) => {
                let shared = Arc::clone(&self.shared);
                let thread = thread::Builder::new().name("lender-upkeep".into());
                Some(thread.spawn(move || housekeeper.run(&shared)).map_err(start)?)
            }
            None => None,
        };
        self.accept_until_stopped(&event_loops);
        self.shared.close_all();
        event_loops.end();
        if let Some(housekeeping) = housekeeping {
            housekeeping.join().map_err(|_| start(io::Error::other("the housekeeping thread failed")))?;
        }
        Ok(())
    }

    fn accept_until_stopped(&self, event_loops: &Arc<EventLoops>) {
        let stop = &self.shared.stop;
        while !stop.wait(Some(self.listener.as_fd()), None) {
            match self.listener.accept() {
                Ok(stream) => self.start_connection(stream, event_loops),
                Err(error) => match error.kind() {
                    // The connection was closed again before it was accepted.
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    io::ErrorKind::NotConnected | io::ErrorKind::InvalidInput | io::ErrorKind::ConnectionReset => {}
                    _ => {
                        self.shared.rate_limited_log.log("nobody", &format!("cannot accept connections: {error}"));
                        stop.wait(None, Some(ACCEPT_PAUSE));
                    }
                },
            }
        }
    }

    fn start_connection(&self, stream: Stream, event_loops: &Arc<EventLoops>) {
        let stream = Arc::new(stream);
        let Some(entry) = self.shared.enter(&stream) else {
            return handshake::refuse(
                &self.shared,
                &stream,
                &Channel::plain(),
                wire::REFUSED_BUSY,
                "this lender has too many connections",
            );
        };
        let (shared, event_loops, for_thread) =
            (Arc::clone(&self.shared), Arc::clone(event_loops), Arc::clone(&stream));
        let thread = thread::Builder::new().name("lender-greeter".into()).stack_size(STACK_BYTES);
        let handshake = move || {
            confine(Work::Serving, confined::NOTHING);
            if let Some(connection) = handshake::receive(&shared, for_thread, entry) {
                event_loops.take(connection);
            }
        };
        if let Err(error) = thread.spawn(handshake) {
            tracing::warn!(%error, "cannot start a thread for a connection; raise the limit on threads");
            let text = "this lender has too many threads";
            handshake::refuse(&self.shared, &stream, &Channel::plain(), wire::REFUSED_BUSY, text);
        }
    }
}

impl Handle {
    /// Makes [`Server::run`] return. May be called often, and before it runs.
    pub fn shutdown(&self) {
        self.shared.stop.request();
    }

    /// Switches lending on or off. If off, the lender takes no page, reports that it has no room,
    /// and gives all pages back within the next checks. Borrowers stay connected, receive notices
    /// of lost pages, and can still get those that are left.
    pub fn set_lending(&self, lending: bool) {
        self.shared.store.lock().set_lending(lending);
    }

    /// Sets the memory to leave free. Lent memory beyond it is given back as others need it.
    pub fn set_reserve_bytes(&self, reserve_bytes: u64) {
        self.shared.reserve_bytes.store(reserve_bytes, Relaxed);
    }

    /// The present limits.
    pub fn limits(&self) -> Limits {
        self.shared.rate_limiter.limits()
    }

    /// Sets the limits. Earlier debts are forgotten.
    pub fn set_limits(&self, limits: Limits) {
        self.shared.rate_limiter.set(limits);
    }

    /// State and counters.
    pub fn status(&self) -> report::Lender {
        let limits = self.shared.rate_limiter.limits();
        let table = self.shared.table.lock();
        let store = self.shared.store.lock();
        let statistics = &self.shared.statistics;
        let now = Instant::now();
        let milliseconds = |ns: &AtomicU64| ns.load(Relaxed) / 1_000_000;
        let cpu_ms = |ns: &AtomicU64| limits.cpu_percent.map(|_| milliseconds(ns));
        let borrower_list = table.sessions().iter().filter_map(|(name, session)| {
            let (counters, stored_pages, zero_pages) = store.tenant_status(session.tenant)?;
            let Counters {
                puts,
                puts_refused,
                gets,
                hits,
                misses,
                drops,
                replaced,
                shrunk,
                reclaimed_by_kernel,
                notices_forgotten,
            } = counters;
            Some(LentTo {
                name: name[..4].iter().map(|byte| format!("{byte:02x}")).collect(),
                connections: session.connections.into(),
                kept_ms: session.kept_since.map(|since| now.saturating_duration_since(since).as_millis() as u64),
                stored_pages: stored_pages.into(),
                zero_pages: zero_pages.into(),
                cpu_ms: cpu_ms(&session.usage.cpu_ns),
                rate_limited_ms: milliseconds(&session.usage.paced_ns),
                rate_limited_misses: session.usage.rate_limited_misses.load(Relaxed),
                puts,
                puts_refused,
                gets,
                hits,
                misses,
                drops,
                replaced,
                shrunk,
                reclaimed_by_kernel,
                notices_forgotten,
            })
        });
        let mut borrower_list: Vec<_> = borrower_list.collect();
        borrower_list.sort_by(|one, other| one.name.cmp(&other.name));
        let Counters {
            puts,
            puts_refused,
            gets,
            hits,
            misses,
            drops,
            replaced,
            shrunk,
            reclaimed_by_kernel,
            notices_forgotten,
        } = store.counters();
        report::Lender {
            address: self.address.to_string(),
            incarnation: format!("{:016x}", self.shared.incarnation),
            lending: store.is_lending(),
            capacity_pages: self.shared.capacity_pages,
            stored_pages: store.stored_pages().into(),
            zero_pages: store.zero_pages().into(),
            free_resident_pages: store.free_resident_pages().into(),
            available_bytes: statistics.available_bytes.load(Relaxed),
            reserve_bytes: self.shared.reserve_bytes.load(Relaxed),
            memory_total_bytes: statistics.memory_total_bytes.load(Relaxed),
            pressure: Pressure::reported(statistics.pressure.load(Relaxed)),
            puts,
            puts_refused,
            gets,
            hits,
            misses,
            drops,
            replaced,
            shrunk,
            reclaimed_by_kernel,
            notices_forgotten,
            lost_notices_sent: statistics.lost_notices_sent.load(Relaxed),
            scans: statistics.scans.load(Relaxed),
            demanded_pages: statistics.demanded_pages.load(Relaxed),
            malformed_frames: statistics.malformed_frames.load(Relaxed),
            refused_connections: statistics.refused_connections.load(Relaxed),
            refused_keys: statistics.refused_keys.load(Relaxed),
            crowded_out_connections: statistics.crowded_out.load(Relaxed),
            stuck_connections: statistics.stuck_connections.load(Relaxed),
            connections: table.connections() as u64,
            borrowers: (table.sessions().len() - table.kept_sessions()) as u64,
            kept_sessions: table.kept_sessions() as u64,
            expired_sessions: statistics.expired_sessions.load(Relaxed),
            resumed_sessions: statistics.resumed_sessions.load(Relaxed),
            cpu_percent: limits.cpu_percent.map(|percent| percent.get()),
            rate_bytes: limits.rate_bytes.map(|rate| rate.get()),
            cpu_ms: cpu_ms(&statistics.cpu_ns),
            rate_limited_ms: milliseconds(&statistics.paced_ns),
            rate_limited_misses: statistics.rate_limited_misses.load(Relaxed),
            borrower_list,
        }
    }
}
