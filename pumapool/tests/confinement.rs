//! Real daemons, in every thread of theirs, have only what they need; also one that has taken over.

mod setup;

use setup::{Lender, Mount, PATIENCE, can_run, write_pages};
use std::fs;
use testbed::Scratch;

/// Bits of capability sets (linux/capability.h): some that nobody here needs, and one that a mount does.
const SYS_MODULE: u64 = 1 << 16;
const SYS_BOOT: u64 = 1 << 22;
const SYS_TIME: u64 = 1 << 25;
const NET_ADMIN: u64 = 1 << 12;
const NET_RAW: u64 = 1 << 13;
const SYS_RAWIO: u64 = 1 << 17;
const SYS_PTRACE: u64 = 1 << 19;
const SYS_ADMIN: u64 = 1 << 21;

/// Capability sets of every thread: effective, permitted and bounding ones together, and whether it may gain rights.
fn threads(pid: u32) -> Vec<(u64, u64, bool)> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        // It may have ended.
        let Ok(status) = fs::read_to_string(thread.unwrap().path().join("status")) else { continue };
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        let set = |name: &str| u64::from_str_radix(&field(name), 16).unwrap();
        let all = ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"].map(set);
        found.push((all.iter().fold(0, |all, set| all | set), all[2], field("NoNewPrivs:") == "0"));
    }
    assert!(!found.is_empty());
    found
}

#[test]
fn daemons_keep_only_what_they_need() {
    let test = "daemons_keep_only_what_they_need";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), 64, 1);
    let mut lender = Lender::start(scratch.path(), "16MiB", &[]);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address]);

    let is_confined = || {
        assert!(threads(lender.process.pid()).iter().all(|found| *found == (0, 0, false)), "the lender");
        for pid in [mount.process.pid(), mount.daemon_pid()] {
            for (any, effective, gains) in threads(pid) {
                let unneeded = SYS_MODULE | SYS_BOOT | SYS_TIME | NET_ADMIN | NET_RAW | SYS_RAWIO | SYS_PTRACE;
                assert!(any & unneeded == 0 && effective & SYS_ADMIN != 0 && !gains, "process {pid}: {any:x}");
            }
        }
    };
    // With connections, hence with all its threads; and it still serves.
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    mount.evict(&at.join("file"), 64);
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    is_confined();
    let status = mount.status();
    let has = |name: &str| status["confined"]["capabilities"].as_array().unwrap().iter().any(|one| one == name);
    assert!(has("SYS_ADMIN") && !has("SYS_MODULE") && status["confined"]["no_new_privs"] == true, "{status}");

    mount.kill_daemon();
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    is_confined();

    // What it has made, it may remove.
    let socket = scratch.path().join("lender.sock");
    assert!(socket.exists());
    lender.process.signal(rustix::process::Signal::TERM).unwrap();
    assert!(lender.process.wait(PATIENCE).unwrap().is_some_and(|status| status.success()));
    assert!(!socket.exists(), "the lender has left its socket behind");
}
