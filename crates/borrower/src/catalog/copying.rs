//! Copies that the file system below makes by itself (copy_file_range, where it can share blocks).
//!
//! After such a copy the kernel drops all pages that it touches, whatever they hold
//! (fs/fuse/file.c, `fuse_copy_file_range`; 6.1 to 6.18). What a mapping has stored into them
//! meanwhile, be it beside the bytes that are copied, would be lost.

use crate::catalog::rules::{Rule, keeps};
use page::PAGE_SIZE;

/// Whether `len` bytes may be copied below to that offset of a file. `is_to_end`: the file ends
/// there, or before. `may_be_stored_to`: somebody may have mapped it for writing. (R34)
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
