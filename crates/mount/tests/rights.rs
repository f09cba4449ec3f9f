//! Set-user-ID and set-group-ID bits: which changes clear them, and that a cleared bit gives nobody
//! a right.

mod support;

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;
use support::*;

const NOBODY: u32 = 65534;
/// A group that the ordinary user is in, and one that it is not in.
const HIS_OTHER_GROUP: u32 = 4242;
const FOREIGN_GROUP: u32 = 4243;
/// Length of a change, in bytes.
const PART_BYTES: usize = 4096;

/// Runs something in a thread that is an ordinary user.
fn as_ordinary_user<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let as_user = || {
        let groups = [HIS_OTHER_GROUP];
        // SAFETY: the calls change the ids of this thread alone; the groups live until the call is
        // over.
        let results = unsafe {
            [
                libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()),
                libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY),
                libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY),
            ]
        };
        assert_eq!(results, [0; 3]);
        work()
    };
    std::thread::scope(|scope| scope.spawn(as_user).join().unwrap())
}

fn open(path: &Path, flags: OFlags) -> File {
    let flags = (flags - OFlags::RDWR).bits() as i32;
    File::options().read(true).write(true).custom_flags(flags).open(path).unwrap()
}

/// Operations of a program on a file. None changes what the file does when it is run.
type Way = (&'static str, fn(&Path));

fn rewrite(path: &Path, flags: OFlags) {
    #[repr(align(4096))]
    struct Aligned([u8; PART_BYTES]);
    let mut part = Box::new(Aligned([0; PART_BYTES]));
    let file = open(path, flags);
    file.read_exact_at(&mut part.0, 0).unwrap();
    file.write_all_at(&part.0, 0).unwrap();
}

const WAYS: [Way; 8] = [
    ("write", |path| rewrite(path, OFlags::empty())),
    ("direct write", |path| rewrite(path, OFlags::DIRECT)),
    ("append", |path| {
        use std::io::Write;
        open(path, OFlags::APPEND).write_all(b"x").unwrap();
    }),
    ("fallocate", |path| {
        let file = open(path, OFlags::empty());
        let len = file.metadata().unwrap().len();
        rustix::fs::fallocate(&file, FallocateFlags::empty(), len, 100).unwrap();
    }),
    ("punch", |path| {
        let file = open(path, OFlags::empty());
        let len = file.metadata().unwrap().len();
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, punch, len + 10_000, 100).unwrap();
    }),
    ("ftruncate", |path| {
        let file = open(path, OFlags::empty());
        file.set_len(file.metadata().unwrap().len() + 1).unwrap();
    }),
    ("truncate", |path| truncate_by_name(path, fs::metadata(path).unwrap().len() as i64 + 1).unwrap()),
    ("copy_file_range", |path| {
        let (from, to) = (File::open(path).unwrap(), open(path, OFlags::empty()));
        let end = to.metadata().unwrap().len();
        let copied = rustix::fs::copy_file_range(from, Some(&mut 0), to, Some(&mut end.clone()), PART_BYTES);
        assert!(copied.unwrap() > 0);
    }),
];

/// Ways that only the owner has.
const WAYS_OF_OWNERS: [Way; 3] = [
    ("chown(-1, -1)", |path| chown(path, None, None).unwrap()),
    ("chown to its owner", |path| chown(path, Some(fs::metadata(path).unwrap().uid()), None).unwrap()),
    ("chgrp", |path| chown(path, None, Some(HIS_OTHER_GROUP)).unwrap()),
];

/// An ordinary user changes root's set-user-ID program and runs it at once: as himself.
#[test]
fn a_changed_program_runs_as_the_user() {
    if !can_mount("a_changed_program_runs_as_the_user") {
        return;
    }
    both_modes(|m| {
        let program = m.path("id");
        fs::copy("/usr/bin/id", &program).unwrap();
        let euid = || {
            let output = Command::new(&program).arg("-u").current_dir("/").output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        let mut gained = Vec::new();
        for _ in 0..tries(2 * WAYS.len()).div_ceil(WAYS.len()) {
            for (name, change) in WAYS {
                fs::set_permissions(&program, Permissions::from_mode(0o6777)).unwrap();
                let (before, after) = as_ordinary_user(|| {
                    let before = euid();
                    change(&program);
                    (before, euid())
                });
                assert_eq!(before, "0", "the bit counts while nobody has changed the file");
                if after != NOBODY.to_string() {
                    gained.push((name, after));
                }
            }
        }
        assert_eq!(gained, []);
    });
}

/// Every change clears the bits that it clears in a plain directory, and the mode is seen at once.
#[test]
fn bits_fall_as_in_the_backing_directory() {
    if !can_mount("bits_fall_as_below") {
        return;
    }
    let modes = [0o6777, 0o6767, 0o2767, 0o2777, 0o4777];
    let groups = [0, NOBODY, HIS_OTHER_GROUP, FOREIGN_GROUP];
    let bytes = pattern(2 * PART_BYTES, 1);
    let test = |m: Mounted| {
        fs::create_dir(m.backing("plain")).unwrap();
        let mut different = Vec::new();
        let mut compare = |name: &str, mode: u32, group: u32, owner: u32, change: &(dyn Fn(&Path) + Sync)| {
            let [here, plain] = [m.path("a"), m.backing("plain/a")].map(|path| {
                let _ = fs::remove_file(&path);
                fs::write(&path, &bytes).unwrap();
                chown(&path, Some(owner), Some(group)).unwrap();
                fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
                assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, mode);
                change(&path);
                fs::metadata(&path).unwrap().mode() & 0o7777
            });
            let backing = fs::metadata(m.backing("a")).unwrap().mode() & 0o7777;
            if [here, backing] != [plain; 2] {
                different.push(format!("{name} of mode {mode:o}, group {group}, owner {owner}: {here:o} {plain:o}"));
            }
        };
        for mode in modes {
            for group in groups {
                for (name, change) in WAYS.into_iter().chain(WAYS_OF_OWNERS) {
                    compare(name, mode, group, NOBODY, &|path| as_ordinary_user(|| change(path)));
                    compare(name, mode, group, 0, &change);
                }
            }
        }
        assert!(different.is_empty(), "{different:#?}");
    };
    both_modes(test);
    println!("passed through");
    test(Mounted::with(|config| config.pass = true));
}

/// The kernel does not know of bits that were set by an external change. A write clears them all
/// the same, and the mount shows it.
#[test]
fn bits_set_in_the_backing_directory_fall_too() {
    if !can_mount("bits_set_below_fall_too") {
        return;
    }
    let m = Mounted::through();
    let path = m.path("a");
    for (group, left) in [(0, 0o767), (HIS_OTHER_GROUP, 0o2767)] {
        fs::write(&path, pattern(PART_BYTES, 2)).unwrap();
        chown(&path, None, Some(group)).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o767)).unwrap();
        let file = as_ordinary_user(|| open(&path, OFlags::empty()));
        rustix::fs::chmodat(CWD, m.backing("a"), Mode::from_raw_mode(0o6767), AtFlags::empty()).unwrap();
        as_ordinary_user(|| file.write_all_at(b"changed", 0).unwrap());
        let shown = [m.backing("a"), path.clone()].map(|path| fs::metadata(path).unwrap().mode() & 0o7777);
        assert_eq!(shown, [left; 2]);
    }
}

/// A mount of a mount clears them, too.
#[test]
fn bits_fall_through_two_mounts() {
    if !can_mount("bits_fall_through_two_mounts") {
        return;
    }
    let inner = Mounted::through();
    fs::create_dir(inner.path("source")).unwrap();
    let source = inner.path("source");
    let outer = Mounted::with(|config| config.source = source.clone());
    for (name, change) in WAYS {
        let path = outer.path("a");
        fs::write(&path, pattern(2 * PART_BYTES, 3)).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o6777)).unwrap();
        as_ordinary_user(|| change(&path));
        let modes = [path, inner.backing("source/a")].map(|path| fs::metadata(path).unwrap().mode() & 0o7777);
        assert_eq!(modes, [0o777; 2], "{name}");
    }
}
