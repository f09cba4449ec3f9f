//! The prediction of `pumapool advise` agrees with the hit ratio of a mount.
//!
//! The same reader, in a memory cgroup smaller than its files, reads a plain directory while
//! `advise` watches, and then the same files through a mount with a lender of the size that was
//! asked about.

mod setup;

use rustix::fs::Advice;
use serde_json::Value;
use setup::{Lender, Mount, PATIENCE, can_run, pumapool};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use testbed::{BlockDevice, Group, Process, Relay, Scratch, SlowDisk};

/// Pages of the file that is read at random: 32 MiB.
const PAGES: u64 = 8192;
/// Of the one that is streamed: 64 MiB.
const STREAM_PAGES: u64 = 16_384;
/// Memory of the reader and its page cache.
const GROUP_BYTES: u64 = 20 << 20;
/// The pool.
const POOL: &str = "8MiB";
/// A disk that is slower than a lender, and yet shows everything in some seconds.
const READS_PER_S: u32 = 2000;
/// How long `advise` watches; and where half of what the disk does is a stream, so that random
/// reads take twice as long to come back.
const SECONDS: &str = "7";
const MIXED_SECONDS: &str = "14";
/// How far the prediction may be off: five points.
const ERROR_MAX: f64 = 0.05;
/// A random read of that disk takes so long on average, in microseconds: one reader waits for each.
const DISK_US: f64 = 1e6 / READS_PER_S as f64;
/// `advise` prefers a disk that is slower than the pool by less than this factor.
const AS_FAST: f64 = 1.3;
/// Times that `advise` may find the lender of this machine farther away than such a disk.
const ATTEMPTS_MAX: u32 = 5;
/// Pages of the part of the file that fits into the page cache: 4 MiB.
const FITTING_PAGES: u64 = 1024;
/// A delay in each direction that makes a lender slower than any disk that a test can run on.
const FAR: Duration = Duration::from_millis(50);

/// Environment variable with the order of the reader.
const READER: &str = "PUMA_TEST_READER";

/// The reader's workload.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Workload {
    Uniform,
    Zipf,
    /// Reads by Zipf's law, and a concurrent stream.
    Mixed,
    Sequential,
    /// Uniform reads of [`FITTING_PAGES`].
    Fitting,
}

/// The reader: this program as another process. Without an order it does nothing.
#[test]
#[ignore = "the process that other tests measure"]
fn reader() {
    let Ok(order) = std::env::var(READER) else { return };
    let words: Vec<&str> = order.splitn(3, ' ').collect();
    let [workload, seed, folder] = words[..] else { panic!("{order}") };
    let mut random = fastrand::Rng::with_seed(seed.parse().unwrap());
    let folder = Path::new(folder);
    let mut buffer = vec![0; 128 << 10];
    if workload == "Sequential" {
        loop {
            let mut file = File::open(folder.join("stream")).unwrap();
            while file.read(&mut buffer).unwrap() > 0 {}
        }
    }
    let file = File::open(folder.join("file")).unwrap();
    rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
    let mut stream = File::open(folder.join("stream")).unwrap();
    let largest = (PAGES as f64).powf(0.3);
    loop {
        let page = match workload {
            "Uniform" => random.u64(..PAGES),
            "Fitting" => random.u64(..FITTING_PAGES),
            _ => {
                // Zipf with exponent 0.7, by its inverse; the ranks are spread over the file.
                let rank = (1.0 + random.f64() * (largest - 1.0)).powf(1.0 / 0.3) as u64;
                rank * 7919 % PAGES
            }
        };
        file.read_exact_at(&mut buffer[..4096], page * 4096).unwrap();
        // Hits take no time; more of them than this are no better a test.
        if workload == "Fitting" && random.u32(..64) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // As much from the stream as at random, by pages.
        if workload == "Mixed" && random.u32(..32) == 0 && stream.read(&mut buffer).unwrap() == 0 {
            stream = File::open(folder.join("stream")).unwrap();
        }
    }
}

fn read(workload: Workload, seed: u64, folder: &Path, groups: &[&Group]) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "reader", "--nocapture", "--test-threads=1"]);
    command.env(READER, format!("{workload:?} {seed} {}", folder.display()));
    Process::spawn(command, groups).unwrap()
}

/// The findings of `advise` about the directory while it is read, and the hit ratio of a pool of
/// [`POOL`] at the lender of this address.
fn advise(folder: &Path, lender: &str, seconds: &str) -> (Value, f64) {
    let arguments = ["advise", folder.to_str().unwrap(), "--json", "--for", seconds, "--size", POOL];
    let lender = ["--lender", lender, "--key", setup::key_file()];
    let output = pumapool(&[&arguments[..], &lender].concat());
    assert!(output.status.success(), "{output:?}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let ratio = found["sizes"][0]["hit_ratio"].as_f64().unwrap();
    (found, ratio)
}

/// Whether the lender of this machine was nearer than the disk: then remote memory is of use to
/// these workloads. On a busy machine even the fastest ping may take longer.
///
/// # Panics
/// Panics if the verdict contradicts that.
fn is_advised_by_distance(found: &Value) -> bool {
    let us = |name: &str| found[name].as_f64().unwrap_or_else(|| panic!("no {name}: {found}"));
    assert!(us("disk_us") > DISK_US * 0.8, "reads wait for the limit of the disk: {found}");
    let is_nearer = us("pool_us") * AS_FAST <= us("disk_us");
    let why = found["why"].as_str().unwrap_or_default();
    if is_nearer {
        assert_eq!(found["advice"], "use", "{found}");
    } else {
        assert_eq!(found["advice"], "do-not", "{found}");
        assert!(why.contains("as fast as the network"), "{found}");
        println!("the fastest ping of the lender took longer than the disk ({why}): watching again");
    }
    is_nearer
}

/// Share of the misses that the pool answers, once it is filled, over `misses` of them: as many as
/// were watched, because what the page cache keeps of a mixture changes for a while.
fn measure(mount: &Mount, misses: u64) -> f64 {
    let wait_for = |misses: u64| {
        let counts = || {
            let of = mount.status().borrower;
            (of.lender_pages + of.buffer_pages + of.zero_pages, of.backing_pages)
        };
        let passed = || {
            let (remote, below) = counts();
            remote + below > misses
        };
        assert!(testbed::wait_until(PATIENCE, passed), "{}", mount.status());
        counts()
    };
    let before = wait_for(2 * PAGES);
    let after = wait_for(before.0 + before.1 + misses);
    let (remote, below) = (after.0 - before.0, after.1 - before.1);
    remote as f64 / (remote + below) as f64
}

/// A directory with files on a block device, for a test.
struct World {
    test: &'static str,
    scratch: Scratch,
    source: PathBuf,
    /// The seed of the contents, and of the reader.
    seed: u64,
}

impl World {
    /// Writes files of so many pages to the disk. Skips the test, and returns None, if this machine
    /// cannot run it.
    fn new(test: &'static str, files: &[(&str, u64)]) -> Option<World> {
        if !can_run(test) {
            return None;
        }
        let parent = Path::new("/var/tmp");
        if let Err(error) = BlockDevice::holding(parent) {
            testbed::skip(test, error);
            return None;
        }
        let seed = fastrand::u64(..);
        println!("{test}: seed {seed}");
        let scratch = Scratch::new_in(parent, test).unwrap();
        let source = scratch.directory("source").unwrap();
        for (nth, (name, pages)) in (0..).zip(files) {
            setup::write_pages(&source.join(name), *pages as usize, seed.wrapping_add(nth));
        }
        rustix::fs::sync();
        Some(World { test, scratch, source, seed })
    }

    /// Creates the memory cgroup of a reader. Skips the test, and returns None, if this machine
    /// cannot run it.
    fn group(&self, disk: Option<&SlowDisk>) -> Option<Group> {
        let group = Group::create(self.test, Some(GROUP_BYTES), disk);
        group.inspect_err(|error| testbed::skip(self.test, error)).ok()
    }
}

#[test]
fn what_is_predicted_is_what_comes() {
    let test = "what_is_predicted_is_what_comes";
    let Some(world) = World::new(test, &[("file", PAGES), ("stream", STREAM_PAGES)]) else { return };
    let World { scratch, source, seed, .. } = &world;
    let at = scratch.directory("mount").unwrap();
    let disk = match SlowDisk::create(test, source) {
        Ok(disk) => disk,
        Err(error) => return testbed::skip(test, error),
    };
    disk.limit_reads(Some(READS_PER_S)).unwrap();
    let lender = Lender::start(scratch.path(), POOL, &[]);
    for workload in [Workload::Uniform, Workload::Zipf, Workload::Mixed] {
        let Some(group) = world.group(Some(&disk)) else { return };
        let seconds = if workload == Workload::Mixed { MIXED_SECONDS } else { SECONDS };
        let watch = |_| {
            ["file", "stream"].iter().for_each(|name| setup::evict(&source.join(name)));
            let _reader = read(workload, *seed, source, &[&group]);
            advise(source, &lender.address, seconds)
        };
        let nearer = (0..ATTEMPTS_MAX).map(watch).find(|(found, _)| is_advised_by_distance(found));
        let (found, predicted) = nearer.expect("a lender of this machine is nearer than its slow disk");
        assert_eq!(found["lost_records"], 0, "{found}");
        assert_eq!(found["pool_is_measured"], true, "{found}");

        // A mount cannot count reads of passed files.
        let options = ["--lender", &lender.address, "--filter", "on", "--passthrough", "off"];
        let mount = Mount::start(source, &at, &options);
        let reader = read(workload, seed.wrapping_add(2), &at, &[&group]);
        let misses = found["missed_pages"].as_u64().unwrap();
        let measured = measure(&mount, misses.max(2 * PAGES));
        let curve = mount.status().curve;
        drop(reader);
        setup::umount(at.to_str().unwrap());
        // The pages outside the page cache fit into 16 MiB, except with the stream.
        let by_mount = curve.points.iter().find(|point| point.bytes == 16 << 20);
        let by_mount = by_mount.unwrap_or_else(|| panic!("{curve:?}")).hit_ratio;
        assert!((by_mount > 0.9) == (workload != Workload::Mixed), "{workload:?}: {curve:?}");
        println!(
            "{workload:?}: predicted {predicted:.3}, measured {measured:.3}; page cache {:.3}, disk {:.0} µs, pool {:.0} µs, advised {} MiB; \
             the mount says of 16 MiB: {by_mount:.3}",
            found["page_cache_hit_ratio"].as_f64().unwrap_or(f64::NAN),
            found["disk_us"].as_f64().unwrap_or(f64::NAN),
            found["pool_us"].as_f64().unwrap(),
            found["bytes"].as_u64().unwrap_or(0) >> 20,
        );
        assert!((predicted - measured).abs() <= ERROR_MAX, "{workload:?}: {predicted} {measured}\n{found}");
    }
}

/// Two workloads to which remote memory is of no use: everything fits into the page cache, or the
/// lender is farther away than the disk.
#[test]
fn it_advises_against_memory_that_is_of_no_use() {
    let test = "it_advises_against_memory_that_is_of_no_use";
    let Some(world) = World::new(test, &[("file", PAGES), ("stream", 1)]) else { return };
    let file = world.source.join("file");
    let lender = Lender::listen("127.0.0.1:0", POOL, &[]);
    let relay = Relay::start(lender.address.parse().unwrap()).unwrap();
    relay.delay(FAR);
    for (workload, reason) in [(Workload::Fitting, "all fits"), (Workload::Uniform, "as fast as the network")] {
        let Some(group) = world.group(None) else { return };
        setup::evict(&file);
        let _reader = read(workload, world.seed, &world.source, &[&group]);
        if workload == Workload::Fitting {
            let is_cached = || testbed::cached_pages(&file, PAGES * 4096).unwrap() >= FITTING_PAGES;
            assert!(testbed::wait_until(PATIENCE, is_cached), "the reader reads all of it");
        }
        let (found, _) = advise(&world.source, &relay.address().to_string(), "3");
        assert_eq!(found["advice"], "do-not", "{workload:?}: {found}");
        assert!(found["why"].as_str().unwrap().contains(reason), "{workload:?}: {found}");
        assert!(found["pool_us"].as_f64().unwrap() >= 2e6 * FAR.as_secs_f64(), "{found}");
    }
}

#[test]
fn it_knows_no_better_where_only_streams_are_read_over_and_over() {
    let test = "it_knows_no_better_where_only_streams_are_read_over_and_over";
    let Some(world) = World::new(test, &[("stream", STREAM_PAGES)]) else { return };
    let World { scratch, source, seed, .. } = &world;
    setup::evict(&source.join("stream"));
    let Some(group) = world.group(None) else { return };
    let _reader = read(Workload::Sequential, *seed, source, &[&group]);
    let picture = scratch.path().join("curve.svg");
    // As on kernels that tell less.
    for reads in ["page-cache", "system-calls"] {
        let picture = ["--picture", picture.to_str().unwrap(), "--reads", reads];
        let output = pumapool(&[&["advise", source.to_str().unwrap(), "--json", "--for", "2"][..], &picture].concat());
        assert!(output.status.success(), "{output:?}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(found["advice"], "unclear", "{found}");
        assert!(found["why"].as_str().unwrap().contains("over and over"), "{found}");
        let (pool_bytes, file_bytes) = (found["sequential_pool_bytes"].as_u64().unwrap(), STREAM_PAGES * 4096);
        assert!((file_bytes / 2..file_bytes * 5 / 4).contains(&pool_bytes), "{found}");
    }
    assert!(std::fs::read_to_string(&picture).unwrap().contains("<polyline"));
}

#[test]
fn what_cannot_be_watched_is_said_in_a_line() {
    let test = "what_cannot_be_watched_is_said_in_a_line";
    if !can_run(test) {
        return;
    }
    for (arguments, word) in [
        (&["advise", "/nonexistent"][..], "/nonexistent"),
        (&["advise"], "required"),
        (&["advise", "/", "--picture", "x.jpg"], "neither an .svg nor a .png"),
        (&["advise", "/", "--lender", "127.0.0.1:1"], "there is no key"),
        (&["advise", "/", "--lend"], "cannot be used with"),
        (&["advise", "/", "--for", "0"], "--for"),
    ] {
        let output = pumapool(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(word), "{arguments:?}: {said}");
    }
    // An ordinary user is told what to do.
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]);
    let copy = Scratch::new(test).unwrap();
    let program = copy.path().join("pumapool");
    std::fs::copy(setup::PUMAPOOL, &program).unwrap();
    std::fs::set_permissions(copy.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = command.arg(&program).args(["advise", "/"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("run it as root"), "{output:?}");
}

#[test]
fn it_says_what_could_be_lent() {
    let output = pumapool(&["advise", "--lend", "--json", "--for", "1"]);
    let lending: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let bytes = |name: &str| lending[name].as_u64().unwrap();
    assert!(
        bytes("capacity_bytes") + bytes("reserve_bytes") <= bytes("spare_min_bytes") || bytes("capacity_bytes") == 0
    );
    assert!(bytes("free_min_bytes") <= bytes("total_bytes") && !lending["why"].as_str().unwrap().is_empty());
}
