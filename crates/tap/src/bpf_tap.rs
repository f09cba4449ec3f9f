//! The eviction tap: loads the BPF program for one file system, and reads the events that it
//! captures.
//!
//! # Why an event precedes every later content of its page
//!
//! The rule against stale bytes rests on one property of the kernel. *When a READ for a page
//! arrives at the daemon, the events of all earlier copies of that page in the cache are already in
//! the ring.* So `produced()` at that moment separates the old events from the new ones. The
//! property holds because of the order of steps in the kernel (the same from 6.1 to 6.18):
//!
//! - Reclaim removes a clean page in `__remove_mapping` (mm/vmscan.c). That function takes the
//!   `i_pages` lock of the file. Under the lock it freezes the folio's reference count from its
//!   expected value to 0. If that succeeds, no other user has the folio, and none can get it. A
//!   lookup still finds the folio in the tree, but cannot take a reference from 0, and tries again.
//! - The dirty flag is tested after the freeze. A dirty folio is given back. So a folio that passes
//!   is clean, and stays clean.
//! - Still under that lock it calls `__filemap_remove_folio` (mm/filemap.c), whose first act is the
//!   tracepoint. Our program runs there to its end: it reserves the records (the producer's counter
//!   moves), copies the bytes if they are needed, and submits.
//! - Only then is the folio taken out of the tree (`page_cache_delete`), and only then is the lock
//!   released.
//! - A new folio for the same index enters the tree under the same lock (`__filemap_add_folio`),
//!   when no folio is there. A READ is sent for folios that are in the tree, locked. So the chain
//!   is: reserve → unlock → insert → READ → `produced()`. Each step happens before the next, by a
//!   lock or a system call.
//!
//! Truncation and invalidation pass the same tracepoint with references held (count > 0), which
//! distinguishes them. `POSIX_FADV_DONTNEED` and `drop_caches` go through `remove_mapping`, that
//! is, through the same freeze. For the tap they are evictions like any other, because they drop
//! pages that are clean and up to date. Splitting a large folio also drops its part behind the end
//! of file through the tracepoint, after it has given that part its references back: that counts as
//! truncation.
//!
//! Clean does not mean written: a page whose writeback failed is clean as well. The kernel records
//! only per file that this happened (`wb_err`). So no page of such a file is captured until the
//! kernel has forgotten the inode.
//!
//! An event may be missing, if the ring is full or the program could not run. Then the page is not
//! lent. An event is never late and never repeated. It never has other bytes than those that the
//! page had when it left the cache.
//!
//! # Where it applies
//!
//! The device is compared with `s_dev` of the superblock. This is the number that `stat` returns
//! for FUSE, ext4, XFS and tmpfs. btrfs returns another number per subvolume, so a tap on such a
//! number sees nothing.

use crate::intf::{self, EVENT_BYTES, HEAD_BYTES, ONLY_KEY, TapConfig, TapCounters, TapEvent};
use crate::layout_probe::probe_layout;
use crate::load::{self, LoadError};
use crate::ring::Ring;
use crate::skip_list::{self, SkipList};
use crate::{Added, CopyHints, Counters, Eviction, EvictionSource, Positions};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object};
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tap.bpf.o"));

/// The target of a tap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// `st_dev` of any file of the mount, as stat(2) returns it.
    pub device: u64,
    /// Whether events name the control groups of their pages. That costs some time for each.
    pub tells_cgroup: bool,
    /// Whether hints are accepted which bytes are not needed ([`EvictionSource::copy_hints`]). They
    /// cost a table of at most 1/4096 of the machine's memory.
    pub takes_hints: bool,
}

/// The eBPF tap. Evictions are captured from [`BpfTap::load`] on until the tap is dropped.
pub struct BpfTap {
    ring: Ring,
    counters: MapHandle,
    skip_list: Option<Arc<SkipList>>,
    /// Detaches the program when dropped.
    _link: Link,
}

impl BpfTap {
    /// The default size of the ring in bytes. A burst of reclaim, at 1 to 2 GB/s, fills it in some
    /// 20 ms. In this time the scheduler can run a consumer that was not running. The ring is
    /// locked memory of the kernel.
    pub const RING_BYTES: usize = 32 << 20;

    /// The smallest size in bytes: the smallest power of two that holds a record and a page of
    /// slack.
    pub const RING_BYTES_MIN: usize = 8 << 10;

    /// The largest size in bytes. More would only hide a consumer that is too slow.
    pub const RING_BYTES_MAX: usize = 1 << 30;

    /// Finds the kernel's memory map, loads the program for `target`, and attaches it.
    ///
    /// `ring_bytes` is a power of two; [`BpfTap::RING_BYTES`] is a good value. The call needs
    /// CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN. They are not needed afterwards.
    pub fn load(target: Target, ring_bytes: usize) -> Result<BpfTap, LoadError> {
        load(target, ring_bytes, AddedTap::RING_BYTES_MIN).map(|(tap, _)| tap)
    }

    /// Loads and attaches the program as [`BpfTap::load`] does, and also reports pages that are
    /// added to the page cache.
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

    /// Returns the number of folios of more than one page among the captured evictions.
    pub fn large_folios(&self) -> u64 {
        self.sum().large_folios
    }

    fn sum(&self) -> TapCounters {
        let mut sum = TapCounters::default();
        // Looking up the only entry of an array cannot fail. If it did, a counter would be too low,
        // and nothing else would be wrong.
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
    let bases = probe_layout()?;
    let lines = skip_list::lines(target.takes_hints);
    let config = TapConfig {
        vmemmap_base: bases.vmemmap,
        linear_base: bases.linear,
        device: intf::kernel_device(target.device),
        tells_cgroup: target.tells_cgroup.into(),
        skip_list_shift: skip_list::shift(lines),
    };
    let object = load::load(OBJECT, "loading the eviction tap", |object| {
        load::open_map(object, ".rodata")?.set_initial_value(config.as_bytes())?;
        load::open_map(object, "added_ring")?.set_max_entries(added_bytes as u32)?;
        load::open_map(object, "skip_list")?.set_max_entries(lines as u32)?;
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
    let table = load::map(&object, "skip_list")?;
    let skip_list = target.takes_hints.then(|| SkipList::new(table.as_fd(), lines).map(Arc::new)).transpose();
    let skip_list = skip_list.map_err(|source| LoadError::System { attempt: "mapping the tap's skip list", source })?;
    let link = load::attach(&load::program(&object, "tap")?, "attaching the eviction tap")?;
    Ok((BpfTap { ring, counters, skip_list, _link: link }, object))
}

/// The pages that are added to the page cache of the same file system. If they are not taken in
/// time, further ones are left out.
pub struct AddedTap {
    ring: Ring,
    _link: Link,
}

impl AddedTap {
    /// The size of the ring in bytes: some 30,000 additions.
    const RING_BYTES: usize = 1 << 20;
    /// The size of the ring in bytes if additions are not wanted.
    const RING_BYTES_MIN: usize = 4 << 10;

    /// Passes the available records to `take`, oldest first, each exactly once. Returns their
    /// number.
    ///
    /// # Errors
    /// If the ring's contents are invalid.
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
        self.skip_list.clone().map(|list| list as Arc<dyn CopyHints>)
    }
}

impl fmt::Debug for BpfTap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BpfTap").field("counters", &self.sum()).finish_non_exhaustive()
    }
}
