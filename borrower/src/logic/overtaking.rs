//! Whether a READ has overtaken a buffered write.
//!
//! The kernel lets go of a write's pages before it sends the write (fs/fuse/file.c, fuse_fill_write_pages), and dropping cached pages does
//! not wait for it: so once pages are dropped, a READ can be queued behind a write that we have not seen yet, and be answered before
//! it, with older bytes, which then stay in the kernel's cache. The kernel numbers its requests in the order in which it queues them
//! (fs/fuse/dev.c, fuse_get_unique), which tells the two cases apart: a READ that was answered although its number is higher.
//!
//! Only files of which pages were dropped need the watch.

use page::PageRange;

/// Answered READs remembered. A write that waited for longer counts as overtaken.
const READS_MAX: usize = 16;

/// The READs that were answered last.
pub struct Watch {
    reads: [(u64, PageRange); READS_MAX],
    next: usize,
    /// Highest number of a READ that is no longer remembered.
    forgotten: u64,
}

impl Default for Watch {
    fn default() -> Watch {
        Watch { reads: [(0, PageRange { first: 0, end: 0 }); READS_MAX], next: 0, forgotten: 0 }
    }
}

impl Watch {
    /// A READ of `range` is answered.
    pub fn answered(&mut self, request: u64, range: PageRange) {
        let slot = &mut self.reads[self.next % READS_MAX];
        self.forgotten = self.forgotten.max(slot.0);
        *slot = (request, range);
        self.next += 1;
    }

    /// Whether a READ of a page of `range` that was queued behind this write is answered already.
    pub fn has_overtaken(&self, request: u64, range: PageRange) -> bool {
        self.forgotten > request || self.reads.iter().any(|(read, of)| *read > request && of.overlaps(range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_higher_number_answered_first_has_overtaken() {
        let pages = |first, end| PageRange { first, end };
        let mut watch = Watch::default();
        assert!(!watch.has_overtaken(2, pages(0, 9)));
        watch.answered(10, pages(4, 6));
        assert!(watch.has_overtaken(8, pages(5, 9)));
        assert!(!watch.has_overtaken(12, pages(5, 9)), "queued before the write");
        assert!(!watch.has_overtaken(8, pages(6, 9)), "other pages");
        for request in 0..READS_MAX as u64 {
            watch.answered(20 + request, pages(100, 101));
        }
        assert!(watch.has_overtaken(8, pages(6, 9)), "it cannot know any more");
        assert!(!watch.has_overtaken(12, pages(6, 9)));
    }
}
