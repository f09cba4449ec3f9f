//! Requests that wait for the backing file system, with real daemons: they delay neither cached
//! reads nor reads from a lender.

mod setup;

use rustix::fs::{Advice, fadvise};
use setup::{Lender, Mount, PATIENCE, can_run, evict, tool, write_pages};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::{JoinHandle, spawn};
use testbed::{FileSystem, Frozen, Group, Lease, RamDisk, Scratch, SlowDisk};

/// Pages that the lender has.
const LENT: usize = 512;
/// Readers of pages that only the disk has, and reads of the disk in a second.
const COLD_READERS: usize = 24;
const READS_PER_S: u32 = 1;
/// Pages of their file. Each is read once.
const COLD: usize = 1 << 14;
/// Reads of the disk after which the reads of lent pages are to be done. (It takes four minutes;
/// where they waited for each other, not twenty of the lent ones were.)
const COLD_MAX: usize = LENT / 2;

/// An ext4 in memory, a mount over it, and a lender.
struct World {
    disk: RamDisk,
    at: PathBuf,
    lender: Lender,
    /// Behind those who use it.
    _scratch: Scratch,
}

impl World {
    fn new(test: &str) -> Option<World> {
        if !can_run(test) || tool(test, "mkfs.ext4").is_none() || tool(test, "fsfreeze").is_none() {
            return None;
        }
        let scratch = Scratch::new(test).unwrap();
        let disk = RamDisk::create(&scratch, FileSystem::Ext4, 128 << 20).unwrap();
        let at = scratch.directory("mount").unwrap();
        let lender = Lender::start(scratch.path(), "16MiB", &[]);
        Some(World { disk, at, lender, _scratch: scratch })
    }

    fn mount(&self, groups: &[&Group]) -> Mount {
        Mount::start_in(&self.disk.path, &self.at, &["--lender", &self.lender.address], groups)
    }

    /// A file through the mount, without read-ahead.
    fn open(&self, name: &str) -> File {
        let file = File::open(self.at.join(name)).unwrap();
        fadvise(&file, 0, None, Advice::Random).unwrap();
        file
    }

    /// Writes a file below, of which nothing is cached there.
    fn write_cold(&self, name: &str, pages: usize) -> Vec<u8> {
        let path = self.disk.path.join(name);
        let bytes = write_pages(&path, pages, pages as u64);
        File::open(&path).unwrap().sync_all().unwrap();
        evict(&path);
        bytes
    }

    /// Has the lender keep all pages of the file `lent`, and nothing else.
    fn lend(&self, mount: &Mount) {
        let path = self.at.join("lent");
        mount.wait_for("the pages to be lent", |status| {
            let is_quiet = status.puts_under_way == 0
                && status.tap.clone().unwrap_or_default().captured_pages == status.borrower.evictions;
            let are_lent = is_quiet && status.catalog.live_pages == LENT as u64;
            if is_quiet && !are_lent {
                fs::read(&path).unwrap();
                evict(&path);
            }
            are_lent
        });
    }
}

fn page(file: &File, number: usize) -> [u8; 4096] {
    let mut page = [0; 4096];
    file.read_exact_at(&mut page, number as u64 * 4096).unwrap();
    page
}

/// Threads that keep a slow disk busy, until this is dropped.
struct ColdReaders<'a> {
    disk: &'a SlowDisk,
    stop: Arc<AtomicBool>,
    done: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl ColdReaders<'_> {
    fn start<'a>(world: &World, disk: &'a SlowDisk) -> ColdReaders<'a> {
        let (stop, done) = <(Arc<AtomicBool>, Arc<AtomicUsize>)>::default();
        let read = |reader: usize| {
            let (file, stop, done) = (world.open("cold"), stop.clone(), done.clone());
            spawn(move || {
                // Apart, so that none is read with another.
                for number in (reader..COLD / 16).step_by(COLD_READERS).take_while(|_| !stop.load(Relaxed)) {
                    page(&file, number * 16);
                    done.fetch_add(1, Relaxed);
                }
            })
        };
        let threads = (0..COLD_READERS).map(read).collect();
        ColdReaders { disk, stop, done, threads }
    }
}

impl Drop for ColdReaders<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let _ = self.disk.limit_reads(None);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

#[test]
fn lent_pages_are_read_while_the_disk_is_waited_for() {
    let test = "lent_pages_are_read_while_the_disk_is_waited_for";
    let Some(world) = World::new(test) else { return };
    let slow = match SlowDisk::create(test, &world.disk.path) {
        Ok(slow) => slow,
        Err(error) => return testbed::skip(test, error),
    };
    let group = Group::create(test, None, Some(&slow)).unwrap();
    world.write_cold("cold", COLD);
    let bytes = world.write_cold("lent", LENT);
    let mount = world.mount(&[&group]);
    world.lend(&mount);
    let (lent, before) = (world.open("lent"), mount.count(|of| of.lender_pages));
    slow.limit_reads(Some(READS_PER_S)).unwrap();
    let cold = ColdReaders::start(&world, &slow);
    assert!(testbed::wait_until(PATIENCE, || cold.done.load(Relaxed) > 0), "the disk is not read");
    let mut read = 0;
    while read < LENT && cold.done.load(Relaxed) < COLD_MAX {
        assert!(page(&lent, read) == bytes[read * 4096..][..4096]);
        read += 1;
    }
    let disk_reads = cold.done.load(Relaxed);
    drop(cold);
    println!("{read} reads of lent pages beside {disk_reads} of the disk");
    assert_eq!(read, LENT, "{disk_reads} reads of the disk");
    assert!(mount.count(|of| of.lender_pages) >= before + LENT as u64 / 2, "{}", mount.status());
}

/// Runs `action` in a thread of its own, and fails unless it ends in time.
fn answers<T: Send + 'static>(what: &str, action: impl FnOnce() -> T + Send + 'static) -> T {
    testbed::answers(what, PATIENCE, action)
}

#[test]
fn a_frozen_file_system_is_read_from_the_cache_and_the_lender() {
    let Some(world) = World::new("a_frozen_file_system_is_read_from_the_cache_and_the_lender") else { return };
    let bytes = world.write_cold("lent", LENT);
    let mount = world.mount(&[]);
    world.lend(&mount);
    fs::write(world.at.join("cached"), [7; 4096]).unwrap();
    let (cached, lent) = (world.open("cached"), world.open("lent"));
    assert_eq!(page(&cached, 0), [7; 4096]);
    let written = |number: usize| world.at.join(format!("written-{number}"));
    let files: Vec<_> = (0..12).map(|number| File::create(written(number)).unwrap()).collect();
    let writes = |status: &report::Mount| status.mount.requests.get("write").copied().unwrap_or(0);
    let before = writes(&mount.status());
    let lent_before = mount.count(|of| of.lender_pages);

    let frozen = Frozen::new(&world.disk.path).unwrap();
    let write = |mut file: File| spawn(move || file.write_all(b"when it is thawed").unwrap());
    let writers: Vec<_> = files.into_iter().map(write).collect();
    mount.wait_for("the writers to wait", |status| writes(status) == before + 12);
    assert!(answers("a cached page", move || page(&cached, 0)) == [7; 4096]);
    let read = answers("lent pages", move || (0..LENT).map(|number| page(&lent, number)).collect::<Vec<_>>());
    assert!(read.concat() == bytes);
    let at = world.at.clone();
    answers("statfs", move || rustix::fs::statvfs(at).unwrap());
    assert!(writers.iter().all(|writer| !writer.is_finished()), "it was not frozen");
    assert!(mount.count(|of| of.lender_pages) >= lent_before + LENT as u64 / 2, "{}", mount.status());

    drop(frozen);
    for (number, writer) in writers.into_iter().enumerate() {
        answers("a write to what is thawed", move || writer.join().unwrap());
        assert_eq!(fs::read(written(number)).unwrap(), b"when it is thawed");
    }
}

#[test]
fn an_open_that_waits_for_a_lease_survives_the_daemon() {
    let test = "an_open_that_waits_for_a_lease_survives_the_daemon";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    let bytes = write_pages(&source.join("file"), 4, 1);
    let mount = Mount::start(&source, &at, &[]);
    let waits = |status: &report::Mount| status.mount.waiting_opens == 1;
    let lease = Lease::take(&source.join("file"), false).unwrap();
    let path = at.join("file");
    let opener = spawn(move || fs::read(path).unwrap());
    mount.wait_for("the open to wait", waits);
    mount.kill_daemon();
    mount.wait_for("the open to wait again", waits);
    let upgraded = setup::pumapool(&["upgrade", at.to_str().unwrap()]);
    assert!(upgraded.status.success(), "{upgraded:?}");
    mount.wait_for("the open to wait after an upgrade", waits);
    assert!(!opener.is_finished());
    drop(lease);
    assert!(answers("the open", move || opener.join().unwrap()) == bytes);
    mount.wait_for("none to wait", |status| status.mount.waiting_opens == 0);
}
