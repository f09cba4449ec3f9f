//! The ledger, in memory that all processes share: which generations of each block a reader may see
//! at that moment.
//!
//! - **Writers.** A block has one writer at a time, which holds its lock. It notes the next
//!   generation and what that holds ([`Block::begin`]) before it changes the file, and that it is
//!   done ([`Block::finish`]) after. Blocks of the same page have different locks, so their writers
//!   race.
//! - **Readers** hold nothing. They take the last finished generation before they read, and the
//!   last begun one after it ([`Window`]): each generation from the one to the other may be seen,
//!   and no other.
//! - **Names.** [`Slot::names`] is held in common by all who change bytes through the mount, and
//!   alone by those who exchange the file behind a name, or change it outside of the mount.
//!
//! Never in here: a system call, or a wait. Nothing is ever freed or moved, so a process may die at
//! any moment.

use crate::content::Content;
use crate::operation::Operation;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Files under test.
pub const SLOTS: usize = 48;
/// Blocks of a file at the most: 1 MiB, so that all files are more than the memory of the group.
pub const BLOCKS: usize = 2048;
/// Processes that read and write, at the most.
pub const WORKERS_MAX: usize = 16;
/// Blocks of a page.
pub const PAGE_BLOCKS: u32 = 8;
/// Generations remembered of each block. A reader that is overtaken by more cannot judge.
const HISTORY: usize = 8;
/// A lock that is held alone.
const ALONE: u32 = u32::MAX;

/// All of it. All zeros is a ledger in which nothing was written yet.
#[repr(C)]
pub struct Ledger {
    /// Not 0: everybody is to end.
    pub stop: AtomicU32,
    /// A file that is changed slowly outside just now, plus 1: others open and read it meanwhile.
    pub watched: AtomicU32,
    /// By [`Operation`]: how many were done.
    pub done: [AtomicU64; Operation::COUNT],
    /// Blocks that were read and judged.
    pub judged: AtomicU64,
    /// Blocks that were read and could not be judged, as too much happened meanwhile.
    pub not_judged: AtomicU64,
    /// What each process does.
    pub workers: [Worker; WORKERS_MAX],
    /// The files.
    pub slots: [Slot; SLOTS],
    /// By file, then block.
    pub blocks: [[Block; BLOCKS]; SLOTS],
}

/// What a process does just now, for the one that looks whether it hangs.
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
    /// Held in common, or alone by those who exchange the file or change it outside.
    pub names: AtomicU32,
    /// Held in common by readers, and alone by changes outside that no reader may see half done.
    pub readers: AtomicU32,
    /// Held by those who move the end of the file.
    pub size_lock: AtomicU32,
    /// Odd while the end moves.
    pub size_version: AtomicU32,
    /// Blocks of the file.
    pub size_blocks: AtomicU32,
    /// Files that this name has had: an older descriptor is of an older file.
    pub incarnation: AtomicU32,
    /// Changes outside that have ended: an older descriptor need not see them.
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
    /// 0 while the others change.
    generation: AtomicU64,
    content: AtomicU64,
    note: AtomicU64,
}

/// Which operation of which process made a generation, and when.
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
    /// The last one that was finished when the read began.
    pub first: u64,
    /// The last one that was begun when it had ended.
    pub last: u64,
}

/// What the generations of a window hold.
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

    /// These, at most as many as a block remembers.
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

    /// Gives the lock back.
    pub fn unlock(&self) {
        self.lock.store(0, Release);
    }

    /// The generation that comes next. For the one that holds the lock.
    pub fn next(&self) -> u64 {
        self.begun.load(Relaxed) + 1
    }

    /// From now on, readers may see this as the next generation. For the one that holds the lock.
    pub fn begin(&self, content: Content, note: Note) {
        let generation = self.next();
        let entry = self.entry(generation);
        entry.generation.store(0, Release);
        entry.content.store(content.raw(), Release);
        entry.note.store(note.pack(), Release);
        entry.generation.store(generation, Release);
        self.begun.store(generation, Release);
    }

    /// From now on, readers must see the generation that was begun last. For the one that holds the
    /// lock.
    pub fn finish(&self) {
        self.done.store(self.begun.load(Relaxed), Release);
    }

    /// What it holds. For the one that holds the lock, while it changes nothing.
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

    /// What a reader may see. None: older generations are forgotten.
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

    /// A generation, what it holds, and where it came from; the newest first, as far as they are
    /// remembered.
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

/// Takes a lock in common with others, if nobody holds it alone.
pub fn try_share(lock: &AtomicU32) -> bool {
    lock.try_update(AcqRel, Acquire, |count| (count != ALONE).then(|| count + 1)).is_ok()
}

/// Gives back what was taken in common.
pub fn unshare(lock: &AtomicU32) {
    lock.fetch_sub(1, AcqRel);
}

/// Takes a lock alone, if it is free.
pub fn try_alone(lock: &AtomicU32) -> bool {
    lock.compare_exchange(0, ALONE, AcqRel, Relaxed).is_ok()
}

/// Gives back what was held alone.
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
        // A read that begins now may still see the old one, one that begins after the end may not.
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
