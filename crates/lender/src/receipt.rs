//! A Put whose pages are still coming: they are received straight into the store.
//!
//! Its head has come, so it is known what the pages are called, and where they go. Their slots are
//! reserved: they are no part of the store until all have come, and are given back by dropping the
//! [`Receipt`], so that no way out of a connection can forget it.

use crate::connection::{LOCKED_PAGES, key};
use crate::shared::Shared;
use crate::store::{Incoming, Owner};
use std::sync::Arc;
use wire::PutItem;

/// The pages of a Put.
pub struct Receipt {
    shared: Arc<Shared>,
    owner: Owner,
    items: Vec<PutItem>,
    /// Where they go, and how many have come.
    pub incoming: Incoming,
    /// What the answer is to repeat.
    pub request: u64,
}

impl Receipt {
    /// Makes room for what was announced.
    pub fn begin(shared: &Arc<Shared>, owner: Owner, items: Vec<PutItem>, request: u64) -> Receipt {
        let mut store = shared.store.lock();
        let mut incoming = store.incoming(items.len());
        for (at, items) in items.chunks(LOCKED_PAGES).enumerate() {
            if at > 0 {
                store.bump(); // to whoever waits, who would else come too late time after time
            }
            store.read_ahead(owner, items.iter().map(|item| item.key.id()));
            items.iter().for_each(|item| store.reserve(owner, key(&item.key), &mut incoming));
        }
        drop(store);
        Receipt { shared: Arc::clone(shared), owner, items, incoming, request }
    }

    /// Stores all pages, which have come. Appends the status of each.
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
