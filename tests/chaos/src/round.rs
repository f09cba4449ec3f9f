//! One round of chaos: a mount with a lender in trouble and a load on it. The same probe also runs
//! on a mount without a lender and in a plain directory: these show how long this machine needs for
//! the same reads at that moment.

use crate::lender::{Lender, Place};
use crate::network::Network;
use crate::probe::Report;
use crate::probing::Probing;
use crate::puma::{self, Mode};
use crate::scenario::{Scenario, Trouble};
use crate::suite::{Kind, Suite};
use crate::verdict::{Outcome, READ_MAX, judge_probes};
use std::fs;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};
use testbed::{Failure, Interrupt, Puma, PumaMount, Scratch, wait_until};

/// Pause between two checks of everything.
const TICK: Duration = Duration::from_millis(10);
/// Time limit for running programs to end after the load.
const END_MAX: Duration = Duration::from_secs(120);
/// Time limit for gauges to return when the load is over.
const GAUGES_MAX: Duration = Duration::from_secs(60);
/// Reads per second of each of a probe's three readers.
const PROBE_RATE: u32 = 250;
/// Reads and writes per second of each of fio's jobs.
const FIO_JOB_IOPS: u32 = 1_000;
/// Rest between two troubles.
const REST_MS: std::ops::Range<u64> = 300..1500;
/// Rest if the trouble is to happen each second.
const REST_KILLED_MS: std::ops::Range<u64> = 700..1000;

/// The common parts of all rounds.
pub struct Setup<'a> {
    /// The command under test.
    pub puma: &'a Puma,
    /// For mounts, sockets and the like.
    pub scratch: &'a Scratch,
    /// A directory on a disk; empty.
    pub disk: &'a Path,
    /// The duration of the load.
    pub length: Duration,
    /// Whether the run was interrupted.
    pub interrupt: &'a Interrupt,
}

impl Setup<'_> {
    /// Runs a round.
    pub fn round(&self, scenario: Scenario, mode: Mode, seed: u64) -> Result<Outcome, Failure> {
        let name = scenario.name();
        // Directories of this round, empty: nothing of an earlier one is found.
        let folder = |parent: &Path, suffix: &str| {
            let path = parent.join(format!("{name}-{suffix}"));
            fs::create_dir(&path).map_err(Failure::attempted(format!("making {}", path.display()))).map(|()| path)
        };
        let scratch = self.scratch.path();
        let sources = [folder(self.disk, "shared")?, folder(self.disk, "alone")?, folder(self.disk, "plain")?];
        let ats = [folder(scratch, "at")?, folder(scratch, "at-alone")?];
        let place = if scenario.needs_network() {
            Place::Network(Rc::new(Network::create(0)?))
        } else if seed.is_multiple_of(2) {
            Place::Tcp
        } else {
            Place::Unix(scratch.join(format!("{name}.sock")))
        };
        let mut lender = Lender::start(self.puma, place, &format!("{name}-lender"))?;
        let options = ["--strategy", mode.strategy, "--write", mode.write, "--fill", mode.fill];
        let with_lender: Vec<&str> = options.into_iter().chain(["--lender", lender.address()]).collect();
        let mut mount = puma::mount(self.puma, &sources[0], &ats[0], &with_lender, &format!("{name}-mount"))?;
        let alone = puma::mount(self.puma, &sources[1], &ats[1], &["--write", mode.write], &format!("{name}-alone"))?;

        let probe = |directory: &Path| Probing::start(directory, seed, READ_MAX, PROBE_RATE);
        let mut probes = [probe(&ats[0])?, probe(&ats[1])?, probe(&sources[2])?];
        for probe in &mut probes {
            probe.wait_ready(self.interrupt)?;
        }
        let mut suites = [Kind::Fsx, Kind::Fio]
            .map(|kind| Suite::new(kind, &ats[0], scratch, seed, FIO_JOB_IOPS))
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        let rest = if scenario == Scenario::Killed { REST_KILLED_MS } else { REST_MS };
        let mut trouble = Trouble::new(scenario, seed, rest);
        let mut outcome = Outcome::new(scenario.name(), mode.to_string());

        let begin = Instant::now();
        loop {
            self.interrupt.check()?;
            trouble.step(&mut lender)?;
            outcome.note(mount.check());
            let more = begin.elapsed() < self.length && outcome.violations.is_empty();
            if !more {
                suites.iter_mut().for_each(Suite::cut_short);
            }
            let running = suites.iter_mut().map(|suite| suite.step(more)).collect::<Vec<_>>();
            let still = running.iter().any(|running| matches!(running, Ok(true)));
            running.into_iter().for_each(|result| outcome.note(result.map(|_| ())));
            if begin.elapsed() > self.length + END_MAX {
                outcome.violations.push(format!("fio did not end within {END_MAX:?} after the load was to end"));
            }
            if !more && (!still || !outcome.violations.is_empty()) {
                break;
            }
            std::thread::sleep(TICK);
        }
        (outcome.fsx_runs, outcome.fio_runs) = (suites[0].runs, suites[1].runs);
        drop(suites);

        // The written data is read once more while there is still trouble.
        probes.iter_mut().for_each(Probing::finish);
        let mut reports = Vec::new();
        for probe in &mut probes {
            reports.push(probe.report(|| {
                self.interrupt.check()?;
                trouble.step(&mut lender)
            })?);
        }
        trouble.heal(&mut lender)?;
        outcome.seconds = begin.elapsed().as_secs_f64();
        outcome.harm_count = trouble.harm_count;
        judge_probes(&reports, &trouble, &mut outcome);
        self.gauges_return(&mount, &mut outcome);
        let status = outcome.status.insert(mount.status()?);
        if status.borrower.lender_pages == 0 {
            outcome.violations.push("not a page came from a lender: this round proves nothing".to_owned());
        }
        if scenario == Scenario::Hostile && status.borrower.bad_pages == 0 {
            outcome.violations.push("not one lie was found out: this round proves nothing".to_owned());
        }
        outcome.note(mount.end());
        outcome.note(alone.end());
        for ((probe, source), report) in probes.iter().zip(&sources).zip(&reports) {
            outcome.note(probe.check_below(source, report));
        }
        outcome.reports = reports.into_iter().map(|report| Report { generations: Vec::new(), ..report }).collect();
        drop(probes);
        for source in sources {
            fs::remove_dir_all(&source).map_err(Failure::attempted(format!("removing {}", source.display())))?;
        }
        Ok(outcome)
    }

    /// Every gauge of pending work must be zero again when nothing is pending.
    fn gauges_return(&self, mount: &PumaMount, outcome: &mut Outcome) {
        let mut last = String::new();
        let returned = wait_until(GAUGES_MAX, || {
            let Ok(status) = mount.status() else { return false };
            let gauges = [status.mount.open_handles, status.puts_under_way, status.mount.written_bytes_pending];
            let [handles, puts, bytes] = gauges;
            last = format!("{handles} open handles, {puts} puts under way, {bytes} written bytes pending");
            gauges == [0; 3]
        });
        if !returned {
            outcome.violations.push(format!("gauges did not return to zero within {GAUGES_MAX:?}: {last}"));
        }
    }
}
