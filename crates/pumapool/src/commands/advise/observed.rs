//! Accumulates the observations of the watch: the curves, and the READs that a mount would get.
//! Uses no clocks and no I/O.

use borrower::policy::streams::Streams;
use mrc::{Key, Lru, Victims};
use page::{PAGE_SIZE, PageRange};
use std::collections::{BTreeSet, HashMap, HashSet};
use tap::{Seen, SeenKind};

/// Limit on the files whose streams are followed. Beyond it, all are forgotten; continuing streams
/// are detected again.
const FILES_MAX: usize = 16_384;
/// Limit on consecutively added pages that form one READ: the largest request of the kernel to a
/// mount.
const READ_PAGES_MAX: u64 = 256;
/// Limit on concurrent waits for reads outside streams. Further waits are not counted.
const WAITING_MAX: usize = 4096;
/// Limit on the remembered sample of stream pages. Beyond it, the sampling rate is reduced.
const SEQUENTIAL_MAX: usize = 65_536;
/// Number of waits that are needed for a meaningful mean.
const WAITS_MIN: u32 = 32;

/// Counts of pages and of READs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counts {
    /// Pages that programs read, as far as observed.
    pub read: f64,
    /// Pages that were read from the disk.
    pub missed: u64,
    /// Pages read from the disk in sequential streams.
    pub streamed: u64,
    /// READs of the pages outside streams.
    pub reads: u64,
    /// Pages that were added to be written.
    pub written: u64,
    /// Pages that were mapped when they were cached.
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

/// Pages that were read in streams and evicted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Returning {
    sampled: f64,
    evicted_before: f64,
    /// Size of the smallest pool that would have held all of them, in pages.
    pub pool_pages: f64,
}

impl Returning {
    /// Share of the stream pages that had been evicted during the watch.
    pub(super) fn share(&self) -> f64 {
        if self.sampled > 0.0 { self.evicted_before / self.sampled } else { 0.0 }
    }
}

/// A run of pages that were added consecutively.
struct Run {
    file: u64,
    range: PageRange,
    /// Time that a program waited for the first page, in microseconds.
    wait_us: Option<f64>,
}

/// The observations.
pub(super) struct Observed {
    /// Estimated hits of pools behind this page cache.
    pub(super) victims: Victims,
    /// Estimated hits of such pools if stream pages were lent, too. From this follows whether
    /// stream pages return.
    all: Victims,
    returning: Returning,
    /// Estimated hits of LRU caches in place of this page cache.
    pub(super) lru: Lru,
    counts: Counts,
    streams: HashMap<u64, Streams>,
    run: Option<Run>,
    /// Sampled pages that were read in streams; a mount does not send them when they are evicted.
    sequential: BTreeSet<Key>,
    /// First pages of ended runs for which a program may still wait.
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
    /// Adds observations, in order. A page added to be written is recognized only by the event
    /// right after it, if that is in the same batch.
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
                        self.victims.invalidated(key);
                        self.all.invalidated(key);
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
                        self.victims.invalidated(key);
                        self.all.invalidated(key);
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

    /// Sets the number of pages read. It is known only if all files of the watched devices are
    /// watched.
    pub(super) fn count_reads(&mut self, pages: u64) {
        self.lru.count(pages);
        self.read_all = Some(pages);
    }

    /// Pages with a hash above this value are not sampled any more.
    pub(super) fn threshold(&self) -> u64 {
        self.lru.threshold().max(self.victims.threshold()).max(self.all.threshold())
    }

    /// The counts.
    pub(super) fn counts(&self) -> Counts {
        Counts { read: self.read_all.map_or(self.counts.read, |pages| pages as f64), ..self.counts }
    }

    /// Statistics on stream pages that are read again.
    pub(super) fn returning(&self) -> Returning {
        self.returning
    }

    /// The mean time that programs waited for a missed page outside streams, in microseconds. The
    /// mean, because it determines the time that programs lose; a disk that is throttled now and
    /// then has a low median.
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

    /// Ends the run if it contains any of these pages, because the next event on them comes after
    /// the run.
    fn end_run_with(&mut self, file: u64, range: PageRange) {
        if self.run.as_ref().is_some_and(|run| run.file == file && run.range.overlaps(range)) {
            self.end_run();
        }
    }

    /// Ends the run, which a mount would have received as one READ.
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
            // As in a mount, where a page that came from a lender is lent again.
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
                // No program waits for some pages: requested read-ahead, and reads that failed.
                if self.waiting.len() >= WAITING_MAX {
                    self.waiting.clear();
                }
                self.waiting.insert((file, range.first));
            }
        }
    }

    /// Forgets stream pages that are not sampled any more. If there are still too many, the
    /// sampling rate is reduced. Otherwise a forgotten stream page would count as a lent page.
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
