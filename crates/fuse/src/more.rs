//! READs that a worker takes from the kernel's queue while it handles one.

use crate::abi;
use crate::admission::{self, Admission, Class, Deferred, Who};
use crate::reply::Reply;
use crate::request::{Operation, Request};
use crate::session::Filesystem;
use crate::{Errno, leader};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use zerocopy::IntoBytes;

/// The READs that wait in the queue behind the one that is being handled.
pub struct More<'a> {
    device: &'a Arc<OwnedFd>,
    admission: &'a Admission,
    filesystem: &'a dyn Filesystem,
    capabilities: u64,
    leave: &'a AtomicBool,
    buffer: &'a mut [u8],
    /// The length in bytes of a request that was read and is not a READ. It is handled next.
    pub(crate) next_len: Option<usize>,
}

impl<'a> More<'a> {
    /// For a worker that reads into `buffer`.
    pub(crate) fn new(
        device: &'a Arc<OwnedFd>,
        admission: &'a Admission,
        filesystem: &'a dyn Filesystem,
        leave: &'a AtomicBool,
        capabilities: u64,
        buffer: &'a mut [u8],
    ) -> More<'a> {
        More { device, admission, filesystem, capabilities, leave, buffer, next_len: None }
    }

    /// For a READ that was deferred: no other READ is taken.
    pub(crate) fn none(
        device: &'a Arc<OwnedFd>,
        admission: &'a Admission,
        filesystem: &'a dyn Filesystem,
        leave: &'a AtomicBool,
    ) -> More<'a> {
        More { device, admission, filesystem, capabilities: 0, leave, buffer: &mut [], next_len: Some(0) }
    }

    /// The worker is about to wait for a disk, a network or another request: another worker reads
    /// requests meanwhile.
    pub fn about_to_wait(&self) {
        leader::about_to_wait();
    }

    /// Returns whether the worker has nothing else to do for a moment, so that it may keep its
    /// processor busy. If requests wait, the call counts as [`More::about_to_wait`].
    pub fn has_time(&self) -> bool {
        leader::has_time()
    }

    /// The worker is about to wait for the backing file of a READ: another worker reads requests
    /// meanwhile. Returns false if this user's READs hold enough workers. Then the caller gives the
    /// READ up, and defers it ([`More::defer`]).
    pub fn admit_read(&self) -> bool {
        admission::admit_read()
    }

    /// Defers a READ that [`More::admit_read`] has refused. It is handled when its user's READs
    /// hold fewer workers.
    pub fn defer(&self, request: &Request<'static>, reply: Reply<'a>) {
        let Operation::Read(args) = request.operation else { return };
        let len = size_of::<abi::InHeader>() + size_of::<abi::ReadIn>();
        let header = abi::InHeader { len: len as u32, total_extlen: 0, ..request.header };
        let bytes = [header.as_bytes(), args.as_bytes()].concat();
        let (class, device) = (Class::Read, self.device.clone());
        let who = Who::of(self.filesystem, Some(class), &header);
        match self.admission.defer(Deferred { class, who, bytes, device }) {
            true => reply.none(),
            false => drop(reply.error(Errno::NOMEM)),
        }
    }

    /// Waits until `other` is readable, or there is a request, for at most `limit`. Returns whether
    /// there is a request. Does not wait if another worker reads requests meanwhile, or if the
    /// request that was read last must be handled first.
    pub fn wait_beside(&self, other: BorrowedFd<'_>, limit: Duration) -> bool {
        self.next_len.is_none() && !self.leave.load(Ordering::Acquire) && leader::wait_beside(other, limit)
    }

    /// Returns the next request if it is a READ. Does not wait.
    pub fn next_read(&mut self) -> Option<(Request<'static>, Reply<'a>)> {
        if self.next_len.is_some() || self.leave.load(Ordering::Acquire) {
            return None;
        }
        // A request that was taken back, or a signal, also ends it. All other errors will still be
        // there at the next read.
        let len = rustix::io::read(&**self.device, &mut *self.buffer).ok().filter(|len| *len > 0)?;
        let request = Request::decode(&self.buffer[..len], self.capabilities);
        let Ok(Request { header, operation: Operation::Read(args), .. }) = request else {
            self.next_len = Some(len);
            return None;
        };
        leader::went_on();
        admission::handles(Who::of(self.filesystem, None, &header), None);
        Some((a_read(header, args), Reply::new(self.device.as_fd(), header.unique)))
    }
}

/// Returns a READ that does not borrow from the buffer it came in.
pub(crate) fn a_read(header: abi::InHeader, args: abi::ReadIn) -> Request<'static> {
    Request { header, operation: Operation::Read(args), supplementary_group: None }
}
