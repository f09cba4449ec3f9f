//! A mount outlives its daemon: the supervisor, which holds its descriptors, and the side of the
//! daemon.

pub mod daemon;
pub mod fdstore;
pub mod process;
