//! What is to be done for nodes, each in its turn: one that comes again and again does not keep
//! another one waiting.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use std::collections::VecDeque;

/// At most one thing for each node, first come, first served.
pub(crate) struct InTurn<T> {
    by_node: HashMap<u64, T>,
    /// The nodes in that map, in the order in which they came.
    order: VecDeque<u64>,
}

impl<T> Default for InTurn<T> {
    fn default() -> InTurn<T> {
        InTurn { by_node: HashMap::new(), order: VecDeque::new() }
    }
}

impl<T> InTurn<T> {
    /// Notes something for a node. If there is something already, `merge` gets both, and it keeps
    /// its turn. Returns whether there was nothing.
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

    /// Takes what is first.
    pub(crate) fn take(&mut self) -> Option<(u64, T)> {
        let node = self.order.pop_front()?;
        self.by_node.remove(&node).map(|noted| (node, noted))
    }

    /// Whether there is something for that node.
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
        let mut noted = InTurn::default();
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
