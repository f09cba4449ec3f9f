//! `pumapool`: one file per subcommand, each a thin layer over the crate that does the work.
#![allow(rustdoc::broken_intra_doc_links)] // the options' comments are help texts, in which brackets are brackets

mod allocator;
mod confine;
mod control;
mod daemon;
mod doctor;
mod fdstore;
mod generate;
mod host_cache;
mod join;
mod joined;
mod keeper;
mod kept;
mod key;
mod lend;
mod lenders;
mod log;
mod metrics;
mod mount;
mod numa;
mod pool;
mod role;
mod security;
mod size;
mod status;
mod top;
mod umount;
mod upgrade;

use clap::{Parser, Subcommand};
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Keeps the page-cache pages that this machine evicts in the idle memory of others.
#[derive(Parser)]
#[command(name = "pumapool", version, max_term_width = 100)]
struct Cli {
    /// What to log: error, warn, info, debug, trace, or a filter like `borrower=debug`.
    #[arg(long, global = true, default_value = "info", env = "PUMAPOOL_LOG", value_name = "LEVEL")]
    log: String,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lend this machine's idle memory.
    Lend(lend::Options),
    /// Mount a directory so that what its page cache evicts is kept by a lender.
    Mount(mount::Options),
    /// Do both by need: lend while this machine's memory is idle, and borrow while its mounts evict.
    Join(join::Options),
    /// Have a node that has joined lend, or borrow, or do what it needs.
    Role(role::Options),
    /// Fill a host's page cache with what its virtual machines evict.
    HostCache(host_cache::Options),
    /// Show on which NUMA nodes memory is, and place it.
    Numa(numa::Options),
    /// Unmount what `mount` has mounted.
    Umount(umount::Options),
    /// Have another program, such as a newer version, serve a mount that is in use.
    Upgrade(upgrade::Options),
    /// Make the key that all machines of a pool share.
    Key(key::Options),
    /// Show what the lenders and mounts of this machine are doing.
    Status(status::Options),
    /// Show live what they do: hit ratio, latencies, lenders, reclaim, roles.
    Top(top::Options),
    /// Print or serve the numbers of all daemons of this machine, for Prometheus.
    Metrics(metrics::Options),
    /// Say what this kernel and your rights allow, what will be used, and how to get the rest.
    Doctor(doctor::Options),
    /// Write what is made from the code.
    #[command(hide = true)]
    Generate(generate::Options),
}

fn main() -> ExitCode {
    allocator::give_large_buffers_back();
    let cli = Cli::parse();
    // What chitchat has to say of single datagrams, our own lines say better; `chitchat=LEVEL` shows it all the same.
    let wanted = match &cli.command {
        // A line of the log would be in the midst of the screen.
        Command::Top(options) if options.takes_terminal() => "off",
        _ => &cli.log,
    };
    let filter = match EnvFilter::try_new(format!("chitchat=off,{wanted}")) {
        Ok(filter) => filter,
        Err(error) => return fail(&anyhow::anyhow!("--log {}: {error}", cli.log)),
    };
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| log::Stderr)
        .with_ansi(colours)
        .with_target(false)
        // A log that cannot be written is no reason to stop: without this, the complaint about it would panic in turn.
        .log_internal_errors(false)
        .init();
    let result = match cli.command {
        Command::Lend(options) => lend::run(options),
        Command::Mount(options) => mount::run(options),
        Command::Join(options) => join::run(options, &cli.log),
        Command::Role(options) => role::run(&options),
        Command::HostCache(options) => host_cache::run(options),
        Command::Numa(options) => numa::run(options),
        Command::Umount(options) => umount::run(&options),
        Command::Upgrade(options) => upgrade::run(&options),
        Command::Key(options) => key::run(&options),
        Command::Status(options) => status::run(&options),
        Command::Top(options) => top::run(&options),
        Command::Metrics(options) => metrics::run(&options),
        Command::Generate(options) => generate::run(&options),
        Command::Doctor(options) => doctor::run(&options),
    };
    match result {
        Ok(code) => code,
        Err(error) => fail(&error),
    }
}

/// One line, with what led to what.
fn fail(error: &anyhow::Error) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "pumapool: {}", format!("{error:#}").replace('\n', " "));
    ExitCode::FAILURE
}
