//! Fuzzing of every place where Puma decodes bytes from other programs.
//!
//! A [`Target`] is one such place: a function that takes any bytes and must neither panic nor hang.
//! If there is a second, simpler decoder, the target compares the results. The project's encoders
//! make its seeds, so that a change of the format changes them too.
//!
//! The targets run in three ways:
//! - `cargo test -p fuzz` runs seeds and kept inputs ([`corpus`]), with the ordinary compiler: an
//!   earlier finding stays found;
//! - `make fuzz-short`, part of `make test`, runs libFuzzer for some seconds each;
//! - `make fuzz` runs it for minutes or hours.
//!
//! Must never happen here: a target waits for a clock, or its result depends on earlier runs
//! in the process.

pub mod corpus;
mod targets;

// The command is a program, no library: its parsers are included here unchanged.
#[allow(dead_code)]
#[path = "../../../crates/pumapool/src/daemon/control.rs"]
mod control;
#[allow(dead_code)]
#[path = "../../../crates/pumapool/src/cli/size.rs"]
mod size;
#[allow(dead_code)]
#[path = "../../../crates/pumapool/src/commands/status.rs"]
mod status;
#[allow(dead_code)]
#[path = "../../../crates/pumapool/src/cli/status.rs"]
mod status_options;

// Where they look for each other.
mod cli {
    pub(crate) use crate::{size, status_options as status};
}
mod daemon {
    pub(crate) use crate::control;
}

pub use targets::{TARGETS, Target, find};
