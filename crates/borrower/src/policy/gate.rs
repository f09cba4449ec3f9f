//! The latency gate: decides whether a lender is worth using at all (Puma 2015, §3.3.2 and §4.5).
//!
//! The borrower pings lenders at a fixed pace. Two moving averages of the round-trip time each
//! close the gate above an upper threshold. The short one detects a peak. The long one detects a
//! network that is always somewhat too slow. The gate opens again when both are below their lower
//! thresholds.
//!
//! Beyond the paper, the current latency of a lender is compared with the current latency of the
//! backing directory. A lender slower than the disk is of no use, however fast the network is. If
//! the disk is far slower, the thresholds do not count.
//!
//! But a disk that has little to do because the lender answers is faster than a disk that has to
//! answer all. So closing the gate is a trial. If the disk then turns out to be slower, lenders are
//! compared with its latency under that load for a while, longer each time.
//!
//! Pages that were written and never read give no measurement of the disk. In that case a network
//! that is always somewhat too slow does not keep pages from being put. They are not requested
//! until the first reads have shown the disk's latency.
//!
//! Pure logic: times are arguments. While the gate is closed only pings measure the lender. So the
//! extra time of a get over a ping is remembered from the time when the gate was open. It is
//! remembered only for a while, because gets may have been slow for a moment only, and without gets
//! nothing would show that.

use crate::policy::latencies::Size;
use std::time::Duration;

/// The time between two pings of a lender.
pub const PING_INTERVAL: Duration = Duration::from_millis(500);

/// Time constant of the short average, in seconds (Puma 2015, §3.3.2).
const SHORT_SECONDS: f64 = 15.0;
/// Time constant of the long average, in seconds. The paper does not give it. Four times the short
/// one: a minute of peaks counts against a lender for some minutes only.
const LONG_SECONDS: f64 = 60.0;
/// Time constant of the "current" latencies by which lender and disk are compared, in seconds: two
/// or three pings.
const NOW_SECONDS: f64 = 1.0;

/// The lender must be slower than the disk by this factor for the gate to close, and faster by
/// [`OPEN_RATIO`] for it to open.
const CLOSE_RATIO: f64 = 1.1;
const OPEN_RATIO: f64 = 0.8;

/// The disk is far slower if the lender takes less than this part of the disk's time: then the
/// thresholds do not close the gate. A gate that they have closed opens below [`FAR_OPEN_RATIO`]. A
/// slow network may be slow by turns, and puts take a part of it, so a little faster is not enough.
/// With a disk that takes twice as long, random reads are 2.9 times as fast as without the lender
/// (`latency`, at 2 ms).
const FAR_CLOSE_RATIO: f64 = 0.7;
const FAR_OPEN_RATIO: f64 = 0.55;

/// How long the disk's latency under load is used: the first time, and at most. It doubles with
/// each trial that confirms it.
const LOADED_FIRST: Duration = Duration::from_secs(10);
const LOADED_MAX: Duration = Duration::from_secs(320);

/// How long the latency of gets is used while the gate is closed: the first time, and at most. Then
/// the lender is tried again. The time doubles each time the gate closes again before it was open
/// for as long.
const OVER_FIRST: Duration = Duration::from_secs(60);
const OVER_MAX: Duration = Duration::from_secs(960);

/// The thresholds of one average, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// The gate closes above this.
    pub upper_us: u64,
    /// The gate may open below this.
    pub lower_us: u64,
}

/// The thresholds of both averages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The thresholds of the short average.
    pub short: Thresholds,
    /// The thresholds of the long average.
    pub long: Thresholds,
}

impl Default for Config {
    /// The thresholds that the paper found (Puma 2015, §4.5).
    fn default() -> Config {
        Config {
            short: Thresholds { upper_us: 40_000, lower_us: 1_500 },
            long: Thresholds { upper_us: 1_500, lower_us: 1_000 },
        }
    }
}

/// The reason why the gate is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The short average is too high.
    Peak,
    /// The long average is too high.
    SlowNetwork,
    /// The backing directory answers faster.
    FasterDisk,
}

impl Reason {
    /// Returns a text for the status.
    pub fn text(self) -> &'static str {
        match self {
            Reason::Peak => "its short average latency is above the threshold",
            Reason::SlowNetwork => "its long average latency is above the threshold",
            Reason::FasterDisk => "the backing directory answers faster",
        }
    }
}

/// The operations that a gate lets through to its lender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Passes {
    /// Puts and gets.
    #[default]
    All,
    /// Puts only, while there is no measurement to compare gets with.
    Puts,
    /// Neither puts nor gets.
    Nothing,
}

/// A moving average whose weights decrease exponentially with age. Until there are enough samples
/// to fill its time, all of them count as in a plain average. So the first ping, which is slow
/// because nothing is warmed up, does not count against a lender for long.
#[derive(Clone, Copy, Debug)]
struct Average {
    seconds: f64,
    sum: f64,
    /// The total weight of the samples in the sum: 1 when there are enough.
    weight: f64,
}

impl Average {
    fn over(seconds: f64) -> Average {
        Average { seconds, sum: 0.0, weight: 0.0 }
    }

    fn add(&mut self, sample: f64, elapsed: Duration) {
        let keep = (-elapsed.max(PING_INTERVAL).as_secs_f64() / self.seconds).exp();
        self.sum = self.sum * keep + sample * (1.0 - keep);
        self.weight = self.weight * keep + (1.0 - keep);
    }

    fn us(&self) -> f64 {
        if self.weight > 0.0 { self.sum / self.weight } else { 0.0 }
    }
}

/// The recent latencies of reads of one size.
#[derive(Clone, Copy, Debug, Default)]
pub struct Took {
    /// The average latency of gets in microseconds, if there were any.
    pub get_us: Option<f64>,
    /// The average latency of reads of the backing directory in microseconds, if there were any.
    pub disk_us: Option<f64>,
}

/// The measurements of a lender since the last ping.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measured {
    /// The round-trip time of the ping, in microseconds.
    pub ping_us: f64,
    /// The latencies of small reads.
    pub small: Took,
    /// The latencies of large reads.
    pub large: Took,
}

/// The gate of one lender. It is open at first.
#[derive(Clone, Debug)]
pub struct Gate {
    config: Config,
    now: Average,
    short: Average,
    long: Average,
    /// The extra time of a get over a ping, for a small and a large one. 0 until there were any
    /// gets: otherwise a lender that is never used would never be measured.
    small_over_ping_us: f64,
    large_over_ping_us: f64,
    /// How much longer that is used while the gate is closed, and how long it was used the last
    /// time.
    over_for: Duration,
    over_time: Duration,
    /// The latency of the backing directory under full load for a small read and a large one, in
    /// microseconds, and how much longer it is used.
    loaded_small_us: f64,
    loaded_large_us: f64,
    loaded_for: Duration,
    /// How long it was used the last time, and how long the gate has been closed.
    loaded_time: Duration,
    closed_time: Duration,
    /// How long the gate has been open.
    open_time: Duration,
    closed: Option<Reason>,
    /// Whether the backing directory was ever measured.
    knows_disk: bool,
}

impl Gate {
    /// Returns an open gate with these thresholds.
    pub fn new(config: Config) -> Gate {
        Gate {
            config,
            now: Average::over(NOW_SECONDS),
            short: Average::over(SHORT_SECONDS),
            long: Average::over(LONG_SECONDS),
            small_over_ping_us: 0.0,
            large_over_ping_us: 0.0,
            over_for: Duration::ZERO,
            over_time: Duration::ZERO,
            loaded_small_us: 0.0,
            loaded_large_us: 0.0,
            loaded_for: Duration::ZERO,
            loaded_time: Duration::ZERO,
            closed_time: Duration::ZERO,
            open_time: Duration::ZERO,
            closed: None,
            knows_disk: false,
        }
    }

    /// Sets other thresholds, from the next measurement on.
    pub(crate) fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// A ping was answered, `elapsed` after the previous one.
    pub fn measured(&mut self, measured: Measured, elapsed: Duration) {
        for average in [&mut self.now, &mut self.short, &mut self.long] {
            average.add(measured.ping_us, elapsed);
        }
        if self.closed.is_none() {
            let over = |get_us: f64| (get_us - measured.ping_us).max(0.0);
            self.small_over_ping_us = measured.small.get_us.map_or(self.small_over_ping_us, over);
            self.large_over_ping_us = measured.large.get_us.map_or(self.large_over_ping_us, over);
        } else {
            self.over_for = self.over_for.saturating_sub(elapsed);
            if self.over_for.is_zero() {
                (self.small_over_ping_us, self.large_over_ping_us) = (0.0, 0.0);
            }
        }
        self.loaded_for = self.loaded_for.saturating_sub(elapsed);
        self.knows_disk |= measured.small.disk_us.or(measured.large.disk_us).is_some();
        let slower = |ratio: f64| self.compare(&measured, Size::Small).is_some_and(|part| part > ratio);
        let before = self.closed;
        self.closed = match before {
            None => self
                .slow_network(false)
                .filter(|_| !self.disk_is_far(&measured, FAR_CLOSE_RATIO))
                .or(slower(CLOSE_RATIO).then_some(Reason::FasterDisk)),
            // The disk's speed alone does not depend on how long the averages remember.
            Some(Reason::FasterDisk) => slower(OPEN_RATIO).then_some(Reason::FasterDisk),
            Some(reason) if self.slow_network(true).is_some() && !self.disk_is_far(&measured, FAR_OPEN_RATIO) => {
                Some(reason)
            }
            Some(_) => slower(OPEN_RATIO).then_some(Reason::FasterDisk),
        };
        match (before, self.closed) {
            (Some(_), None) => {
                self.open_time = Duration::ZERO;
                self.believe_loaded(&measured);
            }
            (None, Some(_)) => {
                self.closed_time = Duration::ZERO;
                let is_again = self.open_time < self.over_time;
                self.over_time = if is_again { (self.over_time * 2).min(OVER_MAX) } else { OVER_FIRST };
                self.over_for = self.over_time;
            }
            (None, None) => self.open_time += elapsed,
            (Some(_), Some(_)) => self.closed_time += elapsed,
        }
    }

    /// Returns the average that is too high, if one is.
    fn slow_network(&self, is_closed: bool) -> Option<Reason> {
        let threshold_us = |of: Thresholds| if is_closed { of.lower_us } else { of.upper_us } as f64;
        if self.short.us() > threshold_us(self.config.short) {
            Some(Reason::Peak)
        } else if self.long.us() > threshold_us(self.config.long) {
            Some(Reason::SlowNetwork)
        } else {
            None
        }
    }

    /// Returns the lender's latency for a read of that size as a part of the disk's. None if too
    /// little is known.
    fn compare(&self, measured: &Measured, size: Size) -> Option<f64> {
        let (disk_us, loaded_us, over_ping_us) = match size {
            Size::Small => (measured.small.disk_us?, self.loaded_small_us, self.small_over_ping_us),
            Size::Large => (measured.large.disk_us?, self.loaded_large_us, self.large_over_ping_us),
        };
        let disk_us = if self.loaded_for.is_zero() { disk_us } else { disk_us.max(loaded_us) };
        Some((self.now.us() + over_ping_us) / disk_us.max(1.0))
    }

    /// Returns whether the disk is far slower than the lender, for reads of each size that was
    /// measured.
    fn disk_is_far(&self, measured: &Measured, ratio: f64) -> bool {
        let mut parts =
            [Size::Small, Size::Large].into_iter().filter_map(|size| self.compare(measured, size)).peekable();
        parts.peek().is_some() && parts.all(|part| part < ratio)
    }

    /// The disk under full load has turned out to be slower than the lender.
    fn believe_loaded(&mut self, measured: &Measured) {
        // A disk that was faster for long has become slower: that was no trial.
        let was_trial = self.closed_time < LOADED_FIRST;
        self.loaded_time =
            if was_trial { (self.loaded_time * 2).clamp(LOADED_FIRST, LOADED_MAX) } else { Duration::ZERO };
        self.loaded_for = self.loaded_time;
        self.loaded_small_us = measured.small.disk_us.unwrap_or(0.0);
        self.loaded_large_us = measured.large.disk_us.unwrap_or(0.0);
    }

    /// Returns the reason why the gate is closed, if it is.
    pub fn closed(&self) -> Option<Reason> {
        self.closed
    }

    /// Returns the operations that the gate lets through.
    pub fn passes(&self) -> Passes {
        let is_peak = self.slow_network(false) == Some(Reason::Peak);
        match self.closed {
            None => Passes::All,
            Some(Reason::SlowNetwork) if !self.knows_disk && !is_peak => Passes::Puts,
            Some(_) => Passes::Nothing,
        }
    }

    /// Returns the averages of the last second, the last 15 seconds and the last minute, in
    /// microseconds.
    pub(crate) fn averages_us(&self) -> [u64; 3] {
        [self.now, self.short, self.long].map(|average| average.us() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(ping_us: f64, get_us: Option<f64>, disk_us: Option<f64>) -> Measured {
        Measured { ping_us, small: Took { get_us, disk_us }, large: Took::default() }
    }

    fn run(gate: &mut Gate, seconds: u64, ping_us: f64, get_us: Option<f64>, disk_us: Option<f64>) {
        for _ in 0..seconds * 2 {
            gate.measured(small(ping_us, get_us, disk_us), PING_INTERVAL);
        }
    }

    #[test]
    fn a_peak_closes_it_and_calm_opens_it() {
        let mut gate = Gate::new(Config::default());
        run(&mut gate, 10, 100.0, None, None);
        assert_eq!(gate.closed(), None);
        run(&mut gate, 30, 200_000.0, None, None);
        assert!(gate.closed().is_some());
        // Between the thresholds the gate stays as it is.
        run(&mut gate, 600, 1_200.0, None, None);
        assert!(gate.closed().is_some(), "the long average is above its lower threshold");
        run(&mut gate, 600, 900.0, None, None);
        assert_eq!(gate.closed(), None);
        run(&mut gate, 600, 1_200.0, None, None);
        assert_eq!(gate.closed(), None, "open, it stays open below the upper ones");
    }

    #[test]
    fn a_slow_first_ping_is_soon_forgotten() {
        let mut gate = Gate::new(Config::default());
        gate.measured(Measured { ping_us: 30_000.0, ..Measured::default() }, Duration::ZERO);
        assert_eq!(gate.averages_us(), [30_000; 3]);
        run(&mut gate, 20, 200.0, None, None);
        assert_eq!(gate.closed(), None);
        let [_, short_us, long_us] = gate.averages_us();
        assert!(short_us < 700 && long_us < 1_000, "{short_us} {long_us}");
    }

    #[test]
    fn a_network_that_is_always_too_slow_closes_it_unless_the_disk_is_slower_by_far() {
        let mut gate = Gate::new(Config::default());
        run(&mut gate, 10, 100.0, None, Some(2_500.0));
        run(&mut gate, 120, 2_000.0, None, Some(2_500.0));
        assert_eq!(gate.closed(), Some(Reason::SlowNetwork));
        run(&mut gate, 1, 2_000.0, None, Some(3_500.0));
        assert_eq!(gate.closed(), Some(Reason::SlowNetwork), "not that far");
        run(&mut gate, 1, 2_000.0, None, Some(4_000.0));
        assert_eq!(gate.closed(), None);
        run(&mut gate, 20, 2_000.0, Some(2_100.0), Some(3_500.0));
        assert_eq!(gate.closed(), None, "open, it stays open a little longer");
        // A peak that is still below the disk's latency, and one that is not.
        run(&mut gate, 60, 60_000.0, Some(60_100.0), Some(200_000.0));
        assert_eq!(gate.closed(), None);
        run(&mut gate, 60, 60_000.0, Some(60_100.0), Some(70_000.0));
        assert_eq!(gate.closed(), Some(Reason::Peak));
    }

    #[test]
    fn nothing_is_known_of_a_disk_that_was_not_read() {
        let slow = || {
            let mut gate = Gate::new(Config::default());
            run(&mut gate, 120, 2_000.0, Some(2_100.0), None);
            assert_eq!((gate.closed(), gate.passes()), (Some(Reason::SlowNetwork), Passes::Puts));
            gate
        };
        let mut gate = slow();
        run(&mut gate, 1, 2_000.0, None, Some(100.0));
        assert_eq!((gate.closed(), gate.passes()), (Some(Reason::SlowNetwork), Passes::Nothing));
        let mut gate = slow();
        run(&mut gate, 1, 2_000.0, None, Some(10_000.0));
        assert_eq!((gate.closed(), gate.passes()), (None, Passes::All));
        // Slower than a reader would wait for.
        let mut gate = slow();
        run(&mut gate, 60, 60_000.0, None, None);
        assert_eq!((gate.closed(), gate.passes()), (Some(Reason::SlowNetwork), Passes::Nothing));
    }

    /// Streams over a slow network: the disk must be far slower for them, too.
    #[test]
    fn small_reads_and_large_ones_have_to_agree() {
        let slow = |small_disk_us: Option<f64>, large: Took| Measured {
            ping_us: 2_000.0,
            small: Took { get_us: None, disk_us: small_disk_us },
            large,
        };
        let large = |get_us, disk_us| Took { get_us, disk_us: Some(disk_us) };
        let closed = |measured| {
            let mut gate = Gate::new(Config::default());
            (0..240).for_each(|_| gate.measured(measured, PING_INTERVAL));
            gate.closed()
        };
        assert_eq!(closed(slow(None, large(Some(3_000.0), 10_000.0))), None);
        assert_eq!(closed(slow(Some(6_000.0), large(Some(3_000.0), 10_000.0))), None);
        assert_eq!(closed(slow(Some(6_000.0), large(Some(3_000.0), 4_000.0))), Some(Reason::SlowNetwork));
        assert_eq!(closed(slow(Some(2_500.0), large(Some(3_000.0), 10_000.0))), Some(Reason::SlowNetwork));
        // A lender without any large gets is tried.
        assert_eq!(closed(slow(None, large(None, 10_000.0))), None);
    }

    #[test]
    fn a_faster_disk_closes_it_at_once_and_a_slower_one_opens_it_at_once() {
        let mut gate = Gate::new(Config::default());
        run(&mut gate, 5, 60.0, Some(90.0), Some(10_000.0));
        assert_eq!(gate.closed(), None);
        // The disk has become fast.
        run(&mut gate, 1, 60.0, Some(90.0), Some(40.0));
        assert_eq!(gate.closed(), Some(Reason::FasterDisk));
        // While the gate is closed there are no gets. The extra time of a get is remembered;
        // otherwise the gate would open by mistake.
        run(&mut gate, 20, 30.0, None, Some(70.0));
        assert_eq!(gate.closed(), Some(Reason::FasterDisk));
        run(&mut gate, 1, 60.0, None, Some(10_000.0));
        assert_eq!(gate.closed(), None);
        // 5 ms of delay between borrower and lender, and a disk of 2 ms.
        run(&mut gate, 1, 60.0, Some(90.0), Some(2_000.0));
        run(&mut gate, 3, 5_060.0, Some(5_090.0), Some(2_000.0));
        assert_eq!(gate.closed(), Some(Reason::FasterDisk));
        run(&mut gate, 4, 60.0, None, Some(2_000.0));
        assert_eq!(gate.closed(), None, "the delay has ended");
    }

    /// One stall of the lender does not count for good. A lender whose gets are always slow is
    /// tried less and less often.
    #[test]
    fn what_gets_took_is_forgotten_while_nobody_gets() {
        let mut gate = Gate::new(Config::default());
        run(&mut gate, 10, 100.0, Some(200.0), Some(5_000.0));
        gate.measured(small(100.0, Some(30_000.0), Some(5_000.0)), PING_INTERVAL);
        assert_eq!(gate.closed(), Some(Reason::FasterDisk));
        let mut closed_for = Vec::new();
        for _ in 0..4 {
            let mut pings = 0;
            while gate.closed().is_some() {
                gate.measured(small(100.0, None, Some(5_000.0)), PING_INTERVAL);
                pings += 1;
            }
            closed_for.push(pings / 2);
            gate.measured(small(100.0, Some(30_000.0), Some(5_000.0)), PING_INTERVAL);
        }
        assert_eq!(closed_for, [60, 120, 240, 480]);
        // After it was open for long enough, the time starts again at its first value.
        while gate.closed().is_some() {
            gate.measured(small(100.0, None, Some(5_000.0)), PING_INTERVAL);
        }
        run(&mut gate, 1_000, 100.0, Some(200.0), Some(5_000.0));
        run(&mut gate, 1, 100.0, Some(30_000.0), Some(5_000.0));
        run(&mut gate, 60, 100.0, None, Some(5_000.0));
        assert_eq!(gate.closed(), None);
    }

    /// A slow network: the disk is far slower while it has to answer all, and not while it has
    /// little to do.
    #[test]
    fn a_slow_network_is_left_ever_less_for_a_disk_that_is_slower_when_it_is_used() {
        let mut gate = Gate::new(Config::default());
        let mut closed = Vec::new();
        for tick in 0..2 * 3600 {
            let disk_us = if gate.closed().is_some() { 100_000.0 } else { 5_000.0 };
            gate.measured(small(4_000.0, Some(4_100.0), Some(disk_us)), PING_INTERVAL);
            if gate.closed().is_some() {
                closed.push(tick);
            }
        }
        assert!(closed.len() < 40, "closed {} times in an hour", closed.len());
    }

    /// A disk that is fast while it has little to do and slow while it has to answer all, such as a
    /// disk with bursts.
    #[test]
    fn a_disk_that_is_fast_only_while_it_is_idle_is_tried_ever_less() {
        let mut gate = Gate::new(Config::default());
        let mut closed = Vec::new();
        for tick in 0..2 * 3600 {
            let disk_us = if gate.closed().is_some() { 20_000.0 } else { 40.0 };
            gate.measured(small(60.0, Some(90.0), Some(disk_us)), PING_INTERVAL);
            if gate.closed().is_some() {
                closed.push(tick);
            }
        }
        assert!(closed.len() < 20, "closed {} times in an hour", closed.len());
        // But a lender that becomes slower than the loaded disk is bypassed at once.
        run(&mut gate, 2, 60.0, Some(90.0), Some(40.0));
        run(&mut gate, 3, 60.0, Some(90.0), Some(20_000.0));
        assert_eq!(gate.closed(), None);
        run(&mut gate, 5, 30_000.0, Some(30_030.0), Some(40.0));
        assert!(gate.closed().is_some());
    }
}
