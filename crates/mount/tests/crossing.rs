//! File systems that are mounted in SOURCE: not crossed into by default, and with `cross_mounts`
//! not beyond what each of them permits.

mod support;

use rustix::fd::AsRawFd;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};
use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::Duration;
use support::*;

/// Longest wait for something that could wait for ever.
const HANG_MAX: Duration = Duration::from_secs(30);

/// Mounts a file system for the time that it lives.
struct Sub(PathBuf);

impl Sub {
    fn new(kind: &str, at: &Path, flags: MountFlags, data: &str) -> Option<Sub> {
        fs::create_dir_all(at).unwrap();
        let data = CString::new(data).unwrap();
        match mount("none", at, kind, flags, data.as_c_str()) {
            Ok(()) => Some(Sub(at.to_owned())),
            Err(errno) => {
                println!("no {kind} here: {errno}");
                None
            }
        }
    }

    /// A FUSE mount of an ordinary user, whose server answers nothing as long as `device` is open.
    fn of_another_user(at: &Path, device: &File) -> Sub {
        let fd = device.as_raw_fd();
        let data = format!("fd={fd},rootmode=40000,user_id=65534,group_id=65534,allow_other");
        Sub::new("fuse.other", at, MountFlags::NOSUID | MountFlags::NODEV, &data).unwrap()
    }

    fn bind(from: &Path, at: &Path) -> Sub {
        mount(from, at, "", MountFlags::BIND, None).unwrap();
        Sub(at.to_owned())
    }
}

impl Drop for Sub {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Runs something that must not wait for ever.
fn in_time<T: Send + 'static>(what: &str, run: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, is_done) = channel();
    std::thread::spawn(move || done.send(run()));
    is_done.recv_timeout(HANG_MAX).unwrap_or_else(|_| panic!("{what}: no answer"))
}

/// A program that prints its effective user, with the set-user-ID bit of root.
fn set_uid_program(at: &Path) {
    fs::copy("/usr/bin/id", at).unwrap();
    fs::set_permissions(at, fs::Permissions::from_mode(0o4755)).unwrap();
}

/// The user that an ordinary user becomes by running it: `None` if it does not run.
fn becomes(program: &Path) -> Option<String> {
    let output = as_nobody(&format!("exec {} -u", program.display()));
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

fn opens_device(path: &Path) -> bool {
    as_nobody(&format!("head -c 1 {}", path.display())).status.success()
}

fn names(path: PathBuf) -> Vec<String> {
    let entries = fs::read_dir(path).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn by_default_nothing_is_crossed() {
    let test = "by_default_nothing_is_crossed";
    if !can_mount(test) || !has_program(test, "setpriv") {
        return;
    }
    let m; // Dropped when nothing is mounted in it any more.
    let (directory, backing) = new_backing();
    fs::create_dir_all(backing.join("plain/inner")).unwrap();
    fs::write(backing.join("plain/a"), b"a").unwrap();
    fs::create_dir(backing.join("bound")).unwrap();
    fs::write(backing.join("bound-file"), b"covered").unwrap();
    let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let none = MountFlags::empty();
    let mut subs: Vec<Sub> = [
        Sub::new("tmpfs", &backing.join("tmpfs"), MountFlags::NOSUID, "size=8m"),
        Sub::new("proc", &backing.join("proc"), none, ""),
        Sub::new("cgroup2", &backing.join("cgroup"), none, ""),
        Some(Sub::of_another_user(&backing.join("fuse"), &device)),
        Some(Sub::bind(&backing.join("plain"), &backing.join("bound"))),
        Some(Sub::bind(&backing.join("plain/a"), &backing.join("bound-file"))),
    ]
    .into_iter()
    .flatten()
    .collect();
    set_uid_program(&backing.join("tmpfs/s"));
    m = Mounted::over(directory, None, |_| {});

    let mut seen = names(m.path(""));
    seen.sort();
    let expected = ["bound", "bound-file", "cgroup", "fuse", "plain", "proc", "tmpfs"];
    assert!(expected.iter().all(|name| seen.iter().any(|seen| seen == name)), "{seen:?}");
    for name in ["tmpfs", "proc", "cgroup", "fuse", "bound"] {
        let at = m.path(name);
        in_time(name, move || {
            let found = fs::metadata(&at).unwrap();
            assert_eq!((found.mode(), found.uid()), (0o040_555, 0), "{at:?}");
            assert_eq!(names(at.clone()), [] as [String; 0], "{at:?}");
            for inner in ["s", "self", "cgroup.procs", "a"] {
                assert_eq!(errno_of(fs::symlink_metadata(at.join(inner))), libc::EXDEV, "{at:?} {inner}");
            }
            assert_eq!(errno_of(File::create(at.join("new"))), libc::EXDEV, "{at:?}");
            assert_eq!(errno_of(fs::create_dir(at.join("new"))), libc::EXDEV, "{at:?}");
            assert_eq!(errno_of(fs::rename(at.join("../plain/inner"), at.join("new"))), libc::EXDEV, "{at:?}");
            assert_eq!(errno_of(fs::set_permissions(&at, fs::Permissions::from_mode(0o777))), libc::EXDEV, "{at:?}");
            assert_eq!(errno_of(fs::remove_dir(&at)), libc::EBUSY, "{at:?}");
        });
    }
    assert_eq!(fs::metadata(m.path("bound-file")).unwrap().len(), 0);
    assert_eq!(errno_of(fs::read(m.path("bound-file"))), libc::EXDEV);
    assert_eq!(becomes(&m.path("tmpfs/s")), None);
    let listed = shell(&format!("ls -lR {}", m.path("").display()));
    assert!(listed.contains("plain/inner:"), "{listed}");

    // Nothing in them is held open: each can be unmounted, and then the directory that it has
    // covered is there.
    while let Some(Sub(at)) = subs.last() {
        unmount(at, UnmountFlags::empty()).unwrap_or_else(|errno| panic!("{at:?}: {errno}"));
        subs.pop();
    }
    wait_until("the directory appears", || fs::metadata(m.path("bound")).unwrap().mode() == 0o040_755);
    wait_until("the file appears", || fs::read(m.path("bound-file")).is_ok_and(|bytes| bytes == b"covered"));
    fs::write(m.path("bound/new"), b"n").unwrap();
    assert_eq!(fs::read(m.backing("bound/new")).unwrap(), b"n");
}

#[test]
fn crossed_into_each_keeps_its_flags() {
    let test = "crossed_into_each_keeps_its_flags";
    if !can_mount(test) || !has_program(test, "setpriv") {
        return;
    }
    let m; // Dropped when nothing is mounted in it any more.
    let (directory, backing) = new_backing();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let flags = [
        ("open", MountFlags::empty()),
        ("nosuid", MountFlags::NOSUID),
        ("nodev", MountFlags::NODEV),
        ("noexec", MountFlags::NOEXEC),
        ("ro", MountFlags::empty()),
    ];
    let _subs: Vec<Sub> =
        flags.iter().map(|(name, flags)| Sub::new("tmpfs", &backing.join(name), *flags, "size=8m").unwrap()).collect();
    for (name, _) in flags {
        set_uid_program(&backing.join(name).join("s"));
        shell(&format!("cd {} && mknod -m 666 zero c 1 5", backing.join(name).display()));
        fs::write(backing.join(name).join("a"), name).unwrap();
    }
    mount_remount(backing.join("ro"), MountFlags::RDONLY | MountFlags::BIND, c"").unwrap();
    let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let _never: Vec<Sub> = [
        Sub::new("proc", &backing.join("proc"), MountFlags::empty(), ""),
        Sub::new("cgroup2", &backing.join("cgroup"), MountFlags::empty(), ""),
        Some(Sub::of_another_user(&backing.join("fuse"), &device)),
    ]
    .into_iter()
    .flatten()
    .collect();
    if becomes(&backing.join("open/s")).as_deref() != Some("0") || !opens_device(&backing.join("open/zero")) {
        return skip(test, "set-user-ID programs or devices do not work in the temporary directory");
    }
    m = Mounted::over(directory, None, |config| config.cross_mounts = true);
    for (name, _) in flags {
        assert_eq!(fs::read(m.path(name).join("a")).unwrap(), name.as_bytes());
    }
    for name in ["proc", "cgroup", "fuse"] {
        let at = m.path(name);
        in_time(name, move || assert_eq!(names(at), [] as [String; 0]));
    }
    let user = |name: &str| becomes(&m.path(name).join("s"));
    let user_in_backing = |name: &str| becomes(&m.backing(name).join("s"));
    for (name, _) in flags {
        assert_eq!(user(name), user_in_backing(name), "{name}");
        assert_eq!(opens_device(&m.path(name).join("zero")), opens_device(&m.backing(name).join("zero")), "{name}");
    }
    assert_eq!((user("open").as_deref(), user("nosuid").as_deref(), user("noexec")), (Some("0"), Some("65534"), None));
    assert_eq!(errno_of(fs::write(m.path("ro/a"), b"x")), libc::EROFS);

    // A change is followed, both ways.
    mount_remount(m.backing("open"), MountFlags::NOSUID | MountFlags::NODEV | MountFlags::BIND, c"").unwrap();
    mount_remount(m.backing("nosuid"), MountFlags::NOEXEC | MountFlags::BIND, c"").unwrap();
    mount_remount(m.backing("ro"), MountFlags::BIND, c"").unwrap();
    wait_until("set-user-ID counts for nothing", || user("open").as_deref() == Some("65534"));
    wait_until("the device cannot be opened", || !opens_device(&m.path("open/zero")));
    wait_until("nothing runs", || user("nosuid").is_none());
    fs::write(m.path("ro/a"), b"x").unwrap();
}

#[test]
fn a_remount_of_source_is_followed() {
    let test = "a_remount_of_source_is_followed";
    if !can_mount(test) || !has_program(test, "setpriv") {
        return;
    }
    let (directory, backing) = new_backing();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let small = FileSystem::tmpfs(&backing, "size=8m");
    set_uid_program(&backing.join("s"));
    shell(&format!("mknod -m 666 {}/zero c 1 5", backing.display()));
    if becomes(&backing.join("s")).as_deref() != Some("0") {
        return skip(test, "set-user-ID programs do not work in the temporary directory");
    }
    let m = Mounted::over(directory, Some(small), |_| {});
    assert_eq!(becomes(&m.path("s")).as_deref(), Some("0"));
    assert!(opens_device(&m.path("zero")));
    let remount = |flags| mount_remount(m.backing(""), flags, c"").unwrap();
    remount(MountFlags::NOSUID | MountFlags::NODEV);
    wait_until("set-user-ID counts for nothing", || becomes(&m.path("s")).as_deref() == Some("65534"));
    assert!(!opens_device(&m.path("zero")));
    remount(MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY);
    wait_until("nothing runs", || becomes(&m.path("s")).is_none());
    assert_eq!(errno_of(fs::write(m.path("a"), b"x")), libc::EROFS);
    remount(MountFlags::NOSUID);
    fs::write(m.path("a"), b"x").unwrap();
}

const PRIVATELY: &str = "PUMA_TEST_IN_PRIVATE_NAMESPACE";

/// Runs this test again in a mount namespace of its own, where it cannot harm the machine. Returns
/// whether it is there already.
fn privately(test: &str) -> bool {
    if std::env::var_os(PRIVATELY).is_some() {
        return true;
    }
    if can_mount(test) && has_program(test, "unshare") {
        let own = std::env::current_exe().unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private"]).arg(own).args(["--exact", test, "--nocapture"]);
        let output = command.env(PRIVATELY, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()));
    }
    false
}

#[test]
fn mounts_bound_into_each_other_go_on() {
    if !privately("mounts_bound_into_each_other_go_on") {
        return;
    }
    for cross in [false, true] {
        let (one, other) = (new_backing().0, new_backing().0);
        fs::create_dir_all(one.path().join("backing/other")).unwrap();
        fs::create_dir_all(other.path().join("backing/one")).unwrap();
        let one = Mounted::over(one, None, |config| (config.cross_mounts, config.threads) = (cross, 2));
        let other = Mounted::over(other, None, |config| (config.cross_mounts, config.threads) = (cross, 2));
        let _into_one = Sub::bind(&other.path(""), &one.backing("other"));
        let _into_other = Sub::bind(&one.path(""), &other.backing("one"));
        // And one whose SOURCE has its own mountpoint in it.
        fs::create_dir(one.backing("own")).unwrap();
        let _own = Sub::bind(&one.path(""), &one.backing("own"));
        for at in [one.path("other"), other.path("one")] {
            in_time("a bound mount", move || assert_eq!(names(at), [] as [String; 0]));
        }
        for root in [one.path(""), other.path("")] {
            let walk = move || Command::new("find").arg(root).args(["-ls"]).output().unwrap();
            let found = String::from_utf8_lossy(&in_time("find", walk).stdout).into_owned();
            assert!(found.lines().count() <= 4, "{found}");
        }
    }
}

/// Opening by `/proc/self/fd` still works after something else was mounted over `/proc`.
#[test]
fn a_covered_proc_is_no_obstacle() {
    if !privately("a_covered_proc_is_no_obstacle") {
        return;
    }
    both_modes(|m| {
        fs::write(m.backing("a"), b"a").unwrap();
        {
            let _covered = Sub::new("tmpfs", Path::new("/proc"), MountFlags::empty(), "").unwrap();
            assert_eq!(fs::read(m.path("a")).unwrap(), b"a");
            fs::write(m.path("b"), b"b").unwrap();
            fs::set_permissions(m.path("b"), fs::Permissions::from_mode(0o600)).unwrap();
            fs::hard_link(m.path("b"), m.path("c")).unwrap();
            truncate_by_name(&m.path("c"), 0).unwrap();
            rustix::fs::setxattr(m.path("c"), c"user.a", b"1", rustix::fs::XattrFlags::empty()).unwrap();
            let mut value = [0; 4];
            assert_eq!(rustix::fs::getxattr(m.path("b"), c"user.a", &mut value[..]), Ok(1));
        }
        assert_eq!(fs::metadata(m.backing("b")).unwrap().len(), 0);
    });
}
