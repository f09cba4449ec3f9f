//! Watches the page cache of existing file systems, without a mount and without copying any page:
//! which pages are added, evicted and read.
//!
//! Promises: nothing is left behind, because the programs end with [`AccessTrace`]. If records are
//! not taken in time, they are lost and counted, and block no program.

use crate::intf::{self, AccessTraceTotals, ONLY_KEY};
use crate::load::{self, LoadError};
use crate::ring::Ring;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle};
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;
use zerocopy::IntoBytes;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/access_trace.bpf.o"));

/// The size of the ring in bytes: some 170,000 records, which is the most that half a second
/// brings.
const RING_BYTES: usize = 8 << 20;

/// The events of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeenKind {
    /// The pages were added to the page cache, to be read or to be written. Reported for all pages.
    Added,
    /// Reclaim evicted the pages. Reported at least for those that are sampled.
    Evicted,
    /// The pages left the cache in another way: truncated, or dropped on request. Reported at least
    /// for those that are sampled.
    Invalidated,
    /// A program reads a page. Reported for those that are sampled.
    Read,
    /// The pages that the same task added just before were added to be written.
    Written,
    /// The page that the same task added just before was readable after this time.
    Waited(Duration),
    /// Cached pages were mapped around one that a program touched.
    Mapped,
}

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The event.
    pub kind: SeenKind,
    /// The file system's device number in the kernel's form ([`AccessTrace::device`]).
    pub device: u32,
    /// `i_ino` of the inode.
    pub inode: u64,
    /// The index of the first page in the file.
    pub index: u64,
    /// The number of pages.
    pub pages: u32,
}

/// The counts of the access trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessTraceCounters {
    /// Pages that programs read, sampled or not.
    pub read_pages: u64,
    /// Records lost because the ring was full.
    pub ring_full: u64,
}

/// The way in which reads of cached pages are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadsSource {
    /// In the page cache: the tracepoint `mm_filemap_get_pages`.
    PageCache,
    /// At the system calls read and pread64: others (readv, io_uring, sendfile) are not seen.
    SystemCalls,
}

/// The access trace. It ends when this is dropped.
pub struct AccessTrace {
    ring: Ring,
    counters: MapHandle,
    shared: MapHandle,
    source: ReadsSource,
    _links: Vec<Link>,
}

impl AccessTrace {
    /// The maximum number of file systems.
    pub const DEVICES_MAX: usize = intf::TRACE_DEVICES;

    /// Returns the kernel's number of a device that `stat` returns as `st_dev`.
    pub fn device(st_dev: u64) -> u32 {
        intf::kernel_device(st_dev)
    }

    /// Watches the file systems of these devices (`st_dev`); if there are more than
    /// [`AccessTrace::DEVICES_MAX`], only the first ones. Without `source`, uses the best that this
    /// kernel has. Needs the rights of [`crate::BpfTap::load`].
    ///
    /// # Errors
    /// If the programs cannot be loaded or attached.
    pub fn load(devices: &[u64], source: Option<ReadsSource>) -> Result<AccessTrace, LoadError> {
        let mut kernel_devices = [0; AccessTrace::DEVICES_MAX];
        for (place, device) in kernel_devices.iter_mut().zip(devices) {
            *place = intf::kernel_device(*device);
        }
        let object = load::load(OBJECT, "loading the access trace", |object| {
            load::open_map(object, ".rodata")?.set_initial_value(intf::trace_config(kernel_devices).as_bytes())?;
            load::open_map(object, ".bss")?.set_initial_value(intf::trace_shared(1 << 32).as_bytes())?;
            load::open_map(object, "ring")?.set_max_entries(RING_BYTES as u32)
        })?;
        let attempt = "opening the access trace's maps";
        let handle = |name| {
            MapHandle::try_from(&load::map(&object, name)?)
                .map_err(|error| LoadError::System { attempt, source: io::Error::other(format!("{error:#}")) })
        };
        let (counters, shared) = (handle("counters")?, handle(".bss")?);
        let ring = load::map(&object, "ring")?.as_fd().try_clone_to_owned();
        let ring = ring
            .and_then(|map| Ring::new(map, RING_BYTES, shared.as_fd()))
            .map_err(|source| LoadError::System { attempt: "mapping the access trace's ring", source })?;
        let attach = |name| load::attach(&load::program(&object, name)?, "attaching the access trace");
        let mut links = vec![attach("added")?, attach("deleted")?];
        // These programs report more, if the kernel has their tracepoints.
        links.extend(["dirtied", "faulted", "mapped"].into_iter().filter_map(|name| attach(name).ok()));
        let by_page_cache = match source {
            Some(ReadsSource::SystemCalls) => None,
            Some(ReadsSource::PageCache) => Some(attach("got")?),
            None => attach("got").ok(),
        };
        let source = if by_page_cache.is_some() { ReadsSource::PageCache } else { ReadsSource::SystemCalls };
        links.push(by_page_cache.map_or_else(|| attach("called"), Ok)?);
        Ok(AccessTrace { ring, counters, shared, source, _links: links })
    }

    /// Returns the way in which reads are seen.
    pub fn source(&self) -> ReadsSource {
        self.source
    }

    /// From now on only pages whose hash is below this value are reported one by one.
    ///
    /// # Errors
    /// If the map refuses the update, which is not expected.
    pub fn set_threshold(&self, threshold: u64) -> io::Result<()> {
        let updated = self.shared.update(&ONLY_KEY, intf::trace_shared(threshold).as_bytes(), MapFlags::ANY);
        updated.map_err(|error| io::Error::other(format!("{error:#}")))
    }

    /// Passes the available records to `take`, oldest first, each exactly once. Returns their
    /// number.
    ///
    /// # Errors
    /// If the ring's contents are invalid.
    pub fn take(&mut self, take: &mut dyn FnMut(Seen)) -> io::Result<usize> {
        self.ring.drain(Duration::ZERO, &mut |_, bytes| {
            take(intf::parse_seen(bytes).ok_or(io::ErrorKind::InvalidData)?);
            Ok(())
        })
    }

    /// Returns the counts so far.
    pub fn counters(&self) -> AccessTraceCounters {
        let mut sum = AccessTraceTotals::default();
        // As in the tap: a failure would leave a counter too low.
        if let Ok(Some(cpus)) = self.counters.lookup_percpu(&ONLY_KEY, MapFlags::ANY) {
            for cpu in &cpus {
                let _ = sum.add(cpu);
            }
        }
        let AccessTraceTotals { read_pages, ring_full } = sum;
        AccessTraceCounters { read_pages, ring_full }
    }
}
