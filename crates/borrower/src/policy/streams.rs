//! The sequential filter: finds sequential streams among the READs of a file (Puma 2015, §3.3.3).
//!
//! A disk reads ahead in a stream faster than most networks, and pages that are read once in a row
//! only push out others at a lender. So what is read from the disk in a stream is tagged in its
//! entry, and not sent when it is evicted. Streams are found by where READs go on, several at once
//! for each file: concurrent readers, and the kernel's read-ahead windows, which arrive in any
//! order.

use page::PageRange;

/// Streams of a file that are followed at once. The one that went on least lately is forgotten for
/// a new one; but one that is sequential only when it has not gone on for [`RECENT_READS`]: each
/// READ at random might be the beginning of another one.
const STREAMS_MAX: usize = 8;

/// Pages in a row from which on it is a stream: 4 MiB. A disk needs some milliseconds to get to a
/// place, the time in which it then reads about a megabyte: what is shorter is worth lending, as
/// whole small files are. What came before is lent, too.
pub const SEQUENTIAL_PAGES: u64 = 1024;

/// How far a READ may lie ahead of, or behind, where its stream goes on, in pages, at the least:
/// what is cached already is stepped over.
const SLACK_PAGES: u64 = 64;
/// And in windows, of its own size or of the stream's: several are under way at once, and overtake
/// each other; and of a window some pages may be cached already, so that only small pieces of it
/// are read.
const SLACK_WINDOWS: u64 = 4;

/// READs of the file since a stream went on last, up to which it goes on for sure, and its windows
/// count: a page that is read at random long after a stream went by is none of its pieces.
const RECENT_READS: u64 = 64;

#[derive(Clone, Copy, Default)]
struct Stream {
    /// Where it goes on.
    next: u64,
    /// How far it has got, in pages; 0: there is none.
    pages: u64,
    /// Its largest READ, in pages.
    window_pages: u64,
    /// When it went on last.
    used: u64,
}

impl Stream {
    fn is_sequential(&self) -> bool {
        self.pages >= SEQUENTIAL_PAGES
    }

    fn is_recent(&self, clock: u64) -> bool {
        clock - self.used <= RECENT_READS
    }

    /// Whether a READ of these pages, at this time, belongs to it.
    fn takes(&self, range: PageRange, pages: u64, clock: u64) -> bool {
        let window_pages = if self.is_recent(clock) { pages.max(self.window_pages) } else { pages };
        self.pages > 0 && self.is_near(range, window_pages)
    }

    fn is_near(&self, range: PageRange, window_pages: u64) -> bool {
        range.first.abs_diff(self.next) <= SLACK_PAGES.max(window_pages.saturating_mul(SLACK_WINDOWS))
    }
}

/// How often a file must have been read from the disk, from end to end, before it is known that it
/// is nothing but read so: what is read twice was kept neither by the page cache nor by a lender.
const PASSES_MIN: u64 = 2;
/// So small a part of what is read of such a file may be read otherwise, or not come from the disk:
/// the beginnings, before it is known that a stream goes on.
const OTHERWISE_PART: u64 = 8;
/// What a READ elsewhere counts for at the least, in pages: getting there takes the disk as long as
/// reading some of a stream.
const OTHERWISE_PAGES_MIN: u64 = 64;

/// Pages that must have been looked at to say whether a file's streams fit.
const SAMPLED_MIN: u32 = 8;
/// When that part of the file was read, and twice as many pages were looked at, all count half as
/// much: a quarter of a pass decides.
const LOOKED_PART: u64 = 4;

/// Pages of a READ that were looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// All of them.
    pub sampled_pages: u32,
    /// Of these, those that would have been at a lender still, had all been lent that was evicted.
    pub fitting_pages: u32,
    /// And those that were evicted too long ago for that.
    pub far_pages: u32,
}

/// The streams of one file.
#[derive(Default)]
pub struct Streams {
    streams: [Stream; STREAMS_MAX],
    clock: u64,
    /// Pages that came from the disk: in streams, and otherwise.
    streamed_pages: u64,
    other_pages: u64,
    /// Pages of READs in streams of which some were looked at, those, and those that would have
    /// been at a lender still, for all of the READ.
    looked_pages: u64,
    sampled_pages: u32,
    fitting_pages: u64,
    /// And those that come back too late.
    far_pages: u64,
    fit: bool,
}

impl Streams {
    /// A READ of these pages. Whether it is part of a sequential stream.
    pub fn note(&mut self, range: PageRange) -> bool {
        self.clock += 1;
        let (clock, pages) = (self.clock, range.end.saturating_sub(range.first));
        // Of several that fit, one that is sequential rather than a piece that was read beside it;
        // of those the nearest: two readers may follow each other closely.
        let near = self
            .streams
            .iter_mut()
            .filter(|stream| stream.takes(range, pages, clock))
            .min_by_key(|stream| (!stream.is_sequential(), stream.next.abs_diff(range.first)));
        if let Some(stream) = near {
            // What counts is how far it gets: a few pages read over and over are no stream.
            let next = stream.next.max(range.end);
            // A page somewhere before it may be one that is read at random.
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

    /// So many pages of a READ come from the disk, and so many from lenders, which
    /// [`Streams::note`] was told of.
    pub fn read_below(&mut self, pages: u64, lent_pages: u64, is_sequential: bool) {
        if is_sequential {
            // What lenders answer is not read from the disk each time: all but a few strays begin
            // the passes anew.
            self.streamed_pages = (self.streamed_pages + pages).saturating_sub(lent_pages * OTHERWISE_PART);
        } else if pages > 0 {
            self.other_pages += pages.max(OTHERWISE_PAGES_MIN);
        }
    }

    /// Whether a file of so many pages is read from end to end, over and over, each time from the
    /// disk, and hardly otherwise.
    pub fn are_all(&self, file_pages: u64) -> bool {
        let read_pages = self.streamed_pages + self.other_pages;
        let passes_pages = PASSES_MIN.saturating_mul(file_pages);
        // Of a file that is read twice in one go it is not known yet whether it comes back; of
        // pages that were never seen to be evicted it will not be.
        let is_known = self.fit || self.far_pages >= self.looked_pages / 2 || read_pages >= 2 * passes_pages;
        file_pages > 0
            && is_known
            && read_pages >= passes_pages - passes_pages / OTHERWISE_PART
            && self.other_pages <= read_pages / OTHERWISE_PART
    }

    /// A READ of so many pages in a stream, of a file of so many: some were looked at.
    pub fn looked_at(&mut self, pages: u64, looked: Looked, file_pages: u64) {
        let Looked { sampled_pages, fitting_pages, far_pages } = looked;
        if sampled_pages == 0 {
            return;
        }
        self.looked_pages += pages;
        self.sampled_pages += sampled_pages;
        self.fitting_pages += pages * u64::from(fitting_pages) / u64::from(sampled_pages);
        self.far_pages += pages * u64::from(far_pages) / u64::from(sampled_pages);
        if self.sampled_pages >= SAMPLED_MIN {
            // From three quarters on, until less than half.
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

    /// Whether what is read in streams comes back before lenders must forget it.
    pub fn fit(&self) -> bool {
        self.fit
    }

    /// How it was read says no more how it will be.
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
                // Two windows, now and then the other way round; some of it is cached already.
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
        // Nor is a few pages read over and over.
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
            // Few at first, or its beginning is lost.
            for _ in 0..if turn < 32 { 4 } else { 50 } {
                assert!(!streams.note(window(1_000_000 + random.u64(0..1 << 24), 1)));
            }
            found += usize::from(streams.note(window(turn * 32, 32)));
        }
        assert_eq!(found, 200 - 31);
        // Those that have ended make room for others.
        for stream in 0..2 * STREAMS_MAX as u64 {
            let begin = stream << 32;
            assert!((0..40).filter(|at| streams.note(window(begin + at * 32, 32))).count() >= 8, "{stream}");
        }
    }

    /// Of a file of 64 MiB, one READ at random in eight falls where windows of the stream might be.
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
            // Three windows of 1 MiB under way, the last one first.
            [2, 1, 0].into_iter().filter(|at| streams.note(window((turn * 3 + at) * 256, 256))).count() == 3
        });
        assert!(found.count() >= 97);
    }

    /// Of a stream over a file that is longer than the memory now and then a page is cached still,
    /// or is no more when its turn comes. What is left of its window is a piece of the stream, and
    /// no beginning of another one that the next passes would take for theirs.
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
            // Far from the stream: one of its own, which stays.
            assert!(!streams.note(window(6242, 1)));
        }
        // A stream that went by long ago leaves no wake.
        for at in 0..RECENT_READS {
            streams.note(window(1_000_000 + at * 10_000, 1));
        }
        assert!(!streams.note(window(255 * 256 + 100, 1)));
    }

    /// Two passes from the disk tell it; a single one, one that was cached, and reads at random do
    /// not.
    #[test]
    fn files_that_are_nothing_but_streams_are_known() {
        const FILE_PAGES: u64 = 1 << 15;
        fn pass(streams: &mut Streams) {
            for at in (0..FILE_PAGES).step_by(256) {
                let is_sequential = streams.note(window(at, 256));
                streams.read_below(256, 0, is_sequential);
            }
        }
        let mut streams = Streams::default();
        pass(&mut streams);
        assert!(!streams.are_all(FILE_PAGES));
        pass(&mut streams);
        assert!(streams.are_all(FILE_PAGES) && !streams.are_all(2 * FILE_PAGES));
        streams.read_below(FILE_PAGES / 2, 0, false);
        assert!(!streams.are_all(FILE_PAGES), "a fifth was read otherwise");
        streams.forget_passes();
        assert!(!streams.are_all(FILE_PAGES) && !streams.are_all(0));
        // Single pages at random beside the stream: few of its pages, and half of what the disk
        // does.
        for _ in 0..2 {
            pass(&mut streams);
            (0..FILE_PAGES / 256 * 4).for_each(|_| streams.read_below(1, 0, false));
        }
        assert!(!streams.are_all(FILE_PAGES));
        streams.forget_passes();
        (0..3).for_each(|_| pass(&mut streams));
        assert!(streams.are_all(FILE_PAGES));
        // Some strays are at a lender, then a good part.
        streams.read_below(0, FILE_PAGES / 100, true);
        assert!(streams.are_all(FILE_PAGES));
        streams.read_below(0, FILE_PAGES / 4, true);
        assert!(!streams.are_all(FILE_PAGES));
        (0..2).for_each(|_| pass(&mut streams));
        assert!(streams.are_all(FILE_PAGES));
        // Twice in one go: what was looked at had not been evicted before, or just before. Then it
        // comes back, and too late.
        streams.looked_at(FILE_PAGES, looked(64, 32), FILE_PAGES);
        assert!(!streams.are_all(FILE_PAGES) && !streams.fit());
        streams.looked_at(FILE_PAGES, Looked { far_pages: 64, ..looked(64, 0) }, FILE_PAGES);
        assert!(streams.are_all(FILE_PAGES) && !streams.fit());
        // Nothing is known of it for long.
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
        // Between the half and three quarters it stays as it is.
        assert_eq!((pass(6, 1), pass(4, 1), pass(6, 1)), (true, false, false));
        // A tenth of a pass changes nothing, half of one does.
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
