//! The file system: what it is made of, and which operation is where.
//!
//! - names (`names.rs`): lookup, forget, create, tmpfile, mknod, mkdir, symlink, link, unlink,
//!   rmdir, rename, readlink
//! - attributes (`attributes.rs`): getattr, statx, setattr, statfs, ioctl; extended ones in
//!   `xattr.rs`
//! - data (`data.rs`): open, write, flush, fsync, release; READs in `reads.rs`; `space.rs`:
//!   fallocate, lseek, copy_file_range
//! - directories (below): opendir, readdir, readdirplus
//!
//! All of it works on descriptors below SOURCE, never on paths through the mount.

use crate::beside::Beside;
use crate::classes;
use crate::closed;
use crate::config::WriteMode;
use crate::credentials::{Caller, Creator, Privilege};
use crate::crossing::Crossing;
use crate::descriptors::Taken;
use crate::directory::{Entries, Listing};
use crate::handle::{Handles, OpenDirectory};
use crate::handover::Keep;
use crate::inode::Inodes;
use crate::invalidation::Invalidations;
use crate::ledger::Ledger;
use crate::lookers::Lookers;
use crate::passing::Connection;
use crate::resent::{Attempt, Resent};
use crate::stale::SentBack;
use crate::status::Counters;
use crate::sweep::Sweep;
use borrower::Borrower;
use fuse::abi;
use fuse::{Class, Errno, More, Operation, Reply, Request};
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, openat};
use std::sync::Arc;
use std::time::Duration;

/// How long a request waits until the kernel has forgotten inodes, where no descriptor is left:
/// that takes some milliseconds.
const FORGET_WAIT: Duration = Duration::from_millis(500);

/// A directory, passed through.
pub(crate) struct Passthrough {
    pub(crate) inodes: Inodes,
    pub(crate) handles: Handles,
    pub(crate) keep: Arc<Keep>,
    pub(crate) connection: Arc<Connection>,
    pub(crate) resent: Resent,
    pub(crate) borrower: Arc<Borrower>,
    pub(crate) ledger: Ledger,
    pub(crate) invalidations: Invalidations,
    pub(crate) sweep: Sweep,
    pub(crate) lookers: Lookers,
    pub(crate) sent_back: SentBack,
    pub(crate) beside: Beside,
    pub(crate) crossing: Crossing,
    pub(crate) counters: Counters,
    pub(crate) write_mode: WriteMode,
    pub(crate) privilege: Privilege,
    /// Whether the kernel checks access control lists (FUSE_POSIX_ACL).
    pub(crate) checks_lists: bool,
    pub(crate) attr_timeout: Duration,
    pub(crate) told_attr_timeout: Duration,
    pub(crate) entry_timeout: Duration,
    /// SOURCE, open for reading.
    pub(crate) source: OwnedFd,
    /// Our own device number: what is found below must never be ourselves again.
    pub(crate) own_device: u64,
}

impl fuse::Filesystem for Passthrough {
    fn handle(&self, request: &Request<'_>, reply: Reply<'_>, scratch: &mut [u8]) {
        self.counters.count(request.header.opcode);
        let attempt = self.resent.attempt(request);
        let result = self.dispatch(request, &attempt, reply, scratch);
        attempt.answered();
        self.answered(request.header.opcode, result);
    }

    fn class(&self, request: &Request<'_>) -> Option<Class> {
        classes::class(&request.operation)
    }

    fn file_system(&self, nodeid: u64) -> u32 {
        match self.crossing.is_on() {
            true => self.inodes.get(nodeid).map_or(0, |inode| inode.device.number()),
            false => 0,
        }
    }

    fn read<'a>(&self, request: Request<'static>, reply: Reply<'a>, more: &mut More<'a>, scratch: &mut [u8]) {
        self.read_all(request, reply, more, scratch);
    }
}

impl Passthrough {
    /// A request was answered, or the kernel did not take the answer.
    pub(crate) fn answered(&self, opcode: u32, sent: Result<(), Errno>) {
        self.keep.memory.served();
        if let Err(errno) = sent {
            // It gave the request up, or the mount is gone.
            tracing::debug!(opcode = abi::opcode::name(opcode), %errno, "an answer was not taken");
        }
    }

    fn dispatch(
        &self,
        request: &Request<'_>,
        attempt: &Attempt<'_>,
        reply: Reply<'_>,
        scratch: &mut [u8],
    ) -> Result<(), Errno> {
        let node = request.header.nodeid;
        if closed::is_about(request) {
            return self.answer_closed(request, reply, scratch);
        }
        let uid = request.header.uid;
        let task = request.header.pid;
        let caller = Caller { uid, gid: request.header.gid, task };
        match request.operation {
            Operation::Lookup { name } => {
                self.lookers.looks_up(task, node);
                let entry = self.lookup(node, name, task);
                let found = entry.as_ref().map_or(0, |entry| entry.nodeid);
                let sent = self.answer_entry(reply, entry);
                self.correct_kernel_again(found);
                sent
            }
            Operation::Forget { lookups } => {
                reply.none();
                self.forget(node, lookups);
                Ok(())
            }
            Operation::BatchForget { nodes } => {
                reply.none();
                nodes.for_each(|one| self.forget(one.nodeid, one.nlookup));
                Ok(())
            }
            Operation::Getattr(args) => {
                let sent = answer(reply, self.getattr(node, &args));
                self.look_at_name(node);
                sent
            }
            Operation::Statx(args) => {
                let sent = answer(reply, self.statx(node, &args));
                self.look_at_name(node);
                sent
            }
            Operation::Setattr(args) => answer(reply, self.setattr(node, caller, &args)),
            Operation::Readlink => match self.readlink(node, scratch) {
                Ok(target) => reply.data(target),
                Err(errno) => reply.error(errno),
            },
            Operation::Symlink { name, target } => {
                self.answer_entry(reply, self.symlink(node, name, target, creator(request, 0), attempt))
            }
            Operation::Mknod { args, name } => {
                self.answer_entry(reply, self.mknod(node, name, &args, creator(request, args.umask), attempt))
            }
            Operation::Mkdir { args, name } => {
                self.answer_entry(reply, self.mkdir(node, name, args.mode, creator(request, args.umask), attempt))
            }
            Operation::Unlink { name } => answer_done(reply, self.unlink(node, name, false, attempt)),
            Operation::Rmdir { name } => answer_done(reply, self.unlink(node, name, true, attempt)),
            Operation::Rename { new_parent, flags, name, new_name } => {
                answer_done(reply, self.rename(node, name, new_parent, new_name, flags, creator(request, 0), attempt))
            }
            Operation::Link { node: old, new_name } => {
                self.answer_entry(reply, self.link(old, node, new_name, task, attempt))
            }
            // The lease of another process is waited for elsewhere: by who has asked, if he asked
            // not to wait; else not in a worker, but where too many wait already.
            Operation::Open(args) => match self.open(node, &args, task, attempt, false) {
                Err(Errno::AGAIN) if self.may_be_leased(node, &args) => match fuse::put_off(reply) {
                    Some(reply) => self.answer_open(reply, self.open(node, &args, task, attempt, true)),
                    None => Ok(()),
                },
                opened => self.answer_open(reply, opened),
            },
            Operation::Create { args, name } => {
                self.answer_create(reply, self.create(node, name, &args, creator(request, args.umask), attempt))
            }
            Operation::Tmpfile { args } => {
                self.answer_create(reply, self.tmpfile(node, &args, creator(request, args.umask), attempt))
            }
            Operation::Read(args) => match self.read_past_pool(&args, scratch) {
                Ok(len) => reply.data(&scratch[..len]),
                Err(errno) => reply.error(errno),
            },
            Operation::Write { args, data } => answer(reply, self.write(&args, data, caller, attempt)),
            Operation::Statfs => answer(reply, self.statfs(node)),
            Operation::Flush(args) => answer_done(reply, self.flush(args.fh)),
            Operation::Release(args) => {
                let inode = self.handles.file(args.fh).ok().map(|file| file.inode.clone());
                self.handles.remove(args.fh);
                // The kernel holds the inode until it has its answer.
                let sent = reply.ok();
                inode.iter().for_each(|inode| self.correct_kernel(inode));
                sent
            }
            Operation::Fsync(args) => answer_done(reply, self.fsync(&args)),
            Operation::Setxattr { args, name, value } => {
                answer_done(reply, self.setxattr(node, name, value, &args, caller, attempt))
            }
            Operation::Getxattr { size, name } => {
                self.answer_xattr(reply, size, self.getxattr(node, name, size, scratch), scratch)
            }
            Operation::Listxattr { size } => {
                self.answer_xattr(reply, size, self.listxattr(node, uid, size, scratch), scratch)
            }
            Operation::Removexattr { name } => answer_done(reply, self.removexattr(node, name, task, attempt)),
            Operation::Opendir(args) => self.answer_open(reply, self.opendir(node, &args, attempt)),
            Operation::Readdir(args) => self.readdir(reply, &args, scratch),
            Operation::Readdirplus(args) => self.readdirplus(reply, task, &args, scratch),
            Operation::Releasedir(args) => {
                self.handles.remove(args.fh);
                reply.ok()
            }
            Operation::Fsyncdir(args) => answer_done(reply, self.fsyncdir(&args)),
            Operation::Ioctl { args, data } => self.answer_ioctl(reply, &args, self.ioctl(node, &args, data)),
            Operation::Fallocate(args) => answer_done(reply, self.fallocate(caller, &args)),
            Operation::Lseek(args) => answer(reply, self.lseek(&args)),
            Operation::CopyFileRange { args, wide } => {
                self.answer_copy(reply, wide, self.copy_file_range(caller, &args))
            }
            Operation::Syncfs => answer_done(reply, rustix::fs::syncfs(&self.source)),
            Operation::Destroy => reply.ok(),
            // Nothing here can be interrupted; ENOSYS tells the kernel not to ask again. With
            // default_permissions, access is not asked for. Locks were not negotiated.
            Operation::Interrupt(_) | Operation::Access(_) | Operation::Unknown => reply.error(Errno::NOSYS),
            Operation::Init { .. } => reply.error(Errno::PROTO),
        }
    }

    fn opendir(&self, node: u64, args: &abi::OpenIn, attempt: &Attempt<'_>) -> Result<abi::OpenOut, Errno> {
        if let Some(Ok(fh)) = attempt.done() {
            self.handles.remove(fh); // Nobody has it.
        }
        let inode = self.inodes.get(node)?;
        let keep = OFlags::from_bits_retain(args.flags) & OFlags::NOATIME;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let taken = self.take_descriptor(attempt.uid(), inode.charge())?;
        let fd = openat(self.inodes.anchor(&inode)?, c".", flags | keep, Mode::empty())?;
        attempt.begin(0);
        let fh = self.handles.add_directory(OpenDirectory { inode, listing: Mutex::new(Listing::new(fd)), taken });
        attempt.finish(Ok(abi::OpenOut { fh, ..Default::default() }), |open| open.fh)
    }

    fn readdir(&self, reply: Reply<'_>, args: &abi::ReadIn, scratch: &mut [u8]) -> Result<(), Errno> {
        let directory = match self.handles.directory(args.fh) {
            Ok(directory) => directory,
            Err(errno) => return reply.error(errno),
        };
        let size = scratch.len().min(args.size as usize);
        let mut entries = Entries::new(&mut scratch[..size]);
        let result = directory.listing.lock().read(args.offset, |entry| {
            let fits = entries.fits(entry.name, false);
            if fits {
                entries.push(None, entry, directory.inode.device.show_inode(entry.inode));
            }
            fits
        });
        let data = entries.finish();
        match result {
            Err(errno) if data.is_empty() => reply.error(errno),
            _ => reply.data(data),
        }
    }

    /// For a looker each entry comes with a lookup, which counts only if the kernel gets it: the
    /// entry must fit before it is looked up, and an answer that is not taken takes its lookups
    /// back.
    fn readdirplus(&self, reply: Reply<'_>, task: u32, args: &abi::ReadIn, scratch: &mut [u8]) -> Result<(), Errno> {
        let directory = match self.handles.directory(args.fh) {
            Ok(directory) => directory,
            Err(errno) => return reply.error(errno),
        };
        let size = scratch.len().min(args.size as usize);
        let mut entries = Entries::new(&mut scratch[..size]);
        let mut given = Vec::new();
        let looks = self.lookers.lists(task, directory.inode.nodeid, args.offset);
        let result = directory.listing.lock().read(args.offset, |entry| {
            if !entries.fits(entry.name, true) {
                return false;
            }
            // An entry without a node is one that the kernel looks up itself when it needs it.
            let mut out = abi::EntryOut::default();
            if looks && self.has_room_for_names() && entry.name != c"." && entry.name != c".." {
                match self.lookup_listed(&directory.inode, entry.name) {
                    Ok(found) => out = found.unwrap_or_default(),
                    Err(Errno::NOENT) => return true,
                    Err(_) => {}
                }
            }
            if out.nodeid != 0 {
                given.push(out.nodeid);
            }
            entries.push(Some(&out), entry, directory.inode.device.show_inode(entry.inode));
            true
        });
        let data = entries.finish();
        let sent = match result {
            Err(errno) if data.is_empty() => reply.error(errno),
            _ => reply.data(data),
        };
        if sent.is_err() {
            given.into_iter().for_each(|node| self.forget(node, 1));
        }
        sent
    }

    fn fsyncdir(&self, args: &abi::FsyncIn) -> Result<(), Errno> {
        let directory = self.handles.directory(args.fh)?;
        let fd = directory.listing.lock().fd().clone();
        if args.fsync_flags & abi::FSYNC_FDATASYNC != 0 { rustix::fs::fdatasync(fd) } else { rustix::fs::fsync(fd) }
    }

    fn answer_entry(&self, reply: Reply<'_>, result: Result<abi::EntryOut, Errno>) -> Result<(), Errno> {
        match result {
            Ok(entry) => reply.value(&entry).inspect_err(|_| self.forget(entry.nodeid, 1)),
            Err(errno) => reply.error(errno),
        }
    }

    fn answer_open(&self, reply: Reply<'_>, result: Result<abi::OpenOut, Errno>) -> Result<(), Errno> {
        match result {
            Ok(open) => reply.value(&open).inspect_err(|_| self.handles.remove(open.fh)),
            Err(errno) => reply.error(errno),
        }
    }

    fn answer_create(
        &self,
        reply: Reply<'_>,
        result: Result<(abi::EntryOut, abi::OpenOut), Errno>,
    ) -> Result<(), Errno> {
        use zerocopy::IntoBytes;
        match result {
            Ok((entry, open)) => reply.parts(&[entry.as_bytes(), open.as_bytes()]).inspect_err(|_| {
                self.handles.remove(open.fh);
                self.forget(entry.nodeid, 1);
            }),
            Err(errno) => reply.error(errno),
        }
    }

    fn answer_xattr(
        &self,
        reply: Reply<'_>,
        asked: u32,
        result: Result<usize, Errno>,
        scratch: &[u8],
    ) -> Result<(), Errno> {
        match result {
            Ok(len) if asked == 0 => reply.value(&abi::GetxattrOut { size: len as u32, padding: 0 }),
            Ok(len) if len > asked as usize => reply.error(Errno::RANGE),
            Ok(len) => reply.data(&scratch[..len]),
            Err(errno) => reply.error(errno),
        }
    }

    fn answer_ioctl(
        &self,
        reply: Reply<'_>,
        args: &abi::IoctlIn,
        result: Result<[u8; 64], Errno>,
    ) -> Result<(), Errno> {
        use zerocopy::IntoBytes;
        match result {
            Ok(data) => {
                let len = data.len().min(args.out_size as usize);
                reply.parts(&[abi::IoctlOut::default().as_bytes(), &data[..len]])
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn answer_copy(&self, reply: Reply<'_>, wide: bool, result: Result<u64, Errno>) -> Result<(), Errno> {
        match result {
            Ok(bytes_copied) if wide => reply.value(&abi::CopyFileRangeOut { bytes_copied }),
            Ok(bytes_copied) => reply.value(&abi::WriteOut { size: bytes_copied as u32, padding: 0 }),
            Err(errno) => reply.error(errno),
        }
    }

    /// A user opens a file or directory: one more descriptor. For `charge` see
    /// [`Descriptors::take`](crate::descriptors::Descriptors::take).
    ///
    /// # Errors
    /// EMFILE beyond the user's share, or if none is left.
    pub(crate) fn take_descriptor(&self, uid: u32, charge: usize) -> Result<Taken, Errno> {
        let taken = self.inodes.descriptors().take(uid, charge)?;
        self.make_room();
        if self.inodes.descriptors().is_exhausted() { Err(Errno::MFILE) } else { Ok(taken) }
    }

    /// Whether a listing may make inodes known that nobody has asked for yet.
    fn has_room_for_names(&self) -> bool {
        !self.inodes.needs_forgets() || self.inodes.descriptors().tight().is_none()
    }

    /// Has inodes give back descriptors if few are left. Where none is left, it waits a little for
    /// the kernel to forget some.
    pub(crate) fn make_room(&self) {
        let descriptors = self.inodes.descriptors();
        let Some(count) = descriptors.tight() else { return };
        if !self.inodes.needs_forgets() {
            return; // Those that can be given back are, when it is needed.
        }
        if self.invalidations.may_request_forget() {
            let nodes = self.inodes.make_room(count);
            match self.invalidations.can_prune() {
                true => self.invalidations.request_forget(nodes),
                false => nodes.into_iter().for_each(|node| self.drop_name(node)),
            }
        }
        if descriptors.is_exhausted() {
            fuse::about_to_wait();
            descriptors.wait_for_room(FORGET_WAIT);
        }
    }

    /// Has the kernel drop the name of a file that it believes for long, and with that forget the
    /// file. Not of a directory, as somebody may have mounted something there, which would go with
    /// the name.
    fn drop_name(&self, node: u64) {
        let Ok(inode) = self.inodes.get(node) else { return };
        if let Some(name) = inode.name_to_drop() {
            self.invalidations.request_name(&inode, name);
        }
    }

    pub(crate) fn forget(&self, node: u64, lookups: u64) {
        let Some(inode) = self.inodes.forget(node, lookups) else { return };
        self.beside.forgotten(&inode, &self.inodes);
        if inode.is_deleted() || inode.charge() > 1 && !self.has_room_for_names() {
            self.ledger.remove(node); // It would hold the inode's descriptor.
        }
        self.inodes.give_back(&inode);
    }
}

fn answer<T: zerocopy::IntoBytes + zerocopy::Immutable>(
    reply: Reply<'_>,
    result: Result<T, Errno>,
) -> Result<(), Errno> {
    match result {
        Ok(value) => reply.value(&value),
        Err(errno) => reply.error(errno),
    }
}

fn answer_done(reply: Reply<'_>, result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

fn creator(request: &Request<'_>, umask: u32) -> Creator {
    Creator {
        uid: request.header.uid,
        gid: request.header.gid,
        umask,
        supplementary_group: request.supplementary_group,
    }
}
