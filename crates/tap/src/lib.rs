//! The sources of evictions.
//!
//! [`EvictionSource`] is the interface, and the eBPF tap ([`BpfTap`]) is one implementation. A
//! mount without one (no right to load BPF) populates the pool on read. An in-kernel hook, if Linux
//! gets one again, would be another implementation.

mod access_trace;
mod bpf_tap;
mod consume;
#[doc(hidden)]
pub mod fuzzing;
mod intf;
mod layout_probe;
mod load;
mod mapped;
mod record;
mod ring;
mod skip_list;

pub use access_trace::{AccessTrace, AccessTraceCounters, ReadsSource, Seen, SeenKind};
pub use bpf_tap::{AddedTap, BpfTap, Target};
pub use load::LoadError;

use page::Page;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A clean page that the kernel evicted, captured while its bytes were still there.
#[derive(Clone, Copy, Debug)]
pub struct Eviction<'a> {
    /// `i_generation` of the inode: the [`page::FileKey`] that the mount gave the kernel.
    pub generation: u32,
    /// The lower half of the number of the control group that the page was charged to: the inode
    /// number of the group's directory. 0: not known, or not requested.
    pub cgroup: u32,
    /// `i_ino` of the inode.
    pub inode: u64,
    /// The page's index in the file.
    pub index: u64,
    /// The event's position in the stream. An event that was reserved before another one has the
    /// smaller position.
    pub position: u64,
    /// The bytes. None if they were not needed ([`CopyHints::omit`]).
    pub page: Option<&'a Page>,
}

/// Consecutive pages that were added to the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Added {
    /// `i_generation` of the inode.
    pub generation: u32,
    /// `i_ino` of the inode.
    pub inode: u64,
    /// The index of the first page in the file.
    pub index: u64,
    /// The number of pages.
    pub pages: u32,
}

/// The positions of the stream, readable from any thread at any time.
pub trait Positions: Send + Sync {
    /// Returns the produced position. Every event that happened before this call has a smaller
    /// position; every later one an equal or larger one.
    fn produced(&self) -> u64;
    /// Returns the consumed position. Every event with a smaller position has been passed on and
    /// processed.
    fn consumed(&self) -> u64;
}

/// Counts of the source, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Clean evictions captured.
    pub captured: u64,
    /// Of the captured ones, those without their bytes, because these were not needed.
    pub omitted: u64,
    /// Clean evictions lost because the ring was full.
    pub ring_full: u64,
    /// Pages that left the cache in another way (truncation, invalidation): not captured.
    pub invalidated: u64,
    /// Evictions of pages whose bytes were not valid or not readable, or may differ from the
    /// backing file's after a failed writeback of their file: not captured.
    pub unreadable: u64,
}

/// Hints about pages whose bytes are not needed when they are evicted. A hint may be lost, and
/// applies to one eviction only.
pub trait CopyHints: Send + Sync {
    /// The bytes of this page of the file with that `i_generation` are not needed.
    fn omit(&self, generation: u32, index: u32);
    /// The bytes of this page are needed again.
    fn copy(&self, generation: u32, index: u32);
    /// The bytes of all pages are needed again.
    fn copy_all(&self);
}

/// A stream of evictions.
pub trait EvictionSource: Send {
    /// Waits at most `timeout` for events and passes the available ones to `take`, oldest first,
    /// each exactly once. Returns their number. An event's position counts as consumed only after
    /// `take` returned from it.
    fn poll(&mut self, timeout: Duration, take: &mut dyn FnMut(Eviction<'_>)) -> io::Result<usize>;
    /// The stream's positions.
    fn positions(&self) -> Arc<dyn Positions>;
    /// Returns the counts so far.
    fn counters(&self) -> Counters;
    /// Returns the receiver of hints, if the source can leave bytes out.
    fn copy_hints(&self) -> Option<Arc<dyn CopyHints>>;
}
