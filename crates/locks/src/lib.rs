//! The locks, condition variables and atomics of the lender and the borrower.
//!
//! In every normal build they are those of parking_lot and the standard library, re-exported,
//! without a wrapper or a cost. With the feature `shuttle` they are shuttle's, with the same names
//! and calls. So a test can run the project's own code under every choice of the next thread
//! (`make interleavings`).
//!
//! Only the calls that the project uses exist. Must never happen: the feature is on in a build
//! that is not a test. Code that uses it works inside `shuttle::check…` only.

#[cfg(feature = "shuttle")]
mod checked;
pub mod spinning;

#[cfg(feature = "shuttle")]
pub use checked::{Condvar, Mutex, MutexGuard, RwLock, explore};
#[cfg(not(feature = "shuttle"))]
pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

/// Atomics with the names of the standard library's.
pub mod atomic {
    #[cfg(feature = "shuttle")]
    pub use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
    pub use std::sync::atomic::Ordering;
    #[cfg(not(feature = "shuttle"))]
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
}

/// The parts of shuttle that tests need.
#[cfg(feature = "shuttle")]
pub use shuttle;
