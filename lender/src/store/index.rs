//! From the name of a page to its slot.
//!
//! A hash table of chains, one bucket and one link for each slot: 8 bytes a slot, all of them asked for at the start. A table
//! of open addresses would be a little quicker and, half full of tombstones, would now and then move all its entries at
//! once: a tenth of a second and more for each million, during which no get is answered. This one never moves anything.
//!
//! The hash is keyed at random, so that no borrower can make names that all meet in one chain.

use super::record::{NONE, Record};
use page::PageId;
use std::hash::{BuildHasher, RandomState};
use zerocopy::FromZeros;

/// Pages read ahead at once: more than a processor has reads under way.
const AHEAD_PAGES: usize = 32;

/// The index. It keeps slot numbers only; the names are in the records given to each call.
pub struct Index {
    /// First slot of each chain, plus one; 0 where there is none, so that an empty table has no memory yet.
    buckets: Vec<u32>,
    /// Behind each slot the next one of its chain, plus one.
    links: Vec<u32>,
    hasher: RandomState,
}

impl Index {
    /// An index for slots `0..slots`. `None` when there is no memory for it.
    pub fn new(slots: u32) -> Option<Index> {
        let zeros = || u32::new_vec_zeroed(slots as usize).ok();
        Some(Index { buckets: zeros()?, links: zeros()?, hasher: RandomState::new() })
    }

    fn bucket(&self, owner: u8, id: PageId) -> usize {
        let hash = self.hasher.hash_one((owner, id.file.0, id.index));
        // Maps the hash evenly to any number of buckets, without a division.
        ((u128::from(hash) * self.buckets.len() as u128) >> u64::BITS) as usize
    }

    /// Reads what [`Index::find`] is about to read for these pages, and tells the slots that it is likely to find. Each of those reads
    /// waits for memory, but here they wait together.
    pub fn read_ahead(&self, records: &[Record], owner: u8, ids: impl Iterator<Item = PageId>, tell: impl FnMut(u32)) {
        let mut first = [0; AHEAD_PAGES];
        for (first, id) in first.iter_mut().zip(ids) {
            *first = self.buckets[self.bucket(owner, id)];
        }
        let found = first.into_iter().filter(|next| *next != 0).map(|next| next - 1);
        found.clone().for_each(tell);
        std::hint::black_box(found.map(|slot| records[slot as usize].id().index).fold(0, u32::wrapping_add));
    }

    /// The slot of an owner's page.
    pub fn find(&self, records: &[Record], owner: u8, id: PageId) -> Option<u32> {
        let mut next = self.buckets[self.bucket(owner, id)];
        while next != 0 {
            let record = &records[next as usize - 1];
            if record.owner() == owner && record.id() == id {
                return Some(next - 1);
            }
            next = self.links[next as usize - 1];
        }
        None
    }

    /// Adds a slot whose record is filled in, and whose page is not in the index.
    pub fn insert(&mut self, records: &[Record], slot: u32) {
        debug_assert!(slot != NONE);
        let record = &records[slot as usize];
        let bucket = self.bucket(record.owner(), record.id());
        self.links[slot as usize] = std::mem::replace(&mut self.buckets[bucket], slot + 1);
    }

    /// Takes a slot out, while its record still says what it holds.
    pub fn remove(&mut self, records: &[Record], slot: u32) {
        let record = &records[slot as usize];
        let bucket = self.bucket(record.owner(), record.id());
        let behind = self.links[slot as usize];
        let mut next = self.buckets[bucket];
        if next == slot + 1 {
            self.buckets[bucket] = behind;
            return;
        }
        while next != 0 {
            let link = next as usize - 1;
            next = self.links[link];
            if next == slot + 1 {
                self.links[link] = behind;
                return;
            }
        }
        debug_assert!(false, "slot {slot} was not in the index");
    }
}
