//! Put aggregation: evicted pages are collected in preallocated buffers, one message each. They
//! stay readable until the lender has answered (Puma 2015, §3.3.1: preallocation of request
//! buffers, aggregation of put requests).
//!
//! The path of an evicted page allocates no memory, and never more pages than fit the buffers are
//! between the kernel and the lenders. If all buffers are in use, the page is not lent: Puma is
//! only a cache. The lenders share the buffers, each up to its share. So a lender that is stuck
//! does not take the buffers of the others.

use locks::{Condvar, Mutex};
use page::{PAGE_SIZE, Page, PageId, Version};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use wire::{PutItem, WireKey};
use zerocopy::little_endian::U64;

/// The number of pages in a message: 256 KiB, some 40 µs of a 50 Gb/s network. So a get on the same
/// machine waits no longer than that for a put.
pub const BATCH_PAGES: usize = 64;

/// The number of buffers of all lenders, hence of puts in progress: 8 MiB.
pub const BATCHES_MAX: usize = 32;

/// The number of buffers that each lender may have, even with many lenders: one that is being
/// filled, and one on its way.
const SHARE_MIN: usize = 2;

/// The pages of one Put message.
pub struct Batch {
    items: Vec<PutItem>,
    pages: Box<[Page]>,
}

impl Batch {
    fn new(pages: usize) -> Batch {
        Batch { items: Vec::with_capacity(pages), pages: vec![[0; PAGE_SIZE]; pages].into_boxed_slice() }
    }

    /// Returns the keys and seals of the pages.
    pub fn items(&self) -> &[PutItem] {
        &self.items
    }

    /// Returns the bytes of the pages as the lender receives them, in the same order.
    pub fn pages(&self) -> &[Page] {
        &self.pages[..self.items.len()]
    }

    fn find(&self, version: Version) -> Option<&Page> {
        let at = self.items.iter().position(|item| item.key.version() == version)?;
        Some(&self.pages[at])
    }
}

/// The free buffers, which all lenders share.
pub struct Buffers {
    free: Mutex<Free>,
    returned: Condvar,
    total: usize,
    share: AtomicUsize,
}

struct Free {
    batches: Vec<Batch>,
    /// The number of times that a buffer was put back.
    returns: u64,
}

impl Buffers {
    /// Returns `batches` buffers, of `batch_pages` pages each.
    pub fn new(batches: usize, batch_pages: usize) -> Buffers {
        Buffers {
            free: Mutex::new(Free { batches: (0..batches).map(|_| Batch::new(batch_pages)).collect(), returns: 0 }),
            returned: Condvar::new(),
            total: batches,
            share: AtomicUsize::new(batches),
        }
    }

    /// From now on this number of lenders shares the buffers.
    pub(crate) fn share_among(&self, lenders: usize) {
        self.share.store((self.total / lenders.max(1)).max(SHARE_MIN), Ordering::Relaxed);
    }

    /// Returns the number of times that a buffer was put back so far, for [`Buffers::wait`].
    pub fn returns(&self) -> u64 {
        self.free.lock().returns
    }

    /// Waits until [`Buffers::returns`] differs from `returns`, for at most `limit`.
    pub fn wait(&self, returns: u64, limit: Duration) {
        self.returned.wait_while_for(&mut self.free.lock(), |free| free.returns == returns, limit);
    }

    fn has_free(&self) -> bool {
        !self.free.lock().batches.is_empty()
    }

    fn put_back(&self, batch: Batch) {
        let mut free = self.free.lock();
        free.batches.push(batch);
        free.returns += 1;
        self.returned.notify_all();
    }
}

/// Pages on their way to one lender.
pub struct PutQueue {
    buffers: Arc<Buffers>,
    /// The number of buffers in use by this queue.
    held: usize,
    filling: Option<Batch>,
    ready: VecDeque<Arc<Batch>>,
    sent: VecDeque<(u64, Arc<Batch>)>,
    /// Batches that were answered or abandoned, but that the sender still uses.
    leaving: Vec<Arc<Batch>>,
    /// The number of calls of [`PutQueue::abandon`] whose pages' entries are not yet invalidated.
    abandoning: u32,
    next_request: u64,
}

impl PutQueue {
    /// Returns an empty queue that takes its buffers from `buffers`.
    pub fn new(buffers: Arc<Buffers>) -> PutQueue {
        PutQueue {
            buffers,
            held: 0,
            filling: None,
            ready: VecDeque::new(),
            sent: VecDeque::new(),
            leaving: Vec::new(),
            abandoning: 0,
            next_request: 1,
        }
    }

    /// Returns whether [`PutQueue::push`] would find room.
    pub fn has_room(&mut self) -> bool {
        self.collect_leaving();
        self.filling.is_some() || self.held < self.buffers.share.load(Ordering::Relaxed) && self.buffers.has_free()
    }

    /// Takes a free buffer, if this lender may have one more.
    fn take(&mut self) -> Option<Batch> {
        if self.held >= self.buffers.share.load(Ordering::Relaxed) {
            return None;
        }
        let batch = self.buffers.free.lock().batches.pop()?;
        self.held += 1;
        Some(batch)
    }

    /// Adds a page to the buffer that is being filled. `seal` writes the page's bytes as the lender
    /// receives them, and returns their checksum. Returns false if there is no room; then `seal`
    /// was not called.
    pub fn push(&mut self, id: PageId, version: Version, seal: impl FnOnce(&mut Page) -> u64) -> bool {
        self.collect_leaving();
        let Some(mut batch) = self.filling.take().or_else(|| self.take()) else { return false };
        let checksum = seal(&mut batch.pages[batch.items.len()]);
        batch.items.push(PutItem { key: WireKey::new(id, version), checksum: U64::new(checksum) });
        if batch.items.len() == batch.pages.len() {
            self.ready.push_back(Arc::new(batch));
        } else {
            self.filling = Some(batch);
        }
        true
    }

    /// Returns whether a full buffer waits to be sent.
    pub(crate) fn has_full(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Returns whether any buffer waits to be sent.
    pub(crate) fn has_any(&self) -> bool {
        self.filling.is_some() || self.has_full()
    }

    /// Returns the next buffer to send, with the number of its request: a full one, or, with
    /// `partial`, the one that is being filled.
    pub fn next(&mut self, partial: bool) -> Option<(u64, Arc<Batch>)> {
        self.collect_leaving();
        if self.ready.is_empty() && partial {
            self.ready.extend(self.filling.take().map(Arc::new));
        }
        let batch = self.ready.pop_front()?;
        let request = self.next_request;
        self.next_request += 1;
        self.sent.push_back((request, batch.clone()));
        Some((request, batch))
    }

    /// The lender answered the oldest request, for this number of pages. Returns None if the
    /// request's number or its pages do not match: a protocol error of the lender.
    pub fn answered(&mut self, request: u64, pages: usize) -> Option<Arc<Batch>> {
        self.sent.front().filter(|(sent, batch)| *sent == request && batch.items.len() == pages)?;
        let (_, batch) = self.sent.pop_front()?;
        self.leaving.push(batch.clone());
        Some(batch)
    }

    /// The lender is lost: no put in progress will be answered. Returns their batches. The caller
    /// invalidates the entries of their pages, and then calls `PutQueue::abandoned`.
    pub fn abandon(&mut self) -> Vec<Arc<Batch>> {
        self.abandoning += 1;
        let sent = std::mem::take(&mut self.sent).into_iter().map(|(_, batch)| batch);
        let all: Vec<_> = sent.chain(self.ready.drain(..)).chain(self.filling.take().map(Arc::new)).collect();
        self.leaving.extend(all.iter().cloned());
        all
    }

    /// Returns whether that request was sent, or is being sent, and is neither answered nor
    /// abandoned.
    pub(crate) fn is_under_way(&self, request: u64) -> bool {
        self.sent.iter().any(|(sent, _)| *sent == request)
    }

    /// The entries of the abandoned pages are invalidated, so their buffers can be released.
    pub(crate) fn abandoned(&mut self) {
        self.abandoning -= 1;
        self.collect_leaving();
    }

    /// Returns whether entries may still name abandoned pages.
    pub(crate) fn is_being_abandoned(&self) -> bool {
        self.abandoning > 0
    }

    /// Returns the bytes of a page that is on its way, as the lender receives them.
    pub fn find(&self, version: Version) -> Option<&Page> {
        let waiting = self.filling.iter().chain(self.ready.iter().map(Arc::as_ref));
        waiting.chain(self.sent.iter().map(|(_, batch)| batch.as_ref())).find_map(|batch| batch.find(version))
    }

    /// Returns the number of messages that are being filled, wait to be sent, or wait for their
    /// answer.
    pub(crate) fn under_way(&self) -> usize {
        usize::from(self.filling.is_some()) + self.ready.len() + self.sent.len()
    }

    /// Puts back the buffers that were answered and that no thread uses any more.
    pub(crate) fn collect_leaving(&mut self) {
        for batch in std::mem::take(&mut self.leaving) {
            match Arc::try_unwrap(batch) {
                Ok(mut batch) => {
                    batch.items.clear();
                    self.held -= 1;
                    self.buffers.put_back(batch);
                }
                Err(held) => self.leaving.push(held),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::FileKey;

    fn id(index: u32) -> PageId {
        PageId { file: FileKey(1), index }
    }

    fn push(queue: &mut PutQueue, index: u32, version: u64) -> bool {
        queue.push(id(index), Version(version), |page| {
            page.fill(index as u8);
            0
        })
    }

    fn fill(queue: &mut PutQueue) -> u32 {
        let mut pushed = 0;
        while push(queue, pushed, pushed.into()) {
            pushed += 1;
        }
        pushed
    }

    #[test]
    fn bounded_and_readable_until_answered() {
        let buffers = Arc::new(Buffers::new(BATCHES_MAX, BATCH_PAGES));
        let mut queue = PutQueue::new(buffers.clone());
        assert_eq!(fill(&mut queue) as usize, BATCHES_MAX * BATCH_PAGES);
        assert!(!queue.has_room());
        let (request, batch) = queue.next(false).unwrap();
        assert_eq!(batch.items().len(), BATCH_PAGES);
        assert_eq!(queue.find(Version(3)).unwrap()[0], 3);
        assert!(queue.answered(request + 1, BATCH_PAGES).is_none(), "answers come in order");
        assert!(queue.answered(request, BATCH_PAGES - 1).is_none() && queue.is_under_way(request));
        assert_eq!(queue.answered(request, BATCH_PAGES).unwrap().pages()[5][0], 5);
        assert!(!queue.is_under_way(request));
        assert!(queue.find(Version(3)).is_none());
        assert!(!queue.has_room(), "the sender still holds the buffer");
        drop(batch);
        let returns = buffers.returns();
        queue.collect_leaving();
        assert_eq!(buffers.returns(), returns + 1, "a thread that waits for room is woken");
        assert!(queue.has_room());
        queue.abandon();
        queue.abandoned();
        assert_eq!((buffers.free.lock().batches.len(), queue.under_way()), (BATCHES_MAX, 0));
        assert_eq!(fill(&mut queue) as usize, BATCHES_MAX * BATCH_PAGES, "no buffer was lost");
    }

    #[test]
    fn a_partial_buffer_goes_when_asked() {
        let mut queue = PutQueue::new(Arc::new(Buffers::new(BATCHES_MAX, BATCH_PAGES)));
        assert!(push(&mut queue, 1, 9));
        assert!(queue.next(false).is_none());
        let (_, batch) = queue.next(true).unwrap();
        assert_eq!((batch.items().len(), batch.items()[0].key.version()), (1, Version(9)));
        assert_eq!(queue.find(Version(9)).unwrap()[0], 1);
        assert!(queue.next(true).is_none());
    }

    #[test]
    fn one_that_is_stuck_leaves_the_others_their_share() {
        let buffers = Arc::new(Buffers::new(8, 2));
        buffers.share_among(4);
        let mut queues: Vec<_> = (0..4).map(|_| PutQueue::new(buffers.clone())).collect();
        for queue in &mut queues {
            assert_eq!(fill(queue), 4);
        }
        assert!(!buffers.has_free());
        // Even with many lenders each may have two buffers, if any are free.
        buffers.share_among(100);
        queues[0].abandon();
        assert_eq!((fill(&mut queues[1]), fill(&mut queues[0])), (0, 4));
        buffers.share_among(1);
        for queue in &mut queues {
            queue.abandon();
            queue.abandoned();
        }
        assert_eq!(fill(&mut queues[3]), 16, "one lender alone has all buffers");
    }
}
