//! Messages to the kernel that are not answers: drop what you cache.
//!
//! Never call these inside the handling of a request: the kernel takes locks (of the inode, its
//! pages, the parent directory) that the request's caller may hold until it has its answer. Use a
//! thread of their own. The exception is the attributes of what the caller holds: nothing is waited
//! for to forget them.

use crate::Errno;
use crate::abi::{self, notify_code};
use crate::reply::{send, send_unreadable};
use crate::session::PAGE_BYTES;
use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Sends notifications. ENOENT from any of them means that the kernel does not cache the thing,
/// which is as good as success.
#[derive(Clone)]
pub struct Notifier {
    device: Arc<OwnedFd>,
}

impl Notifier {
    pub(crate) fn new(device: Arc<OwnedFd>) -> Notifier {
        Notifier { device }
    }

    fn send(&self, code: i32, parts: &[&[u8]]) -> Result<(), Errno> {
        send(self.device.as_fd(), 0, code, parts)
    }

    /// Drops the attributes and the cached pages that hold bytes `offset..offset + len`; a `len` of
    /// 0 means to the end. With a negative `offset`, only the attributes.
    pub fn inval_inode(&self, nodeid: u64, offset: i64, len: i64) -> Result<(), Errno> {
        let out = abi::NotifyInvalInodeOut { ino: nodeid, off: offset, len };
        self.send(notify_code::INVAL_INODE, &[out.as_bytes()])
    }

    /// Drops a name; with `expire_only` it is looked up again at its next use, but stays.
    pub fn inval_entry(&self, parent: u64, name: &CStr, expire_only: bool) -> Result<(), Errno> {
        let flags = if expire_only { abi::EXPIRE_ONLY } else { 0 };
        let out = abi::NotifyInvalEntryOut { parent, namelen: name.count_bytes() as u32, flags };
        self.send(notify_code::INVAL_ENTRY, &[out.as_bytes(), name.to_bytes_with_nul()])
    }

    /// Has the kernel believe in this end of a file, in bytes, if it believes in an earlier one.
    /// Stores nothing in its cache, and drops nothing.
    ///
    /// The message says that bytes follow, for the cache, which the kernel cannot read. It moves
    /// the end before it tries (fs/fuse/dev.c, `fuse_notify_store`; 6.1 to 6.18), and then returns
    /// EFAULT. Meanwhile it locks the first page of these bytes: so it waits for what holds this
    /// page locked, as for dropping pages. It is the page before the last, because whoever appends
    /// may hold that locked.
    pub fn move_end(&self, nodeid: u64, size_bytes: u64) -> Result<(), Errno> {
        let len = size_bytes.min(PAGE_BYTES as u64 + 1) as u32;
        if len == 0 {
            return Ok(());
        }
        let out = abi::NotifyStoreOut { nodeid, offset: size_bytes - u64::from(len), size: len, padding: 0 };
        match send_unreadable(self.device.as_fd(), notify_code::STORE, out.as_bytes(), len as usize) {
            Err(Errno::FAULT) => Ok(()),
            result => result,
        }
    }

    /// Tells that the name, which belonged to `child`, was deleted.
    pub fn delete(&self, parent: u64, child: u64, name: &CStr) -> Result<(), Errno> {
        let out = abi::NotifyDeleteOut { parent, child, namelen: name.count_bytes() as u32, padding: 0 };
        self.send(notify_code::DELETE, &[out.as_bytes(), name.to_bytes_with_nul()])
    }

    /// Has the kernel forget the nodes among these that nobody uses (Linux 6.18, minor version
    /// [`abi::PRUNE_MINOR`]; EINVAL before). At most [`abi::PRUNE_NODES_MAX`] of them.
    pub fn prune(&self, nodes: &[u64]) -> Result<(), Errno> {
        let nodes = &nodes[..nodes.len().min(abi::PRUNE_NODES_MAX)];
        let out = abi::NotifyPruneOut { count: nodes.len() as u32, padding: 0, spare: 0 };
        self.send(notify_code::PRUNE, &[out.as_bytes(), nodes.as_bytes()])
    }

    /// Asks for all requests again that were read but not answered (after a takeover; needs
    /// HAS_RESEND).
    pub fn resend(&self) -> Result<(), Errno> {
        self.send(notify_code::RESEND, &[])
    }
}
