//! External changes of files: at once, or slowly.

use crate::context::Context;
use crate::file::{FileModel, UNITS};
use crate::node::{Doing, Node, Task};
use crate::oracle::EOF;
use borrower::Writers;

/// A slow external write: its file has new times before it has new bytes
/// (docs/design/consistency.md, K16).
pub struct SlowWrite {
    /// The next unit to write.
    next: usize,
    /// The remaining values, from there on.
    left: Vec<u64>,
    /// The file's contents before the write.
    before: Vec<u64>,
}

impl Node {
    /// An external writer changes the backing file. The promise is close-to-open, so this does not
    /// happen while the mount changes the file.
    pub fn change_externally(&mut self, context: &mut Context, file: usize) {
        let model = &mut self.files[file];
        let is_dirty = model.inode.as_ref().is_some_and(crate::file::Inode::is_dirty);
        if model.changes > 0 || model.mixed || model.is_written_externally || is_dirty {
            return;
        }
        let units = model.backing.units.len();
        let before: Vec<u64> = (0..units).map(|unit| model.backing.read(unit)).collect();
        let first = context.random.usize(0..units);
        let end = context.random.usize(first + 1..=units.min(first + 20));
        model.backing.changed = context.now;
        context.statistics.external_changes += 1;
        if context.random.bool() {
            let value = context.number() * 4096;
            let left: Vec<u64> = (first..end).map(|unit| value + unit as u64).collect();
            if context.random.u32(0..1000) < context.rates.slow_writes {
                context.note(|| format!("file {file} is being changed externally, units {first}..{end}"));
                self.files[file].is_written_externally = true;
                let slow = SlowWrite { next: first, left, before };
                return self.start(context, file, Doing::WriteExternally(slow));
            }
            model.backing.write(first, &left);
        } else {
            model.backing.truncate(first);
        }
        changed(context, model, &before);
        context.note(|| {
            format!("file {file} changed externally, units {first}.., size {}", self.files[file].backing.size)
        });
    }

    /// Does one step of a slow external write. Returns true when it has ended.
    pub fn advance_external_write(&mut self, context: &mut Context, task: &Task, slow: &mut SlowWrite) -> bool {
        let model = &mut self.files[task.file];
        if context.random.u32(0..1000) < context.rates.stalls {
            return false;
        }
        let count = context.random.usize(0..=slow.left.len().min(UNITS));
        let written: Vec<u64> = slow.left.drain(..count).collect();
        if count > 0 {
            for unit in model.backing.size.min(slow.next)..slow.next + count {
                // The new value may be read from now on, and the old value until the file is opened
                // after the write.
                let new = unit.checked_sub(slow.next).and_then(|at| written.get(at).copied());
                model.oracle.announce(task.id, unit, new.unwrap_or(0));
                if slow.before[unit] == EOF {
                    let inode = model.inode.as_ref();
                    let cached =
                        inode.and_then(|inode| inode.pages[unit / UNITS]).map_or(0, |page| page.units[unit % UNITS]);
                    model.oracle.announce(task.id, unit, 0);
                    model.oracle.announce(task.id, unit, cached);
                }
            }
            model.backing.write(slow.next, &written);
            slow.next += count;
        }
        if !slow.left.is_empty() {
            return false;
        }
        model.is_written_externally = false;
        changed(context, model, &slow.before);
        model.oracle.end(task.id, context.now);
        context.note(|| format!("file {} was changed externally, size {}", task.file, model.backing.size));
        true
    }

    /// Returns whether an open detects an external writer. Without a writer that cannot always be
    /// known.
    pub fn writers(context: &mut Context, model: &FileModel) -> Writers {
        match model.is_written_externally || context.random.u32(0..1000) < context.rates.unknown_writers {
            true => Writers::Perhaps,
            false => Writers::None,
        }
    }
}

/// The backing file was changed: records which of its values from `before` may still be read.
fn changed(context: &Context, model: &mut FileModel, before: &[u64]) {
    for (unit, old) in before.iter().copied().enumerate() {
        let new = model.backing.read(unit);
        if new != old {
            model.oracle.external(unit, new, context.now);
        }
        if old == EOF
            && let Some(cached) = model.inode.as_ref().and_then(|inode| inode.pages[unit / UNITS])
        {
            // Bytes that a mapping has left behind the old end may become visible with it, until an
            // open.
            model.oracle.outlast(unit, cached.units[unit % UNITS], context.now);
        }
    }
}
