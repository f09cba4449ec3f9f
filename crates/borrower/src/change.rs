//! [`ChangeGuard`]: a change in progress, from its announcement to its end.

use crate::Borrower;
use crate::backing::Stamp;
use crate::catalog::File;
use crate::catalog::overtaking::Overtaken;
use crate::core::{Changing, Outcome};

/// A change in progress. It must end before the kernel gets its answer: by
/// [`ChangeGuard::applied`], by [`ChangeGuard::failed`], or by being dropped. A drop means that
/// something else than the announced change has happened.
pub struct ChangeGuard<'a> {
    pub(crate) borrower: &'a Borrower,
    pub(crate) file: &'a File,
    pub(crate) changing: Option<Changing>,
}

impl ChangeGuard<'_> {
    /// Returns the pages that the kernel may have cached with older bytes after this write, if
    /// there are any. The kernel must drop them.
    pub fn overtaken(&self) -> Option<Overtaken> {
        self.changing.as_ref().and_then(Changing::overtaken)
    }

    /// The change was applied to the backing file as announced; `after` is its stamp now, and it
    /// holds the bytes of `written`, at that offset. Returns the index of the page of which the
    /// kernel may have zeroed a part, if there is one. The kernel must drop that page (R33).
    pub fn applied(mut self, after: Stamp, written: Option<(u64, &[u8])>) -> Option<u64> {
        self.end(Outcome::Applied(after), written)
    }

    /// The change failed, wholly or in part, within the announced range; `after` is the file's
    /// stamp now. Returns the index of a page as [`ChangeGuard::applied`] does.
    pub fn failed(mut self, after: Stamp) -> Option<u64> {
        self.end(Outcome::Failed(after), None)
    }

    fn end(&mut self, outcome: Outcome, written: Option<(u64, &[u8])>) -> Option<u64> {
        let changing = self.changing.take()?;
        let borrower = self.borrower;
        // The stream's position is read after the change was applied: every event of older content
        // lies before it.
        let positions = borrower.positions();
        borrower.core.end_change(self.file, changing, outcome, positions, written)
    }
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.end(Outcome::Unknown, None);
    }
}
