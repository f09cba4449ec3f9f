//! Methods of [`File`] for the mount.

use crate::catalog::File;
use crate::{Left, Stamp};
use std::ops::Range;

/// The number of pages for which a file's state is locked at once, in long scans.
const SPAN_PAGES: u32 = 1024;

impl File {
    /// Returns a number that grows with every change of the file. Take it before the file's stamp,
    /// for [`crate::Borrower::observe`].
    pub fn moment(&self) -> u64 {
        self.state.lock().moment()
    }

    /// Returns whether this is the recorded stamp, and no external writer was active when it was
    /// taken. If not, [`crate::Borrower::observe`] needs a check for writers.
    pub fn is_sure_of(&self, stamp: Stamp) -> bool {
        self.state.lock().is_sure_of(stamp)
    }

    /// `stamp` is the file's stamp now. Returns the ctime of the last external change, in
    /// nanoseconds since the epoch.
    pub fn external_ctime_ns(&self, stamp: Stamp) -> i128 {
        self.state.lock().external_ctime_ns(stamp)
    }

    /// Returns whether the kernel may have a smaller or larger size than the backing file, because
    /// of an external change.
    pub fn end_is_unsure(&self) -> bool {
        self.state.lock().end_is_unsure()
    }

    /// The kernel was given this size, if it had a smaller one.
    pub fn end_moved(&self, size_bytes: u64) {
        self.state.lock().end_moved(size_bytes);
    }

    /// The daemon is about to make the kernel drop pages of the file. Buffered writes during the
    /// drop are detected ([`crate::ChangeGuard::overtaken`]).
    pub fn drop_begins(&self) {
        self.state.lock().drop_begins();
    }

    /// The kernel has dropped the pages. Must be called once for each [`File::drop_begins`].
    pub fn drop_ended(&self) {
        self.state.lock().drop_ended();
    }

    /// The answer to a write(2) has waited until the kernel had dropped the pages, and is sent
    /// next.
    pub fn drop_waited(&self) {
        self.state.lock().drop_waited();
    }

    /// The kernel is about to be told the file's size. If the kernel has another size, it drops
    /// pages by itself.
    pub fn tell_size(&self, size_bytes: u64) {
        self.state.lock().tell_size(size_bytes);
    }

    /// Forgets the history of streams: past reads predict future reads no longer.
    pub fn forget_passes(&self) {
        self.state.lock().forget_passes();
    }

    /// Returns whether the kernel may cache bytes that an external change has replaced. If so, the
    /// caller makes the kernel drop all cached pages of the file, and passes this number to
    /// [`File::kernel_dropped`].
    pub fn kernel_stale(&self) -> Option<u64> {
        self.state.lock().kernel_stale()
    }

    /// A guest has read these pages. Returns how many of them the kernel last cached because that
    /// guest had evicted them.
    pub fn read_by_guest(&self, indexes: Range<u32>) -> u64 {
        // In pieces, so that READs need not wait for long.
        let pieces = indexes.clone().step_by(SPAN_PAGES as usize);
        let piece = |first: u32| first..first.saturating_add(SPAN_PAGES).min(indexes.end);
        pieces.map(|first| self.state.lock().read_by_guest(piece(first))).sum()
    }

    /// Returns the number of pages that the kernel last cached because a guest had evicted them.
    /// The kernel may have evicted them since.
    pub fn placed_pages(&self) -> u64 {
        self.state.lock().placed_pages()
    }

    /// Returns the state that a successor needs ([`crate::Borrower::restore`]).
    pub fn left(&self) -> Left {
        self.state.lock().left()
    }

    /// The kernel has dropped all pages that it had cached when [`File::kernel_stale`] returned
    /// this number.
    pub fn kernel_dropped(&self, number: u64) {
        self.state.lock().kernel_dropped(number);
    }
}
