//! Where the log lines go: to standard error, which of a daemon in the background is its log.
//!
//! The log that a daemon makes for itself lies in `/run`, which is memory, and nobody rotates it. A lender that comes and goes makes a
//! few lines a second, so that log has a bound: beyond it, it begins anew. A file that the user named is the user's.

use rustix::fs::{fstat, ftruncate};
use rustix::stdio::stderr;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of the log that a daemon makes for itself: some 20,000 lines, more than anybody reads.
const LOG_BYTES_MAX: i64 = 4 << 20;

/// Standard error is a log of our own making, opened for appending.
static BOUNDED: AtomicBool = AtomicBool::new(false);

/// From now on, standard error is a log of our own making, opened for appending.
pub fn bound() {
    BOUNDED.store(true, Ordering::Relaxed);
}

/// Standard error, for one line.
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if BOUNDED.load(Ordering::Relaxed) {
            begin_anew_beyond(stderr(), LOG_BYTES_MAX);
        }
        io::stderr().write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Empties a file that has grown beyond the limit. What fails here must not keep the line from being written.
fn begin_anew_beyond(log: impl std::os::fd::AsFd, bytes_max: i64) {
    if fstat(&log).is_ok_and(|found| found.st_size >= bytes_max) {
        let _ = ftruncate(&log, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_begins_anew_and_is_appended_to() {
        let scratch = testbed::Scratch::new("log").unwrap();
        let path = scratch.path().join("log");
        let mut log = std::fs::File::options().create(true).append(true).open(&path).unwrap();
        for line in 0..1000 {
            begin_anew_beyond(&log, 100);
            writeln!(log, "line {line:04}").unwrap();
            assert!(std::fs::metadata(&path).unwrap().len() < 110);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("line 0") && text.ends_with("line 0999\n"), "{text:?}");
    }
}
