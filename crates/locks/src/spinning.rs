//! Adaptive spinning: whether a waiter polls for a short time before it blocks.
//!
//! Waking a thread costs tens of microseconds if processors halt, as they do in virtual machines:
//! more than the round trip to a lender near by. So a waiter may poll for an event that is likely
//! to come at once. But a processor that polls does nothing else. Hence:
//!
//! - no thread polls on a single processor that the awaited thread may need;
//! - a thread polls for at most [`SPIN_MAX`], and yields the processor at each check;
//! - if polling does not pay, because nothing comes that soon or the processors are busy, it is
//!   skipped for twice as many times each time. So in the long run it costs at most [`SPIN_MAX`]
//!   for each 1,024 times.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The maximum time of polling. An event that takes longer comes from another room, and the cost of
/// waking does not matter then.
pub const SPIN_MAX: Duration = Duration::from_micros(100);

/// Number of times that are skipped after polling in vain: the first, and the maximum.
const SKIPPED_FIRST: u32 = 1;
const SKIPPED_MAX: u32 = 1024;

/// The history of one kind of event. One thread at a time polls for it.
pub struct AdaptiveSpin {
    is_of_use: bool,
    /// Times that are still to be skipped, and the number after the next failure.
    skip: AtomicU32,
    skip_next: AtomicU32,
}

impl Default for AdaptiveSpin {
    /// For this machine.
    fn default() -> AdaptiveSpin {
        AdaptiveSpin::new(thread::available_parallelism().map_or(1, usize::from))
    }
}

impl AdaptiveSpin {
    /// For events that mostly come from other machines: they need none of this process's
    /// processors.
    pub fn for_others() -> AdaptiveSpin {
        AdaptiveSpin::new(usize::MAX)
    }

    /// For a machine of so many processors.
    pub fn new(processors: usize) -> AdaptiveSpin {
        let [skip, skip_next] = [0, SKIPPED_FIRST].map(AtomicU32::new);
        AdaptiveSpin { is_of_use: processors > 1, skip, skip_next }
    }

    /// Checks until there is a result, for at most `limit`. `None`: the caller has to block.
    pub fn poll<T>(&self, limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        if !self.begins() {
            return None;
        }
        let begun = Instant::now();
        let found = loop {
            if let Some(found) = look() {
                break Some(found);
            }
            // The thread that causes the event may need this processor.
            thread::yield_now();
            if begun.elapsed() > limit {
                break None;
            }
        };
        self.ended(found.is_some());
        found
    }

    fn begins(&self) -> bool {
        let skip = self.skip.load(Ordering::Relaxed);
        self.skip.store(skip.saturating_sub(1), Ordering::Relaxed);
        self.is_of_use && skip == 0
    }

    fn ended(&self, came: bool) {
        let skip = self.skip_next.load(Ordering::Relaxed);
        let (skip, skip_next) = if came { (0, SKIPPED_FIRST) } else { (skip, (skip * 2).min(SKIPPED_MAX)) };
        self.skip.store(skip, Ordering::Relaxed);
        self.skip_next.store(skip_next, Ordering::Relaxed);
    }
}

/// Selects one polling thread, if one is enough.
#[derive(Default)]
pub struct One(AtomicBool);

impl One {
    /// Polls as [`AdaptiveSpin::poll`] does; also returns `None` while another thread polls.
    pub fn poll<T>(&self, spin: &AdaptiveSpin, limit: Duration, look: impl FnMut() -> Option<T>) -> Option<T> {
        if self.0.swap(true, Ordering::Acquire) {
            return None;
        }
        let found = spin.poll(limit, look);
        self.0.store(false, Ordering::Release);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls once, with or without a result.
    fn poll(spin: &AdaptiveSpin, comes: bool) -> bool {
        spin.poll(Duration::ZERO, || comes.then_some(())).is_some()
    }

    #[test]
    fn what_comes_is_found_and_what_does_not_is_waited_for_as_long_as_said() {
        let spin = AdaptiveSpin::new(2);
        let mut looks = 0;
        let found = spin.poll(Duration::MAX, || {
            looks += 1;
            (looks == 1000).then_some("it")
        });
        assert_eq!((found, looks), (Some("it"), 1000));
        let (begun, limit) = (Instant::now(), Duration::from_millis(3));
        assert_eq!(spin.poll(limit, || None::<()>), None);
        assert!(begun.elapsed() > limit);
    }

    #[test]
    fn none_polls_on_a_single_processor() {
        assert_eq!(AdaptiveSpin::new(1).poll(Duration::MAX, || -> Option<()> { panic!("a look") }), None);
    }

    #[test]
    fn one_polls_and_no_other_meanwhile() {
        let (one, [near, far]) = (One::default(), [AdaptiveSpin::new(2), AdaptiveSpin::new(2)]);
        let other = || one.poll(&far, Duration::MAX, || Some(()));
        assert_eq!(one.poll(&near, Duration::MAX, || Some(other())), Some(None));
        assert_eq!(other(), Some(()));
    }

    /// The share of polls falls to one in a thousand while they are in vain, and one success
    /// restores it.
    #[test]
    fn polling_in_vain_is_soon_left_alone() {
        let (spin, other) = (AdaptiveSpin::new(2), AdaptiveSpin::new(2));
        let polled = |times: usize| {
            let mut count = 0;
            for _ in 0..times {
                let mut has_looked = false;
                let found = spin.poll(Duration::ZERO, || {
                    has_looked = true;
                    None::<()>
                });
                assert_eq!(found, None);
                count += usize::from(has_looked);
            }
            count
        };
        let came = |times: usize| (0..times).filter(|_| poll(&spin, true)).count();
        assert_eq!(came(100), 100);
        assert_eq!(polled(2048), 11); // 1 + 2 + 4 + ... + 1024 are skipped between them.
        let late = polled(100 * 1024);
        assert!((99..=101).contains(&late), "{late}");
        assert!(came(1025) > 0, "no more than 1024 are ever skipped");
        assert_eq!(came(100), 100);
        assert!(!poll(&spin, false) && !poll(&spin, true), "the next one is skipped");
        assert!(poll(&other, true), "what is waited for in vain says nothing of something else");
    }
}
