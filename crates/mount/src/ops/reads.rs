//! READs of the kernel's page cache. The worker dequeues more of them as long as the borrower can
//! answer them together.

use crate::filesystem::Passthrough;
use crate::inode::handle::OpenFile;
use crate::system::errno;
use borrower::{BATCH_READS_MAX, ReadRequest};
use fuse::{Errno, More, Operation, Reply, Request, abi};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// A READ that the borrower has accepted.
struct Taken<'m> {
    request: Request<'static>,
    reply: Reply<'m>,
    file: Arc<OpenFile>,
    /// The overtaken write(2) of the file that was remembered before the READ began.
    overtaken: u64,
}

/// The batch of READs that are being answered.
struct Reads<'a, 'm> {
    mount: &'a Passthrough,
    more: &'a mut More<'m>,
    first: Option<(Request<'static>, Reply<'m>)>,
    /// The replies of the READs that the borrower has accepted.
    replies: [Option<Taken<'m>>; BATCH_READS_MAX],
    taken: usize,
    /// The READ that is being answered may not wait for the backing file now.
    is_refused: bool,
    /// A request that is not for the borrower, and ends the batch.
    other: Option<(Request<'static>, Reply<'m>)>,
}

impl Passthrough {
    /// Answers a READ, and perhaps some of those behind it.
    pub(crate) fn read_all<'m>(
        &self,
        request: Request<'static>,
        reply: Reply<'m>,
        more: &mut More<'m>,
        scratch: &mut [u8],
    ) {
        let first = Some((request, reply));
        let replies = [const { None }; BATCH_READS_MAX];
        let mut reads = Reads { mount: self, more, first, replies, taken: 0, is_refused: false, other: None };
        self.borrower.read_all(&mut reads, scratch);
        if let Some((request, reply)) = reads.other {
            if !reads.more.admit_read() {
                return reads.more.defer(&request, reply);
            }
            fuse::Filesystem::handle(self, &request, reply, scratch);
        }
    }

    /// The data of a READ for the borrower; `None` if the READ is not for the borrower.
    fn cached_read(&self, request: &Request<'_>) -> Option<ReadRequest<OpenFile>> {
        let Operation::Read(args) = request.operation else { return None };
        if args.read_flags & abi::READ_LOCKOWNER != 0 {
            return None;
        }
        let file_handle = self.handles.file(args.fh).ok()?;
        // With passthrough the backing file may change without an announcement.
        if file_handle.backing.is_some() {
            return None;
        }
        let file = file_handle.inode.file.clone()?;
        let len = fuse::session::IO_BYTES_MAX.min(args.size as usize);
        Some(ReadRequest { file, backing: file_handle, request: request.number(), offset: args.offset, len })
    }
}

impl borrower::Reads<OpenFile> for Reads<'_, '_> {
    fn next(&mut self) -> Option<ReadRequest<OpenFile>> {
        // It is handled after the READs that the borrower has accepted.
        if self.other.is_some() {
            return None;
        }
        let (request, reply) = self.first.take().or_else(|| self.more.next_read())?;
        let Some(read) = self.mount.cached_read(&request) else {
            self.other = Some((request, reply));
            return None;
        };
        self.mount.counters.count(request.header.opcode);
        read.backing.in_use();
        let overtaken = read.backing.inode.overtaken.request();
        let file = read.backing.clone();
        self.replies[self.taken] = Some(Taken { request, reply, file, overtaken });
        self.taken += 1;
        Some(read)
    }

    fn wait_beside(&mut self, answer: BorrowedFd<'_>, limit: Duration) -> bool {
        self.other.is_none() && self.more.wait_beside(answer, limit)
    }

    fn answer(&mut self, nth: usize, read: io::Result<&[u8]>) {
        let Some(Taken { request, reply, file, overtaken }) = self.replies[nth].take() else { return };
        if std::mem::take(&mut self.is_refused) && read.is_err() {
            return self.more.defer(&request, reply);
        }
        let sent = match read {
            Ok(bytes) => {
                if let Operation::Read(args) = request.operation {
                    file.inode.overtaken.is_read(overtaken, args.offset, args.size.into());
                }
                self.mount.counters.read_bytes.add(bytes.len() as u64);
                reply.data(bytes)
            }
            Err(error) => reply.error(errno(&error)),
        };
        self.mount.answered(abi::opcode::READ, sent);
    }

    fn about_to_wait(&mut self) {
        self.more.about_to_wait();
    }

    fn may_wait(&mut self) -> io::Result<()> {
        self.is_refused = !self.more.admit_read();
        if self.is_refused { Err(Errno::AGAIN.into()) } else { Ok(()) }
    }

    fn has_time(&mut self) -> bool {
        self.more.has_time()
    }
}
