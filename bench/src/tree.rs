//! The worker's measurements of names and small files: it makes a tree, uses it like programs with
//! many files, and removes it.
//!
//! | phase | one operation |
//! |---|---|
//! | create | a file is made, written, and closed |
//! | stat | lstat of a file |
//! | list | a directory is read, and each entry's kind looked at, as `find` does |
//! | status | a directory is read, and each entry's attributes looked at, as `git status` does |
//! | build | as a compiler: a source is read, headers are looked for where they are not and found where they are, an object is written |
//! | rename | a file gets another name |
//! | unlink | a file is removed; at the end, the directories |

use crate::worker::Report;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Files of a directory.
const DIRECTORY_FILES: usize = 50;
/// Bytes of a file: like a source file, less than a page.
const FILE_BYTES: usize = 3000;
/// Headers that a build of a source looks up, in as many directories that do not have them.
const HEADERS: usize = 3;
/// One file in so many is built.
const BUILT_ONE_IN: usize = 4;

/// Names of the phases, in their order.
pub const PHASES: [&str; 7] = ["create", "stat", "list", "status", "build", "rename", "unlink"];

/// Runs all phases in a new directory below `at`. Returns the seconds of each.
pub fn run(at: &Path, files: usize) -> Result<Report, String> {
    let root = at.join("tree");
    let work = Work { root: root.clone(), files };
    let begin = Instant::now();
    let mut report = Report { operations: files as u64, ..Report::default() };
    let phases: [fn(&Work) -> io::Result<()>; 7] =
        [Work::create, Work::stat, Work::list, Work::status, Work::build, Work::rename, Work::unlink];
    for (name, phase) in PHASES.into_iter().zip(phases) {
        let begin = Instant::now();
        phase(&work).map_err(|error| format!("{name} in {}: {error}", root.display()))?;
        report.phase_seconds.push(begin.elapsed().as_secs_f64());
    }
    report.seconds = begin.elapsed().as_secs_f64();
    Ok(report)
}

struct Work {
    root: PathBuf,
    files: usize,
}

impl Work {
    fn directories(&self) -> usize {
        self.files.div_ceil(DIRECTORY_FILES)
    }

    /// Two levels, as in large trees.
    fn directory(&self, number: usize) -> PathBuf {
        self.root.join(format!("part-{}", number / DIRECTORY_FILES)).join(format!("directory-{number}"))
    }

    fn file(&self, number: usize, ending: &str) -> PathBuf {
        self.directory(number / DIRECTORY_FILES).join(format!("file-{number}.{ending}"))
    }

    fn create(&self) -> io::Result<()> {
        for number in 0..self.directories() {
            fs::create_dir_all(self.directory(number))?;
        }
        (0..self.files).try_for_each(|number| fs::write(self.file(number, "c"), vec![b'x'; FILE_BYTES]))
    }

    fn stat(&self) -> io::Result<()> {
        for number in 0..self.files {
            if fs::symlink_metadata(self.file(number, "c"))?.len() != FILE_BYTES as u64 {
                return Err(io::Error::other("a file has another size"));
            }
        }
        Ok(())
    }

    fn list(&self) -> io::Result<()> {
        let found = self.walk(|entry| Ok(u64::from(entry.file_type()?.is_file())))?;
        if found == self.files as u64 { Ok(()) } else { Err(io::Error::other(format!("{found} files were listed"))) }
    }

    fn status(&self) -> io::Result<()> {
        let bytes = self.walk(|entry| Ok(entry.metadata()?.len()))?;
        let whole = (self.files * FILE_BYTES) as u64;
        if bytes == whole { Ok(()) } else { Err(io::Error::other(format!("{bytes} bytes were found"))) }
    }

    /// Sums up a value of all files.
    fn walk(&self, look: impl Fn(&fs::DirEntry) -> io::Result<u64>) -> io::Result<u64> {
        let mut sum = 0;
        for number in 0..self.directories() {
            for entry in fs::read_dir(self.directory(number))? {
                sum += look(&entry?)?;
            }
        }
        Ok(sum)
    }

    fn build(&self) -> io::Result<()> {
        for number in (0..self.files).step_by(BUILT_ONE_IN) {
            let source = fs::read(self.file(number, "c"))?;
            for header in 1..=HEADERS {
                let header = (number + header * DIRECTORY_FILES) % self.files;
                if self.directory(number / DIRECTORY_FILES).join(format!("header-{header}.h")).try_exists()? {
                    return Err(io::Error::other("a header is there that nobody made"));
                }
                fs::metadata(self.file(header, "c"))?;
            }
            fs::write(self.file(number, "o"), source)?;
        }
        Ok(())
    }

    fn rename(&self) -> io::Result<()> {
        (0..self.files).try_for_each(|number| fs::rename(self.file(number, "c"), self.file(number, "d")))
    }

    fn unlink(&self) -> io::Result<()> {
        for number in 0..self.files {
            fs::remove_file(self.file(number, "d"))?;
            if number % BUILT_ONE_IN == 0 {
                fs::remove_file(self.file(number, "o"))?;
            }
        }
        fs::remove_dir_all(&self.root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testbed::Scratch;

    #[test]
    fn a_tree_is_used_and_gone() {
        let scratch = Scratch::new("bench-tree").unwrap();
        let report = run(scratch.path(), 120).unwrap();
        assert_eq!((report.operations, report.phase_seconds.len()), (120, PHASES.len()));
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    }
}
