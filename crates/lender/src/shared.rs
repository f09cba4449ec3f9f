//! State that the threads of a lender share.

use crate::rate_limit::{Limits, RateLimiter};
use crate::sessions::Table;
use crate::store::Store;
use crate::whole::Whole;
use locks::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use wire::rate_limited_log::RateLimitedLog;
use wire::secure::Security;

/// The shared state.
pub struct Shared {
    /// The pages.
    pub store: Whole<Store>,
    /// Connections and sessions. Lock order: `table` before `store`.
    pub table: Mutex<Table>,
    /// Signalled when a connection has left its session, or `table`.
    pub left: Condvar,
    /// How long the pages of a borrower that lost its connection are kept for it.
    pub grace: Duration,
    /// Rate limits, if there are any.
    pub rate_limiter: SharedRateLimiter,
    /// Memory to leave free. It may change while the lender runs.
    pub reserve_bytes: AtomicU64,
    /// The security of connections: it decides which borrowers may connect.
    pub security: Security,
    /// [`wire::Welcome::incarnation`].
    pub incarnation: u64,
    /// The maximum number of pages in the store.
    pub capacity_pages: u64,
    /// The request to stop.
    pub stop: Stop,
    /// Statistics for the status.
    pub statistics: Statistics,
    /// Rate-limited log of bad peers.
    pub rate_limited_log: RateLimitedLog,
}

impl Shared {
    /// A lender without connections.
    pub fn new(store: Store, grace: Duration, security: Security) -> io::Result<Shared> {
        Ok(Shared {
            capacity_pages: store.capacity_pages().into(),
            store: Whole::new(store),
            table: Mutex::new(Table::new(Instant::now())),
            left: Condvar::new(),
            grace,
            rate_limiter: SharedRateLimiter::default(),
            reserve_bytes: AtomicU64::new(0),
            security,
            // The standard library seeds this hasher's keys from the system's random numbers.
            incarnation: RandomState::new().hash_one(std::process::id()),
            stop: Stop::new()?,
            statistics: Statistics::default(),
            rate_limited_log: RateLimitedLog::default(),
        })
    }
}

/// The lender's [`RateLimiter`], which may change while it runs. It has a lock of its own, which is
/// held for some arithmetic; without limits it is not locked at all.
#[derive(Default)]
pub struct SharedRateLimiter {
    is_limited: AtomicBool,
    rate_limiter: Mutex<Option<RateLimiter>>,
}

impl SharedRateLimiter {
    /// Sets the limits, with all debts paid.
    pub fn set(&self, limits: Limits) {
        let rate_limiter = RateLimiter::new(limits, Instant::now());
        self.is_limited.store(rate_limiter.is_some(), Ordering::Relaxed);
        *self.rate_limiter.lock() = rate_limiter;
    }

    /// Runs `ask` on the rate limiter, if there is one.
    pub fn ask<T>(&self, ask: impl FnOnce(&mut RateLimiter) -> T) -> Option<T> {
        if !self.is_limited.load(Ordering::Relaxed) {
            return None;
        }
        self.rate_limiter.lock().as_mut().map(ask)
    }

    /// The present limits.
    pub fn limits(&self) -> Limits {
        self.ask(|rate_limiter| rate_limiter.limits()).unwrap_or_default()
    }
}

/// Numbers for the status that are not the store's.
#[derive(Default)]
#[allow(missing_docs)] // they have the names and meanings of the status
pub struct Statistics {
    pub available_bytes: AtomicU64,
    pub memory_total_bytes: AtomicU64,
    /// A [`crate::pressure::Pressure`].
    pub pressure: AtomicU8,
    pub lost_notices_sent: AtomicU64,
    pub scans: AtomicU64,
    pub demanded_pages: AtomicU64,
    pub malformed_frames: AtomicU64,
    pub refused_connections: AtomicU64,
    pub refused_keys: AtomicU64,
    pub crowded_out: AtomicU64,
    pub stuck_connections: AtomicU64,
    pub expired_sessions: AtomicU64,
    pub resumed_sessions: AtomicU64,
    pub cpu_ns: AtomicU64,
    pub paced_ns: AtomicU64,
    pub rate_limited_misses: AtomicU64,
}

/// A request to stop, which wakes all callers of [`Stop::wait`].
pub struct Stop {
    requested: AtomicBool,
    /// Readable after the request.
    event: OwnedFd,
}

impl Stop {
    /// Not requested.
    pub fn new() -> io::Result<Stop> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Stop { requested: AtomicBool::new(false), event })
    }

    /// Requests it. This cannot be undone.
    pub fn request(&self) {
        self.requested.store(true, Ordering::Release);
        // The write fails only by overflow, which needs 2⁶⁴ requests.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Whether it was requested.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Acquire)
    }

    /// Waits for the request, for `other` to become readable, or for the time to pass. Returns true
    /// if it was requested.
    pub fn wait(&self, other: Option<BorrowedFd<'_>>, timeout: Option<Duration>) -> bool {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let own = PollFd::from_borrowed_fd(self.event.as_fd(), PollFlags::IN);
        let other = PollFd::from_borrowed_fd(other.unwrap_or(self.event.as_fd()), PollFlags::IN);
        // An interrupted wait is a short one; all callers loop.
        let _ = poll(&mut [own, other], timeout.as_ref());
        self.is_requested()
    }
}
