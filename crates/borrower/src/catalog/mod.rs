//! The catalog: every file that the borrower knows, and the places of its pages at lenders.
//!
//! The catalog gives out file keys and versions, none of them twice. It also remembers files whose
//! inode the kernel has forgotten, so their pages are found again when the file comes back. Pages
//! that a lender keeps in vain are recorded for a Drop message.

pub(crate) mod copying;
pub mod entry;
pub mod file;
pub mod lender;
pub(crate) mod overtaking;
pub mod rules;
pub(crate) mod table;

use crate::backing::FileIdentity;
use crate::catalog::entry::{Entry, Place, Standing, VERSION_MAX};
use crate::catalog::file::{FileState, Left};
use crate::catalog::lender::LenderWord;
use crate::catalog::rules::{Rule, keeps};
use crate::policy::gate::Passes;
use crate::put::groups::Groups;
use hashbrown::HashMap;
use locks::atomic::{AtomicU32, AtomicU64, Ordering};
use locks::{Condvar, Mutex, RwLock};
use page::{FileKey, PageId, Version};
use std::collections::VecDeque;
use std::sync::Arc;
use tap::CopyHints;
use wire::WireKey;

/// The number of remembered files that the kernel has forgotten. At some 400 bytes each, in
/// addition to their entries, they take at most 100 MiB.
const RETIRED_FILES_MAX: usize = if cfg!(test) { 4 } else { 1 << 18 };

/// The default limit of memory for all entries, in bytes: enough for 128 GiB of lent pages. Beyond
/// it the least recently used files are forgotten. Until that is done, no further page is lent,
/// and no quarantine is cleared.
pub const ENTRY_BYTES_MAX: u64 = 256 << 20;

/// The number of drops that wait for each lender. Further drops are not sent: the lender forgets
/// these pages when they grow old.
const DROPS_MAX: usize = 1 << 14;

/// The number of versions to skip after another party gave out versions that this catalog does not
/// know: enough for 32 TiB of pages since then. There are 2^44 versions.
const SKIPPED_VERSIONS: u64 = 1 << 33;

/// When the entries have reached their limit, whole files are forgotten until the entries take no
/// more than this part of it: 7 in 8.
const RECLAIM_SHARE: (u64, u64) = (7, 8);

/// A file in the catalog.
pub struct File {
    key: FileKey,
    identity: FileIdentity,
    users: AtomicU32,
    /// The number of times that the file is in [`Names::retired`].
    retired: AtomicU32,
    /// The catalog's count of reclaims when the file was last read, or a page of it was evicted.
    used: AtomicU64,
    pub(crate) state: Mutex<FileState>,
    /// Signalled when a change has ended.
    pub(crate) settled: Condvar,
}

impl File {
    /// The key by which the kernel (as the inode's generation) and the lenders identify the file.
    pub fn key(&self) -> FileKey {
        self.key
    }

    /// Locks the state of the file's pages, for the driver of a [`crate::read::state::ReadState`].
    pub fn lock(&self) -> locks::MutexGuard<'_, FileState> {
        self.state.lock()
    }
}

/// The catalog. See the module's description.
pub struct Catalog {
    names: Mutex<Names>,
    /// The same files by key, in a map of their own because every event needs a lookup here.
    by_key: RwLock<HashMap<FileKey, Arc<File>>>,
    next_version: AtomicU64,
    lenders: Vec<Lender>,
    entry_bytes: AtomicU64,
    live_pages: AtomicU64,
    entry_bytes_max: u64,
    /// The number of reclaims so far.
    reclaims: AtomicU64,
    /// The control groups on whose account pages are lent.
    pub groups: Groups,
    /// The receiver of hints which pages' bytes are not needed at their next eviction.
    copy_hints: Option<Arc<dyn CopyHints>>,
}

/// The catalog's state of one lender.
#[derive(Default)]
struct Lender {
    /// A [`LenderWord`].
    word: AtomicU32,
    /// The pages that the lender keeps in vain.
    drops: Mutex<Vec<WireKey>>,
}

struct Names {
    by_identity: HashMap<FileIdentity, Arc<File>>,
    retired: VecDeque<FileKey>,
    next_key: u32,
}

impl Catalog {
    /// Returns a catalog for `lenders` lenders, none of them up. Its entries take at most
    /// `entry_bytes_max` bytes of memory.
    pub fn new(lenders: u8, entry_bytes_max: u64) -> Catalog {
        assert!(lenders <= Place::LENDERS);
        Catalog {
            names: Mutex::new(Names { by_identity: HashMap::new(), retired: VecDeque::new(), next_key: 1 }),
            by_key: RwLock::new(HashMap::new()),
            next_version: AtomicU64::new(1),
            lenders: (0..lenders).map(|_| Lender::default()).collect(),
            entry_bytes: AtomicU64::new(0),
            live_pages: AtomicU64::new(0),
            entry_bytes_max,
            reclaims: AtomicU64::new(1),
            groups: Groups::default(),
            copy_hints: None,
        }
    }

    /// Returns the catalog with hints for the BPF program that sees the evictions.
    pub(crate) fn with_hints(self, copy_hints: Option<Arc<dyn CopyHints>>) -> Catalog {
        Catalog { copy_hints, ..self }
    }

    /// Returns whether hints have a receiver.
    pub fn takes_hints(&self) -> bool {
        self.copy_hints.is_some()
    }

    /// Nothing will be sent of this page, which the kernel caches now: its next eviction needs no
    /// copy of the bytes.
    pub(crate) fn wants_no_bytes(&self, id: PageId) {
        if let Some(hints) = &self.copy_hints {
            hints.omit(id.file.0, id.index);
        }
    }

    /// The next eviction of this page needs a copy of its bytes. Takes back an earlier hint.
    pub(crate) fn wants_bytes(&self, id: PageId) {
        if let Some(hints) = &self.copy_hints {
            hints.copy(id.file.0, id.index);
        }
    }

    /// The next eviction of every page needs a copy of its bytes.
    pub(crate) fn wants_all_bytes(&self) {
        if let Some(hints) = &self.copy_hints {
            hints.copy_all();
        }
    }

    /// Returns the file of that identity. Adds the file if it is not known.
    pub fn adopt(&self, identity: FileIdentity) -> Arc<File> {
        let mut names = self.names.lock();
        if let Some(file) = names.by_identity.get(&identity) {
            file.users.fetch_add(1, Ordering::Relaxed);
            return file.clone();
        }
        let mut by_key = self.by_key.write();
        // Keys repeat after 4 billion files; keys of files that are still known are skipped.
        while by_key.contains_key(&FileKey(names.next_key)) || names.next_key == 0 {
            names.next_key = names.next_key.wrapping_add(1);
        }
        let key = FileKey(names.next_key);
        if keeps(Rule::Key) {
            names.next_key = names.next_key.wrapping_add(1);
        }
        let file = Arc::new(File {
            key,
            identity,
            users: AtomicU32::new(1),
            retired: AtomicU32::new(0),
            used: AtomicU64::new(0),
            state: Mutex::default(),
            settled: Condvar::new(),
        });
        by_key.insert(key, file.clone());
        names.by_identity.insert(identity, file.clone());
        file
    }

    /// Adds a file with the key that an earlier daemon gave it and that the kernel still uses.
    /// `left` is the state that the earlier daemon left. Must be called before any other use of the
    /// catalog.
    pub fn restore(&self, identity: FileIdentity, key: FileKey, left: Left) -> Arc<File> {
        let mut names = self.names.lock();
        let file = Arc::new(File {
            key,
            identity,
            users: AtomicU32::new(1),
            retired: AtomicU32::new(0),
            used: AtomicU64::new(0),
            state: Mutex::new(FileState::restored(left)),
            settled: Condvar::new(),
        });
        names.next_key = names.next_key.max(key.0.wrapping_add(1));
        self.by_key.write().insert(key, file.clone());
        names.by_identity.insert(identity, file.clone());
        file
    }

    /// Returns the key that the next file gets, unless a file has it already. 0 stands for the key
    /// behind it.
    pub fn next_key(&self) -> FileKey {
        FileKey(self.names.lock().next_key)
    }

    /// Gives out no key below this one. Must be called before any file is adopted.
    pub fn keys_from(&self, key: FileKey) {
        let mut names = self.names.lock();
        names.next_key = names.next_key.max(key.0);
    }

    /// The file has one user less. When the last user leaves, the file is remembered if it has
    /// pages and is not `deleted`.
    pub fn retire(&self, file: &Arc<File>, deleted: bool) {
        let mut names = self.names.lock();
        if file.users.fetch_sub(1, Ordering::Relaxed) != 1 {
            return;
        }
        let live_pages = {
            let mut state = file.state.lock();
            state.forgotten();
            state.live_pages()
        };
        if deleted || live_pages == 0 {
            self.remove(&mut names, file);
            return;
        }
        file.retired.fetch_add(1, Ordering::Relaxed);
        names.retired.push_back(file.key);
        while names.retired.len() > RETIRED_FILES_MAX {
            let Some(oldest) = names.retired.pop_front() else { break };
            let Some(file) = self.file(oldest) else { continue };
            // A file that came back and left again is in the list once more, further behind.
            let is_last = file.retired.fetch_sub(1, Ordering::Relaxed) == 1;
            if is_last && file.users.load(Ordering::Relaxed) == 0 {
                self.remove(&mut names, &file);
            }
        }
    }

    fn remove(&self, names: &mut Names, file: &Arc<File>) {
        names.by_identity.remove(&file.identity);
        self.by_key.write().remove(&file.key);
        let mut state = file.state.lock();
        state.is_removed = true;
        state.forget_pages(|index, entry| self.invalidated(file.key, index, entry));
        self.account(&mut state);
    }

    /// Returns the file of that key, if it is still known.
    pub fn file(&self, key: FileKey) -> Option<Arc<File>> {
        self.by_key.read().get(&key).cloned()
    }

    /// Returns a version that was never given out before; None when all have been given out.
    pub fn next_version(&self) -> Option<Version> {
        let step = u64::from(keeps(Rule::Version));
        let version = Version(self.next_version.fetch_add(step, Ordering::Relaxed));
        (version <= VERSION_MAX).then_some(version)
    }

    /// Gives out no version below `next` from now on: a predecessor gave them out in the session
    /// that is being resumed.
    pub(crate) fn continue_versions(&self, next: Version) {
        self.next_version.fetch_max(next.0, Ordering::Relaxed);
    }

    /// Another party has given out versions that this catalog does not know. Skips enough versions
    /// that those are among them.
    pub(crate) fn skip_versions(&self) {
        self.next_version.fetch_add(SKIPPED_VERSIONS, Ordering::AcqRel);
    }

    /// Returns the version that will be given out next.
    pub fn version(&self) -> Version {
        Version(self.next_version.load(Ordering::Acquire))
    }

    /// Returns the number of lenders that there can be.
    pub fn lenders(&self) -> u8 {
        self.lenders.len() as u8
    }

    /// Returns the place for new pages at that lender, if pages can be put there.
    pub fn place(&self, lender: u8) -> Option<Place> {
        let word = self.word(lender);
        word.is_usable().then_some(Place { lender, epoch: word.epoch() })
    }

    /// Returns a bit mask of the lenders at which pages can be put: bit N stands for lender N.
    pub fn usable(&self) -> u64 {
        let bit = |lender: u8| u64::from(self.word(lender).is_usable()) << lender;
        (0..self.lenders()).map(bit).sum()
    }

    /// Returns whether pages that were sent to that place can be requested, now or perhaps later.
    pub fn standing(&self, place: Place) -> Standing {
        self.word(place.lender).standing(place.epoch)
    }

    fn word(&self, lender: u8) -> LenderWord {
        self.lenders
            .get(usize::from(lender))
            .map_or(LenderWord::default(), |lender| LenderWord(lender.word.load(Ordering::Acquire)))
    }

    fn transition(&self, lender: u8, to: impl Fn(LenderWord) -> Option<LenderWord>) -> bool {
        let word = &self.lenders[usize::from(lender)].word;
        word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| to(LenderWord(word)).map(|word| word.0)).is_ok()
    }

    /// The lender can be used from now on, and has no pages yet. Returns false if it is up or
    /// suspended already.
    pub fn lender_up(&self, lender: u8) -> bool {
        self.transition(lender, LenderWord::up)
    }

    /// The connection is lost. The lender's pages are of no use until [`Catalog::lender_resume`],
    /// and are remembered until [`Catalog::lender_lost`].
    pub fn lender_suspend(&self, lender: u8) -> bool {
        self.transition(lender, LenderWord::suspend)
    }

    /// The lender is back and has kept the session. Entries that are still present are current,
    /// because every change meanwhile has invalidated the entries of its pages. Returns false if
    /// the lender was not suspended: then no earlier page may be requested.
    pub fn lender_resume(&self, lender: u8) -> bool {
        self.transition(lender, LenderWord::resume)
    }

    /// The lender is lost, with all its pages. Its epoch is incremented; no scan is needed. Returns
    /// false if the lender was down already.
    pub fn lender_lost(&self, lender: u8) -> bool {
        self.lose(lender, LenderWord::lost)
    }

    /// A suspended lender is lost, with all its pages. Returns false if the lender is up, or was
    /// down already.
    pub(crate) fn lender_lost_if_suspended(&self, lender: u8) -> bool {
        self.lose(lender, |word| word.is_suspended().then(|| word.lost()).flatten())
    }

    fn lose(&self, lender: u8, to: impl Fn(LenderWord) -> Option<LenderWord>) -> bool {
        let lost = self.transition(lender, to);
        if lost {
            *self.lenders[usize::from(lender)].drops.lock() = Vec::new();
        }
        lost
    }

    /// Records what the lender's gate lets through from now on. Returns false if nothing changed.
    pub fn lender_gate(&self, lender: u8, passes: Passes) -> bool {
        self.transition(lender, |word| word.gate(passes))
    }

    /// Returns whether the lender is connected, used or not.
    pub fn is_up(&self, lender: u8) -> bool {
        self.word(lender).is_up()
    }

    /// Returns whether the lender is bypassed for gets because it is too slow.
    pub fn is_bypassed(&self, lender: u8) -> bool {
        self.word(lender).is_bypassed()
    }

    /// A predecessor left a session with pages at the lender. Entries that are restored under that
    /// epoch become valid once the session is resumed.
    pub(crate) fn lender_expect(&self, lender: u8, epoch: u8) -> bool {
        self.transition(lender, |word| word.expect(epoch))
    }

    /// Returns the lender's epoch, in any state.
    pub fn epoch(&self, lender: u8) -> u8 {
        self.word(lender).epoch()
    }

    /// Returns whether the lender is disconnected and may come back with its pages.
    pub(crate) fn is_suspended(&self, lender: u8) -> bool {
        self.word(lender).is_suspended()
    }

    /// Frees the memory of entries whose lender is lost. These entries are invalid already, so this
    /// may take a while.
    pub fn sweep(&self) {
        for file in self.files() {
            let mut state = file.state.lock();
            state.sweep(|place| self.standing(place) != Standing::Lost);
            self.account(&mut state);
        }
    }

    /// Returns whether entries may be added.
    pub fn has_room(&self) -> bool {
        self.entry_bytes.load(Ordering::Relaxed) < self.entry_bytes_max
    }

    /// Records a use of the file.
    pub fn touch(&self, file: &File) {
        // Uses are not counted: all files that are used between two reclaims are equal.
        file.used.store(self.reclaims.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// If entries take all the memory that they may, forgets the entries of whole files until there
    /// is room again. The least recently used files go first, and their lenders get drops. Returns
    /// the number of forgotten pages. Puma 2015, §3.4.1, bounds the catalog in the same way.
    pub fn reclaim(&self) -> u64 {
        if self.has_room() {
            return 0;
        }
        let aim = self.entry_bytes_max / RECLAIM_SHARE.1 * RECLAIM_SHARE.0;
        self.reclaims.fetch_add(1, Ordering::Relaxed);
        let mut files = self.files();
        files.sort_by_key(|file| file.used.load(Ordering::Relaxed));
        let mut forgotten = 0;
        for file in files {
            if self.entry_bytes.load(Ordering::Relaxed) <= aim {
                break;
            }
            let mut state = file.state.lock();
            forgotten += state.live_pages();
            state.forget_pages(|index, entry| self.invalidated(file.key, index, entry));
            self.account(&mut state);
        }
        forgotten
    }

    /// Updates the totals for a file's entries, and for their control groups. Must be called after
    /// the entries may have grown or shrunk.
    pub fn account(&self, state: &mut FileState) {
        let now = (state.memory_bytes(), state.live_pages());
        let before = std::mem::replace(&mut state.accounted, now);
        // Correct for growth and shrinkage, because the addition wraps.
        if now.0 != before.0 {
            self.entry_bytes.fetch_add(now.0.wrapping_sub(before.0), Ordering::Relaxed);
        }
        if now.1 != before.1 {
            self.live_pages.fetch_add(now.1.wrapping_sub(before.1), Ordering::Relaxed);
        }
        state.take_moves().for_each(|moved| self.groups.moved(moved.group, moved.lent, moved.got));
    }

    /// Returns the number of pages, in all files, that are available without the disk.
    pub fn live_pages(&self) -> u64 {
        self.live_pages.load(Ordering::Relaxed)
    }

    /// Returns the total bytes of memory that [`Catalog::account`] has summed up.
    #[cfg(all(test, feature = "shuttle"))]
    pub(crate) fn accounted_bytes(&self) -> u64 {
        self.entry_bytes.load(Ordering::Relaxed)
    }

    fn files(&self) -> Vec<Arc<File>> {
        let mut files: Vec<_> = self.by_key.read().values().cloned().collect();
        // Sorted, so that every run of a simulation is the same.
        files.sort_unstable_by_key(|file| file.key.0);
        files
    }

    /// The entry of a page was invalidated. Records a drop for its lender, also for a suspended
    /// one. A busy page is recorded too, because its put may never be answered. If the put is
    /// answered after the Drop, that answer causes one more drop.
    pub(crate) fn invalidated(&self, file: FileKey, index: u32, entry: Entry) {
        self.wants_bytes(PageId { file, index });
        if let Entry::Busy { place, version, .. } | Entry::Present { place, version, .. } = entry
            && self.standing(place) != Standing::Lost
        {
            self.drop_at_lender(place.lender, PageId { file, index }, version);
        }
    }

    /// Records a page that its lender keeps in vain.
    pub(crate) fn drop_at_lender(&self, lender: u8, id: PageId, version: Version) {
        let mut drops = self.lenders[usize::from(lender)].drops.lock();
        if drops.len() < DROPS_MAX {
            drops.push(WireKey::new(id, version));
        }
    }

    /// Moves up to `room` recorded drops for that lender to the end of `into`. Moves none while the
    /// lender is not up: they are kept until it is.
    pub fn take_drops(&self, lender: u8, room: usize, into: &mut Vec<WireKey>) {
        if !self.is_up(lender) {
            return;
        }
        let mut drops = self.lenders[usize::from(lender)].drops.lock();
        let keep = drops.len() - drops.len().min(room);
        into.extend(drops.drain(keep..));
    }

    /// Returns the live pages in all files, the bytes that their entries take, and the number of
    /// files.
    pub fn census(&self) -> report::Catalog {
        let files = self.files();
        let mut census = report::Catalog { files: files.len() as u64, ..report::Catalog::default() };
        for file in files {
            let state = file.state.lock();
            census.live_pages += state.live_pages();
            census.entry_bytes += state.memory_bytes();
        }
        census
    }
}

#[cfg(test)]
mod tests;
