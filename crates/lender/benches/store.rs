//! What the lender's store costs: a put that replaces a page, one that takes the place of another,
//! gets and misses. The pages are too many for the processor's caches, as they are in earnest.

use criterion::{Criterion, criterion_group, criterion_main};
use lender::store::{GetResult, Key, Store, Tenant};
use page::{FileKey, PAGE_SIZE, PageId, Version};
use std::hint::black_box;

/// 256 MiB.
const PAGES: u32 = 65_536;

fn key(index: u32, version: u64) -> Key {
    Key { id: PageId { file: FileKey(1), index }, version: Version(version) }
}

/// A store that is full.
fn full() -> (Store, Tenant) {
    let mut store = Store::new(PAGES).expect("address space");
    store.set_available_pages(u64::MAX);
    let tenant = store.add_tenant().expect("the first tenant");
    for index in 0..PAGES {
        assert!(store.put(tenant, key(index, 1), 0, &[index as u8 | 1; PAGE_SIZE]));
    }
    store.mark_reclaimable();
    (store, tenant)
}

fn store(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("store");
    let (mut store, tenant) = full();
    let mut random = fastrand::Rng::with_seed(1);
    let page = [1; PAGE_SIZE];
    let mut got_page = Vec::new();
    group.bench_function("get", |bencher| {
        bencher.iter(|| {
            got_page.clear();
            let got = store.get(tenant, key(random.u32(..PAGES), 1), false, black_box(&mut got_page));
            assert!(matches!(got, GetResult::Page { .. }));
        });
    });
    group.bench_function("get/miss", |bencher| {
        bencher
            .iter(|| assert_eq!(store.get(tenant, key(random.u32(PAGES..), 1), false, &mut got_page), GetResult::Miss));
    });
    let mut version = 1;
    group.bench_function("put/replacing", |bencher| {
        bencher.iter(|| {
            version += 1;
            assert!(store.put(tenant, key(random.u32(..PAGES), version), 0, black_box(&page)));
        });
    });
    let mut next = PAGES;
    group.bench_function("put/evicting", |bencher| {
        bencher.iter(|| {
            next = next.wrapping_add(1);
            assert!(store.put(tenant, key(next, 1), 0, black_box(&page)));
        });
    });
    group.finish();
}

criterion_group!(benches, store);
criterion_main!(benches);
