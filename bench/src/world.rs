//! The environment of the benches: a lender, mounts with and without it, a disk of known speed, and
//! workers in groups.
//!
//! The compared mounts differ only in the lender: the same program and options, each over a
//! directory of its own with a file of the same size on the same disk. All processes are started by
//! the calling thread, and end with their guards.

use crate::figures::Conditions;
use crate::null_pages;
use crate::null_server::{self, NullServer};
use crate::worker::{self, Answer, Order, Report};
use page::PAGE_SIZE;
use rustix::fs::{Advice, IFlags, ioctl_getflags, ioctl_setflags};
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use testbed::{
    BlockDevice, Failure, Group, Interrupt, Process, Puma, PumaMount, Scratch, SlowDisk, WorkerProcess, ask_daemon,
    sibling_binary, wait_until,
};

/// Length in bytes of the number at the beginning of each page of a file.
pub const STAMP_BYTES: usize = 8;
/// Room while a worker starts, before its own needs are known.
const START_ROOM_BYTES: u64 = 64 << 20;
/// Room while a mount starts.
const MOUNT_ROOM_BYTES: u64 = 256 << 20;
/// The maximum delay of a worker's answer; later it counts as stuck.
const LATE_MAX: Duration = Duration::from_secs(120);
/// The maximum time of a block of a file on a fast disk.
const BLOCK_MS: u64 = 1;
/// The maximum time for a MiB of a stream, a power of two: 15 MB/s; and for a fragment in addition,
/// of which a slow disk reads 100 in a second.
const MIB_MS_BITS: u32 = 6;
const FRAGMENT_MS: u64 = 10;
/// The maximum time for a small file of a tree, with everything that is done with it: tens of round
/// trips to a file system that answers in some 100 µs.
const TREE_FILE_MS: u64 = 20;
/// Time limit for a daemon's answer, and until a mount has connected to its lender.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Time limit until the lender has received everything.
pub const SETTLE_MAX: Duration = Duration::from_secs(20);
/// Free space that is left on the disk.
const DISK_RESERVE_BYTES: u64 = 1 << 30;
/// Pages written at once.
const WRITE_PAGES: u64 = 256;

/// The amount of measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All.
    Whole,
    /// Some minutes.
    Quick,
    /// Some seconds, for a test: the figures are meaningless.
    Tiny,
}

impl Extent {
    /// Its name.
    pub fn name(self) -> &'static str {
        self.choose("whole", "quick", "tiny")
    }

    /// One of three values.
    pub fn choose<T>(self, whole: T, quick: T, tiny: T) -> T {
        match self {
            Extent::Whole => whole,
            Extent::Quick => quick,
            Extent::Tiny => tiny,
        }
    }
}

/// Whether connections and pages are sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    /// With a pool key, as by default.
    Keyed,
    /// With `--trust-network`.
    Trusting,
}

/// The environment of a bench.
pub struct World {
    /// The amount of measurements.
    pub extent: Extent,
    /// The seed of everything random.
    pub seed: u64,
    /// Whether the run was interrupted.
    pub interrupt: Interrupt,
    /// The disk, with the speed that the bench sets.
    pub disk: SlowDisk,
    puma: Puma,
    key: PathBuf,
    scratch: Scratch,
}

impl World {
    /// Prepares everything, or returns the reason why this machine cannot.
    pub fn create(extent: Extent, seed: u64, dir: Option<&Path>, interrupt: Interrupt) -> Result<World, Failure> {
        if !rustix::process::geteuid().is_root() {
            return Err(Failure::Problem("control groups need root: run it as root".to_owned()));
        }
        let fuse = File::options().read(true).write(true).open("/dev/fuse");
        fuse.map_err(Failure::attempted("opening /dev/fuse"))?;
        let pumapool = sibling_binary("pumapool").ok_or_else(|| {
            Failure::Problem("there is no pumapool next to this program; `bench/run` builds it".to_owned())
        })?;
        let own = std::env::current_exe().map_err(Failure::attempted("finding this program"))?;
        let usual = [own.parent().unwrap_or(Path::new("/")), Path::new("/var/tmp")];
        let on_a_disk = || usual.into_iter().find(|directory| BlockDevice::holding(directory).is_ok());
        let dir = dir.unwrap_or_else(|| on_a_disk().unwrap_or(usual[1]));
        let scratch = Scratch::new_in(dir, "bench")?;
        let disk = SlowDisk::create("bench", scratch.path())?;
        let (logs, key) = (scratch.directory("logs")?, scratch.path().join("pool.key"));
        let puma = Puma { pumapool, logs, interrupt: Some(interrupt.clone()) };
        // As between machines: the figures include the cost of sealing.
        puma.new_key(&key)?;
        Ok(World { extent, seed, interrupt, disk, puma, key, scratch })
    }

    /// The conditions.
    pub fn conditions(&self) -> Conditions {
        Conditions::now(self.disk.device().to_string())
    }

    /// Starts a lender in a memory group of `group_bytes`, which lends at most `capacity_bytes` and
    /// keeps `reserve_bytes` free.
    pub fn lend(&self, group_bytes: u64, capacity_bytes: u64, reserve_bytes: u64) -> Result<Lender, Failure> {
        self.lend_with(Security::Keyed, group_bytes, capacity_bytes, reserve_bytes)
    }

    /// Starts such a lender, sealed or not.
    pub fn lend_with(
        &self,
        security: Security,
        group_bytes: u64,
        capacity_bytes: u64,
        reserve_bytes: u64,
    ) -> Result<Lender, Failure> {
        let group = Group::create("bench-lender", Some(group_bytes), None)?;
        let mut command = Command::new(&self.puma.pumapool);
        command.args(["lend", "--foreground", "--listen", "127.0.0.1:0"]);
        self.secure(&mut command, security);
        command.args(["--capacity", &capacity_bytes.to_string(), "--reserve", &reserve_bytes.to_string()]);
        let (process, said) = self.puma.start(command, "lender", &[&group])?;
        let address = said.rsplit(' ').next().and_then(|address| address.parse().ok());
        let address = address.ok_or_else(|| Failure::Problem(format!("the lender printed no address: {said:?}")))?;
        Ok(Lender { process, group, address, group_bytes, capacity_bytes })
    }

    /// Mounts a directory with a file of `len_bytes`, with a lender at that address or without one.
    /// A second mount of the same name has the same file.
    pub fn mount(
        &self,
        name: &str,
        len_bytes: u64,
        lender: Option<SocketAddr>,
        options: &[&str],
    ) -> Result<Side, Failure> {
        self.mount_with(Security::Keyed, name, len_bytes, lender, options)
    }

    /// Mounts, sealed or not; without a file if `len_bytes` is 0.
    pub fn mount_with(
        &self,
        security: Security,
        name: &str,
        len_bytes: u64,
        lender: Option<SocketAddr>,
        options: &[&str],
    ) -> Result<Side, Failure> {
        // On the same slow disk as the workers, because it reads this disk for them.
        let group = Group::create("bench-mount", None, Some(&self.disk))?;
        self.mount_in(group, security, name, len_bytes, lender, options)
    }

    /// Mounts a directory for a program that also writes: the daemon's writes to the backing
    /// directory use page cache of its own, which is limited.
    pub fn mount_limited(
        &self,
        name: &str,
        page_cache_bytes: u64,
        lender: Option<SocketAddr>,
        options: &[&str],
    ) -> Result<Side, Failure> {
        let group = Group::create("bench-mount", Some(page_cache_bytes + MOUNT_ROOM_BYTES), Some(&self.disk))?;
        let side = self.mount_in(group, Security::Keyed, name, 0, lender, options)?;
        side.group.limit_memory(page_cache_bytes + side.group.memory_use()?.total_bytes)?;
        Ok(side)
    }

    fn mount_in(
        &self,
        group: Group,
        security: Security,
        name: &str,
        len_bytes: u64,
        lender: Option<SocketAddr>,
        options: &[&str],
    ) -> Result<Side, Failure> {
        let (source, at) = (self.scratch.path().join(name), self.scratch.path().join(format!("{name}-mounted")));
        for directory in [&source, &at] {
            fs::create_dir_all(directory).map_err(Failure::attempted(format!("making {}", directory.display())))?;
        }
        if len_bytes > 0 && !source.join(FILE).exists() {
            self.check_room(len_bytes)?;
            write_stamped(&source.join(FILE), len_bytes, self.seed)
                .map_err(Failure::attempted(format!("writing a file to {}", source.display())))?;
            self.interrupt.check()?;
        }
        let mut command = Command::new(&self.puma.pumapool);
        command.arg("mount").args([&source, &at]).arg("--foreground").args(options);
        self.secure(&mut command, security);
        if let Some(address) = lender {
            command.args(["--lender", &address.to_string()]);
        }
        let mount = self.puma.mount(command, &at, &format!("mount-{name}"), &[&group])?;
        let (backing, file, has_lender) = (source.join(FILE), at.join(FILE), lender.is_some());
        let side = Side { mount, group, source, at, backing, file, has_lender };
        side.check_lender()?;
        Ok(side)
    }

    /// Serves a folder of disk images, the image `disk.img` to a guest.
    pub fn serve_images(&self, images: &Path, at: &Path) -> Result<PumaMount, Failure> {
        let mut command = Command::new(&self.puma.pumapool);
        command.args(["host-cache", "host", "--foreground", "--images"]).args([images, at]);
        command
            .arg("--guest")
            .arg(format!("disk.img={}", self.key.display()))
            .arg("--listen")
            .arg(self.guests_address());
        self.puma.mount(command, at, "images", &[])
    }

    /// Starts the guest of [`World::serve_images`], which sends it the pages that are evicted from
    /// the file system there.
    pub fn start_guest(&self, fs: &Path, ring: &str) -> Result<Process, Failure> {
        let mut command = Command::new(&self.puma.pumapool);
        command.args(["host-cache", "guest", "--foreground", "--ring", ring, "--fs"]).arg(fs);
        command.arg("--to").arg(self.guests_address());
        self.secure(&mut command, Security::Keyed);
        Ok(self.puma.start(command, "guest", &[])?.0)
    }

    fn guests_address(&self) -> String {
        format!("unix:{}", self.scratch.path().join("guests.sock").display())
    }

    fn secure(&self, command: &mut Command, security: Security) {
        match security {
            Security::Keyed => command.arg("--key").arg(&self.key),
            Security::Trusting => command.arg("--trust-network"),
        };
    }

    /// Starts the floors of a hit; the file has so many bytes. `at` is an empty directory.
    pub fn null_server<'a>(&self, at: &'a Path, len_bytes: u64) -> Result<NullServer<'a>, Failure> {
        let arguments = [at.into(), len_bytes.to_string().into()];
        let (process, address) = self.start_floor(null_server::NAME, &arguments)?;
        Ok(NullServer::new(process, at, address))
    }

    /// Starts the floor of a page server. Returns its address.
    pub fn null_pages(&self) -> Result<(Process, String), Failure> {
        self.start_floor(null_pages::NAME, &[])
    }

    /// Starts this program as a server that does nothing. Returns its address.
    fn start_floor(&self, name: &str, arguments: &[OsString]) -> Result<(Process, String), Failure> {
        let own = std::env::current_exe().map_err(Failure::attempted("finding this program"))?;
        let mut command = Command::new(own);
        command.arg(name).args(arguments);
        self.puma.start(command, name, &[])
    }

    /// The log of a program's standard error.
    pub fn log(&self, name: &str) -> PathBuf {
        self.puma.logs.join(format!("{name}.log"))
    }

    /// The path of a directory with that name.
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Memory on the slow disk, for programs: their own needs, and page cache.
    pub fn group(&self, memory_bytes: u64) -> Result<Group, Failure> {
        Ok(Group::create("bench-program", Some(memory_bytes), Some(&self.disk))?)
    }

    /// Makes an empty directory.
    pub fn directory(&self, name: &str) -> Result<PathBuf, Failure> {
        Ok(self.scratch.directory(name)?)
    }

    /// A file of `len_bytes` on the disk, not in the page cache.
    pub fn file(&self, name: &str, len_bytes: u64) -> Result<PathBuf, Failure> {
        self.check_room(len_bytes)?;
        let path = self.scratch.path().join(name);
        write_stamped(&path, len_bytes, self.seed)
            .map_err(Failure::attempted(format!("writing {}", path.display())))?;
        drop_cached(&path)?;
        Ok(path)
    }

    /// Starts a worker on the slow disk with that much page cache: its own needs are measured, and
    /// added to its limit.
    pub fn worker(&self, page_cache_bytes: u64) -> Result<Worker<'_>, Failure> {
        let group = Group::create("bench-worker", Some(page_cache_bytes + START_ROOM_BYTES), Some(&self.disk))?;
        let mut worker = Worker::start(&self.interrupt, &[&group])?;
        group.limit_memory(page_cache_bytes + group.memory_use()?.total_bytes)?;
        worker.group = Some(group);
        Ok(worker)
    }

    /// Refuses to fill the disk.
    pub fn check_room(&self, len_bytes: u64) -> Result<(), Failure> {
        let disk = rustix::fs::statvfs(self.scratch.path()).map_err(io::Error::from)?;
        let free_bytes = disk.f_bavail * disk.f_frsize;
        if free_bytes >= len_bytes + DISK_RESERVE_BYTES {
            return Ok(());
        }
        let message = format!(
            "{} has {} MiB of free space, and {} MiB are needed; choose another with --dir",
            self.scratch.path().display(),
            free_bytes >> 20,
            (len_bytes + DISK_RESERVE_BYTES) >> 20
        );
        Err(Failure::Problem(message))
    }
}

/// A lender. Dropping it ends it.
pub struct Lender {
    // Drop order: the process before its group.
    process: Process,
    /// The memory group that it is in.
    pub group: Group,
    /// The address.
    pub address: SocketAddr,
    /// The memory of its group, and the maximum of lent memory.
    pub group_bytes: u64,
    pub capacity_bytes: u64,
}

impl Lender {
    /// The process.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Stored pages.
    pub fn stored_pages(&self) -> Result<u64, Failure> {
        Ok(ask_daemon::<report::Lend>(self.process.pid(), ANSWER_MAX)?.lender.stored_pages)
    }
}

/// The one file of each mount.
pub const FILE: &str = "data";

/// A mount over a file of its own. Dropping it unmounts.
pub struct Side {
    // Drop order: the mount before its group.
    mount: PumaMount,
    group: Group,
    /// The backing directory, and the mountpoint.
    pub source: PathBuf,
    pub at: PathBuf,
    /// The backing file, and the file through the mount.
    pub backing: PathBuf,
    pub file: PathBuf,
    has_lender: bool,
}

impl Side {
    /// What the mount says of itself.
    pub fn status(&self) -> Result<report::Mount, Failure> {
        self.mount.status()
    }

    /// Checks that its lender is connected, before and after a measurement; otherwise it would be
    /// one without a lender.
    pub fn check_lender(&self) -> Result<(), Failure> {
        let is_up = || self.status().is_ok_and(|status| status.lender_is_up);
        if !self.has_lender || wait_until(ANSWER_MAX, is_up) {
            return Ok(());
        }
        Err(Failure::Problem(format!("the mount {} does not find its lender", self.at.display())))
    }

    /// One of its borrower's counters.
    pub fn counter(&self, number: impl Fn(&report::Borrower) -> u64) -> Result<u64, Failure> {
        Ok(number(&self.status()?.borrower))
    }

    /// Makes the kernel forget the file's pages, through the mount and in the backing directory.
    /// The mount's lender keeps its pages, and gets those that this evicts.
    pub fn drop_cached(&self) -> Result<(), Failure> {
        drop_cached(&self.file)?;
        drop_cached(&self.backing)
    }

    /// Waits until the lender has received everything that was sent.
    pub fn settle(&self) -> Result<(), Failure> {
        let settled = || self.status().is_ok_and(|status| status.puts_under_way == 0);
        if wait_until(SETTLE_MAX, settled) {
            return Ok(());
        }
        Err(Failure::Problem(format!("the lender did not take all puts within {SETTLE_MAX:?}")))
    }

    /// Makes the kernel evict a part of the file, through the mount.
    pub fn evict(&self, at_bytes: u64, len_bytes: u64) -> Result<(), Failure> {
        let len_bytes = NonZeroU64::new(len_bytes);
        let evicted = File::open(&self.file)
            .and_then(|file| Ok(rustix::fs::fadvise(&file, at_bytes, len_bytes, Advice::DontNeed)?));
        evicted.map_err(Failure::attempted(format!("evicting {}", self.file.display())))
    }

    /// Unmounts.
    pub fn end(self) -> Result<(), Failure> {
        self.mount.end().map_err(Failure::Problem)
    }
}

/// What a counter of a daemon has grown by. One that was started anew begins at 0, and what it did
/// before is not known.
pub fn grown(before: u64, after: u64) -> Result<u64, Failure> {
    after.checked_sub(before).ok_or_else(|| Failure::Problem("a daemon has ended, and was started anew".to_owned()))
}

/// Binds a process and its later children to one processor; `None` is the calling thread.
pub fn pin(pid: Option<u32>, processor: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(processor);
    let Some(pid) = pid else { return Ok(sched_setaffinity(None, &set)?) };
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let name = task?.file_name();
        let thread = name.to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
        sched_setaffinity(thread, &set)?;
    }
    Ok(())
}

/// Writes a file back and makes the kernel forget its pages.
pub fn drop_cached(path: &Path) -> Result<(), Failure> {
    let dropped = File::open(path).and_then(|file| {
        file.sync_all()?;
        Ok(rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?)
    });
    dropped.map_err(Failure::attempted(format!("dropping {} from the page cache", path.display())))
}

/// Writes back everything under a directory, and makes the kernel forget its pages.
pub fn drop_cached_under(directory: &Path) -> Result<(), Failure> {
    let problem = || Failure::attempted(format!("dropping {} from the page cache", directory.display()));
    let root = File::open(directory).map_err(problem())?;
    rustix::fs::syncfs(&root).map_err(|error| problem()(error.into()))?;
    for path in files_under(directory).map_err(problem())? {
        let file = File::open(path).map_err(problem())?;
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).map_err(|error| problem()(error.into()))?;
    }
    Ok(())
}

/// Asks the file system to place the directories that are made in this one far from each other.
///
/// An ext4 without a journal does not give the number of an inode that was removed a short while
/// ago to another file (fs/ext4/ialloc.c, recently_deleted), and searches for a usable one from the
/// first of its group on. Next to the files that an earlier round has removed, making one took 0.4
/// ms instead of 15 µs, most of it independent of the caller.
pub fn spread_directories(directory: &Path) -> Result<(), Failure> {
    let opened = File::open(directory).map_err(Failure::attempted(format!("opening {}", directory.display())))?;
    let flags = ioctl_getflags(&opened).map(|flags| flags | IFlags::TOPDIR);
    match flags.and_then(|flags| ioctl_setflags(&opened, flags)) {
        // A file system without this attribute does not need it either.
        Ok(()) | Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::INVAL) => Ok(()),
        Err(error) => Err(Failure::attempted(format!("setting the flags of {}", directory.display()))(error.into())),
    }
}

/// All files under a directory, in the order of their names.
pub fn files_under(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let (mut files, mut directories) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                directories.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Writes a file whose pages begin with their numbers and are random otherwise, and syncs it.
pub fn write_stamped(path: &Path, len_bytes: u64, seed: u64) -> io::Result<()> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut file = File::create(path)?;
    let pages = len_bytes.div_ceil(PAGE_SIZE as u64);
    let mut buffer = vec![0; WRITE_PAGES as usize * PAGE_SIZE];
    for first in (0..pages).step_by(WRITE_PAGES as usize) {
        let count = WRITE_PAGES.min(pages - first) as usize;
        let buffer = &mut buffer[..count * PAGE_SIZE];
        random.fill(buffer);
        for (page, content) in (first..).zip(buffer.chunks_exact_mut(PAGE_SIZE)) {
            content[..STAMP_BYTES].copy_from_slice(&page.to_le_bytes());
        }
        file.write_all(buffer)?;
    }
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
    Ok(())
}

/// A worker. Dropping it ends it.
pub struct Worker<'a> {
    // Drop order: the process before its group.
    worker_process: WorkerProcess<'a>,
    /// Its own group, if it has one.
    group: Option<Group>,
}

impl<'a> Worker<'a> {
    /// Starts a worker in groups of others, which must outlive it.
    pub fn start(interrupt: &'a Interrupt, groups: &[&Group]) -> Result<Worker<'a>, Failure> {
        let mut worker_process = WorkerProcess::start(worker::NAME, groups, interrupt)?;
        match worker_process.receive(LATE_MAX)? {
            Answer::Ready => Ok(Worker { worker_process, group: None }),
            answer => Err(Failure::Problem(format!("starting a worker: it answered {answer:?}"))),
        }
    }

    /// Executes an order.
    pub fn obey(&mut self, order: &Order) -> Result<Report, Failure> {
        self.begin(order)?;
        let own_ms = match order {
            Order::Use { ms, .. } => *ms,
            Order::Once { len_bytes, block_bytes, .. } => len_bytes / *block_bytes as u64 * BLOCK_MS,
            Order::Grow { over_ms, hold_ms, .. } => over_ms + hold_ms,
            Order::Files { len_bytes, .. } | Order::Pass { len_bytes, .. } => len_bytes >> 20 << MIB_MS_BITS,
            Order::Fragments { total_bytes, fragment_bytes, .. } => {
                (total_bytes / *fragment_bytes as u64 * FRAGMENT_MS) + (total_bytes >> 20 << MIB_MS_BITS)
            }
            Order::Tree { files, .. } => *files as u64 * TREE_FILE_MS,
            _ => 0,
        };
        self.end(Duration::from_millis(own_ms))
    }

    /// Sends an order, and does not wait.
    pub fn begin(&mut self, order: &Order) -> Result<(), Failure> {
        self.worker_process.send(order)
    }

    /// Waits until the begun order was executed, which by itself takes so long.
    pub fn end(&mut self, own: Duration) -> Result<Report, Failure> {
        match self.worker_process.receive(own + LATE_MAX)? {
            Answer::Done(report) => Ok(report),
            Answer::Failed(problem) => Err(Failure::Problem(format!("a worker failed: {problem}"))),
            Answer::Ready => Err(Failure::Problem("a worker started twice".to_owned())),
        }
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        // It ends when there are no more orders; its guard ends one that hangs.
        let _its_guard_waits_too = self.worker_process.end(ANSWER_MAX);
    }
}

/// The mountpoint of a file's file system.
pub fn filesystem_of(path: &Path) -> io::Result<PathBuf> {
    let device = |path: &Path| fs::metadata(path).map(|found| found.dev());
    let mut at = fs::canonicalize(path)?;
    let of_file = device(&at)?;
    while let Some(parent) = at.parent() {
        if device(parent)? != of_file {
            break;
        }
        at = parent.to_owned();
    }
    Ok(at)
}
