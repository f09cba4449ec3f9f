//! The results of the demo: the table on the screen, and `demo.json`.

use crate::bench::Measured;
use serde::Serialize;
use std::fmt::Write;

/// The gain that the demo promises: reads per second with Puma over those without.
pub const GAIN_MIN: f64 = 10.0;

/// The stored results of a run.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// Reads per second without Puma.
    pub baseline_iops: f64,
    /// Reads per second with Puma.
    pub puma_iops: Option<f64>,
    /// Reads per second with everything in memory.
    pub ideal_iops: f64,
    /// Reads per second with Puma over those without.
    pub gain: Option<f64>,
    /// Over all three ways, warm-ups included.
    pub wrong_bytes: u64,
    /// Bytes that were compared with the original.
    pub compared_bytes: u64,
    /// The place of the first wrong byte.
    pub first_wrong: Option<String>,
    /// Everything that could not be done here, with the reason; one sentence each.
    pub left_out: Vec<String>,
    /// Details.
    pub ways: Ways,
    /// The conditions of all measurements.
    pub conditions: Conditions,
    /// Pages of the backing files that were cached as well, when the run with Puma had ended:
    /// memory used twice.
    pub pages_cached_twice: Option<u64>,
    /// What Puma said about itself at the end of its run.
    pub puma_status: Option<::report::All>,
}

/// The three ways of reading.
#[derive(Debug, Serialize)]
pub struct Ways {
    /// Without Puma.
    pub baseline: Measured,
    /// With Puma, if it could run.
    pub puma: Option<Measured>,
    /// With everything in memory.
    pub ideal: Measured,
}

impl Ways {
    /// The measured ways, with their names.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, &Measured)> {
        let all = [("without Puma", Some(&self.baseline)), ("with Puma", self.puma.as_ref())];
        let all = all.into_iter().chain([("all in memory", Some(&self.ideal))]);
        all.filter_map(|(name, way)| Some((name, way?)))
    }
}

/// The conditions of all measurements.
#[derive(Debug, Default, Serialize)]
pub struct Conditions {
    /// Bytes of the files.
    pub data_bytes: u64,
    /// The number of files.
    pub file_count: usize,
    /// Pages of the files.
    pub page_count: u64,
    /// The reader's page cache.
    pub page_cache_bytes: u64,
    /// The lender's memory.
    pub lent_bytes: u64,
    /// The disk's reads per second. `None`: it was not slowed down.
    pub disk_reads_per_s: Option<u32>,
    /// The disk.
    pub device: Option<String>,
    /// Version of the control groups that limited memory. `None`: it was not limited.
    pub memory_groups: Option<String>,
    /// Version of the control groups that slowed down the disk.
    pub disk_groups: Option<String>,
    /// Seed of the order of files and reads.
    pub seed: u64,
    /// Release of the kernel.
    pub kernel: String,
    /// Processors of the machine.
    pub processors: usize,
    /// Memory of the machine.
    pub memory_bytes: u64,
}

impl Summary {
    /// Draws the conclusions from the measurements.
    pub fn new(ways: Ways, conditions: Conditions, mut left_out: Vec<String>) -> Summary {
        if ways.named().any(|(_, way)| way.warm_up_cut_short) {
            left_out.push("a warm-up was cut short, because the disk is slow by itself".to_owned());
        }
        let first_wrong = ways.named().find_map(|(_, way)| way.first_wrong.clone());
        Summary {
            baseline_iops: ways.baseline.iops,
            puma_iops: ways.puma.as_ref().map(|way| way.iops),
            ideal_iops: ways.ideal.iops,
            gain: ways.puma.as_ref().map(|way| way.iops / ways.baseline.iops),
            wrong_bytes: ways.named().map(|(_, way)| way.wrong_bytes).sum(),
            compared_bytes: ways.named().map(|(_, way)| way.compared_bytes).sum(),
            first_wrong,
            left_out,
            ways,
            conditions,
            pages_cached_twice: None,
            puma_status: None,
        }
    }

    /// The table, and remarks about it.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let head = [
            "",
            "reads/s",
            "disk reads/s",
            "not from disk",
            "lent memory",
            "mean µs",
            "p50 µs",
            "p99 µs",
            "wrong bytes",
        ];
        let mut rows = vec![head.map(str::to_owned)];
        for (name, way) in self.ways.named() {
            rows.push([
                name.to_owned(),
                grouped(way.iops),
                way.disk_reads.map_or("?".to_owned(), |reads| grouped(reads as f64 / way.seconds)),
                way.hit_ratio.map_or("?".to_owned(), |ratio| format!("{:.1} %", ratio * 100.0)),
                way.lent_ratio.map_or("-".to_owned(), |ratio| format!("{:.1} %", ratio * 100.0)),
                latency(way.mean_us),
                latency(way.p50_us),
                latency(way.p99_us),
                way.wrong_bytes.to_string(),
            ]);
        }
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        for row in &rows {
            let mut line = format!("{:<1$}", row[0], widths[0]);
            for (cell, width) in row.iter().zip(&widths).skip(1) {
                let _infallible = write!(line, "  {cell:>width$}");
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// A number with its thousands apart.
pub fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Microseconds with a sensible number of digits.
pub fn latency(us: f64) -> String {
    if us < 10.0 { format!("{us:.1}") } else { grouped(us) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_easy_on_the_eye() {
        assert_eq!(
            ["667", "1,000", "1,234,567"],
            [666.6, 1000.0, 1_234_567.0].map(grouped).each_ref().map(String::as_str)
        );
        assert_eq!(["0.8", "42", "17,400"], [0.84, 42.4, 17_400.0].map(latency).each_ref().map(String::as_str));
    }
}
