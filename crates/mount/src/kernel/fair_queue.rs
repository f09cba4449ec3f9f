//! A queue of tasks for nodes. A node that is queued again and again does not delay the others.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use std::collections::VecDeque;

/// At most one task for each node, in the order of arrival.
pub(crate) struct FairQueue<T> {
    by_node: HashMap<u64, T>,
    /// The nodes in the map, in the order of arrival.
    order: VecDeque<u64>,
}

impl<T> Default for FairQueue<T> {
    fn default() -> FairQueue<T> {
        FairQueue { by_node: HashMap::new(), order: VecDeque::new() }
    }
}

impl<T> FairQueue<T> {
    /// Adds a task for a node. If the node has a task already, `merge` combines both, and the node
    /// keeps its place. Returns whether it had none.
    pub(crate) fn note(&mut self, node: u64, new: T, merge: impl FnOnce(&mut T, T)) -> bool {
        match self.by_node.entry(node) {
            Entry::Occupied(mut noted) => {
                merge(noted.get_mut(), new);
                false
            }
            Entry::Vacant(place) => {
                place.insert(new);
                self.order.push_back(node);
                true
            }
        }
    }

    /// Takes the first task.
    pub(crate) fn take(&mut self) -> Option<(u64, T)> {
        let node = self.order.pop_front()?;
        self.by_node.remove(&node).map(|noted| (node, noted))
    }

    /// Whether the node has a task.
    pub(crate) fn has(&self, node: u64) -> bool {
        self.by_node.contains_key(&node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: u64 = 100;

    #[test]
    fn a_node_that_comes_again_and_again_keeps_no_other_waiting() {
        let mut noted = FairQueue::default();
        for node in 0..NODES {
            assert!(noted.note(node, 1, |_, _| {}));
        }
        for turn in 0..3 * NODES {
            let (node, count) = noted.take().unwrap();
            assert_eq!((node, count), (turn % NODES, if turn < NODES { 1 } else { 3 }));
            assert!(!noted.has(node));
            assert!(noted.note(node, 1, |_, _| {}));
            assert!(!noted.note(node, 2, |noted, new| *noted += new));
        }
        assert_eq!(std::iter::from_fn(|| noted.take()).count() as u64, NODES);
    }
}
