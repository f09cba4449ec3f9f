//! Properties that programs rely on, besides bytes and names, through a real mount: link counts,
//! access and change times, file handles, idmapped mounts. docs/user/posix.md lists what the kernel
//! leaves no choice about.

mod support;

use rustix::fs::{AtFlags, CWD, StatxFlags, Timespec, Timestamps, UTIME_OMIT, statx, utimensat};
use rustix::mount::{OpenTreeFlags, open_tree};
use std::fs;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use support::*;
use testbed::Done;

/// Attributes that are answered between the removal of a name and the kernel's own count of it must
/// not have the kernel count that name twice: it would soon believe that no name is left, and
/// refuse to link the file.
#[test]
fn a_name_that_is_removed_is_counted_once() {
    if !can_mount("a_name_that_is_removed_is_counted_once") {
        return;
    }
    let rounds = tries(1000);
    let m = Mounted::with(|config| config.attr_timeout = Duration::ZERO);
    fs::write(m.path("a"), b"x").unwrap();
    fs::hard_link(m.path("a"), m.path("b")).unwrap();
    let file = fs::File::open(m.path("a")).unwrap();
    let believed = || {
        let found = statx(&file, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::NLINK);
        found.unwrap().stx_nlink
    };
    let done = AtomicBool::new(false);
    let too_few = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                file.metadata().unwrap();
            }
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                fs::metadata(m.path("b")).unwrap();
            }
        });
        let _done = Done(&done);
        let too_few = (0..rounds).filter(|round| {
            fs::hard_link(m.path("a"), m.path("c")).unwrap();
            if round % 4 == 0 {
                fs::write(m.path("d"), b"").unwrap();
                fs::rename(m.path("d"), m.path("c")).unwrap();
            } else {
                fs::remove_file(m.path("c")).unwrap();
            }
            let too_few = believed() < 2;
            let _ = fs::remove_file(m.path("c"));
            too_few
        });
        too_few.count()
    });
    assert_eq!(too_few, 0, "of {rounds}");
    assert_eq!(file.metadata().unwrap().nlink(), 2);
    fs::remove_file(m.path("b")).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 1);
    fs::hard_link(m.path("a"), m.path("b")).unwrap();
    assert_eq!(fs::metadata(m.path("b")).unwrap().nlink(), 2);
}

const DAY_SECONDS: i64 = 24 * 60 * 60;

fn now_seconds() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64
}

/// Sets the access time to twelve days ago.
fn age(path: &Path) {
    let last_access = Timespec { tv_sec: now_seconds() - 12 * DAY_SECONDS, tv_nsec: 0 };
    let last_modification = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    utimensat(CWD, path, &Timestamps { last_access, last_modification }, AtFlags::empty()).unwrap();
}

fn is_recent(path: &Path) -> bool {
    fs::metadata(path).unwrap().atime() > now_seconds() - DAY_SECONDS
}

/// Some programs delete files by their access times, so reading from the cache must count as
/// reading.
#[test]
fn opening_what_is_cached_moves_its_access_time() {
    if !can_mount("opening_what_is_cached_moves_its_access_time") {
        return;
    }
    both_modes(|m| {
        fs::write(m.path("a"), b"read again and again").unwrap();
        fs::copy("/bin/true", m.path("program")).unwrap();
        for name in ["a", "program"] {
            fs::read(m.path(name)).unwrap();
        }
        Command::new(m.path("program")).status().unwrap();
        m.wait_until_closed();
        let (a, program) = (m.backing("a"), m.backing("program"));
        let stamp = |path: &PathBuf| {
            let now = fs::metadata(path).unwrap();
            (now.len(), now.mtime(), now.mtime_nsec(), now.ctime(), now.ctime_nsec())
        };
        let drops = || m.mount().status().requested_drops;

        age(&m.path("a"));
        fs::File::options().read(true).custom_flags(libc::O_NOATIME).open(m.path("a")).unwrap();
        fs::File::options().write(true).open(m.path("a")).unwrap();
        assert!(!is_recent(&a), "nobody has read it");
        let (before, drops_before) = (stamp(&a), drops());
        assert!(!is_recent(&m.path("a")));
        assert_eq!(fs::read(m.path("a")).unwrap(), b"read again and again");
        assert!(is_recent(&a) && is_recent(&m.path("a")), "read");
        assert_eq!((stamp(&a), drops()), (before, drops_before), "no byte has changed");

        age(&m.path("program"));
        Command::new(m.path("program")).status().unwrap();
        assert!(is_recent(&program), "executed");
        age(&m.path("a"));
        let mapped = fs::File::open(m.path("a")).unwrap();
        assert!(is_recent(&a), "opened to be mapped");
        drop(mapped);
    });
}

/// The change time that chattr(1) moves is shown at once. (Not with `Back`: the kernel keeps that
/// time itself then.)
#[test]
fn file_flags_move_the_change_time() {
    if !can_mount("file_flags_move_the_change_time") || !has_program("file_flags_move_the_change_time", "chattr") {
        return;
    }
    let m = Mounted::with(|config| config.attr_timeout = Duration::from_secs(60));
    fs::write(m.path("a"), b"x").unwrap();
    fs::create_dir(m.path("d")).unwrap();
    let changed = |path: &Path| {
        let found = fs::metadata(path).unwrap();
        (found.ctime(), found.ctime_nsec())
    };
    for name in ["a", "d"] {
        let before = changed(&m.path(name));
        shell(&format!("chattr +d {}", m.path(name).display()));
        let after = changed(&m.path(name));
        assert!(after > before && after == changed(&m.backing(name)), "{name}: {before:?} {after:?}");
    }
}

/// A handle that is stale as soon as the kernel has forgotten the inode is worse than none.
#[test]
fn file_handles_are_refused() {
    if !can_mount("file_handles_are_refused") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("a"), b"x").unwrap();
    let handle = |path: PathBuf| {
        let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        let mut raw = [128u32; 34]; // The length of what follows the kind, that, and the bytes.
        let mut mount = 0;
        // SAFETY: the path is a NUL-terminated string; behind `raw` are as many bytes as its first
        // word says, and its kind.
        match unsafe {
            libc::syscall(libc::SYS_name_to_handle_at, libc::AT_FDCWD, path.as_ptr(), &mut raw, &mut mount, 0)
        } {
            0 => None,
            _ => std::io::Error::last_os_error().raw_os_error(),
        }
    };
    if handle(m.backing("a")).is_some() {
        return skip("file_handles_are_refused", "the backing file system has none");
    }
    if !is_kernel((6, 9)) {
        return skip("file_handles_are_refused", "this kernel gives handles of every FUSE mount (before 6.9)");
    }
    assert_eq!(handle(m.path("a")), Some(libc::EOPNOTSUPP));
}

fn is_kernel(least: (u32, u32)) -> bool {
    os::kernel::version() >= least
}

/// A user namespace whose ids 0 to 999 are [`IDS_FIRST`] and those behind it outside.
struct UserNamespace {
    child: Child,
    fd: fs::File,
}

const IDS_FIRST: u32 = 10_000;

impl UserNamespace {
    fn new() -> UserNamespace {
        // It runs until its input ends, and says when it is in the namespace.
        let mut command = Command::new("unshare");
        command.args(["--user", "sh", "-c", "echo; read end"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let process = PathBuf::from(format!("/proc/{}", child.id()));
        for map in ["uid_map", "gid_map"] {
            fs::write(process.join(map), format!("0 {IDS_FIRST} 1000")).unwrap();
        }
        UserNamespace { fd: fs::File::open(process.join("ns/user")).unwrap(), child }
    }
}

impl Drop for UserNamespace {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A detached idmapped mount of what is mounted there.
fn idmapped(path: &Path, namespace: &UserNamespace) -> Result<OwnedFd, std::io::Error> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(CWD, path, flags)?;
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: namespace.fd.as_raw_fd() as u64,
    };
    // SAFETY: the path is a NUL-terminated string, and the structure is as long as is said.
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &attributes,
            size_of_val(&attributes),
        )
    };
    if set == 0 { Ok(tree) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
fn an_idmapped_mount_maps_owners() {
    if !can_mount("an_idmapped_mount_maps_owners") || !has_program("an_idmapped_mount_maps_owners", "unshare") {
        return;
    }
    if !is_kernel((6, 12)) {
        return skip("an_idmapped_mount_maps_owners", "this kernel has no idmapped mounts with FUSE (before 6.12)");
    }
    let namespace = UserNamespace::new();
    let plain = Mounted::through();
    assert_eq!(errno_of(idmapped(&plain.path(""), &namespace)), libc::EINVAL, "not asked for");

    let m = Mounted::with(|config| config.idmapped = true);
    fs::create_dir(m.backing("d")).unwrap();
    fs::set_permissions(m.backing("d"), fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(m.backing("d/a"), b"x").unwrap();
    chown(m.backing("d/a"), Some(3), Some(4)).unwrap();
    let tree = idmapped(&m.path(""), &namespace).unwrap();
    let owner = |path: PathBuf| fs::metadata(path).map(|found| (found.uid(), found.gid())).unwrap();
    let mapped = PathBuf::from(format!("/proc/self/fd/{}", tree.as_raw_fd()));
    assert_eq!(owner(mapped.join("d/a")), (IDS_FIRST + 3, IDS_FIRST + 4));
    assert_eq!(owner(m.path("d/a")), (3, 4), "the mount itself maps nothing");
    // A user of the namespace writes his own file, and makes one.
    let as_user = |id: u32, does: &(dyn Fn() -> std::io::Result<()> + Sync)| {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // SAFETY: these concern this thread alone, which ends.
                unsafe { (libc::setfsgid(id), libc::setfsuid(id)) };
                does()
            });
            thread.join().unwrap()
        })
    };
    as_user(IDS_FIRST + 3, &|| fs::write(mapped.join("d/a"), b"its own")).unwrap();
    as_user(IDS_FIRST + 5, &|| fs::write(mapped.join("d/new"), b"new")).unwrap();
    let denied = as_user(IDS_FIRST + 5, &|| fs::write(mapped.join("d/a"), b"another's"));
    assert_eq!(errno_of(denied), libc::EACCES);
    assert_eq!(
        (fs::read(m.backing("d/a")).unwrap(), fs::read(m.backing("d/new")).unwrap()),
        (b"its own".to_vec(), b"new".to_vec())
    );
    assert_eq!(owner(m.backing("d/new")), (5, 5));
    // One that the mapping does not know can own nothing.
    assert_eq!(errno_of(as_user(7, &|| fs::write(mapped.join("d/none"), b""))), libc::EOVERFLOW);
}
