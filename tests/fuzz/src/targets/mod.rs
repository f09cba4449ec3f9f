//! The list of targets.

mod borrower;
mod discovery;
mod fuse;
mod host;
mod lender;
mod mount;
mod tap;
mod wire;

/// A place where bytes are decoded.
pub struct Target {
    /// Its name on the command line, and its file in `corpus/`.
    pub name: &'static str,
    /// The origin of the bytes, and their decoder.
    pub about: &'static str,
    /// The maximum length of an input in bytes: enough for everything that the format can express,
    /// not more.
    pub input_bytes_max: usize,
    /// Decodes an input. A panic is a finding.
    pub run: fn(&[u8]),
    /// The first inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All of them.
pub static TARGETS: &[Target] = &[
    wire::HEADER,
    wire::ADDRESS,
    lender::FRAMES,
    lender::CONNECTIONS,
    lender::UNAUTHENTICATED,
    borrower::ANSWERS,
    borrower::GETS,
    fuse::REQUESTS,
    tap::RECORDS,
    tap::RING,
    tap::CALIBRATION,
    host::MEMORY_FILES,
    host::PROC_FILES,
    host::SIZES,
    host::STATUS,
    mount::HANDED_OVER,
    discovery::MESSAGES,
    discovery::DATAGRAMS,
];

/// The target of that name.
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Takes `count` bytes from the front, or all that are left.
fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (front, rest) = bytes.split_at(count.min(bytes.len()));
    *bytes = rest;
    front
}

/// The next number of an input, in little-endian; missing bytes are zero.
fn number(bytes: &mut &[u8], byte_count: usize) -> u64 {
    take(bytes, byte_count).iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
