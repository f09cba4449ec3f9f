//! The commands: one file or folder each, a thin layer over the crate that does the work.

pub mod advise;
pub mod config;
pub mod doctor;
pub mod generate;
pub mod guests;
pub mod host_cache;
pub mod join;
pub mod joined;
pub mod key;
pub mod lend;
pub mod metrics;
pub mod mount;
pub mod numa;
pub mod picture;
pub mod role;
pub mod status;
pub mod top;
pub mod umount;
pub mod upgrade;
