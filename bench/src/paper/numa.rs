//! `numa`: applications on the simulated machine of the thesis (crate `numa`), under each policy:
//! alone, and in two virtual machines on nodes of their own or on the same ones. No real time is
//! measured; random numbers come from the seed.

use super::plot::{Chart, Line};
use super::record::{Mean, Records};
use super::report::{Column, Finding, Results, capital};
use super::{Case, Run};
use ::numa::simulator::{self, Application, CLASSES, Class, Handing, Machine, Target};
use ::numa::{POLICIES, Policy};
use testbed::Failure;

/// Memory of an application in GiB; and of those that are only sampled roughly.
const GIB: [f64; 4] = [0.5, 1.0, 2.0, 4.0];
const GIB_FEW: [f64; 2] = [0.5, 2.0];
/// Rounds with sampling, and without, whose rounds are all the same.
const ROUNDS: usize = 3;
const ROUNDS_SAME: usize = 2;
/// Accesses of each thread; for applications that compute one part in so many; and phases of those
/// that have some.
const ACCESSES: f64 = 5e9;
const COMPUTING_PART: f64 = 8.0;
const PHASES: usize = 4;
/// Cycles between two accesses, and accesses in flight: of applications that mainly use memory, and
/// of those that compute.
const KINDS: [(&str, f64, f64); 2] = [("", 20.0, 4.0), (", computing", 400.0, 1.0)];

/// The ways in which machines share the host.
#[derive(Clone, Copy, PartialEq)]
enum Hosts {
    Alone,
    Distinct,
    Same,
}

const HOSTS: [Hosts; 3] = [Hosts::Alone, Hosts::Distinct, Hosts::Same];

impl Hosts {
    fn name(self) -> &'static str {
        match self {
            Hosts::Alone => "alone",
            Hosts::Distinct => "two, nodes of their own",
            Hosts::Same => "two, the same nodes",
        }
    }

    /// Nodes of the threads of each machine, and the possible nodes of its memory.
    fn machines(self) -> Vec<(Vec<usize>, Vec<usize>)> {
        let nodes = |range: std::ops::Range<usize>| range.collect::<Vec<usize>>();
        let threads = |nodes: &[usize], each: usize| nodes.iter().flat_map(|node| vec![*node; each]).collect();
        let all = nodes(0..Machine::NODES);
        let half = Machine::NODES / 2;
        match self {
            Hosts::Alone => vec![(threads(&all, Machine::CORES), all)],
            Hosts::Distinct => {
                let (first, second) = (nodes(0..half), nodes(half..Machine::NODES));
                vec![(threads(&first, Machine::CORES), first), (threads(&second, Machine::CORES), second)]
            }
            Hosts::Same => {
                vec![(threads(&all, Machine::CORES / 2), all.clone()), (threads(&all, Machine::CORES / 2), all)]
            }
        }
    }
}

fn variant(hosts: Hosts, class: &Class, kind: &str, policy: Policy) -> String {
    format!("{}, {}{kind}, {policy}", hosts.name(), class.name)
}

/// All simulated cases: applications that compute only run alone.
fn cases() -> impl Iterator<Item = (Hosts, Class, (&'static str, f64, f64))> {
    let kinds = |hosts: Hosts| if hosts == Hosts::Alone { &KINDS[..] } else { &KINDS[..1] };
    HOSTS.into_iter().flat_map(move |hosts| {
        CLASSES.into_iter().flat_map(move |class| kinds(hosts).iter().map(move |kind| (hosts, class, *kind)))
    })
}

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    let few = run.world.extent != crate::world::Extent::Whole;
    let accesses = run.world.extent.choose(ACCESSES, ACCESSES / 8.0, ACCESSES / 50.0);
    for (hosts, class, (kind, compute_cycles, outstanding)) in cases() {
        let sizes = if hosts == Hosts::Alone && kind.is_empty() { &GIB[..] } else { &GIB_FEW[..] };
        for &gib in if few { &sizes[..1] } else { sizes } {
            for policy in POLICIES {
                let name = variant(hosts, &class, kind, policy);
                run.rounds = if policy == Policy::Carrefour { ROUNDS } else { ROUNDS_SAME };
                if run.has(&name, gib) {
                    continue;
                }
                let application = Application {
                    class,
                    bytes: (gib * (1u64 << 30) as f64) as u64,
                    compute_cycles,
                    outstanding,
                    accesses: if kind.is_empty() { accesses } else { accesses / COMPUTING_PART },
                    phases: if class.handing == Handing::Kept { 1 } else { PHASES },
                };
                let targets: Vec<Target> = hosts
                    .machines()
                    .into_iter()
                    .map(|(threads, nodes)| Target { application: application.clone(), threads, nodes, policy })
                    .collect();
                for round in 0..run.rounds {
                    let outcomes = simulator::run(&targets, run.world.seed + round as u64);
                    let mean = |value: fn(&simulator::Outcome) -> f64| {
                        outcomes.iter().map(value).sum::<f64>() / outcomes.len() as f64
                    };
                    let values = [
                        ("seconds", mean(|outcome| outcome.seconds)),
                        ("imbalance", mean(|outcome| outcome.imbalance)),
                        ("link", mean(|outcome| outcome.link)),
                        ("locality", mean(|outcome| outcome.locality)),
                        ("moved_gib", mean(|outcome| outcome.moved_bytes as f64 / (1u64 << 30) as f64)),
                    ];
                    let values = values.map(|(key, value)| (key.to_owned(), value));
                    run.keep(&Case::elsewhere(&name, gib), round, values.into())?;
                    run.world.interrupt.check()?;
                }
            }
        }
    }
    Ok(())
}

pub fn results(records: &Records) -> Results {
    let seconds = |hosts: Hosts, class: &Class, kind: &str, policy: Policy, gib: f64| {
        records.mean(&variant(hosts, class, kind, policy), gib, "seconds", 1.0)
    };
    let chart = |class: Class| {
        let line = |policy: Policy| {
            let point = |gib: f64| Some((gib, seconds(Hosts::Alone, &class, "", policy, gib)?));
            Line { name: policy.name().to_owned(), points: GIB.into_iter().filter_map(point).collect() }
        };
        Chart {
            name: file_name(&class),
            title: format!("{}, alone on the machine", capital(class.name)),
            y_label: "s",
            is_log: true,
            lines: POLICIES.map(line).into_iter().filter(|line| !line.points.is_empty()).collect(),
            marks: Vec::new(),
        }
    };
    // The largest ratio of all simulated cases.
    let worst = |ratio: &dyn Fn(Hosts, &Class, &str, f64) -> Option<Mean>| -> Option<Mean> {
        let all = cases().flat_map(|(hosts, class, (kind, ..))| {
            GIB.into_iter().filter_map(move |gib| ratio(hosts, &class, kind, gib))
        });
        all.max_by(|one, other| one.mean.total_cmp(&other.mean))
    };
    let better = |hosts: Hosts, class: &Class, kind: &str, gib: f64| {
        let of = |policy| seconds(hosts, class, kind, policy, gib);
        let (round, first) = (of(Policy::Round4k)?, of(Policy::FirstTouch)?);
        Some(if round.mean < first.mean { round } else { first })
    };
    let best = |hosts: Hosts, class: &Class, kind: &str, gib: f64| {
        let all = POLICIES.into_iter().filter_map(|policy| seconds(hosts, class, kind, policy, gib));
        all.min_by(|one, other| one.mean.total_cmp(&other.mean))
    };
    let gain = |hosts: Hosts| {
        worst(&|at, class, kind, gib| {
            let slow = seconds(at, class, kind, Policy::Round1g, gib).filter(|_| at == hosts)?;
            Some(slow.over(best(at, class, kind, gib)?))
        })
    };
    let one = |name: &str, policy, floor| {
        worst(&|hosts, of, kind, gib| {
            (of.name == name && kind.is_empty() && hosts == Hosts::Alone)
                .then(|| Some(seconds(hosts, of, kind, policy, gib)?.over(seconds(hosts, of, kind, floor, gib)?)))?
        })
    };
    let count = |policy: Option<Policy>| {
        let all = cases().filter(|(hosts, ..)| *hosts == Hosts::Alone);
        let all = all.flat_map(|(hosts, class, (kind, ..))| GIB.into_iter().map(move |gib| (hosts, class, kind, gib)));
        let within = |(hosts, class, kind, gib): &(Hosts, Class, &str, f64)| {
            let of = match policy {
                Some(policy) => seconds(*hosts, class, kind, policy, *gib),
                None => [Policy::Round4k, Policy::FirstTouch, Policy::Carrefour]
                    .into_iter()
                    .filter_map(|policy| seconds(*hosts, class, kind, policy, *gib))
                    .min_by(|one, other| one.mean.total_cmp(&other.mean)),
            };
            Some(of?.mean / best(*hosts, class, kind, *gib)?.mean < 1.5)
        };
        let all: Vec<bool> = all.filter_map(|case| within(&case)).collect();
        (all.iter().filter(|within| **within).count(), all.len())
    };
    let (by_gib, of) = count(Some(Policy::Round1g));
    let (by_choice, _) = count(None);
    let mut findings = vec![
        Finding::at_most(
            "all shared: time under round-4k over that under first-touch, the worst size",
            one("all shared", Policy::Round4k, Policy::FirstTouch),
            1.0,
            "round-4k is best against loaded controllers",
        ),
        Finding::at_most(
            "thread-local: time under first-touch over that under round-4k, the worst size",
            one("thread-local", Policy::FirstTouch, Policy::Round4k),
            1.0,
            "first-touch is best for locality",
        ),
        Finding::at_most(
            "Carrefour over the better of round-4k and first-touch, the worst of all cases",
            worst(&|hosts, class, kind, gib| {
                Some(seconds(hosts, class, kind, Policy::Carrefour, gib)?.over(better(hosts, class, kind, gib)?))
            }),
            1.10,
            "between the two in each respect",
        ),
        Finding::at_most(
            "Carrefour over no policy, the worst of all cases",
            worst(&|hosts, class, kind, gib| {
                Some(seconds(hosts, class, kind, Policy::Carrefour, gib)?.over(seconds(
                    hosts,
                    class,
                    kind,
                    Policy::None,
                    gib,
                )?))
            }),
            1.04,
            "–",
        ),
        Finding::at_least(
            "round-1g over the best policy, alone, the largest of all cases",
            gain(Hosts::Alone),
            5.0,
            "up to 7 (700 %)",
        ),
        Finding::at_least(
            "round-1g over the best policy, two machines on the same nodes, the largest",
            gain(Hosts::Same),
            3.0,
            "up to 4 (400 %)",
        ),
        Finding::at_most(
            "two machines on nodes of their own, the best of round-4k, first-touch and Carrefour over round-1g, the worst",
            worst(&|hosts, class, kind, gib| {
                (hosts == Hosts::Distinct).then(|| {
                    Some(best(hosts, class, kind, gib)?.over(seconds(hosts, class, kind, Policy::Round1g, gib)?))
                })?
            }),
            1.0,
            "never slower",
        ),
    ];
    findings.push(Finding {
        text: format!(
            "less than 50 % slower than with the best policy: {by_gib} of {of} cases under round-1g, {by_choice} with the policy that suits (the paper, over Linux without a hypervisor: 12 and 23 of 29)"
        ),
        holds: (of > 0).then_some(by_choice > by_gib),
    });
    Results {
        charts: CLASSES.map(chart).into(),
        columns: vec![
            Column { key: "seconds", name: "until done, s", decimals: 1 },
            Column { key: "imbalance", name: "controllers: standard deviation over mean", decimals: 2 },
            Column { key: "link", name: "busiest link, of what it carries", decimals: 2 },
            Column { key: "locality", name: "accesses to the own node", decimals: 2 },
            Column { key: "moved_gib", name: "moved, GiB", decimals: 2 },
        ],
        findings,
        why: "A simulation: the times are the model's (crates/numa/src/simulator), which has the thesis's latencies and bandwidths, and of the interconnect what machines of \
              its kind have, as the thesis does not say. Applications are of its classes, not its programs: the figures show what each policy does to controllers, \
              links and locality, and by how much at the most, not how often. \"none\" is what Linux does: where it is touched first, and there it stays when it is freed \
              in a virtual machine. The intervals are those of the seeds: only what is sampled is drawn.",
    }
}

fn file_name(class: &Class) -> &'static str {
    match class.name {
        "thread-local" => "thread-local",
        "one allocator" => "one-allocator",
        "all shared" => "all-shared",
        "phases" => "phases",
        "freed and reused" => "freed-and-reused",
        _ => "mixed",
    }
}
