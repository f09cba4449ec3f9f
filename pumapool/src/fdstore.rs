//! Descriptors of a mount in the keeping of systemd, so that it survives its keeper, too: `FDSTORE=1` stores them, and a service that is
//! started again finds them in `LISTEN_FDS`, by their names.
//!
//! Only where the service manager says that it stores any (`FDSTORE`, systemd 254 and newer). Each is stored under a name that says what
//! it is held for. What cannot be stored is held by the keeper all the same.

use mount::handover::channel::Held;
use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sendmsg_addr, socket_with,
};
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// How long the service manager may leave its socket full: less than the daemon gives us.
const SEND_LIMIT: Duration = Duration::from_secs(2);

/// The first descriptor that a service manager passes.
const FIRST: i32 = 3;

/// The service manager's store.
pub struct Store {
    socket: Option<(OwnedFd, SocketAddrUnix)>,
    stored: usize,
    max: usize,
}

impl Store {
    /// The store, if there is one; `held` came out of it.
    pub fn new(held: &BTreeMap<Held, OwnedFd>) -> Store {
        let max = std::env::var("FDSTORE").ok().and_then(|max| max.parse().ok()).unwrap_or(0);
        Store { socket: if max > 0 { connect() } else { None }, stored: held.len(), max }
    }

    /// Stores one more.
    pub fn add(&mut self, held: Held, fd: BorrowedFd<'_>) {
        if self.socket.is_none() {
            return;
        }
        self.stored += 1;
        if self.stored == self.max + 1 {
            tracing::warn!(
                "the service manager stores {} descriptors and no more: set FileDescriptorStoreMax higher, or the mount may not survive its keeper",
                self.max
            );
        }
        if self.stored <= self.max {
            self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={}", name(held)), Some(fd));
        }
    }

    /// It need not be stored any more.
    pub fn remove(&mut self, held: Held) {
        if self.socket.is_some() {
            self.stored = self.stored.saturating_sub(1);
            self.send(&format!("FDSTOREREMOVE=1\nFDNAME={}", name(held)), None);
        }
    }

    /// The mount has ended: nothing need be stored.
    pub fn clear<'a>(&mut self, all: impl Iterator<Item = &'a Held>) {
        all.for_each(|held| self.remove(*held));
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
            tracing::warn!("the service manager does not listen ({error}): the mount may not survive its keeper");
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

fn name(held: Held) -> String {
    match held {
        Held::State => "puma-state".into(),
        Held::Source => "puma-source".into(),
        Held::Device(index) => format!("puma-device-{index}"),
        Held::Open(handle) => format!("puma-open-{handle}"),
        Held::Node(node) => format!("puma-node-{node}"),
    }
}

fn held(name: &str) -> Option<Held> {
    let number = |prefix: &str| name.strip_prefix(prefix)?.parse().ok();
    match name {
        "puma-state" => Some(Held::State),
        "puma-source" => Some(Held::Source),
        _ => number("puma-device-")
            .map(Held::Device)
            .or_else(|| number("puma-open-").map(Held::Open))
            .or_else(|| number("puma-node-").map(Held::Node)),
    }
}

/// What the service manager has kept of a mount whose keeper is gone. To be called once, before anything is opened.
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
        // SAFETY: the service manager has opened these for us, says so by LISTEN_PID, and nothing else was opened yet.
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

    #[test]
    fn names_lead_back() {
        for one in [Held::State, Held::Source, Held::Device(0), Held::Open(u64::MAX), Held::Node(7)] {
            assert_eq!(held(&name(one)), Some(one));
        }
        assert_eq!(held("stored"), None);
        assert_eq!(held("puma-open-x"), None);
    }
}
