//! The options of `pumapool upgrade`.

use std::path::PathBuf;

/// Options of `upgrade`.
#[derive(clap::Args)]
pub struct Options {
    /// The mountpoint.
    #[arg(required_unless_present = "all")]
    pub mountpoint: Option<PathBuf>,

    /// Upgrade all mounts that the program at this path has made, also before it was replaced.
    #[arg(long, conflicts_with = "mountpoint")]
    pub all: bool,

    /// The program that serves the mount from now on [default: this program].
    #[arg(long, value_name = "FILE")]
    pub binary: Option<PathBuf>,
}
