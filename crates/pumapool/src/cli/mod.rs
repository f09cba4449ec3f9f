//! The language of the command line: what options take, how mount(8) calls, and the exit codes. No
//! I/O. The options themselves stand beside the commands that they are of.

pub mod addresses;
pub mod exit;
pub mod mount_helper;
pub mod size;
