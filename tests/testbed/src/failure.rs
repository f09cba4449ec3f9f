//! How a program ends early that controls the machine: a problem that it can name, or a signal.
//! Either way by unwinding through the guards that clean up, never by exiting on the spot.

use std::fmt;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Exit code of a test program: what it looked at is broken.
pub const BROKEN: u8 = 1;
/// Exit code of a test program: it could not be run.
pub const NOT_RUN: u8 = 2;
/// Exit codes of programs ended by a signal begin here.
pub const SIGNALLED: u8 = 128;

/// The exit code of a program that has cleaned up, where true is good. Says what was in the way of
/// its end.
pub fn exit_code(outcome: Result<bool, Failure>) -> ExitCode {
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(BROKEN),
        Err(Failure::Interrupted(signal)) => {
            eprintln!("Interrupted. Everything that was made is removed.");
            ExitCode::from(SIGNALLED + u8::try_from(signal).unwrap_or(0))
        }
        Err(Failure::Problem(problem)) => {
            eprintln!("This could not be run to its end: {}", problem.replace('\n', " "));
            ExitCode::from(NOT_RUN)
        }
    }
}

/// Why a program did not reach its end.
#[derive(Debug)]
pub enum Failure {
    /// This signal arrived.
    Interrupted(i32),
    /// One line: what was attempted, what happened, what to do.
    Problem(String),
}

impl Failure {
    /// A problem with what was attempted before it.
    pub fn attempted(what: impl fmt::Display) -> impl FnOnce(io::Error) -> Failure {
        move |error| Failure::Problem(format!("{what}: {error}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Interrupted(signal) => write!(f, "interrupted by signal {signal}"),
            Failure::Problem(problem) => f.write_str(problem),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Problem(error.to_string())
    }
}

/// Whether somebody wants us to stop. Everything that takes longer than a moment asks.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicUsize>);

impl Interrupt {
    /// Listens for the signals that ask a program to end.
    pub fn listen() -> io::Result<Interrupt> {
        let flag = Arc::new(AtomicUsize::new(0));
        for (signal, value) in
            [(signal_hook::consts::SIGINT, 2), (signal_hook::consts::SIGTERM, 15), (signal_hook::consts::SIGHUP, 1)]
        {
            signal_hook::flag::register_usize(signal, Arc::clone(&flag), value)?;
        }
        Ok(Interrupt(flag))
    }

    /// Fails once a signal has arrived.
    pub fn check(&self) -> Result<(), Failure> {
        match self.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            signal => Err(Failure::Interrupted(i32::try_from(signal).unwrap_or(i32::MAX))),
        }
    }
}
