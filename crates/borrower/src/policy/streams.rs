//! The sequential filter: finds sequential streams among the READs of a file (Puma 2015, §3.3.3).
//!
//! A disk reads ahead in a stream faster than most networks, and pages that are read once in a row
//! only displace others at a lender. So pages that are read from the disk in a stream are tagged in
//! their entries, and not sent when they are evicted. A READ belongs to a stream if it continues
//! where the stream has ended. Several streams are followed for each file, because there may be
//! concurrent readers, and the kernel's read-ahead windows arrive in any order.

use page::PageRange;

/// The number of streams of a file that are followed at once. A new stream replaces the one that
/// has not continued for longest. A sequential one is replaced only when it has not continued for
/// [`RECENT_READS`], because each random READ might begin another stream.
const STREAMS_MAX: usize = 8;

/// The number of pages in a row after which a stream counts as sequential: 4 MiB. A disk needs some
/// milliseconds to reach a place, and reads about a megabyte in that time. So shorter runs are
/// worth lending, such as whole small files. The pages before this limit are lent, too.
pub const SEQUENTIAL_PAGES: u64 = 1024;

/// The minimum distance, in pages, that a READ may lie ahead of or behind the end of its stream:
/// pages that are cached already are skipped.
const SLACK_PAGES: u64 = 64;
/// The same distance in windows, of the READ's own size or of the stream's. Several windows are in
/// progress at once, and overtake each other. Some pages of a window may be cached already, so only
/// small pieces of it are read.
const SLACK_WINDOWS: u64 = 4;

/// The number of READs of the file, since the stream last continued, for which the stream counts as
/// recent and its window size is used. A random READ long after the stream has passed is not a part
/// of it.
const RECENT_READS: u64 = 64;

#[derive(Clone, Copy, Default)]
struct Stream {
    /// The page at which the stream continues.
    next: u64,
    /// The length of the stream in pages; 0: there is no stream.
    pages: u64,
    /// The size of its largest READ, in pages.
    window_pages: u64,
    /// The clock when the stream last continued.
    used: u64,
}

impl Stream {
    fn is_sequential(&self) -> bool {
        self.pages >= SEQUENTIAL_PAGES
    }

    fn is_recent(&self, clock: u64) -> bool {
        clock - self.used <= RECENT_READS
    }

    /// Returns whether a READ of these pages, at this clock, belongs to the stream.
    fn takes(&self, range: PageRange, pages: u64, clock: u64) -> bool {
        let window_pages = if self.is_recent(clock) { pages.max(self.window_pages) } else { pages };
        self.pages > 0 && self.is_near(range, window_pages)
    }

    fn is_near(&self, range: PageRange, window_pages: u64) -> bool {
        range.first.abs_diff(self.next) <= SLACK_PAGES.max(window_pages.saturating_mul(SLACK_WINDOWS))
    }
}

/// How often a file must have been read from the disk, from end to end, before it counts as only
/// streamed. If data is read twice from the disk, neither the page cache nor a lender has kept it.
const PASSES_MIN: u64 = 2;
/// One part in this number of such a file's reads may be other reads, or not come from the disk:
/// the beginnings, before the stream is recognized.
const OTHERWISE_PART: u64 = 8;
/// The minimum cost of another READ, in pages: the disk takes as long to get there as for this part
/// of a stream.
const OTHERWISE_PAGES_MIN: u64 = 64;

/// The number of sampled pages that are needed to decide whether a file's streams fit.
const SAMPLED_MIN: u32 = 8;
/// When this part of the file was read, and twice the minimum of sampled pages is reached, all
/// counts are halved: a quarter of a pass decides.
const LOOKED_PART: u64 = 4;

/// Counts of the sampled pages of a READ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// All sampled pages.
    pub sampled_pages: u32,
    /// The sampled pages that would still be at a lender if all evicted pages had been lent.
    pub fitting_pages: u32,
    /// The sampled pages that were evicted too long ago for that.
    pub far_pages: u32,
}

/// The streams of one file.
#[derive(Default)]
pub struct Streams {
    streams: [Stream; STREAMS_MAX],
    clock: u64,
    /// The numbers of pages that came from the disk: in streams, and otherwise.
    streamed_pages: u64,
    other_pages: u64,
    /// For READs in streams with sampled pages: the number of all their pages, of their sampled
    /// pages, and an estimate of their pages that would still be at a lender.
    looked_pages: u64,
    sampled_pages: u32,
    fitting_pages: u64,
    /// The estimate of their pages that come back too late.
    far_pages: u64,
    fit: bool,
}

impl Streams {
    /// Records a READ of these pages. Returns whether it is part of a sequential stream.
    pub fn note(&mut self, range: PageRange) -> bool {
        self.clock += 1;
        let (clock, pages) = (self.clock, range.end.saturating_sub(range.first));
        // If several streams fit, a sequential one is preferred to a piece that was read next to
        // it. Among those the nearest wins, because two readers may follow each other closely.
        let near = self
            .streams
            .iter_mut()
            .filter(|stream| stream.takes(range, pages, clock))
            .min_by_key(|stream| (!stream.is_sequential(), stream.next.abs_diff(range.first)));
        if let Some(stream) = near {
            // The progress counts: a few pages read again and again are no stream.
            let next = stream.next.max(range.end);
            // A page before the end of the stream may be a random READ.
            if next > stream.next && stream.is_near(range, pages) {
                stream.used = clock;
            }
            stream.pages += next - stream.next;
            stream.next = next;
            stream.window_pages = stream.window_pages.max(pages);
            return stream.is_sequential();
        }
        let is_kept = |stream: &Stream| stream.is_sequential() && stream.is_recent(clock);
        if let Some(least) = self.streams.iter_mut().min_by_key(|stream| (is_kept(stream), stream.used)) {
            *least = Stream { next: range.end, pages, window_pages: pages, used: clock };
        }
        pages >= SEQUENTIAL_PAGES
    }

    /// Records the sources of a READ that was passed to [`Streams::note`]: `pages` pages came from
    /// the disk, and `lent_pages` from lenders.
    pub(crate) fn read_backing(&mut self, pages: u64, lent_pages: u64, is_sequential: bool) {
        if is_sequential {
            // Pages from lenders are not read from the disk each time. So all but a few of them
            // reset the count of passes.
            self.streamed_pages = (self.streamed_pages + pages).saturating_sub(lent_pages * OTHERWISE_PART);
        } else if pages > 0 {
            self.other_pages += pages.max(OTHERWISE_PAGES_MIN);
        }
    }

    /// Returns whether a file of `file_pages` pages is read from end to end, again and again, each
    /// time from the disk, and hardly otherwise.
    pub(crate) fn are_all(&self, file_pages: u64) -> bool {
        let read_pages = self.streamed_pages + self.other_pages;
        let passes_pages = PASSES_MIN.saturating_mul(file_pages);
        // For a file that is read twice in one go it is not yet known whether its pages come back
        // after an eviction. For pages without a recorded eviction it will never be known.
        let is_known = self.fit || self.far_pages >= self.looked_pages / 2 || read_pages >= 2 * passes_pages;
        file_pages > 0
            && is_known
            && read_pages >= passes_pages - passes_pages / OTHERWISE_PART
            && self.other_pages <= read_pages / OTHERWISE_PART
    }

    /// Some pages of a READ of `pages` pages in a stream were sampled. The file has `file_pages`
    /// pages.
    pub(crate) fn looked_at(&mut self, pages: u64, looked: Looked, file_pages: u64) {
        let Looked { sampled_pages, fitting_pages, far_pages } = looked;
        if sampled_pages == 0 {
            return;
        }
        self.looked_pages += pages;
        self.sampled_pages += sampled_pages;
        self.fitting_pages += pages * u64::from(fitting_pages) / u64::from(sampled_pages);
        self.far_pages += pages * u64::from(far_pages) / u64::from(sampled_pages);
        if self.sampled_pages >= SAMPLED_MIN {
            // Streams fit from three quarters on, until less than half.
            let (part, of) = if self.fit { (1, 2) } else { (3, 4) };
            self.fit = self.fitting_pages * of >= self.looked_pages * part;
        }
        if self.looked_pages > file_pages / LOOKED_PART && self.sampled_pages >= 2 * SAMPLED_MIN {
            self.looked_pages /= 2;
            self.sampled_pages /= 2;
            self.fitting_pages /= 2;
            self.far_pages /= 2;
        }
    }

    /// Returns whether pages of streams are read again before lenders must forget them.
    pub fn fit(&self) -> bool {
        self.fit
    }

    /// Forgets the passes: past reads predict future reads no longer.
    pub fn forget_passes(&mut self) {
        (self.streamed_pages, self.other_pages) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looked(sampled_pages: u32, fitting_pages: u32) -> Looked {
        Looked { sampled_pages, fitting_pages, far_pages: 0 }
    }

    fn window(first: u64, pages: u64) -> PageRange {
        PageRange { first, end: first + pages }
    }

    #[test]
    fn concurrent_streams_are_found_whatever_order_their_windows_have() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut streams = Streams::default();
        let mut found = [0; 4];
        for turn in 0..200u64 {
            for reader in 0..4u64 {
                // Two windows, sometimes in the opposite order; some pages are cached already.
                let start = reader * 1_000_000 + turn * 64;
                let mut windows = [window(start, 32), window(start + 32, 32)];
                if random.bool() {
                    windows.swap(0, 1);
                }
                for window in windows.into_iter().take(if random.u32(0..8) == 0 { 1 } else { 2 }) {
                    found[reader as usize] += usize::from(streams.note(window));
                }
            }
        }
        assert!(found.iter().all(|windows| *windows > 280), "{found:?}");
    }

    #[test]
    fn random_reads_are_no_stream() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut streams = Streams::default();
        let found = (0..100_000).filter(|_| streams.note(window(random.u64(0..262_144), 1))).count();
        assert_eq!(found, 0);
        // A few pages read again and again are no stream either.
        let mut streams = Streams::default();
        assert_eq!((0..10_000).filter(|at| streams.note(window(at % 4, 1))).count(), 0);
    }

    #[test]
    fn reads_at_random_beside_a_stream_do_not_make_it_forgotten() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut streams = Streams::default();
        let mut found = 0;
        for turn in 0..200 {
            // Few random READs at first; with more, the stream's beginning is lost.
            for _ in 0..if turn < 32 { 4 } else { 50 } {
                assert!(!streams.note(window(1_000_000 + random.u64(0..1 << 24), 1)));
            }
            found += usize::from(streams.note(window(turn * 32, 32)));
        }
        assert_eq!(found, 200 - 31);
        // Streams that have ended make room for others.
        for stream in 0..2 * STREAMS_MAX as u64 {
            let begin = stream << 32;
            assert!((0..40).filter(|at| streams.note(window(begin + at * 32, 32))).count() >= 8, "{stream}");
        }
    }

    /// In a file of 64 MiB, one random READ in eight falls where windows of the stream might be.
    #[test]
    fn reads_at_random_do_not_keep_a_stream_alive() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut streams = Streams::default();
        assert_eq!((0..64).filter(|at| streams.note(window(at * 256, 256))).count(), 61);
        let found = (0..10_000).filter(|_| streams.note(window(random.u64(0..16_384), 1))).count();
        assert!(found < 200, "{found}");
    }

    #[test]
    fn large_windows_overtake_each_other() {
        let mut streams = Streams::default();
        let found = (0..100).filter(|turn| {
            // Three windows of 1 MiB in progress, the last one first.
            [2, 1, 0].into_iter().filter(|at| streams.note(window((turn * 3 + at) * 256, 256))).count() == 3
        });
        assert!(found.count() >= 97);
    }

    /// In a stream over a file that is larger than the memory, a page may still be cached, or may
    /// be evicted just before its turn. The rest of its window is a piece of the stream. It must
    /// not become the beginning of another stream that the next passes would continue.
    #[test]
    fn pieces_of_windows_are_no_streams_of_their_own() {
        let mut streams = Streams::default();
        for pass in 0..5 {
            for turn in 0..256 {
                let found = streams.note(window(turn * 256, 256));
                assert_eq!(found, (turn + 1) * 256 >= SEQUENTIAL_PAGES, "pass {pass}, window {turn}");
                if pass == 1 && turn == 100 {
                    assert!(streams.note(window(turn * 256 + 162, 1)));
                    assert!(streams.note(window(turn * 256 + 356, 3)));
                }
            }
            // Far from the stream: a stream of its own, which stays.
            assert!(!streams.note(window(6242, 1)));
        }
        // A stream that has passed long ago has no effect.
        for at in 0..RECENT_READS {
            streams.note(window(1_000_000 + at * 10_000, 1));
        }
        assert!(!streams.note(window(255 * 256 + 100, 1)));
    }

    /// Two passes from the disk are enough evidence. A single pass, a cached one, and random READs
    /// are not.
    #[test]
    fn files_that_are_nothing_but_streams_are_known() {
        const FILE_PAGES: u64 = 1 << 15;
        fn pass(streams: &mut Streams) {
            for at in (0..FILE_PAGES).step_by(256) {
                let is_sequential = streams.note(window(at, 256));
                streams.read_backing(256, 0, is_sequential);
            }
        }
        let mut streams = Streams::default();
        pass(&mut streams);
        assert!(!streams.are_all(FILE_PAGES));
        pass(&mut streams);
        assert!(streams.are_all(FILE_PAGES) && !streams.are_all(2 * FILE_PAGES));
        streams.read_backing(FILE_PAGES / 2, 0, false);
        assert!(!streams.are_all(FILE_PAGES), "a fifth was read otherwise");
        streams.forget_passes();
        assert!(!streams.are_all(FILE_PAGES) && !streams.are_all(0));
        // Single random pages next to the stream: few of the file's pages, but half of the disk's
        // work.
        for _ in 0..2 {
            pass(&mut streams);
            (0..FILE_PAGES / 256 * 4).for_each(|_| streams.read_backing(1, 0, false));
        }
        assert!(!streams.are_all(FILE_PAGES));
        streams.forget_passes();
        (0..3).for_each(|_| pass(&mut streams));
        assert!(streams.are_all(FILE_PAGES));
        // A few pages are at a lender, then a large part.
        streams.read_backing(0, FILE_PAGES / 100, true);
        assert!(streams.are_all(FILE_PAGES));
        streams.read_backing(0, FILE_PAGES / 4, true);
        assert!(!streams.are_all(FILE_PAGES));
        (0..2).for_each(|_| pass(&mut streams));
        assert!(streams.are_all(FILE_PAGES));
        // Twice in one go: the sampled pages had no earlier eviction, or one just before. Then they
        // come back, and too late.
        streams.looked_at(FILE_PAGES, looked(64, 32), FILE_PAGES);
        assert!(!streams.are_all(FILE_PAGES) && !streams.fit());
        streams.looked_at(FILE_PAGES, Looked { far_pages: 64, ..looked(64, 0) }, FILE_PAGES);
        assert!(streams.are_all(FILE_PAGES) && !streams.fit());
        // For long nothing is known of the file.
        let mut streams = Streams::default();
        streams.looked_at(FILE_PAGES, looked(64, 0), FILE_PAGES);
        (0..3).for_each(|_| pass(&mut streams));
        assert!(!streams.are_all(FILE_PAGES));
        (0..2).for_each(|_| pass(&mut streams));
        assert!(streams.are_all(FILE_PAGES));
    }

    #[test]
    fn few_pages_say_nothing_of_whether_streams_fit_and_the_last_ones_count() {
        const FILE_PAGES: u64 = 64_000;
        let mut streams = Streams::default();
        let mut look = |pages: u64, sampled: u32, fitting: u32| {
            streams.looked_at(pages, looked(sampled, fitting), FILE_PAGES);
            streams.fit()
        };
        assert!(!look(64, SAMPLED_MIN - 1, SAMPLED_MIN - 1));
        assert!(look(64, 1, 1));
        let mut pass = |fitting, part: u64| (0..FILE_PAGES / 64 / part).fold(false, |_, _| look(64, 10, fitting));
        // Between half and three quarters the result stays as it is.
        assert_eq!((pass(6, 1), pass(4, 1), pass(6, 1)), (true, false, false));
        // A tenth of a pass changes nothing; half a pass does.
        assert_eq!((pass(10, 1), pass(0, 10), pass(0, 2)), (true, true, false));
        assert_eq!((pass(10, 10), pass(10, 2)), (false, true));
    }

    #[test]
    fn a_short_row_is_no_stream_and_a_long_one_is() {
        let mut streams = Streams::default();
        let answers: Vec<_> = (0..40).map(|at| streams.note(window(at * 32, 32))).collect();
        assert_eq!(answers.iter().filter(|found| !**found).count(), 31);
        assert!(!streams.note(window(900_000, 32)));
        assert!(streams.note(window(10_000, 1024)), "in one READ");
        streams.note(window(u64::MAX - 1, 1));
        streams.note(window(u64::MAX - 1, 1));
    }
}
