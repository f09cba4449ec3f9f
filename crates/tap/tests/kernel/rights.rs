//! Without the rights it needs, the tap says which, in one line.

use crate::setup::skip;
use std::os::unix::process::CommandExt;
use std::process::Command;
use tap::{BpfTap, Target};

/// The user who may do nothing.
const NOBODY: u32 = 65_534;

/// Marks the answer among what the test harness prints.
const ANSWER: &str = "answer: ";

#[test]
#[ignore = "the child of without_rights_it_says_so"]
fn try_to_load() {
    match BpfTap::load(Target::default(), BpfTap::RING_BYTES_MIN) {
        Ok(_) => println!("{ANSWER}loaded"),
        Err(error) => println!("{ANSWER}{error}"),
    }
}

#[test]
fn without_rights_it_says_so() {
    const TEST: &str = "without_rights_it_says_so";
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--ignored", "--exact", "--nocapture", "rights::try_to_load"]).uid(NOBODY).gid(NOBODY);
    let output = match child.output() {
        Ok(output) => output,
        Err(error) => return skip(TEST, format!("starting the test program as another user failed: {error}")),
    };
    let stdout = String::from_utf8_lossy(&output.stdout);
    let Some((_, answer)) = stdout.split_once(ANSWER) else {
        panic!("no answer in {stdout:?}, {:?}", String::from_utf8_lossy(&output.stderr));
    };
    let answer = answer.lines().next().unwrap();
    println!("{answer}");
    assert!(answer.contains("was not permitted; run as root, or with CAP_BPF"), "{answer}");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("libbpf"), "libbpf's own words stay off the terminal");
}
