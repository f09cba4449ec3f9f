//! The thread that adapts the store to the machine's memory.
//!
//! It has these tasks, ten times a second:
//! - Read the free memory, and give it to the store as the maximum growth until the next check.
//!   This happens more often if little is free.
//! - Judge the memory pressure.
//! - Give back as much as others take of the reserve ([`crate::reclaim_target`]).
//! - Check whether the kernel has taken lazily freed pages of any process, and then search for lost
//!   pages of the store. The thread notes lost pages for the borrowers; their connections send the
//!   notices.
//! - Free the pages of borrowers that did not come back.
//! - While lending is off, give lent pages back.
//!
//! Nothing here waits for a borrower. If memory cannot be read, the store does not grow.

use crate::available_memory::{AvailableMemory, Memory, Stalls};
use crate::pressure::{self, Pressure};
use crate::reclaim_target::ReclaimTarget;
use crate::shared::Shared;
use crate::store::Store;
use page::PAGE_SIZE;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// The maximum time between two checks. In this time a 10 Gbit/s network brings at most 120 MB; the
/// usual reserve is larger.
const TICK: Duration = Duration::from_millis(100);
/// Memory that a stored page needs: the page, its record and index entry, its page table entry.
const PAGE_COST_BYTES: u64 = PAGE_SIZE as u64 + 31 + 5 + 8;
/// Slots that are searched while the store is locked: 64 MiB of them, some 100 microseconds.
const SCAN_SLOTS: u32 = 16_384;
/// After a search the thread waits this many times its duration before the next one, so that
/// searches use a tenth of a processor.
const SCAN_REST: u32 = 9;
/// Time between two readings of the kernel's watermarks. They change when somebody sets them, and
/// for a while when memory is fragmented.
const WATERMARKS_REST: Duration = Duration::from_secs(1);
/// The kernel frees a little more than its watermarks: this part of them.
const WATERMARKS_MARGIN_SHARE: u64 = 8;
/// Pages given back with the store locked: well below a millisecond.
const SHRINK_PAGES: usize = 512;
/// Parts of the pages of gone borrowers that are freed between two checks: 128 MiB, some 20 ms.
const LEAVING_PARTS: usize = 64;

/// The state of the thread.
pub struct Housekeeper {
    available_memory: AvailableMemory,
    pressure: Pressure,
    reclaim_target: ReclaimTarget,
    /// Memory that the kernel always frees again when it is used, and the time of that reading.
    watermarks: Option<(Instant, u64)>,
    /// Time until the next check.
    next_look: Duration,
    /// The time of the last judgement of the pressure, and the stalls at that time.
    window: Option<(Instant, Stalls)>,
    /// The kernel's count of lazily freed pages when the last search began.
    lazily_freed_pages: Option<u64>,
    next_scan: Option<Instant>,
    complained: bool,
}

impl Housekeeper {
    /// A housekeeper that has not checked anything yet.
    pub fn new(available_memory: AvailableMemory) -> Housekeeper {
        Housekeeper {
            available_memory,
            pressure: Pressure::None,
            reclaim_target: ReclaimTarget::default(),
            watermarks: None,
            next_look: TICK,
            window: None,
            lazily_freed_pages: None,
            next_scan: None,
            complained: false,
        }
    }

    /// Checks, at least every [`TICK`], until the lender stops.
    pub fn run(mut self, shared: &Shared) {
        let mut ticked = Instant::now();
        while !shared.stop.wait(None, Some(self.next_look)) {
            let now = Instant::now();
            if now.duration_since(ticked) >= TICK {
                ticked = now;
                self.tick(shared, now);
            } else {
                self.look(shared, now);
            }
        }
    }

    /// Does all tasks of a tenth of a second.
    pub fn tick(&mut self, shared: &Shared, now: Instant) {
        self.look(shared, now);
        self.scan_when_due(shared, now);
        forget_left_behind(shared, now);
        give_back_unlent(shared);
    }

    /// Reads memory, sets the store's available memory, and gives back what others need.
    fn look(&mut self, shared: &Shared, now: Instant) {
        // Pages that the store takes between this line and the new value are part of the memory
        // that is seen as free.
        let (grown_before, held_bytes) = {
            let store = shared.store.lock();
            let held_pages = [store.stored_pages(), store.free_resident_pages(), store.reserved_pages()].map(u64::from);
            let held_pages: u64 = held_pages.into_iter().sum();
            (store.grown_pages(), held_pages * PAGE_COST_BYTES)
        };
        let memory = self.available_memory.read_with_machine();
        let reserve_bytes = shared.reserve_bytes.load(Relaxed);
        self.next_look = TICK;
        let (spare_bytes, target_bytes) = match &memory {
            Ok((memory, machine)) => {
                self.judge(*memory, *machine, reserve_bytes, now);
                let target_bytes = self.reclaim_target.look(*memory, held_bytes, reserve_bytes);
                self.next_look = self.reclaim_target.next_look(*memory, held_bytes, reserve_bytes, TICK);
                let spare_bytes = memory.free_bytes.saturating_sub(reserve_bytes);
                (spare_bytes.min(self.unclaimed_bytes(*machine, now)), target_bytes)
            }
            Err(error) => {
                if !std::mem::replace(&mut self.complained, true) {
                    tracing::warn!(%error, "cannot read how much memory is free: the store does not grow");
                }
                (0, 0)
            }
        };
        let may_grow = self.pressure == Pressure::None && !self.reclaim_target.grows();
        let spare_bytes = if may_grow { spare_bytes } else { 0 };
        {
            let mut store = shared.store.lock();
            store.mark_reclaimable(); // pages that no event loop had the time for
            let grown_pages = store.grown_pages() - grown_before;
            store.set_available_pages((spare_bytes / PAGE_COST_BYTES).saturating_sub(grown_pages));
        }
        shared.statistics.available_bytes.store(spare_bytes, Relaxed);
        shared.statistics.pressure.store(self.pressure as u8, Relaxed);
        if let Ok((memory, _)) = memory {
            shared.statistics.memory_total_bytes.store(memory.total_bytes, Relaxed);
        }
        let given_pages = give_back(shared, (target_bytes / PAGE_COST_BYTES) as usize);
        shared.statistics.demanded_pages.fetch_add(given_pages as u64, Relaxed);
        if self.pressure == Pressure::Shrink && self.window.is_some_and(|(begun, _)| begun == now) {
            shrink(shared);
        }
    }

    /// Free memory of the machine beyond the kernel's watermarks. The kernel reclaims page cache to
    /// refill memory up to the watermarks, so a lender that took this memory would grow without
    /// end.
    fn unclaimed_bytes(&mut self, machine: Memory, now: Instant) -> u64 {
        let is_due = self.watermarks.is_none_or(|(read, _)| now.duration_since(read) >= WATERMARKS_REST);
        if is_due {
            self.watermarks = Some((now, self.available_memory.watermark_bytes()));
        }
        let kept_bytes = self.watermarks.map_or(0, |(_, bytes)| bytes);
        machine.free_bytes.saturating_sub(kept_bytes.saturating_add(kept_bytes / WATERMARKS_MARGIN_SHARE))
    }

    fn judge(&mut self, memory: Memory, machine: Memory, reserve_bytes: u64, now: Instant) {
        let elapsed = self.window.map(|(begun, _)| now.duration_since(begun));
        if elapsed.is_some_and(|elapsed| elapsed < pressure::WINDOW) {
            return;
        }
        let stalls = self.available_memory.stalls();
        self.pressure = match (self.window, elapsed) {
            (Some((_, before)), Some(elapsed)) => {
                let Stalls { limited_us, machine_us } = stalls.since(before);
                let judge = |stalled_us: Option<u64>, memory| {
                    pressure::judge(stalled_us.unwrap_or(0), elapsed, memory, reserve_bytes)
                };
                judge(limited_us, memory).max(judge(machine_us, machine))
            }
            _ => Pressure::None,
        };
        self.window = Some((now, stalls));
    }

    fn scan_when_due(&mut self, shared: &Shared, now: Instant) {
        let lazily_freed_pages = self.available_memory.lazily_freed_pages();
        // If the kernel does not count these pages, the search runs at its lowest rate.
        let moved = lazily_freed_pages.is_none() || lazily_freed_pages != self.lazily_freed_pages;
        if !moved || self.next_scan.is_some_and(|next| now < next) {
            return;
        }
        self.lazily_freed_pages = lazily_freed_pages;
        let begun = Instant::now();
        match scan(shared) {
            Ok(lost_pages) if lost_pages > 0 => tracing::debug!(lost_pages, "the kernel took pages"),
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "cannot search for pages that the kernel took"),
        }
        shared.statistics.scans.fetch_add(1, Relaxed);
        self.next_scan = Some(now + begun.elapsed() * SCAN_REST);
    }
}

/// Forgets borrowers that did not come back in time, and frees the pages of forgotten ones, a part
/// at a time.
pub(crate) fn forget_left_behind(shared: &Shared, now: Instant) {
    let expired = shared.table.lock().expire(shared.grace, now);
    if expired > 0 {
        tracing::info!(borrowers = expired, "did not come back in time; freeing their pages");
        shared.statistics.expired_sessions.fetch_add(expired as u64, Relaxed);
    }
    for _ in 0..LEAVING_PARTS {
        let Some(tenant) = shared.table.lock().next_leaving() else { return };
        let gone = shared.store.lock().remove_tenant(tenant, SHRINK_PAGES);
        if gone {
            shared.table.lock().has_left(tenant);
        }
    }
}

/// While lending is off, gives lent pages back, a part at a time.
pub(crate) fn give_back_unlent(shared: &Shared) {
    for _ in 0..LEAVING_PARTS {
        let mut store = shared.store.lock();
        if store.is_lending() || store.clear(SHRINK_PAGES) == 0 {
            return;
        }
        drop(store);
    }
}

/// Searches all slots, a part at a time.
pub(crate) fn scan(shared: &Shared) -> std::io::Result<usize> {
    let (mut first, mut lost_pages) = (0, 0);
    let mut store = shared.store.lock();
    while first < store.used_slots() {
        let end = first.saturating_add(SCAN_SLOTS);
        lost_pages += store.scan(first..end)?;
        first = end;
        store.bump();
    }
    Ok(lost_pages)
}

/// Gives back a share of the pages, a part at a time.
pub(crate) fn shrink(shared: &Shared) {
    let share = |store: &Store| (store.stored_pages() + store.free_resident_pages()) as usize / pressure::SHRINK_SHARE;
    let pages = share(&shared.store.lock()).max(1);
    tracing::info!(pages, "memory pressure: giving pages back");
    give_back(shared, pages);
}

/// Gives this many pages back, a part at a time. Returns how many there were.
fn give_back(shared: &Shared, pages: usize) -> usize {
    let mut left = pages;
    while left > 0 {
        let given = shared.store.lock().shrink(left.min(SHRINK_PAGES));
        if given == 0 {
            break;
        }
        left -= given;
    }
    pages - left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Key, Tenant};
    use page::{FileKey, PageId, Version};
    use std::fs::write;
    use std::path::Path;

    const MIB: u64 = 1 << 20;

    fn machine(root: &Path, free_mib: u64, stalled_us: u64) {
        std::fs::create_dir_all(root.join("pressure")).unwrap();
        let free_kib = free_mib * 1024;
        write(root.join("meminfo"), format!("MemTotal: 1024000 kB\nMemFree: {free_kib} kB\n")).unwrap();
        write(root.join("pressure/memory"), format!("some avg10=0.00 total={stalled_us}\n")).unwrap();
    }

    fn store(capacity_pages: u32) -> (Shared, Tenant) {
        let mut store = Store::new(capacity_pages).unwrap();
        let tenant = store.add_tenant().unwrap();
        (Shared::new(store, crate::GRACE_DEFAULT, crate::Security::Trusting).unwrap(), tenant)
    }

    fn put(shared: &Shared, tenant: Tenant, indexes: std::ops::Range<u32>) -> usize {
        let id = |index| PageId { file: FileKey(1), index };
        let mut store = shared.store.lock();
        let mut stored = |index| store.put(tenant, Key { id: id(index), version: Version(1) }, 0, &[1; PAGE_SIZE]);
        indexes.filter(|index| stored(*index)).count()
    }

    #[test]
    fn the_store_grows_by_what_is_free() {
        let directory = tempfile::tempdir().unwrap();
        let (shared, tenant) = store(1000);
        let mut housekeeper = Housekeeper::new(AvailableMemory::new(directory.path()));
        shared.reserve_bytes.store(100 * MIB, Relaxed);
        // Without known sizes the store takes nothing.
        housekeeper.tick(&shared, Instant::now());
        assert_eq!(put(&shared, tenant, 0..10), 0);
        machine(directory.path(), 101, 0);
        housekeeper.tick(&shared, Instant::now());
        put(&shared, tenant, 0..900);
        let grown = shared.store.lock().stored_pages();
        assert_eq!(u64::from(grown), MIB / PAGE_COST_BYTES);
        // The store does not take the reserve.
        machine(directory.path(), 99, 0);
        housekeeper.tick(&shared, Instant::now());
        put(&shared, tenant, 0..900);
        assert_eq!(shared.store.lock().stored_pages(), grown);
        // The reserve becomes smaller.
        shared.reserve_bytes.store(98 * MIB, Relaxed);
        housekeeper.tick(&shared, Instant::now());
        put(&shared, tenant, 0..900);
        assert!(shared.store.lock().stored_pages() > grown);
    }

    #[test]
    fn what_the_kernel_keeps_free_is_not_taken() {
        let directory = tempfile::tempdir().unwrap();
        let (shared, tenant) = store(1000);
        let mut housekeeper = Housekeeper::new(AvailableMemory::new(directory.path()));
        shared.reserve_bytes.store(10 * MIB, Relaxed);
        let begun = Instant::now();
        let mut room_mib = |free_mib, watermark_mib: u64, seconds| {
            machine(directory.path(), free_mib, 0);
            let half_pages = watermark_mib * 128;
            let zoneinfo = format!("Node 0, zone DMA\n  high {half_pages}\nNode 0, zone Normal\n  high {half_pages}\n");
            write(directory.path().join("zoneinfo"), zoneinfo).unwrap();
            housekeeper.tick(&shared, begun + Duration::from_secs(seconds));
            shared.statistics.available_bytes.load(Relaxed) / MIB
        };
        assert_eq!(room_mib(80, 80, 0), 0, "all that is free is the kernel's");
        assert_eq!(room_mib(92, 80, 1), 2, "a margin of an eighth");
        // If the reserve exceeds the watermarks, it alone counts.
        assert_eq!(room_mib(92, 8, 2), 82);
        assert_eq!(room_mib(92, 0, 3), 82);
        assert_eq!(put(&shared, tenant, 0..1), 1);
    }

    #[test]
    fn pressure_stops_growth_and_then_takes_pages() {
        let directory = tempfile::tempdir().unwrap();
        let (shared, tenant) = store(1000);
        let mut housekeeper = Housekeeper::new(AvailableMemory::new(directory.path()));
        let begun = Instant::now();
        let second = |seconds| begun + Duration::from_secs(seconds);
        machine(directory.path(), 40, 0);
        housekeeper.tick(&shared, begun);
        assert_eq!(put(&shared, tenant, 0..640), 640);
        machine(directory.path(), 40, 200_000);
        housekeeper.tick(&shared, second(1));
        put(&shared, tenant, 640..700);
        assert_eq!(shared.store.lock().stored_pages(), 640);
        machine(directory.path(), 40, 900_000);
        housekeeper.tick(&shared, second(2));
        assert_eq!(shared.store.lock().stored_pages(), 620);
        // Once in each window.
        housekeeper.tick(&shared, second(2) + TICK);
        assert_eq!(shared.store.lock().stored_pages(), 620);
        // The pressure ends, and growth continues.
        housekeeper.tick(&shared, second(3));
        put(&shared, tenant, 700..800);
        assert_eq!(shared.store.lock().stored_pages(), 720);
    }

    /// A service below a slice with a limit, on a machine with other programs.
    #[test]
    fn others_count_wherever_they_wait() {
        let directory = tempfile::tempdir().unwrap();
        let proc = directory.path().join("proc");
        let group = |path: &str, name: &str, text: &str| {
            std::fs::create_dir_all(directory.path().join(path)).unwrap();
            write(directory.path().join(path).join(name), text).unwrap();
        };
        let root = directory.path().display();
        group("proc/self", "cgroup", "0::/slice/service\n");
        group("proc/self", "mountinfo", &format!("30 25 0:26 / {root} rw - cgroup2 cgroup2 rw\n"));
        group("slice/service", "memory.pressure", "some total=0\n");
        group("slice", "memory.max", &(20 * MIB).to_string());
        group("slice", "memory.current", &(20 * MIB).to_string());
        let mut second = 0;
        let begun = Instant::now();
        let (shared, _) = store(1000);
        let mut housekeeper = Housekeeper::new(AvailableMemory::new(&proc));
        let mut pressure = |free_mib, machine_us, slice_us: u64| {
            machine(&proc, free_mib, machine_us);
            group("slice", "memory.pressure", &format!("some total={slice_us}\n"));
            housekeeper.tick(&shared, begun + Duration::from_secs(second));
            second += 1;
            housekeeper.pressure
        };
        assert_eq!(pressure(30, 0, 0), Pressure::None);
        assert_eq!(pressure(30, 500_000, 0), Pressure::Shrink);
        assert_eq!(pressure(900, 500_000, 200_000), Pressure::Hold);
        // The machine has plenty of memory; another group waits at its own limit.
        assert_eq!(pressure(900, 1_000_000, 200_000), Pressure::None);
    }

    #[test]
    fn what_is_lent_no_more_is_gone_with_the_next_look() {
        let directory = tempfile::tempdir().unwrap();
        let (shared, tenant) = store(2000);
        let mut housekeeper = Housekeeper::new(AvailableMemory::new(directory.path()));
        machine(directory.path(), 100, 0);
        housekeeper.tick(&shared, Instant::now());
        assert_eq!(put(&shared, tenant, 0..1500), 1500);
        shared.store.lock().set_lending(false);
        housekeeper.tick(&shared, Instant::now());
        assert_eq!(put(&shared, tenant, 0..1), 0);
        assert_eq!(shared.store.lock().stored_pages(), 0);
        assert_eq!(shared.store.lock().free_resident_pages(), 0);
        shared.store.lock().set_lending(true);
        assert_eq!(put(&shared, tenant, 0..1), 1);
    }
}
