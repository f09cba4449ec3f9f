//! READs that are there at once, asked for in one question.
//!
//! Most of what a page from a lender costs is the way there and back: system calls, and threads that are woken. So who serves takes further
//! READs as long as there are any, all of whose pages one lender has, and asks for them together. What reads from below, or may have to wait
//! for anything, ends that, and is served alone, after the lender's answer.
//!
//! Where a lender does not have what it should, the READs together would read below one after the other, which others could do for them at the
//! same time. So after an answer that was not all that was asked for, each READ is alone, until one is again. So they are where there
//! are several lenders: the next READ is mostly another one's.

use crate::logic::reading::{Got, Question, Reading};
use crate::read::{Asking, ReadRequest};
use crate::{Below, Borrower};
use page::PAGE_SIZE;
use std::cell::RefCell;
use std::io;
use std::sync::atomic::Ordering;
use wire::{ITEMS_MAX, WireKey};

/// READs in one question, at the most, and their pages.
pub const TOGETHER_MAX: usize = 8;
const PAGES_MAX: usize = 32;
const _: () = assert!(PAGES_MAX <= ITEMS_MAX);

/// Where READs come from, and where their answers go.
pub trait Reads<B> {
    /// The next READ that is there already, if there is one. Called up to [`TOGETHER_MAX`] times.
    fn next(&mut self) -> Option<ReadRequest<B>>;
    /// What was read for the n-th READ that `next` has returned; fewer bytes than were asked for at the end of the file only. Or the error of
    /// the file below. Each is answered once, in any order.
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
    /// Answers the READs that are there, or some of them, the first one at least: from lenders where they have the pages, else from below.
    /// `buf` holds any one of them, and is on a page.
    pub fn read_all<B: Below + Send + Sync + 'static>(&self, reads: &mut impl Reads<B>, buf: &mut [u8]) {
        SCRATCH.with_borrow_mut(|scratch| self.read_with(scratch, reads, buf));
    }

    fn read_with<B: Below + Send + Sync + 'static>(
        &self,
        scratch: &mut Scratch,
        reads: &mut impl Reads<B>,
        buf: &mut [u8],
    ) {
        let Scratch { readings, got, keys, places } = scratch;
        let mut together = [const { None }; TOGETHER_MAX];
        let (mut count, mut end, mut lender) = (0, 0, None);
        // The last one, if it cannot be asked for with those before.
        let mut alone = None;
        keys.clear();
        places.clear();
        let may_gather = self.gathers.load(Ordering::Relaxed) && self.core.catalog.usable().count_ones() < 2;
        let most = if may_gather { TOGETHER_MAX } else { 1 };
        while count < most
            && let Some(read) = reads.next()
        {
            self.core.metrics.reads.one();
            if readings.len() == count {
                readings.push(Reading::default());
            }
            let reading = &mut readings[count];
            let has_begun = Asking { borrower: self, read: &read }.begin_at_once(reading);
            let fits = has_begun && end + read.len <= buf.len().min(PAGES_MAX * PAGE_SIZE);
            let of_all = reading.lender_of_all().filter(|of_all| fits && lender.is_none_or(|lender| lender == *of_all));
            let Some(question) = of_all.and_then(|_| reading.next_question(&read.file)) else {
                alone = Some((read, has_begun));
                break;
            };
            keys.extend(question.keys);
            places.extend(question.places.iter().map(|place| end + place));
            lender = of_all;
            end += read.len;
            together[count] = Some((read, end));
            count += 1;
        }
        if let Some(lender) = lender {
            let question = Question { lender, keys, places, is_sequential: false };
            self.ask_together(&mut together[..count], readings, &question, reads, got, buf);
        }
        if let Some((read, has_begun)) = alone {
            let asking = Asking { borrower: self, read: &read };
            let buf = &mut buf[..read.len];
            let done = asking.finish(&mut readings[count], has_begun, None, got, buf);
            reads.answer(count, done.map(|len| &buf[..len]));
        }
    }

    /// Asks for READs, which have begun, and lie one behind the other in `buf`, and answers them.
    fn ask_together<B: Below + Send + Sync + 'static>(
        &self,
        together: &mut [Option<(ReadRequest<B>, usize)>],
        readings: &mut [Reading],
        question: &Question<'_>,
        reads: &mut impl Reads<B>,
        got: &mut Vec<Got>,
        buf: &mut [u8],
    ) {
        let Some((first, first_end)) = &together[0] else { return };
        let answer = Asking { borrower: self, read: first }.ask(question, 0..*first_end, got, buf);
        let (mut bad_pages, mut asked_pages) = (0, 0);
        for ((read, end), reading) in together.iter().flatten().zip(&mut *readings) {
            let own = asked_pages..asked_pages + read.len / PAGE_SIZE;
            asked_pages = own.end;
            let got = got.get(own).unwrap_or_default();
            bad_pages += answer.tell(&self.core, reading, got, &mut buf[end - read.len..*end]);
        }
        let mut raced = answer.end(self, bad_pages);
        let is_filled = readings[..together.len()].iter().all(Reading::is_filled);
        if self.gathers.load(Ordering::Relaxed) != is_filled {
            self.gathers.store(is_filled, Ordering::Relaxed);
        }
        // Those that have what they need wait for no disk.
        for with_disk in [false, true] {
            for (nth, (one, reading)) in together.iter_mut().zip(&mut *readings).enumerate() {
                if let Some((read, end)) = one.take_if(|_| with_disk || reading.is_filled()) {
                    let buf = &mut buf[end - read.len..end];
                    let raced = raced.take_if(|_| nth == 0);
                    let done = Asking { borrower: self, read: &read }.finish(reading, true, raced, got, buf);
                    reads.answer(nth, done.map(|len| &buf[..len]));
                }
            }
        }
    }
}
