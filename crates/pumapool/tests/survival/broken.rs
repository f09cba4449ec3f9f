//! The configuration of the pool is broken when the daemon dies. The successor still serves the
//! mount, reports the problem, and recovers by itself.

use crate::setup::{self, Lender, Mount, PATIENCE, can_run, kill};
use report::{Mount as Status, Populate};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use testbed::{Process, Scratch, ask_daemon, wait_until};

fn has_problem(status: &Status, about: &str) -> bool {
    status.problems.iter().any(|problem| problem.contains(about))
}

#[test]
fn a_key_that_cannot_be_read_ends_no_mount() {
    let test = "a_key_that_cannot_be_read_ends_no_mount";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(source.join("file"), "below").unwrap();
    let key = scratch.path().join("key");
    let good = fs::read(setup::key_file()).unwrap();
    let write = |bytes: &[u8], mode: u32| {
        fs::write(&key, bytes).unwrap();
        fs::set_permissions(&key, Permissions::from_mode(mode)).unwrap();
    };
    write(&good, 0o600);
    let lender = Lender::start(scratch.path(), "16MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address, "--key", key.to_str().unwrap()]);
    let breaks: [&dyn Fn(); 3] =
        [&|| fs::remove_file(&key).unwrap(), &|| write(&good, 0o644), &|| write(&good[..20], 0o600)];
    for break_it in breaks {
        break_it();
        mount.kill_daemon();
        assert_eq!(fs::read(at.join("file")).unwrap(), b"below");
        assert!(has_problem(&mount.status(), key.to_str().unwrap()), "{}", mount.status());
        assert!(mount.status().lenders.is_empty());
        write(&good, 0o600);
        mount.wait_for("the lender", |status| status.lender_is_up && !has_problem(status, ""));
    }
    // At a first start it is an error, in one line.
    fs::remove_file(&key).unwrap();
    let again = scratch.directory("again").unwrap();
    let [source, again, key] = [&source, &again, &key].map(|path| path.to_str().unwrap());
    let refused = setup::pumapool(&["mount", source, again, "--lender", &lender.address, "--key", key]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.lines().count() == 1 && said.contains(key), "{said}");
}

/// Runs a command in the mount namespace of a process.
fn within(pid: u32, command: &[&str]) -> Vec<u8> {
    let output = Command::new("nsenter").args(["-m", "-t", &pid.to_string()]).args(command).output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    output.stdout
}

#[test]
fn a_tap_that_cannot_be_loaded_ends_no_mount() {
    let test = "a_tap_that_cannot_be_loaded_ends_no_mount";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    fs::write(source.join("file"), "below").unwrap();
    let lender = Lender::start(scratch.path(), "16MiB", &[]);
    // In a mount namespace of its own the kernel's types can be hidden, without which no program is
    // loaded.
    let mut command = Command::new("unshare");
    command.args(["-m", "--propagation", "private", setup::PUMAPOOL, "mount", "--foreground"]).args([&source, &at]);
    command.args(["--lender", &lender.address, "--key", setup::key_file(), "--fill", "evict", "--cgroup", "each"]);
    let mut mount = Process::spawn(command, &[]).unwrap();
    mount.wait_for_line("READY", PATIENCE).unwrap();
    let pid = mount.pid();
    let status = || ask_daemon::<Status>(pid, PATIENCE).unwrap_or_default();
    let types = "/sys/kernel/btf";
    within(pid, &["mount", "-t", "tmpfs", "none", types]);
    kill(status().daemon_pid);
    let taken_over = || status().mount.takeovers == 1;
    assert!(wait_until(PATIENCE, || taken_over() || mount.wait(std::time::Duration::ZERO).unwrap().is_some()));
    assert!(taken_over(), "the mount has ended");
    assert_eq!(within(pid, &["cat", at.join("file").to_str().unwrap()]), b"below");
    let now = status();
    assert!(has_problem(&now, types) && !now.borrowing, "{now}");
    // An upgrade tries it again.
    within(pid, &["umount", types]);
    within(pid, &[setup::PUMAPOOL, "upgrade", at.to_str().unwrap()]);
    let now = status();
    assert!(!has_problem(&now, "") && now.borrowing && now.fill == Populate::Eviction, "{now}");
}
