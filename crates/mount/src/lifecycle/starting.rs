//! Making a mount: the checks before, the mounting, and the first daemon that serves it.

use crate::backing::crossing::{self, Crossing};
use crate::backing::dirty_ranges::DirtyRanges;
use crate::filesystem::Passthrough;
use crate::inode::descriptors::Descriptors;
use crate::inode::handle::Handles;
use crate::inode::purge::Purge;
use crate::inode::revalidation::Revalidations;
use crate::inode::{Found, Inodes, stat};
use crate::kernel::external_changes::ExternalChanges;
use crate::kernel::invalidation::Invalidations;
use crate::kernel::passthrough::Connection;
use crate::kernel::writeback::time_granularity_ns;
use crate::lifecycle::config::{Config, WriteMode};
use crate::lifecycle::error::Error;
use crate::lifecycle::look::{LOOK_LIMIT, look_through};
use crate::lifecycle::running::{Mount, MountInfo, Source};
use crate::lifecycle::status::Counters;
use crate::lifecycle::workers::WORKERS_MAX;
use crate::ops::credentials::{self, Privilege};
use crate::ops::readdirplus::ReaddirplusHints;
use crate::ops::xattr::has_lists;
use crate::system;
use crate::takeover::Keep;
use crate::takeover::channel::{Channel, Held};
use crate::takeover::memory::{Header, Memory};
use crate::takeover::replay::Replays;
use borrower::Borrower;
use fuse::abi::init;
use fuse::mounting::{self, Options};
use fuse::{Errno, Session, Wish};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags, StatVfs, StatVfsMountFlags, open};
use rustix::mount::MountFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The mount's type is `fuse.` and this.
const SUBTYPE: &str = "pumapool";
/// Read-ahead window. Large, because a lender answers many pages for the price of one.
const READAHEAD_BYTES_MAX: u32 = 1 << 20;
/// Requests in the background (read-ahead, writeback) that the kernel sends at once. Many, so that
/// it never holds back those of one user because of another's; what is more than the workers can do
/// waits here, by user.
const BACKGROUND_MAX: u16 = 4096;
/// With fewer threads than this, one slow request blocks all others.
pub(crate) const THREADS_MIN: usize = 2;

/// Whether one of our mounts is there, alive or dead.
///
/// # Errors
/// Fails if the list of mounts cannot be read.
pub fn is_mounted(mountpoint: &Path) -> io::Result<bool> {
    Ok(mounting::find(mountpoint, SUBTYPE)?.is_some())
}

/// Changes the restrictions of one of Puma's mounts, like mount(8) with `-o remount`: `RDONLY`,
/// `NOSUID`, `NODEV`, `NOEXEC`. Flags in neither set stay unchanged.
///
/// # Errors
/// When there is no mount of ours, or the kernel refuses: EBUSY if a file is open for writing and
/// `RDONLY` is to be forbidden.
pub fn remount(mountpoint: &Path, forbids: MountFlags, permits: MountFlags) -> Result<(), Error> {
    let failed = |error: io::Error| failed("remount", error);
    if !is_mounted(mountpoint).map_err(failed)? {
        return Err(failed(io::Error::other(format!("no mount of pumapool is at {}", mountpoint.display()))));
    }
    let now = flags_of(&rustix::fs::statvfs(mountpoint).map_err(|errno| failed(errno.into()))?);
    let flags = (now | forbids) - permits;
    rustix::mount::mount_remount(mountpoint, flags, c"").map_err(|errno| match errno {
        Errno::BUSY => {
            let shown = format!("a file is open for writing (`fuser -vm {}` shows by whom)", mountpoint.display());
            failed(io::Error::other(shown))
        }
        errno => failed(errno.into()),
    })
}

/// The restrictions of a mount.
fn flags_of(found: &StatVfs) -> MountFlags {
    let flags = [
        (StatVfsMountFlags::RDONLY, MountFlags::RDONLY),
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
    ];
    flags.into_iter().filter(|(here, _)| found.f_flag.contains(*here)).map(|(_, there)| there).collect()
}

/// Detaches a mount that no daemon serves any more.
///
/// # Errors
/// Fails if the mount cannot be detached, also if there is none.
pub fn detach(mountpoint: &Path) -> io::Result<()> {
    mounting::unmount(mountpoint, true)
}

impl Mount {
    /// Mounts and serves. `make_borrower` runs when the mount exists, and before the first request
    /// is read.
    pub fn start<E>(
        config: Config,
        make_borrower: impl FnOnce(MountInfo) -> Result<Arc<Borrower>, E>,
    ) -> Result<Mount, Error>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Mount::start_supervised(config, None, make_borrower)
    }

    /// Mounts and serves, with a supervisor at the other end of the channel, so that a successor
    /// can take the mount over ([`Mount::take_over`]).
    pub fn start_supervised<E>(
        config: Config,
        supervisor: Option<Arc<Channel>>,
        make_borrower: impl FnOnce(MountInfo) -> Result<Arc<Borrower>, E>,
    ) -> Result<Mount, Error>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (source, mountpoint) = check(&config)?;
        raise_limits();
        // Opened before mounting, and held from then on: if SOURCE is mounted over itself, this
        // descriptor still leads to the backing directory.
        let unreadable = |errno: Errno| Error::SourceUnreadable { directory: source.clone(), error: errno.into() };
        let root =
            open(&source, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(unreadable)?;
        let readable =
            open(&source, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(unreadable)?;
        // Opening it has triggered its mount, unless this daemon is the one that is asked to mount.
        if rustix::fs::fstatfs(&readable).is_ok_and(|found| found.f_type as u32 == crossing::AUTOFS) {
            return Err(Error::SourceIsAutomount { directory: source });
        }
        let memory = Memory::create().map_err(|error| failed("make the state memory", error))?;
        let keep = Keep::new(Arc::new(memory), supervisor).map_err(|error| failed("start a thread", error))?;

        let (device, privilege) = mount(&config, &source, &mountpoint, &readable)?;
        let detach = Detach(&mountpoint);
        let mount =
            serve(&config, &source, &mountpoint, device, privilege, Source { root, readable }, keep, make_borrower)?;
        look_through(&mountpoint, mount.shared.filesystem.own_device, LOOK_LIMIT)?;
        let _ = std::mem::ManuallyDrop::new(detach); // It is served: from here on it is the mount's to end.
        Ok(mount)
    }
}

/// Detaches a mount that fails to be served, also if creating the borrower panics.
struct Detach<'a>(&'a Path);

impl Drop for Detach<'_> {
    fn drop(&mut self) {
        let _ = mounting::unmount(self.0, true);
    }
}

pub(crate) fn failed(attempted: &'static str, error: impl Into<io::Error>) -> Error {
    Error::Failed { attempted, error: error.into() }
}

/// Checks what can be checked before mounting. Returns the two paths, absolute and without symbolic
/// links.
fn check(config: &Config) -> Result<(PathBuf, PathBuf), Error> {
    let source = &config.source;
    let source = fs::canonicalize(source).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::SourceMissing { directory: source.clone() },
        io::ErrorKind::NotConnected => Error::MountpointDead { mountpoint: source.clone() },
        _ => Error::SourceUnreadable { directory: source.clone(), error },
    })?;
    let mountpoint = &config.mountpoint;
    let mountpoint = fs::canonicalize(mountpoint).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOTCONN) => Error::MountpointDead { mountpoint: mountpoint.clone() },
        Some(libc::ENOENT) => Error::MountpointMissing { mountpoint: mountpoint.clone() },
        _ => Error::NotPermitted { mountpoint: mountpoint.clone(), error },
    })?;
    crossing::check_places(&source, &mountpoint)?;
    if mounting::find(&mountpoint, SUBTYPE).map_err(|error| failed("read the list of mounts", error))?.is_some() {
        return Err(match fs::metadata(&mountpoint) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => Error::MountpointDead { mountpoint },
            _ => Error::AlreadyMounted { mountpoint },
        });
    }
    match fs::metadata(&source) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Err(Error::SourceNotADirectory { directory: source }),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => {
            return Err(Error::MountpointDead { mountpoint: source });
        }
        Err(error) => return Err(Error::SourceUnreadable { directory: source, error }),
    }
    if !mountpoint.is_dir() {
        return Err(Error::MountpointNotADirectory { mountpoint });
    }
    if mountpoint != source && mountpoint.starts_with(&source) {
        return Err(Error::MountpointInsideSource { directory: source, mountpoint });
    }
    if !Path::new(mounting::DEVICE).exists() {
        return Err(Error::NoDevice);
    }
    Ok((source, mountpoint))
}

/// Raises the limits of descriptors and of file sizes as far as permitted.
pub fn raise_limits() {
    let files = getrlimit(Resource::Nofile);
    let most = fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|text| text.trim().parse::<u64>().ok());
    if let Some(most) = most.filter(|most| files.maximum.is_some_and(|maximum| maximum < *most))
        && setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) }).is_ok()
    {
        // Raised beyond the hard limit, as root may.
    } else {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, maximum: files.maximum });
    }
    // The kernel checks the limits of the callers; the daemon's own limit would only kill it. If it
    // cannot be raised, larger files are EFBIG.
    let unlimited = setrlimit(Resource::Fsize, Rlimit { current: None, maximum: None });
    if unlimited.is_err() {
        let sizes = getrlimit(Resource::Fsize);
        let _ = setrlimit(Resource::Fsize, Rlimit { current: sizes.maximum, maximum: sizes.maximum });
    }
    system::survive_file_size_limit();
}

fn mount(config: &Config, source: &Path, mountpoint: &Path, backing: &OwnedFd) -> Result<(OwnedFd, Privilege), Error> {
    let mut flags = config.flags;
    // The restrictions of SOURCE's mount stay in force.
    if let Ok(backing) = rustix::fs::fstatvfs(backing) {
        flags |= flags_of(&backing);
    }
    let fsname = source.to_string_lossy().into_owned();
    let mut options = Options { fsname, subtype: SUBTYPE.to_owned(), allow_other: true, flags };
    let not_permitted = |error| Error::NotPermitted { mountpoint: config.mountpoint.clone(), error };
    if rustix::process::geteuid().is_root() {
        // Root of a user namespace that has no other users is one.
        let privilege = if credentials::can_act_as_others() { Privilege::Root } else { Privilege::User };
        options.allow_other = privilege == Privilege::Root;
        match mounting::mount(mountpoint, &options) {
            Ok(device) => return Ok((device, privilege)),
            // Root without rights (a container): try as an ordinary user.
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

fn wish(config: &Config, pass: bool, backing: &OwnedFd) -> Wish {
    // Deliberately missing: AUTO_INVAL_DATA (own writes would drop the cache), EXPLICIT_INVAL_DATA
    // (external growth would leave zeros behind the old end), ASYNC_DIO (the kernel then leaves old
    // pages behind a direct write), ATOMIC_O_TRUNC (see `ops/data.rs`), POSIX_LOCKS and
    // FLOCK_LOCKS, EXPORT_SUPPORT (see `lib.rs`), SECURITY_CTX (labels are up to the backing file
    // system).
    let mut capabilities = init::ASYNC_READ
        | init::BIG_WRITES
        | init::DONT_MASK
        | init::HAS_IOCTL_DIR
        | init::DO_READDIRPLUS
        | init::READDIRPLUS_AUTO
        | init::PARALLEL_DIROPS
        | init::CACHE_SYMLINKS
        | init::HANDLE_KILLPRIV_V2
        | init::SETXATTR_EXT
        | init::CREATE_SUPP_GROUP
        | init::HAS_EXPIRE_ONLY
        | init::NO_EXPORT_SUPPORT
        | init::HAS_RESEND;
    if config.write == WriteMode::Back {
        capabilities |= init::WRITEBACK_CACHE;
    } else if pass {
        // The kernel has only one of the two.
        capabilities |= init::PASSTHROUGH;
    }
    if config.cross_mounts || has_lists(backing) {
        capabilities |= init::POSIX_ACL;
    }
    if config.idmapped {
        capabilities |= init::ALLOW_IDMAP;
    }
    let time_granularity_ns = if config.write == WriteMode::Back { time_granularity_ns(backing) } else { 1 };
    Wish { capabilities, readahead_bytes_max: READAHEAD_BYTES_MAX, background_max: BACKGROUND_MAX, time_granularity_ns }
}

#[allow(clippy::too_many_arguments)] // The pieces that `start_supervised` has laid out, each used once.
fn serve<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    config: &Config,
    source: &Path,
    mountpoint: &Path,
    device: OwnedFd,
    privilege: Privilege,
    backing: Source,
    keep: Arc<Keep>,
    make_borrower: impl FnOnce(MountInfo) -> Result<Arc<Borrower>, E>,
) -> Result<Mount, Error> {
    let own_device = mounting::find(mountpoint, SUBTYPE)
        .map_err(|error| failed("read the list of mounts", error))?
        .ok_or_else(|| failed("find the new mount", io::ErrorKind::NotFound))?;
    let pass = config.pass && privilege == Privilege::Root;
    let wish = wish(config, pass, &backing.readable);
    let session = Session::negotiate(device, wish).map_err(|error| failed("negotiate with the kernel", error))?;
    if config.idmapped && session.negotiated().capabilities & init::ALLOW_IDMAP == 0 {
        let error =
            io::Error::new(io::ErrorKind::Unsupported, "the kernel has none with FUSE; use Linux 6.12 or newer");
        return Err(failed("allow idmapped mounts", error));
    }
    if privilege == Privilege::Root && config.wide_readahead {
        widen_readahead(own_device);
    }
    let negotiated = session.negotiated();
    let write_mode = match negotiated.capabilities & init::WRITEBACK_CACHE {
        0 => WriteMode::Through,
        _ => WriteMode::Back,
    };
    keep.memory.begin(&Header {
        minor: negotiated.minor,
        capabilities: negotiated.capabilities,
        write_back: write_mode == WriteMode::Back,
        root: privilege == Privilege::Root,
        own_device,
        source,
        mountpoint,
    });
    keep.hold(Held::State, keep.memory.fd());
    keep.hold(Held::Source, backing.readable.as_fd());
    keep.hold(Held::Device(0), session.device().as_fd());
    let borrower = make_borrower(MountInfo { device: own_device }).map_err(|error| Error::Borrower(error.into()))?;

    let found = Found::new(backing.root, stat(&backing.readable).map_err(|error| failed("stat the directory", error))?);
    let handles_from = backing.readable.try_clone().map_err(|error| failed("duplicate a descriptor", error))?;
    let handles_from = (privilege == Privilege::Root).then_some(handles_from);
    let external_changes = ExternalChanges::start(&backing.readable, config, privilege, false)
        .map_err(|error| failed("make an event descriptor", error))?;
    let crossing = Crossing::new(&backing.readable, config.cross_mounts)
        .map_err(|error| failed("look at the mounts in the backing directory", error))?;
    let filesystem = Passthrough {
        inodes: Inodes::new(found, borrower.clone(), keep.clone(), descriptors(config, privilege), handles_from),
        handles: Handles::new(keep.clone()),
        connection: Connection::new(&session, &keep.memory, config.pass),
        keep,
        replays: Replays::default(),
        borrower,
        dirty_ranges: DirtyRanges::new(config),
        invalidations: Invalidations::new(config.threads.max(WORKERS_MAX), &session),
        purge: Purge::default(),
        readdirplus_hints: ReaddirplusHints::default(),
        revalidations: Revalidations::default(),
        external_changes,
        crossing,
        counters: Counters::default(),
        write_mode,
        privilege,
        checks_lists: negotiated.capabilities & init::POSIX_ACL != 0,
        attr_timeout: config.attr_timeout,
        reported_attr_timeout: config.reported_attr_timeout,
        entry_timeout: config.entry_timeout,
        source: backing.readable,
        own_device,
    };
    let (source, mountpoint, threads) = (source.to_owned(), mountpoint.to_owned(), config.threads.max(THREADS_MIN));
    Mount::begin(filesystem, source, mountpoint, &session, threads, BTreeMap::new())
        .map_err(|error| failed("start the threads", error))
}

/// The accounting of the descriptors that this process may have.
pub(crate) fn descriptors(config: &Config, privilege: Privilege) -> Arc<Descriptors> {
    let limit = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    let owner = match privilege {
        Privilege::Root => 0,
        Privilege::User => rustix::process::geteuid().as_raw(),
    };
    let anchors_max = config.inode_descriptors_max.unwrap_or(Config::INODE_DESCRIPTORS_MAX);
    Descriptors::new(limit, config.threads.max(THREADS_MIN), anchors_max, owner)
}

/// By default the kernel reads ahead no more than 128 KiB on any FUSE mount.
fn widen_readahead(device: u64) {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let knob = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    if let Err(error) = fs::write(&knob, (READAHEAD_BYTES_MAX / 1024).to_string()) {
        tracing::info!(%knob, %error, "cannot widen the read-ahead window of the mount: sequential reads will be slower");
    }
}
