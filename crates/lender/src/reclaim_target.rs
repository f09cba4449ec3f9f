//! The reclaim target: the memory that other consumers take of the reserve, and that the lender
//! gives back before they have to take it themselves.
//!
//! The kernel takes lent pages for any program that needs memory. But this program waits while the
//! kernel searches and unmaps the pages, about as long as the allocation itself takes. So the
//! reserve ([`crate::Config::reserve_bytes`]) is more than a bound for the store's growth: the
//! lender gives back as much as others take of it, and checks so often that they cannot use it up
//! in between.
//!
//! The lender returns memory in proportion to the growth of other consumers, not to the shortfall
//! below the reserve. On any machine the page cache fills all memory in the end, and hardly
//! anything is free. Then lent pages may stay until the kernel takes them, or another consumer
//! grows.
//!
//! Pure logic: memory sizes are arguments, and nothing here reads a clock.

use crate::available_memory::Memory;
use std::time::Duration;

/// The maximum that a machine's programs allocate in a second, in bytes: two processors that do
/// nothing else.
const GROWTH_BYTES_PER_S: u64 = 4 << 30;

/// The minimum time between two checks.
pub const LOOK_MIN: Duration = Duration::from_millis(1);

/// Growth up to this part of all memory is noise: the kernel's own cleaning sometimes frees as
/// much.
const NOISE_SHARE: u64 = 256;
/// Growth up to this part of the reserve is noise, too, if that is less.
const NOISE_RESERVE_SHARE: u64 = 4;

/// The state when the lender last gave memory back, or had none to give.
#[derive(Clone, Copy)]
struct Seen {
    total_bytes: u64,
    /// Bytes that other consumers use.
    others_bytes: u64,
}

/// The growth of other consumers' memory, from check to check.
#[derive(Default)]
pub struct ReclaimTarget {
    seen: Option<Seen>,
    grows: bool,
}

impl ReclaimTarget {
    /// Updates the state: there is `memory`, of which the store holds `held_bytes`. Returns how
    /// many bytes the store has to give back.
    pub fn look(&mut self, memory: Memory, held_bytes: u64, reserve_bytes: u64) -> u64 {
        let Memory { total_bytes, free_bytes } = memory;
        let others_bytes = total_bytes.saturating_sub(free_bytes).saturating_sub(held_bytes);
        let now = Seen { total_bytes, others_bytes };
        // Another limit has become the tightest: its numbers do not continue the previous ones.
        let before = *self.seen.insert(self.seen.filter(|seen| seen.total_bytes == total_bytes).unwrap_or(now));
        let grown_bytes = others_bytes.saturating_sub(before.others_bytes);
        let noise_bytes = (total_bytes / NOISE_SHARE).min(reserve_bytes / NOISE_RESERVE_SHARE);
        self.grows = free_bytes < reserve_bytes && grown_bytes > noise_bytes;
        // Growth in small steps adds up, as long as it is taken of the reserve.
        if self.grows || free_bytes >= reserve_bytes || others_bytes < before.others_bytes {
            self.seen = Some(now);
        }
        if !self.grows {
            return 0;
        }
        // Room for the same growth once more, which may come until the next check.
        let wanted_bytes = reserve_bytes.saturating_add(grown_bytes.min(reserve_bytes));
        wanted_bytes.saturating_sub(free_bytes).min(grown_bytes.saturating_mul(2)).min(held_bytes)
    }

    /// Whether others have just taken memory of the reserve, so that nothing is to be lent until
    /// the next check.
    pub fn grows(&self) -> bool {
        self.grows
    }

    /// Time until the next check: less than others need to use up the free memory. It is `most` if
    /// there is nothing to give, no reserve to give it for, or if nothing is free anyway and nobody
    /// grows.
    pub fn next_look(&self, memory: Memory, held_bytes: u64, reserve_bytes: u64, most: Duration) -> Duration {
        let is_filled = memory.free_bytes < reserve_bytes / 2;
        if held_bytes == 0 || reserve_bytes == 0 || is_filled && !self.grows {
            return most;
        }
        let micros = u128::from(memory.free_bytes) * 1_000_000 / u128::from(GROWTH_BYTES_PER_S);
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)).clamp(LOOK_MIN, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const RESERVE: u64 = 16 * MIB;
    const MOST: Duration = Duration::from_millis(100);

    fn memory(free_mib: u64) -> Memory {
        Memory { total_bytes: 1024 * MIB, free_bytes: free_mib * MIB }
    }

    /// A program allocates as fast as two processors can next to a full store: free memory never
    /// ends while something is lent.
    #[test]
    fn a_program_that_allocates_at_full_speed_finds_free_memory() {
        let mut reclaim_target = ReclaimTarget::default();
        let (mut free, mut held) = (RESERVE, 900 * MIB);
        assert_eq!(reclaim_target.look(memory(16), held, RESERVE), 0);
        while held > 0 {
            let look = reclaim_target.next_look(Memory { free_bytes: free, ..memory(0) }, held, RESERVE, MOST);
            let taken = (look.as_micros() as u64 * (2 << 30)) / 1_000_000;
            assert!(taken < free, "{taken} taken of {free} within {look:?}");
            free -= taken;
            let given = reclaim_target.look(Memory { free_bytes: free, ..memory(0) }, held, RESERVE);
            assert!(given > 0 || free >= RESERVE);
            (free, held) = (free + given, held - given);
        }
        assert_eq!(reclaim_target.next_look(memory(16), 0, RESERVE, MOST), MOST);
    }

    #[test]
    fn what_is_taken_in_small_steps_is_given_back_too() {
        let mut reclaim_target = ReclaimTarget::default();
        reclaim_target.look(memory(16), 500 * MIB, RESERVE);
        let given: Vec<u64> =
            (1..=10).map(|step| reclaim_target.look(memory(16 - step), 500 * MIB, RESERVE) / MIB).collect();
        assert_eq!(given, [0, 0, 0, 0, 10, 0, 0, 0, 0, 10]);
    }

    /// A machine whose memory is full of page cache: hardly anything is free, and the free amount
    /// goes up and down.
    #[test]
    fn a_full_page_cache_sets_no_target() {
        let mut reclaim_target = ReclaimTarget::default();
        for free_mib in [3, 1, 4, 2, 3, 5, 2, 1, 4].into_iter().cycle().take(1000) {
            assert_eq!(reclaim_target.look(memory(free_mib), 500 * MIB, RESERVE), 0);
            assert_eq!(reclaim_target.next_look(memory(free_mib), 500 * MIB, RESERVE, MOST), MOST);
        }
    }

    #[test]
    fn what_is_free_beyond_the_reserve_may_be_taken() {
        let mut reclaim_target = ReclaimTarget::default();
        for free_mib in (16..600).rev() {
            assert_eq!(reclaim_target.look(memory(free_mib), 100 * MIB, RESERVE), 0);
        }
        // The lender never gives more than the growth of others, more than it holds, or anything
        // without a reserve.
        assert_eq!(reclaim_target.look(memory(10), 100 * MIB, RESERVE), 12 * MIB);
        assert_eq!(reclaim_target.look(memory(1), MIB, RESERVE), MIB);
        assert_eq!(reclaim_target.look(memory(0), 100 * MIB, 0), 0);
        // Without a reserve there is no reason to check early, either.
        assert_eq!(reclaim_target.next_look(memory(3), 100 * MIB, 0, MOST), MOST);
        // A change of the limit is no growth.
        let other = Memory { total_bytes: 4096 * MIB, free_bytes: 0 };
        assert_eq!(reclaim_target.look(other, 100 * MIB, RESERVE), 0);
    }
}
