//! What an open shows of changes beside the mount: all of them, however slow they are, and to whatever end the file has.

mod support;

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap_anonymous, munmap, userfaultfd};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use support::*;

const PAGE: usize = 4096;

/// Two pages of memory, the second of which comes when it is told to: what reads it waits (userfaultfd(2)).
struct LateMemory {
    start: *mut u8,
    fd: OwnedFd,
}

// SAFETY: the pages are written to by the kernel alone, before they are read.
unsafe impl Send for LateMemory {}
// SAFETY: as above.
unsafe impl Sync for LateMemory {}

impl LateMemory {
    /// Both pages are to hold this byte. None: this kernel does not let us.
    fn new(byte: u8) -> Option<LateMemory> {
        const API: u64 = 0xc018_aa3f;
        const REGISTER: u64 = 0xc020_aa00;
        const MISSING: u64 = 1;
        let ioctl = |fd: &OwnedFd, request: u64, words: &mut [u64; 4]| {
            // SAFETY: both requests read and write at most four words (linux/userfaultfd.h).
            let done = unsafe { libc::ioctl(fd.as_raw_fd(), request, words.as_mut_ptr()) };
            (done == 0).then_some(())
        };
        // SAFETY: it is used for the mapping below only.
        let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC) }.ok()?;
        ioctl(&fd, API, &mut [0xaa, 0, 0, 0])?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), 2 * PAGE, access, MapFlags::PRIVATE) }.ok()?;
        let memory = LateMemory { start: start.cast(), fd };
        // SAFETY: the first page is ours, and mapped.
        unsafe { memory.start.write_bytes(byte, PAGE) };
        ioctl(&memory.fd, REGISTER, &mut [start as u64, 2 * PAGE as u64, MISSING, 0])?;
        Some(memory)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: two pages that live as long as this.
        unsafe { std::slice::from_raw_parts(self.start, 2 * PAGE) }
    }

    /// Waits until somebody waits for the second page.
    fn wait(&self) {
        let mut event = [0; 32];
        assert_eq!(rustix::io::read(&self.fd, &mut event).unwrap(), 32);
    }

    /// Lets the second page come, with that byte.
    fn come(&self, byte: u8) {
        const COPY: u64 = 0xc028_aa03;
        let page = [byte; PAGE];
        let mut words = [self.start as u64 + PAGE as u64, page.as_ptr() as u64, PAGE as u64, 0, 0];
        // SAFETY: the request reads a page, and writes the one that is missing.
        assert_eq!(unsafe { libc::ioctl(self.fd.as_raw_fd(), COPY, words.as_mut_ptr()) }, 0);
    }
}

impl Drop for LateMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody reads it any more.
        let _ = unsafe { munmap(self.start.cast(), 2 * PAGE) };
    }
}

/// The kernel moves the times of a file before its bytes: who opens the file in between sees the times that it has afterwards, too.
#[test]
fn a_change_beside_that_was_under_way_is_seen_by_whoever_opens_the_file_after_it() {
    let test = "a_change_beside_that_was_under_way_is_seen_by_whoever_opens_the_file_after_it";
    if !can_mount(test) {
        return;
    }
    let m = Mounted::through();
    for is_open_before in [true, false] {
        let Some(memory) = LateMemory::new(b'n') else { return skip(test, "no userfaultfd") };
        let name = format!("a{is_open_before}");
        fs::write(m.below(&name), [b'o'; 2 * PAGE]).unwrap();
        if is_open_before {
            assert_eq!(fs::read(m.path(&name)).unwrap(), [b'o'; 2 * PAGE]);
        }
        std::thread::scope(|scope| {
            let writer = File::options().write(true).open(m.below(&name)).unwrap();
            let memory = &memory;
            let write = scope.spawn(move || writer.write_all_at(memory.bytes(), 0).unwrap());
            memory.wait();
            // Twice, as there may be something to be dropped of what the first one has read.
            for _ in 0..2 {
                assert_eq!(fs::read(m.path(&name)).unwrap().len(), 2 * PAGE);
            }
            memory.come(b'n');
            write.join().unwrap();
        });
        for nth in 0..5 {
            let read = fs::read(m.path(&name)).unwrap();
            assert_eq!((read[0], read[PAGE]), (b'n', b'n'), "{name}, open {nth}");
        }
    }
}

/// What an open is followed by.
#[derive(Clone, Copy, Debug)]
enum Look {
    /// A load of the last byte, through a mapping that was made without a look at the size.
    Load,
    /// The same after a look at the size.
    StatAndLoad,
    /// A read of the last bytes.
    Read,
}

/// Opens a file in a process of its own, and returns whether it ends at `end`, with a `p`. (A load
/// that fails ends the process by SIGBUS. And a fault holds locks of its process, which the daemon,
/// a part of this one, may need to answer it.)
fn ends_at(path: &Path, end: usize, look: Look) -> bool {
    outcome(path, end, look) == 0
}

/// The same; how that process has ended, as waitpid(2) tells it.
fn outcome(path: &Path, end: usize, look: Look) -> i32 {
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the child makes system calls only, and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0); // No core of it.
            let fd = libc::open(path.as_ptr(), libc::O_RDONLY);
            let mut found = std::mem::zeroed();
            if fd < 0
                || matches!(look, Look::StatAndLoad)
                    && (libc::fstat(fd, &mut found) != 0 || found.st_size != end as i64)
            {
                libc::_exit(2);
            }
            let mut last = [0u8; 10];
            if matches!(look, Look::Read) {
                let read = libc::pread(fd, last.as_mut_ptr().cast(), last.len(), (end - 1) as i64);
                libc::_exit(i32::from(read != 1 || last[0] != b'p'));
            }
            let len = end.next_multiple_of(PAGE);
            let start = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
            let is_there = start != libc::MAP_FAILED && start.cast::<u8>().add(end - 1).read_volatile() == b'p';
            libc::_exit(i32::from(!is_there));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        status
    }
}

/// A file with a page more, each time that it is opened.
fn grow(file: &File, pages: &mut usize) {
    file.write_all_at(&[b'p'; PAGE], (*pages * PAGE) as u64).unwrap();
    *pages += 1;
}

/// Rounds of a race: some, or as many as the environment says.
fn rounds() -> usize {
    std::env::var("ROUNDS").map_or(100, |rounds| rounds.parse().unwrap())
}

/// Tells threads that it is over, also when a test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A mount whose attributes the kernel believes until it is told otherwise, with a file of a page
/// in it.
fn with_a_file() -> (Mounted, File) {
    let m = Mounted::with(|config| config.attr_timeout = std::time::Duration::from_secs(3600));
    let below = File::create(m.below("a")).unwrap();
    grow(&below, &mut 0);
    assert!(ends_at(&m.path("a"), PAGE, Look::Load));
    (m, below)
}

/// The kernel has the name, and with it the size that the file had before: an open alone must do.
#[test]
fn a_file_that_grew_beside_is_mapped_to_its_new_end() {
    if !can_mount("a_file_that_grew_beside_is_mapped_to_its_new_end") {
        return;
    }
    let (m, below) = with_a_file();
    let mut pages = 1;
    let mut none = 0;
    for _ in 0..rounds() {
        grow(&below, &mut pages);
        none += usize::from(!ends_at(&m.path("a"), pages * PAGE, Look::Load));
    }
    assert_eq!(none, 0, "of {}", rounds());
}

/// A size of the mount's own making is known: no task is sent back for it.
#[test]
fn what_is_written_through_the_mount_sends_nobody_back() {
    if !can_mount("what_is_written_through_the_mount_sends_nobody_back") {
        return;
    }
    let (m, below) = with_a_file();
    drop(below);
    let mut pages = 1;
    let lookups = || m.mount().status().requests.get("lookup").copied().unwrap_or(0);
    wait_until("nobody is sent back any more", || {
        let before = lookups();
        drop(File::open(m.path("a")).unwrap());
        lookups() == before
    });
    let before = lookups();
    for _ in 0..20 {
        let here = File::options().append(true).open(m.path("a")).unwrap();
        std::io::Write::write_all(&mut &here, &[b'p'; PAGE]).unwrap();
        drop(here);
        pages += 1;
        assert!(ends_at(&m.path("a"), pages * PAGE, Look::Load));
        let here = File::options().write(true).open(m.path("a")).unwrap();
        here.set_len((pages * PAGE) as u64 - 1).unwrap();
        assert!(ends_at(&m.path("a"), pages * PAGE - 1, Look::Read));
        here.set_len((pages * PAGE) as u64).unwrap();
        here.write_all_at(b"p", (pages * PAGE) as u64 - 1).unwrap();
    }
    assert_eq!(lookups(), before);
}

/// What others are told of the file at the same time may arrive later, and be of before.
#[test]
fn a_file_that_grew_beside_is_mapped_and_read_to_its_new_end_while_others_use_it() {
    if !can_mount("a_file_that_grew_beside_is_mapped_and_read_to_its_new_end_while_others_use_it") {
        return;
    }
    let (m, below) = with_a_file();
    let mut pages = 1;
    let over = AtomicBool::new(false);
    let is_over = || over.load(Ordering::Relaxed);
    let mut failed = vec![];
    std::thread::scope(|scope| {
        let readers = || {
            while !is_over() {
                let file = File::open(m.path("a")).unwrap();
                let len = file.metadata().unwrap().len();
                let _ = file.read_at(&mut [0; 10], len - 10).unwrap();
            }
        };
        let linker = || {
            while !is_over() {
                fs::hard_link(m.path("a"), m.path("b")).unwrap();
                fs::remove_file(m.path("b")).unwrap();
            }
        };
        let _over = Over(&over);
        scope.spawn(readers);
        scope.spawn(linker);
        let looks = [Look::Load, Look::StatAndLoad, Look::Read];
        for (round, look) in (0..2 * rounds()).zip(looks.into_iter().cycle()) {
            grow(&below, &mut pages);
            if !ends_at(&m.path("a"), pages * PAGE, look) {
                failed.push((round, look));
            }
        }
    });
    assert!(failed.is_empty(), "{} of {}: {failed:?}", failed.len(), 2 * rounds());
}

/// However a file is opened that has another size by now: no program sees that the daemon sends it
/// back.
#[test]
fn every_way_to_open_a_file_that_grew_beside_succeeds() {
    if !can_mount("every_way_to_open_a_file_that_grew_beside_succeeds") {
        return;
    }
    let (m, below) = with_a_file();
    let mut pages = 1;
    let flags = [0, libc::O_CREAT, libc::O_APPEND, libc::O_NOFOLLOW, libc::O_CREAT | libc::O_TRUNC];
    for flags in flags {
        grow(&below, &mut pages);
        let here = File::options().read(true).write(true).custom_flags(flags).open(m.path("a")).unwrap();
        grow(&below, &mut pages);
        drop(File::open(format!("/proc/self/fd/{}", here.as_raw_fd())).unwrap());
        grow(&below, &mut pages);
        File::create(m.path("a")).unwrap().write_all_at(b"p", 0).unwrap();
        pages = 1;
        grow(&below, &mut pages);
        assert!(ends_at(&m.path("a"), 2 * PAGE, Look::Load), "{flags:x}");
    }
    fs::copy("/bin/true", m.below("true")).unwrap();
    for _ in 0..3 {
        let status = std::process::Command::new(m.path("true")).status().unwrap();
        assert!(status.success());
        std::io::Write::write_all(&mut File::options().append(true).open(m.below("true")).unwrap(), b"more").unwrap();
    }
}

/// A file that is open was cut in the backing directory: from the next open on every descriptor
/// ends there.
#[test]
fn a_file_that_was_cut_beside_ends_there_for_all_who_have_it_open() {
    if !can_mount("a_file_that_was_cut_beside_ends_there_for_all_who_have_it_open") {
        return;
    }
    let (m, below) = with_a_file();
    let path = m.path("a");
    let over = AtomicBool::new(false);
    let before = File::open(&path).unwrap();
    let mut wrong = vec![];
    std::thread::scope(|scope| {
        let _over = Over(&over);
        // What it reads meanwhile is not promised.
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for page in (0..10).rev() {
                    before.read_at(&mut [0; PAGE], page * PAGE as u64).unwrap();
                }
            }
        });
        for round in 0..rounds() / 5 {
            below.write_all_at(&[b'p'; 10 * PAGE], 0).unwrap();
            assert!(ends_at(&path, 10 * PAGE, Look::Read));
            let end = PAGE + 1 + round % PAGE;
            below.set_len(end as u64).unwrap();
            // No zeros behind the end.
            let status = outcome(&path, 10 * PAGE, Look::Load);
            assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "{status:x}");
            assert!(ends_at(&path, end, Look::Read), "{end}");
            for at in (0..10).rev().map(|page| page * PAGE) {
                let mut buffer = [0; PAGE];
                let read = before.read_at(&mut buffer, at as u64).unwrap();
                let expected = end.saturating_sub(at).min(PAGE);
                if read != expected || buffer[..read].iter().any(|byte| *byte != b'p') {
                    wrong.push((end, at, read));
                }
            }
        }
    });
    assert!(wrong.is_empty(), "{wrong:?}");
}
