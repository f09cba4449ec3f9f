//! Common parts of the tests of real mounts: a directory mounted at a temporary place, and
//! unmounted in any case.
#![allow(dead_code)] // Each test binary uses its part of it.

pub mod own;

use mount::{Config, Mount, WriteMode};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest wait for a state that must come.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// A borrower without lenders, as yet or for good.
pub fn borrower(expects_lenders: bool) -> std::io::Result<Arc<borrower::Borrower>> {
    let strategy = borrower::Strategy::NonInclusive;
    borrower::Borrower::start(borrower::Config { strategy, expects_lenders, ..borrower::Config::default() }, None)
}

pub use testbed::skip;

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Longest wait for an answer that waits for nothing.
pub const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Whether real mounts as root can be tested here.
pub fn can_mount(test: &str) -> bool {
    if !rustix::process::geteuid().is_root() {
        skip(test, "not root");
    } else if !Path::new("/dev/fuse").exists() {
        skip(test, "no /dev/fuse");
    } else {
        return true;
    }
    false
}

/// How often a test tries what is a matter of luck: as often as PUMA_TRIES says, else `usual`
/// times.
pub fn tries(usual: usize) -> usize {
    let tries = std::env::var("PUMA_TRIES").map_or(usual, |tries| tries.parse().expect("PUMA_TRIES is a number"));
    println!("{tries} tries");
    tries
}

/// Whether a program can be run.
pub fn has_program(test: &str, program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output().unwrap().status.success();
    if !found {
        skip(test, format!("no {program}"));
    }
    found
}

/// A backing directory, a directory beside it, and the one mounted on the other.
///
/// The fields are dropped in this order: the mount is detached before what it is over, and that
/// before the directory is removed.
pub struct Mounted {
    mount: Mount,
    _over: Option<FileSystem>,
    directory: TempDir,
    in_place: bool,
}

impl Mounted {
    pub fn through() -> Mounted {
        Mounted::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Config)) -> Mounted {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("backing")).unwrap();
        Mounted::over(directory, None, change)
    }

    /// `directory` holds `backing` already; `over` is mounted somewhere in there.
    pub fn over(directory: TempDir, over: Option<FileSystem>, change: impl FnOnce(&mut Config)) -> Mounted {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let backing = directory.path().join("backing");
        let mountpoint = directory.path().join("mountpoint");
        std::fs::create_dir(&mountpoint).unwrap();
        let mut config = Config::new(backing, mountpoint);
        config.threads = 4;
        change(&mut config);
        let in_place = config.source == config.mountpoint;
        let expects_lenders = !config.pass;
        let mount = Mount::start(config, |_| borrower(expects_lenders)).unwrap();
        Mounted { mount, _over: over, directory, in_place }
    }

    /// A path through the mount.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(if self.in_place { "backing" } else { "mountpoint" }).join(name)
    }

    /// The path in the backing directory.
    pub fn backing(&self, name: impl AsRef<Path>) -> PathBuf {
        assert!(!self.in_place);
        self.directory.path().join("backing").join(name)
    }

    /// Waits until no file is open: the kernel closes them after close(2) has returned.
    pub fn wait_until_closed(&self) {
        wait_until("all files are closed", || self.mount.status().open_handles == 0);
    }

    pub fn mount(&self) -> &Mount {
        &self.mount
    }

    /// Ends the mount; the backing directory stays until the directory is dropped.
    pub fn end(self) -> TempDir {
        let Mounted { mount, directory, .. } = self;
        // The kernel may let go of what was closed after close(2) has returned.
        wait_until("nobody uses the mount", || match mount.unmount(false) {
            Err(mount::Error::Busy { .. }) => false,
            result => {
                result.unwrap();
                true
            }
        });
        mount.wait();
        directory
    }
}

/// Both ways of writing; most of what holds for one must hold for the other.
pub fn both_modes(test: impl Fn(Mounted)) {
    for write in [WriteMode::Through, WriteMode::Back] {
        println!("{write:?}");
        test(Mounted::with(|config| config.write = write));
    }
}

/// A directory in which nothing is mounted yet, and `backing` in it.
pub fn new_backing() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let backing = directory.path().join("backing");
    std::fs::create_dir(&backing).unwrap();
    (directory, backing)
}

/// A file system of a small size, on `directory/backing`.
pub struct FileSystem(PathBuf);

impl FileSystem {
    pub fn tmpfs(path: &Path, options: &str) -> FileSystem {
        FileSystem::of_kind("tmpfs", path, options)
    }

    /// One without extended attributes.
    pub fn ramfs(path: &Path) -> FileSystem {
        FileSystem::of_kind("ramfs", path, "")
    }

    /// Something that is mounted there already, to be taken down.
    pub fn mounted(path: &Path) -> FileSystem {
        FileSystem(path.to_owned())
    }

    fn of_kind(kind: &str, path: &Path, options: &str) -> FileSystem {
        let (flags, options) = (rustix::mount::MountFlags::empty(), std::ffi::CString::new(options).unwrap());
        rustix::mount::mount("small", path, kind, flags, Some(options.as_c_str())).unwrap();
        FileSystem(path.to_owned())
    }

    /// An ext4 in the file `image`.
    pub fn image(path: &Path, image: &Path, len_bytes: u64) -> FileSystem {
        FileSystem::image_with(path, image, len_bytes, "")
    }

    /// An ext4 in the file `image`, made with these options.
    pub fn image_with(path: &Path, image: &Path, len_bytes: u64, options: &str) -> FileSystem {
        std::fs::File::create(image).unwrap().set_len(len_bytes).unwrap();
        let (image, at) = (image.display(), path.display());
        shell(&format!("mkfs.ext4 -q -F {options} {image} && mount -o loop {image} {at}"));
        FileSystem(path.to_owned())
    }

    /// An XFS in the file `image`, as small as an XFS can be.
    pub fn xfs(path: &Path, image: &Path) -> FileSystem {
        std::fs::File::create(image).unwrap().set_len(300 << 20).unwrap();
        let (image, at) = (image.display(), path.display());
        shell(&format!("mkfs.xfs -q -f {image} && mount -o loop {image} {at}"));
        FileSystem(path.to_owned())
    }

    /// A Btrfs in the file `image`, as small as a Btrfs can be, with a limit of what is kept in it.
    pub fn btrfs_with_limit(path: &Path, image: &Path, limit_bytes: u64) -> FileSystem {
        std::fs::File::create(image).unwrap().set_len(256 << 20).unwrap();
        let (image, at) = (image.display(), path.display());
        shell(&format!("mkfs.btrfs -q -f {image} && mount -o loop {image} {at}"));
        let file_system = FileSystem(path.to_owned());
        shell(&format!("btrfs quota enable {at} && btrfs qgroup limit {limit_bytes} {at}"));
        file_system
    }

    /// An ext4 finds itself damaged, and lets nobody write any more, if it was made with
    /// `-e remount-ro`.
    pub fn damage(path: &Path) {
        let at = path.display();
        shell(&format!("echo 1 > /sys/fs/ext4/$(basename $(findmnt -n -o SOURCE -T {at}))/trigger_fs_error"));
    }

    /// Removes the bytes of its disk, the file `image`, behind this offset.
    pub fn cut(image: &Path, len_bytes: u64) {
        std::fs::File::options().write(true).open(image).unwrap().set_len(len_bytes).unwrap();
        shell(&format!("losetup -c $(losetup -n -O NAME -j {})", image.display()));
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Runs a shell script as an ordinary user (uid and gid 65534, without other groups).
pub fn as_nobody(script: &str) -> Output {
    as_user(65534, 65534, "--clear-groups", script)
}

/// Runs a shell script as somebody.
pub fn as_user(uid: u32, gid: u32, groups: &str, script: &str) -> Output {
    let output = Command::new("setpriv")
        .args([&format!("--reuid={uid}"), &format!("--regid={gid}"), groups, "--", "sh", "-c", script])
        .current_dir("/")
        .output()
        .unwrap();
    println!("{script}: {output:?}");
    output
}

/// Runs a shell script as root, which must succeed; returns what it said.
pub fn shell(script: &str) -> String {
    let output = Command::new("sh").args(["-c", script]).current_dir("/").output().unwrap();
    assert!(output.status.success(), "{script}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Waits until something holds.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < WAIT_MAX, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// truncate(2), which opens nothing.
pub fn truncate_by_name(path: &Path, len: i64) -> std::io::Result<()> {
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path is a NUL-terminated string.
    match unsafe { libc::truncate(path.as_ptr(), len) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Stores bytes at the beginning of a file through a mapping, and waits until they are written.
pub fn store_through_mapping(file: &std::fs::File, bytes: &[u8]) -> rustix::io::Result<()> {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
    let (len, access) = (4096, ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping of a page of a file that is not empty; nobody else has it, and it is
    // not used any more when it goes.
    unsafe {
        let at = mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0)?;
        at.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        let written = msync(at, len, MsyncFlags::SYNC);
        munmap(at, len)?;
        written
    }
}

/// Bytes that differ everywhere.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// The errno of a failed operation.
pub fn errno_of<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}
