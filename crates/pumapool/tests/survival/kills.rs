//! The daemon is killed, or another program takes the mount over, while the mount is in use.

use crate::load::{seed, under_load};
use crate::setup::{self, Lender, Mount, PATIENCE, can_run, kill, pumapool, tool};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use testbed::{Line, Process, Scratch, wait_until};

fn killed_under_load(test: &str, options: &[&str], kills: u32) {
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let lender = Lender::start(scratch.path(), "64MiB", &[]);
    let options: Vec<_> = ["--lender", &lender.address].into_iter().chain(options.iter().copied()).collect();
    let mount = Mount::start(&source, &at, &options);
    under_load(&mount, &source, kills, |_| mount.kill_daemon());
    assert_eq!(mount.takeovers(), u64::from(kills));
    assert_eq!(mount.count(|of| of.bad_pages), 0);
    // A process that is killed in the middle of a frame leaves a part of one.
    let cut_short = lender.count(|of| of.malformed_frames);
    assert!(cut_short <= u64::from(kills), "{cut_short}");
}

#[test]
fn nothing_is_lost_with_write_through() {
    killed_under_load("nothing_is_lost_with_write_through", &[], 8);
}

#[test]
fn nothing_is_lost_of_what_is_passed_through() {
    let test = "nothing_is_lost_of_what_is_passed_through";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    // Open through all of it.
    let bytes = setup::write_pages(&source.join("reader"), 100, 1);
    let mount = Mount::start(&source, &at, &[]);
    let reader = File::open(at.join("reader")).unwrap();
    let read = |file: &File| {
        let mut read = vec![0; bytes.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        read
    };
    under_load(&mount, &source, 8, |_| {
        mount.kill_daemon();
        assert!(read(&reader) == bytes && read(&File::open(at.join("reader")).unwrap()) == bytes);
    });
    assert_eq!(mount.takeovers(), 8);
    let status = mount.status();
    println!("{:?}", status.mount);
    assert!(status.mount.passed_opens > 0, "of the last daemon");
}

/// A successor knows neither the reports that the previous daemon got, nor changes while there was
/// no daemon.
#[test]
fn attributes_that_changed_without_a_daemon_are_seen() {
    let test = "attributes_that_changed_without_a_daemon_are_seen";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(source.join("a"), b"first").unwrap();
    let mount = Mount::start(&source, &at, &["--attribute-timeout", "3600"]);
    let size = |directory: &Path| fs::metadata(directory.join("a")).unwrap().len();
    for kills in 1..=4 {
        assert!(wait_until(PATIENCE, || size(&at) == size(&source)));
        kill(mount.daemon_pid());
        File::options().append(true).open(source.join("a")).unwrap().write_all(b"more").unwrap();
        mount.wait_for("a takeover", |status| status.mount.takeovers == kills);
        assert!(wait_until(PATIENCE, || size(&at) == size(&source)), "after {kills} kills");
    }
}

/// A successor has no reason to have the kernel drop what the daemon before it has answered.
#[test]
fn what_the_kernel_caches_outlives_an_upgrade() {
    let test = "what_the_kernel_caches_outlives_an_upgrade";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    const PAGES: usize = 100;
    // Without a lender the kernel would read the backing file by itself.
    let lender = Lender::start(scratch.path(), "16MiB", &[]);
    for write_mode in ["through", "back"] {
        let directory = |name: &str| scratch.directory(&format!("{write_mode} {name}")).unwrap();
        let (source, at) = (directory("source"), directory("mount"));
        let file = source.join("file");
        let mut bytes = setup::write_pages(&file, PAGES, 1);
        // It ends within a page.
        bytes.truncate((PAGES - 1) * 4096 + 100);
        File::options().write(true).open(&file).unwrap().set_len(bytes.len() as u64).unwrap();
        let mount = Mount::start(&source, &at, &["--lender", &lender.address, "--write", write_mode]);
        let reads = || mount.status().mount.requests.get("read").copied().unwrap_or(0);
        for is_changed in [false, true] {
            if is_changed {
                // With the writeback cache the kernel keeps the size by itself.
                let offset = bytes.len() - if write_mode == "back" { 5000 } else { 100 };
                bytes.truncate(offset);
                bytes.extend_from_slice(&[9; 5000]);
                let changed = File::options().write(true).open(&file).unwrap();
                changed.write_all_at(&[9; 5000], offset as u64).unwrap();
            }
            let is_cached = || {
                let before = reads();
                let read = fs::read(at.join("file")).unwrap();
                read == bytes && reads() == before
            };
            let case = format!("{write_mode}, changed beside: {is_changed}");
            assert!(wait_until(PATIENCE, is_cached), "{case}: {}", mount.status());
            assert!(reads() > 0, "{case}: {}", mount.status());
            let output = pumapool(&["upgrade", at.to_str().unwrap()]);
            assert!(output.status.success(), "{case}: {output:?}");
            assert!(fs::read(at.join("file")).unwrap() == bytes, "{case}");
            let status = mount.status();
            // The new daemon's count: the kernel may have evicted some by itself meanwhile.
            let read_pages = status.borrower.read_pages;
            assert!(read_pages <= PAGES as u64 / 10, "{case}: {read_pages} pages were read again: {status}");
        }
        setup::umount(at.to_str().unwrap());
    }
}

/// A task that has walked by a name may ask for the older file when another daemon serves already.
#[test]
fn a_successor_sends_back_whoever_may_come_by_a_stale_name() {
    let test = "a_successor_sends_back_whoever_may_come_by_a_stale_name";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let mount = Mount::start(&source, &at, &[]);
    let held = ["replaced", "kept"].map(|name| {
        fs::write(source.join(name), b"old").unwrap();
        File::open(at.join(name)).unwrap()
    });
    // The daemon finds the name stale and has the kernel drop it.
    fs::write(source.join("other"), b"new").unwrap();
    fs::rename(source.join("other"), source.join("replaced")).unwrap();
    assert_eq!(fs::read(at.join("replaced")).unwrap(), b"new");
    kill(mount.daemon_pid());
    mount.wait_for("a takeover", |status| status.mount.takeovers == 1);
    let opens = || mount.status().mount.requests.get("open").copied().unwrap_or(0);
    for (file, expected) in held.iter().zip([2, 1]) {
        let before = opens();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        assert_eq!(fs::read(path).unwrap(), b"old", "its node stays the older file's");
        assert_eq!(opens() - before, expected, "sent back once, if the name was stale");
    }
    drop(held);
    setup::umount(at.to_str().unwrap());
}

#[test]
fn nothing_is_lost_with_write_back() {
    killed_under_load("nothing_is_lost_with_write_back", &["--write", "back"], 8);
}

#[test]
fn programs_do_not_notice_an_upgrade() {
    let test = "programs_do_not_notice_an_upgrade";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let newer = scratch.path().join("newer");
    fs::copy(setup::PUMAPOOL, &newer).unwrap();
    let mount = Mount::start(&source, &at, &[]);
    let at = at.to_str().unwrap();
    under_load(&mount, &source, 6, |time| match time % 3 {
        0 => {
            let output = pumapool(&["upgrade", at, "--binary", newer.to_str().unwrap()]);
            assert!(output.status.success(), "{output:?}");
            print!("{}", String::from_utf8_lossy(&output.stdout));
            let exe = fs::read_link(format!("/proc/{}/exe", mount.daemon_pid())).unwrap();
            assert_eq!(exe, newer);
        }
        // No program that could serve, or none at all: the one before it goes on.
        1 => {
            for other in ["/bin/false", "/etc", "/etc/passwd"] {
                let output = pumapool(&["upgrade", at, "--binary", other]);
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(!output.status.success() && said.contains(other), "{said}");
                let exe = fs::read_link(format!("/proc/{}/exe", mount.daemon_pid())).unwrap();
                assert_eq!(exe, newer);
            }
        }
        _ => {
            let before = mount.takeovers();
            mount.kill_daemon();
            assert!(testbed::wait_until(PATIENCE, || mount.takeovers() > before));
        }
    });
    let output = pumapool(&["upgrade", "/nonexistent"]);
    assert!(!output.status.success());
    setup::umount(at);
}

#[test]
fn fsx_does_not_notice_ten_kills() {
    let test = "fsx_does_not_notice_ten_kills";
    let (true, Some(fsx)) = (can_run(test), tool(test, "fsx")) else { return };
    const KILLS: u64 = 10;
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let lender = Lender::start(scratch.path(), "64MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address]);
    let config = scratch.path().join("fsx.toml");
    fs::write(&config, testbed::fsx_settings(1 << 20)).unwrap();
    let file = at.join("fsx");
    fs::write(&file, "").unwrap();
    let mut seed = u64::from(seed() as u32);
    let mut kills = 0;
    // One run after the other, until the kills are done; each begins with the file as the one
    // before left it.
    while kills < KILLS {
        let mut command = Command::new(&fsx);
        command.args(["-N", "3000", "-S", &seed.to_string(), "-f"]).arg(&config);
        command.arg("-P").arg(scratch.path()).arg(&file).stdin(Stdio::null()).stderr(Stdio::inherit());
        let mut process = Process::spawn(command, &[]).unwrap();
        while process.wait(Duration::from_millis(100)).unwrap().is_none() && kills < KILLS {
            mount.kill_daemon();
            kills += 1;
        }
        let mut said = String::new();
        while let Line::Text(line) = process.next_line(PATIENCE * 6) {
            said.push_str(&line);
            said.push('\n');
        }
        let status = process.wait(PATIENCE).unwrap().expect("it ends after its output");
        assert!(status.success(), "fsx found a difference (seed {seed}): {said}");
        seed += 1;
    }
    assert_eq!(mount.takeovers(), KILLS);
    assert_eq!(mount.count(|of| of.bad_pages), 0);
}
