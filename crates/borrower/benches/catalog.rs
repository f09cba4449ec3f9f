//! The costs of the borrower's catalog: finding a file, the decisions for a READ of one page and of
//! a read-ahead window, and the life of an entry.

use borrower::FileIdentity;
use borrower::catalog::Catalog;
use borrower::catalog::file::{Filter, Verdict};
use borrower::policy::stream_room::Lending;
use criterion::{Criterion, criterion_group, criterion_main};
use page::{FileKey, PageRange, Version};
use std::hint::black_box;

const FILES: u64 = 10_000;
/// The size in pages of the file that is read: 256 MiB.
const PAGES: u32 = 65_536;
/// The size in pages of a read-ahead window.
const WINDOW_PAGES: u64 = 256;
const ENTRY_BYTES_MAX: u64 = 256 << 20;

fn identity(inode: u64) -> FileIdentity {
    FileIdentity { device: 1, inode, generation: 1 }
}

fn catalog(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("catalog");
    let catalog = Catalog::new(1, ENTRY_BYTES_MAX);
    assert!(catalog.lender_up(0));
    let place = catalog.place(0).expect("a lender that is up");
    let keys: Vec<FileKey> = (0..FILES).map(|inode| catalog.adopt(identity(inode)).key()).collect();
    let file = catalog.adopt(identity(FILES));
    let standing = |place| catalog.standing(place);
    let mut sources = Vec::new();
    let read = |first: u64, count: u64, filter: Filter, sources: &mut Vec<_>| {
        let range = PageRange { first, end: first + count };
        let mut state = file.lock();
        let ticket = state.begin_read(range, 0, 0, standing, true, filter, sources);
        assert!(state.end_read(&ticket, 0, |_, _| ()));
    };
    for index in 0..PAGES {
        // A file is in quarantine until it was read. The pages are read in a row, but are to be
        // lent.
        read(index.into(), 1, Filter::Off, &mut sources);
        let mut state = file.lock();
        assert_eq!(state.evict(index, u64::MAX, false, standing, true, true), Verdict::Put);
        state.put(index, place, Version(index.into()), 0);
        assert!(state.put_done(index, Version(index.into()), true));
    }
    let mut random = fastrand::Rng::with_seed(1);
    group.bench_function("file", |bencher| {
        bencher.iter(|| catalog.file(black_box(keys[random.usize(..keys.len())])).expect("a file that is there").key());
    });
    for count in [1, WINDOW_PAGES] {
        group.bench_function(format!("read/{count}"), |bencher| {
            bencher.iter(|| {
                read(random.u64(..u64::from(PAGES) - count), count, Filter::Evicted(Lending::Left), &mut sources)
            });
        });
    }
    group.bench_function("evict/known", |bencher| {
        bencher.iter(|| {
            let verdict = file.lock().evict(random.u32(..PAGES), u64::MAX, false, standing, true, true);
            assert_eq!(verdict, Verdict::AlreadyLent);
        });
    });
    // An exclusive get takes the page; then the page is evicted again, and put.
    let ticket = file.lock().begin_read(
        PageRange { first: 0, end: 1 },
        0,
        0,
        standing,
        true,
        Filter::Evicted(Lending::Left),
        &mut sources,
    );
    let mut versions: Vec<u64> = (0..PAGES.into()).collect();
    let mut next = u64::from(PAGES);
    group.bench_function("gone/evict/put", |bencher| {
        bencher.iter(|| {
            let index = random.u32(..PAGES);
            next += 1;
            let before = std::mem::replace(&mut versions[index as usize], next);
            let mut state = file.lock();
            state.gone(index, Version(before), Some(&ticket));
            assert_eq!(state.evict(index, u64::MAX, false, standing, true, true), Verdict::Put);
            state.put(index, place, Version(next), 0);
            assert!(state.put_done(index, Version(next), true));
        });
    });
    group.finish();
}

criterion_group!(benches, catalog);
criterion_main!(benches);
