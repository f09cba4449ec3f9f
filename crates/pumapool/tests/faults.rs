//! Faults of users, networks and disks: each leads to one clear line, and nothing hangs or is lost.

mod setup;

use rustix::process::Signal;
use setup::{Lender, Mount, PATIENCE, can_run, pumapool, write_pages};
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use testbed::{Scratch, wait_until};

/// The command fails with one line on standard error, in which each of `words` occurs.
fn refuses(arguments: &[&str], words: &[&str]) {
    let output = pumapool(arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{arguments:?} was accepted");
    assert!(!said.contains("panicked"), "{said}");
    let lines: Vec<_> = said.lines().filter(|line| line.starts_with("pumapool: ")).collect();
    assert_eq!(lines.len(), 1, "{arguments:?} said: {said}");
    for word in words {
        assert!(lines[0].contains(word), "{arguments:?} said {:?}, without {word:?}", lines[0]);
    }
}

#[test]
fn mounting_what_cannot_be_mounted() {
    let test = "mounting_what_cannot_be_mounted";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(scratch.path().join("file"), "").unwrap();
    fs::create_dir(source.join("inside")).unwrap();
    let path = |name: &str| scratch.path().join(name).to_str().unwrap().to_owned();
    let (source_text, at_text) = (source.to_str().unwrap(), at.to_str().unwrap());
    refuses(&["mount", &path("nothing"), at_text], &["nothing"]);
    refuses(&["mount", &path("file"), at_text], &["file", "director"]);
    refuses(&["mount", source_text, &path("nothing")], &["nothing"]);
    refuses(&["mount", source_text, &path("source/inside")], &["inside"]);
    refuses(&["umount", at_text], &["mount"]);
    let mount = Mount::start(&source, &at, &[]);
    refuses(&["mount", source_text, at_text], &["mount"]);
    drop(mount);
    assert!(fs::read_dir(&at).unwrap().next().is_none());
}

#[test]
fn lending_what_cannot_be_lent() {
    let test = "lending_what_cannot_be_lent";
    let scratch = Scratch::new(test).unwrap();
    let socket = format!("unix:{}", scratch.path().join("socket").display());
    refuses(&["lend", "--listen", &socket, "--capacity", "900TiB"], &["this machine", "choose less"]);
    refuses(&["lend", "--listen", "unix:/nonexistent/folder/socket", "--capacity", "1MiB"], &["/nonexistent"]);
    let lender = Lender::listen("127.0.0.1:0", "16MiB", &[]);
    refuses(&["lend", "--listen", &lender.address, "--capacity", "1MiB", "--trust-network"], &["listens there"]);
    let lender = Lender::listen(&socket, "16MiB", &[]);
    refuses(&["lend", "--listen", &lender.address, "--capacity", "1MiB"], &["listens there"]);
}

#[test]
fn in_the_background_the_caller_learns_how_it_went() {
    let test = "in_the_background_the_caller_learns_how_it_went";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let source = scratch.directory("source").unwrap();
    fs::write(source.join("file"), "below").unwrap();
    let source_text = source.to_str().unwrap();
    // In place: over the directory itself.
    let output = pumapool(&["mount", source_text]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("READY"));
    assert_eq!(fs::read_to_string(source.join("file")).unwrap(), "below");
    fs::write(source.join("new"), "through").unwrap();
    let kind = Command::new("stat").args(["-f", "-c", "%T", source_text]).output().unwrap();
    assert!(String::from_utf8_lossy(&kind.stdout).starts_with("fuse"), "the mount covers it");
    // In use, it stays; then it goes, and the daemon with it.
    let held = fs::File::open(source.join("file")).unwrap();
    refuses(&["umount", source_text], &["in use"]);
    drop(held);
    let output = pumapool(&["umount", source_text]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::read_to_string(source.join("new")).unwrap(), "through");
}

#[test]
fn a_lender_that_speaks_nonsense_is_no_lender() {
    let test = "a_lender_that_speaks_nonsense_is_no_lender";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), 50, 40);
    let socket = scratch.path().join("nonsense");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let address = format!("unix:{}", socket.display());
    let mount = Mount { process: start(&source, &at, &address), path: at.clone() };
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    setup::evict(&at.join("file"));
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    assert_eq!((mount.count(|of| of.lender_connects), mount.count(|of| of.get_messages)), (0, 0));
}

/// A lender that greets, takes what is put, and answers a get one byte at a time, for ever.
fn trickle(mut stream: UnixStream) -> std::io::Result<()> {
    use wire::{Header, Kind};
    use zerocopy::{FromZeros, IntoBytes};
    loop {
        let mut header = Header::new_zeroed();
        stream.read_exact(header.as_mut_bytes())?;
        let mut body = vec![0; header.body_bytes.get() as usize];
        stream.read_exact(&mut body)?;
        let (request, items) = (header.request.get(), usize::from(header.items.get()));
        match header.validate() {
            Ok(Kind::Hello) => {
                let welcome = wire::Welcome { protocol: wire::PROTOCOL.into(), ..FromZeros::new_zeroed() };
                stream.write_all(Header::new(Kind::Welcome, 0, size_of_val(&welcome), 0).as_bytes())?;
                stream.write_all(welcome.as_bytes())?;
            }
            Ok(Kind::Put) => {
                stream.write_all(Header::new(Kind::PutReply, items, items, request).as_bytes())?;
                stream.write_all(&vec![1; items])?;
            }
            Ok(Kind::Get) => {
                let item = wire::GetItem { status: wire::STATUS_PAGE, ..FromZeros::new_zeroed() };
                let body_bytes = items * (size_of_val(&item) + 4096);
                stream.write_all(Header::new(Kind::GetReply, items, body_bytes, request).as_bytes())?;
                for _ in 0..body_bytes {
                    std::thread::sleep(Duration::from_millis(200));
                    stream.write_all(&[1])?;
                }
            }
            _ => {}
        }
    }
}

#[test]
fn a_lender_that_trickles_holds_nobody_up() {
    let test = "a_lender_that_trickles_holds_nobody_up";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), 50, 41);
    let socket = scratch.path().join("trickle");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || trickle(stream.unwrap()));
        }
    });
    let address = format!("unix:{}", socket.display());
    let mount = Mount::start(&source, &at, &["--lender", &address, "--fill", "evict", "--trust-network"]);
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    mount.evict(&at.join("file"), 50);
    let before = Instant::now();
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    // Not a claim about speed: a page alone would take a quarter of an hour.
    assert!(before.elapsed() < PATIENCE, "the read took {:?}", before.elapsed());
    assert!(mount.count(|of| of.get_failures) > 0);
}

#[test]
fn signals_and_failures_leave_no_dead_mount() {
    let test = "signals_and_failures_leave_no_dead_mount";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(source.join("file"), "below").unwrap();
    let (source_text, at_text) = (source.to_str().unwrap(), at.to_str().unwrap());
    refuses(&["mount", source_text, at_text, "--log-file", "/nonexistent/log"], &["/nonexistent/log"]);
    assert!(!at.join("file").exists());
    // (Not SIGHUP, which ends a daemon only where its terminal has gone: configuration.rs.)
    for signal in [Signal::TERM, Signal::INT, Signal::QUIT] {
        let mut mount = Mount::start(&source, &at, &[]);
        assert!(at.join("file").exists());
        mount.process.signal(signal).unwrap();
        assert!(mount.process.wait(PATIENCE).unwrap().unwrap().success(), "{signal:?}");
        assert!(!at.join("file").exists(), "{signal:?}");
    }
    // Nobody reads what the daemon logs, or prints.
    let output = pumapool(&["mount", source_text, at_text, "--log-file", "/dev/full"]);
    assert!(output.status.success(), "{output:?}");
    assert!(at.join("file").exists());
    setup::umount(at_text);
    assert!(!at.join("file").exists());
}

/// A stat uses the mount for as long as the system call takes. That is no reason to keep it.
#[test]
fn whoever_only_looks_at_files_keeps_no_mount() {
    let test = "whoever_only_looks_at_files_keeps_no_mount";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(source.join("file"), "").unwrap();
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !has_ended.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    let _ = fs::metadata(at.join("file"));
                    // One after the other without end would leave no moment for it.
                    std::thread::sleep(began.elapsed().max(Duration::from_micros(200)));
                }
            });
        }
        let rounds = std::panic::catch_unwind(|| {
            for round in 0..25 {
                let _mount = Mount::start(&source, &at, &["--attribute-timeout", "0"]);
                let output = pumapool(&["umount", at.to_str().unwrap()]);
                assert!(output.status.success(), "round {round}: {output:?}");
            }
        });
        has_ended.store(true, Ordering::Relaxed);
        rounds.unwrap();
    });
}

#[test]
fn without_the_device_nothing_is_mounted() {
    let test = "without_the_device_nothing_is_mounted";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let source = scratch.directory("source").unwrap();
    let script =
        format!("mount -t tmpfs none /dev && exec {} mount --foreground {}", setup::PUMAPOOL, source.display());
    let output = Command::new("unshare").args(["--mount", "sh", "-c", &script]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("/dev/fuse") && said.contains("modprobe"), "{said}");
}

#[test]
fn a_disk_that_fails_fails_the_read_and_nothing_else() {
    let test = "a_disk_that_fails_fails_the_read_and_nothing_else";
    if !can_run(test) {
        return;
    }
    const FILE_BYTES: u64 = 12 << 20;
    const CHUNK_BYTES: usize = 64 << 10;
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let image = scratch.path().join("image");
    let run = |program: &str, arguments: &[&std::ffi::OsStr]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    };
    fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    run("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), image.as_os_str()]);
    let mount_image = || run("mount", &["-o".as_ref(), "loop".as_ref(), image.as_os_str(), source.as_os_str()]);
    mount_image();
    let bytes = write_pages(&source.join("file"), FILE_BYTES as usize / 4096, 42);
    run("umount", &[source.as_os_str()]);
    mount_image();
    // The second half of the disk goes: whoever reads it gets EIO.
    fs::File::options().write(true).open(&image).unwrap().set_len(8 << 20).unwrap();
    let devices = Command::new("losetup").args(["-n", "-O", "NAME", "-j"]).arg(&image).output().unwrap();
    run("losetup", &["-c".as_ref(), String::from_utf8_lossy(&devices.stdout).trim().as_ref()]);

    let lender = Lender::start(scratch.path(), "64MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address]);
    let [through, below] = [&at, &source].map(|folder| {
        let file = fs::File::open(folder.join("file")).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        let chunks = (0..FILE_BYTES).step_by(CHUNK_BYTES).map(|offset| {
            let mut chunk = vec![0; CHUNK_BYTES];
            let read = file.read_exact_at(&mut chunk, offset);
            read.map(|()| chunk == bytes[offset as usize..][..CHUNK_BYTES]).map_err(|error| error.raw_os_error())
        });
        chunks.collect::<Vec<_>>()
    });
    assert_eq!(through, below);
    assert!(through.contains(&Err(Some(5))) && !through.contains(&Ok(false)), "{through:?}");
    drop(mount);
    run("umount", &[source.as_os_str()]);
}

#[test]
fn a_limit_on_the_size_of_files_ends_no_daemon() {
    const LIMIT_BYTES: u64 = 4 << 30;
    let test = "a_limit_on_the_size_of_files_ends_no_daemon";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    // A daemon that has this right raises the limit.
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_resource", "prlimit", &format!("--fsize={LIMIT_BYTES}")]);
    command.args([setup::PUMAPOOL, "mount", "--foreground"]).args([&source, &at]);
    let mut process = testbed::Process::spawn(command, &[]).unwrap();
    process.wait_for_line("READY", PATIENCE).unwrap();
    let mount = Mount { process, path: at.clone() };
    let before = mount.daemon_pid();
    let file = fs::File::options().create(true).truncate(true).read(true).write(true).open(at.join("file")).unwrap();
    let beyond = [file.write_at(b"beyond", LIMIT_BYTES).map(drop), file.set_len(LIMIT_BYTES + 1)];
    for result in beyond {
        assert_eq!(result.unwrap_err().kind(), std::io::ErrorKind::FileTooLarge);
    }
    file.write_all_at(b"within", 0).unwrap();
    assert_eq!(fs::read(source.join("file")).unwrap(), b"within");
    assert_eq!((mount.daemon_pid(), mount.takeovers()), (before, 0), "one daemon has served it all");
}

fn start(source: &Path, at: &Path, lender: &str) -> testbed::Process {
    let mut command = Command::new(setup::PUMAPOOL);
    command.arg("mount").args([source, at]).args(["--foreground", "--lender", lender]);
    let mut process = testbed::Process::spawn(command, &[]).unwrap();
    process.wait_for_line("READY", PATIENCE).unwrap();
    process
}

#[test]
fn a_stranger_at_the_lenders_door_is_sent_away() {
    let test = "a_stranger_at_the_lenders_door_is_sent_away";
    let scratch = Scratch::new(test).unwrap();
    let lender = Lender::start(scratch.path(), "16MiB", &[]);
    let path = lender.address.strip_prefix("unix:").unwrap().to_owned();
    let knock = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer); // ends, because the lender hangs up
        answer
    };
    let before = lender.count(|of| of.malformed_frames) + lender.count(|of| of.refused_connections);
    assert!(knock(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").len() < 200);
    assert!(knock(&[0xff; 65536]).len() < 200);
    // A borrower of another version learns which one is spoken here.
    let hello = wire::Hello { magic: wire::MAGIC, protocol: 99.into(), role: wire::ROLE_MAIN.into(), session: [1; 16] };
    let header = wire::Header::new(wire::Kind::Hello, 0, size_of::<wire::Hello>(), 0);
    use zerocopy::IntoBytes;
    let answer = knock(&[header.as_bytes(), hello.as_bytes()].concat());
    assert!(String::from_utf8_lossy(&answer).contains(&wire::PROTOCOL.to_string()), "{answer:?}");
    assert!(wait_until(PATIENCE, || {
        lender.count(|of| of.malformed_frames) + lender.count(|of| of.refused_connections) >= before + 3
    }));
    assert!(wait_until(PATIENCE, || lender.count(|of| of.connections) == 0));
}

#[test]
fn names_offsets_and_errors_pass_through_unchanged() {
    let test = "names_offsets_and_errors_pass_through_unchanged";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let at = scratch.directory("mount").unwrap();
    // A file system of its own below, small enough to fill.
    let source = scratch.directory("source").unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "puma-test"]).arg(&source).status();
    assert!(mounted.unwrap().success());
    let lender = Lender::start(scratch.path(), "16MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address]);

    let name = OsStr::from_bytes(b"not \xff\xfe utf-8 \n");
    fs::write(at.join(name), "content").unwrap();
    assert_eq!(fs::read(source.join(name)).unwrap(), b"content");
    assert!(fs::read_dir(&at).unwrap().any(|entry| entry.unwrap().file_name() == name));

    for (offset, bytes) in [(i64::MAX as u64, 1usize), (i64::MAX as u64 - 4096, 8192), (1 << 62, 1)] {
        let both = [&source, &at].map(|folder| {
            let file = fs::File::options().create(true).truncate(true).write(true).read(true).open(folder.join("far"));
            let file = file.unwrap();
            let written = file.write_at(&vec![1; bytes], offset).map_err(|error| error.raw_os_error());
            let read = file.read_at(&mut vec![0; bytes], offset).map_err(|error| error.raw_os_error());
            let length = file.set_len(offset).map_err(|error| error.raw_os_error());
            (written, read, length)
        });
        assert_eq!(both[0], both[1], "at offset {offset}");
    }
    fs::remove_file(at.join("far")).unwrap();

    let full = fs::write(at.join("large"), vec![1; 8 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    fs::remove_file(at.join("large")).unwrap();
    // The kernel tells of the last close when it has been answered.
    let free_pages = || rustix::fs::statvfs(&source).unwrap().f_bavail;
    assert!(wait_until(PATIENCE, || free_pages() > 500), "{} pages are free", free_pages());
    let bytes = write_pages(&at.join("file"), 100, 50);
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    drop(mount);
    assert!(fs::read(source.join("file")).unwrap() == bytes);
    assert!(Command::new("umount").arg(&source).status().unwrap().success());
}

#[test]
fn doctor_says_what_works() {
    let output = pumapool(&["doctor", "--json"]);
    let findings: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = findings.as_array().unwrap();
    assert!(findings.iter().any(|finding| finding["what"] == "eviction tap"));
    for finding in findings {
        assert!(!finding["finding"].as_str().unwrap().is_empty() && finding["works"].is_boolean(), "{finding}");
    }
}
