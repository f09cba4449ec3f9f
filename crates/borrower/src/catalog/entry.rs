//! The catalog's 8-byte entry: the whole record of one page.
//!
//! ```text
//! bit 63..62  state: 0 absent, 1 busy, 2 present, 3 zero or hashed
//! absent      61      read from the backing file in a sequential stream: not lent when evicted
//!             60..0   the file's quarantine number that a READ of the page has cleared (0: none)
//! hashed      61      1 (zero: 0)
//!             60      placed
//!             59..0   hash
//! others      61..56  lender
//!             55..50  that lender's epoch
//!             49..44  the control group that it was evicted in the name of (0: none)
//!             43..0   version
//! ```
//!
//! An all-zero word means "absent, nothing known", so a fresh table needs no initialization.

use crate::put::groups::NUMBERS;
use page::Version;

/// The lender that has a page, and that lender's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The lender's number.
    pub lender: u8,
    /// The lender's epoch when the page was sent. When a lender is lost for good its epoch is
    /// incremented, which invalidates all its entries at once. The epoch wraps after
    /// [`Place::EPOCHS`] losses. An entry that seems valid again then costs one miss, because no
    /// lender has its version any more.
    pub epoch: u8,
}

impl Place {
    /// The number of lenders that a borrower can have.
    pub const LENDERS: u8 = 1 << 6;
    /// The number of epochs before they repeat.
    pub const EPOCHS: u8 = 1 << 6;
}

/// Whether a page that was sent to a [`Place`] can be requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The page can be requested.
    Valid,
    /// The page cannot be requested now. The lender is suspended, and may still have the page when
    /// it is back; or the lender is bypassed. Until then the entry stays without use, and changes
    /// invalidate it as any other entry.
    Unavailable,
    /// The page can never be requested again.
    Lost,
}

/// The decoded form of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// No lender has the page. A READ of it arrived when the file's newest quarantine was
    /// `cleared`.
    Absent {
        /// Quarantines up to this number no longer hold for the page.
        cleared: u64,
        /// The page was read from the backing file in a sequential stream.
        sequential: bool,
    },
    /// The page's bytes are on their way to a lender, and still in a put buffer of the borrower.
    Busy {
        /// The destination.
        place: Place,
        /// The page's version there.
        version: Version,
        /// The number of its control group ([`crate::put::groups`]).
        group: u8,
    },
    /// A lender has the page.
    Present {
        /// The lender.
        place: Place,
        /// The page's version there.
        version: Version,
        /// The number of its control group.
        group: u8,
    },
    /// All bytes of the page are zero: no lender is needed.
    Zero,
    /// No lender has the page; but the page of the backing file has this hash.
    Hashed {
        /// The hash that `put::demoted::Demoted::hash` makes.
        hash: u64,
        /// The kernel cached it last because a guest had evicted it.
        placed: bool,
    },
}

/// Nothing is known of the page.
pub const UNKNOWN: Entry = absent(0);

/// No lender has the page; it was last read at random, or not at all.
pub const fn absent(cleared: u64) -> Entry {
    Entry::Absent { cleared, sequential: false }
}

const STATE_SHIFT: u32 = 62;
const LENDER_SHIFT: u32 = 56;
const EPOCH_SHIFT: u32 = 50;
const GROUP_SHIFT: u32 = VERSION_BITS;
const VERSION_BITS: u32 = 44;
/// The largest version that an entry can hold. It is reached after 64 PiB of puts: two years of a
/// gigabyte a second. From then on nothing is put, which is counted and logged.
pub const VERSION_MAX: Version = Version((1 << VERSION_BITS) - 1);
const _: () = assert!(VERSION_MAX.0 <= Version::MAX.0);
const SEQUENTIAL: u64 = 1 << 61;
const CLEARED_MAX: u64 = SEQUENTIAL - 1;
const HASHED: u64 = 3 << STATE_SHIFT | 1 << 61;
const PLACED: u64 = 1 << 60;
/// The largest hash: all bits of a hash set.
pub const HASH_MAX: u64 = PLACED - 1;

impl Entry {
    /// Encodes the entry as a word.
    pub fn pack(self) -> u64 {
        let named = |state: u64, place: Place, version: Version, group: u8| {
            debug_assert!(version <= VERSION_MAX && place.lender < Place::LENDERS && place.epoch < Place::EPOCHS);
            debug_assert!(group < NUMBERS);
            state << STATE_SHIFT
                | u64::from(place.lender) << LENDER_SHIFT
                | u64::from(place.epoch) << EPOCH_SHIFT
                | u64::from(group) << GROUP_SHIFT
                | version.0
        };
        match self {
            Entry::Absent { cleared, sequential } => cleared.min(CLEARED_MAX) | if sequential { SEQUENTIAL } else { 0 },
            Entry::Busy { place, version, group } => named(1, place, version, group),
            Entry::Present { place, version, group } => named(2, place, version, group),
            Entry::Zero => 3 << STATE_SHIFT,
            Entry::Hashed { hash, placed } => HASHED | if placed { PLACED } else { 0 } | hash & HASH_MAX,
        }
    }

    /// Decodes a word. Every word is a valid entry.
    pub fn unpack(word: u64) -> Entry {
        let place = Place {
            lender: (word >> LENDER_SHIFT) as u8 & (Place::LENDERS - 1),
            epoch: (word >> EPOCH_SHIFT) as u8 & (Place::EPOCHS - 1),
        };
        let version = Version(word & VERSION_MAX.0);
        let group = (word >> GROUP_SHIFT) as u8 & (NUMBERS - 1);
        match word >> STATE_SHIFT {
            0 => Entry::Absent { cleared: word & CLEARED_MAX, sequential: word & SEQUENTIAL != 0 },
            1 => Entry::Busy { place, version, group },
            2 => Entry::Present { place, version, group },
            _ if word & HASHED == HASHED => Entry::Hashed { hash: word & HASH_MAX, placed: word & PLACED != 0 },
            _ => Entry::Zero,
        }
    }

    /// Returns the control group of a page that a lender has, or that is on its way to one.
    pub fn group(self) -> Option<u8> {
        match self {
            Entry::Busy { group, .. } | Entry::Present { group, .. } => Some(group),
            _ => None,
        }
    }

    /// Returns whether the kernel last cached the page because a guest had evicted it.
    pub(crate) fn is_placed(self) -> bool {
        matches!(self, Entry::Hashed { placed: true, .. })
    }

    /// Returns whether the page's bytes are available without the disk.
    pub(crate) fn is_live(self) -> bool {
        !matches!(self, Entry::Absent { .. } | Entry::Hashed { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_meanings_agree() {
        let place = Place { lender: 63, epoch: 21 };
        let all = [
            UNKNOWN,
            absent(CLEARED_MAX),
            Entry::Absent { cleared: 0, sequential: true },
            Entry::Absent { cleared: CLEARED_MAX, sequential: true },
            Entry::Busy { place, version: Version(1), group: 0 },
            Entry::Present { place, version: VERSION_MAX, group: 63 },
            Entry::Present { place: Place { lender: 0, epoch: 63 }, version: Version(77), group: 5 },
            Entry::Zero,
            Entry::Hashed { hash: 0, placed: false },
            Entry::Hashed { hash: HASH_MAX, placed: true },
        ];
        for entry in all {
            assert_eq!(Entry::unpack(entry.pack()), entry);
        }
        assert_eq!(UNKNOWN.pack(), 0);
    }
}
