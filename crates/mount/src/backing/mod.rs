//! The backing directory: its file systems, and reading its files without caching them twice.
//!
//! - `read`: reads that leave no page behind in the page cache of the backing file system
//! - `ahead`: reading ahead, where a stream arrives in pieces
//! - `dirty_ranges`: which pages were written and are to be dropped there
//! - `crossing`: file systems that are mounted in the backing directory; `device`: what each can do
//! - `reserve`: blocks that a file system reserves for root

pub(crate) mod ahead;
pub(crate) mod crossing;
pub(crate) mod device;
pub(crate) mod dirty_ranges;
pub(crate) mod read;
pub(crate) mod reserve;
