//! Datagrams: a message of gossip, compressed, and sealed with the pool's key or with a checksum.
//!
//! ```text
//! sealed   "PGS1", nonce 12 bytes, AES-256-GCM( time u64 in ms since 1970, little-endian ‖ body ) with a tag of 16 bytes;
//!          associated data: "PGS1" ‖ the protocol's name
//! in clear "PGC1", the first 8 bytes of SHA-256( the protocol's name ‖ body ), body
//! body     0 ‖ message, or 1 ‖ message packed by zstd
//! ```
//!
//! A datagram that does not open is dropped, without an answer: a stranger's datagram costs one
//! check of a tag. One that opens must be of this minute and new to this node. So an attacker who
//! has recorded a datagram can have it answered to an address of his choice only while it is
//! timely, and once by each node, because each remembers the nonces that it has seen itself. An old
//! message does no harm to chitchat: its versions are older than the known ones.
//!
//! A nonce is 8 random bytes of this process and a count. With fully random nonces, a thousand
//! nodes under one key would, within some days, send as many datagrams as one key permits. With a
//! count only the number of process starts matters. A machine that is restored from a snapshot, or
//! copied while it runs, continues with both, and uses nonces again: docs/user/security.md has the
//! remedy.

use crate::{CLUSTER, Security};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::digest::{Context, SHA256};
use ring::rand::{SecureRandom, SystemRandom};
use std::collections::HashSet;
use std::io;
use zstd::bulk::{Compressor, Decompressor};

/// The maximum length of a datagram in bytes: that of UDP over IPv4.
pub const DATAGRAM_BYTES_MAX: usize = 65_507;

/// The maximum length of a message in bytes: chitchat's own.
pub const MESSAGE_BYTES_MAX: usize = 65_507;

/// The maximum age of a sealed datagram, in the past or in the future: machines' clocks differ by
/// at most this much.
pub const CLOCK_MS_MAX: u64 = 60_000;

/// Remembered nonces, in each of two generations. A node receives a dozen datagrams a second, and
/// needs their nonces for two minutes: one generation holds ten times as many. A node with the key
/// could make it forget older ones by sending more.
const NONCES_MAX: usize = 16_384;

/// The label with which the key is derived from the pool's key.
const KEY_LABEL: &str = "gossip";

/// Shorter messages are not compressed.
const PACKED_FROM_BYTES: usize = 256;

/// zstd's fastest level: the table of nodes shrinks to less than half.
const PACKING_LEVEL: i32 = 1;

const SEALED: &[u8; 4] = b"PGS1";
const CLEAR: &[u8; 4] = b"PGC1";
const TAG_BYTES: usize = 16;
const TIME_BYTES: usize = 8;
const CHECKSUM_BYTES: usize = 8;
const AS_IT_IS: u8 = 0;
const PACKED: u8 = 1;

/// The reason why a datagram is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Another protocol, or another kind of protection.
    Foreign,
    /// Another key, or damaged.
    Unopened,
    /// Its time differs by so many milliseconds.
    Untimely(u64),
    /// It was received before.
    Replayed,
    /// It opens, but its body cannot be decompressed.
    Damaged,
}

/// The message would make a datagram that is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLong;

/// Seals and opens the datagrams of one node.
pub struct Codec {
    protection: Protection,
    packer: Compressor<'static>,
    unpacker: Decompressor<'static>,
}

enum Protection {
    Keyed(Box<Keyed>),
    Trusting,
}

struct Keyed {
    key: LessSafeKey,
    random: SystemRandom,
    nonce_prefix: [u8; 8],
    sent: u32,
    seen: Seen,
}

impl Codec {
    /// For a node with this protection.
    ///
    /// # Errors
    /// Fails if the system has no random bytes or no memory.
    pub fn new(security: &Security) -> io::Result<Codec> {
        let protection = match security {
            Security::Keyed(key) => Protection::Keyed(Box::new(Keyed::new(&key.derive(KEY_LABEL))?)),
            Security::Trusting | Security::Local => Protection::Trusting,
        };
        Ok(Codec { protection, packer: Compressor::new(PACKING_LEVEL)?, unpacker: Decompressor::new()? })
    }

    /// Writes the datagram with this message to `out`.
    ///
    /// # Errors
    /// Fails if it is too long for one. The next message will have other contents.
    pub fn seal(&mut self, message: &[u8], now_ms: u64, out: &mut Vec<u8>) -> Result<(), TooLong> {
        out.clear();
        match &mut self.protection {
            Protection::Keyed(keyed) => {
                let nonce = keyed.next_nonce().map_err(|_| TooLong)?;
                out.extend_from_slice(SEALED);
                out.extend_from_slice(&nonce);
                let start = out.len();
                out.extend_from_slice(&now_ms.to_le_bytes());
                pack(&mut self.packer, message, out);
                let nonce = Nonce::assume_unique_for_key(nonce);
                let tag = keyed.key.seal_in_place_separate_tag(nonce, associated_data(), &mut out[start..]);
                out.extend_from_slice(tag.map_err(|_| TooLong)?.as_ref());
            }
            Protection::Trusting => {
                out.extend_from_slice(CLEAR);
                out.extend_from_slice(&[0; CHECKSUM_BYTES]);
                let start = out.len();
                pack(&mut self.packer, message, out);
                let checksum = checksum(&out[start..]);
                out[start - CHECKSUM_BYTES..start].copy_from_slice(&checksum);
            }
        }
        if out.len() <= DATAGRAM_BYTES_MAX { Ok(()) } else { Err(TooLong) }
    }

    /// The message of this datagram; the datagram is overwritten.
    ///
    /// # Errors
    /// Fails if it is refused.
    pub fn open(&mut self, datagram: &mut [u8], now_ms: u64) -> Result<Vec<u8>, Refusal> {
        let (magic, rest) = datagram.split_first_chunk_mut().ok_or(Refusal::Foreign)?;
        let body = match &mut self.protection {
            Protection::Keyed(keyed) if magic == SEALED => keyed.open(rest, now_ms)?,
            Protection::Trusting if magic == CLEAR => {
                let (sum, body) = rest.split_first_chunk_mut().ok_or(Refusal::Foreign)?;
                if *sum != checksum(body) {
                    return Err(Refusal::Unopened);
                }
                body
            }
            _ => return Err(Refusal::Foreign),
        };
        match body.split_first() {
            Some((&AS_IT_IS, message)) if message.len() <= MESSAGE_BYTES_MAX => Ok(message.to_vec()),
            Some((&PACKED, packed)) => {
                self.unpacker.decompress(packed, MESSAGE_BYTES_MAX).map_err(|_| Refusal::Damaged)
            }
            _ => Err(Refusal::Damaged),
        }
    }
}

impl Keyed {
    fn new(key: &[u8; 32]) -> io::Result<Keyed> {
        let failed = |_| io::Error::other("the system has no random bytes");
        let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).map_err(failed)?);
        let mut keyed =
            Keyed { key, random: SystemRandom::new(), nonce_prefix: [0; 8], sent: 0, seen: Seen::default() };
        keyed.random.fill(&mut keyed.nonce_prefix).map_err(failed)?;
        Ok(keyed)
    }

    fn next_nonce(&mut self) -> Result<[u8; NONCE_LEN], ring::error::Unspecified> {
        if self.sent == u32::MAX {
            self.random.fill(&mut self.nonce_prefix)?;
            self.sent = 0;
        }
        self.sent += 1;
        let mut nonce = [0; NONCE_LEN];
        nonce[..8].copy_from_slice(&self.nonce_prefix);
        nonce[8..].copy_from_slice(&self.sent.to_le_bytes());
        Ok(nonce)
    }

    fn open<'a>(&mut self, rest: &'a mut [u8], now_ms: u64) -> Result<&'a [u8], Refusal> {
        let (nonce, sealed) = rest.split_first_chunk_mut::<NONCE_LEN>().ok_or(Refusal::Foreign)?;
        if sealed.len() < TIME_BYTES + 1 + TAG_BYTES {
            return Err(Refusal::Foreign);
        }
        let opened = self.key.open_in_place(Nonce::assume_unique_for_key(*nonce), associated_data(), sealed);
        let (time, body) = opened.map_err(|_| Refusal::Unopened)?.split_first_chunk().ok_or(Refusal::Damaged)?;
        let off_ms = now_ms.abs_diff(u64::from_le_bytes(*time));
        if off_ms > CLOCK_MS_MAX {
            return Err(Refusal::Untimely(off_ms));
        }
        if self.seen.before(*nonce, now_ms) { Err(Refusal::Replayed) } else { Ok(body) }
    }
}

fn associated_data() -> Aad<[u8; SEALED.len() + CLUSTER.len()]> {
    let mut data = [0; SEALED.len() + CLUSTER.len()];
    data[..SEALED.len()].copy_from_slice(SEALED);
    data[SEALED.len()..].copy_from_slice(CLUSTER.as_bytes());
    Aad::from(data)
}

fn checksum(body: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let mut context = Context::new(&SHA256);
    context.update(CLUSTER.as_bytes());
    context.update(body);
    let mut checksum = [0; CHECKSUM_BYTES];
    checksum.copy_from_slice(&context.finish().as_ref()[..CHECKSUM_BYTES]);
    checksum
}

/// Appends the body.
fn pack(packer: &mut Compressor, message: &[u8], out: &mut Vec<u8>) {
    if message.len() >= PACKED_FROM_BYTES
        && let Ok(packed) = packer.compress(message)
        && packed.len() < message.len()
    {
        out.push(PACKED);
        out.extend_from_slice(&packed);
    } else {
        out.push(AS_IT_IS);
        out.extend_from_slice(message);
    }
}

/// The nonces of received datagrams. A nonce is needed as long as its datagram is timely: two
/// minutes, if the sender's clock is a minute ahead. Hence two generations of at least that long.
#[derive(Default)]
struct Seen {
    young: HashSet<[u8; NONCE_LEN]>,
    old: HashSet<[u8; NONCE_LEN]>,
    young_since_ms: u64,
}

impl Seen {
    /// Returns whether it was received before, and records it.
    fn before(&mut self, nonce: [u8; NONCE_LEN], now_ms: u64) -> bool {
        if now_ms.saturating_sub(self.young_since_ms) > 2 * CLOCK_MS_MAX || self.young.len() >= NONCES_MAX {
            self.old = std::mem::take(&mut self.young);
            self.young_since_ms = now_ms;
        }
        self.old.contains(&nonce) || !self.young.insert(nonce)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::key::PoolKey;

    const NOW_MS: u64 = 1_800_000_000_000;

    fn keyed(byte: u8) -> Codec {
        Codec::new(&Security::Keyed(PoolKey::new([byte; 32]))).unwrap()
    }

    fn trusting() -> Codec {
        Codec::new(&Security::Trusting).unwrap()
    }

    fn sealed(codec: &mut Codec, message: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        codec.seal(message, NOW_MS, &mut out).unwrap();
        out
    }

    #[test]
    fn what_is_sealed_opens() {
        for (mut sender, mut receiver) in [(keyed(1), keyed(1)), (trusting(), trusting())] {
            for message in [&b"short"[..], &[7; MESSAGE_BYTES_MAX], &[]] {
                let mut datagram = sealed(&mut sender, message);
                assert_eq!(receiver.open(&mut datagram, NOW_MS).as_deref(), Ok(message));
            }
        }
    }

    #[test]
    fn unauthenticated_datagrams_are_refused() {
        let mut receiver = keyed(1);
        let mut other = sealed(&mut keyed(2), b"message");
        assert_eq!(receiver.open(&mut other, NOW_MS), Err(Refusal::Unopened));
        let mut clear = sealed(&mut trusting(), b"message");
        assert_eq!(receiver.open(&mut clear.clone(), NOW_MS), Err(Refusal::Foreign));
        clear[15] ^= 1;
        assert_eq!(trusting().open(&mut clear, NOW_MS), Err(Refusal::Unopened));
        let mut ours = sealed(&mut keyed(1), b"message");
        assert_eq!(trusting().open(&mut ours.clone(), NOW_MS), Err(Refusal::Foreign));
        for length in 0..ours.len() {
            assert!(receiver.open(&mut ours.clone()[..length], NOW_MS).is_err());
        }
        assert!(receiver.open(&mut ours, NOW_MS).is_ok());
    }

    #[test]
    fn every_bit_counts() {
        let datagram = sealed(&mut keyed(1), b"message");
        for bit in 0..datagram.len() * 8 {
            let mut changed = datagram.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(keyed(1).open(&mut changed, NOW_MS).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn replays_and_old_datagrams_are_refused() {
        let (mut sender, mut receiver) = (keyed(1), keyed(1));
        let datagram = sealed(&mut sender, b"message");
        assert!(receiver.open(&mut datagram.clone(), NOW_MS + CLOCK_MS_MAX).is_ok());
        assert_eq!(receiver.open(&mut datagram.clone(), NOW_MS), Err(Refusal::Replayed));
        assert_eq!(receiver.open(&mut datagram.clone(), NOW_MS + CLOCK_MS_MAX), Err(Refusal::Replayed));
        let late_ms = CLOCK_MS_MAX + 1;
        assert_eq!(receiver.open(&mut datagram.clone(), NOW_MS + late_ms), Err(Refusal::Untimely(late_ms)));
        assert_eq!(receiver.open(&mut datagram.clone(), NOW_MS - late_ms), Err(Refusal::Untimely(late_ms)));
    }

    #[test]
    fn what_is_remembered_is_bounded_and_lasts_as_long_as_needed() {
        let mut seen = Seen::default();
        let nonce = |count: u64| {
            let mut nonce = [0; NONCE_LEN];
            nonce[..8].copy_from_slice(&count.to_le_bytes());
            nonce
        };
        assert!(!seen.before(nonce(0), NOW_MS));
        for second in 1..=120 {
            assert!(!seen.before(nonce(second), NOW_MS + 1000 * second));
            assert!(seen.before(nonce(0), NOW_MS + 1000 * second));
        }
        for count in 1000..100_000 {
            seen.before(nonce(count), NOW_MS);
        }
        assert!(seen.young.len() + seen.old.len() <= 2 * NONCES_MAX);
    }

    #[test]
    fn what_unpacks_to_too_much_is_refused() {
        let mut sender = trusting();
        let mut datagram = sealed(&mut sender, &vec![0; MESSAGE_BYTES_MAX + 1]);
        assert_eq!(trusting().open(&mut datagram, NOW_MS), Err(Refusal::Damaged));
        let mut out = Vec::new();
        let noise: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(MESSAGE_BYTES_MAX).collect();
        assert_eq!(keyed(1).seal(&noise, NOW_MS, &mut out), Err(TooLong));
    }
}
