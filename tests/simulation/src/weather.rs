//! How often what happens. Each seed draws its own, and leaves some things out altogether: rare
//! orders of events come up when little else happens.

use fastrand::Rng;

/// How the kernel writes back what mappings have stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writeback {
    /// It lets go of the page before the answer (until Linux 6.15).
    Temporary,
    /// It holds the page until the answer (6.16).
    Held,
    /// It zeroes the page behind the end, too (from 6.17).
    Zeroing,
}

/// Chances, in so many of 1,000 or of 10,000, as each says.
#[derive(Clone, Debug)]
pub struct Weather {
    /// Of 1,000 new operations: buffered writes.
    pub writes: u32,
    /// Stores through a mapping.
    pub stores: u32,
    /// Truncations, punched holes, direct writes.
    pub others: u32,
    /// Attributes changed.
    pub attributes: u32,
    /// Opens.
    pub opens: u32,
    /// Changes beside the mount.
    pub beside: u32,
    /// Of 1,000 writes beside: those that are slow.
    pub slow_writes: u32,
    /// Of 1,000 opens: those that cannot know that nobody writes the file below.
    pub unknown_writers: u32,
    /// The mount has the kernel drop some pages, for whatever reason.
    pub drops: u32,
    /// The kernel forgets an inode, or the file is deleted and made anew.
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
    /// Of 1,000 operations below: failures.
    pub failures: u32,
    /// Of 1,000 steps of a change below: those in which nothing happens, because the disk is slow.
    pub stalls: u32,
    /// Of 1,000 steps of an open in which it drops pages: those in which nothing happens.
    pub slow_drops: u32,
    /// Of 1,000 evictions: events lost.
    pub lost_events: u32,
    /// Of 100 steps that are not spent on what is under way: events taken out of the ring.
    pub consumption: u32,
    /// Of 1,000 steps: evictions.
    pub evictions: u32,
    /// Of 1,000 steps: a step of something that is under way.
    pub haste: u32,
    /// How the kernel writes back what mappings have stored.
    pub writeback: Writeback,
    /// A new file may have all that told an old one from it: inode number and generation.
    pub twins: bool,
    /// The machines have guests, and no lenders.
    pub guests: bool,
    /// Machines.
    pub machines: usize,
    /// Lenders, which all machines share.
    pub lenders: usize,
    /// Files of a machine.
    pub files: usize,
    /// Operations that may be under way at once on a machine.
    pub tasks_max: usize,
    /// Pages of a file.
    pub file_pages: u64,
}

impl Weather {
    /// Draws one. A third of them is calm: one machine with one small file, and nothing fails.
    /// Several rules matter only if some steps follow each other on the same page, which failures
    /// and takeovers mostly interrupt.
    pub fn draw(random: &mut Rng) -> Weather {
        let is_calm = random.u32(0..3) == 0;
        let drawn = Weather::any(random);
        if !is_calm {
            return drawn;
        }
        let file_pages = drawn.file_pages.min(3);
        let (machines, files, guests) = (1, 1, false);
        let (crashes, losses, kills, forgets, lies, cuts) = (0, 0, 0, 0, 0, 0);
        Weather { machines, files, guests, crashes, losses, kills, forgets, lies, cuts, file_pages, ..drawn }
    }

    fn any(random: &mut Rng) -> Weather {
        let few_pages = random.bool();
        let mut some = |share: u32, most: u32| if random.u32(0..100) < share { random.u32(1..=most) } else { 0 };
        Weather {
            writes: some(85, 400),
            stores: some(60, 250),
            others: some(70, 200),
            attributes: some(30, 100),
            opens: some(85, 200),
            beside: some(50, 80),
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
            machines: some(35, 2) as usize + 1,
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

    /// Whether this answer is a lie.
    pub fn lies(&self, random: &mut Rng) -> bool {
        random.u32(0..1000) < self.lies
    }

    /// Whether this answer is cut in the middle.
    pub fn cuts(&self, random: &mut Rng) -> bool {
        random.u32(0..1000) < self.cuts
    }

    /// Whether this operation below fails.
    pub fn fails(&self, random: &mut Rng) -> bool {
        random.u32(0..1000) < self.failures
    }
}
