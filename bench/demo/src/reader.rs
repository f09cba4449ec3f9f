//! The measured process: the demo's own program once more ([`testbed::WorkerProcess`]).
//!
//! It reads pages of the files at random and compares every byte of each with the reference.
//! Comparing is not part of a read's latency, but it is part of the time in which reads are
//! counted: this costs the fast ways more than the slow one.

use crate::data::DataFile;
use hdrhistogram::Histogram;
use page::PAGE_SIZE;
use rustix::fs::Advice;
use rustix::mm::{MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The subcommand.
pub const NAME: &str = "reader";
/// Time between two reports of progress: long enough to cost nothing, short enough for a bar.
const PROGRESS_EVERY: Duration = Duration::from_millis(250);
/// Reads between two checks of the clock for progress.
const PROGRESS_LOOK: u64 = 16;
/// The longest latency that is measured.
const LATENCY_MAX_NS: u64 = 60_000_000_000;

/// The reader's data: its first line of input.
#[derive(Debug, Serialize, Deserialize)]
pub struct Task {
    /// The directory of the files: on the disk, or at the mount point.
    pub directory: PathBuf,
    /// The files.
    pub files: Vec<DataFile>,
    /// Their bytes, each file beginning on a page.
    pub reference: PathBuf,
    /// The seed of everything random here.
    pub seed: u64,
}

/// An order to the reader: its other lines of input.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Read every page once, in random order.
    Pass {
        /// End earlier after this time.
        max_ms: u64,
    },
    /// Read that many pages, each chosen at random from all.
    Count {
        /// The number.
        reads: u64,
    },
    /// Read random pages for that long.
    Time {
        /// The duration.
        ms: u64,
    },
}

/// An answer of the reader.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// Everything is open and mapped: the reader's own needs can be measured.
    Ready,
    /// Progress of the present order.
    Progress {
        /// Pages read.
        reads: u64,
        /// Time since its beginning.
        elapsed_ms: u64,
    },
    /// The order has been carried out.
    Done(Report),
    /// The order failed.
    Failed(String),
}

/// The result of an order.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Pages read.
    pub reads: u64,
    /// Time it took.
    pub elapsed_us: u64,
    /// Bytes compared with the reference.
    pub compared_bytes: u64,
    /// Bytes that were wrong or missing.
    pub wrong_bytes: u64,
    /// The place of the first of them.
    pub first_wrong: Option<String>,
    /// Bytes that the kernel read from disks for this process, if it reports them.
    pub disk_bytes: Option<u64>,
    /// Mean latency of a read.
    pub mean_us: f64,
    /// Median latency of a read.
    pub p50_us: f64,
    /// The latency that one read in a hundred exceeds.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
}

/// The whole life of the reader.
pub fn run() -> Result<(), String> {
    let Some(task) = testbed::next_order()? else { return Ok(()) };
    testbed::hold_program();
    let mut reader = match Reader::new(task) {
        Ok(reader) => reader,
        Err(error) => return testbed::answer(&Answer::Failed(error)),
    };
    testbed::answer(&Answer::Ready)?;
    while let Some(order) = testbed::next_order()? {
        testbed::answer(&reader.carry_out(&order).map_or_else(Answer::Failed, Answer::Done))?;
    }
    Ok(())
}

struct OpenFile {
    file: File,
    name: String,
    len_bytes: u64,
    /// The index of its first page among all pages.
    first_page: u32,
}

/// The pages to read, and to compare with.
struct Pages {
    files: Vec<OpenFile>,
    count: u32,
    reference: &'static [u8],
}

struct Reader {
    pages: Pages,
    random: fastrand::Rng,
    /// All pages. Shuffled for a pass; kept, so that the reader's own memory does not change
    /// between orders.
    order: Vec<u32>,
    latency_ns: Histogram<u64>,
}

impl Reader {
    fn new(task: Task) -> Result<Reader, String> {
        let mut files = Vec::with_capacity(task.files.len());
        let mut page_count = 0u32;
        for file in task.files {
            let path = task.directory.join(&file.name);
            let open = File::open(&path).and_then(|file| {
                // As a database does that knows its reads are random: one page is one read, on the
                // disk as through the mount.
                rustix::fs::fadvise(&file, 0, None, Advice::Random)?;
                Ok(file)
            });
            let pages = u32::try_from(file.page_count()).map_err(|_| "the data set is too large".to_owned())?;
            let first_page = page_count;
            page_count = page_count.checked_add(pages).ok_or("the data set is too large")?;
            let open = open.map_err(|error| format!("opening {}: {error}", path.display()))?;
            files.push(OpenFile { file: open, name: file.name, len_bytes: file.len_bytes, first_page });
        }
        let reference = File::open(&task.reference).and_then(|file| map(&file, page_count as usize * PAGE_SIZE));
        let reference = reference.map_err(|error| format!("mapping {}: {error}", task.reference.display()))?;
        Ok(Reader {
            pages: Pages { files, count: page_count, reference },
            random: fastrand::Rng::with_seed(task.seed),
            order: (0..page_count).collect(),
            latency_ns: Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3).map_err(|error| error.to_string())?,
        })
    }

    fn carry_out(&mut self, order: &Order) -> Result<Report, String> {
        let (reads_max, time_max) = match order {
            Order::Pass { max_ms } => (u64::from(self.pages.count), Duration::from_millis(*max_ms)),
            Order::Count { reads } => (*reads, Duration::MAX),
            Order::Time { ms } => (u64::MAX, Duration::from_millis(*ms)),
        };
        let pass = matches!(order, Order::Pass { .. });
        if pass {
            self.random.shuffle(&mut self.order);
        }
        self.latency_ns.reset();
        let mut report = Report::default();
        let mut buffer = [0u8; PAGE_SIZE];
        let disk_before = disk_bytes();
        let start = Instant::now();
        let (mut now, mut told) = (start, start);
        while report.reads < reads_max && now - start < time_max {
            let page = if pass { self.order[report.reads as usize] } else { self.random.u32(..self.pages.count) };
            let before = Instant::now();
            let at = self.pages.read(page, &mut buffer)?;
            now = Instant::now();
            self.latency_ns.saturating_record((now - before).as_nanos().try_into().unwrap_or(LATENCY_MAX_NS));
            report.reads += 1;
            self.pages.compare(&at, &buffer, &mut report);
            if report.reads.is_multiple_of(PROGRESS_LOOK) && now - told >= PROGRESS_EVERY {
                told = now;
                testbed::answer(&Answer::Progress {
                    reads: report.reads,
                    elapsed_ms: (now - start).as_millis() as u64,
                })?;
            }
        }
        report.elapsed_us = start.elapsed().as_micros() as u64;
        report.disk_bytes = disk_bytes().zip(disk_before).map(|(after, before)| after.saturating_sub(before));
        let us = |quantile| self.latency_ns.value_at_quantile(quantile) as f64 / 1000.0;
        report.mean_us = self.latency_ns.mean() / 1000.0;
        (report.p50_us, report.p99_us, report.max_us) = (us(0.50), us(0.99), us(1.0));
        Ok(report)
    }
}

impl Pages {
    /// Reads a page, and returns its place and its length.
    fn read(&self, page: u32, buffer: &mut [u8; PAGE_SIZE]) -> Result<ReadAt<'_>, String> {
        let index = self.files.partition_point(|file| file.first_page <= page) - 1;
        let file = &self.files[index];
        let offset_bytes = u64::from(page - file.first_page) * PAGE_SIZE as u64;
        let read = file.file.read_at(buffer, offset_bytes);
        let read_bytes = read.map_err(|error| format!("reading {} at {offset_bytes}: {error}", file.name))?;
        Ok(ReadAt { file, page, offset_bytes, read_bytes })
    }

    fn compare(&self, at: &ReadAt<'_>, buffer: &[u8; PAGE_SIZE], report: &mut Report) {
        let expected_bytes = (at.file.len_bytes - at.offset_bytes).min(PAGE_SIZE as u64) as usize;
        let original = &self.reference[at.page as usize * PAGE_SIZE..][..expected_bytes];
        let read = &buffer[..at.read_bytes];
        report.compared_bytes += expected_bytes as u64;
        if read == original {
            return;
        }
        let differing = read.iter().zip(original).filter(|(read, original)| read != original).count();
        report.wrong_bytes += (differing + read.len().abs_diff(original.len())) as u64;
        report.first_wrong.get_or_insert_with(|| {
            format!(
                "{} at {}: {differing} of {} bytes differ, {expected_bytes} expected",
                at.file.name,
                at.offset_bytes,
                read.len()
            )
        });
    }
}

struct ReadAt<'a> {
    file: &'a OpenFile,
    page: u32,
    offset_bytes: u64,
    read_bytes: usize,
}

/// Maps the reference for good, with all page tables in place: they are part of the reader's own
/// needs.
fn map(file: &File, len: usize) -> io::Result<&'static [u8]> {
    let flags = MapFlags::SHARED | MapFlags::POPULATE;
    // SAFETY: a new mapping at an address that the kernel chooses, never unmapped. The memfd behind
    // it has that length, and nobody writes to it or shortens it once the reader runs.
    unsafe {
        let map = rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, flags, file, 0)?;
        Ok(std::slice::from_raw_parts(map.cast(), len))
    }
}

/// Bytes that this process had read from disks so far.
fn disk_bytes() -> Option<u64> {
    disk_bytes_of("self")
}

/// Bytes that a process had read from disks so far, if the kernel reports them.
pub fn disk_bytes_of(process: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/io")).ok()?;
    os::fields::count(&text, "read_bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two files, the second of which ends within a page, and a reference for them.
    fn reader(scratch: &testbed::Scratch) -> Reader {
        let contents = [vec![1u8; 3 * PAGE_SIZE], vec![2u8; PAGE_SIZE + 100]];
        let mut reference = Vec::new();
        let mut files = Vec::new();
        for (index, content) in contents.iter().enumerate() {
            let name = format!("file-{index}");
            fs::write(scratch.path().join(&name), content).unwrap();
            reference.extend_from_slice(content);
            reference.resize(reference.len().next_multiple_of(PAGE_SIZE), 0);
            files.push(DataFile { name, len_bytes: content.len() as u64 });
        }
        let path = scratch.path().join("reference");
        fs::write(&path, reference).unwrap();
        Reader::new(Task { directory: scratch.path().to_owned(), files, reference: path, seed: 1 }).unwrap()
    }

    fn pass(reader: &mut Reader) -> Report {
        reader.carry_out(&Order::Pass { max_ms: 60_000 }).unwrap()
    }

    #[test]
    fn every_wrong_byte_is_counted() {
        let scratch = testbed::Scratch::new("demo-reader").unwrap();
        let mut reader = reader(&scratch);
        let report = pass(&mut reader);
        assert_eq!((report.reads, report.compared_bytes, report.wrong_bytes), (5, 4 * PAGE_SIZE as u64 + 100, 0));
        assert_eq!(report.first_wrong, None);

        let file = fs::OpenOptions::new().write(true).open(scratch.path().join("file-1")).unwrap();
        file.write_all_at(&[7, 2, 7], PAGE_SIZE as u64 + 96).unwrap();
        let report = pass(&mut reader);
        assert_eq!(report.wrong_bytes, 2);
        assert!(report.first_wrong.unwrap().starts_with("file-1 at 4096: 2 of 100 bytes differ"));

        // Missing bytes are wrong bytes, and so are superfluous ones.
        file.set_len(PAGE_SIZE as u64 + 90).unwrap();
        assert_eq!(pass(&mut reader).wrong_bytes, 10);
        file.set_len(PAGE_SIZE as u64).unwrap();
        assert_eq!(pass(&mut reader).wrong_bytes, 100);
        file.write_all_at(&[2; 110], PAGE_SIZE as u64).unwrap();
        assert_eq!(pass(&mut reader).wrong_bytes, 10);
    }

    #[test]
    fn orders_end_when_they_should() {
        let scratch = testbed::Scratch::new("demo-reader").unwrap();
        let mut reader = reader(&scratch);
        assert_eq!(reader.carry_out(&Order::Count { reads: 17 }).unwrap().reads, 17);
        let report = reader.carry_out(&Order::Time { ms: 20 }).unwrap();
        assert!(report.reads > 0 && report.elapsed_us >= 20_000, "{report:?}");
        assert!(report.p50_us <= report.p99_us && report.p99_us <= report.max_us, "{report:?}");
        fs::remove_file(scratch.path().join("file-0")).unwrap();
        let task = Task {
            directory: scratch.path().to_owned(),
            files: vec![DataFile { name: "file-0".to_owned(), len_bytes: 1 }],
            reference: scratch.path().join("reference"),
            seed: 1,
        };
        assert!(Reader::new(task).is_err_and(|error| error.contains("file-0")));
    }
}
