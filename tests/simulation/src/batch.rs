//! Requests to lenders, and READs that are requested together, in a real [`ReadBatch`].

use crate::context::Context;
use crate::lending::{Answer, Asked};
use crate::node::{Doing, Node};
use crate::reading::Request;
use borrower::File;
use borrower::read::batch::ReadBatch;
use borrower::read::state::{Event, PageResult, Response, Step};
use page::PAGE_SIZE;
use std::collections::VecDeque;
use std::sync::Arc;
use wire::WireKey;

/// The number of READs that may join a batch at once.
const JOIN_MAX: usize = 3;
/// The size of a batch's buffer in bytes.
const BUF_BYTES: usize = 24 * PAGE_SIZE;

/// A request that was sent to a lender.
pub(crate) struct SentRequest {
    lender: u8,
    number: u64,
    session: u64,
    /// The rest of its answer, if a part of it was received.
    rest: Option<Answer>,
}

/// READs in progress together.
pub(crate) struct Batch {
    batch: ReadBatch,
    /// The file of each READ: its index, and the borrower's file.
    files: Vec<(usize, Arc<File>)>,
    buf: Vec<u8>,
    sent: VecDeque<SentRequest>,
    /// Whether all pages without an answer have failed.
    is_over: bool,
    /// The number of READs that have not left the batch.
    left: usize,
}

impl Node {
    /// Sends a request; None if there is no connection.
    pub(crate) fn ask(&mut self, context: &mut Context, lender: u8, keys: Vec<WireKey>) -> Option<SentRequest> {
        let number = context.number();
        let session = self.links[usize::from(lender)].session?;
        let exclusive = self.core.is_exclusive();
        self.links[usize::from(lender)].asked.push(Asked { number, session, keys, exclusive });
        Some(SentRequest { lender, number, session, rest: None })
    }

    /// Receives the answer, or a part of it, if it has arrived. Its bytes go to these places, and
    /// the pages' results to `got`. A late answer is not waited for; it still arrives, and is
    /// discarded. The caller may read the backing file instead.
    pub(crate) fn receive<'g>(
        &mut self,
        context: &mut Context,
        sent: &mut SentRequest,
        places: &[usize],
        got: &'g mut Vec<PageResult>,
        buf: &mut [u8],
    ) -> Option<Response<'g>> {
        let lender = usize::from(sent.lender);
        let link = &mut self.links[lender];
        let lost = link.session != Some(sent.session);
        let [late, impatient] = [(); 2].map(|()| context.random.u32(0..200) == 0);
        let response = match sent.rest.take().or_else(|| link.answers.remove(&sent.number)) {
            None if !lost && late => Response::Late(None),
            None if !lost && !impatient => return None,
            Some(mut answer) if !answer.cut => {
                let count = context.random.usize(1..=answer.got.len());
                let (rest, rest_pages) = (answer.got.split_off(count), answer.pages.split_off(count));
                for (place, page) in places.iter().zip(&answer.pages) {
                    buf[*place..*place + PAGE_SIZE].copy_from_slice(page);
                }
                sent.rest = (!rest.is_empty()).then_some(Answer { got: rest, pages: rest_pages, cut: false });
                *got = answer.got;
                Response::Answered(got)
            }
            _ => {
                // A part of it may have arrived.
                for place in places.iter().take(1) {
                    buf[*place..*place + PAGE_SIZE].fill(0xdd);
                }
                if !lost {
                    self.lose(context, lender);
                }
                Response::Failed
            }
        };
        Some(response)
    }

    /// A READ without any progress begins in a batch, if one lender has all of it; other READs that
    /// wait may join.
    pub(crate) fn begin_batch(&mut self, context: &mut Context, known: &Arc<File>, file: usize, request: &mut Request) {
        let mut batch = Batch {
            batch: ReadBatch::default(),
            files: Vec::new(),
            buf: vec![0xee; BUF_BYTES],
            sent: VecDeque::new(),
            is_over: false,
            left: 0,
        };
        let id = context.number();
        if self.join(&mut batch, id, known, file, request) {
            self.join_others(context, &mut batch, id);
            self.batches.insert(id, batch);
        }
    }

    /// Returns whether the READ has joined the batch. If not, it continues alone.
    fn join(&self, of: &mut Batch, id: u64, known: &Arc<File>, file: usize, request: &mut Request) -> bool {
        request.is_queued = false;
        let asked = (request.unique, request.offset(), request.buf.len());
        let nth = of.batch.len();
        if of.batch.join(&self.core, known, asked, known.lock(), self.positions(), BUF_BYTES) {
            request.batch = Some((id, nth));
            of.files.push((file, known.clone()));
            of.left += 1;
            return true;
        }
        request.reading = std::mem::take(of.batch.reading(nth));
        false
    }

    /// READs that wait join, until one cannot.
    fn join_others(&mut self, context: &mut Context, of: &mut Batch, id: u64) {
        let mut tasks = std::mem::take(&mut self.tasks);
        let mut count = context.random.usize(0..=JOIN_MAX);
        for task in &mut tasks {
            let Doing::Read(read) = &mut task.doing else { continue };
            let Some(inode) = &self.files[task.file].inode else { continue };
            let Some(request) = read.request().filter(|request| request.is_queued && count > 0) else { continue };
            count -= 1;
            if !self.join(of, id, &inode.file, task.file, request) {
                break;
            }
        }
        self.tasks = tasks;
    }

    /// Does one step of the batch of a READ; or the READ leaves the batch, if it was answered.
    pub(crate) fn advance_batch(&mut self, context: &mut Context, request: &mut Request) {
        let Some((id, nth)) = request.batch else { return };
        let Some(mut of) = self.batches.remove(&id) else { return };
        if nth < of.batch.first_unanswered() {
            request.reading = std::mem::take(of.batch.reading(nth));
            request.buf.copy_from_slice(&of.buf[of.batch.place(nth)]);
            request.batch = None;
            context.statistics.batched += u64::from(of.batch.len() > 1);
            of.left -= 1;
        } else {
            self.advance_asked(context, id, &mut of);
        }
        if of.left > 0 {
            self.batches.insert(id, of);
        }
    }

    fn advance_asked(&mut self, context: &mut Context, id: u64, of: &mut Batch) {
        if of.sent.is_empty() || context.random.u32(0..4) == 0 {
            if !of.sent.is_empty() && !of.is_over {
                self.join_others(context, of, id);
            }
            let (Some(lender), keys) = (of.batch.lender(), of.batch.request().to_vec()) else { return };
            if !keys.is_empty() {
                let sent = (!of.is_over).then(|| self.ask(context, lender, keys)).flatten();
                of.is_over |= sent.is_none();
                of.sent.extend(sent);
                of.batch.asked(&self.core, |nth| &of.files[nth].1);
                if of.is_over {
                    self.answered(of, Response::NotAsked);
                }
                return;
            }
        }
        let Some(sent) = of.sent.front_mut() else { return };
        let first = of.batch.first_unanswered();
        let mut got = Vec::new();
        let response = self.receive(context, sent, of.batch.unanswered(), &mut got, &mut of.buf);
        let is_done = sent.rest.is_none();
        let Some(mut response) = response else { return };
        match &mut response {
            Response::Answered(_) if is_done => drop(of.sent.pop_front()),
            Response::Answered(_) => {}
            Response::Late(raced) => {
                of.is_over = true;
                let offset = of.batch.reading(first).range().first * PAGE_SIZE as u64;
                *raced = self.race(context, of.files[first].0, offset, of.batch.place(first).len());
            }
            Response::NotAsked | Response::Failed => of.is_over = true,
        }
        self.answered(of, response);
    }

    /// The batch handles a response. One stamp of a file is enough for all READs that were filled
    /// before.
    fn answered(&self, of: &mut Batch, response: Response<'_>) {
        let Batch { batch, files, buf, .. } = of;
        let first = batch.first_unanswered();
        batch.answered(&self.core, |nth| &files[nth].1, response, buf);
        for (nth, (file, known)) in files.iter().enumerate().take(batch.first_unanswered()).skip(first) {
            if batch.is_filled(nth) {
                let place = batch.place(nth);
                let looked = Event::Looked(self.files[*file].backing.stamp());
                let step = batch.reading(nth).step(&self.core, known, looked, &mut buf[place]);
                debug_assert!(matches!(step, Step::End), "a READ that is filled ends next");
            }
        }
    }
}
