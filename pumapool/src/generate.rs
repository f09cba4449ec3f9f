//! `pumapool generate`: what is written from the code. For those who carry on, hence hidden.

use crate::metrics::reference;
use anyhow::Result;
use std::io::Write;
use std::process::ExitCode;

/// Options of `generate`.
#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// docs/metrics.md.
    Metrics {
        /// The same for programs.
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    match options.what {
        What::Metrics { json: true } => writeln!(out, "{}", reference::json())?,
        What::Metrics { json: false } => out.write_all(reference::markdown().as_bytes())?,
    }
    Ok(ExitCode::SUCCESS)
}
