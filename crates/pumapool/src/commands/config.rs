//! `pumapool config`: checks configuration files.

use crate::cli::config::{CheckOptions, Options, What};
use crate::config::file::{self, ConfigFile};
use crate::config::{one_line, read};
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

/// Runs the command; `root` is clap's built description of all commands.
pub fn run(options: &Options, root: &clap::Command) -> Result<ExitCode> {
    let What::Check(CheckOptions { file: path, command }) = &options.what;
    let text = read(path)?;
    let config = ConfigFile { path, text: &text };
    let Some(command) = command.clone().map(Ok).or_else(|| config.command().transpose()).transpose()? else {
        bail!("{}: name the command that reads it, by a line command = \"lend\" or by --command", path.display());
    };
    config.require_daemon(root, &command)?;
    let given: Vec<OsString> = ["pumapool"].into_iter().chain(command.split_whitespace()).map(OsString::from).collect();
    let arguments = file::expand(root, &given, &config)?;
    let checked = root.clone().try_get_matches_from(arguments).map_err(|error| one_line(&error));
    checked.with_context(|| format!("{}", path.display()))?;
    writeln!(std::io::stdout(), "{} is good for `pumapool {command}`", path.display())?;
    Ok(ExitCode::SUCCESS)
}
