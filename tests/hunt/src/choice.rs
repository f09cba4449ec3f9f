//! Chooses a process's next operation: from its seed, and from the time, so that all processes meet
//! at the same few files.
//!
//! Pure logic: time and sizes are the input, a plan is the output.

use crate::ledger::{BLOCKS, PAGE_BLOCKS, SLOTS};
use crate::operation::{Operation, WriteMode};

/// The period after which the files change at which processes meet.
const HOT_MS: u64 = 700;
/// One such period in so many is for everything. In the others processes meet at one page and its
/// neighbour, with quick operations, so that they race.
const WIDE_ONE_IN: u64 = 4;
/// In a duel, one operation in so many is done elsewhere.
const ELSEWHERE_ONE_IN: u32 = 32;
/// Of so many operations ten are on the hot files; the others keep the cache full.
const OUT_OF: u32 = 16;
const HOT_OF: u32 = 10;
/// Files that are hot at a time.
const HOT_SLOTS: u64 = 3;
/// Blocks of the part of a hot file at which processes meet.
const HOT_BLOCKS: u32 = 64;
/// Draws until a quick operation is found, before a slow one is done.
const DRAWS_MAX: u32 = 8;
/// The maximum number of blocks of an operation: 32 KiB.
pub const COUNT_MAX: u32 = 64;

/// An operation on blocks of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The operation.
    pub operation: Operation,
    /// The file.
    pub slot: u32,
    /// The first block, within the file if its size has not changed since it was chosen.
    pub first: u32,
    /// The number of blocks; at least one.
    pub count: u32,
}

impl Plan {
    /// As a number, for the ledger.
    pub fn pack(self) -> u64 {
        (self.operation as u64) << 48 | u64::from(self.slot) << 32 | u64::from(self.first) << 16 | u64::from(self.count)
    }

    /// From the ledger.
    pub fn unpack(raw: u64) -> Plan {
        let part = |shift: u32| (raw >> shift) as u16;
        Plan {
            operation: Operation::from_index(usize::from(part(48))),
            slot: part(32).into(),
            first: part(16).into(),
            count: part(0).into(),
        }
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Plan { operation, slot, first, count } = self;
        write!(f, "{operation} of {count} blocks from block {first} of file {slot}")
    }
}

/// Whether mappings may store into a file, with `--write through`. An append in parallel would lose
/// bytes there (docs/design/limits.md, L7).
pub fn is_stored_into(slot: u32, mode: WriteMode) -> bool {
    mode == WriteMode::Back || slot.is_multiple_of(2)
}

/// Draws plans.
pub struct Chooser {
    random: fastrand::Rng,
    /// Of the run, the same in all processes.
    seed: u64,
    mode: WriteMode,
    operations: Vec<Operation>,
    weights: u32,
}

impl Chooser {
    /// For the process with that number.
    pub fn new(seed: u64, worker: u32, mode: WriteMode, operations: Vec<Operation>) -> Chooser {
        let weights = operations.iter().map(|operation| operation.weight()).sum();
        let random = fastrand::Rng::with_seed(seed ^ (u64::from(worker) + 1) << 32);
        Chooser { random, seed, mode, operations, weights }
    }

    /// The next plan. `size` tells the blocks of a file.
    pub fn next(&mut self, now_ms: u64, size: impl Fn(u32) -> u32) -> Plan {
        let epoch = now_ms / HOT_MS;
        let meets = !epoch.is_multiple_of(WIDE_ONE_IN) && self.random.u32(..ELSEWHERE_ONE_IN) != 0;
        if let Some(plan) = meets.then(|| self.duel(epoch, &size)).flatten() {
            return plan;
        }
        let operation = self.operation();
        let is_hot = self.random.u32(..OUT_OF) < HOT_OF;
        let slot = if is_hot { self.hot(epoch) } else { self.random.u32(..SLOTS as u32) };
        let slot = self.fit(operation, slot);
        let size = size(slot).clamp(1, BLOCKS as u32);
        // Near the end of every second file processes meet at the end, which moves.
        let part = match (is_hot, (epoch ^ u64::from(slot)) & 1) {
            (true, 0) => (mix(self.seed ^ epoch ^ u64::from(slot)) % u64::from(size)) as u32,
            (true, _) => size.saturating_sub(HOT_BLOCKS / 2),
            (false, _) => self.random.u32(..size),
        };
        let first = (part + if is_hot { self.random.u32(..HOT_BLOCKS) } else { 0 }).min(size - 1);
        // Mostly parts of pages, sometimes many whole ones.
        let count = match self.random.u32(..8) {
            0..4 => self.random.u32(1..=PAGE_BLOCKS),
            4..7 => self.random.u32(1..=3 * PAGE_BLOCKS),
            _ => self.random.u32(1..=COUNT_MAX),
        };
        Plan { operation, slot, first, count: count.min(size - first).max(1) }
    }

    /// The random numbers, for other choices.
    pub fn random(&mut self) -> &mut fastrand::Rng {
        &mut self.random
    }

    /// At one page and its neighbour, in the middle of a file or at its end.
    fn duel(&mut self, epoch: u64, size: impl Fn(u32) -> u32) -> Option<Plan> {
        let operation = (0..DRAWS_MAX).map(|_| self.operation()).find(|operation| operation.is_quick())?;
        let draw = mix(self.seed ^ mix(epoch));
        let slot = self.fit(operation, (draw % SLOTS as u64) as u32);
        let size = size(slot).clamp(1, BLOCKS as u32);
        let page = if draw >> 63 == 0 { (draw >> 32) as u32 % size } else { size.saturating_sub(PAGE_BLOCKS) };
        let page = page - page % PAGE_BLOCKS;
        let first = (page + self.random.u32(..2 * PAGE_BLOCKS)).min(size - 1);
        let count = if self.random.u32(..8) == 0 { 2 * PAGE_BLOCKS } else { self.random.u32(1..=4) };
        Some(Plan { operation, slot, first, count: count.min(size - first) })
    }

    /// A file that is suitable for this operation.
    fn fit(&self, operation: Operation, slot: u32) -> u32 {
        use Operation::{AppendBesideStore, CopyBesideStore, Store};
        let stores = matches!(operation, Store | AppendBesideStore | CopyBesideStore);
        if stores && !is_stored_into(slot, self.mode) { slot - 1 } else { slot }
    }

    fn operation(&mut self) -> Operation {
        let mut left = self.random.u32(..self.weights);
        for operation in &self.operations {
            match left.checked_sub(operation.weight()) {
                Some(rest) => left = rest,
                None => return *operation,
            }
        }
        unreachable!("the weights add up")
    }

    fn hot(&mut self, epoch: u64) -> u32 {
        let which = self.random.u64(..HOT_SLOTS);
        (mix(self.seed ^ mix(epoch * HOT_SLOTS + which)) % SLOTS as u64) as u32
    }
}

fn mix(word: u64) -> u64 {
    fastrand::Rng::with_seed(word).u64(..)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn plans_are_within_files_and_processes_meet() {
        let mut meet: HashMap<u32, u32> = HashMap::new();
        for mode in [WriteMode::Through, WriteMode::Back] {
            let mut chooser = Chooser::new(3, 1, mode, Operation::ALL.to_vec());
            for step in 0..20_000 {
                let plan = chooser.next(step / 4, |slot| slot * 40);
                assert!(plan.slot < SLOTS as u32 && plan.count >= 1 && plan.count <= COUNT_MAX, "{plan}");
                assert!(plan.first + plan.count <= (plan.slot * 40).max(1), "{plan}");
                assert_eq!(Plan::unpack(plan.pack()), plan);
                if mode == WriteMode::Through {
                    let stored = is_stored_into(plan.slot, mode);
                    assert!(plan.operation != Operation::Store || stored, "{plan}");
                    *meet.entry(plan.slot).or_default() += 1;
                }
            }
        }
        let mut counts: Vec<u32> = meet.values().copied().collect();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        assert!(counts.iter().take(12).sum::<u32>() > 12_000, "{counts:?}");
        assert!(counts.len() > SLOTS / 2, "{counts:?}");
    }

    #[test]
    fn a_seed_gives_the_same_plans() {
        let plans = |seed, worker| {
            let mut chooser = Chooser::new(seed, worker, WriteMode::Back, Operation::ALL.to_vec());
            (0..50).map(|step| chooser.next(step * 100, |_| 500)).collect::<Vec<_>>()
        };
        assert_eq!(plans(1, 0), plans(1, 0));
        assert_ne!(plans(1, 0), plans(1, 1));
        assert_ne!(plans(1, 0), plans(2, 0));
    }
}
