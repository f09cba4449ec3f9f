//! What the borrower knows and decides, without sockets, clocks or threads.

pub mod catalog;
pub mod core;
pub mod entry;
pub mod file;
pub mod lender;
pub mod overtaking;
pub mod puts;
pub mod reading;
pub mod rules;
pub mod table;
