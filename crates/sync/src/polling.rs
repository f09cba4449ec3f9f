//! Whether to look for something again and again, for a moment, before sleeping until it comes.
//!
//! To be woken costs tens of microseconds where processors halt, as they do in virtual machines:
//! more than the whole way to a lender near by and back. So who waits for something that is likely
//! to come at once may poll; but a processor that polls does nothing else. Hence:
//!
//! - nobody does where there is but one processor to use, if that may be needed for what is waited
//!   for;
//! - for [`POLL_MAX`] at the most, and whoever polls offers the processor to others at each look;
//! - where polling is in vain, because nothing comes that soon or the processors are busy, it is
//!   left alone for twice as many times each time. So in the long run it costs at most [`POLL_MAX`]
//!   for each 1,024 times.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long to look at the most. What takes longer is the way to another room, and what waking
/// costs does not matter.
pub const POLL_MAX: Duration = Duration::from_micros(100);

/// Times not to be polled after one that was in vain: at first, and at the most.
const SKIPPED_FIRST: u32 = 1;
const SKIPPED_MAX: u32 = 1024;

/// How it went so far with one thing that is waited for time after time. One thread at a time polls
/// for it.
pub struct Patience {
    is_of_use: bool,
    /// Times that are still to be skipped, and how many will be after the next failure.
    skip: AtomicU32,
    skip_next: AtomicU32,
}

impl Default for Patience {
    /// On this machine.
    fn default() -> Patience {
        Patience::new(thread::available_parallelism().map_or(1, usize::from))
    }
}

impl Patience {
    /// For what mostly comes from elsewhere: however few processors this process may use, it needs
    /// none of them.
    pub fn for_others() -> Patience {
        Patience::new(usize::MAX)
    }

    /// On a machine of so many processors.
    pub fn new(processors: usize) -> Patience {
        let [skip, skip_next] = [0, SKIPPED_FIRST].map(AtomicU32::new);
        Patience { is_of_use: processors > 1, skip, skip_next }
    }

    /// Looks until there is something, for `limit` at the most. None: it is to be slept for.
    pub fn poll<T>(&self, limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        if !self.begins() {
            return None;
        }
        let begun = Instant::now();
        let found = loop {
            if let Some(found) = look() {
                break Some(found);
            }
            // The thread that is to bring it may want this processor.
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

/// Decides which thread polls, of threads of which one is enough.
#[derive(Default)]
pub struct One(AtomicBool);

impl One {
    /// Polls as [`Patience::poll`] does; returns None, too, while another thread polls.
    pub fn poll<T>(&self, patience: &Patience, limit: Duration, look: impl FnMut() -> Option<T>) -> Option<T> {
        if self.0.swap(true, Ordering::Acquire) {
            return None;
        }
        let found = patience.poll(limit, look);
        self.0.store(false, Ordering::Release);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Once, with the answer that comes, or not.
    fn poll(patience: &Patience, comes: bool) -> bool {
        patience.poll(Duration::ZERO, || comes.then_some(())).is_some()
    }

    #[test]
    fn what_comes_is_found_and_what_does_not_is_waited_for_as_long_as_said() {
        let patience = Patience::new(2);
        let mut looks = 0;
        let found = patience.poll(Duration::MAX, || {
            looks += 1;
            (looks == 1000).then_some("it")
        });
        assert_eq!((found, looks), (Some("it"), 1000));
        let (begun, limit) = (Instant::now(), Duration::from_millis(3));
        assert_eq!(patience.poll(limit, || None::<()>), None);
        assert!(begun.elapsed() > limit);
    }

    #[test]
    fn none_polls_on_a_single_processor() {
        assert_eq!(Patience::new(1).poll(Duration::MAX, || -> Option<()> { panic!("a look") }), None);
    }

    #[test]
    fn one_polls_and_no_other_meanwhile() {
        let (one, [near, far]) = (One::default(), [Patience::new(2), Patience::new(2)]);
        let other = || one.poll(&far, Duration::MAX, || Some(()));
        assert_eq!(one.poll(&near, Duration::MAX, || Some(other())), Some(None));
        assert_eq!(other(), Some(()));
    }

    /// The share of times that are polled goes to one in a thousand while that is in vain, and one
    /// answer brings it back.
    #[test]
    fn polling_in_vain_is_soon_left_alone() {
        let (patience, other) = (Patience::new(2), Patience::new(2));
        let polled = |times: usize| {
            let mut count = 0;
            for _ in 0..times {
                let mut has_looked = false;
                let found = patience.poll(Duration::ZERO, || {
                    has_looked = true;
                    None::<()>
                });
                assert_eq!(found, None);
                count += usize::from(has_looked);
            }
            count
        };
        let came = |times: usize| (0..times).filter(|_| poll(&patience, true)).count();
        assert_eq!(came(100), 100);
        assert_eq!(polled(2048), 11); // 1 + 2 + 4 + ... + 1024 are skipped between them.
        let late = polled(100 * 1024);
        assert!((99..=101).contains(&late), "{late}");
        assert!(came(1025) > 0, "no more than 1024 are ever skipped");
        assert_eq!(came(100), 100);
        assert!(!poll(&patience, false) && !poll(&patience, true), "the next one is skipped");
        assert!(poll(&other, true), "what is waited for in vain says nothing of something else");
    }
}
