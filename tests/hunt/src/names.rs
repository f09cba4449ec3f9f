//! Changes of names through the mount.

use crate::choice::Plan;
use crate::content::{BLOCK_BYTES, Content};
use crate::ledger::{BLOCKS, Block};
use crate::mapping::Mapping;
use crate::worker::{Done, FILE_BYTES, Halt, Worker, aligned};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering::{AcqRel, Release};

/// Bytes of a new file that are written at a time.
const PIECE_BYTES: usize = 64 << 10;

/// The way in which a new file is written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// write(2).
    Calls,
    /// Stores into a mapping.
    Stores,
    /// Direct writes.
    Direct,
}

impl Worker {
    /// A new file is renamed over the name.
    pub fn rename_over(&mut self, plan: Plan) -> Done {
        let slot = plan.slot;
        let Some(_names) = self.alone(&self.slot(slot).names)? else { return Ok(false) };
        self.see_name(slot)?;
        let path = self.path(slot);
        let new = self.task.mount.join(format!("new-{}", self.task.worker));
        let size = self.new_size();
        let made = self.make(&new, slot, size, true);
        made.map_err(|error| self.failed("writing a new file", &error))?;
        self.begin_anew(slot, size);
        fs::rename(&new, &path).map_err(|error| self.failed("renaming a new file over it", &error))?;
        self.is_another(slot, size);
        Ok(true)
    }

    /// The name is unlinked, and a new file created with it.
    pub fn recreate(&mut self, plan: Plan) -> Done {
        let slot = plan.slot;
        let Some(_names) = self.alone(&self.slot(slot).names)? else { return Ok(false) };
        self.see_name(slot)?;
        let (path, size) = (self.path(slot), self.new_size());
        self.begin_gone(slot);
        fs::remove_file(&path).map_err(|error| self.failed("unlinking it", &error))?;
        let made = self.make_noting(&path, slot, size);
        made.map_err(|error| self.failed("creating it again", &error))?;
        self.is_another(slot, size);
        Ok(true)
    }

    /// A second name is made and removed.
    pub fn link(&mut self, plan: Plan) -> Done {
        let slot = plan.slot;
        let _names = self.share(&self.slot(slot).names)?;
        self.see_name(slot)?;
        let (path, other) = (self.path(slot), self.task.mount.join(format!("link-{}", self.task.worker)));
        fs::hard_link(&path, &other).map_err(|error| self.failed("link(2)", &error))?;
        let found = (fs::metadata(&path), fs::metadata(&other));
        fs::remove_file(&other).map_err(|error| self.failed("unlinking the second name", &error))?;
        match found {
            (Ok(one), Ok(two)) if (one.dev(), one.ino()) == (two.dev(), two.ino()) => Ok(true),
            (Ok(one), Ok(two)) => {
                let what = format!("WRONG NAME: its second name is inode {}, and it is {}", two.ino(), one.ino());
                Err(self.fault(slot, 0, &what))
            }
            (Err(error), _) | (_, Err(error)) => Err(self.failed("looking at it by one of two names", &error)),
        }
    }

    /// Opens the file if its name was changed externally: the new file is promised from the next
    /// open on.
    fn see_name(&mut self, slot: u32) -> Result<(), Halt> {
        self.handle(slot).map(drop)
    }

    /// Mostly so large that all files together exceed the memory of the group.
    pub fn new_size(&mut self) -> u32 {
        self.chooser.random().u32(BLOCKS as u32 / 2..=BLOCKS as u32)
    }

    /// Records that all blocks are those of a new file, or absent. Only with the names held
    /// exclusively.
    pub fn begin_anew(&self, slot: u32, size: u32) {
        self.slot(slot).size_version.fetch_add(1, AcqRel);
        let note = self.note();
        for (index, block) in (0..).zip(self.blocks(slot, 0, BLOCKS as u32)) {
            block.begin(content(slot, index, size, block), note);
        }
    }

    /// Records that there is no file for a moment.
    pub fn begin_gone(&self, slot: u32) {
        let note = self.note();
        self.blocks(slot, 0, BLOCKS as u32).iter().for_each(|block| block.begin(Content::ABSENT, note));
    }

    /// Records that the name is another file's.
    pub fn is_another(&self, slot: u32, size: u32) {
        let known = self.slot(slot);
        // Before its blocks: readers read them first, and then this.
        known.incarnation.fetch_add(1, AcqRel);
        known.size_blocks.store(size, Release);
        known.size_version.fetch_add(1, AcqRel);
        self.blocks(slot, 0, BLOCKS as u32).iter().for_each(Block::finish);
    }

    /// Creates a file that all processes may see at once.
    pub fn make_noting(&mut self, path: &Path, slot: u32, size: u32) -> io::Result<()> {
        // Its bytes are those of the generation that is recorded now.
        let mut bytes = self.new_bytes(slot, size);
        self.begin_anew(slot, size);
        let made = self.write_new(path, aligned(&mut bytes, size as usize * BLOCK_BYTES), false);
        self.give_back(bytes);
        made
    }

    /// Creates a file that no other process uses yet; its blocks have the next generations.
    pub fn make(&mut self, path: &Path, slot: u32, size: u32, by_mapping: bool) -> io::Result<()> {
        let mut bytes = self.new_bytes(slot, size);
        let made = self.write_new(path, aligned(&mut bytes, size as usize * BLOCK_BYTES), by_mapping);
        self.give_back(bytes);
        made
    }

    fn new_bytes(&mut self, slot: u32, size: u32) -> Vec<u8> {
        let mut buffer = self.take_buffer();
        let places = aligned(&mut buffer, size as usize * BLOCK_BYTES);
        for ((index, block), place) in (0..).zip(self.blocks(slot, 0, size)).zip(places.as_chunks_mut().0) {
            let place: &mut [u8; BLOCK_BYTES] = place;
            content(slot, index, size, block).write(self.task.seed, place);
        }
        buffer
    }

    fn write_new(&mut self, path: &Path, bytes: &[u8], by_mapping: bool) -> io::Result<()> {
        let how = match self.chooser.random().u32(..4) {
            0 if by_mapping => How::Stores,
            1 if by_mapping => How::Direct,
            _ => How::Calls,
        };
        let flags = if how == How::Direct { libc::O_DIRECT } else { 0 };
        let file = OpenOptions::new().read(true).write(true).create_new(true).custom_flags(flags).open(path)?;
        self.fill(&file, bytes, how)?;
        if self.chooser.random().bool() { file.sync_all() } else { Ok(()) }
    }

    fn fill(&self, file: &File, bytes: &[u8], how: How) -> io::Result<()> {
        if how == How::Stores {
            file.set_len(bytes.len() as u64)?;
            return Mapping::new(file, FILE_BYTES)?.store(&self.pipe, 0, bytes);
        }
        let pieces = bytes.chunks(PIECE_BYTES).zip((0..).step_by(PIECE_BYTES));
        pieces.into_iter().try_for_each(|(piece, at)| file.write_all_at(piece, at))
    }
}

/// The content of a new file's block.
fn content(slot: u32, index: u32, size: u32, block: &Block) -> Content {
    if index < size { Content::written(slot, index, block.next()) } else { Content::ABSENT }
}
