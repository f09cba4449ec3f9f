//! Sizes as people write them: `512MiB`, `4G`, `1048576`.

/// Parses a size in bytes. Units are powers of 1024, whichever way they are written.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(format!("{text:?} is no size; write for example 512MiB or 4GiB")),
    };
    let number: u64 = number.parse().map_err(|_| format!("{text:?} is no size; write for example 512MiB or 4GiB"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is more than any machine has"))
}

/// The least that a catalog may have: with less, next to nothing could be lent.
const CATALOG_BYTES_MIN: u64 = 1 << 20;

/// Parses the size of a catalog.
pub fn parse_catalog(text: &str) -> Result<u64, String> {
    match parse(text)? {
        bytes if bytes < CATALOG_BYTES_MIN => {
            Err(format!("write at least {}; 2 MiB are enough for each GiB lent", display(CATALOG_BYTES_MIN)))
        }
        bytes => Ok(bytes),
    }
}

/// Parses how many bytes a second are allowed: so many at the least.
pub fn parse_rate(text: &str, least_bytes: u64) -> Result<u64, String> {
    match parse(text)? {
        bytes if bytes < least_bytes => Err(format!("write at least {} a second", display(least_bytes))),
        bytes => Ok(bytes),
    }
}

/// A size that [`parse`] reads as the same one.
pub fn exact(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fits = |(shift, _): &&(u32, &str)| bytes > 0 && bytes.is_multiple_of(1 << shift);
    units.iter().find(fits).map_or_else(|| bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

/// A size for people to read.
pub fn display(bytes: u64) -> String {
    for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift {
            let value = bytes as f64 / (1u64 << shift) as f64;
            return if value < 10.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") };
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [("0", 0), ("4096", 4096), ("64k", 65536), ("512MiB", 512 << 20), ("4 G", 4 << 30)] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "-1", "1.5G", "4X", "99999999999T"] {
            assert!(parse(text).is_err(), "{text}");
        }
        // Found by fuzzing: the line was two.
        assert!(!parse("99999999999\nT").unwrap_err().contains('\n'));
        assert_eq!((display(512 << 20).as_str(), display(1536).as_str()), ("512 MiB", "1.5 KiB"));
    }
}
