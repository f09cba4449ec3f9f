//! Programs that use a mount in every way while its daemon is killed or replaced, and know what
//! they must see.

use crate::setup::{self, Mount, PATIENCE};
use rustix::fs::{FlockOperation, OFlags, XattrFlags};
use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use testbed::{Process, wait_until};

pub fn seed() -> u64 {
    let seed = std::env::var("PUMA_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    println!("PUMA_SEED={seed}");
    seed
}

const PAGE: usize = 4096;

/// The state of a worker of the load: its directory, and whether it must end.
struct Load {
    at: PathBuf,
    below: PathBuf,
    seed: u64,
    ending: AtomicBool,
    rounds: Vec<AtomicU64>,
}

/// One kind of use: does one round after the other until it is told to end, then checks that all is
/// there.
type Use = fn(&Load, &mut dyn FnMut() -> bool);

const USES: [(&str, Use); 9] = [
    ("passed", passed),
    ("append", append),
    ("names", names),
    ("unlinked", unlinked),
    ("locks", locks),
    ("list", list),
    ("mapped", mapped),
    ("overwrite", overwrite),
    ("attributes", attributes),
];

/// Runs all uses at once, and meanwhile `disturb` so often; before each time every use has gone on.
pub fn under_load(mount: &Mount, source: &Path, times: u32, mut disturb: impl FnMut(u32)) {
    let load = Load {
        at: mount.path.clone(),
        below: source.to_owned(),
        seed: seed(),
        ending: AtomicBool::new(false),
        rounds: USES.iter().map(|_| AtomicU64::new(0)).collect(),
    };
    let load = &load;
    std::thread::scope(|scope| {
        let users: Vec<_> = (0..USES.len())
            .map(|index| {
                scope.spawn(move || {
                    let mut goes_on = || {
                        load.rounds[index].fetch_add(1, Ordering::Relaxed);
                        !load.ending.load(Ordering::Relaxed)
                    };
                    (USES[index].1)(load, &mut goes_on);
                })
            })
            .collect();
        let disturbed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for time in 0..times {
                let before: Vec<u64> = load.rounds.iter().map(|rounds| rounds.load(Ordering::Relaxed)).collect();
                let all_went_on = wait_until(PATIENCE, || {
                    users.iter().any(|user| user.is_finished())
                        || load.rounds.iter().zip(&before).all(|(now, before)| now.load(Ordering::Relaxed) > before + 2)
                });
                assert!(all_went_on, "somebody is stuck: {before:?}, now {:?}", load.rounds);
                if users.iter().any(|user| user.is_finished()) {
                    break; // It has failed, and says so below.
                }
                disturb(time);
            }
        }));
        load.ending.store(true, Ordering::Relaxed);
        let mut failed = Vec::new();
        for (user, (name, _)) in users.into_iter().zip(USES) {
            if user.join().is_err() {
                failed.push(name);
            }
        }
        let rounds: Vec<_> = USES.iter().zip(&load.rounds).map(|((name, _), rounds)| (name, rounds)).collect();
        println!("rounds: {rounds:?}");
        assert!(failed.is_empty(), "{failed:?} saw what they must not see");
        disturbed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Records appended by two descriptors: each once, whole, in order.
fn append(load: &Load, goes_on: &mut dyn FnMut() -> bool) {
    const RECORDS_AT_FULL_SPEED: u64 = 50_000;
    let path = load.at.join("log");
    let open = || File::options().create(true).append(true).open(&path).unwrap();
    let files = [open(), open()];
    let record = |number: u64| format!("{number:020} {}\n", "x".repeat((number % 300) as usize));
    let mut written = 0;
    while goes_on() {
        let mut file = &files[(written % 2) as usize];
        assert_eq!(file.write(record(written).as_bytes()).unwrap(), record(written).len());
        written += 1;
        if written > RECORDS_AT_FULL_SPEED {
            std::thread::sleep(Duration::from_millis(1)); // All is read again in the end.
        }
    }
    files[0].sync_all().unwrap();
    let expected: String = (0..written).map(record).collect();
    for path in [&path, &load.below.join("log")] {
        let found = fs::read_to_string(path).unwrap();
        let differs = found.bytes().zip(expected.bytes()).position(|(a, b)| a != b);
        assert!(found == expected, "{} of {} bytes, differ at {differs:?}", found.len(), expected.len());
    }
}

/// Everything that can be done to names, each of it exactly once.
fn names(load: &Load, goes_on: &mut dyn FnMut() -> bool) {
    let at = load.at.join("names");
    fs::create_dir(&at).unwrap();
    let mut round = 0;
    while goes_on() {
        let name = |what: &str| at.join(format!("{what}{round}"));
        let mut file = File::options().write(true).create_new(true).mode(0o444).open(name("a")).unwrap();
        file.write_all(b"content").unwrap();
        fs::rename(name("a"), name("b")).unwrap();
        fs::hard_link(name("b"), name("c")).unwrap();
        assert_eq!(file.metadata().unwrap().nlink(), 2);
        fs::write(name("d"), "replaced").unwrap();
        fs::rename(name("c"), name("d")).unwrap();
        assert_eq!(fs::read(name("d")).unwrap(), b"content");
        fs::create_dir(name("e")).unwrap();
        fs::rename(name("d"), name("e").join("inner")).unwrap();
        std::os::unix::fs::symlink("target", name("f")).unwrap();
        assert_eq!(fs::read_link(name("f")).unwrap(), Path::new("target"));
        let again = File::options().write(true).create_new(true).open(name("b")).unwrap_err();
        assert_eq!(again.kind(), std::io::ErrorKind::AlreadyExists);
        fs::remove_file(name("e").join("inner")).unwrap();
        fs::remove_dir(name("e")).unwrap();
        fs::remove_file(name("f")).unwrap();
        fs::remove_file(name("b")).unwrap();
        assert_eq!(fs::remove_file(name("b")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        round += 1;
    }
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
    assert_eq!(fs::read_dir(load.below.join("names")).unwrap().count(), 0);
}

/// A model of a file, and reads and writes of both.
struct Modelled {
    file: File,
    bytes: Vec<u8>,
    random: fastrand::Rng,
}

impl Modelled {
    fn new(file: File, len: usize, seed: u64) -> Modelled {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bytes = vec![0; len];
        random.fill(&mut bytes);
        file.write_all_at(&bytes, 0).unwrap();
        Modelled { file, bytes, random }
    }

    fn step(&mut self) {
        let start = self.random.usize(..self.bytes.len());
        let len = self.random.usize(1..=(self.bytes.len() - start).min(64 << 10));
        if self.random.bool() {
            self.random.fill(&mut self.bytes[start..start + len]);
            self.file.write_all_at(&self.bytes[start..start + len], start as u64).unwrap();
        } else {
            let mut found = vec![0; len];
            self.file.read_exact_at(&mut found, start as u64).unwrap();
            assert!(found == self.bytes[start..start + len], "{len} bytes at {start} differ");
        }
    }
}

/// A file without a name lives as long as it is open.
fn unlinked(load: &Load, goes_on: &mut dyn FnMut() -> bool) {
    let path = load.at.join("unlinked");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let mut model = Modelled::new(file, 1 << 20, load.seed);
    // It never had one.
    let flags = OFlags::TMPFILE | OFlags::RDWR;
    let tmpfile = rustix::fs::open(&load.at, flags, rustix::fs::Mode::RUSR).map(File::from);
    let mut nameless = tmpfile.ok().map(|file| Modelled::new(file, 100_000, load.seed ^ 1));
    while goes_on() {
        model.step();
        nameless.iter_mut().for_each(Modelled::step);
        assert_eq!(model.file.metadata().unwrap().nlink(), 0);
    }
}

/// Locks keep others out, all the time.
fn locks(load: &Load, goes_on: &mut dyn FnMut() -> bool) {
    let open = |name: &str| {
        File::options().read(true).write(true).create(true).truncate(false).open(load.at.join(name)).unwrap()
    };
    let (held, other) = (open("flock"), open("flock"));
    rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
    // Record locks are a process's: another one holds them here.
    open("fcntl");
    let mut command = Command::new("python3");
    command.arg("-c").arg(
        "import fcntl, sys\nfile = open(sys.argv[1], 'r+')\nfcntl.lockf(file, fcntl.LOCK_EX)\nprint('LOCKED', flush=True)\nsys.stdin.read()\n",
    );
    command.arg(load.at.join("fcntl")).stdin(Stdio::piped());
    let mut holder = Process::spawn(command, &[]).unwrap();
    holder.wait_for_line("LOCKED", PATIENCE).unwrap();
    let file = open("fcntl");
    while goes_on() {
        let refused = rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap_err();
        assert_eq!(refused, rustix::io::Errno::WOULDBLOCK);
        let refused = rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).unwrap_err();
        assert!(matches!(refused, rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS), "{refused}");
        std::thread::sleep(Duration::from_millis(2)); // Leaves the processor to the others.
    }
    rustix::fs::flock(&held, FlockOperation::Unlock).unwrap();
    rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
    drop(holder.take_stdin());
    assert!(holder.wait(PATIENCE).unwrap().unwrap().success());
    rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
}

/// A listing has every name once.
fn list(load: &Load, goes_on: &mut dyn FnMut() -> bool) {
    const FILES: usize = 700;
    let at = load.at.join("list");
    fs::create_dir(&at).unwrap();
    let expected: BTreeSet<String> = (0..FILES).map(|number| format!("a file with the number {number}")).collect();
    for name in &expected {
        File::create(at.join(name)).unwrap();
    }
    while goes_on() {
        let found: Vec<_> = fs::read_dir(&at).unwrap().map(|entry| entry.unwrap()).collect();
        let inodes: BTreeSet<u64> = found.iter().map(|entry| entry.metadata().unwrap().ino()).collect();
        let names: BTreeSet<String> = found.iter().map(|entry| entry.file_name().into_string().unwrap()).collect();
        assert_eq!((found.len(), inodes.len()), (FILES, FILES));
        assert!(names == expected);
    }
}

/// Files that are opened to be read before they are opened to be written: without a lender they are
/// passed through, then all open ones are, and what is opened later is not.
fn passed(load: &Load, goes_on: &mut dyn FnMut() -> bool) {
    let mut random = fastrand::Rng::with_seed(load.seed);
    let mut kept: Vec<(File, Vec<u8>)> = Vec::new();
    let mut round = 0;
    while goes_on() {
        let name = format!("passed{round}");
        let mut model: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(5 * PAGE).collect();
        fs::write(load.below.join(&name), &model).unwrap();
        let path = load.at.join(&name);
        let reader = File::open(&path).unwrap();
        let matches = |file: &File, model: &[u8]| {
            let mut read = vec![0; model.len()];
            file.read_exact_at(&mut read, 0).unwrap();
            assert!(read == model, "{name}");
        };
        matches(&reader, &model);
        let writer = File::options().read(true).write(true).open(&path).unwrap();
        for byte in 0..20 {
            let at = random.usize(..model.len());
            model[at] = byte;
            writer.write_all_at(&[byte], at as u64).unwrap();
        }
        matches(&reader, &model);
        if random.bool() {
            drop((reader, writer));
            let again = File::options().read(true).write(true).open(&path).unwrap();
            matches(&again, &model);
            kept.push((again, model));
        } else {
            kept.push((reader, model));
        }
        fs::remove_file(&path).unwrap();
        if kept.len() > 10 {
            let (file, model) = kept.swap_remove(random.usize(..kept.len()));
            matches(&file, &model);
        }
        round += 1;
    }
}

/// Stores through a shared mapping reach the file.
fn mapped(load: &Load, goes_on: &mut dyn FnMut() -> bool) {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
    const LEN: usize = 64 * PAGE;
    let path = load.at.join("mapped");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(LEN as u64).unwrap();
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping of a file that nobody else uses.
    let start = unsafe { mmap(std::ptr::null_mut(), LEN, flags, MapFlags::SHARED, &file, 0).unwrap() };
    // SAFETY: the mapping is LEN bytes, lives until `munmap` below, and only this thread stores in
    // it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>(), LEN) };
    let mut random = fastrand::Rng::with_seed(load.seed);
    let mut model = vec![0; LEN];
    while goes_on() {
        for _ in 0..20 {
            let at = random.usize(..LEN);
            model[at] = random.u8(..);
            bytes[at] = model[at];
        }
        assert!(bytes == model);
        let how = if random.bool() { MsyncFlags::SYNC } else { MsyncFlags::ASYNC };
        // SAFETY: the range is the mapping.
        unsafe { msync(start, LEN, how).unwrap() };
    }
    // SAFETY: as above; `bytes` is used no more.
    unsafe {
        msync(start, LEN, MsyncFlags::SYNC).unwrap();
        munmap(start, LEN).unwrap();
    }
    assert!(fs::read(&path).unwrap() == model && fs::read(load.below.join("mapped")).unwrap() == model);
}

/// Reads and writes of a file that does not stay in the page cache.
fn overwrite(load: &Load, goes_on: &mut dyn FnMut() -> bool) {
    let path = load.at.join("overwritten");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let mut model = Modelled::new(file, 4 << 20, load.seed);
    let mut round = 0;
    while goes_on() {
        model.step();
        round += 1;
        if round % 10 == 0 {
            setup::evict(&path);
        }
        if round % 100 == 0 {
            let len = model.random.usize(1 << 20..4 << 20);
            model.file.set_len(len as u64).unwrap();
            model.bytes.truncate(len);
            model.file.set_len(4 << 20).unwrap();
            model.bytes.resize(4 << 20, 0);
        }
    }
    model.file.sync_all().unwrap();
    assert!(
        fs::read(&path).unwrap() == model.bytes && fs::read(load.below.join("overwritten")).unwrap() == model.bytes
    );
}

/// Extended attributes are made and removed once.
fn attributes(load: &Load, goes_on: &mut dyn FnMut() -> bool) {
    let path = load.at.join("attributes");
    File::create_new(&path).unwrap();
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    let has_attributes = rustix::fs::setxattr(&name, c"user.probe", b"", XattrFlags::empty()).is_ok();
    while goes_on() {
        if has_attributes {
            rustix::fs::setxattr(&name, c"user.once", b"value", XattrFlags::CREATE).unwrap();
            rustix::fs::setxattr(&name, c"user.once", b"other", XattrFlags::REPLACE).unwrap();
            rustix::fs::removexattr(&name, c"user.once").unwrap();
        }
    }
}
