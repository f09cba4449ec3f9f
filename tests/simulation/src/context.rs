//! [`Context`]: the state that all nodes share. [`Statistics`]: counts of their operations.

use crate::oracle::Time;
use crate::rates::Rates;
use borrower::catalog::rules::Rule;
use fastrand::Rng;
use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tap::CopyHints;

/// The state that all nodes share.
pub struct Context {
    /// The only source of random numbers.
    pub random: Rng,
    /// The rates of events.
    pub rates: Rates,
    /// The virtual time.
    pub now: Time,
    /// The trace, if it is wanted.
    pub trace: Option<Vec<String>>,
    /// The counts of operations.
    pub statistics: Statistics,
    /// The node that does the current step.
    pub node: usize,
    numbers: u64,
}

impl Context {
    /// Returns a context at time 0, with the rates at which `rule` matters most.
    pub fn new(mut random: Rng, rule: Option<Rule>, trace: bool) -> Context {
        let rates = Rates::draw(&mut random, rule);
        let trace = trace.then(Vec::new);
        Context { random, rates, now: 1, trace, statistics: Statistics::default(), node: 0, numbers: 0 }
    }

    /// Returns a new number.
    pub fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Adds a line to the trace.
    pub fn note(&mut self, what: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:6} node {}: {}", self.now, self.node, what()));
        }
    }
}

/// Counts of operations and events.
#[derive(Clone, Copy, Debug, Default)]
pub struct Statistics {
    /// All steps.
    pub steps: u64,
    /// Reads of applications that have ended.
    pub reads: u64,
    /// READs of the kernel that were answered in a batch with others.
    pub batched: u64,
    /// Pages compared.
    pub pages: u64,
    /// Changes that have ended.
    pub changes: u64,
    /// Pages evicted.
    pub evictions: u64,
    /// Of the evictions, those without their bytes.
    pub omitted: u64,
    /// Pages that a guest gave back, and that equalled the file's.
    pub demoted: u64,
    /// Pages from lenders that were used.
    pub lent: u64,
    /// External changes.
    pub external_changes: u64,
    /// Daemons killed.
    pub kills: u64,
    /// Lenders lost.
    pub losses: u64,
    /// Of the losses, those after which the session was resumed with its pages.
    pub resumed: u64,
}

impl std::ops::AddAssign for Statistics {
    fn add_assign(&mut self, other: Statistics) {
        self.steps += other.steps;
        self.reads += other.reads;
        self.batched += other.batched;
        self.pages += other.pages;
        self.changes += other.changes;
        self.evictions += other.evictions;
        self.omitted += other.omitted;
        self.lent += other.lent;
        self.demoted += other.demoted;
        self.external_changes += other.external_changes;
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
