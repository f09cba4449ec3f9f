//! Mount points within SOURCE that are not crossed into. They appear as empty, closed directories
//! (or files), and nothing of them is opened.
//!
//! The id of such a node is computed from its parent's id and its name. So no state is kept, and a
//! successor computes the same id. Looking up a name in it, opening it as a file, and each change
//! fail with EXDEV, and one log line explains this. After the file system is unmounted, the next
//! lookup finds the directory itself.

use crate::filesystem::Passthrough;
use crate::inode::Inode;
use crate::ops::directories::{Entries, Entry};
use crate::system::{FileHandle, ProcPath};
use fuse::{Errno, Operation, Reply, Request, abi};
use rustix::fs::{AtFlags, FileType, StatxFlags, statx};
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Ids with this bit are those of closed nodes. The other nodes are counted from 1 on.
const CLOSED: u64 = 1 << 63;
/// Of these, the ids of what is no directory.
const FILE: u64 = 1 << 62;
/// Inode numbers are shown in the last of the ranges that the backing devices have (see
/// `backing/device.rs`).
const INODES: u64 = 0xffff << 48;

fn is_closed(node: u64) -> bool {
    node & CLOSED != 0
}

/// Whether a request is about a closed node.
pub(crate) fn is_about(request: &Request<'_>) -> bool {
    let other = match request.operation {
        Operation::Rename { new_parent, .. } => new_parent,
        Operation::Link { node, .. } => node,
        _ => 0,
    };
    is_closed(request.header.nodeid | other)
}

fn attributes(node: u64) -> abi::Attr {
    let (kind, links) = if node & FILE == 0 { (FileType::Directory, 2) } else { (FileType::RegularFile, 1) };
    abi::Attr {
        ino: node | INODES,
        mode: kind.as_raw_mode() | if links == 2 { 0o555 } else { 0o444 },
        nlink: links,
        blksize: 4096,
        ..Default::default()
    }
}

impl Passthrough {
    /// The answer to a lookup of a mount point that is not crossed into.
    pub(crate) fn closed_entry(&self, parent: &Inode, name: &CStr) -> Result<abi::EntryOut, Errno> {
        let anchor = self.inodes.anchor(parent)?;
        let path = std::fs::read_link(OsStr::from_bytes(ProcPath::new(&anchor).path().to_bytes()));
        self.crossing.log(&path.unwrap_or_else(|_| PathBuf::new()).join(OsStr::from_bytes(name.to_bytes())));
        // Of a file system that waits for us nothing may be asked: its type is known without. One
        // that tells nothing is a directory.
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
        let kind =
            statx(&anchor, name, flags, StatxFlags::TYPE).map(|found| FileType::from_raw_mode(found.stx_mode.into()));
        let kind = if matches!(kind, Ok(kind) if kind != FileType::Directory) { FILE } else { 0 };
        let hash = FileHandle::hash_of(parent.nodeid as i32, name.to_bytes()) ^ parent.nodeid.rotate_left(40);
        let nodeid = CLOSED | kind | (hash & !(CLOSED | FILE));
        Ok(abi::EntryOut {
            nodeid,
            generation: 0,
            entry_valid: self.attr_timeout.as_secs(),
            attr_valid: self.attr_timeout.as_secs(),
            entry_valid_nsec: self.attr_timeout.subsec_nanos(),
            attr_valid_nsec: self.attr_timeout.subsec_nanos(),
            attr: attributes(nodeid),
        })
    }

    /// Answers a request about a closed node.
    pub(crate) fn answer_closed(
        &self,
        request: &Request<'_>,
        reply: Reply<'_>,
        scratch: &mut [u8],
    ) -> Result<(), Errno> {
        let node = request.header.nodeid;
        let attr = attributes(node);
        let (attr_valid, attr_valid_nsec) = (self.attr_timeout.as_secs(), self.attr_timeout.subsec_nanos());
        match request.operation {
            Operation::Forget { .. } => {
                reply.none();
                Ok(())
            }
            Operation::Getattr(_) => reply.value(&abi::AttrOut { attr_valid, attr_valid_nsec, dummy: 0, attr }),
            Operation::Statx(_) => reply.value(&abi::StatxOut {
                attr_valid,
                attr_valid_nsec,
                stat: abi::Statx {
                    mask: StatxFlags::BASIC_STATS.bits(),
                    blksize: attr.blksize,
                    nlink: attr.nlink,
                    mode: attr.mode as u16,
                    ino: attr.ino,
                    ..Default::default()
                },
                ..Default::default()
            }),
            Operation::Opendir(_) => reply.value(&abi::OpenOut::default()),
            Operation::Readdir(args) => reply.data(listing(node, &args, scratch, false)),
            Operation::Readdirplus(args) => reply.data(listing(node, &args, scratch, true)),
            Operation::Releasedir(_) | Operation::Fsyncdir(_) => reply.ok(),
            Operation::Statfs => match self.statfs(abi::ROOT_ID) {
                Ok(found) => reply.value(&found),
                Err(errno) => reply.error(errno),
            },
            Operation::Getxattr { .. } => reply.error(Errno::NODATA),
            Operation::Listxattr { size: 0 } => reply.value(&abi::GetxattrOut { size: 0, padding: 0 }),
            Operation::Listxattr { .. } => reply.data(&[]),
            Operation::Access(_) | Operation::Interrupt(_) => reply.error(Errno::NOSYS),
            _ => reply.error(Errno::XDEV),
        }
    }
}

/// An empty directory.
fn listing<'a>(node: u64, args: &abi::ReadIn, scratch: &'a mut [u8], plus: bool) -> &'a [u8] {
    let size = scratch.len().min(args.size as usize);
    let mut entries = Entries::new(&mut scratch[..size]);
    let none = abi::EntryOut::default();
    for (offset, name) in [c".", c".."].into_iter().enumerate() {
        if offset as u64 >= args.offset && entries.fits(name, plus) {
            let kind = u32::from(libc::DT_DIR);
            let entry = Entry { inode: node | INODES, next_offset: offset as u64 + 1, kind, name };
            entries.push(plus.then_some(&none), &entry, entry.inode);
        }
    }
    entries.finish()
}
