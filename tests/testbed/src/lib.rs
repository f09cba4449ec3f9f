//! Tools of end-to-end tests and the demo to control their machine.
//!
//! - [`Group`]: a control group, with a memory limit or none, on or off a slow disk ([`SlowDisk`]).
//!   It works with cgroup v1, v2, and a machine that mixes both.
//! - [`Process`]: a child that is in its groups before its program starts, and that ends with its
//!   guard.
//! - [`WorkerProcess`]: the own program once more as a worker process, which takes orders and is
//!   measured.
//! - [`MemoryHog`]: a child that allocates memory and holds it.
//! - [`Stalls`]: how long threads of processes waited for a processor.
//! - [`Puma`]: the real command, with daemons that are ready and mounts that end with their guard.
//! - [`Relay`]: forwards TCP connections with a delay.
//! - [`Scratch`]: a temporary directory for files and mounts of a test.
//! - [`RamDisk`]: a file system of its own on an image in memory.
//! - [`Frozen`]: a file system that is frozen, and thawed in any case.
//! - [`LateMemory`]: memory whose pages arrive on request.
//! - [`Lease`]: a lease on a file, which delays processes that open it.
//! - [`left_behind()`]: the things that a program using this crate did not remove.
//! - [`fsx_settings`]: the operations of `fsx` on a file.
//! - [`Failure`], [`Interrupt`]: the early end of a program that uses this crate.
//!
//! This crate guarantees that everything made here is removed once its guard is dropped, also on
//! panic. The next run with the same name removes the remains of a killed run. Only processes that
//! were started here, or found inside a group made here, are ever signalled.
//!
//! The code is our own because it is small, and because no crate covers both versions of control
//! groups.

mod cgroup;
mod disk;
mod failure;
mod frozen;
mod fsx;
mod group;
mod late;
mod lease;
mod left_behind;
mod memory_hog;
mod mounts;
mod process;
mod pumapool;
mod ram_disk;
mod relay;
mod resident;
mod scratch;
mod stall;
mod wait;
mod worker_process;

pub use cgroup::Version;
pub use disk::{BlockDevice, ReadAhead, SlowDisk};
pub use failure::{BROKEN, Failure, Interrupt, NOT_RUN, SIGNALLED, exit_code};
pub use frozen::Frozen;
pub use fsx::fsx_settings;
pub use group::{Group, MemoryUse};
pub use late::LateMemory;
pub use lease::Lease;
pub use left_behind::left_behind;
pub use memory_hog::MemoryHog;
pub use process::{Line, Process, sibling_binary};
pub use pumapool::{Puma, PumaMount, ask_daemon, tail};
pub use ram_disk::{FileSystem, RamDisk, run_program};
pub use relay::Relay;
pub use resident::cached_pages;
pub use scratch::Scratch;
pub use stall::{Stall, Stalls};
pub use wait::{Done, answers, wait_until, wait_until_aged, wait_until_ok};
pub use worker_process::{WorkerProcess, answer, hold_program, next_order};

use std::fmt::Display;
use std::io::{self, Write};

/// If it is set in the environment (to anything), every skipped test fails instead.
pub const NO_SKIP_VARIABLE: &str = "PUMA_NO_SKIP";

/// Reports that a test cannot run on this machine. The caller returns afterwards.
///
/// # Panics
/// Panics if [`NO_SKIP_VARIABLE`] is set: then a test that cannot run has failed.
pub fn skip(test: &str, reason: impl Display) {
    if std::env::var_os(NO_SKIP_VARIABLE).is_some() {
        panic!("{test} must not be skipped here ({NO_SKIP_VARIABLE} is set), but: {reason}");
    }
    // Directly to standard error, because the test runner hides the output of a passing test.
    let _ = writeln!(io::stderr(), "SKIPPED {test}: {reason}");
}

/// The same kind of error, with the attempted action in front.
fn attempted(what: impl Display) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}
