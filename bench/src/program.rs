//! Programs of others that are measured: in groups of their own, and what they say is read line by
//! line.

use crate::world::World;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testbed::{Failure, Group, Line, Process};

/// Between two looks whether somebody wants us to stop.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A program that says nothing for so long hangs.
const SILENT_MAX: Duration = Duration::from_secs(3600);
/// Lines of its complaints that are shown.
const LOG_LINES: usize = 6;
/// For one that has closed its output to end.
const END_MAX: Duration = Duration::from_secs(60);

/// One that runs. It is asked to end when dropped.
pub struct Program<'a> {
    world: &'a World,
    name: String,
    log: PathBuf,
    /// What was in it before.
    log_bytes: usize,
    process: Process,
}

impl<'a> Program<'a> {
    /// Starts it. What it complains of goes to a log of that name.
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

    /// The process, for what only some programs need.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// What it says next. None: it has ended, and well.
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

    /// Reads what it says to the end, which must be a good one. Returns all of it.
    pub fn finish(mut self) -> Result<String, Failure> {
        let mut said = String::new();
        while let Some(line) = self.next_line()? {
            said.push_str(&line);
            said.push('\n');
        }
        Ok(said)
    }

    /// With the beginning of what it complained of: the end is often no more than where that was.
    fn problem(&self, what: &str) -> Failure {
        let log = fs::read(&self.log).unwrap_or_default();
        let own = String::from_utf8_lossy(log.get(self.log_bytes..).unwrap_or_default()).into_owned();
        let said: Vec<&str> = own.lines().filter(|line| !line.is_empty()).take(LOG_LINES).collect();
        Failure::Problem(format!("{} {what}; it complained: {}", self.name, said.join(" / ")))
    }
}

/// Runs one to its end, which must be a good one. Returns what it said.
pub fn run(world: &World, name: &str, mut command: Command, groups: &[&Group]) -> Result<String, Failure> {
    command.stdin(Stdio::null());
    Program::start(world, name, command, groups)?.finish()
}

/// Fails where one of these programs is missing. They and their libraries are then in memory, and
/// in no group's that is measured: they are as large however small the data are.
pub fn check(names: &[&str]) -> Result<(), Failure> {
    for name in names {
        let program = find(name)?;
        // Of a script or a static program it says nothing.
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

/// Where a program is that this machine may not have.
pub fn find(name: &str) -> Result<PathBuf, Failure> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).chain(postgres()).map(|directory| directory.join(name));
    let mut found = found.filter(|path| path.is_file());
    found.next().ok_or_else(|| Failure::Problem(format!("{name} is missing: `make paper-deps` installs it")))
}

/// Debian keeps the programs of PostgreSQL in a directory for each version. The newest.
fn postgres() -> Option<PathBuf> {
    let versions = Path::new("/usr/lib/postgresql").read_dir().ok()?;
    versions.flatten().map(|entry| entry.path().join("bin")).filter(|path| path.join("postgres").exists()).max()
}
