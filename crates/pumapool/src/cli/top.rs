//! The options of `pumapool top`.

/// Intervals that the keys + and - step through, in seconds.
pub const INTERVALS: [f64; 7] = [0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0];

/// Options of `top`.
#[derive(clap::Args)]
pub struct Options {
    /// Time between two updates, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    pub interval: f64,

    /// Ask the daemons twice, print one screen as text, and exit.
    #[arg(long)]
    pub once: bool,

    /// With --once: size of the screen [default: that of the terminal, or 80x24].
    #[arg(long, value_name = "COLUMNSxLINES", requires = "once", value_parser = size)]
    pub size: Option<(u16, u16)>,
}

impl Options {
    /// Whether the command draws on the whole terminal. Then nothing is logged there.
    pub fn takes_terminal(&self) -> bool {
        !self.once
    }
}

fn interval(text: &str) -> Result<f64, String> {
    let range = INTERVALS[0]..=INTERVALS[INTERVALS.len() - 1];
    let seconds = text.parse().ok().filter(|seconds| range.contains(seconds));
    seconds.ok_or_else(|| format!("write a number from {} to {}", range.start(), range.end()))
}

fn size(text: &str) -> Result<(u16, u16), String> {
    let range = 1..=1000;
    let parsed = text.split_once('x').and_then(|(columns, lines)| Some((columns.parse().ok()?, lines.parse().ok()?)));
    let fits = |(columns, lines): &(u16, u16)| range.contains(columns) && range.contains(lines);
    parsed.filter(fits).ok_or_else(|| "write two numbers up to 1000, such as 80x24".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read() {
        assert_eq!((size("80x24"), interval("0.5")), (Ok((80, 24)), Ok(0.5)));
        for text in ["", "80", "0x5", "80x2000", "x"] {
            assert!(size(text).is_err(), "{text}");
        }
        assert!(["0", "-1", "1e9", "NaN", "x"].iter().all(|text| interval(text).is_err()));
    }
}
