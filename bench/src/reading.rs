//! The worker's measurements of reads: each block of a file once and at random, a cached file, a
//! TCP peer.

use crate::null_server::{connect, receive};
use crate::worker::{Report, check, join};
use crate::world::files_under;
use page::PAGE_SIZE;
use rustix::fs::Advice;
use rustix::mm::{MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The way in which a cached file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Method {
    /// By read(2).
    Read,
    /// Through a mapping, which is made anew each time: its page faults are part of the time.
    Map,
}

/// Reads every block of the beginning of a file once, in random order, distributed over the
/// threads. Fails on a wrong page.
pub fn once(path: &Path, len_bytes: u64, block_bytes: usize, threads: usize, seed: u64) -> Result<Report, String> {
    let mut blocks: Vec<u64> = (0..len_bytes / block_bytes as u64).collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut blocks);
    let begin = Instant::now();
    let share = blocks.len().div_ceil(threads).max(1);
    let results = join(blocks.chunks(share).map(|blocks| move || read_blocks(path, block_bytes, blocks)));
    let seconds = begin.elapsed().as_secs_f64();
    let mut times_ns = Vec::with_capacity(blocks.len());
    for result in results {
        times_ns.extend(result?);
    }
    let mut report = Report { bytes: (times_ns.len() * block_bytes) as u64, seconds, ..Report::default() };
    report.set_times(times_ns);
    Ok(report)
}

fn read_blocks(path: &Path, block_bytes: usize, blocks: &[u64]) -> Result<Vec<u64>, String> {
    let problem = |error: io::Error| format!("reading {}: {error}", path.display());
    let file = File::open(path).map_err(problem)?;
    // As a database does that knows its reads are random: a block is one request.
    rustix::fs::fadvise(&file, 0, None, Advice::Random).map_err(|error| problem(error.into()))?;
    let mut buffer = vec![0; block_bytes];
    let mut times_ns = Vec::with_capacity(blocks.len());
    for block in blocks {
        let begin = Instant::now();
        file.read_exact_at(&mut buffer, block * block_bytes as u64).map_err(problem)?;
        times_ns.push(ns(begin));
        let first = block * (block_bytes / PAGE_SIZE) as u64;
        (first..).zip(buffer.chunks_exact(PAGE_SIZE)).try_for_each(|(page, content)| check(page, content))?;
    }
    Ok(times_ns)
}

/// Reads every block of every file under a directory once, in random order. Their contents are not
/// checked.
pub fn files(directory: &Path, block_bytes: usize, seed: u64) -> Result<Report, String> {
    let problem = |path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| format!("reading {}: {error}", path.display())
    };
    let mut random = fastrand::Rng::with_seed(seed);
    let mut paths = files_under(directory).map_err(problem(directory))?;
    random.shuffle(&mut paths);
    let (mut buffer, mut report, begin) = (vec![0; block_bytes], Report::default(), Instant::now());
    for path in paths {
        let file = File::open(&path).map_err(problem(&path))?;
        rustix::fs::fadvise(&file, 0, None, Advice::Random).map_err(|error| problem(&path)(error.into()))?;
        let len_bytes = file.metadata().map_err(problem(&path))?.len();
        let mut blocks: Vec<u64> = (0..len_bytes.div_ceil(block_bytes as u64)).collect();
        random.shuffle(&mut blocks);
        for block in blocks {
            report.bytes += file.read_at(&mut buffer, block * block_bytes as u64).map_err(problem(&path))? as u64;
            report.operations += 1;
        }
    }
    report.seconds = begin.elapsed().as_secs_f64();
    Ok(report)
}

/// One of so many places: any, or with a mean, exponentially fewer of those that are farther
/// behind.
pub fn place(random: &mut fastrand::Rng, places: u64, mean: f64) -> u64 {
    if mean == 0.0 {
        return random.u64(..places);
    }
    loop {
        // Places behind the end are drawn again.
        let place = -mean * (1.0 - random.f64()).ln();
        if place < places as f64 {
            return place as u64;
        }
    }
}

/// Reads at least one fragment at random places of the beginning of a file, which are multiples of
/// their size. Checks those pages that begin in a fragment.
pub fn fragments(
    path: &Path,
    len_bytes: u64,
    fragment_bytes: usize,
    total_bytes: u64,
    mean_bytes: u64,
    seed: u64,
) -> Result<Report, String> {
    let problem = |error: io::Error| format!("reading {}: {error}", path.display());
    let file = File::open(path).map_err(problem)?;
    let places = (len_bytes / fragment_bytes as u64).max(1);
    let mean = mean_bytes as f64 / fragment_bytes as f64;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut buffer = vec![0; fragment_bytes];
    let mut times_ns = Vec::new();
    let begin = Instant::now();
    for _ in 0..(total_bytes / fragment_bytes as u64).max(1) {
        let at = place(&mut random, places, mean) * fragment_bytes as u64;
        let asked = Instant::now();
        file.read_exact_at(&mut buffer, at).map_err(problem)?;
        times_ns.push(ns(asked));
        if at.is_multiple_of(PAGE_SIZE as u64) {
            let first = at / PAGE_SIZE as u64;
            (first..).zip(buffer.chunks(PAGE_SIZE)).try_for_each(|(page, content)| check(page, content))?;
        }
    }
    let bytes = (times_ns.len() * fragment_bytes) as u64;
    let mut report = Report { bytes, seconds: begin.elapsed().as_secs_f64(), ..Report::default() };
    report.set_times(times_ns);
    Ok(report)
}

/// Reads blocks of a file at random for some time, by one thread. Checks the beginning of each
/// block.
pub fn cached(
    path: &Path,
    len_bytes: u64,
    block_bytes: usize,
    method: Method,
    ms: u64,
    seed: u64,
) -> Result<Report, String> {
    let problem = |error: io::Error| format!("reading {}: {error}", path.display());
    let file = File::open(path).map_err(problem)?;
    let len = usize::try_from(len_bytes).map_err(|error| error.to_string())?;
    let (blocks, pages) = (len_bytes / block_bytes as u64, (block_bytes / PAGE_SIZE) as u64);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut buffer = vec![0; block_bytes];
    let mut report = Report::default();
    let limit = Duration::from_millis(ms);
    let begin = Instant::now();
    let mapping = match method {
        Method::Read => None,
        Method::Map => Some(Mapping::of(&file, len).map_err(problem)?),
    };
    while begin.elapsed() < limit {
        let block = random.u64(..blocks);
        let at = block * block_bytes as u64;
        match &mapping {
            None => file.read_exact_at(&mut buffer, at).map_err(problem)?,
            Some(mapping) => buffer.copy_from_slice(&mapping.bytes()[at as usize..][..block_bytes]),
        }
        // The optimizer must not find out that the rest is unused.
        check(block * pages, std::hint::black_box(&buffer))?;
        report.operations += 1;
        report.bytes += block_bytes as u64;
    }
    report.seconds = begin.elapsed().as_secs_f64();
    Ok(report)
}

/// A file in the address space.
struct Mapping {
    start: *mut std::ffi::c_void,
    len: usize,
}

impl Mapping {
    fn of(file: &File, len: usize) -> io::Result<Mapping> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0)? };
        Ok(Mapping { start, len })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped for reading, for as long as this value lives. Nobody shortens the file or
        // writes to it during a bench.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `of`, and nothing borrowed from it outlives the value.
        let _cannot_fail = unsafe { rustix::mm::munmap(self.start, self.len) };
    }
}

/// Sends requests to a TCP peer and waits for each response; both sides poll, or sleep.
pub fn ping_pong(
    address: &str,
    request_bytes: usize,
    answer_bytes: usize,
    polls: bool,
    ms: u64,
) -> Result<Report, String> {
    let problem = |error: io::Error| format!("talking to {address}: {error}");
    let mut stream = connect(address, request_bytes, answer_bytes, polls).map_err(problem)?;
    let (request, mut answer) = (vec![1; request_bytes], vec![0; answer_bytes]);
    let (begin, limit) = (Instant::now(), Duration::from_millis(ms));
    let mut times_ns = Vec::new();
    while begin.elapsed() < limit {
        let asked = Instant::now();
        stream.write_all(&request).and_then(|()| receive(&mut stream, &mut answer, polls)).map_err(problem)?;
        times_ns.push(ns(asked));
    }
    let bytes = (times_ns.len() * answer_bytes) as u64;
    let mut report = Report { bytes, seconds: begin.elapsed().as_secs_f64(), ..Report::default() };
    report.set_times(times_ns);
    Ok(report)
}

/// Receives what a TCP peer sends without requests.
pub fn stream(address: &str, block_bytes: usize, ms: u64) -> Result<Report, String> {
    let problem = |error: io::Error| format!("listening to {address}: {error}");
    let mut stream = connect(address, 0, block_bytes, false).map_err(problem)?;
    let mut block = vec![0; block_bytes];
    let mut report = Report::default();
    let (begin, limit) = (Instant::now(), Duration::from_millis(ms));
    while begin.elapsed() < limit {
        stream.read_exact(&mut block).map_err(problem)?;
        report.operations += 1;
        report.bytes += block_bytes as u64;
    }
    report.seconds = begin.elapsed().as_secs_f64();
    Ok(report)
}

/// Reads the pages of the beginning of a file one by one, and makes the kernel evict them all at
/// once, again and again. Returns the nanoseconds of a page.
pub fn evict(path: &Path, len_bytes: u64, times: usize) -> Result<Report, String> {
    let problem = |error: io::Error| format!("evicting {}: {error}", path.display());
    let pages: Vec<u64> = (0..len_bytes / PAGE_SIZE as u64).collect();
    let file = File::open(path).map_err(problem)?;
    let (begin, mut times_ns) = (Instant::now(), Vec::new());
    for _ in 0..times {
        read_blocks(path, PAGE_SIZE, &pages)?;
        let evicting = Instant::now();
        let dropped = rustix::fs::fadvise(&file, 0, std::num::NonZeroU64::new(len_bytes), Advice::DontNeed);
        times_ns.push(ns(evicting) / pages.len() as u64);
        dropped.map_err(|error| problem(error.into()))?;
    }
    let bytes = times as u64 * len_bytes;
    let mut report = Report { bytes, seconds: begin.elapsed().as_secs_f64(), ..Report::default() };
    report.set_times(times_ns);
    Ok(report)
}

fn ns(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use testbed::Scratch;

    #[test]
    fn every_block_is_read_once_and_looked_at() {
        let scratch = Scratch::new("bench-reading").unwrap();
        let path = scratch.path().join("data");
        let len_bytes = 64 * PAGE_SIZE as u64;
        crate::world::write_stamped(&path, len_bytes, 1).unwrap();
        for (block_pages, threads) in [(1, 1), (1, 16), (4, 1), (16, 3)] {
            let report = once(&path, len_bytes, block_pages * PAGE_SIZE, threads, 1).unwrap();
            assert_eq!((report.bytes, report.operations), (len_bytes, 64 / block_pages as u64));
            assert!(report.p50_ns > 0 && report.p50_ns <= report.p99_ns);
        }
        for method in [Method::Read, Method::Map] {
            let report = cached(&path, len_bytes, 2 * PAGE_SIZE, method, 5, 1).unwrap();
            assert_eq!(report.bytes, report.operations * 2 * PAGE_SIZE as u64, "{method:?}");
        }
        assert_eq!(evict(&path, len_bytes, 3).unwrap().operations, 3);
        File::options().write(true).open(&path).unwrap().write_all_at(&[255], 0).unwrap();
        assert!(once(&path, len_bytes, PAGE_SIZE, 2, 1).unwrap_err().contains("WRONG BYTES"));
    }
}
