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
use clap::{CommandFactory, Parser, Subcommand};
use cli::{exit, mount_helper};
use commands::{
    advise, doctor, generate, host_cache, join, key, lend, mount, numa, role, status, top, umount, upgrade,
};
use config::{CommandLine, Merged};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;

/// Stores page-cache pages that this machine evicts in the idle memory of other machines.
#[derive(Parser)]
#[command(name = "pumapool", version, max_term_width = 100)]
struct Cli {
    /// Log level: error, warn, info, debug, trace, or a filter like `borrower=debug`.
    #[arg(long, global = true, default_value = "info", env = "PUMAPOOL_LOG", value_name = "LEVEL", value_parser = log::level)]
    log: String,

    /// For daemons: take options from this file (TOML), by their long names. Options of the command
    /// line override it. On SIGHUP the daemon reads it again.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(subcommand)]
    command: Command,
}

impl CommandLine for Cli {
    fn merged(&self) -> Merged {
        // A command that is not a daemon is never passed on to a child process.
        Merged { log: self.log.clone(), command: serde_json::to_value(&self.command).unwrap_or_default() }
    }

    fn from_merged(Merged { log, command }: Merged, config: Option<PathBuf>) -> Result<Cli> {
        Ok(Cli { log, config, command: serde_json::from_value(command)? })
    }
}

#[derive(Subcommand, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Command {
    /// Lend this machine's idle memory.
    Lend(lend::Options),
    /// Mount a directory, and store the pages that its page cache evicts at lenders.
    Mount(mount::Options),
    /// Lend while this machine's memory is idle, and borrow while its mounts evict.
    Join(join::Options),
    /// Make a node of a pool lend, borrow, or choose by itself.
    #[serde(skip)]
    Role(role::Options),
    /// Store pages that virtual machines evict in the page cache of their host.
    HostCache(host_cache::Options),
    /// Watch a directory under its normal load, and estimate whether Puma would help; or with
    /// --lend, how much this machine could lend.
    #[serde(skip)]
    Advise(advise::Options),
    /// Show on which NUMA nodes memory is, and place it.
    Numa(numa::Options),
    /// Unmount a directory that `mount` has mounted.
    #[serde(skip)]
    Umount(umount::Options),
    /// Let another program, such as a newer version, serve a mount that is in use.
    #[serde(skip)]
    Upgrade(upgrade::Options),
    /// Make the key that all machines of a pool share.
    #[serde(skip)]
    Key(key::Options),
    /// Check configuration files.
    #[serde(skip)]
    Config(commands::config::Options),
    /// Show the state of the lenders and mounts of this machine.
    #[serde(skip)]
    Status(status::Options),
    /// Show hit ratios, latencies, lenders, reclaim and roles live.
    #[serde(skip)]
    Top(top::Options),
    /// Print or serve the metrics of all daemons of this machine, for Prometheus.
    #[serde(skip)]
    Metrics(commands::metrics::Options),
    /// Check what this kernel and your rights allow, and say how to get the rest.
    #[serde(skip)]
    Doctor(doctor::Options),
    /// Make man pages, shell completions and references from the code.
    #[command(hide = true)]
    #[serde(skip)]
    Generate(generate::Options),
}

fn main() -> ExitCode {
    c_library::set_up();
    match config::passed::<Cli>() {
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
    match config::begin::<Cli>(arguments, false) {
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
