//! Pages that guests have evicted, on their way into this machine's page cache.
//!
//! A guest is not trusted. A page counts only if it has the hash of the backing file's page. That
//! hash is known for pages that were read from the backing file or written, and is forgotten when
//! they change ([`crate::catalog::file::FileState::record_hash`]). The page waits here until the
//! kernel reads it, which the kernel does when it is told that the page will be needed. Then the
//! page is the answer of the READ. So it enters the page cache as every page does: after any change
//! that the kernel has begun before, and never over bytes that are already cached.

use crate::catalog::entry::HASH_MAX;
use hashbrown::HashMap;
use locks::{Condvar, Mutex};
use page::{ChecksumKey, FileKey, Page, PageId, PageRange, Version};
use std::time::Duration;

/// The maximum number of pages that wait, of all guests: 16 MiB.
pub const WAITING_PAGES_MAX: usize = 4096;

/// The result for a page that a guest has evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demotion {
    /// The page waits for the kernel to read it.
    Waits,
    /// The hash of the backing file's page is not known.
    Unknown,
    /// The backing file has other bytes.
    Differs,
    /// Too many pages wait.
    NoRoom,
}

/// By file and index: hash and bytes. The bytes are None while a READ that has taken them is being
/// answered.
type Waiting = HashMap<(FileKey, u32), (u64, Option<Box<Page>>)>;

/// The pages that wait.
pub struct Demoted {
    key: ChecksumKey,
    waiting: Mutex<Waiting>,
    /// Signalled when a READ that has taken some pages was answered.
    answered: Condvar,
}

impl Demoted {
    /// `key` is the key of the hashes; no guest may have it.
    pub fn new(key: ChecksumKey) -> Demoted {
        Demoted { key, waiting: Mutex::default(), answered: Condvar::new() }
    }

    /// Returns the hash of a page's bytes, 60 bits.
    pub fn hash(&self, id: PageId, page: &Page) -> u64 {
        // Versions of lent pages begin with 1.
        self.key.checksum(id, Version(0), page) & HASH_MAX
    }

    /// Adds a page that waits from now on.
    pub(crate) fn add(&self, id: PageId, hash: u64, page: &Page) -> Demotion {
        let mut waiting = self.waiting.lock();
        if waiting.len() >= WAITING_PAGES_MAX {
            return Demotion::NoRoom;
        }
        waiting.insert((id.file, id.index), (hash, Some(Box::new(*page))));
        Demotion::Waits
    }

    /// Returns whether the page waits, with this hash.
    pub(crate) fn has(&self, id: PageId, hash: u64) -> bool {
        self.waiting.lock().get(&(id.file, id.index)).is_some_and(|(of, page)| *of == hash && page.is_some())
    }

    /// Takes the page for a READ, if it has this hash. The caller must call [`Demoted::answered`]
    /// later.
    pub(crate) fn take(&self, id: PageId, hash: u64) -> Option<Box<Page>> {
        let mut waiting = self.waiting.lock();
        let (_, page) = waiting.get_mut(&(id.file, id.index)).filter(|(of, _)| *of == hash)?;
        page.take()
    }

    /// The kernel has the answer to a READ of these pages: the pages that the READ took are in the
    /// page cache.
    pub fn answered(&self, file: FileKey, pages: PageRange) {
        let mut waiting = self.waiting.lock();
        let before = waiting.len();
        if before == 0 {
            return;
        }
        for index in (pages.first..pages.end).map_while(|index| u32::try_from(index).ok()) {
            if waiting.get(&(file, index)).is_some_and(|(_, page)| page.is_none()) {
                waiting.remove(&(file, index));
            }
        }
        if waiting.len() < before {
            self.answered.notify_all();
        }
    }

    /// Removes the page. Returns whether no READ had taken it.
    pub fn withdraw(&self, id: PageId) -> bool {
        self.waiting.lock().remove(&(id.file, id.index)).is_some_and(|(_, page)| page.is_some())
    }

    /// Waits until the READs of all of these pages are answered, for at most `limit`. Returns
    /// whether they are.
    pub fn wait_until_answered(&self, ids: &[PageId], limit: Duration) -> bool {
        let mut waiting = self.waiting.lock();
        let is_there = |waiting: &mut Waiting| ids.iter().any(|id| waiting.contains_key(&(id.file, id.index)));
        self.answered.wait_while_for(&mut waiting, is_there, limit);
        !is_there(&mut waiting)
    }
}
