//! Configuration files of real daemons: that they are read, also again on SIGHUP, and what becomes
//! of them when they are broken.

mod setup;

use report::{LinkState, Strategy};
use rustix::process::Signal;
use setup::{Lender, PATIENCE, PUMAPOOL, can_run, key_file, pumapool, write_pages};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use testbed::{Process, Scratch, ask_daemon, wait_until, wait_until_ok};

/// For an answer. While a successor takes a mount over, nobody answers: then another one is asked
/// for.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// A daemon with a configuration, in the foreground and without a terminal, as under systemd.
struct Configured {
    process: Process,
    file: PathBuf,
    log: PathBuf,
}

impl Configured {
    fn start(kind: &'static str, scratch: &Path, text: &str, arguments: &[&str]) -> Configured {
        let (file, log) = (scratch.join(format!("{kind}.toml")), scratch.join(format!("{kind}.log")));
        fs::write(&file, text).unwrap();
        let mut command = Command::new(PUMAPOOL);
        command.arg(kind).arg("--config").arg(&file).args(arguments);
        command.stdin(Stdio::null()).stderr(File::create(&log).unwrap());
        let mut process = Process::spawn(command, &[]).unwrap();
        let ready = process.wait_for_line("READY", PATIENCE);
        assert!(ready.is_ok(), "{ready:?}: {}", fs::read_to_string(&log).unwrap());
        Configured { process, file, log }
    }

    fn status<T: report::Reported>(&self) -> T {
        let ask =
            || ask_daemon(self.process.pid(), ANSWER_MAX).map_err(|error| std::io::Error::other(error.to_string()));
        wait_until_ok(PATIENCE, ask).unwrap()
    }

    fn lender(&self) -> report::Lender {
        self.status::<report::Lend>().lender
    }

    fn mount(&self) -> report::Mount {
        self.status()
    }

    /// Replaces the configuration, as editors do, and says so. Waits for the line in the log.
    fn reload(&mut self, text: &str, expected: &str) {
        let new = self.file.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, &self.file).unwrap();
        self.process.signal(Signal::HUP).unwrap();
        self.wait_for(expected);
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    fn wait_for(&self, expected: &str) {
        assert!(wait_until(PATIENCE, || self.log().contains(expected)), "no {expected:?} in {}", self.log());
    }
}

#[test]
fn a_lender_takes_over_what_can_change() {
    let scratch = Scratch::new("a_lender_takes_over_what_can_change").unwrap();
    let listen = format!("unix:{}", scratch.path().join("sock").display());
    let text = |more: &str| {
        format!(
            "command = \"lend\"\nlisten = \"{listen}\"\nforeground = true\ncapacity = \"16MiB\"\nkey = \"{}\"\n{more}",
            key_file()
        )
    };
    // Where a lender, which may open hardly any file, may open one that has replaced the one that
    // it began with.
    let folder = scratch.directory("pumapool").unwrap();
    let mut lender =
        Configured::start("lend", &folder, &text("reserve = \"64MiB\"\nrate = \"8MiB\""), &["--reserve", "32MiB"]);
    let status = lender.lender();
    // The command line overrides the file.
    assert_eq!((status.reserve_bytes, status.rate_bytes), (32 << 20, Some(8 << 20)));

    lender.reload(&text("rate = \"9MiB\"\nlog = \"debug\"\ncpu = 50"), "log is debug now");
    let status = lender.lender();
    assert_eq!((status.rate_bytes, status.cpu_percent), (Some(9 << 20), Some(50)));
    // And no limit is one that can be chosen, too.
    lender.reload(&text("log = \"info\""), "log is info now");
    let status = lender.lender();
    assert_eq!((status.rate_bytes, status.cpu_percent), (None, None));
    assert_eq!(status.reserve_bytes, 32 << 20);

    // The log names options that cannot change, and an invalid file changes nothing.
    lender.reload(&text("grace = 5"), "grace cannot change while this runs: it stays 30");
    lender.reload(&text("rate = \"10MiB\"\nrat = 1"), "lend.toml:7: rat: there is no such option");
    assert_eq!(lender.lender().rate_bytes, None);
    fs::remove_file(&lender.file).unwrap();
    lender.process.signal(Signal::HUP).unwrap();
    lender.wait_for("cannot read the configuration");
    lender.reload(&text("rate = \"12MiB\""), "rate is 12MiB now");
    assert_eq!(lender.lender().rate_bytes, Some(12 << 20));
}

#[test]
fn a_lender_opens_no_other_file_beside_its_configuration() {
    let test = "a_lender_opens_no_other_file_beside_its_configuration";
    let scratch = Scratch::new(test).unwrap();
    let listen = format!("unix:{}", scratch.path().join("sock").display());
    let text = |rate: &str| {
        format!(
            "listen = \"{listen}\"\nforeground = true\ncapacity = \"16MiB\"\nkey = \"{}\"\nrate = \"{rate}\"\n",
            key_file()
        )
    };
    let mut lender = Configured::start("lend", scratch.path(), &text("8MiB"), &[]);
    if lender.status::<report::Lend>().confined.files == "all permitted" {
        return testbed::skip(test, "this kernel has no Landlock");
    }
    fs::write(&lender.file, text("9MiB")).unwrap();
    lender.process.signal(Signal::HUP).unwrap();
    lender.wait_for("rate is 9MiB now");
    lender.reload(&text("10MiB"), "write into that one, or restart it");
    assert_eq!(lender.lender().rate_bytes, Some(9 << 20));
}

#[test]
fn a_mount_and_those_that_take_it_over_have_the_configuration() {
    let test = "a_mount_and_those_that_take_it_over_have_the_configuration";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), 8, 1);
    let lender = Lender::start(scratch.path(), "16MiB", &[]);
    let text = |more: &str| {
        let lender = format!("lender = \"{}\"\nkey = \"{}\"\nhedge = \"off\"", lender.address, key_file());
        format!("source = \"{}\"\nmountpoint = \"{}\"\n{lender}\n{more}", source.display(), at.display())
    };
    let mut mount =
        Configured::start("mount", scratch.path(), &text("strategy = \"non-inclusive\"\n"), &["--foreground"]);
    let takeovers = |mount: &Configured| mount.mount().mount.takeovers;
    let kill_daemon = |mount: &Configured| {
        let before = takeovers(mount);
        setup::kill(mount.mount().daemon_pid);
        let is_taken_over = || {
            let status = ask_daemon::<report::Mount>(mount.process.pid(), ANSWER_MAX);
            status.is_ok_and(|status| status.mount.takeovers > before)
        };
        assert!(wait_until(PATIENCE, is_taken_over), "nobody takes over: {}", mount.log());
    };
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    // A lender that no ping is fast enough for is left alone, until it is.
    let state = |mount: &Configured, state: LinkState| {
        let is = || mount.mount().lenders[0].state == state;
        assert!(wait_until(PATIENCE, is), "the lender is not {state}: {}", mount.mount());
    };
    state(&mount, LinkState::Used);
    let thresholds = "strategy = \"non-inclusive\"\ngate-short = \"1,0\"\nfilter = \"off\"\n";
    mount.reload(&text(thresholds), "filter is off now, gate-short is 1,0 now");
    state(&mount, LinkState::Bypassed);
    // A successor begins with it, also when what is in the file by then is broken.
    mount.reload(&text("rat = 1\n"), "mount.toml:6: rat: there is no such option");
    kill_daemon(&mount);
    state(&mount, LinkState::Bypassed);
    mount.reload(&text("strategy = \"non-inclusive\"\n"), "gate-short is 40000,1500 now");
    state(&mount, LinkState::Used);
    // A daemon that ends before it has read it leaves that to its successor.
    let daemon = rustix::process::Pid::from_raw(mount.mount().daemon_pid as i32).unwrap();
    rustix::process::kill_process(daemon, Signal::STOP).unwrap();
    fs::write(&mount.file, text(thresholds)).unwrap();
    mount.process.signal(Signal::HUP).unwrap();
    setup::kill(daemon.as_raw_nonzero().get() as u32);
    state(&mount, LinkState::Bypassed);
    mount.reload(&text("strategy = \"non-inclusive\"\n"), "filter is on now, gate-short is 40000,1500 now");
    state(&mount, LinkState::Used);
    // The log level of the daemon, and then of its successor.
    mount.reload(&text("strategy = \"non-inclusive\"\nlog = \"debug\"\n"), "log is debug now");
    // Broken from here on: it goes on, and so does the one that takes over.
    mount.reload(
        &text("strategy = \"none\"\n"),
        "mount.toml:6: strategy: \"none\": write one of exclusive, non-inclusive",
    );
    kill_daemon(&mount);
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    assert_eq!(mount.mount().strategy, Strategy::NonInclusive);
    let output = pumapool(&["upgrade", at.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    assert!(fs::read(at.join("file")).unwrap() == bytes);
    setup::umount(at.to_str().unwrap());
    assert!(mount.process.wait(PATIENCE).unwrap().is_some_and(|status| status.success()));
}

#[test]
fn in_the_background_and_without_a_configuration() {
    let scratch = Scratch::new("in_the_background").unwrap();
    let (file, log) = (scratch.path().join("lend.toml"), scratch.path().join("log"));
    let socket = scratch.path().join("sock");
    let text =
        format!("listen = \"unix:{}\"\nlog-file = \"{}\"\ncapacity = \"4MiB\"\n", socket.display(), log.display());
    fs::write(&file, &text).unwrap();
    // A relative path, of which the daemon leaves the folder.
    let started =
        Command::new(PUMAPOOL).args(["lend", "--config", "lend.toml"]).current_dir(scratch.path()).output().unwrap();
    assert!(started.status.success(), "{started:?}");
    let ours = format!("unix:{}", socket.display());
    let lenders = setup::all().lenders;
    let lender = &lenders.iter().find(|lender| lender.status.listen == ours).unwrap().status;
    let pid = rustix::process::Pid::from_raw(lender.pid as i32).unwrap();
    fs::write(&file, format!("{text}rate = \"8MiB\"\n")).unwrap();
    rustix::process::kill_process(pid, Signal::HUP).unwrap();
    let read = |text: &str| wait_until(PATIENCE, || fs::read_to_string(&log).unwrap_or_default().contains(text));
    let changed = read("rate is 8MiB now");
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert!(changed && wait_until(PATIENCE, || !socket.exists()), "{}", fs::read_to_string(&log).unwrap());

    // Without one, SIGHUP means nothing.
    let mut command = Command::new(PUMAPOOL);
    command.args(["lend", "--foreground", "--capacity", "4MiB", "--listen", &ours]);
    let log = File::create(scratch.path().join("second")).unwrap();
    let mut lender = Process::spawn(
        {
            command.stdin(Stdio::null()).stderr(log);
            command
        },
        &[],
    )
    .unwrap();
    lender.wait_for_line("READY", PATIENCE).unwrap();
    lender.signal(Signal::HUP).unwrap();
    let said = || fs::read_to_string(scratch.path().join("second")).unwrap();
    assert!(wait_until(PATIENCE, || said().contains("there is no configuration to read again")), "{}", said());
    assert!(ask_daemon::<report::Lend>(lender.pid(), ANSWER_MAX).is_ok());
}

#[test]
fn a_file_is_checked() {
    let scratch = Scratch::new("a_file_is_checked").unwrap();
    let file = scratch.path().join("some.toml");
    let path = file.to_str().unwrap();
    let check = |text: &str, more: &[&str]| {
        fs::write(&file, text).unwrap();
        let output = pumapool(&[&["config", "check", path], more].concat());
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert_eq!(said.lines().count(), 1, "{said}");
        (output.status.code(), said)
    };
    assert_eq!(check("command = \"lend\"\nlisten = \"unix:/x\"", &[]).0, Some(0));
    assert_eq!(check("listen = \"unix:/x\"", &["--command", "lend"]).0, Some(0));
    assert_eq!(check("fs = \"/\"\nto = \"vsock:2:7\"", &["--command", "host-cache guest"]).0, Some(0));
    for (text, more, problem) in [
        ("listen = \"unix:/x\"", &[][..], "name the command that reads it"),
        ("command = \"lend\"\ncapacity = \"1GiB\"", &[], "--listen <ADDR>"),
        ("command = \"lend\"\nlisten = \"unix:/x\"\ngossip = \"1.2.3.4:5\"", &[], "--pool <SEED_ADDR>"),
        ("command = \"lend\"\nlisten = 7", &[], "some.toml:2: listen: "),
        ("command = \"status\"\n", &[], "is not a daemon"),
        ("command = \"lent\"\n", &[], "lent"),
        (
            "command = \"lend\"\nlisten = \"unix:/x\"\nlog = \"lender=loud\"",
            &[],
            "some.toml:3: log: \"lender=loud\": write error,",
        ),
        ("\u{0}", &["--command", "lend"], "some.toml:1: "),
    ] {
        let (code, said) = check(text, more);
        assert!(code == Some(1) && said.contains(problem), "{text:?}: {said}");
    }
    // The output of the command itself.
    for (arguments, problem) in [
        (
            &["lend", "--config", path][..],
            "some.toml: the following required arguments were not provided: --listen <ADDR>",
        ),
        (&["lend", "--config", path, "--listen", "unix:/x", "--nonsense"], "unexpected argument '--nonsense'"),
    ] {
        fs::write(&file, "capacity = \"1GiB\"").unwrap();
        let output = pumapool(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && said.contains(problem) && said.lines().count() == 1, "{said}");
    }
    let output = pumapool(&["lend", "--config", path, "--help"]);
    assert!(output.status.success() && String::from_utf8(output.stdout).unwrap().contains("--listen"));
    fs::write(&file, "# x\n".repeat(20_000)).unwrap();
    let output = pumapool(&["lend", "--config", path]);
    assert!(
        output.status.code() == Some(1) && String::from_utf8_lossy(&output.stderr).contains("is longer than"),
        "{output:?}"
    );
}
