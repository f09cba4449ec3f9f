//! The mount survives its daemon: programs that use it see a pause when the daemon is killed or replaced, never an error, and nothing
//! is lost or done twice. Everything here expects exactly what a file system without kills would give.

mod setup;

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{FlockOperation, OFlags, XattrFlags};
use rustix::process::Signal;
use setup::{Lender, Mount, PATIENCE, can_run, kill, pumapool, tool};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use testbed::{Line, Process, Scratch, wait_until};

const PAGE: usize = 4096;

fn seed() -> u64 {
    let seed = std::env::var("PUMA_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    println!("PUMA_SEED={seed}");
    seed
}

/// What a worker of the load is to know: where it works, and whether it is to end.
struct Load {
    at: PathBuf,
    below: PathBuf,
    seed: u64,
    ending: AtomicBool,
    rounds: Vec<AtomicU64>,
}

/// One kind of use: does one round after the other until it is told to end, then checks that all is there.
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
fn under_load(mount: &Mount, source: &Path, times: u32, mut disturb: impl FnMut(u32)) {
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

/// Files that are opened to be read before they are opened to be written: without a lender they are passed through, then all open ones are, and
/// what is opened later is not.
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
    // SAFETY: the mapping is LEN bytes, lives until `munmap` below, and only this thread stores in it.
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

fn killed_under_load(test: &str, options: &[&str], kills: u32) {
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let lender = Lender::start(scratch.path(), "64MiB", &[]);
    let options: Vec<_> = ["--lender", &lender.address].into_iter().chain(options.iter().copied()).collect();
    let mount = Mount::start(&source, &at, &options);
    under_load(&mount, &source, kills, |_| mount.kill_daemon());
    assert_eq!(mount.takeovers(), u64::from(kills));
    assert_eq!(mount.count("bad_pages"), 0);
    // Who is killed in the middle of a frame leaves a part of one.
    let cut_short = lender.count("malformed_frames");
    assert!(cut_short <= u64::from(kills), "{cut_short}");
}

#[test]
fn nothing_is_lost_with_write_through() {
    killed_under_load("nothing_is_lost_with_write_through", &[], 8);
}

#[test]
fn nothing_is_lost_of_what_is_passed_through() {
    let test = "nothing_is_lost_of_what_is_passed_through";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    // Open through all of it.
    let bytes = setup::write_pages(&source.join("reader"), 100, 1);
    let mount = Mount::start(&source, &at, &[]);
    let reader = File::open(at.join("reader")).unwrap();
    let read = |file: &File| {
        let mut read = vec![0; bytes.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        read
    };
    under_load(&mount, &source, 8, |_| {
        mount.kill_daemon();
        assert!(read(&reader) == bytes && read(&File::open(at.join("reader")).unwrap()) == bytes);
    });
    assert_eq!(mount.takeovers(), 8);
    let status = mount.status();
    println!("{}", status["mount"]);
    assert!(status["mount"]["passed_opens"].as_u64() > Some(0), "of the last daemon");
}

/// What the daemon before it was told of is not known to a successor, nor what was changed when there was none.
#[test]
fn attributes_that_changed_without_a_daemon_are_seen() {
    let test = "attributes_that_changed_without_a_daemon_are_seen";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(source.join("a"), b"first").unwrap();
    let mount = Mount::start(&source, &at, &["--attribute-timeout", "3600"]);
    let size = |directory: &Path| fs::metadata(directory.join("a")).unwrap().len();
    for kills in 1..=4 {
        assert!(wait_until(PATIENCE, || size(&at) == size(&source)));
        kill(mount.daemon_pid());
        File::options().append(true).open(source.join("a")).unwrap().write_all(b"more").unwrap();
        mount.wait_for("a takeover", |status| status["mount"]["takeovers"] == kills);
        assert!(wait_until(PATIENCE, || size(&at) == size(&source)), "after {kills} kills");
    }
}

#[test]
fn nothing_is_lost_with_write_back() {
    killed_under_load("nothing_is_lost_with_write_back", &["--write", "back"], 8);
}

#[test]
fn programs_do_not_notice_an_upgrade() {
    let test = "programs_do_not_notice_an_upgrade";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let newer = scratch.path().join("newer");
    fs::copy(setup::PUMAPOOL, &newer).unwrap();
    let mount = Mount::start(&source, &at, &[]);
    let at = at.to_str().unwrap();
    under_load(&mount, &source, 6, |time| match time % 3 {
        0 => {
            let output = pumapool(&["upgrade", at, "--binary", newer.to_str().unwrap()]);
            assert!(output.status.success(), "{output:?}");
            print!("{}", String::from_utf8_lossy(&output.stdout));
            let exe = fs::read_link(format!("/proc/{}/exe", mount.daemon_pid())).unwrap();
            assert_eq!(exe, newer);
        }
        // No program that could serve, or none at all: the one before it goes on.
        1 => {
            for other in ["/bin/false", "/etc", "/etc/passwd"] {
                let output = pumapool(&["upgrade", at, "--binary", other]);
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(!output.status.success() && said.contains(other), "{said}");
                let exe = fs::read_link(format!("/proc/{}/exe", mount.daemon_pid())).unwrap();
                assert_eq!(exe, newer);
            }
        }
        _ => {
            let before = mount.takeovers();
            mount.kill_daemon();
            assert!(testbed::wait_until(PATIENCE, || mount.takeovers() > before));
        }
    });
    let output = pumapool(&["upgrade", "/nonexistent"]);
    assert!(!output.status.success());
    setup::umount(at);
}

#[test]
fn without_its_keeper_the_daemon_serves_on() {
    let test = "without_its_keeper_the_daemon_serves_on";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let log = scratch.path().join("log");
    let at_text = at.to_str().unwrap();
    let output = pumapool(&["mount", source.to_str().unwrap(), at_text, "--log-file", log.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let status = || setup::mounts().into_iter().find(|status| status["mountpoint"] == at_text);
    let before = status().unwrap();
    let (keeper, daemon) = (before["pid"].as_u64().unwrap(), before["daemon_pid"].as_u64().unwrap());
    assert_ne!(keeper, daemon);
    kill(keeper as u32);
    // It is a child of nobody here: its end is seen by what the daemon says of itself.
    assert!(wait_until(PATIENCE, || status().is_some_and(|status| status["pid"] == daemon)), "{:?}", status());
    fs::write(at.join("file"), "content").unwrap();
    assert_eq!(fs::read(source.join("file")).unwrap(), b"content");
    let said = fs::read_to_string(&log).unwrap();
    assert_eq!(said.lines().filter(|line| line.contains("keeper of this mount")).count(), 1, "{said}");
    let output = pumapool(&["upgrade", at_text]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("keeper"), "{output:?}");
    setup::umount(at_text);
    assert!(!at.join("file").exists() && status().is_none());
}

/// What a successor needs must not lie in the mount, which nobody serves while it starts.
#[test]
fn nothing_that_starts_a_daemon_waits_for_the_mount() {
    let test = "nothing_that_starts_a_daemon_waits_for_the_mount";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, log) = (scratch.directory("source").unwrap(), scratch.path().join("log"));
    let (folder, program) = (source.join("folder"), source.join("pumapool"));
    fs::create_dir(&folder).unwrap();
    fs::copy(setup::PUMAPOOL, &program).unwrap();
    let [source_text, program_text] = [&source, &program].map(|path| path.to_str().unwrap());
    let key = source.join("pool.key");
    assert!(pumapool(&["key", "new", key.to_str().unwrap()]).status.success());
    // Given in a folder of what is mounted, over which it is mounted. Of attributes nothing is believed: whoever looks asks the daemon.
    let make = |options: &[&str]| {
        let mut command = Command::new(setup::PUMAPOOL);
        command.args(["mount", "..", "--attribute-timeout", "0", "--log-file", log.to_str().unwrap()]).args(options);
        command.current_dir(&folder).output().unwrap()
    };
    let refused = make(&["--key", "../pool.key"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("put it elsewhere"), "{refused:?}");
    let made = make(&[]);
    assert!(made.status.success(), "{made:?}");
    let status = || setup::mounts().into_iter().find(|status| status["mountpoint"] == source_text);
    let refused = pumapool(&["upgrade", source_text, "--binary", program_text]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("put it elsewhere"), "{refused:?}");
    kill(status().unwrap()["daemon_pid"].as_u64().unwrap() as u32);
    let is_served = || status().is_some_and(|status| status["mount"]["takeovers"] == 1);
    let came = wait_until(PATIENCE, is_served);
    if !came {
        // Who waits for it waits for ever: it goes with its keeper.
        status().and_then(|status| status["pid"].as_u64()).into_iter().for_each(|pid| kill(pid as u32));
    }
    assert!(came, "{}", fs::read_to_string(&log).unwrap());
    assert_eq!(fs::read(&program).unwrap().len() as u64, fs::metadata(setup::PUMAPOOL).unwrap().len());
    setup::umount(source_text);
}

/// The processes that a process has started.
fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

#[test]
fn a_daemon_that_never_serves_is_not_started_for_ever() {
    let test = "a_daemon_that_never_serves_is_not_started_for_ever";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(source.join("file"), "below").unwrap();
    let mut mount = Mount::start(&source, &at, &[]);
    let keeper = mount.process.pid();
    let mut killed = BTreeSet::new();
    let ended = wait_until(PATIENCE, || {
        for child in children(keeper) {
            if killed.insert(child) {
                kill(child);
            }
        }
        mount.process.wait(Duration::ZERO).unwrap().is_some()
    });
    assert!(ended, "after {} daemons", killed.len());
    assert!(!mount.process.wait(PATIENCE).unwrap().unwrap().success());
    println!("{} daemons", killed.len());
    assert!((5..12).contains(&killed.len()), "{} daemons", killed.len());
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0, "no dead mount is left");
}

#[test]
fn signals_to_the_keeper_end_the_mount() {
    let test = "signals_to_the_keeper_end_the_mount";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let mut mount = Mount::start(&source, &at, &[]);
    mount.kill_daemon();
    // A service manager signals both.
    let daemon = rustix::process::Pid::from_raw(mount.daemon_pid() as i32).unwrap();
    rustix::process::kill_process(daemon, Signal::TERM).unwrap();
    mount.process.signal(Signal::TERM).unwrap();
    assert!(mount.process.wait(PATIENCE).unwrap().unwrap().success());
    assert!(!setup::PUMAPOOL.is_empty() && fs::read_dir(&at).unwrap().next().is_none());
}

/// What a service manager stores, by name.
fn store(manager: &UnixDatagram, stored: &mut BTreeMap<String, OwnedFd>) {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut bytes = [0; 4096];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
    let Ok(received) = recvmsg(manager, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)
    else {
        return;
    };
    let text = String::from_utf8_lossy(&bytes[..received.bytes]).into_owned();
    let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or_default().to_owned();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            fds.for_each(|fd| drop(stored.insert(name.clone(), fd)));
        }
    }
    if text.contains("FDSTOREREMOVE=1") {
        stored.remove(&name);
    }
}

/// Until it stores so many.
fn wait_for_stored(manager: &UnixDatagram, stored: &mut BTreeMap<String, OwnedFd>, count: usize) {
    let came = wait_until(PATIENCE, || {
        store(manager, stored);
        stored.len() == count
    });
    assert!(came, "{:?} instead of {count}", stored.keys());
}

#[test]
fn what_a_service_manager_stores_survives_the_keeper() {
    let test = "what_a_service_manager_stores_survives_the_keeper";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let (address, metrics) = (scratch.path().join("manager"), scratch.directory("metrics").unwrap());
    let manager = UnixDatagram::bind(&address).unwrap();
    let command = || {
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$@\"", "sh", setup::PUMAPOOL, "mount"]).args([&source, &at]);
        command.args(["--foreground", "--threads", "4"]).env("NOTIFY_SOCKET", &address).env("FDSTORE", "100");
        command.arg("--metrics").arg(format!("unix:{}/socket", metrics.display()));
        command
    };
    let mut first = Process::spawn(command(), &[]).unwrap();
    first.wait_for_line("READY", PATIENCE).unwrap();
    // Another process has it open: ours must be able to start others while nobody serves, and those would close it.
    let mut holder = Command::new("sh");
    holder.args([
        "-c",
        "exec 3<>\"$0\"; printf before >&3; echo OPEN; read go; printf ' and after' >&3; exec 3>&-; echo DONE",
    ]);
    holder.arg(at.join("file")).stdin(Stdio::piped());
    let mut holder = Process::spawn(holder, &[]).unwrap();
    holder.wait_for_line("OPEN", PATIENCE).unwrap();
    let closed = File::create(at.join("closed")).unwrap();
    let mut stored = BTreeMap::new();
    let mut stores = |count: usize| wait_for_stored(&manager, &mut stored, count);
    // State, directory, connection, a descriptor of it for each worker, and what is open.
    stores(3 + 4 + 2);
    drop(closed);
    stores(3 + 4 + 1);

    let daemon = children(first.pid())[0];
    first.kill().unwrap();
    // Now an attempt to take over finds that somebody serves.
    let numbers: Vec<_> = stored.values().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 200).unwrap()).collect();
    let names = stored.keys().cloned().collect::<Vec<_>>().join(":");
    let again = || {
        let mut command = command();
        command.env("LISTEN_FDS", numbers.len().to_string()).env("LISTEN_FDNAMES", &names);
        let raw: Vec<i32> = numbers.iter().map(|fd| fd.as_raw_fd()).collect();
        // SAFETY: the closure runs between fork and exec, makes system calls only, and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                for (number, fd) in (3..).zip(&raw) {
                    if libc::dup2(*fd, number) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        Process::spawn(command, &[]).unwrap()
    };
    // From here on somebody reads what else is said, as a service manager does.
    let (done, removed) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            manager.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            let mut text = [0; 4096];
            while !done.load(Ordering::Relaxed) {
                if let Ok(len) = manager.recv(&mut text) {
                    let is_removal = String::from_utf8_lossy(&text[..len]).contains("FDSTOREREMOVE=1");
                    removed.fetch_add(u64::from(is_removal), Ordering::Relaxed);
                }
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut second = again();
            assert!(!second.wait(PATIENCE).unwrap().unwrap().success(), "two daemons served one mount");
            assert_eq!(removed.load(Ordering::Relaxed), 0, "what is stored is still needed");
            kill(daemon);
            // It is taken on all the same when its metrics cannot be served any more.
            fs::remove_dir_all(&metrics).unwrap();
            let mut third = again();
            third.wait_for_line("READY", PATIENCE).unwrap();
            holder.take_stdin().unwrap().write_all(b"go\n").unwrap();
            holder.wait_for_line("DONE", PATIENCE).unwrap();
            assert_eq!(fs::read(at.join("file")).unwrap(), b"before and after");
            assert_eq!(fs::read(source.join("file")).unwrap(), b"before and after");
            third.signal(Signal::TERM).unwrap();
            assert!(third.wait(PATIENCE).unwrap().unwrap().success());
        }));
        done.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    assert!(removed.load(Ordering::Relaxed) > 0, "the end of the mount was not told");
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
}

/// Whoever ends it kills it in the end: what is stored must not become a mount again that is seen nowhere.
#[test]
fn a_mount_that_was_told_to_stop_is_not_stored() {
    let test = "a_mount_that_was_told_to_stop_is_not_stored";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(source.join("file"), "below").unwrap();
    let address = scratch.path().join("manager");
    let manager = UnixDatagram::bind(&address).unwrap();
    let mut command = Command::new(setup::PUMAPOOL);
    command.arg("mount").args([&source, &at]).args(["--foreground", "--threads", "4"]);
    command.env("NOTIFY_SOCKET", &address).env("FDSTORE", "100");
    let mut mount = Process::spawn(command, &[]).unwrap();
    mount.wait_for_line("READY", PATIENCE).unwrap();
    let open = File::open(at.join("file")).unwrap();
    let mut stored = BTreeMap::new();
    let mut stores = |count: usize| wait_for_stored(&manager, &mut stored, count);
    stores(3 + 4 + 1);
    mount.signal(Signal::TERM).unwrap();
    stores(0);
    // It is still served.
    assert!(mount.wait(Duration::ZERO).unwrap().is_none());
    assert_eq!(std::io::read_to_string(&open).unwrap(), "below");
    drop(open);
    assert!(mount.wait(PATIENCE).unwrap().unwrap().success());
}

#[test]
fn fsx_does_not_notice_ten_kills() {
    let test = "fsx_does_not_notice_ten_kills";
    let (true, Some(fsx)) = (can_run(test), tool(test, "fsx")) else { return };
    const KILLS: u64 = 10;
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let lender = Lender::start(scratch.path(), "64MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address]);
    let config = scratch.path().join("fsx.toml");
    fs::write(&config, testbed::fsx_settings(1 << 20)).unwrap();
    let file = at.join("fsx");
    fs::write(&file, "").unwrap();
    let mut seed = u64::from(seed() as u32);
    let mut kills = 0;
    // One run after the other, until the kills are done; each begins with the file as the one before left it.
    while kills < KILLS {
        let mut command = Command::new(&fsx);
        command.args(["-N", "3000", "-S", &seed.to_string(), "-f"]).arg(&config);
        command.arg("-P").arg(scratch.path()).arg(&file).stdin(Stdio::null()).stderr(Stdio::inherit());
        let mut process = Process::spawn(command, &[]).unwrap();
        while process.wait(Duration::from_millis(100)).unwrap().is_none() && kills < KILLS {
            mount.kill_daemon();
            kills += 1;
        }
        let mut said = String::new();
        while let Line::Text(line) = process.next_line(PATIENCE * 6) {
            said.push_str(&line);
            said.push('\n');
        }
        let status = process.wait(PATIENCE).unwrap().expect("it ends after its output");
        assert!(status.success(), "fsx found a difference (seed {seed}): {said}");
        seed += 1;
    }
    assert_eq!(mount.takeovers(), KILLS);
    assert_eq!(mount.count("bad_pages"), 0);
}
