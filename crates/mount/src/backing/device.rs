//! The devices of the backing files: SOURCE's own, and those of file systems mounted in it.
//!
//! All of them appear as one device, so the inode numbers of the others are changed to avoid
//! collisions. The daemon finds out by trying how each device can be read without leaving pages
//! behind.

use crate::backing::crossing::Forbids;
use crate::backing::reserve::Reserve;
use crate::takeover::memory::Memory;
use hashbrown::HashMap;
use parking_lot::RwLock;
use rustix::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

/// Low bits of an inode number that stay unchanged; existing file systems use fewer.
const INODE_BITS: u32 = 48;

/// How to read a backing file without leaving pages in its page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum ReadMethod {
    /// preadv2 with RWF_DONTCACHE (Linux 6.14 and newer).
    DontCache = 0,
    /// A descriptor with O_DIRECT and aligned buffers.
    Direct = 1,
    /// A plain read, and POSIX_FADV_DONTNEED behind it.
    Advise = 2,
}

/// File systems on a disk of this machine, or in its memory (linux/magic.h). Other file systems may
/// be changed by other machines, and may write when a file is closed, which can fail.
const LOCAL: [u32; 5] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0xf2f5_2010, // F2FS
    0x0102_1994, // tmpfs
];

/// One device.
pub(crate) struct Device {
    index: u64,
    method: AtomicU8,
    is_local: OnceLock<bool>,
    /// Whether files cannot share blocks (reflink): an attempt has failed for that reason.
    shares_nothing: AtomicBool,
    forbids: AtomicU8,
    /// Blocks that its file system reserves for root.
    pub reserve: Reserve,
}

impl Device {
    /// The inode number shown for `inode` of this device.
    pub(crate) fn show_inode(&self, inode: u64) -> u64 {
        if self.index == 0 {
            return inode;
        }
        // Numbers that are too long are folded. A collision is possible, and confuses no more than
        // `find`.
        let folded = (inode ^ (inode >> INODE_BITS).wrapping_mul(0x9e37_79b9_7f4a)) & ((1 << INODE_BITS) - 1);
        folded | self.index << INODE_BITS
    }

    /// A number that identifies this device among the others. Never 0.
    pub(crate) fn number(&self) -> u32 {
        self.index as u32 + 1
    }

    /// Whether this is SOURCE's own device.
    pub(crate) fn is_source(&self) -> bool {
        self.index == 0
    }

    /// Whether close(2) of a file on this device, such as `file`, has no effect and cannot fail.
    pub(crate) fn closes_silently(&self, file: impl AsFd) -> bool {
        self.is_local(file)
    }

    /// Whether no other machine can change the files of this device; `file` is one of them.
    pub(crate) fn is_local(&self, file: impl AsFd) -> bool {
        *self.is_local.get_or_init(|| is_local(file))
    }

    /// Whether files may be able to share blocks.
    pub(crate) fn may_share_blocks(&self) -> bool {
        !self.shares_nothing.load(Ordering::Relaxed)
    }

    /// Records that files cannot share blocks, so that this is not tried again.
    pub(crate) fn cannot_share_blocks(&self) {
        self.shares_nothing.store(true, Ordering::Relaxed);
    }

    /// The restrictions of its mounts within SOURCE.
    pub(crate) fn forbids(&self) -> Forbids {
        Forbids::from_bits(self.forbids.load(Ordering::Relaxed))
    }

    /// Sets the restrictions of its mounts.
    pub(crate) fn set_forbids(&self, forbids: Forbids) {
        self.forbids.store(forbids.bits(), Ordering::Relaxed);
    }

    /// The best read method that has not failed yet.
    pub(crate) fn read_method(&self) -> ReadMethod {
        match self.method.load(Ordering::Relaxed) {
            0 => ReadMethod::DontCache,
            1 => ReadMethod::Direct,
            _ => ReadMethod::Advise,
        }
    }

    /// Records that this read method does not work here. The next one is used from now on.
    pub(crate) fn give_up(&self, method: ReadMethod) {
        self.method.fetch_max(method as u8 + 1, Ordering::Relaxed);
    }
}

/// Whether a file is on a file system that no other machine can change.
pub(crate) fn is_local(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| LOCAL.contains(&(found.f_type as u32)))
}

/// All devices that were seen.
pub(crate) struct Devices {
    by_number: RwLock<HashMap<u64, Arc<Device>>>,
    /// The state memory that records them, so that a successor shows the same inode numbers.
    memory: Option<Arc<Memory>>,
}

impl Devices {
    /// Creates the list. `seen` begins with SOURCE's own device, whose inode numbers stay
    /// unchanged. The others follow in the order in which they were seen.
    pub(crate) fn new(seen: &[u64], memory: Option<Arc<Memory>>) -> Devices {
        let devices = Devices { by_number: RwLock::new(HashMap::new()), memory };
        seen.iter().for_each(|number| drop(devices.get(*number)));
        devices
    }

    /// The device with this number (`st_dev`).
    pub(crate) fn get(&self, number: u64) -> Arc<Device> {
        if let Some(device) = self.by_number.read().get(&number) {
            return device.clone();
        }
        let mut devices = self.by_number.write();
        if let (false, Some(memory)) = (devices.contains_key(&number), &self.memory) {
            memory.record_device(devices.len(), number);
        }
        let index = devices.len() as u64 & ((1 << (64 - INODE_BITS)) - 1);
        let make = || {
            let method = AtomicU8::new(ReadMethod::DontCache as u8);
            Arc::new(Device {
                index,
                method,
                is_local: OnceLock::new(),
                reserve: Reserve::new(),
                shares_nothing: AtomicBool::new(false),
                forbids: AtomicU8::new(0),
            })
        };
        devices.entry(number).or_insert_with(make).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inode_numbers_of_other_devices_do_not_collide() {
        let devices = Devices::new(&[7], None);
        assert_eq!(devices.get(7).show_inode(42), 42);
        assert_ne!(devices.get(8).show_inode(42), 42);
        assert_ne!(devices.get(8).show_inode(42), devices.get(9).show_inode(42));
        assert_eq!(devices.get(8).show_inode(42), devices.get(8).show_inode(42));
    }

    #[test]
    fn a_way_given_up_is_not_tried_again() {
        let device = Devices::new(&[7], None).get(7);
        assert_eq!(device.read_method(), ReadMethod::DontCache);
        device.give_up(ReadMethod::Direct);
        device.give_up(ReadMethod::DontCache);
        assert_eq!(device.read_method(), ReadMethod::Advise);
    }
}
