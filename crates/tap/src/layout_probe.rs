//! Finds the place of the kernel's memory map, without symbols.
//!
//! To get from a folio to its bytes the tap needs two addresses that a kernel chooses at each boot
//! and does not publish. They are the array of all `struct page` (`vmemmap_base`), and the linear
//! map of all memory (`page_offset_base`). The calibration computes both from pages of its own,
//! whose content, page frame and folio it knows:
//!
//! 1. It makes a few files of one page each in memory (memfd), with random content.
//!    `/proc/self/pagemap` has their page frame numbers.
//! 2. *Linear map.* A kernel object such as the current task lies in it; the base is a multiple of
//!    1 GiB below that. From there on down, the calibration tries each candidate. It reads the
//!    place where the first page would be (inside of BPF, where a bad address is an error and no
//!    crash). All 4096 bytes must be the ones that were written, and the same for every other page.
//! 3. *Page array.* The files are truncated; the eviction tracepoint fires for each page, with its
//!    folio. Folio minus frame number times `sizeof(struct page)` must be the same address for all
//!    of them, and a multiple of 1 GiB.
//!
//! A page may move between two steps (compaction, reclaim), which shows as a mismatch. Then
//! everything is repeated with new pages, a few times. Promise: a result is right for every page
//! that was tried, byte for byte. The invariant: a partial match gives no result, because the tap
//! would then send other users' memory.

use crate::intf::{self, ONLY_KEY, PEEK_BYTES, PROBE_FILES, Peek, Sighting};
use crate::load::{self, LoadError};
use libbpf_rs::{MapCore, MapFlags, Object, ProgramInput};
use page::{PAGE_SIZE, Page};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags as MmapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr;
use zerocopy::IntoBytes;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/layout_probe.bpf.o"));

/// The alignment of both bases: the kernel places its regions in units of one entry of a
/// third-level page table.
const BASE_ALIGNMENT: u64 = 1 << 30;

/// The largest distance in GiB of the linear map's beginning below our task: 64 TiB, all the memory
/// that a kernel without 5-level paging can have. The search ends at the first match, after as many
/// steps as there are GiB of memory below the task.
const CANDIDATES_MAX: u64 = 64 * 1024;

/// The lowest address at which an x86-64 kernel places such regions (with 5-level paging; far
/// higher without).
const KERNEL_FLOOR: u64 = 0xff11_0000_0000_0000;

/// The number of attempts if a page has moved. Each takes milliseconds.
const ATTEMPTS: u32 = 5;

/// The two addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bases {
    /// The address of the `struct page` of frame 0.
    pub(crate) vmemmap: u64,
    /// The address of the first byte of physical memory.
    pub(crate) linear: u64,
}

/// Finds both addresses, or returns the reason why not.
pub(crate) fn probe_layout() -> Result<Bases, LoadError> {
    let mut last = None;
    for _ in 0..ATTEMPTS {
        match attempt() {
            Err(error @ LoadError::MemoryMap { .. }) => last = Some(error),
            done => return done,
        }
    }
    Err(last.unwrap_or(LoadError::MemoryMap { detail: "no attempt was made".into() }))
}

fn attempt() -> Result<Bases, LoadError> {
    let mut files = Vec::with_capacity(PROBE_FILES);
    for _ in 0..PROBE_FILES {
        files.push(OwnPage::new().map_err(system("making a page in memory"))?);
    }
    let mut inodes = [0; PROBE_FILES];
    let mut device = 0;
    for (file, inode) in files.iter().zip(&mut inodes) {
        let stat = file.file.metadata().map_err(system("looking at a file in memory"))?;
        *inode = stat.ino();
        device = intf::kernel_device(stat.dev());
    }
    let object = load::load(OBJECT, "loading the calibration programs", |object| {
        load::open_map(object, ".rodata")?.set_initial_value(intf::probe_config(inodes, device).as_bytes())
    })?;

    let mut frames = [0; PROBE_FILES];
    for (file, frame) in files.iter().zip(&mut frames) {
        *frame = file.frame()?;
    }
    let linear = find_linear(&object, &files, &frames)?;
    let vmemmap = find_vmemmap(&object, &files, &frames)?;
    Ok(Bases { vmemmap, linear })
}

fn find_linear(object: &Object, files: &[OwnPage], frames: &[u64]) -> Result<u64, LoadError> {
    let holds = |base: u64, frame: u64, content: &Page| {
        let address = frame.checked_mul(PAGE_SIZE as u64).and_then(|bytes| base.checked_add(bytes));
        match address {
            Some(address) => peek(object, address, |peek| !peek.failed && peek.page == *content),
            None => Ok(false),
        }
    };
    let (Some(first), Some(&frame)) = (files.first(), frames.first()) else {
        return Err(LoadError::MemoryMap { detail: "no page was made to search for".into() });
    };
    let task = peek(object, 0, |peek| peek.task)?;
    let nearest = task - task % BASE_ALIGNMENT;
    let candidates = (0..CANDIDATES_MAX).map_while(|nth| nearest.checked_sub(nth * BASE_ALIGNMENT));
    for base in candidates.take_while(|&base| base >= KERNEL_FLOOR) {
        if !holds(base, frame, &first.content)? {
            continue;
        }
        for (file, &frame) in files.iter().zip(frames).skip(1) {
            if !holds(base, frame, &file.content)? {
                return Err(LoadError::MemoryMap {
                    detail: "only some of the pages were found at their places".into(),
                });
            }
        }
        return Ok(base);
    }
    Err(LoadError::MemoryMap { detail: "a page was not found in the kernel's linear map".into() })
}

fn find_vmemmap(object: &Object, files: &[OwnPage], frames: &[u64]) -> Result<u64, LoadError> {
    let attempt = "attaching the calibration program";
    let link = load::attach(&load::program(object, "witness")?, attempt)?;
    for file in files {
        file.file.set_len(0).map_err(system("truncating a file in memory"))?;
    }
    drop(link);

    let map = load::map(object, "sightings")?;
    let mut sightings = Vec::with_capacity(frames.len());
    for nth in 0..frames.len() as u32 {
        let bytes = map.lookup(&nth.to_ne_bytes(), MapFlags::ANY).map_err(unreadable)?;
        sightings.extend(bytes.as_deref().and_then(Sighting::parse));
    }
    vmemmap_base(&sightings, frames)
}

/// Returns the address that all sightings agree on.
pub(crate) fn vmemmap_base(sightings: &[Sighting], frames: &[u64]) -> Result<u64, LoadError> {
    let disagree = |detail: String| Err(LoadError::MemoryMap { detail });
    if sightings.len() < 2 || sightings.len() != frames.len() {
        return disagree(format!("{} of {} folios were seen", sightings.len(), frames.len()));
    }
    let mut base = None;
    for (sighting, frame) in sightings.iter().zip(frames) {
        let &Sighting { folio, struct_page_bytes } = sighting;
        if folio == 0 || struct_page_bytes == 0 {
            return disagree("a page left the cache without an event".into());
        }
        let from_base = frame.checked_mul(struct_page_bytes);
        let Some(this) = from_base.and_then(|bytes| folio.checked_sub(bytes)) else {
            return disagree(format!("folio {folio:#x} cannot belong to frame {frame:#x}"));
        };
        if this % BASE_ALIGNMENT != 0 || this < KERNEL_FLOOR {
            return disagree(format!("the page array cannot begin at {this:#x}"));
        }
        if *base.get_or_insert(this) != this {
            return disagree("two folios give different addresses for the page array".into());
        }
    }
    base.map_or_else(|| disagree("no folio was seen".into()), Ok)
}

/// Reads the page at a kernel address and passes it to `look`.
fn peek<T>(object: &Object, address: u64, look: impl FnOnce(Peek) -> T) -> Result<T, LoadError> {
    let attempt = "running the calibration program";
    let input = ProgramInput { context_in: Some(&mut address.to_ne_bytes()), ..ProgramInput::default() };
    load::program(object, "peek")?.test_run(input).map_err(|error| match error.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => LoadError::NotPermitted { attempt },
        _ => LoadError::System { attempt, source: io::Error::other(format!("{error:#}")) },
    })?;
    let mut answer = [0; PEEK_BYTES];
    load::map(object, "peeked")?.lookup_into(&ONLY_KEY, &mut answer, MapFlags::ANY).map_err(unreadable)?;
    let answer = Peek::parse(&answer)
        .ok_or_else(|| LoadError::MemoryMap { detail: "reading a page returned no answer".into() })?;
    Ok(look(answer))
}

fn unreadable(error: libbpf_rs::Error) -> LoadError {
    LoadError::System { attempt: "reading the calibration's answer", source: io::Error::other(format!("{error:#}")) }
}

fn system(attempt: &'static str) -> impl Fn(io::Error) -> LoadError {
    move |source| LoadError::System { attempt, source }
}

/// A file of one page in memory, with random content. It is mapped, so its page frame number can be
/// read.
struct OwnPage {
    file: File,
    content: Box<Page>,
    mapped: ptr::NonNull<u8>,
}

impl OwnPage {
    fn new() -> io::Result<OwnPage> {
        let file = File::from(rustix::fs::memfd_create("tap-layout-probe", MemfdFlags::CLOEXEC)?);
        let mut content = Box::new([0; PAGE_SIZE]);
        File::open("/dev/urandom")?.read_exact(&mut content[..])?;
        file.write_all_at(&content[..], 0)?;
        let flags = MmapFlags::SHARED;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing that is
        // mapped already.
        let mapped = unsafe { mmap(ptr::null_mut(), PAGE_SIZE, ProtFlags::READ, flags, &file, 0)? };
        let mapped = ptr::NonNull::new(mapped.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(OwnPage { file, content, mapped })
    }

    /// Returns the page's frame number. The page is the first of its file, so it is also the first
    /// of its folio, whatever the folio's size.
    fn frame(&self) -> Result<u64, LoadError> {
        const ENTRY_BYTES: u64 = 8;
        const PRESENT: u64 = 1 << 63;
        const FRAME_BITS: u32 = 55;

        // SAFETY: the page is mapped, readable and not truncated yet. The read brings it into our
        // page table.
        unsafe { ptr::read_volatile(self.mapped.as_ptr()) };
        let mut entry = [0; ENTRY_BYTES as usize];
        let at = self.mapped.as_ptr() as u64 / PAGE_SIZE as u64 * ENTRY_BYTES;
        let read = File::open("/proc/self/pagemap").and_then(|pagemap| pagemap.read_exact_at(&mut entry, at));
        read.map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => LoadError::FramesHidden,
            _ => LoadError::System { attempt: "reading /proc/self/pagemap", source: error },
        })?;
        let entry = u64::from_le_bytes(entry);
        if entry & PRESENT == 0 {
            return Err(LoadError::MemoryMap { detail: "a page has left this process's page table".into() });
        }
        // Frame 0 is never used: the kernel returns 0 to processes without the right to see the
        // number.
        match entry & ((1 << FRAME_BITS) - 1) {
            0 => Err(LoadError::FramesHidden),
            frame => Ok(frame),
        }
    }
}

impl Drop for OwnPage {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` made, and nothing borrows from it.
        let unmapped = unsafe { munmap(self.mapped.as_ptr().cast(), PAGE_SIZE) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0xffff_ea00_0000_0000;

    fn seen(frame: u64) -> Sighting {
        Sighting { folio: BASE + frame * 64, struct_page_bytes: 64 }
    }

    #[test]
    fn agreeing_folios_give_the_page_array() {
        let frames = [0x1234, 5, 0x40_0000, 0x7f];
        assert_eq!(vmemmap_base(&frames.map(seen), &frames).unwrap(), BASE);
    }

    #[test]
    fn anything_less_gives_nothing() {
        let frames = [0x1234, 5, 0x40_0000, 0x7f];
        let good = frames.map(seen);
        let refuse = |change: &dyn Fn(&mut Vec<Sighting>)| {
            let mut sightings = good.to_vec();
            change(&mut sightings);
            let error = vmemmap_base(&sightings, &frames).unwrap_err();
            assert!(matches!(error, LoadError::MemoryMap { .. }), "{error}");
        };
        refuse(&|seen| seen[2].folio += 64);
        refuse(&|seen| seen[2].folio += BASE_ALIGNMENT);
        refuse(&|seen| seen.iter_mut().for_each(|seen| seen.folio += 64));
        refuse(&|seen| seen.iter_mut().for_each(|seen| seen.folio -= 1 << 60));
        refuse(&|seen| seen[0].folio = 0);
        refuse(&|seen| seen[0].folio = 8);
        refuse(&|seen| seen[3].struct_page_bytes = 0);
        refuse(&|seen| seen[3].struct_page_bytes = u64::MAX);
        refuse(&|seen| seen.truncate(3));
        refuse(&|seen| seen.clear());
        assert!(vmemmap_base(&good[..1], &frames[..1]).is_err(), "one page is no proof");
    }
}
