//! READs that are there at once, asked for in few questions.
//!
//! Most of what a page from a lender costs is the way there and back: system calls, and threads
//! that are woken. So who serves takes further READs as long as there are any, all of whose pages
//! one lender has, and asks for them together; and while that is under way, for those that have
//! come since, so that the lender always has something to do. What reads from below, or may have to
//! wait for anything, ends that, and is served alone, after the lender's answers.
//!
//! Where a lender does not have what it should, the READs together would read below one after the
//! other, which others could do for them at the same time. So after an answer that was not all that
//! was asked for, each READ is alone, until one is again. So they are where there are several
//! lenders: the next READ is mostly another one's.

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

/// READs in one question at the most.
pub const REQUEST_READS_MAX: usize = 8;

/// Messages under way while further READs are asked for.
const UNDER_WAY_MAX: usize = 2;

/// The worker that serves READs: where they come from, and where their answers go.
pub trait Reads<B> {
    /// The next READ that is there already, if there is one. Called up to [`BATCH_READS_MAX`]
    /// times.
    fn next(&mut self) -> Option<ReadRequest<B>>;
    /// Waits until `answer` is readable, or there may be a READ, at most so long: whether it is a
    /// READ. May return at once.
    fn wait_beside(&mut self, answer: BorrowedFd<'_>, limit: Duration) -> bool {
        let _ = (answer, limit);
        false
    }
    /// What was read for the n-th READ that `next` has returned; fewer bytes than were asked for at
    /// the end of the file only. Or the error of the file below. Each is answered once, in any
    /// order.
    fn answer(&mut self, nth: usize, read: io::Result<&[u8]>);
    /// The worker is about to wait for a lender: another one may serve requests meanwhile.
    fn about_to_wait(&mut self) {}
    /// The worker is about to wait for the backing file of a READ, or for a change of the file.
    ///
    /// # Errors
    /// When it may not now. The READ is given up with this error, and comes again.
    fn may_wait(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// Whether the worker has nothing else to do for a moment. If it has, it counts as about to
    /// wait.
    fn has_time(&mut self) -> bool {
        true
    }
}

/// Kept by each thread, so that nothing is allocated while READs are answered.
#[derive(Default)]
struct Scratch {
    batch: ReadBatch,
    got: Vec<PageResult>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Borrower {
    /// Answers the READs that are there, or some of them, the first one at least: from lenders
    /// where they have the pages, else from below. `buf` holds any one of them, and is on a page.
    pub fn read_all<B: BackingFile>(&self, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        SCRATCH.with_borrow_mut(|scratch| Group::new(self, scratch).serve(reads, buf));
    }
}

/// READs that are served together.
struct Group<'a, B> {
    borrower: &'a Borrower,
    batch: &'a mut ReadBatch,
    got: &'a mut Vec<PageResult>,
    /// Those of the batch, and whether they were answered.
    reads: [Option<(ReadRequest<B>, bool)>; BATCH_READS_MAX],
    /// With the lender that has them all.
    pipeline: Option<Pipeline<'a>>,
    may_gather: bool,
    /// The last one, if it cannot be asked for with those before.
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
            // What many READs take together says nothing of one.
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
            let asking = ReadDriver { borrower: self.borrower, read: &read };
            let done = asking.finish(self.batch.reading(count), reads, self.got, buf);
            reads.answer(count, done.map(|len| &buf[..len]));
            // READs that were asked for together hold none.
            if let Some(demoted) = self.borrower.core.demoted() {
                demoted.answered(read.file.key(), self.batch.reading(count).range());
            }
        }
    }

    /// Whether further READs are asked for while it is waited for an answer.
    fn takes_more(&self) -> bool {
        let under_way = self.pipeline.as_ref().map_or(0, Pipeline::under_way);
        self.may_gather && self.alone.is_none() && self.batch.len() < BATCH_READS_MAX && under_way < UNDER_WAY_MAX
    }

    /// Waits until there are READs to be asked for before the next answer comes. False: there are
    /// none, or it has come, or is late.
    fn wait_for_more(&self, reads: &mut impl Reads<B>) -> bool {
        let next = self.pipeline.as_ref().and_then(Pipeline::next_answer);
        let Some((answer, limit)) = next.filter(|(_, limit)| self.takes_more() && !limit.is_zero()) else {
            return false;
        };
        reads.wait_beside(answer, limit)
    }

    /// Asks for those that are there, unless enough is under way.
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

    /// Receives the next answer, and answers the READs that have all they need.
    fn receive(&mut self, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        let first = self.batch.first_unanswered();
        let (Some(pipeline), Some((read, _))) = (&mut self.pipeline, &self.reads[first]) else { return };
        let response = pipeline.receive(reads, read, self.batch.place(first), self.batch.unanswered(), self.got, buf);
        let bad_pages = self.batch.answered(&self.borrower.core, file_of(&self.reads), response, buf);
        pipeline.returned_bad(bad_pages);
        // One look at a file is enough for all that was filled before.
        let mut seen: Option<(Arc<B>, Stamp)> = None;
        for nth in first..self.batch.first_unanswered() {
            // Those that have what they need wait for no disk.
            if !self.batch.is_filled(nth) {
                self.may_gather = false;
                continue;
            }
            let Some((ReadRequest { file, below, .. }, _)) = &self.reads[nth] else { continue };
            if seen.as_ref().is_none_or(|(of, _)| !Arc::ptr_eq(of, below)) {
                seen = below.stamp().ok().map(|stamp| (below.clone(), stamp));
            }
            if let Some((_, stamp)) = seen {
                let place = self.batch.place(nth);
                self.batch.reading(nth).step(&self.borrower.core, file, Event::Looked(stamp), &mut buf[place]);
            }
            self.answer(nth, reads, buf);
        }
    }

    /// Answers one of them, unless it was.
    fn answer(&mut self, nth: usize, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        let Some((read, is_answered @ false)) = &mut self.reads[nth] else { return };
        *is_answered = true;
        let buf = &mut buf[self.batch.place(nth)];
        let asking = ReadDriver { borrower: self.borrower, read };
        let done = asking.finish(self.batch.reading(nth), reads, self.got, buf);
        reads.answer(nth, done.map(|len| &buf[..len]));
    }
}

/// The file of each READ that is asked for.
fn file_of<'r, B>(reads: &'r [Option<(ReadRequest<B>, bool)>]) -> impl Fn(usize) -> &'r File {
    |nth| match &reads[nth] {
        Some((read, _)) => &read.file,
        None => unreachable!("a READ of the batch is kept until all are answered"),
    }
}
