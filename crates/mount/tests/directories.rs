//! Reading directories through a real mount.

mod support;

use rustix::fs::{Dir, Mode, OFlags, openat};
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use support::*;

#[test]
fn a_hundred_thousand_entries() {
    if !can_mount("a_hundred_thousand_entries") {
        return;
    }
    const COUNT: usize = 100_000;
    let m = Mounted::with(|config| config.inode_descriptors_max = Some(1000));
    // One file with many names is quicker to make than many files; a few of each.
    let directory = m.backing("many");
    fs::create_dir(&directory).unwrap();
    for file in 0..COUNT / 10_000 {
        let first = directory.join(format!("{file}-0"));
        fs::write(&first, b"").unwrap();
        for link in 1..10_000 {
            fs::hard_link(&first, directory.join(format!("{file}-{link}"))).unwrap();
        }
    }
    for round in 0..2 {
        let names: Vec<_> = fs::read_dir(m.path("many")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), COUNT, "round {round}");
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), COUNT);
    }
    assert!(m.mount().status().requests.contains_key("readdirplus"));
    drop(m);
}

/// Names alone cost no lookups; who looks at what it has listed is given attributes with the next
/// directory.
#[test]
fn listings_have_attributes_for_tasks_that_use_them() {
    if !can_mount("attributes_come_for_those_who_look") {
        return;
    }
    const COUNT: u64 = 50;
    let m = Mounted::through();
    for directory in ["a", "b"] {
        fs::create_dir(m.backing(directory)).unwrap();
        for file in 0..COUNT {
            fs::write(m.backing(format!("{directory}/{file}")), b"").unwrap();
        }
    }
    let lookups = || m.mount().status().requests.get("lookup").copied().unwrap_or_default();
    let names = |directory| fs::read_dir(m.path(directory)).unwrap().map(|entry| entry.unwrap().path()).collect();
    let listed: Vec<_> = names("a");
    assert_eq!(listed.len() as u64, COUNT);
    let inodes = m.mount().status().inodes;
    assert!(inodes < COUNT, "{inodes} inodes after names were listed");
    fs::symlink_metadata(&listed[0]).unwrap();
    let listed: Vec<_> = names("b");
    let (inodes, before) = (m.mount().status().inodes, lookups());
    assert!(inodes >= COUNT, "{inodes} inodes after attributes were listed");
    for path in &listed {
        fs::symlink_metadata(path).unwrap();
    }
    assert_eq!(lookups(), before, "the listing has brought them");
}

#[test]
fn positions_can_be_returned_to() {
    if !can_mount("positions_can_be_returned_to") {
        return;
    }
    let m = Mounted::through();
    for index in 0..3000 {
        fs::write(m.backing(format!("file-with-a-name-{index}")), b"").unwrap();
    }
    let fd = openat(rustix::fs::CWD, m.path(""), OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
    let mut directory = Dir::new(fd).unwrap();
    let mut seen = Vec::new();
    while let Some(entry) = directory.read() {
        let entry = entry.unwrap();
        seen.push((entry.file_name().to_owned(), entry.offset()));
    }
    assert_eq!(seen.len(), 3002);
    for at in [0, 1, 500, 1499, 2999, 3000, 3001] {
        directory.seek(seen[at].1).unwrap();
        let next = directory.read().map(|entry| entry.unwrap().file_name().to_owned());
        assert_eq!(next.as_ref(), seen.get(at + 1).map(|(name, _)| name), "at {at}");
    }
    directory.rewind();
    assert_eq!(directory.read().unwrap().unwrap().file_name(), seen[0].0.as_c_str());
}

#[test]
fn entries_show_the_right_inodes() {
    if !can_mount("entries_show_the_right_inodes") {
        return;
    }
    let m = Mounted::through();
    for name in ["a", "b"] {
        fs::write(m.path(name), b"").unwrap();
    }
    fs::create_dir(m.path("c")).unwrap();
    for entry in fs::read_dir(m.path("")).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.ino(), entry.metadata().unwrap().ino());
        assert_eq!(entry.file_type().unwrap(), entry.metadata().unwrap().file_type());
    }
}

/// Another file system mounted in SOURCE shows up where mounts are crossed, with inode numbers
/// of its own.
#[test]
fn file_systems_mounted_in_source() {
    if !can_mount("file_systems_mounted_below") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let other = directory.path().join("backing/other");
    fs::create_dir_all(&other).unwrap();
    let small = FileSystem::tmpfs(&other, "size=4m");
    let m = Mounted::over(directory, Some(small), |config| {
        (config.cross_mounts, config.inode_descriptors_max) = (true, Some(1));
    });
    fs::write(m.path("other/a"), b"on another file system").unwrap();
    assert_eq!(fs::read(m.path("other/a")).unwrap(), b"on another file system");
    let (here, backing) = (fs::metadata(m.path("other/a")).unwrap(), fs::metadata(m.backing("other/a")).unwrap());
    assert_eq!(here.dev(), fs::metadata(m.path("")).unwrap().dev());
    assert_ne!(here.ino(), backing.ino());
    assert_eq!(errno_of(fs::rename(m.path("other/a"), m.path("a"))), libc::EXDEV);
    assert_eq!(errno_of(fs::hard_link(m.path("other/a"), m.path("a"))), libc::EXDEV);
}
