//! A connection to the kernel: negotiation, and workers that read requests and hand them to a [`Filesystem`].
//!
//! A session knows no threads: each [`Worker`] has a descriptor and buffers of its own, and runs on whatever thread calls
//! [`Worker::serve`]. Memory is fixed: two buffers of a little over 1 MiB per worker, touched only as far as requests reach.

use crate::abi::{self, init};
use crate::buffer::Buffer;
use crate::notify::Notifier;
use crate::reply::Reply;
use crate::request::{self, Operation, Request};
use crate::{Errno, mounting};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Largest WRITE and READ, in bytes. The kernel's own bound is 256 pages.
pub const IO_BYTES_MAX: usize = 1 << 20;
const PAGE_BYTES: usize = 4096;
/// Requests are read to where the data of a WRITE begin on a page, so that they can be written on with O_DIRECT.
const REQUEST_START: usize = PAGE_BYTES - size_of::<abi::InHeader>() - size_of::<abi::WriteIn>();
/// Room for a largest WRITE, which is the largest of all requests.
const REQUEST_BUFFER_BYTES: usize = PAGE_BYTES + IO_BYTES_MAX + PAGE_BYTES;

/// What the file system would like; the kernel's offer limits it.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// Bits of [`abi::init`].
    pub capabilities: u64,
    /// Read-ahead window, in bytes.
    pub readahead_bytes_max: u32,
    /// Requests in the background (read-ahead, writeback, asynchronous direct I/O) that may be under way at once.
    pub background_max: u16,
}

/// What was agreed on. Handed to a successor, it lets it take over the connection without INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Minor version of the interface in use.
    pub minor: u32,
    /// Bits of [`abi::init`] in use.
    pub capabilities: u64,
}

/// Answers requests. Called from many workers at once.
pub trait Filesystem: Sync {
    /// Handles one request and answers it. `scratch` is the worker's, page-aligned, at least [`IO_BYTES_MAX`] bytes, and holds
    /// anything; it is meant for the answer's data.
    fn handle(&self, request: &Request<'_>, reply: Reply<'_>, scratch: &mut [u8]);
}

/// A negotiated connection.
pub struct Session {
    device: Arc<OwnedFd>,
    negotiated: Negotiated,
}

impl Session {
    /// Waits for the kernel's INIT on a fresh mount's device and answers it.
    pub fn negotiate(device: OwnedFd, wish: Wish) -> io::Result<Session> {
        let mut buffer = Buffer::new(REQUEST_BUFFER_BYTES)?;
        loop {
            let len = read_request(&device, &mut buffer)?;
            let request = Request::decode(&buffer[..len], 0).map_err(io::Error::other)?;
            let reply = Reply::new(device.as_fd(), request.header.unique);
            let Operation::Init { args, flags2 } = request.operation else {
                reply.error(Errno::IO)?;
                continue;
            };
            if args.major > abi::MAJOR {
                // The kernel then repeats INIT with our major version.
                reply.value(&abi::InitOut { major: abi::MAJOR, minor: abi::MINOR, ..Default::default() })?;
                continue;
            }
            if args.major < abi::MAJOR || args.minor < abi::MINOR_MIN {
                reply.error(Errno::PROTO)?;
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!(
                        "the kernel speaks FUSE {}.{}, {}.{} is needed: use Linux 6.1 or newer",
                        args.major,
                        args.minor,
                        abi::MAJOR,
                        abi::MINOR_MIN
                    ),
                ));
            }
            let offered = u64::from(args.flags)
                | if u64::from(args.flags) & init::INIT_EXT != 0 { u64::from(flags2) << 32 } else { 0 };
            let capabilities = offered & (wish.capabilities | init::INIT_EXT | init::MAX_PAGES);
            let negotiated = Negotiated { minor: args.minor.min(abi::MINOR), capabilities };
            reply.value(&abi::InitOut {
                major: abi::MAJOR,
                minor: negotiated.minor,
                max_readahead: args.max_readahead.max(wish.readahead_bytes_max),
                flags: capabilities as u32,
                flags2: (capabilities >> 32) as u32,
                max_background: wish.background_max,
                congestion_threshold: wish.background_max / 4 * 3,
                max_write: IO_BYTES_MAX as u32,
                time_gran: 1,
                max_pages: (IO_BYTES_MAX / PAGE_BYTES) as u16,
                ..Default::default()
            })?;
            return Ok(Session { device: Arc::new(device), negotiated });
        }
    }

    /// Goes on with a connection that another process negotiated.
    pub fn resume(device: OwnedFd, negotiated: Negotiated) -> Session {
        Session { device: Arc::new(device), negotiated }
    }

    /// What was agreed on.
    pub fn negotiated(&self) -> Negotiated {
        self.negotiated
    }

    /// The descriptor of the connection.
    pub fn device(&self) -> &Arc<OwnedFd> {
        &self.device
    }

    /// Sends notifications on this connection.
    pub fn notifier(&self) -> Notifier {
        Notifier::new(self.device.clone())
    }

    /// A worker with a descriptor of its own, so that workers do not share the kernel's queue of what they have read.
    pub fn worker(&self) -> io::Result<Worker> {
        let device = match mounting::clone_device(&self.device) {
            Ok(device) => device,
            // Where /dev/fuse cannot be opened (a sandbox), the workers share one queue: slower, and as right.
            Err(_) => self.device.try_clone()?,
        };
        Ok(Worker {
            device,
            capabilities: self.negotiated.capabilities,
            request: Buffer::new(REQUEST_BUFFER_BYTES)?,
            scratch: Buffer::new(IO_BYTES_MAX + PAGE_BYTES)?,
        })
    }
}

/// Reads requests and has them answered, one at a time.
pub struct Worker {
    device: OwnedFd,
    capabilities: u64,
    request: Buffer,
    scratch: Buffer,
}

impl Worker {
    /// Serves until the mount is gone, which is no error.
    pub fn serve(&mut self, filesystem: &dyn Filesystem) -> io::Result<()> {
        loop {
            let len = match read_request(&self.device, &mut self.request[REQUEST_START..]) {
                // Nothing at all is the end of a stream, which stands in for the device in tests.
                Ok(0) | Err(Errno::NODEV) => return Ok(()),
                Ok(len) => len,
                Err(errno) => return Err(errno.into()),
            };
            let bytes = &self.request[REQUEST_START..][..len];
            let Ok(header) = request::header(bytes) else { continue };
            let reply = Reply::new(self.device.as_fd(), header.unique);
            match Request::decode(bytes, self.capabilities) {
                Ok(request) => {
                    let scratch = &mut self.scratch[..];
                    // A panic in a handler is a bug of ours; the unsent reply answers EIO, and all others are served on.
                    let _ = catch_unwind(AssertUnwindSafe(|| filesystem.handle(&request, reply, scratch)));
                }
                Err(_) => drop(reply.error(Errno::INVAL)),
            }
        }
    }
}

/// Reads one request. A request that was taken back (ENOENT), a signal, or nothing to read only mean: try again.
fn read_request(device: &OwnedFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match rustix::io::read(device, &mut *buffer) {
            Err(Errno::INTR | Errno::NOENT) => {}
            Err(Errno::AGAIN) => {
                let mut poll = [rustix::event::PollFd::new(device, rustix::event::PollFlags::IN)];
                let _ = rustix::event::poll(&mut poll, None);
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use zerocopy::{FromBytes, IntoBytes};

    struct Odd;

    impl Filesystem for Odd {
        fn handle(&self, request: &Request<'_>, reply: Reply<'_>, _scratch: &mut [u8]) {
            match request.operation {
                Operation::Statfs => drop(reply.data(b"12345678")),
                Operation::Readlink => {} // Forgets to answer.
                Operation::Unknown => drop(reply.error(Errno::NOSYS)),
                _ => panic!("a bug"),
            }
        }
    }

    /// Whatever arrives and whatever the file system does with it: one answer each, in order, and serving goes on.
    #[test]
    fn every_request_is_answered_once() {
        let (kernel, device) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let negotiated = Negotiated { minor: abi::MINOR, capabilities: 0 };
        let session = Session::resume(device, negotiated);
        assert_eq!(session.negotiated(), negotiated);
        let mut worker = session.worker().unwrap();
        let thread = std::thread::spawn(move || worker.serve(&Odd));
        let ask = |opcode, unique, body: &[u8]| {
            let len = (size_of::<abi::InHeader>() + body.len()) as u32;
            let header = abi::InHeader { len, opcode, unique, ..Default::default() };
            rustix::io::write(&kernel, &[header.as_bytes(), body].concat()).unwrap();
            let mut answer = [0; 64];
            let len = rustix::io::read(&kernel, &mut answer).unwrap();
            let (header, _) = abi::OutHeader::read_from_prefix(&answer).unwrap();
            assert_eq!((header.len as usize, header.unique), (len, unique));
            (header.error, answer[size_of::<abi::OutHeader>()..len].to_vec())
        };
        rustix::io::write(&kernel, &[1, 2, 3]).unwrap(); // No header: nobody to answer.
        assert_eq!(ask(abi::opcode::STATFS, 1, &[]), (0, b"12345678".to_vec()));
        assert_eq!(ask(abi::opcode::LOOKUP, 2, b"no end"), (-libc_errno(Errno::INVAL), vec![]));
        assert_eq!(ask(abi::opcode::LOOKUP, 3, b"name\0"), (-libc_errno(Errno::IO), vec![]));
        assert_eq!(ask(abi::opcode::READLINK, 4, &[]), (-libc_errno(Errno::IO), vec![]));
        assert_eq!(ask(4096, 5, &[]), (-libc_errno(Errno::NOSYS), vec![]));
        drop(kernel);
        drop(session);
        thread.join().unwrap().unwrap();
    }

    fn libc_errno(errno: Errno) -> i32 {
        errno.raw_os_error()
    }
}
