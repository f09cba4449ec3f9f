//! What is kept of a slot: 31 bytes, beside the 5 of its place in the index. One per cent of what
//! is lent.
//!
//! A record of zero bytes is a slot that was never used, so that the table of records is memory the
//! kernel has not even given yet.

use page::{FileKey, PageId, Version};
use zerocopy::FromZeros;

/// No slot: end of a list.
pub const NONE: u32 = u32::MAX;

/// Owners there can be at once: what the tag has bits for.
pub const OWNERS_MAX: usize = 1 << OWNER_BITS;

const OWNER_BITS: u32 = 8;
const OWNER_SHIFT: u32 = Version::BITS;
const STATE_SHIFT: u32 = OWNER_SHIFT + OWNER_BITS;
const STATE_BITS: u32 = 3;
const TAG_BYTES: usize = 7;

/// What a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// For nothing, and it has no memory.
    Cold,
    /// For nothing, but it likely still has the memory of its last page.
    Warm,
    /// It holds a page.
    Page,
    /// It stands for a page of zeros; its memory, if any, means nothing.
    Zero,
    /// A page is being received into it. It is in no list.
    Reserved,
}

/// A slot's record. Without gaps: there are millions of them.
#[derive(Clone, Copy, FromZeros)]
#[repr(C, packed)]
pub struct Record {
    /// The borrower's checksum of the page.
    pub checksum: u64,
    /// From the low end: version, owner, state.
    tag: [u8; TAG_BYTES],
    file: u32,
    index: u32,
    /// The next older slot of the list that this one is in.
    pub older: u32,
    /// The next newer one.
    pub newer: u32,
}

const _: () = assert!(size_of::<Record>() == 31 && STATE_SHIFT + STATE_BITS <= 8 * TAG_BYTES as u32);

impl Record {
    fn tag(&self) -> u64 {
        let mut bytes = [0; size_of::<u64>()];
        bytes[..TAG_BYTES].copy_from_slice(&self.tag);
        u64::from_le_bytes(bytes)
    }

    fn set_tag(&mut self, tag: u64) {
        self.tag.copy_from_slice(&tag.to_le_bytes()[..TAG_BYTES]);
    }

    /// What the slot is used for.
    pub fn state(&self) -> State {
        match (self.tag() >> STATE_SHIFT) & ((1 << STATE_BITS) - 1) {
            0 => State::Cold,
            1 => State::Warm,
            2 => State::Page,
            3 => State::Zero,
            _ => State::Reserved,
        }
    }

    /// Frees it, as `Warm` or `Cold`.
    pub fn set_free(&mut self, state: State) {
        debug_assert!(matches!(state, State::Warm | State::Cold));
        self.set_tag((state as u64) << STATE_SHIFT);
    }

    /// Keeps it for a page that is to come. It was free.
    pub fn set_reserved(&mut self) {
        self.set_tag((State::Reserved as u64) << STATE_SHIFT);
    }

    /// Uses it, as `Page` or `Zero`. The version must not exceed [`Version::MAX`].
    pub fn set_used(&mut self, state: State, owner: u8, id: PageId, version: Version, checksum: u64) {
        debug_assert!(matches!(state, State::Page | State::Zero) && version <= Version::MAX);
        self.set_tag((state as u64) << STATE_SHIFT | u64::from(owner) << OWNER_SHIFT | version.0);
        (self.file, self.index, self.checksum) = (id.file.0, id.index, checksum);
    }

    /// The owner of a used slot.
    pub fn owner(&self) -> u8 {
        (self.tag() >> OWNER_SHIFT) as u8
    }

    /// The page that a used slot holds.
    pub fn id(&self) -> PageId {
        PageId { file: FileKey(self.file), index: self.index }
    }

    /// Its version.
    pub fn version(&self) -> Version {
        Version(self.tag() & Version::MAX.0)
    }
}
