//! Operations that are held up by the backing file system must not hold up those that are not.

mod support;

use fuse::{Errno, Operation, Reply, Request, abi};
use mount::WORKERS_MAX;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;
use support::{FileSystem, Mounted, can_mount, has_program, new_backing, wait_until};
use testbed::{Frozen, Lease};

/// Longest time for an answer that waits for nothing.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Workers that the mounts here always have.
const THREADS: usize = 4;

/// A mount over an ext4 of its own, which can be frozen.
fn over_ext4() -> Mounted {
    let (directory, backing) = new_backing();
    let ext4 = FileSystem::image(&backing, &directory.path().join("image"), 64 << 20);
    Mounted::over(directory, Some(ext4), |config| config.threads = THREADS)
}

/// Runs `action` in a thread of its own, and fails unless it ends in time.
fn answers<T: Send + 'static>(what: &str, action: impl FnOnce() -> T + Send + 'static) -> T {
    testbed::answers(what, ANSWER_MAX, action)
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

/// Requests that a frozen file system can still answer are answered.
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
    assert_eq!(mounted.mount().status().workers, THREADS as u64);
    let before = writes_of(&mounted);
    let writers = writers(&mounted, 3 * THREADS);
    let frozen = Frozen::new(&mounted.backing("")).unwrap();
    let writers: Vec<_> = writers.into_iter().map(thread::spawn).collect();
    wait_until("all writers wait", || writes_of(&mounted) == before + writers.len() as u64);
    other_requests_are_answered(&mounted);
    assert!(mounted.mount().status().workers > writers.len() as u64);
    drop(frozen);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
}

/// More writers than there can be workers: those beyond the user's share are deferred, and hold
/// none.
#[test]
fn one_user_holds_a_part_of_the_workers() {
    if !can_mount("one_user_holds_a_part_of_the_workers") || !has_program("neighbours", "fsfreeze") {
        return;
    }
    let mounted = over_ext4();
    fs::write(mounted.path("read"), vec![7; 1 << 20]).unwrap();
    let writers = writers(&mounted, WORKERS_MAX + 20);
    let frozen = Frozen::new(&mounted.backing("")).unwrap();
    let writers: Vec<_> = writers.into_iter().map(thread::spawn).collect();
    wait_until("most are deferred", || mounted.mount().status().deferred_requests > writers.len() as u64 / 2);
    other_requests_are_answered(&mounted);
    let status = mounted.mount().status();
    assert!(status.workers < WORKERS_MAX as u64 / 2, "{} workers", status.workers);
    drop(frozen);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    // Files are closed, too.
    wait_until("none is deferred", || mounted.mount().status().deferred_requests == 0);
    for number in 0..WORKERS_MAX + 20 {
        assert_eq!(fs::read(mounted.backing(format!("written-{number}"))).unwrap(), b"when it is thawed");
    }
}

/// A FUSE server with files of one page each, which answers READs when it is told to.
#[derive(Default)]
struct Hanging {
    answers: Mutex<bool>,
    told: Condvar,
}

/// Files of the server; any may be read.
const FILES: u64 = 60;

impl Hanging {
    fn attributes(node: u64) -> abi::Attr {
        let is_root = node == abi::ROOT_ID;
        let (mode, size) = if is_root { (libc::S_IFDIR | 0o755, 0) } else { (libc::S_IFREG | 0o644, 4096) };
        abi::Attr { ino: node, mode, size, nlink: 1, blksize: 4096, ..Default::default() }
    }

    fn answer(&self) {
        *self.answers.lock().unwrap() = true;
        self.told.notify_all();
    }
}

impl fuse::Filesystem for Hanging {
    fn handle(&self, request: &Request<'_>, reply: Reply<'_>, _: &mut [u8]) {
        let node = request.header.nodeid;
        let attr = Hanging::attributes(node);
        let _ = match request.operation {
            Operation::Lookup { name } => match name.to_str().unwrap().parse::<u64>() {
                Ok(number) if number < FILES => {
                    let nodeid = abi::ROOT_ID + 1 + number;
                    let attr = Hanging::attributes(nodeid);
                    reply.value(&abi::EntryOut { nodeid, attr, ..Default::default() })
                }
                _ => reply.error(Errno::NOENT),
            },
            Operation::Statfs => reply.value(&abi::StatfsOut::default()),
            Operation::Getattr(_) => reply.value(&abi::AttrOut { attr, ..Default::default() }),
            Operation::Open(_) | Operation::Opendir(_) => reply.value(&abi::OpenOut::default()),
            Operation::Read(_) => {
                drop(self.told.wait_while(self.answers.lock().unwrap(), |answers| !*answers).unwrap());
                reply.data(&[7; 4096])
            }
            Operation::Forget { .. } | Operation::BatchForget { .. } => {
                reply.none();
                Ok(())
            }
            Operation::Release(_) | Operation::Releasedir(_) | Operation::Flush(_) => reply.ok(),
            _ => reply.error(Errno::NOSYS),
        };
    }
}

/// Threads that read each file of the server. When dropped, it answers and they end: so that nobody
/// is left waiting if the test fails.
struct Readers<T>(Vec<thread::JoinHandle<T>>, Arc<Hanging>);

impl<T: Send + 'static> Readers<T> {
    fn start<R: FnOnce() -> T + Send + 'static>(served: &Served, read: impl Fn(u64) -> R) -> Readers<T> {
        Readers((0..FILES).map(|number| thread::spawn(read(number))).collect(), served.1.clone())
    }

    fn end(&mut self) -> Vec<T> {
        self.1.answer();
        self.0.drain(..).map(|reader| reader.join().unwrap()).collect()
    }
}

impl<T> Drop for Readers<T> {
    fn drop(&mut self) {
        self.1.answer();
        for reader in self.0.drain(..) {
            let _ = reader.join();
        }
    }
}

/// Its mount, with a thread for each READ. Taken away when dropped.
struct Served(PathBuf, Arc<Hanging>);

impl Served {
    fn at(path: &Path) -> Served {
        let options = fuse::mounting::Options {
            fsname: "hanging".to_owned(),
            subtype: "hanging".to_owned(),
            allow_other: true,
            flags: rustix::mount::MountFlags::empty(),
        };
        let device = fuse::mounting::mount(path, &options).unwrap();
        let server = Arc::new(Hanging::default());
        let served = Served(path.to_owned(), server.clone());
        let wish = fuse::Wish {
            capabilities: abi::init::ASYNC_READ,
            readahead_bytes_max: 0,
            background_max: 256,
            time_granularity_ns: 1,
        };
        let session = fuse::Session::negotiate(device, wish).unwrap();
        for _ in 0..FILES + 4 {
            let (mut worker, server) = (session.worker().unwrap(), server.clone());
            thread::spawn(move || worker.serve(&*server));
        }
        served
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.1.answer();
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn readers_of_a_hanging_server_hold_a_part_of_the_workers() {
    if !can_mount("readers_of_a_hanging_server_hold_a_part_of_the_workers") {
        return;
    }
    let (directory, backing) = new_backing();
    let served = Served::at(&backing);
    let mounted = Mounted::over(directory, None, |config| config.threads = THREADS);
    let read = |number: u64| {
        let file = File::open(mounted.path(number.to_string())).unwrap();
        move || {
            let mut page = [0; 4096];
            file.read_exact_at(&mut page, 0).unwrap();
            page
        }
    };
    let mut readers = Readers::start(&served, read);
    wait_until("some are deferred", || mounted.mount().status().deferred_requests > 10);
    let path = mounted.path("0");
    assert_eq!(answers("stat", move || fs::metadata(path).unwrap().len()), 4096);
    let path = mounted.path("1");
    answers("open", move || File::open(path).unwrap());
    assert!(mounted.mount().status().workers < WORKERS_MAX as u64 / 2);
    assert!(readers.end().into_iter().all(|page| page == [7; 4096]));
    wait_until("none is deferred", || mounted.mount().status().deferred_requests == 0);
    mounted.end();
    drop(served);
}

/// A user whose READs wait for one file system in SOURCE can read from another one.
#[test]
fn readers_of_a_hanging_server_leave_their_user_other_file_systems() {
    let test = "readers_of_a_hanging_server_leave_their_user_other_file_systems";
    if !can_mount(test) {
        return;
    }
    let (directory, backing) = new_backing();
    fs::create_dir(backing.join("hangs")).unwrap();
    fs::write(backing.join("read"), vec![7; 1 << 20]).unwrap();
    let served = Served::at(&backing.join("hangs"));
    let mounted = Mounted::over(directory, None, |config| (config.threads, config.cross_mounts) = (THREADS, true));
    let read = |number: u64| {
        let file = File::open(mounted.path(format!("hangs/{number}"))).unwrap();
        move || file.read_exact_at(&mut [0; 4096], 0).unwrap()
    };
    let mut readers = Readers::start(&served, read);
    wait_until("most are deferred", || mounted.mount().status().deferred_requests > FILES / 2);
    other_requests_are_answered(&mounted);
    readers.end();
    mounted.end();
    drop(served);
}

/// The kernel does not say whose writeback is. It must not count as root's changes, nor, where
/// there are several file systems, hold up the writeback of another one.
#[test]
fn writeback_of_a_frozen_file_system_holds_up_no_other_changes() {
    let test = "writeback_of_a_frozen_file_system_holds_up_no_other_changes";
    if !can_mount(test) || !has_program(test, "fsfreeze") {
        return;
    }
    let (directory, backing) = new_backing();
    fs::create_dir(backing.join("frozen")).unwrap();
    let ext4 = FileSystem::image(&backing.join("frozen"), &directory.path().join("image"), 64 << 20);
    let mounted = Mounted::over(directory, Some(ext4), |config| {
        (config.threads, config.cross_mounts, config.write) = (THREADS, true, mount::WriteMode::Back);
    });
    let write = |number: usize| {
        let mut file = File::create(mounted.path(format!("frozen/{number}"))).unwrap();
        move || {
            // The kernel keeps it until it is synced.
            file.write_all(b"when it is thawed").unwrap();
            file.sync_all().unwrap();
        }
    };
    fs::write(mounted.backing("frozen/unchanged"), b"").unwrap();
    let written: Vec<_> = (0..40).map(write).collect();
    let unchanged = File::options().read(true).write(true).open(mounted.path("frozen/unchanged")).unwrap();
    let before = writes_of(&mounted);
    let frozen = Frozen::new(&mounted.backing("frozen")).unwrap();
    let written: Vec<_> = written.into_iter().map(thread::spawn).collect();
    wait_until("writeback waits", || {
        writes_of(&mounted) - before + mounted.mount().status().deferred_requests == written.len() as u64
    });
    answers("close", move || drop(unchanged));
    let path = mounted.path("elsewhere");
    answers("write, sync and remove", move || {
        let mut file = File::create(&path).unwrap();
        file.write_all(b"at once").unwrap();
        file.sync_all().unwrap();
        fs::remove_file(path).unwrap();
    });
    drop(frozen);
    written.into_iter().for_each(|written| written.join().unwrap());
    for number in 0..40 {
        assert_eq!(fs::read(mounted.backing(format!("frozen/{number}"))).unwrap(), b"when it is thawed");
    }
}

#[test]
fn opens_that_wait_for_a_lease_hold_no_worker() {
    if !can_mount("opens_that_wait_for_a_lease_hold_no_worker") {
        return;
    }
    let mounted = over_ext4();
    for name in ["read", "leased"] {
        fs::write(mounted.backing(name), vec![7; 1 << 20]).unwrap();
    }
    let lease = Lease::take(&mounted.backing("leased"), false).unwrap();
    // More than one user may hold workers for.
    let open = |_| {
        let path = mounted.path("leased");
        thread::spawn(move || File::open(path).unwrap())
    };
    let openers: Vec<_> = (0..20).map(open).collect();
    wait_until("all are put off", || mounted.mount().status().waiting_opens == openers.len() as u64);
    other_requests_are_answered(&mounted);
    assert_eq!(mounted.mount().status().deferred_requests, 0);
    // A caller that does not want to wait is told so, as below.
    let path = mounted.path("leased");
    let at_once = answers("open that does not wait", move || {
        File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)
    });
    assert_eq!(at_once.unwrap_err().raw_os_error(), Some(libc::EWOULDBLOCK));
    assert!(openers.iter().all(|opener| !opener.is_finished()));
    drop(lease);
    let opened =
        |opener: thread::JoinHandle<File>| answers("open of what is no longer leased", move || opener.join().unwrap());
    let files: Vec<File> = openers.into_iter().map(opened).collect();
    files.iter().for_each(|file| file.read_exact_at(&mut [0; 4096], 0).unwrap());
    // The daemon is this process: how it has the backing file open, once nobody opens it any more.
    let flags = flags_of(&mounted.backing("leased"));
    assert!(!flags.is_empty() && flags.iter().all(|flags| flags & libc::O_NONBLOCK == 0), "{flags:?}");
    assert_eq!(mounted.mount().status().waiting_opens, 0);
}

/// The flags with which this process has a file open.
fn flags_of(path: &Path) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").unwrap() {
        let number = entry.unwrap().file_name().into_string().unwrap();
        if fs::read_link(format!("/proc/self/fd/{number}")).is_ok_and(|target| target == path) {
            let text = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
            let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
            found.extend(flags.map(|flags| i32::from_str_radix(flags.trim(), 8).unwrap()));
        }
    }
    found
}
