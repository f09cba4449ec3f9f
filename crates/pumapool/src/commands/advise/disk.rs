//! Latency of the disk, if the watch has observed too few reads: reads some pages of existing files
//! past the page cache.

use page::PAGE_SIZE;
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Mode, OFlags};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Number of reads: enough for a median, and no burden for the disk.
const READS: usize = 64;
/// Distance between two reads, modulo the size of the file. A prime, so that no page is read twice.
const STEP_PAGES: u64 = 7919;

#[repr(align(4096))]
struct Buffer([u8; PAGE_SIZE]);

/// Returns the median latency of a read, in microseconds. Returns `None` if the file system does
/// not support O_DIRECT, or if there are too few files.
pub(super) fn read_us(files: &[PathBuf]) -> Option<f64> {
    let mut buffer = Box::new(Buffer([0; PAGE_SIZE]));
    let mut times = Vec::with_capacity(READS);
    for (nth, path) in files.iter().cycle().take(READS).enumerate().filter(|_| !files.is_empty()) {
        let Some((file, size_bytes)) = open(path) else { continue };
        let pages = size_bytes / PAGE_SIZE as u64;
        let page = (nth as u64 * STEP_PAGES) % pages.max(1);
        let begin = Instant::now();
        if rustix::io::pread(&file, &mut buffer.0, page * PAGE_SIZE as u64).is_ok_and(|bytes| bytes > 0) {
            times.push(begin.elapsed().as_secs_f64() * 1e6);
        }
    }
    median(&mut times)
}

/// Opens a file, and returns it with its size in bytes. Since the file was found, its name may have
/// become that of a pipe or a device. These must not be opened, so this function returns `None`.
fn open(path: &Path) -> Option<(OwnedFd, u64)> {
    let named = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let status = rustix::fs::fstat(&named).ok()?;
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
        return None;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NOATIME;
    let file = rustix::fs::open(format!("/proc/self/fd/{}", named.as_raw_fd()), flags, Mode::empty()).ok()?;
    Some((file, u64::try_from(status.st_size).ok()?))
}

/// The median of at least `MIN` times; `None` if there are fewer.
fn median(times: &mut [f64]) -> Option<f64> {
    const MIN: usize = 8;
    if times.len() < MIN {
        return None;
    }
    let middle = times.len() / 2;
    Some(*times.select_nth_unstable_by(middle, f64::total_cmp).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_that_of_enough() {
        assert_eq!(median(&mut [5.0, 1.0, 9.0, 2.0, 8.0, 3.0, 7.0, 4.0, 6.0]), Some(5.0));
        assert_eq!(median(&mut [1.0; 3]), None);
        assert_eq!(read_us(&[]), None);
    }

    #[test]
    fn only_files_are_opened() {
        let scratch = testbed::Scratch::new("only_files_are_opened").unwrap();
        let at = |name: &str| scratch.path().join(name);
        rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), Mode::RUSR).unwrap();
        std::fs::write(at("file"), [0; 5000]).unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        assert_eq!(open(&at("file")).map(|(_, size_bytes)| size_bytes), Some(5000));
        assert!(["pipe", "link", "gone"].iter().all(|name| open(&at(name)).is_none()));
    }
}
