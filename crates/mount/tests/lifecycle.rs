//! The beginning and the end of mounts, and what is refused.

mod support;

use mount::{Config, Error, Mount};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use support::*;
use testbed::Lease;

fn refused(source: &Path, mountpoint: &Path) -> Error {
    match Mount::start(Config::new(source, mountpoint), |_| borrower(true)) {
        Ok(_) => panic!("{} was mounted on {}", source.display(), mountpoint.display()),
        Err(error) => {
            println!("{error}");
            assert!(!error.to_string().contains('\n'));
            error
        }
    }
}

#[test]
fn what_cannot_be_mounted_is_refused() {
    if !can_mount("what_cannot_be_mounted_is_refused") {
        return;
    }
    let m = Mounted::through();
    let base = tempfile::tempdir().unwrap();
    let (a, file) = (base.path().join("a"), base.path().join("file"));
    fs::create_dir_all(a.join("inside")).unwrap();
    fs::write(&file, b"").unwrap();
    let none = base.path().join("none");
    assert!(matches!(refused(&none, &a), Error::SourceMissing { .. }));
    assert!(matches!(refused(&file, &a), Error::SourceNotADirectory { .. }));
    assert!(matches!(refused(&a, &none), Error::MountpointMissing { .. }));
    assert!(matches!(refused(&a, &file), Error::MountpointNotADirectory { .. }));
    assert!(matches!(refused(&a, &a.join("inside")), Error::MountpointInsideSource { .. }));
    assert!(matches!(refused(&a, &m.path("")), Error::AlreadyMounted { .. }));
}

/// The daemon of an earlier mount died: said as such, wherever one stumbles over it.
#[test]
fn dead_mounts_are_named() {
    if !can_mount("dead_mounts_are_named") {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    let (dead, other) = (base.path().join("dead"), base.path().join("other"));
    fs::create_dir(&dead).unwrap();
    fs::create_dir(&other).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    let options = fuse::mounting::Options { fsname: "x".into(), subtype: "pumapool".into(), allow_other: false, flags };
    drop(fuse::mounting::mount(&dead, &options).unwrap());
    let errors = [refused(&other, &dead), refused(&dead, &other), refused(&dead, &dead)];
    fuse::mounting::unmount(&dead, true).unwrap();
    assert!(errors.iter().all(|error| matches!(error, Error::MountpointDead { .. })), "{errors:?}");
}

#[test]
fn a_failed_start_leaves_no_mount() {
    if !can_mount("a_failed_start_leaves_no_mount") {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    let (source, mountpoint) = (base.path().join("backing"), base.path().join("mountpoint"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    let (source_too, mountpoint_too) = (source.clone(), mountpoint.clone());
    let thread = std::thread::spawn(move || {
        let _ = Mount::start(Config::new(source_too, mountpoint_too), |_| -> std::io::Result<_> {
            panic!("no borrower today")
        });
    });
    assert!(thread.join().is_err());
    assert_eq!(fuse::mounting::find(&mountpoint.canonicalize().unwrap(), "pumapool").unwrap(), None);
    assert_eq!(fs::metadata(&mountpoint).unwrap().dev(), fs::metadata(&source).unwrap().dev());
}

#[test]
fn over_itself() {
    if !can_mount("over_itself") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("backing")).unwrap();
    fs::write(directory.path().join("backing/a"), b"from before").unwrap();
    let m = Mounted::over(directory, None, |config| config.mountpoint = config.source.clone());
    assert_eq!(fs::read(m.path("a")).unwrap(), b"from before");
    fs::write(m.path("b"), b"through the mount").unwrap();
    fs::rename(m.path("a"), m.path("c")).unwrap();
    assert!(m.mount().status().requests.contains_key("write"));
    let directory = m.end();
    let backing = directory.path().join("backing");
    assert_eq!(fs::read(backing.join("b")).unwrap(), b"through the mount");
    assert_eq!(fs::read(backing.join("c")).unwrap(), b"from before");
}

#[test]
fn device_number_is_known_before_the_first_request() {
    if !can_mount("device_number_is_known_before_the_first_request") {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    let (source, mountpoint) = (base.path().join("backing"), base.path().join("mountpoint"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    let mut told = 0;
    let mount = Mount::start(Config::new(&source, &mountpoint), |info| {
        told = info.device;
        borrower(true)
    })
    .unwrap();
    assert_eq!(fs::metadata(&mountpoint).unwrap().dev(), told);
    assert_ne!(fs::metadata(&source).unwrap().dev(), told);
    let read_ahead = format!("/sys/class/bdi/{}:{}/read_ahead_kb", rustix::fs::major(told), rustix::fs::minor(told));
    assert_eq!(fs::read_to_string(read_ahead).unwrap().trim(), "1024");
    drop(mount);
}

#[test]
fn unmounting() {
    if !can_mount("unmounting") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("a"), b"x").unwrap();
    let open = fs::File::open(m.path("a")).unwrap();
    let busy = m.mount().unmount(false).unwrap_err();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    assert!(m.mount().status().serving);
    // Detached: gone from the tree, but the open file goes on.
    m.mount().unmount(true).unwrap();
    assert!(!m.path("a").exists());
    assert_eq!(std::io::read_to_string(&open).unwrap(), "x");
    drop(open);
    m.mount().wait();
    let status = serde_json::to_value(m.mount().status()).unwrap();
    assert_eq!((status["serving"].clone(), status["inodes"].clone()), (false.into(), 0.into()));
    m.mount().unmount(false).unwrap(); // Ended already: no error.
}

/// Somebody mounted us below ourselves: a closed directory, or an error where mounts are crossed,
/// but no deadlock.
#[test]
fn a_mount_within_its_own_source() {
    if !can_mount("ourselves_below_ourselves") {
        return;
    }
    for cross in [false, true] {
        let m = Mounted::with(|config| config.cross_mounts = cross);
        fs::create_dir(m.backing("loop")).unwrap();
        let flags = rustix::mount::MountFlags::BIND;
        rustix::mount::mount(m.path(""), m.backing("loop"), "", flags, None).unwrap();
        let result = fs::metadata(m.path("loop").join("loop")).or_else(|_| fs::metadata(m.path("loop")));
        rustix::mount::unmount(m.backing("loop"), rustix::mount::UnmountFlags::DETACH).unwrap();
        match cross {
            false => assert!(result.unwrap().permissions().readonly()),
            true => assert_eq!(errno_of(result), libc::ELOOP),
        }
    }
}

/// Restrictions of SOURCE's mount stay in force.
#[test]
fn restrictions_are_inherited() {
    if !can_mount("restrictions_are_inherited") {
        return;
    }
    let (directory, backing) = new_backing();
    let small = FileSystem::tmpfs(&backing, "size=1m");
    let flags =
        rustix::mount::MountFlags::NOSUID | rustix::mount::MountFlags::NODEV | rustix::mount::MountFlags::RDONLY;
    rustix::mount::mount_remount(&backing, flags, c"").unwrap();
    let m = Mounted::over(directory, Some(small), |_| {});
    let here = rustix::fs::statvfs(m.path("")).unwrap().f_flag;
    use rustix::fs::StatVfsMountFlags as Flags;
    assert!(here.contains(Flags::NOSUID | Flags::NODEV | Flags::RDONLY), "{here:?}");
    assert_eq!(errno_of(fs::write(m.path("a"), b"x")), libc::EROFS);
}

const AS_USER: &str = "PUMA_TEST_MOUNT_AS_USER";

/// As an ordinary user, by fusermount3: this test runs itself again as nobody.
#[test]
fn as_an_ordinary_user() {
    if let Some(base) = std::env::var_os(AS_USER) {
        let base = Path::new(&base);
        let mount =
            Mount::start(Config::new(base.join("backing"), base.join("mountpoint")), |_| borrower(true)).unwrap();
        let path = |name: &str| base.join("mountpoint").join(name);
        fs::write(path("a"), pattern(300_000, 1)).unwrap();
        assert!(fs::read(path("a")).unwrap() == pattern(300_000, 1));
        fs::create_dir(path("d")).unwrap();
        fs::rename(path("a"), path("d/b")).unwrap();
        assert_eq!(fs::metadata(base.join("backing/d/b")).unwrap().len(), 300_000);
        mount.unmount(false).unwrap();
        mount.wait();
        return;
    }
    let test = "as_an_ordinary_user";
    if !can_mount(test) || !has_program(test, "fusermount3") || !has_program(test, "setpriv") {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    for name in ["", "backing", "mountpoint"] {
        if !name.is_empty() {
            fs::create_dir(base.path().join(name)).unwrap();
        }
        std::os::unix::fs::chown(base.path().join(name), Some(65534), Some(65534)).unwrap();
    }
    // The build's own directory may be closed to others.
    let program = base.path().join("program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    // Distributions let everybody open /dev/fuse, but not every machine does. A device node of our
    // own stands in for it, in a mount namespace that ends with the shell, and with it the mount,
    // should the test leave it.
    let script = format!(
        "mknod -m 666 {0}/fuse c 10 229 && mount --bind {0}/fuse /dev/fuse && \
         exec setpriv --reuid=65534 --regid=65534 --clear-groups -- {1} --exact {test} --nocapture",
        base.path().display(),
        program.display(),
    );
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", &script])
        .env(AS_USER, base.path())
        .current_dir("/")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A worker that is held up does not leave in time: all go on.
#[test]
fn a_mount_that_cannot_be_left_is_served_by_all_again() {
    if !can_mount("a_mount_that_cannot_be_left_is_served_by_all_again") {
        return;
    }
    let m = Mounted::through();
    for name in ["held", "other"] {
        fs::write(m.backing(name), name).unwrap();
    }
    // An open would be put off, and hold no worker.
    let lease = Lease::take(&m.backing("held"), true).unwrap();
    std::thread::scope(|scope| {
        let truncate = scope.spawn(|| truncate_by_name(&m.path("held"), 2));
        wait_until("a worker is held up", || lease.holds_somebody_up());
        let left = m.mount().leave(Duration::from_millis(200)).unwrap();
        let others: Vec<_> = (0..2).map(|_| scope.spawn(|| fs::read(m.path("other")).unwrap())).collect();
        wait_until("the others are served", || others.iter().all(|other| other.is_finished()));
        others.into_iter().for_each(|other| assert_eq!(other.join().unwrap(), b"other"));
        drop(lease);
        truncate.join().unwrap().unwrap();
        assert!(!left);
    });
    assert_eq!(fs::read(m.path("held")).unwrap(), b"he");
    // It was not left.
    m.mount().unmount(false).unwrap();
    assert_eq!(m.mount().wait(), fuse::Served::Gone);
}

/// Of the daemon itself, when it looks whether somebody writes to the file, or of anybody else.
#[test]
fn a_truncation_waits_for_a_lease() {
    if !can_mount("a_truncation_waits_for_a_lease") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.backing("a"), b"long").unwrap();
    let lease = Lease::take(&m.backing("a"), true).unwrap();
    std::thread::scope(|scope| {
        let truncate = scope.spawn(|| truncate_by_name(&m.path("a"), 2));
        wait_until("it is held up", || lease.holds_somebody_up() || truncate.is_finished());
        drop(lease);
        truncate.join().unwrap().unwrap();
    });
    assert_eq!(fs::read(m.backing("a")).unwrap(), b"lo");
}

/// A mount that does not answer by the time it is served is none: nobody is told that it is there.
#[test]
fn a_mount_that_is_gone_before_it_is_served_is_an_error() {
    if !can_mount("a_mount_that_is_gone_before_it_is_served_is_an_error") {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    let (backing, mountpoint) = (base.path().join("backing"), base.path().join("mountpoint"));
    fs::create_dir(&backing).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    let start = Mount::start(Config::new(&backing, &mountpoint), |_| {
        fuse::mounting::unmount(&mountpoint, true)?;
        borrower(true)
    });
    let error = start.err().unwrap();
    println!("{error}");
    assert!(matches!(error, Error::NotServed { .. }), "{error}");
}
