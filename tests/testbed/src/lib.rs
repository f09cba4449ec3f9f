//! What end-to-end tests and the demo need to control the machine they run on.
//!
//! - [`Group`]: a control group, with a memory limit or none, on or off a slow disk ([`SlowDisk`]).
//!   cgroup v1, v2, and a machine that mixes both.
//! - [`Process`]: a child that is in its groups before its program starts, and that dies with its
//!   guard.
//! - [`Servant`]: the own program once more, which does what it is told and is measured.
//! - [`Squeeze`]: a child that allocates memory and holds it.
//! - [`Puma`]: the real command, with daemons that are ready and mounts that go with their guard.
//! - [`Relay`]: passes TCP connections on, late.
//! - [`Scratch`]: a directory for what a test writes and mounts.
//! - [`RamDisk`]: a file system of its own on an image in memory.
//! - [`Frozen`]: a file system that is frozen, and thawed whatever happens.
//! - [`LateMemory`]: memory whose pages arrive when they are told to.
//! - [`Lease`]: a lease on a file, which holds up whoever opens it.
//! - [`left_behind()`]: what a program that uses this crate did not take away.
//! - [`fsx_settings`]: what `fsx` is to do to a file.
//! - [`Failure`], [`Interrupt`]: how a program that uses all this ends early.
//!
//! It promises that everything made here is gone once its guard is dropped, also on panic. What a
//! killed run left behind is swept by the next one that uses the same name. Only processes started
//! here, or found inside a group made here, are ever signalled.
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
mod mounts;
mod process;
mod pumapool;
mod ram_disk;
mod relay;
mod resident;
mod scratch;
mod servant;
mod squeeze;
mod wait;

pub use cgroup::Version;
pub use disk::{BlockDevice, ReadAhead, SlowDisk};
pub use failure::{BROKEN, Failure, Interrupt, NOT_RUN, SIGNALLED, exit_code};
pub use frozen::Frozen;
pub use fsx::fsx_settings;
pub use group::{Group, MemoryUse};
pub use late::LateMemory;
pub use lease::Lease;
pub use left_behind::left_behind;
pub use process::{Line, Process, sibling_binary};
pub use pumapool::{Puma, PumaMount, ask_daemon, tail};
pub use ram_disk::{FileSystem, RamDisk, run_program};
pub use relay::Relay;
pub use resident::cached_pages;
pub use scratch::Scratch;
pub use servant::{Servant, answer, hold_program, next_order};
pub use squeeze::Squeeze;
pub use wait::{Done, answers, wait_until, wait_until_aged, wait_until_ok};

use std::fmt::Display;
use std::io::{self, Write};

/// Set in the environment (to anything), it turns every skipped test into a failed one.
pub const NO_SKIP_VARIABLE: &str = "PUMA_NO_SKIP";

/// Says that a test cannot run on this machine. The caller returns afterwards.
///
/// # Panics
/// Where [`NO_SKIP_VARIABLE`] is set: there a test that cannot run has failed.
pub fn skip(test: &str, reason: impl Display) {
    if std::env::var_os(NO_SKIP_VARIABLE).is_some() {
        panic!("{test} must not be skipped here ({NO_SKIP_VARIABLE} is set), but: {reason}");
    }
    // Past the test runner, which shows what a passing test prints to nobody.
    let _ = writeln!(io::stderr(), "SKIPPED {test}: {reason}");
}

/// The same kind of error, with what was attempted before it.
fn attempted(what: impl Display) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}
