//! The channel between a daemon and its supervisor: a pair of sockets. The daemon sends descriptors
//! to be held, and a successor gets them back.
//!
//! A message that was sent is safe in the socket, even if the sender dies, so it needs no answer.
//! Each message is one datagram of a sequenced-packet socket: kind, number, text, and at most one
//! descriptor.
//!
//! A daemon must never wait for its supervisor without a limit. A blocking message fails after some
//! seconds (`SEND_SECONDS_MAX`). Descriptors to be held are sent without blocking, and wait in the
//! `outbox`.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::{
    Timeout, set_socket_send_buffer_size, set_socket_send_buffer_size_force, set_socket_timeout,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Time limit for the other side to read from a full socket, in seconds.
const SEND_SECONDS_MAX: u64 = 5;
/// Size of the socket's buffer, in bytes. The kernel accounts some 800 for each message.
const BUFFER_BYTES: usize = 4 << 20;
/// Longest text: a path, and words around it.
const TEXT_BYTES_MAX: usize = 8192;
const HEAD_BYTES: usize = 16;

/// The purpose of a held descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Held {
    /// The state memory.
    State,
    /// The backing directory.
    Source,
    /// The connection to the kernel (0), and the workers' own descriptors of it.
    Device(u64),
    /// An open file or directory, by its handle.
    Open(u64),
    /// A node that cannot be found again in another way.
    Node(u64),
}

impl Held {
    fn code(self) -> (u32, u64) {
        match self {
            Held::State => (1, 0),
            Held::Source => (2, 0),
            Held::Device(index) => (3, index),
            Held::Open(handle) => (4, handle),
            Held::Node(node) => (5, node),
        }
    }

    fn from_code(code: u32, number: u64) -> Option<Held> {
        Some(match code {
            1 => Held::State,
            2 => Held::Source,
            3 => Held::Device(number),
            4 => Held::Open(number),
            5 => Held::Node(number),
            _ => return None,
        })
    }
}

/// A message.
#[derive(Debug)]
pub enum Message {
    /// To the supervisor: hold this descriptor. To a successor: this descriptor was held.
    Hold(Held, OwnedFd),
    /// To the supervisor: close the descriptor that is held for this purpose.
    Release(Held),
    /// To a successor: all descriptors were sent.
    AllSent,
    /// To the supervisor: the daemon serves. The text is for the process that waits for the mount.
    Ready(String),
    /// To the supervisor: the daemon is about to end, and this program takes over. The client that
    /// asked for this gets the result on the descriptor.
    Upgrade(String, Option<OwnedFd>),
    /// To the daemon: end in order, as this signal demands.
    Stop(i32),
    /// To the daemon: read the configuration again, and answer with [`Message::Configured`].
    Reload,
    /// To the supervisor: this configuration is in use, a file with its text. Successors begin with
    /// it.
    Configured(OwnedFd),
    /// To the daemon: answer with the same message. To the supervisor: the daemon is alive.
    Alive,
}

const RELEASE: u32 = 16;
const ALL_SENT: u32 = 32;
const READY: u32 = 33;
const UPGRADE: u32 = 34;
const STOP: u32 = 35;
const RELOAD: u32 = 36;
const CONFIGURED: u32 = 37;
const ALIVE: u32 = 38;

/// One end of the channel.
pub struct Channel {
    socket: OwnedFd,
    lost: AtomicBool,
}

impl Channel {
    /// Both ends.
    ///
    /// # Errors
    /// Fails if no socket can be created.
    pub fn pair() -> io::Result<(Channel, Channel)> {
        let (one, two) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Channel::new(one), Channel::new(two)))
    }

    /// Creates an end from an inherited socket.
    pub fn new(socket: OwnedFd) -> Channel {
        if set_socket_send_buffer_size_force(&socket, BUFFER_BYTES).is_err() {
            let _ = set_socket_send_buffer_size(&socket, BUFFER_BYTES); // As far as an ordinary user may.
        }
        let _ = set_socket_timeout(&socket, Timeout::Send, Some(Duration::from_secs(SEND_SECONDS_MAX)));
        Channel { socket, lost: AtomicBool::new(false) }
    }

    /// Its descriptor, to wait on or to pass on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether the other side was found to be gone or stuck; nothing is sent any more then.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Records that the other side is gone. Returns whether this was not recorded before.
    pub fn lose(&self) -> bool {
        !self.lost.swap(true, Ordering::Relaxed)
    }

    /// Sends one message.
    ///
    /// # Errors
    /// Fails if the other side is gone, or has not read within the time limit.
    pub fn send(&self, message: &Message) -> io::Result<()> {
        let (kind, number, text, fd) = match message {
            Message::Hold(held, fd) => return self.hold(*held, fd.as_fd()),
            Message::Release(held) => (RELEASE + held.code().0, held.code().1, "", None),
            Message::AllSent => (ALL_SENT, 0, "", None),
            Message::Ready(text) => (READY, 0, text.as_str(), None),
            Message::Upgrade(text, fd) => (UPGRADE, 0, text.as_str(), fd.as_ref().map(AsFd::as_fd)),
            Message::Stop(signal) => (STOP, *signal as u64, "", None),
            Message::Reload => (RELOAD, 0, "", None),
            Message::Configured(fd) => (CONFIGURED, 0, "", Some(fd.as_fd())),
            Message::Alive => (ALIVE, 0, "", None),
        };
        self.send_parts(kind, number, text, fd, SendFlags::NOSIGNAL)
    }

    /// Sends [`Message::Alive`] if the socket has room. Returns whether it had.
    ///
    /// # Errors
    /// When the other side is gone.
    pub fn offer_alive(&self) -> io::Result<bool> {
        self.offer_parts(ALIVE, 0, None)
    }

    /// Has the supervisor hold a descriptor (or with `None`: close it), if the socket has room.
    /// Returns whether it had.
    ///
    /// # Errors
    /// When the other side is gone.
    pub(crate) fn offer(&self, held: Held, fd: Option<BorrowedFd<'_>>) -> io::Result<bool> {
        let (kind, number) = held.code();
        self.offer_parts(if fd.is_some() { kind } else { RELEASE + kind }, number, fd)
    }

    fn offer_parts(&self, kind: u32, number: u64, fd: Option<BorrowedFd<'_>>) -> io::Result<bool> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match self.send_parts(kind, number, "", fd, flags).map_err(|error| (error.raw_os_error(), error)) {
            Ok(()) => Ok(true),
            // The socket is full, or too many descriptors of this user are under way.
            Err((Some(libc::EAGAIN | libc::ETOOMANYREFS | libc::ENOBUFS | libc::ENOMEM), _)) => Ok(false),
            Err((_, error)) => Err(error),
        }
    }

    /// Has the supervisor hold a duplicate of the descriptor.
    ///
    /// # Errors
    /// As for [`Channel::send`].
    pub fn hold(&self, held: Held, fd: BorrowedFd<'_>) -> io::Result<()> {
        let (kind, number) = held.code();
        self.send_parts(kind, number, "", Some(fd), SendFlags::NOSIGNAL)
    }

    fn send_parts(
        &self,
        kind: u32,
        number: u64,
        text: &str,
        fd: Option<BorrowedFd<'_>>,
        flags: SendFlags,
    ) -> io::Result<()> {
        if self.is_lost() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let mut head = [0; HEAD_BYTES];
        head[..4].copy_from_slice(&kind.to_ne_bytes());
        head[8..].copy_from_slice(&number.to_ne_bytes());
        let text = &text.as_bytes()[..text.len().min(TEXT_BYTES_MAX)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = fd.map(|fd| [fd]);
        if let Some(fds) = &fds {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        loop {
            match sendmsg(&self.socket, &[IoSlice::new(&head), IoSlice::new(text)], &mut ancillary, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Waits for the next message. Returns `None` if the other side is gone.
    ///
    /// # Errors
    /// Fails if there was no room for a received descriptor, or if the message is invalid. The next
    /// message can still be read.
    pub fn receive(&self) -> io::Result<Option<Message>> {
        self.receive_with(RecvFlags::CMSG_CLOEXEC)
    }

    #[cfg(test)]
    pub(crate) fn receive_now(&self) -> io::Result<Option<Message>> {
        match self.receive_with(RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            received => received,
        }
    }

    fn receive_with(&self, flags: RecvFlags) -> io::Result<Option<Message>> {
        let mut head = [0; HEAD_BYTES];
        let mut text = [0; TEXT_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut parts = [IoSliceMut::new(&mut head), IoSliceMut::new(&mut text)];
            match recvmsg(&self.socket, &mut parts, &mut ancillary, flags) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        };
        let mut fd = None;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                fd = fds.next();
            }
        }
        if received.bytes == 0 {
            return Ok(None);
        }
        let word = |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (kind, number) = (word(0), u64::from(word(8)) | u64::from(word(12)) << 32);
        let text = || String::from_utf8_lossy(&text[..received.bytes.saturating_sub(HEAD_BYTES)]).into_owned();
        let message = match (kind, fd) {
            (RELEASE.., _) if Held::from_code(kind - RELEASE, number).is_some() => {
                Held::from_code(kind - RELEASE, number).map(Message::Release)
            }
            (ALL_SENT, _) => Some(Message::AllSent),
            (READY, _) => Some(Message::Ready(text())),
            (UPGRADE, fd) => Some(Message::Upgrade(text(), fd)),
            (STOP, _) => Some(Message::Stop(number as i32)),
            (RELOAD, _) => Some(Message::Reload),
            (CONFIGURED, fd) => fd.map(Message::Configured),
            (ALIVE, _) => Some(Message::Alive),
            (kind, Some(fd)) => Held::from_code(kind, number).map(|held| Message::Hold(held, fd)),
            (kind, None) if Held::from_code(kind, number).is_some() => {
                return Err(io::Error::other("a descriptor to be kept found no room; raise the limit of open files"));
            }
            _ => None,
        };
        message.map(Some).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a message that means nothing"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_outlives_its_sender() {
        let (daemon, supervisor) = Channel::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        for handle in 0..1000 {
            daemon.hold(Held::Open(handle), file.as_fd()).unwrap();
        }
        daemon.send(&Message::Release(Held::Open(7))).unwrap();
        daemon.send(&Message::Ready("of use".into())).unwrap();
        daemon.send(&Message::Upgrade("/a/program".into(), None)).unwrap();
        drop(daemon);
        for handle in 0..1000 {
            let Some(Message::Hold(held, _fd)) = supervisor.receive().unwrap() else { panic!() };
            assert_eq!(held, Held::Open(handle));
        }
        assert!(matches!(supervisor.receive().unwrap(), Some(Message::Release(Held::Open(7)))));
        assert!(matches!(supervisor.receive().unwrap(), Some(Message::Ready(text)) if text == "of use"));
        assert!(matches!(supervisor.receive().unwrap(), Some(Message::Upgrade(path, None)) if path == "/a/program"));
        assert!(supervisor.receive().unwrap().is_none());
        assert!(supervisor.send(&Message::AllSent).is_err());
    }
}
