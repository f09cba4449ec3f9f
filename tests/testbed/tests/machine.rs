//! Tests of these controls on the machine itself. They need root and control groups; without these
//! they are skipped.

use rustix::process::Signal;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testbed::{Group, Line, MemoryHog, Process, Scratch, SlowDisk, skip};

/// No groups.
const NONE: [PathBuf; 0] = [];

const MIB: u64 = 1 << 20;
/// Generous, because the machine may be busy. A test that waits this long has failed.
const LIMIT: Duration = Duration::from_secs(60);

/// A group with that limit, or a message with the reason why there is none.
fn limited(test: &str, limit_bytes: u64) -> Option<Group> {
    Group::create(test, Some(limit_bytes), None).map_err(|error| skip(test, error)).ok()
}

/// Groups of that name that this process made and that still exist, on any hierarchy.
fn groups_left(name: &str) -> Vec<PathBuf> {
    let beginning = format!("puma-{name}-{}-", std::process::id());
    let (mut directories, mut found) = (vec![PathBuf::from("/sys/fs/cgroup")], Vec::new());
    while let Some(directory) = directories.pop() {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            if entry.file_name().to_string_lossy().starts_with(&beginning) {
                found.push(entry.path());
            }
            directories.push(entry.path());
        }
    }
    found
}

/// A directory on a disk: in tmpfs, page cache is memory of its own and no disk is read.
fn on_disk(test: &str) -> Scratch {
    Scratch::new_in(Path::new(env!("CARGO_TARGET_TMPDIR")), test).unwrap()
}

/// A file of that size, on the disk and not in the page cache.
fn uncached_file(directory: &Path, len_bytes: u64) -> PathBuf {
    let path = directory.join("file");
    let file = File::create(&path).unwrap();
    for at in (0..len_bytes).step_by(MIB as usize) {
        file.write_all_at(&[7; MIB as usize], at).unwrap();
    }
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    path
}

/// A shell that runs the script. `$1` in it is `path`.
fn shell(script: &str, path: &Path) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg("sh").arg(path).stdin(Stdio::null());
    command
}

#[test]
fn page_cache_of_a_group_stays_within_its_limit() {
    let (test, limit_bytes, file_bytes) = ("cache-limit", 16 * MIB, 48 * MIB);
    let Some(group) = limited(test, limit_bytes) else { return };
    let scratch = on_disk(test);
    let path = uncached_file(scratch.path(), file_bytes);
    let reader = Process::spawn(shell("cat \"$1\" | wc -c; exec sleep 1000", &path), &[&group]).unwrap();
    assert_eq!(reader.next_line(LIMIT), Line::Text(file_bytes.to_string()));
    let used = group.memory_use().unwrap();
    assert!(used.total_bytes <= limit_bytes, "{used:?}");
    assert!(used.page_cache_bytes >= limit_bytes / 2, "{used:?}");
    drop(reader);
    drop(group);
    assert_eq!(groups_left(test), NONE);
}

#[test]
fn a_slow_disk_is_slow_for_its_groups_until_told_otherwise() {
    let test = "slow-disk";
    let scratch = on_disk(test);
    let disk = match SlowDisk::create(test, scratch.path()) {
        Ok(disk) => disk,
        Err(error) => return skip(test, error),
    };
    let group = Group::create(test, None, Some(&disk)).unwrap();
    let path = uncached_file(scratch.path(), 4 * MIB);
    let read = |count: u32| {
        let script = format!("dd if=\"$1\" of=/dev/null bs=4096 count={count} iflag=direct 2>/dev/null; echo read");
        let (start, before) = (Instant::now(), disk.read_count().unwrap());
        let mut reader = Process::spawn(shell(&script, &path), &[&group]).unwrap();
        reader.wait_for_line("read", LIMIT).unwrap();
        // dd itself may have to be read from the disk as well.
        assert!(disk.read_count().unwrap() - before >= u64::from(count), "reads are counted");
        start.elapsed()
    };
    read(1);
    disk.limit_reads(Some(100)).unwrap();
    // 200 reads at 100 a second; the kernel may grant those of its first time slice at once.
    let slow = read(200);
    assert!(slow >= Duration::from_millis(1500), "{slow:?}");
    disk.limit_reads(None).unwrap();
    // Once is enough: the machine may be busy with other work for longer than that.
    let is_fast = testbed::wait_until(LIMIT, || read(200) < slow);
    assert!(is_fast, "as slow without a limit as with it: {slow:?}");
    drop(group);
    drop(disk);
    assert_eq!(groups_left(test), NONE);
}

#[test]
fn a_squeeze_holds_its_memory_and_gives_it_back() {
    let test = "squeeze";
    let Some(group) = limited(test, 64 * MIB) else { return };
    let memory_hog = MemoryHog::start(32 * MIB, &[&group]).unwrap();
    memory_hog.wait_until_held(LIMIT).unwrap();
    assert!(group.memory_use().unwrap().total_bytes >= 32 * MIB);
    drop(memory_hog);
    let empty = testbed::wait_until(LIMIT, || group.memory_use().unwrap().total_bytes < 8 * MIB);
    assert!(empty, "{:?}", group.memory_use());
}

#[test]
fn a_squeeze_over_the_limit_is_an_error() {
    let Some(group) = limited("squeeze-over", 16 * MIB) else { return };
    let memory_hog = MemoryHog::start(64 * MIB, &[&group]).unwrap();
    let error = memory_hog.wait_until_held(LIMIT);
    // With swap, the child may get its memory nevertheless.
    let swap = fs::read_to_string("/proc/swaps").unwrap().lines().count() > 1;
    assert!(swap || error.is_err());
}

#[test]
fn a_child_is_gone_with_its_guard_even_if_it_will_not_end() {
    let stubborn = "trap '' TERM; echo ready; while :; do sleep 1; done";
    let mut child = Process::spawn(shell(stubborn, Path::new("")), &[]).unwrap();
    child.wait_for_line("ready", LIMIT).unwrap();
    let status = child.stop(Duration::from_millis(50)).unwrap();
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));

    let child = Process::spawn(shell("exec sleep 1000", Path::new("")), &[]).unwrap();
    let pid = child.pid().to_string();
    drop(child);
    assert!(!Path::new("/proc").join(pid).exists());
}

#[test]
fn a_child_that_ends_early_is_told_from_one_that_is_late() {
    let mut child = Process::spawn(shell("echo one; exit 3", Path::new("")), &[]).unwrap();
    let error = child.wait_for_line("two", LIMIT).unwrap_err();
    assert!(error.to_string().contains("exit status: 3"), "{error}");
    let mut child = Process::spawn(shell("echo one; exec sleep 1000", Path::new("")), &[]).unwrap();
    let error = child.wait_for_line("two", Duration::from_millis(50)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
}

#[test]
fn groups_go_on_panic_with_all_their_processes() {
    let test = "panic";
    let Some(group) = limited(test, 64 * MIB) else { return };
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let group = group;
        // No guard has the second child.
        let child = Process::spawn(shell("sleep 1000 & echo started; wait", Path::new("")), &[&group]).unwrap();
        assert_eq!(child.next_line(LIMIT), Line::Text("started".to_owned()));
        panic!("on purpose");
    }));
    assert!(unwound.is_err());
    assert_eq!(groups_left(test), NONE);
}
