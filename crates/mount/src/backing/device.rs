//! The devices below SOURCE: SOURCE's own, and those of file systems mounted in it.
//!
//! All of them appear as one device, so inode numbers of the others are moved out of the way. What
//! a device's file system can do (reading without leaving pages behind) is found out per device, by
//! trying.

use crate::backing::crossing::Forbids;
use crate::backing::reserve::Reserve;
use crate::takeover::memory::Memory;
use hashbrown::HashMap;
use parking_lot::RwLock;
use rustix::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

/// Bits of an inode number that stay the file's own; file systems that exist use fewer.
const INODE_BITS: u32 = 48;

/// How to read below without leaving pages behind in the page cache there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum ReadWay {
    /// preadv2 with RWF_DONTCACHE (Linux 6.14 and newer).
    DontCache = 0,
    /// A descriptor with O_DIRECT and aligned buffers.
    Direct = 1,
    /// A plain read, and POSIX_FADV_DONTNEED behind it.
    Advise = 2,
}

/// File systems on a disk of this machine, or in its memory (linux/magic.h). Others write when a
/// file is closed, and may fail; and may be changed by other machines.
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
    way: AtomicU8,
    is_local: OnceLock<bool>,
    /// Files cannot share blocks (reflink): one try has failed for that reason.
    shares_nothing: AtomicBool,
    forbids: AtomicU8,
    /// What its file system keeps for root.
    pub reserve: Reserve,
}

impl Device {
    /// The inode number shown for `inode` of this device.
    pub(crate) fn show_inode(&self, inode: u64) -> u64 {
        if self.index == 0 {
            return inode;
        }
        // Numbers that are too long are folded, at the risk of a collision, which costs no more
        // than a confused `find`.
        let folded = (inode ^ (inode >> INODE_BITS).wrapping_mul(0x9e37_79b9_7f4a)) & ((1 << INODE_BITS) - 1);
        folded | self.index << INODE_BITS
    }

    /// Tells it from the others. Not 0.
    pub(crate) fn number(&self) -> u32 {
        self.index as u32 + 1
    }

    /// Whether it is SOURCE's own.
    pub(crate) fn is_source(&self) -> bool {
        self.index == 0
    }

    /// Whether closing a file of it, such as this one, tells nothing.
    pub(crate) fn closes_silently(&self, file: impl AsFd) -> bool {
        self.is_local(file)
    }

    /// Whether nobody else can change its files, of which this is one.
    pub(crate) fn is_local(&self, file: impl AsFd) -> bool {
        *self.is_local.get_or_init(|| is_local(file))
    }

    /// Whether files may be able to share blocks.
    pub(crate) fn may_share_blocks(&self) -> bool {
        !self.shares_nothing.load(Ordering::Relaxed)
    }

    /// Files cannot share blocks: do not try again.
    pub(crate) fn cannot_share_blocks(&self) {
        self.shares_nothing.store(true, Ordering::Relaxed);
    }

    /// What its mounts below SOURCE forbid.
    pub(crate) fn forbids(&self) -> Forbids {
        Forbids::from_bits(self.forbids.load(Ordering::Relaxed))
    }

    /// From now on its mounts forbid this.
    pub(crate) fn set_forbids(&self, forbids: Forbids) {
        self.forbids.store(forbids.bits(), Ordering::Relaxed);
    }

    /// The best way of reading that has not failed yet.
    pub(crate) fn read_way(&self) -> ReadWay {
        match self.way.load(Ordering::Relaxed) {
            0 => ReadWay::DontCache,
            1 => ReadWay::Direct,
            _ => ReadWay::Advise,
        }
    }

    /// That way does not work here: use the next one from now on.
    pub(crate) fn give_up(&self, way: ReadWay) {
        self.way.fetch_max(way as u8 + 1, Ordering::Relaxed);
    }
}

/// Whether a file is of a file system that nobody else can change.
pub(crate) fn is_local(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| LOCAL.contains(&(found.f_type as u32)))
}

/// All devices seen.
pub(crate) struct Devices {
    by_number: RwLock<HashMap<u64, Arc<Device>>>,
    /// Where they are written down, so that a successor shows the same inode numbers.
    memory: Option<Arc<Memory>>,
}

impl Devices {
    /// With SOURCE's own device first, whose inode numbers stay as they are, and others in the
    /// order in which they were seen.
    pub(crate) fn new(seen: &[u64], memory: Option<Arc<Memory>>) -> Devices {
        let devices = Devices { by_number: RwLock::new(HashMap::new()), memory };
        seen.iter().for_each(|number| drop(devices.get(*number)));
        devices
    }

    /// The device of that number (`st_dev`).
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
            let way = AtomicU8::new(ReadWay::DontCache as u8);
            Arc::new(Device {
                index,
                way,
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
        assert_eq!(device.read_way(), ReadWay::DontCache);
        device.give_up(ReadWay::Direct);
        device.give_up(ReadWay::DontCache);
        assert_eq!(device.read_way(), ReadWay::Advise);
    }
}
