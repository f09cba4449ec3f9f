//! The entries of one file: a sparse array of words, 8 bytes a page (2 MB for each GB lent, as in
//! Puma 2015, §3.4.1).
//!
//! Neighbouring pages of a file tend to be lent together, so entries are stored in chunks. A chunk
//! without any known entry takes no memory.

use crate::catalog::entry::{Entry, UNKNOWN};
use hashbrown::HashMap;
use page::PageRange;

/// The number of pages in a chunk: 512 bytes of entries. So a small file costs little, and the
/// map's own overhead stays near 3 %.
const CHUNK_PAGES: u32 = 64;

struct Chunk {
    words: [u64; CHUNK_PAGES as usize],
    /// The number of words that are not 0.
    known: u32,
}

/// The entries of a file.
#[derive(Default)]
pub struct PageTable {
    chunks: HashMap<u32, Box<Chunk>>,
    live_pages: u64,
    placed_pages: u64,
    moves: Vec<Moved>,
}

/// Changes in the counts of one control group's pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The number of the group.
    pub group: u8,
    /// The increase of the number of pages at lenders; negative for a decrease.
    pub lent: i64,
    /// The number of pages that were got back.
    pub got: u64,
}

impl PageTable {
    /// Returns the entry of the page.
    pub fn get(&self, index: u32) -> Entry {
        self.chunks
            .get(&(index / CHUNK_PAGES))
            .map_or(UNKNOWN, |chunk| Entry::unpack(chunk.words[(index % CHUNK_PAGES) as usize]))
    }

    /// Replaces the entry of the page; returns the old entry.
    pub fn set(&mut self, index: u32, entry: Entry) -> Entry {
        let (number, at) = (index / CHUNK_PAGES, (index % CHUNK_PAGES) as usize);
        let word = entry.pack();
        if word == 0 && !self.chunks.contains_key(&number) {
            return UNKNOWN;
        }
        let chunk =
            self.chunks.entry(number).or_insert_with(|| Box::new(Chunk { words: [0; CHUNK_PAGES as usize], known: 0 }));
        let old = std::mem::replace(&mut chunk.words[at], word);
        chunk.known = chunk.known + u32::from(word != 0) - u32::from(old != 0);
        if chunk.known == 0 {
            self.chunks.remove(&number);
        }
        let old = Entry::unpack(old);
        if old.group() != entry.group() {
            old.group().into_iter().for_each(|group| self.moved(group, -1, 0));
            entry.group().into_iter().for_each(|group| self.moved(group, 1, 0));
        }
        self.live_pages = self.live_pages + u64::from(entry.is_live()) - u64::from(old.is_live());
        self.placed_pages = self.placed_pages + u64::from(entry.is_placed()) - u64::from(old.is_placed());
        old
    }

    /// Counts changes of a group's pages, until [`PageTable::take_moves`]. Pages of no group are
    /// not counted.
    pub fn moved(&mut self, group: u8, lent: i64, got: u64) {
        if group == 0 {
            return;
        }
        match self.moves.iter_mut().find(|moved| moved.group == group) {
            Some(moved) => (moved.lent, moved.got) = (moved.lent + lent, moved.got + got),
            None => self.moves.push(Moved { group, lent, got }),
        }
    }

    /// Returns the counts since the last call, and resets them.
    pub fn take_moves(&mut self) -> impl Iterator<Item = Moved> {
        self.moves.drain(..)
    }

    /// Forgets all entries of the pages of `range`, and calls `forgotten` with each live entry.
    pub fn forget(&mut self, range: PageRange, mut forgotten: impl FnMut(u32, Entry)) {
        if range.is_empty() || self.chunks.is_empty() {
            return;
        }
        let first = range.first.min(u64::from(u32::MAX)) as u32;
        let last = (range.end - 1).min(u64::from(u32::MAX)) as u32;
        if range.first > u64::from(u32::MAX) {
            return;
        }
        let numbers = first / CHUNK_PAGES..=last / CHUNK_PAGES;
        // A range can be far larger than the table. So the shorter of the two is scanned.
        let mut touched: Vec<u32> = if numbers.clone().count() <= self.chunks.len() {
            numbers.filter(|number| self.chunks.contains_key(number)).collect()
        } else {
            self.chunks.keys().copied().filter(|number| numbers.contains(number)).collect()
        };
        // Sorted, so that every run of a simulation is the same.
        touched.sort_unstable();
        for number in touched {
            let start = number * CHUNK_PAGES;
            for index in start.max(first)..=(start + (CHUNK_PAGES - 1)).min(last) {
                let old = self.set(index, UNKNOWN);
                if old.is_live() {
                    forgotten(index, old);
                }
            }
        }
    }

    /// Forgets the live entries that `gone` accepts.
    pub fn sweep(&mut self, gone: impl Fn(Entry) -> bool) {
        let numbers: Vec<u32> = self.chunks.keys().copied().collect();
        for number in numbers {
            for index in (0..CHUNK_PAGES).map(|at| number * CHUNK_PAGES + at) {
                let entry = self.get(index);
                if entry.is_live() && gone(entry) {
                    self.set(index, UNKNOWN);
                }
            }
        }
    }

    /// Returns the number of pages whose entries are not absent.
    pub fn live_pages(&self) -> u64 {
        self.live_pages
    }

    /// Returns the number of pages that the kernel last cached because a guest had evicted them.
    pub fn placed_pages(&self) -> u64 {
        self.placed_pages
    }

    /// Returns the approximate bytes of memory that the entries take.
    pub fn memory_bytes(&self) -> u64 {
        (self.chunks.len() * (size_of::<Chunk>() + size_of::<(u32, Box<Chunk>)>() + 1)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::entry::{Place, absent};
    use page::Version;

    fn present(version: u64) -> Entry {
        Entry::Present { place: Place { lender: 0, epoch: 0 }, version: Version(version), group: 0 }
    }

    #[test]
    fn sparse_and_counted() {
        let mut table = PageTable::default();
        for index in [0, 63, 64, u32::MAX] {
            assert_eq!(table.set(index, present(index.into())), UNKNOWN);
        }
        assert_eq!(table.live_pages(), 4);
        assert_eq!(table.get(63), present(63));
        assert_eq!(table.get(62), UNKNOWN);
        table.set(63, absent(9));
        assert_eq!((table.live_pages(), table.get(63)), (3, absent(9)));

        let mut seen = Vec::new();
        table.forget(PageRange { first: 1, end: 65 }, |index, _| seen.push(index));
        assert_eq!(seen, [64], "absent entries are forgotten silently");
        assert_eq!(table.get(63), UNKNOWN);
        table.forget(PageRange::ALL, |index, _| seen.push(index));
        seen.sort();
        assert_eq!(seen, [0, 64, u32::MAX]);
        assert_eq!((table.live_pages(), table.memory_bytes()), (0, 0));
        let of = |group: u8| Entry::Present { place: Place { lender: 0, epoch: 0 }, version: Version(9), group };
        for (index, group) in [(1, 3), (2, 3), (3, 5), (4, 0)] {
            table.set(index, of(group));
        }
        table.set(1, of(5));
        table.set(2, UNKNOWN);
        table.moved(5, 0, 4);
        let mut moves: Vec<Moved> = table.take_moves().collect();
        moves.sort_by_key(|moved| moved.group);
        assert_eq!(moves, [Moved { group: 3, lent: 0, got: 0 }, Moved { group: 5, lent: 2, got: 4 }]);
        table.forget(PageRange::ALL, |_, _| {});
        assert_eq!(table.take_moves().collect::<Vec<_>>(), [Moved { group: 5, lent: -2, got: 0 }]);
        table.set(7, Entry::Hashed { hash: 1, placed: true });
        table.set(8, Entry::Hashed { hash: 1, placed: false });
        assert_eq!((table.live_pages(), table.placed_pages()), (0, 1));
        table.forget(PageRange { first: 7, end: 8 }, |_, _| unreachable!());
        assert_eq!((table.get(7), table.placed_pages()), (UNKNOWN, 0));
        table.set(8, UNKNOWN);
        table.forget(PageRange { first: 1 << 40, end: u64::MAX }, |_, _| unreachable!());
    }
}
