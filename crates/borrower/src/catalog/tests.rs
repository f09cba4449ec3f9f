use super::*;
use crate::catalog::file::{Filter, Source, Verdict};

fn identity(inode: u64) -> FileIdentity {
    FileIdentity { device: 1, inode, generation: 0 }
}

fn with_page(catalog: &Catalog, file: &File) {
    let place = catalog.place(0).unwrap();
    let version = catalog.next_version().unwrap();
    let mut state = file.state.lock();
    state.put(3, place, version, 0);
    assert!(state.put_done(3, version, true));
}

#[test]
fn files_come_back_unless_deleted() {
    let catalog = Catalog::new(1, ENTRY_BYTES_MAX);
    catalog.lender_up(0);
    let file = catalog.adopt(identity(1));
    assert_eq!(catalog.adopt(identity(1)).key(), file.key());
    catalog.retire(&file, false);
    assert!(catalog.file(file.key()).is_some(), "the file still has a user");
    with_page(&catalog, &file);
    catalog.retire(&file, false);
    assert_eq!(catalog.adopt(identity(1)).key(), file.key(), "the file has pages");
    catalog.retire(&file, true);
    assert!(catalog.file(file.key()).is_none());
    let mut drops = Vec::new();
    catalog.take_drops(0, 8, &mut drops);
    assert_eq!(drops.len(), 1, "the lender gets a drop of the deleted file's page");
    let again = catalog.adopt(identity(1));
    assert_ne!(again.key(), file.key(), "a key is not given out twice");
    catalog.retire(&again, false);
    assert!(catalog.file(again.key()).is_none(), "nothing to remember");
}

#[test]
fn the_file_that_was_not_used_for_longest_is_forgotten_first() {
    let catalog = Catalog::new(1, ENTRY_BYTES_MAX);
    catalog.lender_up(0);
    let use_once = |inode| {
        let file = catalog.adopt(identity(inode));
        with_page(&catalog, &file);
        catalog.retire(&file, false);
        file.key()
    };
    let (often, once) = (use_once(1), use_once(2));
    (0..RETIRED_FILES_MAX).for_each(|_| assert_eq!(use_once(1), often));
    assert!(catalog.file(once).is_none() && catalog.file(often).is_some());
    use_once(3);
    assert!(catalog.file(often).is_some());
}

#[test]
fn keys_start_again_behind_the_last_one() {
    let catalog = Catalog::new(1, u64::MAX);
    catalog.keys_from(FileKey(u32::MAX));
    let keys = [1, 2, 3].map(|inode| catalog.adopt(identity(inode)).key());
    assert_eq!(keys, [u32::MAX, 1, 2].map(FileKey));
    assert_eq!(catalog.next_key(), FileKey(3));
}

#[test]
fn a_restored_file_keeps_its_key_and_trusts_no_cached_copy() {
    let catalog = Catalog::new(1, ENTRY_BYTES_MAX);
    let file = catalog.restore(identity(1), FileKey(7), Left::default());
    assert_eq!(catalog.adopt(identity(1)).key(), FileKey(7));
    assert_eq!(catalog.adopt(identity(2)).key(), FileKey(8), "a key is not given out twice");
    let mut state = file.state.lock();
    assert!(state.kernel_stale().is_some(), "the kernel's copies may be stale");
    let event = |state: &mut FileState| state.evict(3, 0, false, |_| Standing::Valid, true, false);
    assert_eq!(event(&mut state), Verdict::Quarantined);
    state.begin_read(
        page::PageRange { first: 3, end: 4 },
        0,
        0,
        |_| Standing::Valid,
        true,
        Filter::Off,
        &mut Vec::new(),
    );
    assert_eq!(event(&mut state), Verdict::Put);
}

#[test]
fn losing_a_lender_invalidates_its_pages_at_once() {
    let catalog = Catalog::new(2, ENTRY_BYTES_MAX);
    assert_eq!(catalog.place(0), None);
    assert!(catalog.lender_up(0));
    let place = catalog.place(0).unwrap();
    assert_eq!(catalog.standing(place), Standing::Valid);
    assert!(catalog.lender_lost(0));
    assert_eq!(catalog.standing(place), Standing::Lost);
    assert!(!catalog.lender_lost(0) && catalog.lender_up(0));
    assert_eq!(catalog.standing(place), Standing::Lost);
    assert_ne!(catalog.place(0).unwrap(), place);
    assert_eq!((catalog.place(1), catalog.place(9)), (None, None));
}

/// Returns the source of a READ of the page at index 3, and the verdict on its eviction.
fn asked(catalog: &Catalog, file: &File) -> (Source, Verdict) {
    let mut sources = Vec::new();
    let mut state = file.state.lock();
    let range = page::PageRange { first: 3, end: 4 };
    state.begin_read(range, 0, 0, |place| catalog.standing(place), true, Filter::Off, &mut sources);
    (sources[0], state.evict(3, 0, false, |place| catalog.standing(place), true, false))
}

#[test]
fn a_suspended_lenders_pages_wait_and_come_back() {
    let catalog = Catalog::new(1, ENTRY_BYTES_MAX);
    catalog.lender_up(0);
    let (file, changed) = (catalog.adopt(identity(1)), catalog.adopt(identity(2)));
    with_page(&catalog, &file);
    with_page(&catalog, &changed);
    assert!(catalog.lender_suspend(0));
    assert_eq!((catalog.place(0), asked(&catalog, &file)), (None, (Source::Backing, Verdict::AlreadyLent)));
    catalog.sweep();
    assert_eq!(catalog.census().live_pages, 2, "nothing is forgotten");
    // A change during the suspension invalidates the entry. The lender gets the drop when it is
    // back.
    catalog.remove(&mut catalog.names.lock(), &changed);
    let mut drops = Vec::new();
    catalog.take_drops(0, 8, &mut drops);
    assert!(drops.is_empty(), "a suspended lender gets no drops");
    assert!(catalog.lender_resume(0) && !catalog.lender_resume(0));
    assert!(matches!(asked(&catalog, &file), (Source::Lender(..), Verdict::AlreadyLent)));
    catalog.take_drops(0, 8, &mut drops);
    assert_eq!((drops.len(), drops[0].id().file), (1, changed.key()));
    // Suspended again, the lender does not come back.
    assert!(catalog.lender_suspend(0));
    catalog.retire(&file, true);
    assert!(catalog.lender_lost(0) && !catalog.lender_resume(0));
    catalog.sweep();
    assert!(catalog.lender_up(0));
    assert_eq!(catalog.census().live_pages, 0);
    drops.clear();
    catalog.take_drops(0, 8, &mut drops);
    assert!(drops.is_empty(), "a new session has nothing to drop");
}

#[test]
fn a_put_under_way_counts_again_when_the_lender_is_back() {
    let catalog = Catalog::new(1, ENTRY_BYTES_MAX);
    catalog.lender_up(0);
    let file = catalog.adopt(identity(1));
    let version = catalog.next_version().unwrap();
    file.state.lock().put(3, catalog.place(0).unwrap(), version, 0);
    catalog.lender_suspend(0);
    catalog.lender_resume(0);
    assert!(matches!(asked(&catalog, &file), (Source::Busy(..), Verdict::AlreadyLent)));
    catalog.retire(&file, true);
    let mut drops = Vec::new();
    catalog.take_drops(0, 8, &mut drops);
    assert_eq!(drops[0].version(), version);
}

#[test]
fn a_successor_takes_over_a_session_and_repeats_no_version() {
    let catalog = Catalog::new(1, ENTRY_BYTES_MAX);
    catalog.continue_versions(Version(100));
    assert_eq!(catalog.next_version(), Some(Version(100)));
    assert!(catalog.lender_expect(0, 7) && !catalog.lender_up(0) && catalog.lender_resume(0));
    assert_eq!(catalog.place(0), Some(Place { lender: 0, epoch: 7 }));
}

#[test]
fn a_full_catalog_forgets_whole_files_the_oldest_first() {
    let catalog = Catalog::new(1, 8 * 600);
    catalog.lender_up(0);
    let files: Vec<_> = (0..10).map(|inode| catalog.adopt(identity(inode))).collect();
    for file in &files {
        with_page(&catalog, file);
        catalog.account(&mut file.state.lock());
    }
    assert!(!catalog.has_room());
    // Files that were used since the last reclaim are forgotten last.
    catalog.reclaim();
    assert!(catalog.has_room() && catalog.reclaim() == 0);
    let live: Vec<_> = files.iter().filter(|file| file.state.lock().live_pages() > 0).collect();
    assert!(!live.is_empty());
    let kept = live[0].clone();
    catalog.touch(&kept);
    for file in files.iter().filter(|file| file.state.lock().live_pages() == 0) {
        with_page(&catalog, file);
        catalog.account(&mut file.state.lock());
    }
    assert!(catalog.reclaim() > 0);
    assert_eq!(kept.state.lock().live_pages(), 1);
    let mut drops = Vec::new();
    catalog.take_drops(0, 100, &mut drops);
    let live: u64 = files.iter().map(|file| file.state.lock().live_pages()).sum();
    assert!(drops.len() as u64 + live >= 10, "the lender gets drops of the forgotten pages");
}
