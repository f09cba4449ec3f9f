//! Answers a READ: drives a [`ReadState`] with the lenders' connections and the backing file.

use crate::policy::latencies::Size;
use crate::read::pipeline::Pipeline;
use crate::read::state::{Event, PageResult, ReadState, Step};
use crate::{BackingFile, Borrower, File, Reads};
use page::PAGE_SIZE;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a READ waits for a change of its pages that is being applied to the backing file. The
/// change depends only on the backing file system, never on the kernel's FUSE pages, so it ends.
/// The limit is for a disk that hangs; the READ would hang on it, too.
const CHANGE_WAIT: Duration = Duration::from_secs(30);

/// A READ out of the kernel's page cache (never a direct one).
pub struct ReadRequest<B> {
    /// The file.
    pub file: Arc<File>,
    /// The backing file.
    pub backing: Arc<B>,
    /// The kernel's number of the request.
    pub request: u64,
    /// The first byte.
    pub offset: u64,
    /// The requested length in bytes.
    pub len: usize,
}

/// The driver of one READ.
pub(crate) struct ReadDriver<'a, B> {
    pub(crate) borrower: &'a Borrower,
    pub(crate) read: &'a ReadRequest<B>,
}

impl<B: BackingFile> ReadDriver<'_, B> {
    /// Does the steps of the state machine until the READ is answered, from any step on. `buf` is
    /// as long as the READ. Returns the number of bytes read; fewer than requested only at the end
    /// of the file.
    ///
    /// # Errors
    /// Those of the backing file.
    pub(crate) fn finish(
        &self,
        reading: &mut ReadState,
        worker: &mut impl Reads<B>,
        got: &mut Vec<PageResult>,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        let (core, ReadRequest { file, backing, offset, .. }) = (&self.borrower.core, self.read);
        let begun = Instant::now();
        let mut pipeline: Option<Pipeline> = None;
        let mut asked = (0, false);
        let mut event = Event::Go;
        let error = loop {
            let step = reading.step(core, file, event, buf);
            if let Some(pipeline) = &pipeline {
                pipeline.returned_bad(reading.take_bad_pages());
            }
            if !matches!(step, Step::Receive)
                && let Some(pipeline) = pipeline.take()
            {
                pipeline.end(Some(asked));
            }
            event = match step {
                Step::Begin => {
                    let state = file.state.lock();
                    Event::Begin { state, positions: self.borrower.positions(), waits: true }
                }
                Step::Wait(mut state) => {
                    worker.may_wait()?;
                    let range = reading.range();
                    file.settled.wait_while_for(&mut state, |state| state.must_wait(range), CHANGE_WAIT);
                    Event::Begin { state, positions: self.borrower.positions(), waits: false }
                }
                Step::Fill => Event::Fill,
                Step::Ask(lender) => {
                    asked = (reading.request().len(), reading.is_sequential());
                    let pipeline = pipeline.insert(Pipeline::with(self.borrower, lender));
                    pipeline.ask(reading.request());
                    Event::Asked
                }
                Step::Receive => {
                    let Some(pipeline) = &mut pipeline else { unreachable!("a request was sent") };
                    let places = reading.unanswered();
                    Event::Responded(pipeline.receive(worker, self.read, 0..buf.len(), places, got, buf))
                }
                Step::ReadBacking(part) => {
                    let at = offset + part.start as u64;
                    let read =
                        worker.may_wait().and_then(|()| self.read_backing(reading.is_sequential(), &mut buf[part], at));
                    match read {
                        Ok(read) => Event::Read(read),
                        Err(error) => break error,
                    }
                }
                Step::ReadBackingLocked(state) => {
                    match worker.may_wait().and_then(|()| backing.read_at(buf, *offset)) {
                        Ok(read) => Event::ReadLocked(state, read),
                        Err(error) => break error,
                    }
                }
                Step::Look => match backing.stamp() {
                    Ok(stamp) => Event::Looked(stamp),
                    Err(error) => break error,
                },
                Step::End => Event::End,
                Step::Done(read) => {
                    if !core.sees_evictions() {
                        self.borrower.reclaim_catalog();
                    }
                    if reading.is_sequential() {
                        let now = Instant::now();
                        reading.note_answered(core, now - self.borrower.began, now - begun);
                    }
                    return Ok(read);
                }
                Step::Failed => unreachable!("the READ ends with the error"),
            };
        };
        reading.step(core, file, Event::BackingFailed, buf);
        Err(error)
    }

    /// Reads the backing file, and records how long that takes.
    fn read_backing(&self, is_sequential: bool, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let pages = buf.len() / PAGE_SIZE;
        let (begun, under_way) = (Instant::now(), self.borrower.reads_below.begin());
        let read = self.read.backing.read_at(buf, offset)?;
        let took = begun.elapsed();
        self.borrower.backing_times.note(took);
        if read > 0 {
            self.borrower.disk.note(took, begun + took, Size::of(pages, is_sequential));
            // Without the pieces that may have been read ahead: those took the disk's time earlier.
            if is_sequential && Size::of(pages, false) == Size::Large {
                self.borrower.core.stream_room.disk_took(pages, under_way.part(took));
            }
        }
        Ok(read)
    }
}
