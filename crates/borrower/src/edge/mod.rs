//! The thin edge of the borrower: its sockets, threads and clock.

pub mod cgroups;
pub(crate) mod connection;
pub(crate) mod link;
pub(crate) mod links;
pub(crate) mod racing;
mod session;
