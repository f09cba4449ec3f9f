//! The place of a file's pages on the disk, as the file system has reported it. No I/O.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use page::PAGE_SIZE;
use std::hash::Hash;

/// A contiguous piece of a file on the disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins in the file.
    pub logical: u64,
    /// Where it begins on the disk.
    pub physical: u64,
    /// How long it is.
    pub len: u64,
    /// Whether the disk has the file's plain bytes there, now and until the file is changed.
    pub is_plain: bool,
}

/// The place of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In one piece at this page of the disk.
    At(u64),
    /// Not on the disk, not settled there, or not in plain form: a hole, delayed allocation,
    /// unwritten, encrypted, inline, shared.
    Unsettled,
    /// In several pieces, or across pages of the disk.
    Unaligned,
}

/// The known extents of a file.
#[derive(Clone, Debug, Default)]
pub struct FileMap {
    /// In the order of the file, without overlaps.
    extents: Vec<Extent>,
    /// Byte ranges of the file for which `extents` is complete: in order, without overlaps.
    asked: Vec<(u64, u64)>,
}

/// The maximum number of stored extents of one file. Beyond it all of them are forgotten, and
/// looked up again.
pub const EXTENTS_MAX: usize = 4096;

impl FileMap {
    /// Whether the place of the page is known.
    pub fn knows(&self, index: u64) -> bool {
        let Some((start, end)) = bytes_of(index) else { return true };
        self.asked.iter().any(|(from, to)| *from <= start && end <= *to)
    }

    /// Stores everything that the file system has reported about the bytes from `start` to `end`.
    pub fn learn(&mut self, start: u64, end: u64, extents: &[Extent]) {
        if self.extents.len() + extents.len() > EXTENTS_MAX || self.asked.len() >= EXTENTS_MAX {
            *self = FileMap::default();
        }
        // An extent may reach beyond the requested range, and be known already.
        self.extents.retain(|old| {
            !extents.iter().any(|new| old.logical < new.logical + new.len && new.logical < old.logical + old.len)
        });
        self.extents.extend_from_slice(&extents[..extents.len().min(EXTENTS_MAX)]);
        self.extents.sort_unstable_by_key(|extent| extent.logical);
        self.asked.push((start, end));
        self.asked.sort_unstable();
        self.asked.dedup_by(|next, before| {
            let touches = next.0 <= before.1;
            if touches {
                before.1 = before.1.max(next.1);
            }
            touches
        });
    }

    /// The place of a page, which must be known.
    pub fn place(&self, index: u64) -> Place {
        let Some((start, end)) = bytes_of(index) else { return Place::Unsettled };
        let first = self.extents.partition_point(|extent| extent.logical + extent.len <= start);
        let (mut at, mut physical) = (start, None);
        for extent in &self.extents[first..] {
            if extent.logical > at || at >= end {
                break;
            }
            if !extent.is_plain {
                return Place::Unsettled;
            }
            let here = extent.physical + (at - extent.logical);
            if physical.is_some_and(|physical| physical + (at - start) != here) {
                return Place::Unaligned;
            }
            physical.get_or_insert(here);
            at = extent.logical + extent.len;
        }
        match physical {
            // A hole follows.
            Some(_) if at < end => Place::Unsettled,
            Some(physical) if physical.is_multiple_of(PAGE_SIZE as u64) => Place::At(physical / PAGE_SIZE as u64),
            Some(_) => Place::Unaligned,
            None => Place::Unsettled,
        }
    }
}

/// The maximum number of files. Other limits count the results of all files since they were
/// forgotten last: extents, and requested ranges. Beyond any limit all files are forgotten, and
/// looked up again.
const FILES_MAX: usize = 4096;
const LEARNED_MAX: usize = 1 << 17;

/// The known extents of a file system's files, each valid as long as the file has the same shape.
pub struct FileMaps<K, S> {
    files: HashMap<K, (S, FileMap)>,
    learned: usize,
}

impl<K, S> Default for FileMaps<K, S> {
    fn default() -> FileMaps<K, S> {
        FileMaps { files: HashMap::new(), learned: 0 }
    }
}

impl<K: Eq + Hash, S: PartialEq> FileMaps<K, S> {
    /// The known extents of that file.
    pub fn of(&mut self, key: K, shape: S) -> &mut FileMap {
        let is_full = self.files.len() >= FILES_MAX && !self.files.contains_key(&key);
        if is_full || self.learned >= LEARNED_MAX {
            *self = FileMaps::default();
        }
        match self.files.entry(key) {
            Entry::Occupied(known) if known.get().0 == shape => &mut known.into_mut().1,
            entry => &mut entry.insert((shape, FileMap::default())).into_mut().1,
        }
    }

    /// Counts so many more results of the file system.
    pub fn learned(&mut self, count: usize) {
        self.learned += count;
    }

    /// Forgets a file, because its extents were wrong.
    pub fn forget(&mut self, key: &K) {
        self.files.remove(key);
    }
}

fn bytes_of(index: u64) -> Option<(u64, u64)> {
    let start = index.checked_mul(PAGE_SIZE as u64)?;
    Some((start, start.checked_add(PAGE_SIZE as u64)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn extent(logical: u64, physical: u64, len: u64) -> Extent {
        Extent { logical, physical, len, is_plain: true }
    }

    #[test]
    fn pages_of_whole_and_of_broken_extents() {
        let mut map = FileMap::default();
        assert!(!map.knows(0));
        let encrypted = Extent { is_plain: false, ..extent(4 * PAGE, 90 * PAGE, PAGE) };
        map.learn(0, 20 * PAGE, &[extent(0, 10 * PAGE, 3 * PAGE), encrypted, extent(5 * PAGE, 20 * PAGE + 512, PAGE)]);
        let places: Vec<_> = (0..6).map(|index| map.place(index)).collect();
        let at = |page| Place::At(page);
        assert_eq!(places, [at(10), at(11), at(12), Place::Unsettled, Place::Unsettled, Place::Unaligned]);
        assert!(map.knows(19) && !map.knows(20) && map.knows(u64::MAX));
        assert_eq!(map.place(u64::MAX), Place::Unsettled);
    }

    #[test]
    fn a_page_of_small_blocks() {
        let mut map = FileMap::default();
        let blocks = [
            extent(0, 8 * PAGE, 1024),
            extent(1024, 8 * PAGE + 1024, 3072),
            extent(PAGE, 12 * PAGE, 1024),
            extent(PAGE + 1024, 20 * PAGE, 3072),
            extent(2 * PAGE, 30 * PAGE, 2048),
        ];
        map.learn(0, 3 * PAGE, &blocks);
        assert_eq!([0, 1, 2].map(|index| map.place(index)), [Place::At(8), Place::Unaligned, Place::Unsettled]);
    }

    #[test]
    fn later_reports_count_and_memory_is_bounded() {
        let mut map = FileMap::default();
        map.learn(0, PAGE, &[extent(0, 10 * PAGE, 4 * PAGE)]);
        assert!(!map.knows(1));
        map.learn(PAGE, 8 * PAGE, &[extent(0, 50 * PAGE, 4 * PAGE), extent(6 * PAGE, 70 * PAGE, PAGE)]);
        assert_eq!([0, 3, 6].map(|index| map.place(index)), [Place::At(50), Place::At(53), Place::At(70)]);
        assert_eq!((map.asked.len(), map.extents.len()), (1, 2));
        for nth in 0..3 * EXTENTS_MAX as u64 {
            let start = nth * 2 * PAGE;
            map.learn(start, start + PAGE, &[extent(start, start, PAGE)]);
            assert!(map.knows(nth * 2) && map.place(nth * 2) == Place::At(nth * 2));
            assert!(map.extents.len() <= EXTENTS_MAX && map.asked.len() <= EXTENTS_MAX);
        }
        let many: Vec<_> = (0..2 * EXTENTS_MAX as u64).map(|nth| extent(nth * PAGE, nth * PAGE, PAGE)).collect();
        map.learn(0, many.len() as u64 * PAGE, &many);
        assert_eq!(map.extents.len(), EXTENTS_MAX);
    }

    #[test]
    fn of_many_files_not_all_is_remembered() {
        let mut maps = FileMaps::default();
        let mut learn = |file: u32, shape: u8, extents: usize| {
            let pieces: Vec<_> = (0..extents as u64).map(|nth| extent(nth * PAGE, 2 * nth * PAGE, PAGE)).collect();
            let map = maps.of(file, shape);
            let knew = map.knows(0);
            map.learn(0, PAGE * extents as u64, &pieces);
            maps.learned(extents + 1);
            let remembered = maps.files.values().map(|(_, map)| map.extents.len() + map.asked.len()).sum::<usize>();
            assert!(remembered <= LEARNED_MAX + EXTENTS_MAX && maps.files.len() <= FILES_MAX);
            knew
        };
        assert!(!learn(0, 0, 3) && learn(0, 0, 3));
        assert!(!learn(0, 1, 3) && learn(0, 1, 3), "it has changed");
        // Each file with the maximum number of extents; and many files with one each.
        assert!((1..100).all(|file| !learn(file, 0, EXTENTS_MAX)));
        assert!(!learn(0, 1, 3), "forgotten meanwhile");
        assert!((100..100 + 2 * FILES_MAX as u32).all(|file| !learn(file, 0, 1)));
        assert!(!learn(0, 1, 3), "forgotten again");
    }
}
