//! Blocks that a backing file system reserves for root (ext2 to ext4, F2FS): only root may take
//! them through the mount, too.
//!
//! The file system goes by the user id of the thread that writes. To change it twice for each write
//! takes 5 µs (Linux 6.18), which is a quarter of a small write. So that is done only while little
//! is left for everybody.

use crate::ops::credentials::{NOBODY, Privilege};
use crate::system;
use fuse::abi;
use rustix::fd::AsFd;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// With so much left for everybody, in bytes, it does not matter who writes. Nobody fills it up
/// within [`LOOK_PERIOD`].
const PLENTY_BYTES: i64 = 1 << 30;
/// How long it is believed how much is left.
const LOOK_PERIOD: Duration = Duration::from_millis(100);

/// How near the reserve of a file system is.
pub(crate) struct Reserve {
    began: Instant,
    /// When to look again, in milliseconds since then.
    look_at_ms: AtomicU64,
    /// What was left for everybody, in bytes, less what was written since.
    left_bytes: AtomicI64,
}

impl Reserve {
    /// Of one that was not looked at yet.
    pub(crate) fn new() -> Reserve {
        Reserve { began: Instant::now(), look_at_ms: AtomicU64::new(0), left_bytes: AtomicI64::new(0) }
    }

    /// Whether a change that takes `bytes` more at the most, in a file of that file system, may
    /// come to the reserve.
    fn is_near(&self, file: impl AsFd, bytes: u64) -> bool {
        let now_ms = self.began.elapsed().as_millis() as u64;
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let left_bytes = self.left_bytes.fetch_sub(bytes.min(PLENTY_BYTES), Ordering::Relaxed);
        if now_ms < self.look_at_ms.load(Ordering::Relaxed) && left_bytes.saturating_sub(bytes) >= PLENTY_BYTES {
            return false;
        }
        self.look_at_ms.store(now_ms + LOOK_PERIOD.as_millis() as u64, Ordering::Relaxed);
        let left_bytes = match rustix::fs::fstatvfs(file) {
            Ok(found) if found.f_bfree <= found.f_bavail => i64::MAX, // It has none.
            Ok(found) => i64::try_from(found.f_bavail.saturating_mul(found.f_frsize)).unwrap_or(i64::MAX),
            Err(_) => 0,
        };
        self.left_bytes.store(left_bytes.saturating_sub(bytes.min(PLENTY_BYTES)), Ordering::Relaxed);
        left_bytes.saturating_sub(bytes) < PLENTY_BYTES
    }
}

/// While this guard lives, this thread takes blocks as a user takes them.
#[must_use]
pub(crate) struct Spending {
    switches: bool,
}

impl Spending {
    /// A guard for a change of `file` that a user makes, and that takes `bytes` more at the most. A
    /// user whom the kernel does not name is not root.
    pub(crate) fn begin(privilege: Privilege, uid: u32, reserve: &Reserve, file: impl AsFd, bytes: u64) -> Spending {
        let switches = privilege == Privilege::Root && uid != 0 && reserve.is_near(file, bytes);
        Spending::of(if uid == abi::INVALID_ID { NOBODY } else { uid }, switches)
    }

    /// A guard for changes that the kernel will make for anybody.
    pub(crate) fn for_anybody() -> Spending {
        Spending::of(NOBODY, true)
    }

    fn of(uid: u32, switches: bool) -> Spending {
        if switches {
            system::set_thread_fsuid(uid);
        }
        Spending { switches }
    }
}

impl Drop for Spending {
    fn drop(&mut self) {
        if self.switches {
            system::set_thread_fsuid(0);
        }
    }
}
