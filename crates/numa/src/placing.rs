//! Several targets, each with its policy, under one limit: their memory is placed, and placed again
//! as it changes, in periods of a second.

use crate::apply::Applied;
use crate::carrefour::{Sample, State};
use crate::follow::Followed;
use crate::process::{self, Process};
use crate::sampling::{Sampling, Source};
use crate::topology::Node;
use crate::{NodeId, PAGE_BYTES, Policy, apply, machines};
use std::fmt;
use std::io;
use std::str::FromStr;

/// Periods between two searches for a target that does not exist yet.
const FIND_PERIODS: u64 = 5;
/// Spread memory is checked again when its size has changed by one part in so many, and after so
/// many periods in any case: memory may be given back and taken anew.
const CHANGED_PART: u64 = 64;
const LOOK_PERIODS: u64 = 60;

/// After a granted request a guest's further requests are refused for so many periods, so that the
/// effect of the first one can show.
const ADVICE_PERIODS: u64 = 10;

/// Limits for the requests of guests.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Policies.
    pub allowed: Vec<Policy>,
    /// The maximum number of targets under Carrefour: each is sampled.
    pub carrefour_max: usize,
}

/// A target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    /// A process.
    Pid(u32),
    /// A virtual machine, by its name.
    Machine(String),
    /// The process with that name: the kernel's, of at most 15 bytes.
    Command(String),
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Who::Pid(pid) => write!(f, "pid:{pid}"),
            Who::Machine(name) => write!(f, "vm:{name}"),
            Who::Command(name) => write!(f, "command:{name}"),
        }
    }
}

/// A target and its policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The target.
    pub who: Who,
    /// The policy.
    pub policy: Policy,
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Wanted, String> {
        let wrong = || format!("{text:?} is no target: write vm:NAME=POLICY, command:NAME=POLICY or pid:NUMBER=POLICY");
        let (who, policy) = text.rsplit_once('=').ok_or_else(wrong)?;
        let (kind, name) = who.split_once(':').filter(|(_, name)| !name.is_empty()).ok_or_else(wrong)?;
        let who = match kind {
            "vm" => Who::Machine(name.to_owned()),
            "command" => Who::Command(name.to_owned()),
            "pid" => Who::Pid(name.parse().map_err(|_| wrong())?),
            _ => return Err(wrong()),
        };
        Ok(Wanted { who, policy: policy.parse()? })
    }
}

/// All targets.
pub struct Placing {
    nodes: Vec<Node>,
    sampling: Option<Sampling>,
    targets: Vec<Target>,
    bytes_per_period: u64,
    /// Bytes moved beyond the limit: memory is moved in batches, and the last one of a period may
    /// be larger than the rest.
    ahead_bytes: u64,
    periods: u64,
}

struct Target {
    wanted: Wanted,
    work: Option<Work>,
    state: String,
    samples: u64,
    moved_pages: u64,
    /// The period in which it was given another policy.
    advised: Option<u64>,
    /// It has another policy, or other nodes, and must be found again.
    is_changed: bool,
}

struct Work {
    usable: Vec<NodeId>,
    how: How,
}

enum How {
    /// The number of its pages when it was spread, and that period.
    Spread(Process, Option<(u64, u64)>),
    Followed(Box<Followed>),
    Nothing(Process),
}

impl How {
    fn process(&self) -> &Process {
        match self {
            How::Spread(process, _) | How::Nothing(process) => process,
            How::Followed(followed) => followed.process(),
        }
    }
}

impl Placing {
    /// For these targets, with at most so many bytes moved in a period in total.
    ///
    /// # Errors
    /// Fails, with one line, if a target needs samples of accesses and there is no source of them.
    pub fn new(nodes: Vec<Node>, wanted: Vec<Wanted>, bytes_per_period: u64) -> Result<Placing, String> {
        let samples = nodes.len() > 1 && wanted.iter().any(|wanted| wanted.policy == Policy::Carrefour);
        let sampling = samples.then(|| Sampling::begin(&nodes)).transpose()?;
        let target = |wanted| Target {
            wanted,
            work: None,
            state: "not there".to_owned(),
            samples: 0,
            moved_pages: 0,
            advised: None,
            is_changed: true,
        };
        let targets = wanted.into_iter().map(target).collect();
        Ok(Placing { nodes, sampling, targets, bytes_per_period, ahead_bytes: 0, periods: 0 })
    }

    /// The source of samples, if a target needs them.
    pub fn source(&self) -> Option<Source> {
        self.sampling.as_ref().map(Sampling::source)
    }

    /// Whether all targets are processes that have ended.
    pub fn is_over(&self) -> bool {
        let is_over = |target: &Target| {
            let has_ended = target.work.is_none() && !target.is_changed && self.periods > 0;
            matches!(target.wanted.who, Who::Pid(_)) && has_ended
        };
        self.targets.iter().all(is_over)
    }

    /// A target requests a policy. If it is granted, it applies from the next period on.
    ///
    /// # Errors
    /// Fails, with one line, with the reason why it is not granted.
    pub fn advise(&mut self, target: usize, policy: Policy, limits: &Limits) -> Result<(), String> {
        if !limits.allowed.contains(&policy) {
            let allowed: Vec<&str> = limits.allowed.iter().map(|policy| policy.name()).collect();
            return Err(format!("this host grants {}, not {policy}", allowed.join(", ")));
        }
        let own = &self.targets[target];
        if own.wanted.policy == policy {
            return Ok(());
        }
        if let Some(wait) =
            own.advised.map(|at| (at + ADVICE_PERIODS).saturating_sub(self.periods)).filter(|wait| *wait > 0)
        {
            return Err(format!("it was changed a moment ago: ask again in {wait} s"));
        }
        if let Some(obstacle) = own.obstacle(policy, &self.nodes) {
            return Err(obstacle);
        }
        if policy == Policy::Carrefour {
            let under = self.targets.iter().filter(|target| target.wanted.policy == Policy::Carrefour).count();
            if under >= limits.carrefour_max {
                return Err(format!("{under} others are under carrefour already, which is all that this host samples"));
            }
            if self.sampling.is_none() {
                self.sampling = Some(Sampling::begin(&self.nodes)?);
            }
        }
        let own = &mut self.targets[target];
        (own.wanted.policy, own.advised, own.is_changed, own.work) = (policy, Some(self.periods), true, None);
        Ok(())
    }

    /// The status of each target.
    pub fn status(&self) -> Vec<report::Target> {
        let status = |target: &Target| report::Target {
            who: target.wanted.who.to_string(),
            policy: target.wanted.policy.name().to_owned(),
            pid: target.work.as_ref().map(|work| work.how.process().pid()),
            state: target.state.clone(),
            samples: target.samples,
            moved_pages: target.moved_pages,
        };
        self.targets.iter().map(status).collect()
    }

    /// Begins a period: finds new targets.
    pub fn begin_period(&mut self) {
        // The last sampled target may have been given another policy.
        if self.targets.iter().all(|target| target.wanted.policy != Policy::Carrefour) {
            self.sampling = None;
        }
        let finds = self.periods.is_multiple_of(FIND_PERIODS);
        let source = self.source();
        for target in &mut self.targets {
            let comes_back = finds && !matches!(target.wanted.who, Who::Pid(_));
            if std::mem::take(&mut target.is_changed) || target.work.is_none() && comes_back {
                target.find(&self.nodes);
            }
            if let (Some(Work { how: How::Followed(followed), .. }), Some(source)) = (&mut target.work, source)
                && let Err(error) = followed.begin_period(source)
            {
                target.failed(&error);
            }
        }
        self.periods += 1;
    }

    /// Takes samples: call it several times in a period.
    pub fn take(&mut self) {
        let Some(sampling) = &mut self.sampling else { return };
        let mut followed: Vec<&mut Followed> = self
            .targets
            .iter_mut()
            .filter_map(|target| match &mut target.work.as_mut()?.how {
                How::Followed(followed) => Some(&mut **followed),
                _ => None,
            })
            .collect();
        sampling.take(&mut |access| {
            let of_it = followed.iter_mut().find(|followed| followed.process().pid() == access.pid);
            of_it.into_iter().for_each(|followed| followed.accessed(access));
        });
    }

    /// Ends a period: moves pages. After each batch `goes_on` returns whether to continue.
    pub fn end_period(&mut self, goes_on: &mut dyn FnMut() -> bool) {
        let mut moved_bytes = self.ahead_bytes;
        let samples: Vec<Vec<Sample>> = self.targets.iter_mut().map(Target::samples).collect();
        let all = |node: NodeId| samples.iter().flatten().filter(|sample| sample.home == node).count() as u64;
        // Each target is the first one in turn.
        let count = self.targets.len();
        for nth in (0..count).map(|nth| (nth + self.periods as usize) % count) {
            let target = &mut self.targets[nth];
            let left_bytes = self.bytes_per_period.saturating_sub(moved_bytes);
            let moved = target.place(&samples[nth], &all, self.periods, left_bytes, goes_on);
            match moved {
                Ok(moved_pages) => {
                    target.moved_pages += moved_pages;
                    moved_bytes += moved_pages * PAGE_BYTES;
                }
                Err(error) => target.failed(&error),
            }
        }
        self.ahead_bytes = moved_bytes.saturating_sub(self.bytes_per_period);
    }
}

impl Target {
    /// Its process, and the nodes that the process may use.
    fn process(&self, nodes: &[Node]) -> Result<(Process, Vec<NodeId>), String> {
        let pid = match &self.wanted.who {
            Who::Pid(pid) => *pid,
            Who::Machine(name) => machines::named(name)?,
            Who::Command(name) => machines::command(name)?,
        };
        let failed = |error: io::Error| process::failure_of(pid, &error);
        let process = Process::open(pid).map_err(failed)?;
        let usable = apply::usable_nodes(&process, nodes).map_err(failed)?;
        Ok((process, usable))
    }

    /// The reason why it cannot be placed with this policy, if it exists.
    fn obstacle(&self, policy: Policy, nodes: &[Node]) -> Option<String> {
        if let Some(Work { usable, how }) = &self.work {
            return apply::obstacle(how.process(), policy, nodes, usable);
        }
        let (process, usable) = self.process(nodes).ok()?;
        apply::obstacle(&process, policy, nodes, &usable)
    }

    fn find(&mut self, nodes: &[Node]) {
        let work = self.process(nodes).and_then(|(process, usable)| {
            if let Some(obstacle) = apply::obstacle(&process, self.wanted.policy, nodes, &usable) {
                return Err(obstacle);
            }
            self.state = "found".to_owned();
            let how = match self.wanted.policy {
                Policy::Round4k | Policy::Round1g => How::Spread(process, None),
                Policy::Carrefour => How::Followed(Box::new(Followed::new(process, &usable))),
                Policy::FirstTouch | Policy::None => How::Nothing(process),
            };
            Ok(Work { usable, how })
        });
        match work {
            Ok(work) => self.work = Some(work),
            Err(problem) => self.state = problem,
        }
    }

    fn failed(&mut self, error: &io::Error) {
        if let Some(work) = self.work.take() {
            let process = work.how.process();
            self.state = process::failure_of(process.pid(), error);
            // The kernel's errors for a node that the process may not use any more, or that is gone
            // (move_pages(2)): the nodes are read again.
            self.is_changed = matches!(error.raw_os_error(), Some(libc::EACCES | libc::ENODEV)) && process.is_alive();
        }
    }

    fn samples(&mut self) -> Vec<Sample> {
        let Some(Work { how: How::Followed(followed), .. }) = &mut self.work else { return Vec::new() };
        match followed.samples() {
            Ok(samples) => {
                self.samples += samples.len() as u64;
                samples
            }
            Err(error) => {
                self.failed(&error);
                Vec::new()
            }
        }
    }

    /// Returns how many pages were moved.
    fn place(
        &mut self,
        samples: &[Sample],
        all: &dyn Fn(NodeId) -> u64,
        period: u64,
        left_bytes: u64,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<u64> {
        let Some(work) = &mut self.work else { return Ok(0) };
        match &mut work.how {
            How::Nothing(process) if process.is_alive() => Ok(0),
            How::Nothing(_) => Err(io::Error::from_raw_os_error(libc::ESRCH)),
            How::Followed(followed) => {
                let loads: Vec<u64> = work.usable.iter().map(|node| all(*node)).collect();
                let moved_before = followed.done.moved_pages;
                let decision = followed.decide(samples, &loads, left_bytes)?;
                let figures = decision.figures;
                let does = match decision.state {
                    State::Idle => "too few accesses to see".to_owned(),
                    State::Content => "all is well".to_owned(),
                    State::Works => "moves pages".to_owned(),
                    State::Rests(periods) => format!("rests for {periods} s, as moving did not help"),
                };
                self.state = format!("{does} (imbalance {:.2}, locality {:.2})", figures.imbalance, figures.locality);
                Ok(followed.done.moved_pages - moved_before)
            }
            How::Spread(process, before) => {
                let resident = process.resident_pages()?;
                if left_bytes == 0 {
                    return Ok(0);
                }
                let is_same = before.is_some_and(|(pages, at)| {
                    resident.abs_diff(pages) <= pages / CHANGED_PART && period - at < LOOK_PERIODS
                });
                if is_same {
                    return Ok(0);
                }
                let mut moved_bytes = 0;
                let applied = apply::spread(process, self.wanted.policy, &work.usable, &mut |bytes| {
                    moved_bytes += bytes;
                    moved_bytes < left_bytes && goes_on()
                })?;
                // The rest of the limit, and pages that were in use, are left for the next period.
                let is_done = moved_bytes < left_bytes && is_settled(&applied);
                *before = is_done.then_some((resident, period));
                self.state = if applied.full_nodes.is_empty() {
                    if is_done { "spread" } else { "is being spread" }.to_owned()
                } else {
                    let full: Vec<String> = applied.full_nodes.iter().map(NodeId::to_string).collect();
                    format!("no memory is free on node {}", full.join(", "))
                };
                Ok(applied.moved_pages)
            }
        }
    }
}

/// Whether the next period would find nothing to do. Pages that are in use while nothing else can
/// be moved either are normally pinned, for a device of a machine. They are tried again after
/// [`LOOK_PERIODS`]; otherwise all memory would be read in each period.
fn is_settled(applied: &Applied) -> bool {
    applied.busy_pages == 0 || applied.moved_pages == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_pages_are_not_tried_in_each_period() {
        let applied = |moved_pages, busy_pages| Applied { pages: 9, moved_pages, busy_pages, ..Applied::default() };
        assert!(is_settled(&applied(0, 0)) && is_settled(&applied(5, 0)));
        assert!(!is_settled(&applied(5, 2)), "what was in use may be free now");
        assert!(is_settled(&applied(0, 2)));
    }

    #[test]
    fn targets_are_read_as_they_are_written() {
        let wanted = |who, policy| Ok(Wanted { who, policy });
        assert_eq!("vm:db=1=round-4k".parse(), wanted(Who::Machine("db=1".to_owned()), Policy::Round4k));
        assert_eq!(
            "command:postgres=carrefour".parse(),
            wanted(Who::Command("postgres".to_owned()), Policy::Carrefour)
        );
        assert_eq!("pid:12=none".parse(), wanted(Who::Pid(12), Policy::None));
        for wrong in ["", "vm:db", "vm:=none", "pid:x=none", "host:a=none", "vm:db=best"] {
            let problem = wrong.parse::<Wanted>().unwrap_err();
            assert!(problem.lines().count() == 1, "{problem}");
        }
    }

    #[test]
    fn a_process_that_ends_is_reported() {
        let nodes = crate::topology::read(std::path::Path::new(crate::topology::SYS)).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let wanted = Wanted { who: Who::Pid(child.id()), policy: Policy::Round4k };
        let mut placing = Placing::new(nodes.clone(), vec![wanted], 1 << 20).unwrap();
        let mut period = || {
            placing.begin_period();
            placing.take();
            placing.end_period(&mut || true);
            (placing.is_over(), placing.status().remove(0))
        };
        let (_, status) = period();
        if nodes.len() == 1 {
            assert_eq!(status.state, apply::ONE_NODE);
        } else {
            assert!(status.pid.is_some(), "{status:?}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let (is_over, status) = period();
        assert!(is_over && status.pid.is_none(), "{status:?}");
    }

    #[test]
    fn advice_is_taken_within_limits() {
        let nodes = crate::topology::read(std::path::Path::new(crate::topology::SYS)).unwrap();
        let wanted = ["vm:a=none", "vm:b=carrefour"].map(|text| text.parse().unwrap());
        let Ok(mut placing) = Placing::new(nodes, wanted.into(), 1 << 20) else {
            return testbed::skip("advice_is_taken_within_limits", "accesses cannot be sampled");
        };
        let limits = Limits { allowed: vec![Policy::Round4k, Policy::Carrefour, Policy::None], carrefour_max: 1 };
        let refused = |result: Result<(), String>, word: &str| {
            let reason = result.unwrap_err();
            assert!(reason.contains(word) && reason.lines().count() == 1 && reason.len() < 124, "{reason}");
        };
        refused(placing.advise(0, Policy::FirstTouch, &limits), "grants round-4k");
        refused(placing.advise(0, Policy::Carrefour, &limits), "1 others");
        placing.advise(0, Policy::Round4k, &limits).unwrap();
        assert_eq!(placing.status()[0].policy, "round-4k");
        refused(placing.advise(0, Policy::None, &limits), "ask again in 10 s");
        placing.advise(0, Policy::Round4k, &limits).unwrap();
        for _ in 0..ADVICE_PERIODS {
            placing.begin_period();
            placing.end_period(&mut || true);
        }
        placing.advise(0, Policy::None, &limits).unwrap();
        placing.advise(1, Policy::None, &limits).unwrap();
        placing.begin_period();
        assert!(placing.source().is_none(), "nobody is sampled for nothing");
    }

    #[test]
    fn advice_that_cannot_be_followed_is_refused() {
        let nodes = crate::topology::read(std::path::Path::new(crate::topology::SYS)).unwrap();
        // As if it had one node, like most machines.
        let wanted = format!("pid:{}=none", std::process::id()).parse().unwrap();
        let mut placing = Placing::new(nodes[..1].to_vec(), vec![wanted], 1 << 20).unwrap();
        let limits = Limits { allowed: vec![Policy::Round4k], carrefour_max: 1 };
        placing.begin_period();
        assert!(placing.status()[0].pid.is_none(), "{:?}", placing.status());
        assert_eq!(placing.advise(0, Policy::Round4k, &limits), Err(apply::ONE_NODE.to_owned()));
        assert_eq!(placing.status()[0].policy, "none");
    }

    #[test]
    fn whose_nodes_have_changed_is_looked_at_anew() {
        let nodes = crate::topology::read(std::path::Path::new(crate::topology::SYS)).unwrap();
        let wanted = format!("pid:{}=round-4k", std::process::id()).parse().unwrap();
        let mut placing = Placing::new(nodes.clone(), vec![wanted], 1 << 20).unwrap();
        placing.begin_period();
        let target = &mut placing.targets[0];
        let (process, usable) = target.process(&nodes).unwrap();
        target.work = Some(Work { usable, how: How::Spread(process, None) });
        target.failed(&io::Error::from_raw_os_error(libc::EACCES));
        assert!(target.is_changed && !placing.is_over());
        placing.begin_period();
        let state = &placing.status()[0].state;
        assert!(state == "found" || state == apply::ONE_NODE, "{state}");
    }

    #[test]
    fn what_is_not_there_is_waited_for() {
        let nodes = crate::topology::read(std::path::Path::new(crate::topology::SYS)).unwrap();
        let wanted = Wanted { who: Who::Machine("no such machine".to_owned()), policy: Policy::FirstTouch };
        let mut placing = Placing::new(nodes, vec![wanted], 1 << 20).unwrap();
        for _ in 0..2 {
            placing.begin_period();
            placing.end_period(&mut || true);
            assert!(
                !placing.is_over() && placing.status()[0].state.contains("no such machine"),
                "{:?}",
                placing.status()
            );
        }
    }
}
