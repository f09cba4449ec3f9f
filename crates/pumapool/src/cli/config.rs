//! The options of `pumapool config`.

use std::path::PathBuf;

/// Options of `config`.
#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    pub what: What,
}

#[derive(clap::Subcommand)]
pub enum What {
    /// Check a configuration file, and exit with an error if it is wrong.
    Check(CheckOptions),
}

/// Options of `config check`.
#[derive(clap::Args)]
pub struct CheckOptions {
    /// The file.
    pub file: PathBuf,

    /// Command that reads the file, such as `lend` or `host-cache guest` [default: the value of
    /// `command` in the file].
    #[arg(long, value_name = "COMMAND")]
    pub command: Option<String>,
}
