//! Answering a READ: drives a [`Reading`] with the lenders' connections and the file below.

use crate::logic::reading::{ATTEMPTS_MAX, Got, Reading};
use crate::{Below, Borrower, File};
use page::PAGE_SIZE;
use std::cell::RefCell;
use std::io;
use std::time::Duration;

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
    pub fn read(&self, file: &File, below: &dyn Below, request: u64, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.core.metrics.reads.one();
        SCRATCH.with_borrow_mut(|(reading, got)| self.read_with(reading, got, file, below, request, offset, buf))
    }

    #[allow(clippy::too_many_arguments)] // the scratch, and what was asked
    fn read_with(
        &self,
        reading: &mut Reading,
        got: &mut Vec<Got>,
        file: &File,
        below: &dyn Below,
        request: u64,
        offset: u64,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        let core = &self.core;
        let range = Reading::range(offset, buf.len());
        for attempt in 0.. {
            let mut state = file.state.lock();
            // Answered while a change is being applied, older bytes could stay in the kernel's page cache behind it.
            file.settled.wait_while_for(&mut state, |state| state.must_wait(range), CHANGE_WAIT);
            reading.begin(core, &mut state, (self.produced(), self.consumed()), offset, buf.len());
            if attempt == ATTEMPTS_MAX {
                let read = below.read_at(buf, offset)?;
                reading.end(core, file, &mut state, request, &[]);
                return Ok(read);
            }
            drop(state);

            let read = self.fill(reading, got, file, below, offset, buf)?;

            if reading.end(core, file, &mut file.state.lock(), request, &buf[..read]) {
                if !core.sees_evictions() {
                    self.work.notify_one();
                }
                return Ok(read);
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Fills `buf` from wherever the pages are. Returns the bytes before the end of the file.
    fn fill(
        &self,
        reading: &mut Reading,
        got: &mut Vec<Got>,
        file: &File,
        below: &dyn Below,
        offset: u64,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        let core = &self.core;
        if reading.is_plain() {
            let read = below.read_at(buf, offset)?;
            core.metrics.below_pages.add(read.div_ceil(PAGE_SIZE) as u64);
            if read < buf.len() {
                reading.short_end(core, file, below.stamp()?);
            }
            return Ok(read);
        }
        reading.fill_from_buffers(core, buf);
        while let Some(question) = reading.next_question(file, core.lenders()) {
            // None: more readers than connections, or the lender is just being lost: nothing is known of the pages.
            let Some(mut session) = self.link.take() else {
                reading.answered(core, None, false, buf);
                continue;
            };
            core.metrics.get_messages.one();
            let answer = session.connection.get(question.keys, question.places, core.is_exclusive(), buf, got).map_err(
                |error| {
                    tracing::debug!("get failed: {error}");
                },
            );
            match answer {
                Ok(()) => self.link.give_back(session),
                Err(()) => {
                    self.link.give_up(session);
                    core.metrics.get_failures.one();
                }
            }
            reading.answered(core, answer.is_ok().then_some(got), true, buf);
        }
        while let Some(bytes) = reading.next_below() {
            let at = offset + bytes.start as u64;
            let piece = &mut buf[bytes];
            let read = below.read_at(piece, at)?;
            piece[read..].fill(0);
            core.metrics.below_pages.add(read.div_ceil(PAGE_SIZE) as u64);
        }
        Ok(reading.length(core, file, below.stamp()?))
    }
}
