//! A lock around data that a panic could leave half changed.
//!
//! Must never happen: that a thread continues with such data, because a page could then be
//! found under another name. So a panic while it is locked ends the process. This costs nothing:
//! borrowers read the lost pages from the disk instead.

use locks::{Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};

/// A locked value that is consistent whenever it is not locked.
pub struct Whole<T>(Mutex<T>);

impl<T> Whole<T> {
    /// A consistent value.
    pub fn new(value: T) -> Whole<T> {
        Whole(Mutex::new(value))
    }

    /// Waits until no other thread has it.
    pub fn lock(&self) -> Guard<'_, T> {
        Guard { value: self.0.lock(), was_panicking: std::thread::panicking() }
    }
}

/// While it lives, the value may be inconsistent.
pub struct Guard<'a, T> {
    value: MutexGuard<'a, T>,
    /// The lock was taken for cleanup after a panic elsewhere.
    was_panicking: bool,
}

impl<T> Guard<'_, T> {
    /// Gives the lock to a waiting thread first.
    pub fn bump(&mut self) {
        MutexGuard::bump(&mut self.value);
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // A panic under shuttle is a test's, which has yet to report the order of threads.
        if std::thread::panicking() && !self.was_panicking && !cfg!(feature = "shuttle") {
            tracing::error!("this lender ends: what it keeps may be damaged by the panic before; please report it");
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    /// Set in the process that has to end.
    const PANICS: &str = "PUMA_TEST_PANICS";

    #[test]
    fn a_panic_while_it_is_locked_ends_the_process() {
        const NAME: &str = "whole::tests::a_panic_while_it_is_locked_ends_the_process";
        struct AtTheEnd<'a>(&'a Whole<i32>);
        impl Drop for AtTheEnd<'_> {
            fn drop(&mut self) {
                *self.0.lock() += 1;
            }
        }
        let value = Whole::new(1);
        if std::env::var_os(PANICS).is_some() {
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let _guard = value.lock();
                panic!("on purpose");
            }));
            return;
        }
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _at_the_end = AtTheEnd(&value);
            panic!("on purpose, while nothing is locked");
        }));
        let program = std::env::current_exe().unwrap();
        let output = Command::new(program).args(["--exact", NAME, "--nocapture"]).env(PANICS, "1").output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{output:?}");
        assert_eq!(*value.lock(), 2);
    }
}
