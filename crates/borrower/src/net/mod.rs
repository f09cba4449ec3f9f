//! The links to the lenders: their sockets, threads and clocks.
//!
//! [`links`] has a [`link`] for each lender, whose thread keeps the session. [`connection`] sends
//! and receives the messages.

pub(crate) mod connection;
pub(crate) mod link;
pub(crate) mod links;
