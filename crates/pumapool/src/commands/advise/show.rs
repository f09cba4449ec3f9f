//! Prints the findings for people: a table, the curve, and the advice.

use super::verdict::{Advice, Findings, Size};
use crate::cli::size;
use std::fmt::Write;
use std::path::PathBuf;

/// Width of the curve on a terminal of 80 columns, and its height in lines.
const COLUMNS: usize = 64;
const LINES: usize = 8;
/// Eighths of a line.
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

const BOLD: &str = "\x1b[1m";
const GREEN: &str = "\x1b[32m";
const RED: &str = "\x1b[31m";
const YELLOW: &str = "\x1b[33m";
const PLAIN: &str = "\x1b[0m";

/// Returns the whole text.
pub(super) fn text(findings: &Findings, paths: &[PathBuf], colours: bool) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _infallible = write_all(&mut out, findings, paths, colours);
    out
}

/// The directories to mount, each once and quoted for a shell. A file stands for its directory.
fn directories(paths: &[PathBuf]) -> Vec<String> {
    let mut directories: Vec<String> = Vec::new();
    for path in paths {
        let directory = match path.parent() {
            Some(parent) if path.is_file() => parent,
            _ => path,
        };
        // A name without a directory is a file in the working directory.
        let text = if directory.as_os_str().is_empty() { ".".to_owned() } else { directory.display().to_string() };
        let is_plain = |c: char| c.is_alphanumeric() || "/._-+:@%,=".contains(c);
        let quoted = if text.chars().all(is_plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) };
        if !directories.contains(&quoted) {
            directories.push(quoted);
        }
    }
    directories
}

fn write_all(out: &mut String, found: &Findings, paths: &[PathBuf], colours: bool) -> std::fmt::Result {
    let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    let pages = |count: u64| size::display(count.saturating_mul(4096));
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let share = |part: u64, whole: u64| if whole == 0 { "–".to_owned() } else { percent(part as f64 / whole as f64) };
    let coloured = |colour: &str, text: &str| if colours { format!("{colour}{text}{PLAIN}") } else { text.to_owned() };
    writeln!(out, "{}", coloured(BOLD, &format!("{}, watched for {:.0} s", names.join(" "), found.seconds)))?;
    let had = found.page_cache_hit_ratio.map_or_else(|| "–".to_owned(), percent);
    writeln!(out, "  read          {}, of which the page cache had {had}", pages(found.read_pages))?;
    writeln!(
        out,
        "  missed        {}, of which {} in long streams (filtered)",
        pages(found.missed_pages),
        share(found.sequential_pages, found.missed_pages),
    )?;
    if found.written_pages > 0 {
        writeln!(out, "  written anew  {}", pages(found.written_pages))?;
    }
    writeln!(out, "  evicted       {} that have not come back", size::display(found.evicted_bytes))?;
    let disk = match (found.disk_us, found.disk_is_waited) {
        (Some(us), true) => format!("{us:.0} µs a read, as programs waited on average"),
        (Some(us), false) => format!("{us:.0} µs a read, tried past the page cache (median)"),
        (None, _) => "not known: few reads waited for it, and it has no O_DIRECT".to_owned(),
    };
    writeln!(out, "  disk          {disk}")?;
    let pool =
        if found.pool_is_measured { "with the lender that was pinged" } else { "assumed; --lender ADDR measures" };
    writeln!(out, "  pool          {:.0} µs a page, {pool}", found.pool_us)?;
    writeln!(out, "  reads seen by {}", found.reads_seen_by)?;
    if found.mapped_pages > found.read_pages {
        writeln!(out, "  Most reads use mappings, whose hits are not seen: the page cache is better.")?;
    }
    if found.lost_records > 0 {
        writeln!(
            out,
            "  {} records were lost because they came too fast: the figures are too low.",
            found.lost_records
        )?;
    }
    if found.missed_pages > 0 {
        writeln!(out, "\n  pool        misses answered   disk pages saved   a miss takes   waiting saved")?;
        for size in &found.sizes {
            write_size(out, size)?;
        }
        if found.sizes.iter().any(|size| size.seen == 0.0) {
            writeln!(out, "  * more than was evicted while it was watched: by the last misses")?;
        }
        writeln!(out)?;
        write_curve(out, found)?;
    }
    writeln!(out)?;
    match &found.advice {
        Advice::Use { bytes } => {
            let size = size::display(*bytes);
            writeln!(out, "{}: {size} of remote memory", coloured(GREEN, "Use it"))?;
            writeln!(
                out,
                "  on the lender  pumapool lend --listen HOST:PORT --capacity {}MiB --key FILE",
                bytes >> 20
            )?;
            // One command for each directory: with two paths, `mount` would mount the first one
            // over the second.
            for (at, directory) in directories(paths).iter().enumerate() {
                let here = if at == 0 { "here" } else { "" };
                writeln!(out, "  {here:<14} pumapool mount {directory} --lender HOST:PORT --key FILE")?;
            }
            Ok(())
        }
        Advice::DoNot { why } => writeln!(out, "{}: {why}", coloured(RED, "Do not use it here")),
        Advice::Unclear { why } => writeln!(out, "{}: {why}", coloured(YELLOW, "Not clear")),
    }
}

fn write_size(out: &mut String, size: &Size) -> std::fmt::Result {
    let answered = format!("{:.1} %{}", 100.0 * size.hit_ratio, if size.seen == 0.0 { "*" } else { " " });
    let saved = format!("{:.0}/s", size.saved_pages_per_s);
    let takes = size.miss_us.map_or_else(|| "–".to_owned(), |us| format!("{us:.0} µs"));
    let waiting = size.saved_s_per_s.map_or_else(|| "–".to_owned(), |seconds| format!("{seconds:.2} s/s"));
    writeln!(out, "  {:<11} {answered:>15}   {saved:>16}   {takes:>12}   {waiting:>13}", size::display(size.bytes))
}

/// Draws the share of misses that a pool would answer, against its size.
fn write_curve(out: &mut String, found: &Findings) -> std::fmt::Result {
    let largest = found.curve.last().map_or(0, |size| size.bytes);
    let ratio_at = |column: usize| {
        let bytes = largest as f64 * (column + 1) as f64 / COLUMNS as f64;
        found.curve.iter().rfind(|size| size.bytes as f64 <= bytes * 1.0001).map_or(0.0, |size| size.hit_ratio)
    };
    let eighths: Vec<usize> =
        (0..COLUMNS).map(|column| (ratio_at(column) * (LINES * 8) as f64).round() as usize).collect();
    for line in (0..LINES).rev() {
        let label = match line {
            _ if line == LINES - 1 => "100 %",
            _ if line == LINES / 2 - 1 => " 50 %",
            _ => "",
        };
        let bars: String = eighths.iter().map(|eighths| EIGHTHS[eighths.saturating_sub(line * 8).min(8)]).collect();
        writeln!(out, "  {label:>5} │{}", bars.trim_end())?;
    }
    writeln!(out, "    0 % └{}", "─".repeat(COLUMNS))?;
    let (half, end) = (size::display(largest / 2), size::display(largest));
    writeln!(out, "         0{half:>width$}{end:>rest$}", width = COLUMNS / 2, rest = COLUMNS / 2 - 1)?;
    writeln!(out, "         misses answered, by the size of the pool")
}

#[cfg(test)]
mod tests {
    use super::super::observed::Observed;
    use super::super::verdict::Pool;
    use super::*;
    use tap::{AccessTraceCounters, ReadsSource, Seen, SeenKind};

    #[test]
    fn it_fits_into_80_columns_and_has_no_colours_in_a_pipe() {
        let mut observed = Observed::default();
        for index in (0..4).flat_map(|_| (0..20_000).map(|nth| nth * 5000 % 99_991)) {
            let seen = |kind| Seen { kind, device: 1, inode: 1, index, pages: 1 };
            observed.note(&[seen(SeenKind::Added), seen(SeenKind::Read), seen(SeenKind::Evicted)]);
        }
        let counters = AccessTraceCounters::default();
        let found = Findings::new(&observed, 60.0, ReadsSource::PageCache, counters, None, Pool::assumed(), &[]);
        let plain = text(&found, &["/srv/data".into()], false);
        println!("{plain}");
        assert!(!plain.contains('\x1b') && text(&found, &[], true).contains("\x1b[32mUse it"));
        let table = plain.lines().take_while(|line| !line.starts_with("Use it"));
        assert!(table.filter(|line| line.chars().count() > 80).count() == 0, "{plain}");
        assert!(plain.contains("100 % │") && plain.contains('█'));
        // Each directory is a mount of its own, and a file stands for its directory.
        let file = tempfile::NamedTempFile::new().unwrap();
        let several = text(&found, &["/srv/a".into(), "/srv/it's b".into(), file.path().into()], false);
        let mounts: Vec<&str> =
            several.lines().filter_map(|line| line.split_once("pumapool mount ")).map(|(_, rest)| rest).collect();
        let of = |directory: &str| format!("{directory} --lender HOST:PORT --key FILE");
        let parent = file.path().parent().unwrap().display().to_string();
        assert_eq!(mounts, [of("/srv/a"), of(r"'/srv/it'\''s b'"), of(&parent)], "{several}");
    }
}
