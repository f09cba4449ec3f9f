//! A process's memory: its present pages, their nodes, and moving them (move_pages(2)).
//!
//! Memory is moved in the kernel's units: single pages, or folios of many (huge pages), which stay
//! whole.

use crate::{NodeId, PAGE_BYTES};
use rustix::fs::{Mode, OFlags, openat};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Pages whose /proc/PID/pagemap entries are read at once.
const WINDOW_PAGES: u64 = 1 << 14;
/// Bytes of an entry there, and its bits (Documentation/admin-guide/mm/pagemap.rst).
const ENTRY_BYTES: usize = 8;
const PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;
/// Bits of /proc/kpageflags: the first page of a folio of many, and the others.
const COMPOUND_HEAD: u64 = 1 << 15;
const COMPOUND_TAIL: u64 = 1 << 16;
/// The maximum size of a folio, as a power of two of pages: 1 GiB.
const FOLIO_ORDER_MAX: u32 = 18;
/// Pages of it whose flags are read together.
const FLAGS_PAGES: u64 = 512;
/// A flag of move_pages(2): pages that only this process has.
const MOVE_OWN: libc::c_int = 1 << 1;

/// The memory of a process. Its end is detected: another process with the same number is not taken
/// for it.
pub struct Process {
    pid: u32,
    /// /proc/PID; reads through it fail once the process has ended.
    folder: OwnedFd,
    /// Shows which pages are one folio. `None`: that needs more rights, and each page counts as
    /// one.
    flags: Option<File>,
}

/// Memory that is moved as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Number of its first page: its address over [`PAGE_BYTES`].
    pub page: u64,
    /// The number of its pages that are mapped here.
    pub pages: u64,
}

/// The result of moving a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Moved {
    /// It is at its new node.
    Yes,
    /// It does not exist any more.
    Gone,
    /// It was in use.
    Busy,
    /// The node is full.
    Full,
    /// Other processes have it mapped, too.
    Shared,
    /// The kernel's error number for another reason.
    No(i32),
}

impl Moved {
    /// The result for a unit that is at `now`, and should be at `wanted`.
    fn seen_at(self, now: Option<NodeId>, wanted: NodeId) -> Moved {
        match now {
            Some(now) if now == wanted => Moved::Yes,
            Some(_) => self,
            None => Moved::Gone,
        }
    }
}

impl Process {
    /// Opens a process.
    ///
    /// # Errors
    /// Fails if there is no such process, or it may not be read.
    pub fn open(pid: u32) -> io::Result<Process> {
        let folder = rustix::fs::open(
            Path::new("/proc").join(pid.to_string()),
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let process = Process { pid, folder, flags: File::open("/proc/kpageflags").ok() };
        process.file("maps")?;
        Ok(process)
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it still runs.
    pub fn is_alive(&self) -> bool {
        // A process that has ended and was not waited for has no memory.
        self.text("statm").is_ok_and(|text| !text.starts_with("0 "))
    }

    fn file(&self, name: &str) -> io::Result<File> {
        Ok(openat(&self.folder, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?.into())
    }

    fn text(&self, name: &str) -> io::Result<String> {
        let mut bytes = Vec::new();
        self.file(name)?.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Its name.
    ///
    /// # Errors
    /// Fails if it has ended.
    pub fn name(&self) -> io::Result<String> {
        Ok(shown(self.text("comm")?.trim()))
    }

    /// The process that has started it.
    ///
    /// # Errors
    /// Fails if it has ended.
    pub fn parent(&self) -> io::Result<u32> {
        let status = self.text("status")?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        parent.and_then(|pid| pid.trim().parse().ok()).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Its users: real, effective, saved, and for files.
    ///
    /// # Errors
    /// Fails if it has ended.
    pub fn users(&self) -> io::Result<Vec<u32>> {
        let status = self.text("status")?;
        let users = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
        users.split_whitespace().map(|uid| uid.parse().map_err(|_| io::ErrorKind::InvalidData.into())).collect()
    }

    /// Its arguments.
    ///
    /// # Errors
    /// Fails if it has ended.
    pub fn arguments(&self) -> io::Result<Vec<String>> {
        Ok(self.text("cmdline")?.split_terminator('\0').map(str::to_owned).collect())
    }

    /// The nodes that its cpuset permits.
    ///
    /// # Errors
    /// Fails if it has ended.
    pub(crate) fn allowed_nodes(&self) -> io::Result<Vec<NodeId>> {
        let status = self.text("status")?;
        let list = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
        let list = crate::topology::list(list.unwrap_or("0")).ok_or(io::ErrorKind::InvalidData)?;
        list.into_iter().map(|node| NodeId::try_from(node).map_err(|_| io::ErrorKind::InvalidData.into())).collect()
    }

    /// Pages on each node, by the kernel's own count (/proc/PID/numa_maps), for all of its memory.
    ///
    /// # Errors
    /// Fails if it has ended, or may not be read.
    pub fn pages_by_node(&self) -> io::Result<BTreeMap<NodeId, u64>> {
        let mut pages = BTreeMap::new();
        for line in BufReader::new(self.file("numa_maps")?).lines() {
            count_line(&line?, &mut pages);
        }
        Ok(pages)
    }

    /// Resident pages of any kind.
    ///
    /// # Errors
    /// Fails if it has ended.
    pub fn resident_pages(&self) -> io::Result<u64> {
        let resident = self.text("statm")?.split_whitespace().nth(1).and_then(|word| word.parse().ok());
        resident.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Makes the next write to each page fault.
    ///
    /// # Errors
    /// Fails if it has ended, may not be changed, or the kernel does not support it
    /// (CONFIG_MEM_SOFT_DIRTY).
    pub(crate) fn protect_pages(&self) -> io::Result<()> {
        let mut file: File =
            openat(&self.folder, "clear_refs", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?.into();
        file.write_all(b"4")
    }

    /// Whether it is a virtual machine that the processor runs (KVM): its accesses fault elsewhere.
    pub(crate) fn is_kvm(&self) -> bool {
        let Ok(folder) =
            openat(&self.folder, "fd", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        else {
            return false;
        };
        let Ok(entries) = rustix::fs::Dir::read_from(&folder) else { return false };
        entries.flatten().any(|entry| {
            let to = rustix::fs::readlinkat(&folder, entry.file_name(), Vec::new());
            to.is_ok_and(|to| to.to_bytes() == b"anon_inode:kvm-vm")
        })
    }

    /// The memory that can be placed for it: anonymous and shared memory, and private writable
    /// mappings of files. The page cache is left out.
    ///
    /// # Errors
    /// Fails if it has ended, or may not be read.
    pub fn areas(&self) -> io::Result<Vec<std::ops::Range<u64>>> {
        let mut areas = Vec::new();
        for line in BufReader::new(self.file("maps")?).split(b'\n') {
            areas.extend(own_area(&String::from_utf8_lossy(&line?)));
        }
        Ok(areas)
    }

    /// Passes the present units of an area to `take`, some thousand pages at a time, in the order
    /// of addresses, until it returns false. Returns whether it never did.
    ///
    /// # Errors
    /// Fails if it has ended, may not be read, or `take` fails.
    pub fn units(
        &self,
        area: std::ops::Range<u64>,
        take: &mut dyn FnMut(&[Unit]) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let pagemap = self.file("pagemap")?;
        let mut bytes = vec![0; WINDOW_PAGES as usize * ENTRY_BYTES];
        let (mut first, mut joining) = (area.start, Joining::default());
        while first < area.end {
            let len = (area.end - first).min(WINDOW_PAGES) as usize * ENTRY_BYTES;
            let read = pagemap.read_at(&mut bytes[..len], first * ENTRY_BYTES as u64)?;
            if read < ENTRY_BYTES {
                break; // The area was unmapped meanwhile.
            }
            let (entries, _) = bytes[..read].as_chunks::<ENTRY_BYTES>();
            let present: Vec<(u64, u64)> = (first..)
                .zip(entries.iter().map(|entry| u64::from_le_bytes(*entry)))
                .filter(|(_, entry)| entry & PRESENT != 0)
                .map(|(page, entry)| (page, entry & FRAME))
                .collect();
            first += entries.len() as u64;
            let mut units = self.join(&mut joining, &present)?;
            if first >= area.end {
                units.extend(joining.last.take().map(|(unit, _)| unit));
            }
            if !take(&units)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Joins pages that are one folio. The input is the number of each page and of its frame, which
    /// is 0 without the right to see it.
    fn join(&self, joining: &mut Joining, present: &[(u64, u64)]) -> io::Result<Vec<Unit>> {
        let mut units: Vec<Unit> = Vec::new();
        let Some(flags) = &self.flags else {
            return Ok(present.iter().map(|(page, _)| Unit { page: *page, pages: 1 }).collect());
        };
        let behind = |one: &(u64, u64), next: &(u64, u64)| next.0 == one.0 + 1 && next.1 == one.1 + 1;
        for run in present.chunk_by(behind) {
            let mut bytes = vec![0; run.len() * ENTRY_BYTES];
            // Frames that are no memory have no flags.
            let read = if run[0].1 == 0 { 0 } else { flags.read_at(&mut bytes, run[0].1 * ENTRY_BYTES as u64)? };
            bytes[read..].fill(0);
            let (entries, _) = bytes.as_chunks::<ENTRY_BYTES>();
            let ended = run.iter().zip(entries).filter_map(|(at, entry)| joining.add(*at, u64::from_le_bytes(*entry)));
            units.extend(ended);
        }
        Ok(units)
    }

    /// Which pages are one folio, for many queries.
    ///
    /// # Errors
    /// Fails if it has ended, or may not be read.
    pub fn folios(&self) -> io::Result<Folios<'_>> {
        Ok(Folios { pagemap: self.file("pagemap")?, flags: self.flags.as_ref() })
    }

    /// The node of each unit. `None`: it is on none, as freed memory, or the page of zeros.
    ///
    /// # Errors
    /// Fails if the process has ended, or may not be read.
    pub(crate) fn nodes_of(&self, units: &[Unit]) -> io::Result<Vec<Option<NodeId>>> {
        let status = self.move_pages(units, None)?;
        Ok(status.into_iter().map(|status| NodeId::try_from(status).ok()).collect())
    }

    /// Moves each unit to its node. Pages that other processes share stay.
    ///
    /// # Errors
    /// Fails if the process has ended, may not be changed, or may not use a node.
    pub(crate) fn move_to(&self, moves: &[(Unit, NodeId)]) -> io::Result<Vec<Moved>> {
        let (units, nodes): (Vec<Unit>, Vec<i32>) = moves.iter().map(|(unit, node)| (*unit, i32::from(*node))).unzip();
        let status = match self.move_pages(&units, Some(&nodes)) {
            Ok(status) => status,
            // None of them exists.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(vec![Moved::Gone; moves.len()]),
            // A node is full; the kernel stops then, and does not report which node (mm/migrate.c,
            // do_pages_move).
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => return self.move_by_node(moves),
            Err(error) => return Err(error),
        };
        let became = |(status, node): (&i32, &i32)| match -status {
            _ if status == node => Moved::Yes,
            libc::ENOENT | libc::EFAULT => Moved::Gone,
            libc::EBUSY => Moved::Busy,
            libc::ENOMEM => Moved::Full,
            libc::EACCES => Moved::Shared,
            // Still on another node: it was in use.
            _ if *status >= 0 => Moved::Busy,
            errno => Moved::No(errno),
        };
        let mut became: Vec<Moved> = status.iter().zip(&nodes).map(became).collect();
        // If one of several pages in a row for one node could not be moved, the kernel reports
        // nothing, although it has moved the others (mm/migrate.c, move_pages_and_store_status).
        let unknown: Vec<usize> = (0..became.len()).filter(|at| became[*at] == Moved::Busy).collect();
        if !unknown.is_empty() {
            let asked: Vec<Unit> = unknown.iter().map(|at| units[*at]).collect();
            for (at, now) in unknown.into_iter().zip(self.nodes_of(&asked)?) {
                became[at] = became[at].seen_at(now, moves[at].1);
            }
        }
        Ok(became)
    }

    /// Moves units node after node, if one of the nodes is full.
    fn move_by_node(&self, moves: &[(Unit, NodeId)]) -> io::Result<Vec<Moved>> {
        let mut became = vec![Moved::Full; moves.len()];
        let mut nodes: Vec<NodeId> = moves.iter().map(|(_, node)| *node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        for node in nodes {
            let of_node: Vec<usize> = (0..moves.len()).filter(|at| moves[*at].1 == node).collect();
            let units: Vec<Unit> = of_node.iter().map(|at| moves[*at].0).collect();
            match self.move_pages(&units, Some(&vec![i32::from(node); units.len()])) {
                Err(error) if !matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::ENOENT)) => return Err(error),
                _ => {}
            }
            for (at, now) in of_node.into_iter().zip(self.nodes_of(&units)?) {
                became[at] = Moved::Full.seen_at(now, node);
            }
        }
        Ok(became)
    }

    fn move_pages(&self, units: &[Unit], nodes: Option<&[i32]>) -> io::Result<Vec<i32>> {
        if !self.is_alive() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        let addresses: Vec<*const libc::c_void> =
            units.iter().map(|unit| (unit.page * PAGE_BYTES) as *const _).collect();
        // Units that the kernel does not reach count as busy.
        let mut status = vec![-libc::EBUSY; units.len()];
        let nodes = nodes.map_or(std::ptr::null(), <[i32]>::as_ptr);
        // SAFETY: the arrays have as many addresses, nodes (or none) and statuses as the given
        // number; the addresses are another process's and are not dereferenced here.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                self.pid as libc::pid_t,
                units.len(),
                addresses.as_ptr(),
                nodes,
                status.as_mut_ptr(),
                MOVE_OWN,
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(status) }
    }
}

/// Joins pages in the order of addresses to folios of any size.
#[derive(Default)]
struct Joining {
    /// The last unit, and the page and the frame with which it may continue.
    last: Option<(Unit, (u64, u64))>,
}

impl Joining {
    /// Adds the next page and its frame, with the frame's flags. Returns the unit that has ended
    /// before it.
    fn add(&mut self, at: (u64, u64), flags: u64) -> Option<Unit> {
        let next = (at.0 + 1, at.1 + 1);
        match &mut self.last {
            Some((unit, expected)) if *expected == at && flags & COMPOUND_TAIL != 0 => {
                unit.pages += 1;
                *expected = next;
                None
            }
            last => last.replace((Unit { page: at.0, pages: 1 }, next)).map(|(unit, _)| unit),
        }
    }
}

/// A process's pages as the folios that they are parts of.
pub struct Folios<'a> {
    pagemap: File,
    flags: Option<&'a File>,
}

impl Folios<'_> {
    /// The first page of the folio that contains a page: for pages outside of huge pages, the page
    /// itself. `None`: the page is not present.
    ///
    /// # Errors
    /// Fails if the process has ended, or may not be read.
    pub(crate) fn first_page_of(&self, page: u64) -> io::Result<Option<u64>> {
        let entry = self.entry(page)?;
        if entry & PRESENT == 0 {
            return Ok(None);
        }
        let frame = entry & FRAME;
        if self.flags_of(frame) & COMPOUND_TAIL == 0 {
            return Ok(Some(page));
        }
        // Folios begin at multiples of their size: the first page is the nearest one before it at
        // which any folio begins.
        let begins = |order: &u32| self.flags_of(frame >> order << order) & COMPOUND_HEAD != 0;
        let first = (1..=FOLIO_ORDER_MAX).find(begins).map_or(frame, |order| frame >> order << order);
        Ok(Some(page - (frame - first).min(page)))
    }

    /// The number of pages that are moved with this one, the first of a folio.
    ///
    /// # Errors
    /// Fails if the process has ended, or may not be read.
    pub(crate) fn pages_of(&self, first: u64) -> io::Result<u64> {
        let entry = self.entry(first)?;
        let frame = entry & FRAME;
        if entry & PRESENT == 0 || self.flags_of(frame) & COMPOUND_HEAD == 0 {
            return Ok(1);
        }
        let Some(flags) = self.flags else { return Ok(1) };
        let mut bytes = vec![0; FLAGS_PAGES as usize * ENTRY_BYTES];
        let mut pages = 1;
        while pages < 1 << FOLIO_ORDER_MAX {
            let read = flags.read_at(&mut bytes, (frame + pages) * ENTRY_BYTES as u64)?;
            let (entries, _) = bytes[..read].as_chunks::<ENTRY_BYTES>();
            let tails = entries.iter().take_while(|entry| u64::from_le_bytes(**entry) & COMPOUND_TAIL != 0).count();
            pages += tails as u64;
            if (tails as u64) < FLAGS_PAGES {
                break;
            }
        }
        Ok(pages)
    }

    fn entry(&self, page: u64) -> io::Result<u64> {
        let mut bytes = [0; ENTRY_BYTES];
        self.pagemap.read_at(&mut bytes, page * ENTRY_BYTES as u64)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Flags of a frame; none without the right to see them.
    fn flags_of(&self, frame: u64) -> u64 {
        let mut bytes = [0; ENTRY_BYTES];
        let flags = self.flags.filter(|_| frame != 0);
        let read = flags.map_or(0, |flags| flags.read_at(&mut bytes, frame * ENTRY_BYTES as u64).unwrap_or(0));
        if read == ENTRY_BYTES { u64::from_le_bytes(bytes) } else { 0 }
    }
}

/// A message in one line for an error with a process.
pub fn failure_of(pid: u32, error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ESRCH | libc::ENOENT) => {
            format!("there is no process {pid}, or it has ended: `pumapool numa list` shows the processes")
        }
        Some(libc::EPERM | libc::EACCES) => {
            format!(
                "process {pid} may not be looked at or changed: {error}; run as root, and not while its cpuset changes"
            )
        }
        Some(libc::ENOSYS) => format!("this kernel moves no pages (CONFIG_MIGRATION): {error}"),
        _ => format!("process {pid}: {error}"),
    }
}

/// A line of /proc/PID/numa_maps: 7f00 default anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=4
fn count_line(line: &str, pages: &mut BTreeMap<NodeId, u64>) {
    let word = |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name)?.parse::<u64>().ok());
    let pages_each = word("kernelpagesize_kB=").map_or(1, |kib| (kib << 10) / PAGE_BYTES);
    for word in line.split_whitespace() {
        let Some((node, count)) = word.strip_prefix('N').and_then(|word| word.split_once('=')) else { continue };
        if let (Ok(node), Ok(count)) = (node.parse::<NodeId>(), count.parse::<u64>()) {
            *pages.entry(node).or_default() += count * pages_each;
        }
    }
}

/// A line of /proc/PID/maps, if it is memory of the process's own: the numbers of its pages.
fn own_area(line: &str) -> Option<std::ops::Range<u64>> {
    let mut words = line.split_whitespace();
    let (range, rights) = (words.next()?, words.next()?);
    let path = words.nth(3).unwrap_or("");
    let (first, end) = range.split_once('-')?;
    let (first, end) = (u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let memory = [
        "[heap]",
        "[stack]",
        "[anon",
        "/memfd:",
        "/dev/shm/",
        "/dev/zero",
        "/SYSV",
        "/anon_hugepage",
        "/dev/hugepages/",
    ];
    let is_memory = path.is_empty() || memory.iter().any(|kind| path.starts_with(kind));
    let can_be_used = rights.starts_with('r') || rights[1..].starts_with('w');
    let is_copied = rights[1..].starts_with('w') && rights.ends_with('p');
    (is_memory && can_be_used || is_copied).then_some(first / PAGE_BYTES..end / PAGE_BYTES)
}

/// A printable form of a name that any user may have chosen.
pub(crate) fn shown(name: &str) -> String {
    name.chars().map(|char| if char.is_control() { '?' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_come_is_not_busy() {
        let node = |text: &str| text.parse::<NodeId>().unwrap();
        assert_eq!(Moved::Busy.seen_at(Some(node("1")), node("1")), Moved::Yes);
        assert_eq!(Moved::Busy.seen_at(Some(node("0")), node("1")), Moved::Busy);
        assert_eq!(Moved::Full.seen_at(Some(node("0")), node("1")), Moved::Full);
        assert_eq!(Moved::Busy.seen_at(None, node("1")), Moved::Gone);
    }

    #[test]
    fn only_own_memory_is_placed() {
        let page = |address: u64| address / PAGE_BYTES;
        let own = [
            "7f1000000000-7f1000004000 rw-p 00000000 00:00 0 ",
            "7f1000000000-7f1000004000 r--p 00000000 00:00 0                          [anon:malloc]",
            "7f1000000000-7f1000004000 rw-s 00000000 00:01 1025                       /memfd:ram (deleted)",
            "7f1000000000-7f1000004000 rw-p 00005000 fe:00 4711                       /usr/lib/a library.so",
        ];
        for line in own {
            assert_eq!(own_area(line), Some(page(0x7f10_0000_0000)..page(0x7f10_0000_4000)), "{line}");
        }
        let others = [
            "7f1000000000-7f1000004000 ---p 00000000 00:00 0 ",
            "7f1000000000-7f1000004000 r-xp 00000000 fe:00 4711                       /usr/bin/program",
            "7f1000000000-7f1000004000 rw-s 00000000 fe:00 4711                       /var/lib/data",
            "7ffd00000000-7ffd00004000 r--p 00000000 00:00 0                          [vvar]",
            "nonsense",
            "",
        ];
        for line in others {
            assert_eq!(own_area(line), None, "{line}");
        }
    }

    #[test]
    fn the_kernels_counts_are_read() {
        let mut pages = BTreeMap::new();
        count_line("7f00 default anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=4", &mut pages);
        count_line("7f01 interleave:0-1 file=/memfd:N0=9 huge dirty=1 N1=1 kernelpagesize_kB=2048", &mut pages);
        assert_eq!(pages, BTreeMap::from([(0, 2), (1, 513)]));
    }

    /// Memory of this process, all of it touched.
    struct Mapped(*mut u8, usize);

    impl Mapped {
        fn new(pages: usize, huge: bool) -> Mapped {
            let len = pages * PAGE_BYTES as usize;
            let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a new mapping, which nobody else has, and accesses within it.
            unsafe {
                let at = libc::mmap(std::ptr::null_mut(), len, rights, flags, -1, 0);
                assert_ne!(at, libc::MAP_FAILED);
                libc::madvise(at, len, if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE });
                std::ptr::write_bytes(at.cast::<u8>(), 1, len);
                Mapped(at.cast(), len)
            }
        }

        fn area(&self) -> std::ops::Range<u64> {
            let first = self.0 as u64 / PAGE_BYTES;
            first..first + self.1 as u64 / PAGE_BYTES
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: what `new` mapped, once.
            unsafe { libc::munmap(self.0.cast(), self.1) };
        }
    }

    fn units(process: &Process, area: std::ops::Range<u64>) -> Vec<Unit> {
        let mut all = Vec::new();
        process
            .units(area, &mut |units| {
                all.extend_from_slice(units);
                Ok(true)
            })
            .unwrap();
        all
    }

    #[test]
    fn what_is_there_is_found() {
        let process = Process::open(std::process::id()).unwrap();
        assert!(process.is_alive() && !process.allowed_nodes().unwrap().is_empty());
        let mapped = Mapped::new(3 * WINDOW_PAGES as usize / 2, false);
        let all = units(&process, mapped.area());
        assert_eq!(all.iter().map(|unit| unit.pages).sum::<u64>(), 3 * WINDOW_PAGES / 2);
        assert!(process.areas().unwrap().iter().any(|area| area.contains(&mapped.area().start)));
        let nodes = process.nodes_of(&all).unwrap();
        assert!(nodes.iter().all(|node| node.is_some_and(|node| process.allowed_nodes().unwrap().contains(&node))));
        // Moves to their present nodes.
        let moves: Vec<(Unit, NodeId)> =
            all.iter().zip(nodes).take(100).map(|(unit, node)| (*unit, node.unwrap())).collect();
        assert_eq!(process.move_to(&moves).unwrap(), vec![Moved::Yes; 100]);
        drop(mapped);
        assert!(process.move_to(&moves).unwrap().iter().all(|moved| *moved == Moved::Gone));
    }

    #[test]
    fn folios_are_joined_and_others_are_not() {
        let unit = |page, pages| Unit { page, pages };
        let mut joining = Joining::default();
        let mut ended = Vec::new();
        let mut add = |page, frame, flags| ended.extend(joining.add((page, frame), flags));
        add(7, 70, 0);
        add(8, 71, 0);
        // 1 GiB.
        let pages = 1 << FOLIO_ORDER_MAX;
        add(pages, pages, COMPOUND_HEAD);
        (1..pages).for_each(|nth| add(pages + nth, pages + nth, COMPOUND_TAIL));
        // Another one after it; the end of a third, mapped without its beginning; and one with a
        // missing page.
        add(2 * pages, 2 * pages, COMPOUND_HEAD);
        add(2 * pages + 1, 5 * pages + 1, COMPOUND_TAIL);
        add(2 * pages + 2, 5 * pages + 2, COMPOUND_TAIL);
        add(2 * pages + 4, 5 * pages + 4, COMPOUND_TAIL);
        let rest = joining.last.take().map(|(unit, _)| unit);
        let expected = [unit(7, 1), unit(8, 1), unit(pages, pages), unit(2 * pages, 1), unit(2 * pages + 1, 2)];
        assert_eq!((ended, rest), (expected.to_vec(), Some(unit(2 * pages + 4, 1))));
    }

    #[test]
    fn who_has_seen_enough_is_shown_no_more() {
        let process = Process::open(std::process::id()).unwrap();
        let mapped = Mapped::new(2 * WINDOW_PAGES as usize, false);
        let mut looks = 0;
        let mut once = |_: &[Unit]| {
            looks += 1;
            Ok(false)
        };
        assert!(!process.units(mapped.area(), &mut once).unwrap());
        assert_eq!(looks, 1);
    }

    #[test]
    fn a_huge_page_is_one() {
        if !rustix::process::geteuid().is_root() {
            testbed::skip("a_huge_page_is_one", "frames are for root to see");
            return;
        }
        let process = Process::open(std::process::id()).unwrap();
        let mapped = Mapped::new(4096, true);
        let all = units(&process, mapped.area());
        assert_eq!(all.iter().map(|unit| unit.pages).sum::<u64>(), 4096);
        // If memory is fragmented the kernel may give fewer huge pages, or none.
        assert!(all.iter().filter(|unit| unit.pages == 512).all(|unit| unit.page % 512 == 0), "{all:?}");
    }

    #[test]
    fn a_process_that_has_ended_is_reported() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        let some = [Unit { page: 1, pages: 1 }];
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!process.is_alive());
        for result in
            [process.nodes_of(&some).map(drop), process.move_to(&[(some[0], 0)]).map(drop), process.areas().map(drop)]
        {
            assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ESRCH));
        }
        assert!(Process::open(u32::MAX).is_err());
    }
}
