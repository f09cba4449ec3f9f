//! Waiting for a state, never for a time alone: this crate sleeps only here.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant, UNIX_EPOCH};
use std::{fs, io};

/// Pause between two checks of a state that no event announces. Short compared with the wait, long
/// compared with a check.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Twice the value that a mount assumes for the grain of a backing file system's times.
const TIME_GRAIN: Duration = Duration::from_millis(40);

/// Waits until `state` holds, at most `limit`. Returns whether it holds.
pub fn wait_until(limit: Duration, mut state: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if state() {
            return true;
        }
        if start.elapsed() >= limit {
            return false;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Tries until it succeeds, at most for `limit`. Returns the last error if it never did.
pub fn wait_until_ok<T>(limit: Duration, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let start = Instant::now();
    loop {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(error) if start.elapsed() >= limit => return Err(error),
            Err(_) => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

/// Waits until the files' last changes are older than the grain of any file system's times, at most
/// `limit`. If a mount opens them before that, it must assume that they are still being written,
/// and lends none of their pages for half a minute. Returns whether they are old enough.
pub fn wait_until_aged(files: &[PathBuf], limit: Duration) -> bool {
    let has_aged = |file: &PathBuf| {
        let of = fs::metadata(file).ok()?;
        let changed = UNIX_EPOCH + Duration::new(of.ctime().try_into().ok()?, of.ctime_nsec() as u32);
        Some(changed.elapsed().ok()? > TIME_GRAIN)
    };
    wait_until(limit, || files.iter().all(|file| has_aged(file) == Some(true)))
}

/// Runs `action` in a thread of its own, and returns what it returns.
///
/// # Panics
/// Fails if it does not end within `limit`; the thread is left behind.
pub fn answers<T: Send + 'static>(what: &str, limit: Duration, action: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(action()));
    receiver.recv_timeout(limit).unwrap_or_else(|error| panic!("{what}: no answer: {error}"))
}

/// Sets a flag when it is dropped, also by a panic. Otherwise threads of a scope that run until the
/// flag is set would run for ever when a test fails.
pub struct Done<'a>(pub &'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
