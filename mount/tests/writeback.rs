//! A disk that fails under what was written: who syncs is told, as without the mount, and what is not below is not shown.

mod support;

use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use support::{FileSystem, Mounted, can_mount, new_below, wait_until};

const DISK_BYTES: u64 = 16 << 20;
const FILE_BYTES: usize = 12 << 20;
const CHUNK_BYTES: usize = 64 << 10;

/// A mount over a disk that will lose its second half, with parts of the file `a`. Much that is written is written back at once.
fn over_a_disk(image: &Path) -> Mounted {
    let (directory, below) = new_below();
    let disk = FileSystem::image(&below, image, DISK_BYTES);
    fs::write(below.join("a"), vec![1; FILE_BYTES]).unwrap();
    File::open(below.join("a")).unwrap().sync_all().unwrap();
    Mounted::over(directory, Some(disk), |config| {
        config.written_linger = Duration::from_secs(86_400);
        config.written_bytes = FILE_BYTES as u64 / 2;
    })
}

fn overwrite(file: &File) {
    file.write_all_at(&vec![2; FILE_BYTES], 0).unwrap();
}

fn wait_for_janitor(m: &Mounted) {
    wait_until("the janitor has been there", || m.mount().status().written_files_pending == 0);
}

fn synced(file: &File) -> Option<i32> {
    file.sync_data().err().and_then(|error: io::Error| error.raw_os_error())
}

/// The kernel tells of an error when somebody looks: once by each descriptor that was open then, and to the first who opens the file if nobody
/// has looked. The janitor must not be that one.
#[test]
fn who_syncs_is_told_that_writeback_has_failed() {
    if !can_mount("who_syncs_is_told_that_writeback_has_failed") {
        return;
    }
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

/// What could not be written back is gone from the file below once the kernel drops it there, and no stamp tells of it.
#[test]
fn what_could_not_be_written_is_not_shown() {
    if !can_mount("what_could_not_be_written_is_not_shown") {
        return;
    }
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
    let below = chunks(&File::open(m.below("a")).unwrap());
    let lost = below.iter().filter(|chunk| **chunk != Ok(2)).count();
    println!("{lost} of {} chunks are not below", below.len());
    assert!((1..below.len()).contains(&lost));
    wait_until("the mount shows what is below", || chunks(&file) == below);
}
