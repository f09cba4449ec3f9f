//! Input by gossip: datagrams from any peer, messages from peers with the key. A member of the pool
//! may be broken or hostile.

use super::{Target, number};
use chitchat::{ChitchatId, ChitchatMessage, Deserializable};
use discovery::datagram::Codec;
use discovery::lender::{KEY, Lender};
use discovery::{Security, message};
use std::cell::RefCell;
use wire::key::PoolKey;

/// Bytes of an input: a table of several nodes, and a delta.
const MESSAGE_BYTES: usize = 1024;

pub const MESSAGES: Target = Target {
    name: "gossip_messages",
    about: "a message of another node: what is let through does chitchat no harm",
    input_bytes_max: MESSAGE_BYTES,
    run: |bytes| {
        let own = ChitchatId::new("own", 1, ([10, 0, 0, 9], 7070).into());
        if message::check(bytes, &own).is_ok() {
            // chitchat may reject the message; it must survive it.
            let _ = ChitchatMessage::deserialize(&mut &bytes[..]);
        }
    },
    seeds: || {
        let node = [&[1, 0, b'a'][..], &7u64.to_le_bytes(), &[4, 10, 0, 0, 1], &7070u16.to_le_bytes()].concat();
        let digest = [&1u16.to_le_bytes()[..], &node, &[1; 1], &[0; 23]].concat();
        let text = |text: &str| [&(text.len() as u16).to_le_bytes()[..], text.as_bytes()].concat();
        let lender = Lender {
            address: "10.0.0.1:7070".parse().expect("an address"),
            free_bytes: 1 << 30,
            capacity_bytes: 1 << 32,
        };
        let value = [&[1][..], &text(KEY), &text(&lender.to_text()), &1u64.to_le_bytes(), &[0]].concat();
        let changes = [&[0][..], &node, &[0; 16], &value].concat();
        let delta = [&[2][..], &(changes.len() as u16).to_le_bytes(), &changes, &[0]].concat();
        let message = |kind: u8, parts: &[&[u8]]| [&[0x53, 0xb0, 0, kind][..], &parts.concat()].concat();
        vec![
            message(0, &[&digest, &text(discovery::CLUSTER)]),
            message(1, &[&digest, &delta]),
            message(2, &[&delta]),
            message(3, &[]),
        ]
    },
};

pub const DATAGRAMS: Target = Target {
    name: "gossip_datagrams",
    about: "a datagram, with and without a key; and one that was sealed and then damaged",
    input_bytes_max: 256,
    run: datagrams,
    seeds: || vec![b"PUMA".to_vec(), [&9u64.to_le_bytes()[..], b"a message"].concat(), vec![0; 64]],
};

thread_local! {
    static CODECS: RefCell<[Codec; 2]> = RefCell::new(
        [Security::Keyed(PoolKey::new([7; 32])), Security::Trusting]
            .map(|security| Codec::new(&security).expect("random bytes and memory")),
    );
}

/// An input is the place of the damage, and the message.
fn datagrams(bytes: &[u8]) {
    CODECS.with_borrow_mut(|codecs| {
        for codec in codecs {
            let _ = codec.open(&mut bytes.to_vec(), 0);
            let mut message = bytes;
            let damage = number(&mut message, 8);
            let mut datagram = Vec::new();
            codec.seal(message, 1000, &mut datagram).expect("a short message fits");
            assert_eq!(codec.open(&mut datagram.clone(), 1000).as_deref(), Ok(message));
            let at = damage as usize % datagram.len();
            datagram[at] ^= (damage >> 56) as u8 | 1;
            assert!(codec.open(&mut datagram, 1000).is_err(), "a damaged datagram opens");
        }
    });
}
