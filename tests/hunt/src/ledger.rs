//! The ledger, in memory that all processes share: the generations of each block that a reader may
//! see at that moment.
//!
//! - **Writers.** A block has one writer at a time, which holds its lock. It records the next
//!   generation and its content ([`Block::begin`]) before it changes the file, and the completion
//!   ([`Block::finish`]) after. Blocks of the same page have different locks, so their writers
//!   race.
//! - **Readers** hold nothing. They take the last finished generation before they read, and the
//!   last begun one after it ([`Window`]). They may see each generation from the first to the
//!   second, and no other.
//! - **Names.** [`Slot::names`] is shared by all processes that change bytes through the mount, and
//!   held exclusively by those that replace the file of a name, or change it externally.
//!
//! Must never happen here: a system call, or a wait. Nothing is ever freed or moved, so a
//! process may die at any moment.

use crate::content::Content;
use crate::operation::Operation;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Files under test.
pub const SLOTS: usize = 48;
/// The maximum number of blocks of a file: 1 MiB, so that all files exceed the memory of the group.
pub const BLOCKS: usize = 2048;
/// The maximum number of processes that read and write.
pub const WORKERS_MAX: usize = 16;
/// Blocks of a page.
pub const PAGE_BLOCKS: u32 = 8;
/// Recorded generations of each block. A reader that is overtaken by more cannot judge.
const HISTORY: usize = 8;
/// The value of an exclusive lock.
const ALONE: u32 = u32::MAX;

/// The whole ledger. All zeros is a ledger in which nothing was written yet.
#[repr(C)]
pub struct Ledger {
    /// Not 0: all processes have to end.
    pub stop: AtomicU32,
    /// A file that is being changed slowly and externally, plus 1: other processes open and read it
    /// meanwhile.
    pub watched: AtomicU32,
    /// By [`Operation`]: the number of completed operations.
    pub done: [AtomicU64; Operation::COUNT],
    /// Blocks that were read and judged.
    pub judged: AtomicU64,
    /// Blocks that were read and could not be judged, because too much happened meanwhile.
    pub not_judged: AtomicU64,
    /// The present operation of each process.
    pub workers: [Worker; WORKERS_MAX],
    /// The files.
    pub slots: [Slot; SLOTS],
    /// By file, then block.
    pub blocks: [[Block; BLOCKS]; SLOTS],
}

/// The present operation of a process, for the detection of hangs.
#[repr(C)]
pub struct Worker {
    /// Milliseconds of the monotonic clock; 0: nothing.
    pub since_ms: AtomicU64,
    /// The plan, packed.
    pub plan: AtomicU64,
}

/// A file.
#[repr(C)]
pub struct Slot {
    /// Shared, or exclusive for processes that replace the file or change it externally.
    pub names: AtomicU32,
    /// Shared by readers, and exclusive for external changes that no reader may see half done.
    pub readers: AtomicU32,
    /// Held by processes that move the end of the file.
    pub size_lock: AtomicU32,
    /// Odd while the end moves.
    pub size_version: AtomicU32,
    /// Blocks of the file.
    pub size_blocks: AtomicU32,
    /// Number of files that this name has had: an older descriptor is of an older file.
    pub incarnation: AtomicU32,
    /// Completed external changes: an older descriptor need not see them.
    pub outside: AtomicU32,
    _space: AtomicU32,
}

/// A block.
#[repr(C)]
#[derive(Default)]
pub struct Block {
    lock: AtomicU32,
    _space: AtomicU32,
    begun: AtomicU64,
    done: AtomicU64,
    history: [Entry; HISTORY],
}

#[repr(C)]
#[derive(Default)]
struct Entry {
    /// 0 while the other fields change.
    generation: AtomicU64,
    content: AtomicU64,
    note: AtomicU64,
}

/// The operation and the process that made a generation, and the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Note {
    /// The operation.
    pub operation: Operation,
    /// The process.
    pub worker: u8,
    /// Milliseconds of the monotonic clock.
    pub at_ms: u64,
}

/// The generations that a read may have seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The last generation that was finished when the read began.
    pub first: u64,
    /// The last generation that was begun when the read had ended.
    pub last: u64,
}

/// The contents of a window's generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    contents: [Content; HISTORY],
    count: usize,
}

impl Allowed {
    /// One for each generation, the oldest first.
    pub fn contents(&self) -> &[Content] {
        &self.contents[..self.count]
    }

    /// These contents, at most as many as a block records.
    #[cfg(test)]
    pub fn of(contents: &[Content]) -> Allowed {
        let mut allowed = Allowed { contents: [Content::ABSENT; HISTORY], count: 0 };
        for content in contents.iter().take(HISTORY) {
            allowed.contents[allowed.count] = *content;
            allowed.count += 1;
        }
        allowed
    }
}

impl Note {
    fn pack(self) -> u64 {
        self.at_ms << 16 | u64::from(self.worker) << 8 | self.operation as u64
    }

    fn unpack(raw: u64) -> Note {
        Note { operation: Operation::from_index(raw as u8 as usize), worker: (raw >> 8) as u8, at_ms: raw >> 16 }
    }
}

impl Block {
    /// Takes the lock, if it is free.
    pub fn try_lock(&self) -> bool {
        self.lock.compare_exchange(0, 1, AcqRel, Relaxed).is_ok()
    }

    /// Releases the lock.
    pub fn unlock(&self) {
        self.lock.store(0, Release);
    }

    /// The next generation. Only for the holder of the lock.
    pub fn next(&self) -> u64 {
        self.begun.load(Relaxed) + 1
    }

    /// From now on, readers may see the next generation with this content. Only for the holder of
    /// the lock.
    pub fn begin(&self, content: Content, note: Note) {
        let generation = self.next();
        let entry = self.entry(generation);
        entry.generation.store(0, Release);
        entry.content.store(content.raw(), Release);
        entry.note.store(note.pack(), Release);
        entry.generation.store(generation, Release);
        self.begun.store(generation, Release);
    }

    /// From now on, readers must see the generation that was begun last. Only for the holder of the
    /// lock.
    pub fn finish(&self) {
        self.done.store(self.begun.load(Relaxed), Release);
    }

    /// The present content. Only for the holder of the lock, while it changes nothing.
    pub fn now(&self) -> Content {
        let generation = self.done.load(Acquire);
        Content::from_raw(self.entry(generation).content.load(Acquire))
    }

    /// Before a read.
    pub fn before(&self) -> u64 {
        self.done.load(Acquire)
    }

    /// After the read that began with [`Block::before`].
    pub fn after(&self, first: u64) -> Window {
        Window { first, last: self.begun.load(Acquire) }
    }

    /// The contents that a reader may see. `None`: older generations are forgotten.
    pub fn allowed(&self, window: Window) -> Option<Allowed> {
        let mut allowed = Allowed { contents: [Content::ABSENT; HISTORY], count: 0 };
        if window.last - window.first >= HISTORY as u64 {
            return None;
        }
        for generation in window.first..=window.last {
            allowed.contents[allowed.count] = self.remembered(generation)?.0;
            allowed.count += 1;
        }
        Some(allowed)
    }

    /// Each recorded generation with its content and its origin; the newest first.
    pub fn history(&self) -> Vec<(u64, Content, Note)> {
        let newest = self.begun.load(Acquire);
        let oldest = newest.saturating_sub(HISTORY as u64 - 1).max(1);
        let found = (oldest..=newest).rev().filter_map(|generation| {
            let (content, note) = self.remembered(generation)?;
            Some((generation, content, note))
        });
        found.collect()
    }

    fn remembered(&self, generation: u64) -> Option<(Content, Note)> {
        let entry = self.entry(generation);
        if entry.generation.load(Acquire) != generation {
            return None;
        }
        let found = (Content::from_raw(entry.content.load(Acquire)), Note::unpack(entry.note.load(Acquire)));
        // A newer generation may have taken the place meanwhile.
        (entry.generation.load(Acquire) == generation).then_some(found)
    }

    fn entry(&self, generation: u64) -> &Entry {
        &self.history[(generation % HISTORY as u64) as usize]
    }
}

/// Takes a shared lock, if nobody holds it exclusively.
pub fn try_share(lock: &AtomicU32) -> bool {
    lock.try_update(AcqRel, Acquire, |count| (count != ALONE).then(|| count + 1)).is_ok()
}

/// Releases a shared lock.
pub fn unshare(lock: &AtomicU32) {
    lock.fetch_sub(1, AcqRel);
}

/// Takes an exclusive lock, if it is free.
pub fn try_alone(lock: &AtomicU32) -> bool {
    lock.compare_exchange(0, ALONE, AcqRel, Relaxed).is_ok()
}

/// Releases an exclusive lock.
pub fn release_alone(lock: &AtomicU32) {
    lock.store(0, Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(at_ms: u64) -> Note {
        Note { operation: Operation::Store, worker: 3, at_ms }
    }

    #[test]
    fn a_reader_may_see_what_was_finished_before_it_and_begun_until_its_end() {
        let block = Block::default();
        let content = |generation| Content::written(1, 2, generation);
        block.begin(content(1), note(1));
        block.finish();
        let first = block.before();
        assert_eq!(block.allowed(block.after(first)).unwrap().contents(), [content(1)]);
        block.begin(content(2), note(2));
        assert_eq!(block.now(), content(1));
        assert_eq!(block.allowed(block.after(first)).unwrap().contents(), [content(1), content(2)]);
        // A read that begins now may still see the old generation, one that begins after the end
        // may not.
        assert_eq!(block.before(), 1);
        block.finish();
        assert_eq!(block.before(), 2);
        assert_eq!(block.allowed(block.after(2)).unwrap().contents(), [content(2)]);
        assert_eq!(block.allowed(block.after(1)).unwrap().contents(), [content(1), content(2)]);
        assert_eq!(block.now(), content(2));
    }

    #[test]
    fn what_is_forgotten_is_not_judged() {
        let block = Block::default();
        let content = |generation| Content::written(1, 2, generation);
        for generation in 1..=20 {
            block.begin(content(generation), note(generation));
            block.finish();
        }
        assert_eq!(block.allowed(Window { first: 12, last: 20 }), None);
        assert_eq!(block.allowed(Window { first: 13, last: 20 }).unwrap().contents().len(), HISTORY);
        assert_eq!(block.allowed(Window { first: 3, last: 4 }), None);
        let history = block.history();
        assert_eq!(history.len(), HISTORY);
        assert_eq!(history[0], (20, content(20), note(20)));
    }

    #[test]
    fn locks_are_held_alone_or_in_common() {
        let lock = AtomicU32::new(0);
        assert!(try_share(&lock) && try_share(&lock) && !try_alone(&lock));
        unshare(&lock);
        unshare(&lock);
        assert!(try_alone(&lock) && !try_share(&lock) && !try_alone(&lock));
        release_alone(&lock);
        assert!(try_share(&lock));
        let block = Block::default();
        assert!(block.try_lock() && !block.try_lock());
        block.unlock();
        assert!(block.try_lock());
    }

    #[test]
    fn a_note_comes_back_whole() {
        let note = Note { operation: Operation::OutsideSlow, worker: 15, at_ms: 1 << 40 };
        assert_eq!(Note::unpack(note.pack()), note);
    }
}
