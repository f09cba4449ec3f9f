//! READs that are available at once: one request for those that a lender has. Each is answered once
//! and correctly, whatever happens to the request.

mod odd_lender;

use borrower::{
    BATCH_READS_MAX, BackingFile, Borrower, Change, Config, File, FileIdentity, REQUEST_READS_MAX, Strategy,
};
use odd_lender::{InMemory, Manner, OddLender, read, read_as};
use page::PAGE_SIZE;
use report::LinkState;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);
const PAGES: usize = 3 * BATCH_READS_MAX;

/// A borrower, and a lender that has all pages of a file, whose last page is partial.
struct World {
    borrower: Arc<Borrower>,
    lender: Arc<OddLender>,
    file: Arc<File>,
    backing: Arc<InMemory>,
    _folder: testbed::Scratch,
}

impl World {
    fn new(strategy: Strategy, hedge: bool) -> World {
        let folder = testbed::Scratch::new("together").unwrap();
        let (lender, address) = OddLender::listen(&folder.path().join("socket"), Duration::ZERO);
        let config = Config {
            lenders: vec![address],
            strategy,
            filter: false,
            gate: None,
            hedge,
            bad_pages_max: u64::MAX,
            ..Config::default()
        };
        let borrower = Borrower::start(config, None).unwrap();
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut bytes = vec![0; PAGES * PAGE_SIZE - 77];
        fastrand::Rng::with_seed(seed).fill(&mut bytes);
        let file = borrower.adopt(FileIdentity { device: 1, inode: 1, generation: 1 });
        let world = World { borrower, lender, file, backing: Arc::new(InMemory::new(bytes)), _folder: folder };
        let is_used = || world.borrower.lenders()[0].state == LinkState::Used;
        assert!(testbed::wait_until(PATIENCE, is_used), "{:?}", world.borrower.lenders());
        world.lend();
        world
    }

    /// Reads all of the file in one READ, so the lender has all pages.
    fn lend(&self) {
        let whole = read(&self.borrower, &self.file, &self.backing, &[0], PAGES * PAGE_SIZE);
        assert!(whole[0] == self.backing.bytes());
        assert!(testbed::wait_until(PATIENCE, || self.borrower.puts_under_way() == 0));
    }

    /// Reads all of the file by pages, which are available at once, beginning in the middle.
    /// Returns the numbers of messages and of pages that this took.
    fn read(&self) -> (u64, u64) {
        self.read_as(false)
    }

    /// Reads all of the file by pages. `is_eager`: further requests are sent before earlier ones
    /// are answered.
    fn read_as(&self, is_eager: bool) -> (u64, u64) {
        let metrics = self.borrower.metrics();
        let count = || (metrics.get_messages.get(), metrics.lender_pages.get());
        let before = count();
        let pages: Vec<usize> = (PAGES / 2..PAGES).chain(0..PAGES / 2).collect();
        let offsets: Vec<u64> = pages.iter().map(|page| (page * PAGE_SIZE) as u64).collect();
        let answers = read_as(&self.borrower, &self.file, &self.backing, &offsets, PAGE_SIZE, is_eager);
        let bytes = self.backing.bytes();
        for (page, answer) in pages.into_iter().zip(answers) {
            let end = ((page + 1) * PAGE_SIZE).min(bytes.len());
            assert!(answer == bytes[page * PAGE_SIZE..end], "page {page}");
        }
        let after = count();
        (after.0 - before.0, after.1 - before.1)
    }
}

#[test]
fn one_question_for_many() {
    for strategy in [Strategy::NonInclusive, Strategy::Exclusive] {
        let world = World::new(strategy, false);
        for is_eager in [false, true] {
            assert_eq!(world.read_as(is_eager), (PAGES as u64 / REQUEST_READS_MAX as u64, PAGES as u64));
            world.lend();
        }
    }
}

/// A READ that is not all at the lender ends the request before it, and is answered from the
/// backing file.
#[test]
fn what_was_changed_is_read_alone() {
    let world = World::new(Strategy::NonInclusive, false);
    let (start, end) = (5 * PAGE_SIZE as u64, 6 * PAGE_SIZE as u64);
    let stamp = world.backing.stamp().unwrap();
    world.borrower.change(&world.file, Change::Other { start, end }, stamp).applied(stamp, None);
    let (messages, pages) = world.read();
    assert_eq!(pages, PAGES as u64 - 1);
    // The READs before the changed page are requested when it comes; the READs behind it begin a
    // new batch.
    let before = PAGES / 2 + 5;
    let expected = before.div_ceil(REQUEST_READS_MAX) + (PAGES - 1 - before).div_ceil(REQUEST_READS_MAX);
    assert_eq!(messages, expected as u64);
}

#[test]
fn what_the_lender_has_not_is_read_below() {
    let world = World::new(Strategy::NonInclusive, false);
    world.lender.behave(Manner::Forgets);
    // Half of the pages of each request are missing. After such a response a READ is requested
    // alone, and its one page is there.
    let (messages, pages) = world.read();
    let (mut expected_messages, mut expected_pages, mut left) = (0, 0, PAGES);
    while left > 0 {
        let together = if expected_messages % 2 == 0 { left.min(REQUEST_READS_MAX) } else { 1 };
        expected_pages += together.div_ceil(2);
        left -= together;
        expected_messages += 1;
    }
    assert_eq!((messages, pages), (expected_messages, expected_pages as u64));
    world.lender.behave(Manner::FlipsABit);
    world.lend();
    assert_eq!(world.read().1, 0);
    assert!(world.borrower.metrics().bad_pages.get() >= PAGES as u64 / 2);
}

/// One page is changed after the batch was requested. Only its READ is repeated, and no READ
/// returns the old bytes.
#[test]
fn what_changes_meanwhile_is_read_again() {
    for strategy in [Strategy::NonInclusive, Strategy::Exclusive] {
        let world = World::new(strategy, false);
        world.lender.behave(Manner::KeepsQuiet);
        let pages: Vec<usize> = (0..REQUEST_READS_MAX).collect();
        let offsets: Vec<u64> = pages.iter().map(|page| (page * PAGE_SIZE) as u64).collect();
        let answers = std::thread::scope(|scope| {
            let reading = scope.spawn(|| read(&world.borrower, &world.file, &world.backing, &offsets, PAGE_SIZE));
            assert!(testbed::wait_until(PATIENCE, || world.lender.gets.load(Ordering::SeqCst) > 0));
            let (start, end) = (3 * PAGE_SIZE as u64, 4 * PAGE_SIZE as u64);
            let before = world.backing.stamp().unwrap();
            let change = world.borrower.change(&world.file, Change::Other { start, end }, before);
            world.backing.content.write().unwrap()[3 * PAGE_SIZE..4 * PAGE_SIZE].fill(0x77);
            change.applied(world.backing.stamp().unwrap(), None);
            world.lender.behave(Manner::Honest);
            reading.join().unwrap()
        });
        let bytes = world.backing.bytes();
        for (page, answer) in pages.into_iter().zip(answers) {
            assert!(answer == bytes[page * PAGE_SIZE..(page + 1) * PAGE_SIZE], "page {page}");
        }
        let metrics = world.borrower.metrics();
        assert_eq!((metrics.get_messages.get(), metrics.reads_repeated.get()), (1, 1));
    }
}

#[test]
fn a_lender_that_hangs_up_is_a_miss_for_all() {
    for is_eager in [false, true] {
        let world = World::new(Strategy::NonInclusive, false);
        world.lender.behave(Manner::HangsUp);
        assert_eq!(world.read_as(is_eager).1, 0);
        assert!(world.borrower.metrics().get_failures.get() > 0);
    }
}

/// Returns a world in which a late get is raced: earlier gets in time have filled the budget of
/// hedges.
fn hedging() -> World {
    let world = World::new(Strategy::NonInclusive, true);
    for _ in 0..200 {
        world.read();
    }
    world
}

#[test]
fn a_late_answer_is_waited_for_by_none() {
    let world = hedging();
    let won = &world.borrower.metrics().hedges_won;
    for is_eager in [false, true] {
        let before = won.get();
        world.lender.behave(Manner::KeepsQuiet);
        assert_eq!(world.read_as(is_eager).1, 0);
        assert!(won.get() > before, "the disk was asked, and was first");
        world.lender.behave(Manner::Honest);
        // Responses without a waiting reader are discarded completely; then the connections are
        // good again.
        let is_there = || (0..200).any(|_| world.read_as(is_eager).1 == PAGES as u64);
        assert!(testbed::wait_until(PATIENCE, is_there));
    }
}

/// The race for a late response covers all missing pages of its READ, also those of other messages:
/// the backing file is read once.
#[test]
fn what_was_raced_is_not_read_again() {
    let world = hedging();
    let won = &world.borrower.metrics().hedges_won;
    world.lender.behave(Manner::KeepsQuiet);
    let before = (won.get(), world.backing.reads.load(Ordering::SeqCst));
    let whole = read(&world.borrower, &world.file, &world.backing, &[0], PAGES * PAGE_SIZE);
    assert!(whole[0] == world.backing.bytes());
    assert_eq!(won.get() - before.0, 1, "the disk was asked, and was first");
    assert_eq!(world.backing.reads.load(Ordering::SeqCst) - before.1, 1);
    world.lender.behave(Manner::Honest);
}

/// A long request is sent as several messages, whose responses come one after the other.
#[test]
fn a_long_question_is_cut() {
    for (manner, expected_pages) in
        [(Manner::Honest, PAGES), (Manner::Forgets, PAGES / 2), (Manner::FlipsABit, 0), (Manner::HangsUp, 0)]
    {
        let world = World::new(Strategy::NonInclusive, false);
        world.lender.behave(manner);
        let metrics = world.borrower.metrics();
        let before = (metrics.get_messages.get(), metrics.lender_pages.get());
        let whole = read(&world.borrower, &world.file, &world.backing, &[0], PAGES * PAGE_SIZE);
        assert!(whole[0] == world.backing.bytes());
        assert_eq!(metrics.get_messages.get() - before.0, 4);
        assert_eq!(metrics.lender_pages.get() - before.1, expected_pages as u64);
    }
}
