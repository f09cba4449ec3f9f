//! How a mount survives its daemon: the recorded state, the descriptors that a supervisor holds,
//! and a successor that resumes from both.
//!
//! - [`layout`]: the layout of the state memory, and its decoder. Pure.
//! - `memory`: writing the state memory.
//! - [`channel`]: messages to and from the supervisor, with descriptors.
//! - `outbox`: messages that wait for a stopped supervisor.
//! - `keep`: the interface of both for the rest of the daemon.
//! - [`inherited`]: the descriptors that a successor gets.
//! - `restore`: a successor takes over.
//! - `replay`: requests that the kernel sends again are executed once.
//!
//! The supervisor is a process that only holds descriptors; `pumapool` starts it. A mount without
//! one works, too, and dies with its daemon. This module must never make a system call for a
//! lookup, a READ or a write. An open of a file costs one message.

pub mod channel;
pub mod inherited;
mod keep;
pub mod layout;
pub(crate) mod memory;
mod outbox;
pub(crate) mod replay;
mod restore;

pub(crate) use keep::Keep;

use rustix::fd::OwnedFd;
use std::io;

/// Reads the header of a state memory, without mapping it.
///
/// # Errors
/// Fails if the file is not a state memory.
pub fn about(state: &OwnedFd) -> io::Result<layout::About> {
    let mut bytes = vec![0; layout::INTENTS_AT];
    let len = rustix::io::pread(state, &mut bytes, 0)?;
    layout::about(&bytes[..len]).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}
