//! A guest whose disks are the node's files. It stores earlier contents of pages, and reports at
//! any moment that it has evicted them, including pages that have changed since.

use crate::context::Context;
use crate::file::{UNITS, encode};
use crate::node::{Doing, Node};
use crate::reading::Read;
use borrower::Demotion;
use page::{PAGE_SIZE, PageId};

/// The number of pages that it stores.
const REMEMBERED_MAX: usize = 40;

/// The stored pages.
#[derive(Default)]
pub struct Guest {
    /// The file, the page, and its contents at that time.
    remembered: Vec<(usize, usize, [u64; UNITS])>,
    /// Pages that wait for the kernel to read them.
    waiting: Vec<PageId>,
}

impl Guest {
    /// The node's kernel has evicted a page, so the guest may have it from an earlier read.
    pub fn remember(&mut self, context: &mut Context, file: usize, page: usize, units: [u64; UNITS]) {
        let remembered = (file, page, units);
        if self.remembered.len() < REMEMBERED_MAX {
            self.remembered.push(remembered);
        } else {
            self.remembered[context.random.usize(0..REMEMBERED_MAX)] = remembered;
        }
    }

    /// A daemon has died, together with the pages that waited there.
    pub fn forget_waiting(&mut self) {
        self.waiting.clear();
    }
}

impl Node {
    /// The guest evicts a page, or the host stops waiting for the kernel.
    pub fn receive_from_guest(&mut self, context: &mut Context) {
        let Some(guest) = &mut self.guest else { return };
        if !guest.waiting.is_empty() && context.random.u32(0..8) == 0 {
            let at = context.random.usize(0..guest.waiting.len());
            let id = guest.waiting.swap_remove(at);
            self.core.demoted().map(|demoted| demoted.withdraw(id));
            return;
        }
        if guest.remembered.is_empty() || self.tasks.len() >= context.rates.tasks_max {
            return;
        }
        let (file, index, units) = guest.remembered[context.random.usize(0..guest.remembered.len())];
        let Some(inode) = self.files.get(file).and_then(|file| file.inode.as_ref()) else { return };
        if index >= inode.pages.len() {
            return;
        }
        if context.random.u32(0..8) == 0 {
            inode.file.read_by_guest(index as u32..index as u32 + 1);
            return;
        }
        let mut page = [0; PAGE_SIZE];
        encode(&units, &mut page);
        let demotion = self.core.demote(&inode.file, index as u32, &page);
        context.note(|| format!("the guest gives file {file} page {index} back: {units:?}, {demotion:?}"));
        if demotion == Demotion::Waits {
            guest.waiting.push(PageId { file: inode.file.key(), index: index as u32 });
            context.statistics.demoted += 1;
            self.start(context, file, Doing::Read(Read::new(index, index + 1)));
        }
    }
}
