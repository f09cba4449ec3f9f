//! A [`ChangeGuard`] stands for a change under way, from its announcement to its end.

use crate::Borrower;
use crate::backing::Stamp;
use crate::catalog::File;
use crate::catalog::overtaking::Overtaken;
use crate::core::{Changing, Outcome};

/// A change under way. Must end before the kernel gets its answer: by [`ChangeGuard::applied`], by
/// [`ChangeGuard::failed`], or by being dropped, which says that something else has happened than
/// what was announced.
pub struct ChangeGuard<'a> {
    pub(crate) borrower: &'a Borrower,
    pub(crate) file: &'a File,
    pub(crate) changing: Option<Changing>,
}

impl ChangeGuard<'_> {
    /// The pages, if any, that the kernel may have cached with older bytes behind this write, and
    /// must drop.
    pub fn overtaken(&self) -> Option<Overtaken> {
        self.changing.as_ref().and_then(Changing::overtaken)
    }

    /// The change was applied below as announced; `after` is what the file looks like now, and it
    /// holds the bytes of `written`, at that offset. Returns the index of the page, if any, of
    /// which the kernel may have zeroed a part, and which it must drop (R33).
    pub fn applied(mut self, after: Stamp, written: Option<(u64, &[u8])>) -> Option<u64> {
        self.end(Outcome::Applied(after), written)
    }

    /// The change failed, wholly or in part, within what was announced; `after` is what the file
    /// looks like now. Returns a page as [`ChangeGuard::applied`] does.
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
