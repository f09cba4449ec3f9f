//! The charts: lines over the varied parameter, each mean with its confidence interval, and the
//! papers' results as marks.

use super::record::{Mean, Records};
use super::{Axis, IDEAL, VARIANTS};
use charts::{GRID, INK, PALE_INK, text};
use std::fmt::Write;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 80.0;
/// The legend is to the right of the plot.
const RIGHT: f64 = 230.0;
const TOP: f64 = 90.0;
const BOTTOM: f64 = 64.0;
/// Room above the highest value, as a share of it, or of a decade.
const AIR: f64 = 0.12;
/// Approximate number of ticks of an axis.
const TICKS: f64 = 6.0;
const ROW: f64 = 24.0;
/// Labels of marks that are nearer to each other are drawn one above the other.
const LABEL_WIDTH: f64 = 120.0;
const LABEL_HEIGHT: f64 = 13.0;
/// Width of a letter, as a share of its height, in a wide font.
const LETTER: f64 = 0.58;
/// Styles of lines in their order, and whether they are dashed.
const STYLES: [(&str, &str); 6] = [
    ("#0b7a75", "none"),
    ("#0b7a75", "7 4"),
    ("#b44d12", "none"),
    ("#b44d12", "7 4"),
    ("#52606d", "2 4"),
    ("#7c5cbf", "none"),
];
const PAPER: &str = "#c81e5b";

/// A chart.
pub struct Chart {
    /// The suffix of its file names, after the experiment's name.
    pub name: &'static str,
    pub title: String,
    pub y_label: &'static str,
    /// Whether the axis is logarithmic.
    pub is_log: bool,
    pub lines: Vec<Line>,
    /// The papers' results.
    pub marks: Vec<Mark>,
}

/// A measured line.
pub struct Line {
    pub name: String,
    /// By the varied parameter.
    pub points: Vec<(f64, Mean)>,
}

impl Line {
    /// A value of a variant, over `unit`.
    pub fn of(records: &Records, variant: &str, key: &str, unit: f64) -> Line {
        let xs = records.xs(variant).into_iter();
        let points = xs.filter_map(|x| Some((x, records.mean(variant, x, key, unit)?))).collect();
        Line { name: variant.to_owned(), points }
    }

    /// A value of each variant with Puma, over `unit`.
    pub fn of_variants(records: &Records, key: &str, unit: f64) -> Vec<Line> {
        VARIANTS.iter().map(|(variant, _)| Line::of(records, variant, key, unit)).collect()
    }

    /// A value of each variant with Puma, and the value with all memory local, which no lender
    /// changes.
    pub fn of_all(records: &Records, key: &str, unit: f64) -> Vec<Line> {
        let mut lines = Line::of_variants(records, key, unit);
        let widest = lines.iter().flat_map(|line| &line.points).map(|(size, _)| *size).fold(0.0, f64::max);
        if let Some(ideal) = records.mean(IDEAL, 0.0, key, unit) {
            lines.push(Line { name: "all memory local".to_owned(), points: vec![(0.0, ideal), (widest, ideal)] });
        }
        lines
    }
}

/// A figure of the papers.
pub struct Mark {
    pub x: f64,
    pub value: f64,
    pub label: &'static str,
}

/// Maps values to places.
struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
    from: f64,
    to: f64,
}

impl Scale {
    fn at(&self, value: f64) -> f64 {
        let share = match self.is_log {
            true => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        };
        self.from + share * (self.to - self.from)
    }

    /// Values with a line across the chart.
    fn ticks(&self) -> Vec<f64> {
        if self.is_log {
            let first = self.low.log10().floor() as i32;
            let decades = (first..).take_while(|decade| 10f64.powi(*decade) <= self.high);
            let steps = decades.flat_map(|decade| [1.0, 2.0, 5.0].map(|step| step * 10f64.powi(decade)));
            return steps.filter(|value| (self.low..=self.high).contains(value)).collect();
        }
        let rough = (self.high - self.low) / TICKS;
        let decade = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|step| step * decade).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        (0..).map(|nth| nth as f64 * step).take_while(|value| *value <= self.high).collect()
    }
}

/// The height of letters for so many in that room, at most `most`.
fn height(most: f64, room: f64, words: &str) -> f64 {
    most.min((room / (LETTER * words.chars().count() as f64) * 10.0).floor() / 10.0)
}

/// A tick as text, without rounding errors of additions.
fn label(value: f64) -> String {
    format!("{}", (value * 1e6).round() / 1e6)
}

impl Chart {
    /// Draws it as SVG. `below_title` describes the conditions.
    pub fn draw(&self, below_title: &str, axis: &Axis) -> String {
        let means = || self.lines.iter().flat_map(|line| &line.points);
        let finite = |mean: &Mean| if mean.off.is_finite() { mean.off } else { 0.0 };
        let marks = || self.marks.iter().map(|mark| mark.value);
        let high = means().map(|(_, mean)| mean.mean + finite(mean)).chain(marks()).fold(0.0, f64::max);
        let lowest = means().map(|(_, mean)| mean.mean).chain(marks()).filter(|value| *value > 0.0);
        let low = lowest.fold(1.0, f64::min);
        let widest = means().map(|(x, _)| *x).chain(self.marks.iter().map(|mark| mark.x)).fold(1.0, f64::max);
        let (low, high) = if self.is_log { (low * 0.8, high * 10f64.powf(AIR)) } else { (0.0, high * (1.0 + AIR)) };
        let y = Scale { low, high: high.max(low * 2.0 + 0.1), is_log: self.is_log, from: HEIGHT - BOTTOM, to: TOP };
        let least = means().map(|(x, _)| *x).filter(|x| *x > 0.0).fold(widest, f64::min);
        // Lines of one point each are drawn side by side.
        let are_points = self.marks.is_empty() && self.lines.iter().all(|line| line.points.len() == 1);
        let (first, last) = match (are_points, axis.is_log) {
            (true, _) => (0.5, self.lines.len() as f64 + 0.5),
            (false, true) => (least * 0.7, widest * 1.4),
            (false, false) => (0.0, widest * 1.04),
        };
        let is_log = axis.is_log && !are_points;
        let x = Scale { low: first, high: last, is_log, from: LEFT, to: WIDTH - RIGHT };

        let mut svg = charts::begin(WIDTH, HEIGHT);
        let room = WIDTH - 2.0 * 24.0;
        text(&mut svg, 24.0, 36.0, height(20.0, room, &self.title), INK, "start", true, &self.title);
        text(&mut svg, 24.0, 58.0, height(12.0, room, below_title), PALE_INK, "start", false, below_title);
        text(&mut svg, LEFT, TOP - 10.0, 12.0, PALE_INK, "start", false, self.y_label);
        let middle = (x.from + x.to) / 2.0;
        let of_points = means().next().filter(|_| are_points).map(|(x, _)| format!("{}: {}", axis.name, label(*x)));
        text(
            &mut svg,
            middle,
            HEIGHT - 18.0,
            13.0,
            PALE_INK,
            "middle",
            false,
            of_points.as_deref().unwrap_or(axis.name),
        );
        for value in y.ticks() {
            let at = y.at(value);
            line(&mut svg, (x.from, at), (x.to, at), GRID, 1.0, "none");
            text(&mut svg, LEFT - 8.0, at + 4.0, 12.0, PALE_INK, "end", false, &label(value));
        }
        for value in x.ticks().into_iter().filter(|_| !are_points) {
            text(&mut svg, x.at(value), HEIGHT - BOTTOM + 18.0, 12.0, PALE_INK, "middle", false, &label(value));
        }
        let mut row = TOP;
        for (nth, (drawn, (colour, dashes))) in self.lines.iter().zip(STYLES.iter().cycle()).enumerate() {
            let place = |size: f64| if are_points { nth as f64 + 1.0 } else { size };
            let at = |(size, mean): &(f64, Mean)| (x.at(place(*size)), y.at(mean.mean));
            let points: Vec<String> = drawn.points.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let points = points.join(" ");
            let _infallible = write!(
                svg,
                r#"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>"#
            );
            for point in &drawn.points {
                let ((at_x, at_y), off) = (at(point), finite(&point.1));
                line(&mut svg, (at_x, y.at(point.1.mean - off)), (at_x, y.at(point.1.mean + off)), colour, 1.2, "none");
                let _infallible = write!(svg, r#"<circle cx="{at_x:.1}" cy="{at_y:.1}" r="3.5" fill="{colour}"/>"#);
            }
            if are_points {
                let (column, name) = ((x.to - x.from) / self.lines.len() as f64 - 10.0, &drawn.name);
                let below = HEIGHT - BOTTOM + 18.0;
                text(&mut svg, x.at(nth as f64 + 1.0), below, height(12.0, column, name), INK, "middle", false, name);
                continue;
            }
            let legend = WIDTH - RIGHT + 20.0;
            line(&mut svg, (legend, row), (legend + 26.0, row), colour, 2.0, dashes);
            let (left, name) = (legend + 34.0, &drawn.name);
            text(&mut svg, left, row + 4.0, height(12.0, WIDTH - left - 8.0, name), INK, "start", false, name);
            row += ROW;
        }
        let marks: Vec<(f64, f64)> = self.marks.iter().map(|mark| (x.at(mark.x), y.at(mark.value))).collect();
        for ((mark, (at_x, at_y)), label_y) in self.marks.iter().zip(&marks).zip(apart(&marks)) {
            diamond(&mut svg, *at_x, *at_y);
            text(&mut svg, at_x - 10.0, label_y + 4.0, 11.0, PAPER, "end", false, mark.label);
        }
        if !self.marks.is_empty() {
            let legend = WIDTH - RIGHT + 20.0;
            diamond(&mut svg, legend + 13.0, row);
            text(&mut svg, legend + 34.0, row + 4.0, 12.0, INK, "start", false, "the paper's figures");
        }
        svg.push_str("</svg>\n");
        svg
    }
}

/// Heights of the labels of marks: those of the marks, or higher if two would overlap.
fn apart(marks: &[(f64, f64)]) -> Vec<f64> {
    let mut labels: Vec<f64> = marks.iter().map(|(_, y)| *y).collect();
    let mut from_below: Vec<usize> = (0..marks.len()).collect();
    from_below.sort_by(|one, other| marks[*other].1.total_cmp(&marks[*one].1));
    for (nth, &at) in from_below.iter().enumerate() {
        let is_beside = |other: &&usize| (marks[**other].0 - marks[at].0).abs() < LABEL_WIDTH;
        let below = from_below[..nth].iter().filter(is_beside).map(|other| labels[*other]);
        labels[at] = labels[at].min(below.fold(f64::INFINITY, f64::min) - LABEL_HEIGHT);
    }
    labels
}

fn line(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), stroke: &str, width: f64, dashes: &str) {
    let _infallible = write!(
        svg,
        r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{stroke}" stroke-width="{width}" stroke-dasharray="{dashes}"/>"#
    );
}

fn diamond(svg: &mut String, x: f64, y: f64) {
    let (left, right, up, down) = (x - 6.0, x + 6.0, y - 6.0, y + 6.0);
    let _infallible = write!(
        svg,
        r#"<path d="M{left:.1} {y:.1}L{x:.1} {up:.1}L{right:.1} {y:.1}L{x:.1} {down:.1}Z" fill="white" stroke="{PAPER}" stroke-width="2"/>"#
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_where_they_belong() {
        let linear = Scale { low: 0.0, high: 5.6, is_log: false, from: 100.0, to: 0.0 };
        assert_eq!(linear.ticks(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!([0.1 + 0.2, 0.5, 50.0].map(label), ["0.3", "0.5", "50"]);
        assert_eq!((linear.at(0.0), linear.at(2.8), linear.at(5.6)), (100.0, 50.0, 0.0));
        let log = Scale { low: 0.8, high: 125.0, is_log: true, from: 0.0, to: 100.0 };
        assert_eq!(log.ticks(), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert!((log.at(10.0) - 50.0).abs() < 1e-9 && log.at(0.0) == 0.0);
    }

    #[test]
    fn labels_are_not_drawn_over_each_other() {
        assert_eq!(apart(&[(500.0, 100.0), (500.0, 104.0), (500.0, 40.0), (100.0, 103.0)]), [91.0, 104.0, 40.0, 103.0]);
        assert_eq!(apart(&[(500.0, 100.0), (500.0, 100.0), (510.0, 95.0)]), [100.0, 87.0, 74.0]);
    }

    #[test]
    fn a_chart_has_its_lines_and_marks() {
        let mean = |mean| Mean { mean, off: 0.5 };
        let chart = Chart {
            name: "x",
            title: "A title".to_owned(),
            y_label: "times",
            is_log: true,
            lines: vec![
                Line { name: "one".to_owned(), points: vec![(0.5, mean(1.0)), (5.0, mean(40.0))] },
                Line { name: "two".to_owned(), points: vec![(5.0, Mean { mean: 2.0, off: f64::INFINITY })] },
            ],
            marks: vec![Mark { x: 4.0, value: 35.0, label: "35 ×" }],
        };
        let svg = chart.draw("of it", &super::super::LENT);
        assert!(svg.contains("A title") && svg.contains("35 ×") && !svg.contains("inf") && !svg.contains("NaN"));
        assert_eq!((svg.matches("<circle").count(), svg.matches("<path").count()), (3, 2));
    }

    #[test]
    fn single_points_stand_side_by_side() {
        let line = |name: &str| Line { name: name.to_owned(), points: vec![(0.0, Mean { mean: 1.0, off: 0.1 })] };
        let chart = Chart {
            name: "x",
            title: "A title ".repeat(20),
            y_label: "ms",
            is_log: false,
            lines: vec![line("one"), line("two")],
            marks: Vec::new(),
        };
        let svg = chart.draw("of it", &super::super::LENT);
        let middle = (LEFT + WIDTH - RIGHT) / 2.0;
        let quarter = (WIDTH - RIGHT - LEFT) / 4.0;
        for at in [middle - quarter, middle + quarter] {
            assert!(svg.contains(&format!(r#"<circle cx="{at:.1}""#)), "{svg}");
        }
        assert_eq!([&chart.title, "A title"].map(|title| height(20.0, 852.0, title)), [9.1, 20.0]);
    }
}
