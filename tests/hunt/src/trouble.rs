//! The troubles of daemons and lenders: a schedule from a seed. The daemon is killed, or replaced
//! by `pumapool upgrade`; the lender is killed and started again.

use report::Mount;
use rustix::process::{Pid, Signal, kill_process};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testbed::{Failure, Interrupt, Process, Puma, PumaMount};

/// Between two troubles, in milliseconds.
const REST_MS: std::ops::Range<u64> = 400..2500;
/// Time limit for a successor to serve.
const TAKEOVER_MAX: Duration = Duration::from_secs(60);
/// Pause between two checks of that.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The maximum of lent memory.
const CAPACITY_BYTES: u64 = 128 << 20;

/// Counts of troubles and their results.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Daemons killed.
    pub daemon_kills: u64,
    /// Daemons replaced.
    pub upgrades: u64,
    /// Lenders killed.
    pub lender_kills: u64,
    /// Pages that came from lenders.
    pub lender_pages: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.daemon_kills += other.daemon_kills;
        self.upgrades += other.upgrades;
        self.lender_kills += other.lender_kills;
        self.lender_pages += other.lender_pages;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { daemon_kills, upgrades, lender_kills, lender_pages } = self;
        write!(
            f,
            "{lender_pages} pages from lenders, {daemon_kills} daemon kills, {upgrades} upgrades, \
             {lender_kills} lender kills"
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    KillDaemon,
    Upgrade,
    KillLender,
}

fn choose(random: &mut fastrand::Rng) -> Kind {
    match random.u32(..10) {
        0..5 => Kind::KillDaemon,
        5..7 => Kind::Upgrade,
        _ => Kind::KillLender,
    }
}

/// A lender on a Unix socket.
pub struct Lender {
    puma: Puma,
    socket: PathBuf,
    process: Option<Process>,
}

impl Lender {
    /// Starts one.
    ///
    /// # Errors
    /// Fails if it does not become ready.
    pub fn start(puma: &Puma, socket: PathBuf) -> Result<Lender, Failure> {
        let mut lender = Lender { puma: puma.clone(), socket, process: None };
        lender.run()?;
        Ok(lender)
    }

    /// The address for `--lender`.
    pub fn address(&self) -> String {
        format!("unix:{}", self.socket.display())
    }

    fn run(&mut self) -> Result<(), Failure> {
        let mut command = Command::new(&self.puma.pumapool);
        command.args(["lend", "--foreground", "--trust-network", "--listen", &self.address()]);
        command.args(["--capacity", &CAPACITY_BYTES.to_string(), "--reserve", "64MiB"]).env_remove("PUMAPOOL_KEY_FILE");
        self.process = Some(self.puma.start(command, "lender", &[])?.0);
        Ok(())
    }

    fn kill(&mut self) -> Result<(), Failure> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
        }
        self.run()
    }
}

/// The schedule.
pub struct Trouble<'a> {
    puma: &'a Puma,
    at: &'a Path,
    interrupt: &'a Interrupt,
    random: fastrand::Rng,
    next: Instant,
    /// The counts so far.
    pub counts: Counts,
}

impl<'a> Trouble<'a> {
    /// Without any trouble yet, for the mount at `at`.
    pub fn new(puma: &'a Puma, at: &'a Path, interrupt: &'a Interrupt, seed: u64) -> Trouble<'a> {
        let mut random = fastrand::Rng::with_seed(seed);
        let next = Instant::now() + Duration::from_millis(random.u64(REST_MS));
        Trouble { puma, at, interrupt, random, next, counts: Counts::default() }
    }

    /// Makes the next trouble if it is time.
    ///
    /// # Errors
    /// Fails if no successor serves, or no lender can be started.
    pub fn step(&mut self, mount: &PumaMount, lender: &mut Lender) -> Result<(), Failure> {
        if Instant::now() < self.next {
            return Ok(());
        }
        match choose(&mut self.random) {
            Kind::KillDaemon => {
                let before = self.count_pages(mount)?;
                let pid = i32::try_from(before.daemon_pid).ok().and_then(Pid::from_raw);
                let pid = pid.ok_or_else(|| Failure::Problem(format!("no daemon_pid in the status {before}")))?;
                let _ended_already = kill_process(pid, Signal::KILL);
                self.wait_for_successor(mount, &before)?;
                self.counts.daemon_kills += 1;
            }
            Kind::Upgrade => {
                let before = self.count_pages(mount)?;
                let mut command = Command::new(&self.puma.pumapool);
                let output = command.arg("upgrade").arg(self.at).stdin(Stdio::null()).output();
                let output = output.map_err(Failure::attempted("running pumapool upgrade"))?;
                if !output.status.success() {
                    let said = String::from_utf8_lossy(&output.stderr);
                    return Err(Failure::Problem(format!("pumapool upgrade failed: {}", said.trim())));
                }
                self.wait_for_successor(mount, &before)?;
                self.counts.upgrades += 1;
            }
            Kind::KillLender => {
                lender.kill()?;
                self.counts.lender_kills += 1;
            }
        }
        self.next = Instant::now() + Duration::from_millis(self.random.u64(REST_MS));
        Ok(())
    }

    /// Counts the pages that this daemon has got from lenders, because its successor starts at
    /// zero. Returns the status.
    ///
    /// # Errors
    /// When no daemon tells its status in time.
    pub fn count_pages(&mut self, mount: &PumaMount) -> Result<Mount, Failure> {
        let status = self.status(mount, |_| true)?;
        self.counts.lender_pages += status.borrower.lender_pages;
        Ok(status)
    }

    fn wait_for_successor(&self, mount: &PumaMount, before: &Mount) -> Result<(), Failure> {
        self.status(mount, |status| status.mount.takeovers > before.mount.takeovers).map(drop)
    }

    /// The status, once it is as wanted. While a successor takes over, nobody answers.
    fn status(&self, mount: &PumaMount, wanted: impl Fn(&Mount) -> bool) -> Result<Mount, Failure> {
        let begin = Instant::now();
        loop {
            self.interrupt.check()?;
            let last = match mount.status() {
                Ok(status) if wanted(&status) => return Ok(status),
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            };
            if begin.elapsed() > TAKEOVER_MAX {
                return Err(Failure::Problem(format!("no daemon serves the mount after {TAKEOVER_MAX:?}: {last}")));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_trouble_comes() {
        let mut random = fastrand::Rng::with_seed(1);
        let kinds: Vec<Kind> = (0..50).map(|_| choose(&mut random)).collect();
        assert!([Kind::KillDaemon, Kind::Upgrade, Kind::KillLender].iter().all(|kind| kinds.contains(kind)));
    }
}
