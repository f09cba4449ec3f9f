//! The history of measurements: a line of JSON for each run of all benches, and a chart of them.
//!
//! A line contains the time, the revision, the machine, and every figure that is a number. Lines
//! are only ever added.

use crate::figures::Conditions;
use charts::{GRID, INK, PALE_INK, text};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use testbed::Failure;

/// The file of the lines.
const LINES_FILE: &str = "history.jsonl";
/// The file of the chart.
const SVG_FILE: &str = "history.svg";
const PNG_FILE: &str = "history.png";

/// The bound of a figure.
#[derive(Clone, Copy)]
enum Wanted {
    Least(f64),
    Most(f64),
}

use Wanted::{Least, Most};

impl Wanted {
    fn bound(self) -> f64 {
        match self {
            Least(bound) | Most(bound) => bound,
        }
    }

    fn holds(self, value: f64) -> bool {
        match self {
            Least(bound) => value >= bound,
            Most(bound) => value <= bound,
        }
    }
}

/// The figures of the chart: bench, key, bound, and aim.
const AIMS: [(&str, &str, Wanted, f64); 22] = [
    ("hit-latency", "ratio_p50", Most(1.35), 1.1),
    ("hit-latency", "sealed_ratio_p50", Most(1.5), 1.2),
    ("hit-throughput", "ratio_4k", Least(0.6), 0.8),
    ("hit-throughput", "gibps_256k_1", Least(1.0), 2.0),
    ("page-server", "get_ratio", Least(1.1), 2.0),
    ("page-server", "batch_get_ratio", Least(2.0), 4.0),
    ("page-server", "batch_put_ratio", Least(2.0), 4.0),
    ("cached-read", "read_ratio", Least(0.97), 1.0),
    ("cached-read", "mmap_ratio", Least(0.97), 1.0),
    ("bypass", "ratio", Least(0.95), 1.0),
    ("metadata", "native_ratio", Least(0.4), 0.7),
    ("metadata", "best_peer_ratio", Least(1.5), 3.0),
    ("tap", "ns_per_page", Most(1500.0), 500.0),
    ("tap", "drop_fraction", Most(0.01), 0.0),
    ("footprint", "borrower_bytes_per_page", Most(10.0), 8.5),
    ("footprint", "lender_bytes_per_page", Most(32.0), 20.0),
    ("reclaim", "mean_ratio", Most(1.1), 1.02),
    ("reclaim", "p99_ratio", Most(1.1), 1.02),
    ("never-slower", "min_ratio", Least(0.95), 1.0),
    ("sequential", "ratio", Least(0.98), 1.0),
    ("neighbours", "read_ratio", Least(0.8), 1.0),
    ("neighbours", "look_ratio", Least(0.8), 1.0),
];

/// The maximum number of runs in the chart: the newest.
const RUNS_MAX: usize = 24;
const COLUMNS: usize = 5;
const PANEL_WIDTH: f64 = 250.0;
const PANEL_HEIGHT: f64 = 170.0;
/// Around the curve in its panel.
const PANEL_TOP: f64 = 52.0;
const PANEL_MARGIN: f64 = 14.0;
const HEAD_HEIGHT: f64 = 84.0;
const MARGIN: f64 = 30.0;
/// Room above the highest value, as a share of it.
const AIR: f64 = 0.15;
const GOOD: &str = "#0b7a75";
const BAD: &str = "#b44d12";

/// The figures of a run, by bench.
pub fn line(
    conditions: &Conditions,
    extent: &str,
    seed: u64,
    figures: &Map<String, Value>,
    not_run: &Map<String, Value>,
) -> Value {
    let numbers = |figures: &Value| {
        let figures = figures.as_object().into_iter().flatten();
        // Bounds are in the sources.
        let kept = figures.filter(|(key, value)| value.is_number() && !key.ends_with("_wanted"));
        kept.map(|(key, value)| (key.clone(), value.clone())).collect::<Map<_, _>>()
    };
    let figures: Map<String, Value> =
        figures.iter().map(|(bench, figures)| (bench.clone(), numbers(figures).into())).collect();
    json!({"conditions": conditions, "extent": extent, "seed": seed, "figures": figures, "not_run": not_run})
}

/// Adds a line to the history in that directory, and draws its chart anew.
pub fn add(directory: &Path, line: &Value) -> Result<(), Failure> {
    fs::create_dir_all(directory).map_err(Failure::attempted(format!("making {}", directory.display())))?;
    let path = directory.join(LINES_FILE);
    let added = File::options().create(true).append(true).open(&path).and_then(|mut file| writeln!(file, "{line}"));
    added.map_err(Failure::attempted(format!("adding to {}", path.display())))?;
    let text = fs::read_to_string(&path).map_err(Failure::attempted(format!("reading {}", path.display())))?;
    let runs: Result<Vec<Value>, _> = text.lines().map(serde_json::from_str).collect();
    let runs = runs.map_err(|error| Failure::Problem(format!("reading {}: {error}", path.display())))?;
    let svg = draw(&runs);
    let svg_path = directory.join(SVG_FILE);
    fs::write(&svg_path, &svg).map_err(Failure::attempted(format!("writing {}", svg_path.display())))?;
    if !charts::render(&svg, &directory.join(PNG_FILE)).map_err(Failure::Problem)? {
        println!("There is no font here to draw the chart as PNG with.");
    }
    println!("Added to {}; chart in {}", path.display(), svg_path.display());
    Ok(())
}

/// A panel for each figure: its values, run by run, and the bound.
fn draw(runs: &[Value]) -> String {
    let runs = &runs[runs.len().saturating_sub(RUNS_MAX)..];
    let rows = AIMS.len().div_ceil(COLUMNS);
    let (width, height) =
        (2.0 * MARGIN + COLUMNS as f64 * PANEL_WIDTH, HEAD_HEIGHT + MARGIN + rows as f64 * PANEL_HEIGHT);
    let mut svg = charts::begin(width, height);
    text(
        &mut svg,
        MARGIN,
        40.0,
        24.0,
        INK,
        "start",
        true,
        "Figures against their floors and peers, revision by revision",
    );
    let newest = runs.last().unwrap_or(&Value::Null);
    let conditions = &newest["conditions"];
    let say = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let head = format!(
        "{} runs; the newest: {} of {}, {}, Linux {}, {} × {}, {} GiB. Dashed: what must hold; dotted: where we want to end. Rings: less was measured.",
        runs.len(),
        say(&conditions["revision"]),
        say(&conditions["date"]),
        say(&newest["extent"]),
        say(&conditions["kernel"]),
        conditions["processors"],
        say(&conditions["processor"]),
        conditions["memory_bytes"].as_u64().unwrap_or(0).div_ceil(1 << 30),
    );
    text(&mut svg, MARGIN, 64.0, 13.0, PALE_INK, "start", false, &head);
    for (index, aim) in AIMS.iter().enumerate() {
        let left = MARGIN + (index % COLUMNS) as f64 * PANEL_WIDTH;
        let top = HEAD_HEIGHT + (index / COLUMNS) as f64 * PANEL_HEIGHT;
        panel(&mut svg, left, top, aim, runs);
    }
    svg.push_str("</svg>\n");
    svg
}

fn panel(svg: &mut String, left: f64, top: f64, aim: &(&str, &str, Wanted, f64), runs: &[Value]) {
    let (bench, key, wanted, end) = *aim;
    let values: Vec<Option<f64>> = runs.iter().map(|run| run["figures"][bench][key].as_f64()).collect();
    let newest = values.last().copied().flatten();
    text(svg, left, top + 16.0, 13.0, INK, "start", true, key);
    text(svg, left, top + 32.0, 11.0, PALE_INK, "start", false, bench);
    let (said, colour) = match newest {
        Some(value) => (format!("{value:.2}"), if wanted.holds(value) { GOOD } else { BAD }),
        None => ("not run".to_owned(), PALE_INK),
    };
    text(svg, left + PANEL_WIDTH - 2.0 * PANEL_MARGIN, top + 38.0, 17.0, colour, "end", true, &said);
    let high = values.iter().flatten().copied().chain([wanted.bound(), end]).fold(0.0, f64::max) * (1.0 + AIR);
    let (plot_top, bottom) = (top + PANEL_TOP, top + PANEL_HEIGHT - PANEL_MARGIN);
    let y = |value: f64| bottom - value / high * (bottom - plot_top);
    let right = left + PANEL_WIDTH - 2.0 * PANEL_MARGIN;
    for (value, stroke, dashes) in [(0.0, GRID, "none"), (wanted.bound(), PALE_INK, "6 4"), (end, PALE_INK, "1 4")] {
        let y = y(value);
        let _infallible = write!(
            svg,
            r#"<line x1="{left}" y1="{y:.1}" x2="{right}" y2="{y:.1}" stroke="{stroke}" stroke-width="1.2" stroke-dasharray="{dashes}"/>"#
        );
    }
    let step = (right - left) / runs.len().max(1) as f64;
    let points: Vec<(f64, f64, bool)> = values
        .iter()
        .zip(runs)
        .enumerate()
        .filter_map(|(index, (value, run))| {
            Some((left + step * (index as f64 + 0.5), y((*value)?), run["extent"] == "whole"))
        })
        .collect();
    let line: Vec<String> = points.iter().map(|(x, y, _)| format!("{x:.1},{y:.1}")).collect();
    let _infallible =
        write!(svg, r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#, line.join(" "));
    for (x, y, whole) in points {
        let fill = if whole { colour } else { "white" };
        let _infallible =
            write!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2"/>"#);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testbed::Scratch;

    #[test]
    fn lines_are_added_and_drawn() {
        let scratch = Scratch::new("bench-history").unwrap();
        let conditions = Conditions::now("a disk".to_owned());
        let figures = |ratio: f64| {
            let value = json!({"bypass": {"ratio": ratio, "ratio_wanted": 0.95, "rounds": {"median": 1}}});
            value.as_object().unwrap().clone()
        };
        for ratio in [0.71, 0.97] {
            let not_run = json!({"tap": "no BPF"}).as_object().unwrap().clone();
            add(scratch.path(), &line(&conditions, "quick", 7, &figures(ratio), &not_run)).unwrap();
        }
        let text = fs::read_to_string(scratch.path().join(LINES_FILE)).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1]["figures"]["bypass"], json!({"ratio": 0.97}));
        assert_eq!(lines[1]["not_run"]["tap"], "no BPF");
        assert!(lines[1]["conditions"]["kernel"].is_string() && lines[1]["conditions"]["date"].is_string());
        let svg = fs::read_to_string(scratch.path().join(SVG_FILE)).unwrap();
        assert!(svg.contains("0.97") && svg.contains(GOOD) && svg.contains("not run"));
        assert_eq!(svg.matches("<circle").count(), 2);
    }

    #[test]
    fn every_figure_of_the_chart_is_one_of_a_bench() {
        for (bench, ..) in AIMS {
            assert!(crate::BENCHES.iter().any(|known| known.name == bench), "{bench}");
        }
        assert!(Most(1.0).holds(1.0) && !Most(1.0).holds(1.1) && Least(1.0).holds(1.0) && !Least(1.0).holds(0.9));
    }
}
