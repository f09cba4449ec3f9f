//! Recording state in memory, and sending descriptors to the supervisor.

use super::channel::{Channel, Held};
use super::memory::Memory;
use super::outbox::Outbox;
use rustix::fd::BorrowedFd;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The recorded state, and the outbox for descriptors that only the supervisor can preserve.
pub(crate) struct Keep {
    /// The state memory.
    pub memory: Arc<Memory>,
    /// The queue to the supervisor, if there is one.
    outbox: Option<Outbox>,
    /// Whether the state belongs to the successor.
    handed_over: AtomicBool,
}

impl Keep {
    /// # Errors
    /// Fails if no thread can be started.
    pub(crate) fn new(memory: Arc<Memory>, channel: Option<Arc<Channel>>) -> io::Result<Arc<Keep>> {
        let outbox = channel.map(Outbox::new).transpose()?;
        Ok(Arc::new(Keep { memory, outbox, handed_over: AtomicBool::new(false) }))
    }

    /// From now on this daemon changes nothing of the recorded state.
    pub(crate) fn hand_over(&self) {
        self.memory.freeze();
        self.handed_over.store(true, Ordering::Release);
    }

    /// Has the supervisor hold a descriptor. An error affects the successor, not this daemon.
    pub(crate) fn hold(&self, held: Held, fd: BorrowedFd<'_>) {
        self.send(held, Some(fd));
    }

    /// Has the supervisor close a descriptor that it holds.
    pub(crate) fn release(&self, held: Held) {
        self.send(held, None);
    }

    /// Number of descriptors that the supervisor has not yet received, or not yet closed.
    pub(crate) fn undelivered(&self) -> usize {
        self.outbox.as_ref().map_or(0, Outbox::waiting)
    }

    /// Waits until the supervisor has received everything. Returns whether this happened within
    /// `limit`.
    pub(crate) fn flush(&self, limit: Duration) -> bool {
        self.outbox.as_ref().is_none_or(|outbox| outbox.flush(limit))
    }

    fn send(&self, held: Held, fd: Option<BorrowedFd<'_>>) {
        let Some(outbox) = &self.outbox else { return };
        if !self.handed_over.load(Ordering::Acquire) {
            outbox.put(held, fd);
        }
    }
}
