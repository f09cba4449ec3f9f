//! Public programs as load: fsx (file system exerciser, with mappings) and fio (with verification),
//! each in a small memory cgroup, run again and again with new seeds. Each checks its reads in its
//! own way; any complaint is a violation.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use testbed::{Failure, Group, Line, Process};

/// Operations of fsx in one process. Version 0.3.2 never unmaps its mappings, so a long run would
/// need more and more memory.
const FSX_OPS: u64 = 1_000;
const FSX_FILE_BYTES: u64 = 4 << 20;
/// Memory cgroup of fsx: it keeps two copies of its file of 4 MiB in its own memory.
const FSX_GROUP_BYTES: u64 = 20 << 20;
/// Memory cgroup of fio: a third of its data.
const FIO_GROUP_BYTES: u64 = 40 << 20;
/// Jobs of fio.
const FIO_JOBS: u32 = 3;
/// Data of each job, in MiB.
const FIO_JOB_MIB: u32 = 40;
/// Time between two evictions of fsx's whole file: the kernel seldom evicts so small a file by
/// itself.
const EVICT_EVERY: Duration = Duration::from_millis(4);
/// Lines of a program's output that are kept for the message.
const SAID_LINES_MAX: usize = 200;

/// Finds the programs in the folder TOOLS of `make tools`, or in the usual places.
pub fn find_tool(name: &str) -> Result<PathBuf, Failure> {
    let tools = std::env::var_os("TOOLS").map_or_else(|| PathBuf::from("target/tools"), PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::iter::once(tools.join("bin")).chain(std::env::split_paths(&path)).map(|folder| folder.join(name));
    let message = || Failure::Problem(format!("{name} is missing; `make tools test-deps` installs it"));
    // Absolute: the program runs in another directory.
    let found = found.into_iter().find(|path| path.is_file()).ok_or_else(message)?;
    std::path::absolute(found).map_err(Failure::from)
}

/// The program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// File system exerciser.
    Fsx,
    /// Reads and writes with verification.
    Fio,
}

/// One of the running programs.
pub struct Suite {
    kind: Kind,
    program: PathBuf,
    directory: PathBuf,
    scratch: PathBuf,
    seed: u64,
    fio_job_iops: u32,
    evictor: Option<Evictor>,
    // In this order: the process before its group.
    process: Option<Process>,
    group: Group,
    said: Vec<String>,
    /// Runs that ended without a complaint.
    pub runs: u64,
}

impl Suite {
    /// Prepares it. It works in `directory`; `scratch` is for its other files. `fio_job_iops`
    /// limits fio's load, so that parallel measurements need not wait for the processor.
    pub fn new(kind: Kind, directory: &Path, scratch: &Path, seed: u64, fio_job_iops: u32) -> Result<Suite, Failure> {
        let (name, bytes) = match kind {
            Kind::Fsx => ("fsx", FSX_GROUP_BYTES),
            Kind::Fio => ("fio", FIO_GROUP_BYTES),
        };
        let mut suite = Suite {
            kind,
            program: find_tool(name)?,
            directory: directory.to_owned(),
            scratch: scratch.to_owned(),
            seed,
            fio_job_iops,
            evictor: None,
            process: None,
            group: Group::create(&format!("chaos-{name}"), Some(bytes), None)?,
            said: Vec::new(),
            runs: 0,
        };
        if kind == Kind::Fsx {
            let file = directory.join("fsx");
            fs::write(&file, "").map_err(Failure::attempted(format!("making {}", file.display())))?;
            suite.evictor = Some(Evictor::start(file));
        }
        Ok(suite)
    }

    /// Starts it again if it has ended and there is to be `more`. Returns whether it runs.
    ///
    /// # Errors
    /// Fails with its complaint.
    pub fn step(&mut self, more: bool) -> Result<bool, String> {
        let Some(process) = &mut self.process else {
            if more {
                self.start().map_err(|failure| failure.to_string())?;
            }
            return Ok(more);
        };
        loop {
            match process.next_line(Duration::ZERO) {
                Line::Text(line) if self.said.len() < SAID_LINES_MAX => self.said.push(line),
                Line::Text(_) => {}
                Line::Timeout => return Ok(true),
                Line::End => break,
            }
        }
        let Some(status) = process.wait(Duration::ZERO).map_err(|error| error.to_string())? else { return Ok(true) };
        self.process = None;
        let said = self.said.join(" / ");
        let content = match self.kind {
            Kind::Fsx => status.success(),
            Kind::Fio => status.success() && said.contains("err= 0") && !said.contains("verify:"),
        };
        if !content {
            return Err(format!("{:?} found a difference or failed (seed {}, {status}): {said}", self.kind, self.seed));
        }
        self.runs += 1;
        if self.kind == Kind::Fio {
            let done = self.fio_directory();
            fs::remove_dir_all(&done).map_err(|error| format!("removing {}: {error}", done.display()))?;
        }
        self.step(more)
    }

    /// Ends fsx at once: each of its operations was judged when it was done.
    pub fn cut_short(&mut self) {
        if let (Kind::Fsx, Some(process)) = (self.kind, &mut self.process) {
            let _ended_by_itself = process.kill();
            self.process = None;
        }
        self.evictor = None;
    }

    fn fio_directory(&self) -> PathBuf {
        self.directory.join(format!("fio-{}", self.seed))
    }

    fn start(&mut self) -> Result<(), Failure> {
        self.seed = self.seed.wrapping_add(1) & u64::from(u32::MAX);
        self.said.clear();
        let mut command = Command::new(&self.program);
        match self.kind {
            Kind::Fsx => {
                let config = self.scratch.join("fsx.toml");
                fs::write(&config, testbed::fsx_settings(FSX_FILE_BYTES))
                    .map_err(Failure::attempted(format!("making {}", config.display())))?;
                let numbers = [FSX_OPS, self.seed].map(|number| number.to_string());
                command.args(["-N", &numbers[0], "-S", &numbers[1], "-f"]).arg(&config);
                command.arg("-P").arg(&self.scratch).arg(self.directory.join("fsx"));
            }
            Kind::Fio => {
                let directory = self.fio_directory();
                fs::create_dir(&directory).map_err(Failure::attempted(format!("making {}", directory.display())))?;
                // One block size: with mixed ones fio's verification is unreliable on any file
                // system.
                command.args(["--name=chaos", "--rw=randrw", "--bs=8k", "--ioengine=psync", "--thread"]);
                command.args(["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--group_reporting"]);
                command.args(["--fallocate=none", "--randrepeat=0"]).arg(format!("--randseed={}", self.seed));
                command.arg(format!("--size={FIO_JOB_MIB}m")).arg(format!("--numjobs={FIO_JOBS}"));
                command
                    .arg(format!("--rate_iops={}", self.fio_job_iops))
                    .arg(format!("--directory={}", directory.display()));
            }
        }
        // All its output goes into one pipe, so that the message of a failure contains it.
        let mut shell = Command::new("sh");
        shell.args(["-c", "exec \"$@\" 2>&1", "sh"]).arg(command.get_program()).args(command.get_args());
        shell.current_dir(&self.scratch).stdin(Stdio::null());
        self.process = Some(Process::spawn(shell, &[&self.group])?);
        Ok(())
    }
}

/// Makes the kernel evict a file, all the time.
struct Evictor {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Evictor {
    fn start(path: PathBuf) -> Evictor {
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    // The file may be missing for a moment, which does no harm.
                    if let Ok(file) = File::open(&path) {
                        let _only_advice = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
                    }
                    std::thread::sleep(EVICT_EVERY);
                }
            })
        };
        Evictor { stop, thread: Some(thread) }
    }
}

impl Drop for Evictor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _cannot_panic = thread.join();
        }
    }
}
