//! The exit codes of the command. The man pages and docs/user/packaging.md repeat [`CODES`]. 0
//! means success, as in Rust.

/// The command has failed, and has printed the reason in one line.
pub const FAILURE: u8 = 1;
/// The command line is wrong.
pub const USAGE: u8 = 2;
/// As mount(8)'s helper: the mount failed, or the options are wrong (mount(8)'s own code).
pub const MOUNT: u8 = 32;
/// Added to the number of a second signal.
pub const SIGNALLED: i32 = 128;
/// Internal: a daemon tells its supervisor with this code that it has left its mount to a
/// successor.
pub const HANDED_OVER: u8 = 75;

/// The codes for users, with their meanings.
pub const CODES: [(&str, &str); 5] = [
    ("0", "Done. A daemon: it serves in the background, or has ended in order."),
    ("1", "Not done: one line on standard error says why, and what to do."),
    ("2", "The command line is wrong, and names no configuration file."),
    ("32", "As mount(8)'s helper: not mounted; one line says why."),
    ("128+n", "Ended at once, by a second signal of number n."),
];
