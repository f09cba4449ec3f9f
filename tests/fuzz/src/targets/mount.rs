//! The state that a daemon leaves to its successor.

use super::{Target, take};
use ::mount::handover::layout::{self, header, node, open};
use std::cell::RefCell;

/// The pieces of the memory that an input fills, in this order: position and length. The slots lie
/// far apart, with holes between.
const PIECES: [(usize, usize); 6] = [
    (layout::HEADER_AT, 1024),
    (layout::INTENTS_AT, 2 * layout::INTENT_BYTES),
    (layout::OPENS_AT, 2 * layout::OPEN_BYTES),
    (layout::NODES_AT, 2 * layout::NODE_BYTES),
    (layout::SOURCE_AT, 64),
    (layout::MOUNTPOINT_AT, 64),
];
const INPUT_BYTES_MAX: usize = 1024 + 2 * (layout::INTENT_BYTES + layout::OPEN_BYTES + layout::NODE_BYTES) + 128;

thread_local! {
    /// Memory up to two nodes, reused: most of it is never touched.
    static MEMORY: RefCell<Vec<u8>> = RefCell::new(vec![0; layout::NODES_AT + 2 * layout::NODE_BYTES]);
}

pub const HANDED_OVER: Target = Target {
    name: "handed_over",
    about: "the memory that a daemon leaves to its successor: header, inodes, open files, intents",
    input_bytes_max: INPUT_BYTES_MAX,
    run: |mut bytes| {
        MEMORY.with_borrow_mut(|memory| {
            for (at, len) in PIECES {
                let piece = take(&mut bytes, len);
                memory[at..at + piece.len()].copy_from_slice(piece);
                memory[at + piece.len()..at + len].fill(0);
            }
            let _ = layout::about(&memory[..layout::INTENTS_AT]);
            // So many slots do not exist: this is found without checking each.
            let Ok(state) = layout::decode(memory) else { return };
            assert!(state.nodes.len() <= 2 && state.devices.len() <= layout::DEVICES_MAX);
            for known in &state.nodes {
                assert!(known.nodeid != 0 && known.slot < state.nodes_used);
                assert!(known.handle.as_ref().is_none_or(|(_, bytes)| bytes.len() <= layout::HANDLE_BYTES_MAX));
                assert!(known.name.as_ref().is_none_or(|(_, name)| name.as_bytes().len() <= layout::NAME_BYTES_MAX));
            }
            assert!(state.opens.iter().all(|open| open.handle != 0 && open.nodeid != 0));
        });
    },
    seeds: || {
        let mut words = vec![0u64; INPUT_BYTES_MAX / layout::WORD];
        for (index, value) in [
            (header::MAGIC, layout::MAGIC),
            (header::VERSION, layout::VERSION),
            (header::COMPLETE, 1),
            (header::NODES_USED, 2),
            (header::OPENS_USED, 2),
            (header::DEVICES, 1),
            (header::SOURCE_BYTES, 4),
            (header::MOUNTPOINT_BYTES, 4),
        ] {
            words[index] = value;
        }
        let opens = (1024 + 2 * layout::INTENT_BYTES) / layout::WORD;
        (words[opens + open::HANDLE], words[opens + open::NODE]) = (1, 2);
        let nodes = opens + 2 * layout::OPEN_BYTES / layout::WORD;
        for (index, value) in [
            (node::NODE, 2),
            (node::LOOKUPS, 1),
            (node::KEY_AND_KIND, 7 | 0o100_000 << 32),
            (node::STAMP_SEQUENCE, 2),
            (node::HANDLE, 1 | 8 << 32),
            (node::NAME_PARENT, 1),
            (node::NAME_LEN, 3),
            (node::NAME_BYTES, u64::from_le_bytes(*b"abc\0\0\0\0\0")),
        ] {
            words[nodes + index] = value;
        }
        let bytes = |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
        let whole = bytes(&words);
        words[nodes + node::STAMP_SEQUENCE] = 3;
        words[header::OPENS_USED] = u64::MAX;
        vec![whole.clone(), bytes(&words), whole[..700].to_vec()]
    },
};
