//! Short runs of the hunter: nothing is wrong and nothing is left behind; and the hunter finds a
//! deliberate fault.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use testbed::{FileSystem, Scratch, left_behind, sibling_binary, skip, wait_until};

/// Generous, because the machine may be busy.
const LIMIT: Duration = Duration::from_secs(300);

/// Held by a run, because each keeps all processors busy.
static ALONE: Mutex<()> = Mutex::new(());

/// A run, and its output.
struct Run {
    child: Child,
    out: Scratch,
    /// Dropped last.
    _alone: MutexGuard<'static, ()>,
}

impl Run {
    /// Returns `None`, with a message, if the machine lacks something that it needs.
    fn start(test: &str, arguments: &[&str]) -> Option<Run> {
        let maker = FileSystem::Ext4.maker();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let reason = if !rustix::process::geteuid().is_root() {
            "needs root"
        } else if sibling_binary("pumapool").is_none() {
            "pumapool was not built; `make build` builds it"
        } else if !std::env::split_paths(&path).any(|folder| folder.join(&maker).is_file()) {
            "e2fsprogs is missing; `make test-deps` installs it"
        } else if File::options().read(true).write(true).open("/dev/fuse").is_err() {
            "needs /dev/fuse"
        } else {
            let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
            let out = Scratch::new(test).unwrap();
            let mut command = Command::new(env!("CARGO_BIN_EXE_hunt"));
            command.args(["--fs", "ext4", "--write", "through", "--out"]).arg(out.path()).args(arguments);
            let log = |name: &str| File::create(out.path().join(name)).unwrap();
            command.stdin(Stdio::null()).stdout(log("stdout")).stderr(log("stderr"));
            return Some(Run { child: command.spawn().unwrap(), out, _alone: alone });
        };
        skip(test, reason);
        None
    }

    fn said(&self) -> String {
        let read = |name: &str| std::fs::read_to_string(self.out.path().join(name)).unwrap();
        read("stdout") + &read("stderr")
    }

    /// Its exit code and its output. Nothing of it must be left.
    fn end(&mut self) -> (Option<i32>, String) {
        assert!(wait_until(LIMIT, || self.child.try_wait().unwrap().is_some()), "it does not end: {}", self.said());
        assert_eq!(left_behind(self.child.id()), Vec::<std::path::PathBuf>::new());
        (self.child.wait().unwrap().code(), self.said())
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let _ended_meanwhile = rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal);
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            self.signal(rustix::process::Signal::TERM);
            let _ended = self.child.wait();
        }
    }
}

#[test]
fn nothing_is_wrong_and_nothing_is_left() {
    let Some(mut run) = Run::start("hunt-short", &["--seconds", "3"]) else { return };
    let (code, said) = run.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("No wrong byte in") && said.contains("blocks judged"), "{said}");
}

#[test]
fn a_wrong_byte_is_found_and_told() {
    let Some(mut run) = Run::start("hunt-corrupt", &["--seconds", "60", "--corrupt", "--seed", "5", "--no-kills"])
    else {
        return;
    };
    let (code, said) = run.end();
    assert_eq!(code, Some(1), "{said}");
    for told in
        ["WRONG BYTES by ", "may be seen: ", "was seen: ", "below: ", "the last operations on block ", "--seed 5"]
    {
        assert!(said.contains(told), "{told:?} is not in: {said}");
    }
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let Some(mut run) = Run::start("hunt-interrupted", &["--seconds", "60"]) else { return };
    // The round has begun when the mount has its log.
    let log = run.out.path().join("mount-ext4-through.log");
    assert!(wait_until(LIMIT, || log.exists() || run.child.try_wait().unwrap().is_some()), "{}", run.said());
    run.signal(rustix::process::Signal::INT);
    let (code, said) = run.end();
    assert_eq!(code, Some(130), "{said}");
}
