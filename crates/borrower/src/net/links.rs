//! The links to all lenders. A lender in the list has a number in the catalog and two threads; a
//! lender that leaves the list loses both.

use crate::catalog::entry::Place;
use crate::net::link::session;
use crate::net::link::{self, Link};
use crate::policy::gate::Passes;
use crate::{Borrower, LenderAddress};
use locks::{Mutex, RwLock};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use wire::address::Address;
use wire::confined::{self, Work, confine};

/// The links.
pub(crate) struct Links {
    /// The links, by their number in the catalog.
    seats: RwLock<Vec<Option<Arc<Link>>>>,
    /// The threads of each link. The lock also admits only one change of the list at a time.
    threads: Mutex<Vec<(u8, Vec<JoinHandle<()>>)>>,
    /// No more links are added. Changed under the lock of `threads`.
    closed: AtomicBool,
    /// Admits one claim of a lender at a time.
    claims: Mutex<()>,
    /// The number of accepted reports that all sessions have gone on without this process. The lock
    /// admits one report at a time.
    pub(crate) set_backs: Mutex<u32>,
}

/// The limit of accepted reports. Each one costs the pages at all lenders, and versions.
pub(crate) const SET_BACKS_MAX: u32 = 16;

impl Default for Links {
    fn default() -> Links {
        Links {
            seats: RwLock::new(vec![None; Place::LENDERS.into()]),
            threads: Mutex::default(),
            closed: AtomicBool::new(false),
            claims: Mutex::default(),
            set_backs: Mutex::default(),
        }
    }
}

impl Links {
    /// Returns the link to the lender of that number.
    pub(crate) fn get(&self, number: u8) -> Option<Arc<Link>> {
        self.seats.read().get(usize::from(number))?.clone()
    }

    /// Returns all links.
    pub(crate) fn all(&self) -> Vec<Arc<Link>> {
        self.seats.read().iter().flatten().cloned().collect()
    }

    /// Records that the link leads to that incarnation of a lender, until [`Link::let_go`]. If
    /// another link leads to it already, records nothing and returns that link.
    pub(crate) fn claim(&self, link: &Link, incarnation: u64) -> Option<Arc<Link>> {
        let _claiming = self.claims.lock();
        let is_same = |other: &Arc<Link>| other.number != link.number && other.leads_to(incarnation);
        let same = self.all().into_iter().find(is_same);
        if same.is_none() {
            link.leads_to_now(incarnation);
        }
        same
    }

    /// Adds the link that `make` returns for its number (the wanted one, or a free one), and starts
    /// its threads. After an error there is no link.
    pub(crate) fn add(
        &self,
        borrower: &Arc<Borrower>,
        wanted: Option<u8>,
        make: impl FnOnce(u8) -> io::Result<Link>,
    ) -> io::Result<()> {
        let mut threads = self.threads.lock();
        if self.closed.load(Ordering::Relaxed) {
            return Ok(()); // The borrower has stopped.
        }
        let free = |number: &u8| self.get(*number).is_none();
        let number = wanted.or_else(|| (0..Place::LENDERS).find(free)).filter(free);
        let number = number.ok_or_else(|| io::Error::other(format!("more than {} lenders", Place::LENDERS)))?;
        let link = Arc::new(make(number)?);
        borrower.core.name_lender(number, link.lender.id.as_deref().unwrap_or(&link.lender.address.to_string()));
        self.seats.write()[usize::from(number)] = Some(link.clone());
        let spawn = |name: &str, run: fn(&Borrower, &Link)| {
            let (borrower, link) = (borrower.clone(), link.clone());
            // A socket in the file system may belong to another user.
            let needed = match link.lender.address {
                Address::Unix(_) => confined::FILES,
                _ => confined::NOTHING,
            };
            std::thread::Builder::new().name(format!("{name}-{number}")).spawn(move || {
                confine(Work::Connecting, needed);
                run(&borrower, &link);
            })
        };
        let mut started = Vec::new();
        for (name, run) in [("puma-link", session::supervise as fn(&_, &_)), ("puma-put", link::send_work)] {
            match spawn(name, run) {
                Ok(thread) => started.push(thread),
                Err(error) => {
                    link.stop(borrower);
                    self.clear(borrower, &link, started);
                    return Err(error);
                }
            }
        }
        threads.push((number, started));
        Ok(())
    }

    /// Ends a link, and waits until its threads have ended. The lender's pages are lost.
    pub(crate) fn remove(&self, borrower: &Borrower, link: &Link) {
        let mut threads = self.threads.lock();
        link.stop(borrower);
        let of_link = threads.extract_if(.., |(number, _)| *number == link.number).flat_map(|(_, threads)| threads);
        self.clear(borrower, link, of_link.collect());
    }

    /// Waits for the threads of a stopped link, and resets its number for another lender.
    fn clear(&self, borrower: &Borrower, link: &Link, threads: Vec<JoinHandle<()>>) {
        threads.into_iter().for_each(|thread| drop(thread.join()));
        session::forget_session(borrower, link);
        borrower.core.catalog.lender_gate(link.number, Passes::All);
        self.seats.write()[usize::from(link.number)] = None;
    }

    /// Ends all links, at the same time. They stay in the list, and no more links are added.
    pub(crate) fn stop(&self, borrower: &Borrower) {
        let mut threads = self.threads.lock();
        self.closed.store(true, Ordering::Relaxed);
        self.all().iter().for_each(|link| link.stop(borrower));
        for (_, threads) in threads.drain(..) {
            threads.into_iter().for_each(|thread| drop(thread.join()));
        }
    }

    /// Makes the list equal to `lenders`: ends the links to all others, and adds links to new ones.
    /// Returns the number of lenders without room.
    pub(crate) fn set(&self, borrower: &Arc<Borrower>, lenders: &[LenderAddress]) -> usize {
        let same =
            |link: &Link, lender: &LenderAddress| link.lender.address == lender.address && link.lender.id == lender.id;
        let mut leaving = self.all();
        leaving.retain(|link| !lenders.iter().any(|lender| same(link, lender)));
        // All links are told to stop first; then each is waited for.
        leaving.iter().for_each(|link| link.stop(borrower));
        for link in leaving {
            tracing::info!(lender = %link.lender.address, "lender has left the pool");
            self.remove(borrower, &link);
        }
        let known = self.all();
        let new = lenders.iter().filter(|lender| !known.iter().any(|link| same(link, lender)));
        let add = |lender: &&LenderAddress| {
            let gate = *borrower.thresholds.lock();
            self.add(borrower, None, |number| Link::new(number, (*lender).clone(), None, gate)).is_err()
        };
        new.filter(add).count()
    }
}
