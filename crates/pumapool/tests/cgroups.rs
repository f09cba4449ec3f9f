//! Borrowing for control groups: whose pages are lent, no more than a quota, and a full lender in
//! proportion to shares.

mod setup;

use report::Cgroup;
use setup::{Lender, Mount, PATIENCE, can_run, evict, pumapool, write_pages};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use testbed::{Group, Process, Scratch, wait_until};

/// Of each file: 32 MiB.
const PAGES: u64 = 8192;
/// More than a file, so that nothing is evicted but by us.
const GROUP_BYTES: u64 = 256 << 20;

/// Two groups and a file for each.
struct Both {
    groups: [Group; 2],
    files: [PathBuf; 2],
    bytes: [Vec<u8>; 2],
    scratch: Scratch,
}

impl Both {
    /// None: it cannot be had here.
    fn new(test: &str) -> Option<Both> {
        if !can_run(test) {
            return None;
        }
        let group = |name: &str| Group::create(&format!("{test}-{name}"), Some(GROUP_BYTES), None);
        let groups = match (group("a"), group("b")) {
            (Ok(one), Ok(other)) => [one, other],
            (Err(error), _) | (_, Err(error)) => {
                testbed::skip(test, format!("no control groups: {error}"));
                return None;
            }
        };
        let scratch = Scratch::new(test).unwrap();
        let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
        let bytes = [1, 2].map(|seed| write_pages(&source.join(seed.to_string()), PAGES as usize, seed));
        let files = ["1", "2"].map(|name| at.join(name));
        Some(Both { groups, files, bytes, scratch })
    }

    fn mount(&self, lender: &Lender, options: &[&str], limits: [&str; 2]) -> Mount {
        let name = |nth: usize| format!("{}{}", self.groups[nth].memory_directory().unwrap().display(), limits[nth]);
        let (one, other) = (name(0), name(1));
        let mut all = vec!["--lender", &lender.address, "--fill", "evict", "--cgroup", &one, "--cgroup", &other];
        all.extend(options);
        Mount::start(&self.scratch.path().join("source"), &self.scratch.path().join("mount"), &all)
    }

    /// A program in that group reads its file, or, without a group, in none of the two.
    fn read(&self, nth: usize, groups: &[&Group]) {
        let mut command = Command::new("cksum");
        command.arg(&self.files[nth]);
        let mut process = Process::spawn(command, groups).unwrap();
        assert!(process.wait(PATIENCE).unwrap().is_some_and(|status| status.success()));
    }

    fn count(&self, mount: &Mount, nth: usize, number: fn(&Cgroup) -> u64) -> u64 {
        number(&group(&mount.status(), self.groups[nth].memory_directory().unwrap()))
    }
}

/// The status of a control group of a mount, by the end of its path.
fn group(status: &report::Mount, path: &Path) -> Cgroup {
    let groups = status.cgroups.as_deref().unwrap();
    let is_it = |group: &&Cgroup| path.ends_with(&group.cgroup);
    groups.iter().find(is_it).cloned().unwrap_or_else(|| panic!("no {} in {groups:?}", path.display()))
}

#[test]
fn a_quota_holds_while_another_group_borrows_more() {
    let Some(both) = Both::new("a_quota_holds_while_another_group_borrows_more") else { return };
    let lender = Lender::start(both.scratch.path(), "256MiB", &[]);
    let mount = both.mount(&lender, &[], [",quota=8MiB", ""]);
    const QUOTA: u64 = (8 << 20) / 4096;
    let count = |nth, number: fn(&Cgroup) -> u64| both.count(&mount, nth, number);
    let are_lent = || {
        for (nth, group) in both.groups.iter().enumerate() {
            both.read(nth, &[group]);
            mount.evict_seen(&both.files[nth]);
        }
        // One is put before another is given up.
        assert!(count(0, |of| of.lent_pages) <= QUOTA + 1, "{:?}", mount.status().cgroups);
        mount.wait_for("the puts", |status| status.puts_under_way == 0);
        (count(0, |of| of.lent_pages), count(1, |of| of.lent_pages)) == (QUOTA, PAGES)
    };
    // A page that finds no put buffer is lent the next time.
    assert!(wait_until(PATIENCE, are_lent), "{}", mount.status());
    // The lender is notified of pages that were given up.
    assert!(wait_until(PATIENCE, || lender.count(|of| of.stored_pages) == QUOTA + PAGES), "{}", lender.status());
    assert!(count(0, |of| of.given_up_pages) > 0 && count(1, |of| of.given_up_pages) == 0);

    for nth in 0..2 {
        assert!(fs::read(&both.files[nth]).unwrap() == both.bytes[nth], "a wrong byte");
    }
    assert!(
        count(1, |of| of.got_pages) >= PAGES / 2 && count(0, |of| of.got_pages) > 0,
        "{:?}",
        mount.status().cgroups
    );

    // This test is in neither: what it caches is not lent. Pages that the groups have already
    // cached belong to them.
    let others = || group(&mount.status(), Path::new("others"));
    File::options().write(true).open(&both.files[0]).unwrap().set_len(0).unwrap();
    fs::write(&both.files[0], &both.bytes[1]).unwrap();
    let are_left = || {
        evict(&both.files[0]);
        both.read(0, &[]);
        others().apart_pages >= PAGES
    };
    assert!(wait_until(PATIENCE, are_left), "{}", mount.status());
    assert_eq!(others().lent_pages, 0);

    let said = String::from_utf8(pumapool(&["status", "--by-cgroup"]).stdout).unwrap();
    let name = both.groups[0].memory_directory().unwrap().file_name().unwrap().to_str().unwrap();
    let line = said.lines().find(|line| line.ends_with(name)).unwrap_or_else(|| panic!("{said}"));
    assert!(line.contains("8.0 MiB"), "{said}");
}

#[test]
fn a_full_lender_is_shared_in_proportion() {
    let Some(both) = Both::new("a_full_lender_is_shared_in_proportion") else { return };
    let lender = Lender::start(both.scratch.path(), "16MiB", &[]);
    let mount = both.mount(&lender, &["--strategy", "non-inclusive"], [",share=1", ",share=3"]);
    let lent = |nth| both.count(&mount, nth, |of| of.lent_pages);
    let evict_of = |nth: usize| {
        both.read(nth, &[&both.groups[nth]]);
        evict(&both.files[nth]);
    };
    // Alone, the first one has all.
    const ALL: u64 = (16 << 20) / 4096;
    let has_all = || {
        evict_of(0);
        lent(0) >= ALL * 9 / 10
    };
    assert!(wait_until(PATIENCE, has_all), "{}", mount.status());
    let is_shared = || {
        evict_of(0);
        evict_of(1);
        let (one, other) = (lent(0) as f64, lent(1) as f64);
        let share = other / (one + other);
        println!("the second has {share:.3}");
        (0.70..0.80).contains(&share) && both.count(&mount, 0, |of| of.over_share_pages) > 0
    };
    assert!(wait_until(PATIENCE, is_shared), "{}", mount.status());
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let test = "what_cannot_be_kept_is_refused";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let source = scratch.directory("source").unwrap();
    let source = source.to_str().unwrap();
    for (options, word) in [
        (&["--cgroup", "/db", "--fill", "read"][..], "--fill"),
        (&["--cgroup", "/db", "--cgroup", "db"], "twice"),
        (&["--cgroup", "db,quota=lots"], "quota"),
    ] {
        let output = pumapool(&[&["mount", source, "--lender", "unix:/nowhere"], options].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(word), "{options:?}: {said}");
    }
}
