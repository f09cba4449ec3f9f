//! Attributes that the kernel believes for long, because we are told when they are changed beside the mount.
//!
//! In all of these it would believe them for an hour, so whatever is seen was told of. (These tests are threads of the process that serves the
//! mount; what tells its own changes from others' is the thread.)

mod support;

use std::fs::{self, File, Metadata, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use support::*;

fn mounted() -> Mounted {
    Mounted::with(|config| config.attr_timeout = Duration::from_secs(3600))
}

/// Whether the file systems of temporary directories tell of changes.
fn can_be_told(test: &str, m: &Mounted) -> bool {
    fs::symlink_metadata(m.path(".")).unwrap();
    let told = m.mount().status().directories_told_of > 0;
    if !told {
        skip(test, "nobody tells of changes in the temporary directory's file system");
    }
    told
}

fn is_same(here: &Metadata, below: &Metadata) -> bool {
    let of = |of: &Metadata| {
        (of.size(), of.mode(), of.nlink(), of.uid(), (of.mtime(), of.mtime_nsec()), (of.ctime(), of.ctime_nsec()))
    };
    of(here) == of(below)
}

fn wait_until_same(m: &Mounted, name: &str) {
    let seen = |path: &Path| fs::symlink_metadata(path).ok();
    wait_until(&format!("{name} is seen as it is"), || match (seen(&m.path(name)), seen(&m.below(name))) {
        (Some(here), Some(below)) => is_same(&here, &below),
        (here, below) => here.is_none() && below.is_none(),
    });
}

/// Trips to the daemon for attributes.
fn trips(m: &Mounted) -> u64 {
    let requests = m.mount().status().requests;
    ["getattr", "statx", "lookup"].iter().map(|kind| requests.get(kind).copied().unwrap_or(0)).sum()
}

fn append(path: &Path, bytes: &[u8]) {
    File::options().append(true).open(path).unwrap().write_all(bytes).unwrap();
}

#[test]
fn what_is_changed_beside_is_seen() {
    if !can_mount("what_is_changed_beside_is_seen") {
        return;
    }
    let m = mounted();
    if !can_be_told("what_is_changed_beside_is_seen", &m) {
        return;
    }
    fs::create_dir_all(m.below("some/where")).unwrap();
    for name in ["some/where/a", "some/b", "c"] {
        fs::write(m.below(name), b"first").unwrap();
        wait_until_same(&m, name);
        append(&m.below(name), b"more");
        wait_until_same(&m, name);
        fs::set_permissions(m.below(name), Permissions::from_mode(0o604)).unwrap();
        wait_until_same(&m, name);
        File::options().write(true).open(m.below(name)).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        wait_until_same(&m, name);
        // As editors save: another file takes the name.
        fs::write(m.below("other"), b"something else").unwrap();
        fs::rename(m.below("other"), m.below(name)).unwrap();
        wait_until_same(&m, name);
        wait_until_same(&m, "other");
        // As tail -f reads: who has it open sees that it grows.
        let open = File::open(m.path(name)).unwrap();
        append(&m.below(name), b" and more");
        let grown = fs::metadata(m.below(name)).unwrap().len();
        wait_until("an open file has grown", || open.metadata().unwrap().len() == grown);
        fs::remove_file(m.below(name)).unwrap();
        wait_until_same(&m, name);
        wait_until_same(&m, "some/where");
        wait_until_same(&m, "some");
    }
    fs::set_permissions(m.below("some/where"), Permissions::from_mode(0o711)).unwrap();
    wait_until_same(&m, "some/where");
    fs::rename(m.below("some/where"), m.below("elsewhere")).unwrap();
    wait_until_same(&m, "elsewhere");
    // Its mark has gone with it.
    fs::write(m.below("elsewhere/d"), b"d").unwrap();
    wait_until_same(&m, "elsewhere/d");
    wait_until_same(&m, "elsewhere");
    append(&m.below("elsewhere/d"), b"more");
    wait_until_same(&m, "elsewhere/d");
}

#[test]
fn what_nobody_changes_is_believed() {
    if !can_mount("what_nobody_changes_is_believed") {
        return;
    }
    let m = mounted();
    if !can_be_told("what_nobody_changes_is_believed", &m) {
        return;
    }
    fs::create_dir(m.path("directory")).unwrap();
    let names: Vec<String> = (0..100).map(|number| format!("directory/{number}")).collect();
    for name in &names {
        fs::write(m.path(name), name).unwrap();
        fs::symlink_metadata(m.path(name)).unwrap();
    }
    // All that we have done ourselves was told of before this is.
    fs::write(m.below("told"), b"first").unwrap();
    fs::symlink_metadata(m.path("told")).unwrap();
    append(&m.below("told"), b"more");
    wait_until_same(&m, "told");
    let before = trips(&m);
    for _ in 0..10 {
        for name in &names {
            assert_eq!(fs::symlink_metadata(m.path(name)).unwrap().len(), name.len() as u64);
        }
    }
    assert_eq!(trips(&m) - before, 0, "1000 looks");
    // Of one that changes only that one is asked for.
    append(&m.below(&names[7]), b"!");
    wait_until_same(&m, &names[7]);
    let before = trips(&m);
    assert!(names.iter().all(|name| fs::symlink_metadata(m.path(name)).unwrap().len() >= name.len() as u64));
    assert_eq!(trips(&m) - before, 0);
}

/// What the kernel believes of a file that it gets to know at that moment, it was told before the change, or hears of it.
#[test]
fn a_change_is_seen_that_meets_the_first_look() {
    if !can_mount("a_change_is_seen_that_meets_the_first_look") {
        return;
    }
    let m = mounted();
    if !can_be_told("a_change_is_seen_that_meets_the_first_look", &m) {
        return;
    }
    const FILES: usize = 3000;
    fs::create_dir(m.below("many")).unwrap();
    (0..FILES).for_each(|number| fs::write(m.below(format!("many/{number}")), b"x").unwrap());
    fs::symlink_metadata(m.path("many")).unwrap();
    let turn = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..FILES {
                while turn.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                turn.store(true, Ordering::Release);
                append(&m.below(format!("many/{number}")), b"y");
            }
        });
        for number in 0..FILES {
            while !turn.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            fs::symlink_metadata(m.path(format!("many/{number}"))).unwrap();
            turn.store(false, Ordering::Release);
        }
    });
    (0..FILES).for_each(|number| wait_until_same(&m, &format!("many/{number}")));
}

/// Another name may be where nobody tells us of changes: then a file is believed no longer than --attribute-timeout says.
#[test]
fn files_of_several_names_are_asked_for() {
    if !can_mount("files_of_several_names_are_asked_for") {
        return;
    }
    let m = Mounted::with(|config| config.attr_timeout = Duration::from_millis(20));
    if !can_be_told("files_of_several_names_are_asked_for", &m) {
        return;
    }
    let aside = m.end();
    fs::create_dir(aside.path().join("aside")).unwrap();
    fs::write(aside.path().join("below/one"), b"x").unwrap();
    fs::hard_link(aside.path().join("below/one"), aside.path().join("aside/two")).unwrap();
    fs::remove_dir(aside.path().join("mountpoint")).unwrap();
    let two = aside.path().join("aside/two");
    let m = Mounted::over(aside, None, |config| config.attr_timeout = Duration::from_millis(20));
    fs::symlink_metadata(m.path("one")).unwrap();
    append(&two, b"y");
    wait_until_same(&m, "one");
    fs::remove_file(&two).unwrap();
    wait_until_same(&m, "one");
}

#[test]
fn directories_are_let_go() {
    if !can_mount("directories_are_let_go") {
        return;
    }
    let m = mounted();
    if !can_be_told("directories_are_let_go", &m) {
        return;
    }
    for number in 0..50 {
        fs::create_dir(m.path(number.to_string())).unwrap();
    }
    assert!(m.mount().status().directories_told_of >= 51);
    for number in 0..50 {
        fs::remove_dir(m.path(number.to_string())).unwrap();
    }
    wait_until("they are", || m.mount().status().directories_told_of == 1);
}

#[test]
fn with_no_timeout_nothing_is_believed() {
    if !can_mount("with_no_timeout_nothing_is_believed") {
        return;
    }
    let m = Mounted::with(|config| config.attr_timeout = Duration::ZERO);
    fs::write(m.path("a"), b"a").unwrap();
    for _ in 0..3 {
        let before = trips(&m);
        // For the kernel no time is the rest of the clock's tick.
        wait_until("it is asked for", || {
            fs::symlink_metadata(m.path("a")).unwrap();
            trips(&m) > before
        });
    }
    assert_eq!(m.mount().status().directories_told_of, 0);
}
