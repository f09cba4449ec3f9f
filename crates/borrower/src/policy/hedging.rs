//! Decides when a read of the backing directory races a get (Dean, Barroso, "The Tail at Scale",
//! CACM 2013: hedged requests).
//!
//! If a get takes longer than nearly all reads of the backing directory, waiting for the lender
//! alone does not pay. Hedges are limited to a few per cent of all gets, so a lender that becomes
//! slow does not double the disk's load. The gate handles that case.

use locks::atomic::{AtomicU32, Ordering};

/// A get is late when it takes longer than this percentage of the reads of the backing directory.
pub const LATE_PERCENT: u32 = 95;

/// The lower limit, in microseconds, of the time after which a get is late. Below it, waking a
/// second thread costs more than waiting.
pub const LATE_US_MIN: u64 = 500;
/// The upper limit, in microseconds, of the time after which a get is late. Above it a lender is
/// given up soon anyway. It is also used while nothing is known of the disk.
pub const LATE_US_MAX: u64 = 100_000;

/// The number of gets that allow for one hedge: 3 %.
const GETS_TO_HEDGE: u32 = 32;
/// The number of hedges that may come in a row, after enough gets.
const BURST: u32 = 8;

/// The budget of hedges.
#[derive(Default)]
pub struct Hedges(AtomicU32);

impl Hedges {
    /// A get was made.
    pub fn earn(&self) {
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |credit| {
            (credit < GETS_TO_HEDGE * BURST).then_some(credit + 1)
        });
    }

    /// Takes one hedge from the budget. Returns whether there was one.
    pub fn spend(&self) -> bool {
        let pay = |credit: u32| credit.checked_sub(GETS_TO_HEDGE);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay).is_ok()
    }

    /// Gives one hedge back that was not made.
    pub fn give_back(&self) {
        self.0.fetch_add(GETS_TO_HEDGE, Ordering::Relaxed);
    }
}

/// Returns the number of microseconds after which a get is late. `quantile_us` is the latency that
/// [`LATE_PERCENT`] of the reads of the backing directory do not exceed.
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
