//! All that the borrower knows and decides, without sockets, clocks or threads: the edge tells it what happens and asks what to
//! do, and so does the simulation, which runs whole pools of it in one thread.
//!
//! Where an event stream's position is asked for, `produced` is how far the stream has been filled and `consumed` how far it has
//! been dealt with, both read when the call is made.

use super::catalog::{Catalog, File};
use super::entry::Entry;
use super::file::{ChangeTicket, Ended, FileState, Verdict};
use super::puts::{Batch, PutQueue};
use super::rules::{Rule, keeps};
use crate::below::Stamp;
use crate::metrics::Metrics;
use page::{ChecksumKey, FileKey, Page, PageId, PageRange};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use sync::Mutex;
use wire::WireKey;

/// Which copy of a page stays when it is read back (Puma 2015, §3.3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// The lender gives the page away: local and remote memory add up.
    Exclusive,
    /// The lender keeps it: a page read and evicted again need not be sent again.
    NonInclusive,
}

/// A change of a file, as the mount sees it coming.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A write out of the kernel's page cache, which holds the new bytes already and cannot evict them before the answer.
    Buffered {
        /// First byte written.
        offset: u64,
        /// Bytes written.
        len: u64,
        /// The kernel's number of the request.
        request: u64,
        /// Whether the kernel writes back by itself, without the inode's lock, rather than for a write(2).
        writeback: bool,
    },
    /// Any other change of the bytes `start..end`, by a request that the kernel sends with the inode locked: truncation, direct write, copy.
    /// The kernel drops what it caches of them only after the answer. A change of the file's size reaches to the end of the file: `end` is
    /// `u64::MAX`.
    Other {
        /// First byte changed.
        start: u64,
        /// Byte behind the last one changed.
        end: u64,
    },
    /// As `Other`, by fallocate: the kernel then zeroes those parts of its pages at the edges that are in the range, and drops the rest.
    Hole {
        /// First byte changed.
        start: u64,
        /// Byte behind the last one changed.
        end: u64,
    },
    /// As `Other`, by a request of which nothing more is known: a buffered write that is sent again, because the daemon that had it
    /// died.
    Doubtful {
        /// First byte changed.
        start: u64,
        /// Byte behind the last one changed.
        end: u64,
    },
    /// Attributes, names, extended attributes: no byte changes, but the change time does.
    Attributes,
}

/// A change under way.
pub struct Changing {
    change: Change,
    before: Stamp,
    overtaken: bool,
    /// None: of attributes only.
    ticket: Option<ChangeTicket>,
}

impl Changing {
    /// Whether the kernel has cached older bytes behind this write, and must drop its pages.
    pub fn is_overtaken(&self) -> bool {
        self.overtaken
    }
}

/// How a change has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was applied below as announced; this is what the file looks like now.
    Applied(Stamp),
    /// It failed, wholly or in part, within what was announced.
    Failed(Stamp),
    /// Something else has happened than what was announced.
    Unknown,
}

/// The lender said what it cannot know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confused;

/// What the borrower knows and decides.
pub struct Core {
    /// The files and their pages.
    pub catalog: Catalog,
    /// The counters.
    pub metrics: Metrics,
    /// What checksums are made with.
    key: ChecksumKey,
    strategy: Strategy,
    sees_evictions: bool,
    /// For each lender, what is on its way there.
    queues: Vec<Mutex<PutQueue>>,
    /// The lender whose buffer is being filled.
    filling: AtomicU8,
}

impl Core {
    /// For that many lenders, none of them up, with so many put buffers of so many pages each. Where evictions are not seen, the pool
    /// is filled with what is read.
    pub fn new(
        lenders: u8,
        (put_batches, batch_pages): (usize, usize),
        key: ChecksumKey,
        strategy: Strategy,
        sees_evictions: bool,
    ) -> Core {
        Core {
            catalog: Catalog::new(lenders),
            metrics: Metrics::default(),
            key,
            strategy,
            sees_evictions,
            queues: (0..lenders).map(|_| Mutex::new(PutQueue::new(put_batches, batch_pages))).collect(),
            filling: AtomicU8::new(0),
        }
    }

    /// How many lenders there are.
    pub fn lenders(&self) -> u8 {
        self.queues.len() as u8
    }

    /// What checksums are made with.
    pub fn key(&self) -> &ChecksumKey {
        &self.key
    }

    /// Whether lenders give away what they answer. Without a tap an eviction is not seen, so that a page given away would not
    /// come back to a lender.
    pub fn is_exclusive(&self) -> bool {
        self.strategy == Strategy::Exclusive && self.sees_evictions
    }

    /// Whether the kernel's evictions are seen.
    pub fn sees_evictions(&self) -> bool {
        self.sees_evictions
    }

    /// Puts on their way to that lender.
    pub fn queue(&self, lender: u8) -> &Mutex<PutQueue> {
        &self.queues[usize::from(lender)]
    }

    /// Announces a change, before it is applied below; `before` is what the file looks like now.
    pub fn begin_change(&self, file: &File, change: Change, before: Stamp) -> Changing {
        let mut changing = Changing { change, before, overtaken: false, ticket: None };
        let size = if keeps(Rule::End) { before.size_bytes } else { u64::MAX };
        let range = match change {
            Change::Attributes => {
                file.state.lock().begin_attributes();
                return changing;
            }
            Change::Buffered { offset, len, .. } => PageRange::touched_by(offset.min(size), offset.saturating_add(len)),
            // A change that reaches behind the end moves it.
            Change::Other { start, end } | Change::Hole { start, end } | Change::Doubtful { start, end } => {
                if end > size {
                    PageRange::touched_by(start.min(size), u64::MAX)
                } else {
                    PageRange::touched_by(start, end)
                }
            }
        };
        self.metrics.changes.one();
        self.watching_beside(file, |state, void| {
            changing.ticket = Some(state.begin_change(range, before, void));
            if matches!(change, Change::Buffered { writeback: false, .. } | Change::Other { .. } | Change::Hole { .. })
            {
                state.locked_request();
            }
            match change {
                Change::Buffered { request, writeback, .. } => {
                    changing.overtaken = state.write_begins(request, range, writeback);
                }
                Change::Hole { start, end } => state.hole_begins(start.min(size), end),
                _ => {}
            }
        });
        changing
    }

    /// The change has ended. Must come before the kernel gets its answer; `produced` is read after it was applied.
    pub fn end_change(&self, file: &File, changing: Changing, outcome: Outcome, produced: u64, consumed: u64) {
        let after = match outcome {
            Outcome::Applied(after) | Outcome::Failed(after) => Some(after),
            Outcome::Unknown => None,
        };
        let Some(ticket) = changing.ticket else {
            return file.state.lock().end_attributes(changing.before, after);
        };
        let as_announced = matches!(outcome, Outcome::Applied(_)) || !keeps(Rule::Failure);
        let ended = match changing.change {
            Change::Buffered { offset, len, .. } if as_announced && !changing.overtaken => Ended::Buffered {
                offset,
                end_offset: offset.saturating_add(len),
                old_size_bytes: changing.before.size_bytes,
                position: produced,
            },
            _ => Ended::Other,
        };
        let mut state = file.state.lock();
        state.end_change(ticket, ended, after, consumed);
        self.catalog.account(&mut state);
        file.settled.notify_all();
    }

    /// Compares the file with what we left; `moment` was taken before `now` was. If somebody changed it beside us, its remote
    /// pages are forgotten, and [`File::kernel_stale`] says so.
    pub fn observe(&self, file: &File, moment: u64, now: Stamp) {
        self.watching_beside(file, |state, void| state.observe(moment, now, void));
    }

    /// Runs what may find a change made beside us, and counts it.
    fn watching_beside<T>(&self, file: &File, run: impl FnOnce(&mut FileState, &mut dyn FnMut(u32, Entry)) -> T) -> T {
        let mut state = file.state.lock();
        let before = state.changes_beside();
        let result = run(&mut state, &mut |index, entry| self.catalog.void(file.key(), index, entry));
        self.catalog.account(&mut state);
        self.metrics.changes_beside.add(state.changes_beside() - before);
        result
    }

    /// The kernel has evicted a page of the file that it knows by `key`. Returns the lender for which a buffer has become full.
    pub fn evicted(&self, key: FileKey, index: u64, position: u64, page: &Page) -> Option<u8> {
        self.metrics.evictions.one();
        let Some(file) = self.catalog.file(key) else {
            self.metrics.evictions_unknown_file.one();
            return None;
        };
        let index = u32::try_from(index).ok()?;
        let mut state = file.state.lock();
        self.offer(&file, &mut state, index, position, page)
    }

    /// Has a page put, if it may be believed and a lender has room. The caller holds the file's state, so that nothing
    /// changes the page before its entry says where it is. Returns the lender for which a buffer has become full.
    pub(super) fn offer(
        &self,
        file: &File,
        state: &mut FileState,
        index: u32,
        position: u64,
        page: &Page,
    ) -> Option<u8> {
        let metrics = &self.metrics;
        let standing = |place| self.catalog.standing(place);
        let counter = match state.evict(index, position, page::is_zero(page), standing, self.catalog.has_room()) {
            Verdict::Put => return self.put(file, state, index, page),
            Verdict::Known => &metrics.evictions_known,
            Verdict::Zero => {
                self.catalog.account(state);
                &metrics.evictions_zero
            }
            Verdict::NoRoom => &metrics.evictions_no_room,
            Verdict::Changing | Verdict::Tainted | Verdict::Quarantined => &metrics.evictions_not_trusted,
        };
        counter.one();
        None
    }

    fn put(&self, file: &File, state: &mut FileState, index: u32, page: &Page) -> Option<u8> {
        let Some((lender, place)) = self.next_place() else {
            self.metrics.evictions_no_lender.one();
            return None;
        };
        let version = self.catalog.next_version()?;
        let id = PageId { file: file.key(), index };
        let mut queue = self.queue(lender).lock();
        if !queue.push(id, version, self.key.checksum(id, version, page), page) {
            drop(queue);
            self.metrics.evictions_no_room.one();
            // Another lender may have room for the next one.
            self.turn(lender);
            return None;
        }
        state.put(index, place, version);
        self.catalog.account(state);
        if !queue.has_full() {
            return None;
        }
        drop(queue);
        self.turn(lender);
        Some(lender)
    }

    /// Pages go to one lender until its buffer is full, then to the next, so that neighbours tend to stay together.
    pub(super) fn next_place(&self) -> Option<(u8, super::entry::Place)> {
        let count = self.queues.len() as u8;
        let first = self.filling.load(Ordering::Relaxed);
        let (lender, place) = (0..count)
            .map(|step| (first + step) % count)
            .find_map(|lender| Some((lender, self.catalog.place(lender)?)))?;
        self.filling.store(lender, Ordering::Relaxed);
        Some((lender, place))
    }

    fn turn(&self, lender: u8) {
        self.filling.store((lender + 1) % self.queues.len() as u8, Ordering::Relaxed);
    }

    /// The next buffer to send to that lender: a full one, or with `partial` the one being filled.
    pub fn next_put(&self, lender: u8, partial: bool) -> Option<(u64, Arc<Batch>)> {
        self.queue(lender).lock().next(partial)
    }

    /// A buffer of that many pages was sent.
    pub fn put_sent(&self, page_count: usize) {
        self.metrics.put_messages.one();
        self.metrics.put_pages.add(page_count as u64);
    }

    /// The lender is lost: what was on its way there will not be answered.
    pub fn abandon_puts(&self, lender: u8) {
        self.queue(lender).lock().abandon();
    }

    /// The lender has answered a put: for each page 1 if it was stored.
    ///
    /// # Errors
    /// [`Confused`] if that put was not made, or not next to be answered.
    pub fn puts_answered(&self, lender: u8, request: u64, statuses: &[u8]) -> Result<(), Confused> {
        let batch = self.queue(lender).lock().answered(request).ok_or(Confused)?;
        if batch.items().len() != statuses.len() {
            return Err(Confused);
        }
        for (item, status) in batch.items().iter().zip(statuses) {
            let (id, version, stored) = (item.key.id(), item.key.version(), *status == 1);
            let wanted =
                self.catalog.file(id.file).is_some_and(|file| file.state.lock().put_done(id.index, version, stored));
            if !stored {
                self.metrics.put_pages_refused.one();
            } else if !wanted {
                self.metrics.put_pages_outdated.one();
                self.catalog.drop_at_lender(id, version);
            }
        }
        Ok(())
    }

    /// A lender says that it no longer has these pages.
    pub fn pages_lost(&self, keys: &[WireKey]) {
        self.metrics.lost_pages.add(keys.len() as u64);
        for key in keys {
            if let Some(file) = self.catalog.file(key.id().file) {
                file.state.lock().gone(key.id().index, key.version(), None);
            }
        }
    }
}
