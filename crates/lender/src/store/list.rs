//! Lists of slots, from oldest to newest, linked through their records: no allocation, everything
//! in constant time.
//!
//! A slot is in exactly one list, or it was never used.

use super::record::{NONE, Record};

/// A list. Its slots are in the records that each call passes, which must always be the same ones.
#[derive(Clone, Debug)]
pub struct List {
    oldest: u32,
    newest: u32,
    count: u32,
}

impl List {
    /// A list without slots.
    pub const EMPTY: List = List { oldest: NONE, newest: NONE, count: 0 };

    /// Number of slots in it.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The slot that was added first.
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// The slot that was added last.
    pub fn newest(&self) -> Option<u32> {
        (self.newest != NONE).then_some(self.newest)
    }

    /// Adds a slot that is in no list.
    pub fn push_newest(&mut self, records: &mut [Record], slot: u32) {
        (records[slot as usize].older, records[slot as usize].newer) = (self.newest, NONE);
        match self.newest {
            NONE => self.oldest = slot,
            newest => records[newest as usize].newer = slot,
        }
        self.newest = slot;
        self.count += 1;
    }

    /// Removes a slot from this list, which must contain it.
    pub fn unlink(&mut self, records: &mut [Record], slot: u32) {
        let Record { older, newer, .. } = records[slot as usize];
        match older {
            NONE => self.oldest = newer,
            older => records[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => records[newer as usize].older = older,
        }
        self.count -= 1;
    }
}
