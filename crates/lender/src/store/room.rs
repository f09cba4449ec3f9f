//! These methods of the store find room for a page, choose the page to replace, and give memory
//! back.

use super::record::State;
use super::{Class, Key, Owner, OwnerState, Store};

/// Slots that a put checks to find one with memory. This bounds its time when the kernel has just
/// taken many. Each slot without memory is checked once, so repeated puts find one.
const TRIES_MAX: usize = 64;

impl Store {
    /// Gives back the memory of up to `pages` pages: of free slots first, then of the oldest pages
    /// of the owner that has most. Returns how many.
    pub fn shrink(&mut self, pages: usize) -> usize {
        let mut freed = Vec::new();
        while freed.len() < pages {
            let slot = match self.warm.oldest() {
                Some(slot) => slot,
                None => match self.largest(Class::Page).and_then(|owner| self.evict(owner, Class::Page)) {
                    Some((slot, owner)) => {
                        self.count(owner, |counters| counters.shrunk += 1);
                        slot
                    }
                    None => break,
                },
            };
            self.move_free(slot, State::Cold);
            freed.push(slot);
        }
        let count = freed.len();
        self.give_back(freed);
        count
    }

    /// Forgets up to `pages` pages, of either kind, notes them for their owners, and gives back
    /// their memory and that of free slots. Returns how many; 0: nothing is left.
    pub fn clear(&mut self, pages: usize) -> usize {
        let mut given = self.shrink(pages);
        while given < pages {
            // Pages of zeros have no memory that could be given back.
            let Some((slot, owner)) = self.largest(Class::Zero).and_then(|owner| self.evict(owner, Class::Zero)) else {
                break;
            };
            self.move_free(slot, State::Cold);
            self.count(owner, |counters| counters.shrunk += 1);
            given += 1;
        }
        given
    }

    /// A slot that has memory, or may take some.
    pub(super) fn slot_with_memory(&mut self, owner: Owner) -> Option<u32> {
        for _ in 0..TRIES_MAX {
            if self.stored[Class::Page as usize] + self.reserved < self.limits[Class::Page as usize] {
                if let Some(slot) = self.warm.newest() {
                    if self.slots.is_present(slot) {
                        self.warm.unlink(&mut self.records, slot);
                        return Some(slot);
                    }
                    self.move_free(slot, State::Cold);
                    continue;
                }
                if self.headroom_pages > 0 {
                    self.headroom_pages -= 1;
                    self.grown_pages += 1;
                    return self.slot_without_memory();
                }
            }
            if !self.replace(owner, Class::Page) {
                return None;
            }
        }
        None
    }

    pub(super) fn slot_for_zero(&mut self, owner: Owner) -> Option<u32> {
        if self.stored[Class::Zero as usize] == self.limits[Class::Zero as usize] && !self.replace(owner, Class::Zero) {
            return None;
        }
        self.slot_without_memory().or_else(|| {
            let slot = self.warm.newest()?;
            self.warm.unlink(&mut self.records, slot);
            Some(slot)
        })
    }

    fn slot_without_memory(&mut self) -> Option<u32> {
        if let Some(slot) = self.cold.newest() {
            self.cold.unlink(&mut self.records, slot);
            return Some(slot);
        }
        let fresh = self.fresh;
        ((fresh as usize) < self.records.len()).then(|| {
            self.fresh += 1;
            fresh
        })
    }

    /// Makes room for a page of `owner` (see the module's text above). Returns false if nothing is
    /// stored.
    fn replace(&mut self, owner: Owner, class: Class) -> bool {
        let stored = self.stored[class as usize];
        let own = self.owners[owner.0 as usize].as_ref().map_or(0, |state| state.lists[class as usize].count());
        let has_fair_share = own > 0 && u64::from(own) * u64::from(self.owner_count) >= u64::from(stored);
        let loser = if has_fair_share { Some(owner) } else { self.largest(class) };
        match loser.and_then(|loser| self.evict(loser, class)) {
            Some((_, loser)) => {
                self.count(loser, |counters| counters.replaced += 1);
                true
            }
            None => false,
        }
    }

    /// The owner with the most pages.
    fn largest(&self, class: Class) -> Option<Owner> {
        let len = |state: &Option<OwnerState>| state.as_ref().map_or(0, |state| state.lists[class as usize].count());
        let (at, state) = self.owners.iter().enumerate().max_by_key(|(_, state)| len(state))?;
        (len(state) > 0).then_some(Owner(at as u8))
    }

    /// Frees the page that was not requested for longest, as the kernel's own lists do, and notes
    /// it for its owner.
    fn evict(&mut self, owner: Owner, class: Class) -> Option<(u32, Owner)> {
        let state = self.owners[owner.0 as usize].as_ref()?;
        let slot = state.lists[class as usize].oldest()?;
        let key = Key { id: self.records[slot as usize].id(), version: self.records[slot as usize].version() };
        self.release(slot, State::Warm);
        self.notice(owner, key);
        Some((slot, owner))
    }
}
