//! Images of virtual machines: pages that guests evict go into this machine's page cache, as clean
//! pages.
//!
//! FUSE can store pages in the kernel's cache (FUSE_NOTIFY_STORE), but this overwrites all cached
//! bytes, also those of a write(2) that has filled its pages and waits to be sent (fs/fuse/file.c,
//! fuse_fill_write_pages). That write would be lost. So a page is offered to the borrower, which
//! stores it if it equals the page of the backing file. Then the kernel is advised that the page
//! will be needed, and its READ is answered from the borrower. The kernel reads only pages that it
//! does not cache, and orders reads with writes as usual.

use crate::inode::{Found, Inode, stat};
use crate::lifecycle::running::{Mount, Shared};
use crate::system::ProcPath;
use borrower::Demotion;
use page::{PAGE_SIZE, Page};
use rustix::fs::{Advice, Mode, OFlags, ResolveFlags, fadvise, open, openat2};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::DemotionOutcome;

/// Time limit for the kernel to read advised pages. It begins at once, and waits for no disk.
const READ_WAIT: Duration = Duration::from_secs(1);
/// Time between two checks whether the kernel has these pages from another read.
const READ_LOOK: Duration = Duration::from_millis(5);
/// Number of pages that the kernel reads at least for one advice (mm/readahead.c,
/// force_page_cache_ra). That is the read-ahead window or the device's preferred size, 128 KiB with
/// FUSE.
const ADVISED_PAGES_MAX: usize = 32;

/// How pages get into the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placing {
    /// As clean pages.
    Clean,
    /// Written into the image first, as by Sugimoto, Kourai and Yamaguchi; for comparison.
    Written,
}

/// An image that is open while a message of its guest is handled. It is not open for longer,
/// because an open file prevents unmounting.
pub struct Image {
    shared: Arc<Shared>,
    inode: Arc<Inode>,
    /// The image, opened through the mount.
    file: File,
}

impl Mount {
    /// Opens the image at this path within the mountpoint.
    ///
    /// # Errors
    /// Fails if there is no such file.
    pub fn image(&self, name: &Path) -> io::Result<Image> {
        let filesystem = &self.shared.filesystem;
        let file = File::open(self.mountpoint().join(name))?;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let backing = openat2(&filesystem.source, name, flags, Mode::empty(), ResolveFlags::BENEATH)?;
        let found = stat(&backing)?;
        let inode = filesystem.inodes.known(&Found::new(backing, found)).ok_or(io::ErrorKind::NotFound)?;
        if inode.file.is_none() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Image { shared: self.shared.clone(), inode, file })
    }
}

impl Image {
    fn pages(&self) -> &borrower::File {
        // Only regular files become images.
        self.inode.file.as_ref().unwrap_or_else(|| unreachable!("an image has pages"))
    }

    /// Number of pages that are in the page cache because the guest has evicted them. The kernel
    /// may have evicted some since.
    pub fn placed_pages(&self) -> u64 {
        self.pages().placed_pages()
    }

    /// Puts pages that the guest has evicted into the page cache. They are in the order of their
    /// indexes, each once. Returns the result for each page.
    ///
    /// # Errors
    /// Fails if the kernel cannot be advised, or asked for its cached pages.
    pub fn place(&self, pages: &[(u32, &Page)], placing: Placing) -> io::Result<Vec<DemotionOutcome>> {
        let (Some((first, _)), Some((last, _))) = (pages.first(), pages.last()) else { return Ok(Vec::new()) };
        let resident = Resident::map(&self.file, *first..*last + 1)?;
        let borrower = &self.shared.filesystem.borrower;
        let mut waiting = Waiting { image: self, indexes: Vec::with_capacity(pages.len()) };
        let mut outcomes = Vec::with_capacity(pages.len());
        for (index, page) in pages {
            outcomes.push(if resident.has(*index)? {
                DemotionOutcome::Cached
            } else if placing == Placing::Written && !self.write(*index, page)? {
                DemotionOutcome::Differs
            } else {
                match borrower.demote(self.pages(), *index, page) {
                    Demotion::Waits => {
                        waiting.indexes.push(*index);
                        DemotionOutcome::Stored // as the kernel is going to read it
                    }
                    Demotion::Unknown => DemotionOutcome::Unknown,
                    Demotion::Differs => DemotionOutcome::Differs,
                    Demotion::NoRoom => DemotionOutcome::Missed,
                }
            });
        }
        self.advise(&waiting.indexes)?;
        self.wait_until_read(&waiting.indexes, &resident)?;
        for (outcome, index) in
            outcomes.iter_mut().filter(|outcome| **outcome == DemotionOutcome::Stored).zip(&waiting.indexes)
        {
            if borrower.withdraw_demoted(self.pages(), *index) {
                *outcome = if resident.has(*index)? { DemotionOutcome::Cached } else { DemotionOutcome::Missed };
            }
        }
        Ok(outcomes)
    }

    /// Number of pages of the image.
    ///
    /// # Errors
    /// Fails if fstat fails.
    pub fn page_count(&self) -> io::Result<u32> {
        let pages = self.file.metadata()?.len().div_ceil(PAGE_SIZE as u64);
        Ok(u32::try_from(pages).unwrap_or(u32::MAX))
    }

    /// Waits until the kernel has read these pages, or has them from another reader of the image.
    fn wait_until_read(&self, indexes: &[u32], resident: &Resident) -> io::Result<()> {
        let borrower = &self.shared.filesystem.borrower;
        let begun = Instant::now();
        while !borrower.wait_for_demoted(self.pages(), indexes, READ_LOOK) && begun.elapsed() < READ_WAIT {
            let mut are_there = true;
            for index in indexes {
                are_there &= resident.has(*index)?;
            }
            if are_there {
                break;
            }
        }
        Ok(())
    }

    /// Advises the kernel to read these pages.
    fn advise(&self, indexes: &[u32]) -> io::Result<()> {
        let runs = indexes.chunk_by(|one, next| *one + 1 == *next).flat_map(|run| run.chunks(ADVISED_PAGES_MAX));
        for run in runs {
            let len = NonZeroU64::new((run.len() * PAGE_SIZE) as u64);
            fadvise(&self.file, offset_of(run[0]), len, Advice::WillNeed)?;
        }
        Ok(())
    }

    /// Drops pages that the guest has read: the guest caches them now. Returns how many of them
    /// were in the page cache because the guest had evicted them. Pages that the kernel has evicted
    /// since count, too.
    ///
    /// # Errors
    /// When the kernel cannot be told.
    pub fn let_go(&self, pages: Range<u32>) -> io::Result<u64> {
        let hits = self.read_by_guest(pages.clone());
        let len = NonZeroU64::new(pages.len() as u64 * PAGE_SIZE as u64);
        fadvise(&self.file, offset_of(pages.start), len, Advice::DontNeed)?;
        Ok(hits)
    }

    /// Removes the page from the page cache. Returns whether it was there because the guest had
    /// evicted it.
    ///
    /// # Errors
    /// When the kernel cannot be told.
    pub fn take_back(&self, index: u32) -> io::Result<bool> {
        let was_placed = self.pages().read_by_guest(index..index + 1) > 0;
        if was_placed {
            fadvise(&self.file, offset_of(index), NonZeroU64::new(PAGE_SIZE as u64), Advice::DontNeed)?;
        }
        Ok(was_placed)
    }

    /// Records that a guest has read these pages, and returns the same count as [`Image::let_go`],
    /// but keeps the pages in the page cache.
    pub fn read_by_guest(&self, pages: Range<u32>) -> u64 {
        self.pages().read_by_guest(pages)
    }

    /// Writes a page into the image if the image already holds these bytes. Returns false if it
    /// does not.
    fn write(&self, index: u32, page: &Page) -> io::Result<bool> {
        let filesystem = &self.shared.filesystem;
        let anchor = filesystem.inodes.anchor(&self.inode)?;
        let backing = open(ProcPath::new(&anchor).path(), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(filesystem.write_again(&self.inode, &backing, index, page)?)
    }
}

/// Pages that the borrower stores until the kernel has read them, or until this is dropped.
struct Waiting<'a> {
    image: &'a Image,
    indexes: Vec<u32>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        for index in &self.indexes {
            self.image.shared.filesystem.borrower.withdraw_demoted(self.image.pages(), *index);
        }
    }
}

/// A mapping of a file, with which mincore(2) tells which pages are in the page cache. No page is
/// touched.
struct Resident {
    map: *mut std::ffi::c_void,
    pages: Range<u32>,
}

impl Resident {
    fn map(file: &File, pages: Range<u32>) -> io::Result<Resident> {
        let (len, offset) = (pages.len() * PAGE_SIZE, offset_of(pages.start));
        // SAFETY: a new mapping at an address of the kernel's choice. It is never read, so it does
        // not matter if the file shrinks.
        let map = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, offset)? };
        Ok(Resident { map, pages })
    }

    fn has(&self, index: u32) -> io::Result<bool> {
        assert!(self.pages.contains(&index));
        let offset = (index - self.pages.start) as usize * PAGE_SIZE;
        let mut state = 0u8;
        // SAFETY: the page is within the mapping, by the assertion; for one page mincore writes one
        // byte.
        match unsafe { libc::mincore(self.map.byte_add(offset), PAGE_SIZE, &mut state) } {
            0 => Ok(state & 1 == 1),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        // SAFETY: what `map` mapped, once; nobody has a reference into it.
        let _ = unsafe { munmap(self.map, self.pages.len() * PAGE_SIZE) };
    }
}

fn offset_of(index: u32) -> u64 {
    u64::from(index) * PAGE_SIZE as u64
}
