//! The link to a lender: finds it, keeps it, loses it, finds it again.
//!
//! While it stands there are one main connection and a fixed number of get connections under one session name. Whatever
//! goes wrong on any of them ends the session: the lender's epoch moves on, and a new session is tried, less and less often
//! while it fails. Losing a lender costs its pages and nothing else.

use super::connection::{ANSWER_TIMEOUT, Connection, GetConnection, send_ping};
use crate::Borrower;
use parking_lot::{Condvar, Mutex};
use std::io;
use std::net::Shutdown;
use std::time::{Duration, Instant};
use wire::address::{Address, Stream};
use wire::{Kind, WireKey};
use zerocopy::FromBytes;

/// Pause after a failed attempt, at first and at the most.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(3);

/// How often a silent lender is asked whether it is still there.
const PING_INTERVAL: Duration = Duration::from_secs(1);

/// Silence after which a lender is given up while something is expected of it.
const SILENCE_MAX: Duration = Duration::from_secs(3);

/// The lender that the catalog knows by this number.
pub(crate) const LENDER: u8 = 0;
/// Lenders that the catalog knows.
pub(crate) const LENDERS: u8 = 1;

/// The connections of the session.
#[derive(Default)]
pub(crate) struct Link {
    main: Mutex<Option<Stream>>,
    gets: Mutex<Gets>,
    /// A get connection became idle.
    idle: Condvar,
}

#[derive(Default)]
struct Gets {
    /// Counts the sessions, so that a connection of an earlier one is not taken for one of this.
    session: u64,
    /// How many there are, in use or not; 0 while there is no session.
    open: usize,
    idle: Vec<GetConnection>,
}

/// A get connection in use.
pub(crate) struct Taken {
    session: u64,
    pub(crate) connection: GetConnection,
}

impl Link {
    /// Takes a get connection for one question; [`Link::give_back`] or [`Link::give_up`] it then. Waits for one while all are in
    /// use, as long as an answer may take.
    pub(crate) fn take(&self) -> Option<Taken> {
        let mut gets = self.gets.lock();
        self.idle.wait_while_for(&mut gets, |gets| gets.open > 0 && gets.idle.is_empty(), ANSWER_TIMEOUT);
        let connection = gets.idle.pop()?;
        Some(Taken { session: gets.session, connection })
    }

    /// Returns a connection that is still good.
    pub(crate) fn give_back(&self, taken: Taken) {
        let mut gets = self.gets.lock();
        if gets.session == taken.session {
            gets.idle.push(taken.connection);
            self.idle.notify_one();
        }
    }

    /// The connection failed: ends its session, if it is still on. The supervisor sees it and starts another.
    pub(crate) fn give_up(&self, taken: Taken) {
        if self.gets.lock().session == taken.session {
            self.shut_down();
        }
    }

    fn replace_gets(&self, idle: Vec<GetConnection>) {
        let mut gets = self.gets.lock();
        *gets = Gets { session: gets.session + 1, open: idle.len(), idle };
        self.idle.notify_all();
    }

    /// Ends the session.
    pub(crate) fn shut_down(&self) {
        if let Some(stream) = &*self.main.lock() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Sends on the main connection. An error ends the session.
    pub(crate) fn send(&self, send: impl FnOnce(&mut Stream) -> io::Result<()>) -> io::Result<()> {
        let mut main = self.main.lock();
        let stream = main.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        send(stream).inspect_err(|_| {
            let _ = stream.shutdown(Shutdown::Both);
        })
    }
}

/// Runs the link until the borrower stops.
pub(crate) fn supervise(borrower: &Borrower, address: &Address, get_connections: usize) {
    let mut pause = RETRY_FIRST;
    let mut last_failure = String::new();
    while !borrower.stopping() {
        match open_session(borrower, address, get_connections) {
            Ok(mut main) => {
                tracing::info!(lender = %address, capacity_pages = main.welcome.capacity_pages.get(), "lender found");
                (pause, last_failure) = (RETRY_FIRST, String::new());
                borrower.core.metrics.lender_connects.one();
                let error = follow(borrower, &mut main).err().map(|error| match error.kind() {
                    io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
                    io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "it does not answer".to_owned(),
                    _ => error.to_string(),
                });
                close_session(borrower);
                if let Some(error) = error.filter(|_| !borrower.stopping()) {
                    borrower.core.metrics.lender_losses.one();
                    tracing::warn!(lender = %address, "lender lost ({error}); reading from the directory below until it is back");
                }
            }
            Err(error) => {
                let failure = error.to_string();
                if failure != last_failure {
                    tracing::warn!(lender = %address, "no lender: {failure}; reading from the directory below, and trying again");
                    last_failure = failure;
                }
            }
        }
        borrower.sleep(pause);
        pause = (pause * 2).min(RETRY_MAX);
    }
}

fn open_session(borrower: &Borrower, address: &Address, get_connections: usize) -> io::Result<Connection> {
    let mut session = [0; 16];
    rustix::rand::getrandom(&mut session, rustix::rand::GetRandomFlags::empty())?;
    let main = Connection::open(address, wire::ROLE_MAIN, session)?;
    let get_connections = get_connections.min(wire::SESSION_CONNECTIONS_MAX - 1);
    let gets: io::Result<Vec<_>> = (0..get_connections).map(|_| GetConnection::open(address, session)).collect();
    borrower.link.replace_gets(gets?);
    *borrower.link.main.lock() = Some(main.stream()?);
    borrower.core.catalog.lender_up(LENDER);
    Ok(main)
}

fn close_session(borrower: &Borrower) {
    borrower.core.catalog.lender_down(LENDER);
    *borrower.link.main.lock() = None;
    borrower.link.replace_gets(Vec::new());
    borrower.abandon_puts();
    borrower.core.catalog.sweep();
}

/// Receives what the lender sends on the main connection, until it fails or the borrower stops.
fn follow(borrower: &Borrower, main: &mut Connection) -> io::Result<()> {
    let mut body = Vec::new();
    let mut heard = Instant::now();
    let mut pinged = Instant::now();
    while !borrower.stopping() {
        match main.next_frame(PING_INTERVAL / 4, &mut body)? {
            Some((kind, header)) => {
                heard = Instant::now();
                match kind {
                    Kind::PutReply => borrower.puts_answered(header.request.get(), &body)?,
                    Kind::Lost => {
                        let keys = <[WireKey]>::ref_from_bytes(&body).map_err(|_| io::ErrorKind::InvalidData)?;
                        borrower.core.pages_lost(keys);
                    }
                    Kind::Pong => {}
                    other => {
                        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("unexpected {other:?} frame")));
                    }
                }
            }
            None if heard.elapsed() > SILENCE_MAX => return Err(io::ErrorKind::TimedOut.into()),
            None => {}
        }
        if pinged.elapsed() > PING_INTERVAL {
            pinged = Instant::now();
            borrower.link.send(|stream| send_ping(stream, 0))?;
        }
    }
    Ok(())
}
