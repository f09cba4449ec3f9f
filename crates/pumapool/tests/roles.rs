//! A node that lends while it has nothing to do, and borrows while its mount evicts: with real
//! daemons, and a real load in a cgroup.

mod setup;

use report::{Join, NodeMountState, RoleName, RoleWanted};
use setup::{Lender, Mount, Node, PATIENCE, can_run, pumapool, write_pages};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use testbed::{Group, Process, Scratch, wait_until};

/// Memory of a reader and its page cache.
const GROUP_BYTES: u64 = 32 << 20;
/// Size of the file that it reads again and again: more than that memory.
const LOAD_PAGES: usize = 64 << 8; // 64 MiB
/// Pages that another borrower stores at the node.
const GUEST_PAGES: usize = 8 << 8; // 8 MiB

/// The pool: another lender, and the node.
struct Pool {
    node: Node,
    other: Lender,
}

impl Pool {
    fn start(source: &Path, at: &Path, options: &[&str]) -> Pool {
        let other = Lender::with(
            "127.0.0.1:0",
            &["--capacity", "128MiB", "--pool", "127.0.0.1:1", "--gossip", "127.0.0.1:0"],
            &[],
        );
        let seed = other.status().pool.unwrap_or_default().advertise;
        let mount = format!("{}:{}", source.display(), at.display());
        let fixed =
            ["--mount", &mount, "--pool", &seed, "--gossip", "127.0.0.1:0", "--capacity", "64MiB", "--calm", "5"];
        Pool { node: Node::start(&[&fixed[..], options].concat()), other }
    }
}

/// A program that reads the file again and again, with little room for it.
fn load(file: &Path, group: &Group) -> Process {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", r#"while :; do cat "$0" > /dev/null || exit 1; done"#]).arg(file);
    Process::spawn(command, &[group]).unwrap()
}

/// Reads all pages of a file that fill the pool, and says whether the node has most of them.
fn guest_lends(mount: &Mount, file: &Path, bytes: &[u8], node: &Node) -> bool {
    setup::evict(file);
    assert!(fs::read(file).unwrap() == bytes, "{}", mount.status());
    node.lent_pages() > GUEST_PAGES as u64 / 2
}

fn is_at_once_one_of_both(status: &Join) {
    let borrows = status.mounts.iter().any(|mount| mount.state == NodeMountState::Borrows);
    assert!(!(borrows && status.lend.lender.lending), "both at once: {status}");
}

#[test]
fn a_node_that_evicts_borrows_and_lends_again() {
    let test = "a_node_that_evicts_borrows_and_lends_again";
    if !can_run(test) {
        return;
    }
    let group = match Group::create(test, Some(GROUP_BYTES), None) {
        Ok(group) => group,
        Err(error) => return testbed::skip(test, error),
    };
    let scratch = Scratch::new(test).unwrap();
    let folder = |name: &str| scratch.directory(name).unwrap();
    let (source, at, guests, guest_at) = (folder("source"), folder("mount"), folder("guests"), folder("guest-mount"));
    let bytes = write_pages(&source.join("file"), LOAD_PAGES, 1);
    let guest_bytes = write_pages(&guests.join("file"), GUEST_PAGES, 2);
    let Pool { node, other } = Pool::start(&source, &at, &["--fill", "evict"]);
    node.wait_for("lending", |status| status.role.role == RoleName::Lend && status.lend.lender.lending);
    assert_eq!(node.status().mounts[0].state, NodeMountState::DoesNotBorrow);

    // It lends, to somebody who knows only this lender.
    let guest = Mount::start(&guests, &guest_at, &["--lender", &node.address(), "--fill", "read"]);
    let guest_file = guest_at.join("file");
    assert!(wait_until(PATIENCE, || guest_lends(&guest, &guest_file, &guest_bytes, &node)), "{}", node.status());

    // Its own programs begin to need the memory.
    let before = other.count(|of| of.puts);
    let reader = load(&at.join("file"), &group);
    node.wait_for("borrowing", |status| {
        is_at_once_one_of_both(status);
        status.role.role == RoleName::Borrow && status.mounts[0].state == NodeMountState::Borrows
    });
    let status = node.status();
    assert_eq!((node.lent_pages(), status.lend.lender.lending), (0, false), "{status}");
    assert!(status.role.reason.contains("evicted"), "{status}");
    assert!(
        wait_until(PATIENCE, || other.count(|of| of.puts) > before && other.count(|of| of.hits) > 0),
        "{}",
        other.status()
    );
    assert!(wait_until(PATIENCE, || guest.count(|of| of.lost_pages) >= GUEST_PAGES as u64 / 2), "{}", guest.status());
    assert!(!guest_lends(&guest, &guest_file, &guest_bytes, &node), "it took pages while it borrowed");
    let shown = String::from_utf8(pumapool(&["status"]).stdout).unwrap();
    assert!(shown.contains("  role        borrow for "), "{shown}");

    // They come to rest. Drop the rest of their page cache at once. Otherwise the kernel may evict
    // it slowly: some kernels reclaim cold pages without need (DAMON), and then the node is not
    // calm. Again and again, as the shell's last `cat` reads on when the shell has ended.
    drop(reader);
    node.wait_for("lending again", |status| {
        setup::evict(&at.join("file"));
        is_at_once_one_of_both(status);
        status.role.role == RoleName::Lend && status.lend.lender.lending
    });
    // More than once, if its reader was held up for so long that it seemed to be at rest.
    let changes = node.status().role.changes;
    assert!(changes >= 2 && changes.is_multiple_of(2), "{changes} changes");
    assert!(wait_until(PATIENCE, || guest_lends(&guest, &guest_file, &guest_bytes, &node)), "{}", node.status());

    // The borrowed pages are still there, with the right bytes.
    let file = File::open(at.join("file")).unwrap();
    let mut random = fastrand::Rng::with_seed(3);
    let mut page = [0; 4096];
    for _ in 0..2000 {
        let index = random.usize(0..LOAD_PAGES);
        file.read_exact_at(&mut page, index as u64 * 4096).unwrap();
        assert!(page == bytes[index * 4096..][..4096], "page {index}");
    }
}

#[test]
fn a_role_can_be_asked_for_and_mounts_live_and_die_with_the_node() {
    let test = "a_role_can_be_asked_for_and_mounts_live_and_die_with_the_node";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), 64, 1);
    let Pool { mut node, other } = Pool::start(&source, &at, &["--role", "borrow"]);
    let is = |status: &Join, role: RoleName, lending: bool, mount: NodeMountState| {
        is_at_once_one_of_both(status);
        status.role.role == role && status.lend.lender.lending == lending && status.mounts[0].state == mount
    };
    node.wait_for("borrowing", |status| is(status, RoleName::Borrow, false, NodeMountState::Borrows));
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    let pid = node.process.pid().to_string();
    let role = |name: &str| {
        let output = pumapool(&["role", name, "--pid", &pid]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    role("lend");
    node.wait_for("lending", |status| is(status, RoleName::Lend, true, NodeMountState::DoesNotBorrow));
    let knows =
        |lenders: usize| wait_until(PATIENCE, || other.status().pool.unwrap_or_default().members.len() == lenders);
    assert!(knows(1), "{}", other.status());

    // Nobody takes it for a mount of something else.
    let elsewhere = format!("/tmp:{}", at.display());
    let options = ["--trust-network", "--listen", "127.0.0.1:0", "--capacity", "1MiB", "--pool", "127.0.0.1:1"];
    let output =
        pumapool(&[&["join", "--foreground", "--mount", &elsewhere, "--gossip", "127.0.0.1:0"], &options[..]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("not /tmp"), "{said}");

    // A daemon that takes over does not borrow, either; its mount does not use the node's own
    // lender.
    let mount = |pid: u32| setup::mounts().into_iter().find(|mount| mount.pid == pid);
    let ours = || setup::mounts().into_iter().find(|mount| mount.mountpoint == at.to_str().unwrap());
    let mut found = None;
    assert!(wait_until(PATIENCE, || {
        found = ours();
        found.is_some()
    }));
    let found = found.unwrap();
    let (supervisor, daemon) = (found.pid, found.daemon_pid);
    setup::kill(daemon);
    let took_over = || mount(supervisor).is_some_and(|mount| mount.mount.takeovers == 1 && !mount.borrowing);
    assert!(wait_until(PATIENCE, took_over), "{:?}", mount(supervisor));
    let has_the_other = |mount: &report::Mount| mount.lenders.len() == 1 && mount.lenders[0].address == other.address;
    assert!(
        wait_until(PATIENCE, || mount(supervisor).is_some_and(|mount| has_the_other(&mount))),
        "{:?}",
        mount(supervisor)
    );
    node.wait_for("lending still", |status| is(status, RoleName::Lend, true, NodeMountState::DoesNotBorrow));

    role("borrow");
    node.wait_for("borrowing again", |status| is(status, RoleName::Borrow, false, NodeMountState::Borrows));
    assert!(knows(0), "{}", other.status());
    role("auto");
    node.wait_for("lending by need", |status| {
        status.role.wanted == RoleWanted::Auto && is(status, RoleName::Lend, true, NodeMountState::DoesNotBorrow)
    });
    assert!(!pumapool(&["role", "lend", "--pid", "1"]).status.success());

    // Its end is that of its mounts.
    node.process.signal(rustix::process::Signal::TERM).unwrap();
    assert!(node.process.wait(PATIENCE).unwrap().is_some_and(|status| status.success()));
    assert!(wait_until(PATIENCE, || mount(supervisor).is_none()), "{:?}", mount(supervisor));
    assert!(!at.join("file").exists(), "still mounted");
}

#[test]
fn what_makes_no_sense_is_said() {
    let refused = |options: &[&str]| {
        let listen = ["join", "--foreground", "--trust-network", "--listen", "127.0.0.1:0", "--capacity", "1MiB"];
        let output = pumapool(&[&listen[..], options].concat());
        assert!(!output.status.success(), "{options:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&["--pool", "127.0.0.1:1"]).contains("--mount"));
    assert!(refused(&["--mount", "/tmp"]).contains("--pool"));
    assert!(refused(&["--mount", "/a:", "--pool", "127.0.0.1:1"]).contains("SRC:MOUNTPOINT"));
    let missing = refused(&["--mount", "/nonexistent/source", "--pool", "127.0.0.1:1", "--gossip", "127.0.0.1:0"]);
    assert!(missing.contains("cannot mount /nonexistent/source"), "{missing}");
}
