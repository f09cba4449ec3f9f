//! Read-ahead in the backing file, for streams that arrive in pieces.
//!
//! Of a read-ahead window the kernel requests only the pages that it does not cache
//! (mm/readahead.c). If random reads have cached some pages of the window, each piece between them
//! becomes a READ of its own. A disk or a volume that is limited in requests needs more time for
//! ten reads of 40 KiB than for one of 512 KiB. So if a stream arrived in pieces, and most of the
//! last window was requested, the next window is read at once into the page cache of the backing
//! file. The READs find their pieces there, and the window is dropped after the stream has passed
//! it.
//!
//! The bytes are only in the backing file system's own page cache, so they are never older than the
//! file.

use std::mem::take;
use std::ops::Range;

/// Size of a window that is read at once. So much of each open file may be in the page cache of the
/// backing file; up to twice as much if the stream has skipped cached pages.
const WINDOW_BYTES: u64 = 512 << 10;

/// A larger READ is not a piece: it is worth a request of its own.
const PIECE_BYTES_MAX: u64 = WINDOW_BYTES / 4;

/// The next window is read whole if at least this fraction (one part in so many) of the last one
/// was requested, in at least so many pieces. The rest is read in vain.
const ASKED_PART: u64 = 3;
const PIECES_MIN: u32 = 4;

/// Number of consecutive READs elsewhere after which the stream counts as ended.
const ELSEWHERE_MAX: u32 = 64;

/// State of the stream of one open file.
#[derive(Default)]
pub(crate) struct Ahead {
    window: Range<u64>,
    asked_bytes: u64,
    pieces: u32,
    is_fetched: bool,
    elsewhere: u32,
}

/// Actions before a READ, as ranges of bytes of the file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// Range to drop from the page cache of the backing file.
    pub drop: Option<Range<u64>>,
    /// Range to read into the page cache of the backing file.
    pub fetch: Option<Range<u64>>,
}

impl Ahead {
    /// Records that a READ of `len` bytes at `offset` is about to be read from the backing file.
    /// Returns the actions to take first.
    pub(crate) fn goes_on(&mut self, offset: u64, len: u64) -> Step {
        if len > PIECE_BYTES_MAX {
            return Step::default();
        }
        // Several READs are in progress and overtake each other, and the stream skips cached pages.
        let Range { start, end } = self.window;
        let is_near = (start.saturating_sub(WINDOW_BYTES)..end.saturating_add(WINDOW_BYTES)).contains(&offset);
        if is_near && offset < end {
            self.elsewhere = 0;
            self.asked_bytes += len;
            self.pieces += 1;
            return Step::default();
        }
        if !is_near && end > 0 && self.elsewhere < ELSEWHERE_MAX {
            self.elsewhere += 1;
            return Step::default();
        }
        let is_in_pieces = self.asked_bytes >= (end - start) / ASKED_PART && self.pieces >= PIECES_MIN;
        let before = take(self);
        // Earlier pieces may still arrive.
        self.window = if is_near { end } else { offset }..offset.saturating_add(WINDOW_BYTES);
        (self.asked_bytes, self.pieces) = (len, 1);
        self.is_fetched = is_near && is_in_pieces;
        Step { drop: before.fetched(), fetch: self.fetched() }
    }

    /// The range that is still in the page cache of the backing file.
    pub(crate) fn fetched(&self) -> Option<Range<u64>> {
        self.is_fetched.then(|| self.window.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: u64 = 4096;

    /// Reads a stretch in pieces with pages between them that are cached; what was fetched, and
    /// what was dropped.
    fn read(ahead: &mut Ahead, stretch: Range<u64>, piece_pages: u64, cached_pages: u64) -> (u64, u64) {
        let (mut fetched, mut dropped) = (0, 0);
        for at in stretch.step_by(((piece_pages + cached_pages) * PAGE_BYTES) as usize) {
            let step = ahead.goes_on(at, piece_pages * PAGE_BYTES);
            let len = |range: Option<Range<u64>>| range.map_or(0, |range| range.end - range.start);
            assert!(step.fetch.as_ref().is_none_or(|fetch| fetch.start == at));
            (fetched, dropped) = (fetched + len(step.fetch), dropped + len(step.drop));
        }
        (fetched, dropped)
    }

    #[test]
    fn pieces_of_a_stream_are_read_at_once_from_the_second_window_on() {
        let mut ahead = Ahead::default();
        let (fetched, dropped) = read(&mut ahead, 0..16 * WINDOW_BYTES, 7, 1);
        assert_eq!((fetched, dropped), (15 * WINDOW_BYTES, 14 * WINDOW_BYTES));
        assert_eq!(ahead.fetched(), Some(15 * WINDOW_BYTES..16 * WINDOW_BYTES));
    }

    #[test]
    fn what_is_large_or_mostly_cached_or_elsewhere_is_not() {
        let mut ahead = Ahead::default();
        let large_pages = PIECE_BYTES_MAX / PAGE_BYTES + 1;
        assert_eq!(read(&mut ahead, 0..8 * WINDOW_BYTES, large_pages, 0), (0, 0));
        assert_eq!(read(&mut ahead, 0..8 * WINDOW_BYTES, 1, 7), (0, 0));
        // If little is requested, read-ahead ends and leaves nothing cached.
        let mut ahead = Ahead::default();
        read(&mut ahead, 0..WINDOW_BYTES, 7, 1);
        assert_eq!(read(&mut ahead, WINDOW_BYTES..4 * WINDOW_BYTES, 1, 7), (WINDOW_BYTES, WINDOW_BYTES));
        assert_eq!(ahead.fetched(), None);
        // At the end of all that can be addressed.
        let mut ahead = Ahead::default();
        ahead.goes_on(u64::MAX - 10, 10);
        ahead.goes_on(u64::MAX - 5, 5);
    }

    #[test]
    fn pieces_overtake_each_other_and_others_read_between_them() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut ahead, mut fetched) = (Ahead::default(), 0);
        let far = 1 << 40;
        for some in 0..16 {
            let mut pieces: Vec<_> = (0..8).map(|piece| (some * 8 + piece) * 8 * PAGE_BYTES).collect();
            random.shuffle(&mut pieces);
            for offset in pieces {
                fetched += ahead.goes_on(offset, 7 * PAGE_BYTES).fetch.map_or(0, |fetch| fetch.end - fetch.start);
                let elsewhere = far + random.u64(0..1 << 40);
                assert_eq!(ahead.goes_on(elsewhere, PAGE_BYTES), Step::default());
            }
        }
        // But for the first window, and what the last one has of its own.
        let stretch = 16 * 8 * 8 * PAGE_BYTES;
        assert!((stretch - 2 * WINDOW_BYTES..=stretch + WINDOW_BYTES).contains(&fetched), "{fetched} of {stretch}");
        // Nobody reads it any more.
        let dropped: Vec<_> = (0..=ELSEWHERE_MAX).filter_map(|_| ahead.goes_on(far, PAGE_BYTES).drop).collect();
        assert_eq!(dropped.len(), 1);
    }
}
