//! An in-flight Put: its pages are received directly into the store.
//!
//! The head has arrived, so the names and places of the pages are known. Their slots are reserved:
//! they are no part of the store until all pages have arrived. Dropping the [`Receipt`] frees them,
//! so that no way out of a connection can forget it.

use crate::connection::{LOCKED_PAGES, key};
use crate::shared::Shared;
use crate::store::{Incoming, Owner};
use std::sync::Arc;
use wire::PutItem;

/// The pages of a Put that are arriving.
pub struct Receipt {
    shared: Arc<Shared>,
    owner: Owner,
    items: Vec<PutItem>,
    /// The slots of the pages, and how many pages have arrived.
    pub incoming: Incoming,
    /// The request number that the answer repeats.
    pub request: u64,
}

impl Receipt {
    /// Reserves slots for the announced pages.
    pub fn begin(shared: &Arc<Shared>, owner: Owner, items: Vec<PutItem>, request: u64) -> Receipt {
        let mut store = shared.store.lock();
        let mut incoming = store.incoming(items.len());
        for (at, items) in items.chunks(LOCKED_PAGES).enumerate() {
            if at > 0 {
                store.bump(); // to a waiting thread, which would otherwise be too late again and again
            }
            store.read_ahead(owner, items.iter().map(|item| item.key.id()));
            items.iter().for_each(|item| store.reserve(owner, key(&item.key), &mut incoming));
        }
        drop(store);
        Receipt { shared: Arc::clone(shared), owner, items, incoming, request }
    }

    /// Stores all pages, which have arrived. Appends the status of each.
    pub fn store(mut self, statuses: &mut Vec<u8>) {
        debug_assert!(self.incoming.is_complete());
        let slots = self.incoming.take_slots();
        let mut store = self.shared.store.lock();
        for (at, (items, slots)) in self.items.chunks(LOCKED_PAGES).zip(slots.chunks(LOCKED_PAGES)).enumerate() {
            if at > 0 {
                store.bump();
            }
            for (item, slot) in items.iter().zip(slots) {
                statuses.push(store.commit(self.owner, key(&item.key), item.checksum.get(), *slot).into());
            }
        }
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        let slots = self.incoming.take_slots();
        if !slots.is_empty() {
            self.shared.store.lock().give_up(slots);
        }
    }
}
