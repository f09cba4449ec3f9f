//! Lenders found by gossip, with real daemons on this machine: `--pool`.

mod setup;

use report::LinkState;
use setup::{Lender, Mount, PATIENCE, can_run, evict, is_balanced, kill, write_pages};
use std::fs;
use testbed::{Scratch, wait_until};

/// Of each file: enough for each of three lenders to be the place of some.
const PAGES: usize = 4096;

fn lender(key: &str, seed: Option<&str>) -> Lender {
    // Of the first one nobody is there yet: nobody gossips at port 1.
    let seed = seed.unwrap_or("127.0.0.1:1");
    let options = ["--capacity", "64MiB", "--key", key, "--pool", seed, "--gossip", "127.0.0.1:0"];
    Lender::with("127.0.0.1:0", &options, &[])
}

fn gossips_at(lender: &Lender) -> String {
    lender.status().pool.unwrap_or_default().advertise
}

/// How many lenders the mount has, and how many of them are connected.
fn lenders(status: &report::Mount) -> (usize, usize) {
    let lenders = &status.lenders;
    (lenders.len(), lenders.iter().filter(|lender| lender.state == LinkState::Used).count())
}

#[test]
fn lenders_are_found_used_and_lost_without_harm() {
    if !can_run("lenders_are_found_used_and_lost_without_harm") {
        return;
    }
    let scratch = Scratch::new("discovery").unwrap();
    let (source, path) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let key = scratch.path().join("key");
    let key = key.to_str().unwrap();
    assert!(setup::pumapool(&["key", "new", key]).status.success());
    let first = lender(key, None);
    let seed = gossips_at(&first);
    let second = lender(key, Some(&seed));

    let contents: Vec<_> = (0..3).map(|file| write_pages(&source.join(format!("{file}")), PAGES, file)).collect();
    let is_right = |file: usize| assert!(fs::read(path.join(format!("{file}"))).unwrap() == contents[file]);
    let mount =
        Mount::start(&source, &path, &["--key", key, "--pool", &seed, "--gossip", "127.0.0.1:0", "--fill", "read"]);
    mount.wait_for("two lenders of weight", |status| lenders(status) == (2, 2) && is_balanced(status));
    // A page that found no put buffer is lent at a later read.
    let get_pages = |file: usize, lenders: &[&Lender]| {
        let have_pages = wait_until(PATIENCE, || {
            evict(&path.join(format!("{file}")));
            is_right(file);
            lenders.iter().all(|lender| lender.count(|of| of.stored_pages) > 0)
        });
        assert!(have_pages, "{:?}", mount.status().lenders);
    };
    get_pages(0, &[&first, &second]);

    let third = lender(key, Some(&seed));
    mount.wait_for("three lenders of weight", |status| lenders(status) == (3, 3) && is_balanced(status));
    get_pages(1, &[&third]);

    // One is killed: nothing but speed is lost, and after a while it is no longer in the list.
    kill(second.process.pid());
    for file in 0..2 {
        evict(&path.join(format!("{file}")));
        is_right(file);
    }
    is_right(2);
    mount.wait_for("the dead one to be gone", |status| lenders(status) == (2, 2));
    let status = mount.status();
    let pool = status.pool.as_ref().unwrap();
    assert_eq!(pool.members.len(), 2, "{status}");
    assert!(pool.received_datagrams > 0, "{status}");

    // One leaves in order.
    drop(third);
    mount.wait_for("the one that left to be gone", |status| lenders(status).0 == 1);
    for file in 0..3 {
        evict(&path.join(format!("{file}")));
        is_right(file);
    }
    let shown = setup::pumapool(&["status"]);
    let shown = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.contains("gossip at 127.0.0.1:") && shown.contains(&first.address), "{shown}");
}

/// Lent pages go over a network, so working without a key must be requested.
#[test]
fn a_pool_wants_a_key_and_sense() {
    let refused = |arguments: &[&str]| {
        let output = setup::pumapool(arguments);
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let listen = ["lend", "--foreground", "--listen", "unix:/nonexistent/socket"];
    assert!(refused(&[&listen[..], &["--pool", "127.0.0.1:1"]].concat()).contains("pumapool key new"));
    assert!(refused(&["mount", "/", "/mnt", "--pool", "127.0.0.1:1"]).contains("pumapool key new"));
    assert!(refused(&[&listen[..], &["--gossip", "127.0.0.1:0"]].concat()).contains("--pool"));
    let trusting = |listen: &str, options: &[&str]| {
        let start = ["lend", "--foreground", "--trust-network", "--capacity", "1MiB", "--listen", listen];
        refused(&[&start[..], options].concat())
    };
    assert!(trusting("127.0.0.1:0", &["--pool", "nowhere"]).contains("HOST:PORT"));
    assert!(trusting("0.0.0.0:0", &["--pool", "seed.invalid:1"]).contains("--advertise"));
    assert!(trusting("127.0.0.1:0", &["--pool", "127.0.0.1:1", "--advertise", "0.0.0.0:1"]).contains("--advertise"));
}
