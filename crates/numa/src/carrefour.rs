//! Carrefour (Dashti and others, ASPLOS 2013), in the thesis's version: it moves pages that one
//! node uses to that node; if one controller is overloaded, it spreads pages that several nodes
//! use. It replicates nothing, which would need the kernel.
//!
//! It works in periods of a second. Its input is samples: a page, the node that used it, the node
//! where it is. It moves no more than its budget, and rests when moving does not help.

use crate::{Move, NodeId};
use hashbrown::HashMap;

/// Accesses to memory in a microsecond below which placement does not matter (the paper's MAPTU).
pub const ACCESSES_PER_US_MIN: f64 = 50.0;
/// Standard deviation of the controllers' loads over their mean, above which pages are spread.
pub const IMBALANCE_MAX: f64 = 0.35;
/// Once pages are being spread, this continues until the imbalance is this low. (The paper has one
/// threshold. Just below it, the busiest controller still has half as much again to do as the mean:
/// in the simulation memory that all threads share took 18 % longer than when spread evenly.)
pub const IMBALANCE_DONE: f64 = 0.10;
/// Share of near accesses below which pages are moved to their users.
pub const LOCALITY_MIN: f64 = 0.80;
/// Once pages are being moved there, this continues until the share is this high. (The paper has
/// one threshold. With it, an eighth of the memory that one thread had allocated for all stayed far
/// from its users.)
pub const LOCALITY_DONE: f64 = 0.95;

/// The number of samples of a page that determine its user. The paper takes two. But if all of 8
/// nodes use a page, two samples are of the same node by chance once in 8 times, and each such page
/// would be moved in vain. With four this happens once in 512 times.
pub const SAMPLES_MIN: u32 = 4;
/// Samples are kept for so many periods, and for as many again if the newer ones are too few: the
/// users of a page change.
pub const WINDOW_PERIODS: u32 = 4;
/// The maximum number of recorded pages. More are ignored until others are forgotten.
pub const PAGES_MAX: usize = 1 << 18;
/// Periods in which moving has to help, and the minimum improvement of locality or imbalance.
pub const HELP_PERIODS: u32 = 5;
/// See [`HELP_PERIODS`].
pub const HELP_MIN: f64 = 0.02;
/// Rest after moving did not help, in periods: the first, and the maximum.
pub const REST_PERIODS: u32 = 15;
/// See [`REST_PERIODS`].
pub const REST_PERIODS_MAX: u32 = 240;

/// A sample of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The page.
    pub page: u64,
    /// The node of the processor.
    pub node: NodeId,
    /// The node of the page.
    pub home: NodeId,
}

/// Other input of a period.
#[derive(Clone, Copy, Debug, Default)]
pub struct Period {
    /// Accesses to memory in a microsecond, if there are counters of them.
    pub accesses_per_us: Option<f64>,
    /// Pages that may be moved.
    pub budget_pages: usize,
}

/// The state of the target.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Standard deviation of the controllers' loads over their mean.
    pub imbalance: f64,
    /// Share of accesses to the own node.
    pub locality: f64,
    /// The number of samples of these figures.
    pub samples: usize,
}

/// The state of Carrefour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// There are too few accesses.
    Idle,
    /// Nothing has to be moved.
    Content,
    /// Pages are moved.
    Works,
    /// Moving did not help: so many periods of rest are left.
    Rests(u32),
}

/// The decision of a period.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// In this order, no more than the budget.
    pub moves: Vec<Move>,
    /// The figures behind the decision.
    pub figures: Figures,
    /// The state.
    pub state: State,
}

/// The minimum number of samples for figures. Fewer samples are kept for the next periods, as long
/// as those of pages are.
const SAMPLES_SEEN_MIN: usize = 64;

/// Samples of periods that had too few.
#[derive(Default)]
struct Seen {
    by_home: Vec<u64>,
    local: usize,
    samples: usize,
    periods: u32,
}

/// Carrefour for one target: a process, or a virtual machine.
pub struct Carrefour {
    nodes: Vec<NodeId>,
    /// Samples of each page by each of the nodes, and the page's node.
    pages: HashMap<u64, Use>,
    periods: u32,
    window_periods: u32,
    seen: Seen,
    /// Imbalance was above [`IMBALANCE_MAX`], and not down to [`IMBALANCE_DONE`] since.
    is_spreading: bool,
    /// Locality was below [`LOCALITY_MIN`], and not up to [`LOCALITY_DONE`] since.
    is_gathering: bool,
    /// Set when pages began to be moved and it has not helped so far: the figures at that time, and
    /// the number of periods.
    trial: Option<(Figures, u32)>,
    rest: u32,
    rest_next: u32,
    random: fastrand::Rng,
}

struct Use {
    /// Samples of this window by each node, followed by those of the window before.
    by_node: Box<[u8]>,
    home: NodeId,
}

impl Use {
    /// The newest samples that are enough to determine the page's user.
    fn counts(&self) -> Option<Vec<u32>> {
        let (now, before) = self.by_node.split_at(self.by_node.len() / 2);
        let now: Vec<u32> = now.iter().map(|count| u32::from(*count)).collect();
        let both = || now.iter().zip(before).map(|(now, before)| now + u32::from(*before)).collect::<Vec<u32>>();
        let is_enough = |counts: &Vec<u32>| counts.iter().sum::<u32>() >= SAMPLES_MIN;
        Some(now.clone()).filter(is_enough).or_else(|| Some(both()).filter(is_enough))
    }
}

impl Carrefour {
    /// For memory that may be on these nodes. Spread pages get random nodes, from `seed`.
    pub fn new(nodes: &[NodeId], seed: u64) -> Carrefour {
        Carrefour {
            nodes: nodes.to_vec(),
            pages: HashMap::new(),
            periods: 0,
            window_periods: WINDOW_PERIODS,
            seen: Seen::default(),
            is_spreading: false,
            is_gathering: false,
            trial: None,
            rest: 0,
            rest_next: REST_PERIODS,
            random: fastrand::Rng::with_seed(seed),
        }
    }

    /// Samples come in rounds of so many periods, each page at most once in a round: they are kept
    /// for longer, so that there are enough.
    pub fn sampled_every(&mut self, periods: u32) {
        self.window_periods = WINDOW_PERIODS.max(periods.saturating_mul(SAMPLES_MIN.div_ceil(2)));
    }

    /// Ends a period. `samples` are the target's. `all` has the samples of every target of the
    /// machine by the node of the page, in the order of the nodes: a controller is loaded by all
    /// targets.
    ///
    /// # Panics
    /// Panics if `all` does not have one number for each node.
    pub fn decide(&mut self, samples: &[Sample], all: &[u64], period: Period) -> Decision {
        assert_eq!(all.len(), self.nodes.len());
        self.remember(samples);
        let seen = &mut self.seen;
        seen.by_home.resize(all.len(), 0);
        seen.by_home.iter_mut().zip(all).for_each(|(sum, load)| *sum += load);
        seen.local += samples.iter().filter(|sample| sample.node == sample.home).count();
        seen.samples += samples.len();
        seen.periods += 1;
        let figures = Figures {
            imbalance: imbalance(&seen.by_home),
            locality: seen.local as f64 / seen.samples.max(1) as f64,
            samples: seen.samples,
        };
        let is_idle = period.accesses_per_us.is_some_and(|accesses| accesses < ACCESSES_PER_US_MIN);
        if seen.samples < SAMPLES_SEEN_MIN && !is_idle && seen.periods < self.window_periods {
            self.rest = self.rest.saturating_sub(1);
            return Decision { moves: Vec::new(), figures, state: State::Idle };
        }
        let is_idle = is_idle || seen.samples < SAMPLES_SEEN_MIN;
        let all = std::mem::take(&mut self.seen).by_home;
        self.is_spreading = figures.imbalance > if self.is_spreading { IMBALANCE_DONE } else { IMBALANCE_MAX };
        self.is_gathering = figures.locality < if self.is_gathering { LOCALITY_DONE } else { LOCALITY_MIN };
        let (spreads, gathers) = (self.is_spreading, self.is_gathering);
        let (moves, state) = if self.rest > 0 {
            self.rest -= 1;
            (Vec::new(), State::Rests(self.rest))
        } else if is_idle {
            (Vec::new(), State::Idle)
        } else if !spreads && !gathers {
            self.trial = None;
            self.rest_next = REST_PERIODS;
            (Vec::new(), State::Content)
        } else if self.is_in_vain(figures) {
            self.rest = self.rest_next;
            self.rest_next = (self.rest_next * 2).min(REST_PERIODS_MAX);
            self.trial = None;
            (Vec::new(), State::Rests(self.rest))
        } else {
            (self.choose(&all, spreads, gathers, period.budget_pages), State::Works)
        };
        Decision { moves, figures, state }
    }

    fn remember(&mut self, samples: &[Sample]) {
        self.periods += 1;
        if self.periods.is_multiple_of(self.window_periods) {
            let nodes = self.nodes.len();
            self.pages.retain(|_, used| {
                used.by_node.copy_within(..nodes, nodes);
                used.by_node[..nodes].fill(0);
                used.by_node.iter().any(|count| *count > 0)
            });
        }
        for sample in samples {
            let Some(at) = self.nodes.iter().position(|node| *node == sample.node) else { continue };
            let is_full = self.pages.len() >= PAGES_MAX;
            let used = match self.pages.entry(sample.page) {
                hashbrown::hash_map::Entry::Occupied(used) => used.into_mut(),
                hashbrown::hash_map::Entry::Vacant(_) if is_full => continue,
                hashbrown::hash_map::Entry::Vacant(free) => {
                    free.insert(Use { by_node: vec![0; 2 * self.nodes.len()].into(), home: sample.home })
                }
            };
            used.home = sample.home;
            used.by_node[at] = used.by_node[at].saturating_add(1);
        }
    }

    /// Whether pages were moved for a while without effect.
    fn is_in_vain(&mut self, now: Figures) -> bool {
        let Some((before, periods)) = &mut self.trial else {
            self.trial = Some((now, 0));
            return false;
        };
        *periods += 1;
        let helped = now.locality >= before.locality + HELP_MIN || now.imbalance <= before.imbalance - HELP_MIN;
        if helped {
            self.trial = Some((now, 0));
            return false;
        }
        *periods >= HELP_PERIODS
    }

    fn choose(&mut self, all: &[u64], spreads: bool, gathers: bool, budget_pages: usize) -> Vec<Move> {
        let mean = all.iter().sum::<u64>() as f64 / all.len() as f64;
        // The load that each controller has to take, or to give, until all are equal.
        let mut room: Vec<f64> = all.iter().map(|load| (mean - *load as f64).max(0.0)).collect();
        let mut moves = Vec::new();
        // The most used pages first; then by number, so that equal samples give equal moves.
        let mut known: Vec<(u32, u64, Vec<u32>)> = self
            .pages
            .iter()
            .filter_map(|(page, used)| used.counts().map(|counts| (counts.iter().sum(), *page, counts)))
            .collect();
        known.sort_unstable_by_key(|(count, page, _)| (std::cmp::Reverse(*count), *page));
        for (count, page, counts) in known {
            if moves.len() >= budget_pages {
                break;
            }
            let Some(used) = self.pages.get_mut(&page) else { continue };
            let users = counts.iter().filter(|count| **count > 0).count();
            let home = self.nodes.iter().position(|node| *node == used.home);
            let unburdens = spreads && home.is_none_or(|home| all[home] as f64 > mean);
            // A page near its only user does not burden another controller, either.
            let to = if users == 1 && (gathers || unburdens) {
                counts.iter().position(|count| *count > 0)
            } else if users > 1 && unburdens {
                // To the controllers with the least load.
                let total: f64 = room.iter().sum();
                let mut at = self.random.f64() * total;
                let chosen = room.iter().position(|room| {
                    at -= room;
                    at < 0.0 && *room > 0.0
                });
                chosen.inspect(|chosen| room[*chosen] = (room[*chosen] - f64::from(count)).max(0.0))
            } else {
                None
            };
            let Some(to) = to.filter(|to| Some(*to) != home) else { continue };
            used.home = self.nodes[to];
            moves.push(Move { page, to: self.nodes[to] });
        }
        moves
    }
}

/// Standard deviation over mean.
fn imbalance(loads: &[u64]) -> f64 {
    let mean = loads.iter().sum::<u64>() as f64 / loads.len().max(1) as f64;
    if mean == 0.0 {
        return 0.0;
    }
    let variance = loads.iter().map(|load| (*load as f64 - mean).powi(2)).sum::<f64>() / loads.len() as f64;
    variance.sqrt() / mean
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: [NodeId; 4] = [0, 1, 2, 3];
    const PERIOD: Period = Period { accesses_per_us: None, budget_pages: 1000 };

    fn loads(samples: &[Sample]) -> [u64; 4] {
        NODES.map(|node| samples.iter().filter(|sample| sample.home == node).count() as u64)
    }

    /// Pages on node 0, each used eight times, by the nodes that `users` returns.
    fn used_by(pages: u64, users: impl Fn(u64, u64) -> NodeId) -> Vec<Sample> {
        let samples = (0..pages).flat_map(|page| (0..8).map(move |nth| (page, nth)));
        samples.map(|(page, nth)| Sample { page, node: users(page, nth), home: 0 }).collect()
    }

    #[test]
    fn what_one_node_uses_goes_there() {
        let samples = used_by(100, |page, _| (page % 4) as NodeId);
        let decision = Carrefour::new(&NODES, 1).decide(&samples, &loads(&samples), PERIOD);
        assert_eq!((decision.state, decision.figures.locality), (State::Works, 0.25));
        // A quarter is there already.
        assert_eq!(decision.moves.len(), 75);
        assert!(decision.moves.iter().all(|one| u64::from(one.to) == one.page % 4));
    }

    #[test]
    fn what_all_use_is_spread() {
        let samples = used_by(400, |_, nth| (nth % 4) as NodeId);
        let decision = Carrefour::new(&NODES, 1).decide(&samples, &loads(&samples), PERIOD);
        let mut at = [400u64, 0, 0, 0];
        for one in &decision.moves {
            at[0] -= 1;
            at[one.to as usize] += 1;
        }
        assert!(at.iter().all(|pages| (90..=110).contains(pages)), "{at:?}");
        // The budget holds, however much there is to do.
        let small = Period { budget_pages: 7, ..PERIOD };
        assert_eq!(Carrefour::new(&NODES, 1).decide(&samples, &loads(&samples), small).moves.len(), 7);
    }

    #[test]
    fn what_is_well_or_idle_is_left_alone() {
        let local: Vec<Sample> = (0..400)
            .map(|page| (page % 4) as NodeId)
            .zip(0..)
            .map(|(node, page)| Sample { page, node, home: node })
            .collect();
        let mut carrefour = Carrefour::new(&NODES, 1);
        assert_eq!(carrefour.decide(&local, &loads(&local), PERIOD).state, State::Content);
        let samples = used_by(100, |page, _| (page % 4) as NodeId);
        let idle = Period { accesses_per_us: Some(ACCESSES_PER_US_MIN / 2.0), ..PERIOD };
        assert_eq!(carrefour.decide(&samples, &loads(&samples), idle).state, State::Idle);
        assert_eq!(carrefour.decide(&samples[..10], &loads(&samples), PERIOD).state, State::Idle);
    }

    #[test]
    fn it_rests_when_moving_does_not_help() {
        let samples = used_by(100, |page, _| (page % 4) as NodeId);
        let mut carrefour = Carrefour::new(&NODES, 1);
        let mut decide = || carrefour.decide(&samples, &loads(&samples), PERIOD);
        // The moved pages never appear elsewhere.
        let works = (0..100).take_while(|_| decide().state == State::Works).count();
        assert_eq!(works as u32, HELP_PERIODS);
        let rests = (0..100).take_while(|_| decide().moves.is_empty()).count();
        assert_eq!(rests as u32, REST_PERIODS);
        // And for longer each time.
        let works = (0..100).take_while(|_| decide().state == State::Works).count();
        assert!(works as u32 <= HELP_PERIODS);
        let rests = (0..100).take_while(|_| decide().moves.is_empty()).count();
        assert_eq!(rests as u32, 2 * REST_PERIODS);
    }

    #[test]
    fn what_is_known_is_bounded_and_forgotten() {
        let mut carrefour = Carrefour::new(&NODES, 1);
        let many: Vec<Sample> = (0..PAGES_MAX as u64 + 100).map(|page| Sample { page, node: 1, home: 1 }).collect();
        carrefour.decide(&many, &[0, 1, 0, 0], PERIOD);
        assert_eq!(carrefour.pages.len(), PAGES_MAX);
        for _ in 0..2 * WINDOW_PERIODS {
            carrefour.decide(&[], &[0; 4], PERIOD);
        }
        assert_eq!(carrefour.pages.len(), 0);
    }
}
