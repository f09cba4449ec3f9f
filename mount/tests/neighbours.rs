//! Operations that are held up by the backing file system must not hold up those that are not.

mod support;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use support::{FileSystem, Mounted, can_mount, has_program, new_below, shell, wait_until};

/// Longest time for an answer that waits for nothing.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Workers that the mounts here always have.
const THREADS: usize = 4;

/// An ext4 on a loop device, frozen. Thawed when dropped, whatever happens, since nothing could end that waits for it.
struct Frozen(PathBuf);

impl Frozen {
    fn new(path: &Path) -> Frozen {
        shell(&format!("fsfreeze --freeze {}", path.display()));
        Frozen(path.to_owned())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        shell(&format!("fsfreeze --unfreeze {}", self.0.display()));
    }
}

/// A mount over an ext4 of its own, which can be frozen.
fn over_ext4() -> Mounted {
    let (directory, below) = new_below();
    let ext4 = FileSystem::image(&below, &directory.path().join("image"), 64 << 20);
    Mounted::over(directory, Some(ext4), |config| config.threads = THREADS)
}

/// Runs `action` in a thread of its own, and fails unless it ends in time.
fn answers<T: Send + 'static>(what: &str, action: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(action()));
    receiver.recv_timeout(ANSWER_MAX).unwrap_or_else(|error| panic!("{what}: no answer: {error}"))
}

/// Files that are open for writing, each in a closure that writes to it.
fn writers(mounted: &Mounted, count: usize) -> Vec<impl FnOnce() + Send + use<>> {
    (0..count)
        .map(|number| {
            let mut file = File::create(mounted.path(format!("written-{number}"))).unwrap();
            move || file.write_all(b"when it is thawed").unwrap()
        })
        .collect()
}

fn writes_of(mounted: &Mounted) -> u64 {
    mounted.mount().status().requests.get("write").copied().unwrap_or(0)
}

/// What a frozen file system can still answer is answered.
fn other_requests_are_answered(mounted: &Mounted) {
    let path = mounted.path("read");
    let read = answers("open and read", move || {
        let mut bytes = [0; 4096];
        File::open(path).and_then(|file| file.read_exact_at(&mut bytes, 8192)).unwrap();
        bytes
    });
    assert!(read == [7; 4096]);
    let path = mounted.path("read");
    assert_eq!(answers("stat", move || fs::metadata(path).unwrap().len()), 1 << 20);
    let path = mounted.path("");
    answers("statfs", move || rustix::fs::statvfs(path).unwrap());
    let path = mounted.path("");
    assert!(answers("list", move || fs::read_dir(path).unwrap().count()) > 1);
}

#[test]
fn writers_on_a_frozen_file_system_hold_up_no_readers() {
    if !can_mount("writers_on_a_frozen_file_system_hold_up_no_readers") || !has_program("neighbours", "fsfreeze") {
        return;
    }
    let mounted = over_ext4();
    fs::write(mounted.path("read"), vec![7; 1 << 20]).unwrap();
    assert_eq!(mounted.mount().status().workers, THREADS);
    let before = writes_of(&mounted);
    let writers = writers(&mounted, 3 * THREADS);
    let frozen = Frozen::new(&mounted.below(""));
    let writers: Vec<_> = writers.into_iter().map(thread::spawn).collect();
    wait_until("all writers wait", || writes_of(&mounted) == before + writers.len() as u64);
    other_requests_are_answered(&mounted);
    assert!(mounted.mount().status().workers > writers.len());
    drop(frozen);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
}
