//! Requests of guests for a policy: the listener. [`crate::placing`] decides about them.

use crate::Policy;
use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};
use wire::address::{Address, Stream};
use wire::confined::{self, Work, confine};
use wire::frames::{ConnectionError, Outgoing, send};
use wire::key::PoolKey;
use wire::listener::Listener;
use wire::peers::{self, IdentifiedPeer};
use wire::pre_authentication::{PreAuthenticationLimiter, UnauthenticatedPlace};
use wire::secure::Security;
use wire::{Advice, Kind, Refused};
use zerocopy::FromBytes;

/// Time limit of a guest for a request, and of the host for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Requests older than this are not processed any more: within the remaining time the guest
/// receives a refusal.
const TAKE_LIMIT: Duration = Duration::from_secs(4);
const TICK: Duration = Duration::from_millis(250);
/// The maximum number of connected guests.
const CONNECTIONS_MAX: usize = 16;
/// The maximum number of handshakes in progress, in addition to those. When one more begins, the
/// oldest is ended.
const UNAUTHENTICATED_MAX: usize = 16;
/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The maximum number of unanswered requests.
pub const ASKED_MAX: usize = 16;

/// A guest's request.
pub struct Asked {
    /// Its index among the keys.
    pub guest: usize,
    /// The requested policy.
    pub policy: Policy,
    /// Whether it is granted, or the reason why not.
    pub answer: SyncSender<Result<(), String>>,
    since: Instant,
}

impl Asked {
    /// Whether it is too late to process it: the guest is told that the host has too much to do.
    pub fn is_late(&self) -> bool {
        self.since.elapsed() > TAKE_LIMIT
    }
}

/// Serves guests as long as a receiver takes their requests.
pub fn listen(listener: &Listener, keys: &[Option<PoolKey>], asked: &SyncSender<Asked>) {
    let (connections, limiter) = (AtomicUsize::new(0), PreAuthenticationLimiter::new(UNAUTHENTICATED_MAX));
    std::thread::scope(|scope| {
        loop {
            let mut fds = [rustix::event::PollFd::new(listener, rustix::event::PollFlags::IN)];
            let _ = rustix::event::poll(&mut fds, None);
            match listener.accept() {
                Ok(stream) => {
                    let stream = Arc::new(stream);
                    let Some(place) = limiter.enter(&stream) else { continue }; // Closed without a message.
                    let (asked, connections) = (asked.clone(), &connections);
                    let serve = move || {
                        confine(Work::Serving, confined::NOTHING);
                        if let Err(broken) = serve(&stream, place, keys, &asked, connections) {
                            tracing::debug!(peer = stream.peer(), %broken, "a guest's advice");
                        }
                        let _ = stream.shutdown(Shutdown::Both);
                    };
                    // Without a thread the connection is closed.
                    let _ = std::thread::Builder::new().name("puma-advice".into()).spawn_scoped(scope, serve);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::debug!(%error, "cannot accept a connection");
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    });
}

fn serve(
    stream: &Stream,
    place: UnauthenticatedPlace<'_>,
    keys: &[Option<PoolKey>],
    asked: &SyncSender<Asked>,
    connections: &AtomicUsize,
) -> Result<(), ConnectionError> {
    let keys: Vec<Option<&PoolKey>> = keys.iter().map(Option::as_ref).collect();
    let peer = peers::handshake(stream, &keys, wire::ROLE_ADVISER, "pumapool numa advise")?;
    drop(place);
    let served = if connections.fetch_add(1, Relaxed) < CONNECTIONS_MAX {
        receive(stream, peer, asked)
    } else {
        Err(peers::refuse(stream, &peer.channel, wire::REFUSED_BUSY, "too many guests ask just now: try again"))
    };
    connections.fetch_sub(1, Relaxed);
    served
}

fn receive(stream: &Stream, peer: IdentifiedPeer, asked: &SyncSender<Asked>) -> Result<(), ConnectionError> {
    let IdentifiedPeer { nth, channel, mut reader } = peer;
    peers::welcome(stream, &channel)?;
    let frame = reader.next(stream, Instant::now() + ANSWER_LIMIT, |kind| kind == Kind::Advise)?;
    let advice = Advice::read_from_bytes(frame.body).map_err(|_| ConnectionError::Unexpected(Kind::Advise))?;
    let name = advice.policy.split(|byte| *byte == 0).next().unwrap_or_default();
    let granted = String::from_utf8_lossy(name).parse::<Policy>().and_then(|policy| {
        let (answer, answered) = sync_channel(1);
        let busy = || "the host has too much to do just now: try again".to_owned();
        asked.try_send(Asked { guest: nth, policy, answer, since: Instant::now() }).map_err(|_| busy())?;
        answered.recv_timeout(ANSWER_LIMIT).map_err(|_| busy())?
    });
    let (code, text) = match granted {
        Ok(()) => (0, String::new()),
        Err(reason) => (wire::REFUSED_ADVICE, reason),
    };
    let mut frame = Outgoing::default();
    frame.push(&channel, Kind::Advised, 0, &Refused::new(code, &text))?;
    send(stream, frame.bytes(), ANSWER_LIMIT)
}

/// Sends the host this machine's request.
///
/// # Errors
/// Fails if the host cannot be reached, or refuses: then with its text.
pub fn advise(host: &Address, security: &Security, policy: Policy) -> io::Result<()> {
    let mut joined = peers::join(host, security, wire::ROLE_ADVISER, ANSWER_LIMIT, TICK)?;
    let mut advice = Advice { policy: [0; 16] };
    advice.policy[..policy.name().len()].copy_from_slice(policy.name().as_bytes());
    joined.send(Kind::Advise, 0, &advice, ANSWER_LIMIT)?;
    let answer = joined.receive(Kind::Advised, Instant::now() + 2 * ANSWER_LIMIT)?;
    let answer = Refused::read_from_bytes(&answer[..]).map_err(|_| io::ErrorKind::InvalidData)?;
    match answer.code.get() {
        0 => Ok(()),
        _ => Err(io::Error::other(answer.text())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_refused_is_not_taken_later() {
        let (answer, _) = sync_channel(1);
        let mut asked = Asked { guest: 0, policy: Policy::None, answer, since: Instant::now() };
        assert!(!asked.is_late());
        asked.since -= TAKE_LIMIT;
        assert!(asked.is_late());
        const { assert!(TAKE_LIMIT.as_secs() < ANSWER_LIMIT.as_secs()) };
    }
}
