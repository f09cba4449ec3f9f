//! Figures of repeated measurements: median and spread, and their output.

use serde::Serialize;
use serde_json::{Value, json};

/// The results of repeated measurements.
#[derive(Clone, Debug, Default)]
pub struct Series(Vec<f64>);

impl Series {
    /// Adds one.
    pub fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The middle value; of an even number, the mean of the two in the middle. NaN without values.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => f64::NAN,
            count if count % 2 == 1 => sorted[count / 2],
            count => (sorted[count / 2 - 1] + sorted[count / 2]) / 2.0,
        }
    }

    /// The smallest and the largest.
    fn ends(&self) -> (f64, f64) {
        let ends = |(low, high): (f64, f64), value: &f64| (low.min(*value), high.max(*value));
        self.0.iter().fold((f64::INFINITY, f64::NEG_INFINITY), ends)
    }

    /// Each divided by the one of the same round in `other`.
    pub fn over(&self, other: &Series) -> Series {
        Series(self.0.iter().zip(&other.0).map(|(own, other)| own / other).collect())
    }

    /// Each with the one of the same round in `other` added to it.
    pub fn plus(&self, other: &Series) -> Series {
        Series(self.0.iter().zip(&other.0).map(|(own, other)| own + other).collect())
    }

    /// Each without the one of the same round in `other`.
    pub fn minus(&self, other: &Series) -> Series {
        self.plus(&other.times(-1.0))
    }

    /// Each in another unit.
    pub fn times(&self, factor: f64) -> Series {
        Series(self.0.iter().map(|value| value * factor).collect())
    }

    /// The values of the rounds for which this is true.
    pub fn where_each(&self, is_wanted: impl Iterator<Item = bool>) -> Series {
        Series(self.0.iter().zip(is_wanted).filter_map(|(value, wanted)| wanted.then_some(*value)).collect())
    }

    /// `median (lowest to highest)`, with that many decimals.
    pub fn text(&self, decimals: usize) -> String {
        let (low, high) = self.ends();
        format!("{:.decimals$} ({low:.decimals$} to {high:.decimals$})", self.median())
    }

    /// Median, ends, and every value in the order of the rounds.
    pub fn json(&self) -> Value {
        let (low, high) = self.ends();
        json!({"median": self.median(), "min": low, "max": high, "values": self.0})
    }
}

/// The value that one in a hundred exceeds. Zero without values.
pub fn p99(values: &[u64]) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * 99).div_ceil(100);
    rank.checked_sub(1).and_then(|index| sorted.get(index)).copied().unwrap_or(0)
}

/// The arithmetic mean. Zero without values.
pub fn mean(values: &[u64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().map(|value| *value as f64).sum::<f64>() / values.len() as f64 }
}

/// The mean of ratios. NaN without values.
pub fn geometric_mean(ratios: impl Iterator<Item = f64>) -> f64 {
    let logs: Vec<f64> = ratios.map(f64::ln).collect();
    (logs.iter().sum::<f64>() / logs.len() as f64).exp()
}

/// The conditions of the figures.
#[derive(Debug, Serialize)]
pub struct Conditions {
    /// Revision of the sources, if the script passed it.
    pub revision: String,
    /// Whether the programs were built without optimization: then the figures are meaningless.
    pub debug_build: bool,
    /// Release of the kernel.
    pub kernel: String,
    /// The time: UTC, if the script passed it.
    pub date: String,
    /// Processors of the machine.
    pub processors: usize,
    /// Their model.
    pub processor: String,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// The disk under the files.
    pub device: String,
}

impl Conditions {
    /// The conditions of this machine.
    pub fn now(device: String) -> Conditions {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let told = |name: &str| std::env::var(name).unwrap_or_else(|_| "unknown".to_owned());
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Conditions {
            revision: told("PUMA_REVISION"),
            date: told("PUMA_DATE"),
            processor: model.map_or("unknown", |(_, model)| model).to_owned(),
            debug_build: cfg!(debug_assertions),
            kernel: os::kernel::release(),
            processors: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: os::fields::bytes(&meminfo, "MemTotal").unwrap_or(0),
            device,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        let mut series = Series::default();
        assert!(series.median().is_nan());
        for value in [4.0, 1.0, 3.0] {
            series.add(value);
        }
        assert_eq!(series.text(1), "3.0 (1.0 to 4.0)");
        series.add(2.0);
        assert_eq!((series.median(), series.count()), (2.5, 4));
        assert_eq!(series.over(&series).median(), 1.0);
        assert_eq!((series.plus(&series).median(), series.minus(&series).median()), (5.0, 0.0));
        assert_eq!(series.times(2.0).text(0), "5 (2 to 8)");
        assert_eq!(series.where_each([false, true, false, true].into_iter()).text(1), "1.5 (1.0 to 2.0)");
        assert!((geometric_mean([0.5, 2.0].into_iter()) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn one_in_a_hundred() {
        let values: Vec<u64> = (1..=200).rev().collect();
        assert_eq!((p99(&values), p99(&[7]), p99(&[])), (198, 7, 0));
        assert_eq!((mean(&[1, 2]), mean(&[])), (1.5, 0.0));
    }
}
