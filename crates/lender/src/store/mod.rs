//! The store: pages of several tenants, in memory that the kernel may take at any moment.
//!
//! Pure logic: no socket, no clock, no thread. The amount of free memory comes from outside, as a
//! number of pages ([`Store::set_available_pages`]). The store guarantees that
//! - a get returns the bytes that the same tenant put last under that name and version, or nothing;
//! - memory is taken only out of the available memory: if there is none, a page replaces an older
//!   one, and uses its memory;
//! - when it forgets a page by itself, it notes this for the tenant ([`Store::take_notices`]), up
//!   to a bound;
//! - no call takes longer than its batch: no growing tables, no full scans, every loop bounded.
//!
//! # Memory
//! A slot that was written has memory until the kernel takes it, or until the store gives it back.
//! A free slot that likely has memory is *resident*, one that has none is *nonresident*. On reuse
//! the store checks whether the memory is still there: it looks for a byte that is not zero (a page
//! of zeros is never written). So memory that the kernel took counts as growth when it is taken
//! again, and the store does not compete with programs that need it.
//!
//! A page of zeros needs a record but no memory. Such pages have a bound of their own, an eighth of
//! the capacity in addition, so that neither kind displaces the other.
//!
//! # Who loses a page when there is no room
//! Every tenant has its own list. The fair share is the number of stored pages divided by the
//! number of tenants. A tenant with its fair share or more loses its own oldest page; one with less
//! takes it from the tenant that has most. So a tenant that stores alone may use everything, a new
//! one grows until both have the same, and nobody is displaced below the fair share.

mod in_flight_pages;
mod index;
mod list;
mod record;
mod room;
mod slots;
#[cfg(test)]
mod tests;

pub use in_flight_pages::InFlightPages;
use index::Index;
pub use list::List;
use page::{Page, PageId, Version};
use record::State;
pub use record::{Record, TENANTS_MAX};
use slots::Slots;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use zerocopy::FromZeros;

/// The maximum number of pages: slots are numbered by 32 bits, and an eighth is added for pages of
/// zeros. 12 TiB.
pub const CAPACITY_PAGES_MAX: u32 = 3 << 30;

/// Slots that are written before all of them are marked reclaimable, 1 MiB: enough to spread the
/// cost of the call, few enough to be no loss for programs that need the memory meanwhile.
const UNMARKED_MAX: usize = 256;

/// Notices that are kept for a tenant that has not fetched them yet: 512 KiB, or 128 MiB of pages
/// that the kernel took at once. Older ones are forgotten, and cause misses.
const NOTICES_MAX: usize = 32_768;

/// Name of one content of one page, within its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The page.
    pub id: PageId,
    /// The version of its bytes.
    pub version: Version,
}

/// A tenant of the store: a session whose pages are stored. Its number is used again after
/// [`Store::remove_tenant`] has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tenant(u8);

/// The result of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GetResult {
    /// Nothing.
    Miss,
    /// The page, now at the buffer's end.
    Page {
        /// The checksum from the put.
        checksum: u64,
    },
    /// A page of zeros. The buffer is unchanged.
    Zero {
        /// The checksum from the put.
        checksum: u64,
    },
}

/// Counters, in pages. The totals of the store include tenants that were removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Pages put, stored or not.
    pub puts: u64,
    /// Pages that were put and not stored because memory was short.
    pub puts_refused: u64,
    /// Pages asked for.
    pub gets: u64,
    /// Pages that were requested and returned, including those of zeros.
    pub hits: u64,
    /// Pages that were requested and are not here.
    pub misses: u64,
    /// Pages that the tenant has dropped.
    pub drops: u64,
    /// Pages that newer ones have replaced.
    pub replaced: u64,
    /// Pages that were given back under memory pressure.
    pub shrunk: u64,
    /// Pages that the kernel took.
    pub reclaimed_by_kernel: u64,
    /// Notices that the tenant did not fetch in time.
    pub notices_forgotten: u64,
}

/// The two kinds of stored pages, each with lists and a bound of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Page = 0,
    Zero = 1,
}

impl Class {
    fn of(state: State) -> Class {
        if state == State::Zero { Class::Zero } else { Class::Page }
    }
}

struct TenantState {
    lists: [List; 2],
    counters: Counters,
    notices: VecDeque<Key>,
    /// The highest version that was put, stored or not.
    highest_version: Version,
    leaving: bool,
}

/// The store.
pub struct Store {
    slots: Slots,
    records: Vec<Record>,
    index: Index,
    tenants: Vec<Option<TenantState>>,
    /// Tenants, including those that are being removed.
    tenant_count: u32,
    /// Bound of each [`Class`].
    limits: [u32; 2],
    /// Stored pages of each [`Class`].
    stored: [u32; 2],
    /// Slots of pages that are being received.
    reserved: u32,
    free_resident: List,
    free_nonresident: List,
    /// Slots from here on were never used.
    unused_from: u32,
    /// Written slots that are not marked reclaimable yet.
    unmarked: Vec<u32>,
    available_pages: u64,
    grown_pages: u64,
    /// Whether pages are taken.
    lending: bool,
    counters: Counters,
}

impl Store {
    /// An empty store for `capacity_pages` pages, which uses no memory yet.
    ///
    /// # Errors
    /// Fails if there is no address space for it, or the capacity is 0 or above
    /// [`CAPACITY_PAGES_MAX`].
    pub fn new(capacity_pages: u32) -> std::io::Result<Store> {
        if !(1..=CAPACITY_PAGES_MAX).contains(&capacity_pages) {
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "capacity out of range"));
        }
        let limits = [capacity_pages, capacity_pages.div_ceil(8)];
        let slots = limits[0] + limits[1];
        Ok(Store {
            slots: Slots::new(slots)?,
            records: Record::new_vec_zeroed(slots as usize).map_err(|_| std::io::ErrorKind::OutOfMemory)?,
            index: Index::new(slots).ok_or(std::io::ErrorKind::OutOfMemory)?,
            tenants: Vec::new(),
            tenant_count: 0,
            limits,
            stored: [0; 2],
            reserved: 0,
            free_resident: List::EMPTY,
            free_nonresident: List::EMPTY,
            unused_from: 0,
            unmarked: Vec::with_capacity(UNMARKED_MAX),
            available_pages: 0,
            grown_pages: 0,
            lending: true,
            counters: Counters::default(),
        })
    }

    /// The maximum number of pages, without those of zeros.
    pub fn capacity_pages(&self) -> u32 {
        self.limits[Class::Page as usize]
    }

    /// Stored pages, without those of zeros. The kernel may have taken some of them since the last
    /// scan.
    pub fn stored_pages(&self) -> u32 {
        self.stored[Class::Page as usize]
    }

    /// Stored pages of zeros.
    pub fn zero_pages(&self) -> u32 {
        self.stored[Class::Zero as usize]
    }

    /// Free slots that likely still have memory.
    pub(crate) fn free_resident_pages(&self) -> u32 {
        self.free_resident.count()
    }

    /// Slots of pages that are being received.
    pub(crate) fn reserved_pages(&self) -> u32 {
        self.reserved
    }

    /// Pages that could be stored now without replacing others.
    pub fn free_pages(&self) -> u64 {
        if !self.lending {
            return 0;
        }
        let room = self.limits[Class::Page as usize].saturating_sub(self.stored_pages());
        u64::from(room).min(self.available_pages.saturating_add(u64::from(self.free_resident_pages())))
    }

    /// Slots that were ever used, which a scan has to check.
    pub fn used_slots(&self) -> u32 {
        self.unused_from
    }

    /// All counters since the start.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// A tenant's counters, stored pages and pages of zeros.
    pub(crate) fn tenant_status(&self, tenant: Tenant) -> Option<(Counters, u32, u32)> {
        let state = self.tenants.get(tenant.0 as usize)?.as_ref()?;
        Some((state.counters, state.lists[0].count(), state.lists[1].count()))
    }

    /// The highest version that a tenant has put; 0 if it has put nothing yet.
    pub fn highest_version(&self, tenant: Tenant) -> Version {
        let state = self.tenants.get(tenant.0 as usize).and_then(Option::as_ref);
        state.map_or(Version(0), |state| state.highest_version)
    }

    /// Sets how many pages of memory may be taken from now on. Each page that is taken decrements
    /// it.
    pub fn set_available_pages(&mut self, pages: u64) {
        self.available_pages = pages;
    }

    /// Sets whether pages are taken. If not, the caller has to give all stored pages back with
    /// [`Store::clear`].
    pub fn set_lending(&mut self, lending: bool) {
        self.lending = lending;
    }

    /// Whether pages are taken.
    pub(crate) fn is_lending(&self) -> bool {
        self.lending
    }

    /// Pages of memory that were taken since the start, given back or not.
    pub(crate) fn grown_pages(&self) -> u64 {
        self.grown_pages
    }

    /// Adds a tenant, unless there are [`TENANTS_MAX`].
    pub fn add_tenant(&mut self) -> Option<Tenant> {
        let state = TenantState {
            lists: [List::EMPTY, List::EMPTY],
            counters: Counters::default(),
            notices: VecDeque::new(),
            highest_version: Version(0),
            leaving: false,
        };
        let at = match self.tenants.iter().position(Option::is_none) {
            Some(at) => at,
            None if self.tenants.len() < TENANTS_MAX => {
                self.tenants.push(None);
                self.tenants.len() - 1
            }
            None => return None,
        };
        self.tenants[at] = Some(state);
        self.tenant_count += 1;
        Some(Tenant(at as u8))
    }

    /// Frees up to `pages` pages of a tenant and gives their memory back. Repeat it until it
    /// returns true: then the tenant is removed. In between all its puts are refused and all its
    /// gets are misses.
    pub fn remove_tenant(&mut self, tenant: Tenant, pages: usize) -> bool {
        let Some(state) = self.tenants.get_mut(tenant.0 as usize).and_then(Option::as_mut) else { return true };
        state.leaving = true;
        state.notices = VecDeque::new();
        let mut freed = Vec::with_capacity(pages);
        for _ in 0..pages {
            let Some(state) = &self.tenants[tenant.0 as usize] else { return true };
            let Some(slot) = state.lists[0].oldest().or(state.lists[1].oldest()) else {
                self.give_back(freed);
                self.tenants[tenant.0 as usize] = None;
                self.tenant_count -= 1;
                return true;
            };
            self.release(slot, State::FreeNonresident);
            freed.push(slot);
        }
        self.give_back(freed);
        false
    }

    /// Prefetches some tens of pages that the next puts or gets use. This only makes those calls
    /// faster.
    pub fn read_ahead(&self, tenant: Tenant, ids: impl Iterator<Item = PageId>) {
        self.index.read_ahead(&self.records, tenant.0, ids, |slot| self.slots.read_ahead(slot));
    }

    /// Stores a page, in place of the stored one with the same id. Returns false if there is no
    /// memory for it. The next [`Store::mark_reclaimable`] marks it reclaimable.
    pub fn put(&mut self, tenant: Tenant, key: Key, checksum: u64, page: &Page) -> bool {
        self.count(tenant, |counters| counters.puts += 1);
        let stored = self.try_put(tenant, key, checksum, page);
        if !stored {
            self.count(tenant, |counters| counters.puts_refused += 1);
        }
        stored
    }

    fn try_put(&mut self, tenant: Tenant, key: Key, checksum: u64, page: &Page) -> bool {
        if !self.make_way(tenant, key) {
            return false;
        }
        if page::is_zero(page) {
            return self.store_zero(tenant, key, checksum);
        }
        let Some(slot) = self.slot_with_memory(tenant) else { return false };
        self.slots.write(slot, page);
        self.store_page(tenant, key, checksum, slot)
    }

    /// Forgets the pages that a put replaces. Returns false if the page cannot be stored.
    fn make_way(&mut self, tenant: Tenant, key: Key) -> bool {
        let state = self.tenants.get_mut(tenant.0 as usize).and_then(Option::as_mut);
        let Some(state) = state.filter(|state| !state.leaving && key.version <= Version::MAX) else { return false };
        state.highest_version = state.highest_version.max(key.version);
        if let Some(slot) = self.index.find(&self.records, tenant.0, key.id) {
            self.release(slot, State::FreeResident);
        }
        self.lending
    }

    fn store_page(&mut self, tenant: Tenant, key: Key, checksum: u64, slot: u32) -> bool {
        let stored = self.occupy(slot, State::Page, tenant, key, checksum);
        self.note_unmarked(slot);
        stored
    }

    /// A slot was written: the next [`Store::mark_reclaimable`] marks it reclaimable.
    fn note_unmarked(&mut self, slot: u32) {
        self.unmarked.push(slot);
        if self.unmarked.len() == UNMARKED_MAX {
            self.mark_reclaimable();
        }
    }

    fn store_zero(&mut self, tenant: Tenant, key: Key, checksum: u64) -> bool {
        self.slot_for_zero(tenant).is_some_and(|slot| self.occupy(slot, State::Zero, tenant, key, checksum))
    }

    /// Assigns a page that is not in the index to a free slot that is in no list. Returns false if
    /// the index has no place for it; then the slot is free.
    fn occupy(&mut self, slot: u32, state: State, tenant: Tenant, key: Key, checksum: u64) -> bool {
        self.records[slot as usize].set_used(state, tenant.0, key.id, key.version, checksum);
        if !self.index.insert(&self.records, slot) {
            self.push_free(slot, State::FreeResident);
            return false;
        }
        let class = Class::of(state) as usize;
        if let Some(tenant) = &mut self.tenants[tenant.0 as usize] {
            tenant.lists[class].push_newest(&mut self.records, slot);
        }
        self.stored[class] += 1;
        true
    }

    /// Begins to receive at most that many pages. Call [`Store::reserve`] for each one, then, when
    /// all have arrived, [`Store::commit`]; if they do not arrive, [`Store::give_up`].
    pub fn in_flight_pages(&self, pages: usize) -> InFlightPages {
        InFlightPages::new(Arc::clone(self.slots.mapping()), pages)
    }

    /// Reserves a slot for the next page, in place of the stored one with the same id. Without room
    /// the page is received nevertheless, and not stored.
    pub fn reserve(&mut self, tenant: Tenant, key: Key, pages: &mut InFlightPages) {
        let slot = if self.make_way(tenant, key) { self.slot_with_memory(tenant) } else { None };
        if let Some(slot) = slot {
            self.records[slot as usize].set_reserved();
            self.reserved += 1;
        }
        pages.expect(slot);
    }

    /// Stores a page that has arrived whole, as [`Store::put`] does. Call it for each of the slots
    /// that were reserved together.
    pub fn commit(&mut self, tenant: Tenant, key: Key, checksum: u64, slot: Option<u32>) -> bool {
        self.count(tenant, |counters| counters.puts += 1);
        let stored = slot.is_some_and(|slot| self.try_commit(tenant, key, checksum, slot));
        if !stored {
            self.count(tenant, |counters| counters.puts_refused += 1);
        }
        stored
    }

    fn try_commit(&mut self, tenant: Tenant, key: Key, checksum: u64, slot: u32) -> bool {
        self.reserved -= 1;
        // The store may have changed much while the page arrived.
        let may_stay = self.make_way(tenant, key);
        // The slot is not reclaimable yet, so zeros are received bytes.
        let is_zero = !self.slots.is_present(slot);
        if is_zero {
            // The slot looks as if it had no memory, but it has.
            self.push_free(slot, State::FreeNonresident);
            self.give_back(vec![slot]);
            return may_stay && self.store_zero(tenant, key, checksum);
        }
        if !may_stay {
            self.push_free(slot, State::FreeResident);
            self.note_unmarked(slot);
            return false;
        }
        self.store_page(tenant, key, checksum, slot)
    }

    /// Frees reserved slots whose pages do not arrive.
    pub fn give_up(&mut self, slots: Vec<Option<u32>>) {
        for slot in slots.into_iter().flatten() {
            self.reserved -= 1;
            self.push_free(slot, State::FreeResident);
            self.note_unmarked(slot);
        }
    }

    /// Marks the pages of all puts since the last call as reclaimable. Call it soon after the last
    /// put.
    pub fn mark_reclaimable(&mut self) {
        // A slot that receives a page is not reclaimable: the kernel could take the half that has
        // arrived.
        self.unmarked.retain(|slot| self.records[*slot as usize].state() != State::Reserved);
        if self.unmarked.is_empty() {
            return;
        }
        if let Err(error) = self.slots.mark_reclaimable(&mut self.unmarked) {
            // This happens only with a kernel without MADV_FREE, or without memory for its own
            // tables: the pages stay unreclaimable until they are overwritten. They are not lost.
            tracing::warn!(%error, "the kernel does not accept pages as reclaimable");
        }
        self.unmarked.clear();
    }

    /// Appends a page to the buffer, if it is here. An `exclusive` get also removes it.
    pub fn get(&mut self, tenant: Tenant, key: Key, exclusive: bool, buffer: &mut Vec<u8>) -> GetResult {
        let got = self.try_get(tenant, key, exclusive, buffer);
        self.count(tenant, |counters| {
            counters.gets += 1;
            *(if got == GetResult::Miss { &mut counters.misses } else { &mut counters.hits }) += 1;
        });
        got
    }

    fn try_get(&mut self, tenant: Tenant, key: Key, exclusive: bool, buffer: &mut Vec<u8>) -> GetResult {
        let Some(slot) = self.find(tenant, key) else { return GetResult::Miss };
        let record = self.records[slot as usize];
        let checksum = record.checksum;
        let zero = record.state() == State::Zero;
        if !zero && !self.slots.read(slot, buffer) {
            // This must happen now: a slot that was read looks present to a scan.
            self.release(slot, State::FreeNonresident);
            self.count(tenant, |counters| counters.reclaimed_by_kernel += 1);
            return GetResult::Miss;
        }
        if exclusive {
            self.release(slot, State::FreeResident);
        } else if let Some(tenant) = &mut self.tenants[tenant.0 as usize] {
            let list = &mut tenant.lists[Class::of(record.state()) as usize];
            list.unlink(&mut self.records, slot);
            list.push_newest(&mut self.records, slot);
        }
        if zero { GetResult::Zero { checksum } } else { GetResult::Page { checksum } }
    }

    /// Forgets a page, if it is stored in this version.
    pub fn drop_page(&mut self, tenant: Tenant, key: Key) {
        if let Some(slot) = self.find(tenant, key) {
            self.release(slot, State::FreeResident);
            self.count(tenant, |counters| counters.drops += 1);
        }
    }

    /// Finds out which of these slots the kernel took, frees them, and notes it for the tenants.
    /// Returns how many pages were lost. `slots` may exceed [`Store::used_slots`].
    pub fn scan(&mut self, slots: Range<u32>) -> std::io::Result<usize> {
        let end = slots.end.min(self.unused_from);
        let mut runs = Vec::new();
        if slots.start < end {
            self.slots.absent(slots.start..end, &mut runs)?;
        }
        let mut lost = 0;
        for slot in runs.into_iter().flatten() {
            let record = self.records[slot as usize];
            match record.state() {
                State::FreeResident => self.move_free(slot, State::FreeNonresident),
                State::Page => {
                    let tenant = Tenant(record.tenant());
                    self.release(slot, State::FreeNonresident);
                    self.notice(tenant, Key { id: record.id(), version: record.version() });
                    self.count(tenant, |counters| counters.reclaimed_by_kernel += 1);
                    lost += 1;
                }
                State::FreeNonresident | State::Zero | State::Reserved => {}
            }
        }
        Ok(lost)
    }

    /// Simulates for tests that the kernel takes a slot.
    #[cfg(debug_assertions)]
    pub fn take_slot_silently(&mut self, slot: u32) {
        self.slots.take_silently(slot);
    }

    /// Moves up to `max` notices of lost pages to `keys`, oldest first.
    pub fn take_notices(&mut self, tenant: Tenant, max: usize, keys: &mut Vec<Key>) {
        if let Some(state) = self.tenants.get_mut(tenant.0 as usize).and_then(Option::as_mut) {
            keys.extend(state.notices.drain(..max.min(state.notices.len())));
            if state.notices.is_empty() {
                state.notices = VecDeque::new();
            }
        }
    }

    fn find(&self, tenant: Tenant, key: Key) -> Option<u32> {
        let leaving = self.tenants.get(tenant.0 as usize)?.as_ref()?.leaving;
        let slot = self.index.find(&self.records, tenant.0, key.id)?;
        (!leaving && self.records[slot as usize].version() == key.version).then_some(slot)
    }

    /// Frees a used slot.
    fn release(&mut self, slot: u32, free: State) {
        self.index.remove(&self.records, slot);
        let record = &self.records[slot as usize];
        let class = Class::of(record.state()) as usize;
        if let Some(tenant) = &mut self.tenants[record.tenant() as usize] {
            tenant.lists[class].unlink(&mut self.records, slot);
        }
        self.stored[class] -= 1;
        self.push_free(slot, free);
    }

    /// Moves a resident slot, or leaves it.
    fn move_free(&mut self, slot: u32, free: State) {
        self.free_resident.unlink(&mut self.records, slot);
        self.push_free(slot, free);
    }

    fn push_free(&mut self, slot: u32, free: State) {
        self.records[slot as usize].set_free(free);
        let list = if free == State::FreeResident { &mut self.free_resident } else { &mut self.free_nonresident };
        list.push_newest(&mut self.records, slot);
    }

    fn give_back(&mut self, mut slots: Vec<u32>) {
        if let Err(error) = self.slots.give_back(&mut slots) {
            tracing::warn!(%error, "the kernel does not take memory back");
        }
    }

    fn notice(&mut self, tenant: Tenant, key: Key) {
        let Some(Some(state)) = self.tenants.get_mut(tenant.0 as usize) else { return };
        if state.leaving {
            return;
        }
        let full = state.notices.len() == NOTICES_MAX;
        if full {
            state.notices.pop_front();
        }
        state.notices.push_back(key);
        if full {
            self.count(tenant, |counters| counters.notices_forgotten += 1);
        }
    }

    fn count(&mut self, tenant: Tenant, change: impl Fn(&mut Counters)) {
        change(&mut self.counters);
        if let Some(Some(state)) = self.tenants.get_mut(tenant.0 as usize) {
            change(&mut state.counters);
        }
    }

    /// Simulates that the kernel takes slots. It does not take slots that were written after they
    /// were marked.
    #[cfg(test)]
    pub(crate) fn take_slots_silently(&mut self, slots: Range<u32>) {
        let may_be_taken = |slot: &u32| self.records[*slot as usize].state() != State::Reserved;
        slots.filter(may_be_taken).for_each(|slot| self.slots.take_silently(slot));
    }
}
