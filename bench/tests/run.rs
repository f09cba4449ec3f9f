//! The benches themselves, on next to nothing: they are listed, bad names are told, one has its figures in the right place, and nothing is
//! left behind.

use serde_json::Value;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use testbed::{Scratch, SlowDisk, sibling_binary, skip};

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn they_are_listed() {
    let output = bench(&["--list"]);
    assert_eq!(output.status.code(), Some(0));
    let listed = text(&output.stdout);
    let names: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["sequential", "reclaim", "never-slower"]);
}

#[test]
fn a_bad_name_is_told_in_one_line() {
    let output = bench(&["no-such-bench", "--quick"]);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    let said = text(&output.stderr);
    assert!(said.lines().count() == 1 && said.contains("no-such-bench") && said.contains("never-slower"), "{said}");
}

/// Runs one on little data and returns its JSON. None, with a word on it, where the machine does not have what it needs.
fn tiny(name: &str) -> Option<Value> {
    // On a disk.
    let scratch = Scratch::new_in(Path::new(env!("CARGO_TARGET_TMPDIR")), &format!("bench-{name}")).unwrap();
    let test = format!("a tiny {name}");
    if let Err(error) = SlowDisk::create("bench-test", scratch.path()) {
        skip(&test, error);
        return None;
    }
    if sibling_binary("pumapool").is_none() {
        skip(&test, "pumapool was not built; `make build` builds it");
        return None;
    }
    if File::options().read(true).write(true).open("/dev/fuse").is_err() {
        skip(&test, "needs /dev/fuse");
        return None;
    }
    let directory = scratch.path().to_str().unwrap();
    let output = bench(&[name, "--tiny", "--json", "--seed", "7", "--dir", directory]);
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    println!("{said}{complained}");
    assert_eq!(output.status.code(), Some(0), "{complained}");
    let left: Vec<PathBuf> = std::fs::read_dir(scratch.path()).unwrap().flatten().map(|entry| entry.path()).collect();
    assert!(left.is_empty(), "{left:?} is left behind");
    let json: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    assert_eq!((&json["bench"], &json["seed"], &json["extent"]), (&name.into(), &7.into(), &"tiny".into()));
    assert!(json["conditions"]["kernel"].is_string());
    Some(json)
}

#[test]
fn sequential_has_its_figures() {
    let Some(json) = tiny("sequential") else { return };
    assert!(json["ratio"].as_f64().unwrap() > 0.0);
    // No share of a phase this short: puts of the warm-up may be sent in it.
    assert!(json["put_share"].as_f64().is_some_and(|share| share.is_finite() && share >= 0.0));
    assert_eq!(json["with_mb_per_s"]["values"].as_array().unwrap().len(), 1);
}

#[test]
fn reclaim_has_its_figures() {
    let Some(json) = tiny("reclaim") else { return };
    for key in ["mean_ratio", "p99_ratio"] {
        assert!(json[key].as_f64().unwrap() > 0.0, "{key}");
    }
    assert!((0.0..=1.0).contains(&json["hot_hit_ratio"].as_f64().unwrap()));
    assert!(json["full"]["lent_mib"]["median"].as_f64().unwrap() > 64.0, "the lender was not filled");
    assert_eq!(json["empty"]["lent_mib"]["median"], 0.0);
}

#[test]
fn never_slower_has_its_figures() {
    let Some(json) = tiny("never-slower") else { return };
    assert!(json["min_ratio"].as_f64().unwrap() > 0.0);
    assert_eq!(json["min_ratio_cell"], "random, twice, 0 ms");
    assert_eq!(json["cells"].as_array().unwrap().len(), 1);
}
