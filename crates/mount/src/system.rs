//! System calls that the `rustix` crate does not wrap, and paths that name open files.

use fuse::Errno;
use parking_lot::Mutex;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::mount::MountFlags;
use std::cell::Cell;
use std::ffi::CStr;
use std::io::Write;
use std::sync::OnceLock;

/// Largest size of a file handle in bytes (the kernel's MAX_HANDLE_SZ).
const HANDLE_BYTES_MAX: usize = 128;

fn check(result: libc::c_long) -> Result<libc::c_long, Errno> {
    if result < 0 { Err(last_error()) } else { Ok(result) }
}

fn last_error() -> Errno {
    std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

/// The errno of an I/O error; EIO for one that has none.
pub(crate) fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

thread_local! {
    /// Whether the working directory of this thread is `/proc/self/fd`.
    static STANDS_AMONG_DESCRIPTORS: Cell<bool> = const { Cell::new(false) };
}

/// Makes `/proc/self/fd` the working directory of this thread alone. So [`ProcPath`] still works in
/// this thread after something else was mounted over `/proc`. The directory is opened once for all
/// threads.
pub(crate) fn stand_among_descriptors() -> Result<(), Errno> {
    static DESCRIPTORS: OnceLock<OwnedFd> = OnceLock::new();
    if DESCRIPTORS.get().is_none() {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let _ = DESCRIPTORS.set(rustix::fs::open("/proc/self/fd", flags, Mode::empty())?);
    }
    unshare_fs()?;
    rustix::process::fchdir(DESCRIPTORS.get().ok_or(Errno::NOENT)?)?;
    STANDS_AMONG_DESCRIPTORS.set(true);
    Ok(())
}

/// `/proc/self/fd/N`: a path to the open file of a descriptor, also for O_PATH descriptors,
/// symbolic links and deleted files. Only the thread that made the path may use it, because the
/// path is relative (`N` alone) after [`stand_among_descriptors`].
pub(crate) struct ProcPath {
    bytes: [u8; 32],
}

impl ProcPath {
    pub(crate) fn new(fd: impl AsFd) -> ProcPath {
        let mut bytes = [0; 32];
        let folder = if STANDS_AMONG_DESCRIPTORS.get() { "" } else { "/proc/self/fd/" };
        // Fits: 14 bytes of prefix, at most 10 digits, and the NUL that is there already.
        let _ = write!(&mut bytes[..31], "{folder}{}", fd.as_fd().as_raw_fd());
        ProcPath { bytes }
    }

    pub(crate) fn path(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"/proc/self/fd/-1")
    }
}

/// A file handle: names a file for as long as the file exists, without keeping it open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileHandle {
    kind: i32,
    bytes: Box<[u8]>,
}

#[repr(C)]
struct RawHandle {
    len: u32,
    kind: i32,
    bytes: [u8; HANDLE_BYTES_MAX],
}

impl FileHandle {
    /// The handle of the file that `fd` is open on, and the id of its mount.
    pub(crate) fn of(fd: impl AsFd) -> Result<(FileHandle, i32), Errno> {
        let mut raw = RawHandle { len: HANDLE_BYTES_MAX as u32, kind: 0, bytes: [0; HANDLE_BYTES_MAX] };
        let mut mount = 0i32;
        // SAFETY: `raw` begins as the kernel's struct file_handle and has room for the `len` bytes
        // it announces; the path is a NUL-terminated string and `mount` is writable.
        check(unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                fd.as_fd().as_raw_fd(),
                c"".as_ptr(),
                &raw mut raw,
                &raw mut mount,
                libc::AT_EMPTY_PATH,
            )
        })?;
        let len = (raw.len as usize).min(HANDLE_BYTES_MAX);
        Ok((FileHandle { kind: raw.kind, bytes: raw.bytes[..len].into() }, mount))
    }

    /// Opens the file with O_PATH. `mount` is any descriptor (not O_PATH) on its mount. Needs
    /// CAP_DAC_READ_SEARCH.
    pub(crate) fn open(&self, mount: impl AsFd) -> Result<OwnedFd, Errno> {
        let mut raw = RawHandle { len: self.bytes.len() as u32, kind: self.kind, bytes: [0; HANDLE_BYTES_MAX] };
        raw.bytes[..self.bytes.len()].copy_from_slice(&self.bytes);
        // SAFETY: `raw` is a complete struct file_handle that outlives the call.
        let fd = check(unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                mount.as_fd().as_raw_fd(),
                &raw mut raw,
                libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC,
            )
        })?;
        // SAFETY: the kernel just returned this descriptor and nobody else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }

    /// Restores a handle that was recorded by its parts.
    pub(crate) fn from_parts(kind: i32, bytes: &[u8]) -> FileHandle {
        FileHandle { kind, bytes: bytes[..bytes.len().min(HANDLE_BYTES_MAX)].into() }
    }

    /// The parts of the handle, to be recorded.
    pub(crate) fn parts(&self) -> (i32, &[u8]) {
        (self.kind, &self.bytes)
    }

    /// 64 bits that differ between handles (FNV-1a), the same in every run.
    pub(crate) fn hash(&self) -> u64 {
        FileHandle::hash_of(self.kind, &self.bytes)
    }

    /// The same hash as [`FileHandle::hash`], of a handle in parts.
    pub(crate) fn hash_of(kind: i32, bytes: &[u8]) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for byte in kind.to_ne_bytes().iter().chain(bytes) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        hash
    }
}

/// A queue of fanotify(7) events.
pub(crate) struct Fanotify {
    queue: OwnedFd,
}

impl Fanotify {
    /// Creates a queue whose events name files by their handles, and the threads that caused them.
    /// Needs CAP_SYS_ADMIN.
    pub(crate) fn new() -> Result<Fanotify, Errno> {
        let kind = libc::FAN_CLASS_NOTIF | libc::FAN_REPORT_FID | libc::FAN_REPORT_TID | libc::FAN_UNLIMITED_MARKS;
        let flags = kind | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK;
        // SAFETY: no memory is passed.
        let fd = check(unsafe { libc::fanotify_init(flags, libc::O_RDONLY as libc::c_uint) }.into())?;
        // SAFETY: the kernel just returned this descriptor and nobody else owns it.
        Ok(Fanotify { queue: unsafe { OwnedFd::from_raw_fd(fd as i32) } })
    }

    /// Requests these events for an inode.
    pub(crate) fn mark(&self, path: &CStr, events: u64) -> Result<(), Errno> {
        self.change(libc::FAN_MARK_ADD, path, events)
    }

    /// Ends these events for an inode.
    pub(crate) fn unmark(&self, path: &CStr, events: u64) -> Result<(), Errno> {
        self.change(libc::FAN_MARK_REMOVE, path, events)
    }

    fn change(&self, how: libc::c_uint, path: &CStr, events: u64) -> Result<(), Errno> {
        // SAFETY: the path is a NUL-terminated string, and the kernel keeps nothing of it.
        let result = unsafe { libc::fanotify_mark(self.queue.as_raw_fd(), how, events, libc::AT_FDCWD, path.as_ptr()) };
        check(result.into()).map(|_| ())
    }
}

/// Whether any process has a file open or mapped for writing. Returns true if this is unknown.
pub(crate) fn is_open_for_writing(path: &CStr) -> bool {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    !rustix::fs::open(path, flags, Mode::empty()).is_ok_and(|file| nobody_else_writes(&file))
}

/// Whether no other descriptor or mapping of a file is for writing. Returns false if this is
/// unknown. `fd` is open for reading only.
pub(crate) fn nobody_else_writes(fd: impl AsFd) -> bool {
    is_leased(fd.as_fd(), libc::F_RDLCK)
}

/// Whether a file has no other descriptor and no mapping. Returns false if this is unknown.
pub(crate) fn nobody_else_has_open(fd: impl AsFd) -> bool {
    is_leased(fd.as_fd(), libc::F_WRLCK)
}

/// Locked while this process has a lease of its own.
static OWN_LEASE: Mutex<()> = Mutex::new(());

/// Opens a file without waiting for a lease of another process. If there is one, the kernel
/// notifies its holder, and the result is EAGAIN. The descriptor is in blocking mode.
pub(crate) fn open_at_once(path: &CStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    let open = || rustix::fs::open(path, flags | OFlags::NONBLOCK, Mode::empty());
    let fd = match open() {
        Err(Errno::AGAIN) => {
            // It may have been a lease of this process, which lasts some microseconds.
            let _no_lease = OWN_LEASE.lock();
            open()
        }
        opened => opened,
    }?;
    rustix::io::ioctl_fionbio(&fd, false)?;
    Ok(fd)
}

/// Whether the kernel grants a lease, which it does only if there is no conflicting open
/// (fs/locks.c, check_conflicting_open). The lease is returned at once, so a process that opens the
/// file meanwhile waits some microseconds.
fn is_leased(file: BorrowedFd<'_>, kind: libc::c_int) -> bool {
    // The signal for a process that waits for the lease: one that is ignored.
    const F_SETSIG: libc::c_int = 10;
    // A lease on another user's file needs CAP_LEASE.
    let Ok(owner) = rustix::fs::fstat(file).map(|now| now.st_uid) else { return false };
    let own = rustix::process::geteuid().as_raw();
    let _lease = OWN_LEASE.lock();
    if own != owner {
        set_thread_fsuid(owner);
    }
    // SAFETY: no memory is passed.
    let is_leased = unsafe {
        let file = file.as_raw_fd();
        libc::fcntl(file, F_SETSIG, libc::SIGURG) == 0
            && libc::fcntl(file, libc::F_SETLEASE, kind) == 0
            && libc::fcntl(file, libc::F_SETLEASE, libc::F_UNLCK) == 0
    };
    if own != owner {
        set_thread_fsuid(own);
    }
    is_leased
}

impl AsFd for Fanotify {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

/// Pages of a range of a file that the page cache holds.
pub(crate) struct Cached {
    pub pages: u64,
    /// Number of these pages that are dirty.
    #[cfg(test)]
    pub dirty_pages: u64,
}

/// Counts the pages that the page cache holds of bytes `start..end` of a file. Needs Linux 6.5, and
/// the right to write the file.
pub(crate) fn cached(fd: impl AsFd, start: u64, end: u64) -> Result<Cached, Errno> {
    const CACHESTAT: i64 = 451;
    let (range, mut found) = ([start, end - start], [0u64; 5]);
    // SAFETY: the kernel reads two numbers, and writes five (uapi/linux/mman.h, struct cachestat).
    let told = unsafe { libc::syscall(CACHESTAT, fd.as_fd().as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0u32) };
    check(told)?;
    Ok(Cached {
        pages: found[0],
        #[cfg(test)]
        dirty_pages: found[1],
    })
}

/// Makes a write beyond RLIMIT_FSIZE fail instead of killing the process.
pub(crate) fn survive_file_size_limit() {
    // SAFETY: a signal that is ignored runs nothing.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Sets those of `NOSUID`, `NODEV` and `NOEXEC` that are in `flags` at a mount. `fd` is open on the
/// root of the mount. Needs CAP_SYS_ADMIN.
pub(crate) fn forbid_at_mount(fd: impl AsFd, flags: MountFlags) -> Result<(), Errno> {
    let attributes = [
        (MountFlags::NOSUID, libc::MOUNT_ATTR_NOSUID),
        (MountFlags::NODEV, libc::MOUNT_ATTR_NODEV),
        (MountFlags::NOEXEC, libc::MOUNT_ATTR_NOEXEC),
    ];
    let set = attributes.into_iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, attribute)| attribute);
    // struct mount_attr of linux/mount.h: to set, to clear, propagation, a user namespace.
    let change: [u64; 4] = [set.sum(), 0, 0, 0];
    // SAFETY: the path is a NUL-terminated string, and `change` has the length that is passed; the
    // kernel only reads both.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            change.as_ptr(),
            size_of_val(&change),
        )
    })
    .map(|_| ())
}

/// Tells the kernel that this thread, and each thread that it starts, serves writeback. Then its
/// allocations do not wait for writeback. Needs CAP_SYS_RESOURCE.
pub(crate) fn set_io_flusher() -> Result<(), Errno> {
    const PR_SET_IO_FLUSHER: i32 = 57;
    // SAFETY: no memory is passed.
    check(unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) }.into()).map(|_| ())
}

/// The kernel's id of this thread.
pub(crate) fn thread_id() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Makes SIGUSR1 only interrupt blocking system calls. (A handler with SA_RESTART, as crates
/// install it, would not.)
pub(crate) fn make_usr1_interrupt() -> Result<(), Errno> {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: an all-zero sigaction is a valid one; the handler does nothing, hence nothing that a
    // handler may not do.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut())
    };
    check(result.into()).map(|_| ())
}

/// Interrupts a thread of this process, after [`make_usr1_interrupt`].
pub(crate) fn interrupt_thread(id: i32) {
    // SAFETY: no memory is passed. A thread that has ended is no thread of ours any more: ESRCH.
    unsafe { libc::syscall(libc::SYS_tgkill, rustix::process::getpid().as_raw_nonzero().get(), id, libc::SIGUSR1) };
}

/// Gives this thread a umask and a working directory of its own.
pub(crate) fn unshare_fs() -> Result<(), Errno> {
    // SAFETY: no memory is passed; only this thread's file-system attributes are concerned.
    check(unsafe { libc::unshare(libc::CLONE_FS) }.into()).map(|_| ())
}

/// Keeps the capabilities of this thread as they are when its ids change.
pub(crate) fn keep_capabilities() -> Result<(), Errno> {
    const PR_SET_SECUREBITS: i32 = 28;
    const SECBIT_NO_SETUID_FIXUP: u64 = 1 << 2;
    // SAFETY: no memory is passed.
    check(unsafe { libc::prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0) }.into()).map(|_| ())
}

/// Sets the supplementary groups of this thread alone (the C library's setgroups would set those of
/// all).
pub(crate) fn set_thread_groups(groups: &[u32]) -> Result<(), Errno> {
    // SAFETY: pointer and length describe `groups`.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) }).map(|_| ())
}

/// Sets the user id that this thread's file accesses are made with.
pub(crate) fn set_thread_fsuid(uid: u32) {
    // SAFETY: no memory is passed. The call reports no errors; with CAP_SETUID it has none.
    unsafe { libc::syscall(libc::SYS_setfsuid, uid) };
}

/// Sets the group id that this thread's file accesses are made with.
pub(crate) fn set_thread_fsgid(gid: u32) {
    // SAFETY: as for `set_thread_fsuid`.
    unsafe { libc::syscall(libc::SYS_setfsgid, gid) };
}

/// An ioctl that reads and writes at most `data.len()` bytes, which `data` must have room for.
///
/// The callers pass only requests whose argument is a structure no longer than `data` without
/// pointers in it.
pub(crate) fn ioctl_on_bytes(fd: BorrowedFd<'_>, request: u32, data: &mut [u8; 64]) -> Result<i32, Errno> {
    // SAFETY: the size of the argument is encoded in the request, checked here to fit, and the
    // request has no inner pointers.
    let result = unsafe {
        if ((request >> 16) & 0x3fff) as usize > data.len() {
            return Err(Errno::NOTTY);
        }
        libc::ioctl(fd.as_raw_fd(), request.into(), data.as_mut_ptr())
    };
    check(result.into()).map(|value| value as i32)
}

/// Makes `len_bytes` of a file, from `to_start`, share the blocks of another file, from
/// `from_start`.
///
/// # Errors
/// EOPNOTSUPP if the file system cannot share blocks; EINVAL if the bytes are not whole blocks.
pub(crate) fn share_blocks(
    from: impl AsFd,
    from_start: u64,
    len_bytes: u64,
    to: impl AsFd,
    to_start: u64,
) -> Result<(), Errno> {
    const FICLONERANGE: u32 = 0x4020_940d;
    let mut range = [0u8; 64];
    let fields = [from.as_fd().as_raw_fd() as u64, from_start, len_bytes, to_start];
    for (place, field) in range.chunks_exact_mut(8).zip(fields) {
        place.copy_from_slice(&field.to_ne_bytes());
    }
    ioctl_on_bytes(to.as_fd(), FICLONERANGE, &mut range).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_distinguish_files() {
        let directory = tempfile::tempdir().unwrap();
        let one = std::fs::File::create(directory.path().join("one")).unwrap();
        let two = std::fs::File::create(directory.path().join("two")).unwrap();
        match (FileHandle::of(&one), FileHandle::of(&two)) {
            (Ok((one_handle, _)), Ok((two_handle, _))) => {
                assert_eq!(one_handle, FileHandle::of(&one).unwrap().0);
                assert_ne!(one_handle, two_handle);
                assert_ne!(one_handle.hash(), two_handle.hash());
            }
            _ => println!("SKIPPED handles_tell_files_apart: no file handles in the temporary directory's file system"),
        }
    }

    #[test]
    fn a_file_open_for_writing_is_detected() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        std::fs::write(&path, b"a").unwrap();
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        let _reader = std::fs::File::open(&path).unwrap();
        assert!(!is_open_for_writing(&name));
        let writer = std::fs::File::options().write(true).open(&path).unwrap();
        assert!(is_open_for_writing(&name));
        drop(writer);
        assert!(!is_open_for_writing(&name));
        // No lease is left: the file can be opened at once.
        assert!(rustix::fs::open(&*name, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()).is_ok());
        assert!(is_open_for_writing(c"/nowhere"));
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(1000), None).unwrap();
            assert!(!is_open_for_writing(&name));
        }
    }

    #[test]
    fn proc_paths_reach_deleted_files() {
        let file = tempfile::tempfile().unwrap();
        let path = ProcPath::new(&file);
        assert!(std::fs::metadata(path.path().to_str().unwrap()).is_ok());
    }
}
