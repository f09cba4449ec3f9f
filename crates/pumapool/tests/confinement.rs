//! Real daemons, in every thread of theirs, have only what they need; also one that has taken over.

mod setup;

use setup::{Lender, Mount, PATIENCE, can_run, write_pages};
use std::fs;
use testbed::Scratch;

/// Bits of capability sets (linux/capability.h): some that nobody here needs, and one that a mount
/// does.
const SYS_MODULE: u64 = 1 << 16;
const SYS_BOOT: u64 = 1 << 22;
const SYS_TIME: u64 = 1 << 25;
const NET_ADMIN: u64 = 1 << 12;
const NET_RAW: u64 = 1 << 13;
const SYS_RAWIO: u64 = 1 << 17;
const SYS_PTRACE: u64 = 1 << 19;
const SYS_ADMIN: u64 = 1 << 21;

/// The rights of a thread.
#[derive(Debug)]
struct Thread {
    name: String,
    /// Effective, permitted, inheritable, ambient and bounding capabilities together.
    any: u64,
    effective: u64,
    /// It may gain rights.
    gains: bool,
    /// A filter of system calls confines it.
    has_filter: bool,
}

/// All threads of a process.
fn threads(pid: u32) -> Vec<Thread> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        // It may have ended.
        let Ok(status) = fs::read_to_string(thread.unwrap().path().join("status")) else { continue };
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        let set = |name: &str| u64::from_str_radix(&field(name), 16).unwrap();
        let all = ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"].map(set);
        found.push(Thread {
            name: field("Name:"),
            any: all.iter().fold(0, |all, set| all | set),
            effective: all[2],
            gains: field("NoNewPrivs:") == "0",
            has_filter: field("Seccomp:") == "2",
        });
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
    let lender = Lender::with(
        "127.0.0.1:0",
        &["--capacity", "16MiB", "--metrics", "127.0.0.1:0", "--pool", "127.0.0.1:1", "--gossip", "127.0.0.1:0"],
        &[],
    );
    let seed = lender.status().pool.unwrap_or_default().advertise;
    let options = ["--lender", &lender.address, "--metrics", "127.0.0.1:0", "--pool", &seed, "--gossip", "127.0.0.1:0"];
    let mount = Mount::start(&source, &at, &options);

    // Threads that parse what comes from the network have a filter of system calls, and no
    // capability.
    let has_confined = |pid: u32, names: &[&str]| {
        let is_confined = |name: &&str| {
            let mut alike = threads(pid).into_iter().filter(|thread| thread.name == **name).peekable();
            alike.peek().is_some() && alike.all(|thread| thread.has_filter && thread.effective == 0)
        };
        assert!(names.iter().all(is_confined), "{names:?} of {:?}", threads(pid));
    };
    let is_confined = || {
        has_confined(lender.process.pid(), &["lender-gets", "lender-mains", "puma-gossip", "puma-metrics"]);
        let is_bare = |thread: &Thread| (thread.any, thread.effective, thread.gains) == (0, 0, false);
        assert!(threads(lender.process.pid()).iter().all(is_bare), "the lender");
        has_confined(mount.daemon_pid(), &["puma-link-0", "puma-put-0", "puma-gossip", "puma-metrics"]);
        for pid in [mount.process.pid(), mount.daemon_pid()] {
            for thread in threads(pid).into_iter().filter(|thread| !thread.has_filter) {
                let unneeded = SYS_MODULE | SYS_BOOT | SYS_TIME | NET_ADMIN | NET_RAW | SYS_RAWIO | SYS_PTRACE;
                let is_daemon = thread.any & unneeded == 0 && thread.effective & SYS_ADMIN != 0 && !thread.gains;
                assert!(is_daemon, "process {pid}: {thread:?}");
            }
        }
    };
    // With connections, hence with all its threads; and it still serves.
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    mount.evict(&at.join("file"), 64);
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    is_confined();
    let status = mount.status();
    let has = |name: &str| status.confined.capabilities.iter().any(|one| one == name);
    assert!(has("SYS_ADMIN") && !has("SYS_MODULE") && status.confined.no_new_privs, "{status}");

    mount.kill_daemon();
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    is_confined();

    // It may remove the files that it has made.
    let folder = scratch.path().join("unix");
    fs::create_dir(&folder).unwrap();
    drop(lender);
    let mut lender = Lender::start(&folder, "16MiB", &[]);
    let socket = folder.join("lender.sock");
    assert!(socket.exists());
    lender.process.signal(rustix::process::Signal::TERM).unwrap();
    assert!(lender.process.wait(PATIENCE).unwrap().is_some_and(|status| status.success()));
    assert!(!socket.exists(), "the lender has left its socket behind");
}
