//! Seals pages before they leave the borrower, and verifies them when they come back.
//!
//! There are two ways. *Sealed*: AES-256-GCM, so that neither a lender nor a listener sees any byte
//! or can make a page up. *Checksums*: the plain bytes, with a keyed checksum, for a trusted
//! network. In both cases the page's name and version are bound to the bytes, and 8 bytes go with
//! the page, which the lender keeps and returns.
//!
//! - The key is random, of one session, and never leaves the borrower (except to the next daemon of
//!   the same mount).
//! - The nonce is the version. No version is used twice in a session ([`crate::Version`]), so no
//!   nonce is used twice under a key.
//! - Of the 16 bytes of GCM's tag, 8 are kept: a page costs 8 bytes less at the lender, which has
//!   millions. A tag of 64 bits is forged with a probability of at most 257 in 2⁶⁴ for each attempt
//!   (257 blocks are hashed), and only a lender can attempt it: every failed attempt is counted
//!   (`bad_pages`), and a miss. Each attempt takes a READ that the lender cannot cause. A million
//!   attempts succeed once in 2³⁵ times.
//! - A session that has lent 2⁴⁰ pages (4 PiB) is still far below the number of blocks under one
//!   key from which an attacker begins to learn anything.
//!
//! Must never happen here: one version is sealed twice with different bytes; bytes that did
//! not verify are used as the page's.

use crate::{ChecksumKey, PAGE_SIZE, Page, PageId, Version};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hmac;

/// Seals and opens the pages of a session.
pub enum Sealing {
    /// Plain bytes, with a keyed checksum.
    Checksum(ChecksumKey),
    /// AES-256-GCM.
    Aead(Box<LessSafeKey>),
}

impl From<ChecksumKey> for Sealing {
    fn from(key: ChecksumKey) -> Sealing {
        Sealing::Checksum(key)
    }
}

impl std::fmt::Debug for Sealing {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(if matches!(self, Sealing::Aead(_)) { "Sealing(sealed)" } else { "Sealing(checksums)" })
    }
}

impl Sealing {
    /// Seals under a key that is made of the session's random bytes. `None`: the library refuses
    /// the key, which never happens with this length.
    pub fn aead(secret: &[u8; 32]) -> Option<Sealing> {
        let derived = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), b"pages");
        let key = UnboundKey::new(&AES_256_GCM, derived.as_ref()).ok()?;
        Some(Sealing::Aead(Box::new(LessSafeKey::new(key))))
    }

    /// Writes the bytes for the lender to `sealed`, and returns the 8 bytes that go with them. Call
    /// it once for each version.
    pub fn seal(&self, id: PageId, version: Version, page: &Page, sealed: &mut Page) -> u64 {
        *sealed = *page;
        match self {
            Sealing::Checksum(key) => key.checksum(id, version, page),
            Sealing::Aead(key) => crypt(key, id, version, sealed),
        }
    }

    /// Turns the lender's bytes into the page again, in place. Returns false if these are not the
    /// bytes that were sealed under this name and version; then the content of `page` is undefined.
    #[must_use]
    pub fn open(&self, id: PageId, version: Version, tag: u64, page: &mut Page) -> bool {
        match self {
            Sealing::Checksum(key) => key.checksum(id, version, page) == tag,
            Sealing::Aead(key) => {
                // GCM encrypts by adding a key stream, so encrypting again decrypts. The tag is
                // over the encrypted bytes. The library verifies whole tags only, so the tag is
                // computed by sealing the plain bytes again. A comparison of two words takes the
                // same time for all values.
                crypt(key, id, version, page);
                let mut again = *page;
                crypt(key, id, version, &mut again) ^ tag == 0
            }
        }
    }

    /// Turns the result of [`Sealing::seal`], which has not left this process since, into the page
    /// again.
    pub fn open_own(&self, id: PageId, version: Version, sealed: &Page, page: &mut Page) {
        *page = *sealed;
        if let Sealing::Aead(key) = self {
            crypt(key, id, version, page);
        }
    }
}

/// Encrypts, or decrypts. Returns the first half of the tag over the result.
fn crypt(key: &LessSafeKey, id: PageId, version: Version, page: &mut Page) -> u64 {
    let mut nonce = [0; NONCE_LEN];
    nonce[..8].copy_from_slice(&version.0.to_le_bytes());
    let mut name = [0; 16];
    name[..4].copy_from_slice(&id.file.0.to_le_bytes());
    name[4..8].copy_from_slice(&id.index.to_le_bytes());
    name[8..].copy_from_slice(&version.0.to_le_bytes());
    const { assert!(PAGE_SIZE < 1 << 36) }; // the maximum for one nonce
    let nonce = Nonce::assume_unique_for_key(nonce);
    match key.seal_in_place_separate_tag(nonce, Aad::from(name), page) {
        Ok(tag) => tag.as_ref().first_chunk().map_or(0, |half| u64::from_le_bytes(*half)),
        // Only for more bytes than one nonce permits.
        Err(_) => unreachable!("a page is not too long to be sealed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FileKey;

    const ID: PageId = PageId { file: FileKey(7), index: 9 };

    fn both() -> [Sealing; 2] {
        [Sealing::Checksum(ChecksumKey::new([1; 32])), Sealing::aead(&[1; 32]).unwrap()]
    }

    fn page(fill: u8) -> Page {
        std::array::from_fn(|at| fill ^ (at as u8).rotate_left(3) ^ (at >> 8) as u8)
    }

    #[test]
    fn what_was_sealed_opens() {
        for sealing in both() {
            for version in [Version(1), Version(2), Version::MAX] {
                let mut sealed = [0; PAGE_SIZE];
                let tag = sealing.seal(ID, version, &page(3), &mut sealed);
                let mut own = [0; PAGE_SIZE];
                sealing.open_own(ID, version, &sealed, &mut own);
                assert!(own == page(3));
                assert!(sealing.open(ID, version, tag, &mut sealed) && sealed == page(3));
            }
        }
    }

    #[test]
    fn sealed_bytes_are_those_of_the_standard() {
        // Any other implementation of AES-256-GCM must agree: this page, sealed and opened by the
        // library's own whole tag.
        let derived = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &[1; 32]), b"pages");
        let plain_key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, derived.as_ref()).unwrap());
        let mut sealed = [0; PAGE_SIZE];
        let tag = Sealing::aead(&[1; 32]).unwrap().seal(ID, Version(5), &page(1), &mut sealed);
        let mut nonce = [0; 12];
        nonce[0] = 5;
        let name: Vec<u8> = [&7u32.to_le_bytes()[..], &9u32.to_le_bytes(), &5u64.to_le_bytes()].concat();
        let mut bytes = page(1).to_vec();
        let nonce = || Nonce::assume_unique_for_key(nonce);
        plain_key.seal_in_place_append_tag(nonce(), Aad::from(&name), &mut bytes).unwrap();
        assert!(bytes[..PAGE_SIZE] == sealed && bytes[PAGE_SIZE..][..8] == tag.to_le_bytes());
        assert!(plain_key.open_in_place(nonce(), Aad::from(&name), &mut bytes).unwrap() == page(1));
    }

    #[test]
    fn swapped_older_changed_and_foreign_pages_do_not_open() {
        for sealing in both() {
            let seal = |id, version, fill| {
                let mut sealed = [0; PAGE_SIZE];
                let tag = sealing.seal(id, version, &page(fill), &mut sealed);
                (sealed, tag)
            };
            let other = PageId { index: 10, ..ID };
            let (right, tag) = seal(ID, Version(5), 1);
            let opens = |id, version, (mut sealed, tag): (Page, u64)| sealing.open(id, version, tag, &mut sealed);
            assert!(opens(ID, Version(5), (right, tag)));
            // Another page's bytes, with their own tag or the right one; the same content under
            // another name.
            assert!(!opens(ID, Version(5), seal(other, Version(6), 1)));
            let swapped = seal(other, Version(7), 3);
            assert!(!opens(ID, Version(5), swapped) && !opens(ID, Version(5), (swapped.0, tag)));
            assert!(!opens(other, Version(5), (right, tag)));
            assert!(!opens(PageId { file: FileKey(8), ..ID }, Version(5), (right, tag)));
            // The bytes of an older version.
            let old = seal(ID, Version(4), 2);
            assert!(!opens(ID, Version(5), old) && !opens(ID, Version(5), (old.0, tag)));
            assert!(!opens(ID, Version(5), (right, old.1)));
            // Changed bytes, cleared bytes, and another borrower's.
            for at in [0, 1, 2048, PAGE_SIZE - 1] {
                let mut changed = right;
                changed[at] ^= 1;
                assert!(!opens(ID, Version(5), (changed, tag)), "byte {at}");
            }
            assert!((0..64).all(|bit| !opens(ID, Version(5), (right, tag ^ 1 << bit))));
            assert!(!opens(ID, Version(5), ([0; PAGE_SIZE], tag)));
            for stranger in [Sealing::Checksum(ChecksumKey::new([2; 32])), Sealing::aead(&[2; 32]).unwrap()] {
                assert!(!stranger.open(ID, Version(5), tag, &mut right.clone()));
            }
        }
    }

    #[test]
    fn a_sealed_page_shows_nothing() {
        let sealing = Sealing::aead(&[1; 32]).unwrap();
        let (mut one, mut two) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        sealing.seal(ID, Version(1), &[0x41; PAGE_SIZE], &mut one);
        sealing.seal(ID, Version(2), &[0x41; PAGE_SIZE], &mut two);
        assert!(!one.windows(4).any(|window| window == [0x41; 4]));
        assert!(one.chunks(16).zip(two.chunks(16)).all(|(one, two)| one != two), "the same bytes look alike");
        assert_eq!(format!("{sealing:?}"), "Sealing(sealed)");
    }
}
