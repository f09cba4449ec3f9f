//! [`Context`] holds what all machines share, and [`Tally`] how much of what they did.

use crate::truth::Time;
use crate::weather::Weather;
use fastrand::Rng;
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tap::CopyHints;

/// What all machines share.
pub struct Context {
    /// The only source of chance.
    pub random: Rng,
    /// How often what happens.
    pub weather: Weather,
    /// The time.
    pub now: Time,
    /// What happened, if it is wanted.
    pub trace: Option<Vec<String>>,
    /// What was done.
    pub tally: Tally,
    /// Which machine has its turn.
    pub machine: usize,
    numbers: u64,
}

impl Context {
    /// At the beginning of time.
    pub fn new(mut random: Rng, trace: bool) -> Context {
        let weather = Weather::draw(&mut random);
        let trace = trace.then(Vec::new);
        Context { random, weather, now: 1, trace, tally: Tally::default(), machine: 0, numbers: 0 }
    }

    /// A number that was not given before.
    pub fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Notes what happens.
    pub fn note(&mut self, what: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:6} machine {}: {}", self.now, self.machine, what()));
        }
    }
}

/// How much of what was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Steps of everything.
    pub steps: u64,
    /// Reads of applications that ended.
    pub reads: u64,
    /// READs of the kernel that were answered in a batch with others.
    pub batched: u64,
    /// Pages compared.
    pub pages: u64,
    /// Changes that ended.
    pub changes: u64,
    /// Pages evicted.
    pub evictions: u64,
    /// Of those, told without their bytes.
    pub omitted: u64,
    /// Pages that a guest gave back, and that were what the file held.
    pub demoted: u64,
    /// Pages that a lender answered and that were taken.
    pub lent: u64,
    /// Changes made beside.
    pub beside: u64,
    /// Daemons killed.
    pub kills: u64,
    /// Lenders lost.
    pub losses: u64,
    /// Of those, resumed with their pages.
    pub resumed: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.steps += other.steps;
        self.reads += other.reads;
        self.batched += other.batched;
        self.pages += other.pages;
        self.changes += other.changes;
        self.evictions += other.evictions;
        self.omitted += other.omitted;
        self.lent += other.lent;
        self.demoted += other.demoted;
        self.beside += other.beside;
        self.kills += other.kills;
        self.losses += other.losses;
        self.resumed += other.resumed;
    }
}

/// Pages whose bytes are not wanted at their next eviction.
#[derive(Default)]
pub(crate) struct Hints(Mutex<HashSet<(u32, u32)>>);

impl Hints {
    pub(crate) fn omitted(&self) -> MutexGuard<'_, HashSet<(u32, u32)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CopyHints for Hints {
    fn omit(&self, generation: u32, index: u32) {
        self.omitted().insert((generation, index));
    }

    fn copy(&self, generation: u32, index: u32) {
        self.omitted().remove(&(generation, index));
    }

    fn copy_all(&self) {
        self.omitted().clear();
    }
}
