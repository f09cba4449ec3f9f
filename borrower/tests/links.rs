//! Which lenders a borrower has to do with: none that returns what does not verify, none twice, and none that is as slow as another one was.

mod odd_lender;

use borrower::{Borrower, Config, FileIdentity, LenderAddress, LenderStatus, Strategy};
use odd_lender::{InMemory, Manner, OddLender, read};
use page::PAGE_SIZE;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use wire::address::Address;

const PATIENCE: Duration = Duration::from_secs(60);
const PAGES: usize = 64;

fn start(lenders: &[LenderAddress], gate: Option<borrower::gate::Config>) -> Arc<Borrower> {
    let config = Config {
        lenders: lenders.to_vec(),
        strategy: Strategy::NonInclusive,
        filter: false,
        gate,
        hedge: false,
        bad_pages_max: 2 * PAGES as u64,
        ..Config::default()
    };
    Borrower::start(config, None).unwrap()
}

/// Waits until the lenders are as they should be.
fn wait_for(borrower: &Borrower, what: &str, state: impl Fn(&[LenderStatus]) -> bool) -> Vec<LenderStatus> {
    assert!(testbed::wait_until(PATIENCE, || state(&borrower.lenders())), "no {what}: {:?}", borrower.lenders());
    borrower.lenders()
}

#[test]
fn a_lender_with_broken_memory_is_abandoned() {
    let folder = testbed::Scratch::new("broken-memory").unwrap();
    let (lender, address) = OddLender::listen(&folder.path().join("socket"), Duration::ZERO);
    let mut bytes = vec![0; PAGES * PAGE_SIZE];
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    lender.behave(Manner::FlipsABit);
    let below = Arc::new(InMemory(bytes.into()));
    let address = [address];
    let borrower = start(&address, None);
    let file = borrower.adopt(FileIdentity { device: 1, inode: 1, generation: 1 });
    let read = || {
        assert!(read(&borrower, &file, &below, &[0], PAGES * PAGE_SIZE)[0] == below.bytes());
        assert!(testbed::wait_until(PATIENCE, || borrower.puts_under_way() == 0));
    };
    wait_for(&borrower, "lender", |lenders| lenders[0].state == "used");
    // Lent by the first READ, found bad by the second, which lends it anew.
    for bad_pages in [0, 0, PAGES] {
        let status = &borrower.lenders()[0];
        assert_eq!((status.state, status.bad_pages), ("used", bad_pages as u64));
        read();
    }
    let status = wait_for(&borrower, "end of it", |lenders| lenders[0].reason.contains("verify")).remove(0);
    assert_eq!(status.state, "down");
    assert_eq!(status.reason, format!("it returned {} pages that do not verify; not used any more", 2 * PAGES));
    assert_eq!((borrower.metrics().bad_pages.get(), status.bad_pages), (2 * PAGES as u64, 2 * PAGES as u64));
    assert_eq!(borrower.census().live_pages, 0, "its pages are lost");
    let connections = lender.connections.load(Ordering::SeqCst);
    read();
    assert_eq!(borrower.metrics().bad_pages.get(), 2 * PAGES as u64, "it is not asked");
    assert_eq!((lender.connections.load(Ordering::SeqCst), borrower.lenders()[0].connects), (connections, 1));
    // Whoever changes the list has looked at it.
    borrower.set_lenders(&[]);
    borrower.set_lenders(&address);
    wait_for(&borrower, "lender again", |lenders| lenders[0].state == "used" && lenders[0].bad_pages == 0);
    borrower.stop();
}

#[test]
fn a_lender_in_the_place_of_a_slow_one_is_used() {
    let folder = testbed::Scratch::new("slow-and-fast").unwrap();
    // What a ping of the fast one takes on a busy machine is not held against it.
    let thresholds = |upper_us, lower_us| borrower::gate::Thresholds { upper_us, lower_us };
    let gate = borrower::gate::Config { short: thresholds(40_000, 30_000), long: thresholds(500_000, 400_000) };
    let too_slow = 3 * Duration::from_micros(gate.short.upper_us);
    let (_, slow) = OddLender::listen(&folder.path().join("slow"), too_slow);
    let (_, fast) = OddLender::listen(&folder.path().join("fast"), Duration::ZERO);
    let borrower = start(&[slow], Some(gate));
    wait_for(&borrower, "closed gate", |lenders| lenders[0].state == "shunned");
    borrower.set_lenders(&[fast]);
    let below = Arc::new(InMemory(vec![7; PAGE_SIZE].into()));
    let has_lent = || {
        let lender = &borrower.lenders()[0];
        // Another file each time, as what was tried once is not tried again.
        let inode = borrower.census().files + 1;
        let file = borrower.adopt(FileIdentity { device: 1, inode, generation: 1 });
        read(&borrower, &file, &below, &[0], PAGE_SIZE);
        assert_eq!(lender.number, 0, "it has the number of the slow one");
        lender.put_pages > 0
    };
    assert!(testbed::wait_until(PATIENCE, has_lent), "{:?}", borrower.lenders());
    borrower.stop();
}

#[test]
fn two_addresses_of_one_lender_are_one_lender() {
    let server = lender::Server::bind(lender::Config {
        listen: "127.0.0.1:0".parse().unwrap(),
        capacity: lender::Capacity::Bytes(1 << 20),
        reserve_bytes: 1 << 20,
        policy: lender::PolicyName::Lru,
        grace: lender::GRACE_DEFAULT,
        limits: lender::Limits::default(),
        security: lender::Security::Trusting,
    })
    .unwrap();
    let Address::Tcp { port, .. } = *server.local_address() else { unreachable!() };
    let handle = server.handle();
    let serving = std::thread::spawn(move || server.run().unwrap());

    let addresses: [LenderAddress; 2] =
        ["127.0.0.1", "localhost"].map(|host| Address::Tcp { host: host.into(), port }.into());
    let borrower = start(&addresses, None);
    let one_of_both = |lenders: &[LenderStatus]| {
        let used = lenders.iter().find(|lender| lender.state == "used");
        let reason = used.map(|used| format!("the same lender as {}", used.address));
        let other = lenders.iter().find(|lender| lender.state == "down");
        other.is_some_and(|other| Some(&other.reason) == reason.as_ref())
    };
    let lenders = wait_for(&borrower, "choice", one_of_both);
    assert!(testbed::wait_until(PATIENCE, || handle.status().borrowers == 1), "{:?}", handle.status());
    assert_eq!(lenders.iter().map(|lender| lender.connects).sum::<u64>(), 1);
    // When the one that is used leaves the list, the other one takes its place.
    let used = lenders.iter().position(|lender| lender.state == "used").unwrap();
    borrower.set_lenders(&addresses[1 - used..][..1]);
    wait_for(&borrower, "other address", |lenders| lenders.len() == 1 && lenders[0].state == "used");
    // And it is refused when it comes back.
    borrower.set_lenders(&addresses);
    wait_for(&borrower, "choice of before", one_of_both);
    borrower.stop();
    handle.shutdown();
    serving.join().unwrap();
}
