//! `pumapool numa` on this machine, which has one node, or some: what tests/vm/numa does with four
//! is its to test.

mod setup;

use serde_json::Value;
use setup::pumapool;
use std::process::{Command, Output};

fn said(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

fn nodes() -> usize {
    let (listed, _) = said(&pumapool(&["numa", "list", "--json"]));
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert!(
        listed["processes"].as_array().unwrap().iter().any(|one| !one["pages_by_node"].as_object().unwrap().is_empty())
    );
    listed["nodes"].as_array().unwrap().len()
}

#[test]
fn every_command_says_where_there_is_one_node() {
    let (listed, _) = said(&pumapool(&["numa", "list"]));
    assert!(listed.starts_with("NODE") && listed.lines().count() >= 2, "{listed}");
    if nodes() > 1 {
        eprintln!("SKIPPED every_command_says_where_there_is_one_node: this machine has several");
        return;
    }
    assert!(listed.contains("this machine has one node"), "{listed}");
    let mut sleeper = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = sleeper.id().to_string();
    for policy in ["round-4k", "round-1g", "first-touch", "carrefour", "none"] {
        let output = pumapool(&["numa", "apply", "--pid", &pid, "--policy", policy]);
        assert!(
            output.status.success() && said(&output).0.contains("this machine has one node"),
            "{policy}: {output:?}"
        );
        let output = pumapool(&["numa", "run", "--policy", policy, "--", "sh", "-c", "echo done; exit 7"]);
        let (out, err) = said(&output);
        assert_eq!((output.status.code(), out.as_str()), (Some(7), "done\n"), "{policy}: {err}");
        assert!(err.contains("this machine has one node") && err.lines().count() == 1, "{err}");
    }
    let output = pumapool(&["numa", "apply", "--json", "--pid", &pid, "--policy", "round-4k"]);
    let json: Value = serde_json::from_str(&said(&output).0).unwrap();
    assert!(json["applied"]["moved_pages"] == 0 && json["note"].is_string(), "{json}");
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
}

#[test]
fn bad_input_is_told_in_one_line() {
    let mut ended = Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let pid = ended.id().to_string();
    for (arguments, word) in [
        (&["apply", "--pid", &pid, "--policy", "round-4k"][..], "there is no process"),
        (&["apply", "--vm", "no such machine", "--policy", "round-4k"], "no such machine"),
        (&["run", "--policy", "none", "--", "/no/such/program"], "/no/such/program"),
    ] {
        let output = pumapool(&[&["numa"], arguments].concat());
        let (_, err) = said(&output);
        let last = err.lines().last().unwrap_or_default();
        assert!(!output.status.success() && last.contains(word), "{arguments:?}: {err}");
        assert!(!err.contains("panicked"), "{err}");
    }
    for arguments in [
        &["apply", "--policy", "round-4k"][..],
        &["apply", "--pid", "1", "--vm", "x", "--policy", "none"],
        &["run", "--policy", "best", "--", "true"],
    ] {
        assert_eq!(pumapool(&[&["numa"], arguments].concat()).status.code(), Some(2), "{arguments:?}");
    }
}
