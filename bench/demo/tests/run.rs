//! The demo itself, on little data: its figures are in the right place, and it leaves nothing
//! behind, also when it is interrupted.

use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use testbed::{Scratch, SlowDisk, skip, wait_until};

/// Generous, because the machine may be busy. A demo that takes that long has failed.
const LIMIT: Duration = Duration::from_secs(600);
/// Reads per second of the slow disk.
const DISK_READS_PER_S: f64 = 500.0;
/// Nothing left behind.
const NOTHING: [PathBuf; 0] = [];
/// Share of the data that fits the page cache.
const CACHED: f64 = 0.25;

/// A running demo. Dropping it kills it.
struct Demo {
    child: Child,
    out: Scratch,
}

impl Demo {
    /// Returns `None`, with a message, if the machine lacks something that the demo needs.
    fn start(test: &str) -> Option<Demo> {
        // On a disk.
        let out = Scratch::new_in(Path::new(env!("CARGO_TARGET_TMPDIR")), test).unwrap();
        if let Err(error) = SlowDisk::create(test, out.path()) {
            skip(test, error);
            return None;
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_demo"));
        command.args(["--data-mib", "16", "--cache-mib", "4", "--lent-mib", "16", "--seconds", "3"]);
        command.arg("--out").arg(out.path()).arg("--dir").arg(out.path());
        let log = |name: &str| File::create(out.path().join(name)).unwrap();
        command.stdin(Stdio::null()).stdout(log("stdout")).stderr(log("stderr"));
        Some(Demo { child: command.spawn().unwrap(), out })
    }

    fn says(&self, what: &str) -> bool {
        fs::read_to_string(self.out.path().join("stderr")).unwrap().contains(what)
    }

    /// Its exit code, and everything that it printed.
    fn end(&mut self) -> (Option<i32>, String) {
        assert!(wait_until(LIMIT, || self.child.try_wait().unwrap().is_some()), "the demo did not end");
        let code = self.child.wait().unwrap().code();
        let read = |name: &str| fs::read_to_string(self.out.path().join(name)).unwrap();
        (code, read("stdout") + &read("stderr"))
    }

    /// Groups, directories and mounts that it made and that still exist.
    fn left_behind(&self) -> Vec<PathBuf> {
        let own = format!("-{}-", self.child.id());
        let is_left = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("puma-") && name.contains(&own)
        };
        let (mut directories, mut found) = (vec![PathBuf::from("/sys/fs/cgroup")], Vec::new());
        while let Some(directory) = directories.pop() {
            let entries = fs::read_dir(directory).into_iter().flatten().flatten();
            let inner = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            directories.extend(
                inner.map(|entry| entry.path()).inspect(|path| found.extend(is_left(path).then(|| path.clone()))),
            );
        }
        for directory in [self.out.path().to_owned(), std::env::temp_dir()] {
            found.extend(fs::read_dir(directory).unwrap().flatten().map(|entry| entry.path()).filter(is_left));
        }
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let places = mounts.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from);
        found.extend(places.filter(|place| place.starts_with(self.out.path())));
        found
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        // It has ended, unless the test failed.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

#[test]
fn a_short_run_measures_and_leaves_nothing() {
    let Some(mut demo) = Demo::start("demo-short-run") else { return };
    let (code, said) = demo.end();
    println!("{said}");
    assert_eq!(demo.left_behind(), NOTHING);
    let json = fs::read_to_string(demo.out.path().join("demo.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["wrong_bytes"], 0);
    let figure = |name: &str| json[name].as_f64().unwrap();
    // Three seconds on a busy machine: the figure is near the expected one, and lower by the time
    // that the machine stood still.
    let expected = DISK_READS_PER_S / (1.0 - CACHED);
    assert!((expected * 0.4..expected * 1.3).contains(&figure("baseline_iops")), "{expected} reads/s were expected");
    assert!(figure("ideal_iops") > 3.0 * expected);
    for file in ["demo.svg", "demo.json"] {
        assert!(demo.out.path().join(file).exists(), "{file}");
    }
    if json["puma_iops"].is_null() {
        assert_eq!(code, Some(3));
        return skip(
            "a_short_run_measures_and_leaves_nothing (with Puma)",
            "pumapool was not built; `make build` builds it",
        );
    }
    // Without optimization, and with other tests in parallel, Puma may miss its factor of ten; a
    // result that is no faster than the disk is a fault.
    assert!(code == Some(0) || code == Some(1), "{code:?}");
    assert!(figure("gain") > 1.5);
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    interrupt_when("demo-interrupted", "without Puma: measuring");
}

#[test]
fn an_interrupted_run_leaves_no_mount() {
    let test = "an_interrupted_run_leaves_no_mount";
    match testbed::sibling_binary("pumapool") {
        Some(_) => interrupt_when("demo-mounted", "with Puma: measuring"),
        None => skip(test, "pumapool was not built; `make build` builds it"),
    }
}

fn interrupt_when(test: &str, says: &str) {
    let Some(mut demo) = Demo::start(test) else { return };
    // At the beginning of a line.
    let says = format!("\n{says}");
    assert!(wait_until(LIMIT, || demo.says(&says) || demo.child.try_wait().unwrap().is_some()));
    let pid = Pid::from_child(&demo.child);
    kill_process(pid, Signal::TERM).unwrap();
    let (code, said) = demo.end();
    assert_eq!(code, Some(128 + Signal::TERM.as_raw()), "{said}");
    assert_eq!(demo.left_behind(), NOTHING);
    assert!(!demo.out.path().join("demo.json").exists());
}
