//! Receives pages from a socket directly into their slots.
//!
//! The slots are reserved before ([`super::Store::reserve`]). Until they are committed or given up,
//! nobody else reads or writes them, and they are not marked reclaimable. An earlier mark does no
//! harm: the kernel does not take bytes that were written after the mark, and memory that it takes
//! before a page's first byte has arrived has no content.
//!
//! Bytes arrive in order and in any pieces, and exactly the bytes of the announced pages are
//! received. Pages without a slot are received, too, because the next frame follows them; their
//! bytes go to a place that nobody reads.

use super::slots::Mapping;
use page::PAGE_SIZE;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

/// Maximum number of memory pieces for one call of the kernel: the pages of the largest frame, if
/// none are adjacent.
const PIECES_MAX: usize = wire::ITEMS_MAX;

/// Pages that are being received.
pub struct InFlightPages {
    mapping: Arc<Mapping>,
    /// The slot of each page; `None` if there was no room for it.
    slots: Vec<Option<u32>>,
    received_bytes: usize,
}

impl InFlightPages {
    /// A value without pages, with room for that many.
    pub(super) fn new(mapping: Arc<Mapping>, pages: usize) -> InFlightPages {
        InFlightPages { mapping, slots: Vec::with_capacity(pages), received_bytes: 0 }
    }

    /// Adds a page, with the slot that was reserved for it.
    pub(super) fn expect(&mut self, slot: Option<u32>) {
        self.slots.push(slot);
    }

    /// The slots, in the order of the pages. The caller owns them from here on.
    pub fn take_slots(&mut self) -> Vec<Option<u32>> {
        std::mem::take(&mut self.slots)
    }

    /// Whether all pages have arrived.
    pub fn is_complete(&self) -> bool {
        self.left_bytes() == 0
    }

    fn left_bytes(&self) -> usize {
        self.slots.len() * PAGE_SIZE - self.received_bytes
    }

    /// The memory for the next bytes, in pieces: adjacent slots are one piece.
    fn pieces(&self) -> impl Iterator<Item = libc::iovec> {
        let first = self.received_bytes / PAGE_SIZE;
        let mut skipped_bytes = self.received_bytes % PAGE_SIZE;
        let address = |slot: &Option<u32>| slot.map_or(self.mapping.sink(), |slot| self.mapping.slot(slot));
        let runs = self.slots[first..].chunk_by(|slot, next| slot.is_some_and(|slot| *next == slot.checked_add(1)));
        runs.map(move |run| {
            let skipped_bytes = std::mem::take(&mut skipped_bytes);
            let base = address(&run[0]).cast::<u8>().wrapping_add(skipped_bytes);
            libc::iovec { iov_base: base.cast(), iov_len: run.len() * PAGE_SIZE - skipped_bytes }
        })
    }

    /// Takes bytes that were received already; no more than are expected.
    pub fn take(&mut self, mut bytes: &[u8]) {
        assert!(bytes.len() <= self.left_bytes(), "{} bytes behind the last page", bytes.len());
        let total_bytes = bytes.len();
        for piece in self.pieces() {
            let (now, later) = bytes.split_at(bytes.len().min(piece.iov_len));
            // SAFETY: the piece lies in slots that are reserved for these pages, or in the sink,
            // and has room for so many bytes.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), piece.iov_base.cast(), now.len()) };
            bytes = later;
            if bytes.is_empty() {
                break;
            }
        }
        self.received_bytes += total_bytes;
    }

    /// Receives the available bytes, without waiting. Returns their number: 0 if the other side has
    /// closed.
    ///
    /// # Errors
    /// Returns the errors of `recvmsg`; `WouldBlock` if nothing is available.
    pub fn receive(&mut self, socket: impl AsFd) -> io::Result<usize> {
        let mut pieces = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES_MAX];
        let mut count = 0;
        for (place, piece) in pieces.iter_mut().zip(self.pieces()) {
            *place = piece;
            count += 1;
        }
        // SAFETY: a message header of zeros is one without anything.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (pieces.as_mut_ptr(), count);
        // SAFETY: the pieces lie in slots that are reserved for these pages, or in the sink, and
        // the mapping stays as long as this value.
        let received = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        let received_bytes = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        self.received_bytes += received_bytes;
        Ok(received_bytes)
    }
}
