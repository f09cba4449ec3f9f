//! The eviction tap itself: loads the BPF program for one file system and reads what it captures.
//!
//! # Why an event precedes every later content of its page
//!
//! The rule against stale bytes rests on one property of the kernel: *when a READ for a page
//! arrives at the daemon, the events of every earlier life of that page in the cache are already in
//! the ring*, so that `produced()` taken at that moment separates the old from the new. It holds
//! because of the order of things in the kernel (the same from 6.1 to 6.18):
//!
//! - Reclaim removes a clean page in `__remove_mapping` (mm/vmscan.c), which takes the `i_pages`
//!   lock of the file, and under it freezes the folio's reference count from its expected value to 0.
//!   If that succeeds nobody else has the folio, nor can anybody get it: a lookup finds it in the
//!   tree still, but cannot take a reference from 0 and tries again.
//! - The dirty flag is tested after the freeze. A folio that is dirty is given back. So a folio
//!   that goes on is clean, and stays so.
//! - Still under that lock it calls `__filemap_remove_folio` (mm/filemap.c), whose first act is the
//!   tracepoint. Our program runs there to its end: it reserves the records (the producer's counter
//!   moves), copies the bytes where they are wanted, and submits.
//! - Only then is the folio taken out of the tree (`page_cache_delete`), and only then is the lock
//!   released.
//! - A new folio for the same index comes into the tree under the same lock
//!   (`__filemap_add_folio`), when no folio is there; a READ is sent for folios that are in the
//!   tree, locked. So: reserve → unlock → insert → READ → `produced()`, a chain of happens-before,
//!   each link on a lock or a system call.
//!
//! Truncation and invalidation come through the same tracepoint with references held (count > 0)
//! and are told apart by that. `POSIX_FADV_DONTNEED` and `drop_caches` go through `remove_mapping`,
//! that is, through the same freeze: to the tap they are evictions like any other, and rightly:
//! what they drop is clean and up to date. Splitting a large folio drops its part behind the end of
//! file through the tracepoint too, after giving that part its references back: that counts as
//! truncation.
//!
//! Clean is not the same as written: a page whose writeback failed is clean as well. The kernel
//! notes only per file that this happened (`wb_err`), so no page of such a file is captured until
//! the kernel has forgotten the inode.
//!
//! An event may be missing: ring full, or a program that could not run. Then the page is just not
//! lent. An event is never late, never twice, and never of bytes that were not the page's when it
//! left.
//!
//! # Where it applies
//!
//! The device is compared with `s_dev` of the superblock. It is what `stat` shows for FUSE, ext4,
//! XFS and tmpfs; btrfs shows another number per subvolume, so that a tap on such a number sees
//! nothing.

use crate::calibrate::calibrate;
use crate::intf::{self, EVENT_BYTES, HEAD_BYTES, ONLY_KEY, TapConfig, TapCounters, TapEvent};
use crate::load::{self, LoadError};
use crate::omitted::{self, Omitted};
use crate::ring::Ring;
use crate::{Added, CopyHints, Counters, Eviction, EvictionSource, Positions};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object};
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tap.bpf.o"));

/// What is tapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// `st_dev` of any file of the mount, as stat(2) gives it.
    pub device: u64,
    /// Whether evictions say the control group of their pages. It costs some more time for each.
    pub tells_cgroup: bool,
    /// Whether it can be said which bytes are not wanted ([`EvictionSource::copy_hints`]). It costs
    /// a table, at most 1/4096 of the machine's memory.
    pub takes_hints: bool,
}

/// The eBPF tap. Evictions are captured from [`BpfTap::load`] on until it is dropped.
pub struct BpfTap {
    ring: Ring,
    counters: MapHandle,
    omitted: Option<Arc<Omitted>>,
    /// Detaches the program when dropped.
    _link: Link,
}

impl BpfTap {
    /// Default size of the ring. A burst of reclaim, at 1 to 2 GB/s, fills it in some 20 ms, in
    /// which a consumer that was not running gets its turn. It is locked memory of the kernel.
    pub const RING_BYTES: usize = 32 << 20;

    /// The smallest power of two that holds a record and a page of slack.
    pub const RING_BYTES_MIN: usize = 8 << 10;

    /// More than this would only hide a consumer that is too slow.
    pub const RING_BYTES_MAX: usize = 1 << 30;

    /// Finds the kernel's memory map, loads the program for `target`, and attaches it.
    ///
    /// `ring_bytes` is a power of two; [`BpfTap::RING_BYTES`] is a good one. Needs CAP_BPF,
    /// CAP_PERFMON and CAP_SYS_ADMIN for the time of the call, and none afterwards.
    pub fn load(target: Target, ring_bytes: usize) -> Result<BpfTap, LoadError> {
        load(target, ring_bytes, AddedTap::RING_BYTES_MIN).map(|(tap, _)| tap)
    }

    /// Loads and attaches the program, and says which pages are added to the page cache, too.
    pub fn load_with_added(target: Target, ring_bytes: usize) -> Result<(BpfTap, AddedTap), LoadError> {
        let (tap, object) = load(target, ring_bytes, AddedTap::RING_BYTES)?;
        let shared = load::map(&object, ".bss")?;
        let ring = load::map(&object, "added_ring")?.as_fd().try_clone_to_owned();
        let ring = ring
            .and_then(|map| Ring::new(map, AddedTap::RING_BYTES, shared.as_fd()))
            .map_err(|source| LoadError::System { attempt: "mapping the ring of added pages", source })?;
        let link = load::attach(&load::program(&object, "added")?, "attaching to the page cache's additions")?;
        Ok((tap, AddedTap { ring, _link: link }))
    }

    /// Folios of more than one page among the captured evictions.
    pub fn large_folios(&self) -> u64 {
        self.sum().large_folios
    }

    fn sum(&self) -> TapCounters {
        let mut sum = TapCounters::default();
        // Looking up the only entry of an array cannot fail; if it did, a counter would be low, and
        // nothing else wrong.
        if let Ok(Some(cpus)) = self.counters.lookup_percpu(&ONLY_KEY, MapFlags::ANY) {
            for cpu in &cpus {
                let _ = sum.add(cpu);
            }
        }
        sum
    }
}

fn load(target: Target, ring_bytes: usize, added_bytes: usize) -> Result<(BpfTap, Object), LoadError> {
    let bounds = BpfTap::RING_BYTES_MIN..=BpfTap::RING_BYTES_MAX;
    let entries = u32::try_from(ring_bytes).ok().filter(|_| ring_bytes.is_power_of_two());
    let Some(entries) = entries.filter(|_| bounds.contains(&ring_bytes)) else {
        return Err(LoadError::RingBytes { bytes: ring_bytes });
    };
    let bases = calibrate()?;
    let lines = omitted::lines(target.takes_hints);
    let config = TapConfig {
        vmemmap_base: bases.vmemmap,
        linear_base: bases.linear,
        device: intf::kernel_device(target.device),
        tells_cgroup: target.tells_cgroup.into(),
        omitted_shift: omitted::shift(lines),
    };
    let object = load::load(OBJECT, "loading the eviction tap", |object| {
        load::open_map(object, ".rodata")?.set_initial_value(config.as_bytes())?;
        load::open_map(object, "added_ring")?.set_max_entries(added_bytes as u32)?;
        load::open_map(object, "omitted_pages")?.set_max_entries(lines as u32)?;
        load::open_map(object, "ring")?.set_max_entries(entries)
    })?;
    let attempt = "opening the eviction tap's maps";
    let counters = MapHandle::try_from(&load::map(&object, "counters")?)
        .map_err(|error| LoadError::System { attempt, source: io::Error::other(format!("{error:#}")) })?;
    let shared = load::map(&object, ".bss")?;
    let ring = load::map(&object, "ring")?.as_fd().try_clone_to_owned();
    let ring = ring
        .and_then(|map| Ring::new(map, ring_bytes, shared.as_fd()))
        .map_err(|source| LoadError::System { attempt: "mapping the eviction ring", source })?;
    let table = load::map(&object, "omitted_pages")?;
    let omitted = target.takes_hints.then(|| Omitted::new(table.as_fd(), lines).map(Arc::new)).transpose();
    let omitted =
        omitted.map_err(|source| LoadError::System { attempt: "mapping the tap's table of hints", source })?;
    let link = load::attach(&load::program(&object, "tap")?, "attaching the eviction tap")?;
    Ok((BpfTap { ring, counters, omitted, _link: link }, object))
}

/// The pages that are added to the page cache of the same file system. Those of which there are
/// more than are taken in time are left out.
pub struct AddedTap {
    ring: Ring,
    _link: Link,
}

impl AddedTap {
    /// Some 30,000 additions.
    const RING_BYTES: usize = 1 << 20;
    /// Where nobody wants to know.
    const RING_BYTES_MIN: usize = 4 << 10;

    /// Hands out those that are there, oldest first, each exactly once. Returns how many.
    ///
    /// # Errors
    /// When the ring makes no sense.
    pub fn take(&mut self, take: &mut dyn FnMut(Added)) -> io::Result<usize> {
        self.ring.drain(Duration::ZERO, &mut |_, bytes| {
            take(intf::parse_added(bytes).ok_or(io::ErrorKind::InvalidData)?);
            Ok(())
        })
    }
}

impl EvictionSource for BpfTap {
    fn poll(&mut self, timeout: Duration, take: &mut dyn FnMut(Eviction<'_>)) -> io::Result<usize> {
        self.ring.drain(timeout, &mut |position, bytes| {
            let Some(TapEvent { generation, cgroup, inode, index, page }) = TapEvent::parse(bytes) else {
                let text = format!(
                    "an event of {} bytes instead of {EVENT_BYTES} or {HEAD_BYTES} in the eviction ring",
                    bytes.len()
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            };
            take(Eviction { generation, cgroup, inode, index, position, page });
            Ok(())
        })
    }

    fn positions(&self) -> Arc<dyn Positions> {
        self.ring.positions()
    }

    fn counters(&self) -> Counters {
        let TapCounters { captured, ring_full, invalidated, unreadable, large_folios: _, omitted } = self.sum();
        Counters { captured, omitted, ring_full, invalidated, unreadable }
    }

    fn copy_hints(&self) -> Option<Arc<dyn CopyHints>> {
        self.omitted.clone().map(|omitted| omitted as Arc<dyn CopyHints>)
    }
}

impl fmt::Debug for BpfTap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BpfTap").field("counters", &self.sum()).finish_non_exhaustive()
    }
}
