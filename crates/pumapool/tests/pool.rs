//! The whole path: evicted pages go to a lender and come back, for real mounts, real evictions,
//! real lenders.

mod setup;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use setup::{Lender, Mount, PATIENCE, can_run, unless_stalled, write_pages};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use testbed::{Done, Group, MemoryHog, Scratch, wait_until};

const PAGES: u64 = 300;

fn there_and_back(test: &str, strategy: &str, remaining: u64) {
    if !can_run(test) {
        return;
    }
    unless_stalled(|stalls| {
        let scratch = Scratch::new(test).unwrap();
        let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
        let bytes = write_pages(&source.join("file"), PAGES as usize, 1);
        let lender = Lender::start(scratch.path(), "64MiB", &[]);
        let mount =
            Mount::start(&source, &at, &["--lender", &lender.address, "--strategy", strategy, "--fill", "evict"]);
        mount.measure(&lender, stalls);
        let file = at.join("file");

        assert!(fs::read(&file).unwrap() == bytes);
        assert_eq!(mount.count(|of| of.get_messages), 0, "what the catalog calls absent is not asked for");
        assert_eq!(mount.count(|of| of.backing_pages), PAGES);

        mount.evict(&file, PAGES);
        assert_eq!(lender.count(|of| of.stored_pages), PAGES);

        assert!(fs::read(&file).unwrap() == bytes);
        mount.in_time(stalls)?;
        let from_pool = mount.count(|of| of.lender_pages) + mount.count(|of| of.buffer_pages);
        assert_eq!((from_pool, mount.count(|of| of.backing_pages)), (PAGES, PAGES), "nothing more came from below");
        assert_eq!(lender.count(|of| of.stored_pages), remaining);
        assert_eq!(lender.count(|of| of.hits), mount.count(|of| of.lender_pages));

        // Evicted again, what the lender still has is not sent again.
        let sent = mount.count(|of| of.put_pages);
        mount.evict(&file, PAGES);
        assert_eq!(mount.count(|of| of.put_pages) - sent, PAGES - remaining);
        assert_eq!(mount.status().tap.clone().unwrap_or_default().skipped_pages, remaining, "nor is it copied");
        assert!(fs::read(&file).unwrap() == bytes);
        Some(())
    });
}

#[test]
fn exclusive_pages_leave_the_lender() {
    there_and_back("exclusive_pages_leave_the_lender", "exclusive", 0);
}

#[test]
fn non_inclusive_pages_stay() {
    there_and_back("non_inclusive_pages_stay", "non-inclusive", PAGES);
}

#[test]
fn what_was_written_is_copied_and_lent_again() {
    let test = "what_was_written_is_copied_and_lent_again";
    if !can_run(test) {
        return;
    }
    unless_stalled(|stalls| {
        let scratch = Scratch::new(test).unwrap();
        let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
        let mut bytes = write_pages(&source.join("file"), PAGES as usize, 8);
        let lender = Lender::start(scratch.path(), "64MiB", &[]);
        let options = ["--lender", &lender.address, "--strategy", "non-inclusive", "--fill", "evict"];
        let mount = Mount::start(&source, &at, &options);
        mount.measure(&lender, stalls);
        let path = at.join("file");
        assert!(fs::read(&path).unwrap() == bytes);
        mount.evict(&path, PAGES);
        // From the lender, which has it still: it need not be copied.
        assert!(fs::read(&path).unwrap() == bytes);
        mount.in_time(stalls)?;
        let (page, sent) = (0x2a * page::PAGE_SIZE, mount.count(|of| of.put_pages));
        bytes[page..page + page::PAGE_SIZE].fill(0x77);
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(&bytes[page..page + page::PAGE_SIZE], page as u64).unwrap();
        drop(file);
        mount.evict(&path, PAGES);
        assert_eq!(mount.count(|of| of.put_pages) - sent, 1, "what was written is lent, and nothing else");
        assert_eq!(mount.status().tap.clone().unwrap_or_default().skipped_pages, PAGES - 1);
        assert_eq!(mount.count(|of| of.evictions_not_copied), 0);
        let below = mount.count(|of| of.backing_pages);
        assert!(fs::read(&path).unwrap() == bytes);
        mount.in_time(stalls)?;
        assert_eq!(mount.count(|of| of.backing_pages), below, "all of it came back");
        Some(())
    });
}

#[test]
fn without_a_tap_pages_are_lent_when_they_are_read() {
    let test = "without_a_tap_pages_are_lent_when_they_are_read";
    if !can_run(test) {
        return;
    }
    unless_stalled(|stalls| {
        let scratch = Scratch::new(test).unwrap();
        let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
        let bytes = write_pages(&source.join("file"), PAGES as usize, 2);
        let lender = Lender::listen("127.0.0.1:0", "64MiB", &[]);
        let mount = Mount::start(&source, &at, &["--lender", &lender.address, "--fill", "read"]);
        mount.measure(&lender, stalls);
        assert!(fs::read(at.join("file")).unwrap() == bytes);
        assert!(wait_until(PATIENCE, || lender.count(|of| of.stored_pages) == PAGES), "{}", mount.status());
        setup::evict(&at.join("file"));
        assert!(fs::read(at.join("file")).unwrap() == bytes);
        mount.in_time(stalls)?;
        assert_eq!(mount.count(|of| of.backing_pages), PAGES);
        Some(())
    });
}

#[test]
fn a_read_ahead_window_is_few_gets() {
    let test = "a_read_ahead_window_is_few_gets";
    if !can_run(test) {
        return;
    }
    const WINDOWS: u64 = 16;
    // So many messages leave at once, so that the lender copies while the pages before are
    // verified.
    const MESSAGES: u64 = 4;
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), WINDOWS as usize * 256, 7);
    let lender = Lender::start(scratch.path(), "64MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address, "--fill", "evict"]);
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    let is_lent = || {
        setup::evict(&at.join("file"));
        let is_settled =
            |status: &report::Mount| status.puts_under_way == 0 && status.catalog.live_pages == WINDOWS * 256;
        // More pages than there are put buffers: what finds none while the lender is held up is
        // lent after the next read.
        let lent = wait_until(PATIENCE / 10, || is_settled(&mount.status()));
        if !lent {
            assert!(fs::read(at.join("file")).unwrap() == bytes);
        }
        lent
    };
    assert!(wait_until(PATIENCE, is_lent), "{}", mount.status());
    let before = mount.count(|of| of.get_messages);
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    // Windows of 256 pages; the first ones are smaller, while the kernel learns that the file is
    // read in order.
    let gets = mount.count(|of| of.get_messages) - before;
    println!("{gets} gets for {} pages", WINDOWS * 256);
    assert!(gets <= MESSAGES * (WINDOWS + 4), "{gets} gets");
}

#[test]
fn a_change_through_the_mount_is_never_hidden_by_the_pool() {
    let test = "a_change_through_the_mount_is_never_hidden_by_the_pool";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let mut bytes = write_pages(&source.join("file"), PAGES as usize, 3);
    let lender = Lender::start(scratch.path(), "64MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address, "--fill", "evict"]);
    let path = at.join("file");
    let mut check = |what: &str, change: &dyn Fn(&fs::File, &mut Vec<u8>)| {
        fs::read(&path).unwrap();
        setup::evict(&path);
        mount.wait_for("pages lent", |status| status.catalog.live_pages > PAGES / 2);
        let file = fs::File::options().read(true).write(true).open(&path).unwrap();
        change(&file, &mut bytes);
        assert!(fs::read(&path).unwrap() == bytes, "through the mount, after {what}");
        assert!(fs::read(source.join("file")).unwrap() == bytes, "below, after {what}");
        drop(file);
        setup::evict(&path);
        assert!(fs::read(&path).unwrap() == bytes, "evicted again, after {what}");
    };
    check("a write inside a page", &|file, bytes| {
        file.write_all_at(b"changed", 5000).unwrap();
        bytes[5000..5007].copy_from_slice(b"changed");
    });
    check("a write over pages", &|file, bytes| {
        let new = vec![7; 40_000];
        file.write_all_at(&new, 10_000).unwrap();
        bytes[10_000..50_000].copy_from_slice(&new);
    });
    check("punching a hole", &|file, bytes| {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(file, flags, 8192, 20_000).unwrap();
        bytes[8192..28_192].fill(0);
    });
    check("truncation and growth", &|file, bytes| {
        let size = bytes.len();
        file.set_len(size as u64 - 30_001).unwrap();
        file.set_len(size as u64).unwrap();
        bytes[size - 30_001..].fill(0);
    });
    check("copying inside the file", &|file, bytes| {
        let (mut from, mut to) = (400_000, 100_000);
        assert_eq!(rustix::fs::copy_file_range(file, Some(&mut from), file, Some(&mut to), 8192).unwrap(), 8192);
        bytes.copy_within(400_000..408_192, 100_000);
    });
    assert_eq!(mount.count(|of| of.bad_pages), 0);
    assert!(mount.count(|of| of.lender_pages) + mount.count(|of| of.buffer_pages) > PAGES, "{}", mount.status());
}

/// The kernel writes back the last page, into which a mapping has stored, and zeroes bytes that an
/// append has just put there. Every FUSE file system loses these bytes. But the mount must show the
/// bytes of the backing file.
#[test]
fn what_writeback_zeroes_beside_an_append_is_not_lent() {
    let test = "what_writeback_zeroes_beside_an_append_is_not_lent";
    if !can_run(test) {
        return;
    }
    const APPENDS: u64 = 3000;
    const APPEND_BYTES: u64 = 700;
    const FILE_BYTES_MAX: usize = 1 << 22;
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let path = at.join("file");
    let lender = Lender::start(scratch.path(), "64MiB", &[]);
    let options = ["--lender", &lender.address, "--fill", "evict", "--strategy", "non-inclusive"];
    let mount = Mount::start(&source, &at, &options);
    let file = fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all_at(&[1; 100], 0).unwrap();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let map = unsafe { mmap(std::ptr::null_mut(), FILE_BYTES_MAX, access, MapFlags::SHARED, &file, 0).unwrap() };
    // SAFETY: the mapping lives longer than this. Others change the bytes, so they are atomic;
    // those behind the end of the file are not touched, and the file never gets shorter.
    let bytes = unsafe { std::slice::from_raw_parts(map.cast::<AtomicU8>(), FILE_BYTES_MAX) };
    let (end, is_done) = (AtomicU64::new(100), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _done = Done(&is_done);
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                let page = (end.load(Ordering::Acquire) - 1) / 4096 * 4096;
                bytes[page as usize].store(2, Ordering::Relaxed);
                let how = libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
                // SAFETY: a system call on a descriptor that is open, with numbers only.
                let synced = unsafe { libc::sync_file_range(file.as_raw_fd(), page as i64, 4096, how) };
                assert_eq!(synced, 0);
            }
        });
        for _ in 0..APPENDS {
            let at = end.load(Ordering::Relaxed);
            file.write_all_at(&[3; APPEND_BYTES as usize], at).unwrap();
            end.store(at + APPEND_BYTES, Ordering::Release);
        }
    });
    // SAFETY: the thread that used it has ended.
    unsafe { munmap(map, FILE_BYTES_MAX).unwrap() };
    file.sync_all().unwrap();
    let below = fs::read(source.join("file")).unwrap();
    let mut differ = 0;
    // Repeat, because a drop of a page may still be queued. A page that was lent wrongly stays
    // wrong.
    wait_until(PATIENCE, || {
        mount.evict_seen(&path);
        mount.wait_for("the puts", |status| status.puts_under_way == 0);
        let shown = fs::read(&path).unwrap();
        assert_eq!(shown.len(), below.len());
        differ = shown.iter().zip(&below).filter(|(shown, below)| shown != below).count();
        differ == 0
    });
    let lost = below.iter().filter(|byte| **byte == 0).count();
    println!("of {} bytes the kernel has lost {lost}; {differ} differ; {}", below.len(), mount.status());
    assert_eq!(differ, 0, "bytes that are not the backing file's");
}

#[test]
fn a_change_beside_the_mount_shows_at_the_next_open() {
    let test = "a_change_beside_the_mount_shows_at_the_next_open";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    write_pages(&source.join("file"), PAGES as usize, 4);
    let lender = Lender::start(scratch.path(), "64MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address, "--fill", "evict"]);
    fs::read(at.join("file")).unwrap();
    mount.evict(&at.join("file"), PAGES);
    fs::read(at.join("file")).unwrap();
    let bytes = write_pages(&source.join("file"), PAGES as usize, 5);
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    // A file replaced by another one, too.
    let bytes = write_pages(&source.join("new"), PAGES as usize / 2, 6);
    fs::rename(source.join("new"), source.join("file")).unwrap();
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    assert_eq!(mount.count(|of| of.bad_pages), 0);
}

/// Reads that are nothing for the lender are answered, too, however many come while it is waited
/// for one that is.
#[test]
fn direct_reads_beside_those_of_a_lender() {
    let test = "direct_reads_beside_those_of_a_lender";
    if !can_run(test) {
        return;
    }
    #[repr(align(4096))]
    struct Aligned([u8; 4096]);
    const DIRECT_READERS: usize = 3;
    const ROUNDS: u64 = 20;
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), PAGES as usize, 1);
    let others = write_pages(&source.join("direct"), PAGES as usize, 2);
    let lender = Lender::listen("127.0.0.1:0", "64MiB", &[]);
    let options = ["--lender", &lender.address, "--strategy", "non-inclusive", "--fill", "evict"];
    let mount = Mount::start(&source, &at, &options);
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    mount.evict(&at.join("file"), PAGES);
    let open = || fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(at.join("direct"));
    if let Err(error) = open() {
        return testbed::skip(test, format!("no O_DIRECT here: {error}"));
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for nth in 0..DIRECT_READERS {
            let (open, others, is_over) = (&open, &others, &is_over);
            scope.spawn(move || {
                let (direct, mut page) = (open().unwrap(), Aligned([0; 4096]));
                let mut random = fastrand::Rng::with_seed(nth as u64);
                while !is_over.load(Ordering::Relaxed) {
                    let offset = random.usize(0..PAGES as usize) * 4096;
                    direct.read_exact_at(&mut page.0, offset as u64).unwrap();
                    assert!(page.0[..] == others[offset..offset + 4096]);
                }
            });
        }
        let read = || {
            let file = fs::File::open(at.join("file"))?;
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)?;
            let mut random = fastrand::Rng::with_seed(9);
            let (mut page, mut are_right) = ([0; 4096], true);
            for _ in 0..ROUNDS {
                setup::evict(&at.join("file"));
                for _ in 0..PAGES {
                    let offset = random.usize(0..PAGES as usize) * 4096;
                    file.read_exact_at(&mut page, offset as u64)?;
                    are_right &= page[..] == bytes[offset..offset + 4096];
                }
            }
            std::io::Result::Ok(are_right)
        };
        let are_right = read();
        is_over.store(true, Ordering::Relaxed);
        assert!(are_right.unwrap());
    });
    let (gets, direct) = (mount.count(|of| of.get_messages), mount.status().mount.direct_reads);
    assert!(gets > PAGES && direct > PAGES, "{gets} gets, {direct} direct reads");
}

#[test]
fn borrowers_are_strangers_to_each_other() {
    let test = "borrowers_are_strangers_to_each_other";
    if !can_run(test) {
        return;
    }
    unless_stalled(|stalls| {
        let scratch = Scratch::new(test).unwrap();
        let address = format!("unix:{}", scratch.path().join("lender.sock").display());
        let lender = Lender::with(&address, &["--capacity", "64MiB", "--grace", "0"], &[]);
        let mut mounts = Vec::new();
        for number in 0..2u64 {
            let source = scratch.directory(&format!("source{number}")).unwrap();
            let at = scratch.directory(&format!("mount{number}")).unwrap();
            let bytes = write_pages(&source.join("file"), PAGES as usize, 10 + number);
            let mount = Mount::start(&source, &at, &["--lender", &lender.address, "--fill", "evict"]);
            mount.measure(&lender, stalls);
            assert!(fs::read(at.join("file")).unwrap() == bytes);
            mount.evict(&at.join("file"), PAGES);
            mounts.push((mount, bytes));
        }
        // Both call their file and pages by the same names, and each gets its own.
        assert_eq!((lender.count(|of| of.stored_pages), lender.count(|of| of.borrowers)), (2 * PAGES, 2));
        for (mount, bytes) in &mounts {
            assert!(fs::read(mount.path.join("file")).unwrap() == *bytes);
            assert_eq!(mount.count(|of| of.bad_pages), 0);
            mount.in_time(stalls)?;
            assert_eq!(mount.count(|of| of.backing_pages), PAGES);
            mount.evict(&mount.path.join("file"), PAGES);
        }
        // A daemon that dies frees its pages, and only those; the one that takes over has none of
        // them.
        mounts[0].0.kill_daemon();
        assert!(wait_until(PATIENCE, || lender.count(|of| of.stored_pages) == PAGES), "the dead borrower's pages stay");
        assert!(fs::read(mounts[1].0.path.join("file")).unwrap() == mounts[1].1);
        mounts[1].0.in_time(stalls)?;
        assert_eq!(mounts[1].0.count(|of| of.backing_pages), PAGES);
        Some(())
    });
}

#[test]
fn a_lender_may_come_and_go() {
    let test = "a_lender_may_come_and_go";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), PAGES as usize, 20);
    let address = format!("unix:{}", scratch.path().join("lender.sock").display());
    let mut lender = Lender::listen(&address, "64MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &address, "--fill", "evict"]);
    for round in 1..=3 {
        mount.wait_for("the lender", |status| status.lender_is_up);
        assert!(fs::read(at.join("file")).unwrap() == bytes);
        mount.evict(&at.join("file"), PAGES);
        lender.process.kill().unwrap();
        let below = mount.count(|of| of.backing_pages);
        assert!(fs::read(at.join("file")).unwrap() == bytes, "round {round}");
        assert_eq!(mount.count(|of| of.backing_pages), below + PAGES, "the pages are gone with the lender");
        mount.wait_for("the loss", |status| !status.lender_is_up);
        setup::evict(&at.join("file"));
        assert!(fs::read(at.join("file")).unwrap() == bytes);
        setup::evict(&at.join("file"));
        lender = Lender::listen(&address, "64MiB", &[]);
    }
    assert!(mount.count(|of| of.lender_losses) >= 3);
}

#[test]
fn a_squeezed_lender_gives_its_memory_back() {
    let test = "a_squeezed_lender_gives_its_memory_back";
    if !can_run(test) {
        return;
    }
    const LIMIT_BYTES: u64 = 160 << 20;
    const FILE_PAGES: usize = 96 << 8; // 96 MiB
    let group = match Group::create(test, Some(LIMIT_BYTES), None) {
        Ok(group) => group,
        Err(error) => return testbed::skip(test, error),
    };
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), FILE_PAGES, 30);
    let lender = Lender::start(scratch.path(), "128MiB", &[&group]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address, "--fill", "read"]);
    // A reader is never held up for a lender that is slower: what found no put buffer is lent at
    // the next read.
    let nearly_all_lent = || {
        setup::evict(&at.join("file"));
        assert!(fs::read(at.join("file")).unwrap() == bytes);
        lender.count(|of| of.stored_pages) > FILE_PAGES as u64 * 9 / 10
    };
    assert!(wait_until(PATIENCE, nearly_all_lent), "{}", mount.status());

    // Nearly all of the group's memory, as fast as it goes: the lender gives it back, or the kernel
    // takes it, and kills nobody.
    let squeeze = MemoryHog::start(LIMIT_BYTES - (24 << 20), &[&group]).unwrap();
    squeeze.wait_until_held(PATIENCE).unwrap();
    let given_up = || lender.count(|of| of.shrunk) + lender.count(|of| of.reclaimed_by_kernel);
    assert!(
        wait_until(PATIENCE, || given_up() > 0 && mount.count(|of| of.lost_pages) > 0),
        "given up {}, reported lost {}",
        given_up(),
        mount.count(|of| of.lost_pages),
    );
    setup::evict(&at.join("file"));
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    assert_eq!(mount.count(|of| of.bad_pages), 0);
    // It may be late while the kernel takes its memory, and lost for that, but it does not end.
    mount.wait_for("the lender", |status| status.lender_is_up);
}
