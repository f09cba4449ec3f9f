//! The lender's threads in every order that shuttle tries: connections, housekeeping, ending
//! sessions, closing.
//!
//! The code under test is the connection's own (`put`, `get`, `drop_pages`, `push_lost`), the
//! in-flight put's, the housekeeper's search and shrinking, and the session table. Only waiting for
//! sockets is left out, because it has no order to test. Run it with `make interleavings`.
//!
//! To find out what the tests catch, the code was broken in one place at a time, before sessions
//! were kept for a grace time:
//!
//! | broken | found by |
//! |---|---|
//! | `Entry::leave` lets go of the table between counting off the last connection and removing the session | `sessions_come_and_go`: a session with a connection lost its page |
//! | `Entry::join` lets go of it between looking for the session and adding it | both of the others: a page lost, pages that stay for ever |
//! | `leave` takes the store's lock before the table's | all three: deadlock |
//! | `Entry`'s drop does not notify | `closing_waits_for_all`: deadlock |
//! | `close_all` does not set `closed` | `closing_waits_for_all`: a connection was accepted after the end |

use crate::connection::tests::Peer;
use crate::housekeeping::{forget_left_behind, scan, shrink};
use crate::shared::Shared;
use crate::store::Store;
use locks::shuttle::thread;
use page::{FileKey, PAGE_SIZE, PageId, Version};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::WireKey;
use wire::address::Stream;

/// Schedules of each test, in each of two ways.
const SCHEDULES: usize = 1500;
const CAPACITY_PAGES: u32 = 6;
/// How long sessions are kept, in tests with a grace time.
const GRACE: Duration = Duration::from_secs(3600);

fn check(run: impl Fn() + Send + Sync + 'static) {
    locks::explore(SCHEDULES, run);
}

fn lender(grace: Duration) -> Arc<Shared> {
    let mut store = Store::new(CAPACITY_PAGES).unwrap();
    store.set_available_pages(u64::MAX);
    Arc::new(Shared::new(store, grace, crate::Security::Trusting).unwrap())
}

fn stream() -> Arc<Stream> {
    Arc::new(Stream::Unix(UnixStream::pair().unwrap().0))
}

/// The content of a page: it differs for each session, index and version.
fn content(session: u8, index: u32, version: u64) -> [u8; PAGE_SIZE] {
    let mut page = [session; PAGE_SIZE];
    page[..4].copy_from_slice(&index.to_le_bytes());
    page[PAGE_SIZE - 8..].copy_from_slice(&version.to_le_bytes());
    page
}

fn key(index: u32, version: u64) -> WireKey {
    WireKey::new(PageId { file: FileKey(1), index }, Version(version))
}

/// Two sessions put, get and drop while the housekeeper searches and shrinks: each get returns what
/// the same session has put.
#[test]
fn pages_stay_whole_and_apart() {
    check(|| {
        let shared = lender(Duration::ZERO);
        let mut threads = Vec::new();
        for session in 1..=2u8 {
            let shared = Arc::clone(&shared);
            threads.push(thread::spawn(move || {
                let main = stream();
                let entry = shared.enter(&main).unwrap();
                let joined = entry.join_main([session; 16], None).unwrap();
                let other = Arc::clone(&shared);
                let gets = thread::spawn(move || {
                    let stream = stream();
                    let entry = other.enter(&stream).unwrap();
                    // The main connection may have ended already.
                    let Ok(joined) = entry.join_get([session; 16]) else { return };
                    let mut peer = Peer::new(&other, [session; 16], joined);
                    for version in 1..=2 {
                        let keys: Vec<_> = (0..4).map(|at| key(at, version)).collect();
                        for (at, page) in peer.get(&keys, version == 2).into_iter().enumerate() {
                            if let Some(page) = page {
                                assert!(page == content(session, at as u32, version), "page {at} is another's");
                            }
                        }
                    }
                });
                let mut peer = Peer::new(&shared, [session; 16], joined);
                for version in 1..=2 {
                    let pages: Vec<_> = (0..4).map(|at| (key(at, version), content(session, at, version))).collect();
                    peer.put(&pages);
                    peer.drop_pages(&[key(0, version)]);
                    peer.take_lost();
                }
                drop(entry);
                gets.join().unwrap();
            }));
        }
        let housekeeper = Arc::clone(&shared);
        threads.push(thread::spawn(move || {
            housekeeper.store.lock().take_slots_silently(0..3);
            scan(&housekeeper).unwrap();
            shrink(&housekeeper);
            housekeeper.store.lock().set_available_pages(1);
            housekeeper.store.lock().mark_reclaimable();
            scan(&housekeeper).unwrap();
        }));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        nothing_is_left(&shared);
    });
}

/// Main connections of a session replace each other, another session begins and ends, and the
/// housekeeping forgets kept sessions: a connection that has joined finds the pages that it has
/// put.
#[test]
fn sessions_come_and_go() {
    check(|| {
        let shared = lender(GRACE);
        let mut number = 0;
        let threads = [1u8, 1, 1, 2].map(|session| {
            number += 1;
            let (shared, version) = (Arc::clone(&shared), number);
            thread::spawn(move || {
                let stream = stream();
                let entry = shared.enter(&stream).unwrap();
                // Refused, if a newer connection was faster.
                let Ok(joined) = entry.join_main([session; 16], None) else { return };
                let mut peer = Peer::new(&shared, [session; 16], joined);
                peer.put(&[(key(7, version), content(session, 7, version))]);
                let page = peer.get(&[key(7, version)], false).remove(0);
                assert!(page == Some(content(session, 7, version)), "a session with a connection lost its page");
            })
        });
        let housekeeper = Arc::clone(&shared);
        let housekeeper = thread::spawn(move || forget_left_behind(&housekeeper, Instant::now() + GRACE));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        housekeeper.join().unwrap();
        forget_left_behind(&shared, Instant::now() + GRACE);
        nothing_is_left(&shared);
    });
}

/// The server ends while connections are made, join and end: it returns when all have ended, and
/// none is accepted after it.
#[test]
fn closing_waits_for_all() {
    check(|| {
        let shared = lender(GRACE);
        let threads: Vec<_> = (0..3u8)
            .map(|session| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    if let Some(entry) = shared.enter(&stream()) {
                        let _ = entry.join_main([session; 16], None);
                    }
                })
            })
            .collect();
        shared.close_all();
        assert_eq!(shared.table.lock().connections(), 0);
        assert!(shared.enter(&stream()).is_none(), "closed is closed");
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(shared.table.lock().connections(), 0, "somebody came in behind the end");
    });
}

fn nothing_is_left(shared: &Shared) {
    let (table, store) = (shared.table.lock(), shared.store.lock());
    assert_eq!((table.sessions().len(), table.connections()), (0, 0));
    let pages = (store.stored_pages(), store.zero_pages(), store.reserved_pages());
    assert_eq!(pages, (0, 0, 0), "sessions left, and pages stayed");
}
