//! The cost of sealing and opening a page, with encryption and with checksums alone.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use page::seal::Sealing;
use page::{ChecksumKey, FileKey, PAGE_SIZE, Page, PageId, Version};
use std::hint::black_box;

const ID: PageId = PageId { file: FileKey(7), index: 9 };

fn page() -> Page {
    let mut page = [0; PAGE_SIZE];
    (0u32..).zip(page.chunks_exact_mut(4)).for_each(|(word, place)| place.copy_from_slice(&word.to_le_bytes()));
    page
}

fn sealing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sealing");
    group.throughput(Throughput::Bytes(PAGE_SIZE as u64));
    let aead = Sealing::aead(&[1; 32]).expect("a key of the right length");
    for (name, sealing) in [("aead", aead), ("checksum", Sealing::Checksum(ChecksumKey::new([1; 32])))] {
        let (page, mut sealed) = (page(), [0; PAGE_SIZE]);
        group.bench_function(format!("seal/{name}"), |bencher| {
            bencher.iter(|| sealing.seal(ID, Version(1), black_box(&page), &mut sealed));
        });
        let tag = sealing.seal(ID, Version(1), &page, &mut sealed);
        group.bench_function(format!("open/{name}"), |bencher| {
            // Opening works in place.
            bencher.iter_batched_ref(
                || sealed,
                |sealed| assert!(sealing.open(ID, Version(1), tag, sealed)),
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, sealing);
criterion_main!(benches);
