//! Inputs as text: one a line, in hexadecimal, so that the kept ones can be read, compared and
//! merged like any source.
//!
//! A run of equal bytes is written `(41*4096)`. Nothing here depends on the meaning of an input.

use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The maximum length of a target's kept inputs as text, in bytes: all of them together stay small
/// in the repository.
pub const KEPT_TEXT_BYTES_MAX: usize = 12 << 10;

/// The minimum number of equal bytes that are written as a run.
const RUN_MIN: usize = 6;
/// The maximum length of a run when it is read.
const RUN_MAX: usize = 1 << 20;

/// The file of a target's kept inputs.
pub fn kept_path(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(format!("{target}.hex"))
}

/// A target's kept inputs; none if there is no file of them.
///
/// # Errors
/// Fails if the file cannot be read, or a line is no input.
pub fn kept(target: &str) -> anyhow::Result<Vec<Vec<u8>>> {
    let path = kept_path(target);
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(&path)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.starts_with('#'));
    lines
        .map(|(at, line)| parse(line).ok_or_else(|| anyhow::anyhow!("{}:{}: no input", path.display(), at + 1)))
        .collect()
}

/// An input as a line.
pub fn show(input: &[u8]) -> String {
    let mut line = String::new();
    for run in input.chunk_by(|one, next| one == next) {
        // Writing into a string cannot fail.
        let _ = match run.len() {
            RUN_MIN.. => write!(line, "({:02x}*{})", run[0], run.len()),
            _ => run.iter().try_for_each(|byte| write!(line, "{byte:02x}")),
        };
    }
    line
}

/// Parses a line as an input; `None` if it is none.
pub fn parse(line: &str) -> Option<Vec<u8>> {
    let is_byte = |text: &str| text.len() == 2 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    let byte = |text: &str| u8::from_str_radix(text, 16).ok().filter(|_| is_byte(text));
    let (mut input, mut rest) = (Vec::new(), line.trim());
    while !rest.is_empty() {
        match rest.strip_prefix('(') {
            Some(inner) => {
                let (run, behind) = inner.split_once(')')?;
                let (value, count) = run.split_once('*')?;
                let count = count.parse().ok().filter(|count| *count <= RUN_MAX)?;
                input.extend(std::iter::repeat_n(byte(value)?, count));
                rest = behind;
            }
            None => {
                let (value, behind) = rest.split_at_checked(2)?;
                input.push(byte(value)?);
                rest = behind;
            }
        }
    }
    Some(input)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_read_back() {
        for input in [&b""[..], b"a", &[0; 4096], b"ab\0\0\0\0\0\0\0cd", &[7; RUN_MIN - 1]] {
            assert_eq!(parse(&show(input)).as_deref(), Some(input));
        }
        assert_eq!(show(&[0x41; 4096]), "(41*4096)");
        for line in ["4", "4g", "(41*", "(41*9999999999)", "+4", "é"] {
            assert_eq!(parse(line), None, "{line}");
        }
    }
}
