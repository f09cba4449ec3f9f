//! Mounts a directory with a borrower that has no lenders: for trying file-system test suites on the pass-through alone.
//!
//! `cargo run -p mount --example passthrough -- SOURCE MOUNTPOINT [through|back] [INODE_DESCRIPTORS_MAX]`, ended by `umount MOUNTPOINT`.

use mount::{Config, Mount, WriteMode};
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [source, mountpoint, rest @ ..] = &arguments[..] else {
        eprintln!("usage: passthrough SOURCE MOUNTPOINT [through|back] [INODE_DESCRIPTORS_MAX]");
        return ExitCode::from(2);
    };
    let mut config = Config::new(source, mountpoint);
    if rest.first().is_some_and(|mode| mode == "back") {
        config.write = WriteMode::Back;
    }
    config.inode_descriptors_max = rest.get(1).and_then(|max| max.parse().ok());
    match Mount::start(config, |_| Arc::new(borrower::Borrower {})) {
        Ok(mount) => {
            println!("mounted");
            mount.wait();
            println!("{:#?}", mount.status());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
