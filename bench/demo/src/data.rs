//! The data set: real files of this machine, copied to the disk under test, and the expected bytes.
//!
//! The reference is a second copy in memory, made while the files are copied and before anything is
//! cached or lent. It is a memfd that this process fills, so it is charged to this process's memory
//! group and not to the reader's, which only maps it. Comparing the bytes themselves needs no
//! checksum, and counts wrong bytes exactly.

use crate::progress::Bar;
use page::PAGE_SIZE;
use rustix::fd::OwnedFd;
use rustix::fs::{Advice, MemfdFlags};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use testbed::{Failure, Interrupt, cached_pages};

/// With smaller files the number of open files would dominate, and not the number of pages.
const FILE_MIN_BYTES: u64 = 128 << 10;
/// Larger ones would make it a demo of one file.
const FILE_MAX_BYTES: u64 = 8 << 20;
/// Stays under the 1024 open files that a process may usually have, on both sides of the mount.
const FILE_MAX_COUNT: usize = 900;

/// A file of the data set.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct DataFile {
    /// Its name in the data set's directory.
    pub name: String,
    /// Its size.
    pub len_bytes: u64,
}

impl DataFile {
    /// Pages it has, the last of which may be partial.
    pub fn page_count(&self) -> u64 {
        self.len_bytes.div_ceil(PAGE_SIZE as u64)
    }
}

/// The files, and their contents.
pub struct DataSet {
    /// Their directory.
    pub directory: PathBuf,
    /// In the order of the reference.
    pub files: Vec<DataFile>,
    /// All files one after the other, each beginning on a page.
    pub reference: OwnedFd,
}

impl DataSet {
    /// Bytes of all files.
    pub fn len_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.len_bytes).sum()
    }

    /// Pages of all files.
    pub fn page_count(&self) -> u64 {
        self.files.iter().map(DataFile::page_count).sum()
    }

    /// Copies files from below `from` until they hold `budget_bytes`, in an order that depends on
    /// the seed alone.
    pub fn copy(
        from: &Path,
        directory: PathBuf,
        budget_bytes: u64,
        seed: u64,
        bar: &Bar,
        interrupt: &Interrupt,
    ) -> Result<DataSet, Failure> {
        let chosen = choose(from, budget_bytes, seed, interrupt)?;
        let reference =
            rustix::fs::memfd_create("puma-demo-reference", MemfdFlags::CLOEXEC).map_err(io::Error::from)?;
        let mut data = DataSet { directory, files: Vec::new(), reference };
        let reference = File::from(data.reference.try_clone()?);
        let (mut at, mut copied_bytes) = (0, 0);
        for path in chosen {
            interrupt.check()?;
            let mut content = Vec::new();
            // A file may have been removed, or have grown, since it was chosen.
            let read = File::open(&path).and_then(|file| file.take(FILE_MAX_BYTES).read_to_end(&mut content));
            if read.is_err() || content.is_empty() {
                continue;
            }
            let base = path.file_name().unwrap_or_default().to_string_lossy();
            let file = DataFile { name: format!("{:04}-{base}", data.files.len()), len_bytes: content.len() as u64 };
            let copy = data.directory.join(&file.name);
            fs::write(&copy, &content).map_err(Failure::attempted(format!("copying to {}", copy.display())))?;
            reference.write_all_at(&content, at).map_err(Failure::attempted("keeping a second copy in memory"))?;
            at += file.page_count() * PAGE_SIZE as u64;
            copied_bytes += file.len_bytes;
            data.files.push(file);
            bar.set(copied_bytes);
        }
        // The last page is whole in the reference, as all others are.
        reference.set_len(at)?;
        if data.files.is_empty() {
            return Err(Failure::Problem(format!(
                "no file of {FILE_MIN_BYTES} bytes or more can be read below {}",
                from.display()
            )));
        }
        Ok(data)
    }

    /// Writes the copies to the disk and drops them from the page cache. Returns how many of their
    /// pages are still cached.
    pub fn drop_from_page_cache(&self) -> Result<u64, Failure> {
        for file in &self.files {
            let path = self.directory.join(&file.name);
            let drop = File::open(&path).and_then(|file| {
                file.sync_all()?;
                Ok(rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?)
            });
            drop.map_err(Failure::attempted(format!("dropping {} from the page cache", path.display())))?;
        }
        self.cached_pages()
    }

    /// How many pages of the files, by their paths on the disk, are in the page cache.
    pub fn cached_pages(&self) -> Result<u64, Failure> {
        let count = |file: &DataFile| cached_pages(&self.directory.join(&file.name), file.len_bytes);
        let counts: io::Result<Vec<u64>> = self.files.iter().map(count).collect();
        Ok(counts.map_err(Failure::attempted("looking what is in the page cache"))?.into_iter().sum())
    }
}

/// Files below `from`, shuffled, as many as fit the budget.
fn choose(from: &Path, budget_bytes: u64, seed: u64, interrupt: &Interrupt) -> Result<Vec<PathBuf>, Failure> {
    let (mut directories, mut files) = (vec![from.to_owned()], Vec::new());
    while let Some(directory) = directories.pop() {
        interrupt.check()?;
        // Unreadable entries are not chosen.
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            // Of the entry itself: symbolic links are not followed.
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_dir() {
                directories.push(entry.path());
            } else if metadata.is_file() && (FILE_MIN_BYTES..=FILE_MAX_BYTES).contains(&metadata.len()) {
                files.push((entry.path(), metadata.len()));
            }
        }
    }
    // Directories list entries in an order of their own.
    files.sort();
    fastrand::Rng::with_seed(seed).shuffle(&mut files);
    let mut left_bytes = budget_bytes;
    let fits = files.into_iter().filter(|(_, len_bytes)| {
        let fits = *len_bytes <= left_bytes;
        left_bytes -= if fits { *len_bytes } else { 0 };
        fits
    });
    Ok(fits.map(|(path, _)| path).take(FILE_MAX_COUNT).collect())
}
