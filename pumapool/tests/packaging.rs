//! What is packaged beside the program: systemd takes the units, and the commands in them and the examples are ones that pumapool has.

mod setup;

use setup::{PUMAPOOL, pumapool};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use testbed::Scratch;

fn packaging(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging").join(folder);
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Without an exit code of its own: how a check of the file ended, and what it said.
fn check(command: &str, file: &Path) -> (ExitStatus, String) {
    let output = pumapool(&["config", "check", "--command", command, file.to_str().unwrap()]);
    (output.status, String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

#[test]
fn systemd_takes_the_units() {
    let test = "systemd_takes_the_units";
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return testbed::skip(test, "systemd-analyze is missing: install systemd");
    }
    let scratch = Scratch::new(test).unwrap();
    let verify = |change: &dyn Fn(String) -> String| {
        let units: Vec<_> = packaging("systemd")
            .iter()
            .map(|unit| {
                // Where the program is here.
                let text = fs::read_to_string(unit).unwrap().replace("/usr/bin/pumapool", PUMAPOOL);
                let copy = scratch.path().join(unit.file_name().unwrap());
                fs::write(&copy, change(text)).unwrap();
                copy
            })
            .collect();
        assert!(units.len() >= 3, "{units:?}");
        let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).args(&units).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(verify(&|text| text), (true, String::new()));
    assert!(verify(&|text| text.replace("Type=notify", "Tpye=notify")).1.contains("Tpye"));
}

#[test]
fn units_run_commands_that_there_are() {
    let scratch = Scratch::new("units_run_commands_that_there_are").unwrap();
    let file = scratch.path().join("empty.toml");
    fs::write(&file, "rat = 1\n").unwrap();
    for unit in packaging("systemd") {
        let text = fs::read_to_string(&unit).unwrap();
        let command = text.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/pumapool ")).unwrap();
        let (command, rest) = command.split_once(" --foreground ").unwrap();
        assert_eq!(rest, "--config /etc/pumapool/%i.toml", "{}", unit.display());
        // It is one of a daemon, which takes a configuration: what is wrong with this one is that key.
        let (_, said) = check(command, &file);
        assert!(said.contains("empty.toml:1: rat: there is no such option"), "{}: {said}", unit.display());
        let quoted = if command.contains(' ') { format!("\"{command}\"") } else { command.to_owned() };
        assert!(
            text.contains(&format!("config check --command {quoted} ")),
            "{}: ExecReload checks another command",
            unit.display()
        );
    }
}

#[test]
fn examples_are_good() {
    let mut count = 0;
    for example in packaging("examples").iter().filter(|path| path.extension().is_some_and(|end| end == "toml")) {
        let command = example.file_stem().unwrap().to_str().unwrap();
        let (status, said) = check(command, example);
        assert!(status.success(), "{said}");
        count += 1;
    }
    assert!(count >= 3);
}
