//! The kernel's caches of this mount: pages, attributes and names.
//!
//! - `invalidation`: having the kernel drop them, from threads of its own; `fair_queue`: the queue
//!   for that
//! - `external_changes`: external changes, which fanotify reports
//! - `passthrough`: files that the kernel reads in the backing directory by itself (passthrough)
//! - `writeback`: sizes and times that the kernel keeps by itself with `--write back`
//! - `images`: pages that guests have evicted, which go back into the kernel's cache

pub(crate) mod external_changes;
mod fair_queue;
pub mod images;
pub(crate) mod invalidation;
pub(crate) mod passthrough;
pub(crate) mod writeback;
