//! Checks the places of real files' pages against the bytes of the disk.

use hostcache::{InodeKey, Place, Problem, Volume};
use page::PAGE_SIZE;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use testbed::Scratch;

const PAGES: u64 = 600;

/// The file system of the temporary directory, if its pages can be mapped to its disk.
fn volume(test: &str, scratch: &Scratch) -> Option<Volume> {
    if !rustix::process::geteuid().is_root() {
        testbed::skip(test, "not root");
        return None;
    }
    match Volume::open(scratch.path()) {
        Ok(volume) => Some(volume),
        // The test cannot choose the machine's disk.
        Err(problem @ (Problem::NoDisk { .. } | Problem::Unaligned { .. } | Problem::NoHandles { .. })) => {
            eprintln!("SKIPPED {test}: {problem}");
            None
        }
        Err(problem) => panic!("{problem}"),
    }
}

/// FS_IOC_GETVERSION.
fn key_of(path: &Path) -> InodeKey {
    let file = File::open(path).unwrap();
    let mut generation = 0u64;
    // SAFETY: the ioctl writes an int or a long, for which there is room.
    let result = unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&file), 0x8008_7601, &raw mut generation) };
    assert_eq!(result, 0);
    InodeKey { inode: file.metadata().unwrap().ino(), generation: generation as u32 }
}

fn page_of(index: u64, round: u8) -> [u8; PAGE_SIZE] {
    std::array::from_fn(|at| (index as usize * 31 + at / 8) as u8 ^ round)
}

fn write(path: &Path, round: u8) -> File {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
    (0..PAGES).for_each(|index| file.write_all_at(&page_of(index, round), index * PAGE_SIZE as u64).unwrap());
    file
}

/// The disk of a directory, read past the page cache.
struct Disk(File);

impl Disk {
    /// `None` if even root may not read it.
    fn of(path: &Path) -> Option<Disk> {
        let device = fs::metadata(path).unwrap().dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let mut folder = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).unwrap();
        if folder.join("partition").exists() {
            folder.pop();
        }
        let numbers = fs::read_to_string(folder.join("dev")).unwrap();
        let (major, minor) = numbers.trim().split_once(':').unwrap();
        // The machine may have no device node for it.
        let node = path.join("disk");
        let device = rustix::fs::makedev(major.parse().unwrap(), minor.parse().unwrap());
        let (kind, mode) = (rustix::fs::FileType::BlockDevice, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &node, kind, mode, device).unwrap();
        match File::options().read(true).custom_flags(libc::O_DIRECT).open(node) {
            Ok(disk) => Some(Disk(disk)),
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                eprintln!(
                    "this machine's disk cannot be read past its file system: only tests/vm/host-cache compares its bytes"
                );
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn page(&self, index: u64) -> Vec<u8> {
        let mut buf = vec![0u8; 2 * PAGE_SIZE];
        let skipped = buf.as_ptr().align_offset(PAGE_SIZE);
        self.0.read_exact_at(&mut buf[skipped..skipped + PAGE_SIZE], index * PAGE_SIZE as u64).unwrap();
        buf[skipped..skipped + PAGE_SIZE].to_vec()
    }
}

#[test]
fn pages_are_where_the_file_system_says() {
    let test = "pages_are_where_the_file_system_says";
    let scratch = Scratch::new(test).unwrap();
    let Some(mut volume) = volume(test, &scratch) else { return };
    let disk = Disk::of(scratch.path());
    let path = scratch.path().join("file");
    let file = write(&path, 0);
    file.sync_all().unwrap();
    let key = key_of(&path);
    let indexes: Vec<u64> = (0..PAGES).collect();
    let check = |volume: &mut Volume, round| {
        let places = volume.places(key, &indexes).unwrap().unwrap();
        let mut seen = std::collections::HashSet::new();
        for (index, place) in indexes.iter().zip(places) {
            let Place::At(page) = place else { panic!("page {index} is {place:?}") };
            assert!(seen.insert(page), "page {index} is at {page}, as another one");
            if let Some(disk) = &disk {
                assert!(disk.page(page) == page_of(*index, round), "page {index} is not at {page}");
            }
        }
    };
    check(&mut volume, 0);
    check(&mut volume, 0);

    // Perhaps at another place of the disk: the earlier result is not used.
    fs::write(&path, b"").unwrap();
    write(&scratch.path().join("between"), 9).sync_all().unwrap();
    write(&path, 1).sync_all().unwrap();
    check(&mut volume, 1);

    // A page behind the end has no place, nor has a hole, nor reserved space that was not written.
    assert_eq!(volume.places(key, &[PAGES, u64::MAX]).unwrap().unwrap(), [Place::Unsettled; 2]);
    rustix::fs::fallocate(
        &file,
        rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
        4096,
        8192,
    )
    .unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), PAGES * 4096, 8 * 4096).unwrap();
    let places = volume.places(key, &[0, 1, 2, 3, PAGES]).unwrap().unwrap();
    assert!(
        matches!(places[..], [Place::At(_), Place::Unsettled, Place::Unsettled, Place::At(_), Place::Unsettled]),
        "{places:?}"
    );

    // Written, and without a place yet.
    let fresh = scratch.path().join("fresh");
    let _file = write(&fresh, 2);
    let places = volume.places(key_of(&fresh), &indexes).unwrap().unwrap();
    assert!(places.contains(&Place::Unsettled), "nothing of a file just written is delayed");

    fs::remove_file(&path).unwrap();
    drop(file);
    assert_eq!(volume.places(key, &[0]).unwrap(), None);
    let other = InodeKey { generation: key.generation ^ 1, ..key_of(&fresh) };
    assert_eq!(volume.places(other, &[0]).unwrap(), None);
}

#[test]
fn what_is_on_no_disk_is_told() {
    for (path, expected) in [("/proc", "no block device"), ("/nowhere", "cannot look at /nowhere")] {
        let Err(problem) = Volume::open(Path::new(path)) else { panic!("{path} is no disk") };
        assert!(problem.to_string().contains(expected), "{problem}");
    }
}
