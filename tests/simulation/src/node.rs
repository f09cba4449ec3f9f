//! One borrowing node: a model of its kernel (page cache, eviction, FUSE requests) and of the
//! mount's order of steps, around the borrower's real logic.

use crate::batch::Batch;
use crate::changing::Altering;
use crate::context::{Context, Hints};
use crate::external::SlowWrite;
use crate::file::{Cached, FileModel, Inode, UNITS, encode};
use crate::guest::Guest;
use crate::kind::Kind;
use crate::lending::{Lender, Link, Message, Said};
use crate::opening::{Delivering, Opening};
use crate::oracle::Time;
use crate::rates::Writeback;
use crate::reading::Read;
use borrower::FileIdentity;
use borrower::catalog::rules::{Rule, keeps};
use borrower::core::{Core, Setup, Strategy};
use borrower::policy::gate::Passes;
use borrower::put::groups::Limits;
use page::{ChecksumKey, FileKey, PAGE_SIZE};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use wire::ITEMS_MAX;

/// The number of events that the ring holds. Further ones are lost.
const RING_EVENTS_MAX: usize = 24;
/// The number of bytes of the ring that an event takes.
const EVENT_BYTES: u64 = PAGE_SIZE as u64;
/// The number of buffers for puts to a lender, and of pages in each: few, so they run out.
const PUT_BATCHES: usize = 16;
const BATCH_PAGES: usize = 4;
/// The number of control groups, alternating from page to page: none, one with a quota, and one
/// with a share.
const GROUPS: usize = 3;
const QUOTA_PAGES: u64 = 2;
/// One in this number of attempts to store into a file without a writable mapping makes a mapping.
const MAPPED_SELDOM: u32 = 4;

/// A wrong value that a read returned.
#[derive(Debug)]
pub struct Wrong(pub String);

struct Event {
    key: FileKey,
    page: usize,
    /// None if the bytes were not wanted.
    units: Option<[u64; UNITS]>,
    position: u64,
    group: u8,
}

/// An operation in progress.
pub struct Task {
    /// Its number.
    pub id: u64,
    /// The file's index.
    pub file: usize,
    /// When it began.
    pub began: Time,
    /// The opens that it must take into account.
    pub opened: Time,
    /// The kind of operation.
    pub doing: Doing,
}

/// The kinds of operations.
pub enum Doing {
    /// An application reads.
    Read(Read),
    /// A file is changed.
    Change(Box<Altering>),
    /// An application opens a file.
    Open(Opening),
    /// The kernel drops pages that the daemon has named.
    Deliver(Delivering),
    /// An external writer changes a backing file.
    WriteExternally(SlowWrite),
}

/// One node.
pub struct Node {
    /// The real borrower.
    pub core: Core,
    /// Its files.
    pub files: Vec<FileModel>,
    /// Its lenders.
    pub links: Vec<Link>,
    /// Operations in progress.
    pub tasks: Vec<Task>,
    /// READs in progress together.
    pub(crate) batches: BTreeMap<u64, Batch>,
    hints: Arc<Hints>,
    events: VecDeque<Event>,
    produced: u64,
    consumed: u64,
    /// The number of the kernel's last request.
    pub unique: u64,
    strategy: Strategy,
    inodes: u64,
    /// A guest in place of lenders.
    pub guest: Option<Guest>,
}

impl Node {
    /// Returns a node with this number of lenders.
    pub fn new(context: &mut Context, lenders: usize) -> Node {
        let strategy = if context.random.bool() { Strategy::Exclusive } else { Strategy::NonInclusive };
        let hints = Arc::new(Hints::default());
        let mut node = Node {
            core: new_core(context, lenders, strategy, hints.clone()),
            files: Vec::new(),
            links: (0..lenders).map(|_| Link::default()).collect(),
            tasks: Vec::new(),
            batches: BTreeMap::new(),
            hints,
            events: VecDeque::new(),
            produced: 0,
            consumed: 0,
            unique: 0,
            strategy,
            inodes: 0,
            guest: context.rates.guests.then(Guest::default),
        };
        for _ in 0..context.rates.files {
            let file = node.new_file(context, None);
            node.files.push(file);
        }
        node
    }

    /// Returns both ends of the event stream.
    pub fn positions(&self) -> (u64, u64) {
        (self.produced, self.consumed)
    }

    fn new_file(&mut self, context: &mut Context, old: Option<FileIdentity>) -> FileModel {
        let units = context.rates.file_pages as usize * UNITS;
        let size = context.random.usize(0..=units);
        let value = context.number() * 4096;
        let mut all: Vec<u64> = (0..units as u64).map(|unit| value + unit).collect();
        all[size..].fill(0);
        let identity = match old {
            Some(old) if context.rates.twins => old,
            Some(old) => FileIdentity { generation: old.generation + 1, ..old },
            None => {
                self.inodes += 1;
                FileIdentity { device: 1, inode: self.inodes, generation: 0 }
            }
        };
        FileModel::new(identity, all, size, context.now)
    }

    /// Does one step of this node.
    pub fn step(&mut self, context: &mut Context, lenders: &mut [Lender]) -> Result<(), Wrong> {
        let rates = &context.rates;
        let (evictions, haste) = (rates.evictions, rates.haste);
        let draw = context.random.u32(0..1000);
        if draw < haste && !self.tasks.is_empty() {
            let at = context.random.usize(0..self.tasks.len());
            return self.advance(context, at);
        }
        if context.random.u32(0..1000) < evictions {
            self.evict(context);
            return Ok(());
        }
        if context.random.u32(0..100) < context.rates.consumption {
            self.consume(context);
            return Ok(());
        }
        match context.random.u32(0..100) {
            0..65 if self.guest.is_some() => self.receive_from_guest(context),
            0..10 => self.send(true),
            10..65 => self.exchange(context, lenders),
            65..67 => self.core.catalog.sweep(),
            67..75 => self.deliver(context),
            75..80 => self.write_back(context),
            _ => self.begin(context),
        }
        Ok(())
    }

    fn advance(&mut self, context: &mut Context, at: usize) -> Result<(), Wrong> {
        let mut task = self.tasks.swap_remove(at);
        let mut doing = std::mem::replace(&mut task.doing, Doing::Open(Opening::default()));
        let done = match &mut doing {
            Doing::Read(read) => self.advance_read(context, &task, read)?,
            Doing::Change(change) => self.advance_change(context, &task, change)?,
            Doing::Open(open) => self.advance_open(context, &task, open),
            Doing::Deliver(delivering) => self.advance_delivery(context, &task, delivering),
            Doing::WriteExternally(slow) => self.advance_external_write(context, &task, slow),
        };
        task.doing = doing;
        if !done {
            self.tasks.push(task);
            return Ok(());
        }
        let file = &mut self.files[task.file];
        match &task.doing {
            Doing::Deliver(_) => return Ok(()),
            Doing::Change(change) => {
                context.statistics.changes += 1;
                if !change.is_writeback() {
                    file.changes -= 1;
                }
            }
            Doing::Read(_) => context.statistics.reads += 1,
            Doing::Open(_) | Doing::WriteExternally(_) => {}
        }
        file.tasks -= 1;
        file.calm(context.now);
        let of_file = || self.tasks.iter().filter(|other| other.file == task.file);
        let oldest = of_file().map(|other| other.began).min().unwrap_or(context.now);
        let opened = of_file().map(|other| other.opened).min().unwrap_or(context.now);
        file.oracle.prune(oldest, opened);
        Ok(())
    }

    /// Adds an operation.
    pub fn start(&mut self, context: &mut Context, file: usize, doing: Doing) {
        let id = context.number();
        let model = &mut self.files[file];
        match &doing {
            Doing::Deliver(_) => {}
            Doing::Change(change) if !change.is_writeback() => {
                model.tasks += 1;
                model.changes += 1;
            }
            _ => model.tasks += 1,
        }
        let opened = model.oracle.opened();
        self.tasks.push(Task { id, file, began: context.now, opened, doing });
    }

    fn begin(&mut self, context: &mut Context) {
        if self.tasks.len() >= context.rates.tasks_max {
            return;
        }
        let file = context.random.usize(0..context.rates.files);
        if self.files[file].inode.is_none() {
            self.look_up(context, file);
        }
        let rates = context.rates.clone();
        let mut draw = context.random.u32(0..1000);
        let mut falls = |share: u32| {
            let hit = draw < share;
            draw = draw.saturating_sub(share);
            hit
        };
        if falls(rates.writes) {
            let kind =
                Kind::write(self.files[file].backing.units.len(), self.files[file].backing.size, &mut context.random);
            self.start_change(context, file, kind);
        } else if falls(rates.stores) {
            self.store(context, file);
        } else if falls(rates.others) {
            let kind = Kind::other(self.files[file].backing.units.len(), &mut context.random);
            self.start_change(context, file, kind);
        } else if falls(rates.attributes) {
            self.start_change(context, file, Kind::Attributes);
        } else if falls(rates.opens) {
            self.start(context, file, Doing::Open(Opening::default()));
        } else if falls(rates.external_changes) {
            self.change_externally(context, file);
        } else if falls(rates.drops) {
            let pages = self.files[file].page_count();
            let first = context.random.usize(0..pages);
            self.files[file].invalidate(first, context.random.usize(first + 1..=pages), None);
        } else if falls(rates.forgets) {
            self.forget(context, file);
        } else {
            let pages = self.files[file].page_count();
            let first = context.random.usize(0..pages);
            let end = context.random.usize(first + 1..=pages.min(first + 5));
            self.start(context, file, Doing::Read(Read::new(first, end)));
        }
    }

    /// A name is looked up: the kernel gets an inode, and the daemon takes the file's stamp.
    fn look_up(&mut self, context: &mut Context, file: usize) {
        let model = &mut self.files[file];
        let known = self.core.catalog.adopt(model.identity);
        context.note(|| format!("file {file} looked up: key {}", known.key().0));
        // The file is opened, too: the model reads it from here on.
        self.core.observe(&known, known.moment(), model.backing.stamp(), Node::writers(context, model));
        known.tell_size(model.backing.stamp().size_bytes);
        model.inode = Some(Inode::new(known, &model.backing));
        model.oracle.open(context.now);
    }

    /// The kernel forgets the inode. If the file was deleted, another one may get its number.
    fn forget(&mut self, context: &mut Context, file: usize) {
        let model = &mut self.files[file];
        let busy = model.tasks > 0 || model.invalidation.is_some() || model.invalidating;
        if busy || model.inode.as_ref().is_none_or(Inode::is_dirty) {
            return;
        }
        let Some(inode) = model.inode.take() else { return };
        let deleted = context.random.bool();
        context.note(|| format!("file {file} forgotten, deleted: {deleted}"));
        self.core.catalog.retire(&inode.file, deleted);
        if deleted || context.random.bool() {
            // Otherwise the file is deleted and created again externally, or stays as it is.
            if deleted || context.random.bool() {
                let identity = self.files[file].identity;
                self.files[file] = self.new_file(context, Some(identity));
            }
        }
    }

    /// A program stores through a mapping of a cached page.
    fn store(&mut self, context: &mut Context, file: usize) {
        let model = &mut self.files[file];
        let Some(inode) = model.inode.as_mut() else { return };
        // While the size is being changed, the model would not know the result of a store. A
        // write(2) is an exception, because the kernel moves its end only after the answer.
        let is_known = inode.size == model.backing.size || inode.size_unstable;
        if !is_known || inode.no_stores || model.is_written_externally {
            return;
        }
        let changes = |task: &Task, is: &dyn Fn(&Altering) -> bool| match &task.doing {
            Doing::Change(change) => task.file == file && is(change),
            _ => false,
        };
        if !inode.may_be_stored_to {
            // To map the file, a program opens it, and waits for changes. Most files are never
            // mapped for writing.
            let is_copied = self.tasks.iter().any(|task| changes(task, &Altering::is_copy));
            inode.may_be_stored_to = !is_copied && context.random.u32(0..MAPPED_SELDOM) == 0;
            return;
        }
        // No store either while the kernel is about to cut off the stored bytes, because it learns
        // a size that came from an external change.
        let size = inode.size;
        let brings_size = |task: &Task| matches!(&task.doing, Doing::Open(open) if open.brings_size(size));
        if self.tasks.iter().any(|task| task.file == file && brings_size(task)) {
            return;
        }
        let mut page = context.random.usize(0..inode.pages.len());
        if inode.size_unstable || context.random.u32(0..2) == 0 {
            // Stores at the end are more frequent.
            page = (inode.size / UNITS).min(inode.pages.len() - 1);
        }
        let is_fresh = (0..UNITS).all(|at| model.oracle.is(page * UNITS + at, inode.seen(page, at)));
        let size = inode.size;
        let Some(cached) = &mut inode.pages[page] else { return };
        if !(is_fresh || model.changes > 0)
            || !cached.uptodate
            || cached.locked
            || cached.writeback
            || page * UNITS >= size
        {
            return;
        }
        let mut at = context.random.usize(0..UNITS);
        if page == size / UNITS {
            let end = size % UNITS;
            match context.random.u32(0..4) {
                0 => {}
                _ if inode.size_unstable && end > 0 => at = context.random.usize(0..end),
                3 => {}
                _ => at = context.random.usize(end..UNITS),
            }
        }
        let unit = page * UNITS + at;
        // Bytes that are stored behind the end have no meaning, but stay in the kernel's page.
        if unit >= size && !model.mapped_writes {
            return;
        }
        let value = context.number() * 4096 + unit as u64;
        cached.units[at] = value;
        cached.dirty = true;
        // A store next to a range that the backing file system copies conflicts with no other
        // change.
        let is_apart =
            is_fresh && unit < size && !self.tasks.iter().any(|task| changes(task, &|change| !change.leaves(unit)));
        if model.changes > 0 && !is_apart {
            // Also behind the end: the whole page is written back, with the bytes that it holds
            // then.
            model.mixed = true;
            inode.pages.iter_mut().flatten().for_each(|cached| cached.is_torn = true);
            model.oracle.linger(unit, value, Time::MAX);
        } else if unit < size {
            model.oracle.store(unit, value, context.now);
        }
        context.note(|| format!("file {file} unit {unit} stored through a mapping"));
    }

    /// The kernel writes a dirty page back.
    fn write_back(&mut self, context: &mut Context) {
        let file = context.random.usize(0..context.rates.files);
        let temporary = context.rates.writeback == Writeback::Temporary;
        let model = &mut self.files[file];
        let Some(inode) = model.inode.as_mut() else { return };
        let size = inode.size;
        let writable = |(page, cached): &(usize, &mut Option<Cached>)| {
            let free = cached.as_ref().is_some_and(|cached| cached.dirty && !cached.locked && !cached.writeback);
            free && !inode.temporary[*page]
        };
        if inode.no_writeback {
            return;
        }
        let Some((page, Some(cached))) = inode.pages.iter_mut().enumerate().find(writable) else { return };
        cached.dirty = false;
        if page * UNITS >= size {
            return;
        }
        cached.writeback = !temporary;
        inode.temporary[page] = temporary;
        let end = UNITS.min(size - page * UNITS);
        if context.rates.writeback == Writeback::Zeroing {
            // Also the bytes of a write(2) whose answer has not moved the end yet.
            cached.units[end..].fill(0);
            if inode.size_unstable {
                (end..UNITS).for_each(|at| model.oracle.linger(page * UNITS + at, 0, Time::MAX));
            }
        }
        let units = cached.units[..end].to_vec();
        if model.mixed {
            // The page may hold bytes of a failed write, and writes them to the backing file after
            // all.
            for (at, value) in units.iter().enumerate() {
                model.oracle.linger(page * UNITS + at, *value, Time::MAX);
            }
        }
        self.unique += 1;
        let unique = self.unique;
        context.note(|| format!("file {file} page {page} written back as request {unique}"));
        self.start(context, file, Doing::Change(Box::new(Altering::writeback(page, units, unique))));
    }

    /// The daemon requests the drops that wait.
    fn deliver(&mut self, context: &mut Context) {
        let file = context.random.usize(0..context.rates.files);
        let model = &mut self.files[file];
        if model.invalidating {
            return;
        }
        if let Some(invalidation) = model.invalidation.take() {
            model.invalidating = true;
            let now = context.now;
            self.start(context, file, Doing::Deliver(Delivering::new(invalidation, now)));
        }
    }

    fn evict(&mut self, context: &mut Context) {
        let file = context.random.usize(0..context.rates.files);
        let Some(inode) = &mut self.files[file].inode else { return };
        let page = context.random.usize(0..inode.pages.len());
        let Some(cached) = inode.pages[page].filter(Cached::is_evictable) else { return };
        inode.pages[page] = None;
        context.statistics.evictions += 1;
        let lost = context.random.u32(0..1000) < context.rates.lost_events;
        let has_event = cached.uptodate || !keeps(Rule::Tap);
        context.note(|| format!("file {file} page {page} evicted at {}: {:?}", self.produced, cached.units));
        if let Some(guest) = &mut self.guest {
            if cached.uptodate {
                guest.remember(context, file, page, cached.units);
            }
            return;
        }
        if has_event && !lost && self.events.len() < RING_EVENTS_MAX {
            let key = inode.file.key();
            let is_omitted = self.hints.omitted().remove(&(key.0, page as u32));
            context.statistics.omitted += u64::from(is_omitted);
            self.events.push_back(Event {
                key,
                page,
                units: (!is_omitted).then_some(cached.units),
                position: self.produced,
                group: (page % GROUPS) as u8,
            });
            self.produced += EVENT_BYTES;
        }
    }

    fn consume(&mut self, context: &mut Context) {
        for _ in 0..context.random.u32(1..4) {
            let Some(event) = self.events.pop_front() else { return };
            let page = event.units.map(|units| {
                let mut page = [0; PAGE_SIZE];
                encode(&units, &mut page);
                page
            });
            let full = self.core.evicted(event.key, event.page as u64, event.position, page.as_ref(), event.group);
            self.consumed = event.position + EVENT_BYTES;
            assert!(self.core.catalog.groups.counts(1).lent <= QUOTA_PAGES, "a quota is not kept");
            if full.is_some() {
                self.send(false);
            }
        }
    }

    /// Sends puts that wait, and drops.
    fn send(&mut self, partial: bool) {
        for lender in 0..self.links.len() {
            while let Some((request, batch)) = self.core.next_put(lender as u8, partial) {
                let Some(session) = self.links[lender].session else {
                    self.core.abandon_puts(lender as u8);
                    break;
                };
                self.core.put_sent(batch.items().len());
                self.links[lender].messages.push_back((session, Message::Put(request, batch)));
            }
        }
        for lender in 0..self.links.len() {
            let mut keys = Vec::new();
            self.core.catalog.take_drops(lender as u8, ITEMS_MAX, &mut keys);
            if let Some(session) = self.links[lender].session.filter(|_| !keys.is_empty()) {
                self.links[lender].messages.push_back((session, Message::Drop(keys)));
            }
        }
    }

    /// An event between this node and one of its lenders.
    fn exchange(&mut self, context: &mut Context, lenders: &mut [Lender]) {
        let at = context.random.usize(0..lenders.len());
        // The latency gate closes now and then, for gets alone or for all, and opens again.
        let bypassed = self.core.catalog.is_bypassed(at as u8);
        if context.random.u32(0..if bypassed { 20 } else { 1000 }) == 0 {
            let passes = [Passes::All, Passes::Puts, Passes::Nothing];
            self.core.catalog.lender_gate(at as u8, passes[context.random.usize(0..passes.len())]);
        }
        let (link, lender) = (&mut self.links[at], &mut lenders[at]);
        let Some(session) = link.session else {
            match context.random.u32(0..20) {
                0 => self.connect(context, at, lender),
                1 if context.random.u32(0..10) == 0 => {
                    // The suspension has lasted too long.
                    link.suspended = None;
                    self.core.catalog.lender_lost(at as u8);
                }
                _ => {}
            }
            return;
        };
        if context.random.u32(0..10_000) < context.rates.losses * 10
            || !lender.is_alive() && context.random.u32(0..4) == 0
        {
            return self.lose(context, at);
        }
        match context.random.u32(0..8) {
            0..3 => lender.receive(link, &context.rates, &mut context.random),
            3 => lender.notify(session, link),
            4..6 => {
                if !link.asked.is_empty() {
                    let number = context.random.usize(0..link.asked.len());
                    let asked = link.asked.swap_remove(number);
                    let answer = lender.answer(&asked, &context.rates, &mut context.random);
                    link.answers.insert(asked.number, answer);
                }
            }
            _ => {
                let Some((of, said)) = link.said.pop_front() else { return };
                if of != session {
                    return;
                }
                match said {
                    Said::Lost(keys) => self.core.pages_lost(at as u8, &keys),
                    Said::PutReply(request, statuses) => {
                        if self.core.puts_answered(at as u8, request, &statuses).is_err() {
                            self.lose(context, at);
                        }
                    }
                }
            }
        }
    }

    /// Connects to a lender: it has kept the session, or claims so, or begins a new one.
    fn connect(&mut self, context: &mut Context, at: usize, lender: &mut Lender) {
        let link = &mut self.links[at];
        if let Some(session) = link.suspended.take() {
            // Messages in progress on the old connections are not accepted any more.
            link.messages.clear();
            let kept = lender.has(session) || lender.is_alive() && context.rates.lies(&mut context.random);
            if kept && lender.join(session) {
                context.note(|| format!("lender {at} resumed"));
                link.session = Some(session);
                self.core.catalog.lender_resume(at as u8);
                context.statistics.resumed += 1;
                return;
            }
            self.core.catalog.lender_lost(at as u8);
        }
        let session = context.number();
        if lender.join(session) {
            link.session = Some(session);
            self.core.catalog.lender_up(at as u8);
        }
    }

    /// The session with a lender is over.
    pub fn lose(&mut self, context: &mut Context, lender: usize) {
        let link = &mut self.links[lender];
        let Some(session) = link.session.take() else { return };
        link.suspended = Some(session);
        context.note(|| format!("lender {lender} lost"));
        context.statistics.losses += 1;
        // Messages that were sent may still arrive.
        if context.random.bool() {
            link.messages.clear();
        }
        link.said.clear();
        link.asked.clear();
        self.core.catalog.lender_suspend(lender as u8);
        self.core.abandon_puts(lender as u8);
    }

    /// The daemon is killed, and another takes over. The kernel and the backing files stay as they
    /// are; unanswered requests are sent again.
    pub fn kill(&mut self, context: &mut Context) {
        context.note(|| "the daemon is killed".to_owned());
        context.statistics.kills += 1;
        context.statistics.lent += self.core.metrics.lender_pages.get();
        for lender in 0..self.links.len() {
            self.lose(context, lender);
            self.links[lender].suspended = None;
        }
        let left: Vec<_> = self.files.iter().map(FileModel::left).collect();
        self.hints = Arc::default();
        self.core = new_core(context, self.links.len(), self.strategy, self.hints.clone());
        self.guest.iter_mut().for_each(Guest::forget_waiting);
        self.events.clear();
        (self.produced, self.consumed) = (0, 0);
        self.batches.clear();
        self.tasks.retain_mut(|task| match &mut task.doing {
            Doing::Read(read) => {
                read.send_again();
                true
            }
            Doing::Change(change) => {
                change.send_again();
                true
            }
            Doing::Open(open) => {
                open.send_again(context.now);
                true
            }
            Doing::Deliver(_) => false,
            Doing::WriteExternally(_) => true,
        });
        for (file, left) in self.files.iter_mut().zip(left) {
            file.changing = None;
            file.invalidating = false;
            file.invalidation = None;
            if let Some(inode) = &mut file.inode {
                inode.file = self.core.catalog.restore(file.identity, inode.file.key(), left);
                if let Some(number) = inode.file.kernel_stale() {
                    file.invalidate(0, usize::MAX, Some(number));
                }
            }
        }
    }
}

fn new_core(context: &mut Context, lenders: usize, strategy: Strategy, hints: Arc<Hints>) -> Core {
    let mut key = [0; 32];
    context.random.fill(&mut key);
    let guests = context.rates.guests;
    let setup = Setup::new(lenders as u8, ChecksumKey::new(key), strategy, !guests);
    let demoted = guests.then(|| ChecksumKey::new(key));
    let core = Core::new(Setup {
        put_batches: PUT_BATCHES * lenders.max(1),
        batch_pages: BATCH_PAGES,
        copy_hints: Some(hints),
        demoted,
        ..setup
    });
    core.catalog.groups.limit(1, Limits { quota_pages: Some(QUOTA_PAGES), ..Limits::NONE });
    core.catalog.groups.limit(2, Limits { share: Some(1), ..Limits::NONE });
    core
}
