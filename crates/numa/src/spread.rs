//! Spreads memory over nodes, regardless of its users: round-4k and round-1g.

use crate::{NodeId, PAGE_BYTES, Policy};

const PAGES_PER_GIB: u64 = (1 << 30) / PAGE_BYTES;
/// Memory in which each node has its share: 16 MiB, or 64 huge pages. With a larger window, the
/// part that is in use at a time might be on one node.
const WINDOW_PAGES: u64 = 4096;
const WINDOW_UNITS: u64 = 64;

/// Memory that is moved as one: the number of its first page, the number of pages, and its node.
pub type Placed = (u64, u64, NodeId);

/// Spreads present memory, in the order of addresses. It moves no more than a node's excess over
/// its share.
pub struct Spread {
    nodes: Vec<NodeId>,
    /// Pages assigned to each node.
    got_pages: Vec<u64>,
    by_gib: bool,
}

impl Spread {
    /// For these nodes. `None`: the policy does not spread, or there is no node.
    pub fn new(policy: Policy, nodes: &[NodeId]) -> Option<Spread> {
        let by_gib = match policy {
            Policy::Round4k => false,
            Policy::Round1g => true,
            Policy::FirstTouch | Policy::Carrefour | Policy::None => return None,
        };
        (!nodes.is_empty()).then(|| Spread { nodes: nodes.to_vec(), got_pages: vec![0; nodes.len()], by_gib })
    }

    /// The node of each of the next units.
    pub fn place(&mut self, placed: &[Placed]) -> Vec<NodeId> {
        if self.by_gib {
            let count = self.nodes.len() as u64;
            return placed.iter().map(|(page, ..)| self.nodes[(page / PAGES_PER_GIB % count) as usize]).collect();
        }
        let largest = placed.iter().map(|(_, pages, _)| *pages).max().unwrap_or(1);
        let window_pages = WINDOW_PAGES.max(WINDOW_UNITS * largest);
        let windows = placed.chunk_by(|one, next| one.0 / window_pages == next.0 / window_pages);
        windows.flat_map(|window| self.place_window(window)).collect()
    }

    fn place_window(&mut self, placed: &[Placed]) -> Vec<NodeId> {
        let index = |nodes: &[NodeId], home| nodes.iter().position(|node| *node == home);
        let mut has = vec![0.0; self.nodes.len()];
        for (_, pages, home) in placed {
            if let Some(at) = index(&self.nodes, *home) {
                has[at] += *pages as f64;
            }
        }
        let all = self.got_pages.iter().sum::<u64>() + placed.iter().map(|(_, pages, _)| pages).sum::<u64>();
        let share = all as f64 / self.nodes.len() as f64;
        let largest = placed.iter().map(|(_, pages, _)| *pages).max().unwrap_or(1) as f64;
        // The shortfall of each node from its share; and, if one is short by at least one, the part
        // of its pages that each node has to give. So spread memory stays.
        let mut lacks: Vec<f64> = self.got_pages.iter().zip(&has).map(|(got, has)| share - *got as f64 - has).collect();
        let surplus = |lacks: f64| if -lacks >= largest { -lacks } else { 0.0 };
        let gives: Vec<f64> =
            lacks.iter().zip(&has).map(|(lacks, has)| (surplus(*lacks) / has.max(1.0)).min(1.0)).collect();
        let mut due = vec![0.0; self.nodes.len()];
        let mut place = |pages: u64, home| {
            let from = index(&self.nodes, home);
            if let Some(from) = from {
                // As much as is due until here, so that the pages that leave a node are distributed
                // over the window.
                due[from] += pages as f64 * gives[from];
                if due[from] < pages as f64 / 2.0 {
                    return from;
                }
                due[from] -= pages as f64;
            }
            let most = (0..lacks.len()).max_by(|one, other| lacks[*one].total_cmp(&lacks[*other])).unwrap_or(0);
            lacks[most] -= pages as f64;
            most
        };
        let mut to = Vec::with_capacity(placed.len());
        for (_, pages, home) in placed {
            let at = place(*pages, *home);
            self.got_pages[at] += pages;
            to.push(self.nodes[at]);
        }
        to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: [NodeId; 4] = [0, 1, 4, 7];

    /// Spreads present memory; returns the number of moves, and the pages of the nodes after it.
    fn spread(placed: &mut [Placed]) -> (usize, [u64; 4]) {
        let to = Spread::new(Policy::Round4k, &NODES).unwrap().place(placed);
        let moved = placed.iter().zip(&to).filter(|(one, to)| one.2 != **to).count();
        placed.iter_mut().zip(to).for_each(|(one, to)| one.2 = to);
        (moved, NODES.map(|node| placed.iter().filter(|one| one.2 == node).map(|one| one.1).sum()))
    }

    #[test]
    fn the_nodes_get_the_same() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        // On one node, on a node that must not be used, in runs, or anywhere.
        let homes: [&mut dyn FnMut(u64) -> NodeId; 4] =
            [&mut |_| 4, &mut |_| 2, &mut |nth| NODES[(nth / 250 % 4) as usize], &mut |_| {
                random.choice(NODES).unwrap()
            }];
        for home in homes {
            let mut placed: Vec<Placed> = (0..1001).map(|nth| (64 * nth, 1, home(nth))).collect();
            let (_, got) = spread(&mut placed);
            assert!(got.iter().all(|pages| (248..=253).contains(pages)), "{got:?}");
            assert_eq!(spread(&mut placed).0, 0, "what is spread stays");
            // And no part that is larger than a window (of 64 pages here) is on one node.
            for part in placed.chunks(200) {
                let most = NODES.map(|node| part.iter().filter(|one| one.2 == node).count()).into_iter().max();
                assert!(most < Some(150), "{part:?}");
            }
        }
    }

    #[test]
    fn huge_pages_count_as_what_they_are() {
        let mut placed: Vec<Placed> =
            (0..2000).map(|nth| (nth * 512, if nth % 100 == 0 { 512 } else { 1 }, 0)).collect();
        let (_, got) = spread(&mut placed);
        let mean = got.iter().sum::<u64>() / 4;
        assert!(got.iter().all(|pages| pages.abs_diff(mean) <= 2 * 512), "{got:?}");
    }

    #[test]
    fn what_comes_and_goes_moves_little() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut placed: Vec<Placed> = (0..4000).map(|nth| (10 * nth, 1, 0)).collect();
        spread(&mut placed);
        for round in 0..50 {
            for _ in 0..5 {
                placed.remove(random.usize(..placed.len()));
                let at = random.usize(..placed.len());
                placed.insert(at, (placed[at].0, 1, 0));
            }
            let (moved, got) = spread(&mut placed);
            assert!(moved <= 40, "{moved} moved in round {round} for 10 that changed");
            assert!(got.iter().all(|pages| (990..=1010).contains(pages)), "{got:?}");
        }
    }

    #[test]
    fn by_gib_nodes_alternate() {
        let mut spread = Spread::new(Policy::Round1g, &NODES).unwrap();
        let placed = [0, 1, PAGES_PER_GIB, 3 * PAGES_PER_GIB + 5, 4 * PAGES_PER_GIB].map(|page| (page, 1, 9));
        assert_eq!(spread.place(&placed), [0, 0, 1, 7, 0]);
        assert!(Spread::new(Policy::FirstTouch, &NODES).is_none() && Spread::new(Policy::Round4k, &[]).is_none());
    }
}
