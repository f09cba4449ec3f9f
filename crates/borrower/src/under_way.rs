//! Counts of operations in progress, and the speed of reads of the backing directory.

use crate::policy::hedging::{LATE_PERCENT, late_us};
use crate::policy::latencies::{LatenciesBySize, Size};
use locks::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The number of operations of a kind in progress.
#[derive(Default)]
pub(crate) struct UnderWay(AtomicU32);

/// One operation in progress, until it is dropped.
pub(crate) struct OneUnderWay<'a> {
    all: &'a UnderWay,
    /// The number of operations in progress when this one began, with this one.
    count: u32,
}

impl UnderWay {
    pub(crate) fn begin(&self) -> OneUnderWay<'_> {
        OneUnderWay { all: self, count: self.0.fetch_add(1, Ordering::Relaxed) + 1 }
    }
}

impl OneUnderWay<'_> {
    /// Returns this operation's part of its time, because operations in progress share the time.
    pub(crate) fn part(&self, took: Duration) -> Duration {
        took / self.count
    }
}

impl Drop for OneUnderWay<'_> {
    fn drop(&mut self) {
        self.all.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The recent times of reads of the backing directory.
#[derive(Default)]
pub(crate) struct Disk {
    latencies: Mutex<LatenciesBySize>,
    /// The number of microseconds after which a get is late; 0: not known.
    late_us: AtomicU64,
}

impl Disk {
    pub(crate) fn note(&self, took: Duration, at: Instant, size: Size) {
        let mut latencies = self.latencies.lock();
        latencies.note(took.as_micros() as u64, at, size);
        if size == Size::Small {
            self.late_us.store(late_us(latencies.of(size).quantile_us(LATE_PERCENT)), Ordering::Relaxed);
        }
    }

    pub(crate) fn mean_us(&self, size: Size) -> Option<f64> {
        self.latencies.lock().of(size).mean_us()
    }

    /// Returns the time after which a get is late.
    pub(crate) fn late(&self) -> Duration {
        match self.late_us.load(Ordering::Relaxed) {
            0 => Duration::from_micros(late_us(None)),
            us => Duration::from_micros(us),
        }
    }
}
