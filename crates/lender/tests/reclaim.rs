//! The lender in a memory cgroup that another process fills: it must give way, and no process may
//! be killed.
//!
//! The lender runs in a process of its own (this program again, selected by the environment). So
//! the cgroup has the lender and the memory hog, but not this test. Each test supports both
//! versions of cgroups.

mod client;

use client::{Client, WAIT_MAX, config, key};
use lender::{Address, Server};
use os::cgroup::{Version, hierarchy, parse_number};
use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use wire::{ROLE_GET, ROLE_MAIN};

const MIB: u64 = 1 << 20;
/// The environment variable that selects the part of this program.
const PART: &str = "LENDER_TEST_PART";

/// A memory cgroup, removed with the value.
struct Group {
    directory: PathBuf,
    version_2: bool,
}

impl Group {
    fn new(name: &str, limit_bytes: u64) -> Result<Group, String> {
        let mounts = os::mountinfo::read().map_err(|error| error.to_string())?;
        let mount_of = |version| hierarchy(&mounts, version, "memory").map(|mount| mount.mountpoint());
        let unified = mount_of(Version::V2);
        let governs = |root: &PathBuf| {
            let _ = std::fs::write(root.join("cgroup.subtree_control"), "+memory");
            std::fs::read_to_string(root.join("cgroup.subtree_control")).is_ok_and(|text| text.contains("memory"))
        };
        let (root, version_2) = match (unified.filter(governs), mount_of(Version::V1)) {
            (Some(root), _) => (root, true),
            (None, Some(root)) => (root, false),
            (None, None) => return Err("no memory cgroup is mounted".into()),
        };
        let group = Group { directory: root.join(format!("lender-test-{}-{name}", std::process::id())), version_2 };
        std::fs::create_dir(&group.directory).map_err(|error| format!("cannot make a cgroup: {error}"))?;
        let limit = if version_2 { "memory.max" } else { "memory.limit_in_bytes" };
        group.write(limit, &limit_bytes.to_string())?;
        if version_2 {
            let _ = group.write("memory.swap.max", "0");
        } else {
            let _ = group.write("memory.swappiness", "0");
        }
        Ok(group)
    }

    fn write(&self, file: &str, text: &str) -> Result<(), String> {
        std::fs::write(self.directory.join(file), text).map_err(|error| format!("cannot write {file}: {error}"))
    }

    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.directory.join(file)).unwrap()
    }

    fn usage_bytes(&self) -> u64 {
        let version = if self.version_2 { Version::V2 } else { Version::V1 };
        parse_number(&self.read(version.usage())).unwrap()
    }

    fn oom_kills(&self) -> u64 {
        let file = if self.version_2 { "memory.events" } else { "memory.oom_control" };
        let text = self.read(file);
        os::fields::count(&text, "oom_kill").unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The processes are gone, but the kernel may notice that a moment later.
        let begun = Instant::now();
        while std::fs::remove_dir(&self.directory).is_err() && begun.elapsed() < WAIT_MAX {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// This program as another process, inside a cgroup; killed when dropped.
struct Part {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Part {
    fn start(part: &str, argument: &str, group: &Group) -> Part {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_part_of_another_test", "--nocapture", "--quiet"])
            .env(PART, part)
            .env("LENDER_TEST_ARGUMENT", argument)
            .env("LENDER_TEST_GROUP", &group.directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Part { child, output }
    }

    /// Returns the rest of the next line that begins with `word`.
    fn line_after(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "ended before it printed {word:?}");
            // The test harness writes its output in front of the first line.
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Lets the process end by itself.
    fn finish(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Does nothing on its own: the other tests start it as a process.
#[test]
fn a_part_of_another_test() {
    let Ok(part) = std::env::var(PART) else { return };
    let argument = std::env::var("LENDER_TEST_ARGUMENT").unwrap();
    let group = std::env::var("LENDER_TEST_GROUP").unwrap();
    std::fs::write(Path::new(&group).join("cgroup.procs"), std::process::id().to_string()).unwrap();
    let wait_for_the_end = || std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    match part.as_str() {
        "lender" => {
            let mut config = config("127.0.0.1:0", 0);
            config.capacity = lender::Capacity::Auto;
            config.reserve_bytes = argument.parse().unwrap();
            let server = Server::bind(config).unwrap();
            println!("\nlistening {}", server.local_address());
            let handle = server.handle();
            std::thread::scope(|scope| {
                scope.spawn(|| server.run().unwrap());
                let mut line = String::new();
                while std::io::stdin().read_line(&mut line).unwrap() > 0 {
                    println!("\nstatus {}", serde_json::to_string(&handle.status()).unwrap());
                }
                handle.shutdown();
            });
        }
        "hog" => {
            let bytes: usize = argument.parse().unwrap();
            let mut memory = vec![0u8; bytes];
            // Touches page by page, as a program that uses the memory does.
            memory.chunks_mut(4096).for_each(|page| page[0] = 1);
            println!("\nallocated");
            wait_for_the_end();
            drop(memory);
        }
        other => panic!("no such part: {other}"),
    }
}

/// Returns the cgroup, or prints the reason why there is none.
fn group_or_skip(test: &str, limit_bytes: u64) -> Option<Group> {
    match Group::new(test, limit_bytes) {
        Ok(group) => Some(group),
        Err(reason) => {
            testbed::skip(test, reason);
            None
        }
    }
}

fn status(lender: &mut Part) -> serde_json::Value {
    lender.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    serde_json::from_str(&lender.line_after("status ")).unwrap()
}

fn wait_for(lender: &mut Part, what: &str, condition: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
    let begun = Instant::now();
    loop {
        let status = status(lender);
        if condition(&status) {
            return status;
        }
        assert!(begun.elapsed() < WAIT_MAX, "{what} did not happen: {status}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The lender gives memory back when other processes use its reserve, before the kernel has to take
/// it.
#[test]
fn a_lender_gives_memory_back_to_a_hog() {
    let lost = put_lender_under_pressure("a_lender_gives_memory_back_to_a_hog", 16 * MIB);
    assert!(lost.is_none_or(|[given, _]| given > 0), "{lost:?}");
}

/// Without a reserve the kernel takes the pages.
#[test]
fn the_kernel_takes_what_is_lent() {
    let lost = put_lender_under_pressure("the_kernel_takes_what_is_lent", 0);
    assert!(lost.is_none_or(|[_, taken]| taken > 5_000), "{lost:?}");
}

/// Returns the numbers of pages that a lender with that reserve gave back, and that the kernel
/// took, when another process in its cgroup needed most of it.
fn put_lender_under_pressure(test: &str, reserve_bytes: u64) -> Option<[u64; 2]> {
    let limit_bytes = 128 * MIB;
    let group = group_or_skip(test, limit_bytes)?;
    let mut lender = Part::start("lender", &reserve_bytes.to_string(), &group);
    let address: Address = lender.line_after("listening ").parse().unwrap();
    let mut main = Client::connect(&address, ROLE_MAIN, 1);
    let mut get = Client::connect(&address, ROLE_GET, 1);

    // More pages than fit: the lender grows to the reserve, and then replaces its own pages.
    let keys: Vec<_> = (0..40_000).map(|index| key(index, 1)).collect();
    let mut lost = HashSet::new();
    for keys in keys.chunks(4096) {
        main.put(keys);
    }
    main.ping();
    lost.extend(main.lost.drain(..));
    let full = status(&mut lender);
    let stored_pages = full["stored_pages"].as_u64().unwrap();
    println!("full: {} pages stored, {} MiB used", stored_pages, group.usage_bytes() / MIB);
    assert!(stored_pages * 4096 > limit_bytes / 2, "{full}");
    assert!(group.usage_bytes() <= limit_bytes - reserve_bytes / 2, "the reserve is left free");
    assert_eq!(full["memory_total_bytes"].as_u64(), Some(limit_bytes));

    // The other process needs 75 MiB. It gets them, and the lender reports these pages as lost.
    let begun = Instant::now();
    let mut hog = Part::start("hog", &(75 * MIB).to_string(), &group);
    hog.line_after("allocated");
    println!("allocated in {:?}", begun.elapsed());
    // Until the search has visited all pages: another one would find nothing more.
    let seen = wait_for(&mut lender, "the loss is seen", |status| {
        let lost = given_and_taken(status).iter().sum::<u64>();
        lost > 10_000 && lost + status["stored_pages"].as_u64().unwrap() >= stored_pages
    });
    let lost_pages = given_and_taken(&seen);
    println!("lost: {} pages given back, {} taken", lost_pages[0], lost_pages[1]);
    let present: Vec<_> = keys.iter().rev().take(stored_pages as usize).copied().collect();
    let mut hits = 0;
    for keys in present.chunks(4096) {
        hits += get.hits(keys); // each of them verified
    }
    main.ping();
    wait_for(&mut lender, "the notices are sent", |status| {
        let sent = status["lost_notices_sent"].as_u64().unwrap();
        sent + status["notices_forgotten"].as_u64().unwrap() + status["misses"].as_u64().unwrap()
            >= status["replaced"].as_u64().unwrap() + given_and_taken(status).iter().sum::<u64>()
    });
    main.ping();
    lost.extend(main.lost.drain(..));
    assert_eq!(group.oom_kills(), 0);
    assert!(hits > 1000, "{hits} left");
    let statuses = get.get(&present, 0);
    let reported = present.iter().zip(&statuses).filter(|(key, status)| **status == 0 && lost.contains(*key)).count();
    let gone = statuses.iter().filter(|status| **status == 0).count();
    println!("{hits} pages left and correct, {gone} gone, {reported} of them reported");
    assert!(gone > 5_000 && reported > 0);
    // Pages that were reported as lost are lost.
    let wrong = present.iter().zip(&statuses).filter(|(key, status)| **status == 1 && lost.contains(*key)).count();
    assert_eq!(wrong, 0);

    // While memory is short the lender does not grow again ...
    let before = status(&mut lender)["stored_pages"].as_u64().unwrap();
    let more: Vec<_> = (100_000..120_000).map(|index| key(index, 1)).collect();
    main.put(&more);
    let after = status(&mut lender)["stored_pages"].as_u64().unwrap();
    println!("tight: {before} pages, {after} after 20000 more puts");
    assert!(after < before + 10_000, "{before} pages became {after}");
    // ... but it does when memory is free again.
    hog.finish();
    wait_for(&mut lender, "there is room", |status| status["available_bytes"].as_u64().unwrap() > 50 * MIB);
    main.put(&more);
    let regrown = status(&mut lender)["stored_pages"].as_u64().unwrap();
    println!("free again: {regrown} pages");
    assert!(regrown > after + 5_000);
    assert_eq!(group.oom_kills(), 0);
    drop((main, get));
    lender.finish();
    Some(lost_pages)
}

/// Returns the numbers of pages that the lender gave back, and that the kernel took.
fn given_and_taken(status: &serde_json::Value) -> [u64; 2] {
    ["shrunk", "reclaimed_by_kernel"].map(|name| status[name].as_u64().unwrap())
}
