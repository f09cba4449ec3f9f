//! Changes of bytes and sizes through the mount. Each holds the names shared, and its blocks
//! exclusively. Changes that drop whole pages from the cache, or are undefined beside stores of the
//! same page on every file system, hold the whole pages.

use crate::choice::{Plan, is_stored_into};
use crate::content::{BLOCK_BYTES, Content};
use crate::ledger::{BLOCKS, Block, PAGE_BLOCKS, SLOTS};
use crate::operation::{Operation, WriteMode};
use crate::worker::{Done, FILE_BYTES, Halt, Locked, Worker, aligned};
use rustix::fs::FallocateFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

/// The maximum number of blocks by which the end of a file moves.
const MOVE_MAX: u32 = 64;
/// The minimum number of blocks of a file.
const SIZE_MIN: u32 = 8;
/// One move of the end in so many is a far one.
const FAR_ONE_IN: u32 = 24;

impl Worker {
    /// write(2) of blocks of the file.
    pub fn write(&mut self, plan: Plan) -> Done {
        self.write_with(plan, false, |worker, bytes, at| Ok(worker.handle(plan.slot)?.file.write_all_at(bytes, at)))
    }

    /// Stores into a mapping.
    pub fn store(&mut self, plan: Plan) -> Done {
        self.write_with(plan, false, |worker, bytes, at| {
            let (mapping, pipe) = worker.mapping(plan.slot)?;
            Ok(mapping.store(pipe, at as usize, bytes))
        })
    }

    /// A direct write.
    pub fn direct(&mut self, plan: Plan) -> Done {
        self.write_with(plan, true, |worker, bytes, at| Ok(worker.direct_file(plan.slot)?.write_all_at(bytes, at)))
    }

    fn write_with(
        &mut self,
        plan: Plan,
        whole_pages: bool,
        write: impl FnOnce(&mut Worker, &[u8], u64) -> Result<io::Result<()>, Halt>,
    ) -> Done {
        let Plan { slot, first, count, .. } = plan;
        let _names = self.share(&self.slot(slot).names)?;
        let _locked = self.lock_range(slot, first, count, whole_pages)?;
        let blocks = self.blocks(slot, first, first + count);
        if blocks.iter().any(|block| block.now() == Content::ABSENT) {
            return Ok(false);
        }
        let mut buffer = self.take_buffer();
        let bytes = aligned(&mut buffer, blocks.len() * BLOCK_BYTES);
        self.begin(slot, first, blocks, bytes);
        let written = write(self, bytes, u64::from(first) * BLOCK_BYTES as u64);
        self.give_back(buffer);
        written?.map_err(|error| self.failed("writing", &error))?;
        blocks.iter().for_each(Block::finish);
        Ok(true)
    }

    /// A write with O_APPEND.
    pub fn append(&mut self, plan: Plan) -> Done {
        let slot = plan.slot;
        let _names = self.share(&self.slot(slot).names)?;
        let _end = self.hold_end(slot)?;
        let size = self.size(slot);
        let beside_stores = is_stored_into(slot, WriteMode::Through) && self.task.mode == WriteMode::Through;
        if beside_stores && !size.is_multiple_of(PAGE_BLOCKS) && plan.operation == Operation::Append {
            return Ok(false);
        }
        let count = plan.count.min(BLOCKS as u32 - size);
        if count == 0 {
            return Ok(false);
        }
        let file = OpenOptions::new().append(true).open(self.path(slot));
        let mut file = file.map_err(|error| self.failed("opening with O_APPEND", &error))?;
        let blocks = self.blocks(slot, size, size + count);
        let _locked = self.lock(blocks)?;
        let mut buffer = self.take_buffer();
        let bytes = aligned(&mut buffer, blocks.len() * BLOCK_BYTES);
        self.begin(slot, size, blocks, bytes);
        let appended = file.write_all(bytes);
        self.give_back(buffer);
        appended.map_err(|error| self.failed("appending", &error))?;
        self.end_at(slot, size + count);
        blocks.iter().for_each(Block::finish);
        Ok(true)
    }

    /// The end is moved by ftruncate.
    pub fn truncate(&mut self, plan: Plan) -> Done {
        let slot = plan.slot;
        let _names = self.share(&self.slot(slot).names)?;
        let _end = self.hold_end(slot)?;
        let (size, to) = (self.size(slot), self.new_end(slot));
        let (first, last, content) = if to < size { (to, size, Content::ABSENT) } else { (size, to, Content::ZEROS) };
        let blocks = self.blocks(slot, first, last);
        let _locked = self.lock(blocks)?;
        let note = self.note();
        blocks.iter().for_each(|block| block.begin(content, note));
        let cut = self.handle(slot)?.file.set_len(u64::from(to) * BLOCK_BYTES as u64);
        cut.map_err(|error| self.failed("ftruncate", &error))?;
        self.end_at(slot, to);
        blocks.iter().for_each(Block::finish);
        Ok(true)
    }

    /// A write behind the end.
    pub fn extend(&mut self, plan: Plan) -> Done {
        let slot = plan.slot;
        let _names = self.share(&self.slot(slot).names)?;
        let _end = self.hold_end(slot)?;
        let size = self.size(slot);
        let mut first = size + self.chooser.random().u32(1..=MOVE_MAX);
        if self.task.mode == WriteMode::Through && is_stored_into(slot, WriteMode::Through) {
            // Not into a page that a mapping may store into, as with appends.
            first = first.next_multiple_of(PAGE_BLOCKS);
        }
        let last = (first + plan.count).min(BLOCKS as u32);
        if first >= last {
            return Ok(false);
        }
        let _locked = self.lock(self.blocks(slot, size, last))?;
        let (hole, blocks) = (self.blocks(slot, size, first), self.blocks(slot, first, last));
        let note = self.note();
        hole.iter().for_each(|block| block.begin(Content::ZEROS, note));
        let mut buffer = self.take_buffer();
        let bytes = aligned(&mut buffer, blocks.len() * BLOCK_BYTES);
        self.begin(slot, first, blocks, bytes);
        let written =
            self.handle(slot).map(|handle| handle.file.write_all_at(bytes, u64::from(first) * BLOCK_BYTES as u64));
        self.give_back(buffer);
        written?.map_err(|error| self.failed("writing behind the end", &error))?;
        self.end_at(slot, last);
        hole.iter().chain(blocks).for_each(Block::finish);
        Ok(true)
    }

    /// A range becomes zeros.
    pub fn punch(&mut self, plan: Plan) -> Done {
        let Plan { slot, first, count, operation } = plan;
        let _names = self.share(&self.slot(slot).names)?;
        let _locked = self.lock_range(slot, first, count, true)?;
        let blocks = self.blocks(slot, first, first + count);
        if blocks.iter().any(|block| block.now() == Content::ABSENT) {
            return Ok(false);
        }
        let how = if operation == Operation::Punch { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
        let (at, bytes) = (u64::from(first) * BLOCK_BYTES as u64, (blocks.len() * BLOCK_BYTES) as u64);
        let note = self.note();
        blocks.iter().for_each(|block| block.begin(Content::ZEROS, note));
        let punched = rustix::fs::fallocate(&self.handle(slot)?.file, how | FallocateFlags::KEEP_SIZE, at, bytes);
        punched.map_err(|error| self.failed("fallocate", &error.into()))?;
        blocks.iter().for_each(Block::finish);
        Ok(true)
    }

    /// copy_file_range, within a file or from one to another.
    pub fn copy(&mut self, plan: Plan) -> Done {
        let Plan { slot: to, first: to_first, count, operation } = plan;
        let slot = if self.chooser.random().u32(..3) == 0 { to } else { self.chooser.random().u32(..SLOTS as u32) };
        let size = self.size(slot).max(1);
        let first = self.chooser.random().u32(..size);
        let count = count.min(BLOCKS as u32 - first);
        let near = |a: u32, b: u32| a < b + count + PAGE_BLOCKS && b < a + count + PAGE_BLOCKS;
        if slot == to && near(first, to_first) {
            return Ok(false);
        }
        let _names = self.share(&self.slot(slot).names)?;
        let _names_to = self.share(&self.slot(to).names)?;
        let whole_pages = operation == Operation::Copy;
        // All processes use one order, so that no cycle of waiting arises.
        let _locked = if (slot, first) < (to, to_first) {
            let from = self.lock_range(slot, first, count, false)?;
            [from, self.lock_range(to, to_first, count, whole_pages)?]
        } else {
            let onto = self.lock_range(to, to_first, count, whole_pages)?;
            [onto, self.lock_range(slot, first, count, false)?]
        };
        let (from, onto) = (self.blocks(slot, first, first + count), self.blocks(to, to_first, to_first + count));
        let mut all = from.iter().chain(onto);
        if from.len() != onto.len() || all.any(|block| block.now() == Content::ABSENT) {
            return Ok(false);
        }
        let note = self.note();
        from.iter().zip(onto).for_each(|(from, onto)| onto.begin(from.now(), note));
        let input = self.handle(slot)?.file.try_clone().map_err(|error| self.failed("dup", &error))?;
        let output = &self.handle(to)?.file;
        let copied = copy_all(&input, u64::from(first), output, u64::from(to_first), onto.len() * BLOCK_BYTES);
        copied.map_err(|error| self.failed(&format!("copy_file_range to block {to_first} of file {to}"), &error))?;
        onto.iter().for_each(Block::finish);
        Ok(true)
    }

    /// Writes dirty data to the file system, in one of the possible ways.
    pub fn sync(&mut self, plan: Plan) -> Done {
        let _names = self.share(&self.slot(plan.slot).names)?;
        let synced = match self.chooser.random().u32(..4) {
            0 => self.handle(plan.slot)?.file.sync_all(),
            1 => self.handle(plan.slot)?.file.sync_data(),
            2 => self.mapping(plan.slot)?.0.sync(),
            _ => sync_range(&self.handle(plan.slot)?.file),
        };
        synced.map_err(|error| self.failed("syncing", &error)).map(|()| true)
    }

    /// Records the next generation of blocks of a file, and writes their bytes into the buffer.
    pub fn begin(&mut self, slot: u32, first: u32, blocks: &[Block], bytes: &mut [u8]) {
        let (note, corrupt) = (self.note(), self.is_to_corrupt());
        let places = bytes.as_chunks_mut::<BLOCK_BYTES>().0;
        for ((index, block), place) in (first..).zip(blocks).zip(places) {
            let generation = block.next();
            block.begin(Content::written(slot, index, generation), note);
            Content::written(slot, index, generation + u64::from(corrupt)).write(self.task.seed, place);
        }
    }

    /// Records the new end of a file. Only with its end held, or its names held exclusively.
    pub fn end_at(&self, slot: u32, size: u32) {
        self.slot(slot).size_blocks.store(size, Release);
    }

    fn lock_range(&self, slot: u32, first: u32, count: u32, whole_pages: bool) -> Result<Locked, Halt> {
        let (mut first, mut last) = (first, first + count);
        if whole_pages {
            first -= first % PAGE_BLOCKS;
            last = last.next_multiple_of(PAGE_BLOCKS);
        }
        self.lock(self.blocks(slot, first, last))
    }

    /// Holds the end of a file, which moves until this is dropped.
    fn hold_end(&self, slot: u32) -> Result<End, Halt> {
        let slot = self.slot(slot);
        while slot.size_lock.compare_exchange(0, 1, AcqRel, Acquire).is_err() {
            self.pause()?;
        }
        slot.size_version.fetch_add(1, AcqRel);
        Ok(End(slot))
    }

    fn new_end(&mut self, slot: u32) -> u32 {
        let (size, random) = (self.size(slot), self.chooser.random());
        if random.u32(..FAR_ONE_IN) == 0 {
            return random.u32(SIZE_MIN..=BLOCKS as u32);
        }
        // A file that cannot grow any more is made shorter, so that there are appends again.
        if size + MOVE_MAX > BLOCKS as u32 {
            return random.u32(BLOCKS as u32 / 4 * 3..size);
        }
        let by = random.u32(1..=MOVE_MAX);
        let to = if random.bool() { size + by } else { size.saturating_sub(by) };
        to.clamp(SIZE_MIN, BLOCKS as u32)
    }
}

/// The end of a file, held exclusively.
struct End(&'static crate::ledger::Slot);

impl Drop for End {
    fn drop(&mut self) {
        self.0.size_version.fetch_add(1, AcqRel);
        self.0.size_lock.store(0, Release);
    }
}

/// Positions are in blocks.
fn copy_all(from: &File, from_first: u64, to: &File, to_first: u64, bytes: usize) -> io::Result<()> {
    let (mut at, mut onto) = (from_first * BLOCK_BYTES as u64, to_first * BLOCK_BYTES as u64);
    let end = onto + bytes as u64;
    while onto < end {
        let left = (end - onto) as usize;
        match rustix::fs::copy_file_range(from, Some(&mut at), to, Some(&mut onto), left) {
            Ok(0) => return Err(io::Error::new(ErrorKind::UnexpectedEof, "it copies nothing more")),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Begins to write a file's dirty data, and waits for it.
fn sync_range(file: &File) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: a system call on a descriptor that is open, with numbers only.
    let synced = unsafe { libc::sync_file_range(rustix::fd::AsRawFd::as_raw_fd(file), 0, FILE_BYTES as i64, flags) };
    if synced == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
