//! The lenders that a borrower uses: none that returns bad pages, none twice, and none that is
//! judged by the speed of an earlier one.

mod odd_lender;

use borrower::{Borrower, Config, FileIdentity, LenderAddress, Session, Strategy};
use odd_lender::{InMemory, Manner, OddLender, read, real_lender};
use page::{FileKey, PAGE_SIZE, PageId, Version};
use report::{Link, LinkState};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use wire::address::Address;
use wire::{Header, Hello, Kind, MAGIC, PROTOCOL, PutItem, ROLE_MAIN, WELCOME_RESUMED, Welcome, WireKey};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

const PATIENCE: Duration = Duration::from_secs(60);
const PAGES: usize = 64;

fn start(lenders: &[LenderAddress], gate: Option<borrower::gate::Config>) -> Arc<Borrower> {
    resume(lenders, gate, None)
}

fn resume(lenders: &[LenderAddress], gate: Option<borrower::gate::Config>, session: Option<Session>) -> Arc<Borrower> {
    let config = Config {
        session,
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

/// Waits until the lenders are in the given state.
fn wait_for(borrower: &Borrower, what: &str, state: impl Fn(&[Link]) -> bool) -> Vec<Link> {
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
    let backing = Arc::new(InMemory::new(bytes));
    let address = [address];
    let borrower = start(&address, None);
    let file = borrower.adopt(FileIdentity { device: 1, inode: 1, generation: 1 });
    let read = || {
        assert!(read(&borrower, &file, &backing, &[0], PAGES * PAGE_SIZE)[0] == backing.bytes());
        assert!(testbed::wait_until(PATIENCE, || borrower.puts_under_way() == 0));
    };
    wait_for(&borrower, "lender", |lenders| lenders[0].state == LinkState::Used);
    // The first READ lends the pages. The second finds them bad, and lends them again.
    for bad_pages in [0, 0, PAGES] {
        let status = &borrower.lenders()[0];
        assert_eq!((status.state, status.bad_pages), (LinkState::Used, bad_pages as u64));
        read();
    }
    let status = wait_for(&borrower, "end of it", |lenders| lenders[0].reason.contains("verify")).remove(0);
    assert_eq!(status.state, LinkState::Down);
    assert_eq!(status.reason, format!("it returned {} pages that do not verify; not used any more", 2 * PAGES));
    assert_eq!((borrower.metrics().bad_pages.get(), status.bad_pages), (2 * PAGES as u64, 2 * PAGES as u64));
    assert_eq!(borrower.census().live_pages, 0, "its pages are lost");
    let connections = lender.connections.load(Ordering::SeqCst);
    read();
    assert_eq!(borrower.metrics().bad_pages.get(), 2 * PAGES as u64, "it is not asked");
    assert_eq!((lender.connections.load(Ordering::SeqCst), borrower.lenders()[0].connects), (connections, 1));
    // An administrator who changes the list forgives the lender.
    borrower.set_lenders(&[]);
    borrower.set_lenders(&address);
    wait_for(&borrower, "lender again", |lenders| lenders[0].state == LinkState::Used && lenders[0].bad_pages == 0);
    borrower.stop();
}

#[test]
fn a_lender_in_the_place_of_a_slow_one_is_used() {
    let folder = testbed::Scratch::new("slow-and-fast").unwrap();
    // The thresholds are high enough for pings of the fast lender on a busy machine.
    let thresholds = |upper_us, lower_us| borrower::gate::Thresholds { upper_us, lower_us };
    let gate = borrower::gate::Config { short: thresholds(40_000, 30_000), long: thresholds(500_000, 400_000) };
    let too_slow = 3 * Duration::from_micros(gate.short.upper_us);
    let (_, slow) = OddLender::listen(&folder.path().join("slow"), too_slow);
    let (_, fast) = OddLender::listen(&folder.path().join("fast"), Duration::ZERO);
    let borrower = start(&[slow], Some(gate));
    wait_for(&borrower, "closed gate", |lenders| lenders[0].state == LinkState::Bypassed);
    borrower.set_lenders(&[fast]);
    let backing = Arc::new(InMemory::new(vec![7; PAGE_SIZE]));
    let has_lent = || {
        let lender = &borrower.lenders()[0];
        // Another file each time, because a file that was tried once is not tried again.
        let inode = borrower.census().files + 1;
        let file = borrower.adopt(FileIdentity { device: 1, inode, generation: 1 });
        read(&borrower, &file, &backing, &[0], PAGE_SIZE);
        assert_eq!(lender.number, 0, "it has the number of the slow one");
        lender.put_pages > 0
    };
    assert!(testbed::wait_until(PATIENCE, has_lent), "{:?}", borrower.lenders());
    borrower.stop();
}

#[test]
fn two_addresses_of_one_lender_are_one_lender() {
    let server = real_lender();
    let Address::Tcp { port, .. } = *server.local_address() else { unreachable!() };
    let handle = server.handle();
    let serving = std::thread::spawn(move || server.run().unwrap());

    let addresses: [LenderAddress; 2] =
        ["127.0.0.1", "localhost"].map(|host| Address::Tcp { host: host.into(), port }.into());
    let borrower = start(&addresses, None);
    let one_of_both = |lenders: &[Link]| {
        let used = lenders.iter().find(|lender| lender.state == LinkState::Used);
        let reason = used.map(|used| format!("the same lender as {}", used.address));
        let other = lenders.iter().find(|lender| lender.state == LinkState::Down);
        other.is_some_and(|other| Some(&other.reason) == reason.as_ref())
    };
    let lenders = wait_for(&borrower, "choice", one_of_both);
    assert!(testbed::wait_until(PATIENCE, || handle.status().borrowers == 1), "{:?}", handle.status());
    assert_eq!(lenders.iter().map(|lender| lender.connects).sum::<u64>(), 1);
    // When the link in use leaves the list, the other one takes its place.
    let used = lenders.iter().position(|lender| lender.state == LinkState::Used).unwrap();
    borrower.set_lenders(&addresses[1 - used..][..1]);
    wait_for(&borrower, "other address", |lenders| lenders.len() == 1 && lenders[0].state == LinkState::Used);
    // When the first address comes back, it is refused.
    borrower.set_lenders(&addresses);
    wait_for(&borrower, "choice of before", one_of_both);
    borrower.stop();
    handle.shutdown();
    serving.join().unwrap();
}

/// Reads new files, four pages each, until each lender has got some puts.
fn lend(borrower: &Arc<Borrower>, inodes: &mut Range<u64>) {
    let backing = Arc::new(InMemory::new(vec![7; 4 * PAGE_SIZE]));
    let before: Vec<u64> = borrower.lenders().iter().map(|lender| lender.put_pages).collect();
    let has_grown = || borrower.lenders().iter().zip(&before).all(|(lender, before)| lender.put_pages > *before);
    while !has_grown() {
        let inode = inodes.next().expect("enough files");
        let file = borrower.adopt(FileIdentity { device: 1, inode, generation: 1 });
        assert!(read(borrower, &file, &backing, &[0], 4 * PAGE_SIZE)[0] == backing.bytes());
        assert!(testbed::wait_until(PATIENCE, || borrower.puts_under_way() == 0));
    }
}

fn are_used(lenders: &[Link]) -> bool {
    lenders.iter().all(|lender| lender.state == LinkState::Used)
}

#[test]
fn who_was_set_back_to_an_earlier_state_begins_anew() {
    let servers = [real_lender(), real_lender()];
    let addresses = servers.each_ref().map(|server| LenderAddress::from(server.local_address().clone()));
    let handles = servers.each_ref().map(|server| server.handle());
    let serving = servers.map(|server| std::thread::spawn(move || server.run().unwrap()));
    let start = |session| {
        let borrower = resume(&addresses, None, session);
        wait_for(&borrower, "lenders", are_used);
        borrower
    };
    let stored_pages = || handles.each_ref().map(|handle| handle.status().stored_pages);
    let names = |session: &Session| session.lenders.iter().map(|left| (left.number, left.name)).collect::<Vec<_>>();
    let mut inodes = 0..2000;

    let first = start(None);
    lend(&first, &mut inodes);
    let snapshot = first.stop_for_successor();
    // The mount continues, and both lenders get more pages.
    let second = start(Some(snapshot.clone()));
    lend(&second, &mut inodes);
    let later = second.stop_for_successor();
    assert_eq!(names(&later), names(&snapshot), "both were resumed");
    let kept_pages = stored_pages();

    // The machine is set back to the earlier state.
    let set_back = start(Some(snapshot.clone()));
    lend(&set_back, &mut inodes);
    assert!(stored_pages().iter().zip(&kept_pages).all(|(now, before)| now > before), "what was kept is left alone");
    let ahead = set_back.stop_for_successor();
    let skipped = ahead.next_version.0 - later.next_version.0;
    assert!(((1 << 32)..(1 << 34)).contains(&skipped), "once for all lenders: {ahead:?}");
    assert!(names(&ahead).iter().all(|name| !names(&snapshot).contains(name)), "neither was resumed");
    // A lender still resumes the session for the rightful daemon.
    let rightful = start(Some(later.clone()));
    assert_eq!(names(&rightful.stop_for_successor()), names(&later));
    handles.iter().for_each(|handle| handle.shutdown());
    serving.into_iter().for_each(|serving| serving.join().unwrap());
}

/// A proxy in front of a lender, which also records the names of the sessions. While it is closed
/// it accepts no connection.
struct Gate {
    address: std::net::SocketAddr,
    names: Arc<Mutex<Vec<[u8; 16]>>>,
    is_open: Arc<AtomicBool>,
    passing: Arc<Mutex<Vec<TcpStream>>>,
}

impl Gate {
    fn to(target: String) -> Gate {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let gate =
            Gate { address, names: Arc::default(), is_open: Arc::new(AtomicBool::new(true)), passing: Arc::default() };
        let (names, is_open, passing) = (gate.names.clone(), gate.is_open.clone(), gate.passing.clone());
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let mut hello = [0; size_of::<Header>() + size_of::<Hello>()];
                if !is_open.load(Ordering::SeqCst) || (&near).read_exact(&mut hello).is_err() {
                    continue;
                }
                let Ok(far) = TcpStream::connect(&target) else { continue };
                let said = Hello::read_from_bytes(&hello[size_of::<Header>()..]).unwrap();
                if said.role.get() == ROLE_MAIN {
                    names.lock().unwrap().push(said.session);
                }
                (&far).write_all(&hello).unwrap();
                for (mut from, mut to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
                    passing.lock().unwrap().push(from.try_clone().unwrap());
                    std::thread::spawn(move || {
                        let _ended = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        gate
    }

    /// Ends all connections, and accepts none until the gate is opened.
    fn close(&self) {
        self.is_open.store(false, Ordering::SeqCst);
        for stream in self.passing.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Puts a page with that version under the name of a session.
fn put_as(lender: &str, session: [u8; 16], version: u64) {
    let mut stream = TcpStream::connect(lender).unwrap();
    let mut say = |kind, items, request, body: &[&[u8]]| {
        let header = Header::new(kind, items, body.concat().len(), request);
        stream.write_all(&[header.as_bytes(), &body.concat()].concat()).unwrap();
        let mut header = Header::new_zeroed();
        stream.read_exact(header.as_mut_bytes()).unwrap();
        let mut body = vec![0; header.body_bytes.get() as usize];
        stream.read_exact(&mut body).unwrap();
        (header.validate().unwrap(), body)
    };
    let hello = Hello { magic: MAGIC, protocol: PROTOCOL.into(), role: ROLE_MAIN.into(), session };
    let (kind, welcome) = say(Kind::Hello, 0, 0, &[hello.as_bytes()]);
    assert_eq!(kind, Kind::Welcome);
    assert_eq!(Welcome::read_from_bytes(&welcome).unwrap().flags.get(), WELCOME_RESUMED);
    let key = WireKey::new(PageId { file: FileKey(1), index: 999 }, Version(version));
    let item = PutItem { key, checksum: 1.into() };
    assert_eq!(say(Kind::Put, 1, 1, &[item.as_bytes(), &[1; PAGE_SIZE]]), (Kind::PutReply, vec![1]));
}

#[test]
fn who_finds_his_session_gone_on_gives_up_what_all_lenders_have() {
    let servers = [real_lender(), real_lender()];
    let handles = servers.each_ref().map(|server| server.handle());
    let [gated, other] = servers.each_ref().map(|server| server.local_address().to_string());
    let serving = servers.map(|server| std::thread::spawn(move || server.run().unwrap()));
    let gate = Gate::to(gated.clone());
    let borrower = start(&[gate.address.to_string(), other].map(|text| text.parse::<Address>().unwrap().into()), None);
    wait_for(&borrower, "lenders", are_used);
    let mut inodes = 0..2000;
    lend(&borrower, &mut inodes);
    assert!(borrower.census().live_pages > 0);
    let last_name = || *gate.names.lock().unwrap().last().unwrap();
    let name = last_name();

    // Disconnected, and no other process has used the session: the link resumes it.
    gate.close();
    wait_for(&borrower, "loss", |lenders| lenders[0].state != LinkState::Used);
    gate.is_open.store(true, Ordering::SeqCst);
    wait_for(&borrower, "lender again", are_used);
    assert!(last_name() == name && borrower.census().live_pages > 0);

    // Disconnected, and meanwhile another process with the session's name puts a later version.
    gate.close();
    wait_for(&borrower, "loss", |lenders| lenders[0].state != LinkState::Used);
    put_as(&gated, name, 1 << 40);
    let connects: Vec<u64> = borrower.lenders().iter().map(|lender| lender.connects).collect();
    gate.is_open.store(true, Ordering::SeqCst);
    wait_for(&borrower, "all of them again", |lenders| {
        are_used(lenders) && lenders.iter().zip(&connects).all(|(lender, before)| lender.connects > *before)
    });
    assert_eq!(borrower.census().live_pages, 0, "also what the other lender has");
    assert!(last_name() != name);
    // The borrower is still useful.
    lend(&borrower, &mut inodes);
    assert!(borrower.census().live_pages > 0);
    borrower.stop();
    handles.iter().for_each(|handle| handle.shutdown());
    serving.into_iter().for_each(|serving| serving.join().unwrap());
}
