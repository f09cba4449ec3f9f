//! The accounting of the daemon's descriptors: how many each user holds, and who may take another
//! one.
//!
//! The kernel allows a process a fixed number of descriptors (RLIMIT_NOFILE). This module divides
//! that number, so that no user of the mount can take the descriptors that others need:
//!
//! - a *reserve* is for the daemon itself: sockets, workers, and the descriptors that a request
//!   holds until its answer;
//! - the rest is *room* for open files and for descriptors that hold inodes (see `table.rs`). Open
//!   files have priority: inodes give their descriptors back;
//! - of the room, open files leave a part to inodes that only a descriptor can hold;
//! - a part is for the mount's owner alone (root, or the user who has mounted);
//! - of the remainder, one user may hold at most three quarters of the part that the other ordinary
//!   users leave.
//!
//! The module only counts; it opens and closes nothing. [`Taken`] and [`Counted`] return their
//! descriptors when they are dropped.

use crate::lifecycle::workers::WORKERS_MAX;
use fuse::Errno;
use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The daemon's own descriptors, whatever the limit: sockets to some lenders, the ring, logs, the
/// control socket.
const RESERVE_MIN: usize = 96;
/// Descriptors that a worker needs: its own of /dev/fuse, and those that it holds until a request
/// is answered. A request holds at most four (a rename), but most of [`WORKERS_MAX`] workers wait
/// for one backing file only.
const RESERVE_PER_WORKER: usize = 2;
/// A part of the limit that is reserved as well: a large pool has more sockets.
const RESERVE_PART: usize = 64;
/// The part of the room (one in so many) that open files leave to inodes. The part for the owner
/// alone is as large.
const PART: usize = 32;
/// The smallest size of these parts.
const PART_MIN: usize = 8;
/// One user may hold so many quarters of the part that other ordinary users leave.
const USER_QUARTERS: usize = 3;
/// If this share of the room is used, in eighths, the kernel is asked to forget inodes that only a
/// descriptor can hold.
const TIGHT_EIGHTHS: usize = 7;

/// The accounting.
pub(crate) struct Descriptors {
    limit: usize,
    /// Number of descriptors that open files and inodes may hold together.
    room: usize,
    /// The part of the room that open files leave free.
    part: usize,
    anchors_max: usize,
    /// The user without a limit on the share.
    owner: u32,
    /// Open files and directories, and second descriptors of them.
    opens: AtomicUsize,
    /// Descriptors that hold inodes.
    anchors: AtomicUsize,
    charged: Mutex<Charged>,
    freed: Condvar,
    /// Threads in [`Descriptors::wait_for_room`], and how many may be there.
    waiting: AtomicUsize,
    waiting_max: usize,
}

/// Number of descriptors charged to each user.
#[derive(Default)]
struct Charged {
    owner: usize,
    others: usize,
    by_user: HashMap<u32, usize>,
}

impl Descriptors {
    /// Creates the accounting of a process with a limit of `limit` descriptors and at least
    /// `workers` workers. Inodes hold at most `anchors_max` of them.
    pub(crate) fn new(limit: usize, workers: usize, anchors_max: usize, owner: u32) -> Arc<Descriptors> {
        let limit = limit.min(i32::MAX as usize);
        let reserve = RESERVE_MIN + workers.max(WORKERS_MAX) * RESERVE_PER_WORKER + limit / RESERVE_PART;
        let room = limit - reserve.min(limit / 2);
        Arc::new(Descriptors {
            limit,
            room,
            part: (room / PART).max(PART_MIN),
            anchors_max: anchors_max.clamp(1, room.max(1)),
            owner,
            opens: AtomicUsize::new(0),
            anchors: AtomicUsize::new(0),
            charged: Mutex::default(),
            freed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            waiting_max: workers / 2,
        })
    }

    /// RLIMIT_NOFILE, as it was when the daemon began.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Number of descriptors that open files and inodes hold.
    pub(crate) fn used(&self) -> usize {
        self.opens.load(Ordering::Relaxed) + self.anchors.load(Ordering::Relaxed)
    }

    /// Number of inodes that are held by a descriptor.
    pub(crate) fn anchors(&self) -> usize {
        self.anchors.load(Ordering::Relaxed)
    }

    /// Charges a user for an open file. `charge` is 2 if the file's inode has to hold a descriptor
    /// as long as the file is open, otherwise 1.
    ///
    /// # Errors
    /// EMFILE if this exceeds the user's share.
    pub(crate) fn take(self: &Arc<Descriptors>, uid: u32, charge: usize) -> Result<Taken, Errno> {
        let mut charged = self.charged.lock();
        if !self.allows(&charged, uid, charge) {
            return Err(Errno::MFILE);
        }
        Ok(self.charge(&mut charged, uid, charge))
    }

    /// Charges descriptors for operations that must not fail: restoring a file that was open in the
    /// previous daemon, or a second descriptor that the kernel needs.
    pub(crate) fn take_anyway(self: &Arc<Descriptors>, uid: u32, charge: usize) -> Taken {
        self.charge(&mut self.charged.lock(), uid, charge)
    }

    /// Charges for a file that was open in the previous daemon. `uid` is `None` if that daemon did
    /// not record the user; then the owner is charged.
    pub(crate) fn restore(self: &Arc<Descriptors>, uid: Option<u32>, charge: usize) -> Taken {
        self.take_anyway(uid.unwrap_or(self.owner), charge)
    }

    fn allows(&self, charged: &Charged, uid: u32, charge: usize) -> bool {
        let all = self.room.saturating_sub(self.part);
        if charged.owner + charged.others + charge > all {
            return false;
        }
        if uid == self.owner {
            return true;
        }
        // The owner's part stays reserved even if it is unused.
        let for_others = all.saturating_sub(charged.owner.max(self.part));
        let own = charged.by_user.get(&uid).copied().unwrap_or(0);
        let left = for_others.saturating_sub(charged.others - own);
        own + charge <= (left * USER_QUARTERS).div_ceil(4)
    }

    fn charge(self: &Arc<Descriptors>, charged: &mut Charged, uid: u32, charge: usize) -> Taken {
        if uid == self.owner {
            charged.owner += charge;
        } else {
            charged.others += charge;
            *charged.by_user.entry(uid).or_default() += charge;
        }
        self.opens.fetch_add(1, Ordering::Relaxed);
        Taken { account: self.clone(), uid, charge }
    }

    /// If open files and inodes hold more than the room, returns how many descriptors inodes have
    /// to give back, with a margin.
    pub(crate) fn over(&self) -> Option<usize> {
        let over = self.used().saturating_sub(self.room);
        (over > 0).then(|| over + self.room / RESERVE_PART)
    }

    /// If little room is left, returns how many descriptors inodes should give back.
    pub(crate) fn tight(&self) -> Option<usize> {
        let over = self.used().saturating_sub(self.room / 8 * TIGHT_EIGHTHS);
        (over > 0).then(|| over + self.room / 8)
    }

    /// Takes a descriptor for an inode that a file handle finds as well. `None` if there is no
    /// room.
    pub(crate) fn take_anchor(self: &Arc<Descriptors>) -> Option<Counted> {
        (self.anchors() < self.anchors_max && self.used() < self.room).then(|| self.add_anchor())
    }

    /// Takes a descriptor for an inode that can be found in no other way. `None` if not even the
    /// first half of the reserve has one left.
    pub(crate) fn take_only_anchor(self: &Arc<Descriptors>) -> Option<Counted> {
        (!self.is_exhausted()).then(|| self.add_anchor())
    }

    /// Whether the first half of the reserve is used up.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.used() >= self.room + (self.limit - self.room) / 2
    }

    /// Counts a descriptor that holds an inode, regardless of the room.
    pub(crate) fn add_anchor(self: &Arc<Descriptors>) -> Counted {
        self.anchors.fetch_add(1, Ordering::Relaxed);
        Counted { account: self.clone() }
    }

    /// Waits until the first half of the reserve has a free descriptor, at most for `limit`. At
    /// most half of the workers wait.
    pub(crate) fn wait_for_room(&self, limit: Duration) {
        if self.waiting.fetch_add(1, Ordering::Relaxed) < self.waiting_max {
            let deadline = Instant::now() + limit;
            let mut charged = self.charged.lock();
            while self.is_exhausted() && !self.freed.wait_until(&mut charged, deadline).timed_out() {}
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A descriptor that holds an inode, until this is dropped.
pub(crate) struct Counted {
    account: Arc<Descriptors>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.account.anchors.fetch_sub(1, Ordering::Relaxed);
        if self.account.waiting.load(Ordering::Relaxed) > 0 {
            self.account.freed.notify_all();
        }
    }
}

/// A descriptor that is charged to a user, until this is dropped.
pub(crate) struct Taken {
    account: Arc<Descriptors>,
    uid: u32,
    charge: usize,
}

impl Taken {
    /// The user.
    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }

    /// Charges for a second descriptor of the file.
    ///
    /// # Errors
    /// EMFILE if this exceeds the user's share.
    pub(crate) fn another(&self) -> Result<Taken, Errno> {
        self.account.take(self.uid, 1)
    }

    /// Charges for a second descriptor of the file that the kernel needs in any case.
    pub(crate) fn another_anyway(&self) -> Taken {
        self.account.take_anyway(self.uid, 1)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let account = &self.account;
        let mut charged = account.charged.lock();
        if self.uid == account.owner {
            charged.owner -= self.charge;
        } else {
            charged.others -= self.charge;
            if let Some(own) = charged.by_user.get_mut(&self.uid) {
                *own -= self.charge;
                if *own == 0 {
                    charged.by_user.remove(&self.uid);
                }
            }
        }
        account.opens.fetch_sub(1, Ordering::Relaxed);
        account.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens as many files as a user can.
    fn all_of(account: &Arc<Descriptors>, uid: u32, charge: usize) -> Vec<Taken> {
        std::iter::from_fn(|| account.take(uid, charge).ok()).collect()
    }

    #[test]
    fn one_user_leaves_others_theirs() {
        for limit in [256, 1024, 20_000, 1 << 20] {
            let account = Descriptors::new(limit, 16, usize::MAX, 0);
            let first = all_of(&account, 1000, 1);
            let second = all_of(&account, 1001, 1);
            let roots = all_of(&account, 0, 1);
            println!("limit {limit}: {} and {} and {}", first.len(), second.len(), roots.len());
            assert!(first.len() * 4 > limit, "a user may have more than a quarter of the limit");
            assert!(second.len() * 6 > first.len() && roots.len() >= PART_MIN);
            assert!(account.used() < limit, "the reserve is left");
            // After a close, users who have a share left can open files again.
            drop(first);
            assert!(account.take(1000, 1).is_ok() && account.take(0, 1).is_ok());
            drop((second, roots));
            assert_eq!(account.used(), 0);
            assert!(account.charged.lock().by_user.is_empty());
        }
    }

    #[test]
    fn the_owner_has_nearly_all_if_nobody_else_wants_it() {
        let account = Descriptors::new(20_000, 16, usize::MAX, 0);
        let roots = all_of(&account, 0, 1);
        assert!(roots.len() > 18_000, "{}", roots.len());
        assert!(account.take(1000, 1).is_err());
    }

    #[test]
    fn inodes_give_way_to_open_files() {
        let account = Descriptors::new(1024, 16, usize::MAX, 0);
        let mut anchors: Vec<_> = std::iter::from_fn(|| account.take_anchor()).collect();
        assert_eq!(account.over(), None);
        let taken = account.take(0, 1).unwrap();
        assert!(account.over().is_some());
        anchors.pop();
        assert_eq!(account.over(), None);
        assert!(account.take_anchor().is_none());
        drop(taken);
        assert!(account.take_anchor().is_some());
    }

    #[test]
    fn lookups_find_room_whatever_is_open() {
        let account = Descriptors::new(1024, 16, usize::MAX, 0);
        // Each open file's inode needs a descriptor, too.
        let opens = all_of(&account, 0, 2);
        let _anchors: Vec<_> = opens.iter().map(|_| account.add_anchor()).collect();
        assert!(account.over().is_none());
        let names: Vec<_> = (0..PART_MIN).map_while(|_| account.take_only_anchor()).collect();
        assert_eq!((names.len(), account.over()), (PART_MIN, None));
    }

    #[test]
    fn what_was_open_before_counts_whatever_the_share() {
        let account = Descriptors::new(1024, 16, usize::MAX, 0);
        let restored: Vec<_> = (0..1000).map(|_| account.take_anyway(1000, 1)).collect();
        assert!(account.take(1000, 1).is_err());
        drop(restored);
        assert!(account.take(1000, 1).is_ok());
    }
}
