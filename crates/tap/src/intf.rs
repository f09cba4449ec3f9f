//! Rust's side of `bpf/intf.h`, the contract with the BPF programs: the same layouts, constants and
//! sizes.
//!
//! The bytes that come out of a map or the ring are taken apart here by position and nowhere else.
//! Nothing here panics on bytes of an unexpected length: it answers with `None`.

use crate::{Added, Seen, SeenKind};
use page::{PAGE_SIZE, Page};
use std::time::Duration;

/// Bytes of `struct tap_head`.
pub(crate) const HEAD_BYTES: usize = 24;

/// Bytes of `struct tap_event`.
pub(crate) const EVENT_BYTES: usize = HEAD_BYTES + PAGE_SIZE;

/// `OMITTED_LINE_PAGES` and `OMITTED_MULTIPLIER`.
pub(crate) const OMITTED_LINE_PAGES: u64 = 16;
pub(crate) const OMITTED_MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// `CALIBRATE_FILES`.
pub(crate) const CALIBRATE_FILES: usize = 4;

/// Bytes of `struct calibrate_peek`.
pub(crate) const PEEK_BYTES: usize = 16 + PAGE_SIZE;

/// Key of the only entry of a one-entry array.
pub(crate) const ONLY_KEY: [u8; 4] = 0u32.to_ne_bytes();

/// The kernel's own `dev_t` for what `stat` calls `st_dev`: they differ in how they pack the two
/// numbers.
pub(crate) fn kernel_device(st_dev: u64) -> u32 {
    const MINOR_BITS: u32 = 20;
    (libc::major(st_dev) << MINOR_BITS) | libc::minor(st_dev)
}

/// `struct tap_event`, or only its head.
#[derive(Debug)]
pub(crate) struct TapEvent<'a> {
    pub(crate) generation: u32,
    pub(crate) cgroup: u32,
    pub(crate) inode: u64,
    pub(crate) index: u64,
    /// None: its bytes were omitted.
    pub(crate) page: Option<&'a Page>,
}

impl<'a> TapEvent<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<TapEvent<'a>> {
        let (head, page) = bytes.split_first_chunk::<HEAD_BYTES>()?;
        let (generation, cgroup) = (word(head, 0)? as u32, (word(head, 0)? >> 32) as u32);
        let page = if page.is_empty() { None } else { Some(page.try_into().ok()?) };
        Some(TapEvent { generation, cgroup, inode: word(head, 1)?, index: word(head, 2)?, page })
    }
}

/// `struct tap_added`.
pub(crate) fn parse_added(bytes: &[u8]) -> Option<Added> {
    let bytes: &[u8; 24] = bytes.try_into().ok()?;
    let (generation, pages) = (word(bytes, 0)? as u32, (word(bytes, 0)? >> 32) as u32);
    Some(Added { generation, inode: word(bytes, 1)?, index: word(bytes, 2)?, pages })
}

/// `struct tap_config`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TapConfig {
    pub(crate) vmemmap_base: u64,
    pub(crate) linear_base: u64,
    pub(crate) device: u32,
    pub(crate) tells_cgroup: bool,
    pub(crate) omitted_shift: u64,
}

impl TapConfig {
    pub(crate) fn to_bytes(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&self.vmemmap_base.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.linear_base.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.device.to_ne_bytes());
        bytes[20..24].copy_from_slice(&u32::from(self.tells_cgroup).to_ne_bytes());
        bytes[24..].copy_from_slice(&self.omitted_shift.to_ne_bytes());
        bytes
    }
}

/// `struct tap_counters`.
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
    /// Adds one CPU's counts. Counts that make no sense give the largest there is, and no panic.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Option<()> {
        let TapCounters { captured, ring_full, invalidated, unreadable, large_folios, omitted } = self;
        let all = [captured, ring_full, invalidated, unreadable, large_folios, omitted];
        for (nth, counter) in all.into_iter().enumerate() {
            *counter = counter.saturating_add(word(bytes, nth)?);
        }
        Some(())
    }
}

/// `struct calibrate_config`.
pub(crate) fn calibrate_config(inodes: [u64; CALIBRATE_FILES], device: u32) -> [u8; 40] {
    let mut bytes = [0; 40];
    for (place, inode) in bytes.chunks_exact_mut(8).zip(inodes) {
        place.copy_from_slice(&inode.to_ne_bytes());
    }
    bytes[32..36].copy_from_slice(&device.to_ne_bytes());
    bytes
}

/// `struct calibrate_sighting`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sighting {
    pub(crate) folio: u64,
    pub(crate) struct_page_bytes: u64,
}

impl Sighting {
    pub(crate) fn parse(bytes: &[u8]) -> Option<Sighting> {
        Some(Sighting { folio: word(bytes, 0)?, struct_page_bytes: word(bytes, 1)? })
    }
}

/// `struct calibrate_peek`.
pub(crate) struct Peek<'a> {
    pub(crate) task: u64,
    pub(crate) failed: bool,
    pub(crate) page: &'a Page,
}

impl<'a> Peek<'a> {
    pub(crate) fn parse(bytes: &'a [u8; PEEK_BYTES]) -> Option<Peek<'a>> {
        Some(Peek { task: word(bytes, 0)?, failed: word(bytes, 1)? != 0, page: bytes[16..].try_into().ok()? })
    }
}

/// `WATCH_DEVICES`.
pub(crate) const WATCH_DEVICES: usize = 8;

/// `struct watch_config`.
#[derive(Default)]
pub(crate) struct WatchConfig {
    pub(crate) devices: [u32; WATCH_DEVICES],
}

impl WatchConfig {
    pub(crate) fn to_bytes(&self) -> [u8; 4 * WATCH_DEVICES] {
        let mut bytes = [0; 4 * WATCH_DEVICES];
        for (place, device) in bytes.chunks_exact_mut(4).zip(self.devices) {
            place.copy_from_slice(&device.to_ne_bytes());
        }
        bytes
    }
}

/// `struct watch_shared`.
pub(crate) fn watch_shared(threshold: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[8..].copy_from_slice(&threshold.to_ne_bytes());
    bytes
}

/// `struct watch_event`.
pub(crate) fn parse_seen(bytes: &[u8]) -> Option<Seen> {
    let bytes: &[u8; 40] = bytes.try_into().ok()?;
    let (kind, device) = (word(bytes, 0)? as u32, (word(bytes, 0)? >> 32) as u32);
    let kind = match kind {
        1 => SeenKind::Added,
        2 => SeenKind::Evicted,
        3 => SeenKind::Invalidated,
        4 => SeenKind::Read,
        5 => SeenKind::Written,
        6 => SeenKind::Waited(Duration::from_nanos(word(bytes, 4)?)),
        7 => SeenKind::Mapped,
        _ => return None,
    };
    Some(Seen { kind, device, inode: word(bytes, 1)?, index: word(bytes, 2)?, pages: word(bytes, 3)? as u32 })
}

/// `struct watch_counters`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WatchTotals {
    pub(crate) read_pages: u64,
    pub(crate) ring_full: u64,
}

impl WatchTotals {
    /// Adds one CPU's counts, as [`TapCounters::add`] does.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> Option<()> {
        let WatchTotals { read_pages, ring_full } = self;
        for (nth, counter) in [read_pages, ring_full].into_iter().enumerate() {
            *counter = counter.saturating_add(word(bytes, nth)?);
        }
        Some(())
    }
}

/// The 8 bytes at position `nth * 8`.
fn word(bytes: &[u8], nth: usize) -> Option<u64> {
    let bytes = bytes.get(nth * 8..)?.first_chunk::<8>()?;
    Some(u64::from_ne_bytes(*bytes))
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
    fn what_is_watched_is_parsed() {
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
