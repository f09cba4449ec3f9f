//! Names through a real mount: making, finding, moving and removing files of every kind.

mod support;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, linkat, mkdirat, mknodat, openat, renameat_with};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::*;
use testbed::Done;

#[test]
fn files_and_directories() {
    if !can_mount("files_and_directories") {
        return;
    }
    both_modes(|m| {
        fs::create_dir(m.path("d")).unwrap();
        fs::write(m.path("d/a"), b"hello").unwrap();
        assert_eq!(fs::read(m.backing("d/a")).unwrap(), b"hello");
        assert_eq!(errno_of(fs::remove_dir(m.path("d"))), libc::ENOTEMPTY);
        assert_eq!(errno_of(fs::create_dir(m.path("d"))), libc::EEXIST);
        assert_eq!(errno_of(fs::metadata(m.path("nothing"))), libc::ENOENT);
        fs::rename(m.path("d/a"), m.path("b")).unwrap();
        assert_eq!(fs::read(m.path("b")).unwrap(), b"hello");
        fs::remove_dir(m.path("d")).unwrap();
        fs::remove_file(m.path("b")).unwrap();
        assert_eq!(fs::read_dir(m.backing("")).unwrap().count(), 0);
        let long = "x".repeat(256);
        assert_eq!(errno_of(fs::write(m.path(&long), b"")), libc::ENAMETOOLONG);
        fs::write(m.path(&long[..255]), b"").unwrap();
    });
}

#[test]
fn names_are_bytes() {
    if !can_mount("names_are_bytes") {
        return;
    }
    let m = Mounted::through();
    let names: Vec<&OsStr> =
        [&b"\xff\xfe"[..], b"a\nb", b"\x01", b"\xc3\x28", b" ", b"-"].map(OsStr::from_bytes).into();
    for name in &names {
        fs::write(m.path(name), name.as_bytes()).unwrap();
    }
    let listed: BTreeSet<_> = fs::read_dir(m.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(listed, names.iter().map(|name| name.to_os_string()).collect());
    for name in &names {
        assert_eq!(fs::read(m.backing(name)).unwrap(), name.as_bytes());
        fs::remove_file(m.path(name)).unwrap();
    }
}

#[test]
fn links() {
    if !can_mount("links") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("a"), b"one").unwrap();
    fs::hard_link(m.path("a"), m.path("b")).unwrap();
    let (a, b) = (fs::metadata(m.path("a")).unwrap(), fs::metadata(m.path("b")).unwrap());
    assert_eq!((a.ino(), a.nlink()), (b.ino(), 2));
    assert_eq!(a.ino(), fs::metadata(m.backing("a")).unwrap().ino());
    // One inode, one page cache: a write by one name is read by the other.
    fs::write(m.path("b"), b"two").unwrap();
    assert_eq!(fs::read(m.path("a")).unwrap(), b"two");
    std::os::unix::fs::symlink("../\u{1}a b", m.path("s")).unwrap();
    assert_eq!(fs::read_link(m.path("s")).unwrap().as_os_str(), "../\u{1}a b");
    assert_eq!(fs::read_link(m.backing("s")).unwrap().as_os_str(), "../\u{1}a b");
    // A link to the link itself.
    linkat(CWD, m.path("s"), CWD, m.path("t"), AtFlags::empty()).unwrap();
    assert_eq!(fs::symlink_metadata(m.path("t")).unwrap().nlink(), 2);
    let long = "x".repeat(4095);
    std::os::unix::fs::symlink(&long, m.path("long")).unwrap();
    assert_eq!(fs::read_link(m.path("long")).unwrap().as_os_str(), long.as_str());
}

#[test]
fn special_files() {
    if !can_mount("special_files") {
        return;
    }
    let m = Mounted::through();
    let mode = Mode::from_raw_mode(0o640);
    let device = rustix::fs::makedev(1, 7); // /dev/full
    let big = rustix::fs::makedev(0xabc, 0xfedcb);
    for (name, kind, device) in [
        ("fifo", rustix::fs::FileType::Fifo, 0),
        ("char", rustix::fs::FileType::CharacterDevice, device),
        ("block", rustix::fs::FileType::BlockDevice, big),
        ("socket", rustix::fs::FileType::Socket, 0),
    ] {
        mknodat(CWD, m.path(name), kind, mode, device).unwrap();
        let (here, backing) = (fs::metadata(m.path(name)).unwrap(), fs::metadata(m.backing(name)).unwrap());
        assert_eq!((here.mode(), here.rdev()), (backing.mode(), backing.rdev()), "{name}");
        assert_eq!(here.rdev(), device, "{name}");
    }
    assert!(fs::metadata(m.path("fifo")).unwrap().file_type().is_fifo());
    assert_eq!(errno_of(fs::write(m.path("char"), b"x")), libc::ENOSPC);
    let listener = std::os::unix::net::UnixListener::bind(m.path("listening")).unwrap();
    let client = std::os::unix::net::UnixStream::connect(m.path("listening")).unwrap();
    drop((listener, client));
}

#[test]
fn rename_flags() {
    if !can_mount("rename_flags") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("a"), b"a").unwrap();
    fs::create_dir(m.path("d")).unwrap();
    fs::write(m.path("d/b"), b"b").unwrap();
    let rename = |from: &str, to: &str, flags| renameat_with(CWD, m.path(from), CWD, m.path(to), flags);
    assert_eq!(rename("a", "d/b", RenameFlags::NOREPLACE), Err(rustix::io::Errno::EXIST));
    rename("a", "d/b", RenameFlags::EXCHANGE).unwrap();
    assert_eq!((fs::read(m.path("a")).unwrap(), fs::read(m.path("d/b")).unwrap()), (b"b".to_vec(), b"a".to_vec()));
    rename("a", "w", RenameFlags::WHITEOUT).unwrap();
    let whiteout = fs::metadata(m.backing("a")).unwrap();
    assert!(whiteout.file_type().is_char_device() && whiteout.rdev() == 0);
    // Replacing an open file leaves it readable.
    let open = fs::File::open(m.path("d/b")).unwrap();
    rename("w", "d/b", RenameFlags::empty()).unwrap();
    assert_eq!(fs::read(m.path("d/b")).unwrap(), b"b");
    assert_eq!(std::io::read_to_string(&open).unwrap(), "a");
    assert_eq!(rename("d", "d/sub", RenameFlags::empty()), Err(rustix::io::Errno::INVAL));
}

/// Also for files that are held by a file handle, which cannot find a file without a name.
#[test]
fn open_files_outlive_their_names() {
    if !can_mount("open_files_outlive_their_names") {
        return;
    }
    for inode_descriptors_max in [None, Some(1)] {
        let m = Mounted::with(|config| config.inode_descriptors_max = inode_descriptors_max);
        let mut file = fs::File::options().read(true).write(true).create_new(true).open(m.path("a")).unwrap();
        file.write_all(b"before").unwrap();
        fs::remove_file(m.path("a")).unwrap();
        file.write_all(b" after").unwrap();
        file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
        rustix::fs::fsetxattr(&file, "user.x", b"y", rustix::fs::XattrFlags::empty()).unwrap();
        let now = file.metadata().unwrap();
        assert_eq!((now.nlink(), now.len(), now.mode() & 0o777), (0, 12, 0o600));
        // A new file of that name is another one, even if it gets the same inode number in the
        // backing directory.
        fs::write(m.path("a"), b"new").unwrap();
        assert_eq!(fs::read(m.path("a")).unwrap(), b"new");
        assert_eq!(file.metadata().unwrap().len(), 12);
        drop(file);
        fs::remove_file(m.path("a")).unwrap();
        fs::create_dir(m.path("d")).unwrap();
        let directory = fs::File::open(m.path("d")).unwrap();
        fs::remove_dir(m.path("d")).unwrap();
        assert!(directory.metadata().unwrap().is_dir());
        assert_eq!(
            openat(&directory, "x", OFlags::CREATE | OFlags::WRONLY, Mode::RUSR).unwrap_err(),
            rustix::io::Errno::NOENT
        );
    }
}

#[test]
fn unnamed_files_can_be_linked() {
    if !can_mount("unnamed_files_can_be_linked") {
        return;
    }
    both_modes(|m| {
        let fd = openat(CWD, m.path(""), OFlags::TMPFILE | OFlags::RDWR, Mode::from_raw_mode(0o600)).unwrap();
        let mut file = fs::File::from(fd);
        file.write_all(b"unnamed").unwrap();
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        linkat(&file, c"", CWD, m.path("named"), AtFlags::EMPTY_PATH).unwrap();
        assert_eq!(fs::read(m.path("named")).unwrap(), b"unnamed");
        drop(file);
        assert_eq!(fs::read(m.backing("named")).unwrap(), b"unnamed");
        let fd = openat(CWD, m.path(""), OFlags::TMPFILE | OFlags::RDWR | OFlags::EXCL, Mode::RUSR).unwrap();
        assert!(linkat(&fd, c"", CWD, m.path("never"), AtFlags::EMPTY_PATH).is_err());
    });
}

/// Deep trees and many threads: lookups race forgets all the time, since every name is dropped
/// again.
#[test]
fn lookups_race_forgets() {
    if !can_mount("lookups_race_forgets") {
        return;
    }
    for inode_descriptors_max in [None, Some(1)] {
        let m = Mounted::with(|config| {
            config.inode_descriptors_max = inode_descriptors_max;
            config.entry_timeout = std::time::Duration::ZERO;
        });
        for index in 0..8 {
            fs::create_dir(m.path(format!("d{index}"))).unwrap();
            fs::write(m.path(format!("d{index}/f")), [index]).unwrap();
        }
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let m = &m;
                scope.spawn(move || {
                    for round in 0..150 {
                        let index = (round + thread) % 8;
                        assert_eq!(fs::read(m.path(format!("d{index}/f"))).unwrap(), [index as u8]);
                        if round % 16 == 0 {
                            // Drops the kernel's names and inodes that are not in use.
                            let _ = fs::write("/proc/sys/vm/drop_caches", "2");
                        }
                    }
                });
            }
        });
        let _ = fs::write("/proc/sys/vm/drop_caches", "2");
        wait_until("everything but the root is forgotten", || {
            let _ = fs::write("/proc/sys/vm/drop_caches", "2");
            m.mount().status().inodes == 1
        });
        wait_until("only the root holds a descriptor", || m.mount().status().inodes_with_descriptor == 1);
        assert_eq!(m.mount().status().open_handles, 0);
    }
}

#[test]
fn create_honours_exclusion() {
    if !can_mount("create_honours_exclusion") {
        return;
    }
    let m = Mounted::with(|config| config.entry_timeout = std::time::Duration::from_secs(60));
    assert_eq!(errno_of(fs::metadata(m.path("a"))), libc::ENOENT);
    fs::write(m.backing("a"), b"from beside").unwrap();
    assert_eq!(errno_of(fs::File::create_new(m.path("a"))), libc::EEXIST);
    fs::write(m.backing("b"), b"from beside").unwrap();
    drop(fs::File::create(m.path("b")).unwrap());
    assert_eq!(fs::read(m.backing("b")).unwrap(), b"");
    mkdirat(CWD, m.path("d"), Mode::from_raw_mode(0o700)).unwrap();
    assert_eq!(errno_of(fs::File::create(m.path("d"))), libc::EISDIR);
}

/// A file that is deleted externally does not keep its disk space.
#[test]
fn externally_deleted_files_are_released() {
    if !can_mount("what_is_deleted_beside_is_let_go") {
        return;
    }
    let m = Mounted::through();
    let known = m.mount().status().inodes;
    fs::write(m.path("a"), "content").unwrap();
    fs::remove_file(m.backing("a")).unwrap();
    // Another test may have had the kernel drop its caches, and with them the node, before.
    wait_until("the node is forgotten", || m.mount().status().inodes <= known);
}

/// Names changed externally show at the next open, whatever was done to them through the
/// mount before.
#[test]
fn externally_changed_names_show_at_the_next_open() {
    if !can_mount("names_changed_beside_show_at_the_next_open") {
        return;
    }
    let m = Mounted::through();
    let replace_externally = |name: &str, content: &str| {
        fs::write(m.backing("new"), content).unwrap();
        fs::rename(m.backing("new"), m.backing(name)).unwrap();
        assert_eq!(fs::read_to_string(m.path(name)).unwrap(), content);
    };
    fs::write(m.path("temporary"), "one").unwrap();
    fs::rename(m.path("temporary"), m.path("renamed")).unwrap();
    assert_eq!(fs::read_to_string(m.path("renamed")).unwrap(), "one");
    replace_externally("renamed", "two");
    replace_externally("renamed", "three");

    fs::write(m.path("linked"), "one").unwrap();
    fs::hard_link(m.path("linked"), m.path("other")).unwrap();
    assert_eq!(fs::read_to_string(m.path("other")).unwrap(), "one");
    replace_externally("linked", "two");
    assert_eq!(fs::read_to_string(m.path("other")).unwrap(), "one");

    fs::write(m.path("x"), "x").unwrap();
    fs::write(m.path("y"), "y").unwrap();
    let folder = fs::File::open(m.path(".")).unwrap();
    rustix::fs::renameat_with(&folder, "x", &folder, "y", rustix::fs::RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read_to_string(m.path("x")).unwrap(), "y");
    replace_externally("x", "another x");
    replace_externally("y", "another y");
    fs::remove_file(m.backing("x")).unwrap();
    assert!(fs::read_to_string(m.path("x")).is_err());
}

/// A name that was replaced externally, and is then renamed through it, leads to what was
/// renamed, also when the kernel had not looked at it in between: under either name, if two were
/// exchanged.
#[test]
fn an_externally_replaced_name_that_is_renamed_leads_to_its_file() {
    if !can_mount("what_was_replaced_beside_and_then_renamed_is_what_the_new_name_leads_to") {
        return;
    }
    let m = Mounted::through();
    let known = m.mount().status().inodes;
    let replace_externally = |name: &str, with: &dyn Fn(&Path)| {
        with(&m.backing("new"));
        rustix::fs::renameat_with(CWD, m.backing("new"), CWD, m.backing(name), RenameFlags::EXCHANGE).unwrap();
        fs::remove_file(m.backing("new")).unwrap();
    };
    let rename = |from: &str, to: &str, flags| renameat_with(CWD, m.path(from), CWD, m.path(to), flags).unwrap();
    let newer = |path: &Path| fs::write(path, "newer").unwrap();
    let look = |name: &str| fs::metadata(m.path(name)).unwrap().ino() == fs::metadata(m.backing(name)).unwrap().ino();

    for round in 0..3 {
        // A file that the kernel does not know, one that it knows by another name, and one of which
        // it caches nothing for long.
        let [a, b, other] = ["a", "b", "other"].map(|name| format!("{name}{round}"));
        fs::write(m.path(&a), "older").unwrap();
        fs::write(m.path(&other), "newer").unwrap();
        m.wait_until_closed();
        replace_externally(&a, &|new| match round {
            0 => newer(new),
            1 => fs::rename(m.backing(&other), new).unwrap(),
            _ => fs::hard_link(m.backing(&other), new).unwrap(),
        });
        rename(&a, &b, RenameFlags::empty());
        wait_until("the new name leads to what was renamed", || look(&b));
        assert_eq!(fs::read_to_string(m.path(&b)).unwrap(), "newer");
        let _ = fs::remove_file(m.path(&other));
        fs::remove_file(m.path(&b)).unwrap();
    }

    let names = ["x", "y"];
    for name in names {
        fs::write(m.path(name), "older").unwrap();
    }
    m.wait_until_closed();
    names.into_iter().for_each(|name| replace_externally(name, &newer));
    rename("x", "y", RenameFlags::EXCHANGE);
    for name in names {
        wait_until("the name leads to what was exchanged", || look(name));
        assert_eq!(fs::read_to_string(m.path(name)).unwrap(), "newer");
        fs::remove_file(m.path(name)).unwrap();
    }
    wait_until("the files that were replaced are let go", || m.mount().status().inodes <= known);
}

/// A rename that reaches the mount after it has found out that the name is not the older file's any
/// more.
#[test]
fn what_was_renamed_while_its_name_was_dropped_is_what_the_new_name_leads_to() {
    if !can_mount("what_was_renamed_while_its_name_was_dropped_is_what_the_new_name_leads_to") {
        return;
    }
    let m = Mounted::with(|config| config.attr_timeout = std::time::Duration::ZERO);
    for round in 0..100 {
        let [a, b] = ["a", "b"].map(|name| format!("{name}{round}"));
        fs::write(m.path(&a), "older").unwrap();
        m.wait_until_closed();
        let open = fs::File::open(m.path(&a)).unwrap();
        fs::write(m.backing("new"), "newer").unwrap();
        fs::rename(m.backing("new"), m.backing(&a)).unwrap();
        std::thread::scope(|scope| {
            // After each answer the name is looked at.
            scope.spawn(|| open.metadata().unwrap());
            fs::rename(m.path(&a), m.path(&b)).unwrap();
        });
        assert_eq!(fs::read_to_string(m.path(&b)).unwrap(), "newer", "round {round}");
        drop(open);
        fs::remove_file(m.path(&b)).unwrap();
    }
}

/// That a name is another file's by now may be found out by somebody else: until the kernel has
/// dropped it, whoever comes by it is sent back, too. And whoever comes by a name that is right is
/// let in.
#[test]
fn a_name_that_is_being_dropped_opens_nothing() {
    if !can_mount("a_name_that_is_being_dropped_opens_nothing") {
        return;
    }
    let m = Mounted::with(|config| config.attr_timeout = std::time::Duration::ZERO);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    for round in 0..200 {
        let (name, other) = (format!("name{round}"), format!("other{round}"));
        fs::write(m.path(&name), "older").unwrap();
        fs::hard_link(m.path(&name), m.path(&other)).unwrap();
        let open = fs::File::open(m.path(&other)).unwrap();
        is_over.store(false, std::sync::atomic::Ordering::Relaxed);
        std::thread::scope(|scope| {
            let over = Done(&is_over);
            // Attributes are asked for, and after each answer the name is looked at.
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    open.metadata().unwrap();
                }
            });
            fs::write(m.backing("new"), "newer").unwrap();
            fs::rename(m.backing("new"), m.backing(&name)).unwrap();
            let read = [&name, &other].map(|name| fs::read_to_string(m.path(name)));
            drop(over);
            assert_eq!(read.map(Result::unwrap), ["newer", "older"], "round {round}");
        });
    }
}

/// A caller that was sent back and has found nothing does not come back, and is sent back from the
/// next one.
#[test]
fn a_name_that_leads_nowhere_lets_nobody_in_elsewhere() {
    if !can_mount("a_name_that_leads_nowhere_lets_nobody_in_elsewhere") {
        return;
    }
    let m = Mounted::through();
    for name in ["x", "y"] {
        fs::write(m.path(name), "older").unwrap();
    }
    m.wait_until_closed();
    fs::remove_file(m.backing("x")).unwrap();
    fs::write(m.backing("new"), "newer").unwrap();
    fs::rename(m.backing("new"), m.backing("y")).unwrap();
    assert_eq!(errno_of(fs::read(m.path("x"))), libc::ENOENT);
    assert_eq!(fs::read_to_string(m.path("y")).unwrap(), "newer");
}

/// However often a name is replaced externally: who opens it opens a file that has had the
/// name since it asked.
#[test]
fn a_name_that_is_replaced_all_the_time_can_be_opened() {
    if !can_mount("a_name_that_is_replaced_all_the_time_can_be_opened") {
        return;
    }
    let m = Mounted::through();
    let is_over = AtomicBool::new(false);
    let current = AtomicU64::new(0);
    fs::write(m.backing("a"), 0u64.to_ne_bytes()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1u64.. {
                if is_over.load(Ordering::SeqCst) {
                    break;
                }
                fs::write(m.backing("new"), number.to_ne_bytes()).unwrap();
                fs::rename(m.backing("new"), m.backing("a")).unwrap();
                current.store(number, Ordering::SeqCst);
            }
        });
        let check = (0..2000).try_for_each(|round| {
            let at_least = current.load(Ordering::SeqCst);
            let read = fs::read(m.path("a")).map_err(|error| format!("round {round}: {error}"))?;
            match read.try_into().map(u64::from_ne_bytes) {
                Ok(number) if number >= at_least => Ok(()),
                found => Err(format!("round {round}: {found:?} < {at_least}")),
            }
        });
        is_over.store(true, Ordering::SeqCst);
        check.unwrap();
    });
}

/// Flags are asked for by who has the file open: they are the file's, whatever has become of its
/// name.
#[test]
fn flags_of_an_open_file_can_be_asked_for_under_a_name_that_went_stale() {
    if !can_mount("flags_of_an_open_file_can_be_asked_for_under_a_name_that_went_stale") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("x"), "older").unwrap();
    let open = fs::File::open(m.path("x")).unwrap();
    let before = rustix::fs::ioctl_getflags(&open);
    fs::write(m.backing("new"), "newer").unwrap();
    fs::rename(m.backing("new"), m.backing("x")).unwrap();
    assert_eq!(rustix::fs::ioctl_getflags(&open).err(), before.err());
}

/// A request by a name that leads elsewhere after an external rename does not apply to the file
/// that had the name.
#[test]
fn attributes_are_changed_of_what_the_name_leads_to() {
    if !can_mount("attributes_are_changed_of_what_the_name_leads_to") {
        return;
    }
    let m = Mounted::through();
    let mode = |name: &str| fs::metadata(m.backing(name)).unwrap().permissions().mode() & 0o777;
    let is_marked = |name: &str| rustix::fs::getxattr(m.backing(name), "user.mark", &mut [0u8; 4][..]).is_ok();
    for (at, change) in ["mode", "mark", "link"].into_iter().enumerate() {
        let [x, y, z] = ["x", "y", "z"].map(|name| format!("{name}{at}"));
        for name in [&x, &y] {
            fs::write(m.path(name), name).unwrap();
            fs::set_permissions(m.path(name), fs::Permissions::from_mode(0o600)).unwrap();
        }
        // A process that has a file open means that file, by whatever name.
        m.wait_until_closed();
        fs::rename(m.backing(&x), m.backing(&z)).unwrap();
        fs::rename(m.backing(&y), m.backing(&x)).unwrap();
        match change {
            "mode" => {
                fs::set_permissions(m.path(&x), fs::Permissions::from_mode(0o640)).unwrap();
                assert_eq!((mode(&x), mode(&z)), (0o640, 0o600));
            }
            "mark" => {
                rustix::fs::setxattr(m.path(&x), "user.mark", b"here", rustix::fs::XattrFlags::empty()).unwrap();
                assert_eq!((is_marked(&x), is_marked(&z)), (true, false));
            }
            _ => {
                fs::hard_link(m.path(&x), m.path("link")).unwrap();
                assert_eq!(fs::read_to_string(m.backing("link")).unwrap(), y);
            }
        }
    }
    fs::write(m.path("gone"), "gone").unwrap();
    m.wait_until_closed();
    fs::rename(m.backing("gone"), m.backing("elsewhere")).unwrap();
    assert_eq!(errno_of(fs::set_permissions(m.path("gone"), fs::Permissions::from_mode(0o640))), libc::ENOENT);
}
