//! A write(2) whose pages the kernel fills, lets go, drops and reads again before it sends the
//! WRITE.

mod support;

use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use support::own::{Own, answer_orders};
use support::*;
use testbed::LateMemory;

/// Where the other process stores.
const STORED_AT: usize = 100;

/// The other process: stores a byte into the first page of a file, through a mapping that stays.
#[test]
#[ignore = "a process of another test"]
fn stores() {
    let mut mapped = None;
    answer_orders(|order| match (order, mapped) {
        ("store", Some(at)) => {
            let at: *mut u8 = at;
            // SAFETY: it is a page that is mapped as long as this process lives, and nobody else
            // uses it.
            unsafe { at.add(STORED_AT).write_volatile(b's') };
            "stored".to_owned()
        }
        (path, _) => {
            let file = File::options().read(true).write(true).open(path).unwrap();
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping of a page that the file has.
            let at = unsafe { mmap(std::ptr::null_mut(), PAGE, access, MapFlags::SHARED, &file, 0).unwrap() };
            mapped = Some(at.cast());
            "mapped".to_owned()
        }
    });
}

#[test]
fn a_store_during_an_overtaken_write_does_not_bring_back_what_was_written_over() {
    let test = "a_store_beside_an_overtaken_write_does_not_bring_back_what_was_written_over";
    if !can_mount(test) {
        return;
    }
    let m = Mounted::through();
    let (path, backing) = (m.path("file"), m.backing("file"));
    let mut stores_seen = 0;
    let rounds = tries(20);
    for round in 0..rounds {
        let Ok(memory) = LateMemory::new(2 * PAGE) else { return skip(test, "no userfaultfd") };
        memory.arrive(0, &[b'n'; PAGE]).unwrap();
        fs::write(&backing, [b'o'; 2 * PAGE]).unwrap();
        let writer = File::options().read(true).write(true).open(&path).unwrap();
        let mut stores = Own::start("stores");
        std::thread::scope(|scope| {
            let (memory, writer) = (&memory, &writer);
            let _end = memory.arrives_at_the_end();
            let writing = scope.spawn(move || memory.write_to(writer, 0).unwrap());
            // The first page is filled and let go.
            memory.wait(ANSWER_MAX).unwrap();
            // An open after an external change has the kernel drop it.
            File::options().write(true).open(&backing).unwrap().write_all_at(b"o", 0).unwrap();
            assert_eq!(stores.ask(path.to_str().unwrap()).as_deref(), Some("mapped"));
            assert_eq!(stores.ask("store").as_deref(), Some("stored"));
            memory.arrive(PAGE, &[b'n'; PAGE]).unwrap();
            writing.join().unwrap();
        });
        writer.sync_all().unwrap();
        let found = fs::read(&backing).unwrap();
        assert!(fs::read(&path).unwrap() == found, "round {round}: the mount shows what the backing file holds");
        let lost = (0..2 * PAGE).find(|at| *at != STORED_AT && found[*at] != b'n');
        assert_eq!(lost, None, "round {round}: the write is lost from this byte on");
        // Had the page been written back before the write, the store would be the earlier one.
        stores_seen += usize::from(found[STORED_AT] == b's');
    }
    assert!(stores_seen > 0, "no store was left to be written back after the write");
}
