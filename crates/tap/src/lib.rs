//! Where evictions come from.
//!
//! [`EvictionSource`] is the seam: the eBPF tap ([`BpfTap`]) is one implementation, and a mount
//! without one (no right to load BPF) falls back to filling the pool on read. An in-kernel hook,
//! should Linux get one again, would be another.

mod bpf_tap;
mod calibrate;
mod consume;
#[doc(hidden)]
pub mod fuzzing;
mod intf;
mod load;
mod mapped;
mod omitted;
mod record;
mod ring;
mod watch;

pub use bpf_tap::{AddedTap, BpfTap, Target};
pub use load::LoadError;
pub use watch::{ReadsSource, Seen, SeenKind, Watch, WatchCounters};

use page::Page;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A clean page that the kernel evicted, seen while its bytes were still there.
#[derive(Clone, Copy, Debug)]
pub struct Eviction<'a> {
    /// `i_generation` of the inode: the [`page::FileKey`] that the mount gave the kernel.
    pub generation: u32,
    /// Lower half of the number of the control group that the page was charged to: of its
    /// directory's inode. 0: it is not known, or was not asked for.
    pub cgroup: u32,
    /// `i_ino` of the inode.
    pub inode: u64,
    /// The page's index in the file.
    pub index: u64,
    /// Where the event stands in the stream. An event that was reserved before another has the
    /// smaller position.
    pub position: u64,
    /// The bytes. None: they were not wanted ([`CopyHints::omit`]).
    pub page: Option<&'a Page>,
}

/// Pages that were added to the page cache, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Added {
    /// `i_generation` of the inode.
    pub generation: u32,
    /// `i_ino` of the inode.
    pub inode: u64,
    /// Index of the first page in the file.
    pub index: u64,
    /// How many.
    pub pages: u32,
}

/// How far the stream has come. Readable from any thread at any time.
pub trait Positions: Send + Sync {
    /// Every event that happened before this call has a smaller position; every later one an equal
    /// or larger one.
    fn produced(&self) -> u64;
    /// Every event with a smaller position has been handed out and dealt with.
    fn consumed(&self) -> u64;
}

/// What the source has seen, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Clean evictions captured.
    pub captured: u64,
    /// Of those, how many without their bytes, as these were not wanted.
    pub omitted: u64,
    /// Clean evictions lost because the ring was full.
    pub ring_full: u64,
    /// Pages that left the cache otherwise (truncation, invalidation): not captured.
    pub invalidated: u64,
    /// Evictions of pages whose bytes were not valid, not readable, or, after a failed writeback of
    /// their file, perhaps not those of the file system below: not captured.
    pub unreadable: u64,
}

/// Pages whose bytes are not wanted when they are evicted. A hint: it may be lost, and holds for
/// one eviction only.
pub trait CopyHints: Send + Sync {
    /// The bytes of this page of the file with that `i_generation` are not wanted.
    fn omit(&self, generation: u32, index: u32);
    /// They are wanted again.
    fn copy(&self, generation: u32, index: u32);
    /// Those of all pages are.
    fn copy_all(&self);
}

/// A stream of evictions.
pub trait EvictionSource: Send {
    /// Waits at most `timeout` for events and hands out those that are there, oldest first, each
    /// exactly once. Returns how many. An event's position counts as consumed only after `take`
    /// returned from it.
    fn poll(&mut self, timeout: Duration, take: &mut dyn FnMut(Eviction<'_>)) -> io::Result<usize>;
    /// The stream's positions.
    fn positions(&self) -> Arc<dyn Positions>;
    /// What was seen so far.
    fn counters(&self) -> Counters;
    /// Where it is said which bytes are not wanted, if the source can leave them out.
    fn copy_hints(&self) -> Option<Arc<dyn CopyHints>>;
}
