//! The latency gate: whether a lender is worth using at all (Puma 2015, §3.3.2 and §4.5).
//!
//! Lenders are pinged at a fixed pace. Two moving averages of the round-trip time each close the
//! gate above an upper threshold: a short one, which sees a peak, and a long one, which sees a
//! network that is always somewhat too slow. It opens again when both are below their lower
//! thresholds. Beyond the paper, what a lender takes *now* is compared with what the directory
//! below takes *now*. A lender slower than the disk is of no use however fast the network is; and
//! with a disk that is slower by far, the thresholds do not count. But a disk that has little to
//! do, because the lender answers, is faster than one that has to answer all: so closing the gate
//! is a trial. If the disk then turns out to be slower, what it took under that load is what
//! lenders are compared with for a while, longer each time. And as long as nothing is known of the
//! disk, because what is lent was written and never read, a network that is always somewhat too
//! slow does not keep pages from being put: they are not asked for until the first reads have shown
//! what the disk takes.
//!
//! Pure: times are arguments. While the gate is closed only pings tell what the lender would take,
//! so what a get takes beyond a ping is remembered from when it was open; for a while, since gets
//! may have been slow for a moment only, and nobody gets that could show it.

use crate::policy::latencies::Size;
use std::time::Duration;

/// Time between two pings of a lender.
pub const PING_INTERVAL: Duration = Duration::from_millis(500);

/// Time constant of the short average, in seconds (Puma 2015, §3.3.2).
const SHORT_SECONDS: f64 = 15.0;
/// Time constant of the long average, in seconds. The paper does not say it: four times the short
/// one, so that a minute of peaks is not held against a lender for longer than some minutes.
const LONG_SECONDS: f64 = 60.0;
/// Time constant of what "now" means where lender and disk are compared, in seconds: two or three
/// pings.
const NOW_SECONDS: f64 = 1.0;

/// The lender must be slower than the disk by this factor for the gate to close, and faster by
/// [`OPEN_RATIO`] for it to open.
const CLOSE_RATIO: f64 = 1.1;
const OPEN_RATIO: f64 = 0.8;

/// The disk is slower by far: the thresholds do not count while the lender takes less than this
/// part of what the disk does; and if they did, not from [`FAR_OPEN_RATIO`] on. A network that is
/// slow may be slow by turns, and puts take their part of it, so a little faster is not enough;
/// with a disk that takes twice as long random reads are 2.9 times as fast as without the lender
/// (`latency`, at 2 ms).
const FAR_CLOSE_RATIO: f64 = 0.7;
const FAR_OPEN_RATIO: f64 = 0.55;

/// How long what a disk took under load is believed, at first and at the most. It doubles with each
/// trial that shows it again.
const LOADED_FIRST: Duration = Duration::from_secs(10);
const LOADED_MAX: Duration = Duration::from_secs(320);

/// How long what gets took is believed while the gate is closed, at first and at the most. Then the
/// lender is asked again. It doubles each time the gate closes again before it was open for as
/// long.
const OVER_FIRST: Duration = Duration::from_secs(60);
const OVER_MAX: Duration = Duration::from_secs(960);

/// Above the upper the gate closes, below the lower it may open, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// It closes above.
    pub upper_us: u64,
    /// It may open below.
    pub lower_us: u64,
}

/// The thresholds of both averages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Of the short average.
    pub short: Thresholds,
    /// Of the long average.
    pub long: Thresholds,
}

impl Default for Config {
    /// Those that the paper found (Puma 2015, §4.5).
    fn default() -> Config {
        Config {
            short: Thresholds { upper_us: 40_000, lower_us: 1_500 },
            long: Thresholds { upper_us: 1_500, lower_us: 1_000 },
        }
    }
}

/// Why the gate is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The short average is too high.
    Peak,
    /// The long average is too high.
    SlowNetwork,
    /// The directory below answers faster.
    FasterDisk,
}

impl Reason {
    /// In words, for the status.
    pub fn text(self) -> &'static str {
        match self {
            Reason::Peak => "its short average latency is above the threshold",
            Reason::SlowNetwork => "its long average latency is above the threshold",
            Reason::FasterDisk => "the directory below answers faster",
        }
    }
}

/// What a gate lets through to its lender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Passes {
    /// Puts and gets.
    #[default]
    All,
    /// Puts, while nothing is known that gets could be compared with.
    Puts,
    /// Neither.
    Nothing,
}

/// A moving average whose weights fall off exponentially with age. Before there is enough to fill
/// its time, all that there is counts as in a plain average: the first ping, which comes while
/// everything is still cold, is not held against a lender for long.
#[derive(Clone, Copy, Debug)]
struct Average {
    seconds: f64,
    sum: f64,
    /// Of the samples in the sum: 1 when there are enough.
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

/// What reads of one size took lately.
#[derive(Clone, Copy, Debug, Default)]
pub struct Took {
    /// What gets took on average, in microseconds, if there were any.
    pub get_us: Option<f64>,
    /// What reads of the directory below take on average, in microseconds, if any were made.
    pub disk_us: Option<f64>,
}

/// What was measured of a lender since the last ping.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measured {
    /// Round-trip time of the ping, in microseconds.
    pub ping_us: f64,
    /// What small reads took.
    pub small: Took,
    /// What large ones took.
    pub large: Took,
}

/// The gate of one lender. It is open at first.
#[derive(Clone, Debug)]
pub struct Gate {
    config: Config,
    now: Average,
    short: Average,
    long: Average,
    /// What a get takes beyond a ping, a small one and a large one. Nothing, until there were any:
    /// whoever is never asked would never be known.
    small_over_ping_us: f64,
    large_over_ping_us: f64,
    /// How long that is still believed while the gate is closed, and for how long it was the last
    /// time.
    over_for: Duration,
    over_time: Duration,
    /// What the directory below took for a small read and a large one when it had to answer all, in
    /// microseconds, and how long that is still believed.
    loaded_small_us: f64,
    loaded_large_us: f64,
    loaded_for: Duration,
    /// For how long it was believed the last time, and how long the gate has been closed.
    loaded_time: Duration,
    closed_time: Duration,
    /// How long it has been open.
    open_time: Duration,
    closed: Option<Reason>,
    /// Whether anything is known of the directory below.
    knows_disk: bool,
}

impl Gate {
    /// With those thresholds.
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

    /// Other thresholds, from what is measured next on.
    pub fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// A ping was answered, `elapsed` after the one before.
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
            // The disk's speed alone has nothing to do with how long the averages remember.
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

    /// Which of the averages is too high.
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

    /// What the lender takes for a read of that size, as a part of what the disk takes. None: too
    /// little is known.
    fn compare(&self, measured: &Measured, size: Size) -> Option<f64> {
        let (disk_us, loaded_us, over_ping_us) = match size {
            Size::Small => (measured.small.disk_us?, self.loaded_small_us, self.small_over_ping_us),
            Size::Large => (measured.large.disk_us?, self.loaded_large_us, self.large_over_ping_us),
        };
        let disk_us = if self.loaded_for.is_zero() { disk_us } else { disk_us.max(loaded_us) };
        Some((self.now.us() + over_ping_us) / disk_us.max(1.0))
    }

    /// Whether the disk is slower than the lender by far, for reads of each size of which something
    /// is known.
    fn disk_is_far(&self, measured: &Measured, ratio: f64) -> bool {
        let mut parts =
            [Size::Small, Size::Large].into_iter().filter_map(|size| self.compare(measured, size)).peekable();
        parts.peek().is_some() && parts.all(|part| part < ratio)
    }

    /// The disk has turned out to be slower than the lender when it has to answer all.
    fn believe_loaded(&mut self, measured: &Measured) {
        // A disk that was faster for long has become slower: that is no trial.
        let was_trial = self.closed_time < LOADED_FIRST;
        self.loaded_time =
            if was_trial { (self.loaded_time * 2).clamp(LOADED_FIRST, LOADED_MAX) } else { Duration::ZERO };
        self.loaded_for = self.loaded_time;
        self.loaded_small_us = measured.small.disk_us.unwrap_or(0.0);
        self.loaded_large_us = measured.large.disk_us.unwrap_or(0.0);
    }

    /// Why it is closed, if it is.
    pub fn closed(&self) -> Option<Reason> {
        self.closed
    }

    /// What it lets through.
    pub fn passes(&self) -> Passes {
        let is_peak = self.slow_network(false) == Some(Reason::Peak);
        match self.closed {
            None => Passes::All,
            Some(Reason::SlowNetwork) if !self.knows_disk && !is_peak => Passes::Puts,
            Some(_) => Passes::Nothing,
        }
    }

    /// The averages of the last second, the last 15 seconds and the last minute, in microseconds.
    pub fn averages_us(&self) -> [u64; 3] {
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
        // Between the thresholds it stays as it is.
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
        // A peak that the disk is still behind, and one that it is not.
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
        // Slower than anybody would wait for.
        let mut gate = slow();
        run(&mut gate, 60, 60_000.0, None, None);
        assert_eq!((gate.closed(), gate.passes()), (Some(Reason::SlowNetwork), Passes::Nothing));
    }

    /// Streams over a slow network: the disk must be slower by far for them, too.
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
        // A lender that was never asked for any is tried.
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
        // Closed, nobody gets: what a get takes beyond a ping is remembered, else it would open by
        // mistake.
        run(&mut gate, 20, 30.0, None, Some(70.0));
        assert_eq!(gate.closed(), Some(Reason::FasterDisk));
        run(&mut gate, 1, 60.0, None, Some(10_000.0));
        assert_eq!(gate.closed(), None);
        // 5 ms of delay between here and the lender, and a disk of 2 ms.
        run(&mut gate, 1, 60.0, Some(90.0), Some(2_000.0));
        run(&mut gate, 3, 5_060.0, Some(5_090.0), Some(2_000.0));
        assert_eq!(gate.closed(), Some(Reason::FasterDisk));
        run(&mut gate, 4, 60.0, None, Some(2_000.0));
        assert_eq!(gate.closed(), None, "the delay has ended");
    }

    /// One stall of the lender is not held against it for good; and one whose gets are always slow
    /// is asked ever less.
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
        // Open for long enough in between, it begins anew.
        while gate.closed().is_some() {
            gate.measured(small(100.0, None, Some(5_000.0)), PING_INTERVAL);
        }
        run(&mut gate, 1_000, 100.0, Some(200.0), Some(5_000.0));
        run(&mut gate, 1, 100.0, Some(30_000.0), Some(5_000.0));
        run(&mut gate, 60, 100.0, None, Some(5_000.0));
        assert_eq!(gate.closed(), None);
    }

    /// A slow network: the disk is slower by far while it has to answer all, and not while it has
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

    /// A disk that is fast while it has little to do and slow while it has to answer all, as one
    /// with bursts is.
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
        // But a lender that becomes slower than the loaded disk is left at once.
        run(&mut gate, 2, 60.0, Some(90.0), Some(40.0));
        run(&mut gate, 3, 60.0, Some(90.0), Some(20_000.0));
        assert_eq!(gate.closed(), None);
        run(&mut gate, 5, 30_000.0, Some(30_030.0), Some(40.0));
        assert!(gate.closed().is_some());
    }
}
