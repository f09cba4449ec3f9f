//! How a mount survives its daemon: what is written down all the time, what a keeper holds, and how
//! a successor goes on with both.
//!
//! - [`layout`]: the state memory, byte by byte, and reading it. Pure.
//! - `memory`: writing it.
//! - [`channel`]: to and from the keeper, with descriptors.
//! - `outbox`: what waits for a keeper that is stopped.
//! - [`given`]: what a successor gets.
//!
//! The keeper is a process that does nothing but hold descriptors; `pumapool` starts it. A mount
//! without one works as well, and dies with its daemon. What must never happen in here: a system
//! call for a lookup, a READ or a write; an open of a file costs one message.

pub mod channel;
pub mod given;
pub mod layout;
pub(crate) mod memory;
mod outbox;

use channel::{Channel, Held};
use memory::Memory;
pub use memory::{has_ended, is_dying, is_stopped};
use outbox::Outbox;
use rustix::fd::{BorrowedFd, OwnedFd};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What a state memory says of its mount, read without mapping it.
///
/// # Errors
/// When it is none.
pub fn about(state: &OwnedFd) -> io::Result<layout::About> {
    let mut bytes = vec![0; layout::INTENTS_AT];
    let len = rustix::io::pread(state, &mut bytes, 0)?;
    layout::about(&bytes[..len]).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

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
