//! Nothing is cached twice: what is read or written through the mount does not stay in the page
//! cache below.

mod support;

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use support::own::{Own, answer_orders, file_of_test};
use support::*;

const LEN: usize = 8 << 20;

/// Pages of a file in the page cache of its own file system.
fn resident_pages(path: &Path) -> usize {
    resident_pages_of(&File::open(path).unwrap())
}

/// Pages of an open file in the page cache of its own file system: opening it once more may drop
/// what the mount caches.
fn resident_pages_of(file: &File) -> usize {
    let len = file.metadata().unwrap().len() as usize;
    let mut pages = vec![0u8; len.div_ceil(4096)];
    // SAFETY: a fresh mapping of `len` bytes, never touched; mincore writes one byte per page to
    // `pages`, which has as many.
    unsafe {
        let flags = rustix::mm::MapFlags::SHARED;
        let memory = rustix::mm::mmap(std::ptr::null_mut(), len, rustix::mm::ProtFlags::READ, flags, file, 0).unwrap();
        assert_eq!(libc::mincore(memory, len, pages.as_mut_ptr()), 0);
        rustix::mm::munmap(memory, len).unwrap();
    }
    pages.iter().filter(|page| **page & 1 != 0).count()
}

/// The other process: locks all pages of a file of the test into memory, as long as the process
/// lives. The order is the number of the test's descriptor.
#[test]
#[ignore = "a process of another test"]
fn locks() {
    answer_orders(|order| {
        let file = file_of_test(order.parse().unwrap());
        let len = file.metadata().unwrap().len() as usize;
        // SAFETY: a fresh mapping of `len` bytes, which nobody reads through.
        unsafe {
            let flags = rustix::mm::MapFlags::SHARED;
            let memory =
                rustix::mm::mmap(std::ptr::null_mut(), len, rustix::mm::ProtFlags::READ, flags, &file, 0).unwrap();
            rustix::mm::mlock(memory, len).unwrap();
        }
        "locked".to_owned()
    });
}

/// Locks all pages of a file, until the returned process is dropped. The kernel may not evict them,
/// so a page that is missing then was dropped. Another process does this: this one serves the
/// mount, so it must not wait in a page fault.
fn lock(file: &File) -> Own {
    let mut locker = Own::start("locks");
    assert_eq!(locker.ask(&file.as_raw_fd().to_string()).as_deref(), Some("locked"));
    locker
}

fn drop_backing(path: &Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    assert_eq!(resident_pages(path), 0);
}

#[test]
fn reads_leave_nothing_in_the_backing_cache() {
    if !can_mount("reads_leave_nothing_below") {
        return;
    }
    let m = Mounted::through();
    let bytes = pattern(LEN + 100, 1);
    fs::write(m.backing("a"), &bytes).unwrap();
    drop_backing(&m.backing("a"));
    let mut file = File::open(m.path("a")).unwrap();
    let mut read = Vec::new();
    file.read_to_end(&mut read).unwrap();
    assert!(read == bytes);
    let (here, backing) = (resident_pages_of(&file), resident_pages(&m.backing("a")));
    println!("after reading {} pages: {here} cached in the mount, {backing} in the backing file", LEN / 4096);
    assert!(here >= LEN / 4096 && backing <= LEN / 4096 / 100);
}

#[test]
fn random_reads_leave_nothing_in_the_backing_cache() {
    if !can_mount("random_reads_leave_nothing_below") {
        return;
    }
    use std::os::unix::fs::FileExt;
    let m = Mounted::through();
    let bytes = pattern(LEN, 4);
    fs::write(m.backing("a"), &bytes).unwrap();
    drop_backing(&m.backing("a"));
    let file = File::open(m.path("a")).unwrap();
    // Every 7th page, from the back: nothing that invites read-ahead, and nothing that would drop
    // what was read ahead.
    let offsets: Vec<_> = (0..LEN).step_by(7 * 4096).rev().collect();
    for offset in &offsets {
        let mut page = [0; 4096];
        file.read_exact_at(&mut page, *offset as u64).unwrap();
        assert!(page == bytes[*offset..*offset + 4096]);
    }
    let backing = resident_pages(&m.backing("a"));
    println!("after reading {} pages at random: {backing} cached in the backing file", offsets.len());
    assert!(backing <= 2);
}

/// A stream of which every eighth page is cached already, as it were: what lies between is read
/// ahead below, a window at a time, and leaves nothing behind either.
#[test]
fn streams_in_pieces_are_read_ahead_in_the_backing_file() {
    if !can_mount("streams_in_pieces_are_read_ahead_below") {
        return;
    }
    const PIECE: usize = 7 * 4096;
    const WINDOW_PAGES: usize = 128;
    let m = Mounted::through();
    let bytes = pattern(LEN, 5);
    fs::write(m.backing("a"), &bytes).unwrap();
    drop_backing(&m.backing("a"));
    let file = File::open(m.path("a")).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    let mut most = 0;
    for offset in (0..LEN).step_by(8 * 4096) {
        let mut piece = [0; PIECE];
        file.read_exact_at(&mut piece, offset as u64).unwrap();
        assert!(piece == bytes[offset..offset + PIECE]);
        most = most.max(resident_pages(&m.backing("a")));
    }
    println!("while reading {} pages in pieces: up to {most} cached in the backing file", LEN / 4096);
    assert!((WINDOW_PAGES / 2..=2 * WINDOW_PAGES).contains(&most));
    drop(file);
    wait_until("nothing is left in the backing file's cache", || resident_pages(&m.backing("a")) == 0);
}

#[test]
fn synced_writes_leave_the_backing_cache() {
    if !can_mount("writes_leave_below_when_synced") {
        return;
    }
    both_modes(|m| {
        fs::write(m.path("a"), pattern(LEN, 2)).unwrap();
        let file = File::options().write(true).open(m.path("a")).unwrap();
        file.sync_all().unwrap();
        let backing = resident_pages(&m.backing("a"));
        println!("after writing and syncing {} pages: {backing} cached in the backing file", LEN / 4096);
        assert!(backing <= LEN / 4096 / 100);
    });
}

#[test]
fn writes_leave_the_backing_cache_by_themselves() {
    if !can_mount("writes_leave_below_by_themselves") {
        return;
    }
    let m = Mounted::with(|config| config.written_linger = Duration::from_millis(100));
    fs::write(m.path("a"), pattern(LEN, 3)).unwrap();
    for small in 0..50 {
        fs::write(m.path(format!("small{small}")), pattern(5000, small)).unwrap();
    }
    wait_until("the janitor has dropped what was written", || {
        m.mount().status().written_files_pending == 0 && resident_pages(&m.backing("a")) == 0
    });
    wait_until("nor is anything left of small files", || {
        (0..50).all(|small| resident_pages(&m.backing(format!("small{small}"))) == 0)
    });
    assert!(fs::read(m.path("a")).unwrap() == pattern(LEN, 3));
}

/// Small amounts stay dirty as long as the kernel allows, so that a page that is written again and
/// again is written to the disk once.
#[test]
fn where_much_is_written_the_largest_leaves_first() {
    const SMALL_BYTES: usize = 5000;
    if !can_mount("where_much_is_written_the_largest_leaves_first") {
        return;
    }
    let m = Mounted::with(|config| {
        config.written_linger = Duration::from_secs(86_400);
        config.written_bytes = 40 * SMALL_BYTES as u64;
    });
    let is_there = |name: String| resident_pages(&m.backing(name)) == SMALL_BYTES.div_ceil(page::PAGE_SIZE);
    for small in 0..20 {
        fs::write(m.path(format!("small{small}")), pattern(SMALL_BYTES, small)).unwrap();
    }
    fs::write(m.path("large"), pattern(30 * SMALL_BYTES, 100)).unwrap();
    wait_until("the janitor has dropped the large one", || {
        m.mount().status().written_files_pending == 20 && resident_pages(&m.backing("large")) == 0
    });
    assert!((0..20).all(|small| is_there(format!("small{small}"))), "all that is left is half of what may be there");
    assert_eq!(m.mount().status().written_bytes_pending, 20 * SMALL_BYTES as u64);
    for small in 20..41 {
        fs::write(m.path(format!("small{small}")), pattern(SMALL_BYTES, small)).unwrap();
    }
    wait_until("of small ones only half is left", || m.mount().status().written_files_pending <= 20);
    fs::File::open(m.path("small40")).unwrap().sync_all().unwrap();
    wait_until("what was synced is gone", || resident_pages(&m.backing("small40")) == 0);
}

/// Nothing overtakes what the kernel writes back by itself, in whatever order the workers take it
/// up: so none of it is dropped.
#[test]
fn what_is_written_back_stays_cached() {
    const WRITERS: usize = 8;
    const WRITES: usize = 500;
    const WRITES_PER_SYNC: usize = 25;
    if !can_mount("what_is_written_back_stays_cached") {
        return;
    }
    let m = Mounted::with(|config| {
        config.write = mount::WriteMode::Back;
        config.threads = 2 * WRITERS;
    });
    fs::write(m.path("a"), pattern(LEN, 3)).unwrap();
    let file = File::options().read(true).write(true).open(m.path("a")).unwrap();
    let locked = lock(&file);
    let before = m.mount().status().requested_drops;
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let file = &file;
            scope.spawn(move || {
                for nth in 0..WRITES {
                    // Scattered: each is a request of its own.
                    let page = (nth * 7919 + writer * 131) % (LEN / 4096);
                    file.write_all_at(&[nth as u8; 4096], (page * 4096) as u64).unwrap();
                    if nth % WRITES_PER_SYNC == 0 {
                        file.sync_data().unwrap();
                    }
                }
            });
        }
    });
    file.sync_all().unwrap();
    assert_eq!(m.mount().status().requested_drops, before);
    assert_eq!(resident_pages_of(&file), LEN / 4096);
    drop(locked);
    // External changes do not.
    File::options().write(true).open(m.backing("a")).unwrap().write_all_at(b"beside", 0).unwrap();
    File::open(m.path("a")).unwrap();
    assert!(m.mount().status().requested_drops > before);
}

/// On a file system without RWF_DONTCACHE (tmpfs), the next ways read the same bytes.
#[test]
fn other_ways_of_reading() {
    if !can_mount("other_ways_of_reading") {
        return;
    }
    let (directory, backing) = new_backing();
    let small = FileSystem::tmpfs(&backing, "size=32m");
    let m = Mounted::over(directory, Some(small), |_| {});
    for len in [0, 1, 4095, 4096, 4097, 123_456, LEN + 1] {
        let bytes = pattern(len, len as u64);
        let (a, b) = (format!("a{len}"), format!("b{len}"));
        fs::write(m.backing(&a), &bytes).unwrap();
        fs::write(m.path(&b), &bytes).unwrap();
        assert!(fs::read(m.path(&a)).unwrap() == bytes && fs::read(m.path(&b)).unwrap() == bytes, "{len}");
        fs::remove_file(m.path(&a)).unwrap();
        fs::remove_file(m.path(&b)).unwrap();
    }
}
