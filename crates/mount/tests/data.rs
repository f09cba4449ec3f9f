//! Bytes through a real mount: reading and writing in every way, and the shape of files.

mod support;

use rustix::fs::{FallocateFlags, FlockOperation, SeekFrom, fallocate, seek};
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use support::own::{Own, answer_orders};
use support::*;
use testbed::Done;

fn open(path: std::path::PathBuf) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// The other process: stores through a mapping of a file, and ends the mapping, which waits until
/// the kernel has written what was stored. An order is where to store, how many bytes are mapped,
/// and the path.
#[test]
#[ignore = "a process of another test"]
fn stores() {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
    answer_orders(|order| {
        let mut words = order.splitn(3, ' ');
        let (at, len, path) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
        let len: usize = len.parse().unwrap();
        let appends = at == "append";
        let file = File::options().read(true).write(!appends).append(appends).open(path).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice, which is stored to within
        // its length, and ended.
        let result = unsafe {
            let memory = mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0).unwrap();
            drop(file);
            let bytes = std::slice::from_raw_parts_mut(memory.cast::<u8>(), len);
            let synced = match at {
                "ends" => {
                    (bytes[0], bytes[len - 1]) = (b'a', b'z');
                    msync(memory, len, MsyncFlags::SYNC)
                }
                "append" => {
                    bytes[0] = b'O';
                    msync(memory, len, MsyncFlags::SYNC)
                }
                at => {
                    bytes[at.parse::<usize>().unwrap()] = 1;
                    Ok(())
                }
            };
            munmap(memory, len).unwrap();
            synced
        };
        result.map_or_else(|error| error.to_string(), |()| "stored".to_owned())
    });
}

#[test]
fn written_is_read() {
    if !can_mount("written_is_read") {
        return;
    }
    both_modes(|m| {
        let bytes = pattern(3 << 20 | 1234, 1);
        fs::write(m.path("a"), &bytes).unwrap();
        assert!(fs::read(m.path("a")).unwrap() == bytes);
        let file = open(m.path("a"));
        file.write_all_at(b"middle", 1_000_001).unwrap();
        file.sync_all().unwrap();
        let backing = fs::read(m.backing("a")).unwrap();
        assert_eq!(&backing[1_000_001..1_000_007], b"middle");
        assert_eq!(backing.len(), bytes.len());
        let mut buf = [0; 100];
        assert_eq!(file.read_at(&mut buf, bytes.len() as u64 - 10).unwrap(), 10);
        assert_eq!(file.read_at(&mut buf, bytes.len() as u64 + 10).unwrap(), 0);
    });
}

#[test]
fn truncation() {
    if !can_mount("truncation") {
        return;
    }
    both_modes(|m| {
        fs::write(m.path("a"), pattern(10_000, 2)).unwrap();
        let file = open(m.path("a"));
        file.set_len(5000).unwrap();
        assert_eq!(fs::metadata(m.backing("a")).unwrap().len(), 5000);
        file.set_len(9000).unwrap();
        let read = fs::read(m.path("a")).unwrap();
        assert!(read[..5000] == pattern(10_000, 2)[..5000] && read[5000..] == [0; 4000]);
        // By path, and by a descriptor that cannot write: refused.
        rustix::fs::ftruncate(File::open(m.path("a")).unwrap(), 1).unwrap_err();
        drop(File::create(m.path("a")).unwrap());
        assert_eq!(fs::metadata(m.backing("a")).unwrap().len(), 0);
        fs::write(m.path("a"), b"x").unwrap();
        assert_eq!(fs::read(m.backing("a")).unwrap(), b"x");
    });
}

#[test]
fn appending() {
    if !can_mount("appending") {
        return;
    }
    both_modes(|m| {
        let mut file = File::options().append(true).create(true).open(m.path("a")).unwrap();
        file.write_all(b"one ").unwrap();
        file.write_all(b"two ").unwrap();
        file.sync_all().unwrap();
        assert_eq!(fs::read(m.backing("a")).unwrap(), b"one two ");
    });
    // In `through`, what somebody appends externally is not overwritten, and the kernel sees both
    // afterwards.
    let m = Mounted::through();
    let mut file = File::options().append(true).create(true).open(m.path("a")).unwrap();
    file.write_all(b"one ").unwrap();
    File::options().append(true).open(m.backing("a")).unwrap().write_all(b"beside ").unwrap();
    file.write_all(b"two ").unwrap();
    assert_eq!(fs::read(m.backing("a")).unwrap(), b"one beside two ");
    wait_until("the kernel sees both", || fs::read(m.path("a")).unwrap() == b"one beside two ");
}

#[test]
fn direct_io() {
    if !can_mount("direct_io") {
        return;
    }
    both_modes(|m| {
        let direct = |write| {
            File::options().read(true).write(write).create(write).custom_flags(libc::O_DIRECT).open(m.path("a"))
        };
        #[repr(align(4096))]
        struct Aligned([u8; 16384]);
        let mut buffer = Box::new(Aligned([7; 16384]));
        let file = direct(true).unwrap();
        file.write_all_at(&buffer.0, 0).unwrap();
        file.write_all_at(&buffer.0, 32768).unwrap(); // Beyond the end: a hole in between.
        assert_eq!(fs::metadata(m.backing("a")).unwrap().len(), 49152);
        // A buffered write, then a direct read, then the other way round.
        open(m.path("a")).write_all_at(b"buffered", 4096).unwrap();
        assert_eq!(direct(false).unwrap().read_at(&mut buffer.0, 0).unwrap(), 16384);
        assert_eq!((&buffer.0[4096..4104], buffer.0[4104]), (&b"buffered"[..], 7));
        assert_eq!(&fs::read(m.path("a")).unwrap()[4090..4105], b"\x07\x07\x07\x07\x07\x07buffered\x07");
        buffer.0.fill(9);
        file.write_all_at(&buffer.0[..4096], 4096).unwrap();
        let read = fs::read(m.path("a")).unwrap();
        assert!(read[..4096] == [7; 4096] && read[4096..8192] == [9; 4096] && read[16384..32768] == [0; 16384]);
        assert!(m.mount().status().direct_reads > 0);
        // As in the backing directory, what is not aligned is refused.
        assert_eq!(errno_of(file.write_at(&buffer.0[..100], 50)), libc::EINVAL);
    });
}

#[test]
fn mapped_writes() {
    if !can_mount("mapped_writes") {
        return;
    }
    both_modes(|m| {
        // With O_APPEND among the handles: writeback may come by any of them, and must not append.
        let appending = File::options().append(true).read(true).create(true).open(m.path("a")).unwrap();
        let file = open(m.path("a"));
        file.set_len(10_000).unwrap();
        assert_eq!(Own::start("stores").ask(&format!("ends 10000 {}", m.path("a").display())).unwrap(), "stored");
        drop((appending, file));
        let backing = fs::read(m.backing("a")).unwrap();
        assert_eq!((backing.len(), backing[0], backing[1], backing[9_999]), (10_000, b'a', 0, b'z'));
    });
}

#[test]
fn offsets_at_the_edge() {
    if !can_mount("offsets_at_the_edge") {
        return;
    }
    let m = Mounted::through();
    let (here, backing) = (open(m.path("a")), open(m.backing("b")));
    for offset in [1 << 40, 1 << 44, 1 << 46, i64::MAX as u64 - 4096, i64::MAX as u64 - 1, i64::MAX as u64] {
        let outcomes = [&here, &backing].map(|file| {
            let written = file.write_at(b"x", offset).map_err(|error| error.raw_os_error());
            let read = file.read_at(&mut [0; 2], offset).map_err(|error| error.raw_os_error());
            let grown = file.set_len(offset).map_err(|error| error.raw_os_error());
            file.set_len(0).unwrap();
            (written, read, grown)
        });
        assert_eq!(outcomes[0], outcomes[1], "offset {offset}");
    }
}

#[test]
fn holes() {
    if !can_mount("holes") {
        return;
    }
    both_modes(|m| {
        let file = open(m.path("a"));
        file.write_all_at(b"x", 1 << 20).unwrap();
        file.write_all_at(b"y", 4 << 20).unwrap();
        file.sync_all().unwrap();
        assert_eq!(seek(&file, SeekFrom::Data(0)).unwrap(), 1 << 20);
        assert_eq!(seek(&file, SeekFrom::Hole(1 << 20)).unwrap(), (1 << 20) + 4096);
        assert_eq!(seek(&file, SeekFrom::Data((1 << 20) + 4096)).unwrap(), 4 << 20);
        assert_eq!(seek(&file, SeekFrom::Data(5 << 20)), Err(rustix::io::Errno::NXIO));
        assert!(file.metadata().unwrap().blocks() < 64);
    });
}

/// Data that the kernel has not written yet are no hole: who copies around holes would leave them
/// out.
#[test]
fn what_is_not_written_yet_is_no_hole() {
    const LEN: u64 = 1 << 20;
    const AT: u64 = 500_000;
    if !can_mount("what_is_not_written_yet_is_no_hole") {
        return;
    }
    both_modes(|m| {
        let file = File::options().create_new(true).read(true).write(true).open(m.path("a")).unwrap();
        file.set_len(LEN).unwrap();
        drop(file);
        assert_eq!(Own::start("stores").ask(&format!("{AT} {LEN} {}", m.path("a").display())).unwrap(), "stored");
        let file = File::open(m.path("a")).unwrap();
        let data = seek(&file, SeekFrom::Data(0));
        assert!(data.is_ok_and(|data| data <= AT), "{data:?}");
        assert!(seek(&file, SeekFrom::Hole(AT)).is_ok_and(|hole| hole > AT));
        assert_eq!(seek(&file, SeekFrom::Data(LEN)), Err(rustix::io::Errno::NXIO));
        // Behind the end of the backing file.
        let mut log = File::options().append(true).create(true).open(m.path("log")).unwrap();
        log.write_all(&[1; 5000]).unwrap();
        let reader = File::open(m.path("log")).unwrap();
        assert_eq!((seek(&reader, SeekFrom::Data(4500)), seek(&reader, SeekFrom::Hole(0))), (Ok(4500), Ok(5000)));
    });
}

#[test]
fn allocation() {
    if !can_mount("allocation") {
        return;
    }
    both_modes(|m| {
        let file = open(m.path("a"));
        let bytes = pattern(64 << 10, 3);
        file.write_all_at(&bytes, 0).unwrap();
        fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 1 << 20).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 64 << 10);
        fallocate(&file, FallocateFlags::empty(), 0, 100_000).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 100_000);
        fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 1000, 10_000).unwrap();
        fallocate(&file, FallocateFlags::ZERO_RANGE, 50_000, 60_000).unwrap();
        let mut expected = bytes.clone();
        expected[1000..11_000].fill(0);
        expected.truncate(50_000);
        expected.resize(110_000, 0);
        assert!(fs::read(m.path("a")).unwrap() == expected);
        file.sync_all().unwrap();
        assert!(fs::read(m.backing("a")).unwrap() == expected);
        // The kernel passes on none of the others.
        assert_eq!(fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096), Err(rustix::io::Errno::OPNOTSUPP));
        assert_eq!(fallocate(&file, FallocateFlags::empty(), i64::MAX as u64, 1), Err(rustix::io::Errno::FBIG));
    });
}

#[test]
fn copying_ranges() {
    if !can_mount("copying_ranges") {
        return;
    }
    both_modes(|m| {
        let bytes = pattern(300_000, 4);
        fs::write(m.path("a"), &bytes).unwrap();
        fs::write(m.path("b"), pattern(200_000, 5)).unwrap();
        let (from, to) = (open(m.path("a")), open(m.path("b")));
        // Cached before, so that a copy that the page cache does not notice would be found out.
        fs::read(m.path("b")).unwrap();
        let (mut offset_in, mut offset_out, mut left) = (1000, 150_000, 250_000);
        while left > 0 {
            left -= rustix::fs::copy_file_range(&from, Some(&mut offset_in), &to, Some(&mut offset_out), left).unwrap();
        }
        let mut expected = pattern(200_000, 5);
        expected.truncate(150_000);
        expected.extend_from_slice(&bytes[1000..251_000]);
        assert!(fs::read(m.path("b")).unwrap() == expected);
        assert!(fs::read(m.backing("b")).unwrap() == expected);
    });
}

/// Locks are the kernel's business; they hold among the users of the mount.
#[test]
fn locks() {
    if !can_mount("locks") {
        return;
    }
    let m = Mounted::through();
    let (one, two) = (open(m.path("a")), open(m.path("a")));
    rustix::fs::flock(&one, FlockOperation::LockExclusive).unwrap();
    assert_eq!(rustix::fs::flock(&two, FlockOperation::NonBlockingLockExclusive), Err(rustix::io::Errno::WOULDBLOCK));
    rustix::fs::flock(&one, FlockOperation::Unlock).unwrap();
    rustix::fs::flock(&two, FlockOperation::NonBlockingLockExclusive).unwrap();
    let lock = |file: &File, start: i64| {
        // SAFETY: all fields are integers; the kernel reads the structure during the call.
        unsafe {
            let mut range: libc::flock = std::mem::zeroed();
            range.l_type = libc::F_WRLCK as i16;
            range.l_start = start;
            range.l_len = 10;
            libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(file), libc::F_OFD_SETLK, &range)
        }
    };
    assert_eq!((lock(&one, 0), lock(&two, 10), lock(&two, 5)), (0, 0, -1));
}

/// The backing file system is full: the caller hears of it, and what is read back is what is there.
#[test]
fn no_space() {
    if !can_mount("no_space") {
        return;
    }
    for write in [mount::WriteMode::Through, mount::WriteMode::Back] {
        let (directory, backing) = new_backing();
        let small = FileSystem::tmpfs(&backing, "size=1m");
        let m = Mounted::over(directory, Some(small), |config| config.write = write);
        let mut file = open(m.path("a"));
        let bytes = pattern(2 << 20, 6);
        let failed = file.write_all(&bytes).and_then(|()| file.sync_all()).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(libc::ENOSPC), "{write:?}");
        drop(file);
        let backing = fs::read(m.backing("a")).unwrap();
        // Written back in any order, the file may have holes; what it holds is what fits.
        assert!(fs::metadata(m.backing("a")).unwrap().blocks() * 512 <= 1 << 20);
        if write == mount::WriteMode::Through {
            wait_until("what is read is what is there", || fs::read(m.path("a")).unwrap() == backing);
            assert!(bytes.starts_with(&backing));
        }
        fs::remove_file(m.path("a")).unwrap();
        // The kernel tells the server of the close and of the last use (RELEASE, FORGET) after the
        // calls have ended.
        wait_until("there is room again", || fs::write(m.path("b"), b"there is room again").is_ok());
    }
}

/// A file that only takes appends (chattr +a) takes them through the mount.
#[test]
fn append_only_files() {
    if !can_mount("append_only_files") || !has_program("append_only_files", "chattr") {
        return;
    }
    both_modes(|m| {
        fs::write(m.path("a"), b"one").unwrap();
        let path = m.path("a").display().to_string();
        shell(&format!("chattr +a {path}"));
        assert!(shell(&format!("lsattr {path}")).split(' ').next().unwrap().contains('a'));
        let refused = errno_of(File::options().write(true).open(m.path("a")));
        let mut file = File::options().read(true).append(true).open(m.path("a")).unwrap();
        let written = file.write_all(b" two").and_then(|()| file.sync_all());
        let found = fs::read(m.backing("a"));
        // What is there already is not changed by a mapping, either.
        let stored = Own::start("stores").ask(&format!("append 3 {path}")).unwrap();
        // Of the failure each descriptor is told once.
        let _ = file.sync_all();
        let found_then = fs::read(m.backing("a"));
        // The kernel's page holds it until it is told to drop that.
        let is_as_in_backing = || fs::read(m.path("a")).is_ok_and(|found| found == b"one two");
        let is_dropped = testbed::wait_until(Duration::from_secs(60), is_as_in_backing);
        let written_again = file.write_all(b" three").and_then(|()| file.sync_all());
        shell(&format!("chattr -a {path}"));
        assert_eq!(refused, libc::EPERM);
        written.unwrap();
        assert_eq!(found.unwrap(), b"one two");
        assert_ne!(stored, "stored", "said to be written");
        assert_eq!(found_then.unwrap(), b"one two");
        assert!(is_dropped, "what was refused is still read");
        written_again.unwrap();
        for path in [m.backing("a"), m.path("a")] {
            assert_eq!(fs::read(path).unwrap(), b"one two three");
        }
    });
}

/// Somebody changes a file externally: seen at the next open, at the latest when the
/// attributes time out.
#[test]
fn external_changes_are_seen_on_open() {
    if !can_mount("changes_beside_are_seen_on_open") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("a"), b"old").unwrap();
    assert_eq!(fs::read(m.path("a")).unwrap(), b"old");
    fs::write(m.backing("a"), b"new").unwrap();
    assert_eq!(fs::read(m.path("a")).unwrap(), b"new");
    fs::write(m.backing("a"), b"longer").unwrap();
    assert_eq!(fs::read(m.path("a")).unwrap(), b"longer");
    let mut file = File::open(m.path("a")).unwrap();
    file.seek(std::io::SeekFrom::Start(3)).unwrap();
    let mut rest = String::new();
    file.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "ger");
}

/// A program that opens a file whose size was changed externally finds the new end, however
/// long the kernel believes attributes, and whether the file is passed through or not.
#[test]
fn externally_changed_sizes_are_seen_on_open() {
    if !can_mount("sizes_changed_beside_are_seen_on_open") {
        return;
    }
    for pass in [false, true] {
        // Of changes on a ramfs nobody is told.
        let (directory, backing) = new_backing();
        let over = FileSystem::ramfs(&backing);
        let m = Mounted::over(directory, Some(over), |config| {
            config.attr_timeout = Duration::from_secs(3600);
            config.pass = pass;
        });
        let backing = File::create(m.backing("a")).unwrap();
        for round in 1..=100 {
            let _known = fs::metadata(m.path("a")).unwrap();
            backing.set_len(round * 10).unwrap();
            let mut file = File::options().read(true).append(true).open(m.path("a")).unwrap();
            assert_eq!(file.seek(std::io::SeekFrom::End(0)).unwrap(), round * 10);
            let mut bytes = Vec::new();
            file.rewind().unwrap();
            file.read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes.len() as u64, round * 10);
            drop(file);
            m.wait_until_closed();
        }
    }
}

/// An external change is found also when a change of ours has failed in between.
#[test]
fn a_failed_change_hides_no_external_change() {
    if !can_mount("a_failed_change_hides_no_change_beside") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("a"), pattern(16384, 1)).unwrap();
    let file = File::options().read(true).write(true).open(m.path("a")).unwrap();
    let mut page = vec![0; 4096];
    file.read_exact_at(&mut page, 0).unwrap();
    fallocate(&file, FallocateFlags::empty(), 0, 1 << 50).unwrap_err();
    File::options().write(true).open(m.backing("a")).unwrap().write_all_at(&[7; 4096], 0).unwrap();
    file.write_all_at(&[8; 4096], 8192).unwrap();
    drop(file);
    assert!(fs::read(m.path("a")).unwrap() == fs::read(m.backing("a")).unwrap());
}

/// A program that opens a file after it was changed externally reads the change, also when
/// others open it at the same time, and whether the file is passed through or not.
#[test]
fn no_open_after_an_external_change_reads_older_bytes() {
    if !can_mount("no_open_after_a_change_beside_reads_older_bytes") {
        return;
    }
    const CHANGES: u64 = 150;
    for pass in [false, true] {
        let m = Mounted::with(|config| config.pass = pass);
        let backing = File::create(m.backing("a")).unwrap();
        backing.write_all_at(&[0; 4096], 0).unwrap();
        let probe = File::create(m.backing("probe")).unwrap();
        let (current, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let _over = Done(&is_over);
            for _ in 0..4 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::SeqCst) {
                        let at_least = current.load(Ordering::SeqCst);
                        let mut bytes = [0; 8];
                        File::open(m.path("a")).unwrap().read_exact_at(&mut bytes, 0).unwrap();
                        assert!(u64::from_ne_bytes(bytes) >= at_least, "{} < {at_least}", u64::from_ne_bytes(bytes));
                    }
                });
            }
            for change in 1..=CHANGES {
                // The kernel's clock moves every 4 ms on old kernels: two changes within its grain
                // look alike.
                wait_until("the clock of the file system has moved", || {
                    probe.write_all_at(&[0], 0).unwrap();
                    probe.metadata().unwrap().modified().unwrap() > backing.metadata().unwrap().modified().unwrap()
                });
                backing.write_all_at(&change.to_ne_bytes(), 0).unwrap();
                current.store(change, Ordering::SeqCst);
            }
        });
    }
}

/// A program that writes reads back what it wrote, also when the file was once changed beside the
/// mount and others read along.
#[test]
fn own_writes_are_read_after_an_external_change() {
    if !can_mount("what_was_written_is_read_after_a_change_beside") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("a"), [0; 4096]).unwrap();
    fs::write(m.backing("a"), [1; 4096]).unwrap();
    assert_eq!(fs::read(m.path("a")).unwrap(), [1; 4096]);
    let file = File::options().read(true).write(true).open(m.path("a")).unwrap();
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let file = File::open(m.path("a")).unwrap();
                while done.load(Ordering::SeqCst) == 0 {
                    file.read_exact_at(&mut [0; 4096], 0).unwrap();
                }
            });
        }
        let check = std::panic::catch_unwind(|| {
            for number in 1..10_000u64 {
                file.write_all_at(&number.to_ne_bytes().repeat(512), 0).unwrap();
                let mut back = [0; 8];
                file.read_exact_at(&mut back, 0).unwrap();
                assert_eq!(u64::from_ne_bytes(back), number);
            }
        });
        done.store(1, Ordering::SeqCst);
        check.unwrap();
    });
}
