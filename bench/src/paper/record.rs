//! The stored measurements, point by point.

use crate::figures::Conditions;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use testbed::Failure;

/// Student's t for 95 % on both sides, by degrees of freedom, from 1; beyond the table the normal
/// distribution is near enough.
const T95: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
const T95_BEYOND: f64 = 1.96;

/// The common conditions of an experiment's points: the first line of its file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Kernel and machine; and the revision at its beginning.
    pub conditions: Value,
    /// The extent of the measurements.
    pub extent: String,
    /// The divisor of the papers' sizes.
    pub scale: f64,
    /// The seed.
    pub seed: u64,
}

impl Header {
    pub fn new(conditions: Conditions, extent: &str, scale: f64, seed: u64) -> Header {
        Header { conditions: serde_json::json!(conditions), extent: extent.to_owned(), scale, seed }
    }

    /// Whether points of both may be combined: the same extent on the same kind of machine. A run
    /// of days contains several revisions: each point has its own.
    fn fits(&self, other: &Header) -> bool {
        let same = |key: &str| self.conditions[key] == other.conditions[key];
        (&self.extent, self.scale, self.seed) == (&other.extent, other.scale, other.seed)
            && ["kernel", "processors", "processor"].into_iter().all(same)
    }

    /// The revision of a measurement under these conditions.
    pub fn revision(&self) -> String {
        let told = |key: &str| self.conditions[key].as_str().unwrap_or("?").to_owned();
        // Results that were written meanwhile do not change the sources.
        told("revision").replace("-dirty", "")
    }
}

/// One round of one point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    pub variant: String,
    /// The varied parameter; 0 without Puma.
    pub x: f64,
    pub round: usize,
    pub values: BTreeMap<String, f64>,
    pub revision: String,
    /// Where it was measured, if not on this machine itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// Whether it was requested by its label: other runs may have measured others at the same time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_its_own: bool,
}

/// The points of an experiment.
pub struct Records {
    path: PathBuf,
    pub header: Header,
    /// In the order of their measurement.
    pub points: Vec<Point>,
}

/// A mean and its error, with 95 % confidence (Student's t); infinite with one measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mean {
    pub mean: f64,
    pub off: f64,
}

impl Mean {
    /// The mean of these values. `None`: there are none.
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

    /// The ratio of two means. Their errors are combined as for independent errors that are small
    /// compared with the means.
    pub fn over(self, floor: Mean) -> Mean {
        let mean = self.mean / floor.mean;
        Mean { mean, off: mean.abs() * (self.off / self.mean).hypot(floor.off / floor.mean) }
    }

    /// Whether it is at least this; `None`: the interval contains both.
    pub fn is_at_least(self, wanted: f64) -> Option<bool> {
        match (self.mean - self.off >= wanted, self.mean + self.off < wanted) {
            (true, _) => Some(true),
            (_, true) => Some(false),
            _ => None,
        }
    }

    /// Whether it is at most this; `None`: the interval contains both.
    pub fn is_at_most(self, wanted: f64) -> Option<bool> {
        Mean { mean: -self.mean, ..self }.is_at_least(-wanted)
    }

    /// `mean ± off`.
    pub fn text(self, decimals: usize) -> String {
        format!("{:.decimals$} ± {:.decimals$}", self.mean, self.off)
    }
}

impl Records {
    /// The stored records, if they fit; otherwise none, and the file is begun again with the first
    /// new one.
    pub fn open(results: &Path, name: &str, header: Header, again: bool) -> Result<Records, Failure> {
        let path = file(results, name);
        if let Some(kept) = Records::read(results, name)?
            && !again
            && kept.header.fits(&header)
        {
            // A line that was incomplete when the machine stopped is removed; otherwise the next
            // one would become a part of it.
            let text = fs::read(&path).map_err(Failure::attempted(format!("reading {}", path.display())))?;
            let end = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            let cut = File::options().write(true).open(&path).and_then(|file| file.set_len(end as u64));
            cut.map_err(Failure::attempted(format!("cutting {}", path.display())))?;
            if !kept.points.is_empty() {
                println!("{} rounds are kept already, in {}", kept.points.len(), path.display());
            }
            return Ok(kept);
        }
        // Older results stay until there are new ones.
        Ok(Records { path, header, points: Vec::new() })
    }

    /// A file with only the header, in place of the older one.
    fn begin(&self) -> Result<(), Failure> {
        let folder = self.path.parent().unwrap_or(&self.path);
        fs::create_dir_all(folder).map_err(Failure::attempted(format!("making {}", folder.display())))?;
        let line = serde_json::json!(self.header);
        fs::write(&self.path, format!("{line}\n"))
            .map_err(Failure::attempted(format!("writing {}", self.path.display())))
    }

    /// The stored records of an experiment.
    pub fn read(results: &Path, name: &str) -> Result<Option<Records>, Failure> {
        let path = file(results, name);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(Failure::attempted(format!("reading {}", path.display())))?,
        };
        let wrong = |error: serde_json::Error| {
            Failure::Problem(format!("reading {}: {error}; remove it, or run with --again", path.display()))
        };
        // A line that was incomplete when the machine stopped does not count.
        let end = text.rfind('\n').map_or(0, |at| at + 1);
        let mut lines = text[..end].lines();
        let Some(first) = lines.next() else { return Ok(None) };
        let header = serde_json::from_str(first).map_err(wrong)?;
        let mut points = Vec::new();
        for line in lines {
            replace(&mut points, serde_json::from_str(line).map_err(wrong)?);
        }
        Ok(Some(Records { path, header, points }))
    }

    pub fn has(&self, variant: &str, x: f64, round: usize) -> bool {
        self.points.iter().any(|point| point.is(variant, x) && point.round == round)
    }

    /// Adds a point, in place of an older one of the same round.
    pub fn add(&mut self, point: Point) -> Result<(), Failure> {
        if self.points.is_empty() {
            self.begin()?;
        }
        let line = format!("{}\n", serde_json::json!(point));
        let file = File::options().append(true).open(&self.path);
        let added = file.and_then(|mut file| file.write_all(line.as_bytes()));
        added.map_err(Failure::attempted(format!("adding to {}", self.path.display())))?;
        replace(&mut self.points, point);
        Ok(())
    }

    /// The mean of a value over the rounds of a point, in another unit.
    pub fn mean(&self, variant: &str, x: f64, key: &str, unit: f64) -> Option<Mean> {
        let rounds = self.points.iter().filter(|point| point.is(variant, x));
        let values: Vec<f64> = rounds.filter_map(|point| point.values.get(key)).map(|value| value / unit).collect();
        Mean::of(&values)
    }

    /// The mean of a value without Puma, for comparisons; NaN if it was not measured.
    pub fn baseline(&self, variant: &str, key: &str) -> f64 {
        self.mean(variant, 0.0, key, 1.0).map_or(f64::NAN, |mean| mean.mean)
    }

    /// A value of one point over that of another.
    pub fn over(&self, key: &str, (variant, x): (&str, f64), (floor, floor_x): (&str, f64)) -> Option<Mean> {
        Some(self.mean(variant, x, key, 1.0)?.over(self.mean(floor, floor_x, key, 1.0)?))
    }

    /// The sizes at which a variant was measured, in ascending order.
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

/// A case that was interrupted between two rounds is measured from its first one again.
fn replace(points: &mut Vec<Point>, point: Point) {
    points.retain(|other| !(other.is(&point.variant, point.x) && other.round == point.round));
    points.push(point);
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
    fn what_may_be_either_is_not_decided() {
        let ratio = Mean { mean: 30.0, off: 3.0 }.over(Mean { mean: 10.0, off: 1.0 });
        assert!((ratio.mean - 3.0).abs() < 1e-9 && (ratio.off - 3.0 * 0.02f64.sqrt()).abs() < 1e-9, "{ratio:?}");
        assert_eq!([2.5, 2.9, 3.6].map(|wanted| ratio.is_at_least(wanted)), [Some(true), None, Some(false)]);
        assert_eq!([2.5, 2.9, 3.6].map(|wanted| ratio.is_at_most(wanted)), [Some(false), None, Some(true)]);
        let once = Mean::of(&[5.0]).unwrap();
        assert_eq!((once.is_at_least(1.0), once.over(ratio).is_at_most(100.0)), (None, None));
    }

    #[test]
    fn what_is_kept_is_not_measured_again() {
        let scratch = testbed::Scratch::new("paper-records").unwrap();
        let header = |scale| Header::new(Conditions::now("a disk".to_owned()), "quick", scale, 1);
        let open = |scale, again| Records::open(scratch.path(), "x", header(scale), again).unwrap();
        let mut records = open(8.0, false);
        let point = |variant: &str, round, iops| {
            let values = BTreeMap::from([("iops".to_owned(), iops)]);
            Point {
                variant: variant.to_owned(),
                x: 0.0,
                round,
                values,
                revision: "a".to_owned(),
                place: None,
                on_its_own: false,
            }
        };
        records.add(point("baseline", 0, 160.0)).unwrap();
        records.add(point("baseline", 1, 180.0)).unwrap();
        // It ended in the middle of a line.
        File::options().append(true).open(&records.path).unwrap().write_all(b"{\"variant").unwrap();
        let kept = open(8.0, false);
        assert_eq!(kept.points, records.points);
        let mut again = open(8.0, false);
        again.add(point("baseline", 0, 160.0)).unwrap();
        assert_eq!(open(8.0, false).points.len(), 2, "a round counts once");
        assert!(kept.has("baseline", 0.0, 1) && !kept.has("baseline", 0.0, 2) && !kept.has("ideal", 0.0, 0));
        assert_eq!(kept.mean("baseline", 0.0, "iops", 10.0).unwrap().mean, 17.0);
        assert_eq!(kept.xs("baseline"), [0.0]);
        assert!(open(4.0, false).points.is_empty(), "of another scale");
        open(4.0, false).add(point("ideal", 0, 1.0)).unwrap();
        assert_eq!(open(4.0, false).points.len(), 1);
        assert!(open(4.0, true).points.is_empty(), "wanted anew");
        assert_eq!(open(4.0, false).points.len(), 1, "kept until there is something in its place");
        open(4.0, true).add(point("ideal", 1, 1.0)).unwrap();
        assert!(!open(4.0, false).has("ideal", 0.0, 0));
        assert!(Records::read(scratch.path(), "y").unwrap().is_none());
    }
}
