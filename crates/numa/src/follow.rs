//! Carrefour for a real process: it collects samples and moves pages, a period at a time.

use crate::carrefour::{Carrefour, Decision, Period, Sample};
use crate::process::{Moved, Process, Unit};
use crate::sampling::{Access, Source};
use crate::{NodeId, PAGE_BYTES};
use hashbrown::HashMap;
use std::io;

/// The maximum number of accesses of a period; more are ignored.
const ACCESSES_MAX: usize = 1 << 16;

/// The maximum number of faults a second, on average, that sampling causes in a process. All of its
/// pages are protected at once: the more it has, the less often.
const FAULTS_PER_S_MAX: u64 = 20_000;

/// A process that Carrefour manages.
pub struct Followed {
    process: Process,
    carrefour: Carrefour,
    accesses: Vec<Access>,
    /// Periods until its pages are protected again.
    protected_for: u64,
    /// The results so far.
    pub done: Done,
}

/// In pages of 4 KiB, except for `samples`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    /// Sampled accesses.
    pub samples: u64,
    /// Moved to another node.
    pub moved_pages: u64,
    /// Pages that the kernel refused to move.
    pub kept_pages: u64,
}

impl Followed {
    /// A process whose memory may be on these nodes.
    pub fn new(process: Process, nodes: &[NodeId]) -> Followed {
        let carrefour = Carrefour::new(nodes, u64::from(process.pid()));
        Followed { process, carrefour, accesses: Vec::new(), protected_for: 0, done: Done::default() }
    }

    /// Its process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Begins a period of a second, in which the process's accesses are sampled.
    ///
    /// # Errors
    /// Fails if the process has ended, or may not be changed.
    pub fn begin_period(&mut self, source: Source) -> io::Result<()> {
        self.protected_for = self.protected_for.saturating_sub(1);
        if source == Source::Writes && self.protected_for == 0 {
            self.process.protect_pages()?;
            self.protected_for = self.process.resident_pages()?.div_ceil(FAULTS_PER_S_MAX);
            self.carrefour.sampled_every(u32::try_from(self.protected_for).unwrap_or(u32::MAX));
        }
        Ok(())
    }

    /// Adds one of its accesses.
    pub fn accessed(&mut self, access: Access) {
        if self.accesses.len() < ACCESSES_MAX {
            self.accesses.push(access);
        }
    }

    /// The pages that were accessed in the period that ends, and their nodes.
    ///
    /// # Errors
    /// Fails if the process has ended, or may not be read.
    pub fn samples(&mut self) -> io::Result<Vec<Sample>> {
        let accesses = std::mem::take(&mut self.accesses);
        // All pages of a folio count as one, because it is moved as one.
        let folios = self.process.folios()?;
        let mut heads: HashMap<u64, Option<u64>> = HashMap::new();
        let mut used: Vec<(u64, NodeId)> = Vec::with_capacity(accesses.len());
        for access in &accesses {
            let head = match heads.get(&access.page) {
                Some(head) => *head,
                None => *heads.entry(access.page).insert(folios.first_page_of(access.page)?).get(),
            };
            used.extend(head.map(|head| (head, access.node)));
        }
        let mut units: Vec<Unit> = used.iter().map(|(page, _)| Unit { page: *page, pages: 1 }).collect();
        units.sort_unstable_by_key(|unit| unit.page);
        units.dedup();
        let homes: HashMap<u64, NodeId> = units
            .iter()
            .zip(self.process.nodes_of(&units)?)
            .filter_map(|(unit, home)| Some((unit.page, home?)))
            .collect();
        self.done.samples += used.len() as u64;
        let sample = |(page, node): (u64, NodeId)| Some(Sample { page, node, home: *homes.get(&page)? });
        Ok(used.into_iter().filter_map(sample).collect())
    }

    /// Decides, and moves. `all` has the samples of all targets by the node of the page, in the
    /// order of the nodes.
    ///
    /// # Errors
    /// Fails if the process has ended, or may not be changed.
    pub fn decide(&mut self, samples: &[Sample], all: &[u64], budget_bytes: u64) -> io::Result<Decision> {
        let period = Period { accesses_per_us: None, budget_pages: (budget_bytes / PAGE_BYTES) as usize };
        let mut decision = self.carrefour.decide(samples, all, period);
        let folios = self.process.folios()?;
        let mut left = budget_bytes / PAGE_BYTES;
        let mut moves: Vec<(Unit, NodeId)> = Vec::new();
        for one in &decision.moves {
            let pages = folios.pages_of(one.page)?;
            if pages > left {
                break;
            }
            left -= pages;
            moves.push((Unit { page: one.page, pages }, one.to));
        }
        decision.moves.truncate(moves.len());
        if !moves.is_empty() {
            for ((unit, _), moved) in moves.iter().zip(self.process.move_to(&moves)?) {
                match moved {
                    Moved::Yes => self.done.moved_pages += unit.pages,
                    Moved::Gone => {}
                    _ => self.done.kept_pages += unit.pages,
                }
            }
        }
        Ok(decision)
    }
}
