//! A test program started again, as a process of its own: the process that serves a mount must not
//! touch mappings of its files, because its workers would wait for themselves.
#![allow(dead_code)] // Each test binary uses its part of it.

use super::ANSWER_MAX;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getppid, pidfd_getfd, pidfd_open};
use std::fs::File;
use std::io::{BufRead, Write};
use std::os::fd::RawFd;
use std::process::{ChildStdin, Command, Stdio};
use testbed::{Line, Process};

/// The other process. It ends when this is dropped.
pub struct Own {
    role: &'static str,
    orders: ChildStdin,
    process: Process,
}

impl Own {
    /// Starts the program again, to run that ignored test of it.
    pub fn start(role: &'static str) -> Own {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", role, "--nocapture", "--test-threads=1"]).stdin(Stdio::piped());
        let mut process = Process::spawn(command, &[]).unwrap();
        let orders = process.take_stdin().unwrap();
        Own { role, orders, process }
    }

    /// Gives it an order, and returns its answer. None: it has ended.
    pub fn ask(&mut self, order: &str) -> Option<String> {
        writeln!(self.orders, "{order}").ok()?;
        loop {
            match self.process.next_line(ANSWER_MAX) {
                Line::Text(line) => {
                    // The test harness writes to the same output.
                    if let Some((_, answer)) = line.split_once('>') {
                        return Some(answer.to_owned());
                    }
                }
                Line::Timeout => panic!("{} does not answer to {order:?}", self.role),
                Line::End => return None,
            }
        }
    }
}

/// The other process's part: takes orders, and answers each, until no more come.
pub fn answer_orders(mut answer: impl FnMut(&str) -> String) {
    for order in std::io::stdin().lock().lines() {
        println!(">{}", answer(&order.unwrap()));
    }
}

/// The other process's part: a file that the process of the test has open, by the number of the
/// descriptor there. The file is not opened again.
pub fn file_of_test(descriptor: RawFd) -> File {
    let test = pidfd_open(getppid().unwrap(), PidfdFlags::empty()).unwrap();
    pidfd_getfd(test, descriptor, PidfdGetfdFlags::empty()).unwrap().into()
}
