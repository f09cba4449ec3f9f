//! Authentication and encryption of connections: a Noise channel under the pool's key.
//!
//! `Noise_NNpsk0_25519_AESGCM_SHA256`: both sides have the key and know nothing else of each other.
//! Each connection has keys of its own, made of fresh random numbers of both sides. An attacker who
//! records a connection and gets the pool's key later cannot read it.
//!
//! ```text
//! borrower                                       lender
//!    │ Handshake1 (e, proof of the key) ────────────▶│  a replayed one passes, and gets no further than the answer
//!    │◀──────────── Handshake2 (e, proof of the key) │  or Refused, in clear
//!    │ sealed Hello ────────────────────────────────▶│  only now is anything of a session touched
//!    │◀────────────────────────────── sealed Welcome │
//! ```
//!
//! A sealed frame is its header in clear (which contains the length), then header and items once
//! more, sealed, then the pages unchanged: the borrower has sealed them already ([`page::seal`]),
//! under a key that no lender has.
//!
//! ```text
//! Header │ sealed: Header, items │ tag │ pages
//!   16   │   16   + items bytes  │ 16  │
//! ```
//!
//! `body_bytes` counts items and pages only. Frames are numbered in each direction, and the number
//! is part of the seal. So a frame that was changed, repeated, left out or moved does not open.
//!
//! Must never happen here: a number is used twice in one direction; an item is used before its
//! frame's seal was verified.

use crate::address::{Address, Stream};
use crate::key::PoolKey;
use crate::{Header, Malformed, PROTOCOL};
use snow::params::NoiseParams;
use snow::{HandshakeState, StatelessTransportState};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// Pattern, curve, cipher and hash.
const NOISE: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// The label for [`PoolKey::derive`] for connections.
const LABEL: &str = "noise";

/// Bytes of either message of the handshake: a point of the curve, and a tag.
pub const HANDSHAKE_BYTES: usize = 48;

/// Bytes of a tag.
const TAG_BYTES: usize = 16;

/// Additional bytes of a sealed frame: its header once more, and the tag.
pub const SEAL_BYTES: usize = size_of::<Header>() + TAG_BYTES;

/// Which peers are trusted.
#[derive(Clone, Debug)]
pub enum Security {
    /// Peers that have this key. Frames and pages are sealed.
    Keyed(PoolKey),
    /// Any peer that can connect. Pages carry checksums, nothing is sealed.
    Trusting,
    /// Peers that the kernel reports as root or this process's own user, over a Unix socket.
    /// Nothing is sealed.
    Local,
}

impl Security {
    /// Connects to a trusted peer.
    ///
    /// # Errors
    /// Fails as [`Address::connect`] does. It also fails if another user listens at a Unix socket,
    /// because only a key could distinguish such a process from a lender.
    pub fn connect(&self, address: &Address, timeout: Duration) -> io::Result<Stream> {
        let stream = address.connect(timeout)?;
        if let Security::Local = self {
            let listener = match &stream {
                Stream::Unix(socket) => Some(rustix::net::sockopt::socket_peercred(socket)?.uid),
                _ => None,
            };
            let ours = [rustix::process::Uid::ROOT, rustix::process::geteuid()];
            if !listener.is_some_and(|listener| ours.contains(&listener)) {
                let who = listener.map_or("somebody".to_owned(), |uid| format!("user {}", uid.as_raw()));
                let text = format!(
                    "{who} listens at {address}, and pages would be sent there in clear: give both sides the pool's \
                     key (--key FILE)"
                );
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
            }
        }
        Ok(stream)
    }
}

/// The other side has another key, or another protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the pool key is another one there")]
pub struct OtherKey;

/// A borrower's handshake that waits for the lender's answer.
pub struct Handshake(HandshakeState);

impl Handshake {
    /// Begins a handshake. Returns the body of a Handshake1.
    ///
    /// # Errors
    /// Fails if the system has no random bytes.
    pub fn begin(key: &PoolKey) -> Result<(Handshake, [u8; HANDSHAKE_BYTES]), OtherKey> {
        let mut state = state(key, true)?;
        let mut message = [0; HANDSHAKE_BYTES];
        write(&mut state, &mut message)?;
        Ok((Handshake(state), message))
    }

    /// Ends the handshake, with the body of the Handshake2.
    ///
    /// # Errors
    /// Fails if the peer does not have the key.
    pub fn finish(mut self, answer: &[u8]) -> Result<Channel, OtherKey> {
        self.0.read_message(answer, &mut [0; HANDSHAKE_BYTES]).map_err(|_| OtherKey)?;
        Channel::sealed(self.0)
    }
}

/// A lender's answer to the body of a Handshake1: the body of the Handshake2, and the channel. The
/// first frame that opens on the channel proves that the borrower has the key *now*, and does not
/// only repeat a recorded message.
///
/// # Errors
/// Fails if the peer does not have the key. This is detected before any of the costly arithmetic.
pub fn answer(key: &PoolKey, first: &[u8]) -> Result<([u8; HANDSHAKE_BYTES], Channel), OtherKey> {
    let mut state = state(key, false)?;
    state.read_message(first, &mut [0; HANDSHAKE_BYTES]).map_err(|_| OtherKey)?;
    let mut message = [0; HANDSHAKE_BYTES];
    write(&mut state, &mut message)?;
    Ok((message, Channel::sealed(state)?))
}

fn state(key: &PoolKey, is_borrower: bool) -> Result<HandshakeState, OtherKey> {
    let parameters: NoiseParams = NOISE.parse().map_err(|_| OtherKey)?;
    let secret = zeroize::Zeroizing::new(key.derive(LABEL));
    // Both sides must use the same protocol.
    let prologue = format!("pumapool {PROTOCOL}");
    let builder = snow::Builder::new(parameters)
        .prologue(prologue.as_bytes())
        .and_then(|builder| builder.psk(0, &secret))
        .map_err(|_| OtherKey)?;
    if is_borrower { builder.build_initiator() } else { builder.build_responder() }.map_err(|_| OtherKey)
}

fn write(state: &mut HandshakeState, message: &mut [u8; HANDSHAKE_BYTES]) -> Result<(), OtherKey> {
    match state.write_message(&[], message) {
        Ok(HANDSHAKE_BYTES) => Ok(()),
        _ => Err(OtherKey),
    }
}

/// One connection's frames, sealed or plain. Copies are of the same connection, and count its
/// frames together; the sender keeps the order in which frames were sealed.
#[derive(Clone, Default)]
pub struct Channel(Option<Arc<Sealed>>);

struct Sealed {
    keys: StatelessTransportState,
    /// Sealed frames so far, and opened ones.
    sent: AtomicU64,
    received: AtomicU64,
}

impl Channel {
    /// A channel without seals.
    pub fn plain() -> Channel {
        Channel(None)
    }

    fn sealed(state: HandshakeState) -> Result<Channel, OtherKey> {
        let keys = state.into_stateless_transport_mode().map_err(|_| OtherKey)?;
        Ok(Channel(Some(Arc::new(Sealed { keys, sent: AtomicU64::new(0), received: AtomicU64::new(0) }))))
    }

    /// Whether frames are sealed.
    pub fn is_sealed(&self) -> bool {
        self.0.is_some()
    }

    /// Additional bytes of a frame, beyond its header and body.
    pub fn extra_bytes(&self) -> usize {
        if self.is_sealed() { SEAL_BYTES } else { 0 }
    }

    /// Appends the bytes in front of a frame's pages. Frames must be sent in the order of these
    /// calls.
    ///
    /// # Errors
    /// Fails if the connection has sealed the maximum number of frames: 2⁶⁴.
    pub fn push_head(&self, header: &Header, items: &[u8], out: &mut Vec<u8>) -> Result<(), Malformed> {
        out.extend_from_slice(header.as_bytes());
        let Some(sealed) = &self.0 else {
            out.extend_from_slice(items);
            return Ok(());
        };
        let number = sealed.sent.fetch_add(1, Ordering::Relaxed);
        // For the moment the plain bytes are behind the place of the sealed ones, so that nothing
        // is allocated.
        let sealed_at = out.len();
        let plain_at = sealed_at + SEAL_BYTES + items.len();
        out.resize(plain_at, 0);
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(items);
        let (front, plain) = out.split_at_mut(plain_at);
        let done = sealed.keys.write_message(number, plain, &mut front[sealed_at..]);
        out.truncate(plain_at);
        done.map(drop).map_err(|_| Malformed::Seal)
    }

    /// Opens the bytes after a frame's header, up to its pages. Returns the items. For a sealed
    /// channel only.
    ///
    /// # Errors
    /// Fails if it is not the next frame that the other side sealed, or has another header. The
    /// connection is useless then.
    pub fn open_head<'a>(&self, header: &Header, body: &[u8], opened: &'a mut Vec<u8>) -> Result<&'a [u8], Malformed> {
        let sealed = self.0.as_ref().ok_or(Malformed::Seal)?;
        let number = sealed.received.fetch_add(1, Ordering::Relaxed);
        opened.clear();
        opened.resize(body.len(), 0);
        let bytes = sealed.keys.read_message(number, body, opened).map_err(|_| Malformed::Seal)?;
        let (copy, items) = Header::ref_from_prefix(&opened[..bytes]).map_err(|_| Malformed::Seal)?;
        if copy.as_bytes() != header.as_bytes() {
            return Err(Malformed::Seal);
        }
        Ok(items)
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_sealed() { "Channel(sealed)" } else { "Channel(plain)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;

    fn pair() -> (Channel, Channel) {
        let key = PoolKey::new([1; 32]);
        let (handshake, first) = Handshake::begin(&key).unwrap();
        let (second, lender) = answer(&key, &first).unwrap();
        (handshake.finish(&second).unwrap(), lender)
    }

    fn frame(from: &Channel, header: &Header, items: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        from.push_head(header, items, &mut frame).unwrap();
        frame
    }

    fn open(to: &Channel, frame: &[u8]) -> Result<Vec<u8>, Malformed> {
        let (header, sealed) = Header::read_from_prefix(frame).unwrap();
        to.open_head(&header, sealed, &mut Vec::new()).map(<[u8]>::to_vec)
    }

    fn drop_frame(items: usize) -> Header {
        Header::new(Kind::Drop, items, items * 16, 7)
    }

    #[test]
    fn frames_open_in_both_directions_and_show_nothing() {
        let (borrower, lender) = pair();
        for items in [1, 3, 256] {
            let secret = vec![0x5a; items * 16];
            for (from, to) in [(&borrower, &lender), (&lender, &borrower)] {
                let bytes = frame(from, &drop_frame(items), &secret);
                assert_eq!(bytes.len(), size_of::<Header>() + secret.len() + from.extra_bytes());
                assert!(!bytes.windows(4).any(|window| window == [0x5a; 4]));
                assert_eq!(open(to, &bytes).unwrap(), secret);
            }
        }
    }

    #[test]
    fn what_was_changed_repeated_left_out_or_sent_back_does_not_open() {
        let first = drop_frame(2);
        for at in 0..16 + SEAL_BYTES + 32 {
            let (borrower, lender) = pair();
            let mut bytes = frame(&borrower, &first, &[9; 32]);
            bytes[at] ^= 1;
            assert_eq!(open(&lender, &bytes), Err(Malformed::Seal), "byte {at}");
        }
        let (borrower, lender) = pair();
        let [one, two, three] = [1, 2, 3].map(|byte| frame(&borrower, &first, &[byte; 32]));
        assert!(open(&lender, &one).is_ok());
        assert_eq!(open(&lender, &one), Err(Malformed::Seal), "repeated");
        assert_eq!(open(&pair().1, &two), Err(Malformed::Seal), "another connection's");
        assert_eq!(open(&borrower, &three), Err(Malformed::Seal), "its own");
        let (borrower, lender) = pair();
        let [_, second] = [1, 2].map(|byte| frame(&borrower, &first, &[byte; 32]));
        assert_eq!(open(&lender, &second), Err(Malformed::Seal), "the first was left out");
        assert_eq!(open(&lender, &second[..20]), Err(Malformed::Seal), "cut");
    }

    #[test]
    fn another_key_gets_nowhere() {
        let (key, other) = (PoolKey::new([1; 32]), PoolKey::new([2; 32]));
        let (_, first) = Handshake::begin(&other).unwrap();
        assert!(answer(&key, &first).is_err());
        let (handshake, first) = Handshake::begin(&key).unwrap();
        let (second, _) = answer(&key, &first).unwrap();
        // A lender without the key can at best repeat messages that a lender with the key has sent
        // to another borrower.
        let (again, _) = Handshake::begin(&key).unwrap();
        assert!(again.finish(&second).is_err());
        assert!(handshake.finish(&[0; HANDSHAKE_BYTES]).is_err());
        for length in [0, 1, 47, 49, 96] {
            assert!(answer(&key, &vec![7; length]).is_err());
        }
    }

    #[test]
    fn a_repeated_handshake_opens_no_channel() {
        let key = PoolKey::new([1; 32]);
        let (handshake, first) = Handshake::begin(&key).unwrap();
        let (second, _) = answer(&key, &first).unwrap();
        let borrower = handshake.finish(&second).unwrap();
        let hello = frame(&borrower, &drop_frame(1), &[1; 16]);
        // All recorded bytes, sent once more.
        let (_, lender) = answer(&key, &first).unwrap();
        assert_eq!(open(&lender, &hello), Err(Malformed::Seal));
    }
}
