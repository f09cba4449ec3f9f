//! The vocabulary of the pool: pages, their names, and the checks of their bytes.
//!
//! No I/O, no clock, no allocation. Every other crate uses these terms.

pub mod seal;

use highway::HighwayHash;

/// Bytes in a page: x86-64's base page, and the unit of lending.
pub const PAGE_SIZE: usize = 4096;

/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// The bytes of one page.
pub type Page = [u8; PAGE_SIZE];

/// A page of zeros.
pub static ZERO_PAGE: Page = [0; PAGE_SIZE];

/// Names a file to the kernel (as its FUSE generation) and to the lender.
///
/// The borrower assigns keys. Within a session no two files have the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey(pub u32);

/// Names a page of one borrower: the file, and the page's index in it (offset / [`PAGE_SIZE`]).
///
/// Pages at index 2³² and above (offsets from 16 TiB) have no name and are never lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId {
    /// The file.
    pub file: FileKey,
    /// The page's index in the file.
    pub index: u32,
}

/// One content of one page. Two different contents never share a version within a borrower's
/// session, so a version names the bytes: [`seal::Sealing::open`] detects any other answer of a
/// lender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version(pub u64);

impl Version {
    /// Bits of a version: as many as a lender's record of a page has room for. They last for a year
    /// of a million puts a second.
    pub const BITS: u32 = 45;
    /// The largest version.
    pub const MAX: Version = Version((1 << Self::BITS) - 1);
}

/// Pages `first..end` of a file, by index. The indexes are wider than in [`PageId`]: a file may be
/// larger than the lendable part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// Index of the first page.
    pub first: u64,
    /// Index behind the last page.
    pub end: u64,
}

impl PageRange {
    /// Every page a file can have.
    pub const ALL: PageRange = PageRange { first: 0, end: u64::MAX };

    /// The pages that contain any byte of `offset..end_offset` (in bytes).
    pub fn touched_by(offset: u64, end_offset: u64) -> PageRange {
        PageRange { first: offset >> PAGE_SHIFT, end: end_offset.div_ceil(PAGE_SIZE as u64) }
    }

    /// The pages that lie wholly in `offset..end_offset` (in bytes).
    pub fn inside(offset: u64, end_offset: u64) -> PageRange {
        let first = offset.div_ceil(PAGE_SIZE as u64);
        PageRange { first, end: (end_offset >> PAGE_SHIFT).max(first) }
    }

    /// Whether it holds no page.
    pub fn is_empty(self) -> bool {
        self.first >= self.end
    }

    /// Whether it holds the page at `index`.
    pub fn contains(self, index: u64) -> bool {
        self.first <= index && index < self.end
    }

    /// Whether the two share a page.
    pub fn overlaps(self, other: PageRange) -> bool {
        self.first < other.end && other.first < self.end
    }

    /// The pages that are in both. Empty if there is none.
    pub fn intersection(self, other: PageRange) -> PageRange {
        PageRange { first: self.first.max(other.first), end: self.end.min(other.end) }
    }

    /// The smallest range that holds both.
    pub fn hull(self, other: PageRange) -> PageRange {
        PageRange { first: self.first.min(other.first), end: self.end.max(other.end) }
    }
}

/// The key of a borrower's checksums. It never leaves the borrower. So a lender can neither make a
/// checksum up nor answer with a page that another borrower, or an earlier one on the same machine,
/// has put under the same name.
#[derive(Clone, Copy)]
pub struct ChecksumKey(highway::Key);

impl ChecksumKey {
    /// A key from random bytes.
    pub fn new(bytes: [u8; 32]) -> ChecksumKey {
        let (words, _) = bytes.as_chunks::<8>();
        ChecksumKey(highway::Key(std::array::from_fn(|at| u64::from_le_bytes(words[at]))))
    }

    /// Keyed checksum (HighwayHash, 64 bits) of a page's bytes together with its name and version.
    ///
    /// The checksum detects bytes that were damaged, made up, mixed up with another page's, of
    /// another version, or taken away by the kernel.
    pub fn checksum(&self, id: PageId, version: Version, page: &Page) -> u64 {
        let mut name = [0u8; 16];
        name[..4].copy_from_slice(&id.file.0.to_le_bytes());
        name[4..8].copy_from_slice(&id.index.to_le_bytes());
        name[8..].copy_from_slice(&version.0.to_le_bytes());
        let mut hasher = highway::HighwayHasher::new(self.0);
        hasher.append(page);
        hasher.append(&name);
        hasher.finalize64()
    }
}

impl std::fmt::Debug for ChecksumKey {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str("ChecksumKey(secret)")
    }
}

/// Whether all bytes are zero.
pub fn is_zero(page: &Page) -> bool {
    // The first words nearly always decide; the rest is a plain comparison the compiler vectorizes.
    page[..16] == [0; 16] && *page == ZERO_PAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_binds_name_version_and_bytes() {
        let id = PageId { file: FileKey(7), index: 9 };
        let page = [0x5a; PAGE_SIZE];
        let key = ChecksumKey::new([1; 32]);
        let checksum = |id, version, page: &Page| key.checksum(id, version, page);
        let sum = checksum(id, Version(1), &page);
        assert_eq!(sum, checksum(id, Version(1), &page));
        assert_ne!(sum, checksum(id, Version(2), &page));
        assert_ne!(sum, checksum(PageId { index: 10, ..id }, Version(1), &page));
        assert_ne!(sum, checksum(PageId { file: FileKey(8), ..id }, Version(1), &page));
        for at in [0, 1, 2048, PAGE_SIZE - 1] {
            let mut other = page;
            other[at] ^= 1;
            assert_ne!(sum, checksum(id, Version(1), &other), "byte {at}");
        }
        assert_ne!(sum, checksum(id, Version(1), &ZERO_PAGE));
        assert_ne!(sum, ChecksumKey::new([2; 32]).checksum(id, Version(1), &page), "another borrower's");
    }

    #[test]
    fn zero_means_every_byte() {
        assert!(is_zero(&ZERO_PAGE));
        for at in [0, 15, 16, PAGE_SIZE - 1] {
            let mut page = ZERO_PAGE;
            page[at] = 1;
            assert!(!is_zero(&page), "byte {at}");
        }
    }

    #[test]
    fn ranges_round_outward_and_inward() {
        assert_eq!(PageRange::touched_by(4095, 4097), PageRange { first: 0, end: 2 });
        assert_eq!(PageRange::inside(4095, 12288), PageRange { first: 1, end: 3 });
        assert!(PageRange::inside(1, 4095).is_empty());
        assert!(PageRange::inside(1, 4097).is_empty());
        assert_eq!(PageRange::touched_by(0, u64::MAX).first, 0);
        assert!(PageRange::touched_by(1 << 62, 1 << 63).contains(1 << 50));
        assert!(PageRange { first: 0, end: 2 }.overlaps(PageRange { first: 1, end: 9 }));
        assert!(!PageRange { first: 0, end: 2 }.overlaps(PageRange { first: 2, end: 9 }));
    }
}
