//! The record of a slot: 31 bytes, in addition to the 5 of its place in the index. One per cent of
//! the lent memory.
//!
//! A record of zero bytes is a slot that was never used. So an unused part of the table of records
//! needs no memory.

use page::{FileKey, PageId, Version};
use zerocopy::FromZeros;

/// No slot: end of a list.
pub const NONE: u32 = u32::MAX;

/// The maximum number of tenants: the tag has bits for these.
pub const TENANTS_MAX: usize = 1 << TENANT_BITS;

const TENANT_BITS: u32 = 8;
const TENANT_SHIFT: u32 = Version::BITS;
const STATE_SHIFT: u32 = TENANT_SHIFT + TENANT_BITS;
const STATE_BITS: u32 = 3;
const TAG_BYTES: usize = 7;

/// The use of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Unused, and without memory.
    FreeNonresident,
    /// Unused, but it likely still has the memory of its last page.
    FreeResident,
    /// It holds a page.
    Page,
    /// It represents a page of zeros; the content of its memory, if any, has no meaning.
    Zero,
    /// A page is being received into it. It is in no list.
    Reserved,
}

/// A slot's record. It has no padding: there are millions of them.
#[derive(Clone, Copy, FromZeros)]
#[repr(C, packed)]
pub struct Record {
    /// The borrower's checksum of the page.
    pub checksum: u64,
    /// From the low end: version, tenant, state.
    tag: [u8; TAG_BYTES],
    file: u32,
    index: u32,
    /// The next older slot in its list.
    pub older: u32,
    /// The next newer slot in its list.
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

    /// The use of the slot.
    pub fn state(&self) -> State {
        match (self.tag() >> STATE_SHIFT) & ((1 << STATE_BITS) - 1) {
            0 => State::FreeNonresident,
            1 => State::FreeResident,
            2 => State::Page,
            3 => State::Zero,
            _ => State::Reserved,
        }
    }

    /// Frees it, as `FreeResident` or `FreeNonresident`.
    pub fn set_free(&mut self, state: State) {
        debug_assert!(matches!(state, State::FreeResident | State::FreeNonresident));
        self.set_tag((state as u64) << STATE_SHIFT);
    }

    /// Reserves it for a page that will arrive. It was free.
    pub fn set_reserved(&mut self) {
        self.set_tag((State::Reserved as u64) << STATE_SHIFT);
    }

    /// Assigns it to a page, as `Page` or `Zero`. The version must not exceed [`Version::MAX`].
    pub fn set_used(&mut self, state: State, tenant: u8, id: PageId, version: Version, checksum: u64) {
        debug_assert!(matches!(state, State::Page | State::Zero) && version <= Version::MAX);
        self.set_tag((state as u64) << STATE_SHIFT | u64::from(tenant) << TENANT_SHIFT | version.0);
        (self.file, self.index, self.checksum) = (id.file.0, id.index, checksum);
    }

    /// The tenant of a used slot.
    pub fn tenant(&self) -> u8 {
        (self.tag() >> TENANT_SHIFT) as u8
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
