//! A listening socket over TCP, in the file system, or for the machines of a host (vsock).
//!
//! A Unix socket's file is made with mode 0600. It replaces a file that a dead process left behind,
//! but never one that a process listens on, nor a file that is no socket. It is removed with the
//! listener.

use crate::address::vsock::VsockListener;
use crate::address::{Address, Stream};
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Connections that wait to be accepted: all those that a few borrowers open at once.
const BACKLOG: i32 = 128;

/// How long to wait for a process behind a socket file. The kernel answers at once unless the
/// process's queue is full.
const ALIVE_TIMEOUT: Duration = Duration::from_millis(200);

/// The reason why nothing listens.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // they say themselves what they are
pub enum Error {
    #[error("cannot listen on {address}: another program listens there; stop it or choose another address")]
    AddressInUse { address: Address },
    #[error("cannot listen on {address}: there is a file which is no socket; remove it or choose another path")]
    NotASocket { address: Address },
    #[error("cannot listen on {address}: {source}; check that the address is one of this machine and allowed")]
    Listen { address: Address, source: io::Error },
}

enum Socket {
    Tcp(TcpListener),
    Unix { socket: UnixListener, path: PathBuf, device: u64, inode: u64 },
    Vsock(VsockListener),
}

/// A listening socket. Accepting does not wait.
pub struct Listener {
    socket: Socket,
    address: Address,
}

impl Listener {
    /// Listens.
    ///
    /// # Errors
    /// Fails if it cannot listen.
    pub fn bind(address: &Address) -> Result<Listener, Error> {
        let bound = match address {
            Address::Tcp { host, port } => bind_tcp(host, *port),
            Address::Unix(path) => replace_stale(path, address)?,
            Address::Vsock { cid, port } => bind_vsock(*cid, *port),
        };
        bound.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => Error::AddressInUse { address: address.clone() },
            _ => Error::Listen { address: address.clone(), source },
        })
    }

    /// The address, with the port that the kernel chose.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Accepts a connection, tuned and in blocking mode.
    ///
    /// # Errors
    /// Returns `WouldBlock` if none waits, and the kernel's errors.
    pub fn accept(&self) -> io::Result<Stream> {
        let stream = match &self.socket {
            Socket::Tcp(socket) => Stream::Tcp(socket.accept()?.0),
            Socket::Unix { socket, .. } => Stream::Unix(socket.accept()?.0),
            Socket::Vsock(socket) => Stream::Vsock(socket.accept()?),
        };
        stream.set_nonblocking(false)?;
        stream.tune()?;
        Ok(stream)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Tcp(socket) => socket.as_fd(),
            Socket::Unix { socket, .. } => socket.as_fd(),
            Socket::Vsock(socket) => socket.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Socket::Unix { path, device, inode, .. } = &self.socket else { return };
        // Another process may have replaced the file.
        let ours = |file: std::fs::Metadata| file.dev() == *device && file.ino() == *inode;
        if std::fs::symlink_metadata(path).is_ok_and(ours) {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn bind_tcp(host: &str, port: u16) -> io::Result<Listener> {
    let socket = TcpListener::bind((host, port))?;
    socket.set_nonblocking(true)?;
    let address = Address::from(socket.local_addr()?);
    Ok(Listener { socket: Socket::Tcp(socket), address })
}

fn bind_vsock(cid: u32, port: u32) -> io::Result<Listener> {
    let socket = VsockListener::bind(cid, port, BACKLOG)?;
    let address = Address::Vsock { cid, port: socket.port() };
    Ok(Listener { socket: Socket::Vsock(socket), address })
}

/// Binds a Unix socket, after removing the file of a dead one.
fn replace_stale(path: &Path, address: &Address) -> Result<io::Result<Listener>, Error> {
    if let Ok(file) = std::fs::symlink_metadata(path) {
        if !file.file_type().is_socket() {
            return Err(Error::NotASocket { address: address.clone() });
        }
        match address.connect(ALIVE_TIMEOUT) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                if let Err(error) = std::fs::remove_file(path) {
                    return Ok(Err(error));
                }
            }
            // Accepted, or a full queue: a process listens. A socket without the right to connect
            // is not ours to remove.
            _ => return Err(Error::AddressInUse { address: address.clone() }),
        }
    }
    Ok(bind_unix(path))
}

fn bind_unix(path: &Path) -> io::Result<Listener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file inherits the mode of the socket, so that it is never open to others, not even for a
    // moment.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    let file = std::fs::symlink_metadata(path)?;
    let listener = Listener {
        socket: Socket::Unix { socket: socket.into(), path: path.to_owned(), device: file.dev(), inode: file.ino() },
        address: Address::Unix(path.to_owned()),
    };
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_file_of_a_unix_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let address = Address::Unix(path.clone());
        let listener = Listener::bind(&address).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(Listener::bind(&address), Err(Error::AddressInUse { .. })));
        drop(listener);
        assert!(!path.exists());

        // A file that a dead process left behind.
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let listener = Listener::bind(&address).unwrap();
        // A file that another process put there stays.
        std::fs::remove_file(&path).unwrap();
        let other = UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
        drop(other);

        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(Listener::bind(&address), Err(Error::NotASocket { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }

    /// If the kernel has no vsock, its error is returned with the address.
    #[test]
    fn a_vsock_port_is_taken_once() {
        match Listener::bind(&"vsock:0".parse().unwrap()) {
            Ok(first) => {
                assert!(matches!(first.address(), Address::Vsock { port: 1024.., .. }), "{}", first.address());
                assert!(matches!(Listener::bind(first.address()), Err(Error::AddressInUse { .. })));
            }
            Err(error) => {
                println!("this kernel has no vsock: {error}");
                assert!(error.to_string().contains("vsock:any:0"), "{error}");
            }
        }
    }

    #[test]
    fn a_taken_port_is_told() {
        let first = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let Err(error) = Listener::bind(first.address()) else { panic!("bound twice") };
        assert!(matches!(error, Error::AddressInUse { .. }), "{error}");
        let Err(error) = Listener::bind(&"192.0.2.1:0".parse().unwrap()) else { panic!("not our address") };
        assert!(matches!(error, Error::Listen { .. }), "{error}");
    }
}
