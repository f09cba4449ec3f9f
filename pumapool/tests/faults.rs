//! What users, networks and disks get wrong: each is one clear line, and nothing hangs or is lost.

mod setup;

use setup::{Lender, Mount, PATIENCE, can_run, pumapool, write_pages};
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
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
    refuses(&["lend", "--listen", &lender.address, "--capacity", "1MiB"], &["listens there"]);
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
    assert_eq!((mount.count("lender_connects"), mount.count("get_messages")), (0, 0));
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
    let before = lender.count("malformed_frames") + lender.count("refused_connections");
    assert!(knock(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").len() < 200);
    assert!(knock(&[0xff; 65536]).len() < 200);
    // A borrower of another version learns which one is spoken here.
    let hello = wire::Hello { magic: wire::MAGIC, protocol: 99.into(), role: wire::ROLE_MAIN.into(), session: [1; 16] };
    let header = wire::Header::new(wire::Kind::Hello, 0, size_of::<wire::Hello>(), 0);
    use zerocopy::IntoBytes;
    let answer = knock(&[header.as_bytes(), hello.as_bytes()].concat());
    assert!(String::from_utf8_lossy(&answer).contains(&wire::PROTOCOL.to_string()), "{answer:?}");
    assert!(wait_until(PATIENCE, || {
        lender.count("malformed_frames") + lender.count("refused_connections") >= before + 3
    }));
    assert!(wait_until(PATIENCE, || lender.count("connections") == 0));
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
