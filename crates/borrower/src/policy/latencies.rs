//! Latencies of recent operations: their average and their quantiles, over the last dozens or
//! hundreds of operations.
//!
//! Recorded for reads of the backing directory, which lenders are compared with and which define
//! when a get is late; and for gets. Small and large reads are recorded separately, because they
//! are compared only with reads of their own size.
//!
//! The average is over time, not over a number of reads. A disk with a limit of reads a second
//! answers some hundreds of them at once. Then it answers none for a tenth of a second
//! (blk-throttle, Linux 6.18, grants slices of 100 ms; limits of cloud disks do likewise). At any
//! moment the last dozens of reads were quick ones.

use std::time::{Duration, Instant};

/// The number of buckets to each doubling.
const STEPS: u32 = 4;
/// The number of doublings: from 1 µs to 16 s.
const DOUBLINGS: u32 = 24;
/// When this number was recorded, all counts are halved. So the latest latencies decide the
/// quantiles.
const NOTED_MAX: u32 = 256;
/// The average covers one to two of these periods. That is several of the slices in which a limited
/// disk grants its reads. It is still short enough to show soon how a disk that is fast while idle
/// performs under load.
const AVERAGED_TIME: Duration = Duration::from_secs(1);
/// The average covers at least about this number of operations.
const AVERAGED_MIN: u32 = 64;
/// With fewer operations than this nothing is known.
const NOTED_MIN: u32 = 8;

/// Recorded latencies in microseconds.
#[derive(Clone, Debug)]
pub struct Latencies {
    buckets: [u32; (STEPS * DOUBLINGS) as usize],
    noted: u32,
    /// The average of the last [`AVERAGED_MIN`] operations.
    mean_us: f64,
    averaged: u32,
    /// The sums of the current period and of the one before it; the begin of the current one.
    now: Sum,
    before: Sum,
    begun: Option<Instant>,
}

/// A number of operations, and their total time.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    us: f64,
    count: u32,
}

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies {
            buckets: [0; (STEPS * DOUBLINGS) as usize],
            noted: 0,
            mean_us: 0.0,
            averaged: 0,
            now: Sum::default(),
            before: Sum::default(),
            begun: None,
        }
    }
}

impl Latencies {
    /// Records an operation that took `us` microseconds and ended at `at`.
    pub fn note(&mut self, us: u64, at: Instant) {
        if self.noted >= NOTED_MAX {
            self.buckets.iter_mut().for_each(|bucket| *bucket /= 2);
            self.noted = self.buckets.iter().sum();
        }
        self.buckets[bucket(us)] += 1;
        self.noted += 1;
        self.averaged = (self.averaged + 1).min(AVERAGED_MIN);
        self.mean_us += (us as f64 - self.mean_us) / f64::from(self.averaged);
        let begun = *self.begun.get_or_insert(at);
        let age = at.saturating_duration_since(begun);
        if age >= AVERAGED_TIME {
            let now = std::mem::take(&mut self.now);
            self.before = if age < 2 * AVERAGED_TIME { now } else { Sum::default() };
            self.begun = Some(at);
        }
        self.now.us += us as f64;
        self.now.count = self.now.count.saturating_add(1);
    }

    /// Returns the average in microseconds. None if too little is known.
    pub fn mean_us(&self) -> Option<f64> {
        let count = self.now.count.saturating_add(self.before.count);
        let mean_us =
            if count < AVERAGED_MIN { self.mean_us } else { (self.now.us + self.before.us) / f64::from(count) };
        (self.averaged >= NOTED_MIN).then_some(mean_us)
    }

    /// Returns the latency in microseconds that `percent` per cent of the operations did not
    /// exceed, up to a fifth too high. None if too little is known.
    pub fn quantile_us(&self, percent: u32) -> Option<u64> {
        if self.noted < NOTED_MIN {
            return None;
        }
        let mut left = (self.noted * percent).div_ceil(100);
        for (at, count) in self.buckets.iter().enumerate() {
            left = left.saturating_sub(*count);
            if left == 0 {
                return Some(upper_us(at));
            }
        }
        None
    }
}

/// The largest number of pages of a small read. In longer reads the bandwidth dominates.
const SMALL_PAGES_MAX: usize = 32;

/// The size class of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// The time for the access dominates.
    Small,
    /// The read is longer, or a part of a stream.
    Large,
}

impl Size {
    /// Returns the size class of a read of `pages` pages.
    pub fn of(pages: usize, is_sequential: bool) -> Size {
        if pages <= SMALL_PAGES_MAX && !is_sequential { Size::Small } else { Size::Large }
    }
}

/// The latencies of reads by size class.
#[derive(Clone, Debug, Default)]
pub struct LatenciesBySize {
    small: Latencies,
    large: Latencies,
}

impl LatenciesBySize {
    /// Records a read of that size that took `us` microseconds and ended at `at`.
    pub fn note(&mut self, us: u64, at: Instant, size: Size) {
        match size {
            Size::Small => self.small.note(us, at),
            Size::Large => self.large.note(us, at),
        }
    }

    /// Returns the latencies of that size.
    pub fn of(&self, size: Size) -> &Latencies {
        match size {
            Size::Small => &self.small,
            Size::Large => &self.large,
        }
    }

    /// Forgets all latencies.
    pub fn clear(&mut self) {
        *self = LatenciesBySize::default();
    }
}

fn bucket(us: u64) -> usize {
    let at = (us.max(1) as f64).log2() * f64::from(STEPS);
    (at as usize).min((STEPS * DOUBLINGS) as usize - 1)
}

fn upper_us(bucket: usize) -> u64 {
    ((bucket as f64 + 1.0) / f64::from(STEPS)).exp2().ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_quantiles_follow_what_happens() {
        let start = Instant::now();
        let mut latencies = Latencies::default();
        assert_eq!((latencies.mean_us(), latencies.quantile_us(50)), (None, None));
        (1..=50).for_each(|us| latencies.note(us * 100, start));
        assert!((latencies.mean_us().unwrap() - 2550.0).abs() < 1.0);
        (51..=100).for_each(|us| latencies.note(us * 100, start));
        let (half, most) = (latencies.quantile_us(50).unwrap(), latencies.quantile_us(95).unwrap());
        assert!((5_000..=6_000).contains(&half) && (9_500..=11_500).contains(&most), "{half} {most}");
        let mut now = start + AVERAGED_TIME;
        let mut pass = |latencies: &mut Latencies, count: u32, us: u64| {
            for _ in 0..count {
                now += Duration::from_micros(us);
                latencies.note(us, now);
            }
        };
        pass(&mut latencies, 3 * AVERAGED_MIN, 20_000);
        assert!(latencies.mean_us().unwrap() > 19_000.0, "{latencies:?}");
        pass(&mut latencies, 2 * 1_000_000 / 20, 20);
        assert!(latencies.mean_us().unwrap() < 21.0 && latencies.quantile_us(95).unwrap() <= 24);
        // Old latencies do not count; and a few new ones are not enough.
        now += 3 * AVERAGED_TIME;
        let mut later = |us| latencies.note(us, now);
        (0..AVERAGED_MIN).for_each(|_| later(500));
        assert!((latencies.mean_us().unwrap() - 500.0).abs() < 1.0, "{latencies:?}");
        [0, u64::MAX].into_iter().for_each(|us| latencies.note(us, now));
    }

    /// A disk with a limit of 2000 reads a second, which makes 200 at once.
    #[test]
    fn what_comes_in_bursts_is_averaged_over_them() {
        let mut latencies = Latencies::default();
        let mut now = Instant::now();
        for read in 0..20_000 {
            let us = if read % 200 == 0 { 100_000 - 199 * 70 } else { 70 };
            now += Duration::from_micros(us);
            latencies.note(us, now);
            if read > 2_000 {
                assert!((latencies.mean_us().unwrap() - 500.0).abs() < 100.0, "{read}: {:?}", latencies.mean_us());
            }
        }
    }

    #[test]
    fn each_size_is_for_itself() {
        let (mut latencies, at) = (LatenciesBySize::default(), Instant::now());
        for _ in 0..NOTED_MIN {
            latencies.note(100, at, Size::of(32, false));
            latencies.note(1000, at, Size::of(33, false));
            latencies.note(3000, at, Size::of(1, true));
        }
        assert_eq!(latencies.of(Size::Small).mean_us(), Some(100.0));
        assert_eq!(latencies.of(Size::Large).mean_us(), Some(2000.0));
        latencies.clear();
        assert_eq!(latencies.of(Size::Small).mean_us(), None);
    }
}
