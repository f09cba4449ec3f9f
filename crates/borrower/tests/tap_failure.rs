//! The tap fails, so evictions are not seen any more. An exclusive pool must not run empty without
//! a message.

mod odd_lender;

use borrower::{Borrower, Config, FileIdentity, Strategy};
use odd_lender::{InMemory, read};
use page::PAGE_SIZE;
use report::LinkState;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use tap::{CopyHints, Counters, Eviction, EvictionSource, Positions};

const PATIENCE: Duration = Duration::from_secs(60);
const PAGES: usize = 64;

/// The next action of the tap.
enum Word {
    /// The pages of the file with that key are evicted.
    Evicted(u32, Vec<u8>),
    /// The tap fails.
    Fails,
}

/// A tap that the test controls.
struct Tap {
    words: Receiver<Word>,
    handed_out: Arc<HandedOut>,
}

#[derive(Default)]
struct HandedOut(AtomicU64);

impl Positions for HandedOut {
    fn produced(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn consumed(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl EvictionSource for Tap {
    fn poll(&mut self, timeout: Duration, take: &mut dyn FnMut(Eviction<'_>)) -> io::Result<usize> {
        match self.words.recv_timeout(timeout) {
            Ok(Word::Evicted(generation, bytes)) => {
                let pages = bytes.as_chunks::<PAGE_SIZE>().0;
                for (index, page) in (0..).zip(pages) {
                    let position = self.handed_out.0.load(Ordering::SeqCst);
                    take(Eviction { generation, cgroup: 0, inode: 1, index, position, page: Some(page) });
                    self.handed_out.0.store(position + 1, Ordering::SeqCst);
                }
                Ok(pages.len())
            }
            Err(RecvTimeoutError::Timeout) => Ok(0),
            Ok(Word::Fails) | Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("the ring is broken")),
        }
    }

    fn positions(&self) -> Arc<dyn Positions> {
        self.handed_out.clone()
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }

    fn copy_hints(&self) -> Option<Arc<dyn CopyHints>> {
        None
    }
}

/// Starts an exclusive borrower with a lender of its own.
fn start(may_populate_on_read: bool) -> (Arc<Borrower>, Sender<Word>) {
    let server = odd_lender::real_lender();
    let address = server.local_address().clone();
    std::thread::spawn(move || server.run());
    let config = Config {
        lenders: vec![address.into()],
        strategy: Strategy::Exclusive,
        filter: false,
        gate: None,
        hedge: false,
        may_populate_on_read,
        ..Config::default()
    };
    let (tell, words) = channel();
    let borrower = Borrower::start(config, Some(Box::new(Tap { words, handed_out: Arc::default() }))).unwrap();
    let is_used = || borrower.lenders()[0].state == LinkState::Used;
    assert!(testbed::wait_until(PATIENCE, is_used), "{:?}", borrower.lenders());
    (borrower, tell)
}

#[test]
fn a_tap_that_fails_does_not_drain_the_pool() {
    for may_populate_on_read in [true, false] {
        let (borrower, tell) = start(may_populate_on_read);
        let seed = fastrand::u64(..);
        println!("seed {seed}, may populate on read: {may_populate_on_read}");
        let mut bytes = vec![0; PAGES * PAGE_SIZE];
        fastrand::Rng::with_seed(seed).fill(&mut bytes);
        let file = borrower.adopt(FileIdentity { device: 1, inode: 1, generation: 1 });
        let backing = Arc::new(InMemory::new(bytes.clone()));
        let read = || assert!(read(&borrower, &file, &backing, &[0], bytes.len())[0] == bytes);
        let lent = || {
            assert!(testbed::wait_until(PATIENCE, || borrower.puts_under_way() == 0));
            borrower.census().live_pages
        };
        let from_lender = || borrower.metrics().lender_pages.get();
        let evict = || {
            read();
            tell.send(Word::Evicted(file.key().0, bytes.clone())).unwrap();
            assert!(testbed::wait_until(PATIENCE, || lent() == PAGES as u64), "{} are lent", lent());
        };
        evict();
        read();
        assert_eq!((lent(), from_lender()), (0, PAGES as u64), "the lender has given them away");
        evict();
        assert!(borrower.sees_evictions() && borrower.tap_failure().is_none());
        tell.send(Word::Fails).unwrap();
        assert!(testbed::wait_until(PATIENCE, || borrower.tap_failure().is_some()));
        println!("{}", borrower.tap_failure().unwrap());
        assert!(!borrower.sees_evictions());

        let before = from_lender();
        for round in 1..=3 {
            read();
            assert_eq!((lent(), from_lender() - before), (PAGES as u64, round * PAGES as u64), "they stay there");
        }
        // A file that was not lent yet.
        let other = borrower.adopt(FileIdentity { device: 1, inode: 2, generation: 1 });
        borrower.set_borrowing(true);
        assert!(odd_lender::read(&borrower, &other, &backing, &[0], bytes.len())[0] == bytes);
        assert_eq!(lent(), if may_populate_on_read { 2 * PAGES as u64 } else { PAGES as u64 });
        assert_eq!(borrower.is_borrowing(), may_populate_on_read);
        borrower.stop();
    }
}
