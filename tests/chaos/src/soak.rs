//! The soak: a mixed load on two mounts for a long time, with some trouble, while every daemon is
//! measured each second.
//!
//! The lender of the first mount meets every trouble. That of the second is never killed, so that
//! its memory can be measured from the beginning to the end. When the load is over, the files are
//! removed and the kernel forgets their inodes. From then on every gauge must return to its value
//! from before. After the mounts have ended, the lenders must be as they were at their start.
//!
//! *Flat*: a daemon's own memory ([`Sample::own_bytes`]), as the median of the last fifth of the
//! run, may exceed the median of the second fifth by at most [`GROWTH_MAX_BYTES`]. In the first
//! fifth caches and buffers fill up; medians ignore single moments. A daemon that was restarted
//! meanwhile is judged from then on, if that was in the first fifth, else not.

use crate::chart;
use crate::churn::Churn;
use crate::lender::{Lender, Place};
use crate::network::Network;
use crate::probe::Report;
use crate::probing::Probing;
use crate::puma::{self, Mode};
use crate::round::Setup;
use crate::sampling::{Sample, fifth, look, median_own_bytes};
use crate::scenario::{Scenario, Trouble};
use crate::suite::{Kind, Suite};
use crate::verdict::{PRINTED_MAX, READ_MAX};
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};
use testbed::{Failure, PumaMount, ask_daemon, wait_until};

/// The maximum growth of a daemon's own memory between the second and the last fifth of a run. A
/// run of ten minutes finds a leak of 12 KB a second, and tolerates an allocator that takes another
/// arena (about 1 MiB a thread).
const GROWTH_MAX_BYTES: u64 = 4 << 20;
/// Time between two measurements of the daemons.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// Pause between two checks of the load.
const TICK: Duration = Duration::from_millis(20);
/// Rests between two troubles, in milliseconds.
const REST_MS: std::ops::Range<u64> = 4_000..15_000;
/// Reads per second of each of a probe's three readers.
const PROBE_RATE: u32 = 60;
/// Reads and writes per second of each of fio's jobs.
const FIO_JOB_IOPS: u32 = 250;
/// Time limit for everything to return to its value.
const RETURN_MAX: Duration = Duration::from_secs(60);
/// Time limit for a lender's status, which is read sometimes while the lender may be stopped.
const LENDER_ANSWER_MAX: Duration = Duration::from_millis(200);

/// A mount and its lender, with their load and trouble.
struct Site {
    name: &'static str,
    mode: Mode,
    source: PathBuf,
    at: PathBuf,
    // Drop order: the load before the mount, the mount before its lender.
    churn: Option<Churn>,
    probe: Option<Probing>,
    suites: Vec<Suite>,
    mount: PumaMount,
    lender: Lender,
    trouble: Trouble,
    /// Of mount and lender, before the load.
    before: [Option<Sample>; 2],
    inodes_before: u64,
    /// Descriptors and threads of the lender without any connection.
    lender_idle: [u64; 2],
    samples: [Vec<Sample>; 2],
    gauges: Vec<Gauges>,
}

/// What a mount and its lender had under way at a moment.
#[derive(Debug, Serialize)]
pub struct Gauges {
    /// Since the beginning.
    pub at_s: f64,
    /// Files and directories that are open.
    pub open_handles: u64,
    /// Inodes that the kernel knows.
    pub inodes: u64,
    /// Bytes whose writeback has not begun.
    pub written_bytes_pending: u64,
    /// Put messages that are not answered.
    pub puts_under_way: u64,
    /// Memory of the catalog.
    pub entry_bytes: u64,
    /// Pages that are lent.
    pub live_pages: u64,
    /// The lender, if it answered.
    #[serde(flatten)]
    pub lender: Option<LenderGauges>,
}

/// What a lender had at a moment.
#[derive(Debug, Serialize)]
pub struct LenderGauges {
    /// Its connections.
    pub lender_connections: u64,
    /// Its borrowers.
    pub lender_borrowers: u64,
    /// Its pages.
    pub stored_pages: u64,
}

/// The result of a soak.
#[derive(Debug, Serialize)]
pub struct Soak {
    /// The seed of everything random.
    pub seed: u64,
    /// The duration of the load.
    pub seconds: f64,
    /// The revision of the source, if git knows it.
    pub revision: String,
    /// Release of the kernel.
    pub kernel: String,
    /// Processors of the machine.
    pub processors: usize,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// A description of the load, one line each.
    pub load: Vec<String>,
    /// Each daemon, by name.
    pub daemons: Vec<(String, Judged)>,
    /// Violations of the requirements.
    pub violations: Vec<String>,
    /// Status figures of each mount, each second.
    pub gauges: Vec<(String, Vec<Gauges>)>,
    /// Each daemon's samples.
    pub samples: Vec<(String, Vec<Sample>)>,
}

/// The judgement of a daemon.
#[derive(Debug, Default, Serialize)]
pub struct Judged {
    /// Median of its own memory in the second fifth.
    pub early_bytes: Option<u64>,
    /// In the last.
    pub late_bytes: Option<u64>,
    /// The maximum of descriptors before the load, and their number after it.
    pub descriptors: [u64; 3],
    /// Threads, likewise.
    pub threads: [u64; 3],
}

impl Site {
    fn start(
        setup: &Setup<'_>,
        name: &'static str,
        scenario: Scenario,
        number: u8,
        mode: Mode,
        seed: u64,
    ) -> Result<Site, Failure> {
        let folder = |path: PathBuf| {
            fs::create_dir(&path).map_err(Failure::attempted(format!("making {}", path.display()))).map(|()| path)
        };
        let source = folder(setup.disk.join(name))?;
        let at = folder(setup.scratch.path().join(format!("at-{name}")))?;
        let private = folder(setup.scratch.path().join(format!("tools-{name}")))?;
        let place = Place::Network(Rc::new(Network::create(number)?));
        let lender = Lender::start(setup.puma, place, &format!("{name}-lender"))?;
        let pid = lender.pid().unwrap_or(0);
        let options =
            ["--strategy", mode.strategy, "--write", mode.write, "--fill", mode.fill, "--lender", lender.address()];
        let mount = puma::mount(setup.puma, &source, &at, &options, &format!("{name}-mount"))?;
        let found = wait_until(RETURN_MAX, || mount.status().is_ok_and(|status| status.lender_is_up));
        if !found {
            return Err(Failure::Problem(format!("the mount {name} does not find its lender")));
        }
        let inodes_before = mount.status()?.mount.inodes;
        let before = [look(mount.pid(), 0.0).ok(), look(pid, 0.0).ok()];
        // Each connection of a lender has a descriptor, and once its handshake has ended no thread.
        // (When it says READY, not all its threads run yet.)
        let connections = ask_daemon::<report::Lend>(pid, RETURN_MAX)?.lender.connections;
        let idle = |figure: fn(&Sample) -> u64| before[1].map_or(0, |now| figure(&now));
        let lender_idle = [idle(|now| now.descriptor_count).saturating_sub(connections), idle(|now| now.thread_count)];
        let suites = [Kind::Fsx, Kind::Fio].map(|kind| Suite::new(kind, &at, &private, seed, FIO_JOB_IOPS));
        Ok(Site {
            name,
            mode,
            churn: Some(Churn::start(&at, seed)),
            probe: Some(Probing::start(&at, seed, READ_MAX, PROBE_RATE)?),
            suites: suites.into_iter().collect::<Result<_, _>>()?,
            source,
            at,
            mount,
            lender,
            trouble: Trouble::new(scenario, seed, REST_MS),
            before,
            inodes_before,
            lender_idle,
            samples: [Vec::new(), Vec::new()],
            gauges: Vec::new(),
        })
    }

    fn sample(&mut self, at_s: f64) {
        let pids = [Some(self.mount.pid()), self.lender.pid()];
        for (samples, pid) in self.samples.iter_mut().zip(pids) {
            samples.extend(pid.and_then(|pid| look(pid, at_s).ok()));
        }
        let Ok(status) = self.mount.status() else { return };
        let mut gauges = Gauges {
            at_s,
            open_handles: status.mount.open_handles,
            inodes: status.mount.inodes,
            written_bytes_pending: status.mount.written_bytes_pending,
            puts_under_way: status.puts_under_way,
            entry_bytes: status.catalog.entry_bytes,
            live_pages: status.catalog.live_pages,
            lender: None,
        };
        if let (false, Some(pid)) = (self.trouble.is_harming(), self.lender.pid())
            && let Ok(report::Lend { lender, .. }) = ask_daemon(pid, LENDER_ANSWER_MAX)
        {
            gauges.lender = Some(LenderGauges {
                lender_connections: lender.connections,
                lender_borrowers: lender.borrowers,
                stored_pages: lender.stored_pages,
            });
        }
        self.gauges.push(gauges);
    }

    /// Ends the load; returns its description, and records its findings.
    fn end_load(&mut self, setup: &Setup<'_>, violations: &mut Vec<String>) -> Result<String, Failure> {
        self.suites.iter_mut().for_each(Suite::cut_short);
        let begin = Instant::now();
        while self.suites.iter_mut().any(|suite| matches!(suite.step(false), Ok(true))) {
            setup.interrupt.check()?;
            if begin.elapsed() > RETURN_MAX * 2 {
                violations.push(format!("{}: fio did not end", self.name));
                break;
            }
            std::thread::sleep(TICK);
        }
        let runs = [self.suites[0].runs, self.suites[1].runs];
        self.suites.clear();
        let mut report = Report::default();
        if let Some(mut probe) = self.probe.take() {
            probe.finish();
            report = probe.report(|| setup.interrupt.check())?;
        }
        for (_, wrong) in report.wrong.iter().take(PRINTED_MAX) {
            violations.push(format!("{}: WRONG BYTES ({} pages): {wrong}", self.name, report.wrong_pages));
        }
        for error in report.errors.iter().take(PRINTED_MAX) {
            violations.push(format!("{}: ERROR ({} in all): {error}", self.name, report.error_count));
        }
        let (operations, problems) = self.churn.take().map(Churn::end).unwrap_or_default();
        violations.extend(problems.into_iter().take(PRINTED_MAX).map(|problem| format!("{}: {problem}", self.name)));
        Ok(format!(
            "{}: {}; {} times harmed; probe {} reads, slowest {} ms; fsx {} runs, fio {}; {operations} operations on names",
            self.name,
            self.mode,
            self.trouble.harm_count,
            report.reads,
            report.max_us / 1000,
            runs[0],
            runs[1],
        ))
    }

    /// Removes all files through the mount, and waits until all gauges have returned.
    fn settle(&mut self, violations: &mut Vec<String>) -> Result<[Judged; 2], Failure> {
        for entry in fs::read_dir(&self.at)?.flatten() {
            let path = entry.path();
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(Failure::attempted(format!("removing {}", path.display())))?;
        }
        let mut last = String::new();
        let mut returned = |what: &str, violations: &mut Vec<String>, state: &mut dyn FnMut(&mut String) -> bool| {
            last.clear();
            if !wait_until(RETURN_MAX, || state(&mut last)) {
                violations.push(format!("{}: {what} did not return within {RETURN_MAX:?}: {last}", self.name));
            }
        };
        let (mount, inodes_before) = (&self.mount, self.inodes_before);
        returned("gauges of the mount", violations, &mut |last| {
            // The kernel forgets unused inodes; it is asked again as long as something still uses
            // them.
            let _as_root = fs::write("/proc/sys/vm/drop_caches", "2");
            let Ok(status) = mount.status() else { return false };
            let gauges = [
                ("open_handles", status.mount.open_handles, 0),
                ("inodes", status.mount.inodes, inodes_before),
                ("written_bytes_pending", status.mount.written_bytes_pending, 0),
                ("written_files_pending", status.mount.written_files_pending, 0),
                ("puts_under_way", status.puts_under_way, 0),
                ("live_pages", status.catalog.live_pages, 0),
                ("entry_bytes", status.catalog.entry_bytes, 0),
            ];
            let above = gauges.iter().filter(|(_, value, limit)| value > limit);
            let above = above.map(|(gauge, value, limit)| format!("{gauge} {value} > {limit}"));
            *last = above.collect::<Vec<_>>().join(", ");
            last.is_empty()
        });
        let pids = [Some(self.mount.pid()), self.lender.pid()];
        let mut judged = [Judged::default(), Judged::default()];
        for (at, (pid, judged)) in pids.into_iter().zip(&mut judged).enumerate() {
            let before = self.before[at].unwrap_or_default();
            let mut after = Sample::default();
            let what = ["descriptors or threads of the mount", "descriptors or threads of the lender"][at];
            returned(what, violations, &mut |last| {
                let Some(now) = pid.and_then(|pid| look(pid, 0.0).ok()) else { return false };
                after = now;
                *last = format!(
                    "{} descriptors and {} threads, before {} and {}",
                    now.descriptor_count, now.thread_count, before.descriptor_count, before.thread_count
                );
                now.descriptor_count <= before.descriptor_count && now.thread_count <= before.thread_count
            });
            let samples = &self.samples[at];
            let most = |figure: fn(&Sample) -> u64| samples.iter().map(figure).max().unwrap_or(0);
            judged.descriptors =
                [before.descriptor_count, most(|sample| sample.descriptor_count), after.descriptor_count];
            judged.threads = [before.thread_count, most(|sample| sample.thread_count), after.thread_count];
            let second = fifth(samples, 1);
            let same = pid.is_some_and(|pid| second.iter().all(|sample| sample.pid == pid));
            if same {
                (judged.early_bytes, judged.late_bytes) =
                    (median_own_bytes(second), median_own_bytes(fifth(samples, 4)));
            }
            if let (Some(early), Some(late)) = (judged.early_bytes, judged.late_bytes)
                && late > early + GROWTH_MAX_BYTES
            {
                violations.push(format!(
                    "{}: {} grew from {early} to {late} bytes of its own",
                    self.name,
                    ["the mount", "the lender"][at]
                ));
            }
        }
        Ok(judged)
    }

    /// Removes the mount; its lender must then be as it was before.
    fn end(self, violations: &mut Vec<String>) {
        let Site { name, mount, lender, lender_idle: [descriptors, threads], .. } = self;
        violations.extend(mount.end().err().map(|problem| format!("{name}: {problem}")));
        let mut last = String::new();
        let returned = wait_until(RETURN_MAX, || {
            let Some(pid) = lender.pid() else { return false };
            let status = ask_daemon::<report::Lend>(pid, LENDER_ANSWER_MAX);
            let (Ok(report::Lend { lender, .. }), Ok(now)) = (status, look(pid, 0.0)) else {
                return false;
            };
            let gauges = [
                ("connections", lender.connections),
                ("borrowers", lender.borrowers),
                ("stored_pages", lender.stored_pages),
                ("zero_pages", lender.zero_pages),
            ];
            let left: Vec<String> = gauges
                .into_iter()
                .filter(|(_, count)| *count > 0)
                .map(|(gauge, count)| format!("{gauge} {count}"))
                .collect();
            last = format!(
                "{} {} descriptors (before {descriptors}), {} threads (before {threads})",
                left.join(", "),
                now.descriptor_count,
                now.thread_count,
            );
            left.is_empty() && now.descriptor_count <= descriptors && now.thread_count <= threads
        });
        if !returned {
            violations.push(format!("{name}: the lender is not as it was before within {RETURN_MAX:?}: {last}"));
        }
    }
}

/// Runs a soak.
pub fn run(setup: &Setup<'_>, seed: u64) -> Result<Soak, Failure> {
    // Two different modes, the first of them with a tap.
    let mut modes = Mode::ALL;
    fastrand::Rng::with_seed(seed).shuffle(&mut modes);
    modes.sort_by_key(|mode| mode.fill != "evict");
    modes[1..].rotate_left((seed % 5) as usize);
    let mut sites = [
        Site::start(setup, "all", Scenario::All, 0, modes[0], seed)?,
        Site::start(setup, "survived", Scenario::Survived, 1, modes[1], seed.wrapping_add(1))?,
    ];
    for site in &mut sites {
        if let Some(probe) = &mut site.probe {
            probe.wait_ready(setup.interrupt)?;
        }
    }
    let mut violations = Vec::new();
    let (begin, mut sampled) = (Instant::now(), Instant::now());
    while begin.elapsed() < setup.length && violations.is_empty() {
        setup.interrupt.check()?;
        for site in &mut sites {
            site.trouble.step(&mut site.lender)?;
            violations.extend(site.mount.check().err());
            violations.extend(site.suites.iter_mut().filter_map(|suite| suite.step(true).err()));
        }
        if sampled.elapsed() >= SAMPLE_EVERY {
            sampled = Instant::now();
            sites.iter_mut().for_each(|site| site.sample(begin.elapsed().as_secs_f64()));
        }
        std::thread::sleep(TICK);
    }
    let seconds = begin.elapsed().as_secs_f64();
    let mut soak = Soak {
        seed,
        seconds,
        revision: output_of("git", &["rev-parse", "HEAD"]),
        kernel: os::kernel::release(),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: rustix::system::sysinfo().totalram * u64::from(rustix::system::sysinfo().mem_unit),
        load: Vec::new(),
        daemons: Vec::new(),
        violations,
        gauges: Vec::new(),
        samples: Vec::new(),
    };
    for site in &mut sites {
        site.trouble.heal(&mut site.lender)?;
        let did = site.end_load(setup, &mut soak.violations)?;
        println!("{did}");
        soak.load.push(did);
    }
    for mut site in sites {
        let [mount, lender] = site.settle(&mut soak.violations)?;
        let names = [format!("mount, {}", site.name), format!("lender, {}", site.name)];
        let [mount_samples, lender_samples] = std::mem::take(&mut site.samples);
        soak.gauges.push((site.name.to_owned(), std::mem::take(&mut site.gauges)));
        soak.samples.extend(names.iter().cloned().zip([mount_samples, lender_samples]));
        soak.daemons.extend(names.into_iter().zip([mount, lender]));
        let source = site.source.clone();
        site.end(&mut soak.violations);
        nothing_left(&source, &mut soak.violations);
    }
    Ok(soak)
}

/// Files that were removed through the mount must be gone in the backing directory.
fn nothing_left(source: &Path, violations: &mut Vec<String>) {
    let left = fs::read_dir(source).map_or(0, |entries| entries.count());
    if left > 0 {
        violations.push(format!("{left} files are left in the backing directory that were removed through the mount"));
    }
}

fn output_of(program: &str, arguments: &[&str]) -> String {
    let output = std::process::Command::new(program).args(arguments).output();
    let text = output.ok().filter(|output| output.status.success()).map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&text).trim().to_owned()
}

impl Soak {
    /// The judged figures.
    pub fn table(&self) -> String {
        let mib = |bytes: Option<u64>| {
            bytes.map_or("-".to_owned(), |bytes| format!("{:.1}", bytes as f64 / f64::from(1 << 20)))
        };
        let mut text = format!(
            "{:<18} {:>22} {:>12} {:>26} {:>26}\n",
            "", "own MiB, 2nd fifth", "last fifth", "descriptors before/most/end", "threads before/most/end"
        );
        for (name, judged) in &self.daemons {
            let three = |numbers: [u64; 3]| numbers.map(|number| number.to_string()).join(" / ");
            text.push_str(&format!(
                "{name:<18} {:>22} {:>12} {:>26} {:>26}\n",
                mib(judged.early_bytes),
                mib(judged.late_bytes),
                three(judged.descriptors),
                three(judged.threads),
            ));
        }
        text
    }

    /// The chart.
    pub fn chart(&self) -> String {
        let revision = self.revision.get(..10).unwrap_or("unknown");
        let subtitle = format!(
            "{:.0} s of fsx, fio, a probe and churn of names, lenders in trouble. Revision {revision}, Linux {}, {} processors, {} GiB, seed {}.",
            self.seconds,
            self.kernel,
            self.processors,
            self.memory_bytes >> 30,
            self.seed,
        );
        chart::draw(&self.samples, &subtitle)
    }
}
