//! The command line: its commands, with their options, as structures that clap fills; the values of
//! options; calls by mount(8); and exit codes. No I/O.
//!
//! Each command has a file. [`daemon`], [`pool`] and [`security`] have the options that several
//! commands share.

pub mod addresses;
pub mod advise;
pub mod cgroups;
pub mod config;
pub mod daemon;
pub mod doctor;
pub mod exit;
pub mod generate;
pub mod host_cache;
pub mod join;
pub mod key;
pub mod lend;
pub mod metrics;
pub mod mount;
pub mod mount_helper;
pub mod numa;
pub mod pool;
pub mod role;
pub mod security;
pub mod size;
pub mod status;
pub mod top;
pub mod umount;
pub mod upgrade;
pub mod written;

use crate::log;
use clap::{CommandFactory, Parser, Subcommand};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Stores page-cache pages that this machine evicts in the idle memory of other machines.
#[derive(Parser)]
#[command(name = "pumapool", version, max_term_width = 100)]
pub struct Cli {
    /// Log level: error, warn, info, debug, trace, or a filter like `borrower=debug`.
    #[arg(long, global = true, default_value = "info", env = "PUMAPOOL_LOG", value_name = "LEVEL", value_parser = log::level)]
    pub log: String,

    /// For daemons: take options from this file (TOML), by their long names. Options of the command
    /// line override it. On SIGHUP the daemon reads it again.
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,

    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// clap's description of all commands, with inherited options.
    pub fn built() -> clap::Command {
        let mut root = Cli::command();
        root.build();
        root
    }
}

#[derive(Subcommand, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Command {
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
    Config(config::Options),
    /// Show the state of the lenders and mounts of this machine.
    #[serde(skip)]
    Status(status::Options),
    /// Show hit ratios, latencies, lenders, reclaim and roles live.
    #[serde(skip)]
    Top(top::Options),
    /// Print or serve the metrics of all daemons of this machine, for Prometheus.
    #[serde(skip)]
    Metrics(metrics::Options),
    /// Check what this kernel and your rights allow, and say how to get the rest.
    #[serde(skip)]
    Doctor(doctor::Options),
    /// Make man pages, shell completions and references from the code.
    #[command(hide = true)]
    #[serde(skip)]
    Generate(generate::Options),
}
