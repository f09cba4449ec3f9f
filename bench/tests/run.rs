//! Tests of the benches, with minimal data: they are listed, wrong names are reported, each has its
//! figures in the right place, and nothing is left behind. The figures themselves mean nothing:
//! other tests run at the same time.

use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
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
    assert_eq!(
        names,
        [
            "hit-latency",
            "hit-throughput",
            "page-server",
            "cached-read",
            "bypass",
            "metadata",
            "write",
            "tap",
            "guest",
            "watch",
            "footprint",
            "sequential",
            "reclaim",
            "never-slower",
            "neighbours",
            "paper",
            "paper",
            "paper",
            "paper",
            "paper",
            "paper",
            "paper",
            "paper",
            "paper",
            "paper",
            "paper",
            "paper",
            "paper",
            "paper"
        ]
    );
    assert!(listed.contains("paper random-read: ") && listed.contains("paper sequential-read: "), "{listed}");
}

#[test]
fn a_bad_name_is_told_in_one_line() {
    let output = bench(&["bypass", "tap"]);
    assert_eq!(output.status.code(), Some(2), "two at once");
    let output = bench(&["paper", "no-such-experiment"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(said.lines().count() == 1 && said.contains("no-such-experiment") && said.contains("random-read"), "{said}");
    let output = bench(&["no-such-bench", "--quick"]);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    let said = text(&output.stderr);
    assert!(said.lines().count() == 1 && said.contains("no-such-bench") && said.contains("never-slower"), "{said}");
}

/// A directory on a disk. `None`, with a message, if the machine lacks something that benches need.
fn place(name: &str) -> Option<Scratch> {
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
    Some(scratch)
}

/// Runs a bench on little data and returns its JSON. `None`, with a message, if the machine lacks
/// something that it needs.
fn tiny(name: &str) -> Option<Value> {
    let scratch = place(name)?;
    let test = format!("a tiny {name}");
    let directory = scratch.path().to_str().unwrap();
    let output = bench(&[name, "--tiny", "--json", "--seed", "7", "--dir", directory]);
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    println!("{said}{complained}");
    if complained.contains("make bench-deps") {
        skip(&test, complained);
        return None;
    }
    assert_eq!(output.status.code(), Some(0), "{complained}");
    let left: Vec<PathBuf> = std::fs::read_dir(scratch.path()).unwrap().flatten().map(|entry| entry.path()).collect();
    assert!(left.is_empty(), "{left:?} is left behind");
    let json: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    assert_eq!((&json["bench"], &json["seed"], &json["extent"]), (&name.into(), &7.into(), &"tiny".into()));
    assert!(json["conditions"]["kernel"].is_string());
    Some(json)
}

/// Runs a bench and checks its figures.
fn has_figures(name: &str, positive: &[&str], any: &[&str]) {
    let Some(json) = tiny(name) else { return };
    let figure = |key: &str| json[key].as_f64().unwrap_or_else(|| panic!("{key} is {}", json[key]));
    for key in positive {
        assert!(figure(key) > 0.0, "{key}");
    }
    // A difference of two measurements may have any sign, but must exist.
    any.iter().for_each(|key| assert!(figure(key).is_finite()));
}

#[test]
fn hit_latency_has_its_figures() {
    let keys = ["hit_p50_us", "hit_p99_us", "fuse_floor_p50_us", "tcp_floor_p50_us", "ratio_p50", "sealed_ratio_p50"];
    has_figures("hit-latency", &keys, &[]);
}

#[test]
fn hit_throughput_has_its_figures() {
    let keys = ["iops_4k", "null_iops_4k", "ratio_4k", "gibps_256k_1", "gibps_256k_16", "tcp_gibps"];
    has_figures("hit-throughput", &keys, &[]);
}

#[test]
fn page_server_has_its_figures() {
    let keys = ["get_ratio", "put_ratio", "batch_get_ratio", "batch_put_ratio", "ops_per_core"];
    has_figures("page-server", &keys, &[]);
}

#[test]
fn cached_read_has_its_figures() {
    has_figures("cached-read", &["read_ratio", "mmap_ratio"], &[]);
}

#[test]
fn bypass_has_its_figures() {
    has_figures("bypass", &["ratio"], &[]);
}

#[test]
fn metadata_has_its_figures() {
    has_figures("metadata", &["native_ratio", "best_peer_ratio", "bindfs_ratio", "mergerfs_ratio"], &[]);
}

#[test]
fn write_has_its_figures() {
    has_figures("write", &["through_ratio", "back_ratio"], &[]);
}

#[test]
fn tap_has_its_figures() {
    has_figures("tap", &[], &["ns_per_page", "drop_fraction"]);
}

#[test]
fn guest_has_its_figures() {
    // There are no guests on a file system without a disk of its own.
    if rustix::fs::major(std::fs::metadata(env!("CARGO_TARGET_TMPDIR")).unwrap().dev()) == 0 {
        skip("a tiny guest", "the files are on no disk");
        return;
    }
    has_figures("guest", &["over_tap_ratio", "no_host_ratio"], &[]);
}

#[test]
fn watch_has_its_figures() {
    has_figures("watch", &["hit_ratio", "system_call_hit_ratio", "eviction_ratio"], &[]);
}

#[test]
fn footprint_has_its_figures() {
    has_figures("footprint", &["borrower_base_mib"], &["borrower_bytes_per_page", "lender_bytes_per_page"]);
}

#[test]
fn sequential_has_its_figures() {
    let Some(json) = tiny("sequential") else { return };
    assert!(json["ratio"].as_f64().unwrap() > 0.0);
    // No share in a phase this short: puts of the warm-up may be sent in it.
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
fn neighbours_has_its_figures() {
    let Some(json) = tiny("neighbours") else { return };
    assert_eq!(json["read_ratios"]["values"].as_array().unwrap().len(), 1);
    for name in ["read_ratio", "look_ratio", "direct_look_ratio", "look_over_direct_ratio"] {
        assert!(json[name].as_f64().unwrap() > 0.0, "{name}: {json}");
    }
}

#[test]
fn never_slower_has_its_figures() {
    let Some(json) = tiny("never-slower") else { return };
    assert!(json["min_ratio"].as_f64().unwrap() > 0.0);
    assert_eq!(json["min_ratio_cell"], "random, twice, 0 ms");
    assert_eq!(json["cells"].as_array().unwrap().len(), 1);
}

/// The papers' experiments with minimal data: results are written, and stored points are not
/// measured again. Experiments with go-tpc take minutes to fill a database, and are left to
/// `make paper`.
#[test]
fn the_papers_experiments_have_their_results() {
    let Some(scratch) = place("paper") else { return };
    let results = Scratch::new("paper-results").unwrap();
    let (directory, kept) = (scratch.path().to_str().unwrap(), results.path().to_str().unwrap());
    // Its name, a row of its table, and the number of rows; `None`: some.
    let experiments = [
        ("random-read", "| exclusive | 5 |", Some(6)),
        ("sequential-read", "| non-inclusive, filter | 5 |", Some(6)),
        ("blast", "| exclusive, filter | 5 |", Some(6)),
        ("postmark", "| non-inclusive | 5 |", Some(7)),
        ("latency", "| sequential, gate off | 0 |", Some(6)),
        ("slides", "| lender empty | 4 |", Some(5)),
        ("dynamic", "| with a lender | 0 |", None),
    ];
    let run = |name: &str| {
        let output = bench(&["paper", name, "--tiny", "--dir", directory, "--results", kept]);
        let (said, complained) = (text(&output.stdout), text(&output.stderr));
        println!("{said}{complained}");
        if complained.contains("make paper-deps") {
            skip(&format!("a tiny {name}"), complained);
            return None;
        }
        assert_eq!(output.status.code(), Some(0), "{complained}");
        Some(said)
    };
    for (name, row, rows) in experiments {
        let Some(said) = run(name) else { continue };
        assert!(said.contains("round 1: "), "{said}");
        let page = std::fs::read_to_string(results.path().join("RESULTS.md")).unwrap();
        assert!(page.contains(&format!("## {name}")) && page.contains(row), "{page}");
        let csv = std::fs::read_to_string(results.path().join(format!("{name}.csv"))).unwrap();
        assert!(rows.is_none_or(|rows| csv.lines().count() == 1 + rows), "{csv}");
        assert!(results.path().join(format!("{name}-speed-up.svg")).exists());
        let again = run(name).unwrap();
        assert!(again.contains("kept already") && !again.contains("round 1: "), "{again}");
    }
    assert!(std::fs::read_dir(scratch.path()).unwrap().next().is_none(), "something is left behind");
}
