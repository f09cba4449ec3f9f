//! Checks the contents of a chitchat message before chitchat receives it.
//!
//! chitchat trusts its peers: it keeps every node and every value that it receives, decompresses
//! everything, and stops with an assertion if its table of nodes no longer fits in one datagram. So
//! each message is checked first. The layout is that of chitchat 0.11 (its protocol version 0), all
//! integers little-endian:
//!
//! ```text
//! message  magic u16, version u8, kind u8, then  0 Syn: digest, cluster   1 SynAck: digest, delta   2 Ack: delta   3 BadCluster: –
//! digest   count u16, entries: node, heartbeat u64, collected u64, newest version u64
//! node     name, incarnation u64, address (4 or 6 as u8, its bytes, port u16)
//! delta    blocks: 1 (packed by zstd) or 2 (as it is) as u8, length u16, bytes; 0 ends them. Unpacked, a sequence of
//!          0: node, collected u64, from version u64     1: key, value, version u64, status u8     2: newest version u64
//!          where each node has one of 1 and 2 behind it, or none: there is one key. (chitchat stops with an assertion at a 2 that
//!          is lower than the version of a 1.)
//! name, key, value, cluster     length u16, UTF-8
//! ```
//!
//! A message with anything that a node of this program never sends is refused as a whole.

use crate::lender;
use chitchat::ChitchatId;
use std::net::{IpAddr, SocketAddr};

/// The maximum length of a node's name in bytes. Every message names all nodes.
pub const NAME_BYTES_MAX: usize = 12;

/// The maximum length of the table of all nodes in a message, in bytes: some 1,200 nodes of IPv4,
/// 1,000 of IPv6. chitchat fails when table and header leave less than 100 bytes of a datagram's
/// 65,507.
pub const DIGEST_BYTES_MAX: usize = 65_000;

/// The maximum length of a decompressed delta in bytes: several times the values of all nodes.
const DELTA_BYTES_MAX: usize = 1 << 20;

/// The maximum length of one decompressed block in bytes, as in chitchat.
const BLOCK_BYTES_MAX: usize = u16::MAX as usize;

/// Versions and heartbeats count up by one from zero: higher ones were made up, and adding to them
/// must not overflow.
const COUNT_MAX: u64 = 1 << 60;

/// A node in a digest; ordered as chitchat orders them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry<'a> {
    name: &'a str,
    incarnation: u64,
    address: SocketAddr,
}

impl<'a> From<&'a ChitchatId> for Entry<'a> {
    fn from(id: &'a ChitchatId) -> Entry<'a> {
        Entry { name: &id.node_id, incarnation: id.generation_id, address: id.gossip_advertise_addr }
    }
}

impl Entry<'_> {
    /// Its length in a digest in bytes.
    pub fn bytes(&self) -> usize {
        let ip_bytes = if self.address.is_ipv4() { 4 } else { 16 };
        2 + self.name.len() + 8 + 1 + ip_bytes + 2 + 3 * 8
    }
}

/// Whether a table of the nodes in either of two lists, each in order, is within
/// [`DIGEST_BYTES_MAX`].
pub(crate) fn fit_together<'a>(known: impl Iterator<Item = Entry<'a>>, told: &[Entry]) -> bool {
    let mut told = told.iter().peekable();
    let mut bytes = 0;
    for known in known {
        bytes += known.bytes();
        while let Some(new) = told.next_if(|new| **new < known) {
            bytes += new.bytes();
        }
        let _ = told.next_if(|same| **same == known);
    }
    bytes + told.map(Entry::bytes).sum::<usize>() <= DIGEST_BYTES_MAX
}

/// Checks a message, and returns the nodes that its digest names. `own` is this node: no other node
/// has newer values of it.
///
/// # Errors
/// Fails with the reason for which it is refused.
pub fn check<'a>(message: &'a [u8], own: &ChitchatId) -> Result<Vec<Entry<'a>>, &'static str> {
    let mut rest = Rest(message);
    rest.u16()?;
    if rest.u8()? != 0 {
        return Err("another version of the protocol");
    }
    let entries = match rest.u8()? {
        0 => {
            let entries = digest(&mut rest)?;
            rest.text()?;
            entries
        }
        1 => {
            let entries = digest(&mut rest)?;
            delta(&mut rest, own)?;
            entries
        }
        2 => {
            delta(&mut rest, own)?;
            Vec::new()
        }
        3 => Vec::new(),
        _ => return Err("an unknown kind of message"),
    };
    if rest.0.is_empty() { Ok(entries) } else { Err("bytes behind the end") }
}

fn digest<'a>(rest: &mut Rest<'a>) -> Result<Vec<Entry<'a>>, &'static str> {
    let before = rest.0.len();
    let count = rest.u16()?;
    let mut entries = Vec::new();
    for _ in 0..count {
        let entry = node(rest)?;
        if entries.last().is_some_and(|last| *last >= entry) {
            return Err("a table out of order");
        }
        entries.push(entry);
        for _ in 0..3 {
            rest.count()?;
        }
    }
    if before - rest.0.len() > DIGEST_BYTES_MAX + 2 {
        return Err("a table of too many nodes");
    }
    Ok(entries)
}

fn node<'a>(rest: &mut Rest<'a>) -> Result<Entry<'a>, &'static str> {
    let name = rest.text()?;
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err("a node's name that is none");
    }
    let incarnation = rest.u64()?;
    let ip: IpAddr = match rest.u8()? {
        4 => rest.array::<4>()?.into(),
        6 => rest.array::<16>()?.into(),
        _ => return Err("an unknown kind of address"),
    };
    let address = SocketAddr::new(ip, rest.u16()?);
    // Gossip is sent to this address, which must not be a broadcast address.
    let broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    if address.port() == 0 || ip.is_unspecified() || ip.is_multicast() || broadcast {
        return Err("an address that no node has");
    }
    Ok(Entry { name, incarnation, address })
}

fn delta(rest: &mut Rest, own: &ChitchatId) -> Result<(), &'static str> {
    let mut unpacked = Vec::new();
    loop {
        let packed = match rest.u8()? {
            0 => break,
            1 => true,
            2 => false,
            _ => return Err("an unknown kind of block"),
        };
        let length = rest.u16()?.into();
        let block = rest.take(length)?;
        if packed {
            let plain =
                zstd::bulk::decompress(block, BLOCK_BYTES_MAX).map_err(|_| "a block that cannot be unpacked")?;
            unpacked.extend_from_slice(&plain);
        } else {
            unpacked.extend_from_slice(block);
        }
        if unpacked.len() > DELTA_BYTES_MAX {
            return Err("too much in one message");
        }
    }
    changes(&mut Rest(&unpacked), own)
}

fn changes(rest: &mut Rest, own: &ChitchatId) -> Result<(), &'static str> {
    let mut may_change = false;
    while !rest.0.is_empty() {
        let kind = rest.u8()?;
        if kind != 0 && !std::mem::take(&mut may_change) {
            return Err("a change of no node, or a second one");
        }
        match kind {
            0 => {
                may_change = true;
                let entry = node(rest)?;
                if entry.name == &*own.node_id && entry.incarnation == own.generation_id {
                    return Err("news of ourselves");
                }
                // Keys are never deleted, so no deletion was ever collected.
                if rest.u64()? != 0 {
                    return Err("deleted values");
                }
                rest.count()?;
            }
            1 => {
                if rest.text()? != lender::KEY {
                    return Err("an unknown key");
                }
                if rest.text()?.len() > lender::VALUE_BYTES_MAX {
                    return Err("a value that is too long");
                }
                rest.count()?;
                if rest.u8()? != 0 {
                    return Err("deleted values");
                }
            }
            2 => drop(rest.count()?),
            _ => return Err("an unknown kind of change"),
        }
    }
    Ok(())
}

/// The rest of the input.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or("a message cut short")?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let (taken, rest) = self.0.split_first_chunk().ok_or("a message cut short")?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, &'static str> {
        self.array().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, &'static str> {
        self.array().map(u16::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, &'static str> {
        self.array().map(u64::from_le_bytes)
    }

    fn count(&mut self) -> Result<u64, &'static str> {
        let count = self.u64()?;
        if count <= COUNT_MAX { Ok(count) } else { Err("a version that cannot be") }
    }

    fn text(&mut self) -> Result<&'a str, &'static str> {
        let length = self.u16()?.into();
        std::str::from_utf8(self.take(length)?).map_err(|_| "text that is none")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> ChitchatId {
        ChitchatId::new("own", 1, "10.0.0.9:7070".parse().unwrap())
    }

    fn text(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u16).to_le_bytes());
        out.extend(text.as_bytes());
    }

    fn node(out: &mut Vec<u8>, name: &str, port: u16) {
        text(out, name);
        out.extend(7_u64.to_le_bytes());
        out.extend([4, 10, 0, 0, 1]);
        out.extend(port.to_le_bytes());
    }

    fn counts(out: &mut Vec<u8>, counts: &[u64]) {
        counts.iter().for_each(|count| out.extend(count.to_le_bytes()));
    }

    fn header(kind: u8) -> Vec<u8> {
        vec![0x53, 0xb0, 0, kind]
    }

    /// A SynAck with one node, and one change of it.
    fn syn_ack(name: &str, key: &str, value: &str, status: u8, packed: bool) -> Vec<u8> {
        syn_ack_and(name, key, value, status, packed, &[])
    }

    /// Such a SynAck, followed by more bytes.
    fn syn_ack_and(name: &str, key: &str, value: &str, status: u8, packed: bool, more: &[u8]) -> Vec<u8> {
        let mut message = header(1);
        message.extend(1_u16.to_le_bytes());
        node(&mut message, name, 7070);
        counts(&mut message, &[1, 0, 1]);
        let mut changes = vec![0];
        node(&mut changes, name, 7070);
        counts(&mut changes, &[0, 0]);
        changes.push(1);
        text(&mut changes, key);
        text(&mut changes, value);
        counts(&mut changes, &[1]);
        changes.push(status);
        changes.extend(more);
        let block = if packed { zstd::bulk::compress(&changes, 0).unwrap() } else { changes };
        message.push(if packed { 1 } else { 2 });
        message.extend((block.len() as u16).to_le_bytes());
        message.extend(block);
        message.push(0);
        message
    }

    #[test]
    fn what_chitchat_reads_is_let_through() {
        use chitchat::Deserializable;
        for packed in [false, true] {
            let message = syn_ack("a", lender::KEY, "a:1 1 1", 0, packed);
            let entries = check(&message, &own()).unwrap();
            assert_eq!(entries.len(), 1);
            assert_eq!(entries[0], Entry::from(&ChitchatId::new("a", 7, "10.0.0.1:7070".parse().unwrap())));
            chitchat::ChitchatMessage::deserialize(&mut &message[..]).unwrap();
        }
    }

    #[test]
    fn an_entry_takes_as_much_as_chitchat_says() {
        use chitchat::{Deserializable, Serializable};
        let mut syn = header(0);
        syn.extend(1_u16.to_le_bytes());
        let before = syn.len();
        node(&mut syn, "a", 7070);
        counts(&mut syn, &[1, 0, 1]);
        let entry = Entry { name: "a", incarnation: 7, address: "10.0.0.1:7070".parse().unwrap() };
        assert_eq!(entry.bytes(), syn.len() - before);
        text(&mut syn, "pool");
        assert_eq!(chitchat::ChitchatMessage::deserialize(&mut &syn[..]).unwrap().serialized_len(), syn.len());
    }

    #[test]
    fn what_no_node_sends_is_refused() {
        let good = |name: &str, key: &str, value: &str, status| {
            check(&syn_ack(name, key, value, status, true), &own()).map(|_| ())
        };
        assert_eq!(good("a", lender::KEY, "", 0), Ok(()));
        assert_eq!(good("a", "other", "", 0), Err("an unknown key"));
        let long = "x".repeat(301);
        assert_eq!(good("a", lender::KEY, &long, 0), Err("a value that is too long"));
        assert_eq!(good("a", lender::KEY, "", 1), Err("deleted values"));
        assert_eq!(good("a name too long", lender::KEY, "", 0), Err("a node's name that is none"));
        assert_eq!(good("", lender::KEY, "", 0), Err("a node's name that is none"));
        let mut newest = vec![2];
        counts(&mut newest, &[0]);
        assert_eq!(
            check(&syn_ack_and("a", lender::KEY, "", 0, true, &newest), &own()).map(|_| ()),
            Err("a change of no node, or a second one")
        );
        let own = ChitchatId::new("a", 7, "10.0.0.1:7070".parse().unwrap());
        assert_eq!(check(&syn_ack("a", lender::KEY, "", 0, true), &own), Err("news of ourselves"));
        assert_eq!(check(&header(9), &own), Err("an unknown kind of message"));
        assert_eq!(check(&[0x53, 0xb0, 1, 0], &own), Err("another version of the protocol"));
        let mut long = header(3);
        long.push(0);
        assert_eq!(check(&long, &own), Err("bytes behind the end"));
    }

    #[test]
    fn nothing_is_unpacked_without_limit() {
        let zeros = zstd::bulk::compress(&vec![0; BLOCK_BYTES_MAX], 0).unwrap();
        let mut message = header(2);
        for _ in 0..DELTA_BYTES_MAX / BLOCK_BYTES_MAX + 1 {
            message.push(1);
            message.extend((zeros.len() as u16).to_le_bytes());
            message.extend(&zeros);
        }
        message.push(0);
        assert_eq!(check(&message, &own()), Err("too much in one message"));
    }

    #[test]
    fn addresses_that_nobody_has_and_tables_too_large_are_refused() {
        let table = |count: u16, port: u16| {
            let mut message = header(0);
            message.extend(count.to_le_bytes());
            for index in 0..count {
                node(&mut message, &format!("{index:012}"), port);
                counts(&mut message, &[1, 0, 1]);
            }
            text(&mut message, "cluster");
            check(&message, &own()).map(|entries| entries.len())
        };
        assert_eq!(table(1000, 7070), Ok(1000));
        assert_eq!(table(1300, 7070), Err("a table of too many nodes"));
        assert_eq!(table(1, 0), Err("an address that no node has"));
    }

    #[test]
    fn nodes_that_are_known_need_no_room() {
        let names: Vec<_> = (0..2000).map(|index| format!("{index:012}")).collect();
        let address = "10.0.0.1:7070".parse().unwrap();
        let entries: Vec<_> = names.iter().map(|name| Entry { name, incarnation: 1, address }).collect();
        let room = DIGEST_BYTES_MAX / entries[0].bytes();
        let fit = |known: &[Entry], told: &[Entry]| fit_together(known.iter().copied(), told);
        let odd: Vec<_> = entries[..room].iter().copied().skip(1).step_by(2).collect();
        assert!(fit(&entries[..room], &entries[..room]));
        assert!(fit(&odd, &entries[..room]) && fit(&entries[..room], &odd));
        assert!(
            fit(&entries[..room / 2], &entries[room / 2..room]) && fit(&entries[room / 2..room], &entries[..room / 2])
        );
        assert!(!fit(&entries[..room], &entries[room..room + 1]) && !fit(&entries[1..room + 1], &entries[..1]));
        assert!(!fit(&[], &entries[..room + 1]) && fit(&[], &[]));
    }

    #[test]
    fn damage_anywhere_is_no_harm() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..20_000 {
            let packed = random.bool();
            let mut message = syn_ack("a", lender::KEY, "a:1 1 1", 0, packed);
            for _ in 0..random.usize(1..4) {
                let at = random.usize(..message.len());
                message[at] = random.u8(..);
            }
            message.truncate(random.usize(..message.len() + 1));
            let _ = check(&message, &own());
        }
    }
}
