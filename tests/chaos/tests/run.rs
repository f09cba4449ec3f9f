//! A short run of chaos: every kind of trouble once, with nothing wrong. Nothing is left behind,
//! also when it is interrupted. (Other tests check that a broken promise is noticed: `content.rs`,
//! `churn.rs`.)

use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use testbed::{Scratch, left_behind, sibling_binary, skip, wait_until};

/// Generous, because the machine may be busy. A run that takes that long has failed.
const LIMIT: Duration = Duration::from_secs(600);

/// A run, killed when dropped.
struct Run {
    child: Child,
    out: Scratch,
}

impl Run {
    /// Returns `None`, with a message, if the machine lacks something that it needs.
    fn start(test: &str, arguments: &[&str]) -> Option<Run> {
        let missing = |program: &str| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            !std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
        };
        let tools = std::env::var_os("TOOLS").map(PathBuf::from);
        let tools = tools.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tools"));
        let reason = if !rustix::process::geteuid().is_root() {
            "needs root"
        } else if sibling_binary("pumapool").is_none() {
            "pumapool was not built; `make build` builds it"
        } else if !tools.join("bin/fsx").is_file() && missing("fsx") {
            "fsx is missing; `make tools` installs it"
        } else if ["fio", "ip", "mkfs.ext4"].into_iter().any(missing) {
            "fio, iproute2 or e2fsprogs is missing; `make test-deps` installs them"
        } else if File::options().read(true).write(true).open("/dev/fuse").is_err() {
            "needs /dev/fuse"
        } else {
            let out = Scratch::new(test).unwrap();
            let log = |name: &str| File::create(out.path().join(name)).unwrap();
            let mut command = Command::new(env!("CARGO_BIN_EXE_chaos"));
            command.args(arguments).arg("--out").arg(out.path().join("out")).env("TOOLS", tools);
            command.stdin(Stdio::null()).stdout(log("stdout")).stderr(log("stderr"));
            return Some(Run { child: command.spawn().unwrap(), out });
        };
        skip(test, reason);
        None
    }

    fn said(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.out.path().join(name)).unwrap();
        read("stdout") + &read("stderr")
    }

    fn end(&mut self) -> (Option<i32>, String) {
        assert!(wait_until(LIMIT, || self.child.try_wait().unwrap().is_some()), "it did not end: {}", self.said());
        (self.child.wait().unwrap().code(), self.said())
    }

    /// Groups, namespaces, directories and mounts that it made and that still exist.
    fn left_behind(&self) -> Vec<PathBuf> {
        left_behind(self.child.id())
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            // With a signal that permits cleanup.
            let _ended_meanwhile = kill_process(Pid::from_child(&self.child), Signal::TERM);
            let _ended = self.child.wait();
        }
    }
}

#[test]
fn every_trouble_once_and_nothing_is_wrong_or_left() {
    let Some(mut run) = Run::start("chaos-short-run", &["run", "--seconds", "8"]) else { return };
    let (mut code, mut said) = run.end();
    println!("{said}");
    // In a round this short it can happen that nothing was lent, which the round reports: then it
    // runs once more, with another seed.
    if said.contains("FAILED: 1 violations") && said.contains("this round proves nothing") {
        let Some(again) = Run::start("chaos-short-run", &["run", "--seconds", "8"]) else { return };
        run = again;
        (code, said) = run.end();
        println!("{said}");
    }
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(run.left_behind(), Vec::<PathBuf>::new());
    let json = fs::read_to_string(run.out.path().join("out/chaos.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json.as_array().unwrap().len(), 6);
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let test = "chaos-interrupted";
    let Some(mut run) = Run::start(test, &["run", "--seconds", "60", "--only", "all"]) else { return };
    // The round has begun when the mount has its log, and the load its files.
    let log = run.out.path().join("out/all-mount.log");
    assert!(wait_until(LIMIT, || log.exists() || run.child.try_wait().unwrap().is_some()), "{}", run.said());
    kill_process(Pid::from_child(&run.child), Signal::INT).unwrap();
    let (code, said) = run.end();
    assert_eq!(code, Some(128 + Signal::INT.as_raw()), "{said}");
    assert_eq!(run.left_behind(), Vec::<PathBuf>::new());
}
