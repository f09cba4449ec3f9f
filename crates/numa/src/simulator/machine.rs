//! The machine: nodes, links, and the duration of an access under load.

/// Clock rate of the processors.
pub const HZ: f64 = 2.2e9;
/// Cycles of an access to the own node, and to another one, without other load.
const LOCAL_CYCLES: f64 = 100.0;
const REMOTE_CYCLES: f64 = 300.0;
/// Cycles if a controller or a link is at its limit.
const CONTROLLER_CYCLES: f64 = 700.0;
const LINK_CYCLES: f64 = 500.0;
/// Their bandwidth, in bytes a second.
const CONTROLLER_BYTES_PER_S: f64 = 13.0 * GIB;
const LINK_BYTES_PER_S: f64 = 6.0 * GIB;
/// The thesis says "asymmetric" and no more. On machines of its kind (two dies in a package, one
/// link of each die to three others) a link between packages is half as wide as that within.
const LINK_BETWEEN_PACKAGES: f64 = 0.5;
const GIB: f64 = (1u64 << 30) as f64;
/// Bytes of an access: a cache line.
pub const LINE_BYTES: f64 = 64.0;
/// Waiting time grows with the load to this power: little up to a half, most of it close to the
/// limit.
const WAIT_POWER: i32 = 4;
/// The search for a feasible load: so many cycles are added for a load above the limit, until none
/// exceeds it by more than this, in at most so many steps.
const EXCESS_CYCLES: f64 = 400.0;
const EXCESS_MAX: f64 = 0.01;
const STEPS_MAX: usize = 200;

/// Eight nodes of six processors, in four packages.
pub struct Machine {
    /// The links of the route from each node to each other one.
    routes: Vec<Vec<Vec<usize>>>,
    link_bytes_per_s: Vec<f64>,
    /// Waiting cycles beyond those of the load, so that nothing exceeds its bandwidth.
    controller_excess: Vec<f64>,
    link_excess: Vec<f64>,
}

/// A thread that uses memory.
#[derive(Clone, Debug)]
pub struct Flow {
    /// The node where it runs.
    pub node: usize,
    /// The shares of its accesses by the node of the memory.
    pub to: Vec<f64>,
    /// Cycles of computation between two accesses.
    pub compute_cycles: f64,
    /// Accesses in flight.
    pub outstanding: f64,
}

/// The result.
#[derive(Clone, Debug, Default)]
pub struct Load {
    /// Accesses of each flow in a second.
    pub rates: Vec<f64>,
    /// Load of each controller, as a share of its bandwidth.
    pub controllers: Vec<f64>,
    /// Load of each link.
    pub links: Vec<f64>,
}

impl Machine {
    /// Nodes.
    pub const NODES: usize = 8;
    /// Processors of a node.
    pub const CORES: usize = 6;

    /// The thesis's machine.
    pub fn new() -> Machine {
        // Dies 2p and 2p + 1 are package p. Even dies are linked with each other, odd ones too, and
        // the two of a package.
        let (mut links, mut link_bytes_per_s) = (std::collections::BTreeMap::new(), Vec::new());
        for from in 0..Self::NODES {
            for to in (0..Self::NODES).filter(|to| *to != from) {
                let same_package = from / 2 == to / 2;
                if same_package || from % 2 == to % 2 {
                    links.insert((from, to), link_bytes_per_s.len());
                    link_bytes_per_s.push(LINK_BYTES_PER_S * if same_package { 1.0 } else { LINK_BETWEEN_PACKAGES });
                }
            }
        }
        let route = |from: usize, to: usize| -> Vec<usize> {
            if from == to {
                return Vec::new();
            }
            match links.get(&(from, to)) {
                Some(link) => vec![*link],
                // By way of the other die of the package.
                None => vec![links[&(from, from ^ 1)], links[&(from ^ 1, to)]],
            }
        };
        Machine {
            routes: (0..Self::NODES).map(|from| (0..Self::NODES).map(|to| route(from, to)).collect()).collect(),
            controller_excess: vec![0.0; Self::NODES],
            link_excess: vec![0.0; link_bytes_per_s.len()],
            link_bytes_per_s,
        }
    }

    /// The speed of these threads when they run together.
    pub fn load(&mut self, flows: &[Flow]) -> Load {
        let mut load = Load {
            rates: vec![0.0; flows.len()],
            controllers: vec![0.0; Self::NODES],
            links: vec![0.0; self.link_bytes_per_s.len()],
        };
        let wait = |load: f64, cycles: f64, excess: f64| cycles * load.min(1.0).powi(WAIT_POWER) + excess;
        for _ in 0..STEPS_MAX {
            let controller_wait: Vec<f64> = (0..Self::NODES)
                .map(|node| {
                    wait(load.controllers[node], CONTROLLER_CYCLES - LOCAL_CYCLES, self.controller_excess[node])
                })
                .collect();
            let link_wait: Vec<f64> = (0..self.link_bytes_per_s.len())
                .map(|link| wait(load.links[link], LINK_CYCLES - REMOTE_CYCLES, self.link_excess[link]))
                .collect();
            let mut controllers = vec![0.0; Self::NODES];
            let mut links = vec![0.0; self.link_bytes_per_s.len()];
            for (flow, rate) in flows.iter().zip(&mut load.rates) {
                let latency = |home: usize| {
                    let base = if home == flow.node { LOCAL_CYCLES } else { REMOTE_CYCLES };
                    let way: f64 = self.routes[home][flow.node].iter().map(|link| link_wait[*link]).sum();
                    base + controller_wait[home] + way
                };
                let cycles: f64 = flow.to.iter().enumerate().map(|(home, share)| share * latency(home)).sum();
                *rate = HZ / (flow.compute_cycles + cycles / flow.outstanding);
                for (home, share) in flow.to.iter().enumerate().filter(|(_, share)| **share > 0.0) {
                    let bytes = *rate * share * LINE_BYTES;
                    controllers[home] += bytes / CONTROLLER_BYTES_PER_S;
                    // Data travels from the memory's node to the thread's.
                    for link in &self.routes[home][flow.node] {
                        links[*link] += bytes / self.link_bytes_per_s[*link];
                    }
                }
            }
            let mut is_settled = true;
            let mut adjust = |now: &[f64], before: &mut [f64], excess: &mut [f64]| {
                for ((now, before), excess) in now.iter().zip(before).zip(excess) {
                    is_settled &= *now <= 1.0 + EXCESS_MAX && (*excess == 0.0 || *now >= 1.0 - EXCESS_MAX);
                    is_settled &= (*now - *before).abs() <= EXCESS_MAX;
                    *excess = (*excess + EXCESS_CYCLES * (*now - 1.0)).max(0.0);
                    // Half of the step, to avoid oscillation.
                    *before = (*before + *now) / 2.0;
                }
            };
            adjust(&controllers, &mut load.controllers, &mut self.controller_excess);
            adjust(&links, &mut load.links, &mut self.link_excess);
            if is_settled {
                break;
            }
        }
        load
    }
}

impl Default for Machine {
    fn default() -> Machine {
        Machine::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(node: usize, to: &[(usize, f64)], outstanding: f64) -> Flow {
        let mut shares = vec![0.0; Machine::NODES];
        to.iter().for_each(|(home, share)| shares[*home] = *share);
        Flow { node, to: shares, compute_cycles: 0.0, outstanding }
    }

    fn cycles(machine: &mut Machine, flows: &[Flow]) -> f64 {
        HZ / machine.load(flows).rates[0]
    }

    #[test]
    fn alone_an_access_takes_what_the_thesis_says() {
        let mut machine = Machine::new();
        assert!((cycles(&mut machine, &[flow(0, &[(0, 1.0)], 1.0)]) - LOCAL_CYCLES).abs() < 1.0);
        for home in 1..Machine::NODES {
            let remote = cycles(&mut Machine::new(), &[flow(0, &[(home, 1.0)], 1.0)]);
            assert!((remote - REMOTE_CYCLES).abs() < 10.0, "{home}: {remote}");
        }
    }

    #[test]
    fn nothing_carries_more_than_it_can() {
        // All processors use the memory of one node; or of the adjacent node; or of all.
        let all = |to: &dyn Fn(usize) -> Vec<(usize, f64)>| -> Vec<Flow> {
            (0..Machine::NODES * Machine::CORES)
                .map(|thread| flow(thread / Machine::CORES, &to(thread / Machine::CORES), 4.0))
                .collect()
        };
        let even: Vec<(usize, f64)> = (0..Machine::NODES).map(|node| (node, 1.0 / Machine::NODES as f64)).collect();
        for (name, flows) in [
            ("one", all(&|_| vec![(0, 1.0)])),
            ("beside", all(&|node| vec![(node ^ 1, 1.0)])),
            ("all", all(&|_| even.clone())),
        ] {
            let load = Machine::new().load(&flows);
            let most = load.controllers.iter().chain(&load.links).fold(0.0f64, |most, load| most.max(*load));
            // Spread over all nodes, the load is not too high.
            let least = if name == "all" { 0.5 } else { 0.9 };
            assert!((least..=1.0 + 2.0 * EXCESS_MAX).contains(&most), "{name}: {load:?}");
        }
    }

    #[test]
    fn a_loaded_controller_makes_an_access_late() {
        let flows: Vec<Flow> = (0..48).map(|thread| flow(thread / 6, &[(0, 1.0)], 2.0)).collect();
        let loaded = cycles(&mut Machine::new(), &flows) * 2.0;
        assert!(loaded >= CONTROLLER_CYCLES, "{loaded}");
    }
}
