//! The options of `pumapool generate`.

use clap_complete::Shell;
use std::path::PathBuf;

/// Options of `generate`.
#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    pub what: What,
}

#[derive(clap::Subcommand)]
pub enum What {
    /// Write a man page for the command, and one for each subcommand.
    Man {
        /// The directory, which is there.
        folder: PathBuf,
    },
    /// Print docs/user/options.md.
    Options,
    /// Print docs/user/metrics.md.
    Metrics,
    /// Print what makes a shell complete the command.
    Completions {
        /// Which shell.
        shell: Shell,
    },
}
