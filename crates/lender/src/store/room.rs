//! These methods of the store find room for a page, choose the page to replace, and give memory
//! back.

use super::record::State;
use super::{Class, Key, Store, Tenant, TenantState};

/// Slots that a put checks to find one with memory. This bounds its time when the kernel has just
/// taken many. Each slot without memory is checked once, so repeated puts find one.
const TRIES_MAX: usize = 64;

impl Store {
    /// Gives back the memory of up to `pages` pages: of free slots first, then of the oldest pages
    /// of the tenant that has most. Returns how many.
    pub fn shrink(&mut self, pages: usize) -> usize {
        let mut freed = Vec::new();
        while freed.len() < pages {
            let slot = match self.free_resident.oldest() {
                Some(slot) => slot,
                None => match self.largest(Class::Page).and_then(|tenant| self.evict(tenant, Class::Page)) {
                    Some((slot, tenant)) => {
                        self.count(tenant, |counters| counters.shrunk += 1);
                        slot
                    }
                    None => break,
                },
            };
            self.move_free(slot, State::FreeNonresident);
            freed.push(slot);
        }
        let count = freed.len();
        self.give_back(freed);
        count
    }

    /// Forgets up to `pages` pages, of either kind, notes them for their tenants, and gives back
    /// their memory and that of free slots. Returns how many; 0: nothing is left.
    pub fn clear(&mut self, pages: usize) -> usize {
        let mut given = self.shrink(pages);
        while given < pages {
            // Pages of zeros have no memory that could be given back.
            let Some((slot, tenant)) = self.largest(Class::Zero).and_then(|tenant| self.evict(tenant, Class::Zero))
            else {
                break;
            };
            self.move_free(slot, State::FreeNonresident);
            self.count(tenant, |counters| counters.shrunk += 1);
            given += 1;
        }
        given
    }

    /// A slot that has memory, or may take some.
    pub(super) fn slot_with_memory(&mut self, tenant: Tenant) -> Option<u32> {
        for _ in 0..TRIES_MAX {
            if self.stored[Class::Page as usize] + self.reserved < self.limits[Class::Page as usize] {
                if let Some(slot) = self.free_resident.newest() {
                    if self.slots.is_present(slot) {
                        self.free_resident.unlink(&mut self.records, slot);
                        return Some(slot);
                    }
                    self.move_free(slot, State::FreeNonresident);
                    continue;
                }
                if self.available_pages > 0 {
                    self.available_pages -= 1;
                    self.grown_pages += 1;
                    return self.slot_without_memory();
                }
            }
            if !self.replace(tenant, Class::Page) {
                return None;
            }
        }
        None
    }

    pub(super) fn slot_for_zero(&mut self, tenant: Tenant) -> Option<u32> {
        if self.stored[Class::Zero as usize] == self.limits[Class::Zero as usize] && !self.replace(tenant, Class::Zero)
        {
            return None;
        }
        self.slot_without_memory().or_else(|| {
            let slot = self.free_resident.newest()?;
            self.free_resident.unlink(&mut self.records, slot);
            Some(slot)
        })
    }

    fn slot_without_memory(&mut self) -> Option<u32> {
        if let Some(slot) = self.free_nonresident.newest() {
            self.free_nonresident.unlink(&mut self.records, slot);
            return Some(slot);
        }
        let unused_from = self.unused_from;
        ((unused_from as usize) < self.records.len()).then(|| {
            self.unused_from += 1;
            unused_from
        })
    }

    /// Makes room for a page of `tenant` (see the module's text above). Returns false if nothing is
    /// stored.
    fn replace(&mut self, tenant: Tenant, class: Class) -> bool {
        let stored = self.stored[class as usize];
        let own = self.tenants[tenant.0 as usize].as_ref().map_or(0, |state| state.lists[class as usize].count());
        let has_fair_share = own > 0 && u64::from(own) * u64::from(self.tenant_count) >= u64::from(stored);
        let loser = if has_fair_share { Some(tenant) } else { self.largest(class) };
        match loser.and_then(|loser| self.evict(loser, class)) {
            Some((_, loser)) => {
                self.count(loser, |counters| counters.replaced += 1);
                true
            }
            None => false,
        }
    }

    /// The tenant with the most pages.
    fn largest(&self, class: Class) -> Option<Tenant> {
        let len = |state: &Option<TenantState>| state.as_ref().map_or(0, |state| state.lists[class as usize].count());
        let (at, state) = self.tenants.iter().enumerate().max_by_key(|(_, state)| len(state))?;
        (len(state) > 0).then_some(Tenant(at as u8))
    }

    /// Frees the page that was not requested for longest, as the kernel's own lists do, and notes
    /// it for its tenant.
    fn evict(&mut self, tenant: Tenant, class: Class) -> Option<(u32, Tenant)> {
        let state = self.tenants[tenant.0 as usize].as_ref()?;
        let slot = state.lists[class as usize].oldest()?;
        let key = Key { id: self.records[slot as usize].id(), version: self.records[slot as usize].version() };
        self.release(slot, State::FreeResident);
        self.notice(tenant, key);
        Some((slot, tenant))
    }
}
