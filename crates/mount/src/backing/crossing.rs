//! File systems that are mounted within SOURCE: whether lookups cross into them, and the
//! restrictions of each.
//!
//! By default no lookup crosses into another mount, not even into a bind mount of SOURCE's own file
//! system. The kernel refuses to open it (openat2(2), RESOLVE_NO_XDEV), and such a mount point
//! appears as a closed directory or file (`ops/closed.rs`). So the daemon holds nothing open in it,
//! and never sends a request to a file system that waits for this daemon.
//!
//! With [`crate::Config::cross_mounts`] lookups cross, except into
//! - file systems that check the credentials of the process that opens a file
//!   ([`KERNEL_INTERFACES`]), because these would be the daemon's credentials;
//! - FUSE mounts of other users, whose servers may hang or forge their answers, and mounts of
//!   pumapool, which may lead back here;
//! - a second mount of a file system that is already known by a mount with other flags, because a
//!   node is reached through one mount only.
//!
//! "Read-only" and "no access times" are honoured because files are opened through the mount in
//! which they were found. The kernel applies `nosuid`, `nodev` and `noexec` only at the end of a
//! path, which is Puma's own mount. So restrictions of SOURCE's mount are set at Puma's mount
//! point, too, and those of a mount within SOURCE are applied to the attributes of its files
//! ([`Forbids`]). The kernel reports changes of these flags, and they are followed (`MountTable`).
//!
//! There must never be a node of a mount whose flags are unknown, or a request to a file system
//! that must not be crossed into.

use crate::backing::device::Devices;
use crate::filesystem::Passthrough;
use crate::inode::device_of;
use crate::lifecycle::error::Error;
use fuse::{Errno, Notifier};
use hashbrown::HashMap;
use os::mountinfo::{MountEntry, MountTable};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatVfsMountFlags, Statx, StatxFlags, openat, openat2, statx};
use rustix::mount::MountFlags;
use std::ffi::CStr;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// File systems that are interfaces of the kernel (linux/magic.h). They use or check the
/// credentials of the process that opens a file.
const KERNEL_INTERFACES: [u32; 26] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0xcafe_4a11, // bpf
    0x7363_6673, // securityfs
    0x6573_5543, // fusectl
    0x6265_6570, // configfs
    0x1cd1,      // devpts
    0x1980_0202, // mqueue
    0x4249_4e4d, // binfmt_misc
    0x6165_676c, // pstore
    0xde5e_81e4, // efivarfs
    0xf97c_ff8c, // selinuxfs
    0x4341_5d53, // smackfs
    0x5a3c_69f0, // apparmorfs
    0x6e73_6673, // nsfs
    0x5049_4446, // pidfs
    0x0765_5821, // resctrl
    0x6c6f_6f70, // binderfs
    0x6e66_7364, // nfsd
    0x6759_6969, // rpc_pipefs
    0xabba_1974, // xenfs
    0x23c9_b64e, // spufs
];
/// The type of the file system that mounts others on demand (linux/magic.h).
pub(crate) const AUTOFS: u32 = 0x0187;
/// The type of Puma's own mounts.
const OWN_KIND: &str = "fuse.pumapool";
/// Shortest time between two log lines about mount points that were not crossed. Users can cause
/// any number of these events.
const LOG_PERIOD: Duration = Duration::from_secs(60);
/// Time between two reads of the mount table, which may be long and change often.
const LOOK_PERIOD: Duration = Duration::from_millis(100);
/// The flags that the kernel applies only at Puma's own mount point.
const OWN_FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// The type of the file system that a descriptor is open in (linux/magic.h).
fn magic(fd: impl AsFd) -> Option<u32> {
    rustix::fs::fstatfs(fd).ok().map(|found| found.f_type as u32)
}

/// The id of the mount that a descriptor is open in (`stx_mnt_id`, Linux 5.8).
fn mount_id(fd: impl AsFd) -> Result<u64, Errno> {
    Ok(statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::MNT_ID)?.stx_mnt_id)
}

/// Restrictions of a mount within SOURCE, which are applied to the attributes of its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forbids(u8);

impl Forbids {
    const SUID: u8 = 1;
    const DEV: u8 = 2;
    const EXEC: u8 = 4;

    pub(crate) fn of(flags: MountFlags) -> Forbids {
        let bit = |flag, bit| if flags.contains(flag) { bit } else { 0 };
        Forbids(
            bit(MountFlags::NOSUID, Forbids::SUID)
                | bit(MountFlags::NODEV, Forbids::DEV)
                | bit(MountFlags::NOEXEC, Forbids::EXEC),
        )
    }

    pub(crate) fn from_bits(bits: u8) -> Forbids {
        Forbids(bits)
    }

    pub(crate) fn bits(self) -> u8 {
        self.0
    }

    /// Whether set-user-ID bits and file capabilities have no effect.
    pub(crate) fn suid(self) -> bool {
        self.0 & Forbids::SUID != 0
    }

    /// Whether device nodes cannot be opened.
    pub(crate) fn dev(self) -> bool {
        self.0 & Forbids::DEV != 0
    }

    /// The attributes of a file as the mount shows them: a regular file without the forbidden bits,
    /// and a device node without its number, so that it cannot be opened (ENXIO).
    pub(crate) fn shown(self, mut now: Statx) -> Statx {
        const FORMAT: u16 = 0o170_000;
        if self.0 == 0 {
            return now;
        }
        let kind = now.stx_mode & FORMAT;
        if kind == 0o100_000 {
            let set_id = if self.suid() { 0o6000 } else { 0 };
            let execute = if self.0 & Forbids::EXEC != 0 { 0o111 } else { 0 };
            now.stx_mode &= !(set_id | execute);
        } else if matches!(kind, 0o020_000 | 0o060_000) && self.dev() {
            (now.stx_rdev_major, now.stx_rdev_minor) = (0, 0);
        }
        now
    }
}

/// A mount within SOURCE that a lookup has found.
#[derive(Clone, Copy)]
struct Met {
    device: u64,
    flags: MountFlags,
    is_crossed: bool,
}

/// The mounts within SOURCE, with [`crate::Config::cross_mounts`].
struct Mounts {
    table: MountTable,
    entries: HashMap<u64, MountEntry>,
    /// The mounts by their ids; those that are gone are removed. So there are at most as many as
    /// mounts exist.
    met: HashMap<u64, Met>,
}

impl Mounts {
    fn new() -> io::Result<Mounts> {
        let table = MountTable::open()?;
        let entries = Mounts::entries(&table)?;
        Ok(Mounts { table, entries, met: HashMap::new() })
    }

    fn entries(table: &MountTable) -> io::Result<HashMap<u64, MountEntry>> {
        Ok(table.read()?.into_iter().map(|entry| (entry.id, entry)).collect())
    }

    /// Reads the table again if it has changed. Returns whether any restriction has changed.
    fn refresh(&mut self, devices: &Devices) -> bool {
        if !self.table.has_changed() {
            return false;
        }
        // If the table cannot be read, it counts as empty, and nothing is crossed.
        self.entries = Mounts::entries(&self.table).unwrap_or_default();
        let entries = &self.entries;
        let mut has_changed = false;
        self.met.retain(|id, met| {
            let now = entries.get(id).filter(|entry| entry.device == met.device);
            if let Some(now) = now {
                has_changed |= met.is_crossed && now.flags != met.flags;
                met.flags = now.flags;
            }
            now.is_some()
        });
        if has_changed {
            for device in self.met.values().map(|met| met.device) {
                self.restrict(device, devices);
            }
        }
        has_changed
    }

    /// A restriction of any mount of a file system applies to all of its files.
    fn restrict(&self, device: u64, devices: &Devices) {
        let all = self.met.values().filter(|met| met.is_crossed && met.device == device);
        devices.get(device).set_forbids(Forbids::of(all.map(|met| met.flags).collect()));
    }

    /// Whether a mount may be crossed into. `fd` is open in it.
    fn is_crossed(&mut self, id: u64, fd: BorrowedFd<'_>, source: (u64, MountFlags), devices: &Devices) -> bool {
        if let Some(met) = self.met.get(&id) {
            return met.is_crossed;
        }
        let Some(entry) = self.entries.get(&id) else { return false };
        let (device, flags) = (entry.device, entry.flags);
        let is_crossed = may_be_asked(entry)
            && magic(fd).is_some_and(|kind| kind != AUTOFS && !KERNEL_INTERFACES.contains(&kind))
            && (device != source.0 || flags == source.1)
            && self.met.values().all(|met| !met.is_crossed || met.device != device || met.flags == flags);
        self.met.insert(id, Met { device, flags, is_crossed });
        // For SOURCE's own file system the flags are set at the mount point.
        if is_crossed && device != source.0 {
            self.restrict(device, devices);
        }
        is_crossed
    }
}

/// Whether requests may be sent to a file system: not to a FUSE mount of another user, and not to a
/// mount of pumapool.
fn may_be_asked(entry: &MountEntry) -> bool {
    let is_own_user = entry.user.is_none_or(|user| user == rustix::process::geteuid().as_raw());
    entry.kind != OWN_KIND && is_own_user
}

/// The handling of mounts within SOURCE.
pub(crate) struct Crossing {
    /// The mount that SOURCE lies in.
    source_mount: u64,
    source_device: u64,
    mounts: Option<Mutex<Mounts>>,
    last_logged: Mutex<Option<Instant>>,
    wake: OwnedFd,
    closing: AtomicBool,
}

impl Crossing {
    /// `source` is SOURCE, open.
    pub(crate) fn new(source: impl AsFd, crosses: bool) -> io::Result<Crossing> {
        let source_device = device_of(&crate::inode::stat(&source)?);
        Ok(Crossing {
            source_mount: mount_id(source)?,
            source_device,
            mounts: crosses.then(Mounts::new).transpose()?.map(Mutex::new),
            last_logged: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            closing: AtomicBool::new(false),
        })
    }

    /// Whether mounts in SOURCE are crossed into.
    pub(crate) fn is_on(&self) -> bool {
        self.mounts.is_some()
    }

    /// Opens a name with O_PATH.
    ///
    /// # Errors
    /// EXDEV if the name is a mount point that must not be crossed.
    pub(crate) fn open_path(&self, parent: impl AsFd, name: &CStr) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if self.mounts.is_none() {
            match openat2(&parent, name, flags, Mode::empty(), ResolveFlags::NO_XDEV) {
                // Containers forbid the call with either error. The check of the result does not
                // need the call.
                Err(Errno::NOSYS | Errno::PERM) => {}
                opened => return opened,
            }
        }
        openat(parent, name, flags, Mode::empty())
    }

    /// Checks whether a file that was found in a mount may be shown; if not, the result is EXDEV.
    pub(crate) fn check(&self, fd: impl AsFd, found: &Statx, devices: &Devices) -> Result<(), Errno> {
        if found.stx_mnt_id == self.source_mount {
            return Ok(());
        }
        let Some(mounts) = &self.mounts else { return Err(Errno::XDEV) };
        let mut mounts = mounts.lock();
        mounts.refresh(devices);
        let source = mounts.entries.get(&self.source_mount).map_or(MountFlags::empty(), |entry| entry.flags);
        match mounts.is_crossed(found.stx_mnt_id, fd.as_fd(), (self.source_device, source), devices) {
            true => Ok(()),
            false => Err(Errno::XDEV),
        }
    }

    /// Logs that a lookup has met a mount point that is not crossed.
    pub(crate) fn log(&self, what: &Path) {
        let mut last_logged = self.last_logged.lock();
        if last_logged.is_some_and(|then| then.elapsed() < LOG_PERIOD) {
            return;
        }
        *last_logged = Some(Instant::now());
        let instead = match self.mounts {
            None => "mount with --cross-mounts to show it",
            Some(_) => "it is one of those that --cross-mounts leaves out: mount it elsewhere, too, and use it there",
        };
        tracing::warn!("{} is a mount point, and appears empty: {instead}", what.display());
    }

    /// Ends [`Crossing::follow`].
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The work of a thread: follows the restrictions of mounts. Returns after [`Crossing::close`].
    pub(crate) fn follow(&self, filesystem: &Passthrough, notifier: &Notifier) {
        let table = match MountTable::open() {
            Ok(table) => table,
            Err(error) => {
                tracing::warn!(%error, "cannot read the mount table: a later nosuid, nodev or noexec of SOURCE is not followed");
                return;
            }
        };
        while !self.closing.load(Ordering::Acquire) {
            table.has_changed(); // What comes from here on is reported again.
            self.forbid_as_source(&table, filesystem);
            if let Some(mounts) = &self.mounts
                && mounts.lock().refresh(filesystem.inodes.devices())
            {
                for node in filesystem.inodes.ids() {
                    // A negative offset drops only the attributes. On any error, the kernel does
                    // not know the inode, or the mount is gone.
                    let _ = notifier.inval_inode(node, -1, 0);
                }
            }
            let mut fds = [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&table, PollFlags::PRI)];
            while poll(&mut fds, None) == Err(Errno::INTR) {}
            if !self.closing.load(Ordering::Acquire) {
                std::thread::sleep(LOOK_PERIOD);
            }
        }
    }

    /// Sets the present restrictions of SOURCE's mount wherever this file system is mounted.
    fn forbid_as_source(&self, table: &MountTable, filesystem: &Passthrough) {
        let Ok(source) = rustix::fs::fstatvfs(&filesystem.source) else { return };
        let flags = [
            (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
            (StatVfsMountFlags::NODEV, MountFlags::NODEV),
            (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        ];
        let flags: MountFlags =
            flags.into_iter().filter(|(there, _)| source.f_flag.contains(*there)).map(|(_, here)| here).collect();
        if flags.is_empty() {
            return;
        }
        for entry in table.read().unwrap_or_default() {
            if entry.device == filesystem.own_device && !entry.flags.contains(flags) {
                match forbid(&entry.mountpoint, entry.device, flags) {
                    Ok(()) => {
                        tracing::info!("{} has the restrictions of SOURCE: {flags:?}", entry.mountpoint.display())
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot set the restrictions of SOURCE at {}", entry.mountpoint.display());
                    }
                }
            }
        }
    }
}

/// Sets `flags`, of [`OWN_FLAGS`], at a mount point of the file system `device`. Flags that are
/// already set stay set. Needs CAP_SYS_ADMIN.
fn forbid(mountpoint: &Path, device: u64, flags: MountFlags) -> io::Result<()> {
    let at = rustix::fs::open(mountpoint, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    // This asks only for the number of the device, which sends no request to this daemon.
    let found = statx(&at, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    if device_of(&found) != device {
        return Err(io::ErrorKind::NotFound.into()); // It was covered meanwhile.
    }
    crate::system::forbid_at_mount(&at, flags & OWN_FLAGS)?;
    Ok(())
}

/// Directories that the machine or this daemon needs. A daemon that mounts over them waits for
/// itself.
const SYSTEM_FOLDERS: [&str; 6] = ["/", "/proc", "/sys", "/dev", "/run", "/boot"];

/// Checks that neither SOURCE nor the mountpoint is an interface of the kernel, and that the
/// mountpoint is not a directory of the system. Both paths are absolute and without symbolic links.
/// Of a FUSE file system only the type is read.
pub(crate) fn check_places(source: &Path, mountpoint: &Path) -> Result<(), Error> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let is_interface = |path: &Path| {
        let kind = rustix::fs::open(path, flags, Mode::empty()).ok().and_then(magic);
        kind.is_some_and(|kind| KERNEL_INTERFACES.contains(&kind))
    };
    if is_interface(source) {
        return Err(Error::SourceIsKernelInterface { directory: source.to_owned() });
    }
    if SYSTEM_FOLDERS.iter().any(|folder| mountpoint == Path::new(folder)) || is_interface(mountpoint) {
        return Err(Error::MountpointOfSystem { mountpoint: mountpoint.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_mount_forbids_is_not_shown() {
        let file = tempfile::tempfile().unwrap();
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o6755)).unwrap();
        let mut now = crate::inode::stat(&file).unwrap();
        let mode = |flags, now| Forbids::of(flags).shown(now).stx_mode & 0o7777;
        assert_eq!(mode(MountFlags::empty(), now), 0o6755);
        assert_eq!(mode(MountFlags::RDONLY | MountFlags::NODEV, now), 0o6755);
        assert_eq!(mode(MountFlags::NOSUID, now), 0o755);
        assert_eq!(mode(MountFlags::NOEXEC, now), 0o6644);
        // For a directory these bits have other meanings.
        now.stx_mode = 0o042_755;
        assert_eq!(mode(MountFlags::NOSUID | MountFlags::NOEXEC, now), 0o2755);
        (now.stx_mode, now.stx_rdev_major, now.stx_rdev_minor) = (0o020_666, 1, 3);
        assert_eq!(Forbids::of(MountFlags::NOSUID).shown(now).stx_rdev_major, 1);
        let shown = Forbids::of(MountFlags::NODEV).shown(now);
        assert_eq!((shown.stx_rdev_major, shown.stx_rdev_minor), (0, 0));
    }

    #[test]
    fn interfaces_of_the_kernel_are_not_files() {
        let folder = tempfile::tempdir().unwrap();
        assert!(check_places(folder.path(), folder.path()).is_ok());
        let refused = |source: &Path, mountpoint: &Path| check_places(source, mountpoint).unwrap_err().to_string();
        for path in ["/proc", "/proc/self", "/sys"].map(Path::new) {
            assert!(refused(path, folder.path()).contains("interface of the kernel"));
            assert!(refused(folder.path(), path).contains("the system"));
        }
        assert!(refused(Path::new("/boot"), Path::new("/boot")).contains("the system"));
    }
}
