//! The early end of a program that controls the machine: a problem that it describes, or a signal.
//! In both cases it unwinds through the guards that clean up, and never exits on the spot.

use std::fmt;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Exit code of a test program: the tested program is broken.
pub const BROKEN: u8 = 1;
/// Exit code of a test program: the test could not run.
pub const NOT_RUN: u8 = 2;
/// Exit codes of programs ended by a signal begin here.
pub const SIGNALLED: u8 = 128;

/// The exit code of a program that has cleaned up; true means success. Prints the problem that
/// prevented its end.
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

/// The reason why a program did not reach its end.
#[derive(Debug)]
pub enum Failure {
    /// This signal arrived.
    Interrupted(i32),
    /// One line: what was attempted, what happened, what to do.
    Problem(String),
}

impl Failure {
    /// Adds the attempted action to an error.
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

/// Whether the program has to stop. Every long operation checks this.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicUsize>);

impl Interrupt {
    /// Handles the signals that ask a program to end.
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
