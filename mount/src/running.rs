//! A mount from its beginning to its end: the checks before, the threads, the unmounting.

use crate::config::{Config, WriteMode};
use crate::credentials::{Privilege, prepare_thread};
use crate::error::Error;
use crate::filesystem::Passthrough;
use crate::handle::Handles;
use crate::inode::{Found, Inodes, stat};
use crate::invalidation::Invalidations;
use crate::ledger::Ledger;
use crate::status::{Counters, Status};
use crate::sweep::Sweep;
use borrower::Borrower;
use fuse::abi::init;
use fuse::mounting::{self, Options};
use fuse::{Errno, Session, Wish};
use parking_lot::{Condvar, Mutex};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, StatVfsMountFlags, open};
use rustix::mount::MountFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

/// The mount's type is `fuse.` and this.
const SUBTYPE: &str = "pumapool";
/// Read-ahead window. Large, because a lender answers many pages for the price of one.
const READAHEAD_BYTES_MAX: u32 = 1 << 20;
/// Requests in the background at once: some read-ahead windows of each of several readers.
const BACKGROUND_MAX: u16 = 64;
/// Fewer threads than this, and one slow request stops all others.
const THREADS_MIN: usize = 2;
/// Share of the descriptors that inodes may hold, in quarters; the rest is for open files and connections.
const INODE_DESCRIPTOR_QUARTERS: u64 = 3;

/// What is known of a mount before its first request is served.
#[derive(Clone, Copy, Debug)]
pub struct MountInfo {
    /// The mount's device number, as `st_dev`.
    pub device: u64,
}

/// Whether one of our mounts is there, alive or dead.
///
/// # Errors
/// When the list of mounts cannot be read.
pub fn is_mounted(mountpoint: &Path) -> io::Result<bool> {
    Ok(mounting::find(mountpoint, SUBTYPE)?.is_some())
}

struct Shared {
    filesystem: Passthrough,
    source: PathBuf,
    mountpoint: PathBuf,
    workers: Mutex<usize>,
    ended: Condvar,
}

/// A mount that is being served. Dropping it detaches it; uses that are left are served to their end as long as the process lives.
pub struct Mount {
    shared: Arc<Shared>,
}

impl Mount {
    /// Mounts and serves. `make_borrower` runs when the mount exists, and before the first request is read.
    pub fn start<E>(
        config: Config,
        make_borrower: impl FnOnce(MountInfo) -> Result<Arc<Borrower>, E>,
    ) -> Result<Mount, Error>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (source, mountpoint) = check(&config)?;
        raise_limits();
        // Before mounting, and held ever after: the way below a mount over itself.
        let unreadable = |errno: Errno| Error::SourceUnreadable { source: source.clone(), error: errno.into() };
        let root =
            open(&source, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(unreadable)?;
        let readable =
            open(&source, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(unreadable)?;
        let handles_from = readable.try_clone().map_err(|error| failed("duplicate a descriptor", error))?;

        let (device, privilege) = mount(&config, &source, &mountpoint, &readable)?;
        let detach = Detach(&mountpoint);
        let mount =
            serve(&config, source, &mountpoint, device, privilege, root, readable, handles_from, make_borrower)?;
        let _ = std::mem::ManuallyDrop::new(detach); // It is served: from here on it is the mount's to end.
        Ok(mount)
    }

    /// The directory below, without symbolic links.
    pub fn source(&self) -> &Path {
        &self.shared.source
    }

    /// Where it is mounted, without symbolic links.
    pub fn mountpoint(&self) -> &Path {
        &self.shared.mountpoint
    }

    /// The borrower that it asks.
    pub fn borrower(&self) -> &Arc<Borrower> {
        &self.shared.filesystem.borrower
    }

    /// Waits until the mount has ended: unmounted by us or by somebody else, and no longer used.
    pub fn wait(&self) {
        let mut workers = self.shared.workers.lock();
        while *workers > 0 {
            self.shared.ended.wait(&mut workers);
        }
    }

    /// Ends the mount. With `lazy`, it disappears at once, and ends when its last use does; without, a use of it is
    /// [`Error::Busy`]. A mount that has ended already is no error.
    pub fn unmount(&self, lazy: bool) -> Result<(), Error> {
        if *self.shared.workers.lock() == 0 {
            return Ok(());
        }
        let mountpoint = &self.shared.mountpoint;
        match mounting::unmount(mountpoint, lazy) {
            Ok(()) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                Err(Error::Busy { mountpoint: mountpoint.clone() })
            }
            // Somebody else was faster.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            Err(error) => Err(failed("unmount", error)),
        }
    }

    /// What it has done so far.
    pub fn status(&self) -> Status {
        let filesystem = &self.shared.filesystem;
        let (written_files_pending, written_bytes_pending) = filesystem.ledger.pending();
        Status {
            source: self.shared.source.to_string_lossy().into_owned(),
            mountpoint: self.shared.mountpoint.to_string_lossy().into_owned(),
            serving: *self.shared.workers.lock() > 0,
            requests: filesystem.counters.requests(),
            direct_reads: filesystem.counters.direct_reads.get(),
            read_bytes: filesystem.counters.read_bytes.get(),
            written_bytes: filesystem.counters.written_bytes.get(),
            open_handles: filesystem.handles.count(),
            inodes: filesystem.inodes.count(),
            inodes_with_descriptor: filesystem.inodes.descriptors(),
            written_files_pending,
            written_bytes_pending,
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = self.unmount(true);
    }
}

/// Takes away a mount that does not come to be served, also when making the borrower panics.
struct Detach<'a>(&'a Path);

impl Drop for Detach<'_> {
    fn drop(&mut self) {
        let _ = mounting::unmount(self.0, true);
    }
}

fn failed(attempted: &'static str, error: impl Into<io::Error>) -> Error {
    Error::Failed { attempted, error: error.into() }
}

/// Checks what can be checked before mounting. Returns the two paths, absolute and without symbolic links.
fn check(config: &Config) -> Result<(PathBuf, PathBuf), Error> {
    let source = &config.source;
    let source = fs::canonicalize(source).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::SourceMissing { source: source.clone() },
        io::ErrorKind::NotConnected => Error::MountpointDead { mountpoint: source.clone() },
        _ => Error::SourceUnreadable { source: source.clone(), error },
    })?;
    let mountpoint = &config.mountpoint;
    let mountpoint = fs::canonicalize(mountpoint).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOTCONN) => Error::MountpointDead { mountpoint: mountpoint.clone() },
        Some(libc::ENOENT) => Error::MountpointMissing { mountpoint: mountpoint.clone() },
        _ => Error::NotPermitted { mountpoint: mountpoint.clone(), error },
    })?;
    if mounting::find(&mountpoint, SUBTYPE).map_err(|error| failed("read the list of mounts", error))?.is_some() {
        return Err(match fs::metadata(&mountpoint) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => Error::MountpointDead { mountpoint },
            _ => Error::AlreadyMounted { mountpoint },
        });
    }
    match fs::metadata(&source) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Err(Error::SourceNotADirectory { source }),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => {
            return Err(Error::MountpointDead { mountpoint: source });
        }
        Err(error) => return Err(Error::SourceUnreadable { source, error }),
    }
    if !mountpoint.is_dir() {
        return Err(Error::MountpointNotADirectory { mountpoint });
    }
    if mountpoint != source && mountpoint.starts_with(&source) {
        return Err(Error::MountpointInsideSource { source, mountpoint });
    }
    if !Path::new(mounting::DEVICE).exists() {
        return Err(Error::NoDevice);
    }
    Ok((source, mountpoint))
}

/// As many descriptors, and files as large, as we may.
fn raise_limits() {
    let files = getrlimit(Resource::Nofile);
    let most = fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|text| text.trim().parse::<u64>().ok());
    if let Some(most) = most.filter(|most| files.maximum.is_some_and(|maximum| maximum < *most))
        && setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) }).is_ok()
    {
        // Raised beyond the hard limit, as root may.
    } else {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, maximum: files.maximum });
    }
    // The callers' limits count, and the kernel checks them; ours would only get us killed.
    let sizes = getrlimit(Resource::Fsize);
    let _ = setrlimit(Resource::Fsize, Rlimit { current: sizes.maximum, maximum: sizes.maximum });
}

fn mount(config: &Config, source: &Path, mountpoint: &Path, below: &OwnedFd) -> Result<(OwnedFd, Privilege), Error> {
    let mut flags = MountFlags::empty();
    // What the mount below forbids stays forbidden.
    if let Ok(below) = rustix::fs::fstatvfs(below) {
        for (here, there) in [
            (StatVfsMountFlags::RDONLY, MountFlags::RDONLY),
            (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
            (StatVfsMountFlags::NODEV, MountFlags::NODEV),
            (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        ] {
            if below.f_flag.contains(here) {
                flags |= there;
            }
        }
    }
    let fsname = source.to_string_lossy().into_owned();
    let mut options = Options { fsname, subtype: SUBTYPE.to_owned(), allow_other: true, flags };
    let not_permitted = |error| Error::NotPermitted { mountpoint: config.mountpoint.clone(), error };
    if rustix::process::geteuid().is_root() {
        match mounting::mount(mountpoint, &options) {
            Ok(device) => return Ok((device, Privilege::Root)),
            // Root in name only (a container): try as an ordinary user.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
            Err(error) => return Err(failed("mount", error)),
        }
    }
    options.allow_other = false;
    let opened = fs::File::options().read(true).write(true).open(mounting::DEVICE);
    if let Err(error) = opened.as_ref()
        && error.kind() == io::ErrorKind::PermissionDenied
    {
        return Err(Error::DeviceForbidden);
    }
    match mounting::mount_by_fusermount(mountpoint, &options) {
        Ok(device) => Ok((device, Privilege::User)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Error::NoFusermount),
        Err(error) => Err(not_permitted(error)),
    }
}

fn wish(write: WriteMode) -> Wish {
    // Not among them, on purpose: AUTO_INVAL_DATA (our own writes would drop the cache), EXPLICIT_INVAL_DATA (growth beside us would leave
    // zeros behind the old end), ASYNC_DIO (the kernel then leaves old pages behind a direct write), ATOMIC_O_TRUNC (see `data.rs`), POSIX_LOCKS
    // and FLOCK_LOCKS, EXPORT_SUPPORT (see `lib.rs`), SECURITY_CTX (labels are the business of the file system below).
    let mut capabilities = init::ASYNC_READ
        | init::BIG_WRITES
        | init::DONT_MASK
        | init::HAS_IOCTL_DIR
        | init::DO_READDIRPLUS
        | init::READDIRPLUS_AUTO
        | init::PARALLEL_DIROPS
        | init::POSIX_ACL
        | init::CACHE_SYMLINKS
        | init::HANDLE_KILLPRIV_V2
        | init::SETXATTR_EXT
        | init::CREATE_SUPP_GROUP
        | init::HAS_EXPIRE_ONLY
        | init::HAS_RESEND;
    if write == WriteMode::Back {
        capabilities |= init::WRITEBACK_CACHE;
    }
    Wish { capabilities, readahead_bytes_max: READAHEAD_BYTES_MAX, background_max: BACKGROUND_MAX }
}

#[allow(clippy::too_many_arguments)] // The pieces that `start` has laid out, each used once.
fn serve<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    config: &Config,
    source: PathBuf,
    mountpoint: &Path,
    device: OwnedFd,
    privilege: Privilege,
    root: OwnedFd,
    readable: OwnedFd,
    handles_from: OwnedFd,
    make_borrower: impl FnOnce(MountInfo) -> Result<Arc<Borrower>, E>,
) -> Result<Mount, Error> {
    let own_device = mounting::find(mountpoint, SUBTYPE)
        .map_err(|error| failed("read the list of mounts", error))?
        .ok_or_else(|| failed("find the new mount", io::ErrorKind::NotFound))?;
    let session =
        Session::negotiate(device, wish(config.write)).map_err(|error| failed("negotiate with the kernel", error))?;
    if privilege == Privilege::Root {
        widen_readahead(own_device);
    }
    let borrower = make_borrower(MountInfo { device: own_device }).map_err(|error| Error::Borrower(error.into()))?;

    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let share = (descriptors / 4).saturating_mul(INODE_DESCRIPTOR_QUARTERS);
    let inode_descriptors_max =
        config.inode_descriptors_max.unwrap_or(Config::INODE_DESCRIPTORS_MAX.min(share as usize));
    let found = Found::new(root, stat(&readable).map_err(|error| failed("stat the directory", error))?);
    let handles_from = (privilege == Privilege::Root).then_some(handles_from);
    let filesystem = Passthrough {
        inodes: Inodes::new(found, borrower.clone(), inode_descriptors_max, handles_from),
        handles: Handles::default(),
        borrower,
        ledger: Ledger::default(),
        invalidations: Invalidations::default(),
        sweep: Sweep::default(),
        counters: Counters::default(),
        write_mode: match session.negotiated().capabilities & init::WRITEBACK_CACHE {
            0 => WriteMode::Through,
            _ => WriteMode::Back,
        },
        privilege,
        attr_timeout: config.attr_timeout,
        entry_timeout: config.entry_timeout,
        source: readable,
        own_device,
    };
    let workers = Mutex::new(0);
    let mountpoint = mountpoint.to_owned();
    let shared = Arc::new(Shared { filesystem, source, mountpoint, workers, ended: Condvar::new() });
    start_threads(&shared, &session, config.threads.max(THREADS_MIN), privilege)
        .map_err(|error| failed("start the threads", error))?;
    Ok(Mount { shared })
}

/// By default the kernel reads ahead no more than 128 KiB on any FUSE mount.
fn widen_readahead(device: u64) {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let knob = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    if let Err(error) = fs::write(&knob, (READAHEAD_BYTES_MAX / 1024).to_string()) {
        tracing::info!(%knob, %error, "cannot widen the read-ahead window of the mount: sequential reads will be slower");
    }
}

fn start_threads(shared: &Arc<Shared>, session: &Session, threads: usize, privilege: Privilege) -> io::Result<()> {
    let mut workers = (0..threads).map(|_| session.worker()).collect::<io::Result<Vec<_>>>()?;
    let notifier = session.notifier();
    for (name, work) in [
        ("puma-notify", Box::new(move |shared: &Shared| shared.filesystem.invalidations.deliver(&notifier)) as Work),
        ("puma-sweep", Box::new(|shared: &Shared| shared.filesystem.sweep.run(&shared.filesystem))),
        ("puma-janitor", Box::new(|shared: &Shared| shared.filesystem.ledger.tend(&shared.filesystem.inodes))),
    ] {
        let shared = shared.clone();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _ = crate::system::set_io_flusher();
            work(&shared);
        })?;
    }
    *shared.workers.lock() = threads;
    for index in 0..threads {
        let Some(mut worker) = workers.pop() else { break };
        let of_thread = shared.clone();
        let spawned = thread::Builder::new().name(format!("puma-fuse-{index}")).spawn(move || {
            let shared = of_thread;
            if let Err(error) = prepare_thread(privilege) {
                // Without its own umask and ids a worker would make files as somebody else.
                tracing::error!(%error, "a worker cannot act as its callers, and stops; run as root, or as an ordinary user");
            } else if let Err(error) = worker.serve(&shared.filesystem) {
                tracing::error!(%error, "a worker stops: reading requests from the kernel failed");
            }
            shared.worker_ended();
        });
        if let Err(error) = spawned {
            (index..threads).for_each(|_| shared.worker_ended());
            return Err(error);
        }
    }
    Ok(())
}

type Work = Box<dyn FnOnce(&Shared) + Send>;

impl Shared {
    fn worker_ended(&self) {
        let mut workers = self.workers.lock();
        *workers -= 1;
        if *workers == 0 {
            self.filesystem.ledger.close();
            self.filesystem.sweep.close();
            self.filesystem.invalidations.close();
            self.filesystem.inodes.forget_all();
            self.ended.notify_all();
        }
    }
}
