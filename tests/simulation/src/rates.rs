//! The rates of events. Each seed draws its own rates, and leaves some events out altogether: rare
//! orders of events come up when few other events happen.

use borrower::catalog::rules::Rule;
use fastrand::Rng;

/// The way in which the kernel writes back stores through mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writeback {
    /// The kernel releases the page before the answer (until Linux 6.15).
    Temporary,
    /// The kernel holds the page until the answer (6.16).
    Held,
    /// The kernel also zeroes the page behind the end (from 6.17).
    Zeroing,
}

/// Rates, each per 1,000 or per 10,000, as the field says.
#[derive(Clone, Debug)]
pub struct Rates {
    /// Of 1,000 new operations: buffered writes.
    pub writes: u32,
    /// Stores through a mapping.
    pub stores: u32,
    /// Truncations, punched holes, direct writes.
    pub others: u32,
    /// Changes of attributes.
    pub attributes: u32,
    /// Opens.
    pub opens: u32,
    /// External changes.
    pub external_changes: u32,
    /// Of 1,000 external writes: those that are slow.
    pub slow_writes: u32,
    /// Of 1,000 opens: those for which an external writer cannot be excluded.
    pub unknown_writers: u32,
    /// The mount makes the kernel drop some pages, for any reason.
    pub drops: u32,
    /// The kernel forgets an inode, or the file is deleted and created again.
    pub forgets: u32,
    /// Of 10,000 steps: a lender dies or comes back.
    pub crashes: u32,
    /// A connection is lost.
    pub losses: u32,
    /// The daemon is killed, and a new one takes over.
    pub kills: u32,
    /// Of 1,000 answers: lies.
    pub lies: u32,
    /// Answers cut in the middle.
    pub cuts: u32,
    /// Of 1,000 operations on a backing file: failures.
    pub failures: u32,
    /// Of 1,000 steps of a change of a backing file: those without progress, because the disk is
    /// slow.
    pub stalls: u32,
    /// Of 1,000 steps of an open that drops pages: those without progress.
    pub slow_drops: u32,
    /// Of 1,000 evictions: events lost.
    pub lost_events: u32,
    /// Of 100 steps that do not advance an operation: events taken out of the ring.
    pub consumption: u32,
    /// Of 1,000 steps: evictions.
    pub evictions: u32,
    /// Of 1,000 steps: those that advance an operation.
    pub haste: u32,
    /// The way in which the kernel writes back stores through mappings.
    pub writeback: Writeback,
    /// A new file may have the same inode number and generation as an old one.
    pub twins: bool,
    /// The nodes have guests, and no lenders.
    pub guests: bool,
    /// The number of nodes.
    pub nodes: usize,
    /// The number of lenders, which all nodes share.
    pub lenders: usize,
    /// The number of files of a node.
    pub files: usize,
    /// The maximum number of operations in progress on a node.
    pub tasks_max: usize,
    /// The number of pages of a file.
    pub file_pages: u64,
}

/// The rules that have rates of their own ([`Rates::draw`]).
pub const SUITED: [Rule; 6] = [Rule::TakenOver, Rule::Wait, Rule::Whole, Rule::End, Rule::Gap, Rule::Zeroed];

impl Rates {
    /// Draws the rates. A third of the draws is calm: one node with one small file, and no
    /// failures. Several rules matter only if some steps follow each other on the same page, which
    /// failures and takeovers mostly interrupt. With a rule, the rates are those at which it
    /// matters most.
    pub fn draw(random: &mut Rng, rule: Option<Rule>) -> Rates {
        let is_calm = random.u32(0..3) == 0;
        let drawn = Rates::any(random);
        if let Some(rule) = rule {
            return drawn.suited_to(rule);
        }
        if is_calm { drawn.calm() } else { drawn }
    }

    fn calm(self) -> Rates {
        let file_pages = self.file_pages.min(3);
        let (nodes, files, guests) = (1, 1, false);
        let (crashes, losses, kills, forgets, lies, cuts) = (0, 0, 0, 0, 0, 0);
        Rates { nodes, files, guests, crashes, losses, kills, forgets, lies, cuts, file_pages, ..self }
    }

    /// The rates for a rule of [`SUITED`], which other rates show to be broken only after some
    /// hundred million steps. They are what runs with a wrong byte had in common.
    fn suited_to(self, rule: Rule) -> Rates {
        match rule {
            // The daemon is killed while its lenders keep what they have.
            Rule::TakenOver => {
                let kills = self.kills.max(15);
                Rates { nodes: 1, guests: false, crashes: 0, losses: 0, lost_events: 0, kills, ..self }
            }
            // Changes take long, so that READs meet them.
            Rule::Wait => Rates { stalls: self.stalls.max(800), writes: self.writes.max(200), ..self.calm() },
            // Few operations at once: others would cover the rest of the page.
            Rule::Whole => Rates { drops: 0, tasks_max: 3, writes: self.writes.max(150), ..self.calm() },
            // A store behind the end is written back and lent; then the end moves over it.
            Rule::End => Rates {
                writes: 0,
                stores: 200,
                others: 10 + self.others % 30,
                drops: 0,
                failures: 0,
                lost_events: 0,
                ..self.calm()
            },
            // A store behind the end is written back; then a write leaves a gap, and the page is
            // evicted before it is dropped.
            Rule::Gap => Rates {
                writes: 10 + self.writes % 50,
                stores: 200,
                others: 0,
                drops: 0,
                external_changes: 0,
                slow_drops: self.slow_drops.max(500),
                writeback: Writeback::Temporary,
                ..self.calm()
            },
            // The writeback of a store behind the end.
            Rule::Zeroed => Rates { stores: 200, writeback: Writeback::Zeroing, failures: 0, ..self.calm() },
            _ => self,
        }
    }

    fn any(random: &mut Rng) -> Rates {
        let few_pages = random.bool();
        let mut some = |share: u32, most: u32| if random.u32(0..100) < share { random.u32(1..=most) } else { 0 };
        Rates {
            writes: some(85, 400),
            stores: some(60, 250),
            others: some(70, 200),
            attributes: some(30, 100),
            opens: some(85, 200),
            external_changes: some(50, 80),
            slow_writes: some(70, 1000),
            unknown_writers: some(30, 500),
            drops: some(40, 80),
            forgets: some(30, 40),
            crashes: some(40, 20),
            losses: some(40, 30),
            kills: some(40, 25),
            lies: some(40, 300),
            cuts: some(40, 100),
            failures: some(30, 60),
            stalls: some(40, 950),
            slow_drops: some(40, 950),
            lost_events: some(50, 300),
            consumption: some(100, 40),
            guests: some(20, 1) == 1,
            nodes: some(35, 2) as usize + 1,
            lenders: some(50, 2) as usize + 1,
            files: some(40, 1) as usize + 1,
            evictions: some(100, 300).max(40),
            haste: some(100, 500).max(150),
            writeback: [Writeback::Temporary, Writeback::Held, Writeback::Zeroing][some(100, 3) as usize - 1],
            twins: some(50, 1) == 1,
            tasks_max: some(100, 10).max(2) as usize,
            file_pages: some(100, if few_pages { 3 } else { 12 }).max(1).into(),
        }
    }

    /// Returns whether this answer is a lie.
    pub fn lies(&self, random: &mut Rng) -> bool {
        random.u32(0..1000) < self.lies
    }

    /// Returns whether this answer is truncated.
    pub fn cuts(&self, random: &mut Rng) -> bool {
        random.u32(0..1000) < self.cuts
    }

    /// Returns whether this operation on a backing file fails.
    pub fn fails(&self, random: &mut Rng) -> bool {
        random.u32(0..1000) < self.failures
    }
}
