//! Controls a probe from outside: starts it in its memory cgroup, ends it, reads its report, and
//! checks its backing files afterwards.

use crate::content::Name;
use crate::probe::{Report, Task, file_name};
use page::PAGE_SIZE;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};
use testbed::{Failure, Group, Interrupt, Line, Process};

/// Memory cgroup of a probe: half of its data.
const GROUP_BYTES: u64 = 24 << 20;
/// Files of a probe.
const FILE_COUNT: u32 = 3;
/// Pages of each file: 16 MiB.
const PAGE_COUNT: u32 = 4096;
/// Time limit for a probe to make its files, or to check all of them: each read may take as long as
/// is permitted.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pause between two checks for an interrupt.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A running probe. Dropping it kills it.
pub struct Probing {
    // In this order: the process before its group.
    process: Process,
    stdin: Option<ChildStdin>,
    _group: Group,
    task: Task,
}

impl Probing {
    /// Starts one in `directory`.
    pub fn start(directory: &Path, seed: u64, slow: Duration, rate: u32) -> Result<Probing, Failure> {
        let task = Task {
            directory: directory.to_owned(),
            file_count: FILE_COUNT,
            page_count: PAGE_COUNT,
            seed,
            reads_per_s: rate,
            writes_per_s: rate / 2,
            slow_ms: slow.as_millis() as u64,
        };
        let text = serde_json::to_string(&task).map_err(|error| Failure::Problem(error.to_string()))?;
        let program = std::env::current_exe().map_err(Failure::attempted("finding this program"))?;
        let group = Group::create("chaos-probe", Some(GROUP_BYTES), None)?;
        let mut command = Command::new(program);
        command.arg("probe").arg(text).stdin(Stdio::piped());
        let mut process = Process::spawn(command, &[&group])?;
        let stdin = process.take_stdin();
        Ok(Probing { process, stdin, _group: group, task })
    }

    /// Waits until its files are made.
    pub fn wait_ready(&mut self, interrupt: &Interrupt) -> Result<(), Failure> {
        self.receive(|| interrupt.check()).map(|_| ())
    }

    /// Ends the load; the probe checks everything once more.
    pub fn finish(&mut self) {
        self.stdin = None;
    }

    /// Waits for its report, and calls `meanwhile` in between.
    pub fn report(&mut self, meanwhile: impl FnMut() -> Result<(), Failure>) -> Result<Report, Failure> {
        let line = self.receive(meanwhile)?;
        serde_json::from_str(&line).map_err(|error| Failure::Problem(format!("the probe printed {line:?}: {error}")))
    }

    fn receive(&mut self, mut meanwhile: impl FnMut() -> Result<(), Failure>) -> Result<String, Failure> {
        let begin = Instant::now();
        let place = self.task.directory.display();
        loop {
            meanwhile()?;
            match self.process.next_line(LOOK_EVERY) {
                Line::Text(line) => return Ok(line),
                Line::Timeout if begin.elapsed() < PATIENCE => {}
                Line::Timeout => {
                    return Err(Failure::Problem(format!(
                        "the probe in {place} hangs: nothing from it for {PATIENCE:?}"
                    )));
                }
                Line::End => {
                    let status = self.process.wait(Duration::from_secs(1))?;
                    return Err(Failure::Problem(format!("the probe in {place} ended before its report ({status:?})")));
                }
            }
        }
    }

    /// Compares its files, as they are in `directory`, with the generations of its report.
    pub fn check_below(&self, directory: &Path, report: &Report) -> Result<(), String> {
        for (number, generations) in (0..).zip(&report.generations) {
            let path = directory.join(file_name(number));
            let file = File::open(&path).map_err(|error| format!("opening {}: {error}", path.display()))?;
            let mut page = [0; PAGE_SIZE];
            for (index, generation) in (0..).zip(generations) {
                let read = file.read_exact_at(&mut page, u64::from(index) * PAGE_SIZE as u64);
                read.map_err(|error| format!("reading {}: {error}", path.display()))?;
                if let Some(wrong) = (Name { seed: self.task.seed, file: number, index }).compare(*generation, &page) {
                    return Err(format!("below the mount, {} page {index}: {wrong}", path.display()));
                }
            }
        }
        Ok(())
    }
}
