//! Index from the name of a page to its slot.
//!
//! A hash table of small buckets. A page's entry is in one of two buckets: the emptier one when it
//! was added. An entry has 4 bytes: the slot's number and, in the other bits, some more of the
//! hash. So mostly only the record of the right page is read. If both buckets are full, one of
//! their entries moves to its own other bucket; if that does not help either, the page is not
//! stored. So each call takes the same short time, however full the table is: no chains, no
//! tombstones, and no rehash of all entries, during which no get would be answered.
//!
//! The hash has a random key, so that no borrower can make names that all fall into one bucket.

use super::record::Record;
use page::PageId;
use std::hash::{BuildHasher, RandomState};
use zerocopy::FromZeros;

/// Entries of a bucket: half a line of the processor's caches.
const BUCKET_ENTRIES: usize = 8;

/// Slack of the index: it has 1/SPARE_ONE_IN more entries than there are slots. The test fills
/// tables of up to 150,000 slots and replaces each page three times: all find a place there.
const SPARE_ONE_IN: usize = 4;

/// The minimum number of buckets: with few of them, chance has more effect.
const BUCKETS_MIN: usize = 8;

/// Pages that are prefetched at once: more than the number of reads that a processor has in flight.
const AHEAD_PAGES: usize = 32;

/// A slot's number plus one, with bits of its page's hash in front. 0 means no entry, so that an
/// empty table has no memory yet.
type Entry = u32;

#[derive(Clone, Copy, FromZeros)]
#[repr(transparent)]
struct Bucket([Entry; BUCKET_ENTRIES]);

/// The index. It stores slot numbers only; the names are in the records that each call passes.
pub struct Index {
    buckets: Vec<Bucket>,
    /// The bits of an entry that hold the slot.
    slot_mask: Entry,
    /// Keys of the hash.
    keys: [u64; 3],
}

/// The possible places of a page's entry.
#[derive(Clone, Copy, Default)]
struct Place {
    buckets: [usize; 2],
    /// The bits of the entry that do not hold the slot.
    print: Entry,
}

impl Index {
    /// An index for slots `0..slots`. `None` if there is no memory for it.
    pub fn new(slots: u32) -> Option<Index> {
        // The standard library seeds this hasher's keys from the system's random numbers.
        let keys = [1, 2, 3].map(|number| RandomState::new().hash_one(number));
        let entries = slots as usize + slots as usize / SPARE_ONE_IN;
        let buckets = entries.div_ceil(BUCKET_ENTRIES).max(BUCKETS_MIN);
        let buckets = Bucket::new_vec_zeroed(buckets).ok()?;
        Some(Index { buckets, slot_mask: u32::MAX.checked_shr(slots.leading_zeros()).unwrap_or(0), keys })
    }

    fn place(&self, tenant: u8, id: PageId) -> Place {
        let [first, second, third] = self.keys;
        let name = u64::from(id.file.0) << u32::BITS | u64::from(id.index);
        let hash = fold(fold(name ^ first, second) ^ u64::from(tenant), third);
        // Maps each half evenly to any number of buckets, without a division.
        let bucket = |half: u64| ((half * self.buckets.len() as u64) >> u32::BITS) as usize;
        let buckets = [bucket(hash >> u32::BITS), bucket(hash & u64::from(u32::MAX))];
        // The low bits, which depend least on the bucket, become the high ones.
        Place { buckets, print: (hash as u32).reverse_bits() & !self.slot_mask }
    }

    /// The slots of all entries that a page at this place may have.
    fn candidates(&self, place: Place) -> impl Iterator<Item = u32> {
        let entries = place.buckets.into_iter().flat_map(|bucket| self.buckets[bucket].0);
        let may_be = move |entry: &Entry| *entry != 0 && *entry & !self.slot_mask == place.print;
        entries.filter(may_be).map(|entry| (entry & self.slot_mask) - 1)
    }

    /// Prefetches the memory that [`Index::find`] will read for these pages, and calls back with
    /// the slots that it is likely to find. Each of those reads waits for memory, but here they
    /// wait together.
    pub fn read_ahead(
        &self,
        records: &[Record],
        tenant: u8,
        ids: impl Iterator<Item = PageId>,
        mut tell: impl FnMut(u32),
    ) {
        let mut places = [Place::default(); AHEAD_PAGES];
        let (mut count, mut sum) = (0, 0);
        for (place, id) in places.iter_mut().zip(ids) {
            *place = self.place(tenant, id);
            let buckets = place.buckets.map(|bucket| self.buckets[bucket].0);
            sum ^= buckets[0][0] ^ buckets[0][BUCKET_ENTRIES - 1] ^ buckets[1][0] ^ buckets[1][BUCKET_ENTRIES - 1];
            count += 1;
        }
        std::hint::black_box(sum);
        for slot in places[..count].iter().filter_map(|place| self.candidates(*place).next()) {
            tell(slot);
            sum ^= records[slot as usize].id().index;
        }
        std::hint::black_box(sum);
    }

    /// The slot of a tenant's page.
    pub fn find(&self, records: &[Record], tenant: u8, id: PageId) -> Option<u32> {
        let is_it = |slot: &u32| {
            let record = &records[*slot as usize];
            record.tenant() == tenant && record.id() == id
        };
        self.candidates(self.place(tenant, id)).find(is_it)
    }

    /// Adds a slot whose record is filled in, and whose page is not in the index. Returns false if
    /// there is no place for it.
    pub fn insert(&mut self, records: &[Record], slot: u32) -> bool {
        let Place { buckets: [first, second], print } = self.place_of(records, slot);
        let entry = print | (slot + 1);
        let free = |bucket: usize| self.buckets[bucket].0.iter().filter(|entry| **entry == 0).count();
        let bucket = if free(first) >= free(second) { first } else { second };
        self.add(bucket, entry)
            || self.make_room(records, first) && self.add(first, entry)
            || self.make_room(records, second) && self.add(second, entry)
    }

    /// Removes a slot, while its record still names its page.
    pub fn remove(&mut self, records: &[Record], slot: u32) {
        let Place { buckets, print } = self.place_of(records, slot);
        for bucket in buckets {
            if let Some(entry) = self.buckets[bucket].0.iter_mut().find(|entry| **entry == print | (slot + 1)) {
                *entry = 0;
                return;
            }
        }
        debug_assert!(false, "slot {slot} was not in the index");
    }

    fn place_of(&self, records: &[Record], slot: u32) -> Place {
        let record = &records[slot as usize];
        self.place(record.tenant(), record.id())
    }

    /// Returns false if the bucket is full.
    fn add(&mut self, bucket: usize, entry: Entry) -> bool {
        let free = self.buckets[bucket].0.iter_mut().find(|entry| **entry == 0);
        free.map(|free| *free = entry).is_some()
    }

    /// Moves an entry of a full bucket to its other one, if one of these has room.
    fn make_room(&mut self, records: &[Record], bucket: usize) -> bool {
        for at in 0..BUCKET_ENTRIES {
            let entry = self.buckets[bucket].0[at];
            let Place { buckets: [first, second], .. } = self.place_of(records, (entry & self.slot_mask) - 1);
            let other = if first == bucket { second } else { first };
            if other != bucket && self.add(other, entry) {
                self.buckets[bucket].0[at] = 0;
                return true;
            }
        }
        false
    }
}

/// Mixes the bits of one number with those of another one.
fn fold(number: u64, key: u64) -> u64 {
    // With an odd key no bit of the number is lost.
    let product = u128::from(number) * u128::from(key | 1);
    product as u64 ^ (product >> u64::BITS) as u64
}

#[cfg(test)]
mod tests {
    use super::super::record::State;
    use super::*;
    use page::{FileKey, Version};

    /// Of 600 small tables. More are refused in one of a million runs.
    const REFUSED_MAX: u32 = 3;

    /// Fills a table with pages of a few files, replaces each of them some times, and counts the
    /// refused pages.
    fn refused(slots: u32) -> u32 {
        let mut index = Index::new(slots).unwrap();
        let mut records = Record::new_vec_zeroed(slots as usize).unwrap();
        let id = |page: u32| PageId { file: FileKey(page % 7), index: page / 7 };
        let mut refused = 0;
        for page in 0..4 * slots {
            let slot = page % slots;
            if page >= slots && index.find(&records, 3, id(page - slots)) == Some(slot) {
                index.remove(&records, slot);
                assert_eq!(index.find(&records, 3, id(page - slots)), None);
            }
            records[slot as usize].set_used(State::Page, 3, id(page), Version(1), 0);
            if index.insert(&records, slot) {
                assert_eq!(index.find(&records, 3, id(page)), Some(slot));
                assert_eq!(index.find(&records, 4, id(page)), None);
            } else {
                refused += 1;
            }
        }
        refused
    }

    #[test]
    fn full_tables_have_a_place_for_each_slot() {
        // With few buckets many pages collide: one table in ten thousand refuses one page once.
        let of_small: u32 = [1, 2, 9, 72, 113, 1125].into_iter().cycle().take(600).map(refused).sum();
        assert!(of_small <= REFUSED_MAX, "{of_small} pages");
        assert_eq!(refused(150_000), 0);
    }

    #[test]
    fn what_finds_no_place_is_refused_and_leaves_no_trace() {
        let slots = 200;
        let mut index = Index::new(slots).unwrap();
        // All pages in the same place, which is possible only with known keys.
        index.keys = [0; 3];
        index.buckets.truncate(1);
        let mut records = Record::new_vec_zeroed(slots as usize).unwrap();
        let id = |slot| PageId { file: FileKey(1), index: slot };
        for slot in 0..slots {
            records[slot as usize].set_used(State::Page, 0, id(slot), Version(1), 0);
            assert_eq!(index.insert(&records, slot), slot < BUCKET_ENTRIES as u32);
        }
        index.remove(&records, 5);
        assert!(index.insert(&records, 100));
        let found: Vec<_> = (0..slots).filter(|slot| index.find(&records, 0, id(*slot)) == Some(*slot)).collect();
        assert_eq!(found, [0, 1, 2, 3, 4, 6, 7, 100]);
    }
}
