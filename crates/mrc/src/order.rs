//! A list of sampled pages, the newest first, with the rank of each page: a search tree of
//! positions, and a Fenwick tree over them.

use crate::{EVERY_PAGE, Key, Sampling};
use std::collections::BTreeMap;

/// Positions for each page of the sample. They are assigned in turn; when all are used, the list is
/// renumbered.
const POSITIONS_PER_SAMPLE: usize = 4;

pub(crate) struct Order {
    samples_max: usize,
    sampling: Sampling,
    positions: BTreeMap<Key, usize>,
    keys: BTreeMap<usize, Key>,
    /// The number of used positions, in Fenwick's order, from 1 on.
    taken: Vec<u32>,
    next: usize,
}

impl Order {
    /// A list of so many pages at most.
    pub(crate) fn new(samples_max: usize) -> Order {
        Order {
            samples_max,
            sampling: Sampling { threshold: EVERY_PAGE },
            positions: BTreeMap::new(),
            keys: BTreeMap::new(),
            taken: vec![0; POSITIONS_PER_SAMPLE * samples_max + 1],
            next: 0,
        }
    }

    pub(crate) fn sampling(&self) -> Sampling {
        self.sampling
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// The number of newer pages.
    pub(crate) fn rank(&self, key: Key) -> Option<usize> {
        let position = *self.positions.get(&key)?;
        let mut at = position + 1;
        let mut older_or_same = 0;
        while at > 0 {
            older_or_same += self.taken[at] as usize;
            at &= at - 1;
        }
        Some(self.keys.len() - older_or_same)
    }

    /// Puts the page first, if it is sampled. Removes pages that are no longer sampled.
    pub(crate) fn push(&mut self, key: Key) {
        if !key.is_below(self.sampling.threshold) {
            return;
        }
        self.remove(key);
        if self.next + 1 == self.taken.len() {
            self.renumber();
        }
        let position = self.next;
        self.next += 1;
        self.place(key, position);
        while self.keys.len() > self.samples_max {
            let Some((&largest, _)) = self.positions.last_key_value() else { break };
            self.lower(largest);
        }
    }

    /// Lowers the threshold to this key's hash: only smaller hashes are sampled.
    pub(crate) fn lower(&mut self, key: Key) {
        self.sampling.threshold = self.sampling.threshold.min(u64::from(key.hash));
        while let Some((&largest, _)) = self.positions.last_key_value()
            && !largest.is_below(self.sampling.threshold)
        {
            self.remove(largest);
        }
    }

    /// Returns whether it was there.
    pub(crate) fn remove(&mut self, key: Key) -> bool {
        let Some(position) = self.positions.remove(&key) else { return false };
        self.keys.remove(&position);
        self.add(position, u32::MAX);
        true
    }

    pub(crate) fn remove_oldest(&mut self) {
        if let Some((_, &oldest)) = self.keys.first_key_value() {
            self.remove(oldest);
        }
    }

    fn place(&mut self, key: Key, position: usize) {
        self.positions.insert(key, position);
        self.keys.insert(position, key);
        self.add(position, 1);
    }

    /// `u32::MAX` subtracts one.
    fn add(&mut self, position: usize, count: u32) {
        let mut at = position + 1;
        while at < self.taken.len() {
            self.taken[at] = self.taken[at].wrapping_add(count);
            at += at & at.wrapping_neg();
        }
    }

    fn renumber(&mut self) {
        let keys = std::mem::take(&mut self.keys);
        self.positions.clear();
        self.taken.fill(0);
        self.next = keys.len();
        for (position, key) in keys.into_values().enumerate() {
            self.place(key, position);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_those_of_a_plain_list() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut order, mut list) = (Order::new(200), Vec::new());
        for _ in 0..10_000 {
            let key = Key::new(1, random.u64(0..100));
            list.retain(|other| *other != key);
            if random.u32(0..4) == 0 {
                order.remove(key);
            } else {
                order.push(key);
                list.push(key);
            }
            let key = Key::new(1, random.u64(0..100));
            let expected = list.iter().rev().position(|other| *other == key);
            assert_eq!((order.rank(key), order.len()), (expected, list.len()));
        }
    }

    #[test]
    fn the_sample_keeps_its_size() {
        const SAMPLES: usize = 8192;
        let mut order = Order::new(SAMPLES);
        (0..100_000).for_each(|index| order.push(Key::new(1, index)));
        assert!(order.len() <= SAMPLES && order.len() > SAMPLES - 10, "{}", order.len());
        let rate = order.sampling().rate();
        assert!((rate - SAMPLES as f64 / 100_000.0).abs() < 0.01, "{rate}");
        assert!(order.positions.keys().all(|key| key.is_below(order.sampling().threshold)));
    }
}
