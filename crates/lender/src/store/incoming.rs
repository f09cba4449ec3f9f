//! Pages on their way from a socket into their slots, without a buffer in between.
//!
//! The slots are reserved before ([`super::Store::reserve`]), so that until they are committed or
//! given up nobody else reads or writes them, and the kernel is not told that it may take them.
//! That it may have been told so earlier does no harm: what was written since then is not its to
//! take, and what it takes before a page's first byte has come is memory without meaning.
//!
//! Bytes come in order and in whatever pieces, and exactly those of the announced pages are
//! received. Pages for which there was no room are received, too, as the next frame is behind them,
//! and end in a place that nobody reads.

use super::slots::Mapping;
use page::PAGE_SIZE;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

/// Pieces of memory that one call of the kernel receives into: the pages of the largest frame, none
/// beside the other.
const PIECES_MAX: usize = wire::ITEMS_MAX;

/// Pages that are being received.
pub struct Incoming {
    mapping: Arc<Mapping>,
    /// Where each of them goes; `None`: there was no room for it.
    slots: Vec<Option<u32>>,
    received_bytes: usize,
}

impl Incoming {
    /// None yet, and room to note so many.
    pub(super) fn new(mapping: Arc<Mapping>, pages: usize) -> Incoming {
        Incoming { mapping, slots: Vec::with_capacity(pages), received_bytes: 0 }
    }

    /// One more is expected, in a slot that was reserved for it.
    pub(super) fn expect(&mut self, slot: Option<u32>) {
        self.slots.push(slot);
    }

    /// The slots, in the order of the pages; from here on they are not this value's any more.
    pub fn take_slots(&mut self) -> Vec<Option<u32>> {
        std::mem::take(&mut self.slots)
    }

    /// Whether all have come.
    pub fn is_complete(&self) -> bool {
        self.left_bytes() == 0
    }

    fn left_bytes(&self) -> usize {
        self.slots.len() * PAGE_SIZE - self.received_bytes
    }

    /// What is to come next, in pieces of memory: those of neighbouring slots are one.
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

    /// Receives what is there, without waiting. Returns how many bytes that were: none, where the
    /// other side has closed.
    ///
    /// # Errors
    /// Those of `recvmsg`; `WouldBlock` where nothing is there.
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
