//! The daemon's descriptors when they run short: who gets the last ones, and what gives back which.
//!
//! The daemon is the test's own process. So each test runs once more in a process of its own, which
//! may have few descriptors; users open files in further processes.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use support::*;

/// Descriptors that the daemon of a test may have.
const LIMIT: usize = 1024;
/// Tells a test that it runs in a process that may have no more.
const LIMITED: &str = "PUMA_TEST_LIMITED";

/// Whether the test runs with few descriptors. If not, runs it so.
fn is_limited(test: &str) -> bool {
    if std::env::var_os(LIMITED).is_some() {
        return true;
    }
    if !can_mount(test) || !["setpriv", "prlimit", "python3"].iter().all(|program| has_program(test, program)) {
        return false;
    }
    // With that capability the daemon would raise its limit again.
    let status = Command::new("setpriv")
        .args(["--bounding-set", "-sys_resource", "prlimit", &format!("--nofile={LIMIT}:{LIMIT}")])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(LIMITED, "1")
        .status()
        .unwrap();
    assert!(status.success());
    false
}

/// A process that opens files and keeps them open until it is dropped.
struct Opener {
    process: Child,
    /// How many it has opened.
    opened: usize,
    /// Why it has no more.
    errno: i32,
}

impl Opener {
    /// As that user, each of `paths` (a Python expression) in turn, until an error.
    fn of(uid: u32, paths: &str) -> Opener {
        let script = format!(
            "import os, sys
os.setgroups([])
os.setresgid({uid}, {uid}, {uid})
os.setresuid({uid}, {uid}, {uid})
kept, errno = [], 0
for path in {paths}:
    try: kept.append(os.open(path, os.O_RDONLY))
    except OSError as error:
        errno = error.errno
        break
print(len(kept), errno, flush=True)
sys.stdin.read()"
        );
        let mut process = Command::new("python3")
            .args(["-c", &script])
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        println!("user {uid}: opened and errno {line}");
        let (opened, errno) = line.trim().split_once(' ').unwrap();
        Opener { opened: opened.parse().unwrap(), errno: errno.parse().unwrap(), process }
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

fn make_files(m: &Mounted, count: usize) {
    (0..count).for_each(|number| fs::write(m.backing(format!("f{number}")), b"x").unwrap());
}

#[test]
fn one_user_leaves_descriptors_to_others() {
    if !is_limited("one_user_leaves_descriptors_to_others") {
        return;
    }
    let m = Mounted::through();
    make_files(&m, 1500);
    fs::create_dir(m.backing("all")).unwrap();
    shell(&format!("chmod 1777 {}", m.backing("all").display()));
    let at = m.path("").display().to_string();
    // Inodes take what there is, and give it back to open files.
    shell(&format!("ls -l {at}"));
    let held = m.mount().status().inodes_with_descriptor;
    assert!(held > LIMIT as u64 / 2, "{held}");
    let files = format!("[f'{at}/f{{number}}' for number in range(900)]");
    let first = Opener::of(65534, &files);
    assert_eq!(first.errno, libc::EMFILE);
    assert!(first.opened > LIMIT * 2 / 5, "{}", first.opened);
    let status = m.mount().status();
    assert!(status.inodes_with_descriptor < held && status.descriptors < status.descriptors_max, "{status:?}");
    assert_eq!(status.descriptors_max, LIMIT as u64);

    // Others look up what nobody has looked up yet, open, create, list and close.
    for (uid, file) in [(1000, 1000), (0, 1001)] {
        let work = format!(
            "set -e; cat {at}/f{file} > {at}/all/{uid}; stat {at}/f{file}; mkdir {at}/all/d{uid}; ls -l {at}/all"
        );
        let done = as_user(uid, uid, "--clear-groups", &work);
        assert!(done.status.success(), "user {uid}");
    }
    let second = Opener::of(1000, &files);
    assert_eq!(second.errno, libc::EMFILE);
    assert!(second.opened > LIMIT / 16, "{}", second.opened);
    let roots = Opener::of(0, &files);
    assert!(roots.opened > LIMIT / 64, "{}", roots.opened);
    shell(&format!("stat {at}/f1499 {at}/all/d0"));

    // After a close, a file can be opened again.
    drop((second, roots));
    let opened = first.opened;
    drop(first);
    m.wait_until_closed();
    assert_eq!(Opener::of(65534, &files).opened, opened);
    m.wait_until_closed();
    // Root has nearly all, if nobody else wants it.
    let roots = Opener::of(0, &files);
    assert!(roots.opened > LIMIT / 2, "{}", roots.opened);
    shell(&format!("stat {at}/f1498 {at}/all/1000"));
}

/// Files that were deleted while they are open cost no more than others.
#[test]
fn deleted_files_count_once() {
    if !is_limited("deleted_files_count_once") {
        return;
    }
    let m = Mounted::through();
    make_files(&m, 900);
    let at = m.path("").display().to_string();
    let opener = Opener::of(65534, &format!("[f'{at}/f{{number}}' for number in range(900)]"));
    shell(&format!("rm {at}/f?*"));
    assert!(opener.opened > LIMIT * 2 / 5, "{}", opener.opened);
    fs::write(m.backing("new"), b"new").unwrap();
    assert_eq!(shell(&format!("cat {at}/new; mkdir {at}/d; ls {at}")), "newd\nnew\n");
    drop(opener);
    m.wait_until_closed();
    wait_until("all are forgotten", || m.mount().status().inodes <= 3);
}

#[test]
fn closing_takes_no_descriptor() {
    if !is_limited("closing_takes_no_descriptor") {
        return;
    }
    let m = Mounted::through();
    make_files(&m, 1);
    let script = format!(
        "import os, sys
file = os.open({:?}, os.O_RDWR)
os.write(file, b'y')
print(flush=True)
sys.stdin.readline()
os.close(file)",
        m.path("f0")
    );
    let mut writer =
        Command::new("python3").args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(writer.stdout.take().unwrap());
    stdout.read_line(&mut String::new()).unwrap();
    let mut stdin = writer.stdin.take().unwrap();
    let all: Vec<_> = std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect();
    stdin.write_all(b"\n").unwrap();
    let status = writer.wait().unwrap();
    drop((all, stdin));
    assert!(status.success(), "close failed");
    assert_eq!(fs::read(m.backing("f0")).unwrap(), b"y");
}

/// Opens of one file by one user share a descriptor where no other is left: a program meets its own
/// limit first.
#[test]
fn opens_of_one_file_share_the_last_descriptor() {
    if !is_limited("opens_of_one_file_share_the_last_descriptor") {
        return;
    }
    let m = Mounted::through();
    make_files(&m, 2);
    let at = m.path("").display().to_string();
    for uid in [65534, 0] {
        let opener = Opener::of(uid, &format!("[f'{at}/f0'] * 2000"));
        // All that python has not open itself.
        assert!(opener.opened > LIMIT - 20 && opener.errno == libc::EMFILE, "{}", opener.opened);
        assert!(m.mount().status().descriptors < LIMIT as u64);
        // Another file needs one.
        shell(&format!("stat {at}/f1"));
        drop(opener);
        m.wait_until_closed();
    }
    // To write, too; and each is told what fails.
    let script = format!(
        "import os
kept = []
try:
    while True: kept.append(os.open('{at}/f0', os.O_RDWR))
except OSError: pass
for number, file in enumerate(kept): os.pwrite(file, b'%04d' % number, number * 4)
for number, file in enumerate(kept): assert os.pread(file, 4, number * 4) == b'%04d' % number, number
os.fsync(kept[-1])
for file in kept: os.close(file)
print(len(kept))"
    );
    let output = Command::new("python3").args(["-c", &script]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let count: usize = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
    assert!(count > LIMIT - 20);
    assert_eq!(fs::metadata(m.backing("f0")).unwrap().len(), count as u64 * 4);
}

/// Where files have no handles, a descriptor holds each inode that the kernel knows: it is made to
/// forget some.
#[test]
fn many_names_without_handles() {
    if !is_limited("many_names_without_handles") {
        return;
    }
    let (directory, backing) = new_backing();
    let ramfs = FileSystem::ramfs(&backing);
    let m = Mounted::over(directory, Some(ramfs), |_| {});
    for number in 0..40 {
        fs::create_dir(m.backing(format!("d{number}"))).unwrap();
        for file in 0..60 {
            fs::write(m.backing(format!("d{number}/f{file}")), b"x").unwrap();
        }
    }
    let at = m.path("").display().to_string();
    let listed = shell(&format!("find {at} -type f -size 1 | wc -l"));
    assert_eq!(listed.trim(), "2400");
    shell(&format!("ls -lR {at} > /dev/null && cat {at}/d*/f* > /dev/null && ls -d {at}/d*/"));
    let status = m.mount().status();
    assert!(status.descriptors < LIMIT as u64, "{status:?}");
    // A user who has files open does not stand in the way.
    let opener = Opener::of(65534, &format!("[f'{at}/d0/f{{number}}' for number in range(60)]"));
    assert_eq!((opener.opened, opener.errno), (60, 0));
    shell(&format!("ls -lR {at} > /dev/null"));
}
