//! Limits for control groups: whose pages are lent, how many of them, and each group's share of a
//! full pool.
//!
//! A page belongs to the control group that its memory was charged to when the kernel evicted it;
//! its entry stores the group's number. A group may have
//!
//! * no part: its pages are not lent;
//! * a **quota**: a maximum number of pages. For each page more it gives up its oldest put;
//! * a **share**: while all lenders are full, a group that has more than its share puts nothing.
//!   Its share is relative to the groups that have evicted pages lately. Lenders replace their
//!   oldest pages by those that the other groups put, until each group has its share. While there
//!   is room, shares have no effect.
//!
//! Pure logic: no I/O, no clock; time is counted in evictions. The invariant: a page that is given
//! up here is given up at its lender, too. Wrong counts cost hits, never correctness.

use locks::Mutex;
use locks::atomic::{AtomicU32, AtomicU64, Ordering};
use page::{PageId, Version};
use std::collections::VecDeque;

/// The number of group numbers: 0 is none, and the others identify groups. An entry has six bits
/// for them.
pub const NUMBERS: u8 = 1 << 6;

/// A group counts as active if its last eviction is among this number of last evictions of all
/// groups: 512 MiB.
const ACTIVE_EVICTIONS: u64 = 1 << 17;

/// The number of put records of a group with a quota that each eviction within the quota checks.
/// Records whose pages are gone are removed. With four, a pass through n records takes n / 3
/// evictions (n / 4, and the records that come meanwhile). So a group never has more records than
/// 1.5 times its quota.
const CLEANED_PER_EVICTION: usize = 4;

/// The limits of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Whether its pages are lent.
    pub takes_part: bool,
    /// The maximum number of lent pages; None: unlimited.
    pub quota_pages: Option<u64>,
    /// Its share of a full pool, in proportion to the shares of other groups. None: no share
    /// applies to it.
    pub share: Option<u32>,
}

impl Limits {
    /// No limits at all.
    pub const NONE: Limits = Limits { takes_part: true, quota_pages: None, share: None };
}

/// The decision whether a page of a group is put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The page is put.
    Yes,
    /// The group does not take part.
    Apart,
    /// All lenders are full, and the group has more than its share.
    OverShare,
}

/// The counts of a group, in pages. All but the first only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Its pages at lenders.
    pub lent: u64,
    /// Evicted pages.
    pub evicted: u64,
    /// Pages put at lenders.
    pub put: u64,
    /// Pages got back from lenders.
    pub got: u64,
    /// Pages given up at lenders because the group had more than its quota.
    pub given_up: u64,
    /// Pages not put because the group had more than its share.
    pub over_share: u64,
    /// Pages not put because the group does not take part.
    pub apart: u64,
}

/// The record of a page that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Put {
    /// The page.
    pub id: PageId,
    /// The lowest bits of its version: enough to distinguish it from a later put of the same page.
    version: u32,
}

impl Put {
    /// Returns the record of a put of that page under that version.
    pub fn new(id: PageId, version: Version) -> Put {
        Put { id, version: version.0 as u32 }
    }

    /// Returns whether the record has that version.
    pub fn is(&self, version: Version) -> bool {
        self.version == version.0 as u32
    }
}

/// No quota.
const UNLIMITED: u64 = u64::MAX;

struct Group {
    takes_part: AtomicU32,
    quota_pages: AtomicU64,
    /// The group's share; 0: none.
    share: AtomicU32,
    /// The count of all evictions at the group's last one.
    last: AtomicU64,
    lent: AtomicU64,
    evicted: AtomicU64,
    put: AtomicU64,
    got: AtomicU64,
    given_up: AtomicU64,
    over_share: AtomicU64,
    apart: AtomicU64,
    /// Used only if the group has a quota.
    order: Mutex<Order>,
}

/// Records of puts in order; some of the pages may be gone. All records in `cleaned` are older than
/// those in `rest`.
#[derive(Default)]
struct Order {
    /// Records that the current pass has checked: their pages were there.
    cleaned: VecDeque<Put>,
    /// Records that the current pass has not reached.
    rest: VecDeque<Put>,
}

impl Order {
    fn len(&self) -> usize {
        self.cleaned.len() + self.rest.len()
    }

    fn take_oldest(&mut self) -> Option<Put> {
        self.cleaned.pop_front().or_else(|| self.rest.pop_front())
    }

    /// Returns the next record of the pass. At the end a new pass begins.
    fn take_next(&mut self) -> Option<Put> {
        if self.rest.is_empty() {
            std::mem::swap(&mut self.cleaned, &mut self.rest);
        }
        self.rest.pop_front()
    }
}

/// All groups.
pub struct Groups {
    groups: Vec<Group>,
    evictions: AtomicU64,
}

impl Default for Groups {
    fn default() -> Groups {
        let group = || Group {
            takes_part: AtomicU32::new(1),
            quota_pages: AtomicU64::new(UNLIMITED),
            share: AtomicU32::new(0),
            last: AtomicU64::new(0),
            lent: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
            put: AtomicU64::new(0),
            got: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            over_share: AtomicU64::new(0),
            apart: AtomicU64::new(0),
            order: Mutex::default(),
        };
        Groups { groups: (0..NUMBERS).map(|_| group()).collect(), evictions: AtomicU64::new(0) }
    }
}

impl Groups {
    fn of(&self, number: u8) -> &Group {
        &self.groups[usize::from(number % NUMBERS)]
    }

    /// Sets the limits of a group.
    pub fn limit(&self, number: u8, limits: Limits) {
        let group = self.of(number);
        group.takes_part.store(limits.takes_part.into(), Ordering::Relaxed);
        group.quota_pages.store(limits.quota_pages.unwrap_or(UNLIMITED), Ordering::Relaxed);
        group.share.store(limits.share.unwrap_or(0), Ordering::Relaxed);
    }

    /// Decides whether an evicted page of the group may be put. `is_full`: no lender has room for
    /// more pages.
    pub(crate) fn admit(&self, number: u8, is_full: bool) -> Admission {
        let group = self.of(number);
        let admission = if number == 0 {
            Admission::Yes
        } else if !self.takes_part(number) {
            Admission::Apart
        } else if is_full && self.is_over_share(group) {
            Admission::OverShare
        } else {
            Admission::Yes
        };
        match admission {
            Admission::Yes => {}
            Admission::Apart => drop(group.apart.fetch_add(1, Ordering::Relaxed)),
            Admission::OverShare => drop(group.over_share.fetch_add(1, Ordering::Relaxed)),
        }
        admission
    }

    /// A page of the group was evicted.
    pub fn evicted(&self, number: u8) {
        let group = self.of(number);
        let now = self.evictions.fetch_add(1, Ordering::Relaxed) + 1;
        group.last.store(now, Ordering::Relaxed);
        group.evicted.fetch_add(1, Ordering::Relaxed);
    }

    fn is_over_share(&self, group: &Group) -> bool {
        let share = |group: &Group| u64::from(group.share.load(Ordering::Relaxed));
        if share(group) == 0 {
            return false;
        }
        let now = self.evictions.load(Ordering::Relaxed);
        let is_active = |group: &&Group| {
            let last = group.last.load(Ordering::Relaxed);
            last > 0 && now - last.min(now) < ACTIVE_EVICTIONS
        };
        let (mut shares, mut lent) = (0u64, 0u64);
        for other in self.groups.iter().skip(1).filter(is_active).filter(|other| share(other) > 0) {
            shares += share(other);
            lent += other.lent.load(Ordering::Relaxed);
        }
        let own = group.lent.load(Ordering::Relaxed);
        u128::from(own) * u128::from(shares) > u128::from(lent) * u128::from(share(group))
    }

    /// A page of the group is on its way to a lender.
    pub fn put(&self, number: u8, put: Put) {
        let group = self.of(number);
        group.put.fetch_add(1, Ordering::Relaxed);
        if group.quota_pages.load(Ordering::Relaxed) < UNLIMITED {
            group.order.lock().rest.push_back(put);
        }
    }

    /// The group's number of pages at lenders changed by `lent`, and it got back `got` pages.
    pub fn moved(&self, number: u8, lent: i64, got: u64) {
        let group = self.of(number);
        group.lent.fetch_add(lent as u64, Ordering::Relaxed); // wraps to a subtraction
        group.got.fetch_add(got, Ordering::Relaxed);
    }

    /// Returns the page that the group must give up next because it has more than its quota: the
    /// oldest put for which `is_there` returns true. No lock is held during that call. Returns None
    /// if the group is within its quota.
    pub(crate) fn over_quota(&self, number: u8, is_there: impl Fn(&Put) -> bool) -> Option<Put> {
        let group = self.of(number);
        let quota = group.quota_pages.load(Ordering::Relaxed);
        if number == 0 || quota == UNLIMITED {
            return None;
        }
        while self.lent(number) > quota {
            let put = group.order.lock().take_oldest()?;
            if is_there(&put) {
                group.given_up.fetch_add(1, Ordering::Relaxed);
                return Some(put);
            }
        }
        for _ in 0..CLEANED_PER_EVICTION {
            let mut order = group.order.lock();
            if order.len() as u64 <= quota {
                break;
            }
            let Some(put) = order.take_next() else { break };
            drop(order);
            if is_there(&put) {
                group.order.lock().cleaned.push_back(put);
            }
        }
        None
    }

    /// Returns whether pages of the group are lent.
    pub fn takes_part(&self, number: u8) -> bool {
        self.of(number).takes_part.load(Ordering::Relaxed) != 0
    }

    /// Gives the number to another group, with all counts at 0. Only for a group without pages at
    /// lenders.
    pub fn reset(&self, number: u8, limits: Limits) {
        let group = self.of(number);
        for count in
            [&group.last, &group.evicted, &group.put, &group.got, &group.given_up, &group.over_share, &group.apart]
        {
            count.store(0, Ordering::Relaxed);
        }
        *group.order.lock() = Order::default();
        self.limit(number, limits);
    }

    fn lent(&self, number: u8) -> u64 {
        // Several threads update the count one after the other. So for a moment it may be below 0.
        (self.of(number).lent.load(Ordering::Relaxed) as i64).max(0) as u64
    }

    /// Returns the counts of a group.
    pub fn counts(&self, number: u8) -> Counts {
        let group = self.of(number);
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counts {
            lent: self.lent(number),
            evicted: load(&group.evicted),
            put: load(&group.put),
            got: load(&group.got),
            given_up: load(&group.given_up),
            over_share: load(&group.over_share),
            apart: load(&group.apart),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::{FileIdentity, Stamp};
    use crate::catalog::entry::{Entry, Standing};
    use crate::catalog::file::Filter;
    use crate::core::{Change, Core, Outcome, Setup, Strategy};
    use page::{ChecksumKey, FileKey, PAGE_SIZE, PageRange};

    const PAGES: u32 = 200;
    /// Small enough to have an effect, although most lent pages are changed or read back soon.
    const QUOTA: u64 = 4;

    /// Pages are evicted, stored, refused, got back, lost and changed at random. The counts must
    /// match the pages, and no group may exceed its quota.
    #[test]
    fn what_is_counted_is_there() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let core =
            Core::new(Setup { batch_pages: 1, ..Setup::new(1, ChecksumKey::new([7; 32]), Strategy::Exclusive, true) });
        let groups = &core.catalog.groups;
        groups.limit(1, Limits { quota_pages: Some(QUOTA), ..Limits::NONE });
        groups.limit(3, Limits { takes_part: false, ..Limits::NONE });
        assert!(core.catalog.lender_up(0));
        let identity = FileIdentity { device: 1, inode: 1, generation: 0 };
        let file = core.catalog.adopt(identity);
        let stamp = Stamp { size_bytes: u64::from(PAGES) * PAGE_SIZE as u64, mtime_ns: 1, ctime_ns: 1 };
        let mut most = [0; 3];
        for _ in 0..20_000 {
            let index = random.u32(0..PAGES);
            match random.u32(0..20) {
                0 => {
                    let start = u64::from(index) * PAGE_SIZE as u64;
                    let change = Change::Other { start, end: start + 3 };
                    let changing = core.begin_change(&file, change, stamp);
                    core.end_change(&file, changing, Outcome::Applied(stamp), (0, 0), None);
                    // Until a page is read, its evictions are not trusted.
                    let mut state = file.lock();
                    let (range, has_room) = (PageRange { first: 0, end: PAGES.into() }, true);
                    state.begin_read(range, 0, 0, |_| Standing::Valid, has_room, Filter::Off, &mut Vec::new());
                    core.catalog.account(&mut state);
                }
                1..4 => {
                    let mut state = file.lock();
                    let Entry::Present { version, .. } = state.entry(index) else { continue };
                    state.gone(index, version, None);
                    core.catalog.account(&mut state);
                }
                4 if random.u32(0..50) == 0 => {
                    core.abandon_puts(0);
                    assert!(core.catalog.lender_lost(0));
                    core.catalog.sweep();
                    assert!(core.catalog.lender_up(0));
                }
                _ => {
                    let page = [random.u8(1..); PAGE_SIZE];
                    core.evicted(file.key(), index.into(), 0, Some(&page), random.u8(0..4));
                    while let Some((request, batch)) = core.next_put(0, true) {
                        let stored = u8::from(random.u32(0..10) > 0);
                        let statuses = vec![stored; batch.items().len()];
                        drop(batch);
                        core.puts_answered(0, request, &statuses).unwrap();
                    }
                }
            }
            let state = file.lock();
            let there =
                |group: u8| (0..PAGES).filter(|index| state.entry(*index).group() == Some(group)).count() as u64;
            for group in 1..4 {
                assert_eq!(groups.counts(group).lent, there(group), "group {group}");
            }
            for group in [1, 2] {
                most[group] = most[group].max(there(group as u8));
            }
            assert!(there(1) <= QUOTA && there(3) == 0);
            assert!(groups.of(1).order.lock().len() as u64 <= 2 * QUOTA);
        }
        let (with_quota, without) = (groups.counts(1), groups.counts(2));
        assert!(most[1] == QUOTA && with_quota.given_up > 100, "{with_quota:?}");
        assert!(most[2] > QUOTA && without.given_up == 0, "{without:?}");
        assert!(groups.counts(3).apart > 100);
    }

    #[test]
    fn the_oldest_is_given_up() {
        let groups = Groups::default();
        groups.limit(1, Limits { quota_pages: Some(2), ..Limits::NONE });
        let put = |index: u32, version: u64| Put::new(PageId { file: FileKey(1), index }, Version(version));
        let gone = put(1, 10);
        for (nth, put) in [put(0, 9), gone, put(1, 11), put(2, 12)].into_iter().enumerate() {
            groups.put(1, put);
            groups.moved(1, i64::from(nth != 1), 0);
        }
        let is_there = |put: &Put| *put != gone;
        assert_eq!(groups.over_quota(1, is_there), Some(put(0, 9)));
        groups.moved(1, -1, 0);
        assert_eq!(groups.over_quota(1, is_there), None);
        assert_eq!((groups.counts(1).lent, groups.counts(1).given_up), (2, 1));
    }

    #[test]
    fn a_full_pool_is_shared_by_those_that_evict() {
        let groups = Groups::default();
        for (group, share) in [(1, 1), (2, 3)] {
            groups.limit(group, Limits { share: Some(share), ..Limits::NONE });
        }
        // A pool of 1000 pages in which each put replaces a page of a group, chosen in proportion
        // to their numbers.
        let mut random = fastrand::Rng::with_seed(1);
        let mut evict = |group: u8, lent: &mut [u64; 3]| {
            groups.evicted(group);
            let is_full = lent.iter().sum::<u64>() >= 1000;
            if groups.admit(group, is_full) == Admission::Yes {
                if is_full {
                    let other = if random.u64(0..1000) < lent[1] { 1 } else { 2 };
                    lent[other] -= 1;
                    groups.moved(other as u8, -1, 0);
                }
                lent[usize::from(group)] += 1;
                groups.moved(group, 1, 0);
            }
        };
        let mut lent = [0; 3];
        (0..2000).for_each(|_| evict(1, &mut lent));
        assert_eq!(lent, [0, 1000, 0], "one group alone has all pages");
        for _ in 0..5000 {
            evict(1, &mut lent);
            evict(2, &mut lent);
        }
        assert!(lent[1].abs_diff(250) < 25, "{lent:?}");
        (0..ACTIVE_EVICTIONS + 5000).for_each(|_| evict(2, &mut lent));
        assert!(lent[2] > 990, "a group without evictions has no share: {lent:?}");
    }
}
