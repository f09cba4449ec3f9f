//! What the watch has seen, as it adds up: the curves, and what the mount would make of the same
//! reads. Without clocks and I/O.

use borrower::policy::streams::Streams;
use mrc::{Key, Lru, Victims};
use page::{PAGE_SIZE, PageRange};
use std::collections::{BTreeSet, HashMap, HashSet};
use tap::{Seen, SeenKind};

/// Files whose streams are followed at once. Beyond, all are forgotten, and those that go on are
/// found anew.
const FILES_MAX: usize = 16_384;
/// Pages that are added in a row and make one READ: as much as the kernel asks a mount for at once.
const READ_PAGES_MAX: u64 = 256;
/// Reads that are waited for at once, beside streams. Beyond, what they wait is not counted.
const WAITING_MAX: usize = 4096;
/// Sampled pages of streams that are remembered. Beyond, fewer are sampled.
const SEQUENTIAL_MAX: usize = 65_536;
/// Waits from which on their mean says something.
const WAITS_MIN: u32 = 32;

/// Pages, and what was read at once.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counts {
    /// Read by programs, as far as it was seen.
    pub read: f64,
    /// Brought from the disk to be read.
    pub missed: u64,
    /// Of these, in sequential streams.
    pub streamed: u64,
    /// READs of the others.
    pub reads: u64,
    /// Added to be written.
    pub written: u64,
    /// Mapped as they were cached.
    pub mapped: u64,
}

impl Counts {
    /// As bytes.
    pub(super) fn read_bytes(&self) -> u64 {
        (self.read * PAGE_SIZE as f64) as u64
    }

    /// As bytes.
    pub(super) fn missed_bytes(&self) -> u64 {
        self.missed * PAGE_SIZE as u64
    }
}

/// Pages that were read in streams.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Returning {
    sampled: f64,
    evicted_before: f64,
    /// Pages of the smallest pool that would have had all of these.
    pub pool_pages: f64,
}

impl Returning {
    /// Share of them that had been evicted while it was watched.
    pub(super) fn share(&self) -> f64 {
        if self.sampled > 0.0 { self.evicted_before / self.sampled } else { 0.0 }
    }
}

/// Pages that were added one behind the other.
struct Run {
    file: u64,
    range: PageRange,
    /// What the first of them was waited for.
    wait_us: Option<f64>,
}

/// What was seen.
pub(super) struct Observed {
    /// What pools behind this page cache would have done.
    pub(super) victims: Victims,
    /// What pools behind this page cache would have done, were streams lent, too; and what is known
    /// by it of the pages that were read in streams.
    all: Victims,
    returning: Returning,
    /// What LRU caches would have done instead of this page cache.
    pub(super) lru: Lru,
    counts: Counts,
    streams: HashMap<u64, Streams>,
    run: Option<Run>,
    /// Sampled pages that were read in streams: their eviction sends nothing.
    sequential: BTreeSet<Key>,
    /// First pages of runs that are over, and may be waited for still.
    waiting: HashSet<(u64, u64)>,
    waits_us: f64,
    waits: u32,
    read_all: Option<u64>,
}

impl Default for Observed {
    fn default() -> Observed {
        Observed {
            victims: Victims::new(false),
            all: Victims::new(false),
            returning: Returning::default(),
            lru: Lru::default(),
            counts: Counts::default(),
            streams: HashMap::new(),
            run: None,
            sequential: BTreeSet::new(),
            waiting: HashSet::new(),
            waits_us: 0.0,
            waits: 0,
            read_all: None,
        }
    }
}

impl Observed {
    /// Takes what was seen, in order. What is added to be written is known as such only right
    /// after: so much of it as is in one batch.
    pub(super) fn note(&mut self, batch: &[Seen]) {
        let file = |seen: &Seen| mrc::file(seen.device.into(), seen.inode);
        let written = batch.iter().filter(|seen| seen.kind == SeenKind::Written);
        let written: HashSet<(u64, u64)> = written.map(|seen| (file(seen), seen.index)).collect();
        for seen in batch {
            let name = file(seen);
            let range = PageRange { first: seen.index, end: seen.index.saturating_add(seen.pages.into()) };
            let keys = (range.first..range.end).map(|index| Key::new(name, index));
            match seen.kind {
                SeenKind::Added if written.contains(&(name, seen.index)) => {
                    self.counts.written += range.end - range.first;
                    keys.for_each(|key| {
                        self.victims.voided(key);
                        self.all.voided(key);
                    });
                }
                SeenKind::Added => self.add(name, range),
                SeenKind::Read => {
                    let threshold = self.lru.threshold();
                    if let Some(key) = Some(Key::new(name, seen.index)).filter(|key| key.is_below(threshold)) {
                        self.counts.read += mrc::EVERY_PAGE as f64 / threshold as f64;
                        self.lru.access(key);
                    }
                }
                SeenKind::Evicted => {
                    self.end_run_with(name, range);
                    for key in keys {
                        self.all.evicted(key);
                        if key.is_below(self.victims.threshold()) && !self.sequential.remove(&key) {
                            self.victims.evicted(key);
                        }
                    }
                }
                SeenKind::Invalidated => {
                    self.end_run_with(name, range);
                    keys.for_each(|key| {
                        self.victims.voided(key);
                        self.all.voided(key);
                        self.sequential.remove(&key);
                    });
                }
                SeenKind::Waited(time) => {
                    let is_first = |run: &&mut Run| run.file == name && run.range.first == seen.index;
                    if let Some(run) = self.run.as_mut().filter(|run| is_first(run)) {
                        run.wait_us = Some(time.as_secs_f64() * 1e6);
                    } else if self.waiting.remove(&(name, seen.index)) {
                        self.wait(time.as_secs_f64() * 1e6);
                    }
                }
                SeenKind::Mapped => self.counts.mapped += range.end - range.first,
                SeenKind::Written => {}
            }
        }
        self.end_run();
    }

    /// So many pages were read in all: that is known only where nothing else is on the devices that
    /// were watched.
    pub(super) fn count_reads(&mut self, pages: u64) {
        self.lru.count(pages);
        self.read_all = Some(pages);
    }

    /// Pages above are of no interest any more.
    pub(super) fn threshold(&self) -> u64 {
        self.lru.threshold().max(self.victims.threshold()).max(self.all.threshold())
    }

    /// What was counted.
    pub(super) fn counts(&self) -> Counts {
        Counts { read: self.read_all.map_or(self.counts.read, |pages| pages as f64), ..self.counts }
    }

    /// Whether what was read in streams comes back.
    pub(super) fn returning(&self) -> Returning {
        self.returning
    }

    /// What programs waited for a page that was missed, beside streams, in microseconds: the mean,
    /// as it is what makes up the time that they lose. A disk that is held back now and then is
    /// fast in the median.
    pub(super) fn wait_us(&self) -> Option<f64> {
        (self.waits >= WAITS_MIN).then(|| self.waits_us / f64::from(self.waits))
    }

    fn add(&mut self, file: u64, added: PageRange) {
        if let Some(run) = &mut self.run
            && run.file == file
            && run.range.end == added.first
            && added.end - run.range.first <= READ_PAGES_MAX
        {
            run.range.end = added.end;
            return;
        }
        self.end_run();
        self.run = Some(Run { file, range: added, wait_us: None });
    }

    /// The run is over if it has some of these pages: what happens next to them happens after.
    fn end_run_with(&mut self, file: u64, range: PageRange) {
        if self.run.as_ref().is_some_and(|run| run.file == file && run.range.overlaps(range)) {
            self.end_run();
        }
    }

    /// What the mount would have got as a READ.
    fn end_run(&mut self) {
        let Some(Run { file, range, wait_us }) = self.run.take() else { return };
        if self.streams.len() >= FILES_MAX && !self.streams.contains_key(&file) {
            self.streams.clear();
        }
        let is_sequential = self.streams.entry(file).or_default().note(range);
        let pages = range.end - range.first;
        self.counts.missed += pages;
        match is_sequential {
            true => self.counts.streamed += pages,
            false => self.counts.reads += 1,
        }
        for key in (range.first..range.end).map(|index| Key::new(file, index)) {
            if key.is_below(self.all.threshold()) {
                let needed_pages = self.all.missed(key);
                if is_sequential {
                    self.returning.sampled += 1.0;
                    self.returning.evicted_before += f64::from(u8::from(needed_pages.is_some()));
                    self.returning.pool_pages = self.returning.pool_pages.max(needed_pages.unwrap_or(0.0));
                }
            }
            if !key.is_below(self.victims.threshold()) {
                continue;
            }
            // As at the mount, where what a lender had is lent again.
            let was_there = self.victims.missed(key).is_some();
            if is_sequential && !was_there {
                self.sequential.insert(key);
                self.sample_fewer();
            } else {
                self.sequential.remove(&key);
            }
        }
        match wait_us {
            _ if is_sequential => {}
            Some(us) => self.wait(us),
            None => {
                // Some nobody waits for: read-ahead that was asked for, reads that failed.
                if self.waiting.len() >= WAITING_MAX {
                    self.waiting.clear();
                }
                self.waiting.insert((file, range.first));
            }
        }
    }

    /// Forgets pages of streams that are not sampled any more. If there are too many still, the
    /// sample becomes smaller: a page of which it was forgotten that it is a stream's must not be
    /// taken for one that is lent.
    fn sample_fewer(&mut self) {
        if self.sequential.len() > SEQUENTIAL_MAX
            && let Some(highest) = self.sequential.last()
        {
            self.victims.lower(*highest);
        }
        let threshold = self.victims.threshold();
        while self.sequential.last().is_some_and(|key| !key.is_below(threshold)) {
            self.sequential.pop_last();
        }
    }

    fn wait(&mut self, us: f64) {
        self.waits_us += us;
        self.waits = self.waits.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn seen(kind: SeenKind, index: u64, pages: u32) -> Seen {
        Seen { kind, device: 1, inode: 2, index, pages }
    }

    #[test]
    fn what_is_written_is_not_missed() {
        let mut observed = Observed::default();
        observed.note(&[
            seen(SeenKind::Added, 5, 1),
            seen(SeenKind::Written, 5, 1),
            seen(SeenKind::Added, 900, 1),
            seen(SeenKind::Waited(Duration::from_micros(300)), 900, 1),
            seen(SeenKind::Read, 900, 1),
        ]);
        let counts = observed.counts();
        assert_eq!((counts.missed, counts.written, counts.read), (1, 1, 1.0));
        assert_eq!((observed.waits_us, observed.waits, observed.wait_us()), (300.0, 1, None));
        // A reader that waits for long is heard of later, and after others.
        observed.note(&[seen(SeenKind::Added, 5000, 1), seen(SeenKind::Added, 7000, 1)]);
        observed.note(&[seen(SeenKind::Waited(Duration::from_micros(100)), 5000, 1)]);
        assert_eq!((observed.waits_us, observed.waits), (400.0, 2));
    }

    #[test]
    fn what_is_remembered_of_streams_is_bounded() {
        let mut observed = Observed::default();
        for page in 0..4 * SEQUENTIAL_MAX as u64 {
            observed.note(&[seen(SeenKind::Added, page, 1)]);
        }
        let sampled = observed.sequential.len();
        assert!(sampled <= SEQUENTIAL_MAX && sampled > SEQUENTIAL_MAX / 2, "{sampled}");
        assert!(observed.victims.threshold() < mrc::EVERY_PAGE / 3);
    }

    #[test]
    fn a_stream_is_found_and_not_lent() {
        let mut observed = Observed::default();
        for round in 0..3u64 {
            // A stream page by page, and beside it the same ten pages of random places, over and
            // over.
            for page in 0..20_000 {
                let mut batch = vec![seen(SeenKind::Added, page, 1)];
                if page % 100 == 0 {
                    let place = 10_000_000 + page / 100 % 10 * 77_777;
                    batch.extend([seen(SeenKind::Added, place, 1), seen(SeenKind::Evicted, place, 1)]);
                }
                batch.extend((round > 0 || page > 500).then(|| seen(SeenKind::Evicted, (page + 19_500) % 20_000, 1)));
                observed.note(&batch);
            }
        }
        let counts = observed.counts();
        assert_eq!(counts.missed, 60_600);
        assert!(counts.streamed > 56_000 && counts.streamed <= 60_000, "{counts:?}");
        // The beginning of the stream may come back, and so do those ten.
        let ratio = observed.victims.point(8192.0).hit_ratio;
        assert!(ratio < 0.1, "{ratio}");
    }
}
