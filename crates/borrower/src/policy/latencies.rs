//! How long something takes lately: its average and its quantiles, of the last dozens or hundreds
//! of times.
//!
//! Kept of reads of the directory below, to know what a lender is compared with and when a get is
//! late; and of gets. Small reads and large ones each on their own: they are compared with their
//! like.
//!
//! The average is over time, not over so many: a disk that is allowed so many reads a second
//! answers some hundreds of them at once, and then none for a tenth of a second (blk-throttle,
//! Linux 6.18, grants slices of 100 ms; limits of cloud disks do likewise). Of whatever moment, the
//! last dozens were quick ones.

use std::time::{Duration, Instant};

/// Buckets to each doubling.
const STEPS: u32 = 4;
/// Doublings: from 1 µs to 16 s.
const DOUBLINGS: u32 = 24;
/// When so many were noted, all count half as much in the quantiles: the last of them decide.
const NOTED_MAX: u32 = 256;
/// The average is of one to two of these: some of the slices in which a limited disk gives out its
/// reads, and yet a disk that is fast as long as it has little to do shows soon what it takes when
/// it has more.
const AVERAGED_TIME: Duration = Duration::from_secs(1);
/// But of about so many at the least.
const AVERAGED_MIN: u32 = 64;
/// Fewer than these say nothing.
const NOTED_MIN: u32 = 8;

/// Durations in microseconds.
#[derive(Clone, Debug)]
pub struct Latencies {
    buckets: [u32; (STEPS * DOUBLINGS) as usize],
    noted: u32,
    /// Of the last [`AVERAGED_MIN`].
    mean_us: f64,
    averaged: u32,
    /// Those of this part of the time and of the part before it; when this one began.
    now: Sum,
    before: Sum,
    begun: Option<Instant>,
}

/// So many, and what they took together.
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
    /// It took so long, and ended at that time.
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

    /// The average, in microseconds. None: too little is known.
    pub fn mean_us(&self) -> Option<f64> {
        let count = self.now.count.saturating_add(self.before.count);
        let mean_us =
            if count < AVERAGED_MIN { self.mean_us } else { (self.now.us + self.before.us) / f64::from(count) };
        (self.averaged >= NOTED_MIN).then_some(mean_us)
    }

    /// What `percent` of them did not exceed, in microseconds, up to a fifth too much. None: too
    /// little is known.
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

/// Pages of a read up to which it is small: beyond, it is bandwidth that counts.
const SMALL_PAGES_MAX: usize = 32;

/// How much is read at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// So little that it is getting there that takes the time.
    Small,
    /// More, or a part of a stream.
    Large,
}

impl Size {
    /// Of a read of so many pages.
    pub fn of(pages: usize, is_sequential: bool) -> Size {
        if pages <= SMALL_PAGES_MAX && !is_sequential { Size::Small } else { Size::Large }
    }
}

/// Those of reads of each size.
#[derive(Clone, Debug, Default)]
pub struct LatenciesBySize {
    small: Latencies,
    large: Latencies,
}

impl LatenciesBySize {
    /// One of that size took so long, and ended at that time.
    pub fn note(&mut self, us: u64, at: Instant, size: Size) {
        match size {
            Size::Small => self.small.note(us, at),
            Size::Large => self.large.note(us, at),
        }
    }

    /// Those of that size.
    pub fn of(&self, size: Size) -> &Latencies {
        match size {
            Size::Small => &self.small,
            Size::Large => &self.large,
        }
    }

    /// Forgets all.
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
        // What was long ago does not count; and few are not enough.
        now += 3 * AVERAGED_TIME;
        let mut later = |us| latencies.note(us, now);
        (0..AVERAGED_MIN).for_each(|_| later(500));
        assert!((latencies.mean_us().unwrap() - 500.0).abs() < 1.0, "{latencies:?}");
        [0, u64::MAX].into_iter().for_each(|us| latencies.note(us, now));
    }

    /// A disk that may make 2000 reads a second, and makes 200 at once.
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
