//! Requests to one lender and its responses, on one connection.
//!
//! A request may be sent while others wait for their responses, which come in the same order. So
//! the lender copies and sends the latest pages while the borrower verifies and returns the earlier
//! ones. For the same reason a long request is sent as several messages.
//!
//! An error ends the pipeline for all pages without a response: from then on [`Pipeline::receive`]
//! returns the error at once.

use crate::net::connection::{ANSWER_TIMEOUT, GetConnection};
use crate::net::link::{Link, Taken};
use crate::policy::latencies::Size;
use crate::read::race::Race;
use crate::read::state::{PageResult, RacedRead, Response};
use crate::under_way::OneUnderWay;
use crate::{BackingFile, Borrower, ReadRequest, Reads};
use locks::spinning::SPIN_MAX;
use page::PAGE_SIZE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::WireKey;

/// The number of pages of a message. They are copied, sent and verified in some tens of
/// microseconds; compared to that, one more message costs little.
pub(crate) const MESSAGE_PAGES: usize = 16;

/// The maximum number of messages of one request. A lender with a limit of time or bytes may delay
/// each of them.
const MESSAGES_MAX: usize = 4;

/// The reason why a pipeline has ended.
#[derive(Clone, Copy)]
enum Over {
    /// The request could not be sent.
    NotAsked,
    /// The request failed: whether the lender has the pages is not known.
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

/// A pipeline of requests to one lender.
pub(crate) struct Pipeline<'a> {
    borrower: &'a Borrower,
    state: State,
    /// The time after which a response is late.
    late: Duration,
    /// The time of the first request, and the time since when the next response is due.
    begun: Instant,
    since: Instant,
    under_way: OneUnderWay<'a>,
}

enum State {
    Open(Arc<Link>, Taken),
    /// The result for all pages without a response, and for further requests.
    Over(Over),
}

impl<'a> Pipeline<'a> {
    /// Opens a pipeline to that lender, if it is connected and has a free connection.
    pub(crate) fn with(borrower: &'a Borrower, lender: u8) -> Pipeline<'a> {
        // Without hedges the reader waits as long as a get may take.
        let late = if borrower.config.hedge { borrower.disk.late() } else { ANSWER_TIMEOUT };
        let open = borrower.links.get(lender).and_then(|link| {
            let taken = link.take(late)?;
            Some(State::Open(link, taken))
        });
        // Without a connection there are more readers than connections, or the lender is just being
        // lost. Nothing is known of the pages.
        let state = open.unwrap_or(State::Over(Over::NotAsked));
        let now = Instant::now();
        Pipeline { borrower, state, late, begun: now, since: now, under_way: borrower.exchanges.begin() }
    }

    /// Requests these pages. The responses come in messages ([`Pipeline::receive`]), after those to
    /// earlier requests.
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

    /// Returns the number of messages that wait for their responses.
    pub(crate) fn under_way(&self) -> usize {
        match &self.state {
            State::Open(_, taken) => taken.connection.under_way(),
            State::Over(_) => 0,
        }
    }

    /// Returns the descriptor that is readable when the next response begins, and the time until it
    /// is late.
    pub(crate) fn next_answer(&self) -> Option<(BorrowedFd<'_>, Duration)> {
        let State::Open(_, taken) = &self.state else { return None };
        Some((taken.connection.as_fd(), self.late.saturating_sub(self.since.elapsed())))
    }

    /// Receives the next response. Its pages go to the first of `places`, which are the places of
    /// all pages without a response. If the response is late, and not too many were, the backing
    /// file is read for all missing pages of this READ, `own` of `buf`; the first result counts.
    /// `got` has the results of the pages in the response.
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

    /// Reports pages of the responses that do not verify.
    pub(crate) fn returned_bad(&self, pages: u64) {
        if let State::Open(link, _) = &self.state
            && pages > 0
        {
            link.returned_bad(self.borrower, pages);
        }
    }

    /// Ends the pipeline: all requests were answered, or none will be. `asked` is set if it served
    /// a single READ: its pages, and whether it is part of a stream. Then its time is recorded, for
    /// comparing lender and disk at that size.
    pub(crate) fn end(self, asked: Option<(usize, bool)>) {
        let State::Open(link, taken) = self.state else { return };
        if let Some((pages, is_sequential)) = asked {
            let took = self.since - self.begun;
            link.note(took, self.since, Size::of(pages, is_sequential));
            // Lenders do not seek: for them the speed is the same inside a stream and outside. But
            // a small piece of a stream needs a round trip, too.
            if Size::of(pages, false) == Size::Large {
                self.borrower.core.stream_room.lender_took(pages, self.under_way.part(took));
            }
        }
        link.give_back(taken);
    }
}

/// Returns the range of a READ's bytes, `own` of a buffer, that spans the pages at these places.
fn own_span(places: &[usize], own: &Range<usize>) -> Range<usize> {
    let start = places.first().map_or(own.start, |first| (*first).max(own.start));
    let end = places.last().map_or(start, |last| (last + PAGE_SIZE).min(own.end));
    start - own.start..end.max(start) - own.start
}

/// Waits until a response begins, or until the read of the backing directory has ended. Returns the
/// bytes of that read if it was first.
#[allow(clippy::too_many_arguments)] // the waiting worker, its connection, and the race
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
        let (begun, limit) = (Instant::now(), SPIN_MAX.min(late));
        let found = borrower.polling.poll(&link.patience, limit, || connection.look()).transpose()?;
        // After spinning in vain the response may come just now.
        if found.is_some() || connection.wait(limit.saturating_sub(begun.elapsed()))? {
            return Ok(None);
        }
    }
    worker.about_to_wait();
    let left = late.saturating_sub(since.elapsed());
    if !borrower.config.hedge || connection.wait(left)? || !borrower.hedges.spend() {
        return Ok(None);
    }
    let Some(race) = borrower.racers.race(read.backing.clone(), read.offset + span.start as u64, span.len()) else {
        borrower.hedges.give_back(); // All threads for races are busy.
        return Ok(None);
    };
    borrower.core.metrics.hedges.one();
    link.counters.hedges.one();
    let raced = below_wins(connection, &race, ANSWER_TIMEOUT.saturating_sub(since.elapsed()))?;
    Ok(raced.map(|read| RacedRead { span, read }))
}

/// Waits for the lender's response and the race. Returns the bytes of the backing file, if they
/// were first.
fn below_wins(connection: &GetConnection, race: &Race, limit: Duration) -> io::Result<Option<Vec<u8>>> {
    let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
    let mut fds = [PollFd::new(connection, PollFlags::IN), PollFd::new(race, PollFlags::IN)];
    match poll(&mut fds, Some(&limit)) {
        // The lender's time is over, and the disk is no faster.
        Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    if !fds[0].revents().is_empty() {
        return Ok(None);
    }
    // If the disk fails, the reader goes on waiting for the lender.
    Ok(race.take().and_then(Result::ok))
}
