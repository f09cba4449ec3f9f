//! The chart.

use crate::report::{Summary, grouped, latency};
use charts::{GRID, INK, PALE_INK, text};
use std::fmt::Write;

const WIDTH: f64 = 1280.0;
const HEIGHT: f64 = 720.0;
/// One for each way, in their order. They also differ in brightness.
const COLOURS: [&str; 3] = ["#9aa5b1", "#0b7a75", "#e0a526"];

/// Draws the chart of a run, as SVG.
pub fn draw(summary: &Summary) -> String {
    let conditions = &summary.conditions;
    let mut svg = charts::begin(WIDTH, HEIGHT);
    let title = match summary.gain {
        Some(gain) if gain >= 1.0 => format!("{} times as many random reads with lent memory", significant(gain)),
        _ => "Random reads with and without lent memory".to_owned(),
    };
    text(&mut svg, 60.0, 62.0, 30.0, INK, "start", true, &title);
    let disk = match conditions.disk_reads_per_s {
        Some(limit) => format!("a disk slowed to {limit} reads/s"),
        None => "a disk at its own speed".to_owned(),
    };
    let setting = format!(
        "4 KiB reads at random by one thread: {} MiB of files, {} MiB of page cache, {disk}",
        conditions.data_bytes.div_ceil(1 << 20),
        conditions.page_cache_bytes >> 20,
    );
    text(&mut svg, 60.0, 94.0, 18.0, PALE_INK, "start", false, &setting);
    reads(&mut svg, summary);
    latencies(&mut svg, summary);
    if conditions.disk_reads_per_s.is_some() {
        let throttle = "Linux slows a disk down by holding reads back for up to a tenth of a second at a time: from the disk, the mean tells, \
                        not the median.";
        text(&mut svg, 60.0, HEIGHT - 44.0, 14.0, PALE_INK, "start", false, throttle);
    }
    let checked = format!(
        "{} wrong bytes among {:.1} GiB compared with the original.  Linux {}, {} processors, {}, seed {}.",
        if summary.wrong_bytes == 0 { "No".to_owned() } else { grouped(summary.wrong_bytes as f64) },
        summary.compared_bytes as f64 / f64::from(1 << 30),
        conditions.kernel,
        conditions.processors,
        conditions.device.as_deref().unwrap_or("no disk of its own"),
        conditions.seed,
    );
    text(&mut svg, 60.0, HEIGHT - 22.0, 14.0, PALE_INK, "start", false, &checked);
    svg.push_str("</svg>\n");
    svg
}

/// The left panel: bars of reads per second.
fn reads(svg: &mut String, summary: &Summary) {
    let (left, right) = (130.0, 690.0);
    text(svg, 60.0, 146.0, 19.0, INK, "start", true, "Reads per second");
    text(svg, right, 146.0, 15.0, PALE_INK, "end", false, "logarithmic; more is better");
    let ways: Vec<_> = summary.ways.named().collect();
    let axis = Axis::over(ways.iter().map(|(_, way)| way.iops));
    axis.draw(svg, left, right);
    let step = (right - left) / ways.len().max(1) as f64;
    for (index, (name, way)) in ways.iter().enumerate() {
        let (middle, width) = (left + step * (index as f64 + 0.5), step * 0.56);
        let top = axis.y(way.iops);
        let _infallible = write!(
            svg,
            r#"<rect x="{:.1}" y="{top:.1}" width="{width:.1}" height="{:.1}" rx="3" fill="{}"/>"#,
            middle - width / 2.0,
            BOTTOM - top,
            colour(name),
        );
        text(svg, middle, top - 10.0, 22.0, INK, "middle", true, &grouped(way.iops));
        text(svg, middle, BOTTOM + 28.0, 17.0, INK, "middle", false, name);
        if let Some(ratio) = way.hit_ratio {
            let note = format!("{} % not from the disk", trimmed(ratio * 100.0));
            text(svg, middle, BOTTOM + 50.0, 13.0, PALE_INK, "middle", false, &note);
        }
    }
}

/// The right panel: for each way a line from the median latency to the one that a read in a hundred
/// exceeds.
fn latencies(svg: &mut String, summary: &Summary) {
    let (left, right) = (840.0, 1220.0);
    text(svg, 770.0, 146.0, 19.0, INK, "start", true, "Latency of a read, µs");
    text(svg, right, 146.0, 15.0, PALE_INK, "end", false, "less is better");
    let ways: Vec<_> = summary.ways.named().collect();
    let axis = Axis::over(ways.iter().flat_map(|(_, way)| [way.p50_us, way.mean_us, way.p99_us]));
    axis.draw(svg, left, right);
    let step = (right - left) / ways.len().max(1) as f64;
    for (index, (name, way)) in ways.iter().enumerate() {
        let x = left + step * (index as f64 + 0.36);
        let colour = colour(name);
        let (median, mean, tail) = (axis.y(way.p50_us), axis.y(way.mean_us), axis.y(way.p99_us));
        let _infallible = write!(
            svg,
            r#"<line x1="{x:.1}" y1="{median:.1}" x2="{x:.1}" y2="{tail:.1}" stroke="{colour}" stroke-width="5"/><line x1="{:.1}" y1="{mean:.1}" x2="{:.1}" y2="{mean:.1}" stroke="{colour}" stroke-width="5"/><circle cx="{x:.1}" cy="{median:.1}" r="9" fill="{colour}"/><circle cx="{x:.1}" cy="{tail:.1}" r="8" fill="white" stroke="{colour}" stroke-width="4"/>"#,
            x - 11.0,
            x + 11.0,
        );
        // Labels of points that lie close together are kept apart.
        let mut labels = [(way.p50_us, true), (way.mean_us, false), (way.p99_us, false)];
        labels.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        let places = spread(labels.map(|(value, _)| axis.y(value)), LABEL_GAP);
        for (y, (value, bold)) in places.into_iter().zip(labels) {
            text(svg, x + 18.0, y + 5.5, 15.0, if bold { INK } else { PALE_INK }, "start", bold, &latency(value));
        }
        text(svg, left + step * (index as f64 + 0.5), BOTTOM + 28.0, 17.0, INK, "middle", false, name);
    }
    let y = BOTTOM + 46.0;
    let (first, second, third) = (left + 10.0, left + 110.0, left + 200.0);
    let _infallible = write!(
        svg,
        r#"<circle cx="{first}" cy="{y}" r="6" fill="{PALE_INK}"/><line x1="{}" y1="{y}" x2="{}" y2="{y}" stroke="{PALE_INK}" stroke-width="4"/><circle cx="{third}" cy="{y}" r="5" fill="white" stroke="{PALE_INK}" stroke-width="3"/>"#,
        second - 8.0,
        second + 8.0,
    );
    for (x, name) in [(first, "median"), (second, "mean"), (third, "99th percentile")] {
        text(svg, x + 14.0, y + 5.0, 14.0, PALE_INK, "start", false, name);
    }
}

/// Moves overlapping labels apart, around the middle one. They come in order from the lowest one
/// up, with falling coordinates.
fn spread(wanted: [f64; 3], gap: f64) -> [f64; 3] {
    let [mut low, middle, mut high] = wanted;
    low = low.max(middle + gap);
    high = high.min(middle - gap);
    [low, middle, high]
}

/// Between the base lines of two labels.
const LABEL_GAP: f64 = 19.0;
const TOP: f64 = 184.0;
const BOTTOM: f64 = 588.0;

/// Room between the lowest value and the axis, in powers of ten.
const MARGIN: f64 = 0.1;

/// A logarithmic axis from one power of ten to another.
struct Axis {
    low: i32,
    high: i32,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>) -> Axis {
        let logs: Vec<f64> = values.filter(|value| *value > 0.0).map(f64::log10).collect();
        let low = logs.iter().copied().fold(f64::INFINITY, f64::min);
        let high = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if logs.is_empty() {
            return Axis { low: 0, high: 1 };
        }
        // Points at the very edge would sit on the axis line.
        let low = (low - MARGIN).floor() as i32;
        Axis { low, high: (high.ceil() as i32).max(low + 1) }
    }

    fn y(&self, value: f64) -> f64 {
        let share = (value.max(f64::MIN_POSITIVE).log10() - f64::from(self.low)) / f64::from(self.high - self.low);
        BOTTOM - share.clamp(0.0, 1.0) * (BOTTOM - TOP)
    }

    fn draw(&self, svg: &mut String, left: f64, right: f64) {
        for power in self.low..=self.high {
            let value = 10f64.powi(power);
            let y = self.y(value);
            let stroke = if power == self.low { PALE_INK } else { GRID };
            let _infallible = write!(
                svg,
                r#"<line x1="{left}" y1="{y:.1}" x2="{right}" y2="{y:.1}" stroke="{stroke}" stroke-width="1.5"/>"#
            );
            let label = if value < 1.0 { format!("{value}") } else { grouped(value) };
            text(svg, left - 10.0, y + 5.0, 14.0, PALE_INK, "end", false, &label);
        }
    }
}

fn colour(way: &str) -> &'static str {
    COLOURS[match way {
        "without Puma" => 0,
        "with Puma" => 1,
        _ => 2,
    }]
}

/// Two digits, or all before the point.
fn significant(number: f64) -> String {
    if number < 10.0 { format!("{number:.1}") } else { grouped(number) }
}

/// A percentage that is shown as 100 only if it is.
fn trimmed(percent: f64) -> String {
    if percent >= 100.0 { "100".to_owned() } else { format!("{:.1}", (percent * 10.0).floor() / 10.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Measured;
    use crate::report::{Conditions, Ways};

    #[test]
    fn axes_span_the_values() {
        let axis = Axis::over([667.0, 31_000.0].into_iter());
        assert_eq!((axis.low, axis.high), (2, 5));
        assert!(axis.y(667.0) > axis.y(31_000.0));
        assert_eq!((axis.y(100.0), axis.y(100_000.0)), (BOTTOM, TOP));
        let axis = Axis::over([1000.0].into_iter());
        assert_eq!((axis.low, axis.high), (2, 3));
        let axis = Axis::over(std::iter::empty());
        assert!(axis.y(0.0).is_finite());
    }

    #[test]
    fn labels_keep_apart_and_in_order() {
        assert_eq!(spread([500.0, 300.0, 100.0], 20.0), [500.0, 300.0, 100.0]);
        assert_eq!(spread([305.0, 300.0, 299.0], 20.0), [320.0, 300.0, 280.0]);
    }

    #[test]
    fn a_chart_is_drawn() {
        let way = |iops: f64, ratio: f64, p50_us: f64, p99_us: f64| Measured {
            iops,
            hit_ratio: Some(ratio),
            mean_us: 1e6 / iops,
            p50_us,
            p99_us,
            ..Measured::default()
        };
        let ways = Ways {
            baseline: way(667.0, 0.25, 76.0, 94_437.0),
            puma: Some(way(31_400.0, 0.9993, 33.0, 64.0)),
            ideal: way(474_298.0, 1.0, 1.2, 2.2),
        };
        let conditions = Conditions {
            data_bytes: 256 << 20,
            page_cache_bytes: 64 << 20,
            disk_reads_per_s: Some(500),
            kernel: "6.1 <&>".to_owned(),
            ..Conditions::default()
        };
        let summary = Summary::new(ways, conditions, Vec::new());
        let drawing = draw(&summary);
        for part in ["47 times as many", "31,400", "99.9 % not from the disk", "No wrong bytes", "6.1 &lt;&amp;>"] {
            assert!(drawing.contains(part), "{part}");
        }
    }

    #[test]
    fn a_hundred_percent_is_never_rounded_up_to() {
        assert_eq!([trimmed(99.99), trimmed(100.0), trimmed(25.04)], ["99.9", "100", "25.0"]);
    }
}
