//! A connection's place among the [`sessions`](crate::sessions): this edge waits for other
//! connections to end, and frees pages.
//!
//! Dropping the [`Entry`] that [`Shared::enter`] returned gives up place, session and pages. So no
//! way out of a connection, not even a panic, can forget it. A lender that stops frees only a few
//! pages: the rest is freed with its memory.
//!
//! Lock order: [`Shared::table`], then [`Shared::store`]. Neither is ever held during I/O on a
//! socket.

use crate::sessions::{Joined, Name, Refusal};
use crate::shared::Shared;
use crate::store::Tenant;
use page::Version;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use wire::address::Stream;

/// How long a connection that resumes a session waits for the older ones to end. They end as soon
/// as they have stored the data that they have received. A borrower waits twice as long for its
/// Welcome.
const TAKE_OVER_LIMIT: Duration = Duration::from_secs(1);

/// Pages of an ending session that are freed while the store is locked: well below a millisecond.
const REMOVAL_PAGES: usize = 512;

/// A connection's place.
pub struct Entry {
    shared: Arc<Shared>,
    number: u64,
    /// The tenant whose pages are still to be freed.
    leaving: Option<Tenant>,
}

impl Shared {
    /// Makes room for a connection. Returns `None` if there are too many, or the lender is shutting
    /// down.
    pub fn enter(self: &Arc<Shared>, stream: &Arc<Stream>) -> Option<Entry> {
        let mut table = self.table.lock();
        if table.displace_oldest() {
            self.statistics.crowded_out.fetch_add(1, Relaxed);
        }
        let number = table.enter(stream, &self.store.lock(), Instant::now())?;
        Some(Entry { shared: Arc::clone(self), number, leaving: None })
    }

    /// Ends all connections, accepts no more, and waits until all of them have ended.
    pub fn close_all(&self) {
        let mut table = self.table.lock();
        table.close();
        while table.connections() > 0 {
            self.left.wait(&mut table);
        }
    }
}

impl Entry {
    /// Joins a session as its main connection, and waits for those that it replaces. See
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

    /// Leaves the session, and frees a number of its pages that takes no time. Returns true if more
    /// are left, so that dropping the entry takes longer.
    pub fn leave(&mut self) -> bool {
        let over = {
            let mut table = self.shared.table.lock();
            let store = self.shared.store.lock();
            table.leave(self.number, &store, self.shared.grace, Instant::now())
        };
        self.shared.left.notify_all();
        self.leaving = over.filter(|tenant| !self.shared.store.lock().remove_tenant(*tenant, REMOVAL_PAGES));
        self.leaving.is_some()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Further calls have no effect.
        if self.leaving.is_none() {
            self.leave();
        }
        if let Some(tenant) = self.leaving {
            let mut store = self.shared.store.lock();
            // Freeing 256 GiB page by page takes most of a minute. A lender that stops must not
            // wait for that, because no borrower asks it for a page any more.
            while !self.shared.stop.is_requested() && !store.remove_tenant(tenant, REMOVAL_PAGES) {
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

    /// Returns the pages and connections that are left when a session with `pages` pages ends.
    fn left_of(pages: u32, stops: bool) -> (u32, usize) {
        let mut store = Store::new(pages).unwrap();
        store.set_available_pages(pages.into());
        let shared = Arc::new(Shared::new(store, Duration::ZERO, Security::Trusting).unwrap());
        let (near, _far) = UnixStream::pair().unwrap();
        let entry = shared.enter(&Arc::new(Stream::Unix(near))).unwrap();
        let tenant = entry.join_main([1; 16], None).unwrap().tenant;
        for index in 0..pages {
            let key = Key { id: PageId { file: FileKey(1), index }, version: Version(1) };
            assert!(shared.store.lock().put(tenant, key, 0, &[1; PAGE_SIZE]));
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
