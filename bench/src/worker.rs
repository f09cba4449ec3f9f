//! The measured process: this program once more ([`testbed::WorkerProcess`]).
//!
//! Every page of the files begins with its own number, also after it is written. Each page that is
//! read is checked, and a wrong one ends the bench.

use crate::dialects::{self, PageLoad};
use crate::figures::p99;
use crate::reading::{self, Method};
use crate::tree;
use crate::world::{self, STAMP_BYTES};
use crate::writing::{self, Pattern};
use page::PAGE_SIZE;
use rustix::fs::Advice;
use rustix::mm::{MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

/// The subcommand.
pub const NAME: &str = "worker";
/// Bytes of a read in a sequential stream, as in `cp`.
const BLOCK_BYTES: usize = 128 << 10;
/// Stack of a reading thread: there are many, and their memory is charged to the measured group.
const STACK_BYTES: usize = 128 << 10;
/// Threads of one order at the most.
const THREADS_MAX: usize = 64;
/// Pause between two reads of the hot file.
const HOT_EVERY: Duration = Duration::from_millis(20);
/// Reads of it before: a page that was read twice counts as in use.
const HOT_READS: u32 = 3;
/// The step of an allocation that is timed.
pub const ALLOCATION_STEP_BYTES: usize = 1 << 20;

/// A use of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Workload {
    /// From end to end, again and again.
    Sequential,
    /// Pages at random, by that many threads.
    Random {
        /// The number.
        threads: usize,
    },
    /// A page at random, then the next block of a stream, and so on.
    Mixed,
    /// A page at random is written and synced.
    Writes,
    /// That many threads write and sync pages at random, each in a file of its own: the path with
    /// the thread's number as the extension.
    Syncs {
        /// The number.
        threads: usize,
    },
    /// stat and open of the file, and a read of its first page.
    Look,
}

/// An order to the worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Read the beginning of a file once, from end to end.
    Pass {
        /// The file.
        path: PathBuf,
        /// Bytes of it.
        len_bytes: u64,
    },
    /// Use the beginning of a file for some time.
    Use {
        /// The file.
        path: PathBuf,
        /// Bytes of it.
        len_bytes: u64,
        /// The use.
        workload: Workload,
        /// The duration.
        ms: u64,
        /// The seed of the chosen pages.
        seed: u64,
    },
    /// Read each block of the beginning of a file once, at random ([`reading::once`]).
    Once {
        /// The file.
        path: PathBuf,
        /// Bytes of it.
        len_bytes: u64,
        /// Bytes of a block.
        block_bytes: usize,
        /// Threads that share the blocks.
        threads: usize,
        /// The seed of the order.
        seed: u64,
    },
    /// Read each block of all files under a directory once, at random ([`reading::files`]).
    Files {
        /// The directory of the files.
        directory: PathBuf,
        /// Bytes of all of them.
        len_bytes: u64,
        /// Bytes of a block.
        block_bytes: usize,
        /// The seed of the order.
        seed: u64,
    },
    /// Read fragments of the beginning of a file at random ([`reading::fragments`]).
    Fragments {
        /// The file.
        path: PathBuf,
        /// Bytes of it.
        len_bytes: u64,
        /// Bytes of a fragment.
        fragment_bytes: usize,
        /// Bytes of all of them.
        total_bytes: u64,
        /// 0: all places are equally likely. Otherwise the probability falls exponentially towards
        /// the end, with this mean.
        #[serde(default)]
        mean_bytes: u64,
        /// The seed of the chosen places.
        seed: u64,
    },
    /// Read a file that is cached ([`reading::cached`]).
    Cached {
        /// The file.
        path: PathBuf,
        /// Bytes of it.
        len_bytes: u64,
        /// Bytes of a block.
        block_bytes: usize,
        /// The way.
        method: Method,
        /// The duration.
        ms: u64,
        /// The seed of the chosen blocks.
        seed: u64,
    },
    /// Make the kernel evict a file's pages ([`reading::evict`]).
    Evict {
        /// The file.
        path: PathBuf,
        /// Bytes of it.
        len_bytes: u64,
        /// The number of times.
        times: usize,
    },
    /// Send requests to a TCP peer again and again ([`reading::ping_pong`]), or, without a request
    /// length, receive its stream ([`reading::stream`]).
    Talk {
        /// The address of the peer.
        address: String,
        /// Bytes that are sent at once.
        request_bytes: usize,
        /// Bytes of a response.
        answer_bytes: usize,
        /// Whether both sides poll, instead of sleeping.
        polls: bool,
        /// The duration.
        ms: u64,
    },
    /// Make, use and remove a tree of small files ([`tree::run`]).
    Tree {
        /// The directory.
        directory: PathBuf,
        /// The number of files.
        files: usize,
    },
    /// Overwrite blocks of a file ([`writing::write`]).
    Write {
        /// The file.
        path: PathBuf,
        /// Bytes of it.
        len_bytes: u64,
        /// The pattern.
        pattern: Pattern,
        /// The number of blocks.
        count: u64,
        /// The seed of the chosen blocks.
        seed: u64,
    },
    /// Stay on that processor from now on.
    Stay {
        /// Its number.
        processor: usize,
    },
    /// Be the client of a page server ([`dialects::ask`]).
    Ask(PageLoad),
    /// Allocate memory at full speed, while a file is read again and again, and give it back.
    Allocate {
        /// The number of bytes.
        bytes: u64,
        /// The file.
        hot: PathBuf,
    },
    /// Allocate memory bit by bit, hold it, and give it back.
    Grow {
        /// The number of bytes.
        bytes: u64,
        /// The duration of the growth.
        over_ms: u64,
        /// The duration for which it is held then.
        hold_ms: u64,
    },
}

/// An answer of the worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// It is ready for orders.
    Ready,
    /// The order was executed.
    Done(Report),
    /// The order failed.
    Failed(String),
}

/// The result of an order.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Reads, or writes.
    pub operations: u64,
    /// Bytes that were read or written.
    pub bytes: u64,
    /// Time it took.
    pub seconds: f64,
    /// Time of the median operation, if each was timed.
    pub p50_ns: u64,
    /// Time that one operation in a hundred exceeds.
    pub p99_ns: u64,
    /// Times of the order's parts.
    pub phase_seconds: Vec<f64>,
    /// Time of each MiB that was allocated.
    pub allocation_ns: Vec<u64>,
    /// Pages of the hot file.
    pub hot_pages: u64,
    /// The number of those that were cached after the allocation.
    pub hot_cached_pages: u64,
}

impl Report {
    /// Sets the figures from the time of each operation.
    pub fn set_times(&mut self, mut times_ns: Vec<u64>) {
        times_ns.sort_unstable();
        self.operations = times_ns.len() as u64;
        self.p50_ns = times_ns.get(times_ns.len() / 2).copied().unwrap_or(0);
        self.p99_ns = p99(&times_ns);
    }
}

/// The whole life of the worker.
pub fn run() -> Result<(), String> {
    testbed::hold_program();
    testbed::answer(&Answer::Ready)?;
    while let Some(order) = testbed::next_order()? {
        testbed::answer(&carry_out(&order).map_or_else(Answer::Failed, Answer::Done))?;
    }
    Ok(())
}

fn carry_out(order: &Order) -> Result<Report, String> {
    match order {
        Order::Pass { path, len_bytes } => {
            let begin = Instant::now();
            let mut stream = Stream::open(path, *len_bytes)?;
            let mut report = Report::default();
            while report.bytes < *len_bytes {
                report.bytes += stream.next()?;
                report.operations += 1;
            }
            report.seconds = begin.elapsed().as_secs_f64();
            Ok(report)
        }
        Order::Use { path, len_bytes, workload, ms, seed } => {
            let threads = match workload {
                Workload::Random { threads } | Workload::Syncs { threads } => (*threads).clamp(1, THREADS_MAX),
                _ => 1,
            };
            let begin = Instant::now();
            let end = begin + Duration::from_millis(*ms);
            let work = |number: usize| {
                let seed = seed.wrapping_add(number as u64);
                let own = match workload {
                    Workload::Syncs { .. } => path.with_extension(number.to_string()),
                    _ => path.clone(),
                };
                move || work(&own, *len_bytes, *workload, end, seed)
            };
            let results = join((0..threads).map(work));
            let mut report = Report { seconds: begin.elapsed().as_secs_f64(), ..Report::default() };
            for result in results {
                let (operations, bytes) = result?;
                report.operations += operations;
                report.bytes += bytes;
            }
            Ok(report)
        }
        Order::Once { path, len_bytes, block_bytes, threads, seed } => {
            reading::once(path, *len_bytes, *block_bytes, (*threads).clamp(1, THREADS_MAX), *seed)
        }
        Order::Files { directory, block_bytes, seed, .. } => reading::files(directory, *block_bytes, *seed),
        Order::Fragments { path, len_bytes, fragment_bytes, total_bytes, mean_bytes, seed } => {
            reading::fragments(path, *len_bytes, *fragment_bytes, *total_bytes, *mean_bytes, *seed)
        }
        Order::Cached { path, len_bytes, block_bytes, method, ms, seed } => {
            reading::cached(path, *len_bytes, *block_bytes, *method, *ms, *seed)
        }
        Order::Evict { path, len_bytes, times } => reading::evict(path, *len_bytes, *times),
        Order::Talk { address, request_bytes: 0, answer_bytes, ms, .. } => reading::stream(address, *answer_bytes, *ms),
        Order::Talk { address, request_bytes, answer_bytes, polls, ms } => {
            reading::ping_pong(address, *request_bytes, *answer_bytes, *polls, *ms)
        }
        Order::Tree { directory, files } => tree::run(directory, *files),
        Order::Write { path, len_bytes, pattern, count, seed } => {
            writing::write(path, *len_bytes, *pattern, *count, *seed)
        }
        Order::Stay { processor } => {
            world::pin(None, *processor).map_err(|error| format!("staying on a processor: {error}"))?;
            Ok(Report::default())
        }
        Order::Ask(load) => dialects::ask(load),
        Order::Allocate { bytes, hot } => allocate(*bytes, hot),
        Order::Grow { bytes, over_ms, hold_ms } => {
            grow(*bytes, Duration::from_millis(*over_ms), Duration::from_millis(*hold_ms))
                .map_err(|error| format!("allocating memory: {error}"))
        }
    }
}

/// Runs each on a thread of its own, and waits for all.
pub fn join<T: Send>(works: impl Iterator<Item = impl FnOnce() -> Result<T, String> + Send>) -> Vec<Result<T, String>> {
    std::thread::scope(|scope| {
        let start = |work| Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, work);
        let started: Vec<_> = works.map(start).collect();
        let result = |thread: io::Result<std::thread::ScopedJoinHandle<'_, _>>| {
            let thread = thread.map_err(|error| format!("starting a thread: {error}"))?;
            thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned()))
        };
        started.into_iter().map(result).collect()
    })
}

/// Returns the number of operations until `end`, and their bytes. At least one: starting threads
/// may have taken all the time.
fn work(path: &Path, len_bytes: u64, workload: Workload, end: Instant, seed: u64) -> Result<(u64, u64), String> {
    let mut pages = Pages::open(path, len_bytes, seed, matches!(workload, Workload::Writes | Workload::Syncs { .. }))?;
    let mut stream = Stream::open(path, len_bytes)?;
    let (mut operations, mut bytes) = (0, 0);
    loop {
        bytes += match workload {
            Workload::Sequential => stream.next()?,
            Workload::Random { .. } => pages.read()?,
            Workload::Mixed if operations % 2 == 1 => stream.next()?,
            Workload::Mixed => pages.read()?,
            Workload::Writes | Workload::Syncs { .. } => pages.write()?,
            Workload::Look => look(path)?,
        };
        operations += 1;
        if Instant::now() >= end {
            return Ok((operations, bytes));
        }
    }
}

/// Does stat and open of a file, and reads its first page.
fn look(path: &Path) -> Result<u64, String> {
    let mut page = [0; PAGE_SIZE];
    let looked = std::fs::metadata(path).and_then(|_| File::open(path)?.read_exact_at(&mut page, 0));
    looked.map_err(|error| format!("looking at {}: {error}", path.display()))?;
    check(0, &page)?;
    Ok(PAGE_SIZE as u64)
}

/// A file that is read from end to end, and then again from its beginning.
struct Stream {
    file: File,
    len_bytes: u64,
    at: u64,
    buffer: Vec<u8>,
}

impl Stream {
    fn open(path: &Path, len_bytes: u64) -> Result<Stream, String> {
        let file = File::open(path).map_err(|error| format!("opening {}: {error}", path.display()))?;
        Ok(Stream { file, len_bytes, at: 0, buffer: Vec::new() })
    }

    fn next(&mut self) -> Result<u64, String> {
        let len = (self.len_bytes - self.at).min(BLOCK_BYTES as u64) as usize;
        // Allocated at the first use: the memory is charged to the measured group.
        self.buffer.resize(BLOCK_BYTES, 0);
        let buffer = &mut self.buffer[..len];
        self.file.read_exact_at(buffer, self.at).map_err(|error| format!("reading at {}: {error}", self.at))?;
        for (page, content) in (self.at / PAGE_SIZE as u64..).zip(buffer.chunks_exact(PAGE_SIZE)) {
            check(page, content)?;
        }
        self.at = if self.at + len as u64 >= self.len_bytes { 0 } else { self.at + len as u64 };
        Ok(len as u64)
    }
}

/// A file whose pages are used at random.
struct Pages {
    file: File,
    count: u64,
    random: fastrand::Rng,
    buffer: [u8; PAGE_SIZE],
}

impl Pages {
    fn open(path: &Path, len_bytes: u64, seed: u64, write: bool) -> Result<Pages, String> {
        let open = File::options().read(true).write(write).open(path).and_then(|file| {
            // As a database does that knows its reads are random: one page is one read, on the disk
            // as through the mount.
            rustix::fs::fadvise(&file, 0, None, Advice::Random)?;
            Ok(file)
        });
        let file = open.map_err(|error| format!("opening {}: {error}", path.display()))?;
        let random = fastrand::Rng::with_seed(seed);
        Ok(Pages { file, count: (len_bytes / PAGE_SIZE as u64).max(1), random, buffer: [0; PAGE_SIZE] })
    }

    fn read(&mut self) -> Result<u64, String> {
        let page = self.random.u64(..self.count);
        let read = self.file.read_exact_at(&mut self.buffer, page * PAGE_SIZE as u64);
        read.map_err(|error| format!("reading page {page}: {error}"))?;
        check(page, &self.buffer)?;
        Ok(PAGE_SIZE as u64)
    }

    fn write(&mut self) -> Result<u64, String> {
        let page = self.random.u64(..self.count);
        self.random.fill(&mut self.buffer[STAMP_BYTES..]);
        self.buffer[..STAMP_BYTES].copy_from_slice(&page.to_le_bytes());
        let written = self.file.write_all_at(&self.buffer, page * PAGE_SIZE as u64);
        written.and_then(|()| self.file.sync_data()).map_err(|error| format!("writing page {page}: {error}"))?;
        Ok(PAGE_SIZE as u64)
    }
}

/// Whether a page begins with its number.
pub fn check(page: u64, content: &[u8]) -> Result<(), String> {
    if content.starts_with(&page.to_le_bytes()) {
        return Ok(());
    }
    Err(format!("WRONG BYTES: page {page} begins with {:?}", &content[..STAMP_BYTES]))
}

/// Allocates, and times each MiB. In pages of the usual size: occasional huge pages would make
/// steps of two MiB.
fn allocate(bytes: u64, hot: &Path) -> Result<Report, String> {
    let problem = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let len = usize::try_from(bytes).map_err(|error| error.to_string())?;
    let hot_bytes = std::fs::metadata(hot).map_err(problem("looking at the hot file"))?.len();
    for _ in 0..HOT_READS {
        carry_out(&Order::Pass { path: hot.to_owned(), len_bytes: hot_bytes })?;
    }
    let mut report = Report { hot_pages: hot_bytes.div_ceil(PAGE_SIZE as u64), ..Report::default() };
    // Touched before the measurement.
    let mut times = vec![1u64; len / ALLOCATION_STEP_BYTES];
    let stop = AtomicBool::new(false);
    let (kept_hot, allocated) = std::thread::scope(|scope| {
        let keeping = scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                carry_out(&Order::Pass { path: hot.to_owned(), len_bytes: hot_bytes })?;
                sleep(HOT_EVERY);
            }
            Ok::<(), String>(())
        });
        let allocated = touch(len, &mut times, &mut report, hot, hot_bytes);
        stop.store(true, Ordering::Release);
        (keeping.join().unwrap_or_else(|_| Err("a thread panicked".to_owned())), allocated)
    });
    kept_hot?;
    allocated.map_err(problem("allocating memory"))?;
    report.operations = times.len() as u64;
    report.bytes = bytes;
    report.allocation_ns = times;
    Ok(report)
}

fn touch(len: usize, times: &mut [u64], report: &mut Report, hot: &Path, hot_bytes: u64) -> io::Result<()> {
    let begin = Instant::now();
    let mut memory = Memory::reserve(len)?;
    for (step, time) in times.iter_mut().enumerate() {
        *time = memory.touch(step);
    }
    report.seconds = begin.elapsed().as_secs_f64();
    report.hot_cached_pages = testbed::cached_pages(hot, hot_bytes)?;
    Ok(())
}

/// Allocates a MiB after the other, evenly over that time, and times each.
fn grow(bytes: u64, over: Duration, hold: Duration) -> io::Result<Report> {
    let len = usize::try_from(bytes).map_err(io::Error::other)?;
    // Touched before the measurement.
    let mut times = vec![1u64; len / ALLOCATION_STEP_BYTES];
    let mut memory = Memory::reserve(len)?;
    let steps = times.len().max(1) as u32;
    let begin = Instant::now();
    for (step, time) in times.iter_mut().enumerate() {
        sleep((over / steps * step as u32).saturating_sub(begin.elapsed()));
        *time = memory.touch(step);
    }
    let seconds = begin.elapsed().as_secs_f64();
    sleep(hold);
    Ok(Report { operations: times.len() as u64, bytes, seconds, allocation_ns: times, ..Report::default() })
}

/// Address space, which becomes memory when it is touched. Dropping it frees the memory.
struct Memory {
    start: *mut std::ffi::c_void,
    len: usize,
}

impl Memory {
    fn reserve(len: usize) -> io::Result<Memory> {
        // SAFETY: a new mapping at an address that the kernel chooses, which is unmapped once, when
        // this is dropped.
        unsafe {
            let flags = ProtFlags::READ | ProtFlags::WRITE;
            let start = rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, flags, MapFlags::PRIVATE)?;
            // A kernel without huge pages refuses.
            let _none_anyway = rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxNoHugepage);
            Ok(Memory { start, len })
        }
    }

    /// Touches every page of a step. Returns the nanoseconds that it took.
    fn touch(&mut self, step: usize) -> u64 {
        let begin = Instant::now();
        let first = step * ALLOCATION_STEP_BYTES;
        assert!(first + ALLOCATION_STEP_BYTES <= self.len, "step {step} of {} bytes", self.len);
        for at in (0..ALLOCATION_STEP_BYTES).step_by(PAGE_SIZE) {
            // SAFETY: inside the mapping, as checked above. Volatile, so that the touch really
            // happens.
            unsafe { self.start.cast::<u8>().add(first + at).write_volatile(1) };
        }
        u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made above, of that length, and nothing refers to it any more. It
        // fails only with wrong arguments.
        let _unmapped = unsafe { rustix::mm::munmap(self.start, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testbed::Scratch;

    #[test]
    fn every_way_reads_what_is_there_and_notices_what_is_not() {
        let scratch = Scratch::new("bench-worker").unwrap();
        let path = scratch.path().join("data");
        let len_bytes = 40 * PAGE_SIZE as u64;
        crate::world::write_stamped(&path, len_bytes, 1).unwrap();
        let every = [Workload::Sequential, Workload::Random { threads: 3 }, Workload::Mixed, Workload::Writes];
        let order = |workload| Order::Use { path: path.clone(), len_bytes, workload, ms: 20, seed: 1 };
        for workload in every {
            let report = carry_out(&order(workload)).unwrap();
            assert!(report.operations > 0 && report.bytes > 0 && report.seconds >= 0.02, "{workload:?}: {report:?}");
        }
        let pass = Order::Pass { path: path.clone(), len_bytes };
        assert_eq!(carry_out(&pass).unwrap().bytes, len_bytes);
        let allocated = carry_out(&Order::Allocate { bytes: 8 << 20, hot: path.clone() }).unwrap();
        assert_eq!((allocated.allocation_ns.len(), allocated.hot_pages), (8, 40));
        let grown = carry_out(&Order::Grow { bytes: 8 << 20, over_ms: 16, hold_ms: 1 }).unwrap();
        assert!(grown.allocation_ns.len() == 8 && grown.seconds >= 0.014, "{grown:?}");

        let file = File::options().write(true).open(&path).unwrap();
        (0..40).for_each(|page| file.write_all_at(&[255], page * PAGE_SIZE as u64).unwrap());
        for workload in &every[..3] {
            assert!(carry_out(&order(*workload)).unwrap_err().contains("WRONG BYTES"), "{workload:?}");
        }
    }
}
