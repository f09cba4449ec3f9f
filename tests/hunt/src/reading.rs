//! Reads of every kind, and the reports about wrong bytes.

use crate::choice::{COUNT_MAX, Plan};
use crate::content::{BLOCK_BYTES, describe, words_of};
use crate::judge::{ReadMethod, Seen, judge};
use crate::ledger::{BLOCKS, Block, PAGE_BLOCKS};
use crate::shared::now_ms;
use crate::worker::{Done, FILE_BYTES, Halt, Worker, aligned};
use rustix::fs::Advice;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// Reported generations of the wrong block.
const HISTORY_TOLD: usize = 8;
/// Reported generations of its neighbours in the page.
const NEIGHBOUR_TOLD: usize = 2;

impl Worker {
    /// read(2).
    pub fn read(&mut self, plan: Plan) -> Done {
        self.read_with(plan, "read(2)", |worker, slot| Ok(&worker.handle(slot)?.file))
    }

    /// A direct read.
    pub fn read_direct(&mut self, plan: Plan) -> Done {
        self.read_with(plan, "a direct read", Worker::direct_file)
    }

    fn read_with(
        &mut self,
        plan: Plan,
        what: &str,
        file: impl for<'a> Fn(&'a mut Worker, u32) -> Result<&'a File, Halt>,
    ) -> Done {
        let Plan { slot, first, count, .. } = plan;
        let _readers = self.share(&self.slot(slot).readers)?;
        let before = self.before(slot, first, count, |worker| file(worker, slot).map(|_| ()))?;
        let mut buffer = self.take_buffer();
        let bytes = aligned(&mut buffer, count as usize * BLOCK_BYTES);
        let got = file(self, slot).map(|file| read_all(file, bytes, u64::from(first) * BLOCK_BYTES as u64));
        let outcome = match got {
            Ok(Ok(got)) => self.judge(plan, &before, bytes, got, ReadMethod::Call, what),
            Ok(Err(error)) => Err(self.failed(what, &error)),
            Err(halt) => Err(halt),
        };
        self.give_back(buffer);
        outcome.map(|()| true)
    }

    /// The whole file, in order.
    pub fn scan(&mut self, plan: Plan) -> Done {
        let size = self.size(plan.slot);
        for first in (0..size).step_by(COUNT_MAX as usize) {
            self.read(Plan { first, count: COUNT_MAX.min(BLOCKS as u32 - first), ..plan })?;
        }
        Ok(true)
    }

    /// Loads from a mapping.
    pub fn load(&mut self, plan: Plan) -> Done {
        let Plan { slot, first, count, .. } = plan;
        let _readers = self.share(&self.slot(slot).readers)?;
        let before = self.before(slot, first, count, |worker| worker.mapping(slot).map(|_| ()))?;
        let mut buffer = self.take_buffer();
        let bytes = aligned(&mut buffer, count as usize * BLOCK_BYTES);
        let (mapping, pipe) = self.mapping(slot)?;
        let got = mapping.load(pipe, first as usize * BLOCK_BYTES, bytes);
        let outcome = match got {
            // Nothing was tried behind the first missing page.
            Ok(got) => {
                let tried = (got / BLOCK_BYTES + 1).min(count as usize);
                let plan = Plan { count: tried as u32, ..plan };
                self.judge(plan, &before, bytes, got, ReadMethod::Mapping, "a load from a mapping")
            }
            Err(error) => Err(self.failed("loading from a mapping", &error)),
        };
        self.give_back(buffer);
        outcome?;
        if self.chooser.random().bool() {
            self.mapping(slot)?.0.let_go();
        }
        Ok(true)
    }

    /// The size, unless it is moving.
    pub fn stat(&mut self, plan: Plan) -> Done {
        let slot = self.slot(plan.slot);
        let version = slot.size_version.load(Acquire);
        let size = slot.size_blocks.load(Acquire);
        let found = self.handle(plan.slot)?.file.metadata();
        let found = found.map_err(|error| self.failed("fstat", &error))?.len();
        if version % 2 == 1 || slot.size_version.load(Acquire) != version {
            return Ok(false);
        }
        if found == u64::from(size) * BLOCK_BYTES as u64 {
            return Ok(true);
        }
        Err(self.fault(
            plan.slot,
            size.min(BLOCKS as u32 - 1),
            &format!("WRONG SIZE by fstat: {found} bytes, and it must be {}", u64::from(size) * BLOCK_BYTES as u64),
        ))
    }

    /// The backing file, after all data that was written through the mount has reached it.
    pub fn below(&mut self, plan: Plan) -> Done {
        let slot = plan.slot;
        let Some(_names) = self.alone(&self.slot(slot).names)? else { return Ok(false) };
        self.flush(slot)?;
        let before: Vec<u64> = self.blocks(slot, 0, BLOCKS as u32).iter().map(Block::before).collect();
        let mut buffer = self.take_buffer();
        let bytes = aligned(&mut buffer, FILE_BYTES);
        let got = File::open(self.backing_path(slot)).and_then(|file| read_all(&file, bytes, 0));
        let plan = Plan { first: 0, count: BLOCKS as u32, ..plan };
        let outcome = match got {
            Ok(got) => {
                self.judge(plan, &before, bytes, got, ReadMethod::Call, "reading the backing file, after fsync,")
            }
            Err(error) => Err(self.failed("reading the backing file", &error)),
        };
        self.give_back(buffer);
        outcome.map(|()| true)
    }

    /// Writes all data that was written through the mount to the backing file. Only with the names
    /// held.
    pub fn flush(&mut self, slot: u32) -> Result<(), Halt> {
        self.handle(slot)?.file.sync_all().map_err(|error| self.failed("fsync", &error))
    }

    /// Asks the kernel to evict the file, or a part.
    pub fn evict(&mut self, plan: Plan) -> Done {
        let Plan { slot, first, count, .. } = plan;
        let whole = self.chooser.random().bool();
        let handle = self.handle(slot)?;
        if let Some(mapping) = &handle.mapping {
            mapping.let_go();
        }
        let bytes = std::num::NonZeroU64::new(u64::from(count) * BLOCK_BYTES as u64);
        let (at, bytes) = if whole { (0, None) } else { (u64::from(first) * BLOCK_BYTES as u64, bytes) };
        let advised = rustix::fs::fadvise(&handle.file, at, bytes, Advice::DontNeed);
        advised.map_err(|error| self.failed("fadvise", &error.into()))?;
        Ok(true)
    }

    /// The generations that readers must see at least, and whether the open file is the current
    /// one.
    fn before(
        &mut self,
        slot: u32,
        first: u32,
        count: u32,
        open: impl Fn(&mut Worker) -> Result<(), Halt>,
    ) -> Result<Vec<u64>, Halt> {
        loop {
            open(self)?;
            let before = self.blocks(slot, first, first + count).iter().map(Block::before).collect();
            // A change of names is recorded before its blocks are: a reader that has not seen it
            // has seen none of its blocks either.
            if self.is_current(slot) {
                return Ok(before);
            }
        }
    }

    fn judge(
        &mut self,
        plan: Plan,
        before: &[u64],
        bytes: &[u8],
        got: usize,
        method: ReadMethod,
        what: &str,
    ) -> Result<(), Halt> {
        let Plan { slot, first, count, .. } = plan;
        let after: Vec<_> = self
            .blocks(slot, first, first + count)
            .iter()
            .zip(before)
            .map(|(block, first)| block.after(*first))
            .collect();
        let (mut judged, mut not_judged) = (0, 0);
        for (at, window) in after.into_iter().enumerate() {
            let index = first + at as u32;
            let block = &self.blocks(slot, index, index + 1)[0];
            let Some(allowed) = block.allowed(window) else {
                not_judged += 1;
                continue;
            };
            judged += 1;
            let words;
            let begin = at * BLOCK_BYTES;
            let seen = match got.saturating_sub(begin) {
                0 => Seen::Nothing,
                1..BLOCK_BYTES => Seen::Piece,
                _ => {
                    words = words_of(&bytes[begin..begin + BLOCK_BYTES]);
                    Seen::Whole(&words)
                }
            };
            if let Err(byte) = judge(&allowed, &seen, method, self.task.seed) {
                let seen = match seen {
                    Seen::Nothing if method == ReadMethod::Mapping => "no page (SIGBUS)".to_owned(),
                    Seen::Nothing => format!("the end of the file, {got} bytes on"),
                    Seen::Piece => format!("the end of the file within the block, {got} bytes on"),
                    Seen::Whole(words) => describe(words, self.task.seed),
                };
                return Err(self.fault(slot, index, &format!(
                    "WRONG BYTES by {what}, wrong from byte {byte} of the block\n  may be seen: {:?} (generations {} to {})\n  was seen: {seen}",
                    allowed.contents(),
                    window.first,
                    window.last,
                )));
            }
        }
        self.ledger.judged.fetch_add(judged, Relaxed);
        self.ledger.not_judged.fetch_add(not_judged, Relaxed);
        Ok(())
    }

    /// The report about wrong bytes, with everything else that can be read of the block now.
    pub fn fault(&mut self, slot: u32, block: u32, what: &str) -> Halt {
        // Another process may have found a wrong byte first; then this one may be a consequence of
        // the interruption.
        if self.ledger.stop.swap(1, Relaxed) != 0 {
            return Halt::Stopped;
        }
        let (mount, backing) = (self.path(slot), self.backing_path(slot));
        let again = self.handle(slot).map(|handle| handle.file.try_clone());
        let again = again.unwrap_or_else(|_| Err(ErrorKind::NotFound.into()));
        let look = |name: &str, file: io::Result<File>| {
            let found = file.and_then(|file| self.look(&file, block)).unwrap_or_else(|error| error.to_string());
            format!("  {name}: {found}\n")
        };
        let mut text = format!(
            "{what}\n  process {}, {}\n  block {block} (page {}) of {}\n",
            self.task.worker,
            self.plan,
            block / PAGE_BLOCKS,
            mount.display()
        );
        text += &look("read once more", again);
        text += &look("opened anew", File::open(&mount));
        text += &look("read directly", open_direct(&mount));
        text += &look("below", File::open(&backing));
        text += &self.history(slot, block);
        Halt::Fault(text)
    }

    fn look(&self, file: &File, block: u32) -> io::Result<String> {
        let mut buffer = vec![0; 3 * 4096];
        let page = block / PAGE_BLOCKS * PAGE_BLOCKS;
        let bytes = aligned(&mut buffer, 4096);
        let got = read_all(file, bytes, u64::from(page) * BLOCK_BYTES as u64)?;
        let begin = (block - page) as usize * BLOCK_BYTES;
        if got < begin + BLOCK_BYTES {
            return Ok(format!("the file ends {got} bytes behind the beginning of the page"));
        }
        Ok(describe(&words_of(&bytes[begin..begin + BLOCK_BYTES]), self.task.seed))
    }

    /// The last operations on a block, and on the others of its page.
    pub fn history(&self, slot: u32, block: u32) -> String {
        let now = now_ms();
        let tell = |index: u32, count: usize| {
            let history = self.blocks(slot, index, index + 1).first().map(Block::history).unwrap_or_default();
            let lines = history.into_iter().take(count).map(|(generation, content, note)| {
                let ago = now.saturating_sub(note.at_ms);
                format!(
                    "    {ago} ms ago, generation {generation}, {} by process {}: {content}\n",
                    note.operation, note.worker
                )
            });
            lines.collect::<String>()
        };
        let page = block / PAGE_BLOCKS * PAGE_BLOCKS;
        let mut text =
            format!("  the last operations on block {block}, which has {} blocks in its file now:\n", self.size(slot));
        text += &tell(block, HISTORY_TOLD);
        for other in (page..page + PAGE_BLOCKS).filter(|other| *other != block) {
            text += &format!("  on block {other} of the same page:\n{}", tell(other, NEIGHBOUR_TOLD));
        }
        text
    }
}

/// Reads until the buffer is full or the file ends.
pub fn read_all(file: &File, bytes: &mut [u8], at: u64) -> io::Result<usize> {
    let mut got = 0;
    while got < bytes.len() {
        match file.read_at(&mut bytes[got..], at + got as u64) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // Direct I/O cannot continue from an end that is not aligned, such as one that is
            // moving.
            Err(error) if error.kind() == ErrorKind::InvalidInput && !got.is_multiple_of(BLOCK_BYTES) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// Opens a file to be read past the cache.
pub fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}
