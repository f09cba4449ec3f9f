//! Whether other programs wait for memory, and the lender's reaction.
//!
//! The source is the kernel's pressure stall information: the share of time in which some task
//! waited for memory, on the machine, and in the innermost cgroup with a limit that contains the
//! lender. Stalls count only if free memory is scarce there: those of the machine only if the
//! machine's memory is. If there is plenty, the stalls come from a cgroup at its own limit (for
//! example a borrower on the same machine), and memory that the lender gives back would not help
//! it.

use crate::available_memory::Memory;
use std::time::Duration;

/// Time over which stalls are averaged: a shorter time is noise, a longer one is late.
pub const WINDOW: Duration = Duration::from_secs(1);

/// Share of time stalled from which the lender does not grow, in per cent.
const STALLED_HOLD_PERCENT: u128 = 10;
/// Share of time stalled from which it gives memory back, in per cent.
const STALLED_SHRINK_PERCENT: u128 = 40;
/// Free memory, as a share of all, above which stalls are ignored: one in 16.
const PLENTY_SHARE: u64 = 16;
/// Part of the stored pages given back in each window under high pressure: one in 32, half of all
/// in 22 seconds.
pub const SHRINK_SHARE: usize = 32;

/// The reaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pressure {
    /// Grow into free memory.
    #[default]
    None,
    /// Do not grow.
    Hold,
    /// Give memory back.
    Shrink,
}

impl Pressure {
    /// Returns a pressure in numeric form as the status reports it.
    pub fn reported(pressure: u8) -> report::Pressure {
        match pressure {
            0 => report::Pressure::None,
            1 => report::Pressure::Hold,
            _ => report::Pressure::Shrink,
        }
    }
}

/// The pressure in a window of `elapsed`, in which tasks were stalled for `stalled_us`. The free
/// memory is `memory`, of which `reserve_bytes` are not for lending.
pub fn judge(stalled_us: u64, elapsed: Duration, memory: Memory, reserve_bytes: u64) -> Pressure {
    if memory.free_bytes.saturating_sub(reserve_bytes) > memory.total_bytes / PLENTY_SHARE {
        return Pressure::None;
    }
    match u128::from(stalled_us) * 100 / elapsed.as_micros().max(1) {
        STALLED_SHRINK_PERCENT.. => Pressure::Shrink,
        STALLED_HOLD_PERCENT.. => Pressure::Hold,
        _ => Pressure::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_count_where_memory_is_scarce() {
        let scarce = Memory { total_bytes: 1600, free_bytes: 150 };
        for (stalled_us, pressure) in [(0, Pressure::None), (99_999, Pressure::None), (100_000, Pressure::Hold)] {
            assert_eq!(judge(stalled_us, WINDOW, scarce, 50), pressure);
        }
        assert_eq!(judge(400_000, WINDOW, scarce, 50), Pressure::Shrink);
        assert_eq!(judge(u64::MAX, Duration::ZERO, scarce, 500), Pressure::Shrink);
        assert_eq!(judge(400_000, WINDOW, scarce, 49), Pressure::None);
    }
}
