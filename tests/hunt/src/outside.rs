//! External changes of the backing file. Programs that open the file after them must see them
//! (close-to-open). Meanwhile nothing is written through the mount, because that is not promised
//! (docs/design/limits.md).

use crate::choice::{COUNT_MAX, Plan};
use crate::content::{BLOCK_BYTES, Content};
use crate::ledger::{BLOCKS, Block, PAGE_BLOCKS};
use crate::mapping::Mapping;
use crate::operation::Operation;
use crate::worker::{Alone, Done, FILE_BYTES, Halt, Worker, aligned};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::Ordering::{AcqRel, Release};
use std::time::Duration;
use testbed::LateMemory;

/// Parts of a slow change.
const PARTS: usize = 4;
/// The maximum time between two of them.
const PART_MS: u64 = 12;
/// The maximum number of blocks by which a file grows or shrinks.
const MOVE_MAX: u32 = 96;
/// The minimum number of blocks of a file that is cut.
const SIZE_MIN: u32 = 8;
/// Pages of a slow change.
const SLOW_PAGES: std::ops::RangeInclusive<u32> = 2..=128;

impl Worker {
    /// Changes the backing file.
    pub fn outside(&mut self, plan: Plan) -> Done {
        let (slot, operation) = (plan.slot, plan.operation);
        let Some(names) = self.alone(&self.slot(slot).names)? else { return Ok(false) };
        let _readers: Option<Alone> = match operation {
            Operation::OutsideSlow => None,
            _ => match self.alone(&self.slot(slot).readers)? {
                None => return Ok(false),
                readers => readers,
            },
        };
        // Otherwise the kernel might write its cached data over the change later.
        self.flush(slot)?;
        self.close(slot);
        let changed = match operation {
            Operation::OutsideRename | Operation::OutsideRecreate => self.exchange(plan)?,
            Operation::OutsideCut | Operation::OutsideGrow => match self.resize(plan)? {
                None => return Ok(false),
                changed => changed,
            },
            _ => self.overwrite(plan)?,
        };
        // Readers are permitted again.
        drop((names, _readers));
        // An open after it sees all of it, also one that does not ask for the size.
        self.close(slot);
        let Some((first, last)) = changed else { return Ok(true) };
        let at_end = Plan { first: first.max(last.saturating_sub(COUNT_MAX)), count: 0, ..plan };
        let at_end = Plan { count: last - at_end.first, ..at_end };
        if self.chooser.random().bool() { self.load(at_end) } else { self.read(at_end) }
    }

    /// Bytes change, the size does not.
    fn overwrite(&mut self, plan: Plan) -> Result<Option<(u32, u32)>, Halt> {
        let Plan { slot, operation, .. } = plan;
        let (mut first, mut last) = (plan.first, plan.first + plan.count);
        if operation == Operation::OutsideDirect {
            // Some file systems permit nothing smaller.
            (first, last) = (first - first % PAGE_BLOCKS, last - last % PAGE_BLOCKS);
        }
        if operation == Operation::OutsideSlow {
            last = first + self.chooser.random().u32(SLOW_PAGES) * PAGE_BLOCKS;
        }
        last = last.min(self.size(slot));
        if matches!(operation, Operation::OutsideDirect | Operation::OutsideSlow) {
            last -= last.saturating_sub(first) % PAGE_BLOCKS;
        }
        if first >= last {
            return Ok(None);
        }
        let blocks = self.blocks(slot, first, last);
        let mut buffer = self.take_buffer();
        let bytes = aligned(&mut buffer, blocks.len() * BLOCK_BYTES);
        self.begin(slot, first, blocks, bytes);
        let written = self.write_below(plan, u64::from(first) * BLOCK_BYTES as u64, bytes);
        self.give_back(buffer);
        written.map_err(|error| self.failed("writing the backing file", &error))?;
        self.has_changed(slot, blocks);
        Ok(Some((first, last)))
    }

    fn write_below(&mut self, plan: Plan, at: u64, bytes: &[u8]) -> io::Result<()> {
        let direct = plan.operation == Operation::OutsideDirect;
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let path = self.backing_path(plan.slot);
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        match plan.operation {
            Operation::OutsideStore => Mapping::new(&file, FILE_BYTES)?.store(&self.pipe, at as usize, bytes),
            Operation::OutsideSlow => {
                self.ledger.watched.store(plan.slot + 1, Release);
                let written = self.write_slowly(&file, at, bytes);
                self.ledger.watched.store(0, Release);
                written
            }
            _ => file.write_all_at(bytes, at),
        }
    }

    /// By one call whose bytes arrive late, or by several calls.
    fn write_slowly(&mut self, file: &File, at: u64, bytes: &[u8]) -> io::Result<()> {
        let random = self.chooser.random();
        let pauses = [0; PARTS].map(|_: u64| Duration::from_millis(random.u64(..=PART_MS)));
        let piece = bytes.len().div_ceil(PARTS).next_multiple_of(PAGE_BLOCKS as usize * BLOCK_BYTES);
        let pieces = || bytes.chunks(piece).zip((0..).step_by(piece)).zip(pauses);
        let memory = if random.bool() { LateMemory::new(bytes.len()).ok() } else { None };
        let Some(memory) = memory else {
            return pieces().try_for_each(|((part, begin), pause)| {
                file.write_all_at(part, at + begin as u64)?;
                std::thread::sleep(pause);
                Ok(())
            });
        };
        std::thread::scope(|scope| {
            let _end = memory.arrives_at_the_end();
            let writing = scope.spawn(|| memory.write_to(file, at));
            for ((part, begin), pause) in pieces() {
                std::thread::sleep(pause);
                memory.arrive(begin, part)?;
            }
            writing.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
        })
    }

    /// The name becomes that of another file.
    fn exchange(&mut self, plan: Plan) -> Result<Option<(u32, u32)>, Halt> {
        let slot = plan.slot;
        let (path, size) = (self.backing_path(slot), self.new_size());
        if plan.operation == Operation::OutsideRename {
            let new = self.task.backing.join(format!("outside-{}", self.task.worker));
            let made = self.make(&new, slot, size, false);
            made.map_err(|error| self.failed("writing a new file outside", &error))?;
            self.begin_anew(slot, size);
            fs::rename(&new, &path).map_err(|error| self.failed("renaming a new file over it outside", &error))?;
        } else {
            self.begin_gone(slot);
            fs::remove_file(&path).map_err(|error| self.failed("unlinking it outside", &error))?;
            let made = self.make_noting(&path, slot, size);
            made.map_err(|error| self.failed("creating it again outside", &error))?;
        }
        self.slot(slot).outside.fetch_add(1, AcqRel);
        self.is_another(slot, size);
        Ok(None)
    }

    /// Moves the end. Returns the new or removed blocks.
    fn resize(&mut self, plan: Plan) -> Result<Option<(u32, u32)>, Halt> {
        let (slot, size) = (plan.slot, self.size(plan.slot));
        let by = self.chooser.random().u32(1..=MOVE_MAX);
        let grows = plan.operation == Operation::OutsideGrow;
        let to = if grows { (size + by).min(BLOCKS as u32) } else { size.saturating_sub(by).max(SIZE_MIN) };
        if (grows && to <= size) || (!grows && to >= size) {
            return Ok(None);
        }
        let file = File::options().write(true).open(self.backing_path(slot));
        let file = file.map_err(|error| self.failed("opening the backing file", &error))?;
        let known = self.slot(slot);
        known.size_version.fetch_add(1, AcqRel);
        let blocks = self.blocks(slot, size.min(to), size.max(to));
        let changed = if grows {
            let mut buffer = self.take_buffer();
            let bytes = aligned(&mut buffer, blocks.len() * BLOCK_BYTES);
            self.begin(slot, size, blocks, bytes);
            let written = file.write_all_at(bytes, u64::from(size) * BLOCK_BYTES as u64);
            self.give_back(buffer);
            written
        } else {
            let note = self.note();
            blocks.iter().for_each(|block| block.begin(Content::ABSENT, note));
            file.set_len(u64::from(to) * BLOCK_BYTES as u64)
        };
        drop(file);
        changed.map_err(|error| self.failed("changing the size of the backing file", &error))?;
        known.outside.fetch_add(1, AcqRel);
        known.size_blocks.store(to, Release);
        known.size_version.fetch_add(1, AcqRel);
        blocks.iter().for_each(Block::finish);
        Ok(Some((size.min(to), size.max(to))))
    }

    /// Records that an external change has ended: before its blocks, because readers read them
    /// first.
    fn has_changed(&self, slot: u32, blocks: &[Block]) {
        self.slot(slot).outside.fetch_add(1, AcqRel);
        blocks.iter().for_each(Block::finish);
    }
}
