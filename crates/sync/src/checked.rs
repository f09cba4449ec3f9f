//! parking_lot's calls on shuttle's locks.
//!
//! Shuttle's locks are poisoned by a panic like the standard library's; here a panic ends the test,
//! so that poison is never met. A time limit never runs out: who waits for a notice that nobody
//! gives is a deadlock, which shuttle reports.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

/// As parking_lot's.
#[derive(Default)]
pub struct Mutex<T>(shuttle::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Unlocked.
    pub fn new(value: T) -> Mutex<T> {
        Mutex(shuttle::sync::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { mutex: self, inner: Some(self.take()) }
    }

    fn take(&self) -> shuttle::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// As parking_lot's.
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// Missing only while a call below has given the lock away.
    inner: Option<shuttle::sync::MutexGuard<'a, T>>,
}

impl<T> MutexGuard<'_, T> {
    /// Lets somebody else have the lock for a moment.
    pub fn bump(guard: &mut Self) {
        guard.inner = None;
        shuttle::thread::yield_now();
        guard.inner = Some(guard.mutex.take());
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.inner.as_ref().expect("locked")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("locked")
    }
}

/// As parking_lot's.
#[derive(Default)]
pub struct Condvar(shuttle::sync::Condvar);

impl Condvar {
    /// Nobody waits.
    pub fn new() -> Condvar {
        Condvar::default()
    }

    /// Waits for a notice.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let inner = guard.inner.take().expect("locked");
        guard.inner = Some(self.0.wait(inner).unwrap_or_else(|poisoned| poisoned.into_inner()));
    }

    /// Waits for a notice.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _limit: Duration) {
        self.wait(guard);
    }

    /// Waits for a notice.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _deadline: Instant) -> Waited {
        self.wait(guard);
        Waited
    }

    /// Waits for as long as `condition` holds.
    pub fn wait_while_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        mut condition: impl FnMut(&mut T) -> bool,
        _limit: Duration,
    ) {
        while condition(guard) {
            self.wait(guard);
        }
    }

    /// Wakes one.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// How a wait with a limit has ended.
pub struct Waited;

impl Waited {
    /// Never: see above.
    pub fn timed_out(&self) -> bool {
        false
    }
}

/// As parking_lot's.
#[derive(Default)]
pub struct RwLock<T>(shuttle::sync::RwLock<T>);

impl<T> RwLock<T> {
    /// Unlocked.
    pub fn new(value: T) -> RwLock<T> {
        RwLock(shuttle::sync::RwLock::new(value))
    }

    /// Waits for a reader's lock.
    pub fn read(&self) -> shuttle::sync::RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Waits for the writer's lock.
    pub fn write(&self) -> shuttle::sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Bytes of a thread's stack in a test: some of the code keeps pages on it.
const STACK_BYTES: usize = 256 << 10;

/// Changes of priority in a schedule: most bugs need one or two.
const CHANGES: usize = 3;

/// Runs a test under that many schedules (or `PUMA_SCHEDULES`) of two kinds each: any thread next,
/// and few changes of priority (PCT). `PUMA_SEED` repeats a run. A panic or a deadlock in any of
/// them ends the test, with the schedule to replay.
pub fn explore(schedules: usize, run: impl Fn() + Send + Sync + 'static) {
    use shuttle::scheduler::{PctScheduler, RandomScheduler};
    use std::hash::{BuildHasher, RandomState};
    let told = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let schedules = told("PUMA_SCHEDULES").map_or(schedules, |told| told as usize);
    let seed = told("PUMA_SEED").unwrap_or_else(|| RandomState::new().hash_one(0) >> 32);
    println!("PUMA_SEED={seed}, twice {schedules} schedules");
    let mut config = shuttle::Config::new();
    config.stack_size = STACK_BYTES;
    // Atomics have one order for all threads here: what weaker orderings allow is loom's part
    // (tap's ring).
    config.silence_warnings = true;
    let run = std::sync::Arc::new(run);
    let again = run.clone();
    let random = RandomScheduler::new_from_seed(seed, schedules);
    shuttle::Runner::new(random, config.clone()).run(move || run());
    let few_changes = PctScheduler::new_from_seed(seed, CHANGES, schedules);
    shuttle::Runner::new(few_changes, config).run(move || again());
}
