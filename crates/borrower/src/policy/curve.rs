//! Estimates the hit ratio of pools of other sizes for this mount: [`mrc::Victims`], updated with
//! the READs and evictions that the mount handles anyway.
//!
//! Once there are many pages, only few of them are sampled. All others cost a hash, and no lock.

use locks::Mutex;
use locks::atomic::{AtomicU64, Ordering};
use mrc::{Key, Victims};
use page::{FileKey, PAGE_SIZE, PageRange};
use report::CurvePoint;

/// The smallest pool size in the curve: 16 MiB.
const BYTES_MIN: u64 = 16 << 20;
/// The largest pool size in the curve: 256 GiB. Older evictions are forgotten.
const BYTES_MAX: u64 = 256 << 30;

/// [`Victims`] that many threads update.
pub(crate) struct Watched {
    victims: Mutex<Victims>,
    /// The threshold of the sample. Threads use it to skip pages outside the sample without the
    /// lock.
    threshold: AtomicU64,
}

impl Watched {
    pub(crate) fn new(victims: Victims) -> Watched {
        Watched { threshold: AtomicU64::new(victims.threshold()), victims: Mutex::new(victims) }
    }

    /// The page cache missed these pages. Calls `each` for each sampled page, with the result of
    /// [`Victims::missed`].
    pub(crate) fn missed(&self, file: FileKey, range: PageRange, mut each: impl FnMut(Option<f64>)) {
        let threshold = self.threshold.load(Ordering::Relaxed);
        let keys = (range.first..range.end).map(|index| Key::new(file.0.into(), index));
        let mut sampled = keys.filter(|key| key.is_below(threshold)).peekable();
        if sampled.peek().is_some() {
            let mut victims = self.victims.lock();
            sampled.for_each(|key| each(victims.missed(key)));
        }
    }

    /// The page was evicted.
    pub(crate) fn evicted(&self, file: FileKey, index: u32) {
        let key = Key::new(file.0.into(), index.into());
        if key.is_below(self.threshold.load(Ordering::Relaxed)) {
            let mut victims = self.victims.lock();
            victims.evicted(key);
            self.threshold.store(victims.threshold(), Ordering::Relaxed);
        }
    }
}

/// The miss-ratio curve of a mount.
pub struct Curve(Watched);

impl Curve {
    /// Returns an empty curve. `keeps`: lenders keep the pages that they answer (non-inclusive).
    pub fn new(keeps: bool) -> Curve {
        Curve(Watched::new(Victims::new(keeps)))
    }

    /// The kernel's page cache missed these pages.
    pub fn missed(&self, file: FileKey, range: PageRange) {
        self.0.missed(file, range, |_| ());
    }

    /// The kernel has evicted this page, and the page is worth keeping.
    pub fn evicted(&self, file: FileKey, index: u32) {
        self.0.evicted(file, index);
    }

    /// Returns the whole curve.
    pub fn status(&self) -> report::Curve {
        let victims = self.0.victims.lock();
        let evicted_bytes = (victims.pages() * PAGE_SIZE as f64) as u64;
        let sizes = std::iter::successors(Some(BYTES_MIN), |bytes| (*bytes < BYTES_MAX).then_some(bytes * 2));
        let sizes = sizes.take_while(|bytes| *bytes < evicted_bytes.saturating_mul(2));
        let point = |bytes: u64| {
            let point = victims.point(bytes as f64 / PAGE_SIZE as f64);
            CurvePoint { bytes, hit_ratio: point.hit_ratio, seen: point.seen }
        };
        report::Curve { sampled_misses: victims.sampled_misses(), evicted_bytes, points: sizes.map(point).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_through_a_file_needs_all_of_it() {
        let (curve, file) = (Curve::new(false), FileKey(7));
        assert!(curve.status().points.is_empty());
        // 64 MiB, read again and again; no page is found in the page cache.
        for _ in 0..4 {
            for index in 0..16_384 {
                curve.missed(file, PageRange { first: index.into(), end: u64::from(index) + 1 });
                curve.evicted(file, index);
            }
        }
        let status = curve.status();
        let ratio = |bytes: u64| status.points.iter().find(|point| point.bytes == bytes).unwrap().hit_ratio;
        assert!(ratio(16 << 20) < 0.01 && ratio(32 << 20) < 0.01, "{status:?}");
        assert!(status.points.last().unwrap().hit_ratio > 0.9, "{status:?}");
        assert!((60 << 20..68 << 20).contains(&status.evicted_bytes), "{status:?}");
    }
}
