//! What others take of the memory that is to stay free, and what the lender gives back for it,
//! before they have to take it themselves.
//!
//! The kernel takes lent pages for whoever needs memory; but it has that one wait while it searches
//! and unmaps them, about as long as the allocation itself takes. So the reserve
//! ([`crate::Config::reserve_bytes`]) is more than a bound for the store's growth: what others take
//! of it, the lender puts back, and it looks so often that they cannot use it up in between.
//!
//! The lender returns memory in proportion to the growth of other consumers, not to the shortfall
//! below the reserve. Where the page cache fills all memory, as it does on any machine in the end,
//! next to nothing is ever free; then what is lent may stay until the kernel wants it, or somebody
//! grows.
//!
//! Pure: memory comes as numbers, and nothing here looks at a clock.

use crate::headroom::Memory;
use std::time::Duration;

/// What a machine's programs allocate in a second at the most, in bytes: two processors that do
/// nothing else.
const GROWTH_BYTES_PER_S: u64 = 4 << 30;

/// The shortest time between two looks.
pub const LOOK_MIN: Duration = Duration::from_millis(1);

/// Growth up to this part of all memory is noise: what the kernel's own cleaning leaves free now
/// and then.
const NOISE_SHARE: u64 = 256;
/// And up to this part of the reserve, where that is less.
const NOISE_RESERVE_SHARE: u64 = 4;

/// What was seen when the lender last had nothing to give, or gave.
#[derive(Clone, Copy)]
struct Seen {
    total_bytes: u64,
    /// What others have.
    others_bytes: u64,
}

/// How others' use of memory grows, from look to look.
#[derive(Default)]
pub struct Demand {
    seen: Option<Seen>,
    grows: bool,
}

impl Demand {
    /// A look: there is `memory`, of which the store holds `held_bytes`. Returns how many bytes it
    /// has to give back.
    pub fn look(&mut self, memory: Memory, held_bytes: u64, reserve_bytes: u64) -> u64 {
        let Memory { total_bytes, free_bytes } = memory;
        let others_bytes = total_bytes.saturating_sub(free_bytes).saturating_sub(held_bytes);
        let now = Seen { total_bytes, others_bytes };
        // Another limit has become the tightest: its numbers are no continuation.
        let before = *self.seen.insert(self.seen.filter(|seen| seen.total_bytes == total_bytes).unwrap_or(now));
        let grown_bytes = others_bytes.saturating_sub(before.others_bytes);
        let noise_bytes = (total_bytes / NOISE_SHARE).min(reserve_bytes / NOISE_RESERVE_SHARE);
        self.grows = free_bytes < reserve_bytes && grown_bytes > noise_bytes;
        // What they take in small steps adds up, as long as it is taken of the reserve.
        if self.grows || free_bytes >= reserve_bytes || others_bytes < before.others_bytes {
            self.seen = Some(now);
        }
        if !self.grows {
            return 0;
        }
        // Room for the same growth once more, as that is what comes until the next look.
        let wanted_bytes = reserve_bytes.saturating_add(grown_bytes.min(reserve_bytes));
        wanted_bytes.saturating_sub(free_bytes).min(grown_bytes.saturating_mul(2)).min(held_bytes)
    }

    /// Whether others have just taken of the reserve, so that nothing is to be lent until the next
    /// look.
    pub fn grows(&self) -> bool {
        self.grows
    }

    /// Time until the next look: less than it takes others to use up what is free, but `most` where
    /// there is nothing to give, no reserve to give it for, or where nothing is free anyway and
    /// nobody grows.
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

    /// Somebody allocates as fast as two processors can beside a full store: the free memory never
    /// ends while there is something lent.
    #[test]
    fn who_allocates_at_full_speed_finds_free_memory() {
        let mut demand = Demand::default();
        let (mut free, mut held) = (RESERVE, 900 * MIB);
        assert_eq!(demand.look(memory(16), held, RESERVE), 0);
        while held > 0 {
            let look = demand.next_look(Memory { free_bytes: free, ..memory(0) }, held, RESERVE, MOST);
            let taken = (look.as_micros() as u64 * (2 << 30)) / 1_000_000;
            assert!(taken < free, "{taken} taken of {free} within {look:?}");
            free -= taken;
            let given = demand.look(Memory { free_bytes: free, ..memory(0) }, held, RESERVE);
            assert!(given > 0 || free >= RESERVE);
            (free, held) = (free + given, held - given);
        }
        assert_eq!(demand.next_look(memory(16), 0, RESERVE, MOST), MOST);
    }

    #[test]
    fn what_is_taken_in_small_steps_is_given_back_too() {
        let mut demand = Demand::default();
        demand.look(memory(16), 500 * MIB, RESERVE);
        let given: Vec<u64> = (1..=10).map(|step| demand.look(memory(16 - step), 500 * MIB, RESERVE) / MIB).collect();
        assert_eq!(given, [0, 0, 0, 0, 10, 0, 0, 0, 0, 10]);
    }

    /// A machine whose memory is full of page cache: hardly anything is free, and what is free goes
    /// up and down.
    #[test]
    fn a_full_page_cache_is_no_demand() {
        let mut demand = Demand::default();
        for free_mib in [3, 1, 4, 2, 3, 5, 2, 1, 4].into_iter().cycle().take(1000) {
            assert_eq!(demand.look(memory(free_mib), 500 * MIB, RESERVE), 0);
            assert_eq!(demand.next_look(memory(free_mib), 500 * MIB, RESERVE, MOST), MOST);
        }
    }

    #[test]
    fn what_is_free_beyond_the_reserve_may_be_taken() {
        let mut demand = Demand::default();
        for free_mib in (16..600).rev() {
            assert_eq!(demand.look(memory(free_mib), 100 * MIB, RESERVE), 0);
        }
        // Nor is more given than others have grown by, than is held, or without a reserve.
        assert_eq!(demand.look(memory(10), 100 * MIB, RESERVE), 12 * MIB);
        assert_eq!(demand.look(memory(1), MIB, RESERVE), MIB);
        assert_eq!(demand.look(memory(0), 100 * MIB, 0), 0);
        // Without one there is nothing to look for, either.
        assert_eq!(demand.next_look(memory(3), 100 * MIB, 0, MOST), MOST);
        // Another limit is no growth.
        let other = Memory { total_bytes: 4096 * MIB, free_bytes: 0 };
        assert_eq!(demand.look(other, 100 * MIB, RESERVE), 0);
    }
}
