//! The cost of encoding and decoding a frame's head, in clear and sealed: a Get of one page, and
//! one of a read-ahead window.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use page::{FileKey, PageId, Version};
use std::hint::black_box;
use wire::key::PoolKey;
use wire::secure::{Channel, Handshake, answer};
use wire::{Header, Kind, WireKey};
use zerocopy::{FromBytes, IntoBytes};

fn keys(count: u32) -> Vec<WireKey> {
    (0..count).map(|index| WireKey::new(PageId { file: FileKey(1), index }, Version(1))).collect()
}

/// Both ends of a sealed connection.
fn pair() -> (Channel, Channel) {
    let key = PoolKey::new([1; 32]);
    let (handshake, first) = Handshake::begin(&key).expect("random bytes");
    let (second, lender) = answer(&key, &first).expect("the same key");
    (handshake.finish(&second).expect("the same key"), lender)
}

fn codec(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("codec");
    for count in [1, 32, wire::ITEMS_MAX as u32] {
        let keys = keys(count);
        let header = Header::new(Kind::Get, keys.len(), size_of_val(&*keys), 1);
        let mut frame = Vec::with_capacity(1 << 16);
        let plain = Channel::plain();
        group.bench_function(format!("plain/make/{count}"), |bencher| {
            bencher.iter(|| {
                frame.clear();
                plain.push_head(black_box(&header), keys.as_bytes(), &mut frame).expect("a frame that fits");
            });
        });
        group.bench_function(format!("plain/take/{count}"), |bencher| {
            bencher.iter(|| {
                let (header, items) = Header::ref_from_prefix(black_box(&frame)).expect("a whole frame");
                let kind = header.validate().expect("a valid frame");
                (kind, <[WireKey]>::ref_from_bytes(items).expect("whole keys").len())
            });
        });
        let (sender, _) = pair();
        group.bench_function(format!("sealed/make/{count}"), |bencher| {
            bencher.iter(|| {
                frame.clear();
                sender.push_head(black_box(&header), keys.as_bytes(), &mut frame).expect("a frame that fits");
            });
        });
        // A frame opens only once, and in order.
        let (sender, receiver) = pair();
        let mut opened = Vec::new();
        let sealed = || {
            let mut frame = Vec::new();
            sender.push_head(&header, keys.as_bytes(), &mut frame).expect("a frame that fits");
            frame.split_off(size_of::<Header>())
        };
        group.bench_function(format!("sealed/take/{count}"), |bencher| {
            let take = |frame: Vec<u8>| receiver.open_head(&header, &frame, &mut opened).expect("the next frame").len();
            bencher.iter_batched(sealed, take, BatchSize::PerIteration);
        });
    }
    group.finish();
}

criterion_group!(benches, codec);
criterion_main!(benches);
