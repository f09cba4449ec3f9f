//! Blocks that a backing file system reserves for root (ext2 to ext4, F2FS): only root may take
//! them through the mount, too.
//!
//! The file system checks the user id of the writing thread. Changing that id twice for each write
//! takes 5 µs (Linux 6.18), a quarter of the time of a small write. So the id is changed only while
//! few unreserved blocks are left.

use crate::ops::credentials::{NOBODY, Privilege};
use crate::system;
use fuse::abi;
use rustix::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// With so many unreserved bytes left, the user id of a writer does not matter: nobody fills them
/// within [`LOOK_PERIOD`].
const PLENTY_BYTES: u64 = 1 << 30;
/// How long a measurement of the free space is used.
const LOOK_PERIOD: Duration = Duration::from_millis(100);

/// How near the reserve of a file system is.
pub(crate) struct Reserve {
    began: Instant,
    /// Time of the next measurement, in milliseconds since `begun`.
    look_at_ms: AtomicU64,
    /// Unreserved bytes that were left, minus the bytes written since.
    left_bytes: AtomicU64,
}

impl Reserve {
    /// The state of a file system that was not measured yet.
    pub(crate) fn new() -> Reserve {
        Reserve { began: Instant::now(), look_at_ms: AtomicU64::new(0), left_bytes: AtomicU64::new(0) }
    }

    /// Whether a change of `file` that needs at most `bytes` more may reach the reserve.
    fn is_near(&self, file: impl AsFd, bytes: u64) -> bool {
        let now_ms = self.began.elapsed().as_millis() as u64;
        let mut left_bytes = self.spend(bytes);
        if left_bytes < PLENTY_BYTES || now_ms >= self.look_at_ms.load(Ordering::Relaxed) {
            self.look_at_ms.store(now_ms + LOOK_PERIOD.as_millis() as u64, Ordering::Relaxed);
            self.left_bytes.store(unreserved_bytes(file), Ordering::Relaxed);
            left_bytes = self.spend(bytes);
        }
        left_bytes < PLENTY_BYTES
    }

    /// Subtracts bytes that will be written. Returns the number of bytes that are left.
    fn spend(&self, bytes: u64) -> u64 {
        let rest = |left_bytes: u64| left_bytes.saturating_sub(bytes);
        let (Ok(before) | Err(before)) =
            self.left_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left_bytes| Some(rest(left_bytes)));
        rest(before)
    }
}

/// Returns the unreserved bytes that are left in the file system of `file`: unlimited if it has no
/// reserve, and 0 if it does not tell.
fn unreserved_bytes(file: impl AsFd) -> u64 {
    match rustix::fs::fstatvfs(file) {
        Ok(found) if found.f_bfree <= found.f_bavail => u64::MAX,
        Ok(found) => found.f_bavail.saturating_mul(found.f_frsize),
        Err(_) => 0,
    }
}

/// While this guard lives, this thread cannot take reserved blocks.
#[must_use]
pub(crate) struct Spending {
    switches: bool,
}

impl Spending {
    /// Creates a guard for a user's change of `file`, which needs at most `bytes` more. If the
    /// kernel does not name the user, it is not root.
    pub(crate) fn begin(privilege: Privilege, uid: u32, reserve: &Reserve, file: impl AsFd, bytes: u64) -> Spending {
        let switches = privilege == Privilege::Root && uid != 0 && reserve.is_near(file, bytes);
        Spending::of(if uid == abi::INVALID_ID { NOBODY } else { uid }, switches)
    }

    /// Creates a guard for changes that the kernel will make for any user.
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
