//! What the borrower knows and decides, without sockets, clocks or threads.

pub mod catalog;
pub mod copying;
pub mod core;
pub mod curve;
pub mod demoted;
pub mod entry;
pub mod file;
pub mod gate;
pub mod groups;
pub mod hedging;
pub mod latencies;
pub mod lender;
pub mod overtaking;
pub mod placement;
pub mod puts;
pub mod read_batch;
pub mod reading;
pub mod rules;
pub mod stream_room;
pub mod streams;
pub mod table;
