//! The probe: a process that writes and reads pages which identify themselves, compares every one,
//! and measures the time of each read. It decides about "no wrong byte", "no error" and "no read
//! slower than the bound". The large public programs that run in parallel (fsx, fio) make the load
//! and look for wrong bytes in ways of their own.
//!
//! It runs in a process of its own, so that its page cache is that of a small memory cgroup. It
//! reads in three ways: single pages at random, runs of pages in order (which the kernel reads
//! ahead), and pages of a mapping. One thread writes, so a page's content is known except while it
//! is being written: a read that overlaps a write of the same page is counted and not judged.
//!
//! Must never happen here: catching up after a slow read. The load stays bounded, or one slow
//! read would make the next one slow.

use crate::content::Name;
use hdrhistogram::Histogram;
use page::{PAGE_SIZE, Page};
use rustix::mm::{Advice as MapAdvice, MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The longest latency that is measured.
const LATENCY_MAX_US: u64 = 600_000_000;
/// Findings of each kind that are described. All are counted.
const FINDINGS_MAX: usize = 10;
/// Pages of one read in order.
const RUN_PAGES: u32 = 16;
/// One write in that many is followed by fdatasync.
const SYNC_ONE_IN: u32 = 64;

/// The task of a probe; an argument of its command line, as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    /// The directory of its files.
    pub directory: PathBuf,
    /// The number of files.
    pub file_count: u32,
    /// Pages of each file.
    pub page_count: u32,
    /// The seed of contents and order.
    pub seed: u64,
    /// The maximum for each of the three readers.
    pub reads_per_s: u32,
    /// The maximum.
    pub writes_per_s: u32,
    /// A read that takes longer is reported with its time.
    pub slow_ms: u64,
}

/// A slow read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Slow {
    /// When it began, in milliseconds since the epoch.
    pub began_ms: u64,
    /// How long it took.
    pub took_ms: u64,
    /// The read.
    pub what: String,
}

/// The result of a probe; its last line of output, as JSON.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Reads that were measured and compared.
    pub reads: u64,
    /// Pages written.
    pub writes: u64,
    /// Pages read while they were written, which cannot be judged.
    pub not_judged_pages: u64,
    /// Pages that were wrong.
    pub wrong_pages: u64,
    /// The first of them, with the time in milliseconds since the epoch.
    pub wrong: Vec<(u64, String)>,
    /// Calls that failed.
    pub error_count: u64,
    /// The first of them.
    pub errors: Vec<String>,
    /// Reads slower than [`Task::slow_ms`].
    pub slow_count: u64,
    /// The first of them.
    pub slow: Vec<Slow>,
    /// Median latency of a read.
    pub p50_us: u64,
    /// One in a hundred is slower.
    pub p99_us: u64,
    /// The slowest.
    pub max_us: u64,
    /// By file, then page: the generation that each page must have.
    pub generations: Vec<Vec<u32>>,
}

/// Milliseconds since the epoch.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

struct PageState {
    /// The generation that the last begun write makes.
    begun: AtomicU32,
    /// The generation of the last completed write.
    done: AtomicU32,
}

struct Probe {
    task: Task,
    files: Vec<File>,
    pages: Vec<Vec<PageState>>,
    stop: AtomicBool,
    writes: AtomicU64,
    report: Mutex<Report>,
}

/// Runs the process: makes the files, prints READY, works until its standard input ends, checks
/// everything once more, and reports.
pub fn run(task: &str) -> Result<(), String> {
    let task: Task = serde_json::from_str(task).map_err(|error| format!("understanding its task: {error}"))?;
    let probe = Probe::create(task)?;
    print_line("READY")?;
    let latency = std::thread::scope(|scope| {
        let readers = [AccessPattern::Random, AccessPattern::InOrder, AccessPattern::Mapped].map(|pattern| {
            let probe = &probe;
            scope.spawn(move || probe.read(pattern))
        });
        scope.spawn(|| probe.write());
        // Nothing is ever sent to it; the end of its input ends it.
        let _end = io::stdin().read_to_end(&mut Vec::new());
        probe.stop.store(true, Ordering::Relaxed);
        let mut all = latencies()?;
        for reader in readers {
            let latency = reader.join().map_err(|_| "a reader panicked".to_owned())??;
            all.add(&latency).map_err(|error| error.to_string())?;
        }
        Ok::<_, String>(all)
    })?;
    probe.check_all();
    let mut report = probe.report.into_inner().map_err(|error| error.to_string())?;
    report.writes = probe.writes.into_inner();
    (report.reads, report.max_us) = (latency.len(), latency.max());
    (report.p50_us, report.p99_us) = (latency.value_at_quantile(0.5), latency.value_at_quantile(0.99));
    let generation = |page: &PageState| page.done.load(Ordering::Acquire);
    report.generations = probe.pages.iter().map(|pages| pages.iter().map(generation).collect()).collect();
    print_line(&serde_json::to_string(&report).map_err(|error| error.to_string())?)
}

fn print_line(line: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|error| format!("telling: {error}"))
}

fn latencies() -> Result<Histogram<u64>, String> {
    Histogram::new_with_bounds(1, LATENCY_MAX_US, 3).map_err(|error| error.to_string())
}

/// The name of a file of the probe.
pub fn file_name(file: u32) -> String {
    format!("probe-{file}")
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum AccessPattern {
    Random,
    InOrder,
    Mapped,
}

/// Limits a load to so many operations a second, and never catches up.
struct RateLimiter {
    gap: Duration,
    next: Instant,
}

impl RateLimiter {
    fn new(per_s: u32) -> RateLimiter {
        RateLimiter { gap: Duration::from_secs(1) / per_s.max(1), next: Instant::now() }
    }

    fn wait(&mut self) {
        std::thread::sleep(self.next.saturating_duration_since(Instant::now()));
        self.next = (self.next + self.gap).max(Instant::now());
    }
}

impl Probe {
    fn create(task: Task) -> Result<Probe, String> {
        let mut files = Vec::new();
        for file in 0..task.file_count {
            let path = task.directory.join(file_name(file));
            let made = || {
                let made = File::options().read(true).write(true).create_new(true).open(&path)?;
                for index in 0..task.page_count {
                    let mut page = [0; PAGE_SIZE];
                    Name { seed: task.seed, file, index }.write(1, &mut page);
                    made.write_all_at(&page, offset(index))?;
                }
                made.sync_all()?;
                Ok::<_, io::Error>(made)
            };
            files.push(made().map_err(|error| format!("making {}: {error}", path.display()))?);
        }
        let page = || PageState { begun: AtomicU32::new(1), done: AtomicU32::new(1) };
        let pages = files.iter().map(|_| (0..task.page_count).map(|_| page()).collect()).collect();
        let (stop, report) = (AtomicBool::new(false), Mutex::default());
        Ok(Probe { task, files, pages, stop, writes: AtomicU64::new(0), report })
    }

    fn random(&self, salt: u64) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.task.seed.wrapping_add(salt))
    }

    fn note(&self, note: impl FnOnce(&mut Report)) {
        note(&mut self.report.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
    }

    fn failed(&self, what: &str, error: &io::Error) {
        self.note(|report| {
            report.error_count += 1;
            if report.errors.len() < FINDINGS_MAX {
                report.errors.push(format!("{what}: {error}"));
            }
        });
    }

    fn write(&self) {
        let (mut random, mut rate_limiter) = (self.random(1), RateLimiter::new(self.task.writes_per_s));
        while !self.stop.load(Ordering::Relaxed) {
            rate_limiter.wait();
            let (file, index) = (random.u32(..self.task.file_count), random.u32(..self.task.page_count));
            let state = &self.pages[file as usize][index as usize];
            let generation = state.done.load(Ordering::Acquire) + 1;
            let mut page = [0; PAGE_SIZE];
            Name { seed: self.task.seed, file, index }.write(generation, &mut page);
            state.begun.store(generation, Ordering::SeqCst);
            if let Err(error) = self.files[file as usize].write_all_at(&page, offset(index)) {
                // The page's content is unknown from now on, so it is never judged again.
                return self.failed(&format!("writing file {file} page {index}"), &error);
            }
            state.done.store(generation, Ordering::SeqCst);
            self.writes.fetch_add(1, Ordering::Relaxed);
            if random.u32(..SYNC_ONE_IN) == 0
                && let Err(error) = self.files[file as usize].sync_data()
            {
                return self.failed(&format!("fdatasync of file {file}"), &error);
            }
        }
    }

    fn read(&self, pattern: AccessPattern) -> Result<Histogram<u64>, String> {
        let (mut random, mut rate_limiter) = (self.random(2 + pattern as u64), RateLimiter::new(self.task.reads_per_s));
        let mut latency = latencies()?;
        let maps = if pattern == AccessPattern::Mapped {
            self.files.iter().map(|file| self.map(file)).collect()
        } else {
            Ok(Vec::new())
        };
        let maps = maps.map_err(|error| format!("mapping a file: {error}"))?;
        let mut buffer = vec![0; PAGE_SIZE * RUN_PAGES as usize];
        let (mut file, mut index) = (0, 0);
        while !self.stop.load(Ordering::Relaxed) {
            rate_limiter.wait();
            let mut page_count = 1;
            if pattern == AccessPattern::InOrder && index < self.task.page_count {
                page_count = RUN_PAGES.min(self.task.page_count - index);
            } else {
                (file, index) = (random.u32(..self.task.file_count), random.u32(..self.task.page_count));
            }
            let bytes = &mut buffer[..PAGE_SIZE * page_count as usize];
            let pages = &self.pages[file as usize][index as usize..][..page_count as usize];
            let before: Vec<u32> = pages.iter().map(|page| page.done.load(Ordering::SeqCst)).collect();
            let (began_ms, began) = (now_ms(), Instant::now());
            let read = match maps.get(file as usize) {
                Some(map) => map.read(index, bytes),
                None => self.files[file as usize].read_exact_at(bytes, offset(index)),
            };
            let took = began.elapsed();
            latency.saturating_record(took.as_micros().try_into().unwrap_or(LATENCY_MAX_US));
            let what = format!("file {file} page {index} ({pattern:?})");
            if took > Duration::from_millis(self.task.slow_ms) {
                let slow = Slow { began_ms, took_ms: took.as_millis() as u64, what: what.clone() };
                self.note(|report| {
                    report.slow_count += 1;
                    if report.slow.len() < FINDINGS_MAX {
                        report.slow.push(slow);
                    }
                });
            }
            match read {
                Err(error) => self.failed(&format!("reading {what}"), &error),
                Ok(()) => self.judge(file, index, pages, &before, bytes),
            }
            index = if pattern == AccessPattern::InOrder { index + page_count } else { index };
        }
        Ok(latency)
    }

    fn judge(&self, file: u32, first: u32, pages: &[PageState], before: &[u32], read: &[u8]) {
        let (read, _) = read.as_chunks::<PAGE_SIZE>();
        for (index, ((state, before), read)) in (first..).zip(pages.iter().zip(before).zip(read)) {
            if state.begun.load(Ordering::SeqCst) != *before {
                self.note(|report| report.not_judged_pages += 1);
                continue;
            }
            self.compare(Name { seed: self.task.seed, file, index }, *before, read);
        }
    }

    fn compare(&self, name: Name, generation: u32, read: &Page) {
        if let Some(wrong) = name.compare(generation, read) {
            let wrong = format!("file {} page {}: {wrong}", name.file, name.index);
            self.note(|report| {
                report.wrong_pages += 1;
                if report.wrong.len() < FINDINGS_MAX {
                    report.wrong.push((now_ms(), wrong));
                }
            });
        }
    }

    /// Checks every page once, when nothing writes any more.
    fn check_all(&self) {
        for (number, file) in (0..).zip(&self.files) {
            let mut page = [0; PAGE_SIZE];
            for (index, state) in (0..).zip(&self.pages[number as usize]) {
                let generation = state.done.load(Ordering::SeqCst);
                match file.read_exact_at(&mut page, offset(index)) {
                    // A write that failed half-way leaves a page with either content.
                    Ok(()) if generation != state.begun.load(Ordering::SeqCst) => {}
                    Ok(()) => self.compare(Name { seed: self.task.seed, file: number, index }, generation, &page),
                    Err(error) => self.failed(&format!("reading file {number} page {index} at the end"), &error),
                }
            }
            if let Err(error) = file.sync_all() {
                self.failed(&format!("fsync of file {number} at the end"), &error);
            }
        }
    }

    fn map(&self, file: &File) -> io::Result<Map> {
        let words = self.task.page_count as usize * PAGE_SIZE / size_of::<u64>();
        let len = words * size_of::<u64>();
        // SAFETY: a new mapping at an address that the kernel chooses, unmapped by the guard.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0)? };
        // SAFETY: that mapping; the advice changes no content.
        unsafe { rustix::mm::madvise(base, len, MapAdvice::Random)? };
        Ok(Map { base: base.cast(), words })
    }
}

fn offset(index: u32) -> u64 {
    u64::from(index) * PAGE_SIZE as u64
}

/// A mapping of a file, read only.
struct Map {
    base: *const u64,
    words: usize,
}

impl Map {
    /// Copies pages out of it. If the file cannot be read, the kernel kills the process (SIGBUS),
    /// which is indeed an error.
    fn read(&self, index: u32, bytes: &mut [u8]) -> io::Result<()> {
        let first = index as usize * PAGE_SIZE / size_of::<u64>();
        assert!(first + bytes.len() / size_of::<u64>() <= self.words);
        for (at, place) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // SAFETY: inside the mapping, as asserted above. Volatile, as others change the file
            // meanwhile.
            *place = unsafe { self.base.add(first + at).read_volatile() }.to_ne_bytes();
        }
        // Mapped pages would never be evicted from a cache this small, and nothing would be read
        // again. SAFETY: whole pages of our own mapping, whose content is the file's.
        unsafe {
            let start = self.base.add(first).cast_mut().cast();
            rustix::mm::madvise(start, bytes.len(), MapAdvice::LinuxDontNeed)?;
        }
        Ok(())
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping that was made, once.
        let _cannot_fail = unsafe { rustix::mm::munmap(self.base.cast_mut().cast(), self.words * size_of::<u64>()) };
    }
}
