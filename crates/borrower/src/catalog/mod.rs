//! The catalog: every file that the borrower knows, and what lenders have of it.
//!
//! It hands out file keys and versions, neither of them twice, and remembers files whose inode the
//! kernel has forgotten, so that their pages are found again when it comes back. What lenders keep
//! in vain is noted for a Drop message.

pub mod copying;
pub mod entry;
pub mod file;
pub mod lender;
pub mod overtaking;
pub mod rules;
pub mod table;

use crate::backing::FileIdentity;
use crate::catalog::entry::{Entry, Place, Standing, VERSION_MAX};
use crate::catalog::file::{FileState, Left};
use crate::catalog::lender::LenderWord;
use crate::catalog::rules::{Rule, keeps};
use crate::policy::gate::Passes;
use crate::put::groups::Groups;
use hashbrown::HashMap;
use page::{FileKey, PageId, Version};
use std::collections::VecDeque;
use std::sync::Arc;
use sync::atomic::{AtomicU32, AtomicU64, Ordering};
use sync::{Condvar, Mutex, RwLock};
use tap::CopyHints;
use wire::WireKey;

/// Files remembered that the kernel has forgotten. At some 400 bytes each beside their entries, 100
/// MiB at the most.
const RETIRED_FILES_MAX: usize = if cfg!(test) { 4 } else { 1 << 18 };

/// Bytes of memory that all entries may take, unless something else is said: those of 128 GiB lent.
/// Beyond it the files that were not used for longest are forgotten; until that is done, no page
/// more is lent or lifted out of quarantine.
pub const ENTRY_BYTES_MAX: u64 = 256 << 20;

/// Drops waiting to be told to each lender. Beyond it they are not told: the lender finds out when
/// the pages grow old.
const DROPS_MAX: usize = 1 << 14;

/// Versions left out after others were given out that this catalog knows nothing of: 32 TiB of
/// pages since then. There are 2^44.
const SKIPPED_VERSIONS: u64 = 1 << 33;

/// Whole files are forgotten until the entries take no more than this part of what they may, when
/// they have reached it: 7 in 8.
const RECLAIM_SHARE: (u64, u64) = (7, 8);

/// A file in the catalog.
pub struct File {
    key: FileKey,
    identity: FileIdentity,
    users: AtomicU32,
    /// How often it is in [`Names::retired`].
    retired: AtomicU32,
    /// The catalog's count of reclaims when it was last read or a page of it evicted.
    used: AtomicU64,
    pub(crate) state: Mutex<FileState>,
    /// A change has ended.
    pub(crate) settled: Condvar,
}

impl File {
    /// The name that the kernel (as the inode's generation) and the lenders know it by.
    pub fn key(&self) -> FileKey {
        self.key
    }

    /// What is known of its pages, for who drives a [`crate::read::state::ReadState`].
    pub fn lock(&self) -> sync::MutexGuard<'_, FileState> {
        self.state.lock()
    }
}

/// The catalog.
pub struct Catalog {
    names: Mutex<Names>,
    /// The same files by key, apart because every event asks here.
    by_key: RwLock<HashMap<FileKey, Arc<File>>>,
    next_version: AtomicU64,
    lenders: Vec<Lender>,
    entry_bytes: AtomicU64,
    live_pages: AtomicU64,
    entry_bytes_max: u64,
    /// Reclaims so far.
    reclaims: AtomicU64,
    /// In whose names pages are lent.
    pub groups: Groups,
    /// Where it is said which pages' bytes are not wanted at their next eviction.
    copy_hints: Option<Arc<dyn CopyHints>>,
}

/// What is known of one lender.
#[derive(Default)]
struct Lender {
    /// A [`LenderWord`].
    word: AtomicU32,
    /// What it keeps in vain.
    drops: Mutex<Vec<WireKey>>,
}

struct Names {
    by_identity: HashMap<FileIdentity, Arc<File>>,
    retired: VecDeque<FileKey>,
    next_key: u32,
}

impl Catalog {
    /// A catalog for that many lenders, none of them up, whose entries take no more memory than
    /// `entry_bytes_max`.
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

    /// A catalog with hints for the program that sees the evictions.
    pub fn with_hints(self, copy_hints: Option<Arc<dyn CopyHints>>) -> Catalog {
        Catalog { copy_hints, ..self }
    }

    /// Whether somebody takes hints.
    pub fn takes_hints(&self) -> bool {
        self.copy_hints.is_some()
    }

    /// Nothing is to be sent of this page, which the kernel caches now: at its next eviction its
    /// bytes are not wanted.
    pub fn wants_no_bytes(&self, id: PageId) {
        if let Some(hints) = &self.copy_hints {
            hints.omit(id.file.0, id.index);
        }
    }

    /// They are wanted, should they have been not.
    pub fn wants_bytes(&self, id: PageId) {
        if let Some(hints) = &self.copy_hints {
            hints.copy(id.file.0, id.index);
        }
    }

    /// The bytes of all pages are wanted.
    pub fn wants_all_bytes(&self) {
        if let Some(hints) = &self.copy_hints {
            hints.copy_all();
        }
    }

    /// The file of that identity.
    pub fn adopt(&self, identity: FileIdentity) -> Arc<File> {
        let mut names = self.names.lock();
        if let Some(file) = names.by_identity.get(&identity) {
            file.users.fetch_add(1, Ordering::Relaxed);
            return file.clone();
        }
        let mut by_key = self.by_key.write();
        // Keys repeat after 4 billion files; those still known are stepped over.
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

    /// A file that a daemon before this one had given that key to, and that the kernel still knows
    /// by it. `left` is how that daemon left it. To be called before anything else is asked of the
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

    /// The key that the next file is given, if no file has it. 0: the one behind it.
    pub fn next_key(&self) -> FileKey {
        FileKey(self.names.lock().next_key)
    }

    /// Gives out no key below this one. To be called before any file is adopted.
    pub fn keys_from(&self, key: FileKey) {
        let mut names = self.names.lock();
        names.next_key = names.next_key.max(key.0);
    }

    /// One user less. The last one leaves a file that is remembered if it has pages and is not
    /// `deleted`.
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
            // One that has come back and gone again is in the list once more, further behind.
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
        state.forget_pages(|index, entry| self.void(file.key, index, entry));
        self.account(&mut state);
    }

    /// The file of that key, if it is still known.
    pub fn file(&self, key: FileKey) -> Option<Arc<File>> {
        self.by_key.read().get(&key).cloned()
    }

    /// A version that was never given out before; None when there are no more.
    pub fn next_version(&self) -> Option<Version> {
        let step = u64::from(keeps(Rule::Version));
        let version = Version(self.next_version.fetch_add(step, Ordering::Relaxed));
        (version <= VERSION_MAX).then_some(version)
    }

    /// Gives out no version below `next` from now on: a predecessor has, in the session that is
    /// being resumed.
    pub fn continue_versions(&self, next: Version) {
        self.next_version.fetch_max(next.0, Ordering::Relaxed);
    }

    /// Somebody has given out versions that this catalog knows nothing of: leaves out so many that
    /// those are among them.
    pub fn skip_versions(&self) {
        self.next_version.fetch_add(SKIPPED_VERSIONS, Ordering::AcqRel);
    }

    /// The version that will be given out next.
    pub fn version(&self) -> Version {
        Version(self.next_version.load(Ordering::Acquire))
    }

    /// How many lenders there can be.
    pub fn lenders(&self) -> u8 {
        self.lenders.len() as u8
    }

    /// Where new pages go, if they can be put at that lender.
    pub fn place(&self, lender: u8) -> Option<Place> {
        let word = self.word(lender);
        word.is_usable().then_some(Place { lender, epoch: word.epoch() })
    }

    /// Of all lenders that pages can be put at the bit of their number.
    pub fn usable(&self) -> u64 {
        let bit = |lender: u8| u64::from(self.word(lender).is_usable()) << lender;
        (0..self.lenders()).map(bit).sum()
    }

    /// Whether what was sent there can be asked for, now or perhaps later.
    pub fn standing(&self, place: Place) -> Standing {
        self.word(place.lender).standing(place.epoch)
    }

    fn word(&self, lender: u8) -> LenderWord {
        self.lenders
            .get(usize::from(lender))
            .map_or(LenderWord::default(), |lender| LenderWord(lender.word.load(Ordering::Acquire)))
    }

    fn turn(&self, lender: u8, turn: impl Fn(LenderWord) -> Option<LenderWord>) -> bool {
        let word = &self.lenders[usize::from(lender)].word;
        word.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| turn(LenderWord(word)).map(|word| word.0)).is_ok()
    }

    /// The lender can be used from now on, and has nothing yet. False: it is up or suspended
    /// already.
    pub fn lender_up(&self, lender: u8) -> bool {
        self.turn(lender, LenderWord::up)
    }

    /// The connection is lost. What the lender has is of no use until [`Catalog::lender_resume`],
    /// and is remembered until [`Catalog::lender_lost`].
    pub fn lender_suspend(&self, lender: u8) -> bool {
        self.turn(lender, LenderWord::suspend)
    }

    /// The lender is back and has kept the session. What is on record as present is current:
    /// whatever changed a page meanwhile has taken its entry off. False: it was not suspended, and
    /// nothing of before may be asked for.
    pub fn lender_resume(&self, lender: u8) -> bool {
        self.turn(lender, LenderWord::resume)
    }

    /// The lender is lost, and all pages it had: no scan, its epoch moves on. False: it was down
    /// already.
    pub fn lender_lost(&self, lender: u8) -> bool {
        self.lose(lender, LenderWord::lost)
    }

    /// A lender that is away is lost, with all pages it had. False: it is there, or was down
    /// already.
    pub fn lender_lost_if_away(&self, lender: u8) -> bool {
        self.lose(lender, |word| word.is_suspended().then(|| word.lost()).flatten())
    }

    fn lose(&self, lender: u8, turn: impl Fn(LenderWord) -> Option<LenderWord>) -> bool {
        let lost = self.turn(lender, turn);
        if lost {
            *self.lenders[usize::from(lender)].drops.lock() = Vec::new();
        }
        lost
    }

    /// What the lender's gate lets through from now on. False: that was known.
    pub fn lender_gate(&self, lender: u8, passes: Passes) -> bool {
        self.turn(lender, |word| word.gate(passes))
    }

    /// Whether the lender is there, used or not.
    pub fn is_up(&self, lender: u8) -> bool {
        self.word(lender).is_up()
    }

    /// Whether the lender is too slow to be asked.
    pub fn is_shunned(&self, lender: u8) -> bool {
        self.word(lender).is_shunned()
    }

    /// A predecessor left a session with pages at the lender; what is restored under that epoch is
    /// valid once the session is resumed.
    pub fn lender_expect(&self, lender: u8, epoch: u8) -> bool {
        self.turn(lender, |word| word.expect(epoch))
    }

    /// The lender's epoch, whatever it is doing.
    pub fn epoch(&self, lender: u8) -> u8 {
        self.word(lender).epoch()
    }

    /// Whether the lender is away and may come back with its pages.
    pub fn is_suspended(&self, lender: u8) -> bool {
        self.word(lender).is_suspended()
    }

    /// Gives back the memory of entries whose lender is lost. They are void already; this may take
    /// its time.
    pub fn sweep(&self) {
        for file in self.files() {
            let mut state = file.state.lock();
            state.sweep(|place| self.standing(place) != Standing::Lost);
            self.account(&mut state);
        }
    }

    /// Whether entries may be added.
    pub fn has_room(&self) -> bool {
        self.entry_bytes.load(Ordering::Relaxed) < self.entry_bytes_max
    }

    /// The file is being used.
    pub fn touch(&self, file: &File) {
        // Not counted up by uses: files that are used between two reclaims are all alike.
        file.used.store(self.reclaims.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// If entries take all the memory that they may, forgets those of whole files, the ones not
    /// used for longest first, until there is room again; their lenders are told. Returns how many
    /// pages were forgotten. Puma 2015, §3.4.1, bounds the catalog likewise.
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
            state.forget_pages(|index, entry| self.void(file.key, index, entry));
            self.account(&mut state);
        }
        forgotten
    }

    /// Takes note of what a file's entries take, and of whose they are, after they may have become
    /// more or fewer.
    pub fn account(&self, state: &mut FileState) {
        let now = (state.memory_bytes(), state.live_pages());
        let before = std::mem::replace(&mut state.accounted, now);
        // Both ways: it wraps.
        if now.0 != before.0 {
            self.entry_bytes.fetch_add(now.0.wrapping_sub(before.0), Ordering::Relaxed);
        }
        if now.1 != before.1 {
            self.live_pages.fetch_add(now.1.wrapping_sub(before.1), Ordering::Relaxed);
        }
        state.take_moves().for_each(|moved| self.groups.moved(moved.group, moved.lent, moved.got));
    }

    /// Pages that need not come from the disk, in all files.
    pub fn live_pages(&self) -> u64 {
        self.live_pages.load(Ordering::Relaxed)
    }

    /// What [`Catalog::account`] has summed up.
    #[cfg(all(test, feature = "shuttle"))]
    pub fn accounted_bytes(&self) -> u64 {
        self.entry_bytes.load(Ordering::Relaxed)
    }

    fn files(&self) -> Vec<Arc<File>> {
        let mut files: Vec<_> = self.by_key.read().values().cloned().collect();
        // In the same order in every run, so that a simulation repeats itself.
        files.sort_unstable_by_key(|file| file.key.0);
        files
    }

    /// The entry of a page was voided: notes what its lender keeps in vain, also of a lender that
    /// is away. What is busy is noted too, as its put may never be answered; if it is, and comes
    /// behind the Drop, that answer has it dropped once more.
    pub fn void(&self, file: FileKey, index: u32, entry: Entry) {
        self.wants_bytes(PageId { file, index });
        if let Entry::Busy { place, version, .. } | Entry::Present { place, version, .. } = entry
            && self.standing(place) != Standing::Lost
        {
            self.drop_at_lender(place.lender, PageId { file, index }, version);
        }
    }

    /// Notes a page that its lender keeps in vain.
    pub fn drop_at_lender(&self, lender: u8, id: PageId, version: Version) {
        let mut drops = self.lenders[usize::from(lender)].drops.lock();
        if drops.len() < DROPS_MAX {
            drops.push(WireKey::new(id, version));
        }
    }

    /// Moves up to `room` noted drops for that lender into `into`. None while it is not there to be
    /// told: they are kept until it is.
    pub fn take_drops(&self, lender: u8, room: usize, into: &mut Vec<WireKey>) {
        if !self.is_up(lender) {
            return;
        }
        let mut drops = self.lenders[usize::from(lender)].drops.lock();
        let keep = drops.len() - drops.len().min(room);
        into.extend(drops.drain(keep..));
    }

    /// Pages live in all files, bytes that their entries take, and files known.
    pub fn census(&self) -> Census {
        let files = self.files();
        let mut census = Census { files: files.len() as u64, ..Census::default() };
        for file in files {
            let state = file.state.lock();
            census.live_pages += state.live_pages();
            census.entry_bytes += state.memory_bytes();
        }
        census
    }
}

/// What the catalog holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Files known.
    pub files: u64,
    /// Pages that need not come from the disk.
    pub live_pages: u64,
    /// Bytes of memory of their entries.
    pub entry_bytes: u64,
}

#[cfg(test)]
mod tests;
