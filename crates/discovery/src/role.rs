//! Decides whether a node lends or borrows, by need. Pure logic: the caller passes the time and the
//! events.
//!
//! A node lends until its own mounts evict: then memory is short, and it borrows at once. It lends
//! again when nothing was evicted for a *calm time*. So it changes quickly if that helps its own
//! programs, and slowly if it helps others'.
//!
//! Each change costs: lent memory is given back, and borrowed pages become useless. So a load that
//! comes and goes must not change the role each time. A node that has to borrow again soon after it
//! began to lend (within [`STABLE_CALMS`]) has lent too early: its calm time doubles, at most
//! [`DOUBLINGS_MAX`] times. A load with pauses shorter than the calm time then leaves the role
//! unchanged. The role follows a load with pauses longer than the longest calm time, as intended.
//! Each long time of lending halves the calm time again.
//!
//! Must never happen here: a change of role with each wave of a load; two roles at once.

use report::{RoleName, RoleWanted};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Rate of evictions from which memory counts as short, on average over [`WINDOW`]: 128 KiB a
/// second. A disk that is worth a pool reads more than that.
pub const SHORT_PAGES_PER_SECOND: u64 = 32;

/// Rate of evictions below which the node is calm. In between the role does not change.
pub const CALM_PAGES_PER_SECOND: u64 = 8;

/// Time over which evictions are averaged: reclaim comes in bursts.
pub const WINDOW: Duration = Duration::from_secs(2);

/// A sample that comes sooner after the one before it is left out: there are never more than so
/// many in a window.
const SAMPLES_PER_WINDOW: u32 = 16;

/// The default of [`Config::calm`].
pub const CALM_DEFAULT: Duration = Duration::from_secs(10);

/// The maximum number of doublings of the calm time: from 10 seconds to some 5 minutes.
pub const DOUBLINGS_MAX: u32 = 5;

/// Lending for so many times the first calm time was no mistake: 10 minutes for 10 seconds.
pub const STABLE_CALMS: u32 = 60;

/// With less memory than this to lend there is no hurry: it has to be calm for [`FULL_CALMS`] times
/// as long.
pub const ROOM_BYTES: u64 = 64 << 20;

/// See [`ROOM_BYTES`]. Free memory is no condition: an unused page cache fills all memory as long
/// as no program needs it, and the node would never lend again.
pub const FULL_CALMS: u32 = 3;

/// The role of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It lends, and borrows nothing.
    Lend,
    /// It borrows, and lends nothing.
    Borrow,
}

/// The role that the administrator wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// By need.
    Auto,
    /// Lend, whatever the mounts evict.
    Lend,
    /// Borrow, however calm it is.
    Borrow,
}

impl From<Role> for RoleName {
    fn from(role: Role) -> RoleName {
        match role {
            Role::Lend => RoleName::Lend,
            Role::Borrow => RoleName::Borrow,
        }
    }
}

impl From<Wanted> for RoleWanted {
    fn from(wanted: Wanted) -> RoleWanted {
        match wanted {
            Wanted::Auto => RoleWanted::Auto,
            Wanted::Lend => RoleWanted::Lend,
            Wanted::Borrow => RoleWanted::Borrow,
        }
    }
}

/// The speed of changes.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// How long it must be calm before the node lends, as long as that was never wrong.
    pub calm: Duration,
    /// The wanted role at the start.
    pub wanted: Wanted,
}

/// The state of a node's role.
pub struct Roles {
    config: Config,
    wanted: Wanted,
    role: Role,
    reason: String,
    since: Instant,
    changes: u64,
    doublings: u32,
    /// Samples of the last window, and the one before: time, and number of evicted pages since the
    /// start.
    samples: VecDeque<(Instant, u64)>,
    /// The last time that it was not calm.
    busy_at: Instant,
}

impl Roles {
    /// A node without history: it lends, unless it is wanted to borrow.
    pub fn new(config: Config, now: Instant) -> Roles {
        let role = if config.wanted == Wanted::Borrow { Role::Borrow } else { Role::Lend };
        let reason = if config.wanted == Wanted::Auto { "nothing was evicted yet" } else { "asked for" };
        Roles {
            config,
            wanted: config.wanted,
            role,
            reason: reason.to_owned(),
            since: now,
            changes: 0,
            doublings: 0,
            samples: VecDeque::new(),
            busy_at: now,
        }
    }

    /// Sets the wanted role from the next sample on.
    pub fn set_wanted(&mut self, wanted: Wanted) {
        self.wanted = wanted;
    }

    /// The role from now on. `evicted_pages` are those of all mounts since the start,
    /// `available_bytes` is the memory that could be lent beyond the reserve.
    pub fn step(&mut self, now: Instant, evicted_pages: u64, available_bytes: u64) -> Role {
        self.sample(now, evicted_pages);
        let rate = self.pages_per_second();
        if rate >= CALM_PAGES_PER_SECOND {
            self.busy_at = now;
        }
        let calm = now.saturating_duration_since(self.busy_at);
        let wait = self.calm() * if available_bytes < ROOM_BYTES { FULL_CALMS } else { 1 };
        match (self.wanted, self.role) {
            (Wanted::Lend, Role::Borrow) => self.change(now, Role::Lend, "asked for".to_owned()),
            (Wanted::Borrow, Role::Lend) => self.change(now, Role::Borrow, "asked for".to_owned()),
            (Wanted::Auto, Role::Lend) if rate >= SHORT_PAGES_PER_SECOND => {
                self.learn(now);
                self.change(now, Role::Borrow, format!("memory is short: {rate} pages a second were evicted"));
            }
            (Wanted::Auto, Role::Borrow) if calm >= wait => {
                self.change(now, Role::Lend, format!("hardly anything was evicted for {} s", calm.as_secs()));
            }
            _ => {}
        }
        self.role
    }

    /// The present status.
    pub fn status(&self, now: Instant) -> report::Role {
        report::Role {
            role: self.role.into(),
            wanted: self.wanted.into(),
            reason: self.reason.clone(),
            since_ms: now.saturating_duration_since(self.since).as_millis() as u64,
            changes: self.changes,
            calm_ms: self.calm().as_millis() as u64,
            evicted_pages_per_second: self.pages_per_second(),
        }
    }

    fn calm(&self) -> Duration {
        self.config.calm * 2u32.pow(self.doublings)
    }

    /// The node has to borrow: adapts the calm time, depending on whether it was right to lend.
    fn learn(&mut self, now: Instant) {
        if self.changes == 0 {
            return; // The first role was no decision of this logic.
        }
        let stable = self.config.calm * STABLE_CALMS;
        let lent = now.saturating_duration_since(self.since);
        if lent < stable {
            self.doublings = (self.doublings + 1).min(DOUBLINGS_MAX);
        } else {
            let times = lent.as_millis() / stable.as_millis().max(1);
            self.doublings = self.doublings.saturating_sub(times.try_into().unwrap_or(u32::MAX));
        }
    }

    fn change(&mut self, now: Instant, role: Role, reason: String) {
        (self.role, self.reason, self.since) = (role, reason, now);
        self.changes += 1;
    }

    fn sample(&mut self, now: Instant, evicted_pages: u64) {
        let too_soon = WINDOW / SAMPLES_PER_WINDOW;
        if self.samples.back().is_some_and(|(at, _)| now.saturating_duration_since(*at) < too_soon) {
            return;
        }
        self.samples.push_back((now, evicted_pages));
        // The first sample is the newest one that is older than the window.
        while self.samples.get(1).is_some_and(|(at, _)| now.saturating_duration_since(*at) >= WINDOW) {
            self.samples.pop_front();
        }
    }

    /// On average over the window; 0 until a whole window is known.
    fn pages_per_second(&self) -> u64 {
        let (Some((begin, before)), Some((end, after))) = (self.samples.front(), self.samples.back()) else { return 0 };
        let elapsed = end.saturating_duration_since(*begin);
        if elapsed < WINDOW {
            return 0;
        }
        let rate = u128::from(after.saturating_sub(*before)) * 1000 / elapsed.as_millis().max(1);
        rate.try_into().unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(500);
    const PLENTY_BYTES: u64 = 1 << 30;

    /// A node with regular samples.
    struct Node {
        roles: Roles,
        begun: Instant,
        now: Instant,
        evicted_pages: u64,
        available_bytes: u64,
    }

    impl Node {
        fn new() -> Node {
            let begun = Instant::now();
            let config = Config { calm: CALM_DEFAULT, wanted: Wanted::Auto };
            let roles = Roles::new(config, begun);
            Node { roles, begun, now: begun, evicted_pages: 0, available_bytes: PLENTY_BYTES }
        }

        fn look(&mut self, pages_per_second: u64) -> Role {
            self.now += LOOK;
            self.evicted_pages += pages_per_second * LOOK.as_millis() as u64 / 1000;
            self.roles.step(self.now, self.evicted_pages, self.available_bytes)
        }

        /// Continues until the role is this one; returns the number of seconds.
        fn until(&mut self, role: Role, pages_per_second: u64) -> f64 {
            let begun = self.now;
            while self.look(pages_per_second) != role {
                assert!(
                    self.now - begun < Duration::from_secs(3600),
                    "never {role:?}: {:?}",
                    self.roles.status(self.now)
                );
            }
            (self.now - begun).as_secs_f64()
        }

        fn pass(&mut self, seconds: u64, pages_per_second: u64) {
            for _ in 0..seconds * 2 {
                self.look(pages_per_second);
            }
        }
    }

    #[test]
    fn it_borrows_at_once_and_lends_after_a_calm_time() {
        let mut node = Node::new();
        node.pass(60, 0);
        let seconds = node.until(Role::Borrow, 1000);
        assert!(seconds <= 3.0, "{seconds}");
        assert!(node.roles.status(node.now).reason.contains("evicted"));
        node.pass(3600, 1000);
        let seconds = node.until(Role::Lend, 0);
        assert!((10.0..15.0).contains(&seconds), "{seconds}");
        assert_eq!(node.roles.status(node.now).changes, 2);
        // A trickle is not calm, and no shortage.
        node.pass(100, CALM_PAGES_PER_SECOND + 4);
        assert_eq!(node.roles.status(node.now).role, RoleName::Lend);
        node.until(Role::Borrow, 1000);
        node.pass(3600, CALM_PAGES_PER_SECOND + 4);
        assert_eq!(node.roles.status(node.now).role, RoleName::Borrow);
        // Neither is a small burst.
        node.until(Role::Lend, 0);
        node.evicted_pages += 2 * SHORT_PAGES_PER_SECOND - 8;
        node.pass(100, 0);
        assert_eq!(node.roles.status(node.now).role, RoleName::Lend);
    }

    #[test]
    fn without_room_it_waits_longer_but_not_for_ever() {
        let mut node = Node::new();
        node.until(Role::Borrow, 1000);
        node.available_bytes = 0;
        let seconds = node.until(Role::Lend, 0);
        assert!((30.0..35.0).contains(&seconds), "{seconds}");
    }

    /// For every period, and every share of it that is busy.
    #[test]
    fn a_square_wave_does_not_make_it_flap() {
        const HOURS: u64 = 4;
        let calm = CALM_DEFAULT.as_secs();
        let longest = calm << DOUBLINGS_MAX;
        let mut most = (0, 0, 0);
        for half_seconds in
            [1, 2, 3, 5, 8, 12, 18, 24, 25, 30, 40, 45, 60, 90, 120, 170, 240, 400, 640, 1000, 2400, 7200]
        {
            for busy_percent in [10, 30, 50, 70, 90] {
                let mut node = Node::new();
                let mut at_hour = 0;
                for tick in 0..HOURS * 7200 {
                    let busy = tick % half_seconds < (half_seconds * busy_percent).div_ceil(100);
                    node.look(if busy { 2000 } else { 0 });
                    if tick == 7200 {
                        at_hour = node.roles.status(node.now).changes;
                    }
                }
                let changes = node.roles.status(node.now).changes;
                let pause = half_seconds / 2 - (half_seconds * busy_percent).div_ceil(100) / 2;
                let text = format!("period {} s, {busy_percent} % busy", half_seconds as f64 / 2.0);
                // It learns within a few waves; then it follows only pauses that exceed the longest
                // calm time.
                if pause <= longest && half_seconds / 2 < calm * u64::from(STABLE_CALMS) {
                    assert!(at_hour <= 2 * u64::from(DOUBLINGS_MAX) + 2, "{text}: {at_hour} changes in an hour");
                    assert_eq!(changes, at_hour, "{text}: it never learns");
                }
                let waves = (node.now - node.begun).as_secs() * 2 / half_seconds;
                assert!(changes <= 2 * (waves + 1), "{text}: {changes} changes, {waves} waves");
                most = most.max((changes, half_seconds, busy_percent));
            }
        }
        println!("at the most {} changes in {HOURS} hours: period {} half seconds, {} % busy", most.0, most.1, most.2);
        assert!(most.0 <= HOURS * 3600 * 2 / longest + 12, "{most:?}");
    }

    /// And for every load: the figure follows from the module's text.
    #[test]
    fn no_load_makes_it_flap() {
        for seed in 0..50 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut node = Node::new();
            for _ in 0..400 {
                let rate = random.choice([0, 0, 0, 20, 5000]).unwrap_or(0);
                node.pass(random.u64(1..120), rate);
            }
            let calms = (node.now - node.begun).as_secs() / CALM_DEFAULT.as_secs();
            let bound = 2 * (u64::from(DOUBLINGS_MAX) + calms / 30 + calms / 32 + 3);
            let changes = node.roles.status(node.now).changes;
            assert!(changes <= bound, "seed {seed}: {changes} changes, {bound} at the most");
        }
    }

    #[test]
    fn after_a_long_calm_it_lends_early_again() {
        let mut node = Node::new();
        for _ in 0..20 {
            node.pass(20, 1000);
            node.pass(20, 0);
        }
        let learned = node.roles.status(node.now).calm_ms;
        assert!(learned > 10_000, "{learned}");
        node.until(Role::Lend, 0);
        node.pass(600 * u64::from(DOUBLINGS_MAX), 0);
        node.until(Role::Borrow, 1000);
        assert_eq!(node.roles.status(node.now).calm_ms, 10_000);
    }

    #[test]
    fn what_is_asked_for_is_done() {
        let mut node = Node::new();
        node.roles.set_wanted(Wanted::Borrow);
        node.pass(1000, 0);
        assert_eq!(node.roles.status(node.now).role, RoleName::Borrow);
        node.roles.set_wanted(Wanted::Lend);
        node.pass(1000, 5000);
        let status = node.roles.status(node.now);
        assert_eq!((status.role, status.reason.as_str(), status.changes), (RoleName::Lend, "asked for", 2));
        node.roles.set_wanted(Wanted::Auto);
        assert!(node.until(Role::Borrow, 5000) <= 3.0);
        // Counters that went back, after a restart, are no evictions.
        node.until(Role::Lend, 0);
        node.evicted_pages = 0;
        node.pass(10, 0);
        assert_eq!(node.roles.status(node.now).role, RoleName::Lend);
    }

    #[test]
    fn looks_are_bounded() {
        let mut roles = Roles::new(Config { calm: CALM_DEFAULT, wanted: Wanted::Auto }, Instant::now());
        let begun = Instant::now();
        for look in 0..100_000u64 {
            roles.step(begun + Duration::from_millis(look), look * 10, 0);
            assert!(roles.samples.len() <= SAMPLES_PER_WINDOW as usize + 2);
        }
        assert_eq!(roles.status(begun).role, RoleName::Borrow);
    }
}
