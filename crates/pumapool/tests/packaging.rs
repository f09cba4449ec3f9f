//! The files packaged with the program: systemd accepts the units, and pumapool has the commands in
//! the units and the examples.

mod setup;

use setup::{PATIENCE, PUMAPOOL, can_run, pumapool};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output};
use testbed::{Scratch, wait_until};

fn packaging(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(folder);
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
        // It is one of a daemon, which takes a configuration: what is wrong with this one is that
        // key.
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

/// As the package's scripts do: with a program at a path of its own, so that nobody else's mounts
/// are concerned.
#[test]
fn all_mounts_of_a_program_are_upgraded_and_unmounted() {
    let test = "all_mounts_of_a_program_are_upgraded_and_unmounted";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let program = scratch.path().join("pumapool");
    let install = || {
        let new = scratch.path().join("new");
        fs::copy(PUMAPOOL, &new).unwrap();
        fs::rename(new, &program).unwrap();
    };
    install();
    // Another test that is starting a program may have the copy open for writing until it is
    // executed: then it is busy.
    let run = |arguments: &[&str]| -> Output {
        let mut output = None;
        wait_until(PATIENCE, || {
            Command::new(&program)
                .args(arguments)
                .output()
                .is_ok_and(|done| output.insert(done).status.code().is_some())
        });
        output.unwrap()
    };
    let places: Vec<_> = ["one", "two"].iter().map(|name| scratch.directory(name).unwrap()).collect();
    let source = scratch.directory("source").unwrap();
    fs::write(source.join("file"), "below").unwrap();
    for place in &places {
        let output = run(&["mount", source.to_str().unwrap(), place.to_str().unwrap()]);
        assert!(output.status.success(), "{output:?}");
    }
    let open = fs::File::open(places[0].join("file")).unwrap();
    install();
    let output = run(&["upgrade", "--all"]);
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.lines().count() == 2 && places.iter().all(|place| said.contains(place.to_str().unwrap())), "{said}");
    assert_eq!(std::io::read_to_string(&open).unwrap(), "below");
    // One is in use: the other one goes.
    let output = run(&["umount", "--all"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.lines().count() == 1 && said.contains("one is in use"), "{said}");
    assert!(places[0].join("file").exists() && !places[1].join("file").exists());
    drop(open);
    assert!(wait_until(PATIENCE, || run(&["umount", "--all"]).status.success()));
    assert!(!places[0].join("file").exists());
}
