//! The address of a lender, and the stream to it.
//!
//! One [`Address`] type serves configuration, command line and messages. One [`Stream`] type covers
//! TCP, a Unix socket, and vsock between a virtual machine and its host. Both sides use it, and
//! need not distinguish them. Every stream that is made here sends small frames without delay, and
//! detects by itself that the peer's machine is gone ([`Stream::tune`]).
//!
//! Nothing here waits longer than its time limit, except for the system's resolver, which has its
//! own limit: a numeric address is never looked up.

pub mod vsock;

use rustix::net::sockopt;
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};
use vsock::{CID_ANY, VsockStream};

/// The maximum length of a Unix socket's path in bytes: `sun_path` has 108, one of them ends the
/// path.
pub const UNIX_PATH_BYTES_MAX: usize = 107;

/// Silence on a TCP connection in seconds after which the kernel begins to probe the peer's
/// machine.
const KEEPALIVE_IDLE_SECONDS: u64 = 10;
/// Time between two such probes, in seconds.
const KEEPALIVE_INTERVAL_SECONDS: u64 = 5;
/// Unanswered probes after which the connection is dead: 25 seconds after the last sign of life.
const KEEPALIVE_PROBES: u32 = 3;
/// Time in milliseconds that sent bytes may stay without acknowledgement: as long as keepalive
/// takes, which does not run while bytes are in flight.
const UNACKNOWLEDGED_MS: u32 = 25_000;

/// The address of a lender: `HOST:PORT`, `[IPV6]:PORT`, `unix:PATH` or `vsock:CID:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// A TCP port.
    Tcp {
        /// A name or a number, without brackets.
        host: String,
        /// The port; 0 lets the listener's kernel choose one.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
    /// A port of a virtual machine or its host.
    Vsock {
        /// The machine; 2 is the host of the connecting machine. [`vsock::CID_ANY`] only to listen.
        cid: u32,
        /// The port; 0 lets the listener's kernel choose one.
        port: u32,
    },
}

/// The reason why a text is no [`Address`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no address: {problem}; write HOST:PORT, [IPV6]:PORT, unix:PATH or vsock:CID:PORT")]
pub struct AddressError {
    text: String,
    problem: &'static str,
}

impl AddressError {
    /// The problem alone, for callers that describe the permitted kinds of addresses themselves.
    #[must_use]
    pub fn problem(&self) -> &'static str {
        self.problem
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        parse(text).map_err(|problem| AddressError { text: text.to_owned(), problem })
    }
}

fn parse(text: &str) -> Result<Address, &'static str> {
    if let Some(path) = text.strip_prefix("unix:") {
        return match path.len() {
            0 => Err("the socket's path is empty"),
            _ if path.contains('\0') => Err("the socket's path has a zero byte in it"),
            1..=UNIX_PATH_BYTES_MAX => Ok(Address::Unix(path.into())),
            _ => Err("a socket's path has at most 107 bytes"),
        };
    }
    if let Some(rest) = text.strip_prefix("vsock:") {
        return parse_vsock(rest);
    }
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once("]:").ok_or("`]:PORT` is missing")?;
            if host.contains('%') {
                return Err(
                    "an address of one link (`%`) cannot be written here: give the host a name, or another address",
                );
            }
            host.parse::<Ipv6Addr>().map_err(|_| "what the brackets hold is no IPv6 address")?;
            (host, port)
        }
        None => text.rsplit_once(':').ok_or("the port is missing")?,
    };
    if host.is_empty() {
        return Err("the host is missing (0.0.0.0 or [::] listens on all)");
    }
    if host.contains(':') && !text.starts_with('[') {
        return Err("an IPv6 address stands in brackets");
    }
    if host.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/') {
        return Err("the host has a character that no host has");
    }
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("the port is no number");
    }
    let port = port.parse().map_err(|_| "the port is not between 0 and 65535")?;
    Ok(Address::Tcp { host: host.to_owned(), port })
}

/// Parses `CID:PORT`, or, to listen on every CID of this machine, `any:PORT` or `PORT`.
fn parse_vsock(text: &str) -> Result<Address, &'static str> {
    let number = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => text.parse::<u32>().ok().filter(|number| *number != u32::MAX),
        false => None,
    };
    let (cid, port) = match text.split_once(':') {
        None | Some(("any", _)) => (CID_ANY, text.strip_prefix("any:").unwrap_or(text)),
        Some((cid, port)) => (number(cid).ok_or("the CID is no number (`any` listens on all)")?, port),
    };
    let port = number(port).ok_or("a vsock port is a number up to 4294967294")?;
    Ok(Address::Vsock { cid, port })
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Vsock { cid: CID_ANY, port } => write!(f, "vsock:any:{port}"),
            Address::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
        }
    }
}

/// Whether the address is valid only together with a network interface.
fn has_scope(address: &std::net::SocketAddr) -> bool {
    matches!(address, std::net::SocketAddr::V6(address) if address.scope_id() != 0)
}

impl From<std::net::SocketAddr> for Address {
    fn from(address: std::net::SocketAddr) -> Address {
        Address::Tcp { host: address.ip().to_string(), port: address.port() }
    }
}

impl Address {
    /// The same address, independent of the process's later working folder.
    ///
    /// # Errors
    /// Fails if there is no working folder, or the path is too long with it.
    pub fn absolute(self) -> io::Result<Address> {
        let Address::Unix(path) = self else { return Ok(self) };
        let path = std::path::absolute(path)?;
        if path.as_os_str().len() > UNIX_PATH_BYTES_MAX {
            let text =
                format!("unix:{}: with its folder the path has more than {UNIX_PATH_BYTES_MAX} bytes", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(Address::Unix(path))
    }

    /// Whether it is a name that has to be looked up ([`Address::resolve`]).
    pub fn is_name(&self) -> bool {
        matches!(self, Address::Tcp { host, .. } if host.parse::<IpAddr>().is_err())
    }

    /// Each present address of the name, as an address of its own. Numeric addresses, and those
    /// without a name, are returned unchanged. So is a name that cannot be looked up: connecting
    /// then returns the error. Waits for the system's resolver.
    pub fn resolve(&self) -> Vec<Address> {
        let Address::Tcp { host, port } = self else { return vec![self.clone()] };
        if !self.is_name() {
            return vec![self.clone()];
        }
        let mut all: Vec<Address> = Vec::new();
        let found = (host.as_str(), *port).to_socket_addrs().into_iter().flatten();
        // A link-local address is useless without its link: the name can be connected to.
        for found in found.filter(|found| !has_scope(found)).map(Address::from) {
            if !all.contains(&found) {
                all.push(found);
            }
        }
        if all.is_empty() { vec![self.clone()] } else { all }
    }

    /// Connects within `timeout`, trying each of the host's addresses in turn. The stream has no
    /// time limits set.
    ///
    /// # Errors
    /// Returns the errors of the last attempt, with the address in the text.
    pub fn connect(&self, timeout: Duration) -> io::Result<Stream> {
        let connected = match self {
            Address::Tcp { host, port } => connect_tcp(host, *port, timeout).map(Stream::Tcp),
            Address::Unix(path) => connect_unix(path, timeout).map(Stream::Unix),
            Address::Vsock { cid: CID_ANY, .. } => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "that is an address to listen on; write vsock:CID:PORT",
            )),
            Address::Vsock { cid, port } => VsockStream::connect(*cid, *port, timeout).map(Stream::Vsock),
        };
        let tuned = connected.and_then(|stream| stream.tune().map(|()| stream));
        tuned.map_err(|error| io::Error::new(error.kind(), format!("cannot connect to {self}: {error}")))
    }
}

fn connect_tcp(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let deadline = Instant::now() + timeout;
    let candidates: Vec<_> = match host.parse::<IpAddr>() {
        Ok(number) => vec![(number, port).into()],
        Err(_) => (host, port).to_socket_addrs()?.collect(),
    };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    let count = candidates.len();
    for (nth, candidate) in candidates.into_iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // A silent address leaves time for those after it.
        match TcpStream::connect_timeout(&candidate, left / (count - nth) as u32) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The standard library's connect to a Unix socket waits without limit while the listener's queue
/// is full; the kernel limits that wait by the socket's send timeout.
fn connect_unix(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
    connect(&socket, &SocketAddrUnix::new(path)?).map_err(|error| match error {
        rustix::io::Errno::AGAIN => io::ErrorKind::TimedOut.into(),
        other => io::Error::from(other),
    })?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, None)?;
    Ok(UnixStream::from(socket))
}

/// A connection over TCP, a Unix socket or vsock.
#[derive(Debug)]
#[allow(missing_docs)] // they say themselves what they are
pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Vsock(VsockStream),
}

macro_rules! on_each {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream {
            Stream::Tcp($inner) => $call,
            Stream::Unix($inner) => $call,
            Stream::Vsock($inner) => $call,
        }
    };
}

impl Stream {
    /// Switches off the delay of small frames, and makes the kernel end a connection whose peer's
    /// machine is gone. For streams that a listener accepted; [`Address::connect`] has done it.
    ///
    /// # Errors
    /// Returns the kernel's errors, if the connection is gone already.
    pub fn tune(&self) -> io::Result<()> {
        let Stream::Tcp(stream) = self else { return Ok(()) };
        stream.set_nodelay(true)?;
        sockopt::set_tcp_keepidle(stream, Duration::from_secs(KEEPALIVE_IDLE_SECONDS))?;
        sockopt::set_tcp_keepintvl(stream, Duration::from_secs(KEEPALIVE_INTERVAL_SECONDS))?;
        sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED_MS)?;
        Ok(())
    }

    /// A second handle of the same connection; time limits and [`Stream::shutdown`] are common to
    /// both.
    pub fn try_clone(&self) -> io::Result<Stream> {
        match self {
            Stream::Tcp(stream) => stream.try_clone().map(Stream::Tcp),
            Stream::Unix(stream) => stream.try_clone().map(Stream::Unix),
            Stream::Vsock(stream) => stream.try_clone().map(Stream::Vsock),
        }
    }

    /// The time limit of one read; `None`: no limit. A read that runs out of time fails with
    /// `WouldBlock`.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        on_each!(self, stream => stream.set_read_timeout(timeout))
    }

    /// The time limit of one write; `None`: no limit. A write that runs out of time fails with
    /// `WouldBlock`, and may have sent a part.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        on_each!(self, stream => stream.set_write_timeout(timeout))
    }

    /// Whether calls return `WouldBlock` instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        on_each!(self, stream => stream.set_nonblocking(nonblocking))
    }

    /// Ends the connection in one direction or both: reads and writes of it that wait in any thread
    /// return.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        on_each!(self, stream => stream.shutdown(how))
    }

    /// The peer's address, for messages.
    pub fn peer(&self) -> String {
        match self {
            Stream::Tcp(stream) => stream.peer_addr().map_or_else(|_| "tcp peer".into(), |peer| peer.to_string()),
            Stream::Unix(_) => "unix peer".into(),
            Stream::Vsock(stream) => {
                stream.peer().map_or_else(|| "vsock peer".into(), |(cid, port)| format!("vsock:{cid}:{port}"))
            }
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        on_each!(self, stream => stream.as_fd())
    }
}

impl Read for &Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        on_each!(self, stream => { let mut stream = stream; stream.read(buffer) })
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        on_each!(self, stream => { let mut stream = stream; stream.read_vectored(buffers) })
    }
}

impl Write for &Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        on_each!(self, stream => { let mut stream = stream; stream.write(buffer) })
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        on_each!(self, stream => { let mut stream = stream; stream.write_vectored(buffers) })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buffer)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&*self).read_vectored(buffers)
    }
}

impl Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        (&*self).write(buffer)
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        (&*self).write_vectored(buffers)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    #[test]
    fn what_is_shown_is_read_back() {
        for text in [
            "a.example:7000",
            "10.0.0.1:0",
            "[::1]:65535",
            "unix:/run/puma.sock",
            "unix:relative:7",
            "vsock:2:7000",
            "vsock:any:0",
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(text.parse::<Address>().unwrap(), address);
        }
    }

    #[test]
    fn a_vsock_port_alone_is_one_to_listen_on() {
        let address: Address = "vsock:7000".parse().unwrap();
        assert_eq!(address, Address::Vsock { cid: CID_ANY, port: 7000 });
        assert_eq!(address.to_string(), "vsock:any:7000");
        let error = address.connect(Duration::from_secs(1)).unwrap_err();
        assert!(error.to_string().contains("vsock:CID:PORT"), "{error}");
    }

    #[test]
    fn a_name_is_each_of_its_addresses() {
        for number in ["127.0.0.1:7", "[::1]:7", "unix:/run/socket", "vsock:2:7"] {
            let address: Address = number.parse().unwrap();
            assert_eq!(address.resolve(), vec![address.clone()]);
        }
        let all = "localhost:7".parse::<Address>().unwrap().resolve();
        let known = ["127.0.0.1:7", "[::1]:7"].map(|text| text.parse::<Address>().unwrap());
        assert!(!all.is_empty() && all.iter().all(|one| known.contains(one)), "{all:?}");
        let unknown: Address = "no-such-host.invalid:7".parse().unwrap();
        assert_eq!(unknown.resolve(), vec![unknown.clone()]);
    }

    #[test]
    fn an_address_of_one_link_is_told() {
        let with_scope = |scope| std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 7000, 0, scope).into();
        assert!(has_scope(&with_scope(2)) && !has_scope(&with_scope(0)));
        assert!(!has_scope(&"192.0.2.1:7000".parse().unwrap()));
    }

    #[test]
    fn mistakes_are_named() {
        let long = format!("unix:/{}", "x".repeat(UNIX_PATH_BYTES_MAX));
        for (text, problem) in [
            ("", "port is missing"),
            ("host", "port is missing"),
            (":7000", "host is missing"),
            ("host:", "65535"),
            ("host:65536", "65535"),
            ("host:+7", "no number"),
            ("::1:7000", "brackets"),
            ("[::1]", "]:PORT"),
            ("[host]:7", "no IPv6"),
            ("[fe80::1%eth0]:7", "one link"),
            ("ho st:7", "character"),
            ("unix:", "empty"),
            (&long, "107"),
            ("vsock:", "vsock port"),
            ("vsock:2:", "vsock port"),
            ("vsock:2:-1", "vsock port"),
            ("vsock:2:4294967295", "vsock port"),
            ("vsock:any", "vsock port"),
            ("vsock::7", "CID"),
            ("vsock:all:7", "CID"),
            ("vsock:4294967295:7", "CID"),
            ("vsock:1:2:3", "vsock port"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(problem), "{text:?}: {error}");
        }
    }

    #[test]
    fn both_kinds_connect_and_carry_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let unix = UnixListener::bind(&path).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::from(tcp.local_addr().unwrap());
        let far_ends = std::thread::spawn(move || {
            let accept_tcp = || Stream::Tcp(tcp.accept().unwrap().0);
            let accept_unix = || Stream::Unix(unix.accept().unwrap().0);
            for accept in [&accept_tcp as &dyn Fn() -> Stream, &accept_unix] {
                let mut stream = accept();
                stream.tune().unwrap();
                let mut word = [0; 4];
                stream.read_exact(&mut word).unwrap();
                stream.write_all(&word).unwrap();
            }
        });
        for address in [address, Address::Unix(path)] {
            let mut stream = address.connect(Duration::from_secs(5)).unwrap();
            stream.write_all(b"word").unwrap();
            let mut answer = [0; 4];
            stream.try_clone().unwrap().read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"word");
        }
        far_ends.join().unwrap();
    }

    #[test]
    fn a_full_queue_does_not_hold_the_caller() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap(); // shorten the queue
        let address = Address::Unix(path);
        let mut waiting = Vec::new();
        let error = loop {
            match address.connect(Duration::from_millis(50)) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
            assert!(waiting.len() < 10_000);
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    }

    #[test]
    fn nobody_there_is_an_error_with_the_address() {
        let error = Address::Unix("/nonexistent/socket".into()).connect(Duration::from_secs(1)).unwrap_err();
        assert!(error.to_string().contains("unix:/nonexistent/socket"), "{error}");
    }
}
