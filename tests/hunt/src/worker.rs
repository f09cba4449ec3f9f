//! A process that writes and reads the files under test, and judges each read by the ledger.
//! Several of them run at once, in a small memory cgroup. The first one that finds a wrong byte
//! reports it, and all end.
//!
//! Must never happen here: a descriptor is used after a change of names without a check
//! whether it is still the file of that name.

use crate::choice::{COUNT_MAX, Chooser, Plan};
use crate::content::BLOCK_BYTES;
use crate::ledger::{self, BLOCKS, Block, Ledger, Note, SLOTS, Slot};
use crate::mapping::{Mapping, Pipe};
use crate::operation::{Operation, WriteMode};
use crate::shared::{self, now_ms};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

/// One use of a file in so many opens it again.
const REOPEN_ONE_IN: u32 = 10;
/// Pause between two attempts to take a lock that another process holds.
const WAIT: Duration = Duration::from_micros(50);
/// Attempts to take an exclusive lock, before another operation is done.
const ALONE_TRIES: u32 = 40;
/// Bytes of a page.
const PAGE_BYTES: usize = 4096;
/// The maximum length of a file in bytes.
pub const FILE_BYTES: usize = BLOCKS * BLOCK_BYTES;
/// One write in so many is wrong, in a test of the hunter itself.
const CORRUPT_ONE_IN: u32 = 20;

/// The task of a process; an argument of its command line, as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    /// The ledger's file.
    pub ledger: PathBuf,
    /// The mount.
    pub mount: PathBuf,
    /// Its backing directory.
    pub backing: PathBuf,
    /// The seed of the round.
    pub seed: u64,
    /// Number of the process.
    pub worker: u32,
    /// The write mode of the mount.
    pub mode: WriteMode,
    /// Names of the operations. Empty: all files are compared once, while nothing changes them.
    pub operations: Vec<String>,
    /// Whether it writes wrong generations on purpose.
    pub corrupt: bool,
}

/// The reason why an operation was not completed.
pub enum Halt {
    /// All processes have to stop.
    Stopped,
    /// A wrong byte, or an error that must not occur.
    Fault(String),
}

/// Whether an operation was done: some are not possible at that moment.
pub type Done = Result<bool, Halt>;

/// An open file.
pub struct Handle {
    /// To read and write.
    pub file: File,
    /// To read and write past the cache.
    pub direct: Option<File>,
    /// With the maximum length of the file.
    pub mapping: Option<Mapping>,
    incarnation: u32,
    outside: u32,
}

/// The process.
pub struct Worker {
    /// The ledger.
    pub ledger: &'static Ledger,
    /// Its task.
    pub task: Task,
    /// Chooses the next operation.
    pub chooser: Chooser,
    /// The present operation.
    pub plan: Plan,
    /// The pipe for reads and writes of mappings.
    pub pipe: Pipe,
    handles: Vec<Option<Handle>>,
    buffer: Vec<u8>,
}

/// Runs a process to its end. Returns whether all was well.
///
/// # Errors
/// Fails if it cannot work.
pub fn run(task: &str) -> Result<bool, String> {
    let task: Task = serde_json::from_str(task).map_err(|error| format!("understanding its task: {error}"))?;
    let operations: Vec<Operation> = task.operations.iter().map(|name| name.parse()).collect::<Result<_, String>>()?;
    let ledger = shared::open(&task.ledger).map_err(|error| format!("mapping the ledger: {error}"))?;
    let only_compare = operations.is_empty();
    let mut worker = Worker {
        ledger,
        chooser: Chooser::new(task.seed, task.worker, task.mode, operations),
        plan: Plan::unpack(0),
        pipe: Pipe::new().map_err(|error| format!("making a pipe: {error}"))?,
        handles: (0..SLOTS).map(|_| None).collect(),
        buffer: vec![0; FILE_BYTES + PAGE_BYTES],
        task,
    };
    let end = if only_compare { worker.compare_all() } else { worker.work() };
    match end {
        Ok(()) | Err(Halt::Stopped) => Ok(true),
        Err(Halt::Fault(text)) => {
            ledger.stop.store(1, Release);
            let _nobody_listens = writeln!(io::stdout().lock(), "{text}");
            Ok(false)
        }
    }
}

impl Worker {
    fn work(&mut self) -> Result<(), Halt> {
        while !self.ledger.stops() {
            let ledger = self.ledger;
            let mut plan = self.chooser.next(now_ms(), |slot| ledger.slots[slot as usize].size_blocks.load(Acquire));
            let watched = ledger.watched.load(Relaxed);
            if watched != 0 && self.chooser.random().bool() {
                plan = self.watch(watched - 1);
            }
            self.perform(plan)?;
        }
        Ok(())
    }

    /// Opens and reads a file that is being changed externally.
    fn watch(&mut self, slot: u32) -> Plan {
        self.close(slot);
        let operation = if self.chooser.random().u32(..4) == 0 { Operation::Load } else { Operation::Read };
        let size = self.size(slot).max(1);
        let first = self.chooser.random().u32(..size);
        Plan { operation, slot, first, count: COUNT_MAX.min(size - first) }
    }

    /// Compares each file once: the backing file, in the cache, past the cache, and after an
    /// eviction.
    fn compare_all(&mut self) -> Result<(), Halt> {
        use Operation::{Below, Evict, ReadDirect, Scan};
        for slot in 0..SLOTS as u32 {
            for operation in [Below, Scan, ReadDirect, Evict, Scan] {
                self.handles[slot as usize] = None;
                self.perform(Plan { operation, slot, first: 0, count: self.size(slot).max(1) })?;
            }
        }
        Ok(())
    }

    fn perform(&mut self, plan: Plan) -> Result<(), Halt> {
        let own = &self.ledger.workers[self.task.worker as usize];
        self.plan = plan;
        own.plan.store(plan.pack(), Relaxed);
        own.since_ms.store(now_ms().max(1), Release);
        if self.chooser.random().u32(..REOPEN_ONE_IN) == 0 {
            self.handles[plan.slot as usize] = None;
        }
        if self.step(plan)? {
            self.ledger.done[plan.operation as usize].fetch_add(1, Relaxed);
        }
        own.since_ms.store(0, Release);
        Ok(())
    }

    fn step(&mut self, plan: Plan) -> Done {
        use Operation::*;
        match plan.operation {
            Read => self.read(plan),
            Load => self.load(plan),
            ReadDirect => self.read_direct(plan),
            Scan => self.scan(plan),
            Stat => self.stat(plan),
            Below => self.below(plan),
            Write => self.write(plan),
            Store => self.store(plan),
            Direct => self.direct(plan),
            Append | AppendBesideStore => self.append(plan),
            Truncate => self.truncate(plan),
            Extend => self.extend(plan),
            Punch | Zero => self.punch(plan),
            Copy | CopyBesideStore => self.copy(plan),
            Sync => self.sync(plan),
            Evict => self.evict(plan),
            RenameOver => self.rename_over(plan),
            Recreate => self.recreate(plan),
            Link => self.link(plan),
            outside => {
                debug_assert!(outside.is_outside());
                self.outside(plan)
            }
        }
    }

    /// A file's part of the ledger.
    pub fn slot(&self, slot: u32) -> &'static Slot {
        &self.ledger.slots[slot as usize]
    }

    /// Blocks of a file. `last` may be behind the maximum length.
    pub fn blocks(&self, slot: u32, first: u32, last: u32) -> &'static [Block] {
        let last = (last as usize).min(BLOCKS);
        &self.ledger.blocks[slot as usize][(first as usize).min(last)..last]
    }

    /// The size of a file, in blocks.
    pub fn size(&self, slot: u32) -> u32 {
        self.slot(slot).size_blocks.load(Acquire)
    }

    /// The name of a file, seen through the mount.
    pub fn path(&self, slot: u32) -> PathBuf {
        self.task.mount.join(file_name(slot))
    }

    /// The name of its backing file.
    pub fn backing_path(&self, slot: u32) -> PathBuf {
        self.task.backing.join(file_name(slot))
    }

    /// The ledger's note for a change by the present operation.
    pub fn note(&self) -> Note {
        Note { operation: self.plan.operation, worker: self.task.worker as u8, at_ms: now_ms() }
    }

    /// A buffer of that many bytes, aligned for direct I/O. Return it with [`Worker::give_back`].
    pub fn take_buffer(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }

    /// Returns the buffer.
    pub fn give_back(&mut self, buffer: Vec<u8>) {
        self.buffer = buffer;
    }

    /// Whether the present blocks must be wrong, in a test of the hunter itself.
    pub fn is_to_corrupt(&mut self) -> bool {
        self.task.corrupt && self.chooser.random().u32(..CORRUPT_ONE_IN) == 0
    }

    /// Closes the handles of a file.
    pub fn close(&mut self, slot: u32) {
        self.handles[slot as usize] = None;
    }

    /// The open file that the name stands for now, according to the ledger; opened again if needed.
    pub fn handle(&mut self, slot: u32) -> Result<&mut Handle, Halt> {
        if !self.is_current(slot) {
            self.handles[slot as usize] = None;
            let opened = self.open(slot, 0)?;
            self.handles[slot as usize] = Some(opened);
        }
        self.handles[slot as usize].as_mut().ok_or(Halt::Stopped)
    }

    /// Whether the handle of a file is of the file that its name stands for now.
    pub fn is_current(&self, slot: u32) -> bool {
        let known = self.slot(slot);
        self.handles[slot as usize].as_ref().is_some_and(|handle| {
            handle.incarnation == known.incarnation.load(Acquire) && handle.outside == known.outside.load(Acquire)
        })
    }

    /// Opens a file through the mount. While another process replaces it, there may be none for a
    /// moment.
    pub fn open(&self, slot: u32, flags: i32) -> Result<Handle, Halt> {
        let (path, known) = (self.path(slot), self.slot(slot));
        loop {
            let (incarnation, outside) = (known.incarnation.load(Acquire), known.outside.load(Acquire));
            match OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path) {
                Ok(file) => return Ok(Handle { file, direct: None, mapping: None, incarnation, outside }),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    let is_held = known.names.load(Acquire) == u32::MAX;
                    let has_changed =
                        (incarnation, outside) != (known.incarnation.load(Acquire), known.outside.load(Acquire));
                    if !is_held && !has_changed {
                        return Err(self.failed("opening the file, which nobody has unlinked", &error));
                    }
                    self.pause()?;
                }
                Err(error) => return Err(self.failed("opening the file", &error)),
            }
        }
    }

    /// The mapping of a file.
    pub fn mapping(&mut self, slot: u32) -> Result<(&Mapping, &Pipe), Halt> {
        let handle = self.handle(slot)?;
        if handle.mapping.is_none() {
            match Mapping::new(&handle.file, FILE_BYTES) {
                Ok(mapping) => handle.mapping = Some(mapping),
                Err(error) => return Err(self.failed("mapping the file", &error)),
            }
        }
        let mapping = self.handles[slot as usize].as_ref().and_then(|handle| handle.mapping.as_ref());
        Ok((mapping.ok_or(Halt::Stopped)?, &self.pipe))
    }

    /// A descriptor for direct I/O.
    pub fn direct_file(&mut self, slot: u32) -> Result<&File, Halt> {
        while self.handle(slot)?.direct.is_none() {
            let opened = self.open(slot, libc::O_DIRECT)?;
            let handle = self.handle(slot)?;
            // Both must be of the same file.
            if (handle.incarnation, handle.outside) == (opened.incarnation, opened.outside) {
                handle.direct = Some(opened.file);
            }
        }
        let direct = self.handles[slot as usize].as_ref().and_then(|handle| handle.direct.as_ref());
        direct.ok_or(Halt::Stopped)
    }

    /// Waits a moment, unless all processes have to stop.
    pub fn pause(&self) -> Result<(), Halt> {
        if self.ledger.stops() {
            return Err(Halt::Stopped);
        }
        std::thread::sleep(WAIT);
        Ok(())
    }

    /// Takes a shared lock.
    pub fn share(&self, lock: &'static AtomicU32) -> Result<Shared, Halt> {
        while !ledger::try_share(lock) {
            self.pause()?;
        }
        Ok(Shared(lock))
    }

    /// Takes an exclusive lock, if it becomes free soon.
    pub fn alone(&self, lock: &'static AtomicU32) -> Result<Option<Alone>, Halt> {
        for _ in 0..ALONE_TRIES {
            if ledger::try_alone(lock) {
                return Ok(Some(Alone(lock)));
            }
            self.pause()?;
        }
        Ok(None)
    }

    /// Takes the locks of blocks, in order.
    pub fn lock(&self, blocks: &'static [Block]) -> Result<Locked, Halt> {
        for block in blocks {
            while !block.try_lock() {
                self.pause()?;
            }
        }
        Ok(Locked(blocks))
    }

    /// Reports the failure of a call that must not fail.
    pub fn failed(&self, doing: &str, error: &io::Error) -> Halt {
        // A signal that stops all processes may have ended the daemon, too.
        if self.ledger.stops() {
            return Halt::Stopped;
        }
        let Plan { slot, first, .. } = self.plan;
        let history = self.history(slot, first);
        let worker = self.task.worker;
        Halt::Fault(format!("FAILED CALL in process {worker}, {}: {doing}: {error}\n{history}", self.plan))
    }
}

/// A shared lock, until it is dropped.
pub struct Shared(&'static AtomicU32);

impl Drop for Shared {
    fn drop(&mut self) {
        ledger::unshare(self.0);
    }
}

/// An exclusive lock, until it is dropped.
pub struct Alone(&'static AtomicU32);

impl Drop for Alone {
    fn drop(&mut self) {
        ledger::release_alone(self.0);
    }
}

/// Locked blocks, until it is dropped.
pub struct Locked(&'static [Block]);

impl Drop for Locked {
    fn drop(&mut self) {
        self.0.iter().for_each(Block::unlock);
    }
}

/// The name of a file under test.
pub fn file_name(slot: u32) -> String {
    format!("file-{slot:02}")
}

/// The part of the buffer that is aligned for direct I/O.
pub fn aligned(buffer: &mut [u8], bytes: usize) -> &mut [u8] {
    let at = buffer.as_ptr().align_offset(PAGE_BYTES);
    &mut buffer[at..at + bytes]
}
