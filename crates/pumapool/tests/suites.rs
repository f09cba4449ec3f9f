//! Public test programs through real mounts: fsx, fio with verification, and a POSIX suite whose
//! verdicts must be those of the file system below. `make tools` installs them into the folder
//! TOOLS; `PUMA_FSX_OPS` sets the operations of each fsx run (200,000 in `make test-long`).

mod setup;

use setup::{Lender, Mount, PATIENCE, can_run, tool};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use testbed::{Group, Line, Process, Scratch, Stalls};

/// Longest any of them may take.
const LIMIT: Duration = Duration::from_secs(1800);

/// Limit on the gets that may fail if the machine stalled the daemons: those in progress, twice.
/// Without a measured stall none may fail.
const FAILED_MAX: u64 = 2 * 4;

/// Operations of fsx in one process. Version 0.3.2 does not unmap what it has mapped: a run of
/// 200,000 held 18,620 mappings of the file (`/proc/PID/maps`) when it was killed for memory in a
/// cgroup of 16 MiB, of which it had 8.5 MiB itself and the page cache 2.
const FSX_ROUND_OPS: u64 = 20_000;

/// A lender, a mount of a fresh directory with it, and a small memory cgroup for whoever uses the
/// mount.
struct Bench {
    group: Group,
    mount: Mount,
    lender: Lender,
    stalls: Stalls,
    scratch: Scratch,
}

impl Bench {
    fn new(test: &str, group_bytes: u64, options: &[&str]) -> Option<Bench> {
        let group = match Group::create(test, Some(group_bytes), None) {
            Ok(group) => group,
            Err(error) => {
                testbed::skip(test, error);
                return None;
            }
        };
        let scratch = Scratch::new(test).unwrap();
        let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
        let lender = Lender::start(scratch.path(), "256MiB", &[]);
        let options: Vec<_> = ["--lender", &lender.address].into_iter().chain(options.iter().copied()).collect();
        let mount = Mount::start(&source, &at, &options);
        let stalls = setup::stalls();
        mount.measure(&lender, &stalls);
        Some(Bench { group, mount, lender, stalls, scratch })
    }

    /// Runs the command in the cgroup; returns whether it was content, and what it said.
    fn run(&self, mut command: Command) -> (bool, String) {
        command.stdin(Stdio::null());
        let mut process = Process::spawn(command, &[&self.group]).unwrap();
        let mut said = String::new();
        while let Line::Text(line) = process.next_line(LIMIT) {
            said.push_str(&line);
            said.push('\n');
        }
        let status = process.wait(PATIENCE).unwrap().expect("it ends after its output");
        (status.success(), said)
    }

    fn nothing_was_wrong(&self) {
        let (bad, failed) = (self.mount.count(|of| of.bad_pages), self.mount.count(|of| of.get_failures));
        println!(
            "from the lender {} pages, from put buffers {}, sent {}, READs repeated {}, not trusted {}",
            self.mount.count(|of| of.lender_pages),
            self.mount.count(|of| of.buffer_pages),
            self.mount.count(|of| of.put_pages),
            self.mount.count(|of| of.reads_repeated),
            self.mount.count(|of| of.evictions_not_trusted),
        );
        assert_eq!(bad, 0);
        // A failed get changes no byte, so a run with a measured stall need not be repeated.
        let _is_explained = setup::all_answered(failed, &self.stalls);
        assert!(failed <= FAILED_MAX, "{failed} gets failed");
        assert!(self.mount.count(|of| of.lender_pages) > 0, "nothing came from the lender: this run proves nothing");
        assert_eq!(self.lender.count(|of| of.malformed_frames), 0);
    }
}

fn fsx(test: &str, options: &[&str]) {
    let (true, Some(fsx)) = (can_run(test), tool(test, "fsx")) else { return };
    let Some(bench) = Bench::new(test, 16 << 20, options) else { return };
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let operations = number("PUMA_FSX_OPS").unwrap_or(FSX_ROUND_OPS);
    let seed = number("PUMA_SEED").unwrap_or_else(|| fastrand::u32(..).into());
    let config = bench.scratch.path().join("fsx.toml");
    // It keeps the file's contents twice in its own memory, so the file is a third of the cgroup.
    fs::write(&config, testbed::fsx_settings(4 << 20)).unwrap();
    let file = bench.mount.path.join("fsx");
    fs::write(&file, "").unwrap();
    let round = |round: u64| {
        let (seed, operations) = (seed + round, FSX_ROUND_OPS.min(operations - round * FSX_ROUND_OPS));
        println!("PUMA_SEED={seed} PUMA_FSX_OPS={operations}");
        let mut command = Command::new(&fsx);
        command.args(["-N", &operations.to_string(), "-S", &seed.to_string(), "-f"]).arg(&config);
        command.arg("-P").arg(bench.scratch.path()).arg(&file).stderr(Stdio::inherit());
        let (content, said) = bench.run(command);
        assert!(content, "fsx found a difference, or was killed (seed {seed}): {said}");
    };
    let done = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        // Memory alone evicts little of a file this small: have the kernel evict all it can, all
        // the time.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                setup::evict(&file);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let rounds = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            (0..operations.div_ceil(FSX_ROUND_OPS)).for_each(round);
        }));
        done.store(true, Ordering::Relaxed);
        rounds
    });
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    bench.nothing_was_wrong();
}

#[test]
fn fsx_exclusive() {
    fsx("fsx_exclusive", &["--strategy", "exclusive", "--fill", "evict"]);
}

#[test]
fn fsx_non_inclusive() {
    fsx("fsx_non_inclusive", &["--strategy", "non-inclusive", "--fill", "evict"]);
}

#[test]
fn fsx_populate_on_read() {
    fsx("fsx_populate_on_read", &["--fill", "read"]);
}

#[test]
fn fsx_write_back() {
    fsx("fsx_write_back", &["--write", "back", "--fill", "evict"]);
}

#[test]
fn fio_verifies_what_it_wrote() {
    let test = "fio_verifies_what_it_wrote";
    let (true, Some(fio)) = (can_run(test), tool(test, "fio")) else { return };
    let Some(bench) = Bench::new(test, 64 << 20, &["--fill", "evict"]) else { return };
    let mut command = Command::new(fio);
    // Four jobs of 64 MiB each: four times the cgroup.
    command.args(["--name=puma", "--rw=randrw", "--bs=8k", "--size=64m", "--numjobs=4", "--ioengine=psync"]);
    command.args(["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--randrepeat=0", "--group_reporting"]);
    command.arg("--fallocate=none").arg(format!("--directory={}", bench.mount.path.display()));
    command.current_dir(bench.scratch.path());
    let (content, said) = bench.run(command);
    assert!(content && said.contains("err= 0") && !said.contains("verify:"), "{said}");
    bench.nothing_was_wrong();
}

/// Differences that docs/user/posix.md explains.
const ACCEPTED: [&str; 1] = ["link::link_count_max"];

/// Verdicts of the POSIX suite in a directory, by case.
fn verdicts(suite: &Path, config: &Path, directory: &Path) -> BTreeMap<String, String> {
    let output = Command::new(suite).arg("-c").arg(config).arg("-p").arg(directory).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let cases = said.lines().filter_map(|line| {
        let (case, verdict) = line.split_once(char::is_whitespace)?;
        case.contains("::").then(|| (case.to_owned(), verdict.trim().to_owned()))
    });
    let cases: BTreeMap<_, _> = cases.collect();
    assert!(cases.len() > 300, "the suite ran {} cases only: {said}", cases.len());
    cases
}

#[test]
fn posix_suite_gives_the_verdicts_of_the_file_system_below() {
    let test = "posix_suite_gives_the_verdicts_of_the_file_system_below";
    let (true, Some(suite)) = (can_run(test), tool(test, "pjdfstest")) else { return };
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let config = scratch.path().join("suite.toml");
    fs::write(
        &config,
        "[features]\nposix_fallocate = {}\nrename_ctime = {}\nutimensat = {}\nutime_now = {}\nstat_st_birthtime = {}\n\
         [settings]\nnaptime = 0.02\nallow_remount = false\n\
         [dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n",
    )
    .unwrap();
    // The suite works as other users, too: the way there must be open to them.
    for path in [scratch.path(), &source] {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let below = verdicts(&suite, &config, &source);
    let mount = Mount::start(&source, &at, &[]);
    let through = verdicts(&suite, &config, &mount.path);
    let differences: Vec<_> = below
        .iter()
        .filter(|(case, verdict)| through.get(*case) != Some(verdict) && !ACCEPTED.contains(&case.as_str()))
        .map(|(case, verdict)| format!("{case}: below {verdict}, through the mount {:?}", through.get(case)))
        .collect();
    println!("{} cases, {} differences", below.len(), differences.len());
    assert!(differences.is_empty(), "{differences:#?}");
}
