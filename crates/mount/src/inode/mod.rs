//! The inodes that the kernel knows, and what belongs to one of them.
//!
//! - `table`: all inodes, by node id and by identity; `restoring`: those that a daemon before this
//!   one has left; `purge`: looking for those that were deleted
//! - `node`: one inode, and the descriptors that it is reached by; `stat`: looking at its file
//! - `names`: the name that the kernel believes; `revalidation`: names that are another file's by
//!   now; `link_count`: how many names the kernel counts
//! - `overtaken`: a write(2) that a READ has overtaken
//! - `handle`: what is open; `opened`: the descriptors of that
//! - `descriptors`: how many descriptors there are, and for whom; `room`: making room for one more

pub(crate) mod descriptors;
pub(crate) mod handle;
pub(crate) mod link_count;
mod names;
mod node;
pub(crate) mod opened;
pub(crate) mod overtaken;
pub(crate) mod purge;
mod restoring;
pub(crate) mod revalidation;
mod room;
mod stat;
mod table;

pub(crate) use names::{Believed, Moved, Name};
pub(crate) use node::{Anchor, Found, Inode};
pub(crate) use stat::{STATX_MASK, device_of, stamp_of, stat};
pub(crate) use table::Inodes;

#[cfg(test)]
mod tests;
