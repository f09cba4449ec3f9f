//! Answering a READ: drives a [`Reading`] with the lenders' connections and the file below.

use crate::edge::connection::{ANSWER_TIMEOUT, GetConnection};
use crate::edge::link::{Link, Taken};
use crate::edge::racing::Race;
use crate::logic::polling::POLL_MAX;
use crate::logic::reading::{ATTEMPTS_MAX, Got, Question, Reading};
use crate::{Below, Borrower, File};
use page::PAGE_SIZE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages of a READ of the directory below, or of a get, up to which the two are compared: beyond, it is the disk's bandwidth that counts.
const COMPARED_PAGES_MAX: usize = 32;

/// How long a READ waits for a change of its pages that is being applied below. It depends on nothing but the file system
/// below, never on the kernel's FUSE pages, so it ends; the limit is for a disk that hangs, on which the READ would hang too.
const CHANGE_WAIT: Duration = Duration::from_secs(30);

thread_local! {
    /// Kept, so that nothing is allocated while a READ is answered.
    static SCRATCH: RefCell<(Reading, Vec<Got>)> = RefCell::default();
}

impl Borrower {
    /// Answers a READ out of the kernel's page cache (never a direct one): from lenders where they have the pages, else from
    /// below. `request` is the kernel's number of it. Returns the bytes read, which are fewer than asked for only at the end of the
    /// file.
    ///
    /// # Errors
    /// Those of the file below.
    pub fn read<B: Below + Send + Sync + 'static>(
        &self,
        file: &File,
        below: &Arc<B>,
        request: u64,
        offset: u64,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        self.core.metrics.reads.one();
        let asking = Asking { borrower: self, file, below: &**below, shared: &|| below.clone() };
        SCRATCH.with_borrow_mut(|(reading, got)| asking.read(reading, got, request, offset, buf))
    }
}

/// One READ.
struct Asking<'a> {
    borrower: &'a Borrower,
    file: &'a File,
    below: &'a dyn Below,
    /// The file below for a thread that races.
    shared: &'a dyn Fn() -> Arc<dyn Below + Send + Sync>,
}

/// What became of a question.
enum Answer {
    /// It was answered, by this one.
    Got(Arc<Link>),
    /// It could not be asked.
    NotAsked,
    /// It failed: what the lender has is not known.
    Failed,
    /// The directory below was faster, with these bytes of the READ.
    Late(Range<usize>, Vec<u8>),
}

impl Asking<'_> {
    fn read(
        &self,
        reading: &mut Reading,
        got: &mut Vec<Got>,
        request: u64,
        offset: u64,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        let Asking { borrower, file, below, .. } = *self;
        let core = &borrower.core;
        let range = Reading::range(offset, buf.len());
        for attempt in 0.. {
            let mut state = file.state.lock();
            // Answered while a change is being applied, older bytes could stay in the kernel's page cache behind it.
            if state.must_wait(range) {
                below.about_to_wait();
            }
            file.settled.wait_while_for(&mut state, |state| state.must_wait(range), CHANGE_WAIT);
            reading.begin(core, file, &mut state, (borrower.produced(), borrower.consumed()), offset, buf.len());
            if attempt == ATTEMPTS_MAX {
                let read = below.read_at(buf, offset)?;
                reading.end(core, file, &mut state, request, &[]);
                return Ok(read);
            }
            drop(state);

            let read = self.fill(reading, got, offset, buf)?;

            if reading.end(core, file, &mut file.state.lock(), request, &buf[..read]) {
                if !core.sees_evictions() {
                    borrower.reclaim_catalog();
                }
                return Ok(read);
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Fills `buf` from wherever the pages are. Returns the bytes before the end of the file.
    fn fill(&self, reading: &mut Reading, got: &mut Vec<Got>, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let Asking { borrower, file, below, .. } = *self;
        let core = &borrower.core;
        if reading.is_plain() {
            let read = self.read_below(reading, buf, offset)?;
            core.metrics.below_pages.add(read.div_ceil(PAGE_SIZE) as u64);
            if read < buf.len() {
                reading.short_end(core, file, below.stamp()?);
            }
            return Ok(read);
        }
        reading.fill_from_buffers(core, file, buf);
        let mut raced = None;
        while let Some(question) = reading.next_question(file) {
            match self.ask(&question, got, offset, buf) {
                Answer::Got(link) => {
                    let bad_pages = reading.answered(core, Some(got), true, buf);
                    if bad_pages > 0 {
                        link.returned_bad(borrower, bad_pages);
                    }
                }
                Answer::NotAsked => {
                    reading.answered(core, None, false, buf);
                }
                Answer::Failed => {
                    reading.answered(core, None, true, buf);
                }
                Answer::Late(bytes, read) => {
                    raced = Some((bytes, read));
                    reading.late(core);
                }
            }
        }
        while let Some(bytes) = reading.next_below() {
            let at = offset + bytes.start as u64;
            let piece = &mut buf[bytes.clone()];
            let read = match &raced {
                // What it read is as new as what would be read now: the READ is done again if anything has changed since it began.
                Some((span, read)) if span.start <= bytes.start && bytes.end <= span.end => {
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
        let read = self.below.read_at(buf, offset)?;
        if is_compared && read > 0 {
            self.borrower.disk.note(begun.elapsed());
        }
        Ok(read)
    }

    /// Asks a lender. If its answer is late, and not too many were, the directory below is asked, too, and the first answer counts.
    fn ask(&self, question: &Question<'_>, got: &mut Vec<Got>, offset: u64, buf: &mut [u8]) -> Answer {
        let Asking { borrower, .. } = *self;
        let metrics = &borrower.core.metrics;
        // Without hedges a get is waited for as long as one may take.
        let late = if borrower.config.hedge { borrower.disk.late() } else { ANSWER_TIMEOUT };
        let Some(link) = borrower.links.get(question.lender) else { return Answer::NotAsked };
        // None: more readers than connections, or the lender is just being lost: nothing is known of the pages.
        let Some(mut taken) = link.take(late) else { return Answer::NotAsked };
        let asked = Instant::now();
        metrics.get_messages.one();
        borrower.hedges.earn();
        let outcome = self.receive(&link, &mut taken, question, late, got, offset, buf);
        match outcome {
            Ok(None) => {
                if is_compared(question.keys.len(), question.is_sequential) {
                    link.note(asked.elapsed());
                }
                link.give_back(taken);
                let pages = got.iter().filter(|got| matches!(got, Got::Page { .. })).count() as u64;
                link.counters.get_pages.add(pages);
                link.counters.get_misses.add(got.len() as u64 - pages);
                Answer::Got(link)
            }
            Ok(Some((span, read))) => {
                metrics.hedges_won.one();
                link.give_late(taken, asked);
                Answer::Late(span, read)
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
        got: &mut Vec<Got>,
        offset: u64,
        buf: &mut [u8],
    ) -> io::Result<Option<(Range<usize>, Vec<u8>)>> {
        let borrower = self.borrower;
        let (connection, asked) = (&mut taken.connection, Instant::now());
        connection.ask(question.keys, borrower.core.is_exclusive())?;
        let mut came = false;
        if self.below.has_time()
            && let Some(turn) = borrower.polling.begin(&link.patience)
        {
            came = connection.poll(POLL_MAX.min(late))?;
            turn.ended(came);
        }
        if !came {
            self.below.about_to_wait();
        }
        let is_late = |connection: &GetConnection| {
            let left = late.saturating_sub(asked.elapsed());
            Ok::<_, io::Error>(!connection.wait(left)?)
        };
        if !came && borrower.config.hedge && is_late(connection)? && borrower.hedges.spend() {
            let span = question.places[0]..question.places[question.places.len() - 1] + PAGE_SIZE;
            let race = borrower.racers.race((self.shared)(), offset + span.start as u64, span.len());
            if race.is_none() {
                borrower.hedges.give_back(); // All who race do so already.
            }
            if let Some(race) = race {
                borrower.core.metrics.hedges.one();
                link.counters.hedges.one();
                let left = ANSWER_TIMEOUT.saturating_sub(asked.elapsed());
                if let Some(read) = below_wins(connection, &race, left)? {
                    return Ok(Some((span, read)));
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
