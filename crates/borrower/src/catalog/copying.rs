//! Copies that the backing file system makes by itself (copy_file_range, where it can share
//! blocks).
//!
//! After such a copy the kernel drops all pages that it touches, whatever they hold
//! (fs/fuse/file.c, `fuse_copy_file_range`; 6.1 to 6.18). Bytes that a mapping has meanwhile stored
//! into these pages would be lost, even bytes outside the copied range.

use crate::catalog::rules::{Rule, keeps};
use page::PAGE_SIZE;

/// Returns whether the backing file system may copy `len` bytes to `offset` of a file. `is_to_end`:
/// the file ends at the end of the copy, or before. `may_be_stored_to`: the file may be mapped for
/// writing. (R34)
pub fn may_be_copied_below(offset: u64, len: u64, is_to_end: bool, may_be_stored_to: bool) -> bool {
    let is_whole = |bytes: u64| bytes.is_multiple_of(PAGE_SIZE as u64);
    !keeps(Rule::Copied) || !may_be_stored_to && is_whole(offset) && (is_whole(len) || is_to_end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_are_copied_below_where_nobody_stores() {
        const PAGE: u64 = PAGE_SIZE as u64;
        assert!(may_be_copied_below(PAGE, 2 * PAGE, false, false));
        assert!(may_be_copied_below(PAGE, PAGE + 1, true, false));
        assert!(!may_be_copied_below(PAGE, PAGE + 1, false, false));
        assert!(!may_be_copied_below(PAGE + 512, PAGE, false, false));
        assert!(!may_be_copied_below(PAGE, PAGE, true, true));
    }
}
