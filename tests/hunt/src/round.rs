//! One round: a file system, a mount over it, a lender, and processes in a small memory cgroup that
//! write and read; meanwhile daemons and lenders are killed. At the end all files are compared once
//! more, through the mount and in the backing directory.

use crate::choice::Plan;
use crate::content::{BLOCK_BYTES, Content};
use crate::ledger::{BLOCKS, Ledger, Note, WORKERS_MAX};
use crate::operation::{Operation, WriteMode};
use crate::shared::{self, now_ms};
use crate::trouble::{Counts, Lender, Trouble};
use crate::worker::{FILE_BYTES, Task, file_name};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};
use testbed::{Failure, FileSystem, Group, Interrupt, Line, Process, Puma, PumaMount, RamDisk, Scratch};

/// Size of the image: the minimum of XFS, and room for files that are still open.
const DISK_BYTES: u64 = 512 << 20;
/// Memory of the group, in MiB: less than the files.
const GROUP_MIB: std::ops::RangeInclusive<u64> = 24..=40;
/// Pause between two checks of everything.
const TICK: Duration = Duration::from_millis(20);
/// An operation that takes longer counts as hanging.
const HANG_MS: u64 = 60_000;
/// Time limit for processes to end after the stop: the time that one of their operations may take.
const END_MAX: Duration = Duration::from_secs(70);
/// Time limit for a process's last output to arrive here. Without output this does not take long.
const LAST_WORD_MAX: Duration = Duration::from_secs(10);
/// By default a mount would abandon a lender that is killed in the middle of an answer again and
/// again.
const BAD_PAGES: &str = "1000000000000";

/// The parameters of a round.
pub struct Round<'a> {
    /// The command under test.
    pub puma: &'a Puma,
    /// Whether the run was interrupted.
    pub interrupt: &'a Interrupt,
    /// The backing file system.
    pub kind: FileSystem,
    /// The write mode of the mount.
    pub mode: WriteMode,
    /// The seed of everything random.
    pub seed: u64,
    /// The duration.
    pub length: Duration,
    /// The number of processes.
    pub workers: u32,
    /// Their operations.
    pub operations: Vec<Operation>,
    /// Whether one of them writes wrong blocks, to test the hunter itself.
    pub corrupt: bool,
    /// Whether daemons and lenders are killed.
    pub trouble: bool,
}

/// The result.
pub struct Outcome {
    /// The report about wrong bytes, if there is one.
    pub fault: Option<String>,
    /// Counts of troubles.
    pub counts: Counts,
    /// By [`Operation`].
    pub operations: Vec<u64>,
    /// Blocks that were judged.
    pub judged: u64,
    /// Blocks that could not be judged.
    pub not_judged: u64,
}

impl Round<'_> {
    /// Runs the round.
    ///
    /// # Errors
    /// Fails if it cannot be completed.
    pub fn run(&self) -> Result<Outcome, Failure> {
        let scratch = Scratch::new("hunt")?;
        let disk = RamDisk::create(&scratch, self.kind, DISK_BYTES)?;
        let (at, ledger_file) = (scratch.directory("at")?, disk.memory.join("ledger"));
        let ledger = shared::create(&ledger_file).map_err(Failure::attempted("making the ledger"))?;
        self.fill(&disk.path, ledger).map_err(Failure::attempted("writing the first files"))?;
        // If the mount is gone or hangs, they end only after it.
        let mut workers: Vec<Process>;
        let mut random = fastrand::Rng::with_seed(self.seed);
        let mut lender = Lender::start(self.puma, scratch.path().join("lender.sock"))?;
        let mut mount = self.mount(&disk.path, &at, &lender.address(), &mut random)?;
        let group = Group::create("hunt", Some(random.u64(GROUP_MIB) << 20), None)?;
        let task = Task {
            ledger: ledger_file,
            mount: at.clone(),
            backing: disk.path.clone(),
            seed: self.seed,
            worker: 0,
            mode: self.mode,
            operations: self.operations.iter().map(|operation| operation.name().to_owned()).collect(),
            corrupt: false,
        };
        let mut trouble = Trouble::new(self.puma, &at, self.interrupt, self.seed);
        let begun = |worker: u32| start(&Task { worker, corrupt: self.corrupt && worker == 0, ..task.clone() }, &group);
        workers = (0..self.workers).map(begun).collect::<Result<_, _>>()?;
        let begin = Instant::now();
        let mut fault = None;
        while begin.elapsed() < self.length && fault.is_none() && !ledger.stops() {
            self.interrupt.check()?;
            if self.trouble {
                trouble.step(&mount, &mut lender)?;
            }
            fault = self.look(ledger, &mut mount, &mut workers)?;
            std::thread::sleep(TICK);
        }
        ledger.stop.store(1, Release);
        fault = fault.or(self.wait_for(ledger, &mut workers)?);
        if fault.is_none() {
            // No process changes anything any more.
            ledger.stop.store(0, Release);
            let last = Task { operations: Vec::new(), ..task };
            fault = self.wait_for(ledger, &mut [start(&last, &group)?].into())?;
        }
        if self.trouble || fault.is_none() {
            trouble.count_pages(&mount)?;
        }
        let outcome = Outcome {
            fault,
            counts: trouble.counts,
            operations: ledger.done.iter().map(|count| count.load(Relaxed)).collect(),
            judged: ledger.judged.load(Relaxed),
            not_judged: ledger.not_judged.load(Relaxed),
        };
        // With a fault in it, the mount may fail to end normally; then its guard ends it.
        mount.end().or_else(|problem| if outcome.fault.is_some() { Ok(()) } else { Err(Failure::Problem(problem)) })?;
        Ok(outcome)
    }

    /// Writes the first generation of all files to the backing directory, before there is a mount.
    fn fill(&self, directory: &Path, ledger: &Ledger) -> std::io::Result<()> {
        let mut bytes = vec![0; FILE_BYTES];
        let note = Note { operation: Operation::OutsideWrite, worker: u8::MAX, at_ms: now_ms() };
        for (slot, blocks) in (0..).zip(&ledger.blocks) {
            for ((index, block), place) in (0..).zip(blocks).zip(bytes.as_chunks_mut().0) {
                let place: &mut [u8; BLOCK_BYTES] = place;
                let content = Content::written(slot, index, block.next());
                block.begin(content, note);
                block.finish();
                content.write(self.seed, place);
            }
            fs::write(directory.join(file_name(slot)), &bytes)?;
            ledger.slots[slot as usize].size_blocks.store(BLOCKS as u32, Release);
        }
        Ok(())
    }

    fn mount(&self, source: &Path, at: &Path, lender: &str, random: &mut fastrand::Rng) -> Result<PumaMount, Failure> {
        let mut command = Command::new(&self.puma.pumapool);
        command.env_remove("PUMAPOOL_KEY_FILE").arg("mount").args([source, at]);
        command.args(["--foreground", "--trust-network", "--lender", lender, "--write", self.mode.name()]);
        // The backing disk is as fast as a lender here, so the gate would bypass the lender under
        // test.
        command.args(["--gate", "off", "--bad-pages", BAD_PAGES]);
        command.args(["--strategy", if random.bool() { "exclusive" } else { "non-inclusive" }]);
        for policy in ["--hedge", "--filter"] {
            if random.bool() {
                command.args([policy, "off"]);
            }
        }
        self.puma.mount(command, at, &format!("mount-{}-{}", self.kind, self.mode.name()), &[])
    }

    /// Checks processes and daemons for impossible states.
    fn look(&self, ledger: &Ledger, mount: &mut PumaMount, workers: &mut [Process]) -> Result<Option<String>, Failure> {
        for worker in workers.iter_mut() {
            if let Some(text) = told(worker, Duration::ZERO) {
                return Ok(Some(text));
            }
            if let Some(status) = worker.wait(Duration::ZERO)?.filter(|status| !status.success()) {
                return Ok(told(worker, LAST_WORD_MAX).or(Some(format!("a process ended with {status}"))));
            }
        }
        if let Err(problem) = mount.check() {
            return Ok(Some(format!("THE MOUNT IS GONE: {problem}")));
        }
        Ok(hanging(ledger, workers))
    }

    /// Waits until all processes have ended. Returns the output of one of them.
    fn wait_for(&self, ledger: &Ledger, workers: &mut Vec<Process>) -> Result<Option<String>, Failure> {
        let begin = Instant::now();
        let mut fault = None;
        for worker in workers.iter_mut() {
            loop {
                self.interrupt.check()?;
                fault = fault.or_else(|| told(worker, Duration::ZERO));
                if let Some(status) = worker.wait(TICK)? {
                    fault = fault.or_else(|| told(worker, LAST_WORD_MAX));
                    if !status.success() && fault.is_none() {
                        fault = Some(format!("a process ended with {status}"));
                    }
                    break;
                }
                let hangs = hanging(ledger, std::slice::from_ref(worker));
                if hangs.is_some() || begin.elapsed() > END_MAX.max(self.length) + END_MAX {
                    return Ok(fault.or(hangs).or(Some("a process does not end".to_owned())));
                }
            }
        }
        workers.clear();
        Ok(fault)
    }
}

/// Starts a process in the group.
fn start(task: &Task, group: &Group) -> Result<Process, Failure> {
    let text = serde_json::to_string(task).map_err(|error| Failure::Problem(error.to_string()))?;
    let program = std::env::current_exe().map_err(Failure::attempted("finding this program"))?;
    let mut command = Command::new(program);
    command.arg("worker").arg(text);
    Ok(Process::spawn(command, &[group])?)
}

/// All output of a process, if it begins within `limit`.
fn told(worker: &Process, limit: Duration) -> Option<String> {
    let Line::Text(mut text) = worker.next_line(limit) else { return None };
    // It prints one report, and ends.
    while let Line::Text(line) = worker.next_line(END_MAX) {
        text = text + "\n" + &line;
    }
    Some(text)
}

/// An operation that takes too long, and the place in the kernel where its process is.
fn hanging(ledger: &Ledger, workers: &[Process]) -> Option<String> {
    let now = now_ms();
    let mut found = ledger.workers.iter().take(WORKERS_MAX).zip(0..).filter_map(|(worker, number)| {
        let since = worker.since_ms.load(Acquire);
        (since != 0 && now > since + HANG_MS).then(|| {
            let plan = Plan::unpack(worker.plan.load(Relaxed));
            format!("AN OPERATION HANGS in process {number}, for {} s: {plan}\n", (now - since) / 1000)
        })
    });
    let mut text = found.next()?;
    for worker in workers {
        let read = |name: &str| fs::read_to_string(format!("/proc/{}/{name}", worker.pid())).unwrap_or_default();
        text += &format!("process id {}, {}:\n{}", worker.pid(), read("wchan"), read("stack"));
    }
    Some(text)
}
