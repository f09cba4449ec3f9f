//! An LRU cache's curve: SHARDS with a fixed size (Waldspurger et al., FAST 2015, §3.2), with its
//! correction for accesses that are over- or underrepresented in the sample (§5.1 there:
//! SHARDS-adj).

use crate::buckets;
use crate::order::Order;
use crate::{Key, SAMPLES_MAX};

/// The curve of an LRU cache.
pub struct Lru {
    order: Order,
    /// Accesses, scaled up, by the smallest cache that would have had the page. The last entry: no
    /// cache.
    needed: Vec<f64>,
    /// All accesses, sampled or not.
    accesses: u64,
}

impl Default for Lru {
    fn default() -> Lru {
        Lru { order: Order::new(SAMPLES_MAX), needed: vec![0.0; buckets::COUNT + 1], accesses: 0 }
    }
}

impl Lru {
    /// Hashes below this are sampled ([`Key::is_below`]). Others need only be counted.
    pub fn threshold(&self) -> u64 {
        self.order.sampling().threshold
    }

    /// Counts so many more accesses, sampled or not.
    pub fn count(&mut self, accesses: u64) {
        self.accesses += accesses;
    }

    /// The page was accessed.
    pub fn access(&mut self, key: Key) {
        let sampling = self.order.sampling();
        if !key.is_below(sampling.threshold) {
            return;
        }
        let rank = self.order.rank(key);
        let bucket = rank.map_or(buckets::COUNT, |rank| buckets::holding(rank as f64 / sampling.rate() + 1.0));
        self.needed[bucket] += 1.0 / sampling.rate();
        self.order.push(key);
    }

    /// The share of the accesses that a cache of so many pages would not have answered. All, before
    /// any access.
    pub fn miss_ratio(&self, pages: f64) -> f64 {
        let sampled: f64 = self.needed.iter().sum();
        // Without a count of all accesses, the sample stands for them.
        let all = if self.accesses == 0 { sampled } else { self.accesses as f64 };
        if all == 0.0 {
            return 1.0;
        }
        // If the sample lacks accesses, they are those of a few hot pages that are not in it; if it
        // has too many, they are those of hot pages that are.
        let missed: f64 = match buckets::filled_by(pages) {
            Some(bucket) => self.needed[bucket + 1..].iter().sum(),
            None => all,
        };
        (missed / all).clamp(0.0, 1.0)
    }
}
