//! Rate limits: the lender uses no more of the network and the processors than its administrator
//! permits, and shares them equally among the borrowers that need them.
//!
//! The cost of a frame is charged to its session after the answer. Each limit has one token bucket
//! for the whole lender: unused income collects in it, up to [`BURST`], and pays for the next
//! frames. The rest of a cost is the session's own debt. Income goes to the sessions in debt, in
//! equal parts, and a session waits until its own debt is paid. This takes `Σ min(debt, own debt)`,
//! which is short for a small debt, however large the others are. The unused part of idle sessions
//! goes to the others automatically.
//!
//! A borrower gives a lender up that does not answer within half a second, so no frame waits longer
//! than [`SHARE_WAIT_MAX`]. The rest stays owed. If a session is so far behind that waiting does
//! not help, its gets are answered as misses ([`RateLimiter::is_behind`]): it reads from its disk
//! meanwhile.
//!
//! Pure logic: times and costs are arguments. The unit is a nanosecond of the limit: the amount
//! that may be spent in a nanosecond costs one. Must never happen here: a session that waits
//! for the debt of another.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::{Duration, Instant};

/// The limits of a lender. `None` means no limit, and then nothing is measured for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Processor time for serving frames, in percent of one processor.
    pub cpu_percent: Option<NonZeroU32>,
    /// Bytes of frames a second, in and out together.
    pub rate_bytes: Option<NonZeroU64>,
}

/// The longest time that a connection waits for its share. A borrower waits half a second for an
/// answer, and as long to send a frame.
pub const SHARE_WAIT_MAX: Duration = Duration::from_millis(200);

/// The minimum of [`Limits::rate_bytes`]: with less, one put message in [`SHARE_WAIT_MAX`] for each
/// of three borrowers exceeds the rate.
pub const RATE_MIN_BYTES: u64 = 4 << 20;

/// How much unused income is kept for the next frames: a read-ahead window at 10 MiB/s.
const BURST: Duration = Duration::from_millis(100);

/// A session that would have to wait for this long is behind.
const BEHIND: Duration = Duration::from_millis(400);

/// The maximum debt of a session. More is forgotten, because a debt that nobody waits for has no
/// effect.
const DEBT_MAX: Duration = Duration::from_secs(2);

/// The maximum number of sessions in debt: twice the number of sessions, because some end with
/// debts. The debt of one more is forgotten.
const DEBTORS_MAX: usize = 2 * crate::sessions::SESSIONS_MAX;

/// The cost of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes in and out.
    pub bytes: u64,
    /// Processor time.
    pub cpu_ns: u64,
}

/// Token bucket and debts of one limit.
struct TokenBucket {
    credit_ns: u64,
    /// Session and debt, none of them 0.
    debts: Vec<(u64, u64)>,
    refilled: Instant,
}

impl TokenBucket {
    fn new(now: Instant) -> TokenBucket {
        TokenBucket { credit_ns: nanoseconds(BURST), debts: Vec::new(), refilled: now }
    }

    /// Income until now pays debts, and the rest stays in the bucket.
    fn refill(&mut self, now: Instant) {
        let mut income_ns = nanoseconds(now.saturating_duration_since(self.refilled));
        self.refilled = self.refilled.max(now);
        while let Some(least_ns) = self.debts.iter().map(|(_, debt_ns)| *debt_ns).min() {
            let count = self.debts.len() as u64;
            let each_ns = least_ns.min(income_ns / count);
            if each_ns == 0 {
                break;
            }
            income_ns -= each_ns * count;
            self.debts.iter_mut().for_each(|(_, debt_ns)| *debt_ns -= each_ns);
            self.debts.retain(|(_, debt_ns)| *debt_ns > 0);
        }
        self.credit_ns = self.credit_ns.saturating_add(income_ns).min(nanoseconds(BURST));
    }

    fn charge(&mut self, session: u64, cost_ns: u64) {
        let paid_ns = cost_ns.min(self.credit_ns);
        self.credit_ns -= paid_ns;
        let owed_ns = cost_ns - paid_ns;
        if owed_ns == 0 {
            return;
        }
        let most_ns = nanoseconds(DEBT_MAX);
        if let Some((_, debt_ns)) = self.debts.iter_mut().find(|(debtor, _)| *debtor == session) {
            *debt_ns = debt_ns.saturating_add(owed_ns).min(most_ns);
        } else if self.debts.len() < DEBTORS_MAX {
            self.debts.push((session, owed_ns.min(most_ns)));
        }
    }

    /// The time until the session's debt is paid, if no new debts are made.
    fn wait_ns(&self, session: u64) -> u64 {
        let own = self.debts.iter().find(|(debtor, _)| *debtor == session);
        own.map_or(0, |(_, own_ns)| self.debts.iter().map(|(_, debt_ns)| debt_ns.min(own_ns)).sum())
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The token buckets of a lender.
pub struct RateLimiter {
    network: Option<(NonZeroU64, TokenBucket)>,
    processor: Option<(NonZeroU32, TokenBucket)>,
}

impl RateLimiter {
    /// All debts are paid. `None` if nothing is limited.
    pub fn new(limits: Limits, now: Instant) -> Option<RateLimiter> {
        let Limits { cpu_percent, rate_bytes } = limits;
        (limits != Limits::default()).then(|| RateLimiter {
            network: rate_bytes.map(|rate_bytes| (rate_bytes, TokenBucket::new(now))),
            processor: cpu_percent.map(|cpu_percent| (cpu_percent, TokenBucket::new(now))),
        })
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        Limits {
            cpu_percent: self.processor.as_ref().map(|(cpu_percent, _)| *cpu_percent),
            rate_bytes: self.network.as_ref().map(|(rate_bytes, _)| *rate_bytes),
        }
    }

    /// Whether processor time is limited, and so has to be measured.
    pub fn wants_cpu(&self) -> bool {
        self.processor.is_some()
    }

    /// Charges the session, whose number no other session has or had. Returns how long it has to
    /// wait, at most [`SHARE_WAIT_MAX`].
    pub fn charge(&mut self, session: u64, cost: Cost, now: Instant) -> Duration {
        if let Some((rate_bytes, bucket)) = &mut self.network {
            bucket.refill(now);
            bucket.charge(session, cost.bytes.saturating_mul(1_000_000_000) / *rate_bytes);
        }
        if let Some((percent, bucket)) = &mut self.processor {
            bucket.refill(now);
            bucket.charge(session, cost.cpu_ns.saturating_mul(100) / u64::from(percent.get()));
        }
        Duration::from_nanos(self.wait_ns(session)).min(SHARE_WAIT_MAX)
    }

    /// Whether the session needs so much more than its share that waiting does not help.
    pub fn is_behind(&mut self, session: u64, now: Instant) -> bool {
        self.buckets().for_each(|bucket| bucket.refill(now));
        self.wait_ns(session) > nanoseconds(BEHIND)
    }

    fn wait_ns(&mut self, session: u64) -> u64 {
        self.buckets().map(|bucket| bucket.wait_ns(session)).max().unwrap_or(0)
    }

    fn buckets(&mut self) -> impl Iterator<Item = &mut TokenBucket> {
        let network = self.network.iter_mut().map(|(_, bucket)| bucket);
        network.chain(self.processor.iter_mut().map(|(_, bucket)| bucket))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BinaryHeap;

    const RATE: u64 = 10 << 20;
    const SECONDS: u64 = 60;
    const HEAD_BYTES: u64 = 64;

    fn rate(now: Instant) -> RateLimiter {
        RateLimiter::new(Limits { rate_bytes: NonZeroU64::new(RATE), cpu_percent: None }, now).unwrap()
    }

    /// A borrower whose connections each request that much, wait for the answer, think, and request
    /// again.
    #[derive(Clone, Copy)]
    struct Borrower {
        connections: usize,
        frame_bytes: u64,
        think: Duration,
        gets: bool,
    }

    #[derive(Default, Clone, Copy, Debug)]
    struct Had {
        frames: u64,
        misses: u64,
        bytes: u64,
        longest_wait: Duration,
    }

    /// The amount that each borrower got after [`SECONDS`].
    fn run(borrowers: &[Borrower]) -> Vec<Had> {
        let begun = Instant::now();
        let mut rate_limiter = rate(begun);
        let mut had = vec![Had::default(); borrowers.len()];
        // The next frames, the soonest first.
        let mut next_frames = BinaryHeap::new();
        for (at, borrower) in borrowers.iter().enumerate() {
            next_frames.extend((0..borrower.connections).map(|connection| (std::cmp::Reverse(0), at, connection)));
        }
        while let Some((std::cmp::Reverse(after_ns), at, connection)) = next_frames.pop() {
            if after_ns > SECONDS * 1_000_000_000 {
                break;
            }
            let (borrower, had) = (&borrowers[at], &mut had[at]);
            let now = begun + Duration::from_nanos(after_ns);
            let misses = borrower.gets && rate_limiter.is_behind(at as u64, now);
            let bytes = if misses { HEAD_BYTES } else { borrower.frame_bytes };
            let wait = rate_limiter.charge(at as u64, Cost { bytes, cpu_ns: 0 }, now);
            had.frames += 1;
            had.misses += u64::from(misses);
            had.bytes += bytes;
            had.longest_wait = had.longest_wait.max(wait);
            // An answer takes some time, with and without a wait.
            let next = after_ns + nanoseconds(wait + borrower.think).max(50_000);
            next_frames.push((std::cmp::Reverse(next), at, connection));
        }
        had
    }

    const GREEDY: Borrower = Borrower { connections: 8, frame_bytes: 256 << 10, think: Duration::ZERO, gets: true };
    const MODEST: Borrower =
        Borrower { connections: 1, frame_bytes: 4 << 10, think: Duration::from_millis(10), gets: true };

    /// The amount that the rate permits, and the tolerance: the tokens at the start, and the debts
    /// at the end.
    fn allowed(greedy: u64) -> std::ops::RangeInclusive<u64> {
        let all = RATE * SECONDS;
        all * 98 / 100..=all + RATE / 10 + greedy * (RATE * 4 / 10 + (2 << 20))
    }

    #[test]
    fn the_sum_keeps_to_the_rate() {
        for borrowers in [vec![GREEDY], vec![GREEDY; 2], vec![GREEDY, MODEST, MODEST], vec![GREEDY; 8]] {
            let had = run(&borrowers);
            let sum = had.iter().map(|had| had.bytes).sum::<u64>();
            assert!(allowed(borrowers.len() as u64).contains(&sum), "{had:?}");
            assert!(had.iter().all(|had| had.longest_wait <= SHARE_WAIT_MAX));
        }
    }

    #[test]
    fn a_modest_one_hardly_waits() {
        let had = run(&[GREEDY, MODEST, GREEDY, GREEDY]);
        // Four borrowers share the rate: 4 KiB take four times as long as alone, and the frames of
        // this borrower never meet each other.
        let share = Duration::from_secs_f64(4.0 * MODEST.frame_bytes as f64 / RATE as f64);
        assert!(had[1].longest_wait <= share * 2, "{had:?}");
        assert_eq!(had[1].misses, 0);
        assert!(had[1].frames >= SECONDS * 1000 / 13, "{had:?}");
    }

    #[test]
    fn busy_sessions_get_the_same_whatever_the_size_of_their_frames() {
        let one_connection = Borrower { connections: 1, frame_bytes: 64 << 10, ..GREEDY };
        let puts = Borrower { connections: 1, gets: false, ..GREEDY };
        let had = run(&[GREEDY, one_connection, puts]);
        let fair = RATE * SECONDS / 3;
        assert!(had.iter().all(|had| (fair * 85 / 100..fair * 120 / 100).contains(&had.bytes)), "{had:?}");
        assert_eq!((had[1].misses, had[2].misses), (0, 0), "{had:?}");
        // The unused part of one borrower goes to the others.
        let had = run(&[GREEDY, MODEST]);
        assert!(had[0].bytes > (RATE - RATE / 20) * SECONDS, "{had:?}");
    }

    #[test]
    fn the_tighter_limit_counts() {
        let begun = Instant::now();
        let limits = Limits { cpu_percent: NonZeroU32::new(50), rate_bytes: NonZeroU64::new(1 << 30) };
        let mut rate_limiter = RateLimiter::new(limits, begun).unwrap();
        assert!(rate_limiter.wants_cpu() && !rate(begun).wants_cpu());
        // The bucket has 100 ms of the limit, which are 50 ms of a processor.
        let ms = |ms| Duration::from_millis(ms);
        let cost = |cpu: Duration| Cost { bytes: 1 << 20, cpu_ns: nanoseconds(cpu) };
        assert_eq!(rate_limiter.charge(1, cost(ms(50)), begun), Duration::ZERO);
        assert_eq!(rate_limiter.charge(1, cost(ms(20)), begun), ms(40));
        assert_eq!(rate_limiter.charge(2, cost(ms(5)), begun), ms(20), "its own 10, and as much of the other's");
        assert_eq!(rate_limiter.charge(1, cost(ms(0)), begun + ms(20)), ms(30));
        assert_eq!(rate_limiter.charge(2, cost(ms(0)), begun + ms(20)), Duration::ZERO);
        assert_eq!(rate_limiter.charge(1, cost(ms(1000)), begun + ms(50)), SHARE_WAIT_MAX);
        assert!(rate_limiter.is_behind(1, begun + ms(50)) && !rate_limiter.is_behind(2, begun + ms(50)));
        // Debt above the maximum is forgotten, and time that runs backwards counts as none.
        rate_limiter.charge(1, cost(ms(60_000)), begun);
        assert!(!rate_limiter.is_behind(1, begun + ms(50) + DEBT_MAX - BEHIND));
        assert_eq!(RateLimiter::new(Limits::default(), begun).map(|_| ()), None);
    }

    #[test]
    fn debtors_are_bounded() {
        let begun = Instant::now();
        let mut rate_limiter = rate(begun);
        for session in 0..10 * DEBTORS_MAX as u64 {
            rate_limiter.charge(session, Cost { bytes: RATE, cpu_ns: 0 }, begun);
        }
        assert!(rate_limiter.buckets().all(|bucket| bucket.debts.len() == DEBTORS_MAX));
        assert_eq!(rate_limiter.charge(1, Cost::default(), begun + Duration::from_secs(10_000)), Duration::ZERO);
        assert!(rate_limiter.buckets().all(|bucket| bucket.debts.is_empty()));
    }
}
