//! How a mount survives its daemon: what is written down all the time, what a keeper holds, and how a successor goes on with both.
//!
//! - [`layout`]: the state memory, byte by byte, and reading it. Pure.
//! - `memory`: writing it.
//! - [`channel`]: to and from the keeper, with descriptors.
//! - [`given`]: what a successor gets.
//!
//! The keeper is a process that does nothing but hold descriptors; `pumapool` starts it. A mount without one works as well, and dies with
//! its daemon. What must never happen in here: a system call for a lookup, a READ or a write; an open of a file costs one message.

pub mod channel;
pub mod given;
pub mod layout;
pub(crate) mod memory;

use channel::{Channel, Held, Message};
use memory::Memory;
pub use memory::{has_ended, is_dying};
use rustix::fd::{BorrowedFd, OwnedFd};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    channel: Option<Arc<Channel>>,
    /// Everything is the successor's from now on.
    handed_over: AtomicBool,
}

impl Keep {
    pub(crate) fn new(memory: Arc<Memory>, channel: Option<Arc<Channel>>) -> Arc<Keep> {
        Arc::new(Keep { memory, channel, handed_over: AtomicBool::new(false) })
    }

    /// From now on nothing is changed any more of what the successor finds.
    pub(crate) fn hand_over(&self) {
        self.memory.freeze();
        self.handed_over.store(true, Ordering::Release);
    }

    /// Has a descriptor kept. What goes wrong costs the successor, not us.
    pub(crate) fn hold(&self, held: Held, fd: BorrowedFd<'_>) {
        self.tell(|channel| channel.hold(held, fd));
    }

    /// It need not be kept any more.
    pub(crate) fn release(&self, held: Held) {
        self.tell(|channel| channel.send(&Message::Release(held)));
    }

    fn tell(&self, send: impl FnOnce(&Channel) -> io::Result<()>) {
        let Some(channel) = self.channel.as_ref().filter(|channel| !channel.is_lost()) else { return };
        if self.handed_over.load(Ordering::Acquire) {
            return;
        }
        if let Err(error) = send(channel)
            && channel.lose()
        {
            tracing::warn!("the keeper of this mount is gone ({error}): the mount goes on, but dies with this daemon");
        }
    }
}
