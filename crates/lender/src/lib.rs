//! The lender: keeps pages for borrowers in idle memory, and gives way to whoever needs that
//! memory.
//!
//! - [`store`]: the pages. Pure logic over one mapping of memory that the kernel may take back at
//!   any moment.
//! - [`headroom`] and `pressure`: how much memory nobody uses, and whether somebody waits for some.
//! - `housekeeping`: the thread that tells the one about the other, and finds out what the kernel
//!   took.
//! - `pace`: how much of the network and of the processors its owner lets it use, and whose turn it
//!   is.
//! - `sessions`: who is connected, and whose pages are kept for a while because he may come back.
//! - [`Server`]: connections, speaking the protocol of [`wire`]. `greeting` is how each begins, in
//!   a thread of its own, `hub` the few threads that serve all of them from then on, `connection`
//!   what they do, and `receipt` how pages get from a socket straight into the store.
//!
//! A lender never causes a wrong byte, only a miss; never uses memory that anybody else has; and
//! never lets one borrower see, displace below its fair share, or hold up another.

mod config;
mod connection;
mod demand;
mod entry;
#[doc(hidden)]
pub mod fuzzing;
mod greeting;
pub mod headroom;
mod housekeeping;
mod hub;
#[cfg(all(test, feature = "shuttle"))]
mod interleavings;
mod pace;
mod pressure;
mod receipt;
mod server;
mod sessions;
mod shared;
mod status;
pub mod store;
mod whole;

pub use config::{Capacity, Config, Error, GRACE_DEFAULT};
pub use pace::{Limits, PACE_WAIT_MAX, RATE_MIN_BYTES};
pub use server::{Handle, Server};
pub use status::{BorrowerStatus, Status};
pub use wire::address::Address;
pub use wire::secure::Security;
