//! A connection's place among the [`sessions`](crate::sessions): the edge that waits for others to
//! leave, and frees pages.
//!
//! Place, session and pages are given up by dropping the [`Entry`] that [`Shared::enter`] gave, so
//! that no way out of a connection, not even a panic, can forget it. Only a lender that stops frees
//! no more than takes no time: the rest goes with its memory.
//!
//! Lock order: [`Shared::table`], then [`Shared::store`]. Neither is ever held during I/O on a
//! socket.

use crate::sessions::{Joined, Name, Refusal};
use crate::shared::Shared;
use crate::store::Owner;
use page::Version;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use wire::address::Stream;

/// How long a connection that resumes a session waits for those of before to leave. They are told
/// to, so it takes them as long as what they have received takes to store; a borrower waits twice
/// as long for its Welcome.
const TAKE_OVER_LIMIT: Duration = Duration::from_secs(1);

/// Pages of a leaving session freed in one go, with the store locked: well below a millisecond.
const REMOVAL_PAGES: usize = 512;

/// A connection's place.
pub struct Entry {
    shared: Arc<Shared>,
    number: u64,
    /// Whose pages are still to be freed.
    leaving: Option<Owner>,
}

impl Shared {
    /// Makes room for a connection; `None` when there are too many, or the lender is shutting down.
    pub fn enter(self: &Arc<Shared>, stream: &Arc<Stream>) -> Option<Entry> {
        let mut table = self.table.lock();
        if table.crowd_out() {
            self.tally.crowded_out.fetch_add(1, Relaxed);
        }
        let number = table.enter(stream, &self.store.lock(), Instant::now())?;
        Some(Entry { shared: Arc::clone(self), number, leaving: None })
    }

    /// Ends all connections, lets no more in, and waits until all of them have left.
    pub fn close_all(&self) {
        let mut table = self.table.lock();
        table.close();
        while table.connections() > 0 {
            self.left.wait(&mut table);
        }
    }
}

impl Entry {
    /// Joins a session as its main connection; waits for those that it replaces. See
    /// [`crate::sessions::Table::join_main`].
    pub fn join_main(&self, name: Name, next_version: Option<Version>) -> Result<Joined, Refusal> {
        let deadline = Instant::now() + TAKE_OVER_LIMIT;
        let mut table = self.shared.table.lock();
        loop {
            let mut store = self.shared.store.lock();
            let joined = table.join_main(self.number, name, next_version, &mut store, Instant::now())?;
            drop(store);
            if let Some(joined) = joined {
                return Ok(joined);
            }
            if self.shared.left.wait_until(&mut table, deadline).timed_out() {
                return Err(Refusal::Busy("connections of before are still ending: try again"));
            }
        }
    }

    /// Joins a session for gets.
    pub fn join_get(&self, name: Name) -> Result<Joined, Refusal> {
        self.shared.table.lock().join_get(self.number, name)
    }

    /// Leaves the session, and frees as many of the pages that go with it as takes no time. True:
    /// dropping the entry takes longer, as there are more.
    pub fn leave(&mut self) -> bool {
        let over = {
            let mut table = self.shared.table.lock();
            let store = self.shared.store.lock();
            table.leave(self.number, &store, self.shared.grace, Instant::now())
        };
        self.shared.left.notify_all();
        self.leaving = over.filter(|owner| !self.shared.store.lock().remove_owner(*owner, REMOVAL_PAGES));
        self.leaving.is_some()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Once is enough, and more does nothing.
        if self.leaving.is_none() {
            self.leave();
        }
        if let Some(owner) = self.leaving {
            let mut store = self.shared.store.lock();
            // Page by page, 256 GiB take most of a minute, for which a lender that stops would be
            // waited for. Nobody asks it for a page any more.
            while !self.shared.stop.is_requested() && !store.remove_owner(owner, REMOVAL_PAGES) {
                store.bump();
            }
        }
        self.shared.table.lock().remove(self.number);
        self.shared.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Key, Store};
    use page::{FileKey, PAGE_SIZE, PageId};
    use std::os::unix::net::UnixStream;
    use wire::secure::Security;

    /// The pages that stay when a session with so many ends, and the connections.
    fn left_of(pages: u32, stops: bool) -> (u32, usize) {
        let mut store = Store::new(pages).unwrap();
        store.set_headroom_pages(pages.into());
        let shared = Arc::new(Shared::new(store, Duration::ZERO, Security::Trusting).unwrap());
        let (near, _far) = UnixStream::pair().unwrap();
        let entry = shared.enter(&Arc::new(Stream::Unix(near))).unwrap();
        let owner = entry.join_main([1; 16], None).unwrap().owner;
        for index in 0..pages {
            let key = Key { id: PageId { file: FileKey(1), index }, version: Version(1) };
            assert!(shared.store.lock().put(owner, key, 0, &[1; PAGE_SIZE]));
        }
        if stops {
            shared.stop.request();
        }
        drop(entry);
        shared.close_all();
        (shared.store.lock().stored_pages(), shared.table.lock().connections())
    }

    #[test]
    fn a_lender_that_stops_frees_no_more_than_takes_no_time() {
        let pages = 3 * REMOVAL_PAGES as u32;
        assert_eq!(left_of(pages, false), (0, 0));
        let (left_pages, connections) = left_of(pages, true);
        assert!(left_pages >= pages - REMOVAL_PAGES as u32 && connections == 0, "{left_pages} pages");
    }
}
