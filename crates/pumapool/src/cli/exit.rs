//! With which codes the command ends: the one place that says so. The man pages and
//! docs/user/packaging.md repeat [`CODES`]. 0 is Rust's.

/// It has not, and has said why in one line.
pub const FAILURE: u8 = 1;
/// The command line is wrong.
pub const USAGE: u8 = 2;
/// As mount(8)'s helper: it could not be mounted, or the options are wrong (mount(8)'s own code).
pub const MOUNT: u8 = 32;
/// Of a second signal: 128 and its number.
pub const SIGNALLED: i32 = 128;
/// Not seen outside: with this one a daemon tells its keeper that it has left its mount to a
/// successor.
pub const HANDED_OVER: u8 = 75;

/// For users.
pub const CODES: [(&str, &str); 5] = [
    ("0", "Done. A daemon: it serves in the background, or has ended in order."),
    ("1", "Not done: one line on standard error says why, and what to do."),
    ("2", "The command line is wrong, and names no configuration file."),
    ("32", "As mount(8)'s helper: not mounted; one line says why."),
    ("128+n", "Ended at once, by a second signal of number n."),
];
