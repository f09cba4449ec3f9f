//! Descriptors that a service manager stores survive the supervisor.

use crate::setup::{self, PATIENCE, can_run, kill};
use os::process::children;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use testbed::{Process, Scratch, wait_until};

/// The descriptors that a service manager stores, by name.
fn store(manager: &UnixDatagram, stored: &mut BTreeMap<String, OwnedFd>) {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut bytes = [0; 4096];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
    let Ok(received) = recvmsg(manager, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)
    else {
        return;
    };
    let text = String::from_utf8_lossy(&bytes[..received.bytes]).into_owned();
    let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or_default().to_owned();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            fds.for_each(|fd| drop(stored.insert(name.clone(), fd)));
        }
    }
    if text.contains("FDSTOREREMOVE=1") {
        stored.remove(&name);
    }
}

/// Until it stores so many.
fn wait_for_stored(manager: &UnixDatagram, stored: &mut BTreeMap<String, OwnedFd>, count: usize) {
    let came = wait_until(PATIENCE, || {
        store(manager, stored);
        stored.len() == count
    });
    assert!(came, "{:?} instead of {count}", stored.keys());
}

#[test]
fn what_a_service_manager_stores_survives_the_supervisor() {
    let test = "what_a_service_manager_stores_survives_the_supervisor";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let (address, metrics) = (scratch.path().join("manager"), scratch.directory("metrics").unwrap());
    let manager = UnixDatagram::bind(&address).unwrap();
    let command = || {
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$@\"", "sh", setup::PUMAPOOL, "mount"]).args([&source, &at]);
        command.args(["--foreground", "--threads", "4"]).env("NOTIFY_SOCKET", &address).env("FDSTORE", "100");
        command.arg("--metrics").arg(format!("unix:{}/socket", metrics.display()));
        command
    };
    let mut first = Process::spawn(command(), &[]).unwrap();
    first.wait_for_line("READY", PATIENCE).unwrap();
    // Another process has it open: ours must be able to start others while nobody serves, and those
    // would close it.
    let mut holder = Command::new("sh");
    holder.args([
        "-c",
        "exec 3<>\"$0\"; printf before >&3; echo OPEN; read go; printf ' and after' >&3; exec 3>&-; echo DONE",
    ]);
    holder.arg(at.join("file")).stdin(Stdio::piped());
    let mut holder = Process::spawn(holder, &[]).unwrap();
    holder.wait_for_line("OPEN", PATIENCE).unwrap();
    let closed = File::create(at.join("closed")).unwrap();
    let mut stored = BTreeMap::new();
    let mut stores = |count: usize| wait_for_stored(&manager, &mut stored, count);
    // State, directory, connection, a descriptor of it for each worker, and what is open.
    stores(3 + 4 + 2);
    drop(closed);
    stores(3 + 4 + 1);

    let daemon = children(first.pid())[0];
    first.kill().unwrap();
    // Now an attempt to take over finds that somebody serves.
    let numbers: Vec<_> = stored.values().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 200).unwrap()).collect();
    let names = stored.keys().cloned().collect::<Vec<_>>().join(":");
    let again = || {
        let mut command = command();
        command.env("LISTEN_FDS", numbers.len().to_string()).env("LISTEN_FDNAMES", &names);
        let raw: Vec<i32> = numbers.iter().map(|fd| fd.as_raw_fd()).collect();
        // SAFETY: the closure runs between fork and exec, makes system calls only, and allocates
        // nothing.
        unsafe {
            command.pre_exec(move || {
                for (number, fd) in (3..).zip(&raw) {
                    if libc::dup2(*fd, number) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        Process::spawn(command, &[]).unwrap()
    };
    // From here on somebody reads what else is said, as a service manager does.
    let (done, removed) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            manager.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            let mut text = [0; 4096];
            while !done.load(Ordering::Relaxed) {
                if let Ok(len) = manager.recv(&mut text) {
                    let is_removal = String::from_utf8_lossy(&text[..len]).contains("FDSTOREREMOVE=1");
                    removed.fetch_add(u64::from(is_removal), Ordering::Relaxed);
                }
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut second = again();
            assert!(!second.wait(PATIENCE).unwrap().unwrap().success(), "two daemons served one mount");
            assert_eq!(removed.load(Ordering::Relaxed), 0, "what is stored is still needed");
            kill(daemon);
            // It is taken on all the same when its metrics cannot be served any more.
            fs::remove_dir_all(&metrics).unwrap();
            let mut third = again();
            third.wait_for_line("READY", PATIENCE).unwrap();
            holder.take_stdin().unwrap().write_all(b"go\n").unwrap();
            holder.wait_for_line("DONE", PATIENCE).unwrap();
            assert_eq!(fs::read(at.join("file")).unwrap(), b"before and after");
            assert_eq!(fs::read(source.join("file")).unwrap(), b"before and after");
            third.signal(Signal::TERM).unwrap();
            assert!(third.wait(PATIENCE).unwrap().unwrap().success());
        }));
        done.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    assert!(removed.load(Ordering::Relaxed) > 0, "the end of the mount was not told");
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
}

/// The service manager kills it in the end: what is stored must not become a mount again that is
/// seen nowhere.
#[test]
fn a_mount_that_was_told_to_stop_is_not_stored() {
    let test = "a_mount_that_was_told_to_stop_is_not_stored";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(source.join("file"), "below").unwrap();
    let address = scratch.path().join("manager");
    let manager = UnixDatagram::bind(&address).unwrap();
    let mut command = Command::new(setup::PUMAPOOL);
    command.arg("mount").args([&source, &at]).args(["--foreground", "--threads", "4"]);
    command.env("NOTIFY_SOCKET", &address).env("FDSTORE", "100");
    let mut mount = Process::spawn(command, &[]).unwrap();
    mount.wait_for_line("READY", PATIENCE).unwrap();
    let open = File::open(at.join("file")).unwrap();
    let mut stored = BTreeMap::new();
    let mut stores = |count: usize| wait_for_stored(&manager, &mut stored, count);
    stores(3 + 4 + 1);
    mount.signal(Signal::TERM).unwrap();
    stores(0);
    // It is still served.
    assert!(mount.wait(Duration::ZERO).unwrap().is_none());
    assert_eq!(std::io::read_to_string(&open).unwrap(), "below");
    drop(open);
    assert!(mount.wait(PATIENCE).unwrap().unwrap().success());
}
