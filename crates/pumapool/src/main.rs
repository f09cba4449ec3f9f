//! `pumapool`: one file per subcommand, each a thin layer over the crate that does the work.
#![allow(rustdoc::broken_intra_doc_links)] // the options' comments are help texts, in which brackets are brackets

mod c_library;
mod cli;
mod commands;
mod config;
mod daemon;
mod log;
mod metrics;
mod supervisor;

use anyhow::{Context, Result};
use clap::CommandFactory;
use cli::{Cli, Command, exit, mount_helper};
use commands::{
    advise, doctor, generate, host_cache, join, key, lend, mount, numa, role, status, top, umount, upgrade,
};
use std::ffi::OsString;
use std::fs::File;
use std::process::ExitCode;

fn main() -> ExitCode {
    c_library::set_up();
    match config::passed() {
        Ok(None) => {}
        Ok(Some(cli)) => return run(cli, exit::FAILURE),
        Err(error) => return fail(&error, exit::FAILURE),
    }
    let arguments: Vec<OsString> = std::env::args_os().collect();
    if mount_helper::is_called(&arguments) {
        return match help_mount(&arguments) {
            Ok(None) => ExitCode::SUCCESS,
            Ok(Some(cli)) => run_silently(cli),
            Err(error) => fail(&error, exit::MOUNT),
        };
    }
    match config::begin(arguments, false) {
        Ok(cli) => run(cli, exit::FAILURE),
        Err(error) => fail(&error, exit::FAILURE),
    }
}

/// Interprets a call by mount(8). Returns `None` if nothing is left to do: mount(8) only checked
/// the call (`-f`), or it changed flags of a mount.
fn help_mount(arguments: &[OsString]) -> Result<Option<Cli>> {
    let root = Cli::built();
    let mount = root.find_subcommand("mount").context("there is no `pumapool mount`")?;
    let wanted = mount_helper::wanted(mount, arguments)?;
    if let Some(remount) = wanted.remount {
        if !wanted.fake {
            ::mount::remount(&remount.mountpoint, remount.forbids, remount.permits)?;
        }
        return Ok(None);
    }
    let cli: Cli = config::begin(wanted.arguments, true)?;
    if matches!(&cli.command, Command::Mount(options) if options.is_in_foreground()) {
        // From a configuration file.
        return Err(mount_helper::refused("foreground"));
    }
    Ok((!wanted.fake).then_some(cli))
}

/// Runs a command for mount(8), without output on success.
fn run_silently(cli: Cli) -> ExitCode {
    let silent = File::options().write(true).open("/dev/null").context("cannot open /dev/null");
    match silent.and_then(|silent| rustix::stdio::dup2_stdout(silent).context("cannot be silent")) {
        Ok(()) => run(cli, exit::MOUNT),
        Err(error) => fail(&error, exit::MOUNT),
    }
}

/// Runs a command. If it fails, `failure` is the exit code.
fn run(cli: Cli, failure: u8) -> ExitCode {
    // A log line would overwrite a part of the screen.
    let takes_terminal = matches!(&cli.command, Command::Top(options) if options.takes_terminal());
    if let Err(error) = log::begin(if takes_terminal { "off" } else { &cli.log }) {
        return fail(&error, failure);
    }
    let result = match cli.command {
        Command::Lend(options) => lend::run(options),
        Command::Mount(options) => mount::run(options),
        Command::Join(options) => join::run(options, &cli.log),
        Command::Role(options) => role::run(&options),
        Command::HostCache(options) => host_cache::run(options),
        Command::Advise(options) => advise::run(&options),
        Command::Numa(options) => numa::run(options),
        Command::Umount(options) => umount::run(&options),
        Command::Upgrade(options) => upgrade::run(&options),
        Command::Key(options) => key::run(&options),
        Command::Config(options) => commands::config::run(&options, &Cli::built()),
        Command::Status(options) => status::run(&options),
        Command::Top(options) => top::run(&options),
        Command::Metrics(options) => commands::metrics::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Generate(options) => generate::run(&options, &Cli::command()),
    };
    match result {
        Ok(code) if code == ExitCode::FAILURE => ExitCode::from(failure), // the command has printed the reason
        Ok(code) => code,
        Err(error) => fail(&error, failure),
    }
}

fn fail(error: &anyhow::Error, code: u8) -> ExitCode {
    log::complain(error);
    ExitCode::from(code)
}
