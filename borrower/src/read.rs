//! Answering a READ: drives a [`Reading`] with the lenders' connections and the file below.

use crate::edge::connection::{ANSWER_TIMEOUT, GetConnection};
use crate::edge::link::{Link, Taken};
use crate::edge::racing::Race;
use crate::logic::core::Core;
use crate::logic::file::FileState;
use crate::logic::reading::{ATTEMPTS_MAX, Got, Question, Reading};
use crate::{Below, Borrower, File};
use page::PAGE_SIZE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sync::polling::POLL_MAX;

/// Pages of a READ of the directory below, or of a get, up to which the two are compared: beyond, it is the disk's bandwidth that counts.
const COMPARED_PAGES_MAX: usize = 32;

/// How long a READ waits for a change of its pages that is being applied below. It depends on nothing but the file system
/// below, never on the kernel's FUSE pages, so it ends; the limit is for a disk that hangs, on which the READ would hang too.
const CHANGE_WAIT: Duration = Duration::from_secs(30);

/// A READ out of the kernel's page cache (never a direct one).
pub struct ReadRequest<B> {
    /// What is read.
    pub file: Arc<File>,
    /// The same, below.
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

/// Bytes of a READ's buffer that the directory below was faster with than the lender.
pub(crate) struct Raced {
    span: Range<usize>,
    read: Vec<u8>,
}

/// What became of a question.
pub(crate) enum Answer {
    /// It was answered, by this one.
    Got(Arc<Link>),
    /// It could not be asked.
    NotAsked,
    /// It failed: what the lender has is not known.
    Failed,
    /// The directory below was faster.
    Late(Raced),
}

impl Answer {
    /// Tells a READ what became of its question. Returns how many pages do not verify.
    pub(crate) fn tell(&self, core: &Core, reading: &mut Reading, got: &[Got], buf: &mut [u8]) -> u64 {
        match self {
            Answer::Got(_) => reading.answered(core, Some(got), true, buf),
            Answer::NotAsked => reading.answered(core, None, false, buf),
            Answer::Failed => reading.answered(core, None, true, buf),
            Answer::Late(_) => {
                reading.late(core);
                0
            }
        }
    }

    /// All READs were told. Returns what was read below instead.
    pub(crate) fn end(self, borrower: &Borrower, bad_pages: u64) -> Option<Raced> {
        match self {
            Answer::Got(link) if bad_pages > 0 => link.returned_bad(borrower, bad_pages),
            Answer::Late(raced) => return Some(raced),
            _ => {}
        }
        None
    }
}

impl<B: Below + Send + Sync + 'static> Asking<'_, B> {
    fn range(&self) -> page::PageRange {
        Reading::range(self.read.offset, self.read.len)
    }

    fn begin(&self, reading: &mut Reading, state: &mut FileState) {
        let (core, ReadRequest { file, offset, len, .. }) = (&self.borrower.core, self.read);
        let positions = (self.borrower.produced(), self.borrower.consumed());
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

    /// Fills `buf`, which is as long as the READ, from wherever the pages are; what was not asked for yet is. `raced` belongs to what
    /// was. Returns the bytes read, which are fewer than asked for only at the end of the file.
    ///
    /// # Errors
    /// Those of the file below.
    pub(crate) fn finish(
        &self,
        reading: &mut Reading,
        mut has_begun: bool,
        mut raced: Option<Raced>,
        got: &mut Vec<Got>,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        let (core, ReadRequest { file, below, request, offset, .. }) = (&self.borrower.core, self.read);
        for attempt in 0.. {
            if !std::mem::take(&mut has_begun) {
                let mut state = file.state.lock();
                // Answered while a change is being applied, older bytes could stay in the kernel's page cache behind it.
                if state.must_wait(self.range()) {
                    below.about_to_wait();
                }
                file.settled.wait_while_for(&mut state, |state| state.must_wait(self.range()), CHANGE_WAIT);
                self.begin(reading, &mut state);
                if attempt == ATTEMPTS_MAX {
                    let read = below.read_at(buf, *offset)?;
                    reading.end(core, file, &mut state, *request, &[]);
                    return Ok(read);
                }
            }

            let read = self.fill(reading, raced.take(), got, buf)?;

            if reading.end(core, file, &mut file.state.lock(), *request, &buf[..read]) {
                if !core.sees_evictions() {
                    self.borrower.reclaim_catalog();
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
            let span = question.places[0]..question.places[question.places.len() - 1] + PAGE_SIZE;
            let answer = self.ask(&question, span, got, buf);
            let bad_pages = answer.tell(core, reading, got, buf);
            raced = answer.end(self.borrower, bad_pages).or(raced);
        }
        while let Some(bytes) = reading.next_below() {
            let at = offset + bytes.start as u64;
            let piece = &mut buf[bytes.clone()];
            let read = match &raced {
                // What it read is as new as what would be read now: the READ is done again if anything has changed since it began.
                Some(Raced { span, read }) if span.start <= bytes.start && bytes.end <= span.end => {
                    let there = read.len().min(bytes.end - span.start).saturating_sub(bytes.start - span.start);
                    piece[..there].copy_from_slice(&read[bytes.start - span.start..][..there]);
                    there
                }
                _ => self.read_below(reading, piece, at)?,
            };
            piece[read..].fill(0);
            core.metrics.below_pages.add(read.div_ceil(PAGE_SIZE) as u64);
        }
        Ok(reading.length(core, file, below.stamp()?))
    }

    /// Reads below, and notes how long that takes.
    fn read_below(&self, reading: &Reading, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let is_compared = is_compared(buf.len() / PAGE_SIZE, reading.is_sequential());
        let begun = Instant::now();
        let read = self.read.below.read_at(buf, offset)?;
        let took = begun.elapsed();
        self.borrower.below_times.note(took);
        if is_compared && read > 0 {
            self.borrower.disk.note(took);
        }
        Ok(read)
    }

    /// Asks a lender. If its answer is late, and not too many were, the directory below is asked for `span`, which are bytes of `buf`
    /// and of this READ, and the first answer counts.
    pub(crate) fn ask(
        &self,
        question: &Question<'_>,
        span: Range<usize>,
        got: &mut Vec<Got>,
        buf: &mut [u8],
    ) -> Answer {
        let (borrower, span_end) = (self.borrower, span.end);
        let metrics = &borrower.core.metrics;
        // Without hedges a get is waited for as long as one may take.
        let late = if borrower.config.hedge { borrower.disk.late() } else { ANSWER_TIMEOUT };
        let Some(link) = borrower.links.get(question.lender) else { return Answer::NotAsked };
        // None: more readers than connections, or the lender is just being lost: nothing is known of the pages.
        let Some(mut taken) = link.take(late) else { return Answer::NotAsked };
        let asked = Instant::now();
        metrics.get_messages.one();
        borrower.hedges.earn();
        let outcome = self.receive(&link, &mut taken, question, late, span, got, buf);
        let took = asked.elapsed();
        if outcome.is_ok() {
            borrower.get_times.note(took);
        }
        match outcome {
            Ok(None) => {
                // What many READs take together says nothing of one.
                let is_one_read = question.places.last().is_some_and(|last| last + PAGE_SIZE == span_end);
                if is_one_read && is_compared(question.keys.len(), question.is_sequential) {
                    link.note(took);
                }
                link.give_back(taken);
                let pages = got.iter().filter(|got| matches!(got, Got::Page { .. })).count() as u64;
                link.counters.get_pages.add(pages);
                link.counters.get_misses.add(got.len() as u64 - pages);
                Answer::Got(link)
            }
            Ok(Some(raced)) => {
                metrics.hedges_won.one();
                link.give_late(taken, asked);
                Answer::Late(raced)
            }
            Err(error) => {
                tracing::debug!("get failed: {error}");
                metrics.get_failures.one();
                link.give_up(taken);
                Answer::Failed
            }
        }
    }

    /// Sends the question and waits for its answer; or for that of the directory below, which is returned if it is first.
    #[allow(clippy::too_many_arguments)] // the question, and where its answer goes
    fn receive(
        &self,
        link: &Link,
        taken: &mut Taken,
        question: &Question<'_>,
        late: Duration,
        span: Range<usize>,
        got: &mut Vec<Got>,
        buf: &mut [u8],
    ) -> io::Result<Option<Raced>> {
        let (borrower, below) = (self.borrower, &self.read.below);
        let (connection, asked) = (&mut taken.connection, Instant::now());
        connection.ask(question.keys, borrower.core.is_exclusive())?;
        let found = below
            .has_time()
            .then(|| borrower.polling.poll(&link.patience, POLL_MAX.min(late), || connection.look()))
            .flatten()
            .transpose()?;
        let came = found.is_some();
        if !came {
            below.about_to_wait();
        }
        let mut left = late.saturating_sub(asked.elapsed());
        if !came && borrower.config.hedge && !connection.wait(left)? && borrower.hedges.spend() {
            let race = borrower.racers.race(below.clone(), self.read.offset + span.start as u64, span.len());
            if race.is_none() {
                borrower.hedges.give_back(); // All who race do so already.
            }
            if let Some(race) = race {
                borrower.core.metrics.hedges.one();
                link.counters.hedges.one();
                left = ANSWER_TIMEOUT.saturating_sub(asked.elapsed());
                if let Some(read) = below_wins(connection, &race, left)? {
                    return Ok(Some(Raced { span, read }));
                }
            }
        }
        connection.receive(question.places, buf, got)?;
        Ok(None)
    }
}

/// Whether the time that it takes says how a lender and the directory below compare: the same of both.
fn is_compared(pages: usize, is_sequential: bool) -> bool {
    pages <= COMPARED_PAGES_MAX && !is_sequential
}

/// Waits for the lender's answer and the race. Returns what was read below, if that was first.
fn below_wins(connection: &GetConnection, race: &Race, limit: Duration) -> io::Result<Option<Vec<u8>>> {
    let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
    let mut fds = [PollFd::new(connection, PollFlags::IN), PollFd::new(race, PollFlags::IN)];
    match poll(&mut fds, Some(&limit)) {
        // The lender's time is up, and the disk is no faster.
        Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    if !fds[0].revents().is_empty() {
        return Ok(None);
    }
    // A disk that fails is no answer: the lender's is waited for.
    Ok(race.take().and_then(Result::ok))
}
