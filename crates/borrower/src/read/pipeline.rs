//! Questions to one lender and their answers, on one connection.
//!
//! Questions may be asked while others wait for their answers, which come in the same order. So the
//! lender copies and sends what was asked for last while the pages before are verified and handed
//! on; and a long question is asked in messages, for the same reason.
//!
//! Whatever goes wrong ends the pipeline for all that was not answered yet: [`Pipeline::receive`]
//! says so from then on.

use crate::net::connection::{ANSWER_TIMEOUT, GetConnection};
use crate::net::link::{Link, Taken};
use crate::policy::latencies::Size;
use crate::read::batch::Response;
use crate::read::race::Race;
use crate::read::state::{PageResult, RacedRead};
use crate::under_way::OneUnderWay;
use crate::{BackingFile, Borrower, ReadRequest, Reads};
use page::PAGE_SIZE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use sync::polling::POLL_MAX;
use wire::WireKey;

/// Pages of a message: so many are copied, sent and verified in some tens of microseconds, beside
/// which a message more costs little.
pub(crate) const MESSAGE_PAGES: usize = 16;

/// Messages of one question at the most. A lender whose time or bytes are limited may have each of
/// them wait.
const MESSAGES_MAX: usize = 4;

/// Why an pipeline is over.
#[derive(Clone, Copy)]
enum Over {
    /// It could not be asked.
    NotAsked,
    /// It failed: what the lender has is not known.
    Failed,
    /// The backing file was faster.
    Late,
}

impl From<Over> for Response<'_> {
    fn from(over: Over) -> Self {
        match over {
            Over::NotAsked => Response::NotAsked,
            Over::Failed => Response::Failed,
            Over::Late => Response::Late(None),
        }
    }
}

/// Questions to one lender.
pub(crate) struct Pipeline<'a> {
    borrower: &'a Borrower,
    state: State,
    /// After which time an answer is late.
    late: Duration,
    /// When it was asked first, and since when the next answer is waited for.
    begun: Instant,
    since: Instant,
    under_way: OneUnderWay<'a>,
}

enum State {
    Open(Arc<Link>, Taken),
    /// What becomes of all that was not answered, and of what would be asked.
    Over(Over),
}

impl<'a> Pipeline<'a> {
    /// With that lender, if it is there and has a connection free.
    pub(crate) fn with(borrower: &'a Borrower, lender: u8) -> Pipeline<'a> {
        // Without hedges a get is waited for as long as one may take.
        let late = if borrower.config.hedge { borrower.disk.late() } else { ANSWER_TIMEOUT };
        let open = borrower.links.get(lender).and_then(|link| {
            let taken = link.take(late)?;
            Some(State::Open(link, taken))
        });
        // Else there are more readers than connections, or the lender is just being lost: nothing
        // is known of the pages.
        let state = open.unwrap_or(State::Over(Over::NotAsked));
        let now = Instant::now();
        Pipeline { borrower, state, late, begun: now, since: now, under_way: borrower.exchanges.begin() }
    }

    /// Asks for these pages. They are answered in messages ([`Pipeline::receive`]), behind what was
    /// asked for before.
    pub(crate) fn ask(&mut self, keys: &[WireKey]) {
        let State::Open(_, Taken { connection, .. }) = &mut self.state else { return };
        let Borrower { core, hedges, .. } = self.borrower;
        if connection.next_pages().is_none() {
            self.since = Instant::now();
        }
        let message_pages = keys.len().div_ceil(MESSAGES_MAX).max(MESSAGE_PAGES);
        for _ in keys.chunks(message_pages) {
            core.metrics.get_messages.one();
            hedges.earn();
        }
        if let Err(error) = connection.ask(keys, message_pages, core.is_exclusive()) {
            self.fail(&error);
        }
    }

    /// Messages that wait for their answers.
    pub(crate) fn under_way(&self) -> usize {
        match &self.state {
            State::Open(_, taken) => taken.connection.under_way(),
            State::Over(_) => 0,
        }
    }

    /// What is readable when the next answer begins, and the time until it is late.
    pub(crate) fn next_answer(&self) -> Option<(BorrowedFd<'_>, Duration)> {
        let State::Open(_, taken) = &self.state else { return None };
        Some((taken.connection.as_fd(), self.late.saturating_sub(self.since.elapsed())))
    }

    /// Receives the next answer. Its pages go to the first of `places`, which are those of all that
    /// was not answered yet. If it is late, and not too many were, the directory below is asked for
    /// all that is not answered of this READ, `own` of `buf`, and whoever is first counts. `got`
    /// says what became of the pages that were answered.
    pub(crate) fn receive<'g, B: BackingFile>(
        &mut self,
        worker: &mut impl Reads<B>,
        read: &ReadRequest<B>,
        own: Range<usize>,
        places: &[usize],
        got: &'g mut Vec<PageResult>,
        buf: &mut [u8],
    ) -> Response<'g> {
        let borrower = self.borrower;
        got.clear();
        let (link, taken) = match &mut self.state {
            State::Open(link, taken) => (link, taken),
            State::Over(over) => return (*over).into(),
        };
        let span = own_span(places, &own);
        let places = &places[..taken.connection.next_pages().unwrap_or(0)];
        let waited = wait(worker, borrower, link, &taken.connection, read, span, self.since, self.late);
        let received = waited.and_then(|raced| match raced {
            None => taken.connection.receive(places, buf, got).map(|()| None),
            raced => Ok(raced),
        });
        match received {
            Ok(None) => {
                let now = Instant::now();
                borrower.get_times.note(now - self.since);
                self.since = now;
                let pages = got.iter().filter(|got| matches!(got, PageResult::Page { .. })).count() as u64;
                link.counters.get_pages.add(pages);
                link.counters.get_misses.add(got.len() as u64 - pages);
                Response::Answered(got)
            }
            Ok(raced) => {
                borrower.get_times.note(self.since.elapsed());
                borrower.core.metrics.hedges_won.one();
                if let State::Open(link, taken) = std::mem::replace(&mut self.state, State::Over(Over::Late)) {
                    link.give_late(taken, self.since);
                }
                Response::Late(raced)
            }
            Err(error) => self.fail(&error),
        }
    }

    fn fail(&mut self, error: &io::Error) -> Response<'static> {
        tracing::debug!("get failed: {error}");
        self.borrower.core.metrics.get_failures.one();
        if let State::Open(link, taken) = std::mem::replace(&mut self.state, State::Over(Over::Failed)) {
            link.give_up(taken);
        }
        Response::Failed
    }

    /// Some of the pages that were received do not verify.
    pub(crate) fn returned_bad(&self, pages: u64) {
        if let State::Open(link, _) = &self.state
            && pages > 0
        {
            link.returned_bad(self.borrower, pages);
        }
    }

    /// All is answered, or nothing will be. If it was one READ that asked for so many pages, in a
    /// stream or not, the time that it took says how lender and directory below compare at that
    /// size.
    pub(crate) fn end(self, asked: Option<(usize, bool)>) {
        let State::Open(link, taken) = self.state else { return };
        if let Some((pages, is_sequential)) = asked {
            let took = self.since - self.begun;
            link.note(took, self.since, Size::of(pages, is_sequential));
            // Lenders do not seek: to them it is all the same whether much is read in a stream; but
            // a piece of one takes a trip, too.
            if Size::of(pages, false) == Size::Large {
                self.borrower.core.stream_room.lender_took(pages, self.under_way.part(took));
            }
        }
        link.give_back(taken);
    }
}

/// Those of a READ's bytes, `own` of a buffer, that pages at such places are among.
fn own_span(places: &[usize], own: &Range<usize>) -> Range<usize> {
    let start = places.first().map_or(own.start, |first| (*first).max(own.start));
    let end = places.last().map_or(start, |last| (last + PAGE_SIZE).min(own.end));
    start - own.start..end.max(start) - own.start
}

/// Waits until an answer begins; or for that of the directory below, which is returned if it is
/// first.
#[allow(clippy::too_many_arguments)] // who waits for what, how long, and what else may come
fn wait<B: BackingFile>(
    worker: &mut impl Reads<B>,
    borrower: &Borrower,
    link: &Link,
    connection: &GetConnection,
    read: &ReadRequest<B>,
    span: Range<usize>,
    since: Instant,
    late: Duration,
) -> io::Result<Option<RacedRead>> {
    if connection.wait(Duration::ZERO)? {
        return Ok(None);
    }
    if worker.has_time() {
        let (begun, limit) = (Instant::now(), POLL_MAX.min(late));
        let found = borrower.polling.poll(&link.patience, limit, || connection.look()).transpose()?;
        // Where polling is in vain, it comes perhaps as soon.
        if found.is_some() || connection.wait(limit.saturating_sub(begun.elapsed()))? {
            return Ok(None);
        }
    }
    worker.about_to_wait();
    let left = late.saturating_sub(since.elapsed());
    if !borrower.config.hedge || connection.wait(left)? || !borrower.hedges.spend() {
        return Ok(None);
    }
    let Some(race) = borrower.racers.race(read.below.clone(), read.offset + span.start as u64, span.len()) else {
        borrower.hedges.give_back(); // All who race do so already.
        return Ok(None);
    };
    borrower.core.metrics.hedges.one();
    link.counters.hedges.one();
    let raced = below_wins(connection, &race, ANSWER_TIMEOUT.saturating_sub(since.elapsed()))?;
    Ok(raced.map(|read| RacedRead { span, read }))
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
