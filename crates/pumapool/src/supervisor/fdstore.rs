//! Stores descriptors of a mount in systemd, so that the mount survives its supervisor, too.
//! `FDSTORE=1` stores them, and a restarted service finds them in `LISTEN_FDS`, by their names.
//!
//! This is done only if the service manager offers it (`FDSTORE`, systemd 254 and newer). The name
//! of a stored descriptor has its purpose. The supervisor also holds descriptors that cannot be
//! stored.

use mount::handover::channel::Held;
use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sendmsg_addr, socket_with,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// Time limit for the service manager to read from a full socket; shorter than the daemon's limit
/// for the supervisor.
const SEND_LIMIT: Duration = Duration::from_secs(2);

/// The first descriptor that a service manager passes.
const FIRST: i32 = 3;

/// Bytes that the names of all that is stored may take, with a colon behind each: the service
/// manager passes them in one variable of the environment, of which Linux takes 128 KiB
/// (MAX_ARG_STRLEN), with the variable's name and a zero. Beyond that no program can be started.
const NAMES_BYTES_MAX: usize = (128 << 10) - "LISTEN_FDNAMES=".len() - 1;

/// The service manager's store.
pub struct Store {
    socket: Option<(OwnedFd, SocketAddrUnix)>,
    stored: BTreeSet<Held>,
    names_bytes: usize,
    max: usize,
    has_warned: bool,
}

impl Store {
    /// The store, if there is one; `held` came out of it.
    pub fn new(held: &BTreeMap<Held, OwnedFd>) -> Store {
        let max = std::env::var("FDSTORE").ok().and_then(|max| max.parse().ok()).unwrap_or(0);
        Store::at(if max > 0 { connect() } else { None }, max, held.keys().copied().collect())
    }

    fn at(socket: Option<(OwnedFd, SocketAddrUnix)>, max: usize, stored: BTreeSet<Held>) -> Store {
        let names_bytes = stored.iter().map(|held| name_bytes(*held)).sum();
        Store { socket, stored, names_bytes, max, has_warned: false }
    }

    /// Stores a descriptor.
    pub fn add(&mut self, held: Held, fd: BorrowedFd<'_>) {
        if self.socket.is_none() {
            return;
        }
        let names_bytes = self.names_bytes + name_bytes(held);
        if self.stored.len() < self.max && names_bytes <= NAMES_BYTES_MAX {
            self.stored.insert(held);
            self.names_bytes = names_bytes;
            self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={}", name(held)), Some(fd));
        } else if !std::mem::replace(&mut self.has_warned, true) {
            let why = if self.stored.len() < self.max {
                "as many as it can pass on, by their names".to_owned()
            } else {
                format!("which is the limit that it has: set FileDescriptorStoreMax higher than {}", self.max)
            };
            tracing::warn!(
                "the service manager stores {} descriptors, {why}; what is opened beyond may be lost with the supervisor",
                self.stored.len()
            );
        }
    }

    /// Removes a descriptor from the store.
    pub fn remove(&mut self, held: Held) {
        if self.stored.remove(&held) {
            self.names_bytes -= name_bytes(held);
            self.send(&format!("FDSTOREREMOVE=1\nFDNAME={}", name(held)), None);
        }
    }

    /// The mount ends: removes all descriptors, and stores none from now on.
    pub fn close(&mut self) {
        while let Some(held) = self.stored.first().copied() {
            self.remove(held);
        }
        self.socket = None;
    }

    fn send(&mut self, text: &str, fd: Option<BorrowedFd<'_>>) {
        let Some((socket, address)) = &self.socket else { return };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let text = [IoSlice::new(text.as_bytes())];
        if let Err(error) = sendmsg_addr(socket, address, &text, &mut ancillary, SendFlags::NOSIGNAL) {
            tracing::warn!(
                "the service manager does not read its socket ({error}): the mount may not survive its supervisor"
            );
            self.socket = None;
        }
    }
}

fn connect() -> Option<(OwnedFd, SocketAddrUnix)> {
    let path = std::env::var_os("NOTIFY_SOCKET")?;
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name).ok()?,
        path => SocketAddrUnix::new(path).ok()?,
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    set_socket_timeout(&socket, Timeout::Send, Some(SEND_LIMIT)).ok()?;
    Some((socket, address))
}

/// Short, as there is little room for all of them.
fn name(held: Held) -> String {
    match held {
        Held::State => "puma".into(),
        Held::Source => "s".into(),
        Held::Device(index) => format!("d{index:x}"),
        Held::Open(handle) => format!("o{handle:x}"),
        Held::Node(node) => format!("n{node:x}"),
    }
}

fn name_bytes(held: Held) -> usize {
    name(held).len() + 1
}

fn held(name: &str) -> Option<Held> {
    let number = |prefix: char| u64::from_str_radix(name.strip_prefix(prefix)?, 16).ok();
    match name {
        "puma" => Some(Held::State),
        "s" => Some(Held::Source),
        _ => number('d')
            .map(Held::Device)
            .or_else(|| number('o').map(Held::Open))
            .or_else(|| number('n').map(Held::Node)),
    }
}

/// The descriptors that the service manager has stored for a mount whose supervisor is gone. Must
/// be called once, before anything is opened.
pub fn inherited() -> BTreeMap<Held, OwnedFd> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    if variable("LISTEN_PID").parse() != Ok(std::process::id()) {
        return BTreeMap::new();
    }
    let count: i32 = variable("LISTEN_FDS").parse().unwrap_or(0);
    let names = variable("LISTEN_FDNAMES");
    let names = names.split(':').map(held);
    let mut all = BTreeMap::new();
    for (fd, held) in (FIRST..FIRST.saturating_add(count)).zip(names) {
        // SAFETY: the service manager has opened these for us, says so by LISTEN_PID, and nothing
        // else was opened yet.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let _ = rustix::io::fcntl_setfd(fd.as_fd(), rustix::io::FdFlags::CLOEXEC);
        if let Some(held) = held {
            all.insert(held, fd);
        }
    }
    if all.contains_key(&Held::State) { all } else { BTreeMap::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn names_lead_back() {
        for one in [Held::State, Held::Source, Held::Device(0), Held::Open(u64::MAX), Held::Node(7)] {
            assert_eq!(held(&name(one)), Some(one));
        }
        assert_eq!(held("stored"), None);
        assert_eq!(held("ox"), None);
    }

    #[test]
    fn what_is_stored_can_be_passed_on() {
        let scratch = testbed::Scratch::new("what_is_stored_can_be_passed_on").unwrap();
        let path = scratch.path().join("manager");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_nonblocking(true).unwrap();
        let names = parking_lot::Mutex::new(BTreeSet::new());
        let look = || {
            let (mut names, mut bytes) = (names.lock(), [0; 256]);
            while let Ok(length) = manager.recv(&mut bytes) {
                let text = std::str::from_utf8(&bytes[..length]).unwrap();
                let name = text.rsplit('=').next().unwrap().to_owned();
                let is_removal = text.starts_with("FDSTOREREMOVE=1");
                assert!(if is_removal { names.remove(&name) } else { names.insert(name) }, "{text}");
            }
        };
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).unwrap();
        let mut store = Store::at(Some((socket, SocketAddrUnix::new(&path).unwrap())), usize::MAX, BTreeSet::new());
        // The longest names.
        let all: Vec<_> =
            [Held::State].into_iter().chain((0..10_000).map(|index| Held::Open(u64::MAX - index))).collect();
        for one in &all {
            store.add(*one, manager.as_fd());
            look();
        }
        let stored = names.lock().clone();
        assert!(stored.len() > 7_000 && stored.len() < all.len() && stored.contains("puma"), "{}", stored.len());
        // Those that there are: what the unit has systemd store.
        assert!(name_bytes(Held::Open(1 << 20)) * 16_000 <= NAMES_BYTES_MAX);
        let joined = stored.iter().map(String::as_str).collect::<Vec<_>>().join(":");
        let started = std::process::Command::new("true").env("LISTEN_FDNAMES", &joined).status();
        assert!(started.is_ok_and(|status| status.success()));
        let too_much = format!("{joined}:{joined}");
        assert!(std::process::Command::new("true").env("LISTEN_FDNAMES", too_much).status().is_err());
        // Room is made again, and in the end nothing is left.
        let last = all[all.len() - 1];
        store.remove(all[1]);
        store.add(last, manager.as_fd());
        look();
        assert!(names.lock().contains(&name(last)) && !names.lock().contains(&name(all[1])));
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| store.close());
            while !closing.is_finished() {
                look();
            }
        });
        look();
        assert!(names.lock().is_empty());
    }
}
