//! `pumapool key`: the key of a pool.

use crate::cli::key::{Command, Options};
use anyhow::Result;
use std::io::Write;
use std::process::ExitCode;
use wire::key::PoolKey;

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
