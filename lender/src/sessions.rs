//! Who is connected: connections, and the sessions that they belong to.
//!
//! A session exists as long as it has a connection, and so do its pages. Both are given up by dropping the [`Entry`] that
//! [`Shared::enter`] gave, so that no way out of a connection's thread, not even a panic, can forget it.
//!
//! Lock order: [`Shared::table`], then [`Shared::store`]. Neither is ever held during I/O on a socket.

use crate::shared::Shared;
use crate::store::Owner;
use parking_lot::MutexGuard;
use std::collections::HashMap;
use std::net::Shutdown;
use std::sync::Arc;
use wire::address::Stream;

/// Connections at once. A borrower has a main one and a few for gets; each takes a thread here, and up to 2 MiB while busy.
pub const CONNECTIONS_MAX: usize = 256;
/// Connections of a session at once.
pub const SESSION_CONNECTIONS_MAX: u32 = wire::SESSION_CONNECTIONS_MAX as u32;
/// Sessions at once.
pub const SESSIONS_MAX: usize = 64;

/// Pages of a leaving session freed in one go, with the store locked: well below a millisecond.
const REMOVAL_PAGES: usize = 512;

const _: () = assert!(SESSIONS_MAX * 2 <= crate::store::OWNERS_MAX); // those that leave still have their number

/// A session's name.
pub type Name = [u8; 16];

/// What is known of a session.
pub struct Session {
    /// Its pages' owner.
    pub owner: Owner,
    /// Its connections.
    pub connections: u32,
}

/// All connections and sessions.
#[derive(Default)]
pub struct Table {
    streams: HashMap<u64, Arc<Stream>>,
    next_number: u64,
    closed: bool,
    /// Sessions by name.
    pub sessions: HashMap<Name, Session>,
}

impl Table {
    /// Number of connections.
    pub fn connections(&self) -> usize {
        self.streams.len()
    }
}

/// A connection's place in the table, and its session's, once it has one.
pub struct Entry {
    shared: Arc<Shared>,
    number: u64,
    session: Option<(Name, Owner)>,
}

impl Shared {
    /// Makes room for a connection; `None` when there are too many, or the lender is shutting down.
    pub fn enter(self: &Arc<Shared>, stream: &Arc<Stream>) -> Option<Entry> {
        let mut table = self.table.lock();
        if table.closed || table.streams.len() >= CONNECTIONS_MAX {
            return None;
        }
        let number = table.next_number;
        table.next_number += 1;
        table.streams.insert(number, Arc::clone(stream));
        Some(Entry { shared: Arc::clone(self), number, session: None })
    }

    /// Ends all connections, lets no more in, and waits until all their threads are done.
    pub fn close_all(&self) {
        let mut table = self.table.lock();
        table.closed = true;
        for stream in table.streams.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        while !table.streams.is_empty() {
            self.left.wait(&mut table);
        }
    }
}

impl Entry {
    /// Joins a session, which begins with its first connection. An error says what there is too much of.
    pub fn join(&mut self, name: Name) -> Result<Owner, &'static str> {
        let mut table = self.shared.table.lock();
        if let Some(session) = table.sessions.get_mut(&name) {
            if session.connections >= SESSION_CONNECTIONS_MAX {
                return Err("this borrower has too many connections");
            }
            session.connections += 1;
            self.session = Some((name, session.owner));
            return Ok(session.owner);
        }
        if table.sessions.len() >= SESSIONS_MAX {
            return Err("too many borrowers");
        }
        let owner = self.shared.store.lock().add_owner().ok_or("too many borrowers")?;
        table.sessions.insert(name, Session { owner, connections: 1 });
        self.session = Some((name, owner));
        Ok(owner)
    }

    fn leave(&mut self) {
        let Some((name, owner)) = self.session.take() else { return };
        {
            let mut table = self.shared.table.lock();
            let Some(session) = table.sessions.get_mut(&name) else { return };
            session.connections -= 1;
            if session.connections > 0 {
                return;
            }
            table.sessions.remove(&name);
        }
        let mut store = self.shared.store.lock();
        while !store.remove_owner(owner, REMOVAL_PAGES) {
            MutexGuard::bump(&mut store);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.leave();
        self.shared.table.lock().streams.remove(&self.number);
        self.shared.left.notify_all();
    }
}
