//! A write(2) that a READ has overtaken, and the writeback of its pages until they are dropped.
//!
//! The kernel fills its pages for a write(2), unlocks them, and sends the WRITE later. If a page is
//! dropped in between and read again, the page has the old bytes, while the backing file gets the
//! new ones. If a program then stores into another part of this page through a mapping, the kernel
//! writes the whole page back, with the old bytes. So the write would be lost. Every FUSE file
//! system has this fault of the kernel. Here it would occur more often, because pages are dropped
//! more often.
//!
//! The mount detects that a write(2) is overtaken (docs/design/consistency.md, R20), and answers it
//! when the kernel has dropped the pages. Until then it remembers the old bytes of the file and the
//! bytes of the write. If the kernel writes back a byte equal to the old one, the byte of the write
//! replaces it. A program that has stored this same byte has done so before the write, which has
//! not returned.

use page::PAGE_SIZE;
use parking_lot::Mutex;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The unanswered overtaken write(2) of a file. There is at most one, because the kernel holds the
/// inode's lock from filling the pages until the answer. It needs as much memory as two requests.
#[derive(Default)]
pub(crate) struct OvertakenWrite {
    /// The kernel's number of the remembered write. 0: none, which is usual. It changes under the
    /// lock.
    request: AtomicU64,
    remembered: Mutex<Option<Remembered>>,
}

struct Remembered {
    /// Offset of the first byte in the file.
    offset: u64,
    before: Vec<u8>,
    written: Vec<u8>,
}

impl Remembered {
    /// The intersection of the write with the `len` bytes at `offset` of the file, as a range of
    /// the write's bytes. Empty if there is none.
    fn overlap(&self, offset: u64, len: u64) -> Range<usize> {
        let end = offset.saturating_add(len).min(self.offset + self.before.len() as u64);
        let start = offset.max(self.offset).min(end.max(self.offset));
        (start - self.offset) as usize..(end.max(start) - self.offset) as usize
    }
}

impl OvertakenWrite {
    /// Remembers that the kernel's `request` is about to write `written` at `offset`, where the
    /// file has `before`, of the same length. It is remembered until the guard is dropped.
    pub(crate) fn begins(&self, request: u64, offset: u64, before: Vec<u8>, written: &[u8]) -> Remembering<'_> {
        debug_assert_eq!(before.len(), written.len());
        let mut remembered = self.remembered.lock();
        *remembered = Some(Remembered { offset, before, written: written.to_owned() });
        self.request.store(request, Ordering::Release);
        Remembering { write: self, request }
    }

    /// The kernel's number of the remembered write. 0: none.
    pub(crate) fn request(&self) -> u64 {
        self.request.load(Ordering::Acquire)
    }

    /// Forgets bytes of the write that a READ is about to return. `seen` is the value of
    /// [`OvertakenWrite::request`] before the READ began. The READ has waited for that write
    /// (docs/design/consistency.md, R10), and no older copy of its pages is left (K2). So later
    /// stores into them come after the write.
    pub(crate) fn is_read(&self, seen: u64, offset: u64, len: u64) {
        if seen == 0 {
            return;
        }
        let mut remembered = self.remembered.lock();
        let Some(write) = remembered.as_mut().filter(|_| self.request() == seen) else { return };
        let read = write.overlap(offset, len);
        write.before[read.clone()].copy_from_slice(&write.written[read]);
    }

    /// Returns the bytes to write in place of `data`, which the kernel writes back at `offset`.
    pub(crate) fn merged<'a>(&self, offset: u64, data: &'a [u8]) -> Cow<'a, [u8]> {
        let mut merged = Cow::Borrowed(data);
        let remembered = self.remembered.lock();
        let Some(write) = &*remembered else { return merged };
        for there in write.overlap(offset, data.len() as u64) {
            let here = (write.offset + there as u64 - offset) as usize;
            if data[here] == write.before[there] && data[here] != write.written[there] {
                merged.to_mut()[here] = write.written[there];
            }
        }
        merged
    }
}

/// A guard that keeps an overtaken write remembered.
pub(crate) struct Remembering<'a> {
    write: &'a OvertakenWrite,
    request: u64,
}

impl Drop for Remembering<'_> {
    fn drop(&mut self) {
        let mut remembered = self.write.remembered.lock();
        if self.write.request() == self.request {
            *remembered = None;
            self.write.request.store(0, Ordering::Release);
        }
    }
}

/// The part of `start..end`, in bytes, that lies in the pages of `pages`.
pub(crate) fn within(pages: page::PageRange, start: u64, end: u64) -> (u64, u64) {
    let bytes = |page: u64| page.saturating_mul(PAGE_SIZE as u64);
    let start = start.max(bytes(pages.first)).min(end);
    (start, end.min(bytes(pages.end)).max(start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::PageRange;

    #[test]
    fn what_is_of_before_gives_way_and_what_was_stored_stays() {
        let write = OvertakenWrite::default();
        assert_eq!(&*write.merged(0, b"abc"), b"abc");
        let remembering = write.begins(7, 10, b"beforehand".to_vec(), b"afterwards");
        // A page with the bytes of before, but for two that were stored; it begins and ends
        // elsewhere.
        let merged = write.merged(8, b"..bef--ehand..");
        assert_eq!(&*merged, b"..aft--wards..");
        assert!(matches!(write.merged(8, b"..afterwards"), Cow::Borrowed(_)), "it has the bytes of the write");
        assert!(matches!(write.merged(20, b"beforehand"), Cow::Borrowed(_)), "another place");
        assert_eq!(&*write.merged(19, b"dd"), b"sd");
        assert_eq!(&*write.merged(0, b"..........b"), b"..........a");
        // A READ since the write began has seen it: here of the first five bytes.
        write.is_read(0, 0, 20);
        write.is_read(6, 0, 20);
        assert_eq!(&*write.merged(10, b"beforehand"), b"afterwards");
        write.is_read(write.request(), 0, 15);
        assert_eq!(&*write.merged(10, b"beforehand"), b"beforwards");
        // Another one has taken its place.
        let other = write.begins(8, 0, b"b".to_vec(), b"a");
        drop(remembering);
        assert_eq!(&*write.merged(0, b"b"), b"a");
        drop(other);
        assert_eq!(&*write.merged(0, b"b"), b"b");
    }

    #[test]
    fn the_part_of_a_write_in_pages() {
        let pages = |first, end| PageRange { first, end };
        assert_eq!(within(pages(1, 3), 100, 20_000), (4096, 12_288));
        assert_eq!(within(pages(0, 9), 100, 20_000), (100, 20_000));
        let (start, end) = within(pages(7, 9), 100, 20_000);
        assert_eq!(start, end);
        let (start, end) = within(pages(0, 1), 5000, 20_000);
        assert_eq!(start, end);
    }
}
