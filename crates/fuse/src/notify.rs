//! Messages to the kernel that are not answers, such as: drop cached pages.
//!
//! Never call these while a request is being handled. The kernel takes locks (of the inode, its
//! pages, the parent directory) that the request's caller may hold until it has its answer. Use a
//! thread of their own. The exception is dropping the attributes of an object that the caller
//! holds: that takes no lock.

use crate::Errno;
use crate::abi::{self, notify_code};
use crate::reply::{send, send_unreadable};
use crate::session::PAGE_BYTES;
use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Sends notifications. ENOENT from any of them means that the kernel does not cache the object,
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

    /// Drops the attributes, and the cached pages that hold bytes `offset..offset + len`. A `len`
    /// of 0 means to the end of the file. With a negative `offset`, drops only the attributes.
    pub fn inval_inode(&self, nodeid: u64, offset: i64, len: i64) -> Result<(), Errno> {
        let out = abi::NotifyInvalInodeOut { ino: nodeid, off: offset, len };
        self.send(notify_code::INVAL_INODE, &[out.as_bytes()])
    }

    /// Drops a name. With `expire_only` the name stays, and is looked up again at its next use.
    pub fn inval_entry(&self, parent: u64, name: &CStr, expire_only: bool) -> Result<(), Errno> {
        let flags = if expire_only { abi::EXPIRE_ONLY } else { 0 };
        let out = abi::NotifyInvalEntryOut { parent, namelen: name.count_bytes() as u32, flags };
        self.send(notify_code::INVAL_ENTRY, &[out.as_bytes(), name.to_bytes_with_nul()])
    }

    /// Gives the kernel this size of a file, in bytes, if the kernel has a smaller one. Stores
    /// nothing in its cache, and drops nothing.
    ///
    /// The message announces bytes for the cache that the kernel cannot read. The kernel moves the
    /// end before it tries to read them (fs/fuse/dev.c, `fuse_notify_store`; 6.1 to 6.18), and then
    /// returns EFAULT. Meanwhile it locks the first page of these bytes. So it waits for the holder
    /// of this page's lock, as it does when it drops pages. The page is the one before the last,
    /// because an appending writer may hold the lock of the last page.
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

    /// Reports that the name, which belonged to `child`, was deleted.
    pub fn delete(&self, parent: u64, child: u64, name: &CStr) -> Result<(), Errno> {
        let out = abi::NotifyDeleteOut { parent, child, namelen: name.count_bytes() as u32, padding: 0 };
        self.send(notify_code::DELETE, &[out.as_bytes(), name.to_bytes_with_nul()])
    }

    /// Makes the kernel forget those of these nodes that are not in use (Linux 6.18, minor version
    /// [`abi::PRUNE_MINOR`]; EINVAL before). At most [`abi::PRUNE_NODES_MAX`] nodes.
    pub fn prune(&self, nodes: &[u64]) -> Result<(), Errno> {
        let nodes = &nodes[..nodes.len().min(abi::PRUNE_NODES_MAX)];
        let out = abi::NotifyPruneOut { count: nodes.len() as u32, padding: 0, spare: 0 };
        self.send(notify_code::PRUNE, &[out.as_bytes(), nodes.as_bytes()])
    }

    /// Requests again all requests that were read but not answered (after a takeover; needs
    /// HAS_RESEND).
    pub fn resend(&self) -> Result<(), Errno> {
        self.send(notify_code::RESEND, &[])
    }
}
