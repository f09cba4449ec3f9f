use super::*;
use crate::takeover::Keep;
use crate::takeover::layout::header;
use crate::takeover::memory::Memory;
use borrower::Borrower;
use rustix::fs::{Mode, OFlags};
use std::sync::atomic::Ordering;

fn found(path: &std::path::Path) -> Found {
    let fd = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let stat = stat(&fd).unwrap();
    Found::new(fd, stat)
}

fn inodes_of(root: &std::path::Path) -> Inodes {
    let borrower = Borrower::start(borrower::Config::default(), None).unwrap();
    let keep = Keep::new(Memory::create().unwrap().into(), None).unwrap();
    let descriptors = crate::inode::descriptors::Descriptors::new(1024, 2, 10, 0);
    Inodes::new(found(root), borrower, keep, descriptors, None)
}

/// Keys begin anew after 4 billion files; a successor must be able to go on from there.
#[test]
fn a_successor_is_left_a_key_also_behind_the_last_one() {
    let folder = tempfile::tempdir().unwrap();
    let inodes = inodes_of(folder.path());
    inodes.borrower.keys_from(page::FileKey(u32::MAX));
    for expected in [0, 2, 3] {
        let path = folder.path().join(expected.to_string());
        std::fs::write(&path, "").unwrap();
        let _ = inodes.reference(found(&path)).unwrap();
        assert_eq!(inodes.keep.memory.header(header::NEXT_KEY).load(Ordering::Acquire), expected);
    }
}

/// Another file system may get the device number of one that was mounted in SOURCE.
#[test]
fn what_is_known_of_another_file_system_ends_with_its_inode() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "ours").unwrap();
    let inodes = inodes_of(folder.path());
    let ours = inodes.reference(found(&folder.path().join("file"))).unwrap();
    let others = inodes.reference(found(std::path::Path::new("/proc/version"))).unwrap();
    assert!(!ours.is_gone_for_good(), "what lenders have of it may be of use again");
    assert!(others.is_gone_for_good());
    // A name that is gone says the same of ours.
    std::fs::remove_file(folder.path().join("file")).unwrap();
    assert!(ours.is_gone_for_good());
}
