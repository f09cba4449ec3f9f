//! Decisions that cost or save time, and never affect the bytes. Logic, without sockets, clocks and
//! threads.
//!
//! [`gate`] bypasses a lender that is slower than the backing file, by the `latencies` of both.
//! `hedging` limits how many late requests race the backing file. [`streams`] recognizes
//! sequential reads, and [`stream_room`] decides whether their pages are lent. `curve` estimates
//! the hit ratio of other sizes of the pool.

pub(crate) mod curve;
pub mod gate;
pub(crate) mod hedging;
pub(crate) mod latencies;
pub mod stream_room;
pub mod streams;
