//! Stalls: times at which a thread was ready to run, but got no processor.
//!
//! A test of a time limit can fail because the machine is busy. This module measures that, so that
//! such a test is repeated only if the machine explains the failure.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two samples. Short compared with a stall that matters.
const SAMPLE_EVERY: Duration = Duration::from_millis(25);

/// A stall of the processes that a [`Stalls`] measures, within its window.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stall {
    /// How long they waited for a processor: the sum over the processes, of each the longest wait
    /// of a thread. So long an answer may be late that passes through one thread of each.
    pub waited: Duration,
    /// The process that waited longest; 0 if no stall was measured.
    pub pid: u32,
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "threads waited {:?} for a processor, most of it in process {}", self.waited, self.pid)
    }
}

/// A measurement of stalls, by a thread that ends with this value. It covers the processes that
/// were added.
pub struct Stalls {
    shared: Arc<Mutex<State>>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    window: Duration,
    pids: Vec<u32>,
    /// For each thread, its waiting time since it began, in nanoseconds, at the times of the
    /// samples in the window.
    samples: HashMap<(u32, u32), VecDeque<(Instant, u64)>>,
    longest: Stall,
}

impl Stalls {
    /// Begins the measurement. A stall counts only as far as it is within one `window`.
    pub fn measure(window: Duration) -> Stalls {
        let own = std::process::id();
        let state = State { window, pids: Vec::new(), samples: HashMap::new(), longest: Stall::default() };
        let shared = Arc::new(Mutex::new(state));
        let (end, ended) = channel::<()>();
        let for_thread = shared.clone();
        let thread = std::thread::spawn(move || {
            let mut before = Instant::now();
            while ended.recv_timeout(SAMPLE_EVERY) == Err(RecvTimeoutError::Timeout) {
                let mut state = lock(&for_thread);
                // If the whole machine stands still, only this shows it.
                state.note(before.elapsed().saturating_sub(SAMPLE_EVERY), own);
                state.sample();
                before = Instant::now();
            }
        });
        Stalls { shared, end: Some(end), thread: Some(thread) }
    }

    /// Adds a process, from now on.
    pub fn add(&self, pid: u32) {
        let mut state = lock(&self.shared);
        state.pids.push(pid);
        state.sample();
    }

    /// The longest stall so far. The kernel counts a wait when it ends, so that one may show late.
    pub fn longest(&self) -> Stall {
        lock(&self.shared).longest.clone()
    }
}

impl Drop for Stalls {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _it_may_have_panicked = thread.join();
        }
    }
}

impl State {
    fn note(&mut self, waited: Duration, pid: u32) {
        if waited > self.longest.waited {
            self.longest = Stall { waited, pid };
        }
    }

    fn sample(&mut self) {
        let now = Instant::now();
        let (mut sum, mut worst) = (Duration::ZERO, Stall::default());
        for pid in self.pids.clone() {
            let mut longest = Duration::ZERO;
            for (tid, waited_ns) in waiting_times(pid) {
                let samples = self.samples.entry((pid, tid)).or_default();
                samples.push_back((now, waited_ns));
                while samples.front().is_some_and(|(at, _)| now - *at > self.window) {
                    samples.pop_front();
                }
                let first_ns = samples.front().map_or(waited_ns, |(_, waited_ns)| *waited_ns);
                longest = longest.max(Duration::from_nanos(waited_ns.saturating_sub(first_ns)));
            }
            sum += longest;
            if longest > worst.waited {
                worst = Stall { waited: longest, pid };
            }
        }
        self.note(sum, worst.pid);
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// For each thread of a process, the time in nanoseconds that it has waited for a processor so far.
/// Empty if the process has ended.
fn waiting_times(pid: u32) -> Vec<(u32, u64)> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let of = |thread: fs::DirEntry| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        // The second number (Documentation/scheduler/sched-stats.rst).
        let waited_ns = text.split_whitespace().nth(1)?.parse().ok()?;
        Some((thread.file_name().to_str()?.parse().ok()?, waited_ns))
    };
    threads.flatten().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Done, wait_until};
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn threads_that_share_a_processor_are_stalled() {
        let stalls = Stalls::measure(Duration::from_secs(1));
        stalls.add(std::process::id());
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _done = Done(&is_over);
            // More than any machine has processors for.
            for _ in 0..4 * std::thread::available_parallelism().unwrap().get() {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let is_stalled = || stalls.longest().waited > Duration::from_millis(100);
            assert!(wait_until(Duration::from_secs(60), is_stalled), "{}", stalls.longest());
        });
        assert_eq!(stalls.longest().pid, std::process::id());
    }

    #[test]
    fn a_process_that_has_ended_has_no_threads() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert_eq!(waiting_times(pid), []);
        assert!(!waiting_times(std::process::id()).is_empty());
    }
}
