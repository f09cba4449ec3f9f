//! Chooses the lender for a page by weighted rendezvous hashing of the page's placement
//! extent.
//!
//! Each lender has a score for each placement extent, made of the lender's weight and a hash of
//! both; the highest score wins. So a lender gets pages in proportion to its weight. When a lender
//! comes or goes, only the extents that it wins or had move (Thaler, Ravishankar 1998; the weights
//! as in Schindelhauer, Schomaker 2005). The place where a page *is* stands in its entry, not here:
//! placement decides only where the page goes at its next eviction. A stable choice still pays,
//! because a newer version then replaces the older one in place.
//!
//! Pages of a placement extent go to the same lender, so a read-ahead window needs one lender, not
//! all.
//!
//! Pure logic: the caller provides the weights of the lenders, and which of them can be used.

use page::FileKey;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of pages of a placement extent: one put buffer, and two of the kernel's usual
/// read-ahead windows.
pub const EXTENT_PAGES: u32 = 64;

/// The number of lenders that are tried for a page. If the buffers of the first are full, the page
/// goes to the next one.
pub const CHOICES: usize = 3;

/// The round-trip time, in microseconds, that halves the weight of a lender.
const HALF_RTT_US: u64 = 500;

/// A full lender still counts with this part of its capacity, because it replaces old pages: one in 16.
const FULL_SHARE: u64 = 16;

/// A lender is full when no more than one page in this number is free.
const FULL_PART: u64 = 32;

/// The number of weight steps to each doubling. The steps are coarser than the usual changes of
/// free memory from second to second, because each step moves pages.
const STEPS: f64 = 2.0;

/// Returns the weight of a lender, from its free memory and its distance. The minimum is 1; each
/// step is a factor of √2.
pub fn weight(free_pages: u64, capacity_pages: u64, rtt_us: u64) -> u32 {
    let pages = free_pages.min(capacity_pages).saturating_add(capacity_pages / FULL_SHARE);
    let near = HALF_RTT_US as f64 / (HALF_RTT_US as f64 + rtt_us as f64);
    let steps = ((pages as f64 * near).max(1.0).log2() * STEPS).round();
    (steps / STEPS).exp2().min(f64::from(u32::MAX)) as u32
}

/// Returns whether puts at a lender replace pages that it has. Some pages may be free nevertheless,
/// because gets leave room now and then.
pub fn is_full(free_pages: u64, capacity_pages: u64) -> bool {
    free_pages <= capacity_pages / FULL_PART
}

/// The lenders for a page, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice([u8; CHOICES]);

impl Choice {
    /// Iterates over the lenders, best first.
    pub fn iter(&self) -> impl Iterator<Item = u8> {
        self.0.iter().copied().take_while(|lender| *lender != u8::MAX)
    }
}

/// The weights of the lenders.
pub struct Weights(Vec<AtomicU32>);

impl Weights {
    /// Returns the weights of `lenders` lenders, all the same.
    pub fn new(lenders: u8) -> Weights {
        Weights((0..lenders).map(|_| AtomicU32::new(1)).collect())
    }

    /// Sets the weight of a lender; the minimum is 1.
    pub fn set(&self, lender: u8, weight: u32) {
        self.0[usize::from(lender)].store(weight.max(1), Ordering::Relaxed);
    }

    /// Returns the weight of a lender.
    pub fn get(&self, lender: u8) -> u32 {
        self.0[usize::from(lender)].load(Ordering::Relaxed)
    }

    /// Returns the lenders for a page, best first, among those whose bits are set in `usable`.
    /// `salts` are numbers that identify lenders for good. So a lender keeps its share whatever its
    /// number here is.
    pub fn choose(&self, file: FileKey, index: u32, usable: u64, salt: impl Fn(u8) -> u64) -> Choice {
        let mut best = [(f64::NEG_INFINITY, u8::MAX); CHOICES];
        let extent = u64::from(file.0) << 32 | u64::from(index / EXTENT_PAGES);
        let mut left = usable;
        while left != 0 {
            let lender = left.trailing_zeros() as u8;
            left &= left - 1;
            let mut entry = (score(mix(extent ^ mix(salt(lender))), self.get(lender)), lender);
            for place in &mut best {
                if entry.0 > place.0 {
                    std::mem::swap(place, &mut entry);
                }
            }
        }
        Choice(best.map(|(_, lender)| lender))
    }
}

/// The score of a lender: -weight / ln(uniform). The chance of having the highest score is in
/// proportion to the weight.
fn score(hash: u64, weight: u32) -> f64 {
    let uniform = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    -f64::from(weight) / uniform.ln()
}

/// Spreads the bits of a number (the finalizer of SplitMix64).
pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENTS: u32 = 40_000;

    fn owners(weights: &Weights, usable: u64) -> Vec<u8> {
        let of = |at: u32| weights.choose(FileKey(7), at * EXTENT_PAGES, usable, u64::from).iter().next().unwrap();
        (0..EXTENTS).map(of).collect()
    }

    /// 64 lenders join and leave in turn; each time only the share of that lender moves.
    #[test]
    fn only_the_share_of_who_comes_or_goes_moves() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let weights = Weights::new(64);
        (0..64).for_each(|lender| weights.set(lender, 1 << random.u32(0..6)));
        let mut usable = 0b1111;
        let mut before = owners(&weights, usable);
        for _ in 0..100 {
            let moving = random.u8(0..64);
            let joins = usable & 1 << moving == 0;
            if !joins && usable.count_ones() == 1 {
                continue;
            }
            usable ^= 1 << moving;
            let after = owners(&weights, usable);
            let total: u32 = (0..64).filter(|at| (usable | 1 << moving) & 1 << at != 0).map(|at| weights.get(at)).sum();
            let moved = before.iter().zip(&after).filter(|(before, after)| before != after);
            let mut count = 0;
            for (before, after) in moved {
                assert_eq!(if joins { *after } else { *before }, moving, "pages of others moved");
                count += 1;
            }
            let fair = f64::from(weights.get(moving)) / f64::from(total) * f64::from(EXTENTS);
            // The limit is five standard deviations of a binomial distribution.
            assert!((f64::from(count) - fair).abs() < 5.0 * fair.sqrt() + 5.0, "{count} moved, fair are {fair}");
            before = after;
        }
    }

    #[test]
    fn a_lender_gets_its_weight_and_neighbours_stay_together() {
        let weights = Weights::new(3);
        (0..3).for_each(|lender| weights.set(lender, 1 << lender));
        let owners = owners(&weights, 0b111);
        for lender in 0..3u8 {
            let share = owners.iter().filter(|owner| **owner == lender).count() as f64 / f64::from(EXTENTS);
            assert!((share - f64::from(1 << lender) / 7.0).abs() < 0.02, "{lender}: {share}");
        }
        let choose = |index| weights.choose(FileKey(1), index, 0b111, u64::from).iter().collect::<Vec<_>>();
        assert_eq!((choose(0), choose(0).len()), (choose(63), 3));
        assert_eq!(weights.choose(FileKey(1), 0, 0, u64::from).iter().count(), 0);
        assert_eq!(weights.choose(FileKey(1), 0, 0b100, u64::from).iter().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn free_memory_near_by_weighs_most() {
        assert!(weight(1 << 20, 1 << 20, 50) > weight(1 << 20, 1 << 20, 2_000));
        assert!(weight(1 << 20, 1 << 20, 50) > weight(1 << 18, 1 << 20, 50));
        assert_eq!(weight(1_000_000, 1 << 20, 50), weight(1_010_000, 1 << 20, 55), "small moves move no pages");
        assert!(weight(0, 1 << 20, 50) > 1, "a full lender replaces old pages");
        assert_eq!((weight(0, 0, u64::MAX), weight(u64::MAX, u64::MAX, 0)), (1, u32::MAX));
    }
}
