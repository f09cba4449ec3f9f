//! A connection to the kernel: negotiation, and workers that read requests and pass them to a
//! [`Filesystem`].
//!
//! A session has no threads: each [`Worker`] has a descriptor and buffers of its own, and runs on
//! the thread that calls [`Worker::serve`]. Memory is fixed: two buffers of a little over 1 MiB for
//! each worker, touched only as far as requests reach.

use crate::abi::{self, init};
use crate::admission::{self, Admission, Class, Deferred, Who};
use crate::buffer::Buffer;
use crate::later;
use crate::leader::{self, Leader, Place};
use crate::more::{More, a_read};
use crate::notify::Notifier;
use crate::reply::Reply;
use crate::request::{self, Operation, Request};
use crate::workforce::{Starting, WorkforceChange};
use crate::{Errno, mounting};
use locks::spinning::{AdaptiveSpin, SPIN_MAX};
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The largest WRITE and READ, in bytes. The kernel's own limit is 256 pages.
pub const IO_BYTES_MAX: usize = 1 << 20;
pub(crate) const PAGE_BYTES: usize = 4096;
/// The offset in the buffer at which a request is read. It makes the data of a WRITE page-aligned,
/// so they can be written with O_DIRECT.
const REQUEST_START: usize = PAGE_BYTES - size_of::<abi::InHeader>() - size_of::<abi::WriteIn>();
/// Room for the largest WRITE, which is the largest of all requests.
const REQUEST_BUFFER_BYTES: usize = PAGE_BYTES + IO_BYTES_MAX + PAGE_BYTES;

/// With PASSTHROUGH: the maximum depth of this mount in a stack of file systems. It may lie on file
/// systems that are not stacked, and one such as overlayfs may lie on it (fs/fuse/passthrough.c;
/// FILESYSTEM_MAX_STACK_DEPTH is 2).
const STACK_DEPTH_MAX: u32 = 1;

/// The capabilities and sizes that the file system requests; the kernel's offer limits them.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// Bits of [`abi::init`].
    pub capabilities: u64,
    /// The read-ahead window, in bytes.
    pub readahead_bytes_max: u32,
    /// The maximum number of background requests (read-ahead, writeback, asynchronous direct I/O)
    /// in progress.
    pub background_max: u16,
    /// The granularity of the times that the kernel keeps by itself with WRITEBACK_CACHE, in
    /// nanoseconds: at most 1,000,000,000.
    pub time_granularity_ns: u32,
}

/// The result of the negotiation. With it a successor can take over the connection without INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// The minor version of the interface in use.
    pub minor: u32,
    /// Bits of [`abi::init`] in use.
    pub capabilities: u64,
}

/// A file system that answers requests. Many workers call it at once.
pub trait Filesystem: Sync {
    /// Handles one request and answers it. `scratch` is the worker's buffer for the answer's data:
    /// page-aligned, at least [`IO_BYTES_MAX`] bytes, with undefined contents.
    fn handle(&self, request: &Request<'_>, reply: Reply<'_>, scratch: &mut [u8]);

    /// Returns the class of a request other than READ that may have to wait. The request is handled
    /// when its user may hold one more worker of that class.
    fn class(&self, request: &Request<'_>) -> Option<Class> {
        let _ = request;
        None
    }

    /// Returns a number of the backing file system of a node, if there are several. If one of them
    /// does not answer, its users still have workers for the others. 0: there is only one.
    fn file_system(&self, nodeid: u64) -> u32 {
        let _ = nodeid;
        0
    }

    /// Handles a READ, and any number of the READs behind it, taken from `more`.
    fn read<'a>(&self, request: Request<'static>, reply: Reply<'a>, more: &mut More<'a>, scratch: &mut [u8]) {
        let _ = more;
        self.handle(&request, reply, scratch);
    }
}

/// The reason why a worker has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The mount is gone.
    Gone,
    /// The worker had to leave ([`Session::leave`]); the connection stays for a successor.
    Left,
    /// The worker was not needed any more ([`Session::retire`]).
    Retired,
}

/// A negotiated connection.
#[derive(Clone)]
pub struct Session {
    device: Arc<OwnedFd>,
    negotiated: Negotiated,
    leave: Arc<AtomicBool>,
    leader: Arc<Leader>,
    admission: Arc<Admission>,
}

impl Session {
    /// Waits for the kernel's INIT on a fresh mount's device and answers it.
    pub fn negotiate(device: OwnedFd, wish: Wish) -> io::Result<Session> {
        let mut buffer = Buffer::new(REQUEST_BUFFER_BYTES)?;
        loop {
            let len = read_request(&device, &mut buffer, &AtomicBool::new(false), Some(&AdaptiveSpin::default()))?;
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
                        "the kernel has FUSE {}.{}, {}.{} is needed: use Linux 6.1 or newer",
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
                time_gran: wish.time_granularity_ns,
                max_pages: (IO_BYTES_MAX / PAGE_BYTES) as u16,
                max_stack_depth: if capabilities & init::PASSTHROUGH != 0 { STACK_DEPTH_MAX } else { 0 },
                ..Default::default()
            })?;
            return Ok(Session::resume(device, negotiated));
        }
    }

    /// Continues a connection that another process negotiated.
    pub fn resume(device: OwnedFd, negotiated: Negotiated) -> Session {
        Session {
            device: Arc::new(device),
            negotiated,
            leave: Arc::default(),
            leader: Arc::new(Leader::new()),
            admission: Arc::new(Admission::new(0)),
        }
    }

    /// Sets the maximum number of workers. Must be called before the first worker is made.
    pub fn limit_workers(&mut self, most: usize) {
        self.admission = Arc::new(Admission::new(most));
        if self.negotiated.capabilities & abi::init::HAS_RESEND == 0 {
            // The kernel would not send requests that are put off to a successor.
            self.close_later();
        }
    }

    /// Returns the number of requests that wait until their user may hold one more worker.
    pub fn deferred(&self) -> usize {
        self.admission.deferred()
    }

    /// Returns the number of requests that were put off ([`crate::put_off`]) and are not answered
    /// yet.
    pub fn put_off(&self) -> usize {
        self.admission.later.count()
    }

    /// Handles requests again that were put off, until [`Session::close_later`]. For one thread
    /// only.
    ///
    /// # Errors
    /// When there is no memory for a buffer.
    pub fn try_again(&self, filesystem: &dyn Filesystem) -> io::Result<()> {
        let mut scratch = Buffer::new(IO_BYTES_MAX + PAGE_BYTES)?;
        let later = &self.admission.later;
        admission::begin(&self.admission);
        while let Some((again, _trying)) = later.next() {
            let Deferred { who, bytes, device, .. } = &again.request;
            let who = *who;
            admission::handles(who, None);
            later::begin(true);
            if let Ok(request) = Request::decode(bytes, self.negotiated.capabilities) {
                let reply = Reply::new(device.as_fd(), request.header.unique);
                drop(catch_unwind(AssertUnwindSafe(|| filesystem.handle(&request, reply, &mut scratch))));
            }
            match later::was_put_off() {
                true => later.add_again(again),
                false => later.done(who),
            }
        }
        Ok(())
    }

    /// Ends [`Session::try_again`] for good. Requests that are put off stay unanswered, for a
    /// successor.
    pub fn close_later(&self) {
        self.admission.later.close();
    }

    /// As long as the guard is there, [`Session::try_again`] handles no request. None: it still did
    /// after
    /// `limit`.
    pub fn pause_later(&self, limit: Duration) -> Option<impl Drop> {
        self.admission.later.pause(limit)
    }

    /// If set, every worker ends before it reads another request. A signal must interrupt a worker
    /// that waits for a request, again and again while [`Worker::reading`] is set. Workers that
    /// wait to become the leader get the lead from workers that end.
    pub fn leave(&self) -> &Arc<AtomicBool> {
        &self.leave
    }

    /// Returns the result of the negotiation.
    pub fn negotiated(&self) -> Negotiated {
        self.negotiated
    }

    /// Returns the descriptor of the connection.
    pub fn device(&self) -> &Arc<OwnedFd> {
        &self.device
    }

    /// Returns a sender of notifications on this connection.
    pub fn notifier(&self) -> Notifier {
        Notifier::new(self.device.clone())
    }

    /// Waits for a change in the number of workers that are needed, for at most `period`: one more
    /// if all are blocked and `can_grow` is set, or fewer. One thread may wait.
    pub fn workforce_change(&self, period: Duration, can_grow: bool) -> WorkforceChange {
        self.leader.workforce_change(period, can_grow)
    }

    /// Makes `count` idle workers end ([`Served::Retired`]), but never the last one.
    pub fn retire(&self, count: usize) {
        self.leader.retire(count);
    }

    /// Ends [`Session::workforce_change`] for good.
    pub fn close_workforce(&self) {
        self.leader.close();
    }

    /// Returns a worker with a descriptor of its own, so workers do not share the kernel's queue of
    /// requests that were read.
    pub fn worker(&self) -> io::Result<Worker> {
        let device = match mounting::clone_device(&self.device) {
            Ok(device) => device,
            // If /dev/fuse cannot be opened (in a sandbox), the workers share one queue. That is
            // slower, and equally correct.
            Err(_) => self.device.try_clone()?,
        };
        self.worker_on(device)
    }

    /// Returns a worker with a descriptor of this connection that an earlier daemon had.
    pub fn worker_on(&self, device: OwnedFd) -> io::Result<Worker> {
        // A worker with other work must not block in read(2).
        let flags = rustix::fs::fcntl_getfl(&device)?;
        rustix::fs::fcntl_setfl(&device, flags | rustix::fs::OFlags::NONBLOCK)?;
        self.worker_with(Arc::new(device))
    }

    /// Returns a worker that shares the connection's own descriptor, so it costs no descriptor. It
    /// also shares the kernel's queue of requests that were read. That does not matter for a worker
    /// that is needed because others are blocked.
    pub fn extra_worker(&self) -> io::Result<Worker> {
        let flags = rustix::fs::fcntl_getfl(&self.device)?;
        rustix::fs::fcntl_setfl(&self.device, flags | rustix::fs::OFlags::NONBLOCK)?;
        self.worker_with(self.device.clone())
    }

    fn worker_with(&self, device: Arc<OwnedFd>) -> io::Result<Worker> {
        let request = Buffer::new(REQUEST_BUFFER_BYTES)?;
        // A missing page would be faulted in while the kernel hands over a request. If the process
        // is killed at that moment, the page fault fails, and the kernel fails the request for good
        // instead of sending it again.
        request.populate();
        Ok(Worker {
            starting: Some(Starting::new(&self.leader)),
            device,
            capabilities: self.negotiated.capabilities,
            request,
            scratch: Buffer::new(IO_BYTES_MAX + PAGE_BYTES)?,
            reading: Arc::default(),
            leave: self.leave.clone(),
            leader: self.leader.clone(),
            admission: self.admission.clone(),
        })
    }
}

/// Reads requests and has them answered: one at a time, except for READs that the file system
/// answers together.
pub struct Worker {
    starting: Option<Starting>,
    device: Arc<OwnedFd>,
    capabilities: u64,
    request: Buffer,
    scratch: Buffer,
    reading: Arc<AtomicBool>,
    leave: Arc<AtomicBool>,
    leader: Arc<Leader>,
    admission: Arc<Admission>,
}

impl Worker {
    /// Returns the worker's descriptor of the connection. While any process has it open, the kernel
    /// keeps the requests that were read from it and not answered.
    pub fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// Returns a flag that is set while the worker waits for a request. Then a signal to its thread
    /// interrupts nothing else.
    pub fn reading(&self) -> &Arc<AtomicBool> {
        &self.reading
    }

    /// Serves until the mount is gone or the worker must leave, neither of which is an error.
    pub fn serve(&mut self, filesystem: &dyn Filesystem) -> io::Result<Served> {
        let mut place = Place::new(&self.leader, &self.device);
        drop(self.starting.take());
        admission::begin(&self.admission);
        let mut next_len = None;
        loop {
            let read = match next_len.take() {
                Some(len) => Ok(len),
                None => {
                    if !place.wait() {
                        return Ok(Served::Retired);
                    }
                    self.reading.store(true, Ordering::Release);
                    let buffer = &mut self.request[REQUEST_START..];
                    let read = read_request(&self.device, buffer, &self.leave, place.spin());
                    self.reading.store(false, Ordering::Release);
                    read
                }
            };
            let len = match read {
                // A read of 0 bytes is the end of a stream, which replaces the device in tests.
                Ok(0) | Err(Errno::NODEV) => return Ok(Served::Gone),
                Ok(len) => len,
                Err(Errno::CANCELED) => return Ok(Served::Left),
                // Another worker was quicker.
                Err(Errno::AGAIN) => continue,
                Err(errno) => return Err(errno.into()),
            };
            next_len = self.serve_one(len, &mut place, filesystem);
            // Deferred requests come after requests that were read ahead.
            while next_len.is_none()
                && let Some(deferred) = self.admission.next()
            {
                self.serve_deferred(deferred, &mut place, filesystem);
            }
        }
    }

    /// Handles a request of that length. Returns the length of another one that was read after it.
    fn serve_one(&mut self, len: usize, place: &mut Place, filesystem: &dyn Filesystem) -> Option<usize> {
        let bytes = &self.request[REQUEST_START..][..len];
        let Ok(header) = request::header(bytes) else { return None };
        let reply = Reply::new(self.device.as_fd(), header.unique);
        let scratch = &mut self.scratch[..];
        // A panic in a handler is a bug of the daemon. The unsent replies answer EIO, and all other
        // requests are served.
        match Request::decode(bytes, self.capabilities) {
            Ok(Request { header, operation: Operation::Read(args), .. }) => {
                let buffer = &mut self.request[REQUEST_START..];
                let mut more =
                    More::new(&self.device, &self.admission, filesystem, &self.leave, self.capabilities, buffer);
                admission::handles(Who::of(filesystem, None, &header), None);
                let handle = AssertUnwindSafe(|| filesystem.read(a_read(header, args), reply, &mut more, scratch));
                place.while_handling(|| drop(catch_unwind(handle)));
                admission::handled();
                return more.next_len;
            }
            Ok(request) => {
                let class = filesystem.class(&request);
                let who = Who::of(filesystem, class, &header);
                let admitted = class.filter(|class| self.admission.enter(*class, who));
                if let (Some(class), None) = (class, admitted) {
                    let device = self.device.clone();
                    if self.admission.defer(Deferred { class, who, bytes: bytes.to_vec(), device }) {
                        reply.none();
                        return None;
                    }
                    if !cannot_fail(&request) {
                        let _ = reply.error(Errno::NOMEM);
                        return None;
                    }
                }
                admission::handles(who, admitted);
                let handle = AssertUnwindSafe(|| filesystem.handle(&request, reply, scratch));
                place.while_handling(|| drop(catch_unwind(handle)));
                admission::handled();
                if later::was_put_off() {
                    let (class, device) = (class.unwrap_or(Class::Open), self.device.clone());
                    self.admission.later.add(Deferred { class, who, bytes: bytes.to_vec(), device });
                }
            }
            Err(_) => drop(reply.error(Errno::INVAL)),
        }
        None
    }

    /// Handles a request that was deferred, and that has a token now.
    fn serve_deferred(&mut self, deferred: Deferred, place: &mut Place, filesystem: &dyn Filesystem) {
        let scratch = &mut self.scratch[..];
        admission::handles(deferred.who, Some(deferred.class));
        if let Ok(request) = Request::decode(&deferred.bytes, self.capabilities) {
            let reply = Reply::new(deferred.device.as_fd(), request.header.unique);
            let handle = AssertUnwindSafe(|| match request.operation {
                Operation::Read(args) => {
                    let mut more = More::none(&deferred.device, &self.admission, filesystem, &self.leave);
                    filesystem.read(a_read(request.header, args), reply, &mut more, scratch);
                }
                _ => filesystem.handle(&request, reply, scratch),
            });
            place.while_handling(|| {
                leader::about_to_wait();
                drop(catch_unwind(handle));
            });
        }
        admission::handled();
        if later::was_put_off() {
            self.admission.later.add(deferred);
        }
    }
}

/// Returns whether the request writes data that the kernel has cached, or closes a file. No caller
/// would learn of a failure, and the kernel limits their number.
fn cannot_fail(request: &Request<'_>) -> bool {
    match request.operation {
        Operation::Write { args, .. } => args.write_flags & abi::WRITE_CACHE != 0,
        Operation::Release(_) => true,
        _ => false,
    }
}

/// Reads one request. If there is none, waits if `spin` is set. Only one worker should wait,
/// because the kernel wakes all that do (fs/fuse/dev.c, fuse_dev_poll). Returns ECANCELED when
/// `leave` is set.
fn read_request(
    device: &OwnedFd,
    buffer: &mut [u8],
    leave: &AtomicBool,
    spin: Option<&AdaptiveSpin>,
) -> Result<usize, Errno> {
    let mut look = || {
        loop {
            if leave.load(Ordering::Acquire) {
                return Err(Errno::CANCELED);
            }
            match rustix::io::read(device, &mut *buffer) {
                // The request was taken back, or a signal arrived.
                Err(Errno::NOENT | Errno::INTR) => {}
                result => return result,
            }
        }
    };
    let Some(spin) = spin else { return look() };
    let mut there = || Some(look()).filter(|read| *read != Err(Errno::AGAIN));
    if let Some(read) = there().or_else(|| spin.poll(SPIN_MAX, &mut there)) {
        return read;
    }
    loop {
        let _ = rustix::event::poll(&mut [PollFd::new(device, PollFlags::IN)], None);
        if let Some(read) = there() {
            return read;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use zerocopy::{FromBytes, FromZeros, IntoBytes};

    struct Odd;

    impl Filesystem for Odd {
        fn handle(&self, request: &Request<'_>, reply: Reply<'_>, _scratch: &mut [u8]) {
            match request.operation {
                Operation::Statfs => drop(reply.data(b"12345678")),
                Operation::Readlink => {} // Forgets to answer.
                Operation::Unknown => drop(reply.error(Errno::NOSYS)),
                Operation::Lookup { name } if name == c"nfs" => drop(reply.error(Errno::from_raw_os_error(524))),
                _ => panic!("a bug"),
            }
        }
    }

    /// For any request and any result of the file system: one answer each, in order, and serving
    /// goes on.
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
        assert_eq!(ask(abi::opcode::LOOKUP, 6, b"nfs\0"), (-libc_errno(Errno::IO), vec![]), "the kernel takes no 524");
        drop(kernel);
        drop(session);
        assert_eq!(thread.join().unwrap().unwrap(), Served::Gone);
    }

    /// Answers all available READs with their number; and everything else.
    struct Gathering;

    impl Filesystem for Gathering {
        fn handle(&self, _: &Request<'_>, reply: Reply<'_>, _: &mut [u8]) {
            reply.data(b"other").unwrap();
        }

        fn read<'a>(&self, _: Request<'static>, reply: Reply<'a>, more: &mut More<'a>, _: &mut [u8]) {
            let mut replies = vec![reply];
            replies.extend(std::iter::from_fn(|| more.next_read()).map(|(_, reply)| reply));
            assert!(more.next_read().is_none(), "the request that was read ahead is not lost");
            let count = replies.len() as u8;
            replies.into_iter().for_each(|reply| reply.data(&[count]).unwrap());
        }
    }

    #[test]
    fn reads_that_are_there_may_be_answered_together() {
        let (kernel, device) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let session = Session::resume(device, Negotiated { minor: abi::MINOR, capabilities: 0 });
        let mut worker = session.worker().unwrap();
        let ask = |opcode, unique, body: &[u8]| {
            let len = (size_of::<abi::InHeader>() + body.len()) as u32;
            let header = abi::InHeader { len, opcode, unique, ..Default::default() };
            rustix::io::write(&kernel, &[header.as_bytes(), body].concat()).unwrap();
        };
        let read = abi::ReadIn::new_zeroed();
        (1..=3).for_each(|unique| ask(abi::opcode::READ, unique, read.as_bytes()));
        ask(abi::opcode::STATFS, 4, &[]);
        ask(abi::opcode::READ, 5, read.as_bytes());
        ask(abi::opcode::READ, 6, b"too short");
        ask(abi::opcode::READ, 7, read.as_bytes());
        let thread = std::thread::spawn(move || worker.serve(&Gathering));
        let mut answers = (1..=7).map(|unique| {
            let mut answer = [0; 64];
            let len = rustix::io::read(&kernel, &mut answer).unwrap();
            let (header, _) = abi::OutHeader::read_from_prefix(&answer).unwrap();
            assert_eq!((header.len as usize, header.unique), (len, unique));
            (header.error, answer[size_of::<abi::OutHeader>()..len].to_vec())
        });
        assert!(answers.by_ref().take(3).all(|answer| answer == (0, vec![3])));
        assert_eq!(answers.next().unwrap(), (0, b"other".to_vec()));
        assert_eq!(answers.next().unwrap(), (0, vec![1]));
        assert_eq!(answers.next().unwrap(), (-libc_errno(Errno::INVAL), vec![]));
        assert_eq!(answers.next().unwrap(), (0, vec![1]));
        drop(answers);
        drop(kernel);
        drop(session);
        assert_eq!(thread.join().unwrap().unwrap(), Served::Gone);
    }

    #[test]
    fn who_is_asked_to_leave_reads_nothing_more() {
        let (kernel, device) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let session = Session::resume(device, Negotiated { minor: abi::MINOR, capabilities: 0 });
        let mut worker = session.worker().unwrap();
        rustix::io::write(&kernel, &[0; 64]).unwrap();
        session.leave().store(true, Ordering::Release);
        assert_eq!(worker.serve(&Odd).unwrap(), Served::Left);
        assert!(!worker.reading().load(Ordering::Acquire));
        let mut left = [0; 64];
        assert_eq!(rustix::io::read(worker.device(), &mut left).unwrap(), 64, "it is there for the successor");
    }

    fn libc_errno(errno: Errno) -> i32 {
        errno.raw_os_error()
    }
}
