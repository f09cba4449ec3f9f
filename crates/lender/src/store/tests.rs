//! Tests of the store against a simple model, and of each of its guarantees.

use super::*;
use page::{FileKey, PAGE_SIZE, ZERO_PAGE};

/// A checksum as a borrower would make it.
fn checksum(id: page::PageId, version: page::Version, page: &page::Page) -> u64 {
    page::ChecksumKey::new([7; 32]).checksum(id, version, page)
}

use std::collections::{HashMap, HashSet};

/// Random numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

fn key(index: u32, version: u64) -> Key {
    Key { id: PageId { file: FileKey(1), index }, version: Version(version) }
}

/// The content for a key and a tenant.
fn page_of(tenant: Tenant, key: Key) -> Page {
    let mut page = [0; PAGE_SIZE];
    page[..4].copy_from_slice(&key.id.index.to_le_bytes());
    page[8..16].copy_from_slice(&key.version.0.to_le_bytes());
    page[PAGE_SIZE - 1] = tenant.0 + 1;
    page
}

fn store(capacity_pages: u32) -> Store {
    let mut store = Store::new(capacity_pages).unwrap();
    store.set_available_pages(u64::MAX);
    store
}

fn put(store: &mut Store, tenant: Tenant, key: Key) -> bool {
    let page = page_of(tenant, key);
    store.put(tenant, key, checksum(key.id, key.version, &page), &page)
}

fn get(store: &mut Store, tenant: Tenant, key: Key) -> bool {
    let mut page = Vec::new();
    match store.get(tenant, key, false, &mut page) {
        GetResult::Miss => false,
        GetResult::Zero { .. } => panic!("{key:?} is not zero"),
        GetResult::Page { checksum: sum } => {
            assert!(page == page_of(tenant, key), "{key:?} of {tenant:?}");
            assert_eq!(sum, checksum(key.id, key.version, page.first_chunk().unwrap()));
            true
        }
    }
}

fn notices(store: &mut Store, tenant: Tenant) -> Vec<Key> {
    let mut keys = Vec::new();
    store.take_notices(tenant, usize::MAX, &mut keys);
    keys
}

/// Which of these indexes are stored (this does not change the FIFO order, but the LRU order).
fn kept(store: &Store, tenant: Tenant, indexes: impl IntoIterator<Item = u32>) -> Vec<u32> {
    indexes.into_iter().filter(|index| store.find(tenant, key(*index, 1)).is_some()).collect()
}

impl Store {
    /// Everything that must hold between two calls.
    fn check(&self) {
        let mut seen = HashSet::new();
        let mut walk = |list: &List, expected: &dyn Fn(&Record) -> bool| {
            let (mut next, mut count) = (list.oldest(), 0);
            while let Some(slot) = next {
                assert!(seen.insert(slot) && expected(&self.records[slot as usize]), "slot {slot}");
                let newer = self.records[slot as usize].newer;
                next = (newer != record::NONE).then_some(newer);
                count += 1;
            }
            assert_eq!(count, list.count());
        };
        walk(&self.free_resident, &|record| record.state() == State::FreeResident);
        walk(&self.free_nonresident, &|record| record.state() == State::FreeNonresident);
        let mut stored = [0; 2];
        for (at, state) in self.tenants.iter().enumerate() {
            let Some(state) = state else { continue };
            for (class, expected) in [State::Page, State::Zero].into_iter().enumerate() {
                stored[class] += state.lists[class].count();
                walk(&state.lists[class], &|record| {
                    let found = self.index.find(&self.records, at as u8, record.id());
                    found.is_some() && record.state() == expected && record.tenant() == at as u8
                });
            }
        }
        assert_eq!(stored, self.stored);
        assert!(stored[0] <= self.limits[0] && stored[1] <= self.limits[1]);
        let reserved = self.records.iter().filter(|record| record.state() == State::Reserved).count();
        assert_eq!(reserved, self.reserved as usize);
        assert_eq!(seen.len() + reserved, self.unused_from as usize);
        assert_eq!(self.tenant_count as usize, self.tenants.iter().flatten().count());
    }

    fn take_silently(&mut self, tenant: Tenant, key: Key) {
        let slot = self.find(tenant, key).unwrap();
        self.slots.take_silently(slot);
    }
}

#[test]
fn random_operations_agree_with_a_model() {
    for seed in 1..=12u64 {
        println!("seed {seed}");
        let mut random = Random(seed);
        let mut store = Store::new(64).unwrap();
        let mut tenants = vec![store.add_tenant().unwrap(), store.add_tenant().unwrap()];
        // Pages that may be there: the store may lose any of them, but must not have anything else.
        let mut model: HashMap<(Tenant, u32), (u64, bool)> = HashMap::new();
        let mut coming: Vec<(Tenant, Vec<Key>, InFlightPages)> = Vec::new();
        for version in 1..6000u64 {
            let tenant = tenants[random.below(tenants.len() as u64) as usize];
            let index = random.below(150) as u32;
            let known = model.get(&(tenant, index)).copied();
            match random.below(100) {
                0..40 => {
                    let zero = random.below(4) == 0;
                    let key = key(index, version);
                    let stored =
                        if zero { store.put(tenant, key, 5, &ZERO_PAGE) } else { put(&mut store, tenant, key) };
                    model.remove(&(tenant, index));
                    if stored {
                        model.insert((tenant, index), (version, zero));
                    }
                }
                40..70 => {
                    let exclusive = random.below(5) == 0;
                    let asked = match known {
                        Some((version, _)) if random.below(4) > 0 => version,
                        _ => 1 + random.below(version),
                    };
                    let mut page = Vec::new();
                    match store.get(tenant, key(index, asked), exclusive, &mut page) {
                        GetResult::Miss => {}
                        GetResult::Zero { checksum } => assert_eq!((known, checksum), (Some((asked, true)), 5)),
                        GetResult::Page { checksum: sum } => {
                            assert_eq!(known, Some((asked, false)));
                            assert!(page == page_of(tenant, key(index, asked)));
                            assert_eq!(
                                sum,
                                checksum(key(index, asked).id, Version(asked), page.first_chunk().unwrap())
                            );
                        }
                    }
                    if exclusive && known.is_some_and(|(version, _)| version == asked) {
                        model.remove(&(tenant, index));
                    }
                }
                70..80 => {
                    let dropped = known.map_or(version, |(version, _)| version - random.below(2));
                    store.drop_page(tenant, key(index, dropped));
                    if known.is_some_and(|(version, _)| version == dropped) {
                        model.remove(&(tenant, index));
                    }
                }
                80..85 => store.set_available_pages(random.below(20)),
                85..92 => {
                    store.mark_reclaimable();
                    let slot = random.below(72) as u32;
                    store.take_slots_silently(slot..slot + 1);
                }
                92..95 => {
                    store.scan(0..u32::MAX).unwrap();
                }
                95..97 => {
                    store.shrink(random.below(10) as usize);
                }
                97 => {
                    for tenant in &tenants {
                        for lost in notices(&mut store, *tenant) {
                            // A page that is reported as lost is lost, unless it was put again.
                            let known = model.get(&(*tenant, lost.id.index));
                            if known.is_some_and(|(version, _)| *version == lost.version.0) {
                                model.remove(&(*tenant, lost.id.index));
                                assert_eq!(store.get(*tenant, lost, false, &mut Vec::new()), GetResult::Miss);
                            }
                        }
                    }
                }
                98 if coming.iter().all(|(other, ..)| *other != tenant) => {
                    tenants.retain(|other| *other != tenant);
                    while !store.remove_tenant(tenant, 7) {
                        store.check();
                        assert!(!put(&mut store, tenant, key(index, version)));
                    }
                    model.retain(|(other, _), _| *other != tenant);
                }
                // Pages begin to arrive, some of them for the same place. The others are stored, or
                // their connection has ended.
                _ => {
                    for (tenant, keys, mut in_flight) in coming.drain(..) {
                        let arrives = random.below(4) > 0;
                        if arrives {
                            keys.iter().for_each(|key| in_flight.take(&page_of(tenant, *key)));
                        }
                        let slots = in_flight.take_slots();
                        if !arrives {
                            store.give_up(slots);
                            continue;
                        }
                        for (key, slot) in keys.into_iter().zip(slots) {
                            let sum = checksum(key.id, key.version, &page_of(tenant, key));
                            model.remove(&(tenant, key.id.index));
                            if store.commit(tenant, key, sum, slot) {
                                model.insert((tenant, key.id.index), (key.version.0, false));
                            }
                        }
                    }
                    let keys: Vec<_> = (0..random.below(6)).map(|_| key(random.below(150) as u32, version)).collect();
                    let mut in_flight = store.in_flight_pages(keys.len());
                    for key in &keys {
                        store.reserve(tenant, *key, &mut in_flight);
                        model.remove(&(tenant, key.id.index));
                    }
                    coming.push((tenant, keys, in_flight));
                }
            }
            if tenants.len() < 2 || (tenants.len() < 5 && random.below(50) == 0) {
                tenants.push(store.add_tenant().unwrap());
            }
            if version % 16 == 0 {
                store.check();
            }
        }
        store.check();
    }
}

#[test]
fn tenants_never_see_each_others_pages() {
    let mut store = store(100);
    let (one, two) = (store.add_tenant().unwrap(), store.add_tenant().unwrap());
    assert!(put(&mut store, one, key(1, 1)) && put(&mut store, two, key(2, 1)));
    assert!(!get(&mut store, two, key(1, 1)) && !get(&mut store, one, key(2, 1)));
    assert!(put(&mut store, two, key(1, 1)));
    assert!(get(&mut store, one, key(1, 1)) && get(&mut store, two, key(1, 1)));
    store.drop_page(two, key(1, 1));
    assert!(get(&mut store, one, key(1, 1)) && !get(&mut store, two, key(1, 1)));
}

#[test]
fn a_removed_tenant_leaves_nothing_to_its_successor() {
    let mut store = store(100);
    let one = store.add_tenant().unwrap();
    for index in 0..100 {
        assert!(put(&mut store, one, key(index, 1)));
    }
    store.put(one, key(200, 1), 0, &ZERO_PAGE);
    let mut calls = 1;
    while !store.remove_tenant(one, 30) {
        calls += 1;
        assert!(!get(&mut store, one, key(99, 1)));
    }
    assert_eq!((calls, store.stored_pages(), store.zero_pages()), (4, 0, 0));
    let mut absent = vec![];
    store.slots.absent(0..100, &mut absent).unwrap();
    assert_eq!(absent.into_iter().flatten().count(), 100);
    let next = store.add_tenant().unwrap();
    assert_eq!(next, one);
    assert!(!get(&mut store, next, key(1, 1)) && notices(&mut store, next).is_empty());
    store.check();
}

#[test]
fn versions_are_told_apart() {
    let mut store = store(10);
    let tenant = store.add_tenant().unwrap();
    put(&mut store, tenant, key(1, 5));
    assert!(!get(&mut store, tenant, key(1, 4)));
    store.drop_page(tenant, key(1, 6));
    assert!(get(&mut store, tenant, key(1, 5)));
    put(&mut store, tenant, key(1, 6));
    assert!(!get(&mut store, tenant, key(1, 5)) && get(&mut store, tenant, key(1, 6)));
    assert_eq!(store.stored_pages(), 1);
    let too_large = Key { version: Version(Version::MAX.0 + 1), ..key(1, 0) };
    assert!(!put(&mut store, tenant, too_large) && !get(&mut store, tenant, too_large));
    assert!(put(&mut store, tenant, Key { version: Version::MAX, ..too_large }));
    assert!(get(&mut store, tenant, Key { version: Version::MAX, ..too_large }));
}

#[test]
fn the_least_recently_used_goes_first() {
    let mut store = Store::new(3).unwrap();
    store.set_available_pages(u64::MAX);
    let tenant = store.add_tenant().unwrap();
    for index in 0..3 {
        put(&mut store, tenant, key(index, 1));
    }
    assert!(get(&mut store, tenant, key(0, 1)));
    put(&mut store, tenant, key(3, 1));
    put(&mut store, tenant, key(4, 1));
    assert_eq!(kept(&store, tenant, 0..5), [0, 3, 4]);
    assert_eq!(notices(&mut store, tenant).iter().map(|key| key.id.index).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(store.counters().replaced, 2);
}

#[test]
fn without_headroom_the_store_does_not_grow() {
    let mut store = store(100);
    let tenant = store.add_tenant().unwrap();
    store.set_available_pages(0);
    assert!(!put(&mut store, tenant, key(1, 1)));
    assert_eq!(store.counters().puts_refused, 1);
    store.set_available_pages(5);
    for index in 0..50 {
        assert!(put(&mut store, tenant, key(index, 1)));
    }
    assert_eq!((store.stored_pages(), store.used_slots()), (5, 5));
    assert_eq!(kept(&store, tenant, 0..50), [45, 46, 47, 48, 49]);
    // Memory that is gone may not be taken again; memory of a dropped page may.
    store.drop_page(tenant, key(49, 1));
    store.mark_reclaimable();
    store.take_silently(tenant, key(48, 1));
    store.take_silently(tenant, key(45, 1));
    assert_eq!(store.scan(0..100).unwrap(), 2);
    for index in 100..150 {
        assert!(put(&mut store, tenant, key(index, 1)));
    }
    assert_eq!(store.stored_pages(), 3);
    store.check();
}

#[test]
fn memory_taken_silently_is_not_taken_back_by_replacing() {
    let mut store = store(100);
    let tenant = store.add_tenant().unwrap();
    store.set_available_pages(10);
    for index in 0..10 {
        put(&mut store, tenant, key(index, 1));
    }
    store.mark_reclaimable();
    for index in 0..6 {
        store.take_silently(tenant, key(index, 1));
    }
    for index in 10..30 {
        assert!(put(&mut store, tenant, key(index, 1)));
    }
    assert_eq!(kept(&store, tenant, 0..30), [26, 27, 28, 29]);
}

#[test]
fn pages_that_the_kernel_took_are_misses_and_notified() {
    let mut store = store(100);
    let tenant = store.add_tenant().unwrap();
    for index in 0..10 {
        put(&mut store, tenant, key(index, 1));
    }
    store.mark_reclaimable();
    for index in [2, 3, 7] {
        store.take_silently(tenant, key(index, 1));
    }
    assert!(!get(&mut store, tenant, key(2, 1)));
    assert_eq!((store.stored_pages(), store.counters().reclaimed_by_kernel), (9, 1));
    assert_eq!(store.scan(0..u32::MAX).unwrap(), 2);
    assert_eq!(notices(&mut store, tenant), [key(3, 1), key(7, 1)]);
    assert_eq!((store.stored_pages(), store.counters().reclaimed_by_kernel), (7, 3));
    assert_eq!(store.scan(0..u32::MAX).unwrap(), 0);
    store.check();
}

#[test]
fn zeros_take_no_memory() {
    let mut store = store(16);
    let tenant = store.add_tenant().unwrap();
    store.set_available_pages(0);
    for index in 0..3 {
        assert!(store.put(tenant, key(index, 1), 7, &ZERO_PAGE));
    }
    // The bound is an eighth of the capacity.
    assert_eq!((store.zero_pages(), kept(&store, tenant, 0..3)), (2, vec![1, 2]));
    let mut page = Vec::new();
    assert_eq!(store.get(tenant, key(2, 1), false, &mut page), GetResult::Zero { checksum: 7 });
    assert_eq!(store.scan(0..u32::MAX).unwrap(), 0);
    assert_eq!(store.get(tenant, key(2, 1), true, &mut page), GetResult::Zero { checksum: 7 });
    assert_eq!(store.get(tenant, key(2, 1), true, &mut page), GetResult::Miss);
    assert!(page.is_empty());
    // A slot that stood for zeros has no memory to reuse.
    assert!(!put(&mut store, tenant, key(9, 1)));
    store.set_available_pages(1);
    assert!(put(&mut store, tenant, key(9, 1)) && get(&mut store, tenant, key(9, 1)));
    store.check();
}

#[test]
fn shrinking_gives_memory_back_oldest_first() {
    let mut store = store(10);
    let tenant = store.add_tenant().unwrap();
    for index in 0..10 {
        put(&mut store, tenant, key(index, 1));
    }
    store.drop_page(tenant, key(9, 1));
    assert_eq!(store.shrink(4), 4);
    assert_eq!(kept(&store, tenant, 0..10), [3, 4, 5, 6, 7, 8]);
    assert_eq!(notices(&mut store, tenant), [key(0, 1), key(1, 1), key(2, 1)]);
    let mut absent = vec![];
    store.slots.absent(0..10, &mut absent).unwrap();
    assert_eq!(absent.into_iter().flatten().count(), 4);
    store.set_available_pages(0);
    put(&mut store, tenant, key(20, 1));
    assert_eq!(store.stored_pages(), 6);
    assert_eq!(store.shrink(100), 6);
    assert_eq!(store.stored_pages(), 0);
    store.check();
}

#[test]
fn a_lender_that_stops_lending_gives_all_back() {
    let mut store = store(16);
    let tenants = [store.add_tenant().unwrap(), store.add_tenant().unwrap()];
    for tenant in tenants {
        (0..5).for_each(|index| assert!(put(&mut store, tenant, key(index, 1))));
    }
    store.put(tenants[0], key(9, 1), 7, &ZERO_PAGE);
    store.drop_page(tenants[0], key(0, 1));
    store.set_lending(false);
    assert_eq!(store.free_pages(), 0);
    // An older version is removed nevertheless: it is useless.
    assert!(!put(&mut store, tenants[0], key(1, 2)) && !put(&mut store, tenants[0], key(20, 1)));
    assert_eq!(kept(&store, tenants[0], 0..30), [2, 3, 4, 9]);
    assert!(get(&mut store, tenants[1], key(4, 1)), "what is still there is to be had");
    let mut calls = 0;
    while store.clear(4) > 0 {
        store.check();
        calls += 1;
    }
    // 8 pages, one of zeros, and two free slots with memory.
    assert_eq!((calls, store.stored_pages(), store.zero_pages(), store.free_resident_pages()), (3, 0, 0, 0));
    assert_eq!((notices(&mut store, tenants[0]).len(), notices(&mut store, tenants[1]).len()), (4, 5));
    let mut absent = vec![];
    store.slots.absent(0..11, &mut absent).unwrap();
    assert_eq!(absent.into_iter().flatten().count(), 11);
    store.set_lending(true);
    assert!(put(&mut store, tenants[0], key(1, 3)) && get(&mut store, tenants[0], key(1, 3)));
}

#[test]
fn shares_become_even_and_nobody_falls_below() {
    let mut store = store(90);
    let one = store.add_tenant().unwrap();
    for index in 0..200 {
        put(&mut store, one, key(index, 1));
    }
    assert_eq!(store.tenant_status(one).unwrap().1, 90);
    let two = store.add_tenant().unwrap();
    for index in 0..200 {
        put(&mut store, two, key(index, 1));
    }
    assert_eq!((store.tenant_status(one).unwrap().1, store.tenant_status(two).unwrap().1), (45, 45));
    // The busy tenant displaces its own pages, not those of the quiet one.
    for index in 200..400 {
        put(&mut store, one, key(index, 1));
    }
    assert_eq!(kept(&store, two, 0..200), (155..200).collect::<Vec<_>>());
    let three = store.add_tenant().unwrap();
    for index in 0..200 {
        put(&mut store, three, key(index, 1));
    }
    let pages = [one, two, three].map(|tenant| store.tenant_status(tenant).unwrap().1);
    assert!(pages.iter().all(|pages| (29..=31).contains(pages)), "{pages:?}");
}

#[test]
fn notices_are_bounded() {
    let mut store = store(2);
    let tenant = store.add_tenant().unwrap();
    for index in 0..NOTICES_MAX as u32 + 12 {
        put(&mut store, tenant, key(index, 1));
    }
    let keys = notices(&mut store, tenant);
    assert_eq!((keys.len(), keys[0]), (NOTICES_MAX, key(10, 1)));
    assert_eq!(store.counters().notices_forgotten, 10);
}

#[test]
fn there_is_a_last_tenant_number() {
    let mut store = store(1);
    let tenants: Vec<_> = (0..TENANTS_MAX).map(|_| store.add_tenant().unwrap()).collect();
    assert_eq!(store.add_tenant(), None);
    assert!(store.remove_tenant(tenants[7], 1));
    assert_eq!(store.add_tenant(), Some(tenants[7]));
}

/// Reserves slots for pages with these indexes, and returns their expected content.
fn expect(store: &mut Store, tenant: Tenant, indexes: std::ops::Range<u32>) -> (InFlightPages, Vec<Page>) {
    let mut in_flight = store.in_flight_pages(indexes.len());
    let pages = indexes.map(|index| {
        store.reserve(tenant, key(index, 1), &mut in_flight);
        page_of(tenant, key(index, 1))
    });
    let pages = pages.collect();
    (in_flight, pages)
}

#[test]
fn pages_are_received_into_their_slots_however_they_are_cut() {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    for cut in [1000, PAGE_SIZE, 10_001, usize::MAX] {
        let mut store = store(16);
        let tenant = store.add_tenant().unwrap();
        // Slots that are not adjacent, and room for all pages but one.
        (0..15).for_each(|index| assert!(put(&mut store, tenant, key(index, 1))));
        [3, 9, 4, 5].into_iter().for_each(|index| store.drop_page(tenant, key(index, 1)));
        store.set_available_pages(1);
        let (mut in_flight, pages) = expect(&mut store, tenant, 20..25);
        store.set_lending(false);
        store.reserve(tenant, key(25, 1), &mut in_flight);
        store.set_lending(true);
        // The beginning arrived before, and one byte of the next frame follows them.
        let bytes = [pages.as_flattened(), &[0xff; PAGE_SIZE], &[7]].concat();
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let (begun, rest) = bytes.split_at(700);
        in_flight.take(begun);
        for part in rest.chunks(cut.min(rest.len())) {
            far.write_all(part).unwrap();
            while !in_flight.is_complete() && in_flight.receive(&near).is_ok() {}
        }
        assert!(in_flight.is_complete());
        let mut next = [0];
        assert_eq!((near.read(&mut next).unwrap(), next), (1, [7]));
        store.check();
        let slots = in_flight.take_slots();
        for (index, slot) in (20..).zip(slots) {
            let page = page_of(tenant, key(index, 1));
            let sum = checksum(key(index, 1).id, Version(1), &page);
            assert_eq!(store.commit(tenant, key(index, 1), sum, slot), index < 25);
        }
        (20..25).for_each(|index| assert!(get(&mut store, tenant, key(index, 1)), "page {index}, cut at {cut}"));
        assert!(!get(&mut store, tenant, key(25, 1)));
        store.check();
    }
}

#[test]
fn what_is_being_received_is_not_the_kernels_to_take() {
    let mut store = store(4);
    let tenant = store.add_tenant().unwrap();
    // Its slot waits to be marked reclaimable, and is reserved meanwhile.
    assert!(put(&mut store, tenant, key(1, 1)));
    store.drop_page(tenant, key(1, 1));
    let (mut in_flight, pages) = expect(&mut store, tenant, 2..3);
    assert_eq!((store.reserved_pages(), store.free_resident_pages(), store.unmarked.len()), (1, 0, 1));
    in_flight.take(&pages[0][..100]);
    store.mark_reclaimable();
    assert!(store.unmarked.is_empty());
    // Neither shrinking nor searching touches it.
    assert_eq!((store.shrink(10), store.scan(0..4).unwrap()), (0, 0));
    in_flight.take(&pages[0][100..]);
    let sum = checksum(key(2, 1).id, Version(1), &pages[0]);
    assert!(store.commit(tenant, key(2, 1), sum, in_flight.take_slots()[0]));
    assert!(store.unmarked.len() == 1 && get(&mut store, tenant, key(2, 1)));
    store.check();
}

#[test]
fn zeros_that_are_received_are_kept_as_such() {
    let mut store = store(8);
    let tenant = store.add_tenant().unwrap();
    let (mut in_flight, _) = expect(&mut store, tenant, 1..2);
    in_flight.take(&ZERO_PAGE);
    let resident = |store: &mut Store| {
        let mut absent = Vec::new();
        store.slots.absent(0..8, &mut absent).unwrap();
        8 - absent.iter().map(|run| run.len()).sum::<usize>()
    };
    assert_eq!(resident(&mut store), 1);
    assert!(store.commit(tenant, key(1, 1), 7, in_flight.take_slots()[0]));
    assert_eq!(resident(&mut store), 0, "zeros take no memory");
    assert_eq!(store.get(tenant, key(1, 1), false, &mut Vec::new()), GetResult::Zero { checksum: 7 });
    assert_eq!((store.stored_pages(), store.zero_pages(), store.reserved_pages()), (0, 1, 0));
    store.check();
}

#[test]
fn reserved_slots_count_as_stored_pages() {
    let mut store = store(4);
    let tenant = store.add_tenant().unwrap();
    (0..4).for_each(|index| assert!(put(&mut store, tenant, key(index, 1))));
    // The pages that new ones replace are removed at once, and the oldest pages for new ones that
    // replace none.
    let (mut in_flight, pages) = expect(&mut store, tenant, 3..6);
    assert_eq!((kept(&store, tenant, 0..6), store.used_slots()), (vec![2], 4));
    in_flight.take(pages.as_flattened());
    for (index, slot) in (3..6).zip(in_flight.take_slots()) {
        assert!(store.commit(tenant, key(index, 1), 0, slot));
    }
    assert_eq!(kept(&store, tenant, 0..6), [2, 3, 4, 5]);
    store.check();
}
