//! An in-flight Put: its pages are received directly into the store.
//!
//! The head has arrived, so the names and places of the pages are known. Their slots are reserved:
//! they are no part of the store until all pages have arrived. Dropping the [`InFlightPut`] frees
//! them, so that no way out of a connection can forget it.

use crate::connection::{LOCKED_PAGES, key};
use crate::shared::Shared;
use crate::store::{InFlightPages, Tenant};
use std::sync::Arc;
use wire::PutItem;

/// The pages of a Put that are arriving.
pub struct InFlightPut {
    shared: Arc<Shared>,
    tenant: Tenant,
    items: Vec<PutItem>,
    /// The slots of the pages, and how many pages have arrived.
    pub pages: InFlightPages,
    /// The request number that the answer repeats.
    pub request: u64,
}

impl InFlightPut {
    /// Reserves slots for the announced pages.
    pub fn begin(shared: &Arc<Shared>, tenant: Tenant, items: Vec<PutItem>, request: u64) -> InFlightPut {
        let mut store = shared.store.lock();
        let mut pages = store.in_flight_pages(items.len());
        for (at, items) in items.chunks(LOCKED_PAGES).enumerate() {
            if at > 0 {
                store.bump(); // to a waiting thread, which would otherwise be too late again and again
            }
            store.read_ahead(tenant, items.iter().map(|item| item.key.id()));
            items.iter().for_each(|item| store.reserve(tenant, key(&item.key), &mut pages));
        }
        drop(store);
        InFlightPut { shared: Arc::clone(shared), tenant, items, pages, request }
    }

    /// Stores all pages, which have arrived. Appends the status of each.
    pub fn store(mut self, statuses: &mut Vec<u8>) {
        debug_assert!(self.pages.is_complete());
        let slots = self.pages.take_slots();
        let mut store = self.shared.store.lock();
        for (at, (items, slots)) in self.items.chunks(LOCKED_PAGES).zip(slots.chunks(LOCKED_PAGES)).enumerate() {
            if at > 0 {
                store.bump();
            }
            for (item, slot) in items.iter().zip(slots) {
                statuses.push(store.commit(self.tenant, key(&item.key), item.checksum.get(), *slot).into());
            }
        }
    }
}

impl Drop for InFlightPut {
    fn drop(&mut self) {
        let slots = self.pages.take_slots();
        if !slots.is_empty() {
            self.shared.store.lock().give_up(slots);
        }
    }
}
