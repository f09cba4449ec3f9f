//! The options of `pumapool umount`.

use std::path::PathBuf;

/// Options of `umount`.
#[derive(clap::Args)]
pub struct Options {
    /// The mountpoint.
    #[arg(required_unless_present = "all")]
    pub mountpoint: Option<PathBuf>,

    /// Unmount all mounts that this program has made. Mounts in use stay.
    #[arg(long, conflicts_with = "mountpoint")]
    pub all: bool,

    /// Unmount now, even if the mount is in use. Programs keep their open files, and the daemon
    /// ends when the last one is closed.
    #[arg(long)]
    pub lazy: bool,
}
