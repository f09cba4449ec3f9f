//! What the borrower knows and decides, without sockets, clocks or threads.

pub mod catalog;
pub mod entry;
pub mod file;
pub mod overtaking;
pub mod puts;
pub mod table;
