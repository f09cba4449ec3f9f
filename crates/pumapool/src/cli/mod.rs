//! The command line: values of options, calls by mount(8), and exit codes. No I/O. Each command
//! declares its own options.

pub mod addresses;
pub mod exit;
pub mod mount_helper;
pub mod size;
pub mod written;
