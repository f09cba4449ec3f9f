//! Messages for a supervisor that does not read at the moment, because it is stopped or busy.
//!
//! A descriptor is sent to the supervisor at once if the socket has room. Otherwise it waits here,
//! and a thread sends it when there is room again. For each name only the last message counts. So
//! no more messages wait than there are open files, now or when the supervisor stopped.
//!
//! A request must never wait for the supervisor. An older message must never overtake a newer one
//! of the same name. The daemon must never give up a supervisor whose process lives.

use super::channel::{Channel, Held};
use parking_lot::{Condvar, Mutex};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Limit on waiting messages. Beyond it, a takeover loses newly opened files.
const WAITING_MAX: usize = 65_536;
/// Each waiting message may hold a descriptor in addition to that of the open file. Together they
/// may use this part of the process's limit. It is in the reserve that no user gets
/// (`inode/descriptors.rs`, `RESERVE_PART`).
const WAITING_PART: u64 = 64;
/// Time between two attempts to send to the supervisor's full socket. There is no event if the
/// reason is the number of descriptors in transit.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// If the supervisor reads nothing for so long, this is logged.
const LOG_AFTER: Duration = Duration::from_secs(1);

/// The queue of messages to one supervisor. After it is dropped, nothing is sent.
pub(crate) struct Outbox(Arc<Shared>);

struct Shared {
    channel: Arc<Channel>,
    /// Whether messages wait, so that newer ones must wait behind them.
    is_behind: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    waiting_max: usize,
}

#[derive(Default)]
struct State {
    /// The descriptors to be held; `None`: to be closed.
    waiting: BTreeMap<Held, Option<OwnedFd>>,
    /// Whether a message found no room, which was logged.
    has_lost: bool,
    is_closed: bool,
}

impl Outbox {
    /// Creates an empty outbox.
    ///
    /// # Errors
    /// Fails if its thread cannot be started.
    pub(crate) fn new(channel: Arc<Channel>) -> io::Result<Outbox> {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let waiting_max = WAITING_MAX.min((descriptors / WAITING_PART) as usize);
        let shared = Arc::new(Shared {
            channel,
            is_behind: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
            waiting_max,
        });
        let for_thread = shared.clone();
        thread::Builder::new().name("puma-outbox".into()).spawn(move || for_thread.deliver())?;
        Ok(Outbox(shared))
    }

    /// Has the supervisor hold a descriptor (or with `None`: close it), now or later.
    pub(crate) fn put(&self, held: Held, fd: Option<BorrowedFd<'_>>) {
        let shared = &*self.0;
        if !shared.is_behind.load(Ordering::Acquire) {
            match shared.channel.offer(held, fd) {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => return shared.lose(&error),
            }
        }
        shared.wait_with(held, fd);
    }

    /// Number of waiting messages.
    pub(crate) fn waiting(&self) -> usize {
        self.0.state.lock().waiting.len()
    }

    /// Waits until no message waits. Returns whether this happened within `limit`.
    pub(crate) fn flush(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut state = self.0.state.lock();
        while !state.waiting.is_empty() && !self.0.channel.is_lost() {
            if self.0.changed.wait_until(&mut state, until).timed_out() {
                return false;
            }
        }
        true
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.0.state.lock().is_closed = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn wait_with(&self, held: Held, fd: Option<BorrowedFd<'_>>) {
        let mut state = self.state.lock();
        self.is_behind.store(true, Ordering::Release);
        // A file's number is never used twice. If the supervisor has not got it yet, nothing needs
        // to be closed.
        if fd.is_none() && matches!((held, state.waiting.get(&held)), (Held::Open(_), Some(Some(_)))) {
            state.waiting.remove(&held);
        } else {
            let fd = fd.map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 0)).transpose();
            let has_room = state.waiting.len() < self.waiting_max || state.waiting.contains_key(&held);
            match fd {
                Ok(fd) if has_room => drop(state.waiting.insert(held, fd)),
                _ if !std::mem::replace(&mut state.has_lost, true) => tracing::error!(
                    "what is opened until the supervisor reads again is lost if this daemon dies: too \
                     much waits for it; let it go on (kill -CONT), or mount again"
                ),
                _ => {}
            }
        }
        self.changed.notify_all();
    }

    fn deliver(&self) {
        let (mut stuck, mut is_logged) = (None, false);
        let mut state = self.state.lock();
        while !state.is_closed {
            let Some(first) = state.waiting.first_entry() else {
                self.is_behind.store(false, Ordering::Release);
                self.changed.notify_all();
                self.changed.wait(&mut state);
                continue;
            };
            match self.channel.offer(*first.key(), first.get().as_ref().map(rustix::fd::AsFd::as_fd)) {
                Ok(true) => {
                    drop(first.remove());
                    stuck = None;
                    if std::mem::take(&mut is_logged) {
                        state.has_lost = false;
                        tracing::info!("the supervisor of this mount reads messages again");
                    }
                }
                Ok(false) => {
                    let stuck = stuck.get_or_insert_with(Instant::now);
                    if stuck.elapsed() > LOG_AFTER && !std::mem::replace(&mut is_logged, true) {
                        tracing::warn!(
                            "the supervisor of this mount reads nothing: descriptors of opened files wait for it"
                        );
                    }
                    self.changed.wait_for(&mut state, LOOK_INTERVAL);
                }
                Err(error) => {
                    state.waiting.clear();
                    self.lose(&error);
                }
            }
        }
    }

    fn lose(&self, error: &io::Error) {
        if self.channel.lose() {
            tracing::warn!(
                "the supervisor of this mount is gone ({error}): the mount continues, but dies with this daemon"
            );
        }
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::takeover::channel::Message;
    use rustix::fd::AsFd;

    #[test]
    fn what_finds_no_room_is_delivered_later_and_the_last_word_counts() {
        let (ours, theirs) = Channel::pair().unwrap();
        let outbox = Outbox::new(Arc::new(ours)).unwrap();
        let file = tempfile::tempfile().unwrap();
        // Until the socket is full, of files that are closed again, and of one node.
        let mut number = 0;
        while outbox.waiting() == 0 {
            number += 1;
            outbox.put(Held::Open(number), Some(file.as_fd()));
        }
        let begun = Instant::now();
        outbox.put(Held::Open(1), None);
        outbox.put(Held::Node(1), Some(file.as_fd()));
        outbox.put(Held::Node(1), None);
        for other in number + 1..number + 1000 {
            outbox.put(Held::Open(other), Some(file.as_fd()));
            outbox.put(Held::Open(other), None);
        }
        outbox.put(Held::Open(u64::MAX), Some(file.as_fd()));
        assert!(begun.elapsed() < Duration::from_secs(4), "nothing waits for who reads nothing");
        assert_eq!(outbox.waiting(), 4, "the one that found no room, two words of before, and the last");
        assert!(!outbox.flush(Duration::ZERO));
        let mut held = std::collections::BTreeSet::new();
        while !held.contains(&Held::Open(u64::MAX)) {
            match theirs.receive().unwrap().unwrap() {
                Message::Hold(name, _) => drop(held.insert(name)),
                Message::Release(name) => drop(held.remove(&name)),
                other => panic!("{other:?}"),
            }
        }
        assert!(outbox.flush(Duration::from_secs(30)));
        while let Some(Message::Release(name)) = theirs.receive_now().unwrap() {
            held.remove(&name);
        }
        assert!(!held.contains(&Held::Open(1)) && !held.contains(&Held::Node(1)), "both were let go of");
        assert_eq!(held.len() as u64, number, "each but the first, and the last");
    }
}
