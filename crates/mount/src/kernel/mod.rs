//! The kernel's caches of this mount: pages, attributes and names.
//!
//! - `invalidation`: having the kernel drop them, from threads of its own; `in_turn`: the queue for
//!   that
//! - `beside`: external changes, of which fanotify tells
//! - `passthrough`: files that the kernel reads below by itself (passthrough)
//! - `writeback`: sizes and times that the kernel keeps by itself with `--write back`
//! - `images`: pages that guests have evicted, which go back into the kernel's cache

pub(crate) mod beside;
pub mod images;
mod in_turn;
pub(crate) mod invalidation;
pub(crate) mod passthrough;
pub(crate) mod writeback;
