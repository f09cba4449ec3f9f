//! Answering a READ: from the lender where it has the pages, from the put buffers where they are still here, else from below.

use crate::edge::connection::Got;
use crate::logic::entry::Entry;
use crate::logic::file::{ReadTicket, Source};
use crate::{Below, Borrower, File, Stamp, Strategy};
use page::{PAGE_SIZE, Page, PageId, PageRange, Version};
use std::cell::RefCell;
use std::io;
use std::time::Duration;
use wire::{ITEMS_MAX, WireKey};

/// How often a READ is done again because its pages changed meanwhile. After that it keeps changes out while it reads.
const ATTEMPTS_MAX: u32 = 4;

/// How long a READ waits for a change of its pages that is being applied below. It depends on nothing but the file system
/// below, never on the kernel's FUSE pages, so it ends; the limit is for a disk that hangs, on which the READ would hang too.
const CHANGE_WAIT: Duration = Duration::from_secs(30);

/// What a thread needs for a READ, kept so that nothing is allocated while it is answered.
#[derive(Default)]
struct Scratch {
    sources: Vec<Source>,
    keys: Vec<WireKey>,
    places: Vec<usize>,
    got: Vec<Got>,
    /// Pages that the lender no longer has.
    gone: Vec<(u32, Version)>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Borrower {
    /// Answers a READ out of the kernel's page cache (never a direct one): from lenders where they have the pages, else from
    /// below. `request` is the kernel's number of it. Returns the bytes read, which are fewer than asked for only at the end of the
    /// file.
    ///
    /// # Errors
    /// Those of the file below.
    pub fn read(&self, file: &File, below: &dyn Below, request: u64, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.metrics.reads.one();
        SCRATCH.with_borrow_mut(|scratch| self.read_with(scratch, file, below, request, offset, buf))
    }

    fn read_with(
        &self,
        scratch: &mut Scratch,
        file: &File,
        below: &dyn Below,
        request: u64,
        offset: u64,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        let range = PageRange::touched_by(offset, offset.saturating_add(buf.len() as u64));
        let void = |index: u32, entry: Entry| self.catalog.void(file.key(), index, entry);
        for attempt in 0.. {
            let mut state = file.state.lock();
            // Answered while a change is being applied, older bytes could stay in the kernel's page cache behind it.
            file.settled.wait_while_for(&mut state, |state| state.is_changing(range), CHANGE_WAIT);
            let ticket = state.begin_read(
                range,
                self.produced(),
                self.consumed(),
                |place| self.catalog.is_valid(place),
                self.catalog.has_room(),
                &mut scratch.sources,
            );
            self.catalog.account(&mut state);
            if attempt == ATTEMPTS_MAX {
                let read = below.read_at(buf, offset)?;
                state.end_read(&ticket, request, void);
                return Ok(read);
            }
            drop(state);

            let read = self.fill(scratch, file, below, &ticket, offset, buf)?;

            let mut state = file.state.lock();
            for (index, version) in scratch.gone.drain(..) {
                state.gone(index, version, Some(&ticket));
            }
            if state.end_read(&ticket, request, void) {
                self.metrics.read_pages.add(read.div_ceil(PAGE_SIZE) as u64);
                if self.positions.is_none() {
                    self.fill_pool(scratch, file, &mut state, offset, &buf[..read]);
                }
                return Ok(read);
            }
            self.metrics.reads_repeated.one();
        }
        unreachable!("the last attempt returns")
    }

    /// Fills `buf` from wherever the pages are. Returns the bytes before the end of the file.
    fn fill(
        &self,
        scratch: &mut Scratch,
        file: &File,
        below: &dyn Below,
        ticket: &ReadTicket,
        offset: u64,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        let whole_pages = offset.is_multiple_of(PAGE_SIZE as u64) && buf.len().is_multiple_of(PAGE_SIZE);
        if !whole_pages || scratch.sources.iter().all(|source| *source == Source::Below) {
            let read = below.read_at(buf, offset)?;
            self.metrics.below_pages.add(read.div_ceil(PAGE_SIZE) as u64);
            if read < buf.len() {
                // An end that is not where we left it is somebody else's doing.
                self.compare(file, ticket, below.stamp()?);
            }
            return Ok(read);
        }
        let first = (offset / PAGE_SIZE as u64) as u32;
        self.fill_from_buffers(scratch, buf);
        self.fill_from_lender(scratch, file, first, buf);
        self.fill_from_below(scratch, below, offset, buf)?;

        // The size decides where the answer ends, so that nothing a page holds behind it is ever shown.
        let stamp = below.stamp()?;
        self.compare(file, ticket, stamp);
        Ok(stamp.size_bytes.saturating_sub(offset).min(buf.len() as u64) as usize)
    }

    /// If the file is not what we left, it was changed beside us, and [`Borrower::read_with`] reads it again.
    fn compare(&self, file: &File, ticket: &ReadTicket, now: Stamp) {
        if ticket.stamp.is_some_and(|stamp| stamp != now) {
            self.observe(file, ticket.moment(), now);
        }
    }

    fn fill_from_buffers(&self, scratch: &mut Scratch, buf: &mut [u8]) {
        let (pages, _) = buf.as_chunks_mut::<PAGE_SIZE>();
        for (source, page) in scratch.sources.iter_mut().zip(pages) {
            match *source {
                Source::Zero => {
                    page.fill(0);
                    self.metrics.zero_pages.one();
                }
                Source::Busy(place, version) => match self.puts.lock().find(version) {
                    Some(bytes) => {
                        *page = *bytes;
                        self.metrics.buffer_pages.one();
                    }
                    // The lender has answered meanwhile: it is there.
                    None => *source = Source::Lender(place, version),
                },
                Source::Below | Source::Lender(..) => {}
            }
        }
    }

    /// Gets what the lender has, in one message for each [`ITEMS_MAX`] pages. What fails becomes a read from below.
    fn fill_from_lender(&self, scratch: &mut Scratch, file: &File, first: u32, buf: &mut [u8]) {
        let Scratch { sources, keys, places, got, gone } = scratch;
        // Without a tap an eviction is not seen, so that a page given away would not come back to the lender.
        let exclusive = self.config.strategy == Strategy::Exclusive && self.positions.is_some();
        let mut next = 0;
        while next < sources.len() {
            keys.clear();
            places.clear();
            while next < sources.len() && keys.len() < ITEMS_MAX {
                if let Source::Lender(_, version) = sources[next] {
                    keys.push(WireKey::new(PageId { file: file.key(), index: first + next as u32 }, version));
                    places.push(next * PAGE_SIZE);
                }
                next += 1;
            }
            if keys.is_empty() {
                return;
            }
            let Some(mut session) = self.link.take() else {
                // More readers than connections, or the lender is just being lost: nothing is known of the pages.
                places.iter().for_each(|place| sources[place / PAGE_SIZE] = Source::Below);
                continue;
            };
            self.metrics.get_messages.one();
            match session.connection.get(keys, places, exclusive, buf, got) {
                Ok(()) => self.link.give_back(session),
                Err(error) => {
                    tracing::debug!("get failed: {error}");
                    self.link.give_up(session);
                    self.metrics.get_failures.one();
                    got.clear();
                    got.resize(keys.len(), Got::Miss);
                }
            }
            for ((key, place), got) in keys.iter().zip(places.iter()).zip(got.iter()) {
                let (id, version) = (key.id(), key.version());
                let good = match got {
                    Got::Miss => {
                        self.metrics.get_misses.one();
                        false
                    }
                    Got::Page { checksum } => {
                        let bytes = buf[*place..].first_chunk::<PAGE_SIZE>();
                        let good = bytes.is_some_and(|page| page::checksum(id, version, page) == *checksum);
                        if !good {
                            self.metrics.bad_pages.one();
                        }
                        good
                    }
                };
                if good {
                    self.metrics.lender_pages.one();
                } else {
                    sources[place / PAGE_SIZE] = Source::Below;
                }
                if exclusive || !good {
                    gone.push((id.index, version));
                }
            }
        }
    }

    /// Reads the pages that are nowhere else, each run of neighbours at once.
    fn fill_from_below(&self, scratch: &Scratch, below: &dyn Below, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let sources = &scratch.sources;
        let mut at = 0;
        while at < sources.len() {
            let run = sources[at..].iter().take_while(|source| **source == Source::Below).count();
            if run == 0 {
                at += 1;
                continue;
            }
            let bytes = &mut buf[at * PAGE_SIZE..(at + run) * PAGE_SIZE];
            let read = below.read_at(bytes, offset + (at * PAGE_SIZE) as u64)?;
            bytes[read..].fill(0);
            self.metrics.below_pages.add(read.div_ceil(PAGE_SIZE) as u64);
            at += run;
        }
        Ok(())
    }

    /// Fill on read: what came from the disk is put at once, as there is no tap to see it evicted.
    fn fill_pool(
        &self,
        scratch: &Scratch,
        file: &File,
        state: &mut crate::logic::file::FileState,
        offset: u64,
        bytes: &[u8],
    ) {
        let range = PageRange::touched_by(offset, offset + bytes.len() as u64);
        if !self.lender_is_up() || range.first * PAGE_SIZE as u64 != offset {
            return;
        }
        let (whole, tail) = bytes.as_chunks::<PAGE_SIZE>();
        let mut last: Page = [0; PAGE_SIZE];
        last[..tail.len()].copy_from_slice(tail);
        let pages = whole.iter().chain((!tail.is_empty()).then_some(&last));
        for ((index, source), page) in (range.first..range.end).zip(&scratch.sources).zip(pages) {
            if *source == Source::Below
                && let Ok(index) = u32::try_from(index)
            {
                self.offer(file, state, index, u64::MAX, page);
            }
        }
        self.work.notify_one();
    }
}
