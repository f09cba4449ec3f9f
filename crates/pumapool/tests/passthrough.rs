//! A file that is only read in long streams is passed through, although there is a lender.

mod setup;

use setup::{Lender, Mount, can_run, write_pages};
use std::fs;
use testbed::Scratch;

const PAGES: usize = 12_000;

#[test]
fn files_that_are_streamed_over_and_over_are_left_to_the_kernel() {
    let test = "files_that_are_streamed_over_and_over_are_left_to_the_kernel";
    if !can_run(test) {
        return;
    }
    let scratch = Scratch::new(test).unwrap();
    let (source, at) = (scratch.directory("source").unwrap(), scratch.directory("mount").unwrap());
    // Little: with more, what is evicted last would fit, as all of it is evicted at once.
    let lender = Lender::start(scratch.path(), "2MiB", &[]);
    let bytes = write_pages(&source.join("a"), PAGES, 1);
    let mount = Mount::start(&source, &at, &["--lender", &lender.address, "--filter", "on"]);
    if !fuse_passes(&mount) {
        return testbed::skip(test, "no FUSE passthrough (Linux 6.9)");
    }
    let count = |number: fn(&report::Files) -> u64| number(&mount.status().mount);
    let path = at.join("a");
    for pass in 0..2 {
        assert_eq!(count(|of| of.passed_opens), 0, "pass {pass}");
        assert!(fs::read(&path).unwrap() == bytes);
        mount.evict_seen(&path);
    }
    let read = count(|of| of.read_bytes);
    assert!(fs::read(&path).unwrap() == bytes);
    assert!(count(|of| of.passed_opens) > 0 && count(|of| of.read_bytes) == read);
    // Changed beside the mount, and through it.
    let mut bytes = bytes;
    bytes[..5].copy_from_slice(b"other");
    fs::write(source.join("a"), &bytes).unwrap();
    assert!(fs::read(&path).unwrap() == bytes);
    bytes.truncate(100);
    fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    assert!(fs::read(&path).unwrap() == bytes);
}

/// Whether the kernel can, as far as can be seen from outside.
fn fuse_passes(mount: &Mount) -> bool {
    os::kernel::version() >= (6, 9) && mount.status().write == report::Write::Through
}
