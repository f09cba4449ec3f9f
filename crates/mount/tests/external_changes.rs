//! Attributes that the kernel believes for long, because we are told when they are changed beside
//! the mount.
//!
//! In all of these it would believe them for an hour, so whatever is seen was told of. (These tests
//! are threads of the process that serves the mount; what tells its own changes from others' is the
//! thread.)

mod support;

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use std::fs::{self, File, Metadata, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};
use support::*;

/// The kernel caches attributes for so long if a change is not reported.
const UNTOLD: Duration = Duration::from_millis(20);

/// A mount, if one can be tested here, and the file system of temporary directories tells of
/// changes.
fn mounted(test: &str) -> Option<Mounted> {
    if !can_mount(test) {
        return None;
    }
    let m = Mounted::with(|config| {
        config.attr_timeout = UNTOLD;
        config.reported_attr_timeout = Duration::from_secs(3600);
    });
    fs::write(m.backing("probe"), b"x").unwrap();
    // First the file is looked up, then it is asked for, and may be told of.
    for _ in 0..2 {
        is_believed(&m, "probe");
    }
    if m.mount().status().watched_files == 0 {
        skip(test, "nobody tells of changes in the temporary directory's file system");
        return None;
    }
    Some(m)
}

/// Looks at the attributes of an open file. Whether the kernel has asked for them.
fn is_asked_for(m: &Mounted, file: &OwnedFd) -> bool {
    let before = getattrs(m);
    rustix::fs::fstat(file).unwrap();
    getattrs(m) > before
}

fn open_path(path: &Path) -> OwnedFd {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).unwrap()
}

/// Waits until the kernel does not believe any more what it believed when this was called, but for
/// what is told of. Of a directory nothing is told: when it has been asked for twice, [`UNTOLD`]
/// has passed.
fn wait_until_unreported_is_over(m: &Mounted) {
    let directory = open_path(&m.path("."));
    for _ in 0..2 {
        wait_until("the directory is asked for", || is_asked_for(m, &directory));
    }
}

/// Whether the kernel knows the attributes, although what it is told without being told of changes
/// is over.
fn is_believed(m: &Mounted, name: &str) -> bool {
    let file = open_path(&m.path(name));
    wait_until_unreported_is_over(m);
    !is_asked_for(m, &file)
}

fn wait_until_believed(m: &Mounted, name: &str) {
    wait_until(&format!("{name} is believed"), || is_believed(m, name));
}

fn is_same(here: &Metadata, backing: &Metadata) -> bool {
    let of = |of: &Metadata| {
        (of.size(), of.mode(), of.nlink(), of.uid(), (of.mtime(), of.mtime_nsec()), (of.ctime(), of.ctime_nsec()))
    };
    of(here) == of(backing)
}

fn wait_until_same(m: &Mounted, name: &str) {
    let seen = |path: &Path| fs::symlink_metadata(path).ok();
    wait_until(&format!("{name} is seen as it is"), || match (seen(&m.path(name)), seen(&m.backing(name))) {
        (Some(here), Some(backing)) => is_same(&here, &backing),
        (here, backing) => here.is_none() && backing.is_none(),
    });
}

/// How often the kernel has asked for attributes.
fn getattrs(m: &Mounted) -> u64 {
    let requests = m.mount().status().requests;
    ["getattr", "statx"].iter().map(|kind| requests.get(*kind).copied().unwrap_or(0)).sum()
}

fn append(path: &Path, bytes: &[u8]) {
    File::options().append(true).open(path).unwrap().write_all(bytes).unwrap();
}

#[test]
fn external_changes_are_seen() {
    let Some(m) = mounted("what_is_changed_beside_is_seen") else { return };
    fs::create_dir_all(m.backing("some/where")).unwrap();
    fs::create_dir(m.backing("aside")).unwrap();
    for name in ["some/where/a", "some/b", "c"] {
        fs::write(m.backing(name), b"first").unwrap();
        let change = |change: &dyn Fn(&Path)| {
            wait_until_same(&m, name);
            wait_until_believed(&m, name);
            change(&m.backing(name));
            wait_until_same(&m, name);
        };
        change(&|path| append(path, b"more"));
        change(&|path| fs::set_permissions(path, Permissions::from_mode(0o604)).unwrap());
        change(&|path| {
            File::options().write(true).open(path).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        });
        change(&|path| truncate_by_name(path, 2).unwrap());
        // By another name, in a directory that the mount does not know.
        change(&|path| fs::hard_link(path, m.backing("aside/link")).unwrap());
        change(&|_| append(&m.backing("aside/link"), b"by another name"));
        change(&|_| fs::remove_file(m.backing("aside/link")).unwrap());
        // Stores through a mapping are not told of; who opens the file for them is.
        change(&|path| {
            let file = File::options().read(true).write(true).open(path).unwrap();
            store_through_mapping(&file, b"stored").unwrap();
        });
        // As editors save: another file takes the name.
        change(&|path| {
            fs::write(m.backing("aside/other"), b"something else").unwrap();
            fs::rename(m.backing("aside/other"), path).unwrap();
        });
        change(&|path| fs::rename(path, m.backing("aside/moved")).unwrap());
        fs::rename(m.backing("aside/moved"), m.backing(name)).unwrap();
        change(&|path| fs::remove_file(path).unwrap());
    }
    // Directories are looked up when what was told is over.
    fs::rename(m.backing("some/where"), m.backing("elsewhere")).unwrap();
    fs::write(m.backing("elsewhere/d"), b"d").unwrap();
    ["some/where", "some", "elsewhere/d", "elsewhere"].iter().for_each(|name| wait_until_same(&m, name));
}

/// A process that has a file open for writing may change it in ways that nobody tells of.
#[test]
fn what_is_being_written_is_asked_for() {
    let Some(m) = mounted("what_is_being_written_is_asked_for") else { return };
    fs::write(m.backing("a"), b"first").unwrap();
    for round in 0..2 {
        let writer = File::options().read(true).write(true).open(m.backing("a")).unwrap();
        wait_until("that is told", || !is_believed(&m, "a"));
        for _ in 0..5 {
            assert!(!is_believed(&m, "a"), "round {round}");
        }
        drop(writer);
        wait_until_believed(&m, "a");
    }
    // Now it is changed through the mount.
    let writer = File::options().append(true).open(m.path("a")).unwrap();
    append(&m.backing("a"), b"more");
    wait_until_same(&m, "a");
    for _ in 0..5 {
        assert!(!is_believed(&m, "a"));
    }
    drop(writer);
    wait_until_believed(&m, "a");
}

#[test]
fn what_nobody_changes_is_believed() {
    let Some(m) = mounted("what_nobody_changes_is_believed") else { return };
    fs::create_dir(m.path("directory")).unwrap();
    let names: Vec<String> = (0..100).map(|number| format!("directory/{number}")).collect();
    names.iter().for_each(|name| fs::write(m.path(name), name).unwrap());
    let look =
        || assert!(names.iter().all(|name| fs::symlink_metadata(m.path(name)).unwrap().len() >= name.len() as u64));
    let asked = |look: &dyn Fn()| {
        wait_until_unreported_is_over(&m);
        let before = getattrs(&m);
        look();
        getattrs(&m) - before
    };
    // The directories are asked for now and then, so this is not 0; it is 100 where nothing is
    // told.
    const DIRECTORIES_MAX: u64 = 50;
    wait_until("they are believed", || asked(&look) <= DIRECTORIES_MAX);
    assert!(m.mount().status().watched_files >= 100);
    // Of one that changes only that one is asked for.
    append(&m.backing(&names[7]), b"!");
    wait_until_same(&m, &names[7]);
    wait_until_believed(&m, &names[7]);
    assert!(asked(&look) <= DIRECTORIES_MAX);
    // What is changed through the mount is no news.
    fs::set_permissions(m.path(&names[8]), Permissions::from_mode(0o600)).unwrap();
    wait_until_believed(&m, &names[8]);
    assert!(asked(&look) <= DIRECTORIES_MAX);
}

#[test]
fn files_are_let_go() {
    let Some(m) = mounted("files_are_let_go") else { return };
    let told = || m.mount().status().watched_files;
    fs::remove_file(m.path("probe")).unwrap();
    wait_until("the first one is", || told() == 0);
    for number in 0..50 {
        fs::write(m.path(number.to_string()), b"x").unwrap();
        wait_until_believed(&m, &number.to_string());
    }
    assert_eq!(told(), 50);
    // Known again, as another node, they are told of again.
    for number in 0..50 {
        fs::rename(m.backing(number.to_string()), m.backing("other")).unwrap();
        fs::rename(m.backing("other"), m.backing(number.to_string())).unwrap();
        wait_until_same(&m, &number.to_string());
        wait_until_believed(&m, &number.to_string());
        append(&m.backing(number.to_string()), b"y");
        wait_until_same(&m, &number.to_string());
    }
    for number in 0..50 {
        fs::remove_file(m.path(number.to_string())).unwrap();
    }
    wait_until("they are", || told() == 0);
}

#[test]
fn with_no_timeout_nothing_is_believed() {
    if !can_mount("with_no_timeout_nothing_is_believed") {
        return;
    }
    let m = Mounted::with(|config| config.attr_timeout = Duration::ZERO);
    fs::write(m.path("a"), b"a").unwrap();
    for _ in 0..3 {
        assert!(!is_believed(&m, "a"));
    }
    assert_eq!(m.mount().status().watched_files, 0);
}
