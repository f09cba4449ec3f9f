//! The kernel's FUSE protocol, and nothing else: no inode table, no policy, no file system.
//!
//! The existing crates lack features that Puma needs: `O_TMPFILE`, statx, syncfs, the extensions of
//! creating requests, the details of the suid rules, or taking over a connection that another
//! process has negotiated.
//!
//! - [`abi`]: the structures and numbers of the kernel's interface.
//! - [`request`]: decodes bytes from the device to a [`Request`]. A request that cannot be decoded
//!   is an error for that request only.
//! - [`reply`]: answers, written in one system call each.
//! - [`session`]: the connection: negotiation, and [`Worker`]s that read requests and pass them to
//!   a [`Filesystem`].
//! - `leader`: selects the worker that reads requests (the leader); [`about_to_wait`].
//! - `admission`: limits the number of workers that the requests of one user may hold.
//! - `workforce`: the number of workers that a session needs.
//! - `notify`: messages to the kernel that are not answers.
//! - [`backing`]: backing files that the kernel reads and writes by itself.
//! - [`mounting`]: making and ending the mount.
//!
//! Promises: no message of the kernel makes this crate panic or read out of bounds. Every request
//! that expects an answer gets exactly one, also when its handler panics. No answer is ever written
//! twice.

pub mod abi;
mod admission;
pub mod backing;
mod buffer;
mod later;
mod leader;
mod more;
pub mod mounting;
mod notify;
pub mod reply;
pub mod request;
pub mod session;
mod workforce;

pub use admission::{Class, DEFERRED_BYTES_MAX, DEFERRED_MAX, RESERVED_WORKERS};
pub use later::{PAUSE_FIRST, PAUSE_MAX, PUT_OFF_MAX, put_off};
pub use leader::about_to_wait;
pub use more::More;
pub use notify::Notifier;
pub use reply::Reply;
pub use request::{DecodeError, Operation, Request};
pub use session::{Filesystem, Negotiated, Served, Session, Wish, Worker};
pub use workforce::WorkforceChange;

pub use rustix::io::Errno;
