//! The store: pages of several owners, in memory that the kernel may take at any moment.
//!
//! Pure logic: no socket, no clock, no thread. The amount of free memory comes from outside, as a
//! number of pages ([`Store::set_headroom_pages`]). The store guarantees that
//! - a get returns the bytes that the same owner put last under that name and version, or nothing;
//! - memory is taken only out of the headroom: if there is none, a page replaces an older one, and
//!   uses its memory;
//! - when it forgets a page by itself, it notes this for the owner ([`Store::take_notices`]), up to
//!   a bound;
//! - no call takes longer than its batch: no growing tables, no full scans, every loop bounded.
//!
//! # Memory
//! A slot that was written has memory until the kernel takes it, or until the store gives it back.
//! A free slot that likely has memory is *warm* (resident), one that has none is *cold*. On reuse
//! the store checks whether the memory is still there: it looks for a byte that is not zero (a page
//! of zeros is never written). So memory that the kernel took counts as growth when it is taken
//! again, and the store does not compete with programs that need it.
//!
//! A page of zeros needs a record but no memory. Such pages have a bound of their own, an eighth of
//! the capacity in addition, so that neither kind displaces the other.
//!
//! # Who loses a page when there is no room
//! Every owner has its own list. The fair share is the number of stored pages divided by the number
//! of owners. An owner with its fair share or more loses its own oldest page; one with less takes
//! it from the owner that has most. So an owner that stores alone may use everything, a new one
//! grows until both have the same, and nobody is displaced below the fair share.

mod incoming;
mod index;
mod list;
mod record;
mod room;
mod slots;
#[cfg(test)]
mod tests;

pub use incoming::Incoming;
use index::Index;
pub use list::List;
use page::{Page, PageId, Version};
use record::State;
pub use record::{OWNERS_MAX, Record};
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
const UNSETTLED_MAX: usize = 256;

/// Notices that are kept for an owner that has not fetched them yet: 512 KiB, or 128 MiB of pages
/// that the kernel took at once. Older ones are forgotten, and cause misses.
const NOTICES_MAX: usize = 32_768;

/// Name of one content of one page, within its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The page.
    pub id: PageId,
    /// The version of its bytes.
    pub version: Version,
}

/// A tenant of the store: a session whose pages are stored. Its number is used again after
/// [`Store::remove_owner`] has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner(u8);

/// The result of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
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

/// Counters, in pages. The totals of the store include owners that were removed.
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
    /// Pages that the owner has dropped.
    pub drops: u64,
    /// Pages that newer ones have replaced.
    pub replaced: u64,
    /// Pages that were given back under memory pressure.
    pub shrunk: u64,
    /// Pages that the kernel took.
    pub reclaimed_by_kernel: u64,
    /// Notices that the owner did not fetch in time.
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

struct OwnerState {
    lists: [List; 2],
    counters: Counters,
    notices: VecDeque<Key>,
    /// The highest version that was put, stored or not.
    newest: Version,
    leaving: bool,
}

/// The store.
pub struct Store {
    slots: Slots,
    records: Vec<Record>,
    index: Index,
    owners: Vec<Option<OwnerState>>,
    /// Owners, including those that are being removed.
    owner_count: u32,
    /// Bound of each [`Class`].
    limits: [u32; 2],
    /// Stored pages of each [`Class`].
    stored: [u32; 2],
    /// Slots of pages that are being received.
    reserved: u32,
    warm: List,
    cold: List,
    /// Slots from here on were never used.
    fresh: u32,
    /// Written slots that are not marked reclaimable yet.
    unsettled: Vec<u32>,
    headroom_pages: u64,
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
            owners: Vec::new(),
            owner_count: 0,
            limits,
            stored: [0; 2],
            reserved: 0,
            warm: List::EMPTY,
            cold: List::EMPTY,
            fresh: 0,
            unsettled: Vec::with_capacity(UNSETTLED_MAX),
            headroom_pages: 0,
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
    pub(crate) fn warm_pages(&self) -> u32 {
        self.warm.count()
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
        u64::from(room).min(self.headroom_pages.saturating_add(u64::from(self.warm_pages())))
    }

    /// Slots that were ever used, which a scan has to check.
    pub fn used_slots(&self) -> u32 {
        self.fresh
    }

    /// All counters since the start.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// An owner's counters, stored pages and pages of zeros.
    pub(crate) fn owner_status(&self, owner: Owner) -> Option<(Counters, u32, u32)> {
        let state = self.owners.get(owner.0 as usize)?.as_ref()?;
        Some((state.counters, state.lists[0].count(), state.lists[1].count()))
    }

    /// The highest version that an owner has put; 0 if it has put nothing yet.
    pub fn newest(&self, owner: Owner) -> Version {
        let state = self.owners.get(owner.0 as usize).and_then(Option::as_ref);
        state.map_or(Version(0), |state| state.newest)
    }

    /// Sets how many pages of memory may be taken from now on. Each page that is taken decrements
    /// it.
    pub fn set_headroom_pages(&mut self, pages: u64) {
        self.headroom_pages = pages;
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

    /// Adds an owner, unless there are [`OWNERS_MAX`].
    pub fn add_owner(&mut self) -> Option<Owner> {
        let state = OwnerState {
            lists: [List::EMPTY, List::EMPTY],
            counters: Counters::default(),
            notices: VecDeque::new(),
            newest: Version(0),
            leaving: false,
        };
        let at = match self.owners.iter().position(Option::is_none) {
            Some(at) => at,
            None if self.owners.len() < OWNERS_MAX => {
                self.owners.push(None);
                self.owners.len() - 1
            }
            None => return None,
        };
        self.owners[at] = Some(state);
        self.owner_count += 1;
        Some(Owner(at as u8))
    }

    /// Frees up to `pages` pages of an owner and gives their memory back. Repeat it until it
    /// returns true: then the owner is removed. In between all its puts are refused and all its
    /// gets are misses.
    pub fn remove_owner(&mut self, owner: Owner, pages: usize) -> bool {
        let Some(state) = self.owners.get_mut(owner.0 as usize).and_then(Option::as_mut) else { return true };
        state.leaving = true;
        state.notices = VecDeque::new();
        let mut freed = Vec::with_capacity(pages);
        for _ in 0..pages {
            let Some(state) = &self.owners[owner.0 as usize] else { return true };
            let Some(slot) = state.lists[0].oldest().or(state.lists[1].oldest()) else {
                self.give_back(freed);
                self.owners[owner.0 as usize] = None;
                self.owner_count -= 1;
                return true;
            };
            self.release(slot, State::Cold);
            freed.push(slot);
        }
        self.give_back(freed);
        false
    }

    /// Prefetches some tens of pages that the next puts or gets use. This only makes those calls
    /// faster.
    pub fn read_ahead(&self, owner: Owner, ids: impl Iterator<Item = PageId>) {
        self.index.read_ahead(&self.records, owner.0, ids, |slot| self.slots.read_ahead(slot));
    }

    /// Stores a page, in place of the stored one with the same id. Returns false if there is no
    /// memory for it. The next [`Store::settle`] marks it reclaimable.
    pub fn put(&mut self, owner: Owner, key: Key, checksum: u64, page: &Page) -> bool {
        self.count(owner, |counters| counters.puts += 1);
        let stored = self.try_put(owner, key, checksum, page);
        if !stored {
            self.count(owner, |counters| counters.puts_refused += 1);
        }
        stored
    }

    fn try_put(&mut self, owner: Owner, key: Key, checksum: u64, page: &Page) -> bool {
        if !self.make_way(owner, key) {
            return false;
        }
        if page::is_zero(page) {
            return self.store_zero(owner, key, checksum);
        }
        let Some(slot) = self.slot_with_memory(owner) else { return false };
        self.slots.write(slot, page);
        self.store_page(owner, key, checksum, slot)
    }

    /// Forgets the pages that a put replaces. Returns false if the page cannot be stored.
    fn make_way(&mut self, owner: Owner, key: Key) -> bool {
        let state = self.owners.get_mut(owner.0 as usize).and_then(Option::as_mut);
        let Some(state) = state.filter(|state| !state.leaving && key.version <= Version::MAX) else { return false };
        state.newest = state.newest.max(key.version);
        if let Some(slot) = self.index.find(&self.records, owner.0, key.id) {
            self.release(slot, State::Warm);
        }
        self.lending
    }

    fn store_page(&mut self, owner: Owner, key: Key, checksum: u64, slot: u32) -> bool {
        let stored = self.occupy(slot, State::Page, owner, key, checksum);
        self.unsettle(slot);
        stored
    }

    /// A slot was written: the next [`Store::settle`] marks it reclaimable.
    fn unsettle(&mut self, slot: u32) {
        self.unsettled.push(slot);
        if self.unsettled.len() == UNSETTLED_MAX {
            self.settle();
        }
    }

    fn store_zero(&mut self, owner: Owner, key: Key, checksum: u64) -> bool {
        self.slot_for_zero(owner).is_some_and(|slot| self.occupy(slot, State::Zero, owner, key, checksum))
    }

    /// Assigns a page that is not in the index to a free slot that is in no list. Returns false if
    /// the index has no place for it; then the slot is free.
    fn occupy(&mut self, slot: u32, state: State, owner: Owner, key: Key, checksum: u64) -> bool {
        self.records[slot as usize].set_used(state, owner.0, key.id, key.version, checksum);
        if !self.index.insert(&self.records, slot) {
            self.push_free(slot, State::Warm);
            return false;
        }
        let class = Class::of(state) as usize;
        if let Some(owner) = &mut self.owners[owner.0 as usize] {
            owner.lists[class].push_newest(&mut self.records, slot);
        }
        self.stored[class] += 1;
        true
    }

    /// Begins to receive at most that many pages. Call [`Store::reserve`] for each one, then, when
    /// all have arrived, [`Store::commit`]; if they do not arrive, [`Store::give_up`].
    pub fn incoming(&self, pages: usize) -> Incoming {
        Incoming::new(Arc::clone(self.slots.mapping()), pages)
    }

    /// Reserves a slot for the next page, in place of the stored one with the same id. Without room
    /// the page is received nevertheless, and not stored.
    pub fn reserve(&mut self, owner: Owner, key: Key, incoming: &mut Incoming) {
        let slot = if self.make_way(owner, key) { self.slot_with_memory(owner) } else { None };
        if let Some(slot) = slot {
            self.records[slot as usize].set_reserved();
            self.reserved += 1;
        }
        incoming.expect(slot);
    }

    /// Stores a page that has arrived whole, as [`Store::put`] does. Call it for each of the slots
    /// that were reserved together.
    pub fn commit(&mut self, owner: Owner, key: Key, checksum: u64, slot: Option<u32>) -> bool {
        self.count(owner, |counters| counters.puts += 1);
        let stored = slot.is_some_and(|slot| self.try_commit(owner, key, checksum, slot));
        if !stored {
            self.count(owner, |counters| counters.puts_refused += 1);
        }
        stored
    }

    fn try_commit(&mut self, owner: Owner, key: Key, checksum: u64, slot: u32) -> bool {
        self.reserved -= 1;
        // The store may have changed much while the page arrived.
        let may_stay = self.make_way(owner, key);
        // The slot is not reclaimable yet, so zeros are received bytes.
        let is_zero = !self.slots.is_present(slot);
        if is_zero {
            // The slot looks as if it had no memory, but it has.
            self.push_free(slot, State::Cold);
            self.give_back(vec![slot]);
            return may_stay && self.store_zero(owner, key, checksum);
        }
        if !may_stay {
            self.push_free(slot, State::Warm);
            self.unsettle(slot);
            return false;
        }
        self.store_page(owner, key, checksum, slot)
    }

    /// Frees reserved slots whose pages do not arrive.
    pub fn give_up(&mut self, slots: Vec<Option<u32>>) {
        for slot in slots.into_iter().flatten() {
            self.reserved -= 1;
            self.push_free(slot, State::Warm);
            self.unsettle(slot);
        }
    }

    /// Marks the pages of all puts since the last call as reclaimable. Call it soon after the last
    /// put.
    pub fn settle(&mut self) {
        // A slot that receives a page is not reclaimable: the kernel could take the half that has
        // arrived.
        self.unsettled.retain(|slot| self.records[*slot as usize].state() != State::Reserved);
        if self.unsettled.is_empty() {
            return;
        }
        if let Err(error) = self.slots.settle(&mut self.unsettled) {
            // This happens only with a kernel without MADV_FREE, or without memory for its own
            // tables: the pages stay unreclaimable until they are overwritten. They are not lost.
            tracing::warn!(%error, "the kernel does not accept pages as reclaimable");
        }
        self.unsettled.clear();
    }

    /// Appends a page to the buffer, if it is here. An `exclusive` get also removes it.
    pub fn get(&mut self, owner: Owner, key: Key, exclusive: bool, buffer: &mut Vec<u8>) -> Got {
        let got = self.try_get(owner, key, exclusive, buffer);
        self.count(owner, |counters| {
            counters.gets += 1;
            *(if got == Got::Miss { &mut counters.misses } else { &mut counters.hits }) += 1;
        });
        got
    }

    fn try_get(&mut self, owner: Owner, key: Key, exclusive: bool, buffer: &mut Vec<u8>) -> Got {
        let Some(slot) = self.find(owner, key) else { return Got::Miss };
        let record = self.records[slot as usize];
        let checksum = record.checksum;
        let zero = record.state() == State::Zero;
        if !zero && !self.slots.read(slot, buffer) {
            // This must happen now: a slot that was read looks present to a scan.
            self.release(slot, State::Cold);
            self.count(owner, |counters| counters.reclaimed_by_kernel += 1);
            return Got::Miss;
        }
        if exclusive {
            self.release(slot, State::Warm);
        } else if let Some(owner) = &mut self.owners[owner.0 as usize] {
            let list = &mut owner.lists[Class::of(record.state()) as usize];
            list.unlink(&mut self.records, slot);
            list.push_newest(&mut self.records, slot);
        }
        if zero { Got::Zero { checksum } } else { Got::Page { checksum } }
    }

    /// Forgets a page, if it is stored in this version.
    pub fn drop_page(&mut self, owner: Owner, key: Key) {
        if let Some(slot) = self.find(owner, key) {
            self.release(slot, State::Warm);
            self.count(owner, |counters| counters.drops += 1);
        }
    }

    /// Finds out which of these slots the kernel took, frees them, and notes it for the owners.
    /// Returns how many pages were lost. `slots` may exceed [`Store::used_slots`].
    pub fn scan(&mut self, slots: Range<u32>) -> std::io::Result<usize> {
        let end = slots.end.min(self.fresh);
        let mut runs = Vec::new();
        if slots.start < end {
            self.slots.absent(slots.start..end, &mut runs)?;
        }
        let mut lost = 0;
        for slot in runs.into_iter().flatten() {
            let record = self.records[slot as usize];
            match record.state() {
                State::Warm => self.move_free(slot, State::Cold),
                State::Page => {
                    let owner = Owner(record.owner());
                    self.release(slot, State::Cold);
                    self.notice(owner, Key { id: record.id(), version: record.version() });
                    self.count(owner, |counters| counters.reclaimed_by_kernel += 1);
                    lost += 1;
                }
                State::Cold | State::Zero | State::Reserved => {}
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
    pub fn take_notices(&mut self, owner: Owner, max: usize, keys: &mut Vec<Key>) {
        if let Some(state) = self.owners.get_mut(owner.0 as usize).and_then(Option::as_mut) {
            keys.extend(state.notices.drain(..max.min(state.notices.len())));
            if state.notices.is_empty() {
                state.notices = VecDeque::new();
            }
        }
    }

    fn find(&self, owner: Owner, key: Key) -> Option<u32> {
        let leaving = self.owners.get(owner.0 as usize)?.as_ref()?.leaving;
        let slot = self.index.find(&self.records, owner.0, key.id)?;
        (!leaving && self.records[slot as usize].version() == key.version).then_some(slot)
    }

    /// Frees a used slot.
    fn release(&mut self, slot: u32, free: State) {
        self.index.remove(&self.records, slot);
        let record = &self.records[slot as usize];
        let class = Class::of(record.state()) as usize;
        if let Some(owner) = &mut self.owners[record.owner() as usize] {
            owner.lists[class].unlink(&mut self.records, slot);
        }
        self.stored[class] -= 1;
        self.push_free(slot, free);
    }

    /// Moves a warm slot, or leaves it.
    fn move_free(&mut self, slot: u32, free: State) {
        self.warm.unlink(&mut self.records, slot);
        self.push_free(slot, free);
    }

    fn push_free(&mut self, slot: u32, free: State) {
        self.records[slot as usize].set_free(free);
        let list = if free == State::Warm { &mut self.warm } else { &mut self.cold };
        list.push_newest(&mut self.records, slot);
    }

    fn give_back(&mut self, mut slots: Vec<u32>) {
        if let Err(error) = self.slots.give_back(&mut slots) {
            tracing::warn!(%error, "the kernel does not take memory back");
        }
    }

    fn notice(&mut self, owner: Owner, key: Key) {
        let Some(Some(state)) = self.owners.get_mut(owner.0 as usize) else { return };
        if state.leaving {
            return;
        }
        let full = state.notices.len() == NOTICES_MAX;
        if full {
            state.notices.pop_front();
        }
        state.notices.push_back(key);
        if full {
            self.count(owner, |counters| counters.notices_forgotten += 1);
        }
    }

    fn count(&mut self, owner: Owner, change: impl Fn(&mut Counters)) {
        change(&mut self.counters);
        if let Some(Some(state)) = self.owners.get_mut(owner.0 as usize) {
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
