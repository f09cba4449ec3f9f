//! The lender: stores pages for borrowers in idle memory, and returns this memory when other
//! programs need it.
//!
//! - [`store`]: the pages. Pure logic over one mapping of memory that the kernel may take back at
//!   any moment.
//! - [`available_memory`] and `pressure`: available memory, and whether tasks wait for memory.
//! - `housekeeping`: the thread that passes these values to the store, and finds the pages that the
//!   kernel took.
//! - `rate_limit`: rate limits for network and processors, and fair shares of them.
//! - `sessions`: the connected borrowers, and those whose pages are kept for a while because they
//!   may come back.
//! - [`Server`]: connections with the protocol of [`wire`]. `handshake` does the handshake of each
//!   in a thread of its own. `event_loop` has the few threads that serve all connections after
//!   that. `connection` executes their frames, and `in_flight_put` receives pages from a socket
//!   directly into the store.
//!
//! A lender never causes a wrong byte, only a miss. It never uses memory that another program has.
//! It never lets one borrower see another one's pages, displace them below their fair share, or
//! delay another borrower.

pub mod available_memory;
mod config;
mod connection;
mod entry;
mod event_loop;
#[doc(hidden)]
pub mod fuzzing;
mod handshake;
mod housekeeping;
mod in_flight_put;
#[cfg(all(test, feature = "shuttle"))]
mod interleavings;
mod pressure;
mod rate_limit;
mod reclaim_target;
mod server;
mod sessions;
mod shared;
pub mod store;
mod whole;

pub use config::{Capacity, Config, Error, GRACE_DEFAULT};
pub use rate_limit::{Limits, RATE_MIN_BYTES, SHARE_WAIT_MAX};
pub use server::{Handle, Server};
pub use wire::address::Address;
pub use wire::secure::Security;
