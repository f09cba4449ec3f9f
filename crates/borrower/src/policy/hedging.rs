//! When a get is raced by a read of the directory below (Dean, Barroso, "The Tail at Scale", CACM
//! 2013: hedged requests).
//!
//! A get that is later than nearly all reads below would be is not worth waiting for alone. Hedges
//! are bounded to a few per cent of all gets, so that a lender that becomes slow does not double
//! the disk's load: the gate deals with that.

use sync::atomic::{AtomicU32, Ordering};

/// A get is late when it takes longer than so many per cent of the reads below.
pub const LATE_PERCENT: u32 = 95;

/// What counts as late at the least and at the most, in microseconds: below it waking a second
/// thread costs more than waiting; above it a lender is given up soon anyway. The latter also while
/// nothing is known of the disk.
pub const LATE_US_MIN: u64 = 500;
/// See [`LATE_US_MIN`].
pub const LATE_US_MAX: u64 = 100_000;

/// Gets that allow for one hedge: 3 %.
const GETS_TO_HEDGE: u32 = 32;
/// Hedges that may come in a row, after enough gets.
const BURST: u32 = 8;

/// The budget.
#[derive(Default)]
pub struct Hedges(AtomicU32);

impl Hedges {
    /// A get was made.
    pub fn earn(&self) {
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |credit| {
            (credit < GETS_TO_HEDGE * BURST).then_some(credit + 1)
        });
    }

    /// Whether one may be raced; if so, it is paid for.
    pub fn spend(&self) -> bool {
        let pay = |credit: u32| credit.checked_sub(GETS_TO_HEDGE);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay).is_ok()
    }

    /// What was paid for has not come about.
    pub fn give_back(&self) {
        self.0.fetch_add(GETS_TO_HEDGE, Ordering::Relaxed);
    }
}

/// After how many microseconds a get is late, when `quantile_us` is what [`LATE_PERCENT`] of the
/// reads below do not exceed.
pub fn late_us(quantile_us: Option<u64>) -> u64 {
    quantile_us.map_or(LATE_US_MAX, |us| us.clamp(LATE_US_MIN, LATE_US_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_gets_are_raced() {
        let hedges = Hedges::default();
        assert!(!hedges.spend());
        let raced = (0..32_000).filter(|_| {
            hedges.earn();
            hedges.spend()
        });
        assert_eq!(raced.count(), 1000);
        (0..1_000_000).for_each(|_| hedges.earn());
        assert_eq!((0..100).filter(|_| hedges.spend()).count(), 8);
        assert_eq!((late_us(None), late_us(Some(1)), late_us(Some(5_000))), (100_000, 500, 5_000));
    }
}
