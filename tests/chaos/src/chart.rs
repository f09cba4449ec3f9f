//! The soak's chart, as SVG: each daemon's memory over time, and its descriptors and threads.

use crate::sampling::Sample;
use std::fmt::Write;

const WIDTH: f64 = 1280.0;
const HEIGHT: f64 = 720.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 1230.0;
/// The colours also differ in brightness.
const COLOURS: [&str; 4] = ["#0b7a75", "#52606d", "#e0a526", "#b4532a"];
const INK: &str = "#1f2933";
const PALE_INK: &str = "#52606d";
const GRID: &str = "#e4e7eb";

/// A figure of a sample for one curve.
type Figure = fn(&Sample) -> f64;

/// One panel.
struct Panel {
    title: &'static str,
    top: f64,
    bottom: f64,
    figure: Figure,
}

/// Draws the samples of each daemon, by name. `subtitle` describes their conditions.
pub fn draw(series: &[(String, Vec<Sample>)], subtitle: &str) -> String {
    let mut svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="'DejaVu Sans', sans-serif"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"#
    );
    text(&mut svg, 50.0, 46.0, 26.0, INK, "start", "Soak: what each daemon takes, over time");
    text(&mut svg, 50.0, 74.0, 15.0, PALE_INK, "start", subtitle);
    for (at, (name, _)) in series.iter().enumerate() {
        let x = 50.0 + 290.0 * at as f64;
        let colour = COLOURS[at % COLOURS.len()];
        let _infallible = write!(svg, r#"<rect x="{x}" y="94" width="26" height="6" fill="{colour}"/>"#);
        text(&mut svg, x + 34.0, 102.0, 15.0, INK, "start", name);
    }
    let end_s = series.iter().flat_map(|(_, samples)| samples).map(|sample| sample.at_s).fold(1.0, f64::max);
    for panel in [
        Panel {
            title: "Own memory, MiB (what is lent left out)",
            top: 146.0,
            bottom: 410.0,
            figure: |sample| sample.own_bytes as f64 / f64::from(1 << 20),
        },
        Panel { title: "Open descriptors", top: 470.0, bottom: 560.0, figure: |sample| sample.descriptor_count as f64 },
        Panel { title: "Threads", top: 610.0, bottom: 670.0, figure: |sample| sample.thread_count as f64 },
    ] {
        panel.draw(&mut svg, series, end_s);
    }
    for at in 0..=5 {
        let x = LEFT + (RIGHT - LEFT) * f64::from(at) / 5.0;
        text(&mut svg, x, 696.0, 13.0, PALE_INK, "middle", &format!("{:.0} s", end_s * f64::from(at) / 5.0));
    }
    svg.push_str("</svg>\n");
    svg
}

impl Panel {
    fn draw(&self, svg: &mut String, series: &[(String, Vec<Sample>)], end_s: f64) {
        text(svg, 50.0, self.top - 12.0, 16.0, INK, "start", self.title);
        let all = series.iter().flat_map(|(_, samples)| samples).map(self.figure);
        let highest = nice(all.fold(1.0, f64::max));
        let y = |value: f64| self.bottom - (self.bottom - self.top) * value / highest;
        let lines = if self.bottom - self.top > 150.0 { 4 } else { 2 };
        for line in 0..=lines {
            let value = highest * f64::from(line) / f64::from(lines);
            let at = y(value);
            let _infallible =
                write!(svg, r#"<line x1="{LEFT}" y1="{at:.1}" x2="{RIGHT}" y2="{at:.1}" stroke="{GRID}"/>"#);
            text(svg, LEFT - 10.0, at + 5.0, 13.0, PALE_INK, "end", &format!("{value}"));
        }
        for (at, (_, samples)) in series.iter().enumerate() {
            // One curve for each process: it starts again after a restart.
            for run in samples.chunk_by(|one, next| one.pid == next.pid) {
                let points = run.iter().map(|sample| {
                    format!("{:.1},{:.1}", LEFT + (RIGHT - LEFT) * sample.at_s / end_s, y((self.figure)(sample)))
                });
                let points = points.collect::<Vec<_>>().join(" ");
                let colour = COLOURS[at % COLOURS.len()];
                let _infallible = write!(
                    svg,
                    r#"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>"#
                );
            }
        }
    }
}

/// The next larger round number that divides by four.
fn nice(value: f64) -> f64 {
    let power = 10f64.powf(value.max(1.0).log10().floor());
    let steps = [1.0, 2.0, 4.0, 6.0, 8.0, 10.0];
    let step = steps.into_iter().find(|step| step * power >= value).unwrap_or(10.0);
    (step * power).max(4.0)
}

fn text(svg: &mut String, x: f64, y: f64, size: f64, fill: &str, anchor: &str, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;");
    let _infallible = write!(
        svg,
        r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{content}</text>"#
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_begins_a_new_curve() {
        let sample = |at_s, pid| Sample { at_s, pid, own_bytes: 7 << 20, ..Sample::default() };
        let series = [("lender <x>".to_owned(), vec![sample(0.0, 1), sample(1.0, 1), sample(2.0, 2)])];
        let svg = draw(&series, "a & b");
        assert_eq!(svg.matches("<polyline").count(), 3 * 2);
        assert!(svg.contains("lender &lt;x>") && svg.contains("a &amp; b"));
        assert_eq!([0.0, 3.0, 5.0, 61.0, 900.0].map(nice), [4.0, 4.0, 6.0, 80.0, 1000.0]);
    }
}
