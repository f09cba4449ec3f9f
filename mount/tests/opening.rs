//! What an open shows of changes beside the mount: all of them, however slow they are, and to whatever end the file has.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use support::late::{LateMemory, PAGE};
use support::*;

/// The kernel moves the times of a file before its bytes: who opens the file in between sees the times that it has afterwards, too.
#[test]
fn a_change_beside_that_was_under_way_is_seen_by_whoever_opens_the_file_after_it() {
    let test = "a_change_beside_that_was_under_way_is_seen_by_whoever_opens_the_file_after_it";
    if !can_mount(test) {
        return;
    }
    let m = Mounted::through();
    for is_open_before in [true, false] {
        let Some(memory) = LateMemory::new(b'n') else { return skip(test, "no userfaultfd") };
        let name = format!("a{is_open_before}");
        fs::write(m.below(&name), [b'o'; 2 * PAGE]).unwrap();
        if is_open_before {
            assert_eq!(fs::read(m.path(&name)).unwrap(), [b'o'; 2 * PAGE]);
        }
        std::thread::scope(|scope| {
            let writer = File::options().write(true).open(m.below(&name)).unwrap();
            let memory = &memory;
            let write = scope.spawn(move || writer.write_all_at(memory.bytes(), 0).unwrap());
            memory.wait();
            // Twice, as there may be something to be dropped of what the first one has read.
            for _ in 0..2 {
                assert_eq!(fs::read(m.path(&name)).unwrap().len(), 2 * PAGE);
            }
            memory.come(b'n');
            write.join().unwrap();
        });
        for nth in 0..5 {
            let read = fs::read(m.path(&name)).unwrap();
            assert_eq!((read[0], read[PAGE]), (b'n', b'n'), "{name}, open {nth}");
        }
    }
}
