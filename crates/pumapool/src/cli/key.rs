//! The options of `pumapool key`.

use std::path::PathBuf;

/// Options of `key`.
#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(clap::Subcommand)]
pub enum Command {
    /// Make a new key, in a file that only you can read.
    New {
        /// The file; it must not exist yet.
        file: PathBuf,
    },
}
