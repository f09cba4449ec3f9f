//! Whether to look for an answer again and again, for a moment, before sleeping until it comes.
//!
//! To be woken costs more than the whole way to a lender near by and back. So who has asked may poll; but a processor that polls does
//! nothing else. Hence:
//!
//! - one at a time, and nobody where there is but one processor, which the answer may need;
//! - for [`POLL_MAX`] at the most, and whoever polls offers the processor to others at each look;
//! - where polling is in vain, because the lender is too far away or the processors are busy, it is left alone for twice as many
//!   questions to that lender each time. So in the long run it costs at most [`POLL_MAX`] for each 1,024 questions.
//!
//! Pure: who polls says how it ended.

use std::time::Duration;
use sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// How long one answer is polled for. More than that is the way to another room, and what waking costs does not matter.
pub const POLL_MAX: Duration = Duration::from_micros(100);

/// Questions that are not polled for after one for which it was in vain: at first, and at the most.
const SKIPPED_FIRST: u32 = 1;
const SKIPPED_MAX: u32 = 1024;

/// Who polls.
pub struct Polling {
    is_of_use: bool,
    is_taken: AtomicBool,
}

/// How a lender was polled so far.
pub struct Patience {
    /// Questions that are still to be skipped, and how many will be after the next failure.
    skip: AtomicU32,
    skip_next: AtomicU32,
}

/// Leave to poll. [`Turn::ended`] is told how it went; without that, it was in vain.
pub struct Turn<'a> {
    polling: &'a Polling,
    patience: &'a Patience,
    came: bool,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { skip: AtomicU32::new(0), skip_next: AtomicU32::new(SKIPPED_FIRST) }
    }
}

impl Polling {
    /// On a machine of so many processors.
    pub fn new(processors: usize) -> Polling {
        Polling { is_of_use: processors > 1, is_taken: AtomicBool::new(false) }
    }

    /// A lender was asked. May its answer be polled for?
    pub fn begin<'a>(&'a self, patience: &'a Patience) -> Option<Turn<'a>> {
        if !self.is_of_use || self.is_taken.swap(true, Ordering::Acquire) {
            return None;
        }
        // Whoever holds the place is the only one who changes these.
        let skip = patience.skip.load(Ordering::Relaxed);
        if skip > 0 {
            patience.skip.store(skip - 1, Ordering::Relaxed);
            self.is_taken.store(false, Ordering::Release);
            return None;
        }
        Some(Turn { polling: self, patience, came: false })
    }
}

impl Turn<'_> {
    /// Whether the answer came while it was polled for.
    pub fn ended(mut self, came: bool) {
        self.came = came;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Patience { skip, skip_next } = self.patience;
        if self.came {
            skip_next.store(SKIPPED_FIRST, Ordering::Relaxed);
        } else {
            let now = skip_next.load(Ordering::Relaxed);
            skip.store(now, Ordering::Relaxed);
            skip_next.store((now * 2).min(SKIPPED_MAX), Ordering::Relaxed);
        }
        self.polling.is_taken.store(false, Ordering::Release);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_none_on_a_single_processor() {
        let [near, far] = [Patience::default(), Patience::default()];
        assert!(Polling::new(1).begin(&near).is_none());
        let polling = Polling::new(2);
        let first = polling.begin(&near).unwrap();
        assert!(polling.begin(&far).is_none());
        first.ended(true);
        assert!(polling.begin(&far).is_some());
    }

    /// The share of questions that are polled for goes to one in a thousand while that is in vain, and one answer brings it back.
    #[test]
    fn polling_in_vain_is_soon_left_alone() {
        let (polling, far, near) = (Polling::new(2), Patience::default(), Patience::default());
        let polled = |questions: usize, came: bool| {
            (0..questions).filter(|_| polling.begin(&far).map(|turn| turn.ended(came)).is_some()).count()
        };
        assert_eq!(polled(100, true), 100);
        assert_eq!(polled(2048, false), 11); // 1 + 2 + 4 + ... + 1024 are skipped between them.
        let late = polled(100 * 1024, false);
        assert!((99..=101).contains(&late), "{late}");
        assert!(polled(1025, true) > 0, "no more than 1024 are ever skipped");
        assert_eq!(polled(100, true), 100);
        drop(polling.begin(&far));
        assert!(polling.begin(&far).is_none(), "without a word it was in vain");
        assert!(polling.begin(&near).is_some(), "one lender says nothing of another");
    }
}
