//! A takeover when most of the daemon's descriptors are in use.

mod setup;

use setup::{Mount, PATIENCE, PUMAPOOL, can_run, tool};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use testbed::{Process, Scratch};

/// Descriptors that the daemon may have.
const LIMIT: usize = 512;

/// Opens what it can, and says how many that are; reads some of them when it is told to, and tries
/// to open more.
const OPENER: &str = "import os, sys
uid = int(sys.argv[1])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
kept = []
def more():
    try:
        while True: kept.append(os.open(f'{sys.argv[2]}/f{len(kept)}', os.O_RDONLY))
    except OSError as error: print(len(kept), error.errno, flush=True)
more()
# Beyond that, opens of one file share a descriptor, whichever of them is closed first.
shared = []
try:
    while True: shared.append(os.open(f'{sys.argv[2]}/f{len(kept) - 1}', os.O_RDONLY))
except OSError as error: pass
os.close(kept.pop())
sys.stdin.readline()
for number in range(0, len(kept), 10): assert os.pread(kept[number], 100, 0) == str(number).encode(), number
for file in shared[::10]: assert os.pread(file, 100, 0) == str(len(kept)).encode()
for file in shared: os.close(file)
print(len(shared), flush=True)
# The kernel tells the daemon of a close later.
sys.stdin.readline()
more()
sys.stdin.readline()";

#[test]
fn a_takeover_restores_all_that_is_open_and_whose_it_is() {
    let test = "a_takeover_restores_all_that_is_open_and_whose_it_is";
    if !can_run(test) || !["setpriv", "prlimit", "python3"].iter().all(|program| tool(test, program).is_some()) {
        return;
    }
    for uid in [65534, 0] {
        let scratch = Scratch::new(test).unwrap();
        let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
        (0..400).for_each(|number| fs::write(source.join(format!("f{number}")), number.to_string()).unwrap());
        let_others_in(scratch.path());
        // With that capability the daemon would raise its limit again.
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-sys_resource", "prlimit", &format!("--nofile={LIMIT}:{LIMIT}"), PUMAPOOL]);
        command.arg("mount").args([&source, &at]).args(["--foreground", "--threads", "4"]);
        let mut process = Process::spawn(command, &[]).unwrap();
        process.wait_for_line("READY", PATIENCE).unwrap();
        let mount = Mount { process, path: at.clone() };
        // Inodes hold descriptors, too.
        assert!(Command::new("ls").arg("-l").arg(&at).output().unwrap().status.success());

        let mut opener = Command::new("python3");
        opener.args(["-c", OPENER, &uid.to_string()]).arg(&at).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut opener = opener.spawn().unwrap();
        let mut said = BufReader::new(opener.stdout.take().unwrap()).lines();
        let opened = said.next().unwrap().unwrap();
        println!("user {uid}: {opened}");
        let (count, errno) = opened.split_once(' ').unwrap();
        assert!(count.parse::<usize>().unwrap() > LIMIT / 3 && errno == libc::EMFILE.to_string(), "{opened}");

        mount.kill_daemon();
        let status = mount.status();
        println!("{:?}", status.mount);
        assert!(status.mount.open_handles >= count.parse().unwrap());
        assert!(status.mount.descriptors < LIMIT as u64, "{status}");
        let mut orders = opener.stdin.take().unwrap();
        orders.write_all(b"read\n").unwrap();
        let shared: usize = said.next().unwrap().unwrap().parse().unwrap();
        assert!(shared > 100, "{shared}");
        mount.wait_for("the closes are known", |status| status.mount.open_handles < count.parse().unwrap());
        orders.write_all(b"open\n").unwrap();
        assert_eq!(said.next().unwrap().unwrap(), opened, "the same files, and no more");
        // Another one's, and what nobody has asked for yet.
        fs::metadata(at.join("f390")).unwrap();
        if uid != 0 {
            fs::write(at.join("new"), "new").unwrap();
            assert_eq!(fs::read_dir(&at).unwrap().count(), 401);
        }
        drop(orders);
        assert!(opener.wait().unwrap().success());
        mount.wait_for("all is closed", |status| status.mount.open_handles == 0);
        fs::write(at.join("new"), "newer").unwrap();
    }
}

/// Users other than root come to what is in there.
fn let_others_in(folder: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
}
