//! copy_file_range(2): by shared blocks where the backing file system has them, else through the
//! kernel's cache; and what it leaves of the pages that it copies into.

mod support;

use rustix::fs::copy_file_range;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::fs::{self, File};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use support::own::{Own, answer_orders};
use support::*;

const FILE_BYTES: usize = (8 << 20) + 1000;

fn open(path: impl AsRef<std::path::Path>) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// Bytes that this process has had read from disks, the daemon of its mounts included.
fn disk_bytes_read() -> u64 {
    let io = fs::read_to_string("/proc/self/io").unwrap();
    os::fields::count(&io, "read_bytes").unwrap()
}

/// Held by tests that read a disk: what this process has read is counted as a whole.
static DISK: Mutex<()> = Mutex::new(());

/// Cached bytes are copied from the cache, without a read of the disk.
#[test]
fn a_cached_file_is_copied_without_the_disk() {
    if !can_mount("a_cached_file_is_copied_without_the_disk") {
        return;
    }
    let _alone = DISK.lock();
    let m = Mounted::through();
    let bytes = pattern(FILE_BYTES, 1);
    fs::write(m.backing("a"), &bytes).unwrap();
    let backing = File::open(m.backing("a")).unwrap();
    backing.sync_all().unwrap();
    let disk_bytes_of = |work: &dyn Fn()| {
        rustix::fs::fadvise(&backing, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let before = disk_bytes_read();
        work();
        disk_bytes_read() - before
    };
    // The next open drops what was read just after an external change (docs/design/consistency.md,
    // R32).
    wait_until("an open keeps the cache", || {
        let read = disk_bytes_of(&|| assert!(fs::read(m.path("a")).unwrap() == bytes));
        read < FILE_BYTES as u64 / 2
    });
    // Asks for copy_file_range.
    let read = disk_bytes_of(&|| assert!(fs::copy(m.path("a"), m.path("b")).unwrap() == FILE_BYTES as u64));
    assert!(read < FILE_BYTES as u64 / 2, "{read} bytes were read");
    assert!(fs::read(m.backing("b")).unwrap() == bytes);
}

/// Where the backing file system shares blocks, a copy takes no space. Parts of pages are copied
/// all the same.
#[test]
fn a_copy_shares_blocks() {
    if !can_mount("a_copy_shares_blocks") || !has_program("a_copy_shares_blocks", "mkfs.xfs") {
        return;
    }
    let _alone = DISK.lock();
    let images = tempfile::tempdir().unwrap();
    for write in [mount::WriteMode::Through, mount::WriteMode::Back] {
        let (directory, backing) = new_backing();
        let xfs = FileSystem::xfs(&backing, &images.path().join(format!("{write:?}")));
        let m = Mounted::over(directory, Some(xfs), |config| config.write = write);
        let bytes = pattern(FILE_BYTES, 2);
        fs::write(m.path("a"), &bytes).unwrap();
        File::open(m.path("a")).unwrap().sync_all().unwrap();
        let free_bytes = || {
            rustix::fs::sync();
            let found = rustix::fs::statvfs(m.backing("")).unwrap();
            found.f_bfree * found.f_frsize
        };
        let before = free_bytes();
        fs::copy(m.path("a"), m.path("b")).unwrap();
        let taken = before.saturating_sub(free_bytes());
        assert!(taken < FILE_BYTES as u64 / 2, "{write:?}: {taken} bytes were taken");
        assert!(fs::read(m.path("b")).unwrap() == bytes);
        assert!(fs::read(m.backing("b")).unwrap() == bytes);
        // Not whole pages, and not to the end.
        let mut expected = bytes.clone();
        expected.copy_within(100..5000, 10_000);
        let (from, to) = (open(m.path("a")), File::options().write(true).open(m.path("b")).unwrap());
        assert_eq!(copy_file_range(&from, Some(&mut 100), &to, Some(&mut 10_000), 4900), Ok(4900));
        assert!(fs::read(m.path("b")).unwrap() == expected);
    }
}

/// The other process: counts in the first bytes of a file, through a mapping, from the first order
/// on, which is the path. It stops at the next order, and answers how many numbers it has stored,
/// and how many of them were gone.
#[test]
#[ignore = "a process of another test"]
fn counts() {
    let is_over = Arc::new(AtomicBool::new(false));
    let mut counter: Option<JoinHandle<(u64, u64)>> = None;
    answer_orders(|order| {
        if let Some(counter) = counter.take() {
            is_over.store(true, Ordering::Relaxed);
            let (count, lost) = counter.join().unwrap();
            return format!("{count} {lost}");
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of a file of that size.
        let at = unsafe { mmap(std::ptr::null_mut(), 4096, access, MapFlags::SHARED, open(order), 0).unwrap() };
        // SAFETY: the mapping is aligned, longer than a number, used by no other thread of this
        // process, and lives as long as this process.
        let number: &'static AtomicU64 = unsafe { AtomicU64::from_ptr(at.cast()) };
        let is_over = is_over.clone();
        counter = Some(std::thread::spawn(move || {
            let (mut count, mut lost) = (0, 0);
            while !is_over.load(Ordering::Relaxed) {
                lost += u64::from(number.load(Ordering::Relaxed) != count);
                count += 1;
                number.store(count, Ordering::Relaxed);
            }
            (count, lost)
        }));
        "counts".to_owned()
    });
}

/// A copy into one part of a page takes nothing that a mapping stores into another part.
#[test]
fn a_copy_drops_no_neighbour() {
    if !can_mount("a_copy_drops_no_neighbour") {
        return;
    }
    let copies = tries(1000);
    both_modes(|m| {
        fs::write(m.path("from"), pattern(4096, 3)).unwrap();
        fs::write(m.path("to"), vec![0; 4096]).unwrap();
        let (from, to) = (open(m.path("from")), open(m.path("to")));
        let mut counter = Own::start("counts");
        assert_eq!(counter.ask(m.path("to").to_str().unwrap()).as_deref(), Some("counts"));
        for _ in 0..copies {
            copy_file_range(&from, Some(&mut 512), &to, Some(&mut 512), 512).unwrap();
        }
        let counted = counter.ask("stop").unwrap();
        let (count, lost) = counted.split_once(' ').unwrap();
        println!("{count} stores beside {copies} copies");
        assert_eq!(lost, "0", "stores that were gone");
        assert_ne!(count, "0");
        assert!(fs::read(m.path("to")).unwrap()[512..1024] == pattern(4096, 3)[512..1024]);
    });
}
