//! Calls the function for each operation, and sends its answer.

use super::closed;
use super::credentials::{Caller, Creator};
use crate::filesystem::Passthrough;
use crate::takeover::replay::Attempt;
use fuse::{Errno, Operation, Reply, Request, abi};

impl Passthrough {
    /// Handles one request, and answers it.
    pub(crate) fn dispatch(
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
                self.readdirplus_hints.looks_up(task, node);
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
            // A worker does not wait for the lease of another process: the open fails if the caller
            // used O_NONBLOCK, and is postponed otherwise. Only if too many opens are postponed, a
            // worker waits.
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
