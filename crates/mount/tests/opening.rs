//! An open shows all external changes, however slow they are, and wherever the file ends.

mod support;

use mount::WriteMode;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use support::own::{Own, answer_orders};
use support::*;
use testbed::LateMemory;

/// The kernel moves the times of a file before its bytes: who opens the file in between sees the
/// times that it has afterwards, too.
#[test]
fn an_external_change_in_progress_is_seen_by_the_next_open() {
    let test = "a_change_beside_that_was_under_way_is_seen_by_whoever_opens_the_file_after_it";
    if !can_mount(test) {
        return;
    }
    both_modes(|m| {
        for nth in 0..tries(2) {
            let is_open_before = nth % 2 == 0;
            let Ok(memory) = LateMemory::new(2 * PAGE) else { return skip(test, "no userfaultfd") };
            memory.arrive(0, &[b'n'; PAGE]).unwrap();
            let name = format!("a{nth}");
            fs::write(m.backing(&name), [b'o'; 2 * PAGE]).unwrap();
            if is_open_before {
                assert_eq!(fs::read(m.path(&name)).unwrap(), [b'o'; 2 * PAGE]);
            }
            std::thread::scope(|scope| {
                let writer = File::options().write(true).open(m.backing(&name)).unwrap();
                let memory = &memory;
                let _end = memory.arrives_at_the_end();
                let write = scope.spawn(move || memory.write_to(&writer, 0).unwrap());
                memory.wait(ANSWER_MAX).unwrap();
                // Twice, as there may be something to be dropped of what the first one has read.
                for _ in 0..2 {
                    assert_eq!(fs::read(m.path(&name)).unwrap().len(), 2 * PAGE);
                }
                memory.arrive(PAGE, &[b'n'; PAGE]).unwrap();
                write.join().unwrap();
            });
            for nth in 0..5 {
                let read = fs::read(m.path(&name)).unwrap();
                assert_eq!((read[0], read[PAGE]), (b'n', b'n'), "{name}, open {nth}");
            }
            fs::remove_file(m.path(&name)).unwrap();
        }
    });
}

/// The other process: opens a file, and loads its last byte through a mapping; the order has the
/// size in bytes and the path. Nothing tells the process of the size, or asks for it.
#[test]
#[ignore = "a process of another test"]
fn maps() {
    answer_orders(|order| {
        let (bytes, path) = order.split_once(' ').unwrap();
        let bytes: usize = bytes.parse().unwrap();
        let file = File::open(path).unwrap();
        // SAFETY: a new mapping, of which nothing is used after it has gone. Behind the end that
        // the kernel believes in, a load ends this process, which is what is looked for.
        let last = unsafe {
            let at = mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0).unwrap();
            let last = at.cast::<u8>().add(bytes - 1).read_volatile();
            munmap(at, bytes).unwrap();
            last
        };
        char::from(last).to_string()
    });
}

/// The other process: reads the last byte of a file that was just opened, as above.
#[test]
#[ignore = "a process of another test"]
fn reads() {
    answer_orders(|order| {
        let (bytes, path) = order.split_once(' ').unwrap();
        let file = File::open(path).unwrap();
        let mut last = [0; 1];
        let read = file.read_at(&mut last, bytes.parse::<u64>().unwrap() - 1).unwrap();
        String::from_utf8_lossy(&last[..read]).into_owned()
    });
}

/// The other process: looks at a file's size, over and over, until no more orders can come.
#[test]
#[ignore = "a process of another test"]
fn looks() {
    answer_orders(|path| {
        let path = path.to_owned();
        std::thread::spawn(move || {
            loop {
                let _ = fs::metadata(&path);
            }
        });
        "looks".to_owned()
    });
}

/// The other process: stores a byte into a file through a mapping, which it keeps; the order has
/// where, and the path. Nobody syncs it.
#[test]
#[ignore = "a process of another test"]
fn stores() {
    const MAPPED_BYTES: usize = 128 << 20;
    let mut mapped = None;
    answer_orders(|order| {
        let (offset, path) = order.split_once(' ').unwrap();
        let start = *mapped.get_or_insert_with(|| {
            let file = File::options().read(true).write(true).open(path).unwrap();
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping, which nothing else uses.
            unsafe { mmap(std::ptr::null_mut(), MAPPED_BYTES, protection, MapFlags::SHARED, &file, 0) }.unwrap()
        });
        let offset = offset.parse::<usize>().unwrap();
        assert!(offset < MAPPED_BYTES);
        // SAFETY: within the mapping, which stays; the test says a place before the end of the
        // file.
        unsafe { start.cast::<u8>().add(offset).write_volatile(b'S') };
        "stored".to_owned()
    });
}

/// An open of a file that has grown externally shows its new end to whoever maps it or reads there,
/// without a look at its size; also if the page of the older end has to be written back first.
#[test]
fn an_open_of_an_externally_grown_file_finds_its_new_end() {
    let test = "whoever_opens_a_file_that_has_grown_beside_finds_its_new_end";
    if !can_mount(test) {
        return;
    }
    let rounds = tries(300);
    let seed = fastrand::u64(..);
    println!("{test}: seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let kinds = [(false, false), (true, false), (false, true)];
    let both = [WriteMode::Through, WriteMode::Back].into_iter().flat_map(|write| kinds.map(|kind| (write, kind)));
    for (write, (has_looker, has_storer)) in both {
        let m = Mounted::with(|config| config.write = write);
        let (path, backing) = (m.path("file"), m.backing("file"));
        let file = File::create(&backing).unwrap();
        file.write_all_at(b"0", 0).unwrap();
        let mut others = [Own::start("maps"), Own::start("reads")];
        let mut storer = has_storer.then(|| Own::start("stores"));
        let _looker = has_looker.then(|| {
            let mut looker = Own::start("looks");
            assert_eq!(looker.ask(path.to_str().unwrap()).as_deref(), Some("looks"));
            looker
        });
        let mut bytes = 1;
        for round in 0..rounds {
            let which = format!("round {round} of {rounds}, {write:?}, looker {has_looker}, storer {has_storer}");
            if bytes > 64 << 20 {
                bytes = 1;
                file.set_len(bytes).unwrap();
            }
            // The kernel knows the size of now.
            let _ = fs::metadata(&path).unwrap();
            if let Some(storer) = &mut storer {
                let found = storer.ask(&format!("{} {}", bytes - 1, path.display()));
                assert_eq!(found.as_deref(), Some("stored"), "{which}");
            }
            // A page that is dirty is written back whole: who changes it externally as well may
            // lose that.
            bytes += random.u64(if has_storer { PAGE as u64 } else { 1 }..100_000);
            let last = char::from(random.u8(b'a'..=b'z'));
            file.write_all_at(&[last as u8], bytes - 1).unwrap();
            let own = random.choice(&mut others).unwrap();
            let found = own.ask(&format!("{bytes} {}", path.display()));
            let Some(found) = found else { panic!("{which}: SIGBUS") };
            assert_eq!(found, last.to_string(), "{which}");
        }
    }
}

/// An open of a file that was cut externally shows its new end to whoever maps it or reads there,
/// without a look at its size: nothing lies behind it, and zeros in the rest of its page.
#[test]
fn an_open_of_an_externally_cut_file_finds_its_new_end() {
    let test = "whoever_opens_a_file_that_was_cut_beside_finds_its_new_end";
    if !can_mount(test) {
        return;
    }
    let rounds = tries(100);
    let seed = fastrand::u64(..);
    println!("{test}: seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let m = Mounted::through();
    let (path, backing) = (m.path("file"), m.backing("file"));
    for has_looker in [false, true] {
        let file = File::create(&backing).unwrap();
        let (mut mapper, mut reader) = (Own::start("maps"), Own::start("reads"));
        let _looker = has_looker.then(|| {
            let mut looker = Own::start("looks");
            assert_eq!(looker.ask(path.to_str().unwrap()).as_deref(), Some("looks"));
            looker
        });
        for round in 0..rounds {
            let before = random.u64(2..20_000);
            file.set_len(0).unwrap();
            file.write_all_at(&vec![b'o'; before as usize], 0).unwrap();
            // The kernel knows the size of now, and has all bytes.
            let read = fs::read(&path).unwrap();
            assert_eq!(read.len() as u64, before);
            let bytes = random.u64(1..before);
            file.set_len(bytes).unwrap();
            let which = format!("round {round} of {rounds}, looker {has_looker}, {before} bytes cut to {bytes}");
            let order = format!("{before} {}", path.display());
            if random.bool() {
                assert_eq!(reader.ask(&order).as_deref(), Some(""), "{which}");
                continue;
            }
            let found = mapper.ask(&order);
            let is_behind = (before - 1) / PAGE as u64 > (bytes - 1) / PAGE as u64;
            assert_eq!(found.as_deref(), if is_behind { None } else { Some("\0") }, "{which}");
            if is_behind {
                mapper = Own::start("maps");
            }
        }
    }
}
