//! A cache that is filled by another one's evictions and asked for its misses: a pool of remote
//! memory behind a page cache.
//!
//! The pool keeps what was evicted last. An exclusive one gives away what it is asked for; so
//! before a page in it are those that were evicted later and have not come back. Each miss of a
//! full page cache takes one page out and brings one in, so a page only ever moves back: where it
//! is when it is asked for is as far as it has been, and the smallest pool that still has it is one
//! of that size.
//!
//! **What was before.** Of a page that is read for the first time since the watch began, nobody
//! knows whether it was evicted shortly before. But if so, all that was evicted since stands before
//! it: a pool smaller than that would not have it. So each miss counts only for the sizes that have
//! been filled by then. For larger ones nothing is known for sure; what they would do is taken from
//! the last misses, most of which are of pages that were seen before, if the watch was long enough.
//! [`Point::seen`] says how much there was to go by.

use crate::buckets;
use crate::order::Order;
use crate::{Key, SAMPLES_MAX};

/// Weight of the newest miss in the average of the last ones.
const RECENT: f64 = 1.0 / 2048.0;

/// Sampled misses after which the older ones count half: the curve of a mount that runs for months
/// is one of its last hours.
const FADES_AFTER: f64 = 100_000.0;

/// Pages that are looked back at, at the most, whatever the sample: 256 GiB. A larger pool would be
/// shown too small by less than anybody will notice.
const DEPTH_PAGES_MAX: f64 = (1u64 << 26) as f64;

/// A size counts as filled if at least that share of all misses came after it was.
const FILLED_SHARE: f64 = 0.1;
/// And at least so many that were sampled.
const FILLED_SAMPLES_MIN: f64 = 200.0;

/// What a pool of one size would have done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Share of the misses that it would have answered.
    pub hit_ratio: f64,
    /// Share of the misses that this rests on: those after so many pages were evicted. 0: the pool
    /// was never filled, and the last misses were taken.
    pub seen: f64,
}

/// The curve of a pool.
pub struct Victims {
    order: Order,
    /// Whether a page that is asked for stays.
    keeps: bool,
    /// Misses that count for a size: differences from one size to the next; and of these the hits.
    counted: Vec<f64>,
    hits: Vec<f64>,
    /// Sampled misses in the same way, without being scaled up.
    samples: Vec<f64>,
    misses: f64,
    sampled_misses: f64,
    /// Of the last misses: those of pages that were seen to be evicted.
    recent_hits: f64,
    recent: f64,
}

impl Victims {
    /// A pool that gives away what it is asked for (exclusive), or keeps it.
    pub fn new(keeps: bool) -> Victims {
        Victims::with_samples(keeps, SAMPLES_MAX)
    }

    /// Such a pool, from a sample of so many pages at the most.
    pub fn with_samples(keeps: bool, samples_max: usize) -> Victims {
        let none = || vec![0.0; buckets::COUNT + 1];
        Victims {
            order: Order::new(samples_max),
            keeps,
            counted: none(),
            hits: none(),
            samples: none(),
            misses: 0.0,
            sampled_misses: 0.0,
            recent_hits: 0.0,
            recent: 0.0,
        }
    }

    /// Hashes below this are sampled ([`Key::is_below`]): others need not be told.
    pub fn threshold(&self) -> u64 {
        self.order.sampling().threshold
    }

    /// The page was evicted, and goes to the pool.
    pub fn evicted(&mut self, key: Key) {
        if !key.is_below(self.threshold()) {
            return;
        }
        self.order.push(key);
        while self.order.len() as f64 / self.order.sampling().rate() > DEPTH_PAGES_MAX {
            self.order.remove_oldest();
        }
    }

    /// Samples fewer: only pages whose hash is smaller than this one's.
    pub fn lower(&mut self, key: Key) {
        self.order.lower(key);
    }

    /// The page is of no more use: it was changed or deleted.
    pub fn voided(&mut self, key: Key) {
        self.order.remove(key);
    }

    /// The page was missed. Pages of the smallest pool that would have had it; none, if it is not
    /// known to have been evicted.
    pub fn missed(&mut self, key: Key) -> Option<f64> {
        let rate = self.order.sampling().rate();
        if !key.is_below(self.threshold()) {
            return None;
        }
        let rank = self.order.rank(key);
        let needed_pages = rank.map(|rank| rank as f64 / rate + 1.0);
        let weight = 1.0 / rate;
        self.misses += weight;
        self.sampled_misses += 1.0;
        self.recent += RECENT * (1.0 - self.recent);
        self.recent_hits += RECENT * (f64::from(u8::from(rank.is_some())) - self.recent_hits);
        if let Some(filled) = buckets::filled_by(self.order.len() as f64 / rate) {
            self.counted[0] += weight;
            self.counted[filled + 1] -= weight;
            self.samples[0] += 1.0;
            self.samples[filled + 1] -= 1.0;
            if let Some(needed) = needed_pages.map(buckets::holding).filter(|at| *at <= filled) {
                self.hits[needed] += weight;
                self.hits[filled + 1] -= weight;
            }
        }
        if rank.is_some() {
            if self.keeps {
                self.order.push(key)
            } else {
                self.order.remove(key);
            }
        }
        if self.sampled_misses > FADES_AFTER {
            self.fade();
        }
        needed_pages
    }

    fn fade(&mut self) {
        let all = [&mut self.counted, &mut self.hits, &mut self.samples];
        all.into_iter().flatten().for_each(|count| *count /= 2.0);
        self.misses /= 2.0;
        self.sampled_misses /= 2.0;
    }

    /// Misses that were looked at, as many as count still.
    pub fn sampled_misses(&self) -> u64 {
        self.sampled_misses as u64
    }

    /// Pages that were evicted and have not come back: no pool could hold more.
    pub fn pages(&self) -> f64 {
        self.order.len() as f64 / self.order.sampling().rate()
    }

    /// What a pool of so many pages would have done.
    pub fn point(&self, pages: f64) -> Point {
        let last = Point { hit_ratio: if self.recent > 0.0 { self.recent_hits / self.recent } else { 0.0 }, seen: 0.0 };
        let Some(bucket) = buckets::filled_by(pages) else { return Point { hit_ratio: 0.0, seen: 1.0 } };
        let sum = |counts: &[f64]| counts[..=bucket].iter().sum::<f64>();
        let (counted, samples) = (sum(&self.counted), sum(&self.samples));
        if samples < FILLED_SAMPLES_MIN || counted < self.misses * FILLED_SHARE {
            return last;
        }
        let seen = (counted / self.misses).clamp(0.0, 1.0);
        Point { hit_ratio: (sum(&self.hits) / counted).clamp(0.0, 1.0), seen }
    }
}
