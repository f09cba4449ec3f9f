//! One file: as it lies below, as the kernel caches it, and what the mount keeps of it.

use crate::truth::{EOF, Time, Truth};
use borrower::{File, FileIdentity, Left, Stamp};
use page::PAGE_SIZE;
use std::sync::Arc;

/// Bytes in a unit.
pub const UNIT_BYTES: u64 = 512;
/// Units in a page.
pub const UNITS: usize = PAGE_SIZE / UNIT_BYTES as usize;
/// What one page holds.
pub type Units = [u64; UNITS];

/// The numbers of a page's units, written where each unit begins.
pub fn encode(units: &[u64], page: &mut [u8]) {
    page.fill(0);
    for (unit, bytes) in units.iter().zip(page.chunks_mut(UNIT_BYTES as usize)) {
        bytes[..8].copy_from_slice(&unit.to_le_bytes());
    }
}

/// The numbers of a page's units.
pub fn decode(page: &[u8]) -> Units {
    std::array::from_fn(|at| {
        let at = at * UNIT_BYTES as usize;
        page[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    })
}

/// A file as it lies below.
#[derive(Debug)]
pub struct Below {
    /// Its units; what lies behind the end is zero.
    pub units: Vec<u64>,
    /// Where it ends, in units.
    pub size: usize,
    /// When it was last changed.
    pub changed: Time,
}

impl Below {
    /// What it looks like.
    pub fn stamp(&self) -> Stamp {
        let time = i128::from(self.changed);
        Stamp { size_bytes: self.size as u64 * UNIT_BYTES, mtime_ns: time, ctime_ns: time }
    }

    /// What a unit holds, for a reader.
    pub fn read(&self, unit: usize) -> u64 {
        if unit < self.size { self.units[unit] } else { EOF }
    }

    /// Reads from a page's beginning; returns the bytes before the end.
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
    /// What it holds.
    pub units: Units,
    /// Whether that can be read.
    pub uptodate: bool,
    /// Whether it holds what was stored through a mapping and is not written back.
    pub dirty: bool,
    /// Whether somebody has locked it.
    pub locked: bool,
    /// Whether it is being written back.
    pub writeback: bool,
    /// A program stored through a mapping while the file was changed by requests: this copy may
    /// differ from the file until it is dropped (docs/design/limits.md, L2 and L6), so it is
    /// not compared. If it is lent, what is read back is.
    pub is_torn: bool,
    /// References held by writes under way.
    pub pins: u32,
    /// Which write put its bytes there last, so that another page in its place is not taken for it.
    pub number: u64,
}

impl Cached {
    /// Whether reclaim may take it.
    pub fn is_evictable(&self) -> bool {
        !self.dirty && !self.locked && !self.writeback && self.pins == 0
    }
}

/// A file as the kernel knows it, while it has an inode for it.
pub struct Inode {
    /// What the borrower and the kernel know it by.
    pub file: Arc<File>,
    /// The cached pages.
    pub pages: Vec<Option<Cached>>,
    /// Pages of which a copy is being written back, while the page itself is free.
    pub temporary: Vec<bool>,
    /// Where the kernel believes it ends, in units.
    pub size: usize,
    /// Moves with every answer about the size that the kernel has taken in, and when it changes the
    /// size itself: an answer asked for before says nothing then (`fuse_inode::attr_version`).
    pub size_version: u64,
    /// The task that has the inode's lock.
    pub lock: Option<u64>,
    /// No writeback may begin.
    pub no_writeback: bool,
    /// Nothing is stored through mappings, because the model would not know what that means.
    pub no_stores: bool,
    /// A program may have mapped it for writing.
    pub may_be_stored_to: bool,
    /// The size is being changed.
    pub size_unstable: bool,
}

impl Inode {
    /// With nothing cached.
    pub fn new(file: Arc<File>, below: &Below) -> Inode {
        let pages = below.units.len() / UNITS;
        Inode {
            file,
            pages: vec![None; pages],
            temporary: vec![false; pages],
            size: below.size,
            size_version: 0,
            lock: None,
            no_writeback: false,
            no_stores: false,
            may_be_stored_to: false,
            size_unstable: false,
        }
    }

    /// Whether the page has to be written back.
    pub fn is_dirty_page(&self, index: usize) -> bool {
        self.pages.get(index).is_some_and(|page| page.is_some_and(|cached| cached.dirty))
    }

    /// Whether any page is dirty or being written back.
    pub fn is_dirty(&self) -> bool {
        self.is_dirty_from(0)
    }

    /// Whether any is from that page on.
    pub fn is_dirty_from(&self, first: usize) -> bool {
        let is_dirty = |page: &Option<Cached>| page.is_some_and(|cached| cached.dirty || cached.writeback);
        self.temporary.iter().skip(first).any(|temporary| *temporary) || self.pages.iter().skip(first).any(is_dirty)
    }

    /// What a reader sees of a cached unit.
    pub fn seen(&self, page: usize, at: usize) -> u64 {
        match &self.pages[page] {
            Some(cached) if page * UNITS + at < self.size => cached.units[at],
            _ => EOF,
        }
    }
}

/// Pages that the kernel is to be told to drop.
#[derive(Clone, Copy, Debug)]
pub struct Invalidation {
    /// First page.
    pub first: usize,
    /// Behind the last one.
    pub end: usize,
    /// What the borrower is told then.
    pub number: Option<u64>,
}

/// One file.
pub struct FileModel {
    /// Its name in the catalog.
    pub identity: FileIdentity,
    /// As it lies below.
    pub below: Below,
    /// As the kernel knows it.
    pub inode: Option<Inode>,
    /// What reads may return.
    pub truth: Truth,
    /// The task that has the mount's lock for changes of it.
    pub changing: Option<u64>,
    /// What waits to be told to the kernel.
    pub invalidation: Option<Invalidation>,
    /// The kernel is being told.
    pub invalidating: bool,
    /// It was written through a mapping.
    pub mapped_writes: bool,
    /// Somebody is writing it below, slowly.
    pub is_written_below: bool,
    /// Programs have stored and written the same units at the same time: either may be what they
    /// hold in the end.
    pub mixed: bool,
    /// Operations of applications under way.
    pub tasks: usize,
    /// Of those, changes.
    pub changes: usize,
}

impl FileModel {
    /// A file that nobody knows yet.
    pub fn new(identity: FileIdentity, units: Vec<u64>, size: usize, now: Time) -> FileModel {
        let below = Below { units, size, changed: now };
        let seen: Vec<u64> = (0..below.units.len()).map(|unit| below.read(unit)).collect();
        FileModel {
            identity,
            truth: Truth::new(&seen, now),
            below,
            inode: None,
            changing: None,
            invalidation: None,
            invalidating: false,
            mapped_writes: false,
            is_written_below: false,
            mixed: false,
            tasks: 0,
            changes: 0,
        }
    }

    /// Its pages.
    pub fn page_count(&self) -> usize {
        self.below.units.len() / UNITS
    }

    /// The kernel must drop these pages (as crates/mount/src/kernel/invalidation.rs notes it).
    pub fn invalidate(&mut self, first: usize, end: usize, number: Option<u64>) {
        if let (Some(inode), None) = (&self.inode, self.invalidation) {
            inode.file.drop_begins();
        }
        let noted = self.invalidation.get_or_insert(Invalidation { first, end, number });
        noted.first = noted.first.min(first);
        noted.end = noted.end.max(end);
        noted.number = noted.number.max(number);
    }

    /// Once nothing is under way any more, what lies below is what is right, whoever came first.
    pub fn calm(&mut self, now: Time) {
        let dirty = self.inode.as_ref().is_some_and(Inode::is_dirty);
        if self.mixed && !dirty && self.changes == 0 && self.invalidation.is_none() && !self.invalidating {
            self.mixed = false;
            for unit in 0..self.below.units.len() {
                self.truth.store(unit, self.below.read(unit), now);
            }
            self.truth.expire(Time::MAX, now);
        }
    }

    /// How a daemon leaves the file to its successor: it may believe that the file looks the same
    /// only if the kernel caches nothing older.
    pub fn left(&self) -> Left {
        let left = self.inode.as_ref().map(|inode| inode.file.left()).unwrap_or_default();
        let is_dropped = self.invalidation.is_none() && !self.invalidating;
        Left { stamp: left.stamp.filter(|_| is_dropped), ..left }
    }
}
