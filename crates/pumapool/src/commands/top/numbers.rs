//! Short forms of numbers and names.

use crate::cli::size;
use crate::commands::top::state::{Point, page_bytes};

/// Shortens a name at its beginning, because its end tells most.
pub(super) fn shortened(name: &str, width: usize) -> String {
    // Control characters must not reach the terminal.
    let clean: String = name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    let count = clean.chars().count();
    if count <= width {
        return clean;
    }
    let tail: String = clean.chars().skip(count + 1 - width.max(1)).collect();
    format!("…{tail}")
}

pub(super) fn percent(point: Point) -> String {
    point.map_or("–".into(), |ratio| format!("{:.1} %", ratio * 100.0))
}

pub(super) fn bytes(point: Point) -> String {
    point.map_or("–".into(), |bytes| size::display(bytes.max(0.0) as u64))
}

/// The size of so many pages.
pub(super) fn pages(count: u64) -> String {
    bytes(Some(page_bytes(count)))
}

/// A time, given in microseconds.
pub(super) fn micros(us: u64) -> String {
    seconds(Some(us as f64 / 1e6))
}

/// A time, given in milliseconds.
pub(super) fn millis(ms: u64) -> String {
    seconds(Some(ms as f64 / 1e3))
}

/// A count.
pub(super) fn number(of: u64) -> String {
    count(Some(of as f64))
}

pub(super) fn seconds(point: Point) -> String {
    match point {
        None => "–".into(),
        Some(seconds) if seconds.is_infinite() => "more".into(),
        Some(seconds) if seconds < 0.999_5e-3 => format!("{:.0} µs", seconds * 1e6),
        Some(seconds) if seconds < 0.999_5 => format!("{:.1} ms", seconds * 1e3),
        Some(seconds) if seconds < 100.0 => format!("{seconds:.1} s"),
        Some(seconds) => format!("{seconds:.0} s"),
    }
}

pub(super) fn count(point: Point) -> String {
    match point {
        None => "–".into(),
        Some(number) if number < 9.95 && number.fract() != 0.0 => format!("{number:.1}"),
        Some(number) if number < 9_999.5 => format!("{number:.0}"),
        Some(number) if number < 999_950.0 => format!("{:.1}k", number / 1e3),
        Some(number) => format!("{:.1}M", number / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (number, wanted) in
            [(0.0, "0"), (0.25, "0.2"), (12.7, "13"), (9999.0, "9999"), (12_345.0, "12.3k"), (2e6, "2.0M")]
        {
            assert_eq!(count(Some(number)), wanted);
        }
        for (number, wanted) in [
            (0.0, "0 µs"),
            (182e-6, "182 µs"),
            (0.9996e-3, "1.0 ms"),
            (1.5, "1.5 s"),
            (1000.0, "1000 s"),
            (f64::INFINITY, "more"),
        ] {
            assert_eq!(seconds(Some(number)), wanted);
        }
        assert_eq!(shortened("/a/long/path", 6), "…/path");
        assert_eq!(shortened("a\x1b[2J", 9), "a?[2J");
    }
}
