//! `pumapool key`: the key of a pool.

use anyhow::Result;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use wire::key::PoolKey;

/// Options of `key`.
#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Make a new key, in a file that only you can read.
    New {
        /// The file; it must not exist yet.
        file: PathBuf,
    },
}

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let Command::New { file } = &options.command;
    PoolKey::create(file)?;
    // The key is made, even if nobody reads the output.
    let _ = writeln!(
        std::io::stdout(),
        "{} holds a new key: copy it, with mode 600, to every machine of the pool, and give it to `lend` and `mount` with --key",
        file.display()
    );
    Ok(ExitCode::SUCCESS)
}
