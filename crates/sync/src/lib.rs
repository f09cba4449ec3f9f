//! The locks, condition variables and atomics of the lender and the borrower.
//!
//! In every normal build they are parking_lot's and the standard library's, re-exported: nothing is
//! wrapped and nothing costs anything. With the feature `shuttle` they are shuttle's, under the
//! same names and with the same calls, so that a test can run the project's own code under every
//! choice of what thread goes next (`make interleavings`).
//!
//! Only the calls that the project uses are there. Must never happen: the feature in a build that
//! is not a test; code that uses it works inside of `shuttle::check…` only.

#[cfg(feature = "shuttle")]
mod checked;
pub mod polling;

#[cfg(feature = "shuttle")]
pub use checked::{Condvar, Mutex, MutexGuard, RwLock, explore};
#[cfg(not(feature = "shuttle"))]
pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

/// Atomics of the same names as the standard library's.
pub mod atomic {
    #[cfg(feature = "shuttle")]
    pub use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
    pub use std::sync::atomic::Ordering;
    #[cfg(not(feature = "shuttle"))]
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
}

/// What tests need of shuttle itself.
#[cfg(feature = "shuttle")]
pub use shuttle;
