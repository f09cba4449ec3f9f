//! These methods of [`File`] answer the mount, and take what it says of one file.

use crate::catalog::File;
use crate::{Left, Stamp};
use std::ops::Range;

/// Pages that a file's state is locked for at once, where many are looked at.
const SPAN_PAGES: u32 = 1024;

impl File {
    /// Where the file's changes stand. Take it before looking at the file below, for
    /// [`crate::Borrower::observe`].
    pub fn moment(&self) -> u64 {
        self.state.lock().moment()
    }

    /// Whether the file was left so, and nobody was writing it then. If not,
    /// [`crate::Borrower::observe`] wants to know who may be.
    pub fn is_sure_of(&self, stamp: Stamp) -> bool {
        self.state.lock().is_sure_of(stamp)
    }

    /// The file looks like this now. Returns its ctime, in nanoseconds since the epoch, at the last
    /// change that the mount has not made itself.
    pub fn beside_ctime_ns(&self, stamp: Stamp) -> i128 {
        self.state.lock().beside_ctime_ns(stamp)
    }

    /// Whether the kernel may believe in an older end than that of the backing file, because
    /// somebody has changed the file beside the mount.
    pub fn end_is_unsure(&self) -> bool {
        self.state.lock().end_is_unsure()
    }

    /// The kernel has been made to believe in this end, if it believed in an earlier one.
    pub fn end_moved(&self, size_bytes: u64) {
        self.state.lock().end_moved(size_bytes);
    }

    /// The kernel is about to be told to drop pages of the file. Buffered writes that it drops them
    /// under are found ([`crate::ChangeGuard::overtaken`]).
    pub fn drop_begins(&self) {
        self.state.lock().drop_begins();
    }

    /// It has dropped them; as often as [`File::drop_begins`].
    pub fn drop_ended(&self) {
        self.state.lock().drop_ended();
    }

    /// The answer to a write(2) has waited until it had dropped them, and is given next.
    pub fn drop_waited(&self) {
        self.state.lock().drop_waited();
    }

    /// The kernel is about to be told the file's size. If it is another than it knows, it drops
    /// pages by itself.
    pub fn tell_size(&self, size_bytes: u64) {
        self.state.lock().tell_size(size_bytes);
    }

    /// How it was read says no more how it will be.
    pub fn forget_passes(&self) {
        self.state.lock().forget_passes();
    }

    /// Whether the kernel caches bytes that somebody has changed beside the mount. If so, the
    /// caller has the kernel drop all it caches of the file, and says so with this number to
    /// [`File::kernel_dropped`].
    pub fn kernel_stale(&self) -> Option<u64> {
        self.state.lock().kernel_stale()
    }

    /// A guest has read these pages. How many of them the kernel cached last because that guest had
    /// evicted them.
    pub fn read_by_guest(&self, indexes: Range<u32>) -> u64 {
        // Not so many at once that READs have to wait for it.
        let pieces = indexes.clone().step_by(SPAN_PAGES as usize);
        let piece = |first: u32| first..first.saturating_add(SPAN_PAGES).min(indexes.end);
        pieces.map(|first| self.state.lock().read_by_guest(piece(first))).sum()
    }

    /// Pages that the kernel cached last because a guest had evicted them. It may have evicted them
    /// since.
    pub fn placed_pages(&self) -> u64 {
        self.state.lock().placed_pages()
    }

    /// How the file is left to a daemon that takes over ([`crate::Borrower::restore`]).
    pub fn left(&self) -> Left {
        self.state.lock().left()
    }

    /// The kernel has dropped all that it cached when [`File::kernel_stale`] said this number.
    pub fn kernel_dropped(&self, number: u64) {
        self.state.lock().kernel_dropped(number);
    }
}
