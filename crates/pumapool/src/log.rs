//! The destination of log lines: standard error. When a daemon in the background serves, its
//! standard error is its log. Before that, lines go into the log, and warnings and errors also to
//! standard error, which is the caller's terminal.
//!
//! The log that a daemon makes for itself is in `/run`, which is memory, and is not rotated. An
//! unstable lender causes a few lines a second, so this log has a bound: beyond it, the file is
//! emptied. A file that the user has named has no bound.

use anyhow::{Context, Result, bail};
use rustix::fs::{fstat, ftruncate};
use rustix::stdio::stderr;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Limit on the log that a daemon makes for itself, in bytes: some 20,000 lines.
const LOG_BYTES_MAX: i64 = 4 << 20;

/// Whether standard error is a log that this program has made, opened for appending.
static BOUNDED: AtomicBool = AtomicBool::new(false);

/// The log of a daemon in the background.
static FILE: OnceLock<File> = OnceLock::new();

/// Whether standard error is the log.
static TURNED: AtomicBool = AtomicBool::new(false);

/// A function that replaces the filter.
type SetFilter = Box<dyn Fn(EnvFilter) -> Result<()> + Send + Sync>;

static SET_FILTER: OnceLock<SetFilter> = OnceLock::new();

fn filter(level: &str) -> Result<EnvFilter> {
    // A single word would be parsed as the name of a module, and all other modules would log
    // nothing, not even errors.
    let is_level = |word: &str| word.contains('=') || word.trim().parse::<LevelFilter>().is_ok();
    if let Some(word) = level.split(',').find(|word| !is_level(word)) {
        bail!("`{word}` is not a level");
    }
    // Lines that a filter does not name are shown as usual. And what chitchat has to say of single
    // datagrams, our own lines say better; `chitchat=LEVEL` shows it all the same.
    EnvFilter::try_new(format!("info,chitchat=off,{level}")).with_context(|| format!("--log {level}"))
}

/// Parses a value of `--log`.
pub fn level(text: &str) -> Result<String, String> {
    let reason = |error: anyhow::Error| {
        format!("write error, warn, info, debug, trace, or a filter like borrower=debug ({})", error.root_cause())
    };
    filter(text).map(|_| text.to_owned()).map_err(reason)
}

/// Begins to log with the filter of `--log`. Must be called once.
pub fn begin(level: &str) -> Result<()> {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter(level)?)
        .with_writer(Writers)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        // If the log cannot be written, the daemon continues. Without this setting, reporting that
        // error would panic.
        .log_internal_errors(false)
        .with_filter_reloading();
    let handle = builder.reload_handle();
    let _ = SET_FILTER.set(Box::new(move |filter| handle.reload(filter).context("the log cannot be changed")));
    builder.init();
    Ok(())
}

/// Writes an error to standard error: one line with its chain of causes, each once.
pub fn complain(error: &anyhow::Error) {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.contains(&cause) {
            text.extend([if text.is_empty() { "" } else { ": " }, &cause]);
        }
    }
    let _ = writeln!(std::io::stderr(), "pumapool: {}", text.replace('\n', " "));
}

/// Changes the filter.
pub fn set(level: &str) -> Result<()> {
    let filter = filter(level)?;
    SET_FILTER.get().map_or(Ok(()), |set| set(filter))
}

/// Sets the log. Must be called once, before anything is logged that is not for the caller.
pub fn to(file: &File) {
    // Without another descriptor everything goes to standard error, as before.
    file.try_clone().into_iter().for_each(|file| drop(FILE.set(file)));
}

/// Records that standard error is the log.
pub fn turned() {
    TURNED.store(true, Ordering::Relaxed);
}

/// Records that standard error is a log that this program has made, opened for appending.
pub fn bound() {
    BOUNDED.store(true, Ordering::Relaxed);
}

/// Chooses the destination of a line.
struct Writers;

impl<'a> MakeWriter<'a> for Writers {
    type Writer = Place;

    fn make_writer(&'a self) -> Place {
        Place { is_for_caller: true }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Place {
        Place { is_for_caller: *metadata.level() <= Level::WARN }
    }
}

/// The destination of one line.
struct Place {
    /// Whether the line also goes to the caller, because the daemon does not serve yet.
    is_for_caller: bool,
}

impl Write for Place {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let (Some(mut log), false) = (FILE.get(), TURNED.load(Ordering::Relaxed)) {
            let _ = log.write_all(line);
            if !self.is_for_caller {
                return Ok(line.len());
            }
        }
        if BOUNDED.load(Ordering::Relaxed) {
            empty_beyond(stderr(), LOG_BYTES_MAX);
        }
        io::stderr().write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Empties a file that has grown beyond the limit. An error here must not prevent the line from
/// being written.
fn empty_beyond(log: impl std::os::fd::AsFd, bytes_max: i64) {
    if fstat(&log).is_ok_and(|found| found.st_size >= bytes_max) {
        let _ = ftruncate(&log, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_emptied_and_is_appended_to() {
        let scratch = testbed::Scratch::new("log").unwrap();
        let path = scratch.path().join("log");
        let mut log = std::fs::File::options().create(true).append(true).open(&path).unwrap();
        for line in 0..1000 {
            empty_beyond(&log, 100);
            writeln!(log, "line {line:04}").unwrap();
            assert!(std::fs::metadata(&path).unwrap().len() < 110);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("line 0") && text.ends_with("line 0999\n"), "{text:?}");
    }
}
