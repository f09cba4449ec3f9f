//! An application reads: cached pages as they are, others by a READ of the kernel. The real
//! [`ReadState`] answers the READ, alone or in a real
//! [`ReadBatch`](borrower::read::batch::ReadBatch) with others.

use crate::batch::SentRequest;
use crate::context::Context;
use crate::file::{Cached, UNIT_BYTES, UNITS, decode};
use crate::node::{Node, Task, Wrong};
use crate::oracle::EOF;
use borrower::read::state::{Event, RacedRead, ReadState, Response, Step};
use page::{PAGE_SIZE, PageRange};

/// A read by an application.
pub struct Read {
    next: usize,
    end: usize,
    request: Option<Box<Request>>,
}

/// A READ by the kernel.
pub(crate) struct Request {
    pub(crate) unique: u64,
    first: usize,
    end: usize,
    pub(crate) reading: ReadState,
    pub(crate) buf: Vec<u8>,
    /// No work was done for it yet.
    pub(crate) is_queued: bool,
    /// The request to a lender for this READ alone.
    sent: Option<SentRequest>,
    /// The batch of the READ, and its number there.
    pub(crate) batch: Option<(u64, usize)>,
    size_version: u64,
    /// The greatest size of the backing file, in units, since the READ was sent.
    size_max: usize,
}

impl Request {
    fn queue(&mut self) {
        self.is_queued = true;
        (self.sent, self.batch) = (None, None);
        self.reading = ReadState::default();
        self.reading.start(self.unique, self.offset(), self.buf.len());
    }

    /// Returns the first byte.
    pub(crate) fn offset(&self) -> u64 {
        (self.first * PAGE_SIZE) as u64
    }
}

/// The progress of a READ.
enum Progress {
    UnderWay,
    /// Answered with this number of bytes.
    Answered(usize),
    Failed,
}

impl Read {
    /// Returns a read of these pages.
    pub fn new(next: usize, end: usize) -> Read {
        Read { next, end, request: None }
    }

    /// The daemon has died: the kernel sends the unanswered request again.
    pub fn send_again(&mut self) {
        if let Some(request) = &mut self.request {
            request.queue();
        }
    }

    /// Returns the READ in progress, if there is one.
    pub(crate) fn request(&mut self) -> Option<&mut Request> {
        self.request.as_deref_mut()
    }
}

impl Node {
    /// Does one step of a read. Returns true when it has ended.
    pub fn advance_read(&mut self, context: &mut Context, task: &Task, read: &mut Read) -> Result<bool, Wrong> {
        let Some(request) = &mut read.request else { return self.walk(context, task, read) };
        match self.advance_request(context, task.file, request) {
            Progress::UnderWay => Ok(false),
            Progress::Answered(len) => {
                if len > 0 && request.first * UNITS + len / UNIT_BYTES as usize > request.size_max {
                    return Err(Wrong(format!(
                        "machine {}, file {}: READ {} was answered behind the end",
                        context.node, task.file, request.unique
                    )));
                }
                self.answer_read(task.file, request, len);
                context.note(|| {
                    format!(
                        "file {} pages {}..{}: READ {} answered: {len} bytes",
                        task.file, request.first, request.end, request.unique
                    )
                });
                read.request = None;
                Ok(false)
            }
            Progress::Failed => {
                let Some(inode) = &mut self.files[task.file].inode else { return Ok(true) };
                for page in request.first..request.end {
                    // Neither read nor dropped: reclaim may evict it.
                    let units = std::array::from_fn(|at| context.now * 4096 + at as u64);
                    inode.pages[page] = Some(Cached { units, ..Cached::default() });
                }
                context.note(|| format!("READ {} failed", request.unique));
                Ok(true)
            }
        }
    }

    /// The kernel walks over the pages, and sends a READ for missing ones.
    fn walk(&mut self, context: &mut Context, task: &Task, read: &mut Read) -> Result<bool, Wrong> {
        let file = &mut self.files[task.file];
        let Some(inode) = &mut file.inode else { return Ok(true) };
        while read.next < read.end {
            let page = read.next;
            match &inode.pages[page] {
                _ if page * UNITS >= inode.size => {}
                Some(cached) if cached.locked => return Ok(false),
                Some(cached) if cached.uptodate => {}
                Some(cached) if cached.writeback => return Ok(false),
                _ if inode.temporary[page] => return Ok(false),
                _ => {
                    let absent = |page: &usize| {
                        !inode.temporary[*page]
                            && inode.pages[*page]
                                .is_none_or(|cached| !cached.uptodate && !cached.locked && !cached.writeback)
                    };
                    let end = page + (page..read.end).take_while(absent).count();
                    for page in page..end {
                        inode.pages[page] = Some(Cached { locked: true, ..Cached::default() });
                    }
                    self.unique += 1;
                    let unique = self.unique;
                    context.note(|| format!("file {} pages {page}..{end} asked for as READ {unique}", task.file));
                    let mut request = Box::new(Request {
                        unique,
                        first: page,
                        end,
                        reading: ReadState::default(),
                        buf: vec![0xee; (end - page) * PAGE_SIZE],
                        is_queued: true,
                        sent: None,
                        batch: None,
                        size_version: inode.size_version,
                        size_max: 0,
                    });
                    request.queue();
                    read.request = Some(request);
                    return Ok(false);
                }
            }
            let is_torn = inode.pages[page].is_some_and(|cached| cached.is_torn);
            for at in 0..UNITS {
                let (unit, value) = (page * UNITS + at, inode.seen(page, at));
                if !is_torn && !file.oracle.accepts(unit, value, task.began, task.opened) {
                    let value = if value == EOF { "the end of the file".to_owned() } else { value.to_string() };
                    return Err(Wrong(format!(
                        "machine {}, file {}: unit {unit} (page {page}) was read as {value}; {}",
                        context.node,
                        task.file,
                        file.oracle.explain(unit)
                    )));
                }
            }
            context.statistics.pages += 1;
            read.next += 1;
        }
        Ok(true)
    }

    fn advance_request(&mut self, context: &mut Context, at: usize, request: &mut Request) -> Progress {
        let file = &self.files[at];
        request.size_max = request.size_max.max(file.backing.size);
        let Some(known) = file.inode.as_ref().map(|inode| inode.file.clone()) else { return Progress::Failed };
        if request.batch.is_some() {
            self.advance_batch(context, request);
            return Progress::UnderWay;
        }
        if std::mem::take(&mut request.is_queued) && context.random.u32(0..3) == 0 {
            self.begin_batch(context, &known, at, request);
            return Progress::UnderWay;
        }
        let positions = self.positions();
        let offset = request.offset();
        let (reading, buf) = (&mut request.reading, &mut request.buf);
        let mut got = Vec::new();
        let mut fails = || context.rates.fails(&mut context.random);
        let event = match reading.step(&self.core, &known, Event::Go, buf) {
            Step::Begin => Event::Begin { state: known.lock(), positions, waits: true },
            Step::Fill => Event::Fill,
            Step::Ask(lender) => {
                request.sent = self.ask(context, lender, reading.request().to_vec());
                if request.sent.is_some() { Event::Asked } else { Event::Responded(Response::NotAsked) }
            }
            Step::Receive => {
                let Some(sent) = &mut request.sent else { unreachable!("the request was sent") };
                match self.receive(context, sent, reading.unanswered(), &mut got, buf) {
                    Some(Response::Late(_)) => {
                        Event::Responded(Response::Late(self.race(context, at, offset, buf.len())))
                    }
                    Some(response) => Event::Responded(response),
                    None => return Progress::UnderWay,
                }
            }
            Step::ReadBacking(_) | Step::Look if fails() => Event::BackingFailed,
            Step::ReadBacking(part) => {
                let start = offset + part.start as u64;
                Event::Read(self.files[at].backing.read_at(&mut buf[part], start))
            }
            Step::Look => Event::Looked(self.files[at].backing.stamp()),
            Step::End => Event::End,
            Step::Done(len) => return Progress::Answered(len),
            Step::Failed => return Progress::Failed,
            Step::Wait(_) | Step::ReadBackingLocked(_) => unreachable!("they follow the beginning only"),
        };
        if let Step::ReadBackingLocked(state) = reading.step(&self.core, &known, event, buf) {
            let read = self.files[at].backing.read_at(buf, offset);
            reading.step(&self.core, &known, Event::ReadLocked(state, read), buf);
        }
        Progress::UnderWay
    }

    /// Returns the backing file's bytes for a part of a READ, read while a lender was late. Returns
    /// None if no thread was free for that.
    pub(crate) fn race(&mut self, context: &mut Context, at: usize, offset: u64, len: usize) -> Option<RacedRead> {
        if context.random.bool() {
            return None;
        }
        let pages = len / PAGE_SIZE;
        let first = context.random.usize(0..pages);
        let span = first * PAGE_SIZE..context.random.usize(first + 1..=pages) * PAGE_SIZE;
        let mut read = vec![0; span.len()];
        let len = self.files[at].backing.read_at(&mut read, offset + span.start as u64);
        read.truncate(len);
        Some(RacedRead { span, read })
    }

    /// The kernel gets its answer: the pages are cached, with zeros behind the answered bytes. A
    /// short answer is the file's end.
    fn answer_read(&mut self, at: usize, request: &Request, len: usize) {
        let Some(inode) = &mut self.files[at].inode else { return };
        for page in request.first..request.end {
            let start = (page - request.first) * PAGE_SIZE;
            let mut bytes = [0; PAGE_SIZE];
            if start < len {
                let end = len.min(start + PAGE_SIZE);
                bytes[..end - start].copy_from_slice(&request.buf[start..end]);
            }
            inode.pages[page] = Some(Cached { units: decode(&bytes), uptodate: true, ..Cached::default() });
        }
        if let Some(demoted) = self.core.demoted() {
            demoted.answered(inode.file.key(), PageRange { first: request.first as u64, end: request.end as u64 });
        }
        let end = request.first * UNITS + len / UNIT_BYTES as usize;
        let is_short = len < request.buf.len();
        if is_short && end < inode.size && inode.size_version == request.size_version && !inode.size_unstable {
            inode.size = end;
        }
    }
}
