//! `pumapool host-cache`, both sides as commands. tests/vm/host-cache tests both sides with a
//! virtual machine. Here the guest is this machine, whose disk is not an image.

mod setup;

use setup::{PATIENCE, PUMAPOOL, can_run, evict, key_file, kill, pumapool, write_pages};
use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use testbed::{Done, Process, Scratch, ask_daemon, wait_until, wait_until_ok};

const PAGES: usize = 600;
/// Of the daemon: fewer than those in a row at which its supervisor gives up.
const KILLS: u64 = 3;

fn start(arguments: &[&str]) -> Process {
    let mut command = Command::new(PUMAPOOL);
    command.args(["host-cache"]).args(arguments).arg("--foreground");
    let mut process = Process::spawn(command, &[]).unwrap();
    process.wait_for_line("READY", PATIENCE).unwrap();
    process
}

fn status_of<T: report::Reported>(process: &Process) -> T {
    let ask = || ask_daemon(process.pid(), PATIENCE).map_err(|error| std::io::Error::other(error.to_string()));
    wait_until_ok(PATIENCE, ask).unwrap()
}

fn host_of(process: &Process) -> report::Mount {
    status_of(process)
}

fn guest_of(process: &Process) -> report::Guest {
    status_of(process)
}

fn wait_for<T: report::Reported + std::fmt::Display>(what: &str, process: &Process, state: impl Fn(&T) -> bool) {
    let came = wait_until(PATIENCE, || state(&status_of(process)));
    assert!(came, "no {what}: {}", status_of::<T>(process));
}

/// The standard error of a failing `pumapool`.
fn refusal(arguments: &[&str]) -> String {
    let output = pumapool(arguments);
    assert!(!output.status.success(), "{arguments:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

struct Images {
    scratch: Scratch,
    listen: String,
}

impl Images {
    fn new(test: &str) -> Images {
        let scratch = Scratch::new(test).unwrap();
        let below = scratch.directory("images").unwrap();
        scratch.directory("served").unwrap();
        write_pages(&below.join("disk.img"), PAGES, 3);
        let listen = format!("unix:{}", scratch.path().join("host.sock").display());
        Images { scratch, listen }
    }

    fn path(&self, name: &str) -> String {
        self.scratch.path().join(name).to_str().unwrap().to_owned()
    }

    fn serve(&self) -> Process {
        let (images, served, guest) = (self.path("images"), self.path("served"), format!("disk.img={}", key_file()));
        start(&["host", "--images", &images, &served, "--listen", &self.listen, "--guest", &guest])
    }
}

#[test]
fn a_guests_key_that_is_gone_ends_no_mount_and_no_socket_is_left() {
    let test = "a_guests_key_that_is_gone_ends_no_mount_and_no_socket_is_left";
    if !can_run(test) {
        return;
    }
    let images = Images::new(test);
    let key = images.path("key");
    fs::copy(key_file(), &key).unwrap();
    let (below, served, guest) = (images.path("images"), images.path("served"), format!("disk.img={key}"));
    let arguments = ["host", "--images", &below, &served, "--listen", &images.listen, "--guest", &guest];
    let mut host = start(&arguments);
    let socket = images.listen.strip_prefix("unix:").unwrap().to_owned();
    fs::remove_file(&key).unwrap();
    kill(host_of(&host).daemon_pid);
    wait_for("takeover", &host, |status: &report::Mount| status.mount.takeovers == 1);
    assert_eq!(fs::read(Path::new(&served).join("disk.img")).unwrap().len(), PAGES * 4096);
    let problem = host_of(&host).problems[0].clone();
    assert!(problem.contains(&key), "{problem}");
    fs::copy(key_file(), &key).unwrap();
    wait_for("guest", &host, |status: &report::Mount| status.problems.is_empty());
    assert_eq!(host_of(&host).guests.unwrap().list.len(), 1);
    // Ended in order it leaves nothing; killed, it leaves a socket that the next one replaces.
    host.signal(rustix::process::Signal::TERM).unwrap();
    assert!(host.wait(PATIENCE).unwrap().unwrap().success());
    assert!(!Path::new(&socket).exists(), "{socket}");
}

#[test]
fn what_a_guest_evicts_reaches_its_host_and_only_that() {
    let test = "what_a_guest_evicts_reaches_its_host_and_only_that";
    if !can_run(test) {
        return;
    }
    let images = Images::new(test);
    let host = images.serve();
    // The image can be read and written, as through any mount.
    let image = Path::new(&images.path("served")).join("disk.img");
    let bytes = fs::read(&image).unwrap();
    assert!(bytes == fs::read(Path::new(&images.path("images")).join("disk.img")).unwrap());

    let guest = ["guest", "--fs", "/", "--to", &images.listen, "--key", key_file()];
    if rustix::fs::major(fs::metadata("/").unwrap().dev()) == 0 {
        // A machine whose root is on no disk of its own: that is told.
        let said = refusal(&[&["host-cache"], &guest[..]].concat());
        assert!(said.contains("only a file system on a whole disk"), "{said}");
        // Which disk this machine has is not the test's to choose.
        eprintln!("SKIPPED {test}: the root is on no disk of its own");
        return;
    }
    let guest = start(&guest);
    wait_for("connection", &guest, |status: &report::Guest| status.connected);
    let device = |path: &&Path| fs::metadata(path).is_ok_and(|found| found.dev() == fs::metadata("/").unwrap().dev());
    let folder = ["/var/tmp", "/tmp", "/"].map(Path::new).into_iter().find(device).unwrap();
    let own = Scratch::new_in(folder, test).unwrap();
    let file = own.path().join("file");
    write_pages(&file, PAGES, 4);
    let sent = |process: &Process| guest_of(process).guest.sent_pages;
    let evict_until_sent = |pages: u64| {
        let before = sent(&guest);
        let is_sent = || {
            fs::File::open(&file).unwrap().sync_all().unwrap();
            fs::read(&file).unwrap();
            evict(&file);
            sent(&guest) >= before + pages
        };
        assert!(wait_until(PATIENCE, is_sent), "{}", guest_of(&guest));
    };
    evict_until_sent(PAGES as u64);
    // Nobody has read these through the mount, if the image reaches as far at all.
    wait_for("answers", &guest, |status: &report::Guest| status.guest.unknown_pages >= PAGES as u64 / 2);
    let count = |number: fn(&report::GuestCounts) -> u64| number(&guest_of(&guest).guest);
    // Read, and cached for a while.
    fs::read(&file).unwrap();
    assert!(wait_until(PATIENCE, || count(|of| of.held_pages) > 0), "{}", guest_of(&guest));
    let of_host = host_of(&host).guests.unwrap().list[0].clone();
    assert!(of_host.connected);
    assert!(of_host.demoted_pages >= PAGES as u64, "{of_host:?}");
    for (kind, process, expected) in [("guest /", &guest, "connected"), ("disk.img", &host, "guests      connect at")] {
        let said = String::from_utf8(pumapool(&["status"]).stdout).unwrap();
        assert!(said.contains(kind) && said.contains(expected), "{} {said}", process.pid());
    }

    // Another daemon takes the images over; the guest finds it. Killed daemons have the image open
    // through their own mount, more often than not.
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _done = Done(&done);
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                fs::read(&file).unwrap();
                evict(&file);
            }
        });
        for kills in 1..=KILLS {
            let sent_before = sent(&guest);
            assert!(wait_until(PATIENCE, || sent(&guest) > sent_before), "{}", guest_of(&guest));
            kill(host_of(&host).daemon_pid);
            wait_for("other connection", &guest, |status: &report::Guest| {
                status.guest.connects > kills && status.connected
            });
        }
    });
    evict_until_sent(PAGES as u64);
    assert!(fs::read(&image).unwrap() == bytes);

    // Without a host a guest waits for one, and taps nothing.
    assert!(pumapool(&["umount", &images.path("served")]).status.success());
    wait_for("loss", &guest, |status: &report::Guest| !status.connected);
    let seen = count(|of| of.evicted_pages);
    evict(&file);
    assert_eq!(count(|of| of.evicted_pages), seen);
    let _host = images.serve();
    wait_for("return", &guest, |status: &report::Guest| status.connected);
}

#[test]
fn what_cannot_be_is_told() {
    let test = "what_cannot_be_is_told";
    if !can_run(test) {
        return;
    }
    let images = Images::new(test);
    let (folder, served, key) = (images.path("images"), images.path("served"), key_file());
    fs::write(Path::new(&folder).join("other.qcow2"), b"QFI\xfb\0\0\0\x03").unwrap();
    let host = |listen: &str, guests: &[&str]| {
        let mut arguments =
            vec!["host-cache", "host", "--images", &folder, &served, "--listen", listen, "--foreground"];
        arguments.extend(guests.iter().flat_map(|guest| ["--guest", guest]));
        refusal(&arguments)
    };
    let (qcow2, missing) = (format!("other.qcow2={key}"), format!("missing.img={key}"));
    for (listen, guests, expected) in [
        (images.listen.as_str(), vec![qcow2.as_str()], "qemu-img convert -O raw"),
        (&images.listen, vec![&missing], "cannot read the image missing.img"),
        (&images.listen, vec!["disk.img", "other.qcow2"], "key of its own"),
        ("127.0.0.1:7171", vec!["disk.img"], "pumapool key new"),
        ("127.0.0.1:7171", vec!["disk.img=/nowhere"], "/nowhere"),
        ("127.0.0.1:0", vec!["disk.img"], "choose a port"),
    ] {
        let said = host(listen, &guests);
        assert!(said.contains(expected), "{said}");
    }
    let said = String::from_utf8(
        pumapool(&["host-cache", "host", "--images", &folder, "--listen", "unix:x", "--guest", "../disk"]).stderr,
    )
    .unwrap();
    assert!(said.contains("not a path within"), "{said}");
    let said = refusal(&["host-cache", "guest", "--fs", "/proc", "--to", "unix:x", "--foreground"]);
    assert!(said.contains("/proc is on no block device"), "{said}");
    let said = refusal(&["host-cache", "guest", "--fs", "/", "--to", "127.0.0.1:1", "--foreground"]);
    assert!(said.contains("--trust-network"), "{said}");
}

/// The listener at a Unix socket could read what is evicted. Without a key only root and the
/// guest's own user are believed.
#[test]
fn another_users_host_gets_nothing_without_a_key() {
    let test = "another_users_host_gets_nothing_without_a_key";
    if !can_run(test) {
        return;
    }
    const OTHER_USER: u32 = 65_534;
    if rustix::fs::major(fs::metadata("/").unwrap().dev()) == 0 {
        eprintln!("SKIPPED {test}: the root is on no disk of its own");
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (path, log) = (scratch.path().join("host.sock"), scratch.path().join("log"));
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o777)).unwrap();
    // The kernel notes who listens: here a thread that is another user.
    let listen = || {
        // SAFETY: the call changes the ids of this thread alone, and no memory is passed.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, OTHER_USER, OTHER_USER, OTHER_USER) }, 0);
        UnixListener::bind(&path).unwrap()
    };
    let listener = std::thread::scope(|scope| scope.spawn(listen).join().unwrap());
    let to = format!("unix:{}", path.display());
    let mut command = Command::new(PUMAPOOL);
    command.args(["host-cache", "guest", "--fs", "/", "--to", &to, "--foreground"]).env_remove("PUMAPOOL_KEY_FILE");
    command.stderr(fs::File::create(&log).unwrap());
    let mut guest = Process::spawn(command, &[]).unwrap();
    guest.wait_for_line("READY", PATIENCE).unwrap();
    let (mut peer, _) = listener.accept().unwrap();
    let mut sent = Vec::new();
    peer.read_to_end(&mut sent).unwrap();
    assert!(sent.is_empty(), "{} bytes were sent to another user", sent.len());
    let said = || fs::read_to_string(&log).unwrap();
    let is_told = || said().contains(&format!("user {OTHER_USER} listens")) && said().contains("--key");
    assert!(wait_until(PATIENCE, is_told), "{}", said());
    assert!(!guest_of(&guest).connected);
}
