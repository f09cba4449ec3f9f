//! Serves READs that are available at once, with few requests to lenders.
//!
//! Most of the cost of a page from a lender is the round trip: system calls, and waking threads. So
//! a worker dequeues further READs while one lender has all their pages, and sends one request for
//! all of them. While that request is in progress, it does so for READs that have arrived since, so
//! the lender always has work. A READ that needs the backing file, or may have to wait, ends the
//! batch. The worker serves it alone, after the lender's responses.
//!
//! If a lender lacks pages that it should have, the READs of the batch would read the backing file
//! one after the other. Other workers could do that at the same time. So after an incomplete
//! response each READ is served alone, until a response is complete again. With several lenders
//! each READ is always served alone, because the next READ usually belongs to another lender.

use crate::read::batch::{BATCH_READS_MAX, ReadBatch};
use crate::read::drive::{ReadDriver, ReadRequest};
use crate::read::pipeline::Pipeline;
use crate::read::state::{Event, PageResult};
use crate::{BackingFile, Borrower, File, Stamp};
use std::cell::RefCell;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The maximum number of READs in one request.
pub const REQUEST_READS_MAX: usize = 8;

/// The maximum number of messages in progress while further READs are requested.
const UNDER_WAY_MAX: usize = 2;

/// The worker that serves READs: the source of READs, and the receiver of their answers.
pub trait Reads<B> {
    /// Returns the next READ that is available already, if there is one. Called up to
    /// [`BATCH_READS_MAX`] times.
    fn next(&mut self) -> Option<ReadRequest<B>>;
    /// Waits until `answer` is readable, or a READ may be available, for at most `limit`. Returns
    /// whether a READ may be available. May return at once.
    fn wait_beside(&mut self, answer: BorrowedFd<'_>, limit: Duration) -> bool {
        let _ = (answer, limit);
        false
    }
    /// Answers the n-th READ that `next` has returned, with its bytes (fewer than requested only at
    /// the end of the file), or with the error of the backing file. Each READ is answered once, in
    /// any order.
    fn answer(&mut self, nth: usize, read: io::Result<&[u8]>);
    /// The worker is about to wait for a lender: another worker may serve requests meanwhile.
    fn about_to_wait(&mut self) {}
    /// The worker is about to wait for the backing file of a READ, or for a change of the file.
    ///
    /// # Errors
    /// If the worker may not wait now. The READ is given up with this error, and will be served
    /// again.
    fn may_wait(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// Returns whether the worker has nothing else to do for a moment. If it has other work, it
    /// counts as about to wait.
    fn has_time(&mut self) -> bool {
        true
    }
}

/// Buffers that each thread keeps, so answering READs allocates nothing.
#[derive(Default)]
struct Scratch {
    batch: ReadBatch,
    got: Vec<PageResult>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Borrower {
    /// Answers the available READs, or some of them, but at least the first one: from lenders if
    /// they have the pages, else from the backing file. `buf` has room for any one of them, and is
    /// page-aligned.
    pub fn read_all<B: BackingFile>(&self, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        SCRATCH.with_borrow_mut(|scratch| Group::new(self, scratch).serve(reads, buf));
    }
}

/// READs that are served together.
struct Group<'a, B> {
    borrower: &'a Borrower,
    batch: &'a mut ReadBatch,
    got: &'a mut Vec<PageResult>,
    /// The READs of the batch, and whether they were answered.
    reads: [Option<(ReadRequest<B>, bool)>; BATCH_READS_MAX],
    /// The pipeline to the lender that has them all.
    pipeline: Option<Pipeline<'a>>,
    may_gather: bool,
    /// The last READ, if it cannot be requested with those before.
    alone: Option<ReadRequest<B>>,
}

impl<'a, B: BackingFile> Group<'a, B> {
    fn new(borrower: &'a Borrower, Scratch { batch, got }: &'a mut Scratch) -> Group<'a, B> {
        batch.clear();
        Group {
            borrower,
            batch,
            got,
            reads: [const { None }; BATCH_READS_MAX],
            pipeline: None,
            may_gather: borrower.gathers.load(Ordering::Relaxed) && borrower.core.catalog.usable().count_ones() < 2,
            alone: None,
        }
    }

    fn serve(mut self, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        let gathers = &self.borrower.gathers;
        loop {
            self.gather(reads, buf.len());
            if self.batch.first_unanswered() == self.batch.len() {
                break;
            }
            if !self.wait_for_more(reads) {
                self.receive(reads, buf);
            }
        }
        let count = self.batch.len();
        if let Some(pipeline) = self.pipeline.take() {
            // The time of many READs does not tell the time of one.
            pipeline.end((count == 1).then_some((self.batch.answered_pages(), false)));
            let is_filled = (0..count).all(|nth| self.batch.is_filled(nth));
            if gathers.load(Ordering::Relaxed) != is_filled {
                gathers.store(is_filled, Ordering::Relaxed);
            }
        }
        for nth in 0..count {
            self.answer(nth, reads, buf);
        }
        if let Some(read) = self.alone {
            let buf = &mut buf[..read.len];
            let driver = ReadDriver { borrower: self.borrower, read: &read };
            let done = driver.finish(self.batch.reading(count), reads, self.got, buf);
            reads.answer(count, done.map(|len| &buf[..len]));
            // READs of a batch have taken no demoted pages.
            if let Some(demoted) = self.borrower.core.demoted() {
                demoted.answered(read.file.key(), self.batch.reading(count).range());
            }
        }
    }

    /// Returns whether further READs are requested while a response is due.
    fn takes_more(&self) -> bool {
        let under_way = self.pipeline.as_ref().map_or(0, Pipeline::under_way);
        self.may_gather && self.alone.is_none() && self.batch.len() < BATCH_READS_MAX && under_way < UNDER_WAY_MAX
    }

    /// Waits for further READs until the next response comes. Returns false if there are none, or
    /// the response has come, or is late.
    fn wait_for_more(&self, reads: &mut impl Reads<B>) -> bool {
        let next = self.pipeline.as_ref().and_then(Pipeline::next_answer);
        let Some((answer, limit)) = next.filter(|(_, limit)| self.takes_more() && !limit.is_zero()) else {
            return false;
        };
        reads.wait_beside(answer, limit)
    }

    /// Requests the available READs, unless enough messages are in progress.
    fn gather(&mut self, reads: &mut impl Reads<B>, buf_bytes: usize) {
        let count = self.batch.len();
        if count > 0 && !self.takes_more() {
            return;
        }
        let most = if self.may_gather { BATCH_READS_MAX.min(count + REQUEST_READS_MAX) } else { 1 };
        let borrower = self.borrower;
        while self.batch.len() < most
            && let Some(read) = reads.next()
        {
            borrower.core.metrics.reads.one();
            let asked = (read.request, read.offset, read.len);
            let state = read.file.state.lock();
            let positions = borrower.positions();
            if !self.batch.join(&borrower.core, &read.file, asked, state, positions, buf_bytes) {
                self.alone = Some(read);
                break;
            }
            self.reads[self.batch.len() - 1] = Some((read, false));
        }
        if let Some(lender) = self.batch.lender()
            && !self.batch.request().is_empty()
        {
            let pipeline = self.pipeline.get_or_insert_with(|| Pipeline::with(borrower, lender));
            pipeline.ask(self.batch.request());
            self.batch.asked(&borrower.core, file_of(&self.reads));
        }
    }

    /// Receives the next response, and answers the READs that are complete.
    fn receive(&mut self, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        let first = self.batch.first_unanswered();
        let (Some(pipeline), Some((read, _))) = (&mut self.pipeline, &self.reads[first]) else { return };
        let response = pipeline.receive(reads, read, self.batch.place(first), self.batch.unanswered(), self.got, buf);
        let bad_pages = self.batch.answered(&self.borrower.core, file_of(&self.reads), response, buf);
        pipeline.returned_bad(bad_pages);
        // One stamp of a file is enough for all READs that were filled before.
        let mut seen: Option<(Arc<B>, Stamp)> = None;
        for nth in first..self.batch.first_unanswered() {
            // READs that are complete need no disk.
            if !self.batch.is_filled(nth) {
                self.may_gather = false;
                continue;
            }
            let Some((ReadRequest { file, backing, .. }, _)) = &self.reads[nth] else { continue };
            if seen.as_ref().is_none_or(|(of, _)| !Arc::ptr_eq(of, backing)) {
                seen = backing.stamp().ok().map(|stamp| (backing.clone(), stamp));
            }
            if let Some((_, stamp)) = seen {
                let place = self.batch.place(nth);
                self.batch.reading(nth).step(&self.borrower.core, file, Event::Looked(stamp), &mut buf[place]);
            }
            self.answer(nth, reads, buf);
        }
    }

    /// Answers a READ of the batch, unless it was answered already.
    fn answer(&mut self, nth: usize, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        let Some((read, is_answered @ false)) = &mut self.reads[nth] else { return };
        *is_answered = true;
        let buf = &mut buf[self.batch.place(nth)];
        let driver = ReadDriver { borrower: self.borrower, read };
        let done = driver.finish(self.batch.reading(nth), reads, self.got, buf);
        reads.answer(nth, done.map(|len| &buf[..len]));
    }
}

/// Returns a function that returns the file of each READ of the batch.
fn file_of<'r, B>(reads: &'r [Option<(ReadRequest<B>, bool)>]) -> impl Fn(usize) -> &'r File {
    |nth| match &reads[nth] {
        Some((read, _)) => &read.file,
        None => unreachable!("a READ of the batch is kept until all are answered"),
    }
}
