//! One file: the backing file, the kernel's cache of it, and the mount's state of it.

use crate::oracle::{EOF, Oracle, Time};
use borrower::{File, FileIdentity, Left, Stamp};
use page::PAGE_SIZE;
use std::sync::Arc;

/// The bytes of a unit.
pub const UNIT_BYTES: u64 = 512;
/// The number of units in a page.
pub const UNITS: usize = PAGE_SIZE / UNIT_BYTES as usize;
/// The contents of one page.
pub type Units = [u64; UNITS];

/// Writes the numbers of a page's units to the page, at the beginning of each unit.
pub fn encode(units: &[u64], page: &mut [u8]) {
    page.fill(0);
    for (unit, bytes) in units.iter().zip(page.chunks_mut(UNIT_BYTES as usize)) {
        bytes[..8].copy_from_slice(&unit.to_le_bytes());
    }
}

/// Returns the numbers of a page's units.
pub fn decode(page: &[u8]) -> Units {
    std::array::from_fn(|at| {
        let at = at * UNIT_BYTES as usize;
        page[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    })
}

/// A backing file.
#[derive(Debug)]
pub struct BackingFile {
    /// Its units; those behind the end are zero.
    pub units: Vec<u64>,
    /// Its size, in units.
    pub size: usize,
    /// The time of its last change.
    pub changed: Time,
}

impl BackingFile {
    /// Returns its stamp.
    pub fn stamp(&self) -> Stamp {
        let time = i128::from(self.changed);
        Stamp { size_bytes: self.size as u64 * UNIT_BYTES, mtime_ns: time, ctime_ns: time }
    }

    /// Returns the value of a unit for a reader.
    pub fn read(&self, unit: usize) -> u64 {
        if unit < self.size { self.units[unit] } else { EOF }
    }

    /// Reads from the beginning of a page; returns the number of bytes before the end.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> usize {
        let first = (offset / UNIT_BYTES) as usize;
        for (at, bytes) in buf.chunks_mut(UNIT_BYTES as usize).enumerate() {
            bytes.fill(0);
            if first + at < self.size {
                bytes[..8].copy_from_slice(&self.units[first + at].to_le_bytes());
            }
        }
        (self.size.saturating_sub(first) * UNIT_BYTES as usize).min(buf.len())
    }

    /// Writes units, and moves the end if they reach behind it.
    pub fn write(&mut self, first: usize, values: &[u64]) {
        self.units[first..first + values.len()].copy_from_slice(values);
        self.size = self.size.max(first + values.len());
    }

    /// Moves the end.
    pub fn truncate(&mut self, size: usize) {
        let lower = size.min(self.size);
        self.units[lower..].fill(0);
        self.size = size;
    }
}

/// A page in the kernel's cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cached {
    /// Its contents.
    pub units: Units,
    /// Whether the contents can be read.
    pub uptodate: bool,
    /// Whether it holds stores through a mapping that are not written back.
    pub dirty: bool,
    /// Whether it is locked.
    pub locked: bool,
    /// Whether it is being written back.
    pub writeback: bool,
    /// A program stored through a mapping while requests changed the file. This copy may differ
    /// from the file until it is dropped (docs/design/limits.md, L2 and L6), so it is not compared.
    /// If it is lent, the returned page is compared.
    pub is_torn: bool,
    /// References held by writes in progress.
    pub pins: u32,
    /// The number of the write that last filled the page. It distinguishes the page from a later
    /// one in its place.
    pub number: u64,
}

impl Cached {
    /// Returns whether reclaim may evict it.
    pub fn is_evictable(&self) -> bool {
        !self.dirty && !self.locked && !self.writeback && self.pins == 0
    }
}

/// The kernel's state of a file, while it has an inode for it.
pub struct Inode {
    /// The borrower's file.
    pub file: Arc<File>,
    /// The cached pages.
    pub pages: Vec<Option<Cached>>,
    /// Pages of which a temporary copy is being written back, while the page itself is free.
    pub temporary: Vec<bool>,
    /// The size that the kernel has, in units.
    pub size: usize,
    /// Incremented with every size that the kernel accepts from an answer, and when it changes the
    /// size itself. Answers to earlier requests are then ignored (`fuse_inode::attr_version`).
    pub size_version: u64,
    /// The task that has the inode's lock.
    pub lock: Option<u64>,
    /// No writeback may begin.
    pub no_writeback: bool,
    /// Nothing is stored through mappings, because the model would not know the result.
    pub no_stores: bool,
    /// A program may have mapped the file for writing.
    pub may_be_stored_to: bool,
    /// The size is being changed.
    pub size_unstable: bool,
}

impl Inode {
    /// Returns an inode with no cached pages.
    pub fn new(file: Arc<File>, backing: &BackingFile) -> Inode {
        let pages = backing.units.len() / UNITS;
        Inode {
            file,
            pages: vec![None; pages],
            temporary: vec![false; pages],
            size: backing.size,
            size_version: 0,
            lock: None,
            no_writeback: false,
            no_stores: false,
            may_be_stored_to: false,
            size_unstable: false,
        }
    }

    /// Returns whether the page has to be written back.
    pub fn is_dirty_page(&self, index: usize) -> bool {
        self.pages.get(index).is_some_and(|page| page.is_some_and(|cached| cached.dirty))
    }

    /// Returns whether any page is dirty or under writeback.
    pub fn is_dirty(&self) -> bool {
        self.is_dirty_from(0)
    }

    /// Returns whether any page from `first` on is dirty or under writeback.
    pub fn is_dirty_from(&self, first: usize) -> bool {
        let is_dirty = |page: &Option<Cached>| page.is_some_and(|cached| cached.dirty || cached.writeback);
        self.temporary.iter().skip(first).any(|temporary| *temporary) || self.pages.iter().skip(first).any(is_dirty)
    }

    /// Returns the value of a cached unit for a reader.
    pub fn seen(&self, page: usize, at: usize) -> u64 {
        match &self.pages[page] {
            Some(cached) if page * UNITS + at < self.size => cached.units[at],
            _ => EOF,
        }
    }
}

/// Pages that the daemon is to make the kernel drop.
#[derive(Clone, Copy, Debug)]
pub struct Invalidation {
    /// The first page.
    pub first: usize,
    /// The page behind the last one.
    pub end: usize,
    /// The number for the borrower's `kernel_dropped` after that.
    pub number: Option<u64>,
}

/// One file.
pub struct FileModel {
    /// Its identity in the catalog.
    pub identity: FileIdentity,
    /// The backing file.
    pub backing: BackingFile,
    /// The kernel's state of it.
    pub inode: Option<Inode>,
    /// The values that reads may return.
    pub oracle: Oracle,
    /// The task that holds the mount's lock for changes of it.
    pub changing: Option<u64>,
    /// The pages that wait to be dropped.
    pub invalidation: Option<Invalidation>,
    /// A drop is in progress.
    pub invalidating: bool,
    /// The file was written through a mapping.
    pub mapped_writes: bool,
    /// An external writer is writing the backing file, slowly.
    pub is_written_externally: bool,
    /// Programs have stored and written the same units at the same time: either value may be the
    /// final one.
    pub mixed: bool,
    /// The number of operations of applications in progress.
    pub tasks: usize,
    /// The number of those that are changes.
    pub changes: usize,
}

impl FileModel {
    /// Returns a new file that neither kernel nor borrower has seen.
    pub fn new(identity: FileIdentity, units: Vec<u64>, size: usize, now: Time) -> FileModel {
        let backing = BackingFile { units, size, changed: now };
        let seen: Vec<u64> = (0..backing.units.len()).map(|unit| backing.read(unit)).collect();
        FileModel {
            identity,
            oracle: Oracle::new(&seen, now),
            backing,
            inode: None,
            changing: None,
            invalidation: None,
            invalidating: false,
            mapped_writes: false,
            is_written_externally: false,
            mixed: false,
            tasks: 0,
            changes: 0,
        }
    }

    /// Returns the number of its pages.
    pub fn page_count(&self) -> usize {
        self.backing.units.len() / UNITS
    }

    /// The kernel must drop these pages (as crates/mount/src/kernel/invalidation.rs records it).
    pub fn invalidate(&mut self, first: usize, end: usize, number: Option<u64>) {
        if let (Some(inode), None) = (&self.inode, self.invalidation) {
            inode.file.drop_begins();
        }
        let noted = self.invalidation.get_or_insert(Invalidation { first, end, number });
        noted.first = noted.first.min(first);
        noted.end = noted.end.max(end);
        noted.number = noted.number.max(number);
    }

    /// Once no operation is in progress any more, the backing file is right, whichever write came
    /// first.
    pub fn calm(&mut self, now: Time) {
        let dirty = self.inode.as_ref().is_some_and(Inode::is_dirty);
        if self.mixed && !dirty && self.changes == 0 && self.invalidation.is_none() && !self.invalidating {
            self.mixed = false;
            for unit in 0..self.backing.units.len() {
                self.oracle.store(unit, self.backing.read(unit), now);
            }
            self.oracle.expire(Time::MAX, now);
        }
    }

    /// Returns the state that a daemon leaves to its successor. It has a stamp only if the kernel
    /// caches nothing older.
    pub fn left(&self) -> Left {
        let left = self.inode.as_ref().map(|inode| inode.file.left()).unwrap_or_default();
        let is_dropped = self.invalidation.is_none() && !self.invalidating;
        Left { stamp: left.stamp.filter(|_| is_dropped), ..left }
    }
}
