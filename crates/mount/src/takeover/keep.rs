//! What is written down, and what the keeper is told.

use super::channel::{Channel, Held};
use super::memory::Memory;
use super::outbox::Outbox;
use rustix::fd::BorrowedFd;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What is written down, and who holds what cannot be.
pub(crate) struct Keep {
    /// The state memory.
    pub memory: Arc<Memory>,
    /// To the keeper, if there is one.
    outbox: Option<Outbox>,
    /// Everything is the successor's from now on.
    handed_over: AtomicBool,
}

impl Keep {
    /// # Errors
    /// When no thread can be started.
    pub(crate) fn new(memory: Arc<Memory>, channel: Option<Arc<Channel>>) -> io::Result<Arc<Keep>> {
        let outbox = channel.map(Outbox::new).transpose()?;
        Ok(Arc::new(Keep { memory, outbox, handed_over: AtomicBool::new(false) }))
    }

    /// From now on nothing is changed any more of what the successor finds.
    pub(crate) fn hand_over(&self) {
        self.memory.freeze();
        self.handed_over.store(true, Ordering::Release);
    }

    /// Has a descriptor kept. What goes wrong costs the successor, not us.
    pub(crate) fn hold(&self, held: Held, fd: BorrowedFd<'_>) {
        self.tell(held, Some(fd));
    }

    /// It need not be kept any more.
    pub(crate) fn release(&self, held: Held) {
        self.tell(held, None);
    }

    /// How many descriptors the keeper has not taken yet, or let go of.
    pub(crate) fn undelivered(&self) -> usize {
        self.outbox.as_ref().map_or(0, Outbox::waiting)
    }

    /// Waits until the keeper has all that it is to keep. Whether that is so in time.
    pub(crate) fn flush(&self, limit: Duration) -> bool {
        self.outbox.as_ref().is_none_or(|outbox| outbox.flush(limit))
    }

    fn tell(&self, held: Held, fd: Option<BorrowedFd<'_>>) {
        let Some(outbox) = &self.outbox else { return };
        if !self.handed_over.load(Ordering::Acquire) {
            outbox.put(held, fd);
        }
    }
}
