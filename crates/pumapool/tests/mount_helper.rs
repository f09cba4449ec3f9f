//! The real mount(8) and umount(8), which call `mount.fuse.pumapool`: in a namespace of their own,
//! where that is a link to this program.

mod setup;

use setup::{PATIENCE, PUMAPOOL, can_run, key_file, mounts, write_pages};
use std::fs;
use std::process::{Command, Output};
use testbed::{Scratch, wait_until};

/// Has a shell run it where `/usr/sbin` has nothing but the link, and what is mounted is seen by
/// nobody else.
fn privately(script: &str) -> Output {
    let link = format!("mount -t tmpfs none /usr/sbin && ln -s {PUMAPOOL} /usr/sbin/mount.fuse.pumapool");
    let script = format!("set -e; {link}; {script}");
    Command::new("unshare").args(["--mount", "sh", "-c", &script]).output().unwrap()
}

#[test]
fn mount_and_fstab_mount_and_umount_ends_the_daemon() {
    let test = "mount_and_fstab_mount_and_umount_ends_the_daemon";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source dir").unwrap(), scratch.directory("mount").unwrap());
    write_pages(&source.join("file"), 8, 1);
    let fstab = scratch.path().join("fstab");
    let (from, to, tab) = (source.to_str().unwrap(), at.to_str().unwrap(), fstab.to_str().unwrap());
    let line = |options: &str| format!("{} {to} fuse.pumapool {options} 0 0\n", from.replace(' ', "\\040"));
    let lender = format!("lender=unix:{},key={}", scratch.path().join("nobody").display(), key_file());
    let is_gone = || wait_until(PATIENCE, || mounts().iter().all(|mount| mount.mountpoint != to));
    let run = |script: &str, expected: &[&str]| {
        let output = privately(script);
        // Remaining mounts are detached with the namespace, and end.
        assert!(is_gone(), "{script}: a daemon is left");
        let said = String::from_utf8([output.stdout.clone(), output.stderr.clone()].concat()).unwrap();
        assert!(output.status.success() && expected.iter().all(|text| said.contains(text)), "{script}: {output:?}");
    };
    // Once it is unmounted, the daemon goes within the time that it takes to look.
    let ends = format!(
        "umount {to}; for n in $(seq 1200); do {PUMAPOOL} status --json | grep -q '\"mountpoint\":\"{to}\"' || exit 0; sleep 0.1; done; exit 1"
    );
    run(
        &format!(
            "said=$(mount -t fuse.pumapool -o {lender},threads=4,nosuid,_netdev,x-systemd.automount '{from}' {to}); test -z \"$said\"; cmp '{from}/file' {to}/file; findmnt -no FSTYPE,OPTIONS {to}; {ends}"
        ),
        &["fuse.pumapool", "nosuid"],
    );
    fs::write(&fstab, line(&format!("{lender},ro,noauto,nofail"))).unwrap();
    run(
        &format!(
            "mount -T {tab} {to}; cmp '{from}/file' {to}/file; ! touch {to}/new 2>&1; findmnt -no OPTIONS {to}; {ends}"
        ),
        &["ro,", "Read-only file system"],
    );
    assert!(!source.join("new").exists());
    run(
        &format!(
            "mount -t fuse.pumapool -o {lender} '{from}' {to}; mount -o remount,ro,nosuid {to}; ! touch {to}/new 2>&1; findmnt -no OPTIONS {to}; \
             mount -o remount,rw {to}; touch {to}/new; findmnt -no OPTIONS {to}; ! mount -o remount,sync {to} 2>&1; {ends}"
        ),
        &["ro,nosuid,", "Read-only file system", "rw,nosuid,", "-o sync is not possible"],
    );
    assert!(source.join("new").exists());
    let config = scratch.path().join("mount.toml");
    fs::write(&config, "command = \"mount\"\nstrategy = \"non-inclusive\"\nfill = \"read\"\ntrust-network = true\n")
        .unwrap();
    fs::write(&fstab, line(&format!("config={},lender=127.0.0.1:9", config.display()))).unwrap();
    run(&format!("mount -a -T {tab}; {PUMAPOOL} status; {ends}"), &["non-inclusive"]);
    // -f only looks whether the options are right. The last one of a name counts.
    run(&format!("mount -f -t fuse.pumapool -o threads=0,{lender},threads=2 '{from}' {to}; ! findmnt {to}"), &[]);
    let in_foreground = scratch.path().join("foreground.toml");
    fs::write(&in_foreground, "foreground = true\n").unwrap();
    let in_foreground = format!("config={}", in_foreground.display());

    for (options, problem) in [
        ("nonsense=1", "-o nonsense: there is no such option"),
        ("sync", "-o sync is not possible"),
        ("threads=0", "0 is not in 1..=256"),
        ("threads=0 -f", "0 is not in 1..=256"),
        ("log=lound=loud", "--log"),
        ("key=/nonexistent", "/nonexistent"),
        (&in_foreground, "-o foreground is not possible"),
    ] {
        let output = privately(&format!("exec mount -t fuse.pumapool -o {options} '{from}' {to}"));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(32) && said.contains(problem), "{options}: {output:?}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(is_gone());
    }
    let output = privately(&format!("exec mount -t fuse.pumapool -o {lender} /nonexistent {to}"));
    assert_eq!(output.status.code(), Some(32), "{output:?}");
}

/// `mount -o remount` changes what is forbidden, while the mount is in use.
#[test]
fn a_remount_changes_what_is_forbidden() {
    let test = "a_remount_changes_what_is_forbidden";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    write_pages(&source.join("file"), 8, 1);
    let (from, to) = (source.to_str().unwrap(), at.to_str().unwrap());
    let script = format!(
        "mount -t fuse.pumapool -o fill=read {from} {to} > {from}/said; exec 2>&1; \
         flags() {{ findmnt -no OPTIONS {to} | tr , '\\n' | grep -xE 'r[ow]|no(suid|dev|exec)' | tr '\\n' ' '; echo; }}; \
         exec 3< {to}/file; \
         mount -o remount,ro {to}; flags; ! touch {to}/new; ! touch {to}/file; cmp {from}/file {to}/file; \
         mount -o remount,rw,nosuid,nodev,noexec,noatime {to}; flags; echo y > {to}/new; cat {from}/new; \
         mount -t fuse.pumapool -o remount,suid,dev,exec,threads=4 {from} {to}; flags; \
         exec 4> {to}/new; ! mount -o remount,ro {to}; exec 4>&-; flags; \
         exec 3<&-; umount {to}; ! mount -t fuse.pumapool -o remount,ro {from} {to}"
    );
    let output = privately(&script);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    let mut lines = said.lines();
    for expected in [
        "ro ",
        "Read-only file system",
        "Read-only file system",
        "rw nosuid nodev noexec ",
        "y",
        "rw ",
        "a file is open for writing",
        "rw ",
        "no mount of pumapool is at",
    ] {
        assert!(lines.next().is_some_and(|line| line.contains(expected)), "{expected}: {said}");
    }
    assert_eq!(lines.next(), None, "{said}");
    assert!(wait_until(PATIENCE, || mounts().iter().all(|mount| mount.mountpoint != to)), "a daemon is left");
}

/// Does as systemd with `x-systemd.automount`: has the mount made when somebody looks there, by a
/// mount(8) in its own group of processes.
const AUTOMOUNT: &str = r#"
import ctypes, errno, fcntl, os, struct, subprocess, sys
at, command = sys.argv[1], sys.argv[2:]
os.setpgid(0, 0)
told, tells = os.pipe()
libc = ctypes.CDLL(None, use_errno=True)
options = f'fd={tells},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct'
if libc.mount(b'test', at.encode(), b'autofs', 0, options.encode()):
    sys.exit(77 if ctypes.get_errno() == errno.ENODEV else os.strerror(ctypes.get_errno()))
os.close(tells)
root = os.open(at, os.O_RDONLY | os.O_DIRECTORY)
visitor = subprocess.Popen(['cat', at + '/file'], start_new_session=True, stdout=subprocess.DEVNULL)
kind, token = struct.unpack('4xiI', os.read(told, 1024)[:12])
assert kind == 5, kind # somebody looks (linux/auto_fs.h)
try:
    mounted = subprocess.run(command, timeout=60).returncode == 0
except subprocess.TimeoutExpired:
    print('it waits for itself')
    mounted = False
fcntl.ioctl(root, 0x9360 if mounted else 0x9361, token)
os.close(root)
print('mounted' if mounted else 'not mounted', 'seen' if visitor.wait() == 0 else 'not seen', flush=True)
if mounted:
    subprocess.run(['umount', at], check=True)
subprocess.run(['umount', at], check=True)
"#;

#[test]
fn a_mount_is_made_when_somebody_looks() {
    let test = "a_mount_is_made_when_somebody_looks";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    write_pages(&source.join("file"), 8, 1);
    let program = scratch.path().join("automount.py");
    fs::write(&program, AUTOMOUNT).unwrap();
    let (from, program) = (source.to_str().unwrap(), program.to_str().unwrap());
    // Over the directory itself nobody can see it any more.
    for (to, expected) in
        [(at.to_str().unwrap(), "mounted seen"), (from, "it is an automount point"), (from, "not mounted not seen")]
    {
        let mount = format!("mount -t fuse.pumapool -o fill=read {from} {to}");
        let output = privately(&format!("exec python3 {program} {to} {mount} 2>&1"));
        if output.status.code() == Some(77) {
            return testbed::skip(test, "this kernel has no autofs");
        }
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && said.contains(expected), "{to}: {output:?}");
        assert!(wait_until(PATIENCE, || mounts().iter().all(|mount| mount.mountpoint != to)), "a daemon is left");
    }
}
