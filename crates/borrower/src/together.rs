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

use crate::exchange::{Answer, Exchange, Raced};
use crate::logic::reading::{Got, Reading};
use crate::read::{Asking, ReadRequest};
use crate::{Below, Borrower, Stamp};
use page::PAGE_SIZE;
use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use wire::{ITEMS_MAX, WireKey};

/// READs in one question at the most.
pub const QUESTION_READS_MAX: usize = 8;
/// READs that are served together at the most, and their pages.
pub const TOGETHER_MAX: usize = 32;
const PAGES_MAX: usize = 256;
const _: () = assert!(PAGES_MAX <= ITEMS_MAX);

/// Messages under way while further READs are asked for.
const UNDER_WAY_MAX: usize = 2;

/// Where READs come from, and where their answers go.
pub trait Reads<B> {
    /// The next READ that is there already, if there is one. Called up to [`TOGETHER_MAX`] times.
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
}

/// Kept by each thread, so that nothing is allocated while READs are answered.
#[derive(Default)]
struct Scratch {
    readings: Vec<Reading>,
    got: Vec<Got>,
    keys: Vec<WireKey>,
    places: Vec<usize>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Borrower {
    /// Answers the READs that are there, or some of them, the first one at least: from lenders
    /// where they have the pages, else from below. `buf` holds any one of them, and is on a page.
    pub fn read_all<B: Below + Send + Sync + 'static>(&self, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        SCRATCH.with_borrow_mut(|scratch| Group::new(self, scratch).serve(reads, buf));
    }
}

/// READs that are served together. They lie one behind the other in the buffer.
struct Group<'a, B> {
    borrower: &'a Borrower,
    scratch: &'a mut Scratch,
    /// Those that were not answered, with their bytes in the buffer.
    reads: [Option<(ReadRequest<B>, Range<usize>)>; TOGETHER_MAX],
    count: usize,
    end: usize,
    /// Of the READs and of their pages, those that the lender's answer is known of.
    told: usize,
    told_pages: usize,
    /// With the lender that has them all.
    exchange: Option<(u8, Exchange<'a>)>,
    may_gather: bool,
    /// The last one, if it cannot be asked for with those before, and whether it has begun.
    alone: Option<(ReadRequest<B>, bool)>,
    /// What was read below for one of them.
    raced: Option<(usize, Raced)>,
}

impl<'a, B: Below + Send + Sync + 'static> Group<'a, B> {
    fn new(borrower: &'a Borrower, scratch: &'a mut Scratch) -> Group<'a, B> {
        scratch.keys.clear();
        scratch.places.clear();
        Group {
            borrower,
            scratch,
            reads: [const { None }; TOGETHER_MAX],
            count: 0,
            end: 0,
            told: 0,
            told_pages: 0,
            exchange: None,
            may_gather: borrower.gathers.load(Ordering::Relaxed) && borrower.core.catalog.usable().count_ones() < 2,
            alone: None,
            raced: None,
        }
    }

    fn serve(mut self, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        let gathers = &self.borrower.gathers;
        loop {
            self.gather(reads, buf.len());
            if self.told == self.count {
                break;
            }
            if !self.wait_for_more(reads) {
                self.receive(reads, buf);
            }
        }
        if let Some((_, exchange)) = self.exchange.take() {
            // What many READs take together says nothing of one.
            exchange.end((self.count == 1).then_some((self.told_pages, false)));
            let is_filled = self.scratch.readings[..self.count].iter().all(Reading::is_filled);
            if gathers.load(Ordering::Relaxed) != is_filled {
                gathers.store(is_filled, Ordering::Relaxed);
            }
        }
        for nth in 0..self.count {
            self.answer(nth, None, reads, buf);
        }
        if let Some((read, has_begun)) = self.alone {
            let (Scratch { readings, got, .. }, buf) = (self.scratch, &mut buf[..read.len]);
            let asking = Asking { borrower: self.borrower, read: &read };
            if has_begun {
                readings[self.count].note_missed(&self.borrower.core, &read.file);
            }
            let done = asking.finish(&mut readings[self.count], has_begun, None, None, got, buf);
            reads.answer(self.count, done.map(|len| &buf[..len]));
            // READs that were asked for together hold none.
            if let Some(demoted) = self.borrower.core.demoted() {
                demoted.answered(read.file.key(), Reading::range(read.offset, read.len));
            }
        }
    }

    /// Whether further READs are asked for while it is waited for an answer.
    fn takes_more(&self) -> bool {
        let under_way = self.exchange.as_ref().map_or(0, |(_, exchange)| exchange.under_way());
        self.may_gather && self.alone.is_none() && self.count < TOGETHER_MAX && under_way < UNDER_WAY_MAX
    }

    /// Waits until there are READs to be asked for before the next answer comes. False: there are
    /// none, or it has come, or is late.
    fn wait_for_more(&self, reads: &mut impl Reads<B>) -> bool {
        let next = self.exchange.as_ref().and_then(|(_, exchange)| exchange.next_answer());
        let Some((answer, limit)) = next.filter(|(_, limit)| self.takes_more() && !limit.is_zero()) else {
            return false;
        };
        reads.wait_beside(answer, limit)
    }

    /// Asks for those that are there, unless enough is under way.
    fn gather(&mut self, reads: &mut impl Reads<B>, buf_bytes: usize) {
        if self.count > 0 && !self.takes_more() {
            return;
        }
        let most = if self.may_gather { TOGETHER_MAX.min(self.count + QUESTION_READS_MAX) } else { 1 };
        let (asked, asked_pages) = (self.count, self.scratch.keys.len());
        while self.count < most
            && let Some(read) = reads.next()
        {
            if let Err(alone) = self.add(read, buf_bytes) {
                self.alone = Some(alone);
                break;
            }
        }
        if let Some((_, exchange)) = &mut self.exchange
            && self.scratch.keys.len() > asked_pages
        {
            exchange.ask(&self.scratch.keys[asked_pages..]);
            // While the lender has something to do.
            for ((read, _), reading) in
                self.reads[asked..].iter().flatten().zip(&self.scratch.readings[asked..self.count])
            {
                reading.note_missed(&self.borrower.core, &read.file);
            }
        }
    }

    /// Adds a READ, if it can be asked for with the others; else returns it, and whether it has
    /// begun.
    fn add(&mut self, read: ReadRequest<B>, buf_bytes: usize) -> Result<(), (ReadRequest<B>, bool)> {
        let Scratch { readings, keys, places, .. } = &mut *self.scratch;
        let borrower = self.borrower;
        borrower.core.metrics.reads.one();
        if readings.len() == self.count {
            readings.push(Reading::default());
        }
        let reading = &mut readings[self.count];
        let has_begun = Asking { borrower, read: &read }.begin_at_once(reading);
        let (start, end) = (self.end, self.end + read.len);
        let is_same = |lender: &u8| self.exchange.as_ref().is_none_or(|(of_others, _)| of_others == lender);
        let fits = has_begun && end <= buf_bytes.min(PAGES_MAX * PAGE_SIZE);
        let lender = if fits { reading.lender_of_all().filter(is_same) } else { None };
        let Some((lender, question)) = lender.and_then(|lender| Some((lender, reading.next_question(&read.file)?)))
        else {
            return Err((read, has_begun));
        };
        keys.extend(question.keys);
        places.extend(question.places.iter().map(|place| start + place));
        self.exchange.get_or_insert_with(|| (lender, Exchange::with(borrower, lender)));
        self.reads[self.count] = Some((read, start..end));
        (self.count, self.end) = (self.count + 1, end);
        Ok(())
    }

    /// Receives the next message from the lender, and answers the READs that have all they need by
    /// it.
    fn receive(&mut self, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        let first = self.told;
        let Some(((_, exchange), (read, own))) = self.exchange.as_mut().zip(self.reads[first].as_ref()) else { return };
        let Scratch { readings, got, places, .. } = &mut *self.scratch;
        let answer = exchange.receive(read, own.clone(), &places[self.told_pages..], got, buf);
        if let Some(raced) = exchange.raced.take() {
            self.raced = Some((first, raced));
        }
        let (mut pages, mut bad_pages) = (0, 0);
        while let Some((_, own)) = self.reads[..self.count].get(self.told).and_then(Option::as_ref)
            && (pages < got.len() || !matches!(answer, Answer::Got))
        {
            let reading = &mut readings[self.told];
            let left = reading.unanswered().len();
            let of_read = &got[pages..got.len().min(pages + left)];
            pages += of_read.len();
            bad_pages += answer.tell(&self.borrower.core, reading, of_read, &mut buf[own.clone()]);
            if !reading.unanswered().is_empty() {
                break;
            }
            self.told += 1;
        }
        self.told_pages += pages;
        exchange.returned_bad(bad_pages);
        // One look at a file is enough for all that was filled before.
        let mut seen: Option<(Arc<B>, Stamp)> = None;
        for nth in first..self.told {
            // Those that have what they need wait for no disk.
            if !self.scratch.readings[nth].is_filled() {
                self.may_gather = false;
                continue;
            }
            let Some((ReadRequest { below, .. }, _)) = &self.reads[nth] else { continue };
            if seen.as_ref().is_none_or(|(of, _)| !Arc::ptr_eq(of, below)) {
                seen = below.stamp().ok().map(|stamp| (below.clone(), stamp));
            }
            self.answer(nth, seen.as_ref().map(|(_, stamp)| *stamp), reads, buf);
        }
    }

    /// Answers one of them, unless it was.
    fn answer(&mut self, nth: usize, seen: Option<Stamp>, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        let Some((read, own)) = self.reads[nth].take() else { return };
        let Scratch { readings, got, .. } = &mut *self.scratch;
        let raced = self.raced.take_if(|(of, _)| *of == nth).map(|(_, raced)| raced);
        let buf = &mut buf[own];
        let done =
            Asking { borrower: self.borrower, read: &read }.finish(&mut readings[nth], true, raced, seen, got, buf);
        reads.answer(nth, done.map(|len| &buf[..len]));
    }
}
