//! Fuzzing: every place where Puma takes bytes apart that somebody else has written.
//!
//! A [`Target`] is one such place: a function that is handed any bytes at all and must neither
//! panic nor hang, and that checks what comes out against a second, simpler reading of the same
//! bytes where there is one. Its seeds are made by the encoders of the project, so that a change of
//! the format changes them too.
//!
//! Three ways lead through the same targets:
//! - `cargo test -p fuzz` runs seeds and kept inputs ([`corpus`]), with the ordinary compiler: what
//!   was found once stays found;
//! - `make fuzz-short`, part of `make test`, lets libFuzzer look for new inputs, some seconds each;
//! - `make fuzz` does so for minutes or hours.
//!
//! Must never happen here: a target that waits for a clock, or whose result depends on what ran
//! before it in the process.

pub mod corpus;
mod targets;

// The command is a program, no library: what it parses is included here as it stands.
#[allow(dead_code)]
#[path = "../../../crates/pumapool/src/control.rs"]
mod control;
#[allow(dead_code)]
#[path = "../../../crates/pumapool/src/size.rs"]
mod size;
#[allow(dead_code)]
#[path = "../../../crates/pumapool/src/status.rs"]
mod status;

pub use targets::{TARGETS, Target, find};
