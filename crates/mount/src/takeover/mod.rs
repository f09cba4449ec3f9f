//! How a mount survives its daemon: what is written down all the time, what a keeper holds, and how
//! a successor goes on with both.
//!
//! - [`layout`]: the state memory, byte by byte, and reading it. Pure.
//! - `memory`: writing it.
//! - [`channel`]: to and from the keeper, with descriptors.
//! - `outbox`: what waits for a keeper that is stopped.
//! - `keep`: the two of them, as the rest of the daemon uses them.
//! - [`given`]: what a successor gets.
//! - `restore`: a successor takes over.
//! - `resent`: requests that the kernel sends again then are done once.
//!
//! The keeper is a process that does nothing but hold descriptors; `pumapool` starts it. A mount
//! without one works as well, and dies with its daemon. What must never happen in here: a system
//! call for a lookup, a READ or a write; an open of a file costs one message.

pub mod channel;
pub mod given;
mod keep;
pub mod layout;
pub(crate) mod memory;
mod outbox;
pub(crate) mod resent;
mod restore;

pub(crate) use keep::Keep;

use rustix::fd::OwnedFd;
use std::io;

/// What a state memory says of its mount, read without mapping it.
///
/// # Errors
/// When it is none.
pub fn about(state: &OwnedFd) -> io::Result<layout::About> {
    let mut bytes = vec![0; layout::INTENTS_AT];
    let len = rustix::io::pread(state, &mut bytes, 0)?;
    layout::about(&bytes[..len]).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}
