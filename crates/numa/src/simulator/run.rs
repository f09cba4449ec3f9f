//! Runs applications on the machine, under policies: their times, and the load of the machine's
//! parts.

use super::application::{Application, Handing, Touch};
use super::machine::{Flow, Load, Machine};
use crate::carrefour::{Carrefour, Period, Sample};
use crate::{NodeId, PAGE_BYTES, Policy};

/// A simulated page stands for this much memory, placed and moved as one: real pages of 4 KiB would
/// be millions.
const UNIT_BYTES: u64 = 256 << 10;
const UNITS_PER_GIB: usize = (1 << 30) / UNIT_BYTES as usize;
/// The time step.
const STEP_S: f64 = 0.02;
const PERIOD_STEPS: usize = 50;
/// Samples of each thread in a period, the cost of each for its processor, and the cost of moving:
/// 1 GiB in a second of one processor.
const THREAD_SAMPLES: usize = 500;
const SAMPLE_S: f64 = 10e-6;
const MOVE_BYTES_PER_S: f64 = (1u64 << 30) as f64;
/// The budget of Carrefour in a period.
const BUDGET_BYTES: u64 = 512 << 20;
/// Between two phases, parts go to the thread this far on: on another node, of another package.
const HANDED_ON_THREADS: usize = 2 * Machine::CORES + 1;
/// An application that takes longer than this is stuck.
const TIME_MAX_S: f64 = 100_000.0;

/// An application in a virtual machine, on some processors, under a policy.
#[derive(Clone, Debug)]
pub struct Target {
    /// The application.
    pub application: Application,
    /// The node of each of its threads.
    pub threads: Vec<usize>,
    /// Nodes where its memory may be.
    pub nodes: Vec<usize>,
    /// How its memory is placed.
    pub policy: Policy,
}

/// The result of a target.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Time until the last thread was done.
    pub seconds: f64,
    /// Standard deviation over mean of the controllers' loads, averaged over time.
    pub imbalance: f64,
    /// Load of the busiest link as a share of its bandwidth, averaged over time.
    pub link: f64,
    /// Share of near accesses.
    pub locality: f64,
    /// Memory that was moved.
    pub moved_bytes: u64,
}

/// Runs targets together, until the last is done. All random numbers come from `seed`.
///
/// # Panics
/// Panics if a target never ends.
pub fn run(targets: &[Target], seed: u64) -> Vec<Outcome> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut running: Vec<Running<'_>> = targets.iter().map(|target| Running::new(target, random.u64(..))).collect();
    let mut machine = Machine::new();
    let mut step = 0usize;
    while running.iter().any(|one| one.seconds.is_none()) {
        assert!((step as f64) * STEP_S < TIME_MAX_S, "an application does not end");
        let flows: Vec<Vec<(usize, Flow)>> = running.iter().map(Running::flows).collect();
        let flat: Vec<Flow> = flows.iter().flatten().map(|(_, flow)| flow.clone()).collect();
        let load = machine.load(&flat);
        let mut rates = &load.rates[..];
        step += 1;
        for (one, flows) in running.iter_mut().zip(&flows) {
            let (own, others) = rates.split_at(flows.len());
            rates = others;
            one.go_on(flows, own, &load, step as f64 * STEP_S);
        }
        if step.is_multiple_of(PERIOD_STEPS) {
            let samples: Vec<Vec<Sample>> = running.iter().map(|one| one.samples(&mut random)).collect();
            let mut all = [0u64; Machine::NODES];
            samples.iter().flatten().for_each(|sample| all[sample.home as usize] += 1);
            running.iter_mut().zip(&samples).for_each(|(one, samples)| one.decide(samples, &all));
        }
    }
    running.into_iter().map(|one| one.outcome()).collect()
}

/// Memory with the same use: a thread's part, or the shared part.
struct Region {
    first: usize,
    homes: Vec<u8>,
    /// Units on each node.
    counts: [usize; Machine::NODES],
}

impl Region {
    fn place(&mut self, unit: usize, node: usize) {
        self.counts[usize::from(self.homes[unit])] -= 1;
        self.homes[unit] = node as u8;
        self.counts[node] += 1;
    }

    fn share(&self, node: usize) -> f64 {
        self.counts[node] as f64 / self.homes.len().max(1) as f64
    }
}

struct Running<'a> {
    target: &'a Target,
    /// One for each thread, and the shared one at the end.
    regions: Vec<Region>,
    /// The region that each thread uses now.
    owns: Vec<usize>,
    /// Accesses that each thread has left in this phase.
    left: Vec<f64>,
    phase: usize,
    carrefour: Option<Carrefour>,
    /// Share of the time that is left to the threads, after moving and sampling.
    share_left: f64,
    seconds: Option<f64>,
    sums: Sums,
    moved_bytes: u64,
}

#[derive(Default)]
struct Sums {
    steps: f64,
    imbalance: f64,
    link: f64,
    local: f64,
    accesses: f64,
}

impl<'a> Running<'a> {
    fn new(target: &'a Target, seed: u64) -> Running<'a> {
        let (threads, application) = (target.threads.len(), &target.application);
        let units = (application.bytes / UNIT_BYTES) as usize;
        let shared_units = (units as f64 * application.class.shared) as usize;
        let own_units = (units - shared_units) / threads;
        let lens = std::iter::repeat_n(own_units, threads).chain([shared_units]);
        let mut first = 0;
        let mut regions = Vec::new();
        for (number, len) in lens.enumerate() {
            let mut region = Region { first, homes: vec![0; len], counts: [0; Machine::NODES] };
            region.counts[0] = len;
            for unit in 0..len {
                // Each thread touches a part of the shared region.
                let toucher = match application.class.touch {
                    Touch::First => 0,
                    Touch::Users if number == threads => unit * threads / len,
                    Touch::Users => number,
                };
                region.place(unit, target.home(first + unit, target.threads[toucher]));
            }
            first += len;
            regions.push(region);
        }
        let nodes: Vec<NodeId> = (0..Machine::NODES as NodeId).collect();
        let mut running = Running {
            target,
            regions,
            owns: (0..threads).collect(),
            left: Vec::new(),
            phase: 0,
            carrefour: (target.policy == Policy::Carrefour).then(|| Carrefour::new(&nodes, seed)),
            share_left: 1.0,
            seconds: None,
            sums: Sums::default(),
            moved_bytes: 0,
        };
        running.begin_phase();
        running
    }

    fn begin_phase(&mut self) {
        let application = &self.target.application;
        let of_each = application.accesses / application.phases as f64;
        self.left = vec![of_each; self.owns.len()];
    }

    /// The threads that have work left.
    fn flows(&self) -> Vec<(usize, Flow)> {
        if self.seconds.is_some() {
            return Vec::new();
        }
        let application = &self.target.application;
        let shared = application.class.shared;
        let common = &self.regions[self.owns.len()];
        let flow = |thread: usize| {
            let own = &self.regions[self.owns[thread]];
            let to = |node| shared * common.share(node) + (1.0 - shared) * own.share(node);
            Flow {
                node: self.target.threads[thread],
                to: (0..Machine::NODES).map(to).collect(),
                compute_cycles: application.compute_cycles,
                outstanding: application.outstanding,
            }
        };
        (0..self.owns.len()).filter(|thread| self.left[*thread] > 0.0).map(|thread| (thread, flow(thread))).collect()
    }

    /// Ends a step, at this time.
    fn go_on(&mut self, flows: &[(usize, Flow)], rates: &[f64], load: &Load, now_s: f64) {
        if self.seconds.is_some() {
            return;
        }
        for ((thread, flow), rate) in flows.iter().zip(rates) {
            let accesses = rate * STEP_S * self.share_left;
            self.left[*thread] -= accesses;
            self.sums.accesses += accesses;
            self.sums.local += accesses * flow.to[flow.node];
        }
        let mean = load.controllers.iter().sum::<f64>() / Machine::NODES as f64;
        let variance = load.controllers.iter().map(|load| (load - mean).powi(2)).sum::<f64>() / Machine::NODES as f64;
        self.sums.steps += 1.0;
        self.sums.imbalance += variance.sqrt() / mean.max(f64::MIN_POSITIVE);
        self.sums.link += load.links.iter().fold(0.0, |most: f64, load| most.max(*load));
        if self.left.iter().all(|left| *left <= 0.0) {
            self.phase += 1;
            if self.phase == self.target.application.phases {
                self.seconds = Some(now_s);
                return;
            }
            self.hand_on();
            self.begin_phase();
        }
    }

    fn hand_on(&mut self) {
        let handing = self.target.application.class.handing;
        if handing == Handing::Kept {
            return;
        }
        let threads = self.owns.len();
        self.owns.rotate_left(HANDED_ON_THREADS % threads);
        // Freed memory is touched first again; but only first-touch reacts to that.
        if handing == Handing::Freed && self.target.policy == Policy::FirstTouch {
            for thread in 0..threads {
                let region = &mut self.regions[self.owns[thread]];
                for unit in 0..region.homes.len() {
                    region.place(unit, self.target.threads[thread]);
                }
            }
        }
    }

    /// The samples of a period: of each thread, in its present state.
    fn samples(&self, random: &mut fastrand::Rng) -> Vec<Sample> {
        if self.seconds.is_some() {
            return Vec::new();
        }
        let common = &self.regions[self.owns.len()];
        let shared = self.target.application.class.shared;
        let mut samples = Vec::new();
        for thread in (0..self.owns.len()).filter(|thread| self.left[*thread] > 0.0) {
            for _ in 0..THREAD_SAMPLES {
                let region = if random.f64() < shared { common } else { &self.regions[self.owns[thread]] };
                if region.homes.is_empty() {
                    continue;
                }
                let unit = random.usize(..region.homes.len());
                samples.push(Sample {
                    page: (region.first + unit) as u64,
                    node: self.target.threads[thread] as NodeId,
                    home: NodeId::from(region.homes[unit]),
                });
            }
        }
        samples
    }

    fn decide(&mut self, samples: &[Sample], all: &[u64]) {
        let Some(carrefour) = &mut self.carrefour else { return };
        let period = Period { accesses_per_us: None, budget_pages: (BUDGET_BYTES / UNIT_BYTES) as usize };
        let decision = carrefour.decide(samples, all, period);
        for one in &decision.moves {
            let unit = one.page as usize;
            let region = self.regions.partition_point(|region| region.first + region.homes.len() <= unit);
            let region = &mut self.regions[region];
            region.place(unit - region.first, usize::from(one.to));
        }
        let moved_bytes = decision.moves.len() as u64 * UNIT_BYTES;
        self.moved_bytes += moved_bytes;
        let lost_s = samples.len() as f64 * SAMPLE_S + moved_bytes as f64 / MOVE_BYTES_PER_S;
        let of_all_s = PERIOD_STEPS as f64 * STEP_S * self.owns.len() as f64;
        self.share_left = 1.0 - (lost_s / of_all_s).min(1.0);
    }

    fn outcome(self) -> Outcome {
        let sums = &self.sums;
        Outcome {
            seconds: self.seconds.unwrap_or(f64::INFINITY),
            imbalance: sums.imbalance / sums.steps,
            link: sums.link / sums.steps,
            locality: sums.local / sums.accesses,
            moved_bytes: self.moved_bytes,
        }
    }
}

impl Target {
    /// The node for a unit that a thread on `toucher` touches first.
    fn home(&self, unit: usize, toucher: usize) -> usize {
        match self.policy {
            Policy::Round4k => self.nodes[unit % self.nodes.len()],
            Policy::Round1g => self.nodes[unit / UNITS_PER_GIB % self.nodes.len()],
            Policy::FirstTouch | Policy::Carrefour | Policy::None => toucher,
        }
    }
}

const _: () = assert!(UNIT_BYTES.is_multiple_of(PAGE_BYTES));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::POLICIES;
    use crate::simulator::CLASSES;

    const SEED: u64 = 1;
    /// The maximum time relative to the better of the two simple policies, and to none.
    const OVER_BETTER_MAX: f64 = 1.10;
    const OVER_NONE_MAX: f64 = 1.04;

    fn application(name: &str) -> Application {
        let class = *CLASSES.iter().find(|class| class.name == name).unwrap();
        let phases = if class.handing == Handing::Kept { 1 } else { 4 };
        Application { class, bytes: 768 << 20, compute_cycles: 20.0, outstanding: 4.0, accesses: 2.5e9, phases }
    }

    fn alone(name: &str, policy: Policy) -> Outcome {
        let threads = (0..Machine::NODES * Machine::CORES).map(|thread| thread / Machine::CORES).collect();
        let nodes = (0..Machine::NODES).collect();
        run(&[Target { application: application(name), threads, nodes, policy }], SEED)[0]
    }

    #[test]
    fn each_policy_is_best_where_the_thesis_says() {
        for class in CLASSES {
            let of = POLICIES.map(|policy| (policy, alone(class.name, policy)));
            of.iter().for_each(|(policy, outcome)| println!("{}, {policy}: {outcome:?}", class.name));
            let [round_4k, round_1g, first_touch, carrefour, none] = of.map(|(_, outcome)| outcome.seconds);
            let better = round_4k.min(first_touch);
            assert!(carrefour <= better * OVER_BETTER_MAX, "{}: {carrefour} s, {better} s", class.name);
            assert!(carrefour <= none * OVER_NONE_MAX, "{}: {carrefour} s, {none} s without", class.name);
            match class.name {
                "thread-local" | "freed and reused" => assert!(first_touch < round_4k && first_touch < round_1g / 2.0),
                "all shared" => assert!(round_4k < first_touch / 2.0 && round_4k < round_1g / 2.0),
                _ => {}
            }
        }
    }

    #[test]
    fn a_seed_says_all() {
        let [one, other] = [(); 2].map(|()| alone("mixed", Policy::Carrefour));
        assert_eq!((one.seconds, one.moved_bytes), (other.seconds, other.moved_bytes));
    }
}
