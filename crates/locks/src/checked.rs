//! The interface of parking_lot, on shuttle's locks.
//!
//! Like the standard library's locks, shuttle's are poisoned by a panic; here a panic ends the
//! test, so poison never occurs. A time limit never expires: waiting for a notification that never
//! comes is a deadlock, which shuttle reports.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

/// Stands for parking_lot's `Mutex`.
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

/// Stands for parking_lot's `MutexGuard`.
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// `None` only while a call below has released the lock.
    inner: Option<shuttle::sync::MutexGuard<'a, T>>,
}

impl<T> MutexGuard<'_, T> {
    /// Gives the lock to another thread for a moment.
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

/// Stands for parking_lot's `Condvar`.
#[derive(Default)]
pub struct Condvar(shuttle::sync::Condvar);

impl Condvar {
    /// A condition variable without waiters.
    pub fn new() -> Condvar {
        Condvar::default()
    }

    /// Waits for a notification.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let inner = guard.inner.take().expect("locked");
        guard.inner = Some(self.0.wait(inner).unwrap_or_else(|poisoned| poisoned.into_inner()));
    }

    /// Waits for a notification; the limit never expires.
    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _limit: Duration) {
        self.wait(guard);
    }

    /// Waits for a notification; the deadline never expires.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _deadline: Instant) -> Waited {
        self.wait(guard);
        Waited
    }

    /// Waits while `condition` holds.
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

    /// Wakes one waiter.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiters.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// The result of a wait with a limit.
pub struct Waited;

impl Waited {
    /// Always false: see the module's text.
    pub fn timed_out(&self) -> bool {
        false
    }
}

/// Stands for parking_lot's `RwLock`.
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

/// Runs a test under that many schedules (or `PUMA_SCHEDULES`) of two kinds each: a random next
/// thread, and few changes of priority (PCT). `PUMA_SEED` repeats a run. A panic or a deadlock in
/// any of them ends the test, with the schedule to replay.
pub fn explore(schedules: usize, run: impl Fn() + Send + Sync + 'static) {
    use shuttle::scheduler::{PctScheduler, RandomScheduler};
    use std::hash::{BuildHasher, RandomState};
    let told = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let schedules = told("PUMA_SCHEDULES").map_or(schedules, |told| told as usize);
    let seed = told("PUMA_SEED").unwrap_or_else(|| RandomState::new().hash_one(0) >> 32);
    println!("PUMA_SEED={seed}, twice {schedules} schedules");
    let mut config = shuttle::Config::new();
    config.stack_size = STACK_BYTES;
    // Atomics have one order for all threads here. loom tests the effects of weaker orderings
    // (tap's ring).
    config.silence_warnings = true;
    let run = std::sync::Arc::new(run);
    let again = run.clone();
    let random = RandomScheduler::new_from_seed(seed, schedules);
    shuttle::Runner::new(random, config.clone()).run(move || run());
    let few_changes = PctScheduler::new_from_seed(seed, CHANGES, schedules);
    shuttle::Runner::new(few_changes, config).run(move || again());
}
