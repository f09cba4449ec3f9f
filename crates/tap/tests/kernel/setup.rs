//! What the tests of the tap stand on: a file whose every page is known, a small memory cgroup, and
//! the tests' turn.

use page::{PAGE_SIZE, Page};
use rustix::fs::{Advice, fadvise};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tap::{BpfTap, LoadError, Target};

/// Where the files go: on the disk, where /tmp may be in memory.
const DIRECTORY: &str = "/var/tmp";

/// Superblock magics of file systems whose `st_dev` is the superblock's and whose pages reclaim
/// drops.
const EXT4: i64 = 0xef53;
const XFS: i64 = 0x5846_5342;

/// The tests measure and count what the whole machine does: one at a time.
pub fn exclusive() -> MutexGuard<'static, ()> {
    static EXCLUSIVE: Mutex<()> = Mutex::new(());
    EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub use testbed::skip;

/// A tap on the file's file system; `None` (and a line that says so) where there can be none.
pub fn tap_on(file: &KnownFile, ring_bytes: usize, test: &str) -> Option<BpfTap> {
    match BpfTap::load(
        Target { device: file.file.metadata().unwrap().dev(), tells_cgroup: true, takes_hints: true },
        ring_bytes,
    ) {
        Ok(tap) => Some(tap),
        Err(error @ (LoadError::NotPermitted { .. } | LoadError::FramesHidden | LoadError::NoKernelTypes)) => {
            skip(test, error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// What stands in page `index` of a file made with `seed`.
pub fn content(seed: u64, index: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    let mut state = seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for word in page.chunks_exact_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word.copy_from_slice(&(mixed ^ (mixed >> 27)).to_le_bytes());
    }
    page
}

/// A file of known pages; nameless unless asked, so that nothing is left behind.
pub struct KnownFile {
    pub file: File,
    pub pages: u64,
    /// What stands in it: kept, because comparing must be faster than the disk or the ring fills
    /// up.
    pub content: Vec<Page>,
    name: Option<PathBuf>,
}

impl KnownFile {
    /// A file with a name; `None` (and a line that says so) where there is no file system to tap.
    pub fn new(seed: u64, pages: u64, test: &str) -> Option<KnownFile> {
        println!("{test}: seed {seed:#x}, {pages} pages");
        let kind = rustix::fs::statfs(DIRECTORY).unwrap().f_type;
        if ![EXT4, XFS].contains(&kind) {
            skip(test, format!("{DIRECTORY} is neither ext4 nor XFS but {kind:#x}"));
            return None;
        }
        let named = tempfile::Builder::new().prefix("puma-tap-").tempfile_in(DIRECTORY).unwrap();
        let (file, name) = named.keep().unwrap();
        let content = (0..pages).map(|index| content(seed, index)).collect();
        let known = KnownFile { file, pages, content, name: Some(name) };
        (&known.file).write_all(known.content.as_flattened()).unwrap();
        known.file.sync_all().unwrap();
        known.drop_cache();
        Some(known)
    }

    pub fn path(&self) -> &Path {
        self.name.as_deref().expect("the file still has its name")
    }

    pub fn unlink(&mut self) {
        fs::remove_file(self.name.take().expect("the file still has its name")).unwrap();
    }

    /// Has the kernel drop its clean pages.
    pub fn drop_cache(&self) {
        fadvise(&self.file, 0, None, Advice::DontNeed).unwrap();
    }

    /// Reads all of it through the page cache.
    pub fn read(&self) {
        let mut reader = File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd())).unwrap();
        let mut buffer = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            match reader.read(&mut buffer).unwrap() {
                0 => break,
                n => bytes += n as u64,
            }
        }
        assert_eq!(bytes, self.pages * PAGE_SIZE as u64);
    }

    /// Reads all of it without read-ahead: single pages in the page cache, no large folios.
    pub fn read_page_by_page(&self) {
        fadvise(&self.file, 0, None, Advice::Random).unwrap();
        let mut page = [0; PAGE_SIZE];
        for index in 0..self.pages {
            self.file.read_exact_at(&mut page, index * PAGE_SIZE as u64).unwrap();
        }
        fadvise(&self.file, 0, None, Advice::Normal).unwrap();
    }

    /// `i_generation`, as the file system tells it.
    pub fn generation(&self) -> u32 {
        let mut generation: libc::c_long = 0;
        // SAFETY: the request writes at most a long to where its argument points.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), libc::FS_IOC_GETVERSION, &raw mut generation) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        generation as u32
    }
}

impl Drop for KnownFile {
    fn drop(&mut self) {
        if let Some(name) = self.name.take() {
            let _ = fs::remove_file(name);
        }
    }
}

/// A memory cgroup with a limit, of either version.
pub struct MemoryCgroup {
    path: PathBuf,
}

impl MemoryCgroup {
    pub fn new(limit_bytes: u64) -> io::Result<MemoryCgroup> {
        let name = format!("puma-tap-test-{}", std::process::id());
        let first = Path::new("/sys/fs/cgroup/memory");
        let second = Path::new("/sys/fs/cgroup");
        let (parent, limit) = if first.join("memory.limit_in_bytes").exists() {
            (first, "memory.limit_in_bytes")
        } else {
            fs::write(second.join("cgroup.subtree_control"), "+memory")?;
            (second, "memory.max")
        };
        let path = parent.join(name);
        fs::create_dir(&path)?;
        let cgroup = MemoryCgroup { path };
        fs::write(cgroup.path.join(limit), limit_bytes.to_string())?;
        Ok(cgroup)
    }

    /// Starts a process in the cgroup that reads the file `times` times.
    pub fn read(&self, file: &Path, times: u32) -> io::Result<Reader> {
        let script = r#"echo $$ > "$1/cgroup.procs" && for i in $(seq "$3"); do cat "$2" > /dev/null; done"#;
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).arg(&self.path).arg(file).arg(times.to_string()).stdin(Stdio::null());
        Ok(Reader(command.spawn()?))
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.path) {
            println!("removing {} failed: {error}", self.path.display());
        }
    }
}

/// A process that reads; ended when dropped.
pub struct Reader(Child);

impl Reader {
    pub fn is_done(&mut self) -> bool {
        match self.0.try_wait().unwrap() {
            Some(status) => {
                assert!(status.success(), "the reading process: {status}");
                true
            }
            None => false,
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
