//! A READ, from its arrival to its answer.
//!
//! Logic, without sockets, clocks and threads: [`state`] is the state machine of one READ, and
//! [`batch`] holds READs that share one request. The edge: `serve` takes READs from a worker, and
//! `drive` does the steps of the state machine. `pipeline` sends requests to a lender and receives
//! the responses, and `race` reads the backing file if a response is late.

pub mod batch;
pub(crate) mod drive;
pub(crate) mod pipeline;
pub(crate) mod race;
pub(crate) mod serve;
pub mod state;
