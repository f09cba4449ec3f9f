//! The data that the BPF programs and this crate exchange through maps and rings.
//!
//! `bpf/intf.h` is the contract with the programs. bindgen derives layouts, sizes and constants
//! from it when this crate is built (`build.rs`), so none of them is defined a second time.
//! Structures are decoded and built field by field. So if a field there is renamed, added, removed
//! or resized, this file no longer compiles.
//!
//! No function here panics on bytes of an unexpected length: it returns `None`.

use crate::{Added, Seen, SeenKind};
use page::{PAGE_SIZE, Page};
use std::mem::offset_of;
use std::time::Duration;
use zerocopy::FromBytes;

/// The output of bindgen for `bpf/intf.h`.
mod layout {
    #![allow(dead_code, non_camel_case_types)]
    include!(concat!(env!("OUT_DIR"), "/intf.rs"));
}

/// The tap's configuration, set before it is loaded.
pub(crate) use layout::tap_config as TapConfig;

/// The bytes of an event without its page.
pub(crate) const HEAD_BYTES: usize = size_of::<layout::tap_head>();

/// The bytes of an event with its page.
pub(crate) const EVENT_BYTES: usize = size_of::<layout::tap_event>();

const _: () = assert!(offset_of!(layout::tap_event, page) == HEAD_BYTES && EVENT_BYTES == HEAD_BYTES + PAGE_SIZE);

/// The number of places in a line of the table of omitted pages.
pub(crate) const SKIP_LIST_LINE_PAGES: u64 = layout::SKIP_LIST_LINE_PAGES as u64;
/// The multiplier that distributes the lines over that table. (For a C constant beyond `i64`
/// bindgen keeps the bits.)
pub(crate) const SKIP_LIST_MULTIPLIER: u64 = layout::SKIP_LIST_MULTIPLIER as u64;

/// The number of files that the calibration uses.
pub(crate) const PROBE_FILES: usize = layout::PROBE_FILES as usize;

/// The bytes of the answer of one run of `peek`.
pub(crate) const PEEK_BYTES: usize = size_of::<layout::probe_peek>();

/// The maximum number of file systems that are watched at once.
pub(crate) const TRACE_DEVICES: usize = layout::TRACE_DEVICES as usize;

/// The key of the only entry of a one-entry array.
pub(crate) const ONLY_KEY: [u8; 4] = 0u32.to_ne_bytes();

/// Returns the kernel's own `dev_t` for an `st_dev` of `stat`: they pack the two numbers
/// differently.
pub(crate) fn kernel_device(st_dev: u64) -> u32 {
    const MINOR_BITS: u32 = 20;
    (libc::major(st_dev) << MINOR_BITS) | libc::minor(st_dev)
}

/// An event of the tap (`struct tap_event`), or only its head.
#[derive(Debug)]
pub(crate) struct TapEvent<'a> {
    pub(crate) generation: u32,
    pub(crate) cgroup: u32,
    pub(crate) inode: u64,
    pub(crate) index: u64,
    /// None if its bytes were omitted.
    pub(crate) page: Option<&'a Page>,
}

impl<'a> TapEvent<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<TapEvent<'a>> {
        let (head, page) = layout::tap_head::read_from_prefix(bytes).ok()?;
        let layout::tap_head { generation, cgroup, inode, index } = head;
        let page = if page.is_empty() { None } else { Some(page.try_into().ok()?) };
        Some(TapEvent { generation, cgroup, inode, index, page })
    }
}

/// Decodes a `struct tap_added`.
pub(crate) fn parse_added(bytes: &[u8]) -> Option<Added> {
    let layout::tap_added { generation, pages, inode, index } = layout::tap_added::read_from_bytes(bytes).ok()?;
    Some(Added { generation, inode, index, pages })
}

/// Counts of the tap (`struct tap_counters`), the sum over all CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TapCounters {
    pub(crate) captured: u64,
    pub(crate) ring_full: u64,
    pub(crate) invalidated: u64,
    pub(crate) unreadable: u64,
    pub(crate) large_folios: u64,
    pub(crate) omitted: u64,
}

impl TapCounters {
    /// Adds one CPU's counts. Impossible counts give the largest number, and no panic.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Option<()> {
        let (cpu, _) = layout::tap_counters::read_from_prefix(bytes).ok()?;
        let layout::tap_counters { captured, ring_full, invalidated, unreadable, large_folios, omitted } = cpu;
        *self = TapCounters {
            captured: self.captured.saturating_add(captured),
            ring_full: self.ring_full.saturating_add(ring_full),
            invalidated: self.invalidated.saturating_add(invalidated),
            unreadable: self.unreadable.saturating_add(unreadable),
            large_folios: self.large_folios.saturating_add(large_folios),
            omitted: self.omitted.saturating_add(omitted),
        };
        Some(())
    }
}

/// Returns the configuration of the calibration (`struct probe_config`), set before it is
/// loaded.
pub(crate) fn probe_config(inodes: [u64; PROBE_FILES], device: u32) -> layout::probe_config {
    layout::probe_config { inodes, device, reserved: 0 }
}

/// The state of a page when it left the cache (`struct probe_sighting`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sighting {
    pub(crate) folio: u64,
    pub(crate) struct_page_bytes: u64,
}

impl Sighting {
    pub(crate) fn parse(bytes: &[u8]) -> Option<Sighting> {
        let (seen, _) = layout::probe_sighting::read_from_prefix(bytes).ok()?;
        let layout::probe_sighting { folio, struct_page_bytes } = seen;
        Some(Sighting { folio, struct_page_bytes })
    }
}

/// The answer of one run of `peek` (`struct probe_peek`).
pub(crate) struct Peek {
    pub(crate) task: u64,
    pub(crate) failed: bool,
    pub(crate) page: Page,
}

impl Peek {
    pub(crate) fn parse(bytes: &[u8; PEEK_BYTES]) -> Option<Peek> {
        let layout::probe_peek { task, failed, page } = layout::probe_peek::read_from_bytes(bytes).ok()?;
        Some(Peek { task, failed: failed != 0, page })
    }
}

/// Returns the configuration of the access trace (`struct trace_config`), set before it is loaded:
/// the devices.
pub(crate) fn trace_config(devices: [u32; TRACE_DEVICES]) -> layout::trace_config {
    layout::trace_config { devices }
}

/// Returns the memory that the access trace shares with its programs (`struct trace_shared`).
pub(crate) fn trace_shared(threshold: u64) -> layout::trace_shared {
    layout::trace_shared { unused: 0, reserved: 0, threshold }
}

/// Decodes a `struct trace_event`.
pub(crate) fn parse_seen(bytes: &[u8]) -> Option<Seen> {
    let layout::trace_event { kind, device, inode, index, pages, reserved: _, ns } =
        layout::trace_event::read_from_bytes(bytes).ok()?;
    let kind = match kind {
        layout::TRACE_ADDED => SeenKind::Added,
        layout::TRACE_EVICTED => SeenKind::Evicted,
        layout::TRACE_INVALIDATED => SeenKind::Invalidated,
        layout::TRACE_READ => SeenKind::Read,
        layout::TRACE_WRITTEN => SeenKind::Written,
        layout::TRACE_WAITED => SeenKind::Waited(Duration::from_nanos(ns)),
        layout::TRACE_MAPPED => SeenKind::Mapped,
        _ => return None,
    };
    Some(Seen { kind, device, inode, index, pages })
}

/// Counts of the access trace (`struct trace_counters`), the sum over all CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AccessTraceTotals {
    pub(crate) read_pages: u64,
    pub(crate) ring_full: u64,
}

impl AccessTraceTotals {
    /// Adds one CPU's counts. Impossible counts give the largest number, and no panic.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Option<()> {
        let (layout::trace_counters { read_pages, ring_full }, _) =
            layout::trace_counters::read_from_prefix(bytes).ok()?;
        self.read_pages = self.read_pages.saturating_add(read_pages);
        self.ring_full = self.ring_full.saturating_add(ring_full);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_of_any_other_length_is_none() {
        let mut bytes = vec![0u8; EVENT_BYTES];
        bytes[..4].copy_from_slice(&7u32.to_ne_bytes());
        bytes[4..8].copy_from_slice(&6u32.to_ne_bytes());
        bytes[8..16].copy_from_slice(&8u64.to_ne_bytes());
        bytes[16..24].copy_from_slice(&9u64.to_ne_bytes());
        bytes[24] = 0x5a;
        bytes[EVENT_BYTES - 1] = 0xa5;
        let event = TapEvent::parse(&bytes).unwrap();
        assert_eq!((event.generation, event.cgroup, event.inode, event.index), (7, 6, 8, 9));
        let added = parse_added(&bytes[..24]).unwrap();
        assert_eq!(added, Added { generation: 7, pages: 6, inode: 8, index: 9 });
        assert!(parse_added(&bytes[..25]).is_none() && parse_added(&bytes[..23]).is_none());
        let page = event.page.unwrap();
        assert_eq!((page[0], page[PAGE_SIZE - 1]), (0x5a, 0xa5));
        let omitted = TapEvent::parse(&bytes[..HEAD_BYTES]).unwrap();
        assert_eq!((omitted.generation, omitted.cgroup, omitted.inode, omitted.index), (7, 6, 8, 9));
        assert!(omitted.page.is_none());
        for length in [0, 1, 8, 23, 25, EVENT_BYTES - 1] {
            assert!(TapEvent::parse(&bytes[..length]).is_none(), "{length} bytes");
        }
        bytes.push(0);
        assert!(TapEvent::parse(&bytes).is_none());
    }

    #[test]
    fn trace_records_are_parsed() {
        let words = [6 | 254 << 52, 8, 9, 3, 2_000];
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        let kind = SeenKind::Waited(Duration::from_micros(2));
        assert_eq!(parse_seen(&bytes), Some(Seen { kind, device: 254 << 20, inode: 8, index: 9, pages: 3 }));
        assert!(parse_seen(&bytes[1..]).is_none() && parse_seen(&[0; 40]).is_none());
    }

    #[test]
    fn counters_add_up_over_cpus() {
        let cpu: Vec<u8> = (1..=6u64).flat_map(u64::to_ne_bytes).collect();
        let mut sum = TapCounters::default();
        sum.add(&cpu).unwrap();
        sum.add(&cpu).unwrap();
        let expected =
            TapCounters { captured: 2, ring_full: 4, invalidated: 6, unreadable: 8, large_folios: 10, omitted: 12 };
        assert_eq!(sum, expected);
        assert!(sum.add(&cpu[..47]).is_none());
        // Found by fuzzing: it overflowed.
        sum.add(&[0xff; 48]).unwrap();
        assert_eq!(sum.ring_full, u64::MAX);
    }

    #[test]
    fn devices_are_repacked() {
        assert_eq!(kernel_device(libc::makedev(254, 0)), 254 << 20);
        assert_eq!(kernel_device(libc::makedev(0, 0x12345)), 0x12345);
    }
}
