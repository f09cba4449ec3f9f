//! An application reads: pages that the kernel caches as they are, others by a READ, which the real
//! [`Reading`] answers.

use crate::context::Context;
use crate::file::{Cached, UNIT_BYTES, UNITS, decode};
use crate::lending::Asked;
use crate::machine::{Machine, Task, Wrong};
use crate::truth::EOF;
use borrower::logic::reading::{ATTEMPTS_MAX, Reading};
use page::{PAGE_SIZE, PageRange};

/// A read of an application.
pub struct Read {
    next: usize,
    end: usize,
    request: Option<Box<Request>>,
}

enum Stage {
    Queued,
    Plain,
    ShortEnd(usize),
    Ask,
    Waiting { lender: u8, number: u64, session: u64, places: Vec<usize> },
    Below,
    End(usize),
}

/// A READ of the kernel.
struct Request {
    unique: u64,
    first: usize,
    end: usize,
    stage: Stage,
    reading: Reading,
    attempt: u32,
    buf: Vec<u8>,
    size_version: u64,
    /// The greatest size of the file below, in units, since it was asked.
    size_max: usize,
}

/// How a READ goes on.
enum Progress {
    UnderWay,
    /// That many bytes.
    Answered(usize),
    Failed,
}

impl Read {
    /// Of those pages.
    pub fn new(next: usize, end: usize) -> Read {
        Read { next, end, request: None }
    }

    /// The daemon has died: what it was answering is asked again.
    pub fn send_again(&mut self) {
        if let Some(request) = &mut self.request {
            request.stage = Stage::Queued;
            request.attempt = 0;
            request.reading = Reading::default();
        }
    }
}

impl Machine {
    /// One step of a read. True: it has ended.
    pub fn advance_read(&mut self, context: &mut Context, task: &Task, read: &mut Read) -> Result<bool, Wrong> {
        let Some(request) = &mut read.request else { return self.walk(context, task, read) };
        match self.advance_request(context, task.file, request) {
            Progress::UnderWay => Ok(false),
            Progress::Answered(len) => {
                if len > 0 && request.first * UNITS + len / UNIT_BYTES as usize > request.size_max {
                    return Err(Wrong(format!(
                        "machine {}, file {}: READ {} was answered behind the end",
                        context.machine, task.file, request.unique
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
                    // Neither read nor dropped: reclaim may take it.
                    let units = std::array::from_fn(|at| context.now * 4096 + at as u64);
                    inode.pages[page] = Some(Cached { units, ..Cached::default() });
                }
                context.note(|| format!("READ {} failed", request.unique));
                Ok(true)
            }
        }
    }

    /// The kernel goes through the pages, and asks for those that it does not have.
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
                    read.request = Some(Box::new(Request {
                        unique,
                        first: page,
                        end,
                        stage: Stage::Queued,
                        reading: Reading::default(),
                        attempt: 0,
                        buf: vec![0xee; (end - page) * PAGE_SIZE],
                        size_version: inode.size_version,
                        size_max: 0,
                    }));
                    return Ok(false);
                }
            }
            let is_torn = inode.pages[page].is_some_and(|cached| cached.is_torn);
            for at in 0..UNITS {
                let (unit, value) = (page * UNITS + at, inode.seen(page, at));
                if !is_torn && !file.truth.accepts(unit, value, task.began, task.opened) {
                    let value = if value == EOF { "the end of the file".to_owned() } else { value.to_string() };
                    return Err(Wrong(format!(
                        "machine {}, file {}: unit {unit} (page {page}) was read as {value}; {}",
                        context.machine,
                        task.file,
                        file.truth.explain(unit)
                    )));
                }
            }
            context.tally.pages += 1;
            read.next += 1;
        }
        Ok(true)
    }

    fn advance_request(&mut self, context: &mut Context, at: usize, request: &mut Request) -> Progress {
        let positions = self.positions();
        let file = &self.files[at];
        request.size_max = request.size_max.max(file.below.size);
        let Some(known) = file.inode.as_ref().map(|inode| inode.file.clone()) else { return Progress::Failed };
        let below = &file.below;
        let offset = (request.first * PAGE_SIZE) as u64;
        let (reading, buf, core) = (&mut request.reading, &mut request.buf, &self.core);
        request.stage = match &mut request.stage {
            Stage::Queued => {
                let mut state = known.lock();
                if state.must_wait(Reading::range(offset, buf.len())) {
                    return Progress::UnderWay;
                }
                reading.begin(core, &known, &mut state, positions, offset, buf.len());
                if request.attempt == ATTEMPTS_MAX {
                    let read = below.read_at(buf, offset);
                    reading.end(core, &known, &mut state, request.unique, &[]);
                    return Progress::Answered(read);
                }
                drop(state);
                if reading.is_plain() {
                    Stage::Plain
                } else {
                    reading.fill_from_buffers(core, &known, buf);
                    Stage::Ask
                }
            }
            Stage::Plain => {
                if context.weather.fails(&mut context.random) {
                    return Progress::Failed;
                }
                let read = below.read_at(buf, offset);
                if read < buf.len() { Stage::ShortEnd(read) } else { Stage::End(read) }
            }
            Stage::ShortEnd(read) => {
                reading.short_end(core, &known, below.stamp());
                Stage::End(*read)
            }
            Stage::Ask => match reading.next_question(&known) {
                None => Stage::Below,
                Some(question) => {
                    let (lender, places) = (question.lender, question.places.to_vec());
                    let number = context.number();
                    let session = self.links[usize::from(lender)].session.unwrap_or(0);
                    let exclusive = core.is_exclusive();
                    let asked = Asked { number, session, keys: question.keys.to_vec(), exclusive };
                    if self.ask(lender, asked) {
                        Stage::Waiting { lender, number, session, places }
                    } else {
                        request.reading.answered(&self.core, None, false, &mut request.buf);
                        Stage::Ask
                    }
                }
            },
            Stage::Waiting { lender, number, session, places } => {
                let link = &mut self.links[usize::from(*lender)];
                let (lender, lost) = (usize::from(*lender), link.session != Some(*session));
                let answer = link.answers.remove(number);
                let [late, impatient] = [(); 2].map(|()| context.random.u32(0..200) == 0);
                match answer {
                    // A read below was faster. The answer comes all the same, to nobody.
                    None if !lost && late => reading.late(core),
                    None if !lost && !impatient => return Progress::UnderWay,
                    Some(answer) if !answer.cut => {
                        for (place, page) in places.iter().zip(&answer.pages) {
                            buf[*place..*place + PAGE_SIZE].copy_from_slice(page);
                        }
                        reading.answered(core, Some(&answer.got), true, buf);
                    }
                    _ => {
                        // Something of it may have arrived.
                        for place in places.iter().take(1) {
                            buf[*place..*place + PAGE_SIZE].fill(0xdd);
                        }
                        reading.answered(core, None, true, buf);
                        if !lost {
                            self.lose(context, lender);
                        }
                    }
                }
                Stage::Ask
            }
            Stage::Below => match reading.next_below() {
                Some(_) if context.weather.fails(&mut context.random) => return Progress::Failed,
                Some(bytes) => {
                    let at = offset + bytes.start as u64;
                    below.read_at(&mut buf[bytes], at);
                    Stage::Below
                }
                None => Stage::End(reading.length(core, &known, below.stamp())),
            },
            Stage::End(len) => {
                let len = *len;
                if reading.end(core, &known, &mut known.lock(), request.unique, &buf[..len]) {
                    return Progress::Answered(len);
                }
                request.attempt += 1;
                Stage::Queued
            }
        };
        Progress::UnderWay
    }

    /// The kernel gets its answer: the pages are cached, with zeros behind what was answered; a
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
