//! A rate-limited log of bad peers, so that they cannot fill a disk.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// At most one line in this time.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// The time of the last line, and the number of suppressed lines since.
#[derive(Default)]
pub struct RateLimitedLog {
    last: Mutex<(Option<Instant>, u64)>,
}

impl RateLimitedLog {
    /// Without any line so far.
    pub const fn new() -> RateLimitedLog {
        RateLimitedLog { last: Mutex::new((None, 0)) }
    }

    /// Counts a line. Returns `Some` if it is to be logged now, with the number of lines that were
    /// suppressed since the last one.
    pub fn next(&self) -> Option<u64> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if last.0.is_some_and(|last| now.duration_since(last) < LINE_INTERVAL) {
            last.1 += 1;
            return None;
        }
        Some(std::mem::replace(&mut *last, (Some(now), 0)).1)
    }

    /// Logs that `peer` was disconnected for `reason`, or counts the line for the next one.
    pub fn log(&self, peer: &str, reason: &dyn std::fmt::Display) {
        if let Some(suppressed) = self.next() {
            tracing::warn!(peer, %reason, suppressed, "connection closed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_is_for_many() {
        let log = RateLimitedLog::new();
        assert_eq!((log.next(), log.next(), log.next()), (Some(0), None, None));
        log.last.lock().unwrap().0 = Instant::now().checked_sub(LINE_INTERVAL);
        assert_eq!((log.next(), log.next()), (Some(2), None));
    }
}
