//! Sockets between a virtual machine and its host (AF_VSOCK, vsock(7)): addresses and streams, for
//! which neither the standard library nor rustix has types.
//!
//! A machine has a number (CID) instead of an IP address. There are no names, and no delays to
//! switch off. Data for a machine that is gone soon causes an error, because its kernel or its
//! hypervisor reports this.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{AddressFamily, SocketAddrAny, SocketFlags, SocketType, sockopt};
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// The CID of every machine: to listen on any CID of this machine (VMADDR_CID_ANY).
pub const CID_ANY: u32 = u32::MAX;
/// This machine (VMADDR_CID_LOCAL).
pub const CID_LOCAL: u32 = 1;
/// Makes the kernel choose a port (VMADDR_PORT_ANY).
const PORT_ANY: u32 = u32::MAX;

/// `struct sockaddr_vm` of linux/vm_sockets.h.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SocketAddressVm {
    family: u16,
    reserved: u16,
    port: u32,
    cid: u32,
    flags: u8,
    zero: [u8; 3],
}

impl SocketAddressVm {
    fn new(cid: u32, port: u32) -> SocketAddressVm {
        SocketAddressVm { family: AddressFamily::VSOCK.as_raw(), reserved: 0, port, cid, flags: 0, zero: [0; 3] }
    }

    /// `None` if it is of another family.
    fn from_any(address: &SocketAddrAny) -> Option<SocketAddressVm> {
        let fits = address.addr_len() as usize >= size_of::<SocketAddressVm>();
        (fits && address.address_family() == AddressFamily::VSOCK).then(|| {
            // SAFETY: an address of this family with this many bytes is a sockaddr_vm; every bit
            // pattern is valid.
            unsafe { address.as_ptr().cast::<SocketAddressVm>().read_unaligned() }
        })
    }
}

// SAFETY: the closure gets a pointer to a whole sockaddr_vm with its length, valid for the call.
unsafe impl SocketAddrArg for SocketAddressVm {
    unsafe fn with_sockaddr<R>(&self, f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R) -> R {
        f((&raw const *self).cast(), size_of::<SocketAddressVm>() as SocketAddrLen)
    }
}

/// A connection.
pub struct VsockStream(OwnedFd);

impl VsockStream {
    /// Connects within `timeout`; the kernel itself gives up after 2 seconds.
    ///
    /// # Errors
    /// Returns the kernel's errors; `TimedOut`.
    pub fn connect(cid: u32, port: u32, timeout: Duration) -> io::Result<VsockStream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::VSOCK, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &SocketAddressVm::new(cid, port)) {
            Ok(()) => {}
            Err(Errno::INPROGRESS) => {
                wait_writable(&socket, timeout)?;
                sockopt::socket_error(&socket)??;
            }
            Err(errno) => return Err(errno.into()),
        }
        let stream = VsockStream(socket);
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    /// A second handle of the same connection.
    pub fn try_clone(&self) -> io::Result<VsockStream> {
        self.0.try_clone().map(VsockStream)
    }

    /// The time limit of one read.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_timeout(sockopt::Timeout::Recv, timeout)
    }

    /// The time limit of one write.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set_timeout(sockopt::Timeout::Send, timeout)
    }

    fn set_timeout(&self, which: sockopt::Timeout, timeout: Option<Duration>) -> io::Result<()> {
        // An error, as with the standard library's streams: to the kernel, 0 means no limit.
        if timeout.is_some_and(|timeout| timeout.is_zero()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(sockopt::set_socket_timeout(&self.0, which, timeout)?)
    }

    /// Whether calls return `WouldBlock` instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(&self.0, nonblocking)?)
    }

    /// Ends the connection in one direction or both.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let how = match how {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        Ok(rustix::net::shutdown(&self.0, how)?)
    }

    /// The CID and port of the other end.
    pub fn peer(&self) -> Option<(u32, u32)> {
        let address = SocketAddressVm::from_any(&rustix::net::getpeername(&self.0).ok()??)?;
        Some((address.cid, address.port))
    }
}

impl Read for &VsockStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.0, buffer)?)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(rustix::io::readv(&self.0, buffers)?)
    }
}

impl Write for &VsockStream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(&self.0, buffer)?)
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(rustix::io::writev(&self.0, buffers)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for VsockStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl fmt::Debug for VsockStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VsockStream").field("fd", &self.0).field("peer", &self.peer()).finish()
    }
}

/// A listening socket. Accepting does not wait.
pub struct VsockListener {
    socket: OwnedFd,
    port: u32,
}

impl VsockListener {
    /// Listens. With port 0 the kernel chooses one, from 1024 on (lower ones are for root).
    ///
    /// # Errors
    /// Returns the kernel's errors.
    pub fn bind(cid: u32, port: u32, backlog: i32) -> io::Result<VsockListener> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::VSOCK, SocketType::STREAM, flags, None)?;
        let wanted = if port == 0 { PORT_ANY } else { port };
        rustix::net::bind(&socket, &SocketAddressVm::new(cid, wanted))?;
        rustix::net::listen(&socket, backlog)?;
        let bound = SocketAddressVm::from_any(&rustix::net::getsockname(&socket)?).ok_or(io::ErrorKind::InvalidData)?;
        Ok(VsockListener { socket, port: bound.port })
    }

    /// The port, also if the kernel chose it.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// A connection; `WouldBlock` if none waits.
    ///
    /// # Errors
    /// Returns the kernel's errors.
    pub fn accept(&self) -> io::Result<VsockStream> {
        Ok(VsockStream(rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC)?))
    }
}

impl AsFd for VsockListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn wait_writable(socket: &OwnedFd, timeout: Duration) -> io::Result<()> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::{Address, Stream};

    /// Kernels without vsock, or without its loopback (CONFIG_VSOCKETS_LOOPBACK), return an error:
    /// then the test checks the error.
    #[test]
    fn a_machine_reaches_itself_or_is_told_why_not() {
        let listener = match VsockListener::bind(CID_ANY, 0, 8) {
            Ok(listener) => listener,
            Err(error) => {
                println!("this kernel has no vsock: {error}");
                assert_eq!(error.raw_os_error(), Some(Errno::AFNOSUPPORT.raw_os_error()), "{error}");
                return;
            }
        };
        assert!(listener.port() >= 1024 && listener.port() != PORT_ANY, "{}", listener.port());
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let address = Address::Vsock { cid: CID_LOCAL, port: listener.port() };
        let mut near = match address.connect(Duration::from_millis(500)) {
            Ok(stream) => stream,
            Err(error) => {
                println!("this kernel has no vsock loopback: {error}");
                assert!(error.to_string().starts_with(&format!("cannot connect to {address}: ")), "{error}");
                let known = [Errno::NODEV, Errno::TIMEDOUT, Errno::CONNRESET, Errno::NETUNREACH];
                let kinds = known.map(|errno| io::Error::from(errno).kind());
                assert!(kinds.contains(&error.kind()), "{error}");
                return;
            }
        };
        // Here the connection is accepted when the connect returns.
        let mut far = Stream::Vsock(listener.accept().unwrap());
        far.set_nonblocking(false).unwrap();
        assert!(far.peer().starts_with(&format!("vsock:{CID_LOCAL}:")), "{}", far.peer());
        near.write_all(b"word").unwrap();
        let mut word = [0; 4];
        far.read_exact(&mut word).unwrap();
        far.write_all(&word).unwrap();
        near.try_clone().unwrap().read_exact(&mut word).unwrap();
        assert_eq!(&word, b"word");
        near.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        assert_eq!(near.read(&mut word).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        near.shutdown(Shutdown::Both).unwrap();
        assert_eq!(far.read(&mut word).unwrap(), 0);
    }
}
