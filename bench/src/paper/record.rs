//! What was measured, kept point by point.

use crate::figures::Conditions;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use testbed::Failure;

/// Student's t for 95 % on both sides, by degrees of freedom, from 1; beyond the table that of the normal distribution is near enough.
const T95: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
const T95_BEYOND: f64 = 1.96;

/// What all points of an experiment have in common: the first line of its file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Revision, kernel and machine.
    pub conditions: Value,
    /// How much was measured.
    pub extent: String,
    /// The papers' sizes were divided by it.
    pub scale: f64,
    /// Of all that was drawn.
    pub seed: u64,
}

impl Header {
    pub fn new(conditions: Conditions, extent: &str, scale: f64, seed: u64) -> Header {
        Header { conditions: serde_json::json!(conditions), extent: extent.to_owned(), scale, seed }
    }

    /// Whether points of both may stand side by side: of the same programs on the same machine, as much of it.
    fn fits(&self, other: &Header) -> bool {
        // Results that were written meanwhile make the sources no others.
        let told = |header: &Header, key: &str| header.conditions[key].to_string().replace("-dirty", "");
        let same = |key: &str| told(self, key) == told(other, key);
        (&self.extent, self.scale) == (&other.extent, other.scale)
            && ["revision", "kernel", "processors", "processor"].into_iter().all(same)
    }
}

/// One round of one point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    pub variant: String,
    /// What the experiment varies; 0 without Puma.
    pub x: f64,
    pub round: usize,
    pub values: BTreeMap<String, f64>,
}

/// The points of an experiment.
pub struct Records {
    path: PathBuf,
    pub header: Header,
    pub points: Vec<Point>,
}

/// A mean, and how far it may be off, with 95 % confidence (Student's t); infinitely far with one measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mean {
    pub mean: f64,
    pub off: f64,
}

impl Mean {
    /// Of these. None: there are none.
    pub fn of(values: &[f64]) -> Option<Mean> {
        let count = values.len();
        let mean = values.iter().sum::<f64>() / count as f64;
        let off = match count {
            0 => return None,
            1 => f64::INFINITY,
            _ => {
                let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1) as f64;
                T95.get(count - 2).unwrap_or(&T95_BEYOND) * (variance / count as f64).sqrt()
            }
        };
        Some(Mean { mean, off })
    }

    /// `mean ± off`.
    pub fn text(self, decimals: usize) -> String {
        format!("{:.decimals$} ± {:.decimals$}", self.mean, self.off)
    }
}

impl Records {
    /// Those that are kept, if they fit; else none, and the file is begun anew.
    pub fn open(results: &Path, name: &str, header: Header, again: bool) -> Result<Records, Failure> {
        let path = file(results, name);
        if let Some(kept) = Records::read(results, name)?
            && !again
            && kept.header.fits(&header)
        {
            if !kept.points.is_empty() {
                println!("{} rounds are kept already, in {}", kept.points.len(), path.display());
            }
            return Ok(kept);
        }
        let folder = results.join("raw");
        fs::create_dir_all(&folder).map_err(Failure::attempted(format!("making {}", folder.display())))?;
        let line = serde_json::json!(header);
        fs::write(&path, format!("{line}\n")).map_err(Failure::attempted(format!("writing {}", path.display())))?;
        Ok(Records { path, header, points: Vec::new() })
    }

    /// What is kept of an experiment.
    pub fn read(results: &Path, name: &str) -> Result<Option<Records>, Failure> {
        let path = file(results, name);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(Failure::attempted(format!("reading {}", path.display())))?,
        };
        let wrong = |error: serde_json::Error| {
            Failure::Problem(format!("reading {}: {error}; remove it, or run with --again", path.display()))
        };
        // What was being written when the machine stopped is no line.
        let end = text.rfind('\n').map_or(0, |at| at + 1);
        let mut lines = text[..end].lines();
        let Some(first) = lines.next() else { return Ok(None) };
        let header = serde_json::from_str(first).map_err(wrong)?;
        let points = lines.map(serde_json::from_str).collect::<Result<_, _>>().map_err(wrong)?;
        Ok(Some(Records { path, header, points }))
    }

    pub fn has(&self, variant: &str, x: f64, round: usize) -> bool {
        self.points.iter().any(|point| point.is(variant, x) && point.round == round)
    }

    pub fn add(&mut self, variant: &str, x: f64, round: usize, values: BTreeMap<String, f64>) -> Result<(), Failure> {
        let point = Point { variant: variant.to_owned(), x, round, values };
        let line = serde_json::json!(point);
        let added = File::options().append(true).open(&self.path).and_then(|mut file| writeln!(file, "{line}"));
        added.map_err(Failure::attempted(format!("adding to {}", self.path.display())))?;
        self.points.push(point);
        Ok(())
    }

    /// The mean of a value over the rounds of a point, in another unit.
    pub fn mean(&self, variant: &str, x: f64, key: &str, unit: f64) -> Option<Mean> {
        let rounds = self.points.iter().filter(|point| point.is(variant, x));
        let values: Vec<f64> = rounds.filter_map(|point| point.values.get(key)).map(|value| value / unit).collect();
        Mean::of(&values)
    }

    /// The mean of what others are set against, which is without Puma; not a number where it was not measured.
    pub fn baseline(&self, variant: &str, key: &str) -> f64 {
        self.mean(variant, 0.0, key, 1.0).map_or(f64::NAN, |mean| mean.mean)
    }

    /// Where a variant was measured, rising.
    pub fn xs(&self, variant: &str) -> Vec<f64> {
        let of_it = self.points.iter().filter(|point| point.variant == variant);
        let mut xs: Vec<f64> = of_it.map(|point| point.x).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        xs
    }
}

impl Point {
    fn is(&self, variant: &str, x: f64) -> bool {
        self.variant == variant && self.x == x
    }
}

fn file(results: &Path, name: &str) -> PathBuf {
    results.join("raw").join(format!("{name}.jsonl"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_off_by_student() {
        assert_eq!(Mean::of(&[]), None);
        assert!(Mean::of(&[3.0]).unwrap().off.is_infinite());
        // Two values, 1 apart: t(1) times 0.5.
        let two = Mean::of(&[1.0, 2.0]).unwrap();
        assert_eq!(two.mean, 1.5);
        assert!((two.off - 6.353).abs() < 1e-9, "{}", two.off);
        let many = Mean::of(&[1.0, 3.0].repeat(50)).unwrap();
        assert!((many.off - 1.96 * (100.0f64 / 99.0 / 100.0).sqrt()).abs() < 1e-9, "{}", many.off);
        assert_eq!(Mean::of(&[2.0, 2.0, 2.0]).unwrap().text(1), "2.0 ± 0.0");
    }

    #[test]
    fn what_is_kept_is_not_measured_again() {
        let scratch = testbed::Scratch::new("paper-records").unwrap();
        let header = |scale| Header::new(Conditions::now("a disk".to_owned()), "quick", scale, 1);
        let values = |iops: f64| BTreeMap::from([("iops".to_owned(), iops)]);
        let open = |scale, again| Records::open(scratch.path(), "x", header(scale), again).unwrap();
        let mut records = open(8.0, false);
        records.add("baseline", 0.0, 0, values(160.0)).unwrap();
        records.add("baseline", 0.0, 1, values(180.0)).unwrap();
        // It ended in the middle of a line.
        File::options().append(true).open(&records.path).unwrap().write_all(b"{\"variant").unwrap();
        let kept = open(8.0, false);
        assert_eq!(kept.points, records.points);
        assert!(kept.has("baseline", 0.0, 1) && !kept.has("baseline", 0.0, 2) && !kept.has("ideal", 0.0, 0));
        assert_eq!(kept.mean("baseline", 0.0, "iops", 10.0).unwrap().mean, 17.0);
        assert_eq!(kept.xs("baseline"), [0.0]);
        assert!(open(4.0, false).points.is_empty(), "of another scale");
        open(4.0, false).add("ideal", 0.0, 0, values(1.0)).unwrap();
        assert_eq!(open(4.0, false).points.len(), 1);
        assert!(open(4.0, true).points.is_empty(), "wanted anew");
        assert!(Records::read(scratch.path(), "y").unwrap().is_none());
    }
}
