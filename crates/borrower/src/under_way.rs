//! These types count what is under way, and measure reads of the directory below.

use crate::policy::hedging::{LATE_PERCENT, late_us};
use crate::policy::latencies::{LatenciesBySize, Size};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use sync::Mutex;

/// How many of something are under way.
#[derive(Default)]
pub(crate) struct UnderWay(AtomicU32);

/// One of them, until it is dropped.
pub(crate) struct OneUnderWay<'a> {
    all: &'a UnderWay,
    /// Those that were when it began, with this one.
    count: u32,
}

impl UnderWay {
    pub(crate) fn begin(&self) -> OneUnderWay<'_> {
        OneUnderWay { all: self, count: self.0.fetch_add(1, Ordering::Relaxed) + 1 }
    }
}

impl OneUnderWay<'_> {
    /// Its part of the time that it took: those under way share the time.
    pub(crate) fn part(&self, took: Duration) -> Duration {
        took / self.count
    }
}

impl Drop for OneUnderWay<'_> {
    fn drop(&mut self) {
        self.all.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What reads of the directory below take lately.
#[derive(Default)]
pub(crate) struct Disk {
    latencies: Mutex<LatenciesBySize>,
    /// After how many microseconds a get is late; 0: nothing is known.
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

    /// After how long a get is late.
    pub(crate) fn late(&self) -> Duration {
        match self.late_us.load(Ordering::Relaxed) {
            0 => Duration::from_micros(late_us(None)),
            us => Duration::from_micros(us),
        }
    }
}
