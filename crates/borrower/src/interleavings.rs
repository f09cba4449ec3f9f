//! The borrower's threads in every order that shuttle tries: READs, changes, evictions, answers to
//! puts, a lender that is lost and found, files that come and go.
//!
//! The code under test is [`Core`], the catalog and [`ReadState`], driven as the edge drives them.
//! The kernel's page cache, the backing file and the lender are models. Run with
//! `make interleavings`.
//!
//! Invariants: a READ returns bytes that the file held at some moment between its arrival and its
//! answer. At the end every page can be read and equals the file's. The catalog's totals equal the
//! memory of the entries and the counts of their groups. No version and no key is given out twice.
//! No thread waits for ever (shuttle reports a deadlock; a time limit never expires).
//!
//! To find out what the tests catch, the code was broken, one place at a time:
//!
//! - `Core::end_change` without its notification: found by `no_read_is_stale` (deadlock).
//! - `ReadState::end` without regard to pages taken back: found by the same test.
//! - `Core::evicted` without the check whether the file was removed: found by `files_come_and_go`.
//! - `Catalog::retire` that unlocks the names between removing the last user and removing the file:
//!   found by `files_come_and_go` ("a file in use is known").

use crate::core::{Change, Core, Outcome, Setup, Strategy};
use crate::put::buffers::Batch;
use crate::read::batch::ReadBatch;
use crate::read::state::{Event, PageResult, ReadState, Response, Step};
use crate::{File, FileIdentity, Stamp};
use locks::shuttle::thread;
use locks::{Condvar, Mutex};
use page::{ChecksumKey, FileKey, PAGE_SIZE, Page, Version};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use wire::WireKey;

/// The number of schedules tried for each test, in each of two ways.
const SCHEDULES: usize = 400;
const PAGES: usize = 2;
const SIZE_BYTES: u64 = (PAGES * PAGE_SIZE) as u64;
/// The control group of all evicted pages.
const GROUP: u8 = 1;
/// No test waits for this limit: shuttle's time does not pass.
const LIMIT: Duration = Duration::from_secs(1);

fn check(run: impl Fn() + Send + Sync + 'static) {
    locks::explore(SCHEDULES, run);
}

/// One backing file, the kernel's cache of it, and a lender.
struct World {
    core: Core,
    file: Arc<File>,
    /// The content of each page of the backing file, a number that only grows, and the number of
    /// changes.
    backing: Mutex<([u64; PAGES], u64)>,
    /// The kernel's copies. A lock stands for the page's lock, or for references that keep it in
    /// the cache.
    cached: [Mutex<Option<u64>>; PAGES],
    stream: Mutex<Stream>,
    /// The pages that the lender has.
    lent: Mutex<HashMap<u64, Page>>,
    versions: Mutex<HashSet<u64>>,
    /// Puts that were sent and are not answered.
    sent: Mutex<VecDeque<(u64, Arc<Batch>)>>,
    link: Mutex<()>,
}

#[derive(Default)]
struct Stream {
    events: VecDeque<(u64, u32, u64)>,
    produced: u64,
    consumed: u64,
}

fn page(content: u64) -> Page {
    let mut page = [1; PAGE_SIZE];
    page[..8].copy_from_slice(&content.to_le_bytes());
    page
}

fn content(page: &[u8]) -> u64 {
    u64::from_le_bytes(*page.first_chunk().unwrap())
}

fn identity(inode: u64) -> FileIdentity {
    FileIdentity { device: 1, inode, generation: 0 }
}

impl World {
    fn new(strategy: Strategy) -> Arc<World> {
        let core = Core::new(Setup { put_batches: 2, ..Setup::new(1, ChecksumKey::new([7; 32]), strategy, true) });
        core.catalog.lender_up(0);
        let file = core.catalog.adopt(identity(1));
        Arc::new(World {
            core,
            file,
            backing: Mutex::new(([1; PAGES], 1)),
            cached: [Mutex::default(), Mutex::default()],
            stream: Mutex::default(),
            lent: Mutex::default(),
            versions: Mutex::default(),
            sent: Mutex::default(),
            link: Mutex::default(),
        })
    }

    fn stamp(&self) -> Stamp {
        let changes = self.backing.lock().1;
        Stamp { size_bytes: SIZE_BYTES, mtime_ns: changes.into(), ctime_ns: changes.into() }
    }

    fn positions(&self) -> (u64, u64) {
        let stream = self.stream.lock();
        (stream.produced, stream.consumed)
    }

    fn apply(&self, at: usize) -> u64 {
        let mut backing = self.backing.lock();
        backing.0[at] += 1;
        backing.1 += 1;
        backing.0[at]
    }

    /// A program writes a page through the page cache.
    fn write(&self, at: usize, request: u64) {
        let mut cached = self.cached[at].lock();
        let offset = (at * PAGE_SIZE) as u64;
        let change = Change::Buffered { offset, len: PAGE_SIZE as u64, request, writeback: false };
        *cached = Some(self.backing.lock().0[at] + 1);
        let changing = self.core.begin_change(&self.file, change, self.stamp());
        assert_eq!(Some(self.apply(at)), *cached);
        let after = self.stamp();
        let (produced, consumed) = self.positions();
        self.core.end_change(&self.file, changing, Outcome::Applied(after), (produced, consumed), None);
    }

    /// A program writes a page with direct I/O: the kernel drops its copy after the answer. The
    /// inode's lock keeps other writers out.
    fn write_directly(&self, at: usize) {
        let start = (at * PAGE_SIZE) as u64;
        let change = Change::Other { start, end: start + PAGE_SIZE as u64 };
        let changing = self.core.begin_change(&self.file, change, self.stamp());
        self.apply(at);
        let after = self.stamp();
        let (produced, consumed) = self.positions();
        self.core.end_change(&self.file, changing, Outcome::Applied(after), (produced, consumed), None);
        *self.cached[at].lock() = None;
    }

    /// A program reads a page: if the kernel has no copy, it sends a READ.
    fn read(&self, at: usize, request: u64) -> u64 {
        let mut cached = self.cached[at].lock();
        *cached.get_or_insert_with(|| self.answer(at, request))
    }

    fn read_again(&self, at: usize, request: u64) {
        self.read(at, request);
    }

    /// Answers a READ.
    fn answer(&self, at: usize, request: u64) -> u64 {
        let (mut reading, mut buf) = (ReadState::default(), vec![0xee; PAGE_SIZE]);
        reading.start(request, (at * PAGE_SIZE) as u64, buf.len());
        let earliest = self.backing.lock().0[at];
        self.drive(&mut reading, at, earliest, &mut buf)
    }

    /// Does the steps of a READ of a page until it is answered. `earliest` is the page's content
    /// when the READ arrived.
    fn drive(&self, reading: &mut ReadState, at: usize, earliest: u64, buf: &mut [u8]) -> u64 {
        let mut got;
        let mut event = Event::Go;
        loop {
            event = match reading.step(&self.core, &self.file, event, buf) {
                Step::Begin => {
                    let state = self.file.state.lock();
                    Event::Begin { state, positions: self.positions(), waits: true }
                }
                Step::Wait(mut state) => {
                    let range = reading.range();
                    self.file.settled.wait_while_for(&mut state, |state| state.must_wait(range), LIMIT);
                    Event::Begin { state, positions: self.positions(), waits: false }
                }
                Step::Fill => Event::Fill,
                Step::Ask(_) => Event::Asked,
                Step::Receive => {
                    got = self.get(reading.request(), reading.unanswered(), buf);
                    Event::Responded(Response::Answered(&got))
                }
                Step::ReadBacking(_) => {
                    buf.copy_from_slice(&page(self.backing.lock().0[at]));
                    Event::Read(PAGE_SIZE)
                }
                Step::ReadBackingLocked(state) => {
                    buf.copy_from_slice(&page(self.backing.lock().0[at]));
                    Event::ReadLocked(state, PAGE_SIZE)
                }
                Step::Look => Event::Looked(self.stamp()),
                Step::End => Event::End,
                Step::Done(len) => break assert_eq!(len, PAGE_SIZE),
                Step::Failed => unreachable!("the backing file can be read"),
            };
        }
        let (read, latest) = (content(buf), self.backing.lock().0[at]);
        assert!((earliest..=latest).contains(&read), "page {at}: read {read}, the file held {earliest} to {latest}");
        read
    }

    /// Returns the lender's response. The bytes go to these places of `buf`.
    fn get(&self, keys: &[WireKey], places: &[usize], buf: &mut [u8]) -> Vec<PageResult> {
        let mut lent = self.lent.lock();
        let mut get = |(key, place): (&WireKey, &usize)| {
            let version = key.version();
            let known = if self.core.is_exclusive() { lent.remove(&version.0) } else { lent.get(&version.0).copied() };
            known.map_or(PageResult::Miss, |page| {
                buf[*place..place + PAGE_SIZE].copy_from_slice(&page);
                let checksum = self.core.sealing().seal(key.id(), version, &page, &mut [0; PAGE_SIZE]);
                PageResult::Page { checksum }
            })
        };
        keys.iter().zip(places).map(&mut get).collect()
    }

    /// Programs read all pages at once. The READs of pages without a copy in the kernel are
    /// answered together if the lender has the pages.
    fn read_together(&self, request: u64) {
        let mut cached: Vec<_> = self.cached.iter().map(Mutex::lock).collect();
        let missing: Vec<usize> = (0..PAGES).filter(|at| cached[*at].is_none()).collect();
        let earliest = self.backing.lock().0;
        let (mut batch, mut buf) = (ReadBatch::default(), vec![0xee; PAGES * PAGE_SIZE]);
        let mut joined = 0;
        for at in &missing {
            let (state, asked) = (self.file.state.lock(), (request + *at as u64, (at * PAGE_SIZE) as u64, PAGE_SIZE));
            if !batch.join(&self.core, &self.file, asked, state, self.positions(), buf.len()) {
                break;
            }
            joined += 1;
        }
        let asked = batch.request().to_vec();
        batch.asked(&self.core, |_| &self.file);
        for key in asked {
            // Each page is answered in a message of its own.
            let got = self.get(&[key], &batch.unanswered()[..1], &mut buf);
            batch.answered(&self.core, |_| &self.file, Response::Answered(&got), &mut buf);
        }
        assert_eq!(batch.first_unanswered(), joined);
        // A READ that could not join continues when the others have ended; those behind it are read
        // one by one.
        for (nth, at) in missing.into_iter().enumerate() {
            let place = if nth < joined { batch.place(nth) } else { 0..PAGE_SIZE };
            *cached[at] = Some(match nth <= joined {
                true => self.drive(batch.reading(nth), at, earliest[at], &mut buf[place]),
                false => self.answer(at, request + at as u64),
            });
        }
    }

    /// The kernel evicts a page. The event is in the stream before another copy can be made.
    fn evict(&self, at: usize) {
        let mut cached = self.cached[at].lock();
        if let Some(content) = cached.take() {
            let mut stream = self.stream.lock();
            let position = stream.produced;
            stream.events.push_back((position, at as u32, content));
            stream.produced += 1;
        }
    }

    /// The work of the tap's thread: events become puts, which are sent.
    fn take_events(&self) {
        loop {
            let Some((position, index, content)) = self.stream.lock().events.pop_front() else { break };
            self.core.evicted(self.file.key(), index.into(), position, Some(&page(content)), GROUP);
            self.stream.lock().consumed = position + 1;
        }
        let _link = self.link.lock();
        while let Some((request, batch)) = self.core.next_put(0, true) {
            for (item, page) in batch.items().iter().zip(batch.pages()) {
                let Version(version) = item.key.version();
                assert!(self.versions.lock().insert(version), "version {version} is given twice");
                self.lent.lock().insert(version, *page);
            }
            self.core.put_sent(batch.items().len());
            self.sent.lock().push_back((request, batch));
        }
    }

    /// The work of the link's thread on answers to puts.
    fn take_answers(&self) {
        let _link = self.link.lock();
        while let Some((request, batch)) = self.sent.lock().pop_front() {
            self.core.puts_answered(0, request, &vec![1; batch.items().len()]).expect("they are answered in order");
        }
        let mut drops = Vec::new();
        self.core.catalog.take_drops(0, 8, &mut drops);
        self.lent.lock().retain(|version, _| drops.iter().all(|key| key.version().0 != *version));
    }

    /// The work of the link's thread when the connection is lost and comes back: to a lender that
    /// has `kept` the session, or not.
    fn lose_lender(&self, kept: bool) {
        let _link = self.link.lock();
        let catalog = &self.core.catalog;
        catalog.lender_suspend(0);
        self.core.abandon_puts(0);
        self.sent.lock().clear();
        if kept {
            assert!(catalog.lender_resume(0));
        } else {
            self.lent.lock().clear();
            catalog.lender_lost(0);
            catalog.sweep();
            assert!(catalog.lender_up(0));
        }
    }

    /// Nothing is in progress any more: everything must agree.
    fn check_end(&self) {
        self.take_events();
        self.take_answers();
        for at in 0..PAGES {
            for request in [900, 902] {
                assert_eq!(
                    self.read(at, request),
                    self.backing.lock().0[at],
                    "the kernel's copy of page {at} is stale"
                );
                self.check_account();
                self.evict(at);
                self.take_events();
                self.take_answers();
            }
        }
        self.check_account();
    }

    fn check_account(&self) {
        let catalog = &self.core.catalog;
        let census = catalog.census();
        assert_eq!(catalog.accounted_bytes(), census.entry_bytes);
        assert_eq!(catalog.groups.counts(GROUP).lent, census.live_pages);
    }
}

fn together(world: &Arc<World>, threads: Vec<Box<dyn FnOnce(&World) + Send>>) {
    let threads: Vec<_> = threads
        .into_iter()
        .map(|run| {
            let world = Arc::clone(world);
            thread::spawn(move || run(&world))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    world.check_end();
}

/// READs, writes of both kinds and evictions of the same pages, while events are processed and puts
/// answered.
#[test]
fn no_read_is_stale() {
    for strategy in [Strategy::Exclusive, Strategy::NonInclusive] {
        check(move || {
            let world = World::new(strategy);
            together(
                &world,
                vec![
                    Box::new(|world| {
                        world.write(0, 10);
                        world.write(0, 20);
                    }),
                    Box::new(|world| {
                        world.write_directly(1);
                        world.write_directly(1);
                    }),
                    Box::new(|world| (0..4).for_each(|at| world.read_again(at % PAGES, 30 + at as u64))),
                    Box::new(|world| (0..6).for_each(|at| world.evict(at % PAGES))),
                    Box::new(|world| (0..3).for_each(|_| world.take_events())),
                    Box::new(|world| (0..3).for_each(|_| world.take_answers())),
                ],
            );
        });
    }
}

/// READs that are answered together, while other threads change and evict their pages.
#[test]
fn no_read_of_a_batch_is_stale() {
    for strategy in [Strategy::Exclusive, Strategy::NonInclusive] {
        check(move || {
            let world = World::new(strategy);
            (0..PAGES).for_each(|at| world.read_again(at, 2 + at as u64));
            (0..PAGES).for_each(|at| world.evict(at));
            world.take_events();
            world.take_answers();
            together(
                &world,
                vec![
                    Box::new(|world| {
                        world.write(0, 10);
                        world.write_directly(1);
                    }),
                    Box::new(|world| (0..3).for_each(|round| world.read_together(30 + 10 * round))),
                    Box::new(|world| (0..6).for_each(|at| world.evict(at % PAGES))),
                    Box::new(|world| (0..3).for_each(|_| world.take_events())),
                    Box::new(|world| (0..3).for_each(|_| world.take_answers())),
                    Box::new(|world| world.lose_lender(true)),
                ],
            );
        });
    }
}

/// A lender that is lost and found while its pages are read, put and answered.
#[test]
fn a_lost_lender_costs_no_byte() {
    check(|| {
        let world = World::new(Strategy::Exclusive);
        world.read(0, 2);
        world.evict(0);
        world.take_events();
        together(
            &world,
            vec![
                Box::new(|world| (0..3).for_each(|at| world.read_again(at % PAGES, 30 + at as u64))),
                Box::new(|world| (0..4).for_each(|at| world.evict(at % PAGES))),
                Box::new(|world| (0..3).for_each(|_| world.take_events())),
                Box::new(|world| (0..2).for_each(|_| world.take_answers())),
                Box::new(|world| [true, false].into_iter().for_each(|kept| world.lose_lender(kept))),
                Box::new(|world| world.write(0, 10)),
            ],
        );
    });
}

/// Files adopted, retired and deleted by several threads, next to the one that is in use. No key is
/// given out twice, no file in use is lost, and the totals return to zero.
#[test]
fn files_come_and_go() {
    check(|| {
        let world = World::new(Strategy::NonInclusive);
        let keys = Arc::new(Mutex::new(HashMap::new()));
        let mut threads: Vec<Box<dyn FnOnce(&World) + Send>> = Vec::new();
        for thread in 0..3u64 {
            let keys = Arc::clone(&keys);
            threads.push(Box::new(move |world| {
                for round in 0..2 {
                    let inode = 2 + (thread + round) % 2;
                    let file = world.core.catalog.adopt(identity(inode));
                    let first = *keys.lock().entry(file.key()).or_insert(inode);
                    assert_eq!(first, inode, "a key is given to two files");
                    world.core.evicted(file.key(), 7, 0, Some(&page(inode)), GROUP);
                    let found = world.core.catalog.file(file.key()).expect("a file in use is known");
                    assert!(Arc::ptr_eq(&found, &file));
                    world.core.catalog.retire(&file, thread == 1);
                }
            }));
        }
        threads.push(Box::new(|world| {
            let again = world.core.catalog.adopt(identity(1));
            assert_eq!(again.key(), world.file.key());
            world.core.catalog.retire(&again, true);
        }));
        threads.push(Box::new(|world| {
            world.lose_lender(false);
            let _ = world.core.catalog.census();
        }));
        threads.push(Box::new(|world| world.take_answers()));
        // Late evictions, of files that may be gone.
        threads.push(Box::new(|world| {
            for key in 2..5 {
                let _ = world.core.evicted(FileKey(key), 9, 0, Some(&page(9)), GROUP);
            }
        }));
        together(&world, threads);
        assert!(world.core.catalog.file(world.file.key()).is_some(), "the file still has a user");
    });
}

/// The waits above rely on shuttle's own condition variable.
#[test]
fn a_wait_ends_with_its_notice() {
    check(|| {
        let pair = Arc::new((Mutex::new(false), Condvar::new()));
        let other = Arc::clone(&pair);
        let waiter = thread::spawn(move || {
            let mut done = other.0.lock();
            other.1.wait_while_for(&mut done, |done| !*done, LIMIT);
        });
        *pair.0.lock() = true;
        pair.1.notify_all();
        waiter.join().unwrap();
    });
}
