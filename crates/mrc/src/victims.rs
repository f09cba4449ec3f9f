//! A cache that another one's evictions fill and that its misses ask: a pool of remote memory
//! behind a page cache.
//!
//! The pool keeps the pages that were evicted last. An exclusive pool gives pages away when it is
//! asked. So the pages before a given one are those that were evicted later and have not come back.
//! Each miss of a full page cache takes one page out and brings one in, so a page only ever moves
//! back. Its position at a request is the farthest so far, and the smallest pool that still has it
//! is one of that size.
//!
//! **Before the first event.** If a page is read for the first time, it may have been evicted
//! shortly before the first event. But if so, all evictions since then are before it: a pool
//! smaller than that would not have it. So each miss counts only for the sizes that have been
//! filled by then. For larger sizes there is no certain result. Their value is taken from the last
//! misses, most of which are of pages that were seen before, if enough events were seen.
//! [`Point::seen`] shows how many misses the result rests on.

use crate::buckets;
use crate::order::Order;
use crate::{Key, SAMPLES_MAX};

/// Weight of the newest miss in the average of the last ones.
const RECENT: f64 = 1.0 / 2048.0;

/// Number of sampled misses after which older ones count half: the curve of a mount that runs for
/// months shows its last hours.
const FADES_AFTER: f64 = 100_000.0;

/// The maximum depth of the record in pages, whatever the sample: 256 GiB. A larger pool would be
/// underestimated by an amount that nobody notices.
const DEPTH_PAGES_MAX: f64 = (1u64 << 26) as f64;

/// A size counts as filled if at least this share of all misses came after it was filled.
const FILLED_SHARE: f64 = 0.1;
/// The minimum number of sampled misses after that.
const FILLED_SAMPLES_MIN: f64 = 200.0;

/// The result of a pool of one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// The share of the misses that it would have answered.
    pub hit_ratio: f64,
    /// The share of the misses that this rests on: those after so many pages were evicted. 0: the
    /// pool was never filled, and the last misses were used.
    pub seen: f64,
}

/// The curve of a pool.
pub struct Victims {
    order: Order,
    /// Whether a requested page stays in the pool.
    keeps: bool,
    /// Misses that count for a size, as differences from one size to the next; and the hits among
    /// them.
    counted: Vec<f64>,
    hits: Vec<f64>,
    /// Sampled misses in the same form, not scaled up.
    samples: Vec<f64>,
    misses: f64,
    sampled_misses: f64,
    /// Among the last misses: those of pages whose eviction was seen.
    recent_hits: f64,
    recent: f64,
}

impl Victims {
    /// A pool that gives away requested pages (exclusive), or keeps them.
    pub fn new(keeps: bool) -> Victims {
        Victims::with_samples(keeps, SAMPLES_MAX)
    }

    /// Such a pool, with a sample of at most so many pages.
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

    /// Hashes below this are sampled ([`Key::is_below`]). Others may be left out.
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

    /// Lowers the threshold: only pages with a smaller hash than this one's are sampled.
    pub fn lower(&mut self, key: Key) {
        self.order.lower(key);
    }

    /// The page is useless now: it was changed or deleted.
    pub fn invalidated(&mut self, key: Key) {
        self.order.remove(key);
    }

    /// The page was missed. Returns the size in pages of the smallest pool that would have had it;
    /// `None` if its eviction is not known.
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

    /// The number of sampled misses, weighted by age.
    pub fn sampled_misses(&self) -> u64 {
        self.sampled_misses as u64
    }

    /// Pages that were evicted and have not come back: no pool could hold more.
    pub fn pages(&self) -> f64 {
        self.order.len() as f64 / self.order.sampling().rate()
    }

    /// The result of a pool of so many pages.
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
