//! Opens, serves, suspends, resumes and gives up the session at a lender.

use crate::Borrower;
use crate::net::connection::{Connection, GetConnection, Outgoing, send_bye, send_ping};
use crate::net::link::Link;
use crate::net::links::SET_BACKS_MAX;
use crate::policy::gate::PING_INTERVAL;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::{Kind, WireKey};
use zerocopy::FromBytes;

/// The pause after a failed attempt: the first one, and the longest one.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(3);

/// The time without a message after which a lender is given up, if an answer is due.
const SILENCE_MAX: Duration = Duration::from_secs(3);

/// How long entries of a suspended lender are kept in memory. No lender keeps their pages for
/// longer.
const SUSPENSION_MAX: Duration = Duration::from_secs(wire::GRACE_SECONDS_MAX);

/// How often the receiver checks connections whose answers are late, while there are any.
const LATE_WAIT: Duration = Duration::from_millis(10);

const _: () = assert!(PING_INTERVAL.as_secs() < wire::PING_SECONDS_MAX);

/// The connections of a session.
struct Session {
    main: Connection,
    pings: Connection,
    pinging: Outgoing,
    resumed: bool,
}

/// The reason why there is no session.
enum Failure {
    /// The session cannot be opened.
    Io(io::Error),
    /// The other link leads to the same lender.
    Same(Arc<Link>),
    /// The session of that name has gone on without this process.
    Behind([u8; 16]),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Io(error)
    }
}

/// Runs the link until it stops, or is abandoned.
pub(crate) fn supervise(borrower: &Borrower, link: &Link) {
    let lender = &link.lender.address;
    let mut pause = RETRY_FIRST;
    let mut away_since = Instant::now();
    while !link.is_over() {
        if away_since.elapsed() > SUSPENSION_MAX && borrower.core.catalog.is_suspended(link.number) {
            forget_session(borrower, link);
        }
        match open_session(borrower, link) {
            Ok(mut session) => {
                let capacity_pages = session.main.welcome.capacity_pages.get();
                tracing::info!(%lender, capacity_pages, resumed = session.resumed, "lender found");
                let found = Instant::now();
                borrower.core.metrics.lender_connects.one();
                let error = follow(borrower, link, &mut session).err().map(|error| match error.kind() {
                    io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
                    io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "it does not answer".to_owned(),
                    _ => error.to_string(),
                });
                suspend_session(borrower, link, &mut session.main);
                away_since = Instant::now();
                // A lender that is lost again soon after it was found is not tried more often for
                // that.
                if found.elapsed() > RETRY_MAX {
                    pause = RETRY_FIRST;
                }
                if let Some(error) = error.filter(|_| !link.is_over()) {
                    borrower.core.metrics.lender_losses.one();
                    link.counters.losses.one();
                    link.has_problem(&error);
                    tracing::warn!(%lender, "lender lost ({error}); reading from the backing directory until it is back");
                }
            }
            Err(Failure::Same(other)) => {
                let problem = format!("the same lender as {}", other.lender.address);
                if link.has_problem(&problem) {
                    tracing::info!(%lender, "not used: {problem}");
                }
                link.wait_for_same(borrower, &other);
            }
            Err(Failure::Behind(name)) => {
                let problem = "the session has gone on without this mount: the machine was set back, or is a copy";
                if link.has_problem(problem) {
                    tracing::warn!(%lender, "{problem}; what lenders have is given up");
                }
                reset_sessions(borrower, link, name);
            }
            Err(Failure::Io(_)) if link.is_over() => {}
            Err(Failure::Io(error)) => {
                let failure = error.to_string();
                if link.has_problem(&failure) {
                    tracing::warn!(%lender, "cannot use the lender: {failure}; reading from the backing directory, and trying again");
                }
            }
        }
        link.sleep(pause);
        pause = (pause * 2).min(RETRY_MAX);
    }
    if link.is_abandoned() && !link.stopping() {
        forget_session(borrower, link);
        let pages = link.counters.bad_pages.get();
        let problem = format!("it returned {pages} pages that do not verify; not used any more");
        link.has_problem(&problem);
        tracing::error!(%lender, "lender abandoned: {problem}; its memory is broken, or it is hostile");
    }
}

/// Opens a session: connects, and resumes the session or begins a new one.
fn open_session(borrower: &Borrower, link: &Link) -> Result<Session, Failure> {
    let open = || {
        // In this order ([`reset_sessions`]): no version from after the change of names is used
        // with an old name.
        let (next_version, name) = (borrower.core.catalog.version(), link.name());
        let main = Connection::open_main(&link.lender.address, name, next_version, &borrower.security())?;
        main.map(|main| (name, main)).ok_or(Failure::Behind(name))
    };
    let was_kept = borrower.core.catalog.is_suspended(link.number);
    // A new session gets a name that no one has used. Otherwise a copy of this machine, or an
    // earlier state of it, could have used the name.
    if !was_kept {
        link.rename();
    }
    let (mut name, mut main) = open()?;
    if was_kept && main.welcome.flags.get() & wire::WELCOME_RESUMED == 0 {
        forget_session(borrower, link);
        goodbye(&mut main)?;
        if link.is_over() {
            return Err(Failure::Io(io::ErrorKind::Interrupted.into()));
        }
        link.rename();
        (name, main) = open()?;
    }
    if let Some(other) = borrower.links.claim(link, main.welcome.incarnation.get()) {
        // If the lender has kept pages of this session, they are lost with it.
        forget_session(borrower, link);
        goodbye(&mut main)?;
        return Err(Failure::Same(other));
    }
    complete_session(borrower, link, name, main).map_err(|error| {
        link.let_go();
        Failure::Io(error)
    })
}

/// Sends Bye to the lender, and waits until it closes the connection.
fn goodbye(main: &mut Connection) -> io::Result<()> {
    if send_bye(&mut main.outgoing()?).is_ok() {
        main.wait_for_end();
    }
    Ok(())
}

/// Opens the other connections, and marks the lender as up.
fn complete_session(borrower: &Borrower, link: &Link, name: [u8; 16], main: Connection) -> io::Result<Session> {
    let (catalog, address) = (&borrower.core.catalog, &link.lender.address);
    let security = &borrower.security();
    // One connection is the main connection, one is for pings.
    let get_connections = borrower.config.get_connections.min(wire::SESSION_CONNECTIONS_MAX - 2);
    let open = |_| match link.is_over() {
        false => GetConnection::open(address, name, security),
        true => Err(io::ErrorKind::Interrupted.into()),
    };
    let gets: io::Result<Vec<_>> = (0..get_connections).map(open).collect();
    let (gets, pings) = (gets?, Connection::open(address, name, security)?);
    let pinging = pings.outgoing()?;
    link.found(main.welcome.capacity_pages.get());
    link.replace_gets(gets);
    *link.main_handle.lock() = Some(main.outgoing()?);
    *link.main.lock() = Some(main.outgoing()?);
    if link.name() != name {
        // Another thread has reset the sessions meanwhile, and may not have found this connection
        // to shut it down.
        link.shut_down();
        link.close();
        return Err(io::ErrorKind::Interrupted.into());
    }
    let resumed = catalog.lender_resume(link.number);
    if resumed {
        borrower.core.metrics.lender_resumes.one();
    } else {
        catalog.lender_up(link.number);
    }
    borrower.lenders_changed();
    Ok(Session { main, pings, pinging, resumed })
}

/// The connections are lost, or must end because the link stops.
fn suspend_session(borrower: &Borrower, link: &Link, main: &mut Connection) {
    borrower.core.catalog.lender_suspend(link.number);
    if link.is_over() {
        link.end();
        main.wait_for_end();
    } else {
        // A thread that is blocked in a write to the connection must continue.
        link.shut_down();
    }
    link.close();
    link.let_go();
    borrower.core.abandon_puts(link.number);
    borrower.lenders_changed();
}

/// The lender's pages are lost.
pub(crate) fn forget_session(borrower: &Borrower, link: &Link) {
    if borrower.core.catalog.lender_lost(link.number) {
        borrower.core.catalog.sweep();
    }
}

/// The lender reports that the session of that name has gone on without this process. This machine
/// was set back to an earlier state, or is a copy of a machine that still runs. Then lenders may
/// have pages under our sessions' names that this process knows nothing of, with versions that it
/// would give out again. So all sessions get new names, under which lenders have no pages.
///
/// Each rollback is reported once. A lender that keeps reporting is faulty; other lenders' pages
/// are not discarded for it.
fn reset_sessions(borrower: &Borrower, link: &Link, refused: [u8; 16]) {
    let catalog = &borrower.core.catalog;
    let mut links = borrower.links.all();
    {
        let mut set_backs = borrower.links.set_backs.lock();
        // Otherwise another lender has reported it already, and that session exists no more.
        if link.name() != refused {
            return;
        }
        let is_taken = *set_backs < SET_BACKS_MAX;
        *set_backs = set_backs.saturating_add(1);
        links.retain(|other| is_taken || other.number == link.number);
        for link in &links {
            link.rename();
            link.shut_down();
        }
        if is_taken {
            // After the renaming: none of these versions is used with an old name.
            catalog.skip_versions();
        }
    }
    // A lender that is connected detects the change by itself. One that has come back meanwhile has
    // done so under its new name, and stays.
    let lost = links.iter().filter(|link| catalog.lender_lost_if_suspended(link.number)).count();
    if lost > 0 {
        catalog.sweep();
    }
}

/// Receives the lender's messages on the main connection, and sends pings. Ends when a connection
/// fails or the link stops.
fn follow(borrower: &Borrower, link: &Link, session: &mut Session) -> io::Result<()> {
    let Session { main, pings, pinging, .. } = session;
    let mut body = Vec::new();
    let mut last_received = Instant::now();
    // The ping in progress, and the time of the last answered one.
    let mut pinged: Option<Instant> = None;
    let mut measured = Instant::now().checked_sub(PING_INTERVAL);
    while !link.is_over() {
        let has_late = link.clear_late()?;
        let wait = if has_late { LATE_WAIT } else { PING_INTERVAL / 4 };
        let [main_ready, pong_ready] = Connection::wait([main, pings], wait)?;
        // Pongs are handled first, so the measured time does not include the other work.
        if pong_ready && let Some((kind, _)) = pings.next_frame(Duration::ZERO, &mut body)? {
            let Some(sent) = pinged.take().filter(|_| kind == Kind::Pong) else { return Err(unexpected(kind)) };
            last_received = Instant::now();
            if let Ok(room) = wire::Room::read_from_bytes(&body) {
                link.seen.lock().free_pages = room.free_pages.get();
            }
            let elapsed = measured.map_or(PING_INTERVAL, |measured: Instant| measured.elapsed());
            link.measured(borrower, sent.elapsed(), elapsed);
            measured = Some(last_received);
        }
        if main_ready && let Some((kind, header)) = main.next_frame(Duration::ZERO, &mut body)? {
            last_received = Instant::now();
            match kind {
                Kind::PutReply => borrower.puts_answered(link.number, header.request.get(), &body)?,
                Kind::Lost => {
                    let keys = <[WireKey]>::ref_from_bytes(&body).map_err(|_| io::ErrorKind::InvalidData)?;
                    borrower.core.pages_lost(link.number, keys);
                }
                Kind::Pong => {}
                other => return Err(unexpected(other)),
            }
        }
        if last_received.elapsed() > SILENCE_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if pinged.is_none() && measured.is_none_or(|measured| measured.elapsed() >= PING_INTERVAL) {
            send_ping(pinging, 0)?;
            // After the ping was sent: the measured time does not include sending.
            pinged = Some(Instant::now());
        }
    }
    Ok(())
}

fn unexpected(kind: Kind) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("unexpected {kind:?} frame"))
}
