//! Measured programs of others: in groups of their own, with their output read line by line.

use crate::world::World;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testbed::{Failure, Group, Line, Process};

/// Pause between two checks for an interrupt.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A program without output for so long counts as hanging.
const SILENT_MAX: Duration = Duration::from_secs(3600);
/// Lines of its standard error that are shown.
const LOG_LINES: usize = 6;
/// Time limit for a program to end after it has closed its output.
const END_MAX: Duration = Duration::from_secs(60);

/// A running program. Dropping it asks it to end.
pub struct Program<'a> {
    world: &'a World,
    name: String,
    log: PathBuf,
    /// Length of the log before.
    log_bytes: usize,
    process: Process,
}

impl<'a> Program<'a> {
    /// Starts it. Its standard error goes to a log of that name.
    pub fn start(
        world: &'a World,
        name: &str,
        mut command: Command,
        groups: &[&Group],
    ) -> Result<Program<'a>, Failure> {
        let log = world.log(name);
        let file = File::options().create(true).append(true).open(&log);
        command.stderr(file.map_err(Failure::attempted(format!("writing {}", log.display())))?);
        let log_bytes = fs::metadata(&log).map_or(0, |log| log.len() as usize);
        let process = Process::spawn(command, groups)?;
        Ok(Program { world, name: name.to_owned(), log, log_bytes, process })
    }

    /// The process, for needs of some programs.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// The next line of its output. `None`: it has ended, with success.
    pub fn next_line(&mut self) -> Result<Option<String>, Failure> {
        let begin = Instant::now();
        loop {
            self.world.interrupt.check()?;
            match self.process.next_line(LOOK_EVERY) {
                Line::Text(line) => return Ok(Some(line)),
                Line::Timeout if begin.elapsed() < SILENT_MAX => {}
                Line::Timeout => return Err(self.problem(&format!("said nothing for {SILENT_MAX:?}"))),
                Line::End => break,
            }
        }
        match self.process.wait(END_MAX)? {
            Some(status) if status.success() => Ok(None),
            Some(status) => Err(self.problem(&format!("ended with {status}"))),
            None => Err(self.problem("closed its output, and did not end")),
        }
    }

    /// Reads its output to the end, which must be a success. Returns all of it.
    pub fn finish(mut self) -> Result<String, Failure> {
        let mut said = String::new();
        while let Some(line) = self.next_line()? {
            said.push_str(&line);
            said.push('\n');
        }
        Ok(said)
    }

    /// With the beginning of its standard error: the end often only repeats the place of the error.
    fn problem(&self, what: &str) -> Failure {
        let log = fs::read(&self.log).unwrap_or_default();
        let own = String::from_utf8_lossy(log.get(self.log_bytes..).unwrap_or_default()).into_owned();
        let said: Vec<&str> = own.lines().filter(|line| !line.is_empty()).take(LOG_LINES).collect();
        Failure::Problem(format!("{} {what}; its errors: {}", self.name, said.join(" / ")))
    }
}

/// Runs a program to its end, which must be a success. Returns its output.
pub fn run(world: &World, name: &str, mut command: Command, groups: &[&Group]) -> Result<String, Failure> {
    command.stdin(Stdio::null());
    Program::start(world, name, command, groups)?.finish()
}

/// Fails if one of these programs is missing. After this they and their libraries are in memory,
/// and charged to no measured group: their size does not depend on the data.
pub fn check(names: &[&str]) -> Result<(), Failure> {
    for name in names {
        let program = find(name)?;
        // It prints nothing about a script or a static program.
        let libraries = Command::new("ldd").arg(&program).stdin(Stdio::null()).stderr(Stdio::null()).output();
        let libraries = libraries.map(|said| String::from_utf8_lossy(&said.stdout).into_owned()).unwrap_or_default();
        let libraries = libraries.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from);
        for file in libraries.chain([program]) {
            let read = File::open(&file).and_then(|mut file| io::copy(&mut file, &mut io::sink()));
            read.map_err(Failure::attempted(format!("reading {}", file.display())))?;
        }
    }
    Ok(())
}

/// Finds a program that may be missing on this machine.
pub fn find(name: &str) -> Result<PathBuf, Failure> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).chain(postgres()).map(|directory| directory.join(name));
    let mut found = found.filter(|path| path.is_file());
    found.next().ok_or_else(|| Failure::Problem(format!("{name} is missing: `make paper-deps` installs it")))
}

/// Debian keeps the programs of PostgreSQL in a directory for each version. The newest is used.
fn postgres() -> Option<PathBuf> {
    let versions = Path::new("/usr/lib/postgresql").read_dir().ok()?;
    versions.flatten().map(|entry| entry.path().join("bin")).filter(|path| path.join("postgres").exists()).max()
}
