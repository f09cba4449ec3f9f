//! The work of the supervisor, and the mount without it.

use crate::setup::{self, Mount, PATIENCE, can_run, kill, pumapool};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::process::Command;
use std::time::Duration;
use testbed::{Scratch, wait_until};

#[test]
fn without_its_supervisor_the_daemon_serves_on() {
    let test = "without_its_supervisor_the_daemon_serves_on";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let log = scratch.path().join("log");
    let at_text = at.to_str().unwrap();
    let output = pumapool(&["mount", source.to_str().unwrap(), at_text, "--log-file", log.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let status = || setup::mounts().into_iter().find(|status| status.mountpoint == at_text);
    let before = status().unwrap();
    let (supervisor, daemon) = (before.pid, before.daemon_pid);
    assert_ne!(supervisor, daemon);
    kill(supervisor);
    // It is a child of nobody here: its end is seen by what the daemon says of itself.
    assert!(wait_until(PATIENCE, || status().is_some_and(|status| status.pid == daemon)), "{:?}", status());
    fs::write(at.join("file"), "content").unwrap();
    assert_eq!(fs::read(source.join("file")).unwrap(), b"content");
    let said = fs::read_to_string(&log).unwrap();
    assert_eq!(said.lines().filter(|line| line.contains("supervisor of this mount is gone")).count(), 1, "{said}");
    let output = pumapool(&["upgrade", at_text]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("supervisor"), "{output:?}");
    setup::umount(at_text);
    assert!(!at.join("file").exists() && status().is_none());
}

/// Files that a successor needs must not be in the mount, which no daemon serves while the
/// successor starts.
#[test]
fn nothing_that_starts_a_daemon_waits_for_the_mount() {
    let test = "nothing_that_starts_a_daemon_waits_for_the_mount";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, log) = (scratch.directory("source").unwrap(), scratch.path().join("log"));
    let (folder, program) = (source.join("folder"), source.join("pumapool"));
    fs::create_dir(&folder).unwrap();
    fs::copy(setup::PUMAPOOL, &program).unwrap();
    let [source_text, program_text] = [&source, &program].map(|path| path.to_str().unwrap());
    let key = source.join("pool.key");
    assert!(pumapool(&["key", "new", key.to_str().unwrap()]).status.success());
    // Given in a folder of what is mounted, over which it is mounted. Of attributes nothing is
    // believed: whoever looks asks the daemon.
    let make = |options: &[&str]| {
        let mut command = Command::new(setup::PUMAPOOL);
        command.args(["mount", "..", "--attribute-timeout", "0", "--log-file", log.to_str().unwrap()]).args(options);
        command.current_dir(&folder).output().unwrap()
    };
    let refused = make(&["--key", "../pool.key"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("put it elsewhere"), "{refused:?}");
    let made = make(&[]);
    assert!(made.status.success(), "{made:?}");
    let status = || setup::mounts().into_iter().find(|status| status.mountpoint == source_text);
    let refused = pumapool(&["upgrade", source_text, "--binary", program_text]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("put it elsewhere"), "{refused:?}");
    kill(status().unwrap().daemon_pid);
    let is_served = || status().is_some_and(|status| status.mount.takeovers == 1);
    let came = wait_until(PATIENCE, is_served);
    if !came {
        // A process that waits for it waits for ever: it goes with its supervisor.
        status().into_iter().for_each(|status| kill(status.pid));
    }
    assert!(came, "{}", fs::read_to_string(&log).unwrap());
    assert_eq!(fs::read(&program).unwrap().len() as u64, fs::metadata(setup::PUMAPOOL).unwrap().len());
    setup::umount(source_text);
}

#[test]
fn a_daemon_that_never_serves_is_not_started_for_ever() {
    let test = "a_daemon_that_never_serves_is_not_started_for_ever";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(source.join("file"), "below").unwrap();
    let mut mount = Mount::start(&source, &at, &[]);
    let supervisor = mount.process.pid();
    let mut killed = BTreeSet::new();
    let ended = wait_until(PATIENCE, || {
        for child in os::process::children(supervisor) {
            if killed.insert(child) {
                kill(child);
            }
        }
        mount.process.wait(Duration::ZERO).unwrap().is_some()
    });
    assert!(ended, "after {} daemons", killed.len());
    assert!(!mount.process.wait(PATIENCE).unwrap().unwrap().success());
    println!("{} daemons", killed.len());
    assert!((5..12).contains(&killed.len()), "{} daemons", killed.len());
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0, "no dead mount is left");
}

#[test]
fn signals_to_the_supervisor_end_the_mount() {
    let test = "signals_to_the_supervisor_end_the_mount";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let mut mount = Mount::start(&source, &at, &[]);
    mount.kill_daemon();
    // A service manager signals both.
    let daemon = rustix::process::Pid::from_raw(mount.daemon_pid() as i32).unwrap();
    rustix::process::kill_process(daemon, Signal::TERM).unwrap();
    mount.process.signal(Signal::TERM).unwrap();
    assert!(mount.process.wait(PATIENCE).unwrap().unwrap().success());
    assert!(!setup::PUMAPOOL.is_empty() && fs::read_dir(&at).unwrap().next().is_none());
}

/// A supervisor that is stopped keeps nobody waiting, and keeps all that is open when it goes on.
#[test]
fn a_stopped_supervisor_is_told_later_what_is_open() {
    let test = "a_stopped_supervisor_is_told_later_what_is_open";
    if !can_run(test) {
        return;
    }
    const OPEN: usize = 200;
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(source.join("file"), "below").unwrap();
    let mut mount = Mount::start(&source, &at, &[]);
    let undelivered = |status: &report::Mount| status.mount.undelivered_descriptors;
    let open = || File::open(at.join("file")).unwrap();
    mount.process.signal(Signal::STOP).unwrap();
    let stopped = wait_until(PATIENCE, || mount.status().problems.concat().contains("kill -CONT"));
    assert!(stopped, "{}", mount.status());
    // Until its socket has no more room.
    let mut files = vec![open()];
    while undelivered(&mount.status()) == 0 {
        (0..1000).for_each(|_| drop(open()));
        files.push(open());
    }
    files.extend((0..OPEN).map(|_| open()));
    assert!(undelivered(&mount.status()) >= OPEN as u64);
    let refused = pumapool(&["upgrade", at.to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is it stopped?"), "{refused:?}");
    mount.process.signal(Signal::CONT).unwrap();
    mount.wait_for("the supervisor", |status| undelivered(status) == 0);
    mount.kill_daemon();
    for mut file in &files {
        assert_eq!(std::io::read_to_string(&mut file).unwrap(), "below");
    }
    assert!(mount.status().problems.is_empty(), "{}", mount.status());
}

/// A daemon that does not answer is told of, and left alone: whoever stopped it may look at it.
#[test]
fn a_stopped_daemon_is_told_of() {
    let test = "a_stopped_daemon_is_told_of";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let log = scratch.path().join("log");
    let log_text = || fs::read_to_string(&log).unwrap();
    let [source_text, at_text] = [&source, &at].map(|path| path.to_str().unwrap());
    fs::write(source.join("file"), "below").unwrap();
    let log_path = log.to_str().unwrap();
    let made = pumapool(&["mount", source_text, at_text, "--log", "debug", "--log-file", log_path]);
    // Lines below a warning are only in the log.
    assert!(made.status.success() && made.stderr.is_empty(), "{made:?}");
    let status = || setup::mounts().into_iter().find(|status| status.mountpoint == at_text);
    let before = status().unwrap();
    let number = before.daemon_pid;
    let daemon = rustix::process::Pid::from_raw(number as i32).unwrap();
    let signal = |signal| rustix::process::kill_process(daemon, signal).unwrap();
    signal(Signal::STOP);
    let said = format!("kill -CONT {number}");
    let is_told = wait_until(PATIENCE, || log_text().contains(&said));
    let output = pumapool(&["status"]);
    signal(Signal::CONT);
    assert!(is_told, "{}", log_text());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let told = text.lines().find(|line| line.contains(&said)).unwrap_or_else(|| panic!("{text}"));
    assert!(told.starts_with(&format!("mount (pid {}) does not answer", before.pid)), "{told}");
    assert!(wait_until(PATIENCE, || log_text().contains("the daemon answers again")), "{}", log_text());
    assert_eq!(status().unwrap().daemon_pid, number);
    // Processes that use a mount are named.
    let file = File::open(at.join("file")).unwrap();
    let refused = pumapool(&["umount", at_text]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains(&format!("({})", std::process::id())), "{said}");
    drop(file);
    setup::umount(at_text);
}
