//! The event ring's records and the calibration's maps. The kernel writes them, on behalf of our
//! own BPF programs.

use super::{Target, number};
use std::sync::LazyLock;
use tap::fuzzing::{RingMemory, calibration, step};

/// Length of the ring: the smallest possible one.
const RING_BYTES: usize = 8 << 10;
const HEAD_BYTES: usize = 24;
const EVENT_BYTES: usize = HEAD_BYTES + page::PAGE_SIZE;
const BUSY: u32 = 1 << 31;
const DISCARD: u32 = 1 << 30;

pub const RECORDS: Target = Target {
    name: "tap_records",
    about: "a record's header under any positions",
    input_bytes_max: 21,
    run: |mut bytes| {
        let (header, consumer) = (number(&mut bytes, 4) as u32, number(&mut bytes, 8));
        let (producer, shift) = (number(&mut bytes, 8), number(&mut bytes, 1) % 30);
        step(header, consumer, producer, 8 << shift);
        step(header, consumer & !7, (consumer & !7).wrapping_add(producer % 8192), RING_BYTES as u64);
    },
    seeds: || {
        let seed = |header: u32, consumer: u64, producer: u64| {
            [&header.to_le_bytes()[..], &consumer.to_le_bytes(), &producer.to_le_bytes(), &[10]].concat()
        };
        vec![seed(5, 8, 24), seed(BUSY | 8, 0, 16), seed(DISCARD | 8, 0, 16), seed(4112, 8184, 8184 + 4120)]
    },
};

pub const RING: Target = Target {
    name: "tap_ring",
    about: "the memory of a whole ring, read by the tap's own reader",
    input_bytes_max: 16 + RING_BYTES,
    run: ring,
    seeds: || {
        let event =
            [&[7u8, 0, 0, 0, 0, 0, 0, 0][..], &8u64.to_le_bytes(), &9u64.to_le_bytes(), &[0x41; page::PAGE_SIZE]]
                .concat();
        let record = |header: u32, bytes: &[u8]| [&header.to_le_bytes()[..], &[0; 4], bytes].concat();
        let seed = |consumer: u64, pending: u64, ring: &[Vec<u8>]| {
            [&consumer.to_le_bytes()[..], &pending.to_le_bytes(), &ring.concat()].concat()
        };
        let head = record(HEAD_BYTES as u32, &event[..HEAD_BYTES]);
        let event = record(EVENT_BYTES as u32, &event);
        let small = record(8, &[1; 8]);
        let given_up = record(DISCARD | 16, &[0; 16]);
        vec![
            seed(0, event.len() as u64, std::slice::from_ref(&event)),
            seed(0, (head.len() + event.len()) as u64, &[head, event.clone()]),
            seed(0, (small.len() + given_up.len() + event.len()) as u64, &[small, given_up, event.clone()]),
            seed(1 << 40, event.len() as u64 + 16, &[event, record(BUSY | 8, &[0; 8])]),
            seed(0, 16, &[record(9, &[0; 8])]),
        ]
    },
};

static MEMORY: LazyLock<RingMemory> = LazyLock::new(|| RingMemory::new(RING_BYTES).expect("memory for a ring"));

/// An input is the consumer's position, the producer's lead, and the ring's bytes.
fn ring(mut bytes: &[u8]) {
    let (consumer, pending) = (number(&mut bytes, 8), number(&mut bytes, 8));
    let producer = consumer.wrapping_add(pending);
    let (records, _) = MEMORY.read(consumer, producer, bytes, 2).expect("the ring's memory is there");
    let mut last = consumer;
    for (at, (position, length, is_event)) in records.iter().enumerate() {
        let ahead = position.wrapping_sub(consumer);
        assert!(ahead < pending && (at == 0 || *position != last), "record at {position}");
        assert!(ahead + *length as u64 <= pending && *length <= RING_BYTES, "record of {length} bytes");
        assert_eq!(*is_event, *length == EVENT_BYTES || *length == HEAD_BYTES);
        last = *position;
    }
}

pub const CALIBRATION: Target = Target {
    name: "tap_calibration",
    about: "what the calibration programs and the counters leave in their maps",
    input_bytes_max: 5000,
    run: |mut bytes| {
        let frames: Vec<u64> = (0..4).map(|_| number(&mut bytes, 8)).collect();
        if let Some(base) = calibration(bytes, &frames) {
            assert!(base.is_multiple_of(1 << 30));
        }
    },
    seeds: || {
        const BASE: u64 = 0xffff_ea00_0000_0000;
        let frames = [0x1234u64, 5, 0x40_0000, 0x7f];
        let sightings = frames.iter().flat_map(|frame| [BASE + frame * 64, 64]);
        let words: Vec<u8> = frames.into_iter().chain(sightings).flat_map(u64::to_le_bytes).collect();
        vec![words, vec![0xff; 32 + 80], vec![1; 32 + 16 + page::PAGE_SIZE]]
    },
};
