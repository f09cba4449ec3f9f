//! Draws the curve as a picture.

use super::verdict::Findings;
use crate::cli::size;
use charts::{GRID, INK, PALE_INK};
use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 690.0;
const TOP: f64 = 70.0;
const BOTTOM: f64 = 350.0;
/// Colours of the pool's curve, and of the curve of an LRU cache.
const POOL: &str = "#0b7a75";
const LRU: &str = "#e0a526";
/// Number of grid lines in each direction.
const LINES: u32 = 4;

/// Draws the findings as SVG.
pub(super) fn draw(found: &Findings) -> String {
    let mut svg = charts::begin(WIDTH, HEIGHT);
    charts::text(&mut svg, LEFT, 30.0, 16.0, INK, "start", true, "What a pool would answer of the misses");
    let largest = found.curve.last().map_or(1, |size| size.bytes.max(1));
    let x = |bytes: u64| LEFT + (RIGHT - LEFT) * bytes as f64 / largest as f64;
    let y = |share: f64| BOTTOM - (BOTTOM - TOP) * share;
    for nth in 0..=LINES {
        let part = f64::from(nth) / f64::from(LINES);
        let (at_x, at_y) = (LEFT + (RIGHT - LEFT) * part, y(part));
        for (x1, y1, x2, y2) in [(LEFT, at_y, RIGHT, at_y), (at_x, TOP, at_x, BOTTOM)] {
            let _infallible =
                write!(svg, r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{GRID}"/>"#);
        }
        charts::text(&mut svg, LEFT - 8.0, at_y + 4.0, 12.0, PALE_INK, "end", false, &format!("{:.0} %", 100.0 * part));
        let bytes = size::display((largest as f64 * part) as u64);
        charts::text(&mut svg, at_x, BOTTOM + 20.0, 12.0, PALE_INK, "middle", false, &bytes);
    }
    let pool: Vec<_> = found.curve.iter().map(|size| (x(size.bytes), y(size.hit_ratio))).collect();
    let lru: Vec<_> = found.lru_miss_ratio.iter().map(|(bytes, missed)| (x(*bytes), y(1.0 - missed))).collect();
    line(&mut svg, &lru, LRU);
    line(&mut svg, &pool, POOL);
    charts::text(&mut svg, LEFT, 52.0, 12.0, POOL, "start", true, "misses answered, by the size of the pool");
    let other = "all reads, by an LRU cache of that size";
    charts::text(&mut svg, RIGHT, 52.0, 12.0, LRU, "end", true, other);
    let disk = found.disk_us.map_or_else(|| "not known".to_owned(), |us| format!("{us:.0} µs"));
    let below = format!(
        "{} missed in {:.0} s; disk {disk}, pool {:.0} µs{}",
        size::display(found.missed_pages * 4096),
        found.seconds,
        found.pool_us,
        if found.pool_is_measured { "" } else { " (assumed)" },
    );
    charts::text(&mut svg, LEFT, BOTTOM + 48.0, 12.0, INK, "start", false, &below);
    svg.push_str("</svg>\n");
    svg
}

fn line(svg: &mut String, points: &[(f64, f64)], colour: &str) {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _infallible = write!(
        svg,
        r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-linejoin="round"/>"#,
        points.join(" ")
    );
}

#[cfg(test)]
mod tests {
    use super::super::observed::Observed;
    use super::super::verdict::Pool;
    use super::*;
    use tap::{AccessTraceCounters, ReadsSource};

    #[test]
    fn it_is_drawn() {
        let counters = AccessTraceCounters::default();
        let (observed, pool) = (Observed::default(), Pool::assumed());
        let found = Findings::new(&observed, 60.0, ReadsSource::PageCache, counters, None, pool, &[]);
        let svg = draw(&found);
        assert!(svg.contains("(assumed)") && svg.matches("<polyline").count() == 2, "{svg}");
        let file = tempfile::tempdir().unwrap();
        assert!(charts::render(&svg, &file.path().join("curve.png")).is_ok());
    }
}
