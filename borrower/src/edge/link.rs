//! The link to a lender: finds it, keeps it, loses it, finds it again.
//!
//! While it stands there are one main connection and a fixed number of get connections under one session name. Whatever
//! goes wrong on any of them ends all of them, and the lender is *suspended*: nothing is put there or asked for. The session is
//! tried again under the same name, less and less often while that fails. If the lender has kept it, what the catalog has
//! on record counts again; if not, or if it takes too long, the lender's epoch moves on. Losing a lender costs its pages and
//! nothing else.

use super::connection::{ANSWER_TIMEOUT, Connection, GetConnection, send_bye, send_ping};
use crate::Borrower;
use std::io;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use sync::{Condvar, Mutex};
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

/// How long entries of a suspended lender are kept in memory. No lender keeps their pages for longer.
const SUSPENSION_MAX: Duration = Duration::from_secs(wire::GRACE_SECONDS_MAX);

const _: () = assert!(PING_INTERVAL.as_secs() < wire::PING_SECONDS_MAX);

/// The lender that the catalog knows by this number.
pub(crate) const LENDER: u8 = 0;
/// Lenders that the catalog knows.
pub(crate) const LENDERS: u8 = 1;

/// The connections of the session.
pub(crate) struct Link {
    /// The session's name.
    name: Mutex<[u8; 16]>,
    /// The session is left to a successor: no Bye.
    is_left: AtomicBool,
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
    /// Not connected yet; the session has that name, or one that nobody else knows.
    pub(crate) fn new(name: Option<[u8; 16]>) -> io::Result<Link> {
        let name = name.map_or_else(random_name, Ok)?;
        Ok(Link {
            name: Mutex::new(name),
            is_left: AtomicBool::new(false),
            main: Mutex::default(),
            gets: Mutex::default(),
            idle: Condvar::new(),
        })
    }

    /// The session's name.
    pub(crate) fn name(&self) -> [u8; 16] {
        *self.name.lock()
    }

    /// Tells the lender that the session is over, unless it is left to a successor, and ends it either way. To be called once the
    /// borrower is stopping; again is harmless.
    pub(crate) fn end(&self) {
        let Some(mut stream) = self.main.lock().take() else { return };
        if self.is_left.load(Ordering::Acquire) || send_bye(&mut stream).is_err() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// From now on [`Link::end`] leaves the session as it is, for a successor.
    pub(crate) fn leave(&self) {
        self.is_left.store(true, Ordering::Release);
    }

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

    /// The connection failed: ends it and its fellows, if they are still on. The supervisor sees it and tries again.
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

    /// Ends the connections.
    fn shut_down(&self) {
        if let Some(stream) = &*self.main.lock() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Sends on the main connection. An error ends the connections.
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
    let mut away_since = Instant::now();
    while !borrower.stopping() {
        if away_since.elapsed() > SUSPENSION_MAX && borrower.core.catalog.is_suspended(LENDER) {
            forget_session(borrower);
            // What the lender may still have of the old session is of no use in the new one.
            let _ = random_name().map(|name| *borrower.link.name.lock() = name);
        }
        match open_session(borrower, address, get_connections) {
            Ok((mut main, resumed)) => {
                let capacity_pages = main.welcome.capacity_pages.get();
                tracing::info!(lender = %address, capacity_pages, resumed, "lender found");
                (pause, last_failure) = (RETRY_FIRST, String::new());
                borrower.core.metrics.lender_connects.one();
                let error = follow(borrower, &mut main).err().map(|error| match error.kind() {
                    io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
                    io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "it does not answer".to_owned(),
                    _ => error.to_string(),
                });
                suspend_session(borrower, &mut main);
                away_since = Instant::now();
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

/// Connects, and says whether the lender had kept the session.
fn open_session(borrower: &Borrower, address: &Address, get_connections: usize) -> io::Result<(Connection, bool)> {
    let (catalog, name) = (&borrower.core.catalog, borrower.link.name());
    let main = Connection::open(address, wire::ROLE_MAIN, name)?;
    if main.welcome.flags.get() & wire::WELCOME_RESUMED == 0 {
        // At once: should anything fail from here on, the next attempt resumes the session that has just begun without pages.
        forget_session(borrower);
    }
    let get_connections = get_connections.min(wire::SESSION_CONNECTIONS_MAX - 1);
    let gets: io::Result<Vec<_>> = (0..get_connections).map(|_| GetConnection::open(address, name)).collect();
    borrower.link.replace_gets(gets?);
    *borrower.link.main.lock() = Some(main.stream()?);
    let resumed = catalog.lender_resume(LENDER);
    if resumed {
        borrower.core.metrics.lender_resumes.one();
    } else {
        catalog.lender_up(LENDER);
    }
    Ok((main, resumed))
}

/// The connections are lost, or to be ended because the borrower stops.
fn suspend_session(borrower: &Borrower, main: &mut Connection) {
    borrower.core.catalog.lender_suspend(LENDER);
    if borrower.stopping() {
        borrower.link.end();
        main.wait_for_end();
    }
    *borrower.link.main.lock() = None;
    borrower.link.replace_gets(Vec::new());
    borrower.abandon_puts();
}

/// What the lender had is lost.
fn forget_session(borrower: &Borrower) {
    if borrower.core.catalog.lender_lost(LENDER) {
        borrower.core.catalog.sweep();
    }
}

fn random_name() -> io::Result<[u8; 16]> {
    let mut name = [0; 16];
    rustix::rand::getrandom(&mut name, rustix::rand::GetRandomFlags::empty())?;
    Ok(name)
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
