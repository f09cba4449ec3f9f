//! A disk that fails under what was written: who syncs is told, as without the mount, and what is
//! not below is not shown. And what the kernel keeps by itself with `--write back`: sizes and times
//! are those that the backing file has.

mod support;

use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use support::{FileSystem, Mounted, can_mount, has_program, new_backing, wait_until};

const DISK_BYTES: u64 = 16 << 20;
const FILE_BYTES: usize = 12 << 20;
const CHUNK_BYTES: usize = 64 << 10;

/// A mount over a disk that will lose its second half, with parts of the file `a`. Much that is
/// written is written back at once.
fn over_a_disk(image: &Path) -> Mounted {
    let (directory, backing) = new_backing();
    let disk = FileSystem::image(&backing, image, DISK_BYTES);
    fs::write(backing.join("a"), vec![1; FILE_BYTES]).unwrap();
    File::open(backing.join("a")).unwrap().sync_all().unwrap();
    Mounted::over(directory, Some(disk), |config| {
        config.written_linger = Duration::from_secs(86_400);
        config.written_bytes = FILE_BYTES as u64 / 2;
    })
}

fn overwrite(file: &File) {
    file.write_all_at(&vec![2; FILE_BYTES], 0).unwrap();
}

/// One test after the other. Others start programs, and a new process has all descriptors until it
/// runs its program: the kernel may tell this process's close of a failed writeback, and then not
/// ours.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait_for_janitor(m: &Mounted) {
    wait_until("the janitor has been there", || m.mount().status().written_files_pending == 0);
}

fn synced(file: &File) -> Option<i32> {
    file.sync_data().err().and_then(|error: io::Error| error.raw_os_error())
}

/// The kernel tells of an error when somebody looks: once by each descriptor that was open then,
/// and to the first who opens the file if nobody has looked. The janitor must not be that one.
#[test]
fn a_sync_reports_failed_writeback() {
    if !can_mount("who_syncs_is_told_that_writeback_has_failed") {
        return;
    }
    let _alone = alone();
    let eio = Some(Errno::IO.raw_os_error());
    let images = tempfile::tempdir().unwrap();
    for is_kept_open in [true, false] {
        let image = images.path().join(format!("{is_kept_open}"));
        let m = over_a_disk(&image);
        let writer = File::options().read(true).write(true).open(m.path("a")).unwrap();
        FileSystem::cut(&image, DISK_BYTES / 2);
        overwrite(&writer);
        let writer = is_kept_open.then_some(writer);
        wait_for_janitor(&m);
        if let Some(writer) = writer {
            assert_eq!(synced(&writer), eio, "the writer itself");
            assert_eq!(synced(&writer), None, "once");
        } else {
            let other = File::open(m.path("a")).unwrap();
            assert_eq!(synced(&other), eio, "who opens it afterwards");
        }
    }
}

/// Bytes that could not be written back are lost once the kernel drops them from the page cache of
/// the backing file, and no stamp shows it.
#[test]
fn what_could_not_be_written_is_not_shown() {
    if !can_mount("what_could_not_be_written_is_not_shown") {
        return;
    }
    let _alone = alone();
    let images = tempfile::tempdir().unwrap();
    let image = images.path().join("image");
    let m = over_a_disk(&image);
    let file = File::options().read(true).write(true).open(m.path("a")).unwrap();
    FileSystem::cut(&image, DISK_BYTES / 2);
    overwrite(&file);
    let chunks = |file: &File| {
        let read = |offset| {
            let mut chunk = vec![0; CHUNK_BYTES];
            file.read_exact_at(&mut chunk, offset).map(|()| chunk[0]).map_err(|error| error.raw_os_error())
        };
        (0..FILE_BYTES as u64).step_by(CHUNK_BYTES).map(read).collect::<Vec<_>>()
    };
    assert!(chunks(&file).iter().all(|chunk| *chunk == Ok(2)));
    wait_for_janitor(&m);
    assert_eq!(synced(&file), Some(Errno::IO.raw_os_error()));
    let backing = chunks(&File::open(m.backing("a")).unwrap());
    let lost = backing.iter().filter(|chunk| **chunk != Ok(2)).count();
    println!("{lost} of {} chunks are not in the backing file", backing.len());
    assert!((1..backing.len()).contains(&lost));
    wait_until("the mount shows what the backing file has", || chunks(&file) == backing);
}

/// Closes a file; the error, if any.
fn closed(file: File) -> Option<i32> {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor was this file's alone.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => None,
        _ => io::Error::last_os_error().raw_os_error(),
    }
}

fn over_ext4(image: &Path, options: &str, write: mount::WriteMode) -> Mounted {
    let (directory, backing) = new_backing();
    let disk = FileSystem::image_with(&backing, image, DISK_BYTES, options);
    Mounted::over(directory, Some(disk), |config| config.write = write)
}

/// A failed writeback returns the error of the backing file system.
#[test]
fn a_full_disk_is_named_and_the_size_is_right() {
    if !can_mount("a_full_disk_is_named_and_the_size_is_right") {
        return;
    }
    let _alone = alone();
    let images = tempfile::tempdir().unwrap();
    let create =
        |m: &Mounted, name| File::options().read(true).write(true).create_new(true).open(m.path(name)).unwrap();
    let is_shown = |m: &Mounted, name: &str| {
        let sizes = || [m.path(name), m.backing(name)].map(|path| fs::metadata(path).unwrap().len());
        wait_until("the size is the backing file's", || sizes()[0] == sizes()[1]);
    };
    let (directory, backing) = new_backing();
    // A tmpfs takes a part of a write when it becomes full.
    let tmpfs = FileSystem::tmpfs(&backing, &format!("size={}", DISK_BYTES - 40_960));
    let tmpfs = Mounted::over(directory, Some(tmpfs), |config| config.write = mount::WriteMode::Back);
    let ext4 = over_ext4(&images.path().join("image"), "", mount::WriteMode::Back);
    for m in [&tmpfs, &ext4] {
        let file = create(m, "closed");
        file.write_all_at(&vec![1; 2 * DISK_BYTES as usize], 0).unwrap();
        assert_eq!(closed(file), Some(libc::ENOSPC));
        is_shown(m, "closed");
        fs::remove_file(m.path("closed")).unwrap();

        let file = create(m, "synced");
        file.write_all_at(&vec![1; 2 * DISK_BYTES as usize], 0).unwrap();
        assert_eq!(synced(&file), Some(libc::ENOSPC));
        drop(file);
        is_shown(m, "synced");
    }
    let m = &ext4;
    // The kernel forgets the inode only when nobody uses it any more, and finds it again until
    // then.
    let file = create(m, "held");
    let held = File::options().read(true).custom_flags(libc::O_PATH).open(m.path("held")).unwrap();
    file.write_all_at(&vec![1; 2 * DISK_BYTES as usize], 0).unwrap();
    assert_eq!(closed(file), Some(libc::ENOSPC));
    let lookups = || m.mount().status().requests.get("lookup").copied();
    let before = lookups();
    wait_until("the name was dropped, and looked up", || fs::metadata(m.path("held")).is_ok() && lookups() > before);
    drop(held);
    is_shown(m, "held");
    fs::remove_file(m.path("held")).unwrap();

    let file = create(m, "large");
    file.write_all_at(b"far behind what ext4 can reach", 1 << 50).unwrap();
    assert_eq!(synced(&file), Some(libc::EFBIG));
    drop(file);
    is_shown(m, "large");
    assert_eq!(fs::metadata(m.path("large")).unwrap().len(), 0);
}

/// So does a quota that is used up, and a file system that lets nobody write any more.
#[test]
fn a_quota_and_a_damaged_disk_are_named() {
    let test = "a_quota_and_a_damaged_disk_are_named";
    if !can_mount(test) || !has_program(test, "btrfs") {
        return;
    }
    let _alone = alone();
    let images = tempfile::tempdir().unwrap();
    for write in [mount::WriteMode::Through, mount::WriteMode::Back] {
        println!("{write:?}");
        let create = |m: &Mounted| File::options().read(true).write(true).create_new(true).open(m.path("a")).unwrap();
        // The error of write(2), or what comes later.
        let written = |file: &File, bytes: usize| match file.write_all_at(&vec![1; bytes], 0) {
            Ok(()) => synced(file),
            Err(error) => {
                assert_eq!(write, mount::WriteMode::Through, "{error}");
                error.raw_os_error()
            }
        };
        let (directory, backing) = new_backing();
        let disk = FileSystem::btrfs_with_limit(&backing, &images.path().join(format!("btrfs-{write:?}")), DISK_BYTES);
        let m = Mounted::over(directory, Some(disk), |config| config.write = write);
        let file = create(&m);
        assert_eq!(written(&file, 2 * DISK_BYTES as usize), Some(libc::EDQUOT));

        let m = over_ext4(&images.path().join(format!("ext4-{write:?}")), "-e remount-ro", write);
        let file = create(&m);
        assert_eq!(written(&file, FILE_BYTES / 4), None);
        FileSystem::damage(&m.backing(""));
        assert_eq!(written(&file, FILE_BYTES / 4), Some(libc::EROFS));
    }
}

/// Times are shown as the backing file system keeps them: here, whole seconds from 1901 to 2038.
#[test]
fn times_are_those_that_the_disk_keeps() {
    use rustix::fs::{Timespec, Timestamps, UTIME_OMIT, futimens};
    use std::os::unix::fs::MetadataExt;
    if !can_mount("times_are_those_that_the_disk_keeps") {
        return;
    }
    let _alone = alone();
    let images = tempfile::tempdir().unwrap();
    for write in [mount::WriteMode::Through, mount::WriteMode::Back] {
        let m = over_ext4(&images.path().join(format!("{write:?}")), "-I 128", write);
        let shown = |path: std::path::PathBuf| {
            let found = fs::metadata(path).unwrap();
            (found.mtime(), found.mtime_nsec())
        };
        fs::write(m.path("a"), b"x").unwrap();
        m.wait_until_closed();
        assert_eq!(shown(m.path("a")), shown(m.backing("a")), "{write:?}");
        for tv_sec in [1_000_000_000, i64::from(i32::MAX) + 1_000_000_000, i64::from(i32::MIN) - 1_000_000_000] {
            let file = File::options().write(true).open(m.path("a")).unwrap();
            let last_modification = Timespec { tv_sec, tv_nsec: 999_999_999 };
            let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
            futimens(&file, &Timestamps { last_access, last_modification }).unwrap();
            drop(file);
            wait_until("the time is the backing file's", || shown(m.path("a")) == shown(m.backing("a")));
        }
    }
}
