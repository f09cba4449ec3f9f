//! Answering a READ: drives a [`Reading`] with the lenders' connections and the file below.

use crate::exchange::{Exchange, Raced};
use crate::logic::file::FileState;
use crate::logic::latencies::Size;
use crate::logic::reading::{ATTEMPTS_MAX, Got, Reading};
use crate::{Below, Borrower, File, Stamp};
use page::PAGE_SIZE;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a READ waits for a change of its pages that is being applied below. It depends on
/// nothing but the file system below, never on the kernel's FUSE pages, so it ends; the limit is
/// for a disk that hangs, on which the READ would hang too.
const CHANGE_WAIT: Duration = Duration::from_secs(30);

/// A READ out of the kernel's page cache (never a direct one).
pub struct ReadRequest<B> {
    /// What is read.
    pub file: Arc<File>,
    /// The backing file.
    pub below: Arc<B>,
    /// The kernel's number of the READ.
    pub request: u64,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How much is asked for, in bytes.
    pub len: usize,
}

/// One READ.
pub(crate) struct Asking<'a, B> {
    pub(crate) borrower: &'a Borrower,
    pub(crate) read: &'a ReadRequest<B>,
}

impl<B: Below + Send + Sync + 'static> Asking<'_, B> {
    fn range(&self) -> page::PageRange {
        Reading::range(self.read.offset, self.read.len)
    }

    fn begin(&self, reading: &mut Reading, state: &mut FileState) {
        let (core, ReadRequest { file, offset, len, .. }) = (&self.borrower.core, self.read);
        let positions = self.borrower.positions();
        reading.begin(core, file, state, positions, *offset, *len);
    }

    /// Begins, unless that has to wait.
    pub(crate) fn begin_at_once(&self, reading: &mut Reading) -> bool {
        let mut state = self.read.file.state.lock();
        let can_begin = !state.must_wait(self.range());
        if can_begin {
            self.begin(reading, &mut state);
        }
        can_begin
    }

    /// Fills `buf`, which is as long as the READ, from wherever the pages are; what was not asked
    /// for yet is. `raced` belongs to what was. `seen` is what the file looked like after all of it
    /// was filled, if it is. Returns the bytes read, which are fewer than asked for only at the end
    /// of the file.
    ///
    /// # Errors
    /// Those of the file below.
    pub(crate) fn finish(
        &self,
        reading: &mut Reading,
        mut has_begun: bool,
        mut raced: Option<Raced>,
        mut seen: Option<Stamp>,
        got: &mut Vec<Got>,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        let (core, ReadRequest { file, below, request, offset, .. }) = (&self.borrower.core, self.read);
        let begun = Instant::now();
        for attempt in 0.. {
            if !std::mem::take(&mut has_begun) {
                let mut state = file.state.lock();
                // Answered while a change is being applied, older bytes could stay in the kernel's
                // page cache behind it.
                if state.must_wait(self.range()) {
                    below.may_wait()?;
                }
                file.settled.wait_while_for(&mut state, |state| state.must_wait(self.range()), CHANGE_WAIT);
                self.begin(reading, &mut state);
                if attempt == ATTEMPTS_MAX {
                    let read = below.read_at(buf, *offset).inspect_err(|_| reading.fail(core, &mut state))?;
                    reading.end(core, file, &mut state, *request, &[]);
                    return Ok(read);
                }
                drop(state);
                reading.note_missed(core, file);
            }

            let read = self
                .fill(reading, raced.take(), seen.take(), got, buf)
                .inspect_err(|_| reading.fail(core, &mut file.state.lock()))?;

            if reading.end(core, file, &mut file.state.lock(), *request, &buf[..read]) {
                if !core.sees_evictions() {
                    self.borrower.reclaim_catalog();
                }
                if reading.is_sequential() {
                    let now = Instant::now();
                    reading.note_answered(core, now - self.borrower.began, now - begun);
                }
                return Ok(read);
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Fills `buf`. Returns the bytes before the end of the file.
    fn fill(
        &self,
        reading: &mut Reading,
        mut raced: Option<Raced>,
        seen: Option<Stamp>,
        got: &mut Vec<Got>,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        let (core, ReadRequest { file, below, offset, .. }) = (&self.borrower.core, self.read);
        if reading.is_plain() && raced.is_none() {
            let read = self.read_below(reading, buf, *offset)?;
            core.metrics.below_pages.add(read.div_ceil(PAGE_SIZE) as u64);
            if read < buf.len() {
                reading.short_end(core, file, below.stamp()?);
            }
            return Ok(read);
        }
        reading.fill_from_buffers(core, file, buf);
        while let Some(question) = reading.next_question(file) {
            let mut exchange = Exchange::with(self.borrower, question.lender);
            exchange.ask(question.keys);
            let asked = (question.keys.len(), question.is_sequential);
            while !reading.unanswered().is_empty() {
                let answer = exchange.receive(self.read, 0..buf.len(), reading.unanswered(), got, buf);
                exchange.returned_bad(answer.tell(core, reading, got, buf));
            }
            raced = exchange.raced.take().or(raced);
            exchange.end(Some(asked));
        }
        while let Some(bytes) = reading.next_below() {
            // What was raced is as new as what would be read now: the READ is done again if
            // anything has changed since it began.
            let known = raced.as_ref().map_or(bytes.end..bytes.end, |raced| raced.within(&bytes));
            for part in [bytes.start..known.start, known.clone(), known.end..bytes.end] {
                if part.is_empty() {
                    continue;
                }
                let piece = &mut buf[part.clone()];
                let read = match &raced {
                    Some(raced) if part == known => raced.copy(&part, piece),
                    _ => self.read_below(reading, piece, offset + part.start as u64)?,
                };
                piece[read..].fill(0);
                core.metrics.below_pages.add(read.div_ceil(PAGE_SIZE) as u64);
            }
        }
        Ok(reading.length(core, file, seen.map_or_else(|| below.stamp(), Ok)?))
    }

    /// Reads below, and notes how long that takes.
    fn read_below(&self, reading: &Reading, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let (pages, is_sequential) = (buf.len() / PAGE_SIZE, reading.is_sequential());
        let (begun, under_way) = (Instant::now(), self.borrower.reads_below.begin());
        let read = self.read.below.read_at(buf, offset)?;
        let took = begun.elapsed();
        self.borrower.below_times.note(took);
        if read > 0 {
            self.borrower.disk.note(took, begun + took, Size::of(pages, is_sequential));
            // Pieces may have been read ahead, which takes the disk's time elsewhere.
            if is_sequential && Size::of(pages, false) == Size::Large {
                self.borrower.core.stream_room.disk_took(pages, under_way.part(took));
            }
        }
        Ok(read)
    }
}
