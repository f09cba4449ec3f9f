//! Files that are passed through: the kernel reads and writes the backing files by itself, and what
//! is read afterwards is what is there.

mod support;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use support::own::{Own, answer_orders, file_of_test};
use support::*;

/// Whether files can be passed through here; else the test is skipped.
fn can_pass(test: &str) -> bool {
    if !can_mount(test) {
        return false;
    }
    let m = passthrough();
    fs::write(m.backing("probe"), "x").unwrap();
    let is_passed = fs::read(m.path("probe")).is_ok() && passed_opens(&m) == 1;
    if !is_passed {
        skip(test, "no FUSE passthrough: Linux 6.9, and a backing file system that is not stacked");
    }
    is_passed
}

fn passthrough() -> Mounted {
    Mounted::with(|config| config.pass = true)
}

fn passed_opens(m: &Mounted) -> u64 {
    m.mount().status().passed_opens
}

fn requests(m: &Mounted, kind: &str) -> u64 {
    m.mount().status().requests.get(kind).copied().unwrap_or(0)
}

fn read_write(m: &Mounted, name: &str) -> File {
    OpenOptions::new().read(true).write(true).open(m.path(name)).unwrap()
}

#[test]
fn what_lenders_are_of_no_use_to_is_read_without_us() {
    if !can_pass("what_lenders_are_of_no_use_to_is_read_without_us") {
        return;
    }
    let m = passthrough();
    let bytes = pattern(3 << 20, 1);
    fs::write(m.backing("a"), &bytes).unwrap();
    assert!(fs::read(m.path("a")).unwrap() == bytes);
    assert_eq!((passed_opens(&m), requests(&m, "read"), requests(&m, "flush")), (1, 0, 0));
    // Writes go through the daemon, and so do reads while the mount's page cache has the file.
    let mut file = read_write(&m, "a");
    file.write_all(b"new").unwrap();
    let mut read = vec![0; 6];
    File::open(m.path("a")).unwrap().read_exact(&mut read).unwrap();
    assert_eq!(read, [b"new", &bytes[3..6]].concat());
    assert_eq!((passed_opens(&m), requests(&m, "write")), (1, 1));
    assert!(requests(&m, "read") > 0);
}

#[test]
fn later_opens_are_of_the_same_kind() {
    if !can_pass("who_comes_later_has_it_as_who_has_it_open") {
        return;
    }
    let m = passthrough();
    let mut bytes = pattern(1 << 20, 2);
    fs::write(m.backing("a"), &bytes).unwrap();
    let reader = File::open(m.path("a")).unwrap();
    let writer = read_write(&m, "a");
    assert_eq!(passed_opens(&m), 2);
    writer.write_all_at(b"written past us", 5000).unwrap();
    bytes[5000..5015].copy_from_slice(b"written past us");
    let mut read = vec![0; bytes.len()];
    reader.read_exact_at(&mut read, 0).unwrap();
    assert!(read == bytes && fs::read(m.backing("a")).unwrap() == bytes);
    assert_eq!(requests(&m, "write"), 0);
    let mut mapping = Mapping::of(&writer);
    // Pages that the kernel reads ahead into the mount's page cache on demand must not be found
    // there later, although only the first store leaves a trace in the times of the file. (What was
    // seen to have changed before that is dropped meanwhile.)
    for round in 0..100u32 {
        mapping.store(9000, &round.to_le_bytes());
        fs::metadata(m.path("a")).unwrap();
        drop(File::open(m.path("a")).unwrap());
        rustix::fs::fadvise(&reader, 0, None, rustix::fs::Advice::WillNeed).unwrap();
    }
    wait_until("it was read ahead", || requests(&m, "read") > 0);
    mapping.store(9000, b"last");
    bytes[9000..9004].copy_from_slice(b"last");
    drop((reader, writer, mapping));
    let writer = cached_again(&m, "a");
    let mut read = vec![0; bytes.len()];
    writer.read_exact_at(&mut read, 0).unwrap();
    assert!(read == bytes, "cached again");
}

/// Opens a file that nobody has open or mapped any more. The backing file may be closed a moment
/// after the file on the mount.
fn cached_again(m: &Mounted, name: &str) -> File {
    let mut opened = None;
    wait_until("it is cached here again", || {
        drop(opened.take());
        let passed = passed_opens(m);
        opened = Some(read_write(m, name));
        passed_opens(m) == passed
    });
    opened.unwrap()
}

/// A mapping outlives the closing of what it was made from, and the kernel tells of that as if
/// nobody used the file any more.
#[test]
fn what_is_stored_through_an_older_mapping_is_read() {
    if !can_pass("what_is_stored_through_an_older_mapping_is_read") {
        return;
    }
    let m = passthrough();
    fs::write(m.backing("a"), pattern(64 << 10, 3)).unwrap();
    let reader = File::open(m.path("a")).unwrap();
    let writer = read_write(&m, "a");
    let mut mapping = Mapping::of(&writer);
    mapping.store(9000, b"older");
    drop((reader, writer));
    m.wait_until_closed();
    let later = read_write(&m, "a");
    let read = || {
        let mut read = [0; 5];
        later.read_exact_at(&mut read, 9000).unwrap();
        read
    };
    assert_eq!(&read(), b"older");
    // On a page that is to be written anyway: the times of the file do not move.
    mapping.store(9000, b"newer");
    assert_eq!(&read(), b"newer");
    // Nor does a mapping show older bytes than were written, be it one to read from.
    later.write_all_at(b"wrote", 20_000).unwrap();
    assert_eq!(mapping.load(20_000, 5), b"wrote");
    drop((later, mapping));
    let mut read = [0; 5];
    cached_again(&m, "a").read_exact_at(&mut read, 9000).unwrap();
    assert_eq!(&read, b"newer");
}

#[test]
fn set_id_bits_fall_where_files_are_passed() {
    use std::os::unix::fs::PermissionsExt;
    if !can_pass("set_id_bits_fall_where_files_are_passed") {
        return;
    }
    let m = passthrough();
    fs::write(m.backing("a"), "program").unwrap();
    fs::set_permissions(m.backing("a"), fs::Permissions::from_mode(0o6777)).unwrap();
    let path = m.path("a");
    let output = as_nobody(&format!("exec 3< {0}; printf another >> {0}", path.display()));
    assert!(output.status.success(), "{output:?}");
    assert_eq!((passed_opens(&m), requests(&m, "write")), (2, 0));
    assert_eq!(fs::read(m.backing("a")).unwrap(), b"programanother");
    assert_eq!(fs::metadata(m.backing("a")).unwrap().permissions().mode() & 0o7777, 0o777);
}

/// All of a file, mapped shared.
struct Mapped(*mut std::ffi::c_void, usize);

impl Mapped {
    fn of(file: &File) -> Mapped {
        let len = file.metadata().unwrap().len() as usize;
        let protection = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        let flags = rustix::mm::MapFlags::SHARED;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let memory = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, file, 0).unwrap() };
        Mapped(memory, len)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this length, lives as long as this value, and is used by nothing
        // else in this process. What other processes write meanwhile, the test knows.
        unsafe { std::slice::from_raw_parts_mut(self.0.cast(), self.1) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nothing refers to it any more.
        unsafe { rustix::mm::munmap(self.0, self.1).unwrap() };
    }
}

/// The other process: maps a file of the test, loads from the mapping, and stores into it.
#[test]
#[ignore = "a process of another test"]
fn maps() {
    let mut mapped: Option<Mapped> = None;
    answer_orders(|order| {
        let words: Vec<&str> = order.split(' ').collect();
        match (&words[..], &mut mapped) {
            (["map", descriptor], _) => mapped = Some(Mapped::of(&file_of_test(descriptor.parse().unwrap()))),
            (["unmap"], _) => mapped = None,
            (["store", offset, bytes], Some(mapped)) => {
                let (offset, bytes) =
                    (offset.parse::<usize>().unwrap(), serde_json::from_str::<Vec<u8>>(bytes).unwrap());
                mapped.bytes()[offset..offset + bytes.len()].copy_from_slice(&bytes);
            }
            (["load", offset, len], Some(mapped)) => {
                let (offset, len) = (offset.parse::<usize>().unwrap(), len.parse::<usize>().unwrap());
                return serde_json::to_string(&mapped.bytes()[offset..offset + len]).unwrap();
            }
            _ => panic!("{order}"),
        }
        "done".to_owned()
    });
}

/// A shared mapping of a file of the mount, in a process of its own: this process serves the mount,
/// so it must not wait in a page fault.
struct Mapping(Own);

impl Mapping {
    /// Starts the process. Nothing is mapped yet.
    fn start() -> Mapping {
        Mapping(Own::start("maps"))
    }

    fn of(file: &File) -> Mapping {
        let mut mapping = Mapping::start();
        mapping.map(file);
        mapping
    }

    /// Maps all of the file, instead of what was mapped. The process has the file open only until
    /// it is mapped.
    fn map(&mut self, file: &File) {
        self.order(&format!("map {}", file.as_raw_fd()));
    }

    fn unmap(&mut self) {
        self.order("unmap");
    }

    fn load(&mut self, offset: usize, len: usize) -> Vec<u8> {
        serde_json::from_str(&self.0.ask(&format!("load {offset} {len}")).unwrap()).unwrap()
    }

    fn store(&mut self, offset: usize, bytes: &[u8]) {
        self.order(&format!("store {offset} {}", serde_json::to_string(bytes).unwrap()));
    }

    fn order(&mut self, order: &str) {
        assert_eq!(self.0.ask(order).as_deref(), Some("done"), "{order}");
    }
}

/// For all kinds and orders of opens, a read returns the bytes of the file.
#[test]
fn no_order_of_opens_shows_older_bytes() {
    if !can_pass("no_order_of_opens_shows_older_bytes") {
        return;
    }
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let m = passthrough();
    let mut bytes = Vec::new();
    let mut name = String::new();
    let mut open: Vec<(File, bool)> = Vec::new();
    let mut mapping = Mapping::start();
    let mut opens = 0;
    for steps in 0..5000 {
        // A file that was cached once stays so while the kernel knows it, so the test uses a new
        // file now and then.
        if bytes.is_empty() || open.is_empty() && random.u32(0..4) == 0 {
            name = format!("file-{steps}");
            bytes = pattern(64 << 12, seed ^ steps);
            fs::write(m.backing(&name), &bytes).unwrap();
        }
        let at = random.usize(0..bytes.len() - 5000);
        match random.u32(0..10) {
            0 | 1 if open.len() < 4 => {
                let writes = random.u32(0..3) == 0;
                let file = if writes { read_write(&m, &name) } else { File::open(m.path(&name)).unwrap() };
                open.push((file, writes));
                opens += 1;
            }
            2 | 3 if !open.is_empty() => drop(open.swap_remove(random.usize(0..open.len()))),
            4 if open.is_empty() => {
                // Beside the mount: seen by who opens it next.
                let news = pattern(100, steps);
                OpenOptions::new().write(true).open(m.backing(&name)).unwrap().write_all_at(&news, at as u64).unwrap();
                bytes[at..at + 100].copy_from_slice(&news);
            }
            _ if open.is_empty() => {}
            kind => {
                let (file, writes) = &open[random.usize(0..open.len())];
                if kind < 7 && *writes {
                    let news = pattern(random.usize(1..5000), steps);
                    bytes[at..at + news.len()].copy_from_slice(&news);
                    match kind {
                        5 => {
                            mapping.map(file);
                            mapping.store(at, &news);
                            mapping.unmap();
                        }
                        _ => file.write_all_at(&news, at as u64).unwrap(),
                    }
                } else if kind == 7 {
                    let advice = [rustix::fs::Advice::WillNeed, rustix::fs::Advice::DontNeed][random.usize(0..2)];
                    rustix::fs::fadvise(file, 0, None, advice).unwrap();
                } else {
                    let mut read = vec![0; random.usize(1..5000)];
                    file.read_exact_at(&mut read, at as u64).unwrap();
                    assert!(read == bytes[at..at + read.len()], "step {steps}, {name}");
                }
            }
        }
    }
    let passed = passed_opens(&m);
    println!("{passed} of {opens} opens were passed through");
    assert!(passed > 10 && opens - passed > 10, "both are to be tried");
    drop(open);
    m.end();
}
