//! Detects buffered writes after which the kernel may cache other bytes than those of the write.
//!
//! The kernel unlocks a write's pages before it sends the write (fs/fuse/file.c,
//! fuse_fill_write_pages), and dropping cached pages does not wait for the write. So a READ can be
//! answered with older bytes before the write is applied, and these bytes stay in the kernel's
//! cache. A write(2) and a later writeback of the same cached pages can also be applied in the
//! opposite order. Nothing overtakes a writeback of the kernel: until the answer the page is under
//! writeback, or its users wait (docs/design/consistency.md, K6 and K7). There are three ways to
//! detect this:
//!
//! * The kernel numbers its requests in the order in which it queues them (fs/fuse/dev.c,
//!   fuse_get_unique). A READ or a write with a higher number that was handled first has overtaken
//!   a write(2).
//! * A write(2) gets its number after its pages were filled. So a READ with a lower number may have
//!   come in between, but only if the page was dropped in between. Two kinds of writes are not
//!   trusted if a READ of their pages was answered since the drop began: writes that begin during a
//!   drop, and the first write after it. (The kernel holds the inode's lock from filling to answer,
//!   so there is only one such write.) A write whose answer waits until the drop has ended takes
//!   the place of that first one, because no other write could fill pages meanwhile.
//! * The answers of an earlier daemon are not known. So the first write after a takeover is not
//!   trusted.
//!
//! This module also detects whether the kernel has zeroed a part of the bytes that a write(2) has
//! put into its cache. A write(2) beyond the end fills the kernel's pages first; the kernel's end
//! of file moves only after the answer (fs/fuse/file.c, `fuse_perform_write`). Meanwhile a mapping
//! may store into the page of the old end. When the kernel writes that page back, it zeroes the
//! page behind the old end (since Linux 6.17; fs/iomap/buffered-io.c,
//! `iomap_writeback_handle_eof`), and leaves it clean. Such a writeback ends at the old end, inside
//! a page. It is applied before the write(2) or after it:
//!
//! * After it: the writeback ends before the end of the backing file.
//! * Before it: the write(2) covers the place at which the writeback has ended. (A write(2) that
//!   begins behind this place leaves a gap: R15.)

use crate::catalog::rules::{Rule, keeps};
use page::{PAGE_SIZE, PageRange};

/// The number of requests of each kind that are remembered. A write that waited for longer counts
/// as overtaken.
const REQUESTS_MAX: usize = 16;

const NO_PAGE: PageRange = PageRange { first: 0, end: 0 };

/// The last requests of one kind.
struct Recent {
    requests: [(u64, PageRange); REQUESTS_MAX],
    count: usize,
    /// The highest number of the requests that are no longer remembered.
    forgotten: u64,
}

impl Default for Recent {
    fn default() -> Recent {
        Recent { requests: [(0, NO_PAGE); REQUESTS_MAX], count: 0, forgotten: 0 }
    }
}

impl Recent {
    fn note(&mut self, request: u64, range: PageRange) {
        let slot = &mut self.requests[self.count % REQUESTS_MAX];
        self.forgotten = self.forgotten.max(slot.0);
        *slot = (request, range);
        self.count += 1;
    }

    /// Returns the pages of `range` that requests with higher numbers than `request` touched.
    fn higher(&self, request: u64, range: PageRange) -> PageRange {
        match self.forgotten > request {
            true => range,
            false => touched(range, self.requests.iter().filter(|(other, _)| *other > request)),
        }
    }

    /// Returns the pages of `range` that the requests after the first `count` touched.
    fn since(&self, count: usize, range: PageRange) -> PageRange {
        let news = self.count - count;
        match news > REQUESTS_MAX {
            true => range,
            false => touched(range, (0..news).map(|back| &self.requests[(self.count - 1 - back) % REQUESTS_MAX])),
        }
    }
}

/// Returns the pages of `range` that any of these requests touches, and the pages between them.
fn touched<'a>(range: PageRange, requests: impl Iterator<Item = &'a (u64, PageRange)>) -> PageRange {
    let parts = requests.map(|(_, of)| range.intersection(*of)).filter(|part| !part.is_empty());
    parts.reduce(PageRange::hull).unwrap_or(NO_PAGE)
}

/// The part of a write(2) that is overtaken, or may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overtaken {
    /// The pages that the kernel may cache with other bytes than those of the write.
    pub pages: PageRange,
    /// Whether the last page of the write is known to be unlocked before the answer. This is so if
    /// a READ of this page, which needs the lock, was queued after the write.
    pub last_is_free: bool,
}

/// The record of one file. READs are recorded from the file's first write or drop on; before that,
/// no page can have been dropped during a write.
#[derive(Default)]
pub struct Watch {
    reads: Recent,
    writes: Recent,
    /// The number of drops of pages in progress, which the daemon has requested from the kernel.
    drops: u32,
    /// The next write(2) may have been filled before the last drop.
    first_after_drop: bool,
    /// One of those drops is the kernel's own, after an answer with another size. The daemon does
    /// not learn when such a drop ends.
    unseen: bool,
    /// The number of READs answered when that drop began.
    reads_before_drop: usize,
    /// An earlier daemon answered requests that are not known here.
    taken_over: bool,
    /// The end, in bytes, of the last writeback that has ended inside a page, since the last
    /// write(2).
    written_back_to: Option<u64>,
}

impl Watch {
    /// The record of a file for which an earlier daemon has answered requests.
    pub fn taken_over() -> Watch {
        Watch { first_after_drop: true, taken_over: true, ..Watch::default() }
    }

    /// The kernel has forgotten the file. Drops that are still in progress will end at an unknown
    /// time. Nothing else needs to be remembered.
    pub fn forgotten(self) -> Option<Watch> {
        (self.drops > 0).then(|| Watch { drops: self.drops, first_after_drop: true, ..Watch::default() })
    }

    /// A READ of `range` is answered.
    pub fn read_answered(&mut self, request: u64, range: PageRange) {
        self.reads.note(request, range);
    }

    /// Pages are about to be dropped.
    pub fn drop_begins(&mut self) {
        if self.drops == 0 && !self.first_after_drop {
            self.reads_before_drop = self.reads.count;
            self.first_after_drop = true;
        }
        self.drops += 1;
    }

    /// The pages have been dropped.
    pub fn drop_ended(&mut self) {
        self.drops = self.drops.saturating_sub(1);
    }

    /// The kernel is about to be told another size, and then drops pages.
    pub fn drop_follows(&mut self) {
        self.drop_begins();
        self.drop_ended();
        self.unseen = true;
    }

    /// A write(2) that is not answered yet has waited for the drops. The kernel holds the inode's
    /// lock from the filling of the write's pages until its answer. So the next write(2) fills its
    /// pages after the drops that have ended by now.
    pub fn drop_waited(&mut self) {
        if self.drops == 0 && !self.unseen && !self.taken_over {
            self.first_after_drop = false;
        }
    }

    /// A buffered write of these pages begins. `writeback`: it is a writeback of the kernel,
    /// without the inode's lock. Returns the part of it that counts as overtaken, if there is one.
    pub fn write_begins(&mut self, request: u64, range: PageRange, writeback: bool) -> Option<Overtaken> {
        let by_write = self.writes.higher(request, range);
        self.writes.note(request, range);
        if writeback {
            return None;
        }
        let by_read = self.reads.higher(request, range);
        let by_drop = match (self.first_after_drop, self.taken_over) {
            (false, _) => NO_PAGE,
            (true, true) => range,
            (true, false) => self.reads.since(self.reads_before_drop, range),
        };
        if self.drops == 0 {
            self.first_after_drop = false;
            self.unseen = false;
            self.taken_over = false;
        }
        let parts = [
            Some(by_write).filter(|_| keeps(Rule::Order)),
            Some(by_read).filter(|_| keeps(Rule::Overtaken)),
            Some(by_drop).filter(|_| keeps(Rule::Overtaken)),
        ];
        let pages = parts.into_iter().flatten().filter(|part| !part.is_empty()).reduce(PageRange::hull)?;
        // Forgotten READs may have touched other pages.
        let is_known = self.reads.forgotten <= request;
        Some(Overtaken { pages, last_is_free: is_known && by_read.end == range.end })
    }

    /// A buffered write of the bytes `offset..end` has ended; the backing file now has `size_bytes`
    /// bytes. Returns the index of a page that the kernel may have zeroed in part, although the
    /// backing file holds data there.
    pub fn write_ended(&mut self, offset: u64, end: u64, writeback: bool, size_bytes: u64) -> Option<u64> {
        let zeroed_from = match writeback {
            true if end.is_multiple_of(PAGE_SIZE as u64) => None,
            true => {
                self.written_back_to = Some(end);
                self.written_back_to.filter(|end| *end < size_bytes)
            }
            false => self.written_back_to.take().filter(|from| (offset..end).contains(from)),
        };
        zeroed_from.filter(|_| keeps(Rule::Zeroed)).map(|from| from / PAGE_SIZE as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(first: u64, end: u64) -> PageRange {
        PageRange { first, end }
    }

    #[test]
    fn a_higher_number_answered_first_has_overtaken() {
        let mut watch = Watch::default();
        assert_eq!(watch.write_begins(2, pages(0, 9), false), None);
        watch.read_answered(10, pages(4, 6));
        assert!(watch.write_begins(8, pages(5, 9), false).is_some());
        assert_eq!(watch.write_begins(12, pages(5, 9), false), None, "queued before the write");
        assert!(watch.write_begins(11, pages(6, 7), false).is_some(), "the write that was queued behind it has begun");
        for request in 0..REQUESTS_MAX as u64 {
            watch.read_answered(20 + request, pages(100, 101));
        }
        assert!(watch.write_begins(8, pages(30, 31), false).is_some(), "the READ before is forgotten");
        assert_eq!(watch.write_begins(40, pages(30, 31), false), None);
    }

    #[test]
    fn only_what_was_read_is_overtaken() {
        let mut watch = Watch::default();
        let of = |first, end, last_is_free| Some(Overtaken { pages: pages(first, end), last_is_free });
        assert_eq!(watch.write_begins(1, pages(0, 9), false), None);
        watch.read_answered(11, pages(2, 3));
        watch.read_answered(12, pages(5, 12));
        assert_eq!(watch.write_begins(10, pages(0, 9), false), of(2, 9, true));
        assert_eq!(watch.write_begins(10, pages(0, 5), false), of(2, 3, false));
        // These pages were read before the drop ended: nothing is known of the last one.
        watch.drop_begins();
        watch.read_answered(13, pages(3, 5));
        assert_eq!(watch.write_begins(20, pages(1, 5), false), of(3, 5, false));
        for request in 0..=REQUESTS_MAX as u64 {
            watch.read_answered(100 + request, pages(50, 51));
        }
        assert_eq!(watch.write_begins(99, pages(1, 5), false), of(1, 5, false), "earlier requests are forgotten");
    }

    #[test]
    fn a_later_write_applied_first_has_overtaken() {
        let mut watch = Watch::default();
        assert_eq!(watch.write_begins(7, pages(3, 4), true), None);
        assert!(watch.write_begins(6, pages(2, 4), false).is_some());
        assert_eq!(watch.write_begins(5, pages(0, 2), false), None, "other pages");
    }

    #[test]
    fn a_write_filled_before_a_drop_is_not_trusted_after_a_read() {
        let mut watch = Watch::default();
        watch.read_answered(1, pages(0, 4));
        watch.drop_begins();
        assert_eq!(watch.write_begins(2, pages(0, 4), false), None, "nothing was read since");
        watch.read_answered(3, pages(0, 4));
        assert!(watch.write_begins(4, pages(3, 4), false).is_some());
        watch.drop_ended();
        assert_eq!(watch.write_begins(5, pages(3, 4), true), None, "its page was under writeback");
        assert!(watch.write_begins(6, pages(3, 4), false).is_some());
        assert_eq!(watch.write_begins(7, pages(3, 4), false), None, "filled after the drop");
    }

    #[test]
    fn after_a_write_that_waited_for_the_drop_the_next_one_is_trusted() {
        let mut watch = Watch::default();
        watch.read_answered(8, pages(0, 4));
        assert!(watch.write_begins(7, pages(0, 4), false).is_some());
        watch.drop_begins();
        watch.read_answered(9, pages(0, 4));
        watch.drop_ended();
        watch.drop_waited();
        assert_eq!(watch.write_begins(10, pages(0, 4), false), None);
        // Another drop is in progress, or the kernel's own may be: the write has waited for
        // nothing.
        watch.drop_begins();
        watch.read_answered(11, pages(0, 4));
        watch.drop_waited();
        assert!(watch.write_begins(12, pages(0, 4), false).is_some());
        watch.drop_ended();
        watch.drop_follows();
        watch.read_answered(13, pages(0, 4));
        watch.drop_waited();
        assert!(watch.write_begins(14, pages(0, 4), false).is_some());
        assert_eq!(watch.write_begins(15, pages(0, 4), false), None);
    }

    #[test]
    fn what_the_kernel_writes_back_is_not_overtaken() {
        let mut watch = Watch::taken_over();
        watch.drop_begins();
        // Workers take the requests of one file in any order.
        for request in (0..4 * REQUESTS_MAX as u64).rev() {
            watch.read_answered(1000 + request, pages(0, 9));
            assert_eq!(watch.write_begins(request, pages(request, request + 2), true), None);
        }
        // The verdict on a write(2) is the same.
        assert!(watch.write_begins(2000, pages(3, 4), false).is_some());
    }

    #[test]
    fn a_page_that_is_written_back_while_its_end_moves_may_be_zeroed() {
        const PAGE: u64 = PAGE_SIZE as u64;
        let mut watch = Watch::default();
        // An append from byte 100 of page 3 on. It is applied before the writeback, or after it.
        let (old, new) = (3 * PAGE + 100, 3 * PAGE + 700);
        assert_eq!(watch.write_ended(old, new, false, new), None);
        assert_eq!(watch.write_ended(2 * PAGE, old, true, new), Some(3));
        assert_eq!(watch.write_ended(2 * PAGE, new, true, new), None, "with the new end");
        assert_eq!(watch.write_ended(new, new + 10, false, new + 10), Some(3));
        assert_eq!(watch.write_ended(new + 10, new + 20, false, new + 20), None, "the append before has been answered");
        // A writeback of whole pages is no evidence, nor is a write(2) elsewhere.
        assert_eq!(watch.write_ended(PAGE, 2 * PAGE, true, new), None);
        assert_eq!(watch.write_ended(3 * PAGE, new, true, new), None);
        assert_eq!(watch.write_ended(0, new, false, new), None, "up to the old end");
        assert_eq!(watch.write_ended(3 * PAGE, new, true, new), None);
        assert_eq!(watch.write_ended(new + 1, 4 * PAGE, false, 4 * PAGE), None, "behind a gap");
    }

    #[test]
    fn the_first_write_after_a_take_over_is_not_trusted() {
        let mut watch = Watch::taken_over();
        watch.drop_waited();
        assert!(watch.write_begins(9, pages(0, 1), false).is_some());
        assert_eq!(watch.write_begins(10, pages(0, 1), false), None);
    }
}
