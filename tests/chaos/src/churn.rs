//! Load on names: many small files are made, read, renamed, truncated, appended to and removed, in
//! a few directories. Each read of a file is compared with its expected content.

use crate::content::Name;
use page::PAGE_SIZE;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The maximum number of files.
const FILES_MAX: usize = 400;
/// The number of directories.
const DIRECTORY_COUNT: u32 = 8;
/// The maximum number of pages of a file.
const PAGES_MAX: u32 = 24;
/// Between two operations.
const PAUSE: Duration = Duration::from_millis(4);
/// The maximum number of stored problems.
const PROBLEMS_MAX: usize = 10;

/// An expected file.
struct Known {
    path: PathBuf,
    /// The seed of its contents.
    seed: u64,
    page_count: u32,
}

/// The load. Dropping it, or [`Churn::end`], ends it.
pub struct Churn {
    stop: Arc<AtomicBool>,
    operations: Arc<AtomicU64>,
    problems: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Churn {
    /// Begins, in `directory`.
    pub fn start(directory: &Path, seed: u64) -> Churn {
        let (stop, operations) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let problems = Arc::new(Mutex::new(Vec::new()));
        let thread = {
            let (stop, operations, problems) = (Arc::clone(&stop), Arc::clone(&operations), Arc::clone(&problems));
            let root = directory.join("churn");
            std::thread::spawn(move || {
                let complain = |what: String| {
                    let mut problems = problems.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    if problems.len() < PROBLEMS_MAX {
                        problems.push(what);
                    }
                };
                let made =
                    (0..DIRECTORY_COUNT).try_for_each(|number| fs::create_dir_all(root.join(number.to_string())));
                if let Err(error) = made {
                    return complain(format!("making directories: {error}"));
                }
                let (mut random, mut files) = (fastrand::Rng::with_seed(seed), Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    if let Err(what) = step(&root, &mut random, &mut files) {
                        complain(what);
                    }
                    operations.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(PAUSE);
                }
            })
        };
        Churn { stop, operations, problems, thread: Some(thread) }
    }

    /// Ends; returns the operations and the problems.
    pub fn end(mut self) -> (u64, Vec<String>) {
        self.join();
        let problems = self.problems.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        (self.operations.load(Ordering::Relaxed), problems)
    }

    fn join(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.problems.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push("the churn panicked".to_owned());
        }
    }
}

impl Drop for Churn {
    fn drop(&mut self) {
        self.join();
    }
}

fn step(root: &Path, random: &mut fastrand::Rng, files: &mut Vec<Known>) -> Result<(), String> {
    let place = |random: &mut fastrand::Rng| {
        root.join(random.u32(..DIRECTORY_COUNT).to_string()).join(format!("file-{:016x}", random.u64(..)))
    };
    let chosen = random.usize(..files.len().max(1));
    let what = if files.is_empty() { 0 } else { random.u32(..10) };
    let failed = |doing: &str, path: &Path, error: io::Error| format!("{doing} {}: {error}", path.display());
    match what {
        0..3 if files.len() < FILES_MAX => {
            let known = Known { path: place(random), seed: random.u64(..), page_count: random.u32(1..PAGES_MAX) };
            let made = File::create_new(&known.path).and_then(|mut file| append(&mut file, &known, 0));
            made.map_err(|error| failed("making", &known.path, error))?;
            files.push(known);
        }
        0..=3 => {
            let known = files.swap_remove(chosen);
            fs::remove_file(&known.path).map_err(|error| failed("removing", &known.path, error))?;
        }
        4 => {
            let to = place(random);
            fs::rename(&files[chosen].path, &to).map_err(|error| failed("renaming", &files[chosen].path, error))?;
            files[chosen].path = to;
        }
        5 => {
            // It replaces another file, which is gone then.
            let gone = files.swap_remove(chosen);
            let Some(other) = files.first_mut() else { return Ok(()) };
            fs::rename(&other.path, &gone.path).map_err(|error| failed("renaming over", &gone.path, error))?;
            other.path = gone.path;
        }
        6 => {
            let known = &mut files[chosen];
            known.page_count = random.u32(..known.page_count + 1);
            let bytes = u64::from(known.page_count) * PAGE_SIZE as u64;
            let cut = File::options().write(true).open(&known.path).and_then(|file| file.set_len(bytes));
            cut.map_err(|error| failed("truncating", &known.path, error))?;
        }
        7 => {
            let known = &mut files[chosen];
            let first = known.page_count;
            known.page_count = (first + random.u32(1..4)).min(PAGES_MAX.max(first));
            let file = File::options().append(true).open(&known.path);
            let appended = file.and_then(|mut file| append(&mut file, known, first));
            appended.map_err(|error| failed("appending to", &known.path, error))?;
        }
        _ => {
            let known = &files[chosen];
            let mut bytes = Vec::new();
            let read = File::open(&known.path).and_then(|mut file| {
                // As if the cache were full: the next read comes from elsewhere.
                let _only_advice = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
                file.read_to_end(&mut bytes)
            });
            read.map_err(|error| failed("reading", &known.path, error))?;
            if bytes.len() != known.page_count as usize * PAGE_SIZE {
                return Err(format!(
                    "{} has {} bytes instead of {} pages",
                    known.path.display(),
                    bytes.len(),
                    known.page_count
                ));
            }
            for (index, page) in (0..).zip(bytes.as_chunks::<PAGE_SIZE>().0) {
                let name = Name { seed: known.seed, file: 0, index };
                if let Some(wrong) = name.compare(1, page) {
                    return Err(format!("WRONG BYTES in {} page {index}: {wrong}", known.path.display()));
                }
            }
        }
    }
    Ok(())
}

fn append(file: &mut File, known: &Known, first: u32) -> io::Result<()> {
    for index in first..known.page_count {
        let mut page = [0; PAGE_SIZE];
        Name { seed: known.seed, file: 0, index }.write(1, &mut page);
        file.write_all(&page)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_directory_gives_no_reason_to_complain() {
        let scratch = testbed::Scratch::new("chaos-churn").unwrap();
        let (mut random, mut files) = (fastrand::Rng::with_seed(1), Vec::new());
        (0..DIRECTORY_COUNT).for_each(|number| fs::create_dir(scratch.path().join(number.to_string())).unwrap());
        (0..3000).for_each(|_| step(scratch.path(), &mut random, &mut files).unwrap());
        assert!(files.len() > 50);
        let longest = files.iter().max_by_key(|known| known.page_count).unwrap();
        let mut bytes = fs::read(&longest.path).unwrap();
        bytes[5] ^= 1;
        fs::write(&longest.path, bytes).unwrap();
        let problem = (0..100_000).find_map(|_| step(scratch.path(), &mut random, &mut files).err());
        assert!(problem.unwrap().contains("WRONG BYTES"));
    }
}
