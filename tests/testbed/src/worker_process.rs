//! A worker process that is measured: the own program, started again with a hidden subcommand
//! inside the groups under test. Orders go to its standard input, answers come from its standard
//! output, one JSON value a line.
//!
//! Both ends are here: [`WorkerProcess`] for the sender of orders, [`next_order`] and [`answer`]
//! for the receiver.

use crate::failure::{Failure, Interrupt};
use crate::group::Group;
use crate::process::{Line, Process};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::{self, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// Pause between two checks for an interrupt.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Time limit for a process to end after it has closed its output.
const END_MAX: Duration = Duration::from_secs(1);

/// The sender's end. Dropping it asks the process to end.
pub struct WorkerProcess<'a> {
    name: &'static str,
    process: Process,
    orders: Option<ChildStdin>,
    interrupt: &'a Interrupt,
}

impl<'a> WorkerProcess<'a> {
    /// Starts this program with that subcommand, which is also its name in messages.
    ///
    /// # Errors
    /// Fails if it cannot be started.
    pub fn start(
        name: &'static str,
        groups: &[&Group],
        interrupt: &'a Interrupt,
    ) -> Result<WorkerProcess<'a>, Failure> {
        let own = std::env::current_exe().map_err(Failure::attempted("finding this program"))?;
        // A page is charged to the process that reads it first. Otherwise read-ahead of the
        // program's own pages would be charged to the worker as memory that it needs, and later
        // make room for its data.
        let read = File::open(&own).and_then(|mut program| io::copy(&mut program, &mut io::sink()));
        read.map_err(Failure::attempted(format!("reading {}", own.display())))?;
        let mut command = Command::new(own);
        command.arg(name).stdin(Stdio::piped());
        let mut process = Process::spawn(command, groups)?;
        let orders = process.take_stdin();
        Ok(WorkerProcess { name, process, orders, interrupt })
    }

    /// Sends it an order, or any other input.
    ///
    /// # Errors
    /// Fails if it does not accept input any more.
    pub fn send(&mut self, what: &impl Serialize) -> Result<(), Failure> {
        let line = serde_json::to_string(what).map_err(|error| Failure::Problem(error.to_string()))?;
        let orders = self.orders.as_mut();
        let orders = orders.ok_or_else(|| Failure::Problem(format!("the {} takes no orders", self.name)))?;
        writeln!(orders, "{line}").map_err(Failure::attempted(format!("telling the {} what to do", self.name)))
    }

    /// Receives its next answer, waiting at most `limit`.
    ///
    /// # Errors
    /// Fails if it sends nothing, or no answer, or ends; and if the run was interrupted.
    pub fn receive<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<T, Failure> {
        let (name, begin) = (self.name, Instant::now());
        loop {
            self.interrupt.check()?;
            match self.process.next_line(LOOK_EVERY) {
                Line::Text(line) => {
                    let understood = serde_json::from_str(&line);
                    return understood.map_err(|error| Failure::Problem(format!("the {name} sent {line:?}: {error}")));
                }
                Line::Timeout if begin.elapsed() < limit => {}
                Line::Timeout => {
                    let message = format!("the {name} printed nothing for {limit:?}; one of its reads hangs");
                    return Err(Failure::Problem(message));
                }
                Line::End => {
                    let end = self.process.wait(END_MAX)?;
                    let end = end.map_or("closed its output".to_owned(), |status| format!("ended ({status})"));
                    return Err(Failure::Problem(format!("the {name} {end} before its work was done")));
                }
            }
        }
    }

    /// Makes it end, because there are no more orders. Dropping this kills a process that hangs.
    ///
    /// # Errors
    /// Fails if it cannot be waited for.
    pub fn end(&mut self, limit: Duration) -> io::Result<()> {
        drop(self.orders.take());
        self.process.wait(limit).map(drop)
    }
}

/// In the process: receives the next order. `None`: there are no more.
///
/// # Errors
/// Fails if the input is no order.
pub fn next_order<T: DeserializeOwned>() -> Result<Option<T>, String> {
    let Some(line) = io::stdin().lines().next() else { return Ok(None) };
    let line = line.map_err(|error| format!("reading orders: {error}"))?;
    serde_json::from_str(&line).map(Some).map_err(|error| format!("understanding an order: {error}"))
}

/// In the process: sends an answer.
///
/// # Errors
/// Fails if nothing reads it.
pub fn answer(what: &impl Serialize) -> Result<(), String> {
    let line = serde_json::to_string(what).map_err(|error| error.to_string())?;
    writeln!(io::stdout().lock(), "{line}").map_err(|error| format!("answering: {error}"))
}

/// In the process: keeps the pages of the program in memory, so that none is read from the disk in
/// the middle of a measurement. Without the right for that, it keeps a few.
pub fn hold_program() {
    let _not_allowed = rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT);
}
